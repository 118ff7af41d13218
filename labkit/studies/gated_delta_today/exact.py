"""What is expected, in float64: of sequences in their rings, and of long prompts, whose pieces are followed at once."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from labkit.kernels.gated_delta import reference
from labkit.kernels.gated_delta.buffered import Ring
from labkit.kernels.gated_delta.chunked import ExtendInputs
from labkit.kernels.gated_delta.recurrent import Inputs

PIECE = 128  # tokens of a prompt that are followed one after the other; pieces, all at once


def gates(x: Inputs, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """α and β by the kind of gate that dt_bias is of, float64."""
    if x.dt_bias.ndim == 1:
        return reference.decay_and_beta(a, b, x.A_log, x.dt_bias)
    return reference.kda_decay(a, x.A_log, x.dt_bias, x.lower_bound), torch.sigmoid(b.double())


def in_place_states(x: Inputs, some: int) -> Tensor:
    """The pool's states of the first `some` sequences, [n, HV, V, K]."""
    found = x.state[x.indices[:some].long()]
    return found if x.v_first else found.transpose(-1, -2)


def states_with(x: Inputs, ring: Ring, counts: Tensor, some: int) -> Tensor:
    """What the states of the first `some` sequences are, with `counts` entries of their rings: [n, HV, V, K], float64.

    counts: [N], or [n, ..] with the number of entries of each.
    """
    slots, R = x.indices[:some].long(), ring.entries
    js = torch.arange(R, device=slots.device)
    at = (ring.starts[:some, None] + js) % R  # [n, R]
    live = (js < counts[:some, None])[:, :, None]  # [n, R, 1]
    heads = x.v.shape[-2] // x.q.shape[-2]

    def in_order(kept: Tensor) -> Tensor:  # [slots, heads, R, ..] -> [n, R, heads, ..]
        place = at[:, None, :].expand(-1, kept.shape[1], -1)
        place = place[..., None].expand(*place.shape, kept.shape[3]) if kept.ndim == 4 else place
        return kept[slots].gather(2, place).transpose(1, 2)

    u, k, g = in_order(ring.u), in_order(ring.k).repeat_interleave(heads, 2), in_order(ring.g).double()
    logs = torch.cat([g[:, :1], g.diff(dim=1)], 1)
    alpha = torch.where(live if logs.ndim == 3 else live[..., None], logs.exp(), 1.0)
    return reference.with_ring(in_place_states(x, some), u * live[..., None], k, alpha)


def step(x: Inputs, before: Tensor) -> tuple[Tensor, Tensor]:
    """o and the states after one token of the first sequences. before: their states, [n, HV, V, K]."""
    parts = [part[: len(before)] for part in (x.q, x.k, x.v)]
    alpha, beta = gates(x, x.a[: len(before)], x.b[: len(before)])
    return reference.decode_step(before, *parts, alpha, beta, x.scale)


def drafts(x: Any, before: Tensor) -> tuple[Tensor, Tensor]:
    """o and the states after each of T drafts of the first sequences."""
    n = len(before)
    alpha, beta = gates(x, x.a[:n], x.b[:n])
    parents = None if x.parents is None else x.parents[:n]
    return reference.verify(before, x.q[:n], x.k[:n], x.v[:n], alpha, beta, x.scale, parents)


class Prompts:
    """Sequences of one length, in float64: each is cut into pieces, whose maps give the state before every piece.

    The kernels do that with segments. The tests hold this against the recurrence that goes from token to token.
    """

    def __init__(self, x: ExtendInputs):
        bounds = x.cu_seqlens.tolist()
        self.N, self.tokens = len(bounds) - 1, bounds[1]
        self.pieces = max(1, self.tokens // PIECE) if self.tokens % PIECE == 0 else 1
        self.x, self.size = x, self.tokens // self.pieces

    def _piece(self, part: Tensor) -> Tensor:
        """[T, ..] as [sequences · pieces, tokens of a piece, ..]."""
        return part.unflatten(0, (self.N * self.pieces, self.size))

    def _run(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty(v.shape, dtype=torch.float64, device=v.device)
        for t in range(q.shape[1]):
            token = (part[:, t] for part in (q, k, v, alpha, beta))
            out[:, t], state = reference.decode_step(state, *token, self.x.scale)
        return out, state

    @cached_property
    def expected(self) -> Mapping[str, Tensor]:
        """out: [T, HV, V]; state: [N, HV, V, K], after the last token.

        with, without: of the last piece the outputs, and what they were if the map of the piece before it were left
        out; where there are pieces.
        """
        x = self.x
        q, k, v, beta = (self._piece(part) for part in (x.q, x.k, x.v, x.beta))
        alpha = self._piece(x.g).double().exp()
        HV, V, K = x.initial.shape[1:]
        initial = x.initial.double()
        before = initial[:, None]
        if self.pieces > 1:
            new = {"dtype": torch.float64, "device": v.device}
            start = torch.cat([torch.zeros((V, K), **new), torch.eye(K, **new)]).expand(len(q), HV, V + K, K)
            values = torch.cat([v.double(), torch.zeros((*v.shape[:3], K), **new)], 3)
            _, made = self._run(start, k, k, values, alpha, beta)
            made = made.unflatten(0, (self.N, self.pieces))
            states = [initial]
            for piece in range(self.pieces - 1):
                states.append(states[-1] @ made[:, piece, :, V:] + made[:, piece, :, :V])
            before = torch.stack(states, 1)
        out, after = self._run(before.flatten(0, 1), q, k, v, alpha, beta)
        found = {"out": out.flatten(0, 1), "state": after.unflatten(0, (self.N, self.pieces))[:, -1]}
        if self.pieces > 1:
            last = [part.unflatten(0, (self.N, self.pieces))[:, -1] for part in (q, k, v, alpha, beta)]
            found["without"] = self._run(made[:, -2, :, :V], *last)[0]
            found["with"] = out.unflatten(0, (self.N, self.pieces))[:, -1]
        return found
