"""Production decode and verify against the float64 reference: odd shapes, strides, paddings, dtypes, drafts."""

import os
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

from labkit.kernels.gated_delta import reference
from labkit.kernels.gated_delta.recurrent import (
    FEW_ROWS,
    KEPT_BYTES,
    StepChoice,
    StepInputs,
    VerifyInputs,
    check_choice,
    check_indices,
    choose,
    decode,
    packed,
    verify,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# bf16: the most that one value can lose. The interpreter truncates where the GPU rounds: twice as much.
STATE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}
GATES = {"GDN": (False, None), "KDA": (True, None), "KDA bounded": (True, -5.0)}
SIZES = [(16, 24), (40, 16), (16, 32)]  # K, V with SMALL: a short tile of V, a short piece of K, two whole tiles
DTYPES = [torch.float32, torch.bfloat16]
SMALL = StepChoice(tile=16, pieces=2)


def tensors(tokens, H, group, K, V, dtype, gate, seed, padding):
    """What decode and verify have in common, and the generator; the state pool is [slots, HV, V, K]."""
    g = torch.Generator().manual_seed(seed)
    HV, N = H * group, tokens[0]
    kda, bound = GATES[gate]
    inner = (HV, K) if kda else (HV,)

    def random(*shape):
        return torch.randn(shape, generator=g)

    indices = torch.randperm(N + 2, generator=g)[:N].to(torch.int32)
    indices[list(padding)] = -1
    found = {
        "state": random(N + 2, HV, V, K).to(dtype), "indices": indices,
        "q": random(*tokens, H, K), "k": random(*tokens, H, K), "v": random(*tokens, HV, V),
        "a": random(*tokens, *inner), "b": random(*tokens, HV), "A_log": random(HV), "dt_bias": random(*inner),
        "out": torch.full((*tokens, HV, V), float("nan")),
    }  # fmt: skip
    return {name: tensor.to(DEVICE) for name, tensor in found.items()} | {"scale": K**-0.5, "lower_bound": bound}, g


def make(N, H, group, K, V, dtype=torch.float32, *, gate="GDN", v_first=True, seed=0, padding=()) -> StepInputs:
    found, _ = tensors((N,), H, group, K, V, dtype, gate, seed, padding)
    found["state"] = turned(found["state"], v_first).contiguous()
    return StepInputs(**found, v_first=v_first)


def make_verify(
    N, T, H, group, K, V, dtype=torch.float32, *, gate="GDN", v_first=True, seed=0, padding=(), tree=False
) -> VerifyInputs:
    found, g = tensors((N, T), H, group, K, V, dtype, gate, seed, padding)
    found["state"] = turned(found["state"], v_first).contiguous()
    cache = torch.full((N + 3, T, *found["state"].shape[1:]), float("nan"), dtype=dtype, device=DEVICE)
    slots = torch.randperm(N + 3, generator=g)[:N].to(DEVICE)
    parents = None
    if tree:  # an earlier token or the pool's state, at random
        parents = [[int(torch.randint(-1, t, (), generator=g)) if t else -1 for t in range(T)] for _ in range(N)]
        parents = torch.tensor(parents, dtype=torch.int32, device=DEVICE)
    caches = {"intermediate_states": cache, "cache_indices": slots, "parents": parents}
    return VerifyInputs(**found, **caches, v_first=v_first)


def turned(state, v_first):
    """A pool as [.., V, K], or one of that layout as the other."""
    return state if v_first else state.transpose(-1, -2)


def copy(x):
    """The same inputs with a pool, an output and a cache of their own."""
    names = ("state", "out", "intermediate_states")
    return replace(x, **{name: getattr(x, name).clone() for name in names if hasattr(x, name)})


def gates(x):
    """α and β of the reference."""
    if x.a.ndim > x.b.ndim:
        return reference.kda_decay(x.a, x.A_log, x.dt_bias, x.lower_bound), torch.sigmoid(x.b.double())
    return reference.decay_and_beta(x.a, x.b, x.A_log, x.dt_bias)


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def decode_and_compare(x: StepInputs, choice: StepChoice | None = SMALL) -> StepInputs:
    y = copy(x)
    decode(y, choice)()
    used = x.indices >= 0
    slots = x.indices[used].long()
    untouched = torch.ones(len(x.state), dtype=torch.bool, device=x.state.device)
    untouched[slots] = False
    assert torch.equal(y.state[untouched], x.state[untouched])  # bit for bit
    assert torch.equal(y.out[~used], torch.zeros_like(y.out[~used]))
    assert not y.out.isnan().any()
    if used.any():
        alpha, beta = (gate[used] for gate in gates(x))
        before = turned(x.state[slots], x.v_first)
        o, S = reference.decode_step(before, x.q[used], x.k[used], x.v[used], alpha, beta, x.scale)
        assert error(y.out[used], o) < 1e-5
        assert error(turned(y.state[slots], x.v_first), S) < STATE_TOLERANCE[x.state.dtype]
    return y


def rounded_verify(x: VerifyInputs, used):
    """The reference token by token, with states rounded to the pool's dtype as the kernel stores them."""
    alpha, beta = (gate[used] for gate in gates(x))
    q, k, v = x.q[used], x.k[used], x.v[used]
    pool = turned(x.state[x.indices[used].long()], x.v_first)
    N, T = q.shape[:2]
    parents = torch.arange(-1, T - 1).expand(N, T) if x.parents is None else x.parents[used].cpu()
    o, states = torch.zeros_like(v, dtype=torch.float64), []
    for t in range(T):
        before = torch.stack([pool[n] if parents[n, t] < 0 else states[parents[n, t]][n] for n in range(N)])
        o[:, t], after = reference.decode_step(before, *(z[:, t] for z in (q, k, v, alpha, beta)), x.scale)
        states.append(after.to(x.state.dtype))
    return o, torch.stack(states, 1)


def verify_and_compare(x: VerifyInputs, choice: StepChoice | None = SMALL) -> VerifyInputs:
    y = copy(x)
    verify(y, choice)()
    used = (x.indices >= 0) & (x.cache_indices >= 0)
    slots = x.cache_indices[used]
    untouched = torch.ones(len(x.intermediate_states), dtype=torch.bool, device=x.state.device)
    untouched[slots] = False
    assert torch.equal(y.state, x.state)
    assert y.intermediate_states[untouched].isnan().all()
    assert torch.equal(y.out[~used], torch.zeros_like(y.out[~used]))
    assert not y.out.isnan().any()
    if used.any():
        found = turned(y.intermediate_states[slots], x.v_first)
        exact = reference.verify(
            turned(x.state[x.indices[used].long()], x.v_first), x.q[used], x.k[used], x.v[used],
            *(gate[used] for gate in gates(x)), x.scale, None if x.parents is None else x.parents[used],
        )  # fmt: skip
        o, states = exact if x.state.dtype == torch.float32 else rounded_verify(x, used)
        tolerance = 1e-5 if x.state.dtype == torch.float32 else 4 * STATE_TOLERANCE[x.state.dtype]
        assert error(y.out[used], o) < tolerance
        assert error(found, states.double()) < tolerance
        assert error(y.out[used], exact[0]) < (tolerance if x.state.dtype == torch.float32 else 3e-2)
    return y


# decode


@pytest.mark.parametrize(("size", "dtype", "v_first", "gate"), pairwise(SIZES, DTYPES, [True, False], list(GATES)))
def test_decode(size, dtype, v_first, gate):
    decode_and_compare(make(2, 1, 2, *size, dtype, gate=gate, v_first=v_first, padding=[1]))


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize(
    ("K", "V", "choice"),
    [(1, 1, StepChoice(1, 1)), (5, 3, StepChoice(8, 4)), (33, 18, StepChoice(16, 8)), (64, 9, StepChoice(8, 1, 4))],
)
def test_sizes_at_the_edges(K, V, choice, v_first):
    """Pieces fewer than asked for, the last one short; a tile larger than V, and one with a value left over."""
    decode_and_compare(make(1, 1, 1, K, V, gate="KDA", v_first=v_first), choice)


@settings(max_examples=3 if INTERPRETED else 10, deadline=None)
@given(
    N=st.integers(1, 2),
    H=st.integers(1, 2),
    group=st.sampled_from([1, 2, 4]),
    K=st.integers(1, 40),
    V=st.integers(1, 20 if INTERPRETED else 40),
    dtype=st.sampled_from(DTYPES),
    gate=st.sampled_from(sorted(GATES)),
    v_first=st.booleans(),
    tile=st.sampled_from([8, 16, 32]),
    pieces=st.sampled_from([1, 2, 4, 8]),
    warps=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_any_decode(N, H, group, K, V, dtype, gate, v_first, tile, pieces, warps, data):
    padding = data.draw(st.sets(st.integers(0, N - 1)))
    while pieces > K:
        pieces //= 2
    x = make(N, H, group, K, V, dtype, gate=gate, v_first=v_first, padding=sorted(padding))
    decode_and_compare(x, StepChoice(tile, pieces, warps))


@pytest.mark.parametrize(
    ("size", "dtype", "v_first", "gate"),
    pairwise([(128, 12), (256, 5), (20, 12)], DTYPES, [True, False], ["GDN", "KDA"]),
)
def test_decode_with_the_rule(size, dtype, v_first, gate):
    decode_and_compare(make(1, 1, 1, *size, dtype, gate=gate, v_first=v_first), None)


@pytest.mark.parametrize("v_first", [True, False])
def test_choices_agree(v_first):
    """The tile does not even change the order of a sum, nor what is kept in L2."""
    x = make(1, 1, 1, 32, 24, v_first=v_first)
    base = decode_and_compare(x, StepChoice(8, 2, 1))
    for choice in (StepChoice(16, 2, 1), StepChoice(8, 2, 1, evict_first=False)):
        found = decode_and_compare(x, choice)
        assert error(found.out, base.out.double()) < 1e-6
        if INTERPRETED or choice.tile == 8:
            assert torch.equal(found.state, base.state)
    for choice in (StepChoice(8, 1, 2), StepChoice(32, 4, 4)):
        assert error(decode_and_compare(x, choice).out, base.out.double()) < 1e-5


@pytest.mark.parametrize(("dtype", "gate"), [(torch.float32, "KDA"), (torch.bfloat16, "GDN")])
def test_layouts_agree(dtype, gate):
    x = make(1, 1, 2, 32, 24, dtype, gate=gate)
    other = make(1, 1, 2, 32, 24, dtype, gate=gate, v_first=False)
    assert torch.equal(x.state, other.state.transpose(-1, -2))
    assert error(decode_and_compare(x).out, decode_and_compare(other).out.double()) < 1e-5


@pytest.mark.parametrize("v_first", [True, False])
def test_packed_is_bit_equal(v_first):
    """Views into mixed_qkv, whose heads and tokens lie apart, against contiguous copies of them."""
    x = make(2, 2, 2, 16, 12, v_first=v_first)
    mixed = torch.randn(2, 2 * 2 * 16 + 4 * 12, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    q, k, v = packed(mixed, 2, 4, 16, 12)
    assert q.data_ptr() == mixed.data_ptr()
    assert v.stride() == (mixed.shape[1], 12, 1)
    torch.testing.assert_close(torch.cat([z.flatten(1) for z in (q, k, v)], 1), mixed, rtol=0, atol=0)
    views = decode_and_compare(replace(x, q=q, k=k, v=v))
    whole = decode_and_compare(replace(x, q=q.contiguous(), k=k.contiguous(), v=v.contiguous()))
    assert torch.equal(views.out, whole.out)
    assert torch.equal(views.state, whole.state)


def test_packed_tokens_of_a_verify_are_bit_equal():
    x = make_verify(2, 2, 2, 1, 16, 12)
    mixed = torch.randn(2, 2, 2 * 2 * 16 + 2 * 12, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    q, k, v = packed(mixed, 2, 2, 16, 12)
    views = verify_and_compare(replace(x, q=q, k=k, v=v))
    whole = verify_and_compare(replace(x, q=q.contiguous(), k=k.contiguous(), v=v.contiguous()))
    assert torch.equal(views.out, whole.out)


def test_packed_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"mixed_qkv is \(3, 100\); allowed: a last dimension of .* = 224"):
        packed(torch.zeros(3, 100), 2, 4, 16, 40)


def test_gates_and_heads_may_lie_apart():
    """a and b as views into one projection, q's heads with a gap, slots with a gap, int64 indices."""
    x = make(2, 2, 2, 16, 12)
    ba = torch.cat([x.b, x.a], 1)
    q = torch.full((2, 2, 20), float("nan"), device=DEVICE)[..., :16]
    q.copy_(x.q)
    wide = torch.full((4, 4 * 16 * 12 + 7), float("nan"), device=DEVICE)
    state = wide[:, : 4 * 16 * 12].view(x.state.shape)
    state.copy_(x.state)
    y = replace(copy(x), a=ba[:, 4:], b=ba[:, :4], q=q, state=state, indices=x.indices.long())
    decode(y, SMALL)()
    expected = decode_and_compare(x)
    # Not bit for bit on a GPU: rows that are not aligned to 16 bytes have narrower loads, and lanes other channels.
    torch.testing.assert_close(y.out, expected.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y.state, expected.state, rtol=1e-5, atol=1e-6)
    assert wide[:, 4 * 16 * 12 :].isnan().all()


@pytest.mark.parametrize("v_first", [True, False])
def test_all_padding_leaves_everything(v_first):
    decode_and_compare(make(2, 1, 2, 16, 16, v_first=v_first, padding=[0, 1]))
    verify_and_compare(make_verify(2, 2, 1, 2, 16, 16, v_first=v_first, padding=[0, 1]))


def test_no_sequences():
    decode_and_compare(make(0, 1, 2, 16, 16))
    verify_and_compare(make_verify(0, 2, 1, 2, 16, 16))


@pytest.mark.parametrize("gate", ["GDN", "KDA"])
def test_two_runs_are_bit_equal(gate):
    x = make(1, 1, 2, 32, 24, gate=gate)
    first, second = (decode_and_compare(x) for _ in range(2))
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.state, second.state)
    x = make_verify(1, 3, 1, 2, 32, 16, gate=gate, tree=True)
    first, second = (verify_and_compare(x) for _ in range(2))
    assert torch.equal(first.out, second.out)
    slots = x.cache_indices
    assert torch.equal(first.intermediate_states[slots], second.intermediate_states[slots])


@pytest.mark.parametrize("gate", GATES)
def test_extreme_gates(gate):
    """a + dt_bias above 20, where exp would overflow further on, and far below."""
    x = make(2, 1, 2, 16, 16, gate=gate)
    x.a[0], x.a[1] = 100.0, -100.0
    x.A_log[:] = -6.0
    decode_and_compare(x)


def test_zero_key_is_not_divided_by_zero():
    x = make(2, 1, 1, 16, 16)
    x.k[0] = 0.0
    decode_and_compare(x)


def test_bf16_activations_and_output():
    x = make(2, 1, 2, 32, 16)
    bf16 = {name: getattr(x, name).bfloat16() for name in ("q", "k", "v", "a", "b", "out")}
    y = replace(copy(x), **bf16)
    exact = replace(y, **{name: getattr(y, name).float() for name in bf16}, state=x.state.clone())
    decode(y, SMALL)()
    decode(exact, SMALL)()
    assert torch.equal(y.state, exact.state)
    assert error(y.out, exact.out.double()) < (8e-3 if INTERPRETED else 4e-3)


def test_large_pool_is_addressed_in_64_bits(device):
    """A slot beyond 2^31 values, where there is memory for it (the GPU)."""
    slots = 2**31 // (2 * 128 * 128) + 2 if device == "cuda" else 4
    x = make(1, 1, 2, 128, 128, torch.bfloat16)
    choice = StepChoice(128, 4, 8) if INTERPRETED else None
    pool = torch.zeros((slots, 2, 128, 128), dtype=torch.bfloat16, device=device)
    pool[-1] = x.state[0]
    before = pool[-1:].clone()
    y = replace(x, state=pool, indices=torch.tensor([slots - 1], dtype=torch.int32, device=device))
    decode(y, choice)()
    o, S = reference.decode_step(before, x.q, x.k, x.v, *gates(x), x.scale)
    assert error(y.out, o) < 1e-5
    assert error(pool[-1:], S) < STATE_TOLERANCE[torch.bfloat16]


def test_a_wrong_layout_is_noticed():
    """The control: the K-first kernel on a V-first pool must fail the comparison."""
    x = make(2, 1, 2, 16, 16)
    y = replace(copy(x), v_first=False)
    decode(y, SMALL)()
    o, _ = reference.decode_step(x.state[x.indices.long()], x.q, x.k, x.v, *gates(x), x.scale)
    assert error(y.out, o) > 0.1


# verify


@pytest.mark.parametrize(
    ("dtype", "v_first", "gate", "tree"), pairwise(DTYPES, [True, False], list(GATES), [False, True])
)
def test_verify(dtype, v_first, gate, tree):
    x = make_verify(2, 3, 1, 2, 40, 16, dtype, gate=gate, v_first=v_first, tree=tree, padding=[1])
    verify_and_compare(x)


@settings(max_examples=3 if INTERPRETED else 8, deadline=None)
@given(
    N=st.integers(1, 2),
    T=st.integers(1, 4),
    group=st.sampled_from([1, 2, 4]),
    size=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    gate=st.sampled_from(sorted(GATES)),
    v_first=st.booleans(),
    tile=st.sampled_from([16, 32]),
    pieces=st.sampled_from([1, 2]),
    warps=st.sampled_from([1, 4]),
    tree=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_verify(N, T, group, size, dtype, gate, v_first, tile, pieces, warps, tree, seed):
    x = make_verify(N, T, 1, group, *size, dtype, gate=gate, v_first=v_first, tree=tree, seed=seed)
    verify_and_compare(x, StepChoice(tile, pieces, warps))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_first", [True, False])
def test_verify_with_the_rule(dtype, v_first):
    verify_and_compare(make_verify(1, 2, 1, 1, 128, 12, dtype, v_first=v_first, tree=True), None)


@pytest.mark.parametrize(("dtype", "v_first", "gate"), pairwise(DTYPES, [True, False], ["GDN", "KDA"]))
def test_a_chain_is_bit_equal_to_repeated_decode(dtype, v_first, gate):
    x = make_verify(1, 3, 1, 1, 40, 16, dtype, gate=gate, v_first=v_first)
    found = verify_and_compare(x)
    shared = ("A_log", "dt_bias", "scale", "lower_bound", "v_first", "indices")
    pool = x.state.clone()
    for t in range(3):
        token = {name: getattr(x, name)[:, t].contiguous() for name in ("q", "k", "v", "a", "b", "out")}
        step = StepInputs(state=pool, **token, **{name: getattr(x, name) for name in shared})
        decode(step, SMALL)()
        assert torch.equal(step.out, found.out[:, t])
        assert torch.equal(pool[x.indices.long()], found.intermediate_states[x.cache_indices, t])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree_that_is_a_chain_is_bit_equal_to_it(dtype):
    chain = make_verify(1, 3, 1, 1, 40, 16, dtype)
    parents = torch.arange(-1, 2, dtype=torch.int64, device=DEVICE).expand(1, 3).contiguous()
    tree = replace(chain, parents=parents)
    found, expected = verify_and_compare(tree), verify_and_compare(chain)
    assert torch.equal(found.out, expected.out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_path_of_a_tree_is_bit_equal_to_its_chain(dtype):
    """Parents [-1, 0, 0, 1, -1]: token 3 ends the path 0, 1, 3, token 2 the path 0, 2."""
    x = make_verify(1, 5, 1, 1, 16, 12, dtype)
    tree = replace(x, parents=torch.tensor([[-1, 0, 0, 1, -1]], dtype=torch.int32, device=DEVICE))
    found = verify_and_compare(tree)
    for path in ([0, 1, 3], [0, 2], [4]):
        names = ("q", "k", "v", "a", "b", "out")
        part = {name: getattr(x, name)[:, path].contiguous() for name in names}
        caches = x.intermediate_states[:, : len(path)].contiguous()
        chain = verify_and_compare(replace(x, **part, intermediate_states=caches))
        assert torch.equal(chain.out, found.out[:, path])


def test_a_cache_slot_below_zero_is_padding_too():
    x = make_verify(2, 2, 1, 1, 16, 16)
    x.cache_indices[0] = -1
    verify_and_compare(x)


# arguments


def bad(x, changes, message, launch):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the message is compared)
        launch(replace(x, **changes))
    assert message in str(raised.value)


def zeros(*shape, dtype=torch.float32, device=DEVICE):
    return torch.zeros(shape, dtype=dtype, device=device)


N, H, HV, K, V, T = 3, 2, 4, 16, 8, 2
BAD_STEPS = {
    "q of two dimensions": ({"q": (N, K)}, "q is (3, 16) and v is (3, 4, 8); allowed: [N, H, K] and [N, HV, V]"),
    "heads": ({"v": (N, 5, V)}, "v has 5 heads and q has 2; allowed: a multiple of q's"),
    "no heads": ({"q": (N, 0, K)}, "q has 0; allowed: a multiple"),
    "no channels": ({"q": (N, H, 0)}, "q has K = 0 and v has V = 8; allowed: at least 1"),
    "other layout": ({"state": (5, HV, K, V)}, "state is (5, 4, 16, 8); allowed: slots of (4, 8, 16)"),
    "no slots": ({"state": (HV, V, K)}, "state is (4, 8, 16); allowed: slots of (4, 8, 16)"),
    "k": ({"k": (N, H, K + 1)}, "k is (3, 2, 17); allowed: (3, 2, 16)"),
    "a": ({"a": (N, H)}, "a is (3, 2); allowed: (3, 4)"),
    "a of KDA": ({"a": (N, HV, V)}, "a is (3, 4, 8); allowed: (3, 4, 16)"),
    "dt_bias of KDA": ({"a": (N, HV, K)}, "dt_bias is (4,); allowed: (4, 16)"),
    "b": ({"b": (HV, N)}, "b is (4, 3); allowed: (3, 4)"),
    "A_log": ({"A_log": (H,)}, "A_log is (2,); allowed: (4,)"),
    "dt_bias": ({"dt_bias": (1, HV)}, "dt_bias is (1, 4); allowed: (4,)"),
    "out": ({"out": (N, V, HV)}, "out is (3, 8, 4); allowed: (3, 4, 8)"),
    "too many": (
        {"q": (65536, 1, 1), "v": (65536, 1, 1)},
        "q has 65536 sequences; allowed: at most 65535",
    ),
}


@pytest.mark.parametrize(("shapes", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_bad_shape_is_named_with_what_is_allowed(shapes, message):
    bad(make(N, H, 2, K, V), {name: zeros(*shape) for name, shape in shapes.items()}, message, decode)


def test_bad_dtypes_strides_devices_and_bounds_are_named_with_what_is_allowed():
    x = make(N, H, 2, K, V)
    integers = zeros(N, dtype=torch.int16)
    apart = zeros(N, H, K, 2)[..., 0]
    turned_state = zeros(5, HV, K, V).transpose(-1, -2)
    for changes, message in (
        ({"state": x.state.double()}, "state is torch.float64; allowed: torch.float32, torch.bfloat16, torch.float16"),
        ({"state": turned_state}, "state has strides (512, 128, 1, 8); allowed: contiguous inside a slot"),
        ({"indices": integers}, "indices is torch.int16; allowed: torch.int32, torch.int64"),
        ({"indices": zeros(N + 1)}, "indices is (4,); allowed: (3,)"),
        ({"indices": zeros(2 * N, dtype=torch.int32)[::2]}, "indices has strides (2,); allowed: contiguous"),
        ({"q": apart}, "q has strides (64, 32, 2); allowed: values of a head adjacent"),
        ({"a": zeros(HV, N).t()}, "a has strides (1, 3); allowed: contiguous inside a token"),
        ({"out": zeros(2 * N, HV, V)[::2]}, "out has strides (64, 8, 1); allowed: contiguous"),
        ({"a": x.a.long()}, "a is torch.int64; allowed: a floating-point dtype"),
        ({"b": zeros(N, HV, device="meta")}, f"b is on meta; allowed: the state's device, {x.state.device}"),
        ({"lower_bound": -5.0}, "lower_bound is -5.0 and a is (3, 4); allowed: a negative one, with KDA's a"),
    ):
        bad(x, changes, message, decode)
    bad(make(N, H, 2, K, V, gate="KDA"), {"lower_bound": 1.0}, "lower_bound is 1.0", decode)


def test_bad_arguments_of_verify_are_named_with_what_is_allowed():
    x = make_verify(N, T, H, 2, K, V)
    cache = x.intermediate_states
    for changes, message in (
        ({"q": zeros(N, H, K)}, "allowed: [N, T, H, K] and [N, T, HV, V]"),
        ({"q": zeros(N, 0, H, K)}, "q is (3, 0, 2, 16); allowed: [N, T, H, K] with T at least 1"),
        ({"intermediate_states": cache[:, 0]}, "intermediate_states is (6, 4, 8, 16); allowed: slots of (2, 4, 8, 16)"),
        ({"intermediate_states": cache.bfloat16()}, "intermediate_states is torch.bfloat16; allowed: the state's"),
        ({"intermediate_states": zeros(9, 4, HV, V, K)[:, ::2]}, "allowed: contiguous inside a slot"),
        ({"cache_indices": zeros(N + 1)}, "cache_indices is (4,); allowed: (3,)"),
        ({"cache_indices": zeros(N)}, "cache_indices is torch.float32; allowed: torch.int32, torch.int64"),
        ({"parents": zeros(N)}, "parents is (3,); allowed: (3, 2)"),
        ({"parents": zeros(N, T)}, "parents is torch.float32; allowed: torch.int32, torch.int64"),
        ({"v": zeros(2 * N, T, HV, V)[::2]}, "v has strides (128, 32, 8, 1); allowed: all tokens evenly spaced"),
        ({"a": zeros(N, T, HV, 2)[..., 0]}, "a has strides (16, 8, 2); allowed: contiguous inside a token"),
    ):
        bad(x, changes, message, verify)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (StepChoice(tile=12), "tile is 12; allowed: 1, 2, 4"),
        (StepChoice(pieces=3), "pieces is 3; allowed: 1, 2, 4, 8, 16"),
        (StepChoice(pieces=32), "pieces is 32; allowed: 1, 2, 4, 8, 16"),  # more than K
        (StepChoice(num_warps=3), "num_warps is 3; allowed: 1, 2, 4, 8"),
    ],
)
def test_a_bad_choice_is_named_with_what_is_allowed(choice, message):
    for x, launch in ((make(N, H, 2, K, V), decode), (make_verify(N, T, H, 2, K, V), verify)):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            launch(x, choice)
        assert message in str(raised.value)


def test_indices_are_checked_where_one_asks_for_it():
    check_indices(torch.tensor([3, -1, 0, -1]), 4)
    check_indices(torch.tensor([-1]), 0)
    with pytest.raises(ValueError, match="indices holds 4; allowed: below the pool's 4 slots, or negative"):
        check_indices(torch.tensor([4, 0]), 4)
    with pytest.raises(ValueError, match=r"indices is \[2, 0, 2\]; allowed: each slot once"):
        check_indices(torch.tensor([2, 0, 2]), 4)


# the rule


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (256, 256), (64, 128), (20, 12), (1, 1), (513, 3)])
def test_the_rule_gives_what_the_kernels_take(K, V, itemsize, v_first):
    for fast, drafts, heads in product((False, True), (None, "chain", "tree"), (1, 32, 2048, 16384)):
        choice = choose(heads, V, K, itemsize, 132, fast=fast, v_first=v_first, drafts=drafts)
        check_choice(choice, K)
        assert choice.tile < 2 * V
        again = drafts == "tree" and heads * V / 132 > FEW_ROWS  # a tree loads what it has stored
        assert choice.evict_first == (heads * V * K * itemsize <= KEPT_BYTES and not again)


def test_larger_batches_get_tiles_of_more_rows_and_small_ones_more_programs():
    few, some, many = (choose(32 * batch, 128, 128, 2, 132) for batch in (1, 8, 512))
    assert few.tile < some.tile <= many.tile
