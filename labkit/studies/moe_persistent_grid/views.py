"""Figures and sentences of whole layers, and what the study comes to, each made from the rows of one GPU."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench.spec import Case
from labkit.bench.tables import frame, tuning_seconds, where, why_not
from labkit.bench.verdict import counted, geometric_mean
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import interval, mean, sentences, span
from labkit.report.words import tokens as in_tokens
from labkit.studies.moe_persistent_grid import tables, variants, work
from labkit.studies.moe_persistent_grid.variants import SOURCE_T, UNIFORM

AIM = 80  # percent of the read ceiling that the INT4 GEMMs of 16 to 128 tokens are to reach
READ_BOUND = 512  # tokens, up to which reading is what the pages show of a layer
SHORT = {
    variants.GROUPED: "F.grouped_mm",
    variants.LIGER: "liger-kernel",
    variants.LOOP: "loop, eager",
    **variants.ENGINES,
    variants.OURS: "ours",
}
GRIDS = ((variants.OURS_PERSISTENT, "one program an SM"), (variants.OURS_FILLED, "as many programs as fit"))
UNITS = {"us": "µs", "against us": "before µs", "active": "experts active"}
UNITS |= {f"{what} us": f"{what} µs" for what in ("reading", "products")} | {"predicted us": "floor µs"}
HIDDEN = ["routing", "no slower", "runs"]  # of every table: what the page says elsewhere


def uniform(table: pd.DataFrame) -> pd.DataFrame:
    """The lines of the uniform routing."""
    return where(table, routing=UNIFORM)


def labels(table: pd.DataFrame, *columns: str) -> list[str]:
    """These columns of each line in words; T: its tokens."""
    words = [table[name].map(in_tokens) if name == "T" else table[name] for name in columns]
    return [", ".join(line) for line in zip(*words, strict=True)]


def _where(line: pd.Series) -> str:
    """The case of a row in words: model, tokens, and what else it has of weights, GEMM and routing."""
    words = [line["model"], line.get("weights"), in_tokens(line["T"]), line.get("GEMM"), line.get("routing")]
    return ", ".join(str(word) for word in words if word and word != UNIFORM)


# What comes out


def own_code(rows: pd.DataFrame) -> Drawing:
    """ExecuTorch's own layer in both grids, by tokens."""
    table = tables.released_grids(rows)
    if table.empty:
        return f"ExecuTorch's own kernels, in both grids: {why_not(rows, variants.RELEASED)}."
    said = f"The persistent grid is {counted(table['verdict'])} of {len(table)} cases, ×{span(table['ratio'])}"
    return drawing(
        plots.ratios, table.assign(row=table["T"].map(in_tokens)), "row", "ratio", "low", "high", group="activations",
        verdict="verdict", hidden=("row", "runs"),
        xlabel="time one CTA a tile / time persistent (above 1: persistent faster)",
        title="ExecuTorch's own expert layer, in both grids",
        alt="Ratios of time with one CTA a tile over time with the persistent grid, by tokens and activations.",
        caption="Release 1.5.1, blocks of 64 rows; the same with the pull request's launch and loop; each tunes itself",
        said=said, units={"against us": "one CTA a tile µs", "us": "persistent µs"},
    )  # fmt: skip


def beside_released(rows: pd.DataFrame) -> str:
    """How many times as long as ours the fastest form of ExecuTorch's own layer takes."""
    table = tables.beside_released(rows)
    if table.empty:
        return f"ExecuTorch's own layer beside ours: {why_not(rows, [variants.PER_PAIR])}."
    parts = [f"{in_tokens(line['T'])} ×{line['ratio']:.1f} ({line['by']})" for line in table.to_dict("records")]
    return f"The fastest form of ExecuTorch's own INT4 layer takes so many times as long as ours: {'; '.join(parts)}."


def in_short(rows: pd.DataFrame) -> str:
    """When the persistent grid pays, what became of the source's, and how the lab's layer stands."""
    said = [*_ours_in_both(rows), _source_in_short(rows), _layer_in_short(rows), _int4_in_short(rows)]
    return sentences(said, "nothing was compared.")


def _ours_in_both(rows: pd.DataFrame) -> list[str]:
    table, said = tables.persistence(rows), []
    for persistent, words in GRIDS:
        part = where(table, persistent=persistent)
        if len(part):
            said.append(
                f"In the lab's own GEMMs a persistent grid of {words} is {counted(part['verdict'])} of {len(part)} "
                f"cases (×{geometric_mean(part['ratio']):.2f} in the mean, ×{span(part['ratio'])})."
            )
    return said


def _source_in_short(rows: pd.DataFrame) -> str:
    """The claim's own code at its own point, or why it was not timed."""
    own = where(tables.released_grids(rows), T=SOURCE_T)
    if own.empty:
        return f"ExecuTorch's own layer at its own point: {why_not(rows, variants.RELEASED)}."
    parts = [f"×{line['ratio']:.2f} ({line['activations']})" for line in own.to_dict("records")]
    return f"ExecuTorch's own layer at its own point: {', '.join(parts)}."


def _rivals_of(table: pd.DataFrame) -> str:
    """Who the fastest others are."""
    return ", ".join(SHORT[name] for name in variants.RIVALS if name in set(table["by"]))


def _layer_in_short(rows: pd.DataFrame) -> str:
    table = tables.against_best(rows)
    usual, skewed = uniform(table), table[table["routing"] != UNIFORM]
    if usual.empty:
        return ""
    said = f"The lab's bf16 layer: time of the fastest other ({_rivals_of(usual)}) / ours is {mean(usual['ratio'])}"
    if len(skewed):
        said += f"; under skewed routings ×{span(skewed['ratio'])}, {counted(skewed['verdict'])} of {len(skewed)}"
    return f"{said}."


def _int4_in_short(rows: pd.DataFrame) -> str:
    table = _int4(rows)
    if table.empty:
        return ""
    return f"With INT4 weights it is {counted(table['verdict'])} of {len(table)} cases than with bf16: {_few(table)}."


def _int4(rows: pd.DataFrame) -> pd.DataFrame:
    return uniform(tables.compared(rows, variants.OURS, variants.OURS_BF16))


def _few(table: pd.DataFrame) -> str:
    """Ratios of INT4 weights up to the most tokens at which no model is slower with them, and beyond."""
    good = [t for t, part in table.groupby("T") if part["verdict"].isin(["faster", "same"]).all()]
    bad = sorted(set(table["T"]) - set(good))
    most = max((t for t in good if not bad or t < bad[0]), default=0)
    parts = {f"up to {in_tokens(most)}": table["T"] <= most, "beyond" if most else "in all": table["T"] > most}
    return ", ".join(f"{words} ×{span(table[some]['ratio'])}" for words, some in parts.items() if some.any())


def rivals(rows: pd.DataFrame) -> Drawing:
    """The fastest other layer over ours, bf16, uniform routing."""
    table = uniform(tables.against_best(rows))
    if table.empty:
        return "no other layer was timed beside ours: `pip install labkit[peers]` brings those that there are."
    least = table.loc[table["ratio"].idxmin()]
    said = f"Ours is {counted(table['verdict'])} of {len(table)} cases; geometric mean "
    said += f"{geometric_mean(table['ratio']):.3f}, least {least['ratio']:.3f} ({_where(least)})"
    more = table[table["T"] > 1]["ratio"]
    said += "".join(f"; {_missing(rows, variant)}" for variant in _engines_missing(rows))
    said += f"; without one token {geometric_mean(more):.3f}" if 0 < len(more) < len(table) else ""
    return drawing(
        plots.ratios, table.assign(row=labels(table, "T")), "row", "ratio", "low", "high", group="model",
        verdict="verdict", xlabel="time fastest other / time ours (above 1: ours faster)", title="Whole layers, bf16",
        alt="Ratios of the fastest other layer's time over ours, by model and tokens.",
        caption="Who is the fastest is in the table; the loop alone is eager.", said=said,
        table=table.assign(by=table["by"].map(SHORT)), hidden=[*HIDDEN, "weights"], units=UNITS,
    )  # fmt: skip


def rates(rows: pd.DataFrame) -> Drawing:
    """TFLOP/s of every layer against tokens, bf16."""
    table = where(uniform(tables.times(rows)), weights="bf16", variant=[*SHORT])
    if table.empty:
        return "no bf16 layer was measured."
    _, tflops = tables.ceilings(rows)
    best = table.loc[table["TFLOP/s"].idxmax()]
    said = f"Most: {SHORT[best['variant']]}, {best['TFLOP/s']:.0f} TFLOP/s ({best['model']}, {in_tokens(best['T'])})"
    return drawing(
        plots.lines, table.assign(short=table["variant"].map(SHORT)), "T", "TFLOP/s", "short", panel="model",
        logx=True, logy=True, xlabel="tokens", ylabel="TFLOP/s (log)", title="Whole layers, bf16, uniform routing",
        reference=[(tflops, "ceiling")] if tflops == tflops else None,
        alt="Lines of TFLOP/s against tokens, by model and layer.",
        caption="The line is the ceiling of bf16 products. TB/s in the table: of the weights of the experts that "
        "got a token, each once.", said=said,
        table=["model", "T", "active", "variant", "mode", "us", "TFLOP/s", "% of products", "TB/s", "% of reading"],
        units=UNITS,
    )  # fmt: skip


def launching(rows: pd.DataFrame) -> str:
    """What dependent launch is worth to a layer of few kernels, by tokens."""
    table = uniform(tables.compared(rows, variants.OURS, variants.ORDINARY))
    if table.empty:
        return "launches that wait were not timed beside ours."
    parts = [
        f"{in_tokens(t)} ×{geometric_mean(part['ratio']):.3f} (faster in {(part['verdict'] == 'faster').sum()} of "
        f"{len(part)} models)"
        for t, part in table.groupby("T")
    ]
    return f"time with launches that wait / time as it is, mean of the models: {', '.join(parts)}."


def one_token(rows: pd.DataFrame) -> pd.DataFrame:
    """One token by matrix-vector products and by tiles; ratio: tiles over those."""
    table = uniform(tables.compared(rows, variants.OURS, variants.BY_TILES))
    return table.drop(columns=["T", "routing"], errors="ignore").rename(columns=UNITS)


def by_words(rows: pd.DataFrame) -> pd.DataFrame:
    """One token with INT4 weights as words and as bytes; ratio: time by bytes over time by words."""
    table = uniform(tables.compared(rows, variants.WORDS, variants.BYTES))
    table = table.drop(columns=["T", "weights", "routing"], errors="ignore")
    return table.rename(columns={"us": "µs by words", "against us": "µs by bytes"})


def words_said(rows: pd.DataFrame) -> str:
    """Whether fewer instructions a weight are worth anything to one token."""
    table = by_words(rows)
    if table.empty:
        return "INT4 weights as words were not timed beside bytes."
    said = f"words are {counted(table['verdict'])} of {len(table)} models, by bytes / by words ×{span(table['ratio'])}."
    worse = ", ".join(where(table, verdict="slower")["model"])
    return f"{said} Bytes are faster for {worse}." if worse else said


def _engines_missing(rows: pd.DataFrame, weights: str = "bf16") -> list[str]:
    """The engines whose layer of a kind of weights was timed in no case."""
    timed = set(where(tables.beside_engines(rows), weights=weights)["engine"])
    return [variant for variant in variants.ENGINES_OF[weights] if variants.ENGINES[variant] not in timed]


def _missing(rows: pd.DataFrame, variant: str) -> str:
    """That an engine's layer was not timed, and why."""
    return f"{variants.ENGINES[variant]}'s layer is not among them: {why_not(rows, [variant])}"


def beside_engines(rows: pd.DataFrame, weights: str = "bf16") -> str:
    """Engines' own layers over ours, and how much of that is with a configuration that was tuned for this GPU."""
    table = where(uniform(tables.beside_engines(rows)), weights=weights)
    said = [_beside_engine(part, engine) for engine, part in table.groupby("engine", sort=False)]
    some = rows[rows["case"].str.contains(f'"weights": "{weights}"')]
    said += [
        f"{variants.ENGINES[one]} beside ours, {weights}: {why_not(some, [one])}."
        for one in _engines_missing(rows, weights)
    ]
    return " ".join(said)


def _beside_engine(table: pd.DataFrame, engine: str) -> str:
    least = table.loc[table["ratio"].idxmin()]
    said = f"Time {engine} / ours is {mean(table['ratio'])}; ours is {counted(table['verdict'])}, least "
    said += f"{interval(least)} ({_where(least)})"
    parts = [f"{kind} ×{span(part['ratio'])}" for kind, part in table.groupby("configuration", sort=False)]
    return f"{said}. By its configuration: {', '.join(parts)}."


def int4_engines(rows: pd.DataFrame) -> str:
    """The same of INT4 weights."""
    return beside_engines(rows, "INT4")


def reading(rows: pd.DataFrame) -> Drawing:
    """The two INT4 GEMMs as percent of the read ceiling, by tokens."""
    table = uniform(tables.int4_reading(rows))
    table = table[(table["T"] <= READ_BOUND) & table["% of reading"].notna()]
    if table.empty:
        return "no INT4 GEMMs were measured beside a known read ceiling."
    some = table[table["T"].between(16, 128)]
    said = "not measured at 16 to 128 tokens"
    if len(some):
        said = f"16 to 128 tokens: {span(some['% of reading'], '{:.0f}')} %, at least {AIM} % in "
        said += f"{(some['% of reading'] >= AIM).sum()} of {len(some)} cases"
    beside = some["% of reading here"].dropna()
    said += f"; of reading in the same run {span(beside, '{:.0f}')} %" if len(beside) else ""
    return drawing(
        plots.lines, table, "T", "% of reading", "model", logx=True, reference=[(AIM, "aimed at")], xlabel="tokens",
        ylabel="% of the read ceiling", title="INT4: the weights of the experts that got a token",
        alt="Lines of percent of the read ceiling against tokens, by model.",
        caption="Both GEMMs by tiles, each with the faster of its grids; the layer of one token has other kernels.",
        said=said, hidden=["weights", "routing"], units=UNITS,
    )  # fmt: skip


def int4_gain(rows: pd.DataFrame) -> Drawing:
    """Our bf16 layer over our INT4 layer."""
    table = _int4(rows)
    if table.empty:
        return "our layer was not measured with both kinds of weights in one case."
    ours = where(tables.times(rows), variant=variants.OURS)
    least = table.loc[table["ratio"].idxmin()]
    said = f"INT4 is {counted(table['verdict'])} of {len(table)} cases: {_few(table)}"
    said += _one_token_reads(table, ours)
    said += f". Least: ×{least['ratio']:.2f} ({least['model']}, {in_tokens(least['T'])})"
    rated = ours[[*tables.CASE, "TFLOP/s", "% of products", "TB/s", "% of reading"]]
    return drawing(
        plots.ratios, table.assign(row=labels(table, "T")), "row", "ratio", "low", "high", group="model",
        verdict="verdict", xlabel="time bf16 weights / time INT4 weights (above 1: INT4 faster)",
        title="What INT4 weights are worth",
        alt="Ratios of the bf16 layer's time over the INT4 layer's, by model and tokens.",
        caption="The same layer, timed in the same blocks; rates in the table are of INT4.", said=said,
        table=table.merge(rated, how="left", on=tables.CASE), hidden=[*HIDDEN, "weights"],
        units={"us": "INT4 µs", "against us": "bf16 µs"},
    )  # fmt: skip


def _one_token_reads(table: pd.DataFrame, ours: pd.DataFrame) -> str:
    """One token: the ratio, and how near to the read ceiling both kinds of weights are."""
    one = where(table, T=1)["ratio"]
    rates = where(uniform(ours), T=1).dropna(subset=["% of reading"])
    shares = [f"{w} {span(part['% of reading'], '{:.0f}')} %" for w, part in rates.groupby("weights")]
    if one.empty:
        return ""
    return f"; one token ×{span(one)}" + (f" (of the read ceiling: {', '.join(shares)})" if shares else "")


# Routing, tuning, prediction


def routings(rows: pd.DataFrame) -> Drawing:
    """Our layer under each synthetic routing."""
    table = tables.routings(rows)
    if table.empty:
        return "our layer was measured under one routing only."
    table = table.assign(case=labels(table, "model", "weights", "T"))
    worst = table.loc[table["over uniform"].idxmax()]
    return drawing(
        plots.bars, table, "routing", "over uniform", "case", xlabel="synthetic routing",
        ylabel="time / time of uniform routing", title="What skew does to a layer", reference=[(1, "uniform")],
        alt="Bars of time over that of uniform routing, by synthetic routing and case.",
        caption="Bars: ours over ours, of two cases, so without an interval. Blocks, in the table: of BM rows, of "
        "the expert that got the most.",
        said=f"Most: ×{worst['over uniform']:.2f}, {worst['case']}, {worst['routing']}" + _of_rivals(table),
        table=table.assign(by=table["by"].map(SHORT)), hidden=["case"],
        units={"us": "µs", "by": "fastest other", "ratio": "other / ours"},
    )  # fmt: skip


def _of_rivals(table: pd.DataFrame) -> str:
    """The fastest other layer over ours under skewed routings, and every case that ours loses, with its blocks."""
    table = table[(table["routing"] != UNIFORM) & table["ratio"].notna()]
    if table.empty:
        return ""
    said = f". Skewed, time of the fastest other ({_rivals_of(table)}) / ours is ×{span(table['ratio'])}: ours is "
    said += f"{counted(table['verdict'])} of {len(table)}"
    lost = [
        f"{_where(line)}, {interval(line)}"
        + (f", {line['blocks']:.0f} blocks of {line['BM']:.0f} rows at one expert" if line["BM"] == line["BM"] else "")
        for _, line in where(table, verdict="slower").iterrows()
    ]
    return said + (f". Ours loses: {'; '.join(lost)}" if lost else "")


def tuning(rows: pd.DataFrame) -> str:
    """How long tuning takes, and what it and the number of tokens in its key are worth."""
    said, most, seconds = [], tables.tuned_up_to(rows), tuning_seconds(rows)
    if len(seconds):
        said.append(
            f"A model's layer took {seconds.median():.1f} s to tune for one number of tokens in the median, at most "
            f"{seconds.max():.1f} s, beside compiling; up to {in_tokens(most)} were tuned; beyond, the rule decides."
        )
    ruled, other = (
        uniform(tables.compared(rows, variants.OURS, name)) for name in (variants.RULE, variants.OTHER_TOKENS)
    )
    ruled = ruled[ruled["T"] <= most]
    for table, words in ((ruled, "By the rule"), (other, f"Tuned for {variants.TUNED_FOR} tokens")):
        if len(table):
            worst, least = (table.loc[place] for place in (table["ratio"].idxmax(), table["ratio"].idxmin()))
            said.append(
                f"{words} the layer takes ×{geometric_mean(table['ratio']):.2f} as long in the mean of {len(table)} "
                f"cases, least {interval(least)} ({_where(least)}), most {interval(worst)} ({_where(worst)})."
            )
    return sentences(said, "nothing was tuned.")


def prediction(rows: pd.DataFrame) -> Drawing:
    """Measured time of our layers over the floor: what bytes and products do not explain."""
    table = uniform(tables.predictions(rows))
    if table.empty:
        return "no floor was stored: this GPU's ceilings were not known."
    said = [f"{weights} {span(part['off %'], '{:+.0f}')} %" for weights, part in table.groupby("weights")]
    return drawing(
        plots.lines, table, "T", "off %", "model", panel="weights", logx=True, reference=[(0, "the floor")],
        xlabel="tokens", ylabel="measured over the floor, %", title="How far the floor is from what was measured",
        alt="Lines of measured time over the floor against tokens, by model.",
        caption="Floor: reading or products, whichever is longer, and a launch.",
        said=", ".join(said) + _over_both(table.dropna(subset=["over both %"])) + _unpacking(rows),
        hidden=["routing"], units=UNITS,
    )  # fmt: skip


def _over_both(table: pd.DataFrame) -> str:
    """What is left over the sum of reading and products, by weights and tokens."""
    parts = []
    for weights, part in table.groupby("weights"):
        many = part["T"] > READ_BOUND
        some = ((f"up to {READ_BOUND} tokens", ~many & (part["T"] > 1)), ("beyond", many))
        spans = [f"{words} {span(part[s]['over both %'], '{:+.0f}')} %" for words, s in some if s.any()]
        parts += [f"{weights} {', '.join(spans)}"] if spans else []
    said = ". Over the sum of reading and of the products of whole blocks, without one token: "
    return said + "; ".join(parts) if parts else ""


def _unpacking(rows: pd.DataFrame) -> str:
    """What the same products with fewer bytes say, where they take longer."""
    table = _int4(rows)
    slower = where(table, verdict="slower")["ratio"]
    if slower.empty:
        return ""
    return (
        f". In {len(slower)} of {len(table)} cases INT4 takes ×{span(1 / slower)} the time of bf16, which does the "
        "same products and reads more: what is left for that time is unpacking, again for every block of rows"
    )


def floor_cases(cases: Sequence[Case]) -> list[Case]:
    """The layers whose floors the page shows: bf16, uniform routing."""
    return [x for x in cases if x.op == "layer" and x["weights"] != "INT4" and x["routing"] == UNIFORM]


def active_experts(cases: Sequence[Case]) -> pd.DataFrame:
    """Experts that get a token in each case's routing, and the bytes of their weights; no measurement."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for x in cases:
        if x.op == "layer" and x["routing"] == UNIFORM:
            line = {"model": x["model"], "T": x["T"], "active": work.active(x), "of": x["E"]}
            moved = work.weight_bytes(x)
            found.setdefault((x["model"], x["T"]), line).update(
                {f"MB, {x['weights']}": moved / 1e6, f"FLOP a byte, {x['weights']}": work.flops(x) / moved}
            )
    return frame(list(found.values()), ["model", "T", "active", "of"])


# What to do


def summary(rows: pd.DataFrame) -> str:
    """What to do: the grid, what pays instead, and the layer."""
    said = [_which_grid(rows), _instead(rows), ours_there(rows), _how_fast(rows)]
    return sentences(said, "nothing was measured that decides anything.")


def _which_grid(rows: pd.DataFrame) -> str:
    table = where(tables.persistence(rows), persistent=variants.OURS_FILLED)
    if table.empty:
        return ""
    faster, slower = ((table["verdict"] == word).sum() for word in ("faster", "slower"))
    advice = "Launch as many programs as fit" if faster else "Any grid will do"
    advice = "Launch one CTA a tile" if slower > faster else advice
    best = table.loc[table["ratio"].idxmax()]
    said = f"{advice}: a persistent grid of as many programs as fit is {counted(table['verdict'])} of {len(table)} "
    said += f"cases, at best {interval(best)} ({_where(best)})"
    alone = table["CTAs an SM"] == 1
    if 0 < alone.sum() < len(table):
        wins = [int((table[some]["verdict"] == "faster").sum()) for some in (alone, ~alone)]
        said += f"; where a tile is so large that one CTA fills an SM it is faster in {wins[0]} of {alone.sum()}, "
        said += f"elsewhere in {wins[1]} of {(~alone).sum()}"
    return f"{said}."


ADVICE = {  # a change of `tables.own_products` -> what it comes to
    variants.FILLED: "launch as many programs as fit, if the grid must be persistent",
    **{f"{variants.LIVE}, {grid}": f"launch blocks that have a token alone ({grid})" for grid in variants.GRIDS},
}


def _instead(rows: pd.DataFrame) -> str:
    """What makes ExecuTorch's own products faster in every case, with both kinds of activations, the most first."""
    table = where(tables.worth(rows), change=[*ADVICE])
    if table.empty:
        return ""
    sure = table.groupby("change")[["faster", "cases"]].transform("sum")
    table = table[sure["faster"] == sure["cases"]]
    means = table.groupby("change")["mean ratio"].agg(geometric_mean).sort_values(ascending=False)
    said = [f"{ADVICE[change]} (×{gain:.2f} in the mean)" for change, gain in means.items()]
    return f"What makes ExecuTorch's own products faster in every case instead: {'; '.join(said)}." if said else ""


def ours_there(rows: pd.DataFrame) -> str:
    """The lab's two GEMMs at the source's own point beside the fastest form of ExecuTorch's own."""
    us = tables.source_point(rows).set_index("variant")["µs, both"]
    ours = us.get(variants.OURS_TILES)
    us = us.drop(variants.OURS_TILES, errors="ignore")
    if ours is None or us.empty:
        return ""
    return (
        f"At the source's own point the lab's two GEMMs, one CTA a tile, take {ours:.0f} µs, and the fastest form of "
        f"ExecuTorch's own ({us.idxmin()}) ×{us.min() / ours:.2f} as long."
    )


def _how_fast(rows: pd.DataFrame) -> str:
    table = tables.against_best(rows)
    usual, lost = uniform(table), where(table[table["routing"] != UNIFORM], verdict="slower")
    if usual.empty:
        return ""
    said = f"Under uniform routing our bf16 layer is {counted(usual['verdict'])} of {len(usual)} cases against the "
    said += f"fastest other (×{geometric_mean(usual['ratio']):.2f} in the mean, ×{span(usual['ratio'])})"
    if len(lost):
        worst = lost.loc[lost["ratio"].idxmin()]
        said += f"; but it takes its tiles by the number of tokens, and with {worst['routing']} it is down to "
        said += f"×{worst['ratio']:.2f} ({worst['model']}, {in_tokens(worst['T'])})"
    int4 = _int4(rows)
    return f"{said}. INT4 weights against bf16: {_few(int4)}." if len(int4) else f"{said}."


ledger.watch(__name__)
