"""Rows say by which rule a claim was judged when they were measured; a verdict that rests on earlier ones says so."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from labkit.bench.claim import OWN, Claim, Observation, Observed
from labkit.workflow import recorded


def observe(rows):
    """How many rows there are, as if that were a ratio."""
    count = float(len(rows))
    return Observed(OWN, [Observation("all", count, count, count, 0.0, 3)] if len(rows) else [], "rows")


CLAIM = Claim("fast", "s", "u", "st", "co", "p", "2025-11-20", "rows", observe=observe)


def rows(*rules):
    of_three = [[0, 1, 2] for _ in rules]
    return pd.DataFrame({"rules": [json.dumps(rule) for rule in rules], "gpu": "NVIDIA H100", "run": of_three})


@pytest.mark.parametrize(
    ("rules", "changed"),
    [
        ([{"fast": "present"}] * 2, False),
        ([{"fast": "present", "other": "earlier"}] * 2, False),
        ([{"fast": "earlier"}] * 2, True),
        ([{}] * 2, True),
        ([{"fast": "present"}, {"fast": "earlier"}], True),
        ([], False),
    ],
)
def test_a_verdict_of_rows_that_were_measured_before_its_rule_says_so(rules, changed):
    present = {"present": CLAIM.sha(), "earlier": replace(CLAIM, neutral=2.0).sha()}
    some = rows(*({name: present.get(sha, sha) for name, sha in rule.items()} for rule in rules))
    judgement, error = recorded.judge(CLAIM, some)
    assert not error
    assert recorded.rule_changed(CLAIM, some, judgement) == changed


def test_rows_that_a_verdict_does_not_rest_on_may_be_of_an_earlier_rule():
    claim = replace(CLAIM, observe=of_steps)
    some = rows({"fast": claim.sha()}, {}).assign(op=["step", "other"])
    assert not recorded.rule_changed(claim, some, claim.judge(some))


@pytest.mark.parametrize(("old", "rests"), [("step", True), ("other", False), ("none", False)])
def test_a_verdict_rests_on_the_rows_without_which_it_is_another(old, rests):
    claim, some = replace(CLAIM, observe=of_steps), rows({}, {}, {}).assign(op=["step", "step", "other"])
    assert recorded.rests_on(claim, some, some["op"] == old, claim.judge(some)) == rests


def of_steps(rows):
    return observe(rows[rows["op"] == "step"])


def test_what_could_not_be_judged_has_no_rule_to_change():
    assert not recorded.rule_changed(CLAIM, rows({}), None)


@pytest.mark.parametrize(("processes", "quick"), [(1, True), (2, True), (3, False), (4, False)])
def test_rows_of_fewer_processes_than_a_verdict_wants_give_a_quick_look(processes, quick):
    some = rows({}, {}).assign(run=[list(range(processes)), [0]])
    found = recorded.judgement_of(CLAIM, some)
    assert (found.verdict, found.quick) == ("reproduced", quick)
