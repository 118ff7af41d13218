"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.bench.verdict import geometric_mean
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import faster
from labkit.studies.gated_delta_today import tables, variants
from labkit.studies.gated_delta_today.claims import FEW_HEADS
from labkit.studies.gated_delta_today.variants import STATES
from labkit.studies.gated_delta_today.views import INTERVAL

HEADLINE = ("sglang-28451-faster", "vllm-48792-step", "vllm-49887-verify", "flashinfer-3866")
BATCH = 256
DRAWN = (1, 64, 512)  # batches of the figure
PROMPT = "1 x 8192"
FLA, BOTH = "fla's", "the faster of both"  # what prefill is compared with, in words
WHOSE = {"SGLang": (variants.SGLANG_RING, variants.SGLANG_PLAIN), "this lab": (variants.OURS, variants.PLAIN)}

Facts = Mapping[str, Mapping[str, Any]]  # by GPU


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows; what was not measured is missing.

    ring STATE: how much faster SGLang's ring makes its decode at BATCH; prompt: how much faster FlashInfer is than fla
    with PROMPT and few heads; prefill: how much faster this lab's fused prefill is than the
    faster of both, in the mean of all prompts. from STATE: the batch from which on this lab's ring is faster
    than writing always; None: from none.
    """
    found: dict[str, Any] = {}
    steps = tables.compared(rows, "ring", *WHOSE["SGLang"], gate="GDN", batch=BATCH)
    for line in steps.to_dict("records"):
        found[f"ring {line['state']}"] = line["ratio"]
    prompts = where(tables.prefills(rows), variant=variants.FLASHINFER, prefill=PROMPT)
    for line in prompts.to_dict("records"):
        found |= {"prompt": line["ratio"]} if (line["H"], line["HV"]) == FEW_HEADS else {}
    best = tables.prefills(rows).dropna(subset=["beside"])
    found |= {"prefill": geometric_mean(best["ratio"])} if len(best) else {}
    starts = where(tables.crossover(rows), whose="ours")
    for line in starts.to_dict("records"):
        found[f"from {line['state']}"] = None if line["batch"] != line["batch"] else int(line["batch"])
    ledger.note("facts", {name: value for name, value in found.items() if value is not None})
    return found


def conclusion(facts: Facts) -> str:
    """What the ring and the segments are worth, on each GPU."""
    said = [_rings(facts), _prompts(facts), _fused(facts)]
    return f"{'; '.join(part for part in said if part)}." if any(said) else ""


def _rings(facts: Facts) -> str:
    parts = [f"{gains} ({gpu})" for gpu, one in facts.items() if (gains := _by_state(one))]
    head = f"Writing the state once in {variants.LENGTH} tokens makes SGLang's decode of {BATCH} sequences"
    return f"{head} {'; '.join(parts)}" if parts else ""


def _by_state(one: Mapping[str, Any]) -> str:
    """ "1.64× faster with fp32 states, 1.36× faster with bf16 states"."""
    known = {state: one[f"ring {state}"] for state in STATES if f"ring {state}" in one}
    return ", ".join(f"{faster(ratio)} with {state} states" for state, ratio in known.items())


def _prompts(facts: Facts) -> str:
    heads = " / ".join(map(str, FEW_HEADS))
    known = {gpu: one for gpu, one in facts.items() if "prompt" in one}
    theirs = [f"{faster(one['prompt'], FLA)} at {heads} heads ({gpu})" for gpu, one in known.items()]
    return f"FlashInfer's prefill of one prompt of 8192 tokens is {'; '.join(theirs)}" if theirs else ""


def _fused(facts: Facts) -> str:
    found = [f"{faster(one['prefill'], BOTH)} ({gpu})" for gpu, one in facts.items() if "prefill" in one]
    return f"in the mean of all prompts this lab's is {'; '.join(found)}" if found else ""


def advice(facts: Facts) -> str:
    """From which batch on a state should wait in a ring; whose prefill to take."""
    starts = {state: [one[f"from {state}"] for one in facts.values() if f"from {state}" in one] for state in STATES}
    worth = {state: max(found) for state, found in starts.items() if found and None not in found}
    never = [state for state, found in starts.items() if None in found]
    said = [f"{state} states from batch {batch} on" for state, batch in worth.items()]
    prefills = [one["prefill"] for one in facts.values() if "prefill" in one]
    if not said and not never and not prefills:
        return ""
    keep = f"write {' and '.join(never)} states at every token" if never else ""
    use = f"keep a ring of {variants.LENGTH} entries for {' and '.join(said)}" if said else ""
    whose = "this lab's fused" if prefills and min(prefills) > 1 else "FlashInfer's" if prefills else ""
    text = "; ".join(part for part in (use, keep, f"take {whose} prefill" if whose else "") if part)
    return f"{text[0].upper()}{text[1:]}."


def hero(rows: pd.DataFrame) -> Drawing:
    """What writing the state once in 16 tokens is worth, by batch, SGLang's kernels and ours."""
    parts = [tables.compared(rows, "ring", *pair, gate="GDN").assign(whose=whose) for whose, pair in WHOSE.items()]
    parts = [part for part in parts if len(part)]
    if not parts:
        return "no decode was timed both ways."
    table = where(pd.concat(parts, ignore_index=True), batch=DRAWN, state=STATES)
    if table.empty:
        return f"no decode was timed both ways at batch {', '.join(map(str, DRAWN))}."
    table = table.assign(row="batch " + table["batch"].astype(str), state=table["state"] + " state")
    return drawing(
        plots.ratios, table, "row", *INTERVAL, group="whose", panel="state", verdict="verdict",
        hidden=("row", "gate", "runs"), xlabel="× faster with the state written once in 16 tokens",
        title="What it is worth to write the state seldom",
        alt="Ratios of the time of a decode that writes its state at every token over one with a ring, by batch.",
        caption="GDN, heads of Qwen3.5-4B, mean over all places of a ring; 95 % intervals. Hollow: no clear gain.",
        units={"us": "ring µs", "against us": "written µs"},
    )  # fmt: skip


ledger.watch(__name__)
