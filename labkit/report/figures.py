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


Drawing = Mapping[str, Any] | str  # what a view gives `Lab.figure`; a sentence where there is nothing to draw


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
) -> dict[str, Any]:
    """A plot with its texts and the table beneath, as `Lab.figure` takes it.

    plot, columns, options: plot(data, *columns, **options) of `plots`.
    said:   what the figure comes to, without a full stop: ends alt and caption.
    table:  the table beneath, or the columns of data that it has; default: data.
    hidden: columns that it has not, where there are such. units: column -> its heading.
    """
    end = f" {said}." if said else ""
    shown = data if table is None else table if isinstance(table, pd.DataFrame) else data[list(table)]
    shown = shown.drop(columns=list(hidden), errors="ignore").rename(columns=dict(units or {}))
    return {"fig": plot(data, *columns, **options), "alt": alt + end, "caption": caption + end, "table": shown}


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

    alt: what a reader who does not see the figure should know. ValueError if alt or caption is empty, or if name or gpu
    is not a plain file name. The figure is closed.
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
    html = Markup('<figure class="lab">{}</figure>').format(Markup("\n").join(parts))
    return Html(str(html), f"{caption}\n[{alt}]")


def table(
    df: pd.DataFrame, caption: str | None = None, formats: Mapping[str, str | Callable[[Any], str]] | None = None
) -> Html:
    """The frame as an HTML table that scrolls in its own box. A named index gives row headings, else the first column.

    formats: column -> format string ("{:.2f}") or function; other numbers show four significant digits.
    """
    if any(df.index.names):
        df = df.reset_index()
    if unknown := sorted(set(formats or {}) - set(df.columns)):
        raise ValueError(f"table: formats names no column {unknown[0]!r}; there are: {', '.join(map(str, df.columns))}")
    numeric = [pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind) for kind in df.dtypes]
    heads = [" · ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in df.columns]
    kinds = [Markup(' class="n"') if number else Markup("") for number in numeric]
    head = Markup("").join(map(Markup('<th scope="col"{}>{}</th>').format, kinds, heads))
    body = Markup("\n").join(
        Markup("<tr>{}</tr>").format(Markup("").join(_cells(row, df.columns, kinds, formats or {})))
        for row in df.itertuples(index=False, name=None)
    )
    box = Markup('<div class="lab-scroll" style="overflow-x:auto" role="region" tabindex="0" aria-label="{}">').format(
        caption or "Table"
    )
    text = Markup('{}<table class="lab"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>')
    html = text.format(box, head, body)
    if caption:  # not <caption>, which is as wide as its table and scrolls away with it
        html = Markup('<figure class="lab-table"><figcaption>{}</figcaption>{}</figure>').format(caption, html)
    return Html(str(html), df.to_string(index=False))


_table = table  # where an argument has its name


def _cells(
    row: Sequence[Any], columns: Iterable[Any], kinds: Sequence[Markup], formats: Mapping[Any, Any]
) -> Iterable[Markup]:
    for place, (item, column, kind) in enumerate(zip(row, columns, kinds, strict=True)):
        text = _text(item, formats.get(column))
        if len(str(text)) > 24 and not (hasattr(text, "__html__") and "</data>" not in text.__html__()):
            kind = Markup(' class="t"')  # text that may wrap
        yield Markup("<td{}>{}</td>" if place else '<th scope="row"{}>{}</th>').format(kind, text)


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


def note(text: str | Html) -> Html:
    """A remark set apart from the text."""
    return Html(f'<p class="lab-note">{escape(text)}</p>', str(text))


SIGNS = {
    "reproduced": "✓", "faster": "✓", "not reproduced": "✗", "disagrees": "✗", "slower": "✗", "consistent": "≈",
    "same": "≈",
}  # fmt: skip


def badge(verdict: str) -> Html:
    """A verdict of a claim (`claim.VERDICTS`) or of a pair (faster, slower, same, unclear): sign, word and colour."""
    kind = re.sub(r"\W+", "-", verdict.lower())
    text = f"{SIGNS.get(verdict, '?')} {verdict}"
    return Html(f'<span class="lab-badge lab-{kind}">{escape(text)}</span>', text)
