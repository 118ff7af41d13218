"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.bench.verdict import geometric_mean
from labkit.report.figures import Drawing
from labkit.studies.gemv_coalescing import chain_views, shown, tables, variants, views
from labkit.studies.gemv_coalescing.claims import CEILING, PULL_REQUEST

HEADLINE = ("step", "pattern", "ceiling")

Facts = Mapping[str, Any]


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows; empty unless both steps over a thread a row were timed.

    alone: geometric mean of the gain of coalescing alone; slower, cases: at how many shapes and types it loses. least,
    most: gain of a warp a row. plain: mean gain of a warp a row with 16-byte loads over cuBLAS, large W in bf16.
    merging: least gain of merging, whole layers. model, trigger, ordinary: gain over cuBLAS in a model's whole layers,
    with either kind of kernel between. streams: shares of the read ceiling that a token's merged GEMVs
    reach, with other kernels between and without, the least and the most. All but the first five may be missing.
    """
    table = tables.steps(rows)
    table = where(table, over=variants.THREAD_A_ROW).set_index("step") if len(table) else table
    if not {variants.THREAD_A_ROW_TURNED, variants.WARP_A_ROW} <= set(table.index):
        return {}
    alone, warp = table.loc[variants.THREAD_A_ROW_TURNED], table.loc[variants.WARP_A_ROW]
    found = {"alone": float(alone["mean ratio"]), "slower": int(alone["slower"]), "cases": int(alone["cases"])}
    found |= {"least": float(warp["least"]), "most": float(warp["most"])}
    plain = where(tables.against_cublas(rows, variants.WIDE_LOADS), dtype="bf16")
    plain = plain[plain["MB"] >= tables.LARGE_MB]["ratio"]
    merging = where(chain_views.merging(rows), kernel=shown.LAB)["ratio"]
    found |= {"plain": geometric_mean(plain)} if len(plain) else {}
    token = tables.of_ceiling(rows, PULL_REQUEST, [variants.CHAIN_OURS, variants.BETWEEN_OURS])["ratio"]
    found |= {"streams from": float(token.min()), "streams to": float(token.max())} if len(token) == 2 else {}
    return found | ({"merging": float(merging.min())} if len(merging) else {}) | _between(tables.chains(rows))


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
    counts = _each(facts, lambda one: f"{one['slower']} of {one['cases']}")
    alone = f"pays on some GPUs only (slower in {counts})"
    if loses == {True}:
        alone = f"slows {counts} GEMVs{' on each GPU' if counts[0].isdigit() and len(facts) > 1 else ''}"
    elif loses == {False}:
        alone = f"makes GEMVs faster on average (slower in {counts})"
    faster = "makes all faster" if all(one["least"] > 1 for one in facts.values()) else "makes them faster or slower"
    warp = _each(facts, lambda one: " to ".join(dict.fromkeys(f"{one[end]:.2f}" for end in ("least", "most"))) + "×")
    return f"Against a thread a row, coalescing alone (W stored [K, N]) {alone}; a warp a row {faster}: {warp}."


def advice(facts: Mapping[str, Facts]) -> str:
    """Which kernel to take, what to merge, and what dependent launch needs."""
    if any(one.get("plain", 0.0) <= 1 for one in facts.values()) or not facts:
        return "Keep cuBLAS: a warp a row with loads 16 bytes wide is no faster here." if facts else ""
    parts = ["a warp a row", "loads 16 bytes wide"]
    if all(one.get("merging", 0.0) > 1 for one in facts.values()):
        parts.append("merged matrices")
    known = {gpu: one for gpu, one in facts.items() if "trigger" in one}
    if known and all(one["trigger"] > chain_views.CLOSE * one["ordinary"] for one in known.values()):
        gains = _each(known, lambda one: f"{one['ordinary']:.2f}× without, {one['trigger']:.2f}× with it")
        of = f"gain over cuBLAS in {' and '.join(dict.fromkeys(one['model'] for one in known.values()))}"
        parts.append(f"dependent launch, with its trigger in the kernel in front ({of}: {gains})")
    streams = {gpu: one for gpu, one in facts.items() if one.get("streams from", 0.0) > CEILING}
    reach = _each(streams, lambda one: f"{100 * one['streams from']:.0f} to {100 * one['streams to']:.0f} %")
    more = f" Decode is not at the claimed ceiling: merged GEMVs stream at {reach} of the read ceiling" if reach else ""
    more += ", with other kernels between and without." if reach else ""
    return f"Use {', '.join(parts[:-1])} and {parts[-1]}.{more}"


def _each(facts: Mapping[str, Facts], tell: Callable[[Facts], str]) -> str:
    """ "H100 3.3×, H200 4.7×", each GPU in front of its numbers; "35 of 45" where all say the same."""
    told = {gpu: tell(one) for gpu, one in facts.items()}
    same = set(told.values())
    return same.pop() if len(same) == 1 else ", ".join(f"{gpu} {text}" for gpu, text in told.items())


def hero(rows: pd.DataFrame) -> Drawing:
    """The speed of one GEMV, step by step."""
    drawn = views.speeds(rows)
    return drawn if isinstance(drawn, str) else replace(drawn, about=f"{drawn.about} {NAMES}")


NAMES = (
    "Tuned: rows, warps and tile as chosen for dependent launch, here without it. In the claims, ours is the lab's "
    "GEMV with dependent launch; merged: matrices with the same x are one; kernels between: others stand between the "
    "GEMVs, as in decode, without the trigger."
)


ledger.watch(__name__)
