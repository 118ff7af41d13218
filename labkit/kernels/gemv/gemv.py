"""A GEMV for decode in Triton, y = W x + bias, W [N, K] read once and never again.

One kernel; its choices are launch arguments, so that a hypothesis can be tested by one of them alone:

| choice      | hypothesis                                                                                          |
|-------------|-----------------------------------------------------------------------------------------------------|
| rows        | rows a program: x is loaded once for all of them, and each row adds independent loads in flight     |
| block_k     | a tile of one row: 16 bytes a thread and more, since requests of full lines cost the least          |
| num_warps   | threads that share a row: more of them shorten a long row, and lengthen the sum across warps        |
| split       | programs that share a row: fills the GPU where N is short, at the price of a second, ordered, sum   |
| interleaved | rows of a program far apart instead of adjacent: no other bytes, another order in memory            |
| dependent   | programmatic dependent launch: the first tiles of W are loaded while the kernel before still runs;  |
|             | x, which that kernel may have written, only after it has ended                                      |

W is marked `evict_first`, so that it does not drive x out of the L2. Every row has one fp32 accumulator, and rows are
unrolled over 1-D tiles: the order of a row's sum depends on block_k, num_warps and split, never on rows or interleaved,
so that results are bit-identical across these. Source: CUDA programming guide, "Programmatic Dependent Launch".
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from labkit.kernels.checks import check_contiguous, check_device, check_one_of, check_shape
from labkit.kernels.gemv.choose import MOST_LOADS, Choice, check_choice, choose
from labkit.kernels.launch import Launch
from labkit.kernels.target import has_dependent_launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
AHEAD_BYTES = 128  # a thread's loads before the wait: more would take registers from programs that are resident


@triton.jit
def _load(pointers, ks, K, MASKED: tl.constexpr, POLICY: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=ks < K, other=0.0, eviction_policy=POLICY)
    return tl.load(pointers, eviction_policy=POLICY)


@triton.jit
def _tiles(W, rows, ks, K, stride, MASKED: tl.constexpr):
    """One tile of every row."""
    tiles = ()
    for r in tl.static_range(len(rows)):
        tiles = tiles + (_load(W + rows[r] * stride + ks, ks, K, MASKED, "evict_first"),)
    return tiles


@triton.jit
def _add_products(sums, tiles, x, ks, K, MASKED: tl.constexpr):
    """The sums of every row, each with its tile's products added."""
    x_tile = _load(x + ks, ks, K, MASKED, "").to(tl.float32)
    new = ()
    for r in tl.static_range(len(sums)):
        new = new + (sums[r] + tiles[r].to(tl.float32) * x_tile,)
    return new


@triton.jit
def _gemv_kernel(
    W, x, y, bias, partial, arrived, N, K, stride,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, DIVISOR: tl.constexpr, INTERLEAVED: tl.constexpr, UNROLLED: tl.constexpr,
    HAS_BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows, TILES tiles of BLOCK_K values of each; of K, SPLIT programs take a part each."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()  # the next kernel may start as soon as its programs find room
    K = K // DIVISOR * DIVISOR  # changes nothing, but tells the compiler how addresses are aligned
    stride = stride // DIVISOR * DIVISOR
    program, part = tl.program_id(0), tl.program_id(1)
    start = part * (TILES * BLOCK_K) + tl.arange(0, BLOCK_K)
    LAST: tl.constexpr = 0 if SPLIT > 1 else TILES - 1  # the first tile that may reach beyond K
    rows = ()
    for r in tl.static_range(ROWS):
        row = program + r * tl.num_programs(0) if INTERLEAVED else program * ROWS + r
        rows = rows + (row.to(tl.int64),)
    read = ()
    for r in tl.static_range(ROWS):
        read = read + (tl.minimum(rows[r], N - 1),)  # beyond the last row: it again, but it is not stored

    ahead = ()
    for t in tl.static_range(AHEAD):
        ahead = ahead + (_tiles(W, read, start + t * BLOCK_K, K, stride, not EVEN_K and t >= LAST),)
    if DEPENDENT:
        cuda.gdc_wait()  # the kernels before have ended, and what they wrote is visible

    sums = ()
    for r in tl.static_range(ROWS):  # noqa: B007
        sums = sums + (tl.zeros((BLOCK_K,), tl.float32),)
    for t in tl.static_range(AHEAD):
        sums = _add_products(sums, ahead[t], x, start + t * BLOCK_K, K, not EVEN_K and t >= LAST)
    if UNROLLED:
        for t in tl.static_range(AHEAD, TILES):
            tiles = _tiles(W, read, start + t * BLOCK_K, K, stride, not EVEN_K and t >= LAST)
            sums = _add_products(sums, tiles, x, start + t * BLOCK_K, K, not EVEN_K and t >= LAST)
    else:
        for t in range(AHEAD, TILES):
            tiles = _tiles(W, read, start + t * BLOCK_K, K, stride, not EVEN_K)
            sums = _add_products(sums, tiles, x, start + t * BLOCK_K, K, not EVEN_K)

    for r in tl.static_range(ROWS):
        total = tl.sum(sums[r], 0)
        if SPLIT > 1:
            tl.store(partial + rows[r] * SPLIT + part, total, mask=rows[r] < N)
        else:
            _store(y, bias, rows[r], N, total, HAS_BIAS)
    if SPLIT > 1:
        tl.debug_barrier()  # all warps have stored their part before one thread says so
        if tl.atomic_add(arrived + program, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(arrived + program, 0)  # ready for the next call
            for r in tl.static_range(ROWS):
                total = 0.0
                for s in tl.static_range(SPLIT):  # always in this order, whichever program came last
                    total += tl.load(partial + read[r] * SPLIT + s, volatile=True)
                _store(y, bias, rows[r], N, total, HAS_BIAS)


@triton.jit
def _store(y, bias, row, N, total, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(y + row, total.to(y.dtype.element_ty), mask=row < N)


def linear(W: Tensor, x: Tensor, y: Tensor, bias: Tensor | None = None, dependent: bool | None = None) -> Launch:
    """y = W x + bias with the choice of this GPU's table, or else of the rule; otherwise as `gemv`."""
    return gemv(W, x, y, choose(*W.shape, W.element_size(), W.device), bias, dependent)


def gemv(
    W: Tensor, x: Tensor, y: Tensor, choice: Choice, bias: Tensor | None = None, dependent: bool | None = None
) -> Launch:
    """y = W x + bias, as a launch that the caller makes by calling it, as often as it likes.

    W: [N, K], bf16, fp16 or fp32; values of a row adjacent, rows at any distance and alignment. x: [K], y: [N], bias:
    [N] or None; contiguous, W's dtype and device. Sums are kept in fp32. dependent: programmatic dependent launch;
    None: where the GPU has it (compute capability 9.0 and later). Kernels launched after it may then begin before it
    has ended: they must be of this kind, or ordinary ones, which wait by themselves. W is read before the wait, so no
    kernel that may still run must write it. A launch with a split owns its buffers: not on two streams at once.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    check_gemv(W, x, y, choice, bias)
    N, K = W.shape
    tiles = triton.cdiv(K, choice.block_k * choice.split)
    programs = triton.cdiv(N, choice.rows)
    if dependent is None:
        dependent = has_dependent_launch(W.device)
    split = choice.split > 1
    sizes = {"N": N, "K": K, "stride": W.stride(0) if N > 1 else K}
    tensors = {"W": W, "x": x, "y": y, "bias": bias if bias is not None else y}
    tensors["partial"] = torch.empty((N, choice.split), dtype=torch.float32, device=W.device) if split else y
    tensors["arrived"] = torch.zeros(programs, dtype=torch.int32, device=W.device) if split else y
    constants = {
        "ROWS": choice.rows,
        "BLOCK_K": choice.block_k,
        "TILES": tiles,
        "AHEAD": tiles_ahead(choice, tiles, W.element_size()) if dependent else 0,
        "SPLIT": choice.split,
        "EVEN_K": K % (choice.block_k * choice.split) == 0,
        "DIVISOR": _divisor(K, sizes["stride"], W.element_size()),
        "INTERLEAVED": choice.interleaved,
        "UNROLLED": tiles * choice.rows <= MOST_LOADS,
        "HAS_BIAS": bias is not None,
        "DEPENDENT": dependent,
    }
    options = {"num_warps": choice.num_warps} | ({"launch_pdl": True} if dependent else {})
    return Launch(_gemv_kernel, (programs, choice.split), tensors | sizes | constants, options)


def tiles_ahead(choice: Choice, tiles: int, itemsize: int) -> int:
    """Tiles of each row that are loaded before the wait: half of them, as far as `AHEAD_BYTES` a thread go."""
    tile_bytes = max(1, choice.block_k * itemsize // (32 * choice.num_warps)) * choice.rows
    return min((tiles + 1) // 2, max(1, AHEAD_BYTES // tile_bytes))


def _divisor(K: int, stride: int, itemsize: int) -> int:
    """The largest power of two, up to 16 bytes, that divides K and the distance of rows (in values)."""
    most = 16 // itemsize
    return next(d for d in (most, most // 2, 2, 1) if d and K % d == 0 and stride % d == 0)


def check_gemv(W: Tensor, x: Tensor, y: Tensor, choice: Choice, bias: Tensor | None) -> None:
    """Raise ValueError for shapes, dtypes, strides, devices or choices that the kernel cannot take."""
    if W.ndim != 2 or 0 in W.shape:
        raise ValueError(f"W is {tuple(W.shape)}; allowed: [N, K], both at least 1")
    N, K = W.shape
    check_one_of("W", W.dtype, DTYPES)
    if W.stride(1) != 1 and K > 1:
        raise ValueError(f"W has strides {W.stride()}; allowed: values of a row adjacent (stride 1 along K)")
    for name, tensor, size in (("x", x, K), ("y", y, N), ("bias", bias, N)):
        if tensor is None:
            continue
        check_shape(name, tensor, (size,))
        if tensor.dtype != W.dtype:
            raise ValueError(f"{name} is {tensor.dtype}; allowed: W's dtype, {W.dtype}")
        check_device(name, tensor, W.device, "W's")
        check_contiguous(name, tensor)
    check_choice(choice)
