"""Words that sentences of several studies share: spans, how much faster something is, numbers of tokens."""

import re
from collections.abc import Iterable, Sequence

import pandas as pd

from labkit.bench.ledger import note
from labkit.bench.ratios import SAME as SAME
from labkit.bench.ratios import between as between
from labkit.bench.ratios import compared as compared
from labkit.bench.ratios import faster as faster
from labkit.bench.ratios import note_sizes as note_sizes
from labkit.bench.ratios import number as number


def span(values: pd.Series, form: str = "{:.2f}") -> str:
    """The least and the largest: "0.98 to 1.31"; once where both read the same."""
    note("span", values)
    shown = {form.format(end): end for end in (values.max(), values.min())}
    return " to ".join(number(end, form) for end in reversed(shown.values()))


def spans(table: pd.DataFrame, by: str | Sequence[str], column: str, form: str = "{:.2f}") -> list[str]:
    """ "GDN 0.98 to 1.31" of each group, in the order of the table. by: the column, or columns, that name it."""
    note("spans", table)
    groups = table.groupby([by] if isinstance(by, str) else list(by), sort=False)[column]
    return [f"{', '.join(names)} {span(values, form)}" for names, values in groups]


def filled(table: pd.DataFrame, form: str) -> list[str]:
    """The form with the values of each line of a table: "{model}: {us:.1f} µs"."""
    note("filled", table)
    return [form.format(**line) for line in table.to_dict("records")]


def gains(ratios: pd.Series, than: str = "") -> str:
    """The least and the most that something is faster: "1.06× to 1.22× slower", "1.02× slower to 1.06× faster"."""
    note("gains", ratios)
    return between(ratios.min(), ratios.max(), than)


def interval(low: float, high: float) -> str:
    """Both ends of an interval: "[1.29, 1.33]"."""
    return f"[{number(low)}, {number(high)}]"


def sentences(said: Iterable[str], otherwise: str) -> str:
    """Those of some sentences that are not empty; `otherwise` if all are."""
    return " ".join(one for one in said if one) or otherwise


def rounded(value: float) -> float:
    """To two digits, as the ticks of an axis show it."""
    return float(f"{value:.2g}")


def tokens(count: int) -> str:
    """ "1 token", "2 tokens"."""
    return f"{count} token{'s' if count != 1 else ''}"


def short_names(names: Sequence[str]) -> list[str]:
    """GPUs by the shortest names that tell them apart: "H100" for "NVIDIA H100 80GB HBM3"."""
    short = [re.sub(r"^NVIDIA (GeForce )?|([- ]\d+GB| HBM).*$", "", name) or name for name in names]
    return [name if short.count(one) > 1 else one for name, one in zip(names, short, strict=True)]
