"""How long a call will take: of every variant, from what its launches execute and move, on ceilings of `00_machine`.

Of each launch (`FACTS`), where k_… are the ten parameters of a model (`models.json`), times in µs:

    memory  = bytes / rate of device memory (read, or in place: as the case's floor says)
    l2      = k_l2 · l2_bytes / rate of reading what is in the L2
    units   = share · (k_instruction · instructions / (4 · SMs · clock) + k_line · lines / (SMs · clock)
              + (k_mma · mma_flops + k_wgmma · wgmma_flops) / FLOP rate)
    latency = k_round · rounds · waves
    p       = k_overlap · (warps on a scheduler) ^ k_overlap_warps, from 1 to 12
    time    = k_start or k_start_dependent + (memory^p + l2^p + units^p + latency^p)^(1/p)

and a call is its launches one after the other. `share` is how much more the SM with most programs has than the mean;
`waves` how often the GPU is filled. A scheduler issues one instruction a cycle, and the caches answer for one line of
128 bytes a cycle and SM: k_instruction and k_line say how many cycles it is in practice. What of the four is hidden
behind the longest depends on how many warps there are to switch between: with p = 1 nothing, with p = 12 nearly all.
The form is a roofline's (Williams, Waterman and Patterson 2009) with a soft maximum; what is counted is what Hong and
Kim's model counts (2009). No parameter belongs to a kernel, a study or a GPU.

How far it holds: `left_out`, `summary` and the bars in tests/test_predict.py. What it leaves out: shared memory and its
barriers, shuffles, which instructions are half as fast, clocks that fall at the power limit, weights that are read
again from memory since they do not stay in the L2. Versions stay: a row that was predicted with one can be predicted
with it again.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench.records import times_us
from labkit.evidence.roofline import MEMORY, Ceilings
from labkit.evidence.sheets import sheets
from labkit.kernels.tuned import slug

FACTS = {
    "kernel": "name",
    "code": "hash of what it was compiled from",
    "programs": "that have work",
    "warps": "of a program",
    "per_sm": "programs that fit on an SM at once",
    "bytes": "through device memory, at least",
    "limit": "the rate of memory that bounds them: read, in_place or copy",
    "l2_bytes": "that multiprocessors ask the L2 for",
    "instructions": "executed, of all warps",
    "lines": "of 128 bytes that loads of global memory touch, added up over all warps' loads",
    "mma_flops": "of matrix instructions of a single warp, padding included",
    "wgmma_flops": "of those of four warps, padding included, and as many more as shared memory makes them last longer",
    "rounds": "of loads that wait for each other, of the program that has most",
    "dependent": "whether it may start before the launch in front of it has ended",
}
_TEXT = ("kernel", "code", "limit")
KEY = ("study", "op", "case", "variant", "kernel_sha")  # of a row, beside its GPU
PARAMETERS = (
    "start", "start_dependent", "overlap", "overlap_warps", "l2", "instruction", "line", "mma", "wgmma", "round",
)  # fmt: skip
# What they would be for hardware that does what its description says: µs of a launch with first loads, and of one that
# starts early; two things at once half hidden; one instruction, one line a cycle; mma.sync at half of wgmma's rate;
# a load from memory. The fit is drawn towards these, as by so many rows each: what no row tells stays as it is here.
EXPECTED = {
    "start": 1.8, "start_dependent": 0.9, "overlap": 2.0, "overlap_warps": 0.3, "l2": 0.7, "instruction": 1.2,
    "line": 0.7, "mma": 1.4, "wgmma": 1.0, "round": 0.7,
}  # fmt: skip
EXPECTED_ROWS = 0.4
HUBER = 0.1  # of |ln(predicted / measured)|: beyond, an error counts by its size, not its square
MOST_OVERLAP = 12.0
SCHEDULERS = 4  # of an SM
HERE = Path(__file__).parent
LATEST = "2"

# ---- GPUs


@dataclass(frozen=True)
class Gpu:
    """A GPU as predictions take it. sm_mhz: highest SM clock; measured: whether `00_machine` ran on it."""

    name: str
    ceilings: Ceilings
    sms: int
    sm_mhz: float
    l2_bytes: int
    measured: bool = True

    def memory(self, limit: str) -> float:
        """Best cold rate, bytes/µs."""
        return self.ceilings.best(limit if limit in MEMORY else "read") / 1e6

    @property
    def l2(self) -> float:
        """Best rate of reading what is in the L2, bytes/µs."""
        return self.ceilings.best("read", "hot") / 1e6

    @property
    def flops(self) -> float:
        """Best rate of bf16 products, FLOP/µs."""
        return self.ceilings.best("bf16") / 1e6

    @property
    def cycles(self) -> float:
        """Cycles of all SMs, 1/µs."""
        return self.sms * self.sm_mhz


def by_sheet(name: str, like: Gpu, like_sheet: str) -> Gpu:
    """A GPU of `sheets` that nobody measured: the ceilings of one that was, times the ratio of the two data sheets.

    So it is taken to reach the same part of its data sheet; the L2's rate goes with SMs times clock, launches stay.
    KeyError for a name that is not in `sheets`.
    """
    new, old = sheets()[name], sheets()[like_sheet]
    memory = new["memory_tbs"] / old["memory_tbs"]
    clocks = new["sms"] * new["sm_mhz"] / (old["sms"] * old["sm_mhz"])
    rates = {"bf16": "bf16_tflops", "fp16": "bf16_tflops", "fp8": "fp8_tflops", "int8": "int8_tops"}
    flops = {what: rate * new[rates[what]] / old[rates[what]] for what, rate in like.ceilings.flops.items()}
    ratios = {"cold": memory, "hot": clocks}
    launch = like.ceilings.launches.get("graph", 0.0)
    curves = {
        (limit, kind): (sizes, np.minimum(us, launch) + np.maximum(us - launch, 0.0) / ratios[kind])
        for (limit, kind), (sizes, us) in like.ceilings.curves.items()
    }
    ceilings = Ceilings(curves, flops, like.ceilings.launches)
    return Gpu(name, ceilings, new["sms"], new["sm_mhz"], new["l2_mib"] << 20, measured=False)


# ---- models


@cache
def models() -> dict[str, dict[str, Any]]:
    """Version -> its parameters, and of which rows, when and how they were fitted; and `transfer`, see `transfer`."""
    return json.loads((HERE / "models.json").read_text())


def parameters(version: str = LATEST) -> dict[str, float]:
    """Of a version; KeyError naming those there are for another."""
    if version not in models():
        raise KeyError(f"no model {version!r}; known: {', '.join(models())}")
    return models()[version]["parameters"]


@dataclass(frozen=True)
class Parts:
    """What the times of many launches are made of, arrays with an entry each; times in µs before any parameter.

    row: number of the call that a launch is of; warps: on a scheduler, resident at once.
    """

    row: np.ndarray
    memory: np.ndarray
    l2: np.ndarray
    instructions: np.ndarray
    lines: np.ndarray
    mma: np.ndarray
    wgmma: np.ndarray
    rounds: np.ndarray
    warps: np.ndarray
    dependent: np.ndarray

    @classmethod
    def of(cls, facts: pd.DataFrame, gpu: Gpu, row: Sequence[int]) -> "Parts":
        """facts: as `FACTS`, a line a launch; row: see above."""
        columns = {name: facts[name].to_numpy(float) for name in FACTS if name not in _TEXT}
        most = np.ceil(columns["programs"] / gpu.sms)  # programs of one SM
        share = most * gpu.sms / np.maximum(columns["programs"], 1)
        rates = facts["limit"].map({limit: gpu.memory(limit) for limit in MEMORY}).to_numpy(float)
        return cls(
            row=np.asarray(row, dtype=int),
            memory=columns["bytes"] / rates,
            l2=columns["l2_bytes"] / gpu.l2,
            instructions=share * columns["instructions"] / (SCHEDULERS * gpu.cycles),
            lines=share * columns["lines"] / gpu.cycles,
            mma=share * columns["mma_flops"] / gpu.flops,
            wgmma=share * columns["wgmma_flops"] / gpu.flops,
            rounds=columns["rounds"] * np.ceil(columns["programs"] / (gpu.sms * columns["per_sm"])),
            warps=np.maximum(np.minimum(columns["per_sm"], most) * columns["warps"] / SCHEDULERS, 1 / SCHEDULERS),
            dependent=columns["dependent"] > 0,
        )

    def times(self, k: Mapping[str, float], count: int) -> np.ndarray:
        """µs of each of `count` calls, by the formula of this module."""
        units = k["instruction"] * self.instructions + k["line"] * self.lines + k["mma"] * self.mma
        terms = [self.memory, k["l2"] * self.l2, units + k["wgmma"] * self.wgmma, k["round"] * self.rounds]
        p = np.clip(k["overlap"] * self.warps ** k["overlap_warps"], 1.0, MOST_OVERLAP)
        start = np.where(self.dependent, k["start_dependent"], k["start"])
        return np.bincount(self.row, start + _soft_maximum(terms, p), minlength=count)


def _soft_maximum(terms: Sequence[np.ndarray], p: np.ndarray | float) -> np.ndarray:
    """(Σ term^p)^(1/p): their sum for p = 1, the longest for a large p, and never less than that."""
    longest = np.maximum(np.maximum.reduce(list(terms)), 1e-9)
    return longest * sum((term / longest) ** p for term in terms) ** (1 / p)


def predict(facts: pd.DataFrame, gpu: Gpu, version: str = LATEST) -> float:
    """µs of one call. facts: of its launches, in order (`FACTS`)."""
    parts = Parts.of(facts, gpu, [0] * len(facts))
    return float(parts.times(parameters(version), 1)[0])


def predictions(rows: pd.DataFrame, launches: pd.DataFrame, gpu: Gpu, version: str = LATEST) -> pd.Series:
    """µs of cold rows (columns as in bench.records) on a GPU, theirs or another; NaN for others, and without facts.

    It is the time on the GPU, whatever the host takes to launch in mode eager.
    launches: facts of their launches, with the columns of `KEY`, `gpu` (folder name) and `place` in the call.
    """
    parts, known = _parts(rows, launches, gpu)
    found = pd.Series(math.nan, rows.index)
    found[known] = parts.times(parameters(version), len(rows))[known]
    return found


def _parts(rows: pd.DataFrame, launches: pd.DataFrame, gpu: Gpu) -> tuple[Parts, np.ndarray]:
    """Of all rows' launches, numbered by place among the rows; and which rows have any."""
    joined = _joined(rows, launches).sort_values(["row", "place"])
    parts = Parts.of(joined, gpu, joined["row"].to_numpy())
    return parts, np.bincount(parts.row, minlength=len(rows)) > 0


def _joined(rows: pd.DataFrame, launches: pd.DataFrame) -> pd.DataFrame:
    """The facts of the launches of cold rows; row: place among the rows."""
    keys = rows[list(KEY)].assign(gpu=rows["gpu"].map(slug), row=range(len(rows)))[rows["cache"] == "cold"]
    return keys.merge(launches, on=[*KEY, "gpu"])


# ---- fitting


@dataclass(frozen=True)
class Measured:
    """Rows of one GPU to fit or test by, those that have facts: their times, µs, and what those are made of."""

    rows: pd.DataFrame
    us: np.ndarray
    parts: Parts

    def times(self, k: Mapping[str, float]) -> np.ndarray:
        """As predicted with parameters, µs."""
        return self.parts.times(k, len(self.us))

    def errors(self, predicted: np.ndarray) -> np.ndarray:
        """|predicted / measured - 1|."""
        return np.abs(predicted / self.us - 1)


def measured(rows: pd.DataFrame, launches: pd.DataFrame, gpu: Gpu) -> Measured:
    """The rows that may be used and have facts; their column `code` names the compiled kernel that matters most."""
    us = times_us(rows).to_numpy()
    _, known = _parts(rows, launches, gpu)
    use = known & rows["ok"].to_numpy(bool) & np.isfinite(us)
    kept = rows[use]
    parts, _ = _parts(kept, launches, gpu)
    return Measured(kept.assign(code=_codes(kept, launches)), us[use], parts)


def _codes(rows: pd.DataFrame, launches: pd.DataFrame) -> list[str]:
    """Of each row the compiled kernel of its launch that executes most."""
    most = _joined(rows, launches).sort_values("instructions").groupby("row").last()
    return most.sort_index()["code"].tolist()


def fit(data: Sequence[Measured], weights: Sequence[np.ndarray] | None = None) -> dict[str, float]:
    """Parameters by least squares of ln(predicted / measured), with Huber's loss, in their logarithms.

    weights: of each row; 0 leaves it out. Each parameter is drawn to `EXPECTED`. Deterministic.
    """
    from scipy.optimize import least_squares  # half a second, for whoever fits

    weight = np.concatenate([np.ones(len(one.us)) for one in data] if weights is None else list(weights))
    center = np.log([EXPECTED[name] for name in PARAMETERS])
    logs = np.log(np.concatenate([one.us for one in data]))

    def residuals(x: np.ndarray) -> np.ndarray:
        k = dict(zip(PARAMETERS, np.exp(x), strict=True))
        off = np.log(np.concatenate([one.times(k) for one in data])) - logs
        return np.concatenate([off, x - center])

    def loss(squares: np.ndarray) -> np.ndarray:
        """Of squared residuals in HUBERs: Huber's of rows, by weight; what parameters are drawn by counts as it is."""
        rows, drawn = squares[: len(weight)], squares[len(weight) :]
        return np.concatenate([weight * _huber(rows), EXPECTED_ROWS * _square(drawn)], axis=1)

    found = least_squares(residuals, center, loss=loss, f_scale=HUBER).x
    return dict(zip(PARAMETERS, map(float, np.exp(found)), strict=True))


def _huber(squares: np.ndarray) -> np.ndarray:
    """Huber's loss of squared residuals, its first and second derivatives by them: [3, n]."""
    inside = squares <= 1
    root = np.sqrt(np.maximum(squares, 1.0))
    return np.stack([np.where(inside, squares, 2 * root - 1), 1 / root, np.where(inside, 0.0, -0.5 / root**3)])


def _square(squares: np.ndarray) -> np.ndarray:
    """The same of the squares themselves."""
    return np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])


# ---- how wrong it is


LEFT_OUT = ("code", "op", "study")


def left_out(data: Sequence[Measured], by: str = "code", folds: int = 0) -> list[np.ndarray]:
    """µs of every row as predicted by a fit that saw none of its kernel ("code"), its operation or its study.

    A compiled kernel of several rows, or of several GPUs, is left out as one. folds: kernels are left out in so many
    groups, which are by chance; 0: one at a time.
    """
    groups = [_groups(one.rows[by], folds) for one in data]
    found = [np.full(len(one.us), math.nan) for one in data]
    for group in sorted(set().union(*groups)):
        k = fit(data, [(some != group).astype(float) for some in groups])
        for one, some, predicted in zip(data, groups, found, strict=True):
            predicted[some == group] = one.times(k)[some == group]
    return found


def _groups(names: pd.Series, folds: int) -> np.ndarray:
    """Which fold a name is in, by its hash; without folds, the name itself."""
    return np.array([str(int(name, 16) % folds) if folds else name for name in names])


def summary(one: Measured, predicted: np.ndarray, by: str = "study") -> pd.DataFrame:
    """Error in percent of measured time: rows, median, 90th percentile and median with its sign; and of all rows."""
    errors, signed = one.errors(predicted), predicted / one.us - 1
    names = one.rows[by].to_numpy()
    lines = {}
    for name in [*dict.fromkeys(names), "all"]:
        some = (names == name) | (name == "all")
        median, most = np.quantile(errors[some], [0.5, 0.9])
        lines[name] = (int(some.sum()), 100 * median, 100 * most, 100 * float(np.median(signed[some])))
    return pd.DataFrame.from_dict(lines, orient="index", columns=["rows", "median %", "p90 %", "signed %"])


# ---- from one GPU to another


def transfer(rows: pd.DataFrame, old: Gpu, new: Gpu, version: str = LATEST) -> pd.DataFrame:
    """What cold rows of one GPU (columns as in bench.records) would take on another; of any variant, libraries' too.

    A row's time is taken apart into that of its least bytes on the old GPU, and a rest which would have given it:
    us^p = memory^p + rest^p, with p the version's `transfer`. The first goes with the memory's rate; of the rest, what
    the least FLOPs take goes with the rate of bf16 products, and what is left with SMs times clock:
    us_new^p = memory_new^p + rest_new^p. Of a variant that moves more than the least, such as a library's product of
    weights that were dequantised before, too little is taken to be memory: peers are up to three times as far off.
    Columns, µs: us_old, memory_old, memory_new, rest_old, rest_new, us_new.
    """
    p = models()[version]["transfer"]
    us, size = times_us(rows).to_numpy(), rows["floor_bytes"].to_numpy(float)
    which = _limits(rows["ceiling"], old)
    least = size / np.array([old.memory(limit) for limit in which], dtype=float)
    memory = np.minimum(least, MOST_MEMORY * us)
    faster = np.array([old.memory(limit) / new.memory(limit) for limit in which], dtype=float)
    rest = (us**p - memory**p) ** (1 / p)
    products = np.minimum(rows["floor_flops"].to_numpy(float) / old.flops, rest)
    found = {"us_old": us, "memory_old": memory, "memory_new": memory * faster, "rest_old": rest}
    found["rest_new"] = products * old.flops / new.flops + (rest - products) * old.cycles / new.cycles
    found["us_new"] = (found["memory_new"] ** p + found["rest_new"] ** p) ** (1 / p)
    return pd.DataFrame(found, index=rows.index)


def _limits(ceilings: pd.Series, gpu: Gpu) -> list[str]:
    """Which memory rate each row's prediction used, of its own GPU: the nearest; those with none, or of products: read.

    ceilings: TB/s or TFLOP/s.
    """
    off = {limit: (ceilings * 1e6 / gpu.memory(limit)).map(math.log).abs() for limit in ("read", "in_place")}
    return ["in_place" if b < a and b < 0.5 else "read" for a, b in zip(off["read"], off["in_place"], strict=True)]


MOST_MEMORY = 0.98  # of a row's time, at most: some beat the rate that the ceilings found by a little


def entry(version: str, k: Mapping[str, float], p: float, about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`models` with a new version, to be kept in `models.json`; the earlier ones stay as they are.

    k: as `fit` gives them; p: of `transfer`; about: of which rows, when and how. ValueError for one that is there.
    """
    if version in models():
        raise ValueError(f"there is a model {version!r} already; another fit is another version")
    rounded = {name: float(f"{value:.4g}") for name, value in k.items()}
    return {**models(), version: {"parameters": rounded, "transfer": p, "fitted": dict(about)}}
