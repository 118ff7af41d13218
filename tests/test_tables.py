"""Tables of studies: cases in order, times, pairs and bests, worked by hand."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from labkit.bench import tables
from labkit.bench.spec import CONTROL


def row(variant, us, role="step", op="op", cache="cold", ok=True, evidence=None, size=100, **params):
    """Six samples in two processes; the A/A control repeats `ours`."""
    wobble = np.array([0, 1, 2, 0, 1, 2]) if variant != CONTROL else np.array([1, 0, 1, 1, 2, 1])
    return {
        "op": op, "case": json.dumps(params, sort_keys=True), "variant": variant, "role": role, "cache": cache,
        "mode": "graph", "ok": ok, "samples_ns": list(1000 * us + wobble), "run": [0, 0, 0, 1, 1, 1],
        "block": [0, 1, 2, 0, 1, 2], "options": json.dumps({"repeats": "ours"} if variant == CONTROL else {}),
        "evidence": json.dumps(evidence or {}), "counters": "{}", "floor_bytes": size,
    }  # fmt: skip


def rows(*lines):
    return pd.DataFrame(list(lines), columns=row("a", 1).keys())


def case(n, size=100, **times):
    """Rows of one case: µs by variant, with the control of `ours`."""
    found = [row(name, us, size=size, n=n, model="m") for name, us in times.items()]
    return found + [row(CONTROL, times["ours"], "control", size=size, n=n, model="m")] * ("ours" in times)


TWO = rows(*case(1, 300, ours=10, other=20, third=15), *case(2, 200, ours=10, other=5))


def test_cases_are_those_of_the_operation_and_cache_smallest_first():
    table = pd.concat([TWO, rows(row("ours", 1, op="else", n=3), row("ours", 1, cache="hot", n=4))])
    assert [params["n"] for params, _ in tables.cases(table, "op")] == [2, 1]  # by bytes
    assert [params["n"] for params, _ in tables.cases(table, "op", lambda params, group: params["n"])] == [1, 2]
    assert [params["n"] for params, _ in tables.cases(table, "op", cache="hot")] == [4]
    assert [params["n"] for params, _ in tables.cases(table, "op", n=1, model="m")] == [1]
    assert tables.cases(table, "op", n=1, model="other") == []
    [(params, group)] = tables.cases(table, "op", n=2)
    assert params == {"n": 2, "model": "m"}
    assert set(group["variant"]) == {"ours", "other", CONTROL}


def test_cases_of_no_rows():
    assert tables.cases(rows(), "op") == []


def test_an_empty_table_has_its_columns():
    assert list(tables.frame([], ("a", "b"))) == ["a", "b"]
    assert list(tables.frame([{"c": 1}], ("a", "b"))) == ["c"]
    assert tables.picked({"a": 1, "c": 2}, ("c", "b", "a")) == {"c": 2, "a": 1}


def test_the_lines_with_some_values():
    table = pd.DataFrame({"a": [1, 2, 3], "% b": ["x", "y", "x"]})
    assert list(tables.where(table, a=[1, 3]).index) == [0, 2]
    assert list(tables.where(table, a={2, 3}, **{"% b": "x"}).index) == [2]
    assert tables.where(table).equals(table)
    assert tables.where(table, a=9).empty
    assert tables.where(pd.DataFrame(), a=1).empty  # without its columns
    with pytest.raises(KeyError):
        tables.where(table, c=1)


def test_times_are_of_usable_variants_that_are_no_control():
    group = rows(
        *case(1, ours=10, other=20), row("wrong", 1, ok=False), row("read", 5, "control"), row("top", 4, "ceiling")
    )
    found = tables.timed(group)
    assert {name: round(line["us"]) for name, line in found.items()} == {"ours": 10, "other": 20, "top": 4}
    assert found["top"] == {"variant": "top", "role": "ceiling", "mode": "graph", "us": pytest.approx(4, rel=1e-3)}


def test_facts():
    group = rows(row("ours", 1, evidence={"tiles": 3}), row("wrong", 1, ok=False, evidence={"tiles": 4}))
    assert tables.facts(group) == {"ours": {"tiles": 3}}
    assert tables.facts(group, usable=False) == {"ours": {"tiles": 3}, "wrong": {"tiles": 4}}
    assert tables.facts(group, column="counters") == {"ours": {}}


def test_the_fastest_of_some():
    us = {"a": 3.0, "b": 2.0, "c": 1.0}
    assert tables.fastest(us, ("a", "b", "missing")) == "b"
    assert tables.fastest(us, ("missing",)) is None


def test_a_choice_stays_until_another_is_faster_beyond_what_runs_differ_by():
    us = {"a": 100.0, "b": 99.5, "c": 98.0}
    assert tables.chosen(us) == "c"
    assert tables.chosen(us, "a") == "c"
    assert tables.chosen({"a": 100.0, "b": 99.5}, "a") == "a"
    assert tables.chosen(us, "none") == "c"
    assert tables.chosen({}, "a") is None


def test_pairs_are_those_that_a_case_has():
    found = tables.pairs(rows(*case(1, ours=10, other=20)), [("ours", "other"), ("ours", "missing"), ("other", "ours")])
    assert [(line["variant"], line["against"], line["verdict"]) for line in found] == [
        ("ours", "other", "faster"), ("other", "ours", "slower"),
    ]  # fmt: skip
    assert found[0]["ratio"] == pytest.approx(2, rel=1e-3)
    assert (found[0]["us"], found[0]["against us"]) == (pytest.approx(10, rel=1e-3), pytest.approx(20, rel=1e-3))
    assert found[0]["low"] <= found[0]["ratio"] <= found[0]["high"]
    assert math.isfinite(found[0]["noise"])
    assert tables.pairs(rows(*case(1, ours=10)), [("ours", "other")]) == []


def test_a_row_that_is_not_ok_is_in_no_pair():
    group = rows(*case(1, ours=10), row("other", 20, ok=False, n=1, model="m"))
    assert tables.pairs(group, [("ours", "other")]) == []


def test_the_best_of_some_against_the_best_of_others():
    group = rows(*case(1, ours=10, other=20, third=15))
    found = tables.best_pair(group, ["ours"], ["other", "third", "missing"])
    assert (found["variant"], found["against"]) == ("ours", "third")
    assert found["ratio"] == pytest.approx(1.5, rel=1e-3)
    assert tables.best_pair(group, ["ours"], ["missing"]) == {}
    assert tables.best_pair(group, ["missing"], ["ours"]) == {}


def test_a_comparison_in_every_case_that_has_both():
    found = tables.cases(TWO, "op", lambda params, group: params["n"])
    table = tables.compared(found, "ours", "other", ("n", "T"))
    assert list(table) == ["n", *tables.COMPARED]
    assert list(table["n"]) == [1, 2]
    assert list(table["verdict"]) == ["faster", "slower"]
    assert list(tables.compared(found, "ours", "third", ("n",))["n"]) == [1]
    empty = tables.compared(found, "ours", "missing", ("n",))
    assert empty.empty
    assert list(empty) == ["n", *tables.COMPARED]


def test_against_the_best_in_every_case():
    found = tables.cases(TWO, "op", lambda params, group: params["n"])
    table = tables.against_best(found, ["ours"], iter(["other", "third"]), ("n",))
    assert list(table) == ["n", "variant", "against", *tables.COMPARED]
    assert list(table["against"]) == ["third", "other"]
    assert list(table["ratio"].round(2)) == [1.5, 0.5]
    empty = tables.against_best(found, ["ours"], ["missing"], ("n",))
    assert list(empty) == list(table)
    assert empty.empty


def test_processes_are_the_fewest_of_an_operation():
    table = rows(row("a", 1), row("b", 1), row("c", 1, ok=False), row("d", 1, op="else"))
    table["run"] = [[0, 1, 2], [0, 1], [0], [0]]
    assert tables.processes(table, "op") == 2
    assert tables.processes(table, "no such") == 0


def test_seconds_from_one_tuning_to_the_next():
    table = pd.DataFrame(
        [("tune", "b", 30), ("tune", "a", 0), ("tune", "a", 5), ("gemv", "c", 9), ("tune", "d", 31)],
        columns=["op", "case", "at"],
    )
    table["utc"] = [f"2025-01-01T00:00:{at:02d}+00:00" for at in table["at"]]
    assert list(tables.tuning_seconds(table)) == [30, 1]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("", "not measured on this GPU"),
        ("NotFetched: vllm", "vllm"),
        ("ModuleNotFoundError: No module named 'cutlass'", "not measured: cutlass is not installed"),
        ("wrong: error of out 1.0e+00 (allowed 1e-02)", "wrong: error of out 1.0e+00 (allowed 1e-02)"),
    ],
)
def test_why_a_variant_was_not_measured_is_said_plainly(reason, said):
    rows = pd.DataFrame({"variant": ["theirs", "ours"], "reason": [reason, "something else"]})
    assert tables.why_not(rows, ["theirs"]) == said
