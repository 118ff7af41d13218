"""One case: every variant prepared, checked, timed against the others, and checked again."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from labkit.bench import machine, records, timing
from labkit.bench.sha import kernel_sha
from labkit.bench.spec import ADDED, CONTROL, Case, Floor, Study, Trial, Variant
from labkit.kernels.launch import Launch

ABOVE_CEILING = 1.02  # a cold rate above the same run's ceiling by more is measured again
Ready = tuple[Variant, Trial, dict[str, Any]]  # with the row's columns that are known before the timing


def measure(study: Study, case: Case, index: int, device: machine.CudaDevice, ceilings: Any) -> list[dict[str, Any]]:
    """Prepare, check, time and check again every variant of a case; one row (without lists joined) for each."""
    seed = 1000 + index
    floor = study.floor(case)
    set_bytes = floor.set_bytes or floor.bytes
    sets = max(1, math.ceil(machine.COLD_L2 * device.machine.l2_bytes / set_bytes))
    rows: list[dict[str, Any]] = []
    ready: dict[str, Ready] = {}
    for variant in with_control(study, case):
        base = _base_row(study, case, variant, floor, index, seed)
        try:
            trial = variant.prepare(case, device.torch_device, sets, seed)
            # The other processes run the same compiled code, and check it after the timing, on inputs of their own.
            first = index == 0
            base |= first_look(trial, evidence=first, check=first or variant.name.startswith(ADDED))
            ready[variant.name] = (variant, trial, base)
        except Exception as problem:  # any failure of one variant is a row; the others go on
            rows += [base | _not_ok(cache, variant.mode, records.first_line(problem)) for cache in variant.caches]
            device.recover()
    for cache in ("cold", "hot"):
        for mode in ("graph", "eager"):
            group = {n: r for n, r in ready.items() if cache in r[0].caches and r[0].mode == mode}
            for name, (variant, trial, base) in group.items():
                group[name] = (variant, trial, base | _predict(floor, ceilings, trial, base, cache, mode))
            fits = floor.hot_at_any_size or 2 * set_bytes <= device.machine.l2_bytes
            if not group or (cache == "hot" and not fits):
                continue
            own = {name: one for name, one in group.items() if not one[1].timer}
            rows += [_foreign_row(base, trial, cache, mode, device) for _, trial, base in group.values() if trial.timer]
            rows += _time_own(study, case, own, cache, mode, device, seed)
    return rows


_EVIDENCE: dict[str, dict[str, Any]] = {}  # by hash of the compiled kernel: many cases run the same one


def _evidence(launch: Launch) -> dict[str, Any]:
    """What the kernel that runs was compiled to, and how its loads and stores touch sectors and lines."""
    from labkit.evidence import coalescing, compiled

    key = compiled.build(launch).hash
    if key not in _EVIDENCE:
        _EVIDENCE[key] = compiled.evidence(launch) | {"accesses": coalescing.summary(launch)}
    return _EVIDENCE[key]


def _predict(
    floor: Floor, ceilings: Any, trial: Trial, base: Mapping[str, Any], cache: str, mode: str
) -> dict[str, float]:
    """The columns of the prediction, made before the timing and stored with it."""
    from labkit.evidence import roofline

    if not floor.limit or trial.idle:
        return {"predicted_us": math.nan, "ceiling": math.nan}
    ctas = math.prod(trial.launch.grid) if trial.launch else None
    per_sm = json.loads(base["evidence"]).get("ctas_per_sm")
    found = roofline.predict(floor, ceilings, ctas, machine.this_machine().sms, per_sm, mode, cache)
    return {"predicted_us": found.predicted_us, "ceiling": found.ceiling}


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
    return [*variants, replace(twin, name=CONTROL, role="control", options=options)]


def first_look(trial: Trial, evidence: bool, check: bool = True) -> dict[str, Any]:
    """Evidence and error before any timing: the columns evidence, error, ok and reason."""
    found = _evidence(trial.launch) if evidence and trial.launch and trial.dissect else {}
    errors = trial.check() if check and trial.check else {}
    if evidence and trial.facts:
        found = found | trial.facts()
    return {
        "evidence": json.dumps(found, sort_keys=True),
        "error": max(errors.values(), default=math.nan),
        "ok": not (reason := beyond(errors, trial.tolerance)),
        "reason": reason,
    }


def _time_own(
    study: Study, case: Case, group: Mapping[str, Ready], cache: str, mode: str, device: machine.CudaDevice, seed: int
) -> list[dict[str, Any]]:
    """The rows of all variants that share a cache and a mode, timed against each other."""
    timed, rows = {}, []
    for name, (_, trial, base) in group.items():
        try:
            calls = trial.calls if cache == "cold" else trial.calls[:1]
            timed[name] = device.prepare(calls, mode, whole=bool(trial.guard))
        except Exception as problem:  # it cannot be launched or captured; the others go on
            rows.append(base | _not_ok(cache, mode, records.first_line(problem)))
            device.recover()
    if not timed:
        return rows
    group = {name: group[name] for name in timed}
    guards = []
    for name, (_, trial, _) in group.items():
        if trial.begin:
            trial.begin()
        if trial.guard:
            guards.append(_guarded(trial, timed[name], cache))
        if trial.poison:
            trial.poison()  # after the warm-up calls: what is found written is written by the timed calls
    twin = study.control(case)
    twins = (twin, CONTROL) if twin in timed and CONTROL in timed else None

    def once(again: int) -> timing.Timing:
        return timing.measure(device, timed, hot=cache == "hot", twins=twins, seed=seed + again, watchers=guards)

    result = once(0)
    if cache == "cold" and _above_ceiling(group, result):
        result = once(1)
    above = _above_ceiling(group, result) if cache == "cold" else ()
    for name, (_, trial, base) in group.items():
        row = base | {"cache": cache, "mode": mode, "calls_per_sample": timed[name].calls}
        row |= {"block": result.block, "samples_ns": result.ns[name]}
        row |= {"throttled": result.throttled, "sm_mhz": result.sm_mhz}
        remark = "above the ceiling timed in the same run, twice" if name in above else ""
        for call in trial.calls[timed[name].sets :]:  # these buffer sets are as they were poisoned
            call()
        rows.append(_after(row, trial, remark, device.machine.datasheet_tbs))
    return rows


def _guarded(trial: Trial, timed: machine.Timed, cache: str) -> Any:
    """The guard of a trial, which looks at what its timed calls leave."""
    sets, replays = (len(trial.calls), 1) if cache == "cold" else (1, 2)  # hot: once before, untimed
    trial.guard.begin(sets, replays * timed.calls // sets)
    timed.before, timed.after = trial.guard.poison, trial.guard.take
    return trial.guard


def _above_ceiling(group: Mapping[str, Ready], result: timing.Timing) -> set[str]:
    """Variants that beat the fastest ceiling variant of the same case by more than 2 %."""
    best = [np.median(result.ns[name]) for name, (variant, _, _) in group.items() if variant.role == "ceiling"]
    if not best:
        return set()
    working = [name for name, (_, trial, _) in group.items() if not trial.idle]
    return {name for name in working if np.median(result.ns[name]) * ABOVE_CEILING < min(best)}


def _after(row: dict[str, Any], trial: Trial, remark: str, datasheet_tbs: float) -> dict[str, Any]:
    """Check outputs again after the timing, and refuse what memory cannot do."""
    reasons = [row["reason"], remark]
    if trial.written and not trial.written():
        row["ok"], reasons = False, [*reasons, "an output was not written while it was timed"]
    if trial.check:
        errors = trial.check()
        row["error"] = float(np.fmax.reduce([row["error"], *errors.values()]))
        reasons.append(beyond(errors, trial.tolerance))
        row["ok"] = row["ok"] and not reasons[-1]
    if trial.guard and trial.guard.faults:
        row["ok"], reasons = False, [*reasons, *trial.guard.faults]
    with np.errstate(divide="ignore"):  # a graph in which nothing runs takes no time
        tbs = (trial.moves or row["floor_bytes"]) / np.median(row["samples_ns"]) / 1e3
    if row["cache"] == "cold" and tbs > datasheet_tbs and not trial.idle:
        row["ok"] = False
        reasons.append(f"refused: {tbs:.2f} TB/s is above the datasheet's {datasheet_tbs:.2f} TB/s")
    row["reason"] = "; ".join(dict.fromkeys(filter(None, reasons)))
    return row


def beyond(errors: Mapping[str, float], tolerance: Mapping[str, float]) -> str:
    """The errors beyond their tolerance, NaN included, as a row's reason; empty if there is none."""
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
        "rules": json.dumps({claim.id: claim.sha() for claim in study.claims}, sort_keys=True),
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


def failed_case(study: Study, case: Case, index: int, reason: str) -> list[dict[str, Any]]:
    return [
        _base_row(study, case, variant, study.floor(case), index, 1000 + index) | _not_ok(cache, variant.mode, reason)
        for variant in with_control(study, case)
        for cache in variant.caches
    ]
