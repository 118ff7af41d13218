"""What is timed beside the products, in Triton.

| kernel       | hypothesis                                                                                     |
|--------------|------------------------------------------------------------------------------------------------|
| `read`       | the ceiling: a plain cold read of as many bytes as a case's weights have                       |
| `dequantise` | weights are written as bf16 for a library's product: their bytes move three times, four in all |
| `stored`     | Q8_0 as stored: blocks of 34 bytes allow loads of 2 bytes only, 16 for one of the packed kind  |
| `split_k`    | the control: sums by atomics, in whatever order programs end; bits must differ                 |
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_one_of, check_shape
from labkit.kernels.gguf.choose import rule
from labkit.kernels.gguf.formats import GROUP, ROWS, Packed
from labkit.kernels.gguf.products import _total, check_product
from labkit.kernels.gguf.unpack import MAGIC, _block, _read, _scales, _weights
from labkit.kernels.launch import Launch

DEQUANTISE_GROUPS = 16  # groups of 32 weights a program


@triton.jit
def _dequantise_kernel(
    y, words, high, scales, d, rows, y_stride, magic,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: 8 rows, TILE groups."""
    block = tl.program_id(0)
    units = tl.arange(0, TILE * 8)
    groups = tl.program_id(1) * TILE + units // 8
    inside = groups < GROUPS
    W = _block(words, high, scales, d, block, GROUPS, FORMAT, PLANES)
    tile = _read(W, groups, groups // 8, units % 8, inside, True, FORMAT, PLANES)
    steps = _scales(tile, FORMAT)
    row = block * 8 + units % 8
    at = y + row.to(tl.int64)[:, None] * y_stride + groups[:, None] * 32 + tl.arange(0, 4)[None, :]
    for i in tl.static_range(8):
        value = _weights(tile, steps, magic, i, FORMAT)
        tl.store(at + 4 * i, value.to(y.dtype.element_ty), mask=(inside & (row < rows))[:, None])


@triton.jit
def _stored_kernel(
    x, y, blocks, rows, GROUPS: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """One program: BLOCKS blocks of 8 rows, one token; the sums of `kernels._multiply_add_kernel`."""
    first_block = tl.program_id(0) * BLOCKS
    units = tl.arange(0, TILE * 8)
    quad = tl.arange(0, 4)
    starts, sums = (), ()
    for b in tl.static_range(BLOCKS):
        row = tl.minimum((first_block + b) * 8 + units % 8, rows - 1)
        starts = starts + (blocks + row.to(tl.int64) * (GROUPS * 17),)
        sums = sums + (tl.zeros((TILE * 8, 4), tl.float32),)
    for t in range(tl.cdiv(GROUPS, TILE)):
        groups = t * TILE + units // 8
        inside = groups < GROUPS
        steps = ()
        for b in tl.static_range(BLOCKS):
            d = tl.load(starts[b] + groups * 17, mask=inside, other=0, eviction_policy="evict_first")
            steps = steps + (d.to(tl.float16, bitcast=True).to(tl.float32)[:, None],)
        for i in tl.static_range(8):
            value = tl.load(x + (groups * 32 + 4 * i)[:, None] + quad[None, :], mask=inside[:, None], other=0.0)
            new = ()
            for b in tl.static_range(BLOCKS):
                # one value a load: of two, the compiler makes a layout of its own, in which sums have another order
                at = starts[b] + groups * 17 + 1 + 2 * i
                two = tl.join(
                    tl.load(at, mask=inside, other=0, eviction_policy="evict_first"),
                    tl.load(at + 1, mask=inside, other=0, eviction_policy="evict_first"),
                ).to(tl.int32)
                q = tl.reshape(tl.join((two << 24) >> 24, two >> 8), (TILE * 8, 4))
                new = new + (tl.fma(q.to(tl.float32) * steps[b], value.to(tl.float32), sums[b]),)
            sums = new
    for b in tl.static_range(BLOCKS):
        row = (first_block + b) * 8 + tl.arange(0, 8)
        tl.store(y + row, _total(sums[b], TILE).to(y.dtype.element_ty), mask=row < rows)


@triton.jit
def _split_k_kernel(
    x, y, words, high, scales, d, N, rows, x_stride, y_stride, magic,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: 8 rows, TILE groups, TOKENS tokens. Programs that share rows follow each other, and so race."""
    block = tl.program_id(1)
    first_token = tl.program_id(2) * TOKENS
    units = tl.arange(0, TILE * 8)
    groups = tl.program_id(0) * TILE + units // 8
    inside = groups < GROUPS
    W = _block(words, high, scales, d, block, GROUPS, FORMAT, PLANES)
    tile = _read(W, groups, groups // 8, units % 8, inside, True, FORMAT, PLANES)
    steps = _scales(tile, FORMAT)
    ks = groups[:, None] * 32 + tl.arange(0, 4)[None, :]
    row = block * 8 + tl.arange(0, 8)
    for n in tl.static_range(TOKENS):
        token = tl.minimum(first_token + n, N - 1).to(tl.int64)
        sums = tl.zeros((TILE * 8, 4), tl.float32)
        for i in tl.static_range(8):
            value = tl.load(x + token * x_stride + ks + 4 * i, mask=inside[:, None], other=0.0).to(tl.float32)
            sums = tl.fma(_weights(tile, steps, magic, i, FORMAT), value, sums)
        tl.atomic_add(y + token * y_stride + row, _total(sums, TILE), mask=(row < rows) & (first_token + n < N))


def stored(blocks: Tensor, x: Tensor, y: Tensor) -> Launch:
    """y = W x of one token, with the bits of `kernels.per_token`, by the rule that both have for Q8_0.

    blocks: uint8 [rows, K / 32 · 34], Q8_0 as stored; x: [1, K], y: [1, rows], contiguous. ValueError for other shapes.
    """
    groups, choice = x.shape[-1] // GROUP, rule(1, len(blocks), x.shape[-1], "Q8_0")
    check_shape("blocks", blocks, (len(blocks), groups * 34))
    check_shape("x", x, (1, groups * GROUP))
    check_shape("y", y, (1, len(blocks)))
    args = {"x": x, "y": y, "blocks": blocks.view(torch.int16), "rows": len(blocks), "GROUPS": groups}
    args |= {"TILE": choice.groups, "BLOCKS": choice.blocks}
    grid = (triton.cdiv(len(blocks), ROWS * choice.blocks),)
    return Launch(_stored_kernel, grid, args, {"num_warps": choice.num_warps})


def split_k(W: Packed, x: Tensor, y: Tensor) -> list[Callable[[], Any]]:
    """y[n] = W x[n] by programs that share a row and add to it by atomics. As `kernels.gemm_n`, but y: fp32."""
    check_product(W, x, y)
    check_one_of("y", y.dtype, (torch.float32,))
    groups, tokens = W.columns // GROUP, 4
    args = {"x": x, "y": y} | dict.fromkeys(("words", "high", "scales", "d"), W.words) | W.arrays
    args |= {"N": len(x), "rows": W.rows, "x_stride": x.stride(0), "y_stride": y.stride(0), "magic": MAGIC}
    args |= {"GROUPS": groups, "FORMAT": W.format.name, "PLANES": W.words.shape[2], "TILE": DEQUANTISE_GROUPS}
    grid = (triton.cdiv(groups, DEQUANTISE_GROUPS), triton.cdiv(W.rows, ROWS), triton.cdiv(len(x), tokens))
    return [y.zero_, Launch(_split_k_kernel, grid, args | {"TOKENS": tokens}, {"num_warps": 4})]


def dequantise(W: Packed, y: Tensor) -> Launch:
    """y = the weights, rounded to its dtype. W, y: [rows, columns]; ValueError for another shape."""
    check_shape("y", y, (W.rows, W.columns))
    arrays = dict.fromkeys(("words", "high", "scales", "d"), W.words) | W.arrays
    args = {"y": y} | arrays | {"rows": W.rows, "y_stride": y.stride(0), "magic": MAGIC}
    groups = W.columns // GROUP
    args |= {"GROUPS": groups, "FORMAT": W.format.name, "PLANES": W.words.shape[2], "TILE": DEQUANTISE_GROUPS}
    grid = (triton.cdiv(W.rows, ROWS), triton.cdiv(groups, DEQUANTISE_GROUPS))
    return Launch(_dequantise_kernel, grid, args, {"num_warps": 4})
