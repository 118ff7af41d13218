"""Figures and sentences of whole layers, GEMVs one after the other as in decode, each made from the rows of one GPU."""

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import RATIO, cases, compared, where
from labkit.bench.verdict import geometric_mean
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import faster, filled, span, spans
from labkit.studies.gemv_coalescing import shown, tables, variants
from labkit.studies.gemv_coalescing.claims import PULL_REQUEST

CUBLAS = "cuBLAS"
WHOLE = {
    variants.BETWEEN_OURS: shown.ORDINARY,
    variants.BETWEEN_TRIGGER: shown.TRIGGER,
    variants.CHAIN_OURS: "nothing between",
    variants.separate("ours"): "nothing between, separate",
}
SHOWN_CHAINS = [
    variants.separate("torch.mv"),
    variants.separate("ours"),
    variants.merged("torch.mv"),
    variants.CHAIN_PLAIN,
    variants.CHAIN_OURS,
]
CLOSE = 1.02  # two means this close count as the same
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
    production = where(table, variant=variants.CHAIN_OURS)["% of reading W"]
    return drawing(
        plots.bars, shown.named(table, "variant"), "model", "% of reading W", "variant",
        xlabel="", ylabel="% of read speed", title="Whole layers: percent of the speed of reading the weights",
        reference=[(100, "reading W")],
        alt="Bars of percent of the speed of reading the weights, by model and kernel.",
        caption="Each GEMV reads what an earlier one wrote; one CUDA graph. Ratio in the table: cuBLAS of the same "
        "grouping over the kernel.",
        said=f"Dependent launch, merged: {span(production, '{:.0f}')} %" if len(production) else "",
        units=tables.UNITS,
    )  # fmt: skip


def merging(rows: pd.DataFrame) -> pd.DataFrame:
    """Matrices that share x, one by one against as one, for cuBLAS and the production GEMV."""
    chains = cases(rows, "chain")
    parts = [
        compared(chains, variants.merged(name), variants.separate(name), ["model"]).assign(kernel=kernel)
        for name, kernel in (("torch.mv", CUBLAS), ("ours", shown.LAB))
    ]
    return pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)[["model", "kernel", *RATIO]]


def between(rows: pd.DataFrame) -> Drawing:
    """What is left of the gain with small kernels between the GEMVs."""
    table, kinds = tables.chains(rows), [variants.BETWEEN_TRIGGER, variants.BETWEEN_OURS]
    base = where(table, variant=variants.BETWEEN_MV)
    table = where(table, variant=kinds).dropna(subset=["ratio"])
    if table.empty:
        return "no chain with kernels between was measured."
    table = table.sort_values("variant", key=lambda some: some.map(kinds.index), kind="stable")
    mean = {name: geometric_mean(part) for name, part in table.groupby("variant")["ratio"]}
    pays = len(mean) == len(kinds) and mean[variants.BETWEEN_TRIGGER] > CLOSE * mean[variants.BETWEEN_OURS]
    return drawing(
        plots.ratios, shown.named(table, "variant"), "variant", "ratio", "low", "high", group="model",
        verdict="verdict", xlabel="× faster than cuBLAS with ordinary kernels between",
        title="Dependent launch needs its trigger in the kernel in front" if pays
        else "Whole layers with small kernels between",
        said="; ".join(f"{one}×" for one in spans(shown.named(table, "variant"), "variant", "ratio")),
        alt="Ratios of cuBLAS's time over the lab's GEMV, by model and by what stands between the GEMVs.",
        caption="Whole layers, merged. A small kernel makes the x of each group but the first of what the group in "
        "front wrote. 95 % intervals.",
        table=shown.named(pd.concat([table, base]), "variant")[["model", "variant", "us", *RATIO]], units=tables.UNITS,
    )  # fmt: skip


def overhead(rows: pd.DataFrame) -> Drawing:
    """µs that each GEMV of a chain takes beyond reading its weights."""
    table = where(tables.chains(rows), variant=SHOWN_CHAINS).dropna(subset=["beyond reading"])
    if table.empty:
        return NO_CHAIN
    production = where(table, variant=variants.CHAIN_OURS)["beyond reading"]
    costs = (table["beyond reading"] > 0).all()
    title = (
        "Every GEMV of a chain costs more than its bytes" if costs else "What a GEMV of a chain costs beyond its bytes"
    )
    return drawing(
        plots.bars, shown.named(table, "variant"), "model", "beyond reading", "variant",
        xlabel="", ylabel="µs per GEMV", title=title,
        alt="Bars of µs per GEMV beyond reading, by model and kernel.",
        caption="Time of the chain beyond that of reading its weights, divided by the number of its GEMVs.",
        said=f"Dependent launch, merged: {span(production, '{:.1f}')} µs" if len(production) else "",
        table=shown.named(table, "variant")[["model", "variant", "us", "GEMVs", "beyond reading"]], units=tables.UNITS,
    )  # fmt: skip


def grows(rows: pd.DataFrame) -> dict[str, str]:
    """Is what a GEMV of a chain takes beyond reading a cost of every launch, or of every byte?"""
    table = where(tables.beyond_reading(rows), variant=SHOWN_CHAINS)
    half_way = (1 + table["most MB"] / table["least MB"]) / 2  # between a cost of every launch and one of every byte
    grows = table["most"] > half_way * table["least"]
    table = table.assign(kind=grows.map({True: "grows with the bytes", False: "mostly a cost of every launch"}))
    form = "{least:.1f} µs at {least MB:.0f} MB, {most:.1f} µs at {most MB:.0f} MB: {kind}"
    return dict(zip(table["variant"].map(shown.name), filled(table, form), strict=True))


def limits(rows: pd.DataFrame) -> dict[str, str]:
    """How much a chain could gain at all: cuBLAS over reading the weights."""
    kinds = {variants.separate("ours"): "separate", variants.CHAIN_OURS: "merged"}
    table = where(tables.chains(rows), variant=[*kinds]).dropna(subset=["at most"])
    table = table.assign(how=table["variant"].map(kinds))
    questions = filled(table, "{model}, {how}")
    most = filled(table, "{at most:.2f}×")
    said = [f"{faster(ratio)}, at most {least}" for ratio, least in zip(table["ratio"], most, strict=True)]
    return dict(zip(questions, said, strict=True))


def cross_check(rows: pd.DataFrame) -> pd.DataFrame:
    """A token's weights from single GEMVs and from chains: two measurements of the same."""
    units = tables.UNITS | {"sum": "single GEMVs, µs", "chain": "chain and output matrix, µs"}
    return tables.from_chain(rows, PULL_REQUEST).rename(columns=units)


ledger.watch(__name__)
