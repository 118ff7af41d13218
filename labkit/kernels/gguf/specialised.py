"""Products of K formats with up to 64 tokens by specialised warps, y[n] = W x[n], in Gluon: `by_specialised_warps`.

| what                     | hypothesis                                                                                |
|--------------------------|-------------------------------------------------------------------------------------------|
| a warp that copies       | the copy engine (TMA) brings the arrays of `formats.Packed` as they are, stages ahead; of |
|                          | weights, while the launch before still runs: they do not depend on it                     |
| scales in the weights    | scale · q has at most 11 bits, exact in fp16: sums of 256 columns, not of 32, have one    |
|                          | factor, so that nearly all of the work on sums goes                                       |
| minima as a product      | Σ min · (Σ x of 32) is one matrix instruction for 256 columns, sums of x in two parts     |
| warpgroups on their own  | each unpacks 64 rows straight into the left side of its own matrix instructions           |
| a warpgroup that makes x | no launch for it: of each 256 columns, x as fp16 in the order of the words (`MAKES`)      |
| x made before            | of more tokens, one warpgroup would be slower than those that multiply: a launch of its   |
|                          | own, the same values                                                                      |
| sums as their own flags  | whoever adds the parts of a row waits for values other than a NaN that no sum has: no     |
|                          | counter, and no fence before one                                                          |
| the shared rows first    | a program begins with rows whose sum another one ends, and ends with those that it sums   |

The choices (`WarpChoice`): ways: warpgroups that multiply; stages: of 256 columns, on their way; tokens: a program.

A lane has two groups of 32 columns of 256, of two rows: its scales are unpacked once for 32 weights. With t the lane's
number in its quad and j the word, column 32 (2 t + c) + 16 b + 8 h + 4 i + j is part 4 b + 2 h + i of the word, and of
instruction 8 c + 2 j + h column 8 i + 2 t + b.

Integers are put beside 1024 in fp16, two at a time; one fma takes 1024 (1056 of Q6_K) away and scales, exactly: scale
times q is at most 63 · 31. Of Q6_K, 127 · 31, it is rounded to 11 bits. x is multiplied by the power of two that brings
the largest of a token's 256 columns to 512 … 1023: of bf16, nothing is rounded but what is 2^-24 of that or less.
Sums of 256 columns are fp32, and are added in the order of K. Where K is cut, a token's bits depend on the shape, the
choice and the number of multiprocessors, never on other tokens of the same choice.

Tried on an H200 and slower (Q4_K [5120, 17408], 8 tokens, µs a call in a graph of six; this one takes 19, without sums
and unpacking 14): x made by a launch before, and parts of sums behind a counter and a fence (22, of which each is 3);
128 columns a turn, for less code (1 more); one warpgroup a program, two or three programs a multiprocessor (20 to 24,
since x is made for each); half of the registers, for the next launch to begin beside (25 to 32, since programs of one
launch come to lie on fewer multiprocessors).

Making x is what is slow with two warpgroups and the gate's shape (the same, [17408, 5120]): of 16 tokens 29.0, and 19.7
if nothing is made, which is wrong; of 8 tokens 23.5 and 18.7. x asked for two steps ahead instead of one: 28.4 and
24.5; made by a launch before, 16 tokens by the choice for 32: 26.2.

What bounds it (H200, 1980 MHz, [5120, 17408]): a warp issues 303, 380 and 407 instructions for 256 columns of 16 rows
(Q4_K, Q5_K, Q6_K), 2.4 to 3.2 a weight of a lane: at full rate 6.3, 7.9 and 8.5 µs of 18, 22 and 24. Matrix
instructions take 4.6 µs, at 13 cycles each (experts/specialised.py). A plain read of the same bytes takes 13, 15 and
18, and so do the copies alone. With twice and four times the rows, an earlier form took for each further byte as long
as a plain read does. So it is the start, which waits for the launch before and for x, and the end, where parts of sums
are passed on: they do not overlap with reading.

Sources: experts/specialised.py, products.py. For Hopper, whose instructions they are; Gluon has no interpreter.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from labkit.kernels.checks import check_one_of
from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.gguf.formats import K_FORMATS, Packed
from labkit.kernels.gguf.products import check_product
from labkit.kernels.launch import Launch
from labkit.kernels.target import check_hopper, multiprocessors

TOKENS, WAYS, STAGES = (8, 16, 32, 64), (2, 3), (2, 3, 4, 5)
DTYPES = (torch.bfloat16, torch.float16)
MAKES = 16  # tokens at most, that a warpgroup of the same program makes
STEP = 256  # columns of a stage
LEAST_COLUMNS = 512  # Triton 3.6 fails to compile one step a row, where conditions are constants
REGISTERS = 65536  # of a multiprocessor
ROOM = 226 << 10  # bytes of its shared memory for stages
COPYING, MAKING = 24, {8: 64, 16: 96}  # registers of a thread that copies, or makes x of so many tokens
PREPARED = 1024  # columns a program of `_prepare_kernel`
BLANK = tl.constexpr(-1)  # bits of a NaN that arithmetic does not give: where no part of a sum has been stored
_HEADER = "{ .reg .b32 t, even, odd, high, base; mov.b32 base, 0x64006400; "
# $4: a word; $5, $7: the scale, twice, and what is added; $9, $11: the same of integers 16 times as large
_UNPACK_Q4 = gl.constexpr(
    _HEADER + "shr.u32 high, $4, 8; "
    "lop3.b32 t, $4, 0x000F000F, base, 0xea; fma.rn.f16x2 $0, t, $5, $7; "
    "lop3.b32 t, $4, 0x00F000F0, base, 0xea; fma.rn.f16x2 $1, t, $9, $11; "
    "lop3.b32 t, high, 0x000F000F, base, 0xea; fma.rn.f16x2 $2, t, $5, $7; "
    "lop3.b32 t, high, 0x00F000F0, base, 0xea; fma.rn.f16x2 $3, t, $9, $11; }"
)
# $13: the bits above, each beside its part; even and odd parts in a word each
_MERGE = "lop3.b32 even, $4, $13, 0x0F0F0F0F, 0xe4; lop3.b32 odd, $13, $4, 0x0F0F0F0F, 0xe4; "
_UNPACK_Q5 = gl.constexpr(
    _HEADER + _MERGE + "lop3.b32 t, even, 0x001F001F, base, 0xea; fma.rn.f16x2 $0, t, $5, $7; "
    "lop3.b32 t, odd, 0x01F001F0, base, 0xea; fma.rn.f16x2 $1, t, $9, $11; "
    "shf.r.wrap.b32 even, even, even, 8; shf.r.wrap.b32 odd, odd, odd, 8; "
    "lop3.b32 t, even, 0x001F001F, base, 0xea; fma.rn.f16x2 $2, t, $5, $7; "
    "lop3.b32 t, odd, 0x01F001F0, base, 0xea; fma.rn.f16x2 $3, t, $9, $11; }"
)
_UNPACK_Q6 = gl.constexpr(
    _HEADER + _MERGE + "shf.l.wrap.b32 t, even, even, 4; "
    "lop3.b32 t, t, 0x03F003F0, base, 0xea; fma.rn.f16x2 $0, t, $9, $11; "
    "lop3.b32 t, odd, 0x03F003F0, base, 0xea; fma.rn.f16x2 $1, t, $9, $11; "
    "shf.r.wrap.b32 t, even, even, 4; lop3.b32 t, t, 0x03F003F0, base, 0xea; fma.rn.f16x2 $2, t, $9, $11; "
    "shf.r.wrap.b32 t, odd, odd, 8; lop3.b32 t, t, 0x03F003F0, base, 0xea; fma.rn.f16x2 $3, t, $9, $11; }"
)
# Of scale | min << 8: the scale, twice; times -1024; times 1/16; times -64
_STEPS_Q45 = gl.constexpr(
    "{ .reg .b32 t, k; prmt.b32 t, $4, 0x64646464, 0x4040; mov.b32 k, 0xE400E400; add.rn.f16x2 $0, t, k; "
    "mul.rn.f16x2 $1, $0, k; mov.b32 k, 0x2C002C00; mul.rn.f16x2 $2, $0, k; "
    "mov.b32 k, 0xD400D400; mul.rn.f16x2 $3, $0, k; }"
)
# Of two signed scales: they; they; times 1/16; times -96, which is -1056 to integers 16 times as large
_STEPS_Q6 = gl.constexpr(
    "{ .reg .b32 t, k; xor.b32 t, $4, 0x8080; prmt.b32 t, t, 0x64646464, 0x4140; mov.b32 k, 0xE480E480; "
    "add.rn.f16x2 $0, t, k; mov.b32 $1, $0; mov.b32 k, 0x2C002C00; mul.rn.f16x2 $2, $0, k; "
    "mov.b32 k, 0xD600D600; mul.rn.f16x2 $3, $0, k; }"
)


@dataclass(frozen=True)
class WarpChoice:
    """How a product is run. tokens: a program; ways: warpgroups that multiply, of 64 rows each."""

    tokens: int = 8
    ways: int = 3
    stages: int = 3


@triton.jit
def _power(largest):
    """Of fp32 values, the exponent's bits of the power of two that brings them to 512 … 1023, if there is one."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.where(exponent == 255, 127, tl.minimum(263 - exponent, 253))


@triton.jit
def _float_of(exponent):
    """2^(exponent - 127)."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _prepare_kernel(
    x, values, totals, factors, N, x_stride, K: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of a token as `_make` makes them; zeros of what is no token.

    values: [tokens, K], in the words' order; totals: [tokens, K / 16], of every 256 columns the sums of 8 groups and
    what is left of them; factors: [tokens / TOKENS · K / 256, TOKENS], what sums of 256 columns are multiplied by.
    """
    wait_for_inputs(DEPENDENT)
    n = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < K
    raw = tl.load(x + n.to(tl.int64) * x_stride + at, mask=inside & (n < N), other=0.0).to(tl.float32)
    raw = tl.reshape(raw, (BLOCK // 256, 256))
    power = _power(tl.max(tl.abs(raw), 1))
    scaled = raw * _float_of(power)[:, None]
    sums = tl.sum(tl.reshape(scaled, (BLOCK // 256, 8, 32)), 2)
    high = sums.to(tl.float16)
    rest = (sums - high.to(tl.float32)).to(tl.float16)
    step = tl.program_id(1) * (BLOCK // 256) + tl.arange(0, BLOCK // 256)
    some = step < K // 256
    factor_at = factors + (n // TOKENS * (K // 256) + step).to(tl.int64) * TOKENS + n % TOKENS
    tl.store(factor_at, _float_of(254 - power), mask=some)
    total_at = totals + n.to(tl.int64) * (K // 16) + step[:, None] * 16 + tl.arange(0, 8)[None, :]
    tl.store(total_at, high, mask=some[:, None])
    tl.store(total_at + 8, rest, mask=some[:, None])
    ordered = tl.reshape(scaled.to(tl.float16), (BLOCK // 256, 4, 2, 2, 2, 2, 4))  # t, c, b, h, i, j
    ordered = tl.reshape(tl.permute(ordered, (0, 2, 6, 4, 5, 1, 3)), (BLOCK,))
    tl.store(values + n.to(tl.int64) * K + at, ordered, mask=inside)


@gluon.jit
def _step_of(i, begin, middle, end):
    """The i-th step of a program: from the end of its first rows on, then these."""
    return gl.where(i < end - middle, middle + i, begin + i - (end - middle))


@gluon.jit
def _copy(
    W, made, room, share,
    KS: gl.constexpr, FORMAT: gl.constexpr, WAYS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    MADE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The warp that copies: weights of every step as soon as a stage is free, and x, if it was made before (MADE)."""
    empty = room[8]
    begin, middle, end, token_tiles = share
    early = gl.minimum(STAGES, end - begin)
    for i in range(early):
        step = _step_of(i, begin, middle, end)
        _copy_weights(W, room, i, step, token_tiles, KS, FORMAT, WAYS, TOKENS, STAGES, MADE)
    if MADE:
        if DEPENDENT:
            cuda.gdc_wait()
        for i in range(early):
            _copy_x(made, room, i, _step_of(i, begin, middle, end), token_tiles, KS, TOKENS, STAGES)
    for i in range(early, end - begin):
        mbarrier.wait(empty.index(i % STAGES), (i // STAGES & 1) ^ 1)
        step = _step_of(i, begin, middle, end)
        _copy_weights(W, room, i, step, token_tiles, KS, FORMAT, WAYS, TOKENS, STAGES, MADE)
        if MADE:
            _copy_x(made, room, i, step, token_tiles, KS, TOKENS, STAGES)


@gluon.jit
def _copy_weights(
    W, room, i, step, token_tiles,
    KS: gl.constexpr, FORMAT: gl.constexpr, WAYS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    MADE: gl.constexpr,
):  # fmt: skip
    words, high, scales, d = W
    words_room, high_room, scales_room, d_room, full = room[0], room[1], room[2], room[3], room[7]
    ABOVE: gl.constexpr = 0 if FORMAT == "Q4_K" else 32 if FORMAT == "Q5_K" else 64
    BYTES: gl.constexpr = 128 + ABOVE + 16 + (2 if FORMAT == "Q6_K" else 4)  # of a row
    s, k, tile = i % STAGES, step % KS, step // KS // token_tiles
    mbarrier.expect(full.index(s), WAYS * 64 * BYTES + (TOKENS * (512 + 32 + 4) if MADE else 0))
    for way in gl.static_range(WAYS):
        block, to = (tile * WAYS + way) * 8, s * WAYS + way
        tma.async_copy_global_to_shared(words, [block, k * 8, 0], full.index(s), words_room.index(to))
        if FORMAT == "Q5_K":
            tma.async_copy_global_to_shared(high, [block, k * 64], full.index(s), high_room.index(to))
        if FORMAT == "Q6_K":
            tma.async_copy_global_to_shared(high, [block, k * 8, 0], full.index(s), high_room.index(to))
        tma.async_copy_global_to_shared(scales, [block, k * 64], full.index(s), scales_room.index(to))
        tma.async_copy_global_to_shared(d, [block, k * 8], full.index(s), d_room.index(to))


@gluon.jit
def _copy_x(made, room, i, step, token_tiles, KS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr):
    values, totals, factors = made
    values_room, totals_room, factors_room, full = room[4], room[5], room[6], room[7]
    s, k, tile = i % STAGES, step % KS, step // KS % token_tiles
    tma.async_copy_global_to_shared(values, [tile * TOKENS, k * 256], full.index(s), values_room.index(s))
    tma.async_copy_global_to_shared(totals, [tile * TOKENS, k * 16], full.index(s), totals_room.index(s))
    tma.async_copy_global_to_shared(factors, [tile * KS + k, 0], full.index(s), factors_room.index(s))


@gluon.jit
def _columns_of(x, step, token_tiles, KS: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """x of a step, [TOKENS, 256]; of what is no token the last one's, which is not stored."""
    x, x_stride, N = x
    n = step // KS % token_tiles * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    k = step % KS * 256 + gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))
    return gl.load(x + gl.minimum(n, N - 1).to(gl.int64)[:, None] * x_stride + k[None, :])


@gluon.jit
def _make(
    x, room, share,
    KS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The warpgroup that makes x: of 256 columns of each token fp16 in the words' order, sums of groups, a factor.

    Sixteen lanes have a token: of a pair of values that an instruction wants in one register, one lane has both.
    """
    MORE: gl.constexpr = [[8, 0]] if TOKENS == 16 else []
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 16]] + MORE, [[0, 8], [0, 32], [0, 64], [0, 128], [1, 0]], [[2, 0], [4, 0]], [],
        [TOKENS, 256],
    )  # fmt: skip
    values, totals, factors, full, empty = room[4], room[5], room[6], room[7], room[8]
    begin, middle, end, token_tiles = share
    if DEPENDENT:
        cuda.gdc_wait()
    raw = _columns_of(x, _step_of(0, begin, middle, end), token_tiles, KS, TOKENS, LAYOUT)
    for i in range(end - begin):
        s = i % STAGES
        after = _step_of(gl.minimum(i + 1, end - begin - 1), begin, middle, end)
        following = _columns_of(x, after, token_tiles, KS, TOKENS, LAYOUT)
        columns = raw.to(gl.float32)
        power = _power(gl.max(gl.abs(columns), 1))
        scaled = columns * _float_of(power)[:, None]
        sums = gl.sum(scaled.reshape([TOKENS, 8, 32]), 2)
        high = sums.to(gl.float16)
        both = gl.join(high, (sums - high.to(gl.float32)).to(gl.float16)).permute((0, 2, 1)).reshape([TOKENS, 16])
        ordered = scaled.to(gl.float16).reshape([TOKENS, 4, 2, 2, 2, 2, 4]).permute((0, 2, 6, 4, 5, 1, 3))
        mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
        values.index(s).store(ordered.reshape([TOKENS, 256]))
        totals.index(s).store(both)
        factors.index(s).store(_float_of(254 - power).reshape([1, TOKENS]))
        fence_async_shared()
        mbarrier.arrive(full.index(s))
        raw = following


@gluon.jit
def _unpack(words, above, steps, FORMAT: gl.constexpr):
    """Parts 0 … 3 of halves of words, [8, 4, 64], times their scales: fp16, the other half's are parts 4 … 7."""
    scale, less, sixteenth, less_16 = steps
    if FORMAT == "Q4_K":
        return gl.inline_asm_elementwise(
            _UNPACK_Q4, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [words, scale, less, sixteenth, less_16],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            _UNPACK_Q5 if FORMAT == "Q5_K" else _UNPACK_Q6, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r",
            [words, scale, less, sixteenth, less_16, above],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit
def _rotated(bits, places):
    bits = bits.to(gl.uint32, bitcast=True)
    places = places.to(gl.uint32)
    return ((bits << places) | (bits >> ((32 - places) & 31))).to(gl.int32, bitcast=True)


@gluon.jit
def _beside(values, LAYOUT: gl.constexpr):
    """Of every row of a group, [8, 4, 8], eight times beside each other, [8, 4, 64]: one register, read eight times."""
    two = gl.join(values, values)
    four = gl.join(two, two)
    return gl.convert_layout(gl.join(four, four).reshape([8, 4, 64]), LAYOUT, assert_trivial=True)


@gluon.jit
def _above(high, LAYOUT: gl.constexpr, FORMAT: gl.constexpr):
    """The bits above each part of words, beside their parts, as of `unpack._fields`."""
    j = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))) // 2 % 4
    j = j[None, None, :]
    if FORMAT == "Q5_K":
        return _rotated(_beside(high, LAYOUT), 4 - j)
    else:
        lower, upper = high
        turn = 4 - j % 2 * 2 + j // 2 * 16
        lower, upper = _rotated(_beside(lower, LAYOUT), turn), _rotated(_beside(upper, LAYOUT), (turn + 16) % 32)
        return (lower & 0x000FFFF0) | (upper & ~0x000FFFF0)


@gluon.jit
def _left(words, high, scales, LEFT: gl.constexpr, FORMAT: gl.constexpr):
    """Weights of 64 rows and four groups as the left side of eight instructions, fp16 [64, 128].

    words: halves, [8, 4, 64]; scales: two bytes each, int32 [8, 4, 8]; high: of Q5_K [8, 4, 8], of Q6_K two.
    """
    LAYOUT: gl.constexpr = words.type.layout
    scale, less, sixteenth, less_16 = gl.inline_asm_elementwise(
        _STEPS_Q6 if FORMAT == "Q6_K" else _STEPS_Q45, "=r,=r,=r,=r,r", [scales],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    steps = _beside(scale, LAYOUT), _beside(less, LAYOUT), _beside(sixteenth, LAYOUT), _beside(less_16, LAYOUT)
    above = words if FORMAT == "Q4_K" else _above(high, LAYOUT, FORMAT)
    a, b, c, d = _unpack(words, above, steps, FORMAT)
    parts = gl.join(gl.join(a, c), gl.join(b, d))  # h, i
    parts = parts.reshape([8, 4, 8, 4, 2, 2, 2]).permute((0, 2, 3, 5, 6, 1, 4))  # block, row, j, h, i, t, b
    return gl.convert_layout(parts.reshape([64, 128]), LEFT, assert_trivial=True)


@gluon.jit
def _halves(values):
    """[8, 8 groups, ..] as of even and of odd groups, [8, 4, ..] each; they stay in their threads."""
    REST: gl.constexpr = values.numel // 64
    return gl.split(values.reshape([8, 4, 2, REST]).permute((0, 1, 3, 2)))


@gluon.jit
def _minima(scales, LEFT: gl.constexpr):
    """The minima of 64 rows and 8 groups twice, fp16 [64, 16], of scale | min << 8, [8, 64]."""
    bits = (scales >> 8) & 255 | 0x6400
    minima = (bits.to(gl.int16).to(gl.float16, bitcast=True) - 1024.0).to(gl.float16)
    minima = minima.reshape([8, 8, 8]).permute((0, 2, 1)).reshape([64, 8])
    twice = gl.join(minima, minima).permute((0, 2, 1)).reshape([64, 16])
    return gl.convert_layout(twice, LEFT, assert_trivial=True)


@gluon.jit
def _add_step(sums, room, s, WAYS: gl.constexpr, WAY: gl.constexpr, TOKENS: gl.constexpr, FORMAT: gl.constexpr):
    """Sums [64, TOKENS] with the products of a stage's 256 columns added; the stage is free then."""
    words, high, scales, d, values, totals, factors, _, empty = room
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [1, 0, 0]],
        [[0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]], [[2, 0, 0], [4, 0, 0]], [], [8, 8, 64],
    )  # fmt: skip
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 8], [1, 0]], [[0, 16], [0, 32], [0, 1], [0, 2], [0, 4]], [[2, 0], [4, 0]], [], [8, 64]
    )
    ROWS: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[2, 0], [4, 0]], [], [8, 8]
    )
    MORE: gl.constexpr = [[0, 8], [0, 16], [0, 32]]
    FACTORS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1]] + MORE[: 0 if TOKENS == 8 else 1 if TOKENS == 16 else 2 if TOKENS == 32 else 3],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [1, TOKENS],
    )  # fmt: skip
    at = s * WAYS + WAY
    pairs = scales.index(at).load(SCALES).to(gl.int32)
    even, odd = _halves(words.index(at).load(WORDS))
    even_scales, odd_scales = _halves(pairs)
    step = d.index(at).load(ROWS).reshape([64])
    step = gl.convert_layout(step, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    even_high, odd_high = even_scales, odd_scales
    if FORMAT == "Q5_K":
        even_high, odd_high = _halves(high.index(at).load(SCALES))
    if FORMAT == "Q6_K":
        HIGH: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 8], [0, 1, 0], [1, 0, 0]], [[0, 2, 0], [0, 4, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
            [[2, 0, 0], [4, 0, 0]], [], [8, 8, 16],
        )  # fmt: skip
        lower, upper = gl.split(high.index(at).load(HIGH).reshape([8, 8, 2, 8]).permute((0, 1, 3, 2)))
        even_lower, odd_lower = _halves(lower)
        even_upper, odd_upper = _halves(upper)
        even_high, odd_high = (even_lower, even_upper), (odd_lower, odd_upper)
    zero = gl.zeros([64, TOKENS], gl.float32, LAYOUT)
    x = values.index(s)
    first = _left(even, even_high, even_scales, LEFT, FORMAT)
    products = warpgroup_mma(first, x.slice(0, 128, dim=1).permute((1, 0)), zero, use_acc=False, is_async=True)
    second = _left(odd, odd_high, odd_scales, LEFT, FORMAT)
    products = warpgroup_mma(second, x.slice(128, 128, dim=1).permute((1, 0)), products, is_async=True)
    factor = factors.index(s).load(FACTORS).reshape([TOKENS])
    factor = gl.convert_layout(factor, gl.SliceLayout(0, LAYOUT), assert_trivial=True)
    if FORMAT == "Q6_K":
        products, first, second = warpgroup_mma_wait(0, deps=(products, first, second))
        mbarrier.arrive(empty.index(s))
        return sums + products * step.to(gl.float32)[:, None] * factor[None, :]
    else:
        minima = _minima(pairs, LEFT)
        less = warpgroup_mma(minima, totals.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        low = (step >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        step = (step & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        products, first, second, less, minima = warpgroup_mma_wait(0, deps=(products, first, second, less, minima))
        mbarrier.arrive(empty.index(s))
        return sums + (products * step[:, None] - less * low[:, None]) * factor[None, :]


@gluon.jit
def _sums_of(
    room, i, count,
    WAYS: gl.constexpr, WAY: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """The sums of `count` steps from the program's i-th on, [64, TOKENS]."""
    full = room[7]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    sums = gl.zeros([64, TOKENS], gl.float32, LAYOUT)
    for j in range(i, i + count):
        mbarrier.wait(full.index(j % STAGES), j // STAGES & 1)
        sums = _add_step(sums, room, j % STAGES, WAYS, WAY, TOKENS, FORMAT)
    return sums


@gluon.jit
def _with_parts(sums, parts, low, EACH: gl.constexpr, TOKENS: gl.constexpr):
    """Sums with the parts of programs from `low` to the one before this added, in this order; their room is blank then.

    parts: of program 0, pointers as sums are. EACH: values of a program. The programs before have begun before, and
    store what others wait for before they wait themselves.
    """
    SIDE: gl.constexpr = 64 // TOKENS  # that are asked for at once
    LAYOUT: gl.constexpr = sums.type.layout
    last = gl.program_id(0) - 1
    total = gl.zeros([64, TOKENS], gl.float32, LAYOUT)
    blank = gl.full([64, TOKENS], BLANK, gl.int32, LAYOUT).to(gl.float32, bitcast=True)
    first = low
    while first <= last:
        added, missing = total, 1
        while missing > 0:
            added, absent, values = total, gl.zeros([64, TOKENS], gl.int32, LAYOUT), ()
            for j in gl.static_range(SIDE):
                values = values + (gl.load(parts + gl.minimum(first + j, last) * EACH, volatile=True),)
            for j in gl.static_range(SIDE):
                absent |= gl.where(values[j].to(gl.int32, bitcast=True) == BLANK, 1, 0)
                added += gl.where(first + j <= last, values[j], 0.0)
            missing = gl.max(gl.max(absent, 1), 0)
        total = added
        for j in gl.static_range(SIDE):
            gl.store(parts + gl.minimum(first + j, last) * EACH, blank)
        first += SIDE
    return total + sums


@gluon.jit
def _multiply(
    out, room, share,
    KS: gl.constexpr, FORMAT: gl.constexpr, WAYS: gl.constexpr, WAY: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: 64 of the rows of every tile that the program has a part of.

    Of rows whose last columns it has, it stores the products; of others a part of their sums, for the one that has.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    EACH: gl.constexpr = WAYS * 64 * TOKENS
    y, partials, N, rows, y_stride, steps = out
    begin, middle, end, token_tiles = share
    r = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    n = gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    parts = partials + WAY * (64 * TOKENS) + r[:, None] * TOKENS + n[None, :]
    i = 0
    while i < end - begin:
        step = _step_of(i, begin, middle, end)
        tile = step // KS
        last = gl.minimum(end, (tile + 1) * KS)
        sums = _sums_of(room, i, last - step, WAYS, WAY, TOKENS, STAGES, FORMAT)
        i += last - step
        if last < (tile + 1) * KS:
            gl.store(parts + gl.program_id(0) * EACH, sums)
        else:
            if step > tile * KS:
                low = ((tile * KS + 1) * gl.num_programs(0) - 1) // steps  # the program that has the first columns
                sums = _with_parts(sums, parts, low, EACH, TOKENS)
            row = (tile // token_tiles * WAYS + WAY) * 64 + r
            token = tile % token_tiles * TOKENS + n
            to = y + token.to(gl.int64)[None, :] * y_stride + row[:, None]
            gl.store(to, sums.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (token < N)[None, :])


@gluon.jit(do_not_specialize=["N"])
def _specialised_kernel(
    words, high, scales, d, values, totals, factors, x, y, partials, N, rows, x_stride, y_stride, steps, token_tiles,
    KS: gl.constexpr, FORMAT: gl.constexpr, WAYS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, MAKING: gl.constexpr, MADE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """One program: an equal share of the steps of 256 columns of all tiles of 64 · WAYS rows and TOKENS tokens.

    words, high, scales, d: descriptors of a `Packed`; of Q4_K, high is not read. values, totals, factors: of what
    `_prepare_kernel` makes (MADE); if not, anything, and x [N, K] is read.
    """
    ROOM: gl.constexpr = STAGES * WAYS
    words_room = gl.allocate_shared_memory(gl.int16, [ROOM, 8, 8, 64], words.layout)
    high_room = words_room
    if FORMAT == "Q5_K":
        high_room = gl.allocate_shared_memory(gl.int32, [ROOM, 8, 64], high.layout)
    if FORMAT == "Q6_K":
        high_room = gl.allocate_shared_memory(gl.int32, [ROOM, 8, 8, 16], high.layout)
    scales_room = gl.allocate_shared_memory(gl.int16, [ROOM, 8, 64], scales.layout)
    d_room = gl.allocate_shared_memory(d.dtype, [ROOM, 8, 8], d.layout)
    values_room = gl.allocate_shared_memory(gl.float16, [STAGES, TOKENS, 256], values.layout)
    totals_room = gl.allocate_shared_memory(gl.float16, [STAGES, TOKENS, 16], totals.layout)
    factors_room = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TOKENS], factors.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1 if MADE else 2)
        mbarrier.init(empty.index(s), count=WAYS)
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    W, made = (words, high, scales, d), (values, totals, factors)
    room = (words_room, high_room, scales_room, d_room, values_room, totals_room, factors_room, full, empty)
    P = gl.num_programs(0)
    begin = (gl.program_id(0).to(gl.int64) * steps // P).to(gl.int32)
    end = ((gl.program_id(0) + 1).to(gl.int64) * steps // P).to(gl.int32)
    middle = gl.minimum(end, (begin // KS + 1) * KS)  # where its first rows end
    x, out, share = (x, x_stride, N), (y, partials, N, rows, y_stride, steps), (begin, middle, end, token_tiles)
    if MADE:  # constants cannot be part of a tuple that has a name
        gl.warp_specialize([
            (_multiply, (out, room, share, KS, FORMAT, WAYS, 0, TOKENS, STAGES)),
            (_multiply, (out, room, share, KS, FORMAT, WAYS, 1, TOKENS, STAGES)),
            (_copy, (W, made, room, share, KS, FORMAT, WAYS, TOKENS, STAGES, MADE, DEPENDENT)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    elif WAYS == 2:
        gl.warp_specialize([
            (_multiply, (out, room, share, KS, FORMAT, WAYS, 0, TOKENS, STAGES)),
            (_multiply, (out, room, share, KS, FORMAT, WAYS, 1, TOKENS, STAGES)),
            (_make, (x, room, share, KS, TOKENS, STAGES, DEPENDENT)),
            (_copy, (W, made, room, share, KS, FORMAT, WAYS, TOKENS, STAGES, MADE, DEPENDENT)),
        ], [4, 4, 1], [REGISTERS, MAKING, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (out, room, share, KS, FORMAT, WAYS, 0, TOKENS, STAGES)),
            (_multiply, (out, room, share, KS, FORMAT, WAYS, 1, TOKENS, STAGES)),
            (_multiply, (out, room, share, KS, FORMAT, WAYS, 2, TOKENS, STAGES)),
            (_make, (x, room, share, KS, TOKENS, STAGES, DEPENDENT)),
            (_copy, (W, made, room, share, KS, FORMAT, WAYS, TOKENS, STAGES, MADE, DEPENDENT)),
        ], [4, 4, 4, 1], [REGISTERS, REGISTERS, MAKING, 24])  # fmt: skip


def by_specialised_warps(W: Packed, x: Tensor, y: Tensor, choice: WarpChoice | None = None) -> list[Launch]:
    """y[n] = W x[n]: one launch, or of more than 16 tokens a program two, the first of which makes x.

    W: of a K format, `formats.Packed` [rows, columns]. x: [N, columns], bf16 or fp16; y: [N, rows], bf16, fp16 or
    fp32; values of a token adjacent. choice: `warp_rule`'s by default. Values of x below 2^-34 of a token's largest of
    256 may be lost, infinity gives NaN; weights are exact, of Q6_K to 2^-12. ValueError for anything else, and for what
    is not a Hopper GPU. Launches must not run twice at once: they have memory for one set of sums.
    """
    check_product(W, x, y)
    check_one_of("format", W.format.name, K_FORMATS)
    check_one_of("x", x.dtype, DTYPES)
    check_hopper(x.device)
    if W.columns < LEAST_COLUMNS:
        raise ValueError(f"columns is {W.columns}; allowed: at least {LEAST_COLUMNS}")
    choice = choice or warp_rule(len(x))
    check_warps(choice)
    check_room(W, choice)
    before, made = _prepared(x, choice.tokens) if choice.tokens > MAKES else ([], _unprepared(x, choice.tokens))
    token_tiles, blocks = triton.cdiv(len(x), choice.tokens), W.words.shape[0]
    steps = triton.cdiv(blocks, 8 * choice.ways) * token_tiles * (W.columns // STEP)
    programs = min(multiprocessors(x.device), steps)
    parts = torch.full((programs * choice.ways * 64 * choice.tokens,), BLANK.value, dtype=torch.int32, device=x.device)
    args: dict[str, Any] = _descriptors(W) | made | {"x": x, "y": y, "partials": parts.view(torch.float32)}
    args |= {"N": len(x), "rows": W.rows, "x_stride": x.stride(0), "y_stride": y.stride(0), "steps": steps}
    args |= {"token_tiles": token_tiles, "KS": W.columns // STEP, "FORMAT": W.format.name, "WAYS": choice.ways}
    args |= {"TOKENS": choice.tokens, "STAGES": choice.stages, "MADE": bool(before), "DEPENDENT": True}
    args |= {"MAKING": MAKING.get(choice.tokens, 0), "REGISTERS": _registers(choice)}
    options = {"num_warps": 4, "maxnreg": _most(choice), "launch_pdl": True}
    return [*before, Launch(_specialised_kernel, (programs,), args, options)]


def warp_rule(tokens: int) -> WarpChoice:
    """A choice for so many tokens, without spills to speak of on sm_90.

    Three warpgroups hide each other's waits, while registers are enough for them: up to 8 tokens.
    """
    tokens = next((n for n in TOKENS if tokens <= n), TOKENS[-1])
    return WarpChoice(tokens, 3 if tokens == 8 else 2, 3 if tokens != 16 else 4)


def check_warps(choice: WarpChoice) -> None:
    """Raise ValueError for a choice that the kernel cannot take."""
    ways = WAYS if choice.tokens <= MAKES else WAYS[:1]
    for name, allowed in (("tokens", TOKENS), ("ways", ways), ("stages", STAGES)):
        check_one_of(name, getattr(choice, name), allowed)


def check_room(W: Packed, choice: WarpChoice) -> None:
    """Raise ValueError for more stages than shared memory holds: of weights as packed, and of x (`_made_of`)."""
    weights = W.nbytes * STEP * 64 * choice.ways // (len(W.words) * 8 * W.columns)
    stage = weights + choice.tokens * (2 * STEP + 2 * 16 + 4)
    if choice.stages * stage > ROOM:
        found = f"stages is {choice.stages}, of {stage} bytes each"
        raise ValueError(f"{found}; allowed for {W.format.name} and {choice}: at most {ROOM // stage}")


def _shared_layout(swizzle: int, bits: int, rank: int) -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def _descriptors(W: Packed) -> dict[str, TensorDescriptor]:
    """Of the arrays of a `Packed`: boxes of 64 rows and 256 columns. Of rows that there are not, zeros."""
    blocks, columns = W.words.shape[0], W.columns
    assert W.scales is not None
    assert W.d is not None
    words = W.words.view(torch.int16).view(blocks, columns // 32, 64)
    scales = W.scales.view(blocks, columns // 4)
    d, size = W.d.view(blocks, columns // 32), W.d.element_size()
    made = {
        "words": TensorDescriptor.from_tensor(words, [8, 8, 64], _shared_layout(128, 16, 3)),
        "scales": TensorDescriptor.from_tensor(scales, [8, 64], _shared_layout(128, 16, 2)),
        "d": TensorDescriptor.from_tensor(d, [8, 8], _shared_layout(32 if size == 4 else 0, 8 * size, 2)),
    }
    if W.high is None:
        return made | {"high": made["scales"]}
    if W.format.name == "Q5_K":
        high = TensorDescriptor.from_tensor(W.high.view(blocks, columns // 4), [8, 64], _shared_layout(128, 32, 2))
    else:
        high = W.high.view(blocks, columns // 32, 16)
        high = TensorDescriptor.from_tensor(high, [8, 8, 16], _shared_layout(64, 32, 3))
    return made | {"high": high}


def _prepared(x: Tensor, tokens: int) -> tuple[list[Launch], dict[str, TensorDescriptor]]:
    """The launch that makes x for programs of so many tokens, and descriptors of what it makes."""
    K, padded = x.shape[1], triton.cdiv(len(x), tokens) * tokens
    made = _made_of(x, padded, tokens)
    args = dict(zip(("values", "totals", "factors"), made, strict=True)) | {"x": x, "N": len(x), "K": K}
    args |= {"x_stride": x.stride(0), "BLOCK": PREPARED, "TOKENS": tokens, "DEPENDENT": True}
    launch = Launch(_prepare_kernel, (padded, triton.cdiv(K, PREPARED)), args, {"num_warps": 4, "launch_pdl": True})
    return [launch], _boxes(*made, tokens)


def _unprepared(x: Tensor, tokens: int) -> dict[str, TensorDescriptor]:
    """Descriptors whose layouts a program takes; nothing is read through them."""
    return _boxes(*_made_of(x, tokens, tokens), tokens)


def _made_of(x: Tensor, padded: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what `_prepare_kernel` makes of x [N, K]; padded: N, in whole programs of so many tokens."""
    K = x.shape[1]
    values, totals = (x.new_empty((padded, width), dtype=torch.float16) for width in (K, K // 16))
    return values, totals, x.new_empty((padded // tokens * (K // STEP), tokens), dtype=torch.float32)


def _boxes(values: Tensor, totals: Tensor, factors: Tensor, tokens: int) -> dict[str, TensorDescriptor]:
    return {
        "values": TensorDescriptor.from_tensor(values, [tokens, STEP], _shared_layout(128, 16, 2)),
        "totals": TensorDescriptor.from_tensor(totals, [tokens, 16], _shared_layout(32, 16, 2)),
        "factors": TensorDescriptor.from_tensor(factors, [1, tokens], _shared_layout(0, 32, 2)),
    }


def _threads(choice: WarpChoice) -> int:
    """A warpgroup for every 64 rows, one that makes x if it does, and one, of which one warp copies."""
    return 128 * (choice.ways + (choice.tokens <= MAKES) + 1)


def _most(choice: WarpChoice) -> int:
    """Registers of a thread when a program begins, which has a multiprocessor to itself; in steps of eight."""
    return REGISTERS // _threads(choice) // 8 * 8


def _registers(choice: WarpChoice) -> int:
    """Registers of a thread that multiplies, once the others have given up theirs; in steps of eight."""
    left = _most(choice) * _threads(choice) - 128 * (COPYING + MAKING.get(choice.tokens, 0))
    return min(240, left // (128 * choice.ways) // 8 * 8)
