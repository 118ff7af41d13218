"""README.md says what the recorded rows say, in as many words as somebody reads."""

import re

import pytest

from labkit import paths
from labkit.workflow import reports

README = (paths.FIGURES.parent / "README.md").read_text("utf-8")


def test_findings_are_those_of_the_recorded_rows():
    assert reports.with_findings(README) == README, "run `labkit record --figures`, which writes them"
    assert README.partition(reports.BEGIN)[2].partition(reports.END)[0].count("\n- **") >= 4


def test_a_readme_without_the_marks_is_refused():
    with pytest.raises(ValueError, match=r"README\.md: no marks"):
        reports.with_findings("# Title\n")


def test_it_is_short_and_its_links_lead_somewhere():
    text = re.sub(r"```.*?```|^    .*$|<!--.*?-->", "", README, flags=re.DOTALL | re.MULTILINE)  # without code
    assert len(text.split()) <= 900
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (paths.FIGURES.parent / link).exists(), link
