"""The production GEMV and the ladder against float64: odd sizes, strided rows, every choice, the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

from labkit.kernels.gemv import choose, reference
from labkit.kernels.gemv.choose import Choice
from labkit.kernels.gemv.gemv import gemv, linear
from labkit.studies.gemv_coalescing import ladder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # the interpreter truncates bf16


def inputs(N, K, dtype, device, seed=0, pad=0):
    """W [N, K] with rows K + pad apart, x and a poisoned y."""
    generator = torch.Generator(device).manual_seed(seed)
    W = torch.randn((N, K + pad), device=device, generator=generator).mul(K**-0.5).to(dtype)[:, pad:]
    x = torch.randn(K, device=device, generator=generator).to(dtype)
    return W, x, torch.full((N,), float("nan"), dtype=dtype, device=device)


def error(y, W, x, bias=None):
    expected = reference.gemv(W, x) + (0 if bias is None else bias.double())
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("N", "K", "dtype"),
    [
        (1, 1, torch.float32), (1, 33, torch.float16), (31, 31, torch.bfloat16), (9, 64, torch.float32),
        *((5, K, dtype) for K in (1000, 4097) for dtype in TOLERANCE),
    ],
)  # fmt: skip
def test_any_shape_by_the_rule(N, K, dtype, device):
    W, x, y = inputs(N, K, dtype, device)
    linear(W, x, y)()
    assert error(y, W, x) < TOLERANCE[dtype]


def check_choice(N, K, choice, with_bias, pad):
    W, x, y = inputs(N, K, torch.float32, DEVICE, pad=pad)
    bias = torch.randn(N, device=DEVICE) if with_bias else None
    launch = gemv(W, x, y, choice, bias)
    launch()
    first = y.clone()
    y.fill_(float("nan"))
    launch()  # a split counts its programs anew
    assert error(y, W, x, bias) < 1e-5
    assert torch.equal(first, y)


@pytest.mark.parametrize(
    ("sizes", "rows", "split", "interleaved", "with_bias", "pad"),
    pairwise(
        [(3, 1, 1, 64), (9, 300, 2, 128), (17, 130, 1, 64)],  # N, K, warps, block_k
        choose.ROWS, [1, 2, 4], [False, True], [False, True], [0, 3],
    ),
)  # fmt: skip
def test_every_part_of_a_choice(sizes, rows, split, interleaved, with_bias, pad):
    N, K, warps, block_k = sizes
    check_choice(N, K, Choice(rows, warps, block_k, split, interleaved), with_bias, pad)


@settings(max_examples=3 if DEVICE == "cpu" else 15, deadline=None)
@given(
    st.integers(1, 12 if DEVICE == "cpu" else 40), st.integers(1, 300), st.sampled_from(choose.ROWS),
    st.sampled_from((1, 2)), st.sampled_from((64, 128)), st.sampled_from((1, 2, 4)), st.booleans(), st.booleans(),
    st.integers(0, 3),
)  # fmt: skip
def test_any_choice(N, K, rows, warps, block_k, split, interleaved, with_bias, pad):
    check_choice(N, K, Choice(rows, warps, block_k, split, interleaved), with_bias, pad)


def test_rows_beyond_the_unrolled_ones_are_looped_over(device):
    W, x, y = inputs(5, 1000, torch.float32, device)
    launch = gemv(W, x, y, Choice(8, 1, 32))
    assert not launch.args["UNROLLED"]
    launch()
    assert error(y, W, x) < 1e-5


def test_the_bits_do_not_depend_on_the_rows(device):
    W, x, _ = inputs(17, 299, torch.float32, device)
    found = []
    for rows, interleaved in (*((rows, False) for rows in choose.ROWS), (4, True), (16, True)):
        y = torch.empty(17, device=device)
        gemv(W, x, y, Choice(rows, 2, 128, 1, interleaved))()
        found.append(y)
    assert all(torch.equal(found[0], y) for y in found)
    other = torch.empty(17, device=device)
    gemv(W, x, other, Choice(1, 2, 64))()  # another tile is another order of the sum
    assert not torch.equal(found[0], other)


@pytest.mark.parametrize(("N", "K"), [(37, 31), (5, 100)])
def test_every_step_of_the_ladder(N, K, device):
    W, x, _ = inputs(N, K, torch.float16, device)
    vector = ladder.vector_of(W.dtype)
    steps = [
        lambda y: ladder.thread_a_row(W, x, y),
        lambda y: ladder.thread_a_row(W.t().contiguous().t(), x, y),
        lambda y: ladder.warp_a_row(W, x, y),
        lambda y: ladder.warp_a_row(W, x, y, vector),
        lambda y: ladder.warp_a_row(W, x, y, vector, 4),
        lambda y: ladder.warp_a_row(W, x, y, vector, 4, 4),
        lambda y: ladder.two_d_tile(W, x, y, Choice(4, 1, 64)),
    ]
    for number, step in enumerate(steps, 1):
        y = torch.full((N,), float("nan"), dtype=W.dtype, device=device)
        step(y)()
        assert error(y, W, x) < TOLERANCE[W.dtype], number


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda W, x, y: (W[0], x, y), r"W is \(8,\); allowed: \[N, K\]"),
        (lambda W, x, y: (W.int(), x, y), r"W is torch.int32; allowed: torch.bfloat16"),
        (lambda W, x, y: (W.t().contiguous().t(), x, y), r"W has strides \(1, 4\); allowed: values of a row adjacent"),
        (lambda W, x, y: (W, x[:7], y), r"x is \(7,\); allowed: \(8,\)"),
        (lambda W, x, y: (W, x, y.half()), r"y is torch.float16; allowed: W's dtype, torch.float32"),
        (lambda W, x, y: (W, torch.cat([x, x])[::2], y), r"x has strides \(2,\); allowed: contiguous"),
    ],
)
def test_what_it_cannot_take_is_named(change, message, device):
    W, x, y = inputs(4, 8, torch.float32, device)
    with pytest.raises(ValueError, match=message):
        gemv(*change(W, x, y), Choice())


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice(rows=3), "rows is 3; allowed: 1, 2, 4, 8, 16"),
        (Choice(num_warps=3), "num_warps is 3; allowed: 1, 2, 4, 8"),
        (Choice(split=3), "split is 3; allowed: 1, 2, 4, 8, 16"),
        (Choice(num_warps=4, block_k=64), "block_k is 64; allowed: a power of two from 128"),
    ],
)
def test_a_choice_it_cannot_take_is_named(choice, message, device):
    with pytest.raises(ValueError, match=message):
        gemv(*inputs(4, 8, torch.float32, device), choice)


def test_every_candidate_of_a_shape(device):
    W, x, _ = inputs(16, 1280, torch.float16, device)
    found = choose.candidates(16, 1280, 2)
    assert len(found) > 10
    for choice in found[:: 1 if device == "cuda" else 5]:
        y = torch.full((16,), float("nan"), dtype=W.dtype, device=device)
        gemv(W, x, y, choice)()
        assert error(y, W, x) < TOLERANCE[W.dtype], choice


def test_a_table_is_read_as_it_was_written(tmp_path):
    table = {(8, 64, 2): {"cold": Choice(2, 1, 64), "hot": Choice(1, 1, 64)}, (9, 64, 4): {"cold": Choice(1, 1, 32)}}
    choose.write(tmp_path, table)
    assert choose.read(tmp_path) == {shape: choices["cold"] for shape, choices in table.items()}
    assert choose.read(tmp_path, "hot") == {(8, 64, 2): Choice(1, 1, 64)}
    assert choose.read(tmp_path / "none") == {}
