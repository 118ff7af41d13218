"""Tables of the study: what the notebook shows and the claims are judged by, made from the measured rows."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import RATIO, Cases, best_pair, cases, facts, frame, pairs, picked, timed, where
from labkit.bench.tables import compared as compared_in
from labkit.bench.verdict import median_us
from labkit.shapes import QWEN35_4B, GatedDeltaModel
from labkit.studies.gated_delta_today import variants, work
from labkit.studies.gated_delta_today.variants import LENGTHS, NARROW, RING_LENGTHS, STATES, with_length

CASE = ["gate", "state", "batch", "writes", "draft", "T", "H", "HV", "prefill"]
BF16_BYTES = 2.0
PEAK_BF16 = {"H100 80GB HBM3": 989e12, "H200": 989e12}  # FLOP/s, dense; by data sheet of the SXM boards
WHOSE = ("ours", variants.SGLANG)


def ordered_cases(rows: pd.DataFrame, op: str, **wanted: Any) -> Cases:
    """The cases of an operation, GDN first, fp32 before bf16, few heads before many, small before large."""

    def place(params: Mapping[str, Any], group: pd.DataFrame) -> tuple:
        state = (*STATES, *NARROW).index(params.get("state", "fp32"))
        return params["gate"], state, params["HV"], group["floor_bytes"].iloc[0]

    return cases(rows, op, place, **wanted)


def times(rows: pd.DataFrame, op: str) -> pd.DataFrame:
    """µs of every variant of every case, and percent of the floor: its bytes at the rate of the read in the same case.

    Where nothing was read beside it, percent is NaN.
    """
    found = []
    for params, group in ordered_cases(rows, op):
        rate = _rate(params, group)
        least = group["floor_bytes"].iloc[0] / rate if rate else math.nan
        for line in timed(group).values():
            found.append(picked(params, CASE) | line | {"floor us": least, "percent": 100 * least / line["us"]})
    return frame(found, [*CASE, "variant", "role", "us", "floor us", "percent"])


def _rate(params: Mapping[str, Any], group: pd.DataFrame) -> float:
    """Bytes a µs of the read of a case's states; 0 if it was not timed."""
    us = median_us(group).get(variants.READ)
    return work.state_bytes(dict(params)) / us if us else 0.0


def compared(rows: pd.DataFrame, op: str, variant: str, against: str, **wanted: Any) -> pd.DataFrame:
    """Time of `against` over that of `variant` in every case of an operation that has both."""
    return compared_in(ordered_cases(rows, op, **wanted), variant, against, CASE).drop(columns="no slower")


def rings(rows: pd.DataFrame) -> pd.DataFrame:
    """Decode on a ring, each side at its best, against each other: SGLang's time over ours.

    Columns plain / ours: the time of ours that writes the state over that of ours by the rule.
    """
    ours, theirs = (variants.OURS, variants.SEARCHED), (variants.SGLANG_RING, variants.SGLANG_SEARCHED)
    found = []
    for params, group in ordered_cases(rows, "ring"):
        if line := best_pair(group, ours, theirs):
            us = median_us(group)
            plain, rule = us.get(variants.PLAIN, math.nan), us.get(variants.OURS, math.nan)
            said = {"ours µs": line["us"], "SGLang µs": line["against us"], "plain / ours": plain / rule}
            found.append(picked(params, CASE) | said | picked(line, [*RATIO, "runs"]))
    return frame(found, ["gate", "state", "batch", "ours µs", "SGLang µs", "plain / ours", *RATIO, "runs"])


def crossover(rows: pd.DataFrame) -> pd.DataFrame:
    """The smallest batch from which on a ring is faster than writing the state, of ours and of SGLang's; GDN.

    NaN: from none. Columns: state, whose, batch.
    """
    pair = {"ours": (variants.OURS, variants.PLAIN), "SGLang's": (variants.SGLANG_RING, variants.SGLANG_PLAIN)}
    found = []
    for (whose, names), state in product(pair.items(), STATES):
        table = compared(rows, "ring", *names, gate="GDN", state=state)
        if len(table):
            not_yet = table["batch"][table["verdict"] != "faster"]
            after = table["batch"][table["batch"] > not_yet.max()] if len(not_yet) else table["batch"]
            found.append({"state": state, "whose": whose, "batch": float(after.min()) if len(after) else math.nan})
    return frame(found, ["state", "whose", "batch"])


def lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Time with every L, ours and SGLang's, each with its fastest launch; and the floor with this L.

    Columns gate, state, batch, whose, L, us, floor us (its bytes at the rate of the read in the same case), and the
    time of this L over that with L = 16, as ratio with its interval: below 1, it is faster.
    """
    found = []
    for params, group in ordered_cases(rows, "length"):
        rate = _rate(params, group)
        for whose, n in product(WHOSE, RING_LENGTHS):
            us = median_us(group).get(with_length(n, whose))
            if us is None:
                continue
            least = work.ring_bytes(dict(params), n) / rate if rate else math.nan
            line = {"whose": whose, "L": n, "us": us, "floor us": least, "percent": 100 * least / us}
            usual = pairs(group, [(with_length(variants.LENGTH, whose), with_length(n, whose))])
            kept = picked(usual[0], [*RATIO, "runs"]) if usual and n != variants.LENGTH else {}
            found.append(picked(params, CASE) | line | kept)
    return frame(found, ["gate", "state", "batch", "whose", "L", "us", "floor us", "percent", *RATIO, "runs"])


def best_lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """The L of the least bytes of those timed, and the fastest L, ours and SGLang's; with what L = 16 costs beside it.

    Columns gate, state, batch, whose, predicted L, fastest L, and its time under that of L = 16, as ratio: above 1, the
    fastest L is faster than 16.
    """
    table, found = lengths(rows), []
    for (gate, state, batch, whose), some in table.groupby(["gate", "state", "batch", "whose"], sort=False):
        best = some.loc[some["us"].idxmin()]
        usual = some[some["L"] == variants.LENGTH]
        if usual.empty:
            continue
        [(_, group)] = ordered_cases(rows, "length", gate=gate, state=state, batch=batch)
        names = with_length(int(best["L"]), whose), with_length(variants.LENGTH, whose)
        line = pairs(group, [names])[0] if names[0] != names[1] else {}
        floors = some.loc[some["floor us"].idxmin(), "L"] if some["floor us"].notna().any() else math.nan
        said = {"gate": gate, "state": state, "batch": batch, "whose": whose}
        said |= {"predicted L": floors, "fastest L": int(best["L"])}
        found.append(said | picked(line, [*RATIO, "runs"]))
    columns = ["gate", "state", "batch", "whose", "predicted L", "fastest L", *RATIO, "runs"]
    return frame(found, columns).reindex(columns=columns)  # without a ratio where 16 is the fastest of all


def predicted_lengths(parameters: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """By bytes alone, without a measurement: the best L of cases, and bytes a token there and with L = 1 and 16."""
    found = []
    for x in parameters:
        best = work.best_length(dict(x))
        line = {"gate": x["gate"], "state": x["state"], "best L": best}
        for n in (1, variants.LENGTH, best):
            line[f"MB, {'best L' if n == best else f'L = {n}'}"] = work.ring_bytes(dict(x), n) / 1e6
        line |= {"writing always / best L": work.ring_bytes(dict(x), 1) / work.ring_bytes(dict(x), best)}
        found.append(line)
    return pd.DataFrame(found)


def layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of [K, V] over that of [V, K]: of the ring and of the step that writes; columns writes, kernel."""
    kernels = {"ring": (variants.SEARCHED, variants.OURS_KV), "state written": (variants.PLAIN, variants.PLAIN_KV)}
    parts = [compared(rows, "layout", *pair).assign(kernel=name) for name, pair in kernels.items()]
    table = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    return table.reindex(columns=["kernel", "state", "batch", "writes", "us", "against us", *RATIO, "runs"])


def verifies(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of a verify that stores states over that of one on the ring, ours and SGLang's; column whose."""
    pair = {"ours": (variants.OURS, variants.OURS_STORED), "SGLang's": (variants.SGLANG_RING, variants.SGLANG_STORED)}
    pair |= {"ours, one at a time": (variants.ONE_DRAFT, variants.OURS_STORED)}
    pair |= {"ours, with its writes": (variants.WITH_WRITES, variants.OURS_STORED)}
    parts = [compared(rows, "ring_verify", *names).assign(whose=whose) for whose, names in pair.items()]
    table = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    return table.reindex(columns=["whose", "state", "batch", "draft", "T", "us", "against us", *RATIO, "runs"])


def rival_drafts(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of SGLang's drafts on the ring over that of ours."""
    return compared(rows, "ring_verify", variants.OURS, variants.SGLANG_RING)


def whole_steps(
    rows: pd.DataFrame, op: str, variant: str, against: str, context: int, model: GatedDeltaModel = QWEN35_4B
) -> pd.DataFrame:
    """A whole step of a model with fp32 states, with `against` over with `variant`, if all else goes at full speed.

    All else: weights and KV cache at the rate of the read in the same case, or the products of all tokens at the GPU's
    peak, whichever takes longer. So the gain is the most that the kernel can give. noise: the kernel's times its share.
    """
    found = []
    for params, group in ordered_cases(rows, op, gate="GDN", state="fp32"):
        line = next(iter(pairs(group, [(variant, against)])), None)
        rate = _rate(params, group)
        if line is None or not rate:
            continue
        tokens = params.get("T", 1)
        cache = params["batch"] * context * (model.all_layers - model.layers) * 2 * model.kv_heads * model.head_dim
        moved = (model.total + cache) * BF16_BYTES / rate
        products = 2 * model.total * params["batch"] * tokens / _peak(rows) * 1e6
        rest, old = max(moved, products), model.layers * line["against us"]
        share = old / (rest + old)
        gains = {name: 1 / (1 - share + share / line[name]) for name in ("ratio", "low", "high")}
        said = picked(params, CASE) | {"share %": 100 * share, "kernel": line["ratio"], "noise": share * line["noise"]}
        found.append(said | gains | {"runs": line["runs"]})
    return frame(found, ["batch", "draft", "T", "share %", "kernel", "ratio", "low", "high", "noise", "runs"])


def _peak(rows: pd.DataFrame) -> float:
    """FLOP/s of the GPU's matrix products in bf16; infinite where it is not known here."""
    return next((rate for name, rate in PEAK_BF16.items() if rows["gpu"].iloc[0].endswith(name)), math.inf)


def prefills(rows: pd.DataFrame) -> pd.DataFrame:
    """Every prompt: who against whom, as ratio: the time of `against` over that of `variant`.

    Pairs: ours, fused, against the faster of fla and FlashInfer, and against segments alone; those against
    one segment; FlashInfer against fla.
    """
    found = []
    for params, group in ordered_cases(rows, "prefill"):
        own = [(variants.FUSED, variants.SEGMENTS), (variants.SEGMENTS, variants.ONE_SEGMENT)]
        lines = pairs(group, [*own, (variants.FLASHINFER, variants.FLA)])
        if best := best_pair(group, [variants.FUSED], [variants.FLA, variants.FLASHINFER]):
            lines.append(best | {"beside": "the faster library"})
        for line in lines:
            found.append(picked(params, ["H", "HV", "prefill"]) | {"tokens": sum(LENGTHS[params["prefill"]])} | line)
    columns = ["H", "HV", "prefill", "tokens", "variant", "against", "us", "against us", *RATIO, "runs", "beside"]
    return pd.DataFrame(found, columns=columns)


def prefill_times(rows: pd.DataFrame) -> pd.DataFrame:
    """µs of every variant of every prompt, with tokens and, of ours, the number of segments a sequence."""
    found = []
    for params, group in ordered_cases(rows, "prefill"):
        known = facts(group)
        for name, line in timed(group).items():
            said = picked(params, ["H", "HV", "prefill"]) | {"tokens": sum(LENGTHS[params["prefill"]])}
            segments = known.get(name, {}).get("segments", math.nan)
            found.append(said | {"variant": name, "us": line["us"], "segments": segments})
    return frame(found, ["H", "HV", "prefill", "tokens", "variant", "us", "segments"])


def prefill_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors of outputs against float64 by variant; ours with its segments, and if a segment's map were left out."""
    found = []
    for params, group in ordered_cases(rows, "prefill"):
        for name, known in facts(group).items():
            if "error" in known:
                line = {"variant": name, "segments": known.get("segments", math.nan), "error": known["error"]}
                line |= {"a map left out": known.get("left out", math.nan)}
                found.append(picked(params, ["H", "HV", "prefill"]) | line)
    return frame(found, ["H", "HV", "prefill", "variant", "segments", "error", "a map left out"])


def searched(rows: pd.DataFrame) -> pd.DataFrame:
    """What the searches chose: op, case, variant, choice, L or segments."""
    found = []
    for op in ("ring", "length", "ring_verify"):
        for params, group in ordered_cases(rows, op):
            for name, known in facts(group).items():
                if "choice" in known:
                    said = {"op": op, "variant": name, "choice": known["choice"], "L": known.get("L", math.nan)}
                    found.append(picked(params, CASE) | said)
    return frame(found, ["op", "gate", "state", "batch", "variant", "choice", "L"])


def drift(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors along the tokens: columns gate, state, L, tokens, output error, state error."""
    found = []
    for params, group in ordered_cases(rows, "drift"):
        known = facts(group)
        for n in variants.DRIFT_LENGTHS:
            for errors in known.get(with_length(n), {}).get("drift", []):
                found.append((params["gate"], params["state"], n, *errors))
    return pd.DataFrame(found, columns=["gate", "state", "L", "tokens", "output error", "state error"])


def read_short(rows: pd.DataFrame) -> pd.DataFrame:
    """The control: the error of an output for which the ring was read one entry short, by gate, state and L."""
    found = []
    for params, group in ordered_cases(rows, "drift"):
        known = facts(group)
        for n in variants.DRIFT_LENGTHS:
            if "short" in known.get(with_length(n), {}):
                line = {"gate": params["gate"], "state": params["state"], "L": n}
                found.append(line | {"one entry short": known[with_length(n)]["short"]})
    return frame(found, ["gate", "state", "L", "one entry short"])


def memory(states: Sequence[str], sizes: Sequence[int], model: GatedDeltaModel = QWEN35_4B) -> pd.DataFrame:
    """By arithmetic: GB of all layers' states and rings against sequences; drafts whose states are stored take more.

    Columns state, batch, what, GB; T = 4 drafts.
    """
    shape = {
        "H": model.heads,
        "HV": model.value_heads,
        "K": model.k,
        "V": model.v,
        "gate": "GDN",
        "activations": "bf16",
    }
    found = []
    for state, batch in product(states, sizes):
        x = shape | {"state": state, "batch": batch}
        kept, ring = work.state_bytes(x), work.ring_memory(x, variants.LENGTH)
        parts = {"states": kept, f"states and rings, L = {variants.LENGTH}": kept + ring}
        parts |= {"states, and those of 4 drafts": 5 * kept}
        for what, size in parts.items():
            found.append({"state": state, "batch": batch, "what": what, "GB": size * model.layers / 1e9})
    return pd.DataFrame(found)


def most_sequences(states: Sequence[str], sizes_gb: Sequence[int], model: GatedDeltaModel = QWEN35_4B) -> pd.DataFrame:
    """By arithmetic: how many sequences' states a memory holds beside the model's bf16 weights, without KV cache.

    Columns state, GB, then how many of each: states alone, with rings of L = 16, with the states of 4 drafts.
    """
    found = []
    for state, size in product(states, sizes_gb):
        one = memory([state], [1], model).set_index("what")["GB"]
        free = size - model.total * BF16_BYTES / 1e9
        found.append({"state": state, "GPU memory, GB": size} | {what: int(free / gb) for what, gb in one.items()})
    return pd.DataFrame(found)


def first_token(rows: pd.DataFrame, model: GatedDeltaModel = QWEN35_4B) -> pd.DataFrame:
    """A prefill with fla's extends over one with ours, or FlashInfer's, if all else is products at the GPU's peak.

    Of prompts with all heads of the model; columns prefill, who, share % of fla's extends, and the gain as ratio.
    """
    found = []
    for params, group in ordered_cases(rows, "prefill", H=model.heads, HV=model.value_heads):
        tokens = sum(LENGTHS[params["prefill"]])
        rest = 2 * model.total * tokens / _peak(rows) * 1e6
        for line in pairs(group, [(name, variants.FLA) for name in (variants.FUSED, variants.FLASHINFER)]):
            old = model.layers * line["against us"]
            share = old / (rest + old)
            gains = {name: 1 / (1 - share + share / line[name]) for name in ("ratio", "low", "high")}
            said = {"prefill": params["prefill"], "variant": line["variant"], "share %": 100 * share}
            found.append(said | {"kernel": line["ratio"]} | gains)
    return frame(found, ["prefill", "variant", "share %", "kernel", "ratio", "low", "high"])


def full(table: pd.DataFrame, least: int) -> pd.DataFrame:
    """The lines of batches from `least` on."""
    return where(table, batch=sorted({n for n in table["batch"] if n >= least})) if len(table) else table


ledger.watch(__name__)
