"""The GEMM of tiles.py with w through descriptors: the copy engine (TMA) brings boxes of [rows, BLOCK_K].

| variant         | hypothesis                                                                                         |
|-----------------|----------------------------------------------------------------------------------------------------|
| descriptor      | a box needs one instruction of one thread: no registers for addresses, fewer instructions; x is    |
|                 | gathered as before, since only Blackwell's copy engine gathers rows                                |

Rows of gate and up lie I rows apart, so that a fused GEMM1 loads a box of each and keeps two sums; in tiles.py they
alternate in one tile. For one tile the sums have the same order, and so the same bits, on the same matrix instruction.

The descriptors are made on the host: those that a kernel makes need memory of its launcher, for every program.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.experts import blocks as experts_blocks
from labkit.kernels.experts.choose import TileChoice
from labkit.kernels.experts.int4 import Int4
from labkit.kernels.experts.tiles import _add_packed, _load, _place_of, _product, _silu_up, constants, options_of, words
from labkit.kernels.launch import Launch
from labkit.kernels.target import COPY_ENGINE, capability_of


@triton.jit
def _add_box(
    sums, x, w, scales, row, last, k, K: tl.constexpr, INT4: tl.constexpr, UNPACK: tl.constexpr,
    SCALE_SUMS: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """sums + the product of x [BM, BK] with ROWS rows of w from `row` on; last: of the expert's rows."""
    if INT4:
        n = tl.minimum(row + tl.arange(0, ROWS), last).to(tl.int64)
        scale = tl.load(scales + n * (K // GROUP) + k // GROUP).to(tl.float32)
        packed = w.load([row, k // (4 if UNPACK == "split" else 2)])
        return _add_packed(sums, x, packed, scale, BLOCK_M, ROWS, BLOCK_K, SWAP, UNPACK, SCALE_SUMS)
    else:
        return _product(x, w.load([row, k]), sums, SWAP)


@triton.jit
def _tile(
    tile, blocks, a, w, scales, c, slots, experts, slot_count,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr, ACT: tl.constexpr,
    INT4: tl.constexpr, UNPACK: tl.constexpr, SCALE_SUMS: tl.constexpr, SWAP: tl.constexpr, COUNTED: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile, as `tiles._tile`; w: a descriptor of [E · N, K], or of rows of packed words."""
    PAIRED: tl.constexpr = ACT == "end"
    OUT: tl.constexpr = N // 2 if PAIRED else N
    WIDTH: tl.constexpr = BLOCK_N // 2 if PAIRED else BLOCK_N
    dtype: tl.constexpr = a.dtype.element_ty
    block, column = _place_of(tile, blocks, (N + BLOCK_N - 1) // BLOCK_N, GROUP_M)
    expert = tl.load(experts + block).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < E), expert, E - 1)  # a dead block has none; it does no harm
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(slots + m)
    valid = slot < slot_count
    ks = tl.arange(0, BLOCK_K)
    rows = a + (slot // TOP_K).to(tl.int64) * K if GATHER else a + m.to(tl.int64) * (2 * K if ACT == "loop" else K)
    row = expert * N + column * WIDTH
    last = expert * N + N - 1

    sums = tl.zeros([WIDTH, BLOCK_M] if SWAP else [BLOCK_M, WIDTH], tl.float32)
    ups = sums
    for k in range(0, K, BLOCK_K):
        inside = k + ks < K
        x_mask = (valid[:, None] & inside[None, :]) if GATHER else inside[None, :]
        x = _load(rows[:, None] + (k + ks)[None, :], x_mask, GATHER or K % BLOCK_K != 0)
        if ACT == "loop":
            up = _load(rows[:, None] + (K + k + ks)[None, :], x_mask, K % BLOCK_K != 0)
            x = _silu_up(x, up).to(dtype)
        sums = _add_box(
            sums, x, w, scales, row, last, k, K, INT4, UNPACK, SCALE_SUMS, SWAP, BLOCK_M, WIDTH, BLOCK_K, GROUP
        )
        if PAIRED:
            ups = _add_box(
                ups, x, w, scales, row + OUT, last, k, K, INT4, UNPACK, SCALE_SUMS, SWAP, BLOCK_M, WIDTH, BLOCK_K,
                GROUP,
            )  # fmt: skip

    if PAIRED:
        sums = _silu_up(sums, ups)
    if SWAP:
        sums = tl.trans(sums)
    out = column * WIDTH + tl.arange(0, WIDTH)
    to = (m if GATHER else slot).to(tl.int64)
    mask = (out < OUT)[None, :]
    if COUNTED or not GATHER:
        mask = mask & valid[:, None]
    tl.store(c + to[:, None] * OUT + out[None, :], sums.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["slot_count", "blocks"])
def _gemm_descriptor_kernel(
    a, w, scales, c, slots, experts, padded, slot_count, blocks,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr, ACT: tl.constexpr,
    INT4: tl.constexpr, UNPACK: tl.constexpr, SCALE_SUMS: tl.constexpr, SWAP: tl.constexpr, COUNTED: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: one tile, or every `num_programs`-th one if PERSISTENT; as `tiles._gemm_kernel`."""
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


def gemm(args: Mapping[str, Any], w: Tensor | Int4, tile: TileChoice) -> Launch:
    """The Launch of one GEMM, w through a descriptor. args: those of `tiles._gemm_kernel` that every tile has.

    ValueError for a GPU without the copy engine, rows of w that are no multiple of 16 bytes, or 2^31 rows and more.
    """
    int4 = isinstance(w, Int4)
    values = words(w, tile)
    check_descriptor(values, tile)
    rows = tile.block_n // 2 if args["ACT"] == "end" else tile.block_n
    box = [rows, tile.block_k * values.shape[2] // args["K"]]
    flat = values.view(-1, values.shape[2])
    weights = {"w": TensorDescriptor.from_tensor(flat, box), "scales": w.scales if int4 else w}
    tiles = experts_blocks.tiles(args["blocks"], args["N"], tile.block_n)
    programs = min(tile.programs, tiles) if tile.programs else tiles
    options = options_of(args, tile.num_warps) | {"num_stages": tile.num_stages}
    return Launch(_gemm_descriptor_kernel, (programs,), {**args, **weights, **constants(tile, int4)}, options)


def check_descriptor(w: Tensor, tile: TileChoice) -> None:
    """Raise ValueError for a GPU, rows or a tile that descriptors cannot take. w: [E, N, K] or packed."""
    found = capability_of(w.device)
    if found is not None and found < COPY_ENGINE:
        raise ValueError(f"descriptor is True on compute capability {found[0]}.{found[1]}; allowed: from 9.0 (Hopper)")
    size = w.shape[2] * w.element_size()
    if size % 16:
        raise ValueError(f"w has rows of {size} bytes; allowed with descriptor: a multiple of 16")
    if w.shape[0] * w.shape[1] >= 2**31:
        raise ValueError(f"w has {w.shape[0] * w.shape[1]} rows in all; allowed with descriptor: below 2^31")
