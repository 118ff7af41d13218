"""Decode kernels of both layouts against the float64 reference, over odd shapes, strides, paddings and dtypes."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

from labkit.kernels.gated_delta import reference
from labkit.studies.state_layout.layouts import DecodeInputs, decode_k_first, decode_v_first

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
FORMS = {
    "KV": lambda x, tile, warps: decode_k_first(x, tile, warps),
    "VK": lambda x, tile, warps: decode_v_first(x, tile, warps),
    "VK folded": lambda x, tile, warps: decode_v_first(x, tile, warps, folded=True),
}
# A state of few values may be off by all that rounding allows. The interpreter truncates where the GPU rounds: twice.
STATE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}


def make(
    N, H, group, K, V, dtype, *, seed=0, slots=None, padding=(), index_dtype=torch.int32, slot_gap=0, out=torch.float32
):
    """Inputs with a state pool [slots, HV, V, K]; the sequences at the places in `padding` have index -1."""
    g = torch.Generator().manual_seed(seed)
    HV = H * group

    def random(*shape):
        return torch.randn(shape, generator=g)

    slots = slots or N + 2
    state = random(slots, HV, V, K).to(dtype)
    indices = torch.randperm(slots, generator=g)[:N].to(index_dtype)
    indices[list(padding)] = -1
    x = {
        "state": state, "indices": indices, "q": random(N, H, K), "k": random(N, H, K), "v": random(N, HV, V),
        "a": random(N, HV), "b": random(N, HV), "A_log": random(HV), "dt_bias": random(HV),
        "out": torch.full((N, HV, V), float("nan"), dtype=out),
    }  # fmt: skip
    return DecodeInputs(**{name: tensor.to(DEVICE) for name, tensor in x.items()}, scale=K**-0.5), slot_gap


def in_layout(x: DecodeInputs, form: str, slot_gap: int) -> DecodeInputs:
    """A copy whose pool has the form's layout, and `slot_gap` unused values between slots, filled with NaN."""
    state = x.state if form.startswith("VK") else x.state.transpose(-1, -2)
    size = state[0].numel()
    wide = torch.full((len(state), size + slot_gap), float("nan"), dtype=state.dtype, device=state.device)
    pool = wide[:, :size].view(state.shape)
    pool.copy_(state)
    return DecodeInputs(**vars(x) | {"state": pool, "out": x.out.clone()})


def v_first(state: torch.Tensor, form: str) -> torch.Tensor:
    return state if form.startswith("VK") else state.transpose(-1, -2)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def run_and_compare(x: DecodeInputs, slot_gap: int, form: str, tile: int, warps: int) -> DecodeInputs:
    y = in_layout(x, form, slot_gap)
    FORMS[form](y, tile, warps)()
    used = x.indices >= 0
    slots = x.indices[used].long()
    after = v_first(y.state, form)
    assert torch.equal(y.out[~used], torch.zeros_like(y.out[~used]))  # padding writes zero
    untouched = torch.ones(len(x.state), dtype=torch.bool, device=x.state.device)
    untouched[slots] = False
    assert torch.equal(after[untouched], x.state[untouched])  # bit for bit
    if used.any():
        alpha, beta = reference.decay_and_beta(x.a[used], x.b[used], x.A_log, x.dt_bias)
        o, S = reference.decode_step(x.state[slots], x.q[used], x.k[used], x.v[used], alpha, beta, x.scale)
        assert error(y.out[used], o) < (1e-5 if y.out.dtype == torch.float32 else 5e-3)
        assert error(after[slots], S) < STATE_TOLERANCE[x.state.dtype]
    return y


@pytest.mark.parametrize(
    ("sizes", "form", "dtype", "index_dtype", "slot_gap"),
    pairwise(
        [(2, 1, 8), (16, 24, 16), (40, 9, 8), (32, 16, 8)],  # K, V, tile
        list(FORMS),
        [torch.float32, torch.bfloat16],
        [torch.int32, torch.int64],
        [0, 3],
    ),
)
def test_sizes_at_the_edges(sizes, form, dtype, index_dtype, slot_gap):
    K, V, tile = sizes
    x, gap = make(2, 1, 2, K, V, dtype, padding=[1], index_dtype=index_dtype, slot_gap=slot_gap)
    run_and_compare(x, gap, form, tile, 1)


@settings(max_examples=4 if INTERPRETED else 25, deadline=None)
@given(
    N=st.integers(1, 2 if INTERPRETED else 4),
    H=st.integers(1, 3),
    group=st.integers(1, 3),
    K=st.integers(2, 40),
    V=st.integers(1, 20 if INTERPRETED else 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    form=st.sampled_from(sorted(FORMS)),
    tile=st.sampled_from([8, 16, 32]),
    warps=st.sampled_from([1, 2, 4]),
    slot_gap=st.sampled_from([0, 3, 16]),
    data=st.data(),
)
def test_any_shape(N, H, group, K, V, dtype, index_dtype, form, tile, warps, slot_gap, data):
    padding = data.draw(st.sets(st.integers(0, N - 1)))
    x, gap = make(N, H, group, K, V, dtype, padding=sorted(padding), index_dtype=index_dtype, slot_gap=slot_gap)
    run_and_compare(x, gap, form, tile, warps)


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize(("K", "V"), [(64, 128), (128, 64), (256, 256)])
def test_model_dimensions(form, K, V):
    """K differs from V, since equal ones would hide a transposition."""
    x, gap = make(1, 1, 1, K, V, torch.float32)
    run_and_compare(x, gap, form, 64, 4)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_all_padding_leaves_everything(form):
    x, gap = make(2, 1, 2, 16, 16, torch.float32, padding=[0, 1])
    run_and_compare(x, gap, form, 8, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_agree(dtype):
    x, gap = make(2, 1, 2, 32, 24, dtype)
    outs = {form: run_and_compare(x, gap, form, 16, 1) for form in FORMS}
    for form in ("VK", "VK folded"):
        assert error(outs[form].out, outs["KV"].out.double()) < 1e-4


@pytest.mark.parametrize("form", sorted(FORMS))
def test_two_runs_are_bit_equal(form):
    x, gap = make(1, 1, 2, 32, 24, torch.float32)
    first, second = (run_and_compare(x, gap, form, 16, 2) for _ in range(2))
    assert torch.equal(first.out, second.out)
    # Every slot, padding between them left out: NaN is never equal to itself.
    assert torch.equal(first.state, second.state)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_linear_part_of_softplus(form):
    """a + dt_bias above 20, where exp would overflow in fp32 further on."""
    x, gap = make(2, 1, 2, 16, 16, torch.float32)
    x.a[0] = 100.0
    x.A_log[:] = -6.0
    run_and_compare(x, gap, form, 8, 1)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_zero_key_is_not_divided_by_zero(form):
    x, gap = make(2, 1, 1, 16, 16, torch.float32)
    x.k[0] = 0.0
    run_and_compare(x, gap, form, 8, 1)


def test_large_pool_is_addressed_in_64_bits(device):
    """A slot beyond 2^31 values, where there is memory for it (the GPU)."""
    slots = 2**31 // (2 * 128 * 128) + 2 if device == "cuda" else 4
    x, _ = make(1, 1, 2, 128, 128, torch.bfloat16, slots=4)
    pool = torch.zeros((slots, 2, 128, 128), dtype=torch.bfloat16, device=device)
    pool[-1] = x.state[0]
    y = DecodeInputs(
        **vars(x) | {"state": pool, "indices": torch.tensor([slots - 1], dtype=torch.int32, device=device)}
    )
    before = pool[-1:].clone()
    decode_v_first(y, 128 if INTERPRETED else 8, 1)()
    alpha, beta = reference.decay_and_beta(x.a, x.b, x.A_log, x.dt_bias)
    o, S = reference.decode_step(before, x.q, x.k, x.v, alpha, beta, x.scale)
    assert error(y.out, o) < 1e-5
    assert error(pool[-1:], S) < STATE_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("steps", [64])
def test_many_steps_stay_near_the_reference(steps):
    """Errors of an fp32 state do not grow from token to token."""
    x, _ = make(1, 1, 1, 16, 16, torch.float32)
    y = in_layout(x, "VK", 0)
    expected = x.state[x.indices.long()].double()
    alpha, beta = reference.decay_and_beta(x.a, x.b, x.A_log, x.dt_bias)
    for step in range(steps):
        q, k, v = (torch.roll(t, step, -1) for t in (x.q, x.k, x.v))
        decode_v_first(DecodeInputs(**vars(y) | {"q": q, "k": k, "v": v}), 16, 1)()
        o, expected = reference.decode_step(expected, q, k, v, alpha, beta, x.scale)
    assert error(y.out, o) < 1e-5
    assert error(y.state[x.indices.long()], expected) < 1e-5


def test_a_wrong_layout_is_noticed():
    """The control: the K-first kernel on a V-first pool must fail the comparison."""
    x, _ = make(2, 1, 2, 16, 16, torch.float32)
    y = DecodeInputs(**vars(x) | {"state": x.state.clone()})
    decode_k_first(y, 8, 1)()
    alpha, beta = reference.decay_and_beta(x.a, x.b, x.A_log, x.dt_bias)
    o, _ = reference.decode_step(x.state[x.indices.long()], x.q, x.k, x.v, alpha, beta, x.scale)
    assert error(y.out, o) > 0.1
