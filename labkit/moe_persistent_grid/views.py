"""Figures and sentences of the study, each made from the rows of one GPU."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import pandas as pd

from labkit.bench.spec import Case, Study
from labkit.bench.verdict import counted, geometric_mean
from labkit.moe_persistent_grid import names, tables, waves, work
from labkit.moe_persistent_grid.models import MODELS, QWEN35_35B, MoeModel
from labkit.moe_persistent_grid.synthetic import KINDS
from labkit.report import figures

Drawing = Mapping[str, Any] | str  # a sentence where there is nothing to draw
ONE_WAVE, FEW_WAVES, MANY_WAVES = 1, 3, 10
FULL = 0.9  # share of the slots' time that is work, up to which a last wave leaves something to win
BAND = 0.01  # a mean ratio nearer to 1 is none
AIM = 80  # percent of the read ceiling that the INT4 GEMMs of 16 to 128 tokens are to reach
CLOSE = 5  # points of percent: a saving this near to the dead share follows from it
READ_BOUND = 512  # tokens, up to which reading is what the pages show of a layer
SHORT = {names.GROUPED: "F.grouped_mm", names.LIGER: "liger-kernel", names.LOOP: "loop, eager", names.OURS: "ours"}
GRIDS = ((names.OURS_PERSISTENT, "one program an SM"), (names.OURS_FILLED, "as many programs as fit"))
LOOKED_AT = (
    names.source(16, names.TILES), names.BASE, names.source(16, names.PERSISTENT, names.ONCE),
    names.source(64, names.TILES), names.source(16, names.TILES, int8=True), names.OURS_TILES,
)  # fmt: skip
UNITS = {"us": "µs", "against us": "before µs"}


def _uniform(table: pd.DataFrame, weights: str | None = None) -> pd.DataFrame:
    """The rows of the uniform routing, and of one kind of weights."""
    table = table[table["routing"] == KINDS[0]]
    return table[table["weights"] == weights] if weights else table


def _span(values: pd.Series, form: str = "{:.2f}") -> str:
    ends = [form.format(end) for end in (values.min(), values.max())]
    return " to ".join(dict.fromkeys(ends))


def _mean(ratios: pd.Series) -> str:
    """Mean of some cases' ratios, and the least and most of them."""
    return f"×{geometric_mean(ratios):.2f} in the mean of {len(ratios)} cases, ×{_span(ratios)}"


def _interval(line: pd.Series) -> str:
    return f"×{line['ratio']:.2f} [{line['low']:.2f}, {line['high']:.2f}]"


def _where(line: pd.Series) -> str:
    """The case of a row in words: model, tokens, and what else it has of weights, GEMM and routing."""
    words = [line["model"], line.get("weights"), _tokens(line["T"]), line.get("GEMM"), line.get("routing")]
    return ", ".join(str(word) for word in words if word and word != KINDS[0])


def _shown(table: pd.DataFrame, *hidden: str) -> pd.DataFrame:
    """A table without what its page says elsewhere."""
    return table.drop(columns=["routing", "no slower", "runs", *hidden], errors="ignore").rename(columns=UNITS)


def _sentences(said: Iterable[str], otherwise: str) -> str:
    return " ".join(one for one in said if one) or otherwise


def _rounded(value: float) -> float:
    """To two digits, as the ticks of an axis show it."""
    return float(f"{value:.2g}")


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count != 1 else ''}"


def _at(table: pd.DataFrame) -> list[str]:
    """A label for each row: its tokens, and the routing where that is not the uniform one."""
    odd = [f", {kind}" if kind != KINDS[0] else "" for kind in table["routing"]]
    return [f"{_tokens(tokens)}{kind}" for tokens, kind in zip(table["T"], odd, strict=True)]


# What comes out


def in_short(rows: pd.DataFrame) -> str:
    """When the persistent grid pays, what became of the source's, and how the lab's layer stands."""
    said = [*_ours_in_both(rows), _source_in_short(rows), _layer_in_short(rows), _int4_in_short(rows)]
    return _sentences(said, "nothing was compared.")


def _ours_in_both(rows: pd.DataFrame) -> list[str]:
    table, said = tables.persistence(rows), []
    for persistent, words in GRIDS:
        part = table[table["persistent"] == persistent]
        if len(part):
            said.append(
                f"In the lab's own GEMMs a persistent grid of {words} is {counted(part['verdict'])} of {len(part)} "
                f"cases (×{geometric_mean(part['ratio']):.2f} in the mean, ×{_span(part['ratio'])})."
            )
    return said


def _source_in_short(rows: pd.DataFrame) -> str:
    table = tables.source_point(rows).set_index("variant")["tiles / this"].dropna()
    known = {"8-bit activations": names.source(16, names.PERSISTENT, int8=True), "bf16 ones": names.BASE}
    parts = [f"×{table[variant]:.2f} with {words}" for words, variant in known.items() if variant in table]
    return f"The source's kernels at its own point: {' and '.join(parts)}." if parts else ""


def _layer_in_short(rows: pd.DataFrame) -> str:
    table = tables.against_best(rows)
    uniform, skewed = _uniform(table), table[table["routing"] != KINDS[0]]
    if uniform.empty:
        return ""
    who = ", ".join(SHORT[name] for name in names.RIVALS if name in set(uniform["by"]))
    said = f"The lab's bf16 layer: time of the fastest other ({who}) / ours is {_mean(uniform['ratio'])}"
    if len(skewed):
        said += f"; under skewed routings ×{_span(skewed['ratio'])}, {counted(skewed['verdict'])} of {len(skewed)}"
    return f"{said}."


def _int4_in_short(rows: pd.DataFrame) -> str:
    table = _int4(rows)
    if table.empty:
        return ""
    return f"With INT4 weights it is {counted(table['verdict'])} of {len(table)} cases than with bf16: {_few(table)}."


def _int4(rows: pd.DataFrame) -> pd.DataFrame:
    return _uniform(tables.compared(rows, "layer", names.OURS, names.OURS_BF16), "INT4")


def _few(table: pd.DataFrame) -> str:
    """Ratios of INT4 weights up to the most tokens at which no model is slower with them, and beyond."""
    good = [t for t, part in table.groupby("T") if part["verdict"].isin(["faster", "same"]).all()]
    bad = sorted(set(table["T"]) - set(good))
    good = [t for t in good if not bad or t < bad[0]]
    parts = [(f"up to {_tokens(max(good))}", table["T"] <= max(good))] if good else []
    parts += [("beyond" if good else "in all", table["T"] > max(good, default=0))]
    return ", ".join(f"{words} ×{_span(table[some]['ratio'])}" for words, some in parts if some.any())


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
    said += f"{geometric_mean(table['ratio']):.3f}, least {least['ratio']:.3f} ({_where(least)})"
    more = table[table["T"] > 1]["ratio"]
    said += f"; without one token {geometric_mean(more):.3f}" if 0 < len(more) < len(table) else ""
    return {
        "fig": fig,
        "alt": f"Ratios of the fastest other layer's time over ours, by model and tokens. {said}.",
        "caption": f"Who is the fastest is in the table; the loop alone is eager. {said}.",
        "table": _shown(table.assign(by=table["by"].map(SHORT)), "weights"),
    }


def rates(rows: pd.DataFrame) -> Drawing:
    """TFLOP/s of every layer against tokens, bf16."""
    table = _uniform(tables.times(rows), "bf16")
    table = table[table["variant"].isin(SHORT)]
    if table.empty:
        return "no bf16 layer was measured."
    _, tflops = tables.ceilings(rows)
    fig = figures.lines(
        table.assign(variant=table["variant"].map(SHORT)), "T", "TFLOP/s", "variant", panel="model", logx=True,
        logy=True, xlabel="tokens", ylabel="TFLOP/s (log)", title="Whole layers, bf16, uniform routing",
        reference=[(tflops, "ceiling")] if tflops == tflops else None,
    )  # fmt: skip
    best = table.loc[table["TFLOP/s"].idxmax()]
    said = f"Most: {SHORT[best['variant']]}, {best['TFLOP/s']:.0f} TFLOP/s ({best['model']}, {_tokens(best['T'])})"
    columns = ["model", "T", "active", "variant", "mode", "us", "TFLOP/s", "% of products", "TB/s", "% of reading"]
    return {
        "fig": fig,
        "alt": f"Lines of TFLOP/s against tokens, by model and layer. {said}.",
        "caption": "The line is the ceiling of bf16 products. TB/s in the table: of the weights of the experts that "
        f"got a token, each once. {said}.",
        "table": table[columns].rename(columns={"us": "µs", "active": "experts active"}),
    }


def launching(rows: pd.DataFrame) -> str:
    """What dependent launch is worth to a layer of few kernels, by tokens."""
    table = _uniform(tables.compared(rows, "layer", names.OURS, names.ORDINARY))
    if table.empty:
        return "launches that wait were not timed beside ours."
    parts = [
        f"{_tokens(t)} ×{geometric_mean(part['ratio']):.3f} (faster in {(part['verdict'] == 'faster').sum()} of "
        f"{len(part)} models)"
        for t, part in table.groupby("T")
    ]
    return f"time with launches that wait / time as it is, mean of the models: {', '.join(parts)}."


def one_token(rows: pd.DataFrame) -> pd.DataFrame:
    """One token by matrix-vector products and by tiles; ratio: tiles over those."""
    table = _uniform(tables.compared(rows, "layer", names.OURS, names.BY_TILES))
    return table.drop(columns=["T", "routing"], errors="ignore").rename(columns=UNITS)


def other_runs(rows: pd.DataFrame) -> pd.DataFrame:
    """Our layer beside kernels that are no library to call, of another run."""
    return tables.beside_other_runs(rows)


def ahead_of_those(rows: pd.DataFrame) -> str:
    """How often and how much ours is ahead of the better of those kernels."""
    table = tables.beside_other_runs(rows)
    if table.empty:
        return "no figures of another run are known for this GPU."
    ratio = table[[name for name in table if name.endswith("/ ours")]].min(axis=1)
    least = table.loc[ratio.idxmin()]
    return (
        f"the better of them / ours is above 1 in {(ratio > 1).sum()} of {len(ratio)} cases, ×{_span(ratio)}, least "
        f"with {_where(least)}; of two runs, so without an interval."
    )


def reading(rows: pd.DataFrame) -> Drawing:
    """The two INT4 GEMMs as percent of the read ceiling, by tokens."""
    table = _uniform(tables.int4_reading(rows))
    table = table[(table["T"] <= READ_BOUND) & table["% of reading"].notna()]
    if table.empty:
        return "no INT4 GEMMs were measured beside a known read ceiling."
    fig = figures.lines(
        table, "T", "% of reading", "model", logx=True, reference=[(AIM, "aimed at")], xlabel="tokens",
        ylabel="% of the read ceiling", title="INT4: the weights of the experts that got a token",
    )  # fmt: skip
    some = table[table["T"].between(16, 128)]
    said = "not measured at 16 to 128 tokens"
    if len(some):
        said = f"16 to 128 tokens: {_span(some['% of reading'], '{:.0f}')} %, at least {AIM} % in "
        said += f"{(some['% of reading'] >= AIM).sum()} of {len(some)} cases"
    beside = some["% of reading here"].dropna()
    said += f"; of reading in the same run {_span(beside, '{:.0f}')} %" if len(beside) else ""
    return {
        "fig": fig,
        "alt": f"Lines of percent of the read ceiling against tokens, by model. {said}.",
        "caption": "Both GEMMs by tiles, each with the faster of its grids; the layer of one token has other kernels. "
        f"{said}.",
        "table": table.rename(columns=UNITS).drop(columns=["weights", "routing"]),
    }


def int4_gain(rows: pd.DataFrame) -> Drawing:
    """Our bf16 layer over our INT4 layer."""
    table = _int4(rows)
    if table.empty:
        return "our layer was not measured with both kinds of weights in one case."
    fig = figures.ratios(
        table.assign(row=_at(table)), "row", "ratio", "low", "high", group="model", verdict="verdict",
        xlabel="time bf16 weights / time INT4 weights (above 1: INT4 faster)", title="What INT4 weights are worth",
    )  # fmt: skip
    least = table.loc[table["ratio"].idxmin()]
    said = f"INT4 is {counted(table['verdict'])} of {len(table)} cases: {_few(table)}"
    said += _one_token_reads(table, rows)
    said += f". Least: ×{least['ratio']:.2f} ({least['model']}, {_tokens(least['T'])})"
    return {
        "fig": fig,
        "alt": f"Ratios of the bf16 layer's time over the INT4 layer's, by model and tokens. {said}.",
        "caption": f"The same layer, timed in the same blocks; rates in the table are of INT4. {said}.",
        "table": _shown(_with_rates(table, rows), "weights"),
    }


def _one_token_reads(table: pd.DataFrame, rows: pd.DataFrame) -> str:
    """One token: the ratio, and how near to the read ceiling both kinds of weights are."""
    one = table[table["T"] == 1]["ratio"]
    rates = _uniform(tables.times(rows)).dropna(subset=["% of reading"])
    rates = rates[(rates["T"] == 1) & (rates["variant"] == names.OURS)]
    shares = [f"{w} {_span(part['% of reading'], '{:.0f}')} %" for w, part in rates.groupby("weights")]
    if one.empty:
        return ""
    return f"; one token ×{_span(one)}" + (f" (of the read ceiling: {', '.join(shares)})" if shares else "")


def _with_rates(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """A table of layers with our rates beside both ceilings."""
    rates = tables.times(rows)
    rates = rates[rates["variant"] == names.OURS][[*tables.CASE, "TFLOP/s", "% of products", "TB/s", "% of reading"]]
    found = table.rename(columns={"us": "INT4 µs", "against us": "bf16 µs"})
    return found.merge(rates, how="left", on=tables.CASE)


# The grid


def grid(rows: pd.DataFrame) -> Drawing:
    """One CTA a tile / persistent against waves: the first cause."""
    table = tables.persistence(rows)
    table = table[table["waves"].notna()]
    if table.empty:
        return "no kernel was measured in both grids, with its tiles known."
    pairs = zip(table["kernel"], table["persistent"], strict=True)
    table = table.assign(pair=[_pair(*pair) for pair in pairs], at=table["waves"].map(_rounded))
    fig = figures.lines(
        table, "at", "ratio", "pair", panel="GEMM", logx=True, joined=False, reference=[(1, "same")],
        xlabel="waves of one CTA a tile", ylabel="one CTA a tile / persistent", title="When a persistent grid pays",
    )  # fmt: skip
    said = _by_waves(table)
    return {
        "fig": fig,
        "alt": f"Marks of the ratio of both grids' times against waves, by kernel. {said}.",
        "caption": f"Above 1 the persistent grid is faster. Waves: tiles over the CTAs that the GPU holds. {said}.",
        "table": _shown(table, "pair", "at"),
    }


def _pair(kernel: str, persistent: str) -> str:
    return f"{kernel}, {names.FILLED}" if persistent == names.OURS_FILLED else kernel


def _by_waves(table: pd.DataFrame) -> str:
    """Mean ratios by waves, of as many programs as fit: the second cause is then left out; and what follows."""
    full = table[table["persistent"] == names.OURS_FILLED]
    if full.empty:
        return f"Ours was not measured with {names.FILLED}"
    few, many = full["waves"].between(ONE_WAVE, FEW_WAVES, "right"), full["waves"] >= MANY_WAVES
    some = {
        f"up to {ONE_WAVE} wave": full["waves"] <= ONE_WAVE, f"{ONE_WAVE} to {FEW_WAVES} waves": few,
        f"{MANY_WAVES} waves and more": many,
        f"at most {FULL:.0%} of the slots' time is work".replace("%", " %"): full["efficiency"] <= FULL,
    }  # fmt: skip
    parts = [f"{words} {_brief(full[these])}" for words, these in some.items() if these.any()]
    said = [f"Ours with {names.FILLED}: {'; '.join(parts)}", _costs_ctas(table)]
    if few.any() and many.any():
        gains = [geometric_mean(full[these]["ratio"]) for these in (few, many)]
        pays = gains[0] > max(1, gains[1]) + BAND
        said.append(f"First cause: {'confirmed, few waves gain' if pays else 'refuted, few waves gain nothing either'}")
    return ". ".join(one for one in said if one)


def _brief(table: pd.DataFrame) -> str:
    return f"×{geometric_mean(table['ratio']):.3f} ({counted(table['verdict'])} of {len(table)})"


def _costs_ctas(table: pd.DataFrame) -> str:
    """In how many pairs the loop over tiles leaves room for fewer CTAs."""
    pairs = table.drop_duplicates([*tables.CASE, "GEMM", "kernel"]).dropna(subset=tables.CODE)
    if pairs.empty:
        return ""
    fewer = int((pairs["persistent CTAs"] < pairs["CTAs an SM"]).sum())
    return (
        f"The loop over tiles takes registers: fewer CTAs of the persistent kernel fit in {fewer} of {len(pairs)} pairs"
    )


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
    units = {"us": "µs, both", "GEMM1 us": "GEMM1 µs", "GEMM2 us": "GEMM2 µs"}
    return tables.source_point(rows).rename(columns=units)


def tuned_point(rows: pd.DataFrame) -> pd.DataFrame:
    """Each GEMM of the source's own case, each grid with the fastest of its tiles."""
    return tables.tuned_point(rows).rename(columns={"us": "µs", "persistent us": "persistent µs"})


def why(rows: pd.DataFrame) -> str:
    """The source's own case in words: both GEMMs, their code, occupancy, loads, what is dead."""
    table = tables.source_point(rows).set_index("variant")
    tiles, base = names.source(16, names.TILES), names.BASE
    if not {tiles, base} <= set(table.index):
        return f"the case of {QWEN35_35B.name} at {tables.SOURCE_T} tokens was not measured."
    said = f"with blocks of 16 rows and W4A16, one CTA a tile / persistent is ×{table['tiles / this'][base]:.3f}"
    said += _each_gemm(rows)
    return f"{said}. " + _sentences(
        [_other_code(table), _fitting(table), _loads(table), _dead(table), _ours_there(rows)], ""
    )


def _each_gemm(rows: pd.DataFrame) -> str:
    """The same ratio of each GEMM, with its interval."""
    table = tables.persistence(rows)
    point = (table["model"] == QWEN35_35B.name) & (table["T"] == tables.SOURCE_T) & (table["weights"] == "INT4")
    table = table[point & (table["persistent"] == names.BASE)]
    parts = [
        f"×{line['ratio']:.3f} [{line['low']:.3f}, {line['high']:.3f}] of {line['GEMM']}"
        for _, line in table.iterrows()
    ]
    noise = table["noise"].max()
    return f" ({', '.join(parts)}" + (f"; A/A within ±{100 * noise:.1f} %)" if noise == noise else ")")


def _other_code(table: pd.DataFrame) -> str:
    """What the loop over tiles makes of each GEMM's kernel."""
    tiles, base = (table.loc[name] for name in (names.source(16, names.TILES), names.BASE))
    columns = {"GEMM1": ("registers", "CTAs an SM"), "GEMM2": ("GEMM2 registers", "GEMM2 CTAs")}
    parts = [
        f"{gemm} {tiles[registers]:.0f} → {base[registers]:.0f} registers, {tiles[ctas]:.0f} → {base[ctas]:.0f} CTAs"
        for gemm, (registers, ctas) in columns.items()
        if base[registers] == base[registers] and tiles[registers] == tiles[registers]
    ]
    return f"The loop over tiles makes other code: {'; '.join(parts)} that fit an SM." if parts else ""


def _fitting(table: pd.DataFrame) -> str:
    base, filled = names.BASE, names.FILLED_BASE
    said = ""
    if table["CTAs an SM"][base] == table["CTAs an SM"][base]:
        said = f"Of GEMM1 {table['CTAs an SM'][base]:.0f} CTAs fit an SM and {table['launched an SM'][base]:.0f} is "
        said += "launched. "
    if filled in table.index:
        said += f"As many as fit are ×{table['us'][base] / table['us'][filled]:.3f} over one, "
        said += f"and ×{table['tiles / this'][filled]:.3f} over one CTA a tile ("
        tiles = table.loc[names.source(16, names.TILES)]
        each = [f"{gemm} ×{tiles[f'{gemm} us'] / table[f'{gemm} us'][filled]:.3f}" for gemm in ("GEMM1", "GEMM2")]
        said += f"{', '.join(each)})."
    return said.strip()


def _loads(table: pd.DataFrame) -> str:
    """What loads of single bytes cost."""
    base, once = names.BASE, names.source(16, names.PERSISTENT, names.ONCE)
    if once not in table.index:
        return ""
    said = f"Each byte of a weight loaded once, not twice, gives ×{table['us'][base] / table['us'][once]:.3f}"
    loads = table["8-bit loads"]
    if loads[base] == loads[base] and loads[once] == loads[once]:
        said += f": the code has {loads[base]:.0f} loads of 8 bits before and {loads[once]:.0f} after"
    return f"{said}."


def _ours_there(rows: pd.DataFrame) -> str:
    """The lab's two GEMMs at the source's own point beside the fastest of its variants."""
    us = tables.source_point(rows).set_index("variant")["us"]
    ours = us.get(names.OURS_TILES)
    us = us.drop(names.OURS_TILES, errors="ignore")
    if ours is None or us.empty:
        return ""
    return (
        f"At the source's own point the lab's two GEMMs, one CTA a tile, take {ours:.0f} µs, and the fastest of its "
        f"variants ({us.idxmin()}) ×{us.min() / ours:.2f} as long."
    )


def _dead(table: pd.DataFrame) -> str:
    base, early = names.BASE, names.source(16, names.PERSISTENT, names.EARLY)
    if early not in table.index or table["dead %"][base] != table["dead %"][base]:
        return ""
    gain = table["us"][base] / table["us"][early]
    return f"{table['dead %'][base]:.1f} % of the blocks are dead, and leaving them off gives ×{gain:.3f}."


def occupancy(rows: pd.DataFrame) -> Drawing:
    """The second cause: SMs × occupancy over one program an SM, by the CTAs that fit."""
    table = tables.filling(rows)
    if table.empty:
        return f"{names.FILLED} was not measured."
    table = table.assign(row=_at(table), group=_groups(table))
    fig = figures.ratios(
        table, "row", "ratio", "low", "high", group="group", verdict="verdict",
        xlabel="time one program an SM / time as many as fit (above 1: filling pays)", title="What occupancy is worth",
    )  # fmt: skip
    said = _of_filling(table)
    return {
        "fig": fig,
        "alt": f"Ratios of time with one program an SM over time with as many as fit, by case. {said}.",
        "caption": f"The source's persistent kernel, blocks of 16 rows. {said}.",
        "table": _shown(table, "row", "group"),
    }


def _of_filling(table: pd.DataFrame) -> str:
    """How much, of how many programs, what it leaves of the loss against one CTA a tile, and what follows."""
    said = [f"×{_span(table['ratio'])}, {counted(table['verdict'])} of {len(table)} cases"]
    parts = [
        f"{weights} {_span(part['gain / programs'])} with {_span(part['programs'], '{:.0f}')} programs an SM"
        for weights, part in table.dropna(subset=["programs"]).groupby("weights")
    ]
    said += [f"Gain over their number: {'; '.join(parts)}"] if parts else []
    left = [
        f"{gemm} {_mean(part['tiles / filled'])}"
        for gemm, part in table.dropna(subset=["tiles / filled"]).groupby("GEMM")
    ]
    said += [f"One CTA a tile / as many as fit: {'; '.join(left)}"] if left else []
    pays = (table["verdict"] == "faster").mean() > 0.5
    said.append(
        f"Second cause: {'confirmed, filling the SMs pays' if pays else 'refuted, filling the SMs gains little'}"
    )
    return ". ".join(said)


def _groups(table: pd.DataFrame) -> list[str]:
    columns = (table["model"], table["weights"], table["GEMM"])
    return [", ".join(words) for words in zip(*columns, strict=True)]


def order(rows: pd.DataFrame) -> Drawing:
    """The third cause: tile order, on fine-grained experts and on Mixtral's."""
    table = tables.order(rows)
    if table.empty:
        return "no tile orders were measured."
    lines = zip(table["model"], table["weights"], table["T"], strict=True)
    table = table.assign(line=[f"{model}, {weights}, {_tokens(t)}" for model, weights, t in lines])
    fair = table.groupby([*tables.CASE, "GEMM"])["as groups of 1"].transform("all")
    if not fair.any():
        return "the compiler makes other code of groups of 1 in every case, so that the order cannot be told from it."
    fig = figures.lines(
        table[fair], "groups of", "ratio", "line", panel="GEMM", logx=True, reference=[(1, "groups of 1")],
        xlabel="GROUP_SIZE_M", ylabel="time groups of 1 / time", title="Tile order, the same code",
    )  # fmt: skip
    said = _of_order(table[fair], table[~fair])
    return {
        "fig": fig,
        "alt": f"Lines of time with groups of 1 over time with larger groups, by model and tokens. {said}.",
        "caption": f"Above 1: grouping pays. {said}.",
        "table": _shown(table, "line"),
    }


def _of_order(fair: pd.DataFrame, other: pd.DataFrame) -> str:
    """What grouping gives where only the order differs, where the code does too, what was counted, what follows."""
    large = fair[fair["groups of"] > 1]
    if large.empty:
        return "Only one order was measured"
    groups = large.groupby(["model", "GEMM"], sort=False)
    parts = [
        f"{model}, {gemm} ({_span(part['MB an expert'], '{:.1f}')} MB an expert) ×{_span(part['ratio'])}"
        for (model, gemm), part in groups
    ]
    said = ["; ".join(parts)]
    other, hits = other[other["groups of"] > 1], fair[fair["L2 hits %"].notna()]
    if len(other):
        said.append(
            f"Left out: {len(other.groupby([*tables.CASE, 'GEMM']))} cases (×{_span(other['ratio'])}) in which the "
            "compiler makes other code of groups of 1, with other registers, so that the ratio is not the order's"
        )
    said += [f"Sectors that the L2 had: {_span(hits['L2 hits %'], '{:.0f}')} %"] if len(hits) else []
    means = large.groupby("model").agg(size=("MB an expert", "max"), gain=("ratio", "max")).sort_values("size")
    if len(means) > 1:
        small, big = means["gain"].iloc[0], means["gain"].iloc[-1]
        pays = big > max(1, small) + 2 * BAND
        said.append(
            f"Third cause: {'confirmed' if pays else 'refuted'}, grouping gives at most ×{big:.2f} in the model whose "
            f"experts are largest and ×{small:.2f} where they are smallest"
        )
    return ". ".join(said)


def worth(rows: pd.DataFrame) -> pd.DataFrame:
    """What each change of the source's kernel is worth."""
    return tables.worth(rows)


def pays(rows: pd.DataFrame) -> str:
    """Which changes are faster in every case, which slower, and which depend on the case; tile order apart."""
    table = tables.worth(rows)
    table = table[~table["over"].isin([names.grouped(1)])]
    if table.empty:
        return "no change was measured."
    faster, slower = (table[word] == table["cases"] for word in ("faster", "slower"))
    groups = (
        ("Faster in every case", faster),
        ("Slower in every case", slower),
        ("It depends, or is the same", ~faster & ~slower),
    )
    said = [f"{words}: {'; '.join(_changes(table[some]))}." for words, some in groups if some.any()]
    return " ".join(said)


def _changes(table: pd.DataFrame) -> list[str]:
    """Changes in words, each with its ratios for each kind of weights."""
    found = []
    for (after, before), part in table.groupby(["change", "over"], sort=False):
        ratios = [f"{line['weights']} ×{_span(line[['least', 'most']])}, {_won(line)}" for _, line in part.iterrows()]
        found.append(f"{_change(after, before)} ({'; '.join(ratios)})")
    return found


def _won(line: pd.Series) -> str:
    return f"faster in {line['faster']} of {line['cases']}"


def _change(after: str, before: str) -> str:
    """A change in words, and what it is a change of."""
    added, before = after.removeprefix(f"{before}, "), before.removeprefix("source ")
    return f"{after.removeprefix('source ')} instead of {before}" if added == after else f"{added} of {before}"


def dead(rows: pd.DataFrame) -> Drawing:
    """What early exit saves, against what is dead of the grid."""
    table = tables.dead(rows)
    table = table[table["dead %"].notna()]
    if table.empty:
        return "early exit was not measured, or not with the grid's blocks."
    table = table.assign(**{"saved %": 100 * (1 - 1 / table["ratio"]), "dead %": table["dead %"].round(1)})
    fig = figures.lines(
        table, "dead %", "saved %", "grid", panel="weights", joined=False, reference=[(0, "nothing")],
        xlabel="dead blocks, %", ylabel="time saved by early exit, %", title="What dead blocks cost",
    )  # fmt: skip
    near = (table["saved %"] - table["dead %"]).abs() <= CLOSE
    said = (
        f"{_span(table['dead %'], '{:.0f}')} % dead, {_span(table['saved %'], '{:.0f}')} % of the time saved: within "
    )
    said += f"{CLOSE} points of what is dead in {near.sum()} of {len(table)} cases, less in "
    said += f"{(~near & (table['saved %'] < table['dead %'])).sum()}, more in "
    said += f"{(~near & (table['saved %'] > table['dead %'])).sum()}; early exit is {counted(table['verdict'])}"
    return {
        "fig": fig,
        "alt": f"Marks of the time saved by early exit against the dead share of the grid. {said}.",
        "caption": f"The source's kernel with blocks of 16 rows; its grid is for the worst case. {said}.",
        "table": _shown(table),
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
    known = {x.key for x in study.cases(parameters) if x.op == case.op}
    return [(case, name) for name in LOOKED_AT] if case.key in known else []


def as_timed(rows: pd.DataFrame) -> pd.DataFrame:
    """The code of the same kernels as they were timed, of both GEMMs; it depends on the version of Triton."""
    found = tables.code(rows, LOOKED_AT)
    if found.empty:
        return found
    table = compiled_table(found).assign(Triton=found["triton"]).drop(columns=["target"])
    table.insert(1, "GEMM", found["GEMM"])
    return table


def compiled_table(evidence: pd.DataFrame) -> pd.DataFrame:
    """Registers, occupancy, matrix instructions and loads of each kernel by target."""
    if evidence.empty:
        return evidence
    here = "arch" in evidence  # if not: of recorded rows, where Triton is missing
    found = evidence[["variant", "registers", "spill_bytes", "ctas_per_sm"]].rename(
        columns={"spill_bytes": "bytes spilled", "ctas_per_sm": "CTAs an SM"}
    )
    found.insert(1, "target", [f"sm_{arch}" for arch in evidence["arch"]] if here else "as recorded")
    found.insert(2, "Triton", version("triton") if here else "as recorded")
    for column, name in (("matrix", "matrix instructions"), ("loads", "loads, by bits")):
        found[name] = [_counts(some) for some in evidence[column]]
    return found


def _counts(some: Any) -> str:
    """Kinds of instructions, with how many of each the code has where that is known."""
    return ", ".join(f"{kind} (×{some[kind]})" if isinstance(some, Mapping) else str(kind) for kind in some)


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
    """Whether the persistent grid pays more on fewer multiprocessors: one CTA a tile / persistent on each part."""
    table = tables.persistent_on_parts(rows)
    if table.empty:
        return table
    return _shown(table.sort_values(["T", "SMs"], ascending=[True, False]))


def other_gpus(rows: pd.DataFrame) -> pd.DataFrame:
    """Efficiency of the source's grid on GPUs of other sizes, one column a GPU; by arithmetic."""
    table = _on_gpus(rows)
    if table.empty:
        return table
    index = ["model", "GEMM", "T"]
    found = table.pivot_table(index=index, columns="GPU", values="efficiency", sort=False)
    return found[[gpu for gpu in waves.SMS if gpu in found]].reset_index()


def _on_gpus(rows: pd.DataFrame) -> pd.DataFrame:
    """Of the source's weights, which are INT4, where those were timed."""
    table = tables.on_other_gpus(rows)
    return table[table["weights"] == "INT4"] if (table["weights"] == "INT4").any() else table


def fuller(rows: pd.DataFrame) -> str:
    """Whether fewer multiprocessors mean emptier waves, by the same arithmetic."""
    table = _on_gpus(rows)
    if table.empty:
        return "there is no such measurement."
    shares = {gpu: table[table["GPU"] == gpu]["efficiency"] for gpu in sorted(waves.SMS, key=waves.SMS.__getitem__)}
    parts = [f"{gpu} ({waves.SMS[gpu]} SMs) {some.mean():.3f}" for gpu, some in shares.items()]
    smallest, *_, largest = (some.mean() for some in shares.values())
    follows = "the fewer, the emptier" if smallest < largest - BAND else "fewer multiprocessors are no emptier"
    return f"the mean of each column is {', '.join(parts)}: {follows}."


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
    said = f"Most: ×{worst['over uniform']:.2f}, {worst['case']}, {worst['routing']}" + _of_rivals(table)
    return {
        "fig": fig,
        "alt": f"Bars of time over that of uniform routing, by synthetic routing and case. {said}.",
        "caption": "Bars: ours over ours, of two cases, so without an interval. Blocks, in the table: of BM rows, of "
        f"the expert that got the most. {said}.",
        "table": _with_rivals(table),
    }


def _with_rivals(table: pd.DataFrame) -> pd.DataFrame:
    columns = UNITS | {"by": "fastest other", "ratio": "other / ours"}
    found = table.assign(by=table["by"].map(SHORT)).rename(columns=columns)
    return found.drop(columns=["case", "no slower", "runs"], errors="ignore")


def _of_rivals(table: pd.DataFrame) -> str:
    """The fastest other layer over ours under skewed routings, and every case that ours loses, with its blocks."""
    table = table[(table["routing"] != KINDS[0]) & table["ratio"].notna()]
    if table.empty:
        return ""
    who = ", ".join(SHORT[name] for name in names.RIVALS if name in set(table["by"]))
    said = f". Skewed, time of the fastest other ({who}) / ours is ×{_span(table['ratio'])}: ours is "
    said += f"{counted(table['verdict'])} of {len(table)}"
    lost = [
        f"{_where(line)}, {_interval(line)}"
        + (f", {line['blocks']:.0f} blocks of {line['BM']:.0f} rows at one expert" if line["BM"] == line["BM"] else "")
        for _, line in table[table["verdict"] == "slower"].iterrows()
    ]
    return said + (f". Ours loses: {'; '.join(lost)}" if lost else "")


def _cases(table: pd.DataFrame) -> list[str]:
    columns = (table["model"], table["weights"], table["T"])
    return [f"{model}, {weights}, {_tokens(t)}" for model, weights, t in zip(*columns, strict=True)]


def tuning(rows: pd.DataFrame) -> str:
    """How long tuning takes, and what it and the number of tokens in its key are worth."""
    said, most = [], tables.tuned_up_to(rows)
    seconds = tables.tuning_seconds(rows)
    if len(seconds):
        said.append(
            f"A model's layer took {seconds.median():.1f} s to tune for one number of tokens in the median, at most "
            f"{seconds.max():.1f} s, beside compiling; up to {_tokens(most)} were tuned; beyond, the rule decides."
        )
    for variant, words in ((names.RULE, "By the rule"), (names.OTHER_TOKENS, f"Tuned for {names.TUNED_FOR} tokens")):
        table = _uniform(tables.compared(rows, "layer", names.OURS, variant))
        table = table[table["T"] <= most] if variant == names.RULE else table
        if len(table):
            worst, least = (table.loc[place] for place in (table["ratio"].idxmax(), table["ratio"].idxmin()))
            said.append(
                f"{words} the layer takes ×{geometric_mean(table['ratio']):.2f} as long in the mean of {len(table)} "
                f"cases, least {_interval(least)} ({_where(least)}), most {_interval(worst)} ({_where(worst)})."
            )
    return _sentences(said, "nothing was tuned.")


def prediction(rows: pd.DataFrame) -> Drawing:
    """Measured over predicted time of our layers: what bytes and products do not explain."""
    table = _uniform(tables.predictions(rows))
    if table.empty:
        return "no prediction was stored: this GPU's ceilings were not known."
    fig = figures.lines(
        table, "T", "off %", "model", panel="weights", logx=True, reference=[(0, "as predicted")], xlabel="tokens",
        ylabel="measured over predicted, %", title="The floor as a prediction",
    )  # fmt: skip
    said = [f"{weights} {_span(part['off %'], '{:+.0f}')} %" for weights, part in table.groupby("weights")]
    said = ", ".join(said) + _over_both(table.dropna(subset=["over both %"])) + _unpacking(rows)
    units = {"us": "µs", "predicted us": "predicted µs", "reading us": "reading µs", "products us": "products µs"}
    return {
        "fig": fig,
        "alt": f"Lines of measured over predicted time against tokens, by model. {said}.",
        "caption": f"Predicted: reading or products, whichever is longer, and a launch. {said}.",
        "table": table.drop(columns=["routing"]).rename(columns=units),
    }


def _over_both(table: pd.DataFrame) -> str:
    """What is left over the sum of reading and products, by weights and tokens."""
    parts = []
    for weights, part in table.groupby("weights"):
        many = part["T"] > READ_BOUND
        some = ((f"up to {READ_BOUND} tokens", ~many & (part["T"] > 1)), ("beyond", many))
        spans = [f"{words} {_span(part[s]['over both %'], '{:+.0f}')} %" for words, s in some if s.any()]
        parts += [f"{weights} {', '.join(spans)}"] if spans else []
    said = ". Over the sum of reading and of the products of whole blocks, without one token: "
    return said + "; ".join(parts) if parts else ""


def _unpacking(rows: pd.DataFrame) -> str:
    """What the same products with fewer bytes say, where they take longer."""
    table = _int4(rows)
    slower = table[table["verdict"] == "slower"]["ratio"]
    if slower.empty:
        return ""
    return (
        f". In {len(slower)} of {len(table)} cases INT4 takes ×{_span(1 / slower)} the time of bf16, which does the "
        "same products and reads more: what is left for that time is unpacking, again for every block of rows"
    )


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
    """What to do: the grid, what pays instead, and the layer."""
    said = [_which_grid(rows), _instead(rows), _ours_there(rows), _how_fast(rows)]
    return _sentences(said, "nothing was measured that decides anything.")


def _which_grid(rows: pd.DataFrame) -> str:
    table = tables.persistence(rows)
    table = table[table["persistent"] == names.OURS_FILLED]
    if table.empty:
        return ""
    faster, slower = ((table["verdict"] == word).sum() for word in ("faster", "slower"))
    advice = (
        "Launch one CTA a tile"
        if slower > faster
        else "Launch as many programs as fit"
        if faster
        else "Any grid will do"
    )
    best = table.loc[table["ratio"].idxmax()]
    said = (
        f"{advice}: a persistent grid of as many programs as fit is {counted(table['verdict'])} of {len(table)} cases"
    )
    said += f", at best {_interval(best)} ({_where(best)})"
    alone = table["CTAs an SM"] == 1
    if 0 < alone.sum() < len(table):
        wins = [int((table[some]["verdict"] == "faster").sum()) for some in (alone, ~alone)]
        said += f"; where a tile is so large that one CTA fills an SM it is faster in {wins[0]} of {alone.sum()}, "
        said += f"elsewhere in {wins[1]} of {(~alone).sum()}"
    return f"{said}."


ADVICE = {
    names.FILLED: "launch as many programs as fit, if the grid must be persistent",
    names.EARLY: "leave off at the last block that has a token",
    names.ONCE: "load each byte of INT4 weights once",
    names.BOX: "bring the weights by the copy engine",
    names.FLAT: "make one loop of tiles and K",
    names.ROWS: "choose the rows of a block by the tokens of an expert",
}


def _instead(rows: pd.DataFrame) -> str:
    """What is faster in every case and with all weights that it was timed with, the most first."""
    table = tables.worth(rows)
    table = table.assign(what=[_advice(*pair) for pair in zip(table["change"], table["over"], strict=True)])
    table = table[table["what"] != ""]
    sure = table.groupby("what")[["faster", "cases"]].transform("sum")
    table = table[sure["faster"] == sure["cases"]]
    means = table.groupby("what")["mean ratio"].agg(geometric_mean).sort_values(ascending=False)
    said = [f"{what} (×{mean:.2f} in the mean)" for what, mean in means.items()]
    return f"What makes the source's kernel faster in every case instead: {'; '.join(said)}." if said else ""


def _advice(after: str, before: str) -> str:
    """What to do, for a change that adds something; empty for others."""
    return ADVICE.get(after.removeprefix(f"{before}, "), "")


def _how_fast(rows: pd.DataFrame) -> str:
    table = tables.against_best(rows)
    uniform, skewed = _uniform(table), table[table["routing"] != KINDS[0]]
    if uniform.empty:
        return ""
    said = f"Under uniform routing our bf16 layer is {counted(uniform['verdict'])} of {len(uniform)} cases against the "
    said += f"fastest other (×{geometric_mean(uniform['ratio']):.2f} in the mean, ×{_span(uniform['ratio'])})"
    lost = skewed[skewed["verdict"] == "slower"]
    if len(lost):
        worst = lost.loc[lost["ratio"].idxmin()]
        said += f"; but it takes its tiles by the number of tokens, and with {worst['routing']} it is down to "
        said += f"×{worst['ratio']:.2f} ({worst['model']}, {_tokens(worst['T'])})"
    int4 = _int4(rows)
    return f"{said}. INT4 weights against bf16: {_few(int4)}." if len(int4) else f"{said}."
