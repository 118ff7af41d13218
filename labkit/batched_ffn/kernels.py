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

# ruff: noqa: RUF005 (Triton's tuples grow by +; it does not know (*a, b))

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.batched_ffn.choose import (
    Choice,
    Tile,
    check_choice,
    check_tile,
    matrix_rule,
    rule,
)
from labkit.batched_ffn.formats import GROUP, ROWS, Packed
from labkit.checks import check_device, check_one_of, check_shape
from labkit.dependent import wait_for_inputs
from labkit.gemv.choose import multiprocessors
from labkit.gemv.kernels import has_dependent_launch
from labkit.launch import Launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAGIC = 0x4B000000  # the fp32 2^23
BASE = 0x43000000  # the fp32 128: the lowest bit of its exponent is 0, so that a byte less than 128 fits in below
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)  # which the interpreter has not
MOST_PROGRAMS = 65535  # along the second dimension of a grid
REGISTERS = 65536  # of a multiprocessor, of every generation since Kepler
STRIP = 4  # blocks of 8 rows that are dealt in shares together; of gate and up, two of each


@triton.jit
def _value(bits, ZERO: tl.constexpr):
    """fp32 of an integer less than 2^23 that stands in the mantissa of 2^23, minus ZERO."""
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _low_half(bits):
    """fp32 of the fp16 in the lower half of an int32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """MASKED: 1: zeros where the mask is not set; 2: anything, which is not used; 0: it is set everywhere."""
    if MASKED == 1:
        return tl.load(pointers, mask=mask, other=0, eviction_policy=POLICY)
    if MASKED == 2:
        return tl.load(pointers, mask=mask, eviction_policy=POLICY)
    return tl.load(pointers, eviction_policy=POLICY)


@triton.jit
def _block(words, high, scales, d, block, GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr):
    """The arrays of a `Packed` from a block of 8 rows on."""
    block = block.to(tl.int64)
    group = block * GROUPS
    HIGH: tl.constexpr = 16 if FORMAT == "Q6_K" else 8
    return words + group * (PLANES * 32), high + group * HIGH, scales + group * 8, d + block * (GROUPS // 8 * 8)


@triton.jit
def _read(W, groups, above, lanes, inside, MASKED: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr):
    """Of units, groups of one row: the words of every plane, [units, 4], the bits above, scales and d, [units].

    Units are one dimension, 8 rows of a group and then the next group, so that Triton's lanes go along it in memory
    order. W: the arrays of a `Packed`. groups, above: of each unit, its group and that one's block of 256 weights.
    lanes: its row of the 8.
    """
    words, high, scales, d = W
    wide = inside[:, None]
    planes = ()
    for p in tl.static_range(PLANES):
        at = (groups * PLANES + p) * 32 + lanes * 4
        planes = planes + (_load(words + at[:, None] + tl.arange(0, 4)[None, :], wide, MASKED, "evict_first"),)
    bits, scale_bits, d_bits = (), 0, 0
    if FORMAT == "Q5_K":
        bits = (_load(high + groups * 8 + lanes, inside, MASKED, "evict_first"),)
    if FORMAT == "Q6_K":
        first = _load(high + groups * 16 + lanes, inside, MASKED, "evict_first")
        bits = (first, _load(high + groups * 16 + 8 + lanes, inside, MASKED, "evict_first"))
    if FORMAT != "F32" and FORMAT != "BF16":
        scale_bits = _load(scales + groups * 8 + lanes, inside, MASKED, "evict_first")
        if FORMAT != "Q8_0":
            d_bits = _load(d + above * 8 + lanes, inside, MASKED, "evict_first")
    return planes, bits, scale_bits, d_bits


@triton.jit
def _rotated(bits, places):
    """A word [units] rotated to the left by each of places (1 … 31), [units, 4]; one instruction."""
    bits = bits.to(tl.uint32, bitcast=True)[:, None]
    places = places[None, :]
    return ((bits << places) | (bits >> (32 - places))).to(tl.int32, bitcast=True)


@triton.jit
def _turned(bits, LEFT: tl.constexpr):
    """Words rotated to the left by LEFT, or to the right by -LEFT."""
    bits = bits.to(tl.uint32, bitcast=True)
    return ((bits << LEFT % 32) | (bits >> -LEFT % 32)).to(tl.int32, bitcast=True)


@triton.jit
def _fields(tile, FORMAT: tl.constexpr):
    """Of Q5_K or Q6_K, the parts of all words with the bits above them: even parts in one word, odd ones in the other.

    Part i begins at bit 4i; what is above part 7 goes on at bit 0.
    """
    planes, high, _, _ = tile
    quad = tl.arange(0, 4)
    if FORMAT == "Q5_K":
        above = _rotated(high[0], 4 - quad)
    else:
        turn = 4 - quad % 2 * 2 + quad // 2 * 16
        above = _chosen(0x000FFFF0, _rotated(high[0], turn), _rotated(high[1], (turn + 16) % 32))
    return _chosen(0x0F0F0F0F, planes[0], above), _chosen(0x0F0F0F0F, above, planes[0])


@triton.jit
def _scales(tile, FORMAT: tl.constexpr):
    """The step of the first and of the last 16 weights of each group, and what is subtracted; [units, 1]."""
    _, _, scales, d = tile
    first, last, low = 0.0, 0.0, 0.0
    if FORMAT == "Q8_0":
        first = scales.to(tl.float32)[:, None]
        last = first
    elif FORMAT == "Q6_K":
        both = scales.to(tl.int32)
        step = d.to(tl.float32)
        first = (step * ((both << 24) >> 24).to(tl.float32))[:, None]
        last = (step * (both >> 8).to(tl.float32))[:, None]
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        both = scales.to(tl.int32)
        first = (_low_half(d) * (both & 63).to(tl.float32))[:, None]
        low = (_low_half(d >> 16) * (both >> 8).to(tl.float32))[:, None]
        last = first
    return first, last, low


@triton.jit
def _weights(tile, scales, magic, i: tl.constexpr, FORMAT: tl.constexpr):
    """Weights 4i … 4i + 3 of every group as fp32, [units, 4]: the values that `formats.dequantise` gives.

    magic: bits of the fp32 2^23, as an argument of the kernel: an instruction takes one constant only, the mask.
    """
    planes = tile[0]
    first, last, low = scales
    if FORMAT == "F32":
        return planes[i].to(tl.float32, bitcast=True)
    elif FORMAT == "BF16":
        words = planes[i // 2]
        return (words << 16 if i % 2 == 0 else words & -65536).to(tl.float32, bitcast=True)
    elif FORMAT == "Q8_0":
        PLACE: tl.constexpr = 8 * (i % 2)
        bits = (planes[i // 4] >> 16 * (i % 4 // 2) & 255 << PLACE) ^ magic
        return _value(bits, 128 << PLACE) * (first * (1.0 / (1 << PLACE)))
    else:
        PLACE: tl.constexpr = 4 * (i % 4)
        if FORMAT == "Q4_K":
            bits = (planes[0] >> 16 * (i // 4) & 15 << PLACE) ^ magic
        else:
            BITS: tl.constexpr = 5 if FORMAT == "Q5_K" else 6
            bits = (_turned(_fields(tile, FORMAT)[i % 2], -16 * (i // 4)) & (1 << BITS) - 1 << PLACE) ^ magic
            if FORMAT == "Q6_K":
                return _value(bits, 32 << PLACE) * ((first if i < 4 else last) * (1.0 / (1 << PLACE)))
        step = tl.broadcast_to(first * (1.0 / (1 << PLACE)), bits.shape)
        return tl.fma(_value(bits, 0), step, tl.broadcast_to(-low, bits.shape))


@triton.jit
def _rounded(tile, scales, magic, i: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """As `_weights`, in DTYPE; of 16 bits, in fewer instructions, before the rounding up to 2^-7 of a step off."""
    if FORMAT == "F32" or tl.float32 == DTYPE:
        return _weights(tile, scales, magic, i, FORMAT).to(DTYPE)
    elif FORMAT == "BF16":
        return (tile[0][i // 2] >> 16 * (i % 2)).to(tl.int16).to(tl.bfloat16, bitcast=True).to(DTYPE)
    else:
        bits, step, less = _raised(tile, scales, magic, i, FORMAT)
        bits = bits.to(tl.float32, bitcast=True)
        return tl.fma(bits, tl.broadcast_to(step, bits.shape), tl.broadcast_to(less, bits.shape)).to(DTYPE)


@triton.jit
def _raised(tile, scales, magic, i: tl.constexpr, FORMAT: tl.constexpr):
    """Of weights 4i … 4i + 3: the integers as high in the mantissa of 2^23 as they go, their step, what is added.

    The higher they stand, the less of a step is the rounding of what takes 2^23 away again.
    """
    planes = tile[0]
    first, last, low = scales
    if FORMAT == "Q8_0":
        PLACE: tl.constexpr = 7 + 8 * (i % 2)
        word = planes[i // 4]
        bits = ((word << 7 if i % 4 < 2 else word >> 9) & 255 << PLACE) ^ magic
        step = first * (1.0 / (1 << PLACE))
        return bits, step, step * (-8388608.0 - (128 << PLACE))
    elif FORMAT == "Q4_K":
        PLACE: tl.constexpr = 7 + 4 * (i % 4)
        bits = ((planes[0] << 7 if i < 4 else planes[0] >> 9) & 15 << PLACE) ^ magic
        step = first * (1.0 / (1 << PLACE))
        return bits, step, tl.fma(step, tl.full(step.shape, -8388608.0, tl.float32), -low)
    else:
        BITS: tl.constexpr = 5 if FORMAT == "Q5_K" else 6
        PLACE: tl.constexpr = 15 - BITS + 8 * (i // 2 % 2)  # of two parts, the upper one ends where the mantissa does
        bits = (_turned(_fields(tile, FORMAT)[i % 2], PLACE - 4 * i) & (1 << BITS) - 1 << PLACE) ^ magic
        if FORMAT == "Q6_K":
            step = (first if i < 4 else last) * (1.0 / (1 << PLACE))
            return bits, step, step * (-8388608.0 - (32 << PLACE))
        step = first * (1.0 / (1 << PLACE))
        return bits, step, tl.fma(step, tl.full(step.shape, -8388608.0, tl.float32), -low)


@triton.jit
def _silu_up(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


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
def _tiles(
    W, up, first_block, last_block, groups, lanes,
    MATRICES: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, MASKED: tl.constexpr, FORMAT: tl.constexpr,
    PLANES: tl.constexpr,
):  # fmt: skip
    """What `_read` has of BLOCKS blocks of W, of two MATRICES each followed by that of up; each four arrays."""
    tiles = ()
    for b in tl.static_range(BLOCKS):
        for s in tl.static_range(MATRICES):
            # beyond the last block: it again, but it is not stored
            block = tl.minimum(first_block + b, last_block)
            if s == 0:
                words, high, scales, d = W
            else:
                words, high, scales, d = up
            arrays = _block(words, high, scales, d, block, GROUPS, FORMAT, PLANES)
            tiles = tiles + (_read(arrays, groups, groups // 8, lanes, groups < GROUPS, MASKED, FORMAT, PLANES),)
    return tiles


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
def _beside_128(words, p: tl.constexpr, base):
    """fp32 of 128 plus byte p of words, which is less than 128 and goes into the mantissa of base, the bits of 128."""
    if ASSEMBLY:  # one instruction, for which the compiler has two
        select = tl.full([1], 0x7044 + 0x100 * p, tl.int32)
        raised = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [words, base, select], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        raised = (words >> 8 * p & 255) << 16 | base
    return raised.to(tl.float32, bitcast=True)


@triton.jit
def _chosen(mask: tl.constexpr, a, b):
    """Bits of a where the mask has ones, of b elsewhere."""
    if ASSEMBLY:  # one instruction, which the compiler takes apart when it knows that bits of a or b are 0
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xe4;", "=r,r,r,r", [a, b, tl.full([1, 1], mask, tl.int32)], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return (a & mask) | (b & ~mask)


@triton.jit
def _to_fp32(values):
    """fp32 of values; of bf16 in one instruction each, for which the compiler has three for two."""
    if ASSEMBLY and values.dtype == tl.bfloat16:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [values], dtype=tl.int32, is_pure=True, pack=2
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def _columns(values):
    """Of [units, 4], the four columns, [units] each; they stay in their threads."""
    even, odd = tl.split(tl.reshape(values, (values.shape[0], 2, 2)))
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    return zero, one, two, three


@triton.jit
def _four(x_at, inside, MASKED: tl.constexpr):
    """x_at[0 … 3] of every unit as fp32, [units, 4]."""
    return _to_fp32(_load(x_at[:, None] + tl.arange(0, 4)[None, :], inside[:, None], MASKED, ""))


@triton.jit
def _columns_of_x(x_at, inside, COUNT: tl.constexpr, MASKED: tl.constexpr):
    """x_at[0 … COUNT - 1], 4 or 8, of every unit as fp32, [units] each; 8 of 16 bits, 16 bytes, are one load."""
    if COUNT == 4:
        return _columns(_four(x_at, inside, MASKED))
    elif x_at.dtype.element_ty.primitive_bitwidth == 16:
        both = _to_fp32(_load(x_at[:, None] + tl.arange(0, 8)[None, :], inside[:, None], MASKED, ""))
        first, second = tl.split(tl.permute(tl.reshape(both, (both.shape[0], 2, 4)), (0, 2, 1)))
        return _columns(first) + _columns(second)
    else:
        return _columns(_four(x_at, inside, MASKED)) + _columns(_four(x_at + 4, inside, MASKED))


@triton.jit
def _sum_of_x(x_at, lanes, inside, SPAN: tl.constexpr, MASKED: tl.constexpr):
    """Of every unit, x_at[0] + … + x_at[SPAN - 1]: lanes that share these add four each."""
    LANES: tl.constexpr = SPAN // 4
    part = tl.sum(_four(x_at + lanes % LANES * 4, inside, MASKED), 1)
    total = tl.sum(tl.reshape(part, (part.shape[0] // LANES, LANES)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (part.shape[0] // LANES, LANES)), part.shape)


@triton.jit
def _bytes(tile, FORMAT: tl.constexpr):
    """The integers of a K format in bytes: byte p of word c is weight 8p + c; eight words, [units] each."""
    words = tile[0][0]
    if FORMAT == "Q4_K":
        return _columns(words & 0x0F0F0F0F) + _columns((words >> 4) & 0x0F0F0F0F)
    else:
        quad = tl.arange(0, 4)
        if FORMAT == "Q5_K":
            above = _rotated(tile[1][0], 4 - quad) & 0x11111111
        else:  # of words 0 and 1, and of 2 and 3
            first, second = tile[1]
            lower = (first & 0xFFFF) | (second << 16)
            upper = ((first >> 16) & 0xFFFF) | (second & ~0xFFFF)
            above = tl.where(quad[None, :] < 2, _rotated(lower, 4 - quad % 2 * 2), _rotated(upper, 4 - quad % 2 * 2))
            above = above & 0x33333333
        even, odd = _chosen(0x0F0F0F0F, words, above), _chosen(0x0F0F0F0F, above, words)
        return _columns(even) + _columns(_turned(odd, -4))


@triton.jit
def _steps(tile, base, FORMAT: tl.constexpr):
    """As `_scales`, of a K format, [units]."""
    _, _, scales, d = tile
    both = scales.to(tl.int32)
    if FORMAT == "Q6_K":
        step = d.to(tl.float32)
        return step * ((both << 24) >> 24).to(tl.float32), step * (both >> 8).to(tl.float32), 0.0
    else:
        first = _low_half(d) * (_beside_128(both, 0, base) - 128.0)
        return first, first, _low_half(d >> 16) * (_beside_128(both, 1, base) - 128.0)


@triton.jit
def _add_bytes(sums, tiles, x_rows, groups, inside, base, MASKED: tl.constexpr, FORMAT: tl.constexpr):
    """`_add_multiplied` for the K formats, by Σ x (128 + q) - 128 Σ x. sums: [units]; base: bits of the fp32 128."""
    SPANS: tl.constexpr = 2 if FORMAT == "Q6_K" else 1  # of weights with one scale
    LESS: tl.constexpr = -160.0 if FORMAT == "Q6_K" else -128.0
    N: tl.constexpr = len(x_rows)
    STEP: tl.constexpr = 8 if N == 1 else 4  # columns; more tokens have no registers for 16 bytes of each
    lanes = tl.arange(0, groups.shape[0]) % 8
    words = ()
    for m in tl.static_range(len(tiles)):
        words = words + (_bytes(tiles[m], FORMAT),)
    for span in tl.static_range(SPANS):
        totals, dots = (), ()
        for n in tl.static_range(N):
            x_at = x_rows[n] + groups * 32 + 32 // SPANS * span
            totals = totals + (_sum_of_x(x_at, lanes, inside, 32 // SPANS, MASKED),)
        for i in tl.static_range(len(tiles) * N):
            dots = dots + (totals[i % N] * LESS,)
        for k in tl.static_range(32 // SPANS * span, 32 // SPANS * (span + 1), STEP):
            values = ()
            for n in tl.static_range(N):
                values = values + (_columns_of_x(x_rows[n] + groups * 32 + k, inside, STEP, MASKED),)
            for c in tl.static_range(STEP):
                new = ()
                for m in tl.static_range(len(tiles)):
                    weight = _beside_128(words[m][(k + c) % 8], k // 8, base)
                    for n in tl.static_range(N):
                        new = new + (tl.fma(weight, values[n][c], dots[m * N + n]),)
                dots = new
        new = ()
        for m in tl.static_range(len(tiles)):
            first, last, low = _steps(tiles[m], base, FORMAT)
            for n in tl.static_range(N):
                total = tl.fma(dots[m * N + n], first if span == 0 else last, sums[m * N + n])
                if FORMAT != "Q6_K":
                    total = tl.fma(totals[n], -low, total)
                new = new + (total,)
        sums = new
    return sums


@triton.jit
def _units(WARPS: tl.constexpr):
    """Of the lanes of all warps: the group within the tile, and the row of 8 (of x: the token of 8)."""
    units = tl.arange(0, WARPS * 32)
    return units // 32 * 4 + units % 4, units // 4 % 8


@triton.jit
def _fragment(values, WARPS: tl.constexpr):
    """[warps, 8, 16] of [units, 4]: 4 columns of each lane, which stay where they are."""
    return tl.reshape(values, (WARPS, 8, 16))


@triton.jit
def _no_sums(COUNT: tl.constexpr, WARPS: tl.constexpr):
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros((WARPS, 16, 8), tl.float32),)
    return sums


@triton.jit
def _gated(total, block):
    """The rows of a block, and SiLU(gate) · up of sums [16, 8], 8 rows of each."""
    gate, up = tl.split(tl.permute(tl.reshape(total, (2, 8, 8)), (1, 2, 0)))
    return block * 8 + tl.arange(0, 8), _silu_up(gate, up)


@triton.jit
def _rows_of(upper, lower):
    """The rows of two blocks."""
    sixteen = tl.arange(0, 16)
    return tl.where(sixteen < 8, upper, lower - 1) * 8 + sixteen


@triton.jit
def _start(share, each, more):
    """The first tile of a share; the first `more` shares have one more than `each`."""
    return share * each + tl.minimum(share, more)


@triton.jit
def _share_of(tile, each, more):
    """The share that a tile is in."""
    longer = more * (each + 1)
    return tl.where(tile < longer, tile // (each + 1), more + (tile - longer) // each)


@triton.jit
def _of_all_sharers(sums, partials, counters, at, sharer, sharers, MOST: tl.constexpr):
    """The sums of all programs that share rows, added in the order of their shares; and whether all have come.

    Whichever comes last has them all, and sets its counter to 0 again for the next launch. sums: [8], rows of a token,
    or [16, 8]. partials: fp32 [tiles of y, MOST, sums, SIZE]; counters: int32 [tiles of y]; at: of these, the rows'.
    """
    COUNT: tl.constexpr = len(sums)
    SIZE: tl.constexpr = sums[0].numel
    ours = partials + at.to(tl.int64) * (MOST * COUNT * SIZE) + tl.reshape(tl.arange(0, SIZE), sums[0].shape)
    for s in tl.static_range(COUNT):
        tl.store(ours + (sharer * COUNT + s) * SIZE, sums[s])
    tl.debug_barrier()  # all threads have stored before one of them counts
    # What the others left is read past the L1 (.cg), which so keeps its x: an acquire would invalidate it
    last = tl.atomic_add(counters + at, 1, sem="release") == sharers - 1
    totals = ()
    for s in tl.static_range(COUNT):
        total = tl.load(ours + s * SIZE, mask=last, cache_modifier=".cg")
        for other in tl.static_range(1, MOST):
            here = last & (other < sharers)
            total += tl.load(ours + (other * COUNT + s) * SIZE, mask=here, other=0.0, cache_modifier=".cg")
        totals = totals + (total,)
    tl.store(counters + at, 0, mask=last)
    return totals, last


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
def _ask(
    W, up, first_block, last_block, group, lanes, t, TILE: tl.constexpr, MATRICES: tl.constexpr, BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Tile t of BLOCKS blocks of rows; nothing beyond the last one. group: of each unit, that in the first tile."""
    MASKED: tl.constexpr = 1 if GROUPS % TILE != 0 else 2
    groups = tl.where(t < (GROUPS + TILE - 1) // TILE, t * TILE + group, GROUPS)
    return _tiles(W, up, first_block, last_block, groups, lanes, MATRICES, BLOCKS, GROUPS, MASKED, FORMAT, PLANES)


@triton.jit
def _without_first(asked):
    rest = ()
    for s in tl.static_range(1, len(asked)):
        rest = rest + (asked[s],)
    return rest


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
def _blocks(
    W, up, strips, all_blocks, part, MATRICES: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
    FORMAT: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Blocks of 8 rows of a part of the first strip, and the arrays from there on; of two MATRICES, those of up too.

    A strip's blocks are `strips` apart, so that what follows a strip's last tile is the next one's first. Where they do
    not come out even, the last ones are read twice.
    """
    firsts, arrays = (), ()
    for b in tl.static_range(BLOCKS):
        first = tl.minimum((part * BLOCKS + b) * strips, all_blocks - strips)
        firsts = firsts + (first,)
        for s in tl.static_range(MATRICES):
            if s == 0:
                words, high, scales, d = W
            else:
                words, high, scales, d = up
            arrays = arrays + (_block(words, high, scales, d, first, GROUPS, FORMAT, PLANES),)
    return firsts, arrays


@triton.jit
def _tile_of(
    arrays, t, strip, group, lane, TILE: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """What `_read` has of tile t of all strips, from each of the arrays. strip: of tile t, where the last is a part."""
    TILES: tl.constexpr = (GROUPS + TILE - 1) // TILE
    MASKED: tl.constexpr = GROUPS % TILE != 0
    HIGH: tl.constexpr = 16 if FORMAT == "Q6_K" else 8
    inside, first = group < GROUPS, t.to(tl.int64) * TILE
    if MASKED:
        inside, first = (t - strip * TILES) * TILE + group < GROUPS, first - strip * (TILES * TILE - GROUPS)
    above = group // 8
    if TILE % 8 != 0:
        above = ((first % 8).to(tl.int32) + group) // 8
    tiles = ()
    for a in tl.static_range(len(arrays)):
        words, high, scales, d = arrays[a]
        W = words + first * (PLANES * 32), high + first * HIGH, scales + first * 8, d + first // 8 * 8
        tiles = tiles + (_read(W, group, above, lane, inside, 1 if MASKED else 0, FORMAT, PLANES),)
    return tiles


@triton.jit
def _first_tiles(
    arrays, start, end, strip, group, lane, DEPTH: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
    FORMAT: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """What `_add_tiles` has asked for when it begins: DEPTH tiles from `start` on."""
    asked = ()
    for i in tl.static_range(DEPTH):
        some = _tile_of(arrays, tl.minimum(start + i, end - 1), strip, group, lane, TILE, GROUPS, FORMAT, PLANES)
        asked = asked + (some,)
    return asked


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


def per_token(W: Packed, x: Tensor, y: Tensor, choice: Choice | None = None, up: Packed | None = None) -> list[Launch]:
    """y[n] = W x[n], a launch a token; arguments and errors as `weight_stationary`, `choice.tokens` is 1."""
    check_product(W, x, y, up)
    choice = choice or rule(1, W.rows, W.columns, W.format.name, up is not None)
    check_one_of("tokens", choice.tokens, (1,))
    return [_multiply_add(W, x[n : n + 1], y[n : n + 1], choice, up) for n in range(len(x))]


def gemm_n(W: Packed, x: Tensor, y: Tensor, choice: Choice | None = None, up: Packed | None = None) -> Launch:
    """y[n] = W x[n] in one launch, a program a token, as the source has them: all rows of one, then the next token's.

    As `weight_stationary`; `choice.tokens` is 1.
    """
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


def tensor_core(W: Packed, x: Tensor, y: Tensor, tile: Tile | None = None, up: Packed | None = None) -> Launch:
    """y[n] = W x[n] by matrix instructions, tokens padded to multiples of 8; with up, gate and up in one launch.

    Arguments and errors as `weight_stationary`, but weights are rounded to x's dtype (in fp16, those from 65520 on to
    infinity), of 16 bits perhaps to the other neighbour; with x in fp32, products are IEEE fp32 and so not on tensor
    cores. tile: `choose.matrix_rule`'s by default. A launch with shares must not run twice at once: it has memory for
    one set of sums.
    """
    check_product(W, x, y, up)
    tile = tile or matrix_rule(len(x), W.rows, W.columns, W.format.name, up is not None)
    check_tile(tile)
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


def _parts(tile: Choice | Tile) -> int:
    """Programs that each have a part of a strip's rows: with shares, strips have STRIP blocks, whatever a tile has.

    So rows are cut at the same columns for tiles of few blocks and of many, and have the same bits. ValueError for more
    blocks than a strip has.
    """
    if not tile.shares:
        return 1
    if tile.blocks > STRIP:
        raise ValueError(f"blocks is {tile.blocks}, with shares; allowed: at most {STRIP}")
    return STRIP // tile.blocks


def _registers(warps: int) -> dict[str, int]:
    """So many for a thread that so many warps are on a multiprocessor at once."""
    return {"maxnreg": min(255, REGISTERS // (32 * warps) // 8 * 8)}


def _dealt(
    W: Packed, tile: Choice | Tile, groups: int, token_tiles: int, strips: int, parts: int
) -> dict[str, Any]:  # fmt: skip
    """How many shares there are, what they are dealt, and where programs that share rows leave their sums.

    groups: of a tile. `words` stand in where none are shared.
    """
    tiles_a_strip = triton.cdiv(W.columns // GROUP, groups)
    if tile.shares and W.columns // GROUP % groups:
        whole = f"rows of whole tiles, of {GROUP * groups} columns"
        raise ValueError(f"shares is {tile.shares}, of rows of {W.columns} columns; allowed: 0, or {whole}")
    tiles = strips * tiles_a_strip
    shares = min(tiles, tile.shares * multiprocessors(W.words.device)) if tile.shares else strips
    each, more = divmod(tiles, shares)
    dealt: dict[str, Any] = {"shares": shares, "strips": strips, "each": each, "more": more, "PARTS": parts}
    if each == tiles_a_strip and not more:
        return dealt | {"SHARERS": 1, "partials": W.words, "counters": W.words}
    sharers = (tiles_a_strip - 2) // each + 2  # of which the first and the last have at least a tile of these rows
    places = token_tiles * strips * parts
    partials = W.words.new_empty(places * sharers * tile.blocks * ROWS * tile.tokens, dtype=torch.float32)
    return dealt | {"SHARERS": sharers, "partials": partials, "counters": W.words.new_zeros(places)}


def _multiply_add(W: Packed, x: Tensor, y: Tensor, choice: Choice, up: Packed | None, axis: int = 0) -> Launch:
    check_choice(choice)
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


def _grid(W: Packed, x: Tensor, choice: Choice | Tile) -> tuple[int, int]:
    """Programs: tiles of tokens first, so that those that read the same weights run together."""
    check_programs("W", W.rows, "rows", ROWS * choice.blocks)
    return triton.cdiv(len(x), choice.tokens), triton.cdiv(W.rows, ROWS * choice.blocks)


def _ahead(choice: Choice | Tile, x: Tensor) -> dict[str, Any]:
    return {"AHEAD": choice.ahead, "DEPENDENT": choice.dependent and has_dependent_launch(x.device)}


def _options(choice: Choice | Tile, dependent: bool = False) -> dict[str, Any]:
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
