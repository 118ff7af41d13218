"""The interpreter that these tests run in does each thing once, and says what Triton's own says."""

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


def test_it_is_hastened_once():
    before = interpreter._patch_lang, interpreter._get_np_dtype, interpreter.GridExecutor.__call__
    hasten()
    assert before == (interpreter._patch_lang, interpreter._get_np_dtype, interpreter.GridExecutor.__call__)


@pytest.mark.parametrize("name", ["int1", "int8", "uint16", "int64", "float16", "bfloat16", "float32", "float8e4nv"])
def test_a_dtype_is_what_triton_says_whatever_was_asked_before(name):
    own, dtype = interpreter._get_np_dtype.__wrapped__, getattr(tl, name)
    for one in (dtype, tl.pointer_type(dtype), tl.block_type(dtype, [4]), tl.block_type(tl.pointer_type(dtype), [4])):
        assert interpreter._get_np_dtype(one) == interpreter._get_np_dtype(one) == own(one)
