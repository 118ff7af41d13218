"""Claims of the GEMV study, on rows with made-up times: each can come out every way that it can name."""

import math
import re

import pytest
import rows as made

from labkit.bench import verdict
from labkit.bench.claim import OURS, SIZES, VERDICTS
from labkit.bench.spec import CONTROL, Case
from labkit.bench.tables import pairs
from labkit.shapes import LINEAR, LinearModel
from labkit.studies.gemv_coalescing import claims, study, tables
from labkit.studies.gemv_coalescing import variants as names

TOY = LinearModel(  # stands for both models
    "toy",
    {"mixer": (3, ((2048, (4096, 1024)), (4096, (2048,)))), "wide": (3, ((2048, (8192,)),))},
    ("mixer", "wide"),
    ((32000, 2048),),
)
COUNTS = {
    True: {(32000, 2048): 1, (5120, 2048): 3, (2048, 4096): 3, (8192, 2048): 3},
    False: {(32000, 2048): 1, (4096, 2048): 3, (1024, 2048): 3, (2048, 4096): 3, (8192, 2048): 3},
}
STEP_1, STEP_4 = map(names.separate, (names.THREAD_A_ROW, names.WIDE_LOADS))
SHORT = Case("gemv", {"N": 2048, "K": 4096, "dtype": "bf16"}).key


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(verdict, "RESAMPLES", 100)
    for name in (claims.SMALL, claims.PULL_REQUEST):
        monkeypatch.setitem(LINEAR, name, TOY)
    cases = study.STUDY.cases
    monkeypatch.setitem(vars(study.STUDY), "cases", lambda parameters: [x for x in cases(parameters) if x.op != "tune"])


def frame(over=None, spread=1e-3, **changes):
    """Rows with times over those of reading. over: by variant, 1.25 for others; or a function of case and variant."""
    parameters = {"models": [claims.SMALL, claims.PULL_REQUEST], "dtypes": ["bf16"]}
    return made.make("gemv_coalescing", parameters, made.gemv_us(over or {}), spread, **changes)


def judged(name, rows):
    [claim] = [one for one in claims.CLAIMS if one.id == name]
    found = claim.judge(rows)
    assert not re.search(r"\bnan\b", f"{found.measured} {found.why}")
    return found


def words(name, rows):
    found = judged(name, rows)
    assert (found.code, found.verdict in VERDICTS, found.size in SIZES) == (OURS, True, True)
    return found.verdict, found.direction, found.size


@pytest.mark.parametrize(
    ("ratio", "spread", "found"),
    [
        (2.36, 1e-3, ("consistent", "holds", "as published")), (2.8, 1e-3, ("consistent", "holds", "as published")),
        (1.5, 1e-3, ("consistent", "holds", "less")), (20.0, 1e-3, ("consistent", "holds", "more")),
        (1.0, 1e-3, ("disagrees", "fails", "less")), (0.4, 1e-3, ("disagrees", "fails", "less")),
        (1.02, 0.1, ("unclear", "unclear", "less")),
    ],
)  # fmt: skip
def test_step(ratio, spread, found):
    assert words("step", frame({STEP_1: 1.25 * ratio}, spread)) == found


def test_step_is_one_ratio_with_its_noise_and_says_what_differs():
    found = judged("step", frame({STEP_1: 2.5}))
    assert found.measured.startswith("2.00× faster [2.00, 2.00]: ")
    assert "another GPU than its RTX 5090 Laptop" in found.why
    rows = frame({STEP_1: 1.4})
    assert judged("step", rows).direction == "holds"
    assert judged("step", louder(rows)).direction == "unclear"


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: claim.id)
def test_on_its_own_gpu_a_part_in_our_code_still_reproduces_nothing(claim):
    gpu = {"RTX 5090 Laptop": "NVIDIA GeForce RTX 5090 Laptop GPU", "M4 Max": "Apple M4 Max"}[claim.gpus[0]]
    there, here = (claim.judge(frame(GAIN | {STEP_1: 2.5}, **gpu)) for gpu in ({"gpu": gpu}, {}))
    assert f"another GPU than its {claim.gpus[0]}" in here.why
    assert "another GPU" not in there.why
    assert claim.differs in there.why
    assert there.verdict == here.verdict
    assert there.verdict in ("consistent", "disagrees")


def louder(rows, factor=1.2):
    """The rows with an A/A control that takes longer than what it repeats."""
    late = zip(rows["samples_ns"], rows["variant"] == CONTROL, strict=True)
    return rows.assign(samples_ns=[[factor * ns for ns in some] if control else some for some, control in late])


def by_shape(turned, default=1.25):
    """Step 1 takes 9, step 4 takes 1.5. turned: N -> step 2."""
    times = {names.THREAD_A_ROW: 9.0, names.WIDE_LOADS: 1.5}
    return lambda x, name: (
        turned(x["N"]) if name == names.THREAD_A_ROW_TURNED and x.op == "gemv" else times.get(name, default)
    )


def left(share):
    """What step 2 takes to have this share of the gain from 9 to 1.5."""
    return 9.0 / 6.0**share


@pytest.mark.parametrize(
    ("share", "spread", "found"),
    [
        (1.0, 1e-3, ("consistent", "holds")), (1.3, 1e-3, ("consistent", "holds")),
        (0.8, 1e-3, ("consistent", "holds")), (0.7, 1e-3, ("disagrees", "fails")),
        (0.0, 1e-3, ("disagrees", "fails")), (-0.5, 1e-3, ("disagrees", "fails")),
        (0.76, 0.1, ("unclear", "unclear")),
    ],
)  # fmt: skip
def test_pattern(share, spread, found):
    rows = frame(by_shape(lambda n: left(share)), spread)
    assert words("pattern", rows) == (*found, "not comparable")
    assert "in 5 cases" in judged("pattern", rows).measured


def test_pattern_at_some_shapes_alone_is_unclear():
    rows = frame(by_shape(lambda n: left(1.0 if n > 4096 else 0.0)))
    assert words("pattern", rows)[0] == "unclear"
    assert judged("pattern", rows).why.startswith("as claimed in 2 of 5 cases; ")


def test_the_share_of_the_pattern_by_hand():
    table = tables.pattern_share(frame(by_shape(lambda n: left(0.4))), [(2048, 4096), (7, 7)])
    [line] = table.to_dict("records")
    assert (line["N"], line["runs"]) == (2048, 3)
    assert line["ratio"] == pytest.approx(0.4, abs=2e-3)
    assert line["low"] < line["ratio"] < line["high"]
    loud = tables.pattern_share(louder(frame(by_shape(lambda n: left(0.4))), 1.01), [(2048, 4096)])
    assert loud["noise"].tolist() == pytest.approx([0.01 * 1.4 / math.log(6)], rel=0.1)


def test_without_a_gain_there_is_nothing_to_explain():
    for wide in (9.0, 18.0):
        rows = frame({names.THREAD_A_ROW: 9.0, names.WIDE_LOADS: wide})
        found = judged("pattern", rows)
        assert (found.verdict, "and a gain, in 3 processes" in found.why) == ("not testable here", True)


def rows_of(one, four, plain_one=None, plain_four=None):
    """Times of one row and of four rows a program, with dependent launch and without."""
    return {
        names.rows_variant(1): one, names.rows_variant(4): four,
        names.plain_rows_variant(1): plain_one or one, names.plain_rows_variant(4): plain_four or four,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("times", "found"),
    [
        (rows_of(1.2, 1.2), ("consistent", "holds")), (rows_of(1.2, 1.22), ("consistent", "holds")),
        (rows_of(1.2, 2.4), ("disagrees", "fails")), (rows_of(2.4, 1.2), ("disagrees", "fails")),
        (rows_of(1.2, 1.2, 1.2, 2.4), ("unclear", "unclear")),  # without dependent launch alone
    ],
)  # fmt: skip
def test_rule(times, found):
    rows = frame(times)
    assert words("rule", rows) == (*found, "not comparable")
    assert "in 8 cases" in judged("rule", rows).measured


def test_rule_is_unclear_where_processes_do_not_agree():
    rows = frame(rows_of(1.2, 1.2))
    four = rows["variant"].isin([names.rows_variant(4), names.plain_rows_variant(4)])
    lists = zip(rows["samples_ns"], rows["run"], four, strict=True)
    apart = [[ns * (1.3 if one and run == 2 else 1) for ns, run in zip(some, runs, strict=True)]
             for some, runs, one in lists]  # fmt: skip
    assert words("rule", rows.assign(samples_ns=apart))[0] == "unclear"


def test_the_band_of_the_rule_is_of_the_published_figure_alone():
    [claim] = [one for one in claims.CLAIMS if one.id == "rule"]
    assert claim.band == (39.5 / 41.5, 41.5 / 39.5)
    assert "as printed between 39.5 and 41.5 ms" in claim.published
    assert "no change: 0.952 to 1.051 times as long" in claim.note


def reading(n, k):
    return 2 + (n * k + n + k) * 2 / 3e6


def token_us(merged, most=10**9):
    """µs of reading a token's matrices of up to so many rows."""
    return sum(count * reading(*shape) for shape, count in COUNTS[merged].items() if shape[0] <= most)


@pytest.mark.parametrize("merged", [True, False])
def test_a_token_is_summed_block_by_block(merged):
    rows = frame(rows_of(1.3, 1.2))
    token = tables.token_blocks(rows, claims.PULL_REQUEST, merged)
    assert set(token["variant"]) == {
        tables.RULE, tables.RULE_PLAIN, tables.ONE, tables.ONE_PLAIN, tables.FOUR, tables.FOUR_PLAIN, tables.TUNED,
        CONTROL,
    }  # fmt: skip
    total, short = token_us(merged), token_us(merged, tables.RULE_ROWS)
    [one, four] = pairs(token, [(tables.ONE, tables.RULE), (tables.FOUR, tables.RULE)])
    assert one["ratio"] == pytest.approx((1.2 * total + 0.1 * short) / (1.3 * total), rel=2e-3)
    assert four["ratio"] == pytest.approx((1.2 * total + 0.1 * short) / (1.2 * total), rel=2e-3)
    assert (one["runs"], one["against us"]) == (3, pytest.approx(1.2 * total + 0.1 * short, rel=2e-3))
    assert 0 < one["noise"] < 2e-3
    [loud] = pairs(tables.token_blocks(louder(rows), claims.PULL_REQUEST, merged), [(tables.ONE, tables.RULE)])
    assert loud["noise"] == pytest.approx(0.2, abs=0.05)


def test_only_blocks_that_every_shape_has_are_summed():
    rows = frame()
    lists = ("run", "block", "samples_ns")
    fewer = [case == SHORT for case in rows["case"]]
    for name in lists:  # 25 of 30: the last process has half its blocks there
        rows[name] = [list(some)[:25] if less else list(some) for some, less in zip(rows[name], fewer, strict=True)]
    token = tables.token_blocks(rows, claims.PULL_REQUEST, merged=True)
    assert {len(ns) for ns in token["samples_ns"]} == {25}
    assert list(token["block"].iloc[0])[-6:] == [9, 0, 1, 2, 3, 4]
    hole = (rows["case"] == SHORT) & (rows["variant"] == names.rows_variant(1))
    left_out = set(token["variant"]) - set(
        tables.token_blocks(made.unusable(rows, hole), claims.PULL_REQUEST, merged=True)["variant"]
    )
    assert left_out == {tables.RULE, tables.ONE}  # which take one row there
    assert tables.token_blocks(rows[rows["case"] != SHORT], claims.PULL_REQUEST, merged=True).empty


@pytest.mark.parametrize(
    ("chain", "between", "spread", "found"),
    [
        (1.1, 1.5, 1e-3, ("disagrees", "fails")), (2.5, 3.0, 1e-3, ("consistent", "holds")),
        (1.1, 3.0, 1e-3, ("unclear", "unclear")), (2.1, 2.1, 0.3, ("unclear", "unclear")),
    ],
)  # fmt: skip
def test_ceiling(chain, between, spread, found):
    rows = frame({names.CHAIN_OURS: chain, names.BETWEEN_OURS: between}, spread)
    assert words("ceiling", rows) == (*found, "not comparable")


def test_the_share_of_the_ceiling_by_hand():
    least = study.floor(Case("chain", {"model": claims.PULL_REQUEST, "dtype": "bf16"})).bytes / 3e6
    rows = frame({names.CHAIN_OURS: 1.1, names.BETWEEN_OURS: 1.5})
    table = tables.of_ceiling(rows, claims.PULL_REQUEST, [names.CHAIN_OURS, names.BETWEEN_OURS])
    assert table["ratio"].tolist() == pytest.approx([least / over / (2 + least) for over in (1.1, 1.5)], rel=3e-3)
    assert (table["low"] < table["ratio"]).all()
    assert (table["ratio"] < table["high"]).all()
    said = judged("ceiling", rows)
    shares = [round(100 * share) for share in table["ratio"]]
    assert [int(text) for text in re.findall(r"(?:alone|between) (\d+) %", said.measured)] == shares
    one = judged("ceiling", made.without(rows, variant=names.BETWEEN_OURS))
    assert (one.verdict, one.why.startswith("not as claimed; ")) == ("disagrees", True)


def test_above_a_ceiling_as_printed_is_above_45_5_percent():
    least = study.floor(Case("chain", {"model": claims.PULL_REQUEST, "dtype": "bf16"})).bytes / 3e6
    for share, direction in ((0.45, "holds"), (0.4, "holds"), (0.47, "fails")):
        over = least / (2 + least) / share
        rows = frame({names.CHAIN_OURS: over, names.BETWEEN_OURS: over})
        assert judged("ceiling", rows).direction == direction


NEEDED = {
    "step": [STEP_1, STEP_4],
    "pattern": [names.THREAD_A_ROW, names.THREAD_A_ROW_TURNED, names.WIDE_LOADS],
    "rule": [make(rows) for make in (names.rows_variant, names.plain_rows_variant) for rows in (1, 4)],
}
GAIN = {names.THREAD_A_ROW: 9.0}


@pytest.mark.parametrize("name", [*NEEDED, "ceiling"])
def test_what_cannot_be_judged_is_not_testable_here(name):
    rows = frame(GAIN)
    assert judged(name, rows).verdict != "not testable here"
    lost = [made.without(rows, variant=one) for one in NEEDED.get(name, ())]
    lost += [made.unusable(rows, rows["variant"] == one) for one in NEEDED.get(name, ())]
    for less in (rows.iloc[:0], made.unusable(rows), made.processes(rows, 2), rows.assign(cache="hot"), *lost):
        found = judged(name, less.reset_index(drop=True))
        assert (found.verdict, found.direction, found.code) == ("not testable here", "", "")
        assert found.why.startswith("needs ")


def test_a_ceiling_needs_the_chain_and_the_speed_of_reading():
    rows = frame()
    neither = made.without(made.without(rows, variant=names.CHAIN_OURS), variant=names.BETWEEN_OURS)
    for less in (rows.assign(ceiling=math.nan), neither):
        assert judged("ceiling", less).verdict == "not testable here"


def test_a_shape_that_was_not_measured_says_nothing_of_a_token():
    rows = frame(GAIN)
    assert judged("rule", rows[rows["case"] != SHORT]).verdict == "not testable here"
    assert "in 4 cases" in judged("pattern", rows[rows["case"] != SHORT]).measured


@pytest.mark.parametrize("name", ["step", "pattern", "rule", "ceiling"])
def test_without_a_control_only_what_lies_in_the_band_is_clear(name):
    """Nobody knows how much noise there was, so nothing is beyond it."""
    far = {STEP_1: 9.0, names.THREAD_A_ROW: 9.0, names.THREAD_A_ROW_TURNED: 1.25, **rows_of(1.2, 2.4)}
    rows = frame(far)
    assert judged(name, rows).direction in ("holds", "fails")
    found = judged(name, made.without(rows, variant=CONTROL))
    assert found.direction == ("" if name == "pattern" else "unclear")  # of the pattern, whether there is a gain


def test_each_rule_has_a_hash_and_each_cause_what_would_refute_it():
    assert len({one.sha() for one in claims.CLAIMS}) == 4
    assert {one.id for one in claims.CLAIMS if one.refutes} == {"pattern", "ceiling"}
    assert all(one.differs and one.gpus for one in claims.CLAIMS)
