"""The interpreter that these tests run in does each thing once, and says what Triton's own says."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

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


def test_it_is_hastened_once():
    before = interpreter._patch_lang, interpreter._get_np_dtype, interpreter.GridExecutor.__call__
    hasten()
    assert before == (interpreter._patch_lang, interpreter._get_np_dtype, interpreter.GridExecutor.__call__)


@pytest.mark.parametrize("name", ["int1", "int8", "uint16", "int64", "float16", "bfloat16", "float32", "float8e4nv"])
def test_a_dtype_is_what_triton_says_whatever_was_asked_before(name):
    own, dtype = interpreter._get_np_dtype.__wrapped__, getattr(tl, name)
    for one in (dtype, tl.pointer_type(dtype), tl.block_type(dtype, [4]), tl.block_type(tl.pointer_type(dtype), [4])):
        assert interpreter._get_np_dtype(one) == interpreter._get_np_dtype(one) == own(one)
