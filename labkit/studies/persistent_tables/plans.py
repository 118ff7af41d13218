"""How the tables' decode runs with each model: what sweeps found, and what is lowered by it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.bench import ledger
from labkit.kernels.decoder.model import Decoder
from labkit.kernels.decoder.tables import Lowering
from labkit.studies.persistent_tables import variants


@dataclass(frozen=True)
class Plan:
    """How the tables' decode runs. per_sm: programs of a multiprocessor, at most; rows: of a tile; span, group: of
    attention, as `Lowering` has them; choice: fields of `kernels.Choice`."""

    per_sm: int = 4
    rows: int = 4
    span: int | None = None
    group: int = 1
    choice: Mapping[str, Any] = field(default_factory=dict)


PLANS = {  # found by sweeps on an H100: `block_k` and `ahead` cover a row of the model's width
    variants.H1024: Plan(rows=8, choice={"block_k": 1024, "block_t": 32, "registers": 128}),
    "AutoMegaKernel h2048": Plan(choice={"block_k": 1024, "ahead": 2, "block_t": 8, "registers": 128}),
    variants.LLAMA: Plan(span=128, group=4, choice={"block_k": 1024, "ahead": 2, "block_t": 32, "registers": 128}),
    (variants.H1024, "fp32"): Plan(choice={"block_k": 1024, "block_t": 32, "registers": 128}),  # values twice as large
    variants.TINY: Plan(rows=64, choice={"block_k": 64, "num_warps": 1}),
}
BATCHES = {  # with several sequences: found by a sweep on an H200
    variants.LLAMA: Plan(rows=16, span=128, group=4, choice={"block_k": 512, "ahead": 2, "block_t": 32}),
    variants.TINY: PLANS[variants.TINY],
}


def plan_of(model: str, dtype: str, changed: Mapping[str, Any] | None = None, batch: int = 1) -> Plan:
    """The plan of a model's tables. changed: fields of it, or of its choice; batch: sequences that share a step."""
    plan = BATCHES[model] if batch > 1 else PLANS.get((model, dtype)) or PLANS[model]
    if not changed:
        return plan
    own = {name: value for name, value in changed.items() if name in ("span", "group")}
    choice = {name: value for name, value in changed.items() if name not in own}
    return replace(plan, **own, choice={**plan.choice, **choice})


def lowering(
    model: Decoder, dtype: str, itemsize: int, programs: int, schedule: str = "round-robin", parts: int | None = None,
    batch: int = 1, changed: Mapping[str, Any] | None = None,
) -> Lowering:  # fmt: skip
    """What is lowered: a model's tiles, cache and spans of attention. dtype: of the weights, of itemsize bytes.

    batch, changed: as of `plan_of`.
    """
    positions = variants.CACHE if model.name != variants.TINY else variants.TINY_CACHE
    plan = plan_of(model.name, dtype, changed, batch)
    return Lowering(model, programs, schedule, positions, 0, plan.rows, parts, itemsize, plan.span, batch, plan.group)


ledger.watch(__name__)
