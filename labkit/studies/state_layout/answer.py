"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import faster
from labkit.studies.state_layout import tables
from labkit.studies.state_layout.claims import FULL, NARROW, WIDE
from labkit.studies.state_layout.variants import STATES
from labkit.studies.state_layout.views import FASTER, INTERVAL

HEADLINE = ("sglang-20283-tile", "sglang-20283-mechanism", "sglang-20283-end-to-end")
WORTH = 1.03  # what a change of layout has to bring, since it changes every kernel that reads the state

Facts = Mapping[str, Mapping[str, Any]]  # by GPU


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows.

    narrow: the most that the plain kernel gains with the narrow tile, the GPU full, fp32. tuned STATE: the most that a
    decode tuned for each layout gains there. from STATE: the batch from which on that is worth it; None: from none.
    """
    narrow, steps = where(tables.ratios(rows), BV=NARROW, warps=1, state="fp32"), tables.gdn_layouts(rows, "step")
    narrow = narrow[narrow["batch"] >= FULL]
    found: dict[str, Any] = {"narrow": _most(narrow["ratio"])} if len(narrow) else {}
    for state in STATES:
        table = where(steps, state=state)
        full = table[table["batch"] >= FULL]["ratio"] if len(table) else table
        if len(full):
            found |= {f"tuned {state}": _most(full), f"from {state}": _worth_from(table)}
    return found


def _most(ratios: pd.Series) -> float:
    most = float(ratios.max())
    ledger.note("most", {"ratio": max(most, 1 / most)})
    return most


def _worth_from(table: pd.DataFrame) -> int | None:
    """The smallest batch from which on every larger one gains at least WORTH."""
    batches = table.sort_values("batch")
    less = batches["batch"][(batches["ratio"] < WORTH) | (batches["verdict"] != "faster")]
    after = batches["batch"][batches["batch"] > less.max()] if len(less) else batches["batch"]
    return int(after.min()) if len(after) else None


def conclusion(facts: Facts) -> str:
    """Does it hold, in one sentence."""
    said = []
    if narrow := _each(facts, "narrow"):
        said.append(f"{_at_best(narrow)} with tiles of {NARROW}")
    if tuned := _each(facts, "tuned fp32"):
        said.append(f"{_at_best(tuned)} if each layout is tuned")
    return f"For fp32 states, [V, K] is {'; '.join(said)}." if said else ""


def _each(facts: Facts, name: str) -> dict[str, Any]:
    """What each GPU that has it says."""
    return {gpu: one[name] for gpu, one in facts.items() if name in one}


def _at_best(ratios: Mapping[str, float]) -> str:
    """ "up to 1.36× (H100) and 1.57× (H200) faster"; where it is slower somewhere, each with its direction."""
    if min(ratios.values()) < 1:
        return "at best " + " and ".join(f"{faster(ratio)} ({gpu})" for gpu, ratio in ratios.items())
    return f"up to {' and '.join(f'{ratio:.2f}× ({gpu})' for gpu, ratio in ratios.items())} faster"


def advice(facts: Facts) -> str:
    """What an engine should do: for which states and from which batch on the layout is worth a change."""
    starts = {state: list(_each(facts, f"from {state}").values()) for state in STATES}
    starts = {state: batches for state, batches in starts.items() if batches}
    if not starts:
        return ""
    worth = {state: max(batches) for state, batches in starts.items() if None not in batches}
    without = [state for state in starts if state not in worth]
    keep = f"{' and '.join(without)} states"
    if not worth:
        return f"Keep the layout and tune tile and warps: for {keep} the layout alone is not worth a change."
    said = " and ".join(f"{state} states as [V, K]{_if_batch(start)}" for state, start in worth.items())
    rest = f"; for {keep} tune the tile first, the layout then changes little." if without else "."
    return f"Store {said}, with tile and warps tuned for it{rest}"


def _if_batch(start: int) -> str:
    return f" if you decode {start} sequences or more" if start > 1 else ""


def hero(rows: pd.DataFrame) -> Drawing:
    """What the layout is worth in each kernel, at the smallest batch that fills the GPU."""
    own, plain = tables.released(rows, "SGLang"), where(_plain(tables.ratios(rows)), warps=1)
    steps = tables.gdn_layouts(rows, "step")
    parts = {
        f"SGLang's verify (tree), tile {NARROW}": where(own, op="verify", gate="GDN, tree"),
        f"plain kernel, tile {NARROW}": where(plain, BV=NARROW),
        f"plain kernel, tile {WIDE}": where(plain, BV=WIDE),
        f"SGLang's decode, tile {WIDE}": where(own, op="step", gate="GDN"),
        "tuned for each layout": steps,
    }
    found = [where(part, batch=FULL).assign(kernel=kernel) for kernel, part in parts.items() if len(part)]
    found = [part for part in found if len(part)]
    if not found:
        return f"no kernel was measured in both layouts at batch {FULL}."
    table = pd.concat([part[["state", "kernel", *INTERVAL, "verdict"]] for part in found], ignore_index=True)
    table = tables.ordered(table, ["state"]).assign(state=lambda part: part["state"] + " state")
    return drawing(
        plots.ratios, table, "kernel", *INTERVAL, group="state", verdict="verdict", xlabel=FASTER,
        title="A narrow tile is what makes [V, K] pay" if _narrow_pays(table) else "What the layout is worth",
        alt="Ratios of the two layouts' times, by kernel and type of state.",
        caption=f"Decode and verify of {FULL} sequences, Qwen3-Next's heads; 95 % intervals.",
    )  # fmt: skip


def _plain(table: pd.DataFrame) -> pd.DataFrame:
    """Of one model: Qwen3-Next, whose heads the other kernels have too; else the first."""
    first = table["model"].iloc[:1].tolist()
    return where(table, model=tables.QWEN3_NEXT.name if tables.QWEN3_NEXT.name in set(table["model"]) else first)


def _narrow_pays(table: pd.DataFrame) -> bool:
    """Whether every kernel with the narrow tile gains more than any other of the same state."""
    narrow = table["kernel"].str.endswith(f"tile {NARROW}")
    least, most = (table[part].groupby("state")["ratio"] for part in (narrow, ~narrow))
    return bool(narrow.any()) and bool((least.min() > most.max().reindex(least.min().index).fillna(1)).all())


ledger.watch(__name__)
