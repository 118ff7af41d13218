"""Figures and sentences of the study, each made from the rows of one GPU; those of chains are in `chain_views`."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import RATIO, cases, compared, tuning_seconds, where, why_not
from labkit.bench.verdict import counted, geometric_mean
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import filled, span
from labkit.studies.gemv_coalescing import chain_views, tables, variants
from labkit.studies.gemv_coalescing.claims import PULL_REQUEST

LADDER_MODEL = "Llama-3.2-1B"
CAPPED = 2.0  # the map's colours end here
SHORT = {
    variants.WIDE_LOADS: "for a warp a row with 16-byte loads (step 4)",
    variants.TUNED: "with tuned rows, warps and tile",
    variants.OURS: "started before the kernel in front has ended, too",
}
WITHIN = 1.02
MANY = 4  # CTAs an SM from which on its look-ups, not one thread's wait, are to explain a step
LADDER_COLUMNS = ["dtype", "shape", "variant", "us", "tbs", "percent"]


def in_short(rows: pd.DataFrame) -> str:
    """What a plain kernel, tuning and dependent launch give against cuBLAS, and against the fastest library."""
    means = {}
    for variant in SHORT:
        table = where(tables.against_cublas(rows, variant), dtype="bf16")
        if len(table := table[table["MB"] >= tables.LARGE_MB]):
            means[variant] = (geometric_mean(table["ratio"]), len(table))
    if variants.OURS not in means:
        return "nothing could be compared with cuBLAS."
    parts = [f"×{means[name][0]:.2f} {words}" for name, words in SHORT.items() if name in means]
    return (
        f"GEMVs in bf16 of {tables.LARGE_MB} MB and more, one after the other, against the better of torch.mv and "
        f"F.linear: {'; '.join(parts)} (geometric means of {means[variants.OURS][1]} shapes). Where other libraries "
        f"ran too, {best_peer(rows)}"
    )


def ladder(rows: pd.DataFrame) -> Drawing:
    """Percent of the read ceiling by step and shape, bf16; its table has every dtype and what a request costs."""
    table = tables.ladder(rows)
    some = table[(table["dtype"] == "bf16") & table["percent"].notna()]
    if some.empty:
        return "no bf16 rows of the ladder beside a known read ceiling."
    best = some.loc[some["percent"].idxmax()]
    said = f"Best: {best['percent']:.0f} % at {best['shape']}, step {best['step']}"
    said += " (more than the machine page's reading kernel reached)" * bool(best["percent"] > 100)
    columns = [*LADDER_COLUMNS, "bits a thread", "sectors a request", "lines a request", tables.RESIDENT]
    return drawing(
        plots.heat, some, "step", "shape", "percent", xlabel="step of the ladder", ylabel="N × K",
        unit="% of the read ceiling", title="The ladder, bf16: percent of the read ceiling", fmt="{:.0f}",
        alt=f"Map of percent of the read ceiling by step of the ladder and shape. {said}.",
        caption=f"Streamed bytes a second, cold L2, the smallest W on top. {said}. Steps are named in the table; — "
        "stands where the code was not taken apart.",
        table=table[columns], units=tables.UNITS,
    )  # fmt: skip


def ladder_of(rows: pd.DataFrame, model: str = LADDER_MODEL) -> Drawing:
    """TB/s against the step of the ladder, a line a shape of one model."""
    table = tables.ladder(rows, model)
    if table.empty:
        return f"no usable rows of {model}."
    best = table.loc[table["tbs"].idxmax()]
    return drawing(
        plots.lines, table, "step", "tbs", "shape", panel="dtype", logy=True,
        xlabel="step of the ladder", ylabel="TB/s of streamed bytes (log)", title=f"The ladder, {model}",
        alt=f"Lines of bandwidth against the step of the ladder, one a shape of {model}.",
        caption="Streamed bytes a second at each step, cold L2.",
        said=f"Fastest: {best['shape']}, {best['dtype']}, step {best['step']}, {best['tbs']:.2f} TB/s",
        table=LADDER_COLUMNS, units=tables.UNITS,
    )  # fmt: skip


def walk(rows: pd.DataFrame) -> Drawing:
    """A thread a row: time of one step along K against the CTAs of an SM, for both ways of storing W."""
    table = tables.pattern(rows)
    if table["CTAs an SM"].isna().all():
        return "the steps 1, 2 and 4 were not measured."
    series = dict(zip((*tables.STEPS, "look-ups, ns"), ("W [N, K]", "W [K, N]", "a line a clock"), strict=True))
    mean = table.groupby(["dtype", "CTAs an SM"], as_index=False)[list(series)].mean().rename(columns=series)
    start = tables.pays_from(table)
    return drawing(
        plots.lines, mean.melt(["dtype", "CTAs an SM"], var_name="series", value_name="ns"), "CTAs an SM", "ns",
        "series", panel="dtype", logx=True, logy=True, xlabel="CTAs on the busiest multiprocessor",
        ylabel="time / K, ns (log)", title="A thread a row: what one step along K takes",
        alt="Lines of time over K against CTAs a multiprocessor for W stored both ways.",
        caption=f"Mean over the shapes with as many CTAs of {variants.THREADS} rows, cold. A line a clock: "
        f"{variants.THREADS} look-ups a CTA at the clock that was read.",
        said=f"Lanes side by side {f'pay from N = {start} on' if start else 'do not pay at the tallest W'}",
        table=table,
    )  # fmt: skip


def why_not_32(rows: pd.DataFrame) -> str:
    """What limits step 1, and what step 2 changes of it."""
    table = tables.pattern(rows)
    table = table[table["look-ups, ns"].notna()]
    if table.empty:
        return "the steps 1, 2 and 4 were not measured, or not on which GPU."
    one, many = table[table["CTAs an SM"] == 1], table[table["CTAs an SM"] >= MANY]
    walk, turned = tables.STEPS
    said = [f"step 4 is {span(table['with width'], '{:.0f}')} times as fast as step 1"]
    if len(one):
        taken = ", ".join(
            f"{span(part[walk], '{:.0f}')} ns with W stored [N, K] and "
            f"{span(part[turned], '{:.0f}')} ns with [K, N] in {dtype}"
            for dtype, part in one.groupby("dtype")
        )
        said.append(
            f"with one CTA a multiprocessor, up to {one['N'].max()} rows, a step along K takes {taken}, of "
            f"which look-ups are {one['look-ups, ns'].mean():.0f} ns. The rest is, we think, waiting: a thread has "
            f"only its own few loads under way, and with [N, K] the next are in a line that it has asked for already"
        )
    if len(many):
        said.append(
            f"with {MANY} CTAs and more, [N, K] takes {span(many[walk] / many['look-ups, ns'])} times as long as "
            f"looking up 32 lines a request at one a clock"
        )
    # The tallest W in two types: if look-ups are the limit, twice the bytes take the same time.
    both = table.pivot_table(index=["N", "K"], columns="dtype", values=walk).reindex(columns=["bf16", "fp32"])
    form = "At {N} × {K} it takes {bf16:.0f} ns in bf16 and {fp32:.0f} ns in fp32, twice the bytes"
    said += filled(both.dropna().reset_index().tail(1), form)
    start, last = tables.pays_from(table), table.loc[table["N"].idxmax()]
    said.append(
        f"so the pattern alone pays {f'from {start} rows on' if start else 'nowhere to the end'}, and at {last['N']} "
        f"rows it gives ×{last['pattern alone']:.1f} of ×{last['with width']:.1f}"
    )
    return ". ".join(f"{sentence[0].upper()}{sentence[1:]}" for sentence in said) + "."


def cublas(rows: pd.DataFrame) -> Drawing:
    """cuBLAS over the production GEMV at every shape."""
    table = where(tables.against_cublas(rows), dtype="bf16")
    if table.empty:
        return "no shape has both cuBLAS and the production GEMV."
    table = table.assign(shape=tables.shapes(table))
    least, most = filled(_ends(table), "{ratio:.2f} at {shape}")
    known = table["allowed µs"].notna()
    said = f"Least: {least}; most: {most}"
    said += f"; {table['within'].sum()} of {known.sum()} within the limit" * bool(known.any())
    columns = ["shape", "MB", "cuBLAS by", "cuBLAS µs", "ours µs", "read µs", "ours TB/s", "allowed µs", *RATIO]
    return drawing(
        plots.ratios, table, "shape", "ratio", "low", "high", verdict="verdict",
        xlabel="time cuBLAS / time production GEMV (above 1: ours faster)", title="Against cuBLAS, one GEMV, bf16",
        alt=f"Ratios of cuBLAS's time over the production GEMV's, {len(table)} shapes. {said}.",
        caption=f"The better of torch.mv and F.linear. {said}. Limit: bytes at the ceiling, an empty kernel, 1 µs.",
        table=columns,
    )  # fmt: skip


def beyond_limit(rows: pd.DataFrame) -> str:
    """Which bf16 shapes take longer than the limit of `cublas`, beside reading their weights."""
    table = where(tables.against_cublas(rows), dtype="bf16").dropna(subset=["allowed µs", "read µs"])
    if table.empty:
        return "no shape has a known limit and was read in the same run."
    beyond = table[~table["within"].astype(bool)]
    if beyond.empty:
        return f"all {len(table)} bf16 shapes are within the limit."
    longer = beyond["ours µs"] / beyond["allowed µs"]
    most = beyond.loc[longer.idxmax()]
    return (
        f"{len(beyond)} of {len(table)} bf16 shapes take longer than the limit, at most {longer.max() - 1:.1%} longer "
        f"({most['N']} × {most['K']}). At {(beyond['read µs'] > beyond['allowed µs']).sum()} of these a kernel that "
        f"only reads W takes longer too (the limit's ceiling is the machine page's, from another run). The production "
        f"GEMV reaches {span(beyond['read µs'] / beyond['ours µs'], '{:.0%}')} of that kernel's speed there."
    )


steps = tables.steps  # what each step is worth, gains and losses


def losses(rows: pd.DataFrame) -> str:
    """The steps that do not pay."""
    table = tables.steps(rows)
    table = table[table["mean ratio"] < 1]
    if table.empty:
        return "every step that was measured pays on average."
    form = "{step} (×{mean ratio:.2f} over {over}; slower in {slower}, faster in {faster} of {cases})"
    return f"on average these do not pay here: {'; '.join(filled(table, form))}."


def peers(rows: pd.DataFrame) -> pd.DataFrame:
    """µs of the libraries at the shapes where all were asked."""
    us = tables.by_variant(rows)
    wanted = [name for name in (*variants.LIBRARY, *variants.OTHERS, variants.TUNED, variants.OURS) if name in us]
    asked = [name for name in variants.OTHERS if name in us]
    return us[wanted].dropna(subset=asked, how="all").reset_index() if asked else pd.DataFrame()


def best_peer(rows: pd.DataFrame) -> str:
    """The fastest of all libraries against the production GEMV, and against the same choice launched plainly."""
    table = peers(rows)
    libraries = [name for name in (*variants.LIBRARY, *variants.OTHERS) if name in table]
    if table.empty or variants.OURS not in table:
        return "no other library was timed beside the production GEMV."
    best = table[libraries].min(axis=1)
    ratios = {name: (best / table[name]).dropna() for name in (variants.OURS, variants.TUNED) if name in table}
    said = [f"{geometric_mean(ratio):.2f} times as long as {name}" for name, ratio in ratios.items() if len(ratio)]
    names, taken = ", ".join(libraries), " and ".join(said)
    return f"the fastest of {names} at each of these {len(table)} shapes takes {taken} (geometric means)."


def engines(rows: pd.DataFrame) -> str:
    """How long each engine's own kernels take beside the production GEMV and cuBLAS, or why they were not measured."""
    us, said = tables.by_variant(rows), []
    for engine, names in variants.ENGINES.items():
        known = [name for name in names if name in us]
        said += [_engine(us, name) for name in known] or [f"{engine}'s own: {why_not(rows, names)}"]
    return f"{'; '.join(said)}."


def _engine(us: pd.DataFrame, name: str) -> str:
    """Geometric means, and the least and largest ratio."""
    beside = {"ours": [variants.OURS], "the better of cuBLAS's callers": list(variants.LIBRARY)}
    ratios = {words: (us[name] / us.reindex(columns=some).min(axis=1)).dropna() for words, some in beside.items()}
    parts = [f"{geometric_mean(ratio):.2f} × {words} ({span(ratio)})" for words, ratio in ratios.items() if len(ratio)]
    return f"{name} takes, at {us[name].count()} shapes, {', '.join(parts) or 'a time that nothing is beside'}"


def rows_map(rows: pd.DataFrame) -> Drawing:
    """Time of each number of rows over the best."""
    table = tables.rows_map(rows)
    if table.empty:
        return "the numbers of rows were not measured."
    near = table[table["over best"] <= WITHIN].groupby("rows")["shape"].nunique()
    ledger.note("near", near.rename("shapes"))
    counts = {int(rows): near.get(rows, 0) for rows in sorted(table["rows"].unique())}
    said = ", ".join(f"{rows} row{'s' * (rows > 1)} at {shapes}" for rows, shapes in counts.items())
    said = f"within {WITHIN - 1:.0%} of that, of {table['shape'].nunique()} shapes: {said}"
    return drawing(
        plots.heat, table, "rows", "shape", "over best", xlabel="rows a program", ylabel="N × K",
        title="Rows a program: time over the best number's", fmt="{:.2f}", said=said,
        alt="Map of time over the best, by rows and shape;",
        caption="bf16, all else as the rule has it; 1.00 is the least time measured, noise included;",
        table=table.pivot_table(index="shape", columns="rows", values="over best", sort=False).reset_index(),
    )  # fmt: skip


def unseen(rows: pd.DataFrame) -> str:
    """What a shape gets that is not in the table."""
    table = tables.unseen(rows)
    if table.empty:
        return "the rule's choices were not among what was tried."
    worst, ratio = table.loc[table["rule / fastest"].idxmax()], table["rule / fastest"]
    return (
        f"the rule's choice takes {geometric_mean(ratio):.3f} times as long as the fastest candidate on average "
        f"over {len(table)} shapes and types, and at most {ratio.max():.2f} times, at {worst['N']} × {worst['K']} in "
        f"{worst['dtype']}. (The fastest is the least of many measured times, so a part of that is noise.)"
    )


def tuning(rows: pd.DataFrame) -> str:
    """How many candidates a shape has, and how long trying them took."""
    tuned = rows[(rows["op"] == "tune") & (rows["role"] != "control") & (rows["cache"] == "cold")]
    seconds = tuning_seconds(rows)
    if seconds.empty:
        return "fewer than two shapes were tuned."
    counts = tuned.groupby("case").size()
    ledger.note("tuning", counts.rename("candidates"))
    return (
        f"{counts.min()} to {counts.max()} candidates a shape, each checked, then timed with cold L2, and with hot L2 "
        f"where W fits: {seconds.median():.0f} s a shape, at most {seconds.max():.0f} s, without compiling."
    )


def splits(rows: pd.DataFrame) -> str:
    """Does a split of K pay where N is short?"""
    table = tables.splits(rows)
    if table.empty:
        return "no shape was short enough to split its rows."
    parts = ", ".join(filled(table, "{N} × {K} {split / whole:.2f}"))
    return f"time of the fastest choice that splits a row over the fastest that does not: {parts}."


def choices(rows: pd.DataFrame) -> Drawing:
    """Time of every candidate over the fastest, a map a shape of the pull request's model."""
    table = tables.choices(rows, PULL_REQUEST)
    if table.empty:
        return f"no candidates were timed at the shapes of {PULL_REQUEST}."
    near = table[table["over best"] <= WITHIN].groupby("shape")["rows"].agg(lambda some: {1, 2, 4} <= set(some))
    ledger.note("near", near.rename("all three"))
    return drawing(
        plots.heat, table.assign(capped=table["over best"].clip(upper=CAPPED)), "rows", "warps", "capped",
        panel="shape", fmt="{:.2f}",
        xlabel="rows a program", ylabel="warps", title="Time over the fastest choice's, each shape",
        alt=f"Maps of time over the fastest choice's by rows and tile, one a shape of {PULL_REQUEST}.",
        caption=f"bf16, cold, each with its best tile; N × K above each map; — was left out; {CAPPED:.0f} is "
        f"{CAPPED:.0f} and more.",
        said=f"1, 2 and 4 rows each have warps within {WITHIN - 1:.0%} of the fastest at {near.sum()} of {len(near)} "
        "shapes",
        table=table,
    )  # fmt: skip


def token(rows: pd.DataFrame) -> pd.DataFrame:
    """A token's GEMVs under each rule."""
    return tables.token_total(rows, PULL_REQUEST).rename(columns=tables.UNITS)


def prediction(rows: pd.DataFrame) -> Drawing:
    """Measured time over the floor against the size of W, for three kernels."""
    shown = [variants.OURS, variants.TUNED, "torch.mv"]
    table = where(tables.times(rows), dtype="bf16", variant=shown)
    table = table[table["predicted_us"] > 0]
    if table.empty:
        return "no floor is recorded."
    table = table.assign(over=table["us"] / table["predicted_us"], MB=table["MB"].round(1))
    over = dict(list(table.groupby("variant")["over"]))
    return drawing(
        plots.lines, table, "MB", "over", "variant", logx=True, joined=False, reference=[(1.0, "the floor")],
        xlabel="MB of weights", ylabel="time / floor", title="Measured time over the floor, one GEMV, bf16",
        alt="Points of time over the floor against the size of W.",
        caption="Floor: bytes at the ceiling of this size, and a launch.",
        said="; ".join(f"{name} {span(over[name])}" for name in shown if name in over),
        table=["N", "K", "MB", "variant", "us", "predicted_us", "over"],
        units=tables.UNITS | {"predicted_us": "floor µs"},
    )  # fmt: skip


def bits(rows: pd.DataFrame) -> str:
    """Are results the same bits whatever the rows, and is the control's result?"""
    ours = tables.same_bits(rows, variants.ROWS_VARIANTS)
    control = tables.same_bits(rows, variants.TWO_D)
    if ours.empty or control.empty:
        return "the bits of the results are not recorded."
    said = []
    for dtype in ours["dtype"].unique():
        same, differ = where(ours, dtype=dtype)["outcomes"] == 1, where(control, dtype=dtype)["outcomes"] > 1
        ledger.note("bits, rows", pd.DataFrame({"same": same, "dtype": dtype}))
        ledger.note("bits, control", pd.DataFrame({"other": differ, "dtype": dtype}))
        words = f"{dtype}: the same bits in {same.sum()} of {len(same)} shapes"
        said.append(f"{words}, other bits in {differ.sum()} of {len(differ)} for the control")
    return f"all numbers of rows, adjacent and interleaved, against one 2-D tile of several rows. {'; '.join(said)}."


def warm(rows: pd.DataFrame) -> str:
    """What a choice tuned in a warm cache costs when the cache is cold."""
    table = tables.other_choice(rows)
    if table.empty:
        return "tuning in a warm cache chose nothing else, or was not tried: only what fits the L2 can be."
    tried = rows[(rows["op"] == "tune") & (rows["cache"] == "hot")]["case"].nunique()
    ledger.note("warm", {"cases whose W fits": tried})
    said = f"a warm cache chose something else in {len(table)} of the {tried} cases whose W fits it. There, "
    return said + _spread(table, "tuned warm / tuned cold", "the cold choice")


def interleaving(rows: pd.DataFrame) -> str:
    """Adjacent rows against interleaved ones."""
    table = compared(cases(rows, "gemv"), variants.rows_variant(4), variants.INTERLEAVED, tables.SHAPE)
    return _spread(table, "interleaved / adjacent", "adjacent")


def _spread(table: pd.DataFrame, what: str, faster: str) -> str:
    """Mean, ends and verdicts of the ratios of all shapes, in a sentence. faster: which one a ratio above 1 favours."""
    if table.empty:
        return "not measured."
    ends = " to ".join(filled(_ends(table), "{ratio:.2f} at {N} × {K} in {dtype}"))
    return (
        f"time {what}: {geometric_mean(table['ratio']):.3f} on average over {len(table)} shapes and types, from "
        f"{ends}; {faster} is {counted(table['verdict'])}."
    )


def _ends(table: pd.DataFrame) -> pd.DataFrame:
    """The lines with the least and the largest ratio."""
    return table.loc[[table["ratio"].idxmin(), table["ratio"].idxmax()]]


def questions(rows: pd.DataFrame) -> pd.DataFrame:
    """The issue's questions about coalescing, one by one."""
    us = tables.by_variant(rows)
    merged = chain_views.merging(rows)

    def gain(before: str, after: str) -> str:
        if not {before, after} <= set(us):
            return "not measured"
        return f"×{geometric_mean((us[before] / us[after]).dropna()):.2f} (geometric mean, bf16 shapes)"

    def merge(kernel: str) -> str:
        some = merged[merged["kernel"] == kernel]["ratio"]
        return f"{span(some, '×{:.2f}')} of whole layers" if len(some) else "not measured"

    thread, warp, wide = variants.THREAD_A_ROW, variants.WARP_A_ROW, variants.WIDE_LOADS
    found = [
        ("Are loads of weights coalesced, lane by lane along a row?", "yes, and 32 threads a row", gain(thread, warp)),
        ("Is it the access pattern by itself?", "not tried alone", gain(thread, variants.THREAD_A_ROW_TURNED)),
        ("Are loads wider?", "yes, 16 bytes a lane", gain(warp, wide)),
        ("Do several rows share x?", "yes, in shared memory", gain(wide, variants.FOUR_ROWS)),
        ("Are small GEMVs merged into one? (cuBLAS)", "no", merge("torch.mv")),
        ("Are small GEMVs merged into one? (ours)", "no", merge("ours")),
        ("Is the layout of tasks changed? (adjacent rows)", "no", gain(variants.INTERLEAVED, variants.rows_variant(4))),
    ]
    return pd.DataFrame(found, columns=["question", "in AutoMegaKernel", "alone, worth here"])


def summary(rows: pd.DataFrame) -> str:
    """The result in one sentence."""
    table = tables.against_cublas(rows)
    if table.empty:
        return "nothing could be compared with cuBLAS."
    words = f"{counted(table['verdict'])} of {len(table)} shapes and types (ratios {span(table['ratio'])})"
    return f"against cuBLAS, the production GEMV is {words}."


def floor_cases(cases: Sequence[Any]) -> list[Any]:
    """Every fourth GEMV of the first type, the smallest first: enough to see the floor grow."""
    some = [case for case in cases if case.op == "gemv" and case["dtype"] == cases[0]["dtype"]]
    return sorted(some, key=lambda case: case["N"] * case["K"])[::4]


def wanted(study: Any, parameters: Mapping[str, Sequence[Any]]) -> list[tuple[Any, str]]:
    """The kernels whose code is shown: the ladder at the first small shape of the parameters."""
    some = [case for case in study.cases(parameters) if case.op == "gemv" and case["dtype"] == parameters["dtypes"][0]]
    case = min(some, key=lambda case: abs(case["N"] * case["K"] - 2**20))
    return [(case, name) for name in (*variants.LADDER, variants.OURS)]


def predicted_accesses(accesses: pd.DataFrame) -> pd.DataFrame:
    """How each step loads W: what one request costs."""
    if accesses.empty:
        return accesses
    loads = where(accesses, tensor="W", kind=["load", "async copy"]).drop_duplicates("variant")
    renamed = {"bits": "bits a thread", "sectors": "sectors a request", "lines": "lines a request"}
    return loads[["variant", "kind", *renamed]].rename(columns=renamed)


def compiled_table(table: pd.DataFrame) -> pd.DataFrame:
    """What the compiler made of the steps."""
    if table.empty:
        return table
    columns = ["variant", "arch", "registers", "spill_bytes", "shared_bytes", "loads", "shuffles", "barriers"]
    return table[[name for name in columns if name in table]]


ledger.watch(__name__)
