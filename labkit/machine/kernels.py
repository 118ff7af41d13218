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

from labkit.launch import Launch

BLOCK = 8192  # values a program: 8 loads of 16 bytes in flight for each of 256 threads
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
