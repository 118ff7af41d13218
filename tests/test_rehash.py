"""A new rule of hashing restamps what is of the present sources, and nothing else."""

import json

import pandas as pd
import pyarrow.parquet as pq
import pytest
import rows as made

from labkit import paths, registry
from labkit.bench import records, spec
from labkit.bench.sha import kernel_sha
from labkit.sweep import case as runner
from labkit.workflow import archive, recorded


@pytest.fixture
def old(monkeypatch, tmp_path):
    """A file of schema 1 in data/, whose earlier rule is that a hash is the name of the variant, reversed."""
    monkeypatch.setattr(paths, "DATA", tmp_path)
    monkeypatch.setitem(recorded.EARLIER, "1", lambda variant: variant.name[::-1])
    path = tmp_path / "nvidia-made-up-9" / "state_layout.parquet"
    few = made.LAYOUT | {"batches": [1], "states": ["fp32"]}
    frame = made.make("state_layout", few, made.layout_us())
    write_schema_1(path, frame.assign(kernel_sha=frame["variant"].str[::-1]))
    return path


def write_schema_1(path, frame):
    records.write(path, frame)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"labkit_schema": "1"}), path)


def present(frame):
    """Hash of each row's variant by the present rule."""
    case = spec.Case(frame["op"].iloc[0], json.loads(frame["case"].iloc[0]))
    known = {one.name: kernel_sha(one.source) for one in runner.with_control(registry.load("state_layout"), case)}
    return frame["variant"].map(known)


def test_the_old_schema_is_read_and_its_rows_are_not_stale(old):
    frame = records.read(old)
    assert frame["kernel_sha"].str.startswith("1:").all()
    assert not recorded.stale(frame).any()


def test_fresh_rows_are_restamped_and_the_schema_is_raised(old):
    before = records.read(old)
    assert archive.rehash() == {old: (len(before), 0)}
    after = records.read(old)
    assert pq.read_schema(old).metadata[b"labkit_schema"].decode() == records.SCHEMA_VERSION
    assert (after["kernel_sha"] == present(after)).all()
    pd.testing.assert_frame_equal(after.drop(columns="kernel_sha"), before.drop(columns="kernel_sha"))
    assert archive.rehash() == {old: (0, 0)}  # nothing is left to do


def test_a_stale_row_is_refused_and_stays_stale(old):
    frame = records.read(old)
    frame["kernel_sha"] = frame["kernel_sha"].str.removeprefix("1:")
    frame.loc[2, "kernel_sha"] = "0" * 12
    write_schema_1(old, frame)
    assert archive.rehash() == {old: (len(frame) - 1, 1)}
    after = records.read(old)
    assert after.loc[2, "kernel_sha"] == "1:" + "0" * 12
    assert recorded.stale(after).tolist() == [index == 2 for index in after.index]


def test_without_the_earlier_rule_all_its_rows_are_stale(old, monkeypatch):
    monkeypatch.delitem(recorded.EARLIER, "1")
    before = records.read(old)
    assert recorded.stale(before).all()
    assert archive.rehash() == {old: (0, len(before))}
    pd.testing.assert_frame_equal(records.read(old), before)
