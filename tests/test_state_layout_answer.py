"""The first screen of the state layout study: its sentences and its figure follow from the rows."""

import re

import pytest
import rows as made

from labkit.report import plots
from labkit.studies.state_layout import answer, study
from labkit.studies.state_layout import variants as names
from labkit.studies.state_layout.claims import CLAIMS

PARAMETERS = made.LAYOUT | {"batches": [1, 64], "gates": ["GDN"], "step_batches": [1, 64, 256]}


def rows(narrow=1.3, fp32=1.01, bf16=1.1, small=1.1, wide=1.0):
    """One GPU. narrow, wide: KV / VK with tile 8, and 32. fp32, bf16: of the tuned decode; small: of its batch 1."""

    def us(case, variant):
        if case.op == "decode":
            return made.layout_us(lambda batch, tile: {8: narrow, 32: wide}.get(tile, 1.0))(case, variant)
        ratio = (
            small if case.params.get("batch") == 1 else {"fp32": fp32, "bf16": bf16}[case.params.get("state", "fp32")]
        )
        slow = {names.OURS_KV: ratio, names.released(names.BEFORE): narrow if case.op == "verify" else wide}
        name = variant.options.get("repeats", variant.name)
        return (2 + study.floor(case).bytes / 3e6) * slow.get(name, 1.0)

    return made.make("state_layout", PARAMETERS, us)


def said(**gpus):
    facts = {gpu: answer.facts(some) for gpu, some in gpus.items()}
    return answer.conclusion(facts), answer.advice(facts)


@pytest.fixture(scope="module")
def usual():
    return rows()


def test_the_conclusion_names_the_gpu_that_gains_most(usual):
    conclusion, _ = said(H100=usual, H200=rows(narrow=1.5, fp32=1.02, bf16=1.04))
    assert conclusion == (
        "Qwen3-Next, batch 64: with a tile of 8, [V, K] against [K, V] is at best 1.50× faster (fp32, H200) and "
        "1.50× faster (bf16, H200); tuned for each layout, at best 1.02× faster (fp32, H200) and 1.10× faster "
        "(bf16, H100)."
    )


def test_a_gain_that_the_noise_may_hide_is_called_unclear(usual):
    """A figure has it hollow, so a sentence must not call it a gain without saying so."""
    noisy = usual.assign(
        samples_ns=[
            [ns * (1 + 0.05 * (place % 3)) for place, ns in enumerate(some)] if variant == "A/A control" else some
            for variant, some in zip(usual["variant"], usual["samples_ns"], strict=True)
        ]
    )
    assert ", unclear" not in said(H100=usual)[0]
    assert "tuned for each layout, at best 1.01× faster (fp32, H100, unclear)" in said(H100=noisy)[0]


def test_where_it_is_slower_the_conclusion_says_so(usual):
    conclusion, _ = said(H100=rows(narrow=0.8), H200=rows(narrow=0.7, fp32=0.9))
    assert "[V, K] against [K, V] is at best 1.25× slower (fp32, H100) and 1.25× slower (bf16, H100)" in conclusion
    assert "tuned for each layout, at best 1.01× faster (fp32, H100)" in conclusion


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
    start = "Qwen3-Next, batch 64: with a tile of 8, [V, K] against [K, V] is at best"
    assert said(H100=plain) == (f"{start} 1.30× faster (fp32, H100) and 1.30× faster (bf16, H100).", "")
    tuned = said(H100=tuned[tuned["op"] == "step"])[0]
    assert tuned.startswith("Qwen3-Next, batch 64: tuned for each layout, at best 1.01× faster (fp32, H100)")


def test_sentences_are_short(usual):
    for text in said(H100=usual, H200=rows(narrow=0.8, small=0.9)):
        assert all(len(sentence.split()) <= 40 for sentence in re.split(r"(?<=[.]) ", text))


def test_the_hero_is_small_and_its_title_follows_from_the_rows(usual):
    drawn = answer.hero(usual)
    assert drawn.plot is plots.ratios
    assert 4 <= len(drawn.data) <= 10
    assert drawn.options["title"] == "A narrow tile is what makes [V, K] pay"
    assert answer.hero(rows(narrow=0.9)).options["title"] == "What the layout is worth"


def test_every_number_of_the_conclusion_is_in_the_figure(usual):
    facts, shown = answer.facts(usual), answer.hero(usual).data
    assert {ratio for name, ratio in facts.items() if name.startswith(("narrow", "tuned"))} <= set(shown["ratio"])


def test_the_figure_says_from_which_batch_on_it_is_worth_it(usual):
    assert (
        answer.hero(usual).said == "Tuned, three percent or more is gained at no batch (fp32), from batch 1 on (bf16)"
    )
    assert "from batch 64 on (bf16)" in answer.hero(rows(small=0.9)).said
    assert answer.hero(usual[usual["op"] == "decode"]).said == ""


def test_a_gain_with_equal_cache_lines_is_said_not_to_come_from_the_runs(usual):
    def caption(wide):
        return answer.hero(rows(wide=wide)).about

    assert "the length of runs alone is not the cause" in caption(1.1)
    assert "runs" not in caption(1.0)


def test_the_claims_shown_exist():
    assert 1 <= len(answer.HEADLINE) <= 3
    assert set(answer.HEADLINE) <= {claim.id for claim in CLAIMS}
