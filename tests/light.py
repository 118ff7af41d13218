"""Stands in for papermill and for the GPU in the toy lab: notebooks are executed by `exec`, cases take milliseconds.

Everything else is the lab's: processes, leases, journals, files of rows. Used where many jobs run or are killed.
"""

import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import labkit.studies
from labkit import isolated, paths, registry
from labkit.bench import machine, records
from labkit.sweep import case as case_runner
from labkit.sweep import run as sweep
from labkit.workflow import lease, notebooks

CASE_S = 0.01
LOG = "TOY_LOG"  # a file that gets a line for each case: GPU, when it began, when it ended


def enter() -> None:
    """Have this process execute notebooks without papermill, and write no pages.

    TOY_LIGHT=pages: with pages; TOY_LIGHT=inline: notebooks are not executed, GPUs are only held.
    """
    real = isolated.call

    def call(target: str, *args: Any, **options: Any) -> Any:
        return real(target.replace("labkit.workflow.notebooks:execute", "light:execute"), *args, **options)

    def hold(target: str, notebook: str, out: str, values: Any, *, env: Mapping[str, str], **options: Any) -> None:
        assert target == "labkit.workflow.notebooks:execute"
        begin = time.monotonic_ns()
        time.sleep(CASE_S)
        log(env["LABKIT_LEASED_GPU"], begin)
        shutil.copy(notebook, out)

    how = os.environ["TOY_LIGHT"]
    notebooks.isolated = type("Calls", (), {**vars(isolated), "call": staticmethod(hold if how == "inline" else call)})
    if how != "pages":  # which take longer than all else
        nothing = {"write": lambda *args: [], "outcomes": lambda results: []}
        sys.modules["labkit.workflow.reports"] = SimpleNamespace(**nothing, shown_path=str)


def log(gpu: str, begin: int) -> None:
    """Note that a GPU was used from `begin` (monotonic, ns) until now."""
    with open(os.environ[LOG], "a") as file:
        file.write(f"{gpu} {begin} {time.monotonic_ns()}\n")


def execute(notebook: str, out: str, values: Mapping[str, Any]) -> None:
    """What papermill does, as far as the lab reads it; called in a process of its own."""
    book = json.loads(Path(notebook).read_text())
    book["metadata"]["papermill"] = {"parameters": dict(values)}
    scope: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(book["cells"], 1):
        if cell["cell_type"] == "code":
            print(f"Executing Cell {number}---", flush=True)
            cell["execution_count"] = number
            try:
                exec("".join(cell["source"]), scope)
            except Exception as problem:
                error = {"ename": type(problem).__name__, "evalue": str(problem), "traceback": []}
                cell["outputs"] = [{"output_type": "error", **error}]
                Path(out).write_text(json.dumps(book))
                raise
            scope |= values if "parameters" in cell["metadata"].get("tags", ()) else {}
        Path(out).write_text(json.dumps(book))


def measure(name: str, parameters: Mapping[str, Any], processes: int = 2, samples: int = 2) -> None:
    """Measure a toy study as `labkit.sweep.run` does, with cases that take no time; for a cell of its notebook."""
    from toy_lab import MACHINE, NOTEBOOKS, row

    labkit.studies.__path__.append(str(paths.ROOT / "toys"))
    registry.NOTEBOOKS = dict(NOTEBOOKS)
    study, made = registry.load(name), machine.Machine(**MACHINE)
    versions = {key: row("", "", "", "", "", "", [1])[key] for key in ("gpu", "driver", "torch", "triton")}
    machine.provenance = lambda seed: versions
    isolated.call = lambda target, *args, env, on_line, started: sweep.measure_process(*args)
    isolated.Started = lambda *args, env: SimpleNamespace(ready=lambda: True, close=lambda: None)
    machine.CudaDevice = sweep.ceilings = lambda: None

    def timed(study: Any, case: Any, index: int, *rest: Any) -> list[dict[str, Any]]:
        from labkit.bench.sha import kernel_sha

        begin = time.monotonic_ns()
        time.sleep(CASE_S)
        log(gpu.id, begin)
        ns = [1000 * case["n"] + 10 * index + sample for sample in range(samples)]
        variants = sweep.with_control(study, case)
        return [row(name, case.op, case.key, v.name, v.role, kernel_sha(v.source), ns) for v in variants]

    case_runner.measure = timed
    path = paths.RUNS / made.slug / f"{name}.parquet"
    records.write_atomic(path.with_name("machine.json"), made.to_json())
    journal = records.Journal(path.with_suffix(".journal.jsonl"))
    with lease.gpu_lease(stop=lease.Orphaned()) as gpu:  # as a page does whose run has not leased it
        print(f"{lease.TAKEN}{gpu.id}")
        sweep._Sweep(study, parameters, processes, {}, print, path, journal).measure(study.cases(parameters))
    print(lease.FREED)


def spans(file: Path) -> dict[str, list[tuple[int, int]]]:
    """GPU -> when cases were measured on it, in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for gpu, begin, end in map(str.split, file.read_text().splitlines()):
        found.setdefault(gpu, []).append((int(begin), int(end)))
    return {gpu: sorted(times) for gpu, times in found.items()}


def overlaps(times: Sequence[tuple[int, int]]) -> bool:
    """Whether two of these spans were at the same time."""
    return any(begin < end for (_, end), (begin, _) in itertools.pairwise(times))
