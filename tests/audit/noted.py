"""What views note of tables, made of the audits' tables under the same names: their numbers are of no one column."""

from collections.abc import Callable, Mapping

import pandas as pd
from batched_ffn import LOOP
from common import geometric_mean
from moe_persistent_grid import OWN_FILLED
from persistent_tables import GRAPH, ONE_POSITION, OURS, READ, SHAPES, UNORDERED, VECTORISED

Frames = Mapping[str, pd.DataFrame]
# Table, column, what its ends begin with, and what a share is multiplied by.
FIGURES = (
    ("tables.hosts", "host", "", 1),
    ("tables.walls", "% idle", "", 1),
    ("tables.hidden", "% idle", "", 1),
    *(("tables.rebuilding", name, f"{name} ", 1) for name in ("build", "copy")),
    ("tables.rebuilding", "share", "share ", 100),
    ("tables.saving", "us", "us ", 1),
    ("tables.saving", "share", "share ", 100),
)


def figure(tables: Frames) -> pd.DataFrame:
    """A figure of the host's with its interval."""
    parts = []
    for table, column, ends, scale in FIGURES:
        frame = tables[table]
        names = {column: "mid"} | {
            f"{ends}{end}{bound}": f"{end}{bound}" for end in ("low", "high") for bound in ("", " from", " to")
        }
        parts.append(frame[list(names)].rename(columns=names).apply(pd.to_numeric) * scale)
    return pd.concat(parts, ignore_index=True)


def stops(tables: Frames) -> pd.DataFrame:
    """What a token takes beyond reading as many bytes: waiting, a barrier of some, and streaming more slowly."""
    found = []
    for model, some in tables["tables.graphs"].groupby("model"):
        us = some.set_index("variant")["us"]
        if {OURS, READ, UNORDERED} <= set(us.index):
            waiting, stages = us[OURS] - us[UNORDERED], 2 + 5 * SHAPES[model][1]
            line = {"model": model, "waiting": waiting, "us": waiting / stages, "stages": stages}
            found.append(line | {"slower": us[UNORDERED] - us[READ]})
    return pd.DataFrame(found)


def saved(tables: Frames) -> pd.DataFrame:
    """Percent of the time that vectorised rebuilding removes, and the position on the GPU more."""
    ratio = tables["tables.gains"].set_index("way")["ratio"]
    first, both = (100 * (1 - 1 / ratio[way]) for way in (VECTORISED, GRAPH))
    return pd.DataFrame([{"first": first, "more": both - first}])


def near(tables: Frames) -> pd.DataFrame:
    """How many of the ways with right tokens are within 2 % of the fastest."""
    gains = tables["tables.gains"]
    us = gains.loc[gains["way"] != ONE_POSITION, "us"]
    return pd.DataFrame([{"near": (us <= 1.02 * us.min()).sum(), "correct ways": len(us)}])


def by_waves(tables: Frames) -> pd.DataFrame:
    """Mean ratios of the persistent grid that fills the GPU: by waves, and where the last wave is not full."""
    full = tables["tables.persistence"]
    full = full[full["persistent"] == OWN_FILLED]
    waves = full["waves"]
    some = (waves <= 1, (waves > 1) & (waves <= 3), waves >= 10, full["efficiency"] <= 0.9)
    return pd.DataFrame({"of": range(len(some)), "ratio": [geometric_mean(full[one]["ratio"]) for one in some]})


def kept_bits(tables: Frames) -> pd.DataFrame:
    """In how many cases of batched variants of ours a token has the bits that it has alone; a loop is no question."""
    bits = tables["tables.bits"]
    own = bits[(bits["who"] == "ours") & (bits["variant"] != LOOP)]
    return pd.DataFrame([{"same": own["same"].sum(), "cases": own["cases"].sum()}])


NOTED: dict[str, dict[str, Callable[[Frames], pd.DataFrame]]] = {
    "persistent_tables": {"figure": figure, "stops": stops, "saved": saved, "near": near},
    "moe_persistent_grid": {"by waves": by_waves},
    "batched_ffn": {"kept bits": kept_bits},
}
