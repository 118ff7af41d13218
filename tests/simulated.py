"""A GPU that is none: known times, drift, throttling and noise, behind the interface that the timing uses."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench import timing
from labkit.bench.machine import Machine, Timed
from labkit.bench.spec import CONTROL
from labkit.bench.timing import State

MACHINE = Machine("simulated-gpu", "Simulated GPU", "1.0", 90, 132, 50 << 20, 80 << 30, 3.35, 1980, 700)


@dataclass
class SimulatedDevice:
    """`us`: true time of each prepared name. drift: relative growth over a block, and inside it.

    process: offset of this process. reasons: throttle reasons by block number (from 0, warm-up blocks included); a
    throttled block runs 15 % slower.
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
        levels = slow * (1 + self.drift * (self.blocks + np.arange(len(timed)) / len(timed)))
        self.blocks += 1
        self.orders.append(list(timed))
        draws = self.rng.normal(0, self.noise, len(timed))
        return [
            round(1e3 * self.us[name] * level * (1 + self.process.get(name, 0.0)) * float(np.exp(draw)))
            for name, level, draw in zip(timed, levels, draws, strict=True)
        ]

    def state(self) -> State:
        return State(1980, self.reasons.get(self.blocks - 1, frozenset()))


def experiment(
    us: Mapping[str, float], twin: str, *, processes: int = 3, offset: float = 0.0, seed: int = 0, **device: Any
) -> pd.DataFrame:
    """Rows of one case, as far as verdicts need them: `us` and an A/A control of `twin`, timed in some processes.

    offset: in each process every variant is off by up to this, its own way. device: more of SimulatedDevice.
    """
    names = [*us, CONTROL]
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(processes):
        process = dict(zip(names, rng.uniform(-offset, offset, len(names)), strict=True))
        gpu = SimulatedDevice({**us, CONTROL: us[twin]}, process=process, seed=int(rng.integers(2**32)), **device)
        parts.append(timing.measure(gpu, {name: name for name in names}, twins=(twin, CONTROL), seed=seed))
    options = {name: json.dumps({"repeats": twin} if name == CONTROL else {}) for name in names}
    return pd.DataFrame(
        {
            "variant": name,
            "mode": "graph",
            "options": options[name],
            "ok": True,
            "run": [run for run, part in enumerate(parts) for _ in part.block],
            "block": [block for part in parts for block in part.block],
            "samples_ns": [ns for part in parts for ns in part.ns[name]],
        }
        for name in names
    )


class Stream:
    """Runs work when it is called with it; while it is captured, keeps it for the replays."""

    def __init__(self):
        self.captured: list | None = None

    def __call__(self, work) -> None:
        if self.captured is None:
            work()
        else:
            self.captured.append(work)


TIMED, SIDE = Stream(), Stream()  # the stream that `GraphDevice` captures, and another one


class HostDevice:
    """A device for whole sweeps without a GPU: runs every call on the CPU and reports made-up times of its variant.

    A call may bring the time that is reported for it: its attribute `ns`.
    """

    def __init__(self, ns: int = 10_000):
        import torch

        self.machine, self.torch_device, self.ns = MACHINE, torch.device("cpu"), ns
        self.rng = np.random.default_rng(0)

    def prepare(self, calls, mode: str, whole: bool = False) -> Timed:
        def replay():
            for call in calls:
                call()

        replay.ns = getattr(calls[0], "ns", self.ns)
        return Timed(replay, len(calls), len(calls), mode == "eager")

    def time(self, timed: Sequence[Timed], hot: bool) -> list[int]:
        for item in timed:
            if hot:
                item.replay()
            if item.before:
                item.before()
            item.replay()
            if item.after:
                item.after()
        return [round(item.replay.ns * np.exp(self.rng.normal(0, 1e-3))) for item in timed]

    def recover(self) -> None:
        pass

    def state(self) -> State:
        return State(1500)


class GraphDevice(HostDevice):
    """One whose replays of a reader's function do what its calls put on `TIMED`, and nothing else, as a CUDA graph."""

    def prepare(self, calls, mode: str, whole: bool = False) -> Timed:
        made = super().prepare(calls, mode, whole)
        if not hasattr(calls[0], "function"):
            return made
        TIMED.captured = []
        made.replay()
        graph, TIMED.captured = TIMED.captured, None

        def replay():
            for work in graph:
                work()

        replay.ns = made.replay.ns
        return Timed(replay, made.calls, made.sets)
