"""The tables of the study of buffered decode and segments against the audit's, cell by cell.

On the rows of every GPU that it is recorded of, and on rows with made-up times, by which the audit itself is tried.
"""

import json

import gated_delta_today as audit
import pandas as pd
import pytest
import rows as made
from common import DATA, GPUS, check_changes_are_found, compared, observed, over, public, read, unsaid

from labkit.studies.gated_delta_today import answer, claims, tables, views

MADE_UP = "made up"
OF_DRAFTS = {"tables.verifies", "claims.whole_verify"}
RECORDED = [gpu for gpu in GPUS if (DATA / gpu / f"{audit.STUDY}.parquet").exists()]


def whole_steps(rows):
    parts = [tables.whole_steps(rows, *way).assign(way=at) for at, way in enumerate(audit.WAYS)]
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


def pairs(rows):
    parts = [tables.compared(rows, *pair) for pair in audit.PAIRS]
    said = [dict(zip(("op", "variant", "against"), pair, strict=True)) for pair in audit.PAIRS]
    return pd.concat([part.assign(**names) for part, names in zip(parts, said, strict=True)], ignore_index=True)


VIEWS = {"views": views, "answer": answer}
STEP, PROMPT = ["gate", "state", "batch"], ["H", "HV", "prefill"]
LAB = {  # table -> the lab's, and the columns that say which line it is
    "tables.times": (
        lambda rows: over(tables.times, rows, op=["ring", "layout", "ring_verify"]),
        ["op", *audit.CASE, "variant"],
    ),
    "tables.compared": (pairs, ["op", "variant", "against", *audit.CASE]),
    "tables.rings": (tables.rings, STEP),
    "tables.crossover": (tables.crossover, ["state", "whose"]),
    "tables.lengths": (tables.lengths, [*STEP, "whose", "L"]),
    "tables.best_lengths": (tables.best_lengths, [*STEP, "whose"]),
    "tables.layouts": (tables.layouts, ["kernel", "state", "writes"]),
    "tables.verifies": (tables.verifies, ["whose", "state", "batch", "draft", "T"]),
    "tables.rival_drafts": (tables.rival_drafts, ["state", "batch", "draft", "T"]),
    "tables.whole_steps": (whole_steps, ["way", "batch", "draft", "T"]),
    "tables.prefills": (tables.prefills, [*PROMPT, "variant", "against", "beside"]),
    "tables.prefill_times": (tables.prefill_times, [*PROMPT, "variant"]),
    "tables.prefill_errors": (tables.prefill_errors, [*PROMPT, "variant"]),
    "tables.first_token": (tables.first_token, ["prefill", "variant"]),
    "tables.drift": (tables.drift, ["gate", "state", "L", "tokens"]),
    "tables.read_short": (tables.read_short, ["gate", "state", "L"]),
    **{
        f"claims.{name}": (observed(getattr(claims, name)), ["case"])
        for name in (
            "faster", "traffic", "whole_step", "whole_verify", "right_length", "layout_unwritten", "few_heads",
            "more_heads",
        )
    },
}  # fmt: skip
NOT_AUDITED = {
    "claims.pairs": "names",
    "tables.ordered_cases": "an order, no numbers",
    "tables.full": "the lines of other tables",
    "tables.searched": "names",
    "tables.predicted_lengths": "of no row: tests/test_gated_delta_today.py",
    "tables.memory": "of no row: tests/test_gated_delta_today.py",
    "tables.most_sequences": "of no row: tests/test_gated_delta_today.py",
}


def times(case, name):
    """Made-up times in which nothing is like anything else."""
    length = int(name.split()[-1]) if "L = " in name else 7
    size = case.params.get("batch", 1) + case.params.get("T", 0) + len(case.params.get("prefill", ""))
    wide = 1.1 if case.params.get("state") == "fp32" else 1.0
    return wide * (1.2 + (sum(map(ord, name)) % 17) / 17 + 0.01 * (size % 13) + 0.002 * length)


@pytest.fixture(scope="module")
def rows_of():
    frame = made.today(times, gpu="NVIDIA H100 80GB HBM3")
    frame = frame.assign(params=frame["case"].map(json.loads), chosen=frame["options"].map(json.loads))
    return lambda gpu: frame if gpu == MADE_UP else read(gpu, audit.STUDY)


@pytest.mark.parametrize("gpu", [MADE_UP, *RECORDED])
def test_tables_and_sentences_are_those_of_the_audit(gpu, rows_of, record_property):
    rows = rows_of(gpu)
    unmeasured = set() if "ring_verify" in set(rows["op"]) else OF_DRAFTS
    audited, lab = ({name: one for name, one in both.items() if name not in unmeasured} for both in (audit.TABLES, LAB))
    cells, wrong = compared(audited, rows, lab)
    assert all(cells.values()), cells
    wrong += unsaid(audit.SENTENCES, VIEWS, rows)
    assert not wrong, "\n".join(wrong[:20])
    record_property("cells", sum(cells.values()))


def test_every_public_table_is_audited_or_says_why_not():
    assert public(tables, claims) == set(audit.TABLES) | set(NOT_AUDITED)
    assert set(audit.TABLES) == set(LAB)
    assert not set(audit.TABLES) & set(NOT_AUDITED)


@pytest.mark.parametrize("name", ["tables.rings", "tables.lengths", "tables.first_token"])
def test_a_changed_time_or_cell_is_found(name, rows_of):
    rows = rows_of(MADE_UP)
    slower = rows["variant"].isin([audit.SEARCHED, "ours, L = 8", audit.FUSED])
    changed = rows.assign(
        samples_ns=[
            [ns // 2 for ns in some] if slow else some for some, slow in zip(rows["samples_ns"], slower, strict=True)
        ]
    )
    check_changes_are_found(*LAB[name], audit.TABLES[name], rows, changed)
