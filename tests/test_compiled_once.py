"""What is kept of compiled kernels is of the very kernels that are asked about."""

import json

import compiled_once
import kernels_for_tests
import pytest
import triton
import triton.language as tl

from labkit.evidence import compiled
from labkit.kernels.launch import Launch

CHANGES = {
    "constant": {"block": 64},
    "dtype": {"dtype": "float16"},
    "alignment": {"offset": 1},
    "divisibility": {"n": 4097},
    "option": {"num_warps": 2},
}


def asked_of(launch, capability):
    """What is asked of a kernel."""
    asked_of.times += 1
    return {"name": launch.kernel.fn.__name__}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Keeps nothing yet."""
    monkeypatch.setattr(compiled_once, "FILE", tmp_path / "kept.json")
    monkeypatch.setenv(compiled_once.FOLDER, str(tmp_path / "asked"))
    monkeypatch.setattr(asked_of, "times", 0, raising=False)
    compiled_once._kept.cache_clear()
    yield tmp_path
    compiled_once._kept.cache_clear()


def keep(folder):
    compiled_once.keep(folder / "asked")
    compiled_once._kept.cache_clear()


def test_the_same_kernel_has_the_same_key_whatever_its_tensors_hold():
    one, other = kernels_for_tests.copy(), kernels_for_tests.copy(n=8192)
    assert compiled_once.key_of(one, 90) == compiled_once.key_of(other, 90)
    compiled.build(one, 90)  # Triton then has it in its memory
    assert compiled_once.key_of(one, 90) == compiled_once.key_of(other, 90)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_kernel_has_another(change):
    one, other = kernels_for_tests.copy(), kernels_for_tests.copy(**change)
    assert compiled_once.key_of(one, 90) != compiled_once.key_of(other, 90)


def test_for_another_target_or_compiler_it_is_another(monkeypatch):
    launch = kernels_for_tests.copy()
    before = compiled_once.key_of(launch, 90)
    assert compiled_once.key_of(launch, 80) != before
    with monkeypatch.context() as changed:
        changed.setenv("TRITON_PTXAS_PATH", "another")
        assert compiled_once.key_of(launch, 90) != before
        changed.delenv("TRITON_PTXAS_PATH")  # Triton's own, which the lab names
        assert compiled_once.key_of(launch, 90) == before
    monkeypatch.setattr(triton, "__version__", "99")
    assert compiled_once.key_of(launch, 90) != before


@triton.jit
def _one(x):
    return x + 1


@triton.jit
def _two(x):
    return x + 2


@triton.jit
def _kernel(x, F: tl.constexpr):
    tl.store(x, F(tl.load(x)))


def test_so_it_is_with_what_the_kernel_calls():
    x = kernels_for_tests.copy().args["x"]
    one, two = (compiled_once.key_of(Launch(_kernel, (1,), {"x": x, "F": f}), 90) for f in (_one, _two))
    assert one != two


def test_what_is_kept_is_not_asked_again_but_for_some(kept, monkeypatch):
    launch = kernels_for_tests.copy()
    monkeypatch.setattr(compiled_once, "EVERY", 1 << 17)  # only a key that ends with zeros
    for times in (1, 1):
        assert compiled_once.known(launch, 90, asked_of) == {"name": "_copy_kernel"}
        assert asked_of.times == times
        keep(kept)
    compiled_once.known(kernels_for_tests.copy(block=64), 90, asked_of)
    assert asked_of.times == 2


def also_asked_of(launch, capability):
    return {"warps": launch.options["num_warps"]}


def test_what_is_kept_answers_its_own_question_alone(kept):
    launch = kernels_for_tests.copy(num_warps=2)
    compiled_once.known(launch, 90, asked_of)
    keep(kept)
    assert compiled_once.known(launch, 90, also_asked_of) == {"warps": 2}


def test_what_is_kept_and_wrong_fails(kept, monkeypatch):
    launch = kernels_for_tests.copy()
    monkeypatch.setattr(compiled_once, "EVERY", 1)
    compiled_once.known(launch, 90, asked_of)
    keep(kept)
    compiled_once.known(launch, 90, asked_of)
    compiled_once.FILE.write_text(json.dumps({key: {} for key in json.loads(compiled_once.FILE.read_text())}))
    compiled_once._kept.cache_clear()
    with pytest.raises(AssertionError):
        compiled_once.known(launch, 90, asked_of)
