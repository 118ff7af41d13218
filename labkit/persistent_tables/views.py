"""Figures and sentences of the study, each made from the rows of one GPU (or from none, where nothing is measured)."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import pandas as pd

from labkit.bench.verdict import counted
from labkit.persistent_tables import derived, names
from labkit.report import figures

Drawing = Mapping[str, Any] | str  # a sentence where there is nothing to draw
BAR_PERCENT = 85  # of the read ceiling, on streamed bytes, that Llama-3.2-1B was to reach
NEAR = 1.02  # times the least: as good
BAR_HOST_US = 20  # of the host a token, that way 8 or 9 was to stay below
UNITS = {
    "us": "µs", "tbs": "TB/s", "gpu us": "GPU µs", "idle us": "idle µs", "beyond": "µs beyond way 8",
    "queued_us": "queued µs", "host": "all", "build": "build µs", "copy": "copy µs", "launch": "launch µs",
    "verdict": "tables are",
}  # fmt: skip


def in_short(rows: pd.DataFrame) -> str:
    """What the ways cost, what rebuilding was, and how near to reading the weights the step comes."""
    parts = [part for part in (_cost(rows), _step(rows)) if part]
    return " ".join(parts) if parts else "nothing that this page asks for was measured."


def _cost(rows: pd.DataFrame) -> str:
    """From rebuilding in Python to the best valid ways, at the published size; and what the step is of that."""
    walls = derived.walls(rows)
    table = _at_published(walls)
    table = table[table["way"].isin(names.WAYS) & (table["way"] != names.ONE_POSITION)].set_index("way")
    us = table["us"]
    if names.REBUILT not in us:
        return ""
    near = _numbers(us.index[us <= NEAR * us.min()])
    said = (
        f"A token of {names.H1024} with about as many records as were published takes {us[names.REBUILT]:.0f} µs if "
        f"its tables are rebuilt in Python, {us.min():.0f} µs by the best that keep them right (ways {near})"
    )
    whole = _of_case(walls, derived.MAIN | {"model": names.H1024, "way": names.GRAPH})
    if len(whole):
        line, step = whole.iloc[0], table["gpu us"].iloc[0]
        said += (
            f". {step:.0f} µs of that are the step, which so few records slow down: with {line['records']:.0f} of them "
            f"way 9 takes {line['us']:.0f} µs"
        )
    return f"{said}."


def _step(rows: pd.DataFrame) -> str:
    table = derived.graphs(rows)
    table = table[(table["variant"] == names.OURS) & table["% of ceiling"].notna()]
    parts = [f"{line['model']} {line['% of ceiling']:.0f} %" for _, line in table.iterrows()]
    said = ", ".join(parts)
    return f"Of the read ceiling, the step alone with as many records as suit it reaches: {said}." if parts else ""


def _at_published(table: pd.DataFrame) -> pd.DataFrame:
    return _of_case(table, derived.PUBLISHED)


def _of_case(table: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """The lines that have all these values."""
    return table[(table[list(wanted)] == pd.Series(wanted)).all(axis=1)] if len(table) else table


# Before anything is measured


def traffic() -> pd.DataFrame:
    """What a token of every way enqueues, for each model; empty where Triton, whose launches these are, is missing."""
    if not find_spec("triton"):
        return pd.DataFrame()
    from labkit.persistent_tables import tables, ways

    found = []
    for way in (*names.WAYS, *names.ALONE):
        line: dict[str, Any] = {"way": way}
        for model in (names.H1024, names.LLAMA):
            position = None if way in (names.IN_LAUNCH, names.GRAPH) else 0
            sent = ways.traffic(way, tables.lower(derived.lowering(model, 132, position=position)))
            line |= {f"bytes, {model}": sent.bytes, f"copies, {model}": sent.copies, "kernels": sent.kernels}
        found.append(line)
    return pd.DataFrame(found)


def changes() -> pd.DataFrame:
    """Which words differ from one position to the next."""
    return derived.changes()


def sizes() -> pd.DataFrame:
    """Records, bytes and words that change, here and in the published designs."""
    return derived.sizes()


def floor_cases(cases: Sequence[Any]) -> list[Any]:
    """Whole tokens of each model, at the first position."""
    return [x for x in cases if x.op == "token" and derived.MAIN.items() <= x.params.items()]


def compiled(capabilities: Sequence[int] = (80, 90, 100, 120)) -> pd.DataFrame:
    """What the step compiles to, by model, with the position on the device; empty where Triton is missing."""
    if not find_spec("triton"):
        return pd.DataFrame()
    from labkit.evidence import compiled as evidence

    sources = {
        model: (
            "labkit.persistent_tables.trials:kernel",
            {"model": model, "dtype": "bf16", "position_from": "device"},
        )
        for model in names.MODELS
    }
    table = evidence.table(sources, capabilities)
    table = table.assign(wide=[loads.get("128", 0) for loads in table["loads"]])
    columns = {
        "source": "model", "capability": "sm", "registers": "registers", "spill_bytes": "spilled bytes",
        "ctas_per_sm": "CTAs an SM", "wide": "loads of 16 bytes", "atomics": "atomics", "instructions": "instructions",
    }  # fmt: skip
    return table[list(columns)].rename(columns=columns)


# Right or wrong


def tokens(rows: pd.DataFrame) -> pd.DataFrame:
    """Tokens that are the reference's, of those compared, by way; all cases together."""
    table = derived.tokens(rows)
    found = []
    for way, some in table.groupby("way", sort=False):
        line: dict[str, Any] = {"way": way, "cases": len(some)}
        for dtype in ("fp32", "bf16"):
            part = some[some["dtype"] == dtype]
            line[f"right, {dtype}"] = f"{part['right'].sum():.0f} of {part['checked'].sum():.0f}" if len(part) else "–"
        line |= {"least margin": some["margin"].min(), "margin where they part": some["margin there"].max()}
        found.append(line | {name: some[name].max() for name in ("first error", "second error")})
    return pd.DataFrame(found)


def one_position(rows: pd.DataFrame) -> str:
    """The published replay: its first token, its second, and how many are right."""
    table = derived.tokens(rows)
    table = table[table["way"] == names.ONE_POSITION]
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
    table = derived.graphs(rows)
    table = table[table["% of ceiling"].notna()]
    if table.empty:
        return "no token was measured beside a known read ceiling."
    fig = figures.bars(
        table, "model", "% of ceiling", "variant", xlabel="model", ylabel="% of the read ceiling",
        reference=[(BAR_PERCENT, "aimed at")], title="A token without the host: streamed bytes over the read ceiling",
    )  # fmt: skip
    said = "; ".join(_fastest(part) for _, part in table.groupby("model", sort=False))
    return {
        "fig": fig,
        "alt": f"Bars of percent of the read ceiling by model, of tables and separate kernels. {said}.",
        "caption": f"CUDA graphs of whole sequences of tokens, batch 1. {said}. Ratio in the table: the variant's "
        "time over that of the tables.",
        "table": table.drop(columns="runs").rename(columns=UNITS),
    }


def _fastest(table: pd.DataFrame) -> str:
    some = table[~table["variant"].isin([names.READ, names.UNORDERED])]
    best = some.loc[some["us"].idxmin()]
    return f"{best['model']}: fastest {best['variant']}, {best['us']:.0f} µs"


def against(rows: pd.DataFrame) -> Drawing:
    """The tables against each chain of separate kernels, with intervals."""
    table = derived.graphs(rows)
    table = table[table["variant"].isin([*names.SEPARATE, *names.DEPENDENT]) & table["ratio"].notna()]
    if table.empty:
        return "nothing was timed beside the tables."
    fig = figures.ratios(
        table, "variant", "ratio", "low", "high", group="model", verdict="verdict",
        xlabel="time of the variant / time of the tables (above 1: tables faster)",
        title="Tables against separate kernels",
    )  # fmt: skip
    said = f"The tables are {counted(table['verdict'])} of {len(table)} comparisons"
    return {
        "fig": fig,
        "alt": f"Ratios of time of separate kernels over the tables, by model. {said}.",
        "caption": f"Paired by block, 95 % intervals. {said}.",
        "table": table[["model", "variant", "us", "ratio", "low", "high", "verdict"]].rename(columns=UNITS),
    }


def bar_step(rows: pd.DataFrame) -> str:
    """The bars of the step, one by one: bytes, the graph of kernels, and the one with dependent launch."""
    table = derived.graphs(rows)
    mine = table[(table["model"] == names.LLAMA) & (table["variant"] == names.OURS)]
    if mine.empty:
        return f"{names.LLAMA} was not measured."
    percent = mine["% of ceiling"].iloc[0]
    said = [
        f"{percent:.0f} % of the read ceiling, {'' if percent >= BAR_PERCENT else 'not '}the {BAR_PERCENT} % aimed at"
    ]
    for words, some in (("separate kernels", names.SEPARATE), ("with dependent launch", names.DEPENDENT)):
        found = derived.best(rows, some)
        found = found[found["model"] == names.LLAMA]
        for _, line in found.iterrows():
            interval = f"[{line['low']:.3f}, {line['high']:.3f}]"
            said.append(
                f"{words}, the better one ({line['variant']}) takes ×{line['ratio']:.3f} {interval} of its time"
            )
    later = derived.contexts(rows)
    later = later[(later["model"] == names.LLAMA) & (later["variant"] == names.GEMV_DEPENDENT)]
    said += [
        f"from position {line['start']} on ×{line['ratio']:.3f} (tables {line['verdict']})"
        for _, line in later[later["start"] != names.START].iterrows()
    ]
    return f"{names.LLAMA}, batch 1, advancing from position {names.START}: {'; '.join(said)}."


def stops(rows: pd.DataFrame) -> str:
    """What a token takes beyond reading as many bytes: waiting, and streaming more slowly."""
    table = derived.graphs(rows)
    parts = []
    for model, some in table.groupby("model", sort=False):
        us = some.set_index("variant")["us"]
        if {names.OURS, names.UNORDERED, names.READ} <= set(us.index):
            stages = 2 + 5 * derived.MODELS[model].layers
            waiting, slower = us[names.OURS] - us[names.UNORDERED], us[names.UNORDERED] - us[names.READ]
            parts.append(
                f"{model} {waiting:.0f} µs of waiting, {waiting / stages:.2f} µs a barrier of {stages}, and "
                f"{slower:+.0f} µs against reading as many bytes without it"
            )
    return f"{'; '.join(parts)}." if parts else "the step was not measured beside reading."


def ablations(rows: pd.DataFrame) -> pd.DataFrame:
    """The step with one choice changed, against the step as it is."""
    return derived.ablations(rows).drop(columns="runs").rename(columns=UNITS)


def stages(rows: pd.DataFrame) -> Drawing:
    """Where a token of Llama goes, by op: waking up, working, waiting for the slowest; beside it what reading takes."""
    table = derived.stages(rows)
    mine = table[table["model"] == names.LLAMA]
    if mine.empty:
        return f"no moments were written down with {names.LLAMA}."
    tidy = mine.melt("op", ["floor", "wake", "work", "tail"], var_name="part", value_name="us")
    words = {"floor": "reading at the ceiling", "wake": "wake", "work": "work", "tail": "tail"}
    fig = figures.bars(
        tidy.assign(part=tidy["part"].map(words)), "op", "us", "part", xlabel="operation, all layers together",
        ylabel="µs of a token", title=f"Where a token's time goes, {names.LLAMA}",
    )  # fmt: skip
    sums = mine[["wake", "work", "tail", "floor"]].sum()
    said = (
        f"Together {sums['wake']:.0f} µs wake, {sums['work']:.0f} µs work and {sums['tail']:.0f} µs tail; reading the "
        f"weights alone would take {sums['floor']:.0f} µs"
    )
    return {
        "fig": fig,
        "alt": f"Bars of µs a token by operation: reading at the ceiling, wake, work, tail. {said}.",
        "caption": f"The last token of a sequence, by the clock of the GPU, which ticks about once a µs; the first and "
        f"the last record of a token are left out. {said}: what is loaded before a wait is streamed in wake and tail, "
        "which are more than waiting therefore.",
        "table": table.round(1).rename(columns={n: f"{n} µs" for n in ("wake", "work", "tail", "floor", "all")}),
    }


def contexts(rows: pd.DataFrame) -> Drawing:
    """µs a token without the host against the first position, tables and separate kernels."""
    table = derived.contexts(rows)
    if table.empty:
        return "no model was measured at several positions."
    fig = figures.lines(
        table, "start", "us", "variant", panel="model", logx=True, logy=True, xlabel="position of the first token",
        ylabel="µs a token (log)", title="Longer contexts: tables and separate kernels",
    )  # fmt: skip
    rival = table[table["variant"] == names.GEMV_DEPENDENT]
    said = "; ".join(
        f"{model} "
        + ", ".join(f"×{line['ratio']:.3f} at {line['start']} ({line['verdict']})" for _, line in some.iterrows())
        for model, some in rival.groupby("model", sort=False)
    )
    said = f"Time of {names.GEMV_DEPENDENT}, over that of the tables, and what the tables are: {said}."
    return {
        "fig": fig,
        "alt": f"Lines of µs a token against the position, by variant and model. {said}",
        "caption": f"CUDA graphs of whole sequences. {said}",
        "table": table.rename(columns=UNITS),
    }


# With the host


def host(rows: pd.DataFrame) -> Drawing:
    """The host's µs a token at the published size, by way and part."""
    table = _one_host(rows, 0)
    if table.empty:
        return "the host's work was not timed at the published size."
    tidy = table.melt("way", list(names.PARTS), var_name="part", value_name="us")
    fig = figures.bars(
        tidy.assign(way=tidy["way"].str.split().str[0] + " " + tidy["way"].map(_short)), "way", "us", "part", logy=True,
        xlabel="way", ylabel="µs of the host (log)", title=f"The host's work for a token, {names.H1024}",
    )  # fmt: skip
    worst, best = table.loc[table["host"].idxmax()], table.loc[table["host"].idxmin()]
    said = f"Most: {worst['way']}, {worst['host']:.0f} µs; least: {best['way']}, {best['host']:.1f} µs"
    return {
        "fig": fig,
        "alt": f"Bars of the host's time by way, split into build, copy and launch. {said}.",
        "caption": f"Medians, {table['records'].max():.0f} records, the GPU idle before each token. {said}.",
        "table": table.drop(columns=["model", "parts", "queued_us", "runs"]).rename(columns=UNITS),
    }


def _one_host(rows: pd.DataFrame, queued_us: int) -> pd.DataFrame:
    table = derived.hosts(rows)
    table = table[(table["parts"] == names.PUBLISHED_PARTS) & (table["queued_us"] == queued_us)]
    return table[table["way"].isin(names.WAYS)]


def _short(way: str) -> str:
    words = {
        names.REBUILT: "Python", names.VECTORISED: "vectorised", names.PREBUILT: "prebuilt", names.PINNED: "pinned",
        names.ONE_POSITION: "replayed", names.ONE_BY_ONE: "one by one", names.PACKED: "packed",
        names.BY_KERNEL: "kernel", names.IN_LAUNCH: "launch", names.GRAPH: "graph",
    }  # fmt: skip
    return words.get(way, way)


def bar_host(rows: pd.DataFrame) -> str:
    """The bar of the host's work: ways 8 and 9 in every case."""
    table = derived.hosts(rows)
    table = table[table["way"].isin([names.IN_LAUNCH, names.GRAPH]) & (table["queued_us"] == 0)]
    if table.empty:
        return "ways 8 and 9 were not timed."
    most = table.groupby("way")["host"].max()
    parts = [f"{way} at most {us:.1f} µs, {'below' if us < BAR_HOST_US else 'not below'}" for way, us in most.items()]
    count = len(table[["model", "parts"]].drop_duplicates())
    return f"medians over {count} cases, one of them to stay below {BAR_HOST_US} µs: {'; '.join(parts)}."


def walls(rows: pd.DataFrame) -> Drawing:
    """µs a token by way, a series a model."""
    table = _main_walls(rows)
    if table.empty:
        return "no token was timed with the host at work."
    fig = figures.lines(
        table, "short", "us", "case", logy=True, joined=False, xlabel="way", ylabel="µs a token (log)",
        title="A token with the host at work",
    )  # fmt: skip
    best = table.loc[table.groupby("case", sort=False)["us"].idxmin()]
    said = "; ".join(f"{line['case']}: {line['way']}, {line['us']:.0f} µs" for _, line in best.iterrows())
    return {
        "fig": fig,
        "alt": f"Points of µs a token by way, one series a model. Least: {said}.",
        "caption": f"From an idle GPU, as many tokens a sample as the table says. Least: {said}.",
        "table": derived.walls(rows).rename(columns=UNITS),
    }


def _main_walls(rows: pd.DataFrame) -> pd.DataFrame:
    """The ways of every model, and those of the published size, in their order."""
    table = derived.walls(rows)
    table = table[(table["start"] == names.START) & (table["dtype"] == "bf16") & table["way"].isin(names.WAYS)]
    table = table[table["parts"].isin([0, names.PUBLISHED_PARTS])]
    if table.empty:
        return table
    short_names = table["model"].str.removeprefix("AutoMegaKernel ")
    records = table["records"].map(", {:.0f} records".format)
    cases = short_names + records.where(table["parts"] > 0, "")
    short = table["way"].str.split().str[0] + " " + table["way"].map(_short)
    order = table["way"].map(names.WAYS.index)
    return table.assign(case=cases, short=short, order=order).sort_values("order", kind="stable")


def idle(rows: pd.DataFrame) -> Drawing:
    """Percent of a token in which no step runs on the GPU, by way and model."""
    table = _main_walls(rows)
    table = table[table["% idle"].notna()]
    if table.empty:
        return "no token was timed with the host at work beside the step alone."
    fig = figures.heat(
        table, "case", "way", "% idle", xlabel="model", ylabel="way", unit="% of a token", fmt="{:.0f}",
        title="GPU idle: a token's time in which no step runs",
    )  # fmt: skip
    worst = table.loc[table["% idle"].idxmax()]
    said = f"Most: {worst['way']}, {worst['case']}, {worst['% idle']:.0f} %"
    return {
        "fig": fig,
        "alt": f"Map of percent of a token without a step running, by way and model. {said}.",
        "caption": f"What a token takes beyond way 9's step in a graph, over what it takes; the ways' kernels differ "
        f"by a percent or two, so that a little below zero is none. {said}.",
        "table": table[["case", "way", "us", "gpu us", "idle us", "% idle"]].rename(columns=UNITS),
    }


def rebuilding(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's µs for each table alone, and for all."""
    return derived.rebuilding(rows).rename(columns=UNITS)


def where(rows: pd.DataFrame) -> str:
    """Where the published saving goes, by its parts here."""
    table = derived.rebuilding(rows).set_index("table")
    walls = _at_published(derived.walls(rows)).set_index("way")["us"]
    if "all" not in table.index or not {names.REBUILT, names.VECTORISED, names.PREBUILT, names.ONE_POSITION} <= set(
        walls.index
    ):
        return "ways 1, 2, 3 and 5 were not all measured at the published size."
    saved = walls[names.REBUILT] - walls[names.ONE_POSITION]
    python, rest = walls[names.REBUILT] - walls[names.VECTORISED], walls[names.VECTORISED] - walls[names.PREBUILT]
    copies = walls[names.PREBUILT] - walls[names.ONE_POSITION]
    return (
        f"rebuilding costs {saved:.0f} µs a token here. {python:.0f} of them go when the same tables are built "
        f"vectorised, {rest:.0f} more when they are kept and only the position is set, and the last {copies:.0f} are "
        f"pageable copies and their waiting. The building alone, timed apart from these, without the GPU: "
        f"{table.loc['all', 'build']:.0f} µs."
    )


def queued(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's µs for copies with an idle GPU and behind other work."""
    return _whole_ways(rows).rename(
        columns={"built": "build µs", "idle": "GPU idle", "queued": f"{names.QUEUED_US} µs queued"}
    )


def _whole_ways(rows: pd.DataFrame) -> pd.DataFrame:
    table = derived.queued(rows)
    return table[table["way"].isin(names.WAYS)].reset_index(drop=True)


def waits(rows: pd.DataFrame) -> str:
    """Which copies wait for what is queued, or for what of it is left when the tables are built."""
    table = _whole_ways(rows)
    if table.empty:
        return "copies were not timed behind other work."
    late = table["built"] >= names.QUEUED_US
    rest = table["waited"] > names.QUEUED_US / 10
    wait = ~late & rest & (table["built"] + table["waited"] > names.QUEUED_US / 2)
    groups = {"the host waits for other work on the stream in the ways": wait, "not in": ~wait & ~late}
    numbers = {words: _numbers(table["way"][some]) for words, some in groups.items()}
    said = [f"{words} {found}" for words, found in numbers.items() if found]
    if late.any():
        said.append(f"way {_numbers(table['way'][late])} cannot tell: building takes longer than that other work")
    return "; ".join(said) + "."


def _numbers(ways: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(way.split()[0] for way in ways))


# Sweeps


def over_records(rows: pd.DataFrame) -> Drawing:
    """µs a token against the number of records, by way."""
    table = _swept(rows, "records")
    if table.empty:
        return "the number of records was not swept."
    gpu = table.drop_duplicates("records").assign(us=lambda t: t["gpu us"], way="the step alone, GPU")
    shown = pd.concat([table, gpu], ignore_index=True)
    fig = figures.lines(
        shown, "records", "us", "way", logx=True, logy=True, xlabel="records", ylabel="µs a token (log)",
        title=f"More records: {names.H1024}, a token with the host at work",
    )  # fmt: skip
    most = table[table["records"] == table["records"].max()].set_index("way")["us"]
    said = f"At {table['records'].max():.0f} records: " + ", ".join(f"{w} {us:.0f} µs" for w, us in most.items())
    return {
        "fig": fig,
        "alt": f"Lines of µs a token against records, by way. {said}.",
        "caption": f"{said}. Few records also leave most of the GPU without work, so that the step is slower.",
        "table": table[["parts", "records", "way", "us", "gpu us", "idle us", "bytes", "copies"]].rename(columns=UNITS),
    }


def _swept(rows: pd.DataFrame, sweep: str) -> pd.DataFrame:
    table = derived.hidden(rows)
    return table[table["sweep"].isin([sweep, "whole"])].sort_values(["records", "start"], kind="stable")


def host_over_records(rows: pd.DataFrame) -> Drawing:
    """The host's µs a token against the number of records, by way."""
    table = derived.hosts(rows)
    table = table[
        (table["model"] == names.H1024) & (table["queued_us"] == 0) & table["way"].isin([names.REBUILT, *names.SWEPT])
    ]
    if table["records"].nunique() < 2:
        return "the host's work was not timed with several numbers of records."
    fig = figures.lines(
        table, "records", "host", "way", low="low", high="high", logx=True, logy=True, xlabel="records",
        ylabel="µs of the host (log)", title=f"More records: the host's work for a token, {names.H1024}",
    )  # fmt: skip
    ends = table.sort_values("records").groupby("way", sort=False)["host"].agg(["first", "last"])
    said = "; ".join(f"{way} {line['first']:.0f} to {line['last']:.0f} µs" for way, line in ends.iterrows())
    return {
        "fig": fig,
        "alt": f"Lines of the host's time against records, by way. {said}.",
        "caption": f"Medians with quartiles, the GPU idle before each token. Fewest records to most: {said}.",
        "table": table.drop(columns=["model", "queued_us", "runs"]).rename(columns=UNITS),
    }


def hiding(rows: pd.DataFrame) -> Drawing:
    """What each way takes beyond way 8, against the step's time on the GPU (contexts of several lengths)."""
    table = _swept(rows, "contexts")
    table = table[table["way"] != names.IN_LAUNCH]
    if table["gpu us"].nunique() < 2:
        return "the time of the step was not swept."
    table = table.assign(gpu=table["gpu us"].round(1))
    fig = figures.lines(
        table, "gpu", "beyond", "way", logx=True, xlabel="µs of the step on the GPU", ylabel="µs beyond way 8",
        title=f"Longer steps: when does the upload hide? {names.H1024}",
    )  # fmt: skip
    told = {kind: table["way"][table["hides"] == kind] for kind in ("yes", "but its start", "no")}
    both = {kind: _numbers(ways) or "–" for kind, ways in told.items()}
    said = (
        f"A sample begins with an idle GPU, so the host's work for its first token is not hidden by anything. Within "
        f"1 % of way 8, at some of the contexts: ways {both['yes']}; no more beyond it than such a start explains: "
        f"{both['but its start']}; more: {both['no']}"
    )
    return {
        "fig": fig,
        "alt": f"Lines of µs a token beyond way 8 against the step's time, by way. {said}.",
        "caption": f"The context makes the step longer, not the tables. {said}.",
        "table": table[["start", "gpu us", "way", "tokens", "us", "beyond", "host us", "hides"]].rename(
            columns=UNITS | {"host us": "host µs of one token"}
        ),
    }


# Questions and verdict


def questions(rows: pd.DataFrame) -> pd.DataFrame:
    """The issue's questions, each with the figure that answers it."""
    walls = _at_published(derived.walls(rows)).set_index("way")
    rebuilt = derived.rebuilding(rows).set_index("table")
    found = [
        ("Which tables are persistent?", "buffers, records, queues", _records_alone(rebuilt)),
        ("Why is loading or building them a bottleneck?", "Python loops for every token", _why(walls, rebuilt)),
        ("What has to change for a token?", "the position's words, or none", _words(walls)),
        (
            "How does it differ from commands that are all on the GPU before?",
            "only in the position's words",
            _apart(walls),
        ),
    ]
    return pd.DataFrame(found, columns=["question", "answer", "figure"])


def _records_alone(rebuilt: pd.DataFrame) -> str:
    if not set(names.TABLES) <= set(rebuilt.index):
        return "not measured"
    return ", ".join(f"{one} {rebuilt.loc[one, 'build']:.0f} µs to build" for one in names.TABLES)


def _why(walls: pd.DataFrame, rebuilt: pd.DataFrame) -> str:
    if "all" not in rebuilt.index or names.REBUILT not in walls.index:
        return "not measured"
    build, us = rebuilt.loc["all", "build"], walls.loc[names.REBUILT, "us"]
    copies = rebuilt.loc["all", "copy"]
    return f"building {build:.0f} µs and copies {copies:.0f} µs, timed apart from the token of {us:.0f} µs"


def _words(walls: pd.DataFrame) -> str:
    if names.PACKED not in walls.index:
        return "not measured"
    sent, whole = walls.loc[names.PACKED, "bytes"], walls["bytes"].max()
    return f"{sent:.0f} of {whole:.0f} bytes"


def _apart(walls: pd.DataFrame) -> str:
    if not {names.ONE_POSITION, names.IN_LAUNCH, names.GRAPH} <= set(walls.index):
        return "not measured"
    ways = (names.ONE_POSITION, names.IN_LAUNCH, names.GRAPH)
    return ", ".join(f"{name} {walls.loc[name, 'us']:.0f} µs" for name in ways)


def summary(rows: pd.DataFrame) -> str:
    """The result in one sentence."""
    found = derived.ratio(rows, names.REBUILT, names.GRAPH, **derived.PUBLISHED)
    if not found:
        return "the ways were not measured at the published size."
    replay = derived.ratio(rows, names.ONE_POSITION, names.GRAPH, **derived.PUBLISHED)
    more = f"; the replay of one position, which is no decode, takes ×{replay['ratio']:.2f} of it" if replay else ""
    interval = f"[{found['low']:.1f}, {found['high']:.1f}]"
    return (
        f"a decode that is right at every token and rebuilds nothing (way 9) is ×{found['ratio']:.1f} {interval} as "
        f"fast as one that rebuilds its tables in Python, at the published size{more}."
    )
