"""Products of a K format's integers: the weights exactly, against float64, and the same bits however many tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.kernels.gguf import formats, integers
from labkit.kernels.gguf import shares as gguf_shares
from labkit.kernels.gguf.choose import TileChoice

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = TileChoice(2, 8, 1, 1, 2, shares=8)


def weights(name, rows, columns, seed=0):
    """As stored, and in the kernels' order."""
    generator = torch.Generator().manual_seed(seed)
    raw = formats.quantise(torch.randn((rows, columns), generator=generator) * columns**-0.5, name)
    return raw, integers.tiled(formats.pack(raw, name))


def tokens(count, columns, seed=7):
    return torch.randn((count, columns), generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(W, x, tile=TILE, up=None):
    y = torch.full((len(x), W.rows), float("nan"), device=x.device)
    integers.integers(W, x, y, tile, up)()
    return y


def exact(raw, name, x):
    return x.cpu().double() @ formats.dequantise(raw, name).double().T


def error(y, expected):
    return float((y.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", formats.K_FORMATS)
def test_weights_have_the_bits_of_the_format(name, device):
    """Tokens that are 1 in one column take it out: the scales are not rounded, and nothing is left of 128."""
    raw, W = weights(name, 11, 256)
    # every place in a group, every lane and group of a tile; as many tokens as a program may have
    columns = torch.tensor([place + 32 * (5 * place % 8) for place in range(32)])
    x = torch.eye(256)[columns].bfloat16().to(device)
    y = run(W.to(device), x, TileChoice(2, 32, 1, 1, 2, shares=8))
    assert torch.equal(y.T.cpu(), formats.dequantise(raw, name)[:, columns])


@pytest.mark.parametrize("name", formats.K_FORMATS)
def test_words_are_the_same_bytes_in_another_order(name):
    packed = formats.pack(weights(name, 19, 512)[0], name)
    tiled = integers.tiled(packed)
    assert tiled.nbytes == packed.nbytes
    assert int(tiled.words.bitwise_and(0x11111111).ne(0).sum()) > 0
    counts = [sum(int((w >> 4 * i & 15 == 7).sum()) for i in range(8)) for w in (packed.words, tiled.words)]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", formats.K_FORMATS)
def test_a_token_has_the_same_bits_in_every_batch(monkeypatch, name, device):
    """In tiles of 8 tokens and of 16, of two blocks and of four. Where rows are cut matters: the test has power."""
    monkeypatch.setattr(gguf_shares, "multiprocessors", lambda device: 1)
    _, W = weights(name, 40, 256)  # two strips of two tiles
    real = device == "cuda" or name == "Q4_K"  # the interpreter is slow
    W, x = W.to(device), tokens(9 if real else 3, 256).to(device)
    whole = run(W, x, TileChoice(2, 8, 1, 1, 2, shares=4))
    for some, tile in (
        ([0], TileChoice(2, 8, 1, 1, 2, shares=4)),
        ([len(x) - 1, 1], TileChoice(4, 16, 1, 1, 2, shares=4)),
    ):
        assert torch.equal(run(W, x[some], tile), whole[some])
    if real:
        assert not torch.equal(run(W, x[:1], TileChoice(2, 8, 1, 1, 2, shares=2)), whole[:1])


@pytest.mark.parametrize(("shares", "cut"), [(2, False), (3, True)])
def test_rows_that_programs_share_are_whole(monkeypatch, shares, cut, device):
    raw, W = weights("Q4_K", 40, 256)  # two strips of two tiles
    x = tokens(3, 256).to(device)
    monkeypatch.setattr(gguf_shares, "multiprocessors", lambda device: 1)
    y = torch.full((3, 40), float("nan"), device=device)
    launch = integers.integers(W.to(device), x, y, TileChoice(2, 8, 1, 1, 2, shares=shares))
    assert (launch.args["SHARERS"] > 1) == cut
    for _ in range(2):  # the counters are 0 again
        y.fill_(float("nan"))
        launch()
        assert error(y, exact(raw, "Q4_K", x)) < 1e-5


@pytest.mark.parametrize("name", formats.K_FORMATS)
def test_gate_and_up_in_one_launch(name, device):
    (raw, gate), (other, up) = weights(name, 19, 256), weights(name, 19, 256, seed=1)
    x = tokens(3, 256).to(device)
    expected = torch.nn.functional.silu(exact(raw, name, x)) * exact(other, name, x)
    assert error(run(gate.to(device), x, up=up.to(device)), expected) < 1e-5


@settings(max_examples=5 if DEVICE == "cpu" else 60, deadline=None)
@given(
    name=st.sampled_from(formats.K_FORMATS), rows=st.integers(1, 20), blocks=st.integers(1, 2), count=st.integers(1, 9),
    ahead=st.integers(0, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_product(name, rows, blocks, count, ahead, seed):
    raw, W = weights(name, rows, 256 * blocks, seed)
    x = tokens(count, 256 * blocks, seed).to(DEVICE)
    y = run(W.to(DEVICE), x, TileChoice(2, 8, 1, 1, ahead, shares=2))
    assert error(y, exact(raw, name, x)) < 1e-5


def test_tokens_may_lie_apart(device):
    raw, W = weights("Q5_K", 8, 256)
    x = tokens(2, 512).to(device)[:, :256]
    assert error(run(W.to(device), x), exact(raw, "Q5_K", x)) < 1e-5


def test_what_cannot_be_taken_is_named():
    W, x, y = weights("Q4_K", 8, 256)[1], tokens(2, 256), torch.empty(2, 8)
    with pytest.raises(ValueError, match=r"x is torch.float32; allowed: torch.bfloat16"):
        integers.integers(W, x.float(), y)
    with pytest.raises(ValueError, match=r"format is 'Q8_0'; allowed: Q4_K, Q5_K, Q6_K"):
        integers.tiled(formats.pack(formats.quantise(torch.randn(8, 256), "Q8_0"), "Q8_0"))
    with pytest.raises(ValueError, match=r"x has strides \(257, 1\); allowed: tokens an even number of values apart"):
        integers.integers(W, torch.empty(2, 257, dtype=torch.bfloat16)[:, :256], y)
    with pytest.raises(ValueError, match="shares is 0; allowed: at least 1"):
        integers.integers(W, x, y, TileChoice(2, 8, 1))
    with pytest.raises(ValueError, match="num_warps is 4; allowed: 1"):
        integers.integers(W, x, y, TileChoice(2, 8, 4, shares=8))
    with pytest.raises(ValueError, match=r"x is \(2, 512\); allowed: \[N, 256\]"):
        integers.integers(W, tokens(2, 512), y)
