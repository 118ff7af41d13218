"""Figures and sentences of tokens with the host at work: what each way costs, by parts, records and contexts."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench import tables as kit
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import interval
from labkit.studies.persistent_tables import tables as derived
from labkit.studies.persistent_tables import variants
from labkit.studies.persistent_tables.views import UNITS, numbers

BAR_HOST_US = 20  # of the host a token, that way 8 or 9 was to stay below
WHOLE_UNITS = UNITS | {"low": "all, low", "high": "all, high"}
UNSURE = f'"unclear" means an interval wider than {100 * derived.SURE:.0f} % either way'
GROWS = {"faster": "more", "slower": "less", "same": "the same", "unclear": "unclear"}
SHORT = ("Python", "vectorised", "prebuilt", "pinned", "replayed", "one by one", "packed", "kernel", "launch", "graph")


def figure(
    line: Mapping[str, Any] | pd.Series, name: str, form: str = "{:.0f}", ends: str = "{} ", unit: str = ""
) -> str:
    """A figure of the host's with its interval: "2623 µs [985, 6990] (unclear)". name: of its column.

    ends: of the columns of its interval's ends, before "low" and "high". unit: what follows the number: " µs".
    """
    values = [line[name], *(line[ends.format(name) + end] for end in ("low", "high"))]
    ledger.note("figure", dict(zip(("mid", "low", "high"), values, strict=True)))
    mid, low, high = map(form.format, values)
    unclear = (values[2] - values[1]) / 2 > derived.SURE * abs(values[0])
    return f"{mid}{unit} [{low}, {high}]{' (unclear)' if unclear else ''}"


def host(rows: pd.DataFrame) -> Drawing:
    """The host's µs a token at the published size, by way and part."""
    table = kit.where(derived.hosts(rows), parts=variants.PUBLISHED_PARTS, queued_us=0, way=variants.WAYS)
    if table.empty:
        return "the host's work was not timed at the published size."
    tidy = table.melt("way", list(variants.PARTS), var_name="part", value_name="us")
    worst, best = table.loc[table["host"].idxmax()], table.loc[table["host"].idxmin()]
    most, least = (figure(line, "host", "{:.1f}", "", " µs") for line in (worst, best))
    return drawing(
        plots.bars, tidy.assign(way=tidy["way"].map(_short)), "way", "us", "part", logy=True, xlabel="way",
        ylabel="µs of the host (log)", title=f"The host's work for a token, {variants.H1024}",
        alt="Bars of the host's time by way, split into build, copy and launch.",
        caption=f"Geometric means of the processes' medians, {table['records'].max():.0f} records, the GPU idle before "
        f"each token. {UNSURE}: {(~table['sure'].astype(bool)).sum()} of {len(table)} are.",
        said=f"Most: {worst['way']}, {most}; least: {best['way']}, {least}",
        table=table, hidden=["model", "parts", "queued_us", "runs", "sure"], units=WHOLE_UNITS,
    )  # fmt: skip


def _short(way: str) -> str:
    """ "1 Python": a way's number and one word."""
    return f"{way.split()[0]} {SHORT[variants.WAYS.index(way)]}"


def bar_host(rows: pd.DataFrame) -> str:
    """The bar of the host's work: ways 8 and 9 in every case."""
    table = kit.where(derived.hosts(rows), way=[variants.IN_LAUNCH, variants.GRAPH], queued_us=0)
    if table.empty:
        return "ways 8 and 9 were not timed."
    parts = []
    for way, some in table.groupby("way"):
        word = "not below" if (some["low"] >= BAR_HOST_US).any() else "unclear whether below"
        word = "below" if (some["high"] < BAR_HOST_US).all() else word
        parts.append(f"{way} at most {figure(some.loc[some['host'].idxmax()], 'host', '{:.1f}', '', ' µs')}, {word}")
    count = len(table[["model", "parts"]].drop_duplicates())
    return f"over {count} cases, one of them to stay below {BAR_HOST_US} µs: {'; '.join(parts)}."


def walls(rows: pd.DataFrame) -> Drawing:
    """µs a token by way, a series a model."""
    table = _main_walls(rows)
    if table.empty:
        return "no token was timed with the host at work."
    best = table.loc[table.groupby("case", sort=False)["us"].idxmin()]
    said = "; ".join(f"{line['case']}: {line['way']}, {line['us']:.0f} µs" for _, line in best.iterrows())
    return drawing(
        plots.lines, table, "short", "us", "case", logy=True, joined=False, xlabel="way", ylabel="µs a token (log)",
        title="A token with the host at work", alt="Points of µs a token by way, one series a model.",
        caption="From an idle GPU, as many tokens a sample as the table says.", said=f"Least: {said}",
        table=derived.walls(rows), units=UNITS,
    )  # fmt: skip


def _main_walls(rows: pd.DataFrame) -> pd.DataFrame:
    """The ways of every model, and those of the published size, in their order."""
    wanted = variants.MAIN | {"parts": [0, variants.PUBLISHED_PARTS], "way": variants.WAYS}
    table = kit.where(derived.walls(rows), **wanted)
    if table.empty:
        return table
    short_names = table["model"].str.removeprefix("AutoMegaKernel ")
    records = table["records"].map(", {:.0f} records".format)
    cases = short_names + records.where(table["parts"] > 0, "")
    table = table.assign(case=cases, short=table["way"].map(_short))
    return table.sort_values("way", key=lambda ways: ways.map(variants.WAYS.index), kind="stable")


def idle(rows: pd.DataFrame) -> Drawing:
    """Percent of a token in which no step runs on the GPU, by way and model."""
    table = _main_walls(rows).dropna(subset="% idle")
    if table.empty:
        return "no token was timed with the host at work beside the step alone."
    worst = table.loc[table["% idle"].idxmax()]
    return drawing(
        plots.heat, table, "case", "way", "% idle", xlabel="model", ylabel="way", unit="% of a token", fmt="{:.0f}",
        title="GPU idle: a token's time in which no step runs",
        alt="Map of percent of a token without a step running, by way and model.",
        caption="What a token takes beyond way 9's step in a graph, over what it takes, each process by itself; the "
        "ways' kernels differ by a percent or two, so that a little below zero is none.",
        said=f"Most: {worst['way']}, {worst['case']}, {figure(worst, '% idle', ends='', unit=' %')}",
        table=["case", "way", "us", "gpu us", "idle us", "% idle", "low", "high"],
        units=UNITS | {"low": "% idle, low", "high": "% idle, high"},
    )  # fmt: skip


def rebuilding(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's µs for each table alone, and for all, and the share of each: as figures with their intervals."""
    table = derived.rebuilding(rows)
    percent = ["share", "share low", "share high"]
    table[percent] *= 100
    found = {"build µs": "build", "copy µs": "copy", "% of building all": "share"}
    columns = {head: [_or_dash(line, name) for _, line in table.iterrows()] for head, name in found.items()}
    return pd.DataFrame({"table": table["table"]} | columns)


def _or_dash(line: pd.Series, name: str) -> str:
    return figure(line, name) if line[name] == line[name] else "–"


def where(rows: pd.DataFrame) -> str:
    """Where the published saving goes, by its parts here."""
    table, build = derived.saving(rows), derived.rebuilding(rows).set_index("table")
    if table.empty or "all" not in build.index:
        return "ways 1, 2, 3 and 5 were not all measured at the published size."
    shares = table.assign(**{name: 100 * table[name] for name in ("share", "share low", "share high")})
    python, rest, copies, _ = (figure(line, "share", unit=" %") for _, line in shares.iterrows())
    return (
        f"rebuilding costs {figure(table.iloc[-1], 'us', unit=' µs')} a token here. {python} of that go when the same "
        f"tables are built vectorised, {rest} more when they are kept and only the position is set, and the last "
        f"{copies} are pageable copies and their waiting. The building alone, timed apart from these, without the GPU: "
        f"{figure(build.loc['all'], 'build', unit=' µs')} ({UNSURE})."
    )


def queued(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's µs for copies with an idle GPU and behind other work."""
    heads = {"built": "build µs", "idle": "GPU idle", "queued": f"{variants.QUEUED_US} µs queued"}
    return derived.queued(rows).drop(columns="runs").rename(columns=heads)


def waits(rows: pd.DataFrame) -> str:
    """Which copies wait for what is queued, or for what of it is left when the tables are built."""
    table = derived.queued(rows)
    if table.empty:
        return "copies were not timed behind other work."
    late = table["built"] >= variants.QUEUED_US
    wait = ~late & (table["low"] > variants.QUEUED_US / 10) & (table["built"] + table["low"] > variants.QUEUED_US / 2)
    not_so = ~late & ~wait & (table["high"] < variants.QUEUED_US / 2)
    groups = {"the host waits for other work on the stream in": wait, "not in": not_so}
    groups["unclear, since processes differ, in"] = ~(late | wait | not_so)
    groups["no answer from what is built for longer than that work takes:"] = late
    found = {words: ", ".join(map(_short, table["way"][some])) for words, some in groups.items()}
    said = [f"{words} {ways}" for words, ways in found.items() if ways]
    return "; ".join(said) + "."


# Sweeps


def over_records(rows: pd.DataFrame) -> Drawing:
    """µs a token against the number of records, by way."""
    table = _swept(rows, "records")
    if table.empty:
        return "the number of records was not swept."
    gpu = table.drop_duplicates("records").assign(us=lambda t: t["gpu us"], way="the step alone, GPU")
    most = table[table["records"] == table["records"].max()]
    said = ", ".join(f"{way} {us:.0f} µs" for way, us in zip(most["way"], most["us"], strict=True))
    said = f"At {table['records'].max():.0f} records: {said}"
    return drawing(
        plots.lines, pd.concat([table, gpu], ignore_index=True), "records", "us", "way", logx=True, logy=True,
        xlabel="records", ylabel="µs a token (log)",
        title=f"More records: {variants.H1024}, a token with the host at work",
        alt=f"Lines of µs a token against records, by way. {said}.",
        caption=f"{said}. Few records also leave most of the GPU without work, so that the step is slower.",
        table=table[["parts", "records", "way", "us", "gpu us", "idle us", "bytes", "copies"]], units=UNITS,
    )  # fmt: skip


def _swept(rows: pd.DataFrame, sweep: str) -> pd.DataFrame:
    return kit.where(derived.hidden(rows), sweep=[sweep, "whole"]).sort_values(["records", "start"], kind="stable")


def host_over_records(rows: pd.DataFrame) -> Drawing:
    """The host's µs a token against the number of records, by way."""
    ways, grown = [variants.REBUILT, *variants.SWEPT], derived.growth(rows)
    table = kit.where(derived.hosts(rows), model=variants.H1024, queued_us=0, way=ways)
    if grown.empty:
        return "the host's work was not timed with several numbers of records."
    few, many = grown["records"].min(), grown["most"].max()
    said = "; ".join(f"{line['way']} {interval(line)}, {GROWS[line['verdict']]}" for _, line in grown.iterrows())
    said = f"With {many:.0f} records over {few:.0f}, in the same process: {said}"
    return drawing(
        plots.lines, table, "records", "host", "way", low="low", high="high", logx=True, logy=True, xlabel="records",
        ylabel="µs of the host (log)", title=f"More records: the host's work for a token, {variants.H1024}",
        alt=f"Lines of the host's time against records, by way. {said}.",
        caption="Geometric means of the processes' medians with their 95 % interval, the GPU idle before each token. "
        f"{said}.",
        hidden=["model", "queued_us", "runs", "sure"], units=WHOLE_UNITS,
    )  # fmt: skip


def hiding(rows: pd.DataFrame) -> Drawing:
    """What each way takes beyond way 8, against the step's time on the GPU (contexts of several lengths)."""
    table = _swept(rows, "contexts")
    table = table[table["way"] != variants.IN_LAUNCH]
    if table["gpu us"].nunique() < 2:
        return "the time of the step was not swept."
    told = {kind: numbers(kit.where(table, hides=kind)["way"]) or "–" for kind in ("yes", "but its start", "no")}
    said = (
        f"A sample begins with an idle GPU, so the host's work for its first token is not hidden by anything. Within "
        f"1 % of way 8, at some of the contexts: ways {told['yes']}; no more beyond it than such a start explains: "
        f"{told['but its start']}; more: {told['no']}"
    )
    return drawing(
        plots.lines, table.assign(gpu=table["gpu us"].round(1)), "gpu", "beyond", "way", logx=True,
        xlabel="µs of the step on the GPU", ylabel="µs beyond way 8",
        title=f"Longer steps: when does the upload hide? {variants.H1024}",
        alt="Lines of µs a token beyond way 8 against the step's time, by way.",
        caption="The context makes the step longer, not the tables.", said=said,
        table=["start", "gpu us", "way", "tokens", "us", "beyond", "host us", "hides"],
        units=UNITS | {"host us": "host µs of one token"},
    )  # fmt: skip


ledger.watch(__name__)
