"""Figures and sentences of whole layers, and what the study comes to, each made from the rows of one GPU."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from labkit.bench.spec import Case
from labkit.bench.verdict import counted, geometric_mean
from labkit.report import plots
from labkit.report.words import interval as _interval
from labkit.report.words import mean as _mean
from labkit.report.words import sentences as _sentences
from labkit.report.words import span as _span
from labkit.report.words import tokens as _tokens
from labkit.studies.moe_persistent_grid import tables, variants, work
from labkit.studies.moe_persistent_grid.grid_views import ours_there
from labkit.studies.moe_persistent_grid.routings import KINDS
from labkit.studies.moe_persistent_grid.wording import UNITS, Drawing, _at, _shown, _uniform, _where

AIM = 80  # percent of the read ceiling that the INT4 GEMMs of 16 to 128 tokens are to reach
READ_BOUND = 512  # tokens, up to which reading is what the pages show of a layer
SHORT = {
    variants.GROUPED: "F.grouped_mm",
    variants.LIGER: "liger-kernel",
    variants.LOOP: "loop, eager",
    variants.OURS: "ours",
}
GRIDS = ((variants.OURS_PERSISTENT, "one program an SM"), (variants.OURS_FILLED, "as many programs as fit"))


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
    known = {"8-bit activations": variants.source(16, variants.PERSISTENT, int8=True), "bf16 ones": variants.BASE}
    parts = [f"×{table[variant]:.2f} with {words}" for words, variant in known.items() if variant in table]
    return f"The source's kernels at its own point: {' and '.join(parts)}." if parts else ""


def _layer_in_short(rows: pd.DataFrame) -> str:
    table = tables.against_best(rows)
    uniform, skewed = _uniform(table), table[table["routing"] != KINDS[0]]
    if uniform.empty:
        return ""
    who = ", ".join(SHORT[name] for name in variants.RIVALS if name in set(uniform["by"]))
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
    return _uniform(tables.compared(rows, "layer", variants.OURS, variants.OURS_BF16), "INT4")


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
    fig = plots.ratios(
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
    fig = plots.lines(
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
    table = _uniform(tables.compared(rows, "layer", variants.OURS, variants.ORDINARY))
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
    table = _uniform(tables.compared(rows, "layer", variants.OURS, variants.BY_TILES))
    return table.drop(columns=["T", "routing"], errors="ignore").rename(columns=UNITS)


def by_words(rows: pd.DataFrame) -> pd.DataFrame:
    """One token with INT4 weights as words and as bytes; ratio: time by bytes over time by words."""
    table = _uniform(tables.compared(rows, "layer", variants.WORDS, variants.BYTES))
    table = table.drop(columns=["T", "weights", "routing"], errors="ignore")
    return table.rename(columns=UNITS | {"us": "µs by words", "against us": "µs by bytes"})


def words_said(rows: pd.DataFrame) -> str:
    """Whether fewer instructions a weight are worth anything to one token."""
    table = _uniform(tables.compared(rows, "layer", variants.WORDS, variants.BYTES))
    if table.empty:
        return "INT4 weights as words were not timed beside bytes."
    models = f"{len(table)} models, by bytes / by words ×{_span(table['ratio'])}"
    worse = ", ".join(table.loc[table["verdict"] == "slower", "model"])
    where = f" Bytes are faster for {worse}." if worse else ""
    return f"words are {counted(table['verdict'])} of {models}.{where}"


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
    fig = plots.lines(
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
    fig = plots.ratios(
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
    rates = rates[(rates["T"] == 1) & (rates["variant"] == variants.OURS)]
    shares = [f"{w} {_span(part['% of reading'], '{:.0f}')} %" for w, part in rates.groupby("weights")]
    if one.empty:
        return ""
    return f"; one token ×{_span(one)}" + (f" (of the read ceiling: {', '.join(shares)})" if shares else "")


def _with_rates(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """A table of layers with our rates beside both ceilings."""
    rates = tables.times(rows)
    rates = rates[rates["variant"] == variants.OURS][[*tables.CASE, "TFLOP/s", "% of products", "TB/s", "% of reading"]]
    found = table.rename(columns={"us": "INT4 µs", "against us": "bf16 µs"})
    return found.merge(rates, how="left", on=tables.CASE)


# Routing, tuning, prediction


def routings(rows: pd.DataFrame) -> Drawing:
    """Our layer under each synthetic routing."""
    table = tables.routings(rows)
    if table.empty:
        return "our layer was measured under one routing only."
    table = table.assign(case=_cases(table))
    fig = plots.bars(
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
    who = ", ".join(SHORT[name] for name in variants.RIVALS if name in set(table["by"]))
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
    for variant, words in (
        (variants.RULE, "By the rule"),
        (variants.OTHER_TOKENS, f"Tuned for {variants.TUNED_FOR} tokens"),
    ):
        table = _uniform(tables.compared(rows, "layer", variants.OURS, variant))
        table = table[table["T"] <= most] if variant == variants.RULE else table
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
    fig = plots.lines(
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
    said = [_which_grid(rows), _instead(rows), ours_there(rows), _how_fast(rows)]
    return _sentences(said, "nothing was measured that decides anything.")


def _which_grid(rows: pd.DataFrame) -> str:
    table = tables.persistence(rows)
    table = table[table["persistent"] == variants.OURS_FILLED]
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
    variants.FILLED: "launch as many programs as fit, if the grid must be persistent",
    variants.EARLY: "leave off at the last block that has a token",
    variants.ONCE: "load each byte of INT4 weights once",
    variants.BOX: "bring the weights by the copy engine",
    variants.FLAT: "make one loop of tiles and K",
    variants.ROWS: "choose the rows of a block by the tokens of an expert",
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
