"""Routing and the expert layer's kernels against plain Python and float64; the same bits, whatever the grid."""

import functools
from dataclasses import replace

import pytest
import torch
from expert_layers import inputs, run, small
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

from labkit.kernels.experts import choose, reference, routing, tiled
from labkit.kernels.experts import int4 as experts_int4
from labkit.kernels.experts.blocks import most_blocks
from labkit.kernels.experts.choose import Choice, RowChoice, TileChoice
from labkit.kernels.experts.expert_layer import layer
from labkit.kernels.experts.inputs import LayerInputs, workspace
from labkit.kernels.experts.int4 import Int4
from labkit.kernels.experts.routing import route
from labkit.studies.moe_persistent_grid.routings import synthetic
from labkit.studies.moe_persistent_grid.variants import KINDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sorted_plainly(ids, experts, block_m):
    """What `route` finds, for the blocks that have a slot."""
    slots, owners = [], []
    flat = ids.flatten().tolist()
    for e in range(experts):
        own = [slot for slot, expert in enumerate(flat) if expert == e]
        own += [len(flat)] * (-len(own) % block_m)
        slots += own
        owners += [e] * (len(own) // block_m)
    return slots, owners


def assert_sorted(found, ids, experts):
    slots, owners = sorted_plainly(ids, experts, found.block_m)
    assert found.padded.tolist() == [len(slots)]
    assert found.slots.tolist() == slots + [ids.numel()] * (len(found.slots) - len(slots))
    assert found.experts.tolist() == owners + [-1] * (found.blocks - len(owners))


@settings(max_examples=10 if DEVICE == "cpu" else 200, deadline=None)
@given(
    st.integers(1, 70), st.integers(1, 40), st.integers(1, 8), st.sampled_from(routing.BLOCKS_M),
    st.sampled_from(KINDS), st.integers(0, 3), st.sampled_from((torch.int32, torch.int64)), st.integers(0, 99),
)  # fmt: skip
def test_any_routing(tokens, experts, top_k, block_m, kind, empty, dtype, seed):
    top_k = min(top_k, experts)
    ids = synthetic(kind, tokens, experts, top_k, seed, DEVICE, min(empty, experts - top_k)).ids.to(dtype)
    found = route(ids, experts, block_m, check=True)
    for _ in both_ways(found, ids, experts):
        assert_sorted(found, ids, experts)


def both_ways(found, ids, experts):
    """The tables of a routing as its launches make them, then as one launch does."""
    for launch in (found, routing.at_once(found, ids, experts)):
        for table in (found.slots, found.experts, found.padded):
            table.fill_(-7)
        launch()
        yield launch


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (1, 512, 10), (3, 8, 8), (600, 100, 1)])
def test_sizes_at_the_edges(tokens, experts, top_k, device):
    ids = synthetic("zipf 1", tokens, experts, top_k, device=device).ids
    found = route(ids, experts, 64, blocks=most_blocks(tokens, top_k, experts, 64) + 5)
    for _ in both_ways(found, ids, experts):
        assert_sorted(found, ids, experts)


def test_a_layer_with_tables_made_at_once_is_the_same(device):
    x = inputs(9, 4, 2, 64, 32, device)
    config, scratch = small(), workspace(x)
    results = []
    for at_once in (False, True):
        x.out.fill_(float("nan"))
        scratch.integers.fill_(-7)
        tiled.by_tiles(x, config, scratch, at_once=at_once)()
        results.append(x.out.clone())
    assert torch.equal(*results)
    assert results[0].any()


@pytest.mark.parametrize("most", [18, 17])
def test_tables_of_few_slots_are_made_at_once(most, device, monkeypatch):
    monkeypatch.setattr(routing, "AT_ONCE", most)
    x = inputs(9, 4, 2, 64, 32, device)
    found = tiled.by_tiles(x, small(), workspace(x))
    kernel = routing._at_once_kernel if most == 18 else routing._place_kernel
    assert found.launches["place"].kernel is kernel
    assert found.sorted.launches["place"] is found.launches["place"]


def test_many_slots_are_sorted_in_larger_chunks(device, monkeypatch):
    def chunk(slots):
        return route(torch.zeros(slots, 1, dtype=torch.int32), 64, 64).launches["count"].args["CHUNK"]

    assert (chunk(routing.MANY), chunk(routing.MANY + 1)) == (128, 512)
    tokens = 1642
    if device == "cpu":
        monkeypatch.setattr(routing, "MANY", 512)
        tokens = 60
    ids = synthetic("zipf 1", tokens, 64, 10, device=device).ids
    found = route(ids, 64, 64)
    assert found.launches["place"].args["CHUNK"] == 512
    found()
    assert_sorted(found, ids, 64)


def test_a_changed_routing_leaves_nothing_of_the_one_before(device):
    ids = synthetic("uniform", 40, 16, 8, device=device).ids
    found = route(ids, 16, 16)
    assert "count" in found.launches
    for kind in ("one expert", "uniform", "hot set"):
        ids.copy_(synthetic(kind, 40, 16, 8, seed=1, device=device).ids)
        found()
        assert_sorted(found, ids, 16)


@pytest.mark.parametrize("tokens", [5, 200])
def test_an_id_out_of_range_drops_its_slot(tokens, device):
    ids = synthetic("uniform", tokens, 6, 2, device=device).ids
    ids[1:] = torch.where(torch.arange(tokens - 1, device=device)[:, None] % 3 == 0, -1, ids[1:])
    ids[0] = torch.tensor([6, 2**31 - 1])
    found = route(ids, 6, 16)
    for _ in both_ways(found, ids, 6):
        assert_sorted(found, ids, 6)
    with pytest.raises(ValueError, match=r"ids has 6 \(\d+ values out of range\); allowed: 0 to 5"):
        route(ids, 6, 16, check=True)


def test_one_token_needs_no_sort(device):
    ids = torch.tensor([[5, 2, 2, -1, 9]], dtype=torch.int32, device=device)
    found = routing.one_token(ids, 9, 16)
    assert found.launches == {}
    assert found.experts.data_ptr() == ids.data_ptr()  # what is in ids then
    assert found.padded.tolist() == [5 * 16]
    rows = found.slots.view(5, 16)
    assert rows[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert (rows[:, 1:] == 5).all()
    with pytest.raises(ValueError, match=r"ids has -1 \(2 values out of range\); allowed: 0 to 8"):
        routing.one_token(ids, 9, 16, check=True)
    with pytest.raises(ValueError, match=r"ids is \(2, 1\); allowed: \[1, top_k\]"):
        routing.one_token(torch.zeros(2, 1, dtype=torch.int32), 9, 16)


@pytest.mark.parametrize("int4", [False, True])
def test_one_token_with_slots_that_have_no_expert(int4, device):
    x = inputs(1, 6, 3, 128, 128, device, int4)
    x.ids[0, 1] = -1
    x.ids[0, 2] = 6
    assert "place" not in layer(x).launches
    by_rows = replace(choose.rule(1, 6, 3, 128, 128, int4), rows=RowChoice(32, 32, 128))
    for config in (by_rows, replace(by_rows, rows=None)):
        run(x, config)
    x.ids.fill_(-1)
    for config in (by_rows, replace(by_rows, rows=None)):
        run(x, config)
        assert not x.out.any()


@pytest.mark.parametrize(
    ("int4", "sizes", "rows", "experts"),
    pairwise(
        [False, True],
        [(128, 256), (384, 128)],
        [RowChoice(32, 8, 128), RowChoice(16, 32, 256), RowChoice(8, 16, 4096)],
        [(3, 1), (4, 3)],
    ),
)
def test_one_token_by_rows(int4, sizes, rows, experts, device):
    """Rows in several steps and in one, and slots that are no power of two."""
    x = inputs(1, *experts, *sizes, device, int4)
    run(x, replace(choose.rule(1, *experts, *sizes, int4), rows=rows))


@settings(max_examples=1 if DEVICE == "cpu" else 100, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 5), st.sampled_from((128, 384)), st.sampled_from((128, 256)),
    st.booleans(), st.sampled_from(choose.ROWS[2:]), st.sampled_from(choose.ROWS[1:4]),
    st.sampled_from(choose.ROWS_K), st.integers(0, 99),
)  # fmt: skip
def test_any_one_token_by_rows(experts, top_k, hidden, width, int4, up, down, block_k, seed):
    x = inputs(1, experts, min(top_k, experts), hidden, width, DEVICE, int4, seed=seed)
    rows = RowChoice(up, down, block_k)
    run(x, replace(choose.rule(1, experts, x.ids.shape[1], hidden, width, int4), rows=rows))


def test_rows_of_weights_that_are_not_quantised_may_have_any_length(device):
    run(inputs(1, 2, 1, 100, 36, device, empty=0))


def test_rows_are_for_one_token(device):
    x = inputs(2, 3, 2, 128, 128, device)
    with pytest.raises(ValueError, match=r"config.rows is RowChoice\(.*\) with 2 tokens; allowed: only for one token"):
        layer(x, choose.rule(1, 3, 2, 128, 128))
    one = inputs(1, 3, 2, 128, 128, device)
    assert list(layer(one).launches) == ["gemm1", "gemm2"]
    for changed, message in (({"up": 3}, "rows.up is 3; allowed: 1, 2"), ({"block_k": 64}, "rows.block_k is 64")):
        with pytest.raises(ValueError, match=message):
            layer(one, replace(choose.rule(1, 3, 2, 128, 128), rows=RowChoice(**changed)))


@pytest.mark.parametrize(
    ("ids", "experts", "block_m", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), 2, 16, r"ids is \(3,\); allowed: \[T, top_k\], both at least 1"),
        (torch.zeros(3, 2), 2, 16, "ids is 6 values of torch.float32; allowed: below 2\\^31, torch.int32 or"),
        (torch.zeros(3, 2, dtype=torch.int32).t(), 2, 16, r"ids has strides \(1, 2\); allowed: contiguous"),
        (torch.zeros(3, 2, dtype=torch.int32), 0, 16, "experts is 0; allowed: 1 to 4096"),
        (torch.zeros(3, 2, dtype=torch.int32), 2, 48, "block_m is 48; allowed: 16, 32, 64, 128"),
    ],
)
def test_what_cannot_be_routed_is_named(ids, experts, block_m, message):
    with pytest.raises(ValueError, match=message):
        route(ids, experts, block_m)


def test_room_for_too_few_blocks_is_named():
    with pytest.raises(ValueError, match="blocks is 3; allowed: at least 4, for 4 slots of 8 experts"):
        route(torch.zeros(2, 2, dtype=torch.int32), 8, 16, blocks=3)


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize(
    ("T", "E", "top_k", "kind"),
    [(1, 3, 1, "uniform"), (9, 4, 4, "uniform"), (17, 5, 2, "one expert"), (11, 16, 3, "zipf 1.5")],
)
def test_any_routing_by_the_rule(T, E, top_k, kind, int4, device):
    H, width = (128, 128) if int4 else (72, 24)
    run(inputs(T, E, top_k, H, width, device, int4, kind))


def test_many_experts(device):
    run(inputs(3, 512, 10, 32, 16, device, empty=5), small())


@pytest.mark.parametrize(("block_m", "fused"), [(16, False), (32, True), (64, False), (128, True)])
def test_every_block_of_rows(block_m, fused, device):
    run(inputs(40, 3, 2, 40, 24, device), small(block_m, fused))


@pytest.mark.parametrize(
    ("sizes", "programs", "fused", "swap", "counted"),
    pairwise([(9, 3, 2, 40, 24), (21, 2, 1, 33, 17), (2, 4, 3, 70, 33)], [0, 1, 3, 1000], *[[False, True]] * 3),
)
def test_every_way_of_a_grid(sizes, programs, fused, swap, counted, device):
    """Sizes with values left over in each dimension, of few programs and of more than there are tiles."""
    run(inputs(*sizes, device, kind="zipf 1"), small(16, fused, swap=swap, programs=programs, counted=counted))


@settings(max_examples=2 if DEVICE == "cpu" else 100, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 6), st.integers(1, 3), st.integers(1, 70), st.integers(1, 40),
    st.sampled_from(KINDS), st.booleans(), st.booleans(), st.sampled_from((0, 1, 3, 1000)), st.booleans(),
)  # fmt: skip
def test_any_shape(T, E, top_k, H, width, kind, fused, swap, programs, counted):
    x = inputs(T, E, min(top_k, E), H, width, DEVICE, kind=kind)
    run(x, small(16, fused, swap=swap, programs=programs, counted=counted))


@pytest.mark.parametrize(("unpack", "scale_sums", "swap"), pairwise(choose.UNPACK, [False, True], [False, True]))
def test_every_way_to_unpack_int4(unpack, scale_sums, swap, device):
    x = inputs(5, 2, 1, 256, 128, device, int4=True)
    run(x, small(16, not swap, unpack=unpack, scale_sums=scale_sums, swap=swap, block_n=128, block_k=64))


# The interpreter's products of bf16 are wrong.
@pytest.mark.parametrize("dtype", [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("int4", [False, True])
def test_half_precision(dtype, int4, device):
    x = inputs(7, 3, 2, 128, 128, device, int4, dtype=dtype)
    run(x)
    run(x, choose.source(16, sms=3))


@pytest.mark.parametrize(("int4", "fused"), [(False, True), (True, False)])
def test_the_bits_do_not_depend_on_the_grid(int4, fused, device):
    x = inputs(20, 3, 2, 128, 128, device, int4, "zipf 1")
    config = small(16, fused, block_n=128, block_k=64)
    found = run(x, config)
    many = (
        {"programs": 3, "flatten": True, "group_m": 8},
        {"counted": False, "programs": 5, "group_m": 1},
    )
    for changes in ({"group_m": 1}, *many):
        other = replace(config, gemm1=replace(config.gemm1, **changes), gemm2=replace(config.gemm2, **changes))
        layer(x, other)()
        assert torch.equal(found, x.out), other
        x.out.fill_(float("nan"))
    if int4:  # another order of the sum: one product in place of two for each group
        config = replace(config, gemm1=replace(config.gemm1, block_k=128))
    else:
        order = torch.randperm(128, generator=torch.Generator().manual_seed(0)).to(device)
        x = replace(x, x=x.x[:, order].contiguous(), w1=x.w1[:, :, order].contiguous())
    assert not torch.equal(found, run(x, config))


def test_a_changed_routing_and_fewer_tokens_in_the_same_launches(device):
    x = inputs(12, 6, 3, 40, 24, device)
    launched = layer(x, small())
    for seed, kind, tokens in ((1, "one expert", 12), (2, "uniform", 12), (3, "zipf 1", 5)):
        made = synthetic(kind, 12, 6, 3, seed, device)
        x.ids.copy_(made.ids)
        x.ids[tokens:] = -1
        x.weights.copy_(made.weights)
        x.out.fill_(float("nan"))
        launched()
        assert reference.errors(x.out, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2)).ok
        assert (x.out[tokens:] == 0).all()


def test_scratch_is_shared_and_has_its_maximum(device):
    most = inputs(9, 3, 3, 40, 24, device)
    scratch = workspace(most, 20)
    expected = run(most)
    for T, config in ((20, None), (20, small(128, False, counted=False)), (7, small(64)), (7, None)):
        run(inputs(T, 3, 3, 40, 24, device), config, scratch)
    scratch.hidden.fill_(float("nan"))
    scratch.parts.fill_(float("nan"))
    assert torch.equal(run(most, None, scratch), expected)
    with pytest.raises(ValueError, match="x has 21 tokens; allowed: up to 20, for which the scratch was made"):
        layer(inputs(21, 3, 3, 40, 24, device), None, scratch)
    with pytest.raises(
        ValueError, match=r"scratch.hidden is \d+ values of torch.float32 on .*; allowed: at least \d+ of"
    ):
        layer(inputs(20, 3, 3, 40, 2400, device), None, scratch)


def test_the_persistent_grid_is_as_it_is_asked_for(device):
    x = inputs(50, 6, 2, 64, 64, device)
    most = layer(x, small()).sorted.blocks
    assert layer(x, small()).launches["gemm1"].grid == (most * 4,)
    assert layer(x, small(programs=7)).launches["gemm1"].grid == (7,)
    assert layer(x, small(programs=1000)).launches["gemm1"].grid == (most * 4,)
    assert layer(x, small(counted=False)).sorted.blocks == (100 + 6 * 16) // 16


@functools.cache
def four_experts():
    return inputs(3, 4, 2, 128, 128, DEVICE, int4=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: replace(x, x=x.x[0]), r"x is \(128,\); allowed: \[T, H\], both at least 1"),
        (lambda x: replace(x, ids=x.ids[:2]), r"ids is \(2, 2\); allowed: \[3, top_k\]"),
        (lambda x: replace(x, ids=x.ids.float()), "ids is torch.float32; allowed: torch.int32, torch.int64"),
        (lambda x: replace(x, weights=x.weights[:, :1]), r"weights is \(3, 1\); allowed: \(3, 2\)"),
        (lambda x: replace(x, x=x.x.t().contiguous().t()), r"x has strides \(1, 3\); allowed: contiguous"),
        (lambda x: replace(x, w1=experts_int4.dequantise(x.w1)), "w1 and w2 are INT4 and not; allowed: both or none"),
        (
            lambda x: replace(x, w1=x.w1._replace(packed=x.w1.packed[..., :32])),
            r"w1.packed is \(4, 256, 32\); allowed: \(",
        ),
        (
            lambda x: replace(x, w1=x.w1._replace(packed=x.w1.packed.char())),
            "w1.packed is torch.int8; allowed: torch.uint8",
        ),
        (
            lambda x: replace(x, w2=x.w2._replace(scales=x.w2.scales.float())),
            "w2.scales is torch.float32; allowed: torch.bf",
        ),
        (
            lambda x: replace(x, w2=x.w2._replace(packed=unaligned(x.w2.packed))),
            "w2.packed begins 1 bytes after a multiple",
        ),
    ],
)
def test_what_a_layer_cannot_take_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        layer(change(four_experts()))


def unaligned(x):
    """The same values, one byte after a multiple of 16."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def test_rows_that_are_no_whole_groups_are_named(device):
    w1 = Int4(torch.zeros(2, 64, 32, dtype=torch.uint8), torch.zeros(2, 64, 1, dtype=torch.bfloat16))
    w2 = Int4(torch.zeros(2, 64, 16, dtype=torch.uint8), torch.zeros(2, 64, 1, dtype=torch.bfloat16))
    x = torch.zeros(1, 64)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="w1 has rows of 64 INT4 values; allowed: a multiple of 128"):
        layer(LayerInputs(x, ids, torch.ones(1, 1), w1, w2, torch.empty_like(x)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(small(), block_m=48), "block_m is 48; allowed: 16, 32, 64, 128"),
        (Choice(16, TileChoice(block_n=48), TileChoice()), "gemm1.block_n is 48; allowed: 16, 32, 64, 128, 256"),
        (Choice(16, TileChoice(), TileChoice(block_k=256)), "gemm2.block_k is 256; allowed: 16, 32, 64, 128"),
        (Choice(16, TileChoice(), TileChoice(unpack="once")), "gemm2.unpack is 'once'; allowed: join, split, twice"),
        (
            Choice(16, TileChoice(flatten=True), TileChoice()),
            "gemm1.flatten is True with one CTA a tile; allowed: only with programs",
        ),
        (Choice(16, TileChoice(block_n=16), TileChoice()), "gemm1.block_n is 16; allowed: at least 32 where"),
        (Choice(16, TileChoice(programs=-1), TileChoice()), "gemm1.group_m is 8 and programs -1; allowed"),
    ],
)
def test_a_configuration_it_cannot_take_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        layer(four_experts(), config)


def test_an_id_out_of_range_is_an_error_on_request(device):
    x = inputs(3, 4, 2, 64, 64, device)
    x.ids[1, 1] = 4
    with pytest.raises(ValueError, match=r"ids has 4 \(1 values out of range\); allowed: 0 to 3"):
        layer(x, check_ids=True)
    run(x)
