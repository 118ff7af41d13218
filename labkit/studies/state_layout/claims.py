"""The published claims of the study, with the rules by which `bench/claim.py` judges them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from labkit.bench.claim import ABOVE, BELOW, ESTIMATE, OURS, OWN, WITHIN, Claim, Observation, Observed, of_table
from labkit.shapes import QWEN3_NEXT
from labkit.studies.state_layout.share import BF16_BYTES, NVFP4_BYTES
from labkit.studies.state_layout.variants import OURS as OURS_VK
from labkit.studies.state_layout.variants import OURS_KV, variant_name
from labkit.studies.state_layout.variants import OWN as OWN_LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from labkit.bench.spec import Case

NARROW, WIDE = 8, 32  # the tile of the pull request's example, and the one that SGLang ships all along
CONTEXT = 2048  # tokens of KV cache a sequence: no source states its own, so 256 to 8192 are tried too
CONTEXTS = (256, CONTEXT, 8192)
FULL = 64  # sequences: the smallest batch at which every shape fills the GPU
WEIGHTS = {"bf16": BF16_BYTES, "NVFP4": NVFP4_BYTES}
REPEATS = 0.01  # of an engine's time from run to run; no source states its own
E2E_MS, TTFT_MS = (23203, 21247), (14993, 13842)  # SGLang 20283, before and after
VLLM_HEADS = "Qwen3.5-0.8B"  # has as many value heads as each of two GPUs that share Qwen3-Next
VLLM_TABLE = {1: 0.9, 16: -1.2, 64: -1.0, 256: 1.4, 1024: 4.8}  # batch: percent of tokens a second
ROUNDING = 0.05  # percent, of that table
TTFT_PERCENT = 100 * (1 - TTFT_MS[1] / TTFT_MS[0])  # how much earlier the first token came


def _between(before: float, after: float, error: float) -> tuple[float, float]:
    """The least and the largest ratio of two times that may each be off by `error`."""
    return (before - error) / (after + error), (before + error) / (after - error)


# What decode must gain: all but the first token.
DECODE_GAIN = (E2E_MS[0] - TTFT_MS[0]) / (E2E_MS[1] - TTFT_MS[1])
DECODE_SIZE = _between(E2E_MS[0] - TTFT_MS[0], E2E_MS[1] - TTFT_MS[1], REPEATS * (E2E_MS[0] - TTFT_MS[0]))
FIRST_TOKEN_SIZE = _between(*TTFT_MS, REPEATS * TTFT_MS[0])


def _own(rows: pd.DataFrame, op: str, source: str = "SGLang", **wanted: Any) -> pd.DataFrame:
    """The source's own kernels before and after the change, in the cases where both ran."""
    from labkit.studies.state_layout import tables

    return tables.where(tables.released(rows, source), op=op, **wanted)


def _simple(rows: pd.DataFrame, tile: int) -> pd.DataFrame:
    """Both layouts of the lab's simple kernel at a tile, fp32, one warp."""
    from labkit.studies.state_layout import tables

    return tables.where(tables.ratios(rows), warps=1, state="fp32", BV=tile)


def _case(line: Mapping[str, Any]) -> str:
    """Which case a line of a table is of: "GDN, batch 64"."""
    known = [line.get(name) for name in ("model", "gate")]
    return ", ".join([one for one in known if isinstance(one, str)] + [f"batch {line['batch']}"])


def _layouts(own: pd.DataFrame, ours: pd.DataFrame, tile: int) -> Observed:
    """Where the GPU is full, by the source's own kernels if they were measured, else by the lab's."""
    code, table = (OWN, own) if len(own) else (OURS, ours)
    table = table[table["batch"] >= FULL] if len(table) else table
    needs = f"fp32 rows of both layouts at tile {tile}, batch {FULL} or more,"
    return Observed(code, of_table(table, _case), needs)


def narrow_tile(rows: pd.DataFrame) -> Observed:
    """Time of [K, V] over that of [V, K] with the narrow tile, which SGLang has in its verify kernel alone."""
    return _layouts(_own(rows, "verify", state="fp32"), _simple(rows, NARROW), NARROW)


def equal_lines(rows: pd.DataFrame) -> Observed:
    """The same with the wide tile, of which a request touches as many lines of 128 bytes in both layouts."""
    return _layouts(_own(rows, "step", state="fp32"), _simple(rows, WIDE), WIDE)


def decode(rows: pd.DataFrame) -> Observed:
    """A decode step by its state's share, before over after, at vLLM's batches and with both sizes of weights."""
    tile = None if len(_own(rows, "step", gate="GDN", state="fp32")) else WIDE
    parts = {name: estimate(rows, tile, weight_bytes=size) for name, size in WEIGHTS.items()}
    found = [one for name, part in parts.items() for one in _of_estimate(part, f"{name} weights, ")]
    return Observed(ESTIMATE, found, WANTED)


WANTED = f"fp32 rows of {QWEN3_NEXT.name} from batch 1 to {FULL} or more"


def estimate(rows: pd.DataFrame, tile: int | None, context: int = CONTEXT, **options: Any) -> pd.DataFrame:
    """`tables.end_to_end_estimate` at vLLM's batches; empty if the GPU was never full."""
    from labkit.studies.state_layout import tables

    found = tables.end_to_end_estimate(rows, tile, batches=list(VLLM_TABLE), context=context, **options)
    whole = len(found) == len(VLLM_TABLE) and found["ratio of batch"].max() >= FULL
    return found if whole else found.iloc[:0]


def _of_estimate(table: pd.DataFrame, before: str = "") -> list[Observation]:
    """Gains of whole steps, in percent, as ratios. before: begins the name of each case."""
    return [
        Observation(
            f"{before}batch {line['batch']}",
            *(1 + line[name] / 100 for name in ("gain %", "low %", "high %")),
            line["noise"],
            line["runs"],
        )
        for line in table.to_dict("records")
    ]


def first_token(rows: pd.DataFrame) -> Observed:
    """Time to the first token, before over after, if the extends take the largest share that they can have."""
    from labkit.studies.state_layout import tables

    table = tables.first_token(rows, own=len(_own(rows, "extend", gate="GDN")) > 0)
    found = [
        Observation(
            line["prefill"],
            *(1 / (1 - line[name] / 100) for name in ("earlier %", "low %", "high %")),
            line["noise"] * line["share %"] / 100,
            line["runs"],
        )
        for line in table.to_dict("records")
    ]
    return Observed(ESTIMATE, found, "whole extends (GDN) in both layouts")


def vllm_heads(rows: pd.DataFrame) -> str:
    """The model with the heads of one of vLLM's two GPUs; where it was not measured, the one with all heads."""
    cases = map(json.loads, rows["case"].unique())
    measured = {case.get("model") for case in cases if case.get("state") == "fp32"}
    return VLLM_HEADS if VLLM_HEADS in measured else QWEN3_NEXT.name


def vllm_estimate(rows: pd.DataFrame, tile: int) -> pd.DataFrame:
    """Estimated gain at vLLM's batches, weights in NVFP4 as there; low and high % are over CONTEXTS too.

    The kernel's ratio is that of the heads of `vllm_heads`.
    """
    options = {"weight_bytes": NVFP4_BYTES, "heads_of": vllm_heads(rows)}
    parts = {context: estimate(rows, tile, context=context, **options) for context in CONTEXTS}
    found = parts[CONTEXT].copy()
    for name, pick in (("low %", min), ("high %", max)):
        found[name] = [pick(values) for values in zip(*(part[name] for part in parts.values()), strict=True)]
    return found


def vllm_table(rows: pd.DataFrame) -> Observed:
    """A decode step at each batch of vLLM's table, each with its own published figure."""
    found = []
    for one, gain in zip(_of_estimate(vllm_estimate(rows, WIDE)), VLLM_TABLE.values(), strict=False):
        size = tuple(1 + (gain + off) / 100 for off in (-ROUNDING, ROUNDING))
        found.append(replace(one, direction=ABOVE if gain > 0 else BELOW, size=size))
    return Observed(ESTIMATE, found, WANTED)


def pairs(x: Case) -> list[tuple[str, str]]:
    """Both layouts of the kernels that the claims look at, where they do: fp32, the GPU full; SGLang's, then ours."""
    if x.op == "decode" and x["state"] == "fp32" and x["batch"] >= FULL:
        return [(variant_name("VK", tile), variant_name("KV", tile)) for tile in (NARROW, WIDE)]
    full = x.params.get("state", "fp32") == "fp32" and x.params.get("batch", FULL) >= FULL
    both = [OWN_LAYOUTS["SGLang"][::-1], (OURS_VK, OURS_KV)]
    return both if x.op in ("step", "verify", "extend") and full else []


SGLANG = ("SGLang pull request 20283", "https://github.com/sgl-project/sglang/pull/20283")
VLLM = ("vLLM pull request 33291", "https://github.com/vllm-project/vllm/pull/33291")
RULED = "2026-11-26"
KERNEL = "time with [K, V] ÷ time with [V, K]"
CLAIMS = (
    Claim(
        "sglang-20283-tile", *SGLANG,
        "[V, K] makes the kernel faster: a tile of [8, 256] instead of [256, 8]",
        "GPU and shapes not stated; the example has K = 256, which none of the served models has", "no number given",
        ruled="2026-11-25", quantity=f"{KERNEL}, {NARROW} values per tile, fp32", observe=narrow_tile, faster=True,
        note=f"of SGLang's kernels only verify has this tile; decode has {WIDE} values before and after",
    ),
    Claim(
        "sglang-20283-mechanism", *SGLANG,
        "Longer contiguous runs alone make it faster: 256 elements instead of 8",
        "the same", "stated as the cause, no number",
        ruled="2026-11-25", direction=WITHIN, observe=equal_lines, faster=True,
        quantity=f"{KERNEL}, {WIDE} fp32 values per tile: as fast if runs alone mattered, since these save no cache "
        "line there",
        refutes=f"a difference at {WIDE} fp32 values per tile, where one memory request touches as many lines in both "
        "layouts",
        note="if it were the runs alone, the layout would not matter with this tile",
    ),
    Claim(
        "sglang-20283-end-to-end", *SGLANG, "State layout [V, K] shortens end-to-end latency by 8 %",
        "GPU, model, batch and bench command not stated; judged here for decode alone",
        f"total {E2E_MS[0]} → {E2E_MS[1]} ms; to the first token {TTFT_MS[0]} → {TTFT_MS[1]} ms; without it "
        f"{DECODE_GAIN:.2f}× faster",
        ruled=RULED, quantity="Qwen3-Next's decode step, time with [K, V] ÷ with [V, K]", observe=decode,
        size=DECODE_SIZE, faster=True,
        note=f"without the first token, decode is {DECODE_GAIN:.2f}× faster by its times",
    ),
    Claim(
        "vllm-33291-table", *VLLM,
        "The same change in vLLM, tokens per second at batch " + ", ".join(map(str, VLLM_TABLE)),
        "Qwen3-Next-80B-A3B NVFP4 on two GPUs; GPU not stated",
        ", ".join(f"{gain:+.1f}" for gain in VLLM_TABLE.values()) + " % tokens a second (+: faster)",
        ruled=RULED, quantity="time of a decode step with [K, V] ÷ with [V, K]", observe=vllm_table, sized=True,
        faster=True,
    ),
    Claim(
        "sglang-20283-first-token", *SGLANG, "State layout [V, K] shortens the time to the first token by 7 %",
        "GPU, model, lengths and bench command not stated",
        f"{TTFT_MS[0]} → {TTFT_MS[1]} ms, {TTFT_MS[0] / TTFT_MS[1]:.2f}× faster",
        ruled=RULED, quantity="time to the first token with [K, V] ÷ with [V, K], at most", observe=first_token,
        size=FIRST_TOKEN_SIZE, at_most=True, faster=True,
        note="attention and launches are left out of the prefill, so that it is an upper bound: it can only refute",
    ),
)  # fmt: skip
