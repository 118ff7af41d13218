"""Synthetic routings: no model's; each is labelled so. They need no Triton, so that floors can be told anywhere."""

from typing import NamedTuple

import torch
from torch import Tensor

from labkit.bench import ledger
from labkit.kernels.checks import check_one_of
from labkit.studies.moe_persistent_grid.variants import KINDS

HOT_SHARE = 0.8  # of the slots, that go to the hot set
HOT_EXPERTS = 16  # one expert of so many is in the hot set, but at least top_k


class Synthetic(NamedTuple):
    """A routing that was made up: no model's. ids: [T, top_k], int32; weights: [T, top_k], fp32, that sum to one."""

    name: str
    ids: Tensor
    weights: Tensor


def synthetic(
    kind: str,
    tokens: int,
    experts: int,
    top_k: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    empty: int = 0,
) -> Synthetic:
    """A synthetic routing; the same for the same arguments, on any device.

    kind: "uniform": every expert as likely; "zipf 0.5", "zipf 1", "zipf 1.5": the r-th likeliest as r ** -s; "hot set":
    one expert of 16 (but at least top_k) takes 0.8 of the slots; "one expert": every slot goes to the same one.
    Likely experts are anywhere among the others. A token's top_k differ, but for "one expert".
    empty: so many experts, the least likely ones, get nothing.
    ValueError for another kind, or top_k above the experts that are not empty.
    """
    check_one_of("kind", kind, KINDS)
    if not 1 <= top_k <= experts - empty:
        raise ValueError(f"top_k is {top_k}; allowed: 1 to {experts - empty}, the experts that are not empty")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(experts, generator=generator)
    logits = _likelihood(kind, experts, top_k).log()
    logits[experts - empty :] = -torch.inf
    # Gumbel's trick: the largest of log p plus Gumbel noise are a sample without replacement.
    noise = -torch.empty(tokens, experts).exponential_(generator=generator).log()
    ranks = (logits + noise).topk(top_k).indices
    if kind == "one expert":
        ranks = torch.zeros_like(ranks)
    weights = torch.randn(tokens, top_k, generator=generator).softmax(-1)
    return Synthetic(f"synthetic, {kind}", order[ranks].to(device, torch.int32), weights.to(device))


def _likelihood(kind: str, experts: int, top_k: int) -> Tensor:
    """Of the experts, likeliest first; not normalised."""
    p = torch.ones(experts)
    if kind.startswith("zipf"):
        return torch.arange(1, experts + 1) ** -float(kind.split()[1])
    if kind == "hot set" and (hot := max(top_k, experts // HOT_EXPERTS)) < experts:
        p[:hot] = HOT_SHARE / (1 - HOT_SHARE) * (experts - hot) / hot
    return p


ledger.watch(__name__)
