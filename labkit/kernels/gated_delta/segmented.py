"""Extend (chunked prefill) of the gated delta rule for few long prompts: each is cut into segments that run at once.

`chunked.extend` walks a sequence chunk by chunk, with one program a value head and tile of V: one long prompt of few
heads leaves most multiprocessors without work. But tokens change the state by an affine map, S' = S A + B, with A of
K x K, whatever S is. So the launches are:

| launch  | programs                       | what it does                                                          |
|---------|--------------------------------|-----------------------------------------------------------------------|
| prepare | chunk, value head              | as in `chunked`                                                       |
| maps    | segment, value head, tile of   | the chunks' steps from the state [0 | I]: B and A of every segment    |
|         | V and of K                     | but the last; of the first from its true state, so that it needs no A |
| scores  | chunk, head of q               | of GDN: q·k of every pair of tokens, decayed, once for all heads of V |
| scan    | sequence, value head, tile     | S' = S A + B from segment to segment: the state before each one       |
| walk    | segment, value head, tile of V | the chunks' steps once more, from the true state, with their outputs  |

Why every segment runs twice: its outputs could instead be corrected by the part of the first state, (q exp g) P S, with
P the map from the segment's start to the chunk. For each 64 tokens of a value head with K = V = 128, in 2^20 products
and, of bf16, in 2^14 bytes (one tensor of a chunk; q and k are shared by HV / H heads, here counted as 1/4 each):

| design                                     | products                         | bytes                              |
|--------------------------------------------|----------------------------------|------------------------------------|
| twice, states and v_new stored, output of  | 4 maps + 2 states + 2 output     | 2.25 maps + 5.25 states + 4.5      |
|   its own, as in `chunked`                 |                                  | output = 12                        |
| twice, output in the walk: this file       | 4 maps + 4.5 walk                | 2.25 maps + 3.5 walk = 5.75        |
| once, outputs corrected: q P stored for    | 4 maps + 4 output of [B | A]     | 2.5 read, 3 written (fp32 output), |
|   every chunk, outputs in fp32 until then  | + 1 correction                   | 4 correction = 9.5                 |

The products are about the same; what differs is what goes through memory, so the walk makes outputs at once and stores
nothing between chunks. That is only possible since there are enough segments: a walk with outputs has more to do in
each step, which one prompt in one segment would wait for.

Precision: A and B are summed in fp32 and rounded to the inputs' dtype as operands alone, as the state in `chunked` is.
The scan multiplies in fp32, or nearly: of bf16 inputs A and the state are two bf16 parts each, and three products of
these have 16 bits. The states between segments are fp32.

Source: the chunkwise form of Yang and others (2024) is `chunked`'s; that its steps are affine, so that they can be
scanned, is what Parallelizing Linear Transformers with the Delta Rule says of single tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_one_of
from labkit.kernels.gated_delta import chunked
from labkit.kernels.gated_delta.chunked import (
    Extend,
    ExtendInputs,
    Plan,
    _inverse_norm,
    _pair_decay,
    _rows,
    _squares,
    _store_rows,
)
from labkit.kernels.target import multiprocessors

SHORTEST = 16  # chunks of a segment, at least: a shorter one does not pay for its part of the scan
FEWEST = 4  # segments of one prompt: fewer do not pay for what is done twice
LARGEST_K = 128  # of what is cut: the scan holds A in shared memory
PRECISIONS = {torch.float32: "ieee", torch.float16: "tf32x3", torch.bfloat16: "ieee"}  # of the scan, by inputs


@triton.jit
def _new_values(narrow, w_tile, u_tile, TRANSPOSED: tl.constexpr, DOT: tl.constexpr):
    """v_new of a chunk, fp32, from the state before it in the inputs' dtype: [BT, columns], turned if TRANSPOSED."""
    if TRANSPOSED:
        return tl.trans(u_tile).to(tl.float32) - tl.dot(narrow, tl.trans(w_tile), input_precision=DOT)
    else:
        return u_tile.to(tl.float32) - tl.dot(w_tile, narrow, input_precision=DOT)


@triton.jit
def _after(h, new, key, decay, scale, TRANSPOSED: tl.constexpr, PER_CHANNEL: tl.constexpr, DOT: tl.constexpr):
    """The state after a chunk, from that before it and the chunk's v_new: [K, columns], turned if TRANSPOSED."""
    dtype: tl.constexpr = key.dtype
    if PER_CHANNEL:
        h *= decay[None, :] if TRANSPOSED else decay[:, None]
    else:
        h *= decay
        new *= scale[None, :] if TRANSPOSED else scale[:, None]
        if dtype == tl.float16:  # v_new / |k| beside a key of almost zero: infinity times zero would be NaN
            new = tl.clamp(new, -65504.0, 65504.0)
    if TRANSPOSED:
        return h + tl.dot(new.to(dtype), key, input_precision=DOT)
    else:
        return h + tl.dot(tl.trans(key), new.to(dtype), input_precision=DOT)


@triton.jit
def _tile(ks, columns, K: tl.constexpr, WIDTH: tl.constexpr, V_FIRST: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Offsets and mask of a tile of a matrix [WIDTH, K] if V_FIRST, else [K, WIDTH], as registers hold it."""
    k_step: tl.constexpr = 1 if V_FIRST else WIDTH
    step: tl.constexpr = K if V_FIRST else 1
    if TRANSPOSED:
        offsets = columns[:, None] * step + ks[None, :] * k_step
        return offsets, (columns[:, None] < WIDTH) & (ks[None, :] < K)
    else:
        offsets = ks[:, None] * k_step + columns[None, :] * step
        return offsets, (ks[:, None] < K) & (columns[None, :] < WIDTH)


@triton.jit
def _maps_kernel(
    initial, k, w, u, carry, total, segments, first_segments, starts, maps,
    HK: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    V_FIRST: tl.constexpr, TRANSPOSED: tl.constexpr, PER_CHANNEL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program: BV rows of B or of A of one segment and value head.

    B goes to where the next segment's first state will be; that of a sequence's first segment is this state already.
    The first segment's own state goes there too, since `final` may be where `initial` is. A goes to maps,
    [segments, HV, K, K], in bf16 as two parts, [segments, HV, 2, K, K].
    """
    EVEN_K: tl.constexpr = BK == K
    EVEN_V: tl.constexpr = False
    TILES_V: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = TILES_V + (K + BV - 1) // BV
    pid = tl.program_id(0)
    tile = pid % TILES
    hv = pid // TILES % HV
    segment = (pid // TILES // HV).to(tl.int64)
    start = tl.load(segments + 4 * segment)
    end = tl.load(segments + 4 * segment + 1)
    chunk = tl.load(segments + 4 * segment + 2).to(tl.int64)
    n = tl.load(segments + 4 * segment + 3).to(tl.int64)
    is_first = segment == tl.load(first_segments + n)
    is_last = segment == tl.load(first_segments + n + 1) - 1
    is_map = tile >= TILES_V
    stop = tl.where(is_last | (is_map & is_first), start, end)  # of those programs nothing is needed
    ks = tl.arange(0, BK)
    rows_of = tl.where(is_map, tile - TILES_V, tile) * BV + tl.arange(0, BV)
    i = tl.arange(0, BT)
    dtype: tl.constexpr = k.dtype.element_ty

    given, values = _tile(ks, rows_of, K, V, V_FIRST, TRANSPOSED)
    stored, values = _tile(ks, rows_of, K, V, True, TRANSPOSED)
    square, within = _tile(ks, rows_of, K, K, True, TRANSPOSED)
    values = values & (tile < TILES_V)
    h = tl.load(initial + (n * HV + hv) * (K * V) + given, mask=values & is_first, other=0.0)
    h = tl.where(is_map & (square % (K + 1) == 0), 1.0, h)
    starts += (segment * HV + hv) * (K * V)
    tl.store(starts + stored, h, mask=values & is_first)

    for first in range(start, stop, BT):
        rows = tl.cast(first, tl.int64) * HV + hv  # to this chunk's first token: offsets of its others take 32 bits
        key_rows = tl.cast(first, tl.int64) * HK + hv // (HV // HK)
        inside = i < end - first
        scale = 0.0
        if PER_CHANNEL:
            decay = tl.load(total + (chunk * HV + hv) * K + ks, mask=ks < K, other=0.0)
        else:
            decay = tl.load(total + chunk * HV + hv)
            scale = tl.load(carry + rows + i * HV, mask=inside, other=0.0)
        key = _rows(k + key_rows * K, i, inside, HK * K, ks, K, EVEN_K)
        w_tile = _rows(w + rows * K, i, inside, HV * K, ks, K, EVEN_K)
        u_tile = _rows(u + rows * V, i, inside & (tile < TILES_V), HV * V, rows_of, V, EVEN_V)
        new = _new_values(h.to(dtype), w_tile, u_tile, TRANSPOSED, DOT)
        h = _after(h, new, key, decay, scale, TRANSPOSED, PER_CHANNEL, DOT)
        chunk += 1
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
def _scan_kernel(
    maps, starts, first_segments, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one sequence; S A is added to the B that lies in starts.

    As Aᵀ Sᵀ, which has K rows: S A would have BV, too few for wgmma below 64.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    hv = pid // TILES % HV
    n = pid // TILES // HV
    ks = tl.arange(0, BK)
    vs = pid % TILES * BV + tl.arange(0, BV)
    second = tl.load(first_segments + n).to(tl.int64) + 1
    stop = tl.load(first_segments + n + 1).to(tl.int64)
    stored, mask = _tile(ks, vs, K, V, True, False)
    starts += hv * (K * V) + stored
    square = ks[:, None] * K + ks[None, :]
    within = (ks[:, None] < K) & (ks[None, :] < K)
    narrow: tl.constexpr = maps.dtype.element_ty
    h = tl.load(starts + second * HV * (K * V), mask=mask & (second < stop), other=0.0)
    for segment in range(second, stop - 1):
        after = starts + (segment + 1) * HV * (K * V)
        if narrow == tl.bfloat16:
            a = maps + (segment * HV + hv) * (2 * K * K) + square
            large = tl.trans(tl.load(a, mask=within, other=0.0))
            small = tl.trans(tl.load(a + K * K, mask=within, other=0.0))
            sums = tl.load(after, mask=mask, other=0.0)
            h_large = h.to(narrow)
            h_small = (h - h_large.to(tl.float32)).to(narrow)
            sums += tl.dot(small, h_large)
            sums += tl.dot(large, h_small)
            h = sums + tl.dot(large, h_large)
        else:
            a = tl.load(maps + (segment * HV + hv) * (K * K) + square, mask=within, other=0.0)
            h = tl.load(after, mask=mask, other=0.0) + tl.dot(tl.trans(a), h, input_precision=SCAN)
        tl.store(after, h, mask=mask)


@triton.jit
def _scores_kernel(
    q, k, g, key_scales, spans, query_scores, query_scales, scale, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program: q·k of every pair of tokens of one chunk and head of q, for each of its value heads (GDN).

    query_scores [T, HV, BT], zero above the diagonal; query_scales [T, HV]: scale / |q|, times the decay since the
    chunk's start.
    """
    EVEN_K: tl.constexpr = BK == K
    pid = tl.program_id(0)
    head = pid % H
    chunk = (pid // H).to(tl.int64)
    start = tl.load(spans + 2 * chunk).to(tl.int64)
    end = tl.load(spans + 2 * chunk + 1)
    i = tl.arange(0, BT)
    inside = i < end - start
    ks = tl.arange(0, BK)
    query = _rows(q + (start * H + head) * K, i, inside, H * K, ks, K, EVEN_K)
    key = _rows(k + (start * H + head) * K, i, inside, H * K, ks, K, EVEN_K)
    causal = i[:, None] >= i[None, :]
    scores = tl.dot(query, tl.trans(key), input_precision=DOT)
    query_scale = scale * _inverse_norm(_squares(query))
    group = HV // H
    for hv in range(head * group, head * group + group):
        rows = start * HV + hv
        since = tl.cumsum(tl.load(g + rows + i * HV, mask=inside, other=0.0), 0)
        key_scale = tl.load(key_scales + rows + i * HV, mask=inside, other=0.0)
        decayed = scores * (query_scale[:, None] * key_scale[None, :] * _pair_decay(since, causal))
        _store_rows(query_scores + rows * BT, i, inside, HV * BT, i, decayed, BT, True)
        tl.store(query_scales + rows + i * HV, query_scale * tl.exp(since), mask=inside)


@triton.jit
def _walk_kernel(
    starts, final, q, k, g, w, u, key_scales, query_scales, carry, total, query_scores, segments, first_segments, out,
    scale, HK: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    V_FIRST: tl.constexpr, TRANSPOSED: tl.constexpr, PER_CHANNEL: tl.constexpr, SCORED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one segment. With PER_CHANNEL q and k are the decayed ones."""
    EVEN_K: tl.constexpr = BK == K
    EVEN_V: tl.constexpr = V % BV == 0
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    hv = pid // TILES % HV
    segment = (pid // TILES // HV).to(tl.int64)
    start = tl.load(segments + 4 * segment)
    end = tl.load(segments + 4 * segment + 1)
    chunk = tl.load(segments + 4 * segment + 2).to(tl.int64)
    n = tl.load(segments + 4 * segment + 3).to(tl.int64)
    is_last = segment == tl.load(first_segments + n + 1) - 1
    ks = tl.arange(0, BK)
    vs = pid % TILES * BV + tl.arange(0, BV)
    i = tl.arange(0, BT)
    dtype: tl.constexpr = k.dtype.element_ty

    stored, mask = _tile(ks, vs, K, V, True, TRANSPOSED)
    h = tl.load(starts + (segment * HV + hv) * (K * V) + stored, mask=mask, other=0.0)
    for first in range(start, end, BT):
        rows = tl.cast(first, tl.int64) * HV + hv  # to this chunk's first token: offsets of its others take 32 bits
        key_rows = tl.cast(first, tl.int64) * HK + hv // (HV // HK)
        inside = i < end - first
        late_scale = 0.0
        causal = i[:, None] >= i[None, :]
        if PER_CHANNEL:
            decay = tl.load(total + (chunk * HV + hv) * K + ks, mask=ks < K, other=0.0)
        else:
            decay = tl.load(total + chunk * HV + hv)
            late_scale = tl.load(carry + rows + i * HV, mask=inside, other=0.0)
        if SCORED:
            scores = _rows(query_scores + rows * BT, i, inside, HV * BT, i, BT, True)
            if PER_CHANNEL:
                scores = tl.where(causal, scores, 0.0)
            else:
                query_scale = tl.load(query_scales + rows + i * HV, mask=inside, other=0.0)
        else:
            key_scale = tl.load(key_scales + rows + i * HV, mask=inside, other=0.0)
            step = tl.load(g + rows + i * HV, mask=inside, other=0.0)
        query = _rows(q + key_rows * K, i, inside, HK * K, ks, K, EVEN_K)
        key = _rows(k + key_rows * K, i, inside, HK * K, ks, K, EVEN_K)
        w_tile = _rows(w + rows * K, i, inside, HV * K, ks, K, EVEN_K)
        u_tile = _rows(u + rows * V, i, inside, HV * V, vs, V, EVEN_V)
        if not SCORED:
            # Not of `query`, which the products read from shared memory: see `compiler_errors.overwritten_operands`.
            squares = tl.dot(query, tl.trans(query), input_precision=DOT)
            squares = tl.sum(tl.where(i[:, None] == i[None, :], squares, 0.0), 1)
            query_scale = scale * _inverse_norm(squares)
            since = tl.cumsum(step, 0)
            scores = tl.dot(query, tl.trans(key), input_precision=DOT)
            scores *= query_scale[:, None] * key_scale[None, :] * _pair_decay(since, causal)
            query_scale *= tl.exp(since)
        scores = scores.to(dtype)
        narrow = h.to(dtype)
        new = _new_values(narrow, w_tile, u_tile, TRANSPOSED, DOT)
        if TRANSPOSED:
            o = tl.dot(narrow, tl.trans(query), input_precision=DOT)
            if not PER_CHANNEL:
                o *= query_scale[None, :]
            o = tl.trans(o + tl.dot(new.to(dtype), tl.trans(scores), input_precision=DOT))
        else:
            o = tl.dot(query, narrow, input_precision=DOT)
            if not PER_CHANNEL:
                o *= query_scale[:, None]
            o += tl.dot(scores, new.to(dtype), input_precision=DOT)
        h = _after(h, new, key, decay, late_scale, TRANSPOSED, PER_CHANNEL, DOT)
        _store_rows(out + rows * V, i, inside, HV * V, vs, o, V, EVEN_V)
        chunk += 1
    left, mask = _tile(ks, vs, K, V, V_FIRST, TRANSPOSED)
    tl.store(final + (n * HV + hv) * (K * V) + left, h, mask=mask & is_last)


@dataclass(frozen=True)
class Segments:
    """Where the sequences of a batch are cut; the same for every layer of a model, so it is made once a batch.

    batch: `chunked.plan`'s. counts: segments of each sequence, at least one. spans: [segments, 4], int32: a segment's
    first token, the first one after it, its first chunk and its sequence. first_segments: [N + 1], int32.
    """

    batch: Plan
    counts: tuple[int, ...]
    spans: Tensor
    first_segments: Tensor


def cut(cu_seqlens: Tensor, segments: int, chunk: int = 64, device: torch.device | str | None = None) -> Segments:
    """Sequences of these boundaries, [N + 1], each in up to `segments` segments of whole chunks, as even as can be.

    chunk, device: as in `chunked.plan`. Waits for cu_seqlens if it is on a GPU.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    check_segments(segments)
    lengths = _chunks_of(cu_seqlens, chunk)
    return _cut(cu_seqlens, [max(1, min(segments, length)) for length in lengths], chunk, device)


def choose(cu_seqlens: Tensor, HV: int, chunk: int = 64, device: torch.device | str | None = None) -> Segments:
    """The same with as many segments as there is room for, of HV value heads: by measurement on an H100.

    The maps of a segment take two programs a value head, of which a multiprocessor runs one; so half as many segments
    as multiprocessors / HV, shared out by length. None where there is room for fewer than FEWEST, or where segments
    would be short.
    """
    lengths = _chunks_of(cu_seqlens, chunk)
    where = torch.device(cu_seqlens.device if device is None else device)
    room = multiprocessors(where) // (2 * HV)
    shares = [min(length // SHORTEST, room * length // max(1, sum(lengths))) for length in lengths]
    return _cut(cu_seqlens, [share if share >= FEWEST else 1 for share in shares], chunk, device)


def _chunks_of(cu_seqlens: Tensor, chunk: int) -> list[int]:
    """Chunks of each sequence; ValueError for what `chunked.plan` does not take."""
    return chunked.plan(cu_seqlens, chunk, "cpu").first_chunks.diff().tolist()


def _cut(cu_seqlens: Tensor, counts: list[int], chunk: int, device: torch.device | str | None) -> Segments:
    batch = chunked.plan(cu_seqlens, chunk, "cpu")
    bounds, first_chunks = batch.cu_seqlens.tolist(), batch.first_chunks.tolist()
    spans = []
    for n, count in enumerate(counts):
        chunks = first_chunks[n + 1] - first_chunks[n]
        cuts = [chunks * part // count for part in range(count + 1)]
        tokens = [min(bounds[n] + chunk * place, bounds[n + 1]) for place in cuts]
        spans += [[tokens[i], tokens[i + 1], first_chunks[n] + cuts[i], n] for i in range(count)]
    where = cu_seqlens.device if device is None else device
    table = torch.tensor(spans, dtype=torch.int32).reshape(-1, 4).to(where)
    first_segments = torch.tensor([0, *accumulate(counts)], dtype=torch.int32).to(where)
    tables = {name: getattr(batch, name).to(where) for name in ("cu_seqlens", "first_chunks", "spans")}
    return Segments(Plan(batch.chunk, batch.tokens, **tables), tuple(counts), table, first_segments)


@dataclass(frozen=True)
class Tile:
    """A launch's choice: columns a program (a power of two from 16), warps (1, 2, 4 or 8), stages (2 to 4)."""

    columns: int
    num_warps: int
    num_stages: int
    transposed: bool = True


def tiles(x: ExtendInputs) -> dict[str, Tile]:
    """The choice for each launch that has one."""
    if x.q.shape[-1] * x.v.element_size() > 256:  # shared memory has no room for more
        return dict.fromkeys(("maps", "scan", "walk"), Tile(16, 4, 2, False))
    columns = min(64, max(16, triton.next_power_of_2(x.v.shape[-1])))
    tile, narrow = Tile(columns, 4, 3, False), Tile(16, 4, 3, False)
    scores = {} if x.g.ndim == 3 else {"scores": Tile(16, 4, 2)}
    return {"maps": tile, "scan": narrow, "walk": tile} | scores


def extend(
    x: ExtendInputs, v_first: bool, segments: Segments | int | None = None, choices: Mapping[str, Tile] | None = None
) -> Extend:
    """An extend as `chunked.extend` makes it, with the sequences cut into segments.

    segments: where to cut, or how many of each sequence at most, or None: by the rule of `choose`, for K up to 128.
    Where nothing is cut it is `chunked.extend`, bit for bit. choices: of "maps", "scan" and "walk", those that are not
    to be `tiles`'; with one of "scores" (GDN) that launch is made, and the walk reads what it leaves.
    Beside what `chunked.extend` allocates, without its states: K (K + V) fp32 values a segment and value head.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    chunked.check_extend(x, v_first, 16, 4, 2, False)
    HV, K = x.v.shape[1], x.q.shape[2]
    chosen = tiles(x) | dict(choices or {})
    check_choices(chosen)
    if segments is None:
        segments = choose(x.cu_seqlens, HV, device=x.v.device) if K <= LARGEST_K else 1
    if not isinstance(segments, Segments):
        segments = cut(x.cu_seqlens, segments, device=x.v.device)
    plain = chunked.extend(x, v_first, segments.batch)  # which checks the plan
    if max(segments.counts, default=1) == 1:
        return plain
    if K > LARGEST_K:
        raise ValueError(f"K is {K}; allowed in segments: up to {LARGEST_K}")
    return _in_segments(x, plain, segments, chosen)


def _in_segments(x: ExtendInputs, plain: Extend, segments: Segments, chosen: Mapping[str, Tile]) -> Extend:
    """The launches for what is cut; `prepare` is that of the plain extend, and what it makes is read here."""
    (HV, V), K, N, count = x.v.shape[1:], x.q.shape[2], len(segments.counts), sum(segments.counts)
    bf16 = x.v.dtype == torch.bfloat16
    starts = torch.empty((count, HV, V, K), dtype=torch.float32, device=x.v.device)
    maps = torch.empty((count, HV, 1 + bf16, K, K), dtype=x.v.dtype if bf16 else torch.float32, device=x.v.device)
    args = {**plain.launches["output"].args, **plain.launches["chunk_state"].args}  # BK of the latter: all channels
    args |= {"starts": starts, "maps": maps, "SCAN": PRECISIONS[x.v.dtype]}
    args |= {"segments": segments.spans, "first_segments": segments.first_segments}
    scored = "scores" in chosen
    per_channel = x.g.ndim == 3
    args |= {"SCORED": scored or per_channel, "query_scales": args["key_scales"]}
    kernels = {"maps": _maps_kernel, "scan": _scan_kernel, "walk": _walk_kernel}
    rows = {"maps": count, "scan": N if max(segments.counts) > 2 else 0, "walk": count}
    launches = {"prepare": plain.launches["prepare"]}
    if scored and not per_channel:
        H, batch = x.q.shape[1], segments.batch
        args["query_scores"] = torch.empty((len(x.v), HV, batch.chunk), dtype=x.v.dtype, device=x.v.device)
        args["query_scales"] = torch.empty((len(x.v), HV), dtype=torch.float32, device=x.v.device)
        launches["scores"] = chunked._launch(_scores_kernel, len(batch.spans) * H, args, 4, 2)
    for name, tile in ((n, t) for n, t in chosen.items() if n in kernels):
        tiles = triton.cdiv(V, tile.columns) + (triton.cdiv(K, tile.columns) if name == "maps" else 0)
        own = args | {"BV": tile.columns, "TRANSPOSED": tile.transposed}
        programs = rows[name] * HV * tiles
        launches[name] = chunked._launch(kernels[name], programs, own, tile.num_warps, tile.num_stages)
    return Extend(launches)


def check_segments(segments: int) -> None:
    """Raise ValueError for a number of segments that is none."""
    if isinstance(segments, bool) or not isinstance(segments, int) or segments < 1:
        raise ValueError(f"segments is {segments!r}; allowed: a whole number from 1")


def check_choices(choices: Mapping[str, Tile]) -> None:
    """Raise ValueError for a launch that has no choice, or columns, warps or stages that it cannot take."""
    for name, tile in choices.items():
        check_one_of("choices' launch", name, ("maps", "scores", "scan", "walk"))
        if tile.columns < 16 or tile.columns & (tile.columns - 1):
            raise ValueError(f"{name}'s columns are {tile.columns}; allowed: a power of two from 16")
        check_one_of(f"{name}'s num_warps", tile.num_warps, (1, 2, 4, 8))
        check_one_of(f"{name}'s num_stages", tile.num_stages, chunked.STAGES)
