"""Figures and sentences of the study, each made from the rows of one GPU."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from labkit.gemv_coalescing import names, tables
from labkit.gemv_coalescing.claims import PULL_REQUEST
from labkit.report import figures

Drawing = Mapping[str, Any] | str  # a sentence where there is nothing to draw
LADDER_MODEL = "Llama-3.2-1B"
SHOWN_OVERHEAD = [
    names.separate("torch.mv"), names.merged("torch.mv"), names.CHAIN_PLAIN, names.separate("ours"), names.CHAIN_OURS,
]  # fmt: skip
CAPPED = 2.0  # the map's colours end here
WITHIN = 1.02
UNITS = {"us": "µs", "tbs": "TB/s", "percent": "% of ceiling"}
SHOWN_CHAINS = [
    names.separate(names.LADDER[0]),
    names.separate(names.LADDER[3]),
    names.separate("torch.mv"),
    names.separate("ours"),
    names.merged("torch.mv"),
    names.CHAIN_PLAIN,
    names.CHAIN_OURS,
]


def in_short(rows: pd.DataFrame) -> str:
    """The answer of the page in a few lines."""
    table = tables.against_library(rows)
    if table.empty:
        return "no shape has both cuBLAS and the production GEMV."
    some = table[(table["dtype"] == "bf16") & (table["MB"] >= tables.LARGE_MB)]
    plain = tables.against_library(rows, names.LADDER[6])
    plain = plain[(plain["dtype"] == "bf16") & (plain["MB"] >= tables.LARGE_MB)]
    words = (
        f"from {tables.LARGE_MB} MB of bf16 weights on, the better of torch.mv and F.linear takes "
        f"{tables.geometric_mean(some['ratio']):.2f} times as long as the production GEMV "
        f"({tables.geometric_mean(plain['ratio']):.2f} without dependent launch; geometric means of {len(some)} shapes)"
    )
    chain = tables.chains(rows)
    ours = chain[chain["variant"] == names.separate("ours")]
    parts = [
        f"{line['model']} ×{line['ratio']:.2f} at {line['% of reading W']:.0f} % of reading the weights"
        for _, line in ours.iterrows()
    ]
    return words + (f". Whole layers, matrix by matrix, against cuBLAS: {'; '.join(parts)}." if parts else ".")


def ladder(rows: pd.DataFrame) -> Drawing:
    """Percent of the read ceiling by step and shape, bf16; its table has every dtype and what a request costs."""
    table = tables.ladder(rows)
    some = table[(table["dtype"] == "bf16") & table["percent"].notna()]
    if some.empty:
        return "no bf16 rows of the ladder beside a known read ceiling."
    fig = figures.heat(
        some, "step", "shape", "percent", xlabel="step of the ladder", ylabel="N × K", unit="% of the read ceiling",
        title="The ladder, bf16: percent of the read ceiling", fmt="{:.0f}",
    )  # fmt: skip
    best = some.loc[some["percent"].idxmax()]
    said = f"Best: {best['percent']:.0f} % at {best['shape']}, step {best['step']}"
    said += " (more than the machine page's reading kernel reached)" * bool(best["percent"] > 100)
    columns = ["dtype", "shape", "variant", "us", "tbs", "percent", "bits a thread", "sectors a request"]
    return {
        "fig": fig,
        "alt": f"Map of percent of the read ceiling by step of the ladder and shape. {said}.",
        "caption": f"Streamed bytes a second, cold L2, the smallest W on top. {said}. Steps are named in the table.",
        "table": table[[*columns, "lines a request", "CTAs an SM"]].rename(columns=UNITS),
    }


def ladder_of(rows: pd.DataFrame, model: str = LADDER_MODEL) -> Drawing:
    """TB/s against the step of the ladder, a line a shape of one model."""
    table = tables.ladder(rows, model)
    if table.empty:
        return f"no usable rows of {model}."
    fig = figures.lines(
        table, "step", "tbs", "shape", panel="dtype", logy=True,
        xlabel="step of the ladder", ylabel="TB/s of streamed bytes (log)", title=f"The ladder, {model}",
    )  # fmt: skip
    best = table.loc[table["tbs"].idxmax()]
    said = f"Fastest: {best['shape']}, {best['dtype']}, step {best['step']}, {best['tbs']:.2f} TB/s"
    return {
        "fig": fig,
        "alt": f"Lines of bandwidth against the step of the ladder, one a shape of {model}. {said}.",
        "caption": f"Streamed bytes a second at each step, cold L2. {said}.",
        "table": table[["dtype", "shape", "variant", "us", "tbs", "percent"]].rename(columns=UNITS),
    }


def walk(rows: pd.DataFrame) -> Drawing:
    """A thread a row: time of one step along K against the rows of W, for both ways of storing W."""
    table = tables.pattern(rows)
    if table.empty:
        return "the steps 1, 2 and 4 were not measured."
    mean = table.groupby("N", as_index=False)[list(tables.STEPS)].mean()
    tidy = mean.melt("N", var_name="series", value_name="ns")
    fig = figures.lines(
        tidy, "N", "ns", "series", logx=True, logy=True, xlabel="rows of W, one a thread",
        ylabel="time / K, ns (log)", title="One thread a row: what one step along K takes",
    )  # fmt: skip
    start = tables.pays_from(table)
    said = f"lanes side by side pay from N = {start} on" if start else "lanes side by side never pay"
    return {
        "fig": fig,
        "alt": f"Lines of time over K against N for W stored both ways. {said[0].upper()}{said[1:]}.",
        "caption": f"Flat where a thread waits for its own loads, rising where memory is full; {said}. Mean over the K "
        "of the same N, bf16, cold.",
        "table": table,
    }


def why_not_32(rows: pd.DataFrame) -> str:
    """What steps 1, 2 and 4 are worth against what the sectors would give."""
    table = tables.pattern(rows)
    if table.empty:
        return "the steps were not measured."
    few, many = table.iloc[0], table.iloc[-1]
    flat = table[table["N"] <= table["N"].median()]
    ends = [f"{flat[name].min():.0f} to {flat[name].max():.0f}" for name in tables.STEPS]
    return (
        f"a request of step 1 touches 32 lines and uses two bytes of each sector of 32, so without caches it would "
        f"fetch sixteen times the bytes. Step 4 is {table['with width'].min():.0f} to {table['with width'].max():.0f} "
        f"times as fast, for two reasons that pull apart. Up to {flat['N'].max()} rows there are too few threads to "
        f"fill the memory's queue: a step along K takes {ends[0]} ns (W stored [N, K]) or {ends[1]} ns ([K, N]) at any "
        f"size. That is latency. Stored [N, K], a line serves the thread's next 63 values from the cache; stored "
        f"[K, N], every step needs new lines, so the better pattern is the slower one: "
        f"×{few['pattern alone']:.2f} at {few['N']:.0f} rows. At {many['N']:.0f} rows memory is busy, and full sectors "
        f"count: the pattern alone gives ×{many['pattern alone']:.1f}, warps and width ×{many['with width']:.1f}. That "
        f"is less than sixteen, since step 1 streams {many['TB/s']:.2f} TB/s of useful bytes against "
        f"{many['TB/s of step 4']:.2f}: caches keep part of what it fetched until the next step wants it."
    )


def library(rows: pd.DataFrame) -> Drawing:
    """cuBLAS over the production GEMV at every shape."""
    table = tables.against_library(rows)
    table = table[table["dtype"] == "bf16"] if len(table) else table
    if table.empty:
        return "no shape has both cuBLAS and the production GEMV."
    table = table.assign(shape=[f"{n} × {k}" for n, k in zip(table["N"], table["K"], strict=True)])
    fig = figures.ratios(
        table, "shape", "ratio", "low", "high", verdict="verdict",
        xlabel="time cuBLAS / time production GEMV (above 1: ours faster)", title="Against cuBLAS, one GEMV, bf16",
    )  # fmt: skip
    least = table.loc[table["ratio"].idxmin()]
    said = f"Least: {least['ratio']:.2f} at {least['shape']}; {table['within'].sum()} of {len(table)} within the limit"
    columns = ["shape", "MB", "library", "library µs", "ours µs", "ours TB/s", "allowed µs", "ratio", "low", "high"]
    return {
        "fig": fig,
        "alt": f"Ratios of cuBLAS's time over the production GEMV's, {len(table)} shapes. {said}.",
        "caption": f"The better of torch.mv and F.linear. {said} (bytes at the ceiling + an empty kernel + 1 µs).",
        "table": table[[*columns, "noise", "verdict"]],
    }


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """What each step is worth, gains and losses."""
    return tables.steps(rows)


def losses(rows: pd.DataFrame) -> str:
    """The steps that do not pay."""
    table = tables.steps(rows)
    table = table[table["mean ratio"] < 1] if len(table) else table
    if table.empty:
        return "every step that was measured pays on average."
    parts = [
        f"{line['step']} (×{line['mean ratio']:.2f} over {line['over']}; slower in {line['slower']}, faster in "
        f"{line['faster']} of {line['cases']})"
        for _, line in table.iterrows()
    ]
    return f"on average these do not pay here: {'; '.join(parts)}."


def peers(rows: pd.DataFrame) -> pd.DataFrame:
    """µs of the libraries at the shapes where all were asked."""
    us = tables.by_variant(rows)
    wanted = [name for name in (*names.LIBRARY, *names.PEERS, names.OURS) if name in us]
    asked = [name for name in names.PEERS if name in us]
    return us[wanted].dropna(subset=asked, how="all").reset_index() if asked else pd.DataFrame()


def chain(rows: pd.DataFrame) -> Drawing:
    """Whole layers: percent of reading the same weights."""
    table = tables.chains(rows)
    table = table[table["variant"].isin(SHOWN_CHAINS)] if len(table) else table
    if table.empty:
        return "no chain was measured."
    fig = figures.bars(
        table, "model", "% of reading W", "variant",
        xlabel="model", ylabel="% of read speed", title="Whole layers in order, one CUDA graph",
        reference=[(100, "reading W")],
    )  # fmt: skip
    ours = table[table["variant"] == names.CHAIN_OURS]
    said = "; ".join(f"{m}: {p:.0f} %" for m, p in zip(ours["model"], ours["% of reading W"], strict=True))
    return {
        "fig": fig,
        "alt": f"Bars of percent of the time that reading the weights takes, by model. Ours, merged: {said}.",
        "caption": f"Each GEMV reads what an earlier one wrote. Ours, merged: {said}. Ratio in the table: cuBLAS of "
        "the same grouping over the variant.",
        "table": table.drop(columns=["no slower", "runs"], errors="ignore").rename(columns=UNITS),
    }


def overhead(rows: pd.DataFrame) -> Drawing:
    """µs that each GEMV of a chain takes beyond reading its weights."""
    table = tables.chains(rows)
    table = table[table["variant"].isin(SHOWN_OVERHEAD) & table["beyond reading"].notna()] if len(table) else table
    if table.empty:
        return "no chain was measured beside reading its weights."
    fig = figures.bars(
        table, "model", "beyond reading", "variant",
        xlabel="model", ylabel="µs a GEMV", title="What a GEMV of a chain takes beyond reading its weights",
    )  # fmt: skip
    spans = table.groupby("variant", sort=False)["beyond reading"].agg(["min", "max"])
    said = "; ".join(f"{name} {span['min']:.1f} to {span['max']:.1f} µs" for name, span in spans.iterrows())
    return {
        "fig": fig,
        "alt": f"Bars of µs a GEMV beyond reading, by model and variant. {said}.",
        "caption": f"(Chain's time - time of reading its weights) / number of its GEMVs: {said}.",
        "table": table[["model", "variant", "us", "GEMVs", "beyond reading"]].rename(columns=UNITS),
    }


def limits(rows: pd.DataFrame) -> str:
    """How much a chain could gain at all: cuBLAS over reading the weights."""
    table = tables.chains(rows)
    table = table[table["variant"].isin([names.CHAIN_OURS, names.separate("ours")])] if len(table) else table
    if table.empty:
        return "no chain was measured."
    parts = [
        f"{line['model']}, {line['variant'].removeprefix('ours, ')}: at most ×{line['at most']:.2f}, "
        f"reached ×{line['ratio']:.2f}"
        for _, line in table.iterrows()
    ]
    return f"a kernel that took no longer than reading would still gain only so much over cuBLAS. {'; '.join(parts)}."


def rows_map(rows: pd.DataFrame) -> Drawing:
    """Time of each number of rows over the best."""
    table = tables.rows_map(rows)
    if table.empty:
        return "the numbers of rows were not measured."
    fig = figures.heat(
        table, "rows", "shape", "over best", xlabel="rows a program", ylabel="N × K",
        title="Rows a program: time over the best number's", fmt="{:.2f}",
    )  # fmt: skip
    counts = table.loc[table.groupby("shape")["over best"].idxmin(), "rows"].value_counts()
    said = ", ".join(f"{rows} rows: {count} shapes" for rows, count in counts.sort_index().items())
    return {
        "fig": fig,
        "alt": f"Map of time over the best, by rows and shape. Best: {said}.",
        "caption": f"bf16, all else as the rule has it; 1.00 is the best number of rows. Best: {said}.",
        "table": table.pivot_table(index="shape", columns="rows", values="over best", sort=False).reset_index(),
    }


def choices(rows: pd.DataFrame) -> Drawing:
    """Time of every candidate over the fastest, a map a shape of the pull request's model."""
    table = tables.choices(rows, PULL_REQUEST)
    if table.empty:
        return f"no candidates were timed at the shapes of {PULL_REQUEST}."
    fig = figures.heat(
        table.assign(capped=table["over best"].clip(upper=CAPPED)), "rows", "warps", "capped",
        panel="shape", fmt="{:.2f}",
        xlabel="rows a program", ylabel="warps", title="Time over the fastest choice's, each shape",
    )  # fmt: skip
    near = table[table["over best"] <= WITHIN].groupby("shape")["rows"].agg(lambda some: {1, 2, 4} <= set(some))
    said = (
        f"1, 2 and 4 rows each have warps within {WITHIN - 1:.0%} of the fastest at {near.sum()} of {len(near)} shapes"
    )
    return {
        "fig": fig,
        "alt": f"Maps of time over the fastest choice's by rows and tile, one a shape of {PULL_REQUEST}. {said}.",
        "caption": f"bf16, cold, each with its best tile; N × K above each map; — was left out; {CAPPED:.0f} is "
        f"{CAPPED:.0f} and more. {said}.",
        "table": table,
    }


def token(rows: pd.DataFrame) -> pd.DataFrame:
    """A token's GEMVs under each rule."""
    return tables.token_total(rows, PULL_REQUEST).rename(columns=UNITS)


def prediction(rows: pd.DataFrame) -> Drawing:
    """Measured time over the predicted one against the size of W, for three kernels."""
    table = tables.times(rows)
    shown = [names.OURS, names.LADDER[6], names.LIBRARY[0]]
    table = table[(table["dtype"] == "bf16") & table["variant"].isin(shown) & (table["predicted_us"] > 0)]
    if table.empty:
        return "no prediction is recorded."
    table = table.assign(over=table["us"] / table["predicted_us"], MB=table["MB"].round(1))
    fig = figures.lines(
        table, "MB", "over", "variant", logx=True, reference=[(1.0, "as predicted")],
        xlabel="MB of weights", ylabel="time / predicted", title="Measured time over the prediction, one GEMV, bf16",
    )  # fmt: skip
    ends = table.groupby("variant", sort=False)["over"].agg(["min", "max"]).loc[shown]
    said = "; ".join(f"{name} {span['min']:.2f} to {span['max']:.2f}" for name, span in ends.iterrows())
    return {
        "fig": fig,
        "alt": f"Lines of time over prediction against the size of W. {said}.",
        "caption": f"Predicted: bytes at the ceiling of this size, and a launch. {said}.",
        "table": table[["N", "K", "MB", "variant", "us", "predicted_us", "over"]].rename(
            columns=UNITS | {"predicted_us": "predicted µs"}
        ),
    }


def bits(rows: pd.DataFrame) -> str:
    """Are results the same bits whatever the rows, and is the control's result?"""
    ours = tables.same_bits(rows, names.ROWS_VARIANTS)
    control = tables.same_bits(rows, names.TWO_D)
    if ours.empty or control.empty:
        return "the bits of the results are not recorded."
    same, differ = (ours["outcomes"] == 1).sum(), (control["outcomes"] > 1).sum()
    return (
        f"1, 2, 4, 8, 16 and interleaved rows give the same bits in {same} of {len(ours)} shapes; one 2-D tile of 1, 4 "
        f"and 16 rows, the control, gives different bits in {differ} of {len(control)}."
    )


def warm(rows: pd.DataFrame) -> str:
    """What a choice tuned in a warm cache costs when the cache is cold."""
    return _spread(tables.compared(rows, "gemv", names.OURS, names.WARM), "tuned warm / tuned cold")


def interleaving(rows: pd.DataFrame) -> str:
    """Adjacent rows against interleaved ones."""
    return _spread(tables.compared(rows, "gemv", names.rows_variant(4), names.INTERLEAVED), "interleaved / adjacent")


def _spread(table: pd.DataFrame, what: str) -> str:
    """Mean, ends and verdicts of the ratios of all shapes, in a sentence."""
    if table.empty:
        return "not measured."
    least, most = (table.loc[find(table["ratio"])] for find in (pd.Series.idxmin, pd.Series.idxmax))
    ends = [f"{line['ratio']:.2f} at {line['N']} × {line['K']}" for line in (least, most)]
    counts = table["verdict"].value_counts()
    words = ", ".join(f"{word} {counts[word]}" for word in ("faster", "same", "slower", "unclear") if word in counts)
    return (
        f"time {what}: {tables.geometric_mean(table['ratio']):.3f} on average over {len(table)} shapes, from "
        f"{ends[0]} to {ends[1]}. The latter is {words}."
    )


def merging(rows: pd.DataFrame) -> pd.DataFrame:
    """Matrices that share x, one by one against as one, for cuBLAS and the production GEMV."""
    parts = [
        tables.compared(rows, "chain", names.merged(name), names.separate(name)).assign(kernel=name)
        for name in ("torch.mv", "ours")
    ]
    table = pd.concat(parts, ignore_index=True)
    return table[["model", "kernel", "ratio", "low", "high", "noise", "verdict"]]


def questions(rows: pd.DataFrame) -> pd.DataFrame:
    """The issue's questions about coalescing, one by one."""
    us = tables.by_variant(rows)
    merged = merging(rows)

    def gain(before: str, after: str) -> str:
        if not {before, after} <= set(us):
            return "not measured"
        return f"×{tables.geometric_mean((us[before] / us[after]).dropna()):.2f} (geometric mean, bf16 shapes)"

    def merge(kernel: str) -> str:
        some = merged[merged["kernel"] == kernel]["ratio"]
        return f"×{some.min():.2f} to ×{some.max():.2f} of whole layers" if len(some) else "not measured"

    lines = [
        ("Is it the loads of weights that are coalesced?", "yes: lanes of a warp along one row", names.LADDER[0], 2),
        ("Is it their pattern by itself?", "no: the same change makes 32 threads a row of one", names.LADDER[0], 1),
        ("Is it the width of a load?", "a part: 16 bytes a lane instead of one value", names.LADDER[2], 3),
        ("Is it the reuse of x by several rows?", "not in AutoMegaKernel, which shares x in a CTA", names.LADDER[3], 4),
    ]
    found = [
        {"question": question, "answer": answer, "worth here": gain(before, names.LADDER[after])}
        for question, answer, before, after in lines
    ]
    order = gain(names.INTERLEAVED, names.rows_variant(4))
    found += [
        {"question": "Are small GEMVs merged into one?", "answer": "no; with cuBLAS", "worth here": merge("torch.mv")},
        {"question": "", "answer": "with the production GEMV", "worth here": merge("ours")},
        {"question": "Is the layout of tasks changed?", "answer": "no; adjacent rows a program", "worth here": order},
    ]
    return pd.DataFrame(found)


def summary(rows: pd.DataFrame) -> str:
    """The result in one sentence."""
    table = tables.against_library(rows)
    if table.empty:
        return "nothing could be compared with cuBLAS."
    counts = table["verdict"].value_counts()
    words = ", ".join(f"{w} in {counts[w]}" for w in ("faster", "same", "slower", "unclear") if w in counts)
    spread = f"ratios {table['ratio'].min():.2f} to {table['ratio'].max():.2f}"
    return f"against cuBLAS, the production GEMV is {words} of {len(table)} shapes and types ({spread})."


def wanted(study: Any, parameters: Mapping[str, Sequence[Any]]) -> list[tuple[Any, str]]:
    """The kernels whose code is shown: the ladder at the first small shape of the parameters."""
    some = [case for case in study.cases(parameters) if case.op == "gemv" and case["dtype"] == parameters["dtypes"][0]]
    case = min(some, key=lambda case: abs(case["N"] * case["K"] - 2**20))
    return [(case, name) for name in (*names.LADDER, names.OURS)]


def predicted_accesses(accesses: pd.DataFrame) -> pd.DataFrame:
    """How each step loads W: what one request costs."""
    if accesses.empty:
        return accesses
    loads = accesses[(accesses["tensor"] == "W") & accesses["kind"].isin(["load", "async copy"])]
    loads = loads.drop_duplicates("variant")
    renamed = {"bits": "bits a thread", "sectors": "sectors a request", "lines": "lines a request"}
    return loads[["variant", "kind", *renamed]].rename(columns=renamed)


def compiled_table(table: pd.DataFrame) -> pd.DataFrame:
    """What the compiler made of the steps."""
    if table.empty:
        return table
    columns = ["variant", "arch", "registers", "spill_bytes", "shared_bytes", "loads", "shuffles", "barriers"]
    return table[[name for name in columns if name in table]]
