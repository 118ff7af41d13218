"""Words that the study's views share: spans, cases, intervals, tables as they are shown."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from labkit.report.words import tokens
from labkit.studies.moe_persistent_grid.routings import KINDS

Drawing = Mapping[str, Any] | str  # a sentence where there is nothing to draw
UNITS = {"us": "µs", "against us": "before µs"}


def _uniform(table: pd.DataFrame, weights: str | None = None) -> pd.DataFrame:
    """The rows of the uniform routing, and of one kind of weights."""
    table = table[table["routing"] == KINDS[0]]
    return table[table["weights"] == weights] if weights else table


def _where(line: pd.Series) -> str:
    """The case of a row in words: model, tokens, and what else it has of weights, GEMM and routing."""
    words = [line["model"], line.get("weights"), tokens(line["T"]), line.get("GEMM"), line.get("routing")]
    return ", ".join(str(word) for word in words if word and word != KINDS[0])


def _shown(table: pd.DataFrame, *hidden: str) -> pd.DataFrame:
    """A table without what its page says elsewhere."""
    return table.drop(columns=["routing", "no slower", "runs", *hidden], errors="ignore").rename(columns=UNITS)


def _at(table: pd.DataFrame) -> list[str]:
    """A label for each row: its tokens, and the routing where that is not the uniform one."""
    odd = [f", {kind}" if kind != KINDS[0] else "" for kind in table["routing"]]
    return [f"{tokens(count)}{kind}" for count, kind in zip(table["T"], odd, strict=True)]
