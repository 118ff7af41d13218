"""Programs over time, one line a multiprocessor: how much of its time was idle, and a picture that can be enlarged.

The picture is an SVG whose lines and marks are in shares of its size: a page makes it larger, and texts stay as large
as they are. What is drawn is rounded to `UNITS` of the time, which is less than a pixel until it is enlarged fourfold.
"""

import math
from collections.abc import Iterator
from urllib.parse import quote

import numpy as np
import pandas as pd
from markupsafe import Markup, escape
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from labkit import paths
from labkit.bench import ledger
from labkit.bench.records import write_atomic
from labkit.report import figures, plots
from labkit.report.figures import Html

UNITS = 4096  # of the whole time, to which bars are rounded
FILLED = 0.85  # of a multiprocessor's line, which bars take
ZOOMS = (1, 4, 16)
IDLE = "nothing"
HEADS = {"what": "grid or schedule", "share": "% of multiprocessor time", "bars": "pieces of work"}


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """How much of the multiprocessors' time was spent with what: columns what, stage, bars, share (%).

    rows: of a file of timelines. A multiprocessor works as long as one of its programs has begun and waits for no
    other. The whole is all of them from the first moment to the last. Stages may share one; `IDLE`: it works at none.
    """
    lines = []
    for what, bars in rows.groupby("what", sort=False):
        whole = bars["sms"].iloc[0] * (bars["end_ns"].max() - bars["begin_ns"].min())
        for stage, some in bars.groupby("stage", sort=False):
            lines.append((what, stage, len(some), 100 * _covered(some) / whole))
        lines.append((what, IDLE, 0, 100 * (1 - _covered(bars) / whole)))
    return pd.DataFrame(lines, columns=["what", "stage", "bars", "share"])


def _covered(bars: pd.DataFrame) -> int:
    """Time with at least one bar, ns, all multiprocessors together."""
    ordered = bars.sort_values(["sm", "released_ns"])
    before = ordered.groupby("sm")["end_ns"].cummax().groupby(ordered["sm"]).shift(fill_value=0)
    first = np.maximum(ordered["released_ns"], before)
    return int((ordered["end_ns"] - first).clip(lower=0).sum())


def facts(rows: pd.DataFrame) -> pd.DataFrame:
    """How long each took and what its clocks cost: columns what, us, clocked (times as long with clocks), tick (ns)."""
    lines = []
    for what, bars in rows.groupby("what", sort=False):
        one, times = bars.iloc[0], bars[["begin_ns", "released_ns", "end_ns"]].to_numpy()
        us = (bars["end_ns"].max() - bars["begin_ns"].min()) / 1e3
        lines.append((what, us, one["clocked_ns"] / one["plain_ns"], int(np.gcd.reduce(times, axis=None))))
    return pd.DataFrame(lines, columns=["what", "us", "clocked", "tick"])


def said(rows: pd.DataFrame) -> str:
    """What the timelines of one GPU come to: how much was idle, and what took the most."""
    table, texts = shares(rows), []
    for what, some in table.groupby("what", sort=False):
        idle = some[some["stage"] == IDLE]["share"].iloc[0]
        most = some[some["stage"] != IDLE].sort_values("share").iloc[-1]
        name = f"{what[:1].upper()}{what[1:]}: " if table["what"].nunique() > 1 else ""
        texts.append(
            f"{name}{idle:.0f} % of the multiprocessors' time nothing was at work; {most['stage']} took the most, "
            f"{most['share']:.0f} %."
        )
    return " ".join(texts)


def cost(rows: pd.DataFrame) -> str:
    """What the clocks cost, and how fine they are."""
    table = facts(rows)
    each = ", ".join(f"{line['what']} {line['us']:.0f} µs" for _, line in table.iterrows())
    return (
        f"From the first moment to the last: {each}. With clocks a replay took at most {table['clocked'].max():.2f} "
        f"times as long; the clock ticks every {table['tick'].min()} ns."
    )


# The picture


def shown(rows: pd.DataFrame, name: str, folder: str, caption: Html, alt: str) -> Html:
    """The picture with its controls, a caption and a table; written as SVG and PNG below REPORTS/figures/folder.

    name: its id and file name. caption: behind the key of colours.
    """
    data, file = svg(rows, alt), paths.REPORTS / "figures" / folder / f"{name}{paths.SUFFIX}.svg"
    write_atomic(file, data)
    write_atomic(file.with_suffix(".png"), plots.png(_figure(rows)))
    zoom = Markup(" ").join(
        Markup('<label><input type="radio" name="{}" value="{}"{}> {}×</label>').format(
            f"zoom-{name}", times, Markup(" checked") if times == 1 else "", times
        )
        for times in ZOOMS
    )
    source = "data:image/svg+xml," + quote(data.decode(), safe=" =:/'<>,;()!*$&@?+{}")
    html = Markup(
        '<figure class="lab" id="{name}"><div class="lab-zoom"><p>{key} &nbsp; Zoom: {zoom}</p>'
        '<div role="region" tabindex="0" aria-label="{alt}"><img alt="{alt}" src="{source}"></div></div>'
        "<figcaption>{caption}</figcaption><details><summary>Table</summary>{table}</details></figure>"
    ).format(
        name=name, key=_key(rows), zoom=zoom, alt=alt, source=Markup(source), caption=caption,
        table=figures.table(shares(rows).rename(columns=HEADS), formats={HEADS["share"]: "{:.1f}"}),
    )  # fmt: skip
    return Html(str(html), f"{caption}\n[{alt}]")


def _stages(rows: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(rows["stage"]))


def _key(rows: pd.DataFrame) -> Markup:
    """What each colour is."""
    form = '<span><i style="background:light-dark({},{})"></i> {}</span>'
    pairs = zip(plots.SERIES, _stages(rows), strict=False)
    return Markup(" ").join(Markup(form).format(colour, plots.DARK[colour], stage) for colour, stage in pairs)


def placed(rows: pd.DataFrame) -> pd.DataFrame:
    """Bars where they are drawn: columns what, stage, y, height, x, width.

    A multiprocessor is one high; of that a bar takes the part of `FILLED` that its stage leaves it, which has as many
    lines as it ever ran programs at once on one multiprocessor. x and width are in `UNITS` of the longest time.
    """
    step = max(1, math.ceil((rows["end_ns"].max() - rows["begin_ns"].min()) / UNITS))
    parts = []
    for _, bars in rows.groupby(["what", "stage"], sort=False):
        bars = bars.sort_values(["sm", "released_ns", "end_ns"])
        lane = np.array([lane for _, some in bars.groupby("sm") for lane in _lanes(some)])
        height = FILLED / (lane.max() + 1)
        parts.append(bars.assign(height=height, y=bars["sm"] + (lane + 0.5) * height))
    found = pd.concat(parts, ignore_index=True)
    found["x"] = found["released_ns"] // step
    found["width"] = (found["end_ns"] // step - found["x"]).clip(lower=1)
    found["width"] -= found["width"] > 4  # a gap to the next one
    return found[["what", "stage", "y", "height", "x", "width"]].drop_duplicates()


def _lanes(bars: pd.DataFrame) -> Iterator[int]:
    """The first lane of a multiprocessor that is free when each bar begins."""
    ends: list[int] = []
    for begin, end in zip(bars["released_ns"], bars["end_ns"], strict=True):
        lane = next((i for i, last in enumerate(ends) if last <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        yield lane


def svg(rows: pd.DataFrame, alt: str) -> bytes:
    """The picture: a panel for each of what was looked at, one above the other, on one axis of time."""
    bars, stages = placed(rows), _stages(rows)
    us = (rows["end_ns"].max() - rows["begin_ns"].min()) / 1e3
    units = max(int((bars["x"] + bars["width"]).max()), 1)
    rules = "".join(f".s{i}{{stroke:{plots.SERIES[i]}}}" for i in range(len(stages)))
    dark = "".join(f".s{i}{{stroke:{plots.DARK[plots.SERIES[i]]}}}" for i in range(len(stages)))
    style = (
        f"text{{font:12px {plots.FONTS};fill:{plots.SOFT}}}path{{fill:none}}.g{{stroke:{plots.GRID}}}{rules}"
        ".f{display:none}@media(min-width:2000px){.f{display:inline}}"
        "@media(max-width:2000px){path{stroke-width:1px}}"  # finer lines would be pale
        f"@media(prefers-color-scheme:dark){{text{{fill:{plots.DARK[plots.SOFT]}}}"
        f".g{{stroke:{plots.DARK[plots.GRID]}}}{dark}}}"
    )
    panels = list(bars.groupby("what", sort=False))
    height = 100 / len(panels)
    drawn = "".join(_panel(what, some, stages, units, i * height, height) for i, (what, some) in enumerate(panels))
    marks = "".join(_marks(us))
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='100%' height='100%' role='img'><title>{escape(alt)}</title>"
    return f"{head}<style>{style}</style>{marks}{drawn}</svg>".replace('"', "'").encode()


def _panel(what: str, bars: pd.DataFrame, stages: list[str], units: int, top: float, height: float) -> str:
    """Bars of one panel; a ninth of it is left above them for its name, and below for the axis."""
    lines = math.ceil(bars["y"].max())
    above = lines // 7 + 1
    found = f"<text x='4' y='{top:g}%' dy='14'>{escape(what)}</text>"
    found += f"<svg y='{top:g}%' width='100%' height='{height:g}%' preserveAspectRatio='none' "
    found += f"viewBox='0 {-above} {units} {lines + 2 * above}'>"
    for i, stage in enumerate(stages):
        mine = bars[bars["stage"] == stage]
        found += f"<path class='s{i}' stroke-width='{mine['height'].max():.3g}' d='{_path(mine)}'/>"
    return f"{found}</svg>"


def _path(bars: pd.DataFrame) -> str:
    """One path for all bars of a colour, line by line, each from the end of the one before."""
    parts = []
    for y, some in bars.sort_values(["y", "x"]).groupby("y"):
        at = None
        for x, width in zip(some["x"], some["width"], strict=True):
            parts.append(f"M{x} {y:.5g}h{width}" if at is None else f"m{x - at} 0h{width}")
            at = x + width
    return "".join(parts)


def _marks(us: float) -> Iterator[str]:
    """The axis of time in µs; finer marks show where the picture is enlarged."""
    step = next(one for one in (10.0**n * m for n in range(-2, 6) for m in (1, 2, 5)) if us / one <= 10)
    for i in range(int(us / step * 5) + 1):
        at, kind = i * step / 5, "" if i % 5 == 0 else " class='f'"
        x = f"{100 * at / us:.2f}%"
        yield f"<g{kind}><line class='g' x1='{x}' x2='{x}' y2='100%'/>"
        text = f"{at:g}{' µs' * (i == 0)}" if at < 0.96 * us else ""  # else it would be cut off
        yield f"<text x='{x}' dx='3' y='100%' dy='-3'>{text}</text></g>"


@plots.style()
def _figure(rows: pd.DataFrame) -> Figure:
    """The same for a reader whose program shows no SVG."""
    bars, stages = placed(rows), _stages(rows)
    panels = list(bars.groupby("what", sort=False))
    us = (rows["end_ns"].max() - rows["begin_ns"].min()) / 1e3 / (bars["x"] + bars["width"]).max()
    fig = Figure(figsize=(plots.WIDTH, 1 + 2.6 * len(panels)), layout="constrained")
    for ax, (what, some) in zip(fig.subplots(len(panels), sharex=True, squeeze=False)[:, 0], panels, strict=True):
        for colour, stage in zip(plots.SERIES, stages, strict=False):
            of = some[some["stage"] == stage]
            ends = np.stack([of["x"] * us, of["y"], (of["x"] + of["width"]) * us, of["y"]], 1)
            ax.add_collection(LineCollection(ends.reshape(-1, 2, 2), colors=colour, linewidths=0.6))
        ax.autoscale()
        ax.invert_yaxis()
        ax.set(title=what, yticks=[], xlabel="µs", ylabel="multiprocessors")
    colours = zip(plots.SERIES, stages, strict=False)
    fig.legend(handles=[Line2D([], [], color=c, label=s) for c, s in colours], loc="outside lower left", ncols=5)
    fig.draw_without_rendering()
    return fig


ledger.watch(__name__)
