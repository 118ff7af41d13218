"""The reference of the expert layer by hand-worked values, and the arithmetic of waves by the published figures."""

import math
from dataclasses import replace

import compiled_once
import pytest
import torch

from labkit.evidence import compiled
from labkit.kernels import offline
from labkit.kernels.experts import blocks, choose, reference, routing
from labkit.kernels.experts import int4 as experts_int4
from labkit.kernels.experts.choose import Choice
from labkit.kernels.experts.expert_layer import layer
from labkit.kernels.experts.inputs import LayerInputs
from labkit.kernels.experts.int4 import Int4
from labkit.studies.moe_persistent_grid import waves
from labkit.studies.moe_persistent_grid.routings import synthetic
from labkit.studies.moe_persistent_grid.variants import KINDS


def silu(x):
    return x / (1 + math.exp(-x))


def test_a_layer_by_hand():
    x = torch.tensor([[1.0, 2.0]])
    w1 = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [2.0, 0.0]]])  # expert 0: gate 1, up 2; 1: gate 3, up 2
    w2 = torch.tensor([[[1.0], [10.0]], [[2.0], [0.0]]])
    ids, weights = torch.tensor([[1, 0]]), torch.tensor([[0.25, 0.5]])
    zero, one = 2 * silu(1), 2 * silu(3)
    expected = torch.tensor([[0.25 * 2 * one + 0.5 * zero, 0.5 * 10 * zero]], dtype=torch.float64)
    torch.testing.assert_close(reference.layer(x, ids, weights, w1, w2), expected)


def test_a_slot_without_an_expert_adds_nothing():
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(3, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    weights = torch.rand(3, 2)
    ids = torch.tensor([[0, -1], [1, 2], [1, 0]])
    found = reference.layer(x, ids, weights, w1, w2)
    for t, experts in enumerate([[0], [1], [1, 0]]):
        parts = [weights[t, j].double() * reference.expert(x[t], w1[e], w2[e]) for j, e in enumerate(experts)]
        torch.testing.assert_close(found[t], sum(parts))


def test_the_even_k_is_in_the_low_nibble():
    packed = experts_int4.pack(torch.tensor([[1, 2, 15, 0]]))
    assert packed.tolist() == [[0x21, 0x0F]]
    assert packed.dtype == torch.uint8
    assert experts_int4.unpack(packed).tolist() == [[1, 2, 15, 0]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor([1, 2, 3]), r"values is \(3,\); allowed: \[.., K\] with an even K"),
        (torch.tensor([1, 16]), "values go from 1 to 16; allowed: 0 to 15"),
    ],
)
def test_what_cannot_be_packed_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        experts_int4.pack(values)


def test_an_int4_value_is_a_nibble_less_eight_times_its_groups_scale():
    values = torch.full((1, 256), 8)
    values[0, :4] = torch.tensor([0, 15, 9, 7])
    values[0, 128] = 9
    w = Int4(experts_int4.pack(values), torch.tensor([[0.5, 3.0]], dtype=torch.bfloat16))
    found = experts_int4.dequantise(w)
    assert found[0, :5].tolist() == [-4.0, 3.5, 0.5, -0.5, 0.0]
    assert found[0, 127:130].tolist() == [0.0, 3.0, 0.0]


def test_quantised_weights_are_at_most_half_a_step_off():
    w = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(0))
    w[1, 2, :128] = 0
    found = experts_int4.quantise(w)
    assert found.packed.shape == (3, 5, 128)
    assert found.scales.shape == (3, 5, 2)
    assert found.scales.dtype == torch.bfloat16
    off = (experts_int4.dequantise(found) - w.double()).abs().unflatten(-1, (-1, 128)).amax(-1)
    assert (off <= 0.52 * found.scales.double()).all()  # the scale, rounded to bf16, may leave the largest a bit short
    assert (experts_int4.dequantise(found)[1, 2, :128] == 0).all()
    again = experts_int4.quantise(experts_int4.dequantise(found))  # what is on the grid stays, up to a rescaled grid
    torch.testing.assert_close(experts_int4.dequantise(again), experts_int4.dequantise(found), atol=0.05, rtol=0.02)
    with pytest.raises(ValueError, match=r"w is \(2, 100\); allowed: \[.., K\] with K a multiple of 128"):
        experts_int4.quantise(torch.zeros(2, 100))


def test_an_int4_layer_is_the_layer_of_its_exact_values():
    torch.manual_seed(0)
    x, ids, weights = torch.randn(4, 128), torch.randint(0, 3, (4, 2)), torch.rand(4, 2)
    w1, w2 = (experts_int4.quantise(torch.randn(shape)) for shape in ((3, 256, 128), (3, 128, 128)))
    exact = reference.layer(x, ids, weights, experts_int4.dequantise(w1), experts_int4.dequantise(w2))
    assert torch.equal(reference.layer(x, ids, weights, w1, w2), exact)


def test_a_coarse_scale_makes_weights_that_are_exact_in_bf16():
    scales = torch.rand(64, 2, generator=torch.Generator().manual_seed(0)).add(1e-3).bfloat16()
    values = torch.arange(16).repeat(64, 16)
    rounded = experts_int4.dequantise(Int4(experts_int4.pack(values), scales))
    exact = experts_int4.dequantise(Int4(experts_int4.pack(values), experts_int4.coarse(scales)))
    assert not torch.equal(rounded.bfloat16().double(), rounded)
    assert torch.equal(exact.bfloat16().double(), exact)
    torch.testing.assert_close(experts_int4.coarse(scales), scales, rtol=2**-5, atol=0)


def test_what_is_stored_is_rounded_and_that_is_most_of_the_error():
    """A chain of bf16 products against float64 all the way, and against float64 with the same roundings."""
    torch.manual_seed(0)
    x, w1, w2 = (torch.randn(shape).bfloat16() for shape in ((64, 256), (4, 512, 256), (4, 256, 256)))
    w1, w2 = w1 * 2**-4, w2 * 2**-4
    ids, weights = torch.randint(0, 4, (64, 2)), torch.rand(64, 2)
    found = torch.zeros(64, 256)
    for t in range(64):
        for j, e in enumerate(ids[t].tolist()):
            gate, up = (w1[e].float() @ x[t].float()).bfloat16().float().chunk(2)
            hidden = (gate * gate.sigmoid() * up).bfloat16().float()
            found[t] += weights[t, j] * (w2[e].float() @ hidden).bfloat16().float()
    exact = reference.errors(found.bfloat16(), reference.layer(x, ids, weights, w1, w2))
    stored = reference.errors(found.bfloat16(), reference.layer(x, ids, weights, w1, w2, torch.bfloat16))
    assert 2.5e-3 < exact.rms < 4e-3
    assert stored.rms < 1.5e-3
    assert stored.largest < 8e-3


def test_errors_by_hand():
    expected = torch.tensor([3.0, 4.0, 0.0, 0.0])  # RMS 2.5
    found = reference.errors(torch.tensor([3.0, 4.4, 0.5, 0.0]), expected)
    assert found.largest == pytest.approx(0.2)
    assert found.rms == pytest.approx(math.sqrt((0.1**2 + 0.2**2) / 4))
    assert not found.ok
    assert reference.errors(expected * 1.003, expected).ok
    assert reference.errors(expected * 1.0056, expected).ok  # two values of four: the RMS is 0.0056 / √2
    assert not reference.errors(expected * 1.0058, expected).ok
    assert not reference.errors(torch.full((4,), math.nan), expected).ok
    assert reference.errors(torch.zeros(2), torch.zeros(2)).ok
    assert not reference.errors(torch.ones(2), torch.zeros(2)).ok
    with pytest.raises(ValueError, match=r"found is \(2,\); allowed: expected's shape, \(4,\)"):
        reference.errors(torch.zeros(2), expected)


def test_blocks_by_hand():
    assert blocks.blocks([0, 1, 16, 17], 16) == 4
    assert blocks.most_blocks(1, 8, 128, 64) == 8
    assert blocks.most_blocks(100, 2, 3, 16) == 3 + 197 // 16
    assert blocks.source_blocks(1642, 8, 256, 16) == 1077
    assert waves.expected_blocks(10, 2, 2, 16) == 2
    assert waves.expected_blocks(1, 1, 4, 16) == pytest.approx(1)
    assert waves.expected_blocks(2, 1, 4, 1) == pytest.approx(2)
    assert waves.expected_blocks(2, 1, 2, 16) == pytest.approx(2 * 3 / 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "experts", "top_k", "block_m"), [(1, 128, 8, 16), (70, 9, 3, 16), (200, 4, 4, 64)])
def test_no_routing_needs_more_than_most_blocks(kind, tokens, experts, top_k, block_m):
    counts = synthetic(kind, tokens, experts, top_k).ids.long().flatten().bincount(minlength=experts).tolist()
    assert blocks.blocks(counts, block_m) <= blocks.most_blocks(tokens, top_k, experts, block_m)
    assert blocks.most_blocks(tokens, top_k, experts, block_m) <= blocks.source_blocks(tokens, top_k, experts, block_m)


def test_most_blocks_are_reached():
    counts = [1 + 16 * 5, 1, 1]  # the rest of the slots in full blocks of one expert
    assert blocks.blocks(counts, 16) == blocks.most_blocks(sum(counts), 1, 3, 16)


# (experts, top_k), block_m -> the share of the worst-case grid at 1642 tokens, as it was found with one random routing.
DEAD = {
    ((256, 8), 16): 0.127, ((256, 8), 64): 0.427, ((128, 8), 16): 0.067, ((128, 8), 64): 0.22,
    ((512, 10), 16): 0.17, ((512, 10), 64): 0.33,
}  # fmt: skip


@pytest.mark.parametrize(("model", "block_m"), DEAD)
def test_the_dead_share_of_the_sources_grid(model, block_m):
    experts, top_k = model
    live = waves.expected_blocks(1642, top_k, experts, block_m)
    found = waves.dead_share(live, blocks.source_blocks(1642, top_k, experts, block_m))
    assert found == pytest.approx(DEAD[model, block_m], abs=0.012)
    counts = synthetic("uniform", 1642, experts, top_k).ids.long().flatten().bincount(minlength=experts).tolist()
    assert blocks.blocks(counts, block_m) == pytest.approx(live, rel=0.03)


def test_the_sources_own_point_has_57_waves():
    live = waves.expected_blocks(1642, 8, 256, 16)
    tiles = blocks.tiles(round(live), 1024, 128)
    assert tiles / 132 == pytest.approx(57, abs=0.2)
    assert waves.efficiency(tiles, 132) > 0.98
    assert waves.on_gpus(tiles, 1)["A100"][0] == pytest.approx(tiles / 108)
    assert waves.on_gpus(tiles, 7)["H100 SXM, H200"] == (tiles / 924, waves.efficiency(tiles, 924))


def test_efficiency_by_hand():
    assert waves.efficiency(133, 132) == pytest.approx(0.504, abs=1e-3)
    assert waves.efficiency(1572, 132) == pytest.approx(0.992, abs=1e-3)
    assert waves.efficiency(132, 132) == 1
    assert waves.efficiency(0, 132) == 1
    assert blocks.tiles(3, 1000, 128) == 24
    assert waves.predicted_ratio(133, 132, 148) == 0.5
    assert waves.predicted_ratio(133, 132, 66) == 1.5
    with pytest.raises(ValueError, match="slots is 0; allowed: at least 1"):
        waves.efficiency(1, 0)
    with pytest.raises(ValueError, match="live is 5 and grid is 4; allowed"):
        waves.dead_share(5, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_synthetic_routing_is_labelled_and_repeats(kind):
    found = synthetic(kind, 50, 32, 4, seed=3, empty=2)
    assert found.name == f"synthetic, {kind}"
    assert found.ids.dtype == torch.int32
    assert found.weights.sum(-1).allclose(torch.ones(50))
    assert torch.equal(found.ids, synthetic(kind, 50, 32, 4, seed=3, empty=2).ids)
    if kind == "one expert":
        assert len(found.ids.unique()) == 1
    else:
        assert not torch.equal(found.ids, synthetic(kind, 50, 32, 4, seed=4, empty=2).ids)
        assert (found.ids.sort(-1).values.diff(dim=-1) > 0).all()  # a token's experts differ
        assert len(found.ids.unique()) <= 30


def test_synthetic_routings_are_as_skewed_as_they_say():
    def shares(kind):
        ids = synthetic(kind, 20000, 64, 1).ids.long().flatten()
        return ids.bincount(minlength=64).sort(descending=True).values / 20000

    assert shares("uniform")[0] < 0.02
    zipf = shares("zipf 1")
    assert zipf[0] == pytest.approx(1 / sum(1 / r for r in range(1, 65)), rel=0.05)
    assert (zipf[0] / zipf[3]).item() == pytest.approx(4, rel=0.1)
    assert shares("hot set")[:4].sum().item() == pytest.approx(0.8, abs=0.01)
    assert shares("one expert")[0] == 1
    assert synthetic("zipf 1.5", 2000, 64, 1).ids.flatten().bincount().argmax() != 0  # likely ones are anywhere


def test_what_cannot_be_made_up_is_named():
    with pytest.raises(ValueError, match="kind is 'zip'; allowed: uniform, zipf"):
        synthetic("zip", 1, 2, 1)
    with pytest.raises(ValueError, match="top_k is 8; allowed: 1 to 7, the experts that are not empty"):
        synthetic("uniform", 1, 8, 8, empty=1)


def launches(config, int4, tokens=8, hidden=2048, width=768):
    """Of a layer as wide as Qwen3-30B-A3B's, on the CPU, with few experts: their number changes no kernel."""
    w1, w2 = torch.empty(8, 2 * width, hidden // 2), torch.empty(8, hidden, width // 2)
    if int4:
        w1, w2 = (
            Int4(w.to(torch.uint8), torch.ones(*w.shape[:2], w.shape[2] // 64, dtype=torch.bfloat16)) for w in (w1, w2)
        )
    else:
        w1, w2 = (torch.empty(*w.shape[:2], 2 * w.shape[2], dtype=torch.bfloat16) for w in (w1, w2))
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    ids = torch.zeros(tokens, 8, dtype=torch.int32)
    return layer(LayerInputs(x, ids, torch.ones(tokens, 8), w1, w2, torch.empty_like(x)), config).launches


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize(("tokens", "block_m"), [(1, 16), (512, 64), (1642, 128), (16384, 128)])
def test_the_rules_kernels_use_wgmma_and_do_not_spill(tokens, block_m, int4):
    config = replace(choose.rule(tokens, 128, 8, 2048, 768, int4), rows=None)
    assert config.block_m == block_m
    made = launches(config, int4)
    for name in ("gemm1", "gemm2"):
        found = compiled_once.evidence(made[name], 90)
        assert found["spill_bytes"] == 0
        assert found["ctas_per_sm"] >= (1 if config.gemm1.block_n == 256 or tokens == 1 else 2)
        assert all(instruction.startswith("HGMMA") for instruction in found["matrix"]), found["matrix"]


@pytest.mark.parametrize("int4", [False, True])
def test_one_token_needs_no_matrix_instructions_and_loads_16_bytes(int4):
    config = choose.rule(1, 128, 8, 2048, 768, int4)
    for launch in launches(config, int4, tokens=1).values():
        found = compiled_once.evidence(launch, 90)
        assert not found["matrix"]
        assert found["spill_bytes"] == 0
        assert found["loads"]["128"] >= 4  # of them those of weights
        assert found["ctas_per_sm"] * found["num_warps"] >= 16


def test_the_sources_kernel_uses_mma_at_16_rows_and_wgmma_at_64():
    for block_m, wgmma in ((16, False), (64, True)):
        found = compiled_once.evidence(launches(choose.source(block_m), True)["gemm1"], 90)
        assert all(instruction.startswith("HGMMA") == wgmma for instruction in found["matrix"])
        assert set(found["loads"]) >= {"8"}  # a byte a load, as k // 2 is addressed for every k
    assert compiled_once.evidence(launches(choose.source(16), True)["gemm1"], 90)["ctas_per_sm"] > 1  # it launches one


def test_four_bits_are_copied_in_wide_loads_and_unpacked_in_few_instructions():
    """Reading is the limit of such a kernel only if a weight takes few instructions: some three of them."""
    config = choose.rule(128, 128, 8, 2048, 768, int4=True)
    found = compiled_once.evidence(launches(config, True)["gemm1"], 90)
    a_thread = config.gemm1.block_n * config.gemm1.block_k / (32 * config.gemm1.num_warps)
    assert found["instructions"] < 10 * a_thread  # what comes before and after the loop included
    assert not {"8", "64"} & set(found["loads"])
    wasteful = Choice(16, replace(config.gemm1, unpack="twice", swap=False), config.gemm2)
    assert compiled_once.evidence(launches(wasteful, True)["gemm1"], 90)["instructions"] > 10 * a_thread


def test_launches_may_start_early_from_hopper_on():
    config = choose.rule(128, 128, 8, 2048, 768)
    for capability, wanted, early in ((90, config, True), (80, config, False), (90, choose.source(16), False)):
        with offline.offline(capability):
            made = launches(wanted, False)
        assert {launch.options.get("launch_pdl", False) for launch in made.values()} == {early}
        assert {launch.args["DEPENDENT"] for launch in made.values()} == {early}


@pytest.mark.parametrize("int4", [False, True])
def test_one_compiled_kernel_serves_any_number_of_tokens(int4):
    config = choose.rule(128, 128, 8, 2048, 768, int4)
    for gemm in ("gemm1", "gemm2"):
        assert len({compiled.build(launches(config, int4, tokens)[gemm], 90).hash for tokens in (1, 5, 16, 128)}) == 1
    other = replace(config, gemm1=replace(config.gemm1, num_stages=2))
    found = {compiled.build(launches(one, int4)["gemm1"], 90).hash for one in (config, other)}
    assert len(found) == 2


def test_every_routing_kernel_compiles_without_spills():
    for tokens, experts, top_k in ((1, 1, 1), (16, 512, 10), (16384, 512, 10)):
        found = routing.route(torch.zeros(tokens, top_k, dtype=torch.int32), experts, 64)
        for launch in found.launches.values():
            assert compiled_once.evidence(launch, 90)["spill_bytes"] == 0


def test_the_rule_by_shape():
    def block(tokens, experts, top_k):
        return choose.rule(tokens, experts, top_k, 2048, 768).block_m

    assert [block(t, 128, 8) for t in (1, 16, 128, 512, 1642, 16384)] == [16, 16, 16, 64, 128, 128]
    assert [block(t, 8, 2) for t in (1, 16, 128, 512)] == [16, 16, 64, 128]
    assert block(1, 2, 2) == 16
    assert choose.rule(16384, 128, 8, 2048, 768).gemm1.block_n == 256
    with pytest.raises(ValueError, match="block_m is 32; allowed: 16, 64"):
        choose.source(32)


@pytest.mark.gpu
@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("tokens", [1, 33, 700])
def test_a_graph_replays_with_another_routing(tokens, int4):
    torch.manual_seed(0)
    w1, w2 = torch.randn(16, 512, 384) * 384**-0.5, torch.randn(16, 384, 256) * 256**-0.5
    if int4:
        # With scales of eight bits the rounding of the weights alone takes the largest error to 2.1e-2.
        w1, w2 = (experts_int4.quantise(w) for w in (w1, w2))
        w1, w2 = (Int4(w.packed.cuda(), experts_int4.coarse(w.scales).cuda()) for w in (w1, w2))
    else:
        w1, w2 = w1.cuda().bfloat16(), w2.cuda().bfloat16()
    x = torch.randn(tokens, 384).cuda().bfloat16()
    made = synthetic("uniform", tokens, 16, 4, device="cuda", empty=1)
    inputs = LayerInputs(x, made.ids, made.weights, w1, w2, torch.empty_like(x))
    launched = layer(inputs)
    launched()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launched()
    for seed, kind in enumerate(KINDS):
        inputs.ids.copy_(synthetic(kind, tokens, 16, 4, seed, "cuda", empty=1).ids)
        fewer = tokens // 2 + 1  # tokens than the graph was captured for
        inputs.ids[fewer:] = -1
        found = []
        for _ in range(2):
            inputs.out.fill_(math.nan)
            graph.replay()
            found.append(inputs.out.clone())
        assert torch.equal(*found)
        expected = reference.layer(x, inputs.ids, inputs.weights, w1, w2)
        assert not found[0][fewer:].any()
        assert reference.errors(found[0][:fewer], expected[:fewer]).ok, kind  # zeros would make its RMS smaller
