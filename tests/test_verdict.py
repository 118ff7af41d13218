"""Ratios, intervals and verdicts: worked by hand, and against simulated experiments whose truth is known."""

import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import simulated
from hypothesis import given
from hypothesis import strategies as st

from labkit.bench import verdict
from labkit.bench.spec import CONTROL
from labkit.bench.verdict import Interval, Samples, ratio

QUIET = Interval(1.0, 0.998, 1.002, 3, 30)
NOISY = Interval(1.0, 0.98, 1.02, 3, 30)


def interval(low: float, high: float) -> Interval:
    return Interval(math.sqrt(low * high), low, high, 3, 30)


def samples(by_run: dict[int, list[float]]) -> Samples:
    run = [run for run, ns in by_run.items() for _ in ns]
    block = [block for ns in by_run.values() for block in range(len(ns))]
    return Samples(np.array(run), np.array(block), np.concatenate([*by_run.values()]))


@pytest.mark.parametrize(
    ("pair", "noise", "word"),
    [
        (interval(1.04, 1.06), QUIET, "faster"),
        (interval(0.94, 0.96), QUIET, "slower"),
        (interval(0.991, 1.009), QUIET, "same"),
        (interval(1.003, 1.006), QUIET, "same"),  # beyond the noise, but inside ±1 %
        (interval(0.985, 1.005), QUIET, "unclear"),  # slower, or the same?
        (interval(1.001, 1.5), QUIET, "unclear"),  # not beyond the noise
        (interval(1.003, 1.5), QUIET, "faster"),
        (interval(0.5, 0.999), QUIET, "unclear"),
        (interval(0.5, 0.997), QUIET, "slower"),
        (interval(0.5, 2.0), QUIET, "unclear"),
        (interval(1.05, 1.07), NOISY, "unclear"),  # where the A/A pair differs, only what is far beyond that is judged
        (interval(1.07, 1.09), NOISY, "faster"),
        (interval(0.93, 0.95), NOISY, "unclear"),
        (interval(0.91, 0.93), NOISY, "slower"),
        (interval(2.0, 2.1), Interval(1.0, 0.5, 2.0, 3, 30), "unclear"),
        (interval(0.995, 1.005), NOISY, "unclear"),
        (interval(2.0, 2.1), verdict.NAN, "unclear"),
        (interval(0.995, 1.005), verdict.NAN, "unclear"),
        (verdict.NAN, QUIET, "unclear"),
        (verdict.NAN, verdict.NAN, "unclear"),
    ],
)
def test_words(pair: Interval, noise: Interval, word: str):
    assert verdict.verdict(pair, noise) == word


@given(st.floats(0.5, 2), st.floats(0, 0.5), st.floats(0.9, 1), st.floats(1, 1.1))
def test_no_slower_never_passes_on_unclear(low: float, width: float, noise_low: float, noise_high: float):
    pair, noise = interval(low, low + width), interval(noise_low, noise_high)
    word = verdict.verdict(pair, noise)
    found = verdict.Comparison("new", "old", pair, noise, word)
    assert found.no_slower == (word != "unclear" and low >= 0.99)


def test_no_slower_has_its_bound_at_099():
    for low, passes in ((0.99, True), (0.9899, False)):
        assert verdict.Comparison("new", "old", interval(low, 1.005), QUIET, "same").no_slower is passes


def test_the_centre_is_the_mean_over_processes_of_the_median_log_ratio():
    fast = samples({0: [100, 100, 100], 1: [100, 100, 100], 2: [10, 10, 10]})
    slow = samples({0: [50, 100, 800], 1: [200, 300, 200], 2: [320, 320, 10]})  # medians of the ratios: 1, 2 and 32
    found = ratio(slow, fast)
    assert found.mid == pytest.approx(4)
    assert (found.runs, found.pairs) == (3, 9)
    assert found.low < 4 < found.high


def test_a_constant_ratio_has_an_interval_without_width():
    fast = samples({run: [100.0 + 10 * run + block for block in range(10)] for run in range(3)})
    found = ratio(Samples(fast.run, fast.block, 1.25 * fast.ns), fast)
    assert (found.low, found.mid, found.high) == pytest.approx((1.25, 1.25, 1.25))
    assert str(found) == "1.250 [1.250, 1.250]"


def test_the_other_way_round_it_is_the_inverse():
    rng = np.random.default_rng(0)
    a, b = _draw(rng, 0.01, 0.01), _draw(rng, 0.01, 0.01)
    there, back = ratio(a, b), ratio(b, a)
    assert (1 / back.high, 1 / back.mid, 1 / back.low) == pytest.approx((there.low, there.mid, there.high), abs=1e-3)
    assert there.mid != pytest.approx(1, abs=1e-3)


def test_pairs_are_of_the_same_process_and_block():
    fast = samples({run: [100.0 * (1 + run) * (1 + block) for block in range(10)] for run in range(3)})
    slow = Samples(fast.run, fast.block, 2 * fast.ns)
    order = np.random.default_rng(0).permutation(len(fast.ns))
    mixed = Samples(slow.run[order], slow.block[order], slow.ns[order])
    assert ratio(mixed, fast) == ratio(slow, fast)
    some = slow.block >= 4  # blocks that only one has are left out
    found = ratio(Samples(slow.run[some], slow.block[some], slow.ns[some]), fast)
    assert (found.mid, found.runs, found.pairs) == (pytest.approx(2), 3, 18)


def test_without_a_pair_there_is_no_ratio():
    one, other = samples({0: [1.0, 2.0]}), samples({1: [1.0, 2.0]})
    empty = Samples(*(np.array([]) for _ in range(3)))
    for found in (ratio(one, other), ratio(one, empty), ratio(empty, empty)):
        assert math.isnan(found.mid)
        assert (found.runs, found.pairs) == (0, 0)
        assert verdict.verdict(found, QUIET) == "unclear"
        assert not found.no_slower


@pytest.mark.parametrize(
    ("truth", "word"), [(0.9, "slower"), (0.97, "slower"), (1.0, "same"), (1.05, "faster"), (2.0, "faster")]
)
def test_known_ratios_are_recovered(truth: float, word: str):
    found = [
        verdict.compare(simulated.experiment({"old": 100 * truth, "new": 100}, "old", seed=seed), "new", "old")
        for seed in range(10)
    ]
    assert [one.verdict for one in found] == [word] * 10
    assert [one.no_slower for one in found] == [word != "slower"] * 10
    assert sum(one.ratio.low <= truth <= one.ratio.high for one in found) >= 9
    assert all(one.ratio.mid == pytest.approx(truth, rel=0.004) for one in found)


def test_the_ratio_survives_drift_and_a_power_cap():
    reasons = {block: frozenset({"power cap"}) for block in range(6, 9)}
    rows = simulated.experiment({"old": 105, "new": 100}, "old", drift=0.01, reasons=reasons)
    found = verdict.compare(rows, "new", "old")
    assert found.verdict == "faster"
    assert found.ratio.mid == pytest.approx(1.05, rel=0.005)


@pytest.fixture(scope="module")
def equal() -> dict[float, list[pd.DataFrame]]:
    """200 experiments at each of two noises on variants of the same time; processes differ by up to 0.3 %."""
    us = {"one": 100, "two": 100}
    return {
        noise: [simulated.experiment(us, "one", offset=0.003, noise=noise, seed=seed) for seed in range(200)]
        for noise in (0.002, 0.03)
    }


@pytest.mark.parametrize(("noise", "judged"), [(0.002, 100), (0.03, 0)])
def test_a_variant_against_itself_is_same_or_unclear(equal: dict, noise: float, judged: int):
    pairs = [verdict.aa(rows) for rows in equal[noise]]
    itself = Counter(verdict.verdict(pair, pair) for pair in pairs)
    # Against itself it cannot be beyond its own noise; a third one of the same time, judged by that noise, could.
    third = Counter(verdict.compare(rows, "two", "one").verdict for rows in equal[noise])
    for words in (itself, third):
        assert words["same"] + words["unclear"] >= 190, words
        assert words["same"] >= judged, words


def test_noise_that_stays_leaves_only_what_is_far_beyond_it():
    for seed in range(10):
        us = {"old": 200, "near": 100 * 1.03, "new": 100}
        rows = simulated.experiment(us, "old", noise=0.05, seed=seed)
        assert rows["samples_ns"].map(len).eq(3 * 30).all()  # extended twice in each process
        far, near, same = verdict.compare_many(rows, [("new", "old"), ("new", "near"), ("old", "old")])
        assert far.noise.half_width > verdict.BAND
        assert [far.verdict, near.verdict, same.verdict] == ["faster", "unclear", "unclear"]
        assert far.no_slower
        assert not same.no_slower  # though its bound is above 0.99


def _draw(rng: np.random.Generator, offset: float, noise: float, processes: int = 3, blocks: int = 10) -> Samples:
    levels = np.repeat(rng.uniform(-offset, offset, processes), blocks) + rng.normal(0, noise, processes * blocks)
    run, block = np.repeat(np.arange(processes), blocks), np.tile(np.arange(blocks), processes)
    return Samples(run, block, 1e5 * np.exp(levels))


def _pooled(given: Samples) -> Samples:
    """The control: all blocks as if they were of one process."""
    return Samples(np.zeros_like(given.run), np.arange(len(given.run)), given.ns)


def test_processes_are_resampled_before_blocks():
    rng = np.random.default_rng(0)
    widths = {}
    for offset in (0.0, 0.01):
        pairs = [(_draw(rng, offset, 0.002), _draw(rng, offset, 0.002)) for _ in range(20)]
        nested = [ratio(a, b) for a, b in pairs]
        flat = [ratio(_pooled(a), _pooled(b)) for a, b in pairs]
        widths[offset] = np.median([(n.high - n.low) / (f.high - f.low) for n, f in zip(nested, flat, strict=True)])
    assert widths[0.0] < 4 < widths[0.01]  # where processes differ, the blocks alone promise too much


@pytest.mark.parametrize(("offset", "width"), [(0.001, 0.007), (0.003, 0.013)])
def test_intervals_hold_the_truth_95_times_in_100(offset: float, width: float):
    rng = np.random.default_rng(0)
    pairs = [(_draw(rng, offset, 0.002), _draw(rng, offset, 0.002)) for _ in range(300)]
    found = [ratio(a, b) for a, b in pairs]
    assert 0.93 <= np.mean([one.low <= 1 <= one.high for one in found]) < 1  # never wrong would be too wide
    assert np.median([one.high - one.low for one in found]) < width


def test_one_process_alone_promises_too_much():
    """Why a headline claim needs three: what one process cannot know is missing from its interval."""
    rng = np.random.default_rng(0)

    def held(processes: int) -> float:
        pairs = [(_draw(rng, 0.002, 0.002, processes), _draw(rng, 0.002, 0.002, processes)) for _ in range(200)]
        return float(np.mean([i.low <= 1 <= i.high for i in (ratio(a, b) for a, b in pairs)]))

    assert held(1) < 0.8 < held(3)


def test_rows_that_are_not_ok_compare_as_unclear():
    rows = simulated.experiment({"old": 200, "new": 100}, "old")
    assert verdict.compare(rows, "new", "old").verdict == "faster"
    for name in ("old", "new", CONTROL):
        bad = rows.assign(ok=rows["variant"] != name)
        found = verdict.compare(bad, "new", "old")
        assert found.verdict == "unclear"
        assert not found.no_slower
    assert verdict.compare(rows, "new", "no such variant").verdict == "unclear"
    assert math.isnan(verdict.aa(rows[rows["variant"] != CONTROL]).mid)


def test_many_pairs_are_compared_as_one_by_one():
    rows = simulated.experiment({"old": 200, "new": 100, "none": 100}, "old")
    pairs = [("new", "old"), ("old", "new"), ("none", "new"), ("gone", "old")]
    found = verdict.compare_many(rows, pairs)
    assert [one.verdict for one in found] == ["faster", "slower", "same", "unclear"]
    assert found[:3] == [verdict.compare(rows, *pair) for pair in pairs[:3]]


def test_the_control_is_compared_with_what_it_repeats():
    rows = simulated.experiment({"old": 200, "new": 100}, "new")
    assert verdict.aa(rows).half_width < verdict.BAND
    assert verdict.aa(rows).mid == pytest.approx(1, abs=0.01)


def test_a_quantity_is_of_each_process_by_itself():
    """One process runs at half the pace of the others, and blocks are in no order: the share is the same in each."""
    part, rest = {0: [2, 2, 4], 1: [4, 8, 4], 2: [2, 3, 2]}, {0: [6, 5, 6], 1: [12, 12, 9], 2: [6, 6, 6]}
    found = verdict.in_process([samples(part), samples(rest)], lambda a, b: a / (a + b))
    assert (found.mid, found.runs, found.pairs) == (pytest.approx(0.25), 3, 9)
    assert found.low <= 0.25 < found.high
    apart = verdict.in_process([samples({0: [3.0], 1: [1.0]}), samples({1: [1.0], 2: [4.0]})], lambda a, b: a / b)
    assert (apart.mid, apart.runs) == (1, 1)  # the one process that has both
    assert verdict.in_process([samples({0: [1.0]}), samples({1: [1.0]})], lambda a, b: a / b).runs == 0


def test_processes_that_differ_make_a_quantity_wide():
    found = verdict.in_process([samples({run: [us] * 9 for run, us in enumerate((10.0, 20.0, 40.0))})], lambda a: a)
    half = 4.303 * math.log(2) / math.sqrt(3)
    assert (found.low, found.high) == (pytest.approx(20 * math.exp(-half)), pytest.approx(20 * math.exp(half)))


def test_a_difference_may_be_zero_or_less():
    a, b = samples({0: [1.0] * 5, 1: [2.0] * 5}), samples({0: [3.0] * 5, 1: [2.0] * 5})
    found = verdict.in_process([a, b], lambda a, b: a - b, log=False)
    assert (found.mid, found.runs) == (-1, 2)
    assert found.high > 0
