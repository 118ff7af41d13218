"""Tables of the study: what the notebook shows and the claims are judged by, made from the measured rows.

What the host takes differs between processes, up to twice its time: each figure of it, and each share, is made in each
process by itself, and has the interval of the processes (`verdict.in_process`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench import ledger
from labkit.bench import tables as kit
from labkit.bench.spec import CONTROL
from labkit.bench.tables import facts, pairs, where
from labkit.bench.verdict import NAN, Interval, Samples, aa, in_process, median_us, samples, verdict
from labkit.bench.verdict import ratio as paired
from labkit.kernels.decoder import tables
from labkit.kernels.decoder.model import MODELS
from labkit.kernels.decoder.tables import Lowering
from labkit.studies.persistent_tables import bound, plans, variants

SURE = 0.05  # half width of an interval, at most, of a figure of the host's that is said without "unclear"
STARTS = 2  # times the host's work of one token, that the start of a sample may add: its copies and events come on top
RATIO = ("ratio", "low", "high", "verdict")  # time of a variant over that of the tables, and what the tables are
WHOLE = (
    variants.OURS, variants.LONGEST, *variants.SEPARATE, *variants.DEPENDENT, variants.UNORDERED, variants.READ
)  # fmt: skip
GRAPH_COLUMNS = ("model", "variant", "us", "tbs", "% of ceiling", "% of reading", *RATIO, "runs")
WALL_COLUMNS = (
    "model", "dtype", "start", "parts", "way", "records", "tokens", "us", "gpu us", "idle us", "% idle", "low", "high",
    "bytes", "copies", "kernels",
)  # fmt: skip
HOST_COLUMNS = (
    "model", "parts", "queued_us", "way", "records", "build", "copy", "launch", "host", "low", "high", "sure", "runs",
)  # fmt: skip
GROWTH_COLUMNS = ("way", "records", "most", "ratio", "low", "high", "verdict", "runs")
TOKENS_COLUMNS = (
    "model", "dtype", "start", "parts", "way", "checked", "right", "margin", "margin there", "first error",
    "second error",
)  # fmt: skip


def _place(params: Mapping[str, Any], group: pd.DataFrame) -> tuple[Any, ...]:
    names = ("dtype", "start", "parts", "queued_us")
    return variants.MODELS.index(params["model"]), *(params.get(name, 0) for name in names)


cases = partial(kit.cases, place=_place)


def _lines(found: list[dict[str, Any]], columns: Iterable[str]) -> pd.DataFrame:
    """A table of lines with these columns, in their order."""
    return pd.DataFrame(found).reindex(columns=list(columns))


def _alone(group: pd.DataFrame, names: Iterable[str], base: str = variants.OURS) -> list[dict[str, Any]]:
    """A token of a case without the host, by variant: µs, streamed TB/s, and `RATIO`, over the time of `base`.

    The group is that of all modes: the A/A control of some cases is a way.
    """
    us, size = median_us(group), group["floor_bytes"].iloc[0]
    found = [{"variant": name, "us": us[name], "tbs": size / us[name] / 1e6} for name in names if name in us]
    others = [(base, line["variant"]) for line in found if line["variant"] != base]
    against = {line["against"]: line for line in pairs(group, others)}
    unknown = dict.fromkeys((*RATIO, "runs"), math.nan) | {"verdict": ""}  # of the base itself
    return [line | {key: against.get(line["variant"], unknown)[key] for key in unknown} for line in found]


def graphs(rows: pd.DataFrame, names: Iterable[str] = WHOLE) -> pd.DataFrame:
    """A token without the host, by model and variant; ratio: the time of a variant over that of the tables.

    % of ceiling: streamed bytes a second over the read ceiling; % of reading: over reading as many bytes here.
    """
    found = []
    for params, group in cases(rows, "token", **variants.MAIN):
        lines = _alone(group, names)
        read = next((line["us"] for line in lines if line["variant"] == variants.READ), math.nan)
        ceiling = where(group, mode="graph")["ceiling"].max()
        for line in lines:
            shares = {"% of ceiling": 100 * line["tbs"] / ceiling, "% of reading": 100 * read / line["us"]}
            found.append({"model": params["model"]} | line | shares)
    return _lines(found, GRAPH_COLUMNS)


def ablations(rows: pd.DataFrame) -> pd.DataFrame:
    """The step with one choice changed, by model: µs, and time over that of the tables as they are."""
    table = graphs(rows, (variants.OURS, *variants.ABLATIONS)).dropna(subset="ratio")
    return table[["model", "variant", "us", *RATIO]].reset_index(drop=True)


def stages(rows: pd.DataFrame) -> pd.DataFrame:
    """Where a token's time goes, by model and op: `stages.by_op` of a timed token in µs, and beside it the floor.

    floor: µs that reading the op's weights takes at the read ceiling.
    """
    found = []
    for params, group in cases(rows, "token", **variants.MAIN):
        model, ceiling = MODELS[params["model"]], group["ceiling"].max()
        each = {tables.OPS[op - 1]: n * k for op, (n, k) in Lowering(model, 1).projections().items()}  # of a layer
        for line in facts(where(group, mode="graph"), usable=False).get(variants.MARKED, {}).get("stages", []):
            values = each.get(line["op"], 0) * (1 if line["op"] == "head" else model.layers)
            found.append({"model": params["model"]} | line | {"floor": values * 2 / ceiling / 1e6})  # bf16
    table = _lines(found, ("model", "op", "stages", "wake", "work", "tail", "floor"))
    return table.assign(all=table["wake"] + table["work"] + table["tail"])


def finer(rows: pd.DataFrame) -> pd.DataFrame:
    """µs a token if records waited otherwise, by model: `bound.finer` of the moments of a timed token.

    saved %: of what waiting for all takes in the same simulation, so that what it leaves out does not count.
    """
    found = []
    for params, group in cases(rows, "token", **variants.MAIN):
        us = facts(where(group, mode="graph"), usable=False).get(variants.MARKED, {}).get("finer", {})
        for way in us:
            saved = math.nan if way == "measured" else 100 * (1 - us[way] / us[bound.WAYS[0]])
            found.append({"model": params["model"], "waits for": way, "us": us[way], "saved %": saved})
    return _lines(found, ("model", "waits for", "us", "saved %"))


def stops(rows: pd.DataFrame) -> pd.DataFrame:
    """What a token takes beyond reading as many bytes, by model: µs of waiting, also a barrier, and of slower reading.

    waiting: what is saved where nobody waits; slower: what is then left beyond reading as many bytes.
    """
    found = []
    for model, some in graphs(rows).groupby("model", sort=False):
        us = some.set_index("variant")["us"]
        if {variants.OURS, variants.UNORDERED, variants.READ} <= set(us.index):
            barriers = 2 + 5 * MODELS[model].layers
            waiting = us[variants.OURS] - us[variants.UNORDERED]
            line = {"model": model, "barriers": barriers, "waiting": waiting, "barrier": waiting / barriers}
            found.append(line | {"slower": us[variants.UNORDERED] - us[variants.READ]})
    return _lines(found, ("model", "barriers", "waiting", "barrier", "slower"))


def sure(found: Interval) -> bool:
    """Whether a figure of the host's is known within `SURE`, from several processes."""
    return found.runs > 1 and (found.high - found.low) / 2 <= SURE * abs(found.mid)


def walls(rows: pd.DataFrame) -> pd.DataFrame:
    """µs a token with the host at work, by case and way.

    tokens: of a sample, which begins with an idle GPU. gpu us: of the same tables in a graph, position on the device;
    idle: what a token takes beyond it, in which no step runs; below zero where a way's own kernel is the faster one.
    % idle: of a token, each process by itself; low, high: its interval. bytes, copies, kernels: what a token enqueues.
    """
    found = []
    for params, group in cases(rows, "token"):
        gpu = samples(where(group, mode="graph")).get(variants.OURS)
        eager = where(group, mode="eager")
        us, known, each = median_us(eager), facts(eager), samples(eager)
        tokens = dict(zip(eager["variant"], eager["calls_per_sample"], strict=True))
        for way in [name for name in (*variants.WAYS, *variants.ALONE, variants.REPLAYED) if name in us]:
            beside = gpu is not None and way != variants.REPLAYED  # its kernels are others
            step = float(np.median(gpu.ns)) / 1e3 if beside else math.nan
            idle = in_process([each[way], gpu], _idle, log=False) if beside else NAN
            line = {"way": way, "records": known[way].get("records", math.nan), "tokens": tokens[way], "us": us[way]}
            line |= {"gpu us": step, "idle us": us[way] - step, "% idle": idle.mid, "low": idle.low, "high": idle.high}
            found.append(params | line | known[way].get("sent", {}))
    return _lines(found, WALL_COLUMNS)


def _idle(token: Any, step: Any) -> Any:
    return 100 * (token - step) / token


def clocks(group: pd.DataFrame) -> dict[str, Samples]:
    """Samples of the host's parts, in ns: `variants.part` of every way, and by the way alone the sums of its tokens."""
    known = samples(group)
    for way in (*variants.WAYS, *variants.ALONE):
        parts = [known.get(variants.part(way, part)) for part in variants.PARTS]
        if all(parts):
            known[way] = replace(parts[0], ns=sum(part.ns for part in parts))
    return known


def host_case(rows: pd.DataFrame, queued_us: int, parts: int = variants.PUBLISHED_PARTS) -> pd.DataFrame:
    """The rows of the host's work for a token of h1024, in one case; none if it was not measured."""
    found = cases(rows, "host", model=variants.H1024, parts=parts, queued_us=queued_us)
    return found[0][1] if found else rows.iloc[:0]


def hosts(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's µs for a token by case and way: build, copy and launch, and their sum, `host`.

    Each is the geometric mean of the processes' medians; of `host` the medians are of the tokens' sums, so that the
    parts do not add up to it. low, high: the interval of `host`, of processes; sure: whether it is within `SURE`.
    queued_us: other work that was on the stream.
    """
    found = []
    for params, group in cases(rows, "host"):
        known, noted = clocks(group), facts(group)
        for way in [way for way in (*variants.WAYS, *variants.ALONE) if way in known]:
            first, total = noted[variants.part(way, variants.PARTS[0])], in_process([known[way]], _us)
            line = {"way": way, "records": first.get("records", math.nan), "runs": total.runs}
            line |= {part: in_process([known[variants.part(way, part)]], _us).mid for part in variants.PARTS}
            line |= {"host": total.mid, "low": total.low, "high": total.high, "sure": sure(total)}
            found.append(params | line)
    return _lines(found, HOST_COLUMNS)


def _us(ns: Any) -> Any:
    return ns / 1e3


def tokens(rows: pd.DataFrame) -> pd.DataFrame:
    """How many tokens of each variant are the reference's, before the first that is not.

    margin: the reference's least, of those compared; margin there: where the two part; first and second error: relative
    RMSE of the logits of the first two tokens.
    """
    found = []
    for params, group in cases(rows, "token"):
        for name, known in facts(group, usable=False).items():
            if "right" in known and name != CONTROL:
                errors = dict(zip(("first error", "second error"), known["errors"], strict=False))
                found.append(params | {"way": name} | known | errors)
    return _lines(found, TOKENS_COLUMNS)


def contexts(rows: pd.DataFrame) -> pd.DataFrame:
    """A token without the host by first position: µs of the tables and of separate kernels.

    tbs: streamed bytes, the cache's too. ratio, low, high, verdict: time of a variant over that of the tables.
    """
    found = [
        {"model": params["model"], "start": params["start"]} | line
        for params, group in cases(rows, "token", dtype="bf16", parts=0)
        for line in _alone(group, (variants.OURS, variants.SPANNED, variants.GEMV, variants.GEMV_DEPENDENT))
    ]
    table = _lines(found, ("model", "start", "variant", "us", "tbs", *RATIO))
    return table[table.groupby("model")["start"].transform("nunique") > 1].reset_index(drop=True)


def streamed(rows: pd.DataFrame) -> pd.DataFrame:
    """A token without the host where a warp copies weights, by model and first position, beside the others.

    % of ceiling: streamed bytes a second over the read ceiling. ratio, low, high, verdict: time of a variant over that
    with the warp.
    """
    found = []
    for params, group in cases(rows, "token", dtype="bf16", parts=0):
        lines = _alone(group, (variants.STREAMED, variants.OURS, variants.GEMV_DEPENDENT), variants.STREAMED)
        if lines and lines[0]["variant"] == variants.STREAMED:
            ceiling = where(group, mode="graph")["ceiling"].max()
            at = {"model": params["model"], "start": params["start"]}
            found += [at | line | {"% of ceiling": 100 * line["tbs"] / ceiling} for line in lines]
    return _lines(found, ("model", "start", "variant", "us", "tbs", "% of ceiling", *RATIO))


def batches(rows: pd.DataFrame) -> pd.DataFrame:
    """A step of several sequences without the host: µs of the tables and of separate kernels, by first position.

    us a token: of one sequence; times one: of tables, over their step of one sequence. ratio, low, high, verdict: time
    of a variant over that of the tables, where it was measured of those whose weights a warp copies: cases without it,
    older ones, are left out then.
    """
    found, alone = [], {}
    for params, group in cases(rows, "token", dtype="bf16", parts=0):
        for name, us in median_us(group).items():
            alone[params["model"], params["start"], name] = us
    groups = list(cases(rows, "batch"))
    warp = [(params, group) for params, group in groups if (group["variant"] == variants.STREAMED).any()]
    names = (variants.STREAMED, variants.OURS) if warp else (variants.OURS,)
    for params, group in warp or groups:
        at = {name: params[name] for name in ("model", "batch", "start")}
        for line in _alone(group, (*names, variants.CUBLAS, variants.CUBLAS_DEPENDENT), names[0]):
            mine = line["variant"] in names
            one = alone.get((at["model"], at["start"], line["variant"]), math.nan) if mine else math.nan
            found.append(at | line | {"us a token": line["us"] / at["batch"], "times one": line["us"] / one})
    return _lines(found, ("model", "batch", "start", "variant", "us", "us a token", "times one", "tbs", *RATIO))


def ratio(rows: pd.DataFrame, slow: str, fast: str, **wanted: Any) -> dict[str, Any]:
    """`pairs` of a way against a slower one in the case that has these parameters, host at work; or nothing."""
    groups = [where(group, mode="eager") for _, group in cases(rows, "token", **wanted)]
    return next((line for group in groups for line in pairs(group, [(fast, slow)])), {})


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """How much faster than a token whose tables are rebuilt in Python each way is, at the published size, host at work.

    ratio: time of the rebuilt one over that of the way, with low and high of its interval and its verdict.
    """
    groups = [where(group, mode="eager") for _, group in cases(rows, "token", **variants.PUBLISHED)]
    wanted = [(way, variants.REBUILT) for way in variants.WAYS if way != variants.REBUILT]
    lines = [{"way": line["variant"]} | line for group in groups for line in pairs(group, wanted)]
    return _lines(lines, ("way", "us", *RATIO, "runs"))


def rebuilding(rows: pd.DataFrame) -> pd.DataFrame:
    """Where the time of rebuilding goes, in the published size: host µs of every table alone, and of all.

    Columns table, build, copy, and of the building of all three the share, each process by itself; geometric means of
    the processes' medians, each with the low and high of its interval.
    """
    known = clocks(host_case(rows, 0))
    ways = {one: variants.alone(variants.REBUILT, one) for one in tables.TABLES} | {"all": variants.REBUILT}
    found = []
    for table, way in ways.items() if variants.REBUILT in known else ():
        if way in known:
            build, copy = (known[variants.part(way, part)] for part in ("build", "copy"))
            share = in_process([build, known[variants.part(variants.REBUILT, "build")]], _share)
            line = (
                {"table": table} | _named("build", in_process([build], _us)) | _named("copy", in_process([copy], _us))
            )
            found.append(line | _named("share", share if table != "all" else NAN))
    return _lines(found, ("table", *_named("build", NAN), *_named("copy", NAN), *_named("share", NAN)))


def _named(name: str, found: Interval) -> dict[str, float]:
    """An interval as columns of a table: "share", "share low", "share high"."""
    return {name: found.mid, f"{name} low": found.low, f"{name} high": found.high}


def _share(part: Any, whole: Any) -> Any:
    return part / whole


def building(rows: pd.DataFrame) -> Interval:
    """The host's time to build all tables over its time to copy them, of the same tokens, in the published size."""
    known = clocks(host_case(rows, 0))
    parts = [known.get(variants.part(variants.REBUILT, part)) for part in ("build", "copy")]
    return paired(*parts) if all(parts) else NAN


def records_over_rest(rows: pd.DataFrame) -> Interval:
    """The host's time to build the records alone over that to build the other tables alone, in the published size."""
    known = clocks(host_case(rows, 0))
    wanted = [variants.part(variants.alone(variants.REBUILT, one), "build") for one in ("records", "buffers", "queue")]
    return in_process([known[name] for name in wanted], _over_rest) if set(wanted) <= set(known) else NAN


def _over_rest(part: Any, *others: Any) -> Any:
    return part / sum(others)


def noise(rows: pd.DataFrame, op: str, **wanted: Any) -> float:
    """Half width of the A/A interval of the one case that has these parameters; NaN without it."""
    found = cases(rows, op, **wanted)
    return aa(found[0][1]).half_width if found else math.nan


def queued(rows: pd.DataFrame, ways: Iterable[str] = variants.WAYS) -> pd.DataFrame:
    """The host's µs for the copies of a token with an idle GPU and with other work on the stream.

    built: µs of building between that work and the copies, in which as much of it ends; idle, queued: of the copies;
    geometric means of the processes' medians. waited: µs beyond the copies with an idle GPU, each process by itself, in
    the arithmetic mean; low, high: its interval.
    """
    idle, busy = (clocks(host_case(rows, us)) for us in (0, variants.QUEUED_US))
    found = []
    for way in [way for way in ways if way in idle and way in busy]:
        name = variants.part(way, "copy")
        waited = in_process([busy[name], idle[name]], _waited, log=False)
        us = [busy[variants.part(way, "build")], idle[name], busy[name]]
        line = dict(zip(("built", "idle", "queued"), (in_process([one], _us).mid for one in us), strict=True))
        line |= {"waited": waited.mid, "low": waited.low, "high": waited.high, "runs": waited.runs}
        found.append({"way": way} | line)
    return _lines(found, ("way", "built", "idle", "queued", "waited", "low", "high", "runs"))


def _waited(queued: Any, idle: Any) -> Any:
    return (queued - idle) / 1e3


def growth(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's time for a token of h1024 with the most records over that with the fewest, by way.

    Columns way, records, most (of records), ratio, low, high, verdict: *faster* where it grows, as in `verdict`; runs.
    The two cases, of those with a limit on the records of a matrix, were measured apart in each process: the noise is
    the sum of the half widths of both A/A intervals.
    """
    swept = cases(rows, "host", model=variants.H1024, queued_us=0)
    groups = [group for params, group in swept if params["parts"]]
    if len(groups) < 2:
        return _lines([], GROWTH_COLUMNS)
    fewest, most = groups[0], groups[-1]
    noise = sum(aa(group).half_width for group in (fewest, most))
    left, right, noted = clocks(fewest), clocks(most), [facts(group) for group in (fewest, most)]
    lines = []
    for way in [way for way in (variants.REBUILT, *variants.SWEPT) if way in left and way in right]:
        ratio = in_process([right[way], left[way]], _share)
        records = (one[variants.part(way, variants.PARTS[0])].get("records", math.nan) for one in noted)
        line = {"way": way} | dict(zip(("records", "most"), records, strict=True))
        line |= {"ratio": ratio.mid, "low": ratio.low, "high": ratio.high, "runs": ratio.runs}
        lines.append(line | {"verdict": verdict(ratio, Interval(1.0, 1 - noise, 1 + noise, 0, 0))})
    return _lines(lines, GROWTH_COLUMNS)


def saving(rows: pd.DataFrame) -> pd.DataFrame:
    """Where the time goes that a token of way 1 takes beyond one of way 5, at the published size.

    Lines: what is saved from each way to the next of 1, 2, 3 and 5, and all. us and share of all, each of the tokens of
    a block, with the low and high of its interval. Without one of these ways: none.
    """
    groups = [where(group, mode="eager") for _, group in cases(rows, "token", **variants.PUBLISHED)]
    known = samples(groups[0]) if groups else {}
    ways = (variants.REBUILT, variants.VECTORISED, variants.PREBUILT, variants.ONE_POSITION)
    lines = []
    if set(ways) <= set(known):
        blocks = together([known[way] for way in ways])
        us = dict(zip(ways, (one.ns / 1e3 for one in blocks), strict=True))
        for slow, fast in [*pairwise(ways), (ways[0], ways[-1])]:
            saved = us[slow] - us[fast]
            line = {"from": slow, "to": fast} | _named("us", _of_blocks(blocks[0], saved))
            lines.append(line | _named("share", _of_blocks(blocks[0], saved / (us[ways[0]] - us[ways[-1]]))))
    return _lines(lines, ("from", "to", *_named("us", NAN), *_named("share", NAN)))


def together(found: Sequence[Samples]) -> list[Samples]:
    """The samples of several rows in the blocks that all have, in the same order."""
    places = [pd.MultiIndex.from_arrays([one.run, one.block]) for one in found]
    common = places[0]
    for place in places[1:]:
        common = common.intersection(place)
    kept = [place.get_indexer(common) for place in places]
    return [Samples(one.run[at], one.block[at], one.ns[at]) for one, at in zip(found, kept, strict=True)]


def _of_blocks(blocks: Samples, values: np.ndarray) -> Interval:
    """A quantity of each block, which may be zero or less, with its interval."""
    return in_process([replace(blocks, ns=values)], _itself, log=False)


def _itself(values: Any) -> Any:
    return values


def hidden(rows: pd.DataFrame) -> pd.DataFrame:
    """What each way takes beyond way 8 of the same case, against the step's time on the GPU: does it hide?

    Only of h1024 in bf16, whose records and contexts are swept. beyond: µs a token; host us: of the host for one token
    of the way, the median over all numbers of records, which nothing hides at the first of a sample. hides: "yes" if a
    token takes no more than 1 % beyond way 8; "but its start" if a sample takes no more beyond it than `STARTS` times
    `host us`; else "no".
    """
    host = where(hosts(rows), model=variants.H1024, queued_us=0).groupby("way")["host"].median()
    table = where(walls(rows), model=variants.H1024, dtype="bf16")
    found = []
    for (start, parts), group in table.groupby(["start", "parts"], sort=False):
        us = group.set_index("way")["us"]
        if variants.IN_LAUNCH in us:
            some = where(group, way=variants.SWEPT)
            sweep = "contexts" if start != variants.START else "records" if parts else "whole"
            some = some.assign(beyond=some["us"] - us[variants.IN_LAUNCH], sweep=sweep)
            some["host us"] = some["way"].map(host)
            small = some["beyond"] * some["tokens"] <= STARTS * some["host us"]
            hides = np.where(some["us"] <= 1.01 * us[variants.IN_LAUNCH], "yes", np.where(small, "but its start", "no"))
            found.append(some.assign(hides=hides))
    columns = [*WALL_COLUMNS, "beyond", "host us", "sweep", "hides"]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=columns)


def lowering(model: str, programs: int, **more: Any) -> Lowering:
    """Of a model's tables as they are timed in bf16, with so many programs. more: further fields."""
    return replace(plans.lowering(MODELS[model], "bf16", variants.BYTES["bf16"], programs), **more)


def lowered(how: Lowering, found: tables.Tables) -> str:
    """What the tables of a lowering are: their size, how evenly work is dealt, and what the next token changes."""
    counts = tables.counts(found)
    program = np.repeat(np.arange(how.programs), np.diff(found.queue))
    values = np.bincount(program, tables.values_read(how, found.records), how.programs)
    return (
        f"{counts['records']} records in {counts['programs']} queues, {found.nbytes / 1e3:.0f} kB of tables; the "
        f"fullest queue reads {values.max() / values.mean():.2f} times what the mean one does; the next token changes "
        f"{counts['changed_words']} words, or none where the launch says the position."
    )


def queue(how: Lowering, found: tables.Tables, program: int, most: int = 20) -> pd.DataFrame:
    """The first records of a program, in its order: what it does, on which buffer, what it waits for and signals."""
    first, stop = found.queue[program], found.queue[program + 1]
    buffers = list(tables.buffer_shapes(how))
    lines = []
    for record in found.records[first : min(stop, first + most)].tolist():
        words = dict(zip(tables.WORDS, record, strict=True))
        named = {name: buffers[words[name]] if words[name] >= 0 else "–" for name in ("weight", "input", "output")}
        kept = {name: words[name] for name in ("start", "stop", "position", "wait", "target", "signal")}
        lines.append({"op": tables.OPS[words["op"] - 1], **named, **kept})
    return pd.DataFrame(lines)


ledger.watch(__name__)
