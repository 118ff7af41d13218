"""The expert layer in float64, INT4 weights as they are stored, and the error metric; the kernels are judged by it.

Sources: the INT4 format is that of ExecuTorch's batched MoE kernels (pull request 19219); the metric is `assert_close`
of triton_kernels (in Triton's repository, python/triton_kernels/triton_kernels/testing.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from labkit.kernels.experts.int4 import Int4, dequantise

MAX_TOLERANCE = 2e-2
RMS_TOLERANCE = 4e-3


def layer(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor | Int4, w2: Tensor | Int4, stored: torch.dtype | None = None
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
