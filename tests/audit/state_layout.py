"""The tables of the study of state layouts, computed once more from the recorded rows.

Variants are told apart by what their options say where that is enough, not by the lab's lists of names.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import pandas as pd
from common import (
    RATIO,
    Params,
    Sentences,
    Tables,
    cases,
    compare,
    counted,
    facts,
    faster,
    gains,
    geometric_mean,
    least,
    pick,
    span,
    table,
    times,
    usable,
)  # fmt: skip

STUDY = "state_layout"
SHAPE = ["model", "HV", "K", "state", "batch"]
CASE = ["gate", "state", "batch", "draft", "T", "prefill"]
RELEASED = ["gate", "state", "batch", "draft", "prefill"]
TILES, WARPS = (8, 16, 32), (1, 2, 4)
IN_PLACE = "in-place multiply"
OURS, OURS_KV, OURS_IN_ORDER, TOKENS = "ours VK", "ours KV", "ours VK, slots in order", "decode, token by token"
OWN = {  # whose code -> its last release before the change of layout, and the first with it
    "SGLang": ("sglang 0.5.9 KV", "sglang 0.5.10rc0 VK"),
    "vLLM": ("vllm 0.15.1 KV", "vllm 0.16.0 VK"),
    "vLLM, layout alone": ("vllm 0.15.1 KV", "vllm 0.16.0 VK, layout alone"),
}
OPERATIONS = ["step", "verify", "extend", "chunk_state", "drift"]  # of one number of heads
NEXT, NEXT_HALF = "Qwen3-Next-80B-A3B", "Qwen3.5-0.8B"  # the latter has the value heads of half of the former
BATCHES, CONTEXTS = (1, 16, 64, 256, 1024), (256, 2048, 8192)  # of vLLM's table; contexts that are tried
PUBLISHED = (0.9, -1.2, -1.0, 1.4, 4.8)  # percent of tokens a second, of that table
BF16, NVFP4 = 2.0, 0.5625  # bytes of a weight: 16 values of half a byte share a scale of one
FULL = 64  # sequences that fill every GPU
PEAK = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}  # FLOP/s of bf16, by data sheet


# The grid of tiles


def times_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Every usable row of the grid: µs, percent of the in-place multiply of the same case, TB/s."""
    found = []
    for cache, params, group in _grid(rows):
        known = times(group)
        for name, row in usable(group).items():
            if row["role"] != "control":
                line = {"cache": cache, "variant": name, "us": known[name], "predicted_us": row["predicted_us"]}
                line |= {"percent": 100 * known[IN_PLACE] / known[name] if IN_PLACE in known else math.nan}
                found.append(line | {"tbs": row["floor_bytes"] / known[name] / 1e6} | pick(params, SHAPE))
    return table(found, ["cache", *SHAPE, "variant", "us", "percent", "tbs", "predicted_us"])


def _grid(rows: pd.DataFrame) -> Iterator[tuple[str, Params, list[dict[str, Any]]]]:
    for cache in ("cold", "hot"):
        for params, group in cases(rows, "decode", cache):
            yield cache, params, group


def _points(group: Sequence[Mapping[str, Any]]) -> dict[tuple, str]:
    """(layout, tile, warps, folded) -> variant, of those that spill no registers."""
    found = {}
    for row in group:
        chosen = row["chosen"]
        if "repeats" not in chosen and "layout" in chosen and not facts(row["evidence"]).get("spill_bytes", 0):
            found[chosen["layout"], chosen["BV"], chosen["warps"], chosen["folded"]] = row["variant"]
    return found


def ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """[K, V] over [V, K] at equal tile and warps, neither of which spills."""
    found = []
    for cache, params, group in _grid(rows):
        known = _points(group)
        for tile, warps in product(TILES, WARPS):
            pair = known.get(("VK", tile, warps, False)), known.get(("KV", tile, warps, False))
            if None not in pair and (line := compare(group, *pair)):
                found.append(pick(params, SHAPE) | {"cache": cache, "BV": tile, "warps": warps} | line)
    return table(found, ["cache", *SHAPE, "BV", "warps", *RATIO, "runs"])


def folding(rows: pd.DataFrame) -> pd.DataFrame:
    """Two passes over the tile over one, V-first, one warp; spilling or not."""
    found = []
    for cache, params, group in _grid(rows):
        for tile in TILES:
            name = f"VK BV={tile}, 1 warp"
            if line := compare(group, f"{name}, folded", name):
                found.append(pick(params, SHAPE) | {"cache": cache, "BV": tile} | line)
    return table(found, ["cache", *SHAPE, "BV", *RATIO])


def tile_or_layout(rows: pd.DataFrame) -> pd.DataFrame:
    """K-first with a tile of 32 over V-first with one of 8, one warp; spilling or not."""
    found = []
    for cache, params, group in _grid(rows):
        us = times(group)
        if line := compare(group, "VK BV=8, 1 warp", "KV BV=32, 1 warp"):
            line |= {"us": us["VK BV=8, 1 warp"], "against us": us["KV BV=32, 1 warp"]}
            found.append(pick(params, SHAPE) | {"cache": cache} | line)
    return table(found, ["cache", *SHAPE, "us", "against us", *RATIO])


def best(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest of each layout against each other, spilling and folded ones apart."""
    found = []
    for cache, params, group in _grid(rows):
        known, us = _points(group), times(group)
        kv, vk = (
            least(us, [name for (layout, *_, folded), name in known.items() if layout == wanted and not folded])
            for wanted in ("KV", "VK")
        )
        if kv and vk:
            line = compare(group, vk, kv)
            line |= {"best KV": kv, "KV µs": us[kv], "best VK": vk, "VK µs": us[vk]}
            found.append(pick(params, SHAPE) | {"cache": cache} | line)
    return table(found, ["cache", *SHAPE, "best KV", "KV µs", "best VK", "VK µs", *RATIO, "runs"])


def state_access(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each kernel, the load that moves most bytes: lines and sectors of a request."""
    found: dict[tuple, dict[str, Any]] = {}
    for row in rows[(rows["op"] == "decode") & rows["ok"] & (rows["role"] != "control")].to_dict("records"):
        loads = [one for one in facts(row["evidence"]).get("accesses", ()) if one["kind"] == "load"]
        if "layout" not in row["chosen"] or not loads:
            continue
        most = sorted(loads, key=lambda one: -one["bytes_used"])[0]
        line = pick(row["params"] | row["chosen"], ["K", "state", "layout", "BV", "warps", "folded"])
        line |= {name: value for name, value in most.items() if not isinstance(value, str)}
        before = found.setdefault((*line.values(),)[:6], line)
        assert before == line, f"{row['variant']}: its requests differ from case to case"
    return pd.DataFrame(found.values())


# A whole decode step


def _step_bytes(model: str, batch: int, context: int, weight_bytes: float) -> tuple[float, float]:
    """Bytes of the recurrent states in one decode step, and all bytes. Models: from their config files and cards."""
    per_token = 2 * 2.0 * context  # key and value, bf16
    if model == NEXT:  # 48 layers, 36 of them recurrent; 512 experts of 3 x 2048 x 512 in each, 10 of them chosen
        expert, every = 3 * 2048 * 512 * 48, 80e9
        chosen = 512 * (1 - (1 - 10 / 512) ** batch)  # distinct ones, were they chosen at random
        layers, heads, weights, cache = 36, 32, every - (512 - chosen) * expert, 12 * 2 * 256 * per_token
    else:  # Qwen3.5-4B: 32 layers, 24 of them recurrent
        ffn = 2560 * 2 * 9216 + 9216 * 2560
        recurrent = 2560 * (12288 + 32 + 32) + 4096 * 2560 + ffn
        attention = 2560 * (8192 + 1024 + 1024) + 4096 * 2560 + ffn
        weights = 24 * recurrent + 8 * attention + 248320 * 2560
        layers, heads, cache = 24, 32, 8 * 4 * 256 * per_token
    states = batch * layers * heads * 128 * 128 * 4 * 2  # fp32, read and written
    return states, states + batch * cache + weights * weight_bytes


def step_gain(
    rows: pd.DataFrame, tile: int | None, model: str = NEXT, context: int = 2048, weight_bytes: float = BF16,
    batches: Sequence[int] = (), heads_of: str = NEXT,
) -> pd.DataFrame:  # fmt: skip
    """What a decode step gains, in percent, if its states move as in the timed kernel and all else at the ceiling.

    tile: of the simple kernel; None: SGLang's own step.
    """
    timed = _by_batch(rows, tile, heads_of)
    found = []
    for batch in batches or sorted(timed):
        of = max((one for one in timed if one <= batch), default=None)
        if of is None:
            continue
        line, slowness = timed[of]
        state, whole = _step_bytes(model, batch, context, weight_bytes)
        share = state * slowness / (state * slowness + whole - state)
        said = {"batch": batch, "ratio of batch": of, "share %": 100 * share, "kernel KV / VK": line["ratio"]}
        for name, shown in (("ratio", "gain %"), ("low", "low %"), ("high", "high %")):
            said |= _each(line, name, shown, lambda ratio, part=share: _gain(ratio, part))
        said |= _each(line, "noise", "noise", lambda noise, part=share: part * noise)
        found.append(said | pick(line, ["verdict", "runs"]))
    columns = ["batch", "ratio of batch", "share %", "kernel KV / VK", "verdict", "gain %", "low %", "high %"]
    return table(found, [*columns, "noise", "runs"])


def _gain(ratio: float, share: float) -> float:
    """Percent more steps, when this share of the old time becomes `ratio` times faster."""
    return 100 * (1 / (1 - share + share / ratio) - 1)


def _each(line: Mapping[str, Any], name: str, shown: str, change: Callable[[float], float]) -> dict[str, float]:
    """A column and its tolerance under another name, changed by a function that grows."""
    return {shown + end: change(line[name + end]) for end in ("", " from", " to") if name + end in line}


def _by_batch(rows: pd.DataFrame, tile: int | None, model: str) -> dict[int, tuple[dict[str, Any], float]]:
    """Batch -> the comparison of both layouts in fp32, and how many times the in-place multiply's time [K, V] takes."""
    found = {}
    op, wanted = ("decode", {}) if tile else ("step", {"gate": "GDN"})
    for params, group in cases(rows, op, model=model, state="fp32", **wanted):
        known = _points(group)
        pair = (known.get(("VK", tile, 1, False)), known.get(("KV", tile, 1, False))) if tile else OWN["SGLang"][::-1]
        if line := compare(group, *pair) if None not in pair else {}:
            us = times(group)
            found[params["batch"]] = line, us[pair[1]] / us[IN_PLACE] if IN_PLACE in us else 1.0
    return found


GAINS = [  # the pages' and claims' own ways are in `shares`, `vllm_estimate` and `decode`
    {"tile": 8},
    {"tile": 32, "context": 256, "weight_bytes": NVFP4, "heads_of": NEXT_HALF},
    {"tile": None, "batches": BATCHES},
    {"tile": None, "context": 2048, "weight_bytes": NVFP4, "batches": BATCHES},
]


def end_to_end_estimate(rows: pd.DataFrame) -> pd.DataFrame:
    """The gain of a step in each way of `GAINS`."""
    return pd.concat([step_gain(rows, **way).assign(way=place) for place, way in enumerate(GAINS)])


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of the states, and the gain with the wide tile, by model and context."""
    parts = [
        step_gain(rows, 32, model, context, BF16, BATCHES).assign(model=model, context=context)
        for model, context in product((NEXT, "Qwen3.5-4B"), (256, 2048, 32768))
    ]
    return pd.concat(parts)[["model", "context", "batch", "share %", "kernel KV / VK", "gain %"]]


# Production kernels


def operation_times(rows: pd.DataFrame) -> pd.DataFrame:
    """µs of every usable variant that is no control, and percent of the in-place multiply, of every operation."""
    found = []
    for op in OPERATIONS:
        for params, group in cases(rows, op):
            us = times(group)
            for name, row in usable(group).items():
                if row["role"] != "control":
                    line = {"op": op, "variant": name, "us": us[name], "percent": _percent(us, name)}
                    found.append(line | pick(params, CASE))
    return table(found, ["op", *CASE, "variant", "us", "percent"])


def _percent(us: Mapping[str, float], name: str) -> float:
    return 100 * us[IN_PLACE] / us[name] if IN_PLACE in us else math.nan


def against_best(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest library over ours; of decode, by where it finds the states."""
    found = []
    for op in ("step", "extend"):
        for params, group in cases(rows, op):
            known, us, rivals = usable(group), times(group), defaultdict(list)
            for name, row in known.items():
                if row["role"] == "peer" and "layout alone" not in name:
                    rivals[_slots(row) if op == "step" else None].append(name)
            for slots, names in rivals.items():
                ours, best = OURS_IN_ORDER if slots == "in order" else OURS, least(us, names)
                if line := compare(group, ours, best):
                    line |= {"op": op, "slots": slots, "best library": best, "library µs": us[best]}
                    line |= {"ours µs": us[ours], "ours, % of in-place": _percent(us, ours)}
                    found.append(pick(params, CASE) | line)
    shown = ["best library", "library µs", "ours µs", "ours, % of in-place"]
    return table(found, ["op", *CASE, "slots", *shown, *RATIO, "runs"])


def _slots(row: Mapping[str, Any]) -> str:
    """Where a library's decode finds its states: fla-core takes no indices, the others may be given them in order."""
    return "in order" if row["variant"].startswith("fla ") or row["chosen"].get("in_order") else "at random"


def _pairs(rows: pd.DataFrame, op: str, variant: str, against: str, **said: Any) -> list[dict[str, Any]]:
    """`compare` in every case of an operation, with what is said of all of them."""
    return [
        {"op": op} | said | pick(params, CASE) | line
        for params, group in cases(rows, op)
        if (line := compare(group, variant, against))
    ]


def released(rows: pd.DataFrame) -> pd.DataFrame:
    """Own kernels: the release before the change over the one with it."""
    found = [
        line
        for source, (before, after) in OWN.items()
        for op in ("step", "verify", "extend")
        for line in _pairs(rows, op, after, before, source=source)
    ]
    for line in found:  # the form of a draft is named with the gate
        if draft := line.pop("draft", ""):
            line["gate"] = f"{line['gate']}, {draft} of drafts"
    return table(found, ["source", "op", *CASE[:3], "prefill", "us", "against us", *RATIO, "runs"])


def by_release(rows: pd.DataFrame) -> pd.DataFrame:
    """Decode of 64 sequences by ours and each form of SGLang's that was checked: µs if right, and error."""
    found = []
    for params, group in cases(rows, "step", batch=FULL):
        us = times(group)
        for row in group:
            name = row["variant"]
            if (
                (name == OURS or name.startswith("sglang"))
                and row["role"] != "control"
                and row["error"] == row["error"]
            ):
                line = {"variant": name, "us": us.get(name, math.nan), "error": row["error"], "right": str(row["ok"])}
                found.append(pick(params, CASE) | line)
    return table(found, ["gate", "state", "batch", "variant", "us", "error", "right"])


def long_prompts(rows: pd.DataFrame) -> pd.DataFrame:
    """One long prompt: FlashInfer's and fla-core's time over ours."""
    found = [
        pick(params, ["H", "HV", "prefill"]) | line
        for params, group in cases(rows, "long")
        for name in ("flashinfer VK", "fla VK")
        if (line := compare(group, OURS, name))
    ]
    return table(found, ["H", "HV", "prefill", "against", "us", "against us", *RATIO, "runs"])


PAIRS = [  # operation, variant, against: those that a page sets side by side
    ("step", OURS_IN_ORDER, OURS),
    ("step", OURS, OURS_KV),
    ("verify", OURS, TOKENS),
    ("extend", OURS, OURS_KV),
    *((op, *OWN[source][::-1]) for source in ("SGLang", "vLLM") for op in ("step", "verify", "extend")),
]


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """`PAIRS` in every case."""
    found = [line for pair in PAIRS for line in _pairs(rows, *pair)]
    return table(found, ["op", "variant", "against", *CASE, "us", "against us", *RATIO, "runs"])


def extend_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors of extend, ours and fla-core's, where both were checked."""
    found = []
    for params, group in cases(rows, "extend"):
        error = {row["variant"]: row["error"] for row in group}
        line = {"error, ours": error.get(OURS, math.nan), "error, fla": error.get("fla VK", math.nan)}
        if not any(map(math.isnan, line.values())):
            found.append(pick(params, CASE) | line | {"ours / fla": line["error, ours"] / line["error, fla"]})
    return table(found, ["gate", "prefill", "error, ours", "error, fla", "ours / fla"])


def layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """[K, V] over [V, K], ours in three operations and fla-core's extend."""
    found = [line for op in ("step", "verify", "extend") for line in _pairs(rows, op, OURS, OURS_KV, kernels="ours")]
    found += _pairs(rows, "extend", "fla VK", "fla KV", kernels="fla")
    return table(found, ["op", "kernels", *RELEASED, *RATIO])


def gdn_layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """The same of ours, GDN alone."""
    found = [line for op in ("step", "verify", "extend") for line in _pairs(rows, op, OURS, OURS_KV)]
    shown = ["us", "against us", *RATIO, "runs"]
    return table([line for line in found if line["gate"] == "GDN"], ["op", *CASE, *shown])


def _tokens(prefill: str) -> int:
    """Of all sequences of a prefill: "8 x 1024"."""
    if prefill == "ragged":
        return 1 + 7 + 63 + 64 + 65 + 300 + 1000 + 2500 + 3200
    return math.prod(map(int, prefill.split(" x ")))


def first_token(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of the extends in Qwen3-Next's prefill, were the rest bound by arithmetic, and what [V, K] takes off."""
    peak, found = PEAK[rows["gpu"].iloc[0]], []
    for own, pair in ((False, (OURS, OURS_KV)), (True, OWN["SGLang"][::-1])):
        for line in _pairs(rows, "extend", *pair, own=own):
            if line["gate"] == "GDN":
                extends = 36 * line["against us"] / 1e6  # 36 layers of it
                share = 100 * extends / (extends + 2 * 3e9 * _tokens(line["prefill"]) / peak)
                line |= {"share %": share}
                for name, shown in (("ratio", "earlier %"), ("low", "low %"), ("high", "high %")):
                    line |= _each(line, name, shown, lambda ratio, part=share: part * (1 - 1 / ratio))
                found.append(line)
    percent = ["share %", "earlier %", "low %", "high %"]
    return table(found, ["own", "prefill", "us", "against us", *RATIO, "runs", *percent])


def _chunk_state(group: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """(form, tile) -> row of the chunk-state kernel."""
    found = {}
    for row in usable(group).values():
        if row["role"] != "control":
            form = "VK, transposed" if row["chosen"]["transposed"] else "VK" if row["chosen"]["v_first"] else "KV"
            found[form, row["chosen"]["tile"]] = row | {"code": facts(row["evidence"])}
    return found


def chunk_states(rows: pd.DataFrame) -> pd.DataFrame:
    """µs of the chunk-state kernel, and what it takes of a multiprocessor."""
    found = []
    for params, group in cases(rows, "chunk_state"):
        us, prefill = times(group), params["prefill"]
        sequences = 9 if prefill == "ragged" else int(prefill.split(" x ")[0])
        for (form, tile), row in _chunk_state(group).items():
            line = {"prefill": prefill, "sequences": sequences, "form": form, "BV": tile, "us": us[row["variant"]]}
            found.append(line | pick(row["code"], ["registers", "shared_bytes", "ctas_per_sm"]))
    return pd.DataFrame(found)


def chunk_state_layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """[K, V] over [V, K] of that kernel at equal tiles."""
    found = []
    for params, group in cases(rows, "chunk_state"):
        known = _chunk_state(group)
        for tile in (16, 32, 64):
            vk, kv = known[("VK", tile)], known[("KV", tile)]
            line = {"prefill": params["prefill"], "BV": tile} | compare(group, vk["variant"], kv["variant"])
            line |= {f"shared, {form}": known[form, tile]["code"]["shared_bytes"] for form in ("KV", "VK")}
            line |= {f"CTAs an SM, {form}": known[form, tile]["code"]["ctas_per_sm"] for form in ("KV", "VK")}
            found.append(line)
    counts = [f"{what}, {form}" for what in ("shared", "CTAs an SM") for form in ("KV", "VK")]
    return table(found, ["prefill", "BV", *counts, *RATIO])


def drift(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors along the tokens, as the rows' evidence has them."""
    columns = ["gate", "state", "variant", "tokens", "output error", "state error"]
    found = [
        (params["gate"], params["state"], row["variant"], *errors)
        for params, group in cases(rows, "drift")
        for row in group
        if row["role"] in ("ours", "step")
        for errors in facts(row["evidence"])["drift"]
    ]
    return pd.DataFrame(found, columns=columns)


# What the claims are judged by: case, mid, low, high, noise, runs


def _observed(lines: Sequence[Mapping[str, Any]], case: Callable[[Mapping[str, Any]], str]) -> pd.DataFrame:
    """Ratios as observations."""
    shown = ["low", "high", "noise", "runs"]
    keep = [name + end for name in shown for end in ("", " from", " to")]
    return table(
        [{"case": case(line), "mid": line["ratio"]} | pick(line, keep) for line in lines], ["case", "mid", *shown]
    )


def _layout_claim(rows: pd.DataFrame, op: str, tile: int) -> pd.DataFrame:
    """Both layouts where the GPU is full, in fp32: SGLang's own if it was timed, else the simple kernel."""
    own = [line for line in _pairs(rows, op, *OWN["SGLang"][::-1]) if line["state"] == "fp32"]
    simple = ratios(rows)
    simple = simple[(simple["cache"] == "cold") & (simple["BV"] == tile) & (simple["warps"] == 1)]
    lines = own or simple[simple["state"] == "fp32"].to_dict("records")
    return _observed([one for one in lines if one["batch"] >= FULL], _case)


def _case(line: Mapping[str, Any]) -> str:
    said = pick(line, ["model", "gate"]).values()
    drafts = [f"{line['draft']} of drafts"] if line.get("draft") else []
    return ", ".join([*said, *drafts, f"batch {line['batch']}"])


def narrow_tile(rows: pd.DataFrame) -> pd.DataFrame:
    """A tile of 8: SGLang's verify."""
    return _layout_claim(rows, "verify", 8)


def equal_lines(rows: pd.DataFrame) -> pd.DataFrame:
    """A tile of 32: SGLang's decode."""
    return _layout_claim(rows, "step", 32)


def _gains(found: pd.DataFrame, before: str = "") -> pd.DataFrame:
    """Gains in percent as ratios."""
    as_ratio = found[[name for name in found if name.startswith(("low %", "high %"))]] / 100 + 1
    as_ratio = as_ratio.rename(columns=lambda name: name.replace(" %", ""))
    cases_of = [f"{before}batch {batch}" for batch in found["batch"]]
    noise = found[[name for name in found if name.startswith(("noise", "runs"))]]
    return pd.concat([as_ratio, noise], axis=1).assign(case=cases_of, mid=1 + found["gain %"] / 100)


def decode(rows: pd.DataFrame) -> pd.DataFrame:
    """A decode step with both sizes of weights; by SGLang's own step if it was timed."""
    own = any(row["state"] == "fp32" and row["gate"] == "GDN" for row in _pairs(rows, "step", *OWN["SGLang"][::-1]))
    sizes = {"bf16": BF16, "NVFP4": NVFP4}
    found = {size: step_gain(rows, None if own else 32, weight_bytes=x, batches=BATCHES) for size, x in sizes.items()}
    return pd.concat([_gains(part, f"{size} weights, ") for size, part in found.items()])


def vllm_estimate(rows: pd.DataFrame, tile: int) -> pd.DataFrame:
    """vLLM's table: the heads of half a Qwen3-Next, weights in NVFP4; the ends are those of all contexts."""
    parts = [step_gain(rows, tile, NEXT, context, NVFP4, BATCHES, NEXT_HALF) for context in CONTEXTS]
    found = parts[CONTEXTS.index(2048)].copy()
    for name, pick_end in (("low %", min), ("high %", max)):
        for column in [one for one in found if one.startswith(name)]:
            found[column] = [pick_end(values) for values in zip(*(part[column] for part in parts), strict=True)]
    return found


def vllm_estimates(rows: pd.DataFrame) -> pd.DataFrame:
    """The same of both tiles."""
    return pd.concat([vllm_estimate(rows, tile).assign(tile=tile) for tile in (8, 32)])


def vllm_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The wide tile's, beside what was published of each batch, to 0.05 %."""
    found = _gains(vllm_estimate(rows, 32))
    off = {"least": -0.05, "most": 0.05}
    sizes = {name: [1 + (percent + error) / 100 for percent in PUBLISHED] for name, error in off.items()}
    return found.assign(direction=["above" if percent > 0 else "below" for percent in PUBLISHED], **sizes)


def first_token_claim(rows: pd.DataFrame) -> pd.DataFrame:
    """Time to the first token before over after; by SGLang's extend if it was timed."""
    found = first_token(rows)
    found = found[found["own"]] if found["own"].any() else found
    lines = []
    for line in found.to_dict("records"):
        said = {"case": line["prefill"], "runs": line["runs"]}
        for name, shown in (("earlier %", "mid"), ("low %", "low"), ("high %", "high")):
            said |= _each(line, name, shown, lambda percent: 1 / (1 - percent / 100))
        part = line["share %"] / 100
        lines.append(said | _each(line, "noise", "noise", lambda noise, part=part: noise * part))
    return table(lines, ["case", "mid", "low", "high", "noise", "runs"])


TABLES: Tables = {
    "tables.times": times_of,
    "tables.ratios": ratios,
    "tables.folding": folding,
    "tables.tile_or_layout": tile_or_layout,
    "tables.best": best,
    "tables.state_access": state_access,
    "tables.end_to_end_estimate": end_to_end_estimate,
    "tables.shares": shares,
    "tables.operation_times": operation_times,
    "tables.against_best": against_best,
    "tables.released": released,
    "tables.by_release": by_release,
    "tables.long_prompts": long_prompts,
    "tables.compared": compared,
    "tables.extend_errors": extend_errors,
    "tables.layouts": layouts,
    "tables.gdn_layouts": gdn_layouts,
    "tables.first_token": first_token,
    "tables.chunk_states": chunk_states,
    "tables.chunk_state_layouts": chunk_state_layouts,
    "tables.drift": drift,
    "claims.narrow_tile": narrow_tile,
    "claims.equal_lines": equal_lines,
    "claims.decode": decode,
    "claims.vllm_estimate": vllm_estimates,
    "claims.vllm_table": vllm_table,
    "claims.first_token": first_token_claim,
}


# Numbers that only the views make: parts of their sentences


def _records(frame: pd.DataFrame, **wanted: Any) -> list[dict[str, Any]]:
    """The lines of a table that have these values."""
    return [line for line in frame.to_dict("records") if all(line[name] == value for name, value in wanted.items())]


def _ratios(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    return [line["ratio"] for line in lines]


def said_folding(rows: pd.DataFrame) -> list[str]:
    """One pass against two in Qwen3-Next's shape: one sequence, and a full GPU."""
    lines = _records(folding(rows), cache="cold", model=NEXT)
    parts = [line for line in lines if line["batch"] == 1], [line for line in lines if line["batch"] >= FULL]
    return [f"{gains(_ratios(some))}; {counted(line['verdict'] for line in some)} of {len(some)}" for some in parts]


def said_spilled(rows: pd.DataFrame) -> list[str]:
    """Time of the kernels that spill over the fastest kernel of their case, whose code is known too."""
    found = defaultdict(list)
    for params, group in cases(rows, "decode"):
        us = {name: x for name, x in times(group).items() if usable(group)[name]["role"] != "control"}
        for name in us:
            row = usable(group)[name]
            if spill := facts(row["evidence"]).get("spill_bytes", 0):
                chosen = row["chosen"]
                shown = f"[{', '.join(chosen['layout'])}], tile {chosen['BV']}"
                shown += {1: "", 2: ", 2 warps", 4: ", 4 warps"}[chosen["warps"]] + ", one pass" * chosen["folded"]
                timed = min(x for other, x in us.items() if facts(usable(group)[other]["evidence"]))
                found[shown, params["K"], params["state"], spill].append(us[name] / timed)
    return ["; ".join(map(str, (*kernel, span(slower, ".1f")))) for kernel, slower in found.items()]


def said_prediction_error(rows: pd.DataFrame) -> list[str]:
    """Share of the points within 10 % of their prediction: Qwen3-Next, tiles of 8 and 32, one warp."""
    found = [
        abs(us / row["predicted_us"] - 1) <= 0.1
        for _, group in cases(rows, "decode", model=NEXT)
        for (_, tile, warps, folded), name in _points(group).items()
        if tile in (8, 32) and warps == 1 and not folded
        for row, us in [(usable(group)[name], times(group)[name])]
    ]
    return [f"{100 * sum(found) / len(found):.0f} % of the points"]


def said_libraries(rows: pd.DataFrame) -> list[str]:
    """The fastest library over this lab's, by slots and state or by gate."""
    found = against_best(rows)
    groups = [_records(found, op="step", gate="GDN", slots=slots, state=state) for slots, state in _SLOTS]
    groups += [_records(found, op="extend", gate=gate) for gate in ("GDN", "KDA")]
    parts = [(faster(geometric_mean(_ratios(some))), gains(_ratios(some))) for some in groups]
    return [part for mean, ends in parts for part in (f"{mean} ", f"({ends})")]


_SLOTS = list(product(("in order", "at random"), ("fp32", "bf16")))


def said_by_kernel(rows: pd.DataFrame) -> list[str]:
    """What the layout changes in kernels with the GPU full, in prefills and in a whole decode step."""
    simple, tuned = _records(ratios(rows), cache="cold", warps=1), _records(gdn_layouts(rows), op="step")
    groups = [_full(simple, BV=tile) for tile in (8, 32)]
    groups += [_full(_records(best(rows), cache="cold", model=NEXT)), _full(tuned)]
    own = [_pairs(rows, op, *OWN["SGLang"][::-1]) for op in ("verify", "step")]
    groups += [_full(lines) for lines in own if lines]
    said = [
        f"{state}: {gains(_ratios(some))}"
        for lines in groups
        for state in ("fp32", "bf16")
        if (some := [line for line in lines if line["state"] == state])
    ]
    extends, percent = _ratios(_records(gdn_layouts(rows), op="extend")), vllm_estimate(rows, 32)["gain %"]
    return [*said, gains(extends), f"{span(percent, '+.1f')} % tokens/s"]


def _full(lines: Sequence[Mapping[str, Any]], **wanted: Any) -> list[Mapping[str, Any]]:
    """Those of a full GPU that have these values."""
    return [one for one in lines if one["batch"] >= FULL and all(one[name] == value for name, value in wanted.items())]


def said_tuned(rows: pd.DataFrame) -> list[str]:
    """Both layouts of the tuned decode with the GPU full."""
    lines = _full(_records(gdn_layouts(rows), op="step"))
    return [
        f"{state} state: {gains(line['ratio'] for line in lines if line['state'] == state)}"
        for state in ("fp32", "bf16")
    ]


def said_verified(rows: pd.DataFrame) -> list[str]:
    """Token by token over verify."""
    return [f"batch {line['batch']}, {line['T']} tokens; {faster(line['ratio'])}" for line in _pairs(rows, *PAIRS[2])]


def said_extend_errors(rows: pd.DataFrame) -> list[str]:
    """Our errors, and over fla-core's."""
    found = extend_errors(rows)
    return [f"inputs: {span(found['error, ours'], '.1e')}", f"which is {span(found['ours / fla'])} times"]


def said_first_token(rows: pd.DataFrame) -> list[str]:
    """Share of the extends, and how much earlier the first token comes; both published times."""
    found = first_token(rows)
    found = found[~found["own"].astype(bool)]
    shares, earlier = span(found["share %"], ".0f"), span(found["earlier %"], ".1f")
    return [f"{shares} %", f"{earlier} % earlier", f"({100 * (1 - 13842 / 14993):.1f} % published)"]


def said_occupancy(rows: pd.DataFrame) -> list[str]:
    """Of the chunk-state kernel's pairs, those with more CTAs an SM in [V, K] and those with as many."""
    lines, found = _records(chunk_state_layouts(rows)), []
    for some in (
        [line for line in lines if line["CTAs an SM, VK"] > line["CTAs an SM, KV"]],
        [line for line in lines if line["CTAs an SM, VK"] == line["CTAs an SM, KV"]],
    ):
        found.append(f"{len(some)} of {len(lines)} pairs" + (f", {gains(_ratios(some))} with" if some else ""))
    return found


def said_facts(rows: pd.DataFrame) -> list[str]:
    """What the first screen is made from, of 64 sequences of Qwen3-Next, to eight digits."""
    simple = [one for one in _records(ratios(rows), cache="cold", warps=1) if one["model"] == NEXT and one["BV"] == 8]
    own = [
        one
        for one in _records(released(rows), source="SGLang", op="verify")
        if one["gate"] in ("GDN, chain of drafts", "GDN, tree of drafts")
    ]
    kinds = {"SGLang's verify": own, "this lab's plain kernel": simple}
    found = []
    for name, lines in kinds.items():
        some = [one["ratio"] for one in lines if (one["state"], one["batch"]) == ("fp32", FULL)]
        found += [f"{name} {end}; {most:.8f}"[:-2] for end, most in (("from", min(some)), ("to", max(some)))]
    for line in _records(gdn_layouts(rows), op="step", batch=FULL):
        found.append(f"tuned {line['state']}; {line['ratio']:.12f}"[:-6])
    for line in _records(tile_or_layout(rows), cache="cold", model=NEXT, state="fp32", batch=FULL):
        found.append(f"wide; {line['ratio']:.12f}"[:-6])
    return found


SENTENCES: Sentences = {
    "views.folding": said_folding,
    "views.spilled": said_spilled,
    "views.prediction_error": said_prediction_error,
    "production_views.by_kernel": said_by_kernel,
    "production_views.libraries": said_libraries,
    "production_views.tuned": said_tuned,
    "production_views.verified": said_verified,
    "production_views.extend_errors": said_extend_errors,
    "production_views.first_token": said_first_token,
    "production_views.occupancy": said_occupancy,
    "answer.facts": said_facts,
}
