"""Which experts stay on the GPU: policies of the expert cache, their oracle, and traces to judge them by. No GPU.

A dispatch is the experts that one layer needs at once, each once; a key is (layer, expert), or anything hashable but
None. A cache is asked for each key of a dispatch in turn (`access`), and says whether it was there and what gave way: a
key is used after its own access and before the next one, which may evict it.

| policy    | what it keeps: the hypothesis that                                                                     |
|-----------|--------------------------------------------------------------------------------------------------------|
| lru       | the latest used: what was needed just now is needed again                                              |
| slru      | probationary (a quarter) what came once, protected what was hit there: what came once may never return |
| slru_freq | as slru, but the number of accesses outlives an eviction: a key that returns is not new                |
| pinned    | the most frequent of a first trace, for ever; all others pass through one slot: experts stay popular   |
| belady    | the oracle: evicts what is needed again the latest (Belady 1966); no policy has fewer misses           |

slru (Karedla, Love and Wherry 1994) as SharpInference has it for its experts: 25 % probationary, 75 % protected, each
at least 1; insert at the probationary head; a hit promotes; protected overflow demotes its tail to the probationary
head; the victim is the probationary entry with the fewest accesses, never the one just inserted. It inserts before it
evicts, so a cache of `capacity` keeps capacity keys between accesses and needs capacity + 1 slots.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from labkit.kernels.checks import check_one_of

Key = Hashable
Trace = Sequence[Sequence[Key]]
PROBATIONARY = 0.25


@dataclass(frozen=True)
class Access:
    """What an access did. hit: the key was there; evicted: the key that gave way, or None."""

    hit: bool
    evicted: Key | None = None


HIT, MISS = Access(True), Access(False)  # made once: accesses are counted in microseconds


class Policy(Protocol):
    """Decides what a cache keeps. capacity: keys that it holds between accesses."""

    capacity: int

    def access(self, key: Key) -> Access:
        """Use a key: from now on it is in the cache, and what gave way is not."""

    def hits(self, keys: Sequence[Key], start: int) -> int:
        """Use these keys from `start` on as long as they are there; where the first is that is not (or their number).

        As `access` of each, in a fraction of the time.
        """

    def __contains__(self, key: Key) -> bool: ...

    def __len__(self) -> int: ...


class LRU:
    """Evicts the key whose last use is the longest ago. ValueError for a capacity below 1, here and in all others."""

    def __init__(self, capacity: int):
        check_capacity(capacity)
        self.capacity = capacity
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def access(self, key: Key) -> Access:
        hit = key in self._keys
        self._keys[key] = None
        self._keys.move_to_end(key)
        return Access(hit, self._keys.popitem(last=False)[0] if len(self._keys) > self.capacity else None)

    def hits(self, keys: Sequence[Key], start: int) -> int:
        there, used = self._keys, self._keys.move_to_end
        for n in range(start, len(keys)):
            if keys[n] not in there:
                return n
            used(keys[n])
        return len(keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)


class SLRU:
    """Segmented LRU as in the source (see the module); of equally often used entries the nearest to the tail goes.

    remember: a key keeps its number of accesses when it is evicted (`slru_freq`). The probationary segment is longer
    than its quarter for as long as the protected one is not full.
    """

    def __init__(self, capacity: int, remember: bool = False):
        check_capacity(capacity)
        self.capacity = capacity
        self.protected_size = max(1, capacity - max(1, int(capacity * PROBATIONARY)))
        self.remember = remember
        self._probationary: OrderedDict[Key, None] = OrderedDict()  # the tail first, the head last
        self._protected: OrderedDict[Key, None] = OrderedDict()
        self._count: dict[Key, int] = {}

    def access(self, key: Key) -> Access:
        if self.hits((key,), 0):
            return HIT
        self._count[key] = self._count.get(key, 0) + 1
        self._probationary[key] = None
        return Access(False, self._evict(key)) if len(self) > self.capacity else MISS

    def hits(self, keys: Sequence[Key], start: int) -> int:
        protected, probationary, count = self._protected, self._probationary, self._count
        room = self.protected_size - len(protected)
        for n in range(start, len(keys)):
            key = keys[n]
            if key in protected:
                protected.move_to_end(key)
            elif key in probationary:  # promoted
                del probationary[key]
                protected[key] = None
                if room:
                    room -= 1
                else:
                    probationary[protected.popitem(last=False)[0]] = None
            else:
                return n
            count[key] += 1
        return len(keys)

    def segments(self) -> tuple[list[Key], list[Key]]:
        """The probationary and the protected keys, each from head to tail."""
        return list(reversed(self._probationary)), list(reversed(self._protected))

    def _evict(self, inserted: Key) -> Key:
        victim = self._least_accessed(inserted)
        if victim is not None:
            del self._probationary[victim]
        else:  # only with capacity 1, whose key is protected
            victim = self._protected.popitem(last=False)[0]
        if not self.remember:
            del self._count[victim]
        return victim

    def _least_accessed(self, inserted: Key) -> Key | None:
        """Of the other probationary keys; of equal ones the nearest to the tail. No key there has less than 1."""
        victim, least, count = None, math.inf, self._count
        for key in self._probationary:
            if count[key] < least and key != inserted:
                victim, least = key, count[key]
                if least == 1:
                    break
        return victim

    def __contains__(self, key: Key) -> bool:
        return key in self._probationary or key in self._protected

    def __len__(self) -> int:
        return len(self._probationary) + len(self._protected)


class Pinned:
    """Keeps the capacity - 1 most frequent keys of a first trace, from the start on; all others share one slot."""

    def __init__(self, capacity: int, first: Trace):
        check_capacity(capacity)
        self.capacity = capacity
        self._pinned = set(most_frequent(first, capacity - 1))
        self._passing: Key | None = None

    def access(self, key: Key) -> Access:
        if key in self:
            return HIT
        evicted, self._passing = self._passing, key
        return Access(False, evicted)

    def hits(self, keys: Sequence[Key], start: int) -> int:
        return first_missing(keys, start, self)

    def __contains__(self, key: Key) -> bool:
        return key in self._pinned or key == self._passing

    def __len__(self) -> int:
        return len(self._pinned) + (self._passing is not None)


class Belady:
    """The oracle: evicts the key that is needed again the latest, never the one just used.

    Its accesses must be those of the trace, in order (ValueError). start: keys that are there before the first access,
    at most capacity (ValueError).
    """

    def __init__(self, capacity: int, trace: Trace, start: Iterable[Key] = ()):
        check_capacity(capacity)
        self.capacity = capacity
        self._keys = set(start)
        if len(self._keys) > capacity:
            raise ValueError(f"start has {len(self._keys)} keys; allowed: at most {capacity}, the capacity")
        self._trace = _flat(trace)
        self._next, first = _next_uses(self._trace)
        self._at = 0
        self._use = {key: first.get(key, len(self._trace)) for key in self._keys}

    def access(self, key: Key) -> Access:
        if self._at >= len(self._trace) or self._trace[self._at] != key:
            raise ValueError(f"access {self._at} is of {key!r}; allowed: the trace that the oracle was made with")
        hit = key in self._keys
        self._keys.add(key)
        self._use[key] = self._next[self._at]
        self._at += 1
        if len(self._keys) <= self.capacity:
            return Access(hit)
        victim = max((other for other in self._keys if other != key), key=self._use.__getitem__)
        self._keys.remove(victim)
        return Access(hit, victim)

    def hits(self, keys: Sequence[Key], start: int) -> int:
        end = first_missing(keys, start, self._keys)
        for key in keys[start:end]:
            self.access(key)
        return end

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)


POLICIES: dict[str, Callable[[int, Trace, Trace], Policy]] = {  # of capacity, first trace, trace
    "lru": lambda capacity, first, trace: LRU(capacity),
    "slru": lambda capacity, first, trace: SLRU(capacity),
    "slru_freq": lambda capacity, first, trace: SLRU(capacity, remember=True),
    "pinned": lambda capacity, first, trace: Pinned(capacity, first),
    # as warm as `pinned` at its start, so that it is no worse than that either
    "belady": lambda capacity, first, trace: Belady(capacity, trace, most_frequent(first, capacity - 1)),
}


@dataclass(frozen=True)
class Replay:
    """What a cache did over a trace, in accesses. bypassed: those of dispatches that went past the cache."""

    accesses: int
    hits: int
    bypassed: int

    @property
    def hit_rate(self) -> float:
        """Hits over all accesses, bypassed ones too, which are misses; NaN without accesses."""
        return self.hits / self.accesses if self.accesses else float("nan")

    def since(self, before: "Replay") -> "Replay":
        """What was added to an earlier count."""
        return Replay(self.accesses - before.accesses, self.hits - before.hits, self.bypassed - before.bypassed)


def make(policy: str, capacity: int, first: Trace = (), trace: Trace = ()) -> Policy:
    """A policy by name. first: what `pinned` counts; trace: what `belady` foresees (of dispatches that do not bypass).

    ValueError for a name that is not in `POLICIES` or a capacity that it cannot have.
    """
    check_one_of("policy", policy, POLICIES)
    return POLICIES[policy](capacity, first, trace)


def bypasses(dispatch: Sequence[Key], capacity: int) -> bool:
    """Whether a dispatch needs more experts at once than the cache holds.

    They would evict one another, and all else. It reads them past the cache instead, which stays as it is; all count as
    misses, though those that are there need no copy (`slots.py`).
    """
    return len(set(dispatch)) > capacity


def replay(policy: str, capacity: int, trace: Trace, first: Trace = ()) -> Replay:
    """Hits of a policy over a trace, with bypass. ValueError as `make`."""
    through = [dispatch for dispatch in trace if not bypasses(dispatch, capacity)]
    cache = make(policy, capacity, first, through)
    hits = sum(cache.access(key).hit for key in _flat(through))
    accesses = len(_flat(trace))
    return Replay(accesses, hits, accesses - len(_flat(through)))


def first_missing(keys: Sequence[Key], start: int, there: Container[Key]) -> int:
    """Where the first of these keys from `start` on is that is not there; their number if all are."""
    for n in range(start, len(keys)):
        if keys[n] not in there:
            return n
    return len(keys)


def most_frequent(trace: Trace, count: int) -> list[Key]:
    """At most `count` keys of a trace, the most frequent first, of equal ones the first used."""
    return [key for key, _ in Counter(_flat(trace)).most_common(count)]


def local(
    tokens: int, layers: int, experts: int, top_k: int, stay: float = 0.5, exponent: float = 1.0, seed: int = 0
) -> list[list[tuple[int, int]]]:
    """A synthetic trace of decode: one dispatch a token and layer, in this order: top_k different (layer, expert).

    The r-th expert of a layer, in an order of its own, has weight r^-exponent; each expert of a token is kept for the
    next one with probability `stay`. ValueError if that is not in 0 … 1, or top_k not in 1 … experts.
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; allowed: 1 to {experts}, the experts")
    if not 0 <= stay <= 1:
        raise ValueError(f"stay is {stay}; allowed: 0 to 1")
    random = np.random.default_rng(seed)
    # logarithms, since r^-exponent may be too small for a float
    likely = [random.permutation(-exponent * np.log(np.arange(1, experts + 1))) for _ in range(layers)]
    before: list[list[int]] = [[] for _ in range(layers)]
    trace = []
    for _ in range(tokens):
        for layer in range(layers):
            kept = [expert for expert in before[layer] if random.random() < stay]
            before[layer] = kept + _drawn(likely[layer], kept, top_k - len(kept), random)
            trace.append([(layer, expert) for expert in before[layer]])
    return trace


zipf = partial(local, stay=0.0)
uniform = partial(zipf, exponent=0.0)  # every expert is as likely as any other


def _drawn(log_weights: np.ndarray, without: list[int], count: int, random: np.random.Generator) -> list[int]:
    """So many different experts, but not those of `without`: those of the largest log weight + Gumbel noise."""
    noisy = log_weights + random.gumbel(size=len(log_weights))
    noisy[without] = -np.inf
    return np.argsort(-noisy, kind="stable")[:count].tolist()


def batched(trace: Trace, tokens: int, layers: int) -> list[list[Key]]:
    """Dispatches of `tokens` tokens together, layer by layer: each of their experts once, in order of first use.

    trace: one dispatch a token and layer, in this order (ValueError if its length is no multiple of `layers`); the last
    dispatches are of the tokens that are left. ValueError if tokens is below 1.
    """
    if tokens < 1 or layers < 1 or len(trace) % layers:
        sizes = f"{len(trace)} dispatches of {layers} layers, {tokens} tokens together"
        raise ValueError(f"trace is {sizes}; allowed: a dispatch for every token and layer, at least 1 token together")
    by_layer = [trace[layer::layers] for layer in range(layers)]
    starts = range(0, len(by_layer[0]), tokens)
    return [list(dict.fromkeys(_flat(one[start : start + tokens]))) for start in starts for one in by_layer]


def _flat(trace: Trace) -> list[Key]:
    return [key for dispatch in trace for key in dispatch]


def _next_uses(keys: Sequence[Key]) -> tuple[list[int], dict[Key, int]]:
    """For each access, when its key is used next (the number of accesses if it is not); and each key's first use."""
    following: dict[Key, int] = {}
    found = [len(keys)] * len(keys)
    for at in reversed(range(len(keys))):
        found[at] = following.get(keys[at], len(keys))
        following[keys[at]] = at
    return found, following


def check_capacity(capacity: int) -> None:
    """A cache holds at least one expert."""
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}; allowed: at least 1 expert")
