"""How many instructions a launch executes, from its SASS: the code's loops, and how much work goes through them.

SASS holds each instruction once; how often a loop is gone through depends on the launch. That is derived from work: a
kernel's matrix instructions together do just the launch's FLOPs, padding included, and its loads bring just its bytes,
so that either tells how often the loops that hold them are gone through, however far the compiler unrolled them.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@!?\w+\s+)?([A-Z][\w.:]*)\s*(.*)", re.MULTILINE)
_TARGET = re.compile(r"0x([0-9a-f]+)")
_WIDTH = re.compile(r"\b[US]?(8|16|64|128|256)\b")
_LOADS = ("LDG", "LD", "LDGSTS")
_WARP = 32

_WGMMA = re.compile(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)")
_WGMMA_WARPS = 4  # that execute one together
_MMA = re.compile(r"[HIQ]MMA\.(?:.*?\.)?(8816|1688|16816|16832|16864)\b")
_MMA_FLOPS = {"8816": 2048, "1688": 2048, "16816": 4096, "16832": 8192, "16864": 16384}  # of m8n8k16 … m16n8k64


class Counts(NamedTuple):
    """Of warps.

    instructions: executed. loads: of global memory; load_bytes: what a lane gets by them. mma: FLOPs of matrix
    instructions that a warp executes alone (mma.sync); wgmma: of those of four warps. wgmma_shared: the latter, counted
    as so many more as shared memory makes them last longer: at 128 bytes a cycle their tiles of 64 and of N rows arrive
    in 16 + N/4 cycles, where the arithmetic takes N/2.
    """

    instructions: float = 0.0
    loads: float = 0.0
    load_bytes: float = 0.0
    mma: float = 0.0
    wgmma: float = 0.0
    wgmma_shared: float = 0.0

    def plus(self, other: "Counts", times: float = 1.0) -> "Counts":
        """Both together, the other so many times."""
        return Counts(*(a + times * b for a, b in zip(self, other, strict=True)))

    @property
    def flops(self) -> float:
        """Of all matrix instructions."""
        return self.mma + self.wgmma


@dataclass(frozen=True)
class Code:
    """A kernel's SASS. straight: what is in no loop; loops: of each loop what is in it and in none inside it."""

    straight: Counts
    loops: tuple[Counts, ...]


def parse(listing: str) -> Code:
    """The code of what `cuobjdump -sass` prints of one kernel. A loop is from a branch's target up to that branch."""
    found = [(int(place, 16), name, rest) for place, name, rest in _INSTRUCTION.findall(listing) if name != "NOP"]
    ends: dict[int, int] = {}
    for place, name, rest in found:
        target = _TARGET.search(rest) if name.startswith("BRA") else None
        if target and (start := int(target[1], 16)) < place:
            ends[start] = max(place, ends.get(start, 0))
    loops = sorted(ends.items())
    names: dict[int, Counter[str]] = {number: Counter() for number in range(-1, len(loops))}
    for place, name, _ in found:
        around = [(end - start, number) for number, (start, end) in enumerate(loops) if start <= place <= end]
        names[min(around)[1] if around else -1][name] += 1
    return Code(_counted(names[-1]), tuple(_counted(names[number]) for number in range(len(loops))))


def _counted(names: Mapping[str, int]) -> Counts:
    total = Counts()
    for name, count in names.items():
        total = total.plus(_one(name), count)
    return total


def _one(name: str) -> Counts:
    """Of one instruction, by its mnemonic with modifiers."""
    operation, _, modifiers = name.partition(".")
    if sizes := _WGMMA.match(name):
        m, n, k = map(int, sizes.groups())
        flops = 2 * m * n * k / _WGMMA_WARPS
        return Counts(1, wgmma=flops, wgmma_shared=flops * max(1.0, (16 + n / 4) / (n / 2)))
    if shape := _MMA.match(name):
        return Counts(1, mma=_MMA_FLOPS[shape[1]])
    if operation in _LOADS:
        width = _WIDTH.search(modifiers)
        return Counts(1, 1, int(width[1]) // 8 if width else 4)
    return Counts(1)


class Executed(NamedTuple):
    """counts: of all warps of a launch. passes: of one warp through the loops that do its work."""

    counts: Counts
    passes: float


def executed(
    code: Code, warps: float, flops: float = 0.0, load_bytes: float = 0.0, passes: float = 1.0, outer: float = 1.0
) -> Executed:
    """What the warps of a launch execute.

    flops: of the launch's matrix instructions, padding included; the loops with such are gone through as often as that
    takes, the others `outer` times by each warp. If there are none, load_bytes: what the launch's loads bring, and the
    loops with loads. With neither, each warp goes through all loops `passes` times.
    """
    straight = Counts().plus(code.straight, warps)
    if flops and any(loop.flops for loop in code.loops):
        return _by_work(code, straight, warps, flops, attrgetter("flops"), outer)
    if load_bytes and any(loop.load_bytes for loop in code.loops):
        return _by_work(code, straight, warps, load_bytes / _WARP, attrgetter("load_bytes"), 0.0)
    passes = 0.0 if load_bytes else passes  # what it brings is all in straight code
    return Executed(straight.plus(_sum(code.loops), warps * passes), passes)


def _by_work(
    code: Code, straight: Counts, warps: float, wanted: float, of: Callable[[Counts], float], others: float
) -> Executed:
    """The loops that have some of `of` are gone through until all warps together have had as much as is wanted."""
    working = _sum(loop for loop in code.loops if of(loop))
    times = max(wanted - of(straight), 0.0) / of(working)
    rest = _sum(loop for loop in code.loops if not of(loop))
    return Executed(straight.plus(rest, warps * others).plus(working, times), times / max(warps, 1))


def _sum(some: Iterable[Counts]) -> Counts:
    total = Counts()
    for one in some:
        total = total.plus(one)
    return total
