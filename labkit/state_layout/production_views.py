"""Figures and sentences on the production operations, each made from the rows of one GPU."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import pandas as pd

from labkit.bench.verdict import counted, geometric_mean
from labkit.report import figures
from labkit.shapes import QWEN3_NEXT
from labkit.state_layout import names, production, tables
from labkit.state_layout.claims import CONTEXT, FULL, NARROW, TTFT_PERCENT, VLLM_TABLE, WIDE, vllm_estimate
from labkit.state_layout.tables import CEILING
from labkit.state_layout.trials import DTYPES

Drawing = Mapping[str, Any] | str  # a sentence where there is nothing to draw
SHOWN_STEPS = [
    names.OURS_IN_ORDER,
    names.OURS,
    names.OURS_KV,
    names.ATTENTION_GYM,
]
FASTEST_FLA = "fastest of fla-core, in order"
LIBRARIES = {"in order": "the faster of fla-core and attn-gym", "at random": "attn-gym"}  # which find states so


def choices(batches: Sequence[int], states: Sequence[str], sms: int = 132) -> pd.DataFrame:
    """What the rule of `recurrent` chooses for Qwen3-Next's heads, by how fast the memory is; empty without Triton."""
    if not find_spec("triton"):
        return pd.DataFrame()
    from labkit.state_layout.recurrent import choose

    model, found = QWEN3_NEXT, []
    for state in states:
        for batch in batches:
            heads = batch * model.value_heads
            line = {"state": state, "batch": batch}
            for fast, gpu in ((False, "H100"), (True, "H200")):
                choice = choose(heads, model.v, model.k, DTYPES[state].itemsize, sms, fast=fast)
                programs = heads * -(-model.v // choice.tile)
                line |= {f"choice, {gpu}": str(choice), f"all programs / SMs, {gpu}": round(programs / sms)}
            found.append(line)
    return pd.DataFrame(found)


def answer(rows: pd.DataFrame) -> str:
    """What the layout changes, from the tuned kernel to the whole model, before everything else."""
    steps, prefills = (production.gdn_layouts(rows, op) for op in ("step", "extend"))
    if steps.empty:
        return "production kernels were not measured in both layouts."
    parts = [f"{state} state {_span(ratio)}" for state, ratio in steps.groupby("state", sort=False)["ratio"]]
    said = ["each layout tuned for itself, [K, V] takes so many times as long: decode, " + ", ".join(parts)]
    if len(prefills):
        said.append(f"all kernels of prefill, with one launch for both layouts, {_span(prefills['ratio'])}")
    gain = vllm_estimate(rows, WIDE)["gain %"]
    if len(gain):
        said.append(
            f"with [V, K] a whole decode step gains {gain.min():+.1f} to {gain.max():+.1f} % (estimate, BV={WIDE})"
        )
    narrow = tables.ratios(rows)
    narrow = narrow[(narrow["BV"] == NARROW) & (narrow["K"] == QWEN3_NEXT.k)]
    said += [f"only the simple kernel with BV={NARROW} shows up to {narrow['ratio'].max():.1f}"] if len(narrow) else []
    return "; ".join(said) + "."


def _span(values: pd.Series, digits: int = 2) -> str:
    return f"{values.min():.{digits}f} to {values.max():.{digits}f}"


def in_short(rows: pd.DataFrame) -> str:
    """What the layout is worth to production kernels of decode, and where decode and extend stand among libraries."""
    layout = production.gdn_layouts(rows, "step")
    if layout.empty:
        return "production kernels were not measured in both layouts."
    parts = [
        f"{state} state: " + ", ".join(f"{line['ratio']:.2f} at batch {line['batch']}" for _, line in group.iterrows())
        for state, group in layout.groupby("state", sort=False)
    ]
    said = [f"production kernels, each layout with choices of its own, time of [K, V] over [V, K]: {'; '.join(parts)}"]
    steps = production.against_best(rows, "step")
    for slots, group in steps[steps["gate"] == "GDN"].groupby("slots", sort=False):
        times = f"{LIBRARIES[slots]} takes so many times as long as ours: {_spans(group, 'state')}"
        said.append(f"Decode, GDN, slots {slots}: {times}")
    prefills = production.against_best(rows, "extend")
    if len(prefills):
        said.append(f"Extend: fla-core takes so many times as long as ours: {_spans(prefills, 'gate')}")
    return ". ".join(said) + "."


def _spans(table: pd.DataFrame, by: str) -> str:
    """Least and largest ratio of each group, and the geometric mean."""
    return "; ".join(
        f"{name} {_span(ratio)} (geometric mean {geometric_mean(ratio):.2f})"
        for name, ratio in table.groupby(by, sort=False)["ratio"]
    )


def step_percent(rows: pd.DataFrame) -> Drawing:
    """Percent of the in-place multiply against batch, GDN: ours in both layouts, and libraries."""
    table = production.times(rows, "step")
    table = table[(table["gate"] == "GDN") & table["percent"].notna()]
    fla = table[table["variant"].str.startswith("fla ")].sort_values("us", kind="stable")
    fla = fla.drop_duplicates(["state", "batch"]).sort_index().assign(variant=FASTEST_FLA)
    table = pd.concat([table[table["variant"].isin(SHOWN_STEPS)], fla], ignore_index=True)
    if table.empty:
        return "no decode step was measured beside the in-place multiply."
    fig = figures.lines(
        table, "batch", "percent", "variant", panel="state", logx=True, reference=[(100, CEILING)],
        xlabel="batch", ylabel="% of in-place multiply", title="Decode, production kernels, GDN",
    )  # fmt: skip
    ours = table[table["variant"].isin([names.OURS_IN_ORDER, names.OURS]) & (table["batch"] >= FULL)]
    spans = ours.groupby(["variant", "state"], sort=False)["percent"].agg(["min", "max"])
    said = "; ".join(f"{who}, {state} {a:.1f} to {b:.1f} %" for (who, state), (a, b) in spans.T.items())
    said = f"batch {FULL} and more: {said}" if said else "no batch fills the GPU"
    return {
        "fig": fig,
        "alt": f"Lines of percent of an in-place multiply against batch, by kernel. {said}.",
        "caption": f"The same states multiplied in place, in the same blocks, are 100 %. {said}.",
        "table": table[["state", "batch", "variant", "us", "percent"]].rename(columns={"us": "µs", "percent": "%"}),
    }


def step_in_order(rows: pd.DataFrame) -> Drawing:
    """The fastest library over ours by batch, the states in slots one after the other."""
    return _step_libraries(rows, "in order")


def step_at_random(rows: pd.DataFrame) -> Drawing:
    """The same with slots at random, which only libraries with indices can read."""
    return _step_libraries(rows, "at random")


def _step_libraries(rows: pd.DataFrame, slots: str) -> Drawing:
    table = production.against_best(rows, "step")
    table = table[table["slots"] == slots]
    if table.empty:
        return "no library was timed beside the lab's decode: `pip install labkit[peers]` brings those that there are."
    table = table.assign(group=table["gate"] + ", " + table["state"], row="batch " + table["batch"].astype(str))
    fig = figures.ratios(
        table, "row", "ratio", "low", "high", group="group", verdict="verdict",
        xlabel=f"time {LIBRARIES[slots]} / time ours (above 1: ours faster)",
        title=f"Decode against {LIBRARIES[slots]}, slots {slots}",
    )  # fmt: skip
    gdn = table[table["gate"] == "GDN"]["ratio"]
    said = f"GDN: geometric mean {geometric_mean(gdn):.3f}, least {gdn.min():.3f}" if len(gdn) else ""
    said = "; ".join(filter(None, (said, f"ours is {counted(table['verdict'])} of {len(table)} cases")))
    return {
        "fig": fig,
        "alt": f"Ratios of {LIBRARIES[slots]}'s time over ours, by gate, state and batch. {said}.",
        "caption": f"The fastest of its ways at each batch is named in the table. {said}.",
        "table": table.drop(columns=["group", "row", "no slower"], errors="ignore"),
    }


def slots(rows: pd.DataFrame) -> Drawing:
    """What it costs that an engine's pool has the states of a batch in slots at random."""
    table = production.compared(rows, "step", names.OURS_IN_ORDER, names.OURS)
    if table.empty:
        return "states in order and at random were not both measured."
    table = table.assign(group=table["gate"] + ", " + table["state"], row="batch " + table["batch"].astype(str))
    fig = figures.ratios(
        table, "row", "ratio", "low", "high", group="group", verdict="verdict",
        xlabel="time slots at random / time slots in order (above 1: order is faster)",
        title="The same kernel, the same states, in another order",
    )  # fmt: skip
    said = f"×{table['ratio'].min():.3f} to ×{table['ratio'].max():.3f}"
    units = {"us": "in order µs", "against us": "at random µs"}
    return {
        "fig": fig,
        "alt": f"Ratios of time with slots at random over time with slots in order, by gate, state and batch. {said}.",
        "caption": f"Each state is a slot of its own, megabytes in one piece, in both. {said}.",
        "table": table.drop(columns=["group", "row", "no slower"], errors="ignore").rename(columns=units),
    }


def layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """KV / VK of production kernels in every operation."""
    return production.layouts(rows).dropna(axis=1, how="all")


def verified(rows: pd.DataFrame) -> str:
    """What verify saves over decoding the draft token by token."""
    table = production.compared(rows, "verify", names.OURS, names.TOKENS)
    if table.empty:
        return "no chain of draft tokens was measured both ways."
    parts = [
        f"{line['gate']}, batch {line['batch']}, {line['T']} tokens ×{line['ratio']:.2f}"
        for _, line in table.iterrows()
    ]
    return (
        f"by decode and copies of the states a chain takes so many times as long as by our verify: {'; '.join(parts)}."
    )


def extend(rows: pd.DataFrame) -> Drawing:
    """fla-core's chunked kernels over ours, by prefill."""
    table = production.against_best(rows, "extend")
    if table.empty:
        return "no library was timed beside the lab's extend: `pip install labkit[peers]` brings those that there are."
    fig = figures.ratios(
        table, "prefill", "ratio", "low", "high", group="gate", verdict="verdict",
        xlabel="time fla-core / time ours (above 1: ours faster)", title="Extend, sequences x tokens",
    )  # fmt: skip
    said = f"Ours is {counted(table['verdict'])} of {len(table)} cases"
    return {
        "fig": fig,
        "alt": f"Ratios of fla-core's time over ours, by prefill. {said}.",
        "caption": f"bf16 inputs, fp32 states; fla-core in the faster of its layouts. {said}.",
        "table": table.drop(columns=["ours, % of in-place", "no slower"], errors="ignore"),
    }


def extend_errors(rows: pd.DataFrame) -> str:
    """Is ours as accurate as fla-core's?"""
    table = production.extend_errors(rows)
    if table.empty:
        return "no library's error was measured beside ours."
    ratio = table["ours / fla"]
    return (
        f"relative error against float64 on the same inputs: ours {table['error, ours'].min():.1e} to "
        f"{table['error, ours'].max():.1e}, which is {ratio.min():.2f} to {ratio.max():.2f} times fla-core's."
    )


def first_token(rows: pd.DataFrame) -> str:
    """What the layout could do for the first token: its gain for a whole extend, by the share of the extends."""
    table = production.compared(rows, "extend", names.OURS, names.OURS_KV)
    whole = production.first_token(rows)
    if whole.empty:
        return "extend was not measured in both layouts."
    said = "; ".join(f"{gate} {_span(ratio, 3)}" for gate, ratio in table.groupby("gate", sort=False)["ratio"])
    return (
        f"our whole extends, time KV / VK: {said}. Were all else in a prefill of {QWEN3_NEXT.name} as fast as the GPU "
        f"can multiply, extends would take {_span(whole['share %'], 0)} % of it, and the layout bring the first token "
        f"{_span(whole['earlier %'], 1)} % earlier; {TTFT_PERCENT:.1f} % were published."
    )


def occupancy(rows: pd.DataFrame) -> str:
    """Do more CTAs an SM go with less time of the chunk-state kernel?"""
    table = production.chunk_state_layouts(rows)
    if table.empty:
        return "the chunk-state kernel was not measured in both layouts."
    more = table[table["CTAs an SM, VK"] > table["CTAs an SM, KV"]]
    equal = table[table["CTAs an SM, VK"] == table["CTAs an SM, KV"]]
    said = []
    for some, words in ((more, "[V, K] has more CTAs an SM"), (equal, "both layouts have as many CTAs an SM")):
        if len(some):
            said.append(f"{words} in {len(some)} of {len(table)} pairs, time KV / VK {_span(some['ratio'])}")
    if more.empty:
        said.append("so no gain of a layout comes from more CTAs here: in our kernel the tile decides how many")
    return f"{'; '.join(said)}."


def chunk_states(rows: pd.DataFrame) -> pd.DataFrame:
    """The chunk-state kernel by form, tile and prefill."""
    units = {"us": "µs", "shared_bytes": "shared bytes", "ctas_per_sm": "CTAs an SM"}
    return production.chunk_states(rows).rename(columns=units)


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of the state in a decode step, and what the wide tile's ratio would then give, by model and context."""
    return tables.shares(rows, WIDE, (256, CONTEXT, 32768), list(VLLM_TABLE))


def drift(rows: pd.DataFrame) -> Drawing:
    """Error of the state along the tokens."""
    table = production.drift(rows)
    table = table[table["gate"] == "GDN"] if "GDN" in set(table["gate"]) else table
    if table.empty:
        return "the drift was not measured."
    fig = figures.lines(
        table, "tokens", "state error", "variant", panel="state", logx=True, logy=True,
        xlabel="tokens decoded", ylabel="relative RMSE of the state (log)", title="Does the error grow?",
    )  # fmt: skip
    last = table[table["tokens"] == table["tokens"].max()]
    said = "; ".join(
        f"{line['variant']}, {line['state']}: state {line['state error']:.1e}, output {line['output error']:.1e}"
        for _, line in last.iterrows()
    )
    return {
        "fig": fig,
        "alt": f"Lines of the state's error against tokens decoded, by layout and state type. {said}.",
        "caption": f"Against float64 on the same inputs. After {last['tokens'].iloc[0]} tokens: {said}.",
        "table": table,
    }
