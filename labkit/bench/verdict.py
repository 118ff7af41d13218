"""How sure: paired bootstrap ratios and the words for them.

A ratio is taken inside one block of one process, where two variants ran within milliseconds of each other, so that a
drift of the clocks cancels. Its interval resamples processes first and blocks second (a hierarchical bootstrap), since
two processes differ in ways (addresses, clocks) that the blocks of one do not show.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench import ledger
from labkit.bench.spec import CONTROL

BAND = 0.01  # what counts as the same, and the widest A/A interval that is trusted to be all the noise there is
FAR = 3  # beyond a wider A/A interval by this factor, a difference is no noise either
RESAMPLES = 2000
NO_SLOWER = 0.99
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t at 1, 2, … degrees of freedom


@dataclass(frozen=True)
class Interval:
    """A ratio of times with its 95 % interval. runs: processes; pairs: blocks in which both variants have a sample."""

    mid: float
    low: float
    high: float
    runs: int
    pairs: int

    @property
    def half_width(self) -> float:
        """The largest distance of the interval's ends from 1."""
        return max(abs(self.low - 1), abs(self.high - 1))

    @property
    def no_slower(self) -> bool:
        """Whether the lower bound is at least 0.99."""
        return self.low >= NO_SLOWER

    def __str__(self) -> str:
        return f"{self.mid:.3f} [{self.low:.3f}, {self.high:.3f}]"


NAN = Interval(float("nan"), float("nan"), float("nan"), 0, 0)


def ratio(slow: "Samples", fast: "Samples") -> Interval:
    """time(slow) / time(fast), paired by (run, block): above 1 where `fast` is the faster one.

    The centre is the mean over processes of the median log ratio of the process's blocks.
    """
    return _bootstrap(tuple(logs.tobytes() for logs in _paired_logs(slow, fast)), RESAMPLES)


@lru_cache(20_000)  # the views of a page ask for the same pairs again and again
def _bootstrap(paired: tuple[bytes, ...], resamples: int) -> Interval:
    """The interval of log ratios (float64), an array for each process."""
    if not paired:
        return NAN
    logs = [np.frombuffer(values) for values in paired]
    rng = np.random.default_rng(0)
    # medians[r]: `resamples` medians of resampled blocks of process r; then processes are resampled over them.
    medians = np.stack([np.median(rng.choice(v, size=(resamples, len(v))), axis=1) for v in logs])
    centres = np.array([np.median(values) for values in logs])
    mid, low, high = map(float, np.exp(_of_processes(centres, medians, rng)))
    return Interval(mid, low, high, len(logs), sum(map(len, logs)))


def _of_processes(centres: np.ndarray, medians: np.ndarray, rng: np.random.Generator) -> tuple[float, float, float]:
    """Mean of the processes' centres with its interval. medians: resampled, [processes, resamples]."""
    count, resamples = medians.shape
    mid = np.mean(centres)
    chosen = rng.integers(0, count, size=(count, resamples))
    draws = np.stack([medians[chosen[i], rng.permutation(resamples)] for i in range(count)]).mean(axis=0)
    low, high = np.percentile(draws, [2.5, 97.5])
    # A bootstrap of two or three processes is too narrow where they differ: never less than Student's interval of them.
    spread = student(centres)
    return mid, min(low, mid - spread), max(high, mid + spread)


def in_process(measured: Sequence["Samples"], quantity: Callable[..., Any], log: bool = True) -> Interval:
    """A quantity of the medians of several rows, each process by itself: what was measured apart in it is no pair.

    quantity: medians in ns, a number or an array each -> the quantity, element by element. log: the centre is the mean
    over processes of its logarithm; else of itself, which may be zero or less. pairs: samples of the shortest row.
    """
    runs = sorted(set.intersection(*(set(one.run.tolist()) for one in measured))) if measured else []
    kept = tuple(tuple(one.ns[one.run == run].tobytes() for one in measured) for run in runs)
    return _in_process(kept, quantity, log, RESAMPLES)


@lru_cache(20_000)
def _in_process(kept: tuple[tuple[bytes, ...], ...], quantity: Callable[..., Any], log: bool, count: int) -> Interval:
    """kept: of each process, the samples of each row as bytes of float64."""
    if not kept:
        return NAN
    rng = np.random.default_rng(0)
    centres, medians = [], []
    for process in kept:
        rows = [np.frombuffer(values) for values in process]
        centres.append(quantity(*map(np.median, rows)))
        medians.append(quantity(*(np.median(rng.choice(v, size=(count, len(v))), axis=1) for v in rows)))
    to, back = (np.log, np.exp) if log else (np.asarray, np.asarray)
    mid, low, high = map(float, back(_of_processes(to(np.array(centres)), to(np.stack(medians)), rng)))
    return Interval(mid, low, high, len(kept), sum(min(len(v) // 8 for v in process) for process in kept))


def student(centres: np.ndarray) -> float:
    """Half width of the 95 % t-interval of the processes' centres; 0 for one process, which says nothing of others."""
    if len(centres) < 2:
        return 0.0
    quantile = T_975[min(len(centres) - 1, len(T_975)) - 1]
    return float(quantile * centres.std(ddof=1) / math.sqrt(len(centres)))


@dataclass(frozen=True)
class Samples:
    """The samples of one row: which process, which block, and ns per call; equally long."""

    run: np.ndarray
    block: np.ndarray
    ns: np.ndarray


def _paired_logs(a: Samples, b: Samples) -> list[np.ndarray]:
    """Log ratios of the blocks that both have, one array a process."""
    if np.array_equal(a.run, b.run) and np.array_equal(a.block, b.block):  # timed together: the usual case
        logs = np.log(a.ns) - np.log(b.ns)
        return [logs[a.run == run] for run in np.unique(a.run)]
    left = pd.Series(np.log(a.ns), index=pd.MultiIndex.from_arrays([a.run, a.block]))
    right = pd.Series(np.log(b.ns), index=pd.MultiIndex.from_arrays([b.run, b.block]))
    both = (left - right).dropna()
    return [group.to_numpy() for _, group in both.groupby(level=0)]


def verdict(interval: Interval, noise: Interval) -> str:
    """faster, slower, same or unclear: the second of the ratio's two against the first.

    *Faster* and *slower* lie wholly beyond the A/A noise; where that interval is not inside ±1 %, beyond `FAR` times as
    much. *Same* lies inside ±1 %, as the A/A interval must.
    """
    if not np.isfinite([noise.half_width, interval.mid]).all():
        return "unclear"
    if noise.half_width <= BAND and interval.half_width <= BAND:
        return "same"
    threshold = beyond(noise.half_width)
    if interval.low > 1 + threshold:
        return "faster"
    if interval.high < 1 - threshold:
        return "slower"
    return "unclear"


def beyond(noise: float) -> float:
    """How far a ratio must be from 1 to be no noise. noise: half width of the A/A interval."""
    return noise * (1 if noise <= BAND else FAR)


@dataclass(frozen=True)
class Comparison:
    """`variant` against `against` in one case. ratio above 1: `variant` is faster; noise: the case's A/A interval."""

    variant: str
    against: str
    ratio: Interval
    noise: Interval
    verdict: str

    @property
    def no_slower(self) -> bool:
        """Lower bound at least 0.99 and not unclear."""
        return self.verdict != "unclear" and self.ratio.no_slower

    def columns(self) -> dict[str, Any]:
        """As columns of a table: ratio, low, high, noise (half width, NaN without A/A), verdict, no slower, runs."""
        noise = self.noise.half_width if self.noise.pairs else math.nan
        ends = {"ratio": self.ratio.mid, "low": self.ratio.low, "high": self.ratio.high, "noise": noise}
        return ends | {"verdict": self.verdict, "no slower": self.no_slower, "runs": self.ratio.runs}


WORDS = ("faster", "same", "slower", "unclear")


def counted(verdicts: pd.Series) -> str:
    """How often each word occurs, in a phrase: "faster in 3, unclear in 1"."""
    ledger.note("counted", verdicts)
    counts = verdicts.value_counts()
    return ", ".join(f"{word} in {counts[word]}" for word in WORDS if word in counts)


def geometric_mean(values: pd.Series) -> float:
    """NaN without values."""
    mean = float(np.exp(np.log(values).mean())) if len(values) else math.nan
    ledger.note(f"geometric mean of {getattr(values, 'name', '') or 'values'}", {"ratio": mean, "cases": len(values)})
    return mean


def median_us(rows: pd.DataFrame) -> dict[str, float]:
    """µs of every usable variant. rows: of one case, cache and mode."""
    columns = (rows[name] for name in ("variant", "ok", "samples_ns"))
    return {variant: float(np.median(ns)) / 1e3 for variant, ok, ns in zip(*columns, strict=True) if ok}


def compare(rows: pd.DataFrame, variant: str, against: str) -> Comparison:
    """Compare two variants. rows: the rows of one case and cache; unusable (not ok) rows compare as unclear."""
    return compare_many(rows, [(variant, against)])[0]


def compare_many(rows: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
    """`compare` for several (variant, against) of one case and cache.

    Two variants of different modes were not timed in the same blocks, and are no pairs: of those, the medians of each
    process are compared (`in_process`).
    """
    known, modes = samples(rows), dict(zip(rows["variant"], rows["mode"], strict=True))
    noise, found = _aa(rows, known), []
    for variant, against in pairs:
        both = [known[name] for name in (against, variant) if name in known]
        together = modes.get(variant) == modes.get(against)
        interval = (ratio(*both) if together else in_process(both, np.divide)) if len(both) == 2 else NAN
        found.append(Comparison(variant, against, interval, noise, verdict(interval, noise)))
    return found


def aa(rows: pd.DataFrame) -> Interval:
    """The A/A interval of one case, cache and mode: the control against the variant that it repeats."""
    return _aa(rows, samples(rows))


def _aa(rows: pd.DataFrame, known: Mapping[str, Samples]) -> Interval:
    if CONTROL not in known:
        return NAN
    twin = json.loads(rows["options"].iloc[list(rows["variant"]).index(CONTROL)])["repeats"]
    return ratio(known[twin], known[CONTROL]) if twin in known else NAN


def samples(rows: pd.DataFrame) -> dict[str, Samples]:
    """Usable samples by variant. rows: of one case, cache and mode."""
    columns = (rows[name] for name in ("variant", "ok", "run", "block", "samples_ns"))
    return {
        variant: Samples(np.asarray(run), np.asarray(block), np.asarray(ns, dtype=float))
        for variant, ok, run, block, ns in zip(*columns, strict=True)
        if ok and len(ns)
    }
