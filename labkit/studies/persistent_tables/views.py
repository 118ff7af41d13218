"""Figures and sentences of the study, each made from the rows of one GPU (or from none, where nothing is measured)."""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench import tables as kit
from labkit.bench.verdict import counted
from labkit.kernels.decoder import tables as decoder_tables
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import faster
from labkit.studies.persistent_tables import bound, variants
from labkit.studies.persistent_tables import tables as derived
from labkit.studies.persistent_tables.shown import EACH_TOKEN, SHOWN, named

BAR_PERCENT = 85  # of the read ceiling, on streamed bytes, that Llama-3.2-1B was to reach
L2_BYTES = {"H100 80GB HBM3": 50 * 2**20, "NVIDIA H200": 60 * 2**20}  # as PyTorch says
UNITS = {
    "us": "µs", "tbs": "TB/s", "gpu us": "GPU µs", "idle us": "idle µs", "beyond": "µs beyond position in the launch",
    "queued_us": "queued µs", "host": "all", "build": "build µs", "copy": "copy µs", "launch": "launch µs",
    "ratio": "× faster with tables", "verdict": "tables are", "waiting": "waiting µs",
    "barrier": "waiting µs a barrier", "slower": "slower reading µs",
}  # fmt: skip
WARP_UNITS = UNITS | {"ratio": "× faster with the warp", "verdict": "with the warp it is"}


def measured(rows: pd.DataFrame) -> Mapping[str, str]:
    """What a token takes with tables rebuilt, with the fastest way that is right, and without the host."""
    walls = derived.walls(rows)
    table = kit.where(walls, **variants.PUBLISHED, way=[way for way in variants.WAYS if way != variants.ONE_POSITION])
    if table.empty:
        return {}
    us = table.set_index("way")["us"]
    found = {"tables rebuilt in Python": f"{us[variants.REBUILT]:.0f} µs"} if variants.REBUILT in us else {}
    found["fastest way with right tokens"] = f"{us.min():.0f} µs ({SHOWN[us.idxmin()]})"
    found["step alone"] = f"{table['gpu us'].iloc[0]:.0f} µs"
    for _, line in kit.where(walls, **variants.MAIN, model=variants.H1024, way=variants.GRAPH).iterrows():
        found["step alone, the model cut into more records"] = (
            f"{line['gpu us']:.0f} µs with {line['records']:.0f} records"
        )
    return found


# Before anything is measured


def traffic(model: str, ways: Sequence[str] = variants.WAYS) -> pd.DataFrame:
    """What a token of some ways enqueues; empty where Triton, which launches it, is missing.

    Columns way, for each token (what is done), bytes, copies, kernels.
    """
    if not find_spec("triton"):
        return pd.DataFrame()
    from labkit.studies.persistent_tables import ways as kept

    found = []
    for way in ways:
        line: dict[str, Any] = {"way": way, "for each token": EACH_TOKEN.get(way, "the same for one table")}
        position = None if way in (variants.IN_LAUNCH, variants.GRAPH) else 0
        sent = kept.traffic(way, decoder_tables.lower(derived.lowering(model, 132, position=position)))
        found.append(line | {"bytes": sent.bytes, "copies": sent.copies, "kernels": sent.kernels})
    return named(pd.DataFrame(found))


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


def cold(rows: pd.DataFrame) -> Mapping[str, str]:
    """Bytes that a token of each model reads, and how many times the L2 they are."""
    whole = derived.cases(rows, "token", **variants.MAIN)
    if not whole:
        return {}
    l2 = next((size for gpu, size in L2_BYTES.items() if gpu in rows["gpu"].iloc[0]), None)
    sizes = pd.DataFrame(
        [{"model": params["model"], "MB": group["floor_bytes"].iloc[0] / 1e6} for params, group in whole]
    ).assign(times=lambda table: 1e6 * table["MB"] / (l2 or math.nan))
    ledger.note("cold", sizes)
    form = "{MB:.0f} MB" + (", {times:.1f} times the L2" if l2 else "")
    return {line["model"]: form.format(**line) for line in sizes.to_dict("records")}


# Right or wrong


def tokens(rows: pd.DataFrame) -> pd.DataFrame:
    """Tokens that are the reference's, of those compared, by way; all cases together."""
    table = derived.tokens(rows)
    found = []
    for way, some in table.groupby("way", sort=False):
        line: dict[str, Any] = {"way": SHOWN.get(way, way), "cases": len(some)}
        for dtype in ("fp32", "bf16"):
            part = kit.where(some, dtype=dtype)
            line[f"right, {dtype}"] = f"{part['right'].sum():.0f} of {part['checked'].sum():.0f}" if len(part) else "–"
        line |= {"least margin": some["margin"].min(), "margin where they part": some["margin there"].max()}
        found.append(line | {name: some[name].max() for name in ("first error", "second error")})
    return pd.DataFrame(found)


def one_position(rows: pd.DataFrame) -> str:
    """The published replay: how many tokens are right, and how far off the second one's logits are."""
    table = kit.where(derived.tokens(rows), way=variants.ONE_POSITION)
    if table.empty:
        return "the replay of one position was not measured."
    best = table.loc[table["right"].idxmax()]
    return (
        f"The replay gets at best {best['right']:.0f} of {best['checked']:.0f} tokens right. The logits of its second "
        f"token are off by at least {table['second error'].min():.2f} (relative RMSE)."
    )


# The step alone


def step(rows: pd.DataFrame) -> Drawing:
    """Percent of the read ceiling of the tables and of separate kernels, by model."""
    table = named(derived.graphs(rows).dropna(subset="% of ceiling"), "variant")
    if table.empty:
        return "no token was measured beside a known read ceiling."
    fewer = [SHOWN.get(name, name) for name in (variants.LONGEST, variants.CUBLAS_DEPENDENT)]
    short = table["model"].str.removeprefix("AutoMegaKernel ")
    return drawing(
        plots.bars, table[~table["variant"].isin(fewer)].assign(model=short), "model", "% of ceiling", "variant",
        xlabel="model", ylabel="% of the read ceiling", reference=[(BAR_PERCENT, "aimed at")],
        title="Larger models come nearer to the speed of reading",
        alt="Bars of percent of the read ceiling by model, of tables and separate kernels.",
        caption="A token without the host: streamed bytes over the read ceiling. CUDA graphs of tokens in "
        "sequence, batch 1.",
        said=_ceiling(derived.graphs(rows), derived.streamed(rows)), table=table.drop(columns="runs"), units=UNITS,
    )  # fmt: skip


def _ceiling(table: pd.DataFrame, streamed: pd.DataFrame) -> str:
    """The share of the read ceiling that Llama's step reaches, beside what was aimed at; and where a warp copies."""
    warp = kit.where(streamed, variant=variants.STREAMED, start=variants.START)["% of ceiling"]
    mine = kit.where(table, model=variants.LLAMA, variant=variants.OURS)["% of ceiling"]
    said = [
        f"{variants.LLAMA} reaches {percent:.0f} %, {_beside(percent)} the {BAR_PERCENT} % aimed at" for percent in mine
    ]
    return "; ".join([*said, *(f"{percent:.0f} % where a warp copies weights" for percent in warp)])


def _beside(percent: float) -> str:
    return "not below" if percent >= BAR_PERCENT else "below"


def against(rows: pd.DataFrame) -> Drawing:
    """The tables against separate kernels with and without dependent launch, with intervals; cuBLAS in the table."""
    every = kit.where(derived.graphs(rows), variant=[*variants.SEPARATE, *variants.DEPENDENT]).dropna(subset="ratio")
    table = kit.where(every, variant=[variants.GEMV, variants.GEMV_DEPENDENT])
    if table.empty:
        return "nothing was timed beside the tables."
    drawn = {variants.GEMV: "than separate kernels", variants.GEMV_DEPENDENT: "… with dependent launch"}
    columns = ["model", "variant", "us", *derived.RATIO]
    return drawing(
        plots.ratios, table.assign(variant=table["variant"].map(drawn)), "variant", "ratio", "low", "high",
        group="model", verdict="verdict", xlabel="× faster with tables",
        title="Dependent launch takes most of the tables' lead",
        alt="How many times faster a step from tables is than separate kernels, by model.",
        caption=f"A token without the host, position {variants.START}: separate kernels in one CUDA graph, projections "
        "by the lab's GEMV. Intervals of 95 %. The table beneath has cuBLAS too.",
        said=f"The tables are {counted(every['verdict'])} of {len(every)} comparisons",
        table=named(every, "variant")[columns], units=UNITS,
    )  # fmt: skip


def stops(rows: pd.DataFrame) -> pd.DataFrame:
    """What a token takes beyond reading as many bytes: waiting, and streaming more slowly."""
    return derived.stops(rows).rename(columns=UNITS)


def ablations(rows: pd.DataFrame) -> pd.DataFrame:
    """The step with one choice changed, against the step as it is."""
    return named(derived.ablations(rows), "variant").rename(columns=UNITS)


def stages(rows: pd.DataFrame) -> Drawing:
    """Where a token of Llama goes, by op: waking up, working, waiting for the slowest; beside it what reading takes."""
    table = derived.stages(rows)
    mine = kit.where(table, model=variants.LLAMA)
    if mine.empty:
        return f"no time stamps were written with {variants.LLAMA}."
    words = {"floor": "reading at the ceiling", "wake": "wake", "work": "work", "tail": "tail"}
    tidy = mine.melt("op", list(words), var_name="part", value_name="us")
    sums = mine[list(words)].sum()
    both = sums["wake"] + sums["tail"]
    ledger.note("together", {"wake and tail": both} | sums.to_dict())
    return drawing(
        plots.bars, tidy.assign(part=tidy["part"].map(words)), "op", "us", "part",
        xlabel="operation, all layers together", ylabel="µs of a token",
        title=f"Barriers: each operation pays a wake and a tail ({variants.LLAMA})",
        alt="Bars of µs a token by operation: reading at the ceiling, wake, work, tail.",
        caption="One token, by the GPU's clock, which ticks about once a µs; its first and last record are left out.",
        said=f"Wake and tail together {both:.0f} µs, work {sums['work']:.0f} µs",
        table=table.round(1), units={name: f"{name} µs" for name in (*words, "all")},
    )  # fmt: skip


def finer(rows: pd.DataFrame) -> Drawing:
    """What a token would take if its records waited for less, by model."""
    table = derived.finer(rows)
    if table.empty:
        return "what finer waits would save was not simulated: no moments of records are known."
    least = kit.where(table, **{"waits for": "its parts"})
    ends = [f"{line['model']} {line['us']:.0f} µs ({line['saved %']:.0f} % less)" for line in least.to_dict("records")]
    return drawing(
        plots.bars, kit.where(table, **{"waits for": tuple(bound.WAYS)}), "waits for", "us", "model",
        xlabel="what a record waits for", ylabel="µs of a token", title="How much finer waits could save",
        alt="Bars of µs a token by what records wait for, and by model.",
        caption="Simulated from a measured token. Weights that came in a wait count as there: the best case.",
        said=f"Waiting for parts alone, at best: {', '.join(ends)}",
        table=table, units={"us": "µs"},
    )  # fmt: skip


def streamed(rows: pd.DataFrame) -> Drawing:
    """A step whose weights a warp copies against the tables as they are and separate kernels, by first position."""
    every = derived.streamed(rows)
    table = every.dropna(subset="ratio")
    if table.empty:
        return "a step whose weights a warp copies was not measured."
    drawn = {variants.OURS: "than the tables above", variants.GEMV_DEPENDENT: "than separate kernels"}
    first = kit.where(every, variant=variants.STREAMED).iloc[0]
    return drawing(
        plots.ratios, table.assign(at=table["start"].map("from position {}".format), than=table["variant"].map(drawn)),
        "at", "ratio", "low", "high", group="than", verdict="verdict", xlabel="× faster where a warp copies weights",
        title=f"Weights that wait for nobody ({first['model']})",
        alt="How many times faster a step is whose weights a warp copies, by position and what it is compared with.",
        caption="A token without the host. Separate kernels: with the lab's GEMV and dependent launch.",
        said=f"A token from position {first['start']} takes {first['us']:.0f} µs, {first['% of ceiling']:.0f} % of the "
        f"read ceiling. It is {counted(table['verdict'])} of {len(table)} comparisons",
        table=named(every, "variant"),
        units=WARP_UNITS,
    )  # fmt: skip


def contexts(rows: pd.DataFrame) -> Drawing:
    """The tables against separate kernels with dependent launch, by model and first position."""
    every = derived.contexts(rows)
    table = kit.where(every, variant=variants.GEMV_DEPENDENT)
    if table.empty:
        return "no model was measured at several positions."
    lost = not (kit.where(table, start=table["start"].max())["verdict"] == "faster").any()
    mine = kit.where(table, model=variants.LLAMA)
    last = (mine if len(mine) else table).iloc[-1]
    return drawing(
        plots.ratios, table.assign(at=table["start"].map("from position {}".format)), "at", "ratio", "low", "high",
        group="model", verdict="verdict", xlabel="× faster with tables",
        title="Longer contexts: the tables lose their lead" if lost else "Tables against separate kernels, by position",
        alt="How many times faster tables are than separate kernels, by model and position.",
        caption="Against separate kernels with the lab's GEMV and dependent launch; below 1 the tables are slower.",
        said=f"{last['model']} from position {last['start']}: the tables are {_speed(last)}",
        table=named(every, "variant"), units=UNITS,
    )  # fmt: skip


def batches(rows: pd.DataFrame) -> Drawing:
    """A step of several sequences from tables against separate kernels with cuBLAS and dependent launch.

    From those whose weights a warp copies where they were measured: against the tables as they are, too.
    """
    every = derived.batches(rows)
    warp = variants.STREAMED in set(every["variant"])
    drawn = {variants.CUBLAS_DEPENDENT: "than separate kernels"}
    drawn |= {variants.OURS: "than the tables above"} if warp else {}
    table = kit.where(every, variant=tuple(drawn))
    if table.empty:
        return "no step of several sequences was measured."
    mine = "where a warp copies weights" if warp else "with tables"
    separate = kit.where(every, variant=variants.CUBLAS_DEPENDENT)
    first, last = separate.iloc[0], separate.iloc[-1]
    return drawing(
        plots.ratios, table.assign(at=table["start"].map("from position {}".format), than=table["variant"].map(drawn)),
        "at", "ratio", "low", "high", group="than", verdict="verdict", xlabel=f"× faster {mine}",
        title=f"{first['batch']} sequences a step ({first['model']})",
        alt=f"How many times faster a step of several sequences is {mine}, by position and what it is compared with.",
        caption="Separate kernels: with cuBLAS and dependent launch. Below 1 the step from tables is slower.",
        said=f"{first['batch']} sequences against separate kernels: from position {first['start']} a step {mine} is "
        f"{_speed(first)}, from position {last['start']} {_speed(last)}",
        table=named(every, "variant"),
        units=(WARP_UNITS if warp else UNITS) | {"us a token": "µs a token", "times one": "× one sequence's"},
    )  # fmt: skip


def _speed(line: pd.Series) -> str:
    """What the tables are beside another variant: "1.29× faster"."""
    word = {"same": "as fast", "unclear": "not clearly faster or slower"}
    return word.get(line["verdict"]) or faster(line["ratio"])


# Questions


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
        lambda: ", ".join(f"{SHOWN[way]} {us[way]}" for way in ways),
    )
    lines = [(*asked, _measured(figure)) for asked, figure in zip(QUESTIONS, figures, strict=True)]
    return pd.DataFrame(lines, columns=["question", "answer", "figure"])


def _measured(figure: Callable[[], str]) -> str:
    try:
        return figure()
    except KeyError:  # a way or a table that it names has no line
        return "not measured"


ledger.watch(__name__)
