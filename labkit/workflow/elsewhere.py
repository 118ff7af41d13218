"""GPUs that nobody measured the studies on: what their times and ratios would be, predicted and called so.

Starts from the rows of a recorded GPU (`evidence.predict.transfer`). The other GPU is known by its data sheet, or by a
run of `00_machine` on it alone. How wrong that is, is what it makes of the recorded GPUs from one another.
A prediction has no samples: it comes into no recorded table, and no claim is judged by it.
"""

import json
from collections.abc import Sequence
from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd

from labkit import paths, registry
from labkit.bench.machine import Machine
from labkit.bench.spec import Pair
from labkit.bench.verdict import geometric_mean
from labkit.evidence import predict
from labkit.evidence.predict import Gpu
from labkit.evidence.roofline import Ceilings
from labkit.kernels.tuned import slug
from labkit.workflow import recorded

SHIPPED = ("A100 80GB", "L40S", "RTX 4090", "RTX 5090", "B200")  # shown where none is asked for
# Data sheets of what was measured, by the slug of its folder.
MEASURED = {"nvidia-h100-80gb-hbm3": "H100 SXM 80GB", "nvidia-h200": "H200 SXM"}
COLUMNS = ["op", "pair", "cases", "measured", "predicted", "least", "most"]


def known() -> dict[str, str]:
    """Slug -> name of the GPUs that can be asked for: by data sheet, and those of which only `00_machine` ran."""
    sheets = {slug(name): name for name in predict.sheets() if name not in MEASURED.values()}
    return sheets | {path.parent.name: path.parent.name for path in _machines() if not _has_studies(path.parent)}


def _machines() -> list[Path]:
    return [path for base in (paths.DATA, paths.RUNS) for path in sorted(base.glob("*/machine.parquet"))]


def _has_studies(folder: Path) -> bool:
    return any((folder / f"{name}.parquet").exists() for name in registry.NOTEBOOKS if name != "machine")


def measured() -> list[str]:
    """Slugs of the recorded GPUs that have ceilings."""
    return [one for one in paths.recorded_gpus() if (paths.DATA / one / "machine.parquet").exists()]


def bases(study: str) -> list[str]:
    """Those that predictions can start from: they have rows of the study, and a data sheet."""
    return [one for one in measured() if one in MEASURED and (paths.DATA / one / f"{study}.parquet").exists()]


@cache
def recorded_gpu(folder: Path) -> Gpu:
    """A GPU on which `00_machine` ran. folder: of its files. ValueError where there is no machine.json."""
    if (machine := Machine.load(folder)) is None:
        raise ValueError(f"{folder / 'machine.json'}: missing or not readable")
    ceilings = Ceilings.from_rows(recorded.read(folder / "machine.parquet"))
    return Gpu(machine.name, ceilings, machine.sms, machine.sm_mhz, machine.l2_bytes)


def gpu(wanted: str, base: str) -> Gpu:
    """The GPU of a slug of `known`, as predictions take it. base: slug of the recorded one that they start from.

    ValueError naming those that can be asked for.
    """
    if wanted not in known():
        raise ValueError(f"gpu is {wanted!r}; predicted can be: {', '.join(known())}")
    for path in _machines():
        if path.parent.name == wanted:
            return recorded_gpu(path.parent)
    return predict.by_sheet(known()[wanted], recorded_gpu(paths.DATA / base), MEASURED[base])


def rows_of(study: str, base: str) -> pd.DataFrame:
    """The recorded rows that predictions start from: cold, of a GPU's own time, that may be used."""
    rows = recorded.read(paths.DATA / base / f"{study}.parquet")
    return rows[(rows["cache"] == "cold") & (rows["mode"] == "graph") & rows["ok"]].reset_index(drop=True)


def times(study: str, base: str, other: Gpu) -> pd.DataFrame:
    """µs of every variant of the study's pairs, in every case: op, case, variant, recorded, predicted."""
    rows = rows_of(study, base)
    wanted = {(pair.op, name) for pair in registry.load(study).pairs for name in (pair.variant, pair.against)}
    rows = rows[[one in wanted for one in zip(rows["op"], rows["variant"], strict=True)]].reset_index(drop=True)
    found = predict.transfer(rows, recorded_gpu(paths.DATA / base), other)
    table = rows[["op", "case", "variant"]].assign(recorded=found["us_old"], predicted=found["us_new"])
    return table.dropna(ignore_index=True)


def by_case(table: pd.DataFrame, pairs: Sequence[Pair]) -> pd.DataFrame:
    """How many times faster the variant of a pair is than what it is set against, case by case.

    table: as `times` gives it. Columns op, pair, case, recorded, predicted.
    """
    parts = []
    for pair in pairs:
        some = table[table["op"] == pair.op].set_index("case")
        one, other = (some[some["variant"] == name] for name in (pair.variant, pair.against))
        both = one.index.intersection(other.index)
        ratios = {name: other.loc[both, name] / one.loc[both, name] for name in ("recorded", "predicted")}
        parts.append(pd.DataFrame({"op": pair.op, "pair": str(pair), "case": both} | ratios))
    columns = ["op", "pair", "case", "recorded", "predicted"]
    return pd.concat([part.reset_index(drop=True) for part in parts] or [pd.DataFrame(columns=columns)])[columns]


def ratios(study: str, base: str, other: Gpu) -> pd.DataFrame:
    """`by_case` in short: geometric means over the cases of a pair, and the least and most predicted (`COLUMNS`)."""
    found = by_case(times(study, base, other), registry.load(study).pairs)
    lines = []
    for (op, pair), part in found.groupby(["op", "pair"], sort=False):
        means = (geometric_mean(part[name]) for name in ("recorded", "predicted"))
        lines.append((op, pair, len(part), *means, part["predicted"].min(), part["predicted"].max()))
    return pd.DataFrame(lines, columns=COLUMNS)


@cache
def errors(study: str) -> tuple[float, float]:
    """Median and 90th percentile of |predicted / measured - 1| of the ratios, each recorded GPU from the others.

    NaN where fewer than two are recorded.
    """
    off = []
    for base, other in permutations(bases(study), 2):
        told = by_case(times(study, base, recorded_gpu(paths.DATA / other)), registry.load(study).pairs)
        there = by_case(times(study, other, recorded_gpu(paths.DATA / other)), registry.load(study).pairs)
        both = told.merge(there, on=["op", "pair", "case"], suffixes=("", " there"))
        off.append((both["predicted"] / both["recorded there"] - 1).abs().to_numpy(float))
    if not off or not len(np.concatenate(off)):
        return np.nan, np.nan
    median, most = np.quantile(np.concatenate(off), [0.5, 0.9])
    return float(median), float(most)


def case_in_words(key: str, all_keys: Sequence[str]) -> str:
    """What a case has that not all cases have: "batch 64, state fp32"."""
    cases = [json.loads(one) for one in dict.fromkeys(all_keys)]
    own = json.loads(key)
    return ", ".join(f"{name} {value}" for name, value in own.items() if any(c.get(name) != value for c in cases))
