"""What several GPUs show of one view, as one figure and one table."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd

from labkit.report import plots
from labkit.report.figures import Picture

GPU = "GPU"
WIDE = 4  # more columns of values than these are not set side by side, a group for each GPU


def picture(drawn: Mapping[str, Picture]) -> Picture:
    """The pictures of one view as one: of ratios each GPU in its colour, else beside each other on the same axes.

    drawn: GPU -> its picture, all of one kind of plot. Texts are those of the first. ValueError for plots of two kinds.
    """
    first, *others = drawn.values()
    if not others:
        return first
    if odd := [one.plot.__name__ for one in others if one.plot is not first.plot]:
        raise ValueError(f"one figure cannot hold {first.plot.__name__} and {odd[0]}: {first.about}")
    options = dict(first.options)
    if first.plot is plots.ratios:
        options["hue"] = GPU
    else:
        options["rows" if options.get("panel") else "panel"] = GPU
    if len({repr(one.options.get("reference")) for one in drawn.values()}) > 1:
        options["reference"] = {gpu: one.options.get("reference") for gpu, one in drawn.items()}
    data = pd.concat([one.data.assign(**{GPU: gpu}) for gpu, one in drawn.items()], ignore_index=True)
    shown = table({gpu: one.table for gpu, one in drawn.items()})
    return Picture(first.plot, data, first.columns, options, first.about, first.shows, first.said, flat(shown))


def table(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The tables of one view as one.

    Columns in front that are the same on all GPUs stand once, as do others that are. If what differs are a few columns,
    they stand beside each other, headed (column, GPU); else the lines of all GPUs stand beneath each other, those of
    the same place together.
    """
    parts = {gpu: one.reset_index(drop=not any(one.index.names)) for gpu, one in tables.items() if len(one)}
    if len(parts) < 2:
        return next(iter(parts.values()), next(iter(tables.values())))
    hidden = next(iter(parts.values())).attrs.get("hidden", [])
    seen = {gpu: one.drop(columns=hidden, errors="ignore") for gpu, one in parts.items()}
    shared = _shared(list(seen.values()))
    differ = list(dict.fromkeys(name for one in seen.values() for name in one if name not in shared))
    if shared and len(differ) <= WIDE and all(set(differ) <= set(one) for one in seen.values()):
        return _wide(seen, shared)
    made = _long(parts, _front(list(seen.values())) if shared else [])
    made.attrs["hidden"] = hidden
    return made


def _long(parts: Mapping[str, pd.DataFrame], keys: Sequence[Hashable]) -> pd.DataFrame:
    """Beneath each other, those of the same place together if there are keys, which stand in front."""
    made = pd.concat([one.assign(**{GPU: gpu, "_place": range(len(one))}) for gpu, one in parts.items()])
    if keys:
        made = made.sort_values("_place", kind="stable")
    rest = [name for name in made if name not in (*keys, GPU, "_place")]
    return made[[*keys, GPU, *rest]].reset_index(drop=True)


def _wide(parts: Mapping[str, pd.DataFrame], shared: Sequence[Hashable]) -> pd.DataFrame:
    first = next(iter(parts.values()))
    columns: dict[Any, pd.Series] = {}
    for name in first:
        if name in shared:
            columns[name] = first[name]
        else:
            columns |= {(name, gpu): one[name] for gpu, one in parts.items()}
    made = pd.concat(columns.values(), axis=1)
    made.columns = pd.Index(list(columns), tupleize_cols=False)
    return made


def _shared(parts: Sequence[pd.DataFrame]) -> list[Hashable]:
    """The columns that are the same in all tables; none unless the first is."""
    first = parts[0]
    if any(len(one) != len(first) for one in parts) or not _front(parts):
        return []
    return [name for name in first if all(name in one and _same(first[name], one[name]) for one in parts[1:])]


def _front(parts: Sequence[pd.DataFrame]) -> list[Hashable]:
    """Of those, the ones with which the tables begin."""
    found: list[Hashable] = []
    for name in parts[0]:
        if not all(len(one) == len(parts[0]) and name in one and _same(parts[0][name], one[name]) for one in parts[1:]):
            break
        found.append(name)
    return found


def _same(one: pd.Series, other: pd.Series) -> bool:
    return one.astype(object).reset_index(drop=True).equals(other.astype(object).reset_index(drop=True))


def flat(made: pd.DataFrame) -> pd.DataFrame:
    """With headings that are texts: "ratio · H100"."""
    hidden = made.attrs.get("hidden", [])
    made = made.set_axis([heading(name) for name in made], axis=1)
    made.attrs["hidden"] = hidden
    return made


def heading(name: Hashable) -> str:
    """Of a column (column, GPU)."""
    return " · ".join(map(str, name)) if isinstance(name, tuple) else str(name)


def formats(made: pd.DataFrame, given: Mapping[str, Any] | None) -> dict[Hashable, Any]:
    """Formats of a table's columns, for those of each GPU too."""
    known = given or {}
    ends = {name: name[0] if isinstance(name, tuple) else name for name in made}
    return {name: known[end] for name, end in ends.items() if end in known}
