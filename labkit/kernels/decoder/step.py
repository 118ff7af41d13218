"""A decoder step as one persistent Triton kernel that reads what to do from tables: a small virtual machine.

Every program runs its queue of records, one after the other: load the record, wait for its counter, work, signal. All
programs must be resident at once, since a waiting one spins; the caller bounds them by occupancy. A spin is bounded
too: a program that gives up writes the record's number + 1 to `error`, then waits no more, so that a table that can
never finish ends.

Between two stages all programs wait for the slowest, and the memory would stand still. What depends on nothing is
therefore fetched before the wait. RMSNorm is part of the projection after it: the sum of squares is gathered in the
same pass, and the norm is one factor of the result. The rotary embedding is part of attention: a stage of its own would
be one more wait in every layer. Activations are float32, sums too.

| choice    | hypothesis                                                                                              |
|-----------|---------------------------------------------------------------------------------------------------------|
| ahead     | tiles of a projection's first rows, and keys and values of earlier tokens, are loaded to registers      |
|           | before the wait: the memory works while programs wait, as far as registers go                           |
| prefetch  | so many bytes of the record's weights are asked for in the L2 before the wait: no registers, so it can  |
|           | be as much as a wait lasts                                                                              |
| span      | attention over the cache by at most so many positions a record (flash decoding): with one record a head |
|           | most of the GPU waits for a few programs that walk through the context. Positions are shared evenly     |
|           | among the records, a block each at first; one that has none yet waits for nobody                        |
| group     | query heads of one kv head as one record: their keys and values are read once, and all of them are      |
|           | multiplied by one matrix instruction, queries and weights as sums of three 16-bit values each           |
| registers | a bound, so that as many programs fit on an SM as can load at once                                      |
| rows, block_k, num_warps, programs | bytes in flight on an SM, against the registers of the largest op              |
| batch     | sequences that share a step: weights are read once for all of them, so that a token of each costs what  |
|           | their attention adds, as long as multiplying hides behind reading                                       |

What a program's next projection reads is looked up while the one before is at work (`_rows_of`): its first tiles are
asked for as soon as the one before has signalled. Not before that: the signal would wait for them.

With `marks` every record also writes down when it began, was released and had done its work: what a stage waits for.

Memory order: one thread waits with an acquire, then a barrier; all threads store, then a barrier and one release. Bits
do not depend on how a projection is split, on which program runs what, or on who comes last; those of attention depend
on the span.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from labkit.kernels.checks import check_one_of
from labkit.kernels.decoder import tables as t
from labkit.kernels.decoder.model import Decoder, Weights, decoder, head_of, inverse_frequencies, layer_of
from labkit.kernels.decoder.tables import Lowering, Tables, buffer_shapes, check_position, lower
from labkit.kernels.launch import Launch

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
INTEGERS = ("token", "tokens", "best_token")
LEAST_BLOCK_T = 16  # positions at once, of several heads: what a matrix instruction sums over
RESULTS = (*INTEGERS, "hidden", "qkv", "spans", "attention", "ffn", "logits", "best")

_WORDS: tl.constexpr = tl.constexpr(len(t.WORDS))
_WEIGHT, _INPUT, _OUT, _GAIN = (tl.constexpr(word) for word in (t.WEIGHT, t.INPUT, t.OUT, t.GAIN))
_FIRST, _SECOND, _K, _START = (tl.constexpr(word) for word in (t.FIRST, t.SECOND, t.K, t.START))
_STOP, _SLOT, _POSITION, _WAIT = (tl.constexpr(word) for word in (t.STOP, t.SLOT, t.POSITION, t.WAIT))
_TARGET, _SIGNAL, _ARRIVALS = (tl.constexpr(word) for word in (t.TARGET, t.SIGNAL, t.ARRIVALS))
_OUTPUT, _GATE_UP, _DOWN, _HEAD = (tl.constexpr(op) for op in (t.OUTPUT, t.GATE_UP, t.DOWN, t.HEAD))
_EMBED, _ATTENTION = tl.constexpr(t.EMBED), tl.constexpr(t.ATTENTION)
_PADDING, _COLUMNS = tl.constexpr(t.SPAN_PADDING), tl.constexpr(t.COLUMNS)
_MOMENTS: tl.constexpr = tl.constexpr(len(t.MOMENTS))


@triton.jit
def _buffer(buffers, record, WORD: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer to the buffer that a word of the record names; to the first buffer if it names none."""
    number = tl.maximum(tl.load(record + WORD), 0)
    return tl.multiple_of(tl.load(buffers + number * 4).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _columns(buffers, record, WORD: tl.constexpr):
    """Values of a row of the buffer that a word of the record names; of the first buffer if it names none."""
    return tl.load(buffers + tl.maximum(tl.load(record + WORD), 0) * 4 + _COLUMNS).to(tl.int32)


@triton.jit
def _mark(marks, number, WHICH: tl.constexpr, MARKS: tl.constexpr):
    """The time, ns, of one moment of a record."""
    if MARKS:
        tl.store(marks + number * _MOMENTS + WHICH, globaltimer())


@triton.jit
def _wait(record, number, counters, error, limit, marks, MARKS: tl.constexpr):
    """Wait until the record's counter has reached its target; returns the spins that are left to later waits.

    The atomic that adds nothing is a load with acquire semantics, by one thread for all.
    """
    counter = counters + tl.maximum(tl.load(record + _WAIT), 0)
    target = tl.load(record + _TARGET)  # -1 where there is nothing to wait for
    seen = tl.atomic_add(counter, 0, sem="acquire")
    spins = 0
    while (seen < target) & (spins < limit):
        seen = tl.atomic_add(counter, 0, sem="acquire")
        spins += 1
    if seen < target:
        tl.store(error, number + 1)
    tl.debug_barrier()
    _mark(marks, number, 1, MARKS)
    return tl.where(seen < target, 0, limit)


@triton.jit
def _tile(W, rows, ks, K, live, EVEN_K: tl.constexpr):
    """[ROWS, BLOCK_K] of W; not loaded where live is false."""
    pointers = W + rows.to(tl.int64)[:, None] * K + ks[None, :]
    mask = live & (rows >= 0)[:, None] & (ks >= 0)[None, :]  # the comparisons are true: they give the mask its shape
    if not EVEN_K:
        mask = mask & (ks < K)[None, :]
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _fetch(W, K, start, stop, DTYPE: tl.constexpr, BYTES: tl.constexpr):
    """Ask for the first BYTES of some rows in the L2, a line of 128 bytes a thread."""
    row_bytes = K.to(tl.int64) * (DTYPE.primitive_bitwidth // 8)
    at = tl.arange(0, BYTES // 128).to(tl.int64) * 128
    address = W.to(tl.int64) + start * row_bytes + tl.where(at < (stop - start) * row_bytes, at, 0)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _record(records, number, end):
    """A record before `end`; any other where there is no such one, so that what is read there is in the table."""
    return records + tl.maximum(tl.minimum(number, end - 1), 0) * _WORDS


@triton.jit
def _next_projection(records, number, end):
    """The first projection among a program's records from a number on; `end` if there is none."""
    op = tl.load(_record(records, number, end))
    while (op > _HEAD) & (number < end):
        number += 1
        op = tl.load(_record(records, number, end))
    return number


@triton.jit
def _rows_of(records, number, end, buffers, DTYPE: tl.constexpr, DIVISOR: tl.constexpr):
    """What a projection before `end` reads: the matrix, values of a row, first row, row after the last."""
    record = _record(records, number, end)
    K = tl.load(record + _K) // DIVISOR * DIVISOR  # changes nothing, but tells how rows are aligned
    return _buffer(buffers, record, _WEIGHT, DTYPE), K, tl.load(record + _START), tl.load(record + _STOP)


@triton.jit
def _first_tiles(W, rows, ks, K, live, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, EVEN_K: tl.constexpr):
    """The first AHEAD tiles of some rows; not loaded where live is false."""
    tiles = ()
    for i in tl.static_range(AHEAD):
        tiles = tiles + (_tile(W, rows, i * BLOCK_K + ks, K, live, EVEN_K),)
    return tiles


@triton.jit
def _tuple(value, COUNT: tl.constexpr):
    """A value so many times."""
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (value,)
    return values


@triton.jit
def _add_products(
    sums, squares, tile, x, gain, normed, ks, K,
    BATCH: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The sums of products, and of the squares of x, with one tile's added; of each sequence.

    sums: [ROWS, BLOCK_K / V], squares: [BLOCK_K / V]: V neighbours lie in one thread, which keeps one sum of them.
    """
    inside = (ks < K) | EVEN_K
    x_tiles = ()
    for i in tl.static_range(BATCH):
        x_tiles = x_tiles + (tl.load(x + i * K + ks, mask=inside, other=0.0),)
    gain_tile = tl.load(gain + ks, mask=inside & normed, other=1.0).to(tl.float32)
    new_sums, new_squares = (), ()
    for i in tl.static_range(BATCH):
        products = tile.to(tl.float32) * (x_tiles[i] * gain_tile)[None, :]
        new_sums = new_sums + (sums[i] + tl.sum(tl.reshape(products, (ROWS, BLOCK_K // V, V)), 2),)
        squared = tl.reshape(x_tiles[i] * x_tiles[i], (BLOCK_K // V, V))
        new_squares = new_squares + (squares[i] + tl.sum(squared, 1),)
    return new_sums, new_squares


@triton.jit
def _project(
    records, number, end, W, K, start, stop, buffers, counters, error, limit, marks,
    DTYPE: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
    EVEN_K: tl.constexpr, DIVISOR: tl.constexpr, EPS: tl.constexpr, V: tl.constexpr, PREFETCH: tl.constexpr,
    MARKS: tl.constexpr,
):  # fmt: skip
    """Rows of a matrix times x of each sequence, then what the op does with them.

    W, K, start, stop: of `_rows_of`, read while the record before was at work: the first tiles are asked for at once.
    Returns limit, and number, W, K, start, stop of the program's next projection.
    """
    ks, some = tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    read = tl.minimum(start + some, stop - 1)  # beyond the last row: it again, but it is not stored
    ahead = _first_tiles(W, read, ks, K, True, BLOCK_K, AHEAD, EVEN_K)
    if PREFETCH:
        _fetch(W, K, start, stop, DTYPE, PREFETCH)
    record = records + number * _WORDS
    op = tl.load(record)
    residual = (op == _OUTPUT) | (op == _DOWN)
    x = _buffer(buffers, record, _INPUT, tl.float32)
    y = _buffer(buffers, record, _OUT, tl.float32)
    gain = _buffer(buffers, record, _GAIN, DTYPE)
    normed = tl.load(record + _GAIN) >= 0
    after = _next_projection(records, number + 1, end)
    next_W, next_K, next_start, next_stop = _rows_of(records, after, end, buffers, DTYPE, DIVISOR)
    limit = _wait(record, number, counters, error, limit, marks, MARKS)

    width, parts = 0, 0  # values of a row of y, and of the best logits
    if BATCH > 1:
        width, parts = _columns(buffers, record, _OUT), _columns(buffers, record, _FIRST)
    best, best_row = _tuple(tl.full((), float("-inf"), tl.float32), BATCH), _tuple(tl.full((), 0, tl.int32), BATCH)
    for row in range(start, stop, ROWS):
        rows = row + some
        before = ()
        for i in tl.static_range(BATCH):
            before = before + (tl.load(y + i * width + rows, mask=(rows < stop) & residual, other=0.0),)
        sums = _tuple(tl.zeros((ROWS, BLOCK_K // V), tl.float32), BATCH)
        squares = _tuple(tl.zeros((BLOCK_K // V,), tl.float32), BATCH)
        for i in tl.static_range(AHEAD):
            sums, squares = _add_products(
                sums, squares, ahead[i], x, gain, normed, i * BLOCK_K + ks, K, BATCH, ROWS, BLOCK_K, EVEN_K, V
            )
        for k in range(AHEAD * BLOCK_K, K, BLOCK_K):
            tile = _tile(W, read, k + ks, K, True, EVEN_K)
            sums, squares = _add_products(
                sums, squares, tile, x, gain, normed, k + ks, K, BATCH, ROWS, BLOCK_K, EVEN_K, V
            )
        read = tl.minimum(rows + ROWS, stop - 1)
        ahead = _first_tiles(W, read, ks, K, row + ROWS < stop, BLOCK_K, AHEAD, EVEN_K)

        new_best, new_best_row = (), ()
        for i in tl.static_range(BATCH):
            total = tl.sum(sums[i], 1) * tl.where(normed, tl.rsqrt(tl.sum(squares[i], 0) / K + EPS), 1.0)
            if op == _GATE_UP:
                gate, up = tl.split(tl.reshape(total, (ROWS // 2, 2)))
                pair = row // 2 + tl.arange(0, ROWS // 2)
                tl.store(y + i * width + pair, gate / (1 + tl.exp(-gate)) * up, mask=pair < stop // 2)
            else:
                total += before[i]
                tl.store(y + i * width + rows, total, mask=rows < stop)
            top, top_row = best[i], best_row[i]
            if op == _HEAD:
                total = tl.where(rows < stop, total, float("-inf"))
                here = tl.max(total, 0)
                top_row = tl.where(here > top, row + tl.argmax(total, 0), top_row)
                top = tl.maximum(here, top)
            new_best, new_best_row = new_best + (top,), new_best_row + (top_row,)
        best, best_row = new_best, new_best_row
    if op == _HEAD:
        slot = tl.load(record + _SLOT)
        for i in tl.static_range(BATCH):
            tl.store(_buffer(buffers, record, _FIRST, tl.float32) + i * parts + slot, best[i])
            tl.store(_buffer(buffers, record, _SECOND, tl.int32) + i * parts + slot, best_row[i])
    return limit, after, next_W, next_K, next_start, next_stop


@triton.jit
def _embed(record, buffers, sequence, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr, VOCAB: tl.constexpr):
    """hidden = the token's row of the embedding; of one sequence."""
    K = tl.load(record + _K)
    token = tl.load(_buffer(buffers, record, _INPUT, tl.int32) + sequence)
    token = tl.minimum(tl.maximum(token, 0), VOCAB - 1)  # after a failure it may be anything
    W = _buffer(buffers, record, _WEIGHT, DTYPE) + token.to(tl.int64) * K
    y = _buffer(buffers, record, _OUT, tl.float32) + sequence * K
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        tl.store(y + ks, tl.load(W + ks, mask=ks < K).to(tl.float32), mask=ks < K)


@triton.jit
def _turned(pointer, half, cos, sin, HALF: tl.constexpr):
    """Both halves of a head at a position: the rotary embedding of what lies at the pointer."""
    a, b = tl.load(pointer + half), tl.load(pointer + HALF + half)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _attend(top, total, sums, q_a, q_b, k_a, k_b, values, live):
    """The running maximum, sum of weights and weighted values, with a block of positions added."""
    scores = tl.sum(k_a.to(tl.float32) * q_a[None, :] + k_b.to(tl.float32) * q_b[None, :], 1)
    scores = tl.where(live, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 0))
    weights, scale = tl.exp(scores - new), tl.exp(top - new)
    return new, total * scale + tl.sum(weights, 0), sums * scale + tl.sum(weights[:, None] * values.to(tl.float32), 0)


@triton.jit
def _cached(keys, values, ts, before, half, ds, HEAD_DIM: tl.constexpr):
    """Keys, in halves, and values of some positions, those before `before`; as the cache has them."""
    old = (ts < before)[:, None]
    at = ts[:, None] * HEAD_DIM
    k_a = tl.load(keys + at + half[None, :], mask=old, other=0.0)
    k_b = tl.load(keys + at + (HEAD_DIM // 2 + half)[None, :], mask=old, other=0.0)
    return k_a, k_b, tl.load(values + at + ds[None, :], mask=old, other=0.0)


@triton.jit
def _third(x, part, DTYPE: tl.constexpr):
    """One of the three 16-bit values whose sum a float32 value is, by its number from 0 on; 0 for any further one."""
    high = x.to(DTYPE).to(tl.float32)
    middle = (x - high).to(DTYPE).to(tl.float32)
    rest = tl.where(part == 0, high, tl.where(part == 1, middle, tl.where(part == 2, x - high - middle, 0.0)))
    return rest.to(DTYPE)


@triton.jit
def _attend_group(
    top, total, sums, q_a, q_b, k_a, k_b, values, live,
    DTYPE: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`_attend` of several heads. q_a, q_b: [PARTS * HEADS, HEAD_DIM / 2], parts by `_third`, one after the other.

    top, total: [HEADS]; sums: [HEADS, HEAD_DIM].
    """
    BLOCK_T: tl.constexpr = values.shape[0]
    HEAD_DIM: tl.constexpr = values.shape[1]
    scores = tl.dot(q_b, tl.trans(k_b), tl.dot(q_a, tl.trans(k_a)))
    scores = tl.sum(tl.reshape(scores, (PARTS, HEADS, BLOCK_T)), 0)
    scores = tl.where(live[None, :], scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    weights, scale = tl.exp(scores - new[:, None]), tl.exp(top - new)
    part = tl.arange(0, PARTS)[:, None, None]
    each = tl.reshape(_third(weights[None], part, DTYPE), (PARTS * HEADS, BLOCK_T))
    added = tl.sum(tl.reshape(tl.dot(each, values), (PARTS, HEADS, HEAD_DIM)), 0)
    return new, total * scale + tl.sum(weights, 1), sums * scale[:, None] + added


@triton.jit
def _attention(
    record, number, buffers, counters, error, limit, position, marks,
    DTYPE: tl.constexpr, BATCH: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, CACHE: tl.constexpr, BLOCK_T: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
    MARKS: tl.constexpr,
):  # fmt: skip
    """HEADS query heads over one span of the cache. What several records read of it comes from the L2 but once.

    Heads are numbered through all sequences, one sequence's after the other's.

    Query and new key get their rotary embedding here, the key in every record that reads it; of these the first one, in
    the span that has the position, appends key and value. The last span of a head puts the results of all together.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    PARTS: tl.constexpr = max(16 // HEADS, 4)  # of which three are not zero: a matrix instruction has 16 rows
    head, span = tl.load(record + _START), tl.load(record + _SLOT)
    kv_head = head // GROUP
    half, ds, some = tl.arange(0, HALF), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_T)
    cache = kv_head.to(tl.int64) * CACHE * HEAD_DIM
    keys, values = _buffer(buffers, record, _FIRST, DTYPE) + cache, _buffer(buffers, record, _SECOND, DTYPE) + cache
    share = SPAN  # of the positions that there are; none is shorter than a block
    if SPANS > 1:
        share = tl.cdiv(position + 1, BLOCK_T * SPANS) * BLOCK_T
    first = span * share
    end = tl.minimum(first + share, position + 1)
    if first <= position:  # else there is nothing to do, and nothing to wait for
        rope = _buffer(buffers, record, _WEIGHT, tl.float32) + position * HEAD_DIM
        cos, sin = tl.load(rope + half), tl.load(rope + HALF + half)
        old = tl.minimum(end, position)  # the cache has what is before
        k_a, k_b, v = _cached(keys, values, first + some, old, half, ds, HEAD_DIM)
        limit = _wait(record, number, counters, error, limit, marks, MARKS)
        qkv = _buffer(buffers, record, _INPUT, tl.float32)
        if BATCH > 1:  # keys and values lie between the queries of two sequences
            qkv += kv_head // KV_HEADS * (2 * KV_HEADS * HEAD_DIM)
        if HEADS == 1:
            q_a, q_b = _turned(qkv + head * HEAD_DIM, half, cos, sin, HALF)
        else:
            rows = tl.arange(0, PARTS * HEADS)[:, None]
            at = qkv + (head + rows % HEADS) * HEAD_DIM
            q_a, q_b = _turned(at, half[None, :], cos[None, :], sin[None, :], HALF)
        own = qkv + (KV_HEADS * GROUP + kv_head) * HEAD_DIM
        if BATCH > 1:
            own += kv_head // KV_HEADS * (KV_HEADS * (GROUP - 1) * HEAD_DIM)
        new_a, new_b = _turned(own, half, cos, sin, HALF)
        new_a, new_b = new_a.to(DTYPE), new_b.to(DTYPE)  # as later tokens will read them
        new_v = tl.load(own + KV_HEADS * HEAD_DIM + ds).to(DTYPE)
        if (end > position) & (head % GROUP == 0):
            tl.store(keys + position * HEAD_DIM + half, new_a)
            tl.store(keys + position * HEAD_DIM + HALF + half, new_b)
            tl.store(values + position * HEAD_DIM + ds, new_v)
        q_a, q_b = q_a * (HEAD_DIM**-0.5), q_b * (HEAD_DIM**-0.5)
        if HEADS == 1:
            top, total, sums = float("-inf"), 0.0, tl.zeros((HEAD_DIM,), tl.float32)
        else:
            q_a, q_b = _third(q_a, rows // HEADS, DTYPE), _third(q_b, rows // HEADS, DTYPE)
            top, total = tl.full((HEADS,), float("-inf"), tl.float32), tl.zeros((HEADS,), tl.float32)
            sums = tl.zeros((HEADS, HEAD_DIM), tl.float32)
        for start in range(first, end, BLOCK_T):
            ts = start + some
            new = (ts == position)[:, None]
            now_a, now_b = tl.where(new, new_a[None, :], k_a), tl.where(new, new_b[None, :], k_b)
            now_v = tl.where(new, new_v[None, :], v)
            if SPAN > BLOCK_T:
                k_a, k_b, v = _cached(keys, values, ts + BLOCK_T, old, half, ds, HEAD_DIM)
            if HEADS == 1:
                top, total, sums = _attend(top, total, sums, q_a, q_b, now_a, now_b, now_v, ts < end)
            else:
                top, total, sums = _attend_group(
                    top, total, sums, q_a, q_b, now_a, now_b, now_v, ts < end, DTYPE, HEADS, PARTS
                )

        y = _buffer(buffers, record, _OUT, tl.float32) + head * HEAD_DIM
        each, weight = 0, total
        if HEADS == 1:
            y += ds
        else:
            each, weight = tl.arange(0, HEADS), total[:, None]
            y += each[:, None] * HEAD_DIM + ds[None, :]
        spans = position // share + 1  # that have a position
        if SPANS == 1:  # noqa: SIM114 (known when compiled: the rest is left out)
            tl.store(y, sums / weight)
        elif spans == 1:
            tl.store(y, sums / weight)
        else:
            parts = _buffer(buffers, record, _GAIN, tl.float32) + head * (SPANS * (HEAD_DIM + _PADDING))
            part = parts + span * (HEAD_DIM + _PADDING)
            if HEADS == 1:
                tl.store(part + ds, sums / weight)
            else:
                part += each * (SPANS * (HEAD_DIM + _PADDING))
                tl.store(part[:, None] + ds[None, :], sums / weight)
            tl.store(part + HEAD_DIM, top + tl.log(total))
            tl.debug_barrier()  # all warps have stored before one thread says so
            arrivals = counters + tl.load(record + _ARRIVALS)
            if tl.atomic_add(arrivals, 1, sem="acq_rel") == spans - 1:
                tl.debug_barrier()
                if HEADS == 1:
                    tl.store(y, _together(parts, spans, ds, HEAD_DIM, SPANS))
                else:
                    tl.store(y, _together_group(parts, spans, ds, HEAD_DIM, SPANS, HEADS))
    return limit


@triton.jit
def _together(parts, spans, ds, HEAD_DIM: tl.constexpr, SPANS: tl.constexpr):
    """Attention of a query head over all spans, in their order, from its results over each of them."""
    some = tl.arange(0, triton.next_power_of_2(SPANS))
    live = some < spans
    at = parts + some * (HEAD_DIM + _PADDING)
    weights = tl.load(at + HEAD_DIM, mask=live, other=float("-inf"))
    weights = tl.exp(weights - tl.max(weights, 0))
    each = tl.load(at[:, None] + ds[None, :], mask=live[:, None], other=0.0)
    return tl.sum(weights[:, None] * each, 0) / tl.sum(weights, 0)


@triton.jit
def _together_group(parts, spans, ds, HEAD_DIM: tl.constexpr, SPANS: tl.constexpr, HEADS: tl.constexpr):
    """`_together` of HEADS query heads."""
    some = tl.arange(0, triton.next_power_of_2(SPANS))[None, :]
    hs = tl.arange(0, HEADS)[:, None]
    live = (some < spans) & (hs >= 0)
    at = parts + (hs * SPANS + some) * (HEAD_DIM + _PADDING)
    weights = tl.load(at + HEAD_DIM, mask=live, other=float("-inf"))
    weights = tl.exp(weights - tl.max(weights, 1)[:, None])
    each = tl.load(at[:, :, None] + ds[None, None, :], mask=live[:, :, None], other=0.0)
    return tl.sum(weights[:, :, None] * each, 1) / tl.sum(weights, 1)[:, None]


@triton.jit
def _argmax(record, buffers, sequence, position, BLOCK_K: tl.constexpr, CACHE: tl.constexpr):
    """The token with the largest logit, of equals the first, as the next input of one sequence."""
    parts = tl.load(record + _K)
    best = _buffer(buffers, record, _INPUT, tl.float32) + sequence * parts
    best_token = _buffer(buffers, record, _WEIGHT, tl.int32) + sequence * parts
    top, token = float("-inf"), 0
    for first in range(0, parts, BLOCK_K):
        ks = first + tl.arange(0, BLOCK_K)
        values = tl.load(best + ks, mask=ks < parts, other=float("-inf"))
        tokens = tl.load(best_token + ks, mask=ks < parts, other=0)
        here = tl.max(values, 0)
        found = tl.min(tl.where(values == here, tokens, 2147483647), 0)
        token = tl.where(here > top, found, token)
        top = tl.maximum(here, top)
    tl.store(_buffer(buffers, record, _OUT, tl.int32) + sequence, token)
    tl.store(_buffer(buffers, record, _FIRST, tl.int32) + sequence * (CACHE + 1) + position + 1, token)


@triton.jit
def _reset(counters, count, BLOCK_K: tl.constexpr):
    """All counters back to zero, by the last record: it has waited for all others, so that nobody waits any more."""
    for first in range(0, count, BLOCK_K):
        ks = first + tl.arange(0, BLOCK_K)
        tl.store(counters + ks, tl.zeros((BLOCK_K,), tl.int32), mask=ks < count)


@triton.jit
def _other(
    record, number, buffers, counters, error, limit, position, position_at, count, marks,
    DTYPE: tl.constexpr, BATCH: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, CACHE: tl.constexpr, BLOCK_T: tl.constexpr, SPAN: tl.constexpr,
    SPANS: tl.constexpr, VOCAB: tl.constexpr, POSITION_FROM: tl.constexpr, MARKS: tl.constexpr,
):  # fmt: skip
    """A record that is no projection."""
    op = tl.load(record)
    if POSITION_FROM == "record":
        position = tl.load(record + _POSITION)
    if op == _ATTENTION:
        limit = _attention(
            record, number, buffers, counters, error, limit, position, marks,
            DTYPE, BATCH, HEAD_DIM, GROUP, HEADS, KV_HEADS, CACHE, BLOCK_T, SPAN, SPANS, MARKS,
        )  # fmt: skip
    else:
        limit = _wait(record, number, counters, error, limit, marks, MARKS)
        if op == _EMBED:
            for i in tl.static_range(BATCH):
                _embed(record, buffers, i, DTYPE, BLOCK_K, VOCAB)
        else:
            for i in tl.static_range(BATCH):
                _argmax(record, buffers, i, position, BLOCK_K, CACHE)
            _reset(counters, count, BLOCK_K)
            if POSITION_FROM == "device":
                tl.store(position_at, position + 1)
    return limit


@triton.jit(do_not_specialize=["position", "limit"])
def _step_kernel(
    records, queue, buffers, counters, error, marks, position, position_at, count, limit,
    DTYPE: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
    AHEAD: tl.constexpr, EVEN_K: tl.constexpr, DIVISOR: tl.constexpr, EPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, CACHE: tl.constexpr, SPAN: tl.constexpr,
    SPANS: tl.constexpr, VOCAB: tl.constexpr, POSITION_FROM: tl.constexpr, V: tl.constexpr, PREFETCH: tl.constexpr,
    MARKS: tl.constexpr,
):  # fmt: skip
    """One program: its queue, from the first record to the last."""
    program = tl.program_id(0)
    if POSITION_FROM == "device":
        position = tl.load(position_at)
    end = tl.load(queue + program + 1)
    begin = tl.load(queue + program)
    projection = _next_projection(records, begin, end)
    W, K, start, stop = _rows_of(records, projection, end, buffers, DTYPE, DIVISOR)
    for number in range(begin, end):
        record = records + number * _WORDS
        _mark(marks, number, 0, MARKS)
        if number == projection:
            limit, projection, W, K, start, stop = _project(
                records, number, end, W, K, start, stop, buffers, counters, error, limit, marks,
                DTYPE, BATCH, ROWS, BLOCK_K, AHEAD, EVEN_K, DIVISOR, EPS, V, PREFETCH, MARKS,
            )  # fmt: skip
        else:
            limit = _other(
                record, number, buffers, counters, error, limit, position, position_at, count, marks,
                DTYPE, BATCH, BLOCK_K, HEAD_DIM, GROUP, HEADS, KV_HEADS, CACHE, BLOCK_T, SPAN, SPANS, VOCAB,
                POSITION_FROM, MARKS,
            )  # fmt: skip
        signal = tl.load(record + _SIGNAL)
        _mark(marks, number, 2, MARKS)
        tl.debug_barrier()  # all warps have stored before one thread says so
        if signal >= 0:
            tl.atomic_add(counters + signal, 1, sem="release")


@dataclass(frozen=True)
class Choice:
    """How the kernel runs. block_k: values of a tile's row; ahead: tiles loaded before the wait; block_t: positions of
    the cache at once; registers: of a thread at most, 0: as many as the compiler takes; prefetch: bytes of a record's
    weights that are asked for in the L2 before the wait; marks: write down when (not in the interpreter)."""

    block_k: int = 1024
    ahead: int = 1
    block_t: int = 16
    num_warps: int = 4
    registers: int = 0
    prefetch: int = 0
    marks: bool = False


@dataclass
class Memory:
    """All that a decoder step reads and writes, on one device.

    buffers: by the names of `buffer_shapes`, in its order. counters: int32, zeros. error: int32 [1], the number + 1 of
    a record that gave up waiting, or 0. position: int32 [1], for launches that have it from the device. marks: int64
    [records, 3], ns by `tables.MOMENTS`, of the last step that had them written down; None before that.
    """

    how: Lowering
    buffers: dict[str, Tensor]
    counters: Tensor = field(init=False)
    error: Tensor = field(init=False)
    position: Tensor = field(init=False)
    marks: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        device = self.buffers["token"].device
        self.counters = torch.zeros(t.counters(self.how), dtype=torch.int32, device=device)
        self.error, self.position = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))

    def addresses(self) -> np.ndarray:
        """Where each buffer is, in the order of the table; int64."""
        return np.array([tensor.data_ptr() for tensor in self.buffers.values()], np.int64)

    def extents(self) -> list[tuple[int, int]]:
        """(address, bytes) of each buffer, as `validate` takes them."""
        return [(tensor.data_ptr(), tensor.nbytes) for tensor in self.buffers.values()]

    def check(self) -> None:
        """Wait for the device; RuntimeError if a record gave up waiting, and everything is ready for another launch."""
        if number := int(self.error):
            self.error.zero_()
            self.counters.zero_()
            raise RuntimeError(f"record {number - 1} waited too long: its counter did not reach its target")


def allocate(how: Lowering, weights: Weights, device: str | torch.device = "cpu") -> Memory:
    """The buffers of a lowering, weights packed (q, k and v one matrix; gate and up interleaved by rows), caches zero.

    weights: as `model.load_weights` returns them, all of one dtype: bf16, fp16 or fp32, of how.itemsize bytes; stays
    on its device if that is `device`. Results are poisoned with NaN. ValueError for a dtype that does not fit.
    """
    dtypes = {w.dtype for w in weights.values()}
    dtype = dtypes.pop()
    if dtypes or dtype not in DTYPES or dtype.itemsize != how.itemsize:
        raise ValueError(f"weights are {dtype}; allowed: one of {', '.join(map(str, DTYPES))} of {how.itemsize} bytes")
    ready = {"embedding": weights["model.embed_tokens.weight"], "final_gain": weights["model.norm.weight"]}
    angle = torch.arange(how.cache)[:, None] * inverse_frequencies(how.model)
    ready |= {"head": head_of(how.model, weights), "rope": torch.cat([angle.cos(), angle.sin()], 1).float()}
    for i in range(how.model.layers):
        ready |= {f"{name}.{i}": tensor for name, tensor in _packed(how.model, layer_of(how.model, weights, i)).items()}
    return _memory(how, {name: _aligned(tensor.to(device)) for name, tensor in ready.items()})


def fresh(memory: Memory, how: Lowering) -> Memory:
    """Memory of another decode with the same weights: what is written is its own, caches zero, results poisoned.

    how: of the same model, dtype and cache.
    """
    written = (*RESULTS, *(name for name in memory.buffers if "cache" in name))
    return _memory(how, {name: tensor for name, tensor in memory.buffers.items() if name not in written})


def _memory(how: Lowering, weights: Weights) -> Memory:
    """Memory with these weights, by the names of buffers; all else is new."""
    found, embedding = {}, weights["embedding"]
    for name, (rows, columns, _) in buffer_shapes(how).items():
        if name in weights:
            found[name] = weights[name]
            continue
        kind, value = (torch.int32, -1) if name in INTEGERS else (torch.float32, float("nan"))
        if "cache" in name:
            kind, value = embedding.dtype, 0
        found[name] = torch.full((rows, columns), value, dtype=kind, device=embedding.device)
    return Memory(how, found)


def _packed(model: Decoder, layer: Weights) -> Weights:
    gate, up = layer["mlp.gate_proj"], layer["mlp.up_proj"]
    return {
        "gain_1": layer["input_layernorm"],
        "qkv_weight": torch.cat([layer[f"self_attn.{name}_proj"] for name in "qkv"]),
        "output_weight": layer["self_attn.o_proj"],
        "gain_2": layer["post_attention_layernorm"],
        "gate_up_weight": torch.stack([gate, up], 1).view(2 * model.ffn, model.hidden),
        "down_weight": layer["mlp.down_proj"],
    }


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, at a multiple of 16 bytes: what comes from a file may lie anywhere."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


@dataclass(frozen=True)
class Uploaded:
    """The tables as tensors on the device of the kernel."""

    buffers: Tensor
    records: Tensor
    queue: Tensor


def upload(tables: Tables, device: str | torch.device = "cpu") -> Uploaded:
    """The three tables, each by a copy of its own from pageable memory."""
    arrays = (tables.buffers, tables.records, tables.queue)
    return Uploaded(*(torch.from_numpy(array.copy()).to(device) for array in arrays))


def step(
    memory: Memory,
    tables: Uploaded,
    position: int | None = None,
    position_from: str = "launch",
    choice: Choice = Choice(),
    limit: int = 1 << 24,
) -> Launch:
    """One decoder step: the token in `token` at a position, its successor to `token` and to `tokens[position + 1]`.

    memory: of the same lowering as the tables, which `validate` should have passed: the kernel checks nothing.
    position: for position_from "launch"; "record" takes the tables', "device" memory.position, which the step advances.
    limit: polls of a wait before it gives up. All programs must be resident. ValueError for a position past the cache,
    an unknown position_from, a head_dim that is no power of two, or a choice that is not allowed.
    """
    how, model = memory.how, memory.how.model
    check_step(how, position, position_from, choice)
    dtype, ks = memory.buffers["embedding"].dtype, [k for _, k in how.projections().values()]
    most = 16 // how.itemsize
    tensors = {"records": tables.records, "queue": tables.queue, "buffers": tables.buffers}
    tensors |= {"counters": memory.counters, "error": memory.error, "position_at": memory.position}
    if choice.marks and memory.marks is None:
        shape = len(tables.records), len(t.MOMENTS)
        memory.marks = torch.zeros(shape, dtype=torch.int64, device=tables.records.device)
    tensors["marks"] = memory.marks if choice.marks else memory.error
    sizes = {"position": position or 0, "count": len(memory.counters), "limit": limit}
    constants = {
        "DTYPE": DTYPES[dtype],
        "BATCH": how.batch,
        "ROWS": how.rows,
        "BLOCK_K": choice.block_k,
        "BLOCK_T": choice.block_t,
        "AHEAD": choice.ahead,
        "EVEN_K": all(k % choice.block_k == 0 and k >= choice.block_k * choice.ahead for k in ks),
        "DIVISOR": next(d for d in (most, most // 2, 2, 1) if d and all(k % d == 0 for k in ks)),
        "EPS": model.eps,
        "HEAD_DIM": model.head_dim,
        "GROUP": model.group,
        "HEADS": how.group,
        "KV_HEADS": model.kv_heads,
        "CACHE": how.cache,
        "SPAN": how.positions,
        "SPANS": how.spans,
        "VOCAB": model.vocab,
        "POSITION_FROM": position_from,
        "V": min(most, choice.block_k),
        "PREFETCH": choice.prefetch,
        "MARKS": choice.marks,
    }
    options = {"num_warps": choice.num_warps} | ({"maxnreg": choice.registers} if choice.registers else {})
    return Launch(_step_kernel, (how.programs,), tensors | sizes | constants, options)


def compilable(
    model: str, programs: int = 132, rows: int = 4, cache: int = 2048, position_from: str = "launch",
    dtype: str = "bfloat16", span: int | None = None, batch: int = 1, group: int = 1, **choice: int,
) -> Launch:  # fmt: skip
    """A step of one of `model.MODELS` that can be compiled but not run: its buffers hold one value each.

    dtype: of the weights, a name in torch; choice: fields of `Choice`. For `labkit.evidence.compiled`.
    """
    kind = getattr(torch, dtype)
    sizes = {"itemsize": kind.itemsize, "span": span, "batch": batch, "group": group}
    how = Lowering(decoder(model), programs, cache=cache, rows=rows, **sizes)
    buffers = {name: torch.empty(1, dtype=kind) for name in buffer_shapes(how)}
    position = 0 if position_from == "launch" else None
    return step(Memory(how, buffers), upload(lower(how)), position, position_from, Choice(**choice))


def check_step(how: Lowering, position: int | None, position_from: str, choice: Choice) -> None:
    """Raise ValueError for what the kernel cannot take."""
    check_position_from(how, position, position_from)
    powers = {"head_dim": how.model.head_dim, "block_k": choice.block_k, "block_t": choice.block_t}
    for name, value in powers.items():
        if value < 1 or value & (value - 1):
            raise ValueError(f"{name} is {value}; allowed: a power of two")
    if choice.prefetch and (choice.prefetch < 128 or choice.prefetch & (choice.prefetch - 1)):
        raise ValueError(f"prefetch is {choice.prefetch}; allowed: 0 or a power of two from 128 on")
    if how.group > 1 and choice.block_t < LEAST_BLOCK_T:
        allowed = f"at least {LEAST_BLOCK_T} with a group of {how.group} heads"
        raise ValueError(f"block_t is {choice.block_t}; allowed: {allowed}")
    if choice.ahead < 0:
        raise ValueError(f"ahead is {choice.ahead}; allowed: at least 0")


def check_position_from(how: Lowering, position: int | None, position_from: str) -> None:
    """Raise ValueError for an unknown position_from, a position that it does not go with, or one past the cache."""
    check_one_of("position_from", position_from, t.POSITION_FROM)
    if (position is None) == (position_from == "launch"):
        raise ValueError(f"position is {position} with position_from {position_from!r}; allowed: one for 'launch' only")
    if position is not None:
        check_position(position, how.cache)


def generate(
    memory: Memory, launch_at: Callable[[int], Launch], prompt: Sequence[int], count: int, start: int = 0
) -> list[int]:
    """Greedy generation: the prompt token by token from position `start`, then `count` tokens after it.

    launch_at: the launch for a position; a way that keeps its tables changes or copies them there. RuntimeError if a
    record gave up waiting.
    """
    return generate_each(memory, launch_at, [prompt], count, start)[0]


def generate_each(
    memory: Memory, launch_at: Callable[[int], Launch], prompts: Sequence[Sequence[int]], count: int, start: int = 0
) -> list[list[int]]:
    """`generate` for each sequence of a batch; prompts: as long as one another, a sequence each.

    ValueError for another number of prompts, or for prompts of several lengths.
    """
    token, lengths = memory.buffers["token"], {len(prompt) for prompt in prompts}
    if len(prompts) != len(token) or len(lengths) != 1:
        raise ValueError(f"prompts are {len(prompts)} of {sorted(lengths)} tokens; allowed: {len(token)} of one length")
    length, found = lengths.pop(), []
    given = torch.tensor(prompts, dtype=token.dtype, device=token.device)
    for i in range(length + count - 1):
        if i < length:
            token.copy_(given[:, i : i + 1])
        launch_at(start + i)()
        if i >= length - 1:
            found.append(token.clone())  # stays on the device: nothing waits for it here
    memory.check()
    return torch.cat(found, 1).tolist()
