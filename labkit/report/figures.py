"""Figures and tables of the notebooks as HTML: with alt text, a caption, and the numbers beneath."""

import base64
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from labkit import paths
from labkit.bench.claim import VERDICTS
from labkit.bench.ledger import note as note_table
from labkit.bench.records import write_atomic
from labkit.report.plots import png, svg


@dataclass(frozen=True)
class Html:
    """A piece of HTML that a notebook shows; `plain` is what stands for it where there is no HTML."""

    html: str
    plain: str

    def _repr_html_(self) -> str:
        return self.html

    def __html__(self) -> Markup:
        return Markup(self.html)

    def __repr__(self) -> str:
        return self.plain

    def after(self, text: str) -> "Html":
        """This with a text in front of it."""
        return Html(str(escape(text)) + self.html, text + self.plain)

    def before(self, text: str) -> "Html":
        """This with a text behind it."""
        return Html(self.html + str(escape(text)), self.plain + text)


@dataclass(frozen=True)
class Picture:
    """A plot that is not drawn yet, so that those of several GPUs can become one, with its texts and its table.

    plot, columns, options: plot(data, *columns, **options) of `plots`. about, shows: caption and alt text, without what
    the figure comes to, which is `said`, without a full stop. table: beneath it.
    """

    plot: Callable[..., Figure]
    data: pd.DataFrame
    columns: tuple[str, ...]
    options: Mapping[str, Any]
    about: str
    shows: str
    said: str
    table: pd.DataFrame

    @property
    def fig(self) -> Figure:
        """Drawn anew each time."""
        return self.plot(self.data, *self.columns, **self.options)

    @property
    def caption(self) -> str:
        """What it is, and what it comes to."""
        return _ended(self.about, self.said)

    @property
    def alt(self) -> str:
        """The same for a reader who does not see it."""
        return _ended(self.shows, self.said)


def _ended(text: str, said: str) -> str:
    return f"{text} {said}." if said else text


TOLD = ("ratio", "low", "high", "noise", "runs")  # columns that a page tells of a row under the pointer
Drawing = Picture | str  # what a view gives `Lab.figure`; a sentence where there is nothing to draw


def drawing(
    plot: Callable[..., Figure],
    data: pd.DataFrame,
    *columns: str,
    alt: str,
    caption: str,
    said: str = "",
    table: pd.DataFrame | Sequence[str] | None = None,
    hidden: Sequence[str] = (),
    units: Mapping[str, str] | None = None,
    **options: Any,
) -> Picture:
    """A plot with its texts and the table beneath, as `Lab.figure` takes it.

    plot, columns, options: plot(data, *columns, **options) of `plots`.
    said:   what the figure comes to on one GPU, without a full stop: ends alt and caption. Numbers belong here, since
            what several GPUs share of the caption is said once.
    table:  the table beneath, or the columns of data that it has; default: data.
    hidden: columns that it has not, where there are such; those of `TOLD` stay, as `table` hides them. units: column ->
    its heading.
    """
    shown = data if table is None else table if isinstance(table, pd.DataFrame) else data[list(table)]
    shown = shown.drop(columns=[name for name in hidden if name not in TOLD], errors="ignore")
    shown = shown.rename(columns=dict(units or {}))
    shown.attrs["hidden"] = [name for name in hidden if name in TOLD]
    return Picture(plot, data, columns, options, caption, alt, said, shown)


def view(
    table: Callable[[pd.DataFrame], pd.DataFrame], otherwise: str
) -> Callable[[Callable[[pd.DataFrame], Any]], Callable[[pd.DataFrame], Any]]:
    """Has a function of a table be one of rows: `otherwise` where the table that is made of them is empty."""

    def decorated(tell: Callable[[pd.DataFrame], Any]) -> Callable[[pd.DataFrame], Any]:
        @wraps(tell)
        def told(rows: pd.DataFrame) -> Any:
            made = table(rows)
            note_table(getattr(tell, "__name__", "view"), made)
            return otherwise if made.empty else tell(made)

        return told

    return decorated


def show(
    fig: Figure,
    *,
    name: str,
    alt: str,
    caption: str | Html,
    table: "pd.DataFrame | Html | None" = None,
    gpu: str | None = None,
) -> Html:
    """The figure as HTML (image, caption, its table folded beneath) and as REPORTS/figures/<gpu or all>/<name>.svg
    and .png, for Markdown.

    alt: what a reader who does not see the figure should know. Its id is the name. ValueError if alt or caption is
    empty, or if name or gpu is not a plain file name. The figure is closed.
    """
    folder = gpu or "all"
    for key, text in (("alt", alt), ("caption", caption)):
        if not text or not str(text).strip():
            raise ValueError(f"show: {key} is empty; every figure needs one")
    for key, text in (("name", name), ("gpu", folder)):
        if not re.fullmatch(r"\w[\w.-]*", text, re.ASCII):
            raise ValueError(f"show: {key} is {text!r}; allowed: letters, digits, '-', '_' and '.'")
    data = svg(fig, alt)
    file = paths.REPORTS / "figures" / folder / f"{name}{paths.SUFFIX}.svg"
    write_atomic(file, data)
    write_atomic(file.with_suffix(".png"), png(fig))
    if plt := sys.modules.get("matplotlib.pyplot"):
        plt.close(fig)
    source = "data:image/svg+xml;base64," + base64.b64encode(data).decode()
    image = Markup('<div class="lab-image"><img alt="{}" src="{}" style="max-width:100%;height:auto"></div>')
    parts = [image.format(alt, source), Markup("<figcaption>{}</figcaption>").format(caption)]
    if table is not None:
        inner = table if isinstance(table, Html) else _table(table)
        parts.append(Markup("<details><summary>Table</summary>{}</details>").format(inner))
    html = Markup('<figure class="lab" id="{}">{}</figure>').format(name, Markup("\n").join(parts))
    return Html(str(html), f"{caption}\n[{alt}]")


def shown(name: str, picture: Picture) -> Html:
    """A figure that belongs to no GPU."""
    return show(picture.fig, name=name, alt=picture.alt, caption=picture.caption, table=picture.table)


OPEN_ROWS = 10  # a longer table is folded


def table(
    df: pd.DataFrame,
    caption: str | Html | None = None,
    formats: Mapping[Any, str | Callable[[Any], str]] | None = None,
    folded: bool = False,
) -> Html:
    """The frame as an HTML table that scrolls in its own box. A named index gives row headings, else the first column.

    formats: column -> format string ("{:.2f}") or function; other numbers show four significant digits. Where a text
    says less of a number than that, the cell's `data-v` is the number. df.attrs["hidden"]: columns that are not shown,
    but said in the attributes of each row: data-runs="3". The id is from the caption's first words.
    folded: whether a reader opens it first, if it has more than `OPEN_ROWS` rows.
    """
    if any(df.index.names):
        df = df.reset_index()
    if unknown := sorted(set(formats or {}) - set(df.columns)):
        raise ValueError(f"table: formats names no column {unknown[0]!r}; there are: {', '.join(map(str, df.columns))}")
    hidden = [name for name in df.attrs.get("hidden", ()) if name in df]
    # Without columns pandas 2 gives no records at all.
    beside = df[hidden].to_dict("records") if hidden else [{}] * len(df)
    df = df.drop(columns=hidden)
    numeric = [pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind) for kind in df.dtypes]
    heads = [" · ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in df.columns]
    kinds = [Markup(' class="n"') if number else Markup("") for number in numeric]
    head = Markup("").join(map(Markup('<th scope="col"{}>{}</th>').format, kinds, heads))
    body = Markup("\n").join(
        Markup("<tr{}>{}</tr>").format(_said(more), Markup("").join(_cells(row, df.columns, formats or {})))
        for row, more in zip(df.itertuples(index=False, name=None), beside, strict=True)
    )
    box = Markup('<div class="lab-scroll" style="overflow-x:auto" role="region" tabindex="0" aria-label="{}">').format(
        str(caption or "Table")
    )
    text = Markup('{}<table class="lab"><thead><tr>{}</tr></thead><tbody class="{}">{}</tbody></table></div>')
    right = " ".join(
        f"n{place}" for place, number in enumerate(numeric, 1) if number
    )  # not a class of each cell: weight
    html = text.format(box, head, right, body)
    if folded and len(df) > OPEN_ROWS:
        html = Markup("<details><summary>Table, {} rows</summary>{}</details>").format(len(df), html)
    if caption:  # not <caption>, which is as wide as its table and scrolls away with it
        form = Markup('<figure class="lab-table" id="{}"><figcaption>{}</figcaption>{}</figure>')
        html = form.format(slug(str(caption)), caption, html)
    return Html(str(html), df.to_string(index=False))


_table = table  # where an argument has its name


def by_gpu(said: Mapping[str, Html]) -> Html:
    """What each GPU gives, as a list; said once where all give the same. said: GPU -> its sentence."""
    if len({text.plain for text in said.values()}) == 1:
        return next(iter(said.values()))
    item = Markup("<li><b>{}</b> {}</li>")
    items = Markup("").join(item.format(gpu, text) for gpu, text in said.items())
    plain = "\n".join(f"{gpu}: {text.plain}" for gpu, text in said.items())
    return Html(str(Markup('<ul class="by-gpu">{}</ul>').format(items)), plain)


def _cells(row: Sequence[Any], columns: Iterable[Any], formats: Mapping[Any, Any]) -> Iterable[Markup]:
    for place, (item, column) in enumerate(zip(row, columns, strict=True)):
        text, kind = _text(item, formats.get(column)), Markup("")
        if len(str(text)) > 24 and not (hasattr(text, "__html__") and "</data>" not in text.__html__()):
            kind = Markup(' class="t"')  # text that may wrap
        kind += _exact(item, text)
        yield Markup("<td{}>{}</td>" if place else '<th scope="row"{}>{}</th>').format(kind, text)


def _exact(item: Any, text: Any) -> Markup:
    """The attribute that says a number of which the text says fewer than four digits."""
    if isinstance(item, bool | np.bool_) or not isinstance(item, int | float | np.number) or not np.isfinite(item):
        return Markup("")
    try:
        near = abs(float(str(text).replace(",", "")) - item) <= 5e-4 * abs(item)
    except ValueError:
        near = False
    return Markup("" if near else f' data-v="{item:.6g}"')


def _said(more: Mapping[str, Any]) -> Markup:
    """Attributes of a row for the columns that are hidden."""
    known = {name: value for name, value in more.items() if pd.notna(value)}
    return Markup("").join(Markup(' data-{}="{:.6g}"').format(name, value) for name, value in known.items())


def slug(text: str) -> str:
    """A name for an address, of a text's first eight words: "time-against-batch"."""
    return "-".join(re.findall(r"\w+", text.lower())[:8])


def _text(item: Any, form: str | Callable[[Any], str] | None) -> Any:
    if hasattr(item, "__html__"):
        return item
    if item is None or (np.isscalar(item) and pd.isna(item)):
        return "—"
    if form is not None:
        return form.format(item) if isinstance(form, str) else form(item)
    if isinstance(item, bool | np.bool_):
        return "yes" if item else "no"
    if isinstance(item, int | np.integer):
        return str(item)
    if isinstance(item, float | np.floating):
        whole = abs(item) < 1e15 and (item == int(item) or abs(item) >= 1e4)
        return f"{item:.0f}" if whole else f"{item:#.4g}".rstrip(".")
    return str(item)


def folded(head: str, what: Html) -> Html:
    """A piece that a reader opens first."""
    return Html(f"<details><summary>{escape(head)}</summary>{what.html}</details>", what.plain)


def note(text: str | Html) -> Html:
    """A remark set apart from the text."""
    return Html(f'<div class="lab-note">{escape(text)}</div>', str(text))


SIGNS = {
    "reproduced": "✓", "faster": "✓", "not reproduced": "✗", "disagrees": "✗", "slower": "✗", "consistent": "≈",
    "same": "≈",
}  # fmt: skip


def badge(verdict: str) -> Html:
    """A verdict of a claim (`claim.VERDICTS`) or of a pair (faster, slower, same, unclear): sign, word and colour."""
    kind = re.sub(r"\W+", "-", verdict.lower())
    text = f"{SIGNS.get(verdict, '?')} {verdict}"
    about = f' title="{escape(VERDICTS[verdict])}"' if verdict in VERDICTS else ""
    return Html(f'<span class="lab-badge lab-{kind}"{about}>{escape(text)}</span>', text)
