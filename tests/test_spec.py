"""What studies are declared with: functions imported when they are called, variants, rules of parameters."""

import pytest

from labkit.bench.spec import integer, lazy, list_of, one_of, variant


def test_a_function_is_imported_when_it_is_called():
    assert lazy("math:hypot")(3, 4) == 5
    later = lazy("no.such.module:function")
    with pytest.raises(ModuleNotFoundError):
        later()
    for target in ("math", "math:", ":hypot"):
        with pytest.raises(ValueError, match="allowed: module:function"):
            lazy(target)


def test_a_variant_hands_its_options_to_its_trial():
    made = variant("V", "step", "builtins:dict", {"tile": 8}, mode="eager")
    with pytest.raises(TypeError):  # (case, device, sets, seed) are handed on, which this function does not take
        made.prepare(None, "cpu", 1, 0)
    asked = variant("V", "step", f"{__name__}:asked", {"tile": 8})
    assert asked.prepare("case", "cpu", 2, 7) == ("case", "cpu", 2, 7, 8)
    assert (made.source, made.options, made.caches, made.mode) == ("builtins:dict", {"tile": 8}, ("cold",), "eager")


def test_what_runs_and_what_is_shown_may_be_others():
    made = variant("V", "step", f"{__name__}:asked", {"tile": 8}, source="math:exp", shown={"BV": 8})
    assert (made.source, made.options) == ("math:exp", {"BV": 8})
    assert made.prepare("case", "cpu", 2, 7)[-1] == 8


def asked(case, device, sets, seed, tile):
    return case, device, sets, seed, tile


# rules of parameters


def test_a_list_may_be_empty_if_that_is_said():
    rule, may_be_empty = list_of(integer(1, 9)), list_of(integer(1, 9), empty=True)
    assert rule([]) == "a list with at least one item and none twice"
    assert may_be_empty([]) is None
    for value in ([1, 9], [3]):
        assert rule(value) is may_be_empty(value) is None
    for value in ([1, 1], 1, (), None, "", [0], [True]):  # else the two are the same
        assert rule(value) == may_be_empty(value) is not None
    assert list_of(one_of("a", "b"), empty=True)(["c"]) == "a list, each item one of a, b"
