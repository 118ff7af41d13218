"""The page's first screen: which claims, what they come to, what to do, and one figure."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.bench.verdict import geometric_mean
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import SAME, faster, note_sizes
from labkit.studies.gated_delta_today import tables, variants
from labkit.studies.gated_delta_today.claims import FEW_HEADS
from labkit.studies.gated_delta_today.variants import STATES

HEADLINE = ("sglang-28451-faster", "flashinfer-3866", "vllm-48792-step")
BATCH = 256
DRAWN = (1, 16, 64, BATCH)  # batches of the figure
PROMPT = "1 x 8192"
FLA, FASTER = "fla's", "the faster of the two"  # what prefill is compared with, in words
WHOSE = {"SGLang": (variants.SGLANG_RING, variants.SGLANG_PLAIN), "this lab": (variants.OURS, variants.PLAIN)}

Facts = Mapping[str, Mapping[str, Any]]  # by GPU


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """From what the sentences are made, of one GPU's rows; what was not measured is missing.

    ring STATE: how much faster SGLang's ring makes its decode at BATCH; prompt: how much faster FlashInfer is than fla
    with PROMPT and few heads; prefill: how much faster this lab's fused prefill is than the faster of both, in the mean
    of all prompts and heads, of which there are `prompts`, and in the worst. from STATE: the batch from which on this
    lab's ring is faster than writing always; None: from none. alone STATE: how much faster it is at batch 1.
    length: how much faster than with L = 16 the fastest L is, the most of all kernels, gates and states.
    """
    found: dict[str, Any] = {}
    steps = tables.compared(rows, "ring", *WHOSE["SGLang"], gate="GDN", batch=BATCH)
    for line in steps.to_dict("records"):
        found[f"ring {line['state']}"] = line["ratio"]
    prompts = where(tables.prefills(rows), variant=variants.FLASHINFER, prefill=PROMPT)
    for line in prompts.to_dict("records"):
        found |= {"prompt": line["ratio"]} if (line["H"], line["HV"]) == FEW_HEADS else {}
    best = tables.prefills(rows).dropna(subset=["beside"])
    if len(best):
        least = float(best["ratio"].min())
        found |= {"prefill": geometric_mean(best["ratio"]), "prompts": len(best), "worst prefill": least}
    starts = where(tables.crossover(rows), whose="ours")
    for line in starts.to_dict("records"):
        found[f"from {line['state']}"] = None if line["batch"] != line["batch"] else int(line["batch"])
    alone = where(tables.compared(rows, "ring", *WHOSE["this lab"], gate="GDN", batch=1), state=STATES)
    for line in alone.to_dict("records"):
        found[f"alone {line['state']}"] = line["ratio"]
    gains = tables.best_lengths(rows)
    found |= {"length": float(gains["ratio"].fillna(1.0).max())} if len(gains) else {}
    note_sizes(value for value in found.values() if isinstance(value, float))
    ledger.note("facts", {name: value for name, value in found.items() if value is not None})
    return found


def conclusion(facts: Facts) -> str:
    """What the ring and the segments are worth, on each GPU: a sentence each. A single GPU is named once."""
    said = [part for part in (_rings(facts), _prompts(facts), _fused(facts)) if part]
    if len(facts) == 1 and said:
        said[0] = f"On the {next(iter(facts))}, {said[0][0].lower()}{said[0][1:]}"
    return " ".join(f"{part}." for part in said)


def _each(facts: Facts, told: Mapping[str, str]) -> str:
    """What is told of each GPU: "2.08× faster (H100); 1.98× faster (H200)"; without the name of the only one."""
    return "; ".join(f"{one} ({gpu})" if len(facts) > 1 else one for gpu, one in told.items())


def _rings(facts: Facts) -> str:
    told = {gpu: gains for gpu, one in facts.items() if (gains := _by_state(one))}
    head = f"Writing the state once in {variants.LENGTH} tokens makes SGLang's decode of {BATCH} sequences"
    return f"{head} {_each(facts, told)}" if told else ""


def _by_state(one: Mapping[str, Any]) -> str:
    """ "1.64× faster with fp32 states, 1.36× with bf16"; of two sides each is said."""
    told = {state: faster(one[f"ring {state}"]) for state in STATES if f"ring {state}" in one}
    same = len({said.partition(" ")[2] for said in told.values()}) == 1
    parts = [f"{said} with {state} states" for state, said in told.items()]
    if same:
        parts[1:] = [f"{told[state].partition(' ')[0]} with {state}" for state in list(told)[1:]]
    return ", ".join(parts)


def _prompts(facts: Facts) -> str:
    told = {gpu: faster(one["prompt"], FLA) for gpu, one in facts.items() if "prompt" in one}
    heads = "{} key and {} value heads".format(*FEW_HEADS)
    return f"With {heads}, FlashInfer's prefill of 8192 tokens is {_each(facts, told)}" if told else ""


def _fused(facts: Facts) -> str:
    known = {gpu: one for gpu, one in facts.items() if "prefill" in one}
    told = {gpu: faster(one["prefill"], FASTER) for gpu, one in known.items()}
    cases = max((one["prompts"] for one in known.values()), default=0)
    return f"Averaged over {cases} prompts and head counts, this lab's is {_each(facts, told)}" if told else ""


def advice(facts: Facts) -> str:
    """From which batch on a state should wait in a ring, of which length, and where not; whose prefill to take."""
    starts = {state: [one[f"from {state}"] for one in facts.values() if f"from {state}" in one] for state in STATES}
    worth = {state: max(found) for state, found in starts.items() if found and None not in found}
    never = [state for state, found in starts.items() if None in found]
    said = [f"{batch} ({state} states)" for state, batch in worth.items()]
    use = f"keep a ring of {variants.LENGTH} tokens from batch {' or '.join(said)} on{_lengths(facts)}" if said else ""
    keep = f"write {' and '.join(never)} states at every token" if never else ""
    parts = (use, keep, _alone(facts) if said else "", _whose(facts))
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part)


def _whose(facts: Facts) -> str:
    """Whose prefill to take, and the worst of it."""
    known = [one for one in facts.values() if "prefill" in one]
    if not known:
        return ""
    if min(one["prefill"] for one in known) <= 1:
        return "take FlashInfer's prefill"
    return f"take this lab's fused prefill, at worst {faster(min(one['worst prefill'] for one in known), FASTER)}"


def _lengths(facts: Facts) -> str:
    """What another length would gain."""
    known = [one["length"] for one in facts.values() if "length" in one]
    if not known:
        return ""
    said = faster(max(known))
    return "; no other length is faster" if said == SAME else f"; other lengths are at most {said}"


def _alone(facts: Facts) -> str:
    """What the ring costs one sequence: "at batch 1 a ring is 1.25× slower (fp32)"; nothing where it costs none."""
    least = {
        state: min((one[f"alone {state}"] for one in facts.values() if f"alone {state}" in one), default=1.0)
        for state in STATES
    }
    slow = [f"{said} ({state})" for state, ratio in least.items() if (said := faster(ratio)).endswith("slower")]
    return f"at batch 1 this lab's ring is {', '.join(slow)}" if slow else ""


def hero(rows: pd.DataFrame) -> Drawing:
    """What writing the state once in 16 tokens is worth, by batch, SGLang's kernels and ours."""
    parts = [tables.compared(rows, "ring", *pair, gate="GDN").assign(whose=whose) for whose, pair in WHOSE.items()]
    parts = [part for part in parts if len(part)]
    if not parts:
        return "no decode was timed both ways."
    table = where(pd.concat(parts, ignore_index=True), batch=DRAWN, state=STATES)
    if table.empty:
        return f"no decode was timed both ways at batch {', '.join(map(str, DRAWN))}."
    table = table.assign(state=table["state"] + " state")
    return drawing(
        plots.bars, table, "batch", "ratio", "whose", panel="state", fmt="{:.2f}", reference=[(1, "as fast")],
        hidden=("gate", "runs"), xlabel="sequences decoded together (batch)",
        ylabel=f"× faster with one write in {variants.LENGTH} tokens",
        title=f"What one write in {variants.LENGTH} tokens is worth, by batch",
        alt="Ratios of the time of a decode that writes its state at every token to one with a ring, by batch.",
        caption="SGLang's kernels and this lab's, each against its own decode that writes at every token; below 1 the "
        "ring is slower. One decay per head (GDN), heads of Qwen3.5-4B, mean over all positions of a ring.",
        units={"us": "ring µs", "against us": "written µs"},
    )  # fmt: skip


ledger.watch(__name__)
