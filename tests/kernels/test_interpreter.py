"""The interpreter that these tests run in does each thing once, and says what Triton's own says."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core

from labkit.sweep.interpreter import hasten

interpreter = pytest.importorskip("triton.runtime.interpreter")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")


@triton.jit
def more(x):
    return x + 1


@triton.jit
def three_more(out, x, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    for _ in range(3):
        value = more(value)
    tl.store(out + at, value)


@triton.jit
def halves(N: tl.constexpr):
    return tl.full([N], 0.5, tl.float32)


@triton.jit
def some_halves(out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), halves(N))


def test_after_a_launch_a_helper_is_called_as_before():
    out = torch.zeros(4)
    some_halves[(1,)](out, N=4)
    assert halves(4).handle.data.tolist() == out.tolist() == [0.5] * 4


def test_a_launch_patches_the_language_once_a_module_and_the_next_one_anew(monkeypatch):
    patched, patch = [], interpreter._patch_lang
    monkeypatch.setattr(
        interpreter, "_patch_lang", lambda function: patched.append(function.__module__) or patch(function)
    )
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", interpreter.GridExecutor.__call__)
    hasten()
    x = torch.arange(4.0)
    for launches in (1, 2):
        out = torch.zeros(4)
        three_more[(1,)](out, x, N=4)
        assert out.tolist() == [3.0, 4.0, 5.0, 6.0]
        assert patched == [__name__] * launches


@triton.jit
def product(out, a, b):
    tl.store(out, tl.load(a) * tl.load(b))


def test_an_overflow_is_computed_only_where_it_is_asserted(monkeypatch):
    own = triton.language.semantic.TritonSemantic
    compared, less_equal = [], own.less_equal
    monkeypatch.setattr(own, "less_equal", lambda self, *given: (compared.append(given), less_equal(self, *given))[1])
    big, out = torch.tensor([2**30], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    product[(1,)](out, big, big + 1)
    assert (out.item(), compared) == (2**30, [])
    options = interpreter.interpreter_builder.options
    monkeypatch.setattr(interpreter.interpreter_builder, "options", replace(options, debug=True))
    with pytest.raises(Exception, match="overflow detected"):
        product[(1,)](out, big, big + 1)


def functions():
    own = triton.language.semantic.TritonSemantic
    of_values = core.block_type.__init__, core.tensor.__init__, core._unwrap_if_constexpr, own.broadcast_impl_value
    return (interpreter._patch_lang, interpreter._get_np_dtype, interpreter.GridExecutor.__call__, *of_values)


def test_it_is_hastened_once():
    before = functions()
    hasten()
    assert before == functions()


ELEMENTS = [
    tl.int8, tl.bfloat16, tl.float32, tl.pointer_type(tl.float32), tl.pointer_type(tl.float32, const=True),
    tl.pointer_type(tl.float32, 3), tl.pointer_type(tl.pointer_type(tl.float32)),
]  # fmt: skip


def own_type(element, shape):
    """As Triton itself makes it."""
    found = core.block_type.__new__(core.block_type)
    core.block_type.__init__.__wrapped__(found, element, shape)
    return found


@pytest.mark.parametrize("shape", [[1], [4], [4, 1], [tl.constexpr(2), 8], tl.tuple([16, 2])], ids=repr)
def test_types_and_values_are_what_triton_makes_of_their_shape(shape):
    for element in ELEMENTS * 2:  # also those that were made before
        found, expected = core.block_type(element, shape), own_type(element, shape)
        assert found == expected
        assert (found.name, found.numel, found.element_ty) == (expected.name, expected.numel, element)
        value, own = core.tensor(None, found), core.tensor.__new__(core.tensor)
        core.tensor.__init__.__wrapped__(own, None, expected)
        assert vars(value).keys() == vars(own).keys()
        assert (str(value.shape), value.numel, value.dtype) == (str(own.shape), own.numel, own.dtype)
        assert value.type is found
    scalar = core.tensor(None, tl.float32)
    assert (len(scalar.shape), scalar.numel.value, scalar.dtype) == (0, 1, tl.float32)


def scalar():
    """A value that is known in a launch alone."""
    return core.tensor(None, tl.int32)


@pytest.mark.parametrize("shape", [[], [3], [2.0], (2,), [scalar()]], ids=repr)
def test_a_wrong_shape_is_refused_every_time_as_triton_does(shape):
    core.block_type(tl.int8, [2])  # of which a size is as large
    with pytest.raises((AssertionError, TypeError, ValueError)) as own:
        own_type(tl.int8, shape)
    for _ in range(2):
        with pytest.raises(type(own.value)) as raised:
            core.block_type(tl.int8, shape)
        assert str(raised.value) == str(own.value)


@pytest.mark.parametrize(
    "value",
    [tl.constexpr(3), 3, True, "a", None, tl.int8, [tl.constexpr(1), 2], (tl.constexpr(1),), tl.tuple([1])],
    ids=repr,
)
def test_a_constant_is_unwrapped_and_nothing_else(value):
    assert repr(core._unwrap_if_constexpr(value)) == repr(core._unwrap_if_constexpr.__wrapped__(value))


@triton.jit
def outer_sum(out, a, b, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i[:, None] * N + i[None, :], x[:, None] + y[None, :] + (x * y)[None, :] + 1)


def test_values_of_one_shape_and_of_several_are_broadcast():
    a, b, out = torch.arange(4.0), torch.arange(4.0) * 10, torch.zeros(4, 4)
    outer_sum[(1,)](out, a, b, N=4)
    assert torch.equal(out, a[:, None] + b + a * b + 1)


@pytest.mark.parametrize("name", ["int1", "int8", "uint16", "int64", "float16", "bfloat16", "float32", "float8e4nv"])
def test_a_dtype_is_what_triton_says_whatever_was_asked_before(name):
    own, dtype = interpreter._get_np_dtype.__wrapped__, getattr(tl, name)
    for one in (dtype, tl.pointer_type(dtype), tl.block_type(dtype, [4]), tl.block_type(tl.pointer_type(dtype), [4])):
        assert interpreter._get_np_dtype(one) == interpreter._get_np_dtype(one) == own(one)
