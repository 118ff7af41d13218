"""One decode step of the gated delta rule in float64, written for reading; the kernels are judged by it.

Source: Gated Delta Networks (Yang, Kautz, Hatamizadeh, 2024), in the form that Qwen3-Next's layers use.
"""

import torch
from torch import Tensor

L2_EPS = 1e-6
SOFTPLUS_LINEAR_ABOVE = 20.0


def decay_and_beta(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay α = exp(-exp(A_log) · softplus(a + dt_bias)) and β = sigmoid(b).

    a, b: [N, HV]; A_log, dt_bias: [HV]. Returns α and β, [N, HV], float64.
    """
    x = a.double() + dt_bias.double()
    softplus = torch.where(x > SOFTPLUS_LINEAR_ABOVE, x, torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_LINEAR_ABOVE))))
    return torch.exp(-torch.exp(A_log.double()) * softplus), torch.sigmoid(b.double())


def decode_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """o and the new state of one token a sequence.

    state: [N, HV, V, K]; q, k: [N, H, K] with HV a multiple of H; v: [N, HV, V]; alpha, beta: [N, HV].
    q and k are L2-normalised here, and q is scaled. Returns o [N, HV, V] and the state [N, HV, V, K], float64.
    """
    repeat = state.shape[1] // q.shape[1]
    q = _normalised(q).repeat_interleave(repeat, dim=1) * scale
    k = _normalised(k).repeat_interleave(repeat, dim=1)
    state = state.double() * alpha.double()[..., None, None]
    u = beta.double()[..., None] * (v.double() - torch.einsum("nhvk,nhk->nhv", state, k))
    state = state + u[..., :, None] * k[..., None, :]
    return torch.einsum("nhvk,nhk->nhv", state, q), state


def _normalised(x: Tensor) -> Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
