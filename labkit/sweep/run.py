"""Cases × processes: every variant of a case timed in one run, case by case, resumable at any point.

The parent starts one process after the other; each measures every case that the journal does not hold for it. So a run
that is stopped goes on where it was, a crash of the GPU's context costs one case, and the three processes that a
headline claim needs are independent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import isolated, paths, registry
from labkit.bench import machine, records
from labkit.bench.sha import kernel_sha
from labkit.bench.spec import Case, Study
from labkit.sweep import added
from labkit.sweep import case as case_runner
from labkit.sweep.case import with_control

Progress = Callable[[str], None]


def folder(slug: str) -> Path:
    """Where this machine's own measurements of a GPU go."""
    return paths.RUNS / slug


def run(
    study: Study, parameters: Mapping[str, Any], processes: int, env: Mapping[str, str | None], say: Progress = print
) -> pd.DataFrame:
    """Measure what is missing of a study on this GPU and return all its rows of these cases.

    env: environment of the measuring processes (the leased GPU). say: gets each line of progress.
    Raises RuntimeError without a GPU. A case that cannot run is a row with its reason; one that kills its process too.
    """
    here = machine.this_machine()
    records.write_atomic(folder(here.slug) / "machine.json", here.to_json())
    path = folder(here.slug) / f"{study.name}.parquet"
    cases = study.cases(parameters)
    if early := [case for case in cases if study.early(case)]:
        _measure(study, parameters, early, 1, path, env, say)
        if study.settle:
            study.settle(path, path.parent)
    _measure(study, parameters, [case for case in cases if not study.early(case)], processes, path, env, say)
    _count(study, parameters, path, env, say)
    keys = {(case.op, case.key) for case in cases}
    rows = records.read(path)
    return rows[[key in keys for key in zip(rows["op"], rows["case"], strict=True)]].reset_index(drop=True)


def _count(
    study: Study, parameters: Mapping[str, Any], path: Path, env: Mapping[str, str | None], say: Progress
) -> None:
    """Take the hardware counters that are missing; without them the sweep is as good."""
    from labkit.sweep import variants

    variants.complete(study, parameters, path, env, say)


def _measure(
    study: Study,
    parameters: Mapping[str, Any],
    cases: Sequence[Case],
    processes: int,
    path: Path,
    env: Mapping[str, str | None],
    say: Progress,
) -> None:
    """Bring the Parquet file up to date for these cases."""
    journal = records.Journal(path.with_suffix(".journal.jsonl"))
    have = _recorded(study, cases, path, processes)
    wanted = [case for case in cases if (case.op, case.key) not in have]
    refused = added.refusals(study, wanted, env, say)
    compile_ahead(study, wanted, say)
    for index in range(processes):
        _one_process(study, parameters, wanted, index, journal, env, say, refused)
    _compact(study, cases, wanted, processes, journal, path)


def compile_ahead(study: Study, cases: Sequence[Case], say: Progress) -> None:
    """Compile on all cores what the cases need, so that the GPU need not wait for it; nothing if the study has no list.

    say: gets one line of progress. Raises RuntimeError without a GPU.
    """
    from labkit.evidence import compiled

    if not cases or not study.kernels:
        return
    capability = machine.this_machine().capability
    sources = study.kernels(cases, capability)
    say(f"{study.name}: compiling {len(sources)} kernels")
    compiled.prebuild(sources, capability)


def _one_process(
    study: Study,
    parameters: Mapping[str, Any],
    wanted: Sequence[Case],
    index: int,
    journal: records.Journal,
    env: Mapping[str, str | None],
    say: Progress,
    refused: added.Refused,
) -> None:
    """Run process `index` until it has every case; a case that kills it is recorded as failed and passed over.

    With functions of the reader's own, it is first measured again without them.
    """
    target = "labkit.sweep.run:measure_process"
    while missing := _missing(study, wanted, index, journal):
        say(f"{study.name}: process {index + 1}, {len(missing)} of {len(wanted)} cases to measure")
        keys = [[case.op, case.key] for case in missing]
        arguments = (study.name, keys, dict(parameters), index, str(journal.path), study.add, refused)
        before = len(journal.entries())
        try:
            isolated.call(target, *arguments, env=dict(env) | {"TRITON_INTERPRET": None}, on_line=say)
        except isolated.IsolatedError as failure:
            last = journal.entries()[before:][-1:]  # an older one may be of a case at which a run was stopped
            if not last or "rows" in last[0]:
                raise  # it died outside any case: that would repeat for ever
            case = next(case for case in wanted if [case.op, case.key] == last[0]["case"])
            reason = f"the process died: {failure.kind}: {failure.message}"
            if added.refuse(refused, study, case, reason):
                continue
            journal.append(_entry(case, index, case_runner.failed_case(study, case, index, reason)))
        else:
            if _missing(study, wanted, index, journal):
                raise RuntimeError(f"{study.name}: the source changed while it was measured; restart this process")


def measure_process(
    study_name: str,
    keys: Sequence[Sequence[str]],
    parameters: Mapping[str, Any],
    index: int,
    journal_path: str,
    add: Sequence[str] = (),
    refused: added.Refused = added.NONE_REFUSED,
) -> int:
    """What one measuring process does: the cases named by [op, case] in `keys`; returns how many it measured."""
    study, journal = added.with_added(registry.load(study_name), add, refused), records.Journal(Path(journal_path))
    device, ceilings = machine.CudaDevice(), _ceilings()
    cases = [case for case in study.cases(parameters) if [case.op, case.key] in [list(key) for key in keys]]
    for count, case in enumerate(cases, 1):
        journal.append({"case": [case.op, case.key], "run": index})
        journal.append(_entry(case, index, case_runner.measure(study, case, index, device, ceilings)))
        print(f"{study_name}: process {index + 1}, case {count} of {len(cases)}: {case.op} {case.key}", flush=True)
    return len(cases)


def _entry(case: Case, index: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"case": [case.op, case.key], "run": index, "rows": rows}


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What must agree between the parts of one row, and with this machine, for a sweep to go on with them."""
    return tuple(row[name] for name in ("gpu", "driver", "torch", "triton", "kernel_sha"))


def _expected(study: Study, case: Case) -> dict[str, tuple[Any, ...]]:
    here = machine.provenance(0)
    return {v.name: _identity(here | {"kernel_sha": kernel_sha(v.source)}) for v in with_control(study, case)}


def _is_current(study: Study, case: Case, rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether rows are of exactly the variants that the study has now, from this machine and the present sources."""
    return {row["variant"]: _identity(row) for row in rows} == _expected(study, case)


def _finished(study: Study, wanted: Sequence[Case], journal: records.Journal) -> dict[tuple[str, str, int], list[dict]]:
    """(op, case, process) -> the rows in the journal that may still be used."""
    found = {(*e["case"], e["run"]): e["rows"] for e in journal.entries() if "rows" in e}
    cases = {(case.op, case.key): case for case in wanted}
    return {key: rows for key, rows in found.items() if key[:2] in cases and _is_current(study, cases[key[:2]], rows)}


def _missing(study: Study, wanted: Sequence[Case], index: int, journal: records.Journal) -> list[Case]:
    done = _finished(study, wanted, journal)
    return [case for case in wanted if (case.op, case.key, index) not in done]


def _recorded(study: Study, cases: Sequence[Case], path: Path, processes: int) -> set[tuple[str, str]]:
    """The cases that the Parquet file already holds as the present sources, in as many processes, measure them here.

    Functions of the reader's own that were timed beside them, and are not asked for now, do no harm.
    """
    if not path.exists():
        return set()
    groups = {key: rows.to_dict("records") for key, rows in records.read(path).groupby(["op", "case"])}
    keys = {(case.op, case.key): case for case in cases}
    known = {key: added.wanted(rows, study) for key, rows in groups.items()}
    current = {key for key, rows in known.items() if key in keys and _is_current(study, keys[key], rows)}
    return {key for key in current if not 0 < _processes(groups[key]) < processes}


def _processes(rows: Iterable[Mapping[str, Any]]) -> int:
    """How many processes the samples of a case are from; 0 if nothing in it could run."""
    return max((max(row["run"]) + 1 for row in rows if len(row["run"])), default=0)


def _compact(
    study: Study, cases: Sequence[Case], wanted: Sequence[Case], processes: int, journal: records.Journal, path: Path
) -> None:
    """Move finished cases from the journal into the Parquet file; they leave the journal once the file is safe.

    So do `cases` that the file held already: a run that ended between the two steps leaves them behind.
    """
    done = _finished(study, wanted, journal)
    rows: list[dict[str, Any]] = []
    for case in wanted:
        rows += _joined([done[case.op, case.key, index] for index in range(processes)])
    if rows:
        old = records.read(path) if path.exists() else None
        records.write(path, records.merge(old, pd.DataFrame(rows)))
    moved = {(case.op, case.key) for case in cases}
    if left := [entry for entry in journal.entries() if tuple(entry["case"]) not in moved]:
        journal.rewrite(left)
    else:
        journal.path.unlink(missing_ok=True)


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
    return (
        old
        | lists
        | {
            "ok": old["ok"] and new["ok"],
            "error": float(np.fmax(old["error"], new["error"])),
            "reason": "; ".join(dict.fromkeys(filter(None, [old["reason"], new["reason"]]))),
            "calls_per_sample": max(old["calls_per_sample"], new["calls_per_sample"]),
        }
    )


def _ceilings() -> Any:
    """The measured ceilings of this GPU: its own, else the recorded ones of the same model; empty if there are none."""
    from labkit.evidence import roofline

    for base in (paths.RUNS, paths.DATA):
        path = base / machine.this_machine().slug / "machine.parquet"
        if path.exists():
            return roofline.Ceilings.from_rows(records.read(path))
    return roofline.Ceilings.from_rows(pd.DataFrame(columns=records.SCHEMA.names))
