"""The gated delta rule in float64, token by token, written for reading; the kernels are judged by it.

Sources: Gated Delta Networks (Yang, Kautz, Hatamizadeh, 2024), in the form that Qwen3-Next's layers use (GDN: one decay
a value head); Kimi Linear (Kimi Team, 2025), whose decay is one a channel of K (KDA).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

L2_EPS = 1e-6
SOFTPLUS_LINEAR_ABOVE = 20.0


def decay_and_beta(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay α = exp(-exp(A_log) · softplus(a + dt_bias)) and β = sigmoid(b).

    a, b: [..., HV]; A_log, dt_bias: [HV]. Returns α and β, [..., HV], float64.
    """
    softplus = _softplus(a.double() + dt_bias.double())
    return torch.exp(-torch.exp(A_log.double()) * softplus), torch.sigmoid(b.double())


def kda_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """Decay of KDA: exp(-exp(A_log) · softplus(a + dt_bias)), or exp(lower_bound · sigmoid(exp(A_log)(a + dt_bias))).

    a: [..., HV, K]; A_log: [HV]; dt_bias: [HV, K]; lower_bound: negative, of Kimi-K3's form. Returns α as a, float64.
    """
    x, rate = a.double() + dt_bias.double(), torch.exp(A_log.double())[:, None]
    if lower_bound is not None:
        return torch.exp(lower_bound * torch.sigmoid(rate * x))
    return torch.exp(-rate * _softplus(x))


def decode_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """o and the new state of one token a sequence.

    state: [N, HV, V, K]; q, k: [N, H, K] with HV a multiple of H; v: [N, HV, V]; alpha: [N, HV], or [N, HV, K] for KDA;
    beta: [N, HV]. q and k are L2-normalised here, q is scaled. Returns o [N, HV, V], the state [N, HV, V, K]; float64.
    """
    repeat = state.shape[1] // q.shape[1]
    q = _normalised(q).repeat_interleave(repeat, dim=1) * scale
    k = _normalised(k).repeat_interleave(repeat, dim=1)
    alpha = alpha.double()
    state = state.double() * (alpha[..., None, :] if alpha.ndim == 3 else alpha[..., None, None])
    u = beta.double()[..., None] * (v.double() - torch.einsum("nhvk,nhk->nhv", state, k))
    state = state + u[..., :, None] * k[..., None, :]
    return torch.einsum("nhvk,nhk->nhv", state, q), state


def extend(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, scale: float, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """o of every token, and the state after the last token, of sequences of any length.

    state: [N, HV, V, K], before the first token; q, k: [T, H, K]; v: [T, HV, V]; alpha: [T, HV] or [T, HV, K]; beta:
    [T, HV]; cu_seqlens: [N + 1], sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1]. Otherwise as
    `decode_step`. Returns o [T, HV, V] and the states [N, HV, V, K], float64.
    """
    o, final = torch.zeros(v.shape, dtype=torch.float64, device=v.device), state.double().clone()
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        for t in range(start, end):
            token = (x[t : t + 1] for x in (q, k, v, alpha, beta))
            o[t : t + 1], final[n : n + 1] = decode_step(final[n : n + 1], *token, scale)
    return o, final


def segment_map(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of a segment: whatever the state S is before its tokens, S A + B is the state after them.

    Every row of a state goes its own way, and a value adds to its own row: so the state [0 | I], with values of zero
    for the rows of I, becomes [B | A]. k: [T, H, K]; v: [T, HV, V]; alpha, beta: as in `extend`.
    Returns A [HV, K, K] and B [HV, V, K], float64.
    """
    (T, HV, V), K = v.shape, k.shape[-1]
    identity = torch.eye(K, dtype=torch.float64, device=v.device).expand(HV, K, K)
    state = torch.cat([torch.zeros((HV, V, K), dtype=torch.float64, device=v.device), identity], 1)
    values = torch.cat([v.double(), torch.zeros((T, HV, K), dtype=torch.float64, device=v.device)], 2)
    _, state = extend(state[None], k, k, values, alpha, beta, 1.0, torch.tensor([0, T]))
    return state[0, :, V:], state[0, :, :V]


def scan(state: Tensor, maps: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The state before each segment and after the last one, from that before the first, [HV, V, K], and their maps."""
    return list(accumulate(maps, lambda before, one: before @ one[0] + one[1], initial=state.double()))


def verify(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    scale: float,
    parents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o and the state after every draft token; the state before is left as it is.

    state: [N, HV, V, K]; q, k: [N, T, H, K]; v: [N, T, HV, V]; alpha: [N, T, HV] or [N, T, HV, K]; beta: [N, T, HV];
    parents: [N, T], the draft token whose state each one goes on from, always an earlier one; -1: `state`. None: each
    goes on from the one before. Otherwise as `decode_step`. Returns o [N, T, HV, V], states [N, T, HV, V, K], float64.
    """
    N, T = q.shape[:2]
    o = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    states = torch.zeros((N, T + 1, *state.shape[1:]), dtype=torch.float64, device=v.device)
    states[:, 0] = state  # then that after each token
    for t in range(T):
        before = states[:, t] if parents is None else states[torch.arange(N), parents[:, t].long() + 1]
        o[:, t], states[:, t + 1] = decode_step(before, *(x[:, t] for x in (q, k, v, alpha, beta)), scale)
    return o, states[:, 1:]


def with_ring(state: Tensor, u: Tensor, k: Tensor, alpha: Tensor) -> Tensor:
    """The state after m tokens, from that before them and what each of them added.

    state: [N, HV, V, K]; of the tokens, u: [N, m, HV, V], corrections β (v − S k); k: [N, m, HV, K], normalised; alpha:
    [N, m, HV], or [N, m, HV, K] for KDA, decays. Returns S = A state + Σ_j u_j (W_j ∘ k_j)ᵀ, A the product of all
    decays and W_j that of those after token j; float64.
    """
    alpha = alpha.double() if alpha.ndim == 4 else alpha.double()[..., None]
    none = alpha.new_ones((len(alpha), 1, *alpha.shape[2:]))
    since = torch.cat([alpha.flip(1).cumprod(1).flip(1), none], 1)  # of token j and those after it, and of none
    S = state.double() * since[:, 0][..., None, :]
    return S + torch.einsum("nmhv,nmhk->nhvk", u.double(), k.double() * since[:, 1:])


def _softplus(x: Tensor) -> Tensor:
    linear = x > SOFTPLUS_LINEAR_ABOVE
    return torch.where(linear, x, torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_LINEAR_ABOVE))))


def _normalised(x: Tensor) -> Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
