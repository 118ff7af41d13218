"""Predictions of recorded rows, by version of the model: data/predictions.parquet.

    labkit record --predict     those that the latest model has not made yet; what is there stays as it is

So it can be seen how wrong a model was on rows that were measured after it. Predicted is the time on the GPU, cold.
"""

import io
from typing import Any

import numpy as np
import pandas as pd

from labkit import paths, registry
from labkit.bench.records import times_us, write_atomic
from labkit.evidence import predict
from labkit.evidence.predict import KEY, LATEST
from labkit.workflow import elsewhere, launches, recorded

FILE = paths.DATA / "predictions.parquet"
COLUMNS = ["gpu", *KEY, "version", "us"]  # gpu: slug
ERRORS = ["GPU", "model", "op", "rows", "median %", "p90 %"]


def read() -> pd.DataFrame:
    """The predictions that are kept, µs; `COLUMNS`."""
    return pd.read_parquet(FILE) if FILE.exists() else pd.DataFrame(columns=COLUMNS)


def store(version: str = LATEST) -> int:
    """Predict what this version has not predicted yet; how many rows that is.

    First the launches of rows that are new are taken apart, which takes minutes. KeyError for an unknown version.
    """
    predict.parameters(version)
    launches.update()
    old, facts = read(), launches.read()
    made = [_made(gpu, facts, version) for gpu in elsewhere.measured()]
    both = pd.concat([old, *made], ignore_index=True).drop_duplicates(COLUMNS[:-1], keep="first")
    if len(both) > len(old):
        content = io.BytesIO()
        both.to_parquet(content, index=False, compression="zstd")
        write_atomic(FILE, content.getvalue())
    return len(both) - len(old)


def _made(gpu: str, facts: pd.DataFrame, version: str) -> pd.DataFrame:
    files = [path for path, _ in (found for name in registry.NOTEBOOKS for found in paths.data_files(name, runs=False))]
    rows = pd.concat([recorded.read(path) for path in files if path.parent.name == gpu], ignore_index=True)
    us = predict.predictions(rows, facts, elsewhere.recorded_gpu(paths.DATA / gpu), version)
    return rows[list(KEY)].assign(gpu=gpu, version=version, us=us).dropna()[COLUMNS]


def errors(gpu: str, rows: pd.DataFrame) -> pd.DataFrame:
    """How wrong the stored predictions are of the rows of role ours, cold, by version and operation; and of all.

    gpu: slug. |predicted / measured - 1| in percent, median and 90th percentile: `ERRORS`, with the GPU's full name.
    """
    rows = rows[(rows["role"] == "ours") & (rows["cache"] == "cold") & (rows["mode"] == "graph") & rows["ok"]]
    stored = read()
    stored = stored[stored["gpu"] == gpu].drop(columns="gpu")
    both = rows.assign(measured=times_us(rows)).merge(stored, on=list(KEY))
    both["error"] = (both["us"].astype(float) / both["measured"] - 1).abs()
    lines: list[dict[str, Any]] = []
    for version, part in both.groupby("version"):
        for op, some in [("all", part), *part.groupby("op", sort=False)]:
            median, most = 100 * np.quantile(some["error"], [0.5, 0.9])
            named = {"GPU": some["gpu"].iloc[0], "model": version, "op": op, "rows": len(some)}
            lines.append(named | {"median %": median, "p90 %": most})
    return pd.DataFrame(lines, columns=ERRORS)
