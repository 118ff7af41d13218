"""What a function of the reader's own is held to: its results are those of its timed calls, for inputs just given.

A function that is timed may, by mistake or not, leave out what it is timed for. Each of these is caught and named:

| what it does                            | how it is caught                                                       |
|-----------------------------------------|------------------------------------------------------------------------|
| keeps results, or makes them before     | inputs get other values before every block, in places drawn at random  |
| is right only when it is checked        | what is checked is what a timed block left, of a buffer set at random  |
| works on another stream, or in a thread | outputs are NaN when the timed calls begin, and copied when they end,  |
|                                         | in the order of their stream; a CUDA graph holds only what it captured |
| makes an output a view of other memory  | every tensor must be where it was, after every call                    |
| changes what it is given to read        | checksums, before and after a block                                    |
| replaces a clock, a stream, or a check  | the names of `_owners` are compared, and put back, after every call    |

Not protected against: code that looks for the lab's frames and objects or writes over its memory; threads that replace
a clock and put it back inside a block; names that are not watched, such as numpy's; changes below Python, as of a CUDA
library; calls that do the work of other buffer sets; kernels that see by samples of their inputs that they are as they
were: of weights a single one is changed, on which samples come by luck alone, but of a state that of some sequences.
"""

import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from triton import testing

from labkit.bench.spec import Arguments
from labkit.sweep.case import beyond
from labkit.sweep.trial import Random, left

LATE_S = 1.0  # so long after the timed calls have ended results are still waited for, to say that they come late
WORDS = 1024  # of 8 bytes, that a checksum is of
NOT_WRITTEN = "an output was not written by its timed calls: nothing on the stream that is timed writes it"
LATE = "its results came after its timed calls had ended (work on another stream, or in a thread)"
CACHED = "its timed calls left the results of earlier inputs (cached, or made before)"
WRONG = "in its timed calls, after its inputs had changed, "
_CHANCE = random.SystemRandom()  # what a function cannot know before


class NotAllowed(RuntimeError):
    """The function did what no function may; the message says what."""


# While it is called


class Names:
    """Clocks, streams, graphs and the lab's own checks, as they are before the file of a function is imported."""

    def __init__(self) -> None:
        self.before = [(label, owner, dict(vars(owner))) for label, owner in _owners()]
        self.calls = [[(name, value) for name, value in one[2].items() if callable(value)] for one in self.before]

    def restore(self) -> list[str]:
        """Put back what was replaced, and return its names; quick where there is nothing to do."""
        found = []
        for (label, owner, before), calls in zip(self.before, self.calls, strict=True):
            now = vars(owner)
            replaced = [name for name, value in calls if now.get(name) is not value]
            hiding = _hiding(owner, before) if len(now) > len(before) else []
            for name in replaced:
                setattr(owner, name, before[name])
            for name in hiding:
                delattr(owner, name)
            found += [f"{label}.{name}" for name in (*replaced, *hiding)]
        return found

    @contextmanager
    def kept(self) -> Iterator[None]:
        """For a call of the reader's code: NotAllowed if it replaced a name, which is then as it was."""
        try:
            yield
        finally:
            if found := self.restore():
                raise NotAllowed(f"it replaced {', '.join(found)}")


def _owners() -> list[tuple[str, Any]]:
    """The modules and classes whose names are watched: of those that measure and check, with what they call."""
    cuda = torch.cuda
    found = [("time", time), ("torch.cuda", cuda), ("torch.Tensor", Tensor), ("triton.testing", testing)]
    found += [(f"torch.cuda.{one.__name__}", one) for one in (cuda.Event, cuda.Stream, cuda.CUDAGraph, cuda.graph)]
    for name, module in list(sys.modules.items()):
        if name.startswith(("labkit.bench.", "labkit.sweep.")) or name.endswith((".reference", ".trials")):
            found.append((name, module))
            classes = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == name]
            found += [(f"{name}.{one.__name__}", one) for one in classes]
    return found


def _hiding(owner: Any, before: Mapping[str, Any]) -> list[str]:
    """The new names of a class that hide those of its bases; of a module none."""
    bases = owner.__bases__ if inspect.isclass(owner) else ()
    new = [name for name, value in vars(owner).items() if name not in before and callable(value)]
    return [name for name in new if any(hasattr(base, name) for base in bases)]


@cache
def names() -> Names:
    """Those of this process, as they were before it imported the first function of a reader."""
    return Names()


def held(function: Callable[..., Any], signature: Sequence[str]) -> Callable[..., Any]:
    """The function, whose calls raise NotAllowed where they replace a watched name, or give a tensor other memory."""

    def call(*values: Any) -> Any:
        places = list(map(_place, values))
        with names().kept():
            result = function(*values)
        for name, value, place in zip(signature, values, places, strict=True):
            if _place(value) != place:
                raise NotAllowed(f"it gave {name} other memory{_whose(value, signature, places)}")
        return result

    return wraps(function)(call) if inspect.isfunction(function) else call


def _place(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, Tensor):
        return None
    return value.untyped_storage().data_ptr(), value.data_ptr(), value.shape, value.stride(), value.dtype


def _whose(value: Tensor, signature: Sequence[str], places: Sequence[tuple[Any, ...] | None]) -> str:
    storage = value.untyped_storage().data_ptr()
    return next((f", that of {n}" for n, one in zip(signature, places, strict=True) if one and one[0] == storage), "")


# While it is timed


class Guard:
    """Changes the inputs of a trial before every block, and checks afterwards what its timed calls left.

    A block is one call of `before_block`, then of `poison` right before the timed calls and `take` right after them,
    both in their stream's order, then of `after_block`. faults: why the function is refused; nothing is looked at
    once there is one.
    """

    def __init__(self, arguments: Arguments, tolerance: Mapping[str, float]):
        self.arguments, self.tolerance = arguments, arguments.tolerance or tolerance
        self.faults: list[str] = []
        self.turn = _CHANCE.randrange(len(arguments.changes))
        self.begin(len(arguments.inputs), 1)
        some = next(iter(arguments.inputs[0].values()))
        self.device = some.device

    def begin(self, sets: int, calls: int) -> None:
        """Before the first block. sets: how many buffer sets are timed; calls: of each in a block, since its change."""
        self.sets, self.calls, self.set = sets, calls, 0
        self.seen = left(self.arguments, 0)  # what the calls of this set left before the inputs changed

    def before_block(self) -> None:
        """Give the inputs other values."""
        if self.faults:
            return
        self.arguments.changes[self.turn % len(self.arguments.changes)](self.set, Random(self.device, _seed()))
        self.turn += 1
        self.sums = {name: checksum(one) for name, one in self.arguments.inputs[self.set].items()}
        self.expected = self.arguments.expected(self.set, self.calls)
        _synchronize(self.device)  # the calls are timed on another stream

    def poison(self) -> None:
        """Enqueue NaN for the outputs that will be checked."""
        for out in self.arguments.outputs[self.set].values():
            out.fill_(float("nan"))

    def take(self) -> None:
        """Enqueue a copy of what the calls before it left."""
        self.taken = left(self.arguments, self.set)

    def after_block(self) -> None:
        """Check what was taken, and go on to another set.

        NotAllowed if a watched name was replaced meanwhile, by a thread: the block's times, of all variants, are
        worth nothing, and whose thread it was is not known; the case is then measured again without added functions.
        """
        if found := names().restore():
            raise NotAllowed(f"{', '.join(found)} replaced by a thread while functions were timed")
        if self.faults:
            return
        if fault := self._fault():
            self.faults.append(fault)
        self.set = _CHANCE.randrange(self.sets)
        self.seen = left(self.arguments, self.set)

    def _fault(self) -> str:
        """What is wrong with the block; empty if nothing is."""
        outputs = self.arguments.outputs[self.set]
        if any(bool(self.taken[name].isnan().any()) for name in outputs):
            return LATE if _written_later(outputs.values(), self.device) else NOT_WRITTEN
        inputs = self.arguments.inputs[self.set]
        if changed := [name for name, one in inputs.items() if not torch.equal(self.sums[name], checksum(one))]:
            return f"it changed {', '.join(changed)}, which it may only read"
        wrong = beyond(self.arguments.errors(self.expected, self.taken), self.tolerance)
        if wrong and all(torch.equal(self.taken[name], self.seen[name]) for name in outputs):
            return CACHED
        return wrong and WRONG + wrong

    def try_calls(self, calls: Sequence[Callable[[], Any]]) -> list[str]:
        """A block of plain calls of all sets for every kind of change, where nothing is timed; returns the faults."""
        self.begin(len(calls), 1)
        for _ in self.arguments.changes:
            self.before_block()
            self.poison()
            for call in calls:
                call()
            self.take()
            self.after_block()
        return self.faults


def _written_later(outputs: Any, device: torch.device) -> bool:
    end = _clock() + LATE_S
    while any(bool(out.isnan().any()) for out in outputs):
        if _clock() > end:
            return False
        _synchronize(device)
        _wait(0.01)
    return True


def checksum(tensor: Tensor) -> Tensor:
    """Sums of the bits of every 8 KB: what costs one pass over it, and 1/1024 of its memory."""
    bits = tensor.contiguous().view(-1).view(torch.uint8)
    bits = bits.clone() if bits.storage_offset() % 8 else bits
    whole = len(bits) // (8 * WORDS) * (8 * WORDS)
    return torch.cat([bits[:whole].view(torch.int64).view(-1, WORDS).sum(1), bits[whole:].long()])


def _seed() -> int:
    return _CHANCE.getrandbits(62)


_clock, _wait = time.monotonic, time.sleep


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
