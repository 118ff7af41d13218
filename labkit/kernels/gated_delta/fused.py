"""Extend (chunked prefill) of the gated delta rule with less through memory: what a chunk needs is made in its walk.

`chunked.extend` stores, of every chunk and value head, w and u for its walk, and v_new and the state for its output.
For 64 tokens with K = V = 128, in tensors of a chunk (16 KB in bf16; q and k are shared by HV / H heads), and products
in 2^20 multiply-adds, of which the inverse's 1.5 are in all:

| design             | stored and read again                       | tensors | products                               |
|--------------------|---------------------------------------------|---------|----------------------------------------|
| `chunked`          | w, u, v_new, the state (twice the size)     | 10      | 3 prepare + 2 states + 2 output = 7    |
| `segmented`'s walk | w, u                                        | 4       | 3 prepare + 4.5 = 7.5                  |
| here               | T and the scores of q and k, half each      | 2       | 2.5 solve + 4.5 walk = 7               |

since w h = T (β k exp(g) h) and u = T (β v), so that v_new = T β (v - k exp(g) h): one product of 64 x 64 x BV follows
on k h in the walk, instead of two of 64 x 64 x 128 before it. What is gained are bytes; the price is a chain of three
products from chunk to chunk where there were two. In chunks of 32 tokens, the default, T and the scores are half of
that again, and half of their products.

| launch | programs                       | what it does                                                               |
|--------|--------------------------------|----------------------------------------------------------------------------|
| solve  | chunk, some of the value heads | T β = (I + A)^-1 diag(β); norms and decays; decayed q·k of pairs of tokens |
|        | of one key                     |                                                                            |
| maps   | segment, value head, tile of V | only of what is cut: B and A of every segment but the last, as `segmented` |
|        | and of K                       |                                                                            |
| scan   | sequence, value head, tile     | `segmented`'s                                                              |
| walk   | segment, value head, tile of V | the chunks' steps from the true state, with outputs, cut or not            |

Variants, and what each one tests:

| choice       | hypothesis                                                                                            |
|--------------|-------------------------------------------------------------------------------------------------------|
| chunk        | longer chunks are fewer steps one after the other, shorter ones have fewer products and bytes: where  |
|              | every multiprocessor has work, the latter count                                                       |
| solve        | products of keys are the same for all value heads of a key: one program for several saves them; one   |
|              | warp has no barriers to wait at                                                                       |
| num_stages   | the walk is a chain of products: the more chunks are loaded ahead, the less it waits                  |
| dependent    | programs of the walk that load their states while the last ones of the solve run; but they are placed |
|              | where there is room then: where all find room at once, some multiprocessors get two and others none   |

The state is held as [values, K]: it, the residual and v_new are left operands of all products, which wgmma takes from
registers, and k, q, T and the scores are right ones as they were loaded, so that nothing on the chain from chunk to
chunk goes through shared memory. v comes in by a product of its own (T β v), half a one more.

Tried and left out, on an H100: the state as [K, values] (as fast at best; and with tiles below 64 and a last chunk
that is not whole, Triton 3.6 makes code that faults); tiles by the copy engine (within 3 % both ways); solve and walk
at once, part by part on two streams (slower, but for one segment of a long prompt). On an H200, one prompt of 65536
tokens: more programs of the solve at once by fewer registers (168: 0.98 times as long a call with 16/32 heads, 1.01 and
1.02 with 4/12 and 2/8; 128 longer for all).

One decay a value head (GDN) alone. Precision is that of `chunked`, but that there w and u are rounded to the inputs'
dtype, here k h alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from labkit.kernels.checks import check_one_of
from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.gated_delta import chunked
from labkit.kernels.gated_delta.chunked import (
    Extend,
    ExtendInputs,
    Plan,
    _inverse,
    _inverse_norm,
    _pair_decay,
    _rows,
    _squares,
    _store_rows,
)
from labkit.kernels.gated_delta.segmented import (
    LARGEST_K,
    Segments,
    Tile,
    _after,
    _chunks_of,
    _cut,
    _scan_kernel,
    _tile,
    check_choices,
    check_segments,
)
from labkit.kernels.gated_delta.segmented import PRECISIONS as SCANS
from labkit.kernels.gated_delta.segmented import cut as cut_even
from labkit.kernels.launch import Launch
from labkit.kernels.target import has_dependent_launch, multiprocessors

CHUNK = 32  # tokens
SUB = 4  # tokens that the solve does one after the other
SHORTEST = 8  # chunks of a segment, at least
LONG = 128  # chunks of a segment from which on two programs a multiprocessor pay, with two states to scan for one


@triton.jit
def _solve_kernel(
    q, k, g, beta, spans, factors, query_scores, scales, total, scale, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, HEADS: tl.constexpr, SUB: tl.constexpr, DOT: tl.constexpr,
    SOLVE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: what one chunk and HEADS value heads of one key need beside their states; of tokens that a last
    chunk lacks, zeros.

    factors [chunks, HV, BT, BT]: (I + A)^-1 diag(β); query_scores, of the same shape: decayed q·k of pairs of tokens.
    scales [chunks, HV, 3, BT]: -exp(g) / |k| and scale exp(g) / |q|, of the decay from the chunk's start; the decay to
    its end over |k|. total [chunks, HV]: the decay of the whole chunk.
    """
    EVEN_K: tl.constexpr = K % BK == 0
    if DEPENDENT:
        cuda.gdc_launch_dependents()  # the next kernel may start as soon as its programs find room
    pid = tl.program_id(0).to(tl.int64)
    first_head = pid % (HV // HEADS) * HEADS
    chunk = pid // (HV // HEADS)
    start = tl.load(spans + 2 * chunk).to(tl.int64)
    end = tl.load(spans + 2 * chunk + 1)
    i = tl.arange(0, BT)
    inside = i < end - start
    key_rows = (start * H + first_head // (HV // H)) * K  # of this chunk's first token: others' offsets take 32 bits
    dtype: tl.constexpr = factors.dtype.element_ty

    keys = tl.zeros([BT, BT], tl.float32)
    queries = tl.zeros([BT, BT], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    for first in range(0, K, BK):
        ks = first + tl.arange(0, BK)
        key = _rows(k + key_rows, i, inside, H * K, ks, K, EVEN_K)
        keys += tl.dot(key, tl.trans(key), input_precision=DOT)
        query = _rows(q + key_rows, i, inside, H * K, ks, K, EVEN_K)
        queries += tl.dot(query, tl.trans(key), input_precision=DOT)
    # Not of `key`, nor of `query` in that loop: see `compiler_errors.overwritten_operands`.
    key_scale = tl.where(inside, _inverse_norm(tl.sum(tl.where(i[:, None] == i[None, :], keys, 0.0), 1)), 0.0)
    for first in range(0, K, BK):
        squares += _squares(_rows(q + key_rows, i, inside, H * K, first + tl.arange(0, BK), K, EVEN_K))
    query_scale = tl.where(inside, scale * _inverse_norm(squares), 0.0)
    for hv in range(first_head, first_head + HEADS):
        place = chunk * HV + hv
        square = place * (BT * BT) + i[:, None] * BT + i[None, :]
        b = tl.load(beta + start * HV + hv + i * HV, mask=inside, other=0.0)
        step = tl.load(g + start * HV + hv + i * HV, mask=inside, other=0.0)
        since = tl.cumsum(step, 0)
        until = tl.cumsum(step, 0, reverse=True) - step
        own = scales + place * (3 * BT) + i
        tl.store(own, -key_scale * tl.exp(since))
        tl.store(own + BT, query_scale * tl.exp(since))
        tl.store(own + 2 * BT, key_scale * tl.exp(until))
        tl.store(total + place, tl.exp(tl.sum(step, 0)))
        pairs = _pair_decay(since, i[:, None] >= i[None, :]) * key_scale[None, :]
        tl.store(query_scores + square, (queries * query_scale[:, None] * pairs).to(dtype))
        A = tl.where(i[:, None] > i[None, :], keys * pairs * (b * key_scale)[:, None], 0.0)
        tl.store(factors + square, (_inverse(A, BT, SUB, SOLVE) * b[None, :]).to(dtype))


@triton.jit
def _values_after(narrow, key, factor, value, early, DOT: tl.constexpr):
    """v_new of a chunk, fp32, [values, BT], from the state before it in the inputs' dtype.

    early: of each key, -exp(g) / |k|.
    """
    known = tl.dot(narrow, tl.trans(key), input_precision=DOT) * early[None, :]
    factor = tl.trans(factor)
    new = tl.dot(tl.trans(value), factor, input_precision=DOT)
    return tl.dot(known.to(key.dtype), factor, new, input_precision=DOT)


@triton.jit
def _load(rows, i, inside, stride, columns, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Rows i of a matrix, `rows` pointing to their first; of a WHOLE chunk without masks."""
    if WHOLE:
        return tl.load(rows + i[:, None] * stride + columns[None, :])
    else:
        return _rows(rows, i, inside, stride, columns, WIDTH, False)


@triton.jit
def _square(of, place, i, BT: tl.constexpr):
    """Matrix `place` (64-bit) of those [BT, BT] of all chunks; the last chunk's have their zeros."""
    return tl.load(of + place * (BT * BT) + i[:, None] * BT + i[None, :])


@triton.jit
def _segment_of(segments, first_segments, segment, hv, HV: tl.constexpr):
    """A segment's first token, the one after its last, its first chunk's place, its sequence; is it first, or last."""
    start = tl.load(segments + 4 * segment)
    end = tl.load(segments + 4 * segment + 1)
    place = tl.load(segments + 4 * segment + 2).to(tl.int64) * HV + hv
    n = tl.load(segments + 4 * segment + 3).to(tl.int64)
    is_first = segment == tl.load(first_segments + n)
    is_last = segment == tl.load(first_segments + n + 1) - 1
    return start, end, place, n, is_first, is_last


@triton.jit
def _head_rows(x, first, hv, ks, i, inside, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """Keys or queries of a chunk, of the head that a value head has them of."""
    rows = x + (tl.cast(first, tl.int64) * HK + hv // (HV // HK)) * K
    return _load(rows, i, inside, HK * K, ks, K, WHOLE)


@triton.jit
def _keys_of(
    k, factors, scales, total, first, place, hv, ks, i, inside,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Of a chunk: keys, factors, what keys are scaled by on both ways (`scales`), the decay over all of it."""
    scales += place * (3 * BT) + i
    early, late, decay = tl.load(scales), tl.load(scales + 2 * BT), tl.load(total + place)
    key = _head_rows(k, first, hv, ks, i, inside, HK, HV, K, WHOLE)
    return key, _square(factors, place, i, BT), early, late, decay


@triton.jit
def _map_step(
    h, k, v, factors, scales, total, first, end, place, hv, columns, ks, i, is_map,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """The state after one chunk; place: of the chunk and value head. Of a tile of A, v counts as zero."""
    dtype: tl.constexpr = k.dtype.element_ty
    inside = i < end - first
    rows = tl.cast(first, tl.int64) * HV + hv  # to this chunk's first token: offsets of its others take 32 bits
    key, factor, early, late, decay = _keys_of(
        k, factors, scales, total, first, place, hv, ks, i, inside, HK, HV, K, BT, WHOLE
    )
    value = _rows(v + rows * V, i, inside & (is_map == 0), HV * V, columns, V, WHOLE)
    new = _values_after(h.to(dtype), key, factor, value, early, DOT)
    return _after(h, new, key, decay, late, True, False, DOT)


@triton.jit
def _maps_kernel(
    initial, k, v, factors, scales, total, segments, first_segments, starts, maps,
    HK: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    V_FIRST: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BV rows of B or of A of one segment and value head; where they go is `segmented`'s."""
    TILES_V: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = TILES_V + (K + BV - 1) // BV
    WHOLE: tl.constexpr = K == BK and V % BV == 0
    pid = tl.program_id(0)
    tile = pid % TILES
    hv = pid // TILES % HV
    segment = (pid // TILES // HV).to(tl.int64)
    start, end, place, n, is_first, is_last = _segment_of(segments, first_segments, segment, hv, HV)
    is_map = tile >= TILES_V
    stop = tl.where(is_last | (is_map & is_first), start, end)  # of those programs nothing is needed
    ks = tl.arange(0, BK)
    columns = tl.where(is_map, tile - TILES_V, tile) * BV + tl.arange(0, BV)
    i = tl.arange(0, BT)
    dtype: tl.constexpr = k.dtype.element_ty

    given, values = _tile(ks, columns, K, V, V_FIRST, True)
    stored, values = _tile(ks, columns, K, V, True, True)
    square, within = _tile(ks, columns, K, K, True, True)
    values = values & (tile < TILES_V)
    h = tl.load(initial + (n * HV + hv) * (K * V) + given, mask=values & is_first, other=0.0)
    h = tl.where(is_map & (square % (K + 1) == 0), 1.0, h)
    starts += (segment * HV + hv) * (K * V)
    tl.store(starts + stored, h, mask=values & is_first)
    # Segments end between chunks, but for the last one of a sequence, of which there is no map.
    for first in tl.range(start, stop, BT, num_stages=STAGES):
        h = _map_step(
            h, k, v, factors, scales, total, first, end, place, hv, columns, ks, i, is_map, HK, HV, K, V, BT, WHOLE, DOT
        )  # fmt: skip
        place += HV
    tl.store(starts + HV * (K * V) + stored, h, mask=values & (start < stop))
    within = within & is_map & (start < stop)
    if dtype == tl.bfloat16:
        large = h.to(dtype)
        maps += (segment * HV + hv) * (2 * K * K)
        tl.store(maps + square, large, mask=within)
        tl.store(maps + K * K + square, (h - large.to(tl.float32)).to(dtype), mask=within)
    else:
        tl.store(maps + (segment * HV + hv) * (K * K) + square, h, mask=within)


@triton.jit
def _walk_step(
    h, q, k, v, factors, query_scores, scales, total, out, first, end, place, hv, vs, ks, i,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """The state after one chunk, whose outputs are stored; place: of the chunk and value head."""
    dtype: tl.constexpr = k.dtype.element_ty
    inside = i < end - first
    rows = tl.cast(first, tl.int64) * HV + hv  # to this chunk's first token: offsets of its others take 32 bits
    key, factor, early, late, decay = _keys_of(
        k, factors, scales, total, first, place, hv, ks, i, inside, HK, HV, K, BT, WHOLE
    )
    queries = tl.load(scales + place * (3 * BT) + BT + i)
    query = _head_rows(q, first, hv, ks, i, inside, HK, HV, K, WHOLE)
    value = _load(v + rows * V, i, inside, HV * V, vs, V, WHOLE)
    scores = _square(query_scores, place, i, BT)
    narrow = h.to(dtype)
    o = tl.dot(narrow, tl.trans(query), input_precision=DOT) * queries[None, :]
    new = _values_after(narrow, key, factor, value, early, DOT)
    h = _after(h, new, key, decay, late, True, False, DOT)
    o = tl.trans(tl.dot(new.to(dtype), tl.trans(scores), o, input_precision=DOT))
    if WHOLE:
        tl.store(out + rows * V + i[:, None] * (HV * V) + vs[None, :], o.to(out.dtype.element_ty))
    else:
        _store_rows(out + rows * V, i, inside, HV * V, vs, o, V, False)
    return h


@triton.jit
def _walk_kernel(
    initial, starts, final, q, k, v, factors, query_scores, scales, total, segments, first_segments, out,
    HK: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    V_FIRST: tl.constexpr, CUT: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one segment. With CUT its first state is in starts, else initial."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    WHOLE: tl.constexpr = K == BK and V % BV == 0
    pid = tl.program_id(0)
    hv = pid // TILES % HV
    segment = (pid // TILES // HV).to(tl.int64)
    start, end, place, n, _is_first, is_last = _segment_of(segments, first_segments, segment, hv, HV)
    ks = tl.arange(0, BK)
    vs = pid % TILES * BV + tl.arange(0, BV)
    i = tl.arange(0, BT)

    left, mask = _tile(ks, vs, K, V, V_FIRST, True)
    if CUT:
        stored, mask = _tile(ks, vs, K, V, True, True)
        h = tl.load(starts + (segment * HV + hv) * (K * V) + stored, mask=mask, other=0.0)
    else:
        h = tl.load(initial + (n * HV + hv) * (K * V) + left, mask=mask, other=0.0)
        wait_for_inputs(DEPENDENT)  # of which the state is none: it is on its way by then
    whole = start + (end - start) // BT * BT
    # Stages are named, so that what feeds no product (the decays) comes ahead as well.
    for first in tl.range(start, whole, BT, num_stages=STAGES):
        h = _walk_step(
            h, q, k, v, factors, query_scores, scales, total, out, first, end, place, hv, vs, ks, i,
            HK, HV, K, V, BT, WHOLE, DOT,
        )  # fmt: skip
        place += HV
    if whole < end:
        h = _walk_step(
            h, q, k, v, factors, query_scores, scales, total, out, whole, end, place, hv, vs, ks, i,
            HK, HV, K, V, BT, False, DOT,
        )  # fmt: skip
    tl.store(final + (n * HV + hv) * (K * V) + left, h, mask=mask & is_last)


@dataclass(frozen=True)
class Ways:
    """The choices of one extend.

    columns: values a program of maps and walk, a power of two from 16. num_warps: 1, 2, 4 or 8. num_stages: 2 to 4.
    solve: value heads of a program (at most: those of one key, of which it is a divisor), warps, stages. scan: columns,
    warps and stages of that launch.
    """

    columns: int = 64
    num_warps: int = 4
    num_stages: int = 4
    solve: tuple[int, int, int] = (4, 1, 2)
    scan: tuple[int, int, int] = (16, 4, 3)


def ways_of(x: ExtendInputs, chunk: int = CHUNK) -> Ways:
    """The choice for these inputs, by measurement on an H100; as much as shared memory has room for."""
    if x.q.shape[-1] * x.v.element_size() > 256:
        return Ways(16, 4, 2)
    columns = min(64, max(16, triton.next_power_of_2(x.v.shape[-1])))
    return Ways(columns, num_stages=4 if chunk <= CHUNK else 3)


def cut(cu_seqlens: Tensor, segments: int, chunk: int = CHUNK, device: torch.device | str | None = None) -> Segments:
    """`segmented.cut`, in this file's chunks."""
    return cut_even(cu_seqlens, segments, chunk, device)


def choose(cu_seqlens: Tensor, HV: int, device: torch.device | str | None = None) -> Segments:
    """Sequences of these boundaries, [N + 1], in as many segments as pay, of HV value heads: by measurement on an H100.

    A segment's walk takes two programs a value head: as many as there are multiprocessors, or twice as many where
    segments are LONG even so, shared out by length. But fewer of those where the maps, of four programs a value head,
    take a second round for less than half of one: then as many as they take in one.
    """
    lengths = _chunks_of(cu_seqlens, CHUNK)
    here = multiprocessors(torch.device(cu_seqlens.device if device is None else device))
    room = here // (2 * HV)
    if max(lengths, default=0) >= LONG * 2 * room:
        room = here // HV
        beyond = HV * (2 * room - 3) - here  # of maps, by pairs of programs: the first segment and the last have one
        if 0 < beyond < here // 2:
            room = (here // HV + 3) // 2
    shares = [min(length // SHORTEST, room * length // max(1, sum(lengths))) for length in lengths]
    return _cut(cu_seqlens, [max(1, share) for share in shares], CHUNK, device)


def extend(x: ExtendInputs, v_first: bool, segments: Segments | int | None = None, ways: Ways | None = None) -> Extend:
    """An extend as `chunked.extend` makes it, of GDN.

    segments: where to cut, or how many segments of each sequence at most (with K up to 128), or None: by the rule of
    `choose`. ways: None: `ways_of`'s.
    Memory for factors and scores, [chunks, HV, chunk, chunk] each in v's dtype, and of what is cut K (K + V) fp32
    values a segment and value head, is allocated here and kept by the result.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    chunked.check_extend(x, v_first, 16, 4, 2, False)
    if x.g.ndim != 2:
        raise ValueError(f"g is {tuple(x.g.shape)}; allowed: [T, HV], one decay a value head")
    (HV, V), (H, K) = x.v.shape[1:], x.q.shape[1:]
    if segments is None:
        segments = choose(x.cu_seqlens, HV, x.v.device) if K <= LARGEST_K else 1
    if not isinstance(segments, Segments):
        check_segments(segments)
        segments = cut(x.cu_seqlens, segments, device=x.v.device)
    check_plan(x, segments.batch)
    ways = ways or ways_of(x, segments.batch.chunk)
    check_ways(ways)
    is_cut = max(segments.counts, default=1) > 1
    if is_cut and K > LARGEST_K:
        raise ValueError(f"K is {K}; allowed in segments: up to {LARGEST_K}")
    tiles, count = triton.cdiv(V, ways.columns), sum(segments.counts) * HV
    dependent = not is_cut and count * tiles > multiprocessors(x.v.device) and has_dependent_launch(x.v.device)
    args = vars(x) | vars(segments.batch) | _workspace(x, segments, is_cut)
    args |= {"segments": segments.spans, "first_segments": segments.first_segments}
    args |= {"H": H, "HK": H, "HV": HV, "K": K, "V": V, "BT": segments.batch.chunk, "V_FIRST": v_first, "CUT": is_cut}
    args |= {"SUB": SUB, "SOLVE": chunked.PRECISIONS[x.v.dtype], "SCAN": SCANS[x.v.dtype], "DOT": "ieee"}
    args |= {"BV": ways.columns, "STAGES": ways.num_stages, "DEPENDENT": dependent}
    args |= {"BK": max(16, triton.next_power_of_2(K))}  # all channels at once, but for the solve
    walk = (ways.num_warps, ways.num_stages)
    return Extend(
        {"solve": _solve(args, len(segments.batch.spans), ways)}
        | (_maps_and_scan(args, segments.counts, ways) if is_cut else {})
        | {"walk": _made(_walk_kernel, count * tiles, args, walk, dependent)}
    )


def _made(
    kernel: Any, programs: int, args: Mapping[str, Any], options: tuple[int, int], dependent: bool = False
) -> Launch:
    made = chunked._launch(kernel, programs, args, *options)
    return replace(made, options=made.options | {"launch_pdl": True}) if dependent else made


def _solve(args: Mapping[str, Any], chunks: int, ways: Ways) -> Launch:
    most, *options = ways.solve
    group = args["HV"] // args["H"]
    heads = max(n for n in range(1, min(most, group) + 1) if group % n == 0)
    own = {"BK": chunked.SLICE, "HEADS": heads}
    return _made(_solve_kernel, chunks * args["HV"] // heads, {**args, **own}, tuple(options))


def _maps_and_scan(args: Mapping[str, Any], counts: Sequence[int], ways: Ways) -> dict[str, Launch]:
    HV, K, V, (columns, *options) = args["HV"], args["K"], args["V"], ways.scan
    tiles = triton.cdiv(V, ways.columns) + triton.cdiv(K, ways.columns)
    scanned = len(counts) * HV if max(counts) > 2 else 0  # of two segments the second needs none
    own = {**args, "BV": columns}
    return {
        "maps": _made(_maps_kernel, sum(counts) * HV * tiles, args, (ways.num_warps, ways.num_stages)),
        "scan": _made(_scan_kernel, scanned * triton.cdiv(V, columns), own, tuple(options)),
    }


def _workspace(x: ExtendInputs, segments: Segments, is_cut: bool) -> dict[str, Tensor]:
    """What one kernel writes for the next."""
    (HV, V), K, chunk = x.v.shape[1:], x.q.shape[2], segments.batch.chunk
    bf16, count = x.v.dtype == torch.bfloat16, sum(segments.counts) if is_cut else 0
    chunks = len(segments.batch.spans)
    made = {
        name: torch.empty((chunks, HV, chunk, chunk), dtype=x.v.dtype, device=x.v.device)
        for name in ("factors", "query_scores")
    }
    for name, shape in {"scales": (3, chunk), "total": ()}.items():
        made[name] = torch.empty((chunks, HV, *shape), dtype=torch.float32, device=x.v.device)
    made["starts"] = torch.empty((count, HV, V, K), dtype=torch.float32, device=x.v.device)
    dtype = x.v.dtype if bf16 else torch.float32
    made["maps"] = torch.empty((count, HV, 1 + bf16, K, K), dtype=dtype, device=x.v.device)
    return made


def check_plan(x: ExtendInputs, batch: Plan) -> None:
    """Raise ValueError for a plan that is not of these tokens."""
    if batch.tokens != len(x.v) or len(batch.cu_seqlens) != len(x.cu_seqlens) or batch.spans.device != x.v.device:
        found = f"{batch.tokens} tokens of {len(batch.cu_seqlens) - 1} sequences on {batch.spans.device}"
        allowed = f"{len(x.v)} tokens of {len(x.cu_seqlens) - 1} sequences on {x.v.device}"
        raise ValueError(f"segments (or cu_seqlens) is of {found}; allowed: {allowed}")


def check_ways(ways: Ways) -> None:
    """Raise ValueError for choices that the kernels cannot take."""
    if ways.columns < 16 or ways.columns & (ways.columns - 1):
        raise ValueError(f"columns is {ways.columns}; allowed: a power of two from 16")
    if ways.solve[0] < 1:
        raise ValueError(f"solve's value heads are {ways.solve[0]}; allowed: from 1")
    for name, (num_warps, num_stages) in {"": (ways.num_warps, ways.num_stages), "solve's ": ways.solve[1:]}.items():
        check_one_of(f"{name}num_warps", num_warps, (1, 2, 4, 8))
        check_one_of(f"{name}num_stages", num_stages, chunked.STAGES)
    check_choices({"scan": Tile(*ways.scan)})
