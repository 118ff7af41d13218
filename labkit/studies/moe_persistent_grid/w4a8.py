"""INT4 weights with activations of 8 bits, as ExecuTorch's W4A8 kernels have them: quantised once, before each GEMM.

| launch       | programs          | what it does                                                                   |
|--------------|-------------------|--------------------------------------------------------------------------------|
| count, place | chunk             | as in routing.py                                                               |
| quantise     | rows × values     | x of every sorted slot as int8, one fp32 scale for each 32 values of a row     |
| gemm1        | tile, or fewer    | w1[e] of that, summed in int32 over each group of 32                           |
| activate     | rows × values     | SiLU(gate) · up of its result, quantised in the same way                       |
| gemm2        | tile, or fewer    | w2[e] of that; each row goes back to its slot                                  |
| sum          | token, tile       | as in kernels.py                                                               |

| choice                     | hypothesis                                                                          |
|----------------------------|-------------------------------------------------------------------------------------|
| 8-bit activations          | half the bytes of x, and integer products at twice the rate; but a scale for each   |
|                            | 32 values makes K tiles of 32, each with a conversion and a multiply-add of its own |
| quantised once, before     | else every column tile would find the largest value of each group again             |
| programs, group_m, counted | as in kernels.py                                                                    |

Source: ExecuTorch pull request 19219 (`_quantize_activations_int8_kernel` and what it is for).
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.experts import blocks as experts_blocks
from labkit.kernels.experts import expert_layer
from labkit.kernels.experts.choose import INT8_GROUP, Choice, TileChoice
from labkit.kernels.experts.inputs import Layer, LayerInputs, Workspace
from labkit.kernels.experts.int4 import GROUP, Int4
from labkit.kernels.experts.tiles import _place_of, _silu_up
from labkit.kernels.launch import Launch

ROWS, CHUNK = 8, 512  # of a program that quantises


@triton.jit(do_not_specialize=["slot_count", "rows"])
def _quantise_kernel(
    a, q, q_scales, slots, padded, slot_count, rows, K,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, COUNTED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    A_GROUP: tl.constexpr,
):  # fmt: skip
    """One program: ROWS sorted rows, CHUNK values of each. a: x [T, K] if GATHER, else gate and up [rows, 2 K]."""
    if COUNTED:
        rows = tl.load(padded)
    first = tl.program_id(0) * ROWS
    if first >= rows:
        return
    m = first + tl.arange(0, ROWS)
    k = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = (k < K)[None, :]
    if GATHER:
        slot = tl.load(slots + m)
        at = a + (slot // TOP_K).to(tl.int64)[:, None] * K + k[None, :]
        x = tl.load(at, mask=inside & (slot < slot_count)[:, None], other=0.0).to(tl.float32)
    else:
        at = a + m.to(tl.int64)[:, None] * (2 * K) + k[None, :]
        x = _silu_up(tl.load(at, mask=inside, other=0.0), tl.load(at + K, mask=inside, other=0.0))
    groups = tl.reshape(x, [ROWS, CHUNK // A_GROUP, A_GROUP])
    scale = tl.max(tl.abs(groups), 2) / 127.0
    scale = tl.where(scale == 0.0, 1.0, scale)
    values = tl.floor(groups / scale[:, :, None] + 0.5).to(tl.int8)
    to = m.to(tl.int64)[:, None]
    tl.store(q + to * K + k[None, :], tl.reshape(values, [ROWS, CHUNK]), mask=inside)
    g = tl.program_id(1) * (CHUNK // A_GROUP) + tl.arange(0, CHUNK // A_GROUP)
    tl.store(q_scales + to * (K // A_GROUP) + g[None, :], scale, mask=(g < K // A_GROUP)[None, :])


@triton.jit
def _tile(
    tile, blocks, q, q_scales, w, scales, c, slots, experts, slot_count,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BACK: tl.constexpr, COUNTED: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, A_GROUP: tl.constexpr,
):  # fmt: skip
    """One tile: BLOCK_M sorted rows of one expert, BLOCK_N rows of its w [N, K // 2]. BACK: rows go to their slots."""
    block, column = _place_of(tile, blocks, (N + BLOCK_N - 1) // BLOCK_N, GROUP_M)
    expert = tl.load(experts + block).to(tl.int64)
    expert = tl.where((expert >= 0) & (expert < E), expert, E - 1)  # a dead block has none; it does no harm
    m = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(n, N - 1)  # beyond the last row: it again, but it is not stored
    w += expert * (N * K // 2)
    scales += expert * (N * (K // GROUP))
    ks = tl.arange(0, A_GROUP)

    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, A_GROUP):
        x = tl.load(q + m[:, None] * K + (k + ks)[None, :])
        x_scale = tl.load(q_scales + m * (K // A_GROUP) + k // A_GROUP)
        packed = tl.load(w + k // 2 + ((own * (K // 2))[None, :] + (ks // 2)[:, None]))  # each byte twice, as there
        b = ((packed >> (ks % 2 * 4)[:, None]) & 15).to(tl.int8) - tl.full([], 8, tl.int8)
        scale = tl.load(scales + own * (K // GROUP) + k // GROUP).to(tl.float32)
        part = tl.dot(x, b, out_dtype=tl.int32)
        sums += part.to(tl.float32) * x_scale[:, None] * scale[None, :]

    slot = tl.load(slots + m)
    to = slot.to(tl.int64) if BACK else m
    mask = (n < N)[None, :]
    if COUNTED or BACK:  # the source stores what it computes of padding
        mask = mask & (slot < slot_count)[:, None]
    tl.store(c + to[:, None] * N + n[None, :], sums.to(c.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slot_count", "blocks"])
def _gemm_int8_kernel(
    q, q_scales, w, scales, c, slots, experts, padded, slot_count, blocks,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BACK: tl.constexpr, COUNTED: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, A_GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    """One program: one tile, or every `num_programs`-th one if PERSISTENT."""
    if COUNTED:
        blocks = tl.load(padded) // BLOCK_M
    tiles = blocks * ((N + BLOCK_N - 1) // BLOCK_N)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
            _tile(
                tile, blocks, q, q_scales, w, scales, c, slots, experts, slot_count, N, K, E, BACK, COUNTED, GROUP_M,
                BLOCK_M, BLOCK_N, GROUP, A_GROUP,
            )  # fmt: skip
    else:
        if tl.program_id(0) >= tiles:
            return
        _tile(
            tl.program_id(0), blocks, q, q_scales, w, scales, c, slots, experts, slot_count, N, K, E, BACK, COUNTED,
            GROUP_M, BLOCK_M, BLOCK_N, GROUP, A_GROUP,
        )  # fmt: skip


def layer(x: LayerInputs, config: Choice, scratch: Workspace | None = None) -> Layer:
    """The layer of `expert_layer.layer` with 8-bit activations, as launches. x: with INT4 weights.

    config: `choose.source(..., int8=True)`, or one like it: not fused, both K tiles 32. Raises ValueError naming the
    argument, its value and what is allowed.
    """
    check_w4a8(x, config)
    made = expert_layer.layer(x, config, scratch)
    _, _, _, hidden, width = x.shape
    rows = made.sorted.blocks * config.block_m
    memory = torch.empty(rows * max(hidden, width), dtype=torch.int8, device=x.x.device)
    values = memory.new_empty(rows * max(hidden, width) // INT8_GROUP, dtype=torch.float32)
    launches = dict(made.sorted.launches)
    for name, before, w, tile in (("gemm1", "quantise", x.w1, config.gemm1), ("gemm2", "activate", x.w2, config.gemm2)):
        args = made.launches[name].args
        launches[before] = _quantise(args, memory, values, tile.counted, rows)
        launches[name] = _gemm(args, memory, values, w, tile)
    launches["sum"] = made.launches["sum"]
    return Layer(config, made.sorted, launches)


def _quantise(args: Mapping[str, Any], q: Tensor, scales: Tensor, counted: bool, rows: int) -> Launch:
    shared = {name: args[name] for name in ("a", "slots", "padded", "slot_count", "K", "TOP_K", "GATHER")}
    shared |= {"q": q, "q_scales": scales, "rows": rows, "COUNTED": counted}
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(args["K"], CHUNK))
    return Launch(
        _quantise_kernel, grid, {**shared, "ROWS": ROWS, "CHUNK": CHUNK, "A_GROUP": INT8_GROUP}, {"num_warps": 4}
    )


def _gemm(args: Mapping[str, Any], q: Tensor, scales: Tensor, w: Int4, tile: TileChoice) -> Launch:
    same = ("c", "slots", "experts", "padded", "slot_count", "blocks", "N", "K", "E", "BLOCK_M")
    shared = {name: args[name] for name in same} | {"q": q, "q_scales": scales, "w": w.packed, "scales": w.scales}
    constants = {
        "BACK": not args["GATHER"],
        "COUNTED": tile.counted,
        "GROUP_M": tile.group_m,
        "BLOCK_N": tile.block_n,
        "GROUP": GROUP,
        "A_GROUP": INT8_GROUP,
        "PERSISTENT": tile.programs > 0,
    }
    tiles = experts_blocks.tiles(args["blocks"], args["N"], tile.block_n)
    programs = min(tile.programs, tiles) if tile.programs else tiles
    return Launch(
        _gemm_int8_kernel, (programs,), shared | constants, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    )


def check_w4a8(x: LayerInputs, config: Choice) -> None:
    """Raise ValueError for weights or a configuration that these kernels do not have."""
    if not x.int4:
        raise ValueError("w1 and w2 are not INT4; allowed with 8-bit activations: INT4")
    for name in ("dependent", "fused"):
        if getattr(config, name):
            raise ValueError(f"{name} is True; allowed with 8-bit activations: False")
    for name in ("gemm1", "gemm2"):
        tile: TileChoice = getattr(config, name)
        if tile.block_k != INT8_GROUP:
            raise ValueError(f"{name}.block_k is {tile.block_k}; allowed with 8-bit activations: {INT8_GROUP}")
        if tile.swap or tile.flatten or tile.descriptor:
            raise ValueError(f"{name} is {tile}; allowed with 8-bit activations: not swapped, flattened or descriptor")
