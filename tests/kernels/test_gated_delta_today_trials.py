"""Trials of study 06 in the interpreter: SGLang's rings are right, errors along tokens, what must be noticed."""

import pytest
from missing import NO_SOURCES, sources_missing

from labkit import registry
from labkit.bench.spec import Case
from labkit.evidence import compiled
from labkit.kernels.launch import launched
from labkit.studies.gated_delta_today import exact, trials, variants
from labkit.sweep import variants as sweep_variants

STUDY = registry.load("gated_delta_today")
RELEASED = [
    (case, one)
    for case in STUDY.tiny
    for one in STUDY.variants(case)
    if one.name.startswith("sglang") and not (case.op == "ring" and one.name == variants.SGLANG_SEARCHED)
]
SHAPE = {"model": "tiny", "activations": "fp32", "H": 1, "HV": 2, "K": 32, "V": 16, "state": "fp32"}


@pytest.mark.skipif(sources_missing(), reason=NO_SOURCES)
@pytest.mark.parametrize(
    ("case", "variant"),
    RELEASED,
    ids=[f"{case.op} {case['gate']} {case.params['state']} {v.name}" for case, v in RELEASED],
)
def test_sglang_is_right_on_the_same_rings(case, variant, device, check_right):
    check_right(variant.prepare(case, device, 2, 0))


@pytest.mark.skipif(sources_missing(), reason=NO_SOURCES)
def test_a_state_without_its_ring_is_noticed(device, monkeypatch, interpretable):
    """The control: what says that SGLang's ring is read would say so if it were not."""
    case = next(case for case in STUDY.tiny if case.op == "ring" and case["gate"] == "GDN")
    trial = trials.sglang_ring(case, device, 1, 0)
    interpretable()
    monkeypatch.setattr(exact, "states_with", lambda x, ring, counts, some: exact.in_place_states(x, some))
    assert trial.check()["out"] > 0.05


@pytest.mark.parametrize("gate", ["GDN", "KDA"])
def test_errors_along_tokens_stay_small_and_a_ring_read_short_does_not(gate, device, monkeypatch):
    monkeypatch.setattr(trials, "DRIFT_LENGTHS", (1, 4))
    case = Case("drift", SHAPE | {"gate": gate, "batch": 1, "tokens": 8})
    trials.errors_along.cache_clear()
    found = trials.errors_along(case.key, str(device), 0)
    assert [line[0] for line in found[4]["drift"]] == [1, 2, 4, 8]
    for length in (1, 4):
        assert max(error for _, *errors in found[length]["drift"] for error in errors) < 1e-5
    assert found[4]["short"] > 5e-3  # beyond what a bf16 output may be off
    assert "short" not in found[1]
    trials.errors_along.cache_clear()


def searched(case):
    return next(one for one in variants.variants(case) if one.name == variants.SEARCHED)


def test_searches_try_every_way_where_nothing_has_memory():
    from labkit.studies.gated_delta_today import search

    case = next(case for case in STUDY.cases(
        {"gates": ["GDN"], "states": ["fp32"], "batches": [64], "verify_batches": [64], "prefills": []}
    ) if case.op == "ring")  # fmt: skip
    sources = sweep_variants.ahead(STUDY.name, [(case, searched(case))], 90)
    found = [compiled.launch_of(source, 90) for source in sources]
    shapes = {(launch.args["BV"], launch.options["num_warps"]) for launch in found if "BV" in launch.args}
    steps = [one.step for one in search.choices(wide=True, v_first=True)]
    assert shapes >= {(step.tile, step.num_warps) for step in steps}


def test_a_way_that_a_case_cannot_take_is_passed_over(monkeypatch):
    """States of 32 bits do not go through matrix instructions."""
    from labkit.kernels.gated_delta.buffered import BufferedChoice
    from labkit.kernels.gated_delta.recurrent import StepChoice
    from labkit.studies.gated_delta_today import search

    ways = [BufferedChoice(StepChoice(16, 1, 1)), BufferedChoice(StepChoice(16, 1, 1), True, True)]
    monkeypatch.setattr(search, "choices", lambda wide, v_first: ways)
    case = next(case for case in STUDY.tiny if case.op == "ring" and case["gate"] == "GDN")
    found = launched(searched(case).prepare(case, "meta", 1, 0).calls[0])
    steps = [launch for launch in found if launch.kernel.fn.__name__ == "_decode_kernel"]
    assert {launch.args["MATRIX"] for launch in steps} == {False}
