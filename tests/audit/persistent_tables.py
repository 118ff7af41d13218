"""The tables of the study of persistent tables, computed once more from the recorded rows.

What the host takes is compared within a process, not within a block: its interval is that of medians, each row of which
is resampled by itself. `apart` finds it without drawing, as `common.interval` finds that of pairs, and with the same
tolerance: five standard deviations of the share of 2000 draws that lie beyond an end.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from itertools import pairwise, product
from typing import Any

import numpy as np
import pandas as pd
from common import (
    AA,
    COMPARED,
    DRAWS,
    GRID,
    NO_END,
    SIGMAS,
    T_975,
    End,
    Interval,
    Sentences,
    Tables,
    _medians,
    blocks,
    by_process,
    cases,
    compare,
    counted,
    either,
    facts,
    faster,
    interval,
    median,
    noise,
    paired,
    table,
    us,
    usable,
    verdict,
)  # fmt: skip

STUDY = "persistent_tables"
H1024, LLAMA = "AutoMegaKernel h1024", "Llama-3.2-1B"
MAIN = {"start": 16, "parts": 0, "dtype": "bf16"}
PUBLISHED = {"model": H1024, "start": 16, "parts": 20, "dtype": "bf16"}
CASE = ["model", "dtype", "start", "parts"]
QUEUED = 1000  # µs of other work on the stream
SURE = 0.05  # half width of an interval over its middle

OURS, LONGEST, UNORDERED, READ = "tables", "tables, longest first", "tables, nobody waits", "read as many bytes"
GEMV, GEMV_DEPENDENT = "kernels, our GEMV", "kernels, our GEMV, dependent launch"
SEPARATE = ("kernels, cuBLAS", GEMV)
DEPENDENT = ("kernels, cuBLAS, dependent launch", GEMV_DEPENDENT)
CUBLAS = ("kernels, cuBLAS", "kernels, cuBLAS, dependent launch")
MARKED = "tables, moments written down"
SPANNED = "tables, attention in spans"
STREAMED = "tables, weights by a warp of their own"
CHANGED = ("tables, nothing loaded before a wait", "tables, more asked for in the L2 before a wait", MARKED)
REBUILT, VECTORISED = "1 rebuilt in Python, pageable", "2 rebuilt vectorised, pageable"
PREBUILT = "3 prebuilt, pageable"
PINNED, ONE_POSITION = "4 pinned, double-buffered", "5 one position replayed"
ONE_BY_ONE, PACKED = "6 words from the host, one by one", "6 words from the host, packed"
BY_KERNEL, IN_LAUNCH = "7 words by a kernel", "8 position in the launch"
GRAPH, REPLAYED = "9 CUDA graph, position on the GPU", "graph of kernels, a replay a token"
SHORT = {  # ways, as the page calls them
    REBUILT: "rebuilt in Python", VECTORISED: "rebuilt vectorised", PREBUILT: "tables kept, pageable",
    PINNED: "tables kept, pinned", ONE_POSITION: "one position (wrong)",
    ONE_BY_ONE: "4-byte writes, singly", PACKED: "4-byte writes, packed",
    BY_KERNEL: "4-byte writes, kernel", IN_LAUNCH: "position in the launch", GRAPH: "position on the GPU",
}  # fmt: skip
SHOWN = SHORT | {
    **{f"{way}: {table} alone": f"{SHORT[way]}: {table} alone" for way in (REBUILT, PREBUILT) for table in
       ("buffers", "records", "queue")},
    LONGEST: "tables, longest record first", MARKED: "tables, time stamps written",
    STREAMED: "tables, a warp copies weights",
    CHANGED[0]: CHANGED[0], CHANGED[1]: "tables, more loaded into L2 before a wait",
    SEPARATE[0]: "separate kernels, cuBLAS", GEMV: "separate kernels, GEMV",
    DEPENDENT[0]: "separate kernels, cuBLAS, dependent launch",
    GEMV_DEPENDENT: "separate kernels, GEMV, dependent launch", REPLAYED: "separate kernels, one graph a token",
}  # fmt: skip
SWEPT = (VECTORISED, PREBUILT, PINNED, PACKED, BY_KERNEL, IN_LAUNCH, GRAPH)
PARTS = ("build", "copy", "launch")
ONE_TABLE = ("buffers", "records", "queue")
L2 = {"NVIDIA H100 80GB HBM3": 50 * 2**20, "NVIDIA H200": 60 * 2**20}  # bytes
# Of a model: hidden, layers, heads, kv heads, values of a head, feed-forward width, vocabulary.
SHAPES = {
    H1024: (1024, 4, 16, 4, 64, 2816, 32000),
    "AutoMegaKernel h2048": (2048, 4, 16, 4, 128, 5632, 32000),
    LLAMA: (2048, 16, 32, 8, 64, 8192, 128256),
}

Row = Mapping[tuple[int, int], float]  # (process, block) -> ns, or what is made of it
Spread = tuple[np.ndarray, np.ndarray]  # values, and how likely each is


# Intervals of what was measured apart in a process


def apart(rows: Sequence[Row], quantity: Callable[..., Any], log: bool = True) -> Interval:
    """Mean over processes, of the logarithm or not, of a quantity of each row's median; with its 95 % interval.

    Each row is resampled by itself, and the processes; never narrower than Student's interval of the processes.
    """
    return _apart(_by_process(rows), quantity, log)


def middle(row: Row) -> float:
    """Of the µs of one row, the same without an interval."""
    return math.exp(_mean(_centres(_by_process([row]), in_us, np.log)))


def _by_process(rows: Sequence[Row]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Of each process that all rows have, the values of each row."""
    runs = sorted(set.intersection(*({run for run, _ in row} for row in rows)))
    return tuple(tuple(tuple(row[key] for key in sorted(row) if key[0] == run) for row in rows) for run in runs)


def _centres(values: Any, quantity: Callable[..., Any], to: Callable[..., Any]) -> list[float]:
    return [float(to(quantity(*map(median, process)))) for process in values]


@cache
def _apart(values: tuple[tuple[tuple[float, ...], ...], ...], quantity: Callable[..., Any], log: bool) -> Interval:
    to, back = (np.log, math.exp) if log else (np.asarray, float)
    centres, runs = _centres(values, quantity, to), len(values)
    mid, half = _mean(centres), 0.0
    if runs > 1:
        variance = sum((centre - mid) ** 2 for centre in centres) / (runs - 1)
        half = T_975[min(runs - 1, len(T_975)) - 1] * math.sqrt(variance / runs)
    low, high = _ends([_spread(process, lambda *some: to(quantity(*some))) for process in values])
    ends = low.each(lambda x: min(x, mid - half)), high.each(lambda x: max(x, mid + half))
    return Interval(mid, *ends, runs).each(back)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spread(rows: Sequence[Sequence[float]], quantity: Callable[..., np.ndarray]) -> Spread:
    """How a quantity of resampled medians is spread: of every combination of them, but those of less than 1e-5."""
    medians = [_likely(*_medians(some)) for some in rows]
    values = np.meshgrid(*(some for some, _ in medians), indexing="ij")
    weights = reduce(np.multiply.outer, (some for _, some in medians))
    return np.ravel(quantity(*values)), np.ravel(weights)


def _likely(values: np.ndarray, weights: np.ndarray) -> Spread:
    kept = weights > 1e-5
    return values[kept], weights[kept] / weights[kept].sum()


def _ends(spreads: Sequence[Spread]) -> list[End]:
    """Both ends of 95 % of the mean of as many values as there are spreads, each of a spread at random."""
    runs = len(spreads)
    values, weights = (np.concatenate(some) for some in zip(*spreads, strict=True))
    first, step = values.min(), max(np.ptp(values), 1e-12) / (GRID - 1)
    one = np.bincount(np.rint((values - first) / step).astype(int), weights / runs, GRID)
    cumulated = np.cumsum(np.fft.irfft(np.fft.rfft(one, runs * GRID) ** runs, runs * GRID))  # a convolution
    found = []
    for share in (0.025, 0.975):
        off = SIGMAS * math.sqrt(share * (1 - share) / DRAWS)
        at = [first + step * np.searchsorted(cumulated, x) / runs for x in (share, share - off, share + off)]
        found.append(End(float(at[0]), float(at[1] - step), float(at[2] + step)))
    return found


def itself(value: Any) -> Any:
    """A quantity."""
    return value


def in_us(ns: Any) -> Any:
    """ns as µs."""
    return ns / 1000


def over(part: Any, *others: Any) -> Any:
    """A part over the sum of others."""
    return part / sum(others)


def beyond_in_us(more: Any, less: Any) -> Any:
    """ns beyond others, in µs."""
    return (more - less) / 1000


def idle_percent(token: Any, step: Any) -> Any:
    """Percent of a token beyond the step."""
    return 100 * (1 - step / token)


def named(found: Interval, name: str, low: str, high: str) -> dict[str, float]:
    """An interval as columns of a table."""
    return {name: found.mid} | found.low.columns(low) | found.high.columns(high)


def ends(found: Interval, name: str) -> dict[str, float]:
    """The columns NAME, NAME low and NAME high."""
    return named(found, name, f"{name} low", f"{name} high")


def sure(found: Interval) -> str:
    """Whether an interval is known within `SURE`, of several processes."""
    widths = (found.high.least - found.low.most) / 2, (found.high.most - found.low.least) / 2
    return either(str(found.runs > 1 and width <= SURE * abs(found.mid)) for width in widths)


# A token without the host


def _of_mode(group: Iterable[dict[str, Any]], mode: str) -> list[dict[str, Any]]:
    return [row for row in group if row["mode"] == mode]


def _bytes(params: Mapping[str, Any]) -> int:
    """Least bytes of a token: all weights, one row of the embedding, the mean context's keys and values and its own.

    The mean of a sequence of 8 tokens, of 32 of the small model, though a sample may be of its first tokens alone.
    """
    hidden, layers, _, kv_heads, width, _, _ = SHAPES[params["model"]]
    weights = sum(_projections(params["model"]).values()) + (2 * layers + 1) * hidden + hidden
    alone = params["model"] == H1024 and params["start"] == 16 and not params.get("parts")
    tokens, batch = 32 if alone else 8, params.get("batch", 1)
    context = params["start"] + (tokens + 1) / 2
    cache = 2 * layers * kv_heads * width * (context + 1)
    return {"bf16": 2, "fp32": 4}[params["dtype"]] * round(weights + batch * cache + (batch - 1) * hidden)


def _alone(
    params: Mapping[str, Any], group: Sequence[Mapping[str, Any]], names: Iterable[str], base: str = OURS
) -> list[dict[str, Any]]:
    """µs, TB/s and, but of the base itself, time over that of the base."""
    found, known, size = [], usable(group), _bytes(params)
    for name in names:
        if name in known:
            line = {} if name == base else compare(group, base, name)
            tbs = size / us(known[name]) / 1e6
            found.append({"verdict": ""} | line | {"variant": name, "us": us(known[name]), "tbs": tbs})
    return found


def graphs(rows: pd.DataFrame) -> pd.DataFrame:
    """Every step that is not one with a choice changed, in the case of each model that has all of them."""
    found = []
    for params, group in cases(rows, "token", **MAIN):
        captured = [row for row in _of_mode(group, "graph") if row["variant"] not in (AA, STREAMED, *CHANGED)]
        reading = us(usable(group)[READ])
        for line in _alone(params, group, [row["variant"] for row in captured]):
            line["% of ceiling"] = 100 * line["tbs"] / captured[0]["ceiling"]
            line["% of reading"] = 100 * reading / line["us"]
            found.append({"model": params["model"]} | line)
    shares = ["% of ceiling", "% of reading"]
    return table(found, ["model", "variant", "us", "tbs", *shares, "ratio", "low", "high", "verdict", "runs"])


def ablations(rows: pd.DataFrame) -> pd.DataFrame:
    """The steps with one choice changed."""
    found = [
        {"model": params["model"]} | line
        for params, group in cases(rows, "token", **MAIN)
        for line in _alone(params, group, CHANGED)
    ]
    return table(found, ["model", "variant", "us", "ratio", "low", "high", "verdict"])


def _projections(model: str) -> dict[str, int]:
    """Values of the weights of each op, all layers together."""
    hidden, layers, heads, kv_heads, width, ffn, vocab = SHAPES[model]
    of_layer = {"qkv": (heads + 2 * kv_heads) * width * hidden, "output": heads * width * hidden}
    of_layer |= {"gate_up": 2 * ffn * hidden, "down": ffn * hidden}
    return {op: layers * values for op, values in of_layer.items()} | {"head": vocab * hidden}


def stages(rows: pd.DataFrame) -> pd.DataFrame:
    """What a step wrote down of its stages, and what reading their weights takes at the ceiling, in bf16."""
    found = []
    for params, group in cases(rows, "token", **MAIN):
        (marked,) = [row for row in group if row["variant"] == MARKED]
        for line in facts(marked["evidence"])["stages"]:
            read = 2 * _projections(params["model"]).get(line["op"], 0)
            line |= {"all": line["wake"] + line["work"] + line["tail"], "floor": read / (marked["ceiling"] * 1e6)}
            found.append({"model": params["model"]} | line)
    return table(found, ["model", "op", "stages", "wake", "work", "tail", "floor", "all"])


def finer(rows: pd.DataFrame) -> pd.DataFrame:
    """What was simulated of a step's waits, and what it saves of the simulation in which they stay as they are."""
    found = []
    for params, group in cases(rows, "token", **MAIN):
        (marked,) = [row for row in group if row["variant"] == MARKED]
        us = facts(marked["evidence"]).get("finer", {})
        for way, one in us.items():
            saved = math.nan if way == "measured" else 100 * (us["all"] - one) / us["all"]
            found.append({"model": params["model"], "waits for": way, "us": one, "saved %": saved})
    return table(found, ["model", "waits for", "us", "saved %"])


def stops(rows: pd.DataFrame) -> pd.DataFrame:
    """What a step waits; a barrier after each stage, of which the first was not written down."""
    found = []
    for model, some in _grouped(_lines(graphs(rows)), "model").items():
        barriers = 1 + sum(line["stages"] for line in _lines(stages(rows), model=model))
        ours, unordered, read = (_us(some, name) for name in (OURS, UNORDERED, READ))
        waits = {"waiting": ours - unordered, "barrier": (ours - unordered) / barriers}
        found.append({"model": model, "barriers": barriers} | waits | {"slower": unordered - read})
    return pd.DataFrame(found)


def contexts(rows: pd.DataFrame) -> pd.DataFrame:
    """The step and separate kernels by first position, of models that have several."""
    found = [
        params | line
        for params, group in cases(rows, "token", dtype="bf16", parts=0)
        for line in _alone(params, group, (OURS, SPANNED, GEMV, GEMV_DEPENDENT))
    ]
    several = {line["model"] for line in found if line["start"] != 16}
    kept = [line for line in found if line["model"] in several]
    return table(kept, ["model", "start", "variant", "us", "tbs", "ratio", "low", "high", "verdict"])


def streamed(rows: pd.DataFrame) -> pd.DataFrame:
    """The step whose weights a warp copies, and how much longer the others take."""
    found = []
    for params, group in cases(rows, "token", dtype="bf16", parts=0):
        known = usable(group)
        for name in (STREAMED, OURS, GEMV_DEPENDENT) if STREAMED in known else ():
            tbs = _bytes(params) / us(known[name]) / 1e6
            line = {"verdict": ""} if name == STREAMED else compare(group, STREAMED, name)
            line |= {"variant": name, "us": us(known[name]), "tbs": tbs}
            found.append(params | line | {"% of ceiling": 100 * tbs / known[name]["ceiling"]})
    return table(found, ["model", "start", "variant", "us", "tbs", "% of ceiling", "ratio", "low", "high", "verdict"])


def batches(rows: pd.DataFrame) -> pd.DataFrame:
    """Steps of several sequences, a token of one of them, and the tables' beside their step of one sequence."""
    alone = {(line["model"], line["start"], OURS): line["us"] for line in _lines(contexts(rows), variant=OURS)}
    alone |= {(line["model"], line["start"], STREAMED): line["us"] for line in _lines(streamed(rows), variant=STREAMED)}
    found, groups = [], list(cases(rows, "batch"))
    base = STREAMED if any(STREAMED in usable(group) for _, group in groups) else OURS
    for params, group in [(params, group) for params, group in groups if base in usable(group)]:
        for line in _alone(params, group, dict.fromkeys((base, OURS, *CUBLAS)), base):
            of_one = alone.get((params["model"], params["start"], line["variant"]), math.nan)
            each = {"us a token": line["us"] / params["batch"], "times one": line["us"] / of_one}
            found.append(params | line | each)
    names = ["model", "batch", "start", "variant", "us", "us a token", "times one", "tbs"]
    return table(found, [*names, "ratio", "low", "high", "verdict"])


def tokens(rows: pd.DataFrame) -> pd.DataFrame:
    """What checking has counted, of every row that was checked."""
    found = []
    for params, group in cases(rows, "token"):
        for row in group:
            known = facts(row["evidence"])
            if "right" in known and row["variant"] != AA:
                first, second = (*known["errors"], math.nan, math.nan)[:2]
                found.append(params | known | {"way": row["variant"], "first error": first, "second error": second})
    counts = ["checked", "right", "margin", "margin there", "first error", "second error"]
    return table(found, [*CASE, "way", *counts])


def tokens_by_way(rows: pd.DataFrame) -> pd.DataFrame:
    """The same of all cases of a way together."""
    found = []
    for way, some in _grouped(tokens(rows).to_dict("records"), "way").items():
        line: dict[str, Any] = {"way": SHOWN.get(way, way), "cases": len(some)}
        for dtype in ("fp32", "bf16"):
            of = [one for one in some if one["dtype"] == dtype]
            counts = [sum(one[name] for one in of) for name in ("right", "checked")]
            line[f"right, {dtype}"] = "{} of {}".format(*counts) if of else "–"
        line["least margin"] = min(one["margin"] for one in some)
        line["margin where they part"] = _most(one["margin there"] for one in some)
        found.append(line | {name: _most(one[name] for one in some) for name in ("first error", "second error")})
    return pd.DataFrame(found)


def _most(values: Iterable[float]) -> float:
    return max((value for value in values if value == value), default=math.nan)


def _grouped(lines: Iterable[dict[str, Any]], *names: str) -> dict[Any, list[dict[str, Any]]]:
    """The lines of each value of a column, or of several."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for line in lines:
        key = tuple(line[name] for name in names)
        found.setdefault(key if len(names) > 1 else key[0], []).append(line)
    return found


# A token with the host at work


def walls(rows: pd.DataFrame) -> pd.DataFrame:
    """µs of every way, and beside it the step in a graph."""
    found = []
    for params, group in cases(rows, "token"):
        step = usable(group).get(OURS)
        for way, row in usable(_of_mode(group, "eager")).items():
            if row["role"] == "control":
                continue
            known = facts(row["evidence"])
            line = params | {"way": way, "tokens": row["calls_per_sample"], "us": us(row)} | known.get("sent", {})
            line["records"] = known.get("records", math.nan)
            if step is not None and way != REPLAYED:
                idle = apart([blocks(row), blocks(step)], idle_percent, log=False)
                line |= {"gpu us": us(step), "idle us": us(row) - us(step)} | named(idle, "% idle", "low", "high")
            found.append(line)
    shown = ["records", "tokens", "us", "gpu us", "idle us", "% idle", "low", "high", "bytes", "copies", "kernels"]
    return table(found, [*CASE, "way", *shown])


PAIRS = [  # way, against: those that claims and sentences set side by side
    (ONE_POSITION, REBUILT), (PACKED, PREBUILT), (PACKED, PINNED), (PREBUILT, PINNED), (GRAPH, REBUILT),
    (GRAPH, VECTORISED), (ONE_POSITION, GRAPH), (GRAPH, ONE_POSITION),
]  # fmt: skip


def _pair(rows: pd.DataFrame, way: str, against: str) -> dict[str, Any]:
    """A way against another at the published size, block by block."""
    ((_, group),) = cases(rows, "token", **PUBLISHED)
    return compare(_of_mode(group, "eager"), way, against)


def ratio(rows: pd.DataFrame) -> pd.DataFrame:
    """All `PAIRS`."""
    return table([_pair(rows, *pair) for pair in PAIRS], ["variant", "against", *COMPARED])


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """Tables rebuilt in Python over every other way."""
    found = [{"way": way} | _pair(rows, way, REBUILT) for way in SHORT if way != REBUILT]
    return table(found, ["way", "us", "ratio", "low", "high", "verdict", "runs"])


def saving(rows: pd.DataFrame) -> pd.DataFrame:
    """What each of the ways 1, 2, 3 and 5 saves of the one before, block by block."""
    ((_, group),) = cases(rows, "token", **PUBLISHED)
    ways = (REBUILT, VECTORISED, PREBUILT, ONE_POSITION)
    known = {way: blocks(usable(group)[way]) for way in ways}
    common = set.intersection(*(set(some) for some in known.values()))
    whole = {key: known[REBUILT][key] - known[ONE_POSITION][key] for key in common}
    found = []
    for slow, fast in [*pairwise(ways), (REBUILT, ONE_POSITION)]:
        saved = {key: known[slow][key] - known[fast][key] for key in common}
        of_us = interval(by_process({key: ns / 1000 for key, ns in saved.items()}))
        share = interval(by_process({key: saved[key] / whole[key] for key in common}))
        found.append({"from": slow, "to": fast} | ends(of_us, "us") | ends(share, "share"))
    return pd.DataFrame(found)


# The host's work


def _clock(group: Iterable[Mapping[str, Any]], way: str, part: str = "") -> Row:
    """(process, block) -> the host's ns for one part of a token, or for all of them."""
    some = [blocks(usable(group)[f"{way} · {one}"]) for one in ([part] if part else PARTS)]
    assert all(one.keys() == some[0].keys() for one in some), f"{way}: its parts are not of the same tokens"
    return {key: sum(one[key] for one in some) for key in some[0]}


def _ways(group: Iterable[Mapping[str, Any]]) -> list[str]:
    """The ways that a case has all parts of."""
    known = usable(group)
    names = dict.fromkeys(name.split(" · ")[0] for name in known if " · " in name)
    return [way for way in names if all(f"{way} · {part}" in known for part in PARTS)]


def _hosts(rows: pd.DataFrame) -> Iterator[tuple[dict[str, Any], Interval]]:
    for params, group in cases(rows, "host"):
        for way in _ways(group):
            line = params | {"way": way, "records": _records(group, way)}
            line |= {part: middle(_clock(group, way, part)) for part in PARTS}
            found = apart([_clock(group, way)], in_us)
            yield line | named(found, "host", "low", "high") | {"sure": sure(found), "runs": found.runs}, found


def _records(group: Iterable[Mapping[str, Any]], way: str) -> float:
    return facts(usable(group)[f"{way} · build"]["evidence"])["records"]


def hosts(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's µs for a token, by case and way."""
    shown = ["records", *PARTS, "host", "low", "high", "sure", "runs"]
    return table([line for line, _ in _hosts(rows)], ["model", "parts", "queued_us", "way", *shown])


def _host_case(rows: pd.DataFrame, queued_us: int = 0) -> list[dict[str, Any]]:
    """The rows of the host's work at the published size."""
    ((_, group),) = cases(rows, "host", queued_us=queued_us, **PUBLISHED)
    return group


def rebuilding(rows: pd.DataFrame) -> pd.DataFrame:
    """Building and copying each table alone, and all."""
    group, found = _host_case(rows), []
    for name in (*ONE_TABLE, "all"):
        way = REBUILT if name == "all" else f"{REBUILT}: {name} alone"
        line = {"table": name}
        for part in ("build", "copy"):
            line |= ends(apart([_clock(group, way, part)], in_us), part)
        alone = apart([_clock(group, way, "build"), _clock(group, REBUILT, "build")], over)
        found.append(line | (ends(alone, "share") if name != "all" else {}))
    return pd.DataFrame(found)


def _building(rows: pd.DataFrame) -> Interval:
    known = usable(_host_case(rows))
    return interval(paired(known[f"{REBUILT} · build"], known[f"{REBUILT} · copy"])).each(math.exp)


def building(rows: pd.DataFrame) -> pd.DataFrame:
    """Building over copying, token by token."""
    return pd.DataFrame([{"of": REBUILT} | named(_building(rows), "mid", "low", "high")])


def _records_over_rest(rows: pd.DataFrame) -> Interval:
    group = _host_case(rows)
    return apart([_clock(group, f"{REBUILT}: {name} alone", "build") for name in ("records", "buffers", "queue")], over)


def records_over_rest(rows: pd.DataFrame) -> pd.DataFrame:
    """Building the records over building the other tables."""
    return pd.DataFrame([{"of": REBUILT} | named(_records_over_rest(rows), "mid", "low", "high")])


def noises(rows: pd.DataFrame) -> pd.DataFrame:
    """A/A noise of every case."""
    return pd.DataFrame(
        [
            {"op": op, "queued_us": math.nan} | params | noise(group).columns("noise")
            for op in ("token", "host")
            for params, group in cases(rows, op)
        ]
    )


def queued(rows: pd.DataFrame) -> pd.DataFrame:
    """Copies with other work on the stream, and without."""
    idle, busy, found = _host_case(rows), _host_case(rows, QUEUED), []
    for way in _ways(idle):
        copies = _clock(busy, way, "copy"), _clock(idle, way, "copy")
        line = {"way": way, "built": middle(_clock(busy, way, "build"))}
        line |= {"queued": middle(copies[0]), "idle": middle(copies[1])}
        waited = apart(copies, beyond_in_us, log=False)
        found.append(line | named(waited, "waited", "low", "high") | {"runs": waited.runs})
    return pd.DataFrame(found)


def growth(rows: pd.DataFrame) -> pd.DataFrame:
    """The most records over the fewest of those that were asked for."""
    swept = {params["parts"]: group for params, group in cases(rows, "host", model=H1024, queued_us=0)}
    few, many = (swept[parts] for parts in (min(swept.keys() - {0}), max(swept)))
    one, other = noise(few), noise(many)
    aa = End(one.value + other.value, one.least + other.least, one.most + other.most)
    found = []
    for way in (REBUILT, *SWEPT):
        grown = apart([_clock(many, way), _clock(few, way)], over)
        line = {"way": way, "records": _records(few, way), "most": _records(many, way), "runs": grown.runs}
        bounds = [(end.value, end.least, end.most) for end in (grown.low, grown.high, aa)]
        line["verdict"] = either(verdict(*some) for some in product(*bounds))
        found.append(line | named(grown, "ratio", "low", "high"))
    return table(found, ["way", "records", "most", "ratio", "low", "high", "verdict", "runs"])


def hidden(rows: pd.DataFrame) -> pd.DataFrame:
    """Ways of h1024 in bf16 beside way 8 of the same case."""
    host: dict[str, list[float]] = {}
    for line, _ in _hosts(rows):
        if line["model"] == H1024 and not line["queued_us"]:
            host.setdefault(line["way"], []).append(line["host"])
    found = []
    of_h1024 = [line for line in walls(rows).to_dict("records") if (line["model"], line["dtype"]) == (H1024, "bf16")]
    for (start, parts), lines in _grouped(of_h1024, "start", "parts").items():
        least = next((line["us"] for line in lines if line["way"] == IN_LAUNCH), None)
        for line in lines if least else ():
            if line["way"] in SWEPT:
                more, once = line["us"] - least, median(host[line["way"]])
                why = "but its start" if more * line["tokens"] <= 2 * once else "no"
                line |= {"beyond": more, "host us": once, "hides": "yes" if line["us"] <= 1.01 * least else why}
                found.append(line | {"sweep": "contexts" if start != 16 else "records" if parts else "whole"})
    return pd.DataFrame(found)


# What the claims are judged by: case, mid, low, high, noise, runs


OBSERVED = ["case", "mid", "low", "high", "noise", "runs"]


def _of_ways(way: str, against: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """A claim of two ways at the published size: the time of `against` over that of `way`."""

    def observed(rows: pd.DataFrame) -> pd.DataFrame:
        line = _pair(rows, way, against)
        return table([line | {"case": way, "mid": line["ratio"]}], OBSERVED)

    return observed


def schedule(rows: pd.DataFrame) -> pd.DataFrame:
    """The longest record first over the tables as they are."""
    ((_, group),) = cases(rows, "token", model=H1024, **MAIN)
    line = compare(group, OURS, LONGEST)
    return table([line | {"case": H1024, "mid": line["ratio"]}], OBSERVED)


def _of_host(rows: pd.DataFrame, found: Interval) -> pd.DataFrame:
    """A claim of the host's, with the noise of its case."""
    line = {"case": REBUILT, "runs": found.runs} | noise(_host_case(rows)).columns("noise")
    return table([line | named(found, "mid", "low", "high")], OBSERVED)


def claim_building(rows: pd.DataFrame) -> pd.DataFrame:
    """Building over copying."""
    return _of_host(rows, _building(rows))


def claim_records(rows: pd.DataFrame) -> pd.DataFrame:
    """The records over the rest."""
    return _of_host(rows, _records_over_rest(rows))


def waiting(rows: pd.DataFrame) -> pd.DataFrame:
    """Waiting of way 3's copies over the work that is queued; noise: of both cases' copies, over 80 % of it."""
    found, aa = [], (noise(_host_case(rows, QUEUED)), noise(_host_case(rows)))
    for line in queued(rows).to_dict("records"):
        if line["way"].startswith("3"):
            each = [QUEUED * 0.8 / line[name] for name in ("queued", "idle")]
            both = [sum(getattr(one, end) / by for one, by in zip(aa, each, strict=True)) for end in vars(NO_END)]
            shares = {name: value / QUEUED for name, value in line.items() if name.startswith(("low", "high"))}
            said = {"case": line["way"], "mid": line["waited"] / QUEUED, "runs": line["runs"]} | shares
            found.append(said | End(*both).columns("noise"))
    return table(found, OBSERVED)


TABLES: Tables = {
    "tables.graphs": graphs,
    "tables.ablations": ablations,
    "tables.stages": stages,
    "tables.finer": finer,
    "tables.stops": stops,
    "tables.walls": walls,
    "tables.hosts": hosts,
    "tables.tokens": tokens,
    "tables.contexts": contexts,
    "tables.streamed": streamed,
    "tables.batches": batches,
    "tables.ratio": ratio,
    "tables.gains": gains,
    "tables.rebuilding": rebuilding,
    "tables.building": building,
    "tables.records_over_rest": records_over_rest,
    "tables.noise": noises,
    "tables.queued": queued,
    "tables.growth": growth,
    "tables.saving": saving,
    "tables.hidden": hidden,
    "views.tokens": tokens_by_way,
    "claims.persistent": _of_ways(ONE_POSITION, REBUILT),
    "claims.packed": _of_ways(PACKED, PREBUILT),
    "claims.fewer_bytes": _of_ways(PACKED, PINNED),
    "claims.pinned": _of_ways(PREBUILT, PINNED),
    "claims.schedule": schedule,
    "claims.building": claim_building,
    "claims.records": claim_records,
    "claims.waiting": waiting,
}


# Numbers that only the views make: parts of their sentences


def _lines(frame: pd.DataFrame, **wanted: Any) -> list[dict[str, Any]]:
    """The lines of a table that have these values."""
    return [line for line in frame.to_dict("records") if all(line[name] == value for name, value in wanted.items())]


def _us(lines: Iterable[Mapping[str, Any]], way: str, name: str = "us") -> float:
    """A figure of the one line of a way or variant."""
    (found,) = [line[name] for line in lines if way in (line.get("way"), line.get("variant"))]
    return found


def _figure(value: float, form: str = ".0f", unit: str = " µs") -> str:
    """A figure up to its interval, whose ends are draws of the bootstrap."""
    return f"{value:{form}}{unit} ["


FASTER = ("claims.persistent", "claims.packed", "claims.fewer_bytes")  # shown as how much faster something is


def said_claims(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Observed by a claim -> what it measured, up to its interval; of more than three cases the least and the most."""
    found = {}
    for name in [name for name in TABLES if name.startswith("claims.")]:
        mids = sorted(TABLES[name](rows)["mid"])
        values = [faster(value) if name in FASTER else _number(value, name) for value in mids]
        found[name] = values if len(values) < 4 else [f"{values[0]} to {values[-1]} in {len(values)} cases"]
    return found


def _number(value: float, name: str) -> str:
    if name == "claims.waiting":
        return f"{100 * value:.0f} %"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def said_measured(rows: pd.DataFrame) -> list[str]:
    """The ways at the published size, and the step."""
    found = _lines(walls(rows), **PUBLISHED)
    valid = {way: _us(found, way) for way in SHORT if way != ONE_POSITION}
    best = min(valid, key=lambda way: valid[way])
    (whole,) = _lines(walls(rows), model=H1024, way=GRAPH, **MAIN)
    return [
        f"Python: {valid[REBUILT]:.0f} µs",
        f"right tokens: {valid[best]:.0f} µs ({SHORT[best]})",
        f"step alone: {found[0]['gpu us']:.0f} µs",
        f"{whole['gpu us']:.0f} µs with {whole['records']:.0f} records",
    ]


def said_cold(rows: pd.DataFrame) -> list[str]:
    """Bytes of a token, and over the L2."""
    sizes = {params["model"]: _bytes(params) for params, _ in cases(rows, "token", **MAIN)}
    l2 = L2[rows["gpu"].iloc[0]]
    return [f"{model}: {size / 1e6:.0f} MB, {size / l2:.1f} times the L2" for model, size in sizes.items()]


def said_one_position(rows: pd.DataFrame) -> list[str]:
    """How far the replay of one position comes."""
    found = _lines(tokens(rows), way=ONE_POSITION)
    best = max(found, key=lambda line: line["right"])
    return [
        f"at best {best['right']} of {best['checked']} tokens right",
        f"at least {min(line['second error'] for line in found):.2f} (",
    ]


def said_step(rows: pd.DataFrame) -> list[str]:
    """Llama's share of the ceiling."""
    share = _us(_lines(graphs(rows), model=LLAMA), OURS, "% of ceiling")
    warp = [line["% of ceiling"] for line in _lines(streamed(rows), variant=STREAMED, start=16)]
    said = [f"{LLAMA} reaches {share:.0f} %, {'not below' if share >= 85 else 'below'} the 85 % aimed at"]
    return said + [f"; {one:.0f} % where a warp copies weights" for one in warp]


def said_against(rows: pd.DataFrame) -> list[str]:
    """Verdicts of the tables against separate kernels."""
    found = [line for line in _lines(graphs(rows)) if line["variant"] in SEPARATE + DEPENDENT]
    return [f"The tables are {counted(line['verdict'] for line in found)} of {len(found)} comparisons"]


def said_stages(rows: pd.DataFrame) -> list[str]:
    """All stages of Llama's step together."""
    found = _lines(stages(rows), model=LLAMA)
    wake, work, tail = (sum(line[name] for line in found) for name in ("wake", "work", "tail"))
    return [f"Wake and tail together {wake + tail:.0f} µs, work {work:.0f} µs"]


def said_finer(rows: pd.DataFrame) -> list[str]:
    """What waiting for parts saves, if it was simulated."""
    found = [line for line in _lines(finer(rows)) if line["waits for"] == "its parts"]
    said = [f"{line['model']} {line['us']:.0f} µs ({line['saved %']:.0f} % less)" for line in found]
    return said or ["was not simulated"]


def said_contexts(rows: pd.DataFrame) -> list[str]:
    """The tables against separate kernels with dependent launch, at Llama's longest context."""
    last = max(_lines(contexts(rows), model=LLAMA, variant=GEMV_DEPENDENT), key=lambda line: line["start"])
    word = {"same": "as fast", "unclear": "not clearly faster or slower"}.get(last["verdict"])
    return [f"{LLAMA} from position {last['start']}: the tables are {word or _faster(last['ratio'], last['verdict'])}"]


def said_streamed(rows: pd.DataFrame) -> list[str]:
    """What the step takes at the first position, and the verdicts of all comparisons."""
    found = _lines(streamed(rows))
    if not found:
        return ["weights a warp copies was not measured"]
    first = min((line for line in found if line["variant"] == STREAMED), key=lambda line: line["start"])
    verdicts = [line["verdict"] for line in found if line["variant"] != STREAMED]
    return [
        f"from position {first['start']} takes {first['us']:.0f} µs, {first['% of ceiling']:.0f} % of the",
        f"It is {counted(verdicts)} of {len(verdicts)} comparisons",
    ]


def said_batches(rows: pd.DataFrame) -> list[str]:
    """The tables of several sequences against cuBLAS with dependent launch, at the first and the last position."""
    every = batches(rows)
    found = sorted(_lines(every, variant=CUBLAS[1]), key=lambda line: line["start"])
    if not found:
        return ["was measured"]
    mine = "where a warp copies weights" if STREAMED in set(every["variant"]) else "with tables"
    words = {"same": "as fast", "unclear": "not clearly faster or slower"}
    said = [words.get(line["verdict"]) or _faster(line["ratio"], line["verdict"]) for line in found]
    return [
        f"{found[0]['batch']} sequences against separate kernels: from position {found[0]['start']} a step {mine} is",
        f"is {said[0]}, from position {found[-1]['start']} {said[-1]}",
    ]


def _faster(ratio: float, word: str) -> str:
    """ "1.29× faster", or the verdict; nothing where it is a draw."""
    return faster(ratio) if word in ("faster", "slower") else "" if "|" in word else word


def said_questions(rows: pd.DataFrame) -> list[str]:
    """Figures of the published size."""
    found, built = _lines(walls(rows), **PUBLISHED), rebuilding(rows).set_index("table")
    return [
        *(f"{name} {_figure(built.loc[name, 'build'])}" for name in ONE_TABLE),
        f"building {_figure(built.loc['all', 'build'])}",
        f"copies {_figure(built.loc['all', 'copy'])}",
        f"the token of {_us(found, REBUILT):.0f} µs",
        f"{_us(found, PACKED, 'bytes'):.0f} of {_most(line['bytes'] for line in found):.0f} bytes",
        *(f"{SHORT[way]} {_us(found, way):.0f} µs" for way in (ONE_POSITION, IN_LAUNCH, GRAPH)),
    ]


def _published_hosts(rows: pd.DataFrame) -> list[dict[str, Any]]:
    found = _lines(hosts(rows), model=H1024, parts=PUBLISHED["parts"], queued_us=0)
    return [line for line in found if line["way"] in SHORT]


def said_host(rows: pd.DataFrame) -> list[str]:
    """The most work of the host."""
    most = max(_published_hosts(rows), key=lambda line: line["host"])
    return [f"Most: {SHORT[most['way']]}, {_figure(most['host'], '.1f')}"]


def said_bar_host(rows: pd.DataFrame) -> list[str]:
    """The most that the position in the launch or on the GPU asks of the host."""
    found, said = _lines(hosts(rows), queued_us=0), []
    for way in (IN_LAUNCH, GRAPH):
        some = [line for line in found if line["way"] == way]
        said.append(f"{SHORT[way]}: {_figure(max(line['host'] for line in some), '.1f')}")
        words = {_below([line[f"low {end}"] for line in some], [line[f"high {end}"] for line in some]) for end in _ENDS}
        said += [f", {words.pop()} 20 µs"] if len(words) == 1 else []
    return said


_ENDS = ("from", "to")


def _below(low: Sequence[float], high: Sequence[float]) -> str:
    """Whether the host stays below 20 µs in all cases."""
    if all(end < 20 for end in high):
        return "below"
    return "not below" if any(end >= 20 for end in low) else "unclear whether below"


def _main_walls(rows: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Case, in words, -> its ways: of every model, and of the published size."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in _lines(walls(rows), start=16, dtype="bf16"):
        if line["parts"] in (0, PUBLISHED["parts"]) and line["way"] in SHORT:
            records = f", {line['records']:.0f} records" if line["parts"] else ""
            found.setdefault(line["model"].replace("AutoMegaKernel ", "") + records, []).append(line)
    return found


def said_walls(rows: pd.DataFrame) -> list[str]:
    """The fastest way that is right, with Llama."""
    best = min((line for line in _main_walls(rows)[LLAMA] if line["way"] != ONE_POSITION), key=lambda line: line["us"])
    return [f"{LLAMA}: {SHORT[best['way']]}, {best['us']:.0f} µs"]


def said_idle(rows: pd.DataFrame) -> list[str]:
    """Where the GPU is idle longest."""
    found = [(line["% idle"], case, line["way"]) for case, lines in _main_walls(rows).items() for line in lines]
    percent, case, way = max(found)
    return [f"Most: {SHORT[way]}, {case}, {_figure(percent, unit=' %')}"]


def said_rebuilding(rows: pd.DataFrame) -> list[str]:
    """Every figure."""
    found = rebuilding(rows)
    values = [*found["build"], *found["copy"], *(100 * found["share"].dropna())]
    return [_figure(value, unit="") for value in values]


def said_where(rows: pd.DataFrame) -> list[str]:
    """What is saved, and which shares of it."""
    found = saving(rows)
    heads = ("not Python objects: ", "only the position: ", "do not copy: ")
    shares = [head + _figure(100 * share, unit=" %") for head, share in zip(heads, found["share"], strict=False)]
    return [f"a token: {_figure(found['us'].iloc[-1])}", *shares]


def said_waits(rows: pd.DataFrame) -> list[str]:
    """Which ways wait, do not, or are built for longer than the queued work takes; none if one is a draw."""
    words = {
        "waits": "waits", "does not": "does not wait", "late": "not known: building takes longer",
        "differs": "unclear: processes differ",
    }  # fmt: skip
    said = []
    for line in _lines(queued(rows)):
        if line["way"] in SHORT:
            ends_of = product(*((line[f"{name} from"], line[f"{name} to"]) for name in ("low", "high")))
            (word,) = {_waits(line["built"], low, high) for low, high in ends_of}
            said.append(f"{SHORT[line['way']]}: {words[word]}")
    return said


def _waits(built: float, low: float, high: float) -> str:
    """Of a way's copies behind other work, what their interval says: half of the work, or of what is left of it."""
    if built >= QUEUED:
        return "late"
    if low > QUEUED / 10 and built + low > QUEUED / 2:
        return "waits"
    return "does not" if high < QUEUED / 2 else "differs"


def _swept(rows: pd.DataFrame, sweep: str) -> list[dict[str, Any]]:
    return [line for line in _lines(hidden(rows)) if line["sweep"] in (sweep, "whole")]


def said_over_records(rows: pd.DataFrame) -> list[str]:
    """The slowest and the fastest way with the most records."""
    found = _swept(rows, "records")
    most = max(line["records"] for line in found)
    ordered = sorted((line for line in found if line["records"] == most), key=lambda line: line["us"])
    times = [f"{SHORT[line['way']]} {line['us']:.0f} µs" for line in (ordered[-1], ordered[0])]
    return [f"At {most:.0f} records: {', '.join(times)}"]


def said_host_over_records(rows: pd.DataFrame) -> list[str]:
    """How much the host's work grows, rebuilt in Python."""
    (line,) = _lines(growth(rows), way=REBUILT)
    return [f"{SHORT[REBUILT]}: {line['ratio']:.1f}× the time"]


def said_growth(rows: pd.DataFrame) -> list[str]:
    """How much the host's work grows, every way: its name and the verdict."""
    words = {"faster": "yes", "slower": "no", "same": "no", "unclear": "unclear"}
    lines = _lines(growth(rows))
    return [SHORT[line["way"]] for line in lines] + [
        words[line["verdict"]] for line in lines if line["verdict"] in words
    ]


def said_hiding(rows: pd.DataFrame) -> list[str]:
    """Which ways never hide."""
    found = [line for line in _swept(rows, "contexts") if line["way"] != IN_LAUNCH]
    shown = {way: {line["hides"] for line in found if line["way"] == way} for way in SWEPT if way != IN_LAUNCH}
    return [f"Never hidden: {', '.join(SHORT[way] for way, words in shown.items() if words == {'no'}) or 'none'}"]


# The first screen


def said_conclusion(rows: pd.DataFrame) -> list[str]:
    """What rebuilding costs against the position on the GPU, and this against one position replayed, which is wrong."""
    python, arrays = (_pair(rows, GRAPH, way)["ratio"] for way in (REBUILT, VECTORISED))
    replayed = _pair(rows, ONE_POSITION, GRAPH)
    gain = f"{replayed['ratio']:.2f}× faster{' (unclear)' if replayed['verdict'] == 'unclear' else ''}"
    assert {line["right"] for line in _lines(tokens(rows), way=ONE_POSITION)} == {1}
    return [
        f"itself than when Python rebuilds the tables (GPU {python:.2f}× faster) or when array operations do (GPU "
        f"{arrays:.2f}× faster).",
        f"position: GPU {gain} still, but its output is wrong from the second token on.",
    ]


def said_advice(rows: pd.DataFrame) -> list[str]:
    """The fastest way with the published model, the warp's gain, and from where on separate kernels are faster."""
    assert _best(rows)["way"] == GRAPH
    said = ["Keep the position on the GPU"]
    warp = _lines(streamed(rows), model=LLAMA, start=16, variant=OURS)
    said += [f"({LLAMA}: GPU {_faster(line['ratio'], 'faster')})" for line in warp if line["verdict"] == "faster"]
    for model in (LLAMA, H1024):
        best = streamed(rows) if warp and model == LLAMA else contexts(rows)
        lines = sorted(_lines(best, model=model, variant=GEMV_DEPENDENT), key=lambda line: line["start"])
        leads = [line["start"] for line in lines if "faster" in line["verdict"] or "unclear" in line["verdict"]]
        later = [line for line in lines if line["start"] > max(leads, default=-1) and line["verdict"] == "slower"]
        if later:
            gain = _faster(1 / later[0]["ratio"], "slower")
            said.append(f"{model} from position {later[0]['start']} on (GPU {gain})")
    return said


def said_hero(rows: pd.DataFrame) -> list[str]:
    """What goes with vectorised rebuilding, how many ways are near the fastest, and what the advice rests on."""
    ratios = {line["way"]: line["ratio"] for line in _lines(gains(rows))}
    arrays, graph = (100 * (1 - 1 / ratios[way]) for way in (VECTORISED, GRAPH))
    us = {line["way"]: line["us"] for line in _lines(gains(rows)) if line["way"] != ONE_POSITION}
    near = [way for way, one in us.items() if one <= 1.02 * min(us.values())]
    assert PINNED in near
    best = _best(rows)
    return [
        f"removes {arrays:.0f} % of the time, the position on the GPU {graph - arrays:.0f} % more",
        f"{len(near)} of {len(us)} correct ways are within two percent of the fastest, one pinned copy of all tables "
        "among",
        f"Cut into {best['records']:.0f} records, a token takes {best['us']:.0f} µs with {SHORT[best['way']]}: no",
    ]


def _best(rows: pd.DataFrame) -> dict[str, Any]:
    """The first of these that is right and that the fastest right way does not beat."""
    lines = {line["way"]: line for line in _lines(walls(rows), model=H1024, **MAIN) if line["way"] in SHORT}
    fastest = min(set(lines) - {ONE_POSITION}, key=lambda way: lines[way]["us"])
    ((_, group),) = cases(rows, "token", model=H1024, **MAIN)
    for way in (GRAPH, IN_LAUNCH, BY_KERNEL):
        if compare(_of_mode(group, "eager"), fastest, way)["low"] <= 1.01:
            return lines[way]
    raise AssertionError(f"{fastest} is faster than all ways that leave the position to the GPU")


SENTENCES: Sentences = {
    "answer.conclusion": said_conclusion,
    "answer.advice": said_advice,
    "answer.hero": said_hero,
    "views.measured": said_measured,
    "views.cold": said_cold,
    "views.one_position": said_one_position,
    "views.step": said_step,
    "views.against": said_against,
    "views.stages": said_stages,
    "views.finer": said_finer,
    "views.contexts": said_contexts,
    "views.streamed": said_streamed,
    "views.batches": said_batches,
    "views.questions": said_questions,
    "host_views.host": said_host,
    "host_views.bar_host": said_bar_host,
    "host_views.walls": said_walls,
    "host_views.idle": said_idle,
    "host_views.rebuilding": said_rebuilding,
    "host_views.where": said_where,
    "host_views.waits": said_waits,
    "host_views.over_records": said_over_records,
    "host_views.host_over_records": said_host_over_records,
    "host_views.growth": said_growth,
    "host_views.hiding": said_hiding,
}
