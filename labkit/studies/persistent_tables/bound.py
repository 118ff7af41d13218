"""What a token would take if its records waited otherwise, simulated from the moments that they wrote down.

| waits for     | a record begins its work when                                                                       |
|---------------|-----------------------------------------------------------------------------------------------------|
| all           | all records of the stage before are done, as in the kernel: how far the simulation itself is off    |
| what it reads | those are done whose results it reads: of attention the rows of its head's q, k and v               |
| its parts     | the first of them is done; it goes on with each next one as it is done, the work for it by its      |
|               | share of x. Attention as above, since it needs a whole query                                        |
| nothing       | the record before it in its program is done                                                         |

The work of a record, from its release until it is done, stays what was measured, and so do the order of the records,
what a program takes from one to the next, and how late a signal is seen, in the mean. So these are estimates for these
tables, and hopeful ones: weights that came during a wait count as there, also where the wait is shorter.
"""

import numpy as np

from labkit.bench import ledger
from labkit.kernels.decoder.tables import ARGMAX, ATTENTION, MOMENTS, OP, SIGNAL, START, STOP, WAIT, Tables

WAYS = ("all", "what it reads", "its parts", "nothing")
_BEGUN, _RELEASED, _DONE = (MOMENTS.index(name) for name in ("begun", "released", "done"))


def finer(tables: Tables, marks: np.ndarray) -> dict[str, float]:
    """µs from the first record's begin to the end of the last: measured, and by each of WAYS.

    marks: int64 [records, moments], ns, as a step writes them down; a record that was never released does no work.
    ValueError for another number of marks than records.
    """
    if len(marks) != len(tables.records):
        raise ValueError(f"marks has {len(marks)} entries; allowed: {len(tables.records)}, one a record")
    known = _Moments(tables, marks)
    found = {"measured": float(marks[:, _DONE].max() - marks[:, _BEGUN].min())}
    found |= {way: _simulated(tables, known, way) for way in WAYS}
    return {way: ns / 1e3 for way, ns in found.items()}


class _Moments:
    """In ns: work of each record; gap, from the end of the one before to its begin; seen, from signal to release."""

    def __init__(self, tables: Tables, marks: np.ndarray):
        # From the first moment on: a float of ns since 1970 would have steps of 256.
        begun, released, done = (marks - marks[:, _BEGUN].min()).T.astype(float)
        self.waits = released >= begun  # others have no position, and wait for nobody
        self.work = np.where(self.waits, done - released, done - begun)
        program = np.repeat(np.arange(len(tables.queue) - 1), np.diff(tables.queue))
        self.first = np.r_[True, program[1:] != program[:-1]]
        self.gap = begun - np.where(self.first, 0.0, np.roll(done, 1))
        signal, wait = tables.records[:, SIGNAL], tables.records[:, WAIT]
        ready = {one: done[signal == one].max() for one in np.unique(wait) if one >= 0}
        late = (released - np.maximum(begun, [ready.get(one, 0.0) for one in wait]))[self.waits & (wait >= 0)]
        self.seen = float(np.mean(late)) if len(late) else 0.0


def _simulated(tables: Tables, known: _Moments, way: str) -> float:
    """ns until the last record is done."""
    records, done = tables.records, np.zeros(len(tables.records))
    for wait in np.unique(records[:, WAIT]):  # stages are numbered in their order
        before = np.flatnonzero(records[:, SIGNAL] == wait) if wait >= 0 else np.empty(0, int)
        parts = _parts(records[before], done[before])
        heads: dict[int, float] = {}
        for i in np.flatnonzero(records[:, WAIT] == wait):
            begin = known.gap[i] + (0.0 if known.first[i] else done[i - 1])
            if not len(before) or way == "nothing" or not known.waits[i]:
                done[i] = begin + known.work[i]
            elif records[i, OP] == ATTENTION and way != "all":
                head = int(records[i, START])
                if head not in heads:
                    heads[head] = float(done[before[_reads(tables, records[before], head)]].max())
                done[i] = max(begin, heads[head]) + known.seen + known.work[i]
            elif way == "its parts" and records[i, OP] != ARGMAX:
                done[i] = max(begin + known.work[i], _by_parts(*parts, known.work[i])) + known.seen
            else:
                done[i] = max(begin, parts[0].max()) + known.seen + known.work[i]
    return float(done.max())


def _parts(before: np.ndarray, done: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When each part of what a stage makes is there, and its rows; of attention a head's, which the last span makes."""
    if not len(before) or before[0, OP] != ATTENTION:
        return done, (before[:, STOP] - before[:, START]).astype(float)
    ready = np.array([done[before[:, START] == head].max() for head in np.unique(before[:, START])])
    return ready, np.ones(len(ready))


def _by_parts(ready: np.ndarray, sizes: np.ndarray, work: float) -> float:
    """When the work is done whose parts are ready at these moments: after each of them what is left then."""
    order = np.argsort(ready, kind="stable")
    left = np.cumsum(sizes[order][::-1])[::-1] / sizes.sum()
    return float((ready[order] + left * work).max())


def _reads(tables: Tables, qkv: np.ndarray, head: int) -> np.ndarray:
    """Which records of a qkv projection make rows of this head's query, or of its key and value."""
    m = tables.model
    rows = [head, m.heads + head // (m.heads // m.kv_heads), m.heads + m.kv_heads + head // (m.heads // m.kv_heads)]
    found = [(qkv[:, START] < (row + 1) * m.head_dim) & (qkv[:, STOP] > row * m.head_dim) for row in rows]
    return np.any(found, 0)


ledger.watch(__name__)
