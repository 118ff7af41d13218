"""The ladder: from a thread a row to the production GEMV, one change a step. y = W x, W [N, K].

| step                 | launcher           | change                               | hypothesis                     |
|----------------------|--------------------|--------------------------------------|--------------------------------|
| 1 thread a row       | thread_a_row       | each lane walks along its own row    | 32 lines a request: the worst  |
| 2 W stored [K, N]    | thread_a_row, KN   | the same mapping, lanes adjacent     | the pattern alone costs        |
| 3 warp a row         | warp_a_row         | lanes side by side, one value each   | full sectors, narrow requests  |
| 4 16-byte loads      | warp_a_row, wide   | eight bf16 (four fp32) values a lane | an eighth of the requests      |
| 5 4 rows a program   | warp_a_row, rows   | x loaded once for four rows          | four times the loads in flight |
| 6 pipelined          | warp_a_row, stages | tiles of W copied ahead (cp.async)   | latency hidden by copies       |
| 7 tuned              | production kernel  | W evict-first; rows, warps and tile  | bytes in flight in registers   |
| 8 split K            | production kernel  | two programs share a row             | pays only where N is short     |
| 9 dependent launch   | production kernel  | W's first tiles before the wait      | hides launch and ramp          |

Steps 3 to 5 unroll their loop by one factor at least, so that not the compiler alone decides how many loads are in
flight. Step 7 runs with the choice that was tuned for step 9, so that one thing changes between them.

Beside them: `warp_a_row` of step 4 with the cache hint alone (W evict-first, so that it does not drive out x);
`two_d_tile`, the control of bit identity (a 2-D tile lets the compiler's layout, and so the order of the
sum, change with the rows); `read_only`, which reads W and does nothing else; `empty`; and `between`, which stands for
the small kernels between the GEMVs of a layer. The source's change from 1 to 4 at once: AutoMegaKernel, "GEMV
coalescing".
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from labkit.kernels.gemv.choose import Choice
from labkit.kernels.gemv.gemv import check_gemv
from labkit.kernels.launch import Launch
from labkit.studies.gemv_coalescing.variants import THREADS

UNROLL = 4  # of the loop along K, in steps 3 to 5
BETWEEN_BLOCK = 1024


@triton.jit
def _thread_a_row_kernel(W, x, y, N, K, n_stride, k_stride, THREADS: tl.constexpr):
    rows = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    inside = rows < N
    pointers = W + rows.to(tl.int64) * n_stride
    total = tl.zeros((THREADS,), tl.float32)
    for k in range(K):
        w = tl.load(pointers, mask=inside, other=0.0)
        total += w.to(tl.float32) * tl.load(x + k).to(tl.float32)
        pointers += k_stride  # not k * k_stride, which may not fit 32 bits
    tl.store(y + rows, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add_tile(sums, W, first, N, stride, x, ks, K, MASKED: tl.constexpr, POLICY: tl.constexpr):
    x_tile = tl.load(x + ks, mask=ks < K, other=0.0) if MASKED else tl.load(x + ks)
    new = ()
    for r in tl.static_range(len(sums)):
        pointers = W + tl.minimum(first + r, N - 1).to(tl.int64) * stride + ks
        if MASKED:
            w_tile = tl.load(pointers, mask=ks < K, other=0.0, eviction_policy=POLICY)
        else:
            w_tile = tl.load(pointers, eviction_policy=POLICY)
        new = new + (sums[r] + w_tile.to(tl.float32) * x_tile.to(tl.float32),)
    return new


@triton.jit
def _warp_a_row_kernel(
    W, x, y, N, K, stride,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    ks = tl.arange(0, BLOCK_K)
    sums = ()
    for _r in tl.static_range(ROWS):
        sums = sums + (tl.zeros((BLOCK_K,), tl.float32),)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES, loop_unroll_factor=UNROLL):
        sums = _add_tile(sums, W, first, N, stride, x, start + ks, K, not EVEN_K, POLICY)
    for r in tl.static_range(ROWS):
        tl.store(y + first + r, tl.sum(sums[r], 0).to(y.dtype.element_ty), mask=first + r < N)


@triton.jit
def _two_d_tile_kernel(W, x, y, N, K, stride, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        pointers = W + rows.to(tl.int64)[:, None] * stride + ks[None, :]
        w = tl.load(pointers, mask=(rows < N)[:, None] & (ks < K)[None, :], other=0.0)
        total += w.to(tl.float32) * tl.load(x + ks, mask=ks < K, other=0.0).to(tl.float32)[None, :]
    tl.store(y + rows, tl.sum(total, 1).to(y.dtype.element_ty), mask=rows < N)


@triton.jit
def _between_kernel(y, x, K, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    ks = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if DEPENDENT:
        cuda.gdc_wait()
    value = tl.load(y + ks, mask=ks < K, other=0.0).to(tl.float32)
    tl.store(x + ks, (value / (1 + tl.abs(value))).to(x.dtype.element_ty), mask=ks < K)


def thread_a_row(W: Tensor, x: Tensor, y: Tensor) -> Launch:
    """Steps 1 and 2. W: [N, K]; its strides say how it is stored. x: [K]; y: [N]. One value of W a load."""
    N, K = W.shape
    strides = {"n_stride": W.stride(0), "k_stride": W.stride(1)}
    args = {"W": W, "x": x, "y": y, "N": N, "K": K, "THREADS": THREADS}
    return Launch(_thread_a_row_kernel, (triton.cdiv(N, THREADS),), args | strides, {"num_warps": THREADS // 32})


def warp_a_row(
    W: Tensor, x: Tensor, y: Tensor, vector: int = 1, rows: int = 1, stages: int = 1, hint: str = ""
) -> Launch:
    """Steps 3 to 6. W: [N, K], contiguous along K; vector: values a lane loads at once; stages: tiles in flight.

    hint: eviction policy of W's loads, "" or "evict_first".
    """
    block_k = 32 * vector
    check_gemv(W, x, y, Choice(rows, 1, block_k), None)
    N, K = W.shape
    args = {"W": W, "x": x, "y": y, "N": N, "K": K, "stride": W.stride(0)}
    constants = {"ROWS": rows, "BLOCK_K": block_k, "EVEN_K": K % block_k == 0, "STAGES": stages}
    constants |= {"UNROLL": UNROLL if stages == 1 else 1, "POLICY": hint}
    options = {"num_warps": 1, "num_stages": stages}
    return Launch(_warp_a_row_kernel, (triton.cdiv(N, rows),), args | constants, options)


def two_d_tile(W: Tensor, x: Tensor, y: Tensor, choice: Choice) -> Launch:
    """The control of bit identity: rows, warps and tile of a choice, but one 2-D tile [rows, block_k]."""
    check_gemv(W, x, y, choice, None)
    N, K = W.shape
    args = {"W": W, "x": x, "y": y, "N": N, "K": K, "stride": W.stride(0)}
    constants = {"ROWS": choice.rows, "BLOCK_K": choice.block_k}
    grid = (triton.cdiv(N, choice.rows),)
    return Launch(_two_d_tile_kernel, grid, args | constants, {"num_warps": choice.num_warps})


def between(y: Tensor, x: Tensor, dependent: bool) -> Launch:
    """x = y / (1 + |y|): as much as a norm or an activation between two GEMVs moves. y: [K]; x: [K], y's dtype.

    dependent: the GEMV after it may start while it runs, as a norm that carries the trigger lets it.
    """
    K = x.numel()
    args = {"y": y, "x": x, "K": K, "BLOCK": BETWEEN_BLOCK, "DEPENDENT": dependent}
    options = {"num_warps": 4} | ({"launch_pdl": True} if dependent else {})
    return Launch(_between_kernel, (triton.cdiv(K, BETWEEN_BLOCK),), args, options)


def vector_of(dtype: torch.dtype) -> int:
    """Values in 16 bytes."""
    return 16 // dtype.itemsize


def stored_k_n(W: Tensor) -> Tensor:
    """W [..., N, K] as a view of a copy that is stored [..., K, N]: what step 2 reads."""
    return W.mT.contiguous().mT
