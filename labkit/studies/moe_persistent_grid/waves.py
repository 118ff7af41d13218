"""How well a grid of tiles fills a GPU, and which part of it is for blocks that no token is in; arithmetic only.

A GPU of S slots (SMs × CTAs an SM) runs t equal tiles in ⌈t / S⌉ waves, so that a share t / (⌈t / S⌉ · S) of it works.
A persistent grid changes what happens between tiles, not this: where there are many waves it has little to win.
"""

import math

from labkit.bench import ledger
from labkit.evidence.roofline import waves

SMS = {"A100": 108, "RTX 4090": 128, "H100 SXM, H200": 132, "B200": 148}  # multiprocessors, by NVIDIA's datasheets


def expected_blocks(tokens: int, top_k: int, experts: int, block_m: int) -> float:
    """Blocks that have a token under uniform routing, on average: an expert's count is then binomial."""
    p = top_k / experts
    if p == 1:
        return float(experts * -(-tokens // block_m))
    log_p, log_q, total = math.log(p), math.log1p(-p), math.lgamma(tokens + 1)
    logs = (
        total - math.lgamma(n + 1) - math.lgamma(tokens - n + 1) + n * log_p + (tokens - n) * log_q
        for n in range(tokens + 1)
    )
    return experts * sum(math.exp(log) * -(-n // block_m) for n, log in enumerate(logs))


def dead_share(live: float, grid: int) -> float:
    """Share of a grid's blocks that no token is in. ValueError for more live blocks than the grid has."""
    if not 0 <= live <= grid or grid < 1:
        raise ValueError(f"live is {live} and grid is {grid}; allowed: 0 <= live <= grid, 1 <= grid")
    return 1 - live / grid


def efficiency(tiles: int, slots: int) -> float:
    """t / (⌈t / S⌉ · S): the share of the slots' time that is work, if all tiles take the same time; 1 for no tiles.

    ValueError for less than one slot.
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}; allowed: at least 1")
    return tiles / (-(-tiles // slots) * slots) if tiles else 1.0


def predicted_ratio(tiles: int, slots: int, other_slots: int) -> float:
    """Time on `other_slots` over the time on `slots`, of the same CTAs: the ratio of their whole waves."""
    if min(slots, other_slots) < 1:
        raise ValueError(f"slots is {slots} and other_slots is {other_slots}; allowed: at least 1")
    return -(-tiles // other_slots) / max(1, -(-tiles // slots))


def on_gpus(tiles: int, per_sm: int) -> dict[str, tuple[float, float]]:
    """Waves and efficiency of so many tiles with `per_sm` CTAs an SM, for every GPU of `SMS`."""
    return {name: (waves(tiles, sms, per_sm), efficiency(tiles, sms * per_sm)) for name, sms in SMS.items()}


ledger.watch(__name__)
