"""The published claims of the study, with the rules by which `bench/claim.py` judges them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.bench.claim import BELOW, OURS, TOLERANCE, WITHIN, Claim, Observed, of_table
from labkit.shapes import LINEAR
from labkit.studies.gemv_coalescing import variants

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from labkit.bench.spec import Case

SMALL, PULL_REQUEST = "AutoMegaKernel h1024", "Qwen3.5-4B"
STEP_US = (4647.6, 1969.3)  # AutoMegaKernel: a whole step, before and after
TOKEN_MS = (39.5, 41.5)  # sleepy-llm: 40 and 41 as printed lie in between, whatever they were before rounding
CEILING = 0.455  # of the bandwidth: 45 % as printed is less
PART = 1 / TOLERANCE  # of the gain's logarithm, from which on sizes are the same


def step(rows: pd.DataFrame) -> Observed:
    """Time of the layers' GEMVs with a thread a row over that with 16-byte loads of a warp a row, in one chain."""
    from labkit.bench.tables import cases, compared

    before, after = map(variants.separate, (variants.THREAD_A_ROW, variants.WIDE_LOADS))
    table = compared(cases(rows, "chain", model=SMALL), after, before, ["model"])
    return Observed(OURS, of_table(table, lambda line: line["model"]), f"the chain of {SMALL}, steps 1 and 4,")


def pattern(rows: pd.DataFrame) -> Observed:
    """Share of step 4's gain that step 2 has: the mapping of step 1, W stored [K, N]. At the shapes of the figure."""
    from labkit.studies.gemv_coalescing import tables

    table = tables.pattern_share(rows, list(LINEAR[SMALL].token(merged=False)))
    table = table.assign(noise=table["noise"] / PART)  # as a part of the neutral value, like that of a time
    needs = f"bf16 rows of the steps 1, 2 and 4 at the shapes of {SMALL}, and a gain,"
    return Observed(OURS, of_table(table, lambda line: f"{line['N']} × {line['K']}"), needs)


def rule(rows: pd.DataFrame) -> Observed:
    """A token's GEMVs by the rule over those with 1 or with 4 rows everywhere; see `tables.token_blocks`.

    Its source does not say what the rule replaced, nor do all engines merge or have dependent launch: all eight ways.
    """
    from labkit.bench.tables import COMPARED, frame, pairs
    from labkit.studies.gemv_coalescing import tables

    ways = [(tables.ONE, tables.RULE), (tables.FOUR, tables.RULE)]
    ways += [(tables.ONE_PLAIN, tables.RULE_PLAIN), (tables.FOUR_PLAIN, tables.RULE_PLAIN)]
    found = []
    for merged in (True, False):
        lines = pairs(tables.token_blocks(rows, PULL_REQUEST, merged), ways)
        found += [line | {"matrices": "merged" if merged else "separate"} for line in lines]
    table = frame(found if len(found) == 2 * len(ways) else [], ["variant", "matrices", *COMPARED])
    return Observed(OURS, of_table(table, _way), f"1 and 4 rows a program at every shape of {PULL_REQUEST}")


def _way(line: Mapping[str, Any]) -> str:
    return f"over {line['variant']}, {line['matrices']}"


def ceiling(rows: pd.DataFrame) -> Observed:
    """Share of the read ceiling that the layers' GEMVs reach in order, and with other kernels between as in decode."""
    from labkit.studies.gemv_coalescing import tables

    table = tables.of_ceiling(rows, PULL_REQUEST, [variants.CHAIN_OURS, variants.BETWEEN_OURS])
    needs = f"the chain of {PULL_REQUEST}, and this GPU's read ceiling,"
    return Observed(OURS, of_table(table, lambda line: line["variant"]), needs)


def pairs(x: Case) -> list[tuple[str, str]]:
    """Steps 4 and 2 over step 1 where the claims look at them, and our chain over a plain read of its weights."""
    first, wide = variants.THREAD_A_ROW, variants.WIDE_LOADS
    if x.op == "chain":
        return [(variants.separate(wide), variants.separate(first)), (variants.CHAIN_OURS, variants.READ)]
    shapes = LINEAR[SMALL].token(merged=False)
    if x.op == "gemv" and x["dtype"] == "bf16" and (x["N"], x["K"]) in shapes:
        return [(wide, first), (variants.THREAD_A_ROW_TURNED, first)]
    return []


AUTOMEGAKERNEL = ("AutoMegaKernel, issue 1", "https://github.com/RightNow-AI/AutoMegaKernel/issues/1")
SLEEPY = ("sleepy-llm, pull request 50", "")
NOTED = "figures from this lab's notes on the pull request, of which it has no address"
CLAIMS = (
    Claim(
        "step", *AUTOMEGAKERNEL, "Coalescing the GEMV makes the decode step faster", "RTX 5090 Laptop, bf16, h1024",
        f"whole step {STEP_US[0]} → {STEP_US[1]} µs, {STEP_US[0] / STEP_US[1]:.2f}× faster",
        ruled="2026-11-26", observe=step, faster=True,
        quantity="time of h1024's layer GEMVs, one thread per row ÷ one warp per row, 16-byte loads",
        size=((STEP_US[0] - 0.05) / (STEP_US[1] + 0.05), (STEP_US[0] + 0.05) / (STEP_US[1] - 0.05)),
        gpus=("RTX 5090 Laptop",), differs="its layers' GEMVs alone, a kernel each, without the rest of a step",
    ),
    Claim(
        "pattern", *AUTOMEGAKERNEL, "What makes it faster is that loads are coalesced",
        "the same; mapping, width, cache of x and threads all changed at once", "stated as the cause, no number",
        ruled="2026-11-25", observe=pattern, neutral=PART, percent=True,
        quantity="part of that gain (log scale) from coalescing alone, by matrix of h1024; negative: slower",
        gpus=("RTX 5090 Laptop",), differs="single GEMVs, a kernel each",
        refutes="less of the gain with W stored [K, N] and nothing else changed, where loads are coalesced too",
        note=f"as claimed from {100 * PART:.0f} % on, where two sizes count as the same",
    ),
    Claim(
        "rule", *SLEEPY, "One row per group up to N = 4096, else four: no change of a token's time",
        f"M4 Max, Qwen3.5-4B bf16; {NOTED}",
        f"40 → 41 ms, as printed between {TOKEN_MS[0]} and {TOKEN_MS[1]} ms",
        ruled="2026-11-25", quantity="a token's time with the rule ÷ that without", observe=rule,
        direction=WITHIN, band=(TOKEN_MS[0] / TOKEN_MS[1], TOKEN_MS[1] / TOKEN_MS[0]),
        gpus=("M4 Max",), differs="the sum of single GEMVs, without the rest of a token",
        note=f"no change: {TOKEN_MS[0] / TOKEN_MS[1]:.3f} to {TOKEN_MS[1] / TOKEN_MS[0]:.3f} times as long, as far as "
        "the figures may be apart as printed; what the rule replaced is not said, so it is tried over 1 row and over "
        "4, with and without dependent launch, matrices merged and separate",
    ),
    Claim(
        "ceiling", *SLEEPY, "Decode cannot go beyond 45 % of the bandwidth",
        f"M4 Max (410 GB/s), the same model; {NOTED}", "45 %",
        ruled="2026-11-25", observe=ceiling,
        quantity="share of the GPU's read speed that this lab's GEMVs reach in that model's layers",
        direction=BELOW, neutral=CEILING, percent=True,
        gpus=("M4 Max",), differs="layers without the rest of a token; a share of the measured read speed, not of the "
        "data sheet's",
        refutes="the same weights stream faster",
        note=f"45 % as printed: up to {100 * CEILING:.1f} %",
    ),
)  # fmt: skip
