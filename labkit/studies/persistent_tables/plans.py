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
    """How the tables' decode runs. per_sm: programs of a multiprocessor, at most; rows: of a tile; choice: fields of
    `kernels.Choice`."""

    per_sm: int = 4
    rows: int = 4
    choice: Mapping[str, Any] = field(default_factory=dict)


PLANS = {  # found by sweeps on an H100: `block_k` and `ahead` cover a row of the model's width
    variants.H1024: Plan(rows=8, choice={"block_k": 1024, "block_t": 32, "registers": 128}),
    "AutoMegaKernel h2048": Plan(choice={"block_k": 1024, "ahead": 2, "block_t": 8, "registers": 128}),
    variants.LLAMA: Plan(choice={"block_k": 1024, "ahead": 2, "block_t": 32, "registers": 128}),
    (variants.H1024, "fp32"): Plan(choice={"block_k": 1024, "block_t": 32, "registers": 128}),  # values twice as large
    variants.TINY: Plan(rows=64, choice={"block_k": 64, "num_warps": 1}),
}


def plan_of(model: str, dtype: str, changed: Mapping[str, Any] | None = None) -> Plan:
    """The plan of a model's tables. changed: fields of its choice."""
    plan = PLANS.get((model, dtype)) or PLANS[model]
    return replace(plan, choice={**plan.choice, **changed}) if changed else plan


def lowering(
    model: Decoder, dtype: str, itemsize: int, programs: int, schedule: str = "round-robin", parts: int | None = None
) -> Lowering:
    """What is lowered: a model's tiles, cache and spans of attention. dtype: of the weights, of itemsize bytes."""
    positions = variants.CACHE if model.name != variants.TINY else variants.TINY_CACHE
    rows, span = plan_of(model.name, dtype).rows, variants.SPANS.get(model.name)
    return Lowering(model, programs, schedule, positions, 0, rows, parts, itemsize, span)


ledger.watch(__name__)
