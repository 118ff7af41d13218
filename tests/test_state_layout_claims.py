"""Claims of the state layout study, on rows with made-up times: each can come out every way that it can name."""

import pandas as pd
import pytest
import rows as made

from labkit.bench import verdict
from labkit.bench.claim import ESTIMATE, OURS, OWN
from labkit.shapes import QWEN3_NEXT
from labkit.studies.state_layout import claims, share
from labkit.studies.state_layout import variants as names

GRID = {
    "models": [QWEN3_NEXT.name], "batches": [1, 64], "states": ["fp32"], "gates": [], "step_batches": [],
    "prefills": [],
}  # fmt: skip
RELEASED = GRID | {"gates": ["GDN"], "step_batches": [1, 64], "prefills": ["1 x 8192", "64 x 128"]}
BEFORE, AFTER = names.released(names.BEFORE), names.released(names.AFTER)
TILE, MECHANISM, END_TO_END, TABLE, FIRST_TOKEN = (
    "sglang-20283-tile", "sglang-20283-mechanism", "sglang-20283-end-to-end", "vllm-33291-table",
    "sglang-20283-first-token",
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(verdict, "RESAMPLES", 100)


def judged(name, rows):
    [claim] = [one for one in claims.CLAIMS if one.id == name]
    return claim.judge(rows)


def simple(ratio, parameters=GRID, **changes):
    """Rows of the simple kernels alone. ratio: KV / VK, or a function of batch and tile."""
    return made.make("state_layout", parameters, made.layout_us(ratio), **changes)


def at_vllm_batches(ratio):
    return simple(ratio, GRID | {"batches": list(claims.VLLM_TABLE)})


def released(over, gpu="another"):
    """Rows with the production kernels, ours and SGLang's, as fast as each other but for `over`."""

    def us(case, variant):
        if case.op == "decode":
            return made.layout_us(1.0)(case, variant)
        name = variant.options.get("repeats", variant.name)
        return (2 + case_bytes(case) / 3e6) * over.get(name, over.get((name, case.op), 1.0))

    return made.make("state_layout", RELEASED, us).assign(gpu=gpu)


def case_bytes(case):
    from labkit.studies.state_layout import study

    return study.floor(case).bytes


@pytest.mark.parametrize(
    ("ratio", "spread", "verdict"),
    [(1.3, 1e-3, "consistent"), (0.8, 1e-3, "disagrees"), (1.0, 1e-3, "disagrees"), (1.02, 0.1, "unclear")],
)
def test_the_narrow_tile_by_our_kernel(ratio, spread, verdict):
    found = judged(TILE, simple(lambda batch, tile: ratio if tile == claims.NARROW else 1.0, spread=spread))
    assert (found.verdict, found.code) == (verdict, OURS)


@pytest.mark.parametrize(("ratio", "verdict"), [(1.3, "reproduced"), (0.8, "not reproduced")])
def test_the_narrow_tile_by_the_sources_own_verify(ratio, verdict):
    found = judged(TILE, released({(BEFORE, "verify"): ratio}))
    assert (found.verdict, found.code) == (verdict, OWN)


@pytest.mark.parametrize(
    ("ratio", "spread", "verdict"),
    [(1.0, 1e-3, "consistent"), (1.05, 1e-3, "disagrees"), (0.95, 1e-3, "disagrees"), (1.02, 0.1, "unclear")],
)
def test_the_mechanism_is_refuted_by_a_difference_where_the_lines_are_equal(ratio, spread, verdict):
    found = judged(MECHANISM, simple(lambda batch, tile: ratio if tile == claims.WIDE else 1.3, spread=spread))
    assert (found.verdict, found.code) == (verdict, OURS)
    assert "if it were the runs alone" in found.why


@pytest.mark.parametrize(("ratio", "verdict"), [(1.0, "reproduced"), (1.1, "not reproduced")])
def test_the_mechanism_by_the_sources_own_decode(ratio, verdict):
    found = judged(MECHANISM, released({(BEFORE, "step"): ratio}))
    assert (found.verdict, found.code) == (verdict, OWN)


def test_tile_and_mechanism_are_judged_where_the_gpu_is_full():
    rows = simple(lambda batch, tile: 0.5 if batch < claims.FULL else 1.3)
    assert judged(TILE, rows).direction == "holds"
    rows = simple(lambda batch, tile: 2.0 if batch < claims.FULL else 1.0)
    assert judged(MECHANISM, rows).direction == "holds"


def needed(batch, gain, context=claims.CONTEXT, weight_bytes=share.NVFP4_BYTES):
    """The kernel's ratio that gives a gain, in percent.

    By hand: the ceiling moves a byte in 1, the kernels in 1.05 and, with [K, V], in 1.05 × the ratio.
    """
    part = share.state_share(QWEN3_NEXT, batch, context, weight_bytes)
    return ((1 + gain / 100) * (1.05 * part + 1 - part) - (1 - part)) / (1.05 * part)


def test_what_decode_must_have_gained_by_hand():
    low, high = claims.DECODE_SIZE  # ms without those to the first token, each off by 1 % of the first
    assert (low, high) == pytest.approx(((8210 - 82.1) / (7405 + 82.1), (8210 + 82.1) / (7405 - 82.1)))
    assert claims.FIRST_TOKEN_SIZE[0] < 14993 / 13842 < claims.FIRST_TOKEN_SIZE[1]


@pytest.mark.parametrize(
    ("gain", "verdict", "size"),
    [(10.9, "consistent", "as published"), (2, "consistent", "less"), (60, "consistent", "more"),
     (0, "disagrees", "less")],
)  # fmt: skip
def test_end_to_end_at_every_batch_by_the_tile_that_it_ships(monkeypatch, gain, verdict, size):
    monkeypatch.setattr(claims, "WEIGHTS", {"NVFP4": share.NVFP4_BYTES})
    rows = at_vllm_batches(lambda batch, tile: needed(batch, gain) if tile == claims.WIDE else 9.0)
    found = judged(END_TO_END, rows)
    assert (found.verdict, found.size, found.code) == (verdict, size, ESTIMATE)


def test_end_to_end_with_both_sizes_of_weights():
    for ratio, expected in ((1.2, "consistent"), (0.8, "disagrees")):
        found = judged(END_TO_END, at_vllm_batches(ratio))
        assert (found.verdict, "in 10 cases" in found.measured) == (expected, True)
    some = judged(END_TO_END, at_vllm_batches(lambda batch, tile: 1.2 if batch > 16 else 0.9))
    assert some.verdict == "unclear"


def test_end_to_end_by_the_sources_own_decode_where_it_ran():
    for ratio, expected in ((1.3, "consistent"), (0.7, "disagrees")):
        assert judged(END_TO_END, released({(BEFORE, "step"): ratio})).verdict == expected


def test_table_of_vllm_batch_by_batch():
    follows = judged(TABLE, at_vllm_batches(lambda batch, tile: needed(batch, claims.VLLM_TABLE[batch])))
    assert (follows.verdict, follows.size) == ("consistent", "as published")
    against = judged(TABLE, at_vllm_batches(lambda batch, tile: needed(batch, -claims.VLLM_TABLE[batch])))
    assert (against.verdict, against.size) == ("disagrees", "less")
    more = judged(TABLE, at_vllm_batches(lambda batch, tile: needed(batch, 4 * claims.VLLM_TABLE[batch])))
    assert (more.verdict, more.size) == ("consistent", "more")
    assert judged(TABLE, at_vllm_batches(1.1)).verdict == "unclear"  # as at large batches, not as at small ones


def test_table_of_vllm_takes_the_heads_of_one_of_two_gpus():
    both = [at_vllm_batches(ratio) for ratio in (2.0, 1.0)]
    both[1] = both[1].assign(case=both[1]["case"].str.replace(QWEN3_NEXT.name, claims.VLLM_HEADS))
    assert claims.vllm_estimate(pd.concat(both, ignore_index=True), 32)["gain %"].abs().max() < 0.2
    assert claims.vllm_estimate(both[0], 32)["gain %"].max() > 10  # where those were not measured


def test_table_of_vllm_is_judged_over_contexts():
    gain = claims.VLLM_TABLE[1024]
    for context in claims.CONTEXTS:
        rows = at_vllm_batches(lambda batch, tile, c=context: needed(1024, gain, c) if batch == 1024 else 1.0)
        row = claims.vllm_estimate(rows, 32).set_index("batch").loc[1024]
        assert row["low %"] - 0.1 <= gain <= row["high %"] + 0.1


@pytest.mark.parametrize(
    ("ratio", "verdict", "size"),
    [(1.085, "unclear", "unclear"), (1.02, "unclear", "less"), (1.3, "unclear", "unclear"),
     (0.9, "disagrees", "less"), (1.0, "disagrees", "less")],
)  # fmt: skip
@pytest.mark.parametrize("own", [True, False])
def test_the_first_token_by_whole_extends(ratio, verdict, size, own):
    """At most: it can refute alone. On a GPU whose peak is not known extends are all of the prefill. fla-core's layouts
    do not count."""
    rows = released({BEFORE if own else names.OURS_KV: ratio, names.fla("KV"): 9.0})
    if not own:
        rows = rows[~rows["variant"].str.startswith("sglang")]
    found = judged(FIRST_TOKEN, rows)
    assert (found.verdict, found.size, found.code) == (verdict, size, ESTIMATE)


def test_the_first_token_counts_the_extends_share_alone():
    much, little = (judged(FIRST_TOKEN, released({BEFORE: 1.3}, gpu)) for gpu in ("another", "NVIDIA H200"))
    assert (much.size, little.size) == ("unclear", "less")


MISSING = {
    "only bf16": ([TILE, MECHANISM, END_TO_END, TABLE], lambda rows: bf16(rows)),
    "a narrow tile failed": ([TILE], lambda rows: made.unusable(rows, rows["variant"] == "VK BV=8, 1 warp")),
    "a wide tile is missing": (
        [MECHANISM, END_TO_END, TABLE], lambda rows: made.without(rows, variant="KV BV=32, 1 warp"),
    ),
    "another model": ([END_TO_END, TABLE], lambda rows: rename(rows, QWEN3_NEXT.name, "other")),
    "nothing usable": ([TILE, MECHANISM, END_TO_END, TABLE], made.unusable),
    "no rows": ([TILE, MECHANISM, END_TO_END, TABLE], lambda rows: rows.iloc[:0]),
    "no batch that fills the GPU": (
        [TILE, MECHANISM, END_TO_END, TABLE], lambda rows: rows[rows["case"].str.contains('"batch": 1,')],
    ),
    "two processes": ([TILE, MECHANISM, END_TO_END, TABLE], lambda rows: made.processes(rows, 2)),
    "a narrow tile spills": ([TILE], lambda rows: made.spilling(rows, "KV BV=8, 1 warp")),
    "a wide tile spills": ([MECHANISM, END_TO_END, TABLE], lambda rows: made.spilling(rows, "VK BV=32, 1 warp")),
    "another tile spills": ([], lambda rows: made.spilling(rows, "VK BV=16, 1 warp", "KV BV=32, 4 warps")),
    "hot rows only": ([TILE, MECHANISM, END_TO_END, TABLE], lambda rows: rows[rows["cache"] == "hot"]),
}  # fmt: skip


def rename(rows, old, new):
    return rows.assign(case=rows["case"].str.replace(old, new))


def bf16(rows):
    return rename(rows, '"fp32"', '"bf16"')


@pytest.mark.parametrize(("missing", "change"), MISSING.values(), ids=MISSING)
def test_what_was_not_measured_is_not_testable_here(missing, change):
    rows = change(simple(1.2)).reset_index(drop=True)
    found = {one.id: one.judge(rows) for one in claims.CLAIMS}
    untestable = [name for name, one in found.items() if one.verdict == "not testable here"]
    assert untestable == [*missing, FIRST_TOKEN]  # of which nothing is here at all
    assert all(found[name].why.startswith("needs ") for name in untestable)
