"""The published numbers that the study tests, and the functions that judge them from one GPU's rows."""

import pandas as pd

from labkit.bench.spec import Claim, Judgement
from labkit.shapes import QWEN3_NEXT
from labkit.state_layout import tables
from labkit.state_layout.share import BF16_BYTES, NVFP4_BYTES

NARROW, WIDE = 8, 32  # the tile of the pull request's example, and the one that engines ship
CONTEXT = 2048  # tokens of KV cache a sequence: no source states its own
SLACK = 1.5  # percentage points within which an end-to-end figure counts as explained: engines repeat to about 1 %
LOWEST = 7.0  # percent: the lower of the two figures of SGLang 20283
WEIGHTS = {"bf16": BF16_BYTES, "NVFP4": NVFP4_BYTES}
VLLM_TABLE = {1: 0.9, 16: -1.2, 64: -1.0, 256: 1.4, 1024: 4.8}  # batch: percent of tokens a second


def _untestable(why: str) -> Judgement:
    return Judgement("not testable here", "–", why)


def judge_mechanism(rows: pd.DataFrame) -> Judgement:
    """Do narrow K-first tiles touch more lines, and is that what makes them slower?"""
    table = tables.ratios(rows)
    table = table[(table["warps"] == 1) & (table["state"] == "fp32")]
    narrow, wide = (table[table["BV"] == tile] for tile in (NARROW, WIDE))
    access = tables.state_access(rows)
    access = access[(access["state"] == "fp32") & (access["BV"] == NARROW) & (access["warps"] == 1)]
    lines = access[~access["folded"].astype(bool)].groupby("layout")["lines"].max()
    if narrow.empty or wide.empty or set(lines.index) != set(tables.LAYOUTS):
        return _untestable("needs fp32 rows of both layouts at tiles 8 and 32, and what a request costs there")
    largest = int(narrow["batch"].max())
    narrow_gain, wide_gain = (t.loc[t["batch"] == largest, "ratio"].median() for t in (narrow, wide))
    faster = (narrow["verdict"] == "faster").sum()
    measured = f"{lines['KV']:.0f} → {lines['VK']:.0f} lines a request; KV/VK {narrow_gain:.2f} at BV=8"
    why = (
        f"at BV={NARROW} VK is faster in {faster} of {len(narrow)} fp32 cases; "
        f"at BV={WIDE}, where a K row already fills a line, KV/VK is {wide_gain:.2f} (batch {largest})"
    )
    shown = lines["KV"] > lines["VK"] and faster > len(narrow) / 2
    return Judgement("reproduced" if shown else "not reproduced", measured, why)


def judge_sglang_end_to_end(rows: pd.DataFrame) -> Judgement:
    """Could the kernel's ratio, at its share of a decode step, give 7 to 8 %?"""
    found = {
        (tile, name): tables.end_to_end_estimate(rows, tile, context=CONTEXT, weight_bytes=size)
        for tile in (NARROW, WIDE)
        for name, size in WEIGHTS.items()
    }
    if any(table.empty for table in found.values()):
        return _untestable(f"needs fp32 rows of {QWEN3_NEXT.name}")
    most = {key: table["gain %"].max() for key, table in found.items()}
    measured = "at most " + "; ".join(
        f"BV={tile}: " + ", ".join(f"{most[tile, name]:+.1f} % ({name} weights)" for name in WEIGHTS)
        for tile in (NARROW, WIDE)
    )
    reached = [
        f"BV={tile} and {name} weights from batch {table.loc[table['high %'] >= LOWEST, 'batch'].min():.0f} on"
        for (tile, name), table in found.items()
        if (table["high %"] >= LOWEST).any()
    ]
    if reached:
        why = (
            f"the kernel alone reaches {LOWEST:.0f} % only with {' or '.join(reached)}; the source states none of these"
        )
        return Judgement("consistent", measured, why)
    return Judgement("not reproduced", measured, "the state's share of a decode step is too small for it at any batch")


def vllm_estimate(rows: pd.DataFrame, tile: int) -> pd.DataFrame:
    """Estimated gain at vLLM's batches, weights in NVFP4 as there."""
    batches = list(VLLM_TABLE)
    return tables.end_to_end_estimate(rows, tile, context=CONTEXT, weight_bytes=NVFP4_BYTES, batches=batches)


def judge_vllm_table(rows: pd.DataFrame) -> Judgement:
    """Does the estimate follow vLLM's five batches?"""
    estimates = {tile: vllm_estimate(rows, tile) for tile in (NARROW, WIDE)}
    batches = list(estimates[NARROW]["batch"])
    if not batches or list(estimates[WIDE]["batch"]) != batches:
        return _untestable(f"needs fp32 rows of {QWEN3_NEXT.name}")
    gains = {tile: table.set_index("batch")["gain %"] for tile, table in estimates.items()}
    near = {t: [b for b in batches if abs(g[b] - VLLM_TABLE[b]) <= SLACK] for t, g in gains.items()}
    closest = max(near, key=lambda tile: len(near[tile]))
    measured = "; ".join(
        f"BV={tile}: " + ", ".join(f"{g[b]:+.1f}" for b in batches) + " %" for tile, g in gains.items()
    )
    taken = {int(b): int(m) for b, m in zip(batches, estimates[NARROW]["ratio of batch"], strict=True) if b != m}
    other = NARROW if closest == WIDE else WIDE
    why = f"tiles of BV={closest} follow it within {SLACK} points at {len(near[closest])} of {len(batches)} batches"
    why += f", tiles of BV={other} at {len(near[other])}"
    why += "".join(f"; batch {b} uses the ratio of batch {m}" for b, m in taken.items())
    return Judgement("consistent" if len(near[closest]) == len(batches) else "not reproduced", measured, why)


CLAIMS = (
    Claim(
        "sglang-20283-mechanism",
        "SGLang pull request 20283",
        "https://github.com/sgl-project/sglang/pull/20283",
        "A decode tile of [8, 256] instead of [256, 8] makes each row's contiguous run 256 elements instead of 8",
        "GPU and shapes not stated; the example has K = 256, which none of the served models has",
        "run 8 → 256 elements",
        judge_mechanism,
    ),
    Claim(
        "sglang-20283-end-to-end",
        "SGLang pull request 20283",
        "https://github.com/sgl-project/sglang/pull/20283",
        "State layout [V, K] shortens end-to-end latency by 8 % and time to first token by 7 %",
        "GPU, model, batch and bench command not stated; judged here for decode alone",
        "+7 % to +8 %",
        judge_sglang_end_to_end,
    ),
    Claim(
        "vllm-33291-table",
        "vLLM pull request 33291",
        "https://github.com/vllm-project/vllm/pull/33291",
        "The same change in vLLM, tokens a second at batch " + ", ".join(map(str, VLLM_TABLE)),
        "Qwen3-Next-80B-A3B NVFP4 on two GPUs; GPU not stated",
        ", ".join(f"{gain:+.1f}" for gain in VLLM_TABLE.values()) + " %",
        judge_vllm_table,
    ),
)
