"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.bench.verdict import geometric_mean
from labkit.report import plots, words
from labkit.report.figures import Drawing, drawing
from labkit.studies.batched_ffn import tables, variants
from labkit.studies.batched_ffn.claims import TOKENS, UNPACKED

HEADLINE = ("bits", "launches", "reuse")
QUANTISED = tuple(format for format in variants.FORMATS if format not in UNPACKED)
STEPS = {"one launch": "One launch for all tokens", "weights read once": "Then each weight read once"}
KERNEL = tables.ALONE["product"]

Facts = Mapping[str, Any]


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows; empty unless both changes were timed.

    launch, reads: how much faster each change makes a product of `TOKENS` tokens, quantised, geometric mean of cases;
    same, cases: in how many of all cases and variants a token has its bits. up to: most tokens at which `KERNEL` is no
    slower than bf16 cuBLAS, quantised, geometric mean; above: the tokens at which it first is. Either may be missing.
    """
    gains = where(tables.gains(rows), N=TOKENS, format=QUANTISED)
    ratios = {step: gains[gains["step"] == step]["ratio"] for step in STEPS}
    if any(part.empty for part in ratios.values()):
        return {}
    launch, reads = map(geometric_mean, ratios.values())
    bits = tables.bits(rows)
    own = bits[bits["who"] == tables.OWN]
    found = {"launch": launch, "reads": reads, "same": int(own["same"].sum()), "cases": int(own["cases"].sum())}
    return found | _limit(tables.beside(rows, "product", variants.CUBLAS))


def _limit(beside: pd.DataFrame) -> dict[str, int]:
    """Up to how many tokens the kernel keeps up with the library, and from how many on it does not."""
    mean = where(beside, format=QUANTISED).groupby("N")["ratio"].agg(geometric_mean)
    slower = mean.index[mean < 1]
    first = slower.min() if len(slower) else None
    kept = [n for n in mean.index if first is None or n < first]
    return ({"up to": int(max(kept))} if kept else {}) | ({} if first is None else {"above": int(first)})


def conclusion(facts: Mapping[str, Facts]) -> str:
    """What batching saves, and whether a token keeps its bits."""
    if not facts:
        return ""
    kept = all(one["same"] == one["cases"] for one in facts.values())
    bits = "A token keeps its bits" if kept else "A token's bits may change"
    gains = ", ".join(f"{gpu} {_faster(one['launch'], one['reads'])}" for gpu, one in facts.items())
    return f"{bits}; {_saves(facts.values())}: at {TOKENS} tokens a single launch and then a single read are {gains}."


def _saves(facts: Iterable[Facts]) -> str:
    more = {one["reads"] > one["launch"] for one in facts}
    if len(more) > 1:
        return "what batching saves differs by GPU"
    return "batching saves bytes more than launches" if more == {True} else "batching saves launches more than bytes"


def _faster(first: float, second: float) -> str:
    """ "1.21× and 2.19× faster"."""
    if min(first, second) >= 1:
        return f"{first:.2f}× and {words.faster(second)}"
    return f"{words.faster(first)} and {words.faster(second)}"


def advice(facts: Mapping[str, Facts]) -> str:
    """Which kernel to take, and up to how many tokens."""
    kept, lost = _tokens(facts, "up to"), _tokens(facts, "above")
    library = "multiply dequantised bf16 weights by cuBLAS, if they fit"
    if not kept:
        return f"{library[0].upper()}{library[1:]}." if lost else ""
    end = f"; from {lost} on {library}" if lost else ""
    return f"Unpack quantised weights inside a kernel of matrix instructions ({KERNEL}) up to {kept}{end}."


def _tokens(facts: Mapping[str, Facts], name: str) -> str:
    """ "32 tokens"; where GPUs differ, "H100 32 and H200 16 tokens"."""
    counts = {gpu: one[name] for gpu, one in facts.items() if name in one}
    if len(set(counts.values())) < 2:
        return "".join(map(words.tokens, set(counts.values())))
    return f"{' and '.join(f'{gpu} {count}' for gpu, count in counts.items())} tokens"


def hero(rows: pd.DataFrame) -> Drawing:
    """What each of the two changes is worth, by format, at `TOKENS` tokens, in the largest product timed."""
    table = where(tables.gains(rows), N=TOKENS)
    if table.empty:
        return f"the loop, one launch, and weights read once were not timed beside each other at {TOKENS} tokens."
    first = table.loc[table["rows"].idxmax()]
    table = where(table, rows=first["rows"], K=first["K"])
    of = {step: geometric_mean(part) for step, part in table.groupby("step")["ratio"]}
    more = of.get("weights read once", 1.0) > of.get("one launch", 1.0)
    return drawing(
        plots.ratios, table.assign(change=table["step"].map(STEPS)), "format", "ratio", "low", "high", panel="change",
        verdict="verdict", xlabel="× faster than before the change",
        title="Bytes are what batching saves" if more else "Launches are what batching saves",
        caption=f"One product of {TOKENS} tokens, {first['rows']} × {first['K']}, cold weights, 95 % intervals.",
        alt="Ratios of times before and after each of two changes, by weight format.",
        table=["change", "format", "ratio", "low", "high", "noise", "verdict"],
    )  # fmt: skip


ledger.watch(__name__)
