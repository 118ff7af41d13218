"""When, and on which multiprocessor, each program of a launch ran: by clocks around a kernel that stays as it is.

`clocked` makes a kernel whose programs write down the time, call the kernel that is there, and write it down again. The
compiler puts the called kernel in its place, so that what runs between the clocks is the same source. Nothing of the
kernel changes, and so neither does the hash by which recorded rows know it.
"""

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pandas as pd
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from labkit.kernels.launch import Launch
from labkit.sources.loading import run_text

MOMENTS = ("sm", "begin", "released", "end")  # the columns of a clock
REPLAYS, TIMED = 3, 9  # of a graph: before its clocks are read; whose median is its time
_NAMES = {"tl": tl, "triton": triton, "now": cuda.globaltimer, "smid": cuda.smid, "wait": cuda.gdc_wait}

_CLOCKED = """
@triton.jit(do_not_specialize={unspecialised})
def {name}_clocked(clock, {parameters}):
    program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    at = clock + program.to(tl.int64) * {moments}
    tl.store(at + 1, now())
    tl.store(at, smid())
    {wait}
    tl.store(at + 2, now())
    kernel({names})
    tl.debug_barrier()
    tl.store(at + 3, now())
"""


def clocked(launch: Launch) -> tuple[Launch, Tensor]:
    """The launch with a clock in every program, and what the clocks write: int64 [programs, MOMENTS], zeros until then.

    sm: number of the multiprocessor; begin, end: ns, of one clock for the whole GPU; released: where the kernel waits
    for the launches before it (`wait_for_inputs`), when that has ended; else the begin.
    ValueError for what is no kernel of Triton's, or one that has a parameter `clock`.
    """
    kernel = launch.kernel
    if not isinstance(kernel, JITFunction | InterpretedFunction):
        raise ValueError(f"kernel is a {type(kernel).__name__}; allowed: a function decorated by triton.jit alone")
    if "clock" in kernel.arg_names:
        raise ValueError(f"{kernel.fn.__name__} has a parameter 'clock'; allowed: any other name")
    device = next(one.device for one in launch.args.values() if isinstance(one, Tensor))
    clock = torch.zeros((math.prod(launch.grid), len(MOMENTS)), dtype=torch.int64, device=device)
    dependent = bool(launch.options.get("launch_pdl"))
    made = _clocked(kernel, dependent and _waits_first(kernel))
    return replace(launch, kernel=made, args={"clock": clock, **launch.args}), clock


@cache
def _clocked(kernel: Any, waits: bool) -> Any:
    """A kernel with clocks around another. waits: begin by waiting for the launches before, as the other one does."""
    name, parameters = kernel.fn.__name__, inspect.signature(kernel.fn).parameters.values()
    text = _CLOCKED.format(
        name=name,
        names=", ".join(one.name for one in parameters),
        parameters=", ".join(one.name + ": tl.constexpr" * ("constexpr" in str(one.annotation)) for one in parameters),
        unspecialised=[one.name for one in getattr(kernel, "params", ()) if one.do_not_specialize],
        wait="wait()" if waits else "",
        moments=len(MOMENTS),
    )
    filename = f"<{kernel.fn.__module__}.{name} clocked{', waiting' if waits else ''}>"
    names = {**_NAMES, "kernel": kernel, "__name__": __name__}
    run_text(text, filename, names)
    return names[f"{name}_clocked"]


def _waits_first(kernel: Any) -> bool:
    """Whether the kernel's first statement waits for the launches before it: waiting earlier then changes nothing."""
    [function] = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
    first = next(
        one for one in function.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
    )
    return ast.unparse(first).startswith("wait_for_inputs(")


@dataclass(frozen=True)
class Timeline:
    """What one thing looked like over time.

    what:     its name. bars: a row for each piece of work of a program: launch (their order), program, sm, stage (what
              it does), begin_ns, released_ns (it no longer waits), end_ns, from the first begin.
    plain_ns, clocked_ns: time of all that a graph replays, without the clocks and with them.
    """

    what: str
    bars: pd.DataFrame
    plain_ns: float
    clocked_ns: float


def of_launches(what: str, launches: Mapping[str, Launch]) -> Timeline:
    """The timeline of launches that run one after the other; what each does is its name. They run here."""
    made = {name: clocked(launch) for name, launch in launches.items()}
    plain = replayed(list(launches.values()))
    took = replayed([launch for launch, _ in made.values()])
    bars = [_bars(clock).assign(launch=i, stage=name) for i, (name, (_, clock)) in enumerate(made.items())]
    return Timeline(what, from_first(pd.concat(bars, ignore_index=True)), plain, took)


def _bars(clock: Tensor) -> pd.DataFrame:
    sm, begin, released, end = clock.cpu().numpy().T
    return pd.DataFrame(
        {"program": range(len(clock)), "sm": sm, "begin_ns": begin, "released_ns": released, "end_ns": end}
    )


def from_first(bars: pd.DataFrame) -> pd.DataFrame:
    """Bars with their times from the first begin."""
    times = [name for name in bars if name.endswith("_ns")]
    return bars.assign(**{name: bars[name] - bars["begin_ns"].min() for name in times})


def replayed(calls: Sequence[Callable[[], Any]]) -> float:
    """Run calls as one CUDA graph, some times over, without the host's pace; returns the median time of a replay, ns.

    Without a GPU they run once, one after the other, and no time is told: NaN.
    """
    if not torch.cuda.is_available():
        for call in calls:
            call()
        return float("nan")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    with torch.cuda.stream(stream):
        for _ in range(REPLAYS + TIMED):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            stream.synchronize()
            times.append(1e6 * start.elapsed_time(end))
    return sorted(times[REPLAYS:])[TIMED // 2]
