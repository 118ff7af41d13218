"""Stored predictions: one for each row and version of the model, never changed; and how wrong they are."""

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from labkit import cli, paths
from labkit.evidence import predict
from labkit.evidence.predict import KEY
from labkit.workflow import launches, predictions, recorded

H200 = "nvidia-h200"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """An empty file for predictions; launches are as they are."""
    monkeypatch.setattr(predictions, "FILE", tmp_path / "predictions.parquet")
    monkeypatch.setattr(launches, "update", lambda: None)
    return predictions.FILE


def test_each_version_predicts_once_and_old_versions_stay(kept, monkeypatch):
    assert predictions.read().empty
    count = predictions.store()
    first = predictions.read()
    assert count == len(first) > 500
    assert not first.duplicated([*KEY, "gpu", "version"]).any()
    assert predictions.store() == 0
    before = kept.read_bytes()

    other = {name: 2 * value for name, value in predict.parameters().items()}
    models = {**predict.models(), "2": {"parameters": other}}
    monkeypatch.setattr(predict, "models", lambda: models)
    assert predictions.store() == 0
    assert kept.read_bytes() == before
    assert predictions.store("2") == count
    both = predictions.read()
    pd.testing.assert_frame_equal(both[both["version"] == "1"].reset_index(drop=True), first)
    again = both[both["version"] == "2"]["us"].to_numpy()
    assert (again != first["us"].to_numpy()).mean() > 0.99


def test_a_changed_model_does_not_change_what_was_predicted(kept, monkeypatch):
    predictions.store()
    first = predictions.read()
    monkeypatch.setattr(predict, "parameters", lambda version="1": dict.fromkeys(predict.PARAMETERS, 1.0))
    assert predictions.store() == 0
    pd.testing.assert_frame_equal(predictions.read(), first)


def test_an_unknown_version_is_named_before_anything_is_made(kept):
    with pytest.raises(KeyError, match="no model '9'; known: 1"):
        predictions.store("9")
    assert not kept.exists()


def test_what_is_recorded_is_predicted():
    """`labkit record --predict` was called after the last rows were recorded."""
    assert set(predictions.read()["gpu"]) == set(paths.recorded_gpus())
    known = predictions.read().groupby("gpu").size()
    facts = launches.read().groupby("gpu")
    assert all(known[gpu] >= some.drop_duplicates(list(KEY)).shape[0] * 0.99 for gpu, some in facts)


def test_errors_are_those_of_the_stored_predictions():
    rows = recorded.read(paths.DATA / H200 / "gemv_coalescing.parquet")
    found = predictions.errors(H200, rows).set_index("op")
    told = predictions.read()
    told = {tuple(line[1:6]): line[-1] for line in told[told["gpu"] == H200].itertuples(index=False)}
    off = []
    for row in rows.itertuples():
        key = ("gemv_coalescing", row.op, row.case, row.variant, row.kernel_sha)
        if (row.role, row.cache, row.op) == ("ours", "cold", "gemv") and row.ok and key in told:
            off.append(abs(told[key] * 1e3 / float(np.median(row.samples_ns)) - 1))
    assert found.loc["gemv", "rows"] == len(off) > 30
    assert found.loc["gemv", "median %"] == pytest.approx(100 * np.quantile(off, 0.5), rel=1e-3)
    assert found.loc["gemv", "p90 %"] == pytest.approx(100 * np.quantile(off, 0.9), rel=1e-3)
    assert predictions.errors("no such gpu", rows).empty


def test_the_command_says_how_many(kept):
    done = CliRunner().invoke(cli.main, ["record", "--predict"])
    assert done.output == f"data/predictions.parquet: {len(predictions.read())} rows predicted\n"
    refused = CliRunner().invoke(cli.main, ["record", "--predict", "--figures"])
    assert refused.exit_code == 2
    assert "exclude each other" in refused.output
