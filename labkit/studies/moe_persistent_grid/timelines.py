"""One expert layer over time, in both grids: what each program did when, and on which multiprocessor."""

from typing import Any

from labkit.bench.spec import Case
from labkit.evidence import timeline
from labkit.kernels.experts.inputs import workspace
from labkit.studies.moe_persistent_grid import trials, variants

GRIDS = {variants.TILES: "tiles", variants.PERSISTENT: "filled"}  # as `trials.config_of` has them


def take(x: Case, device: Any, seed: int) -> list[timeline.Timeline]:
    """Our layer of a case in one CTA a tile, and in a persistent grid of as many programs as fit; they run here."""
    [item] = trials.inputs(x, device, 1, seed)
    return [
        timeline.of_launches(what, trials._built(x, item, workspace(item), grid).launches)
        for what, grid in GRIDS.items()
    ]
