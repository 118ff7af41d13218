"""What this machine has, and so what will be measured here and what replayed."""

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from labkit import __version__, isolated, paths, registry
from labkit.bench import records
from labkit.evidence import counters
from labkit.workflow import lease, notebooks, recorded

NO_TRITON = "not installed: kernels are neither interpreted nor compiled here, recorded evidence is shown"


@dataclass(frozen=True)
class Finding:
    """One line of the examination. broken: the installation cannot work like this."""

    what: str
    text: str
    broken: bool = False


def examine() -> list[Finding]:
    """Look at everything; takes some seconds, since torch is imported in a process of its own."""
    try:
        seen = isolated.call("labkit.workflow.doctor:versions", timeout=300, on_line=lambda line: None)
    except isolated.IsolatedError as problem:
        seen = {"problem": f"{problem.kind}: {problem.message.strip()}"}
    return [
        Finding("labkit", f"{__version__}, Python {platform.python_version()} ({sys.executable})"),
        *_installation(),
        *_gpus(),
        _torch(seen),
        Finding("Triton", seen.get("triton") or NO_TRITON),
        _ncu(),
        *_ceilings(),
        *_studies(seen),
    ]


def versions() -> dict[str, Any]:
    """Versions of torch and Triton and whether they can measure; called in a process of its own."""
    import torch

    from labkit.bench import machine

    try:
        import triton

        found = triton.__version__
    except ImportError:
        found = ""
    why = machine.why_no_gpu()
    return {"torch": torch.__version__, "cuda": torch.version.cuda or "", "triton": found, "why_not": why}


def _installation() -> Iterator[Finding]:
    for name in notebooks.not_installed():
        yield Finding("install", f"{name} is not installed: repeat `make setup`", broken=True)
    for name in registry.NOTEBOOKS:
        if not notebooks.source_path(name).is_file():
            yield Finding("install", f"{notebooks.source_path(name)} is missing", broken=True)


def _gpus() -> Iterator[Finding]:
    every, mine = lease.installed(), lease.visible()
    for gpu in every:
        hidden = "" if gpu in mine else f" (hidden by {lease.VISIBLE})"
        yield Finding("GPU", f"{gpu.index}: {gpu.name}, driver {lease.driver()}{hidden}")
    if not mine:
        yield Finding("GPU", lease.why_none())


def _torch(seen: dict[str, Any]) -> Finding:
    if "problem" in seen:
        return Finding("torch", f"cannot be used: {seen['problem']}", broken=True)
    return Finding("torch", f"{seen['torch']}, " + (f"CUDA {seen['cuda']}" if seen["cuda"] else "built without CUDA"))


def _ncu() -> Finding:
    without = "hardware counters are not taken, everything else works"
    if not (tool := counters.tool()):
        return Finding("ncu", f"not found: {without}")
    try:
        found = counters.version(tool)
    except counters.NotTaken as problem:
        return Finding("ncu", f"cannot be used ({problem}): {without}")
    return Finding("ncu", f"{found} ({tool}): counts what kernels load, if the driver permits this user to")


def _ceilings() -> Iterator[Finding]:
    try:
        found = list(recorded.all_rows("machine"))
    except records.RecordError as problem:
        yield Finding("ceilings", str(problem), broken=True)
        return
    for one in found:
        where = "measured here" if one.here else "recorded"
        yield Finding("ceilings", f"{one.gpu}: {where}, {max(one.rows['utc'].str[:10], default='no rows')}")
    if not found:
        yield Finding("ceilings", "none known: predictions need `labkit run machine` on a GPU")


def _studies(seen: dict[str, Any]) -> Iterator[Finding]:
    why_not = seen.get("why_not", "torch cannot be used")
    how = f"will be replayed ({why_not})" if why_not else "will be measured here"
    for name, notebook in registry.NOTEBOOKS.items():
        gpus = [path.parent.name for path, _ in paths.data_files(name, runs=False)]
        beside = f"recorded: {', '.join(gpus)}" if gpus else "nothing is recorded"
        yield Finding(notebook, f"{how}; {beside}")
