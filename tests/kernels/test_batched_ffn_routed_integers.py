"""Routed experts by the integers of a K format: against float64, and a slot's bits in every batch."""

from dataclasses import replace

import pytest
import torch

from labkit.kernels.gguf import experts, formats, reference, routed, routed_integers
from labkit.kernels.gguf.choose import TileChoice

EXPERTS, HIDDEN, WIDTH, TOP_K = 3, 256, 256, 2
TILE = TileChoice(4, 8, 1, 1, 1)


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
    for one in (found.mid, found.partials):
        one.fill_(float("nan"))
    return found


def table(device, *slots):
    """Where experts lie, -1 for one that is not there; all by default, each in its own slot."""
    return torch.tensor(slots or range(EXPERTS), dtype=torch.int32, device=device)


def run(held, made, slots, tile=TILE):
    for launch in routed_integers.grouped_integers(held, slots, made, tile):
        launch()
    return made.partials


def gate_and_up(held, made, slots, tile=TILE):
    """mid; in the interpreter, which is slow, of the first program of every tile of slots, which has a few strips."""
    sort, gated, _ = routed_integers.grouped_integers(held, slots, made, tile)
    sort()
    (gated if made.x.is_cuda else replace(gated, grid=(1, gated.grid[1])))()
    return made.mid


def error(found, expected):
    return float((found.cpu().double() - expected).norm() / expected.norm())


def matrices(raw, name, expert):
    """Gate, up and down of an expert in fp32."""
    return [formats.dequantise(one[expert], name) for one in raw]


@pytest.mark.parametrize("name", formats.K_FORMATS if torch.cuda.is_available() else ["Q4_K"])
def test_experts_are_those_of_the_format_and_slots_of_one_that_is_not_there_are_left_alone(name, device):
    """Where the table says that an expert lies; a program has several strips in turn, and all rows are written."""
    raw, _, held = layer(name, device)
    made, slots = work(2, device, [[2, 0], [1, 2]]), table(device, -1, -1, 1)
    down = routed_integers.grouped_integers(held, slots, made, TILE)[2]
    assert down.args["STRIPS"] == 4  # of two tiles each
    assert down.grid[0] * down.args["STRIPS"] >= down.args["strips"] == HIDDEN // 32
    partials = run(held, made, slots)
    assert partials.isnan().all(1).tolist() == [False, True, True, False]
    for slot, token in ((0, 0), (3, 1)):
        expected = reference.ffn(*matrices(raw, name, 1), made.x[token : token + 1].cpu())
        assert error(partials[slot : slot + 1], expected) < 1.2e-2


@pytest.mark.parametrize("name", formats.K_FORMATS)
def test_gate_and_up_are_those_of_the_format(name, device):
    raw, _, held = layer(name, device)
    there = 0 if name == "Q4_K" else 1  # the first expert, in the first place, is one like the others
    made = work(1, device, [[there, 2]])
    gate, up, _ = matrices(raw, name, there)
    expected = reference.gated(gate, up, made.x.cpu())[0]
    mid = gate_and_up(held, made, table(device, *(one if one == there else -1 for one in range(EXPERTS))))
    written = ~mid[0].isnan().cpu()
    assert int(written.sum()) == (WIDTH if made.x.is_cuda else 4 * 16)  # of four strips of gate
    assert error(mid[0, written], expected[written]) < 2**-7  # the interpreter does not round to bf16: it cuts off
    assert mid[1].isnan().all()


def test_a_slot_has_the_same_bits_in_every_batch(device):
    """Alone, in tiles of 16 slots, of two blocks, and with a tile asked for ahead; those of weights have others."""
    _, weights, held = layer("Q4_K", device)
    real, slots = device == "cuda", table(device, -1, 1, -1)
    ids = [[1, 0]] * 9  # more than one tile of 8 slots
    whole = gate_and_up(held, work(len(ids), device, ids), slots)
    assert (~whole[::2].isnan()).all(0).sum() == (WIDTH if real else 4 * 16)
    for tile in (
        TileChoice(2, 16, 1, 1, 2),
        *([TileChoice(4, 16, 1, 1, 1), TileChoice(2, 8, 1, 1, 3)] if real else []),
    ):
        found = gate_and_up(held, work(len(ids), device, ids), slots, tile)
        both = ~(found.isnan() | whole.isnan())
        assert both[::2].any(1).all()
        assert torch.equal(found[both], whole[both])
    alone = gate_and_up(held, work(1, device, ids[:1]), slots)
    assert torch.equal(alone[0].nan_to_num(0), whole[0].nan_to_num(0))
    if real:  # the interpreter cannot multiply matrices in bf16
        made = [work(1, device, ids[:1]) for _ in range(2)]
        partials = run(held, made[0], slots)
        for launch in routed.grouped_indexed(weights, slots, made[1], matrix=True):
            launch()
        assert not torch.equal(made[1].partials[0], partials[0])


def test_what_cannot_be_taken_is_named(device):
    _, _, held = layer("Q4_K", device)
    with pytest.raises(ValueError, match=r"x is torch\.float32; allowed: torch\.bfloat16"):
        routed_integers.grouped_integers(held, table(device), work(1, device, dtype=torch.float32))
    for tile, name in ((TileChoice(4, 8, 2), "num_warps is 2"), (TileChoice(4, 8, 1, shares=8), "shares is 8")):
        with pytest.raises(ValueError, match=name):
            routed_integers.grouped_integers(held, table(device), work(1, device), tile)
    raw = torch.zeros((1, 32, 34), dtype=torch.uint8)
    with pytest.raises(ValueError, match="format is 'Q8_0'"):
        routed_integers.tiled(experts.pack(raw, raw, raw, "Q8_0"))
