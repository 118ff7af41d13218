"""Random inputs of the study's operations: a pool of states, rings beside it, tokens, drafts and prompts.

Sequences stand at every place of their rings equally often, also where a batch has fewer of them than a ring has
entries: they go on from one set of buffers to the next. Slots of the pool are at random.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from labkit.bench.spec import Case
from labkit.kernels.gated_delta.buffered import DraftInputs, Ring
from labkit.kernels.gated_delta.chunked import ExtendInputs
from labkit.kernels.gated_delta.recurrent import StepInputs
from labkit.studies.gated_delta_today.variants import LENGTHS
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


def decay_logs(x: Case, a: Tensor, device: Any) -> Tensor:
    """Logarithms of decays, fp32. a: [.., HV] or [.., HV, K]."""
    known = rates(x, device)
    rate = known["A_log"].exp().view(x["HV"], *[1] * (len(gate_shape(x)) - 1))
    return -rate * torch.nn.functional.softplus(a.float() + known["dt_bias"])


def positions(N: int, sets: int, length: int, device: Any) -> list[Tensor]:
    """Entries that each sequence has, [N] int32 for each set; the first one of all is about to write its state."""
    every = (torch.arange(sets * N, device=device) + length - 1) % length
    return [one.clone() for one in every.to(torch.int32).view(sets, N)]  # each aligned as an engine's are


def steps(x: Case, device: Any, sets: int, seed: int, v_first: bool = True) -> list[StepInputs]:
    """Tokens of `sets` parts of one pool."""
    return [StepInputs(**one) for one in _tokens(x, device, sets, seed, v_first, ())]


def drafts(x: Case, device: Any, sets: int, seed: int, more: int = 0) -> list[DraftInputs]:
    """T drafts a sequence. more: slots of the pool beside those that are used."""
    parents = tree(x["batch"], x["T"], device) if x["draft"] == "tree" else None
    found = _tokens(x, device, sets, seed, True, (x["T"],))
    return [DraftInputs(**one, parents=parents) for one in found]


def _tokens(x: Case, device: Any, sets: int, seed: int, v_first: bool, outer: tuple[int, ...]) -> list[dict[str, Any]]:
    N, H, HV, K, V = (x[name] for name in ("batch", "H", "HV", "K", "V"))
    made = Random(device, seed, DTYPES[x["activations"]])
    pool = states(x, made, sets * N, v_first, DTYPES[x["state"]])
    slots = made.order(sets * N).to(torch.int32).view(sets, N)
    rest = {"state": pool, "scale": K**-0.5, "v_first": v_first} | rates(x, device)
    shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "a": gate_shape(x), "b": (HV,)}
    found = []
    for indices in slots:
        parts = {name: made(N, *outer, *shape) for name, shape in shapes.items()}
        parts["out"] = torch.empty_like(parts["v"])
        found.append({"indices": indices.clone()} | parts | rest)
    return found


def states(x: Case, made: Random, count: int, v_first: bool, dtype: torch.dtype) -> Tensor:
    """A pool of random states."""
    HV, K, V = (x[name] for name in ("HV", "K", "V"))
    pool = torch.empty((count, HV, *((V, K) if v_first else (K, V))), dtype=dtype, device=made.device)
    for part in pool.split(64):  # in parts: a copy of the whole pool in fp32 need not fit beside it
        made.fill(part)
    return pool


def gate_shape(x: Case) -> tuple[int, ...]:
    """Of one token."""
    return (x["HV"], x["K"]) if x["gate"] == "KDA" else (x["HV"],)


def rates(x: Case, device: Any) -> dict[str, Tensor]:
    """A_log and dt_bias as models initialise them: decay rates of 1 to 16, softplus(dt_bias) of 1e-3 to 1e-1."""
    shape = gate_shape(x)
    bias = torch.logspace(-3, -1, math.prod(shape), device=device).expm1().log().view(shape)
    return {"A_log": torch.linspace(1, 16, x["HV"], device=device).log(), "dt_bias": bias}


def tree(N: int, T: int, device: Any) -> Tensor:
    """[N, T] parents of a binary draft tree in breadth-first order: the children of draft i are 2 i + 1 and 2 i + 2."""
    parents = (torch.arange(T, device=device, dtype=torch.int32) - 1) // 2
    parents[0] = -1
    return parents.expand(N, T).contiguous()


def prompts(x: Case, device: Any, sets: int, seed: int) -> list[ExtendInputs]:
    """Prompts of a prefill, states [V, K]."""
    H, HV, K, V = (x[name] for name in ("H", "HV", "K", "V"))
    lengths = LENGTHS[x["prefill"]]
    T, made = sum(lengths), Random(device, seed, DTYPES[x["activations"]])
    where = "cpu" if torch.device(device).type == "meta" else device  # the boundaries are looked at
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=where)
    found = []
    for _ in range(sets):
        a, b = made(T, *gate_shape(x)), made(T, HV)
        initial = states(x, made, len(lengths), True, torch.float32)
        item = ExtendInputs(
            q=made(T, H, K), k=made(T, H, K), v=made(T, HV, V), g=decay_logs(x, a, device),
            beta=torch.sigmoid(b.float()), cu_seqlens=bounds, initial=initial, final=torch.empty_like(initial),
            out=torch.empty((T, HV, V), dtype=made.dtype, device=device), scale=K**-0.5,
        )  # fmt: skip
        found.append(item)
    return found


def like(items: Sequence[StepInputs]) -> list[StepInputs]:
    """The same tokens on pools and outputs of their own."""
    return [replace(one, state=one.state.clone(), out=torch.empty_like(one.out)) for one in items]
