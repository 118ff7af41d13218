"""What trials share: watched outputs, buffers kept for one owner, random values bit for bit, errors, calls in order."""

import math

import pytest
import torch

from labkit.kernels.launch import Launch
from labkit.sweep import trial as kit


def test_outputs_are_watched():
    outputs = [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)]
    poison, written = kit.watched(out for out in outputs)  # looked at again and again, though given once
    assert written()
    poison()
    assert all(out.isnan().all() for out in outputs)
    outputs[0].zero_()
    assert not written()  # the other one was not
    outputs[1][0] = 0
    assert not written()  # nor was all of it
    outputs[1].zero_()
    assert written()


def test_nothing_to_watch():
    assert kit.watched([]) == (None, None)
    made = kit.trial([lambda: None])
    assert (made.poison, made.written, made.check, made.launch, dict(made.tolerance)) == (None, None, None, None, {})


def test_a_trial_has_the_launch_of_its_first_call():
    launch, other = Launch(None, (1,), {}), Launch(None, (2,), {})
    assert kit.trial([launch, other]).launch is launch
    assert kit.trial([lambda: None, launch]).launch is None  # a library's call has none
    assert kit.trial([launch], launch=None).launch is None
    made = kit.trial([launch], [torch.zeros(1)], lambda: {"y": 0.0}, {"y": 1e-3}, idle=True, moves=3)
    assert (made.check(), made.tolerance, made.idle, made.moves) == ({"y": 0.0}, {"y": 1e-3}, True, 3)
    made.poison()
    assert not made.written()


def test_what_an_owner_shares_is_made_once_and_let_go_for_the_next():
    shared, made = kit.Shared(), []

    def make(what):
        return lambda: made.append(what) or [what]

    first = shared("a", "W", make("W of a"))
    assert shared("a", "W", make("again")) is first
    shared("a", "x", lambda: [*shared("a", "W", make("again")), "x"])  # from what is shared already
    assert shared.parts["x"] == ["W of a", "x"]
    shared("b", "x", make("x of b"))
    assert list(shared.parts) == ["x"]
    shared("a", "W", make("W of a, later"))
    assert made == ["W of a", "x of b", "W of a, later"]


@pytest.mark.parametrize("shape", [(3,), (5, 7), (4, 33)])
def test_random_values_are_those_of_torch(shape):
    """Recorded rows name their seed: the values of a seed must not change."""

    def generator():
        return torch.Generator("cpu").manual_seed(5)

    assert torch.equal(kit.Random("cpu", 5)(*shape), torch.randn(shape, generator=generator()))
    rounded = kit.Random("cpu", 5, torch.bfloat16)(*shape)
    assert torch.equal(rounded, torch.randn(shape, generator=generator()).bfloat16())
    scaled = torch.empty(shape).normal_(0, 0.25, generator=generator())
    assert torch.equal(kit.Random("cpu", 5)(*shape, std=0.25), scaled)
    own = torch.empty(shape, dtype=torch.bfloat16)
    assert torch.equal(
        kit.Random("cpu", 5).fill(own.clone(), 2.0), own.normal_(0, 2.0, generator=generator())
    )  # drawn in bf16, which is not the same as rounded to it
    one, other = kit.Random("cpu", 5), generator()
    one(*shape)
    torch.randn(shape, generator=other)
    assert torch.equal(one.order(9), torch.randperm(9, generator=other))  # goes on where the values ended


def test_errors():
    expected = torch.tensor([3.0, 4.0])
    assert kit.relative_rmse(torch.tensor([3.0, 4.5]), expected.double()) == pytest.approx(0.1)
    assert kit.relative_rmse(torch.tensor([3.0, 4.0]).half(), expected.half()) == 0
    assert math.isnan(kit.relative_rmse(torch.tensor([3.0, math.nan]), expected))
    assert kit.worst([0.1, 0.3, 0.2]) == 0.3
    assert kit.worst([0.1, math.nan, 0.2]) == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_bits_that_differ(dtype):
    x = torch.tensor([1.0, 0.0, 2.0, math.nan], dtype=dtype)
    assert kit.differing(x[:3], x[:3].clone()) == 0
    assert kit.differing(x, x.clone()) == 0.25  # NaN is never right
    assert kit.differing(torch.tensor([1.0, -0.0], dtype=dtype), x[:2]) == 0.5


def test_bits_of_whole_numbers_and_of_views():
    x = torch.arange(6, dtype=torch.uint8)
    assert kit.differing(x, x.flip(0).contiguous()) == 1
    square = torch.arange(4.0).view(2, 2)
    assert kit.differing(square.mT, square) == 0.5


def test_a_hash_is_of_the_bits():
    x = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
    assert kit.hash_of(x) == kit.hash_of(x.clone()) != kit.hash_of(-x)
    assert kit.hash_of(x.mT) == kit.hash_of(x.mT.contiguous())
    assert len(kit.hash_of(x)) == 12


def test_calls_in_order():
    seen = []
    calls = [lambda i=i: seen.append(i) for i in range(3)]
    assert kit.in_order(calls)() is None
    assert seen == [0, 1, 2]
    launch = Launch(None, (1,), {})
    assert kit.in_order(launch) is launch
    assert kit.in_order([launch]) is not launch
    kit.captured(calls[:2], torch.device("cpu"))()
    assert seen == [0, 1, 2, 0, 1]


def test_results_are_kept_until_the_next_call_of_their_set():
    calls = kit.kept([lambda: torch.zeros(2), lambda: torch.ones(2)])
    places = {calls[0]().data_ptr(), calls[1]().data_ptr(), calls[0]().data_ptr()}
    assert len(places) == 3  # the third was made while the first was still there
