"""The tables that a persistent kernel reads a decoder step from, built in two ways that must agree.

| table   | what                                                                                                   |
|---------|--------------------------------------------------------------------------------------------------------|
| buffers | int64 [buffers, 4]: address, rows, columns, bytes of a value                                           |
| records | int32 [records, 16]: one piece of work each, in the order of the queues (words: `WORDS`)               |
| queue   | int32 [programs + 1]: program p runs the records queue[p] to queue[p + 1] - 1, one after the other     |

A record waits until its wait counter has reached its target, works, then adds one to its signal counter. Counters are
zero before a launch, and the last record (argmax, the only one that signals nobody) leaves them so. Of the words, only
`POSITION` depends on the position of the token; where it is -1, the kernel has the position from its launch.

`lower` is vectorised, without a loop over records; `lower_slowly` builds the same tables object by object, as a
straightforward host program does.
Source of the design: AutoMegaKernel's three tables (buffers, instructions, queues) and Stanford MegaKernels' fixed-size
instructions with counters.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from labkit.kernels.checks import check_one_of
from labkit.kernels.decoder.model import Decoder

OPS = ("qkv", "output", "gate_up", "down", "head", "embed", "attention", "argmax")  # op code - 1
QKV, OUTPUT, GATE_UP, DOWN, HEAD, EMBED, ATTENTION, ARGMAX = range(1, 9)
POSITIONED = (ATTENTION, ARGMAX)  # ops whose work depends on the position

# Words of a record. Buffers by number, -1: none. first, second: of attention the caches of keys and values, of head the
# best logit and its token of each part, of argmax (first) the tokens by position. gain: of attention the results of
# spans. K: values of a row of the weight, of attention the head dimension, of argmax the parts. start, stop: rows of
# the weight (gate and up interleaved), or heads, of all sequences. slot: which part of the head, or which span of the
# cache, this is. arrivals: of attention the counter of these heads' spans, which the last one to arrive puts together.
WORDS = (
    "op", "weight", "input", "output", "gain", "first", "second", "K",
    "start", "stop", "slot", "position", "wait", "target", "signal", "arrivals",
)  # fmt: skip
OP, WEIGHT, INPUT, OUT, GAIN, FIRST, SECOND, K, START, STOP, SLOT, POSITION, WAIT, TARGET, SIGNAL, ARRIVALS = range(16)
MOMENTS = ("begun", "released", "done")  # of a record, which a launch can write down
ADDRESS, ROWS, COLUMNS, ITEMSIZE = range(4)  # columns of `buffers`

SHARED = (
    "token", "tokens", "hidden", "qkv", "spans", "attention", "ffn", "logits", "best", "best_token", "rope",
    "embedding", "final_gain", "head",
)  # fmt: skip
LAYER = ("gain_1", "qkv_weight", "k_cache", "v_cache", "output_weight", "gain_2", "gate_up_weight", "down_weight")
_ID = {name: i for i, name in enumerate(SHARED + LAYER)}  # of a layer's buffers, those of layer 0

SPAN_PADDING = 4  # values beyond a span's result: the logarithm, and the rest of its 16 bytes
SCHEDULES = ("round-robin", "longest-first")
TABLES = ("buffers", "records", "queue")
POSITION_FROM = ("record", "launch", "device")  # where the step reads the position


@dataclass(frozen=True)
class Tables:
    """The three tables of a decoder step and how many counters they use. cache: positions that fit; group: query heads
    of a record of attention."""

    model: Decoder
    cache: int
    buffers: np.ndarray
    records: np.ndarray
    queue: np.ndarray
    counters: int
    group: int = 1

    @property
    def parts(self) -> int:
        """Records that the head is split into."""
        return int(self.buffers[_ID["best"], COLUMNS])

    @property
    def batch(self) -> int:
        """Sequences that a step takes on by a token each."""
        return int(self.buffers[_ID["token"], ROWS])

    @property
    def spans(self) -> int:
        """Records that the attention of a head is split into."""
        return int(self.buffers[_ID["spans"], ROWS]) // (self.model.heads * self.batch)

    @property
    def nbytes(self) -> int:
        """Bytes of all three tables."""
        return self.buffers.nbytes + self.records.nbytes + self.queue.nbytes


@dataclass(frozen=True)
class Lowering:
    """What is lowered, and how.

    programs: queues. schedule: "round-robin" (records dealt in order), "longest-first" (the longest record first, to
    the program that has the least so far). cache: positions. position: of the token; None: the launch says it. rows:
    of a tile, of which no record has a part. parts: records of a projection at most; None: as many as programs.
    itemsize: bytes of a weight. span: positions of the cache that one record of attention reads at most; None: all.
    batch: sequences that a step takes on by a token each, all of them at one position. group: query heads of one kv
    head that a record of attention takes on, one of `groups`.
    ValueError for what is not allowed.
    """

    model: Decoder
    programs: int
    schedule: str = "round-robin"
    cache: int = 1024
    position: int | None = 0
    rows: int = 4
    parts: int | None = None
    itemsize: int = 2
    span: int | None = None
    batch: int = 1
    group: int = 1

    def __post_init__(self) -> None:
        for name in ("programs", "cache", "parts", "span", "batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; allowed: at least 1")
        check_one_of("schedule", self.schedule, SCHEDULES)
        if self.rows not in (2, 4, 8, 16, 32, 64):
            raise ValueError(f"rows is {self.rows}; allowed: a power of two from 2 to 64")
        check_one_of("itemsize", self.itemsize, (2, 4))
        check_one_of("group", self.group, groups(self.model, self.itemsize))
        if self.position is not None:
            check_position(self.position, self.cache)

    def split(self, rows: int) -> int:
        """Records that a projection of so many rows is split into."""
        return min(self.parts or self.programs, -(-rows // self.rows))

    @property
    def positions(self) -> int:
        """Positions of the cache that one record of attention reads at most."""
        return min(self.span or self.cache, self.cache)

    @property
    def spans(self) -> int:
        """Records that the attention of a group is split into."""
        return -(-self.cache // self.positions)

    @property
    def heads(self) -> int:
        """Query heads of all sequences."""
        return self.model.heads * self.batch

    @property
    def groups(self) -> int:
        """Groups of query heads of all sequences, each of which has records of its own."""
        return self.heads // self.group

    def projections(self) -> dict[int, tuple[int, int]]:
        """Op -> rows and values of a row of the matrix that it multiplies; gate and up are one, interleaved."""
        m = self.model
        return {
            QKV: (m.qkv_width, m.hidden),
            OUTPUT: (m.hidden, m.q_width),
            GATE_UP: (2 * m.ffn, m.hidden),
            DOWN: (m.hidden, m.ffn),
            HEAD: (m.vocab, m.hidden),
        }

    def weight(self, op: int) -> int:
        """Values read by a record of this op for each of its rows (or heads) and K: its cost, over (stop - start) K.

        Attention is taken with full spans, so that the schedule does not change with the position.
        """
        return {ATTENTION: 2 * self.positions // self.group, ARGMAX: 2}.get(op, 1)


def groups(model: Decoder, itemsize: int) -> list[int]:
    """How many query heads one record of attention can take on, ascending: what matrix instructions can multiply."""
    most = model.group if itemsize == 2 and model.head_dim >= 32 else 1
    return [n for n in range(1, most + 1) if most % n == 0 and not n & (n - 1)]


def check_position(position: int, cache: int) -> None:
    """ValueError for a position that the cache has no room for."""
    if not 0 <= position < cache:
        raise ValueError(f"position is {position}; allowed: 0 to {cache - 1}, the cache's last")


def buffer_shapes(how: Lowering) -> dict[str, tuple[int, int, int]]:
    """Name -> rows, columns, bytes of a value, in the table's order; a layer's names end in its number ("gain_1.0").

    Activations and the rotary table (cosines, then sines of a position) are float32; tokens int32. What a sequence has
    of its own is a row, or as many rows as it has for one sequence. spans: for each head and span of the cache the
    attention over it, then the logarithm of its sum of weights, and padding.
    """
    m, parts, size, batch = how.model, how.split(how.model.vocab), how.itemsize, how.batch
    shared = (
        (batch, 1, 4), (batch, how.cache + 1, 4), (batch, m.hidden, 4), (batch, m.qkv_width, 4),
        (how.heads * how.spans, m.head_dim + SPAN_PADDING, 4), (batch, m.q_width, 4), (batch, m.ffn, 4),
        (batch, m.vocab, 4), (batch, parts, 4), (batch, parts, 4), (how.cache, m.head_dim, 4),
        (m.vocab, m.hidden, size), (1, m.hidden, size), (m.vocab, m.hidden, size),
    )  # fmt: skip
    found = dict(zip(SHARED, shared, strict=True))
    for i in range(m.layers):
        found |= {f"{name}.{i}": shape for name, shape in zip(LAYER, _layer_shapes(how), strict=True)}
    return found


def buffer_number(name: str, layer: int = 0) -> int:
    """Number of a buffer by its name without layer. KeyError for a name that none has."""
    return _ID[name] + (layer * len(LAYER) if name in LAYER else 0)


def _layer_shapes(how: Lowering) -> list[tuple[int, int, int]]:
    m, gain = how.model, (1, how.model.hidden)
    cache, of = (how.batch * m.kv_heads * how.cache, m.head_dim), how.projections()
    return [(*shape, how.itemsize) for shape in (gain, of[QKV], cache, cache, of[OUTPUT], gain, of[GATE_UP], of[DOWN])]


# Way 2: vectorised


def lower(how: Lowering, addresses: np.ndarray | None = None) -> Tables:
    """The tables of a decoder step.

    addresses: int64 [buffers], in the order of `buffer_shapes`; None: zeros, to be filled in. ValueError for another
    number of them.
    """
    layer, per_layer = _layer_records(how), _counters_of_a_layer(how)
    layers = how.model.layers
    many = np.tile(layer, (layers, 1, 1))  # [layers, records of a layer, words]
    number = np.arange(layers, dtype=np.int32)[:, None, None]
    ids = many[:, :, WEIGHT : SECOND + 1]
    many[:, :, WEIGHT : SECOND + 1] = np.where(ids >= len(SHARED), ids + number * len(LAYER), ids)
    many[:, :, [WAIT, SIGNAL]] += number * per_layer
    many[:, layer[:, OP] == ATTENTION, ARRIVALS] += number[:, :, 0] * per_layer
    many[0, layer[:, OP] == QKV, TARGET] = 1  # the first layer waits for the embedding alone
    last = 1 + layers * per_layer  # the head's counter
    embed = _block(EMBED, 1, weight="embedding", input="token", output="hidden", K=how.model.hidden, signal=0)
    head = _projection(how, HEAD, "head", "hidden", "logits", "final_gain", wait=last - 1, signal=last)
    head[:, [FIRST, SECOND]] = _ID["best"], _ID["best_token"]
    head[:, SLOT] = np.arange(len(head))
    head[:, TARGET] = how.split(how.model.hidden)
    argmax = _block(
        ARGMAX, 1, weight="best_token", input="best", output="token", first="tokens", K=len(head),
        wait=last, target=len(head),
    )  # fmt: skip
    records = np.concatenate([embed, many.reshape(-1, len(WORDS)), head, argmax])
    if how.position is not None:
        records[np.isin(records[:, OP], POSITIONED), POSITION] = how.position
    costs = values_read(how, records)
    assign = _longest_first if how.schedule == "longest-first" else _round_robin
    program = assign(costs, how.programs)
    queue = np.zeros(how.programs + 1, np.int32)
    queue[1:] = np.bincount(program, minlength=how.programs).cumsum()
    records = np.ascontiguousarray(records[np.argsort(program, kind="stable")])
    return Tables(how.model, how.cache, _buffers(how, addresses), records, queue, last + 1, how.group)


def counters(how: Lowering) -> int:
    """Counters that a step needs: the embedding's, those of the layers, the head's."""
    return 2 + how.model.layers * _counters_of_a_layer(how)


def _counters_of_a_layer(how: Lowering) -> int:
    return 5 + how.groups  # qkv, arrivals of each group, attention, output, gate_up, down


def _layer_records(how: Lowering) -> np.ndarray:
    """Records of layer 0, in the order of execution. Counter 0 is the embedding's, a layer's own begin at 1."""
    m, done = how.model, 2 + how.groups
    qkv = _projection(how, QKV, "qkv_weight", "hidden", "qkv", "gain_1", wait=0, signal=1)
    attention = _block(
        ATTENTION, how.groups * how.spans, weight="rope", input="qkv", output="attention", gain="spans",
        first="k_cache", second="v_cache", K=m.head_dim, wait=1, target=len(qkv), signal=done,
    )  # fmt: skip
    group, span = np.divmod(np.arange(len(attention), dtype=np.int32), how.spans)
    attention[:, START], attention[:, STOP] = group * how.group, (group + 1) * how.group
    attention[:, SLOT], attention[:, ARRIVALS] = span, 2 + group
    output = _projection(how, OUTPUT, "output_weight", "attention", "hidden", None, wait=done, signal=done + 1)
    gate_up = _projection(how, GATE_UP, "gate_up_weight", "hidden", "ffn", "gain_2", wait=done + 1, signal=done + 2)
    down = _projection(how, DOWN, "down_weight", "ffn", "hidden", None, wait=done + 2, signal=done + 3)
    qkv[:, TARGET], output[:, TARGET] = len(down), len(attention)
    gate_up[:, TARGET], down[:, TARGET] = len(output), len(gate_up)
    return np.concatenate([qkv, attention, output, gate_up, down])


def _block(op: int, count: int, **words: Any) -> np.ndarray:
    """`count` records of one op; buffers by name, words that are not given -1, but start 0 and stop 1."""
    records = np.full((count, len(WORDS)), -1, np.int32)
    records[:, [OP, START, STOP]] = op, 0, 1
    for name, value in words.items():
        records[:, WORDS.index(name)] = _ID[value] if isinstance(value, str) else value
    return records


def _projection(
    how: Lowering, op: int, weight: str, source: str, to: str, gain: str | None, wait: int, signal: int
) -> np.ndarray:
    rows, k = how.projections()[op]
    count = how.split(rows)
    edges = np.minimum(np.arange(count + 1) * -(-rows // how.rows) // count * how.rows, rows)
    words = {
        "weight": weight,
        "input": source,
        "output": to,
        "gain": gain or -1,
        "K": k,
        "wait": wait,
        "signal": signal,
    }
    records = _block(op, count, **words)
    records[:, START], records[:, STOP] = edges[:-1], edges[1:]
    return records


def values_read(how: Lowering, records: np.ndarray) -> np.ndarray:
    """Values that each record reads; [records], int64."""
    weight = np.array([how.weight(op) for op in range(len(OPS) + 1)])
    return (records[:, STOP] - records[:, START]).astype(np.int64) * records[:, K] * weight[records[:, OP]]


def _round_robin(costs: np.ndarray, programs: int) -> np.ndarray:
    return np.arange(len(costs)) % programs


def _longest_first(costs: np.ndarray, programs: int) -> np.ndarray:
    """Program of each record, by the greedy rule; of programs with the same load, the first.

    Records of one cost c are taken at once: program p with load L takes its next ones at L, L + c, L + 2c …, so the n
    that the rule takes one after the other are the n smallest of these, over all programs.
    """
    program, load = np.empty(len(costs), np.int64), np.zeros(programs, np.int64)
    for cost in np.unique(costs)[::-1]:
        which = np.flatnonzero(costs == cost)
        n = len(which)
        depth = min(n, int((load.max() - load.min()) // cost) - (-n // programs))
        keys = load[:, None] + cost * np.arange(depth)
        program[which] = np.argsort(keys, axis=None, kind="stable")[:n] // depth
        load += cost * np.bincount(program[which], minlength=programs)
    return program


def _buffers(how: Lowering, addresses: np.ndarray | None) -> np.ndarray:
    shapes = list(buffer_shapes(replace(how, model=replace(how.model, layers=1))).values())
    shared, layer = np.array(shapes[: len(SHARED)], np.int64), np.array(shapes[len(SHARED) :], np.int64)
    sizes = np.concatenate([shared, np.tile(layer, (how.model.layers, 1))])
    if addresses is None:
        addresses = np.zeros(len(sizes), np.int64)
    if len(addresses) != len(sizes):
        raise ValueError(f"addresses has {len(addresses)} entries; allowed: {len(sizes)}, one a buffer")
    return np.column_stack([np.asarray(addresses, np.int64), sizes])


# Way 1: object by object


@dataclass
class Record:
    """One record, by words."""

    op: int
    weight: int = -1
    input: int = -1
    output: int = -1
    gain: int = -1
    first: int = -1
    second: int = -1
    K: int = -1
    start: int = 0
    stop: int = 1
    slot: int = -1
    position: int = -1
    wait: int = -1
    target: int = -1
    signal: int = -1
    arrivals: int = -1


def lower_slowly(how: Lowering, addresses: np.ndarray | None = None) -> Tables:
    """The same tables as `lower`, record by record in Python; otherwise as `lower`."""
    records = records_slowly(how)
    queues = queues_slowly(how, records)
    packed = pack_slowly(records, [number for numbers in queues for number in numbers])
    buffers = buffers_slowly(how, addresses)
    return Tables(how.model, how.cache, buffers, packed, queue_slowly(queues), counters(how), how.group)


def buffers_slowly(how: Lowering, addresses: np.ndarray | None = None) -> np.ndarray:
    """The table of buffers, entry by entry; arguments and errors as of `lower`."""
    shapes = buffer_shapes(how)
    if addresses is not None and len(addresses) != len(shapes):
        raise ValueError(f"addresses has {len(addresses)} entries; allowed: {len(shapes)}, one a buffer")
    buffers = np.empty((len(shapes), 4), np.int64)
    for i, shape in enumerate(shapes.values()):
        for column, value in enumerate((0 if addresses is None else addresses[i], *shape)):
            buffers[i, column] = value
    return buffers


def pack_slowly(records: Sequence[Record], order: Sequence[int]) -> np.ndarray:
    """The table of records, word by word. order: numbers of records, as the queues have them."""
    packed = np.empty((len(records), len(WORDS)), np.int32)
    for row, number in enumerate(order):
        for word, name in enumerate(WORDS):
            packed[row, word] = getattr(records[number], name)
    return packed


def queue_slowly(queues: Sequence[Sequence[int]]) -> np.ndarray:
    """The table of queues. queues: numbers of records, a list for each program."""
    queue = np.zeros(len(queues) + 1, np.int32)
    for program, numbers in enumerate(queues):
        queue[program + 1] = queue[program] + len(numbers)
    return queue


def records_slowly(how: Lowering) -> list[Record]:
    """Every record in the order of execution, each an object."""
    return list(_records(how))


def _records(how: Lowering) -> Iterator[Record]:
    """Every record in the order of execution."""
    m, ids = how.model, {name: i for i, name in enumerate(buffer_shapes(how))}
    position = -1 if how.position is None else how.position
    before, target, counter = 0, 1, 1  # the counter of the stage before, its target, the next free one
    yield Record(EMBED, ids["embedding"], ids["token"], ids["hidden"], K=m.hidden, signal=0)
    for i in range(m.layers):
        at = {name: ids[f"{name}.{i}"] for name in LAYER}
        count = 0
        for record in _pieces(how, QKV, at["qkv_weight"], ids["hidden"], ids["qkv"], at["gain_1"]):
            record.wait, record.target, record.signal = before, target, counter
            count += 1
            yield record
        caches = {"first": at["k_cache"], "second": at["v_cache"], "K": m.head_dim, "position": position}
        done = counter + 1 + how.groups
        for group in range(how.groups):
            own = {"start": group * how.group, "stop": (group + 1) * how.group, "arrivals": counter + 1 + group}
            own |= {"wait": counter, "target": count}
            for span in range(how.spans):
                yield Record(
                    ATTENTION, ids["rope"], ids["qkv"], ids["attention"], ids["spans"], **caches, **own,
                    slot=span, signal=done,
                )  # fmt: skip
        before, target = done, how.groups * how.spans
        for op, weight, source, to, gain in (
            (OUTPUT, "output_weight", "attention", "hidden", -1),
            (GATE_UP, "gate_up_weight", "hidden", "ffn", at["gain_2"]),
            (DOWN, "down_weight", "ffn", "hidden", -1),
        ):
            count = 0
            for record in _pieces(how, op, at[weight], ids[source], ids[to], gain):
                record.wait, record.target, record.signal = before, target, before + 1
                count += 1
                yield record
            before, target = before + 1, count
        counter = before + 1
    count = 0
    for record in _pieces(how, HEAD, ids["head"], ids["hidden"], ids["logits"], ids["final_gain"]):
        record.wait, record.target, record.signal = before, target, counter
        record.first, record.second, record.slot = ids["best"], ids["best_token"], count
        count += 1
        yield record
    last = {"K": count, "position": position, "wait": counter, "target": count}
    yield Record(ARGMAX, ids["best_token"], ids["best"], ids["token"], first=ids["tokens"], **last)


def _pieces(how: Lowering, op: int, weight: int, source: int, to: int, gain: int) -> Iterator[Record]:
    rows, k = how.projections()[op]
    tiles, count = -(-rows // how.rows), how.split(rows)
    for i in range(count):
        start, stop = (min(j * tiles // count * how.rows, rows) for j in (i, i + 1))
        yield Record(op, weight, source, to, gain, K=k, start=start, stop=stop)


def queues_slowly(how: Lowering, records: Sequence[Record]) -> list[list[int]]:
    """Numbers of records, a list for each program."""
    queues: list[list[int]] = [[] for _ in range(how.programs)]
    if how.schedule == "round-robin":
        for number in range(len(records)):
            queues[number % how.programs].append(number)
        return queues
    loads = [(0, program) for program in range(how.programs)]
    costs = [(r.stop - r.start) * r.K * how.weight(r.op) for r in records]
    for number in sorted(range(len(records)), key=lambda i: -costs[i]):
        load, program = heapq.heappop(loads)
        queues[program].append(number)
        heapq.heappush(loads, (load + costs[number], program))
    return [sorted(numbers) for numbers in queues]  # in the order of execution: no queue waits for itself


# The position


def position_words(tables: Tables) -> np.ndarray:
    """Which words of `tables.records`, flattened, depend on the position; int64, ascending."""
    return np.flatnonzero(np.isin(tables.records[:, OP], POSITIONED)) * len(WORDS) + POSITION


class Change(NamedTuple):
    """Words of one field that differ. field: the word's or column's name; op: of the records, else empty."""

    table: str
    field: str
    op: str
    words: int
    bytes: int


def changes(before: Tables, after: Tables) -> list[Change]:
    """Which words differ between two tables of one model, by field and op; words are of a table's dtype.

    ValueError if the tables differ in shape.
    """
    columns = {"buffers": ("address", "rows", "columns", "itemsize"), "records": WORDS, "queue": ("first",)}
    found = []
    for table in TABLES:
        a, b = (getattr(tables, table) for tables in (before, after))
        if a.shape != b.shape:
            raise ValueError(f"{table} is {a.shape} before and {b.shape} after; allowed: one shape")
        ops = b[:, OP] if table == "records" else np.zeros(len(b), int)
        differs = (a != b).reshape(len(b), -1)
        for op in np.unique(ops):
            for column, words in enumerate(differs[ops == op].sum(0).tolist()):
                name = OPS[op - 1] if op else ""
                if words:
                    found.append(Change(table, columns[table][column], name, words, words * b.itemsize))
    return found


def changes_of_a_token(how: Lowering, position: int = 0) -> list[Change]:
    """`changes` of the tables from a position to the next one; none where the launch says the position.

    ValueError if the cache has no room for the next position.
    """
    if how.position is None:
        return changes(lower(how), lower(how))
    return changes(*(lower(replace(how, position=p)) for p in (position, position + 1)))


def counts(tables: Tables) -> dict[str, int]:
    """records, buffers, programs, counters, bytes of each table, and words that change from one token to the next."""
    words = position_words(tables)
    return {
        "records": len(tables.records),
        "buffers": len(tables.buffers),
        "programs": len(tables.queue) - 1,
        "counters": tables.counters,
        "buffer_bytes": tables.buffers.nbytes,
        "record_bytes": tables.records.nbytes,
        "queue_bytes": tables.queue.nbytes,
        "changed_words": int((tables.records.reshape(-1)[words] >= 0).sum()),
    }
