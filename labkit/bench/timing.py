"""How long: variants timed against each other in randomised, interleaved blocks.

Written against a small device interface, so that a simulated device with known ratios, drift, throttling and noise can
take the place of a GPU. Ideas: interleaved rounds (asv), buffers rotated over several L2 sizes (FlashInfer), clocks
watched around every sample (nvbench); no public tool pairs the samples of interleaved GPU variants.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from labkit.bench.verdict import BAND, Samples, ratio

BLOCKS = 10  # per process; three processes give thirty pairs
WARM_UP_BLOCKS = 2
REPEATS_WHEN_THROTTLED = 3
EXTENSIONS_WHEN_NOISY = 2  # an A/A interval wider than ±1 % is measured again this often
THERMAL_OR_HARDWARE = frozenset({"hardware slowdown", "hardware thermal", "hardware power brake", "software thermal"})


@dataclass(frozen=True)
class State:
    """What the driver says between blocks. sm_mhz: SM clock; reasons: active throttle reasons ("power cap", …)."""

    sm_mhz: int = 0
    reasons: frozenset[str] = frozenset()


class Device(Protocol):
    """What a timing needs of a GPU."""

    def time(self, timed: Sequence[Any], hot: bool) -> list[int]:
        """Run the prepared calls once each, in order; ns per call of each. hot: touch the buffers first, untimed."""
        ...

    def state(self) -> State:
        """Clocks and throttle reasons now."""
        ...


class Watcher(Protocol):
    """What looks at the blocks of a timing, outside what is timed."""

    def before_block(self) -> None:
        """A block is about to begin."""
        ...

    def after_block(self) -> None:
        """Its timed calls have ended."""
        ...


@dataclass
class Timing:
    """Samples of every variant, block by block. throttled: reasons joined by "+", empty where none."""

    ns: dict[str, list[int]]
    block: list[int] = field(default_factory=list)
    throttled: list[str] = field(default_factory=list)
    sm_mhz: list[int] = field(default_factory=list)

    def append(self, ns: Mapping[str, int], state: State) -> None:
        """Add a block: ns per call of each variant, and the state that goes with it."""
        for name, value in ns.items():
            self.ns[name].append(value)
        self.block.append(len(self.block))
        self.throttled.append("+".join(sorted(state.reasons)))
        self.sm_mhz.append(state.sm_mhz)

    def samples(self, name: str) -> Samples:
        """The samples of one variant, as one process's."""
        return Samples(np.zeros(len(self.block), int), np.asarray(self.block), np.asarray(self.ns[name], float))


def measure(
    device: Device,
    timed: Mapping[str, Any],
    *,
    hot: bool = False,
    twins: tuple[str, str] | None = None,
    blocks: int = BLOCKS,
    seed: int = 0,
    watchers: Sequence[Watcher] = (),
) -> Timing:
    """Time prepared variants in `blocks` blocks, in a new random order each.

    twins: a variant and its A/A control; while their interval is wider than ±1 % blocks are added, at most twice.
    A block under a hardware or thermal throttle is repeated, three times at most, then kept and marked; a power cap is
    recorded, since it is how the GPU runs. watchers: told of every block, those of the warm-up too.
    """
    rng = np.random.default_rng(seed)
    timing = Timing({name: [] for name in timed})
    for _ in range(WARM_UP_BLOCKS):
        _block(device, timed, hot, rng, watchers)
    for _ in range(1 + EXTENSIONS_WHEN_NOISY):
        for _ in range(blocks):
            timing.append(*_quiet_block(device, timed, hot, rng, watchers))
        if twins is None or ratio(timing.samples(twins[0]), timing.samples(twins[1])).half_width <= BAND:
            break
    return timing


def _quiet_block(
    device: Device, timed: Mapping[str, Any], hot: bool, rng: Any, watchers: Sequence[Watcher]
) -> tuple[dict[str, int], State]:
    for _ in range(1 + REPEATS_WHEN_THROTTLED):
        before = device.state().reasons
        result, after = _block(device, timed, hot, rng, watchers)
        reasons = before | after.reasons
        if not reasons & THERMAL_OR_HARDWARE:
            break
    return result, State(after.sm_mhz, reasons)


def _block(
    device: Device, timed: Mapping[str, Any], hot: bool, rng: Any, watchers: Sequence[Watcher]
) -> tuple[dict[str, int], State]:
    order = [list(timed)[i] for i in rng.permutation(len(timed))]
    for one in watchers:
        one.before_block()
    ns, state = device.time([timed[name] for name in order], hot), device.state()
    for one in watchers:
        one.after_block()
    return dict(zip(order, ns, strict=True)), state
