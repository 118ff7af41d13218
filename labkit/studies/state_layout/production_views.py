"""Figures, tables and sentences on the production operations, each made from the rows of one GPU."""

import re
from collections.abc import Iterable, Mapping, Sequence
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
from labkit.report.words import faster, filled, gains, span
from labkit.shapes import QWEN3_NEXT
from labkit.studies.state_layout import tables, variants
from labkit.studies.state_layout.claims import CONTEXT, FULL, NARROW, TTFT_PERCENT, VLLM_TABLE, WIDE, vllm_estimate
from labkit.studies.state_layout.study import ITEMSIZE
from labkit.studies.state_layout.views import FASTER, INTERVAL, by_state, equal_tiles, named

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


def by_kernel(rows: pd.DataFrame) -> dict[str, str]:
    """What the layout is worth with the GPU full, kernel by kernel, and to a whole decode step."""
    own = tables.released(rows, "SGLang")
    own = own[own["batch"].isna() | (own["batch"] >= FULL)]
    steps = tables.gdn_layouts(rows, "step")
    parts = {
        f"SGLang's verify, tile {NARROW}": where(own, op="verify"),
        f"SGLang's decode, tile {WIDE}": where(own, op="step"),
        "this lab's decode, tuned for each layout": steps[steps["batch"] >= FULL] if len(steps) else steps,
    }
    said = equal_tiles(rows) | {name: by_state(some) for name, some in parts.items() if len(some)}
    prefills = tables.gdn_layouts(rows, "extend")
    if len(prefills):
        said["this lab's prefill, one launch for both layouts"] = gains(prefills["ratio"])
    percent = vllm_estimate(rows, WIDE)["gain %"]
    if len(percent):
        said[f"a whole decode step, all batches (estimate, tile {WIDE})"] = f"{span(percent, '{:+.1f}')} % tokens/s"
    return said


def tuned(rows: pd.DataFrame) -> Drawing:
    """KV / VK of the production decode, each layout with choices of its own, against batch."""
    table = tables.gdn_layouts(rows, "step")
    if table.empty:
        return "production kernels were not measured in both layouts."
    table = table.assign(state=table["state"] + " state")
    full = table[table["batch"] >= FULL]
    bf16 = where(full, state="bf16 state")["ratio"].mean() > where(full, state="fp32 state")["ratio"].mean()
    title = "Tuned for each layout, bf16 states gain more than fp32" if bf16 else "Decode tuned for each layout"
    return drawing(
        plots.lines, table, "batch", "ratio", "state", low="low", high="high", logx=True, xlabel="batch",
        ylabel=FASTER, title=title, reference=[(1, "equal")],
        alt="Lines of the ratio of the two layouts' times against batch, by type of state.",
        caption="Each layout with the tile and warps that were chosen for it (GDN); 95 % intervals.",
        said=f"Batch {FULL} and more: {by_state(full)}" if len(full) else "",
        table=["state", "batch", "us", "against us", *INTERVAL, "verdict"],
        units={"us": "[V, K] µs", "against us": "[K, V] µs"},
    )  # fmt: skip


def libraries(rows: pd.DataFrame) -> dict[str, str]:
    """How the lab's decode and extend compare with the fastest library: geometric mean, least and largest."""
    said = {}
    for (slots, state), some in _groups(where(tables.against_best(rows, "step"), gate="GDN"), ["slots", "state"]):
        said[f"decode, GDN, {state} state, slots {slots}"] = _mean(some)
    for (gate,), some in _groups(tables.against_best(rows, "extend"), ["gate"]):
        said[f"extend, {gate}"] = _mean(some)
    return said


def _groups(table: pd.DataFrame, by: list[str]) -> Iterable[tuple[tuple, pd.DataFrame]]:
    return table.groupby(by, sort=False) if len(table) else ()


def _mean(table: pd.DataFrame) -> str:
    """ "1.02× faster than the fastest of fla-core and attn-gym (1.00 to 1.13)"."""
    mean = geometric_mean(table["ratio"])
    ledger.note("mean", {"ratio": max(mean, 1 / mean)})
    return f"{faster(mean, _fastest(table))} ({gains(table['ratio'])})"


def _fastest(table: pd.DataFrame) -> str:
    """Who is compared in `tables.against_best`: the fastest of all that were timed in any case."""
    timed = list(dict.fromkeys(name for names in table["libraries"] for name in names.split(", ")))
    return timed[0] if len(timed) == 1 else f"the fastest of {' and '.join([', '.join(timed[:-1]), timed[-1]])}"


def step_percent(rows: pd.DataFrame) -> Drawing:
    """Percent of the in-place multiply against batch, GDN: ours in both layouts, and libraries."""
    table = where(tables.operation_times(rows, "step"), gate="GDN")
    table = table[table["percent"].notna()]
    fla = table[table["variant"].str.startswith("fla ")].sort_values("us", kind="stable")
    fla = fla.drop_duplicates(["state", "batch"]).sort_index().assign(variant=FASTEST_FLA)
    table = pd.concat([where(table, variant=SHOWN_STEPS), fla], ignore_index=True)
    if table.empty:
        return "no decode step was measured beside the in-place multiply."
    ours = where(table[table["batch"] >= FULL], variant=variants.OURS)
    table = table.assign(variant=table["variant"].map(named))
    return drawing(
        plots.lines, table, "batch", "percent", "variant", panel="state", logx=True,
        reference=[(100, variants.CEILING)], xlabel="batch", ylabel="% of in-place multiply",
        title="How near production kernels of decode come to the memory's limit",
        alt="Lines of percent of an in-place multiply against batch, by kernel.",
        caption="The same states multiplied in place, in the same blocks, are 100 %.",
        said=f"{named(variants.OURS)}, batch {FULL} and more: {span(ours['percent'], '{:.0f}')} %" if len(ours) else "",
        table=["state", "batch", "variant", "us", "percent"], units={"us": "µs", "percent": "%"},
    )  # fmt: skip


def _step_libraries(rows: pd.DataFrame, slots: str) -> Drawing:
    """The fastest library over ours by batch; slots: "in order", or "at random", which few libraries can read."""
    table = where(tables.against_best(rows, "step"), slots=slots)
    if table.empty:
        return "no library was timed beside the lab's decode: `pip install labkit[peers]` brings those that there are."
    return _step_ratios(
        table,
        xlabel="× faster than the fastest library",
        title=f"Decode against the fastest library, slots {slots}",
        alt="Ratios of the fastest library's time over that of this lab's kernel, by gate, state and batch.",
        caption="The table beneath names the library at each batch.",
        said=f"This lab's is {counted(table['verdict'])} of {len(table)} cases, {gains(table['ratio'])}",
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
    kept = table["state"].fillna("fp32") + " state"  # extend takes and leaves fp32
    table = table.assign(group=groups, kept=kept, row=[_case(line) for line in table.to_dict("records")])
    judged = f"[V, K] is {counted(table['verdict'])} of {len(table)} cases"
    return drawing(
        plots.ratios, table, "row", *INTERVAL, group="group", panel="kept", verdict="verdict",
        hidden=("group", "kept", "row", "runs"), xlabel="× faster after the change, with [V, K]", title=title,
        alt="Ratios of time before the change over time after, by operation, case and type of the state.",
        caption=caption,
        said=f"{judged}, {gains(table['ratio'])}",
        units={"us": "after µs", "against us": "before µs"},
    )  # fmt: skip


def _case(line: Mapping[str, Any]) -> str:
    """What a row of any operation is of, but for the state: "batch 64", or its prompts."""
    return line["prefill"] if isinstance(line["prefill"], str) else f"batch {line['batch']}"


def by_release(rows: pd.DataFrame) -> Drawing:
    """Decode of SGLang's releases beside ours, at the smallest batch that fills the GPU."""
    table = tables.by_release(rows, FULL)
    gdn = where(table, gate="GDN")
    gdn = gdn[gdn["right"] & gdn["us"].notna()].replace({"form": {"": "plain"}})
    if set(gdn["variant"]) <= {variants.OURS}:
        return f"SGLang's releases side by side: {why_not(rows, map(variants.released, variants.RELEASES))}."
    gdn = gdn.sort_values("release", key=lambda names: names.map(_version), kind="stable")
    shown = table.assign(right=table["right"].map({True: "right", False: "wrong"})).drop(columns="variant")
    return drawing(
        plots.bars, gdn, "release", "us", "form", panel="state", xlabel="release and layout", ylabel="µs",
        title=f"One decode step of {FULL} sequences, by release of SGLang",
        alt="Bars of time by release, for each form of the kernel and type of the state.",
        caption="Releases in their order; packed: q, k and v in one tensor, where the step size is rounded to bf16.",
        said=cute_layout(rows).removesuffix("."), table=shown, units={"us": "µs"},
    )  # fmt: skip


def _version(release: str) -> list[int]:
    """What "0.5.10rc0, [V, K]" is sorted by; this lab's, which has no version, comes first."""
    return [int(part) for part in re.findall(r"\d+", release)]


def cute_layout(rows: pd.DataFrame) -> str:
    """Which releases' CuTe DSL decode takes the pool of its own engine for one of the other layout."""
    table = where(tables.by_release(rows, FULL), gate="GDN", form="CuTe DSL")
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
    table = table.assign(against=table["against"].map(named), row=filled(table, "{prefill}, heads {H} / {HV}"))
    return drawing(
        plots.ratios, table, "row", *INTERVAL, group="against", verdict="verdict", hidden=("row", "runs"),
        xlabel="× faster than the library", title="Extend of one long prompt",
        alt="Ratios of FlashInfer's and fla-core's time over that of this lab's extend, by prompt and heads.",
        caption="bf16 inputs, fp32 states, [V, K]. With few heads FlashInfer splits a sequence among multiprocessors.",
        said=f"This lab's is {gains(table['ratio'])}", units={"us": "this lab µs", "against us": "library µs"},
    )  # fmt: skip


def slots(rows: pd.DataFrame) -> Drawing:
    """What it costs that an engine's pool has the states of a batch in slots at random."""
    table = tables.compared(rows, "step", variants.OURS_IN_ORDER, variants.OURS)
    if table.empty:
        return "states in order and at random were not both measured."
    return _step_ratios(
        table,
        xlabel="× faster with slots in order",
        title="The order of the slots changes the speed" if _all_faster(table) else "What the order of slots is worth",
        alt="Ratios of time with slots at random over time with slots in order, by gate, state and batch.",
        caption="Each state is a slot of its own, megabytes in one piece, in both.",
        said=f"In order: {gains(table['ratio'])}",
        units={"us": "in order µs", "against us": "at random µs"},
    )


def _all_faster(table: pd.DataFrame) -> bool:
    return set(table["verdict"]) == {"faster"}


def _step_ratios(table: pd.DataFrame, **texts: Any) -> Drawing:
    """Ratios by batch, grouped by gate and state."""
    table = table.assign(group=filled(table, "{gate}, {state}"), row=filled(table, "batch {batch}"))
    hidden = ("group", "row", "libraries")
    return drawing(plots.ratios, table, "row", *INTERVAL, group="group", verdict="verdict", hidden=hidden, **texts)


def layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """KV / VK of production kernels in every operation."""
    table = tables.layouts(rows)
    table = table.dropna(axis=1, how="all") if len(table) else table
    return table.assign(op=table["op"].map(OPERATIONS), kernels=table["kernels"].map(named))


def verified(rows: pd.DataFrame) -> dict[str, str]:
    """What verify saves over decoding the draft token by token, by case."""
    table = tables.compared(rows, "verify", variants.OURS, variants.TOKENS)
    ledger.note("verified", table)
    return {f"{one.gate}, batch {one.batch}, {one.T} tokens": faster(one.ratio) for one in table.itertuples()}


def extend(rows: pd.DataFrame) -> Drawing:
    """The fastest library's chunked kernels over ours, by prefill."""
    table = tables.against_best(rows, "extend")
    if table.empty:
        return "no library was timed beside the lab's extend: `pip install labkit[peers]` brings those that there are."
    return drawing(
        plots.ratios, table, "prefill", *INTERVAL, group="gate", verdict="verdict",
        xlabel="× faster than the fastest library", title="Extend, sequences x tokens",
        alt="Ratios of the fastest library's time over that of this lab's extend, by prefill.",
        caption="bf16 inputs, fp32 states; each library in the faster of its layouts.",
        said=f"Against {_fastest(table)}: {counted(table['verdict'])} of {len(table)} cases",
        hidden=["ours, % of in-place", "libraries"],
    )  # fmt: skip


def extend_errors(rows: pd.DataFrame) -> str:
    """Is ours as accurate as fla-core's?"""
    table = tables.extend_errors(rows)
    if table.empty:
        return "no library's error was measured beside ours."
    ours, times = span(table["error, ours"], "{:.1e}"), span(table["ours / fla"])
    return f"relative error against float64 on the same inputs: {ours}, which is {times} times that of fla-core."


def first_token(rows: pd.DataFrame) -> dict[str, str]:
    """What the layout could do for the first token: its gain for a whole extend, by the share of the extends."""
    table, whole = tables.compared(rows, "extend", variants.OURS, variants.OURS_KV), tables.first_token(rows)
    said = {f"a whole extend, {gate}": gains(some["ratio"]) for (gate,), some in _groups(table, ["gate"])}
    if len(whole):
        said[f"share of the extends in a prefill of {QWEN3_NEXT.name}, at most"] = (
            f"{span(whole['share %'], '{:.0f}')} %"
        )
        earlier = f"{span(whole['earlier %'], '{:.1f}')} % earlier"
        said[f"first token, at most ({TTFT_PERCENT:.1f} % published)"] = earlier
    return said


def occupancy(rows: pd.DataFrame) -> dict[str, str]:
    """Do more CTAs an SM go with less time of the chunk-state kernel?"""
    table = tables.chunk_state_layouts(rows)
    if table.empty:
        return {}
    more, equal = (table["CTAs an SM, VK"] - table["CTAs an SM, KV"]).pipe(lambda apart: (apart > 0, apart == 0))
    parts = {"[V, K] has more CTAs an SM": table[more], "both layouts have as many": table[equal]}
    return {
        name: f"{len(some)} of {len(table)} pairs" + (f", {gains(some['ratio'])} with [V, K]" if len(some) else "")
        for name, some in parts.items()
    }


def chunk_states(rows: pd.DataFrame) -> pd.DataFrame:
    """The chunk-state kernel by form, tile and prefill."""
    units = {"us": "µs", "shared_bytes": "shared bytes", "ctas_per_sm": "CTAs an SM", "BV": "tile"}
    table = tables.chunk_states(rows)
    return table.assign(form=table["form"].map(named)).rename(columns=units)


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of the state in a decode step, and what the wide tile's ratio would then give, by model and context."""
    found = tables.shares(rows, WIDE, (256, CONTEXT, 32768), list(VLLM_TABLE))
    return found.rename(columns={"kernel KV / VK": "kernel × faster"})


def drift(rows: pd.DataFrame) -> Drawing:
    """Error of the state along the tokens."""
    table = tables.drift(rows)
    table = where(table, gate="GDN") if "GDN" in set(table["gate"]) else table
    if table.empty:
        return "the drift was not measured."
    table = table.assign(variant=table["variant"].map(named))
    last = table[table["tokens"] == table["tokens"].max()]
    most = last.groupby("state", sort=False)["state error"].max()
    said = "; ".join(f"{state} state {error:.1e}" for state, error in most.items())
    return drawing(
        plots.lines, table, "tokens", "state error", "variant", panel="state", logx=True, logy=True,
        xlabel="tokens decoded", ylabel="relative RMSE of the state (log)", title="Does the error grow?",
        alt="Lines of the state's error against tokens decoded, by layout and state type.",
        caption="Against float64 on the same inputs.", said=f"After {last['tokens'].iloc[0]} tokens: {said}",
    )  # fmt: skip


ledger.watch(__name__)
