"""Figures and tables of the machine page, each made from the rows of one GPU."""

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.bench.records import expanded
from labkit.bench.spec import CONTROL
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
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
    table = table[table["role"] == "ceiling"]
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
    cost = {(lib, mode): us for lib, mode, us in zip(table["library"], table["mode"], table["us"], strict=True)}
    words = ", ".join(f"{library} {mode} {us:.2f} µs" for (library, mode), us in cost.items())
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
    table = table.assign(gbs=1e3 * table["tbs"], size=[_size(b) for b in table["bytes"]])
    words = ", ".join(
        f"{s} {m} {us:.1f} µs" for s, m, us in zip(table["size"], table["memory"], table["us"], strict=True)
    )
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
        memory = what in MEMORY
        top = group.loc[group["tbs" if memory else "tflops"].idxmax()]
        rate = f"{top['tbs']:.2f} TB/s" if memory else f"{top['tflops']:.0f} TFLOP/s"
        at = f"{top['mib']:.0f} MiB" if memory else f"n = {top['n']:.0f}"
        found.append(
            {"ceiling": NAMES.get(what, f"matrix, {what}"), "best cold rate": f"{rate} ({at}, {top['variant']})"}
        )
    return pd.DataFrame(found)


def sanity(rows: pd.DataFrame) -> pd.DataFrame:
    """Our timing of one in-place multiply beside `triton.testing.do_bench` of the same call."""
    table = _usable(rows, "ceiling", ("in_place",))
    if table.empty:
        return table
    table = table[(table["mib"] == SANITY_MIB) & (table["cache"] == "cold")]
    table = table[table["variant"].isin(["torch", "torch, timed by do_bench"])].sort_values("variant")
    spread = [np.percentile(samples, [5, 95]) / 1e3 for samples in table["samples_ns"]]
    return pd.DataFrame(
        {"timed by": table["variant"], "mode": table["mode"], "median µs": table["us"]}
        | {"5th percentile µs": [low for low, _ in spread], "95th percentile µs": [high for _, high in spread]}
    )


def noise(rows: pd.DataFrame) -> pd.DataFrame:
    """The A/A control: one variant timed twice with its own buffers; its interval is what this machine resolves."""
    from labkit.bench.verdict import BAND, aa

    found = []
    for (op, cache, mode), group in rows.groupby(["op", "cache", "mode"]):
        widths = [aa(case).half_width for _, case in group.groupby("case") if CONTROL in set(case["variant"])]
        widths = [width for width in widths if np.isfinite(width)]
        if widths:
            inside = sum(width <= BAND for width in widths)
            line = {"median ± %": 100 * float(np.median(widths)), "widest ± %": 100 * max(widths)}
            found.append({"op": op, "cache": cache, "mode": mode, "cases": len(widths), "within ±1 %": inside} | line)
    columns = ["op", "cache", "mode", "cases", "within ±1 %", "median ± %", "widest ± %"]
    return pd.DataFrame(found, columns=columns)


def resolution(rows: pd.DataFrame) -> str:
    """One sentence: what the A/A control says."""
    table = noise(rows)
    chosen = table[(table["op"] == "ceiling") & (table["cache"] == "cold")]
    inside, cases = int(chosen["within ±1 %"].sum()), int(chosen["cases"].sum())
    if not cases:
        return "no memory or matrix work was timed twice, so nothing says how far to trust a difference."
    return f"the A/A interval lies within ±1 % in {inside} of {cases} cold ceiling cases."


def _size(count: float) -> str:
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
