"""Steps of routed experts through the cache made ready for timing."""

import math
from typing import Any

import torch
from torch import Tensor

from labkit.bench.spec import Case, Trial
from labkit.kernels.gguf.experts import Experts
from labkit.studies.batched_ffn import variants
from labkit.studies.batched_ffn.routed_trials import expected_of, held_experts, work_of
from labkit.studies.batched_ffn.steps import Steps
from labkit.studies.batched_ffn.trials import TOLERANCE, shared
from labkit.studies.batched_ffn.work import routing
from labkit.sweep.trial import SAME_BITS, differing, in_order, relative_rmse, trial, worst


def through(x: Case, device: Any, seed: int, variant: str) -> Steps:
    """The steps of a case's trace."""
    chosen = routing(x)
    works = [work_of(x, device, seed + layer, ids) for layer, ids in enumerate(chosen[0])]
    return Steps(_host(x, device, seed), chosen, works, x["policy"], x["capacity"], variant)


def _host(x: Case, device: Any, seed: int) -> Experts:
    """All layers' experts on the host, pinned where there is a GPU."""

    def make() -> Experts:
        found = held_experts(x, device, x["layers"] * x["E"], seed)[1]
        host = found.like(len(found), "cpu", pinned=torch.device(device).type == "cuda")
        host.store.copy_(found.store)
        return host

    return shared(x, ("host", str(device), x["layers"], seed), make)


def cached(x: Case, device: Any, sets: int, seed: int, variant: str) -> Trial:
    """Steps of a trace; one buffer set, since a step goes on where the last one ended."""
    step = through(x, device, seed, variant)
    raw, everything = held_experts(x, device, x["layers"] * x["E"], seed)

    def check() -> dict[str, float]:
        for work in step.works:
            work.partials.fill_(math.nan)
        step()
        picks, errors = sorted({0, x["N"] - 1}), []  # all the others are compared by their bits
        for layer, work in enumerate(step.works):
            v = (work.x[picks], work.ids[picks], work.weights[picks])
            errors.append(relative_rmse(work.y[picks], expected_of(x, raw, layer * x["E"], *v)))
        bits = max(differing(work.y, _at_once(x, everything, layer, work)) for layer, work in enumerate(step.works))
        return {"y": worst(errors), "bits": bits}

    def facts() -> dict[str, Any]:
        """Of one round of the trace, after one in which the cache has filled."""
        if variant != variants.NEEDED:
            return {}
        for _ in range(2):
            before, copied = step.kept.replayed, step.kept.copied
            for _ in step.needs:
                step()
        seen = step.kept.replayed.since(before)
        found = {"hit_rate": seen.hit_rate, "accesses": seen.accesses, "bypassed": seen.bypassed}
        found |= {"copied": step.kept.copied - copied, "steps": len(step.needs)}
        return found | {"expert_bytes": step.host.expert_bytes, "slots": len(step.kept.slots)}

    if variant == variants.COPIES:
        return trial([step], facts=facts, idle=True, begin=step.finish_the_trace)
    tolerance = {"y": 2 * TOLERANCE[x["activations"]], "bits": SAME_BITS}
    outputs = [work.y for work in step.works]
    return trial([step], outputs, check, tolerance, facts=facts, begin=step.finish_the_trace)


def _at_once(x: Case, everything: Experts, layer: int, work: Any) -> Tensor:
    """y of a layer with all experts in one table."""
    from labkit.kernels.gguf import routed as kernels

    other = type(work).of(work.x, work.ids, work.weights, x["width"])
    first = layer * x["E"]
    table = torch.arange(first, first + x["E"], dtype=torch.int32, device=work.x.device)
    in_order([*kernels.grouped_indexed(everything, table, other, matrix=True), kernels.weighted_sum(other)])()
    return other.y
