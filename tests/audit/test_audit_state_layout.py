"""The tables of the study of state layouts against the audit's, cell by cell, on the rows of every GPU."""

import pandas as pd
import pytest
import state_layout as audit
from common import (
    GPUS,
    check_changes_are_found,
    compared,
    observed,
    over,
    public,
    read,
    unsaid,
    with_a_sample_changed,
)

from labkit.studies.state_layout import answer, claims, production_views, share, tables, variants, views

SHAPE, CASE = audit.SHAPE, audit.CASE
GRID = ["cache", *SHAPE, "BV"]


def estimates(rows):
    """`tables.end_to_end_estimate` in the ways that the audit tries."""
    return pd.concat([tables.end_to_end_estimate(rows, **way).assign(way=at) for at, way in enumerate(audit.GAINS)])


def pairs(rows):
    parts = [tables.compared(rows, *pair) for pair in audit.PAIRS]
    said = [dict(zip(("op", "variant", "against"), pair, strict=True)) for pair in audit.PAIRS]
    return pd.concat([part.assign(**names) for part, names in zip(parts, said, strict=True)])


VIEWS = {"views": views, "production_views": production_views, "answer": answer}
LAB = {  # table -> the lab's, and the columns that say which line it is
    "tables.times": (lambda rows: over(tables.times, rows, cache=["cold", "hot"]), ["cache", *SHAPE, "variant"]),
    "tables.ratios": (lambda rows: over(tables.ratios, rows, cache=["cold", "hot"]), [*GRID, "warps"]),
    "tables.folding": (lambda rows: over(tables.folding, rows, cache=["cold", "hot"]), GRID),
    "tables.tile_or_layout": (
        lambda rows: over(tables.tile_or_layout, rows, cache=["cold", "hot"]),
        ["cache", *SHAPE],
    ),
    "tables.best": (lambda rows: over(tables.best, rows, cache=["cold", "hot"]), ["cache", *SHAPE]),
    "tables.state_access": (tables.state_access, ["K", "state", "layout", "BV", "warps", "folded"]),
    "tables.end_to_end_estimate": (estimates, ["way", "batch"]),
    "tables.shares": (
        lambda rows: tables.shares(rows, 32, (256, 2048, 32768), audit.BATCHES),
        ["model", "context", "batch"],
    ),
    "tables.operation_times": (
        lambda rows: over(tables.operation_times, rows, op=audit.OPERATIONS),
        ["op", *CASE, "variant"],
    ),
    "tables.against_best": (
        lambda rows: over(tables.against_best, rows, op=["step", "extend"]),
        ["op", *CASE, "slots"],
    ),
    "tables.released": (
        lambda rows: over(tables.released, rows, source=list(variants.OWN)),
        ["source", "op", "gate", "state", "batch", "prefill"],
    ),
    "tables.by_release": (lambda rows: tables.by_release(rows, 64), ["gate", "state", "batch", "variant"]),
    "tables.long_prompts": (tables.long_prompts, ["H", "HV", "prefill", "against"]),
    "tables.compared": (pairs, ["op", "variant", "against", *CASE]),
    "tables.extend_errors": (tables.extend_errors, ["gate", "prefill"]),
    "tables.layouts": (tables.layouts, ["op", "kernels", "gate", "state", "batch", "draft", "prefill"]),
    "tables.gdn_layouts": (
        lambda rows: over(tables.gdn_layouts, rows, op=["step", "verify", "extend"]),
        ["op", *CASE],
    ),
    "tables.first_token": (lambda rows: over(tables.first_token, rows, own=[False, True]), ["own", "prefill"]),
    "tables.chunk_states": (tables.chunk_states, ["prefill", "form", "BV"]),
    "tables.chunk_state_layouts": (tables.chunk_state_layouts, ["prefill", "BV"]),
    "tables.drift": (tables.drift, ["gate", "state", "variant", "tokens"]),
    "claims.narrow_tile": (observed(claims.narrow_tile), ["case"]),
    "claims.equal_lines": (observed(claims.equal_lines), ["case"]),
    "claims.decode": (observed(claims.decode), ["case"]),
    "claims.vllm_estimate": (lambda rows: over(claims.vllm_estimate, rows, tile=[8, 32]), ["tile", "batch"]),
    "claims.vllm_table": (observed(claims.vllm_table), ["case"]),
    "claims.first_token": (observed(claims.first_token), ["case"]),
}
NOT_AUDITED = {
    "claims.pairs": "names",
    "tables.ordered": "an order, no numbers",
    "tables.spilling": "names; what it leaves out is left out of ratios and best",
    "tables.production": "the cases of other tables",
    "tables.families": "words",
    "share.state_share": "in end_to_end_estimate and shares",
    "share.prefill_share": "in first_token",
    "share.time_share": "in end_to_end_estimate",
    "share.end_to_end": "in end_to_end_estimate",
    "claims.estimate": "in decode and vllm_estimate",
    "claims.vllm_heads": "a name; in vllm_estimate",
}


# One test a GPU: tables share intervals, which take most of the time.
@pytest.mark.parametrize("gpu", GPUS)
def test_tables_and_sentences_are_those_of_the_audit(gpu, record_property):
    rows = read(gpu, audit.STUDY)
    cells, wrong = compared(audit.TABLES, rows, LAB)
    assert all(cells.values()), cells
    wrong += unsaid(audit.SENTENCES, VIEWS, rows)
    assert not wrong, "\n".join(wrong[:20])
    record_property("cells", sum(cells.values()))


def test_every_public_table_is_audited_or_says_why_not():
    assert public(tables, share, claims) == set(audit.TABLES) | set(NOT_AUDITED)
    assert set(audit.TABLES) == set(LAB)
    assert not set(audit.TABLES) & set(NOT_AUDITED)


SIMPLE = {"op": "decode", "cache": "cold", "variant": "VK BV=8, 1 warp"}  # of Qwen3-Next's largest case
RELEASED = {"op": "verify", "cache": "cold", "variant": "sglang 0.5.10rc0 VK"}


@pytest.mark.parametrize(
    ("names", "row", "size"),
    [
        (["tables.times", "tables.ratios"], SIMPLE, {"model": audit.NEXT, "state": "fp32", "batch": 512}),
        (["tables.released", "claims.narrow_tile"], RELEASED, {"gate": "GDN", "draft": "tree", "batch": 64}),
    ],
)
def test_a_changed_sample_or_cell_is_found(names, row, size):
    rows = read(GPUS[0], audit.STUDY)
    changed = with_a_sample_changed(rows, size, **row)
    for name in names:
        check_changes_are_found(*LAB[name], audit.TABLES[name], rows, changed)
