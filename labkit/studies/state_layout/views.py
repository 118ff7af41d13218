"""Figures, tables and sentences on the grid of tiles in both layouts, each made from the rows of one GPU."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import where
from labkit.bench.verdict import counted
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import faster, filled, gains, span
from labkit.shapes import QWEN3_NEXT
from labkit.studies.state_layout import tables
from labkit.studies.state_layout.claims import CONTEXT, FULL, NARROW, VLLM_TABLE, WIDE, vllm_estimate, vllm_heads
from labkit.studies.state_layout.variants import CEILING, LAYOUTS, TILES, variant_name

MAIN = [variant_name(layout, tile) for tile in (NARROW, WIDE) for layout in LAYOUTS]
INTERVAL = ["ratio", "low", "high"]
JUDGED = [*INTERVAL, "noise", "verdict"]
ACCESS = {"sectors": "sectors a request", "lines": "lines a request"}
FASTER = "× faster with [V, K]"
NOTHING = "no usable rows of both layouts at these shapes."
LAYOUT_NAMES = {"KV": "[K, V]", "VK": "[V, K]"}
PACKAGES = {"ours": "this lab", "fla": "fla-core", "sglang": "SGLang", "vllm": "vLLM", "flashinfer": "FlashInfer"}
DISPLAY = {rf"^{name}\b": shown for name, shown in PACKAGES.items()} | {  # of variants, whose names the rows hold
    r"\bKV\b": LAYOUT_NAMES["KV"], r"\bVK\b": LAYOUT_NAMES["VK"], r",? BV=": ", tile ", r"^BV=": "tile ",
    r", 1 warp\b": "", r"\bfolded\b": "one pass",
}  # fmt: skip


def named(variant: str) -> str:
    """A variant as pages show it: "[K, V], tile 8" for "KV BV=8, 1 warp", "SGLang 0.5.9 [K, V]"."""
    for pattern, shown in DISPLAY.items():
        variant = re.sub(pattern, shown, variant)
    return variant


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
    # Last, so that the kernels have the same colours as in the figures without it.
    table = table.sort_values("variant", key=lambda names: names == CEILING, kind="stable", ignore_index=True)
    table = table.assign(variant=table["variant"].map(named))
    return drawing(
        plots.lines, table, "batch", "us", "variant", panel="state", logx=True, logy=True, xlabel="batch",
        ylabel="µs (log), cold L2", title=f"One decode step of one layer, {table['model'].iloc[0]}",
        alt="Lines of time against batch, by layout and tile, fp32 and bf16 state.",
        caption="Time of one decode step, beside an in-place multiply of the same states.",
        said=f"Batch {table['batch'].max()}: {span(_largest(table)['us'], '{:.0f}')} µs",
        table=["state", "batch", "variant", "us", "percent", "error"],
    )  # fmt: skip


def percent(rows: pd.DataFrame) -> Drawing:
    """Percent of the in-place ceiling of the same run against batch."""
    table = where(_main_shape(tables.times(rows)), variant=MAIN)
    table = table[table["percent"].notna()]
    if table.empty:
        return "no usable rows beside an in-place multiply of the same run."
    table = table.assign(variant=table["variant"].map(named))
    worst = table.loc[table["percent"].idxmin()]
    return drawing(
        plots.lines, table, "batch", "percent", "variant", panel="state", logx=True, xlabel="batch",
        ylabel="% of in-place multiply", title="How near each layout and tile comes to the memory's limit",
        reference=[(100, "in-place multiply")],
        alt="Lines of percent of the in-place multiply against batch, by layout and tile.",
        caption="Rate as a share of an in-place multiply of the same states, in the same run.",
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
    table = table.assign(choice=[named(variant_name("", *choice).strip()) for choice in choices])
    top = table.loc[table["ratio"].idxmax()]
    return drawing(
        plots.ratios, table, "choice", *INTERVAL, group="state", verdict="verdict", xlabel=FASTER,
        title="Every tile and number of warps, at the largest batch",
        alt="Ratios of the two layouts' times with 95 % intervals, by state, tile and warps.",
        caption="Equal tile and warps in both layouts, paired block by block; 95 % intervals; grey band: ±1 %.",
        said=f"Most, at batch {batch}: {faster(top['ratio'])} ({top['state']}, {top['choice']})",
        table=["state", "BV", "warps", *JUDGED], units={"BV": "tile"},
    )  # fmt: skip


def ratio_by_batch(rows: pd.DataFrame) -> Drawing:
    """KV / VK against batch for every tile, one warp."""
    table = where(_main_shape(tables.ratios(rows)), warps=1)
    if table.empty:
        return NOTHING
    table = table.assign(tile="tile " + table["BV"].astype(str))
    top, batches = table.loc[table["ratio"].idxmax()], table["batch"].nunique()
    narrow = top["BV"] == min(TILES) and batches > 1
    return drawing(
        plots.lines, table, "batch", "ratio", "tile", panel="state", low="low", high="high", logx=True,
        xlabel="batch", ylabel=FASTER, reference=[(1, "equal")],
        title="[V, K] gains with narrow tiles and large batches" if narrow else "What the layout is worth, by batch",
        alt="Lines of the ratio of the two layouts' times against batch, by tile and type of state.",
        caption="One kernel, equal tiles in both layouts, one warp a program; 95 % intervals.",
        said=f"Most: {faster(top['ratio'])} ({top['state']}, {top['tile']}, batch {top['batch']})",
        table=["state", "batch", "BV", *INTERVAL, "verdict"], units={"BV": "tile"},
    )  # fmt: skip


def ratio_by_shape(rows: pd.DataFrame) -> Drawing:
    """KV / VK of the narrow tile for every model, at the largest batch that all have."""
    table = where(tables.ratios(rows), warps=1, BV=NARROW)
    if table.empty:
        return NOTHING
    batch = min(group["batch"].max() for _, group in table.groupby("model"))
    table = table[table["batch"] == batch]
    table = table.assign(shape=filled(table, "{model}: {HV} heads, K {K}"))
    return drawing(
        plots.ratios, table, "shape", *INTERVAL, group="state", verdict="verdict", xlabel=FASTER,
        title=f"Every model's shape, tile {NARROW}",
        alt="Ratios of the two layouts' times with the narrow tile, by shape and type of state.",
        caption="Heads: value heads of a layer. The largest batch that was measured of all shapes.",
        said=f"Batch {batch}: {gains(table['ratio'])}", table=["shape", "state", *JUDGED],
    )  # fmt: skip


def prediction_error(rows: pd.DataFrame) -> Drawing:
    """Measured time over the floor: what the bytes alone do not explain."""
    table = where(_main_shape(tables.times(rows)), variant=MAIN)
    table = table[table["predicted_us"].notna()]
    if table.empty:
        return "no kernel shown here has a floor that was stored with its rows."
    table = table.assign(factor=table["us"] / table["predicted_us"], variant=table["variant"].map(named))
    near = f"{100 * (table['factor'].sub(1).abs() <= 0.1).mean():.0f} % of the points lie within 10 %"
    return drawing(
        plots.lines, table, "batch", "factor", "variant", panel="state", logx=True, xlabel="batch",
        ylabel="measured / floor", title="What bytes alone do not explain", reference=[(1, "the floor")],
        alt="Lines of measured time over the floor against batch, by layout and tile.",
        caption="The floor: bytes over the ceiling, and the launch.", said=near,
        table=["state", "batch", "variant", "predicted_us", "us", "factor"], units={"predicted_us": "floor µs"},
    )  # fmt: skip


def end_to_end(rows: pd.DataFrame) -> Drawing:
    """The estimated gain of a whole decode step beside vLLM's published table."""
    parts = [vllm_estimate(rows, tile).assign(series=f"estimate, tile {tile}") for tile in (NARROW, WIDE)]
    parts = [part for part in parts if len(part)]
    if not parts:
        return f"no estimate without fp32 rows of {QWEN3_NEXT.name} at its batches."
    published = pd.DataFrame(VLLM_TABLE.items(), columns=["batch", "gain %"]).assign(series="vLLM 33291, published")
    ends = "; ".join(f"{part['series'].iloc[0].split(', ')[1]}: at most {part['gain %'].max():.1f} %" for part in parts)
    return drawing(
        plots.lines, pd.concat([*parts, published], ignore_index=True), "batch", "gain %", "series", low="low %",
        high="high %", logx=True, xlabel="batch", ylabel="tokens a second, % more",
        title="What it could mean for a whole decode step", reference=[(0, "no change")],
        alt="Estimated end-to-end gain against batch, beside vLLM's five figures.", said=ends,
        caption=f"Estimated by Amdahl's law for {QWEN3_NEXT.name}: NVFP4 weights, fp32 state, {CONTEXT} tokens of "
        f"context. The kernel's ratio was measured with the heads of {vllm_heads(rows)}.",
    )  # fmt: skip


def best(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest variant of each layout in the shape that was timed with every number of warps."""
    table = _main_shape(tables.best(rows)).drop(columns=["HV", "K", "noise", "runs"])
    shown = table.assign(**{name: table[name].map(named) for name in ("best KV", "best VK")})
    units = {f"{what}{layout}{unit}" for layout in LAYOUTS for what, unit in (("best ", ""), ("", " µs"))}
    return shown.rename(columns={name: re.sub("KV|VK", lambda found: LAYOUT_NAMES[found[0]], name) for name in units})


def folded(rows: pd.DataFrame) -> pd.DataFrame:
    """V-first, two passes over the tile against one (folded), in the main shape, one warp."""
    table = _main_shape(tables.folding(rows))[["model", "state", "batch", "BV", *JUDGED]]
    return table.rename(columns={"BV": "tile"})


def folding(rows: pd.DataFrame) -> dict[str, str]:
    """Does one pass pay at batch 1, and is it worth nothing where the GPU is full? Batches -> what it is worth."""
    table = folded(rows)
    parts = {"batch 1": table[table["batch"] == 1], f"batch {FULL} and more": table[table["batch"] >= FULL]}
    return {name: _judged(some) for name, some in parts.items() if len(some)}


def _judged(table: pd.DataFrame) -> str:
    """What pairs come to: "1.02× slower to 1.04× faster; faster in 3 of 6 cases"."""
    return f"{gains(table['ratio'])}; {counted(table['verdict'])} of {len(table)} cases"


def by_state(table: pd.DataFrame) -> str:
    """ "fp32: 1.19× to 1.46× faster; bf16: 1.98× to 2.31× faster"."""
    return "; ".join(f"{state}: {gains(some['ratio'])}" for state, some in table.groupby("state", sort=False))


def equal_tiles(rows: pd.DataFrame) -> dict[str, str]:
    """What the layout is worth to one kernel with the GPU full: at equal tiles, and with the best tile of each."""
    same = where(tables.ratios(rows), warps=1)
    parts = {f"the lab's plain kernel, tile {tile}": where(same, BV=tile) for tile in (NARROW, WIDE)}
    parts["the same, each layout with its best tile"] = _main_shape(tables.best(rows))
    full = {name: some[some["batch"] >= FULL] for name, some in parts.items() if len(some)}
    return {name: by_state(some) for name, some in full.items() if len(some)}


def spilled(rows: pd.DataFrame) -> pd.DataFrame:
    """Which kernels spill registers to memory, how many bytes a thread, and what that costs."""
    table = tables.times(rows)
    table = table[table["evidence"] != "{}"]
    table = table.assign(spill=[json.loads(text).get("spill_bytes", 0) for text in table["evidence"]])
    slower = table["us"] / table.groupby(["op", "case"])["us"].transform("min")
    keys = {"variant": "kernel", "K": "K", "state": "state", "spill": "bytes a thread"}
    some = table.assign(slower=slower)[table["spill"] > 0]
    found = [
        dict(zip(keys.values(), key, strict=True)) | {"time over the fastest": span(group["slower"], "{:.1f}")}
        for key, group in some.assign(variant=some["variant"].map(named)).groupby(list(keys))
    ]
    return pd.DataFrame(found, columns=[*keys.values(), "time over the fastest"])


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
    wide.columns = [f"{what}, {LAYOUT_NAMES[layout]}" if layout else what for what, layout in wide.columns]
    return tables.ordered(wide, ["state", "BV"]).rename(columns={"BV": "tile"})


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
    table = tables.ordered(pd.DataFrame(found), ["state", "BV", "layout"]).rename(columns={"BV": "tile"})
    return table.assign(layout=table["layout"].map(LAYOUT_NAMES))


def hot(rows: pd.DataFrame) -> pd.DataFrame:
    """KV / VK where the states of a batch stay in the L2, one warp."""
    table = _main_shape(where(tables.ratios(rows, "hot"), warps=1, BV=[NARROW, WIDE]))
    return table[["model", "state", "batch", "BV", *JUDGED]].rename(columns={"BV": "tile"})


def lines_and_ratio(rows: pd.DataFrame) -> pd.DataFrame:
    """Lines a request in both layouts beside the ratio of their times, Qwen3-Next's shape at the largest batch."""
    ratio = _largest(where(_main_shape(tables.ratios(rows)), warps=1)).rename(columns={"BV": "tile"})
    texts = [f"{mid:.2f} [{low:.2f}, {high:.2f}]" for mid, low, high in ratio[INTERVAL].to_numpy()]
    shown = ratio[["state", "tile"]].assign(**{FASTER: texts})
    access = where(tables.state_access(rows), warps=1, folded=False, K=set(ratio["K"]))
    if access.empty:
        return shown
    wide = _by_layout(access.rename(columns=ACCESS), list(ACCESS.values()))
    return tables.ordered(wide.merge(shown, on=["state", "tile"], how="right"), ["state", "tile"])


ledger.watch(__name__)
