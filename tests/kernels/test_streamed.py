"""Decode on a ring with several sequences a program, against float64, and against the step of `buffered`."""

from dataclasses import replace

import pytest
import torch
from test_buffered import GROUP, TOKENS, H, K, V, expected, some, states
from test_recurrent import DEVICE, GATES, error, make

from labkit.kernels.gated_delta import buffered
from labkit.kernels.gated_delta.buffered import empty_ring, moved
from labkit.kernels.gated_delta.recurrent import StepChoice
from labkit.kernels.gated_delta.streamed import StreamedChoice, decode

SMALL = StreamedChoice(StepChoice(16, 1, 1), each=2, stages=3)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("N", "each", "v_first"), [(3, 2, True), (4, 2, False), (5, 3, True), (2, 8, True)])
def test_tokens_and_states_are_those_of_the_recurrence(gate, N, each, v_first):
    """Also of the last program, which has fewer sequences than the others."""
    x = make(N, H, GROUP, K, V, gate=gate, v_first=v_first)
    after, ring, choice = states(x), empty_ring(x, 4), replace(SMALL, each=each)
    for step in range(6):
        y = some(x, step)
        flush = torch.tensor([n == step for n in range(N)], dtype=torch.int32, device=DEVICE)
        decode(y, ring, 4, flush if step < 3 else None, choice)()
        o, after = expected(y, after)
        assert error(y.out, o) < 1e-5
        ring = replace(ring, counts=moved(ring, 4, flush if step < 3 else None))
    write = torch.ones(N, dtype=torch.int32, device=DEVICE)
    y = some(x, 7)
    decode(y, ring, 4, write, choice)()
    _, after = expected(y, after)
    assert error(states(x), after) < 1e-5


@pytest.mark.parametrize("matrix", [True, False])
def test_states_of_16_bits(matrix):
    """All of fp16; the interpreter multiplies the bits of bf16. Written at the end, so off by one rounding."""
    x = make(3, H, GROUP, K, 32, dtype=torch.float16)
    x = replace(x, **{name: getattr(x, name).half() for name in (*TOKENS, "out")})
    after, ring = states(x), empty_ring(x, 4)
    for step in range(4):
        y = some(x, step)
        decode(y, ring, 4, None, replace(SMALL, matrix=matrix))()
        o, after = expected(y, after)
        assert error(y.out, o) < 2e-3
        ring = replace(ring, counts=moved(ring, 4))
    assert error(states(x), after) < 2e-3


def test_padding_is_neither_read_nor_written():
    x = make(5, H, GROUP, K, V, padding=(1, 4))
    pool, ring = x.state.clone(), empty_ring(x, 4)
    y = some(x, 1)
    decode(y, ring, 1, None, SMALL)()  # which writes every state
    assert torch.equal(y.out[[1, 4]], torch.zeros_like(y.out[[1, 4]]))
    used = x.indices[x.indices >= 0].long()
    others = torch.ones(len(pool), dtype=torch.bool, device=DEVICE)
    others[used] = False
    assert torch.equal(x.state[others], pool[others])
    assert not torch.equal(x.state[used], pool[used])
    assert not ring.u.any()


def test_a_ring_is_left_as_the_other_step_leaves_it():
    x = make(5, H, GROUP, K, V)
    rings = []
    for step in (lambda y, ring: decode(y, ring, 4, None, SMALL), lambda y, ring: buffered.decode(y, ring, 4)):
        y, ring = some(x, 3), empty_ring(x, 4)
        step(y, ring)()
        rings.append(ring)
    one, other = rings
    assert torch.equal(one.k, other.k)
    assert torch.equal(one.g, other.g)
    assert error(one.u, other.u.double()) < 1e-6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"each": 0}, "each is 0; allowed: an integer from 1"),
        ({"stages": 9}, "stages is 9; allowed: 1, 2, 3, 4, 5, 6, 7"),
        ({"matrix": True}, "allowed with matrix instructions: one dtype of 16 bits"),
    ],
)
def test_refuses(changed, message):
    x = make(3, H, GROUP, K, V)
    with pytest.raises(ValueError, match=message):
        decode(x, empty_ring(x, 4), 4, None, replace(SMALL, **changed))
