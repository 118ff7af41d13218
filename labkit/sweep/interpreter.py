"""Triton's interpreter without what it repeats to no effect; and with numbers in bf16."""

from functools import wraps
from typing import Any

import numpy as np


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


def with_bf16() -> None:
    """For the rest of this process, bf16 is rounded to the nearest and calculated with.

    Triton's interpreter keeps it as bits: it cuts them off, and adds and multiplies them as whole numbers.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot, binary = builder.cast_impl, builder.create_dot, builder.binary_op

    def number(x: Any) -> Any:
        return handle(_from_bf16(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def rounded(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) == (tl.float32, tl.bfloat16):
            return handle(_to_bf16(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    def of_numbers(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        found = binary(self, number(lhs), number(rhs), op)
        bf16 = lhs.dtype.scalar == tl.bfloat16 and found.data.dtype == np.float32
        return handle(_to_bf16(found.data), tl.bfloat16) if bf16 else found

    builder.cast_impl, builder.binary_op = rounded, of_numbers
    builder.create_dot = lambda self, a, b, *rest: dot(self, number(a), number(b), *rest)


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """To the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    found = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), found)
