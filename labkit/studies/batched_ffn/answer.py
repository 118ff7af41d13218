"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Mapping
from itertools import product
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
STEPS = {"one launch": "One launch", "weights read once": "Weights read once"}  # the second on top of the first
ALL = "quantised"  # the bar of all quantised formats
KERNEL = tables.ALONE["product"]
LIBRARY = "cuBLAS in bf16"

Facts = Mapping[str, Any]


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows; empty unless both changes were timed.

    launch, reads, both: how much faster each change, and both, make a product of `TOKENS` tokens, quantised, geometric
    mean of cases; same, cases: in how many cases of batched variants a token has its bits; kernel: whether `KERNEL`
    always keeps them in a product; library: whether bf16 cuBLAS was seen not to. up to: most tokens at which `KERNEL`
    is no slower than bf16 cuBLAS, quantised, geometric mean; above: the tokens at which it first is; with `ratio`, how
    much faster it is there; warps: these tokens, and how much faster specialised warps are. Each may be missing.
    """
    means = _means(where(tables.gains(rows), N=TOKENS, format=QUANTISED))
    if set(means) != set(STEPS):
        return {}
    launch, reads = (means[step] for step in STEPS)
    whole = where(tables.compared(rows, "product", variants.STATIONARY, variants.PER_TOKEN), N=TOKENS, format=QUANTISED)
    bits = tables.bits(rows)
    own = bits[(bits["who"] == tables.OWN) & (bits["variant"] != variants.PER_TOKEN)]  # of a loop it is no question
    found = {"launch": launch, "reads": reads, "both": geometric_mean(whole["ratio"])}
    kept = {"same": int(own["same"].sum()), "cases": int(own["cases"].sum())}
    ledger.note("kept bits", kept)
    found |= kept
    kernel, library = (where(bits, op="product", variant=variant) for variant in (KERNEL, variants.CUBLAS))
    found["kernel"] = len(kernel) > 0 and bool((kernel["same"] == kernel["cases"]).all())
    found["library"] = bool((library["same"] < library["cases"]).any())
    found |= _limit(_beside(rows))
    found |= _warps(rows, found.get("above"))
    words.note_sizes(value for value in found.values() if isinstance(value, float))
    return found


def _means(gains: pd.DataFrame) -> dict[str, float]:
    """Step -> the geometric mean of its gains."""
    return {step: geometric_mean(part) for step, part in gains.groupby("step")["ratio"]}


def _beside(rows: pd.DataFrame) -> pd.Series:
    """Time of bf16 cuBLAS over that of `KERNEL` by tokens, geometric mean of quantised products."""
    table = where(tables.beside(rows, "product", variants.CUBLAS), format=QUANTISED)
    return table.groupby("N")["ratio"].agg(geometric_mean)


def _limit(mean: pd.Series) -> dict[str, Any]:
    """Up to how many tokens the kernel keeps up with the library, and from how many on it does not."""
    slower = mean.index[mean < 1]
    first = slower.min() if len(slower) else None
    kept = [n for n in mean.index if first is None or n < first]
    ends = ({"up to": max(kept)} if kept else {}) | ({} if first is None else {"above": first})
    found: dict[str, Any] = {name: int(n) for name, n in ends.items()}
    return found | {f"{name} ratio": float(mean[n]) for name, n in ends.items()}


def _warps(rows: pd.DataFrame, tokens: int | None) -> dict[str, Any]:
    """The tokens, if specialised warps keep up with the library there, and how much faster they are."""
    table = where(tables.designs(rows), format=variants.K_FORMATS, against=variants.CUBLAS, N=tokens)
    ratio = geometric_mean(table["ratio"]) if len(table) else 0.0
    return {"warps": tokens, "warps ratio": ratio} if ratio >= 1 else {}


def conclusion(facts: Mapping[str, Facts]) -> str:
    """Whether outputs keep their bits, and what each of the two changes saves, and both."""
    if not facts:
        return ""
    kept = all(one["same"] == one["cases"] for one in facts.values())
    looked = ", ".join(f"{gpu}: {one['same']} of {one['cases']} cases" for gpu, one in facts.items())
    (gpu, first), *others = facts.items()
    said = f"Outputs {'are' if kept else 'may not be'} bit-identical to each token alone ({looked}). "
    said += f"On the {gpu}, with {TOKENS} tokens and quantised weights, one launch instead of a loop is "
    said += f"{words.faster(first['launch'])} on average. Reading each weight once makes that "
    said += f"{words.faster(first['reads'])}: {words.faster(first['both'])} in all."
    return said + "".join(f" On the {gpu}: {_changes(one)}." for gpu, one in others)


def _changes(one: Facts) -> str:
    """ "1.24×, then 1.92×, in all 2.37× faster"."""
    said = [words.faster(one[name]) for name in ("launch", "reads", "both")]
    if all(part.endswith(" faster") for part in said):
        said[:2] = [part.removesuffix(" faster") for part in said[:2]]
    return ", ".join(f"{head}{part}" for head, part in zip(("", "then ", "in all "), said, strict=True))


def advice(facts: Mapping[str, Facts]) -> str:
    """Which kernel to take, and up to how many tokens, by means of the cases; what each does to bits."""
    kept, lost = _tokens(facts, "up to"), _tokens(facts, "above")
    library = "dequantise and use cuBLAS, if bf16 fits"
    library += "; bits may change" if any(one["library"] for one in facts.values()) else ""
    whose, than = ("it", "") if kept else (KERNEL, LIBRARY)
    end = f"At {lost} {whose} is {_ratios(facts, 'above', than)}: then {library}." if lost else ""
    if not kept:
        return end
    how = f"{KERNEL}{', bit-identical' if all(one['kernel'] for one in facts.values()) else ''}"
    said = f"Up to {kept}, unpack weights in a tensor-core kernel ({how}). At {kept} it is"
    if warps := _ratios(facts, "warps"):
        end += f" There specialised warps (K formats) are {warps}."
    return f"{said} {_ratios(facts, 'up to', LIBRARY)}. {end}".strip()


def _ratios(facts: Mapping[str, Facts], name: str, than: str = "") -> str:
    """ "1.45× (H100) and 1.04× faster (H200) than cuBLAS"; of two sides each is said."""
    said = {gpu: words.faster(one[f"{name} ratio"]) for gpu, one in facts.items() if name in one}
    if len({one.partition(" ")[2] for one in said.values()}) == 1:
        said = {gpu: one.partition(" ")[0] for gpu, one in list(said.items())[:-1]} | dict(list(said.items())[-1:])
    text = " and ".join(f"{one} ({gpu})" for gpu, one in said.items())
    return f"{text} than {than}" if than else text


def _tokens(facts: Mapping[str, Facts], name: str) -> str:
    """ "32 tokens"; where GPUs differ, "32 tokens (H100) or 16 tokens (H200)"."""
    counts = {gpu: one[name] for gpu, one in facts.items() if name in one}
    if len(set(counts.values())) < 2:
        return "".join(map(words.tokens, set(counts.values())))
    return " or ".join(f"{words.tokens(count)} ({gpu})" for gpu, count in counts.items())


def hero(rows: pd.DataFrame) -> Drawing:
    """What each of the two changes is worth, by format, at `TOKENS` tokens: means of the shapes timed."""
    table = where(tables.gains(rows), N=TOKENS)
    if table.empty:
        return f"the loop, one launch, and weights read once were not timed beside each other at {TOKENS} tokens."
    means = _by_format(table)
    quantised = means[means["format"] == ALL].set_index("change")["ratio"]
    launch, reads = (quantised.get(change, 1.0) for change in STEPS.values())
    first, second = ("Reading weights once", "one launch") if reads > launch else ("One launch", "reading weights once")
    return drawing(
        plots.bars, means.assign(whose="lab"), "format", "ratio", "whose", panel="change", fmt="{:.2f}",
        low="least", high="most",
        reference=[(1, "as fast")], xlabel="format of the weights", ylabel="× faster",
        title=f"{first} saves more time than {second} ({TOKENS} tokens)",
        caption=f"Left: one launch instead of a loop. Right: on top of that, weights read once instead of {TOKENS} "
        f"times. Geometric means of the shapes of one product, cold weights; {ALL}: all Q formats; thin lines: least "
        "and most. A format without a bar was not timed on that GPU.",
        alt="How many times faster a product is after each of two changes, by weight format.",
        table=["change", "format", "ratio", "least", "most", "shapes"],
    )  # fmt: skip


def _by_format(gains: pd.DataFrame) -> pd.DataFrame:
    """Geometric mean, least and most of each change and format, and of all quantised formats."""
    found = []
    for (step, change), (format, wanted) in product(STEPS.items(), _formats(gains).items()):
        ratios = where(gains, step=step, format=wanted)["ratio"]
        if len(ratios):
            line = {"change": change, "format": format, "ratio": geometric_mean(ratios)}
            found.append(line | {"least": ratios.min(), "most": ratios.max(), "shapes": len(ratios)})
    return pd.DataFrame(found)


def _formats(gains: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    """What stands side by side: each format that was timed, and all quantised ones."""
    timed = [format for format in variants.FORMATS if format in set(gains["format"])]
    return {format: (format,) for format in timed} | {ALL: QUANTISED}


ledger.watch(__name__)
