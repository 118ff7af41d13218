"""Predictions of recorded rows, kept by version of the model in `data/predictions.parquet`: what is there stays.

The measured rows hold the floor's time alone (`predicted_us`). What `evidence.predict` says of them is kept apart, so
that a later model adds its own predictions and changes none. Nothing here is a measurement.

    labkit record --predict    # what launches and predictions are missing of the recorded rows
"""

import hashlib
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import paths, registry
from labkit.bench.machine import Machine
from labkit.bench.records import times_us, write_atomic
from labkit.evidence import predict
from labkit.evidence.predict import Gpu
from labkit.evidence.roofline import Ceilings
from labkit.kernels.tuned import slug
from labkit.workflow import recorded

ROW = ("gpu", *predict.KEY, "cache", "mode")
KEY = (*ROW, "version")
COLUMNS = {
    "gpu": "folder name of the GPU",
    **dict.fromkeys((*predict.KEY, "cache", "mode"), "as of the row"),
    "version": "of the model, as in `labkit/evidence/models.json`",
    "us": "what the model says, µs",
    "left_out_us": "what a fit without this compiled kernel says, µs; NaN of rows that the model was not fitted to",
    "launches": "hash of what the row's launches do (`data/launches.parquet`), of which it was made",
    "ceilings": "hash of the GPU as the model takes it: what `00_machine` measured",
}


def file() -> Path:
    """Where they are kept."""
    return paths.DATA / "predictions.parquet"


def read() -> pd.DataFrame:
    """All that are kept, with the columns of `COLUMNS`."""
    return pd.read_parquet(file()) if file().exists() else pd.DataFrame(columns=list(COLUMNS))


def gpu_in(folder: Path) -> Gpu | None:
    """The GPU of a folder of data/ or runs/, with the ceilings of `00_machine`; None if it did not run there."""
    machine, rows = Machine.load(folder), folder / "machine.parquet"
    if machine is None or not rows.exists():
        return None
    return Gpu(machine.name, Ceilings.from_rows(recorded.read(rows)), machine.sms, machine.sm_mhz, machine.l2_bytes)


def ours(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows by which predictions are judged: role ours, cold, usable."""
    return rows[(rows["role"] == "ours") & (rows["cache"] == "cold") & rows["ok"]]


# ---- making them


def append(version: str = predict.LATEST) -> dict[str, tuple[int, int]]:
    """Predict each recorded row that a version has no prediction of, and keep it. What is there stays as it is.

    Returns GPU -> rows that were added, and rows of ours, cold, of which no launches are known. KeyError for an unknown
    version.
    """
    predict.parameters(version)
    known, parts = read(), list(_recorded())
    found = [_predicted(*part, version) for part in parts]
    new = [some[~_keys(some).isin(_keys(known))] for some in found]
    if any(map(len, new)):
        made = [some.join(left_out) for some, left_out in zip(new, _left_out(parts, version), strict=True)]
        table = pd.concat([one for one in (known, *made) if len(one)])[list(COLUMNS)]
        content = io.BytesIO()
        table.sort_values(["version", *ROW]).to_parquet(content, index=False, compression="zstd")
        write_atomic(file(), content.getvalue())
    without = [(~ours(rows).index.isin(some.index)).sum() for (rows, _, _), some in zip(parts, found, strict=True)]
    names = [slug(gpu.name) for _, _, gpu in parts]
    return {name: (len(some), int(count)) for name, some, count in zip(names, new, without, strict=True)}


def _recorded() -> Iterator[tuple[pd.DataFrame, pd.DataFrame, Gpu]]:
    """Of each recorded GPU all rows, the facts of their launches, and the GPU."""
    facts = recorded.launches()
    for name in paths.recorded_gpus() if len(facts) else ():
        files = [paths.DATA / name / f"{study}.parquet" for study in registry.NOTEBOOKS]
        if gpu := gpu_in(paths.DATA / name):
            rows = [recorded.read(path) for path in files if path.exists()]
            yield pd.concat(rows, ignore_index=True), facts[facts["gpu"] == name], gpu


def _predicted(rows: pd.DataFrame, facts: pd.DataFrame, gpu: Gpu, version: str) -> pd.DataFrame:
    """`COLUMNS` of the rows that can be predicted, but for left_out_us, by the index of the rows."""
    us = predict.predictions(rows, facts, gpu, version)
    some = rows[us.notna()]
    hashes = {key: _sha(_in_order(part)) for key, part in facts.groupby(list(predict.KEY))}
    keys = zip(*(some[name] for name in predict.KEY), strict=True)
    return some[list(ROW)].assign(
        gpu=slug(gpu.name),
        version=version,
        us=us,
        launches=[hashes[key] for key in keys],
        ceilings=_sha(repr(_facts(gpu))),
    )


def _left_out(parts: list[tuple[pd.DataFrame, pd.DataFrame, Gpu]], version: str) -> list[pd.Series]:
    """left_out_us of the rows that a version may have been fitted to: those of ours that are no younger than it."""
    day = predict.models()[version]["fitted"]["date"]
    data = []
    for rows, facts, gpu in parts:
        some = ours(rows)
        data.append(predict.measured(some[some["utc"].str[:10] <= day], facts, gpu))
    if not any(len(one.us) for one in data):
        return [pd.Series(dtype=float, name="left_out_us") for _ in data]
    found = zip(data, predict.left_out(data), strict=True)
    return [pd.Series(us, one.rows.index, name="left_out_us") for one, us in found]


def _facts(gpu: Gpu) -> tuple[float, ...]:
    """All that a prediction takes of a GPU, to six digits."""
    rates = gpu.memory("read"), gpu.memory("in_place"), gpu.memory("copy"), gpu.l2, gpu.flops
    return (*(float(f"{rate:.6g}") for rate in rates), gpu.sms, gpu.sm_mhz)


def _in_order(facts: pd.DataFrame) -> str:
    """The facts of one call's launches as text."""
    return facts.sort_values("place")[list(predict.FACTS)].to_json(orient="values")


def _keys(table: pd.DataFrame) -> pd.Index:
    return pd.MultiIndex.from_frame(table[list(KEY)])


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---- how wrong they are


def beside(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of one GPU, role ours, cold, beside the predictions of the model's last version.

    Columns: `ROW`, measured, predicted (by a fit without this kernel, where the model was fitted to it) and
    floor, µs.
    """
    some = ours(rows)
    times = {"gpu": some["gpu"].map(slug), "measured": times_us(some), "floor": some["predicted_us"]}
    kept = read()
    table = some.assign(**times)[[*ROW, "measured", "floor"]].merge(
        kept[kept["version"] == predict.LATEST], on=list(ROW)
    )
    predicted = table["left_out_us"].where(table["left_out_us"].notna(), table["us"]).astype(float)
    return table.assign(predicted=predicted)[[*ROW, "measured", "predicted", "floor"]]


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """How wrong the model's last version is of one GPU's rows, and the floor: a line each, errors in percent."""
    table = beside(rows)
    by = [(f"model {predict.LATEST}", table, "predicted"), ("floor", table.dropna(subset="floor"), "floor")]
    by = by if len(table) else []
    return pd.DataFrame([_error(name, part[column], part["measured"]) for name, part, column in by])


def _error(name: str, predicted: pd.Series, measured: pd.Series) -> dict[str, Any]:
    median, most = percent_off(predicted, measured)
    over = float((measured / predicted).median())
    line = {"prediction": name, "rows": len(predicted), "measured / predicted": over}
    return line | {"median error %": median, "90 % are within %": most}


def percent_off(predicted: pd.Series, measured: pd.Series) -> tuple[float, float]:
    """Median and 90th percentile of |predicted / measured - 1|, in percent, of those that are known; NaN of none."""
    off = (predicted / measured - 1).abs().dropna()
    if off.empty:
        return math.nan, math.nan
    median, most = np.quantile(off, [0.5, 0.9])
    return 100 * float(median), 100 * float(most)
