"""Figures and sentences of whole layers, GEMVs one after the other as in decode, each made from the rows of one GPU."""

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import RATIO, cases, compared, where
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import filled, spans
from labkit.studies.gemv_coalescing import tables, variants
from labkit.studies.gemv_coalescing.claims import PULL_REQUEST

WHOLE = {
    variants.BETWEEN_OURS: "ordinary kernels between",
    variants.BETWEEN_TRIGGER: "kernels with the trigger between",
    variants.CHAIN_OURS: "nothing between",
    variants.separate("ours"): "nothing between, matrix by matrix",
}
SHOWN_CHAINS = [
    variants.separate("torch.mv"),
    variants.separate("ours"),
    variants.merged("torch.mv"),
    variants.CHAIN_PLAIN,
    variants.CHAIN_OURS,
]
NO_CHAIN = "no chain was measured beside reading its weights."


def whole_layers(rows: pd.DataFrame) -> pd.DataFrame:
    """Chains against cuBLAS by what stands between the GEMVs, a row a model: ratio and interval."""
    table = where(tables.chains(rows), variant=[*WHOLE])
    found: dict[str, dict[str, str]] = {}
    for _, line in table[table["ratio"].notna()].iterrows():
        text = f"{line['ratio']:.2f} [{line['low']:.2f}, {line['high']:.2f}]"
        found.setdefault(line["model"], {"model": line["model"]})[WHOLE[line["variant"]]] = text
    return pd.DataFrame(found.values()).reindex(columns=["model", *WHOLE.values()]) if found else pd.DataFrame()


def chain(rows: pd.DataFrame) -> Drawing:
    """Whole layers: percent of reading the same weights."""
    table = where(tables.chains(rows), variant=SHOWN_CHAINS).dropna(subset=["% of reading W"])
    if table.empty:
        return NO_CHAIN
    ours = where(table, variant=variants.CHAIN_OURS)
    said = f"Ours, merged: {'; '.join(filled(ours, '{model}: {% of reading W:.0f} %')) or 'not measured'}."
    return drawing(
        plots.bars, table, "model", "% of reading W", "variant",
        xlabel="model", ylabel="% of read speed", title="Whole layers in order, one CUDA graph",
        reference=[(100, "reading W")],
        alt=f"Bars of percent of the time that reading the weights takes, by model. {said}",
        caption=f"Each GEMV reads what an earlier one wrote. {said} Ratio in the table: cuBLAS of "
        "the same grouping over the variant.",
        units=tables.UNITS,
    )  # fmt: skip


def merging(rows: pd.DataFrame) -> pd.DataFrame:
    """Matrices that share x, one by one against as one, for cuBLAS and the production GEMV."""
    chains = cases(rows, "chain")
    parts = [
        compared(chains, variants.merged(name), variants.separate(name), ["model"]).assign(kernel=name)
        for name in ("torch.mv", "ours")
    ]
    return pd.concat(parts, ignore_index=True)[["model", "kernel", *RATIO]]


def between(rows: pd.DataFrame) -> Drawing:
    """What is left of the gain with small kernels between the GEMVs."""
    table, shown = tables.chains(rows), [variants.BETWEEN_TRIGGER, variants.BETWEEN_OURS]
    base = where(table, variant=variants.BETWEEN_MV)
    table = where(table, variant=shown).dropna(subset=["ratio"])
    if table.empty:
        return "no chain with kernels between was measured."
    table = table.sort_values("variant", key=lambda some: some.map(shown.index), kind="stable")
    said = "; ".join(spans(table, "variant", "ratio", "×{:.2f}"))
    return drawing(
        plots.ratios, table.assign(name=table["variant"].str.removesuffix(variants.merged(""))), "name", "ratio", "low",
        "high", group="model", verdict="verdict", xlabel="time cuBLAS, ordinary kernels between / time ours",
        title="Whole layers with small kernels between, merged", said=said,
        alt="Ratios of cuBLAS's time over ours, by model and by what stands between the GEMVs.",
        caption="Before each group but the first, a kernel makes x of what the group before wrote.",
        table=pd.concat([table, base])[["model", "variant", "us", *RATIO]], units=tables.UNITS,
    )  # fmt: skip


def overhead(rows: pd.DataFrame) -> Drawing:
    """µs that each GEMV of a chain takes beyond reading its weights."""
    table = where(tables.chains(rows), variant=SHOWN_CHAINS).dropna(subset=["beyond reading"])
    if table.empty:
        return NO_CHAIN
    said = "; ".join(f"{one} µs" for one in spans(table, "variant", "beyond reading", "{:.1f}"))
    return drawing(
        plots.bars, table, "model", "beyond reading", "variant",
        xlabel="model", ylabel="µs a GEMV", title="What a GEMV of a chain takes beyond reading its weights",
        alt=f"Bars of µs a GEMV beyond reading, by model and variant. {said}.",
        caption=f"(Chain's time - time of reading its weights) / number of its GEMVs: {said}.",
        table=["model", "variant", "us", "GEMVs", "beyond reading"], units=tables.UNITS,
    )  # fmt: skip


def grows(rows: pd.DataFrame) -> str:
    """Is what a GEMV of a chain takes beyond reading a cost of every launch, or of every byte?"""
    table = where(tables.beyond_reading(rows), variant=SHOWN_CHAINS)
    half_way = (1 + table["most MB"] / table["least MB"]) / 2  # between a cost of every launch and one of every byte
    grows = table["most"] > half_way * table["least"]
    table = table.assign(kind=grows.map({True: "it grows with the bytes", False: "mostly a cost of every launch"}))
    form = "{variant}: {least:.1f} µs where a GEMV has {least MB:.0f} MB, {most:.1f} µs where it has {most MB:.0f} MB"
    said = "; ".join(filled(table, form + ", {kind}"))
    return f"{said or 'fewer than two chains were measured beside reading their weights'}."


def limits(rows: pd.DataFrame) -> str:
    """How much a chain could gain at all: cuBLAS over reading the weights."""
    shown = [variants.CHAIN_OURS, variants.separate("ours")]
    table = where(tables.chains(rows), variant=shown).dropna(subset=["at most"])
    if table.empty:
        return "no chain was measured beside cuBLAS and reading its weights."
    table = table.assign(how=table["variant"].str.removeprefix("ours, "))
    parts = "; ".join(filled(table, "{model}, {how}: at most ×{at most:.2f}, reached ×{ratio:.2f}"))
    return f"a kernel that took no longer than our reading kernel would gain only so much over cuBLAS. {parts}."


def cross_check(rows: pd.DataFrame) -> pd.DataFrame:
    """A token's weights from single GEMVs and from chains: two measurements of the same."""
    units = tables.UNITS | {"sum": "single GEMVs, µs", "chain": "chain and output matrix, µs"}
    return tables.from_chain(rows, PULL_REQUEST).rename(columns=units)


ledger.watch(__name__)
