"""Decode with a ring against the float64 recurrence: gates, layouts, positions, forced writes, paddings, errors."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from test_recurrent import DEVICE, GATES, INTERPRETED, error, gates, make, make_verify, turned

from labkit.kernels.gated_delta import apart, buffered, direct, drafts, in_turn, on_ring, recurrent, reference
from labkit.kernels.gated_delta.buffered import (
    BufferedChoice,
    DraftInputs,
    Ring,
    accept,
    empty_ring,
    moved,
    verify,
    write,
)
from labkit.kernels.gated_delta.in_turn import TurnsChoice
from labkit.kernels.gated_delta.recurrent import StepChoice

N, H, GROUP, K, V = 3, 1, 2, 16, 24


@dataclass(frozen=True)
class Other:
    """Another decode, and a choice for it."""

    decode: Callable
    choice: Any


CHOICES = {
    "ahead": BufferedChoice(StepChoice(16, 1, 1), ahead=True),
    "in the step": BufferedChoice(StepChoice(16, 1, 1)),
    "chosen": None,
    "apart": Other(apart.decode, BufferedChoice(StepChoice(16, 2, 1), ahead=True)),
    "direct": Other(direct.decode, BufferedChoice(StepChoice(16, 1, 1), ahead=True, matrix=True)),
    "direct, sums": Other(direct.decode, BufferedChoice(StepChoice(32, 1, 1), ahead=True)),
    "direct, alone": Other(direct.decode, BufferedChoice(StepChoice(16, 1, 1), matrix=True)),
}
MATRIX = BufferedChoice(StepChoice(16, 1, 1), ahead=True, matrix=True)
TOKENS = ("q", "k", "v", "a", "b")


def decode(x, ring, length, flush=None, choice=None):
    """A token, by the kernels of the choice."""
    if isinstance(choice, Other):
        return choice.decode(x, ring, length, flush, choice.choice)
    return buffered.decode(x, ring, length, flush, choice)


def some(x, seed):
    """The same sequences with another token each."""
    g = torch.Generator().manual_seed(seed)
    new = {name: torch.randn(getattr(x, name).shape, generator=g).to(getattr(x, name)) for name in TOKENS}
    return replace(x, **new, out=torch.full_like(x.out, float("nan")))


def states(x):
    """The states of the sequences, [N, HV, V, K], in float64; of padding, that of the last slot."""
    return turned(x.state[x.indices.long()], x.v_first).double()


def expected(x, before):
    """o and the states after one token, float64."""
    return reference.decode_step(before, x.q, x.k, x.v, *gates(x), x.scale)


def run(x, ring, length, steps, choice, flush=None, seed=1):
    """Steps, each against float64; flush: step -> sequences to write. Returns the ring and the expected states."""
    after = states(x)
    for step in range(steps):
        y = some(x, 100 * seed + step)
        forced = None if flush is None else torch.tensor([n in flush.get(step, ()) for n in range(N)]).int().to(DEVICE)
        decode(y, ring, length, forced, choice)()
        o, after = expected(y, after)
        assert error(y.out, o) < 1e-5
        ring = replace(ring, counts=moved(ring, length, forced))
    return ring, after


def test_the_reference_is_the_recurrence():
    g = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    for kda in (False, True):
        before = state = draw(2, 4, 5, 6)
        kept = []
        for _ in range(4):
            q, k, v, beta = draw(2, 4, 6), draw(2, 4, 6), draw(2, 4, 5), torch.sigmoid(draw(2, 4))
            alpha = torch.sigmoid(draw(2, 4, 6) if kda else draw(2, 4))
            _, after = reference.decode_step(state, q, k, v, alpha, beta, 1.0)
            normal = k / torch.sqrt((k * k).sum(-1, keepdim=True) + reference.L2_EPS)
            decayed = state * (alpha[..., None, :] if kda else alpha[..., None, None])
            u = beta[..., None] * (v - torch.einsum("nhvk,nhk->nhv", decayed, normal))
            kept.append((u, normal, alpha))
            state = after
        u, k, alpha = (torch.stack(part, 1) for part in zip(*kept, strict=True))
        assert torch.allclose(reference.with_ring(before, u, k, alpha), state, rtol=1e-12, atol=1e-12)
        assert torch.equal(reference.with_ring(before, u[:, :0], k[:, :0], alpha[:, :0]), before)


@pytest.mark.parametrize(
    ("gate", "v_first", "choice"),
    [one for one in product(GATES, (True, False), CHOICES) if "direct" not in one[2] or one[:2] == ("GDN", True)],
)
def test_tokens_and_states_are_those_of_the_recurrence(gate, v_first, choice):
    x = make(N, H, GROUP, K, V, gate=gate, v_first=v_first)
    ring, after = run(x, empty_ring(x, 4), 4, 6, CHOICES[choice])
    assert ring.counts.tolist() == [2] * N
    write = torch.ones(N, dtype=torch.int32, device=DEVICE)
    y = some(x, 7)
    decode(y, ring, 4, write, CHOICES[choice])()
    _, after = expected(y, after)
    assert error(states(x), after) < 1e-5


# How far one rounding of normally distributed values is off: of a mantissa of m bits, some 2^-m / 3. The interpreter
# rounds fp8 three times as far.
ROUNDED = {torch.float16: 2.5e-4, torch.float8_e4m3fn: 9e-2 if INTERPRETED else 4e-2}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ROUNDED)
def test_narrow_states_are_rounded_once_in_a_ring(dtype, gate):
    """Until it is written a state is what it was; then it is off by one rounding, and no more."""
    x = make(N, H, GROUP, K, V, gate=gate)
    x = replace(x, state=x.state.to(dtype))
    ring, after = run(x, empty_ring(x, 4), 4, 3, CHOICES["ahead"])
    y = some(x, 7)
    o, after = expected(y, after)
    decode(y, ring, 4, None, CHOICES["ahead"])()
    assert error(y.out, o) < 1e-5
    assert ROUNDED[dtype] / 8 < error(states(x), after) < ROUNDED[dtype]


def test_fp8_needs_a_gpu_that_has_it(monkeypatch):
    monkeypatch.setattr(recurrent, "capability_of", lambda device: (8, 0))
    recurrent.check_state(torch.empty(1, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"state is torch.float8_e4m3fn on compute capability 8.0; allowed: from 8.9"):
        recurrent.check_state(torch.empty(1, dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_state_is_written_when_the_ring_is_full_and_only_then(choice):
    x = make(N, H, GROUP, K, V)
    ring = empty_ring(x, 3)
    for step in range(6):
        before = x.state.clone()
        decode(some(x, step), ring, 3, None, CHOICES[choice])()
        assert torch.equal(x.state, before) == (step % 3 != 2)
        ring = replace(ring, counts=moved(ring, 3))


@pytest.mark.parametrize("step", range(4))
def test_a_write_can_be_forced_at_every_position(step):
    x = make(N, H, GROUP, K, V, gate="KDA")
    ring, _ = run(x, empty_ring(x, 4), 4, 6, CHOICES["ahead"], flush={step: (0, 2)})
    counts = [(6 - step - 1) % 4, 6 % 4, (6 - step - 1) % 4]
    assert ring.counts.tolist() == counts


@pytest.mark.parametrize("choice", CHOICES)
def test_sequences_may_stand_anywhere_and_rings_go_round(choice):
    x = make(N, H, GROUP, K, V)
    ring = replace(empty_ring(x, 5), starts=torch.tensor([4, 0, 3], dtype=torch.int32, device=DEVICE))
    run(x, ring, 5, 9, CHOICES[choice], flush={1: (0,), 3: (2,)})


def test_a_ring_read_one_entry_short_is_found():
    x = make(N, H, GROUP, K, V)
    ring, after = run(x, empty_ring(x, 4), 4, 3, CHOICES["ahead"])
    y, z = some(x, 9), some(x, 9)
    o, _ = expected(y, after)
    decode(y, ring, 4, None, CHOICES["ahead"])()
    decode(z, replace(ring, starts=ring.starts + 1, counts=ring.counts - 1), 4, None, CHOICES["ahead"])()
    assert error(y.out, o) < 1e-5 < 1e-2 < error(z.out, o)


def test_a_length_of_one_is_the_plain_step():
    x = make(N, H, GROUP, K, V)
    y = replace(x, state=x.state.clone(), out=x.out.clone())
    decode(x, empty_ring(x, 2), 1, None, CHOICES["in the step"])()
    recurrent.decode(y, StepChoice(16, 1, 1))()
    assert error(x.out, y.out.double()) < 1e-6
    assert error(x.state, y.state.double()) < 1e-6


@pytest.mark.parametrize("choice", CHOICES)
def test_padding_leaves_pool_and_ring_alone(choice):
    x = make(N, H, GROUP, K, V, padding=(1,))
    ring = empty_ring(x, 2)
    slots = torch.ones(len(x.state), dtype=torch.bool, device=DEVICE)
    slots[x.indices[x.indices >= 0].long()] = False
    pool = x.state.clone()
    for _ in range(2):
        y = some(x, 5)
        decode(y, ring, 2, None, CHOICES[choice])()
        ring = replace(ring, counts=moved(ring, 2))
        assert torch.equal(y.out[1], torch.zeros_like(y.out[1]))
    assert torch.equal(x.state[slots], pool[slots])
    assert not any(part[slots].any() for part in (ring.u, ring.k, ring.g))


def test_two_runs_give_the_same_bits_and_both_ways_nearly_so():
    found = []
    of_kda = [one for name, one in CHOICES.items() if "direct" not in name]
    for choice in (*of_kda, CHOICES["ahead"]):
        x = make(N, H, GROUP, K, V, gate="KDA")
        ring, _ = run(x, empty_ring(x, 4), 4, 5, choice)
        found.append((x.state, ring.u))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True))
    assert error(found[1][0], found[0][0].double()) < 1e-6


def test_decay_to_nothing_leaves_no_nan():
    x = make(N, H, GROUP, K, V)
    x = replace(x, A_log=torch.full_like(x.A_log, 8.0))  # α underflows
    ring, _ = run(x, empty_ring(x, 4), 4, 5, CHOICES["ahead"])
    assert torch.isfinite(x.state).all()
    assert torch.isfinite(ring.g).all()


@pytest.mark.parametrize("gate", ["GDN", "KDA"])
def test_matrix_instructions_give_the_sums_of_the_ordinary_ones(gate, monkeypatch):
    # fp16, which the interpreter multiplies, in place of the bf16 that it does not
    monkeypatch.setattr(recurrent, "STATE_DTYPES", (torch.float16,))
    outs = []
    for matrix in (False, True):
        x = make(N, H, GROUP, K, 32, torch.float16, gate=gate)
        x = replace(x, q=x.q.half(), k=x.k.half())
        ring = empty_ring(x, 4, torch.float16)
        for step in range(3):
            y = some(x, step)
            decode(y, ring, 4, None, BufferedChoice(StepChoice(16, 1, 1), matrix=matrix))()
            ring = replace(ring, counts=moved(ring, 4))
        outs.append(y.out)
    assert error(outs[1], outs[0].double()) < 1e-3


def drafted_by(x, T, seed, parents=None):
    """T drafts of the sequences of a step."""
    g = torch.Generator().manual_seed(seed)
    new = {name: torch.randn((N, T, *getattr(x, name).shape[1:]), generator=g).to(getattr(x, name)) for name in TOKENS}
    new["out"] = torch.full((N, T, *x.out.shape[1:]), float("nan"), device=DEVICE)
    kept = {name: getattr(x, name) for name in ("state", "indices", "A_log", "dt_bias", "scale", "lower_bound")}
    return DraftInputs(**kept, **new, v_first=x.v_first, parents=parents)


def drafted(y, before):
    """o and the states after every draft, float64."""
    alpha, beta = gates(y)
    return reference.verify(before, y.q, y.k, y.v, alpha, beta, y.scale, y.parents)


STEP = StepChoice(16, 1, 1)
TURNS = TurnsChoice(STEP, 2, 3)
ONE_BY_ONE, AT_ONCE = verify, drafts.verify


def IN_TURN(x, ring, step):
    """All drafts at once, by programs that take two heads."""
    return in_turn.verify(x, ring, replace(TURNS, step=step))


@pytest.mark.parametrize(
    ("verify", "gate", "v_first"),
    [
        *product([ONE_BY_ONE], GATES, (True, False)),
        *product([AT_ONCE], ["GDN"], (True, False)),
        (IN_TURN, "GDN", True),
    ],
)
def test_drafts_of_a_chain_and_the_tokens_after_those_accepted(verify, gate, v_first):
    x = make(N, H, GROUP, K, V, gate=gate, v_first=v_first)
    ring = replace(empty_ring(x, 8), starts=torch.tensor([6, 0, 2], dtype=torch.int32, device=DEVICE))
    ring, after = run(x, ring, 8, 2, CHOICES["ahead"])
    pool = x.state.clone()
    y = drafted_by(x, 3, 11)
    verify(y, ring, STEP)()
    o, each = drafted(y, after)
    assert error(y.out, o) < 1e-5
    assert torch.equal(x.state, pool)
    accepted = torch.tensor([0, 2, 3], dtype=torch.int32, device=DEVICE)
    after = torch.stack([each[n, accepted[n] - 1] if accepted[n] else after[n] for n in range(N)])
    ring = replace(ring, counts=ring.counts + accepted)
    z = some(x, 21)
    decode(z, ring, 8, None, CHOICES["ahead"])()
    o, after = expected(z, after)
    assert error(z.out, o) < 1e-5
    ring = replace(ring, counts=moved(ring, 8))
    write(x, ring, torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE))()
    assert error(states(x)[[0, 2]], after[[0, 2]]) < 1e-5
    assert torch.equal(x.state[x.indices[1]], pool[x.indices[1]])


@pytest.mark.parametrize(
    ("verify", "gate"), [(ONE_BY_ONE, "GDN"), (ONE_BY_ONE, "KDA"), (AT_ONCE, "GDN"), (IN_TURN, "GDN")]
)
def test_drafts_of_a_tree_and_its_accepted_path(verify, gate):
    x = make(N, H, GROUP, K, V, gate=gate)
    ring = replace(empty_ring(x, 8), starts=torch.tensor([5, 0, 7], dtype=torch.int32, device=DEVICE))
    ring, after = run(x, ring, 8, 2, CHOICES["ahead"])
    parents = torch.tensor([[-1, -1, 1, 0, 2], [-1, 0, 0, 2, 3], [-1, -1, -1, 2, 2]], dtype=torch.int32, device=DEVICE)
    y = drafted_by(x, 5, 12, parents)
    verify(y, ring, STEP)()
    o, each = drafted(y, after)
    assert error(y.out, o) < 1e-5
    path = torch.tensor([[1, 2, 4], [0, 2, 3], [2, 4, 0]], dtype=torch.int32, device=DEVICE)
    accepted = torch.tensor([3, 3, 2], dtype=torch.int32, device=DEVICE)
    accept(y, ring, path, accepted)()
    ring = replace(ring, counts=ring.counts + accepted)
    write(x, ring, torch.ones(N, dtype=torch.int32, device=DEVICE))()
    after = torch.stack([each[n, path[n, accepted[n] - 1]] for n in range(N)])
    assert error(states(x), after) < 1e-5


def test_a_path_of_other_drafts_is_found():
    x = make(N, H, GROUP, K, V)
    ring, after = run(x, empty_ring(x, 8), 8, 2, CHOICES["ahead"])
    y = drafted_by(x, 3, 12, torch.tensor([[-1, -1, 1]] * N, dtype=torch.int32, device=DEVICE))
    verify(y, ring, STEP)()
    _, each = drafted(y, after)
    two = torch.full((N,), 2, dtype=torch.int32, device=DEVICE)
    write(x, replace(ring, counts=ring.counts + two), two)()  # not moved: drafts 0 and 1 in place of 1 and 2
    assert error(states(x), each[:, 2]) > 1e-2


@pytest.mark.parametrize("verify", [ONE_BY_ONE, AT_ONCE, IN_TURN])
def test_drafts_on_the_ring_are_those_whose_states_are_stored(verify):
    z = make_verify(N, 3, H, GROUP, K, V)
    names = ("state", "indices", "q", "k", "v", "a", "b", "A_log", "dt_bias", "scale")
    y = DraftInputs(**{name: getattr(z, name) for name in names}, out=torch.empty_like(z.out))
    recurrent.verify(z, StepChoice(16, 1, 1))()
    verify(y, empty_ring(y, 4), STEP)()
    assert error(y.out, z.out.double()) < 1e-6


@pytest.mark.parametrize("verify", [ONE_BY_ONE, AT_ONCE, IN_TURN])
def test_padding_of_drafts_leaves_pool_and_ring_alone(verify):
    x = make(N, H, GROUP, K, V, padding=(1,))
    ring, y, pool = empty_ring(x, 4), drafted_by(x, 2, 3), x.state.clone()
    verify(y, ring, STEP)()
    write(x, replace(ring, counts=ring.counts + 2), torch.ones(N, dtype=torch.int32, device=DEVICE))()
    others = torch.ones(len(pool), dtype=torch.bool, device=DEVICE)
    others[x.indices[x.indices >= 0].long()] = False
    assert torch.equal(y.out[1], torch.zeros_like(y.out[1]))
    assert torch.equal(x.state[others], pool[others])
    assert not any(part[others].any() for part in (ring.u, ring.k, ring.g))
    assert not torch.equal(x.state, pool)


@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 16])
def test_any_number_of_drafts_at_once_leaves_the_ring_as_one_by_one(T):
    x = make(N, H, GROUP, 40, 24)  # channels that fill no piece
    ring = replace(empty_ring(x, 32), starts=torch.tensor([30, 0, 7], dtype=torch.int32, device=DEVICE))
    ring, _ = run(x, ring, 32, 3, CHOICES["ahead"])
    ring = replace(ring, counts=torch.tensor([3, 0, 1], dtype=torch.int32, device=DEVICE))  # one whose ring is empty
    y, parts = drafted_by(x, T, 13), ("u", "k", "g")
    other = replace(ring, **{name: getattr(ring, name).clone() for name in parts})
    ONE_BY_ONE(y, other, STEP)()
    out = y.out.clone()
    AT_ONCE(y, ring, StepChoice(16, 2, 1))()
    assert error(y.out, out.double()) < 1e-6
    assert max(error(getattr(ring, name), getattr(other, name).double()) for name in parts) < 1e-6
    assert not torch.equal(ring.u, empty_ring(x, 32).u)


@triton.jit
def _with_one_part(x, y, sums):
    return tl.dot(x, y.to(x.dtype), sums)


def test_drafts_of_16_bits_go_as_two_parts_that_keep_16_bits(monkeypatch):
    # fp16, which the interpreter multiplies, in place of the bf16 that it does not
    monkeypatch.setattr(recurrent, "STATE_DTYPES", (torch.float16,))
    x = make(N, H, GROUP, K, 32, torch.float16)
    y = drafted_by(x, 5, 13)
    y = replace(y, q=y.q.half(), k=y.k.half(), v=y.v.half(), out=y.out.half())
    ring = empty_ring(y, 8, torch.float16)
    AT_ONCE(y, ring, STEP)()
    o, _ = drafted(y, states(x))
    unlike = (y.out != o.half()).double().mean()
    assert unlike < 0.05
    monkeypatch.setattr(drafts, "_with_parts", _with_one_part)
    AT_ONCE(y, ring, STEP)()
    assert (y.out != o.half()).double().mean() > 4 * unlike


def test_drafts_that_see_one_too_few_are_found(monkeypatch):
    x = make(N, H, GROUP, K, V)
    ring, after = run(x, empty_ring(x, 8), 8, 2, CHOICES["ahead"])
    y = drafted_by(x, 3, 12)
    AT_ONCE(y, ring, STEP)()
    o, _ = drafted(y, after)
    assert error(y.out, o) < 1e-5
    AT_ONCE(y, replace(ring, counts=ring.counts - 1), STEP)()
    assert error(y.out, o) > 1e-2


def test_drafts_at_once_are_two_launches_with_the_same_bits_every_time():
    x = make(N, H, GROUP, K, V)
    ring, _ = run(x, empty_ring(x, 8), 8, 2, CHOICES["ahead"])
    y = drafted_by(x, 3, 12)
    call = AT_ONCE(y, ring, STEP)
    assert len(call.launches) == 2
    outs = []
    for _ in range(2):
        call()
        outs.append(y.out.clone())
    assert torch.equal(*outs)
    ONE_BY_ONE(y, ring, STEP)()
    assert not torch.equal(outs[0], y.out)  # sums in another order


@pytest.mark.parametrize("T", [1, 3, 9])
def test_drafts_in_turn_have_the_bits_of_those_at_once(T):
    x = make(N, H, GROUP, K, 32)
    ring, _ = run(x, empty_ring(x, 16), 16, 3, CHOICES["ahead"])
    y = drafted_by(x, T, 13)
    other = replace(ring, **{name: getattr(ring, name).clone() for name in "ukg"})
    AT_ONCE(y, other, STEP)()
    out = y.out.clone()
    IN_TURN(y, ring, STEP)()
    assert torch.equal(y.out, out)
    assert all(torch.equal(getattr(ring, name), getattr(other, name)) for name in "ukg")
    IN_TURN(y, replace(ring, counts=ring.counts - 1), STEP)()
    assert not torch.equal(y.out, out)


@pytest.mark.parametrize("ahead", [True, False])
def test_direct_by_products_of_16_bits(monkeypatch, ahead):
    # fp16, which the interpreter multiplies, in place of the bf16 that it does not
    monkeypatch.setattr(recurrent, "STATE_DTYPES", (torch.float16,))
    x = make(N, H, GROUP, K, 32, torch.float16)
    x = replace(x, q=x.q.half(), k=x.k.half(), v=x.v.half())
    ring = replace(empty_ring(x, 4, torch.float16), counts=torch.tensor([0, 2, 3]).int().to(DEVICE))
    ring = replace(ring, starts=torch.tensor([3, 0, 2]).int().to(DEVICE))
    other, z = replace(ring, **{n: getattr(ring, n).clone() for n in "ukg"}), replace(x, state=x.state.clone())
    before = x.state.clone()
    for step in range(2):
        y, w = some(x, step), some(z, step)
        direct.decode(y, ring, 4, None, replace(MATRIX, ahead=ahead))()
        buffered.decode(w, other, 4, None, MATRIX)()
        assert error(y.out, w.out.double()) < 1e-3
        ring, other = replace(ring, counts=moved(ring, 4)), replace(other, counts=moved(other, 4))
    assert error(states(x), states(z)) < 1e-3
    written = [not torch.equal(x.state[slot], before[slot]) for slot in x.indices.long()]
    assert written == [False, True, True]


@pytest.mark.parametrize("gate", GATES)
def test_more_sequences_than_a_share_are_written_when_they_are_due(gate):
    count = apart.SHARE + 2
    x = make(count, H, GROUP, K, 32, gate=gate)
    ring = replace(empty_ring(x, 4), counts=torch.tensor([n % 4 for n in range(count)]).int().to(DEVICE))
    other, z = replace(ring, **{n: getattr(ring, n).clone() for n in "ukg"}), replace(x, state=x.state.clone())
    choice = BufferedChoice(StepChoice(16, 1, 1), ahead=True)
    before = x.state.clone()
    for step in range(2):
        y = some(x, step)
        apart.decode(y, ring, 4, None, choice)()
        w = replace(some(z, step), out=torch.empty_like(z.out))
        buffered.decode(w, other, 4, None, choice)()
        assert error(y.out, w.out.double()) < 1e-3
        ring, other = replace(ring, counts=moved(ring, 4)), replace(other, counts=moved(other, 4))
    assert error(states(x), states(z)) < 1e-3
    written = [not torch.equal(x.state[slot], before[slot]) for slot in x.indices.long()]
    assert written == [n % 4 in (2, 3) for n in range(count)]


def test_what_cannot_be_run_is_refused_before_the_launch():
    x = make(N, H, GROUP, K, V)
    ring = empty_ring(x, 4)
    counts = torch.zeros(N, device=DEVICE)
    kda, y = make(N, H, GROUP, K, V, gate="KDA"), drafted_by(x, 2, 1)

    def turns(x=y, step=STEP, heads=2, stages=3):
        return in_turn.verify(x, empty_ring(x, 4), TurnsChoice(step, heads, stages))

    for bad, message in (
        (lambda: decode(x, ring, 5), "length is 5; allowed: an integer of 1 to the ring's 4 entries"),
        (lambda: decode(x, ring, 0), "length is 0"),
        (lambda: decode(x, replace(ring, u=ring.u[:, :1]), 4), "ring.u is"),
        (lambda: decode(x, replace(ring, k=ring.k.half()), 4), "ring.k is"),
        (lambda: decode(x, replace(ring, g=ring.g.double()), 4), "ring.g is"),
        (lambda: decode(x, replace(ring, counts=counts), 4), "ring.counts is torch.float32"),
        (lambda: decode(x, ring, 4, counts), "flush is torch.float32"),
        (lambda: decode(x, empty_ring(x, 65), 4), "the ring has 65 entries; allowed: 1 to 64"),
        (lambda: verify(drafted_by(x, 5, 1), ring), "q has 5 drafts a sequence; allowed: up to the ring's 4 entries"),
        (lambda: verify(drafted_by(x, 2, 1, counts), ring), "parents is"),
        (lambda: AT_ONCE(drafted_by(x, 5, 1), ring), "q has 5 drafts a sequence; allowed: up to the ring's 4 entries"),
        (lambda: AT_ONCE(drafted_by(x, 2, 1, counts), ring), "parents is"),
        (lambda: AT_ONCE(drafted_by(kda, 2, 1), empty_ring(kda, 4)), "a has a gate of each channel (KDA); allowed"),
        (lambda: AT_ONCE(replace(y, q=y.q.half()), ring), "q is torch.float16 and k is torch.float32; allowed"),
        (lambda: apart.decode(x, ring, 4, None, CHOICES["in the step"]), "choice.ahead is False; allowed"),
        (lambda: apart.decode(x, ring, 4, None, MATRIX), "choice.matrix is True; allowed"),
        (lambda: direct.decode(x, ring, 4, None, CHOICES["in the step"]), "choice.ahead and choice.matrix are False"),
        (
            lambda: direct.decode(kda, empty_ring(kda, 4), 4),
            "a has a gate of each channel (KDA); allowed directly",
        ),
        (lambda: direct.decode(make(N, H, GROUP, K, V, v_first=False), ring, 4), "v_first is False; allowed directly"),
        (lambda: direct.decode(replace(x, q=x.q.half()), ring, 4), "q is torch.float16 and k is torch.float32"),
        (lambda: turns(heads=3), "choice.heads is 3; allowed: a divisor of the 2 value heads"),
        (lambda: turns(stages=9), "choice.stages is 9; allowed: 1 to 8"),
        (lambda: turns(step=StepChoice(16, 2, 1)), "choice.step.pieces is 2; allowed with states in turn: 1"),
        (
            lambda: turns(drafted_by(make(N, H, GROUP, K, V, v_first=False), 2, 1)),
            "v_first is False; allowed with states in turn",
        ),
        (lambda: write(x, ring, counts), "which is torch.float32"),
        (lambda: accept(drafted_by(x, 2, 1), ring, ring.g[0], ring.counts), "path is"),
        (lambda: decode(x, ring, 4, None, BufferedChoice(StepChoice(16, 1, 1), matrix=True)), "one dtype of 16 bits"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            bad()
    assert isinstance(ring, Ring)


@pytest.mark.parametrize(
    ("sequences", "dtype", "gate", "v_first", "chosen"),
    [
        (1, torch.float32, "GDN", True, BufferedChoice(StepChoice(16, 4, 1))),
        (2, torch.float32, "GDN", True, BufferedChoice(StepChoice(16, 4, 1))),
        (2, torch.bfloat16, "GDN", True, BufferedChoice(StepChoice(16, 4, 1))),
        (8, torch.float32, "GDN", True, BufferedChoice(StepChoice(32, 4, 2), registers=168)),
        (8, torch.bfloat16, "GDN", True, BufferedChoice(StepChoice(32, 4, 2), registers=168)),
        (8, torch.float32, "KDA", True, BufferedChoice(StepChoice(32, 4, 1))),
        (64, torch.float32, "GDN", True, BufferedChoice(StepChoice(32, 4, 2), registers=168)),
        (256, torch.float32, "GDN", True, BufferedChoice(StepChoice(32, 4, 2), ahead=True, registers=128)),
        (256, torch.bfloat16, "GDN", True, BufferedChoice(StepChoice(64, 1, 4), True, True, 128)),
        (256, torch.bfloat16, "KDA", True, BufferedChoice(StepChoice(64, 1, 4), True, True, 128)),
        (256, torch.float32, "KDA", True, BufferedChoice(StepChoice(32, 4, 1))),
        (256, torch.float8_e4m3fn, "GDN", True, BufferedChoice(StepChoice(32, 4, 1))),
        (256, torch.float16, "GDN", True, BufferedChoice(StepChoice(64, 4, 2))),
        (2, torch.float8_e4m3fn, "GDN", True, BufferedChoice(StepChoice(16, 4, 1))),
        (256, torch.float32, "GDN", False, BufferedChoice(StepChoice(64, 4, 2))),
    ],
)
def test_the_rule(sequences, dtype, gate, v_first, chosen):
    # 32 value heads a sequence on as many multiprocessors as an H100 has
    x = on_meta(sequences, dtype, gate, v_first)
    assert buffered.choose(x, empty_ring(x, 16)) == chosen


@pytest.mark.parametrize(
    ("sequences", "dtype", "gate", "v_first", "pays"),
    [
        (2, torch.float32, "GDN", True, False),
        (8, torch.float32, "GDN", True, True),
        (8, torch.float32, "GDN", False, True),
        (8, torch.float32, "KDA", True, False),
        (64, torch.float32, "KDA", True, True),
        (8, torch.bfloat16, "GDN", True, False),
        (16, torch.bfloat16, "GDN", True, True),
        (16, torch.bfloat16, "GDN", False, False),
        (16, torch.bfloat16, "KDA", True, False),
        (64, torch.bfloat16, "GDN", False, True),
        (64, torch.bfloat16, "KDA", True, True),
        (256, torch.float16, "GDN", True, False),  # its tokens are bf16
        (256, torch.float8_e4m3fn, "GDN", True, False),
    ],
)
def test_where_a_ring_pays(sequences, dtype, gate, v_first, pays):
    # 32 value heads a sequence on as many multiprocessors as an H100 has
    assert on_ring.pays(on_meta(sequences, dtype, gate, v_first)) == pays


def on_meta(N, dtype, gate, v_first):
    """Inputs of N sequences of 16 / 32 heads and K = V = 128, in bf16 but for the states, without memory."""
    new = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16)
    inner = (32, 128) if gate == "KDA" else (32,)
    return recurrent.StepInputs(
        state=new(1, 32, 128, 128, dtype=dtype), indices=new(N, dtype=torch.int32), q=new(N, 16, 128),
        k=new(N, 16, 128), v=new(N, 32, 128), a=new(N, *inner), b=new(N, 32), A_log=new(32), dt_bias=new(*inner),
        out=new(N, 32, 128), scale=1.0, v_first=v_first,
    )  # fmt: skip


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0)])
def test_the_rule_of_drafts(capability, monkeypatch):
    for module in (on_ring, in_turn):
        monkeypatch.setattr(module, "capability_of", lambda device: capability)
    kda, turned = make(N, H, GROUP, K, V, gate="KDA"), make(N, H, GROUP, K, V, v_first=False)

    def last(x):
        return on_ring.verify(drafted_by(x, 2, 1), empty_ring(x, 4)).launches[-1].kernel.__name__

    assert [last(x) for x in (kda, turned, make(N, H, GROUP, K, V))] == ["_drafts_kernel"] * 3
    assert len(on_ring.verify(drafted_by(kda, 2, 1), empty_ring(kda, 4)).launches) == 3  # one draft after the other
    monkeypatch.setattr(on_ring, "FEW", N)
    many = "_drafts_turns_kernel" if capability == (9, 0) else "_drafts_kernel"
    assert [last(x) for x in (turned, make(N, H, GROUP, K, V))] == ["_drafts_kernel", many]


def test_the_rule_of_a_token(monkeypatch):
    monkeypatch.setattr(recurrent, "STATE_DTYPES", (torch.float32, torch.float16))
    heads = N * H * GROUP

    def last(x):
        halves = replace(x, q=x.q.half(), k=x.k.half())
        ring = empty_ring(halves, 4, torch.float16)
        return on_ring.decode(halves, ring, 4).launches[-1].kernel.__name__

    half, wide = make(N, H, GROUP, K, V, torch.float16), make(N, H, GROUP, K, V)
    kda, turned = (make(N, H, GROUP, K, V, torch.float16, **one) for one in ({"gate": "KDA"}, {"v_first": False}))
    assert [last(x) for x in (half, wide, kda, turned)] == ["_alone_kernel", *["_decode_kernel"] * 3]
    monkeypatch.setattr(direct, "ALONE", heads - 1)
    monkeypatch.setattr(on_ring, "MANY", heads)
    assert [last(x) for x in (half, wide, kda, turned)] == [*["_direct_kernel"] * 2, *["_decode_kernel"] * 2]


@pytest.mark.parametrize("choice", ["ahead", "in the step", "chosen", "direct", "direct, sums", "direct, alone"])
def test_a_token_on_a_ring_that_a_draft_has_filled(choice):
    x = make(N, H, GROUP, K, V)
    ring, after = run(x, empty_ring(x, 4), 4, 3, CHOICES["ahead"])
    y = drafted_by(x, 1, 5)
    AT_ONCE(y, ring, STEP)()
    tokens = {name: getattr(y, name)[:, 0].contiguous() for name in TOKENS}
    _, after = expected(replace(some(x, 9), **tokens), after)
    z = some(x, 9)
    o, after = expected(z, after)
    decode(z, replace(ring, counts=ring.counts + 1), 1, None, CHOICES[choice])()
    assert error(z.out, o) < 1e-5
    assert error(states(x), after) < 1e-5
