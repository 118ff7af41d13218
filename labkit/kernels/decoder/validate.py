"""Refuses tables that a kernel must not run: what reads or writes out of range, races, or can never finish.

A step is a sequence of stages: the embedding, five a layer, the head, argmax. How a stage is split into records, and
which program runs which record in which order, is free; what a stage reads and writes, and that it waits for all of the
stage before, is not.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from labkit.kernels.decoder import tables as t
from labkit.kernels.decoder.tables import Tables, check_position

_BUFFERS = range(t.WEIGHT, t.SECOND + 1)
_PROJECTIONS = (t.QKV, t.OUTPUT, t.GATE_UP, t.DOWN, t.HEAD)
_STAGES = (t.QKV, t.ATTENTION, t.OUTPUT, t.GATE_UP, t.DOWN)  # of a layer, in order
_CACHES = ("k_cache", "v_cache")
# The buffers of each op: weight, input, output, gain, first, second.
_USED = {
    t.QKV: ("qkv_weight", "hidden", "qkv", "gain_1", None, None),
    t.OUTPUT: ("output_weight", "attention", "hidden", None, None, None),
    t.GATE_UP: ("gate_up_weight", "hidden", "ffn", "gain_2", None, None),
    t.DOWN: ("down_weight", "ffn", "hidden", None, None, None),
    t.HEAD: ("head", "hidden", "logits", "final_gain", "best", "best_token"),
    t.EMBED: ("embedding", "token", "hidden", None, None, None),
    t.ATTENTION: ("rope", "qkv", "attention", "spans", *_CACHES),
    t.ARGMAX: ("best_token", "best", "token", None, "tokens", None),
}


class TableError(ValueError):
    """A table that must not run. record: the number of the record that is at fault, or None."""

    def __init__(self, message: str, record: int | None = None):
        super().__init__(message if record is None else f"record {record}: {message}")
        self.record = record


def validate(tables: Tables, memory: Iterable[tuple[int, int]] | None = None, position: int | None = None) -> None:
    """Raise TableError for tables that are malformed, else return.

    memory: (address, bytes) of what is allocated, against which every buffer's address is checked; None: addresses are
    not checked. position: of the launch, for tables that leave it to the launch. Refused are: wrong shapes or dtypes, a
    queue that is out of order, an unknown op, buffers or rows out of range or not those of the op, a position past the
    cache, rows that no record or two records compute, spans of a head that do not share a counter of their own, a wait
    for a counter that fewer or more records signal or that is not that of the stage before, and records that can never
    run since they wait for one another (queues included).
    """
    _check_arrays(tables)
    if memory is not None:
        check_addresses(tables.buffers, list(memory))
    _check_records(tables)
    _check_positions(tables, position)
    _check_coverage(tables)
    _check_counters(tables)
    _check_arrivals(tables)
    _check_stages(tables)
    _check_order(tables)


def _refuse(wrong: np.ndarray, message: str, *values: np.ndarray) -> None:
    """TableError for the first record that is wrong, [records]; message: with a place for its entry of each value."""
    if wrong.any():
        number = int(wrong.argmax())
        raise TableError(message.format(*(each[number] for each in values)), number)


def _check_arrays(tables: Tables) -> None:
    allowed = {"buffers": (np.int64, 4), "records": (np.int32, len(t.WORDS))}
    for name, (dtype, width) in allowed.items():
        array = getattr(tables, name)
        if array.dtype != dtype or array.ndim != 2 or array.shape[1] != width:
            raise TableError(f"{name} is {array.dtype} {array.shape}; allowed: {dtype.__name__} [n, {width}]")
    queue = tables.queue
    if queue.dtype != np.int32 or queue.ndim != 1 or len(queue) < 2:
        raise TableError(f"queue is {queue.dtype} {queue.shape}; allowed: int32 [programs + 1]")
    if queue[0] != 0 or queue[-1] != len(tables.records) or (np.diff(queue) < 0).any():
        raise TableError(f"queue is {queue.tolist()}; allowed: rising from 0 to {len(tables.records)}")


def check_addresses(buffers: np.ndarray, memory: list[tuple[int, int]]) -> None:
    """Raise TableError for a buffer that is not in the memory or not aligned; memory: as of `validate`."""
    for number, (address, rows, columns, itemsize) in enumerate(buffers.tolist()):
        end = address + rows * columns * itemsize
        if min(rows, columns) < 1 or not any(start <= address and end <= start + size for start, size in memory):
            raise TableError(f"buffer {number}: bytes {address} to {end} are not in the memory that was given")
        if address % 16:
            raise TableError(f"buffer {number}: address {address}; allowed: a multiple of 16")


def _check_records(tables: Tables) -> None:
    """Every record by itself: its op, its buffers, and that it stays within them. The first one at fault is named."""
    _, kind = np.unique(tables.records[:, [t.OP, *_BUFFERS, t.K]], axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    problems = [one for i in np.unique(kind) for one in _problems(tables, np.flatnonzero(kind == i))]
    if problems:
        number, what = min(problems, key=lambda problem: problem[0])
        raise TableError(what, number)


def _problems(tables: Tables, numbers: np.ndarray) -> Iterator[tuple[int, str]]:
    """What is wrong with records of the same op, buffers and K: (number, message)."""
    words = tables.records[numbers].T.astype(np.int64)
    first, op = int(numbers[0]), int(words[t.OP, 0])
    buffers = {word: int(words[word, 0]) for word in _BUFFERS}
    if op not in _USED:
        yield first, f"op is {op}; allowed: 1 to {len(t.OPS)}"
        return
    layer = int(_layers(tables.records[numbers[:1]])[0])
    for (word, value), name in zip(buffers.items(), _USED[op], strict=True):
        expected, there = t.buffer_number(name, layer) if name else -1, 0 <= value < len(tables.buffers)
        if value != expected or (name and not there):
            allowed = f"0 to {len(tables.buffers) - 1}" if name and not there else expected
            yield first, f"{t.WORDS[word]} of {t.OPS[op - 1]} is buffer {value}; allowed: {allowed}"
            return
    sizes = {word: _size(tables, value) for word, value in buffers.items() if value >= 0}
    for name, *bounds in _bounds(tables, op, words, sizes):
        value, least, most = np.broadcast_arrays(*bounds)
        for i in np.flatnonzero((value < least) | (value > most))[:1]:
            allowed = f"{least.flat[i]} to {most.flat[i]}"
            yield int(numbers[i]), f"{name} of {t.OPS[op - 1]} is {value.flat[i]}; allowed: {allowed}"


def _layers(records: np.ndarray) -> np.ndarray:
    """The layer whose buffers each record names; 0 for the ops that are of none; [records]."""
    named = np.where(records[:, t.OP] == t.ATTENTION, records[:, t.FIRST], records[:, t.WEIGHT])
    return np.maximum(0, (named - len(t.SHARED)) // len(t.LAYER))


def _size(tables: Tables, buffer: int) -> tuple[int, int]:
    return tuple(tables.buffers[buffer, [t.ROWS, t.COLUMNS]].tolist())


def _bounds(
    tables: Tables, op: int, words: np.ndarray, sizes: dict[int, tuple[int, int]]
) -> Iterator[tuple[str, Any, Any, Any]]:
    """(what, value, least, most) of everything that bounds what records of an op read and write.

    words: int64 [words, records]; sizes: rows and columns of the buffers that they all name, by word.
    """
    m, batch, start, stop = tables.model, tables.batch, words[t.START], words[t.STOP]
    values = {word: rows * columns for word, (rows, columns) in sizes.items()}
    least: dict[int, int] = {}  # values of a buffer that must be no fewer; of those in `exact` no more either
    if op in _PROJECTIONS:
        (rows, k), pair = sizes[t.WEIGHT], 2 if op == t.GATE_UP else 1
        yield "stop", stop, start + 1, rows
        yield "start", start, 0, rows - 1
        yield "start modulo 2", start % pair, 0, 0
        exact = {t.INPUT: batch * k, t.OUT: batch * rows // pair, t.GAIN: k}
        if op == t.HEAD:
            yield "slot", words[t.SLOT], 0, min(values[t.FIRST], values[t.SECOND]) // batch - 1
    elif op == t.ATTENTION:
        k = m.head_dim
        yield "start", start, 0, batch * m.heads - 1
        yield "stop", stop, start + tables.group, start + tables.group
        yield "slot", words[t.SLOT], 0, tables.spans - 1
        exact = {t.INPUT: batch * m.qkv_width, t.OUT: batch * m.q_width}
        least = {t.WEIGHT: tables.cache * k} | dict.fromkeys((t.FIRST, t.SECOND), batch * tables.cache * m.kv_width)
    else:
        k = sizes[t.WEIGHT][1] if op == t.EMBED else values[t.INPUT] // batch
        yield "start", start, 0, 0
        yield "stop", stop, 1, 1
        exact = {t.INPUT: batch, t.OUT: batch * k} if op == t.EMBED else {t.WEIGHT: batch * k, t.OUT: batch}
        least = {t.WEIGHT: m.vocab * k} if op == t.EMBED else {t.FIRST: batch * (tables.cache + 1)}
    yield "K", words[t.K], k, k
    for word, count in (exact | least).items():
        if word in values:
            yield f"values of the {t.WORDS[word]}", values[word], count, count if word in exact else 1 << 62


def _check_positions(tables: Tables, position: int | None) -> None:
    """All records that depend on it have the same position, or none has one and the launch has."""
    found, has = tables.records[:, t.POSITION], np.isin(tables.records[:, t.OP], t.POSITIONED)
    usual = found[has][0] if has.any() else -1
    _refuse(~has & (found != -1), "position is {}; allowed: -1, its op has none", found)
    past = has & ((found < -1) | (found >= tables.cache))
    _refuse(past, f"position is {{}}; allowed: up to {tables.cache - 1}", found)
    _refuse(has & (found != usual), f"position is {{}}, but others have {usual}", found)
    if position is not None:
        check_position(position, tables.cache)


def _check_coverage(tables: Tables) -> None:
    """Rows of every matrix, heads of every cache, and slots of the head are computed once each, in every layer."""
    stages = _stages(tables)
    for stage in range(2 + len(_STAGES) * tables.model.layers + 1):
        mine = np.flatnonzero(stages == stage)
        if not len(mine):
            raise TableError(f"no record is of stage {stage}")
        op, buffer = tables.records[mine[0], [t.OP, t.WEIGHT]].tolist()
        first, last = tables.records[mine][:, [t.START, t.STOP]].T
        if op == t.ATTENTION:  # a span of a head counts as a row
            rows = tables.batch * tables.model.heads * tables.spans
            first = first * tables.spans + tables.records[mine, t.SLOT] * tables.group
            last = first + tables.group
        else:
            rows = _size(tables, buffer)[0] if op in _PROJECTIONS else 1
        order = np.argsort(first, kind="stable")
        mine, edges, ends = mine[order], np.append(first[order], rows), np.insert(last[order], 0, 0)
        for i in np.flatnonzero(edges != ends):
            how = "by no record" if ends[i] < edges[i] else "twice"
            low, high = sorted((int(ends[i]), int(edges[i])))
            what = f"rows {low} to {high} of {t.OPS[op - 1]}, stage {stage}, are computed {how}"
            raise TableError(what, int(mine[min(i, len(mine) - 1)]))
    heads = np.flatnonzero(tables.records[:, t.OP] == t.HEAD)
    slots = tables.records[heads, t.SLOT]
    if len(heads) != tables.parts:
        raise TableError(f"{len(heads)} records are head; allowed: {tables.parts}, the parts that argmax compares")
    for number in heads[slots != np.argsort(np.argsort(slots, kind="stable"), kind="stable")]:
        raise TableError(f"slot is {tables.records[number, t.SLOT]}; allowed: each slot once", int(number))


def _stages(tables: Tables) -> np.ndarray:
    """Stage of every record: 0 embedding, 1 … layers, then head and argmax; [records]."""
    of_op = np.zeros(len(t.OPS) + 1, np.int64)
    of_op[list(_STAGES)] = np.arange(1, 1 + len(_STAGES))
    of_op[[t.HEAD, t.ARGMAX]] = np.array([1, 2]) + len(_STAGES) * tables.model.layers
    return of_op[tables.records[:, t.OP]] + len(_STAGES) * _layers(tables.records)


def _check_counters(tables: Tables) -> None:
    """A wait is for all records that signal its counter; all but argmax signal one that somebody waits for."""
    op, wait, target, signal = tables.records[:, [t.OP, t.WAIT, t.TARGET, t.SIGNAL]].T
    for name, counter, free in (("wait", wait, t.EMBED), ("signal", signal, t.ARGMAX)):
        least, most = (np.where(op == free, -1, end) for end in (0, tables.counters - 1))
        wrong = (counter < least) | (counter > most)
        _refuse(wrong, f"{name} is counter {{}}; allowed: {{}} to {{}}", counter, least, most)
    signals = np.bincount(signal[signal >= 0], minlength=tables.counters)[wait]  # of the counter that is waited for
    wrong = (wait >= 0) & ((target != signals) | (target < 1))
    _refuse(wrong, "waits until counter {} is {}, but {} records signal it", wait, target, signals)
    lone = ~np.isin(signal, wait) & (op != t.ARGMAX)
    _refuse(lone, "signals counter {}, for which no record waits", signal)


def _check_arrivals(tables: Tables) -> None:
    """The spans of one head in one layer share a counter that nothing else uses; other ops have none."""
    records, stages = tables.records, _stages(tables)
    found, attends = records[:, t.ARRIVALS], records[:, t.OP] == t.ATTENTION
    _refuse(~attends & (found != -1), "arrivals is counter {}; allowed: -1, its op has none", found)
    wrong = attends & ((found < 0) | (found >= tables.counters))
    _refuse(wrong, f"arrivals is counter {{}}; allowed: 0 to {tables.counters - 1}", found)
    owners: dict[int, tuple[int, int] | None] = dict.fromkeys(map(int, records[:, [t.WAIT, t.SIGNAL]].flat))
    counters: dict[tuple[int, int], int] = {}
    for number in np.flatnonzero(attends).tolist():
        owner, counter = (int(stages[number]), int(records[number, t.START])), int(found[number])
        if owners.setdefault(counter, owner) != owner or counters.setdefault(owner, counter) != counter:
            raise TableError(f"arrivals is counter {counter}; allowed: one for each head and layer alone", number)


def _check_stages(tables: Tables) -> None:
    """A record waits for all of the stage before."""
    records, stages = tables.records, _stages(tables)
    count = np.bincount(stages)
    signals = np.flatnonzero(records[:, t.SIGNAL] >= 0)
    counter = records[signals, t.SIGNAL]
    least, most = np.full(tables.counters, 1 << 30), np.full(tables.counters, -1)
    np.minimum.at(least, counter, stages[signals])
    np.maximum.at(most, counter, stages[signals])
    many = np.bincount(counter, minlength=tables.counters)
    on, before = records[:, t.WAIT], stages - 1
    wrong = (on >= 0) & ((least[on] != before) | (most[on] != before) | (many[on] != count[before]))
    _refuse(wrong, "waits for counter {}, which is not all of the stage before", on)


def _check_order(tables: Tables) -> None:
    """Runs the queues without the work; what is left when nothing can run waits for itself."""
    wait, target, signal = (tables.records[:, word].tolist() for word in (t.WAIT, t.TARGET, t.SIGNAL))
    at, ends = tables.queue[:-1].tolist(), tables.queue[1:].tolist()
    count = [0] * tables.counters
    asleep: dict[int, list[int]] = {}
    ready = deque(range(len(at)))
    while ready:
        program = ready.popleft()
        while at[program] < ends[program]:
            number = at[program]
            if wait[number] >= 0 and count[wait[number]] < target[number]:
                asleep.setdefault(wait[number], []).append(program)
                break
            at[program] += 1
            if signal[number] >= 0:
                count[signal[number]] += 1
                ready.extend(asleep.pop(signal[number], ()))
    stuck = [(at[p], p) for p in range(len(at)) if at[p] < ends[p]]
    if stuck:
        number, program = min(stuck)
        what = f"can never run: in program {program} it waits for counter {wait[number]}, which stays at "
        raise TableError(what + f"{count[wait[number]]} of {target[number]} (a cycle)", number)
