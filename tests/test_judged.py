"""Claims and findings are made once for the page and the index, and anew where a page shows a part of the rows."""

import pytest
import rows as made
from test_lab import folders, html, layout, replayed  # noqa: F401 (fixtures)

from labkit import paths
from labkit.report import verdicts
from labkit.workflow import recorded, reports

PART = made.LAYOUT | {"batches": [64]}


@pytest.fixture
def judgings(folders, monkeypatch):  # noqa: F811
    """The ids of the claims that are judged, in order; nothing is kept from elsewhere."""
    monkeypatch.setattr(paths, "CACHE", folders / "cache")
    done, judge, told = [], recorded.judge, verdicts.told
    monkeypatch.setattr(recorded, "judge", lambda claim, rows: (done.append(claim.id), judge(claim, rows))[1])
    monkeypatch.setattr(verdicts, "told", lambda *given: (done.append("told"), told(*given))[1])
    return done


def index_of(study):
    found, _ = reports._readable([study])
    entries = {study: reports._entry(study, paths.REPORTS / "none.ipynb", found[study], "")}
    claims = reports._claims(found, {}, entries, lambda line: None)
    return claims, reports._findings(found, entries)


def test_the_index_has_what_the_page_judged(judgings, layout):  # noqa: F811
    page = replayed("state_layout", made.LAYOUT, layout)
    cards, answer = html(page.claims()), html(page.answer())
    assert set(judgings) > {"told"}
    judgings.clear()
    claims, (findings, problems) = index_of("state_layout")
    assert judgings == problems == []
    for row in claims:
        [result] = row.results.values()
        assert str(result.why.html) in cards
    assert findings[0].conclusion.html in answer


def test_the_index_is_made_ahead_of_the_recorded_rows(judgings, layout, folders):  # noqa: F811
    replayed("state_layout", made.LAYOUT, layout)  # puts the rows into data/
    assert reports.judge_recorded() == len(list((folders / "data").glob("*/*.parquet"))) == 1
    assert set(judgings) > {"told"}
    judgings.clear()
    claims, (findings, problems) = index_of("state_layout")
    assert judgings == problems == []
    assert claims
    assert findings


def test_a_page_of_a_part_is_judged_by_that_part(judgings, layout):  # noqa: F811
    replayed("state_layout", made.LAYOUT, layout).claims()
    judgings.clear()
    for _ in range(2):
        replayed("state_layout", PART, layout).claims()
    assert len(judgings) >= 2 * len(index_of("state_layout")[0])


def test_new_rows_are_judged_anew(judgings, layout):  # noqa: F811
    replayed("state_layout", made.LAYOUT, layout).claims()
    judgings.clear()
    replayed("state_layout", made.LAYOUT, layout[layout["variant"] != "ours VK"]).claims()
    assert judgings
