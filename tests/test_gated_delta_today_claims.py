"""Claims of study 06, on rows with made-up times: each can come out every way that it can name."""

import re

import pytest
import rows as made

from labkit.bench import verdict
from labkit.bench.claim import ESTIMATE, OURS, OWN, SIZES, VERDICTS
from labkit.studies.gated_delta_today import claims
from labkit.studies.gated_delta_today import variants as names

H100, OTHER = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
RING, PLAIN = names.SGLANG_RING, names.SGLANG_PLAIN


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(verdict, "RESAMPLES", 100)


def judged(name, rows):
    [claim] = [one for one in claims.CLAIMS if one.id == name]
    found = claim.judge(rows)
    assert not re.search(r"\bnan\b", f"{found.measured} {found.why}")
    assert (found.verdict in VERDICTS, found.size in (*SIZES, "")) == (True, True)
    return found


def words(name, over=(), gpu=H100, **options):
    found = judged(name, made.today(over, gpu=gpu, **options))
    return found.code, found.verdict, found.direction, found.size


DECODE = {"parameters": made.TODAY | {"gates": ["GDN"], "batches": [64, 256], "verify_batches": [], "prefills": []}}


@pytest.mark.parametrize(
    ("ratio", "spread", "found"),
    [
        (1.5, 1e-3, ("reproduced", "holds", "not comparable")),
        (0.8, 1e-3, ("not reproduced", "fails", "not comparable")),
        (1.02, 0.2, ("unclear", "unclear", "not comparable")),
    ],
)
def test_faster(ratio, spread, found):
    assert words("sglang-28451-faster", {PLAIN: 1.25 * ratio}, spread=spread, **DECODE) == (OWN, *found)


@pytest.mark.parametrize(
    ("ratio", "found"),
    [
        (1.7, ("reproduced", "holds", "as published")),
        (1.2, ("not reproduced", "holds", "less")),
        (3.0, ("not reproduced", "holds", "more")),
        (0.5, ("not reproduced", "fails", "less")),
    ],
)
def test_traffic(ratio, found):
    assert words("sglang-28451-traffic", {PLAIN: 1.25 * ratio}, **DECODE) == (OWN, *found)


def test_traffic_is_of_fp32_states_where_the_gpu_is_full():
    def over(case, name):
        slow = case.params.get("state") == "bf16" or case.params.get("batch") == 8
        return 1.0 if name == PLAIN and slow else 2.0 if name == PLAIN else 1.25

    parameters = DECODE["parameters"] | {"batches": [8, 64]}
    assert words("sglang-28451-traffic", over, parameters=parameters)[2] == "holds"
    assert judged("sglang-28451-faster", made.today(over, parameters)).direction == "unclear"


WHOLE = {"parameters": made.TODAY | {"gates": ["GDN"], "states": ["fp32"], "verify_batches": [], "prefills": []}}


@pytest.mark.parametrize(
    ("ratio", "gpu", "found"),
    [
        (1.6, H100, ("consistent", "holds", "unclear")),  # over contexts of 256 to 8192 tokens
        (5.0, H100, ("consistent", "holds", "more")),
        (1.1, H100, ("consistent", "holds", "less")),
        (0.7, H100, ("disagrees", "fails", "less")),
        (1.6, OTHER, ("consistent", "holds", "unclear")),
    ],
)
def test_whole_step(ratio, gpu, found):
    assert words("vllm-48792-step", {RING: 1.3, PLAIN: 1.3 * ratio}, gpu, **WHOLE) == (ESTIMATE, *found)


def test_a_whole_step_says_which_gpu_and_whose_code_it_is_of():
    found = judged("vllm-48792-step", made.today({PLAIN: 2.0}, gpu=OTHER, **WHOLE))
    assert "another GPU than its H100" in found.why
    assert "SGLang's port" in found.why


VERIFY = {
    "parameters": made.TODAY | {"gates": ["GDN"], "states": ["fp32"], "batches": [], "prefills": []},
    "spread": 1e-3,
}


@pytest.mark.parametrize(
    ("stored", "found"),
    [(5.0, ("consistent", "holds")), (1.25, ("disagrees", "fails")), (1.0, ("disagrees", "fails"))],
)
def test_whole_verify(stored, found):
    over = {RING: 1.3, names.SGLANG_STORED: stored}
    assert words("vllm-49887-verify", over, **VERIFY)[:3] == (ESTIMATE, *found)


@pytest.mark.parametrize(("stored", "size"), [(20.0, "more"), (1.6, "less")])
def test_the_size_of_a_whole_verify(stored, size):
    assert words("vllm-49887-verify", {RING: 1.3, names.SGLANG_STORED: stored}, **VERIFY)[3] == size


def length(best, gain):
    """Times of a ring by its L: 16 takes 1.3, `best` that by `gain` faster, all others 2."""
    ours = {names.with_length(n, names.SGLANG): 2.0 for n in names.RING_LENGTHS}
    return ours | {
        names.with_length(names.LENGTH, names.SGLANG): 1.3,
        **({names.with_length(best, names.SGLANG): 1.3 / gain} if best != names.LENGTH else {}),
    }


@pytest.mark.parametrize(
    ("best", "gain", "spread", "found"),
    [
        (16, 1.0, 1e-3, ("reproduced", "holds")),
        (12, 1.01, 1e-4, ("reproduced", "holds")),
        (8, 1.2, 1e-3, ("not reproduced", "fails")),
        (24, 1.03, 0.2, ("unclear", "unclear")),
    ],
)
def test_right_length(best, gain, spread, found):
    assert words("length-16", length(best, gain), spread=spread, **DECODE)[:3] == (OWN, *found)


@pytest.mark.parametrize(
    ("ratio", "spread", "found"),
    [
        (1.3, 1e-3, ("consistent", "holds")),
        (0.8, 1e-3, ("disagrees", "fails")),
        (1.0, 1e-3, ("unclear", "unclear")),
    ],
)
def test_layout_where_nothing_is_written(ratio, spread, found):
    def over(case, name):
        if name == names.OURS_KV:
            return 1.25 * (ratio if case.params.get("writes") == "never" else 3.0)
        return 1.25

    if ratio == 1.0:  # one dtype each way
        even = over

        def over(case, name):
            return (
                even(case, name)
                * (1.3 if name == names.OURS_KV and case["state"] == "fp32" else 1.0)
                * (0.7 if name == names.OURS_KV and case["state"] == "bf16" else 1.0)
            )

    assert words("layout-unwritten", over, spread=spread, **DECODE)[:3] == (OURS, *found)


PROMPTS = {"parameters": made.TODAY | {"gates": ["GDN"], "batches": [], "verify_batches": []}}


def prompts(few, more=1.0):
    """fla over FlashInfer: a factor of the published ratio at few heads, a ratio at more."""

    def over(case, name):
        if name != names.FLA:
            return 1.0
        fla, own = claims.PREFILL_TABLE[case["prefill"]]
        return (fla / own) ** few if (case["H"], case["HV"]) == claims.FEW_HEADS else more

    return over


@pytest.mark.parametrize(
    ("few", "gpu", "found"),
    [
        (1.0, H100, ("reproduced", "holds", "as published")),
        (1.0, OTHER, ("consistent", "holds", "as published")),
        (2.0, H100, ("not reproduced", "holds", "more")),
        (0.4, H100, ("not reproduced", "holds", "less")),
        (-1.0, H100, ("not reproduced", "fails", "less")),
    ],
)
def test_few_heads(few, gpu, found):
    assert words("flashinfer-3866", prompts(few), gpu, **PROMPTS) == (OWN, *found)


@pytest.mark.parametrize(("more", "found"), [(1.5, ("consistent", "holds")), (0.8, ("disagrees", "fails"))])
def test_more_heads(more, found):
    assert words("flashinfer-3866-heads", prompts(1.0, more), **PROMPTS)[1:3] == found


def test_without_rows_of_its_own_a_claim_says_what_it_needs():
    empty = made.today(parameters=made.TODAY | {"gates": ["KDA"], "states": ["bf16"], "batches": [1]})
    for claim in claims.CLAIMS:
        found = claim.judge(empty)
        assert found.verdict == "not testable here", claim.id
        assert "needs" in found.why
