"""The published numbers that the study tests, and the functions that judge them from one GPU's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.bench.spec import Claim, Judgement, untestable
from labkit.studies.moe_persistent_grid import variants
from labkit.studies.moe_persistent_grid.models import QWEN3_30B, QWEN35_35B
from labkit.studies.moe_persistent_grid.variants import SOURCE_T

if TYPE_CHECKING:
    import pandas as pd

PREFILL = (6171, 6127)  # tokens a second, activations quantised before, then the persistent grid as well
DECODE = (99.0, 84.5)
WIDER_BLOCKS = 1.32  # BLOCK_M 64 over 16
LOOP = (1.42, 2.62)
LIGER_TFLOPS = 523.0
TIE = 0.03  # the layer is a part of the prefill, so that a tie of it within 1 % may be one of the layer within this
ABOUT = 1.15  # a factor of another GPU agrees within this
FEW = 512  # tokens, up to which the source expects gains
PROCESSES = 3


NO_LAYERS = f"needs ExecuTorch's own layer of {QWEN35_35B.name} with INT4 weights, {{}}, in {PROCESSES} processes"


def _triton(rows: pd.DataFrame) -> str:
    """The versions of Triton that compiled what was measured: another makes other code of the same lines."""
    return "Triton " + ", ".join(sorted(set(rows[rows["ok"]]["triton"])))


OWN = "ExecuTorch's own layer (1.5.1, blocks of 64 rows), one CTA a tile / persistent"


def judge_prefill(rows: pd.DataFrame) -> Judgement:
    """Does the persistent grid change the time of the source's prefill as little as it says?

    By the source's own layer, in both grids.
    """
    from labkit.bench.tables import where
    from labkit.studies.moe_persistent_grid import tables

    own = where(tables.released_grids(rows), T=SOURCE_T)
    if own.empty or own["runs"].min() < PROCESSES or "W4A8" not in set(own["activations"]):
        return untestable(NO_LAYERS.format(f"at {SOURCE_T} tokens in both grids"))
    measured = f"{OWN}: " + ", ".join(f"{line['activations']} ×{line['ratio']:.3f}" for _, line in own.iterrows())
    [ratio] = where(own, activations="W4A8")["ratio"]  # which the pull request measured
    if abs(ratio - 1) <= TIE:
        return Judgement("consistent", measured, "a tie here too, on another GPU and for the layer alone")
    why = f"no tie here: the persistent grid is {'faster' if ratio > 1 else 'slower'} on this GPU"
    return Judgement("not reproduced", measured, f"{why}. {_triton(rows)}")


def judge_few_tokens(rows: pd.DataFrame) -> Judgement:
    """Does the source's persistent grid pay for up to 512 tokens? By its own layer."""
    from labkit.studies.moe_persistent_grid import tables

    own = tables.released_grids(rows)
    own = own[own["T"] <= FEW]
    if own.empty or own["runs"].min() < PROCESSES:
        return untestable(NO_LAYERS.format(f"at {FEW} tokens or fewer in both grids"))
    faster = (own["verdict"] == "faster").sum()
    measured = f"{OWN}: ×{own['ratio'].min():.2f} to ×{own['ratio'].max():.2f} in {len(own)} cases"
    verdict = "consistent" if faster > len(own) / 2 else "not reproduced"
    return Judgement(verdict, measured, f"it pays in {faster or 'none'} of these cases")


def judge_fewer_sms(rows: pd.DataFrame) -> Judgement:
    """Does the persistent grid gain more where there are fewer multiprocessors?"""
    from labkit.bench.tables import where
    from labkit.bench.verdict import geometric_mean
    from labkit.studies.moe_persistent_grid import tables

    table = tables.persistent_on_parts(rows)
    sizes = sorted(table["SMs"].unique())
    if len(sizes) < 2:
        return untestable("needs a GEMM on all and on fewer multiprocessors of this GPU (green contexts)")
    means = {size: geometric_mean(where(table, SMs=size)["ratio"]) for size in sizes}
    measured = "one CTA a tile / persistent: " + ", ".join(f"{size} SMs ×{mean:.3f}" for size, mean in means.items())
    whole = means[sizes[-1]]
    more = [size for size in sizes[:-1] if means[size] > whole + 0.01]
    if len(more) == len(sizes) - 1:
        return Judgement("consistent", measured, "the persistent grid gains more on every smaller part of this GPU")
    why = "its gain does not grow with fewer multiprocessors here"
    return Judgement("not reproduced", measured, f"{why}. The A100 that was measured has fewer than the 4090 named")


def judge_decode(rows: pd.DataFrame) -> Judgement:
    """Decode at that commit does not run the kernels that were changed."""
    del rows
    return untestable("decode calls another operator, which the pull request does not change: no cause to test")


def judge_blocks(rows: pd.DataFrame) -> Judgement:
    """Are blocks of 64 rows as much faster than blocks of 16 at the source's prefill? By its own layer in both."""
    from labkit.bench.tables import where
    from labkit.studies.moe_persistent_grid import tables

    own = where(tables.narrow_blocks(rows), T=SOURCE_T)
    if own.empty or own["runs"].min() < PROCESSES or "W4A16" not in set(own["activations"]):
        return untestable(NO_LAYERS.format(f"at {SOURCE_T} tokens in blocks of 16 and of 64 rows"))
    measured = "ExecuTorch's own layer, blocks of 16 / of 64 rows: "
    measured += ", ".join(f"{line['activations']} ×{line['ratio']:.2f}" for _, line in own.iterrows())
    [ratio] = where(own, activations="W4A16")["ratio"]  # which the comment stands before
    if WIDER_BLOCKS / ABOUT <= ratio <= WIDER_BLOCKS * ABOUT:
        return Judgement("consistent", measured, "about as much here, on another GPU")
    if ratio > 1:
        by = "more" if ratio > WIDER_BLOCKS else "less"
        why = f"wider blocks are faster here too, but by {by}. {_triton(rows)}"
        return Judgement("not reproduced", measured, why)
    return Judgement("not reproduced", measured, f"wider blocks are not faster here. {_triton(rows)}")


def judge_loop(rows: pd.DataFrame) -> Judgement:
    """Is an expert layer that much faster than a loop over experts, and is the persistent grid what makes it so?"""
    from labkit.bench.tables import processes, where
    from labkit.bench.verdict import geometric_mean
    from labkit.studies.moe_persistent_grid import tables

    table = tables.compared(rows, variants.OURS, variants.LOOP)
    if table.empty or processes(rows, "layer") < PROCESSES:
        return untestable(f"needs our layer and the loop in {PROCESSES} processes")
    low, high = table["ratio"].min(), table["ratio"].max()
    within = int(table["ratio"].between(*LOOP).sum())
    measured = f"loop / ours ×{low:.2f} to ×{high:.2f} over {len(table)} cases, {within} in the published range"
    grids = where(tables.persistence(rows), kernel="ours")
    cause = "the grid was not tested here"
    if len(grids):
        gain = geometric_mean(grids["ratio"])
        cause = f"of our own GEMMs, one CTA a tile / persistent is ×{gain:.2f} in the mean"
        cause += ": the factor is not the grid's" if gain < 1 + TIE else ""
    cause += ". The shapes are others, and the loop is eager while ours is in a graph"
    return Judgement("consistent" if within else "not reproduced", measured, cause)


def judge_liger(rows: pd.DataFrame) -> Judgement:
    """The kernels that reached it are in no release; the released ones, tuned over a part, say nothing of it."""
    from labkit.bench.tables import where
    from labkit.studies.moe_persistent_grid import tables

    table = where(tables.times(rows), model=QWEN3_30B.name)
    best, ours = (where(table, variant=name)["TFLOP/s"].max() for name in (variants.LIGER, variants.OURS))
    why = "the pull request's kernels are in no release"
    if best == best:
        why += f"; those of the released package, tuned over some of its configurations, reach {best:.0f} TFLOP/s"
        why += f" with {QWEN3_30B.name}'s shape, ours {ours:.0f}" if ours == ours else ""
    return untestable(why)


PULL_REQUEST = ("ExecuTorch pull request 19219", "https://github.com/pytorch/executorch/pull/19219")
A100 = f"A100 80GB, {QWEN35_35B.name}, INT4 weights"
CLAIMS = (
    Claim(
        "prefill", *PULL_REQUEST, "A persistent grid with grouped tile order does not change the prefill",
        f"{A100}, 8-bit activations, {SOURCE_T} tokens", f"{PREFILL[0]} → {PREFILL[1]} tokens/s", judge_prefill,
    ),
    Claim(
        "few-tokens", *PULL_REQUEST, f"It should pay for up to {FEW} tokens", "expected, not measured", "no figure",
        judge_few_tokens,
    ),
    Claim(
        "fewer-sms", *PULL_REQUEST, "It should pay on GPUs with fewer multiprocessors, such as the RTX 4090's 128",
        "expected, not measured", "no figure", judge_fewer_sms,
    ),
    Claim(
        "decode", *PULL_REQUEST, "The same commit made decode slower", f"{A100}, 512 tokens decoded",
        f"{DECODE[0]} → {DECODE[1]} tokens/s", judge_decode,
    ),
    Claim(
        "blocks", "ExecuTorch, comment in fused_moe.py",
        "https://github.com/pytorch/executorch/blob/main/backends/cuda/triton/kernels/fused_moe.py",
        "Blocks of 64 rows are faster than blocks of 16",
        "Qwen3.5 MoE prefill, 1696 tokens, 256 experts; GPU not stated",
        f"×{WIDER_BLOCKS}", judge_blocks,
    ),
    Claim(
        "loop", "PyTorch blog, Triton persistent cache-aware grouped GEMM",
        "https://pytorch.org/blog/accelerating-moes-with-a-triton-persistent-cache-aware-grouped-gemm-kernel/",
        "A persistent grouped GEMM is faster than a loop over the experts", "H100, DeepSeek-V3 16B shapes, bf16",
        f"×{LOOP[0]} to ×{LOOP[1]}", judge_loop,
    ),
    Claim(
        "liger", "Liger-Kernel pull request 1294", "https://github.com/linkedin/Liger-Kernel/pull/1294",
        "Peak of its fused expert layer in inference", "H100, the pull request's own kernels",
        f"{LIGER_TFLOPS:.0f} TFLOP/s", judge_liger,
    ),
)  # fmt: skip
