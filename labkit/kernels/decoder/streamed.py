"""The decoder step of `step`, by the same tables, with weights that wait for nobody and results that nobody signals.

| what                    | hypothesis                                                                                 |
|-------------------------|--------------------------------------------------------------------------------------------|
| a warp that copies      | weights depend on nothing, so the copy engine (TMA) brings those of a program's records,   |
|                         | one after the other, into a ring in shared memory: through every wait, through attention,  |
|                         | until the ring is full                                                                     |
| one matrix of all       | every matrix lies in one allocation, as rows of the model's width: one descriptor for all  |
| few stages on their way | what others wait for goes through the same queues as the copies: with as many on their way |
|                         | as the ring holds, a result arrives later                                                  |
| results as own flags    | who needs results reads them until none is blank: no counter, no fence before one, and no  |
|                         | second look-up after it. A step has two sets: it makes the places that it has filled blank |
|                         | in the other one, for the next step                                                        |
| a count as a hint       | the widest result is 32 KB: it is not read before a counter, added to without a fence,     |
|                         | says that it may be there                                                                  |
| a span's blocks ahead   | keys and values of the first `KEPT` blocks of positions are on their way before the wait   |
| heads by spans          | results of spans are put together by several of their programs, a query head each          |
| the same columns        | a thread has the same columns of every row, and x there of all sequences in registers:     |
|                         | nothing of x passes through shared memory                                                  |
| sums by halves          | with each exchange a lane keeps half of its sums: 31 exchanges for 32 rows and sequences   |
| several sequences       | weights are read once for all of them; more warps have the registers for x                 |

A stage of the ring is `STAGE` rows of the width: so many rows of a matrix, or fewer of the one that has `SLICES` times
its columns. Sums are fp32, in an order that depends on nothing but the shape and the number of warps; those of
attention depend on the span.

A stage of the step has the number of the counter that its records signal in `step`, and a slot for its results
(`_slot`); those that it reads are in the slot of the counter that it waits for. A value is stored once, by one thread,
as one word: whoever reads something else than `BLANK`, the bits of a NaN that arithmetic does not give, has the result.
Every program has a record of every stage but attention, so that it has seen all of the residual stream before it adds
to it.

Tried on an H200 (Llama-3.2-1B, µs a step from positions 16, 512 and 1976, graphs of 8 steps, one process; `step` takes
799, 855 and 904, of two sequences 1156, 1215 and 1268, of four 1612, 1769 and 1855):

| form                                                          | one           | two            | four             |
|---------------------------------------------------------------|---------------|----------------|------------------|
| a warp has whole rows, and all of x, or of the widest a slice | 676, 722, 765 |                |                  |
| a thread has the same columns of every row: as it is          | 668, 712, 748 | 777, 835, 887  | 969, 1041, 1174  |
| … 8 warps instead of 4 for one, 4 instead of 8 for two        | 703, 756, 785 | 846, 918, 1169 |                  |
| … eight spans a head: two records of attention a program      |               | 767, 920, 974  |                  |
| … two heads a record: two records of attention a program      |               |                | 1011, 1120, 1220 |
| … two copies on their way                                     |               | 829, 883, 936  | 988, 1055, 1190  |
| … 5 stages instead of 6                                       |               |                | 973, 1044, 1166  |
| … counters as a hint before every stage                       |               | 793, 850, 901  | 966, 1038, 1161  |
| … without any wait, which is wrong                            |               | 663, 689, 734  | 854, 893, 997    |

An earlier form, in which several threads read the same results, 658, 720 and 758; of it: with counters and fences 752,
827 and 854; with 6 stages instead of 7 670, 733 and 772; with counters, all of the ring on its way 772, 844 and 868;
residuals waited for in every tile, and queries, keys and values one after the other, 30 to 50 more; four heads a record
and spans of 128 767, 848 and 899 (it spills), two heads and spans of 128 674, 824 and 877. Without any wait 618, 640
and 672, 6 stages.

What is left. Of one sequence (that earlier form, 16 layers and the head, position 16): qkv 4.6 µs, attention 4.5,
output 3.0, gate and up 13.9, down 9.0, the head 116, where reading takes 2.7, 0, 1.8, 14.4, 7.2 and 113. From the end
of a layer until gate and up may begin is 13.3 µs, in which qkv, output and a full ring are 11.1 of reading; the last
program of gate and up ends 1.9 after the median one. Of four it is arithmetic: a warp has 582 instructions a stage of
gate and up, of which 256 multiply, and two warps share what issues them.

Sources: step.py, Stanford MegaKernels (a warp that loads into pages of shared memory), gguf/specialised.py (sums as
their own flags). For Hopper, whose instructions they are; Gluon has no interpreter.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from labkit.kernels.checks import check_one_of
from labkit.kernels.decoder import tables as t
from labkit.kernels.decoder.model import Decoder, decoder
from labkit.kernels.decoder.step import DTYPES, Memory, Uploaded, _buffer, check_position_from, upload
from labkit.kernels.decoder.tables import Lowering, buffer_shapes, lower
from labkit.kernels.launch import Launch
from labkit.kernels.target import check_hopper, multiprocessors

SLICES = 4  # rows of the width that a row of the widest matrix is
STAGE = 8  # rows of the width
ROOM = {4: 224 << 10, 8: 216 << 10}  # by warps: bytes of shared memory that the ring may take
MOST_VALUES = 128  # of x, in registers of a thread
WIDTHS = (256, 512, 1024, 2048)  # of which x fits into registers
BATCHES = (1, 2, 4)
MOST_BLOCKS = 16  # of positions in a span: the code of each stands by itself
KEPT = gl.constexpr(4)  # blocks of positions on their way
LOWEST = gl.constexpr(-1e30)  # of a place without a position yet, so that no difference is NaN
BLANK = gl.constexpr(-1)
COPYING = 40  # registers of a thread that copies
MATRICES = ("head", "qkv_weight", "output_weight", "gate_up_weight", "down_weight")


@gluon.jit
def _copy(
    W, base, records, begin, end, buffers, ring,
    DTYPE: gl.constexpr, WIDTH: gl.constexpr, STAGE: gl.constexpr, STAGES: gl.constexpr, FLIGHT: gl.constexpr,
):  # fmt: skip
    """The warp that copies: all rows of all projections of the program's queue, as soon as a stage is free."""
    room, full, empty = ring
    ROW_BYTES: gl.constexpr = WIDTH * DTYPE.primitive_bitwidth // 8
    i = 0
    for number in range(begin, end):
        record = records + number * len(t.WORDS)
        op = gl.load(record)
        if op <= t.HEAD:
            flight = FLIGHT + gl.where(op == t.HEAD, 1, 0)  # while the head is read, nobody waits
            address = gl.load(buffers + gl.load(record + t.WEIGHT) * 4)
            slices = gl.load(record + t.K) // WIDTH
            first = ((address - base) // ROW_BYTES).to(gl.int32)
            stop = first + gl.load(record + t.STOP) * slices
            for row in range(first + gl.load(record + t.START) * slices, stop, STAGE):
                s = i % STAGES
                mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
                if i >= flight:
                    mbarrier.wait(full.index((i - flight) % STAGES), ((i - flight) // STAGES) & 1)
                mbarrier.expect(full.index(s), STAGE * ROW_BYTES)
                tma.async_copy_global_to_shared(W, [row, 0], full.index(s), room.index(s))
                i += 1


@gluon.jit
def _slot(counter, GROUPS: gl.constexpr):
    """Which slot a stage's results lie in, of the number of its counter: counters of spans have none."""
    return counter - GROUPS * ((counter + GROUPS + 3) // (GROUPS + 5))


@gluon.jit
def _missing(values):
    """1 if one of some values has not been stored yet, else 0, for all threads.

    No element may lie in two threads, that each have read it: what one of them has seen, the other may have missed.
    """
    found = gl.where(values.to(gl.int32, bitcast=True) == BLANK, 1, 0)
    for _ in gl.static_range(len(values.shape)):
        found = gl.max(found, len(found.shape) - 1)
    return found


@gluon.jit
def _arrived(pointers, error, number, limit):
    """What lies at some pointers, as soon as all of it has been stored; and the polls that are left to later ones."""
    values = gl.load(pointers, volatile=True)
    missing, polls = _missing(values), 0
    while (missing > 0) & (polls < limit):
        values = gl.load(pointers, volatile=True)
        missing = _missing(values)
        polls += 1
    if missing > 0:
        gl.store(error, number + 1)
    return values, gl.where(missing > 0, 0, limit)


@gluon.jit
def _two(first, second):
    return gl.load(first, volatile=True), gl.load(second, volatile=True)


@gluon.jit
def _both_arrived(first, second, error, number, limit):
    """`_arrived` of two, asked for together."""
    a, b = _two(first, second)
    missing, polls = _missing(a) + _missing(b), 0
    while (missing > 0) & (polls < limit):
        a, b = _two(first, second)
        missing = _missing(a) + _missing(b)
        polls += 1
    if missing > 0:
        gl.store(error, number + 1)
    return a, b, gl.where(missing > 0, 0, limit)


@gluon.jit
def _blank(places):
    """A blank for each of some places."""
    return gl.full(places.shape, BLANK, gl.int32, places.type.layout).to(gl.float32, bitcast=True)


@gluon.jit
def _leave(pointers, other, values, mask):
    """Store results, which others wait for, and make their places blank in the set of the next step."""
    gl.store(pointers, values, mask=mask)
    gl.store(pointers + other, _blank(pointers), mask=mask)


@gluon.jit
def _from_lane(values, DISTANCE: gl.constexpr):
    """What the lane has whose number differs by DISTANCE, a power of two."""
    distance = gl.full(values.shape, DISTANCE, gl.int32, values.type.layout)
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [values, distance], gl.float32, False, 1
    )


@gluon.jit
def _halved(low, high, DISTANCE: gl.constexpr):
    """Sums over pairs of lanes whose numbers differ by DISTANCE: of low in one of the two, of high in the other."""
    distance = gl.full(low.shape, DISTANCE, gl.int32, low.type.layout)
    return gl.inline_asm_elementwise(
        """{
        .reg .pred upper;
        .reg .b32 bit;
        .reg .f32 mine, theirs;
        mov.u32 bit, %laneid;
        and.b32 bit, bit, $3;
        setp.ne.u32 upper, bit, 0;
        selp.f32 mine, $2, $1, upper;
        selp.f32 theirs, $1, $2, upper;
        shfl.sync.bfly.b32 theirs, theirs, $3, 0x1f, 0xffffffff;
        add.f32 $0, mine, theirs;
        }""",
        "=f,f,f,r", [low, high, distance], gl.float32, False, 1,
    )  # fmt: skip


@gluon.jit
def _over_threads(parts, WARPS: gl.constexpr):
    """Sums [32] over all threads of parts [n, threads], n a power of two up to 32: of sum i for 32 / n lanes.

    With each step a lane keeps half of its sums: 31 exchanges for 32 of them, where one after the other takes 160.
    """
    for step in gl.static_range(5):
        if parts.shape[0] > 1:
            halves = parts.reshape([2, parts.shape[0] // 2, parts.shape[1]]).permute((1, 2, 0))
            low, high = gl.split(halves)
            parts = _halved(low, high, 16 >> step)
        else:
            parts = _halved(parts, parts, 16 >> step)
    # all warps have all of them then
    OF_WARPS: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    return gl.sum(gl.convert_layout(parts.reshape([WARPS, 32]), OF_WARPS), 0)


@gluon.jit
def _project(
    record, number, buffers, results, counters, other, error, limit, ring, i,
    DTYPE: gl.constexpr, EPS: gl.constexpr, BATCH: gl.constexpr, WIDTH: gl.constexpr, STAGE: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, SLOT: gl.constexpr, GROUPS: gl.constexpr, VOCAB: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Rows of a matrix of SLICES times the width times x, then what the op does; returns limit, and stages so far.

    Every thread has the same columns of all rows of a stage, and x of all sequences there.
    """
    room, full, empty = ring
    ROWS: gl.constexpr = STAGE // SLICES
    THREADS: gl.constexpr = 32 * WARPS
    V: gl.constexpr = min(8, WIDTH // THREADS)
    CHUNKS: gl.constexpr = SLICES * WIDTH // (THREADS * V)
    EACH: gl.constexpr = SLOT // BATCH  # of a sequence
    SAME: gl.constexpr = 32 // (ROWS * BATCH)  # lanes that have the same sum
    TILE: gl.constexpr = gl.BlockedLayout([STAGE, V], [1, 32], [1, WARPS], [1, 0])
    ALL: gl.constexpr = gl.BlockedLayout(
        [ROWS, BATCH, CHUNKS, 1, V], [1, 1, 1, 32, 1], [1, 1, 1, WARPS, 1], [4, 3, 2, 1, 0]
    )
    X: gl.constexpr = gl.SliceLayout(0, ALL)  # [BATCH, CHUNKS, THREADS, V]
    OF_ONE: gl.constexpr = gl.SliceLayout(0, X)
    LANES: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0]))
    chunk = gl.arange(0, CHUNKS, gl.SliceLayout(1, gl.SliceLayout(2, OF_ONE)))[:, None, None]
    thread = gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, OF_ONE)))[None, :, None]
    v = gl.arange(0, V, gl.SliceLayout(0, gl.SliceLayout(1, OF_ONE)))[None, None, :]
    ks = chunk * (THREADS * V) + thread * V + v
    SEQUENCES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, X)))
    b = gl.arange(0, BATCH, SEQUENCES)[:, None, None, None]
    lane = gl.arange(0, 32, LANES)
    sequence, row_of, own = lane // SAME % BATCH, lane // (SAME * BATCH), lane % SAME == 0
    op = gl.load(record)
    start, stop, signal = gl.load(record + t.START), gl.load(record + t.STOP), _slot(gl.load(record + t.SIGNAL), GROUPS)
    y = results + signal * SLOT + sequence * EACH
    # the stage before that added to the residual stream: of down that of output, of output that of down
    residual = results + gl.maximum(signal - (2 if SLICES > 1 else 3), 0) * SLOT + sequence * EACH
    adds = op == (t.DOWN if SLICES > 1 else t.OUTPUT)
    wait = gl.load(record + t.WAIT)
    x_at = results + _slot(wait, GROUPS) * SLOT + b * EACH + ks[None, :, :, :]
    if SLICES > 1:
        target, polls = gl.load(record + t.TARGET), 0
        while (gl.load(counters + wait, volatile=True) < target) & (polls < limit):
            polls += 1
        x, limit = _arrived(x_at, error, number, limit)
    else:
        normed = gl.load(record + t.GAIN) >= 0
        gain = gl.load(_buffer(buffers, record, t.GAIN, DTYPE) + ks, mask=(ks >= 0) & normed, other=1.0)
        x, limit = _arrived(x_at, error, number, limit)
        squares = gl.convert_layout(gl.sum(gl.sum(gl.sum(x * x, 3), 1), 1), SEQUENCES)
        factor = gl.where(normed, gl.rsqrt(squares / WIDTH + EPS), 1.0)
        x = x * gain.to(gl.float32)[None, :, :, :] * factor[:, None, None, None]
    top = gl.full([32], float("-inf"), gl.float32, LANES)
    top_row = lane
    logits = _buffer(buffers, record, t.OUT, gl.float32) + sequence * VOCAB
    for row in range(start, stop, ROWS):
        rows = row + row_of
        here = own & (rows < stop)
        before = gl.load(residual + rows, mask=here & adds, other=0.0, volatile=True)
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        tile = room.index(i % STAGES).load(TILE)
        mbarrier.arrive(empty.index(i % STAGES), count=1)
        i += 1
        tile = gl.convert_layout(tile.reshape([ROWS, CHUNKS, THREADS, V]), gl.SliceLayout(1, ALL), assert_trivial=True)
        parts = gl.sum(gl.sum(tile.to(gl.float32)[:, None, :, :, :] * x[None, :, :, :, :], 4), 2)
        total = gl.convert_layout(_over_threads(parts.reshape([ROWS * BATCH, THREADS]), WARPS), LANES)
        if SLICES > 1:
            _leave(y + rows, other, before + total, here)
        elif op == t.GATE_UP:
            up = _from_lane(total, 32 // ROWS)
            _leave(y + rows // 2, other, total / (1 + gl.exp(-total)) * up, here & (rows % 2 == 0))
        elif op == t.HEAD:
            gl.store(logits + rows, total, mask=here)
            better = (total > top) & (rows < stop)
            top, top_row = gl.where(better, total, top), gl.where(better, rows, top_row)
        else:
            _leave(y + rows, other, before + total, here)
    if SLICES == 1:  # noqa: SIM102 (known when compiled)
        if op == t.HEAD:
            tops, top_rows = top.reshape([ROWS, BATCH * SAME]), top_row.reshape([ROWS, BATCH * SAME])
            best = gl.max(tops, 0)
            best_row = gl.min(gl.where(tops == best[None, :], top_rows, 2147483647), 0).to(gl.float32, bitcast=True)
            some = gl.arange(0, BATCH * SAME, best.type.layout)
            to = results + signal * SLOT + some // SAME * EACH + gl.load(record + t.SLOT)
            _leave(to, other, best, some % SAME == 0)
            _leave(to + EACH // 2, other, best_row, some % SAME == 0)
    return limit, i


@gluon.jit
def _rotated(
    qkv, rope, head, kv_head, error, number, limit,
    HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Queries [HEADS, HEAD_DIM], key and value of the new position, rotated, as soon as they have been stored.

    head, kv_head: of a sequence's own.
    """
    ROWS: gl.constexpr = 2 * HEADS  # queries, key, value, of four queries the value twice more
    ACROSS: gl.constexpr = max(1, WARPS // ROWS)
    ONE_EACH: gl.constexpr = gl.BlockedLayout(
        [1, HEAD_DIM // (32 * ACROSS)], [1, 32], [WARPS // ACROSS, ACROSS], [1, 0]
    )
    HALF: gl.constexpr = HEAD_DIM // 2
    row = gl.arange(0, ROWS, gl.SliceLayout(1, ONE_EACH))
    ds = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ONE_EACH))
    at = gl.where(row < HEADS, head + row, KV_HEADS * (GROUP + gl.minimum(row - HEADS, 1)) + kv_head)
    heads = (qkv + at * HEAD_DIM)[:, None]
    cos, sin = gl.load(rope + ds % HALF), gl.load(rope + HALF + ds % HALF)
    sin = gl.where(ds < HALF, -sin, sin)
    turned = (row <= HEADS)[:, None]
    cos, sin = gl.where(turned, cos[None, :], 1.0), gl.where(turned, sin[None, :], 0.0)
    values, exchanged, limit = _both_arrived(heads + ds[None, :], heads + (ds ^ HALF)[None, :], error, number, limit)
    rotated = gl.where(turned, values * cos + exchanged * sin, values)
    rotated = gl.convert_layout(rotated, gl.BlockedLayout([ROWS, 1], [1, 32], [1, WARPS], [1, 0]))
    queries, others = gl.split(rotated.reshape([2, HEADS, HEAD_DIM]).permute((1, 2, 0)))
    if HEADS == 4:
        others, _ = gl.split(others.reshape([2, 2, HEAD_DIM]).permute((1, 2, 0)))
    key, value = gl.split(others.permute((1, 0)))
    return queries, key, value, limit


@gluon.jit
def _cached(keys, values, ts, before, ds, HEAD_DIM: gl.constexpr):
    """Keys and values of some positions, those before `before`; as the cache has them."""
    at, old = ts[:, None] * HEAD_DIM + ds[None, :], (ts < before)[:, None] & (ds >= 0)[None, :]
    return gl.load(keys + at, mask=old, other=0.0), gl.load(values + at, mask=old, other=0.0)


@gluon.jit
def _attention(
    record, number, buffers, results, other, error, limit, position,
    DTYPE: gl.constexpr, BATCH: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, CACHE: gl.constexpr, BLOCK_T: gl.constexpr, SPAN: gl.constexpr, SPANS: gl.constexpr,
    SLOT: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """`step._attention` of HEADS query heads over one span of the cache.

    Every place of a block has a maximum, a sum of weights and weighted values of its own, over all blocks; they are put
    together once, at the end.
    """
    ALL: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // HEAD_DIM, HEAD_DIM // 8], [1, WARPS, 1], [2, 1, 0])
    PLACES: gl.constexpr = gl.SliceLayout(0, ALL)  # [BLOCK_T, HEAD_DIM]
    QUERIES: gl.constexpr = gl.SliceLayout(1, ALL)  # [HEADS, HEAD_DIM]
    EACH: gl.constexpr = HEAD_DIM + t.SPAN_PADDING
    BLOCKS: gl.constexpr = SPAN // BLOCK_T
    head, span = gl.load(record + t.START), gl.load(record + t.SLOT)
    kv_head, sequence = head // GROUP, head // (GROUP * KV_HEADS)
    some = gl.arange(0, BLOCK_T, gl.SliceLayout(1, PLACES))
    ds = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, PLACES))
    each, dims = gl.arange(0, HEADS, gl.SliceLayout(1, QUERIES)), gl.arange(0, HEAD_DIM, gl.SliceLayout(0, QUERIES))
    cache = kv_head.to(gl.int64) * CACHE * HEAD_DIM
    keys, values = _buffer(buffers, record, t.FIRST, DTYPE) + cache, _buffer(buffers, record, t.SECOND, DTYPE) + cache
    share = SPAN  # of the positions that there are; none is shorter than a block
    if SPANS > 1:
        share = gl.cdiv(position + 1, BLOCK_T * SPANS) * BLOCK_T
    first = span * share
    end = gl.minimum(first + share, position + 1)
    arrivals = gl.load(record + t.ARRIVALS)
    group = arrivals - 2 - 5 * ((arrivals - 1) // (GROUPS + 5))  # of all layers
    parts = results + PARTS + group * (HEADS * SPANS * EACH)
    row = (each * SPANS + span) * EACH
    if SPANS > 1:  # whether there will be something or not
        gl.store(parts + other + row[:, None] + dims[None, :], _blank(row[:, None] + dims[None, :]))
        gl.store(parts + other + row + HEAD_DIM, _blank(row))
    if first <= position:  # else there is nothing to do, and nothing to wait for
        old = gl.minimum(end, position)  # the cache has what is before
        kept = ()
        for b in gl.static_range(min(BLOCKS, KEPT)):
            k, v = _cached(keys, values, first + b * BLOCK_T + some, old, ds, HEAD_DIM)
            kept = kept + (k, v)
        rope = _buffer(buffers, record, t.WEIGHT, gl.float32) + position * HEAD_DIM
        qkv = results + _slot(gl.load(record + t.WAIT), GROUPS) * SLOT + sequence * (SLOT // BATCH)
        head %= GROUP * KV_HEADS
        q, new_k, new_v, limit = _rotated(
            qkv, rope, head, kv_head % KV_HEADS, error, number, limit, HEAD_DIM, GROUP, HEADS, KV_HEADS, WARPS
        )
        q = gl.convert_layout(q, QUERIES) * (HEAD_DIM**-0.5)
        new_k = gl.convert_layout(new_k, ds.type.layout).to(DTYPE)  # as later tokens will read them
        new_v = gl.convert_layout(new_v, ds.type.layout).to(DTYPE)
        if (end > position) & (head % GROUP == 0):
            gl.store(keys + position * HEAD_DIM + ds, new_k)
            gl.store(values + position * HEAD_DIM + ds, new_v)
        top = gl.full([HEADS, BLOCK_T], LOWEST, gl.float32, gl.SliceLayout(2, ALL))
        total = gl.zeros([HEADS, BLOCK_T], gl.float32, gl.SliceLayout(2, ALL))
        sums = gl.zeros([HEADS, BLOCK_T, HEAD_DIM], gl.float32, ALL)
        for b in gl.static_range(BLOCKS):
            at = first + b * BLOCK_T
            k, v, kept = kept[0], kept[1], kept[2:]
            if b + KEPT < BLOCKS:
                later = _cached(keys, values, at + KEPT * BLOCK_T + some, old, ds, HEAD_DIM)
                kept = kept + (later[0], later[1])
            if at < end:
                ts = at + some
                new = (ts == position)[:, None]
                now_k = gl.where(new, new_k[None, :], k).to(gl.float32)
                now_v = gl.where(new, new_v[None, :], v).to(gl.float32)
                scores = gl.sum(now_k[None, :, :] * q[:, None, :], 2)
                live = gl.convert_layout(ts, gl.SliceLayout(0, gl.SliceLayout(2, ALL))) < end
                scores = gl.where(live[None, :], scores, float("-inf"))
                most = gl.maximum(top, scores)
                weights, scale = gl.exp(scores - most), gl.exp(top - most)
                top, total = most, total * scale + weights
                sums = sums * scale[:, :, None] + weights[:, :, None] * now_v[None, :, :]
        best = gl.max(top, 1)
        weights = gl.exp(top - best[:, None])
        total = gl.sum(total * weights, 1)
        over = gl.convert_layout(total, gl.SliceLayout(1, QUERIES))
        result = gl.sum(sums * weights[:, :, None], 1) / over[:, None]

        y = results + _slot(gl.load(record + t.SIGNAL), GROUPS) * SLOT + sequence * (SLOT // BATCH) + head * HEAD_DIM
        to = y + each[:, None] * HEAD_DIM + dims[None, :]
        spans = position // share + 1  # that have a position
        if SPANS == 1:  # noqa: SIM114 (known when compiled: the rest is left out)
            _leave(to, other, result, (each >= 0)[:, None] & (dims >= 0)[None, :])
        elif spans == 1:
            _leave(to, other, result, (each >= 0)[:, None] & (dims >= 0)[None, :])
        else:
            gl.store(parts + row[:, None] + dims[None, :], result)
            logarithm = gl.convert_layout(best + gl.log(total), gl.SliceLayout(1, QUERIES))
            gl.store(parts + row + HEAD_DIM, logarithm)
            for h in range(span, HEADS, spans):
                limit = _together(
                    parts + h * (SPANS * EACH), y + h * HEAD_DIM, other, spans, error, number, limit,
                    SPANS, HEAD_DIM, WARPS,
                )  # fmt: skip
    return limit


@gluon.jit
def _together(
    parts, y, other, spans, error, number, limit,
    SPANS: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store attention of a query head over all spans, put together in their order from its results over each."""
    ONE_EACH: gl.constexpr = gl.BlockedLayout([1, HEAD_DIM // 32], [1, 32], [WARPS, 1], [1, 0])
    some = gl.arange(0, max(SPANS, WARPS), gl.SliceLayout(1, ONE_EACH))
    ds = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ONE_EACH))
    at = (parts + gl.minimum(some, spans - 1) * (HEAD_DIM + t.SPAN_PADDING))[:, None]
    beside = at + HEAD_DIM + ds[None, :] * 0  # the logarithm of the sum of weights, beside each value
    values, weights, limit = _both_arrived(at + ds[None, :], beside, error, number, limit)
    weights = gl.where((some < spans)[:, None], weights, float("-inf"))
    weights = gl.exp(weights - gl.max(weights, 0)[None, :])
    _leave(y + ds, other, gl.sum(weights * values, 0) / gl.sum(weights, 0), ds >= 0)
    return limit


@gluon.jit
def _embed(
    record, buffers, results, other,
    DTYPE: gl.constexpr, BATCH: gl.constexpr, WIDTH: gl.constexpr, VOCAB: gl.constexpr, SLOT: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """hidden = the token's row of the embedding, of every sequence, in slot 0."""
    ks = gl.arange(0, WIDTH, gl.BlockedLayout([8], [32], [WARPS], [0]))
    for b in gl.static_range(BATCH):
        token = gl.load(_buffer(buffers, record, t.INPUT, gl.int32) + b)
        token = gl.minimum(gl.maximum(token, 0), VOCAB - 1)  # after a failure it may be anything
        row = gl.load(_buffer(buffers, record, t.WEIGHT, DTYPE) + token.to(gl.int64) * WIDTH + ks)
        _leave(results + b * (SLOT // BATCH) + ks, other, row.to(gl.float32), ks >= 0)


@gluon.jit
def _argmax(
    record, number, buffers, results, error, limit, position,
    BATCH: gl.constexpr, CACHE: gl.constexpr, SLOT: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The token with the largest logit of every sequence, of equals the first, as the next input."""
    some = gl.arange(0, 256, gl.BlockedLayout([256 // (32 * WARPS)], [32], [WARPS], [0]))
    parts = gl.load(record + t.K)
    for b in gl.static_range(BATCH):
        best = results + _slot(gl.load(record + t.WAIT), GROUPS) * SLOT + b * (SLOT // BATCH)
        top, token = float("-inf"), 0
        for first in range(0, parts, 256):
            at = gl.minimum(first + some, parts - 1)
            values, tokens, limit = _both_arrived(best + at, best + SLOT // BATCH // 2 + at, error, number, limit)
            here = gl.max(values, 0)
            smallest = gl.min(gl.where(values == here, tokens.to(gl.int32, bitcast=True), 2147483647), 0)
            token = gl.where(here > top, smallest, token)
            top = gl.maximum(here, top)
        gl.store(_buffer(buffers, record, t.OUT, gl.int32) + b, token)
        gl.store(_buffer(buffers, record, t.FIRST, gl.int32) + b * (CACHE + 1) + position + 1, token)


@gluon.jit
def _work(
    records, begin, end, buffers, results, counters, count, epoch, error, position, position_at, limit, ring,
    DTYPE: gl.constexpr, EPS: gl.constexpr, BATCH: gl.constexpr, WIDTH: gl.constexpr, STAGE: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, CACHE: gl.constexpr, BLOCK_T: gl.constexpr, SPAN: gl.constexpr, SPANS: gl.constexpr,
    VOCAB: gl.constexpr, SLOT: gl.constexpr, PARTS: gl.constexpr, SET: gl.constexpr, GROUPS: gl.constexpr,
    POSITION_FROM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The warps that work: the program's queue, from the first record to the last."""
    if POSITION_FROM == "device":
        position = gl.load(position_at)
    number_of = gl.load(epoch)
    results += (number_of & 1) * SET
    other = gl.where((number_of & 1) == 0, SET, -SET)
    i = 0
    for number in range(begin, end):
        record = records + number * len(t.WORDS)
        op = gl.load(record)
        if POSITION_FROM == "record":
            position = gl.load(record + t.POSITION)
        if op == t.DOWN:
            limit, i = _project(
                record, number, buffers, results, counters, other, error, limit, ring, i,
                DTYPE, EPS, BATCH, WIDTH, STAGE, STAGES, SLICES, SLOT, GROUPS, VOCAB, WARPS,
            )  # fmt: skip
        elif op <= t.HEAD:
            limit, i = _project(
                record, number, buffers, results, counters, other, error, limit, ring, i,
                DTYPE, EPS, BATCH, WIDTH, STAGE, STAGES, 1, SLOT, GROUPS, VOCAB, WARPS,
            )  # fmt: skip
        elif op == t.ATTENTION:
            limit = _attention(
                record, number, buffers, results, other, error, limit, position,
                DTYPE, BATCH, HEAD_DIM, GROUP, HEADS, KV_HEADS, CACHE, BLOCK_T, SPAN, SPANS, SLOT, GROUPS, PARTS, WARPS,
            )  # fmt: skip
        elif op == t.EMBED:
            _embed(record, buffers, results, other, DTYPE, BATCH, WIDTH, VOCAB, SLOT, WARPS)
        else:
            _argmax(record, number, buffers, results, error, limit, position, BATCH, CACHE, SLOT, GROUPS, WARPS)
            gl.store(epoch, number_of + 1)
            some = gl.arange(0, 256, gl.BlockedLayout([1], [32], [WARPS], [0]))
            for at in range(0, count, 256):
                gl.store(counters + at + some, 0, mask=at + some < count)
            if POSITION_FROM == "device":
                gl.store(position_at, position + 1)
        if op == t.GATE_UP:
            tl.debug_barrier()  # all warps have stored; only a hint, so without a fence
            gl.atomic_add(counters + gl.load(record + t.SIGNAL), 1, sem="relaxed")


@gluon.jit(do_not_specialize=["position", "limit", "base"])
def _streamed_kernel(
    W, base, records, queue, buffers, results, counters, count, epoch, error, position, position_at, limit,
    DTYPE: gl.constexpr, EPS: gl.constexpr, BATCH: gl.constexpr, WIDTH: gl.constexpr, STAGE: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, CACHE: gl.constexpr, BLOCK_T: gl.constexpr, SPAN: gl.constexpr, SPANS: gl.constexpr,
    VOCAB: gl.constexpr, SLOT: gl.constexpr, PARTS: gl.constexpr, SET: gl.constexpr, GROUPS: gl.constexpr,
    POSITION_FROM: gl.constexpr, WARPS: gl.constexpr, COPYING: gl.constexpr, FLIGHT: gl.constexpr,
):  # fmt: skip
    """One program: its queue. W: descriptor of all matrices; base: where they begin."""
    room = gl.allocate_shared_memory(W.dtype, [STAGES, STAGE, WIDTH], W.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    ring = (room, full, empty)
    end = gl.load(queue + gl.program_id(0) + 1)
    begin = gl.load(queue + gl.program_id(0))
    gl.warp_specialize([
        (_work, (
            records, begin, end, buffers, results, counters, count, epoch, error, position, position_at, limit, ring,
            DTYPE, EPS, BATCH, WIDTH, STAGE, STAGES, SLICES, HEAD_DIM, GROUP, HEADS, KV_HEADS, CACHE, BLOCK_T, SPAN,
            SPANS, VOCAB, SLOT, PARTS, SET, GROUPS, POSITION_FROM, WARPS,
        )),
        (_copy, (W, base, records, begin, end, buffers, ring, DTYPE, WIDTH, STAGE, STAGES, FLIGHT)),
    ], [1], [COPYING])  # fmt: skip


@dataclass(frozen=True)
class StreamChoice:
    """How the kernel runs. stages: of the ring; flight: those on their way at most, of the head one more; block_t:
    positions of the cache at once; warps: that multiply."""

    stages: int = 7
    flight: int = 1
    block_t: int = 32
    warps: int = 4


def usual(batch: int) -> StreamChoice:
    """What suits Llama-3.2-1B on an H200."""
    return StreamChoice() if batch == 1 else StreamChoice(stages=6, warps=8)


@dataclass
class StreamedMemory(Memory):
    """`Memory` with all matrices in one allocation, and results in two sets of slots, blank where nothing is stored.

    results: float32 [2, all slots, then all results of spans]; epoch: int32 [1], steps so far, of which the kernel
    takes the set.
    """

    results: Tensor = field(init=False)
    epoch: Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        blank = torch.full((2, sum(sizes_of(self.how))), BLANK.value, dtype=torch.int32, device=self.counters.device)
        self.results, self.epoch = blank.view(torch.float32), torch.zeros_like(self.position)

    def check(self) -> None:
        """As of `Memory`."""
        try:
            super().check()
        except RuntimeError:
            self.results.view(torch.int32).fill_(BLANK.value)
            raise

    def matrix(self) -> Tensor:
        """All matrices, [rows, width]."""
        names, first = _matrices(self.how), self.buffers[MATRICES[0]]
        rows = sum(self.buffers[name].numel() for name in names) // first.shape[1]
        return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def slot_of(how: Lowering) -> int:
    """Values of the largest result of a stage, of all sequences."""
    m = how.model
    parts = 2 * how.split(m.vocab)  # of the head a logit and its token
    return how.batch * max(m.ffn, m.qkv_width, parts)


def sizes_of(how: Lowering) -> tuple[int, int]:
    """Values of all slots, and of all results of spans."""
    stages = 2 + 5 * how.model.layers
    return stages * slot_of(how), how.model.layers * how.heads * how.spans * (how.model.head_dim + t.SPAN_PADDING)


def _matrices(how: Lowering) -> list[str]:
    """Names of buffers, in the order in which they lie."""
    return [name for name in buffer_shapes(how) if name.partition(".")[0] in MATRICES]


def together(memory: Memory) -> StreamedMemory:
    """The same memory with its matrices one after the other in one allocation; copied, but where they lie so."""
    names, width, buffers = _matrices(memory.how), memory.how.model.hidden, memory.buffers
    ends = [buffers[name].data_ptr() + buffers[name].nbytes for name in names]
    begins = [buffers[name].data_ptr() for name in names[1:]]
    first = buffers[names[0]]
    held = first.untyped_storage().nbytes() - first.storage_offset() * first.itemsize
    if ends[:-1] == begins and held >= sum(buffers[name].nbytes for name in names):
        return StreamedMemory(memory.how, buffers)
    matrix = torch.cat([buffers[name].view(-1, width) for name in names])
    views = matrix.split([buffers[name].numel() // width for name in names])
    there = {name: view.view(buffers[name].shape) for name, view in zip(names, views, strict=True)}
    return StreamedMemory(memory.how, buffers | there)


def lowering(model: Decoder, programs: int, cache: int = 2048, itemsize: int = 2, batch: int = 1) -> Lowering:
    """What is lowered for the kernel: of four sequences heads in fours, else in pairs; spans of whole blocks, so many
    that there are about as many records of attention as a GPU has multiprocessors."""
    allowed, group = t.groups(model, itemsize), 4 if batch == 4 else 2
    block = StreamChoice().block_t
    spans = max(8 if batch == 1 else 4, triton.next_power_of_2(triton.cdiv(cache, MOST_BLOCKS * block)))
    span = triton.cdiv(cache, spans * block) * block
    sizes = {"cache": cache, "itemsize": itemsize, "span": span, "batch": batch}
    group = next(n for n in (group, 2, 1) if n in allowed)
    return Lowering(model, programs, position=None, rows=STAGE, group=group, **sizes)


def step(
    memory: StreamedMemory,
    tables: Uploaded,
    position: int | None = None,
    position_from: str = "launch",
    choice: StreamChoice | None = None,
    limit: int = 1 << 22,
) -> Launch:
    """One decoder step, as `step.step`: the same arguments but choice, and the same tables.

    memory: of `together`, its matrices bf16 or fp16. choice: None: `usual`'s. ValueError also for what is not a Hopper
    GPU, and for tables that `check_streamed` refuses.
    """
    how, model, W = memory.how, memory.how.model, memory.matrix()
    choice = choice or usual(how.batch)
    check_hopper(W.device, "memory")
    check_streamed(how, W.dtype, choice)
    check_position_from(how, position, position_from)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * W.itemsize, rank=2)
    args: dict[str, Any] = {"W": TensorDescriptor.from_tensor(W, [STAGE, model.hidden], layout), "base": W.data_ptr()}
    args |= {"records": tables.records, "queue": tables.queue, "buffers": tables.buffers}
    args |= {"results": memory.results, "counters": memory.counters, "count": len(memory.counters)}
    args |= {"epoch": memory.epoch, "error": memory.error, "position_at": memory.position}
    args |= {"position": position or 0, "limit": limit, "DTYPE": DTYPES[W.dtype], "EPS": model.eps}
    args |= {"WIDTH": model.hidden, "STAGE": STAGE, "STAGES": choice.stages, "SLICES": SLICES}
    args |= {"HEAD_DIM": model.head_dim, "GROUP": model.group, "HEADS": how.group, "KV_HEADS": model.kv_heads}
    args |= {"CACHE": how.cache, "BLOCK_T": choice.block_t, "SPAN": how.positions, "SPANS": how.spans}
    args |= {"VOCAB": model.vocab, "SLOT": slot_of(how), "SET": memory.results.numel() // 2}
    args |= {"BATCH": how.batch, "PARTS": sizes_of(how)[0], "GROUPS": how.groups, "WARPS": choice.warps}
    args |= {"POSITION_FROM": position_from, "COPYING": COPYING, "FLIGHT": choice.flight}
    return Launch(_streamed_kernel, (how.programs,), args, {"num_warps": choice.warps})


def check_streamed(how: Lowering, dtype: torch.dtype, choice: StreamChoice) -> None:
    """Raise ValueError for tables or a choice that the kernel cannot take."""
    m = how.model
    check_one_of("block_t", choice.block_t, (16, 32))
    check_one_of("dtype", dtype, (torch.bfloat16, torch.float16))
    check_one_of("hidden", m.hidden, WIDTHS)
    check_one_of("batch", how.batch, BATCHES)
    fitting = [n for n in ROOM if SLICES * m.hidden * how.batch <= MOST_VALUES * 32 * n]
    check_one_of("warps", choice.warps, fitting)
    check_one_of("head_dim", m.head_dim, (32, 64, 128) if choice.warps == 4 else (64, 128))
    check_one_of("group", how.group, (2, 4))
    for name, value, allowed in (
        ("values of all query heads", m.q_width, m.hidden),
        ("ffn", m.ffn, SLICES * m.hidden),
        ("rows", how.rows, STAGE),
        ("schedule", how.schedule, "round-robin"),
    ):
        if value != allowed:
            raise ValueError(f"{name} is {value!r}; allowed: {allowed!r}")
    if how.positions % choice.block_t or how.positions > MOST_BLOCKS * choice.block_t:
        allowed = f"a multiple of {choice.block_t} up to {MOST_BLOCKS * choice.block_t}"
        raise ValueError(f"span is {how.positions}; allowed: {allowed}")
    if how.spans & (how.spans - 1):
        raise ValueError(f"spans are {how.spans}, of {how.positions} positions; allowed: a power of two")
    if fewest := next((n for n, _ in how.projections().values() if how.split(n) < how.programs), None):
        allowed = f"at most {how.split(fewest)}, the records of the projection with {fewest} rows"
        raise ValueError(f"programs is {how.programs}; allowed: {allowed}")
    most = ROOM[choice.warps] // (STAGE * m.hidden * dtype.itemsize)
    if not 2 <= choice.stages <= most:
        raise ValueError(f"stages is {choice.stages}; allowed: 2 to {most}")
    if not 1 <= choice.flight < choice.stages:
        raise ValueError(f"flight is {choice.flight}; allowed: 1 to {choice.stages - 1}")


def compilable(
    model: str, cache: int = 2048, position_from: str = "device", dtype: str = "bfloat16", batch: int = 1,
    choice: StreamChoice | None = None,
) -> Launch:  # fmt: skip
    """A step of one of `model.MODELS` that can be compiled but not run. For `labkit.evidence.compiled`."""
    kind = getattr(torch, dtype)
    how = lowering(decoder(model), multiprocessors(torch.device("cpu")), cache, kind.itemsize, batch)
    buffers = {name: torch.empty(1, dtype=kind) for name in buffer_shapes(how)}
    memory = _Compiled(how, buffers)
    return step(memory, upload(lower(how)), 0 if position_from == "launch" else None, position_from, choice)


class _Compiled(StreamedMemory):
    """Memory that holds one value of each buffer."""

    def matrix(self) -> Tensor:
        """A stage of the ring."""
        return torch.empty((STAGE, self.how.model.hidden), dtype=self.buffers["head"].dtype)
