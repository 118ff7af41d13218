"""Triton's interpreter without what it repeats to no effect; and with numbers in bf16."""

from functools import wraps
from typing import Any

import numpy as np


def hasten() -> None:
    """For the rest of this process, Triton's interpreter does nothing twice whose outcome is known.

    Of itself it patches its language anew in every helper that a kernel calls; makes a table of all dtypes for every
    value; checks and wraps every size of every value's shape; looks for what is to be broadcast in values of the same
    shape; and computes of every sum of integers whether it overflows, where nothing asserts it. Together that takes
    three quarters of the time. A Triton without these functions stays as it is.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    if _is_plain(interpreter, "_patch_lang"):
        _patch_once(interpreter)
    if _is_plain(interpreter, "_get_np_dtype"):
        _look_up_once(interpreter)
    if _is_plain(core.block_type, "__init__") and _is_plain(core.tensor, "__init__"):
        _take_apart_once(core)
    if _is_plain(core, "_unwrap_if_constexpr"):
        _tell_plain_values(core)
    own = semantic.TritonSemantic
    if _is_plain(own, "broadcast_impl_value"):
        own.broadcast_impl_value = _only_if_unlike(own.broadcast_impl_value)
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
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()  # what a launch has patched, it restores

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


def _take_apart_once(core: Any) -> None:
    type_of, tensor_of = core.block_type.__init__, core.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}

    def sizes_of(shape: Any) -> tuple[int, ...]:
        """Of a shape that is one; else empty: Triton says what is wrong."""
        given = shape.values if isinstance(shape, core.tuple) else shape if isinstance(shape, list) else ()
        sizes = tuple([size if type(size) is int else getattr(size, "value", None) for size in given])
        return sizes if all([type(size) is int for size in sizes]) else ()

    @wraps(type_of)
    def type_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = sizes_of(shape) if isinstance(element_ty, core.dtype) else ()
        if not sizes:
            return type_of(self, element_ty, shape)
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        if key not in types:
            type_of(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    @wraps(tensor_of)
    def tensor_once(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in tensors:
            tensor_of(self, handle, type)
            tensors[key] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = type_once, tensor_once


def _tell_plain_values(core: Any) -> None:
    unwrap = core._unwrap_if_constexpr
    plain = {bool, int, float, str, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor}

    @wraps(unwrap)
    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrapped


def _only_if_unlike(broadcast: Any) -> Any:
    """Two values are made as large as each other only if they are not."""

    @wraps(broadcast)
    def alike(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return left, right
        return broadcast(self, left, right)

    return alike


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
