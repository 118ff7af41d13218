"""Figures and sentences of the study, each made from the rows of one GPU (or from none, where nothing is measured)."""

import math
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench import tables as kit
from labkit.bench.verdict import counted
from labkit.kernels.decoder import tables as decoder_tables
from labkit.kernels.decoder.model import MODELS
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import filled, interval, sentences
from labkit.studies.persistent_tables import tables as derived
from labkit.studies.persistent_tables import variants

BAR_PERCENT = 85  # of the read ceiling, on streamed bytes, that Llama-3.2-1B was to reach
COLD_L2 = 4  # times the L2 that the buffers of a cold case are elsewhere, at least
L2_BYTES = {"H100 80GB HBM3": 50 * 2**20, "NVIDIA H200": 60 * 2**20}  # as PyTorch says
NEAR = 1.02  # times the least: as good
UNITS = {
    "us": "µs", "tbs": "TB/s", "gpu us": "GPU µs", "idle us": "idle µs", "beyond": "µs beyond way 8",
    "queued_us": "queued µs", "host": "all", "build": "build µs", "copy": "copy µs", "launch": "launch µs",
    "verdict": "tables are",
}  # fmt: skip


def in_short(rows: pd.DataFrame) -> str:
    """What the ways cost, what rebuilding was, and how near to reading the weights the step comes."""
    return sentences((_cost(rows), _step(rows)), "nothing that this page asks for was measured.")


def _cost(rows: pd.DataFrame) -> str:
    """From rebuilding in Python to the best valid ways, at the published size; and what the step is of that."""
    walls = derived.walls(rows)
    table = kit.where(walls, **variants.PUBLISHED, way=set(variants.WAYS) - {variants.ONE_POSITION}).set_index("way")
    us = table["us"]
    if variants.REBUILT not in us:
        return ""
    near = numbers(us.index[us <= NEAR * us.min()])
    said = (
        f"A token of {variants.H1024} with about as many records as were published takes {us[variants.REBUILT]:.0f} µs "
        f"if its tables are rebuilt in Python, {us.min():.0f} µs by the best that keep them right (ways {near})"
    )
    whole = kit.where(walls, **variants.MAIN, model=variants.H1024, way=variants.GRAPH)
    if len(whole):
        line, step = whole.iloc[0], table["gpu us"].iloc[0]
        said += (
            f". The step alone, in a graph, takes {step:.0f} µs, which so few records slow down: with "
            f"{line['records']:.0f} of them way 9 takes {line['us']:.0f} µs"
        )
    return f"{said}."


def _step(rows: pd.DataFrame) -> str:
    table = kit.where(derived.graphs(rows), variant=variants.OURS).dropna(subset="% of ceiling")
    said = ", ".join(f"{line['model']} {line['% of ceiling']:.0f} %" for _, line in table.iterrows())
    return said and f"Of the read ceiling, the step alone with as many records as suit it reaches: {said}."


def numbers(ways: Iterable[str]) -> str:
    """The numbers of some ways: "1, 2, 6"."""
    return ", ".join(dict.fromkeys(way.split()[0] for way in ways))


# Before anything is measured


def traffic() -> pd.DataFrame:
    """What a token of every way enqueues, for each model; empty where Triton, whose launches these are, is missing."""
    if not find_spec("triton"):
        return pd.DataFrame()
    from labkit.studies.persistent_tables import ways

    found = []
    for way in (*variants.WAYS, *variants.ALONE):
        line: dict[str, Any] = {"way": way}
        position = None if way in (variants.IN_LAUNCH, variants.GRAPH) else 0
        for model in (variants.H1024, variants.LLAMA):
            sent = ways.traffic(way, decoder_tables.lower(derived.lowering(model, 132, position=position)))
            line |= {f"bytes, {model}": sent.bytes, f"copies, {model}": sent.copies, "kernels": sent.kernels}
        found.append(line)
    return pd.DataFrame(found)


def sizes() -> pd.DataFrame:
    """The tables of every model as they are lowered for an H100, and those of the published designs.

    Columns design, model, programs, records, bytes, words that change a token; counted, not measured. With the position
    in the launch, the same tables change in no word.
    """
    found = [
        {"design": "Stanford MegaKernels, published", "model": variants.LLAMA, "programs": "132", "records": 8644}
        | {"bytes": 132 * 66 * 32 * 4, "words": 0},
        {"design": "AutoMegaKernel, published", "model": variants.H1024, "programs": "–"}
        | {"records": variants.PUBLISHED_RECORDS, "bytes": 402 * 224 + 121 * 96, "words": 12},
    ]
    wanted = [(name, programs, None) for name in variants.MODELS for programs in (132, 528)]
    for model, programs, parts in [*wanted, (variants.H1024, 528, variants.PUBLISHED_PARTS)]:
        lowered = decoder_tables.lower(derived.lowering(model, programs, parts=parts))
        counts = decoder_tables.counts(lowered)
        line = {"design": "this page", "model": model, "programs": str(programs), "records": counts["records"]}
        found.append(line | {"bytes": lowered.nbytes, "words": counts["changed_words"]})
    return pd.DataFrame(found)


def changes(position: int = variants.START) -> pd.DataFrame:
    """Which words differ between the tables of a position and of the next: model, table, op, field, words, bytes."""
    found = []
    for name in variants.MODELS:
        how = derived.lowering(name, 132)
        found += [{"model": name} | one._asdict() for one in decoder_tables.changes_of_a_token(how, position)]
    return pd.DataFrame(found)


def floor_cases(cases: Sequence[Any]) -> list[Any]:
    """Whole tokens of each model, at the first position."""
    return [x for x in cases if x.op == "token" and variants.MAIN.items() <= x.params.items()]


def compiled(capabilities: Sequence[int] = (80, 90, 100, 120)) -> pd.DataFrame:
    """What the step compiles to, by model, with the position on the device; empty where Triton is missing."""
    if not find_spec("triton"):
        return pd.DataFrame()
    from labkit.evidence import compiled as evidence

    make, how = f"{variants.TRIALS}:compilable", {"dtype": "bf16", "position_from": "device"}
    sources = {model: (make, {"model": model} | how) for model in variants.MODELS}
    table = evidence.table(sources, capabilities)
    table = table.assign(wide=[loads.get("128", 0) for loads in table["loads"]])
    columns = {
        "source": "model", "capability": "sm", "registers": "registers", "spill_bytes": "spilled bytes",
        "ctas_per_sm": "CTAs an SM", "wide": "loads of 16 bytes", "atomics": "atomics", "instructions": "instructions",
    }  # fmt: skip
    return table[list(columns)].rename(columns=columns)


def cold(rows: pd.DataFrame) -> str:
    """How many times the L2 the weights of each model are, which every token reads again."""
    whole = derived.cases(rows, "token", **variants.MAIN)
    if not whole:
        return "no whole token was measured."
    l2 = next((size for gpu, size in L2_BYTES.items() if gpu in rows["gpu"].iloc[0]), None)
    sizes = pd.DataFrame(
        [{"model": params["model"], "MB": group["floor_bytes"].iloc[0] / 1e6} for params, group in whole]
    ).assign(times=lambda table: 1e6 * table["MB"] / (l2 or math.nan))
    said = ", ".join(filled(sizes, "{model} {MB:.0f} MB" + (" ({times:.1f} times the L2)" if l2 else "")))
    return (
        f"a token reads {said}. There is one set of weights, as in any decode, and every token reads it again: where "
        f"it is less than {COLD_L2} times the L2, which other pages keep to, some of it may be found there."
    )


# Right or wrong


def tokens(rows: pd.DataFrame) -> pd.DataFrame:
    """Tokens that are the reference's, of those compared, by way; all cases together."""
    table = derived.tokens(rows)
    found = []
    for way, some in table.groupby("way", sort=False):
        line: dict[str, Any] = {"way": way, "cases": len(some)}
        for dtype in ("fp32", "bf16"):
            part = kit.where(some, dtype=dtype)
            line[f"right, {dtype}"] = f"{part['right'].sum():.0f} of {part['checked'].sum():.0f}" if len(part) else "–"
        line |= {"least margin": some["margin"].min(), "margin where they part": some["margin there"].max()}
        found.append(line | {name: some[name].max() for name in ("first error", "second error")})
    return pd.DataFrame(found)


def one_position(rows: pd.DataFrame) -> str:
    """The published replay: its first token, its second, and how many are right."""
    table = kit.where(derived.tokens(rows), way=variants.ONE_POSITION)
    if table.empty:
        return "way 5 was not measured."
    worst = table.loc[table["right"].idxmax()]
    return (
        f"way 5 generates the reference's tokens up to the {_nth(int(worst['right']))} of {worst['checked']:.0f} at "
        f"best, in {len(table)} cases. The logits of its first token differ from the reference's by at most "
        f"{table['first error'].max():.1e}, those of its second by at least {table['second error'].min():.1e}."
    )


def _nth(number: int) -> str:
    end = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{end}"


# The step alone


def step(rows: pd.DataFrame) -> Drawing:
    """Percent of the read ceiling of the tables and of separate kernels, by model."""
    table = derived.graphs(rows).dropna(subset="% of ceiling")
    if table.empty:
        return "no token was measured beside a known read ceiling."
    said = "; ".join(_fastest(part) for _, part in table.groupby("model", sort=False))
    return drawing(
        plots.bars, table, "model", "% of ceiling", "variant", xlabel="model", ylabel="% of the read ceiling",
        reference=[(BAR_PERCENT, "aimed at")], title="A token without the host: streamed bytes over the read ceiling",
        alt=f"Bars of percent of the read ceiling by model, of tables and separate kernels. {said}.",
        caption=f"CUDA graphs of whole sequences of tokens, batch 1. {said}. Ratio in the table: the variant's time "
        "over that of the tables.",
        hidden=["runs"], units=UNITS,
    )  # fmt: skip


def _fastest(table: pd.DataFrame) -> str:
    some = table[~table["variant"].isin([variants.READ, variants.UNORDERED])]
    best = some.loc[some["us"].idxmin()]
    return f"{best['model']}: fastest {best['variant']}, {best['us']:.0f} µs"


def against(rows: pd.DataFrame) -> Drawing:
    """The tables against each chain of separate kernels, with intervals."""
    chains = [*variants.SEPARATE, *variants.DEPENDENT]
    table = kit.where(derived.graphs(rows), variant=chains).dropna(subset="ratio")
    if table.empty:
        return "nothing was timed beside the tables."
    return drawing(
        plots.ratios, table, "variant", "ratio", "low", "high", group="model", verdict="verdict",
        xlabel="time of the variant / time of the tables (above 1: tables faster)",
        title="Tables against separate kernels", alt="Ratios of time of separate kernels over the tables, by model.",
        caption="Paired by block, 95 % intervals.",
        said=f"The tables are {counted(table['verdict'])} of {len(table)} comparisons",
        table=["model", "variant", "us", *derived.RATIO], units=UNITS,
    )  # fmt: skip


def bar_step(rows: pd.DataFrame) -> str:
    """The bars of the step, one by one: bytes, the graph of kernels, and the one with dependent launch."""
    table = kit.where(derived.graphs(rows), model=variants.LLAMA)
    mine = kit.where(table, variant=variants.OURS)
    if mine.empty:
        return f"{variants.LLAMA} was not measured."
    percent = mine["% of ceiling"].iloc[0]
    said = [
        f"{percent:.0f} % of the read ceiling, {'' if percent >= BAR_PERCENT else 'not '}the {BAR_PERCENT} % aimed at"
    ]
    for words, some in (("separate kernels", variants.SEPARATE), ("with dependent launch", variants.DEPENDENT)):
        said += [
            f"{words}, the better one ({line['variant']}) takes {interval(line, 3)} of its time"
            for _, line in kit.where(table, variant=some).dropna(subset="ratio").nsmallest(1, "us").iterrows()
        ]
    later = kit.where(derived.contexts(rows), model=variants.LLAMA, variant=variants.GEMV_DEPENDENT)
    said += [
        f"from position {line['start']} on ×{line['ratio']:.3f} (tables {line['verdict']})"
        for _, line in later[later["start"] != variants.START].iterrows()
    ]
    return f"{variants.LLAMA}, batch 1, advancing from position {variants.START}: {'; '.join(said)}."


def stops(rows: pd.DataFrame) -> str:
    """What a token takes beyond reading as many bytes: waiting, and streaming more slowly."""
    table = derived.graphs(rows)
    parts = []
    for model, some in table.groupby("model", sort=False):
        us = some.set_index("variant")["us"]
        if {variants.OURS, variants.UNORDERED, variants.READ} <= set(us.index):
            stages = 2 + 5 * MODELS[model].layers
            waiting, slower = us[variants.OURS] - us[variants.UNORDERED], us[variants.UNORDERED] - us[variants.READ]
            ledger.note(
                "stops",
                {"model": model, "waiting": waiting, "us": waiting / stages, "stages": stages, "slower": slower},
            )
            parts.append(
                f"{model} {waiting:.0f} µs of waiting, {waiting / stages:.2f} µs a barrier of {stages}, and "
                f"{slower:+.0f} µs against reading as many bytes without it"
            )
    return f"{'; '.join(parts)}." if parts else "the step was not measured beside reading."


def ablations(rows: pd.DataFrame) -> pd.DataFrame:
    """The step with one choice changed, against the step as it is."""
    return derived.ablations(rows).rename(columns=UNITS)


def stages(rows: pd.DataFrame) -> Drawing:
    """Where a token of Llama goes, by op: waking up, working, waiting for the slowest; beside it what reading takes."""
    table = derived.stages(rows)
    mine = kit.where(table, model=variants.LLAMA)
    if mine.empty:
        return f"no moments were written down with {variants.LLAMA}."
    words = {"floor": "reading at the ceiling", "wake": "wake", "work": "work", "tail": "tail"}
    tidy = mine.melt("op", list(words), var_name="part", value_name="us")
    sums = mine[list(words)].sum()
    ledger.note("together", sums.to_dict())
    said = (
        f"Together {sums['wake']:.0f} µs wake, {sums['work']:.0f} µs work and {sums['tail']:.0f} µs tail; reading the "
        f"weights alone would take {sums['floor']:.0f} µs"
    )
    return drawing(
        plots.bars, tidy.assign(part=tidy["part"].map(words)), "op", "us", "part",
        xlabel="operation, all layers together", ylabel="µs of a token",
        title=f"Where a token's time goes, {variants.LLAMA}",
        alt=f"Bars of µs a token by operation: reading at the ceiling, wake, work, tail. {said}.",
        caption=f"The last token of a sequence, by the clock of the GPU, which ticks about once a µs; the first and "
        f"the last record of a token are left out. {said}: what is loaded before a wait is streamed in wake and tail, "
        "which are more than waiting therefore.",
        table=table.round(1), units={name: f"{name} µs" for name in (*words, "all")},
    )  # fmt: skip


def contexts(rows: pd.DataFrame) -> Drawing:
    """µs a token without the host against the first position, tables and separate kernels."""
    table = derived.contexts(rows)
    if table.empty:
        return "no model was measured at several positions."
    rival = kit.where(table, variant=variants.GEMV_DEPENDENT)
    said = "; ".join(
        f"{model} "
        + ", ".join(f"×{line['ratio']:.3f} at {line['start']} ({line['verdict']})" for _, line in some.iterrows())
        for model, some in rival.groupby("model", sort=False)
    )
    return drawing(
        plots.lines, table, "start", "us", "variant", panel="model", logx=True, logy=True,
        xlabel="position of the first token", ylabel="µs a token (log)",
        title="Longer contexts: tables and separate kernels",
        alt="Lines of µs a token against the position, by variant and model.",
        caption="CUDA graphs of whole sequences.",
        said=f"Time of {variants.GEMV_DEPENDENT}, over that of the tables, and what the tables are: {said}",
        units=UNITS,
    )  # fmt: skip


# Questions and verdict


QUESTIONS = (  # and what answers each in words
    ("Which tables are persistent?", "buffers, records, queues"),
    ("Why is loading or building them a bottleneck?", "Python loops for every token"),
    ("What has to change for a token?", "the position's words, or none"),
    ("How does it differ from commands that are all on the GPU before?", "only in the position's words"),
)


def questions(rows: pd.DataFrame) -> pd.DataFrame:
    """The issue's questions, each with the figure that answers it."""
    walls = kit.where(derived.walls(rows), **variants.PUBLISHED).set_index("way")
    rebuilt = derived.rebuilding(rows).set_index("table")
    us = walls["us"].map("{:.0f} µs".format)
    ways = (variants.ONE_POSITION, variants.IN_LAUNCH, variants.GRAPH)

    def built(table: str, part: str = "build") -> str:
        mid, low, high = (rebuilt.loc[table, name] for name in (part, f"{part} low", f"{part} high"))
        return f"{mid:.0f} µs [{low:.0f}, {high:.0f}]"

    figures = (
        lambda: ", ".join(f"{one} {built(one)} to build" for one in variants.TABLES),
        lambda: (
            f"building {built('all')} and copies {built('all', 'copy')}, timed apart from the token of "
            f"{us[variants.REBUILT]}"
        ),
        lambda: f"{walls.loc[variants.PACKED, 'bytes']:.0f} of {walls['bytes'].max():.0f} bytes",
        lambda: ", ".join(f"{way} {us[way]}" for way in ways),
    )
    lines = [(*asked, _measured(figure)) for asked, figure in zip(QUESTIONS, figures, strict=True)]
    return pd.DataFrame(lines, columns=["question", "answer", "figure"])


def _measured(figure: Callable[[], str]) -> str:
    try:
        return figure()
    except KeyError:  # a way or a table that it names has no line
        return "not measured"


def summary(rows: pd.DataFrame) -> str:
    """The result in one sentence."""
    found = derived.ratio(rows, variants.REBUILT, variants.GRAPH, **variants.PUBLISHED)
    if not found:
        return "the ways were not measured at the published size."
    replay = derived.ratio(rows, variants.ONE_POSITION, variants.GRAPH, **variants.PUBLISHED)
    more = f"; the replay of one position, which is no decode, takes {interval(replay)} of it" if replay else ""
    return (
        f"a decode that rebuilds its tables in Python takes {interval(found, 1)} of the time of one that is right at "
        f"every token and rebuilds nothing (way 9), at the published size{more}."
    )


ledger.watch(__name__)
