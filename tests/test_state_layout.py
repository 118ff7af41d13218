"""The state layout study: reference, floors, shares, tables and arguments by hand; what its kernels compile to."""

import itertools
import json
import math
from dataclasses import asdict, replace

import compiled_once
import pandas as pd
import pytest
import rows as made
import torch

from labkit.bench.sha import kernel_sha
from labkit.bench.spec import Case
from labkit.evidence import coalescing, compiled
from labkit.kernels.gated_delta import chunked, recurrent, reference
from labkit.shapes import GATED_DELTA, QWEN3_NEXT, GatedDeltaModel
from labkit.studies.state_layout import layouts, share, study, tables, trials
from labkit.sweep import run as sweep
from labkit.sweep import variants

STATES = ("fp32", "bf16")


# reference


def test_one_step_by_hand():
    state = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2)  # [V, K]
    q, k, v = (torch.tensor(x).view(1, 1, 2) for x in ([3.0, 4.0], [2.0, 0.0], [5.0, 6.0]))
    half = torch.tensor([[0.5]])
    o, new = reference.decode_step(state, q, k, v, half, half, scale=10.0)
    # Faded: [[.5, 1], [1.5, 2]]; k is (1, 0), so S k is (.5, 1.5) and u half of (4.5, 4.5); q is (.6, .8), times 10.
    assert torch.allclose(new.squeeze(), torch.tensor([[2.75, 1.0], [3.75, 2.0]], dtype=torch.float64), atol=1e-5)
    assert torch.allclose(o.squeeze(), torch.tensor([24.5, 38.5], dtype=torch.float64), atol=1e-4)
    assert o.dtype == new.dtype == torch.float64
    assert state.squeeze()[0, 0] == 1.0  # the input is not changed


def test_step_agrees_with_plain_loops():
    N, H, HV, K, V = 2, 2, 4, 3, 5
    g = torch.Generator().manual_seed(0)
    state = torch.randn(N, HV, V, K, generator=g)
    q, k, v = (torch.randn(N, heads, size, generator=g) for heads, size in ((H, K), (H, K), (HV, V)))
    alpha, beta = torch.rand(N, HV, generator=g), torch.rand(N, HV, generator=g)
    o, new = reference.decode_step(state, q, k, v, alpha, beta, 0.7)
    for n in range(N):
        for hv in range(HV):
            h = hv // (HV // H)  # neighbouring value heads share a key head
            unit = [math.sqrt(sum(float(x) ** 2 for x in vector[n, h]) + 1e-6) for vector in (q, k)]
            query, key = ([float(x) / size for x in t[n, h]] for t, size in zip((q, k), unit, strict=True))
            for i in range(V):
                row = [float(alpha[n, hv]) * float(x) for x in state[n, hv, i]]
                u = float(beta[n, hv]) * (float(v[n, hv, i]) - sum(map(float.__mul__, row, key)))
                row = [x + u * y for x, y in zip(row, key, strict=True)]
                assert new[n, hv, i].tolist() == pytest.approx(row, rel=1e-12)
                assert float(o[n, hv, i]) == pytest.approx(0.7 * sum(map(float.__mul__, row, query)), rel=1e-11)


def test_decay_and_beta_agree_with_torch():
    g = torch.Generator().manual_seed(1)
    a, b = 4 * torch.randn(7, 3, generator=g), 4 * torch.randn(7, 3, generator=g)
    A_log, dt_bias = torch.randn(3, generator=g), torch.randn(3, generator=g)
    alpha, beta = reference.decay_and_beta(a, b, A_log, dt_bias)
    softplus = torch.nn.functional.softplus(a.double() + dt_bias.double())
    assert torch.allclose(alpha, torch.exp(-torch.exp(A_log.double()) * softplus), rtol=1e-12)
    assert torch.allclose(beta, torch.sigmoid(b.double()), rtol=1e-12)
    assert alpha.dtype == beta.dtype == torch.float64


def test_softplus_is_linear_above_twenty_and_never_overflows():
    x = torch.tensor([[-1000.0, 19.0, 20.0, 21.0, 30.0, 1000.0]]).T  # the loop of heads is over N here
    rate = torch.tensor([-6.0])
    alpha, _ = reference.decay_and_beta(x, x, rate, torch.zeros(1))
    softplus = -(alpha.log() / math.exp(-6.0)).squeeze()
    assert softplus[3:].tolist() == pytest.approx([21.0, 30.0, 1000.0], rel=1e-12)  # exactly: no log(1 + exp(-21))
    assert softplus[1].item() == pytest.approx(19.0 + math.log1p(math.exp(-19.0)), rel=1e-12)
    assert abs(softplus[1].item() - 19.0) > 1e-9
    assert softplus[0] == 0.0


def draws(*shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in shapes]


def test_kda_with_equal_channels_is_gdn():
    state, q, k, v = draws((2, 4, 3, 5), (2, 2, 5), (2, 2, 5), (2, 4, 3))
    alpha, beta = torch.rand(2, 4), torch.rand(2, 4)
    gdn = reference.decode_step(state, q, k, v, alpha, beta, 0.3)
    kda = reference.decode_step(state, q, k, v, alpha[..., None].expand(2, 4, 5), beta, 0.3)
    assert all(torch.equal(one, other) for one, other in zip(gdn, kda, strict=True))
    uneven = alpha[..., None] * torch.tensor([1.0, 1.0, 1.0, 1.0, 0.5])
    assert not torch.allclose(reference.decode_step(state, q, k, v, uneven, beta, 0.3)[1], gdn[1])


def test_kda_fades_each_channel_by_itself():
    state = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2)  # [V, K]
    nothing = torch.zeros(1, 1, 2)
    alpha = torch.tensor([0.5, 0.25]).view(1, 1, 2)
    _, new = reference.decode_step(state, nothing, nothing, nothing, alpha, torch.ones(1, 1), 1.0)
    assert torch.equal(new.squeeze(), torch.tensor([[0.5, 0.5], [1.5, 1.0]], dtype=torch.float64))


def test_decay_of_kda_in_both_forms_by_hand():
    a, dt_bias = torch.tensor([[[0.0, 2.0]]]), torch.tensor([[0.0, 1.0]])
    A_log = torch.tensor([math.log(3.0)])
    soft = [math.log(2.0), math.log1p(math.exp(3.0))]
    found = reference.kda_decay(a, A_log, dt_bias)
    assert found.flatten().tolist() == pytest.approx([math.exp(-3 * x) for x in soft])
    bounded = reference.kda_decay(a, A_log, dt_bias, lower_bound=-5.0)
    assert bounded.flatten().tolist() == pytest.approx([math.exp(-2.5), math.exp(-5 / (1 + math.exp(-9.0)))])


def test_extend_is_decode_token_by_token_and_sequences_do_not_meet():
    state, q, k, v = draws((3, 4, 3, 5), (6, 2, 5), (6, 2, 5), (6, 4, 3))
    alpha, beta = torch.rand(6, 4), torch.rand(6, 4)
    o, final = reference.extend(state, q, k, v, alpha, beta, 0.3, torch.tensor([0, 2, 2, 6]))
    assert torch.equal(final[1], state[1].double())  # no token
    for n, (start, end) in {0: (0, 2), 2: (2, 6)}.items():
        S = state[n : n + 1]
        for t in range(start, end):
            step, S = reference.decode_step(S, *(x[t : t + 1] for x in (q, k, v, alpha, beta)), 0.3)
            assert torch.equal(o[t], step[0])
        assert torch.equal(final[n], S[0])


def test_verify_goes_on_from_the_parent():
    state, q, k, v = draws((1, 2, 3, 5), (1, 4, 1, 5), (1, 4, 1, 5), (1, 4, 2, 3))
    alpha, beta = torch.rand(1, 4, 2), torch.rand(1, 4, 2)
    inputs = (state, q, k, v, alpha, beta, 0.3)
    chain = reference.verify(*inputs)
    assert torch.equal(chain[1], reference.verify(*inputs, parents=torch.tensor([[-1, 0, 1, 2]]))[1])
    flat = [x[0] for x in (q, k, v, alpha, beta)]
    assert torch.equal(chain[1][:, -1], reference.extend(state, *flat, 0.3, torch.tensor([0, 4]))[1])
    tree = reference.verify(*inputs, parents=torch.tensor([[-1, 0, 0, -1]]))
    alone = reference.verify(state, *(x[:, 3:] for x in (q, k, v, alpha, beta)), 0.3)
    assert torch.equal(tree[1][:, 3], alone[1][:, 0])
    assert torch.equal(tree[0][:, 1], chain[0][:, 1])
    assert not torch.allclose(tree[0][:, 2], chain[0][:, 2])


# floors, cases, variants


@pytest.mark.parametrize(("state", "state_bytes"), [("fp32", 2 * 2**20), ("bf16", 2**20)])
def test_floor_of_qwen3_next_by_hand(state, state_bytes):
    found = study.floor(study.case(QWEN3_NEXT, 1, state))
    small = 2 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 4  # q and k, v and output, two gates in bf16; an index
    assert found.bytes == 2 * state_bytes + small
    assert found.flops == 7 * 32 * 128 * 128
    assert found.set_bytes == state_bytes == QWEN3_NEXT.state_bytes(4 if state == "fp32" else 2)
    assert found.limit == "in_place"
    assert study.floor(study.case(QWEN3_NEXT, 64, state)).bytes == 64 * found.bytes


def test_floor_counts_what_the_kernel_is_given():
    case = Case(
        "decode", {"model": "odd", "batch": 3, "state": "bf16", "activations": "fp32", "H": 2, "HV": 4, "K": 8, "V": 16}
    )
    (inputs,) = trials._step_inputs(case, "cpu", 1, 0, v_first=False)
    moved = [inputs.q, inputs.k, inputs.v, inputs.a, inputs.b, inputs.out, inputs.indices]
    sizes = [x.numel() * x.element_size() for x in moved]
    assert study.floor(case).bytes == 2 * inputs.state.numel() * 2 + sum(sizes)


def test_cases_are_every_model_state_and_batch_and_hold_no_choice_of_a_kernel():
    parameters = made.LAYOUT | {"models": ["Qwen3.5-0.8B", "K-256 example"], "states": ["bf16", "fp32"]}
    parameters |= {"batches": [1, 8]}
    found = study.cases(parameters)
    assert len(found) == len({case.key for case in found}) == 8
    for case in found:
        assert set(case.params) == {"model", "batch", "state", "activations", "H", "HV", "K", "V"}
    assert (found[0]["H"], found[0]["HV"], found[0]["K"]) == (16, 16, 128)
    assert (found[-1]["K"], found[-1]["V"], found[-1]["batch"], found[-1]["state"]) == (256, 256, 8, "fp32")


@pytest.mark.parametrize(
    ("model", "count"), [(QWEN3_NEXT, 1 + 2 * 3 * 3 + 3), (GATED_DELTA["Qwen3.5-27B"], 1 + 2 * 3 + 3)]
)
def test_variants_of_a_case(model, count):
    case = study.case(model, 8, "fp32")
    found = study.variants(case)
    names = [one.name for one in found]
    assert len(found) == len(set(names)) == count
    assert [one.name for one in found if one.role == "baseline"] == ["KV BV=8, 1 warp"]
    assert [one.name for one in found if one.role == "ceiling"] == [tables.CEILING]
    assert study.control(case) in names
    assert sweep.with_control(study.STUDY, case)[-1].options["repeats"] == study.control(case)
    hashes = {one.options.get("layout", "ceiling"): kernel_sha(one.source) for one in found}
    assert len(set(hashes.values())) == 3
    for one in found:
        if one.role != "ceiling":
            choice = one.options
            assert one.name == tables.variant_name(choice["layout"], choice["BV"], choice["warps"], choice["folded"])


# the share of a whole step

DENSE = GatedDeltaModel("dense", 1, 2, layers=3, all_layers=4, k=4, v=8, total=1000, kv_heads=1, head_dim=16)
ROUTED = replace(DENSE, experts=4, top_k=1, hidden=2, expert_width=3)
PUBLISHED = [QWEN3_NEXT, DENSE, ROUTED]


def test_share_of_a_dense_model_by_hand():
    state = 2 * 3 * (2 * 4 * 8 * 4)  # read and written, three layers, two heads of 4 × 8 fp32
    cache = 10 * 1 * 2 * (1 * 16) * 2  # ten tokens, one full-attention layer, K and V of 16 bf16
    assert share.state_share(DENSE, 1, 10) == pytest.approx(state / (state + cache + 2000))
    assert share.state_share(DENSE, 8, 10) == pytest.approx(8 * state / (8 * (state + cache) + 2000))
    assert share.state_share(DENSE, 1, 10, weight_bytes=0.5) == pytest.approx(state / (state + cache + 500))
    assert share.state_share(DENSE, 1, 0, state_itemsize=2) == pytest.approx(state / 2 / (state / 2 + 2000))


def test_share_of_a_model_with_experts_by_hand():
    state, expert = 2 * 3 * 256, 3 * 2 * 3  # gate, up and down of 2 × 3
    rest = 1000 - 4 * 4 * expert  # four layers of four experts
    one, two = rest + 4 * expert, rest + 4 * 1.75 * expert  # two tokens meet 4 (1 - (3/4)²) = 1.75 of four
    assert share.state_share(ROUTED, 1, 0) == pytest.approx(state / (state + 2 * one))
    assert share.state_share(ROUTED, 2, 0) == pytest.approx(2 * state / (2 * state + 2 * two))
    assert share.state_share(ROUTED, 10**9, 0) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.name)
def test_share_grows_with_the_batch_and_stays_a_share(model):
    found = [share.state_share(model, batch, 2048) for batch in (1, 2, 8, 64, 512, 4096, 10**6)]
    assert all(0 < low < high < 1 for low, high in itertools.pairwise(found))
    assert share.state_share(model, 64, 4096) < share.state_share(model, 64, 2048)  # longer contexts dilute it
    assert share.state_share(model, 64, 2048, share.NVFP4_BYTES) > share.state_share(model, 64, 2048)


def test_active_weights_of_qwen3_next_are_those_of_its_name():
    assert 3e9 < share._weights(QWEN3_NEXT, 1) < 4.5e9  # "A3B" and the rounding of "80B", by the model's name
    assert share._weights(QWEN3_NEXT, 10**6) == pytest.approx(80e9, rel=1e-6)


@pytest.mark.parametrize(
    "model", [model for model in GATED_DELTA.values() if not model.total], ids=lambda model: model.name
)
def test_share_of_a_model_of_unknown_weights_is_refused(model):
    with pytest.raises(ValueError, match=rf"weights of {model.name} are not known here; allowed: {QWEN3_NEXT.name}"):
        share.state_share(model, 1, 2048)


def test_share_of_time_by_hand():
    assert share.time_share(0.5, 3.0) == pytest.approx(0.75)  # 3 units for the state, 1 for the other half
    assert share.time_share(0.2, 1.5) == pytest.approx(3 / 11)  # 0.3 against 0.8
    assert share.time_share(0.5, 0.5) == pytest.approx(1 / 3)
    assert share.time_share(0.3, 1.0) == pytest.approx(0.3)  # all at the ceiling: the share of the bytes
    assert share.time_share(0.0, 9.0) == 0.0
    assert share.time_share(1.0, 9.0) == 1.0


def test_amdahl():
    assert share.end_to_end(2.0, 0.5) == pytest.approx(4 / 3)
    assert share.end_to_end(0.5, 0.5) == pytest.approx(2 / 3)
    assert share.end_to_end(1.7, 0.0) == share.end_to_end(1.0, 0.3) == 1.0
    assert share.end_to_end(1.7, 1.0) == pytest.approx(1.7)


# tables


@pytest.fixture(scope="module")
def layout():
    us = made.layout_us(lambda batch, tile: {8: 1.2, 16: 1.1, 32: 0.9}[tile])
    return made.make("state_layout", made.LAYOUT, us)


def test_ratios_are_those_of_the_times(layout):
    table = tables.ratios(layout)
    assert len(table) == 2 * 2 * 3 * 3  # state, batch, tile, warps
    for tile, ratio, verdict in ((8, 1.2, "faster"), (16, 1.1, "faster"), (32, 0.9, "slower")):
        some = table[table["BV"] == tile]
        assert some["ratio"].tolist() == pytest.approx([ratio] * len(some), rel=2e-3)
        assert (some["low"] <= some["ratio"]).all()
        assert (some["ratio"] <= some["high"]).all()
        assert set(some["verdict"]) == {verdict}
    assert list(table["state"].drop_duplicates()) == ["fp32", "bf16"]
    assert set(tables.ratios(layout, "hot")["batch"]) == {1}  # 64 states do not fit the L2


def test_ratios_leave_out_pairs_of_which_one_spills(layout):
    pair = ["BV", "warps"]
    for variant in ("KV BV=8, 1 warp", "VK BV=8, 1 warp"):
        table = tables.ratios(made.spilling(layout, variant))
        assert len(table) == 2 * 2 * (3 * 3 - 1)
        assert (8, 1) not in set(table[pair].itertuples(index=False, name=None))
        assert {(8, 2), (16, 1)} <= set(table[pair].itertuples(index=False, name=None))
    only_fp32 = made.spilling(layout, "VK BV=32, 4 warps").where(layout["case"].str.contains("fp32"), layout)
    table = tables.ratios(only_fp32)
    assert set(table[(table["BV"] == 32) & (table["warps"] == 4)]["state"]) == {"bf16"}
    assert len(tables.ratios(made.spilling(layout, "VK BV=8, 1 warp, folded"))) == 2 * 2 * 3 * 3


def test_ratios_say_how_many_processes_they_rest_on(layout):
    assert set(tables.ratios(layout)["runs"]) == {3}
    assert set(tables.ratios(made.processes(layout, 2))["runs"]) == {2}
    one_sided = layout["variant"].str.startswith("KV")
    mixed = tables.ratios(made.processes(layout, 1).where(one_sided, layout))
    assert set(mixed["runs"]) == {1}  # those that both have


def test_times_are_percent_of_the_ceiling_of_the_same_case(layout):
    table = tables.times(layout).set_index(["state", "batch", "variant"])
    assert table.loc[("fp32", 64, tables.CEILING), "percent"] == pytest.approx(100)
    assert table.loc[("fp32", 64, "VK BV=8, 1 warp"), "percent"] == pytest.approx(100 / 1.05, rel=2e-3)
    assert table.loc[("bf16", 1, "KV BV=8, 1 warp"), "percent"] == pytest.approx(100 / 1.05 / 1.2, rel=2e-3)
    one = table.loc[("fp32", 64, "VK BV=8, 1 warp")]
    assert one["tbs"] == pytest.approx(one["floor_bytes"] / (one["us"] * 1e6))


def test_best_takes_the_fastest_of_each_layout(layout):
    slow = layout["variant"].str.startswith("VK") & ~layout["variant"].str.startswith("VK BV=16, 2 warps")
    double = [[2 * ns for ns in one] if late else one for one, late in zip(layout["samples_ns"], slow, strict=True)]
    found = tables.best(layout.assign(samples_ns=double))
    assert len(found) == 4
    assert set(found["best VK"]) == {"VK BV=16, 2 warps"}
    assert set(found["best KV"].str[:8]) == {"KV BV=32"}
    assert found["ratio"].tolist() == pytest.approx([0.9] * 4, rel=3e-3)
    assert set(found["runs"]) == {3}
    assert ((found["low"] <= found["ratio"]) & (found["ratio"] <= found["high"])).all()


def _times(layout, factors):
    """The rows, the times of some variants multiplied. factors: variant -> factor."""
    changed = [
        [factors.get(variant, 1) * ns for ns in one]
        for variant, one in zip(layout["variant"], layout["samples_ns"], strict=True)
    ]
    return layout.assign(samples_ns=changed)


def test_best_leaves_out_what_folds_or_spills(layout):
    fast = {"VK BV=8, 1 warp, folded": 1 / 4, "VK BV=16, 2 warps": 1 / 2, "VK BV=8, 4 warps": 2 / 3}
    found = tables.best(_times(layout, fast))
    assert set(found["best VK"]) == {"VK BV=16, 2 warps"}
    assert found["ratio"].tolist() == pytest.approx([1.8] * 4, rel=3e-3)
    found = tables.best(made.spilling(_times(layout, fast), "VK BV=16, 2 warps"))
    assert set(found["best VK"]) == {"VK BV=8, 4 warps"}
    assert found["ratio"].tolist() == pytest.approx([1.35] * 4, rel=3e-3)


def test_best_compares_block_by_block(layout):
    drift = [1 + 0.5 * (place % 10) for place in range(30)]  # the clocks of each block, the same for all variants
    drifting = layout.assign(
        samples_ns=[[ns * by for ns, by in zip(one, drift, strict=True)] for one in layout["samples_ns"]]
    )
    found = tables.best(drifting)
    assert found["ratio"].tolist() == pytest.approx([0.9] * 4, rel=3e-3)
    assert (found["high"] - found["low"]).max() < 0.01
    assert set(found["verdict"]) == {"slower"}


def test_best_needs_both_layouts(layout):
    assert tables.best(layout[layout["variant"] == tables.CEILING]).empty
    assert tables.best(layout[~layout["variant"].str.startswith("KV")]).empty
    kv = layout.loc[layout["variant"].str.startswith("KV"), "variant"]
    assert tables.best(made.spilling(layout, *kv)).empty


def test_folding_compares_the_two_forms_of_one_layout(layout):
    folded = layout["variant"].str.endswith("folded")
    quick = [[ns // 2 for ns in one] if fold else one for one, fold in zip(layout["samples_ns"], folded, strict=True)]
    found = tables.folding(layout.assign(samples_ns=quick))
    assert len(found) == 2 * 2 * 3
    assert found["ratio"].tolist() == pytest.approx([2.0] * len(found), rel=3e-3)
    assert set(found["verdict"]) == {"faster"}


def test_state_access_is_of_the_state_and_of_one_row_a_kernel(layout):
    found = tables.state_access(layout)
    assert len(found) == 2 * 21  # every kernel of the two states, whatever the batch
    assert set(found["tensor"]) == {"state"}
    narrow = found[(found["BV"] == 8) & (found["warps"] == 1) & ~found["folded"]].set_index(["state", "layout"])[
        "lines"
    ]
    assert narrow.to_dict() == {("fp32", "KV"): 16, ("fp32", "VK"): 4, ("bf16", "KV"): 32, ("bf16", "VK"): 4}
    assert set(found["kind"]) == {"load"}


def test_estimate_takes_the_ratio_of_the_batch_below():
    layout = made.make("state_layout", made.LAYOUT, made.layout_us(lambda batch, tile: 1.2 if batch > 1 else 1.5))
    found = tables.end_to_end_estimate(layout, 8, context=2048, batches=[1, 16, 64, 1024]).set_index("batch")
    assert found["kernel KV / VK"].tolist() == pytest.approx([1.5, 1.5, 1.2, 1.2], rel=2e-3)
    assert found["ratio of batch"].to_dict() == {1: 1, 16: 1, 64: 64, 1024: 64}
    # By hand: the ceiling moves a byte in 1, the KV kernel in 1.05 × 1.2 and the VK kernel in 1.05.
    part = share.state_share(QWEN3_NEXT, 1024, 2048)
    old, new = part * 1.05 * 1.2 + 1 - part, part * 1.05 + 1 - part
    assert found.loc[1024, "share %"] == pytest.approx(100 * (old - (1 - part)) / old, rel=2e-3)
    assert found.loc[1024, "gain %"] == pytest.approx(100 * (old / new - 1), rel=1e-2)
    without = made.without(layout, variant=tables.CEILING)  # then all is taken to move at the ceiling
    bytes_only = tables.end_to_end_estimate(without, 8, context=2048, batches=[1024])
    assert bytes_only["share %"].tolist() == pytest.approx([100 * part])
    assert (found["low %"] <= found["gain %"]).all()
    assert (found["gain %"] <= found["high %"]).all()
    only_64 = layout[layout["case"].str.contains('"batch": 64')]
    assert list(tables.end_to_end_estimate(only_64, 8, batches=[1, 64])["batch"]) == [64]  # nothing measured below


# arguments

N, H, HV, K, V = 3, 2, 4, 16, 8


def inputs(v_first=True, **changes):
    state = torch.zeros(5, HV, *((V, K) if v_first else (K, V)))
    given = {"state": state, "indices": torch.tensor([4, -1, 0], dtype=torch.int32), "scale": 0.25}
    given |= {"q": torch.zeros(N, H, K), "k": torch.zeros(N, H, K), "v": torch.zeros(N, HV, V)}
    given |= {"a": torch.zeros(N, HV), "b": torch.zeros(N, HV), "out": torch.zeros(N, HV, V)}
    given |= {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)}
    return layouts.DecodeInputs(**given | changes)


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("tile", [1, 8, 16, 32])
@pytest.mark.parametrize("warps", [1, 2, 4])
def test_what_is_allowed_becomes_a_launch(v_first, tile, warps):
    launcher = layouts.decode_v_first if v_first else layouts.decode_k_first
    for changes in (
        {},
        {"indices": torch.zeros(N, dtype=torch.int64)},
        {"q": torch.zeros(N, H, K, dtype=torch.bfloat16)},
    ):
        launch = launcher(inputs(v_first, **changes), tile, warps)
        assert launch.grid == (-(-V // tile), N * HV)
        assert launch.options == {"num_warps": warps}
        assert (launch.args["V_FIRST"], launch.args["FOLDED"]) == (v_first, False)


def test_slots_may_lie_apart_and_be_none():
    apart = torch.zeros(10, HV, V, K)[::2]
    launch = layouts.decode_v_first(inputs(state=apart), 8, 1, folded=True)
    assert launch.args["state_slot_stride"] == 2 * HV * V * K
    assert launch.args["FOLDED"] is True
    layouts.check_decode(inputs(state=torch.zeros(0, HV, V, K)), 8, 1, v_first=True)


def _transposed(*shape):
    return torch.zeros(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


BAD = {
    "q of two dimensions": (
        {"q": torch.zeros(N, K)},
        "q is (3, 16) and v is (3, 4, 8); allowed: [N, H, K] and [N, HV, V]",
    ),
    "v of two dimensions": ({"v": torch.zeros(N, V)}, "v is (3, 8); allowed: [N, H, K] and [N, HV, V]"),
    "heads": ({"v": torch.zeros(N, 5, V)}, "v has 5 heads and q has 2; allowed: a multiple of q's"),
    "no heads": ({"q": torch.zeros(N, 0, K)}, "q has 0; allowed"),
    "other layout": (
        {"state": torch.zeros(5, HV, K, V)},
        "state is (5, 4, 16, 8); allowed: [slots, HV, V, K] with (4, 8, 16) inside",
    ),
    "no slots": ({"state": torch.zeros(HV, V, K)}, "state is (4, 8, 16); allowed: [slots, HV, V, K]"),
    "state dtype": (
        {"state": torch.zeros(5, HV, V, K, dtype=torch.float16)},
        "state is torch.float16; allowed: torch.float32, torch.bfloat16",
    ),
    "state strides": (
        {"state": _transposed(5, HV, V, K)},
        "state has strides (512, 128, 1, 8); allowed: contiguous inside a slot",
    ),
    "indices dtype": (
        {"indices": torch.zeros(N, dtype=torch.int16)},
        "indices is torch.int16; allowed: torch.int32, torch.int64",
    ),
    "indices of floats": ({"indices": torch.zeros(N)}, "indices is torch.float32; allowed: torch.int32, torch.int64"),
    "integers": ({"a": torch.zeros(N, HV, dtype=torch.int64)}, "a is torch.int64; allowed: a floating-point dtype"),
    "other device": ({"b": torch.zeros(N, HV, device="meta")}, "b is on meta; allowed: the state's device, cpu"),
    "q strides": ({"q": _transposed(N, H, K)}, "q has strides (32, 1, 2); allowed: contiguous"),
    "out strides": ({"out": torch.zeros(2 * N, HV, V)[::2]}, "out has strides (64, 8, 1); allowed: contiguous"),
    "indices strides": (
        {"indices": torch.zeros(2 * N, dtype=torch.int32)[::2]},
        "indices has strides (2,); allowed: contiguous",
    ),
    **{
        f"shape of {name}": ({name: torch.zeros(shape)}, f"{name} is {shape}; allowed: {allowed}")
        for name, shape, allowed in (
            ("indices", (N + 1,), (N,)),
            ("k", (N, H, K + 1), (N, H, K)),
            ("a", (N, H), (N, HV)),
            ("b", (HV, N), (N, HV)),
            ("A_log", (H,), (HV,)),
            ("dt_bias", (1, HV), (HV,)),
            ("out", (N, V, HV), (N, HV, V)),
        )
    },
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_a_bad_tensor_is_named_with_what_is_allowed(changes, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the whole message is compared)
        layouts.decode_v_first(inputs(**changes), 8, 1)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("tile", "warps", "message"),
    [
        (0, 1, "tile is 0; allowed: a power of two"),
        (12, 1, "tile is 12; allowed: a power of two"),
        (-8, 1, "tile is -8; allowed: a power of two"),
        (8, 3, "num_warps is 3; allowed: 1, 2, 4"),
        (8, 8, "num_warps is 8; allowed: 1, 2, 4"),
    ],
)
def test_a_bad_launch_choice_is_named_with_what_is_allowed(tile, warps, message):
    for v_first, launcher in ((True, layouts.decode_v_first), (False, layouts.decode_k_first)):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            launcher(inputs(v_first), tile, warps)
        assert message in str(raised.value)


def test_each_layout_refuses_the_other():
    with pytest.raises(ValueError, match=r"state is \(5, 4, 8, 16\); allowed: \[slots, HV, K, V\] with \(4, 16, 8\)"):
        layouts.decode_k_first(inputs(v_first=True), 8, 1)


# what the compiler makes of the kernels: every variant of Qwen3-Next's shape, for sm_90 and the Triton installed here


TILES = {  # by state and warps: every tile with some warps of each state, two or more with one and with four or two
    ("fp32", 1): (8, 16, 32), ("fp32", 2): (16,), ("fp32", 4): (8, 32),
    ("bf16", 1): (8, 32), ("bf16", 2): (8, 16, 32), ("bf16", 4): (16,),
}  # fmt: skip


def _wanted():
    cases = {state: study.case(QWEN3_NEXT, 1, state) for state in STATES}
    return [
        (cases[state], one.name)
        for (state, warps), tiles in TILES.items()
        for one in study.variants(cases[state])
        if one.role != "ceiling" and one.options["warps"] == warps and one.options["BV"] in tiles
    ]


def _chosen(table):
    """Columns state, layout, BV, warps and folded."""
    options = {(case.key, one.name): one.options for case, _ in _wanted() for one in study.variants(case)}
    keys = list(zip(table["case"], table["variant"], strict=True))
    chosen = {name: [options[key][name] for key in keys] for name in tables.CHOICE}
    return table.assign(state=[json.loads(case)["state"] for case, _ in keys], **chosen)


@pytest.fixture(scope="module")
def built():
    """Launches of the kernels, and what names them. Here, not in workers: both fixtures below look at the same code."""
    sources = [variants.variant_source("state_layout", case, name) for case, name in _wanted()]
    named = [{"case": case.key, "variant": name} for case, name in _wanted()]
    return list(zip(named, [compiled.launch_of(source, 90) for source in sources], strict=True))


@pytest.fixture(scope="module")
def code(built):
    return _chosen(pd.DataFrame([one | compiled_once.evidence(launch, 90) for one, launch in built]))


@pytest.fixture(scope="module")
def accesses(built):
    found = [one | asdict(access) for one, launch in built for access in coalescing.requests(launch, 90)]
    return _chosen(pd.DataFrame([access for access in found if access["tensor"] == "state"]))


def test_no_kernel_spills_with_narrow_tiles(code):
    assert len(code) == 2 * 12 + 3 + 2  # both layouts; folded ones of one warp
    assert set(code["arch"]) == {90}
    narrow = code[code["BV"] <= 16]
    assert len(narrow) == 2 * 8 + 2 + 1
    assert narrow["spill_bytes"].max() == narrow["spill_loads"].max() == 0
    assert (code["ctas_per_sm"] > 0).all()
    assert (code["atomics"] == 0).all()


def test_the_state_moves_sixteen_bytes_a_thread_in_every_kernel(code, accesses):
    assert len(accesses) == 2 * len(code)  # a load and a store each
    assert sorted(set(accesses["kind"])) == ["load", "store"]
    assert set(accesses["bits"]) == {128}
    assert set(accesses["bits_from"]) == {"ptx"}
    for row in code.itertuples():  # as many instructions as the tile has 16 bytes a thread: read once, written once
        pieces = row.BV * 128 * (4 if row.state == "fp32" else 2) // (16 * 32 * row.warps)
        assert row.stores["128"] == pieces
        assert row.loads["128"] >= pieces


@pytest.mark.parametrize("kind", ["load", "store"])
def test_lines_and_sectors_a_request(accesses, kind):
    some = accesses[accesses["kind"] == kind].set_index(["state", "layout", "BV"])
    for state, itemsize in (("fp32", 4), ("bf16", 2)):
        for tile in tables.TILES:
            run = tile * itemsize  # bytes next to each other in [K, V]; a request is 512 bytes
            narrow, long = some.loc[(state, "KV", tile)], some.loc[(state, "VK", tile)]
            assert set(narrow["lines"]) == {512 / min(run, 128)}
            assert set(narrow["sectors"]) == {512 / min(run, 32)}
            assert set(narrow["efficiency"]) == {min(run, 32) / 32}
            assert set(long["lines"]) == {4}
            assert set(long["sectors"]) == {16}
            assert set(long["efficiency"]) == {1.0}
    shown = some.loc[("fp32", "KV", 8), "lines"].iloc[0], some.loc[("bf16", "KV", 8), "lines"].iloc[0]
    assert shown == (16, 32)
    assert some.loc[("bf16", "KV", 8), "efficiency"].iloc[0] == 0.5


def test_sums_over_k_cost_more_shuffles_on_wide_tiles_of_the_new_layout_only(code):
    plain = code[~code["folded"]].set_index(["state", "layout", "warps", "BV"])["shuffles"]
    for (state, warps), tiles in TILES.items():
        new, old = ([int(plain[state, layout, warps, tile]) for tile in tiles] for layout in ("VK", "KV"))
        assert new == sorted(set(new))
        assert old == sorted(set(old), reverse=True)
    assert plain["fp32", "VK", 1, 32] > 8 * plain["fp32", "KV", 1, 32]


# what the production kernels compile to


def step(state, kda, v_first, choice=None):
    """The launch of one token of two sequences at K = V = 128, 2 key heads and 4 value heads."""
    N, H, HV, K, V = 2, 2, 4, 128, 128
    bf16 = {"dtype": torch.bfloat16}
    gate = (HV, K) if kda else (HV,)
    x = recurrent.StepInputs(
        state=torch.empty((N, HV, V, K) if v_first else (N, HV, K, V), dtype=trials.DTYPES[state]),
        indices=torch.arange(N),
        q=torch.empty((N, H, K), **bf16),
        k=torch.empty((N, H, K), **bf16),
        v=torch.empty((N, HV, V), **bf16),
        a=torch.empty((N, *gate), **bf16),
        b=torch.empty((N, HV), **bf16),
        A_log=torch.empty(HV),
        dt_bias=torch.empty(gate),
        out=torch.empty((N, HV, V), **bf16),
        scale=1.0,
        v_first=v_first,
    )
    return recurrent.decode(x, choice)


def rules_choices(state, v_first):
    """From few heads to more than fill a GPU, on faster and on slower memory; each tile once, marked or not."""
    found = {}
    for heads, fast in itertools.product((32, 256, 2048, 16384), (False, True)):
        choice = recurrent.choose(heads, 128, 128, trials.DTYPES[state].itemsize, 132, fast=fast, v_first=v_first)
        found.setdefault((choice.tile, choice.pieces, choice.num_warps), choice)
    return list(found.values())


@pytest.mark.parametrize("v_first", [True, False], ids=["VK", "KV"])
@pytest.mark.parametrize("state", STATES)
def test_the_rules_choices_move_sixteen_bytes_a_thread_and_spill_nothing(state, v_first):
    """With KDA, which needs more registers; with GDN the first choice."""
    choices = rules_choices(state, v_first)
    assert len(choices) > 2
    for choice, kda in ((choices[0], False), *((choice, True) for choice in choices)):
        launch = step(state, kda, v_first, choice)
        found = compiled_once.evidence(launch, 90)
        assert found["spill_bytes"] == found["spill_loads"] == 0
        moved = [one for one in coalescing.requests(launch, 90) if one.tensor == "state"]
        assert {one.bits for one in moved} == {128}
        assert {one.kind for one in moved} == {"load", "store"}


def test_pieces_leave_fewer_shuffles_than_whole_rows():
    choices = [recurrent.StepChoice(tile=8, pieces=pieces) for pieces in (1, 4)]
    whole, split = (compiled_once.evidence(step("fp32", False, True, choice), 90)["shuffles"] for choice in choices)
    assert split < whole / 2


def chunk_state(v_first, tile=32):
    """The chunk-state launch of one sequence of 128 tokens at K = V = 128, 2 key heads and 4 value heads."""
    T, H, HV, K, V = 128, 2, 4, 128, 128
    bf16 = {"dtype": torch.bfloat16}
    inner = (V, K) if v_first else (K, V)
    x = chunked.ExtendInputs(
        q=torch.empty((T, H, K), **bf16),
        k=torch.empty((T, H, K), **bf16),
        v=torch.empty((T, HV, V), **bf16),
        g=torch.empty((T, HV)),
        beta=torch.empty((T, HV)),
        cu_seqlens=torch.tensor([0, T]),
        initial=torch.empty((1, HV, *inner)),
        final=torch.empty((1, HV, *inner)),
        out=torch.empty((T, HV, V), **bf16),
        scale=1.0,
    )
    return chunked.extend(x, v_first, tile=tile).launches["chunk_state"]


def test_chunk_state_fits_as_often_in_either_layout():
    """The change's 82 to 74 KB would make three CTAs an SM of two; here the tile does, not the layout."""
    for tile, ctas in ((32, 2), (16, 3)):
        found = [compiled_once.evidence(chunk_state(v_first, tile), 90) for v_first in (False, True)]
        assert [one["ctas_per_sm"] for one in found] == [ctas, ctas]
        assert [one["spill_bytes"] for one in found] == [0, 0]
    assert compiled_once.evidence(chunk_state(False), 90)["shared_bytes"] == pytest.approx(82_180, rel=0.001)


def test_what_is_run_is_compiled_ahead():
    """Of one batch: every tile, layout and dtype is there, all launches of a prefill, and one of them compiles."""
    from labkit import registry
    from labkit.workflow import notebooks

    study = registry.load("state_layout")
    cases = study.cases(notebooks.defaults("state_layout") | {"batches": [64], "step_batches": [64]})
    sources = study.kernels(cases, 90, "")
    ops = {arguments["op"] for _, arguments in sources}
    assert ops == {"decode", "step", "drift", "verify", "extend", "long"}
    kernels = {compiled.launch_of(source, 90).kernel.fn.__name__ for source in sources}
    assert {"_decode_kernel", "_verify_kernel", "_chunk_state_kernel"} < kernels
    assert compiled.prebuild(sources[:1], 90) == []
