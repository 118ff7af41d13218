"""The tables of the study of persistent grids against the audit's, cell by cell, on the rows of every GPU."""

import math
from dataclasses import asdict
from functools import cache
from types import SimpleNamespace

import moe_persistent_grid as audit
import moe_persistent_grid_said
import numpy as np
import pandas as pd
import pytest
from common import (
    DATA,
    GPUS,
    by_process,
    check_changes_are_found,
    compared,
    public,
    read,
    unsaid,
    with_a_sample_changed,
)
from once import made_once

from labkit.bench.spec import Case
from labkit.studies.moe_persistent_grid import answer, claims, grid_views, tables, views, waves, work
from labkit.studies.moe_persistent_grid.models import MODELS

CASE = audit.CASE


@cache
def recorded(gpu):
    """The rows of a GPU, with what was drawn: slots of each expert in the routing of each case."""
    return drawn(read(gpu, audit.STUDY))


def drawn(rows):
    return rows.assign(
        slots=[work.counts_of(Case(op, params)) for op, params in zip(rows["op"], rows["params"], strict=True)]
    )


def one_line(function, *columns):
    """A table of numbers that are one line."""
    return lambda rows: pd.DataFrame([dict(zip(columns, np.ravel(function(rows)), strict=True)) | {"of": "all"}])


def pairs(rows):
    parts = [tables.compared(rows, *pair).assign(variant=pair[0], against=pair[1]) for pair in audit.PAIRS]
    return pd.concat(parts)


def fastest(rows):
    """`tables.fastest` of the file that the rows are from, as a line a shape and number of tokens."""
    folder = rows["gpu"].iloc[0].lower().replace(" ", "-")
    found = tables.fastest(DATA / folder / f"{audit.STUDY}.parquet")
    lines = [
        dict(zip(("E", "top_k", "H", "I", "int4"), shape, strict=True))
        | {"T": tokens, "blocks of": choice.block_m}
        | {gemm: audit._text(asdict(getattr(choice, gemm))) for gemm in audit.GEMMS}
        for shape, choices in found.items()
        for tokens, choice in choices.items()
    ]
    return pd.DataFrame(lines)


def active_experts(rows):
    return views.active_experts([Case("layer", params) for params, _ in tables.cases(rows, "layer")])


def designs(rows):
    return pd.concat([tables.designs(rows, *pair).assign(variant=pair[0]) for pair in views.DESIGNS])


def waves_by_gpu(rows):
    model, *shape = audit.SHOWN
    return grid_views.waves_by_gpu(MODELS[model], *shape)


def observed(claim):
    """A table of what a claim is judged by."""
    return lambda rows: pd.DataFrame([vars(one) for one in claim(rows).observations])


def own_grid(rows):
    """The same, of which a case has two: one program an SM, and as many as fit."""
    found = observed(claims.own_grid)(rows)
    return found.assign(place=found.groupby("case").cumcount())


GRIDS = [*CASE, "GEMM", "kernel", "persistent"]
LAB = {  # table -> the lab's, and the columns that say which line it is
    "tables.ceilings": (one_line(tables.ceilings, "TB/s", "TFLOP/s"), ["of"]),
    "tables.times": (tables.times, [*CASE, "variant"]),
    "tables.compared": (pairs, [*CASE, "variant", "against"]),
    "tables.released_grids": (tables.released_grids, ["T", "activations"]),
    "tables.narrow_blocks": (tables.narrow_blocks, ["T", "activations"]),
    "tables.beside_released": (tables.beside_released, ["T"]),
    "tables.against_best": (tables.against_best, CASE),
    "tables.beside_engines": (tables.beside_engines, [*CASE, "engine"]),
    "tables.int4_reading": (tables.int4_reading, CASE),
    "tables.persistence": (tables.persistence, GRIDS),
    "tables.same_bits": (tables.same_bits, [*CASE, "GEMM", "kernel"]),
    "tables.own_products": (tables.own_products, ["T", "GEMM", "activations", "change"]),
    "tables.worth": (tables.worth, ["change", "activations"]),
    "tables.source_point": (tables.source_point, ["variant"]),
    "tables.point_ratios": (tables.point_ratios, ["activations", "change", "variant", "against"]),
    "tables.steps": (tables.steps, ["T", "SMs", "grid"]),
    "tables.persistent_on_parts": (tables.persistent_on_parts, ["T", "SMs"]),
    "tables.on_other_gpus": (tables.on_other_gpus, [*CASE, "GEMM", "kernel", "GPU"]),
    "tables.routings": (tables.routings, CASE),
    "tables.designs": (designs, [*CASE, "variant"]),
    "tables.predictions": (tables.predictions, CASE),
    "tables.fastest": (fastest, ["E", "top_k", "H", "I", "int4", "T"]),
    "tables.tuned_up_to": (one_line(tables.tuned_up_to, "tokens"), ["of"]),
    "grid_views.dead_shares": (lambda rows: grid_views.dead_shares(audit.AT), ["model", "T"]),
    "grid_views.waves_by_gpu": (waves_by_gpu, ["GEMM", "GPU"]),
    "views.active_experts": (active_experts, ["model", "T"]),
    **{
        name: (observed(getattr(claims, name.removeprefix("claims."))), ["case"])
        for name in audit.TABLES
        if name.startswith("claims.")
    },
    "claims.own_grid": (own_grid, ["case", "place"]),
}
NOT_AUDITED = {
    "claims.pairs": "names",
    "tables.cases": "an order, no numbers",
    "tables.code": "evidence as it is recorded",
    "waves.expected_blocks": "in dead_shares and waves_by_gpu",
    "waves.dead_share": "in dead_shares",
    "waves.efficiency": "in persistence",
    "waves.predicted_ratio": "in steps",
    "waves.on_gpus": "in on_other_gpus and waves_by_gpu",
    "work.counts_of": "what was drawn: given to the audit",
    "work.active": "in times and active_experts",
    "work.weight_bytes": "in times, int4_reading and predictions",
    "work.flops": "in times and predictions",
    "work.floor": "what is recorded as floor_bytes",
}
OF_VIEWS = {"grid_views.dead_shares", "grid_views.waves_by_gpu", "views.active_experts"}


def answered(rows):
    """The first screen's sentences on one GPU."""
    known = {"this GPU": answer.facts(rows)}
    return f"{answer.conclusion(known)} {answer.advice(known)}"


VIEWS = {"views": views, "grid_views": grid_views, "answer": SimpleNamespace(said=answered)}


ASKED_AGAIN = (
    "cases", "times", "compared", "released_grids", "against_best", "persistence", "own_products", "int4_reading",
    "ceilings", "on_other_gpus",
)  # fmt: skip


# One test a GPU: tables share intervals, which take most of the time.
@pytest.mark.parametrize("gpu", GPUS)
def test_tables_and_sentences_are_those_of_the_audit(gpu, monkeypatch, record_property):
    rows = recorded(gpu)
    made_once(monkeypatch, tables, ASKED_AGAIN)
    cells, wrong = compared(audit.TABLES, rows, LAB)
    wrong += unsaid(moe_persistent_grid_said.SENTENCES, VIEWS, rows)
    assert not wrong, "\n".join(wrong[:20])
    assert all(cells.values()), cells
    record_property("cells", sum(cells.values()))


def test_every_public_table_is_audited_or_says_why_not():
    assert public(tables, waves, work, claims) | OF_VIEWS == set(audit.TABLES) | set(NOT_AUDITED)
    assert set(audit.TABLES) == set(LAB)
    assert not set(audit.TABLES) & set(NOT_AUDITED)


def test_medians_of_each_process_are_no_pairs_of_blocks():
    """An interval of pairs is not that of two medians that were resampled apart: they share no clock."""
    rng = np.random.default_rng(3)
    drift = rng.normal(0, 0.02, (3, 10))
    slow, fast = ((1e6 * np.exp(level + drift + rng.normal(0, 0.001, (3, 10)))).astype(int) for level in (0.1, 0.0))
    apart = audit._apart(*(tuple(map(tuple, some.tolist())) for some in (slow, fast)))
    ratios = {(run, block): math.log(slow[run, block] / fast[run, block]) for run in range(3) for block in range(10)}
    paired = audit.common.interval(by_process(ratios))
    assert apart.mid == pytest.approx(0.1, abs=0.01)
    assert apart.high.least > paired.high.most


@pytest.mark.parametrize(("centre", "passes"), [(np.median, True), (np.mean, False)])
def test_means_for_medians_of_a_process_are_beyond_the_tolerance(centre, passes):
    """Of one process: of several, Student's interval is the wider, and what is resampled shows in no end."""
    rng = np.random.default_rng(5)
    slow, fast = (1e6 * rng.lognormal(level, 0.01, 31).round(6) for level in (0.1, 0.0))
    slow[:8] *= 1.2  # so far off that a mean is pulled there
    found = audit._apart((tuple(slow),), (tuple(fast),))
    drawn = [centre(rng.choice(some, (20_000, 31)), axis=1) for some in (slow, fast)]
    low, high = np.percentile(np.log(drawn[0] / drawn[1]), [2.5, 97.5])
    within = found.low.least <= low <= found.low.most and found.high.least <= high <= found.high.most
    assert within == passes


CHANGED = {  # table -> the row of which a sample is changed
    "tables.times": {"op": "layer", "variant": audit.OURS},
    "tables.against_best": {"op": "layer", "variant": audit.OURS},
    "tables.compared": {"op": "layer", "variant": audit.LOOP},
    "tables.persistence": {"op": "gemm1", "variant": audit.OWN_TILES},
}
SIZE = {"model": "Qwen3-30B-A3B", "weights": "bf16", "T": 128, "routing": "uniform"}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_sample_or_cell_is_found(name):
    rows = recorded(GPUS[0])
    changed = with_a_sample_changed(rows, SIZE, cache="cold", **CHANGED[name])
    check_changes_are_found(*LAB[name], audit.TABLES[name], rows, changed)
