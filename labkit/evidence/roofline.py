"""How fast a kernel could be: CTAs per SM, waves, and the time that the measured ceilings of a GPU predict."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd

from labkit.bench.spec import Floor

MEMORY = ("read", "in_place", "copy")
MATRIX = ("bf16", "fp16", "fp8", "int8")


class Limits(NamedTuple):
    """What one SM holds. warps, blocks: resident at once; shared_kib: largest carve-out; block_kib: one CTA's most."""

    warps: int
    blocks: int
    shared_kib: int
    block_kib: int


# CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per Compute Capability".
LIMITS = {
    80: Limits(64, 32, 164, 163),
    86: Limits(48, 16, 100, 99),
    **dict.fromkeys((89, 120, 121), Limits(48, 24, 100, 99)),
    **dict.fromkeys((90, 100, 103), Limits(64, 32, 228, 227)),
}
# The same for all of these (the same guide; allocation as in CUDA's occupancy calculator).
_REGISTERS_PER_PARTITION = 16 * 1024  # of each of the four partitions of an SM: 64 K together
_PARTITIONS = 4
_MOST_REGISTERS = 255  # a thread
_REGISTERS_UNIT = 256  # a warp's registers are allocated in these
_SHARED_UNIT = 128  # bytes
_SHARED_RESERVED = 1024  # bytes a CTA that the system takes


def occupancy(registers: int, shared_bytes: int, num_warps: int, capability: int) -> int:
    """CTAs that fit on one SM at once; 0 if not even one does.

    registers: a thread; shared_bytes: a CTA, static and dynamic; num_warps: a CTA. Takes the largest carve-out of
    shared memory. ValueError for a capability that is not in `LIMITS`.
    """
    if capability not in LIMITS:
        raise ValueError(f"capability is {capability}; allowed: {', '.join(map(str, sorted(LIMITS)))}")
    limits = LIMITS[capability]
    if shared_bytes > limits.block_kib * 1024 or registers > _MOST_REGISTERS:
        return 0
    warp_registers = _round_up(max(registers, 1) * 32, _REGISTERS_UNIT)
    warps_by_registers = _REGISTERS_PER_PARTITION // warp_registers * _PARTITIONS
    shared = _round_up(shared_bytes + _SHARED_RESERVED, _SHARED_UNIT)
    by_shared = limits.shared_kib * 1024 // shared
    return min(limits.blocks, limits.warps // num_warps, warps_by_registers // num_warps, by_shared)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def waves(ctas: int, sms: int, per_sm: int) -> float:
    """How often the GPU is filled: `ctas` CTAs over `sms` SMs that hold `per_sm` each; ValueError if none fits."""
    if sms < 1 or per_sm < 1:
        raise ValueError(f"sms is {sms} and per_sm is {per_sm}; allowed: at least 1")
    return ctas / (sms * per_sm)


@dataclass(frozen=True)
class Ceilings:
    """What a GPU was measured to do.

    curves:   (limit, cache) -> (bytes, µs), both ascending in bytes, of a kernel that only moves them.
    flops:    matrix limit -> best FLOP/s (or integer operations/s).
    launches: mode -> µs of an empty kernel.
    """

    curves: Mapping[tuple[str, str], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    flops: Mapping[str, float] = field(default_factory=dict)
    launches: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: pd.DataFrame) -> "Ceilings":
        """From the rows of study `machine` (columns as in bench.records), of one GPU.

        Counts rows that are ok and no control: op "ceiling" (case: what, and mib or n), replayed from a graph, and op
        "launch" (case: what "empty"). Of several variants of one size the one with the least median counts.
        """
        points: dict[tuple[str, str], dict[int, float]] = {}
        flops: dict[str, float] = {}
        launches: dict[str, float] = {}
        for row in rows.to_dict("records"):
            if not row["ok"] or row["role"] == "control" or not len(row["samples_ns"]):
                continue
            us = float(np.median(row["samples_ns"])) / 1e3
            what = json.loads(row["case"])["what"]
            if row["op"] == "launch" and what == "empty":
                launches[row["mode"]] = min(us, launches.get(row["mode"], math.inf))
            elif row["op"] != "ceiling" or row["mode"] != "graph":
                continue
            elif what in MATRIX:
                flops[what] = max(row["floor_flops"] / us * 1e6, flops.get(what, 0.0))
            elif what in MEMORY:
                curve = points.setdefault((what, row["cache"]), {})
                size = int(row["floor_bytes"])
                curve[size] = min(us, curve.get(size, math.inf))
        curves = {key: np.array(sorted(curve.items()), dtype=float).T for key, curve in points.items()}
        return cls({key: (sizes, us) for key, (sizes, us) in curves.items()}, flops, launches)

    def best(self, limit: str, cache: str = "cold") -> float:
        """Best rate of a limit in bytes/s, or operations/s for a matrix limit; NaN if it was not measured."""
        _check(limit)
        if limit in MATRIX:
            return self.flops.get(limit, math.nan)
        sizes, us = self.curves.get((limit, cache), _EMPTY)
        return float((sizes / us).max() * 1e6) if len(sizes) else math.nan

    def transfer_us(self, limit: str, size: float, cache: str = "cold") -> float:
        """Measured time to move `size` bytes, launch and ramp included, µs; NaN if it was not measured.

        Between two sizes linear in the logarithms of both; below the least size its time, above the largest its rate.
        """
        _check(limit, MEMORY)
        sizes, us = self.curves.get((limit, cache), _EMPTY)
        if not len(sizes):
            return math.nan
        if size > sizes[-1]:
            return float(us[-1] * size / sizes[-1])
        return math.exp(np.interp(math.log(max(size, 1)), np.log(sizes), np.log(us)))


_EMPTY = (np.array([]), np.array([]))


def _check(limit: str, allowed: tuple[str, ...] = MEMORY + MATRIX) -> None:
    if limit not in allowed:
        raise ValueError(f"limit is {limit!r}; allowed: {', '.join(allowed)}")


class Prediction(NamedTuple):
    """floor_us: least time at the ceiling. predicted_us: with launch, ramp and waves. ceiling: TB/s or TFLOP/s.

    NaN where the ceiling was not measured.
    """

    floor_us: float
    predicted_us: float
    ceiling: float


def predict(
    floor: Floor,
    ceilings: Ceilings,
    ctas: int | None = None,
    sms: int | None = None,
    per_sm: int | None = None,
    mode: str = "graph",
    cache: str = "cold",
) -> Prediction:
    """The time that a case should take, before it is measured.

    Moving bytes: from the measured curve of time against bytes of `floor.limit`. Matrix products: one launch plus
    FLOPs at the ceiling, or plus the bytes at the best read rate if that is longer; if `ctas`, `sms` and `per_sm` are
    known and fill the GPU more than once, all beyond one launch grows by the last wave's empty part. Not so for moved
    bytes: programs of the last wave share the memory's whole rate (with that factor, measured times fell up to a third
    below the prediction; without it none fell more than 5 % below). All NaN if the ceiling was not measured or the
    floor has no limit ("").
    """
    if not floor.limit:
        return Prediction(math.nan, math.nan, math.nan)
    best = ceilings.best(floor.limit, cache)
    launch = ceilings.launches.get(mode, math.nan)
    if floor.limit in MATRIX:
        read_us = floor.bytes / ceilings.best("read", cache) * 1e6
        floor_us = math.nan if math.isnan(best) else float(np.fmax(floor.flops / best * 1e6, read_us))
        time = launch + floor_us
        if ctas and sms and per_sm and (count := waves(ctas, sms, per_sm)) > 1:
            time = launch + floor_us * math.ceil(count) / count
    else:
        floor_us = floor.bytes / best * 1e6
        time = ceilings.transfer_us(floor.limit, floor.bytes, cache)
    return Prediction(floor_us, time, best / 1e12)
