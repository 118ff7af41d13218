"""Hardware counters of a kernel, taken by Nsight Compute (`ncu`), beside the requests and sectors that are predicted.

One `ncu` process runs this module as a script, which prepares every kernel on the GPU, warms it up and launches it once
more between the profiler's start and stop. ncu writes back and invalidates the caches before each of its passes: what
is counted is a cold launch. The prediction is `coalescing.totals` over the whole grid, which takes a core seconds: all
cores make predictions once ncu has ended. A request is a warp's instruction in which at least one lane is active. Local
memory (spills) and atomics are in neither.
"""

import csv
import glob
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import host, isolated
from labkit.bench import records
from labkit.evidence import coalescing, compiled, workers
from labkit.evidence.ttgir import Unsupported
from labkit.kernels.launch import Launch

KINDS = ("load", "async copy", "descriptor", "store")  # as coalescing.Access names them
DERIVED = ("load", "async copy", "store")
FIGURES = ("requests", "sectors")
EVERY = 256
TOLERANCE = 2.0  # percent of the prediction by which a counted figure may differ and still agree

# What is counted: of several ways, each a sum of metrics, the first that this ncu knows for this GPU. Names as in
# `ncu --query-metrics`; copies that pass the L1 cache by have no l1tex counter on some GPUs, but one of the SM.
_LSU = "l1tex__t_{}_pipe_lsu_mem_global_op_{}"
_SASS = "sm__sass_l1tex_t_{}_pipe_lsu_mem_global_op_{}"
_CP_ASYNC = ("ldgsts_cache_access", "ldgsts_cache_bypass")
METRICS: Mapping[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    **{("load", figure): ((_LSU.format(figure, "ld"),),) for figure in FIGURES},
    **{("store", figure): ((_LSU.format(figure, "st"),),) for figure in FIGURES},
    **{
        ("async copy", figure): (
            tuple(_LSU.format(figure, how) for how in _CP_ASYNC),
            tuple(_SASS.format(figure, how) for how in _CP_ASYNC),
            (_LSU.format(figure, "ldgsts"),),
        )
        for figure in FIGURES
    },
    # The copy engine: instructions, and sectors that arrive in an SM from the L2.
    ("descriptor", "requests"): (("smsp__inst_executed_op_tma_ld",), ("smsp__sass_inst_executed_op_tma_ld",)),
    ("descriptor", "sectors"): (("l1tex__m_xbar2l1tex_read_sectors_mem_global_op_tma_ld",),),
    ("memory", "dram_read_bytes"): (("dram__bytes_read",),),
    ("memory", "l2_read_sectors"): (("lts__t_sectors_op_read",),),
}
FORMATS = {f"{figure} {what}": "{:,.0f}" for figure in FIGURES for what in ("counted", "predicted")} | {
    f"{figure} off %": "{:+.2f}" for figure in FIGURES
}
_LINE = {"kind", *FORMATS, "agree", "why"}  # the columns of a table beside what names the kernel
_SCALES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")  # where it is when not on PATH


class NotTaken(RuntimeError):
    """The counters could not be taken; the message is one line that says why."""


# ---- ncu


def tool() -> str:
    """Path of ncu: on PATH, else where NVIDIA's packages put it; empty if there is none."""
    return shutil.which("ncu") or max((path for place in _PLACES for path in glob.glob(place)), default="")


def version(ncu: str) -> str:
    """Version of an ncu, as in "2025.1.1.0". NotTaken if it does not run."""
    found = re.search(r"Version (\S+)", _run([ncu, "--version"], os.environ, 60)[1])
    if not found:
        raise NotTaken(f"{ncu} does not say its version")
    return found[1]


def known_metrics(listing: str) -> set[str]:
    """The names in what `ncu --query-metrics` prints: the first word of each line that begins with one."""
    return set(re.findall(r"^([a-z0-9]+__\w+)", listing, re.MULTILINE))


def choose(known: set[str]) -> dict[tuple[str, str], tuple[str, ...]]:
    """For each figure of `METRICS` the first way of counting it of which every metric is known; none: left out."""
    ways = {figure: [way for way in ways if known.issuperset(way)] for figure, ways in METRICS.items()}
    return {figure: found[0] for figure, found in ways.items() if found}


def parse(log: str) -> list[tuple[str, dict[str, float | None]]]:
    """Kernel name and metrics (without `.sum`, in base units) of every launch in what `ncu --csv --page raw` writes.

    Lines before the table are passed over; a value that is not a number ("n/a") is None. NotTaken if there is no table.
    """
    lines = log.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    table = list(csv.reader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))))
    if len(table) < 3 or "Kernel Name" not in table[0]:
        raise NotTaken(f"ncu profiled no kernel{_last(lines)}")
    head, units, *rows = table
    place = head.index("Kernel Name")
    metrics = [(at, name.removesuffix(".sum")) for at, name in enumerate(head) if "__" in name]
    return [(row[place].partition("(")[0], {n: _number(row[at], units[at]) for at, n in metrics}) for row in rows]


def _number(text: str, unit: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    prefix = unit[:-4] if unit.endswith("byte") else ""
    return value * _SCALES[prefix] if math.isfinite(value) else None


def _last(lines: Sequence[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1][:300]}" if said else ""


# ---- counting


def count(
    sources: Sequence[compiled.Source], env: Mapping[str, str | None], idle: Callable[[], Any] = lambda: None
) -> list[dict[str, Any]]:
    """Counters and prediction of the kernels of some sources, each of which returns a Launch on the GPU; in order.

    env: changes to the environment (the leased GPU); None removes a variable. idle: is called once ncu has ended, and
    before anything is predicted: others may use the GPU then.
    Each is {"counted": {kind: {"requests", "sectors"}}, "predicted": the same, "why": {kind: what the prediction leaves
    out}, "dram_read_bytes", "l2_read_sectors", "absent": figures without a counter here, "ncu": version}; a figure that
    ncu did not get is None; or {"problem": why} of a kernel that could not be launched.
    NotTaken if ncu is missing, may not read the counters, fails, or counted other launches than those asked for.
    """
    ncu = tool()
    if not ncu:
        raise NotTaken("ncu (Nsight Compute) is not installed here")
    merged = isolated.environment({**env, "TRITON_INTERPRET": None, "LC_ALL": "C"})
    found = version(ncu)
    _, listing = _run([ncu, "--query-metrics"], merged, 120)
    if not (known := known_metrics(listing)):
        raise NotTaken(f"ncu lists no metrics of this GPU{_last(listing.splitlines())}")
    chosen = choose(known)
    answers, log = _profile(ncu, chosen, sources, merged)
    idle()
    launched = {place: answer["kernel"] for place, answer in enumerate(answers) if "problem" not in answer}
    if not launched:
        return answers
    rows = _matched(parse(log), list(launched.values()))
    told_of = predict_many([sources[place] for place in launched], env)
    absent = [" ".join(figure) for figure in METRICS if figure not in chosen]
    for place, row, told in zip(launched, rows, told_of, strict=True):
        answers[place] = told if "problem" in told else _figures(row, chosen) | told | {"absent": absent, "ncu": found}
    return answers


def _profile(
    ncu: str, chosen: Mapping[Any, Sequence[str]], sources: Sequence[compiled.Source], env: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """What the script answered for each source, and what ncu wrote."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer, log = (Path(folder) / name for name in ("request.json", "answer.json", "ncu.csv"))
        request.write_text(json.dumps({"sources": [list(one) for one in sources], "path": sys.path}))
        metrics = ",".join(f"{name}.sum" for name in dict.fromkeys(name for way in chosen.values() for name in way))
        command = [
            *(ncu, "--profile-from-start", "off", "--target-processes", "application-only"),
            *("--clock-control", "none", "--cache-control", "all", "--print-units", "base"),
            *("--csv", "--page", "raw", "--log-file", str(log), "--metrics", metrics),
            *(sys.executable, "-P", "-m", "labkit.evidence.counters", str(request), str(answer)),
        ]
        status, said = _run(command, env, 120 + 20 * len(sources))
        written = log.read_text(errors="replace") if log.exists() else ""
        if problem := _error(written + said):
            raise NotTaken(problem)
        if not answer.exists():
            raise NotTaken(f"ncu ended with status {status}{_last((written + said).splitlines())}")
        return json.loads(answer.read_text()), written


def _error(text: str) -> str:
    """The first error that ncu reports, with what the script said if it is the script's; empty if there is none."""
    if "ERR_NVGPUCTRPERM" in text:
        return "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM; the driver's setting)"
    if not (found := re.search(r"^==ERROR== (.*)", text, re.MULTILINE)):
        return ""
    said = [line for line in text.splitlines() if line.strip() and not line.startswith(("==", '"'))]
    return f"ncu: {found[1].strip()[:300]}{_last(said)}"


def _run(command: Sequence[str], env: Mapping[str, str], timeout: float) -> tuple[int, str]:
    """Exit status and output; what was started is ended in any case. NotTaken if it cannot run or takes too long."""
    try:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=dict(env),
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends ncu and what it runs
        )
    except OSError as problem:
        raise NotTaken(f"{command[0]} cannot be run: {problem}") from None
    try:
        text, _ = child.communicate(timeout=timeout)
        return child.returncode, text
    except subprocess.TimeoutExpired:
        raise NotTaken(f"{Path(command[0]).name} did not end within {timeout:g} s") from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _matched(rows: Sequence[tuple[str, dict]], kernels: Sequence[str]) -> list[dict[str, float | None]]:
    """The metrics of each launch, once rows and kernels are seen to be the same launches."""
    if [name for name, _ in rows] != list(kernels):
        counted = ", ".join(name for name, _ in rows)
        raise NotTaken(f"ncu counted {len(rows)} launches ({counted}), expected {len(kernels)} ({', '.join(kernels)})")
    return [metrics for _, metrics in rows]


def _figures(metrics: Mapping[str, float | None], chosen: Mapping) -> dict[str, Any]:
    def total(kind: str, figure: str) -> int | None:
        values = [metrics.get(name) for name in chosen.get((kind, figure), ())]
        return None if not values or None in values else round(sum(values))

    counted = {kind: {figure: total(kind, figure) for figure in FIGURES} for kind in KINDS}
    for figure, copies in counted["async copy"].items():  # ncu counts them among the loads too (seen on an H100)
        if copies and counted["load"][figure] is not None:
            counted["load"][figure] = max(0, counted["load"][figure] - copies)
    memory = {name: total("memory", name) for name in ("dram_read_bytes", "l2_read_sectors")}
    return {"counted": counted} | memory


def _launch_once(source: compiled.Source) -> dict[str, Any]:
    """In the process that ncu watches: the kernel's name; the one launch that is counted."""
    import torch

    try:
        launch = compiled.launch_of(source)
        name = compiled.build(launch).metadata.name
        launch()
        torch.cuda.synchronize()
    except Exception as problem:  # the other kernels are counted all the same
        return {"problem": records.first_line(problem)}
    runtime = torch.cuda.cudart()
    runtime.cudaProfilerStart()
    launch()
    torch.cuda.synchronize()
    runtime.cudaProfilerStop()
    return {"kernel": name}


# ---- the prediction

Totals = dict[str, dict[str, float]]


def predict_many(
    sources: Sequence[compiled.Source], env: Mapping[str, str | None], capability: int | None = None
) -> list[dict[str, Any]]:
    """`predict` of the launches of some sources, in order, on all cores: each is predicted and why, or problem.

    env: as in `count`. capability: as in `coalescing.totals`. NotTaken if a process dies.
    """
    count, env = min(host.cores(), len(sources)), {**env, "TRITON_INTERPRET": None}
    try:
        parts = workers.share(f"{__name__}:predict_free", sources, capability, count=count, env=env)
    except isolated.IsolatedError as problem:
        raise NotTaken(f"predictions: {problem.kind}: {problem.message}") from None
    found = {place: told for part in parts for place, told in part}
    return [found[place] for place in range(len(sources))]


def predict_free(
    sources: Sequence[compiled.Source], capability: int | None, taken: str
) -> list[tuple[int, dict[str, Any]]]:
    """In a worker: place and prediction of those sources that no other worker has taken, as `workers.free` has it."""
    return [(place, _told(source, capability)) for place, source in workers.free(list(enumerate(sources)), taken)]


def _told(source: compiled.Source, capability: int | None) -> dict[str, Any]:
    try:
        predicted, why = predict(compiled.launch_of(source, capability), capability)
    except Exception as problem:  # the other kernels are counted all the same
        return {"problem": records.first_line(problem)}
    return {"predicted": predicted, "why": why}


def predict(launch: Launch, capability: int | None = None) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """Requests and sectors of a whole launch by kind of access, and by kind what is not derived or only assumed.

    capability: as in `coalescing.totals`. Every program is taken to be like the first, but for the last index of
    each axis of the grid, where a shape ends inside a tile; if one in the middle differs, all of up to `EVERY` are
    evaluated.
    """
    try:
        return _over_grid(launch, capability)
    except (Unsupported, IndexError) as problem:
        return {}, dict.fromkeys(KINDS, f"not derived: {problem}")


def _over_grid(launch: Launch, capability: int | None) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    grid = (*launch.grid, 1, 1)[:3]

    @cache
    def accesses(program: tuple[int, ...]) -> list[coalescing.Total]:
        return coalescing.totals(launch, capability, program)

    @cache
    def totals(program: tuple[int, ...]) -> Totals:
        return _summed(accesses(program))

    first, middle, last = (totals(one) for one in ((0, 0, 0), _at(grid, 0.5), _at(grid, 1)))
    alike = first == middle
    # Which programs of each axis are evaluated, (index, how many are like it): the first, or it and the last, or all.
    axes = [[(0, size - 1), (size - 1, 1)] if size > 1 else [(0, 1)] for size in grid]
    if alike and first == last:
        axes = [[(0, size)] for size in grid]
    elif not alike and math.prod(grid) <= EVERY:
        axes, alike = [[(index, 1) for index in range(size)] for size in grid], True
    summed: Totals = {kind: dict.fromkeys(FIGURES, 0.0) for kind in DERIVED}
    for corner in product(*axes):
        part, weight = totals(tuple(index for index, _ in corner)), math.prod(count for _, count in corner)
        for kind, figure in product(DERIVED, FIGURES):
            summed[kind][figure] += weight * part[kind][figure]
    why = _why(accesses((0, 0, 0)), alike)
    known = {kind: figures for kind, figures in summed.items() if figures["requests"] > 0}  # neither none nor NaN
    return {kind: {name: round(value) for name, value in figures.items()} for kind, figures in known.items()}, why


def _at(grid: Sequence[int], part: float) -> tuple[int, ...]:
    """The program that is a part of the way from the first to the last of each axis."""
    return tuple(int(part * (size - 1)) for size in grid)


def _summed(accesses: Iterable[coalescing.Total]) -> Totals:
    """Of one program; NaN where one of its accesses is not known."""
    found: Totals = {kind: dict.fromkeys(FIGURES, 0.0) for kind in DERIVED}
    for one, figure in product(accesses, FIGURES):
        if one.kind in found:
            found[one.kind][figure] += getattr(one, figure)
    return found


def _why(accesses: Iterable[coalescing.Total], alike: bool) -> dict[str, str]:
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for one in accesses:
        if one.kind in found and one.note:
            found[one.kind].append(one.note)
    for kind in DERIVED if not alike else ():
        found[kind].append("programs in the middle of the grid differ, but are taken to be like the first")
    return {kind: "; ".join(dict.fromkeys(texts)) for kind, texts in found.items() if texts}


# ---- beside each other


def compare(
    counted: Mapping[str, Mapping[str, float | None]],
    predicted: Mapping[str, Mapping[str, float]],
    why: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """One line a kind of access that was counted or predicted.

    Keys: kind; requests and sectors, each `counted`, `predicted` and `off %` (of the prediction; NaN where there is
    none of the two); agree (both within `TOLERANCE`); why (not), as far as it is known.
    """
    lines = []
    for kind in KINDS:
        has, said = counted.get(kind) or {}, predicted.get(kind) or {}
        if not said and not any(has.values()):
            continue
        line: dict[str, Any] = {"kind": kind}
        for figure in FIGURES:
            number, expected = has.get(figure), said.get(figure)
            number, expected = (math.nan if value is None else value for value in (number, expected))
            off = 100 * (number / expected - 1) if expected else math.nan
            line |= {f"{figure} counted": number, f"{figure} predicted": expected, f"{figure} off %": off}
        agree = all(abs(line[f"{figure} off %"]) <= TOLERANCE for figure in FIGURES)  # NaN never agrees
        lines.append(line | {"agree": agree, "why": "" if agree else _reason(kind, line, bool(said), why or {})})
    return lines


def _reason(kind: str, line: Mapping[str, Any], predicted: bool, why: Mapping[str, str]) -> str:
    missing = [figure for figure in FIGURES if math.isnan(line[f"{figure} counted"])]
    if missing:
        return f"ncu has no counter of {' and '.join(missing)} here"
    return why.get(kind) or ("not explained" if predicted else "the kernel's own code has no such access")


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """`compare` of all rows that have counters: the parameters in which their cases differ, the variant, its lines."""
    taken = rows[rows["counters"] != "{}"]
    cases = pd.DataFrame([json.loads(text) for text in taken["case"]], index=taken.index)
    varying = [name for name in cases if cases[name].nunique(dropna=False) > 1]
    found = []
    for index, row in taken.iterrows():
        kept = json.loads(row["counters"])
        head = {name: cases.loc[index, name] for name in varying} | {"variant": row["variant"]}
        found += [head | line for line in compare(kept["counted"], kept["predicted"], kept["why"])]
    return pd.DataFrame(found)


def in_short(table: pd.DataFrame) -> str:
    """One sentence on what `table` made."""
    kernels = table.groupby([name for name in table if name not in _LINE], dropna=False)["agree"].all()
    return f"In {kernels.sum()} of {len(kernels)} kernels every figure agrees within {TOLERANCE:g} %."


def _main(request: str, answer: str) -> None:
    asked = json.loads(Path(request).read_text())
    sys.path.extend(folder for folder in asked["path"] if folder not in sys.path)
    Path(answer).write_text(json.dumps([_launch_once(source) for source in asked["sources"]]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
