"""The published numbers that the study tests, and the functions that judge them from one GPU's rows."""

import json
from typing import TYPE_CHECKING, Any

from labkit.bench.spec import Claim, Judgement, untestable
from labkit.shapes import QWEN3_NEXT
from labkit.studies.state_layout.share import BF16_BYTES, NVFP4_BYTES
from labkit.studies.state_layout.variants import LAYOUTS

if TYPE_CHECKING:
    import pandas as pd

NARROW, MIDDLE, WIDE = 8, 16, 32  # the tile of the pull request's example, and the one that SGLang ships all along
CONTEXT = 2048  # tokens of KV cache a sequence: no source states its own, so 256 to 8192 are tried too
CONTEXTS = (256, CONTEXT, 8192)
MOST_OF_IT = 2 / 3  # of the narrow tile's gain, where fewer lines would let one expect half of it
SLACK = 1.5  # percentage points within which an end-to-end figure counts as explained: engines repeat to about 1 %
PROCESSES = 3  # a headline rests on at least so many
FULL = 64  # sequences: the smallest batch at which every shape fills the GPU
WEIGHTS = {"bf16": BF16_BYTES, "NVFP4": NVFP4_BYTES}
E2E_MS, TTFT_MS = (23203, 21247), (14993, 13842)  # SGLang 20283, before and after
DECODE_GAIN = 100 * ((E2E_MS[0] - TTFT_MS[0]) / (E2E_MS[1] - TTFT_MS[1]) - 1)  # what decode must gain, percent
TTFT_PERCENT = 100 * (1 - TTFT_MS[1] / TTFT_MS[0])  # how much earlier the first token came
VLLM_HEADS = "Qwen3.5-0.8B"  # has as many value heads as each of two GPUs that share Qwen3-Next
VLLM_TABLE = {1: 0.9, 16: -1.2, 64: -1.0, 256: 1.4, 1024: 4.8}  # batch: percent of tokens a second
WANTED = f"needs fp32 rows of {QWEN3_NEXT.name} from batch 1 to {FULL} or more"


OWN = "SGLang's own kernels"


def _own(rows: "pd.DataFrame", op: str) -> "pd.DataFrame":
    """SGLang's own kernels before and after the change, GDN and KDA, in enough processes for a headline."""
    from labkit.studies.state_layout import tables

    table = tables.where(tables.released(rows), op=op)
    return table[table["runs"] >= PROCESSES]


def judge_mechanism(rows: "pd.DataFrame") -> Judgement:
    """Are narrow K-first tiles slower, do they touch more lines, and does the ratio vanish where lines are equal?"""
    from labkit.studies.state_layout import tables

    table = tables.where(tables.ratios(rows), warps=1, state="fp32")
    table = table[(table["batch"] >= FULL) & (table["runs"] >= PROCESSES)]
    narrow, middle, wide = (table[table["BV"] == tile] for tile in (NARROW, MIDDLE, WIDE))
    lines = {tile: lines_a_request(rows, tile) for tile in (NARROW, MIDDLE, WIDE)}
    if narrow.empty or wide.empty or any(set(found) != set(LAYOUTS) for found in lines.values()):
        what = f"both layouts at tiles {NARROW} and {WIDE}, batch {FULL} or more, {PROCESSES} processes, evidence"
        return untestable(f"needs fp32 rows of {what}")
    measured = "; ".join(
        f"BV={tile}: {found['KV']:.0f} → {found['VK']:.0f} lines a request, time ratio {part['ratio'].median():.2f}"
        for (tile, found), part in zip(lines.items(), (narrow, middle, wide), strict=True)
        if len(part)
    )
    gain, left = narrow["ratio"].median() - 1, abs(wide["ratio"].median() - 1)
    count = (narrow["verdict"] == "faster").sum()
    faster = count > len(narrow) / 2 and not narrow["verdict"].isin(["same", "slower"]).any()
    own = _own(rows, "verify")  # whose tile is the narrow one
    own = own[own["batch"] >= FULL]
    if len(own):
        measured += f"; {OWN} of verify, BV={NARROW}: time ratio {own['ratio'].min():.2f} to {own['ratio'].max():.2f}"
    if len(own) and not (own["verdict"] == "faster").all():
        return Judgement("not reproduced", measured, f"{OWN} with this tile are not faster throughout")
    if lines[NARROW]["KV"] <= lines[NARROW]["VK"] or not faster or left > gain / 2:
        return Judgement("not reproduced", measured, "the time does not follow the lines that a request touches")
    why = f"fewer lines go with less time in {count} of {len(narrow)} cases from batch {FULL} on"
    if wide["verdict"].isin(["faster", "slower"]).any():
        why += "; but with equal lines a difference remains, so the run is not the whole reason"
    if len(middle) and middle["ratio"].median() - 1 > MOST_OF_IT * gain:
        why += f"; nor does time follow their number: tiles of {MIDDLE}, with fewer lines, gain nearly as much"
    return Judgement("consistent", measured, why)


def lines_a_request(rows: "pd.DataFrame", tile: int) -> dict[str, float]:
    """Lines a request of the fp32 state's tile, one warp, K = 128, by layout."""
    from labkit.studies.state_layout import tables

    access = tables.where(tables.state_access(rows), state="fp32", BV=tile, warps=1, K=128, folded=False)
    return dict(zip(access["layout"], access["lines"], strict=True))


def judge_sglang_end_to_end(rows: "pd.DataFrame") -> Judgement:
    """Could the kernel's ratio, at its share of a decode step, give what decode must have gained?"""

    said = []
    owned = len(_own(rows, "step")) > 0
    for tile in (NARROW, WIDE, *([None] if owned else [])):
        parts = [_estimate(rows, tile, weight_bytes=size).assign(weights=name) for name, size in WEIGHTS.items()]
        if not all(map(_whole, parts)):
            return untestable(WANTED)
        most = max((line for part in parts for line in part.to_dict("records")), key=lambda line: line["gain %"])
        kernels = OWN if tile is None else f"BV={tile}"
        said.append("{}: up to {gain %:+.1f} % (batch {batch}, {weights} weights)".format(kernels, **most))
    measured = f"estimated for decode: {'; '.join(said)}"
    kernels = (
        "its own kernels, before and after, this" if owned else f"tiles of {WIDE}, which it ships, the kernel alone"
    )
    why = f"its times leave {DECODE_GAIN:+.1f} % for decode; with {kernels} "
    enough = most["high %"] >= DECODE_GAIN - SLACK  # with the source's own, or the wide tile, which come last
    why += "can give that" if enough else "cannot give that at any batch tried"
    return Judgement("consistent" if enough else "not reproduced", measured, why)


def _estimate(rows: "pd.DataFrame", tile: int, context: int = CONTEXT, **options: Any) -> "pd.DataFrame":
    """The estimate at vLLM's batches."""
    from labkit.studies.state_layout import tables

    return tables.end_to_end_estimate(rows, tile, batches=list(VLLM_TABLE), context=context, **options)


def _whole(estimate: "pd.DataFrame") -> bool:
    """Whether it has every batch, from ratios that go up to where the GPU is full."""
    return len(estimate) == len(VLLM_TABLE) and estimate["ratio of batch"].max() >= FULL


def judge_first_token(rows: "pd.DataFrame") -> Judgement:
    """Could the layout bring the first token so much earlier? By extends, at most their share of a prefill."""
    from labkit.studies.state_layout import tables

    owned = len(_own(rows, "extend")) > 0
    table = tables.first_token(rows, own=owned)
    if table.empty:
        return untestable("needs whole extends (GDN) in both layouts")
    ratio, most = table["ratio"], table.loc[table["earlier %"].idxmax()]
    kernels = OWN if owned else "this lab's kernels"
    measured = (
        f"whole extends by {kernels}, time KV / VK: {ratio.min():.3f} to {ratio.max():.3f}; first token estimated at "
        f"most {most['earlier %']:.1f} % earlier ({most['prefill']})"
    )
    enough = table["high %"].max() >= TTFT_PERCENT
    why = f"its times are {TTFT_PERCENT:.1f} % apart; with {kernels}, extends of {QWEN3_NEXT.name} "
    why += "may give that, if nothing else takes longer than it must" if enough else "do not give that by their layout"
    return Judgement("consistent" if enough else "not reproduced", measured, why)


def vllm_heads(rows: "pd.DataFrame") -> str:
    """The model with the heads of one of vLLM's two GPUs; where it was not measured, the one with all heads."""
    cases = map(json.loads, rows["case"].unique())
    measured = {case.get("model") for case in cases if case.get("state") == "fp32"}
    return VLLM_HEADS if VLLM_HEADS in measured else QWEN3_NEXT.name


def vllm_estimate(rows: "pd.DataFrame", tile: int) -> "pd.DataFrame":
    """Estimated gain at vLLM's batches, weights in NVFP4 as there; low and high % are over CONTEXTS.

    The kernel's ratio is that of the heads of `vllm_heads`.
    """
    options = {"weight_bytes": NVFP4_BYTES, "heads_of": vllm_heads(rows)}
    parts = {context: _estimate(rows, tile, context=context, **options) for context in CONTEXTS}
    found = parts[CONTEXT]
    for name, pick in (("low %", min), ("high %", max)):
        found[name] = [pick(values) for values in zip(*(part[name] for part in parts.values()), strict=True)]
    return found


def judge_vllm_table(rows: "pd.DataFrame") -> Judgement:
    """Does the estimate follow vLLM's five batches?"""
    estimates = {tile: vllm_estimate(rows, tile) for tile in (NARROW, WIDE)}
    if not all(map(_whole, estimates.values())):
        return untestable(WANTED)
    gains = "; ".join(
        f"BV={tile}: " + ", ".join(f"{gain:+.1f}" for gain in part["gain %"]) + " %" for tile, part in estimates.items()
    )
    measured = f"estimated, batch {', '.join(map(str, VLLM_TABLE))}: {gains}"
    wide = estimates[WIDE]
    near = wide["batch"].map(VLLM_TABLE).between(wide["low %"] - SLACK, wide["high %"] + SLACK)
    if off := list(wide["batch"][~near]):
        why = f"tiles of {WIDE} miss it by more than {SLACK} points at batch {', '.join(map(str, off))}"
    else:
        why = f"tiles of {WIDE} follow it within {SLACK} points; tiles of {NARROW} would show far more at large batches"
    return Judgement("not reproduced" if off else "consistent", measured, why + "; an estimate, with this lab's kernel")


SGLANG = ("SGLang pull request 20283", "https://github.com/sgl-project/sglang/pull/20283")
VLLM = ("vLLM pull request 33291", "https://github.com/vllm-project/vllm/pull/33291")
CLAIMS = (
    Claim(
        "sglang-20283-mechanism",
        *SGLANG,
        "Decode is faster because a tile of [8, 256] instead of [256, 8] has contiguous runs of 256 elements, not 8",
        "GPU and shapes not stated; the example has K = 256, which none of the served models has",
        "run of 8 → 256 elements",
        judge_mechanism,
    ),
    Claim(
        "sglang-20283-end-to-end",
        *SGLANG,
        "State layout [V, K] shortens end-to-end latency by 8 %",
        "GPU, model, batch and bench command not stated; judged here for decode alone, as an estimate",
        f"{E2E_MS[0]} → {E2E_MS[1]} ms",
        judge_sglang_end_to_end,
    ),
    Claim(
        "vllm-33291-table",
        *VLLM,
        "The same change in vLLM, tokens a second at batch " + ", ".join(map(str, VLLM_TABLE)),
        "Qwen3-Next-80B-A3B NVFP4 on two GPUs; GPU not stated",
        ", ".join(f"{gain:+.1f}" for gain in VLLM_TABLE.values()) + " %",
        judge_vllm_table,
    ),
    Claim(
        "sglang-20283-first-token",
        *SGLANG,
        "State layout [V, K] shortens the time to the first token by 7 %",
        "GPU, model, lengths and bench command not stated",
        f"{TTFT_MS[0]} → {TTFT_MS[1]} ms",
        judge_first_token,
    ),
)
