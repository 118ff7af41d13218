"""Figures, tables and sentences on the production operations, each made from the rows of one GPU."""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import pandas as pd

from labkit import sources
from labkit.bench import ledger
from labkit.bench.tables import where, why_not
from labkit.bench.verdict import counted, geometric_mean
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import filled, span, spans
from labkit.shapes import QWEN3_NEXT
from labkit.studies.state_layout import tables, variants
from labkit.studies.state_layout.claims import CONTEXT, FULL, NARROW, TTFT_PERCENT, VLLM_TABLE, WIDE, vllm_estimate
from labkit.studies.state_layout.study import ITEMSIZE
from labkit.studies.state_layout.views import INTERVAL, at_batches

SHOWN_STEPS = [variants.OURS_IN_ORDER, variants.OURS, variants.OURS_KV, variants.ATTENTION_GYM]
FASTEST_FLA = "fastest of fla-core, in order"
OPERATIONS = {"step": "decode", "verify": "verify", "extend": "extend"}


def choices(batches: Sequence[int], states: Sequence[str], sms: int = 132) -> pd.DataFrame:
    """What the rule of `recurrent` chooses for Qwen3-Next's heads, by how fast the memory is; empty without Triton."""
    if not find_spec("triton"):
        return pd.DataFrame()
    from labkit.kernels.gated_delta.recurrent import choose

    model, found = QWEN3_NEXT, []
    for state, batch in product(states, batches):
        heads = batch * model.value_heads
        line = {"state": state, "batch": batch}
        for fast, gpu in ((False, "H100"), (True, "H200")):
            choice = choose(heads, model.v, model.k, ITEMSIZE[state], sms, fast=fast)
            programs = heads * -(-model.v // choice.tile)
            line |= {f"choice, {gpu}": str(choice), f"all programs / SMs, {gpu}": round(programs / sms)}
        found.append(line)
    return pd.DataFrame(found)


def answer(rows: pd.DataFrame) -> str:
    """What the layout changes, from the tuned kernel to the whole model, before everything else."""
    steps, prefills = (tables.gdn_layouts(rows, op) for op in ("step", "extend"))
    if steps.empty:
        return "production kernels were not measured in both layouts."
    parts = ", ".join(spans(steps.assign(of=steps["state"] + " state"), "of", "ratio"))
    said = [f"each layout tuned for itself, [K, V] takes so many times as long: decode, {parts}"]
    if len(prefills):
        said.append(f"all kernels of prefill, with one launch for both layouts, {span(prefills['ratio'])}")
    gain = vllm_estimate(rows, WIDE)["gain %"]
    if len(gain):
        said.append(f"with [V, K] a whole decode step gains {span(gain, '{:+.1f}')} % (estimate, BV={WIDE})")
    narrow = where(tables.ratios(rows), BV=NARROW, K=QWEN3_NEXT.k)
    said += [f"only the simple kernel with BV={NARROW} shows up to {narrow['ratio'].max():.1f}"] if len(narrow) else []
    return "; ".join(said) + "."


def in_short(rows: pd.DataFrame) -> str:
    """What the layout is worth to production kernels of decode, and where decode and extend stand among libraries."""
    layout = tables.gdn_layouts(rows, "step")
    if layout.empty:
        return "production kernels were not measured in both layouts."
    parts = at_batches(layout)
    said = [f"production kernels, each layout with choices of its own, time of [K, V] over [V, K]: {parts}"]
    steps = where(tables.against_best(rows, "step"), gate="GDN")
    for slots, group in steps.groupby("slots", sort=False):
        said.append(f"Decode, GDN, slots {slots}: {_fastest(group)} {_longer(group, 'state')}")
    prefills = tables.against_best(rows, "extend")
    if len(prefills):
        said.append(f"Extend: {_fastest(prefills)} {_longer(prefills, 'gate')}")
    return ". ".join(said) + "."


def _fastest(table: pd.DataFrame) -> str:
    """Who is compared in `tables.against_best`: the fastest of all that were timed in any case."""
    timed = list(dict.fromkeys(name for names in table["libraries"] for name in names.split(", ")))
    return timed[0] if len(timed) == 1 else f"the fastest of {' and '.join([', '.join(timed[:-1]), timed[-1]])}"


def _longer(table: pd.DataFrame, by: str) -> str:
    """Least and largest ratio of each group, and the geometric mean."""
    parts = (
        f"{name} {span(ratio)} (geometric mean {geometric_mean(ratio):.2f})"
        for name, ratio in table.groupby(by, sort=False)["ratio"]
    )
    return f"takes so many times as long as ours: {'; '.join(parts)}"


def step_percent(rows: pd.DataFrame) -> Drawing:
    """Percent of the in-place multiply against batch, GDN: ours in both layouts, and libraries."""
    table = where(tables.operation_times(rows, "step"), gate="GDN")
    table = table[table["percent"].notna()]
    fla = table[table["variant"].str.startswith("fla ")].sort_values("us", kind="stable")
    fla = fla.drop_duplicates(["state", "batch"]).sort_index().assign(variant=FASTEST_FLA)
    table = pd.concat([where(table, variant=SHOWN_STEPS), fla], ignore_index=True)
    if table.empty:
        return "no decode step was measured beside the in-place multiply."
    ours = where(table[table["batch"] >= FULL], variant=[variants.OURS_IN_ORDER, variants.OURS])
    ends = "; ".join(f"{one} %" for one in spans(ours, ["variant", "state"], "percent", "{:.1f}"))
    return drawing(
        plots.lines, table, "batch", "percent", "variant", panel="state", logx=True,
        reference=[(100, variants.CEILING)], xlabel="batch", ylabel="% of in-place multiply",
        title="Decode, production kernels, GDN",
        alt="Lines of percent of an in-place multiply against batch, by kernel.",
        caption="The same states multiplied in place, in the same blocks, are 100 %.",
        said=f"batch {FULL} and more: {ends}" if ends else "no batch fills the GPU",
        table=["state", "batch", "variant", "us", "percent"], units={"us": "µs", "percent": "%"},
    )  # fmt: skip


def _step_libraries(rows: pd.DataFrame, slots: str) -> Drawing:
    """The fastest library over ours by batch; slots: "in order", or "at random", which few libraries can read."""
    table = where(tables.against_best(rows, "step"), slots=slots)
    if table.empty:
        return "no library was timed beside the lab's decode: `pip install labkit[peers]` brings those that there are."
    gdn = where(table, gate="GDN")["ratio"]
    said = [f"GDN: geometric mean {geometric_mean(gdn):.3f}, least {gdn.min():.3f}"] if len(gdn) else []
    return _step_ratios(
        table,
        xlabel="time fastest library / time ours (above 1: ours faster)",
        title=f"Decode against the fastest library, slots {slots}",
        alt="Ratios of the fastest library's time over ours, by gate, state and batch.",
        caption=f"At each batch the table names {_fastest(table)}.",
        said="; ".join([*said, f"ours is {counted(table['verdict'])} of {len(table)} cases"]),
    )


step_in_order, step_at_random = (partial(_step_libraries, slots=slots) for slots in ("in order", "at random"))


def own_code(rows: pd.DataFrame) -> Drawing:
    """What SGLang's own kernels gained from the release before the change to the first with it, by operation."""
    return _own_code(
        rows, ["SGLang"], "SGLang's own kernels, before and after the change",
        "Releases 0.5.9 and 0.5.10rc0: files of both as they were published, called as the engine calls them.",
    )  # fmt: skip


def own_code_vllm(rows: pd.DataFrame) -> Drawing:
    """The same of vLLM's decode and extend, and of the layout of its decode alone."""
    return _own_code(
        rows, ["vLLM", "vLLM, layout alone"], "vLLM's own kernels, before and after the change",
        "Releases 0.15.1 and 0.16.0. The latter's decode also looks for slots that are none; layout alone: that taken "
        "out. Decode has a tile of 32 for GDN, of 8 for KDA.",
    )  # fmt: skip


def _own_code(rows: pd.DataFrame, owners: Sequence[str], title: str, caption: str) -> Drawing:
    parts = [tables.released(rows, source).assign(source=source) for source in owners]
    parts = [part for part in parts if len(part)]
    if not parts:
        return f"{title}: {why_not(rows, variants.OWN[owners[0]])}."
    table = pd.concat(parts, ignore_index=True)
    groups = table["source"] + ", " + table["op"].map(OPERATIONS) + ", " + table["gate"]
    table = table.assign(group=groups, row=[_case(line) for line in table.to_dict("records")])
    judged = counted(table["verdict"])
    return drawing(
        plots.ratios, table, "row", *INTERVAL, group="group", verdict="verdict", hidden=("group", "row", "runs"),
        xlabel="time before, [K, V] / time after, [V, K] (above 1: [V, K] faster)", title=title,
        alt="Ratios of time before the change over time after, by operation and case.", caption=caption,
        said=f"{'; '.join(spans(table, 'group', 'ratio'))}; [V, K] is {judged} of {len(table)} cases",
        units={"us": "after µs", "against us": "before µs"},
    )  # fmt: skip


def _case(line: Mapping[str, Any]) -> str:
    """What a row of any operation is of: "fp32, batch 64", or its prompts."""
    return line["prefill"] if isinstance(line["prefill"], str) else f"{line['state']}, batch {line['batch']}"


def by_release(rows: pd.DataFrame) -> Drawing:
    """Decode of SGLang's releases beside ours, at the smallest batch that fills the GPU."""
    table = tables.by_release(rows, FULL)
    gdn = where(table, gate="GDN")
    gdn = gdn[gdn["right"] & gdn["us"].notna()].replace({"form": {"": "plain"}})
    if set(gdn["variant"]) <= {variants.OURS}:
        return f"SGLang's releases side by side: {why_not(rows, map(variants.released, variants.RELEASES))}."
    shown = table.assign(right=table["right"].map({True: "right", False: "wrong"})).drop(columns="variant")
    return drawing(
        plots.bars, gdn, "release", "us", "form", panel="state", xlabel="release and layout", ylabel="µs",
        title=f"One decode step of {FULL} sequences, by release of SGLang",
        alt="Bars of time by release, for each form of the kernel and type of the state.",
        caption="Releases in their order; packed: q, k and v in one tensor, where the step size is rounded to bf16.",
        said=_cute_layout(rows, table).removesuffix("."), table=shown, units={"us": "µs"},
    )  # fmt: skip


def cute_layout(rows: pd.DataFrame) -> str:
    """Which releases' CuTe DSL decode takes the pool of its own engine for one of the other layout."""
    return _cute_layout(rows, tables.by_release(rows, FULL))


def _cute_layout(rows: pd.DataFrame, releases: pd.DataFrame) -> str:
    table = where(releases, gate="GDN", form="CuTe DSL")
    if table.empty:
        names = (variants.released(name, "CuTe DSL") for name in variants.CUTE)
        return f"SGLang's decode in the CuTe DSL: {why_not(rows, names)}."
    said = [
        f"{line['release']}: {'right' if line['right'] else 'wrong'} (error {line['error']:.1e})"
        for line in table.to_dict("records")
    ]
    first, *others = (sources.source(name).files.get(variants.CUTE_FILE) for name in variants.CUTE)
    same = [name.partition("-")[2] for name, sha in zip(variants.CUTE[1:], others, strict=True) if sha == first]
    copies = f"; the file of {' and '.join(same)} is that of 0.5.9, byte for byte" if same else ""
    return f"The decode in the CuTe DSL, given the pool as its engine keeps it: {'; '.join(said)}{copies}."


def long_prompts(rows: pd.DataFrame) -> Drawing:
    """Extend of one long prompt, with few heads and with many: FlashInfer and fla-core against ours."""
    table = tables.long_prompts(rows)
    if table.empty:
        return f"long prompts: {why_not(rows[rows['op'] == 'long'], [variants.FLASHINFER_VK])}."
    table = table.assign(row=filled(table, "{prefill}, heads {H} / {HV}"))
    said = spans(table, "against", "ratio")
    return drawing(
        plots.ratios, table, "row", *INTERVAL, group="against", verdict="verdict", hidden=("row", "runs"),
        xlabel="time theirs / time ours (above 1: ours faster)", title="Extend of one long prompt",
        alt="Ratios of FlashInfer's and fla-core's time over ours, by prompt and heads.",
        caption="bf16 inputs, fp32 states, [V, K]. With few heads FlashInfer splits a sequence among multiprocessors.",
        said="; ".join(said), units={"us": "ours µs", "against us": "theirs µs"},
    )  # fmt: skip


def slots(rows: pd.DataFrame) -> Drawing:
    """What it costs that an engine's pool has the states of a batch in slots at random."""
    table = tables.compared(rows, "step", variants.OURS_IN_ORDER, variants.OURS)
    if table.empty:
        return "states in order and at random were not both measured."
    return _step_ratios(
        table,
        xlabel="time slots at random / time slots in order (above 1: order is faster)",
        title="The same kernel, the same states, in another order",
        alt="Ratios of time with slots at random over time with slots in order, by gate, state and batch.",
        caption="Each state is a slot of its own, megabytes in one piece, in both.",
        said=span(table["ratio"], "×{:.3f}"),
        units={"us": "in order µs", "against us": "at random µs"},
    )


def _step_ratios(table: pd.DataFrame, **texts: Any) -> Drawing:
    """Ratios by batch, grouped by gate and state."""
    table = table.assign(group=filled(table, "{gate}, {state}"), row=filled(table, "batch {batch}"))
    hidden = ("group", "row", "libraries")
    return drawing(plots.ratios, table, "row", *INTERVAL, group="group", verdict="verdict", hidden=hidden, **texts)


def layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """KV / VK of production kernels in every operation."""
    return tables.layouts(rows).dropna(axis=1, how="all")


def verified(rows: pd.DataFrame) -> str:
    """What verify saves over decoding the draft token by token."""
    table = tables.compared(rows, "verify", variants.OURS, variants.TOKENS)
    if table.empty:
        return "no chain of draft tokens was measured both ways."
    parts = "; ".join(filled(table, "{gate}, batch {batch}, {T} tokens ×{ratio:.2f}"))
    return f"by decode and copies of the states a chain takes so many times as long as by our verify: {parts}."


def extend(rows: pd.DataFrame) -> Drawing:
    """The fastest library's chunked kernels over ours, by prefill."""
    table = tables.against_best(rows, "extend")
    if table.empty:
        return "no library was timed beside the lab's extend: `pip install labkit[peers]` brings those that there are."
    return drawing(
        plots.ratios, table, "prefill", *INTERVAL, group="gate", verdict="verdict",
        xlabel="time fastest library / time ours (above 1: ours faster)", title="Extend, sequences x tokens",
        alt="Ratios of the fastest library's time over ours, by prefill.",
        caption=f"bf16 inputs, fp32 states; {_fastest(table)}, each in the faster of its layouts.",
        said=f"Ours is {counted(table['verdict'])} of {len(table)} cases", hidden=["ours, % of in-place", "libraries"],
    )  # fmt: skip


def extend_errors(rows: pd.DataFrame) -> str:
    """Is ours as accurate as fla-core's?"""
    table = tables.extend_errors(rows)
    if table.empty:
        return "no library's error was measured beside ours."
    ours, times = span(table["error, ours"], "{:.1e}"), span(table["ours / fla"])
    return f"relative error against float64 on the same inputs: ours {ours}, which is {times} times fla-core's."


def first_token(rows: pd.DataFrame) -> str:
    """What the layout could do for the first token: its gain for a whole extend, by the share of the extends."""
    table, whole = tables.compared(rows, "extend", variants.OURS, variants.OURS_KV), tables.first_token(rows)
    if whole.empty:
        return "extend was not measured in both layouts."
    said = "; ".join(spans(table, "gate", "ratio", "{:.3f}"))
    return (
        f"our whole extends, time KV / VK: {said}. Were all else in a prefill of {QWEN3_NEXT.name} as fast as the GPU "
        f"can multiply, extends would take {span(whole['share %'], '{:.0f}')} % of it, and the layout bring the first "
        f"token {span(whole['earlier %'], '{:.1f}')} % earlier; {TTFT_PERCENT:.1f} % were published."
    )


def occupancy(rows: pd.DataFrame) -> str:
    """Do more CTAs an SM go with less time of the chunk-state kernel?"""
    table = tables.chunk_state_layouts(rows)
    if table.empty:
        return "the chunk-state kernel was not measured in both layouts."
    more = table[table["CTAs an SM, VK"] > table["CTAs an SM, KV"]]
    equal = table[table["CTAs an SM, VK"] == table["CTAs an SM, KV"]]
    said = [
        f"{words} in {len(some)} of {len(table)} pairs, time KV / VK {span(some['ratio'])}"
        for some, words in ((more, "[V, K] has more CTAs an SM"), (equal, "both layouts have as many CTAs an SM"))
        if len(some)
    ]
    if more.empty:
        said.append("so no gain of a layout comes from more CTAs here: in our kernel the tile decides how many")
    return f"{'; '.join(said)}."


def chunk_states(rows: pd.DataFrame) -> pd.DataFrame:
    """The chunk-state kernel by form, tile and prefill."""
    units = {"us": "µs", "shared_bytes": "shared bytes", "ctas_per_sm": "CTAs an SM"}
    return tables.chunk_states(rows).rename(columns=units)


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of the state in a decode step, and what the wide tile's ratio would then give, by model and context."""
    return tables.shares(rows, WIDE, (256, CONTEXT, 32768), list(VLLM_TABLE))


def drift(rows: pd.DataFrame) -> Drawing:
    """Error of the state along the tokens."""
    table = tables.drift(rows)
    table = where(table, gate="GDN") if "GDN" in set(table["gate"]) else table
    if table.empty:
        return "the drift was not measured."
    last = table[table["tokens"] == table["tokens"].max()]
    said = "; ".join(filled(last, "{variant}, {state}: state {state error:.1e}, output {output error:.1e}"))
    return drawing(
        plots.lines, table, "tokens", "state error", "variant", panel="state", logx=True, logy=True,
        xlabel="tokens decoded", ylabel="relative RMSE of the state (log)", title="Does the error grow?",
        alt=f"Lines of the state's error against tokens decoded, by layout and state type. {said}.",
        caption=f"Against float64 on the same inputs. After {last['tokens'].iloc[0]} tokens: {said}.",
    )  # fmt: skip


ledger.watch(__name__)
