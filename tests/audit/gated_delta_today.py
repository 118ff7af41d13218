"""The tables of the study of buffered decode and segments, computed once more from the recorded rows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from common import (
    RATIO,
    Params,
    Sentences,
    Tables,
    cases,
    compare,
    facts,
    least,
    noise,
    pick,
    span,
    table,
    times,
    usable,
)

STUDY = "gated_delta_today"
CASE = ["gate", "state", "batch", "writes", "draft", "T", "H", "HV", "prefill"]
STATES = ("fp32", "bf16")  # that everything is timed with
SIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
READ = "read of the states"
PLAIN, PLAIN_KV = "ours, state written", "ours KV, state written"
OURS, SEARCHED, OURS_KV = "ours, ring", "ours, ring, searched", "ours KV, ring"
THEIRS_PLAIN, THEIRS, THEIRS_SEARCHED = (f"sglang 0.5.23, {how}" for how in ("state written", "ring", "ring, searched"))
STORED, THEIRS_STORED, WITH_WRITES = (
    "ours, states stored",
    "sglang 0.5.23, states stored",
    "ours, ring, with its writes",
)
ONE_DRAFT = "ours, ring, one draft at a time"
FUSED, SEGMENTS, ONE = "ours, fused", "ours, segments", "ours, one segment"
FLA, FLASHINFER = "fla", "flashinfer"
LENGTHS, DRIFTS = (1, 2, 4, 8, 12, 16, 24, 32), (1, 8, 16, 32)
WHOSE = ("ours", "sglang 0.5.23")
TOKENS = {"1 x 2048": 2048, "1 x 8192": 8192, "1 x 65536": 65536, "8 x 1024": 8192, "64 x 128": 8192}
# Qwen3.5-4B: weights of all matrices, gated delta layers, others, KV heads and their size.
_FFN = 2 * 9216 * 2560 + 9216 * 2560
WEIGHTS = 24 * (12352 * 2560 + 2560 * 4096 + _FFN) + 8 * (10240 * 2560 + 2560 * 4096 + _FFN) + 248320 * 2560
LAYERS, OTHERS, KV_HEADS, HEAD = 24, 8, 4, 256
PEAK = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
STEPS = {8: 1.03, 32: 1.08, 64: 1.14, 128: 1.21, 256: 1.27, 512: 1.30}
VERIFIES = {(128, 4): 1.43, (256, 4): 1.79, (512, 4): 2.10, (128, 8): 1.84, (256, 8): 2.09}
PROMPTS = {"1 x 2048": (86, 61), "1 x 8192": (259, 114), "1 x 65536": (1954, 399)}
WAYS = [  # of `tables.whole_steps`: op, variant, against, context
    (op, *pair, context)
    for op, pair in (("ring", (THEIRS, THEIRS_PLAIN)), ("ring_verify", (THEIRS, THEIRS_STORED)))
    for context in (256, 2048, 8192)
] + [("ring", OURS, PLAIN, 2048), ("ring_verify", OURS, STORED, 2048)]
PAIRS = [("ring", OURS, PLAIN), ("ring", THEIRS, THEIRS_PLAIN), ("ring", OURS, SEARCHED)]
PAIRS += [("ring_verify", OURS, THEIRS)]


# Bytes


def state_bytes(x: Params) -> int:
    """Of a batch's states in a layer."""
    return x["batch"] * x["HV"] * x["K"] * x["V"] * SIZE[x["state"]]


def ring_bytes(x: Params, length: int) -> float:
    """Bytes of a token, by adding up what each place of the ring reads and writes."""
    gates = x["K"] if x["gate"] == "KDA" else 1
    entry = 2 * x["HV"] * x["V"] + 4 * x["HV"] * gates + 2 * x["H"] * x["K"]
    token = 2 * (2 * x["H"] * x["K"] + 2 * x["HV"] * x["V"] + x["HV"] + x["HV"] * gates) + 3 * 4
    state = state_bytes(x) / x["batch"]
    every = [
        state * (2 if place == length - 1 else 1) + entry * (place + (place < length - 1)) + token
        for place in range(length)
    ]
    return x["batch"] * sum(every) / length


def _rate(x: Params, group: Sequence[Mapping[str, Any]]) -> float:
    us = times(group).get(READ)
    return state_bytes(x) / us if us else math.nan


# Decode


def times_of(rows: pd.DataFrame) -> pd.DataFrame:
    """µs, the floor's µs and percent of the floor, of three operations."""
    found = []
    for op in ("ring", "layout", "ring_verify"):
        for x, group in cases(rows, op):
            for name, us in times(group).items():
                if name != "A/A control":
                    floor = usable(group)[name]["floor_bytes"] / _rate(x, group)
                    found.append({"op": op, "variant": name, "us": us, "floor us": floor, "percent": 100 * floor / us})
                    found[-1] |= pick(x, CASE)
    return table(found, ["op", *CASE, "variant", "us", "floor us", "percent"])


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """The pairs of PAIRS in every case."""
    found = []
    for op, variant, against in PAIRS:
        for x, group in cases(rows, op):
            if line := compare(group, variant, against):
                found.append({"op": op, **pick(x, CASE), **line})
    return table(found, ["op", *CASE, "variant", "against", "us", "against us", *RATIO, "runs"])


def _best(group: Sequence[Mapping[str, Any]], names: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    known = times(group)
    one, other = least(known, names), least(known, others)
    return compare(group, one, other) if one and other else {}


def rings(rows: pd.DataFrame) -> pd.DataFrame:
    """Each side's fastest."""
    found = []
    for x, group in cases(rows, "ring"):
        if line := _best(group, (OURS, SEARCHED), (THEIRS, THEIRS_SEARCHED)):
            us = times(group)
            line |= {"ours µs": line["us"], "SGLang µs": line["against us"]}
            found.append(pick(x, CASE) | line | {"plain / ours": us.get(PLAIN, math.nan) / us.get(OURS, math.nan)})
    return table(found, ["gate", "state", "batch", "H", "HV", "ours µs", "SGLang µs", "plain / ours", *RATIO, "runs"])


def crossover(rows: pd.DataFrame) -> pd.DataFrame:
    """From which batch on every verdict is "faster"; none where one is a draw of the bootstrap."""
    found = []
    for whose, (ring, plain) in {"ours": (OURS, PLAIN), "SGLang's": (THEIRS, THEIRS_PLAIN)}.items():
        for state in STATES:
            lines = {
                x["batch"]: compare(group, ring, plain)["verdict"]
                for x, group in cases(rows, "ring", gate="GDN", state=state)
                if compare(group, ring, plain)
            }
            if lines:
                start = math.nan
                for batch in sorted(lines, reverse=True):
                    if lines[batch] != "faster":
                        break
                    start = float(batch)
                found.append({"state": state, "whose": whose, "batch": start})
    return table(found, ["state", "whose", "batch"])


def lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Every L against 16."""
    found = []
    for x, group in cases(rows, "length"):
        us = times(group)
        for whose in WHOSE:
            for n in LENGTHS:
                if (name := f"{whose}, L = {n}") in us:
                    floor = ring_bytes(x, n) / _rate(x, group)
                    line = {
                        "whose": whose,
                        "L": n,
                        "us": us[name],
                        "floor us": floor,
                        "percent": 100 * floor / us[name],
                    }
                    beside = compare(group, f"{whose}, L = 16", name) if n != 16 else {}
                    kept = {key: value for key, value in beside.items() if key not in ("us", "against us")}
                    found.append(pick(x, CASE) | kept | line)
    return table(found, ["gate", "state", "batch", "whose", "L", "us", "floor us", "percent", *RATIO, "runs"])


def best_lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest L, and that of the least bytes."""
    found = []
    for x, group in cases(rows, "length"):
        us = times(group)
        for whose in WHOSE:
            names = {n: f"{whose}, L = {n}" for n in LENGTHS if f"{whose}, L = {n}" in us}
            if 16 not in names:
                continue
            fastest = min(names, key=lambda n: us[names[n]])
            said = {"whose": whose, "fastest L": fastest, "predicted L": min(names, key=lambda n: ring_bytes(x, n))}
            line = compare(group, names[fastest], names[16]) if fastest != 16 else {}
            found.append(pick(x, CASE) | line | said)
    return table(found, ["gate", "state", "batch", "whose", "predicted L", "fastest L", *RATIO, "runs"])


def layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """[K, V] over [V, K]."""
    found = []
    for x, group in cases(rows, "layout"):
        for kernel, pair in {"ring": (SEARCHED, OURS_KV), "state written": (PLAIN, PLAIN_KV)}.items():
            if line := compare(group, *pair):
                found.append(pick(x, CASE) | line | {"kernel": kernel})
    return table(found, ["kernel", "state", "batch", "writes", "us", "against us", *RATIO, "runs"])


def verifies(rows: pd.DataFrame) -> pd.DataFrame:
    """Stored over ring."""
    pairs = {
        "ours": (OURS, STORED),
        "SGLang's": (THEIRS, THEIRS_STORED),
        "ours, one at a time": (ONE_DRAFT, STORED),
        "ours, with its writes": (WITH_WRITES, STORED),
    }
    found = []
    for x, group in cases(rows, "ring_verify"):
        for whose, pair in pairs.items():
            if line := compare(group, *pair):
                found.append(pick(x, CASE) | line | {"whose": whose})
    return table(found, ["whose", "state", "batch", "draft", "T", "us", "against us", *RATIO, "runs"])


def rival_drafts(rows: pd.DataFrame) -> pd.DataFrame:
    """SGLang's on the ring over ours."""
    found = [pick(x, CASE) | line for x, group in cases(rows, "ring_verify") if (line := compare(group, OURS, THEIRS))]
    return table(found, ["state", "batch", "draft", "T", "us", "against us", *RATIO, "runs"])


def _whole(rows: pd.DataFrame, op: str, variant: str, against: str, context: int) -> Iterator[dict[str, Any]]:
    """What a layer takes, both ways, and the rest of a step, at its fastest; fp32 states, GDN."""
    for x, group in cases(rows, op, gate="GDN", state="fp32"):
        line, rate = compare(group, variant, against), _rate(x, group)
        if not line or math.isnan(rate):
            continue
        cache = x["batch"] * context * OTHERS * 2 * KV_HEADS * HEAD
        products = 2 * WEIGHTS * x["batch"] * x.get("T", 1) / PEAK.get(rows["gpu"].iloc[0], math.inf) * 1e6
        rest = max(2 * (WEIGHTS + cache) / rate, products)
        old = LAYERS * line["against us"]
        found = {name: (rest + old) / (rest + old / line[name]) for name in ("ratio", *_ends(line))}
        share = old / (rest + old)
        aa = {name: share * value for name, value in noise(group).columns("noise").items()}
        yield pick(x, CASE) | {"share %": 100 * share, "kernel": line["ratio"], "runs": line["runs"]} | found | aa


def _ends(line: Mapping[str, Any]) -> list[str]:
    return [name for name in line if name.startswith(("low", "high"))]


def whole_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """In the ways of WAYS."""
    found = [line | {"way": at} for at, way in enumerate(WAYS) for line in _whole(rows, *way)]
    return table(found, ["way", "batch", "draft", "T", "share %", "kernel", "ratio", "low", "high", "noise", "runs"])


# Prefill


def prefills(rows: pd.DataFrame) -> pd.DataFrame:
    """Fused against segments, segments against one, FlashInfer against fla, and ours against the faster library."""
    found = []
    for x, group in cases(rows, "prefill"):
        lines = [compare(group, *pair) for pair in ((FUSED, SEGMENTS), (SEGMENTS, ONE), (FLASHINFER, FLA))]
        lines += [
            line | {"beside": "the faster library"} for line in [_best(group, [FUSED], [FLA, FLASHINFER])] if line
        ]
        found += [pick(x, CASE) | {"tokens": TOKENS[x["prefill"]]} | line for line in lines if line]
    columns = ["H", "HV", "prefill", "tokens", "variant", "against", "beside", "us", "against us", *RATIO, "runs"]
    return table(found, columns)


def prefill_times(rows: pd.DataFrame) -> pd.DataFrame:
    """µs and segments."""
    found = []
    for x, group in cases(rows, "prefill"):
        for name, us in times(group).items():
            if name != "A/A control":
                known = facts(usable(group)[name]["evidence"])
                line = {"tokens": TOKENS[x["prefill"]], "variant": name, "us": us}
                found.append(pick(x, CASE) | line | {"segments": known.get("segments", math.nan)})
    return table(found, ["H", "HV", "prefill", "tokens", "variant", "us", "segments"])


def prefill_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors, and with a map left out."""
    found = []
    for x, group in cases(rows, "prefill"):
        for name, row in usable(group).items():
            known = facts(row["evidence"])
            if "error" in known:
                line = {"variant": name, "segments": known.get("segments", math.nan), "error": known["error"]}
                found.append(pick(x, CASE) | line | {"a map left out": known.get("left out", math.nan)})
    return table(found, ["H", "HV", "prefill", "variant", "segments", "error", "a map left out"])


def first_token(rows: pd.DataFrame) -> pd.DataFrame:
    """With all heads of Qwen3.5-4B."""
    found = []
    for x, group in cases(rows, "prefill", H=16, HV=32):
        rest = 2 * WEIGHTS * TOKENS[x["prefill"]] / PEAK.get(rows["gpu"].iloc[0], math.inf) * 1e6
        for name in (FUSED, FLASHINFER):
            if line := compare(group, name, FLA):
                old = LAYERS * line["against us"]
                gains = {end: (rest + old) / (rest + old / line[end]) for end in ("ratio", *_ends(line))}
                said = {"prefill": x["prefill"], "variant": name, "kernel": line["ratio"]}
                found.append(said | gains | {"share %": 100 * old / (rest + old)})
    return table(found, ["prefill", "variant", "share %", "kernel", "ratio", "low", "high"])


# Errors along tokens


def drift(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors by tokens."""
    found = [
        {"gate": x["gate"], "state": x["state"], "L": n, "tokens": tokens, "output error": out, "state error": state}
        for x, known in _along(rows)
        for n in DRIFTS
        for tokens, out, state in known.get(n, {}).get("drift", [])
    ]
    return table(found, ["gate", "state", "L", "tokens", "output error", "state error"])


def read_short(rows: pd.DataFrame) -> pd.DataFrame:
    """The control."""
    found = [
        {"gate": x["gate"], "state": x["state"], "L": n, "one entry short": known[n]["short"]}
        for x, known in _along(rows)
        for n in DRIFTS
        if "short" in known.get(n, {})
    ]
    return table(found, ["gate", "state", "L", "one entry short"])


def _along(rows: pd.DataFrame) -> Iterator[tuple[Params, dict[int, dict[str, Any]]]]:
    for x, group in cases(rows, "drift"):
        known = usable(group)
        yield x, {n: facts(known[f"ours, L = {n}"]["evidence"]) for n in DRIFTS if f"ours, L = {n}" in known}


# Claims: what each is judged by


def _observed(lines: Sequence[tuple[str, Mapping[str, Any], tuple[float, float] | None]]) -> pd.DataFrame:
    """(case, line, published) as observations."""
    found = []
    for case, line, size in lines:
        kept = {"case": case, "mid": line["ratio"], "runs": line["runs"], "least": size and size[0]}
        ends = {name: value for name, value in line.items() if name.startswith(("low", "high", "noise"))}
        found.append(kept | {"most": size and size[1]} | ends)
    return table(found, ["case", "mid", "low", "high", "noise", "runs", "least", "most"])


def _own(rows: pd.DataFrame, states: Sequence[str]) -> pd.DataFrame:
    lines = [
        (f"GDN, {x['state']}, batch {x['batch']}", line, None)
        for x, group in cases(rows, "ring", gate="GDN")
        if x["batch"] >= 64 and x["state"] in states and (line := compare(group, THEIRS, THEIRS_PLAIN))
    ]
    return _observed(lines)


def _whole_claim(rows: pd.DataFrame, op: str, against: str, published: Mapping[Any, float]) -> pd.DataFrame:
    """Of 2048 tokens, the ends over all contexts."""
    contexts = [list(_whole(rows, op, THEIRS, against, context)) for context in (256, 2048, 8192)]
    lines = []
    for parts in zip(*contexts, strict=True):
        line = dict(parts[1])
        for end, choose in (("low", min), ("high", max)):
            for name in (end, f"{end} from", f"{end} to"):
                line[name] = choose(part[name] for part in parts)
        key = line["batch"] if op == "ring" else (line["batch"], line["T"])
        if key in published and line.get("draft", "chain") == "chain":
            case = f"batch {line['batch']}" + (f", T = {line['T']}" if op != "ring" else "")
            lines.append((case, line, (published[key] - 0.005, published[key] + 0.005)))
    return _observed(lines)


def right_length(rows: pd.DataFrame) -> pd.DataFrame:
    """16 over the fastest, SGLang's."""
    lines = []
    for x, group in cases(rows, "length"):
        us = times(group)
        names = {n: f"sglang 0.5.23, L = {n}" for n in LENGTHS if f"sglang 0.5.23, L = {n}" in us}
        if 16 in names:
            fastest = min(names, key=lambda n: us[names[n]])
            runs = min(len(set(row["run"])) for _, some in cases(rows, "length") for row in usable(some).values())
            one = {"ratio": 1.0, "runs": runs}
            for end, value in (("low", 1.0), ("high", 1.0), ("noise", 0.0)):
                one |= dict.fromkeys((end, f"{end} from", f"{end} to"), value)
            line = one if fastest == 16 else compare(group, names[fastest], names[16])
            lines.append((f"{x['gate']}, {x['state']}, L = {fastest}", line, None))
    return _observed(lines)


def layout_unwritten(rows: pd.DataFrame) -> pd.DataFrame:
    """The ring's layouts where nothing is written."""
    lines = [
        (f"ring, {x['state']}, batch {x['batch']}", line, None)
        for x, group in cases(rows, "layout", writes="never")
        if (line := compare(group, SEARCHED, OURS_KV))
    ]
    return _observed(lines)


def _libraries(rows: pd.DataFrame, few: bool) -> pd.DataFrame:
    lines = []
    for x, group in cases(rows, "prefill"):
        line = compare(group, FLASHINFER, FLA)
        if line and x["prefill"] in PROMPTS and ((x["H"], x["HV"]) == (2, 8)) == few:
            fla, own = PROMPTS[x["prefill"]]
            size = ((fla - 0.5) / (own + 0.5), (fla + 0.5) / (own - 0.5)) if few else None
            lines.append((x["prefill"] if few else f"{x['H']} / {x['HV']}, {x['prefill']}", line, size))
    return _observed(lines)


TABLES: Tables = {
    "tables.times": times_of,
    "tables.compared": compared,
    "tables.rings": rings,
    "tables.crossover": crossover,
    "tables.lengths": lengths,
    "tables.best_lengths": best_lengths,
    "tables.layouts": layouts,
    "tables.verifies": verifies,
    "tables.rival_drafts": rival_drafts,
    "tables.whole_steps": whole_steps,
    "tables.prefills": prefills,
    "tables.prefill_times": prefill_times,
    "tables.prefill_errors": prefill_errors,
    "tables.first_token": first_token,
    "tables.drift": drift,
    "tables.read_short": read_short,
    "claims.faster": lambda rows: _own(rows, STATES),
    "claims.traffic": lambda rows: _own(rows, ("fp32",)),
    "claims.whole_step": lambda rows: _whole_claim(rows, "ring", THEIRS_PLAIN, STEPS),
    "claims.whole_verify": lambda rows: _whole_claim(rows, "ring_verify", THEIRS_STORED, VERIFIES),
    "claims.right_length": right_length,
    "claims.layout_unwritten": layout_unwritten,
    "claims.few_heads": lambda rows: _libraries(rows, True),
    "claims.more_heads": lambda rows: _libraries(rows, False),
}


def said_floors(rows: pd.DataFrame) -> list[str]:
    """Percent of the floor with the GPU full, ours by the rule."""
    found = [
        [100 * usable(group)[OURS]["floor_bytes"] / _rate(x, group) / times(group)[OURS]]
        for x, group in cases(rows, "ring", gate="GDN", state="fp32")
        if x["batch"] >= 64 and OURS in times(group)
    ]
    return [f"{span([one for some in found for one in some], '.0f')} % of the floor"]


SENTENCES: Sentences = {"views.floors": said_floors}
