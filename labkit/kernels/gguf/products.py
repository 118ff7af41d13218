"""Products of GGUF weights with many tokens, y[n] = W x[n], in Triton; the weights are `formats.Packed`.

| variant             | hypothesis                                                                                    |
|---------------------|-----------------------------------------------------------------------------------------------|
| `per_token`         | a GEMV a token: launches and weight bytes grow with the tokens                                |
| `gemm_n`            | tokens on the grid: one launch, but each token still reads all weights, from the L2 at best   |
| `weight_stationary` | a tile of weights is read and dequantised once for 2, 4, 8 or 16 tokens; more are sub-batches |
| `tensor_core`       | matrix instructions: no arithmetic a token on the ordinary units, so bytes bound it longer    |

The choices (`choose.Choice`) and theirs:

| choice | hypothesis                                                                                              |
|--------|---------------------------------------------------------------------------------------------------------|
| groups | a tile's groups of 32 weights of a row; one a thread: its 16 bytes of words, scales where they are used |
| blocks | blocks of 8 rows a program: they share the values of x, and add independent loads in flight             |
| tokens | tokens a program: weight bytes and dequantisation are shared, until the sums take too many registers    |
| up     | gate and up in one launch: x is read once for both, SiLU(gate) · up is not stored and read in between   |
| depend | `dependent`: the next launch starts while this one's last programs end (from Hopper on)                 |
| shares | equal shares a multiprocessor, in which all tiles are dealt, whatever rows they are of: with a program  |
|        | for every few rows, the last wave of them leaves multiprocessors idle; a share for a single warp: no    |
|        | barrier, and no sums of other warps to wait for at the end of each row                                  |
| ahead  | weights depend on no launch before: 1: a program's first tile is asked for before it waits for those;   |
|        | more: as many tiles less one are on their way while another is used: bytes in flight for registers      |

Two families, each with the same bits for a token whatever else is in the batch. The first three variants are one
kernel, in which a token has its own sums, added to by explicit fma in an order that depends on groups and num_warps.
`tensor_core` pads the tokens to multiples of 8, one matrix instruction's, and its order of a sum depends on num_warps.
In both it depends on where the rows are cut, if shares are dealt (so also on the number of multiprocessors), never on
the tokens: a single one runs the same arithmetic. A third family, for many tokens, is in wide.py.

Shares are cut where they are even, within a row if need be (as in Stream-K: Osama et al. 2023, arXiv 2301.03598). Each
program that has a part of a row leaves its sum in memory, and whichever ends last adds them all in the order of K.

`tensor_core` needs no shared memory and no barrier between loads and the sums' end. A warp has 4 groups of a row, and
lane 4 r + g loads group g of row r: which is just where the matrix instruction (m16n8k16) wants 4 weights of each lane,
8 times over. Which column is which does not matter as long as x is read in the same order. Warps of one program take
different groups, as in a GEMV, so that there are enough, and their sums are added at the end. With x in 16 bits the
weights are rounded to these anyway, so that 2^23 need not be subtracted exactly: one fma takes it away, scales, and
subtracts the minimum (`_rounded`); its error is below that of the rounding.

A thread takes 32 weights of a row at a time (a group), of which each word holds eight or fewer; 8 lanes hold 8 rows of
the same group, so that they share their values of x. Small integers become floats without a conversion, which runs at
a quarter of the rate: put into the mantissa of 2^23, from which 2^23 is then subtracted, exact (the trick is an old
one; for 4-bit weights: Kim et al. 2022, arXiv 2211.10017). They stay where they stand in the word, and the scale is
divided by their place instead, exact too. Source of the batching: SharpInference issue 121.

Multiply-add of the K formats goes without the subtraction. Integers q are brought into bytes, four at a time; one byte
permutation then puts one into the mantissa of 128, which makes it 128 + q. Σ x (128 + q) starts at -128 Σ x (Q6_K,
whose q stand for q - 32: -160), a sum that all rows share and 8 lanes share the work of; scale and minimum follow once
for all 32 (Q6_K: 16) weights that have them. What is left of a weight are the permutation and an fma a token.

The price: partial sums are up to 128 (Q6_K: 160) times Σ |x| of the weights of one scale, and each of their 32 (16)
fma and of 7 other roundings is off by 2^-24 of that at most: together by less than 2^-11 of Σ |x| · scale, were all as
bad and of one sign. Of random values it is about 2^-21 of Σ |x| |w| in Q4_K, less in the others; of sums in fp32 alone,
2^-26. Infinity in x gives NaN, since it is subtracted again.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_device, check_one_of, check_shape
from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.gguf.choose import Choice, TileChoice, check_choice, check_tile, matrix_rule, rule
from labkit.kernels.gguf.formats import GROUP, ROWS, Packed
from labkit.kernels.gguf.shares import (
    STRIP,
    _ask,
    _blocks,
    _dealt,
    _first_tiles,
    _fragment,
    _gated,
    _no_sums,
    _of_all_sharers,
    _parts,
    _registers,
    _rows_of,
    _share_of,
    _start,
    _tile_of,
    _units,
    _without_first,
    check_strips,
    strips_overlap,
)
from labkit.kernels.gguf.unpack import BASE, MAGIC, _add_bytes, _load, _rounded, _scales, _silu_up, _tiles, _weights
from labkit.kernels.launch import Launch
from labkit.kernels.target import has_dependent_launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_PROGRAMS = 65535  # along the second dimension of a grid


@triton.jit
def _no_products(COUNT: tl.constexpr, TILE: tl.constexpr, PLANES: tl.constexpr):
    """Sums of units to add products to: of a K format, the one with one plane, [units], of the others [units, 4]."""
    sums = ()
    for _ in tl.static_range(COUNT):
        if PLANES == 1:
            sums = sums + (tl.zeros((TILE * 8,), tl.float32),)
        else:
            sums = sums + (tl.zeros((TILE * 8, 4), tl.float32),)
    return sums


@triton.jit
def _total(sums, TILE: tl.constexpr):
    """Of sums of units, [units] or [units, 4], those of the 8 rows."""
    if len(sums.shape) == 2:
        sums = tl.sum(sums, 1)
    return tl.sum(tl.reshape(sums, (TILE, 8)), 0)


@triton.jit
def _of_block(sums, b: tl.constexpr, n: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, GATED: tl.constexpr):
    """Of the sums of a program, those of block b's 8 rows for token n; of gate and up, SiLU(gate) · up."""
    if GATED:
        return _silu_up(_total(sums[2 * b * TOKENS + n], TILE), _total(sums[(2 * b + 1) * TOKENS + n], TILE))
    else:
        return _total(sums[b * TOKENS + n], TILE)


@triton.jit
def _add_multiplied(sums, tiles, x_rows, groups, inside, magic, MASKED: tl.constexpr, FORMAT: tl.constexpr):
    """The sums with a tile's products added, one fma each: of every block of 8 rows, of every token.

    tiles: of `_read`, a block each. x_rows: where each token begins.
    """
    steps = ()
    for m in tl.static_range(len(tiles)):
        steps = steps + (_scales(tiles[m], FORMAT),)
    ks = groups[:, None] * 32 + tl.arange(0, 4)[None, :]
    for i in tl.static_range(8):
        weights = ()
        for m in tl.static_range(len(tiles)):
            weights = weights + (_weights(tiles[m], steps[m], magic, i, FORMAT),)
        values = ()
        for n in tl.static_range(len(x_rows)):
            value = _load(x_rows[n] + ks + 4 * i, inside[:, None], MASKED, "")
            values = values + (value.to(tl.float32),)
        new = ()
        for m in tl.static_range(len(tiles)):
            for n in tl.static_range(len(x_rows)):
                new = new + (tl.fma(weights[m], values[n], sums[m * len(x_rows) + n]),)
        sums = new
    return sums


@triton.jit
def _add_tile(sums, tiles, x_rows, groups, inside, magic, MASKED: tl.constexpr, FORMAT: tl.constexpr,
              WARPS: tl.constexpr):  # fmt: skip
    """The sums with a tile's products added: of every two blocks of 8 rows, of every 8 tokens.

    tiles: of `_read`, a block each. x_rows: of 8 tokens each, where a unit's token begins.
    """
    DTYPE: tl.constexpr = x_rows[0].dtype.element_ty
    steps = ()
    for b in tl.static_range(len(tiles)):
        steps = steps + (_scales(tiles[b], FORMAT),)
    eight = tl.arange(0, 8)
    for p in tl.static_range(4):
        values = ()
        for n in tl.static_range(len(x_rows)):
            x_at = x_rows[n] + groups * 32 + 8 * p
            both = _load(x_at[:, None] + eight[None, :], inside[:, None], MASKED, "")
            values = values + (tl.split(tl.permute(tl.reshape(both, (WARPS * 32, 2, 4)), (0, 2, 1))),)
        for half in tl.static_range(2):
            new = ()
            for m in tl.static_range(len(tiles) // 2):
                upper = _fragment(_rounded(tiles[2 * m], steps[2 * m], magic, 2 * p + half, FORMAT, DTYPE), WARPS)
                lower = _rounded(tiles[2 * m + 1], steps[2 * m + 1], magic, 2 * p + half, FORMAT, DTYPE)
                weights = tl.permute(tl.join(upper, _fragment(lower, WARPS)), (0, 3, 1, 2))
                weights = tl.reshape(weights, (WARPS, 16, 16))
                for n in tl.static_range(len(x_rows)):
                    x_n = tl.permute(_fragment(values[n][half], WARPS), (0, 2, 1))
                    old = sums[m * len(x_rows) + n]
                    new = new + (tl.dot(weights, x_n, old, input_precision="ieee"),)
            sums = new
    return sums


@triton.jit
def _add(
    sums, tiles, x_rows, groups, magic, GROUPS: tl.constexpr, MASKED: tl.constexpr, FORMAT: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """The sums with a tile's products added: by matrix instructions of so many WARPS; 0: by multiply-add."""
    if WARPS:
        return _add_tile(sums, tiles, x_rows, groups, groups < GROUPS, magic, MASKED, FORMAT, WARPS)
    else:
        if len(tiles[0][0]) == 1:  # one plane of words: a K format
            return _add_bytes(sums, tiles, x_rows, groups, groups < GROUPS, magic, MASKED, FORMAT)
        else:
            return _add_multiplied(sums, tiles, x_rows, groups, groups < GROUPS, magic, MASKED, FORMAT)


@triton.jit
def _add_all(
    sums, x_rows, W, up, first_block, last_block, group, lanes, magic,
    TILE: tl.constexpr, MATRICES: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr,
    PLANES: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The sums with the products of all of K added, tile after tile. group: of each unit, that in the first tile."""
    MASKED: tl.constexpr = GROUPS % TILE != 0
    TILES: tl.constexpr = (GROUPS + TILE - 1) // TILE
    DEPTH: tl.constexpr = AHEAD - 1 if AHEAD > 1 else AHEAD
    asked = ()
    for t in tl.static_range(DEPTH):
        some = _ask(W, up, first_block, last_block, group, lanes, t, TILE, MATRICES, BLOCKS, GROUPS, FORMAT, PLANES)
        asked = asked + (some,)
    wait_for_inputs(DEPENDENT)
    FIRST: tl.constexpr = 1 if AHEAD == 1 else 0
    if FIRST:
        sums = _add(sums, asked[0], x_rows, group, magic, GROUPS, MASKED, FORMAT, 0)
    for t in range(FIRST, TILES):
        groups = t * TILE + group
        if AHEAD > 1:
            some = _ask(
                W, up, first_block, last_block, group, lanes, t + DEPTH, TILE, MATRICES, BLOCKS, GROUPS, FORMAT, PLANES
            )  # fmt: skip
            sums = _add(sums, asked[0], x_rows, groups, magic, GROUPS, MASKED, FORMAT, 0)
            asked = _without_first(asked) + (some,)
        else:
            now = _tiles(
                W, up, first_block, last_block, groups, lanes, MATRICES, BLOCKS, GROUPS, MASKED, FORMAT, PLANES
            )
            sums = _add(sums, now, x_rows, groups, magic, GROUPS, MASKED, FORMAT, 0)
    return sums


@triton.jit
def _multiply_add_kernel(
    x, y, words, high, scales, d, up_words, up_high, up_scales, up_d, N, rows, x_stride, y_stride, magic,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr, GATED: tl.constexpr, TOKEN_AXIS: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCKS blocks of 8 rows, TOKENS tokens, all of K in tiles of TILE groups.

    GATED: y = SiLU(W x) · (up x); the program then has twice the rows. TOKEN_AXIS: of the grid, that of the tokens.
    """
    first_block = tl.program_id(1 - TOKEN_AXIS) * BLOCKS
    first_token = tl.program_id(TOKEN_AXIS) * TOKENS
    last_block = (rows - 1) // 8
    W, up = (words, high, scales, d), (up_words, up_high, up_scales, up_d)
    MATRICES: tl.constexpr = 2 if GATED else 1
    units = tl.arange(0, TILE * 8)
    group, lanes = units // 8, units % 8
    x_rows = ()
    for n in tl.static_range(TOKENS):
        x_rows = x_rows + (x + tl.minimum(first_token + n, N - 1).to(tl.int64) * x_stride,)
    sums = _no_products(MATRICES * BLOCKS * TOKENS, TILE, PLANES)
    sums = _add_all(
        sums, x_rows, W, up, first_block, last_block, group, lanes, magic, TILE, MATRICES, BLOCKS, GROUPS, FORMAT,
        PLANES, AHEAD, DEPENDENT,
    )  # fmt: skip
    for b in tl.static_range(BLOCKS):
        row = (first_block + b) * 8 + tl.arange(0, 8)
        for n in tl.static_range(TOKENS):
            total = _of_block(sums, b, n, TILE, TOKENS, GATED)
            y_at = y + (first_token + n).to(tl.int64) * y_stride + row
            tl.store(y_at, total.to(y.dtype.element_ty), mask=(row < rows) & (first_token + n < N))


@triton.jit
def _add_tiles(
    sums, asked, arrays, x_rows, first, last, end, strip, group, lane, magic,
    WARPS: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """The sums with the products of tiles first … last - 1 added, all of one strip; and what is asked for then.

    Asked for are as many tiles on, of these rows, then of the next ones; beyond `end` the last one, which is not used.
    WARPS: as of `_add`; of multiply-add, whose programs are one warp, 0.
    """
    TILE: tl.constexpr = WARPS * 4 if WARPS else 4
    TILES: tl.constexpr = (GROUPS + TILE - 1) // TILE
    MASKED: tl.constexpr = GROUPS % TILE != 0
    # Two tiles a turn need not move from register to register, while there is room for the code of both
    UNROLL: tl.constexpr = 2 if len(x_rows) == 1 or (len(x_rows) == 2 and not WARPS) else 1
    for t in tl.range(first, last, loop_unroll_factor=UNROLL):
        ahead = tl.minimum(t + len(asked), end - 1)
        some = _tile_of(arrays, ahead, strip, group, lane, TILE, GROUPS, FORMAT, PLANES)
        asked = asked + (some,)
        groups = (t - strip * TILES) * TILE + group
        sums = _add(sums, asked[0], x_rows, groups, magic, GROUPS, MASKED, FORMAT, WARPS)
        asked = _without_first(asked)
    return sums, asked


@triton.jit
def _store_products(
    totals, y, y_stride, firsts, strip, first_token, rows, N, whole, TOKENS: tl.constexpr, GATED: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Store the sums of a strip, if they are whole: of its blocks of 8 rows, each of every token.

    totals: [8] each; by matrix instructions (WARPS not 0) [16, 8], of two blocks and 8 tokens. GATED: blocks of two
    matrices, in turn.
    """
    if WARPS:
        for m in tl.static_range(len(totals) // (TOKENS // 8)):
            for n in tl.static_range(TOKENS // 8):
                total = totals[m * (TOKENS // 8) + n]
                if GATED:
                    row, total = _gated(total, firsts[m] + strip)
                else:
                    row = _rows_of(firsts[2 * m] + strip, firsts[2 * m + 1] + strip)
                token = first_token + 8 * n + tl.arange(0, 8)
                y_at = y + token.to(tl.int64)[None, :] * y_stride + row[:, None]
                tl.store(y_at, total.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (token < N)[None, :] & whole)
    else:
        for b in tl.static_range(len(firsts)):
            row = (firsts[b] + strip) * 8 + tl.arange(0, 8)
            for n in tl.static_range(TOKENS):
                if GATED:
                    total = _silu_up(totals[2 * b * TOKENS + n], totals[(2 * b + 1) * TOKENS + n])
                else:
                    total = totals[b * TOKENS + n]
                y_at = y + (first_token + n).to(tl.int64) * y_stride + row
                tl.store(y_at, total.to(y.dtype.element_ty), mask=(row < rows) & (first_token + n < N) & whole)


@triton.jit
def _add_share(
    x_rows, W, up, y, partials, counters, share, part, token_tile, token_tiles, N, rows, strips, each, more, y_stride,
    magic, group, lane,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr, WARPS: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, GATED: tl.constexpr, SHARERS: tl.constexpr, DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The products of a share's tiles of one of PARTS of each strip, stored where their rows are done.

    each, more: tiles a share; the first `more` have one more. SHARERS: of a strip, at most. WARPS: as of `_add`; of
    multiply-add, whose programs are one warp, 0. All else is as of the kernels that call it.
    """
    MATRICES: tl.constexpr = 2 if GATED else 1
    TILE: tl.constexpr = WARPS * 4 if WARPS else 4
    TILES: tl.constexpr = (GROUPS + TILE - 1) // TILE
    COUNT: tl.constexpr = MATRICES * BLOCKS // 2 * (TOKENS // 8) if WARPS else MATRICES * BLOCKS * TOKENS
    firsts, arrays = _blocks(W, up, strips, (rows + 7) // 8, part, MATRICES, BLOCKS, GROUPS, FORMAT, PLANES)
    start, end = _start(share, each, more), _start(share + 1, each, more)
    asked = _first_tiles(arrays, start, end, share, group, lane, DEPTH, TILE, GROUPS, FORMAT, PLANES)
    wait_for_inputs(DEPENDENT)
    for strip in range(start // TILES, (end - 1) // TILES + 1):
        first, last = tl.maximum(start, strip * TILES), tl.minimum(end, (strip + 1) * TILES)
        sums = _no_sums(COUNT, WARPS) if WARPS else _no_products(COUNT, TILE, PLANES)
        sums, asked = _add_tiles(
            sums, asked, arrays, x_rows, first, last, end, strip, group, lane, magic, WARPS, GROUPS, FORMAT, PLANES
        )  # fmt: skip
        totals = ()
        for s in tl.static_range(COUNT):
            totals = totals + (tl.sum(sums[s], 0) if WARPS else _total(sums[s], TILE),)
        whole = True
        if SHARERS > 1:
            sharer = share - _share_of(strip * TILES, each, more)
            sharers = _share_of(strip * TILES + TILES - 1, each, more) - share + sharer + 1
            whole = sharers == 1
            if sharers > 1:
                at = (strip * PARTS + part) * token_tiles + token_tile
                totals, whole = _of_all_sharers(totals, partials, counters, at, sharer, sharers, SHARERS)
        _store_products(totals, y, y_stride, firsts, strip, token_tile * TOKENS, rows, N, whole, TOKENS, GATED, WARPS)


@triton.jit
def _tensor_core_kernel(
    x, y, words, high, scales, d, up_words, up_high, up_scales, up_d, partials, counters, N, rows, strips, each, more,
    x_stride, y_stride, magic,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr, WARPS: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, GATED: tl.constexpr, SHARERS: tl.constexpr, DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens, a share of the tiles of BLOCKS blocks of 8 rows, one of PARTS of each strip.

    A tile has WARPS times 4 groups of a row, 4 a warp. GATED: y = SiLU(W x) · (up x), of twice the rows.
    """
    shares = tl.num_programs(1) // PARTS
    share, part = tl.program_id(1) % shares, tl.program_id(1) // shares
    group, lane = _units(WARPS)
    x_rows = ()
    for n in tl.static_range(TOKENS // 8):
        mine = tl.minimum(tl.program_id(0) * TOKENS + 8 * n + lane, N - 1)
        x_rows = x_rows + (x + mine.to(tl.int64) * x_stride,)
    _add_share(
        x_rows, (words, high, scales, d), (up_words, up_high, up_scales, up_d), y, partials, counters, share, part,
        tl.program_id(0), tl.num_programs(0), N, rows, strips, each, more, y_stride, magic, group, lane,
        GROUPS, FORMAT, PLANES, WARPS, BLOCKS, PARTS, TOKENS, GATED, SHARERS, DEPTH, DEPENDENT,
    )  # fmt: skip


@triton.jit
def _dealt_multiply_add_kernel(
    x, y, words, high, scales, d, up_words, up_high, up_scales, up_d, partials, counters, N, rows, strips, each, more,
    x_stride, y_stride, magic,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, GATED: tl.constexpr, TOKEN_AXIS: tl.constexpr, SHARERS: tl.constexpr, DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`_multiply_add_kernel` of one warp, whose tiles are dealt as in `_tensor_core_kernel`."""
    shares = tl.num_programs(1 - TOKEN_AXIS) // PARTS
    share, part = tl.program_id(1 - TOKEN_AXIS) % shares, tl.program_id(1 - TOKEN_AXIS) // shares
    units = tl.arange(0, 32)
    x_rows = ()
    for n in tl.static_range(TOKENS):
        mine = tl.minimum(tl.program_id(TOKEN_AXIS) * TOKENS + n, N - 1)
        x_rows = x_rows + (x + mine.to(tl.int64) * x_stride,)
    _add_share(
        x_rows, (words, high, scales, d), (up_words, up_high, up_scales, up_d), y, partials, counters, share, part,
        tl.program_id(TOKEN_AXIS), tl.num_programs(TOKEN_AXIS), N, rows, strips, each, more, y_stride, magic,
        units // 8, units % 8, GROUPS, FORMAT, PLANES, 0, BLOCKS, PARTS, TOKENS, GATED, SHARERS, DEPTH, DEPENDENT,
    )  # fmt: skip


def multiply(W: Packed, x: Tensor, y: Tensor, up: Packed | None = None) -> Launch:
    """y[n] = W x[n] for any number of tokens, a token's bits the same alone and in every batch: `tensor_core`.

    With up: y[n] = SiLU(W x[n]) · (up x[n]). W, up: `formats.Packed`, [rows, K]. x: [N, K] and y: [N, rows], bf16, fp16
    or fp32 each, values of a token adjacent, on W's device. Returns a launch: call it to run it. ValueError naming the
    argument, its value and what is allowed. Source: SharpInference issue 121; page 05 has what the one family costs.

        W = pack(blocks, "Q4_K").to("cuda")  # blocks: uint8 [rows, bytes of a row], as a .gguf file holds them
        launch = multiply(W, x, y)
        launch()

    Rows that make no whole strips (`check_strips`) are not dealt in shares.
    """
    check_product(W, x, y, up)
    tile = matrix_rule(len(x), W.rows, W.columns, W.format.name, up is not None)
    if strips_overlap(triton.cdiv(W.rows, ROWS), STRIP if up is None else STRIP // 2):
        tile = replace(tile, shares=0, blocks=2)  # so that a row has its place in an instruction in every batch
    return tensor_core(W, x, y, tile, up)


def per_token(W: Packed, x: Tensor, y: Tensor, choice: Choice | None = None, up: Packed | None = None) -> list[Launch]:
    """y[n] = W x[n], a launch a token; arguments and errors as `weight_stationary`, `choice.tokens` is 1."""
    check_product(W, x, y, up)
    choice = choice or rule(1, W.rows, W.columns, W.format.name, up is not None)
    check_one_of("tokens", choice.tokens, (1,))
    return [_multiply_add(W, x[n : n + 1], y[n : n + 1], choice, up) for n in range(len(x))]


def gemm_n(W: Packed, x: Tensor, y: Tensor, choice: Choice | None = None, up: Packed | None = None) -> Launch:
    """As `weight_stationary`, a program a token (`choice.tokens` is 1), as the source: all rows of one first."""
    check_product(W, x, y, up)
    choice = choice or rule(1, W.rows, W.columns, W.format.name, up is not None)
    check_one_of("tokens", choice.tokens, (1,))
    return _multiply_add(W, x, y, choice, up, axis=1)


def weight_stationary(
    W: Packed, x: Tensor, y: Tensor, choice: Choice | None = None, up: Packed | None = None
) -> Launch:
    """y[n] = W x[n] in one launch, a tile of weights read once for `choice.tokens` tokens, all in sub-batches of these.

    With up: y[n] = SiLU(W x[n]) · (up x[n]), both matrices read by the same programs.
    W: [rows, K]. x: [N, K] and y: [N, rows], bf16, fp16 or fp32 each, values of a token adjacent, on W's device. up:
    like W, or None. Sums in fp32, of weights with the bits of `formats.dequantise`; of a K format as exact, or with the
    error of the module's docstring, for finite x. choice: `choose.rule`'s by default. ValueError for anything else.
    """
    check_product(W, x, y, up)
    return _multiply_add(W, x, y, choice or rule(len(x), W.rows, W.columns, W.format.name, up is not None), up)


def tensor_core(W: Packed, x: Tensor, y: Tensor, tile: TileChoice | None = None, up: Packed | None = None) -> Launch:
    """y[n] = W x[n] by matrix instructions, tokens padded to multiples of 8; with up, gate and up in one launch.

    Arguments and errors as `weight_stationary`, but weights are rounded to x's dtype (in fp16, those from 65520 on to
    infinity), of 16 bits perhaps to the other neighbour; with x in fp32, products are IEEE fp32 and so not on tensor
    cores. tile: `choose.matrix_rule`'s by default. A launch with shares must not run twice at once: it has memory for
    one set of sums.
    """
    check_product(W, x, y, up)
    tile = tile or matrix_rule(len(x), W.rows, W.columns, W.format.name, up is not None)
    check_tile(tile)
    check_strips(W, tile, 4 * tile.num_warps, STRIP if up is None else STRIP // 2)
    arguments = {"x": x, "y": y} | _arrays(W) | _ups(W, up) | _sizes(W, x, y)
    blocks = tile.blocks // (1 if up is None else 2)
    arguments |= {"WARPS": tile.num_warps, "BLOCKS": blocks, "TOKENS": tile.tokens, "GATED": up is not None}
    arguments |= {"DEPTH": max(0, tile.ahead - 1), "DEPENDENT": tile.dependent and has_dependent_launch(x.device)}
    token_tiles, row_tiles = _grid(W, x, replace(tile, blocks=blocks))
    parts = _parts(tile)
    arguments |= _dealt(W, tile, 4 * tile.num_warps, token_tiles, triton.cdiv(row_tiles, parts), parts)
    grid = token_tiles, arguments.pop("shares") * parts
    options = _options(tile, arguments["DEPENDENT"])
    if tile.shares:  # all programs at once
        options |= _registers(tile.num_warps * tile.shares * parts)
    return Launch(_tensor_core_kernel, grid, arguments, options)


def _multiply_add(W: Packed, x: Tensor, y: Tensor, choice: Choice, up: Packed | None, axis: int = 0) -> Launch:
    check_choice(choice)
    check_strips(W, choice, choice.groups, STRIP if up is None else STRIP // 2)
    ahead = _ahead(choice, x)
    arguments = _arguments(W, x, y, choice) | _ups(W, up) | {"GATED": up is not None, "TOKEN_AXIS": axis} | ahead
    arguments["magic"] = magic_of(W)
    token_tiles, row_tiles = _grid(W, x, choice)
    if axis:
        check_programs("x", len(x), "tokens", choice.tokens)
    kernel, options = _multiply_add_kernel, _options(choice, ahead["DEPENDENT"])
    if choice.shares:
        both = choice if up is None else replace(choice, blocks=2 * choice.blocks)
        parts = _parts(both)
        arguments |= _dealt(W, both, choice.groups, token_tiles, triton.cdiv(row_tiles, parts), parts)
        arguments["DEPTH"] = max(0, arguments.pop("AHEAD") - 1)
        del arguments["TILE"]
        row_tiles = arguments.pop("shares") * parts
        kernel, options = _dealt_multiply_add_kernel, options | _registers(min(choice.at_once, choice.shares * parts))
    grid = (row_tiles, token_tiles) if axis else (token_tiles, row_tiles)
    return Launch(kernel, grid, arguments, options)


def magic_of(W: Packed) -> int:
    """The multiply-add kernels' `magic`: bits of the fp32 128 for a K format, of 2^23 for the others."""
    return BASE if W.words.shape[2] == 1 else MAGIC


def _grid(W: Packed, x: Tensor, choice: Choice | TileChoice) -> tuple[int, int]:
    """Programs: tiles of tokens first, so that those that read the same weights run together."""
    check_programs("W", W.rows, "rows", ROWS * choice.blocks)
    return triton.cdiv(len(x), choice.tokens), triton.cdiv(W.rows, ROWS * choice.blocks)


def _ahead(choice: Choice | TileChoice, x: Tensor) -> dict[str, Any]:
    return {"AHEAD": choice.ahead, "DEPENDENT": choice.dependent and has_dependent_launch(x.device)}


def _options(choice: Choice | TileChoice, dependent: bool = False) -> dict[str, Any]:
    options = {"num_warps": choice.num_warps, "num_stages": choice.num_stages}
    return options | ({"launch_pdl": True} if dependent else {})


def _ups(W: Packed, up: Packed | None) -> dict[str, Tensor]:
    return {f"up_{name}": value for name, value in _arrays(up or W).items()}


def _arrays(W: Packed) -> dict[str, Tensor]:
    """The arrays of W; `words` stands in for those that its format does not have, and which are not read."""
    return dict.fromkeys(("words", "high", "scales", "d"), W.words) | W.arrays


def _arguments(W: Packed, x: Tensor, y: Tensor, choice: Choice) -> dict[str, object]:
    constants = {"TILE": choice.groups, "BLOCKS": choice.blocks, "TOKENS": choice.tokens}
    return {"x": x, "y": y} | _arrays(W) | _sizes(W, x, y) | constants


def _sizes(W: Packed, x: Tensor, y: Tensor) -> dict[str, object]:
    sizes = {"N": len(x), "rows": W.rows, "x_stride": x.stride(0), "y_stride": y.stride(0), "magic": MAGIC}
    return sizes | {"GROUPS": W.columns // GROUP, "FORMAT": W.format.name, "PLANES": W.words.shape[2]}


def check_product(W: Packed, x: Tensor, y: Tensor, up: Packed | None = None) -> None:
    """Raise ValueError for shapes, dtypes, strides or devices that the kernels cannot take."""
    if up is not None:
        if (up.format, up.rows, up.columns) != (W.format, W.rows, W.columns):
            found = f"{up.format.name} [{up.rows}, {up.columns}]"
            raise ValueError(f"up is {found}; allowed: W's format and shape, {W.format.name} [{W.rows}, {W.columns}]")
        check_device("up", up.words, W.words.device, "W's")
    check_tokens(x, y, W.rows, W.columns, W.words.device)


def check_tokens(x: Tensor, y: Tensor, rows: int, columns: int, device: torch.device) -> None:
    """Raise ValueError for tokens x and their products y that a matrix [rows, columns] on a device cannot take."""
    if x.ndim != 2 or not len(x) or x.shape[1] != columns:
        raise ValueError(f"x is {tuple(x.shape)}; allowed: [N, {columns}], N at least 1")
    check_shape("y", y, (len(x), rows))
    for name, tensor in (("x", x), ("y", y)):
        check_one_of(name, tensor.dtype, DTYPES)
        check_device(name, tensor, device, "W's")
        if tensor.stride(1) != 1 and tensor.shape[1] > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; allowed: values of a token adjacent (stride 1)")


def check_programs(name: str, count: int, what: str, each: int) -> None:
    """Raise ValueError for more than the second dimension of a grid holds."""
    most = MOST_PROGRAMS * each
    if count > most:
        raise ValueError(f"{name} has {count} {what}; allowed: at most {most}, {MOST_PROGRAMS} programs of {each}")
