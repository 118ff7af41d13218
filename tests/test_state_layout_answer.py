"""The first screen of the state layout study: its sentences and its figure follow from the rows."""

import re

import pytest
import rows as made

from labkit.report import plots
from labkit.studies.state_layout import answer, study
from labkit.studies.state_layout import variants as names
from labkit.studies.state_layout.claims import CLAIMS

PARAMETERS = made.LAYOUT | {"batches": [1, 64], "gates": ["GDN"], "step_batches": [1, 64, 256]}


def rows(narrow=1.3, fp32=1.01, bf16=1.1, small=1.1):
    """One GPU. narrow: KV / VK with tiles of 8. fp32, bf16: of the tuned decode; small: of its batch 1."""

    def us(case, variant):
        if case.op == "decode":
            return made.layout_us(lambda batch, tile: narrow if tile == 8 else 1.0)(case, variant)
        ratio = (
            small if case.params.get("batch") == 1 else {"fp32": fp32, "bf16": bf16}[case.params.get("state", "fp32")]
        )
        slow = {names.OURS_KV: ratio, names.released(names.BEFORE): narrow if case.op == "verify" else 1.0}
        name = variant.options.get("repeats", variant.name)
        return (2 + study.floor(case).bytes / 3e6) * slow.get(name, 1.0)

    return made.make("state_layout", PARAMETERS, us)


def said(**gpus):
    facts = {gpu: answer.facts(some) for gpu, some in gpus.items()}
    return answer.conclusion(facts), answer.advice(facts)


@pytest.fixture(scope="module")
def usual():
    return rows()


def test_the_conclusion_names_each_gpu_and_what_it_gains(usual):
    conclusion, _ = said(H100=usual, H200=rows(narrow=1.5, fp32=1.02))
    assert conclusion == (
        "For fp32 states, [V, K] is up to 1.30× (H100) and 1.50× (H200) faster with tiles of 8; "
        "up to 1.01× (H100) and 1.02× (H200) faster if each layout is tuned."
    )


def test_where_it_is_slower_the_conclusion_says_so(usual):
    conclusion, _ = said(H100=usual, H200=rows(narrow=0.8))
    assert "at best 1.30× faster (H100) and 1.25× slower (H200) with tiles of 8" in conclusion


@pytest.mark.parametrize(("gains", "advised"), [
    ({}, "Store bf16 states as [V, K], with tile and warps tuned for it; for fp32 states tune the tile first"),
    ({"small": 0.9}, "Store bf16 states as [V, K] if you decode 64 sequences or more, with tile and warps tuned"),
    ({"fp32": 1.2}, "Store fp32 states as [V, K] and bf16 states as [V, K], with tile and warps tuned for it."),
    ({"bf16": 1.0}, "Keep the layout and tune tile and warps: for fp32 and bf16 states the layout alone is not worth"),
])  # fmt: skip
def test_the_advice_changes_with_the_data(gains, advised):
    assert said(H100=rows(**gains))[1].startswith(advised)


def test_the_advice_holds_on_every_gpu(usual):
    assert said(H100=usual, H200=rows(bf16=1.0))[1].startswith("Keep the layout")
    assert "64 sequences or more" in said(H100=usual, H200=rows(small=0.9))[1]


def test_without_rows_there_is_no_answer(usual):
    for nothing in (usual.iloc[:0], made.unusable(usual), usual[usual["variant"] == names.CEILING]):
        assert answer.facts(nothing) == {}
        assert isinstance(answer.hero(nothing), str)
    assert answer.conclusion({}) == answer.advice({}) == ""


def test_a_part_is_left_out_where_it_was_not_measured(usual):
    plain, tuned = usual[usual["op"] == "decode"], usual[usual["op"] != "decode"]
    assert said(H100=plain) == ("For fp32 states, [V, K] is up to 1.30× (H100) faster with tiles of 8.", "")
    assert "tiles of 8" not in said(H100=tuned)[0]


def test_sentences_are_short(usual):
    for text in said(H100=usual, H200=rows(narrow=0.8, small=0.9)):
        assert all(len(sentence.split()) <= 40 for sentence in re.split(r"(?<=[.]) ", text))


def test_the_hero_is_small_and_its_title_follows_from_the_rows(usual):
    drawn = answer.hero(usual)
    assert drawn.plot is plots.ratios
    assert 4 <= len(drawn.data) <= 10
    assert drawn.options["title"] == "A narrow tile is what makes [V, K] pay"
    assert answer.hero(rows(narrow=0.9)).options["title"] == "What the layout is worth"


def test_the_claims_shown_exist():
    assert 1 <= len(answer.HEADLINE) <= 3
    assert set(answer.HEADLINE) <= {claim.id for claim in CLAIMS}
