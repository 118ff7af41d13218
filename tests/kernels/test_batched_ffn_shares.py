"""GGUF products whose tiles are dealt in shares, or asked for ahead: every tile once, and the same bits for a token."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from gguf_products import error, on, run, same, tokens

from labkit.kernels.gguf import products
from labkit.kernels.gguf import shares as gguf_shares
from labkit.kernels.gguf.choose import AHEAD, Choice, TileChoice, matrix_rule
from labkit.kernels.gguf.shares import _share_of, _start
from labkit.kernels.launch import Launch

COLUMNS = 512  # 4 tiles a strip
EVEN = (1, 3)  # 8 tiles in 5 shares: of one tile, of which three have one more


@triton.jit
def _dealing_kernel(tile, share, each, more, start, found, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < COUNT
    size, longer = tl.load(each + i, mask=inside, other=1), tl.load(more + i, mask=inside, other=0)
    tl.store(start + i, _start(tl.load(share + i, mask=inside, other=0), size, longer), mask=inside)
    tl.store(found + i, _share_of(tl.load(tile + i, mask=inside, other=0), size, longer), mask=inside)


def test_every_tile_is_in_one_share_whatever_their_number(device):
    """Of up to 30 tiles in up to as many shares; shares are equal, the first ones perhaps larger by a tile."""
    asked, expected = [], []
    for tiles in range(1, 31):
        for shares in range(1, tiles + 1):
            each, more = divmod(tiles, shares)
            dealt = [share for share in range(shares) for _ in range(each + (share < more))]
            asked += [(tile, share, each, more) for tile, share in enumerate(dealt)]
            expected += [(dealt.index(share), share) for share in dealt]
    columns = torch.tensor(asked, dtype=torch.int32).T.contiguous().to(device)
    start, found = (torch.full((len(asked),), -1, dtype=torch.int32, device=device) for _ in range(2))
    args = dict(zip(("tile", "share", "each", "more"), columns, strict=True))
    args |= {"start": start, "found": found, "COUNT": len(asked), "BLOCK": 4096}
    Launch(_dealing_kernel, (triton.cdiv(len(asked), 4096),), args)()
    assert torch.stack([start, found], 1).tolist() == [list(one) for one in expected]


@pytest.mark.parametrize("tiles_a_strip", range(1, 13))
def test_memory_is_for_as_many_programs_as_can_share_a_strip(tiles_a_strip, monkeypatch):
    """Tiles are dealt to no more programs than asked for, and none has no tile."""
    W = on("cpu", "F32", rows=8, columns=128 * tiles_a_strip)
    for strips in range(1, 6):
        for count in range(1, 40):
            monkeypatch.setattr(gguf_shares, "multiprocessors", lambda device, count=count: count)
            found = gguf_shares._dealt(W, TileChoice(2, 8, 1, shares=1), 4, 2, strips, 2)
            each, more, shares = found["each"], found["more"], found["shares"]
            assert (shares * each + more, shares) == (tiles_a_strip * strips, min(count, tiles_a_strip * strips))
            dealt = [share for share in range(shares) for _ in range(each + (share < more))]
            of_strips = [dealt[i : i + tiles_a_strip] for i in range(0, len(dealt), tiles_a_strip)]
            most = max(len(set(strip)) for strip in of_strips)
            if most == 1 and shares == strips:
                assert found["SHARERS"] == 1
                continue
            assert most <= found["SHARERS"] <= tiles_a_strip
            assert len(found["counters"]) == 2 * strips * 2  # of every tile of tokens, strip and part
            assert len(found["partials"]) == len(found["counters"]) * found["SHARERS"] * 16 * 8


@pytest.mark.parametrize(
    ("name", "gated", "rows", "shares", "dealt"),
    [("Q4_K", True, 29, 5, EVEN), ("Q8_0", False, 61, 5, EVEN), ("Q8_0", False, 37, 4, (2, 0))],
)
def test_shares_of_all_tiles_whatever_rows_they_are_of(name, gated, rows, shares, dealt, device, monkeypatch):
    """One multiprocessor, so that shares are of several strips, and begin and end within them.

    Of 37 rows, which are five blocks in two strips, one block is read twice.
    """
    monkeypatch.setattr(gguf_shares, "multiprocessors", lambda device: 1)
    W, x = on(device, name, rows=rows, columns=COLUMNS), tokens(9, COLUMNS, torch.float16, device)
    up = W if gated else None
    rule = lambda number: dataclasses.replace(matrix_rule(number, rows, COLUMNS, name, gated), shares=shares)  # noqa: E731
    few, many = rule(1), rule(9)
    assert (few.blocks, few.tokens, many.blocks, many.tokens) == (2, 8, 4, 16)
    y = torch.full((len(x), rows), float("nan"), device=device)
    launch = products.tensor_core(W, x, y, many, up)
    assert (launch.args["each"], launch.args["more"]) == dealt
    launch()
    whole = y.clone()
    one = run(products.tensor_core, W, x, dataclasses.replace(many, shares=0), up)
    assert error(whole, one.cpu().double()) < 1e-6
    assert not same(one, whole)  # another order
    y.fill_(float("nan"))
    launch()  # it has left its counters as it found them
    assert same(y, whole)
    assert not launch.args["counters"].any()
    assert same(run(products.tensor_core, W, x[:1], few, up), whole[:1])
    two = run(
        products.tensor_core, W, x, dataclasses.replace(few, ahead=0), up
    )  # tiles of tokens, and parts of a strip
    assert same(two, whole)
    if device == "cuda":
        more = tokens(17, COLUMNS, torch.float16, device)
        assert same(run(products.tensor_core, W, more, rule(17), up)[:9], whole)


@pytest.mark.parametrize(
    ("name", "gated", "rows", "shares", "dealt"),
    [("Q4_K", True, 29, 5, EVEN), ("Q6_K", False, 61, 5, EVEN), ("Q8_0", True, 37, 6, (2, 0))],
)
def test_multiply_add_of_shares_has_the_same_bits_in_every_batch_and_variant(
    name, gated, rows, shares, dealt, device, monkeypatch
):
    monkeypatch.setattr(gguf_shares, "multiprocessors", lambda device: 1)
    W, x = on(device, name, rows=rows, columns=COLUMNS), tokens(2, COLUMNS, torch.float16, device)
    up = W if gated else None
    choice = Choice(groups=4, blocks=2 - gated, tokens=1, num_warps=1, shares=shares)
    y = torch.full((2, rows), float("nan"), device=device)
    launch = products.gemm_n(W, x, y, choice, up)
    assert (launch.args["each"], launch.args["more"]) == dealt
    launch()
    assert not launch.args["counters"].any()
    one = run(products.per_token, W, x[:1], dataclasses.replace(choice, shares=0), up)
    assert error(y[:1], one.cpu().double()) < 1e-5
    assert not same(one, y[:1])  # another order
    assert same(run(products.per_token, W, x[:1], choice, up), y[:1])
    cases = ((2, 1, 2), (4, 4 // (1 + gated), 0))  # tokens and blocks of a program, tiles ahead
    for shared, blocks, ahead in cases if device == "cuda" or name == "Q8_0" else cases[name == "Q6_K" :][:1]:
        some = dataclasses.replace(choice, tokens=shared, blocks=blocks, ahead=ahead, dependent=ahead > 0)
        assert same(run(products.weight_stationary, W, x, some, up), y), (shared, blocks, ahead)


@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_no_whole_strips_are_not_cut_at_different_columns(gated, device, monkeypatch):
    """Five blocks in strips of four (of gate and up, of two): one block is in two strips."""
    monkeypatch.setattr(gguf_shares, "multiprocessors", lambda device: 1)
    rows, x = 37, tokens(9, COLUMNS, torch.float16, device)
    W = on(device, "Q8_0", rows=rows, columns=COLUMNS)
    up = W if gated else None
    for variant, choice in (
        (products.weight_stationary, Choice(groups=4, blocks=1, num_warps=1, shares=5)),
        (products.tensor_core, TileChoice(4, 16, 1, shares=5)),
    ):
        with pytest.raises(ValueError, match=rf"shares is 5, of {rows} rows; allowed: 0, or rows in whole strips"):
            run(variant, W, x, choice, up)
    y = [torch.full((len(some), rows), float("nan"), device=device) for some in (x, x[:1])]
    for some, out in zip((x, x[:1]), y, strict=True):
        products.multiply(W, some, out, up)()
    assert same(y[0][:1], y[1])
    assert not y[0].isnan().any()


def test_strips_overlap_where_their_blocks_are_no_whole_number():
    """Against what the kernel does: part b of a strip begins at b × strips, but at most at the last whole strip."""
    for strip in (2, 4):
        for blocks in range(1, 40):
            strips = -(-blocks // strip)
            firsts = [min(b * strips, blocks - strips) for b in range(strip)]
            places = {(first + i, i) for first in firsts for i in range(strips)}
            assert gguf_shares.strips_overlap(blocks, strip) == (len(places) > blocks)


@pytest.mark.parametrize(("name", "columns"), [("Q4_K", 512), ("Q6_K", 256), ("Q8_0", 352)])
def test_as_many_tiles_ahead_as_asked_for_have_the_same_bits(name, columns, device):
    """Whole tiles and parts of one, more tiles ahead than there are and fewer, of several strips of rows."""
    W, x = on(device, name, rows=17, columns=columns), tokens(1, columns, torch.float16, device)
    for groups in (4, 16):
        for variant, plain in (
            (products.weight_stationary, Choice(groups=groups, blocks=2, num_warps=groups // 4)),
            (products.tensor_core, TileChoice(2, 8, groups // 4)),
        ):
            expected = run(variant, W, x, plain)
            for ahead in AHEAD[1:] if device == "cuda" or groups == 4 else (1, 5):
                asked = dataclasses.replace(plain, ahead=ahead)
                assert same(run(variant, W, x, asked), expected), (groups, ahead)
