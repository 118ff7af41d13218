"""Nine ways to keep a decode's tables right while the position of the token advances; what a token costs by each:

| way                               | build (host)     | copy (to the device) | hypothesis                             |
|-----------------------------------|------------------|----------------------|----------------------------------------|
| 1 rebuilt in Python, pageable     | all, by objects  | three, blocking      | milliseconds, all in the building      |
| 2 rebuilt vectorised, pageable    | all, by arrays   | three, blocking      | the copies wait for queued kernels     |
| 3 prebuilt, pageable              | positions' words | three, blocking      | what the copies alone cost             |
| 4 pinned, double-buffered         | positions' words | one, own stream      | hidden behind the kernel before        |
| 5 one position replayed           |                  |                      | the published one: wrong tokens        |
| 6 words from the host, one by one | one word         | 4 bytes a word       | copies cost by their number, not bytes |
| 6 words from the host, packed     | positions' words | one, and a scatter   | a small copy and one kernel more       |
| 7 words by a kernel               |                  | none, but a kernel   | a launch costs less than a copy        |
| 8 position in the launch          |                  |                      | no word has to change                  |
| 9 CUDA graph, position on the GPU |                  |                      | nothing is left but one replay         |

1 and 3 also with one table alone, while the others stay on the device: which table is it? Where the records stay, the
launch says the position.

Each way is a `Way`: prepared once, then `begin(position)` and `step(position)` for one token after the other. Nothing
waits for the device but what the way itself waits for. On the CPU the same code runs in Triton's interpreter: memory is
not pinned, events and streams stand for nothing, a graph is its calls.

Sources: 1, 2 and 5 AutoMegaKernel; 7 Mirage MPK, whose positions a task on the device advances; 8 Stanford MegaKernels;
6 packed vLLM-Ascend's dirty ranges with a scatter.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_one_of
from labkit.kernels.decoder import step as kernels
from labkit.kernels.decoder import tables as t
from labkit.kernels.decoder.step import Memory, Uploaded, upload
from labkit.kernels.decoder.tables import TABLES, Tables, check_position, lower, lower_slowly, position_words
from labkit.kernels.decoder.validate import check_addresses, validate
from labkit.kernels.launch import Launch
from labkit.studies.persistent_tables import variants

PATCH_BLOCK = 256
_ORDER = t.TABLES  # of the tables in memory that holds all three
_ALIGNED = 64  # bytes: where a table may begin there


@triton.jit(do_not_specialize=["position"])
def _patch_kernel(records, words, count, position, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + i, mask=i < count, other=0)
    tl.store(records + word, tl.zeros((BLOCK,), tl.int32) + position, mask=i < count)


def patch(records: Tensor, words: Tensor, position: int) -> Launch:
    """Write a position into some words of the records. records: int32; words: int32 [count], which, flattened."""
    args = {"records": records, "words": words, "count": len(words), "position": position, "BLOCK": PATCH_BLOCK}
    return Launch(_patch_kernel, (triton.cdiv(len(words), PATCH_BLOCK),), args, {"num_warps": 1})


def compilable(count: int = 257) -> Launch:
    """A `patch` of so many words that can be compiled but not run. For `labkit.evidence.compiled`."""
    return patch(torch.empty(1, dtype=torch.int32), torch.empty(count, dtype=torch.int32), 0)


# The ways

Make = Callable[[Memory, Uploaded, int | None, str], Launch]  # as `kernels.step`


class Way:
    """A way to keep the tables, made ready for one memory: tables are lowered, validated and uploaded.

    memory: of `kernels.allocate`; its lowering's own position does not matter. make: `kernels.step` with its choice and
    limit. A token's `step` is `build`, `copy` and `launch`, which are apart so that each can be timed; all that they do
    is enqueued on the current stream, or ordered before it.
    """

    position_from = "record"

    def __init__(self, memory: Memory, make: Make):
        self.memory, self.make, self.device = memory, make, memory.counters.device
        self.how = replace(memory.how, position=0 if self.position_from == "record" else None)
        self.tables = lower(self.how, memory.addresses())
        check_tables(self.tables, memory)
        self.words = position_words(self.tables)
        self.launched = self.launch_of(upload(self.tables, self.device))

    def launch_of(self, on_device: Uploaded) -> Launch:
        """The step on some tables."""
        position = 0 if self.position_from == "launch" else None
        return self.make(self.memory, on_device, position, self.position_from)

    def begin(self, position: int) -> None:
        """Make ready for tokens from a position on; not part of any token. ValueError for one past the cache."""
        check_position(position, self.how.cache)

    def step(self, position: int) -> None:
        """Enqueue one token's decode. ValueError, before anything is enqueued, for a position past the cache."""
        check_position(position, self.how.cache)
        self.build(position)
        self.copy(position)
        self.launch(position)

    def build(self, position: int) -> None:
        """What the host computes."""

    def copy(self, position: int) -> None:
        """What brings the tables on the device up to date."""

    def launch(self, position: int) -> None:
        """The kernel."""
        launched = _with(self.launched, position=position) if self.position_from == "launch" else self.launched
        launched()


class Prebuilt(Way):
    """Way 3: the host sets the position's words in the tables that it keeps, and copies tables from pageable memory.

    which: the tables that are built and copied, all or one of them. ValueError for others.
    """

    def __init__(self, memory: Memory, make: Make, which: tuple[str, ...] = TABLES):
        check_one_of("which", which, (TABLES, *((name,) for name in TABLES)))
        self.position_from = "record" if "records" in which else "launch"
        super().__init__(memory, make)
        self.host = {name: getattr(self.tables, name) for name in which}

    def build(self, position: int) -> None:
        """Set the words that change."""
        if "records" in self.host:
            self.host["records"].reshape(-1)[self.words] = position

    def copy(self, position: int) -> None:
        """Every table to new memory of the device."""
        sent = {name: _pageable(array, self.device) for name, array in self.host.items()}
        self.launched = _with(self.launched, **sent)


class Rebuilt(Prebuilt):
    """Way 2: the host lowers the model anew for every token, vectorised; all tables are copied."""

    def build(self, position: int) -> None:
        """All tables, whichever are copied."""
        self._keep(lower(replace(self.how, position=position), self.memory.addresses()))

    def _keep(self, built: Tables) -> None:
        self.host = {name: getattr(built, name) for name in self.host}


class RebuiltSlowly(Rebuilt):
    """Way 1: the same object by object in Python. One table alone is built as `tables.lower_slowly` builds it."""

    def __init__(self, memory: Memory, make: Make, which: tuple[str, ...] = TABLES):
        super().__init__(memory, make, which)
        self.kept = t.records_slowly(self.how)  # a queue's rebuilding needs them, a record's where it goes
        self.order = [number for numbers in t.queues_slowly(self.how, self.kept) for number in numbers]

    def build(self, position: int) -> None:
        """All tables, or one."""
        if len(self.host) == len(TABLES):
            self._keep(lower_slowly(replace(self.how, position=position), self.memory.addresses()))
        elif "buffers" in self.host:
            self.host = {"buffers": t.buffers_slowly(self.how, self.memory.addresses())}
        elif "records" in self.host:
            records = t.records_slowly(replace(self.how, position=position))
            self.host = {"records": t.pack_slowly(records, self.order)}
        else:
            self.host = {"queue": t.queue_slowly(t.queues_slowly(self.how, self.kept))}


class Pinned(Way):
    """Way 4: the tables in pinned memory, all in one piece, copied asynchronously; two pieces here and there in turn.

    The copy goes by a stream of its own, so that it may run while the kernel before does. It waits until the launch of
    two tokens ago has read the device's piece, the launch waits for the copy, and the host, before it writes a piece,
    until that has been copied.
    """

    def __init__(self, memory: Memory, make: Make):
        super().__init__(memory, make)
        self.side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.slots = [_slot(_piece_bytes(self.tables), torch.uint8, self.device) for _ in range(2)]
        self.records, self.launches = [], []
        for slot in self.slots:
            here = _views(slot.host, self.tables)
            for name in TABLES:
                getattr(here, name).copy_(torch.from_numpy(getattr(self.tables, name)))
            self.records.append(here.records.view(-1).numpy())
            self.launches.append(self.launch_of(_views(slot.device, self.tables)))
            slot.read.record()  # the first copy waits for what had this memory before
        self.turn = 0

    def build(self, position: int) -> None:
        """Set the words that change, once the piece's last copy has ended."""
        self.turn = 1 - self.turn
        self.slots[self.turn].copied.synchronize()
        self.records[self.turn][self.words] = position

    def copy(self, position: int) -> None:
        """One copy, beside what the current stream does."""
        slot = self.slots[self.turn]
        with torch.cuda.stream(self.side):
            slot.read.wait()
            _send(slot.device, slot.host)
            slot.copied.record()
        slot.copied.wait()

    def launch(self, position: int) -> None:
        """The kernel on the piece that was copied."""
        self.launched = self.launches[self.turn]
        self.launched()
        self.slots[self.turn].read.record()


class OnePosition(Way):
    """Way 5: the tables of the position that a sequence begins with, whatever the position is. No valid decode."""

    def begin(self, position: int) -> None:
        """Upload the tables of this position."""
        super().begin(position)
        self.tables.records.reshape(-1)[self.words] = position
        self.launched = _with(self.launched, records=_pageable(self.tables.records, self.device))


class WordsFromHost(Way):
    """Way 6: the tables stay on the device; the host sends the words that change, from pinned memory.

    packed: all in one copy, which a kernel of the library then scatters, instead of a copy a word.
    """

    def __init__(self, memory: Memory, make: Make, packed: bool = False):
        super().__init__(memory, make)
        self.records, self.packed = self.launched.args["records"].view(-1), packed
        self.slots = [_slot(len(self.words) if packed else 1, torch.int32, self.device) for _ in range(2)]
        self.values = [slot.host.numpy() for slot in self.slots]
        self.where = torch.from_numpy(self.words).to(self.device)
        self.targets = [self.records[word : word + 1] for word in self.words.tolist()]
        self.turn = 0

    def build(self, position: int) -> None:
        """Write the position, once the last copy from the same memory has ended."""
        self.turn = 1 - self.turn
        self.slots[self.turn].copied.synchronize()
        self.values[self.turn][:] = position

    def copy(self, position: int) -> None:
        """Ordered after the kernel before, which may still read the words."""
        slot = self.slots[self.turn]
        if self.packed:
            _send(slot.device, slot.host)
            self.records.index_copy_(0, self.where, slot.device)
        else:
            for target in self.targets:
                _send(target, slot.host)
        slot.copied.record()


class WordsByKernel(Way):
    """Way 7: the tables stay on the device; a small kernel writes the words that change before each step."""

    def __init__(self, memory: Memory, make: Make):
        super().__init__(memory, make)
        words = torch.from_numpy(self.words.astype(np.int32)).to(self.device)
        self.patched = patch(self.launched.args["records"], words, 0)

    def copy(self, position: int) -> None:
        """The kernel that takes a copy's place."""
        _with(self.patched, position=position)()


class InTheLaunch(Way):
    """Way 8: the tables never change; the position is an argument of the launch."""

    position_from = "launch"


class Graph(Way):
    """Way 9: one CUDA graph of one launch; the position is on the device, and the kernel advances it.

    Positions must follow one another, from `begin`'s on.
    """

    position_from = "device"

    def __init__(self, memory: Memory, make: Make):
        super().__init__(memory, make)
        self.replay = captured([self.launched], self.device)
        self.following = 0

    def begin(self, position: int) -> None:
        """Set the position on the device."""
        super().begin(position)
        self.memory.position.fill_(position)
        self.following = position

    def step(self, position: int) -> None:
        """Replay. ValueError for a position that is not the device's, before anything is enqueued."""
        check_following(position, self.following, self.how.cache)
        self.launch(position)

    def launch(self, position: int) -> None:
        """Replay the graph."""
        self.replay()
        self.following = position + 1


def check_following(position: int, following: int, cache: int) -> None:
    """ValueError for a position that the cache has no room for, or that is not the one which the device is at."""
    check_position(position, cache)
    if position != following:
        raise ValueError(f"position is {position}; allowed: {following}, the device's, or `begin` at another")


WAYS: dict[str, tuple[type[Way], dict[str, Any]]] = {
    name: (globals()[kind], options) for name, (kind, options) in variants.KEPT.items()
}


_passed: set[bytes] = set()  # tables that were validated in this process, without their addresses


def check_tables(tables: Tables, memory: Memory) -> None:
    """`validate`, but the addresses alone where the same tables, lying elsewhere, have passed: it takes a second."""
    check_addresses(tables.buffers, memory.extents())
    parts = (tables.buffers[:, t.ROWS :], tables.records, tables.queue)
    key = hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).digest()
    if key not in _passed:
        validate(tables)
        _passed.add(key)


def prepare(name: str, memory: Memory, **step: Any) -> Way:
    """A way made ready for a memory. name: one of `WAYS`, else ValueError. step: choice and limit of `kernels.step`."""
    check_one_of("way", name, WAYS)
    kind, options = WAYS[name]
    return kind(memory, partial(kernels.step, **step), **options)


# What a token enqueues


class Traffic(NamedTuple):
    """What one token enqueues. bytes, copies: from the host to the device; kernels: launches, a graph's included."""

    bytes: int
    copies: int
    kernels: int = 1


def traffic(name: str, tables: Tables) -> Traffic:
    """What one token of a way enqueues. name: one of `WAYS`, else ValueError."""
    check_one_of("way", name, WAYS)
    kind, options = WAYS[name]
    if issubclass(kind, Prebuilt):  # a copy of every table
        which = options.get("which", TABLES)
        return Traffic(sum(getattr(tables, one).nbytes for one in which), len(which))
    if kind is Pinned:
        return Traffic(_piece_bytes(tables), 1)
    if kind is WordsFromHost:
        count = len(position_words(tables))
        return Traffic(4 * count, 1, 2) if options.get("packed") else Traffic(4 * count, count)
    return Traffic(0, 0, 2 if kind is WordsByKernel else 1)


# The device: copies, events, graphs


def captured(calls: Sequence[Callable[[], Any]], device: torch.device) -> Callable[[], Any]:
    """One CUDA graph that replays the calls; on the CPU, the calls one after the other.

    No launch runs here; other calls run once, so that a library is ready: they must not spoil what is not written anew.
    """
    if device.type != "cuda":
        return lambda: [call() for call in calls]
    for call in calls:
        if isinstance(call, Launch):
            call.compile()._init_handles()  # loads the kernel, which cannot be done while capturing
        else:
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


class _NoEvent:
    """An event where every call has ended when it returns."""

    def record(self) -> None: ...

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...


@dataclass
class _Slot:
    """Memory of the host, pinned, and of the device. copied: the copy has ended; read: the kernel that reads it has."""

    host: Tensor
    device: Tensor
    copied: Any
    read: Any


def _slot(count: int, dtype: torch.dtype, device: torch.device) -> _Slot:
    cuda = device.type == "cuda"
    events = (torch.cuda.Event() if cuda else _NoEvent() for _ in range(2))
    here = torch.zeros(count, dtype=dtype, pin_memory=cuda)
    return _Slot(here, torch.empty(count, dtype=dtype, device=device), *events)


def _piece_bytes(tables: Tables) -> int:
    return sum(-(-getattr(tables, name).nbytes // _ALIGNED) * _ALIGNED for name in _ORDER)


def _views(piece: Tensor, tables: Tables) -> Uploaded:
    """The three tables in one piece of memory, uint8 [`_piece_bytes`]."""
    found, at = [], 0
    for name in _ORDER:
        table = torch.from_numpy(getattr(tables, name))
        found.append(piece[at : at + table.nbytes].view(table.dtype).view(table.shape))
        at += -(-table.nbytes // _ALIGNED) * _ALIGNED
    return Uploaded(*found)


def _pageable(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy in new memory of the device; returns when the copy has ended, and so all that the stream had before."""
    return torch.from_numpy(array).to(device, copy=True)


def _send(to: Tensor, source: Tensor) -> None:
    """Enqueue a copy, from pinned memory where there is a GPU."""
    to.copy_(source, non_blocking=True)


def _with(launch: Launch, **changed: Any) -> Launch:
    """The launch with some arguments changed."""
    return replace(launch, args={**launch.args, **changed})
