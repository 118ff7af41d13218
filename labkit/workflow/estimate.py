"""How long a measuring run will take, from the times at which the recorded cases were begun.

A row's `utc` is when its variant was begun in the first process. So rows tell, in whole seconds, how long the first
process was at a case: inputs, compiling, checks, evidence and samples together. Of the recorded GPUs the quickest at a
case counts: what one of them compiled at it, another had compiled before, and what is compiled ahead is counted apart.
Rows do not tell how long a later process was, nor what was compiled ahead; of these there is a model:

- A later process compiles nothing that the first one compiled. It takes what is usual of the operation: the mean of its
  cases, where none counts for more than `SPREAD_S` above the median, since half of them or more compile little.
- Processes get ready at the same time, in `START_S`, and `OTHERS_S` more where they load others' code.
- Kernels that are compiled ahead take `AHEAD_S` until the first begins, then `KERNEL_S` of one core each, and all cores
  share them; so do what others' calls compile before, `CALL_S` each, and `LONGEST_CALL_S` at least: once for all
  studies of a run that begins with the machine, as part of that (`ahead.Ahead`), else for each of them.
- In such a run most kernels are compiled beside what is measured. A study alone waits for all of its own, of which rows
  name few where a call has several: `ALONE_S` of one core a case, and `BUILT_S` for others' sources that nvcc builds.
- A notebook takes `PAGE_S` beside its measuring; only the last one does, since the others are made beside the next
  measurement. To read hardware counters takes `COUNTING_S`, and `COUNTED_S` a kernel; timelines take `TIMELINES_S`.

A case that no GPU has recorded takes the mean of its operation, and one of an operation that none has the mean of all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import host, paths, registry
from labkit.bench import records
from labkit.bench.spec import Case, Study
from labkit.kernels.tuned import slug
from labkit.sweep import run
from labkit.workflow import filters, jobs, notebooks, quick, recorded
from labkit.workflow.filters import Key

# As quick looks took on H100 hosts of 16 and 32 cores where nothing was compiled yet: machine, 01, 02 and 03.
START_S = 5.0
OTHERS_S = 7.0
PAGE_S = 16.0
AHEAD_S = 15.0
KERNEL_S = 0.7
LONGEST_CALL_S = 100.0
COUNTING_S, COUNTED_S = 12.0, 1.1  # as of 8, 12 and 21 kernels on an H200 host of 16 cores
TIMELINES_S = 14.0
CALL_S = 7.0  # as those of 01 and 06 took, a full run on an H200 host of 16 cores: most compile little
# One core's seconds for a case's kernels, by study and format: as 98 cases of 04 and 25 of F32 took with 16 cores on an
# H200 host. The other formats by what Triton takes for them elsewhere, 2.4 times as long: all of 05 took over 457 s.
# Of unpacked blocks of several parts a kernel is thousands of operations; Triton's layouts of loads take n³ of them.
ALONE_S: Mapping[str, Mapping[str, float]] = {
    "moe_persistent_grid": dict.fromkeys(("bf16", "fp32", "INT4"), 14.0),
    "batched_ffn": {"F32": 9.4, "BF16": 10.5, "Q8_0": 17.0, "Q4_K": 44.0, "Q5_K": 153.0, "Q6_K": 43.0},
}
BUILT_S = {"batched_ffn": 80.0}
SPREAD_S = 3.0  # as the second process of 04 took, a full run on an H100, without what it compiled
CLUSTER_CORES = 16  # of a job: the hosts of a cluster are not known, and the times were taken with so many
UNKNOWN_S = 3.0  # a case of a study that nobody recorded


@dataclass(frozen=True)
class Known:
    """What rows tell. first: seconds of the first process, by case; kernels: evidence of those that it compiles."""

    first: Mapping[Key, float] = field(default_factory=dict)
    kernels: Mapping[Key, frozenset[str]] = field(default_factory=dict)

    def of_first(self, case: Case) -> float:
        """Seconds of the first process for a case."""
        key = case.id
        return self.first[key] if key in self.first else float(np.mean(self._like(case.op)))

    def of_later(self, case: Case) -> float:
        """Seconds of a later process for a case."""
        values = self._like(case.op)
        return float(np.mean(np.minimum(values, np.median(values) + SPREAD_S)))

    def _like(self, op: str) -> Sequence[float]:
        """Seconds of the cases of an operation; of all where it has none."""
        return [s for (one, _), s in self.first.items() if one == op] or list(self.first.values()) or [UNKNOWN_S]


def known(rows: pd.DataFrame, *others: pd.DataFrame) -> Known:
    """What the rows of one study on one GPU tell. others: those on other GPUs, that may have been quicker at a case."""
    some, first = rows[rows["evidence"].str.len() > 2], quick.first_seconds(rows)
    for quicker in map(quick.first_seconds, others):
        first = {key: min(s, quicker.get(key, s)) for key, s in first.items()}
    return Known(first, {key: frozenset(group) for key, group in some.groupby(["op", "case"])["evidence"]})


def of_cases(
    study: Study, cases: Sequence[Case], processes: int, told: Known, cores: int, alone: bool = False
) -> float:
    """Seconds of measuring these cases in so many processes, without others' calls; 0 without any.

    alone: nothing was measured before, beside which their kernels were compiled.
    """
    if not cases:
        return 0.0
    again = [case for case in cases if not study.early(case)]
    each = START_S + (OTHERS_S if any(one.role == "peer" for case in cases for one in study.variants(case)) else 0.0)
    parts = each * (1 + bool(study.settle and 0 < len(again) < len(cases)))  # all processes get ready at once
    parts += _compiling(study, cases, told, cores, alone)
    return parts + sum(map(told.of_first, cases)) + (processes - 1) * sum(map(told.of_later, again))


def _compiling(study: Study, cases: Sequence[Case], told: Known, cores: int, alone: bool) -> float:
    """Seconds that are waited for kernels which are compiled ahead."""
    kernels = set().union(*(told.kernels.get(x.id, ()) for x in cases))
    if not study.kernels or not kernels:
        return 0.0
    of_one, built = KERNEL_S * len(kernels), 0.0
    if alone and (by_format := ALONE_S.get(study.name)):
        formats = [str(x.params.get("format") or x.params.get("weights")) for x in cases]
        of_one = max(of_one, sum(by_format.get(one, 0.0) for one in formats))
        built = BUILT_S.get(study.name, 0.0)
    return AHEAD_S + built + of_one / cores


def of_calls(count: int, cores: int) -> float:
    """Seconds of so many calls of others, side by side; 0 without any."""
    return max(LONGEST_CALL_S, CALL_S * count / cores) if count else 0.0


@dataclass(frozen=True)
class Estimate:
    """seconds: of each study; gpus: how many measure side by side; like: the recorded GPU whose rows told it.

    last: seconds of the last page, where the others are made beside what is measured.
    """

    seconds: Mapping[str, float]
    gpus: int = 1
    like: str = ""
    last: float = 0.0

    @property
    def whole(self) -> float:
        """Seconds of the run: what is measured first runs alone, the others share the GPUs."""
        alone = self.seconds.get(notebooks.FIRST, 0.0)
        others = [s for name, s in self.seconds.items() if name != notebooks.FIRST]
        return alone + max([sum(others) / self.gpus, *others]) + self.last

    def __str__(self) -> str:
        told = f"by the rows of {self.like}" if self.like else "by no rows: nothing is recorded"
        parts = ", ".join(f"{registry.NOTEBOOKS.get(name, name)} {minutes(s)}" for name, s in self.seconds.items())
        several = f" on {self.gpus} GPUs" if self.gpus > 1 else ""
        of = parts if len(self.seconds) <= len(registry.NOTEBOOKS) else f"{len(self.seconds)} jobs"
        return f"measuring takes about {minutes(self.whole)}{several}, {told} ({of})"


def minutes(seconds: float) -> str:
    """ "12 min", or "40 s" for less than two minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@dataclass(frozen=True)
class Wanted:
    """What of a study is to be measured.

    counted: which cases are, as often as such a kernel; beside: whether its page is made while another is measured.
    """

    study: Study
    cases: Sequence[Case]
    processes: int
    counted: Sequence[Key]
    beside: bool = False


def of_run(
    values: Mapping[str, Mapping[str, Any]], gpus: Sequence[str], cores: int = 0, at_once: int | None = None
) -> Estimate:
    """What a run will take. values: parameters of each study that is to be measured; gpus: names of the GPUs.

    By the rows of the same GPU, else of the one on which it would take longest. What runs/ holds is not counted again.
    at_once: how many notebooks run, at most: of one at a time, each page is made before the next study begins.
    """
    wanted = {name: _asked(name, given) for name, given in values.items()}
    if at_once == 1:
        wanted = {name: replace(one, beside=False) for name, one in wanted.items()}
    return _shared(wanted, gpus, at_once, cores)


def of_jobs(wanted: Sequence[jobs.Job], gpus: Sequence[str], at_once: int | None = None, cores: int = 0) -> Estimate:
    """What those of some jobs that are left to measure will take on this machine. at_once: how many, at most.

    Each holds its GPU until its page is made. A case that two of them measure is counted twice.
    """
    left = [one for one in wanted if jobs.measures(one) and not jobs.is_done(one)]
    each = {one.name: replace(_asked(one.study, one.values), beside=False) for one in left}
    return _shared(each, gpus, at_once, cores)


def of_study(study: Study, parameters: Mapping[str, Any], processes: int, here: str) -> Estimate:
    """What measuring a study takes on the GPU of this name of a folder."""
    wanted = Wanted(study, study.cases(parameters), processes, _counted(study, parameters))
    return _told({study.name: wanted}, here, 1, 0)


def _asked(name: str, given: Mapping[str, Any]) -> Wanted:
    """What a notebook with these parameters measures."""
    study, values = quick.asked(name, given)
    processes = 1 if values.get(filters.QUICK) else values.get("processes", 1)
    return Wanted(study, study.cases(values), processes, _counted(study, values), notebooks.frees(values))


def _counted(study: Study, parameters: Mapping[str, Any]) -> list[Key]:
    """The case of every kernel whose counters are read, as often as there are such kernels."""
    return [case.id for case, _ in study.counted(parameters)]


def _shared(wanted: Mapping[str, Wanted], gpus: Sequence[str], at_once: int | None, cores: int) -> Estimate:
    """On as many of these GPUs as are used at once."""
    return _told(wanted, slug(gpus[0]) if gpus else "", min(len(gpus), at_once or len(gpus)), cores)


def _told(wanted: Mapping[str, Wanted], here: str, gpus: int, cores: int) -> Estimate:
    """By the rows of one recorded GPU: `here`, or the slowest."""
    cores = cores or host.cores()
    found = {
        gpu: _seconds(wanted, gpu, here, cores)
        for gpu in ([here] if here in paths.recorded_gpus() else paths.recorded_gpus() or [""])
    }
    like = max(found, key=lambda gpu: sum(found[gpu].values()))
    return Estimate(found[like], max(1, gpus), like, PAGE_S if any(one.beside for one in wanted.values()) else 0.0)


def _seconds(wanted: Mapping[str, Wanted], like: str, here: str, cores: int) -> dict[str, float]:
    """Seconds of each study by the rows of a GPU."""
    left = {name: _left(one, here) for name, one in wanted.items()}
    told = {study: _known(study, like) for study in {one.study.name for one in wanted.values()}}
    alone = notebooks.FIRST not in wanted
    found = {name: _of_study(one, left[name], told[one.study.name], cores, alone) for name, one in wanted.items()}
    calls = {name: len(run.calls_of(one.study, left[name])) for name, one in wanted.items()}
    if notebooks.FIRST in wanted:
        calls = {notebooks.FIRST: sum(calls.values())}
    return {name: seconds + of_calls(calls.get(name, 0), cores) for name, seconds in found.items()}


def _of_study(one: Wanted, left: Sequence[Case], told: Known, cores: int, alone: bool) -> float:
    """Seconds of the cases of a study that are left, and of its page where that is not made beside another study."""
    keys = {x.id for x in left}
    beside = 0.0 if one.beside else PAGE_S
    if counted := sum(key in keys for key in one.counted):
        beside += COUNTING_S + COUNTED_S * counted
    lines = one.study.timelines
    if lines and lines.case.id in keys:
        beside += TIMELINES_S
    return beside + of_cases(one.study, left, one.processes, told, cores, alone)


def _known(name: str, like: str) -> Known:
    """What is known of a study by the rows of a GPU, and by those of the others."""
    gpus = [like, *(gpu for gpu in paths.recorded_gpus() if gpu != like)]
    mine, *others = (_rows(paths.DATA / gpu / f"{name}.parquet") for gpu in gpus)
    return Known() if mine is None else known(mine, *(rows for rows in others if rows is not None))


def _rows(path: Path) -> pd.DataFrame | None:
    """The rows of a data file; None if there is none, or it is damaged, which what measures will say."""
    try:
        return recorded.read(path) if path.exists() else None
    except records.RecordError:
        return None


def _left(one: Wanted, here: str) -> list[Case]:
    """The cases that runs/ has no rows of, of as many processes; nor data/, of those that a study chooses by."""
    file = paths.RUNS / here / f"{one.study.name}.parquet"
    mine = _rows(file) if here else None
    done = {} if mine is None else _done(mine)
    taken = filters.keys_of(paths.recorded(file)) if here and one.study.settle else set()
    wanted = [x for x in one.cases if not (one.study.early(x) and x.id in taken)]
    return [x for x in wanted if done.get(x.id, 0) < one.study.in_processes(x, one.processes)]


def _done(rows: pd.DataFrame) -> dict[Key, int]:
    """In how many processes each case was measured."""
    return {key: records.processes(part["run"]) for key, part in rows.groupby(["op", "case"])}
