"""Figures and sentences of tokens with the host at work: what each way costs, by parts, records and contexts."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from labkit.bench import ledger
from labkit.bench import tables as kit
from labkit.report import plots
from labkit.report.figures import Drawing, drawing
from labkit.report.words import number
from labkit.studies.persistent_tables import tables as derived
from labkit.studies.persistent_tables import variants
from labkit.studies.persistent_tables.shown import SHOWN, named
from labkit.studies.persistent_tables.views import UNITS

BAR_HOST_US = 20  # of the host a token, that the position in the launch or on the GPU was to stay below
WHOLE_UNITS = UNITS | {"low": "all, low", "high": "all, high"}
UNSURE = f'"unclear" means an interval wider than {100 * derived.SURE:.0f} % either way'
DRAWN = (variants.VECTORISED, variants.PREBUILT, variants.PINNED, variants.PACKED, variants.IN_LAUNCH)  # of a sweep


def figure(
    line: Mapping[str, Any] | pd.Series, name: str, form: str = "{:.0f}", ends: str = "{} ", unit: str = ""
) -> str:
    """A figure of the host's with its interval: "2623 µs [985, 6990] (unclear)". name: of its column.

    ends: of the columns of its interval's ends, before "low" and "high". unit: what follows the number: " µs".
    """
    values = [line[name], *(line[ends.format(name) + end] for end in ("low", "high"))]
    ledger.note("figure", dict(zip(("mid", "low", "high"), values, strict=True)))
    mid, low, high = (number(value, form) for value in values)
    unclear = (values[2] - values[1]) / 2 > derived.SURE * abs(values[0])
    return f"{mid}{unit} [{low}, {high}]{' (unclear)' if unclear else ''}"


def host(rows: pd.DataFrame) -> Drawing:
    """The host's µs a token at the published size, by way and part."""
    table = kit.where(derived.hosts(rows), parts=variants.PUBLISHED_PARTS, queued_us=0, way=variants.WAYS)
    if table.empty:
        return "the host's work was not timed at the published size."
    tidy = named(table.melt("way", list(variants.PARTS), var_name="part", value_name="us"))
    most = table.loc[table["host"].idxmax()]
    return drawing(
        plots.bars, tidy, "way", "us", "part", logy=True, xlabel="way", ylabel="µs of the host (log)",
        title="Building in Python is most of the host's work",
        alt="Bars of the host's time by way, split into build, copy and launch.",
        caption=f"{variants.H1024}; means of the processes' medians, the GPU idle before each token; {UNSURE}.",
        said=f"Most: {SHOWN[most['way']]}, {figure(most, 'host', '{:.1f}', '', ' µs')}",
        table=named(table), hidden=["model", "parts", "queued_us", "runs", "sure"], units=WHOLE_UNITS,
    )  # fmt: skip


def bar_host(rows: pd.DataFrame) -> Mapping[str, str]:
    """The most that the position in the launch, or on the GPU, asks of the host in a case; is it below the bar?"""
    table = kit.where(derived.hosts(rows), way=[variants.IN_LAUNCH, variants.GRAPH], queued_us=0)
    found = {}
    for way, some in table.groupby("way") if len(table) else ():
        word = "not below" if (some["low"] >= BAR_HOST_US).any() else "unclear whether below"
        word = "below" if (some["high"] < BAR_HOST_US).all() else word
        most = figure(some.loc[some["host"].idxmax()], "host", "{:.1f}", "", " µs")
        found[SHOWN[way]] = f"{most}, {word} {BAR_HOST_US} µs"
    return found


def walls(rows: pd.DataFrame) -> Drawing:
    """µs a token by way, a series a model."""
    table = _main_walls(rows)
    if table.empty:
        return "no token was timed with the host at work."
    right = table[table["way"] != SHOWN[variants.ONE_POSITION]]
    some = right[right["case"] == right["case"].iloc[-1]]
    line = some.loc[some["us"].idxmin()]
    return drawing(
        plots.lines, table, "way", "us", "case", logy=True, joined=False, xlabel="way", ylabel="µs a token (log)",
        title="A token with the host at work", alt="Points of µs a token by way, one series a model.",
        caption="From an idle GPU, as many tokens a sample as the table says.",
        said=f"Fastest with right tokens, {line['case']}: {line['way']}, {line['us']:.0f} µs",
        table=named(derived.walls(rows)), units=UNITS,
    )  # fmt: skip


def _main_walls(rows: pd.DataFrame) -> pd.DataFrame:
    """The ways of every model, and those of the published size, in their order."""
    wanted = variants.MAIN | {"parts": [0, variants.PUBLISHED_PARTS], "way": variants.WAYS}
    table = kit.where(derived.walls(rows), **wanted)
    if table.empty:
        return table
    short_names = table["model"].str.removeprefix("AutoMegaKernel ")
    records = table["records"].map(", {:.0f} records".format)
    table = table.assign(case=short_names + records.where(table["parts"] > 0, ""))
    return named(table.sort_values("way", key=lambda ways: ways.map(variants.WAYS.index), kind="stable"))


def idle(rows: pd.DataFrame) -> Drawing:
    """Percent of a token in which no step runs on the GPU, by way and model."""
    table = _main_walls(rows).dropna(subset="% idle")
    if table.empty:
        return "no token was timed with the host at work beside the step alone."
    worst = table.loc[table["% idle"].idxmax()]
    return drawing(
        plots.heat, table.assign(**{"% idle": table["% idle"].round() + 0.0}), "case", "way", "% idle",
        xlabel="model", ylabel="way", unit="% of a token", fmt="{:.0f}",
        title="The GPU is idle while the host builds or copies tables",
        alt="Map of percent of a token without a step running, by way and model.",
        caption="Percent of a token in which no step runs: what it takes beyond the step alone. A little below zero is "
        "none, since the ways' kernels differ by a percent or two.",
        said=f"Most: {worst['way']}, {worst['case']}, {figure(worst, '% idle', ends='', unit=' %')}",
        table=table[["case", "way", "us", "gpu us", "idle us", "% idle", "low", "high"]],
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


def where(rows: pd.DataFrame) -> Mapping[str, str]:
    """Where the published saving goes, by its parts here."""
    table = derived.saving(rows)
    if table.empty:
        return {}
    shares = table.assign(**{name: 100 * table[name] for name in ("share", "share low", "share high")})
    asked = ("build with array operations, not Python objects", "keep the tables, set only the position", "do not copy")
    found = {"all together, a token": figure(table.iloc[-1], "us", unit=" µs")}
    return found | {
        what: figure(line, "share", unit=" %") for what, (_, line) in zip(asked, shares.iterrows(), strict=False)
    }


def queued(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's µs for copies with an idle GPU and behind other work."""
    heads = {"built": "build µs", "idle": "GPU idle", "queued": f"{variants.QUEUED_US} µs queued"}
    return named(derived.queued(rows).drop(columns="runs")).rename(columns=heads)


def waits(rows: pd.DataFrame) -> Mapping[str, str]:
    """Which copies wait for what is queued, or for what of it is left when the tables are built."""
    table = derived.queued(rows)
    late = table["built"] >= variants.QUEUED_US
    wait = ~late & (table["low"] > variants.QUEUED_US / 10) & (table["built"] + table["low"] > variants.QUEUED_US / 2)
    not_so = ~late & ~wait & (table["high"] < variants.QUEUED_US / 2)
    words = pd.Series("unclear: processes differ", index=table.index)
    words = words.mask(late, "not known: building takes longer").mask(wait, "waits").mask(not_so, "does not wait")
    return dict(zip(table["way"].map(SHOWN), words, strict=True))


# Sweeps


def over_records(rows: pd.DataFrame) -> Drawing:
    """µs a token against the number of records, by way."""
    table = _swept(rows, "records")
    if table.empty:
        return "the number of records was not swept."
    gpu = table.drop_duplicates("records").assign(us=lambda t: t["gpu us"], way="the step alone, GPU")
    most = table[table["records"] == table["records"].max()]
    slow, fast = (most.loc[choose(most["us"])] for choose in (pd.Series.idxmax, pd.Series.idxmin))
    return drawing(
        plots.lines, pd.concat([named(kit.where(table, way=DRAWN)), gpu], ignore_index=True), "records", "us", "way",
        logx=True, logy=True, xlabel="records", ylabel="µs a token (log)",
        title="Few records starve the step, many cost the host",
        alt="Lines of µs a token against records, by way.",
        caption=f"{variants.H1024}. Few records leave most of the GPU without work. The table has every way.",
        said=f"At {most['records'].iloc[0]:.0f} records: {SHOWN[slow['way']]} {slow['us']:.0f} µs, "
        f"{SHOWN[fast['way']]} {fast['us']:.0f} µs",
        table=named(table[["parts", "records", "way", "us", "gpu us", "idle us", "bytes", "copies"]]), units=UNITS,
    )  # fmt: skip


def _swept(rows: pd.DataFrame, sweep: str) -> pd.DataFrame:
    return kit.where(derived.hidden(rows), sweep=[sweep, "whole"]).sort_values(["records", "start"], kind="stable")


def host_over_records(rows: pd.DataFrame) -> Drawing:
    """The host's µs a token against the number of records, by way."""
    ways, grown = [variants.REBUILT, *variants.SWEPT], derived.growth(rows)
    table = kit.where(derived.hosts(rows), model=variants.H1024, queued_us=0, way=ways)
    if grown.empty:
        return "the host's work was not timed with several numbers of records."
    python = kit.where(grown, way=variants.REBUILT)
    said = "".join(f"{SHOWN[variants.REBUILT]}: {ratio:.1f}× the time with the most" for ratio in python["ratio"])
    return drawing(
        plots.lines, named(kit.where(table, way=[variants.REBUILT, *DRAWN])), "records", "host", "way",
        low="low", high="high", logx=True, logy=True, xlabel="records", ylabel="µs of the host (log)",
        title="Building in Python grows with the records",
        alt="Lines of the host's time against records, by way.",
        caption=f"{variants.H1024}; means of the processes' medians with their 95 % interval, the GPU idle before each "
        "token. Most records against fewest, in the same process.",
        said=said, table=named(table), hidden=["model", "queued_us", "runs", "sure"], units=WHOLE_UNITS,
    )  # fmt: skip


def growth(rows: pd.DataFrame) -> pd.DataFrame:
    """The host's time for a token with the most records over that with the fewest, by way: does it take longer?"""
    table = named(derived.growth(rows).drop(columns="runs"))
    table["verdict"] = table["verdict"].map({"faster": "yes", "slower": "no", "same": "no", "unclear": "unclear"})
    return table.rename(columns={"records": "fewest", "ratio": "times the time", "verdict": "longer"})


def hiding(rows: pd.DataFrame) -> Drawing:
    """What each way takes beyond the position in the launch, against the step's time on the GPU (several contexts)."""
    table = _swept(rows, "contexts")
    table = named(table[table["way"] != variants.IN_LAUNCH])
    if table["gpu us"].nunique() < 2:
        return "the time of the step was not swept."
    never = [way for way, some in table.groupby("way", sort=False) if (some["hides"] == "no").all()]
    return drawing(
        plots.lines, table.assign(gpu=table["gpu us"].round(1)), "gpu", "beyond", "way", logx=True,
        xlabel="µs of the step on the GPU", ylabel=UNITS["beyond"],
        title="A longer step does not hide blocking copies",
        alt="Lines of µs a token beyond the position in the launch against the step's time, by way.",
        caption=f"{variants.H1024}. The context makes the step longer, not the tables. A sample begins with an idle "
        'GPU, so nothing hides the host\'s work for its first token: "but its start" in the table beneath.',
        said=f"Never hidden: {', '.join(never) or 'none'}",
        table=["start", "gpu us", "way", "tokens", "us", "beyond", "host us", "hides"],
        units=UNITS | {"host us": "host µs of one token"},
    )  # fmt: skip


ledger.watch(__name__)
