"""Ratios of rows that were timed at different times: no block of one is a pair with a block of the other."""

import math
from functools import lru_cache

import numpy as np

from labkit.bench.verdict import BAND, FAR, NAN, Interval, Samples, student

RESAMPLES = 500  # thousands of rows are compared at once, and Welch's interval is wider of three processes


def ratio(slow: Samples, fast: Samples) -> Interval:
    """time(slow) / time(fast): above 1 where `fast` is the faster one.

    The centre is the ratio of the means, over processes, of the medians of their blocks, by logarithm. The interval
    resamples the processes and blocks of each by themselves; where both have several processes, it is never less than
    Welch's of these. runs: processes of the one that has fewer.
    """
    parts = [tuple(np.log(one.ns[one.run == run]).tobytes() for run in np.unique(one.run)) for one in (slow, fast)]
    return _ratio(*parts) if all(parts) else NAN


@lru_cache(20_000)
def _ratio(slow: tuple[bytes, ...], fast: tuple[bytes, ...]) -> Interval:
    rng = np.random.default_rng(0)
    (centres, draws), (centres_2, draws_2) = (_resampled(list(map(np.frombuffer, one)), rng) for one in (slow, fast))
    mid = float(np.mean(centres) - np.mean(centres_2))
    low, high = np.percentile(draws - draws_2, [2.5, 97.5])
    spread = math.hypot(student(centres), student(centres_2))
    pairs = min(sum(map(len, one)) // 8 for one in (slow, fast))
    ends = (mid, min(low, mid - spread), max(high, mid + spread))
    return Interval(*(math.exp(value) for value in ends), min(len(slow), len(fast)), pairs)


def _resampled(logs: list[np.ndarray], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The median of each process, and `RESAMPLES` means of resampled ones."""
    medians = np.stack([np.median(rng.choice(v, size=(RESAMPLES, len(v))), axis=1) for v in logs])
    chosen = rng.integers(0, len(logs), size=(len(logs), RESAMPLES))
    return np.array([np.median(v) for v in logs]), medians[chosen, np.arange(RESAMPLES)].mean(axis=0)


def verdict(interval: Interval, noise: float) -> str:
    """faster, slower, same or unclear. noise: half width of the wider A/A interval of the two runs, NaN if unknown.

    Two runs differ by more than two twins of one run: a difference within `BAND` is none, and where the A/A interval is
    wider than that, or a run has one process alone, which does not tell how processes differ, it must be `FAR` times as
    large as both.
    """
    if not math.isfinite(interval.mid) or not math.isfinite(noise):
        return "unclear"
    threshold = max(noise, BAND) * (FAR if noise > BAND or interval.runs < 2 else 1)
    if interval.low > 1 + threshold:
        return "faster"
    if interval.high < 1 - threshold:
        return "slower"
    return "same" if interval.half_width <= max(noise, BAND) else "unclear"
