"""A claim's rule does not change without its date: `ruled.json` has the dates and hashes, and only grows."""

import json
from pathlib import Path

import pytest

from labkit import registry

FILE = Path(__file__).with_name("ruled.json")
LOCKED = json.loads(FILE.read_text())
CLAIMS = {f"{name}/{claim.id}": claim for name in registry.NOTEBOOKS for claim in registry.load(name).claims}


@pytest.mark.parametrize("name", sorted(CLAIMS))
def test_a_changed_rule_has_a_new_date(name):
    claim, dates = CLAIMS[name], LOCKED.get(name, {})
    assert claim.ruled == max([*dates, claim.ruled]), f"{name}: dated {claim.ruled}, before its last rule {max(dates)}"
    assert dates.get(claim.ruled) == claim.sha(), (
        f"{name}: {FILE.name} has {dates.get(claim.ruled)} for {claim.ruled}, the rule is {claim.sha()} now. If it was "
        f"changed, give it the date of the change (`ruled`) and add that date with its hash; never change a line"
    )


def test_no_claim_is_forgotten():
    assert set(LOCKED) == set(CLAIMS)
