"""Every variant of a study's tiny cases against its float64 reference, in a process of its own."""

import math
from typing import Any

import pandas as pd

from labkit import isolated, registry
from labkit.bench import machine
from labkit.bench.spec import Case, Variant
from labkit.evidence import workers
from labkit.sweep import interpreter, prepared, run
from labkit.sweep.case import first_look

INTERPRETER = {"TRITON_INTERPRET": "1"}
COMPILER = {"TRITON_INTERPRET": None}


def check_here(study: str, interpreted: bool) -> pd.DataFrame:
    """Check every variant of the study's tiny cases in a process of its own: interpreted, or on the GPU.

    What the interpreter finds is kept until a source of the lab changes; a GPU is asked anew each time.
    """
    if not interpreted:
        loaded, here = registry.load(study), machine.this_machine()
        if not prepared.is_prepared(study, prepared.tiny(here.slug)):
            run.compile_ahead(loaded, loaded.tiny, say=lambda line: None)
        return pd.DataFrame(isolated.call("labkit.sweep.correctness:check_tiny", study, "cuda", env=COMPILER))
    [rows] = workers.ask(
        "labkit.sweep.correctness:check_tiny", [{"name": study, "device": "cpu"}], env=workers.COMPILING | INTERPRETER
    )
    return pd.DataFrame(rows)


def check_tiny(name: str, device: str) -> list[dict[str, Any]]:
    """In the checking process: prepare, poison, call and compare.

    Left out are variants that have nothing to check, and those of libraries, which may not be installed or run here.
    """
    if device == "cpu":
        interpreter.hasten()
    study, rows = registry.load(name), []
    for case in study.tiny:
        for variant in study.variants(case):
            if variant.role != "peer" and (found := _looked_at(case, variant, device)):
                rows.append({"case": case.key, "variant": variant.name} | found)
    return rows


def _looked_at(case: Case, variant: Variant, device: str) -> dict[str, Any] | None:
    """Error, ok and reason; None of a variant that has nothing to check. One that cannot be launched is not ok."""
    try:
        if (trial := variant.prepare(case, device, 2, 0)).check is None:
            return None
        if trial.poison:
            trial.poison()
        found = first_look(trial, evidence=False)
    except Exception as problem:
        return {"error": math.nan, "ok": False, "reason": f"{type(problem).__name__}: {problem}"}
    return {name: found[name] for name in ("error", "ok", "reason")}
