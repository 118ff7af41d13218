"""The feed-forward layer, dense and routed, in float64, from dequantised weights; the kernels are judged by it.

Source: SharpInference issue 121, which batches this layer; the gated form is SwiGLU (Shazeer 2020, arXiv 2002.05202).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def product(W: Tensor, x: Tensor) -> Tensor:
    """y[n] = W x[n]. W: [rows, K], as of `formats.dequantise`; x: [N, K]; any float. Returns [N, rows], float64."""
    return x.double() @ W.double().T


def gated(gate: Tensor, up: Tensor, x: Tensor) -> Tensor:
    """SiLU(gate x[n]) · (up x[n]). gate, up: [rows, K]; x: [N, K]; any float. Returns [N, rows], float64."""
    found = product(gate, x)
    return found * torch.sigmoid(found) * product(up, x)


def ffn(gate: Tensor, up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    """down of `gated`. gate, up: [I, K]; down: [K, I]; x: [N, K]; any float. Returns [N, K], float64."""
    return product(down, gated(gate, up, x))


def routed(experts: Sequence[Sequence[Tensor]], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Σ_k weights[n, k] · ffn of expert ids[n, k] of x[n].

    experts: gate, up and down of each, as `ffn` takes them. x: [N, H]; ids: [N, top_k], integers; weights: [N, top_k].
    Returns [N, H], float64.
    """
    y = x.new_zeros(x.shape, dtype=torch.float64)
    for expert in ids.unique().tolist():
        token, k = (ids == expert).nonzero(as_tuple=True)
        y.index_add_(0, token, weights[token, k, None].double() * ffn(*experts[expert], x[token]))
    return y
