"""An expert layer in Triton: two grouped GEMMs over tokens sorted by expert, with bf16 or INT4 weights.

Launches, in order; the first one or two are routing's (routing.py). One token needs none of those; it has two launches
of its own (one_token.py, one_token_words.py) unless its configuration asks for tiles: see expert_layer.py.

| launch       | programs       | what it does                                                                         |
|--------------|----------------|--------------------------------------------------------------------------------------|
| count, place | chunk          | slots sorted by expert, padded to BLOCK_M                                            |
| gemm1        | tile, or fewer | w1[e] x of every slot; x is gathered inside; SiLU(gate) · up at its end if fused     |
| gemm2        | tile, or fewer | w2[e] of that; its rows of A lie one after the other; each row goes back to its slot |
| sum          | token, tile    | Σ_j weights[j] · row of slot j, in fp32, in the order of j                           |

Choices (see `choose.TileChoice`), and the hypothesis that each one tests:

| choice       | hypothesis                                                                                            |
|--------------|-------------------------------------------------------------------------------------------------------|
| programs     | a persistent grid saves launching CTAs and its tail; it loses where it holds fewer CTAs an SM than    |
|              | fit, and wins nothing over many waves. min(programs, tiles of the grid) loop over the tiles           |
| counted      | blocks beyond the last token are not worked on: the device's count ends the loop, or the CTA. If not: |
|              | the worst-case grid, whose dead blocks run whole K loops on zeros and the last expert's weights       |
| group_m      | tiles in columns of group_m blocks of rows: blocks of one expert meet its weights in the L2           |
| flatten      | tile loop and K loop as one: the next tile's loads are issued before this tile's store                |
| block_m      | padding and dead rows against reuse of weights; below 64 rows wgmma takes only the weights as its     |
|              | left operand (swap)                                                                                   |
| swap         | w [BN, BK] · xᵀ [BK, BM] instead of x · wᵀ: wgmma needs 64 rows on the left and 8 columns on the      |
|              | right, so few tokens go right; and INT4 weights, unpacked in registers, can enter from there          |
| unpack       | INT4. twice: each byte is addressed for its even and for its odd k, as in the source; join: loaded    |
|              | once, its halves interleaved again; split: two bytes at once, k reordered by k mod 4, x alike, so     |
|              | that no weight need be moved to another register                                                      |
| scale_sums   | INT4. u4 - 8 is exact in bf16, so the scale can multiply each group's sum instead of each weight:     |
|              | fewer products where BM < BK, and no rounding of weights                                              |
| descriptor   | w comes by the copy engine (TMA, from Hopper on): no registers for its addresses; see descriptors.py  |
| dependent    | each launch may start when the one before has begun its last programs, and waits for its end: what a  |
|              | launch costs is hidden (programmatic dependent launch, from Hopper on)                                |
| fused        | SiLU(gate) · up at the end of GEMM1 (rows of gate and up alternate in its tile, so both of a pair are |
|              | in one thread): half the traffic between the GEMMs, and nothing computed again for every column tile  |

The order of sums depends on block_k, unpack, scale_sums and the matrix instruction, never on the grid: for one tile
persistent and per-tile results are bit-identical, with any group_m, counted and flatten.

Sources: ExecuTorch pull request 19219 (persistent grid, tile order, SiLU · up in the K loop), vLLM's fused_moe (slots).
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.experts.choose import TileChoice
from labkit.kernels.experts.int4 import GROUP, Int4
from labkit.kernels.experts.unpack import _from_bytes, _from_halves, _whole

SUM_TILE = 512  # values of a row a program of `sum`


@triton.jit
def _place_of(tile, blocks, COLUMNS: tl.constexpr, GROUP_M: tl.constexpr):
    """Block of rows and block of columns of a tile: columns of GROUP_M blocks of rows, one column after the other."""
    first = tile // (GROUP_M * COLUMNS) * GROUP_M
    within = tile % (GROUP_M * COLUMNS)
    size = tl.minimum(blocks - first, GROUP_M)
    return first + within % size, within // size


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    return tl.load(pointers)


@triton.jit
def _silu_up(gate, up):
    gate = gate.to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)


@triton.jit
def _product(a, b, sums, SWAP: tl.constexpr):
    """sums + a bᵀ, or its transpose if SWAP. a: [BM, BK], b: [BN, BK]."""
    if SWAP:
        return tl.dot(b, tl.trans(a), sums, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(b), sums, input_precision="ieee")


@triton.jit
def _add_int4(
    sums, a, w, rows, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, UNPACK: tl.constexpr, SCALE_SUMS: tl.constexpr,
):  # fmt: skip
    """sums + the product of a [BM, BK] with INT4 weights; rows [BN]: where they begin, in words of w."""
    if UNPACK == "twice":
        dtype: tl.constexpr = a.dtype
        ks = tl.arange(0, BLOCK_K)
        packed = tl.load(w + (rows[None, :] + (ks // 2)[:, None]))  # [BK, BN], as the source has it
        b = _whole((packed >> (ks % 2 * 4)[:, None]) & 15, scale[None, :], SCALE_SUMS, dtype)
        part = _product(a, tl.trans(b), tl.zeros_like(sums) if SCALE_SUMS else sums, SWAP)
        return _scaled(sums, part, scale, SWAP, SCALE_SUMS)
    else:
        WORDS: tl.constexpr = BLOCK_K // (4 if UNPACK == "split" else 2)
        packed = tl.load(w + (rows[:, None] + tl.arange(0, WORDS)[None, :]))
        return _add_packed(sums, a, packed, scale, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, UNPACK, SCALE_SUMS)


@triton.jit
def _add_packed(
    sums, a, packed, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, UNPACK: tl.constexpr, SCALE_SUMS: tl.constexpr,
):  # fmt: skip
    """sums + the product of a [BM, BK] with INT4 weights of which each byte is loaded once.

    packed: [BN, BK // 2], bytes; for split [BN, BK // 4], words of 16 bits.
    """
    part = tl.zeros_like(sums) if SCALE_SUMS else sums
    if UNPACK == "split":
        zero, one, two, three = _from_halves(packed, scale[:, None], SCALE_SUMS, a.dtype)
        # In the order of k mod 4, weights that a thread unpacks together lie apart as the product takes them.
        x = tl.reshape(tl.permute(tl.reshape(a, [BLOCK_M, BLOCK_K // 4, 4]), (0, 2, 1)), [BLOCK_M, BLOCK_K])
        both = tl.join(tl.join(zero, two), tl.join(one, three))
        w = tl.reshape(tl.permute(tl.reshape(both, [BLOCK_N, BLOCK_K // 4, 4]), (0, 2, 1)), [BLOCK_N, BLOCK_K])
        part = _product(x, w, part, SWAP)
    else:
        low, high = _from_bytes(packed, scale[:, None], SCALE_SUMS, a.dtype)
        part = _product(a, tl.reshape(tl.join(low, high), [BLOCK_N, BLOCK_K]), part, SWAP)
    return _scaled(sums, part, scale, SWAP, SCALE_SUMS)


@triton.jit
def _scaled(sums, part, scale, SWAP: tl.constexpr, SCALE_SUMS: tl.constexpr):
    if SCALE_SUMS:
        return sums + part * (scale[:, None] if SWAP else scale[None, :])
    else:
        return part


@triton.jit
def _tile(
    tile, blocks, a, w, scales, c, slots, experts, slot_count,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr, ACT: tl.constexpr,
    INT4: tl.constexpr, UNPACK: tl.constexpr, SCALE_SUMS: tl.constexpr, SWAP: tl.constexpr, COUNTED: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile: BLOCK_M rows of one expert, BLOCK_N rows of its w [N, K]."""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    PAIRED: tl.constexpr = ACT == "end"
    OUT: tl.constexpr = N // 2 if PAIRED else N
    WIDTH: tl.constexpr = BLOCK_N // 2 if PAIRED else BLOCK_N
    dtype: tl.constexpr = a.dtype.element_ty
    block, column = _place_of(tile, blocks, (N + BLOCK_N - 1) // BLOCK_N, GROUP_M)
    expert = tl.load(experts + block).to(tl.int64)
    expert = tl.where((expert >= 0) & (expert < E), expert, E - 1)  # a dead block has none; it does no harm
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(slots + m)
    valid = slot < slot_count
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    if PAIRED:
        n = n // 2 + n % 2 * OUT  # gate and up of an output side by side
    if N % BLOCK_N != 0:
        n = tl.minimum(n, N - 1)  # beyond the last row: it again, but it is not stored
    PER: tl.constexpr = (4 if UNPACK == "split" else 2) if INT4 else 1  # weights in a word of w
    w += expert * (N * K // PER)
    scales += expert * (N * (K // GROUP))
    ks = tl.arange(0, BLOCK_K)
    rows = a + (slot // TOP_K).to(tl.int64) * K if GATHER else a + m.to(tl.int64) * (2 * K if ACT == "loop" else K)

    sums = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = k + ks < K
        x_mask = (valid[:, None] & inside[None, :]) if GATHER else inside[None, :]
        x = _load(rows[:, None] + (k + ks)[None, :], x_mask, GATHER or not EVEN_K)
        if ACT == "loop":
            up = _load(rows[:, None] + (K + k + ks)[None, :], x_mask, not EVEN_K)
            x = _silu_up(x, up).to(dtype)
        if INT4:
            scale = tl.load(scales + k // GROUP + n * (K // GROUP)).to(tl.float32)
            packed = w + tl.multiple_of(k // PER, BLOCK_K // PER)
            sums = _add_int4(
                sums, x, packed, n * (K // PER), scale, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, UNPACK, SCALE_SUMS
            )
        else:
            b = _load(w + k + ((n * K)[:, None] + ks[None, :]), inside[None, :], not EVEN_K)
            sums = _product(x, b, sums, SWAP)

    if SWAP:
        sums = tl.trans(sums)
    if PAIRED:
        gate, up = tl.split(tl.reshape(sums, [BLOCK_M, WIDTH, 2]))
        sums = _silu_up(gate, up)
    out = column * WIDTH + tl.arange(0, WIDTH)
    to = (m if GATHER else slot).to(tl.int64)  # sorted, for the next GEMM; or back to the slot
    mask = (out < OUT)[None, :]
    if COUNTED or not GATHER:  # the source stores what it computes of padding
        mask = mask & valid[:, None]
    tl.store(c + to[:, None] * OUT + out[None, :], sums.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["slot_count", "blocks"])
def _gemm_kernel(
    a, w, scales, c, slots, experts, padded, slot_count, blocks,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr, ACT: tl.constexpr,
    INT4: tl.constexpr, UNPACK: tl.constexpr, SCALE_SUMS: tl.constexpr, SWAP: tl.constexpr, COUNTED: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: one tile, or every `num_programs`-th one if PERSISTENT.

    GATHER: a is x [T, K], and c is sorted; if not, a is sorted, and c is [T · TOP_K, N] in the order of the slots.
    ACT: "" for none; "end": gate and up of w's rows to one output; "loop": a is [rows, 2 K], gate and up of it.
    """
    wait_for_inputs(DEPENDENT)
    if COUNTED:
        blocks = tl.load(padded) // BLOCK_M
    tiles = blocks * ((N + BLOCK_N - 1) // BLOCK_N)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
            _tile(
                tile, blocks, a, w, scales, c, slots, experts, slot_count, N, K, E, TOP_K, GATHER, ACT, INT4, UNPACK,
                SCALE_SUMS, SWAP, COUNTED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, GROUP,
            )  # fmt: skip
    else:
        if tl.program_id(0) >= tiles:
            return
        _tile(
            tl.program_id(0), blocks, a, w, scales, c, slots, experts, slot_count, N, K, E, TOP_K, GATHER, ACT, INT4,
            UNPACK, SCALE_SUMS, SWAP, COUNTED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, GROUP,
        )  # fmt: skip


@triton.jit
def _sum_kernel(
    parts, ids, weights, out, H, TILES, E: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK values of one token: the weighted sum of its slots' rows, of those that have an expert."""
    wait_for_inputs(DEPENDENT)
    t = (tl.program_id(0) // TILES).to(tl.int64)
    h = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = t * TOP_K + j
        e = tl.load(ids + slot)
        part = tl.load(parts + slot * H + h, mask=(h < H) & (e >= 0) & (e < E), other=0.0)
        total += tl.load(weights + slot).to(tl.float32) * part.to(tl.float32)
    tl.store(out + t * H + h, total.to(out.dtype.element_ty), mask=h < H)


def options_of(args: Mapping[str, Any], num_warps: int) -> dict[str, Any]:
    """Options of a launch with these arguments."""
    return {"num_warps": num_warps} | ({"launch_pdl": True} if args["DEPENDENT"] else {})


def words(w: Tensor | Int4, tile: TileChoice) -> Tensor:
    """The weights in words as a tile loads them: [E, N, K], or packed: bytes, or two bytes each."""
    if not isinstance(w, Int4):
        return w
    return w.packed.view(torch.int16) if tile.unpack == "split" else w.packed


def constants(tile: TileChoice, int4: bool) -> dict[str, Any]:
    """What a GEMM's kernel is compiled for, beside the shapes."""
    return {
        "INT4": int4,
        "UNPACK": tile.unpack if int4 else "",
        "SCALE_SUMS": tile.scale_sums and int4,
        "SWAP": tile.swap,
        "COUNTED": tile.counted,
        "GROUP_M": tile.group_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": GROUP,
        "PERSISTENT": tile.programs > 0,
        "FLATTEN": tile.flatten,
    }
