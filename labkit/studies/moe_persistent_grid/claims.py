"""The published claims of the study, with the rules by which `bench/claim.py` judges them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.bench.claim import OURS, OWN, WITHIN, Claim, Observation, Observed, of_table
from labkit.studies.moe_persistent_grid import variants
from labkit.studies.moe_persistent_grid.models import QWEN35_35B
from labkit.studies.moe_persistent_grid.variants import SOURCE_T

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from labkit.bench.spec import Case

PREFILL = (6171, 6127)  # tokens a second, activations quantised before, then the persistent grid as well
DECODE = (99.0, 84.5)
WIDER_BLOCKS = 1.32  # BLOCK_M 64 over 16
LOOP = (1.42, 2.62)
LIGER_TFLOPS = 523.0
TIE = (0.97, 1.03)  # the layer is a third of a prefill or more: a prefill within 1 % may hide this much of it
FEW = 512  # tokens, up to which the source expects gains


def _layers(table: pd.DataFrame, where: str) -> Observed:
    """ExecuTorch's own layer in two forms. where: of which cases they must be, in words."""
    found = of_table(table, lambda line: f"{line['activations']}, {line['T']} tokens")
    return Observed(OWN, found, f"ExecuTorch's own layer of {QWEN35_35B.name} with INT4 weights, {where},")


def prefill(rows: pd.DataFrame) -> Observed:
    """One CTA a tile over the persistent grid at the prefill's tokens, with the activations of the pull request."""
    from labkit.bench.tables import where
    from labkit.studies.moe_persistent_grid import tables

    own = where(tables.released_grids(rows), T=SOURCE_T, activations="W4A8")
    return _layers(own, f"at {SOURCE_T} tokens in both grids")


def few_tokens(rows: pd.DataFrame) -> Observed:
    """The same at few tokens, with both kinds of activations."""
    from labkit.studies.moe_persistent_grid import tables

    own = tables.released_grids(rows)
    return _layers(own[own["T"] <= FEW], f"at {FEW} tokens or fewer in both grids")


def blocks(rows: pd.DataFrame) -> Observed:
    """Blocks of 16 rows over blocks of 64, with the activations before which the comment stands."""
    from labkit.bench.tables import where
    from labkit.studies.moe_persistent_grid import tables

    own = where(tables.narrow_blocks(rows), T=SOURCE_T, activations="W4A16")
    return _layers(own, f"at {SOURCE_T} tokens in blocks of 16 and of 64 rows")


def fewer_sms(rows: pd.DataFrame) -> Observed:
    """What the persistent grid gains on a part of the GPU over what it gains on all of it, at equal tokens.

    The two were not timed in the same blocks: the interval is that of both ratios' ends, and so is the noise.
    """
    from labkit.studies.moe_persistent_grid import tables

    table, found = tables.persistent_on_parts(rows), []
    for tokens, group in table.groupby("T"):
        whole = group.loc[group["SMs"].idxmax()]
        for _, part in group[group["SMs"] < whole["SMs"]].iterrows():
            ends = part["ratio"] / whole["ratio"], part["low"] / whole["high"], part["high"] / whole["low"]
            case = f"{part['SMs']} of {whole['SMs']} SMs, {tokens} tokens"
            found.append(Observation(case, *ends, part["noise"] + whole["noise"], min(part["runs"], whole["runs"])))
    return Observed(OURS, found, "a GEMM on all and on fewer multiprocessors of this GPU (green contexts)")


def _case(line: Mapping[str, Any]) -> str:
    named = [f"{line['model']}, {line['weights']}, {line['T']} tokens, {line['routing']}", line.get("GEMM")]
    return ", ".join(filter(None, named))


def own_grid(rows: pd.DataFrame) -> Observed:
    """One CTA a tile over the persistent grid of the lab's own GEMMs."""
    from labkit.bench.tables import where
    from labkit.studies.moe_persistent_grid import tables

    table = where(tables.persistence(rows), kernel="ours", weights="bf16")
    return Observed(OURS, of_table(table, _case), "our bf16 GEMMs in both grids")


def pairs(x: Case) -> list[tuple[str, str]]:
    """The persistent grid over one CTA a tile: ExecuTorch's own layer, and the lab's products in bf16."""
    if x.op == "layer":
        return [both[::-1] for both in variants.OWN_PAIRS]
    if x.op in variants.GEMMS and x["weights"] == "bf16":
        return [(variants.OURS_PERSISTENT, variants.OURS_TILES)]
    return []


PULL_REQUEST = ("ExecuTorch pull request 19219", "https://github.com/pytorch/executorch/pull/19219")
BLOG = (
    "PyTorch blog, Triton persistent cache-aware grouped GEMM",
    "https://pytorch.org/blog/accelerating-moes-with-a-triton-persistent-cache-aware-grouped-gemm-kernel/",
)
RULED = "2026-11-26"
A100 = f"A100 80GB, {QWEN35_35B.name}, INT4 weights"
GRIDS = "one CTA per tile ÷ persistent grid"
CLAIMS = (
    Claim(
        "prefill", *PULL_REQUEST, "A persistent grid with grouped tile order does not change the prefill",
        f"{A100}, 8-bit activations, {SOURCE_T} tokens", f"{PREFILL[0]} → {PREFILL[1]} tokens/s",
        ruled="2026-11-25", faster=True, direction=WITHIN, band=TIE, observe=prefill, gpus=("A100",),
        quantity=f"time per layer, not of a whole prefill: {GRIDS}",
        differs="the layer without the rest of the prefill",
    ),
    Claim(
        "few-tokens", *PULL_REQUEST, f"The persistent grid should be faster up to {FEW} tokens",
        "expected, not measured", "no number given",
        ruled="2026-11-25", faster=True, quantity=f"time per layer: {GRIDS}", observe=few_tokens, gpus=("A100",),
    ),
    Claim(
        "fewer-sms", *PULL_REQUEST,
        "The persistent grid should be faster on GPUs with fewer multiprocessors, such as the RTX 4090's 128",
        "expected, not measured", "no number given",
        ruled="2026-11-25", quantity="gain of the persistent grid on a part of the GPU ÷ its gain on all of it",
        observe=fewer_sms, gpus=("RTX 4090",), differs="parts of one GPU, not another",
        note="the A100 that was measured has 108 multiprocessors, fewer than the RTX 4090",
    ),
    Claim(
        "decode", *PULL_REQUEST, "The same commit made decode slower", f"{A100}, 512 tokens decoded",
        f"{DECODE[0]} → {DECODE[1]} tokens/s", ruled="2026-11-25",
        untested="decode calls another operator, which the pull request does not change; no whole decode is run here",
    ),
    Claim(
        "blocks", "ExecuTorch, comment in fused_moe.py",
        "https://github.com/pytorch/executorch/blob/main/backends/cuda/triton/kernels/fused_moe.py",
        "Blocks of 64 rows are faster than blocks of 16",
        "Qwen3.5 MoE prefill, 1696 tokens, 256 experts; GPU not stated", f"{WIDER_BLOCKS}× faster",
        ruled=RULED, faster=True, quantity="time with blocks of 16 rows ÷ with blocks of 64", observe=blocks,
        size=(WIDER_BLOCKS - 0.005, WIDER_BLOCKS + 0.005), differs=f"{SOURCE_T} tokens, not 1696",
    ),
    Claim(
        "loop", *BLOG, "A persistent grouped GEMM is faster than a loop over the experts",
        "H100, DeepSeek-V3 16B shapes, bf16", f"{LOOP[0]}× to {LOOP[1]}× faster",
        ruled=RULED,
        untested="its kernel is not run here, and our layer, as tuned, is grouped but no persistent grid: it has one "
        "CTA per tile",
    ),
    Claim(
        "loop-grid", *BLOG, "The persistent grid is why PyTorch's grouped GEMM is faster", "the same",
        "stated as the cause, no number",
        ruled="2026-11-25", faster=True, quantity=f"time of our own GEMMs: {GRIDS}", observe=own_grid, gpus=("H100",),
        differs="other shapes", refutes="a grid of one CTA per tile that takes as long as the persistent one",
    ),
    Claim(
        "liger", "Liger-Kernel pull request 1294", "https://github.com/linkedin/Liger-Kernel/pull/1294",
        "Peak of its fused expert layer in inference", "H100, the pull request's own kernels",
        f"{LIGER_TFLOPS:.0f} TFLOP/s", ruled="2026-11-25",
        untested="the pull request's kernels are in no release; those of the released package are other ones",
    ),
)  # fmt: skip
