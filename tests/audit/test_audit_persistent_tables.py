"""The tables of the study of persistent tables against the audit's, cell by cell, on the rows of every GPU."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import persistent_tables as audit
import pytest
from common import (
    GPUS,
    cases,
    compared,
    differences,
    observed,
    public,
    read,
    unsaid,
    with_a_cell_changed,
    with_a_sample_changed,
)

from labkit.studies.persistent_tables import answer, claims, decodes, host_views, plans, stages, tables, variants, views

CASE = audit.CASE


def ends(found, **line):
    """An interval as a line of a table."""
    return line | {"mid": found.mid, "low": found.low, "high": found.high}


def one_interval(function):
    """A table of one interval, of way 1."""
    return lambda rows: pd.DataFrame([ends(function(rows), of=audit.REBUILT)])


def noise(rows):
    """`tables.noise` of every case."""
    return pd.DataFrame(
        [
            {"op": op} | params | {"noise": tables.noise(rows, op, **params)}
            for op in ("token", "host")
            for params, _ in cases(rows, op)
        ]
    )


def ratio(rows):
    return pd.DataFrame([tables.ratio(rows, slow, fast, **audit.PUBLISHED) for fast, slow in audit.PAIRS])


def queued(rows):
    return tables.queued(rows, [*variants.WAYS, *variants.ALONE])


def of_one(tell):
    """What the first screen says of one GPU."""
    return lambda rows: tell({"GPU": answer.facts(rows)})


ANSWER = SimpleNamespace(conclusion=of_one(answer.conclusion), advice=of_one(answer.advice), hero=answer.hero)
VIEWS = {"views": views, "host_views": host_views, "answer": ANSWER}
LAB = {  # table -> the lab's, and the columns that say which line it is
    "tables.graphs": (tables.graphs, ["model", "variant"]),
    "tables.ablations": (tables.ablations, ["model", "variant"]),
    "tables.stages": (tables.stages, ["model", "op"]),
    "tables.finer": (tables.finer, ["model", "waits for"]),
    "tables.stops": (tables.stops, ["model"]),
    "tables.walls": (tables.walls, [*CASE, "way"]),
    "tables.hosts": (tables.hosts, ["model", "parts", "queued_us", "way"]),
    "tables.tokens": (tables.tokens, [*CASE, "way"]),
    "tables.contexts": (tables.contexts, ["model", "start", "variant"]),
    "tables.streamed": (tables.streamed, ["model", "start", "variant"]),
    "tables.batches": (tables.batches, ["model", "start", "variant"]),
    "tables.gains": (tables.gains, ["way"]),
    "tables.ratio": (ratio, ["variant", "against"]),
    "tables.rebuilding": (tables.rebuilding, ["table"]),
    "tables.building": (one_interval(tables.building), ["of"]),
    "tables.records_over_rest": (one_interval(tables.records_over_rest), ["of"]),
    "tables.noise": (noise, ["op", "queued_us", *CASE]),
    "tables.queued": (queued, ["way"]),
    "tables.growth": (tables.growth, ["way"]),
    "tables.saving": (tables.saving, ["from", "to"]),
    "tables.hidden": (tables.hidden, [*CASE, "way"]),
    "views.tokens": (views.tokens, ["way"]),
    **{
        f"claims.{name}": (observed(getattr(claims, name)), ["case"])
        for name in (
            "persistent", "packed", "fewer_bytes", "pinned", "schedule", "building", "records", "waiting"
        )
    },
}  # fmt: skip
UNRECORDED = {(f"tables.{name}", "nvidia-h100-80gb-hbm3") for name in ("batches", "streamed")}  # of no row yet
NOT_AUDITED = {
    "claims.pairs": "names",
    "tables.clocks": "samples; in hosts",
    "tables.host_case": "rows; in rebuilding and queued",
    "tables.sure": "in hosts",
    "tables.together": "samples; in saving",
    "tables.lowering": "of tables that are lowered, not of rows",
    "tables.lowered": "of tables that are lowered, not of rows",
    "tables.queue": "of tables that are lowered, not of rows",
    "stages.stages": "of moments on a GPU, of which rows keep only the sums",
    "stages.by_op": "of moments on a GPU, of which rows keep only the sums",
    "plans.plan_of": "how a decode runs",
    "plans.lowering": "how a decode runs",
    "decodes.on_the_device": "calls",
    "decodes.by_the_host": "calls",
    "decodes.unordered": "a launch",
    "views.stops": "tables.stops under other names",
    "answer.facts": "in conclusion and advice",
    "views.traffic": "of tables that are lowered, not of rows",
    "views.sizes": "of tables that are lowered, not of rows",
    "views.changes": "of tables that are lowered, not of rows",
    "views.floor_cases": "cases",
    "views.compiled": "of compiled code, not of rows",
    "views.ablations": "tables.ablations under other names",
    "host_views.figure": "words; in host",
    "host_views.queued": "tables.queued under other names",
}


# One test a GPU: tables share intervals, which take most of the time.
@pytest.mark.parametrize("gpu", GPUS)
def test_tables_and_sentences_are_those_of_the_audit(gpu, record_property):
    rows = read(gpu, audit.STUDY)
    cells, wrong = compared(audit.TABLES, rows, LAB)
    assert {(name, gpu) for name, count in cells.items() if not count} <= UNRECORDED, cells
    wrong += unsaid(audit.SENTENCES, VIEWS, rows)
    wrong += claims_that_differ(rows)
    assert not wrong, "\n".join(wrong[:20])
    record_property("cells", sum(cells.values()))


def claims_that_differ(rows):
    """What a claim is shown to have measured, where it is not what the audit has."""
    measured = {f"claims.{one.observe.__name__}": one.judge(rows).measured for one in claims.CLAIMS if one.observe}
    parts = audit.said_claims(rows)
    assert measured.keys() == parts.keys()
    return [
        f"{name}: no {part!r} in {measured[name]!r}"
        for name in parts
        for part in parts[name]
        if part not in measured[name]
    ]


def test_every_public_table_is_audited_or_says_why_not():
    audited = set(audit.TABLES) | set(audit.SENTENCES)
    assert public(tables, claims, stages, plans, decodes, views, host_views, answer) == audited | set(NOT_AUDITED)
    assert set(audit.TABLES) == set(LAB)
    assert not audited & set(NOT_AUDITED)


@pytest.mark.parametrize(
    ("names", "size", "row"),
    [
        (
            ["tables.graphs", "tables.contexts", "claims.schedule"],
            {"model": audit.H1024} | audit.MAIN,
            {"op": "token", "variant": audit.OURS},
        ),
        (["tables.ratio"], audit.PUBLISHED, {"op": "token", "variant": audit.PACKED}),
        (
            ["tables.growth"],
            {"model": audit.H1024, "parts": 4},
            {"op": "host", "variant": f"{audit.PACKED} · copy"},
        ),
    ],
)
def test_a_changed_sample_or_cell_is_found(names, size, row):
    rows = read(GPUS[0], audit.STUDY)
    changed = with_a_sample_changed(rows, size, **row)
    for name in names:
        (function, keys), mine = LAB[name], audit.TABLES[name](rows)
        assert differences(function(changed), mine, keys)[1], name
        theirs = function(rows)
        columns = [column for column in mine if column in theirs and column not in keys and mine[column].notna().any()]
        assert columns
        for column in columns:
            assert len(differences(with_a_cell_changed(theirs, column), mine, keys)[1]) == 1, (name, column)


# The audit's interval of what was measured apart in a process: as drawn, and no other method's


def made_up(runs, blocks=30, seed=1):
    """Two rows of made-up ns, whose blocks are slow together: (process, block) -> ns."""
    rng = np.random.default_rng(seed)
    keys = [(run, block) for run in range(runs) for block in range(blocks)]
    drift = rng.normal(0, 0.05, len(keys))
    return [
        dict(zip(keys, 1000 * size * np.exp(drift + rng.normal(0, 0.01, len(keys))), strict=True)) for size in (3, 2)
    ]


def drawn(rows, runs, log=True, together=False, level=95):
    """The ends of an interval by 20 000 draws. together: of the ratios of blocks, the same of both rows."""
    rng, draws, found = np.random.default_rng(7), 20_000, []
    for run in range(runs):
        slow, fast = (np.array([row[key] for key in row if key[0] == run]) for row in rows)
        one, other = rng.integers(0, len(slow), (2, draws, len(slow)))
        apart = np.median(slow[one], axis=1) / np.median(fast[other], axis=1)
        found.append(np.median(slow[one] / fast[one], axis=1) if together else apart)
    values = np.log(np.ravel(found)) if log else np.ravel(found)
    ends = np.percentile(rng.choice(values, (runs, draws)).mean(axis=0), [50 - level / 2, 50 + level / 2])
    return np.exp(ends) if log else ends


def within(found, low, high):
    return found.low.least <= low <= found.low.most and found.high.least <= high <= found.high.most


@pytest.mark.parametrize("log", [True, False])
def test_an_interval_is_that_of_drawn_medians(log):
    rows = made_up(1)  # of one process there is no Student's interval: the bootstrap's is all
    assert within(audit.apart(rows, audit.over, log), *drawn(rows, 1, log))
    several = made_up(12)
    found, (low, high) = audit.apart(several, audit.over, log), drawn(several, 12, log)
    assert found.low.least <= low  # of several it is the wider one of both
    assert high <= found.high.most


@pytest.mark.parametrize("other", [{"together": True}, {"level": 90}, {"level": 99}])
def test_another_method_is_beyond_the_tolerance(other):
    rows = made_up(1)
    assert not within(audit.apart(rows, audit.over), *drawn(rows, 1, **other))


def test_the_middle_is_the_geometric_mean_of_the_processes():
    rows = [{(0, 0): 2000.0, (1, 0): 8000.0}, {(0, 0): 1000.0, (1, 0): 1000.0}]
    assert audit.apart(rows, audit.over).mid == pytest.approx(4)
    assert audit.apart(rows, audit.over, log=False).mid == pytest.approx(5)
    assert audit.middle(rows[0]) == pytest.approx(4)
