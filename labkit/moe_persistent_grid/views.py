"""Figures and sentences of the study, each made from the rows of one GPU."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from labkit.bench.spec import Case, Study
from labkit.bench.verdict import counted, geometric_mean
from labkit.moe_persistent_grid import claims, names, tables, waves, work
from labkit.moe_persistent_grid.models import MODELS, QWEN35_35B, MoeModel
from labkit.moe_persistent_grid.synthetic import KINDS
from labkit.report import figures

Drawing = Mapping[str, Any] | str  # a sentence where there is nothing to draw
FEW_WAVES, MANY_WAVES = 3, 10
READ_BOUND = 512  # tokens, up to which reading is what the pages show of a layer
SHORT = {names.GROUPED: "F.grouped_mm", names.LIGER: "liger-kernel", names.LOOP: "loop, eager", names.OURS: "ours"}
UNITS = {"us": "µs", "against us": "before µs"}
SOURCE_KERNEL = names.source(16, names.TILES).removesuffix(f", {names.TILES}")


def _uniform(table: pd.DataFrame, weights: str | None = None) -> pd.DataFrame:
    """The rows of the uniform routing, and of one kind of weights."""
    table = table[table["routing"] == KINDS[0]]
    return table[table["weights"] == weights] if weights else table


def _span(values: pd.Series, form: str = "{:.2f}") -> str:
    return f"{form.format(values.min())} to {form.format(values.max())}"


def _rounded(value: float) -> float:
    """To three digits, as the ticks of an axis show it."""
    return float(f"{value:.3g}")


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count != 1 else ''}"


def _at(table: pd.DataFrame) -> list[str]:
    """A label for each row: its tokens, and the routing where that is not the uniform one."""
    odd = [f", {kind}" if kind != KINDS[0] else "" for kind in table["routing"]]
    return [f"{_tokens(tokens)}{kind}" for tokens, kind in zip(table["T"], odd, strict=True)]


# What comes out


def in_short(rows: pd.DataFrame) -> str:
    """When the persistent grid pays, and how the lab's layer stands."""
    said = []
    table = tables.persistence(rows)
    for persistent, words in ((names.OURS_PERSISTENT, "one program an SM"), (names.OURS_FILLED, "as many as fit")):
        part = table[table["persistent"] == persistent]
        if len(part):
            said.append(
                f"of the lab's own GEMMs, one CTA a tile / persistent with {words} is "
                f"×{geometric_mean(part['ratio']):.2f} in the mean of {len(part)} cases (×{_span(part['ratio'])}; "
                f"the persistent grid is {counted(part['verdict'])})"
            )
    best = _uniform(tables.against_best(rows))
    if len(best):
        who = ", ".join(SHORT[name] for name in names.RIVALS if name in set(best["by"]))
        said.append(
            f"the lab's bf16 layer against the fastest of the others ({who}) is ×{geometric_mean(best['ratio']):.2f} "
            f"in the mean of {len(best)} cases, least ×{best['ratio'].min():.2f}"
        )
    return "; ".join(said) + "." if said else "nothing was compared."


def rivals(rows: pd.DataFrame) -> Drawing:
    """The fastest other layer over ours, bf16, uniform routing."""
    table = _uniform(tables.against_best(rows))
    if table.empty:
        return "no other layer was timed beside ours: `pip install labkit[peers]` brings those that there are."
    fig = figures.ratios(
        table.assign(row=_at(table)), "row", "ratio", "low", "high", group="model", verdict="verdict",
        xlabel="time fastest other / time ours (above 1: ours faster)", title="Whole layers, bf16",
    )  # fmt: skip
    least = table.loc[table["ratio"].idxmin()]
    said = f"Ours is {counted(table['verdict'])} of {len(table)} cases; geometric mean "
    said += (
        f"{geometric_mean(table['ratio']):.3f}, least {least['ratio']:.3f} ({least['model']}, {_tokens(least['T'])})"
    )
    return {
        "fig": fig,
        "alt": f"Ratios of the fastest other layer's time over ours, by model and tokens. {said}.",
        "caption": f"Who is the fastest is in the table; the loop alone is eager. {said}.",
        "table": table.drop(columns=["weights", "routing", "no slower", "runs"], errors="ignore"),
    }


def rates(rows: pd.DataFrame) -> Drawing:
    """TFLOP/s of every layer against tokens, bf16."""
    table = _uniform(tables.times(rows), "bf16")
    table = table[table["variant"].isin(SHORT)]
    if table.empty:
        return "no bf16 layer was measured."
    fig = figures.lines(
        table.assign(variant=table["variant"].map(SHORT)), "T", "TFLOP/s", "variant", panel="model", logx=True,
        logy=True, xlabel="tokens", ylabel="TFLOP/s (log)", title="Whole layers, bf16, uniform routing",
    )  # fmt: skip
    best = table.loc[table["TFLOP/s"].idxmax()]
    said = f"Most: {SHORT[best['variant']]}, {best['TFLOP/s']:.0f} TFLOP/s ({best['model']}, {_tokens(best['T'])})"
    columns = ["model", "T", "active", "variant", "mode", "us", "TFLOP/s", "% of products", "TB/s", "% of reading"]
    return {
        "fig": fig,
        "alt": f"Lines of TFLOP/s against tokens, by model and layer. {said}.",
        "caption": f"TB/s in the table: of the weights of the experts that got a token, each once. {said}.",
        "table": table[columns].rename(columns={"us": "µs", "active": "experts active"}),
    }


def launching(rows: pd.DataFrame) -> str:
    """What dependent launch is worth to a layer of few kernels, by tokens."""
    table = _uniform(tables.compared(rows, "layer", names.OURS, names.ORDINARY))
    if table.empty:
        return "launches that wait were not timed beside ours."
    parts = [f"{_tokens(t)} ×{geometric_mean(part['ratio']):.3f}" for t, part in table.groupby("T")]
    return f"time with launches that wait / time as it is, mean of the models: {', '.join(parts)}."


def one_token(rows: pd.DataFrame) -> pd.DataFrame:
    """One token by matrix-vector products and by tiles; ratio: tiles over those."""
    table = _uniform(tables.compared(rows, "layer", names.OURS, names.BY_TILES))
    return table.drop(columns=["T", "routing"], errors="ignore").rename(columns=UNITS)


def sglang(rows: pd.DataFrame) -> pd.DataFrame:
    """Our layer beside SGLang's kernel, of another run."""
    return tables.beside_sglang(rows)


def reading(rows: pd.DataFrame) -> Drawing:
    """The two INT4 GEMMs as percent of the read ceiling, by tokens."""
    table = _uniform(tables.int4_reading(rows))
    table = table[(table["T"] <= READ_BOUND) & table["% of reading"].notna()]
    if table.empty:
        return "no INT4 GEMMs were measured beside a known read ceiling."
    fig = figures.lines(
        table, "T", "% of reading", "model", logx=True, reference=[(80, "80 %")], xlabel="tokens",
        ylabel="% of the read ceiling", title="INT4: the weights of the experts that got a token",
    )  # fmt: skip
    some = table[table["T"].between(16, 128)]["% of reading"]
    said = f"16 to 128 tokens: {_span(some, '{:.0f}')} %" if len(some) else "not measured at 16 to 128 tokens"
    return {
        "fig": fig,
        "alt": f"Lines of percent of the read ceiling against tokens, by model. {said}.",
        "caption": f"Both GEMMs, each with the faster of its grids. {said}.",
        "table": table.rename(columns=UNITS).drop(columns=["weights", "routing"]),
    }


def int4_gain(rows: pd.DataFrame) -> Drawing:
    """Our bf16 layer over our INT4 layer."""
    table = _uniform(tables.compared(rows, "layer", names.OURS, names.OURS_BF16), "INT4")
    if table.empty:
        return "our layer was not measured with both kinds of weights in one case."
    fig = figures.ratios(
        table.assign(row=_at(table)), "row", "ratio", "low", "high", group="model", verdict="verdict",
        xlabel="time bf16 weights / time INT4 weights (above 1: INT4 faster)", title="What INT4 weights are worth",
    )  # fmt: skip
    one, few = table[table["T"] == 1]["ratio"], table[table["T"] < READ_BOUND]["ratio"]
    said = f"One token: ×{_span(one)}; " if len(one) else ""
    said += f"below {READ_BOUND} tokens: least ×{few.min():.2f}" if len(few) else f"none below {READ_BOUND} tokens"
    return {
        "fig": fig,
        "alt": f"Ratios of the bf16 layer's time over the INT4 layer's, by model and tokens. {said}.",
        "caption": f"The same layer, timed in the same blocks. {said}.",
        "table": table.rename(columns={"us": "INT4 µs", "against us": "bf16 µs"}).drop(columns=["weights", "routing"]),
    }


# The grid


def grid(rows: pd.DataFrame) -> Drawing:
    """One CTA a tile / persistent against waves: the first cause."""
    table = tables.persistence(rows)
    table = table[table["waves"].notna()]
    if table.empty:
        return "no kernel was measured in both grids, with its tiles known."
    pairs = zip(table["kernel"], table["persistent"], strict=True)
    table = table.assign(pair=[_pair(*pair) for pair in pairs], waves=table["waves"].map(_rounded))
    fig = figures.lines(
        table, "waves", "ratio", "pair", panel="GEMM", logx=True, joined=False, reference=[(1, "same")],
        xlabel="waves of one CTA a tile", ylabel="one CTA a tile / persistent", title="When a persistent grid pays",
    )  # fmt: skip
    said = _by_waves(table)
    return {
        "fig": fig,
        "alt": f"Marks of the ratio of both grids' times against waves, by kernel. {said}.",
        "caption": f"Above 1 the persistent grid is faster. Waves: tiles over the CTAs that the GPU holds. {said}.",
        "table": table.drop(columns=["pair", "no slower", "runs"], errors="ignore"),
    }


def _pair(kernel: str, persistent: str) -> str:
    return f"{kernel}, {names.FILLED}" if persistent == names.OURS_FILLED else kernel


def _by_waves(table: pd.DataFrame) -> str:
    """Mean ratios of few and of many waves, of as many programs as fit: its other cause is then left out."""
    full = table[table["persistent"] == names.OURS_FILLED]
    few, many = full[full["waves"] <= FEW_WAVES]["ratio"], full[full["waves"] >= MANY_WAVES]["ratio"]
    parts = [
        f"{words} ×{geometric_mean(some):.3f} ({len(some)} cases)"
        for some, words in ((few, f"up to {FEW_WAVES} waves"), (many, f"{MANY_WAVES} waves and more"))
        if len(some)
    ]
    return f"Ours with {names.FILLED}: {', '.join(parts)}" if parts else f"ours was not measured with {names.FILLED}"


def bits(rows: pd.DataFrame) -> str:
    """Does the grid change a result?"""
    table = tables.same_bits(rows)
    if table.empty:
        return "the bits of the results are not recorded."
    same = int(table["same"].sum())
    if same == len(table):
        return f"in all {same} pairs of one CTA a tile and a persistent grid, the rows looked at have the same bits."
    odd = table[~table["same"]].iloc[0]
    return (
        f"in {len(table) - same} of {len(table)} pairs the bits differ, first in {odd['model']}, {_tokens(odd['T'])}, "
        f"{odd['GEMM']}, {odd['kernel']}."
    )


def source_point(rows: pd.DataFrame) -> pd.DataFrame:
    """The source's own case, by variant."""
    return tables.source_point(rows).rename(columns={"us": "µs, both GEMMs"})


def why(rows: pd.DataFrame) -> str:
    """The source's own case in words: waves, what is dead, occupancy."""
    table = tables.source_point(rows).set_index("variant")
    tiles, base = names.source(16, names.TILES), names.BASE
    if not {tiles, base} <= set(table.index):
        return f"the case of {QWEN35_35B.name} at {tables.SOURCE_T} tokens was not measured."
    filled = names.source(16, names.PERSISTENT, names.FILLED)
    early = names.source(16, names.PERSISTENT, names.EARLY)
    said = f"with blocks of 16 rows and W4A16, one CTA a tile / persistent is ×{table['tiles / this'][base]:.3f}"
    if table["CTAs an SM"][base] == table["CTAs an SM"][base]:
        said += f"; {table['CTAs an SM'][base]:.0f} CTAs fit an SM, {table['launched an SM'][base]:.0f} is launched"
    if filled in table.index:
        said += f"; as many as fit: ×{table['us'][base] / table['us'][filled]:.3f} over one"
    if early in table.index and table["dead %"][base] == table["dead %"][base]:
        said += f"; {table['dead %'][base]:.1f} % of the blocks are dead, and leaving them off gives "
        said += f"×{table['us'][base] / table['us'][early]:.3f}"
    return said + "."


def occupancy(rows: pd.DataFrame) -> Drawing:
    """The second cause: SMs × occupancy over one program an SM, by the CTAs that fit."""
    table = tables.changes(rows)
    change = names.source(16, names.PERSISTENT, names.FILLED)
    table = table[(table["change"] == change) & (table["over"] == names.BASE)]
    known = tables.persistence(rows)
    known = known[known["kernel"] == SOURCE_KERNEL].set_index([*tables.CASE, "GEMM"])["CTAs an SM"]
    if table.empty:
        return f"{names.FILLED} was not measured."
    fits = known.reindex(pd.MultiIndex.from_frame(table[[*tables.CASE, "GEMM"]])).to_numpy()
    table = table.assign(**{"CTAs an SM": fits, "row": _at(table), "group": _groups(table)})
    fig = figures.ratios(
        table, "row", "ratio", "low", "high", group="group", verdict="verdict",
        xlabel="time one program an SM / time as many as fit (above 1: filling pays)", title="What occupancy is worth",
    )  # fmt: skip
    said = f"×{_span(table['ratio'])}, {counted(table['verdict'])} of {len(table)} cases"
    return {
        "fig": fig,
        "alt": f"Ratios of time with one program an SM over time with as many as fit, by case. {said}.",
        "caption": f"The source's persistent kernel, blocks of 16 rows. {said}.",
        "table": table.drop(columns=["row", "group"]).rename(columns=UNITS),
    }


def _groups(table: pd.DataFrame) -> list[str]:
    columns = (table["model"], table["weights"], table["GEMM"])
    return [", ".join(words) for words in zip(*columns, strict=True)]


def order(rows: pd.DataFrame) -> Drawing:
    """The third cause: tile order, on fine-grained experts and on Mixtral's."""
    table = tables.order(rows)
    if table.empty:
        return "no tile orders were measured."
    table = table.assign(line=[f"{model}, {_tokens(t)}" for model, t in zip(table["model"], table["T"], strict=True)])
    some = table[table["GEMM"] == "gemm1"] if (table["GEMM"] == "gemm1").any() else table
    fig = figures.lines(
        some, "groups of", "ratio", "line", panel="weights", logx=True, reference=[(1, "groups of 1")],
        xlabel="GROUP_SIZE_M", ylabel="time groups of 1 / time", title=f"Tile order, {some['GEMM'].iloc[0]}",
    )  # fmt: skip
    large = table[table["groups of"] > 1]
    parts = [
        f"{model} ({_span(part['MB an expert'], '{:.1f}')} MB an expert) ×{_span(part['ratio'])}"
        for model, part in large.groupby("model", sort=False)
    ]
    hits = table[table["L2 hits %"].notna()]
    said = "; ".join(parts) or "only one order was measured"
    said += f". Sectors that the L2 had: {_span(hits['L2 hits %'], '{:.0f}')} %" if len(hits) else ""
    return {
        "fig": fig,
        "alt": f"Lines of time with groups of 1 over time with larger groups, by model and tokens. {said}.",
        "caption": f"Above 1: grouping pays. {said}.",
        "table": table.drop(columns=["line"]).rename(columns=UNITS),
    }


def worth(rows: pd.DataFrame) -> pd.DataFrame:
    """What each change of the source's kernel is worth."""
    return tables.worth(rows)


def pays(rows: pd.DataFrame) -> str:
    """The changes that pay, and those that cost, on average."""
    table = tables.worth(rows)
    if table.empty:
        return "no change was measured."
    said = []
    for some, words in ((table[table["mean ratio"] > 1.01], "pay"), (table[table["mean ratio"] < 0.99], "cost")):
        parts = [_change(*pair, part) for pair, part in some.groupby(["change", "over"], sort=False)]
        said.append(f"on average these {words}: {'; '.join(parts)}" if parts else f"on average none {words}s")
    return ". ".join(f"{part[0].upper()}{part[1:]}" for part in said) + "."


def _change(after: str, before: str, part: pd.DataFrame) -> str:
    """A change in words, with its mean ratio for each kind of weights."""
    ratios = ", ".join(f"{w} ×{r:.2f}" for w, r in zip(part["weights"], part["mean ratio"], strict=True))
    added = after.removeprefix(f"{before}, ")
    return f"{added if added != after else f'{after} over {before}'} ({ratios})"


def dead(rows: pd.DataFrame) -> Drawing:
    """What early exit saves, against what is dead of the grid."""
    table = tables.dead(rows)
    table = table[table["dead %"].notna()]
    if table.empty:
        return "early exit was not measured, or not with the grid's blocks."
    table = table.assign(**{"saved %": 100 * (1 - 1 / table["ratio"]), "dead %": table["dead %"].round(1)})
    fig = figures.lines(
        table, "dead %", "saved %", "grid", panel="weights", joined=False, xlabel="dead blocks, %",
        ylabel="time saved by early exit, %", title="What dead blocks cost",
    )  # fmt: skip
    said = f"{_span(table['dead %'], '{:.0f}')} % dead, {_span(table['saved %'], '{:.0f}')} % of the time saved"
    return {
        "fig": fig,
        "alt": f"Marks of the time saved by early exit against the dead share of the grid. {said}.",
        "caption": f"The source's kernel with blocks of 16 rows; its grid is for the worst case. {said}.",
        "table": table.drop(columns=["no slower", "runs"], errors="ignore"),
    }


def dead_shares(tokens: Sequence[int], blocks: Sequence[int] = (16, 64)) -> pd.DataFrame:
    """Dead share of the source's grid under uniform routing by arithmetic, for every model; no measurement."""
    found = []
    for model in MODELS.values():
        for t in tokens:
            line = {"model": model.name, "T": t}
            for size in blocks:
                live = waves.expected_blocks(t, model.top_k, model.experts, size)
                share = waves.dead_share(live, waves.source_blocks(t, model.top_k, model.experts, size))
                line[f"dead %, BM={size}"] = 100 * share
            found.append(line)
    return pd.DataFrame(found)


def compiled_wanted(study: Study, parameters: Mapping[str, Any]) -> list[tuple[Case, str]]:
    """The kernels whose code the page shows: the source's GEMM1 at its own tokens, and the lab's."""
    shape = QWEN35_35B.as_dict() | {"T": tables.SOURCE_T, "routing": KINDS[0], "weights": "INT4", "activations": "bf16"}
    case = Case("gemm1", shape)
    wanted = (names.source(16, names.TILES), names.source(64, names.TILES), names.source(16, names.TILES, int8=True))
    known = {x.key for x in study.cases(parameters) if x.op == case.op}
    return [(case, name) for name in (*wanted, names.OURS_TILES)] if case.key in known else []


def compiled_table(evidence: pd.DataFrame) -> pd.DataFrame:
    """Registers, occupancy, matrix instructions and loads of each kernel by target."""
    if evidence.empty:
        return evidence
    found = evidence[["variant", "arch", "registers", "spill_bytes", "ctas_per_sm"]].rename(
        columns={"arch": "target", "spill_bytes": "bytes spilled", "ctas_per_sm": "CTAs an SM"}
    )
    found["target"] = [f"sm_{arch}" for arch in found["target"]]
    for column, name in (("matrix", "matrix instructions"), ("loads", "loads of so many bits")):
        found[name] = [", ".join(some) for some in evidence[column]]
    return found


def waves_by_gpu(model: MoeModel, tokens: int, block_m: int, block_n: int, per_sm: int) -> pd.DataFrame:
    """Waves and efficiency of both GEMMs of a shape on GPUs of several sizes, uniform routing; no measurement."""
    live = round(waves.expected_blocks(tokens, model.top_k, model.experts, block_m))
    found = []
    for name, columns in (("gemm1", 2 * model.width), ("gemm2", model.hidden)):
        tiles = waves.tiles(live, columns, block_n)
        for gpu, (count, share) in waves.on_gpus(tiles, per_sm).items():
            found.append({"GEMM": name, "GPU": gpu, "tiles": tiles, "waves": count, "efficiency": share})
    return pd.DataFrame(found)


# Other sizes of GPUs


def steps(rows: pd.DataFrame) -> Drawing:
    """Time against tiles on parts of the GPU: whole waves are what counts."""
    table = tables.steps(rows)
    if table.empty:
        return "the GEMM of few tiles was not measured on parts of this GPU."
    table = table.assign(part=table["SMs"].astype(str) + " SMs").sort_values(["SMs", "tiles"])
    fig = figures.lines(
        table, "tiles", "us", "part", panel="grid", xlabel="tiles", ylabel="µs",
        title="A GEMM of few tiles on fewer multiprocessors",
    )  # fmt: skip
    known = table[table["predicted"].notna()]
    off = 100 * (known["measured"] / known["predicted"] - 1)
    said = f"Measured over predicted by whole waves: {off.median():+.0f} % in the median of {len(off)}, "
    said += f"{off.min():+.0f} to {off.max():+.0f} %" if len(off) else ""
    said = said if len(off) else "No part of the GPU was measured beside all of it"
    return {
        "fig": fig,
        "alt": f"Lines of time against tiles, by multiprocessors and grid. {said}.",
        "caption": f"All tokens at one expert; timed outside the blocks of the other variants. {said}.",
        "table": table.drop(columns=["part"]).rename(columns=UNITS),
    }


def parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Whether the persistent grid pays more on fewer multiprocessors: one CTA a tile / persistent, a column a part."""
    table = tables.persistent_on_parts(rows)
    if table.empty:
        return table
    table = table.assign(part=table["SMs"].astype(str) + " SMs")
    order = [f"{sms} SMs" for sms in sorted(set(table["SMs"]), reverse=True)]
    return table.pivot(index="T", columns="part", values="ratio")[order].reset_index()


def other_gpus(rows: pd.DataFrame) -> pd.DataFrame:
    """Efficiency of the source's grid on GPUs of other sizes, one column a GPU; by arithmetic."""
    table = tables.on_other_gpus(rows)
    if table.empty:
        return table
    table = table[table["weights"] == "INT4"] if (table["weights"] == "INT4").any() else table
    index = ["model", "GEMM", "T"]
    found = table.pivot_table(index=index, columns="GPU", values="efficiency", sort=False)
    return found[[gpu for gpu in waves.SMS if gpu in found]].reset_index()


# Routing, tuning, prediction


def routings(rows: pd.DataFrame) -> Drawing:
    """Our layer under each synthetic routing."""
    table = tables.routings(rows)
    if table.empty:
        return "our layer was measured under one routing only."
    table = table.assign(case=_cases(table))
    fig = figures.bars(
        table, "routing", "over uniform", "case", xlabel="synthetic routing", ylabel="time / time of uniform routing",
        title="What skew does to a layer", reference=[(1, "uniform")],
    )  # fmt: skip
    worst = table.loc[table["over uniform"].idxmax()]
    said = f"Most: ×{worst['over uniform']:.2f}, {worst['case']}, {worst['routing']}"
    return {
        "fig": fig,
        "alt": f"Bars of time over that of uniform routing, by synthetic routing and case. {said}.",
        "caption": f"Synthetic routings; how skewed each is, and how many experts are active, is in the table. {said}.",
        "table": table.drop(columns=["case"]).rename(columns=UNITS),
    }


def _cases(table: pd.DataFrame) -> list[str]:
    columns = (table["model"], table["weights"], table["T"])
    return [f"{model}, {weights}, {_tokens(t)}" for model, weights, t in zip(*columns, strict=True)]


def tuning(rows: pd.DataFrame) -> str:
    """How long tuning takes, and what it and the number of tokens in its key are worth."""
    said = []
    seconds = tables.tuning_seconds(rows)
    if len(seconds):
        said.append(f"a shape took {seconds.median():.1f} s to tune in the median, at most {seconds.max():.1f} s")
    for variant, words in ((names.RULE, "by the rule"), (names.OTHER_TOKENS, f"tuned for {names.TUNED_FOR} tokens")):
        table = _uniform(tables.compared(rows, "layer", names.OURS, variant))
        if len(table):
            worst = table.loc[table["ratio"].idxmax()]
            said.append(
                f"{words} the layer takes ×{geometric_mean(table['ratio']):.2f} as long in the mean of {len(table)} "
                f"cases, at most ×{worst['ratio']:.2f} ({worst['model']}, {worst['weights']}, {_tokens(worst['T'])})"
            )
    return "; ".join(said) + "." if said else "nothing was tuned."


def prediction(rows: pd.DataFrame) -> Drawing:
    """Measured over predicted time of our layers: what bytes and products do not explain."""
    found = []
    for params, group in tables.cases(rows, "layer"):
        ours = group[(group["variant"] == names.OURS) & group["ok"] & group["predicted_us"].notna()]
        for us, (_, row) in zip((tables.median_us(ours)).values(), ours.iterrows(), strict=True):
            line = {name: params[name] for name in tables.CASE} | {"us": us, "predicted us": row["predicted_us"]}
            found.append(line | {"off %": 100 * (us / row["predicted_us"] - 1)})
    table = pd.DataFrame(found, columns=None if found else [*tables.CASE, "off %"])
    table = _uniform(table)
    if table.empty:
        return "no prediction was stored: this GPU's ceilings were not known."
    fig = figures.lines(
        table, "T", "off %", "model", panel="weights", logx=True, reference=[(0, "as predicted")], xlabel="tokens",
        ylabel="measured over predicted, %", title="The floor as a prediction",
    )  # fmt: skip
    said = f"{_span(table['off %'], '{:+.0f}')} %"
    return {
        "fig": fig,
        "alt": f"Lines of measured over predicted time against tokens, by model. {said}.",
        "caption": f"Weights of the active experts at the read ceiling, or products at theirs, and a launch. {said}.",
        "table": table.rename(columns={"us": "µs", "predicted us": "predicted µs"}),
    }


def floor_cases(cases: Sequence[Case]) -> list[Case]:
    """The layers whose floors the page shows: bf16, uniform routing."""
    return [x for x in cases if x.op == "layer" and x["weights"] != "INT4" and x["routing"] == KINDS[0]]


def active_experts(cases: Sequence[Case]) -> pd.DataFrame:
    """Experts that get a token in each case's routing, and the bytes of their weights; no measurement."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for x in cases:
        if x.op == "layer" and x["routing"] == KINDS[0]:
            line = {"model": x["model"], "T": x["T"], "active": work.active(x), "of": x["E"]}
            line |= found.get((x["model"], x["T"]), {})
            moved = work.weight_bytes(x)
            line |= {f"MB, {x['weights']}": moved / 1e6, f"FLOP a byte, {x['weights']}": work.flops(x) / moved}
            found[x["model"], x["T"]] = line
    return _frame_of(found.values(), ["model", "T", "active", "of"])


def _frame_of(lines: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    lines = list(lines)
    return pd.DataFrame(lines, columns=None if lines else columns)


def summary(rows: pd.DataFrame) -> str:
    """The verdicts in one sentence each."""
    judged = ((claim.statement, claim.judge(rows)) for claim in claims.CLAIMS)
    return " ".join(f"{statement}: {found.verdict} ({found.why})." for statement, found in judged)
