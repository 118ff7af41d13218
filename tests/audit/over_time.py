"""Programs over time once more: every tick of every multiprocessor is marked by itself, and the marks are counted."""

from math import gcd

import numpy as np
import pandas as pd
from common import DATA

TIMES = ["begin_ns", "released_ns", "end_ns"]


def tables(gpu: str, study: str) -> dict[str, pd.DataFrame]:
    """What a page reads of a study's timelines of a GPU, under its names for that; nothing where none was taken."""
    path = DATA / gpu / "timelines" / f"{study}.parquet"
    if not path.exists():
        return {}
    rows = pd.read_parquet(path)
    parts = [(what, rows[rows["what"] == what]) for what in dict.fromkeys(rows["what"])]
    return {
        "programs.shares": pd.DataFrame([line for what, bars in parts for line in _shares(what, bars)]),
        "programs.facts": pd.DataFrame([_facts(what, bars) for what, bars in parts]),
    }


def _shares(what: str, bars: pd.DataFrame) -> list[dict]:
    tick, last = gcd(*bars[TIMES].to_numpy().ravel().tolist()), bars["end_ns"].max()
    every = np.zeros((bars["sms"].iloc[0], last // tick), bool)
    found = []
    for stage in dict.fromkeys(bars["stage"]):
        mine, own = bars[bars["stage"] == stage], np.zeros_like(every)
        for sm, first, end in zip(mine["sm"], mine["released_ns"] // tick, mine["end_ns"] // tick, strict=True):
            own[sm, first:end] = True
        every |= own
        found.append({"what": what, "stage": stage, "bars": len(mine), "share": 100 * own.mean()})
    return [*found, {"what": what, "stage": "nothing", "bars": 0, "share": 100 * (1 - every.mean())}]


def _facts(what: str, bars: pd.DataFrame) -> dict:
    ticks = gcd(*bars[TIMES].to_numpy().ravel().tolist())
    times = bars["clocked_ns"].iloc[0] / bars["plain_ns"].iloc[0]
    return {"what": what, "us": bars["end_ns"].max() / 1000, "clocked": times, "tick": ticks}
