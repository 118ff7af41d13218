"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.report.figures import Drawing
from labkit.report.words import span
from labkit.studies.state_layout import production_views, tables, variants
from labkit.studies.state_layout.claims import FULL

HEADLINE = ("sglang-20283-tile", "sglang-20283-mechanism", "sglang-20283-end-to-end")


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows: gains of the claim's own code and of ours, full batches."""
    own = tables.released(rows, "SGLang")
    own = own[own["batch"] >= FULL] if len(own) else own
    ours = tables.compared(rows, "step", variants.OURS, variants.OURS_KV)
    found = {"own decode": where(own, op="step")["ratio"], "own verify": where(own, op="verify")["ratio"]}
    found["ours"] = where(ours[ours["batch"] >= FULL], gate="GDN")["ratio"] if len(ours) else pd.Series(dtype=float)
    return {name: span(values) for name, values in found.items() if len(values)}


def conclusion(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Does it hold, in one sentence."""
    own = next(((gpu, one) for gpu, one in facts.items() if "own decode" in one), None)
    if own is None:
        return ""
    return (
        f"[V, K] is faster in SGLang's own kernels (time before over after: decode {own[1]['own decode']}, verify "
        f"{own[1]['own verify']} on the {own[0]}), but not for the reason given."
    )


def advice(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """What an engine should do."""
    return "Take [V, K] with a tile of 32, and choose tile and warps anew for it."


def hero(rows: pd.DataFrame) -> Drawing:
    """What the layout is worth in the claim's own code."""
    return production_views.own_code(rows)


ledger.watch(__name__)
