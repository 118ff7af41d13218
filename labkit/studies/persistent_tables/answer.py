"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.studies.persistent_tables import tables, variants
from labkit.studies.persistent_tables.shown import named
from labkit.studies.persistent_tables.views import UNITS

HEADLINE = ("persistent", "construction", "bandwidth")
DO = {
    variants.REBUILT: "rebuild the tables in Python",
    variants.VECTORISED: "rebuild the tables with array operations",
    variants.PREBUILT: "keep the tables on the host and copy them",
    variants.PINNED: "copy the tables from pinned memory",
    variants.ONE_BY_ONE: "send the words that change one by one",
    variants.PACKED: "send the words that change in one copy",
    variants.BY_KERNEL: "let a small kernel write the position's words",
    variants.IN_LAUNCH: "pass the position as an argument of the launch",
    variants.GRAPH: "keep the position on the GPU and replay one CUDA graph",
}  # way that is right at every token -> what to do


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows; a key is missing where it was not measured.

    ratio, low, high, verdict: a token with rebuilt tables over one with the position on the GPU, at the published size.
    right, checked: tokens of the replay of one position. best: the fastest way that is right. later: the first position
    from which on tables are not faster than separate kernels with dependent launch, with Llama.
    """
    found: dict[str, Any] = {}
    if gain := tables.ratio(rows, variants.REBUILT, variants.GRAPH, **variants.PUBLISHED):
        found |= {name: gain[name] for name in ("ratio", "low", "high", "verdict")}
    replay = where(tables.tokens(rows), way=variants.ONE_POSITION)
    if len(replay):
        found |= dict(
            zip(("right", "checked"), replay.loc[replay["right"].idxmax(), ["right", "checked"]], strict=True)
        )
    whole = where(tables.walls(rows), **variants.MAIN, model=variants.H1024, way=tuple(DO))
    if len(whole):
        found["best"] = whole.loc[whole["us"].idxmin(), "way"]
    against = where(tables.contexts(rows), model=variants.LLAMA, variant=variants.GEMV_DEPENDENT)
    if (later := _from(against)) is not None:
        found["later"] = later
    return found


def _from(table: pd.DataFrame) -> int | None:
    """The first position from which on the tables are never called faster."""
    found = None
    for line in table.sort_values("start", ascending=False).to_dict("records"):
        if line["verdict"] not in ("slower", "same"):
            break
        found = line["start"]
    return found


def conclusion(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Does it hold, in one sentence."""
    known = {gpu: one for gpu, one in facts.items() if "ratio" in one}
    if not known:
        return ""
    gains = _listed(f"{_gain(one)} on the {gpu}" for gpu, one in known.items())
    said = f"Not rebuilding tables in Python makes a token {gains}"
    wrong = any(one["right"] < one["checked"] for one in facts.values() if "right" in one)
    return f"{said}; the published replay is no decode." if wrong else f"{said}."


def _gain(one: Mapping[str, Any]) -> str:
    """ "3.38× faster [2.97, 4.58]" of a ratio with its interval."""
    mid, low, high = (one[name] for name in ("ratio", "low", "high"))
    word = "faster" if mid >= 1 else "slower"
    mid, low, high = (mid, low, high) if mid >= 1 else (1 / mid, 1 / high, 1 / low)
    unclear = " (unclear)" if one["verdict"] == "unclear" else ""
    return f"{mid:.2f}× {word} [{low:.2f}, {high:.2f}]{unclear}"


def _listed(parts: Iterable[str]) -> str:
    *some, last = parts
    return f"{', '.join(some)} and {last}" if some else last


def advice(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """What an engine should do, in one sentence."""
    best = _by_value(facts, "best")
    if not best:
        return ""
    do = _listed(f"{DO[way]}{_of(gpus, facts)}" for way, gpus in best.items())
    later = _by_value(facts, "later")
    if not later:
        return f"{do[:1].upper()}{do[1:]}."
    ends = _listed(f"position {start}{_of(gpus, facts)}" for start, gpus in later.items())
    return f"{do[:1].upper()}{do[1:]}; from {ends} on take separate kernels with dependent launch ({variants.LLAMA})."


def _by_value(facts: Mapping[str, Mapping[str, Any]], name: str) -> dict[Any, list[str]]:
    """Each value of a fact with the GPUs that have it."""
    found: dict[Any, list[str]] = {}
    for gpu, one in facts.items():
        if name in one:
            found.setdefault(one[name], []).append(gpu)
    return found


def _of(gpus: list[str], facts: Mapping[str, Any]) -> str:
    """ " (H100)", or nothing where it is true of all."""
    return "" if len(gpus) == len(facts) else f" ({', '.join(gpus)})"


def hero(rows: pd.DataFrame) -> Drawing:
    """How much faster each way is than tables rebuilt in Python, at the published size."""
    every = named(tables.gains(rows))
    if every.empty:
        return "the ways were not measured beside tables rebuilt in Python."
    return drawing(
        plots.ratios, every, "way", "ratio", "low", "high", verdict="verdict",
        xlabel="× faster than tables rebuilt in Python", title="Leaving out the Python is what pays",
        alt="How many times faster a token is than with tables rebuilt in Python, by way of keeping the tables.",
        caption=f"A token with the host at work, {variants.H1024}, cut into as many records as published. Intervals of "
        "95 %. One position replayed is wrong from the second token on.",
        table=["way", "us", *tables.RATIO, "runs"],
        units=UNITS | {"ratio": "× faster than rebuilt in Python", "verdict": "the way is"},
    )  # fmt: skip


ledger.watch(__name__)
