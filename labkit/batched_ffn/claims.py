"""The source's claims, and the functions that judge them from one GPU's rows."""

import pandas as pd

from labkit.batched_ffn import names, tables
from labkit.bench.spec import Claim, Judgement
from labkit.bench.verdict import geometric_mean

TOKENS = 8  # at which the source gives figures
STATIONARY, GEMM_N = 2.42, 1.4  # times a loop of GEMVs, there
ABOUT = 1.3  # a factor of another GPU agrees within this
ADVICE = 2  # times top_k experts a layer
PROCESSES = 3


def _untestable(why: str) -> Judgement:
    return Judgement("not testable here", "–", why)


def _at(rows: pd.DataFrame, variant: str) -> pd.DataFrame:
    """Against the loop at TOKENS, only what was measured in enough processes."""
    table = tables.compared(rows, "product", variant, names.PER_TOKEN)
    return table[(table["N"] == TOKENS) & (table["runs"] >= PROCESSES)] if len(table) else table


def judge_launches(rows: pd.DataFrame) -> Judgement:
    """Does one launch alone, each token still reading all weights, make eight tokens about 1.4 times as fast?"""
    return _judge_gain(_at(rows, names.GEMM_N), GEMM_N)


def judge_reuse(rows: pd.DataFrame) -> Judgement:
    """Does reading a tile of weights once for all tokens make eight of them about 2.42 times as fast?"""
    return _judge_gain(_at(rows, names.STATIONARY), STATIONARY)


def _judge_gain(table: pd.DataFrame, published: float) -> Judgement:
    if table.empty:
        return _untestable(f"needs the loop and this variant at N = {TOKENS} in {PROCESSES} processes")
    ratio = table["ratio"]
    measured = f"×{ratio.min():.2f} to ×{ratio.max():.2f} over {len(table)} shapes and formats"
    mean = geometric_mean(ratio)
    if published / ABOUT <= mean <= published * ABOUT:
        return Judgement("consistent", measured, f"on average ×{mean:.2f}, about as much on another GPU")
    if mean > published:
        return Judgement("consistent", measured, f"on average ×{mean:.2f}: faster here too, and by more")
    return Judgement("not reproduced", measured, f"on average ×{mean:.2f}, less than there")


def judge_bits(rows: pd.DataFrame) -> Judgement:
    """Does a token have the same bits alone and in every batch, in every variant, and does a library's fail that?"""
    table = tables.bits(rows)
    ours = {name for some in tables.OURS.values() for name in some}
    own, other = table[table["variant"].isin(ours)], table[~table["variant"].isin(ours)]
    if own.empty:
        return _untestable("no variant's token was looked at alone")
    measured = f"the same bits in {own['same'].sum()} of {own['cases'].sum()} cases and variants"
    control = f"libraries in {other['same'].sum()} of {other['cases'].sum()}" if len(other) else "no library beside"
    if own["same"].sum() < own["cases"].sum():
        return Judgement("not reproduced", measured, control)
    if other.empty or other["same"].sum() == other["cases"].sum():
        return Judgement("consistent", measured, f"{control}: nothing here shows that the comparison can fail")
    return Judgement("reproduced", measured, f"{control}: the comparison can fail")


def judge_packed(rows: pd.DataFrame) -> Judgement:
    """Is Q8_0 faster with its fields in arrays of their own, so that 16 bytes can be loaded at once?"""
    table = tables.compared(rows, "product", names.PER_TOKEN, names.STORED)
    table = table[table["runs"] >= PROCESSES] if len(table) else table
    if table.empty:
        return _untestable(f"needs Q8_0 both ways at N = 1 in {PROCESSES} processes")
    ratio = table["ratio"]
    measured = f"×{ratio.min():.2f} to ×{ratio.max():.2f} over {len(table)} shapes"
    if (table["low"] > 1).all():
        return Judgement("consistent", measured, "faster here too, with the same bits")
    return Judgement("not reproduced", measured, "not clearly faster at every shape")


def judge_copies(rows: pd.DataFrame) -> Judgement:
    """Is it worth while to find rows inside the kernel instead of copying each?"""
    table = tables.compared(rows, "routed", names.INDEXED, names.ROWCOPY)
    table = table[table["runs"] >= PROCESSES] if len(table) else table
    if table.empty:
        return _untestable(f"needs routed experts both ways in {PROCESSES} processes")
    line = table.loc[table["N"].idxmax()]
    measured = f"×{line['ratio']:.1f} at N = {line['N']} in {line['format']}, GPU time of the experts alone"
    if line["low"] > 1:
        return Judgement(
            "consistent", measured, "faster here too; a whole prefill, of which the source speaks, is more"
        )
    return Judgement("not reproduced", measured, "copies a row cost nothing here")


def judge_slots(rows: pd.DataFrame) -> Judgement:
    """Are twice top_k slots a layer enough for one token at a time?"""
    table = tables.cached(rows)
    top_k = names.ROUTED["Qwen3.5-35B-A3B"][1]
    few = table[(table["capacity"] == ADVICE * top_k) & (table["N"] == 1) & (table["policy"] == "slru")]
    if few.empty:
        return _untestable(f"needs steps of one token with {ADVICE * top_k} slots a layer and the source's policy")
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
