"""Refuses tables that a kernel must not run: what reads or writes out of range, races, or can never finish.

A step is a sequence of stages: the embedding, five a layer, the head, argmax. How a stage is split into records, and
which program runs which record in which order, is free; what a stage reads and writes, and that it waits for all of the
stage before, is not.
"""

from collections import deque
from collections.abc import Iterable

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
    cache, rows that no record or two records compute, spans of a head that do not share a counter of
    their own, a wait for a counter that fewer or more records signal or that is
    not that of the stage before, and records that can never run since they wait for one another (queues included).
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
    """All records; where those at the ends of every range are within it, so are those between, which are many."""
    try:
        for number in _extremes(tables.records):
            _check_record(tables, number)
    except TableError:
        for number in range(len(tables.records)):  # the first one that is at fault is named
            _check_record(tables, number)


def _extremes(records: np.ndarray) -> list[int]:
    """Of all records with the same op, buffers and K: one with the least and one with the most of all else checked."""
    _, group = np.unique(records[:, [t.OP, *_BUFFERS, t.K]], axis=0, return_inverse=True)
    group = group.reshape(-1)
    start, stop, slot = records[:, [t.START, t.STOP, t.SLOT]].astype(np.int64).T
    found: set[int] = set()
    for key in (start, stop, stop - start, start % 2, slot):
        order = np.lexsort((key, group))
        ends = np.flatnonzero(np.diff(group[order], append=-1))  # the last of each group; the next one begins another
        found.update(order[ends].tolist(), order[np.append(0, ends[:-1] + 1)].tolist())
    return sorted(found)


def _check_record(tables: Tables, number: int) -> None:
    """One record by itself: its op, its buffers, and that it stays within them."""
    words = tables.records[number].tolist()
    op = words[t.OP]
    if op not in _USED:
        raise TableError(f"op is {op}; allowed: 1 to {len(t.OPS)}", number)
    layer = _layer(words)
    for word, name in zip(_BUFFERS, _USED[op], strict=True):
        value, expected = words[word], t.buffer_number(name, layer) if name else -1
        if name and not 0 <= value < len(tables.buffers):
            allowed = f"0 to {len(tables.buffers) - 1}"
            raise TableError(f"{t.WORDS[word]} of {t.OPS[op - 1]} is buffer {value}; allowed: {allowed}", number)
        if value != expected:
            raise TableError(f"{t.WORDS[word]} of {t.OPS[op - 1]} is buffer {value}; allowed: {expected}", number)
    sizes = {word: _size(tables, words[word]) for word in _BUFFERS if words[word] >= 0}
    for name, value, least, most in _ranges(tables, op, words, sizes):
        if not least <= value <= most:
            raise TableError(f"{name} of {t.OPS[op - 1]} is {value}; allowed: {least} to {most}", number)


def _layer(words: list[int]) -> int:
    """The layer whose buffers a record names; 0 for the ops that are of none."""
    word = t.FIRST if words[t.OP] == t.ATTENTION else t.WEIGHT
    return max(0, (words[word] - len(t.SHARED)) // len(t.LAYER))


def _size(tables: Tables, buffer: int) -> tuple[int, int]:
    return tuple(tables.buffers[buffer, [t.ROWS, t.COLUMNS]].tolist())


def _ranges(
    tables: Tables, op: int, words: list[int], sizes: dict[int, tuple[int, int]]
) -> Iterable[tuple[str, int, int, int]]:
    """(what, value, least, most) of everything that bounds what a record reads and writes."""
    m, start, stop = tables.model, words[t.START], words[t.STOP]
    values = {word: rows * columns for word, (rows, columns) in sizes.items()}
    many = 1 << 62
    if op in _PROJECTIONS:
        rows, columns = sizes[t.WEIGHT]
        k, pair = words[t.K], 2 if op == t.GATE_UP else 1
        yield "K", k, columns, columns
        yield "stop", stop, start + 1, rows
        yield "start", start, 0, rows - 1
        yield "start modulo 2", start % pair, 0, 0
        yield "values of the input", values[t.INPUT], k, k
        yield "values of the output", values[t.OUT], rows // pair, rows // pair
        if t.GAIN in sizes:
            yield "values of the gain", values[t.GAIN], k, k
        if op == t.HEAD:
            yield "slot", words[t.SLOT], 0, min(values[t.FIRST], values[t.SECOND]) - 1
    elif op == t.EMBED:
        yield "start", start, 0, 0
        yield "stop", stop, 1, 1
        yield "K", words[t.K], sizes[t.WEIGHT][1], sizes[t.WEIGHT][1]
        yield "rows of the weight", sizes[t.WEIGHT][0], m.vocab, many
        yield "values of the input", values[t.INPUT], 1, 1
        yield "values of the output", values[t.OUT], words[t.K], words[t.K]
    elif op == t.ARGMAX:
        yield "start", start, 0, 0
        yield "stop", stop, 1, 1
        yield "K", words[t.K], values[t.INPUT], values[t.INPUT]
        yield "values of the weight", values[t.WEIGHT], words[t.K], words[t.K]
        yield "values of the output", values[t.OUT], 1, 1
        yield "values of first", values[t.FIRST], tables.cache + 1, many
    else:
        yield "K", words[t.K], m.head_dim, m.head_dim
        yield "start", start, 0, m.heads - 1
        yield "stop", stop, start + 1, start + 1
        yield "values of the input", values[t.INPUT], m.qkv_width, m.qkv_width
        yield "slot", words[t.SLOT], 0, tables.spans - 1
        yield "values of the output", values[t.OUT], m.q_width, m.q_width
        yield "values of the weight", values[t.WEIGHT], tables.cache * m.head_dim, many
        for word in (t.FIRST, t.SECOND):
            yield f"values of {t.WORDS[word]}", values[word], tables.cache * m.kv_width, many


def _check_positions(tables: Tables, position: int | None) -> None:
    """All records that depend on it have the same position, or none has one and the launch has."""
    inside = np.isin(tables.records[:, t.OP], t.POSITIONED)
    found = tables.records[:, t.POSITION]
    for number in np.flatnonzero(~inside & (found != -1)):
        raise TableError(f"position is {found[number]}; allowed: -1, its op has none", int(number))
    for number in np.flatnonzero(inside & ((found < -1) | (found >= tables.cache))):
        raise TableError(f"position is {found[number]}; allowed: up to {tables.cache - 1}", int(number))
    usual = found[inside][0] if inside.any() else -1
    for number in np.flatnonzero(inside & (found != usual)):
        raise TableError(f"position is {found[number]}, but others have {usual}", int(number))
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
            rows = tables.model.heads * tables.spans
            first = first * tables.spans + tables.records[mine, t.SLOT]
            last = first + 1
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
    records, layers = tables.records, tables.model.layers
    of_op = np.zeros(len(t.OPS) + 1, np.int64)
    of_op[list(_STAGES)] = np.arange(1, 1 + len(_STAGES))
    of_op[[t.HEAD, t.ARGMAX]] = np.array([1, 2]) + len(_STAGES) * layers
    names_layer = np.where(records[:, t.OP] == t.ATTENTION, records[:, t.FIRST], records[:, t.WEIGHT])
    return of_op[records[:, t.OP]] + len(_STAGES) * np.maximum(0, (names_layer - len(t.SHARED)) // len(t.LAYER))


def _check_counters(tables: Tables) -> None:
    """A wait is for all records that signal its counter; all but argmax signal one that somebody waits for."""
    records = tables.records
    for word, free in ((t.WAIT, t.EMBED), (t.SIGNAL, t.ARGMAX)):
        least = np.where(records[:, t.OP] == free, -1, 0)
        most = np.where(records[:, t.OP] == free, -1, tables.counters - 1)
        for number in np.flatnonzero((records[:, word] < least) | (records[:, word] > most)):
            allowed = f"{least[number]} to {most[number]}"
            raise TableError(f"{t.WORDS[word]} is counter {records[number, word]}; allowed: {allowed}", int(number))
    signals = np.bincount(records[records[:, t.SIGNAL] >= 0, t.SIGNAL], minlength=tables.counters)
    for number in np.flatnonzero(records[:, t.WAIT] >= 0):
        counter, target = records[number, [t.WAIT, t.TARGET]].tolist()
        if target != signals[counter] or target < 1:
            what = f"waits until counter {counter} is {target}, but {signals[counter]} records signal it"
            raise TableError(what, int(number))
    waited = np.isin(records[:, t.SIGNAL], records[:, t.WAIT])
    for number in np.flatnonzero(~waited & (records[:, t.OP] != t.ARGMAX)):
        raise TableError(f"signals counter {records[number, t.SIGNAL]}, for which no record waits", int(number))


def _check_arrivals(tables: Tables) -> None:
    """The spans of one head in one layer share a counter that nothing else uses; other ops have none."""
    records, stages = tables.records, _stages(tables)
    found, attends = records[:, t.ARRIVALS], records[:, t.OP] == t.ATTENTION
    for number in np.flatnonzero(np.where(attends, (found < 0) | (found >= tables.counters), found != -1)):
        allowed = f"0 to {tables.counters - 1}" if attends[number] else "-1, its op has none"
        raise TableError(f"arrivals is counter {found[number]}; allowed: {allowed}", int(number))
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
    waits = np.flatnonzero(records[:, t.WAIT] >= 0)
    on, before = records[waits, t.WAIT], stages[waits] - 1
    wrong = (least[on] != before) | (most[on] != before) | (many[on] != count[before])
    for number in waits[wrong]:
        what = f"waits for counter {records[number, t.WAIT]}, which is not all of the stage before"
        raise TableError(what, int(number))


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
