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
WORTH, WORTH_SAID = 1.03, "three percent"  # of a change of layout, since it changes every kernel that reads the state
TUNED = "tuned for each layout"

Facts = Mapping[str, Mapping[str, Any]]  # by GPU


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows.

    narrow STATE: the most that a kernel of the figure gains with the narrow tile. tuned STATE: what a decode tuned for
    each layout gains there. doubt ...: that such a gain is not clear of the noise. from STATE: the batch from which on
    a tuned [V, K] is worth it; None: from none.
    """
    table, found = _kernels(rows), {}
    for state in STATES if len(table) else ():
        some = table[table["state"] == state]
        for name, part in (("narrow", some[_is_narrow(some)]), ("tuned", some[some["kernel"] == TUNED])):
            if len(part):
                most = part.loc[part["ratio"].idxmax()]
                found |= {f"{name} {state}": _most(part["ratio"])}
                found |= {f"doubt {name} {state}": True} if most["verdict"] == "unclear" else {}
    return found | {f"from {state}": start for state, start in _starts(rows).items()}


def _starts(rows: pd.DataFrame) -> dict[str, int | None]:
    """State -> the batch from which on a tuned [V, K] is worth it, of the states that were timed with the GPU full."""
    steps = tables.gdn_layouts(rows, "step")
    parts = {state: where(steps, state=state) for state in STATES if len(steps)}
    return {state: _worth_from(part) for state, part in parts.items() if len(part) and (part["batch"] >= FULL).any()}


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
    """What the layout is worth at best in the figure, with the narrow tile and tuned, of each type of state."""
    parts = {"narrow": f"with a tile of {NARROW}, [V, K] against [K, V] is at best", "tuned": f"{TUNED}, at best"}
    said = "; ".join(f"{how} {best}" for name, how in parts.items() if (best := _at_best(facts, name)))
    return f"Qwen3-Next, batch {FULL}: {said}." if said else ""


def _each(facts: Facts, name: str) -> dict[str, Any]:
    """What each GPU that has it says."""
    return {gpu: one[name] for gpu, one in facts.items() if name in one}


def _at_best(facts: Facts, name: str) -> str:
    """ "1.03× faster (fp32, H200, unclear) and 2.21× faster (bf16, H200)"."""
    gains = {state: _each(facts, f"{name} {state}") for state in STATES}
    best = {state: max(known, key=known.__getitem__) for state, known in gains.items() if known}
    doubt = {state: ", unclear" if f"doubt {name} {state}" in facts[gpu] else "" for state, gpu in best.items()}
    return " and ".join(f"{faster(gains[state][gpu])} ({state}, {gpu}{doubt[state]})" for state, gpu in best.items())


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
    table = _kernels(rows)
    if table.empty:
        return f"no kernel was measured in both layouts at batch {FULL}."
    return drawing(
        plots.ratios, table.assign(state=table["state"] + " state"), "kernel", *INTERVAL, group="state",
        verdict="verdict", xlabel=FASTER,
        title="A narrow tile is what makes [V, K] pay" if _narrow_pays(table) else "What the layout is worth",
        alt="Ratios of the two layouts' times, by kernel and type of state.",
        caption=f"Decode and verify at batch {FULL}, Qwen3-Next's heads; 95 % intervals. {HOLLOW} "
        f"{LINES if _wide_pays(table) else ''}".strip(),
        said=_said_starts(_starts(rows)),
    )  # fmt: skip


HOLLOW = (
    "Hollow: within ±1 %, or not clear of the noise between two identical kernels, which differs from case to case."
)
LINES = (
    f"With fp32 and tile {WIDE} a request touches as many cache lines in both layouts, yet [V, K] gains: the length of "
    "runs alone is not the cause."
)


def _said_starts(starts: Mapping[str, int | None]) -> str:
    """ "Tuned, three percent or more is gained at no batch (fp32), from batch 128 on (bf16)"."""
    said = [
        f"{'at no batch' if start is None else f'from batch {start} on'} ({state})" for state, start in starts.items()
    ]
    return f"Tuned, {WORTH_SAID} or more is gained {', '.join(said)}" if said else ""


def _kernels(rows: pd.DataFrame) -> pd.DataFrame:
    """The lines of the figure: state, kernel, ratio with its interval, verdict; empty if there are none."""
    own, steps = tables.released(rows, "SGLang"), tables.gdn_layouts(rows, "step")
    plain = where(tables.ratios(rows), warps=1, model=tables.QWEN3_NEXT.name)  # whose heads the other kernels have too
    parts = {
        f"SGLang's verify (tree), tile {NARROW}": where(own, op="verify", gate="GDN, tree"),
        f"plain kernel, tile {NARROW}": where(plain, BV=NARROW),
        f"plain kernel, tile {WIDE}": where(plain, BV=WIDE),
        f"SGLang's decode, tile {WIDE}": where(own, op="step", gate="GDN"),
        TUNED: steps,
    }
    found = [where(part, batch=FULL).assign(kernel=kernel) for kernel, part in parts.items() if len(part)]
    found = [part[["state", "kernel", "batch", *INTERVAL, "verdict"]] for part in found if len(part)]
    return tables.ordered(pd.concat(found, ignore_index=True), ["state"]) if found else pd.DataFrame()


def _is_narrow(table: pd.DataFrame) -> pd.Series:
    return table["kernel"].str.endswith(f"tile {NARROW}")


def _narrow_pays(table: pd.DataFrame) -> bool:
    """Whether every kernel with the narrow tile gains more than any other of the same state."""
    narrow = _is_narrow(table)
    least, most = (table[part].groupby("state")["ratio"] for part in (narrow, ~narrow))
    return bool(narrow.any()) and bool((least.min() > most.max().reindex(least.min().index).fillna(1)).all())


def _wide_pays(table: pd.DataFrame) -> bool:
    """Whether every kernel with the wide tile, of which there must be one, is faster with [V, K], states in fp32."""
    wide = table[table["kernel"].str.endswith(f"tile {WIDE}") & (table["state"] == "fp32")]
    return bool(len(wide)) and bool((wide["verdict"] == "faster").all())


ledger.watch(__name__)
