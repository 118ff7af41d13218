"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.report.figures import Drawing
from labkit.report.words import SAME, compared, gains
from labkit.report.words import tokens as in_tokens
from labkit.studies.moe_persistent_grid import grid_views, tables, variants

HEADLINE = ("prefill", "few-tokens", "loop-grid")
TILES, PERSISTENT, EITHER = "one CTA per tile", "a persistent grid", "either grid"


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows; each only where it was measured.

    own: what the persistent grid gains in ExecuTorch's own layer, in words; own least, own most: the numbers in them.
    fewest, many: its tokens. kinds: of its activations. grid: the one that wins more of those cases; without them, of
    the lab's products with as many CTAs as fit. empty, tokens: what its products gain without empty blocks, at the most
    tokens timed. fill: whether as many CTAs as fit pay where more than one does.
    """
    own, changes = tables.released_grids(rows), tables.own_products(rows)
    found: dict[str, Any] = {}
    if len(own):
        found |= _ends("own", own["ratio"])
        found |= {"fewest": int(own["T"].min()), "many": int(own["T"].max())}
        found["kinds"] = " and ".join(own["activations"].unique())
    judged = own if len(own) else where(tables.persistence(rows), persistent=variants.OURS_FILLED)
    if len(judged):
        found["grid"] = _winner(judged["verdict"])
    live = where(changes, change=grid_views.LIVE_CHANGES[0])
    if len(live):
        most = live["T"].max()
        found |= _ends("empty", where(live, T=most)["ratio"])
        found |= {"tokens": in_tokens(most), "empty pays": bool((live["verdict"] == "faster").all())}
    filled = where(changes, change=variants.FILLED)
    filled = filled[filled["CTAs an SM"] > 1]
    if len(filled):
        found["fill"] = bool((filled["verdict"] == "faster").mean() > 0.5)
    return found


def _ends(name: str, ratios: pd.Series) -> dict[str, Any]:
    """Both ends of what is gained as they are said, and the two numbers in it."""
    ends = sorted(max(end, 1 / end) for end in (float(ratios.min()), float(ratios.max())))
    return {name: gains(ratios), f"{name} least": ends[0], f"{name} most": ends[1]}


def _winner(said: pd.Series) -> str:
    """The grid that most of these verdicts on the persistent one favour."""
    faster_in, slower_in = ((said == word).sum() for word in ("faster", "slower"))
    return TILES if slower_in > faster_in else PERSISTENT if faster_in > slower_in else EITHER


def conclusion(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Does the persistent grid pay, in one sentence."""
    own = {gpu: one for gpu, one in facts.items() if "own" in one}
    if not own:
        ways = {gpu: one["grid"] for gpu, one in facts.items() if "grid" in one}
        said = ", ".join(f"{'neither' if grid == EITHER else grid} on the {gpu}" for gpu, grid in ways.items())
        return f"ExecuTorch's own layer was not timed; the faster one in the lab's products is {said}." if ways else ""
    words = {TILES: "No", PERSISTENT: "Yes", EITHER: "No difference"}
    answers = {words[one["grid"]] for one in own.values()}
    answer = answers.pop() if len(answers) == 1 else "It differs"
    (gained, gpus), *others = _once((gpu, one["own"]) for gpu, one in own.items())
    said = f"{answer}: a persistent grid makes ExecuTorch's whole layer {compared(gained, TILES)} on the {gpus}"
    said += "".join(f", {gained} on the {gpus}" for gained, gpus in others)
    mixed = any(" slower to " in one["own"] or SAME in one["own"] for one in own.values())
    fewest, many = min(one["fewest"] for one in own.values()), max(one["many"] for one in own.values())
    tokens = f"{fewest} to {many}; {next(iter(own.values()))['kinds']}"
    return f"{said}, {'by' if mixed else 'at every'} number of tokens timed ({tokens})."


def _once(said: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """What is said of each GPU and of which; once where two read the same: ("1.60× faster", "H100 and H200")."""
    gpus: dict[str, list[str]] = {}
    for gpu, words in said:
        gpus.setdefault(words, []).append(gpu)
    return [(words, " and ".join(some)) for words, some in gpus.items()]


def advice(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """How to launch the products of an expert layer."""
    grids = {one["grid"] for one in facts.values() if "grid" in one}
    if not grids:
        return ""
    said = f"Launch {next(iter(grids)) if len(grids) == 1 else EITHER}."
    empty = {gpu: one for gpu, one in facts.items() if one.get("empty pays")}
    if empty:
        tokens = next(iter(empty.values()))["tokens"]
        parts = _once((gpu, one["empty"]) for gpu, one in empty.items())
        gained = ", ".join(f"{words} on the {gpus}" for words, gpus in parts)
        said += f" Skip empty blocks (CTAs that find no rows): at {tokens}, if the host knows how many, "
        said += f"single products become {gained}."
    if grids != {PERSISTENT} and any(one.get("fill") for one in facts.values()):
        said += " If the grid must be persistent, launch as many CTAs as fit."
    return said


def hero(rows: pd.DataFrame) -> Drawing:
    """What each change of a launch is worth to ExecuTorch's own products."""
    return grid_views.point(rows)


ledger.watch(__name__)
