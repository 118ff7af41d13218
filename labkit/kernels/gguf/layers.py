"""A whole dense layer by one of the lab's products: what is launched, in order, with room for what is in between."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.kernels.gguf.formats import Packed

Product = Callable[..., Any]  # W, x [N, K], y [N, rows], perhaps up=... -> a launch or several


def layer(product: Product, weights: Sequence[Packed], x: Tensor, y: Tensor) -> list[Callable[[], Any]]:
    """Two launches, gate and up in one of them; per token, two a token. weights: gate, up and down."""
    gate, up, down = weights
    middle = x.new_empty((len(x), gate.rows))
    made = [product(gate, x, middle, up=up), product(down, middle, y)]
    return [one for some in made for one in (some if isinstance(some, list) else [some])]


def apart(product: Product, weights: Sequence[Packed | Tensor], x: Tensor, y: Tensor) -> list[Callable[[], Any]]:
    """The same with gate and up apart, for a product of wide tiles, where the sums of one take all registers."""
    gate, up, down = weights
    width = len(gate) if isinstance(gate, Tensor) else gate.rows
    first, other, middle = (x.new_empty((len(x), width)) for _ in range(3))
    made = product(gate, x, first), product(up, x, other), product(down, middle, y)
    return [made[0], made[1], lambda: silu_up(first, other, middle), made[2]]


def silu_up(gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
    """out = SiLU(gate) · up."""
    return torch.mul(torch.nn.functional.silu(gate), up, out=out)
