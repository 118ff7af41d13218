"""Which tables a sentence is made from: a record of what table functions return while it is made.

A study's modules of tables and views end in `ledger.watch(__name__)`. Inside `recording` what their functions return is
noted, of nested calls too; outside it costs one look at a variable.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Noted:
    """A table that was read. name: "tables.ratios"; arguments: those given, but for tables: "cache='hot'".

    kept: for what whoever reads it makes of it.
    """

    name: str
    arguments: str
    table: "pd.DataFrame"
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Said:
    """A number that a sentence shows, before it was rounded: what else reads like it is not what it is from."""

    value: float


Entry = Noted | Said
_book: ContextVar[list[Entry] | None] = ContextVar("book", default=None)


@dataclass
class Kept:
    """What watched functions made of these rows, so that a page makes each table once. The rows must not change."""

    rows: "pd.DataFrame"
    made: dict[Any, tuple[Any, list[Entry]]] = field(default_factory=dict)


_kept: ContextVar[Kept | None] = ContextVar("kept", default=None)


@contextmanager
def recording(kept: Kept | None = None) -> Iterator[list[Entry]]:
    """The tables that are noted inside, in the order in which they are made. Of two that nest, each has its own.

    kept: takes what is made of its rows from there, and keeps it there.
    """
    book: list[Entry] = []
    tokens = _book.set(book), _kept.set(kept)
    try:
        yield book
    finally:
        _book.reset(tokens[0])
        _kept.reset(tokens[1])


def note(name: str, value: Any, arguments: str = "") -> None:
    """Note a table, a series, a mapping (one line), a list of mappings, numbers or a number, inside `recording`.

    Anything else is passed by.
    """
    book = _book.get()
    if book is None:
        return
    if parent := getattr(value, "attrs", {}).get("table"):  # pandas hands it on to what is selected
        name = f"{parent}, {name}"
    numbers = value if isinstance(value, tuple) else (value,)
    noted = (_noted_again if all(type(one) in (int, float) for one in numbers) else _noted)(name, arguments, value)
    if noted:
        book.append(noted)


def say(value: float) -> None:
    """Note a number that a sentence shows, as exactly as it is known, inside `recording`."""
    book = _book.get()
    if book is not None:
        book.append(Said(float(value)))


def watch(module: str) -> None:
    """Have what every function that this module defines returns noted. To be called at the module's end.

    What imports the functions from there gets the watched ones. The functions' source stays as it is, and so its hash.
    """
    here = sys.modules[module]
    for name, function in list(vars(here).items()):
        own = inspect.isfunction(function) and function.__module__ == module
        if own and not hasattr(function, "__wrapped__"):
            setattr(here, name, _watched(function, f"{module.rpartition('.')[2]}.{name}"))


def _watched(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def watched(*given: Any, **named: Any) -> Any:
        kept, book = _kept.get(), _book.get()
        if kept is None or book is None or not given or given[0] is not kept.rows:
            return once(*given, **named)
        key = (name, function, repr(given[1:]), repr(named))
        if not all(map(_short, (*given[1:], *named.values()))):
            return once(*given, **named)
        if key in kept.made:
            made, noted = kept.made[key]
            book.extend(noted)
            return copy(made)
        start = len(book)
        made = once(*given, **named)
        # Not what is used up, as an iterator is, nor what its taker may change within.
        if hasattr(made, "attrs") or isinstance(made, str | int | float | dict):
            kept.made[key] = copy(made), book[start:]
        return made

    def once(*given: Any, **named: Any) -> Any:
        made = function(*given, **named)
        if _book.get() is not None:
            said = [repr(one) for one in given if _short(one)]
            said += [f"{key}={one!r}" for key, one in named.items() if _short(one)]
            given_to = ", ".join(said)
            if hasattr(made, "attrs"):
                made.attrs.pop("table", None)
            note(name, made, given_to)
            if hasattr(made, "attrs"):
                made.attrs["table"] = f"{name}({given_to})" if given_to else name
        return made

    return watched


def _short(value: Any) -> bool:
    """Whether an argument can be said in words."""
    return isinstance(value, str | int | float | bool | None) or (
        isinstance(value, list | tuple) and len(value) < 9 and all(map(_short, value))
    )


def _noted(name: str, arguments: str, value: Any) -> Noted | None:
    table = _table(value)
    return None if table is None or table.empty else Noted(name, arguments, table)


_noted_again = lru_cache(50_000, typed=True)(_noted)  # of ten numbers that a page notes, nine were noted before


def _table(value: Any) -> "pd.DataFrame | None":
    import pandas as pd

    if isinstance(value, pd.DataFrame):
        return value
    if isinstance(value, pd.Series):
        return value.to_frame(str(value.name or "value")).reset_index(names=_index_names(value))
    if isinstance(value, Mapping):
        return pd.DataFrame([value]) if any(_number(one) for one in value.values()) else None
    if isinstance(value, list | tuple):
        if value and all(isinstance(one, Mapping) for one in value):
            return pd.DataFrame(list(value))
        return pd.DataFrame({"value": list(value)}) if value and all(map(_number, value)) else None
    return pd.DataFrame({"value": [value]}) if _number(value) else None


def _index_names(series: "pd.Series") -> list[str]:
    taken = str(series.name or "value")
    names = [str(name or "line") for name in series.index.names]
    return [f"{name} of the line" if name == taken else name for name in names]


def _number(value: Any) -> bool:
    import numpy as np

    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
