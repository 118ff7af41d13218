"""Figures and tables of the machine page, each made from the rows of one GPU."""

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.bench import ledger
from labkit.bench.records import expanded
from labkit.bench.spec import CONTROL
from labkit.bench.tables import where
from labkit.bench.verdict import BAND, aa
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import filled
from labkit.studies.machine.study import MATRIX, MEMORY, SANITY_MIB

NAMES = {"read": "read only", "in_place": "in place", "copy": "copy"}


def _usable(rows: pd.DataFrame, op: str, kinds: Sequence[str] = ()) -> pd.DataFrame:
    """The usable rows of an operation, of some kinds of it; without any, the columns of the cases are missing too."""
    table = rows[(rows["op"] == op) & rows["ok"] & (rows["variant"] != CONTROL)]
    if kinds:
        table = table[[json.loads(case)["what"] in kinds for case in table["case"]] if len(table) else slice(None)]
    table = expanded(table)
    return table.assign(tbs=table["floor_bytes"] / table["us"] / 1e6, tflops=table["floor_flops"] / table["us"] / 1e6)


def memory_rates(rows: pd.DataFrame) -> pd.DataFrame:
    """TB/s of every memory ceiling: the faster of PyTorch and the plain Triton kernel, by size and cache."""
    table = _usable(rows, "ceiling", MEMORY)
    if table.empty:
        return table
    table = where(table, role="ceiling")
    table = table.loc[table.groupby(["what", "mib", "cache"])["us"].idxmin()]
    table = table.assign(kind=table["what"].map(NAMES), by=table["variant"])
    return table[["kind", "mib", "cache", "tbs", "us", "by"]].sort_values(["kind", "mib", "cache"], ignore_index=True)


def memory_curve(rows: pd.DataFrame) -> Drawing:
    """Rate against size, cold beside hot: the step in the hot panel is the L2."""
    table = memory_rates(rows)
    if table.empty:
        return "no reading, updating or copying of memory was measured."
    best = table[table["cache"] == "cold"].groupby("kind")["tbs"].max()
    ends = ", ".join(f"{kind} {rate:.2f} TB/s" for kind, rate in best.items())
    return drawing(
        plots.lines, table, "mib", "tbs", "kind", panel="cache", logx=True, xlabel="size of the tensor, MiB",
        ylabel="TB/s, all bytes moved", title="What memory gives, by size", said=f"Best cold rates: {ends}",
        alt="Lines of bandwidth against tensor size, cold and hot.",
        caption="Bytes read and written per second. Hot buffers are the same in every call.",
    )  # fmt: skip


def matrix_rates(rows: pd.DataFrame) -> Drawing:
    """Matrix products through the vendor's library, by dtype and size."""
    table = _usable(rows, "ceiling", MATRIX)
    if table.empty:
        return "no matrix product was measured."
    table = table.assign(size=[f"{n} × {n}" for n in table["n"].astype(int)], order=table["what"].map(MATRIX.index))
    table = table.sort_values(["order", "n"])
    best = ", ".join(f"{what} {rate:.0f}" for what, rate in table.groupby("what", sort=False)["tflops"].max().items())
    return drawing(
        plots.bars, table, "what", "tflops", "size", xlabel="operands", ylabel="TFLOP/s (int8: Top/s)",
        title="What the matrix units give", alt="Bars of matrix throughput by type.", said=f"Best TFLOP/s: {best}",
        caption="Square products of random data through PyTorch; zeros would run faster and mean less.",
        table=["what", "size", "us", "tflops"],
    )  # fmt: skip


def launch_cost(rows: pd.DataFrame) -> Drawing:
    """What one launch costs, inside a graph and from Python."""
    table = _usable(rows, "launch")
    if table.empty:
        return "no launch was measured."
    names = {"Triton": "Triton, empty kernel", "torch": "PyTorch, zero_ of one value"}
    table = table.assign(kernel=table["library"].map(names))
    words = ", ".join(filled(table, "{library} {mode} {us:.2f} µs"))
    return drawing(
        plots.bars, table, "mode", "us", "kernel", xlabel="how it is launched", ylabel="µs a launch",
        title="What a launch costs", alt=f"Bars of launch cost: {words}.",
        caption=f"Time per launch in a row of many: {words}. Eager is bound by the host, a graph by the GPU.",
        table=["kernel", "mode", "us"],
    )  # fmt: skip


def host_copies(rows: pd.DataFrame) -> Drawing:
    """Host-to-device copies, small and large, from pageable and from pinned memory."""
    table = _usable(rows, "copy")
    if table.empty:
        return "no copy from the host was measured."
    table = table.sort_values(["bytes", "memory"])
    names = [f"{b / 2**20:.0f} MiB" if b >= 2**20 else f"{b / 2**10:.0f} KiB" for b in table["bytes"]]
    table = table.assign(gbs=1e3 * table["tbs"], size=names)
    words = ", ".join(filled(table, "{size} {memory} {us:.1f} µs"))
    return drawing(
        plots.bars, table, "size", "us", "memory", logy=True, xlabel="bytes a copy", ylabel="µs a copy (log)",
        title="What a copy to the GPU costs", alt=f"Bars of copy time: {words}.",
        caption=f"Copies in a row from Python: {words}. The small ones cost their launch, the large ones the bus.",
        table=["size", "memory", "us", "gbs"],
    )  # fmt: skip


def clocks(rows: pd.DataFrame) -> Drawing:
    """SM clock read after each block of timing, by kind of work."""
    table = _usable(rows, "ceiling")
    if table.empty:
        return "no memory or matrix work was measured."
    samples = table[["what", "sm_mhz"]].explode("sm_mhz").astype({"sm_mhz": float})
    stats = samples.groupby("what", sort=False)["sm_mhz"].agg(["min", "median", "max"]).reset_index()
    reasons = sorted({reason for listed in rows["throttled"] for reason in listed if reason})
    said = f"Throttle reasons seen: {', '.join(reasons)}" if reasons else "No throttle reason was seen"
    return drawing(
        plots.bars, stats.assign(work="SM clock"), "what", "median", "work", low="min", high="max",
        xlabel="kind of work", ylabel="SM clock, MHz", title="Clocks under load", said=said,
        alt="Bars of the SM clock by kind of work.",
        caption="Median SM clock over all blocks, with lowest and highest.", table=stats,
    )  # fmt: skip


def ceilings(rows: pd.DataFrame) -> pd.DataFrame:
    """The best cold rate of each kind: what percentages and predictions in the other studies are of."""
    table = _usable(rows, "ceiling")
    table = table[(table["cache"] == "cold") & (table["role"] == "ceiling")]
    if table.empty:
        return table
    found = []
    for what, group in table.groupby("what", sort=False):
        column, form = "tflops", "{tflops:.0f} TFLOP/s (n = {n:.0f}, {variant})"
        if what in MEMORY:
            column, form = "tbs", "{tbs:.2f} TB/s ({mib:.0f} MiB, {variant})"
        top = group.loc[group[column].idxmax()]
        found.append({"ceiling": NAMES.get(what, f"matrix, {what}"), "best cold rate": form.format(**top)})
    return pd.DataFrame(found)


def sanity(rows: pd.DataFrame) -> pd.DataFrame:
    """Our timing of one in-place multiply beside `triton.testing.do_bench` of the same call."""
    table = _usable(rows, "ceiling", ["in_place"])
    if table.empty:
        return table
    both = ("torch", "torch, timed by do_bench")
    table = where(table, mib=SANITY_MIB, cache="cold", variant=both).sort_values("variant")
    shown = table[["variant", "mode", "us"]].set_axis(["timed by", "mode", "median µs"], axis=1)
    spread = {f"{q}th percentile µs": [np.percentile(ns, q) / 1e3 for ns in table["samples_ns"]] for q in (5, 95)}
    return shown.assign(**spread)


def noise(rows: pd.DataFrame) -> pd.DataFrame:
    """The A/A control: one variant timed twice with its own buffers; its interval is what this machine resolves."""
    found = []
    for names, group in rows.groupby(["op", "cache", "mode"]):
        widths = [aa(case).half_width for _, case in group.groupby("case")]
        widths = [width for width in widths if np.isfinite(width)]
        if widths:
            inside = sum(width <= BAND for width in widths)
            found.append((*names, len(widths), inside, 100 * float(np.median(widths)), 100 * max(widths)))
    columns = ["op", "cache", "mode", "cases", "within ±1 %", "median ± %", "widest ± %"]
    return pd.DataFrame(found, columns=columns)


def resolution(rows: pd.DataFrame) -> str:
    """One sentence: what the A/A control says."""
    table = noise(rows)
    chosen = where(table, op="ceiling", cache="cold")
    inside, cases = int(chosen["within ±1 %"].sum()), int(chosen["cases"].sum())
    ledger.note("resolution", {"inside": inside, "cases": cases})
    if not cases:
        return "no memory or matrix work was timed twice, so nothing says how far to trust a difference."
    return f"the A/A interval lies within ±1 % in {inside} of {cases} cold ceiling cases."


ledger.watch(__name__)
