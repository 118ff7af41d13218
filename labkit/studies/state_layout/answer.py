"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import between, faster, note_sizes, number
from labkit.studies.state_layout import tables
from labkit.studies.state_layout.claims import FULL, NARROW, WIDE
from labkit.studies.state_layout.variants import STATES
from labkit.studies.state_layout.views import FASTER, INTERVAL

HEADLINE = ("sglang-20283-tile", "sglang-20283-mechanism", "sglang-20283-end-to-end")
WORTH_PERCENT = 3  # of a change of layout, since it changes every kernel that reads the state
WORTH = 1 + WORTH_PERCENT / 100
VERIFY, PLAIN = "SGLang's verify", "this lab's plain kernel"  # which of them has the narrow tile, the first if measured
DRAFTS = ("tree", "chain")
NARROW_TILE = f"tile {NARROW}"  # what the names of such kernels end in
TUNED = "this lab's decode, tuned for each layout"

Facts = Mapping[str, Mapping[str, Any]]  # by GPU


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows.

    KERNEL from, to: the least and the most that a kernel with the narrow tile gains, fp32 states. tuned STATE: what a
    decode tuned for each layout gains. doubt ...: that such a gain is not clear of the noise. wide: what the layout
    and the narrow tile gain over [K, V] with the wide one. from STATE: the batch from which on a tuned [V, K] is worth
    it; None: from none. little STATE: that it is not at any batch that fills the GPU.
    """
    table, found = _kernels(rows), {}
    for kernel in (VERIFY, PLAIN) if len(table) else ():
        part = table[
            table["kernel"].str.endswith(NARROW_TILE)
            & table["kernel"].str.startswith(kernel)
            & (table["state"] == "fp32")
        ]
        if len(part):
            found |= {f"{kernel} from": _noted(part["ratio"].min()), f"{kernel} to": _noted(part["ratio"].max())}
            found |= {f"doubt {kernel}": True} if "unclear" in set(part["verdict"]) else {}
    for state in STATES if len(table) else ():
        for line in where(table, state=state, kernel=TUNED).to_dict("records"):
            found |= {f"tuned {state}": _noted(line["ratio"])}
            found |= {f"doubt tuned {state}": True} if line["verdict"] == "unclear" else {}
    wide = _wide_tile(rows)
    found |= {"wide": _noted(wide["ratio"].iloc[0])} if len(wide) else {}
    _say(found)
    return found | _starts(rows)


def _say(found: Mapping[str, Any]) -> None:
    """Note the numbers that the sentences show, in their order."""
    kernel = VERIFY if f"{VERIFY} from" in found else PLAIN
    ends = [found[name] for name in (f"{kernel} from", f"{kernel} to") if name in found]
    if len({f"{one:.2f}" for one in ends}) == 1:  # is said once
        ends = ends[:1]
    rest = [found[name] for name in (*(f"tuned {state}" for state in STATES), "wide") if name in found]
    note_sizes((*ends, *rest))


def _wide_tile(rows: pd.DataFrame) -> pd.DataFrame:
    """[K, V] with the wide tile against [V, K] with the narrow one, in the figure's case with fp32 states."""
    return where(tables.tile_or_layout(rows), model=tables.QWEN3_NEXT.name, state="fp32", batch=FULL)


def _starts(rows: pd.DataFrame) -> dict[str, Any]:
    """`from` and `little` of the states that were timed with the GPU full."""
    steps, found = tables.gdn_layouts(rows, "step"), {}
    for state in STATES if len(steps) else ():
        part = where(steps, state=state)
        full = part[part["batch"] >= FULL]
        if len(full):
            found |= {f"from {state}": _worth_from(part), f"little {state}": bool((full["ratio"] < WORTH).all())}
    return found


def _noted(ratio: float) -> float:
    ledger.note("gain", {"ratio": max(ratio, 1 / ratio)})
    return float(ratio)


def _worth_from(table: pd.DataFrame) -> int | None:
    """The smallest batch from which on every larger one gains at least WORTH."""
    batches = table.sort_values("batch")
    less = batches["batch"][(batches["ratio"] < WORTH) | (batches["verdict"] != "faster")]
    after = batches["batch"][batches["batch"] > less.max()] if len(less) else batches["batch"]
    return int(after.min()) if len(after) else None


def conclusion(facts: Facts) -> str:
    """Does the layout matter: with a narrow tile, and to a kernel that was tuned for each layout?"""
    kernel = next((one for one in (VERIFY, PLAIN) if _each(facts, f"{one} from")), "")
    tuned = {state: known for state in STATES if (known := _each(facts, f"tuned {state}"))}
    parts = []
    if kernel:
        gains = _ranges(facts, kernel)
        parts.append(f"[V, K] makes {kernel} ({NARROW} fp32 values per tile) {gains}")
    if tuned:
        said = "; ".join(f"{state} states {_gains(facts, state, known)}" for state, known in tuned.items())
        parts.append(f"Tuned for each layout, this lab's decode {_compared(facts, kernel, tuned)}: {said}")
    return f"{_matters(facts, kernel)} (Qwen3-Next, batch {FULL}). {'. '.join(parts)}." if parts else ""


def _compared(facts: Facts, kernel: str, tuned: Mapping[str, Mapping[str, float]]) -> str:
    """Whether a tuned kernel gains less than the one with the narrow tile does at most, on every GPU."""
    known = [(facts[gpu].get(f"{kernel} to", 0.0), gain) for gains in tuned.values() for gpu, gain in gains.items()]
    return "gains less" if all(most > gain for most, gain in known) else "is with [V, K]"


def _matters(facts: Facts, kernel: str) -> str:
    """Yes or no."""
    narrow = {
        gpu: least >= WORTH and not _doubt(facts, gpu, kernel) for gpu, least in _each(facts, f"{kernel} from").items()
    }
    if narrow and all(narrow.values()):
        return "Yes, with a narrow tile"
    gains = [one[name] for one in facts.values() for name in one if name.endswith(" to") or name.startswith("tuned ")]
    return "In some cases" if max(gains) >= WORTH else "No"


def _each(facts: Facts, name: str) -> dict[str, Any]:
    """What each GPU that has it says."""
    return {gpu: one[name] for gpu, one in facts.items() if name in one}


def _ranges(facts: Facts, kernel: str) -> str:
    """ "on the H100 1.19× to 1.46× faster, on the H200 1.38× to 1.71× faster"."""
    ends = {gpu: (low, facts[gpu][f"{kernel} to"]) for gpu, low in _each(facts, f"{kernel} from").items()}
    return ", ".join(f"on the {gpu}{_doubt(facts, gpu, kernel)} {between(*pair)}" for gpu, pair in ends.items())


def _gains(facts: Facts, state: str, known: Mapping[str, float]) -> str:
    """ "1.08× faster (H100, unclear), 1.15× faster (H200)"."""
    return ", ".join(
        f"{faster(one)} ({gpu}{_doubt(facts, gpu, f'tuned {state}').rstrip(',')})" for gpu, one in known.items()
    )


def _doubt(facts: Facts, gpu: str, name: str) -> str:
    return ", unclear," if f"doubt {name}" in facts[gpu] else ""


def advice(facts: Facts) -> str:
    """What an engine should do: with a narrow tile, and with kernels that are tuned."""
    wide = _each(facts, "wide")
    if not all(one.get(f"{PLAIN} from", WORTH) >= WORTH for one in facts.values()):
        wide = {}
    said = ", ".join(f"{faster(1 / ratio)} ({gpu})" for gpu, ratio in wide.items())
    narrow = (
        f"With {NARROW} values per tile, store the state as [V, K]. To widen the tile instead ([K, V] with {WIDE} "
        f"values) is {said}; plain kernel, fp32."
    )
    return " ".join(filter(None, [narrow if wide else "", _when_tuned(facts)]))


def _when_tuned(facts: Facts) -> str:
    """For which states and from which batch on the layout is worth a change of a tuned kernel."""
    starts = {state: list(_each(facts, f"from {state}").values()) for state in STATES}
    starts = {state: batches for state, batches in starts.items() if batches}
    worth = {state: max(batches) for state, batches in starts.items() if None not in batches}
    pays = " and ".join(f"{state} states{_if_batch(start)}" for state, start in worth.items())
    rest = [state for state in starts if state not in worth]
    little = all(all(_each(facts, f"little {state}").values()) for state in rest)
    less = f"gain less than {WORTH_PERCENT} % at batch {FULL} and more" if little else "do not gain as surely"
    parts = [f"[V, K] pays for {pays}" if worth else "", f"{' and '.join(rest)} states {less}" if rest else ""]
    return f"With tuned kernels, {'; '.join(filter(None, parts))}." if starts else ""


def _if_batch(start: int) -> str:
    return f" from batch {start} on" if start > 1 else ""


def hero(rows: pd.DataFrame) -> Drawing:
    """What the layout is worth in each kernel, at the smallest batch that fills the GPU."""
    table = _kernels(rows)
    if table.empty:
        return f"no kernel was measured in both layouts at batch {FULL}."
    return drawing(
        plots.ratios, table.assign(state=table["state"] + " state"), "kernel", *INTERVAL, group="state",
        verdict="verdict", xlabel=FASTER,
        title="[V, K] gains most with a narrow tile" if _narrow_pays(table) else "What the layout is worth",
        alt="Ratios of the two layouts' times, by kernel and type of state.",
        caption=f"Batch {FULL}, Qwen3-Next's heads, 95 % intervals; tile: values per tile. Plain kernel: one kernel of "
        f"this lab, both layouts. {HOLLOW}",
        said=_said_noise(table),
    )  # fmt: skip


HOLLOW = (
    "Hollow: less than 1 %, or not beyond the noise, which is what two timings of the same kernel differ by in that "
    "case (above 1 % it counts three times)."
)


def _said_noise(table: pd.DataFrame) -> str:
    """ "Most noise: ±2.4 % (this lab's decode, tuned for each layout, bf16)", of what is unclear if there is any."""
    table = table.dropna(subset=["noise"])
    if table.empty:
        return ""
    doubt = table[table["verdict"] == "unclear"]
    some = doubt if len(doubt) else table
    line = some.loc[some["noise"].idxmax()]
    noise = f"±{number(100 * line['noise'], '{:.1f}')} % ({line['kernel']}, {line['state']})"
    return f"{'Hollow, with a noise of' if len(doubt) else 'Most noise:'} {noise}"


def _kernels(rows: pd.DataFrame) -> pd.DataFrame:
    """The lines of the figure: state, kernel, ratio with its interval, verdict; empty if there are none."""
    own, steps = tables.released(rows, "SGLang"), tables.gdn_layouts(rows, "step")
    plain = where(tables.ratios(rows), warps=1, model=tables.QWEN3_NEXT.name)  # whose heads the other kernels have too
    parts = {
        f"{VERIFY}, {draft} of drafts, tile {NARROW}": where(own, op="verify", gate=f"GDN, {draft} of drafts")
        for draft in DRAFTS
    } | {
        f"{PLAIN}, tile {NARROW}": where(plain, BV=NARROW),
        f"{PLAIN}, tile {WIDE}": where(plain, BV=WIDE),
        f"SGLang's decode, tile {WIDE}": where(own, op="step", gate="GDN"),
        TUNED: steps,
    }
    found = [where(part, batch=FULL).assign(kernel=kernel) for kernel, part in parts.items() if len(part)]
    found = [part[["state", "kernel", "batch", *INTERVAL, "noise", "verdict"]] for part in found if len(part)]
    return tables.ordered(pd.concat(found, ignore_index=True), ["state"]) if found else pd.DataFrame()


def _narrow_pays(table: pd.DataFrame) -> bool:
    """Whether every kernel with the narrow tile gains more than any other of the same state."""
    narrow = table["kernel"].str.endswith(NARROW_TILE)
    least, most = (table[part].groupby("state")["ratio"] for part in (narrow, ~narrow))
    return bool(narrow.any()) and bool((least.min() > most.max().reindex(least.min().index).fillna(1)).all())


ledger.watch(__name__)
