"""The judge of all claims: every word and verdict that it can name comes out of some observations, and of no others."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.bench import claim as claims
from labkit.bench.claim import ABOVE, BELOW, ESTIMATE, OURS, OWN, WITHIN, Claim, Observation, Observed

ROWS = pd.DataFrame({"gpu": ["NVIDIA H100 80GB HBM3"]})


def observed(*ratios, noise=0.002, spread=0.005, runs=3):
    """Observations of these ratios."""
    return [Observation(f"case {i}", r, r * (1 - spread), r * (1 + spread), noise, runs) for i, r in enumerate(ratios)]


def judged(observations, code=OWN, **rule):
    def observe(rows):
        return Observed(code, observations, "rows of something")

    known = {"id": "c", "source": "s", "url": "u", "statement": "st", "condition": "co", "published": "p"}
    made = Claim(**known, ruled="2026-11-25", quantity="time before ÷ after", observe=observe, **rule)
    return made.judge(ROWS)


@pytest.mark.parametrize(
    ("ratio", "direction", "word"),
    [
        (1.2, ABOVE, "holds"), (0.8, ABOVE, "fails"), (1.0, ABOVE, "fails"), (1.006, ABOVE, "unclear"),
        (0.8, BELOW, "holds"), (1.2, BELOW, "fails"), (1.0, BELOW, "fails"),
        (1.0, WITHIN, "holds"), (1.2, WITHIN, "fails"), (0.8, WITHIN, "fails"), (1.01, WITHIN, "unclear"),
    ],
)  # fmt: skip
def test_direction_of_one_observation(ratio, direction, word):
    assert judged(observed(ratio), direction=direction).direction == word


def test_noise_hides_a_difference_and_so_does_a_wide_interval():
    assert judged(observed(1.05, noise=0.002)).direction == "holds"
    assert judged(observed(1.05, noise=0.03)).direction == "unclear"  # beyond ±1 %: three times as much is asked for
    assert judged(observed(1.12, noise=0.03)).direction == "holds"
    assert judged(observed(1.05, spread=0.06)).direction == "unclear"
    assert judged(observed(1.05, noise=float("nan"))).direction == "unclear"  # nobody knows how much noise there was


def test_a_neutral_value_other_than_one():
    shares = {"neutral": 0.5, "percent": True}
    assert judged(observed(0.7, noise=0), **shares).direction == "holds"
    assert judged(observed(0.4, noise=0), **shares).direction == "fails"
    assert judged(observed(0.7, noise=0), **shares).measured.startswith("70 % [70 %, 70 %]")


@pytest.mark.parametrize(
    ("ratios", "direction"),
    [
        ([1.2] * 3 + [0.8], "holds"), ([1.2] * 2 + [0.8] * 2, "unclear"), ([1.2] + [0.8] * 3, "fails"),
        ([1.2] * 2 + [1.006] * 2, "holds"), ([1.2] + [1.006] * 2, "unclear"), ([1.006], "unclear"),
    ],
)  # fmt: skip
def test_direction_of_several(ratios, direction):
    assert judged(observed(*ratios)).direction == direction


@pytest.mark.parametrize(
    ("ratio", "size"),
    [(1.08, "as published"), (1.065, "as published"), (1.12, "more"), (1.04, "less"), (0.9, "less")],
)
def test_size_of_a_gain_of_eight_percent(ratio, size):
    assert judged(observed(ratio, spread=0.001), size=(1.075, 1.085)).size == size


def test_size_of_what_is_published_below_one_counts_on_that_side():
    found = {r: judged(observed(r, spread=0.001), direction=BELOW, size=(0.5, 0.5)).size for r in (0.5, 0.2, 0.8, 1.5)}
    assert found == {0.5: "as published", 0.2: "more", 0.8: "less", 1.5: "less"}


def test_size_of_a_case_of_its_own_and_of_cases_that_do_not_agree():
    two = [replace(one, size=(one.mid, one.mid)) for one in observed(1.2, 1.5)]
    assert judged(two).size == "as published"
    assert judged([*two, *observed(2, 3)]).size == "as published"  # the others have no published figure
    assert judged(observed(1.2, 2.0), size=(1.2, 1.2)).size == "unclear"
    assert judged(observed(1.2)).size == "not comparable"


@pytest.mark.parametrize(
    ("spread", "noise", "size"),
    [
        (0.03, 0.002, "as published"), (0.3, 0.002, "unclear"), (0.03, 0.2, "unclear"),
        (0.03, float("nan"), "unclear"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("code", [OWN, OURS])
def test_a_wide_interval_or_noise_makes_nothing_as_published(spread, noise, size, code):
    found = judged(observed(2.7, spread=spread, noise=noise), code, size=(2.75, 2.76))
    assert found.size == size
    if size == "unclear" and code == OWN:  # the direction is clear, but not what was published
        assert found.verdict == "unclear"


def test_far_beyond_what_was_published_a_wide_interval_is_clear_too():
    found = {r: judged(observed(r, spread=0.3), size=(2.75, 2.76)).size for r in (1.2, 2.7, 9.0)}
    assert found == {1.2: "less", 2.7: "unclear", 9.0: "more"}


@pytest.mark.parametrize(
    ("ratio", "verdict", "size"),
    [(1.2, "unclear", "unclear"), (2.0, "unclear", "unclear"), (1.03, "unclear", "less"), (0.8, "disagrees", "less")],
)
def test_a_bound_from_above_refutes_and_bears_nothing_out(ratio, verdict, size):
    found = judged(observed(ratio), ESTIMATE, at_most=True, size=(1.2, 1.2))
    assert (found.verdict, found.size) == (verdict, size)


STATED = {"gpus": ("H100",), "size": (1.2, 1.2)}


@pytest.mark.parametrize(
    ("ratio", "code", "rule", "verdict"),
    [
        (1.2, OWN, STATED, "reproduced"),
        (1.2, OWN, {}, "reproduced"),  # which states neither GPU nor figure
        (0.8, OWN, STATED, "not reproduced"),
        (2.0, OWN, STATED, "not reproduced"),  # the direction alone is not what was published
        (1.2, OURS, STATED, "consistent"),
        (2.0, OURS, STATED, "consistent"),
        (1.2, ESTIMATE, STATED, "consistent"),
        (0.8, OURS, STATED, "disagrees"),
        (0.8, ESTIMATE, {}, "disagrees"),
        (1.2, OWN, {"gpus": ("A100",)}, "consistent"),
        (0.8, OWN, {"gpus": ("A100",)}, "disagrees"),
        (1.2, OWN, {"differs": "a part of the step"}, "consistent"),
        (1.006, OWN, STATED, "unclear"),
        (1.006, OURS, {}, "unclear"),
        (1.275, OWN, STATED, "unclear"),  # as published or more
    ],
)
def test_verdict(ratio, code, rule, verdict):
    found = judged(observed(ratio), code, **rule)
    assert found.verdict == verdict
    assert found.code == code
    assert code in found.why


def test_too_few_processes_or_nothing_observed_say_what_is_needed():
    for observations in ([], observed(1.2, runs=2), observed(float("nan"))):
        found = judged(observations)
        assert (found.verdict, found.why) == ("not testable here", "needs rows of something in 3 processes")


def test_a_claim_that_nothing_here_can_test_says_why():
    made = Claim("c", "s", "u", "st", "co", "p", "2026-11-25", untested="its kernels are in no release")
    assert made.judge(ROWS) == claims.untestable("its kernels are in no release")


def test_what_is_said():
    found = judged(observed(1.2), OURS, gpus=("A100",), size=(1.3, 1.3), note="Read this")
    assert found.measured == "1.20× [1.19, 1.21]: time before ÷ after"
    assert found.why == "as claimed; size: less; our version of the code; another GPU than its A100; Read this"
    found = judged(observed(1.2, 1.3))
    assert found.measured == "case 0 1.20× [1.19, 1.21]; case 1 1.30× [1.29, 1.31]: time before ÷ after"
    assert judged(observed(1.2, spread=0)).measured == "1.20×: time before ÷ after"  # counted, and not timed
    found = judged(observed(1.2, 1.3, 1.4, 1.006))
    assert found.measured == "1.01 to 1.40× in 4 cases: time before ÷ after"
    assert found.why.startswith("as claimed in 3 of 4 cases, unclear in 1; ")


def test_a_ratio_of_times_says_which_is_faster():
    def shown(*mids, **rest):
        return judged(observed(*mids, **rest), faster=True).measured

    assert shown(1.2) == "1.20× faster [1.19, 1.21]: time before ÷ after"
    assert shown(0.8, spread=0.05) == "1.25× slower [1.19, 1.32]: time before ÷ after"
    assert shown(1.002) == "as fast [1.00, 1.01]: time before ÷ after"
    assert shown(0.5, 0.6, 0.7, 0.8) == "1.25× to 2.00× slower in 4 cases: time before ÷ after"
    assert shown(0.8, 1.1, 1.2, 1.3) == "1.25× slower to 1.30× faster in 4 cases: time before ÷ after"


RATIOS = st.lists(st.floats(0.2, 5), min_size=1, max_size=9)


@given(RATIOS, st.sampled_from([ABOVE, BELOW, WITHIN]), st.floats(0, 0.2), st.sampled_from(claims.CODES))
def test_words_are_always_of_their_lists(ratios, direction, spread, code):
    found = judged(observed(*ratios, spread=spread), code, direction=direction, size=(1.2, 1.3))
    assert found.direction in claims.DIRECTIONS
    assert found.size in claims.SIZES
    assert found.verdict in claims.VERDICTS


@given(RATIOS, st.floats(0, 0.2))
def test_what_holds_for_one_direction_never_holds_for_the_other(ratios, spread):
    found = {judged(observed(*ratios, spread=spread), direction=side).direction for side in (ABOVE, BELOW)}
    assert found != {"holds"}


SIZED = {"size": (1.2, 1.3)}


@given(st.floats(0.2, 5), st.floats(0, 0.1), st.floats(0, 0.1))
def test_more_spread_takes_a_size_away_and_gives_none(ratio, less, more):
    tight, wide = (judged(observed(ratio, spread=spread), **SIZED).size for spread in (less, less + more))
    assert wide in (tight, "unclear")


@given(st.lists(st.floats(0.2, 5), min_size=2, max_size=2), st.floats(0, 0.1))
def test_sizes_come_in_the_order_of_the_ratios(ratios, spread):
    order = ["less", "as published", "more"]
    sizes = [judged(observed(one, spread=spread), **SIZED).size for one in sorted(ratios)]
    places = [order.index(size) for size in sizes if size != "unclear"]
    assert places == sorted(places)


@given(RATIOS)
def test_the_order_of_cases_does_not_count(ratios):
    several = {judged(observed(*some)).verdict for some in itertools.islice(itertools.permutations(ratios), 20)}
    assert len(several) == 1


def test_every_verdict_direction_and_size_can_come_out():
    """None of the words is one that nothing leads to."""
    rules = [{}, STATED, {"gpus": ("A100",)}, {"direction": BELOW, **STATED}]
    found = [
        judged(observed(ratio, runs=runs), code, **rule)
        for ratio in (0.5, 1.006, 1.2, 1.275, 2)
        for code in claims.CODES
        for rule in rules
        for runs in (1, 3)
    ]
    assert {one.verdict for one in found} == set(claims.VERDICTS)
    assert {one.direction for one in found} == {*claims.DIRECTIONS, ""}
    assert {one.size for one in found} == {*claims.SIZES, ""}


def observe_nothing(rows):
    return Observed(OURS, [], "rows")


def test_the_rule_has_a_hash_of_what_decides_alone(monkeypatch):
    made = Claim("c", "s", "u", "st", "co", "p", "2026-11-25", observe=observe_nothing)
    monkeypatch.setattr(claims, "sha_within", lambda module, name: (module, name))
    for shown in ({"statement": "other words"}, {"note": "n"}, {"quantity": "q"}):
        assert replace(made, **shown).sha() == made.sha()
    decides = ({"direction": BELOW}, {"neutral": 0.5}, {"size": (1, 2)}, {"gpus": ("A100",)}, {"differs": "all"})
    for rule in (*decides, {"band": (0.9, 1.1)}, {"observe": None}, {"ruled": "2026-12-01"}):
        assert replace(made, **rule).sha() != made.sha()
    before, sized, apart = made.sha(), replace(made, size=(1, 2)).sha(), replace(made, sized=True).sha()
    assert len({before, sized, apart, replace(made, at_most=True).sha()}) == 4
    monkeypatch.setattr(claims, "SIZED_BY", "the middle alone")
    assert made.sha() == before  # which has none
    assert sized != replace(made, size=(1, 2)).sha()
    assert apart != replace(made, sized=True).sha()
    monkeypatch.setattr(claims, "TOLERANCE", 1.5)
    assert made.sha() != before


def test_lines_of_a_table_are_observations():
    line = {"ratio": 1.2, "low": 1.1, "high": 1.3, "noise": 0.01, "runs": 3, "batch": 8}
    [one] = claims.of_table(pd.DataFrame([line]), lambda line: f"batch {line['batch']}")
    assert one == Observation("batch 8", 1.2, 1.1, 1.3, 0.01, 3)
    interval = SimpleNamespace(mid=1.2, low=1.1, high=1.3, runs=3)
    assert claims.of_interval("batch 8", interval, 0.01) == one
