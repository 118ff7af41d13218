"""The published claims of the study, with the rules by which `bench/claim.py` judges them.

Two of them give times of a whole step, of which this study times the layers that changed: they are judged by an
estimate in which everything else goes as fast as memory and matrix products can.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from labkit.bench.claim import ESTIMATE, OURS, OWN, WITHIN, Claim, Observation, Observed, of_table
from labkit.studies.gated_delta_today import variants

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from labkit.bench.spec import Case

FULL = 64  # sequences: the smallest batch at which every multiprocessor has work
CONTEXT = 2048  # tokens of KV cache a sequence: no source states its own, so 256 to 8192 are tried too
CONTEXTS = (256, CONTEXT, 8192)
ROUNDING = 0.005  # of the published ratios
STEP_TABLE = {8: 1.03, 32: 1.08, 64: 1.14, 128: 1.21, 256: 1.27, 512: 1.30}  # batch: whole step, fp32 states, H100
VERIFY_TABLE = {  # (batch, T): drafts on the ring over drafts with stored states, whole server
    (128, 4): 1.43, (256, 4): 1.79, (512, 4): 2.10, (128, 8): 1.84, (256, 8): 2.09,
}  # fmt: skip
FEW_HEADS = (2, 8)
PREFILL_TABLE = {"1 x 2048": (86, 61), "1 x 8192": (259, 114), "1 x 65536": (1954, 399)}  # µs of fla and FlashInfer
TRAFFIC = (32 / 17, 2.0)  # state read and written, over read and written once in 16 tokens; and if it were never
MATTERS = 1.02  # what a better L must gain for 16 not to be right


def _case(line: Mapping[str, Any]) -> str:
    """Which case a line of a table is of: "fp32, batch 64"."""
    words = [line.get(name) for name in ("kernel", "gate", "state", "whose") if isinstance(line.get(name), str)]
    return ", ".join([*words, f"batch {line['batch']}"])


def traffic(rows: pd.DataFrame) -> Observed:
    """SGLang's decode that writes an fp32 state over its decode on a ring, where the GPU is full."""
    from labkit.studies.gated_delta_today import tables

    table = tables.compared(rows, "ring", variants.SGLANG_RING, variants.SGLANG_PLAIN, gate="GDN", state="fp32")
    needs = f"SGLang's decode both ways, fp32, batch {FULL} or more,"
    return Observed(OWN, of_table(tables.full(table, FULL), _case), needs)


def faster(rows: pd.DataFrame) -> Observed:
    """The same of both dtypes of the state."""
    from labkit.studies.gated_delta_today import tables

    table = tables.compared(rows, "ring", variants.SGLANG_RING, variants.SGLANG_PLAIN, gate="GDN")
    return Observed(OWN, of_table(tables.full(table, FULL), _case), f"SGLang's decode both ways, batch {FULL} or more,")


def _estimates(rows: pd.DataFrame, op: str, variant: str, against: str) -> list[dict[str, Any]]:
    """Whole steps; low and high are over CONTEXTS too."""
    from labkit.studies.gated_delta_today import tables

    parts = {n: tables.whole_steps(rows, op, variant, against, n).to_dict("records") for n in CONTEXTS}
    return [
        line | {"low": min(one["low"] for one in others), "high": max(one["high"] for one in others)}
        for line, *others in zip(parts[CONTEXT], *parts.values(), strict=True)
    ]


def _observation(case: str, line: Mapping[str, Any], published: float) -> Observation:
    found = Observation(case, *(line[name] for name in ("ratio", "low", "high", "noise", "runs")))
    return replace(found, size=(published - ROUNDING, published + ROUNDING))


def whole_step(rows: pd.DataFrame) -> Observed:
    """A whole step of Qwen3.5-4B by SGLang's port, writing over ring, at the batches of vLLM's table."""
    lines = _estimates(rows, "ring", variants.SGLANG_RING, variants.SGLANG_PLAIN)
    found = [
        _observation(f"batch {line['batch']}", line, STEP_TABLE[line["batch"]])
        for line in lines
        if line["batch"] in STEP_TABLE
    ]
    return Observed(ESTIMATE, found, "SGLang's decode both ways and a read of the states, fp32,")


def whole_verify(rows: pd.DataFrame) -> Observed:
    """A whole verify of Qwen3.5-4B by SGLang's port, stored over ring, at the points of vLLM's table."""
    lines = _estimates(rows, "ring_verify", variants.SGLANG_RING, variants.SGLANG_STORED)
    found = [
        _observation(f"batch {line['batch']}, T = {line['T']}", line, VERIFY_TABLE[line["batch"], line["T"]])
        for line in lines
        if line["draft"] == "chain" and (line["batch"], line["T"]) in VERIFY_TABLE
    ]
    return Observed(ESTIMATE, found, "SGLang's verify both ways and a read of the states, fp32,")


def right_length(rows: pd.DataFrame) -> Observed:
    """L = 16 over the fastest L, of SGLang's kernel; where 16 is the fastest itself, they are the same."""
    from labkit.bench.tables import processes
    from labkit.studies.gated_delta_today import tables

    table = tables.best_lengths(rows)
    own = table[table["whose"] == variants.SGLANG] if len(table) else table
    found = []
    for line in own.to_dict("records"):
        case = f"{line['gate']}, {line['state']}, L = {line['fastest L']}"
        if line["fastest L"] == variants.LENGTH:
            found.append(Observation(case, 1.0, 1.0, 1.0, 0.0, processes(rows, "length")))
        else:
            found.append(Observation(case, *(line[name] for name in ("ratio", "low", "high", "noise", "runs"))))
    return Observed(OWN, found, "SGLang's decode with every L")


def layout_unwritten(rows: pd.DataFrame) -> Observed:
    """[K, V] over [V, K] in a decode on a ring of which no token writes a state, each with its fastest launch."""
    from labkit.studies.gated_delta_today import tables

    table = tables.layouts(rows)
    some = table[(table["kernel"] == "ring") & (table["writes"] == "never")]
    return Observed(OURS, of_table(some, _case), "the ring in both layouts")


def _libraries(rows: pd.DataFrame) -> pd.DataFrame:
    """fla over FlashInfer, every prompt."""
    from labkit.studies.gated_delta_today import tables

    table = tables.prefills(rows)
    return table[(table["variant"] == variants.FLASHINFER) & (table["against"] == variants.FLA)]


def few_heads(rows: pd.DataFrame) -> Observed:
    """fla over FlashInfer at the heads and prompts of its table."""
    found = []
    for line in _libraries(rows).to_dict("records"):
        if (line["H"], line["HV"]) == FEW_HEADS and line["prefill"] in PREFILL_TABLE:
            fla, own = PREFILL_TABLE[line["prefill"]]
            one = Observation(line["prefill"], *(line[name] for name in ("ratio", "low", "high", "noise", "runs")))
            found.append(replace(one, size=((fla - 0.5) / (own + 0.5), (fla + 0.5) / (own - 0.5))))
    return Observed(OWN, found, "fla and FlashInfer at 2 / 8 heads")


def more_heads(rows: pd.DataFrame) -> Observed:
    """The same at more heads, one long prompt."""
    found = [
        Observation(f"{line['H']} / {line['HV']}, {line['prefill']}", line["ratio"], line["low"], line["high"],
                    line["noise"], line["runs"])
        for line in _libraries(rows).to_dict("records")
        if (line["H"], line["HV"]) != FEW_HEADS and line["prefill"] in PREFILL_TABLE
    ]  # fmt: skip
    return Observed(OWN, found, "fla and FlashInfer at more heads")


def pairs(x: Case) -> list[tuple[str, str]]:
    """Those of the lab's kernels that the page compares; what others launch is not known to the model."""
    if x.op == "ring" and x["batch"] >= FULL:
        return [(variants.OURS, variants.PLAIN)]
    if x.op == "ring_verify":
        return [(variants.OURS, variants.OURS_STORED)]
    return [(variants.FUSED, variants.ONE_SEGMENT)] if x.op == "prefill" else []


SGLANG = ("SGLang pull request 28451", "https://github.com/sgl-project/sglang/pull/28451")
VLLM = ("vLLM pull request 48792", "https://github.com/vllm-project/vllm/pull/48792")
VLLM_VERIFY = ("vLLM pull request 49887", "https://github.com/vllm-project/vllm/pull/49887")
LAYOUT = ("SGLang pull request 20283", "https://github.com/sgl-project/sglang/pull/20283")
FLASHINFER = ("FlashInfer pull request 3866", "https://github.com/flashinfer-ai/flashinfer/pull/3866")
PORT = "SGLang's port of it: vLLM's own is in no released wheel"
KERNEL = f"time when every token writes the state ÷ time with a ring, SGLang's kernels, batch {FULL} and more"
NONE_GIVEN = "no number given"


def _steps() -> str:
    """The published whole steps: "times faster: 1.03 at batch 8, 1.08 at 32, …"."""
    parts = [f"{ratio:.2f} at {batch}" for batch, ratio in STEP_TABLE.items()]
    return f"times faster: {', '.join(parts).replace('at', 'at batch', 1)}"


def _verifies() -> str:
    """The published verifies: "times faster: 1.43 at batch 128, … (4 drafts); 1.84 at batch 128, … (8 drafts)"."""
    found = []
    for drafts in dict.fromkeys(T for _, T in VERIFY_TABLE):
        parts = [f"{ratio:.2f} at {n}" for (n, T), ratio in VERIFY_TABLE.items() if drafts == T]
        found.append(f"{', '.join(parts).replace('at', 'at batch', 1)} ({drafts} drafts)")
    return f"times faster: {'; '.join(found)}"


def _prompts() -> str:
    """The published prefills: "86 → 61 µs (2048 tokens), …"."""
    parts = {name.removeprefix("1 x "): times for name, times in PREFILL_TABLE.items()}
    said = [f"{fla} → {own} µs ({tokens} tokens)" for tokens, (fla, own) in parts.items()]
    return ", ".join(said)


CLAIMS = (
    Claim(
        "sglang-28451-faster", *SGLANG, "Memory-bound decode is faster if it writes its state once in 16 tokens",
        f"memory-bound, batch {FULL} and more; an H20 is named", "no number for the kernel",
        ruled="2026-11-26", quantity=KERNEL, observe=faster, faster=True,
    ),
    Claim(
        "sglang-28451-traffic", *SGLANG, "Writing the state once in 16 tokens roughly halves its traffic",
        f"fp32 states, batch {FULL} and more; an H20 is named", "8 d n → 4 d n bytes per token",
        ruled="2026-11-26", quantity=KERNEL, observe=traffic, size=TRAFFIC, faster=True,
        note="judged by time: what traffic gives if nothing else costs; the ring's own bytes come on top",
    ),
    Claim(
        "flashinfer-3866", *FLASHINFER,
        "FlashInfer's prefill of one long prompt is faster than fla's (flash-linear-attention)",
        "H100; 2 key and 8 value heads; one prompt of 2048, 8192 and 65536 tokens", _prompts(),
        ruled="2026-11-26", quantity="time of fla ÷ time of FlashInfer, 2 key and 8 value heads", observe=few_heads,
        gpus=("H100",), faster=True,
    ),
    Claim(
        "length-16", *SGLANG, "L = 16 is the right length", "the default of both engines", f"L = 16, {NONE_GIVEN}",
        ruled="2026-11-26",
        quantity=f"time with L = {variants.LENGTH} ÷ time with the fastest L, SGLang's kernels",
        direction=WITHIN, band=(1 / MATTERS, MATTERS), observe=right_length,
        note="at batch 256; each L with its fastest launch",
    ),
    Claim(
        "vllm-48792-step", *VLLM, f"A whole decode step is faster with a ring, at batch {min(STEP_TABLE)} and more",
        "Qwen3.5-4B in bf16 on one H100, fp32 states, L = 16, CUDA graphs", _steps(),
        ruled="2026-11-26", quantity="time of a whole step when every token writes the state ÷ time with a ring",
        observe=whole_step, gpus=("H100",), differs=PORT, faster=True,
        note="all else at the memory's rate, so that it is the most that the kernel can give",
    ),
    Claim(
        "layout-unwritten", *LAYOUT, "[V, K] is faster than [K, V]: here where the state is only read",
        "stated of kernels that write the state", NONE_GIVEN,
        ruled="2026-11-26", quantity="time with [K, V] ÷ time with [V, K], the state only read",
        observe=layout_unwritten, differs="a decode that does not write the state", faster=True,
        note="if only stores made the layout matter, there would be no difference",
    ),
    Claim(
        "vllm-49887-verify", *VLLM_VERIFY,
        "Speculative decoding is faster with drafts in the ring than with a stored state per draft",
        "a whole server; its table names no GPU, model or type of the state", _verifies(),
        ruled="2026-11-26",
        quantity="time of a whole verify with a stored state per draft ÷ time with drafts in the ring, Qwen3.5-4B",
        observe=whole_verify, differs=PORT, faster=True,
        note="all else at the memory's rate or the peak of products; the draft model is left out",
    ),
    Claim(
        "flashinfer-3866-heads", *FLASHINFER, "FlashInfer's prefill of one long prompt is faster with more heads too",
        "published for 2 key and 8 value heads", NONE_GIVEN,
        ruled="2026-11-26", quantity="time of fla ÷ time of FlashInfer, 4 and 12, 16 and 32 heads", observe=more_heads,
        differs="more heads than published", faster=True,
    ),
)  # fmt: skip
