"""A GPU that is none: known times, drift, throttling and noise, behind the interface that the timing uses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from labkit.bench.machine import Machine, Timed
from labkit.bench.timing import State

MACHINE = Machine("simulated-gpu", "Simulated GPU", "1.0", 90, 132, 50 << 20, 80 << 30, 3.35, 1980, 700)


@dataclass
class SimulatedDevice:
    """`us`: true time of each prepared name. drift: relative growth over a block. process: offset of this process.

    reasons: throttle reasons by block number (from 0, warm-up blocks included); a throttled block runs 15 % slower.
    """

    us: Mapping[str, float]
    noise: float = 0.002
    drift: float = 0.0
    process: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[int, frozenset[str]] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.blocks = 0
        self.orders: list[list[str]] = []

    def time(self, timed: Sequence[str], hot: bool) -> list[int]:
        slow = 1.15 if self.reasons.get(self.blocks) else 1.0
        level = slow * (1 + self.drift * self.blocks)
        self.blocks += 1
        self.orders.append(list(timed))
        draws = self.rng.normal(0, self.noise, len(timed))
        return [
            round(1e3 * self.us[name] * level * (1 + self.process.get(name, 0.0)) * float(np.exp(draw)))
            for name, draw in zip(timed, draws, strict=True)
        ]

    def state(self) -> State:
        return State(1980, self.reasons.get(self.blocks - 1, frozenset()))


class HostDevice:
    """A device for whole sweeps without a GPU: runs every call on the CPU and reports made-up times of its variant."""

    def __init__(self, ns: int = 10_000):
        import torch

        self.machine, self.torch_device, self.ns = MACHINE, torch.device("cpu"), ns
        self.rng = np.random.default_rng(0)

    def prepare(self, calls, mode: str) -> Timed:
        def replay():
            for call in calls:
                call()

        return Timed(replay, len(calls), mode == "eager")

    def time(self, timed: Sequence[Timed], hot: bool) -> list[int]:
        for item in timed:
            item.replay()
        return [int(self.ns * np.exp(self.rng.normal(0, 1e-3))) for _ in timed]

    def recover(self) -> None:
        pass

    def state(self) -> State:
        return State(1500)
