"""PyTorch's ways to reach the ceilings: functions of one buffer set's tensors that give a call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]


def read(x: Tensor, out: Tensor) -> Call:
    """out = Σ x. x: [n]; out: [1]."""
    return partial(torch.sum, x, 0, keepdim=True, out=out)


def in_place(x: Tensor, factor: float) -> Call:
    """x *= factor. x: [n]."""
    return partial(x.mul_, factor)


def copy(x: Tensor, y: Tensor) -> Call:
    """y = x. [n] both."""
    return partial(y.copy_, x)


def mm(a: Tensor, b: Tensor, out: Tensor) -> Call:
    """out = a b. All [n, n], bf16 or fp16."""
    return partial(torch.mm, a, b, out=out)


def fp8_mm(a: Tensor, b: Tensor, one: Tensor, out: Tensor) -> Call:
    """out = a bᵀ. a, b: [n, n] fp8; one: the scale of both, a scalar; out: [n, n] bf16."""
    return partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=out.dtype, out=out)


def int8_mm(a: Tensor, b: Tensor, out: Tensor) -> Call:
    """out = a bᵀ. a, b: [n, n] int8; out: [n, n] int32."""
    return partial(torch._int_mm, a, b.t(), out=out)


def zero(x: Tensor) -> Call:
    """x = 0. x: one value: PyTorch's launch that does next to nothing."""
    return x.zero_


def copy_from_host(host: Tensor, out: Tensor, non_blocking: bool) -> Call:
    """out = host. out: on the GPU; non_blocking: without waiting for it, which only pinned memory allows."""
    return partial(out.copy_, host, non_blocking=non_blocking)
