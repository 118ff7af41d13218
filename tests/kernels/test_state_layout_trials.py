"""What study 01 times beside its grid, on tiny shapes, beyond what `check_tiny` runs: what is wrong is noticed."""

import json
import os
from dataclasses import replace

import pytest
import torch

from labkit.bench.spec import Case
from labkit.kernels.gated_delta import chunked, recurrent
from labkit.studies.state_layout import study, trials, variants
from labkit.sweep import gated_delta

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
GATES = ("GDN", "KDA")
SHAPE = {"model": "tiny", "activations": "fp32", "H": 1, "HV": 2, "K": 16, "V": 12}
OWN = {  # what a case of each operation has beside its shape
    "step": {"state": "fp32", "batch": 2},
    "verify": {"state": "fp32", "batch": 2, "draft": "chain", "T": 3},
    "extend": {"prefill": variants.TINY},
    "chunk_state": {"prefill": variants.TINY},
    "drift": {"state": "fp32", "batch": 1, "tokens": 4},
}


def case(op, gate="GDN", **changes):
    return Case(op, SHAPE | {"gate": gate} | OWN[op] | changes)


def trial(x, name, sets=1, seed=0):
    (variant,) = (variant for variant in study.variants(x) if variant.name == name)
    return variant.prepare(x, DEVICE, sets, seed)


def beyond(found):
    """Outputs whose error is not within the tolerance."""
    return {name for name, error in found.check().items() if not error <= found.tolerance[name]}


SOME = [  # what is in no tiny case, and one of the others
    (case("step"), variants.OURS), (case("verify", "KDA", state="bf16", T=1), variants.OURS_KV),
    (case("verify", draft="tree"), variants.OURS), (case("extend", "KDA"), variants.OURS),
    (case("drift"), variants.OURS),
    (case("drift", "KDA", state="bf16"), variants.OURS_KV),
]  # fmt: skip


@pytest.mark.parametrize(("x", "name"), SOME, ids=[f"{x.op} {x['gate']} {name}" for x, name in SOME])
def test_a_variant_is_within_its_tolerance_and_writes_every_output(x, name):
    found = trial(x, name, sets=2)
    found.poison()
    assert not found.written()
    found.calls[1]()
    assert not found.written()  # the other set still is poisoned
    assert beyond(found) == set()
    assert found.written()


@pytest.mark.parametrize("name", ["VK, BV=32", "KV, BV=16", "VK, transposed, BV=64"])
def test_the_chunk_state_kernel_is_judged_by_the_whole_extend(name):
    assert beyond(trial(case("chunk_state"), name)) == set()


def test_states_that_were_updated_before_are_judged_by_where_they_were():
    found = trial(case("step"), variants.OURS)
    assert [beyond(found) for _ in range(2)] == [set()] * 2


# what is wrong is noticed


def damaged(make, damage):
    """Instead of a launcher of inputs: its call, then `damage(inputs)`."""

    def launcher(x, *args, **options):
        launch = make(x, *args, **options)

        def call():
            launch()
            damage(x)

        call.launches = getattr(launch, "launches", None)
        return call

    return launcher


def without_last(make):
    """Instead of a launcher of steps: one that takes the last sequence for padding."""

    def launcher(x, choice=None):
        indices = x.indices.clone()
        indices[-1] = -1
        return make(replace(x, indices=indices), choice)

    return launcher


FAULTS = {
    "output": (lambda x: x.out.mul_(1.01), {"out"}),
    "states": (lambda x: x.state.mul_(1.01), {"state"}),
    "a value of one sequence": (lambda x: x.out[-1, 0, 0].add_(1.0), {"out"}),
    "nothing written": (lambda x: x.out.fill_(float("nan")), {"out"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_step_is_noticed(monkeypatch, fault):
    damage, expected = FAULTS[fault]
    monkeypatch.setattr(recurrent, "decode", damaged(recurrent.decode, damage))
    assert beyond(trial(case("step"), variants.OURS)) == expected


@pytest.mark.parametrize("op", ["step", "verify"])
def test_a_sequence_that_is_left_out_is_noticed(monkeypatch, op):
    launcher = {"step": "decode", "verify": "verify"}[op]
    monkeypatch.setattr(recurrent, launcher, without_last(getattr(recurrent, launcher)))
    found = trial(case(op), variants.OURS_KV)
    if op == "verify":  # where nothing is stored, the poison stays
        found.poison()
        found.calls[0]()
        assert not found.written()
    assert beyond(found) == {"out", "state"}


def test_a_verify_must_leave_the_pool_as_it_is(monkeypatch):
    for damage, expected in (
        (lambda x: x.state[x.indices[0].long()].mul_(1.01), {"pool"}),
        (lambda x: x.intermediate_states[:, -1].mul_(1.01), {"state"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(recurrent, "verify", damaged(recurrent.verify, damage))
            found = trial(case("verify"), variants.OURS)
            errors = found.check()
            assert {name for name, error in errors.items() if error > found.tolerance[name]} == expected
            assert errors["pool"] in (0.0, float("inf"))


def test_a_draft_tree_taken_for_a_chain_is_noticed(monkeypatch):
    verify = recurrent.verify
    monkeypatch.setattr(recurrent, "verify", lambda x: verify(replace(x, parents=None)))
    assert beyond(trial(case("verify", draft="tree"), variants.OURS)) == {"out", "state"}


@pytest.mark.parametrize(("output", "wrong"), [("out", "out"), ("final", "state")])
def test_a_wrong_extend_is_noticed(monkeypatch, output, wrong):
    monkeypatch.setattr(chunked, "extend", damaged(chunked.extend, lambda x: getattr(x, output).mul_(1.01)))
    assert beyond(trial(case("extend"), variants.OURS)) == {wrong}


# buffer sets


def test_buffer_sets_are_apart():
    x = case("step", batch=3)
    sets = trials._step_inputs(x, DEVICE, 3, 0, True)
    slots = torch.cat([one.indices for one in sets])
    assert sorted(slots.tolist()) == list(range(9))
    assert slots.tolist() != list(range(9))  # slots of a server lie anywhere
    first, second = sets[:2]
    kept = first.state[first.indices.long()].clone()
    outs = {one.out.data_ptr() for one in sets}
    assert len(outs) == 3
    first.out.fill_(7.0)
    recurrent.decode(second)()
    assert torch.equal(first.state[first.indices.long()], kept)
    assert (first.out == 7.0).all()
    assert len({one.q.data_ptr() for one in sets}) == 3


def test_slots_in_order_and_spare_ones_that_nothing_touches():
    x = case("step", batch=3)
    sets = trials._step_inputs(x, DEVICE, 2, 0, True, in_order=True)
    assert [one.indices.tolist() for one in sets] == [[0, 1, 2], [3, 4, 5]]
    sets = trials._step_inputs(x, DEVICE, 2, 0, True, spare=2)
    assert sorted(torch.cat([one.indices for one in sets]).tolist()) == list(range(2, 8))
    pool = sets[0].state
    assert len(pool) == 8
    kept = pool[:2].clone()
    for one in sets:
        recurrent.decode(one)()
    assert torch.equal(pool[:2], kept)


def test_verify_sets_share_only_the_pool():
    first, second = trials._verify_inputs(case("verify", draft="tree"), DEVICE, 2, 0, False)
    assert first.state is second.state
    assert not set(first.indices.tolist()) & set(second.indices.tolist())
    for name in ("q", "out", "intermediate_states"):
        assert getattr(first, name).data_ptr() != getattr(second, name).data_ptr()


# both layouts


@pytest.mark.parametrize("gate", GATES)
def test_layouts_of_one_seed_have_the_same_tokens_and_on_equal_states_the_same_results(gate):
    x = case("step", gate)
    (new,), (old,) = (trials._step_inputs(x, DEVICE, 1, 5, v_first) for v_first in (True, False))
    for name in ("q", "k", "v", "a", "b", "indices"):
        assert torch.equal(getattr(new, name), getattr(old, name))
    assert new.state.shape != old.state.shape
    old.state.copy_(new.state.transpose(-1, -2))
    for one in (new, old):
        recurrent.decode(one)()
    assert trials.relative_rmse(new.out, old.out.double()) < 1e-4
    assert trials.relative_rmse(new.state, old.state.transpose(-1, -2).double()) < 1e-4
    assert not torch.equal(trials._step_inputs(x, DEVICE, 1, 6, True)[0].q, new.q)  # another seed


# drafts, drift


def test_tree_by_hand():
    found = gated_delta.tree(2, 8, DEVICE)
    assert found.tolist() == [[-1, 0, 0, 1, 1, 2, 2, 3]] * 2
    assert found.dtype == torch.int32
    assert found.is_contiguous()


@pytest.mark.parametrize(("gate", "together"), [("GDN", 3), ("KDA", 256)])
def test_drift_is_told_at_powers_of_two(gate, together, monkeypatch):
    monkeypatch.setattr(trials, "DRAWN_TOGETHER", together)
    x = case("drift", gate, tokens=4)
    facts = trial(x, variants.OURS_KV).facts()
    tokens, out, state = zip(*json.loads(json.dumps(facts))["drift"], strict=True)
    assert tokens == (1, 2, 4)
    assert 0 < out[0] < 1e-5
    assert 0 < state[0] < 1e-5
    assert max(out + state) < 1e-4
    coarse = trial(case("drift", gate, tokens=2, state="bf16"), variants.OURS_KV).facts()["drift"]
    assert all(row[2] > 1e-3 for row in coarse)  # what a state in bf16 costs
