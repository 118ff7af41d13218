"""Plain kernels whose time is the memory's: what reading, updating in place and copying can reach.

| launcher | moves                | hypothesis                                                                  |
|----------|----------------------|-----------------------------------------------------------------------------|
| read     | n values in          | the highest rate there is: no write turns the memory bus around              |
| in_place | n values in and out  | what a recurrent state can reach: each line is read and written once        |
| copy     | n values in, n out   | the usual "bandwidth test"; lower than in_place where two streams conflict  |
| empty    | nothing              | what a launch costs inside a graph and from Python                          |
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from labkit.kernels.checks import check_shape
from labkit.kernels.launch import Launch
from labkit.kernels.target import has_dependent_launch

BLOCK = 8192  # values or words a program: of fp32, 8 loads of 16 bytes in flight for each of 256 threads
NUM_WARPS = 8


@triton.jit
def _read_kernel(x, partial, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(partial + tl.program_id(0), tl.sum(tl.load(x + offsets, mask=offsets < n, other=0.0), 0))


@triton.jit
def _in_place_kernel(x, factor, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < n) * factor, mask=offsets < n)


@triton.jit
def _copy_kernel(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n), mask=offsets < n)


@triton.jit
def _empty_kernel(x):
    pass


def read(x: Tensor, partial: Tensor) -> Launch:
    """Sum each block of x. x: [n] fp32; partial: [ceil(n / 8192)] fp32, the block sums."""
    return _launch(_read_kernel, x.numel(), x=x, partial=partial)


def in_place(x: Tensor, factor: float) -> Launch:
    """x *= factor. x: [n] fp32."""
    return _launch(_in_place_kernel, x.numel(), x=x, factor=factor)


def copy(x: Tensor, y: Tensor) -> Launch:
    """y = x. x, y: [n] fp32."""
    return _launch(_copy_kernel, x.numel(), x=x, y=y)


def empty(x: Tensor) -> Launch:
    """A kernel of one program that does nothing. x: any tensor."""
    return Launch(_empty_kernel, (1,), {"x": x}, {"num_warps": 1})


def _launch(kernel: object, n: int, **args: object) -> Launch:
    if n < 1:
        raise ValueError(f"the tensor has {n} values; allowed: at least 1")
    return Launch(kernel, (triton.cdiv(n, BLOCK),), args | {"n": n, "BLOCK": BLOCK}, {"num_warps": NUM_WARPS})


@triton.jit
def _read_words_kernel(words, sums, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(words + at, mask=at < n, other=0), 0))


def read_words(words: Tensor, sums: Tensor) -> Launch:
    """Sums of blocks of words, as int32. words: [n] int32; sums: [ceil(n / 8192)] int32."""
    programs = triton.cdiv(words.numel(), BLOCK)
    check_shape("sums", sums, (programs,))
    args = {"words": words, "sums": sums, "n": words.numel(), "BLOCK": BLOCK}
    return Launch(_read_words_kernel, (programs,), args, {"num_warps": 8})


@triton.jit
def _sum_kernel(W, partial, n, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(W + offsets, mask=offsets < n, other=0.0, eviction_policy="evict_first").to(tl.float32), 0)
    if DEPENDENT:
        cuda.gdc_wait()
    tl.store(partial + tl.program_id(0), total)


@triton.jit
def _empty_dependent_kernel(y, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


def sum_values(W: Tensor, partial: Tensor) -> Launch:
    """The ceiling: the sums of blocks of W. W: [N, K], contiguous; partial: [ceil(N K / 8192)] fp32."""
    n = W.numel()
    dependent = has_dependent_launch(W.device)
    args = {"W": W, "partial": partial, "n": n, "BLOCK": BLOCK, "DEPENDENT": dependent}
    options = {"num_warps": NUM_WARPS} | ({"launch_pdl": True} if dependent else {})
    return Launch(_sum_kernel, (triton.cdiv(n, BLOCK),), args, options)


def empty_dependent(y: Tensor, dependent: bool = False) -> Launch:
    """A kernel of one program that does nothing: what being launched costs. y: any tensor."""
    options = {"num_warps": 1} | ({"launch_pdl": True} if dependent else {})
    return Launch(_empty_dependent_kernel, (1,), {"y": y, "DEPENDENT": dependent}, options)
