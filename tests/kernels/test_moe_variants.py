"""Variants of the expert layer beside test_moe.py's: weights by descriptors, 8-bit activations, ceilings, peers."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import triton
from expert_layers import inputs, run, small
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

from labkit.kernels.experts import choose, descriptors, reference, routing
from labkit.kernels.experts import inputs as experts_inputs
from labkit.kernels.experts import int4 as experts_int4
from labkit.kernels.experts.choose import Choice, TileChoice
from labkit.kernels.experts.expert_layer import layer
from labkit.kernels.experts.int4 import Int4
from labkit.studies.moe_persistent_grid import ceilings, peers, w4a8
from labkit.studies.moe_persistent_grid.routings import synthetic
from labkit.studies.moe_persistent_grid.variants import KINDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Weights by descriptors


@pytest.mark.parametrize(("int4", "fused", "swap"), pairwise(*[[False, True]] * 3))
def test_a_descriptor_changes_no_bit(int4, fused, swap, device):
    x = inputs(20, 3, 1, 128, 128, device, int4, "zipf 1")
    # On a GPU the matrix instruction, and with it the order of a sum, may depend on the box; not in the interpreter.
    found = run(x, small(16, fused, block_n=64, block_k=64, swap=swap))
    for changes in ({"programs": 3}, {"counted": False, "group_m": 1}):
        box = run(x, small(16, fused, block_n=64, block_k=64, swap=swap, descriptor=True, **changes))
        assert device == "cuda" or torch.equal(found, box)


@pytest.mark.parametrize(
    ("sizes", "programs", "fused", "swap", "counted"),
    pairwise([(9, 3, 2, 40, 24), (18, 2, 1, 36, 12), (2, 4, 3, 64, 36)], [0, 3, 1000], *[[False, True]] * 3),
)
def test_sizes_at_the_edges_by_descriptor(sizes, programs, fused, swap, counted, device):
    x = inputs(*sizes, device, kind="zipf 1")
    run(x, small(16, fused, swap=swap, programs=programs, counted=counted, descriptor=True))


@settings(max_examples=2 if DEVICE == "cpu" else 60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 6), st.integers(1, 3), st.integers(1, 16), st.integers(1, 10),
    st.sampled_from(KINDS), st.booleans(), st.booleans(), st.sampled_from((0, 3, 1000)), st.booleans(),
)  # fmt: skip
def test_any_shape_by_descriptor(T, E, top_k, H, width, kind, fused, swap, programs, counted):
    x = inputs(T, E, min(top_k, E), 4 * H, 4 * width, DEVICE, kind=kind)  # rows of 16 bytes, fp32
    run(x, small(16, fused, swap=swap, programs=programs, counted=counted, descriptor=True))


@pytest.mark.parametrize("unpack", ["join", "split"])
@pytest.mark.parametrize("scale_sums", [False, True])
def test_int4_by_descriptor_however_it_is_unpacked(unpack, scale_sums, device):
    x = inputs(5, 2, 1, 256, 128, device, int4=True)
    run(x, small(16, unpack=unpack, scale_sums=scale_sums, block_n=128, block_k=64, descriptor=True))


def test_a_box_beyond_the_last_expert_is_not_stored(device):
    x = inputs(3, 2, 2, 128, 128, device, int4=True, empty=0)  # 256 and 128 rows, tiles of 256
    run(x, small(16, block_n=256, block_k=128, descriptor=True))
    run(x, small(16, False, block_n=256, block_k=128, descriptor=True))


def test_what_a_descriptor_cannot_take_is_named(device, monkeypatch):
    x = inputs(3, 4, 2, 130, 24, device)
    with pytest.raises(ValueError, match="w has rows of 520 bytes; allowed with descriptor: a multiple of 16"):
        layer(x, small(descriptor=True))
    x = inputs(3, 4, 2, 128, 128, device, int4=True)
    with pytest.raises(ValueError, match=r"gemm1\.unpack is 'twice' with descriptor; allowed: join, split"):
        layer(x, small(descriptor=True, unpack="twice"))
    monkeypatch.setattr(descriptors, "capability_of", lambda device: (8, 6))
    with pytest.raises(ValueError, match=r"descriptor is True on compute capability 8.6; allowed: from 9.0 \(Hopper\)"):
        layer(x, small(descriptor=True, unpack="join"))


# 8-bit activations


def eight_bits(values):
    whole, scales = experts_int4.quantise_rows(values)
    return (whole.unflatten(-1, (-1, 32)) * scales[..., None]).flatten(-2)


def w4a8_expected(x):
    """The layer in float64 with activations quantised as the kernels do, before each product."""
    parts = torch.zeros((*x.ids.shape, x.x.shape[1]), dtype=torch.float64)
    w1, w2 = experts_int4.dequantise(x.w1).cpu(), experts_int4.dequantise(x.w2).cpu()
    tokens = eight_bits(x.x.cpu())
    for t, slots in enumerate(x.ids.tolist()):
        for j, e in enumerate(slots):
            gate, up = (w1[e] @ tokens[t]).to(x.x.dtype).double().chunk(2)
            parts[t, j] = w2[e] @ eight_bits(gate * torch.sigmoid(gate) * up)
    return (parts * x.weights.cpu().double()[..., None]).sum(1)


@pytest.mark.parametrize(("block_m", "persistent"), [(16, True), (16, False), (64, True)])
def test_eight_bit_activations(block_m, persistent, device):
    x = inputs(9, 3, 1, 128, 128, device, int4=True, kind="zipf 1")
    made = w4a8.layer(x, choose.source(block_m, 3, persistent, int8=True))
    assert list(made.launches)[-5:] == ["quantise", "gemm1", "activate", "gemm2", "sum"]
    made()
    found = reference.errors(x.out.cpu(), w4a8_expected(x))
    assert found.rms < 1e-3  # a value that is halfway between two may be rounded either way
    exact = reference.errors(x.out, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2))
    assert 4e-3 < exact.rms < 2e-2  # what 8 bits cost


def test_the_bits_of_eight_bit_activations_do_not_depend_on_the_grid(device):
    x = inputs(18, 2, 1, 128, 128, device, int4=True)
    config, outs = choose.source(16, 3, False, int8=True), []
    for changes in ({}, {"programs": 3}, {"programs": 5, "group_m": 1}, {"counted": True}):
        tiles = {name: replace(getattr(config, name), **changes) for name in ("gemm1", "gemm2")}
        x.out.fill_(float("nan"))
        w4a8.layer(x, replace(config, **tiles))()
        outs.append(x.out.clone())
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_rows_are_quantised_by_their_groups_largest(device):
    x = inputs(2, 2, 1, 128, 128, device, int4=True, empty=0)
    x.x.zero_()
    x.x[0, :3] = torch.tensor([1.27, -0.5, 0.004])
    x.x[1, 32] = -8.0
    made = w4a8.layer(x, choose.source(16, 2, int8=True))
    for name in ("place", "quantise"):
        made.launches[name]()
    args = made.launches["gemm1"].args
    slots = made.sorted.slots.tolist()
    for token, at, values, scale in ((0, 0, [127, -50, 0], 0.01), (1, 32, [-127, 0, 0], 8 / 127)):
        row = slots.index(token)
        assert args["q"].view(-1)[row * 128 + at :][:3].tolist() == values
        assert args["q_scales"].view(-1)[row * 4 + at // 32].item() == pytest.approx(scale)
    whole, scales = experts_int4.quantise_rows(x.x.cpu())
    assert whole[0, :3].tolist() == [127, -50, 0]
    assert scales[1].tolist() == pytest.approx([1, 8 / 127, 1, 1])
    with pytest.raises(ValueError, match=r"x is \(5,\); allowed: \[.., K\] with K a multiple of 32"):
        experts_int4.quantise_rows(torch.zeros(5))


def test_what_eight_bit_activations_cannot_take_is_named(device):
    x = inputs(3, 4, 2, 128, 128, device, int4=True)
    config = choose.source(16, 3, int8=True)
    for wrong, message in (
        (replace(config, fused=True), "fused is True; allowed with 8-bit activations: False"),
        (choose.source(16, 3), "gemm1.block_k is 64; allowed with 8-bit activations: 32"),
        (replace(config, gemm2=replace(config.gemm2, swap=True)), "gemm2 is .*swapped.*; allowed with 8-bit"),
    ):
        with pytest.raises(ValueError, match=message):
            w4a8.layer(x, wrong)
    with pytest.raises(ValueError, match="w1 and w2 are not INT4; allowed with 8-bit activations: INT4"):
        w4a8.layer(inputs(3, 4, 2, 128, 128, device), config)


# The worst-case grid


def test_dead_blocks_of_the_worst_case_grid_are_worked_on(device):
    """With the last expert's weights, on rows of padding, as in the source: what comes of it is stored, in scratch."""
    x = inputs(5, 4, 1, 128, 128, device, int4=True)
    scratch = experts_inputs.workspace(x)
    scratch.hidden.fill_(float("nan"))
    made = layer(x, choose.source(16, 2), scratch)
    made()
    live, blocks = int(made.sorted.padded), made.sorted.blocks
    assert live < 16 * blocks == 16 * ((5 + 4 * 16) // 16)
    rows = scratch.hidden[: blocks * 16 * 256].view(-1, 256)
    assert (rows[live:] == 0).all()  # zeros times weights
    scratch.hidden.fill_(float("nan"))
    counted = choose.source(16, 2)
    tiles = {name: replace(getattr(counted, name), counted=True) for name in ("gemm1", "gemm2")}
    layer(x, replace(counted, **tiles), scratch)()
    assert scratch.hidden[: blocks * 16 * 256].view(-1, 256)[live:].isnan().all()


# The ceiling


def halves(part):
    words = part.reshape(-1).view(torch.int32).long()
    return int(((words & 0xFFFF) + (words >> 16 & 0xFFFF)).sum())


@pytest.mark.parametrize("int4", [False, True])
def test_the_ceiling_reads_the_experts_that_it_is_told_and_no_others(int4, device):
    x = inputs(3, 5, 2, 256, 128, device, int4)
    for experts in ([0], [4, 1], [0, 1, 2, 3, 4]):
        launch = ceilings.read(x.w1, torch.tensor(experts, dtype=torch.int32, device=device))
        launch()
        parts = [x.w1.packed, x.w1.scales] if int4 else [x.w1]
        assert int(launch.args["partial"].sum()) == sum(halves(part[e]) for part in parts for e in experts)


def test_weights_that_are_no_whole_words_are_named(device):
    with pytest.raises(ValueError, match="w has 30 bytes an expert; allowed: a multiple of 4"):
        ceilings.read(torch.zeros((2, 3, 5), dtype=torch.bfloat16, device=device), torch.zeros(1, dtype=torch.int32))


# Peers


def half(x):
    """Weights of the routing that are exact in bf16, as the peers take them."""
    x.weights.copy_(x.weights.bfloat16().float())
    return x


@pytest.mark.parametrize("name", ["grouped_mm", "loop"])
@pytest.mark.parametrize(
    ("T", "E", "top_k", "kind"),
    [(1, 4, 2, "uniform"), (9, 8, 3, "zipf 1"), (17, 5, 2, "one expert"), (18, 3, 3, "uniform")],
)
def test_other_layers_compute_the_same(name, T, E, top_k, kind, device):
    if name == "grouped_mm" and device == "cuda":
        pytest.skip("F.grouped_mm takes bf16 alone on a GPU")
    x = half(inputs(T, E, top_k, 64, 32, device, kind=kind))
    call = getattr(peers, name)(x)
    for seed in (0, 1):
        made = synthetic(kind, T, E, top_k, seed, device)
        x.ids.copy_(made.ids)
        x.out.fill_(float("nan"))
        call()
        assert reference.errors(x.out, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2)).ok


def test_ends_and_positions_by_hand(device):
    x = inputs(3, 4, 2, 32, 16, device, empty=0)
    x.ids.copy_(torch.tensor([[2, 0], [2, 3], [0, 2]]))
    found = routing.route(x.ids, 4, peers.PADDED_TO)
    rows = torch.zeros((found.blocks * 16, 32), device=device)
    positions, ends = (torch.full((n,), -1, dtype=torch.int32, device=device) for n in (6, 4))
    found()
    for launch in peers.around(x, found, rows, positions, ends).values():
        launch()
    assert ends.tolist() == [16, 16, 32, 48]
    assert positions.tolist() == [16, 0, 17, 32, 1, 18]
    assert torch.equal(rows[positions.long()], x.x[[0, 0, 1, 1, 2, 2]])


def test_a_stand_in_for_liger_kernel_is_called_as_it_is_released(device, monkeypatch):
    """With its signature: apply(x, w1, w2, ids, weights), and one host synchronisation in its routing."""
    import sys
    from types import ModuleType, SimpleNamespace

    x = half(inputs(9, 4, 2, 32, 16, device))
    calls = []

    def apply(tokens, w1, w2, ids, weights):
        calls.append(int(torch.tensor([7]).sum().item()))
        assert (ids.dtype, weights.dtype) == (torch.int32, tokens.dtype)
        return reference.layer(tokens, ids, weights, w1, w2).to(tokens.dtype)

    def configs(**values):
        names, every = values, product(*values.values(), (2, 3, 4, 5), (4, 8))
        return [
            triton.Config(dict(zip(names, some, strict=True)), num_stages=stages, num_warps=warps)
            for *some, stages, warps in every
        ]

    products = [
        SimpleNamespace(cache={"key": 1}, configs=configs(BLOCK_N=(64, 128), BLOCK_K=(32, 64)), do_bench=None)
        for _ in range(2)
    ]
    total = SimpleNamespace(
        cache={"key": 1}, configs=configs(BLOCK_H=(64, 128, 256, 512), BLOCK_K=(1, 2, 4, 8, 16)), do_bench=None
    )
    module = ModuleType("liger_kernel.ops.fused_moe")
    module._fused_up_proj_swiglu_kernel, module._fused_down_proj_kernel = products
    module._token_gather_weighted_sum_kernel = total
    module.compute_routing_metadata = lambda ids, experts: (None, torch.zeros(5))
    module.LigerFusedMoEFunction = SimpleNamespace(apply=apply)
    ops = ModuleType("liger_kernel.ops")
    ops.fused_moe = module
    for name, one in (("liger_kernel", ModuleType("liger_kernel")), ("liger_kernel.ops", ops)):
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_moe", module)
    found = peers.liger(x)()
    assert calls == [7, 5]  # as it is, to tune; then with what it is known to be
    assert torch.tensor([7]).item() == 7
    assert reference.errors(found, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2)).ok
    for kernel in products:
        assert kernel.cache == {}
        assert {(c.kwargs["BLOCK_K"], c.num_stages, c.num_warps) for c in kernel.configs} == {(64, 3, 4), (64, 4, 4)}
    assert total.cache == {}
    assert {tuple(c.kwargs.values()) for c in total.configs} == {(512, 2), (512, 8)}


# Choices


def test_a_layer_runs_with_the_tuned_table(device, monkeypatch):
    x = inputs(9, 3, 2, 128, 128, device, int4=True)
    tile = TileChoice(32, 64, 4, 2, group_m=3)
    known = {(3, 2, 128, 128, True): {8: Choice(32, tile, tile)}}
    monkeypatch.setattr(choose, "_table", lambda device: known)
    made = layer(x)
    assert made.config == Choice(32, tile, tile)
    made()
    assert reference.errors(x.out, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2)).ok
    assert isinstance(x.w1, Int4)
