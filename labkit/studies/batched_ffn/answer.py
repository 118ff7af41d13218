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
STEPS = {"one launch": "One launch, not a loop", "weights read once": "Then weights read once, not N times"}
KERNEL = tables.ALONE["product"]

Facts = Mapping[str, Any]


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows; empty unless both changes were timed.

    launch, reads: how much faster each change makes a product of `TOKENS` tokens, quantised, geometric mean of cases;
    same, cases: in how many of all cases and variants a token has its bits; kernel: whether `KERNEL` always keeps them
    in a product; library: whether bf16 cuBLAS was seen not to. up to: most tokens at which `KERNEL` is no slower than
    bf16 cuBLAS, quantised, geometric mean; above: the tokens at which it first is. Either may be missing.
    """
    means = _means(where(tables.gains(rows), N=TOKENS, format=QUANTISED))
    if set(means) != set(STEPS):
        return {}
    launch, reads = (means[step] for step in STEPS)
    bits = tables.bits(rows)
    own = bits[bits["who"] == tables.OWN]
    found = {"launch": launch, "reads": reads, "same": int(own["same"].sum()), "cases": int(own["cases"].sum())}
    kernel, library = (where(bits, op="product", variant=variant) for variant in (KERNEL, variants.CUBLAS))
    found["kernel"] = len(kernel) > 0 and bool((kernel["same"] == kernel["cases"]).all())
    found["library"] = bool((library["same"] < library["cases"]).any())
    return found | _limit(_beside(rows))


def _means(gains: pd.DataFrame) -> dict[str, float]:
    """Step -> the geometric mean of its gains."""
    return {step: geometric_mean(part) for step, part in gains.groupby("step")["ratio"]}


def _beside(rows: pd.DataFrame) -> pd.Series:
    """Time of bf16 cuBLAS over that of `KERNEL` by tokens, geometric mean of quantised products."""
    table = where(tables.beside(rows, "product", variants.CUBLAS), format=QUANTISED)
    return table.groupby("N")["ratio"].agg(geometric_mean)


def _limit(mean: pd.Series) -> dict[str, int]:
    """Up to how many tokens the kernel keeps up with the library, and from how many on it does not."""
    slower = mean.index[mean < 1]
    first = slower.min() if len(slower) else None
    kept = [n for n in mean.index if first is None or n < first]
    return ({"up to": int(max(kept))} if kept else {}) | ({} if first is None else {"above": int(first)})


def conclusion(facts: Mapping[str, Facts]) -> str:
    """What batching saves, and whether outputs keep their bits; of the second change what it adds to the first."""
    if not facts:
        return ""
    kept = all(one["same"] == one["cases"] for one in facts.values())
    bits = "Outputs are bit-identical" if kept else "Outputs may differ"
    (gpu, first), *others = facts.items()
    said = f"{bits}; {_saves(facts.values())}: at {TOKENS} tokens, quantised, one launch is "
    said += f"{words.faster(first['launch'], 'a loop')}, "
    said += f"weights read once {words.faster(first['reads'], 'that')} ({gpu})"
    return said + "".join(f"; {_faster(one['launch'], one['reads'])} ({gpu})" for gpu, one in others) + "."


def _saves(facts: Iterable[Facts]) -> str:
    more = {one["reads"] > one["launch"] for one in facts}
    if len(more) > 1:
        return "what batching saves differs by GPU"
    return "batching saves bytes more than launches" if more == {True} else "batching saves launches more than bytes"


def _faster(first: float, second: float) -> str:
    """ "1.21×, then 2.19× faster"."""
    both = [words.faster(one) for one in (first, second)]
    if all(one.endswith(" faster") for one in both):
        both[0] = both[0].removesuffix(" faster")
    return ", then ".join(both)


def advice(facts: Mapping[str, Facts]) -> str:
    """Which kernel to take, and up to how many tokens, by means of the cases; what each does to bits."""
    kept, lost = _tokens(facts, "up to"), _tokens(facts, "above")
    library = "multiply dequantised bf16 weights by cuBLAS, if they fit"
    library += " and bits may change" if any(one["library"] for one in facts.values()) else ""
    if not kept:
        return f"{library[0].upper()}{library[1:]}." if lost else ""
    how = f"{KERNEL}{', bit-identical' if all(one['kernel'] for one in facts.values()) else ''}"
    end = f"; from {lost} on {library}; between, nothing was timed" if lost else ""
    return f"Unpack quantised weights inside a tensor-core kernel ({how}), on average up to {kept}{end}."


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
    first, every = table.loc[table["rows"].idxmax()], table
    table = where(table, rows=first["rows"], K=first["K"])
    of = _means(table)
    more = of.get("weights read once", 1.0) > of.get("one launch", 1.0)
    quantised = {"this product": where(table, format=QUANTISED), "all shapes": where(every, format=QUANTISED)}
    ends = {which: _means(some) for which, some in quantised.items()}
    said = [
        f"{which} {_faster(*(one[step] for step in STEPS))}" for which, one in ends.items() if set(one) == set(STEPS)
    ]
    said = [f"Quantised, mean: {'; '.join(said)}"] if said else []
    shape = f"{first['rows']} × {first['K']}"
    return drawing(
        plots.ratios, table.assign(change=table["step"].map(STEPS)), "format", "ratio", "low", "high", panel="change",
        verdict="verdict", xlabel="× faster after the change",
        title=f"{'Bytes' if more else 'Launches'} are what batching saves: a product of {shape}",
        caption=f"One product, {shape}, N = {TOKENS} tokens, cold weights. The right gain is on top of the left: they "
        "multiply. 95 % intervals are smaller than most marks. A format without a mark was not timed on that GPU.",
        said=". ".join(said + _limit_said(rows)),
        alt="How many times faster a product is after each of two changes, by weight format.",
        table=["change", "format", "ratio", "low", "high", "noise", "verdict"],
    )  # fmt: skip


def _limit_said(rows: pd.DataFrame) -> list[str]:
    """How the advised kernel stands beside the library at the tokens that the advice names."""
    mean = _beside(rows)
    parts = [f"{words.faster(mean[n])} at {words.tokens(n)}" for n in _limit(mean).values()]
    return [f"{KERNEL} against bf16 cuBLAS, quantised, mean: {', '.join(parts)}"] if parts else []


ledger.watch(__name__)
