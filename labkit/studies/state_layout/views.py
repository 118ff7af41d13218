"""Figures, tables and sentences on the grid of tiles in both layouts, each made from the rows of one GPU."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.bench.verdict import counted
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import filled, span
from labkit.shapes import QWEN3_NEXT
from labkit.studies.state_layout import tables
from labkit.studies.state_layout.claims import CONTEXT, FULL, NARROW, VLLM_TABLE, WIDE, vllm_estimate, vllm_heads
from labkit.studies.state_layout.variants import CEILING, LAYOUTS, TILES, variant_name

MAIN = [variant_name(layout, tile) for tile in (NARROW, WIDE) for layout in LAYOUTS]
INTERVAL = ["ratio", "low", "high"]
JUDGED = [*INTERVAL, "noise", "verdict"]
ACCESS = {"sectors": "sectors a request", "lines": "lines a request"}
FASTER = "time KV / time VK (above 1: [V, K] faster)"
NOTHING = "no usable rows of both layouts at these shapes."


def _main_shape(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of Qwen3-Next's shape, or of the first shape shown where that was left out."""
    if table.empty:
        return table
    name = QWEN3_NEXT.name if QWEN3_NEXT.name in set(table["model"]) else table["model"].iloc[0]
    keys = [name for name in ("state", "variant", "batch", "BV", "warps") if name in table]
    return tables.ordered(table[table["model"] == name], keys)


def _largest(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the largest batch."""
    return table[table["batch"] == table["batch"].max()]


def times(rows: pd.DataFrame) -> Drawing:
    """µs against batch, both layouts at the narrow and the wide tile, with the in-place multiply."""
    table = where(_main_shape(tables.times(rows)), variant=[*MAIN, CEILING])
    if table.empty:
        return NOTHING
    model = table["model"].iloc[0]
    # Last, so that the kernels have the same colours as in the figures without it.
    table = table.sort_values("variant", key=lambda names: names == CEILING, kind="stable", ignore_index=True)
    ends = "; ".join(filled(_largest(table), "{variant}, {state}: {us:.0f} µs"))
    return drawing(
        plots.lines, table, "batch", "us", "variant", panel="state", logx=True, logy=True, xlabel="batch",
        ylabel="µs (log), cold L2", title=f"One decode step of one layer, {model}",
        alt=f"Lines of time against batch, {model}, fp32 and bf16 state. At batch {table['batch'].max()}: {ends}.",
        caption=f"Time of one decode step, {model}. Beside it an in-place multiply of the same states.",
        table=["state", "batch", "variant", "us", "percent", "error"],
    )  # fmt: skip


def percent(rows: pd.DataFrame) -> Drawing:
    """Percent of the in-place ceiling of the same run against batch."""
    table = where(_main_shape(tables.times(rows)), variant=MAIN)
    table = table[table["percent"].notna()]
    if table.empty:
        return "no usable rows beside an in-place multiply of the same run."
    worst = table.loc[table["percent"].idxmin()]
    return drawing(
        plots.lines, table, "batch", "percent", "variant", panel="state", logx=True, xlabel="batch",
        ylabel="% of in-place multiply", title=f"How near the memory's limit, {table['model'].iloc[0]}",
        reference=[(100, "in-place multiply")],
        alt="Lines of percent of the in-place ceiling against batch, by layout and tile.",
        caption="Rate of each kernel as a share of an in-place multiply of the same states, same run.",
        said=f"Lowest: {worst['percent']:.0f} % ({worst['variant']}, {worst['state']}, batch {worst['batch']})",
        table=["state", "batch", "variant", "percent", "us", "tbs"],
    )  # fmt: skip


def ratio_by_tile(rows: pd.DataFrame) -> Drawing:
    """KV / VK against tile and warps at the largest batch."""
    table = _main_shape(tables.ratios(rows))
    if table.empty:
        return NOTHING
    table, batch = _largest(table), table["batch"].max()
    choices = zip(table["BV"], table["warps"], strict=True)
    table = table.assign(tile=[variant_name("", *choice).strip() for choice in choices])
    said = "; ".join(filled(table, "{state}, {tile}: {ratio:.2f}"))
    return drawing(
        plots.ratios, table, "tile", *INTERVAL, group="state", verdict="verdict", xlabel=FASTER,
        title=f"What the layout is worth, by tile (batch {batch})",
        alt=f"Ratios KV/VK with 95 % intervals: {said}.",
        caption="Ratio of times at equal tile and warps, paired block by block, 95 % intervals; grey band: ±1 %.",
        table=["state", "BV", "warps", *JUDGED],
    )  # fmt: skip


def ratio_by_batch(rows: pd.DataFrame) -> Drawing:
    """KV / VK against batch for every tile, one warp."""
    table = where(_main_shape(tables.ratios(rows)), warps=1)
    if table.empty:
        return NOTHING
    table = table.assign(tile="BV=" + table["BV"].astype(str))
    top = table.loc[table["ratio"].idxmax()]
    return drawing(
        plots.lines, table, "batch", "ratio", "tile", panel="state", low="low", high="high", logx=True,
        xlabel="batch", ylabel="time KV / time VK", title="Where the layout matters: batch", reference=[(1, "equal")],
        alt="Lines of KV/VK against batch by tile and state type.",
        caption="The same ratio against batch, one warp a program, 95 % intervals.",
        said=f"Largest: {top['ratio']:.2f} ({top['state']}, {top['tile']}, batch {top['batch']})",
        table=["state", "batch", "BV", *INTERVAL, "verdict"],
    )  # fmt: skip


def ratio_by_shape(rows: pd.DataFrame) -> Drawing:
    """KV / VK of the narrow tile for every model, at the largest batch that all have."""
    table = where(tables.ratios(rows), warps=1, BV=NARROW)
    if table.empty:
        return NOTHING
    batch = min(group["batch"].max() for _, group in table.groupby("model"))
    table = table[table["batch"] == batch]
    table = table.assign(shape=filled(table, "{model} (HV={HV}, K={K})"))
    ends = f"from {table['ratio'].min():.2f} to {table['ratio'].max():.2f}"
    return drawing(
        plots.ratios, table, "shape", *INTERVAL, group="state", verdict="verdict", xlabel=FASTER,
        title=f"Does it hold for other shapes? BV={NARROW}, batch {batch}",
        alt=f"Ratios KV/VK of {len(table)} shapes and state types, {ends}.",
        caption=f"The narrow tile at batch {batch} in every shape: {ends}.", table=["shape", "state", *JUDGED],
    )  # fmt: skip


def prediction_error(rows: pd.DataFrame) -> Drawing:
    """Measured time over the floor: what the bytes alone do not explain."""
    table = where(_main_shape(tables.times(rows)), variant=MAIN)
    table = table[table["predicted_us"].notna()]
    if table.empty:
        return "no kernel shown here has a floor that was stored with its rows."
    table = table.assign(factor=table["us"] / table["predicted_us"])
    near = f"{100 * (table['factor'].sub(1).abs() <= 0.1).mean():.0f} % of the points lie within 10 %"
    return drawing(
        plots.lines, table, "batch", "factor", "variant", panel="state", logx=True, xlabel="batch",
        ylabel="measured / floor", title="What bytes alone do not explain", reference=[(1, "the floor")],
        alt=f"Lines of measured time over the floor; {near}.",
        caption=f"The floor knows bytes, ceilings, launch; {near}.",
        table=["state", "batch", "variant", "predicted_us", "us", "factor"], units={"predicted_us": "floor µs"},
    )  # fmt: skip


def end_to_end(rows: pd.DataFrame) -> Drawing:
    """The estimated gain of a whole decode step beside vLLM's published table."""
    parts = [vllm_estimate(rows, tile).assign(series=f"estimate, BV={tile}") for tile in (NARROW, WIDE)]
    parts = [part for part in parts if len(part)]
    if not parts:
        return f"no estimate without fp32 rows of {QWEN3_NEXT.name} at its batches."
    published = pd.DataFrame(VLLM_TABLE.items(), columns=["batch", "gain %"]).assign(series="vLLM 33291, published")
    ends = "; ".join(f"{part['series'].iloc[0]}: at most {part['gain %'].max():.1f} %" for part in parts)
    return drawing(
        plots.lines, pd.concat([*parts, published], ignore_index=True), "batch", "gain %", "series", low="low %",
        high="high %", logx=True, xlabel="batch", ylabel="tokens a second, % more",
        title="What it could mean for a whole decode step", reference=[(0, "no change")],
        alt=f"Estimated end-to-end gain against batch, beside vLLM's five figures. {ends}.",
        caption=f"Amdahl's law: the state's share of a step's time ({QWEN3_NEXT.name}, NVFP4 weights, fp32 state, "
        f"{CONTEXT} tokens of context) × the kernel ratio measured with the heads of {vllm_heads(rows)}.",
    )  # fmt: skip


def best(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest variant of each layout in the shape that was timed with every number of warps."""
    return _main_shape(tables.best(rows)).drop(columns=["HV", "K", "noise", "runs"])


def folded(rows: pd.DataFrame) -> pd.DataFrame:
    """V-first, two passes over the tile against one (folded), in the main shape, one warp."""
    return _main_shape(tables.folding(rows))[["model", "state", "batch", "BV", *JUDGED]]


def folding(rows: pd.DataFrame) -> str:
    """Does one pass pay at batch 1, and is it worth nothing where the GPU is full?"""
    table = folded(rows)
    small, full = table[table["batch"] == 1], table[table["batch"] >= FULL]
    said = [
        f"{words} one pass is {counted(some['verdict'])} of {len(some)} cases, ratio {span(some['ratio'])}"
        for words, some in (("at batch 1", small), (f"from batch {FULL} on", full))
        if len(some)
    ]
    return ("; ".join(said) or "no pair of one pass and two could be compared") + "."


def summary(rows: pd.DataFrame) -> str:
    """The result in one sentence."""
    table = where(tables.ratios(rows), warps=1)
    parts = [
        f"{state} at BV={tile}: [V, K] is {counted(some['verdict'])} of {len(some)} cases"
        for state in dict.fromkeys(table["state"])
        for tile in (NARROW, WIDE)
        if len(some := where(table, state=state, BV=tile))
    ]
    return ("; ".join(parts) or "no pair of both layouts could be compared") + "."


def at_batches(table: pd.DataFrame) -> str:
    """ "fp32 state: 1.01 at batch 1, …; bf16 state: …"."""
    return "; ".join(
        f"{state} state: " + ", ".join(filled(group, "{ratio:.2f} at batch {batch}"))
        for state, group in table.groupby("state", sort=False)
    )


def free_choice(rows: pd.DataFrame) -> str:
    """What the layout is worth to an engine that chooses its tile and warps, in the shape that was timed with all."""
    table = _main_shape(tables.best(rows))
    if table.empty:
        return "no case has both layouts."
    return (
        f"with the tile and warps that suit each layout best ({table['model'].iloc[0]}), the time of [K, V] over that "
        f"of [V, K] is, with {at_batches(table)}. [V, K] is {counted(table['verdict'])} of {len(table)} cases."
    )


def in_short(rows: pd.DataFrame) -> str:
    """The answer of the page in a few lines."""
    table = where(_main_shape(tables.ratios(rows)), warps=1)
    if table.empty:
        return "no case has both layouts."
    parts = [
        f"at equal tiles of {tile} and batch {table['batch'].max()}: {' and '.join(values)}"
        for tile in (NARROW, WIDE)
        if (values := filled(where(_largest(table), BV=tile), "{ratio:.2f} ({state})"))
    ]
    return free_choice(rows) + (f" {'; '.join(parts).capitalize()}." if parts else "")


def spills(rows: pd.DataFrame) -> str:
    """Which kernels spill registers to memory, and what that costs."""
    table = tables.times(rows)
    table = table[table["evidence"] != "{}"]
    if table.empty:
        return "what the timed kernels were compiled to is not recorded."
    table = table.assign(spill=[json.loads(text).get("spill_bytes", 0) for text in table["evidence"]])
    some = table[table["spill"] > 0]
    if some.empty:
        return "no kernel that was timed spills registers."
    fastest = table.groupby(["op", "case"])["us"].transform("min")
    slower = (table["us"] / fastest)[some.index]
    ledger.note("spills", some[["variant", "K", "state", "spill"]].rename(columns={"spill": "bytes a thread"}))
    ledger.note("spills", slower.rename("times the fastest"))
    kernels = sorted(set(some[["variant", "K", "state", "spill"]].itertuples(index=False, name=None)))
    names = ", ".join(f"{variant} at K={k}, {state} ({spill} bytes a thread)" for variant, k, state, spill in kernels)
    ends = f"{slower.min():.1f} to {slower.max():.1f}"
    return f"registers run out in {names}: these take {ends} times the fastest variant."


def wanted(study: Any, parameters: Mapping[str, Sequence[Any]]) -> list[tuple[Any, str]]:
    """The kernels whose code is shown: both layouts, every tile, one warp, the first model and smallest batch."""
    some = {name: values[:1] if name != "states" else values for name, values in parameters.items()}
    names = [variant_name(layout, tile) for layout in LAYOUTS for tile in TILES]
    return [(case, name) for case in study.cases(some) if case.op == "decode" for name in names]


def access_prediction(accesses: pd.DataFrame) -> pd.DataFrame:
    """The load of the state's tile in each kernel: what one request costs in both layouts."""
    if accesses.empty:
        return accesses
    loads = accesses[accesses["kind"] == "load"]
    loads = loads.loc[loads.groupby(["case", "variant"])["bytes_used"].idxmax()]
    loads = _with_choice(loads).assign(**{"% of fetched bytes used": 100 * loads["efficiency"]})
    return _by_layout(loads.rename(columns=ACCESS), [*ACCESS.values(), "% of fetched bytes used"])


def _with_choice(table: pd.DataFrame) -> pd.DataFrame:
    """Columns state, layout and BV from the case and the variant's name."""
    names = {variant_name(layout, tile): (layout, tile) for layout in LAYOUTS for tile in TILES}
    chosen = pd.DataFrame([names[name] for name in table["variant"]], columns=["layout", "BV"], index=table.index)
    return table.assign(state=[json.loads(case)["state"] for case in table["case"]], **chosen)


def _by_layout(table: pd.DataFrame, values: Sequence[str]) -> pd.DataFrame:
    """One row a state and tile, each value in both layouts side by side."""
    wide = table.pivot(index=["state", "BV"], columns="layout", values=list(values)).reset_index()
    wide.columns = [f"{what}, {layout}" if layout else what for what, layout in wide.columns]
    return tables.ordered(wide, ["state", "BV"])


def compiled_table(evidence: pd.DataFrame) -> pd.DataFrame:
    """What each kernel was compiled to: widths and shuffles, and registers and CTAs an SM for every target."""
    if evidence.empty:
        return evidence
    found = []
    for (state, tile, layout), group in _with_choice(evidence).groupby(["state", "BV", "layout"]):
        one = (group[group["arch"] == 90] if 90 in set(group["arch"]) else group).iloc[0]
        line = {"state": state, "BV": tile, "layout": layout, "shuffles": one["shuffles"]}
        line |= {"128-bit loads": one["loads"].get("128", 0), "spill bytes": group["spill_bytes"].max()}
        line |= {f"registers, sm_{arch}": count for arch, count in zip(group["arch"], group["registers"], strict=True)}
        line |= {f"CTAs/SM, sm_{arch}": n for arch, n in zip(group["arch"], group["ctas_per_sm"], strict=True)}
        found.append(line)
    return tables.ordered(pd.DataFrame(found), ["state", "BV", "layout"])


def hot(rows: pd.DataFrame) -> pd.DataFrame:
    """KV / VK where the states of a batch stay in the L2, one warp."""
    table = _main_shape(where(tables.ratios(rows, "hot"), warps=1, BV=[NARROW, WIDE]))
    return table[["model", "state", "batch", "BV", *JUDGED]]


def lines_and_ratio(rows: pd.DataFrame) -> pd.DataFrame:
    """Lines a request in both layouts beside the ratio of their times, Qwen3-Next's shape at the largest batch."""
    ratio = _largest(where(_main_shape(tables.ratios(rows)), warps=1))
    shown = ratio[["state", "BV", *INTERVAL, "verdict"]]
    access = where(tables.state_access(rows), warps=1, folded=False, K=set(ratio["K"]))
    if access.empty:
        return shown
    wide = _by_layout(access.rename(columns=ACCESS), list(ACCESS.values()))
    return tables.ordered(wide.merge(shown, on=["state", "BV"], how="right"), ["state", "BV"])


ledger.watch(__name__)
