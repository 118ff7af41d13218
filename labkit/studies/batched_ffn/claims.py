"""The source's claims, and the functions that judge them from one GPU's rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from labkit.bench.spec import Claim, Judgement, untestable
from labkit.studies.batched_ffn import variants

if TYPE_CHECKING:
    import pandas as pd

TOKENS = 8  # at which the source gives figures
STATIONARY, GEMM_N = 2.42, 1.4  # times a loop of GEMVs, there
ABOUT = 1.3  # a factor of another GPU agrees within this
ADVICE = 2  # times top_k experts a layer
PROCESSES = 3


def _compared(rows: pd.DataFrame, op: str, variant: str, against: str) -> pd.DataFrame:
    """Of what was measured in enough processes alone."""
    from labkit.studies.batched_ffn import tables

    table = tables.compared(rows, op, variant, against)
    return table[table["runs"] >= PROCESSES]


def _judge_gain(rows: pd.DataFrame, variant: str, published: float) -> Judgement:
    """Does a variant make TOKENS tokens as much faster than the loop as was published?"""
    from labkit.bench.verdict import geometric_mean

    table = _compared(rows, "product", variant, variants.PER_TOKEN)
    ratio = table[table["N"] == TOKENS]["ratio"]
    if ratio.empty:
        return untestable(f"needs the loop and this variant at N = {TOKENS} in {PROCESSES} processes")
    measured = f"×{ratio.min():.2f} to ×{ratio.max():.2f} over {len(ratio)} shapes and formats"
    mean = geometric_mean(ratio)
    if published / ABOUT <= mean <= published * ABOUT:
        return Judgement("consistent", measured, f"on average ×{mean:.2f}, about as much on another GPU")
    if mean > published:
        return Judgement("consistent", measured, f"on average ×{mean:.2f}: faster here too, and by more")
    return Judgement("not reproduced", measured, f"on average ×{mean:.2f}, less than there")


# Does one launch alone, each token still reading all weights, do it; and a tile of weights that is read once for all?
judge_launches = partial(_judge_gain, variant=variants.GEMM_N, published=GEMM_N)
judge_reuse = partial(_judge_gain, variant=variants.STATIONARY, published=STATIONARY)


def judge_bits(rows: pd.DataFrame) -> Judgement:
    """Does a token have the same bits alone and in every batch, in every variant, and does a library's fail that?"""
    from labkit.studies.batched_ffn import tables

    table = tables.bits(rows)
    ours = {name for some in tables.OURS.values() for name in some}
    own, other = table[table["variant"].isin(ours)], table[~table["variant"].isin(ours)]
    if own.empty:
        return untestable("no variant's token was looked at alone")
    measured = f"the same bits in {own['same'].sum()} of {own['cases'].sum()} cases and variants"
    control = f"libraries in {other['same'].sum()} of {other['cases'].sum()}" if len(other) else "no library beside"
    if own["same"].sum() < own["cases"].sum():
        return Judgement("not reproduced", measured, control)
    if other.empty or other["same"].sum() == other["cases"].sum():
        return Judgement("consistent", measured, f"{control}: nothing here shows that the comparison can fail")
    return Judgement("reproduced", measured, f"{control}: the comparison can fail")


def judge_packed(rows: pd.DataFrame) -> Judgement:
    """Is Q8_0 faster with its fields in arrays of their own, so that 16 bytes can be loaded at once?"""
    table = _compared(rows, "product", variants.PER_TOKEN, variants.STORED)
    if table.empty:
        return untestable(f"needs Q8_0 both ways at N = 1 in {PROCESSES} processes")
    ratio = table["ratio"]
    measured = f"×{ratio.min():.2f} to ×{ratio.max():.2f} over {len(table)} shapes"
    if (table["low"] > 1).all():
        return Judgement("consistent", measured, "faster here too, with the same bits")
    return Judgement("not reproduced", measured, "not clearly faster at every shape")


def judge_copies(rows: pd.DataFrame) -> Judgement:
    """Is it worth while to find rows inside the kernel instead of copying each?"""
    table = _compared(rows, "routed", variants.INDEXED, variants.ROWCOPY)
    if table.empty:
        return untestable(f"needs routed experts both ways in {PROCESSES} processes")
    line = table.loc[table["N"].idxmax()]
    measured = f"×{line['ratio']:.1f} at N = {line['N']} in {line['format']}, GPU time of the experts alone"
    if line["low"] > 1:
        why = "faster here too; a whole prefill, of which the source speaks, is more"
        return Judgement("consistent", measured, why)
    return Judgement("not reproduced", measured, "copies a row cost nothing here")


def judge_slots(rows: pd.DataFrame) -> Judgement:
    """Are twice top_k slots a layer enough for one token at a time?"""
    from labkit.bench.tables import where
    from labkit.studies.batched_ffn import tables

    top_k = variants.ROUTED[variants.MAIN_ROUTED][1]
    few = where(tables.cached(rows), capacity=ADVICE * top_k, N=1, policy=variants.POLICY)
    if few.empty:
        return untestable(f"needs steps of one token with {ADVICE * top_k} slots a layer and the source's policy")
    parts = [f"{line['trace']} {line['hit rate']:.0%}" for _, line in few.iterrows()]
    slower = (few["when needed µs"] / few["compute µs"]).min()
    measured = f"hit rates {', '.join(parts)} of synthetic traces; a step takes ×{slower:.1f} and more of compute alone"
    if (few["hit rate"] >= 0.5).all():
        return Judgement("consistent", measured, "most experts are there in every trace")
    return Judgement("not reproduced", measured, "in some traces most experts are not there")


SOURCE = ("SharpInference, issue 121", "")
CLAIMS = (
    Claim(
        "bits", *SOURCE, "A batched layer has the bits of the layer token by token", "C#, RTX 4070 Ti, GGUF formats",
        "bit-identical", judge_bits,
    ),
    Claim(
        "launches", *SOURCE, "One launch for all tokens, weights read again for each, is faster than a loop",
        f"RTX 4070 Ti, N = {TOKENS}", f"about ×{GEMM_N}", judge_launches,
    ),
    Claim(
        "reuse", *SOURCE, "Weights outer, tokens inner: a tile of weights is read once for all",
        f"RTX 4070 Ti, N = {TOKENS}", f"×{STATIONARY}", judge_reuse,
    ),
    Claim(
        "packed", *SOURCE, "Q8_0 with its fields in arrays of their own is faster, bit-identical", "RTX 4070 Ti",
        "10–12 %", judge_packed,
    ),
    Claim(
        "copies", *SOURCE, "Gather and scatter with a copy a row are fewer operations, and still too many",
        "MoE prefill, RTX 4070 Ti", "18 k operations a layer; a fused sum 45.3 → 54.3 t/s", judge_copies,
    ),
    Claim(
        "slots", *SOURCE, "Twice top_k slots a layer are enough", "GPU-SLRU cache", "recommended", judge_slots,
    ),
)  # fmt: skip
