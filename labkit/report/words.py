"""Words that sentences of several studies share: spans, means, intervals, numbers of tokens."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from labkit.bench.ledger import note
from labkit.bench.verdict import geometric_mean


def span(values: pd.Series, form: str = "{:.2f}") -> str:
    """The least and the largest: "0.98 to 1.31"; once where both read the same."""
    note("span", values)
    return " to ".join(dict.fromkeys(form.format(end) for end in (values.min(), values.max())))


def spans(table: pd.DataFrame, by: str | Sequence[str], column: str, form: str = "{:.2f}") -> list[str]:
    """ "GDN 0.98 to 1.31" of each group, in the order of the table. by: the column, or columns, that name it."""
    note("spans", table)
    groups = table.groupby([by] if isinstance(by, str) else list(by), sort=False)[column]
    return [f"{', '.join(names)} {span(values, form)}" for names, values in groups]


def filled(table: pd.DataFrame, form: str) -> list[str]:
    """The form with the values of each line of a table: "{model}: {us:.1f} µs"."""
    note("filled", table)
    return [form.format(**line) for line in table.to_dict("records")]


def mean(ratios: pd.Series) -> str:
    """Mean of some cases' ratios, and the least and most of them."""
    note("mean", ratios)
    return f"×{geometric_mean(ratios):.2f} in the mean of {len(ratios)} cases, ×{span(ratios)}"


def faster(ratio: float) -> str:
    """How much faster something is than what takes `ratio` times its time: "1.29× faster"."""
    return f"{ratio:.2f}× faster" if ratio >= 1 else f"{1 / ratio:.2f}× slower"


def interval(line: Mapping[str, Any] | pd.Series, digits: int = 2) -> str:
    """The ratio of a table's line with its interval: "×1.31 [1.29, 1.33]"."""
    note("interval", dict(line))
    mid, low, high = (f"{line[name]:.{digits}f}" for name in ("ratio", "low", "high"))
    return f"×{mid} [{low}, {high}]"


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
