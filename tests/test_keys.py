"""A kernel's key for Triton does not depend on what was compiled before it."""

import importlib
import pkgutil

import pytest
from triton.runtime.jit import JITCallable

import labkit.kernels
from labkit.kernels import keys


@pytest.fixture
def functions():
    """All functions for Triton of the lab's library, by name, without their keys; afterwards none has one either."""
    found = {}
    for module in pkgutil.walk_packages(labkit.kernels.__path__, "labkit.kernels."):
        values = vars(importlib.import_module(module.name)).items()
        found |= {f"{module.name}.{name}": value for name, value in values if isinstance(value, JITCallable)}
    assert len(found) > 100
    forget(found)
    yield found
    forget(found)


def forget(functions):
    for function in functions.values():
        function.hash, function.used_global_vals = None, {}


def asked(functions, order, first):
    """The keys, when they are asked for in an order, after something was done with each."""
    forget(functions)
    for name in order:
        first(functions[name])
        assert functions[name].cache_key
    return {name: function.cache_key for name, function in functions.items()}


@pytest.mark.parametrize("order", [sorted, lambda names: sorted(names, reverse=True)], ids=["in order", "reversed"])
def test_a_key_is_the_same_in_any_order(functions, order):
    assert asked(functions, order(functions), keys.settle) == asked(functions, list(functions), keys.settle)


def test_triton_alone_gives_some_another(functions):
    """Once this fails, `labkit.kernels.keys` is of no more use."""
    one, other = (asked(functions, order, id) for order in (sorted(functions), sorted(functions, reverse=True)))
    assert {name for name in one if one[name] != other[name]}


def test_what_is_asked_for_again_stays(functions):
    name = max(functions, key=lambda name: len(functions[name].src))
    keys.settle(functions[name])
    key = functions[name].cache_key
    keys.settle(functions[name])
    assert functions[name].cache_key == key


def test_what_is_no_kernel_for_the_compiler_is_left_alone():
    keys.settle(print)
    keys.settle(None)
