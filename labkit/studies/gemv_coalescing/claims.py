"""The published numbers that the study tests, and the functions that judge them from one GPU's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.bench.spec import Claim, Judgement, untestable
from labkit.studies.gemv_coalescing import variants

if TYPE_CHECKING:
    import pandas as pd

STEP_RATIO = 2.36  # AutoMegaKernel: whole step, before and after
SMALL, PULL_REQUEST = "AutoMegaKernel h1024", "Qwen3.5-4B"
MOST_CHANGE = 5.1  # percent: 40 to 41 ms as printed may be 39.5 to 41.5
CEILING = 45.0  # percent of the bandwidth that sleepy-llm calls its ceiling
MARGIN = 10.0  # points beyond it that no rounding of either figure explains
ABOUT = 1.5  # a factor of another GPU, and of a part of the step only, agrees within this
PROCESSES = 3
FEW = "a thread a row leaves most multiprocessors of this GPU idle at its shapes, and the rest of a step is left out"
NEARLY_ALL = 0.9  # of the gain's logarithm


def judge_step(rows: pd.DataFrame) -> Judgement:
    """Does going from a thread a row to 16-byte loads of a warp a row make the layers 2.36 times as fast, about?"""
    from labkit.bench.tables import cases, compared

    before, after = map(variants.separate, (variants.THREAD_A_ROW, variants.WIDE_LOADS))
    table = compared(cases(rows, "chain", model=SMALL), after, before, ["model"])
    if table.empty or table["runs"].iloc[0] < PROCESSES:
        return untestable(f"needs the chain of {SMALL} in {PROCESSES} processes")
    line = table.iloc[0]
    measured = (
        f"×{line['ratio']:.1f} [{line['low']:.1f}, {line['high']:.1f}] for its layers' weights, step 4 over step 1"
    )
    if STEP_RATIO / ABOUT <= line["ratio"] <= STEP_RATIO * ABOUT:
        return Judgement("consistent", measured, "about as much here, on another GPU and without the rest of the step")
    if line["low"] > STEP_RATIO:
        return Judgement("consistent", measured, f"faster here too, and by more: {FEW}")
    if line["low"] > 1:
        return Judgement("not reproduced", measured, "it is faster here too, but not by that factor")
    return Judgement("not reproduced", measured, "no gain here")


def judge_pattern(rows: pd.DataFrame) -> Judgement:
    """Is it the pattern alone: does the same mapping with W stored [K, N] gain as much as steps 3 and 4?"""
    from labkit.bench.tables import processes
    from labkit.studies.gemv_coalescing import tables

    table = tables.pattern(rows)
    table = table[table["dtype"] == "bf16"]
    if table.empty or processes(rows, "gemv") < PROCESSES:
        return untestable(f"needs bf16 rows of the steps 1, 2 and 4 in {PROCESSES} processes")
    alone, whole = (table[name] for name in ("pattern alone", "with width"))
    measured = f"pattern alone ×{alone.min():.2f} to ×{alone.max():.1f}, with warps and width ×{whole.min():.0f} to "
    measured += f"×{whole.max():.0f}"
    if (alone >= whole**NEARLY_ALL).all():
        return Judgement("consistent", measured, "the pattern explains nearly all of it at every shape")
    start = tables.pays_from(table)
    why = f"alone it pays from {start} rows of W on" if start else "alone it does not pay at the tallest W"
    return Judgement("not reproduced", measured, f"{why}; the rest is more threads a row and wider loads")


def judge_rule(rows: pd.DataFrame) -> Judgement:
    """Does the rule for the rows change a token's time by less than the pull request could see, however it is run?"""
    from labkit.bench.tables import processes
    from labkit.studies.gemv_coalescing.tables import FOUR, FOUR_PLAIN, ONE, RULE, RULE_PLAIN, token_total

    # What the rule may have replaced, which its source does not say, and the rule run in the same way.
    before, changes = ((ONE, RULE), (FOUR, RULE), (FOUR_PLAIN, RULE_PLAIN)), {}
    for merged in (True, False):
        us = token_total(rows, PULL_REQUEST, merged).set_index("rule")["us"]
        for other, rule in before:
            if rule in us and other in us:
                changes[f"{other}, {'merged' if merged else 'separate'}"] = 100 * (us[other] / us[rule] - 1)
    if len(changes) < 2 * len(before) or processes(rows, "gemv") < PROCESSES:
        return untestable(f"needs 1 and 4 rows at every shape of {PULL_REQUEST} in {PROCESSES} processes")
    measured = "against the rule: " + "; ".join(f"{change:+.1f} % {way}" for way, change in changes.items())
    if all(abs(change) <= MOST_CHANGE for change in changes.values()):
        return Judgement(
            "consistent", measured, f"no more than {MOST_CHANGE} % in any way of running it: 40 → 41 ms may be so much"
        )
    many = sum(abs(change) > MOST_CHANGE for change in changes.values())
    return Judgement(
        "not reproduced", measured,
        f"in {many} of {len(changes)} ways of running it a token's time changes by more than {MOST_CHANGE} %, "
        "the most that 40 → 41 ms can be",
    )  # fmt: skip


def judge_ceiling(rows: pd.DataFrame) -> Judgement:
    """Is about 45 % of the bandwidth a ceiling for the GEMVs of a token?"""
    from labkit.bench.tables import processes
    from labkit.studies.gemv_coalescing.tables import chains

    table = chains(rows)
    table = table[(table["model"] == PULL_REQUEST) & table["% of ceiling"].notna()].set_index("variant")
    if variants.CHAIN_OURS not in table.index or processes(rows, "chain") < PROCESSES:
        return untestable(f"needs the chain of {PULL_REQUEST} in {PROCESSES} processes, and this GPU's read ceiling")
    percent = table["% of ceiling"]
    measured = f"its layers in order: {percent[variants.CHAIN_OURS]:.0f} % of the read ceiling"
    if (library := variants.merged("torch.mv")) in percent:
        measured += f", cuBLAS {percent[library]:.0f} %"
    if variants.BETWEEN_OURS in percent:
        measured += f", ours with kernels between {percent[variants.BETWEEN_OURS]:.0f} %"
    if percent[variants.CHAIN_OURS] > CEILING + MARGIN:
        return Judgement("not reproduced", measured, "no limit of GEMVs as such: here the same weights stream faster")
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
