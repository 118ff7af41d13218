"""Routed experts by the integers of a K format: against float64, and a slot's bits in every batch."""

import pytest
import torch

from labkit.batched_ffn import experts, formats, reference, routed, routed_integers
from labkit.batched_ffn.choose import Tile

EXPERTS, HIDDEN, WIDTH, TOP_K = 3, 256, 256, 2
TILE = Tile(4, 8, 1, 1, 1)


def layer(name, device, seed=0):
    """Blocks as stored of gate, up and down, the experts, and the same in the order of integers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    raw = [
        formats.quantise(torch.randn((EXPERTS * rows, k), generator=generator) * k**-0.5, name).unflatten(0, (-1, rows))
        for rows, k in shapes
    ]
    held = experts.pack(*(one.to(device) for one in raw), name)
    return raw, held, routed_integers.tiled(held)


def work(tokens, device, ids=None, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn((tokens, HIDDEN), generator=generator).to(dtype)
    ids = ids or [[n % EXPERTS, (n + 1) % EXPERTS] for n in range(tokens)]
    weights = torch.rand((tokens, TOP_K), generator=generator)
    ids = torch.tensor(ids, dtype=torch.int32)
    found = routed.Work.of(x.to(device), ids.to(device), weights.to(device), WIDTH)
    found.partials.fill_(float("nan"))
    return found


def table(device, gone=()):
    return torch.tensor([-1 if e in gone else e for e in range(EXPERTS)], dtype=torch.int32, device=device)


def run(held, made, slots, tile=TILE):
    for launch in routed_integers.grouped_integers(held, slots, made, tile):
        launch()
    return made.partials


@pytest.mark.parametrize("name", formats.K_FORMATS)
def test_experts_are_those_of_the_format(name, device):
    raw, _, held = layer(name, device)
    made = work(2, device)
    run(held, made, table(device))
    routed.weighted_sum(made)()
    exact = [[formats.dequantise(one[e], name) for one in raw] for e in range(EXPERTS)]
    expected = reference.routed(exact, made.x.cpu(), made.ids.cpu(), made.weights.cpu())
    assert float((made.y.cpu().double() - expected).norm() / expected.norm()) < 1.2e-2


def test_a_slot_has_the_same_bits_in_every_batch(device):
    """Alone, in tiles of 16 slots, of two blocks, and with a tile asked for ahead; those of weights have others."""
    _, weights, held = layer("Q4_K", device)
    real = device == "cuda"  # the interpreter is slow, and cannot multiply matrices in bf16
    ids = [[0, 1]] * (9 if real else 2)  # more than one tile of 8 slots
    whole = run(held, work(len(ids), device, ids), table(device)).clone()
    for tile in (Tile(2, 16, 1, 1, 2), *([Tile(4, 16, 1, 1, 1), Tile(2, 8, 1, 1, 3)] if real else [])):
        assert torch.equal(run(held, work(len(ids), device, ids), table(device), tile), whole)
    alone = work(1, device, ids[:1])
    assert torch.equal(run(held, alone, table(device)), whole[:TOP_K])
    if real:
        for launch in routed.grouped_indexed(weights, table(device), alone, matrix=True):
            launch()
        assert not torch.equal(alone.partials, whole[:TOP_K])


def test_slots_of_an_expert_that_is_not_there_are_left_alone(device):
    _, _, held = layer("Q4_K", device)
    made = work(2, device, [[0, 1], [1, 2]])
    partials = run(held, made, table(device, gone=(1,)))
    assert partials.isnan().all(1).tolist() == [False, True, True, False]


def test_a_program_has_whole_strips_in_turn(device):
    """Several strips of few tiles: all rows are written."""
    _, _, held = layer("Q4_K", device)
    made = work(1, device)
    down = routed_integers.grouped_integers(held, table(device), made, TILE)[2]
    assert down.args["STRIPS"] == 4  # of two tiles each
    assert down.grid[0] * down.args["STRIPS"] >= down.args["strips"] == HIDDEN // 32
    assert not run(held, made, table(device)).isnan().any()


def test_what_cannot_be_taken_is_named(device):
    _, _, held = layer("Q4_K", device)
    with pytest.raises(ValueError, match=r"x is torch\.float32; allowed: torch\.bfloat16"):
        routed_integers.grouped_integers(held, table(device), work(1, device, dtype=torch.float32))
    for tile, name in ((Tile(4, 8, 2), "num_warps is 2"), (Tile(4, 8, 1, shares=8), "shares is 8")):
        with pytest.raises(ValueError, match=name):
            routed_integers.grouped_integers(held, table(device), work(1, device), tile)
    raw = torch.zeros((1, 32, 34), dtype=torch.uint8)
    with pytest.raises(ValueError, match="format is 'Q8_0'"):
        routed_integers.tiled(experts.pack(raw, raw, raw, "Q8_0"))
