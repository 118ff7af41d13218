"""Tables that are made once for the same rows, since views ask for them again and again."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def made_once(monkeypatch: Any, module: Any, names: Iterable[str]) -> None:
    """Keep what these functions of a module return, by their rows and arguments, for as long as a test runs."""
    for name in names:
        monkeypatch.setattr(module, name, _kept(getattr(module, name)))


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    found: dict[tuple, tuple[Any, Any]] = {}

    @wraps(function)
    def of(rows: Any, *args: Any, **named: Any) -> Any:
        key = id(rows), args, tuple(named.items())
        if key not in found:
            found[key] = rows, function(rows, *args, **named)  # with its rows, so that no others get their id
        return found[key][1]

    return of
