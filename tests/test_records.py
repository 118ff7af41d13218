"""Measurements on disk: what is written is what is read, and nothing else is."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit.bench import records
from labkit.bench.records import Journal, RecordError

LISTS = ("run", "block", "samples_ns", "throttled", "sm_mhz")


def row(**changes: Any) -> dict[str, Any]:
    """A row with a value in every column; `case` and `options` may be given as dictionaries."""
    found: dict[str, Any] = {name: name for name in records.SCHEMA.names}
    found |= {"op": "decode", "case": {"batch": 1}, "options": {"BV": 8}, "evidence": {"registers": 40}, "counters": {}}
    found |= {"rules": {"claim": "0123456789ab"}}
    found |= {"run": [0, 0], "block": [0, 1], "samples_ns": [1000, 3000], "throttled": ["", "power cap"]}
    found |= {"sm_mhz": [1980, 1755], "calls_per_sample": 7, "floor_bytes": 2**40, "floor_flops": 0, "seed": 1000}
    found |= {"ceiling": 3.0, "predicted_us": math.nan, "error": 1e-4, "ok": True, "cache": "cold", "mode": "graph"}
    found |= changes
    return {k: json.dumps(v, sort_keys=True) if isinstance(v, dict) else v for k, v in found.items()}


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=records.SCHEMA)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu" / "study.parquet"


def plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows that can be compared: lists for arrays, None for NaN."""

    def value(x: Any) -> Any:
        return list(x) if isinstance(x, list | np.ndarray) else None if isinstance(x, float) and math.isnan(x) else x

    return [{name: value(x) for name, x in one.items()} for one in frame.to_dict("records")]


def test_round_trip(path: Path):
    rows = [row(), row(variant="failed", ok=False, reason="µ: no memory", **{name: [] for name in LISTS})]
    for written in (rows, pd.DataFrame(rows)):
        records.write(path, written)
        assert plain(records.read(path)) == plain(pd.DataFrame(rows))
    assert pq.read_schema(path).equals(records.SCHEMA)
    assert pq.read_schema(path).metadata == records.SCHEMA.metadata
    assert path.stat().st_mode & 0o777 == 0o644


def test_no_rows(path: Path):
    records.write(path, [])
    assert list(records.read(path).columns) == records.SCHEMA.names
    assert records.expanded(records.read(path)).empty


def test_what_is_read_can_be_written_again(path: Path):
    records.write(path, [row(), row(variant="b")])
    before = path.read_bytes()
    records.write(path, records.read(path))
    assert path.read_bytes() == before


def test_the_name_of_a_folder_does_not_matter(tmp_path: Path):
    path = tmp_path / "year=2026" / "study.parquet"  # which pyarrow could take for a partition
    records.write(path, [row()])
    assert len(records.read(path)) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"samples_ns": [2**31]}, "samples_ns|2147483648|int"),
        ({"samples_ns": ["slow"]}, "samples_ns"),
        ({"ok": "perhaps"}, "ok"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_a_value_of_another_type_is_not_written(path: Path, changes: dict[str, Any], text: str):
    with pytest.raises(RecordError, match=text) as caught:
        records.write(path, [row(**changes)])
    assert str(path) in str(caught.value)
    assert not path.exists()


def test_a_missing_or_unknown_column_is_not_written(path: Path):
    with pytest.raises(RecordError, match=r"study\.parquet: .*more"):
        records.write(path, [row(more=1)])
    with pytest.raises(RecordError, match=r"study\.parquet: .*seed"):
        records.write(path, pd.DataFrame([row()]).drop(columns="seed"))
    assert not path.exists()


def damaged(path: Path, found: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(found, path)


def refused(path: Path, *words: str) -> None:
    """Reading is a RecordError of one line that names the file and has the words."""
    with pytest.raises(RecordError) as caught:
        records.read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_the_undamaged_table_is_read(path: Path):
    """The control of all that follow."""
    damaged(path, table([row()]))
    assert len(records.read(path)) == 1


def test_a_file_cut_off_anywhere_is_refused(path: Path):
    records.write(path, [row(), row(variant="b")])
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        refused(path, "not a readable Parquet file")


def test_a_changed_byte_is_refused_or_does_not_matter(path: Path):
    records.write(path, [row(), row(variant="b")])
    whole, expected = path.read_bytes(), plain(records.read(path))
    refusals = 0
    for at in range(0, len(whole), 13):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            found = plain(records.read(path))
        except RecordError:
            refusals += 1
        else:
            assert found == expected
    assert refusals > 300  # the rest is statistics that nobody reads


@pytest.mark.parametrize("content", [b"", b"variant,us\na,1\n", b"PAR1PAR1", b"\0" * 4096])
def test_a_file_that_is_no_parquet_is_refused(path: Path, content: bytes):
    path.parent.mkdir()
    path.write_bytes(content)
    refused(path, "not a readable Parquet file")


def test_text_that_is_no_utf8_is_refused(path: Path):
    found = table([row()])
    at = found.column_names.index("variant")
    damaged(path, found.set_column(at, "variant", pa.array([b"\xff"]).view(pa.string())))
    refused(path, "not a readable Parquet file")


def test_no_file_and_a_folder_are_refused(path: Path):
    refused(path, "no such file")
    path.mkdir(parents=True)
    refused(path)


def test_a_parquet_file_of_something_else_is_refused(path: Path):
    damaged(path, pa.table({"x": [1, 2]}))
    refused(path, "not a file of this lab")
    damaged(path, table([row()]).replace_schema_metadata(None))
    refused(path, "not a file of this lab")


@pytest.mark.parametrize("name", records.SCHEMA.names)
def test_a_missing_column_is_named(path: Path, name: str):
    damaged(path, table([row()]).drop_columns(name))
    refused(path, f"column {name} is missing")


@pytest.mark.parametrize("name", records.SCHEMA.names)
def test_a_column_of_another_type_is_named(path: Path, name: str):
    found = table([row()])
    at = found.column_names.index(name)
    other = pa.array([None], pa.date32())
    damaged(path, found.set_column(at, name, other))
    refused(path, f"column {name} is date32", f"expected {records.SCHEMA.field(name).type}")


@pytest.mark.parametrize("name", records.SCHEMA.names)
def test_a_row_without_a_value_is_refused_unless_it_may_be_nan(path: Path, name: str):
    damaged(path, table([row(), row(**{name: None})]))
    if name in ("ceiling", "predicted_us", "error"):
        assert math.isnan(records.read(path)[name].iloc[1])
    else:
        refused(path, f"column {name} has no value")


def test_an_unknown_column_is_named(path: Path):
    damaged(path, table([row()]).append_column("watts", pa.array([700])))
    refused(path, "unknown column watts")


@pytest.mark.parametrize("version", ["0", "4", "1.1"])
def test_another_version_of_the_schema_is_refused(path: Path, version: str):
    damaged(path, table([row()]).replace_schema_metadata({"labkit_schema": version}))
    refused(path, f"schema {version}, this lab reads 1, 2, {records.SCHEMA_VERSION}")


def test_rows_of_schema_2_have_no_rules(path: Path):
    damaged(path, table([row()]).drop(["rules"]).replace_schema_metadata({"labkit_schema": "2"}))
    frame = records.read(path)
    assert frame["rules"].tolist() == ["{}"]
    assert not frame["kernel_sha"].str.contains(":").any()


@pytest.mark.parametrize("name", sorted(set(LISTS) - {"samples_ns"}))
def test_lists_of_different_lengths_are_refused(path: Path, name: str):
    damaged(path, table([row(), row(**{name: row()[name][:1]})]))
    refused(path, f"column {name} has another length than samples_ns")


@pytest.mark.parametrize("name", ["case", "options", "evidence", "counters", "rules"])
@pytest.mark.parametrize("text", ["batch 1", "", '{"batch": 1', "[1]", "1", "null"])
def test_text_that_is_no_json_object_is_refused(path: Path, name: str, text: str):
    damaged(path, table([row(), row(**{name: text})]))
    refused(path, f"column {name} ", "not a JSON object")


class Crash(BaseException):
    """Not an Exception, as KeyboardInterrupt is none."""


@pytest.mark.parametrize("step", ["replace", "fsync", "fdopen"])
def test_a_crash_while_writing_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch, step: str):
    records.write(path, [row()])
    before = path.read_bytes()

    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    monkeypatch.setattr(os, step, crash)
    with pytest.raises(Crash):
        records.write(path, [row(), row(variant="b")])
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_merge_replaces_cases_whole_and_keeps_the_others():
    old = [row(variant=v, case={"batch": b}, reason="old") for v in ("a", "b", "c") for b in (1, 2)]
    old.append(row(op="extend", reason="old"))  # the same parameters, another operation
    new = [row(variant=v, case={"batch": 2}, reason="new") for v in ("a", "b")]
    found = records.merge(pd.DataFrame(old), pd.DataFrame(new))
    keys = list(zip(found["op"], found["case"], found["variant"], found["reason"], strict=True))
    one, two = '{"batch": 1}', '{"batch": 2}'
    assert keys == [
        *(("decode", one, v, "old") for v in "abc"),
        *(("decode", two, v, "new") for v in "ab"),  # c is gone: it was not in the new run
        ("extend", one, "variant", "old"),
    ]
    assert list(found.index) == list(range(6))


def test_merge_with_nothing_and_its_order_does_not_depend_on_the_input():
    rows = pd.DataFrame([row(variant=v, cache=c) for v in "ab" for c in ("cold", "hot")])
    expected = plain(records.merge(None, rows))
    assert [(one["cache"], one["variant"]) for one in expected] == [(c, v) for c in ("cold", "hot") for v in "ab"]
    assert plain(records.merge(None, rows[::-1])) == expected
    assert plain(records.merge(rows[:0], rows)) == expected
    assert plain(records.merge(rows, rows)) == expected
    assert len(records.merge(rows, rows[:0])) == 4


def test_expanded():
    rows = [
        row(case={"batch": 1, "model": "x"}, options={"BV": 8}, samples_ns=[1000, 2000, 9000]),
        row(case={"batch": 2}, options={"library": "torch", "mode": "no column of its own"}, samples_ns=[]),
    ]
    found = records.expanded(pd.DataFrame(rows))
    assert found["us"].iloc[0] == 2.0
    assert math.isnan(found["us"].iloc[1])
    assert list(found["batch"]) == [1, 2]
    assert found["model"].iloc[0] == "x"
    assert found["BV"].iloc[0] == 8
    assert pd.isna(found["BV"].iloc[1])
    assert found["library"].iloc[1] == "torch"
    assert list(found["mode"]) == ["graph", "graph"]  # a parameter does not replace a column of the schema
    assert found.columns.is_unique
    assert set(records.SCHEMA.names) < set(found.columns)


def test_expanded_keeps_the_index_of_a_selection():
    rows = pd.DataFrame([row(case={"batch": b}, samples_ns=[1000 * b]) for b in (1, 2, 3)])
    found = records.expanded(rows[rows["case"].str.contains("3")])
    assert found["batch"].tolist() == [3]
    assert found["us"].tolist() == [3.0]


def test_expanded_of_clashing_names_takes_the_parameter_of_the_case():
    found = records.expanded(pd.DataFrame([row(case={"batch": 1, "BV": 64}, options={"BV": 8})]))
    assert np.ravel(found["BV"]).tolist()[0] == 64


ENTRIES = st.lists(st.dictionaries(st.text(max_size=5), st.text() | st.floats(allow_nan=False), max_size=3), max_size=5)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "gpu" / "study.journal.jsonl")


def test_a_journal_keeps_its_order(journal: Journal):
    assert journal.entries() == []
    entries = [{"case": ["decode", "{}"], "run": i, "rows": [{"error": i / 3, "reason": "µ\n"}]} for i in range(5)]
    for count, entry in enumerate(entries, 1):
        journal.append(entry)
        assert Journal(journal.path).entries() == entries[:count]
    assert journal.path.read_bytes().count(b"\n") == 5


def test_a_journal_keeps_nan(journal: Journal):
    journal.append({"error": math.nan})
    assert math.isnan(journal.entries()[0]["error"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(ENTRIES.filter(bool))
def test_a_journal_cut_off_at_any_byte_loses_only_the_entry_that_was_cut(journal: Journal, entries: list[dict]):
    journal.rewrite(entries)
    whole, new = journal.path.read_bytes(), {"new": "µ"}
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        journal.path.write_bytes(whole[:size])
        kept = entries[: sum(end <= size for end in ends)]  # whole even where the newline alone is missing
        assert journal.entries() == kept
        journal.append(new)
        assert journal.entries() == [*kept, new]


def test_lines_that_are_no_objects_are_dropped(journal: Journal):
    journal.append({"a": 1})
    with open(journal.path, "ab") as file:
        file.write(b"[1]\n\xff\xfe\n" + b"\0" * 16 + b"\n3\n\n")
    journal.append({"a": 2})
    assert journal.entries() == [{"a": 1}, {"a": 2}]


def test_rewrite_is_atomic(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    journal.append({"a": 1})

    def crash(*_: Any) -> None:
        raise Crash

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(Crash):
        journal.rewrite([{"a": 2}])
    monkeypatch.undo()
    assert journal.entries() == [{"a": 1}]
    assert list(journal.path.parent.iterdir()) == [journal.path]
    journal.rewrite({"a": i} for i in range(3))
    assert journal.entries() == [{"a": i} for i in range(3)]


def test_what_append_wrote_is_on_disk(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    journal.append({"a": 1})
    assert synced == [journal.path.stat().st_size]
