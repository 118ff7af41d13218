"""Random inputs of the study's decodes: rings beside a pool of states, tokens and drafts.

Sequences stand at every place of their rings equally often, also where a batch has fewer of them than a ring has
entries: they go on from one set of buffers to the next. Slots of the pool are at random.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from labkit.bench.spec import Case
from labkit.kernels.gated_delta.buffered import DraftInputs, Ring
from labkit.kernels.gated_delta.recurrent import StepInputs
from labkit.sweep.gated_delta import decay_logs, gate_shape, tokens, tree
from labkit.sweep.trial import DTYPES, Random

CORRECTION = 0.3  # size of a correction beside values of 1


@dataclass(frozen=True)
class Entries:
    """What the rings of a pool hold, in the order in which it came.

    k: [slots, H, R, K], as keys came; u: [slots, HV, R, V], corrections over the norm of their key; log: [slots, HV, R]
    or, for KDA, [.., K], fp32: logarithm of each token's decay.
    """

    k: Tensor
    u: Tensor
    log: Tensor

    def ring(self, starts: Tensor, counts: Tensor, first: Tensor | None = None) -> Ring:
        """As the library keeps it, one for a call. starts, counts: [N].

        first: [slots], the entry at which each slot's ring begins; None: the first one.
        """
        return Ring(u=self.u, k=self.k, g=_summed(self.log, first), starts=starts, counts=counts)


def _summed(log: Tensor, first: Tensor | None) -> Tensor:
    """Logarithms [slots, HV, R, ..] summed over the entries, in the order in which they came."""
    if first is None:
        return log.cumsum(2)
    R = log.shape[2]
    order = (first.long()[:, None] + torch.arange(R, device=log.device)) % R
    order = order.view(len(log), 1, R, *[1] * (log.ndim - 3)).expand_as(log)
    return torch.empty_like(log).scatter_(2, order, log.gather(2, order).cumsum(2))


def entries(x: Case, slots: int, length: int, device: Any, seed: int) -> Entries:
    """Of a pool of `slots`."""
    H, HV, K, V = (x[name] for name in ("H", "HV", "K", "V"))
    made = Random(device, seed + 1, DTYPES[x["activations"]])
    logs = decay_logs(x, made(slots, length, *gate_shape(x)), device).transpose(1, 2).contiguous()
    return Entries(made(slots, H, length, K), made(slots, HV, length, V, std=CORRECTION * K**-0.5), logs)


def positions(N: int, sets: int, length: int, device: Any) -> list[Tensor]:
    """Entries that each sequence has, [N] int32 for each set; the first one of all is about to write its state."""
    every = (torch.arange(sets * N, device=device) + length - 1) % length
    return [one.clone() for one in every.to(torch.int32).view(sets, N)]  # each aligned as an engine's are


def steps(x: Case, device: Any, sets: int, seed: int, v_first: bool = True) -> list[StepInputs]:
    """Tokens of `sets` parts of one pool."""
    return [StepInputs(**one) for one in tokens(x, device, sets, seed, v_first, ())]


def drafts(x: Case, device: Any, sets: int, seed: int) -> list[DraftInputs]:
    """T drafts a sequence."""
    parents = tree(x["batch"], x["T"], device) if x["draft"] == "tree" else None
    found = tokens(x, device, sets, seed, True, (x["T"],))
    return [DraftInputs(**one, parents=parents) for one in found]


def like(items: Sequence[StepInputs]) -> list[StepInputs]:
    """The same tokens on pools and outputs of their own."""
    return [replace(one, state=one.state.clone(), out=torch.empty_like(one.out)) for one in items]
