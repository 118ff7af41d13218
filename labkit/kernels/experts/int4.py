"""INT4 weights with a scale for each group: packed, quantised and dequantised by torch."""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 128  # values of a row, along K, that share one scale


class Int4(NamedTuple):
    """INT4 weights [.., N, K]: value = (u4 - 8) · scale, no zero point.

    packed: [.., N, K // 2], uint8, even k in the low nibble. scales: [.., N, K // 128], bf16.
    """

    packed: Tensor
    scales: Tensor


def pack(values: Tensor) -> Tensor:
    """Two values of 0 to 15 a byte, the even k in the low nibble: [.., K] -> [.., K // 2], uint8.

    ValueError for an odd K or a value out of range.
    """
    if values.ndim == 0 or values.shape[-1] % 2:
        raise ValueError(f"values is {tuple(values.shape)}; allowed: [.., K] with an even K")
    if values.numel() and not 0 <= int(values.min()) <= int(values.max()) <= 15:
        raise ValueError(f"values go from {int(values.min())} to {int(values.max())}; allowed: 0 to 15")
    values = values.to(torch.uint8)
    return values[..., 0::2] | values[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """The values of 0 to 15: [.., K // 2] -> [.., K], uint8."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def quantise(w: Tensor) -> Int4:
    """Weights [.., N, K] as INT4: the largest of a group of 128 becomes 7 (or -7) times its scale.

    Rounded with the scale as it is stored, in bf16. ValueError if K is not a multiple of 128.
    """
    if w.ndim == 0 or w.shape[-1] % GROUP:
        raise ValueError(f"w is {tuple(w.shape)}; allowed: [.., K] with K a multiple of {GROUP}")
    groups = w.float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    values = (groups / scales.float()[..., None]).round().clamp(-8, 7) + 8
    return Int4(pack(values.to(torch.uint8).flatten(-2)), scales)


def coarse(scales: Tensor) -> Tensor:
    """bf16 scales with five significant bits: (u4 - 8) · scale is then exact in bf16.

    So a kernel that rounds its weights to bf16 and one that multiplies the sums instead have the same weights. (In the
    tests of ExecuTorch and vLLM, INT4 weights stand for the rounded values; in `dequantise` they do not.)
    """
    return ((scales.view(torch.int16) + 4) & -8).view(torch.bfloat16)


def dequantise(w: Int4) -> Tensor:
    """The weights [.., N, K] that `w` stands for, exactly, in float64."""
    groups = (unpack(w.packed).double() - 8).unflatten(-1, (-1, GROUP))
    return (groups * w.scales.double()[..., None]).flatten(-2)


def quantise_rows(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """Activations [.., K] as 8-bit integers (in float64) and a scale for each `group` values: largest / 127.

    As ExecuTorch's W4A8 kernels have them; halves round up. ValueError if K is not a multiple of `group`.
    """
    if x.ndim == 0 or x.shape[-1] % group:
        raise ValueError(f"x is {tuple(x.shape)}; allowed: [.., K] with K a multiple of {group}")
    groups = x.double().unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1) / 127
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return (groups / scales[..., None] + 0.5).floor().flatten(-2), scales
