"""What pages say of programs over time, of the recorded files, by other code."""

import over_time
import pandas as pd
import pytest
from common import DATA

from labkit.bench import timelines
from labkit.report import programs

FILES = sorted(DATA.glob("*/timelines/*.parquet"))


def differ(gpu, study, rows):
    """Which tables are not those of the audit."""
    wanted = over_time.tables(gpu, study)
    found = {"programs.shares": programs.shares(rows), "programs.facts": programs.facts(rows)}
    assert set(found) == set(wanted)
    return [name for name, table in found.items() if not same(table, wanted[name])]


def same(table, other):
    try:
        pd.testing.assert_frame_equal(table, other, check_dtype=False, rtol=1e-9)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]} {path.stem}")
def test_tables_of_timelines(path):
    gpu, study, rows = path.parts[-3], path.stem, timelines.read(path)
    assert differ(gpu, study, rows) == []
    longer = rows.assign(end_ns=rows["end_ns"].where(rows.index != len(rows) // 2, rows["end_ns"].max() + 1000))
    assert differ(gpu, study, longer) == ["programs.shares", "programs.facts"]  # the control
