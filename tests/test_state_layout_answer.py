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


def test_the_conclusion_says_what_every_gpu_gains(usual):
    conclusion, _ = said(H100=usual, H200=rows(narrow=1.5, fp32=1.02, bf16=1.04))
    assert conclusion == (
        "Yes, with a narrow tile (Qwen3-Next, batch 64). [V, K] makes SGLang's verify (8 fp32 values per tile) on "
        "the H100 1.30× faster, on the H200 1.50× faster. Tuned for each layout, this lab's decode gains less: fp32 "
        "states 1.01× faster (H100), 1.02× faster (H200); bf16 states 1.10× faster (H100), 1.04× faster (H200)."
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
    assert "fp32 states 1.01× faster (H100, unclear)" in said(H100=noisy)[0]


def test_where_it_is_slower_the_conclusion_says_so(usual):
    conclusion, advice = said(H100=rows(narrow=0.8), H200=rows(narrow=0.7, fp32=0.9))
    assert conclusion.startswith("In some cases (Qwen3-Next, batch 64). [V, K] makes SGLang's verify")
    assert "on the H100 1.25× slower, on the H200 1.43× slower." in conclusion
    assert "decode is with [V, K]: fp32 states 1.01× faster (H100), 1.11× slower (H200)" in conclusion
    assert "values per tile" not in advice
    assert said(H100=rows(narrow=0.8, bf16=1.0))[0].startswith("No (Qwen3-Next")


@pytest.mark.parametrize(("gains", "advised"), [
    ({}, "[V, K] pays for bf16 states; fp32 states gain less than 3 % at batch 64 and more."),
    ({"small": 0.9}, "[V, K] pays for bf16 states from batch 64 on; fp32 states gain less than 3 %"),
    ({"fp32": 1.2}, "[V, K] pays for fp32 states and bf16 states."),
    ({"bf16": 1.0}, "fp32 and bf16 states gain less than 3 % at batch 64 and more."),
])  # fmt: skip
def test_the_advice_changes_with_the_data(gains, advised):
    start, tuned = said(H100=rows(**gains))[1].split(" With tuned kernels, ")
    assert start == (
        "With 8 values per tile, store the state as [V, K]. To widen the tile instead ([K, V] with 32 "
        "values) is as fast (H100); plain kernel, fp32."
    )
    assert tuned.startswith(advised)


def test_the_advice_holds_on_every_gpu(usual):
    assert said(H100=usual, H200=rows(bf16=1.0))[1].endswith("fp32 and bf16 states do not gain as surely.")
    assert "bf16 states from batch 64 on" in said(H100=usual, H200=rows(small=0.9))[1]


def test_without_rows_there_is_no_answer(usual):
    for nothing in (usual.iloc[:0], made.unusable(usual), usual[usual["variant"] == names.CEILING]):
        assert answer.facts(nothing) == {}
        assert isinstance(answer.hero(nothing), str)
    assert answer.conclusion({}) == answer.advice({}) == ""


def test_a_part_is_left_out_where_it_was_not_measured(usual):
    plain, tuned = usual[usual["op"] == "decode"], usual[usual["op"] != "decode"]
    start = (
        "Yes, with a narrow tile (Qwen3-Next, batch 64). [V, K] makes this lab's plain kernel (8 fp32 values per tile)"
    )
    conclusion, advice = said(H100=plain)
    assert conclusion == f"{start} on the H100 1.30× faster."
    assert "tuned" not in advice
    conclusion, advice = said(H100=tuned[tuned["op"] == "step"])
    assert "(Qwen3-Next, batch 64). Tuned for each layout, this lab's decode is with [V, K]: fp32 states" in conclusion
    assert advice.startswith("With tuned kernels, ")


def test_sentences_are_short(usual):
    for text in said(H100=usual, H200=rows(narrow=0.8, small=0.9)):
        assert all(len(sentence.split()) <= 40 for sentence in re.split(r"(?<=[.]) ", text))


def test_the_hero_is_small_and_its_title_follows_from_the_rows(usual):
    drawn = answer.hero(usual)
    assert drawn.plot is plots.ratios
    assert 4 <= len(drawn.data) <= 10
    assert drawn.options["title"] == "[V, K] gains most with a narrow tile"
    assert answer.hero(rows(narrow=0.9)).options["title"] == "What the layout is worth"


def test_every_number_of_the_conclusion_is_in_the_figure(usual):
    facts, shown = answer.facts(usual), answer.hero(usual).data
    said = {ratio for name, ratio in facts.items() if name.endswith((" from", " to")) or name.startswith("tuned")}
    assert said
    assert said <= set(shown["ratio"])


def test_the_figure_says_how_noisy_its_cases_are(usual):
    drawn = answer.hero(usual)
    assert drawn.said.startswith(f"Most noise: ±{100 * drawn.data['noise'].max():.1f} % (")


def test_the_claims_shown_exist():
    assert 1 <= len(answer.HEADLINE) <= 3
    assert set(answer.HEADLINE) <= {claim.id for claim in CLAIMS}
