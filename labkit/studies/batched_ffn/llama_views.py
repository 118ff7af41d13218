"""Figures and short answers about llama.cpp's own products, each made from the rows of one GPU."""

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
ERRORS = {"llama.cpp error": "{:.1e}", f"{tables.ALONE['product']} error": "{:.1e}"}
KINDS = {"product": "products", "routed": "routed products"}


def times(rows: pd.DataFrame, op: str = "product") -> Drawing:
    """Its time over that of the lab's kernel, by format and tokens, mean of shapes; times and errors in the table."""
    table, alone = tables.beside_llama(rows, op), tables.ALONE[op]
    if table.empty:
        return f"{_missing(rows, op)}."
    mean = table.groupby(["format", "N"], sort=False)["ratio"].agg(geometric_mean).reset_index()
    return drawing(
        plots.lines, mean, "N", "ratio", "format", logx=True, xlabel="tokens", reference=[(1, "as fast")],
        ylabel="× faster than llama.cpp", title=f"{alone} against llama.cpp's own {KINDS[op]}",
        said=f"{alone} is {words.faster(geometric_mean(table['ratio']))} in the geometric mean",
        alt=f"Lines of how much faster {alone} is than llama.cpp against tokens, by format.",
        caption="Cold weights, the same blocks as stored, geometric mean of the shapes. The table has every shape, and "
        "the errors.",
        table=table,
    )  # fmt: skip


routed = partial(times, op="routed")


def bars(rows: pd.DataFrame) -> dict[str, str]:
    """Whether matrix instructions alone, one choice by rule, are as far ahead at few tokens as was aimed at."""
    table = tables.beside_llama(rows, "product")
    few = table[table["N"] <= FEW]
    if few.empty:
        return {}
    mean, worst = geometric_mean(few["ratio"]), few.loc[few["ratio"].idxmin()]
    reached = {True: "reached", False: "not reached"}
    place = f"{worst['format']}, {worst['rows']} × {worst['K']}, N = {worst['N']}"
    return {
        f"up to {FEW} tokens, geometric mean (aim: {MEAN}×)": f"{words.faster(mean)}: {reached[mean >= MEAN]}",
        "at worst (aim: never slower)": f"{words.faster(worst['ratio'])} ({place}): {reached[worst['ratio'] >= LEAST]}",
        "all tokens, geometric mean": words.faster(geometric_mean(table["ratio"])),
        f"the fastest kernel of this lab in each case, up to {FEW} tokens": _mixed(few),
        "the same, all tokens": _mixed(table),
        "formats timed on this GPU": ", ".join(sorted(set(table["format"]))),
    }


def _mixed(table: pd.DataFrame) -> str:
    return words.faster(geometric_mean(table["mixed ratio"]))


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """What it rounds, beside what matrix instructions do: the largest relative RMSE of each format."""
    columns = ["llama.cpp error", f"{tables.ALONE['product']} error"]
    table = tables.beside_llama(rows, "product")
    return table.groupby("format", sort=False)[columns].max().reset_index() if len(table) else table


def _missing(rows: pd.DataFrame, op: str) -> str:
    return f"llama.cpp's own {KINDS[op]}: {why_not(rows[rows['op'] == op], [variants.LLAMA])}"


ledger.watch(__name__)
