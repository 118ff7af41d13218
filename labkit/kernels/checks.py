"""Checks of arguments: ValueError naming the argument, its value and what is allowed.

Their names begin with `check_`: `labkit.bench.sha` leaves them out of the hash of what runs. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def check_one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """The value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """The tensor has just this shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}; allowed: {shape}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Its values lie one after the other."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; allowed: contiguous")


def check_device(name: str, tensor: Tensor, device: torch.device, owner: str) -> None:
    """It is on this device; owner: whose it is, in the genitive ("x's")."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; allowed: {owner} device, {device}")


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: Collection[torch.dtype], device: torch.device, owner: str
) -> None:
    """Shape, dtype, contiguous, device, in this order; owner: as in `check_device`."""
    check_shape(name, tensor, shape)
    check_one_of(name, tensor.dtype, dtypes)
    check_contiguous(name, tensor)
    check_device(name, tensor, device, owner)
