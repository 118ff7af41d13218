"""The tables of the study of the machine against the audit's, cell by cell, on the rows of every GPU."""

import machine as audit
import pytest
from common import (
    GPUS,
    compared,
    differences,
    public,
    read,
    unsaid,
    with_a_cell_changed,
    with_a_sample_changed,
)

from labkit.studies.machine import views


def beneath(figure):
    """The table beneath a figure."""
    return lambda rows: figure(rows).table


LAB = {  # table -> the lab's, and the columns that say which line it is
    "views.memory_rates": (views.memory_rates, ["kind", "mib", "cache"]),
    "views.matrix_rates": (beneath(views.matrix_rates), ["what", "size"]),
    "views.launch_cost": (beneath(views.launch_cost), ["kernel", "mode"]),
    "views.host_copies": (beneath(views.host_copies), ["size", "memory"]),
    "views.clocks": (beneath(views.clocks), ["what"]),
    "views.ceilings": (views.ceilings, ["ceiling"]),
    "views.sanity": (views.sanity, ["timed by"]),
    "views.noise": (views.noise, ["op", "cache", "mode"]),
}


@pytest.mark.parametrize("gpu", GPUS)
def test_tables_and_sentences_are_those_of_the_audit(gpu, record_property):
    rows = read(gpu, audit.STUDY)
    cells, wrong = compared(audit.TABLES, rows, LAB)
    assert all(cells.values()), cells
    wrong += unsaid(audit.SENTENCES, {"views": views}, rows)
    assert not wrong, "\n".join(wrong[:20])
    record_property("cells", sum(cells.values()))


def test_every_public_table_is_audited():
    assert public(views) == set(audit.TABLES) | set(audit.SENTENCES)
    assert set(audit.TABLES) == set(LAB)


CHANGED = {  # table -> the row of which a sample is changed: parameters of its case, and columns
    "views.memory_rates": ({"what": "read", "mib": 2048}, {"cache": "cold", "variant": "Triton"}),
    "views.matrix_rates": ({"what": "bf16", "n": 8192}, {"variant": "torch"}),
    "views.launch_cost": ({}, {"op": "launch", "variant": "torch, eager"}),
    "views.host_copies": ({"what": "h2d", "bytes": 4096}, {"variant": "pinned"}),
    "views.sanity": ({"what": "in_place", "mib": 256}, {"cache": "cold", "variant": "torch"}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_sample_or_cell_is_found(name):
    rows, (size, row) = read(GPUS[0], audit.STUDY), CHANGED[name]
    (function, keys), mine = LAB[name], audit.TABLES[name](rows)
    assert differences(function(with_a_sample_changed(rows, size, **row)), mine, keys)[1]
    theirs = function(rows)
    columns = [column for column in mine if column not in keys]
    assert columns
    for column in columns:
        assert len(differences(with_a_cell_changed(theirs, column), mine, keys)[1]) == 1, column
