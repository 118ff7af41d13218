"""Words that the study's views share: spans, cases, intervals, tables as they are shown."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from labkit.bench.verdict import geometric_mean
from labkit.moe_persistent_grid.synthetic import KINDS

Drawing = Mapping[str, Any] | str  # a sentence where there is nothing to draw
UNITS = {"us": "µs", "against us": "before µs"}


def _uniform(table: pd.DataFrame, weights: str | None = None) -> pd.DataFrame:
    """The rows of the uniform routing, and of one kind of weights."""
    table = table[table["routing"] == KINDS[0]]
    return table[table["weights"] == weights] if weights else table


def _span(values: pd.Series, form: str = "{:.2f}") -> str:
    ends = [form.format(end) for end in (values.min(), values.max())]
    return " to ".join(dict.fromkeys(ends))


def _mean(ratios: pd.Series) -> str:
    """Mean of some cases' ratios, and the least and most of them."""
    return f"×{geometric_mean(ratios):.2f} in the mean of {len(ratios)} cases, ×{_span(ratios)}"


def _interval(line: pd.Series) -> str:
    return f"×{line['ratio']:.2f} [{line['low']:.2f}, {line['high']:.2f}]"


def _where(line: pd.Series) -> str:
    """The case of a row in words: model, tokens, and what else it has of weights, GEMM and routing."""
    words = [line["model"], line.get("weights"), _tokens(line["T"]), line.get("GEMM"), line.get("routing")]
    return ", ".join(str(word) for word in words if word and word != KINDS[0])


def _shown(table: pd.DataFrame, *hidden: str) -> pd.DataFrame:
    """A table without what its page says elsewhere."""
    return table.drop(columns=["routing", "no slower", "runs", *hidden], errors="ignore").rename(columns=UNITS)


def _sentences(said: Iterable[str], otherwise: str) -> str:
    return " ".join(one for one in said if one) or otherwise


def _rounded(value: float) -> float:
    """To two digits, as the ticks of an axis show it."""
    return float(f"{value:.2g}")


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count != 1 else ''}"


def _at(table: pd.DataFrame) -> list[str]:
    """A label for each row: its tokens, and the routing where that is not the uniform one."""
    odd = [f", {kind}" if kind != KINDS[0] else "" for kind in table["routing"]]
    return [f"{_tokens(tokens)}{kind}" for tokens, kind in zip(table["T"], odd, strict=True)]
