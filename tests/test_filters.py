"""Runs that show a part: their names, and what is refused because nothing of it is recorded."""

import re

import pytest
from toy_lab import SLUG, row

from labkit import paths
from labkit.bench import records
from labkit.bench.spec import Case, Floor, Study, integer, list_of, one_of
from labkit.workflow import filters

# Names of files


@pytest.mark.parametrize(
    ("changed", "suffix"),
    [
        ({}, ""),
        ({"batches": [7]}, "--batches-7"),
        ({"batches": [1, 32], "models": ["Qwen3.5-27B"]}, "--batches-1,32--models-Qwen3.5-27B"),
        ({"gates": []}, "--gates-none"),
        ({"source": "predicted", "gpu": "l40s"}, "--predicted--gpu-l40s"),
        ({"scale": -0.5}, "--scale--0.5"),
    ],
)
def test_a_name_says_the_parameters(changed, suffix):
    assert filters.suffix(changed) == suffix


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prefills": ["1 x 512"]}, {"prefills": ["1_x_512"]}),
        ({"label": "a/b"}, {"label": "a:b"}),
        ({"label": "ä"}, {"label": "ö"}),
        ({"batches": list(range(100))}, {"batches": list(range(101))}),
        ({"add": ["/one/my.py:mine"]}, {"add": ["/two/my.py:mine"]}),
    ],
)
def test_what_a_name_cannot_say_is_told_apart_by_a_hash(one, other):
    found = [filters.suffix(changed) for changed in (one, other)]
    assert found[0] != found[1]
    assert found[0] == filters.suffix(one)
    for text in found:
        assert re.fullmatch(r"--[A-Za-z0-9_.,-]+", text)
        assert len(text) <= filters.LONGEST
    assert "one" not in filters.suffix({"add": ["/one/my.py:mine"]})


# What is recorded


def cases(parameters):
    """Of two operations: what a parameter chooses of the one is not asked of the other."""
    decode = [Case("decode", {"batch": batch, "state": state}) for batch in parameters["batches"] for state in
              parameters["states"]]  # fmt: skip
    return [*decode, *(Case("step", {"T": tokens}) for tokens in parameters["tokens"])]


RULES = {
    "batches": list_of(integer(1, 64)), "states": list_of(one_of("fp32", "bf16")),
    "tokens": list_of(integer(1, 64), empty=True), "deep": one_of(True, False),
}  # fmt: skip
DEFAULTS = {"source": "auto", "gpu": "", "batches": [1, 8], "states": ["fp32", "bf16"], "tokens": [4], "deep": False}
STUDY = Study("toy", "", "", cases, lambda case: [], lambda case: "", lambda case: Floor(1), parameters=RULES)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Recorded: the default cases but batch 8 with bf16, and batch 16, which is no default."""
    monkeypatch.setattr(paths, "DATA", tmp_path)
    wanted = [case for case in cases(DEFAULTS) if dict(case.params) != {"batch": 8, "state": "bf16"}]
    wanted.append(Case("decode", {"batch": 16, "state": "fp32"}))
    rows = [row("toy", case.op, case.key, "a", "ours", "0" * 12, [1]) for case in wanted]
    records.write(tmp_path / SLUG / "toy.parquet", rows)


@pytest.mark.parametrize(
    "values",
    [
        {}, {"batches": [1]}, {"batches": [16]}, {"batches": [1, 7]}, {"states": ["bf16"]}, {"tokens": []},
        {"batches": [8], "states": ["fp32"]}, {"gpu": SLUG}, {"gpu": "l40s", "source": "predicted"}, {"deep": True},
    ],
)  # fmt: skip
def test_what_is_recorded_may_be_asked_for(recorded, values):
    filters.check(STUDY, values, DEFAULTS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batches": [7]}, r"toy: parameter batches is \[7\], of which nothing is recorded; recorded: 1, 8, 16$"),
        ({"batches": [7, 9]}, r"batches is \[7, 9\], of which nothing is recorded; recorded: 1, 8, 16$"),
        ({"tokens": [5]}, r"tokens is \[5\], of which nothing is recorded; recorded: 4$"),
        ({"batches": [8], "states": ["bf16"]}, r"batches is \[8\], of which nothing is recorded; recorded: 1$"),
        ({"batches": [7], "gpu": SLUG}, rf"nothing is recorded on {SLUG}; recorded: 1, 8, 16$"),
        ({"gpu": "nvidia-other"}, rf"gpu is 'nvidia-other', of which nothing is recorded; recorded: {SLUG}$"),
        ({"batches": [7], "gpu": "l40s", "source": "predicted"}, r"batches is \[7\]"),
    ],
)
def test_what_is_not_recorded_is_refused_with_what_is(recorded, values, message):
    with pytest.raises(filters.Unrecorded, match=message):
        filters.check(STUDY, values, DEFAULTS)


def test_a_study_that_was_never_recorded_is_not_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "DATA", tmp_path)
    filters.check(STUDY, {"batches": [7]}, DEFAULTS)
