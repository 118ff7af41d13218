"""All claims of all studies: each rule can come out every way that it can name, and each text says its direction."""

import re
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import registry
from labkit.bench.claim import ABOVE, BELOW, CODES, OWN, WITHIN, Observation, Observed

CLAIMS = {f"{name}/{claim.id}": claim for name in registry.NOTEBOOKS for claim in registry.load(name).claims}
JUDGED = {name: claim for name, claim in CLAIMS.items() if claim.observe}
EACH = pytest.mark.parametrize("name", JUDGED)
FAR = 1.1  # from the neutral value or the band, as a factor


def values(claim, direction):
    """A value as claimed, and one that is not."""
    low, high = claim.band
    return {
        ABOVE: (claim.neutral * FAR, claim.neutral / FAR),
        BELOW: (claim.neutral / FAR, claim.neutral * FAR),
        WITHIN: ((low * high) ** 0.5, low / FAR),
    }[direction]


def judged(claim, value, code, spread=0.0, noise=1e-3, count=4):
    """The claim's verdict on observations of a value."""
    one = Observation("a case", value, value * (1 - spread), value * (1 + spread), noise, 3)
    gpu = claim.gpus[0] if claim.gpus else "any"
    made = replace(claim, observe=lambda rows: Observed(code, [one] * count, "rows"))
    return made.judge(pd.DataFrame({"gpu": [gpu]}))


@EACH
@pytest.mark.parametrize("code", CODES)
def test_every_rule_comes_out_every_way(name, code):
    claim = JUDGED[name]
    stated = code == OWN and not claim.differs
    good, bad = (judged(claim, value, code) for value in values(claim, claim.direction))
    if claim.at_most:  # a bound refutes alone
        assert (good.direction, good.verdict) == ("unclear", "unclear")
    else:
        assert good.direction == "holds"
        assert good.verdict in (("reproduced", "not reproduced", "unclear") if stated else ("consistent",))
    assert bad.direction == "fails"
    assert bad.verdict == ("not reproduced" if stated else "disagrees")
    hidden = judged(claim, values(claim, claim.direction)[0], code, spread=0.5, noise=0.5)
    assert (hidden.direction, hidden.verdict) == ("unclear", "unclear")
    assert judged(claim, 1.0, code, count=0).verdict == "not testable here"


@pytest.mark.parametrize("name", [name for name, claim in JUDGED.items() if claim.size])
def test_every_published_size_comes_out_every_way(name):
    claim = JUDGED[name]
    size = (claim.size[0] * claim.size[1]) ** 0.5
    ways = ((size, 0.0), (size**3, 0.0), (1.0, 0.0), (size, 0.9))
    found = [judged(claim, value, OWN, spread).size for value, spread in ways]
    refutes = ["unclear", "unclear", "less", "unclear"]
    assert found == (refutes if claim.at_most else ["as published", "more", "less", "unclear"])


@EACH
@given(st.floats(0.05, 20), st.floats(0, 0.4), st.floats(0, 0.4), st.floats(0, 0.4))
def test_more_spread_or_noise_never_turns_a_direction(name, factor, spread, more, noise):
    claim = JUDGED[name]
    value = claim.neutral * factor
    sure, less_sure = (judged(claim, value, OWN, spread + extra, noise + extra).direction for extra in (0.0, more))
    assert less_sure in (sure, "unclear")


TEXTS = [
    (name, part, getattr(claim, part))
    for name, claim in CLAIMS.items()
    for part in ("statement", "condition", "published", "quantity", "differs", "refutes", "note", "untested")
]


@pytest.mark.parametrize(("name", "part", "text"), [one for one in TEXTS if "×" in one[2]])
def test_a_ratio_says_its_direction(name, part, text):
    """ "1.29× faster", and not "×1.29"."""
    assert not re.search(r"×\s?\d", re.sub(r"\d+ × \d+", "", text)), text
    for ratio in re.finditer(r"\d×", text):
        assert re.match(r" (?:to \d+(?:\.\d+)?× )?(?:faster|slower)\b", text[ratio.end() :]), text


@pytest.mark.parametrize(("name", "part", "text"), [one for one in TEXTS if one[1] == "published" and "%" in one[2]])
def test_a_published_percentage_says_what_it_is_of(name, part, text):
    assert re.search(r"% (?:faster|slower|tokens a second|of )", text) or JUDGED[name].percent, text
