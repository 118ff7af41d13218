"""Experts in host memory, some of them in slots on the GPU: what a policy of `cache.py` decides, done by copies.

| choice          | hypothesis                                                                            |
|-----------------|---------------------------------------------------------------------------------------|
| a second stream | copies run beside the kernels; events alone, no host, keep the two in order           |
| `send`          | copies to a GPU take turns: a small one that kernels wait for goes in line with those |
|                 | of experts, before the next layer's, and not beside them, where it waits for them all |
| `prefetch`      | experts of the next layer, known or guessed, come while this layer is computed        |
| `room`          | slots beyond the cache's capacity: prefetched experts wait there, others pass through |
| bypass          | a dispatch of more experts than the cache holds would only evict itself: it passes by |

A dispatch is given in waves, of experts that are in slots at the same time; one wave where all hit. No slot is read
before its copy has landed, and none is written before what reads it has ended: `Stream` waits for both.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache as once
from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.kernels.gguf.experts import Experts
from labkit.kernels.offload.policies import Key, Policy, Replay, bypasses, first_missing


class Copies(Protocol):
    """Copies of experts into slots, in the order in which they are asked for, beside what is computed."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Bring experts of the host to slots, (expert, slot) each, once what was released there has been read."""

    def wait(self, slots: Iterable[int]) -> None:
        """What is computed from now on comes after the copies into these slots."""

    def release(self, slots: Iterable[int]) -> None:
        """These slots may be written after what has been computed until now."""

    def send(self, values: Tensor, to: Tensor) -> None:
        """Copy a small tensor of the host, pinned, after the experts asked for until now.

        What is computed from now on comes after it; what has read `to` must come before the last `follow`.
        """

    def follow(self) -> None:
        """Copies asked for from now on come after what has been computed until now."""

    def settle(self) -> None:
        """What is computed from now on comes after all copies asked for until now."""


class Now:
    """On a CPU: a copy is there at once. host: [experts, bytes]; held: [slots, bytes]."""

    def __init__(self, host: Tensor, held: Tensor):
        self.host, self.held = host, held

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for expert, slot in pairs:
            self.held[slot].copy_(self.host[expert])

    def wait(self, slots: Iterable[int]) -> None:
        pass

    def release(self, slots: Iterable[int]) -> None:
        pass

    def send(self, values: Tensor, to: Tensor) -> None:
        to.copy_(values)

    def follow(self) -> None:
        pass

    def settle(self) -> None:
        pass


@once
def _copy_stream(device: int) -> torch.cuda.Stream:
    """The stream of all copies to a GPU: they take turns anyhow. Of high priority, so that it has a queue of its own.

    Streams of one priority share a few queues of the hardware, and work of two in one queue runs in order.
    """
    return torch.cuda.Stream(device, priority=-1)


class Stream:
    """On a GPU: copies on a stream beside the current one, which computes. Tensors as of `Now`, host pinned.

    Whoever computes on another stream than before synchronises the two.
    """

    def __init__(self, host: Tensor, held: Tensor):
        self.device = held.device.index  # looked up in a third of the time of a `torch.device`
        self.host, self.held = host.unbind(), held.unbind()  # once: a view takes the host as long as a copy
        self.stream = _copy_stream(held.device.index)
        self.stream.wait_stream(torch.cuda.current_stream(held.device))  # the slots' memory may just have been in use
        held.record_stream(self.stream)  # nor is it given to others while copies are under way
        self._landed: dict[int, Any] = {}  # of slots, the event of a copy that nothing has waited for yet
        self._read: dict[int, Any] = {}  # and that of what read them last

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for event in {self._read.get(slot) for _, slot in pairs} - {None}:
            self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            for expert, slot in pairs:
                self.held[slot].copy_(self.host[expert], non_blocking=True)
        event = self.stream.record_event()  # one for all: an event takes the host as long as a copy
        self._landed |= dict.fromkeys((slot for _, slot in pairs), event)

    def wait(self, slots: Iterable[int]) -> None:
        # once: later work of the same stream comes after it anyhow
        for event in {self._landed.pop(slot) for slot in self._landed.keys() & slots}:
            torch.cuda.current_stream(self.device).wait_event(event)

    def release(self, slots: Iterable[int]) -> None:
        self._read |= dict.fromkeys(slots, torch.cuda.current_stream(self.device).record_event())

    def send(self, values: Tensor, to: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            to.copy_(values, non_blocking=True)
        torch.cuda.current_stream(self.device).wait_event(self.stream.record_event())

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def settle(self) -> None:
        self.wait(self._landed)  # whatever copy is not among these has been waited for


class ExpertSlots:
    """Experts by key, brought to slots on a device as a policy has it.

    host: all experts, on the host, pinned if the device is a GPU. policy: fresh; what it holds from the start is
    brought now. room: slots beyond `policy.capacity`. keys: of each expert of host, its number by default.
    copies: what copies; `Stream` on a GPU, else `Now`.
    ValueError for a room below 1, keys that are not one an expert, or host memory that is not pinned.

    `slots` are the experts on the device. accesses, hits, bypassed: as `cache.replay` counts them; copied: experts.
    """

    def __init__(
        self, host: Experts, policy: Policy, room: int = 1, device: torch.device | str = "cuda",
        keys: Sequence[Key] | None = None, copies: type[Copies] | None = None,
    ):  # fmt: skip
        device = torch.device(device)
        keys = range(len(host)) if keys is None else keys
        check_slots(host, room, keys, device)
        self.policy, self.slots = policy, host.like(policy.capacity + room, device)
        self._copies = (copies or (Stream if device.type == "cuda" else Now))(host.store, self.slots.store)
        self._expert = {key: number for number, key in enumerate(keys)}
        self._held: dict[Key, int] = {}  # what the policy holds, and in which slot
        self._early: dict[Key, int] = {}  # prefetched, and not needed yet
        self._free = deque(range(len(self.slots)))
        self._asked: list[tuple[int, int]] = []  # copies, expert and slot, that are not enqueued yet
        self.accesses = self.hits = self.bypassed = self.copied = 0
        for key in keys:
            if key in policy:
                self._held[key] = self._bring(key)
        self._enqueue()

    @property
    def replayed(self) -> Replay:
        """What `cache.replay` says of the same dispatches."""
        return Replay(self.accesses, self.hits, self.bypassed)

    def prefetch(self, dispatch: Iterable[Key]) -> None:
        """Bring what is not there of a later dispatch, as far as there is room; the policy learns nothing of it."""
        held, early = self._held, self._early
        missing = [key for key in dict.fromkeys(dispatch) if key not in held and key not in early]
        self._check(missing)
        for key in missing[: len(self._free)]:
            early[key] = self._bring(key)
        self._enqueue()

    def waves(self, dispatch: Sequence[Key]) -> Iterator[dict[Key, int]]:
        """The experts of a dispatch, a wave at a time: key -> slot. Compute with a wave before asking for the next.

        Kernels that are enqueued on the current stream while a wave is out read these slots safely. A dispatch of more
        experts than the policy's capacity bypasses it: what is cached is read where it is, all else passes through.
        ValueError for a key that is none of an expert.
        """
        keys = list(dict.fromkeys(dispatch))
        self._check(keys)
        through = not bypasses(keys, self.policy.capacity)
        self.accesses += len(keys)
        self.bypassed += 0 if through else len(keys)
        wave: dict[Key, int] = {}
        given_up: list[int] = []  # slots of the wave that are free once it has been read
        at = 0
        while at < len(keys):
            there = self._there(keys, at, through)
            wave.update((key, self._held[key]) for key in keys[at:there])
            if there < len(keys):
                key = keys[there]  # the first that is not there
                if not self._free and key not in self._early:
                    if given_up:
                        yield from self._out(wave, given_up)
                        wave, given_up = {}, []
                    else:
                        self._free.append(self._early.pop(next(iter(self._early))))
                wave[key] = self._through(key, wave, given_up) if through else self._past(key, given_up)
            at = there + 1
        yield from self._out(wave, given_up)

    def send(self, values: Tensor, to: Tensor) -> None:
        """As of `Copies`; pinned for a GPU."""
        self._copies.send(values, to)

    def follow(self) -> None:
        """As of `Copies`, whatever slots they go to."""
        self._copies.follow()

    def settle(self) -> None:
        """As of `Copies`, prefetched experts included."""
        self._copies.settle()

    def _there(self, keys: list[Key], start: int, through: bool) -> int:
        """Where the first of these keys is that is not cached; those before are used, if they go through the cache."""
        if not through:
            return first_missing(keys, start, self._held)
        end = self.policy.hits(keys, start)
        self.hits += end - start
        return end

    def _through(self, key: Key, wave: dict[Key, int], given_up: list[int]) -> int:
        """Slot of a key that is not there, and is used through the cache."""
        access = self.policy.access(key)
        self._held[key] = self._early.pop(key) if key in self._early else self._bring(key)
        if access.evicted is not None:
            slot = self._held.pop(access.evicted)
            (given_up if access.evicted in wave else self._free).append(slot)
        return self._held[key]

    def _past(self, key: Key, given_up: list[int]) -> int:
        """Slot of a key that is not there, and bypasses the cache."""
        given_up.append(self._early.pop(key) if key in self._early else self._bring(key))
        return given_up[-1]

    def _bring(self, key: Key) -> int:
        slot = self._free.popleft()
        self._asked.append((self._expert[key], slot))
        self.copied += 1
        return slot

    def _enqueue(self) -> None:
        if self._asked:
            self._copies.copy(self._asked)
            self._asked = []

    def _out(self, wave: dict[Key, int], given_up: Iterable[int]) -> Iterator[dict[Key, int]]:
        if wave:
            self._enqueue()
            self._copies.wait(wave.values())
            try:
                yield wave
            finally:
                self._copies.release(wave.values())
                self._free.extend(given_up)

    def _check(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key not in self._expert:
                raise ValueError(f"key is {key!r}; allowed: those of the {len(self._expert)} experts")


def check_slots(host: Experts, room: int, keys: Sequence[Key], device: torch.device) -> None:
    """Raise ValueError for what `ExpertSlots` cannot take."""
    if room < 1:
        raise ValueError(f"room is {room}; allowed: at least 1 slot")
    if len(keys) != len(host) or len(set(keys)) != len(host):
        raise ValueError(f"keys are {len(keys)}, {len(set(keys))} different; allowed: one for each of {len(host)}")
    if host.store.device.type != "cpu" or (device.type == "cuda" and not host.store.is_pinned()):
        raise ValueError(f"host is on {host.store.device}, not pinned; allowed: on cpu, pinned for a GPU")
