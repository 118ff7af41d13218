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

A stage of the ring is `STAGE` rows of the width: so many rows of a matrix, or fewer of the one that has `SLICES` times
its columns, of which a warp takes a slice. Sums are fp32, in an order that depends on nothing but the shape; those of
attention depend on the span.

A stage of the step has the number of the counter that its records signal in `step`; its results lie in the slot of this
number, those that it reads in the slot of the counter that it waits for. A value is stored once, by one thread, as one
word: whoever reads something else than `BLANK`, the bits of a NaN that arithmetic does not give, has the result. Every
program has a record of every stage but attention, so that it has seen all of the residual stream before it adds to it.

Tried on an H200 (Llama-3.2-1B, µs a token at positions 16, 512 and 1976, graphs of 8 tokens, one process; `step` takes
797, 855 and 902). An earlier form, in which several threads read the same results, 658, 720 and 758; of it: with
counters and fences 752, 827 and 854; with 6 stages instead of 7 670, 733 and 772; two stages of gate and up on their
way 669, 730 and 763; with counters, all of the ring on its way 772, 844 and 868; residuals waited for in every tile,
and queries, keys and values one after the other, 30 to 50 more; four heads a record and spans of 128 767, 848 and 899
(it spills), two heads and spans of 128 674, 824 and 877. Without any wait (wrong results) 618, 640 and 672, 6 stages.

What is left (the same form, 16 layers and the head, position 16): qkv 4.6 µs, attention 4.5, output 3.0, gate and up
13.9, down 9.0, the head 116, where reading takes 2.7, 0, 1.8, 14.4, 7.2 and 113. From the end of a layer until gate and
up may begin is 13.3 µs, in which qkv, output and a full ring are 11.1 of reading; the last program of gate and up ends
1.9 after the median one; down begins 2.4 to 3.7 after that.

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
ROOM = 224 << 10  # bytes of shared memory that the ring may take
WIDTHS = (256, 512, 1024, 2048)  # of which x fits into the registers of a warp
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
def _leave(pointers, other, values, mask):
    """Store results, which others wait for, and make their places blank in the set of the next step."""
    blank = gl.full(values.shape, BLANK, gl.int32, values.type.layout).to(gl.float32, bitcast=True)
    gl.store(pointers, values, mask=mask)
    gl.store(pointers + other, blank, mask=mask)


@gluon.jit
def _project(
    record, number, buffers, results, other, error, limit, ring, i,
    DTYPE: gl.constexpr, EPS: gl.constexpr, WIDTH: gl.constexpr, STAGE: gl.constexpr,
    STAGES: gl.constexpr, SLOT: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Rows of a matrix as wide as the model times x, then what the op does; returns limit, and stages so far."""
    room, full, empty = ring
    ROWS: gl.constexpr = gl.BlockedLayout([STAGE // 4, 8], [1, 32], [4, 1], [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([min(WIDTH // 128, 4)], [32], [4], [0])
    ks, each = gl.arange(0, WIDTH, EACH), gl.arange(0, STAGE, gl.SliceLayout(1, ROWS))
    op = gl.load(record)
    start, stop, signal = gl.load(record + t.START), gl.load(record + t.STOP), gl.load(record + t.SIGNAL)
    y, residual = results + signal * SLOT, results + gl.maximum(signal - BACK, 0) * SLOT
    normed = gl.load(record + t.GAIN) >= 0
    gain = gl.load(_buffer(buffers, record, t.GAIN, DTYPE) + ks, mask=(ks >= 0) & normed, other=1.0)
    x, limit = _arrived(results + gl.load(record + t.WAIT) * SLOT + ks, error, number, limit)
    factor = gl.where(normed, gl.rsqrt(gl.sum(x * x, 0) / WIDTH + EPS), 1.0)
    x = gl.convert_layout(x * gain.to(gl.float32), gl.SliceLayout(0, ROWS))
    top = gl.full([STAGE], float("-inf"), gl.float32, gl.SliceLayout(1, ROWS))
    top_row = each
    logits = _buffer(buffers, record, t.OUT, gl.float32)
    for row in range(start, stop, STAGE):
        rows = row + each
        before = gl.load(residual + rows, mask=(rows < stop) & (op == t.OUTPUT), other=0.0, volatile=True)
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        tile = room.index(i % STAGES).load(ROWS)
        mbarrier.arrive(empty.index(i % STAGES), count=1)
        i += 1
        total = gl.sum(tile.to(gl.float32) * x[None, :], 1) * factor
        if op == t.GATE_UP:
            gate, up = gl.split(gl.reshape(total, [STAGE // 2, 2]))
            pair, _ = gl.split(gl.reshape(rows, [STAGE // 2, 2]))
            _leave(y + pair // 2, other, gate / (1 + gl.exp(-gate)) * up, pair < stop)
        elif op == t.HEAD:
            gl.store(logits + rows, total, mask=rows < stop)
            better = (total > top) & (rows < stop)
            top, top_row = gl.where(better, total, top), gl.where(better, rows, top_row)
        else:
            _leave(y + rows, other, before + total, rows < stop)
    if op == t.HEAD:
        best = gl.max(top, 0)
        best_row = gl.min(gl.where(top == best, top_row, 2147483647), 0)
        which = gl.arange(0, 2, gl.BlockedLayout([1], [32], [4], [0]))
        both = gl.where(which == 0, best.to(gl.int32, bitcast=True), best_row).to(gl.float32, bitcast=True)
        _leave(y + gl.load(record + t.SLOT) + which * (SLOT // 2), other, both, which >= 0)
    return limit, i


@gluon.jit
def _project_wide(
    record, number, buffers, results, counters, other, error, limit, ring, i,
    WIDTH: gl.constexpr, STAGE: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr,
    SLOT: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Rows of SLICES times the width times x, added to y; returns limit, and stages so far. A warp has a slice."""
    room, full, empty = ring
    EACH: gl.constexpr = STAGE // SLICES
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    CUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    X: gl.constexpr = gl.SliceLayout(0, CUT)
    slices, ks = gl.arange(0, SLICES, gl.SliceLayout(1, X)), gl.arange(0, WIDTH, gl.SliceLayout(0, X))
    each = gl.arange(0, EACH, gl.SliceLayout(1, gl.SliceLayout(2, CUT)))
    start, stop, signal = gl.load(record + t.START), gl.load(record + t.STOP), gl.load(record + t.SIGNAL)
    y, residual = results + signal * SLOT, results + (signal - BACK) * SLOT
    wait, target = gl.load(record + t.WAIT), gl.load(record + t.TARGET)
    counter, x_at = counters + wait, results + wait * SLOT
    polls = 0
    while (gl.load(counter, volatile=True) < target) & (polls < limit):
        polls += 1
    x, limit = _arrived(x_at + slices[:, None] * WIDTH + ks[None, :], error, number, limit)
    for row in range(start, stop, EACH):
        rows = row + each
        before = gl.load(residual + rows, mask=rows < stop, other=0.0, volatile=True)
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        tile = room.index(i % STAGES).load(ROWS)
        mbarrier.arrive(empty.index(i % STAGES), count=1)
        i += 1
        tile = gl.convert_layout(gl.reshape(tile, [EACH, SLICES, WIDTH]), CUT, assert_trivial=True)
        total = gl.sum(gl.sum(tile.to(gl.float32) * x[None, :, :], 2), 1)
        _leave(y + rows, other, before + total, rows < stop)
    return limit, i


@gluon.jit
def _new(heads, ds, HALF: gl.constexpr):
    """Some heads of the new position, as they are and with halves exchanged."""
    return gl.load(heads + ds, volatile=True), gl.load(heads + (ds ^ HALF), volatile=True)


@gluon.jit
def _rotated(
    qkv, rope, head, kv_head, error, number, limit,
    HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
):  # fmt: skip
    """Two queries [2, HEAD_DIM], key and value of the new position, rotated, as soon as they have been stored."""
    ONE_EACH: gl.constexpr = gl.BlockedLayout([1, HEAD_DIM // 32], [1, 32], [4, 1], [1, 0])
    HALF: gl.constexpr = HEAD_DIM // 2
    row = gl.arange(0, 4, gl.SliceLayout(1, ONE_EACH))  # two queries, key, value
    ds = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ONE_EACH))
    at = gl.where(row < 2, head + row, KV_HEADS * (GROUP + row - 2) + kv_head)
    heads = (qkv + at * HEAD_DIM)[:, None]
    cos, sin = gl.load(rope + ds % HALF), gl.load(rope + HALF + ds % HALF)
    sin = gl.where(ds < HALF, -sin, sin)
    turned = (row < 3)[:, None]
    cos, sin = gl.where(turned, cos[None, :], 1.0), gl.where(turned, sin[None, :], 0.0)
    values, exchanged = _new(heads, ds[None, :], HALF)
    missing, polls = _missing(values) + _missing(exchanged), 0
    while (missing > 0) & (polls < limit):
        values, exchanged = _new(heads, ds[None, :], HALF)
        missing = _missing(values) + _missing(exchanged)
        polls += 1
    if missing > 0:
        gl.store(error, number + 1)
    rotated = gl.where(turned, values * cos + exchanged * sin, values)
    rotated = gl.convert_layout(rotated, gl.BlockedLayout([4, 1], [1, 32], [1, 4], [1, 0]))
    queries, others = gl.split(rotated.reshape([2, 2, HEAD_DIM]).permute((1, 2, 0)))
    key, value = gl.split(others.permute((1, 0)))
    return queries, key, value, gl.where(missing > 0, 0, limit)


@gluon.jit
def _cached(keys, values, ts, before, ds, HEAD_DIM: gl.constexpr):
    """Keys and values of some positions, those before `before`; as the cache has them."""
    at, old = ts[:, None] * HEAD_DIM + ds[None, :], (ts < before)[:, None] & (ds >= 0)[None, :]
    return gl.load(keys + at, mask=old, other=0.0), gl.load(values + at, mask=old, other=0.0)


@gluon.jit
def _attention(
    record, number, buffers, results, other, error, limit, position,
    DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, CACHE: gl.constexpr, BLOCK_T: gl.constexpr, SPAN: gl.constexpr, SPANS: gl.constexpr,
    SLOT: gl.constexpr,
):  # fmt: skip
    """`step._attention` of HEADS query heads over one span of the cache.

    Every place of a block has a maximum, a sum of weights and weighted values of its own, over all blocks; they are put
    together once, at the end.
    """
    ALL: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // HEAD_DIM, HEAD_DIM // 8], [1, 4, 1], [2, 1, 0])
    PLACES: gl.constexpr = gl.SliceLayout(0, ALL)  # [BLOCK_T, HEAD_DIM]
    QUERIES: gl.constexpr = gl.SliceLayout(1, ALL)  # [HEADS, HEAD_DIM]
    EACH: gl.constexpr = HEAD_DIM + t.SPAN_PADDING
    BLOCKS: gl.constexpr = SPAN // BLOCK_T
    head, span = gl.load(record + t.START), gl.load(record + t.SLOT)
    kv_head = head // GROUP
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
    parts = results + gl.load(record + t.ARRIVALS) * SLOT
    row = (each * SPANS + span) * EACH
    if SPANS > 1:  # whether there will be something or not
        blank = gl.full([HEADS, HEAD_DIM], BLANK, gl.int32, QUERIES).to(gl.float32, bitcast=True)
        gl.store(parts + other + row[:, None] + dims[None, :], blank)
        blank = gl.full([HEADS], BLANK, gl.int32, gl.SliceLayout(1, QUERIES)).to(gl.float32, bitcast=True)
        gl.store(parts + other + row + HEAD_DIM, blank)
    if first <= position:  # else there is nothing to do, and nothing to wait for
        old = gl.minimum(end, position)  # the cache has what is before
        kept = ()
        for b in gl.static_range(min(BLOCKS, KEPT)):
            k, v = _cached(keys, values, first + b * BLOCK_T + some, old, ds, HEAD_DIM)
            kept = kept + (k, v)
        rope = _buffer(buffers, record, t.WEIGHT, gl.float32) + position * HEAD_DIM
        qkv = results + gl.load(record + t.WAIT) * SLOT
        q, new_k, new_v, limit = _rotated(qkv, rope, head, kv_head, error, number, limit, HEAD_DIM, GROUP, KV_HEADS)
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

        y = results + gl.load(record + t.SIGNAL) * SLOT + head * HEAD_DIM
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
                    parts + h * (SPANS * EACH), y + h * HEAD_DIM, other, spans, error, number, limit, SPANS, HEAD_DIM
                )
    return limit


@gluon.jit
def _spans(at, ds, HEAD_DIM: gl.constexpr):
    """Results of spans, and beside each of their values the logarithm of the sum of weights."""
    return gl.load(at + ds, volatile=True), gl.load(at + HEAD_DIM + ds * 0, volatile=True)


@gluon.jit
def _together(
    parts, y, other, spans, error, number, limit, SPANS: gl.constexpr, HEAD_DIM: gl.constexpr
):  # fmt: skip
    """Store attention of a query head over all spans, put together in their order from its results over each."""
    ONE_EACH: gl.constexpr = gl.BlockedLayout([1, HEAD_DIM // 32], [1, 32], [4, 1], [1, 0])
    some = gl.arange(0, max(SPANS, 4), gl.SliceLayout(1, ONE_EACH))
    ds = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ONE_EACH))
    at = (parts + gl.minimum(some, spans - 1) * (HEAD_DIM + t.SPAN_PADDING))[:, None]
    values, weights = _spans(at, ds[None, :], HEAD_DIM)
    missing, polls = _missing(values) + _missing(weights), 0
    while (missing > 0) & (polls < limit):
        values, weights = _spans(at, ds[None, :], HEAD_DIM)
        missing = _missing(values) + _missing(weights)
        polls += 1
    if missing > 0:
        gl.store(error, number + 1)
    weights = gl.where((some < spans)[:, None], weights, float("-inf"))
    weights = gl.exp(weights - gl.max(weights, 0)[None, :])
    _leave(y + ds, other, gl.sum(weights * values, 0) / gl.sum(weights, 0), ds >= 0)
    return gl.where(missing > 0, 0, limit)


@gluon.jit
def _embed(
    record, buffers, results, other,
    DTYPE: gl.constexpr, WIDTH: gl.constexpr, VOCAB: gl.constexpr, SLOT: gl.constexpr,
):  # fmt: skip
    """hidden = the token's row of the embedding."""
    ks = gl.arange(0, WIDTH, gl.BlockedLayout([8], [32], [4], [0]))
    token = gl.load(_buffer(buffers, record, t.INPUT, gl.int32))
    token = gl.minimum(gl.maximum(token, 0), VOCAB - 1)  # after a failure it may be anything
    row = gl.load(_buffer(buffers, record, t.WEIGHT, DTYPE) + token.to(gl.int64) * WIDTH + ks)
    _leave(results + gl.load(record + t.SIGNAL) * SLOT + ks, other, row.to(gl.float32), ks >= 0)


@gluon.jit
def _argmax(record, number, buffers, results, error, limit, position, SLOT: gl.constexpr):
    """The token with the largest logit, of equals the first, as the next input."""
    some = gl.arange(0, 256, gl.BlockedLayout([1], [32], [4], [0]))
    parts = gl.load(record + t.K)
    best = results + gl.load(record + t.WAIT) * SLOT
    top, token = float("-inf"), 0
    for first in range(0, parts, 256):
        at = gl.minimum(first + some, parts - 1)
        values, limit = _arrived(best + at, error, number, limit)
        tokens, limit = _arrived(best + SLOT // 2 + at, error, number, limit)
        here = gl.max(values, 0)
        smallest = gl.min(gl.where(values == here, tokens.to(gl.int32, bitcast=True), 2147483647), 0)
        token = gl.where(here > top, smallest, token)
        top = gl.maximum(here, top)
    gl.store(_buffer(buffers, record, t.OUT, gl.int32), token)
    gl.store(_buffer(buffers, record, t.FIRST, gl.int32) + position + 1, token)


@gluon.jit
def _work(
    records, begin, end, buffers, results, counters, count, epoch, error, position, position_at, limit, ring,
    DTYPE: gl.constexpr, EPS: gl.constexpr, WIDTH: gl.constexpr, STAGE: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, CACHE: gl.constexpr, BLOCK_T: gl.constexpr, SPAN: gl.constexpr, SPANS: gl.constexpr,
    VOCAB: gl.constexpr, SLOT: gl.constexpr, SET: gl.constexpr, BACK_OUTPUT: gl.constexpr, BACK_DOWN: gl.constexpr,
    POSITION_FROM: gl.constexpr,
):  # fmt: skip
    """The warpgroup that works: the program's queue, from the first record to the last."""
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
            limit, i = _project_wide(
                record, number, buffers, results, counters, other, error, limit, ring, i,
                WIDTH, STAGE, STAGES, SLICES, SLOT, BACK_DOWN,
            )  # fmt: skip
        elif op <= t.HEAD:
            limit, i = _project(
                record, number, buffers, results, other, error, limit, ring, i,
                DTYPE, EPS, WIDTH, STAGE, STAGES, SLOT, BACK_OUTPUT,
            )  # fmt: skip
        elif op == t.ATTENTION:
            limit = _attention(
                record, number, buffers, results, other, error, limit, position,
                DTYPE, HEAD_DIM, GROUP, HEADS, KV_HEADS, CACHE, BLOCK_T, SPAN, SPANS, SLOT,
            )  # fmt: skip
        elif op == t.EMBED:
            _embed(record, buffers, results, other, DTYPE, WIDTH, VOCAB, SLOT)
        else:
            _argmax(record, number, buffers, results, error, limit, position, SLOT)
            gl.store(epoch, number_of + 1)
            some = gl.arange(0, 256, gl.BlockedLayout([1], [32], [4], [0]))
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
    DTYPE: gl.constexpr, EPS: gl.constexpr, WIDTH: gl.constexpr, STAGE: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, CACHE: gl.constexpr, BLOCK_T: gl.constexpr, SPAN: gl.constexpr, SPANS: gl.constexpr,
    VOCAB: gl.constexpr, SLOT: gl.constexpr, SET: gl.constexpr, BACK_OUTPUT: gl.constexpr, BACK_DOWN: gl.constexpr,
    POSITION_FROM: gl.constexpr, COPYING: gl.constexpr, FLIGHT: gl.constexpr,
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
            DTYPE, EPS, WIDTH, STAGE, STAGES, SLICES, HEAD_DIM, GROUP, HEADS, KV_HEADS, CACHE, BLOCK_T, SPAN,
            SPANS, VOCAB, SLOT, SET, BACK_OUTPUT, BACK_DOWN, POSITION_FROM,
        )),
        (_copy, (W, base, records, begin, end, buffers, ring, DTYPE, WIDTH, STAGE, STAGES, FLIGHT)),
    ], [1], [COPYING])  # fmt: skip


@dataclass(frozen=True)
class StreamChoice:
    """How the kernel runs. stages: of the ring; flight: those on their way at most, of the head one more; block_t:
    positions of the cache at once."""

    stages: int = 7
    flight: int = 1
    block_t: int = 32


@dataclass
class StreamedMemory(Memory):
    """`Memory` with all matrices in one allocation, and results in two sets of slots, blank where nothing is stored.

    results: float32 [2, counters, slot]; epoch: int32 [1], steps so far, of which the kernel takes the set.
    """

    results: Tensor = field(init=False)
    epoch: Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = 2, t.counters(self.how), slot_of(self.how)
        blank = torch.full(shape, BLANK.value, dtype=torch.int32, device=self.counters.device)
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
    """Values of the largest result of a stage, or of the spans of a record's heads."""
    m = how.model
    parts = 2 * how.split(m.vocab)  # of the head a logit and its token
    return max(m.ffn, m.qkv_width, parts, how.group * how.spans * (m.head_dim + t.SPAN_PADDING))


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


def lowering(model: Decoder, programs: int, cache: int = 2048, itemsize: int = 2) -> Lowering:
    """What is lowered for the kernel: heads in pairs where there are some, positions in eight spans of whole blocks."""
    span = triton.cdiv(cache, 8 * StreamChoice().block_t) * StreamChoice().block_t
    sizes = {"cache": cache, "itemsize": itemsize, "span": span, "group": 2 if 2 in t.groups(model, itemsize) else 1}
    return Lowering(model, programs, position=None, rows=STAGE, **sizes)


def step(
    memory: StreamedMemory,
    tables: Uploaded,
    position: int | None = None,
    position_from: str = "launch",
    choice: StreamChoice = StreamChoice(),
    limit: int = 1 << 22,
) -> Launch:
    """One decoder step, as `step.step`: the same arguments but choice, and the same tables.

    memory: of `together`, its matrices bf16 or fp16. ValueError also for what is not a Hopper GPU, and for tables that
    `check_streamed` refuses.
    """
    how, model, W = memory.how, memory.how.model, memory.matrix()
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
    # from the stage that adds to the residual stream to the one before it that did, by their counters
    args |= {"BACK_OUTPUT": 3 + how.groups, "BACK_DOWN": 2, "POSITION_FROM": position_from}
    args |= {"COPYING": COPYING, "FLIGHT": choice.flight}
    return Launch(_streamed_kernel, (how.programs,), args, {"num_warps": 4})


def check_streamed(how: Lowering, dtype: torch.dtype, choice: StreamChoice) -> None:
    """Raise ValueError for tables or a choice that the kernel cannot take."""
    m, most = how.model, ROOM // (STAGE * how.model.hidden * dtype.itemsize)
    check_one_of("block_t", choice.block_t, (16, 32))
    check_one_of("dtype", dtype, (torch.bfloat16, torch.float16))
    check_one_of("hidden", m.hidden, WIDTHS)
    check_one_of("head_dim", m.head_dim, (32, 64, 128))
    for name, value, allowed in (
        ("values of all query heads", m.q_width, m.hidden),
        ("ffn", m.ffn, SLICES * m.hidden),
        ("batch", how.batch, 1),
        ("group", how.group, 2),
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
    if not 2 <= choice.stages <= most:
        raise ValueError(f"stages is {choice.stages}; allowed: 2 to {most}")
    if not 1 <= choice.flight < choice.stages:
        raise ValueError(f"flight is {choice.flight}; allowed: 1 to {choice.stages - 1}")


def compilable(model: str, cache: int = 2048, position_from: str = "device", dtype: str = "bfloat16") -> Launch:
    """A step of one of `model.MODELS` that can be compiled but not run. For `labkit.evidence.compiled`."""
    kind = getattr(torch, dtype)
    how = lowering(decoder(model), multiprocessors(torch.device("cpu")), cache, kind.itemsize)
    buffers = {name: torch.empty(1, dtype=kind) for name in buffer_shapes(how)}
    memory = _Compiled(how, buffers)
    return step(memory, upload(lower(how)), 0 if position_from == "launch" else None, position_from)


class _Compiled(StreamedMemory):
    """Memory that holds one value of each buffer."""

    def matrix(self) -> Tensor:
        """A stage of the ring."""
        return torch.empty((STAGE, self.how.model.hidden), dtype=self.buffers["head"].dtype)
