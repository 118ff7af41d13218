"""Cases × processes: every variant of a case timed in one run, case by case, resumable at any point.

The parent starts one process after the other; each measures every case that the journal does not hold for it. So a run
that is stopped goes on where it was, a crash of the GPU's context costs one case, and the three processes that a
headline claim needs are independent.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import isolated, paths, studies
from labkit.bench import machine, records, timing
from labkit.bench.sha import kernel_sha
from labkit.bench.spec import CONTROL, Case, Floor, Study, Trial, Variant
from labkit.launch import Launch

COLD_L2 = 4  # inputs rotate over at least this many L2 sizes
ABOVE_CEILING = 1.02  # a cold rate above the same run's ceiling by more is measured again

Progress = Callable[[str], None]
Ready = tuple[Variant, Trial, dict[str, Any]]  # with the row's columns that are known before the timing


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
    journal = records.Journal(path.with_suffix(".journal.jsonl"))
    cases = study.cases(parameters)
    have = _recorded(study, cases, path)
    wanted = [case for case in cases if (case.op, case.key) not in have]
    for index in range(processes):
        _one_process(study, parameters, wanted, index, journal, env, say)
    _compact(study, wanted, processes, journal, path)
    keys = {(case.op, case.key) for case in cases}
    rows = records.read(path)
    return rows[[key in keys for key in zip(rows["op"], rows["case"], strict=True)]].reset_index(drop=True)


def _one_process(
    study: Study,
    parameters: Mapping[str, Any],
    wanted: Sequence[Case],
    index: int,
    journal: records.Journal,
    env: Mapping[str, str | None],
    say: Progress,
) -> None:
    """Run process `index` until it has every case; a case that kills it is recorded as failed and passed over."""
    target = "labkit.bench.sweep:measure_process"
    while missing := _missing(study, wanted, index, journal):
        say(f"{study.name}: process {index + 1}, {len(missing)} of {len(wanted)} cases to measure")
        keys = [[case.op, case.key] for case in missing]
        arguments = (study.name, keys, dict(parameters), index, str(journal.path))
        try:
            isolated.call(target, *arguments, env=dict(env) | {"TRITON_INTERPRET": None}, on_line=say)
        except isolated.IsolatedError as failure:
            last = [entry for entry in journal.entries() if entry["run"] == index][-1:]
            if not last or "rows" in last[0]:
                raise  # it died outside any case: that would repeat for ever
            case = next(case for case in wanted if [case.op, case.key] == last[0]["case"])
            reason = f"the process died: {failure.kind}: {failure.message}"
            journal.append(_entry(case, index, _failed_case(study, case, index, reason)))


def measure_process(
    study_name: str, keys: Sequence[Sequence[str]], parameters: Mapping[str, Any], index: int, journal_path: str
) -> int:
    """What one measuring process does: the cases named by [op, case] in `keys`; returns how many it measured."""
    study, journal = studies.load(study_name), records.Journal(Path(journal_path))
    device, ceilings = machine.CudaDevice(), _ceilings()
    cases = [case for case in study.cases(parameters) if [case.op, case.key] in [list(key) for key in keys]]
    for count, case in enumerate(cases, 1):
        journal.append({"case": [case.op, case.key], "run": index})
        journal.append(_entry(case, index, measure_case(study, case, index, device, ceilings)))
        print(f"{study_name}: process {index + 1}, case {count} of {len(cases)}: {case.op} {case.key}", flush=True)
    return len(cases)


def measure_case(
    study: Study, case: Case, index: int, device: machine.CudaDevice, ceilings: Any
) -> list[dict[str, Any]]:
    """Prepare, check, time and check again every variant of a case; one row (without lists joined) for each."""
    import torch

    seed = 1000 + index
    floor = study.floor(case)
    set_bytes = floor.set_bytes or floor.bytes
    sets = max(1, math.ceil(COLD_L2 * device.machine.l2_bytes / set_bytes))
    rows: list[dict[str, Any]] = []
    ready: dict[str, Ready] = {}
    for variant in with_control(study, case):
        base = _base_row(study, case, variant, floor, index, seed)
        try:
            trial = variant.prepare(case, torch.device("cuda"), sets, seed)
            base |= _first_look(trial)
            ready[variant.name] = (variant, trial, base)
        except Exception as problem:  # any failure of one variant is a row; the others go on
            rows += [base | _not_ok(cache, variant.mode, _first_line(problem)) for cache in variant.caches]
            _revive(torch)
    for cache in ("cold", "hot"):
        for mode in ("graph", "eager"):
            group = {n: r for n, r in ready.items() if cache in r[0].caches and r[0].mode == mode}
            for name, (variant, trial, base) in group.items():
                group[name] = (variant, trial, base | _predict(floor, ceilings, trial, base, cache, mode))
            if group and not (cache == "hot" and 2 * set_bytes > device.machine.l2_bytes):
                rows += _time_group(study, case, group, cache, mode, device, seed)
    return rows


_EVIDENCE: dict[str, dict[str, Any]] = {}  # by hash of the compiled kernel: many cases run the same one


def _evidence(launch: Launch) -> dict[str, Any]:
    """What the kernel that runs was compiled to, and how its loads and stores touch sectors and lines."""
    from labkit.evidence import coalescing, compiled

    key = compiled.build(launch).hash
    if key not in _EVIDENCE:
        _EVIDENCE[key] = compiled.evidence(launch) | {"accesses": coalescing.summary(launch)}
    return _EVIDENCE[key]


def _predict(floor: Floor, ceilings: Any, trial: Trial, base: Mapping[str, Any], cache: str, mode: str) -> dict[str, float]:
    """The columns of the prediction, made before the timing and stored with it."""
    from labkit.evidence import roofline

    if not floor.limit:
        return {"predicted_us": math.nan, "ceiling": math.nan}
    ctas = math.prod(trial.launch.grid) if trial.launch else None
    per_sm = json.loads(base["evidence"]).get("ctas_per_sm")
    found = roofline.predict(floor, ceilings, ctas, machine.this_machine().sms, per_sm, mode, cache)
    return {"predicted_us": found.predicted_us, "ceiling": found.ceiling}


def _time_group(
    study: Study, case: Case, group: Mapping[str, Ready], cache: str, mode: str, device: machine.CudaDevice, seed: int
) -> list[dict[str, Any]]:
    """The rows of all variants that share a cache and a mode, timed against each other."""
    foreign = {name: ready for name, ready in group.items() if ready[1].timer}
    own = {name: ready for name, ready in group.items() if not ready[1].timer}
    rows = [_foreign_row(base, trial, cache, mode, device) for _, trial, base in foreign.values()]
    return rows + (_time_own(study, case, own, cache, mode, device, seed) if own else [])


def _foreign_row(
    base: dict[str, Any], trial: Trial, cache: str, mode: str, device: machine.CudaDevice
) -> dict[str, Any]:
    samples = [round(ns) for ns in trial.timer()]
    state, count = device.state(), len(samples)
    lists = {"samples_ns": samples, "block": list(range(count)), "sm_mhz": [state.sm_mhz] * count}
    lists["throttled"] = ["+".join(sorted(state.reasons))] * count
    row = base | {"cache": cache, "mode": mode, "calls_per_sample": 1} | lists
    return _after(row, trial, "", device.machine.datasheet_tbs)


def with_control(study: Study, case: Case) -> list[Variant]:
    """The variants of a case and, last, the A/A control: one of them again, with its own buffers."""
    variants = study.variants(case)
    twin = next(variant for variant in variants if variant.name == study.control(case))
    options = dict(twin.options) | {"repeats": twin.name}
    control = Variant(CONTROL, "control", twin.source, twin.prepare, options, twin.caches, twin.mode)
    return [*variants, control]


def _first_look(trial: Trial) -> dict[str, Any]:
    """Evidence and error before any timing; outputs are left poisoned."""
    errors = trial.check() if trial.check else {}
    if trial.poison:
        trial.poison()
    return {
        "evidence": json.dumps(_evidence(trial.launch) if trial.launch else {}, sort_keys=True),
        "error": max(errors.values(), default=math.nan),
        "ok": _within(errors, trial.tolerance),
        "reason": _beyond(errors, trial.tolerance),
    }


_EVIDENCE: dict[str, dict[str, Any]] = {}  # by hash of the compiled kernel: many cases run the same one


def _evidence(launch: Launch) -> dict[str, Any]:
    """What the kernel that runs was compiled to, and how its loads and stores touch sectors and lines."""
    from labkit.evidence import coalescing, compiled

    key = compiled.build(launch).hash
    if key not in _EVIDENCE:
        _EVIDENCE[key] = compiled.evidence(launch) | {"accesses": coalescing.summary(launch)}
    return _EVIDENCE[key]


def _time_group(
    study: Study, case: Case, group: Mapping[str, Ready], cache: str, mode: str, device: machine.CudaDevice, seed: int
) -> list[dict[str, Any]]:
    """The rows of all variants that share a cache and a mode, timed against each other."""
    foreign = {name: ready for name, ready in group.items() if ready[1].timer}
    own = {name: ready for name, ready in group.items() if not ready[1].timer}
    rows = [_foreign_row(base, trial, cache, mode, device) for _, trial, base in foreign.values()]
    return rows + (_time_own(study, case, own, cache, mode, device, seed) if own else [])


def _foreign_row(
    base: dict[str, Any], trial: Trial, cache: str, mode: str, device: machine.CudaDevice
) -> dict[str, Any]:
    samples = [round(ns) for ns in trial.timer()]
    state, count = device.state(), len(samples)
    lists = {"samples_ns": samples, "block": list(range(count)), "sm_mhz": [state.sm_mhz] * count}
    lists["throttled"] = ["+".join(sorted(state.reasons))] * count
    row = base | {"cache": cache, "mode": mode, "calls_per_sample": 1} | lists
    return _after(row, trial, "", device.machine.datasheet_tbs)


def with_control(study: Study, case: Case) -> list[Variant]:
    """The variants of a case and, last, the A/A control: one of them again, with its own buffers."""
    variants = study.variants(case)
    twin = next(variant for variant in variants if variant.name == study.control(case))
    options = dict(twin.options) | {"repeats": twin.name}
    control = Variant(CONTROL, "control", twin.source, twin.prepare, options, twin.caches, twin.mode)
    return [*variants, control]


def _first_look(trial: Trial, floor: Floor, ceilings: Any, device: machine.CudaDevice) -> dict[str, Any]:
    """Evidence, prediction and error before any timing; outputs are left poisoned."""
    from labkit.evidence import roofline

    found = _evidence(trial.launch) if trial.launch else {}
    ctas = math.prod(trial.launch.grid) if trial.launch else None
    prediction = roofline.predict(floor, ceilings, ctas, device.machine.sms, found.get("ctas_per_sm"))
    errors = trial.check() if trial.check else {}
    if trial.poison:
        trial.poison()
    return {
        "evidence": json.dumps(found, sort_keys=True),
        "predicted_us": prediction.predicted_us,
        "ceiling": prediction.ceiling,
        "error": max(errors.values(), default=math.nan),
        "ok": _within(errors, trial.tolerance),
        "reason": _beyond(errors, trial.tolerance),
    }


def _time_own(
    study: Study, case: Case, group: Mapping[str, Ready], cache: str, mode: str, device: machine.CudaDevice, seed: int
) -> list[dict[str, Any]]:
    timed = {name: device.prepare(_calls(trial, cache), mode) for name, (_, trial, _) in group.items()}
    twin = study.control(case)
    twins = (twin, CONTROL) if twin in timed and CONTROL in timed else None

    def once(again: int) -> timing.Timing:
        return timing.measure(device, timed, hot=cache == "hot", twins=twins, seed=seed + again)

    result = once(0)
    if cache == "cold" and _above_ceiling(group, result):
        result = once(1)
    above = _above_ceiling(group, result) if cache == "cold" else set()
    rows = []
    for name, (_, trial, base) in group.items():
        row = base | {
            "cache": cache,
            "mode": mode,
            "block": result.block,
            "samples_ns": result.ns[name],
            "throttled": result.throttled,
            "sm_mhz": result.sm_mhz,
            "calls_per_sample": timed[name].calls,
        }
        remark = "above the ceiling timed in the same run, twice" if name in above else ""
        rows.append(_after(row, trial, remark, device.machine.datasheet_tbs))
    return rows


def _calls(trial: Trial, cache: str) -> Sequence[Callable[[], Any]]:
    return trial.calls if cache == "cold" else trial.calls[:1]


def _above_ceiling(group: Mapping[str, Ready], result: timing.Timing) -> set[str]:
    """Variants that beat the fastest ceiling variant of the same case by more than 2 %."""
    best = [np.median(result.ns[name]) for name, (variant, _, _) in group.items() if variant.role == "ceiling"]
    if not best:
        return set()
    return {name for name in group if np.median(result.ns[name]) * ABOVE_CEILING < min(best)}


def _after(row: dict[str, Any], trial: Trial, remark: str, datasheet_tbs: float) -> dict[str, Any]:
    """Check outputs again after the timing, and refuse what memory cannot do."""
    reasons = [row["reason"], remark]
    if trial.written and not trial.written():
        row["ok"], reasons = False, [*reasons, "an output was not written while it was timed"]
    if trial.check:
        errors = trial.check()
        row["error"] = max(row["error"], *errors.values())
        row["ok"] = bool(row["ok"] and _within(errors, trial.tolerance))
        reasons.append(_beyond(errors, trial.tolerance))
    tbs = row["floor_bytes"] / np.median(row["samples_ns"]) / 1e3
    if row["cache"] == "cold" and tbs > datasheet_tbs:
        row["ok"] = False
        reasons.append(f"refused: {tbs:.2f} TB/s is above the datasheet's {datasheet_tbs:.2f} TB/s")
    row["reason"] = "; ".join(dict.fromkeys(filter(None, reasons)))
    return row


def _within(errors: Mapping[str, float], tolerance: Mapping[str, float]) -> bool:
    return all(value <= tolerance[name] for name, value in errors.items())  # NaN is never within


def _beyond(errors: Mapping[str, float], tolerance: Mapping[str, float]) -> str:
    bad = [f"{n} {v:.1e} (allowed {tolerance[n]:.0e})" for n, v in errors.items() if not v <= tolerance[n]]
    return "wrong: error of " + ", ".join(bad) if bad else ""


def _base_row(study: Study, case: Case, variant: Variant, floor: Floor, index: int, seed: int) -> dict[str, Any]:
    return {
        "study": study.name,
        "op": case.op,
        "case": case.key,
        "variant": variant.name,
        "options": json.dumps(dict(variant.options), sort_keys=True),
        "role": variant.role,
        "floor_bytes": floor.bytes,
        "floor_flops": floor.flops,
        "kernel_sha": kernel_sha(variant.source),
        "evidence": "{}",
        "counters": "{}",
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "error": math.nan,
        "predicted_us": math.nan,
        "ceiling": math.nan,
        "calls_per_sample": 0,
        **machine.provenance(seed),
    }


def _not_ok(cache: str, mode: str, reason: str) -> dict[str, Any]:
    empty: dict[str, list] = {"block": [], "samples_ns": [], "throttled": [], "sm_mhz": []}
    return {"cache": cache, "mode": mode, "ok": False, "reason": reason, **empty}


def _failed_case(study: Study, case: Case, index: int, reason: str) -> list[dict[str, Any]]:
    return [
        _base_row(study, case, variant, study.floor(case), index, 1000 + index) | _not_ok(cache, variant.mode, reason)
        for variant in with_control(study, case)
        for cache in variant.caches
    ]


def _first_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:300]}"


def _revive(torch: Any) -> None:
    """Free what a failed variant held; raises, and so ends the process, if it broke the GPU's context."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


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


def _recorded(study: Study, cases: Sequence[Case], path: Path) -> set[tuple[str, str]]:
    """The cases that the Parquet file already holds as the present sources measure them here."""
    if not path.exists():
        return set()
    groups = {key: rows.to_dict("records") for key, rows in records.read(path).groupby(["op", "case"])}
    keys = {(case.op, case.key): case for case in cases}
    return {key for key, rows in groups.items() if key in keys and _is_current(study, keys[key], rows)}


def _compact(study: Study, wanted: Sequence[Case], processes: int, journal: records.Journal, path: Path) -> None:
    """Move finished cases from the journal into the Parquet file; they leave the journal once the file is safe."""
    done = _finished(study, wanted, journal)
    rows: list[dict[str, Any]] = []
    for case in wanted:
        rows += _joined([done[case.op, case.key, index] for index in range(processes)])
    if rows:
        old = records.read(path) if path.exists() else None
        records.write(path, records.merge(old, pd.DataFrame(rows)))
    moved = {(case.op, case.key) for case in wanted}
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
