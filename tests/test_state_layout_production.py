"""Study 01 beside its grid: cases, variants, floors; how libraries are called, by stand-ins with their signatures."""

import inspect
import itertools
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import rows as made
import torch
import triton

from labkit.bench.spec import ROLES, Case
from labkit.kernels.gated_delta import chunked, reference
from labkit.kernels.gated_delta.recurrent import packed
from labkit.studies.state_layout import study, trials, variants
from labkit.sweep import gated_delta

ALL = made.LAYOUT | {"gates": ["GDN", "KDA"], "step_batches": [1, 8, 64, 256], "prefills": list(variants.PREFILLS)}
SHAPE = {"model": "test", "activations": "fp32", "H": 2, "HV": 4, "K": 8, "V": 6}


def case(op, gate="GDN", **changes):
    more = {"step": {"state": "fp32", "batch": 3}, "verify": {"state": "bf16", "batch": 3, "draft": "chain", "T": 2}}
    return Case(op, SHAPE | {"gate": gate} | more.get(op, {"prefill": variants.TINY}) | changes)


def of(op, gate, **parameters):
    return [x for x in study.cases(ALL | parameters) if x.op == op and x["gate"] == gate]


# cases


def test_cases_are_distinct_and_survive_json():
    found = study.cases(ALL)
    assert {x.op for x in found} == {"decode", "step", "verify", "extend", "long", "chunk_state", "drift"}
    assert len({(x.op, x.key) for x in found}) == len(found)
    for x in found:
        again = Case(x.op, json.loads(x.key))
        assert again.key == x.key
        assert study.floor(again) == study.floor(x)
        assert x["activations"] == "bf16"


def test_kda_is_timed_with_the_heads_of_kimi_linear_and_at_fewer_points():
    for op in ("step", "verify", "extend", "drift"):
        assert {(x["model"], x["H"], x["HV"]) for x in of(op, "KDA")} == {("Kimi-Linear-48B-A3B", 32, 32)}
        assert {(x["model"], x["H"], x["HV"]) for x in of(op, "GDN")} == {("Qwen3-Next-80B-A3B", 16, 32)}
    assert {x["batch"] for x in of("step", "GDN")} == {1, 8, 64, 256}
    assert {x["batch"] for x in of("step", "KDA")} == {1, 64, 256}
    assert {x["batch"] for x in of("verify", "GDN")} == {1, 16, 64}
    assert {x["batch"] for x in of("verify", "KDA")} == {16}
    for gate in study.GATES:
        assert {(x["draft"], x["T"]) for x in of("verify", gate)} == {("chain", 4), ("tree", 8)}
        assert {(x["state"], x["batch"], x["tokens"]) for x in of("drift", gate)} == {
            ("fp32", 1, study.DRIFT_TOKENS),
            ("bf16", 1, study.DRIFT_TOKENS),
        }
    assert [x["prefill"] for x in of("extend", "GDN")] == list(variants.PREFILLS)
    assert {x["prefill"] for x in of("extend", "KDA")} == set(study.STATE_KERNEL_AT)
    assert {x["prefill"] for x in of("chunk_state", "GDN")} == set(study.STATE_KERNEL_AT)
    assert of("chunk_state", "KDA") == []


def test_an_empty_list_leaves_operations_out():
    for name, gone in (("step_batches", {"step"}), ("prefills", {"extend", "long", "chunk_state"})):
        study.STUDY.check(ALL | {name: []})
        assert {x.op for x in study.cases(ALL)} - {x.op for x in study.cases(ALL | {name: []})} == gone
    assert {x.op for x in study.cases(ALL | {"gates": []})} == {"decode"}
    assert of("step", "GDN", gates=["KDA"]) == []
    assert {x["batch"] for x in of("step", "KDA", step_batches=[8, 64])} == {64}
    for bad in ({"gates": ["RWKV"]}, {"step_batches": [0]}, {"prefills": [variants.TINY]}, {"gates": ["GDN", "GDN"]}):
        with pytest.raises(ValueError, match="allowed: a list"):
            study.STUDY.check(ALL | bad)


def test_prefills_are_what_their_names_say():
    for name, lengths in variants.PREFILLS.items():
        if name != "ragged":
            count, tokens = map(int, name.split(" x "))
            assert lengths == (tokens,) * count
    assert sum(variants.PREFILLS["ragged"]) == 7200
    assert {1, 63, 64, 65} < set(variants.PREFILLS["ragged"])  # around the length of a chunk
    assert set(study.STATE_KERNEL_AT) <= set(variants.PREFILLS)
    assert set(variants.LENGTHS) == {*variants.PREFILLS, *variants.LONG, variants.TINY}
    assert all(variants.LENGTHS[name] == (int(name.split(" x ")[1]),) for name in variants.LONG)
    assert 0 in variants.LENGTHS[variants.TINY]


# variants


def test_every_variant_of_every_case_has_a_function_that_takes_its_options(monkeypatch):
    for name, function in inspect.getmembers(trials, inspect.isfunction):
        monkeypatch.setattr(trials, name, inspect.signature(function).bind)
    used = set()
    for x in (*study.cases(ALL), *study.STUDY.tiny):
        found = study.variants(x)
        listed = [one.name for one in found]
        assert len(set(listed)) == len(listed)
        assert study.control(x) in listed
        assert {one.role for one in found} <= set(ROLES)
        for one in found:
            used.add((x.op, one.name))
            options = one.options
            assert set(one.prepare(x, "cpu", 1, 0).arguments) == {"x", "device", "sets", "seed", *options}
            assert (one.role == "peer") == (one.name.startswith(("fla", "attn-gym", "sglang", "vllm")))
            if "v_first" in options and x.op != "chunk_state":
                assert options["v_first"] == ("KV" not in one.name)
    assert used == {(op, one.name) for op, some in variants.VARIANTS.items() for one in some}


def libraries_of(x):
    """Of its peers, those that are installed; releases that are fetched are called in kernels/test_released.py."""
    return [one.name for one in study.variants(x) if one.role == "peer" and not one.name.startswith(("sglang", "vllm"))]


def test_peers_are_libraries_and_kdas_have_no_kernel_that_is_launched_in_place():
    for gate, in_place in (("GDN", 4), ("KDA", 0)):
        peers = libraries_of(case("step", gate))
        assert len(peers) == 4 + in_place
        assert sum("in place" in name for name in peers) == in_place


# floors


def moved(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def tokens(x):
    return x.q, x.k, x.v, x.a, x.b, x.out


@pytest.mark.parametrize("gate", study.GATES)
def test_floors_are_the_bytes_of_the_tensors(gate):
    x = case("step", gate, state="bf16")
    (one,) = trials._step_inputs(x, "cpu", 1, 0, True)
    floor = study.floor(x)
    assert floor.bytes == 2 * moved(one.state) + moved(one.indices, *tokens(one))
    assert (floor.set_bytes, floor.limit) == (moved(one.state), "in_place")
    assert floor.flops == 7 * one.state.numel()

    x = case("verify", gate)
    (one,) = trials._verify_inputs(x, "cpu", 1, 0, False)
    floor = study.floor(x)
    assert floor.bytes == moved(one.state, one.intermediate_states, *tokens(one))
    assert floor.flops == 7 * one.intermediate_states.numel()

    x = case("extend", gate)
    (one,) = trials._extend_inputs(x, "cpu", 1, 0, True)
    assert study.floor(x).bytes == moved(one.q, one.k, one.v, one.g, one.beta, one.initial, one.final, one.out)
    assert study.floor(x).limit == "copy"


def test_floor_of_the_chunk_state_kernel_is_what_it_is_launched_with():
    x = case("chunk_state")
    (one,) = trials._extend_inputs(x, "cpu", 1, 0, True)
    args = chunked.extend(one, True).launches["chunk_state"].args
    read = [args[name] for name in ("w", "u", "k", "v_new", "states", "initial", "final")]
    assert study.floor(x).bytes == moved(*read)
    assert study.floor(x).flops == 2 * 2 * args["w"].shape[0] * args["w"].shape[1] * 8 * 6  # two products


def test_floors_of_qwen3_next_by_hand():
    state = 32 * 128 * 128
    step, verify, whole, alone = (
        next(x for x in of(op, "GDN") if x["state" if op in ("step", "verify") else "prefill"] == wanted)
        for op, wanted in (("step", "bf16"), ("verify", "fp32"), ("extend", "1 x 512"), ("chunk_state", "8 x 1024"))
    )
    token = 2 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32)
    assert study.floor(step).bytes == 4 * state + token + 4
    assert study.floor(verify).bytes == 5 * 4 * state + 4 * token
    assert study.floor(whole).bytes == 512 * (token + 2 * 2 * 32) + 2 * 4 * state  # two gates of fp32, not bf16
    w_u_v_new, k, h = 3 * 32 * 128, 16 * 128, 8 * 16 * state  # sixteen chunks a sequence
    assert study.floor(alone).bytes == 2 * (8192 * (w_u_v_new + k) + h) + 8 * 2 * 4 * state


@pytest.mark.parametrize("gate", study.GATES)
@pytest.mark.parametrize("op", ["step", "verify"])
def test_floors_grow_with_the_batch(op, gate):
    found = [study.floor(case(op, gate, batch=n)) for n in (1, 2, 8, 64)]
    for small, large in itertools.pairwise(found):
        assert small.bytes < large.bytes
        assert small.flops < large.flops
    assert found[3].bytes == 64 * found[0].bytes
    prefills = [study.floor(case("extend", gate, prefill=f"1 x {n}")).bytes for n in (512, 2048, 8192, 32768)]
    assert prefills == sorted(set(prefills))
    assert study.floor(case(op, "KDA")).bytes > study.floor(case(op, "GDN")).bytes  # a decay for every channel


# which sequence of an extend is followed


def lengths(monkeypatch, *found):
    monkeypatch.setattr(trials, "LONGEST_CHECKED", 4)
    monkeypatch.setitem(variants.LENGTHS, "now", found)
    (item,) = trials._extend_inputs(case("extend", prefill="now"), "cpu", 1, 0, False)
    start = item.initial.transpose(-1, -2)
    o, S = reference.extend(
        start, item.q, item.k, item.v, item.g.double().exp(), item.beta, item.scale, item.cu_seqlens
    )
    return item, o, S.transpose(-1, -2)


def test_the_longest_sequence_that_is_short_enough_is_followed(monkeypatch):
    item, o, S = lengths(monkeypatch, 6, 0, 2, 3, 1)
    assert max(trials._extend_errors(item, False)(o, S).values()) < 1e-12
    for first, last, n in ((0, 6, 0), (6, 8, 2), (11, 12, 4)):  # these are not
        other, state = o.clone(), S.clone()
        other[first:last], state[n] = 0, 0
        assert max(trials._extend_errors(item, False)(other, state).values()) < 1e-12
    o[10], S[3] = 0, 0
    assert min(trials._extend_errors(item, False)(o, S).values()) > 0.1


def test_of_a_long_sequence_the_first_tokens_are_followed(monkeypatch):
    item, o, S = lengths(monkeypatch, 6)
    o[4:] = 0
    assert trials._extend_errors(item, False)(o, S)["out"] < 1e-12
    assert set(trials._extend_errors(item, False)(o, S)) == {"out"}
    o[3] = 0
    assert trials._extend_errors(item, False)(o, S)["out"] > 0.1


# libraries: stand-ins that take what fla-core 0.6.0 and attn-gym 0.0.17 take, and compute with the reference


def v_first_view(state, v_first):
    return state if v_first else state.transpose(-1, -2)


def decode(q, k, v, a, b, A_log, dt_bias, state, scale):
    """One token of [N, H, K] and so on; dt_bias of one number a head, or (KDA) a channel."""
    if a.ndim == 3:
        dt_bias = dt_bias.view(a.shape[1:])
        return reference.decode_step(
            state, q, k, v, reference.kda_decay(a, A_log, dt_bias), torch.sigmoid(b.double()), scale
        )
    return reference.decode_step(state, q, k, v, *reference.decay_and_beta(a, b, A_log, dt_bias), scale)


class Libraries:
    """In sys.modules. off: what all of their results are multiplied by; seen: the arguments of every call."""

    def __init__(self, monkeypatch):
        self.off, self.seen = 1.0, []
        kernel = {"fused_recurrent_gated_delta_rule_fwd_kernel": self}
        recurrent = {"fused_recurrent": SimpleNamespace(**kernel), "fused_recurrent_gated_delta_rule": self.recurrent}
        fla = {
            "fla": {},
            "fla.ops": {},
            "fla.ops.gated_delta_rule": recurrent | {"chunk_gated_delta_rule": self.chunk},
            "fla.ops.kda": {"fused_recurrent_kda": self.recurrent, "chunk_kda": self.chunk},
        }
        paged = {"recurrent_gdn_decode": self.paged_gdn, "recurrent_kda_decode": self.paged_kda}
        for name, content in (fla | {"attn_gym": {}, "attn_gym.linear": paged}).items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)

    def __getitem__(self, grid):
        return lambda **arguments: self.kernel(grid, **arguments)

    def kernel(
        self, grid, *, q, k, v, g, gk, gv, beta, A_log, dt_bias, o, h0, ht, cu_seqlens, scale, T, H, HV, K, V, BK, BV,
        USE_QK_L2NORM_IN_KERNEL, IS_BETA_HEADWISE, STATE_V_FIRST, APPLY_BETA_SIGMOID, ALLOW_NEG_EIGVAL,
        num_warps, num_stages,
    ):  # fmt: skip
        self.seen.append({"o": o, "h0": h0, "ht": ht, "BV": BV, "v_first": STATE_V_FIRST})
        assert grid == (-(-V // BV) * len(h0) * HV,)
        assert (gk, gv, cu_seqlens, T, ALLOW_NEG_EIGVAL) == (None, None, None, 1, False)
        assert USE_QK_L2NORM_IN_KERNEL
        assert IS_BETA_HEADWISE
        assert APPLY_BETA_SIGMOID
        assert BK >= K
        assert BK & (BK - 1) == 0
        for tensor in (q, k, v, g, beta, A_log, dt_bias, o, h0, ht):  # the kernel is given no strides
            assert tensor.is_contiguous()
        assert h0.shape[1:] == ((HV, V, K) if STATE_V_FIRST else (HV, K, V))
        found, S = decode(q, k, v, g, beta, A_log, dt_bias, v_first_view(h0, STATE_V_FIRST), scale)
        o.copy_(found * self.off)
        ht.copy_(v_first_view(S, STATE_V_FIRST))

    def recurrent(
        self, q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, state_v_first,
    ):  # fmt: skip
        assert output_final_state
        assert use_qk_l2norm_in_kernel
        assert use_gate_in_kernel
        assert use_beta_sigmoid_in_kernel
        (N, T, HV, V), K = v.shape, q.shape[-1]
        assert T == 1
        assert q.shape == k.shape == (N, T, q.shape[2], K)
        assert g.shape in ((N, T, HV), (N, T, HV, K))
        assert beta.shape == (N, T, HV)
        assert dt_bias.shape == ((HV,) if g.ndim == 3 else (HV * K,))  # of KDA's kernel HV · K numbers, flat
        assert initial_state.shape == ((N, HV, V, K) if state_v_first else (N, HV, K, V))
        self.seen.append({"initial_state": initial_state, "v_first": state_v_first})
        start = v_first_view(initial_state, state_v_first)
        o, S = decode(*(part[:, 0] for part in (q, k, v, g, beta)), A_log, dt_bias, start, scale)
        return (o * self.off)[:, None].to(v.dtype), v_first_view(S, state_v_first).float().contiguous()

    def chunk(
        self, q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        cu_seqlens,
    ):  # fmt: skip
        assert output_final_state
        assert use_qk_l2norm_in_kernel
        assert len(q) == 1
        assert cu_seqlens.dtype == torch.int64
        assert initial_state.dtype == torch.float32
        assert len(initial_state) == len(cu_seqlens) - 1
        T, HV, K = *v.shape[1:3], q.shape[-1]
        assert g.shape in ((1, T, HV), (1, T, HV, K))
        assert beta.shape == (1, T, HV)
        assert (g <= 0).all()  # a logarithm
        self.seen.append({"cu_seqlens": cu_seqlens, "v_first": state_v_first})
        start = v_first_view(initial_state, state_v_first)
        o, S = reference.extend(start, q[0], k[0], v[0], g[0].double().exp(), beta[0], scale, cu_seqlens)
        return (o * self.off)[None].to(v.dtype), v_first_view(S, state_v_first).float().contiguous()

    def paged_gdn(self, *arguments, scale, out):
        return self.paged(*arguments, scale=scale, out=out)

    def paged_kda(self, *arguments, gate_transform="bounded", lower_bound=-5.0, scale=None, out=None):
        assert gate_transform == "softplus"
        return self.paged(*arguments, scale=scale, out=out)

    def paged(self, packed_qkv, raw_gate, raw_beta, A_log, dt_bias, state_cache, state_indices, *, scale, out):
        self.seen.append({"out": out, "state_cache": state_cache, "state_indices": state_indices})
        slots, HV, V, K = state_cache.shape
        N, width = packed_qkv.shape
        H = (width - HV * V) // (2 * K)
        kda = raw_gate.ndim == 4
        assert width == 2 * H * K + HV * V
        assert H == HV or not kda
        assert raw_gate.shape == ((1, N, HV, K) if kda else (1, N, HV))
        assert raw_beta.shape == (1, N, HV)
        assert dt_bias.shape == ((HV, K) if kda else (HV,))
        assert A_log.dtype == dt_bias.dtype == torch.float32
        assert out.shape == (1, N, HV, V)
        assert out.dtype == packed_qkv.dtype
        assert state_indices.dtype == torch.int32
        for tensor in (out, state_indices, A_log, dt_bias, state_cache[0], raw_gate[0]):
            assert tensor.is_contiguous()
        assert (state_indices > 0).all()  # others are padding
        assert (state_indices < slots).all()
        places = state_indices.long()
        parts = (*packed(packed_qkv, H, HV, K, V), raw_gate[0], raw_beta[0], A_log, dt_bias)
        o, S = decode(*parts, state_cache[places], scale)
        out[0] = o * self.off
        state_cache[places] = S.to(state_cache.dtype)
        return out


@pytest.fixture
def libraries(monkeypatch):
    return Libraries(monkeypatch)


def peers():
    wanted = [case("step"), case("step", state="bf16"), case("step", "KDA", H=4), case("extend"), case("extend", "KDA")]
    return [(x, name) for x in wanted for name in libraries_of(x)]


def prepared(x, name, sets=1):
    (variant,) = (one for one in study.variants(x) if one.name == name)
    return variant.prepare(x, "cpu", sets, 0)


@pytest.mark.parametrize(("x", "name"), peers(), ids=[f"{x.op} {x['gate']} {name}" for x, name in peers()])
def test_a_library_is_judged_by_the_reference(libraries, x, name):
    trial = prepared(x, name, 2)
    assert len(trial.calls) == 2
    errors = trial.check()
    assert set(errors) == {"out", "state"}
    assert all(error <= trial.tolerance[key] for key, error in errors.items())
    if "v_first" in libraries.seen[0]:
        assert libraries.seen[0]["v_first"] is ("VK" in name)
    libraries.off = 1.01
    assert trial.check()["out"] > trial.tolerance["out"]
    if trial.poison:
        trial.poison()
        assert not trial.written()
        for call in trial.calls:
            call()
        assert trial.written()


@pytest.mark.parametrize("layout", study.LAYOUTS)
def test_flas_kernel_works_on_the_states_in_place_one_set_after_the_other(libraries, layout):
    trial = prepared(case("step", batch=3), variants.fla_in_place(layout, 8), 2)
    for call in trial.calls:
        call()
    first, second = libraries.seen
    for one in (first, second):
        assert one["h0"] is one["ht"]
    size = first["h0"].numel() * 4
    assert second["h0"].data_ptr() - first["h0"].data_ptr() == size
    assert first["o"].data_ptr() != second["o"].data_ptr()


def test_flas_public_call_leaves_its_states_and_attn_gym_updates_the_pool(libraries):
    trial = prepared(case("step"), variants.fla("VK"), 2)
    for call in trial.calls:
        call()
    states = [one["initial_state"] for one in libraries.seen]
    kept = [state.clone() for state in states]
    for call in trial.calls:
        call()
    assert all(torch.equal(*pair) for pair in zip(states, kept, strict=True))
    assert states[0].data_ptr() != states[1].data_ptr()
    libraries.seen.clear()
    trial = prepared(case("step"), variants.ATTENTION_GYM, 2)
    for call in trial.calls:
        call()
    first, second = libraries.seen
    assert first["state_cache"] is second["state_cache"]
    slots = torch.cat([first["state_indices"], second["state_indices"]])
    assert sorted(slots.tolist()) == list(range(1, 7))
    assert len(first["state_cache"]) == 7
    assert slots.tolist() != list(range(1, 7))
    libraries.seen.clear()
    for call in prepared(case("step"), variants.ATTENTION_GYM_IN_ORDER, 2).calls:
        call()
    assert torch.cat([one["state_indices"] for one in libraries.seen]).tolist() == list(range(1, 7))
    before = first["state_cache"].clone()
    trial.calls[1]()
    changed = (before != first["state_cache"]).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == sorted(second["state_indices"].tolist())


def test_boundaries_of_an_extend_are_one_tensor_for_all_sets(libraries):
    """The library waits for boundaries that it has not seen lately, which would break the capture of a graph."""
    for call in prepared(case("extend"), variants.fla("VK"), 6).calls:
        call()
    assert len({id(one["cu_seqlens"]) for one in libraries.seen}) == 1


def test_a_library_that_tunes_itself_does_so_anew_for_every_case(libraries):
    @triton.jit
    def kernel(K, BLOCK):
        pass

    gated_delta.tune_fla_anew.cache_clear()
    first, second = (triton.autotune([triton.Config({"BLOCK": n}) for n in (1, 2)], ["K"])(kernel) for _ in range(2))
    inner = triton.heuristics({})(first)  # decorators lie around each other
    vars(sys.modules["fla.ops.kda"]).update(kernel=inner, again=first, other=second)

    def chosen():
        for one in (first, second):
            one.cache["now"], one.best_config = one.configs[0], one.configs[0]

    def kept():
        return [len(one.cache) for one in (first, second)]

    chosen()
    prefills = [case("extend", prefill=name) for name in ("1 x 512", "ragged")]
    trial = prepared(prefills[0], variants.fla("KV"), 1)
    assert kept() == [0, 0]
    assert not first.cache_results
    chosen()
    prepared(prefills[0], variants.fla("VK"), 1)  # the other layout of the same case
    assert kept() == [1, 1]
    prepared(prefills[1], variants.fla("VK"), 1)
    assert kept() == [0, 0]
    assert trial.facts() == {"launches": {}}  # none of them was called


@pytest.mark.parametrize(("x", "name"), peers(), ids=[f"{x.op} {x['gate']} {name}" for x, name in peers()])
def test_a_library_that_is_not_installed_is_named(monkeypatch, x, name):
    for module in ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda", "attn_gym", "attn_gym.linear"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match="attn_gym" if name.startswith("attn-gym") else "fla"):
        prepared(x, name)
