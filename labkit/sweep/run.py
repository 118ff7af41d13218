"""Cases × processes: every variant of a case timed in one run, case by case, resumable at any point.

The parent starts one process after the other; each measures every case that the journal does not hold for it. So a run
that is stopped goes on where it was, a crash of the GPU's context costs one case, and the three processes that a
headline claim needs are independent.
"""

import gc
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from labkit import host, isolated, paths, registry
from labkit.bench import machine, records, spec
from labkit.bench.sha import kernel_sha
from labkit.bench.spec import Case, Study
from labkit.evidence import workers
from labkit.sweep import added, prepared, tuning
from labkit.sweep import case as case_runner
from labkit.sweep.case import with_control

Progress = Callable[[str], None]
Beside = Callable[[], Future[Any] | None]
WAITING = 3  # processes that get ready at once: a few, since each has its own copy of torch in memory

_INDUCTOR = "TORCHINDUCTOR_COMPILE_THREADS"  # torch.compile's own processes: the calls share the cores already


class Call(NamedTuple):
    """A call of others. alike: calls of a variant that have the same compile the same (`Study.warmed`, `anew`)."""

    study: str
    op: str
    case: str
    variant: str
    alike: str


def run(
    study: Study,
    parameters: Mapping[str, Any],
    processes: int,
    env: Mapping[str, str | None],
    say: Progress = print,
    beside: Beside = lambda: None,
    idle: Callable[[], Any] = lambda: None,
    early: Sequence[isolated.Started] = (),
) -> pd.DataFrame:
    """Measure what is missing of a study on this GPU and return all its rows of these cases.

    env: environment of the measuring processes (the leased GPU). say: gets each line of progress. beside: is called
    while the processes that measure get ready; nothing is timed before what it begins has ended. idle: is called, once
    or twice, as soon as nothing more is timed or counted; what is left to do takes some seconds of all cores. early:
    processes that measure, of `imported`.
    Raises RuntimeError without a GPU. A case that cannot run is a row with its reason; one that kills its process too.
    """
    from labkit.sweep import timelines, variants

    here = machine.this_machine()
    path = paths.RUNS / here.slug / f"{study.name}.parquet"
    records.write_atomic(path.with_name("machine.json"), here.to_json())
    journal = records.Journal(path.with_suffix(".journal.jsonl"))
    sweep = _Sweep(study, parameters, processes, env, say, path, journal, beside, list(early))
    cases = study.cases(parameters)
    if deciding := list(filter(study.early, cases)) if study.settle else []:
        if taken := take_over([(study.name, [case.id for case in deciding])]):
            say(f"{study.name}: {taken} cases by which it chooses are taken from data/")
        sweep.measure(deciding)
        study.settle(path, path.parent)
    sweep.measure([case for case in cases if case not in deciding])
    timelines.complete(study, cases, paths.RUNS, env, say)
    variants.complete(study, parameters, path, env, say, idle)
    idle()
    return records.of_cases(records.read(path), {case.id for case in cases})


def take_over(wanted: Sequence[tuple[str, Sequence[Sequence[str]]]]) -> int:
    """Take the early cases by which studies choose from data/, and settle them; returns how many.

    wanted: names of studies, each with the [op, case] of its early cases. Only what this machine has no rows of is
    taken, and only rows of such a GPU, of the present sources, and of the same driver and versions: others are
    measured. They keep their date. Raises RuntimeError without a GPU.
    """
    here, count = machine.this_machine(), 0
    for name, keys in wanted:
        study, path = registry.load(name), paths.RUNS / here.slug / f"{name}.parquet"
        if study.settle and (taken := _taken(study, [Case(op, json.loads(key)) for op, key in keys], path)):
            records.write_atomic(path.with_name("machine.json"), here.to_json())
            study.settle(path, path.parent)
            count += taken
    return count


def _taken(study: Study, cases: Sequence[Case], path: Path) -> int:
    """How many of these cases a file of runs/ has taken from that of data/."""
    source = paths.recorded(path)
    if not source.exists():
        return 0
    with records.changing(path):
        old = records.read(path) if path.exists() else None
        have = set() if old is None else set(zip(old["op"], old["case"], strict=True))
        known = dict(list(records.read(source).groupby(["op", "case"])))
        left = [case for case in cases if case.id in known and case.id not in have]
        rows = [known[case.id] for case in left if _is_current(study, case, known[case.id].to_dict("records"))]
        if rows:
            records.write(path, records.merge(old, pd.concat(rows)))
    return len(rows)


@dataclass(frozen=True)
class _Sweep:
    """A study that is measured on this GPU. path: its Parquet file; the other fields as in `run`."""

    study: Study
    parameters: Mapping[str, Any]
    processes: int
    env: Mapping[str, str | None]
    say: Progress
    path: Path
    journal: records.Journal
    beside: Beside = lambda: None
    early: list[isolated.Started] = field(default_factory=list)  # those that are left

    def measure(self, cases: Sequence[Case]) -> None:
        """Bring the Parquet file up to date for these cases."""
        have = self._recorded(cases)
        wanted = [case for case in cases if case.id not in have]
        refused = added.refusals(self.study, wanted, self.env, self.say)
        if not prepared.is_prepared(self.study.name, prepared.kernels(self.path.parent.name)):
            compile_ahead(self.study, wanted, self.say)
        warm_up(self.study, wanted, self.env, self.say)
        self._in_turn(wanted, refused)
        self._compact(cases, wanted)

    def _processes(self, case: Case) -> int:
        """How many processes measure a case."""
        return self.study.in_processes(case, self.processes)

    def _in_turn(self, wanted: Sequence[Case], refused: added.Refused) -> None:
        """The processes, one after the other. Some get ready at the same time, before the first of them measures."""
        env = dict(self.env) | {"TRITON_INTERPRET": None}
        left = [index for index in range(self.processes) if self._missing(wanted, index)]
        calls = first_calls(self.study, wanted)
        with ExitStack() as held:
            waiting: dict[int, isolated.Started] = {}
            for index in left[:WAITING]:
                waiting[index] = self._getting_ready(calls, env)
                held.callback(waiting[index].close)
            other = self.beside() if left else None
            ready = {index: one for index, one in waiting.items() if one.ready()}
            if other:
                wait([other])
            for index in left:
                self._one_process(wanted, index, refused, env, ready.get(index))

    def _getting_ready(self, calls: Sequence[Call], env: Mapping[str, str | None]) -> isolated.Started:
        """A process that gets ready, which may have begun with its imports before there was a GPU."""
        first = "labkit.sweep.run:get_ready", self.study.name, calls
        if not self.early:
            return isolated.Started(*first, env=env)
        started = self.early.pop(0)
        started.also(*first)
        return started

    def _one_process(
        self,
        wanted: Sequence[Case],
        index: int,
        refused: added.Refused,
        env: Mapping[str, str | None],
        started: isolated.Started | None,
    ) -> None:
        """Run process `index` until it has every case; a case that kills it is recorded as failed and passed over.

        With functions of the reader's own, it is first measured again without them. started: the process, if there is
        one already.
        """
        study = self.study
        while missing := self._missing(wanted, index):
            count = sum(index < self._processes(case) for case in wanted)
            self.say(f"{study.name}: process {index + 1}, {len(missing)} of {count} cases to measure")
            keys = [list(case.id) for case in missing]
            arguments = (study.name, keys, dict(self.parameters), index, str(self.journal.path))
            arguments = (*arguments, study.add, refused, study.left_out)
            before, (this, started) = len(self.journal.entries()), (started, None)
            try:
                isolated.call("labkit.sweep.run:measure_process", *arguments, env=env, on_line=self.say, started=this)
            except isolated.IsolatedError as failure:
                last = self.journal.entries()[before:][-1:]  # an older one may be of a case at which a run was stopped
                if not last or "rows" in last[0]:
                    raise  # it died outside any case: that would repeat for ever
                case = next(case for case in wanted if list(case.id) == last[0]["case"])
                reason = f"the process died: {failure.kind}: {failure.message}"
                if not added.refuse(refused, study, case, reason):
                    self.journal.append(_entry(case, index, case_runner.failed_case(study, case, index, reason)))
            else:
                if self._missing(wanted, index):
                    raise RuntimeError(f"{study.name}: the source changed while it was measured; restart this process")

    def _missing(self, wanted: Sequence[Case], index: int) -> list[Case]:
        done = self._finished(wanted)
        return [case for case in wanted if index < self._processes(case) and (*case.id, index) not in done]

    def _finished(self, wanted: Sequence[Case]) -> dict[tuple[str, str, int], list[dict[str, Any]]]:
        """(op, case, process) -> the rows in the journal that may still be used."""
        found = {(*e["case"], e["run"]): e["rows"] for e in self.journal.entries() if "rows" in e}
        cases = {case.id: case for case in wanted}
        known = {key: cases[key[:2]] for key in found if key[:2] in cases}
        return {key: found[key] for key, case in known.items() if _is_current(self.study, case, found[key])}

    def _recorded(self, cases: Sequence[Case]) -> set[tuple[str, str]]:
        """The cases that the Parquet file holds as the present sources, in as many processes, measure them here.

        Functions of the reader's own that were timed beside them, and are not asked for now, do no harm.
        """
        if not self.path.exists():
            return set()
        found = set()
        groups = {key: rows.to_dict("records") for key, rows in records.read(self.path).groupby(["op", "case"])}
        for case in cases:
            rows = groups.get(case.id, [])
            measured = records.processes(row["run"] for row in rows)  # 0: nothing could run
            whole = not 0 < measured < self._processes(case)
            if whole and _is_current(self.study, case, added.wanted(rows, self.study)):
                found.add(case.id)
        return found

    def _compact(self, cases: Sequence[Case], wanted: Sequence[Case]) -> None:
        """Move finished cases from the journal into the Parquet file; they leave the journal once the file is safe.

        So do `cases` that the file held already: a run that ended between the two steps leaves them behind.
        """
        done = self._finished(wanted)
        rows: list[dict[str, Any]] = []
        for case in wanted:
            rows += _joined([done[*case.id, index] for index in range(self._processes(case))])
        if rows:
            with records.changing(self.path):
                old = records.read(self.path) if self.path.exists() else None
                records.write(self.path, records.merge(old, pd.DataFrame(rows)))
        moved = {case.id for case in cases}
        if left := [entry for entry in self.journal.entries() if tuple(entry["case"]) not in moved]:
            self.journal.rewrite(left)
        else:
            self.journal.path.unlink(missing_ok=True)


def compile_ahead(study: Study, cases: Sequence[Case], say: Progress) -> None:
    """Compile on all cores what the cases need, so that the GPU need not wait for it; nothing if the study has no list.

    say: gets one line of progress. Raises RuntimeError without a GPU.
    """
    from labkit.evidence import compiled

    if not cases or not study.kernels:
        return
    here = machine.this_machine()
    sources = study.kernels(cases, here.capability, here.name)
    say(f"{study.name}: compiling {len(sources)} kernels")
    problems = compiled.prebuild(sources, here.capability, prepared.folder())
    for problem in dict.fromkeys(problems):
        say(f"{study.name}: {problems.count(problem)} of them not compiled: {problem}")


def compile_apart(wanted: Sequence[tuple[str, Sequence[Sequence[str]]]], capability: int, gpu: str, spared: int) -> int:
    """In a process without a GPU: compile what cases need, on all cores but so many; returns how many kernels.

    wanted: names of studies, each with the [op, case] of its cases. capability, gpu: of the GPU that they are for, and
    its name.
    """
    from labkit.evidence import compiled

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[spared:])
    os.nice(10)
    calls = [isolated.Call("labkit.sweep.run:kernels_of", (name, keys, capability, gpu)) for name, keys in wanted]
    sources = [source for named in isolated.call_many(calls, len(calls)) for source in named]
    compiled.prebuild(sources, capability, prepared.folder())
    return len(sources)


def kernels_of(
    study_name: str, keys: Sequence[Sequence[str]], capability: int, gpu: str
) -> list[tuple[str, Mapping[str, Any]]]:
    """The sources of what the cases of a study need, given by [op, case]."""
    study = registry.load(study_name)
    return study.kernels([Case(op, json.loads(key)) for op, key in keys], capability, gpu) if study.kernels else []


def warm_up(study: Study, cases: Sequence[Case], env: Mapping[str, str | None], say: Progress) -> None:
    """Call once what libraries and releases offer that the study wants `warmed`.

    What cannot be called is passed over: its row will say why. say: gets one line of progress, or two.
    Nothing where that was done for the whole run.
    """
    if not (wanted := calls_of(study, cases)):
        return
    prepared.await_others(study.name)  # the run may just be making them
    if prepared.is_prepared(study.name, prepared.CALLS):
        return
    say(f"{study.name}: {len(wanted)} calls of others compile what they need")
    try:
        call_all(wanted, env)
    except isolated.IsolatedError as problem:  # compiled later then, one after the other
        say(f"{study.name}: {problem.kind}: {problem.message}")


def calls_of(study: Study, cases: Iterable[Case]) -> list[Call]:
    """What others offer that the study wants `warmed`."""
    return _calls(study, cases, study.warmed)


def first_calls(study: Study, cases: Iterable[Case]) -> list[Call]:
    """What others offer that every process is to call `anew`: of those that compile the same the first."""
    found: dict[tuple[str, ...], Call] = {}
    for one in _calls(study, cases, study.anew):
        found.setdefault((one.op, one.variant, one.alike), one)
    return list(found.values())


def _calls(study: Study, cases: Iterable[Case], alike_of: Callable[[Case, spec.Variant], str]) -> list[Call]:
    return [
        Call(study.name, case.op, case.key, variant.name, alike)
        for case in cases
        for variant in study.variants(case)
        if variant.role == "peer" and (alike := alike_of(case, variant))
    ]


def call_all(wanted: Sequence[Call], env: Mapping[str, str | None], stop: threading.Event | None = None) -> None:
    """Make calls of others, in as many processes side by side as there are cores. env, stop: of these processes.

    IsolatedError if one of them dies or is stopped; the others end then.
    """
    with tempfile.TemporaryDirectory() as taken:
        arguments, changes = (apart(wanted), taken), {**env, "TRITON_INTERPRET": None, _INDUCTOR: "1"}
        call = isolated.Call("labkit.sweep.run:call_free", arguments, env=changes)
        isolated.call_many([call] * min(host.cores(), len(wanted)), stop=stop)


def apart(wanted: Sequence[Call]) -> list[Call]:
    """In such an order that those which compile the same are far apart: later ones then find it on disk.

    Variants of one project share kernels, too: fla's layouts, or two releases of vLLM.
    """
    seen = Counter[tuple[str, ...]]()
    rounds = []
    for one in wanted:
        kind = (one.study, one.op, one.variant.partition(" ")[0], one.alike)
        rounds.append(seen[kind])
        seen[kind] += 1
    return [wanted[place] for place in sorted(range(len(wanted)), key=rounds.__getitem__)]


def call_free(wanted: Sequence[Sequence[str]], taken: str, device: str = "cuda") -> None:
    """In a process: make those calls that no other has taken, until one leaves the GPU of no use to this process.

    taken: as `workers.free` takes it.
    """
    for study, op, key, variant, _ in workers.free(wanted, taken):
        if device == "cuda":
            tuning.take_from(paths.RUNS / machine.this_machine().slug / f"{study}{tuning.ENDING}")
        call_once(study, op, key, variant, device)
        if device == "cuda" and not _is_usable():
            return


def _is_usable() -> bool:
    """Free what a call held; whether this process can still use the GPU."""
    import torch

    gc.collect()
    try:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def call_once(study_name: str, op: str, key: str, name: str, device: str = "cuda") -> bool:
    """Prepare a variant of a case with one set of buffers and call it; whether that could be done."""
    case = Case(op, json.loads(key))
    variant = next(one for one in registry.load(study_name).variants(case) if one.name == name)
    try:
        variant.prepare(case, device, 1, 0).calls[0]()
    except Exception:  # whatever it is, the row will name it
        return False
    return True


@contextmanager
def imported(study_name: str, count: int, env: Mapping[str, str | None]) -> Iterator[list[isolated.Started]]:
    """Processes that will measure a study: as many as get ready at once, and at most `count`.

    They import what they will need, for which no GPU must be free. env: of these processes.
    """
    with ExitStack() as held:
        found = []
        for _ in range(min(count, WAITING)):
            first = "labkit.sweep.run:import_all", study_name
            found.append(isolated.Started(*first, env=dict(env) | {"TRITON_INTERPRET": None}))
            held.callback(found[-1].close)
        yield found


def import_all(study_name: str) -> None:
    """In a measuring process: import the study, and what it uses of others."""
    study = registry.load(study_name)
    registry.trials(study_name)
    for module in study.imports:
        with suppress(Exception):  # whatever it is, the row will name it
            import_module(module)


def get_ready(study_name: str, calls: Sequence[Sequence[str]], device: str = "cuda") -> None:
    """What a measuring process does first, while nothing is timed: all that takes it seconds, and is only for itself.

    It imports libraries, begins to use the GPU, and makes the `calls` (`Study.anew`), each the fields of a Call. A
    process that one of them leaves without the GPU ends.
    """
    import_all(study_name)
    if device == "cuda":
        machine.this_machine()
    for _, op, key, variant, _ in calls:
        call_once(study_name, op, key, variant, device)
    if device == "cuda" and not _is_usable():
        os._exit(1)


def measure_process(
    study_name: str,
    keys: Sequence[Sequence[str]],
    parameters: Mapping[str, Any],
    index: int,
    journal_path: str,
    add: Sequence[str] = (),
    refused: added.Refused = added.NONE_REFUSED,
    left_out: Sequence[str] = (),
) -> int:
    """What one measuring process does: the cases named by [op, case] in `keys`; returns how many it measured."""
    study = added.with_added(spec.leaving_out(registry.load(study_name), left_out), add, refused)
    journal = records.Journal(Path(journal_path))
    device = machine.CudaDevice()
    prepared.await_others(study_name)  # among them what measures the ceilings
    limits = ceilings()
    tuning.keep_in(Path(journal_path).with_name(f"{study_name}{tuning.ENDING}"))
    wanted = set(map(tuple, keys))
    cases = [case for case in study.cases(parameters) if case.id in wanted]
    for count, case in enumerate(cases, 1):
        journal.append({"case": list(case.id), "run": index})
        journal.append(_entry(case, index, case_runner.measure(study, case, index, device, limits)))
        print(f"{study_name}: process {index + 1}, case {count} of {len(cases)}: {case.op} {case.key}", flush=True)
    return len(cases)


def _entry(case: Case, index: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"case": list(case.id), "run": index, "rows": rows}


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What must agree between the parts of one row, and with this machine, for a sweep to go on with them."""
    return tuple(row[name] for name in ("gpu", "driver", "torch", "triton", "kernel_sha"))


def _is_current(study: Study, case: Case, rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether rows are of exactly the variants that the study has now, from this machine and the present sources."""
    here = machine.provenance(0)
    wanted = {v.name: _identity(here | {"kernel_sha": kernel_sha(v.source)}) for v in with_control(study, case)}
    return {row["variant"]: _identity(row) for row in rows} == wanted


def _joined(parts: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a variant, cache and mode from the rows of every process: lists joined, the worst of error and ok."""
    together: dict[tuple[str, str, str], dict[str, Any]] = {}
    for index, part in enumerate(parts):
        for row in part:
            key = (row["variant"], row["cache"], row["mode"])
            new = row | {"run": [index] * len(row["samples_ns"])}
            together[key] = _join(together[key], new) if key in together else new
    return list(together.values())


def _join(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    lists = {name: old[name] + new[name] for name in ("run", "block", "samples_ns", "throttled", "sm_mhz")}
    worst = {
        "ok": old["ok"] and new["ok"],
        "error": float(np.fmax(old["error"], new["error"])),
        "reason": "; ".join(dict.fromkeys(filter(None, [old["reason"], new["reason"]]))),
        "calls_per_sample": max(old["calls_per_sample"], new["calls_per_sample"]),
    }
    return old | lists | worst


def ceilings() -> Any:
    """The measured ceilings of this GPU: its own, else the recorded ones of the same model; empty if there are none."""
    from labkit.evidence import roofline

    for base in (paths.RUNS, paths.DATA):
        path = base / machine.this_machine().slug / "machine.parquet"
        if path.exists():
            return roofline.Ceilings.from_rows(records.read(path))
    return roofline.Ceilings.from_rows(pd.DataFrame(columns=records.SCHEMA.names))
