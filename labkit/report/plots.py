"""Plots of the notebooks: matplotlib as SVG that reads in light and in dark.

They take tidy DataFrames (one row a point) and return a matplotlib `Figure`; no global setting of matplotlib changes.
Colours are drawn as in light mode; a style sheet inside the SVG replaces each by its dark twin where the reader prefers
dark, also when the SVG is an `<img>`.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from markupsafe import escape
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from labkit.report import colours
from labkit.report.compact import compact

INK, SOFT, GRID, PAPER = "#1d232b", "#57606b", "#e2e6ea", "#fffffe"
SERIES = (  # the first five stay apart in every kind of colour blindness; beyond, marker and dash tell as well
    "#1766b3", "#d4540f", "#00573f", "#d1469a", "#3b2a8f", "#6e5900", "#2696b4", "#8c1515", "#757d86", "#5c3a1e",
)  # fmt: skip
DARK = {
    INK: "#e6e9ee", SOFT: "#a8b1bc", GRID: "#2c333c", PAPER: "#14181d",
    "#1766b3": "#62b0ff", "#d4540f": "#f78a2f", "#00573f": "#8ff0c4", "#d1469a": "#ea5fb0", "#3b2a8f": "#8d72f5",
    "#6e5900": "#f2dc6b", "#2696b4": "#3fb6cf", "#8c1515": "#ff8f86", "#757d86": "#a3abb5", "#5c3a1e": "#c79468",
}  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 3)))
HATCHES = (None,) * 5 + ("////", "....", "xxxx", "\\\\\\\\", "++++")
FONTS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,'Liberation Sans',sans-serif"

WIDTH, HEIGHT = 7.5, 4.2  # inches
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 10.5, "axes.titlesize": 10.5, "axes.labelsize": 10.5,
    "figure.titlesize": 12.5,    "xtick.labelsize": 10, "ytick.labelsize": 10, "legend.fontsize": 10,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "figure.titleweight": "bold",
    "figure.facecolor": PAPER, "axes.facecolor": PAPER, "savefig.facecolor": PAPER,
    "text.color": INK, "axes.titlecolor": INK, "axes.labelcolor": SOFT, "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT, "xtick.color": GRID, "ytick.color": GRID, "axes.edgecolor": GRID, "grid.color": GRID,
    "axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.7, "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0,
    "xtick.major.pad": 5, "lines.linewidth": 1.8, "lines.markersize": 5.5, "legend.frameon": False,
    "axes.formatter.useoffset": False, "hatch.linewidth": 0.8, "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08, "svg.fonttype": "none", "svg.hashsalt": "labkit",
}  # fmt: skip

SIDES = {"faster": 0, "slower": 1, "same": 8, "unclear": 5}  # place of each in SERIES and MARKERS
ONE_SIDED = LinearSegmentedColormap.from_list("lab", ["#dfeaf5", "#8ab7df", "#2f78b8", "#0a3d73"])
TWO_SIDED = LinearSegmentedColormap.from_list("lab2", ["#0a4a86", "#6ba6d6", "#ececec", "#e59a5c", "#8f3b00"])

MANY = 16  # more rows of ratios than these stand closer together

Reference = Sequence[tuple[float, str]]


def style() -> AbstractContextManager[None]:
    """The lab's matplotlib style, for drawing of one's own: `with style(): ...`, or as a decorator."""
    return mpl.rc_context(STYLE)


@style()
def lines(
    df: pd.DataFrame,
    x: str,
    y: str,
    series: str,
    *,
    panel: str | None = None,
    rows: str | None = None,
    low: str | None = None,
    high: str | None = None,
    xlabel: str,
    ylabel: str,
    title: str,
    logx: bool = False,
    logy: bool = False,
    joined: bool = True,
    reference: Reference | Mapping[Any, Reference] | None = None,
) -> Figure:
    """Lines of `y` against `x`, one a `series`, with interval bars from `low` to `high` where given.

    panel:     column that splits the figure into side-by-side axes with the same y.
    rows:      column that splits it further, into one row of axes each, with the same axes.
    joined:    False: marks alone, where neighbours on x have nothing to do with each other.
    reference: horizontal lines, each (y, label); or, with `rows` or `panel`, those of each of its values.
    Columns x (numbers or names), y, low and high (numbers, unit in the label). ValueError without rows or a column.
    """
    df = _rows(df, y, x, series, panel, rows, low, high)
    names = _levels(df[series])
    fig, cells = _grid(df, panel, title, rows=rows)
    place, marks, labels = _places(df[x], logx, cells[0][0].get_subplotspec().get_gridspec().ncols)
    looks = [look | ({} if joined else {"linestyle": "none", "markersize": 7}) for look in _looks(names)]
    for ax, part in cells:
        for index, name in enumerate(names):
            line = part[part[series] == name]
            line = line.assign(_at=line[x].map(place)).sort_values("_at")
            bars = _bars(line, y, low, high)
            over = 2 + 0.1 * (looks[index]["linestyle"] != "-")  # a solid line does not cover a dashed one
            ax.errorbar(line["_at"], line[y], yerr=bars, capsize=2.5, elinewidth=1.1, zorder=over, **looks[index])
        if logx:
            ax.set_xscale("log", base=2)
        _ticks(ax, marks, labels, 52 if reference else 66)
    _values(cells, ylabel, logy, _references(cells, reference, rows or panel))
    _xlabel(cells, xlabel)
    _legend(fig, [Line2D([], [], label=str(name), **look) for name, look in zip(names, looks, strict=True)])
    return fig


@style()
def bars(
    df: pd.DataFrame,
    x: str,
    y: str,
    series: str,
    *,
    panel: str | None = None,
    rows: str | None = None,
    low: str | None = None,
    high: str | None = None,
    xlabel: str,
    ylabel: str,
    title: str,
    logy: bool = False,
    fmt: str = "",
    reference: Reference | Mapping[Any, Reference] | None = None,
) -> Figure:
    """Bars of `y`, grouped by `x`, one a `series`; the arguments are those of `lines`.

    fmt: of the value that stands on each bar; none if empty.
    """
    df = _rows(df, y, x, series, panel, rows, low, high)
    groups, names = _levels(df[x]), _levels(df[series])
    fig, cells = _grid(df, panel, title, rows=rows)
    width, fills = 0.8 / len(names), _fills(names)
    for ax, part in cells:
        for index, name in enumerate(names):
            bar = part[part[series] == name]
            at = bar[x].map(groups.index).astype(float) + (index - (len(names) - 1) / 2) * width
            drawn = ax.bar(at, bar[y], width * 0.92, **fills[index])
            if len(names) == 1:
                _mark_others(drawn, bar[x])
            if fmt:
                box = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}  # over a line of reference
                texts = [fmt.format(value) for value in bar[y]]
                ax.bar_label(drawn, texts, padding=2.5, fontsize=9, color=INK, bbox=box)
            if low and high:
                thin = {"fmt": "none", "ecolor": INK, "elinewidth": 1.1, "capsize": 2.5, "clip_on": False}
                ax.errorbar(at, bar[y], _bars(bar, y, low, high), **thin)
        ax.grid(axis="x", visible=False)
        _ticks(ax, range(len(groups)), groups, 52 if reference else 66)
        ax.set_xlim(-0.6, len(groups) - 0.4)
    _values(cells, ylabel, logy, _references(cells, reference, rows or panel))
    _xlabel(cells, xlabel)
    _legend(fig, [Patch(label=str(name), **fill) for name, fill in zip(names, fills, strict=True)])
    return fig


@style()
def ratios(
    df: pd.DataFrame,
    label: str,
    mid: str,
    low: str,
    high: str,
    *,
    group: str | None = None,
    panel: str | None = None,
    hue: str | None = None,
    verdict: str | None = None,
    xlabel: str,
    title: str,
    band: float = 0.01,
) -> Figure:
    """Ratios with their intervals, one a row, against 1 and the band of ±`band` that counts as the same.

    group:   column that gathers rows under a heading.
    panel:   column that splits the figure into side-by-side axes with the same rows.
    hue:     column whose values stand in one row, each in its colour; a hollow mark is then *same* or *unclear*.
    verdict: column of faster, slower, same and unclear, which sets colour and marker; without it they say where the
             interval lies (knowing nothing of the A/A noise).
    """
    df = _rows(df, mid, label, group, panel, hue, low, high, verdict)
    ends = zip(df[low], df[high], strict=True)
    df = df.assign(_kind=df[verdict] if verdict else [_side(*pair, band) for pair in ends])
    if odd := sorted(set(df["_kind"]) - set(SIDES)):
        raise ValueError(f"ratios: verdict {odd[0]!r}; allowed: {', '.join(SIDES)}")
    rows, hues = _outline(df, label, group), _levels(df[hue]) if hue else [None]
    heads = sum(item is None for _, item in rows)
    names = [_wrap(b if b is not None else a, 40) for a, b in rows]
    head, each = (0.29, 0.16 + 0.13 * len(hues)) if len(rows) <= MANY else (0.18, 0.02 + 0.16 * len(hues))
    each = max(each, 0.18 * (1 + max(name.count("\n") for name in names)))
    fig, cells = _grid(df, panel, title, height=1.5 + head * heads + each * (len(rows) - heads))
    looks = _looks_of(hues, hue)
    for ax, part in cells:
        ax.axvspan(1 - band, 1 + band, color=GRID, lw=0)
        ax.axvline(1, color=SOFT, lw=1)
        for _, row in part.iterrows():
            place = hues.index(row[hue]) if hue else 0
            at = rows.index((row[group] if group else None, row[label])) + (place + 0.5) / len(hues) * 0.8 - 0.4
            error = [[max(0.0, row[mid] - row[low])], [max(0.0, row[high] - row[mid])]]
            look = looks[row[hue] if hue else None, row["_kind"]]
            ax.errorbar(row[mid], at, xerr=error, capsize=3 if hue is None else 2, elinewidth=1.6, **look)
            if panel is None:
                text = f"{row[mid]:.3f}  [{row[low]:.3f}, {row[high]:.3f}]"
                size = {"fontsize": 9.5 if hue is None else 9, "color": look["color"] if hue else INK}
                ax.text(1.02, at, text, transform=ax.get_yaxis_transform(), va="center", **size)
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.08)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.set_yticks(range(len(rows)), names)
        for tick, (_, name) in zip(ax.get_yticklabels(), rows, strict=False):  # only the first axes has labels
            tick.set(color=INK, weight="bold" if name is None else "normal")
    _xlabel(cells, xlabel, 54)
    limits = [end for ax, _ in cells for end in ax.get_xlim()]
    for ax, _ in cells:
        ax.set_xlim(min(limits), max(limits))
    _legend(fig, _keys(df, looks, hues, hue, band if verdict is None else None), alone=True)
    return fig


def _looks_of(hues: Sequence[Any], hue: str | None) -> dict[tuple[Any, str], dict[str, Any]]:
    """(hue, verdict) -> how a mark looks: coloured by the verdict, or by hue and then hollow where it is none."""
    plain = {"linestyle": "none", "markersize": 6.5}
    if hue is None:
        return {(None, kind): _look(index) | plain for kind, index in SIDES.items()}
    found = {}
    for index, name in enumerate(hues):
        solid = _look(index) | plain
        hollow = solid | {"markerfacecolor": PAPER, "markeredgecolor": solid["color"], "markeredgewidth": 1.5}
        found |= {(name, kind): solid if kind in ("faster", "slower") else hollow for kind in SIDES}
    return found


def _keys(df: pd.DataFrame, looks: Mapping, hues: Sequence[Any], hue: str | None, band: float | None) -> list[Line2D]:
    """The legend of `ratios`. band: of kinds that were told from intervals alone."""
    if hue:
        keys = [Line2D([], [], label=str(name), **looks[name, "faster"]) for name in hues]
        if set(df["_kind"]) & {"same", "unclear"}:
            hollow = looks[hues[0], "same"] | {"color": SOFT, "markeredgecolor": SOFT, "marker": "o"}
            keys.append(Line2D([], [], label="hollow: same or unclear", **hollow))
        return keys
    words = {} if band is None else {"faster": "above 1", "slower": "below 1", "same": f"within ±{band * 100:g} % of 1"}
    kinds = [kind for kind in SIDES if kind in set(df["_kind"])]
    return [Line2D([], [], label=words.get(kind, kind), **looks[None, kind]) for kind in kinds]


@style()
def heat(
    df: pd.DataFrame,
    x: str,
    y: str,
    value: str,
    *,
    panel: str | None = None,
    rows: str | None = None,
    xlabel: str,
    ylabel: str,
    title: str,
    unit: str = "",
    fmt: str = "{:.3g}",
    center: float | None = None,
) -> Figure:
    """A map of `value` over `x` and `y` (in order of appearance), each cell annotated by `fmt`.

    panel:  column that splits the figure into maps side by side, with the same axes and colours; rows: further.
    unit:   label of the colour bar.
    center: value of the neutral colour, for quantities that have two sides (a ratio: 1).
    ValueError if a cell has two values.
    """
    df = _rows(df, value, x, y, panel, rows)
    if df.duplicated([x, y, *filter(None, (panel, rows))]).any():
        raise ValueError(f"heat: more than one {value} for one pair of {x} and {y}")
    columns, lines = _levels(df[x]), _levels(df[y])
    norm = Normalize(df[value].min(), df[value].max())
    if center is not None:  # equal distances from it get equally strong colours
        reach = (df[value] - center).abs().max() or 1.0
        norm = TwoSlopeNorm(center, center - reach, center + reach)
    fig, cells = _grid(df, panel, title, (1.7 if panel is None else 1.2) + 0.42 * len(lines), rows)
    for ax, part in cells:
        grid = np.full((len(lines), len(columns)), np.nan)
        grid[part[y].map(lines.index), part[x].map(columns.index)] = part[value]
        mesh = _map(ax, grid, norm, fmt, 9.5 if panel is None else 9)
        _ticks(ax, np.arange(len(columns)) + 0.5, columns)
    axes = [ax for ax, _ in cells]
    axes[0].invert_yaxis()  # of all, since they share it
    axes[0].set_yticks(np.arange(len(lines)) + 0.5, [_wrap(_plain(row), 30 if panel is None else 40) for row in lines])
    _xlabel(cells, xlabel, 48)
    _ylabel(cells, ylabel)
    bar = fig.colorbar(mesh, ax=axes, pad=0.02, aspect=max(24, 6 * fig.get_figheight()))  # no wider beside a tall map
    bar.outline.set_visible(False)
    bar.solids.set_edgecolor("face")  # or hairlines show between the steps
    bar.set_label(unit, color=SOFT)
    return fig


def _map(ax: Axes, grid: np.ndarray, norm: Normalize, fmt: str, size: float) -> Any:
    """The cells of one map, each with its value, or with a dash."""
    colours = TWO_SIDED if isinstance(norm, TwoSlopeNorm) else ONE_SIDED
    mesh = ax.pcolormesh(grid, cmap=colours, norm=norm, edgecolors=PAPER, linewidth=1.5)
    for (row, column), cell in np.ndenumerate(grid):
        text = "—" if math.isnan(cell) else fmt.format(cell)
        ink = SOFT if math.isnan(cell) else _ink_on(mesh.cmap(mesh.norm(cell)))
        ax.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=size)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    return mesh


# Of a whole figure


def add_to_title(fig: Figure, text: str) -> None:
    """Add a second line to the figure's title: the machine, say."""
    for title in fig.texts:
        if title.get_text() == fig.get_suptitle():
            title.set_text(f"{title.get_text()}\n{text}")
            fig.set_figheight(fig.get_figheight() + 0.22)
            return


def svg(fig: Figure, alt: str) -> bytes:
    """The figure as an SVG file for light and dark, the same bytes for the same figure, with `alt` as its title."""
    buffer = io.StringIO()
    with style():
        fig.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text, styles = compact(text[text.index("<svg") :])
    light = "".join(f".{name}{{{style}}}" for name, style in styles.items())
    rules = "".join(
        f".{name}{{{what}:{DARK[colour]}}}"
        for name, style in styles.items()
        for what, colour in re.findall(r"\b(fill|stroke): (#\w+)", style)
        if colour in DARK
    )
    head = f"<title>{escape(alt)}</title><style>text{{font-family:{FONTS}!important}}{light}"
    head += f"@media (prefers-color-scheme:dark){{{rules}}}</style>"
    opening, rest = text.split(">", 1)
    return f'{opening} role="img">{head}{rest}'.encode()


def png(fig: Figure) -> bytes:
    """The figure, laid out by `svg`, as a PNG file for light, two pixels a CSS pixel of a page."""
    buffer = io.BytesIO()
    fig.set_layout_engine("none")  # it took longer than drawing
    with style():
        fig.savefig(buffer, format="png", dpi=144, metadata={"Software": None})
    return buffer.getvalue()


# Inside the plots


def _rows(df: pd.DataFrame, value: str, *columns: str | None) -> pd.DataFrame:
    """The rows that have a value; ValueError naming a missing column, or if none is left."""
    for name in (value, *columns):
        if name is not None and name not in df.columns:
            raise ValueError(f"no column {name!r} to draw; there are: {', '.join(map(str, df.columns))}")
    df = df[df[value].notna()]
    if df.empty:
        raise ValueError(f"no rows with a {value} to draw")
    return df


def _levels(column: pd.Series) -> list[Any]:
    """Distinct values: numbers in their order, names in order of appearance."""
    values = list(dict.fromkeys(column))
    return sorted(values) if pd.api.types.is_numeric_dtype(column) else values


def _grid(
    df: pd.DataFrame, panel: str | None, title: str, height: float = HEIGHT, rows: str | None = None
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """Axes with the same y, one a value of `panel`; with `rows`, a row of them for each of its values."""
    if rows and panel:
        return _matrix(df, panel, rows, title, height)
    parts = [(name, df[df[panel] == name]) for name in _levels(df[panel])] if panel else [("", df)]
    columns = len(parts) if len(parts) <= 3 else math.ceil(len(parts) / math.ceil(len(parts) / 3))
    lines = math.ceil(len(parts) / columns)
    heads = [_wrap(name, 54 // columns) for name, _ in parts]
    height += 0.2 * max(head.count("\n") for head in heads)
    fig = Figure(figsize=(WIDTH, height if lines == 1 else height * 0.75 * lines), layout="constrained")
    _title(fig, title)
    axes = list(fig.subplots(lines, columns, sharey=True, squeeze=False).flat)
    for ax in axes[len(parts) :]:
        ax.remove()
    for ax, head in zip(axes, heads, strict=False):
        ax.set_title(head)
    return fig, [(ax, part) for ax, (_, part) in zip(axes, parts, strict=False)]


def _matrix(
    df: pd.DataFrame, panel: str, rows: str, title: str, height: float
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """Axes by panel and row, all with the same x and y. More than three panels stand beneath each other."""
    across, down = (panel, rows) if df[panel].nunique() <= 3 else (rows, panel)
    columns, lines = _levels(df[across]), _levels(df[down])
    heads = [[_wrap(f"{row} · {column}", 54 // len(columns)) for column in columns] for row in lines]
    height = 0.8 + (height - 1.4) * (0.85 if len(lines) <= 2 else 0.7) * len(lines)
    height += 0.2 * sum(max(head.count("\n") for head in line) for line in heads)
    fig = Figure(figsize=(WIDTH, height), layout="constrained")
    _title(fig, title)
    axes = fig.subplots(len(lines), len(columns), sharex=True, sharey=True, squeeze=False)
    cells = []
    for line, row in enumerate(lines):
        for place, column in enumerate(columns):
            axes[line, place].set_title(heads[line][place])
            cells.append((axes[line, place], df[(df[down] == row) & (df[across] == column)]))
    return fig, cells


def _title(fig: Figure, title: str) -> None:
    text = fig.suptitle(_wrap(title, 64), x=0.012, ha="left").get_text()
    fig.set_figheight(fig.get_figheight() + 0.22 * text.count("\n"))


def _mark_others(drawn: Iterable[Patch], names: Iterable[Any]) -> None:
    """Bars of libraries and controls in their colours, where the others are in that of the one series."""
    for patch, name in zip(drawn, names, strict=True):
        place = colours.place(name, colours.CONTROLS | colours.LIBRARIES)
        if place is not None:
            patch.set(**_fill(place))


def _looks(names: Sequence[Any]) -> list[dict[str, Any]]:
    """How the line or mark of each name looks: in its colour on all pages, with a marker and dash of its own."""
    return [_look(*place) for place in colours.places(names, len(SERIES))]


def _look(place: int, repeat: int = 0) -> dict[str, Any]:
    """repeat: how many of the figure have this colour already."""
    marker, dash = MARKERS[(place + 3 * repeat) % len(MARKERS)], DASHES[(place + 2 * repeat) % len(DASHES)]
    look = {"color": SERIES[place], "marker": marker, "linestyle": dash}
    return look | {"markeredgecolor": PAPER, "markeredgewidth": 0.7}


def _fills(names: Sequence[Any]) -> list[dict[str, Any]]:
    """The same for bars, with a hatch."""
    return [_fill(*place) for place in colours.places(names, len(SERIES))]


def _fill(place: int, repeat: int = 0) -> dict[str, Any]:
    hatched = [hatch for hatch in HATCHES if hatch not in (None, HATCHES[place])]
    hatch = hatched[(repeat - 1) % len(hatched)] if repeat else HATCHES[place]
    return {"facecolor": SERIES[place], "edgecolor": PAPER, "hatch": hatch, "linewidth": 0.5}


def _bars(df: pd.DataFrame, mid: str, low: str | None, high: str | None) -> np.ndarray | None:
    if low is None or high is None:
        return None
    return np.array([df[mid] - df[low], df[high] - df[mid]]).clip(min=0)


def _xlabel(cells: list[tuple[Axes, pd.DataFrame]], xlabel: str, width: int = 76) -> None:
    places = [ax.get_subplotspec() for ax, _ in cells]
    lowest = {place.colspan.start: place.rowspan.start for place in places}  # the last row may be shorter
    for (ax, _), place in zip(cells, places, strict=True):
        if lowest[place.colspan.start] == place.rowspan.start:
            ax.set_xlabel(_wrap(xlabel, width // place.get_gridspec().ncols))


def _ylabel(cells: list[tuple[Axes, pd.DataFrame]], ylabel: str) -> None:
    for ax, _ in cells:
        place = ax.get_subplotspec()
        if place.is_first_col():
            room = 32 if place.get_gridspec().nrows == 1 else 24
            ax.set_ylabel(ylabel if len(ylabel) <= room else _wrap(ylabel, len(ylabel) // 2 + 3))  # as long as its axes


def _references(cells: list[tuple[Axes, pd.DataFrame]], reference: Any, by: str | None) -> list[Reference]:
    """The reference lines of each axes."""
    if not isinstance(reference, Mapping):
        return [reference or ()] * len(cells)
    return [reference.get(part[by].iloc[0] if by and len(part) else None) or () for _, part in cells]


def _values(cells: list[tuple[Axes, pd.DataFrame]], ylabel: str, log: bool, references: Sequence[Reference]) -> None:
    for (ax, _), reference in zip(cells, references, strict=True):
        if log:
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if _room(ax) else (1,)))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
        for value, _ in reference:
            ax.axhline(value, color=SOFT, lw=1, ls=(0, (4, 3)), zorder=1.5)
    _ylabel(cells, ylabel)
    for (ax, _), reference in zip(cells, references, strict=True):
        if reference and ax.get_subplotspec().is_last_col():
            _name_references(ax, reference)


def _room(ax: Axes) -> bool:
    """Whether three ticks a decade of the y axis have 0.2 inches each, in a row of axes that takes 60 % of its part."""
    low, high = ax.get_ylim()
    height = 0.6 * ax.figure.get_figheight() / ax.get_subplotspec().get_gridspec().nrows
    return 3 * math.log10(high / low) * 0.2 <= height


def _name_references(ax: Axes, reference: Reference) -> None:
    """Labels beside the axes, moved apart where the lines are close."""
    ordered = sorted(reference)
    ax.get_ylim()  # settles the limits, on which the places depend
    texts = [_wrap(label, 18) for _, label in ordered]
    gap = [0.075 * (1 + text.count("\n")) for text in texts]
    ends = ax.transAxes.inverted().transform(ax.transData.transform([(0, value) for value, _ in ordered]))[:, 1]
    ats: list[float] = []
    for place, end in enumerate(ends):
        ats.append(end if not ats else max(end, ats[-1] + (gap[place - 1] + gap[place]) / 2))
    shift = max(0.0, ats[-1] - max(ends[-1], 1.0))
    arrow = {"arrowstyle": "-", "color": SOFT, "lw": 0.7, "shrinkA": 0, "shrinkB": 0}
    for (value, _), text, at in zip(ordered, texts, ats, strict=True):
        end = {"xy": (1, value), "xycoords": ax.get_yaxis_transform()}
        start = {"xytext": (1.03, at - shift), "textcoords": "axes fraction"}
        ax.annotate(text, **end, **start, va="center", fontsize=9.5, color=SOFT, arrowprops=arrow)


def _legend(fig: Figure, handles: list[Any], alone: bool = False) -> None:
    """Beneath the axes, in as many columns as fit; none for a single series."""
    if len(handles) < 2 and not alone:
        return
    for handle in handles:
        handle.set_label(_wrap(handle.get_label(), 80))
    letters = [max(map(len, handle.get_label().split("\n"))) for handle in handles]
    in_one_row = 6.2 * sum(letters) + 56 * len(handles) <= 72 * WIDTH  # points: of a letter, and of a key with its gap
    columns = len(handles) if in_one_row else max(1, min(len(handles), 84 // (max(letters) + 7)))
    rows = math.ceil(len(handles) / columns)
    columns = math.ceil(len(handles) / rows)  # rows of even length
    fig.set_figheight(fig.get_figheight() + 0.2 * (rows - 1))  # a long legend does not squeeze the plot
    fig.legend(handles=handles, loc="outside lower left", ncols=columns, handlelength=3.2, columnspacing=1.6)


def _places(column: pd.Series, log: bool, panels: int) -> tuple[Callable[[Any], float], list[float], list[Any]]:
    """Where each x stands, and the ticks: at measured values, as many as have room."""
    levels = _levels(column)
    if not pd.api.types.is_numeric_dtype(column):
        return levels.index, list(range(len(levels))), levels
    scale = math.log2 if log else float
    room = (scale(levels[-1]) - scale(levels[0])) / (12, 6, 4)[min(panels, 3) - 1]
    marks = [levels[-1]]
    for value in reversed(levels[:-1]):
        if scale(marks[-1]) - scale(value) >= room * 0.99:
            marks.append(value)
    return float, marks, marks


def _ticks(ax: Axes, marks: Iterable[float], names: Sequence[Any], width: int = 66) -> None:
    """Labels of the x axis: wrapped, or tilted where a word is too long for its place. width: letters in the figure."""
    room = width // ax.get_subplotspec().get_gridspec().ncols // len(names)
    texts = [_wrap(_plain(name), max(room, 3)) for name in names]
    tilted = max(len(line) for text in texts for line in text.split("\n")) > max(room, 3)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(list(marks), [_wrap(_plain(name), 24) for name in names] if tilted else texts)
    if tilted:
        for label in ax.get_xticklabels():
            label.set(rotation=35, ha="right", rotation_mode="anchor")


def _outline(df: pd.DataFrame, label: str, group: str | None) -> list[tuple[Any, Any]]:
    """The rows of `ratios`, each (group, label); (group, None) is a heading."""
    if group is None:
        return [(None, name) for name in dict.fromkeys(df[label])]
    headed = ((name, item) for name in dict.fromkeys(df[group]) for item in (None, *df[df[group] == name][label]))
    return list(dict.fromkeys(headed))


def _side(low: float, high: float, band: float) -> str:
    if low >= 1 - band and high <= 1 + band:
        return "same"
    return "slower" if high < 1 else "faster" if low > 1 else "unclear"


def _ink_on(rgba: Sequence[float]) -> str:
    """Text on a cell of this colour; neither is among the colours that change in dark mode."""
    red, green, blue = rgba[:3]
    return "#101418" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "#fcfdfe"


def _plain(value: Any) -> str:
    """A tick's text: numbers without exponent, from a million on with M or G."""
    if not isinstance(value, int | float | np.number) or isinstance(value, bool):
        return str(value)
    for unit, name in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value:.6g}"


def _wrap(text: Any, width: int) -> str:
    return textwrap.fill(str(text), width, break_long_words=False)
