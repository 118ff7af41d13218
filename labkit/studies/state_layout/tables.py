"""Tables of the study: what the notebook shows and the claims are judged by, made from the measured rows."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.records import expanded
from labkit.bench.tables import RATIO, Cases, Params, best_pair, cases, facts, frame, pairs, picked, timed, where
from labkit.bench.tables import compared as compared_in
from labkit.bench.verdict import median_us
from labkit.shapes import QWEN3_NEXT, QWEN35_4B, GatedDeltaModel
from labkit.studies.state_layout import variants
from labkit.studies.state_layout.share import BF16_BYTES, end_to_end, prefill_share, state_share, time_share
from labkit.studies.state_layout.variants import CEILING, LAYOUTS, LENGTHS, STATES, TILES, WARPS, variant_name

SHAPE = ["model", "HV", "K", "state", "batch"]
CHOICE = ["layout", "BV", "warps", "folded"]
PRODUCTION = ["gate", "state", "batch", "draft", "T", "prefill"]


def ordered(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The table sorted, states and variants in the order of the pages rather than of the alphabet."""
    first = [variant_name(layout, tile) for tile in TILES for layout in LAYOUTS]
    places = {"state": STATES, "variant": [CEILING, *first]}

    def key(column: pd.Series) -> pd.Series:
        known = list(places.get(column.name, ()))
        return column.map(lambda value: known.index(value) if value in known else len(known)) if known else column

    return table.sort_values(list(columns), key=key, kind="stable", ignore_index=True)


# The grid


def _expanded(rows: pd.DataFrame) -> pd.DataFrame:
    """`expanded` of the usable rows, with the columns of cases and options even where no row has them."""
    table = expanded(rows[(rows["op"] == "decode") & rows["ok"] & (rows["role"] != "control")])
    return table.reindex(columns=[*table, *(name for name in [*SHAPE, *CHOICE] if name not in table)])


def times(rows: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """A row a usable measurement: shape, variant, µs, percent of the in-place ceiling of the same case, prediction."""
    table = _expanded(rows[rows["cache"] == cache])
    roof = table[table["variant"] == CEILING].set_index(["op", "case"])["us"]
    table["percent"] = 100 * pd.MultiIndex.from_frame(table[["op", "case"]]).map(roof) / table["us"]
    table["tbs"] = table["floor_bytes"] / table["us"] / 1e6
    return ordered(table, [*SHAPE, "us"])


def ratios(rows: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """KV / VK of equal tile and warps, with interval and verdict: above 1, the layout [V, K] is faster.

    Pairs of which one spills registers are left out: their ratio says nothing of the layout.
    """
    wanted = {
        (variant_name("VK", tile, warps), variant_name("KV", tile, warps)): {"BV": tile, "warps": warps}
        for tile, warps in product(TILES, WARPS)
    }
    columns = [*SHAPE, "BV", "warps", *RATIO, "runs"]
    return ordered(where(_pairs(rows, cache, wanted), spills=False)[columns], columns[:7])


def folding(rows: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """V-first with two passes over the tile / folded into one, with interval and verdict: above 1, folding pays."""
    wanted = {(variant_name("VK", tile, 1, True), variant_name("VK", tile)): {"BV": tile} for tile in TILES}
    columns = [*SHAPE, "BV", *RATIO]
    return ordered(_pairs(rows, cache, wanted)[columns], columns[:6])


def tile_or_layout(rows: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """K-first with the widest tile / V-first with the narrowest, one warp: what the layout adds to widening the tile.

    With both times; above 1, the layout [V, K] with the narrow tile is faster.
    """
    pair = variant_name("VK", min(TILES)), variant_name("KV", max(TILES))
    columns = [*SHAPE, "us", "against us", *RATIO]
    return ordered(_pairs(rows, cache, {pair: {}})[columns], columns[:5])


def _pairs(rows: pd.DataFrame, cache: str, wanted: Mapping[tuple[str, str], Params]) -> pd.DataFrame:
    """A line for each pair of each case, and whether one of it `spills`. wanted: (variant, against) -> what is said."""
    found = []
    for params, group in cases(rows, "decode", cache=cache):
        spilled = spilling(group)
        for line in pairs(group, wanted):
            pair = line["variant"], line["against"]
            found.append(picked(params, SHAPE) | wanted[pair] | line | {"spills": not spilled.isdisjoint(pair)})
    return pd.DataFrame(found, columns=[*SHAPE, "BV", "warps", "us", "against us", *RATIO, "runs", "spills"])


def spilling(rows: pd.DataFrame) -> set[str]:
    """Variants whose kernel, as it ran, spills registers to memory."""
    return {name for name, known in facts(rows, usable=False).items() if known.get("spill_bytes", 0) > 0}


def best(rows: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """The fastest variant of either layout in each case, compared pair by pair: what a free choice of tile leaves.

    Folded forms are left out, since only one layout has them.
    """
    names = {layout: [variant_name(layout, *choice) for choice in product(TILES, WARPS)] for layout in LAYOUTS}
    found = []
    for params, group in cases(rows, "decode", cache=cache):
        spilled = spilling(group)
        kv, vk = ([name for name in names[layout] if name not in spilled] for layout in LAYOUTS)
        if line := best_pair(group, vk, kv):
            found.append(picked(params, SHAPE) | line)
    shown = {"against": "best KV", "against us": "KV µs", "variant": "best VK", "us": "VK µs"}
    table = pd.DataFrame(found, columns=[*SHAPE, *shown, *RATIO, "runs"])
    return ordered(table.rename(columns=shown), SHAPE)


def state_access(rows: pd.DataFrame) -> pd.DataFrame:
    """Sectors and lines a request of loading the state's tile, derived from the code that ran; a row a shape and tile.

    The tile is the load that moves the most bytes of a program.
    """
    table = _expanded(rows[rows["evidence"] != "{}"])
    table = table[table["layout"].isin(LAYOUTS)].drop_duplicates(["K", "state", "variant"])
    keys = ["K", "state", *CHOICE]
    found = []
    for _, row in table.iterrows():
        loads = [access for access in json.loads(row["evidence"]).get("accesses", []) if access["kind"] == "load"]
        if loads:
            found.append(picked(row, keys) | max(loads, key=lambda access: access["bytes_used"]))
    return frame(found, [*keys, "lines", "sectors"])


def end_to_end_estimate(
    rows: pd.DataFrame,
    tile: int | None,
    model: GatedDeltaModel = QWEN3_NEXT,
    context: int = 2048,
    weight_bytes: float = BF16_BYTES,
    batches: Sequence[int] = (),
    heads_of: str = QWEN3_NEXT.name,
) -> pd.DataFrame:
    """Gain of a whole decode step: the state's share of its time × the kernel's ratio, one warp.

    The time is that of the bytes moved at the in-place ceiling, but for the state at the rate of the measured kernel
    with [K, V]: the share is of the time before. noise: the kernel's A/A noise times that share.

    tile: of the simple kernel, one warp; None: SGLang's own decode, before and after the change.
    model: whose weights, cache and layers. heads_of: the model with whose heads the kernel was timed; Qwen3.5-4B has
    those of Qwen3-Next, and each of two GPUs that share Qwen3-Next has as many value heads as Qwen3.5-0.8B.
    batches: default those measured; another takes the ratio of the largest measured batch below it (column `ratio of
    batch`), since the ratio levels off once the GPU is full.
    """
    params = {key: json.loads(key) for key in rows["case"].unique()}
    own = [key for key, case in params.items() if (case.get("model"), case.get("state")) == (heads_of, "fp32")]
    rows = rows[rows["case"].isin(own)]  # the intervals of other cases would take seconds, for nothing
    if tile is None:
        table = where(released(rows), op="step", gate="GDN").set_index("batch")
        old = where(operation_times(rows, "step"), gate="GDN", variant=variants.released(variants.BEFORE))
    else:
        table = where(ratios(rows), BV=tile, warps=1).set_index("batch")
        old = where(times(rows), variant=variant_name("KV", tile))
    slowness = dict(zip(old["batch"], 100 / old["percent"].fillna(100), strict=True)) if len(old) else {}
    found = []
    for batch in batches or table.index:
        below = table.index[table.index <= batch].max()
        if pd.isna(below):
            continue
        row = table.loc[below]
        share = time_share(state_share(model, int(batch), context, weight_bytes), slowness.get(below, 1.0))
        gain, low, high = (100 * (end_to_end(row[name], share) - 1) for name in ("ratio", "low", "high"))
        noise = share * row["noise"]
        found.append((batch, below, 100 * share, row["ratio"], row["verdict"], gain, low, high, noise, row["runs"]))
    columns = ["batch", "ratio of batch", "share %", "kernel KV / VK", "verdict", "gain %", "low %", "high %"]
    return pd.DataFrame(found, columns=[*columns, "noise", "runs"])


def shares(rows: pd.DataFrame, tile: int, contexts: Sequence[int], batches: Sequence[int]) -> pd.DataFrame:
    """`end_to_end_estimate` of both models whose weights are known, bf16 weights, at several contexts."""
    parts = []
    for model, context in product((QWEN3_NEXT, QWEN35_4B), contexts):
        table = end_to_end_estimate(rows, tile, model=model, context=context, batches=batches)
        parts.append(table.assign(model=model.name, context=context))
    columns = ["model", "context", "batch", "share %", "kernel KV / VK", "gain %"]
    return pd.concat(parts, ignore_index=True)[columns]


# The production operations: step, verify, extend, chunk_state, drift


def production(rows: pd.DataFrame, op: str, **wanted: Any) -> Cases:
    """The cases of an operation, GDN first, fp32 before bf16, small before large."""

    def place(params: Mapping[str, Any], group: pd.DataFrame) -> tuple:
        return params["gate"], STATES.index(params.get("state", "fp32")), group["floor_bytes"].iloc[0]

    return cases(rows, op, place, **wanted)


def operation_times(rows: pd.DataFrame, op: str) -> pd.DataFrame:
    """µs of every variant of every case of an operation, and percent of the in-place multiply of the same states."""
    found = [
        picked(params, PRODUCTION) | line | {"percent": _percent(group, line["us"])}
        for params, group in production(rows, op)
        for line in timed(group).values()
    ]
    return frame(found, ["gate", "variant", "us", "percent", "role"])


def _percent(group: pd.DataFrame, us: float) -> float:
    """Of the in-place multiply in the same case."""
    return 100 * median_us(group).get(CEILING, math.nan) / us


def against_best(rows: pd.DataFrame, op: str) -> pd.DataFrame:
    """Time of the fastest library, in either layout, over ours in every case; above 1: ours is faster.

    Of decode steps by where the states are, column `slots`: "in order" or "at random" (see `variants.rivals`).
    """
    found = []
    for params, group in production(rows, op):
        for slots, (ours, libraries) in variants.rivals(op).items():
            if pair := best_pair(group, [ours], libraries):
                line = ({"slots": slots} if slots else {}) | {"best library": pair["against"]}
                line["libraries"] = families(name for name in libraries if name in set(group["variant"][group["ok"]]))
                line |= {"library µs": pair["against us"], "ours µs": pair["us"]}
                line |= {"ours, % of in-place": _percent(group, pair["us"])}
                found.append(picked(params, PRODUCTION) | line | picked(pair, [*RATIO, "runs"]))
    return frame(found, ["gate", "slots", "best library", *RATIO])


def families(names: Iterable[str]) -> str:
    """Whose variants these are: "attn-gym, SGLang"."""
    shown = {"fla": "fla-core", "sglang": "SGLang", "vllm": "vLLM", "flashinfer": "FlashInfer"}
    return ", ".join(dict.fromkeys(shown.get(word, word) for word in (name.partition(" ")[0] for name in names)))


def released(rows: pd.DataFrame, source: str = "SGLang") -> pd.DataFrame:
    """Own kernels: time of the release before the change over that of the first with it, in every case.

    Above 1, the one with [V, K] is the faster. source: one of `variants.OWN`. Where drafts are verified, the gate is
    named with their form: "GDN, tree of drafts".
    """
    before, after = variants.OWN[source]
    parts = [compared(rows, op, after, before).assign(op=op) for op in ("step", "verify", "extend")]
    table = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    table = table.reindex(
        columns=["op", "gate", "draft", "state", "batch", "prefill", "us", "against us", *RATIO, "runs"]
    )
    table["gate"] += (", " + table["draft"].astype("object") + " of drafts").fillna("")
    return table.drop(columns="draft").astype({"batch": "Int64"})


def by_release(rows: pd.DataFrame, batch: int) -> pd.DataFrame:
    """One decode step of a batch by every release and form that ran, and by ours: µs, error, whether right."""
    found = []
    for params, group in production(rows, "step", batch=batch):
        times = timed(group)
        for row in group[group["error"].notna() & (group["role"] != "control")].to_dict("records"):
            name = row["variant"]
            if name == variants.OURS or name.startswith("sglang"):
                line = {"release": _release(name), "form": name.partition(", ")[2], "variant": name}
                line |= {"us": times.get(name, {}).get("us", math.nan), "error": row["error"], "right": bool(row["ok"])}
                found.append(picked(params, PRODUCTION) | line)
    return frame(found, ["gate", "state", "batch", "release", "form", "variant", "us", "error", "right"])


def _release(variant: str) -> str:
    """Version and layout of a variant: of "sglang 0.5.9 KV, packed", "0.5.9, [K, V]"."""
    if variant == variants.OURS:
        return "this lab, [V, K]"
    version, layout = variant.partition(", ")[0].split()[1:]
    return f"{version}, [{', '.join(layout)}]"


def long_prompts(rows: pd.DataFrame) -> pd.DataFrame:
    """Extend of one long prompt, with few heads and with many: ours, and the others' time over ours."""
    found = []
    for params, group in production(rows, "long"):
        known = pairs(group, [(variants.OURS, name) for name in (variants.FLASHINFER_VK, variants.fla("VK"))])
        found += [picked(params, ["H", "HV", "prefill"]) | line for line in known]
    return frame(found, ["H", "HV", "prefill", "against", "us", "against us", *RATIO, "runs"])


def compared(rows: pd.DataFrame, op: str, variant: str, against: str, **wanted: Any) -> pd.DataFrame:
    """Time of `against` over that of `variant` in every case of an operation that has both."""
    return compared_in(production(rows, op, **wanted), variant, against, PRODUCTION).drop(columns="no slower")


def extend_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors of extend against float64 on the same inputs, ours and fla-core's: the larger of output and state."""
    found = []
    for params, group in production(rows, "extend"):
        errors = dict(zip(group["variant"], group["error"], strict=True))
        ours, library = (errors.get(name, math.nan) for name in (variants.OURS, variants.fla("VK")))
        line = {"error, ours": ours, "error, fla": library, "ours / fla": ours / library}
        found.append(picked(params, PRODUCTION) | line)
    return frame(found, ["gate", "prefill", "error, ours", "error, fla", "ours / fla"]).dropna(ignore_index=True)


def layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """KV / VK of the lab's kernels in every operation, and of fla-core's extend: above 1, [V, K] is faster."""
    wanted = [(op, variants.OURS, variants.OURS_KV, "ours") for op in ("step", "verify", "extend")]
    wanted.append(("extend", variants.fla("VK"), variants.fla("KV"), "fla"))
    parts = [compared(rows, op, vk, kv).assign(op=op, kernels=kernels) for op, vk, kv, kernels in wanted]
    table = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    return table.reindex(columns=["op", "kernels", "gate", "state", "batch", "draft", "prefill", *RATIO])


def gdn_layouts(rows: pd.DataFrame, op: str) -> pd.DataFrame:
    """KV / VK of the lab's kernel of an operation, GDN alone."""
    return compared(rows, op, variants.OURS, variants.OURS_KV, gate="GDN")


def first_token(rows: pd.DataFrame, own: bool = False) -> pd.DataFrame:
    """How much earlier [V, K] brings Qwen3-Next's first token, at most, in percent; by our extends in both layouts.

    own: by SGLang's, before and after the change. share %: of the extends, K-first, in the prefill (see
    `share.prefill_share`).
    """
    table = where(released(rows), op="extend", gate="GDN") if own else gdn_layouts(rows, "extend")
    table = table.reset_index(drop=True)
    if table.empty:
        return table
    us, gpu = zip(table["prefill"], table["against us"], strict=True), rows["gpu"].iloc[0]
    share = 100 * pd.Series([prefill_share(QWEN3_NEXT, sum(LENGTHS[prefill]), one, gpu) for prefill, one in us])
    earlier, low, high = (share * (1 - 1 / table[name]) for name in ("ratio", "low", "high"))
    return table.assign(**{"share %": share, "earlier %": earlier, "low %": low, "high %": high})


def chunk_states(rows: pd.DataFrame) -> pd.DataFrame:
    """The chunk-state kernel by form and tile: µs, and what the compiled kernel takes of a multiprocessor."""
    found = []
    for params, group in production(rows, "chunk_state"):
        known = facts(group)
        for name, line in timed(group).items():
            form, _, tile = name.rpartition(", BV=")
            said = {"prefill": params["prefill"], "sequences": len(LENGTHS[params["prefill"]]), "form": form}
            found.append(said | {"BV": int(tile)} | line | known[name])
    columns = ["prefill", "sequences", "form", "BV", "us", "registers", "shared_bytes", "ctas_per_sm"]
    table = pd.DataFrame(found, columns=columns)
    return table.sort_values(["prefill", "BV", "form"], kind="stable", ignore_index=True)


def chunk_state_layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """KV / VK of the chunk-state kernel at equal tiles, beside the CTAs of a multiprocessor in both layouts."""
    kernels = chunk_states(rows).set_index(["prefill", "form", "BV"])
    found = []
    for tile in variants.CHUNK_STATE_TILES:
        table = compared(rows, "chunk_state", *(variants.chunk_state(layout, tile) for layout in ("VK", "KV")))
        for line in table.to_dict("records"):
            said = {"prefill": line["prefill"], "BV": tile}
            for what, column in (("shared", "shared_bytes"), ("CTAs an SM", "ctas_per_sm")):
                said |= {f"{what}, {form}": kernels.loc[(line["prefill"], form, tile), column] for form in LAYOUTS}
            found.append(said | picked(line, RATIO))
    return frame(found, ["prefill", "BV", *RATIO])


def drift(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors along the tokens: columns gate, state, variant, tokens, output error, state error."""
    found = [
        (params["gate"], params["state"], variant, *errors)
        for params, group in production(rows, "drift")
        for variant, known in facts(group).items()
        if variant in (variants.OURS, variants.OURS_KV)
        for errors in known.get("drift", [])
    ]
    return pd.DataFrame(found, columns=["gate", "state", "variant", "tokens", "output error", "state error"])


ledger.watch(__name__)
