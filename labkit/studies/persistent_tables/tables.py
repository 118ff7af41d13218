"""Tables of the study: what the notebook shows and the claims are judged by, made from the measured rows."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench import tables as kit
from labkit.bench.spec import CONTROL
from labkit.bench.tables import facts, pairs, where
from labkit.bench.verdict import median_us
from labkit.kernels.decoder import tables
from labkit.kernels.decoder.model import MODELS
from labkit.kernels.decoder.tables import Lowering
from labkit.studies.persistent_tables import plans, variants

STARTS = 2  # times the host's work of one token, that the start of a sample may add: its copies and events come on top
RATIO = ("ratio", "low", "high", "verdict")  # time of a variant over that of the tables, and what the tables are
WHOLE = (
    variants.OURS, variants.LONGEST, *variants.SEPARATE, *variants.DEPENDENT, variants.UNORDERED, variants.READ
)  # fmt: skip
GRAPH_COLUMNS = ("model", "variant", "us", "tbs", "% of ceiling", "% of reading", *RATIO, "runs")
WALL_COLUMNS = (
    "model", "dtype", "start", "parts", "way", "records", "tokens", "us", "gpu us", "idle us", "% idle", "bytes",
    "copies", "kernels",
)  # fmt: skip
HOST_COLUMNS = (
    "model", "parts", "queued_us", "way", "records", "build", "copy", "launch", "host", "low", "high", "runs",
)  # fmt: skip
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


def _alone(group: pd.DataFrame, names: Iterable[str]) -> list[dict[str, Any]]:
    """A token of a case without the host, by variant: µs, streamed TB/s, and `RATIO`.

    The group is that of all modes: the A/A control of some cases is a way.
    """
    us, size = median_us(group), group["floor_bytes"].iloc[0]
    found = [{"variant": name, "us": us[name], "tbs": size / us[name] / 1e6} for name in names if name in us]
    others = [(variants.OURS, line["variant"]) for line in found if line["variant"] != variants.OURS]
    against = {line["against"]: line for line in pairs(group, others)}
    unknown = dict.fromkeys((*RATIO, "runs"), math.nan) | {"verdict": ""}  # of the tables themselves
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


def walls(rows: pd.DataFrame) -> pd.DataFrame:
    """µs a token with the host at work, by case and way.

    tokens: of a sample, which begins with an idle GPU. gpu us: of the same tables in a graph, position on the device;
    idle: what a token takes beyond it, in which no step runs; below zero where a way's own kernel is the faster one.
    bytes, copies, kernels: what a token enqueues.
    """
    found = []
    for params, group in cases(rows, "token"):
        gpu = median_us(where(group, mode="graph")).get(variants.OURS, math.nan)
        eager = where(group, mode="eager")
        us, known = median_us(eager), facts(eager)
        tokens = dict(zip(eager["variant"], eager["calls_per_sample"], strict=True))
        for way in [name for name in (*variants.WAYS, *variants.ALONE, variants.REPLAYED) if name in us]:
            step = gpu if way != variants.REPLAYED else math.nan  # its kernels are others
            line = {"way": way, "records": known[way].get("records", math.nan), "tokens": tokens[way], "us": us[way]}
            line |= {"gpu us": step, "idle us": us[way] - step, "% idle": 100 * (us[way] - step) / us[way]}
            found.append(params | line | known[way].get("sent", {}))
    return _lines(found, WALL_COLUMNS)


def hosts(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's µs for a token by case and way: build, copy and launch, and their sum.

    Each is the middle one of the processes' medians, since a process may run at half another's pace. low, high:
    quartiles of the sum. queued_us: other work that was on the stream.
    """
    found = []
    for params, group in cases(rows, "host"):
        usable = group[group["ok"]]
        ns = dict(zip(usable["variant"], usable["samples_ns"], strict=True))
        known, run = facts(usable), dict(zip(usable["variant"], usable["run"], strict=True))
        for way in (*variants.WAYS, *variants.ALONE):
            parts = [np.asarray(ns.get(variants.part(way, part), []), float) / 1e3 for part in variants.PARTS]
            if not all(map(len, parts)):
                continue
            total, first = sum(parts), variants.part(way, variants.PARTS[0])
            line = {"way": way, "records": known[first].get("records", math.nan), "runs": len(set(run[first]))}
            line |= {name: _middle(part, run[first]) for name, part in zip(variants.PARTS, parts, strict=True)}
            line["host"] = _middle(total, run[first])
            found.append(params | line | {"low": np.quantile(total, 0.25), "high": np.quantile(total, 0.75)})
    return _lines(found, HOST_COLUMNS)


def _middle(us: np.ndarray, run: np.ndarray) -> float:
    """The middle one of the processes' medians."""
    return float(np.median([np.median(us[np.asarray(run) == one]) for one in set(run)]))


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
        for line in _alone(group, (variants.OURS, variants.GEMV, variants.GEMV_DEPENDENT))
    ]
    table = _lines(found, ("model", "start", "variant", "us", "tbs", *RATIO))
    return table[table.groupby("model")["start"].transform("nunique") > 1].reset_index(drop=True)


def ratio(rows: pd.DataFrame, slow: str, fast: str, **wanted: Any) -> dict[str, Any]:
    """`pairs` of a way against a slower one in the case that has these parameters, host at work; or nothing."""
    groups = [where(group, mode="eager") for _, group in cases(rows, "token", **wanted)]
    return next((line for group in groups for line in pairs(group, [(fast, slow)])), {})


def rebuilding(rows: pd.DataFrame) -> pd.DataFrame:
    """Where the time of rebuilding goes, in the published size: host µs of every table alone, and of all.

    Columns table, build, copy, share (of the building of all three).
    """
    table = where(hosts(rows), parts=variants.PUBLISHED_PARTS, queued_us=0).set_index("way")
    if variants.REBUILT not in table.index:
        return pd.DataFrame(columns=["table", "build", "copy", "share"])
    ways = {variants.alone(variants.REBUILT, one): one for one in tables.TABLES} | {variants.REBUILT: "all"}
    table = table.loc[[way for way in ways if way in table.index], ["build", "copy"]].rename(ways)
    return table.assign(share=table["build"] / table.loc["all", "build"]).rename_axis("table").reset_index()


def queued(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's µs for the copies of a token with an idle GPU and with other work on the stream; waited: the rest.

    built: µs of building between that work and the copies, in which as much of it ends.
    """
    table = where(hosts(rows), parts=variants.PUBLISHED_PARTS, way=variants.WAYS).set_index("way")
    idle, busy = (where(table, queued_us=us) for us in (0, variants.QUEUED_US))
    found = pd.DataFrame({"built": busy["build"], "idle": idle["copy"], "queued": busy["copy"]}).dropna()
    return found.assign(waited=found["queued"] - found["idle"]).rename_axis("way").reset_index()


def hidden(rows: pd.DataFrame) -> pd.DataFrame:
    """What each way takes beyond way 8 of the same case, against the step's time on the GPU: does it hide?

    Only of h1024 in bf16, whose records and contexts are swept. beyond: µs a token; host us: of the host for one token
    of the way, which nothing hides at the first of a sample. hides: "yes" if a token takes no more than 1 % beyond way
    8; "but its start" if a sample takes no more beyond it than `STARTS` times `host us`; else "no".
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
