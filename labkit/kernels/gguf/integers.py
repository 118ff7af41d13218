"""Products of K formats by matrix instructions on the integers themselves, y[n] = W x[n].

| variant    | hypothesis                                                                                         |
|------------|----------------------------------------------------------------------------------------------------|
| `integers` | `kernels.tensor_core` spends its time on making bf16 of weights, four instructions for each: a     |
|            | subtraction, a scale, half a conversion. Integers need none of that: two at a time are put beside  |
|            | 128 in bf16, exact, and their scales multiply sums of 32 weights, not weights                      |

So that a sum has one scale, a matrix instruction sees columns of one group alone (of Q6_K, of one half). Words are
therefore in another order than `formats.Packed` has them (`tiled`): a lane has 8 weights of each of four groups instead
of all 32 of one, and the four lanes of a row read x side by side: half as many lines for the same values.

Of a group, Σ x (128 + q) starts at -128 Σ x (Q6_K, whose q stand for q - 32: -160), which is a matrix product too, of x
with constants: so every lane has it where it is needed, for all rows at once, and the minimum is a multiple of it.
Products of integers and x are exact, sums in fp32, and scales are not rounded: weights are exact, too. Tensor cores cut
off what is below 2^-23 or so of the largest term, which -128 Σ x may be: of the sum of a group, less than 2^-16.

Programs are one warp; all tiles are dealt in equal shares, as in kernels.py, whose parts these kernels use. The bits of
a token depend on the number of shares alone. In fp16 and fp32 there is no room beside 128: x is bf16.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_one_of
from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.gguf.choose import TileChoice, check_tile
from labkit.kernels.gguf.formats import K_FORMATS, Q6_K_PLACES, Packed, _placed
from labkit.kernels.gguf.products import _arrays, _grid, _ups, check_product
from labkit.kernels.gguf.shares import _dealt, _of_all_sharers, _parts, _registers, _share_of, _start, _without_first
from labkit.kernels.gguf.unpack import ASSEMBLY, _columns, _silu_up, _turned
from labkit.kernels.launch import Launch
from labkit.kernels.target import has_dependent_launch

GROUPS = 4  # of 32 columns, in a tile: one for each word of a load
TILE = 128  # columns
_MULTIPLY = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


def tiled(W: Packed) -> Packed:
    """The same weights in the order of this module's kernels.

    words:  int32 [rows/8, columns/128, 8, 4, 4]: of row and lane, a word of each of the tile's groups; its parts i and
            i + 4 are columns 8 lane + 2 i and the next (Q6_K: of the group's first half columns 4 lane + 2 i, i below
            2; of the last half, the others).
    high:   int32 [rows/8, columns/128, 8, 4, 1 or 2]: bits above part i of the word of group p. Q5_K: bit 8 (i // 2) +
            2 p + i % 2. Q6_K: of groups 2 h and 2 h + 1 in word h, bits 8 (i // 2) + 4 (p % 2) + 2 (i % 2) and on.
    scales: int32 [rows/8, columns/128, 8, 2]: bytes of scale and min (Q6_K: scales of both halves) of the four groups.
    d:      as of `Packed`.
    ValueError for another format.
    """
    check_one_of("format", W.format.name, K_FORMATS)
    q = _values(W)  # [rows/8, columns/128, 8, 4 groups, 32]
    if W.format.name == "Q6_K":
        parts = q.unflatten(-1, (2, 4, 2, 2)).permute(0, 1, 2, 5, 3, 7, 4, 6)  # row, lane, group, i % 4 // …
    else:
        parts = q.unflatten(-1, (4, 4, 2)).permute(0, 1, 2, 4, 3, 6, 5)
    parts = parts.reshape(*q.shape[:3], 4, 4, 8)  # row, lane, group, part: the upper half of a word has odd columns
    words = _placed(parts & 15, [4 * i for i in range(8)])
    high, above = None, parts >> 4
    if W.format.name == "Q5_K":
        places = [8 * (i // 2) + 2 * p + i % 2 for p in range(4) for i in range(8)]
        high = _placed(above.flatten(-2), places).unsqueeze(-1)
    if W.format.name == "Q6_K":
        places = [8 * (i // 2) + 4 * p + 2 * (i % 2) for p in range(2) for i in range(8)]
        high = _placed(above.unflatten(-2, (2, 2)).flatten(-2), places)
    assert W.scales is not None
    pairs = W.scales.unflatten(1, (-1, GROUPS)).transpose(2, 3).contiguous()  # [rows/8, tiles, 8, 4] of 16 bits
    return replace(W, words=words, high=high, scales=pairs.view(torch.int32))


def _values(W: Packed) -> Tensor:
    """The integers, int32 [rows/8, columns/128, 8, 4 groups, 32]."""
    words = W.words.squeeze(2)  # [rows/8, groups, 8, 4]
    parts = torch.stack([words >> 4 * i & 15 for i in range(8)], -2)  # part i of word j is weight 4 i + j
    assert W.high is not None or W.format.name == "Q4_K"
    if W.format.name == "Q5_K":
        parts = parts | torch.stack([W.high >> i & 1 for i in range(32)], -1).unflatten(-1, (8, 4)) << 4
    if W.format.name == "Q6_K":
        upper = W.high.transpose(2, 3)  # [rows/8, groups, 8, 2]
        bits = torch.stack([upper >> place & 3 for place in Q6_K_PLACES], -1).flatten(-2)
        parts = parts | bits.unflatten(-1, (8, 4)) << 4
    return parts.flatten(-2).unflatten(1, (-1, GROUPS)).transpose(2, 3)


@triton.jit
def _products(a, b0, b1, c0, c1, c2, c3):
    """c + A B of a matrix instruction: A [16, 16], B [16, 8], in its lanes' registers. a: four, b0, b1: two bf16 each.

    Lane 4 r + g has rows r (a[0], a[2]; c0, c1) and r + 8, four columns of A (of tokens: rows of B), c of tokens 2 g
    and the next.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _MULTIPLY, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a[0], a[1], a[2], a[3], b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        upper = _interpreted(a[0], b0) + _interpreted(a[2], b1)
        lower = _interpreted(a[1], b0) + _interpreted(a[3], b1)
        u0, u1 = tl.split(tl.reshape(upper, (8, 4, 2)))
        l0, l1 = tl.split(tl.reshape(lower, (8, 4, 2)))
        flat: tl.constexpr = (32,)
        return (
            c0 + tl.reshape(u0, flat),
            c1 + tl.reshape(u1, flat),
            c2 + tl.reshape(l0, flat),
            c3 + tl.reshape(l1, flat),
        )


@triton.jit
def _interpreted(a, b):
    """[8, 8]: of every row of a and token of b, the products that a register of two bf16 each contributes."""
    even = tl.reshape((a << 16).to(tl.float32, bitcast=True), (8, 1, 4))
    even *= tl.reshape((b << 16).to(tl.float32, bitcast=True), (1, 8, 4))
    odd = tl.reshape((a & -65536).to(tl.float32, bitcast=True), (8, 1, 4))
    odd *= tl.reshape((b & -65536).to(tl.float32, bitcast=True), (1, 8, 4))
    return tl.sum(even + odd, 2)


@triton.jit
def _byte(word, p: tl.constexpr):
    """fp32 of 2^23 plus byte p of a word."""
    if ASSEMBLY:
        raised = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0x4B000000, $2;", "=r,r,n", [word, tl.full([1], 0x7550 + p, tl.int32)], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        raised = (word >> 8 * p & 255) | 0x4B000000
    return raised.to(tl.float32, bitcast=True)


@triton.jit
def _times(raised, factor):
    """The product of a factor, of at most 17 bits, with a byte of at most 6 that stands beside 2^23; exact."""
    if ASSEMBLY:
        return tl.fma(raised, factor, factor * -8388608.0)
    else:  # whose fma rounds the product
        return (raised - 8388608.0) * factor


@triton.jit
def _arrays_of(W, block, TILES: tl.constexpr, FORMAT: tl.constexpr):
    """The arrays of a `tiled` matrix from a block of 8 rows on."""
    words, high, scales, d = W
    tile = block.to(tl.int64) * TILES
    HIGH: tl.constexpr = 64 if FORMAT == "Q6_K" else 32
    return words + tile * 128, high + tile * HIGH, scales + tile * 16, d + tile * 4


@triton.jit
def _two(pointers):
    """The two values from each pointer on."""
    return tl.split(tl.load(pointers[:, None] + tl.arange(0, 2)[None, :], eviction_policy="evict_first"))


@triton.jit
def _read(arrays, tile, lanes, FORMAT: tl.constexpr):
    """A tile of one block: four words, what is above them, two words of scales, d; of every lane."""
    words, high, scales, d = arrays
    at = words + tile * 128 + lanes * 4
    four = _columns(tl.load(at[:, None] + tl.arange(0, 4)[None, :], eviction_policy="evict_first"))
    bits = ()
    if FORMAT == "Q5_K":
        bits = (tl.load(high + tile * 32 + lanes, eviction_policy="evict_first"),)
    if FORMAT == "Q6_K":
        bits = _two(high + tile * 64 + lanes * 2)
    row = lanes // 4
    return four, bits, _two(scales + tile * 16 + row * 2), tl.load(d + tile // 2 * 8 + row)


@triton.jit
def _tile_of(arrays, tile, lanes, FORMAT: tl.constexpr):
    """The same tile of several blocks."""
    tiles = ()
    for b in tl.static_range(len(arrays)):
        tiles = tiles + (_read(arrays[b], tile, lanes, FORMAT),)
    return tiles


@triton.jit
def _nibbles_of(a, b):
    """The lower half of every byte of a, the upper half of b."""
    if ASSEMBLY:  # one instruction, which the compiler takes apart when it knows that bits of a or b are 0
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x0F0F0F0F, 0xe4;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (a & 0x0F0F0F0F) | (b & ~0x0F0F0F0F)


@triton.jit
def _raised(tile, p: tl.constexpr, base, FORMAT: tl.constexpr):
    """128 + q of a lane's 8 weights of group p: two bf16 in each of four words. base: bits of two 128."""
    words, high, _, _ = tile
    word = words[p]
    if FORMAT == "Q4_K":
        MASK: tl.constexpr = 0x000F000F
        return (word & MASK) ^ base, (word >> 4 & MASK) ^ base, (word >> 8 & MASK) ^ base, (word >> 12 & MASK) ^ base
    else:
        if FORMAT == "Q5_K":
            MASK: tl.constexpr = 0x001F001F
            even, odd = _turned(high[0], 4 - 2 * p), _turned(high[0], 3 - 2 * p)
        else:
            MASK: tl.constexpr = 0x003F003F
            even, odd = _turned(high[p // 2], 4 - 4 * (p % 2)), _turned(high[p // 2], 2 - 4 * (p % 2))
        even, odd = _nibbles_of(word, even), _nibbles_of(word >> 4, odd)
        return (even & MASK) ^ base, (odd & MASK) ^ base, (even >> 8 & MASK) ^ base, (odd >> 8 & MASK) ^ base


@triton.jit
def _factors(tile, FORMAT: tl.constexpr):
    """Of every group, what sums of x (128 + q) are multiplied by, and what those of -128 x (Q6_K: of both halves)."""
    _, _, scales, d = tile
    found = ()
    if FORMAT == "Q6_K":
        step = d.to(tl.float32)
        for p in tl.static_range(4):
            word = scales[p // 2] ^ -2139062144  # 0x80808080: from signed to 128 more
            first = (_byte(word, 2 * (p % 2)) - 8388736.0) * step
            found = found + ((first, (_byte(word, 2 * (p % 2) + 1) - 8388736.0) * step),)
    else:
        step = d.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        low = (d >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * (1.0 / 128)
        for p in tl.static_range(4):
            first = _times(_byte(scales[p // 2], 2 * (p % 2)), step)
            found = found + ((first, _times(_byte(scales[p // 2], 2 * (p % 2) + 1), low)),)
    return found


@triton.jit
def _four_of_x(x_row, k, p: tl.constexpr, quad, FORMAT: tl.constexpr):
    """Of group p of a row's tile k, a lane's 8 values of x: two bf16 in each of four words. x_row: int32 pointers."""
    at = x_row + k * 64 + p * 16
    if FORMAT == "Q6_K":
        return tl.split(tl.load((at + quad * 2)[:, None] + tl.arange(0, 2)[None, :])) + tl.split(
            tl.load((at + 8 + quad * 2)[:, None] + tl.arange(0, 2)[None, :])
        )
    else:
        return _columns(tl.load((at + quad * 4)[:, None] + tl.arange(0, 4)[None, :]))


@triton.jit
def _scaled(sums, products, start, upper, lower):
    """Sums, four a lane, with those of a group added. upper, lower: factors of rows r and r + 8."""
    s0 = tl.fma(start[0], upper[1], tl.fma(products[0], upper[0], sums[0]))
    s1 = tl.fma(start[1], upper[1], tl.fma(products[1], upper[0], sums[1]))
    s2 = tl.fma(start[2], lower[1], tl.fma(products[2], lower[0], sums[2]))
    return s0, s1, s2, tl.fma(start[3], lower[1], tl.fma(products[3], lower[0], sums[3]))


@triton.jit
def _add_tile(sums, tiles, x_rows, k, quad, base, FORMAT: tl.constexpr):
    """The sums with a tile's products added: of every 8 tokens, of every two blocks of rows; four a lane each."""
    PAIRS: tl.constexpr = len(tiles) // 2
    LESS: tl.constexpr = -1021263072 if FORMAT == "Q6_K" else -1023360256  # bits of two bf16 -160, of two -128
    less = tl.full([32], LESS, tl.int32)
    constants, zero = (less, less, less, less), tl.zeros([32], tl.float32)
    factors = ()
    for b in tl.static_range(len(tiles)):
        factors = factors + (_factors(tiles[b], FORMAT),)
    for p in tl.static_range(4):
        raised = ()
        for b in tl.static_range(len(tiles)):
            raised = raised + (_raised(tiles[b], p, base, FORMAT),)
        new = ()
        for n in tl.static_range(len(x_rows)):
            x = _four_of_x(x_rows[n], k, p, quad, FORMAT)
            start = _products(constants, x[0], x[1], zero, zero, zero, zero)
            if FORMAT == "Q6_K":
                last = _products(constants, x[2], x[3], zero, zero, zero, zero)
            else:
                start = _products(constants, x[2], x[3], start[0], start[1], start[2], start[3])
                last = start
            for m in tl.static_range(PAIRS):
                u, v = raised[2 * m], raised[2 * m + 1]
                first = (u[0], v[0], u[1], v[1])
                second = (u[2], v[2], u[3], v[3])
                one = _products(first, x[0], x[1], start[0], start[1], start[2], start[3])
                if FORMAT == "Q6_K":
                    other = _products(second, x[2], x[3], last[0], last[1], last[2], last[3])
                else:
                    one = _products(second, x[2], x[3], one[0], one[1], one[2], one[3])
                    other = last
                new = new + (_scaled(sums[n * PAIRS + m], one, other, factors[2 * m][p], factors[2 * m + 1][p]),)
        sums = new
    return sums


@triton.jit
def _no_sums(COUNT: tl.constexpr):
    zero = tl.zeros([32], tl.float32)
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + ((zero, zero, zero, zero),)
    return sums


@triton.jit
def _flat(sums):
    found = ()
    for s in tl.static_range(len(sums)):
        for i in tl.static_range(4):
            found = found + (sums[s][i],)
    return found


@triton.jit
def _store(
    totals, y, y_stride, firsts, strip, first_token, rows, N, whole, lanes, TOKENS: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Store the sums of a strip, if they are whole; of gate and up, which are upper and lower rows, SiLU(gate) · up."""
    PAIRS: tl.constexpr = len(totals) // (TOKENS // 2)
    for n in tl.static_range(TOKENS // 8):
        for m in tl.static_range(PAIRS):
            for i in tl.static_range(2):
                token = first_token + 8 * n + lanes % 4 * 2 + i
                if GATED:
                    row = (firsts[m] + strip) * 8 + lanes // 4
                    total = _silu_up(totals[4 * (n * PAIRS + m) + i], totals[4 * (n * PAIRS + m) + i + 2])
                    mask = (row < rows) & (token < N) & whole
                    tl.store(y + token.to(tl.int64) * y_stride + row, total.to(y.dtype.element_ty), mask=mask)
                else:
                    for half in tl.static_range(2):
                        row = (firsts[2 * m + half] + strip) * 8 + lanes // 4
                        mask = (row < rows) & (token < N) & whole
                        y_at = y + token.to(tl.int64) * y_stride + row
                        total = totals[4 * (n * PAIRS + m) + i + 2 * half]
                        tl.store(y_at, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _integers_kernel(
    x, y, words, high, scales, d, up_words, up_high, up_scales, up_d, partials, counters, N, rows, strips, each, more,
    x_stride, y_stride, base,
    TILES: tl.constexpr, FORMAT: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    GATED: tl.constexpr, SHARERS: tl.constexpr, DEPTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens, a share of the tiles of BLOCKS blocks of 8 rows, one of PARTS of each strip.

    x: pairs of bf16, as int32, x_stride too. A strip's blocks are `strips` apart, as of kernels.py.
    """
    shares = tl.num_programs(1) // PARTS
    share, part = tl.program_id(1) % shares, tl.program_id(1) // shares
    lanes = tl.arange(0, 32)
    x_rows = ()
    for n in tl.static_range(TOKENS // 8):
        mine = tl.minimum(tl.program_id(0) * TOKENS + 8 * n + lanes // 4, N - 1)
        x_rows = x_rows + (x + mine.to(tl.int64) * x_stride,)
    firsts, arrays = (), ()
    for b in tl.static_range(BLOCKS):
        first = tl.minimum((part * BLOCKS + b) * strips, (rows + 7) // 8 - strips)
        firsts = firsts + (first,)
        arrays = arrays + (_arrays_of((words, high, scales, d), first, TILES, FORMAT),)
        if GATED:
            arrays = arrays + (_arrays_of((up_words, up_high, up_scales, up_d), first, TILES, FORMAT),)
    start, end = _start(share, each, more), _start(share + 1, each, more)
    asked = ()
    for i in tl.static_range(DEPTH):
        asked = asked + (_tile_of(arrays, tl.minimum(start + i, end - 1).to(tl.int64), lanes, FORMAT),)
    wait_for_inputs(DEPENDENT)
    for strip in range(start // TILES, (end - 1) // TILES + 1):
        first, last = tl.maximum(start, strip * TILES), tl.minimum(end, (strip + 1) * TILES)
        sums = _no_sums(len(arrays) // 2 * (TOKENS // 8))
        # Two tiles a turn need not move from register to register, while there is room for the code of both
        for t in tl.range(first, last, loop_unroll_factor=2 if TOKENS == 8 else 1):
            ahead = tl.minimum(t + DEPTH, end - 1).to(tl.int64)
            asked = asked + (_tile_of(arrays, ahead, lanes, FORMAT),)
            sums = _add_tile(sums, asked[0], x_rows, t - strip * TILES, lanes % 4, base, FORMAT)
            asked = _without_first(asked)
        totals = _flat(sums)
        whole = True
        if SHARERS > 1:
            sharer = share - _share_of(strip * TILES, each, more)
            sharers = _share_of(strip * TILES + TILES - 1, each, more) - share + sharer + 1
            whole = sharers == 1
            if sharers > 1:
                at = (strip * PARTS + part) * tl.num_programs(0) + tl.program_id(0)
                totals, whole = _of_all_sharers(totals, partials, counters, at, sharer, sharers, SHARERS)
        _store(totals, y, y_stride, firsts, strip, tl.program_id(0) * TOKENS, rows, N, whole, lanes, TOKENS, GATED)


def rule(tokens: int) -> TileChoice:
    """A choice for `integers`, without spills on sm_90; eight shares a multiprocessor, and so one set of bits.

    A program has all four blocks of a strip, which share the values of x: eight are on a multiprocessor, with up to 255
    registers a thread. What the sums of more tokens take, tiles asked for ahead have not.
    """
    padded = 8 if tokens <= 8 else 16 if tokens <= 16 else 32
    return TileChoice(4, padded, 1, 1, {8: 3, 16: 2, 32: 1}[padded], True, 8)


def integers(W: Packed, x: Tensor, y: Tensor, tile: TileChoice | None = None, up: Packed | None = None) -> Launch:
    """y[n] = W x[n], tokens padded to multiples of 8; with up: SiLU(W x[n]) · (up x[n]).

    W, up: of `tiled`. x: [N, columns], bf16, an even number of values apart; y: [N, rows], bf16, fp16 or fp32; values
    of a token adjacent. tile: `rule`'s by default; one warp, and shares. ValueError for anything else. A launch must
    not run twice at once: it has memory for one set of sums.
    """
    check_product(W, x, y, up)
    check_one_of("format", W.format.name, K_FORMATS)
    check_one_of("x", x.dtype, (torch.bfloat16,))
    if x.stride(0) % 2 and len(x) > 1:
        raise ValueError(f"x has strides {x.stride()}; allowed: tokens an even number of values apart")
    tile = tile or rule(len(x))
    check_tile(tile)
    check_one_of("num_warps", tile.num_warps, (1,))
    if not tile.shares:
        raise ValueError("shares is 0; allowed: at least 1")
    blocks = tile.blocks // (1 if up is None else 2)
    pairs = x.view(torch.int32)
    arguments: dict[str, Any] = {"x": pairs, "y": y} | _arrays(W) | _ups(W, up)
    arguments |= {"N": len(x), "rows": W.rows, "x_stride": pairs.stride(0), "y_stride": y.stride(0)}
    arguments |= {"base": 0x43004300, "TILES": W.columns // TILE, "FORMAT": W.format.name, "BLOCKS": blocks}
    arguments |= {"TOKENS": tile.tokens, "GATED": up is not None, "DEPTH": max(0, tile.ahead - 1)}
    arguments["DEPENDENT"] = tile.dependent and has_dependent_launch(x.device)
    token_tiles, row_tiles = _grid(W, x, replace(tile, blocks=blocks))
    parts = _parts(tile)
    arguments |= _dealt(W, tile, GROUPS, token_tiles, triton.cdiv(row_tiles, parts), parts)
    grid = token_tiles, arguments.pop("shares") * parts
    options = {"num_warps": 1, "num_stages": 1} | _registers(tile.shares * parts)
    return Launch(_integers_kernel, grid, arguments, options | ({"launch_pdl": True} if arguments["DEPENDENT"] else {}))
