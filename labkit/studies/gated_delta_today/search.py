"""The fastest of several ways to launch a kernel, on the GPU at hand, as an autotuner would find it.

Every way is captured with all sets of buffers, so that L2 is cold, and replayed a few times. Without a GPU there is
nothing to time: the first way is taken, and of tensors without memory, with which kernels are compiled ahead, all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from labkit.kernels.gated_delta.buffered import BufferedChoice
from labkit.kernels.gated_delta.in_turn import TurnsChoice
from labkit.kernels.gated_delta.recurrent import StepChoice

Call = Callable[[], Any]
Ways = Mapping[str, Callable[[], Sequence[Call]]]  # name -> what makes its calls, one a set of buffers
MOST_SETS = 32
REPLAYS = 5

LENGTHS = (8, 12, 24, 32)  # beside the one that choices are compared with
AT_ONCE = [StepChoice(*one) for one in ((64, 1, 4), (32, 1, 2), (64, 2, 4), (128, 1, 8), (128, 1, 4))]  # of a verify
LAUNCHES = {  # of SGLang's decode; the first is its own choice
    "its own choice": {},
    **{f"BV={v}, {w} warps": {"block_v": v, "num_warps": w} for v, w in ((64, 2), (64, 4), (32, 1), (128, 4))},
}
SEGMENTS = (2, 3, 4, 5, 6, 8, 11, 16, 32)


def choices(wide: bool, v_first: bool) -> list[BufferedChoice]:
    """Of a decode on a ring: all that its rule knows, and what was near them.

    wide: whether states are fp32; others can go through matrix instructions.
    """
    few = [BufferedChoice(StepChoice(tile, 4, 1)) for tile in (16, 32)]
    many = [(StepChoice(32, 4, 2), False, 168), (StepChoice(32, 4, 2), True, 128), (StepChoice(64, 4, 2), False, 0)]
    found = few + [BufferedChoice(step, ahead, False, registers) for step, ahead, registers in many]
    if wide or not v_first:
        return found
    return found + [BufferedChoice(StepChoice(tile, 1, warps), True, True, 128) for tile, warps in ((64, 4), (32, 2))]


def apart() -> list[BufferedChoice]:
    """Of a decode whose states are written apart."""
    return [BufferedChoice(StepChoice(*one), ahead=True) for one in ((32, 4, 2), (64, 4, 4), (32, 2, 2))]


def direct(wide: bool) -> list[BufferedChoice]:
    """Of a decode with little between a state and its result. wide: whether states are fp32."""
    matrix = [((64, 1, 4), 80), ((64, 1, 4), 96), ((32, 1, 2), 96)]
    sums = [((16, 2, 1), 128), ((32, 4, 2), 128), ((16, 4, 1), 128)]
    ways = [(True, False, sums)] if wide else [(True, True, matrix), (False, True, matrix)]
    return [
        BufferedChoice(StepChoice(*step), ahead, instructions, registers)
        for ahead, instructions, known in ways
        for step, registers in known
    ]


def in_turn(heads: int) -> list[TurnsChoice]:
    """Of a verify that takes states in turn. heads: value heads in all."""
    ways = [((64, 1, 4), 8, 3), ((64, 1, 4), 16, 3), ((64, 1, 4), 8, 2), ((64, 1, 4), 32, 3), ((64, 1, 4), 4, 3)]
    ways += [((128, 1, 4), 8, 2), ((128, 1, 8), 1, 3)]
    return [TurnsChoice(StepChoice(*step), min(few, heads), stages) for step, few, stages in ways]


def fastest(ways: Ways, device: torch.device) -> tuple[str, Sequence[Call]]:
    """Name and calls of the fastest; those that cannot be launched are passed over, unless none can."""
    if device.type == "meta":
        made = list(_made(ways))
        return next(iter(ways)), [lambda: [calls[0]() for calls in made]]
    if device.type != "cuda":
        first = next(iter(ways))
        return first, ways[first]()
    found: dict[str, float] = {}
    for name, make in ways.items():
        with suppress(Exception):
            found[name] = _us(make()[:MOST_SETS])
    best = min(found, key=found.__getitem__, default=next(iter(ways)))
    return best, ways[best]()


def _made(ways: Ways) -> Iterator[Sequence[Call]]:
    """The calls of every way that a case can take."""
    for make in ways.values():
        with suppress(ValueError):
            yield make()


def _us(calls: Sequence[Call]) -> float:
    """µs a call, cold: the median of a few replays of all of them."""
    for call in calls:  # compiled and loaded before they are captured
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[REPLAYS // 2]
