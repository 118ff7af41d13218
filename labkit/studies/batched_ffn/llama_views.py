"""Figures and sentences about llama.cpp's own products, each made from the rows of one GPU."""

from functools import partial

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import why_not
from labkit.bench.verdict import geometric_mean
from labkit.report import plots, words
from labkit.report.figures import Drawing, drawing
from labkit.studies.batched_ffn import tables, variants

FEW = 32  # tokens at most, of which the bars speak
MEAN, LEAST = 1.4, 1.0  # its time over that of matrix instructions alone: geometric mean and worst case to be reached
KINDS = {"product": "products", "routed": "routed products"}


def times(rows: pd.DataFrame, op: str = "product") -> Drawing:
    """Its time over ours, by format and tokens; times and errors in the table."""
    table = tables.beside_llama(rows, op)
    if table.empty:
        return f"{_missing(rows, op)}."
    place = table["model"] if op == "routed" else table["rows"].astype(str) + " × " + table["K"].astype(str)
    said = f"{tables.ALONE[op]} is {words.faster(geometric_mean(table['ratio']))} in the geometric mean"
    mixed = f"{words.faster(geometric_mean(table['mixed ratio']))}, but {tables.MIXED}"
    return drawing(
        plots.lines, table.assign(where=place), "N", "ratio", "format", panel="where", logx=True, xlabel="tokens",
        reference=[(1, "as fast")], ylabel="time llama.cpp / time ours", said=said,
        title=f"llama.cpp's own {KINDS[op]} (above 1: {tables.ALONE[op]} is faster)",
        alt=f"Lines of llama.cpp's time over that of {tables.ALONE[op]} against tokens, by format and shape.",
        caption=f"Cold weights, the same blocks as stored; errors are in the table. Fastest of ours in each: {mixed}.",
        hidden=["where"],
    )  # fmt: skip


routed = partial(times, op="routed")


def bars(rows: pd.DataFrame) -> str:
    """Whether matrix instructions alone, one choice by rule, are as far ahead at few tokens as was aimed at."""
    table = tables.beside_llama(rows, "product")
    few = table[table["N"] <= FEW]
    if few.empty:
        return f"{_missing(rows, 'product')}."
    mean, worst = geometric_mean(few["ratio"]), few.loc[few["ratio"].idxmin()]
    reached = "reached" if mean >= MEAN and worst["ratio"] >= LEAST else "not reached"
    return (
        f"{tables.ALONE['product']} alone is {words.faster(mean)} in the geometric mean of {len(few)} cases of up to "
        f"{FEW} tokens (aimed at: {MEAN}×), at worst {words.faster(worst['ratio'])} ({worst['format']}, "
        f"{worst['rows']} × {worst['K']}, N = {worst['N']}; aimed at: never slower): {reached}. Over all {len(table)} "
        f"cases it is {words.faster(geometric_mean(table['ratio']))}. The fastest of ours in each case is "
        f"{words.faster(geometric_mean(few['mixed ratio']))}, over all "
        f"{words.faster(geometric_mean(table['mixed ratio']))}, but {tables.MIXED}."
    )


def errors(rows: pd.DataFrame) -> str:
    """What it rounds, beside what matrix instructions do."""
    table = tables.beside_llama(rows, "product")
    if table.empty:
        return f"{_missing(rows, 'product')}."
    columns = ("llama.cpp error", f"{tables.ALONE['product']} error")
    parts = [
        f"{format} {' against '.join(f'{part[name].max():.1e}' for name in columns)}"
        for format, part in table.groupby("format", sort=False)
    ]
    return f"largest relative RMSE against float64, llama.cpp's against ours: {'; '.join(parts)}."


def _missing(rows: pd.DataFrame, op: str) -> str:
    return f"llama.cpp's own {KINDS[op]}: {why_not(rows[rows['op'] == op], [variants.LLAMA])}"


ledger.watch(__name__)
