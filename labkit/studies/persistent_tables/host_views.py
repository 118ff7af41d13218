"""Figures and sentences of tokens with the host at work: what each way costs, by parts, records and contexts."""

from itertools import pairwise

import pandas as pd

from labkit.bench import tables as kit
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.studies.persistent_tables import tables as derived
from labkit.studies.persistent_tables import variants
from labkit.studies.persistent_tables.views import UNITS, numbers

BAR_HOST_US = 20  # of the host a token, that way 8 or 9 was to stay below
SHORT = ("Python", "vectorised", "prebuilt", "pinned", "replayed", "one by one", "packed", "kernel", "launch", "graph")


def host(rows: pd.DataFrame) -> Drawing:
    """The host's µs a token at the published size, by way and part."""
    table = kit.where(derived.hosts(rows), parts=variants.PUBLISHED_PARTS, queued_us=0, way=variants.WAYS)
    if table.empty:
        return "the host's work was not timed at the published size."
    tidy = table.melt("way", list(variants.PARTS), var_name="part", value_name="us")
    worst, best = table.loc[table["host"].idxmax()], table.loc[table["host"].idxmin()]
    return drawing(
        plots.bars, tidy.assign(way=tidy["way"].map(_short)), "way", "us", "part", logy=True, xlabel="way",
        ylabel="µs of the host (log)", title=f"The host's work for a token, {variants.H1024}",
        alt="Bars of the host's time by way, split into build, copy and launch.",
        caption=f"Medians, {table['records'].max():.0f} records, the GPU idle before each token.",
        said=f"Most: {worst['way']}, {worst['host']:.0f} µs; least: {best['way']}, {best['host']:.1f} µs",
        table=table, hidden=["model", "parts", "queued_us", "runs"], units=UNITS,
    )  # fmt: skip


def _short(way: str) -> str:
    """ "1 Python": a way's number and one word."""
    return f"{way.split()[0]} {SHORT[variants.WAYS.index(way)]}"


def bar_host(rows: pd.DataFrame) -> str:
    """The bar of the host's work: ways 8 and 9 in every case."""
    table = kit.where(derived.hosts(rows), way=[variants.IN_LAUNCH, variants.GRAPH], queued_us=0)
    if table.empty:
        return "ways 8 and 9 were not timed."
    most = table.groupby("way")["host"].max()
    parts = [f"{way} at most {us:.1f} µs, {'' if us < BAR_HOST_US else 'not '}below" for way, us in most.items()]
    count = len(table[["model", "parts"]].drop_duplicates())
    return f"medians over {count} cases, one of them to stay below {BAR_HOST_US} µs: {'; '.join(parts)}."


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
        caption="What a token takes beyond way 9's step in a graph, over what it takes; the ways' kernels differ "
        "by a percent or two, so that a little below zero is none.",
        said=f"Most: {worst['way']}, {worst['case']}, {worst['% idle']:.0f} %",
        table=["case", "way", "us", "gpu us", "idle us", "% idle"], units=UNITS,
    )  # fmt: skip


def rebuilding(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's µs for each table alone, and for all."""
    return derived.rebuilding(rows).rename(columns=UNITS)


def where(rows: pd.DataFrame) -> str:
    """Where the published saving goes, by its parts here."""
    table = derived.rebuilding(rows).set_index("table")
    us = kit.where(derived.walls(rows), **variants.PUBLISHED).set_index("way")["us"]
    ways = [variants.REBUILT, variants.VECTORISED, variants.PREBUILT, variants.ONE_POSITION]
    if "all" not in table.index or not set(ways) <= set(us.index):
        return "ways 1, 2, 3 and 5 were not all measured at the published size."
    python, rest, copies = (us[slow] - us[fast] for slow, fast in pairwise(ways))
    return (
        f"rebuilding costs {python + rest + copies:.0f} µs a token here. {python:.0f} of them go when the same tables "
        f"are built vectorised, {rest:.0f} more when they are kept and only the position is set, and the last "
        f"{copies:.0f} are pageable copies and their waiting. The building alone, timed apart from these, without the "
        f"GPU: {table.loc['all', 'build']:.0f} µs."
    )


def queued(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's µs for copies with an idle GPU and behind other work."""
    heads = {"built": "build µs", "idle": "GPU idle", "queued": f"{variants.QUEUED_US} µs queued"}
    return derived.queued(rows).rename(columns=heads)


def waits(rows: pd.DataFrame) -> str:
    """Which copies wait for what is queued, or for what of it is left when the tables are built."""
    table = derived.queued(rows)
    if table.empty:
        return "copies were not timed behind other work."
    late = table["built"] >= variants.QUEUED_US
    rest = table["waited"] > variants.QUEUED_US / 10
    wait = ~late & rest & (table["built"] + table["waited"] > variants.QUEUED_US / 2)
    groups = {"the host waits for other work on the stream in the ways": wait, "not in": ~wait & ~late}
    found = {words: numbers(table["way"][some]) for words, some in groups.items()}
    said = [f"{words} {ways}" for words, ways in found.items() if ways]
    if late.any():
        said.append(f"way {numbers(table['way'][late])} cannot tell: building takes longer than that other work")
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
    ways = [variants.REBUILT, *variants.SWEPT]
    table = kit.where(derived.hosts(rows), model=variants.H1024, queued_us=0, way=ways)
    if table["records"].nunique() < 2:
        return "the host's work was not timed with several numbers of records."
    ends = table.sort_values("records").groupby("way", sort=False)["host"].agg(["first", "last"])
    said = "; ".join(f"{way} {line['first']:.0f} to {line['last']:.0f} µs" for way, line in ends.iterrows())
    return drawing(
        plots.lines, table, "records", "host", "way", low="low", high="high", logx=True, logy=True, xlabel="records",
        ylabel="µs of the host (log)", title=f"More records: the host's work for a token, {variants.H1024}",
        alt=f"Lines of the host's time against records, by way. {said}.",
        caption=f"Medians with quartiles, the GPU idle before each token. Fewest records to most: {said}.",
        hidden=["model", "queued_us", "runs"], units=UNITS,
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
