"""Every variant of a study's tiny cases against its float64 reference, in a process of its own."""

from typing import Any

import pandas as pd

from labkit import isolated, registry
from labkit.evidence import workers
from labkit.sweep import interpreter, run
from labkit.sweep.case import first_look

INTERPRETER = {"TRITON_INTERPRET": "1"}
COMPILER = {"TRITON_INTERPRET": None}


def check_here(study: str, interpreted: bool) -> pd.DataFrame:
    """Check every variant of the study's tiny cases in a process of its own: interpreted, or on the GPU.

    What the interpreter finds is kept until a source of the lab changes; a GPU is asked anew each time.
    """
    if not interpreted:
        loaded = registry.load(study)
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
            if variant.role == "peer" or (trial := variant.prepare(case, device, 2, 0)).check is None:
                continue
            if trial.poison:
                trial.poison()
            found = first_look(trial, evidence=False)
            rows.append({"case": case.key, "variant": variant.name, "error": found["error"], "ok": found["ok"]})
    return rows
