"""Predictions of recorded rows: kept by version, nothing is overwritten, and their errors are those of the rows."""

import math

import pandas as pd
import pytest
import toy_lab

from labkit import paths
from labkit.evidence import predict
from labkit.workflow import predictions, recorded

NOW, NEXT = predict.LATEST, str(int(predict.LATEST) + 1)  # versions of the model


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Rows of study `layers` on a recorded GPU with ceilings; facts of the launches of its first case."""
    lab = toy_lab.Toy(tmp_path)
    lab.enter(monkeypatch)
    lab.measured(lab.rows(), base="data")
    lab.ceilings()
    lab.facts(paths.DATA / recorded.LAUNCHES, [row for row in lab.rows() if row["case"] == lab.rows()[0]["case"]])
    return lab


def newer(monkeypatch, **changes):
    """Another model beside those there are."""
    both = predict.entry(NEXT, predict.parameters() | changes, 2.5, predict.models()[NOW]["fitted"])
    monkeypatch.setattr(predict, "models", lambda: both)


def test_rows_with_known_launches_are_predicted_and_the_others_counted(toy):
    assert predictions.append() == {toy_lab.SLUG: (3, 2)}  # of each case ours, twice, and the control
    table = predictions.read()
    assert list(table) == list(predictions.COLUMNS)
    assert (table["us"] > 0).all()
    assert set(table["version"]) == {NOW}


def test_nothing_is_written_twice(toy):
    predictions.append()
    before = predictions.file().read_bytes()
    assert predictions.append() == {toy_lab.SLUG: (0, 2)}
    assert predictions.file().read_bytes() == before


def test_a_new_version_stands_beside_the_old_one(toy, monkeypatch):
    predictions.append()
    old = predictions.read()
    newer(monkeypatch, start=50.0)
    predictions.append(NEXT)
    table = predictions.read()
    pd.testing.assert_frame_equal(table[table["version"] == NOW].reset_index(drop=True), old)
    assert len(table) == 2 * len(old)
    assert (table[table["version"] == NEXT]["us"].to_numpy() > old["us"].to_numpy()).all()


@pytest.mark.parametrize("what", ["parameters", "launches", "ceilings"])
def test_what_a_version_said_stays_whatever_changes_under_it(toy, monkeypatch, what):
    predictions.append()
    before = predictions.file().read_bytes()
    if what == "parameters":
        changed = {NOW: predict.models()[NOW] | {"parameters": predict.parameters() | {"start": 99.0}}}
        monkeypatch.setattr(predict, "models", lambda: changed)
    elif what == "launches":
        recorded.launches().assign(bytes=1e9).to_parquet(paths.DATA / recorded.LAUNCHES)
    else:
        toy.ceilings(us=9.0)
    assert predictions.append()[toy_lab.SLUG][0] == 0
    assert predictions.file().read_bytes() == before


def test_a_row_of_another_kernel_is_another_row(toy):
    predictions.append()
    recorded.launches().assign(kernel_sha="0" * 12).to_parquet(paths.DATA / recorded.LAUNCHES)
    toy.measured(toy.rows(kernel_sha="0" * 12), base="data")
    assert predictions.append()[toy_lab.SLUG][0] == len(predictions.read()) // 2


def test_it_says_what_it_was_made_from(toy, monkeypatch):
    predictions.append()
    newer(monkeypatch)
    recorded.launches().assign(bytes=1e9).to_parquet(paths.DATA / recorded.LAUNCHES)
    toy.ceilings(us=9.0)
    predictions.append(NEXT)
    table = predictions.read().set_index("version")
    for name in ("launches", "ceilings"):
        assert set(table.loc[NOW, name]).isdisjoint(table.loc[NEXT, name])


def test_rows_that_the_model_was_fitted_to_have_a_fit_without_their_kernel(toy, monkeypatch):
    day = recorded.read(paths.DATA / toy_lab.SLUG / "layers.parquet")["utc"].max()[:10]
    for date, fitted in ((day, True), ("2000-01-01", False)):
        version = str(len(predict.models()) + 1)
        both = predict.entry(version, predict.parameters(), 2.5, {"date": date})
        monkeypatch.setattr(predict, "models", lambda both=both: both)
        predictions.append(version)
        table = predictions.read()
        ours = table[(table["version"] == version) & table["variant"].isin(["a", "b"])]
        assert (ours["left_out_us"].notna() == fitted).all()


def test_an_unknown_version_is_named(toy):
    with pytest.raises(KeyError, match="no model 'none'; known: 1, 2"):
        predictions.append("none")
    assert not predictions.file().exists()


def test_errors_are_those_of_the_rows(toy, monkeypatch):
    both = predict.entry(NEXT, predict.parameters(), 2.5, {"date": "2000-01-01"})
    monkeypatch.setattr(predict, "models", lambda: both)
    monkeypatch.setattr(predict, "LATEST", NEXT)
    predictions.append(NEXT)
    rows = recorded.read(paths.DATA / toy_lab.SLUG / "layers.parquet")
    table = predictions.errors(rows).set_index("prediction")
    us = predictions.read()["us"].iloc[0]
    assert list(table.index) == [f"model {NEXT}", "floor"]
    assert table.loc[f"model {NEXT}", "median error %"] == pytest.approx(100 * (us / 1.05 - 1))
    assert table.loc["floor", "measured / predicted"] == pytest.approx(1.05)  # toy rows: 1.05 µs, a floor of 1 µs
    assert table.loc["floor", "median error %"] == pytest.approx(100 * (1 - 1 / 1.05))


def test_of_rows_without_predictions_nothing_is_said(toy):
    rows = recorded.read(paths.DATA / toy_lab.SLUG / "layers.parquet")
    assert predictions.errors(rows).empty
    assert all(map(math.isnan, predictions.percent_off(pd.Series(dtype=float), pd.Series(dtype=float))))


# ---- what is recorded


def test_every_recorded_row_that_can_be_predicted_is():
    kept, latest = predictions.read(), predict.LATEST
    facts = recorded.launches()
    for gpu in paths.recorded_gpus():
        known = facts[facts["gpu"] == gpu].drop_duplicates(list(predict.KEY))
        assert len(kept[(kept["gpu"] == gpu) & (kept["version"] == latest)]) >= len(known)
    assert not kept.duplicated(list(predictions.KEY)).any()


def test_recorded_errors_are_within_the_bars():
    """Issue 31's: of kernels left out of the fit, median at most 10 %, 90th percentile at most 25 %."""
    for gpu in paths.recorded_gpus():
        files = (paths.DATA / gpu).glob("*.parquet")
        table = pd.concat([predictions.beside(recorded.read(path)) for path in files])
        median, most = predictions.percent_off(table["predicted"], table["measured"])
        assert median <= 10
        assert most <= 25
