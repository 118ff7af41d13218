"""The published numbers that the study tests, and the functions that judge them from one GPU's rows."""

import numpy as np
import pandas as pd

from labkit.bench.spec import Claim, Judgement
from labkit.gemv_coalescing import names, tables

STEP_RATIO = 2.36  # AutoMegaKernel: whole step, before and after
SMALL, PULL_REQUEST = "AutoMegaKernel h1024", "Qwen3.5-4B"
MOST_CHANGE = 2.5  # percent: 40 to 41 ms, as printed
CEILING = 45.0  # percent of the bandwidth that sleepy-llm calls its ceiling
PROCESSES = 3
NEARLY_ALL = 0.9  # of the gain's logarithm


def _untestable(why: str) -> Judgement:
    return Judgement("not testable here", "–", why)


def judge_step(rows: pd.DataFrame) -> Judgement:
    """Does going from a thread a row to 16-byte loads of a warp a row make the layers 2.36 times as fast or more?"""
    before, after = (names.separate(names.LADDER[step]) for step in (0, 3))
    table = tables.compared(rows, "chain", after, before)
    table = table[table["model"] == SMALL]
    if table.empty or table["runs"].iloc[0] < PROCESSES:
        return _untestable(f"needs the chain of {SMALL} in {PROCESSES} processes")
    line = table.iloc[0]
    measured = f"{line['ratio']:.1f} [{line['low']:.1f}, {line['high']:.1f}] for its layers' weights"
    if line["low"] < STEP_RATIO:
        return Judgement("not reproduced", measured, "the change is worth less here")
    return Judgement("consistent", measured, "at least as much here, on another GPU and without the rest of the step")


def judge_pattern(rows: pd.DataFrame) -> Judgement:
    """Is it the pattern alone: does the same mapping with W stored [K, N] gain as much as steps 3 and 4?"""
    table = tables.pattern(rows)
    if table.empty:
        return _untestable("needs bf16 rows of the steps 1, 2 and 4")
    alone, whole = (table[name] for name in ("pattern alone", "with width"))
    measured = f"pattern alone ×{alone.min():.2f} to ×{alone.max():.1f}, with warps and width ×{whole.min():.0f} to "
    measured += f"×{whole.max():.0f}"
    if (np.log(alone) >= NEARLY_ALL * np.log(whole)).all():
        return Judgement("consistent", measured, "the pattern explains nearly all of it at every shape")
    start = tables.pays_from(table)
    why = f"alone it pays from {start} rows of W on" if start else "alone it pays at no shape"
    return Judgement("not reproduced", measured, f"{why}; with fewer, each thread's own loads set the time")


def judge_rule(rows: pd.DataFrame) -> Judgement:
    """Does the rule for the rows change a token's time by less than the pull request could see?"""
    table = tables.token_total(rows, PULL_REQUEST)
    if table.empty:
        return _untestable(f"needs every shape of {PULL_REQUEST}")
    us = table.set_index("rule")["us"]
    rule, four, best = us.iloc[0], us["always 4 rows"], us["best rows of each shape"]
    change = 100 * (four / rule - 1)
    measured = f"{change:+.1f} % against always 4 rows; best rows of each shape {100 * (four / best - 1):+.1f} %"
    if abs(change) <= MOST_CHANGE:
        return Judgement("consistent", measured, "no change that a token's time would show")
    return Judgement("not reproduced", measured, "the rule matters here")


def judge_ceiling(rows: pd.DataFrame) -> Judgement:
    """Is about 45 % of the bandwidth a ceiling for a token's GEMVs?"""
    table = tables.token_total(rows, PULL_REQUEST)
    if table.empty or table["% of ceiling"].isna().all():
        return _untestable(f"needs every shape of {PULL_REQUEST} and this GPU's read ceiling")
    percent = table.set_index("rule")["% of ceiling"]
    measured = f"{percent['tuned table']:.0f} % of the read ceiling, {percent['always 4 rows']:.0f} % at 4 rows"
    if percent["tuned table"] > 1.5 * CEILING:
        return Judgement("not reproduced", measured, "no ceiling of that kind: the same weights stream far faster")
    return Judgement("consistent", measured, "no more was reached here either")


AUTOMEGAKERNEL = ("AutoMegaKernel, issue 1", "https://github.com/RightNow-AI/AutoMegaKernel/issues/1")
SLEEPY = ("sleepy-llm 50", "")
CLAIMS = (
    Claim(
        "step", *AUTOMEGAKERNEL, "Coalescing the GEMV makes the decode step faster",
        "RTX 5090 Laptop, bf16, h1024", f"×{STEP_RATIO} (kernel ×2.48)", judge_step,
    ),
    Claim(
        "pattern", *AUTOMEGAKERNEL, "What makes it faster is that loads are coalesced",
        "the same; mapping, width, cache of x and threads all changed at once", "named so", judge_pattern,
    ),
    Claim(
        "rule", *SLEEPY, "One row a group up to N = 4096, else four: no change of a token's time",
        "M4 Max, Qwen3.5-4B bf16", "40 → 41 ms", judge_rule,
    ),
    Claim(
        "ceiling", *SLEEPY, "Decode stands at a bandwidth ceiling", "M4 Max (410 GB/s), the same model", "45 %",
        judge_ceiling,
    ),
)  # fmt: skip
