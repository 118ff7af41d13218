"""Tables of a study, made from its rows: cases in order, times by variant, pairs with interval and verdict."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pandas as pd

from labkit.bench import ledger
from labkit.bench.verdict import compare_many, median_us

Choice = TypeVar("Choice")
STAYS = 1.01  # how many times faster another choice must be than the one that was made before
RATIO = ["ratio", "low", "high", "noise", "verdict"]
COMPARED = ["us", "against us", *RATIO, "no slower", "runs"]

Params = dict[str, Any]
Cases = Iterable[tuple[Params, pd.DataFrame]]  # parameters and rows of each case


def cases(
    rows: pd.DataFrame,
    op: str,
    place: Callable[[Params, pd.DataFrame], Any] = lambda params, group: group["floor_bytes"].iloc[0],
    cache: str = "cold",
    **wanted: Any,
) -> list[tuple[Params, pd.DataFrame]]:
    """Parameters and rows of every case of an operation that has all these parameters.

    place: what sorts them; default: the bytes that a case moves at least.
    """
    some = rows[(rows["op"] == op) & (rows["cache"] == cache)]
    groups = [(json.loads(key), group) for key, group in some.groupby("case")]
    groups = [(params, group) for params, group in groups if wanted.items() <= params.items()]
    return sorted(groups, key=lambda item: place(*item))


def picked(params: Mapping[str, Any], names: Iterable[str]) -> Params:
    """Those of some parameters that a case has, in the order of the names: the columns that say which it is."""
    return {name: params[name] for name in names if name in params}


def frame(lines: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> pd.DataFrame:
    """A table of lines; without any, an empty one that has these columns."""
    return pd.DataFrame(lines, columns=None if lines else list(columns))


def where(table: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """The lines that have all these values; of a list, tuple or set: one of its values. An empty table is returned."""
    for name, value in wanted.items() if len(table) else ():
        several = isinstance(value, list | tuple | set | frozenset)
        table = table[table[name].isin(list(value)) if several else table[name] == value]
    ledger.note("where", table, ", ".join(f"{name}={value!r}" for name, value in wanted.items()))
    return table


# One case: the rows of one cache and mode


def timed(group: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Variant -> variant, role, mode and us of every usable variant that is no control."""
    us = median_us(group)
    columns = (group[name] for name in ("variant", "role", "mode"))
    return {
        variant: {"variant": variant, "role": role, "mode": mode, "us": us[variant]}
        for variant, role, mode in zip(*columns, strict=True)
        if variant in us and role != "control"
    }


def why_not(rows: pd.DataFrame, names: Iterable[str]) -> str:
    """What kept some variants from being measured: what the first of their rows says, or that there are none."""
    reasons = [reason for reason in rows[rows["variant"].isin(list(names))]["reason"].unique() if reason]
    reason = re.sub("^Not(Fetched|Built): ", "", reasons[0]) if reasons else "not measured on this GPU"
    return re.sub("^ModuleNotFoundError: No module named '(.*)'", r"not measured: \1 is not installed", reason)


def facts(group: pd.DataFrame, usable: bool = True, column: str = "evidence") -> dict[str, dict[str, Any]]:
    """Variant -> what its row has beside its times. usable: of usable rows alone; column: or "counters"."""
    group = group[group["ok"]] if usable else group
    return {variant: json.loads(text) for variant, text in zip(group["variant"], group[column], strict=True)}


def fastest(us: Mapping[str, float], names: Iterable[str]) -> str | None:
    """The fastest of some variants; None if none of them was timed."""
    return min((name for name in names if name in us), key=us.__getitem__, default=None)


def chosen(us: Mapping[Choice, float], before: Choice | None = None) -> Choice | None:
    """The fastest choice, or the one made before while no other is `STAYS` times faster; None if none was timed.

    Nearer ones change places from run to run, and each change is a kernel to compile and rows to measure anew.
    """
    best = min(us, key=us.__getitem__, default=None)
    return before if before in us and us[before] <= STAYS * us[best] else best


def pairs(group: pd.DataFrame, wanted: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Of each (variant, against) that the case has both of: who, µs of both, and the columns of their comparison.

    ratio: time of `against` over that of `variant`; above 1: `variant` is faster.
    """
    us = median_us(group)
    both = [pair for pair in wanted if set(pair) <= set(us)]
    return [
        {"variant": result.variant, "against": result.against}
        | {"us": us[result.variant], "against us": us[result.against]}
        | result.columns()
        for result in (compare_many(group, both) if both else ())  # its A/A interval takes a while
    ]


def best_pair(group: pd.DataFrame, variants: Iterable[str], others: Iterable[str]) -> dict[str, Any]:
    """`pairs` of the fastest of some variants against the fastest of others; empty if either has none."""
    us = median_us(group)
    both = fastest(us, variants), fastest(us, others)
    return pairs(group, [both])[0] if None not in both else {}


# All cases


def compared(found: Cases, variant: str, against: str, names: Sequence[str]) -> pd.DataFrame:
    """Time of `against` over that of `variant` in every case that has both. names: of the parameters shown."""
    lines = [picked(params, names) | line for params, group in found for line in pairs(group, [(variant, against)])]
    return frame(lines, [*names, *COMPARED]).drop(columns=["variant", "against"], errors="ignore")


def against_best(found: Cases, variants: Iterable[str], others: Iterable[str], names: Sequence[str]) -> pd.DataFrame:
    """Time of the fastest of others over that of the fastest of some variants, in every case that has both.

    Columns variant and against say who these are.
    """
    variants, others = list(variants), list(others)
    lines = [(params, best_pair(group, variants, others)) for params, group in found]
    return frame(
        [picked(params, names) | line for params, line in lines if line], [*names, "variant", "against", *COMPARED]
    )


def processes(rows: pd.DataFrame, op: str) -> int:
    """In how many processes the cases of an operation were measured, the least of them."""
    return min((len(set(run)) for run in rows[(rows["op"] == op) & rows["ok"]]["run"]), default=0)


def tuning_seconds(rows: pd.DataFrame) -> pd.Series:
    """Seconds from the start of one case's tuning to that of the next, in the order of measuring; compiling apart."""
    tuned = rows[rows["op"] == "tune"]
    starts = pd.to_datetime(tuned["utc"]).groupby(tuned["case"]).min().sort_values()
    seconds = starts.diff().dt.total_seconds().dropna().rename("seconds")
    ledger.note("tuning_seconds", seconds)
    return seconds
