"""GGUF products of many tokens: against float64, and the same bits for a token however many there are."""

import dataclasses

import pytest
import torch
from gguf_products import COLUMNS, MOST, PRODUCTS, SMALL, TILE, WIDE, error, on, run, same, tokens, weights

from labkit.kernels.gguf import formats, products, reference, wide
from labkit.kernels.gguf.choose import AHEAD, Choice, TileChoice, WideChoice, matrix_rule, narrow_rule
from labkit.kernels.gguf.formats import FORMATS

NUMBERS = (1, 2, 3, 4, 5, 8, 11, 16, MOST)
LIMIT = {"Q4_K": 1e-5, "Q5_K": 4e-6, "Q6_K": 3e-6}  # of multiply-add in fp32: that of 128 less 128, not of fp32 sums
IN_FULL = "Q5_K"  # the interpreter is slow: one format in many batches, the others, of the same kernels, in few


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_products_are_those_of_the_dequantised_weights(name, dtype, device):
    W, exact = on(device, name), weights(name)[1]
    x = tokens(3, dtype=dtype, device=device)
    expected = reference.product(exact, x.cpu())
    assert error(run(products.weight_stationary, W, x, Choice(blocks=1, tokens=4)), expected) < LIMIT.get(name, 3e-7)
    if dtype != torch.bfloat16 or device == "cuda":  # the interpreter's tl.dot is wrong for bf16
        limit = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
        for variant, choice in PRODUCTS[1:]:
            assert error(run(variant, W, x, choice), expected) < limit


def allowed(blocks, name, x):
    """What the K formats' sums may be off by, [N, rows], as the module of the kernels derives it; float64."""
    if name == "Q6_K":
        _, scales, d = formats._q6_k(formats._blocks(blocks, FORMATS[name]))
        base, span = 160, 16
    else:
        _, scales, _, d, _ = formats._q45_k(formats._blocks(blocks, FORMATS[name]), name)
        base, span = 128, 32
    step = (d * scales).abs().flatten(1).double()
    return base * (span + 7) * 2.0**-24 * x.abs().double().unflatten(1, (-1, span)).sum(-1) @ step.T


@pytest.mark.parametrize("sign", ["both", "one"])
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_sums_of_bytes_beside_128_are_within_their_bound(name, sign, device):
    """And within 2^-18 of Σ |x| |w|, which is the roundings as they are, also where all partial sums are large."""
    made = torch.randn((7, 2048), generator=torch.Generator().manual_seed(1)) / 45
    blocks = formats.quantise(made, name)
    W, exact, x = formats.pack(blocks, name).to(device), formats.dequantise(blocks, name), tokens(4, 2048)
    x = x.abs() if sign == "one" else x
    y = run(products.weight_stationary, W, x.to(device), Choice(blocks=1, tokens=4)).cpu()
    off = (y - reference.product(exact, x)).abs()
    rounding = 2.0**-20 * reference.product(exact.abs(), x.abs())  # of products and sums of whole weights
    assert (off <= allowed(blocks, name, x) + rounding).all()
    assert (off <= 4 * rounding).all()
    # the test has power: an integer that is one step off would be beyond it
    step = (exact.amax(1) - exact.amin(1)) / 63
    assert (step * x.abs().amax(1, keepdim=True) > 4 * rounding).all()
    assert off.max() > 0


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_dequantised_to_the_bits_of_the_format(name, device):
    """x picks one weight of each row, so that nothing is rounded in the sum."""
    columns = [0, 3, 17, 31, 255, 256, 500, 767]
    W, exact = on(device, name), weights(name)[1].T[columns].contiguous()
    for variant, choice in PRODUCTS:
        y = run(variant, W, torch.eye(COLUMNS)[columns].to(device), choice).cpu()
        assert torch.equal(y, exact)
        assert not torch.equal(y, exact.nextafter(torch.tensor(torch.inf)))  # one unit in the last place is seen


def numbers(name, device):
    return NUMBERS if device == "cuda" else (1, 4, 5, 9) if name == IN_FULL else (3,)


def every(device, name):
    return device == "cuda" or name == IN_FULL


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_has_the_same_bits_in_every_batch_and_variant(name, device):
    W, some = on(device, name), numbers(name, device)
    x = tokens(max(some), device=device)
    alone = run(products.per_token, W, x, SMALL)
    assert not alone.isnan().any()
    for number in some:
        for shared in (2, 8, 16) if number > 5 else (4,):
            choice = Choice(blocks=1, tokens=shared)
            assert same(run(products.weight_stationary, W, x[:number], choice), alone[:number]), (number, shared)
    if every(device, name):
        assert same(run(products.weight_stationary, W, x[:3], narrow_rule(3)), alone[:3])
        assert same(run(products.gemm_n, W, x[:3], Choice(blocks=2)), alone[:3])
        for ahead in AHEAD if device == "cuda" else (2,):
            choice = Choice(blocks=1, tokens=4, ahead=ahead, dependent=ahead > 0)
            assert same(run(products.weight_stationary, W, x[:3], choice), alone[:3]), ahead
    # the test has power: another tile is another order of the sum
    assert not same(run(products.weight_stationary, W, x[:1], Choice(groups=8, blocks=1, tokens=1)), alone[:1])


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_has_the_same_bits_in_every_matrix_product(name, device):
    W, some = on(device, name), numbers(name, device)
    x = tokens(MOST if every(device, name) else 9, device=device, dtype=torch.float16)
    whole = run(products.tensor_core, W, x, TILE)  # three tiles of tokens, or two
    for number in some:
        for tile in (TILE, TileChoice(4, 16, 4)) if every(device, name) else (TileChoice(4, 16, 4),):
            assert same(run(products.tensor_core, W, x[:number], tile), whole[:number]), (number, tile)
    assert same(run(products.tensor_core, W, x[-1:], TILE), whole[-1:])
    if every(device, name):
        assert same(run(products.tensor_core, W, x[:2], TileChoice(8, 32, 4)), whole[:2])
        for ahead in AHEAD if device == "cuda" else (2,):
            tile = dataclasses.replace(TILE, ahead=ahead, dependent=ahead > 0)
            assert same(run(products.tensor_core, W, x[:1], tile), whole[:1]), ahead
    assert not same(run(products.tensor_core, W, x[:1], TileChoice(2, 8, 2)), whole[:1])  # other warps, another order


def test_a_token_has_the_same_bits_in_every_wide_product(device):
    W, x = on(device, "Q5_K"), tokens(MOST, device=device, dtype=torch.float16)
    whole = run(wide.wide, W, x, WIDE)  # two tiles of tokens
    for number in (1, 3, 16):
        assert same(run(wide.wide, W, x[:number], WIDE), whole[:number]), number
    assert same(run(wide.wide, W, x[-1:], WIDE), whole[-1:])
    assert not same(run(wide.wide, W, x, dataclasses.replace(WIDE, groups=4, parts=2)), whole)


def stored(name="BF16", device="cpu", **of):
    """A matrix as stored, which the format of blocks BF16 is, and what it stands for."""
    exact = weights(name, **of)[1]
    return formats.matrix(formats.quantise(exact, "BF16"), "BF16").to(device), exact


@pytest.mark.parametrize("name", ["BF16", "Q4_K", "stored"])
def test_whole_and_split_rows_have_bits_of_their_own_for_any_number_of_tokens(name, device):
    """More parts than tiles of columns too; a second call finds the counters as the first one did."""
    of = {"rows": 39, "columns": 512}  # three tiles of rows, the last one not full
    W, exact = stored(device=device, **of) if name == "stored" else (on(device, name, **of), weights(name, **of)[1])
    x = tokens(columns=512, device=device, dtype=torch.float16)
    cuts = ((2, 3), (8, 4))
    if device != "cuda" and name != "stored":  # the interpreter is slow: one of the two in each packed format
        cuts = cuts[:1] if name == "Q4_K" else cuts[1:]
    for groups, parts in cuts:
        one = dataclasses.replace(WIDE, groups=groups, split_tokens=16)
        whole, split = (run_wide(W, x, dataclasses.replace(one, parts=count))[0] for count in (1, parts))
        assert error(split, reference.product(exact, x.cpu())) < 5e-4
        assert groups == 8 or not same(split, whole)  # parts of more than one tile: another order
        for rows in (16, 48):
            choice = dataclasses.replace(one, parts=parts, whole=rows)
            for number in (1, MOST):
                for y in run_wide(W, x[:number], choice, calls=2):
                    assert same(y[:, :rows], whole[:number, :rows])
                    assert same(y[:, rows:], split[:number, rows:])


@pytest.mark.parametrize(
    ("choice", "rows"),
    [
        (WideChoice(2, 8, 64), (17, 64, 130)),
        (WideChoice(4, 2, 32, parts=5, split_tokens=16), (17, 55)),
        (WideChoice(1, 16, 16, parts=2), (17, 128, 263)),
    ],
)
def test_every_row_and_token_is_in_one_tile(choice, rows, device):
    """Of small integers, whose sums are exact in any order; fewer rows than a tile, whole tiles, and a part of one."""
    generator = torch.Generator().manual_seed(3)
    tile = 8 * choice.blocks
    for count in rows:
        W = torch.randint(-9, 9, (count, 200), generator=generator).to(device, torch.bfloat16)
        x = torch.randint(-9, 9, (choice.tokens + 6, 200), generator=generator).to(device, torch.float16)
        for number in (1, len(x)):
            expected = (x[:number].cpu().double() @ W.cpu().double().T).float()
            for whole in (0, tile, 2 * tile):
                found = run_wide(W, x[:number], dataclasses.replace(choice, whole=whole), calls=2)
                assert all(torch.equal(y.cpu(), expected) for y in found), (count, number, whole)


def run_wide(W, x, choice, calls=1):
    """y of each of several calls of one launch."""
    y = torch.empty((len(x), W.shape[0] if isinstance(W, torch.Tensor) else W.rows), device=x.device)
    launch, found = wide.wide(W, x, y, choice), []
    for _ in range(calls):
        y.fill_(float("nan"))
        launch()
        found.append(y.clone())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_matrix_as_stored_is_multiplied_like_its_packed_form(dtype, device):
    W, exact = stored(device=device, rows=33, columns=544)  # tiles of rows and of columns that are not full
    x = tokens(MOST, 544, dtype, device)
    whole = run_wide(W, x, WIDE)[0]
    cut_off = device == "cuda" and dtype == torch.float16  # matrix instructions do not round their fp32 sums
    assert error(whole, reference.product(exact, x.cpu())) < (1e-6 if cut_off else 5e-7)
    for number in (1, 3, 16):
        assert same(run_wide(W, x[:number], WIDE)[0], whole[:number]), number
    if device == "cuda" and dtype == torch.float16:  # the order of the interpreter's sums depends on the tile
        for size in (32, 64, 128, 256):
            assert same(run_wide(W, x, dataclasses.replace(WIDE, blocks=16, tokens=size, num_warps=8))[0], whole), size
        split = dataclasses.replace(WIDE, parts=2, whole=16)
        parts = run_wide(W, x, dataclasses.replace(split, split_tokens=16))[0]
        for size in (32, 64, 128, 256):
            for one in (dataclasses.replace(split, split_tokens=size), dataclasses.replace(split, tokens=size)):
                assert same(run_wide(W, x, one)[0], parts), size
    held = torch.zeros((MOST, 547), dtype=dtype, device=device)[:, 3:]  # rows that begin at no multiple of 16 bytes
    held.copy_(x)
    assert not wide.wide(W, held, whole, WIDE).args["BOXES"]
    assert same(run_wide(W, held, WIDE)[0], whole)
    assert error(run_wide(on(device, "BF16", rows=33, columns=544), x, WIDE)[0], whole.cpu().double()) < 1e-6


@pytest.mark.parametrize(
    ("W", "message"),
    [
        (torch.empty(7, 768), "W is torch.float32; allowed: torch.bfloat16"),
        (torch.empty(768, dtype=torch.bfloat16), r"W is \(768,\); allowed: \[rows, K\], both at least 1"),
        (torch.empty((768, 7), dtype=torch.bfloat16).T, r"W has strides \(1, 7\); allowed: contiguous"),
        (torch.empty((7, 64), dtype=torch.bfloat16), r"x is \(2, 768\); allowed: \[N, 64\], N at least 1"),
        (torch.empty((8, 768), dtype=torch.bfloat16), r"y is \(2, 7\); allowed: \(2, 8\)"),
    ],
)
def test_a_matrix_that_it_cannot_take_is_named(W, message):
    with pytest.raises(ValueError, match=message):
        wide.wide(W, tokens(2), torch.empty(2, 7))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_weights_in_16_bits_are_as_near_as_these_allow(name, device):
    """Each weight apart, in fp16, whose rounding shows what 2^23 leaves behind; a whole step off would show."""
    columns = list(range(0, 768, 13))
    W, exact = on(device, name), weights(name)[1][:, columns].T
    y = run(
        products.tensor_core, W, torch.eye(COLUMNS, dtype=torch.float16)[columns].to(device), TileChoice(2, 32, 4)
    ).cpu()
    step = (weights(name)[1].amax(1) - weights(name)[1].amin(1)) / {"Q8_0": 255, "Q4_K": 15, "Q5_K": 31, "Q6_K": 63}[
        name
    ]
    assert ((y - exact).abs() <= step / 64 + exact.abs() * 2**-10).all()
    assert not torch.equal(y, exact)


@pytest.mark.parametrize("name", ["Q4_K", "BF16"])
def test_gate_and_up_in_one_launch(name, device):
    gate, up, x = on(device, name), on(device, name, seed=1), tokens(3, device=device)
    alone = run(products.per_token, gate, x, SMALL, up)
    assert error(alone, reference.gated(weights(name)[1], weights(name, seed=1)[1], x.cpu())) < 2 * LIMIT.get(
        name, 5e-7
    )
    for choice in (Choice(blocks=1, tokens=4), Choice(blocks=2, tokens=2)):
        assert same(run(products.weight_stationary, gate, x, choice, up), alone)
    assert same(run(products.gemm_n, gate, x[:2], SMALL, up), alone[:2])
    for tile in (TILE, TileChoice(4, 8, 4)):
        matrix = run(products.tensor_core, gate, x, tile, up)
        assert error(matrix, alone.cpu().double()) < 2 * LIMIT.get(name, 5e-7)
        assert same(run(products.tensor_core, gate, x[1:2], tile, up), matrix[1:2])
    assert not same(run(products.weight_stationary, gate, x, Choice(groups=8, blocks=1, tokens=8), up), alone)


def test_a_whole_layer(device):
    gate, up, down = (weights("Q8_0", *one) for one in ((32, 96, 0), (32, 96, 1), (96, 32, 2)))
    x = tokens(2, 96, device=device)
    middle = run(products.weight_stationary, gate[0].to(device), x, None, up[0].to(device))
    y = run(products.weight_stationary, down[0].to(device), middle, None)
    tile = matrix_rule(2, 96, 32, "Q8_0")  # one group for 8 lanes
    matrix = run(products.tensor_core, down[0].to(device), middle, tile)
    assert error(matrix, y.cpu().double()) < 1e-6
    assert error(y, reference.ffn(gate[1], up[1], down[1], x.cpu())) < 1e-6


def test_y_is_rounded_to_its_dtype(device):
    W, x = on(device, "Q8_0"), tokens(3, device=device)
    for variant, choice in PRODUCTS:
        found = run(variant, W, x, choice, dtype=torch.float16)
        assert torch.equal(found, run(variant, W, x, choice).half())


@pytest.mark.parametrize(
    ("name", "rows", "columns"), [("Q5_K", 1, 256), ("Q6_K", 8, 256), ("Q6_K", 33, 512), ("Q5_K", 9, 1280)]
)
def test_odd_shapes_and_strided_tokens(name, rows, columns, device):
    for one in ("Q6_K", "Q5_K") if device == "cuda" else (name,):
        W, exact = on(device, one, rows=rows, columns=columns), weights(one, rows=rows, columns=columns)[1]
        x = tokens(3, columns + 5, device=device)[:, 5:]
        held = torch.empty((3, rows + 2), device=device)
        for launch in (
            products.weight_stationary(W, x, held[:, :rows], Choice(16, 2, 2)),
            products.tensor_core(W, x, held[:, :rows], TILE),
            wide.wide(W, x, held[:, :rows], WIDE),
        ):
            held.fill_(float("nan"))
            launch()
            assert error(held[:, :rows], reference.product(exact, x.cpu())) < LIMIT[one]
            assert held[:, rows:].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda W, x, y: (W, x[:, :-1], y), r"x is \(2, 767\); allowed: \[N, 768\], N at least 1"),
        (lambda W, x, y: (W, x[0], y), r"x is \(768,\); allowed: \[N, 768\], N at least 1"),
        (lambda W, x, y: (W, x[:0], y[:0]), r"x is \(0, 768\); allowed"),
        (lambda W, x, y: (W, x, y[:1]), r"y is \(1, 7\); allowed: \(2, 7\)"),
        (lambda W, x, y: (W, x.int(), y), "x is torch.int32; allowed: torch.bfloat16, torch.float16, torch.float32"),
        (lambda W, x, y: (W, x, y.double()), "y is torch.float64; allowed: torch.bfloat16"),
        (lambda W, x, y: (W, x.to("meta"), y), "x is on meta; allowed: W's device, cpu"),
        (lambda W, x, y: (W, x.t().contiguous().t(), y), "x has strides .*; allowed: values of a token adjacent"),
        (lambda W, x, y: (W, x, y, Choice(tokens=3)), "tokens is 3; allowed: 1, 2, 4, 8, 16"),
        (lambda W, x, y: (W, x, y, Choice(groups=12)), "groups is 12; allowed: 4, 8, 16"),
        (lambda W, x, y: (W, x, y, Choice(num_warps=3)), "num_warps is 3; allowed: 1, 2, 4, 8"),
        (lambda W, x, y: (W, x, y, None, weights("Q5_K")[0]), r"up is Q5_K \[7, 768\]; allowed: W's format and shape"),
        (lambda W, x, y: (W, x, y, None, W.to("meta")), "up is on meta; allowed: W's device, cpu"),
    ],
)
def test_what_it_cannot_take_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        products.weight_stationary(*change(weights("Q4_K")[0], tokens(2), torch.empty(2, 7)))


@pytest.mark.parametrize(
    ("variant", "choice", "message"),
    [
        (products.per_token, Choice(tokens=2), "tokens is 2; allowed: 1"),
        (products.gemm_n, Choice(tokens=2), "tokens is 2; allowed: 1"),
        (wide.wide, WideChoice(tokens=4), "tokens is 4; allowed: 16, 32"),
        (wide.wide, WideChoice(blocks=1), "blocks is 1; allowed: 2, 4"),
        (wide.wide, WideChoice(groups=3), "groups is 3; allowed: 1, 2, 4, 8"),
        (wide.wide, WideChoice(parts=0), "parts is 0; allowed: 1, 2, 3"),
        (wide.wide, WideChoice(split_tokens=4), "split_tokens is 4; allowed: 16, 32"),
        (wide.wide, WideChoice(whole=96), "whole is 96; allowed: multiples of 64, a tile's rows"),
        (wide.wide, WideChoice(whole=-64), "whole is -64; allowed: multiples of 64"),
        (wide.wide, WideChoice(num_warps=3), "num_warps is 3; allowed: 1, 2, 4, 8"),
        (wide.wide, WideChoice(num_stages=0), "num_stages is 0; allowed: 1, 2, 3"),
        (products.tensor_core, TileChoice(1), "blocks is 1; allowed: 2, 4, 8"),
        (products.tensor_core, TileChoice(2, 4), "tokens is 4; allowed: 8, 16"),
        (products.tensor_core, TileChoice(2, 8, 3), "num_warps is 3; allowed: 1, 2, 4, 8, 16"),
        (products.tensor_core, TileChoice(ahead=6), "ahead is 6; allowed: 0, 1, 2, 3, 4, 5"),
        (products.weight_stationary, Choice(ahead=-1), "ahead is -1; allowed: 0, 1, 2, 3, 4, 5"),
        (products.weight_stationary, Choice(shares=7), "shares is 7; allowed: 0, 1, 2, 3"),
        (
            products.weight_stationary,
            Choice(shares=8),
            "shares is 8, where groups is 16 and num_warps 4; allowed: 0, or groups 4 and num_warps 1",
        ),
    ],
)
def test_choices_that_a_variant_cannot_take_are_named(variant, choice, message):
    with pytest.raises(ValueError, match=message):
        variant(weights("Q4_K")[0], tokens(2), torch.empty(2, 7), choice)


def test_more_than_a_grid_holds_is_named():
    W, x, y = weights("Q4_K")[0], tokens(1), torch.empty(1, 7)
    with pytest.raises(ValueError, match="x has 65536 tokens; allowed: at most 65535, 65535 programs of 1"):
        products.gemm_n(W, x.expand(65536, -1), y.expand(65536, -1))
    many = dataclasses.replace(W, rows=1048561)
    with pytest.raises(ValueError, match="W has 1048561 rows; allowed: at most 1048560, 65535 programs of 16"):
        products.tensor_core(many, x, torch.empty(1, 1048561), TILE)
