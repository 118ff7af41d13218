"""Blocks of one expert as one tile, against float64, and where they are made."""

from dataclasses import replace

import pytest
import torch
from expert_layers import inputs, small
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.kernels.experts import reference, wide
from labkit.kernels.experts.choose import Joined, TileChoice
from labkit.kernels.experts.expert_layer import layer
from labkit.kernels.experts.inputs import workspace
from labkit.kernels.experts.tiled import by_tiles
from labkit.kernels.experts.tiles import _gemm_kernel
from labkit.kernels.experts.wide import WideChoice

KINDS = ["uniform", "zipf 1", "hot set", "one expert"]
TWO = WideChoice(2)


def run(x, up=TWO, down=TWO, **changes):
    x.out.fill_(float("nan"))
    wide.by_wide_tiles(x, small(16, **changes), None, up, down)()
    return x.out.clone()


@settings(max_examples=8, deadline=None)
@given(
    st.integers(2, 50), st.sampled_from([(3, 2), (4, 1), (9, 4)]), st.sampled_from([64, 96]),
    st.sampled_from([32, 80]), st.sampled_from(KINDS),
    st.sampled_from([(2, 2, 32), (4, 3, 64), (8, 2, 32), (2, 1, 16, 2), (4, 2, 16, 4)]),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_the_layer_is_right_at_every_routing(T, experts, H, width, kind, choice, swap, seed):
    x = inputs(T, *experts, H, width, "cpu", kind=kind, seed=seed)
    found = run(x, WideChoice(*choice), WideChoice(*choice), swap=swap)
    assert reference.errors(found, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2, None)).ok


def test_sums_that_programs_share_are_added_in_order_and_again_at_the_next_call():
    """Twice as many programs add in another order, and one of a tile's parts left out is noticed."""
    x = inputs(40, 16, 2, 96, 64, "cpu", kind="one expert")
    expected = reference.layer(x.x, x.ids, x.weights, x.w1, x.w2, None)
    made = {
        splits: wide.by_wide_tiles(x, small(16), None, *[WideChoice(2, block_k=16, splits=splits)] * 2)
        for splits in (1, 2, 4)
    }
    bits = {}
    for splits, one in (*made.items(), *reversed(made.items())):
        x.out.fill_(float("nan"))
        one()
        assert reference.errors(x.out, expected).ok
        assert torch.equal(bits.setdefault(splits, x.out.clone()), x.out)
    assert not torch.equal(bits[1], bits[2])
    assert not torch.equal(bits[2], bits[4])
    arrived = [one.launches[name].args["arrived"] for one in (made[2], made[4]) for name in ("gemm1", "gemm2")]
    assert not any(one.any() for one in arrived)
    arrived[-1].fill_(1)  # as if a part had been stored that was not
    made[4].launches["gemm2"].args["partial"].fill_(0)
    made[4]()
    assert not reference.errors(x.out, expected).ok


@pytest.mark.parametrize(("others", "shared"), [(15, False), (1, True)])
def test_sums_are_shared_only_where_enough_programs_have_no_block(others, shared):
    """Of 40 tokens 17 take one expert, two blocks of 16; the rest take 15 others, a block each, or one of them."""
    x = inputs(40, 16, 1, 96, 64, "cpu")
    x.ids[:17, 0], x.ids[17:, 0] = 0, 1 + torch.arange(23) % others
    once, twice = (run(x, *[WideChoice(2, block_k=16, splits=splits)] * 2) for splits in (1, 2))
    for found in (once, twice):
        assert reference.errors(found, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2, None)).ok
    assert torch.equal(once, twice) != shared


def test_slots_without_an_expert_add_nothing():
    x = inputs(40, 3, 2, 64, 32, "cpu", kind="one expert")
    x.ids[5:11], x.ids[20, 1] = -1, 99
    found = run(x)
    assert reference.errors(found, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2, None)).ok
    assert not found[5:11].any()


def test_one_launch_serves_every_routing():
    """As a captured graph does: what is in the tensors changes, the launches do not."""
    x = inputs(64, 4, 2, 64, 32, "cpu", kind="one expert")
    made = wide.by_wide_tiles(x, small(16), None, WideChoice(4), WideChoice(4))
    for kind in KINDS:
        x.ids.copy_(inputs(64, 4, 2, 64, 32, "cpu", kind=kind, seed=7).ids)
        x.out.fill_(float("nan"))
        made()
        assert reference.errors(x.out, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2, None)).ok


@pytest.mark.parametrize(("kind", "joined"), [("one expert", True), ("uniform", False)])
def test_only_blocks_of_one_expert_are_joined(kind, joined, monkeypatch):
    """Twenty tokens: two blocks of the one expert that all take, or at most one of each of many."""
    called = []
    monkeypatch.setattr(wide, "_wide_tile", lambda *arguments: called.append(arguments))
    run(inputs(20, 16, 1, 32, 16, "cpu", kind=kind))
    assert bool(called) == joined


def test_a_wide_tile_has_128_rows_and_is_shared_where_there_are_few():
    tile = TileChoice(block_n=128)
    assert wide.of_shape(128, 8, 4096, 14336, 128, tile, 132) is None
    assert wide.of_shape(128, 8, 4096, 14336, 16, tile, 132) == WideChoice(8, least=4)
    assert wide.of_shape(128, 8, 4096, 14336, 32, tile, 132) == WideChoice(4)
    assert wide.of_shape(128, 8, 4096, 14336, 64, tile, 132) == WideChoice(2)
    assert wide.of_shape(128, 2, 4096, 14336, 64, tile, 132) == WideChoice(2, splits=4)  # 64 tiles, of two experts
    assert wide.of_shape(129, 2, 4096, 14336, 64, tile, 132) == WideChoice(2, splits=2)  # 128 tiles
    assert wide.of_shape(257, 2, 4096, 14336, 64, tile, 132) == WideChoice(2)
    assert wide.of_shape(2, 1, 64, 8 * 2048, 16, tile, 132) == WideChoice(8, least=4, splits=8)
    assert wide.of_shape(2, 1, 64, 8 * 2048 - 1, 16, tile, 132) == WideChoice(8, least=4, splits=4)


@pytest.mark.parametrize("block_m", [16, 128])
def test_products_are_replaced_unless_blocks_are_as_large(block_m):
    x = inputs(20, 8, 2, 128, 256, "cpu", kind="zipf 1")
    launches = wide.by_wide_tiles(x, small(block_m, block_n=64)).launches
    plain = by_tiles(x, small(block_m), workspace(x)).launches
    for name in ("gemm1", "gemm2"):
        assert (launches[name].kernel is wide._wide_kernel) == (block_m == 16)
        assert (launches[name].kernel is plain[name].kernel) == (block_m == 128)


@pytest.mark.parametrize("tuned", [{"descriptor": True}, {"programs": 4, "flatten": True}, {"counted": False}])
def test_of_a_tuned_choice_wide_tiles_leave_what_they_do_not_have(tuned, monkeypatch):
    x = inputs(20, 3, 2, 64, 32, "cpu", kind="zipf 1")
    expected = run(x)
    monkeypatch.setattr(wide, "choose", lambda *shape: replace(small(16, **tuned), fused=False))
    x.out.fill_(float("nan"))
    wide.by_wide_tiles(x, None, None, TWO, TWO)()
    assert torch.equal(x.out, expected)
    assert not torch.equal(run(x, WideChoice(2, block_k=16)), expected)  # another order of sums


def test_what_cannot_run_is_named():
    x = inputs(3, 3, 2, 128, 128, "cpu")
    with pytest.raises(ValueError, match="the weights are INT4; allowed: bf16, fp16 or fp32"):
        wide.by_wide_tiles(inputs(3, 3, 2, 128, 128, "cpu", True))
    with pytest.raises(ValueError, match="fused is False; allowed: True"):
        wide.by_wide_tiles(x, small(16, fused=False))
    for choice, said in (
        (WideChoice(3), "wide is 3; allowed: 2, 4, 8"),
        (WideChoice(2, block_k=48), "block_k is 48; allowed: 16, 32"),
        (WideChoice(2, least=0), "least is 0; allowed: at least 1"),
        (WideChoice(2, splits=3), "splits is 3; allowed: 1, 2, 4, 8"),
    ):
        with pytest.raises(ValueError, match=said):
            run(x, choice)
    with pytest.raises(ValueError, match=r"wide is 4; allowed: 2$"):
        wide.by_wide_tiles(x, small(64), None, WideChoice(4))
    with pytest.raises(ValueError, match="x has 1 token; allowed: at least 2"):
        wide.by_wide_tiles(inputs(1, 3, 2, 128, 128, "cpu"))
    one = small(16)
    with pytest.raises(ValueError, match="programs is 4; allowed: 0"):
        wide.by_wide_tiles(x, replace(one, gemm1=replace(one.gemm1, programs=4)), None, WideChoice(2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_joined_where_its_configuration_says_so(kind):
    """By the kernel of wide tiles, else by that of tiles; both are right."""
    x = inputs(40, 4, 2, 96, 64, "cpu", kind=kind)
    config = small(16)
    made = {joined: layer(x, Joined(**vars(config)) if joined else config) for joined in (True, False)}
    kernels = {joined: {one.launches[name].kernel for name in ("gemm1", "gemm2")} for joined, one in made.items()}
    assert kernels == {True: {wide._wide_kernel}, False: {_gemm_kernel}}
    expected = reference.layer(x.x, x.ids, x.weights, x.w1, x.w2, None)
    for one in made.values():
        x.out.fill_(float("nan"))
        one()
        assert reference.errors(x.out, expected).ok
