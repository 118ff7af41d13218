"""An expert layer with INT4 weights and few tokens an expert, bf16: `by_few_rows`.

| what                     | hypothesis                                                                                |
|--------------------------|-------------------------------------------------------------------------------------------|
| words in fragment order  | tiles.py unpacks weights in registers and waits for all warps in every K tile; here a     |
|                          | lane's word of eight weights is its part of two matrix instructions as it is, and no lane |
|                          | waits for another: neither barriers nor shared memory                                     |
| tokens on the right side | a matrix instruction takes 8 columns: the tokens of a block beyond the 8th cost nothing   |
|                          | where there are none                                                                      |
| sums scaled, not weights | a nibble beside 128 in bf16 is 128 + u4, exactly, by one mask; what is too much, 136      |
|                          | times the sum of x, is a product of x with constants, in which each sum of a group begins |
| gate and up side by side | rows r and r + 8 of a fragment are a lane's: SiLU(gate) · up needs no other lane          |
| depth                    | groups of 128 weights of a row asked for ahead: more hide the memory, and take registers  |
| registers                | fewer a thread than the compiler would take: more warps at once hide what each waits for  |

Which eight values of x meet a word is the same for all rows: columns of a matrix instruction may have any order, if
both sides have it. Lane 4 r + t of a warp has columns 32 t to 32 t + 31 of each group of 128, of rows r and r + 8 of a
fragment and of token r; parts i of word j are columns 8 j + i and 8 j + i + 4.

The products are exact and the sums in fp32, but tensor cores cut off what is below 2^-23 or so of the largest term,
which may be 136 times the sum of a group's x: of the sum of its |x|, times the scale, less than 2^-15.

Tried on an H200 and slower: programs that stay, whose warps take one fragment after the other and ask for the next
one's weights before they have ended (gemm1 1.15 to 1.35 times, gemm2 1.0 to 1.1); blocks of 32 and 64 tokens (Mixtral's
layer, 128 tokens: as long as with two blocks of 16, and 1.6 times; tiles take half of that).

Sources: tiles.py, `gguf.integers` (the fragments).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_one_of
from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.experts.choose import Choice, TileChoice
from labkit.kernels.experts.inputs import (
    Layer,
    LayerInputs,
    Workspace,
    check_int4,
    check_layer,
    check_several,
    workspace,
)
from labkit.kernels.experts.int4 import GROUP, Int4
from labkit.kernels.experts.tiled import by_tiles
from labkit.kernels.experts.tiles import _silu_up, options_of
from labkit.kernels.gguf.integers import _MULTIPLY
from labkit.kernels.gguf.shares import _without_first
from labkit.kernels.gguf.unpack import ASSEMBLY, _columns
from labkit.kernels.launch import Launch

ROWS = 16  # of a block of tokens, and of a fragment of weights
_TILE = TileChoice(64, 128, 4, 4)  # of the products that are replaced
BLOCKS = Choice(ROWS, _TILE, _TILE)
FRAGMENTS, WARPS, DEPTHS = (1, 2, 4), (1, 2, 4, 8), (1, 2, 3)
NIBBLES = 0x000F000F
BASE = 0x43004300  # two bf16 128
LESS = tl.constexpr(-1022835960)  # bits of two bf16 -136


@dataclass(frozen=True)
class FewChoice:
    """How one product is run. fragments: of 16 rows of w a warp; depth: groups of 128 columns asked for ahead.

    registers: at most, of a thread; 0: as many as the compiler takes.
    """

    fragments: int = 2
    num_warps: int = 4
    depth: int = 1
    registers: int = 128


@triton.jit
def _multiply(a, b0, b1, c, WARPS: tl.constexpr):
    """c + A B of a matrix instruction, A [16, 16], B [16, 8], in the registers of each of WARPS warps' lanes."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _MULTIPLY, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        upper = _both(a[0], b0, WARPS) + _both(a[2], b1, WARPS)
        lower = _both(a[1], b0, WARPS) + _both(a[3], b1, WARPS)
        u0, u1 = tl.split(tl.reshape(upper, (WARPS * 32, 2)))
        l0, l1 = tl.split(tl.reshape(lower, (WARPS * 32, 2)))
        return c[0] + u0, c[1] + u1, c[2] + l0, c[3] + l1


@triton.jit
def _both(a, b, WARPS: tl.constexpr):
    """[WARPS, 8, 8]: of every row of a and token of b, the products that a register of two bf16 each contributes."""
    even = tl.reshape((a << 16).to(tl.float32, bitcast=True), (WARPS, 8, 1, 4))
    even *= tl.reshape((b << 16).to(tl.float32, bitcast=True), (WARPS, 1, 8, 4))
    odd = tl.reshape((a & -65536).to(tl.float32, bitcast=True), (WARPS, 8, 1, 4))
    odd *= tl.reshape((b & -65536).to(tl.float32, bitcast=True), (WARPS, 1, 8, 4))
    return tl.sum(even + odd, 3)


@triton.jit
def _group(words, scales, g, quad):
    """Four words and a scale of group g of the rows that a lane has: a tuple for each row."""
    found = ()
    for r in tl.static_range(len(words)):
        at = words[r] + g * 16 + quad * 4
        four = _columns(tl.load(at[:, None] + tl.arange(0, 4)[None, :], eviction_policy="evict_first"))
        found = found + ((four, tl.load(scales[r] + g)),)
    return found


@triton.jit
def _raised(word, base, nibbles):
    """128 + u4 of a word's eight weights, in its parts: two bf16 in each of four words."""
    return (
        (word & nibbles) ^ base,
        (word >> 4 & nibbles) ^ base,
        (word >> 8 & nibbles) ^ base,
        (word >> 12 & nibbles) ^ base,
    )


@triton.jit
def _lower(a, b):
    """The lower halves of both, b's above a's."""
    if ASSEMBLY:  # one instruction, for which the compiler has two
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (a & 0xFFFF) | (b << 16)


@triton.jit
def _upper(a, b):
    """The upper halves of both, b's above a's."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (a >> 16 & 0xFFFF) | (b & -65536)


@triton.jit
def _parts_of_x(x, k):
    """Eight values of x from its k-th word on, in the order of a word's parts: two bf16 in each of four words."""
    first, second, third, fourth = _columns(tl.load((x + k)[:, None] + tl.arange(0, 4)[None, :]))
    return _lower(first, third), _upper(first, third), _lower(second, fourth), _upper(second, fourth)


@triton.jit
def _add_group(sums, rows, xs, g, quad, base, nibbles, WARPS: tl.constexpr):
    """The sums with a group's products added: of every 8 tokens, of every fragment; four a lane each."""
    FRAGMENTS: tl.constexpr = len(rows) // 2
    less, zero = tl.full([WARPS * 32], LESS, tl.int32), tl.zeros([WARPS * 32], tl.float32)
    parts, starts = (), ()
    for n in tl.static_range(len(xs)):
        start = (zero, zero, zero, zero)
        for j in tl.static_range(4):
            x = _parts_of_x(xs[n], g * 64 + quad * 16 + j * 4)
            start = _multiply((less, less, less, less), x[0], x[1], start, WARPS)
            start = _multiply((less, less, less, less), x[2], x[3], start, WARPS)
            parts = parts + (x,)
        starts = starts + (start,)
    new = ()
    for n in tl.static_range(len(xs)):
        for f in tl.static_range(FRAGMENTS):
            found = starts[n]
            for j in tl.static_range(4):
                u, v = _raised(rows[2 * f][0][j], base, nibbles), _raised(rows[2 * f + 1][0][j], base, nibbles)
                x = parts[4 * n + j]
                found = _multiply((u[0], v[0], u[1], v[1]), x[0], x[1], found, WARPS)
                found = _multiply((u[2], v[2], u[3], v[3]), x[2], x[3], found, WARPS)
            upper, lower = rows[2 * f][1].to(tl.float32), rows[2 * f + 1][1].to(tl.float32)
            s = sums[n * FRAGMENTS + f]
            new = new + (
                (
                    tl.fma(found[0], upper, s[0]),
                    tl.fma(found[1], upper, s[1]),
                    tl.fma(found[2], lower, s[2]),
                    tl.fma(found[3], lower, s[3]),
                ),
            )
    return new


@triton.jit
def _sums_of(words, scales, xs, quad, base, nibbles, K: tl.constexpr, WARPS: tl.constexpr, DEPTH: tl.constexpr):
    UNROLL: tl.constexpr = 1 if (K // 128) % (DEPTH + 1) else DEPTH + 1
    """The products of rows of w with so many times 8 tokens; four a lane, of each fragment."""
    zero = tl.zeros([WARPS * 32], tl.float32)
    sums, asked = (), ()
    for _ in tl.static_range(len(words) // 2 * len(xs)):
        sums = sums + ((zero, zero, zero, zero),)
    for i in tl.static_range(DEPTH):
        asked = asked + (_group(words, scales, tl.minimum(i, K // 128 - 1), quad),)
    # As many a turn as are kept need not move from register to register
    for g in tl.range(0, K // 128, loop_unroll_factor=UNROLL):
        asked = asked + (_group(words, scales, tl.minimum(g + DEPTH, K // 128 - 1), quad),)
        sums = _add_group(sums, asked[0], xs, g, quad, base, nibbles, WARPS)
        asked = _without_first(asked)
    return sums


@triton.jit
def _token_rows(a, slots, block, row, slot_count, TOKENS: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
                GATHER: tl.constexpr):  # fmt: skip
    """Where x of a lane's token begins, in words, of every 8 tokens of a block."""
    found = ()
    for n in tl.static_range(TOKENS // 8):
        m = block * 16 + 8 * n + row
        if GATHER:
            m = tl.minimum(tl.load(slots + m), slot_count - 1) // TOP_K  # of padding the last token's; it is not stored
        found = found + (a + m.to(tl.int64) * (K // 2),)
    return found


@triton.jit
def _store(sums, c, slots, block, upper, quad, live, slot_count, OUT: tl.constexpr, GATHER: tl.constexpr,
           TOKENS: tl.constexpr):  # fmt: skip
    """Sums of fragments to rows: of gate and up SiLU(gate) · up (GATHER), else of both rows, back to their slots.

    upper, live: of each fragment, the row of w in its upper half, and whether it is one.
    """
    FRAGMENTS: tl.constexpr = len(upper)
    for n in tl.static_range(TOKENS // 8):
        for i in tl.static_range(2):
            m = block * 16 + 8 * n + 2 * quad + i
            slot = tl.load(slots + m)
            to = c + (m if GATHER else slot).to(tl.int64) * OUT
            for f in tl.static_range(FRAGMENTS):
                s, mask = sums[n * FRAGMENTS + f], (slot < slot_count) & live[f]
                if GATHER:
                    tl.store(to + upper[f], _silu_up(s[i], s[i + 2]).to(c.dtype.element_ty), mask=mask)
                else:
                    tl.store(to + upper[f], s[i].to(c.dtype.element_ty), mask=mask)
                    tl.store(to + upper[f] + 8, s[i + 2].to(c.dtype.element_ty), mask=mask)


@triton.jit
def _tokens(
    a, c, words, scales, slots, block, upper, row, quad, live, slot_count, base, nibbles,
    OUT: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr, TOKENS: tl.constexpr,
    WARPS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Products of rows of w with the first 8, or all 16 tokens of a block, stored."""
    xs = _token_rows(a, slots, block, row, slot_count, TOKENS, K, TOP_K, GATHER)
    sums = _sums_of(words, scales, xs, quad, base, nibbles, K, WARPS, DEPTH)
    _store(sums, c, slots, block, upper, quad, live, slot_count, OUT, GATHER, TOKENS)


@triton.jit(do_not_specialize=["slot_count", "base", "nibbles"])
def _few_rows_kernel(
    a, w, scales, c, slots, experts, padded, slot_count, base, nibbles,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr,
    FRAGMENTS: tl.constexpr, WARPS: tl.constexpr, DEPTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: a block of 16 tokens of one expert, FRAGMENTS · WARPS fragments of 16 rows of its w [N, K].

    a, w: words of two bf16, of eight weights. GATHER: a is x [T, K], c is sorted [rows, N // 2], SiLU(gate) · up; if
    not, a is sorted, and c is [T · TOP_K, N] in the order of the slots. base, nibbles: as arguments, so that a mask and
    its bits are one instruction.
    """
    wait_for_inputs(DEPENDENT)
    STRIPS: tl.constexpr = N // 16
    COLUMNS: tl.constexpr = (STRIPS + FRAGMENTS * WARPS - 1) // (FRAGMENTS * WARPS)
    block, column = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    expert = tl.load(experts + block).to(tl.int64)  # asked for with `padded`, not after it
    is_full = tl.load(slots + block * 16 + 8) < slot_count
    if block * 16 >= tl.load(padded):
        return
    lanes = tl.arange(0, WARPS * 32)
    row, quad = lanes // 4 % 8, lanes % 4
    w += expert * (N * (K // 8))
    scales += expert * (N * (K // 128))
    OUT: tl.constexpr = N // 2 if GATHER else N
    rows_of_w, scales_of_w, upper, live = (), (), (), ()
    for f in tl.static_range(FRAGMENTS):
        strip = (column * WARPS + lanes // 32) * FRAGMENTS + f
        live = live + (strip < STRIPS,)
        first = tl.minimum(strip, STRIPS - 1) * (8 if GATHER else 16) + row
        upper = upper + (first,)
        for half in tl.static_range(2):
            n = first + half * (OUT if GATHER else 8)
            rows_of_w = rows_of_w + (w + n * (K // 8),)
            scales_of_w = scales_of_w + (scales + n * (K // 128),)
    if is_full:
        _tokens(
            a, c, rows_of_w, scales_of_w, slots, block, upper, row, quad, live, slot_count, base, nibbles,
            OUT, K, TOP_K, GATHER, 16, WARPS, DEPTH,
        )  # fmt: skip
    else:
        _tokens(
            a, c, rows_of_w, scales_of_w, slots, block, upper, row, quad, live, slot_count, base, nibbles,
            OUT, K, TOP_K, GATHER, 8, WARPS, DEPTH,
        )  # fmt: skip


def by_few_rows(
    x: LayerInputs,
    scratch: Workspace | None = None,
    up: FewChoice = FewChoice(registers=168),
    down: FewChoice = FewChoice(),
) -> Layer:
    """`expert_layer.layer` by these products: blocks of 16 tokens, SiLU · up fused.

    scratch: as there. up, down: of the first and second product.
    ValueError for weights that are not INT4, for one token, and for an x that is not bf16 or does not begin at a
    multiple of 16 bytes.
    """
    check_layer(x)
    check_int4(x)
    check_several(x)
    made = by_tiles(x, BLOCKS, workspace(x) if scratch is None else scratch)
    gemms = {"gemm1": (x.w1, up), "gemm2": (x.w2, down)}
    launches = {n: gemm(one.args, *gemms[n]) if n in gemms else one for n, one in made.launches.items()}
    return Layer(made.config, made.sorted, launches)


def gemm(args: Mapping[str, Any], w: Int4, choice: FewChoice) -> Launch:
    """One of the two products, with the arguments of that of tiles.py. ValueError for what the kernel cannot take."""
    a: Tensor = args["a"]
    check_one_of("x", a.dtype, (torch.bfloat16,))
    if over := a.data_ptr() % 16:
        raise ValueError(f"x begins {over} bytes after a multiple of 16; allowed: a multiple of 16")
    for name, allowed in (("fragments", FRAGMENTS), ("num_warps", WARPS), ("depth", DEPTHS)):
        check_one_of(name, getattr(choice, name), allowed)
    assert args["K"] % GROUP == 0
    kept = ("c", "slots", "experts", "padded", "slot_count", "N", "K", "TOP_K", "GATHER", "DEPENDENT")
    given = {name: args[name] for name in kept}
    given |= {"a": a.view(torch.int32), "w": w.packed.view(torch.int32), "scales": w.scales}
    given |= {"base": BASE, "nibbles": NIBBLES, "FRAGMENTS": choice.fragments, "WARPS": choice.num_warps}
    given |= {"DEPTH": choice.depth}
    columns = triton.cdiv(args["N"] // ROWS, choice.fragments * choice.num_warps)
    options = options_of(args, choice.num_warps) | ({"maxnreg": choice.registers} if choice.registers else {})
    return Launch(_few_rows_kernel, (args["blocks"] * columns,), given, options)
