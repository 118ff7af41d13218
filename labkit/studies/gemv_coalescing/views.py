"""Figures and sentences of the study, each made from the rows of one GPU; those of chains are in `chain_views`."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.tables import RATIO, cases, compared, tuning_seconds, where, why_not
from labkit.bench.verdict import counted, geometric_mean
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import faster, filled, number, rounded, span
from labkit.report.words import gains as ends
from labkit.studies.gemv_coalescing import chain_views, shown, tables, variants
from labkit.studies.gemv_coalescing.claims import PULL_REQUEST

LADDER_MODEL = "Llama-3.2-1B"
CAPPED = 2.0  # the map's colours end here
BESIDE = (variants.WIDE_LOADS, variants.TUNED, variants.OURS)  # kernels that are set beside cuBLAS
SPEEDS = (  # untuned kernels, then the production GEMV
    variants.THREAD_A_ROW, variants.THREAD_A_ROW_TURNED, variants.WARP_A_ROW, variants.WIDE_LOADS, variants.OURS,
)  # fmt: skip
CUBLAS, KERNEL = "cuBLAS", "kernel"
PATTERN = (variants.THREAD_A_ROW, variants.THREAD_A_ROW_TURNED, variants.WIDE_LOADS)  # what `tables.pattern` needs
WITHIN = 1.02
MANY = 4  # CTAs an SM from which on its look-ups, not one thread's wait, are to explain a step
LADDER_COLUMNS = ["dtype", "shape", "variant", "us", "tbs", "percent"]
Answers = dict[str, str]  # question -> a short answer, as `Lab.compare` takes them


def beside_cublas(rows: pd.DataFrame) -> Answers:
    """What a plain kernel, tuning and dependent launch give against the better of cuBLAS's callers, large W in bf16."""
    found = {}
    for variant in BESIDE:
        table = where(tables.against_cublas(rows, variant), dtype="bf16")
        if len(table := table[table["MB"] >= tables.LARGE_MB]):
            said = f"{faster(geometric_mean(table['ratio']))} ({ends(table['ratio'])}), {counted(table['verdict'])}"
            found[shown.name(variant)] = said
    return found


def speeds(rows: pd.DataFrame) -> Drawing:
    """Percent of the read ceiling by kernel, the median of the bf16 shapes of `tables.LARGE_MB` and more."""
    table = _speeds(rows)
    if table.empty:
        return "no large bf16 shape has the first steps of the ladder beside a known read ceiling."
    percent = table.set_index(KERNEL)["percent"]
    first, alone, warp = (percent[shown.name(one)] for one in SPEEDS[:3])
    title = "Coalescing alone seldom pays; one warp per row does"
    if alone > first:
        title = f"Coalescing alone pays {'little' if alone < (first + warp) / 2 else 'most'}"
    return drawing(
        plots.bars, table.assign(series="speed"), KERNEL, "percent", "series",
        fmt="{:.0f}", xlabel="", ylabel="% of the read speed", reference=[(100, "read speed")], title=title,
        alt="Bars of percent of the measured read speed, by kernel.",
        caption=f"One GEMV in bf16, cold; median over the matrices of at least {tables.LARGE_MB} MB. Coalescing alone: "
        "still one thread per row, W stored [K, N].",
        said=f"Measured read speed: {number(tables.times(rows)['ceiling'].max())} TB/s",
        table=table,
    )  # fmt: skip


def _speeds(rows: pd.DataFrame) -> pd.DataFrame:
    """Kernel and percent; cuBLAS by its faster caller."""
    table = where(tables.times(rows), dtype="bf16")
    table = table[(table["MB"] >= tables.LARGE_MB) & table["percent"].notna()]
    wide = table.pivot_table(index=["N", "K"], columns="variant", values="percent")
    if not set(SPEEDS[:3]) <= set(wide):
        return pd.DataFrame(columns=[KERNEL, "percent"])
    found = {shown.name(one): wide[one].median() for one in SPEEDS if one in wide}
    known = [name for name in variants.LIBRARY if name in wide]
    found |= {CUBLAS: wide[known].max(axis=1).median()} if known else {}
    return pd.DataFrame(found.items(), columns=[KERNEL, "percent"])


def ladder(rows: pd.DataFrame) -> Drawing:
    """Percent of the read ceiling by step and shape, bf16; its table has every dtype and what a request costs."""
    table = tables.ladder(rows)
    some = table[(table["dtype"] == "bf16") & table["percent"].notna()]
    if some.empty:
        return "no bf16 rows of the ladder beside a known read ceiling."
    best = some.loc[some["percent"].idxmax()]
    columns = [*LADDER_COLUMNS, "bits a thread", "sectors a request", "lines a request", tables.RESIDENT]
    return drawing(
        plots.heat, shown.named(some, "variant"), "variant", "shape", "percent", xlabel="", ylabel="N × K",
        unit="% of the read ceiling", title="The ladder, bf16: percent of the read ceiling", fmt="{:.0f}",
        alt="Map of percent of the read ceiling by step of the ladder and shape.",
        caption="Streamed bytes a second, cold L2, the smallest W on top. The ceiling is the machine page's, from "
        "another run, so a kernel can exceed it. — stands where the code was not taken apart.",
        said=f"Best {best['percent']:.0f} %, at {best['shape']}, {shown.name(best['variant'])}",
        table=shown.named(table, "variant")[columns], units=tables.UNITS,
    )  # fmt: skip


def ladder_of(rows: pd.DataFrame, model: str = LADDER_MODEL) -> Drawing:
    """TB/s by step of the ladder and shape of one model, a map a type."""
    table = tables.ladder(rows, model)
    if table.empty:
        return f"no usable rows of {model}."
    best = table.loc[table["tbs"].idxmax()]
    table = shown.named(table, "variant")
    return drawing(
        plots.heat, table, "variant", "shape", "tbs", panel="dtype", fmt="{:.1f}",
        xlabel="", ylabel="N × K", unit="TB/s", title=f"The ladder, {model}: TB/s of streamed bytes",
        alt=f"Maps of bandwidth by step of the ladder and shape of {model}.",
        caption="Streamed bytes a second at each step, cold L2.",
        said=f"Fastest {best['tbs']:.2f} TB/s, at {best['shape']}, {best['dtype']}, {shown.name(best['variant'])}",
        table=LADDER_COLUMNS, units=tables.UNITS,
    )  # fmt: skip


def walk(rows: pd.DataFrame) -> Drawing:
    """A thread a row: time of one step along K against the CTAs of an SM, for both ways of storing W."""
    table = tables.pattern(rows)
    if table["CTAs an SM"].isna().all():
        return f"{', '.join(map(shown.name, PATTERN))} were not all measured."
    series = dict(zip((*tables.STEPS, "look-ups, ns"), ("W [N, K]", "W [K, N]", "look-ups alone"), strict=True))
    mean = table.groupby(["dtype", "CTAs an SM"], as_index=False)[list(series)].mean().rename(columns=series)
    start = tables.pays_from(table)
    when = "pays in tall matrices only" if start and start > table["N"].min() else "pays at every height"
    when = when if start else "never pays"
    return drawing(
        plots.lines, mean.melt(["dtype", "CTAs an SM"], var_name="series", value_name="ns"), "CTAs an SM", "ns",
        "series", panel="dtype", logx=True, logy=True, xlabel="CTAs on the busiest multiprocessor",
        ylabel="ns a step of K (log)",
        title=f"Coalescing alone {when}",
        alt="Lines of time over K against CTAs a multiprocessor for W stored both ways.",
        caption=f"One thread per row, cold; mean of the shapes with as many CTAs, of {variants.THREADS} rows each. "
        "Look-ups alone: one cache line a clock.",
        said=f"Lanes side by side {f'pay from N = {start} on' if start else 'do not pay at the tallest W'}",
        table=table,
    )  # fmt: skip


def why_not_32(rows: pd.DataFrame) -> Answers:
    """What limits a thread a row, and what storing W as [K, N] changes of it."""
    table = tables.pattern(rows)
    table = table[table["look-ups, ns"].notna()]
    if table.empty:
        return {}
    one, many = table[table["CTAs an SM"] == 1], table[table["CTAs an SM"] >= MANY]
    start, last = tables.pays_from(table), table.loc[table["N"].idxmax()]
    found = {"loads of 16 bytes per lane, against one thread per row": f"{span(table['with width'], '{:.1f}')}× faster"}
    for dtype, part in one.groupby("dtype"):
        for column, order in zip(tables.STEPS, ("[N, K]", "[K, N]"), strict=True):
            found[f"one CTA an SM, {dtype}, W {order}: a step of K"] = f"{span(part[column], '{:.0f}')} ns"
    if len(one):
        found["one CTA an SM: look-ups alone"] = f"{one['look-ups, ns'].mean():.0f} ns"
    if len(many):
        over = many[tables.STEPS[0]] / many["look-ups, ns"]
        found[f"from {MANY} CTAs an SM, W [N, K]: time over look-ups alone"] = span(over)
    # The tallest W in two types: if look-ups are the limit, twice the bytes take the same time.
    both = table.pivot_table(index=["N", "K"], columns="dtype", values=tables.STEPS[0])
    both = both.reindex(columns=["bf16", "fp32"]).dropna().reset_index().tail(1)
    answers = filled(both, "{bf16:.0f} ns and {fp32:.0f} ns")
    found |= dict(zip(filled(both, "{N} × {K} in bf16, and in fp32: a step of K"), answers, strict=True))
    found["W [K, N] pays from"] = f"N = {start}" if start else "no N measured"
    part = f"{last['pattern alone']:.1f}× of {last['with width']:.1f}×"
    return found | {"gain of W [K, N] at the tallest W, of that with loads of 16 bytes": part}


def cublas(rows: pd.DataFrame) -> Drawing:
    """How much faster than cuBLAS a plain kernel and dependent launch are, by size of W."""
    parts = [tables.against_cublas(rows, name).assign(**{KERNEL: shown.name(name)}) for name in BESIDE]
    table = where(pd.concat([*filter(len, parts)] or parts, ignore_index=True), dtype="bf16")
    production = table[table[KERNEL] == shown.name(variants.OURS)]
    if production.empty:
        return "no shape has both cuBLAS and the GEMV with dependent launch."
    half = production["MB"].median()
    small, large = (production[(production["MB"] < half) == yes]["ratio"] for yes in (True, False))
    more = len(small) > 0 and geometric_mean(small) > geometric_mean(large)
    known = production["allowed µs"].notna()
    said = f"Dependent launch {ends(production['ratio'])}"
    said += f"; {production['within'].sum()} of {known.sum()} within the limit" * bool(known.any())
    columns = ["N", "K", "MB", "cuBLAS by", "cuBLAS µs", "ours µs", "read µs", "ours TB/s", "allowed µs", *RATIO]
    return drawing(
        plots.lines, table.assign(size=table["MB"].map(rounded)), "size", "ratio", KERNEL, low="low", high="high",
        logx=True, joined=False, reference=[(1.0, "cuBLAS")], xlabel="MB of weights", ylabel="× faster than cuBLAS",
        title="The smaller the matrix, the larger the gain over cuBLAS" if more else "One GEMV against cuBLAS, by size",
        alt="Points of the ratio of cuBLAS's time over each kernel's, against the size of W.",
        caption="One GEMV in bf16 against the better of torch.mv and F.linear, 95 % intervals. Limit: the bytes at the "
        "read ceiling, an empty kernel and a microsecond.",
        said=said,
        table=production[columns], units={"ours µs": "dependent launch, µs", "ours TB/s": "its TB/s"},
    )  # fmt: skip


def beyond_limit(rows: pd.DataFrame) -> Answers:
    """Which bf16 shapes take longer than the limit of `cublas`, beside reading their weights."""
    table = where(tables.against_cublas(rows), dtype="bf16").dropna(subset=["allowed µs", "read µs"])
    if table.empty:
        return {}
    inside = table["within"].astype(bool)
    found = {"bf16 shapes within the limit": f"{inside.sum()} of {len(table)}"}
    if inside.all():
        return found
    beyond = table[~inside]
    most = beyond.loc[(beyond["ours µs"] / beyond["allowed µs"]).idxmax()]
    took, limit = (number(most[name], "{:.1f}") for name in ("ours µs", "allowed µs"))
    found["furthest beyond it"] = f"{most['N']} × {most['K']}: {took} µs, limit {limit} µs"
    found["beyond it, and a plain read of W is too"] = (
        f"{(beyond['read µs'] > beyond['allowed µs']).sum()} of {len(beyond)}"
    )
    return found | {"speed there, of a plain read": span(beyond["read µs"] / beyond["ours µs"], "{:.0%}")}


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """What each step is worth, gains and losses."""
    return shown.named(tables.steps(rows), "step", "over")


def gains(rows: pd.DataFrame) -> Answers:
    """What each step is worth on average, and at how many of all shapes and types it loses."""
    return {f"{line['over']} → {line['step']}": _worth(line) for line in steps(rows).to_dict("records")}


def _worth(line: Mapping[str, Any]) -> str:
    """Mean gain of a step, and how often it is slower, of a line of `tables.steps`."""
    slower = f"slower in {line['slower']} of" if line["slower"] else "never slower in"
    return f"{faster(line['mean ratio'])}; {slower} {line['cases']}"


def peers(rows: pd.DataFrame) -> pd.DataFrame:
    """µs of the libraries at the shapes where all were asked."""
    us, named = _peers(rows), shown.NAMES
    return us.reset_index().rename(columns=named) if len(us) else pd.DataFrame()


def _peers(rows: pd.DataFrame) -> pd.DataFrame:
    """By recorded names; index MB, N, K."""
    us = tables.by_variant(rows)
    wanted = [name for name in (*variants.LIBRARY, *variants.OTHERS, variants.TUNED, variants.OURS) if name in us]
    asked = [name for name in variants.OTHERS if name in us]
    return us[wanted].dropna(subset=asked, how="all") if asked else pd.DataFrame()


def rivals(rows: pd.DataFrame) -> Answers:
    """The lab's kernels against the fastest of all libraries at each shape, then each engine's own kernels."""
    return best_peer(rows) | engines(rows)


def best_peer(rows: pd.DataFrame) -> Answers:
    """The lab's kernels against the fastest of all libraries at each shape; which engines' kernels were not there."""
    table = _peers(rows)
    libraries = [name for name in (*variants.LIBRARY, *variants.OTHERS) if name in table]
    if table.empty or variants.OURS not in table:
        return {}
    best, found = table[libraries].min(axis=1), {}
    lacking = [engine for engine, names in variants.ENGINES.items() if not set(names) & set(table)]
    without = f", without {' and '.join(lacking)}" if lacking else ""
    for name in (variants.OURS, variants.TUNED):
        if name in table and len(ratio := (best / table[name]).dropna()):
            ledger.note("best peer", ratio)
            question = f"{shown.name(name)}, against the fastest library"
            found[question] = f"{faster(geometric_mean(ratio))}; {len(ratio)} shapes{without}"
    return found


def engines(rows: pd.DataFrame) -> Answers:
    """Each engine's own kernels against dependent launch and against cuBLAS, or why they were not measured."""
    us, found = tables.by_variant(rows), {}
    for names in variants.ENGINES.values():
        reason = "" if set(names) & set(us) else why_not(rows, names)
        found |= {shown.name(name): reason or _engine(us, name) for name in names if reason or name in us}
    return found


def _engine(us: pd.DataFrame, name: str) -> str:
    """Geometric means of the times of others over an engine's."""
    beside = {shown.name(variants.OURS): [variants.OURS], CUBLAS: list(variants.LIBRARY)}
    ratios = {words: (us.reindex(columns=some).min(axis=1) / us[name]).dropna() for words, some in beside.items()}
    for ratio in ratios.values():
        ledger.note("engine", ratio)
    parts = [faster(geometric_mean(ratio), words) for words, ratio in ratios.items() if len(ratio)]
    return f"{', '.join(parts) or 'nothing is beside it'}; {us[name].count()} shapes"


def rows_map(rows: pd.DataFrame) -> Drawing:
    """Time of each number of rows over the best."""
    table = tables.rows_map(rows)
    if table.empty:
        return "the numbers of rows were not measured."
    near = table[table["over best"] <= WITHIN].groupby("rows")["shape"].nunique()
    ledger.note("near", near.rename("shapes"))
    four = near.get(4, 0)
    return drawing(
        plots.heat, table, "rows", "shape", "over best", xlabel="rows per program", ylabel="N × K",
        title="Rows per program: time over that of the best number", fmt="{:.2f}",
        said=f"Four rows are within {WITHIN - 1:.0%} of the best at {four} of {table['shape'].nunique()} shapes",
        alt="Map of time over the best, by rows and shape.",
        caption="bf16, all else as the rule has it; 1.00 is the least time measured, noise included.",
        table=table.pivot_table(index="shape", columns="rows", values="over best", sort=False).reset_index(),
    )  # fmt: skip


def choosing(rows: pd.DataFrame) -> Answers:
    """Rows, tile, splits and the warm cache, in short."""
    return tuning(rows) | unseen(rows) | splits(rows) | interleaving(rows) | warm(rows)


def unseen(rows: pd.DataFrame) -> Answers:
    """What a shape gets that is not in the table."""
    ratio = tables.unseen(rows)["rule / fastest"]
    if ratio.empty:
        return {}
    said = f"{slower(geometric_mean(ratio))}, at most {ratio.max():.2f}×"
    return {"the rule for unseen shapes, against the fastest tried": said}


def tuning(rows: pd.DataFrame) -> Answers:
    """How many candidates a shape has, and how long trying them took."""
    tuned = rows[(rows["op"] == "tune") & (rows["role"] != "control") & (rows["cache"] == "cold")]
    seconds = tuning_seconds(rows)
    if seconds.empty:
        return {}
    counts = tuned.groupby("case").size()
    ledger.note("tuning", counts.rename("candidates"))
    taken = f"{seconds.median():.0f} s, at most {seconds.max():.0f} s"
    return {"candidates a shape": f"{counts.min()} to {counts.max()}", "trying those of a shape": taken}


def splits(rows: pd.DataFrame) -> Answers:
    """Does a split of K pay where N is short?"""
    table = tables.splits(rows)
    questions = filled(table, "fastest choice that splits K, {N} × {K}")
    return {one: slower(ratio) for one, ratio in zip(questions, table["split / whole"], strict=True)}


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
        xlabel="rows per program", ylabel="warps", title="Time over the fastest choice's, each shape",
        alt=f"Maps of time over the fastest choice's by rows and warps, one a shape of {PULL_REQUEST}.",
        caption=f"bf16, cold, each with its best tile; N × K above each map; — was left out; {CAPPED:.0f} is "
        f"{CAPPED:.0f} and more.",
        said=f"1, 2 and 4 rows each come within {WITHIN - 1:.0%} of the fastest at {near.sum()} of {len(near)} shapes",
        table=table,
    )  # fmt: skip


def token(rows: pd.DataFrame) -> pd.DataFrame:
    """A token's GEMVs under each rule."""
    return shown.named(tables.token_total(rows, PULL_REQUEST), "rule").rename(columns=tables.UNITS)


def prediction(rows: pd.DataFrame) -> Drawing:
    """Measured time over the floor against the size of W, for three kernels."""
    kernels = [variants.OURS, variants.TUNED, "torch.mv"]
    table = where(tables.times(rows), dtype="bf16", variant=kernels)
    table = table[table["predicted_us"] > 0]
    if table.empty:
        return "no floor is recorded."
    table = table.assign(over=table["us"] / table["predicted_us"], MB=table["MB"].round(1))
    over = dict(list(table.groupby("variant")["over"]))
    return drawing(
        plots.lines, shown.named(table, "variant"), "MB", "over", "variant", logx=True, joined=False,
        reference=[(1.0, "floor")],
        xlabel="MB of weights", ylabel="time / floor", title="Measured time over the floor, one GEMV, bf16",
        alt="Points of time over the floor against the size of W.",
        caption="Floor: bytes at the ceiling of this size, and a launch.",
        said="; ".join(f"{shown.name(name)} {span(over[name])}" for name in kernels if name in over),
        table=["N", "K", "MB", "variant", "us", "predicted_us", "over"],
        units=tables.UNITS | {"predicted_us": "floor µs"},
    )  # fmt: skip


def bits(rows: pd.DataFrame) -> Answers:
    """Are results the same bits whatever the rows, and is the control's result?"""
    same, control = tables.same_bits(rows, variants.ROWS_VARIANTS), tables.same_bits(rows, variants.TWO_D)
    if same.empty or control.empty:
        return {}
    found = {}
    for dtype in same["dtype"].unique():
        for what, table in (("a sum for each row", same), ("one tile of several rows (control)", control)):
            kept = where(table, dtype=dtype)["outcomes"] == 1
            ledger.note("bits", pd.DataFrame({"same": kept, "dtype": dtype}))
            found[f"{what}, {dtype}"] = f"same bits at {kept.sum()} of {len(kept)} shapes"
    return found


def warm(rows: pd.DataFrame) -> Answers:
    """What a choice tuned in a warm cache costs when the cache is cold."""
    tried = rows[(rows["op"] == "tune") & (rows["cache"] == "hot")]["case"].nunique()
    if not tried:
        return {}
    table = tables.other_choice(rows)
    ledger.note("warm", {"cases whose W fits": tried})
    found = {"tuned in a warm cache: another choice": f"in {len(table)} of {tried} cases whose W fits"}
    return found | ({"what that choice costs, cold": _spread(table)} if len(table) else {})


def interleaving(rows: pd.DataFrame) -> Answers:
    """Interleaved rows against adjacent ones."""
    table = compared(cases(rows, "gemv"), variants.rows_variant(4), variants.INTERLEAVED, tables.SHAPE)
    return {"interleaved rows, against adjacent ones": _spread(table)} if len(table) else {}


def _spread(table: pd.DataFrame) -> str:
    """How much slower the second of two is than the first, which is the one that verdicts are about."""
    verdicts = table["verdict"].replace({"faster": "slower", "slower": "faster"})
    least_and_most = ends((1 / table["ratio"]).rename("gain of the second"))
    return f"{slower(geometric_mean(table['ratio']))} ({least_and_most}); {counted(verdicts)}"


def slower(ratio: float) -> str:
    """How much slower something is that takes `ratio` times as long: "1.04× slower"."""
    return faster(1 / ratio)


def questions(rows: pd.DataFrame) -> pd.DataFrame:
    """The issue's questions about coalescing, one by one."""
    us = tables.by_variant(rows)
    merged = chain_views.merging(rows)

    def gain(before: str, after: str) -> str:
        if not {before, after} <= set(us):
            return "not measured"
        ratio = (us[before] / us[after]).dropna()
        ledger.note("gain", ratio)
        return faster(geometric_mean(ratio))

    def merge(kernel: str) -> str:
        some = merged[merged["kernel"] == kernel]["ratio"]
        return ends(some) if len(some) else "not measured"

    thread, warp, wide = variants.THREAD_A_ROW, variants.WARP_A_ROW, variants.WIDE_LOADS
    found = [
        ("Do lanes load side by side along a row?", "yes, and 32 threads per row", gain(thread, warp)),
        ("Only the pattern, with W stored [K, N]?", "not tried alone", gain(thread, variants.THREAD_A_ROW_TURNED)),
        ("Are loads wider?", "yes, 16 bytes per lane", gain(warp, wide)),
        ("Do several rows share x?", "yes, in shared memory", gain(wide, variants.FOUR_ROWS)),
        ("Are small GEMVs merged? (cuBLAS, whole layers)", "no", merge(chain_views.CUBLAS)),
        ("Are small GEMVs merged? (the lab's, whole layers)", "no", merge(shown.LAB)),
        ("Are rows of a program adjacent?", "unchanged", gain(variants.INTERLEAVED, variants.rows_variant(4))),
    ]
    return pd.DataFrame(found, columns=["question", "in AutoMegaKernel", "worth here"])


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
    return shown.named(loads, "variant")[["variant", "kind", *renamed]].rename(columns=renamed)


def compiled_table(table: pd.DataFrame) -> pd.DataFrame:
    """What the compiler made of the steps."""
    if table.empty:
        return table
    columns = ["variant", "arch", "registers", "spill_bytes", "shared_bytes", "loads", "shuffles", "barriers"]
    return shown.named(table, "variant")[[name for name in columns if name in table]]


ledger.watch(__name__)
