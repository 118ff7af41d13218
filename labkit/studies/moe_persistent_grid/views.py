"""Figures and sentences of whole layers, each made from the rows of one GPU."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from labkit.bench import ledger
from labkit.bench.spec import Case
from labkit.bench.tables import frame, tuning_seconds, where, why_not
from labkit.bench.verdict import counted, geometric_mean
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import SAME, faster, gains, interval, span
from labkit.report.words import tokens as in_tokens
from labkit.studies.moe_persistent_grid import tables, variants, work
from labkit.studies.moe_persistent_grid.variants import KINDS, SOURCE_T, UNIFORM

AIM = 80  # percent of the read ceiling that the INT4 GEMMs of 16 to 128 tokens are to reach
READ_BOUND = 512  # tokens, up to which reading is what the pages show of a layer
LAB = "lab"
SHORT = {
    variants.GROUPED: "F.grouped_mm",
    variants.LIGER: "liger-kernel",
    variants.LOOP: "loop, eager",
    **variants.ENGINES,
    variants.OURS: LAB,
}
FITTING = "as many CTAs as fit"
GRIDS = {variants.OURS_PERSISTENT: "one CTA an SM", variants.OURS_FILLED: FITTING}
CHANGES = {  # a change of `tables.own_products` -> as it is shown
    "persistent": "persistent grid",
    variants.FILLED: f"persistent: {FITTING}",
    "groups of more than 1": "persistent: tiles in groups",
    f"{variants.LIVE}, {variants.TILES}": "one CTA a tile: skip empty blocks",
    f"{variants.LIVE}, {variants.PERSISTENT}": "persistent: skip empty blocks",
}
DISPLAY = {  # recorded names, which rows hold -> as they are shown
    **SHORT,
    **CHANGES,
    variants.OURS_TILES: f"{LAB}, {variants.TILES}",
    **{name: f"{LAB}, persistent, {words}" for name, words in GRIDS.items()},
    **{
        name: name.replace(variants.FILLED, FITTING).replace(variants.LIVE, "no empty blocks")
        for name in variants.RELEASED_GEMMS
    },
    **{gemm: gemm.upper() for gemm in variants.GEMMS},
}
UNITS = {"us": "µs", "against us": "before, µs", "active": "experts active", "ratio": "× faster", "dead %": "empty %"}
UNITS |= {f"{what} us": f"{what}, µs" for what in ("reading", "products")} | {"predicted us": "floor, µs"}
UNITS |= {"ours µs": f"{LAB}, µs", "by": "fastest other", "by µs": "fastest other, µs", "against": "before"}
HIDDEN = ["routing", "no slower", "runs"]  # of every table: what the page says elsewhere
FORMATS = {name: "{:.1f}" for name in ("µs", "before, µs", "empty %", "lab, µs", "fastest other, µs", "engine µs")}
FORMATS |= {name: "{:.3f}" for name in ("× faster", "low", "high", "mean, × faster", "least", "most")}


def uniform(table: pd.DataFrame) -> pd.DataFrame:
    """The lines of the uniform routing."""
    return where(table, routing=UNIFORM)


def named(table: pd.DataFrame, *hidden: str) -> pd.DataFrame:
    """A table as a page shows it: display names and headings, without some columns."""
    texts = {name: table[name].replace(DISPLAY) for name in table if not is_numeric_dtype(table[name])}
    return table.assign(**texts).drop(columns=[*HIDDEN, *hidden], errors="ignore").rename(columns=UNITS)


def labels(table: pd.DataFrame, *columns: str) -> list[str]:
    """These columns of each line in words; T: its tokens."""
    words = [table[name].map(in_tokens) if name == "T" else table[name].replace(DISPLAY) for name in columns]
    return [", ".join(line) for line in zip(*words, strict=True)]


def gain(line: pd.Series) -> str:
    """How much faster one line of a table is, with its interval: "1.38× faster [1.37, 1.39]"."""
    said = faster(line["ratio"])
    slower = line["ratio"] < 1 and said != SAME
    return f"{said} {interval(*((1 / line['high'], 1 / line['low']) if slower else (line['low'], line['high'])))}"


def on_average(ratios: pd.Series) -> str:
    """The geometric mean, and both ends: "1.10× faster on average, 1.02× to 1.43× faster"."""
    return f"{faster(geometric_mean(ratios))} on average, {gains(ratios)}"


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
    slower = (table["verdict"] == "slower").all()
    return drawing(
        plots.lines, table, "T", "ratio", "activations", low="low", high="high", logx=True, reference=[(1, "equal")],
        xlabel="tokens", ylabel="× faster as a persistent grid",
        title="The persistent grid is slower at every number of tokens" if slower else "What the persistent grid gains",
        alt="Lines of how much faster ExecuTorch's own layer is as a persistent grid, by tokens and activations.",
        caption="ExecuTorch's own layer, release 1.5.1, and the same with the pull request's launch and loop; each "
        "tunes itself. Bars are 95 % intervals.",
        said=first_upper(gains(table["ratio"])), hidden=["runs"],
        units=UNITS | {"against us": "one CTA a tile, µs", "us": "persistent, µs"},
    )  # fmt: skip


def first_upper(text: str) -> str:
    """A text as a sentence begins."""
    return text[:1].upper() + text[1:]


def narrow_blocks(rows: pd.DataFrame) -> pd.DataFrame:
    """ExecuTorch's own layer in blocks of 64 rows against blocks of 16."""
    units = {"against us": "blocks of 16, µs", "us": "blocks of 64, µs", "ratio": "× faster with 64"}
    return tables.narrow_blocks(rows).drop(columns="runs").rename(columns=units)


def beside_released(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest form of ExecuTorch's own layer beside the lab's."""
    return named(tables.beside_released(rows)).rename(columns={"× faster": "lab × faster"})


def in_short(rows: pd.DataFrame) -> dict[str, str]:
    """Question -> answer: when the persistent grid pays, and how the lab's layer stands."""
    return _source_in_short(rows) | _grids_in_short(rows) | _layer_in_short(rows) | _int4_in_short(rows)


def _source_in_short(rows: pd.DataFrame) -> dict[str, str]:
    """The claim's own code, or why it was not timed."""
    own, narrow = where(tables.released_grids(rows), T=SOURCE_T), tables.narrow_blocks(rows)
    if own.empty:
        return {"ExecuTorch's layer": why_not(rows, variants.RELEASED)}
    found = {
        f"ExecuTorch's layer, {line['activations']}, {in_tokens(SOURCE_T)}: persistent grid": gain(line)
        for _, line in own.iterrows()
    }
    for _, line in narrow.iterrows():
        found[f"ExecuTorch's layer, {line['activations']}, {in_tokens(SOURCE_T)}: blocks of 64 rows, not 16"] = gain(
            line
        )
    return found


def _grids_in_short(rows: pd.DataFrame) -> dict[str, str]:
    table, found = tables.persistence(rows), {}
    for persistent, words in GRIDS.items():
        part = where(table, persistent=persistent)
        if len(part):
            wins = int((part["verdict"] == "faster").sum())
            average = faster(geometric_mean(part["ratio"]))
            found[f"Lab's products: persistent grid of {words}"] = (
                f"{average} on average; faster in {wins} of {len(part)}"
            )
    return found


def _layer_in_short(rows: pd.DataFrame) -> dict[str, str]:
    table = tables.against_best(rows)
    usual, skewed = uniform(table), table[table["routing"] != UNIFORM]
    parts = {"uniform routing": usual, "skewed routing": skewed}
    return {
        f"Lab's bf16 layer against the fastest other, {words}": on_average(part["ratio"])
        for words, part in parts.items()
        if len(part)
    }


def _int4_in_short(rows: pd.DataFrame) -> dict[str, str]:
    return {f"INT4 weights, not bf16, {words}": gains(ratios) for words, ratios in _few(_int4(rows)).items()}


def _int4(rows: pd.DataFrame) -> pd.DataFrame:
    return uniform(tables.compared(rows, variants.OURS, variants.OURS_BF16))


def _few(table: pd.DataFrame) -> dict[str, pd.Series]:
    """Ratios of INT4 weights up to the most tokens at which no model is slower with them, and beyond."""
    good = [t for t, part in table.groupby("T") if part["verdict"].isin(["faster", "same"]).all()]
    bad = sorted(set(table["T"]) - set(good))
    most = max((t for t in good if not bad or t < bad[0]), default=0)
    parts = {f"up to {in_tokens(most)}": table["T"] <= most, "beyond" if most else "in all": table["T"] > most}
    return {words: table[some]["ratio"] for words, some in parts.items() if some.any()}


def rivals(rows: pd.DataFrame) -> Drawing:
    """How much faster the lab's layer is than the fastest other, bf16, uniform routing."""
    table = uniform(tables.against_best(rows))
    if table.empty:
        return "no other layer was timed beside the lab's: `pip install labkit[peers]` brings those that there are."
    least = table.loc[table["ratio"].idxmin()]
    said = f"{first_upper(faster(geometric_mean(table['ratio'])))} on average, least {faster(least['ratio'])} "
    said += f"({_where(least)})" + "".join(f"; {_missing(rows, variant)}" for variant in _engines_missing(rows))
    return drawing(
        plots.lines, table, "T", "ratio", "model", low="low", high="high", logx=True, reference=[(1, "equal")],
        xlabel="tokens", ylabel="× faster than the fastest other",
        title="The lab's bf16 layer against the fastest other",
        alt="Lines of how much faster the lab's layer is than the fastest other, by tokens and model.",
        caption="Uniform routing. The table says which the fastest other is; the loop alone is timed eagerly.",
        said=said, table=named(table, "weights"),
    )  # fmt: skip


def rates(rows: pd.DataFrame) -> Drawing:
    """TFLOP/s of the lab's layer and of the others against tokens, bf16."""
    table = where(uniform(tables.times(rows)), weights="bf16", variant=[*SHORT])
    if table.empty:
        return "no bf16 layer was measured."
    _, tflops = tables.ceilings(rows)
    best = table.loc[table["TFLOP/s"].idxmax()]
    said = f"Most: {SHORT[best['variant']]}, {best['TFLOP/s']:.0f} TFLOP/s ({best['model']}, {in_tokens(best['T'])})"
    columns = ["model", "T", "active", "variant", "mode", "us", "TFLOP/s", "% of products", "TB/s", "% of reading"]
    return drawing(
        plots.lines, table.assign(short=table["variant"].map(SHORT)), "T", "TFLOP/s", "short", panel="model",
        logx=True, logy=True, xlabel="tokens", ylabel="TFLOP/s (log)", title="Whole layers, bf16, uniform routing",
        reference=[(tflops, "ceiling")] if tflops == tflops else None,
        alt="Lines of TFLOP/s against tokens, by model and layer.",
        caption="The line is the ceiling of bf16 products. TB/s in the table: of the weights of the experts that "
        "got a token, each once.", said=said, table=named(table[columns]),
    )  # fmt: skip


def launching(rows: pd.DataFrame) -> dict[str, str]:
    """What dependent launch is worth to a layer of few kernels: tokens -> mean of the models, and in how many."""
    table, found = uniform(tables.compared(rows, variants.OURS, variants.ORDINARY)), {}
    for t, part in table.groupby("T") if len(table) else ():
        ledger.note(f"launching, {in_tokens(t)}", part)
        wins = (part["verdict"] == "faster").sum()
        found[in_tokens(t)] = (
            f"{faster(geometric_mean(part['ratio']))} on average; faster in {wins} of {len(part)} models"
        )
    return found


def one_token(rows: pd.DataFrame) -> pd.DataFrame:
    """One token by matrix-vector products and by tiles."""
    table = uniform(tables.compared(rows, variants.OURS, variants.BY_TILES))
    return named(table, "T").rename(columns={"before, µs": "tiles, µs", "µs": "matrix-vector, µs"})


def by_words(rows: pd.DataFrame) -> pd.DataFrame:
    """One token with INT4 weights loaded as words and as bytes."""
    table = uniform(tables.compared(rows, variants.WORDS, variants.BYTES))
    return named(table, "T", "weights").rename(columns={"before, µs": "bytes, µs", "µs": "words, µs"})


def words_said(rows: pd.DataFrame) -> str:
    """Whether fewer instructions a weight are worth anything to one token."""
    table = by_words(rows)
    if table.empty:
        return "INT4 weights as words were not timed beside bytes."
    worse = ", ".join(where(table, verdict="slower")["model"])
    said = f"Words are {counted(table['verdict'])} of {len(table)} models"
    return f"{said}; bytes are faster for {worse}." if worse else f"{said}."


JOINED = (variants.OURS, variants.APART), (variants.SIDE, variants.OURS)
DESIGNS = dict.fromkeys(JOINED, "Blocks of one expert as one tile") | {
    (variants.FRAGMENTS, variants.OURS): "INT4 as fragments",
    (variants.SPECIALISED, variants.OURS): "INT4 by specialised warps",
    (variants.OURS, variants.IN_TURN): "Tables in one launch",
}


def side_by_side(rows: pd.DataFrame) -> pd.DataFrame:
    """Blocks of one expert as one tile, by routing."""
    shown = {"routing": "synthetic routing", "beside": "× faster than F.grouped_mm"}
    today, before = (tables.designs(rows, *pair) for pair in JOINED)
    table = today if len(today) else before
    return named(table.rename(columns=shown), "T", "weights", "reading %")


def fragments(rows: pd.DataFrame) -> pd.DataFrame:
    """INT4 weights as fragments, by model."""
    return _by_model(rows, variants.FRAGMENTS)


def specialised(rows: pd.DataFrame) -> pd.DataFrame:
    """INT4 weights by specialised warps, by model."""
    return _by_model(rows, variants.SPECIALISED)


def _by_model(rows: pd.DataFrame, *pair: str) -> pd.DataFrame:
    """A design of INT4 weights against another, or ours, by model."""
    table = tables.designs(rows, *pair).rename(columns={"reading %": "of reading, %"})
    return named(table, "weights", "beside", "same bits")


def at_once(rows: pd.DataFrame) -> pd.DataFrame:
    """The tables of the routing in one launch, by model."""
    return _by_model(rows, variants.OURS, variants.IN_TURN)


def designs_said(rows: pd.DataFrame) -> str:
    """How much faster each of the other designs is, at most, and in how many cases."""
    said = []
    for pair, words in DESIGNS.items():
        table = tables.designs(rows, *pair)
        if len(table):
            best = table.loc[table["ratio"].idxmax()]
            place = f"{best['model']}, {in_tokens(best['T'])}, routing {best['routing']}"
            of = f"{counted(table['verdict'])} of {len(table)} cases"
            said.append(f"{words}: {of}, at best {faster(best['ratio'])} ({place}).")
    return " ".join(said) or "Other designs of the layer were not timed on this GPU."


def _engines_missing(rows: pd.DataFrame) -> list[str]:
    """The engines whose bf16 layer was timed in no case."""
    timed = set(where(tables.beside_engines(rows), weights="bf16")["engine"])
    return [variant for variant in variants.ENGINES_OF["bf16"] if variants.ENGINES[variant] not in timed]


def _missing(rows: pd.DataFrame, variant: str) -> str:
    """That an engine's layer was not timed, and why."""
    return f"{variants.ENGINES[variant]}'s layer is not among them: {why_not(rows, [variant])}"


def beside_engines(rows: pd.DataFrame) -> dict[str, str]:
    """Engine and weights -> how much faster the lab's layer is than its own, or why that was not timed."""
    table, found = uniform(tables.beside_engines(rows)), {}
    for weights, engines in variants.ENGINES_OF.items():
        some = rows[rows["case"].str.contains(f'"weights": "{weights}"')]
        for variant in engines:
            part = where(table, weights=weights, engine=variants.ENGINES[variant])
            said = on_average(part["ratio"]) if len(part) else why_not(some, [variant])
            found[f"{variants.ENGINES[variant]}, {weights}"] = said
    return found


def reading(rows: pd.DataFrame) -> Drawing:
    """The two INT4 GEMMs as percent of the read ceiling, by tokens."""
    table = uniform(tables.int4_reading(rows))
    table = table[(table["T"] <= READ_BOUND) & table["% of reading"].notna()]
    if table.empty:
        return "no INT4 GEMMs were measured beside a known read ceiling."
    some = table[table["T"].between(16, 128)]
    said = "Not measured at 16 to 128 tokens"
    if len(some):
        said = f"At 16 to 128 tokens {span(some['% of reading'], '{:.0f}')} %"
        beside = some["% of reading here"].dropna()
        said += f"; of reading in the same run {span(beside, '{:.0f}')} %" if len(beside) else ""
    return drawing(
        plots.lines, table, "T", "% of reading", "model", logx=True, reference=[(AIM, "the lab's aim")],
        xlabel="tokens", ylabel="% of the read ceiling", title="How near INT4 products come to reading their weights",
        alt="Lines of percent of the read ceiling against tokens, by model.",
        caption="Both GEMMs by tiles, each with the faster of its grids; the layer of one token has other kernels.",
        said=said, table=named(table, "weights"),
    )  # fmt: skip


def int4_gain(rows: pd.DataFrame) -> Drawing:
    """How much faster the lab's layer is with INT4 weights than with bf16."""
    table = _int4(rows)
    if table.empty:
        return "the lab's layer was not measured with both kinds of weights in one case."
    rated = where(tables.times(rows), variant=variants.OURS)
    rated = rated[[*tables.CASE, "TFLOP/s", "% of products", "TB/s", "% of reading"]]
    said = ", ".join(f"{words} {gains(ratios)}" for words, ratios in _few(table).items())
    few, many = (where(table, T=end)["verdict"] for end in (table["T"].min(), table["T"].max()))
    crosses = (few == "faster").all() and (many == "slower").any()
    units = UNITS | {"us": "INT4, µs", "against us": "bf16, µs"}
    return drawing(
        plots.lines, table, "T", "ratio", "model", low="low", high="high", logx=True, reference=[(1, "equal")],
        xlabel="tokens", ylabel="× faster with INT4 weights",
        title="INT4 weights pay with few tokens, not with many" if crosses else "What INT4 weights are worth",
        alt="Lines of how much faster the lab's layer is with INT4 weights than with bf16, by tokens and model.",
        caption="The same layer in the same blocks of timing; rates in the table are of INT4.",
        said=first_upper(said), table=table.merge(rated, how="left", on=tables.CASE), hidden=[*HIDDEN, "weights"],
        units=units,
    )  # fmt: skip


# Routing, tuning, prediction


def routings(rows: pd.DataFrame) -> Drawing:
    """The lab's layer against the fastest other under each synthetic routing."""
    table = tables.routings(rows)
    table = table[table["ratio"].notna()]
    if table.empty:
        return "the lab's layer was not timed beside another under several routings."
    worst = table.loc[table["ratio"].idxmin()]
    lost = worst["ratio"] < 1
    return drawing(
        plots.lines, table.assign(case=labels(table, "model", "T")), "routing", "ratio", "case", low="low",
        high="high", joined=False, reference=[(1, "equal")], xlabel="synthetic routing",
        ylabel="× faster than the fastest other",
        title="The lab's layer loses where many tokens meet at one expert" if lost and worst["routing"] == KINDS[-1]
        else "The lab's layer under skewed routing",
        alt="Marks of how much faster the lab's bf16 layer is than the fastest other, by routing and case.",
        caption="bf16 weights; zipf: by Zipf's law with this exponent; hot set: a sixteenth of the experts. In the "
        "table, blocks are of the expert that got the most.",
        said=f"Least: {faster(worst['ratio'])} ({_where(worst)})", table=named_routings(table),
    )  # fmt: skip


def named_routings(table: pd.DataFrame) -> pd.DataFrame:
    """`tables.routings` as it is shown, which keeps the routing."""
    return named(table.rename(columns={"routing": "synthetic routing"}), "weights")


def skew_costs(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of the lab's layer under each routing over that of the uniform one."""
    columns = ["us", "active", "most / mean", "BM", "blocks", "over uniform"]
    return tables.routings(rows)[[*tables.CASE, *columns]].rename(columns=UNITS)


def tuning(rows: pd.DataFrame) -> dict[str, str]:
    """Question -> answer: how long tuning takes, and what it and the number of tokens in its key are worth."""
    found, most, seconds = {}, tables.tuned_up_to(rows), tuning_seconds(rows)
    if len(seconds):
        found["Time to tune a layer for one number of tokens"] = (
            f"{seconds.median():.1f} s in the median, at most {seconds.max():.1f} s"
        )
        found["Most tokens tuned for"] = f"{most}"
    ruled, other = (
        uniform(tables.compared(rows, variants.OURS, name)) for name in (variants.RULE, variants.OTHER_TOKENS)
    )
    parts = {
        "By the rule instead": ruled[ruled["T"] <= most],
        f"With the tiles of {in_tokens(variants.TUNED_FOR)} for any number": other,
    }
    return found | {words: on_average(1 / part["ratio"]) for words, part in parts.items() if len(part)}


def prediction(rows: pd.DataFrame) -> Drawing:
    """Measured time of the lab's layers over the floor: what bytes and products do not explain."""
    table = uniform(tables.predictions(rows))
    if table.empty:
        return "no layer of uniform routing is shown that has a stored floor."
    said = [f"{weights} {span(part['off %'], '{:+.0f}')} %" for weights, part in table.groupby("weights")]
    return drawing(
        plots.lines, table, "T", "off %", "model", panel="weights", logx=True, reference=[(0, "the floor")],
        xlabel="tokens", ylabel="measured over the floor, %", title="How far the floor is from what was measured",
        alt="Lines of measured time over the floor against tokens, by model.",
        caption="Floor: reading or products, whichever is longer, and a launch.",
        said=", ".join(said), table=named(table),
    )  # fmt: skip


def unexplained(rows: pd.DataFrame) -> dict[str, str]:
    """What is left over the sum of reading and of the products of whole blocks, by weights and tokens, and why."""
    table = uniform(tables.predictions(rows)).dropna(subset=["over both %"])
    found = {}
    for weights, part in table.groupby("weights"):
        many = part["T"] > READ_BOUND
        some = {f"2 to {READ_BOUND} tokens": ~many & (part["T"] > 1), "more tokens": many}
        found |= {
            f"{weights}, {words}: over reading and products": f"{span(part[s]['over both %'], '{:+.0f}')} %"
            for words, s in some.items()
            if s.any()
        }
    int4 = _int4(rows)
    slower = where(int4, verdict="slower")["ratio"]
    if len(slower):
        found["INT4 slower than bf16, by unpacking"] = f"in {len(slower)} of {len(int4)} cases, {gains(slower)}"
    return found


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


ledger.watch(__name__)
