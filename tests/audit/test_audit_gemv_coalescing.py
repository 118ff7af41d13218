"""The tables of the study of coalesced GEMVs against the audit's, cell by cell, on the rows of every GPU."""

import gemv_coalescing as audit
import pandas as pd
import pytest
from common import (
    DATA,
    GPUS,
    check_changes_are_found,
    compared,
    over,
    public,
    read,
    unsaid,
    with_a_sample_changed,
)

from labkit.studies.gemv_coalescing import answer, chain_views, claims, shown, tables, views

SHAPE = audit.SHAPE


def by_variant(rows):
    """`tables.by_variant` as a line a shape and variant."""
    wide = tables.by_variant(rows).droplevel("MB")
    return wide.rename_axis(columns="variant").stack().dropna().rename("us").reset_index()


def fastest(rows):
    """`tables.fastest` of the file that the rows are from, as a line a shape, type and cache."""
    folder = rows["gpu"].iloc[0].lower().replace(" ", "-")
    table = tables.fastest(DATA / folder / f"{audit.STUDY}.parquet")
    key = ("N", "K", "bytes")
    return pd.DataFrame(
        dict(zip(key, shape, strict=True)) | {"cache": cache} | choice.as_dict()
        for shape, choices in table.items()
        for cache, choice in choices.items()
    )


def same_bits(rows):
    return pd.concat([tables.same_bits(rows, names).assign(of=of) for of, names in audit.BITS.items()])


def pays_from(rows):
    return pd.DataFrame([{"of": "all shapes", "N": tables.pays_from(tables.pattern(rows))}])


def pattern_share(rows):
    return tables.pattern_share(rows, audit._token(audit.SMALL, merged=False))


def of_ceiling(rows):
    return tables.of_ceiling(rows, audit.QWEN, ["ours, merged", "ours, kernels between, merged"])


def token_blocks(rows):
    blocks = over(tables.token_blocks, rows, model=[audit.QWEN], merged=[True, False])
    return blocks.explode(["run", "block", "samples_ns"]).rename(columns={"samples_ns": "ns"})


def merging(rows):
    """`chain_views.merging` by the recorded names."""
    return chain_views.merging(rows).replace({"kernel": {chain_views.CUBLAS: "torch.mv", shown.LAB: "ours"}})


def observed(claim):
    """A table of what a claim is judged by."""
    return lambda rows: pd.DataFrame([vars(one) for one in claim(rows).observations])


VIEWS = {"views": views, "chain_views": chain_views}
LAB = {  # table -> the lab's, and the columns that say which line it is
    "tables.times": (
        lambda rows: over(tables.times, rows, op=["gemv", "tune", "chain"]),
        ["op", *SHAPE, "model", "variant"],
    ),
    "tables.by_variant": (by_variant, ["N", "K", "variant"]),
    "tables.fastest": (fastest, ["N", "K", "bytes", "cache"]),
    "tables.against_cublas": (
        lambda rows: pd.concat(
            [tables.against_cublas(rows, name).assign(of=name) for name in (audit.WIDE, audit.TUNED, audit.OURS)]
        ),
        ["of", *SHAPE],
    ),
    "tables.other_choice": (tables.other_choice, SHAPE),
    "tables.steps": (tables.steps, ["step", "over"]),
    "tables.ladder": (lambda rows: over(tables.ladder, rows, model=[None, audit.LLAMA]), ["model", *SHAPE, "step"]),
    "tables.same_bits": (same_bits, ["of", *SHAPE]),
    "tables.rows_map": (tables.rows_map, ["shape", "rows"]),
    "tables.pattern": (tables.pattern, SHAPE),
    "tables.pays_from": (pays_from, ["of"]),
    "tables.pattern_share": (pattern_share, SHAPE),
    "tables.unseen": (tables.unseen, SHAPE),
    "tables.splits": (tables.splits, SHAPE),
    "tables.choices": (lambda rows: tables.choices(rows, audit.QWEN), ["shape", "warps", "rows"]),
    "tables.chains": (tables.chains, ["model", "variant"]),
    "tables.beyond_reading": (tables.beyond_reading, ["variant"]),
    "tables.of_ceiling": (of_ceiling, ["variant"]),
    "tables.token_total": (lambda rows: over(tables.token_total, rows, model=audit.TOKENS), ["model", "rule"]),
    "tables.token_blocks": (token_blocks, ["merged", "variant", "run", "block"]),
    "tables.from_chain": (lambda rows: over(tables.from_chain, rows, model=audit.TOKENS), ["model", "of"]),
    "chain_views.merging": (merging, ["model", "kernel"]),
    "claims.step": (observed(claims.step), ["case"]),
    "claims.pattern": (observed(claims.pattern), ["case"]),
    "claims.rule": (observed(claims.rule), ["case"]),
    "claims.ceiling": (observed(claims.ceiling), ["case"]),
}
NOT_AUDITED = {"tables.shapes": "words", "claims.pairs": "names"}


# One test a GPU: tables share intervals, which take most of the time.
@pytest.mark.parametrize("gpu", GPUS)
def test_tables_and_sentences_are_those_of_the_audit(gpu, record_property):
    rows = read(gpu, audit.STUDY)
    cells, wrong = compared(audit.TABLES, rows, LAB)
    assert all(cells.values()), cells
    wrong += unsaid(audit.SENTENCES, VIEWS, rows)
    assert answer.facts(rows) == pytest.approx(audit.answer_facts(rows))
    assert not wrong, "\n".join(wrong[:20])
    record_property("cells", sum(cells.values()))


def test_every_public_table_is_audited_or_says_why_not():
    assert public(tables, claims) | {"chain_views.merging"} == set(audit.TABLES) | set(NOT_AUDITED)
    assert set(audit.TABLES) == set(LAB)
    assert not set(audit.TABLES) & set(NOT_AUDITED)


CHANGED = ["tables.by_variant", "tables.against_cublas", "tables.token_total"]
ROW = {"op": "gemv", "cache": "cold", "variant": audit.OURS}
SIZE = {"dtype": "bf16", "N": 152960, "K": 2560}


def test_a_changed_sample_or_cell_is_found():
    rows = read(GPUS[0], audit.STUDY)
    changed = with_a_sample_changed(rows, SIZE, **ROW)
    for name in CHANGED:
        check_changes_are_found(*LAB[name], audit.TABLES[name], rows, changed)
