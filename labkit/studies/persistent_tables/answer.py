"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.bench.verdict import BAND
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import faster, number, sentences
from labkit.studies.persistent_tables import tables, variants
from labkit.studies.persistent_tables.shown import SHOWN, explained
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
NEAR = 1.02  # times the least time: what is called near it
MODELS = (variants.LLAMA, variants.H1024)  # of which the advice says where separate kernels are faster


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows; a key is missing where it was not measured.

    Each at the published size, a ratio and its verdict. python, vectorised: time per token with tables rebuilt so ÷
    with the position on the GPU. replay: time with that ÷ with one position replayed. right, checked: tokens of this
    replay. best: the way of `_best`. warp: time of Llama's step ÷ that with a warp that copies weights. later MODEL:
    the position from which on tables are slower than separate kernels with dependent launch, and not faster anywhere
    after it; with that warp where it was measured. separate MODEL: time of the tables ÷ that of these kernels there.
    """
    found: dict[str, Any] = {}
    compared = {
        "python": (variants.REBUILT, variants.GRAPH),
        "vectorised": (variants.VECTORISED, variants.GRAPH),
        "replay": (variants.GRAPH, variants.ONE_POSITION),
    }
    for name, pair in compared.items():
        if gain := tables.ratio(rows, *pair, **variants.PUBLISHED):
            found |= {name: gain["ratio"], f"{name} verdict": gain["verdict"]}
    found |= _checked(rows)
    if best := _best(rows):
        found["best"] = best["way"]
    streamed, contexts = tables.streamed(rows), tables.contexts(rows)
    for line in where(streamed, model=variants.LLAMA, start=variants.START, variant=variants.OURS).to_dict("records"):
        found |= {"warp": line["ratio"], "warp verdict": line["verdict"]}
    for model in MODELS:
        best = streamed if model in set(streamed["model"]) else contexts
        against = where(best, variant=variants.GEMV_DEPENDENT, model=model)
        found |= {f"{name} {model}": value for name, value in _from(against).items()}
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
    """Does it hold. A GPU stands before its numbers, so that their origins are its own."""
    if not any("python" in one for one in facts.values()):
        return ""
    (gains, word), (others, other) = _gains(facts, "python"), _gains(facts, "vectorised")
    if word in ("faster", "slower"):
        takes = (
            f"Each token takes {'less' if word == 'faster' else 'more'} time when the GPU advances the position itself"
        )
        said = f"{takes} than when Python rebuilds the tables ({gains})"
        said += f" or when array operations do ({others})" if others and other == word else ""
    else:
        said = f"Against Python that rebuilds the tables, a GPU that advances the position itself is {gains}"
    wrong = _wrong(facts.values())
    if not wrong:
        return f"{said}."
    replay, word = _gains(facts, "replay")
    if word == "faster":
        return f"{said}. The published way repeats one position: {replay} still, but its output is wrong {wrong}."
    replay = f" ({replay})" if replay else ""
    return f"{said}. The published way repeats one position{replay}: its output is wrong {wrong}."


def _gains(facts: Mapping[str, Mapping[str, Any]], name: str) -> tuple[str, str]:
    """ "H100 3.43×, H200 3.50× faster" and "faster"; or a word for each GPU, and none."""
    known = {gpu: one for gpu, one in facts.items() if name in one}
    each = {gpu: faster(one[name]) for gpu, one in known.items()}
    doubt = {gpu: " (unclear)" if one[f"{name} verdict"] == "unclear" else "" for gpu, one in known.items()}
    words = {said.partition("× ")[2] for said in each.values()}
    word = words.pop() if len(words) == 1 else ""
    if not word or any(doubt.values()):
        return ", ".join(f"{gpu} {said}{doubt[gpu]}" for gpu, said in each.items()), word
    return ", ".join(f"{gpu} {said}" for gpu, said in each.items()).replace(f" {word},", ","), word


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
    """What an engine should do."""
    best = _by_value(facts, "best")
    if not best:
        return ""
    do = _listed(f"{DO[way]}{_of(gpus, facts)}" for way, gpus in best.items())
    do = f"{do[:1].upper()}{do[1:]}{_warp(facts)}"
    later = [said for model in MODELS if (said := _later(facts, model))]
    if not later:
        return f"{do}."
    return f"{do}. Not at later positions: there separate kernels with dependent launch are faster, {', '.join(later)}."


def _warp(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """What a warp that copies weights is worth, where it is faster."""
    known = {gpu: one for gpu, one in facts.items() if one.get("warp verdict") == "faster"}
    if not known:
        return ""
    gains, _ = _gains(known, "warp")
    return f". Let one warp of each program copy weights ahead of all waits ({variants.LLAMA}: {gains})"


def _later(facts: Mapping[str, Mapping[str, Any]], model: str) -> str:
    """ "Llama-3.2-1B from position 512 on (H100 1.03× faster, H200 1.07× faster)"; nothing if nowhere."""
    starts = _by_value(facts, f"later {model}")
    ends = _listed(f"position {start}{_of(gpus, facts)}" for start, gpus in starts.items()) if starts else ""
    there = (f"{gpu} {faster(one[f'separate {model}'])}" for gpu, one in facts.items() if f"later {model}" in one)
    return f"{model} from {ends} on ({', '.join(there)})" if ends else ""


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
    return drawing(
        plots.ratios, explained(every), "way", "ratio", "low", "high", verdict="verdict",
        xlabel="× faster than tables rebuilt in Python", title=_title(every),
        alt="How many times faster a token is than with tables rebuilt in Python, by way of keeping the tables.",
        caption="Time per token, host included, of our kernel, not of the published one. The decoder is "
        f"{variants.H1024}, of width 1024, in about {variants.PUBLISHED_RECORDS} records (pieces of work), as "
        "published. How long Python takes depends on the host's processor, not on the GPU. Bars: 95 % intervals, wide "
        "where Python took longer in one process than in another.",
        said=sentences([_saved(every), _near(every), _why_best(rows)], "").removesuffix("."),
        table=["way", "us", *tables.RATIO, "runs"],
        units=UNITS | {"ratio": "× faster than rebuilt in Python", "verdict": "the way is"},
    )  # fmt: skip


def _title(table: pd.DataFrame) -> str:
    """Whether vectorised rebuilding alone saves more than half of what the position on the GPU saves."""
    saved = _shares(table)
    if not saved or saved[variants.GRAPH] <= 0:
        return "What each way to keep the tables is worth"
    if saved[variants.VECTORISED] > saved[variants.GRAPH] / 2:
        return "Vectorised rebuilding removes most of the time, kept tables remove more"
    return "Kept tables remove most of the time, vectorised rebuilding removes less"


def _shares(table: pd.DataFrame) -> dict[str, float]:
    """What part of the time of a token both leave out, vectorised rebuilding and the position on the GPU."""
    saved = 1 - 1 / table.set_index("way")["ratio"]
    both = (variants.VECTORISED, variants.GRAPH)
    return {way: saved[way] for way in both} if set(both) <= set(saved.index) else {}


def _saved(table: pd.DataFrame) -> str:
    """The same in percent, where kept tables save more."""
    saved = {way: 100 * share for way, share in _shares(table).items()}
    if not saved or not 0 < saved[variants.VECTORISED] < saved[variants.GRAPH]:
        return ""
    first, more = saved[variants.VECTORISED], saved[variants.GRAPH] - saved[variants.VECTORISED]
    ledger.note("saved", {"first": first, "more": more})
    return (
        f"Vectorised rebuilding removes {number(first, '{:.0f}')} % of the time, the position on the GPU "
        f"{number(more, '{:.0f}')} % more."
    )


def _near(table: pd.DataFrame) -> str:
    """How many of the ways that are right take next to no longer than the fastest of them."""
    us = table.set_index("way")["us"].drop(variants.ONE_POSITION, errors="ignore")
    near = us[us <= NEAR * us.min()]
    if len(near) < 2:
        return ""
    ledger.note("near", {"near": len(near), "correct ways": len(us)})
    among = ", one pinned copy of all tables among them" if variants.PINNED in near else ""
    return f"{len(near)} of {len(us)} correct ways are within two percent of the fastest{among}."


def _why_best(rows: pd.DataFrame) -> str:
    """What the advice rests on."""
    if not (best := _best(rows)):
        return ""
    took = f"a token takes {best['us']:.0f} µs with {SHOWN[best['way']]}"
    return f"Cut into {best['records']:.0f} records, {took}: no correct way is clearly faster."


ledger.watch(__name__)
