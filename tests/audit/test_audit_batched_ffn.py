"""The tables of the study of products of GGUF weights against the audit's, cell by cell, on the rows of every GPU."""

from types import SimpleNamespace

import batched_ffn as audit
import batched_ffn_said
import pandas as pd
import pytest
from common import (
    GPUS,
    check_changes_are_found,
    compared,
    over,
    public,
    read,
    unsaid,
    with_a_sample_changed,
)
from once import made_once

from labkit.bench.tables import picked
from labkit.studies.batched_ffn import answer, claims, llama_views, tables, views, work

SHAPE = audit.SHAPE


def pairs(rows):
    return pd.concat(
        [
            tables.compared(rows, op, variant, against).assign(op=op, variant=variant, against=against)
            for op, variant, against in audit.PAIRS
        ]
    )


def passes(rows):
    return pd.DataFrame(
        [
            picked(params, SHAPE) | {"variant": variant, "passes": tables.passes(variant, params)}
            for params, group in tables.cases(rows, "product")
            for variant in group["variant"]
        ]
    )


def beside(rows):
    return pd.concat([tables.beside(rows, op, one).assign(op=op, library=one) for op, one in audit.LIBRARIES])


def crossovers(rows):
    names = {"matrix instructions from": "matrix least N", "multiply-add up to": "multiply-add most N"}
    return tables.crossovers(rows).rename(columns=names)  # which would pass for ends of intervals


def oracle(rows):
    found = [params for params, _ in tables.cases(rows, "cache") if params["N"] == 1]
    return pd.DataFrame([picked(params, SHAPE) | {"best": tables.oracle(params)} for params in found])


def hit_rates(rows):
    return tables.hit_rates(audit.TRACES, tuple(tables.cache.POLICIES), audit.CAPACITIES, length=audit.LENGTH)


def observed(claim):
    """A table of what a claim is judged by."""
    return lambda rows: pd.DataFrame([vars(one) for one in claim(rows).observations])


LAB = {  # table -> the lab's, and the columns that say which line it is
    "tables.times": (lambda rows: over(tables.times, rows, op=audit.OPS), ["op", *SHAPE, "variant"]),
    "tables.passes": (passes, [*SHAPE, "variant"]),
    "tables.designs": (tables.designs, ["rows", "K", "format", "N", "against"]),
    "tables.arithmetic": (tables.arithmetic, SHAPE),
    "tables.issued": (lambda rows: tables.issued(rows, audit.launches_of(rows)), SHAPE),
    "tables.compared": (pairs, ["op", *SHAPE, "variant", "against"]),
    "tables.gains": (tables.gains, [*SHAPE, "step"]),
    "tables.beside": (beside, ["op", "library", *SHAPE]),
    "tables.crossovers": (crossovers, ["format", "rows", "K"]),
    "tables.price": (tables.price, SHAPE),
    "tables.gemlite": (tables.gemlite, SHAPE),
    "tables.beside_llama": (lambda rows: over(tables.beside_llama, rows, op=["product", "routed"]), ["op", *SHAPE]),
    "tables.bits": (tables.bits, ["op", "variant", "who"]),
    "tables.stored_bits": (tables.stored_bits, SHAPE),
    "tables.cached": (tables.cached, SHAPE),
    "tables.oracle": (oracle, SHAPE),
    "tables.reuse": (lambda rows: tables.reuse(audit.REUSED_AT), ["N"]),
    "tables.hit_rates": (hit_rates, ["trace", "policy", "capacity"]),
    **{
        name: (observed(getattr(claims, name.removeprefix("claims."))), ["case"])
        for name in audit.TABLES
        if name.startswith("claims.")
    },
}
NOT_AUDITED = {
    "claims.pairs": "names",
    "tables.cases": "an order, no numbers",
    "tables.differs": "a word; in bits and stored_bits",
    "work.routing": "what was drawn; in oracle",
    "work.steps": "in oracle",
    "work.distinct": "in oracle",
    "work.weight_bytes": "what is recorded as floor_bytes",
}


def said(rows):
    """Conclusion and advice of one GPU."""
    facts = {"GPU": answer.facts(rows)}
    return f"{answer.conclusion(facts)} {answer.advice(facts)}"


def drawn(rows):
    """The table beneath the first figure, four digits of each number."""
    table = answer.hero(rows).table
    return table.assign(**{name: table[name].map("{:.4f}".format) for name in ("ratio", "least", "most")})


VIEWS = {"views": views, "llama_views": llama_views, "answer": SimpleNamespace(said=said, hero=drawn)}


ASKED_AGAIN = ("cases", "times", "compared", "beside", "cached", "bits", "gains")


# One test a GPU: tables share intervals, which take most of the time.
@pytest.mark.parametrize("gpu", GPUS)
def test_tables_and_sentences_are_those_of_the_audit(gpu, monkeypatch, record_property):
    rows = read(gpu, audit.STUDY)
    made_once(monkeypatch, tables, ASKED_AGAIN)
    cells, wrong = compared(audit.TABLES, rows, LAB)
    wrong += unsaid(batched_ffn_said.SENTENCES, VIEWS, rows)
    assert not wrong, "\n".join(wrong[:20])
    not_timed = set() if "designs" in set(rows["op"]) else {"tables.designs"}
    assert all(count for name, count in cells.items() if name not in not_timed), cells
    record_property("cells", sum(cells.values()))


def test_every_public_table_is_audited_or_says_why_not():
    assert public(tables, work, claims) == set(audit.TABLES) | set(NOT_AUDITED)
    assert set(audit.TABLES) == set(LAB)
    assert not set(audit.TABLES) & set(NOT_AUDITED)


CHANGED = ["tables.times", "tables.beside", "claims.read_once"]
ROW = {"op": "product", "cache": "cold"}
SIZE = {"rows": 17408, "K": 5120, "format": "Q4_K", "N": 8}
OF = {"tables.times": audit.MATRIX, "tables.beside": audit.MATRIX, "claims.read_once": audit.LOOP}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_sample_or_cell_is_found(name):
    rows = read(GPUS[0], audit.STUDY)
    changed = with_a_sample_changed(rows, SIZE, variant=OF[name], **ROW)
    check_changes_are_found(*LAB[name], audit.TABLES[name], rows, changed)
