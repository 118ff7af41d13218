"""What study 03 times, run on a tiny decoder: each trial is right, repeats its sequence, notices what is not right."""

import os

import pytest

from labkit.persistent_tables import names, study, tables, trials, ways

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
(TINY,) = study.STUDY.tiny
SOME = (names.OURS, names.REBUILT, names.PINNED, names.IN_LAUNCH, names.GRAPH)  # the rest: tests/kernels/test_ways.py


@pytest.fixture(autouse=True)
def nothing_shared():
    trials._shared.clear()


@pytest.fixture
def longer(monkeypatch):
    """Sequences of three tokens."""
    monkeypatch.setattr(trials, "sequence", lambda x, way="": 3)


def trial(name):
    (variant,) = (variant for variant in study.variants(TINY) if variant.name == name)
    return variant.prepare(TINY, DEVICE, 1, 0)


def check(found):
    """The errors after two rounds of the timed calls on poisoned outputs."""
    found.poison()
    assert not found.written()
    for call in list(found.calls) * 2:  # a sequence ends and begins anew
        call()
    assert found.written()
    errors = found.check()
    assert all(errors[name] <= found.tolerance[name] for name in errors), errors
    return errors


@pytest.mark.parametrize("name", SOME)
def test_a_sequence_can_be_repeated_and_is_right(name, longer):
    found = trial(name)
    assert len(found.calls) == 3
    assert set(check(found)) == {"logits", "tokens"}
    facts = found.facts()
    assert facts["right"] == facts["checked"] == trials.CHECKED_TINY
    assert facts["records"] > 0
    assert facts["sent"]["kernels"] >= 1


def test_separate_kernels_are_right(longer):
    found = trials.separate(TINY, DEVICE, 1, 0, projections="F.linear", dependent=True)
    check(found)
    assert found.facts()["kernels"] == 9 + 3  # of a layer; norm, head and argmax


def test_replayed_kernels_are_right():
    check(trials.replayed(TINY, DEVICE, 1, 0))


def test_without_waits_the_same_records_run(longer):
    found = trials.unordered(TINY, DEVICE, 1, 0)
    assert found.check is None
    (record,) = {call.args["records"] for call in found.calls[1:]}
    ordered = trials.prepared(TINY, DEVICE, 0, names.GRAPH).launched.args["records"]
    changed = (record != ordered).any(0).nonzero().flatten().tolist()
    assert changed == [tables.TARGET]
    for call in found.calls:
        call()


def test_one_position_is_shown_but_not_judged():
    found = trial(names.ONE_POSITION)
    assert set(found.check()) == {"logits"}
    first, second = found.facts()["errors"]
    assert first < 1e-5
    assert second > 1e-2


def test_tables_that_stay_as_they_were_are_noticed(monkeypatch):
    monkeypatch.setattr(ways.WordsByKernel, "copy", lambda self, position: None)
    found = trial(names.BY_KERNEL)
    assert found.check()["logits"] > found.tolerance["logits"]
