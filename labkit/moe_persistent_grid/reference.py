"""The expert layer in float64, INT4 weights as they are stored, and the error metric; the kernels are judged by it.

Sources: the INT4 format is that of ExecuTorch's batched MoE kernels (pull request 19219); the metric is `assert_close`
of triton_kernels (in Triton's repository, python/triton_kernels/triton_kernels/testing.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 128  # values of a row, along K, that share one scale
MAX_TOLERANCE = 2e-2
RMS_TOLERANCE = 4e-3


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


def layer(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor | Int4,
    w2: Tensor | Int4,
    stored: torch.dtype | None = None,
) -> Tensor:
    """Σ_j weights[:, j] · w2[e] (SiLU(gate) · up), where [gate, up] = w1[e] x and e = ids[:, j], in the order of j.

    x: [T, H]; ids: [T, top_k], any integer type; a slot whose expert is not one of 0 to E - 1 adds nothing; weights:
    [T, top_k]; w1: [E, 2 I, H], gate before up; w2: [E, H, I]; or both INT4. Returns [T, H], float64. It keeps T ·
    top_k rows: ask for some of the tokens where that is too much.

    stored: the dtype in which kernels hand gate and up, SiLU · up and the rows of w2 to one another: each is rounded
    once; None: nothing is. In bf16 these roundings alone, with that of the result, come to an RMS error of 3.4e-3, and
    to more than `MAX_TOLERANCE` in one to eight of 1000 random tokens of Qwen3.5-35B-A3B: of 32 tokens held against
    float64 all the way, a right chain of kernels fails up to one time in five. With SiLU · up made from sums that were
    not rounded it is 2.4e-3, and no token in 6000.
    """
    parts = x.new_zeros((*ids.shape, x.shape[1]), dtype=torch.float64)
    for e in range(len(w1.packed if isinstance(w1, Int4) else w1)):
        token, j = torch.nonzero(ids == e, as_tuple=True)
        if len(token):
            parts[token, j] = expert(x[token], _of(w1, e), _of(w2, e), stored)
    out = x.new_zeros(x.shape, dtype=torch.float64)
    for j in range(ids.shape[1]):
        out += weights[:, j, None].double() * parts[:, j]
    return out


def expert(x: Tensor, w1: Tensor, w2: Tensor, stored: torch.dtype | None = None) -> Tensor:
    """w2 (SiLU(gate) · up) of one expert. x: [T, H]; w1: [2 I, H]; w2: [H, I]. Returns [T, H], float64.

    stored: as of `layer`.
    """

    def rounded(values: Tensor) -> Tensor:
        return values if stored is None else values.to(stored).double()

    gate, up = rounded(x.double() @ w1.double().T).chunk(2, -1)
    return rounded(rounded(gate * torch.sigmoid(gate) * up) @ w2.double().T)


def _of(w: Tensor | Int4, e: int) -> Tensor:
    return dequantise(Int4(w.packed[e], w.scales[e])) if isinstance(w, Int4) else w[e]


class Errors(NamedTuple):
    """Largest and root mean square of |found - expected| / max(RMS of expected, |expected|)."""

    largest: float
    rms: float

    @property
    def ok(self) -> bool:
        """Within 2e-2 and 4e-3; false for NaN."""
        return self.largest <= MAX_TOLERANCE and self.rms <= RMS_TOLERANCE


def errors(found: Tensor, expected: Tensor) -> Errors:
    """triton_kernels' metric of a result against the expected one, both of one shape. ValueError for another shape."""
    if found.shape != expected.shape:
        raise ValueError(f"found is {tuple(found.shape)}; allowed: expected's shape, {tuple(expected.shape)}")
    found, expected = found.double(), expected.double()
    rms = expected.square().mean().sqrt()
    tiny = torch.finfo(torch.float64).tiny  # all expected zero: any other value is then infinitely wrong, not NaN
    relative = (found - expected).abs() / torch.maximum(rms, expected.abs()).clamp(min=tiny)
    return Errors(float(relative.max()), float(relative.square().mean().sqrt()))
