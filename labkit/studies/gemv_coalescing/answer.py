"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.bench.verdict import geometric_mean
from labkit.report.figures import Drawing
from labkit.report.words import between, faster, note_sizes
from labkit.studies.gemv_coalescing import chain_views, shown, tables, variants, views
from labkit.studies.gemv_coalescing.claims import PULL_REQUEST

HEADLINE = ("step", "pattern", "ceiling")

Facts = Mapping[str, Any]


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows; empty unless both steps over one thread per row were timed.

    alone: geometric mean of the gain of coalescing alone; slower, cases: at how many shapes and types it loses. paying:
    the most that it gains, and rows: from how many rows on it gains at all shapes, where it loses at some.
    least, most: gain of one warp per row. stored: whether W as [K, N] is slower than that, with 16-byte loads, at every
    shape. plain: mean gain of one warp per row with 16-byte loads over cuBLAS, large W in bf16. merging: least gain of
    merging, whole layers. model, trigger, ordinary: gain over cuBLAS in a model's whole layers, with either kind of
    kernel between. All but the first three and those of a warp may be missing.
    """
    table = tables.steps(rows)
    table = where(table, over=variants.THREAD_A_ROW).set_index("step") if len(table) else table
    if not {variants.THREAD_A_ROW_TURNED, variants.WARP_A_ROW} <= set(table.index):
        return {}
    alone, warp = table.loc[variants.THREAD_A_ROW_TURNED], table.loc[variants.WARP_A_ROW]
    found = {"alone": float(alone["mean ratio"]), "slower": int(alone["slower"]), "cases": int(alone["cases"])}
    found |= {"least": float(warp["least"]), "most": float(warp["most"])}
    walked = tables.pattern(rows)
    if alone["slower"] and (start := tables.pays_from(walked)):
        found |= {"paying": float(alone["most"]), "rows": start}
    found |= {"stored": bool((walked["with width"] > walked["pattern alone"]).all())} if len(walked) else {}
    plain = where(tables.against_cublas(rows, variants.WIDE_LOADS), dtype="bf16")
    plain = plain[plain["MB"] >= tables.LARGE_MB]["ratio"]
    merging = where(chain_views.merging(rows), kernel=shown.LAB)["ratio"]
    found |= {"plain": geometric_mean(plain)} if len(plain) else {}
    found |= ({"merging": float(merging.min())} if len(merging) else {}) | _between(tables.chains(rows))
    note_sizes(found[name] for name in ("paying", "least", "most", "trigger") if name in found)  # in their order
    return found


def _between(chains: pd.DataFrame) -> dict[str, Any]:
    """Gains over cuBLAS by what stands between, of one model: the pull request's, or else the one that comes last."""
    chains = chains[chains["ratio"].notna()]
    kinds = {"trigger": variants.BETWEEN_TRIGGER, "ordinary": variants.BETWEEN_OURS}
    both = [model for model, part in chains.groupby("model", sort=False) if {*kinds.values()} <= set(part["variant"])]
    if not both:
        return {}
    model = PULL_REQUEST if PULL_REQUEST in both else both[-1]
    ratio = where(chains, model=model).set_index("variant")["ratio"]
    return {"model": model} | {name: float(ratio[variant]) for name, variant in kinds.items()}


def conclusion(facts: Mapping[str, Facts]) -> str:
    """Is it coalescing that makes a GEMV faster?"""
    if not facts:
        return ""
    loses = {one["alone"] < 1 for one in facts.values()}
    short = {frozenset({True}): "Not by itself", frozenset({False}): "On average, yes"}
    counts = _each(facts, lambda one: f"{one['slower']} of {one['cases']}")
    each = " on each GPU" if len(facts) > 1 and "(" not in counts else ""
    alone = f"coalescing alone (W stored [K, N], one thread per row) slows {counts} GEMVs{each}"
    paying = {gpu: one for gpu, one in facts.items() if "paying" in one}
    if paying:
        rows = max(one["rows"] for one in paying.values())
        alone += f"; from {rows} rows on all gain, at best {_gains(paying, 'paying')}"
    warp = ", ".join(f"on the {gpu} {between(one['least'], one['most'])}" for gpu, one in facts.items())
    start = short.get(frozenset(loses), "On some GPUs alone")
    return f"{start}: {alone}. One warp per row is coalesced too, and has more threads: it makes all {warp}."


def advice(facts: Mapping[str, Facts]) -> str:
    """Which kernel to take, how to store W, what to merge, and what dependent launch needs."""
    if any(one.get("plain", 0.0) <= 1 for one in facts.values()) or not facts:
        return "Keep cuBLAS: one warp per row with loads of 16 bytes is no faster here." if facts else ""
    parts = ["Give each row of W [N, K] one warp, with 16-byte loads"]
    if all(one.get("stored") for one in facts.values()):
        parts[0] += "; one thread per row over W [K, N] is slower than that at every shape"
    if all(one.get("merging", 0.0) > 1 for one in facts.values()):
        parts.append("Merge matrices with the same x")
    known = {gpu: one for gpu, one in facts.items() if "trigger" in one}
    if known and all(one["trigger"] > chain_views.CLOSE * one["ordinary"] for one in known.values()):
        of = " and ".join(dict.fromkeys(one["model"] for one in known.values()))
        parts.append(
            f"Add dependent launch, triggered early by the kernel in front: {of}'s layers are then "
            f"{_gains(known, 'trigger')} than with cuBLAS, launched as usual"
        )
    return f"{'. '.join(parts)}."


def _gains(facts: Mapping[str, Facts], name: str) -> str:
    """ "5.11× faster (H100), 6.14× faster (H200)"."""
    return ", ".join(f"{faster(one[name])} ({gpu})" for gpu, one in facts.items())


def _each(facts: Mapping[str, Facts], tell: Callable[[Facts], str]) -> str:
    """ "12 of 12 (H100), 0 of 12 (H200)"; "35 of 45" where all say the same."""
    told = {gpu: tell(one) for gpu, one in facts.items()}
    same = set(told.values())
    return same.pop() if len(same) == 1 else ", ".join(f"{text} ({gpu})" for gpu, text in told.items())


def hero(rows: pd.DataFrame) -> Drawing:
    """The speed of one GEMV, step by step."""
    drawn = views.speeds(rows)
    return drawn if isinstance(drawn, str) else replace(drawn, about=f"{drawn.about} {NAMES}")


NAMES = (
    "Dependent launch (CUDA's PDL): also tuned, and it starts before the kernel in front ends. cuBLAS: ordinary launch."
)


ledger.watch(__name__)
