"""The tables of the study of products of GGUF weights, computed once more from the recorded rows.

Hit rates are counted without a cache: of the oracle by which stretches between two uses of an expert can be kept.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from common import (
    AA,
    COMPARED,
    DATA,
    RATIO,
    Params,
    Tables,
    cases,
    compare,
    facts,
    least,
    median,
    pick,
    table,
    times,
    usable,
)

STUDY = "batched_ffn"
SHAPE = ["model", "rows", "K", "format", "N", "trace", "policy", "capacity"]
OPS = ("product", "ffn", "routed", "cache")
SPECIALISED, CONTINUED = "tensor_core, specialised warps", "tensor_core, sums continued"
LOOP, ONE_LAUNCH, ONCE = "per_token", "gemm_n", "weight_stationary"  # a launch a token; one; weights read once
MATRIX, WIDE, INTEGERS = "tensor_core", "tensor_core, wide tiles", "tensor_core, integers"
INDEXED, INDEXED_MATRIX, INDEXED_INTEGERS = (
    f"grouped_indexed{end}" for end in ("", ", matrix instructions", ", integers")
)
ROWCOPY, STORED = "grouped_rowcopy", "per_token, blocks as stored"
READ, CUBLAS, DEQUANTISED = "read the stored bytes", "cuBLAS, bf16 weights", "dequantise + cuBLAS"
GROUPED_MM, GEMLITE, LLAMA = "F.grouped_mm, bf16 weights", "gemlite, tuned", "llama.cpp"
NEEDED, PREFETCHED = "copied when needed", "the next layer's prefetched"
RESIDENT, COPIES = "every expert there", "copies only"
FAMILIES = {  # the lab's own, each of one set of bits
    "product": (MATRIX, WIDE, ONCE, ONE_LAUNCH, LOOP, INTEGERS),
    "ffn": (MATRIX, WIDE, ONCE, ONE_LAUNCH, LOOP),
    "routed": (INDEXED_MATRIX, INDEXED_INTEGERS, INDEXED, ROWCOPY, LOOP),
}
ALONE = {"product": MATRIX, "ffn": MATRIX, "routed": INDEXED_MATRIX}  # stands for the lab
STORED_BITS = {  # bits of a weight as stored, scales included: of a block of 32 or 256 weights
    "F32": 32, "BF16": 16, "Q8_0": 34 * 8 / 32, "Q4_K": 144 * 8 / 256, "Q5_K": 176 * 8 / 256, "Q6_K": 210 * 8 / 256,
}  # fmt: skip
TO_FLOAT = {"F32": 0, "BF16": 1, "Q8_0": 3, "Q4_K": 1.375, "Q5_K": 1.625, "Q6_K": 1.875}  # instructions a weight
LANES, SMS, TILE_ROWS = 128, 132, 128


def _told(params: Mapping[str, Any], op: str) -> Params:
    return {"op": op} | pick(params, SHAPE)


def _all(rows: pd.DataFrame, ops: Iterable[str]) -> Iterator[tuple[str, Params, list[dict[str, Any]]]]:
    for op in ops:
        for params, group in cases(rows, op):
            yield op, params, group


# Times


def times_of(rows: pd.DataFrame) -> pd.DataFrame:
    """µs of every variant that is no control, and of what a plain read of the same bytes takes, in percent."""
    found = []
    for op, params, group in _all(rows, OPS):
        us = times(group)
        for name, row in usable(group).items():
            if row["role"] != "control":
                line = {"variant": name, "us": us[name], "us a token": us[name] / params["N"]}
                line |= {"launches": facts(row["evidence"]).get("launches", math.nan), "MB": row["floor_bytes"] / 1e6}
                line["passes"] = _passes(name, params) if op == "product" else math.nan
                line["% of reading"] = 100 * us[READ] / us[name] if READ in us else math.nan
                found.append(_told(params, op) | line)
    return table(found, ["op", *SHAPE, "variant", "us", "us a token", "launches", "MB", "passes", "% of reading"])


def passes(rows: pd.DataFrame) -> pd.DataFrame:
    """How often each variant of a product reads all weights."""
    lines = [
        pick(params, SHAPE) | {"variant": row["variant"], "passes": _passes(row["variant"], params)}
        for params, group in cases(rows, "product")
        for row in group
    ]
    return table(lines, [*SHAPE, "variant", "passes"])


def _passes(variant: str, params: Mapping[str, Any]) -> float:
    """Tokens over those that share a tile of weights, rounded up; NaN of what is not the lab's."""
    N = params["N"]
    together = next((size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size >= N), 256)
    shared = {LOOP: 1, ONE_LAUNCH: 1, ONCE: min(8, together), MATRIX: min(32, max(8, together))}
    shared |= {INTEGERS: shared[MATRIX], WIDE: _wide(max(16, together), params)}
    return math.ceil(N / shared[variant]) if variant in shared else math.nan


def _wide(together: int, params: Mapping[str, Any]) -> int:
    """Tokens of a wide tile: packed weights leave registers for 128; where all rows are split, half as many as else.

    All rows of a stored matrix are split where its tiles are fewer than a wave.
    """
    if params["format"] != "BF16":
        return min(128, together)
    split = params["rows"] / TILE_ROWS < SMS
    return 64 if together == 128 and split else together


def designs(rows: pd.DataFrame) -> pd.DataFrame:
    """Over a format's other design: the fastest of the others that were timed, cuBLAS, and a read."""
    found = []
    for params, group in cases(rows, "designs"):
        us = times(group)
        ours = CONTINUED if params["format"] == "BF16" else SPECIALISED
        for other in (least(us, (INTEGERS, WIDE, MATRIX)), CUBLAS):
            if other and (line := compare(group, ours, other)):
                line |= {"% of reading": us[READ] / us[ours] * 100}
                found.append(pick(params, ["rows", "K", "format", "N"]) | line)
    columns = ["rows", "K", "format", "N", "against", "us", "against us", *RATIO, "% of reading"]
    return table(found, columns)


def arithmetic(rows: pd.DataFrame) -> pd.DataFrame:
    """The least instructions of the multiply-add family, and the part of a plain read's speed that they allow."""
    found = []
    for params, group in cases(rows, "product"):
        us, known = times(group), usable(group)
        if ONCE in us and READ in us:
            sms = facts(known[ONCE]["evidence"])["sms"]
            mhz = median([one for row in group for one in row["sm_mhz"]])
            weight = TO_FLOAT[params["format"]] + params["N"]
            line = {"instructions a weight": weight, "reading µs": us[READ], "us": us[ONCE]}
            line["least µs"] = weight * params["rows"] * params["K"] / (sms * LANES * mhz)
            line["at most %"] = min(1, us[READ] / line["least µs"]) * 100
            line["% of reading"] = us[READ] / us[ONCE] * 100
            found.append(pick(params, SHAPE) | line)
    columns = ["instructions a weight", "least µs", "reading µs", "at most %", "us", "% of reading"]
    return table(found, [*SHAPE, *columns])


def launches_of(rows: pd.DataFrame) -> pd.DataFrame:
    """What the launches of the recorded rows of this GPU do."""
    every = pd.read_parquet(DATA / "launches.parquet")
    folder = rows["gpu"].iloc[0].lower().replace(" ", "-")
    return every[(every["gpu"] == folder) & (every["study"] == STUDY)]


def issued(rows: pd.DataFrame) -> pd.DataFrame:
    """Instructions a weight of the family by matrix units, and the part of its time in which they can be issued."""
    executed: dict[tuple[str, str], float] = defaultdict(float)
    for line in launches_of(rows).to_dict("records"):
        if line["variant"] == MATRIX and line["op"] == "product":
            executed[line["case"], line["kernel_sha"]] += line["instructions"]
    found = []
    for params, group in cases(rows, "product"):
        us, known = times(group), usable(group)
        count = executed.get((known[MATRIX]["case"], known[MATRIX]["kernel_sha"])) if MATRIX in known else None
        if count and READ in us and ONCE in known:
            cycles = median([one for row in group for one in row["sm_mhz"]]) * us[MATRIX]
            slots = cycles * facts(known[ONCE]["evidence"])["sms"] * LANES
            line = {"instructions a weight": 32 * count / params["rows"] / params["K"], "us": us[MATRIX]}
            line |= {"% of issue": 100 * 32 * count / slots, "issue µs": 32 * count / slots * us[MATRIX]}
            found.append(pick(params, SHAPE) | line | {"% of reading": us[READ] / us[MATRIX] * 100})
    columns = ["instructions a weight", "issue µs", "us", "% of issue", "% of reading"]
    return table(found, [*SHAPE, *columns])


# Pairs


def _pairs(rows: pd.DataFrame, op: str, variant: str, against: str, **said: Any) -> list[dict[str, Any]]:
    return [
        _told(params, op) | said | line
        for params, group in cases(rows, op)
        if (line := compare(group, variant, against))
    ]


PAIRS = [  # operation, variant, against: those that pages and claims set side by side
    ("product", ONE_LAUNCH, LOOP), ("product", ONCE, LOOP), ("product", ONCE, ONE_LAUNCH), ("product", LOOP, STORED),
    ("product", INTEGERS, MATRIX), ("routed", INDEXED, ROWCOPY), ("routed", INDEXED_INTEGERS, INDEXED_MATRIX),
]  # fmt: skip


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Every pair of `PAIRS`, in every case that has both."""
    found = [line for pair in PAIRS for line in _pairs(rows, *pair)]
    return table(found, ["op", *SHAPE, "variant", "against", *COMPARED])


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """A loop over one launch, and that over reading the weights once."""
    found = _pairs(rows, "product", ONE_LAUNCH, LOOP, step="one launch")
    found += _pairs(rows, "product", ONCE, ONE_LAUNCH, step="weights read once")
    return table(found, [*SHAPE, "step", *COMPARED])


LIBRARIES = [("product", CUBLAS), ("product", DEQUANTISED), ("ffn", CUBLAS), ("routed", GROUPED_MM)]


def beside(rows: pd.DataFrame) -> pd.DataFrame:
    """A library's time over that of one family of bits, and over that of the fastest of the lab's in each case."""
    found = []
    for op, library in LIBRARIES:
        for params, group in cases(rows, op):
            best = least(times(group), FAMILIES[op])
            line = compare(group, ALONE[op], library)
            if best and line:
                mixed = compare(group, best, library)
                line |= {"fastest": best, "mixed ratio": mixed["ratio"], "mixed verdict": mixed["verdict"]}
                found.append(_told(params, op) | line | {"library": library})
    return table(found, ["op", "library", *SHAPE, *COMPARED, "fastest", "mixed ratio", "mixed verdict"])


# Products


def crossovers(rows: pd.DataFrame) -> pd.DataFrame:
    """From how many tokens on matrix instructions are faster at all that were timed; to how many multiply-adds read."""
    shapes: dict[tuple, dict[int, dict[str, float]]] = defaultdict(dict)
    for params, group in cases(rows, "product"):
        shapes[params["format"], params["rows"], params["K"]][params["N"]] = times(group)
    found = []
    for (format, n, k), us in shapes.items():
        first = math.nan
        for tokens in sorted(us, reverse=True):  # from the most tokens down, as far as they are faster
            if us[tokens][MATRIX] >= us[tokens][ONCE]:
                break
            first = tokens
        near = max((tokens for tokens, one in us.items() if 0.8 * one[ONCE] <= one[READ]), default=math.nan)
        found.append({"format": format, "rows": n, "K": k, "matrix least N": first, "multiply-add most N": near})
    return table(found, ["format", "rows", "K", "matrix least N", "multiply-add most N"])


def price(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of one family of bits over that of the fastest of all; of the fastest of the lab's too."""
    found = []
    for params, group in cases(rows, "product"):
        us, roles = times(group), {row["variant"]: row["role"] for row in group}
        best = least(us, [name for name in us if roles[name] != "control"])
        line = {"fastest": best, "price": us[MATRIX] / us[best]}
        line["mixed price"] = min(us[name] for name in FAMILIES["product"] if name in us) / us[best]
        found.append(pick(params, SHAPE) | line)
    return table(found, [*SHAPE, "fastest", "price", "mixed price"])


def gemlite(rows: pd.DataFrame) -> pd.DataFrame:
    """gemlite's time over that of reading its own bits, over ours over that of reading ours."""
    found = []
    for params, group in cases(rows, "product"):
        us = times(group)
        if GEMLITE in us:
            bits = {"Q4_K": 4, "Q8_0": 8}[params["format"]] + 2 * 16 / 32  # a scale and a zero point in 32 weights
            speed = us[READ] / STORED_BITS[params["format"]]  # µs a bit of each weight
            best = least(us, FAMILIES["product"])
            ours, mixed, theirs = us[MATRIX] / us[READ], us[best] / us[READ], us[GEMLITE] / (bits * speed)
            line = {"ours / floor": ours, "gemlite / floor": theirs, "fastest": best}
            found.append(pick(params, SHAPE) | line | {"better": theirs / ours, "mixed better": theirs / mixed})
    columns = ["ours / floor", "gemlite / floor", "better", "fastest", "mixed better"]
    return table(found, [*SHAPE, *columns])


def beside_llama(rows: pd.DataFrame) -> pd.DataFrame:
    """llama.cpp's products beside ours: times and errors."""
    found = []
    for op, params, group in _all(rows, ("product", "routed")):
        us, known, ours = times(group), usable(group), ALONE[op]
        if LLAMA in us and ours in us:
            best = least(us, FAMILIES[op])
            line = {"llama.cpp µs": us[LLAMA], f"{ours} µs": us[ours], "fastest": best, "fastest µs": us[best]}
            line |= {"ratio": us[LLAMA] / us[ours], "mixed ratio": us[LLAMA] / us[best]}
            line |= {"llama.cpp error": known[LLAMA]["error"], f"{ours} error": known[ours]["error"]}
            found.append(_told(params, op) | line)
    timed = dict.fromkeys(name for line in found for name in line)
    of_ours = [f"{one} {what}" for one in (MATRIX, INDEXED_MATRIX) for what in ("µs", "error")]
    columns = ["llama.cpp µs", "fastest", "fastest µs", "ratio", "mixed ratio", "llama.cpp error", *of_ours]
    return table(found, ["op", *SHAPE, *(name for name in columns if name in timed)])


# Bits


def bits(rows: pd.DataFrame) -> pd.DataFrame:
    """Of every variant, in how many cases of several tokens one alone was looked at, and had the same bits."""
    asked: Counter[tuple] = Counter()
    alike: Counter[tuple] = Counter()
    for op, params, group in _all(rows, OPS[:3]):
        for row in group:
            known = facts(row["evidence"])
            if params["N"] > 1 and row["variant"] != AA and "alone" in known:
                key = op, row["variant"], _who(op, row)
                asked[key] += 1
                alike[key] += known["alone"] == 0 and not _refused(row["reason"], "alone")
    lines = [dict(zip(("op", "variant", "who"), key, strict=True)) | {"cases": asked[key]} for key in asked]
    return pd.DataFrame([line | {"same": alike[tuple(line.values())[:3]]} for line in lines])


def _who(op: str, row: Mapping[str, Any]) -> str:
    return "ours" if row["variant"] in FAMILIES[op] else "library" if row["role"] == "peer" else row["role"]


def _refused(reason: str, check: str) -> bool:
    """Whether one of the errors that a refusal names is of this check."""
    return any(re.match(rf"{check} (\d|nan)", one) for one in re.split(r"error of |, ", reason)[1:])


def stored_bits(rows: pd.DataFrame) -> pd.DataFrame:
    """Whether Q8_0 as stored has the bits of Q8_0 with its fields apart."""
    found = []
    for params, group in cases(rows, "product"):
        for row in group:
            other = _refused(row["reason"], "packed")
            if row["variant"] == STORED and (row["ok"] or other):
                found.append(pick(params, SHAPE) | {"same": not other})
    return table(found, [*SHAPE, "same"])


# The cache of experts


def cached(rows: pd.DataFrame) -> pd.DataFrame:
    """Steps through the cache: µs of each way, what is waited for, and whether copies and compute are as long."""
    found = []
    for params, group in cases(rows, "cache"):
        us, known = times(group), usable(group)
        rate = facts(known[NEEDED]["evidence"])["hit_rate"]
        longer, shorter = sorted((us[COPIES], us[RESIDENT]), reverse=True)
        line = {"hit rate": rate, "copies µs": us[COPIES], "compute µs": us[RESIDENT]}
        line |= {"when needed µs": us[NEEDED], "prefetched µs": us[PREFETCHED]}
        line |= {f"stall, {way}": us[name] - us[RESIDENT] for way, name in _WAYS.items()}
        line |= {"prefetched / larger": us[PREFETCHED] / longer, "balanced": longer <= 2 * shorter and rate != 1}
        found.append(pick(params, SHAPE) | line)
    stalls = [f"stall, {way}" for way in _WAYS]
    columns = ["copies µs", "compute µs", "when needed µs", "prefetched µs", *stalls, "prefetched / larger", "balanced"]
    return table(found, [*SHAPE, "hit rate", *columns])


_WAYS = {"when needed": NEEDED, "prefetched": PREFETCHED}
Dispatch = list[tuple[int, int]]  # (layer, expert) that one layer needs at once
CHANCES = {"uniform": (0.0, 0.0), "zipf": (0.0, 1.0), "local": (0.5, 1.0)}  # an expert stays; exponent of its rank


@cache
def _trace(kind: str, tokens: int, layers: int, experts: int, top_k: int, seed: int) -> list[Dispatch]:
    """A dispatch a token and layer: experts that stay, and others drawn by Gumbel's trick; numpy's draws in order."""
    stay, exponent = CHANCES[kind]
    random = np.random.default_rng(seed)
    logs = [random.permutation(-exponent * np.log(np.arange(1, experts + 1))) for _ in range(layers)]
    now: list[list[int]] = [[]] * layers
    found = []
    for at in range(tokens * layers):
        layer = at % layers
        kept = [expert for expert in now[layer] if random.random() < stay]
        scores = logs[layer] + random.gumbel(size=experts)
        free = [int(expert) for expert in np.argsort(-scores, kind="stable") if expert not in kept]
        now[layer] = kept + free[: top_k - len(kept)]
        found.append([(layer, expert) for expert in now[layer]])
    return found


def _together(trace: Sequence[Dispatch], tokens: int, layers: int, order: bool = False) -> list[Dispatch]:
    """Dispatches of so many tokens at a time, each expert once, layer by layer. order: of experts, not of first use."""
    found = []
    for first in range(0, len(trace), tokens * layers):
        for layer in range(layers):
            some = [key for one in trace[first + layer : first + tokens * layers : layers] for key in one]
            found.append(sorted(set(some)) if order else list(dict.fromkeys(some)))
    return found


def _oracle_hits(trace: Sequence[Dispatch], slots: int, first: Sequence[Dispatch]) -> int:
    """The most accesses that can hit, of a cache that starts with the most frequent keys of a first trace.

    A hit is a stretch between two uses in which a key is kept; beside it, what is accessed meanwhile has a slot. Taken
    in the order of their ends, as many stretches as there is room for are the most there can be.
    """
    keys = [key for one in trace if len(set(one)) <= slots for key in one]
    before = dict.fromkeys(_frequent(first, slots - 1), -1)
    kept, hits = np.zeros(len(keys), int), 0
    for at, key in enumerate(keys):
        if key in before:
            inside = kept[before[key] + 1 : at]
            if not len(inside) or inside.max() < slots - 1:
                inside += 1
                hits += 1
        before[key] = at
    return hits


def _frequent(trace: Sequence[Dispatch], count: int) -> list[tuple[int, int]]:
    """The most frequent keys, of equal ones those used first."""
    uses: Counter[tuple[int, int]] = Counter(key for one in trace for key in one)
    return sorted(uses, key=lambda key: -uses[key])[:count]


def oracle(rows: pd.DataFrame) -> pd.DataFrame:
    """The hit rate over the steps of a case of the cache that no policy exceeds; of one token at a time, as claimed."""
    lines = [pick(params, SHAPE) | {"best": _best(params)} for params, _ in cases(rows, "cache", N=1)]
    return table(lines, [*SHAPE, "best"])


def _best(params: Params) -> float:
    return _best_of(*(params[name] for name in ("trace", "N", "layers", "E", "top_k", "capacity")))


@cache
def _best_of(kind: str, N: int, layers: int, experts: int, top_k: int, capacity: int) -> float:
    """Of a case: at least 32 steps and 256 tokens, in each of which a layer's experts come in ascending order."""
    trace = _trace(kind, N * max(32, math.ceil(256 / N)), layers, experts, top_k, N)
    steps = _together(trace, N, layers, order=True)
    return _oracle_hits(steps, capacity * layers, steps) / sum(map(len, steps))


REUSED_AT = (1, 8, 64)
EXPERTS, TOP_K, LAYERS = 256, 8, 4  # of the routed model


def reuse(rows: pd.DataFrame) -> pd.DataFrame:
    """Tokens that share an expert under uniform routing: expected and drawn; of no rows."""
    found = []
    for n in REUSED_AT:
        drawn = {key for one in _trace("uniform", n, 1, EXPERTS, TOP_K, n) for key in one}
        expected = EXPERTS - EXPERTS * ((EXPERTS - TOP_K) / EXPERTS) ** n
        line = {"N": n, "distinct, predicted": expected, "distinct": len(drawn)}
        found.append(line | {"reuse, predicted": n * TOP_K / expected, "reuse": n * TOP_K / len(drawn)})
    return pd.DataFrame(found)


TRACES, CAPACITIES, LENGTH = ("uniform", "zipf", "local"), (16, 64), 64


def hit_rates(rows: pd.DataFrame) -> pd.DataFrame:
    """Hit rates of each policy in the second half of a trace, of which `pinned` has counted the first; of no rows."""
    found = []
    for kind in TRACES:
        whole = _together(_trace(kind, 2 * LENGTH, LAYERS, EXPERTS, TOP_K, 1), 1, LAYERS)
        first, second = whole[: LENGTH * LAYERS], whole[LENGTH * LAYERS :]
        keys = [key for one in second for key in one]
        for capacity in CAPACITIES:
            slots = capacity * LAYERS
            hits = {"lru": _lru_hits(keys, slots), "pinned": _pinned_hits(keys, slots, first)}
            hits |= {"belady": _oracle_hits(second, slots, first)}
            hits |= {name: _slru_hits(keys, slots, name == "slru_freq") for name in ("slru", "slru_freq")}
            for policy, count in hits.items():
                line = {"trace": kind, "policy": policy, "capacity": capacity, "bypassed": 0.0}
                found.append(line | {"hit rate": count / len(keys)})
    return pd.DataFrame(found)


def _lru_hits(keys: Sequence[tuple], slots: int) -> int:
    """Accesses since whose last use fewer others were used than there are slots."""
    last: dict[tuple, int] = {}
    hits = 0
    for at, key in enumerate(keys):
        hits += key in last and len(set(keys[last[key] + 1 : at])) < slots
        last[key] = at
    return hits


def _pinned_hits(keys: Sequence[tuple], slots: int, first: Sequence[Dispatch]) -> int:
    """Accesses of the pinned keys, and of others that come twice in a row but for pinned ones."""
    pinned = set(_frequent(first, slots - 1))
    others = [key for key in keys if key not in pinned]
    return len(keys) - len(others) + sum(one == other for one, other in pairwise(others))


def _slru_hits(keys: Sequence[tuple], slots: int, remember: bool) -> int:
    """Two lists, their heads last, as the source has them: the first for what came once, the other for what was hit."""
    room = max(1, slots - max(1, slots // 4))
    once: list[tuple] = []
    again: list[tuple] = []
    uses: Counter[tuple] = Counter()
    hits = 0
    for key in keys:
        uses[key] += 1
        if key in again or key in once:
            hits += 1
            (again if key in again else once).remove(key)
            again.append(key)
            if len(again) > room:
                once.append(again.pop(0))
            continue
        once.append(key)
        if len(once) + len(again) > slots:
            victim = min(once[:-1] or again, key=uses.__getitem__)
            (once if once[:-1] else again).remove(victim)
            if not remember:
                del uses[victim]
    return hits


# What the claims are judged by


def _ratios(
    rows: pd.DataFrame, op: str, variant: str, against: str, formats: Sequence[str] = (), **wanted: Any
) -> pd.DataFrame:
    """Pairs as observations."""
    found = []
    for params, group in cases(rows, op, **wanted):
        line = compare(group, variant, against)
        if line and (not formats or params["format"] in formats):
            shape = f"{params['rows']} × {params['K']}" if op == "product" else f"{params['N']} tokens"
            found.append({"case": f"{params['format']}, {shape}", "mid": line["ratio"], "N": params["N"]} | line)
    return table(found, ["case", "N", "mid", *RATIO[1:4], "runs"])


def one_launch(rows: pd.DataFrame) -> pd.DataFrame:
    """A loop over one launch, of eight tokens."""
    return _ratios(rows, "product", ONE_LAUNCH, LOOP, N=8).drop(columns="N")


def read_once(rows: pd.DataFrame) -> pd.DataFrame:
    """A loop over weights read once, of eight tokens."""
    return _ratios(rows, "product", ONCE, LOOP, N=8).drop(columns="N")


def fewer_reads(rows: pd.DataFrame) -> pd.DataFrame:
    """Weights read eight times over once, of formats that are numbers as they are stored."""
    return _ratios(rows, "product", ONCE, ONE_LAUNCH, ("F32", "BF16"), N=8).drop(columns="N")


def fields_apart(rows: pd.DataFrame) -> pd.DataFrame:
    """Q8_0 as stored over fields apart."""
    return _ratios(rows, "product", LOOP, STORED).drop(columns="N")


def rows_in_place(rows: pd.DataFrame) -> pd.DataFrame:
    """A copy a row over rows that are found in the kernel, of several tokens."""
    found = _ratios(rows, "routed", INDEXED, ROWCOPY)
    return found[found["N"] > 1].drop(columns="N")


def same_alone(rows: pd.DataFrame) -> pd.DataFrame:
    """The part of all cases and batched variants of ours with the bits of a token alone."""
    ours = [line for line in _lines(bits(rows), who="ours") if line["variant"] != LOOP]
    return _part(rows, [(line["same"], line["cases"]) for line in ours], {line["op"] for line in ours})


def same_as_stored(rows: pd.DataFrame) -> pd.DataFrame:
    """The part of the shapes in which Q8_0 has the same bits both ways."""
    return _part(rows, [(same, 1) for same in stored_bits(rows)["same"]], {"product"})


def _lines(frame: pd.DataFrame, **wanted: Any) -> list[dict[str, Any]]:
    return [line for line in frame.to_dict("records") if wanted.items() <= line.items()]


def _part(rows: pd.DataFrame, counts: Sequence[tuple[int, int]], ops: set[str]) -> pd.DataFrame:
    """A part of cases; any part if it is all of them and no library's bits were found to differ either."""
    same, asked = (sum(some) for some in zip(*counts, strict=True))
    can_fail = any(line["same"] < line["cases"] for line in _lines(bits(rows), who="library"))
    runs = min(
        len(set(run)) for op, ok, run in zip(rows["op"], rows["ok"], rows["run"], strict=True) if ok and op in ops
    )
    low = 0.0 if same == asked and not can_fail else same / asked
    line = {"case": f"{asked} cases", "mid": same / asked, "low": low, "high": same / asked, "noise": 0, "runs": runs}
    return pd.DataFrame([line])


def slots(rows: pd.DataFrame) -> pd.DataFrame:
    """Hit rates of twice top_k slots a layer, one token at a time, where the oracle hits half at least."""
    found = []
    for params, group in cases(rows, "cache", N=1, policy="slru"):
        row = usable(group).get(NEEDED)
        if row and params["capacity"] == 2 * params["top_k"] and (best := _best(params)) >= 0.5:
            rate = facts(row["evidence"])["hit_rate"]
            case = f"{params['trace']} trace (at best {100 * best:.0f} %)"
            line = {"case": case, "mid": rate, "low": rate, "high": rate, "noise": 0, "runs": len(set(row["run"]))}
            found.append(line)
    return pd.DataFrame(found)


TABLES: Tables = {
    "tables.times": times_of,
    "tables.passes": passes,
    "tables.designs": designs,
    "tables.arithmetic": arithmetic,
    "tables.issued": issued,
    "tables.compared": compared,
    "tables.gains": gains,
    "tables.beside": beside,
    "tables.crossovers": crossovers,
    "tables.price": price,
    "tables.gemlite": gemlite,
    "tables.beside_llama": beside_llama,
    "tables.bits": bits,
    "tables.stored_bits": stored_bits,
    "tables.cached": cached,
    "tables.oracle": oracle,
    "tables.reuse": reuse,
    "tables.hit_rates": hit_rates,
    "claims.one_launch": one_launch,
    "claims.read_once": read_once,
    "claims.fewer_reads": fewer_reads,
    "claims.fields_apart": fields_apart,
    "claims.rows_in_place": rows_in_place,
    "claims.same_alone": same_alone,
    "claims.same_as_stored": same_as_stored,
    "claims.slots": slots,
}
