"""What trials of the gated delta rule share, of whichever study: random inputs, and how fla-core is had to tune."""

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from labkit.bench.spec import Case
from labkit.kernels.gated_delta.chunked import ExtendInputs
from labkit.sweep import trial
from labkit.sweep.trial import DTYPES, Random


def gate_shape(x: Case) -> tuple[int, ...]:
    """Of one token: (HV,), or (HV, K) of KDA."""
    return (x["HV"], x["K"]) if x.params.get("gate") == "KDA" else (x["HV"],)


def rates(x: Case, device: Any) -> dict[str, Tensor]:
    """A_log and dt_bias as models initialise them: decay rates of 1 to 16, softplus(dt_bias) of 1e-3 to 1e-1."""
    shape = gate_shape(x)
    bias = torch.logspace(-3, -1, math.prod(shape), device=device).expm1().log().view(shape)
    return {"A_log": torch.linspace(1, 16, x["HV"], device=device).log(), "dt_bias": bias}


def decay_logs(x: Case, a: Tensor, device: Any) -> Tensor:
    """Logarithms of decays, fp32. a: [.., HV] or [.., HV, K]."""
    known = rates(x, device)
    rate = known["A_log"].exp().view(x["HV"], *[1] * (len(gate_shape(x)) - 1))
    return -rate * torch.nn.functional.softplus(a.float() + known["dt_bias"])


def states(x: Case, made: Random, count: int, v_first: bool, dtype: torch.dtype) -> Tensor:
    """A pool of random states."""
    HV, K, V = (x[name] for name in ("HV", "K", "V"))
    pool = torch.empty((count, HV, *((V, K) if v_first else (K, V))), dtype=dtype, device=made.device)
    for part in pool.split(64):  # in parts: a copy of the whole pool in fp32 need not fit beside it
        made.fill(part)
    return pool


def tokens(x: Case, device: Any, sets: int, seed: int, v_first: bool, outer: tuple[int, ...]) -> list[dict[str, Any]]:
    """What a decode takes, by name, of `sets` parts of one pool with slots at random. outer: (T,) of T drafts."""
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


def tree(N: int, T: int, device: Any) -> Tensor:
    """[N, T] parents of a binary draft tree in breadth-first order: the children of draft i are 2 i + 1 and 2 i + 2."""
    parents = (torch.arange(T, device=device, dtype=torch.int32) - 1) // 2
    parents[0] = -1
    return parents.expand(N, T).contiguous()


def prompts(
    x: Case, lengths: Sequence[int], device: Any, sets: int, seed: int, v_first: bool = True
) -> list[ExtendInputs]:
    """Sequences of so many tokens; their decay as its logarithm, which in an engine the layer before makes."""
    H, HV, K, V = (x[name] for name in ("H", "HV", "K", "V"))
    T, made = sum(lengths), Random(device, seed, DTYPES[x["activations"]])
    where = "cpu" if torch.device(device).type == "meta" else device  # the boundaries are looked at
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=where)
    found = []
    for _ in range(sets):
        a, b = made(T, *gate_shape(x)), made(T, HV)
        initial = states(x, made, len(lengths), v_first, torch.float32)
        item = ExtendInputs(
            q=made(T, H, K), k=made(T, H, K), v=made(T, HV, V), g=decay_logs(x, a, device),
            beta=torch.sigmoid(b.float()), cu_seqlens=bounds, initial=initial, final=torch.empty_like(initial),
            out=torch.empty((T, HV, V), dtype=made.dtype, device=device), scale=K**-0.5,
        )  # fmt: skip
        found.append(item)
    return found


@lru_cache(maxsize=1)
def tune_fla_anew(case: str) -> list[Any]:
    """fla-core's autotuners, which forget what they have chosen when another case comes; to be called before its calls.

    Their keys are heads and dimensions: what is chosen for the first prompt would be kept for prompts of other lengths
    and numbers. What an earlier process wrote to disk is not taken either.
    """
    return trial.tune_anew([module for name, module in sys.modules.items() if name.startswith("fla.") and module])
