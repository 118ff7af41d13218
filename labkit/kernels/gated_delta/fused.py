"""Extend (chunked prefill) of the gated delta rule with less through memory: what a chunk needs is made in its walk.

`chunked.extend` stores, of every chunk and value head, w and u for its walk, and v_new and the state for its output.
For 64 tokens with K = V = 128, in tensors of a chunk (16 KB in bf16; q and k are shared by HV / H heads), and products
in 2^20 multiply-adds, of which the inverse's 1.5 are in all:

| design             | stored and read again                       | tensors | products                               |
|--------------------|---------------------------------------------|---------|----------------------------------------|
| `chunked`          | w, u, v_new, the state (twice the size)     | 10      | 3 prepare + 2 states + 2 output = 7    |
| `segmented`'s walk | w, u                                        | 4       | 3 prepare + 4.5 = 7.5                  |
| here               | T and the scores of q and k, half each      | 2       | 2.5 solve + 4 walk = 6.5; turned 7     |

since w h = T (β k exp(g) h) and u = T (β v), so that v_new = T β (v - k exp(g) h): one product of 64 x 64 x BV follows
on k h in the walk, instead of two of 64 x 64 x 128 before it. What is gained are bytes; the price is a chain of three
products from chunk to chunk where there were two.

| launch | programs                       | what it does                                                               |
|--------|--------------------------------|----------------------------------------------------------------------------|
| solve  | chunk, value head              | T β = (I + A)^-1 diag(β); norms and decays; decayed q·k of pairs of tokens |
| maps   | segment, value head, tile of V | only of what is cut: B and A of every segment but the last, as `segmented` |
|        | and of K                       |                                                                            |
| scan   | sequence, value head, tile     | `segmented`'s                                                              |
| walk   | segment, value head, tile of V | the chunks' steps from the true state, with outputs, cut or not            |

Variants of maps and walk, and what each one tests:

| transposed | the state is | hypothesis                                                                               |
|------------|--------------|------------------------------------------------------------------------------------------|
| no         | [K, values]  | the state, the residual and v_new go through shared memory, as right operands: three     |
|            |              | times on the chain from chunk to chunk                                                   |
| yes        | [values, K]  | all three are left operands, which wgmma takes from registers, and k, q, T and the       |
|            |              | scores are right ones as they were loaded: nothing on the chain goes through shared      |
|            |              | memory; v comes in by a product of its own (T β v), half a one more, instead of turned   |

Boxed or not: tiles of whole chunks come by the copy engine, which takes no registers for addresses.

One decay a value head (GDN) alone. Precision is that of `chunked`, but that there w and u are rounded to the inputs'
dtype, here the residual v - k h, or, transposed, k h alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
    _scan_kernel,
    _tile,
    check_choices,
    cut,
)
from labkit.kernels.gated_delta.segmented import PRECISIONS as SCANS
from labkit.kernels.target import COPY_ENGINE, capability_of


@triton.jit
def _solve_kernel(
    q, k, g, beta, spans, factors, query_scores, scales, total, scale, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, SUB: tl.constexpr, DOT: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """One program: what one chunk and value head needs beside its state; of tokens that a last chunk lacks, zeros.

    factors [chunks, HV, BT, BT]: (I + A)^-1 diag(β); query_scores, of the same shape: decayed q·k of pairs of tokens.
    scales [chunks, HV, 3, BT]: -exp(g) / |k| and scale exp(g) / |q|, of the decay from the chunk's start; the decay to
    its end over |k|. total [chunks, HV]: the decay of the whole chunk.
    """
    EVEN_K: tl.constexpr = K % BK == 0
    pid = tl.program_id(0).to(tl.int64)
    hv = pid % HV
    chunk = pid // HV
    start = tl.load(spans + 2 * chunk).to(tl.int64)
    end = tl.load(spans + 2 * chunk + 1)
    i = tl.arange(0, BT)
    inside = i < end - start
    rows = start * HV + hv  # to this chunk's first token: offsets of its others take 32 bits
    key_rows = (start * H + hv // (HV // H)) * K
    square = pid * (BT * BT) + i[:, None] * BT + i[None, :]
    b = tl.load(beta + rows + i * HV, mask=inside, other=0.0)
    step = tl.load(g + rows + i * HV, mask=inside, other=0.0)

    A = tl.zeros([BT, BT], tl.float32)
    scores = tl.zeros([BT, BT], tl.float32)
    for first in range(0, K, BK):
        ks = first + tl.arange(0, BK)
        key = _rows(k + key_rows, i, inside, H * K, ks, K, EVEN_K)
        A += tl.dot(key, tl.trans(key), input_precision=DOT)
        query = _rows(q + key_rows, i, inside, H * K, ks, K, EVEN_K)
        scores += tl.dot(query, tl.trans(key), input_precision=DOT)
    # Not of `key`, nor of `query` in that loop: see `compiler_errors.overwritten_operands`.
    key_scale = tl.where(inside, _inverse_norm(tl.sum(tl.where(i[:, None] == i[None, :], A, 0.0), 1)), 0.0)
    squares = tl.zeros([BT], tl.float32)
    for first in range(0, K, BK):
        squares += _squares(_rows(q + key_rows, i, inside, H * K, first + tl.arange(0, BK), K, EVEN_K))
    query_scale = tl.where(inside, scale * _inverse_norm(squares), 0.0)
    since = tl.cumsum(step, 0)
    until = tl.cumsum(step, 0, reverse=True) - step
    scales += pid * (3 * BT) + i
    tl.store(scales, -key_scale * tl.exp(since))
    tl.store(scales + BT, query_scale * tl.exp(since))
    tl.store(scales + 2 * BT, key_scale * tl.exp(until))
    tl.store(total + pid, tl.exp(tl.sum(step, 0)))
    pairs = _pair_decay(since, i[:, None] >= i[None, :]) * key_scale[None, :]
    dtype: tl.constexpr = factors.dtype.element_ty
    tl.store(query_scores + square, (scores * query_scale[:, None] * pairs).to(dtype))
    A = tl.where(i[:, None] > i[None, :], A * pairs * (b * key_scale)[:, None], 0.0)
    tl.store(factors + square, (_inverse(A, BT, SUB, SOLVE) * b[None, :]).to(dtype))


@triton.jit
def _values_after(narrow, key, factor, value, early, TRANSPOSED: tl.constexpr, DOT: tl.constexpr):
    """v_new of a chunk, fp32, from the state before it in the inputs' dtype: [BT, values], turned if TRANSPOSED.

    early: of each key, -exp(g) / |k|.
    """
    if TRANSPOSED:
        known = tl.dot(narrow, tl.trans(key), input_precision=DOT) * early[None, :]
        factor = tl.trans(factor)
        new = tl.dot(tl.trans(value), factor, input_precision=DOT)
        return tl.dot(known.to(key.dtype), factor, new, input_precision=DOT)
    else:
        rest = value.to(tl.float32) + tl.dot(key, narrow, input_precision=DOT) * early[:, None]
        return tl.dot(factor, rest.to(key.dtype), input_precision=DOT)


@triton.jit
def _load(rows, box, row, column, i, inside, stride, columns, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
          BOXED: tl.constexpr):  # fmt: skip
    """Rows i of a matrix, `rows` pointing to their first; of a WHOLE chunk without masks, BOXED by the copy engine."""
    if WHOLE and BOXED:
        return box.load([row, column])
    elif WHOLE:
        return tl.load(rows + i[:, None] * stride + columns[None, :])
    else:
        return _rows(rows, i, inside, stride, columns, WIDTH, False)


@triton.jit
def _square(of, box, place, i, BT: tl.constexpr, WHOLE: tl.constexpr, BOXED: tl.constexpr):
    """Matrix `place` (64-bit) of those [BT, BT] of all chunks; the last chunk's have their zeros."""
    if WHOLE and BOXED:
        return box.load([(place * BT).to(tl.int32), 0])
    else:
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
def _head_rows(x, box, first, hv, ks, i, inside, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
               WHOLE: tl.constexpr, BOXED: tl.constexpr):  # fmt: skip
    """Keys or queries of a chunk, of the head that a value head has them of."""
    head = hv // (HV // HK)
    rows = x + (tl.cast(first, tl.int64) * HK + head) * K
    return _load(rows, box, first, head * K, i, inside, HK * K, ks, K, WHOLE, BOXED)


@triton.jit
def _keys_of(
    k, factors, scales, total, k_box, factors_box, first, place, hv, ks, i, inside,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr, BOXED: tl.constexpr,
):  # fmt: skip
    """Of a chunk: keys, factors, what keys are scaled by on both ways (`scales`), the decay over all of it."""
    scales += place * (3 * BT) + i
    early, late, decay = tl.load(scales), tl.load(scales + 2 * BT), tl.load(total + place)
    key = _head_rows(k, k_box, first, hv, ks, i, inside, HK, HV, K, WHOLE, BOXED)
    return key, _square(factors, factors_box, place, i, BT, WHOLE, BOXED), early, late, decay


@triton.jit
def _map_step(
    h, k, v, factors, scales, total, k_box, factors_box, first, end, place, hv, columns, ks, i, is_map,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr,
    BOXED: tl.constexpr, TRANSPOSED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The state after one chunk; place: of the chunk and value head. Of a tile of A, v counts as zero."""
    dtype: tl.constexpr = k.dtype.element_ty
    inside = i < end - first
    rows = tl.cast(first, tl.int64) * HV + hv  # to this chunk's first token: offsets of its others take 32 bits
    key, factor, early, late, decay = _keys_of(
        k, factors, scales, total, k_box, factors_box, first, place, hv, ks, i, inside, HK, HV, K, BT, WHOLE, BOXED
    )
    value = _rows(v + rows * V, i, inside & (is_map == 0), HV * V, columns, V, WHOLE)
    new = _values_after(h.to(dtype), key, factor, value, early, TRANSPOSED, DOT)
    return _after(h, new, key, decay, late, TRANSPOSED, False, DOT)


@triton.jit
def _maps_kernel(
    initial, k, v, factors, scales, total, segments, first_segments, starts, maps, k_box, factors_box,
    HK: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    V_FIRST: tl.constexpr, TRANSPOSED: tl.constexpr, BOXED: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
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

    given, values = _tile(ks, columns, K, V, V_FIRST, TRANSPOSED)
    stored, values = _tile(ks, columns, K, V, True, TRANSPOSED)
    square, within = _tile(ks, columns, K, K, True, TRANSPOSED)
    values = values & (tile < TILES_V)
    h = tl.load(initial + (n * HV + hv) * (K * V) + given, mask=values & is_first, other=0.0)
    h = tl.where(is_map & (square % (K + 1) == 0), 1.0, h)
    starts += (segment * HV + hv) * (K * V)
    tl.store(starts + stored, h, mask=values & is_first)
    # Segments end between chunks, but for the last one of a sequence, of which there is no map.
    for first in tl.range(start, stop, BT, num_stages=STAGES):
        h = _map_step(
            h, k, v, factors, scales, total, k_box, factors_box, first, end, place, hv, columns, ks, i, is_map,
            HK, HV, K, V, BT, WHOLE, BOXED, TRANSPOSED, DOT,
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
    h, q, k, v, factors, query_scores, scales, total, out, q_box, k_box, v_box, factors_box, query_scores_box,
    first, end, place, hv, vs, ks, i, column,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr,
    BOXED: tl.constexpr, TRANSPOSED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The state after one chunk, whose outputs are stored; place: of the chunk and value head; column: first of vs."""
    dtype: tl.constexpr = k.dtype.element_ty
    inside = i < end - first
    rows = tl.cast(first, tl.int64) * HV + hv  # to this chunk's first token: offsets of its others take 32 bits
    key, factor, early, late, decay = _keys_of(
        k, factors, scales, total, k_box, factors_box, first, place, hv, ks, i, inside, HK, HV, K, BT, WHOLE, BOXED
    )
    queries = tl.load(scales + place * (3 * BT) + BT + i)
    query = _head_rows(q, q_box, first, hv, ks, i, inside, HK, HV, K, WHOLE, BOXED)
    value = _load(v + rows * V, v_box, first, hv * V + column, i, inside, HV * V, vs, V, WHOLE, BOXED)
    scores = _square(query_scores, query_scores_box, place, i, BT, WHOLE, BOXED)
    narrow = h.to(dtype)
    if TRANSPOSED:
        o = tl.dot(narrow, tl.trans(query), input_precision=DOT) * queries[None, :]
    else:
        o = tl.dot(query, narrow, input_precision=DOT) * queries[:, None]
    new = _values_after(narrow, key, factor, value, early, TRANSPOSED, DOT)
    h = _after(h, new, key, decay, late, TRANSPOSED, False, DOT)
    if TRANSPOSED:
        o = tl.trans(tl.dot(new.to(dtype), tl.trans(scores), o, input_precision=DOT))
    else:
        o = tl.dot(scores, new.to(dtype), o, input_precision=DOT)
    if WHOLE:
        tl.store(out + rows * V + i[:, None] * (HV * V) + vs[None, :], o.to(out.dtype.element_ty))
    else:
        _store_rows(out + rows * V, i, inside, HV * V, vs, o, V, False)
    return h


@triton.jit
def _walk_kernel(
    initial, starts, final, q, k, v, factors, query_scores, scales, total, segments, first_segments, out,
    q_box, k_box, v_box, factors_box, query_scores_box,
    HK: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    V_FIRST: tl.constexpr, TRANSPOSED: tl.constexpr, CUT: tl.constexpr, BOXED: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one segment. With CUT its first state is in starts, else initial."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    WHOLE: tl.constexpr = K == BK and V % BV == 0
    pid = tl.program_id(0)
    hv = pid // TILES % HV
    segment = (pid // TILES // HV).to(tl.int64)
    start, end, place, n, _is_first, is_last = _segment_of(segments, first_segments, segment, hv, HV)
    column = pid % TILES * BV
    ks = tl.arange(0, BK)
    vs = column + tl.arange(0, BV)
    i = tl.arange(0, BT)

    left, mask = _tile(ks, vs, K, V, V_FIRST, TRANSPOSED)
    if CUT:
        stored, mask = _tile(ks, vs, K, V, True, TRANSPOSED)
        h = tl.load(starts + (segment * HV + hv) * (K * V) + stored, mask=mask, other=0.0)
    else:
        h = tl.load(initial + (n * HV + hv) * (K * V) + left, mask=mask, other=0.0)
    whole = start + (end - start) // BT * BT
    # Stages are named, so that what feeds no product (the decays) comes ahead as well.
    for first in tl.range(start, whole, BT, num_stages=STAGES):
        h = _walk_step(
            h, q, k, v, factors, query_scores, scales, total, out, q_box, k_box, v_box, factors_box, query_scores_box,
            first, end, place, hv, vs, ks, i, column, HK, HV, K, V, BT, WHOLE, BOXED, TRANSPOSED, DOT,
        )  # fmt: skip
        place += HV
    if whole < end:
        h = _walk_step(
            h, q, k, v, factors, query_scores, scales, total, out, q_box, k_box, v_box, factors_box, query_scores_box,
            whole, end, place, hv, vs, ks, i, column, HK, HV, K, V, BT, False, BOXED, TRANSPOSED, DOT,
        )  # fmt: skip
    tl.store(final + (n * HV + hv) * (K * V) + left, h, mask=mask & is_last)


@dataclass(frozen=True)
class Ways:
    """The choices of one extend.

    columns: values a program of maps and walk, a power of two from 16. num_warps: 1, 2, 4 or 8. num_stages: 2 to 4.
    transposed, boxed: see the top of this file; boxed from Hopper on, for K a power of two from 16 and V a multiple of
    columns. scan: columns, warps and stages of that launch.
    """

    columns: int = 64
    num_warps: int = 4
    num_stages: int = 2
    transposed: bool = True
    boxed: bool = False
    scan: tuple[int, int, int] = (16, 4, 3)


def extend(x: ExtendInputs, v_first: bool, segments: Segments | int = 1, ways: Ways | None = None) -> Extend:
    """An extend as `chunked.extend` makes it, of GDN.

    segments: where to cut, or how many segments of each sequence at most (with K up to 128). ways: None: `Ways()`,
    and narrower tiles of fp32.
    Memory for factors and scores, [chunks, HV, chunk, chunk] each in v's dtype, and of what is cut K (K + V) fp32
    values a segment and value head, is allocated here and kept by the result.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    ways = ways or (Ways() if x.v.element_size() == 2 else Ways(columns=16))
    chunked.check_extend(x, v_first, 16, ways.num_warps, ways.num_stages, False)
    check_ways(x, ways)
    if x.g.ndim != 2:
        raise ValueError(f"g is {tuple(x.g.shape)}; allowed: [T, HV], one decay a value head")
    if not isinstance(segments, Segments):
        segments = cut(x.cu_seqlens, segments, device=x.v.device)
    check_plan(x, segments.batch)
    (HV, V), (H, K) = x.v.shape[1:], x.q.shape[1:]
    is_cut = max(segments.counts, default=1) > 1
    if is_cut and K > LARGEST_K:
        raise ValueError(f"K is {K}; allowed in segments: up to {LARGEST_K}")
    workspace = _workspace(x, segments, is_cut)
    args = vars(x) | vars(segments.batch) | workspace | _boxes(x, workspace, ways)
    args |= {"segments": segments.spans, "first_segments": segments.first_segments}
    args |= {"H": H, "HK": H, "HV": HV, "K": K, "V": V, "BT": segments.batch.chunk, "V_FIRST": v_first, "CUT": is_cut}
    args |= {"SUB": chunked.SUB, "SOLVE": chunked.PRECISIONS[x.v.dtype], "SCAN": SCANS[x.v.dtype], "DOT": "ieee"}
    args |= {"TRANSPOSED": ways.transposed, "BOXED": ways.boxed, "BV": ways.columns}
    args |= {"STAGES": ways.num_stages}
    args |= {"BK": max(16, triton.next_power_of_2(K))}  # all channels at once, but for the solve
    tiles, heads, count = triton.cdiv(V, ways.columns), len(segments.batch.spans) * HV, sum(segments.counts) * HV
    programs = {"solve": (_solve_kernel, heads, {"BK": chunked.SLICE}, 4, 3)}
    if is_cut:
        columns, *scan = ways.scan
        scanned = len(segments.counts) * HV if max(segments.counts) > 2 else 0  # of two segments the second needs none
        maps = count * (tiles + triton.cdiv(K, ways.columns))
        programs["maps"] = (_maps_kernel, maps, {}, ways.num_warps, ways.num_stages)
        programs["scan"] = (_scan_kernel, scanned * triton.cdiv(V, columns), {"BV": columns}, *scan)
    programs["walk"] = (_walk_kernel, count * tiles, {}, ways.num_warps, ways.num_stages)
    return Extend({
        name: chunked._launch(kernel, size, args | own, num_warps, num_stages)
        for name, (kernel, size, own, num_warps, num_stages) in programs.items()
    })  # fmt: skip


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


def _boxes(x: ExtendInputs, workspace: Mapping[str, Tensor], ways: Ways) -> dict[str, TensorDescriptor | None]:
    """Descriptors of what maps and walk read in tiles, if wanted, and if there are tokens."""
    chunk, squares = workspace["factors"].shape[-1], ("factors", "query_scores")
    if not ways.boxed or not len(x.v):
        return dict.fromkeys(f"{name}_box" for name in ("q", "k", "v", *squares))
    tiled = {"q": (x.q.flatten(1), x.q.shape[2]), "k": (x.k.flatten(1), x.q.shape[2])}
    tiled |= {"v": (x.v.flatten(1), ways.columns)}
    tiled |= {name: (workspace[name].view(-1, chunk), chunk) for name in squares}
    return {f"{name}_box": TensorDescriptor.from_tensor(of, [chunk, columns]) for name, (of, columns) in tiled.items()}


def check_plan(x: ExtendInputs, batch: Plan) -> None:
    """Raise ValueError for a plan that is not of these tokens."""
    if batch.tokens != len(x.v) or len(batch.cu_seqlens) != len(x.cu_seqlens) or batch.spans.device != x.v.device:
        found = f"{batch.tokens} tokens of {len(batch.cu_seqlens) - 1} sequences on {batch.spans.device}"
        allowed = f"{len(x.v)} tokens of {len(x.cu_seqlens) - 1} sequences on {x.v.device}"
        raise ValueError(f"segments (or cu_seqlens) is of {found}; allowed: {allowed}")


def check_ways(x: ExtendInputs, ways: Ways) -> None:
    """Raise ValueError for choices that the kernels cannot take, or a GPU, sizes or tensors without descriptors."""
    if ways.columns < 16 or ways.columns & (ways.columns - 1):
        raise ValueError(f"columns is {ways.columns}; allowed: a power of two from 16")
    check_choices({"scan": Tile(*ways.scan)})
    if not ways.boxed:
        return
    found, K, V = capability_of(x.v.device), x.q.shape[2], x.v.shape[2]
    if found is not None and found < COPY_ENGINE:
        raise ValueError(f"boxed is True on compute capability {found[0]}.{found[1]}; allowed: from 9.0 (Hopper)")
    if K < 16 or K & (K - 1) or V % ways.columns:
        allowed = f"K a power of two from 16, V a multiple of the columns, {ways.columns}"
        raise ValueError(f"K is {K} and V is {V}; allowed with boxed: {allowed}")
    for name in "qkv":
        if getattr(x, name).data_ptr() % 16:
            raise ValueError(
                f"{name} is at an address that is no multiple of 16 bytes; allowed with boxed: one that is"
            )
