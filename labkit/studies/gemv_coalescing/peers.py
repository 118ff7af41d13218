"""Libraries' GEMVs, y = W x. W: [N, K], x: [K], y: [N]; those beside cuBLAS are imported only where they are timed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


def mv(W: Tensor, x: Tensor, y: Tensor) -> Callable[[], Any]:
    """cuBLAS as torch.mv calls it, as a call."""
    return lambda: torch.mv(W, x, out=y)


def linear(W: Tensor, x: Tensor, y: Tensor) -> Callable[[], Any]:
    """cuBLAS as F.linear calls it for one token, [1, K], as a call."""
    row, out = x[None], y[None]
    return lambda: torch.ops.aten.linear.out(row, W, None, out=out)


def compiled(W: Tensor, x: Tensor) -> Product:
    """torch.compile of torch.mv, coordinate-descent tuning; cuBLAS is no candidate for a vector. y is a new one."""
    from torch._inductor import config

    torch._dynamo.reset()  # a function is compiled anew for a few shapes only
    with config.patch(coordinate_descent_tuning=True):
        function = torch.compile(torch.mv, dynamic=False)
        function(W, x)
    return function


def flag_gems_mv() -> Product:
    """FlagGems' Triton GEMV with an autotuner of its own. y is a new one."""
    import flag_gems

    return flag_gems.mv
