"""Triton's interpreter without what it repeats to no effect; what it computes stays the same."""

from functools import wraps
from typing import Any


def hasten() -> None:
    """For the rest of this process, a launch patches Triton's language once a module, looks up each dtype once, and
    leaves out what only an assertion needs that is not made.

    Triton patches it in every helper that a kernel calls, makes a table of all dtypes for every value, and computes of
    every sum of integers whether it overflows: together that takes longer than the rest. A Triton without these
    functions stays as it is.
    """
    from triton.language import semantic
    from triton.runtime import interpreter

    if _is_plain(interpreter, "_patch_lang"):
        _patch_once(interpreter)
    if _is_plain(interpreter, "_get_np_dtype"):
        _look_up_once(interpreter)
    own = semantic.TritonSemantic
    if _is_plain(own, "binary_op_sanitize_overflow_impl"):
        own.binary_op_sanitize_overflow_impl = _only_to_assert(own.binary_op_sanitize_overflow_impl)


def _is_plain(interpreter: Any, name: str) -> bool:
    """Whether there is such a function, and it is Triton's own still."""
    return hasattr(interpreter, name) and not hasattr(getattr(interpreter, name), "__wrapped__")


def _patch_once(interpreter: Any) -> None:
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    @wraps(patch)
    def patch_once(function: Any) -> Any:
        if (module := function.__module__) in patched:
            return None
        patched.add(module)
        return patch(function)

    @wraps(launch)
    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()  # what a launch has patched, it restores
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _look_up_once(interpreter: Any) -> None:
    look_up = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    @wraps(look_up)
    def look_up_once(dtype: Any) -> Any:
        name = str(dtype)  # those of pointers and blocks have no hash
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    interpreter._get_np_dtype = look_up_once


def _only_to_assert(check: Any) -> Any:
    """Whether an operation overflows is computed for an assertion, which without `debug` is not made."""

    @wraps(check)
    def checked(self: Any, *operands: Any) -> None:
        if self.builder.options.debug:
            check(self, *operands)

    return checked
