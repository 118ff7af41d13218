"""The published claims of the study, with the rules by which `bench/claim.py` judges them.

The issue asks for the batched layer. Most numbers are not in it, but in later work of the same project, each named by
the file in which its author gives it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from labkit.bench.claim import OURS, WITHIN, Claim, Observation, Observed, of_table
from labkit.studies.batched_ffn import variants

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from labkit.bench.spec import Case

TOKENS = 8  # at which the source gives figures
UNPACKED = ("F32", "BF16")  # formats whose weights are numbers as they are stored
SLOTS = 2  # times top_k experts a layer
MOST_HIT = 0.5  # of what is asked for: half at least is "well"


def _case(line: Mapping[str, Any]) -> str:
    """Which case a line of a table is of: "Q4_K, 17408 × 5120", "Q4_K, 64 tokens"."""
    where = f"{line['rows']} × {line['K']}" if "rows" in line else f"{line['N']} tokens"
    return f"{line['format']}, {where}"


def _products(rows: pd.DataFrame, variant: str, against: str, needs: str, **wanted: Any) -> Observed:
    """Time of `against` over that of `variant` in these cases of a product, by the lab's kernels."""
    from labkit.bench.tables import where
    from labkit.studies.batched_ffn import tables

    table = where(tables.compared(rows, "product", variant, against), **wanted)
    return Observed(OURS, of_table(table, _case), needs)


def one_launch(rows: pd.DataFrame) -> Observed:
    """The loop over one launch in which each token still reads all weights."""
    needs = f"the loop and one launch at N = {TOKENS}"
    return _products(rows, variants.GEMM_N, variants.PER_TOKEN, needs, N=TOKENS)


def read_once(rows: pd.DataFrame) -> Observed:
    """The loop over one launch that reads a tile of weights once for all tokens."""
    needs = f"the loop and weights read once at N = {TOKENS}"
    return _products(rows, variants.STATIONARY, variants.PER_TOKEN, needs, N=TOKENS)


def fewer_reads(rows: pd.DataFrame) -> Observed:
    """One launch that reads weights for each token over one that reads them once, where reading is all that is saved.

    Of other formats, a weight is also made a number once instead of N times.
    """
    needs = f"one launch both ways at N = {TOKENS} in {' or '.join(UNPACKED)}"
    return _products(rows, variants.STATIONARY, variants.GEMM_N, needs, N=TOKENS, format=UNPACKED)


def fields_apart(rows: pd.DataFrame) -> Observed:
    """Q8_0 as it is stored over Q8_0 with its fields in arrays of their own, one token."""
    return _products(rows, variants.PER_TOKEN, variants.STORED, "Q8_0 both ways at N = 1")


def rows_in_place(rows: pd.DataFrame) -> Observed:
    """A copy for every row over rows that are found inside the kernel, of several tokens."""
    from labkit.studies.batched_ffn import tables

    table = tables.compared(rows, "routed", variants.INDEXED, variants.ROWCOPY)
    return Observed(OURS, of_table(table[table["N"] > 1], _case), "routed experts both ways at several tokens")


def same_alone(rows: pd.DataFrame) -> Observed:
    """In which part of all cases and batched variants a token has the bits that it has alone."""
    from labkit.studies.batched_ffn import tables

    table = tables.bits(rows)
    ours = table[(table["who"] == tables.OWN) & (table["variant"] != variants.PER_TOKEN)]  # of a loop it is no question
    return _counted(rows, ours["same"].sum(), ours["cases"].sum(), "a token that was looked at alone", set(ours["op"]))


def same_as_stored(rows: pd.DataFrame) -> Observed:
    """In which part of the shapes Q8_0 has the same bits both ways."""
    from labkit.studies.batched_ffn import tables

    same = tables.stored_bits(rows)["same"]
    return _counted(rows, same.sum(), len(same), "Q8_0 both ways at N = 1", ("product",))


def _counted(rows: pd.DataFrame, same: int, cases: int, needs: str, ops: Sequence[str] | set[str]) -> Observed:
    """The part in which bits are the same: counted, without noise.

    Where they always are, it counts only if the same comparison finds that those of a library differ: else nothing
    shows that it can fail, and any part may be the true one.
    """
    from labkit.bench.tables import processes
    from labkit.studies.batched_ffn import tables

    if not cases:
        return Observed(OURS, [], needs)
    table = tables.bits(rows)
    libraries = table[table["who"] == tables.LIBRARY]
    can_fail = libraries["same"].sum() < libraries["cases"].sum()
    part, runs = float(same / cases), min(processes(rows, op) for op in ops)
    least = part if part < 1 or can_fail else 0.0
    return Observed(OURS, [Observation(f"{cases} cases", part, least, part, 0.0, runs)], needs)


def slots(rows: pd.DataFrame) -> Observed:
    """Hit rates of the source's policy, one token at a time, in the traces in which the best possible policy hits most.

    In others, no policy and so no data could say that the slots are enough. A cache of all experts hits always.
    """
    from labkit.studies.batched_ffn import tables

    found, name = [], variants.NEEDED
    for params, group in tables.cases(rows, "cache"):
        wanted = {"N": 1, "policy": variants.POLICY, "capacity": SLOTS * params["top_k"]}
        lines = group[(group["variant"] == name) & group["ok"]]
        if lines.empty or not wanted.items() <= params.items() or (best := tables.oracle(params)) < MOST_HIT:
            continue
        rate = json.loads(lines["evidence"].iloc[0]).get("hit_rate", float("nan"))
        case = f"{params['trace']} trace (at best {best:.0%})".replace("%", " %")
        found.append(Observation(case, rate, rate, rate, 0.0, len(set(lines["run"].iloc[0]))))
    needs = f"steps of one token with {SLOTS} × top_k slots a layer, in a trace of which as many slots can hit most,"
    return Observed(OURS, found, needs)


def pairs(x: Case) -> list[tuple[str, str]]:
    """One launch and weights read once over a loop, Q8_0 both ways, and rows found in the kernel over copies."""
    if x.op == "product" and x["N"] == TOKENS:
        reads = [(variants.STATIONARY, variants.GEMM_N)] if x["format"] in UNPACKED else []
        return [(name, variants.PER_TOKEN) for name in (variants.GEMM_N, variants.STATIONARY)] + reads
    if x.op == "product" and x["N"] == 1:
        return [(variants.PER_TOKEN, variants.STORED)]
    return [(variants.INDEXED, variants.ROWCOPY)] if x.op == "routed" and x["N"] > 1 else []


REPOSITORY = "https://github.com/pekkah/SharpInference"
ISSUE = ("SharpInference, issue 121", f"{REPOSITORY}/issues/121")
DECODE = (
    "SharpInference, CudaForwardPass.cs",
    f"{REPOSITORY}/blob/cb72245693f1a26a609e6ab34d8c79b022408939/src/SharpInference.Engine/CudaForwardPass.cs",
)
REUSE = (
    "SharpInference, CudaWsKernels.cs",
    f"{REPOSITORY}/blob/21fa24d925e23af6743e15b4f4f1e5ceaf8bfa74/src/SharpInference.Cuda/CudaWsKernels.cs",
)
README = (
    "SharpInference, README.md",
    f"{REPOSITORY}/blob/cb72245693f1a26a609e6ab34d8c79b022408939/README.md",
)
SIZING = (
    "SharpInference, MoeCacheSizing.cs",
    f"{REPOSITORY}/blob/7b70c76ef27b172acb7b82f6c5faa12409e40249/src/SharpInference.Pipeline/MoeCacheSizing.cs",
)
GPU = ("RTX 4070 Ti",)
CASES = f"{TOKENS} tokens, formats × shapes"
ONE_PRODUCT = "one product in a CUDA graph, not a whole decode"
ALL = (1.0, 1.0)
RULED = "2026-11-25"
CLAIMS = (
    Claim(
        "bits", *ISSUE, "A batched layer gives exactly the bits of the layer run token by token",
        "RTX 4070 Ti, GGUF formats",
        "bit-identical",
        ruled=RULED, quantity="share of the cases in which a token has the same bits alone and in its batch",
        observe=same_alone, direction=WITHIN, band=ALL, percent=True, gpus=GPU,
        differs="kernels in Triton, each held against itself with one token",
    ),
    Claim(
        "packed-bits", *README, "Q8_0 with its fields in arrays of their own has the same bits", "the same",
        "bit-identical",
        ruled=RULED, quantity="share of the shapes in which Q8_0 has the same bits both ways", observe=same_as_stored,
        direction=WITHIN, band=ALL, percent=True, gpus=GPU, differs="one product of one token, not a whole prefill",
    ),
    Claim(
        "operations", *ISSUE,
        "Grouped by expert with one copy per row, a layer has fewer operations than token by token",
        "MoE prefill of 1000 tokens, 256 experts, RTX 4070 Ti", "about 53 k → 18 k operations per layer", ruled=RULED,
        untested="the loop of the lab has other operations than the source's: gate, up and SiLU in one, and no add",
    ),
    Claim(
        "launches", *DECODE, "One launch for all tokens is faster than a loop, even if weights are read once per token",
        f"Qwen3-8B Q4_K_M, RTX 4070 Ti, N = {TOKENS}, a whole decode",
        "75 → 106 tokens per second, about 1.4× faster",
        ruled=RULED, quantity=f"time of a loop ÷ time of one launch, {CASES}", observe=one_launch, gpus=GPU,
        differs=ONE_PRODUCT, faster=True,
    ),
    Claim(
        "reuse", *REUSE, "Reading each weight once for all tokens is faster than a loop",
        f"RTX 4070 Ti, N = {TOKENS}; the file describes the kernels, the text with the number was not found",
        "2.42× faster, a number not in this file",
        ruled=RULED, quantity=f"time of a loop ÷ time of one launch that reads each weight once, {CASES}",
        observe=read_once, gpus=GPU, differs=ONE_PRODUCT, faster=True,
    ),
    Claim(
        "reuse-mechanism", *REUSE, "Batching is faster because each weight is read once for all tokens",
        f"RTX 4070 Ti, N = {TOKENS}", "no number given",
        ruled=RULED, quantity=f"time with weights read {TOKENS} times ÷ time with weights read once",
        observe=fewer_reads, gpus=GPU, differs=ONE_PRODUCT, faster=True,
        refutes=f"no gain over one launch that reads the weights for each token, in formats ({', '.join(UNPACKED)}) "
        "where nothing but reading is saved",
    ),
    Claim(
        "packed", *README, "Q8_0 with its fields in arrays of their own is faster",
        "Gemma 4 E4B Q8, RTX 4070 Ti, a whole prefill", "10–12 % faster",
        ruled=RULED, quantity="time of Q8_0 as stored ÷ time with its fields apart, 1 token", observe=fields_apart,
        gpus=GPU, differs="one product of one token, not a whole prefill", faster=True,
    ),
    Claim(
        "fused-sum", *README, "The weighted sum of the experts in one kernel makes a prefill faster",
        "Qwen3.6-35B-A3B, experts on an RTX 4070 Ti, a whole prefill", "45.3 → 54.3 tokens per second", ruled=RULED,
        untested="every variant of the lab has the weighted sum in one kernel",
    ),
    Claim(
        "copies", *ISSUE, "One copy per row is still too many operations", "MoE prefill, RTX 4070 Ti",
        "18 k operations per layer at 1000 tokens",
        ruled=RULED, quantity="time with one copy per row ÷ time with rows found inside the kernel",
        observe=rows_in_place, gpus=GPU, differs="the experts alone, not a whole prefill", faster=True,
    ),
    Claim(
        "slots", *SIZING, "A cache of about twice top_k experts per layer covers nearby tokens well",
        "GPU-SLRU cache; routing that stays with its experts (arXiv 2505.16056)", "recommended, no number given",
        ruled=RULED, quantity=f"hit rate with {SLOTS} × top_k slots per layer, one token at a time", observe=slots,
        neutral=MOST_HIT, percent=True, differs="synthetic traces, since no routing of a real model is recorded",
        note="well: at least half; of traces in which the best possible policy with as many slots hits as often; this "
        "is arithmetic, of a fixed policy on fixed traces: it is the same on every GPU",
    ),
)  # fmt: skip
