"""The timing, on a device whose true times, drift, throttling and noise are known."""

from collections.abc import Sequence

import numpy as np
import pytest
from simulated import SimulatedDevice

from labkit.bench import timing, verdict

US = {"a": 100.0, "b": 100.0, "c": 50.0}
THERMAL, POWER = frozenset({"hardware thermal"}), frozenset({"power cap"})
FIRST = timing.WARM_UP_BLOCKS  # number of the first block that is kept


def measure(device: SimulatedDevice, names: Sequence[str] = tuple(US), **options) -> timing.Timing:
    return timing.measure(device, {name: name for name in names}, **options)


def ratio(found: timing.Timing, slow: str, fast: str) -> verdict.Interval:
    return verdict.ratio(found.samples(slow), found.samples(fast))


def test_every_variant_has_a_sample_in_every_block_after_the_warm_up():
    device = SimulatedDevice(US)
    found = measure(device, blocks=7)
    assert device.blocks == timing.WARM_UP_BLOCKS + 7
    assert found.block == list(range(7))
    assert {name: len(ns) for name, ns in found.ns.items()} == dict.fromkeys(US, 7)
    assert found.sm_mhz == [1980] * 7
    assert found.throttled == [""] * 7


def test_samples_go_to_the_variant_that_they_are_of():
    found = measure(SimulatedDevice({"a": 10, "b": 1000, "c": 100}, noise=0))
    assert found.ns == {"a": [10_000] * 10, "b": [1_000_000] * 10, "c": [100_000] * 10}


def test_the_order_is_random_and_another_one_in_each_block():
    device = SimulatedDevice(US)
    measure(device, blocks=40)
    assert all(sorted(order) == sorted(US) for order in device.orders)
    assert len(set(map(tuple, device.orders))) == 6  # all the orders of three
    assert any(one != two for one, two in zip(device.orders, device.orders[1:], strict=False))
    firsts = [order[0] for order in device.orders]
    assert min(firsts.count(name) for name in US) >= 5  # 14 are expected


def test_the_seed_decides_the_order():
    devices = [SimulatedDevice(US) for _ in range(3)]
    for device, seed in zip(devices, (1, 1, 2), strict=True):
        measure(device, seed=seed)
    assert devices[0].orders == devices[1].orders != devices[2].orders


def test_drift_cancels_in_the_paired_ratio():
    held = 0
    for seed in range(20):
        found = measure(SimulatedDevice(US, drift=0.01, seed=seed), seed=seed)
        paired = ratio(found, "a", "c")
        assert paired.mid == pytest.approx(2.0, rel=0.01)
        held += paired.low <= 2.0 <= paired.high
        # The controls: without the pairs the same samples say far less, and timed one after the other they are wrong.
        mixed = timing.Timing(found.ns, list(np.random.default_rng(seed).permutation(len(found.block))))
        unpaired = verdict.ratio(mixed.samples("a"), found.samples("c"))
        assert unpaired.high - unpaired.low > 2 * (paired.high - paired.low)
        device = SimulatedDevice(US, drift=0.01, seed=seed)
        alone = [np.median(measure(device, [name], seed=seed).ns[name]) for name in ("a", "c")]
        assert alone[0] / alone[1] < 2.0 / 1.08
    assert held >= 17


def test_drift_inside_a_block_does_not_favour_a_variant():
    mids = [ratio(measure(SimulatedDevice(US, drift=0.01, seed=s), seed=s), "a", "b").mid for s in range(40)]
    assert np.mean(mids) == pytest.approx(1.0, abs=0.001)  # in a fixed order b would be 0.33 % or 0.67 % later


def test_a_thermally_throttled_block_is_repeated_and_not_kept():
    device = SimulatedDevice(US, reasons={FIRST + 3: THERMAL})
    found = measure(device)
    assert len(found.block) == timing.BLOCKS
    assert found.throttled == [""] * timing.BLOCKS
    assert max(found.ns["a"]) < 1.05e5  # a throttled one takes 115 µs
    # The reasons are read before a block too, so that the first repeat, right after it, does not count either.
    assert device.blocks == timing.WARM_UP_BLOCKS + timing.BLOCKS + 2


@pytest.mark.parametrize("reason", sorted(timing.THERMAL_OR_HARDWARE))
def test_a_block_that_stays_throttled_is_kept_and_marked(reason: str):
    tries = 1 + timing.REPEATS_WHEN_THROTTLED
    reasons = {FIRST + 3 + i: frozenset({reason}) | POWER for i in range(tries)}
    device = SimulatedDevice(US, reasons=reasons)
    found = measure(device)
    assert found.throttled == ["", "", "", f"{'+'.join(sorted([reason, 'power cap']))}"] + [""] * 6
    assert found.block == list(range(timing.BLOCKS))
    slow = [ns > 1.1e5 for ns in found.ns["a"]]
    assert slow == [bool(text) for text in found.throttled]
    assert ratio(found, "a", "c").mid == pytest.approx(2.0, rel=0.005)  # the other variants were as slow


def test_a_gpu_that_is_throttled_all_the_time_is_measured_and_marked():
    device = SimulatedDevice(US, reasons=dict.fromkeys(range(1000), THERMAL))
    found = measure(device)
    assert found.throttled == ["hardware thermal"] * timing.BLOCKS
    assert device.blocks == timing.WARM_UP_BLOCKS + timing.BLOCKS * (1 + timing.REPEATS_WHEN_THROTTLED)


def test_a_power_cap_is_recorded_and_not_repeated():
    device = SimulatedDevice(US, reasons={FIRST + 3: POWER})
    found = measure(device)
    assert device.blocks == timing.WARM_UP_BLOCKS + timing.BLOCKS
    assert found.throttled == ["", "", "", "power cap", "power cap"] + [""] * 5  # as read after, and before the next
    assert found.ns["a"][3] > 1.1e5


def test_blocks_are_extended_twice_at_most_where_the_twins_are_noisy():
    assert len(measure(SimulatedDevice(US, noise=0.05), twins=("a", "b")).block) == 3 * timing.BLOCKS
    assert len(measure(SimulatedDevice(US, noise=0.002), twins=("a", "b")).block) == timing.BLOCKS
    assert len(measure(SimulatedDevice(US, noise=0.05)).block) == timing.BLOCKS  # no control, nothing to go by


def test_blocks_are_extended_only_as_long_as_the_twins_are_noisy():
    lengths = [len(measure(SimulatedDevice(US, 0.008, seed=s), twins=("a", "b"), seed=s).block) for s in range(20)]
    assert set(lengths) == {10, 20, 30}  # at 0.8 % the interval is now inside ±1 %, now outside


def test_twins_that_differ_are_noise_however_quiet():
    found = measure(SimulatedDevice(US, noise=0.0005, process={"b": 0.02}), twins=("a", "b"))
    assert len(found.block) == 3 * timing.BLOCKS


def test_hot_is_handed_to_the_device():
    class Device(SimulatedDevice):
        def time(self, timed: Sequence[str], hot: bool) -> list[int]:
            seen.add(hot)
            return super().time(timed, hot)

    for hot in (True, False):
        seen: set[bool] = set()
        measure(Device(US), hot=hot)
        assert seen == {hot}
