"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.bench.verdict import BAND
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import faster
from labkit.studies.persistent_tables import tables, variants
from labkit.studies.persistent_tables.shown import SHOWN, named
from labkit.studies.persistent_tables.views import UNITS

HEADLINE = ("persistent", "construction", "packed")
DO = {
    variants.REBUILT: "rebuild the tables in Python",
    variants.VECTORISED: "rebuild the tables with array operations",
    variants.PREBUILT: "keep the tables on the host and copy them",
    variants.PINNED: "copy the tables from pinned memory",
    variants.ONE_BY_ONE: "write each 4-byte word that changes by a copy of its own",
    variants.PACKED: "send the 4-byte words that change in one copy",
    variants.BY_KERNEL: "let a small kernel write the position's 4-byte words",
    variants.IN_LAUNCH: "pass the position as an argument of the launch",
    variants.GRAPH: "keep the position on the GPU and replay one CUDA graph",
}  # way that is right at every token, the least work for the host last -> what to do
MODELS = (variants.LLAMA, variants.H1024)  # of which the advice says where separate kernels are faster


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows; a key is missing where it was not measured.

    ratio, verdict: a token with rebuilt tables over one with the position on the GPU, at the published size.
    replay: the same over one position replayed. right, checked: tokens of that replay. best: the way of `_best`.
    later MODEL: the position from which on tables are slower than separate kernels with dependent launch, and not
    faster anywhere after it. separate MODEL: time of the tables over that of these kernels there.
    """
    found: dict[str, Any] = {}
    if gain := tables.ratio(rows, variants.REBUILT, variants.GRAPH, **variants.PUBLISHED):
        found |= {name: gain[name] for name in ("ratio", "verdict")}
    if replay := tables.ratio(rows, variants.REBUILT, variants.ONE_POSITION, **variants.PUBLISHED):
        found["replay"] = replay["ratio"]
    found |= _checked(rows)
    if best := _best(rows):
        found["best"] = best["way"]
    against = where(tables.contexts(rows), variant=variants.GEMV_DEPENDENT)
    for model in MODELS if len(against) else ():
        found |= {f"{name} {model}": value for name, value in _from(where(against, model=model)).items()}
    return found


def _checked(rows: pd.DataFrame) -> dict[str, Any]:
    """right and checked of the replay of one position, in the case where most tokens are right."""
    replay = where(tables.tokens(rows), way=variants.ONE_POSITION)
    return replay.loc[replay["right"].idxmax(), ["right", "checked"]].to_dict() if len(replay) else {}


def _best(rows: pd.DataFrame) -> dict[str, Any]:
    """The way that the advice names, of the published model in the lab's own records; empty if none was measured.

    Of the ways that are right, and not clearly slower than the fastest of them, the one with the least work for the
    host: two of them come within a tenth of a per cent, and which of these is ahead is chance.
    """
    of_case = {**variants.MAIN, "model": variants.H1024}
    whole = where(tables.walls(rows), **of_case, way=tuple(DO)).set_index("way")
    if whole.empty:
        return {}
    fastest = whole["us"].idxmin()
    against = {way: tables.ratio(rows, way, fastest, **of_case) for way in whole.index}
    slower = {way for way, found in against.items() if found and found["low"] > 1 + BAND}
    best = next(way for way in reversed(DO) if way in set(whole.index) - slower)
    return {"way": best, **whole.loc[best]}


def _from(table: pd.DataFrame) -> dict[str, Any]:
    """later, separate: the first position with slower tables of those after which none is faster; the gain there."""
    found: dict[str, Any] = {}
    for line in table.sort_values("start", ascending=False).to_dict("records"):
        if line["verdict"] not in ("slower", "same"):
            break
        if line["verdict"] == "slower":
            found = {"later": line["start"], "separate": 1 / line["ratio"]}
    return found


def conclusion(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Does it hold, in one sentence. A GPU stands before its numbers, so that their origins are its own."""
    known = {gpu: one for gpu, one in facts.items() if "ratio" in one}
    if not known:
        return ""
    said = f"Advancing the position on the GPU {_gains(known)}"
    wrong = _wrong(facts.values())
    if not wrong:
        return f"{said}."
    replays = ", ".join(f"{gpu} {one['replay']:.2f}×" for gpu, one in facts.items() if "replay" in one)
    return f"{said}; replaying one position, as published{f' ({replays})' if replays else ''}, is wrong {wrong}."


def _gains(known: Mapping[str, Mapping[str, Any]]) -> str:
    """ "makes a token faster than rebuilding tables in Python: H100 3.43×, H200 3.50×"; or a word for each GPU."""
    each = ", ".join(f"{gpu} {faster(one['ratio'])}{_doubt(one)}" for gpu, one in known.items())
    words = {faster(one["ratio"]).partition("× ")[2] for one in known.values()}
    word = words.pop()
    if words or not word:  # both sides, or none
        return f"against rebuilding tables in Python: {each}"
    return f"makes a token {word} than rebuilding tables in Python: {each.replace(f' {word}', '')}"


def _doubt(one: Mapping[str, Any]) -> str:
    return " (unclear)" if one["verdict"] == "unclear" else ""


def _wrong(facts: Iterable[Mapping[str, Any]]) -> str:
    """From which token on the replay of one position is wrong, at the latest; nothing where it was not found wrong."""
    right = max((one["right"] for one in facts if "right" in one and one["right"] < one["checked"]), default=None)
    if right is None:
        return ""
    return "from the second token on" if right == 1 else f"after {right:.0f} tokens at the latest"


def _listed(parts: Iterable[str]) -> str:
    *some, last = parts
    return f"{', '.join(some)} and {last}" if some else last


def advice(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """What an engine should do, in one sentence."""
    best = _by_value(facts, "best")
    if not best:
        return ""
    do = _listed(f"{DO[way]}{_of(gpus, facts)}" for way, gpus in best.items())
    do = f"{do[:1].upper()}{do[1:]}"
    later = [said for model in MODELS if (said := _later(facts, model))]
    if not later:
        return f"{do}."
    return f"{do}; {_listed(later)} take separate kernels with dependent launch."


def _later(facts: Mapping[str, Mapping[str, Any]], model: str) -> str:
    """ "with Llama-3.2-1B from position 512 on (there H100 1.03× faster, H200 1.07× faster)"; nothing if nowhere."""
    starts = _by_value(facts, f"later {model}")
    ends = _listed(f"position {start}{_of(gpus, facts)}" for start, gpus in starts.items()) if starts else ""
    there = (f"{gpu} {faster(one[f'separate {model}'])}" for gpu, one in facts.items() if f"later {model}" in one)
    return f"with {model} from {ends} on (there {', '.join(there)})" if ends else ""


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
    every = tables.gains(rows)
    if every.empty:
        return "the ways were not measured beside tables rebuilt in Python."
    wrong = _wrong([_checked(rows)])
    wrong = f" One position replayed is wrong {wrong}." if wrong else ""
    return drawing(
        plots.ratios, named(every), "way", "ratio", "low", "high", verdict="verdict",
        xlabel="× faster than tables rebuilt in Python", title=_title(every),
        alt="How many times faster a token is than with tables rebuilt in Python, by way of keeping the tables.",
        caption=f"Time of a token, host time included: {variants.H1024} with the published number of records; 95 % "
        f"intervals.{wrong}",
        said=_why_best(rows), table=["way", "us", *tables.RATIO, "runs"],
        units=UNITS | {"ratio": "× faster than rebuilt in Python", "verdict": "the way is"},
    )  # fmt: skip


def _title(table: pd.DataFrame) -> str:
    """What part of the time that the position on the GPU saves goes with vectorised rebuilding alone."""
    saved = 1 - 1 / table.set_index("way")["ratio"]
    if not {variants.VECTORISED, variants.GRAPH} <= set(saved.index) or saved[variants.GRAPH] <= 0:
        return "What each way to keep the tables is worth"
    if saved[variants.VECTORISED] > saved[variants.GRAPH] / 2:
        return "Vectorised rebuilding saves most, keeping the tables the rest"
    return "Keeping the tables saves most, vectorised rebuilding less"


def _why_best(rows: pd.DataFrame) -> str:
    """What the advice rests on."""
    if not (best := _best(rows)):
        return ""
    way = f"{SHOWN[best['way']]}, {best['us']:.0f} µs"
    return f"Right, and no way is clearly faster, at {best['records']:.0f} records: {way}"


ledger.watch(__name__)
