"""Triton's key of a kernel, the same whatever was compiled before it.

Triton finds a compiled kernel by a hash of its source, of the functions that it calls and of the `tl.constexpr` globals
that all of them read. Those of a called function it adds before it has looked for them, unless something has asked for
that function's own key (`DependenciesFinder._update_hash`, as of 3.6 and 3.7). So one kernel has a key where another
caller of the function was compiled first, and another key elsewhere: what was compiled ahead is compiled again.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any


def settle(kernel: Any) -> None:
    """Ask for the keys of all functions that a kernel calls, and then for its own.

    Nothing for one that has its key, or was made for Triton's interpreter.
    """
    if getattr(kernel, "hash", "") is not None:
        return
    _settle(kernel, {id(kernel)})


def _settle(function: Any, asked: set[int]) -> None:
    for called in _called(function):
        if called.hash is None and id(called) not in asked:
            asked.add(id(called))
            _settle(called, asked)
    _ = function.cache_key


def _called(function: Any) -> Iterator[Any]:
    """The functions for Triton that one names, itself or as part of a module."""
    from triton.runtime.jit import JITCallable

    names, known = function.fn.__code__.co_names, function.fn.__globals__
    for value in [known[name] for name in names if name in known]:
        parts = [getattr(value, name, None) for name in names] if isinstance(value, ModuleType) else [value]
        yield from (part for part in parts if isinstance(part, JITCallable))
