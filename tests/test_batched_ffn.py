"""GGUF formats against the package gguf, bit for bit; cache policies by hand and by property."""

import functools
import itertools
import math
from collections import Counter
from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from labkit.kernels.gguf import choose, files, formats, reference
from labkit.kernels.gguf.choose import Choice, TileChoice, WideChoice
from labkit.kernels.gguf.formats import FORMATS
from labkit.kernels.offload import policies

K_FORMATS = ("Q4_K", "Q5_K", "Q6_K")
SEEDS = st.integers(0, 2**32 - 1)


def theirs(blocks, name):
    """The weights as the package gguf dequantises them."""
    with np.errstate(invalid="ignore"):  # scales that are infinite, times zero
        return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), Type[name]))


def random_bytes(rows, size, seed):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (rows, size), dtype=np.uint8))


def quantised(name, rows=7, columns=768, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return formats.quantise(torch.randn((rows, columns), generator=generator) * columns**-0.5, name)


def packed_bytes(kind, weights):
    """As many as are stored; of Q4_K and Q5_K 4 more a block."""
    return weights // kind.block * (kind.block_bytes + 4 * (kind.name in ("Q4_K", "Q5_K")))


def same_bits(a, b):
    """The same bits; of a NaN, any."""
    return bool((a.view(torch.int32).eq(b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


# formats


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_those_of_gguf(name):
    kind = FORMATS[name]
    assert (kind.block, kind.block_bytes) == gguf.GGML_QUANT_SIZES[Type[name]]
    assert kind.bytes_per_weight() == kind.block_bytes / kind.block
    assert formats.pack(quantised(name, 8, 512), name).nbytes == packed_bytes(kind, 8 * 512)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 4), blocks=st.integers(1, 3), seed=SEEDS)
def test_any_bytes_are_dequantised_to_the_bits_of_gguf(name, rows, blocks, seed):
    raw = random_bytes(rows, blocks * FORMATS[name].block_bytes, seed)
    found = formats.dequantise(raw, name)
    assert found.dtype == torch.float32
    assert found.shape == (rows, blocks * FORMATS[name].block)
    assert same_bits(found, theirs(raw, name))


@pytest.mark.parametrize("name", FORMATS)
def test_every_byte_of_a_block_counts(name):
    """The comparison above has power: no byte of a block can be read wrongly unseen."""
    raw = quantised(name, 1, FORMATS[name].block)
    expected = formats.dequantise(raw, name)
    for byte in range(raw.shape[1]):
        other = raw.clone()
        other[0, byte] ^= 0x11  # a bit of each half
        assert not same_bits(formats.dequantise(other, name), expected), byte


def test_dimensions_before_the_row_are_kept():
    raw = random_bytes(6, 288, 0)
    found = formats.dequantise(raw.view(2, 3, 288), "Q4_K")
    assert found.shape == (2, 3, 512)
    assert same_bits(found.view(6, 512), theirs(raw, "Q4_K"))
    weights = torch.randn(2, 3, 512)
    assert torch.equal(formats.quantise(weights, "Q4_K").view(6, 288), formats.quantise(weights.view(6, 512), "Q4_K"))


def floats(least, largest):
    """[1 or 2, 64] fp32, of numbers that are 0 or of such a size."""
    sizes = st.floats(least, largest, width=32)
    numbers = st.one_of(st.just(0.0), sizes, sizes.map(lambda size: -size))
    return arrays.arrays(np.float32, st.sampled_from([(1, 64), (2, 64)]), elements=numbers)


@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0"])
@settings(max_examples=60, deadline=None)
@given(weights=floats(2.0**-100, 2.0**22))
@example(weights=np.float32([[127, 0.5, -0.5, 1.5, -2.5, 126.5, *[0] * 58]]))  # halves go away from zero
@example(weights=np.zeros((1, 64), np.float32))
def test_the_quantiser_gives_the_bits_of_gguf(name, weights):
    found = formats.quantise(torch.from_numpy(weights), name)
    assert np.array_equal(found.numpy(), gguf.quants.quantize(weights, Type[name]).view(np.uint8))


@settings(max_examples=60, deadline=None)
@given(weights=arrays.arrays(np.float32, (1, 8), elements=st.floats(width=32)))
@example(weights=np.float32([[3.4028235e38, 1.0039062, 1.0117188, 1e-45, -0.0, math.inf, -math.inf, math.nan]]))
def test_any_float_is_rounded_to_bf16_as_gguf_does(weights):
    found = formats.dequantise(formats.quantise(torch.from_numpy(weights), "BF16"), "BF16")
    assert same_bits(found, theirs(torch.from_numpy(gguf.quants.quantize(weights, Type.BF16)), "BF16"))


def test_a_block_below_the_least_scale_is_zero():
    for name in ("Q8_0", *K_FORMATS):  # of Q8_0, one over the scale is no fp32: gguf's own result is not defined
        found = formats.dequantise(formats.quantise(torch.full((1, 256), 1e-41), name), name)
        assert (found == 0).all()


def steps(raw, name):
    """|d·scale| of each weight."""
    blocks = raw.unflatten(-1, (-1, FORMATS[name].block_bytes))
    if name == "Q6_K":
        _, scales, d = formats._q6_k(blocks)
    else:
        _, scales, _, d, _ = formats._q45_k(blocks, name)
    return (d * scales.float()).abs().repeat_interleave(16 if name == "Q6_K" else 32, -1).flatten(-2)


@pytest.mark.parametrize("name", K_FORMATS)
@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, size=st.floats(-15, 9), spread=st.floats(0, 6), middle=st.floats(-3, 3))
def test_a_k_format_is_at_most_half_a_step_off(name, seed, size, spread, middle):
    """Weights of any size, sub-blocks of sizes far apart, or all of one sign: none is clipped, and no step too wide."""
    generator = torch.Generator().manual_seed(seed)
    scales = 2.0 ** (size + spread * torch.randn((2, 32, 1), generator=generator).clamp(-1, 1))
    weights = ((torch.randn((2, 32, 16), generator=generator) + middle) * scales).flatten(1)
    raw = formats.quantise(weights, name)
    step = steps(raw, name)
    block = weights.abs().unflatten(1, (-1, 256)).amax(-1).repeat_interleave(256, -1)
    part = weights.abs().unflatten(1, (-1, 32)).amax(-1).repeat_interleave(32, -1)
    assert ((theirs(raw, name) - weights).abs() <= 0.5 * step + 1e-6 * part + 1e-8 * block).all()
    levels, grain = {"Q4_K": (15, 63), "Q5_K": (31, 63), "Q6_K": (31, 127)}[name]
    rounded_up = 3 * block / levels / grain  # min and scale, each to the next of `grain` parts of the block's largest
    assert (step <= 1.01 * (2 * part / levels + rounded_up) + 2.0**-16).all()


@pytest.mark.parametrize("name", ["Q8_0", *K_FORMATS])
def test_flat_blocks_are_as_near_as_fp16_scales(name):
    flat = torch.cat([torch.zeros(1, 256), torch.full((1, 256), -2.0), torch.full((1, 256), 2.0)])
    found = formats.dequantise(formats.quantise(flat, name), name)
    assert (found[0] == 0).all()
    torch.testing.assert_close(found, flat, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: formats.find("Q4_0"), "format is 'Q4_0'; allowed: F32, BF16, Q8_0, Q4_K, Q5_K, Q6_K"),
        (lambda: formats.dequantise(torch.zeros(1, 34), "Q8_0"), "blocks is torch.float32; allowed: torch.uint8"),
        (
            lambda: formats.dequantise(random_bytes(2, 143, 0), "Q4_K"),
            "blocks is (2, 143); allowed for Q4_K: [.., bytes of a row], a multiple of 144",
        ),
        (
            lambda: formats.dequantise(random_bytes(2, 0, 0), "Q6_K"),
            "blocks is (2, 0); allowed for Q6_K: [.., bytes of a row], a multiple of 210",
        ),
        (
            lambda: formats.quantise(torch.zeros(3, 128), "Q5_K"),
            "weights is (3, 128); allowed for Q5_K: [.., multiple of 256]",
        ),
        (lambda: formats.quantise(torch.tensor(1.0), "F32"), "weights is (); allowed for F32: [.., multiple of 1]"),
        (
            lambda: formats.quantise(torch.full((1, 32), math.nan), "Q8_0"),
            "weights are not all finite; allowed for Q8_0: finite",
        ),
        (
            lambda: formats.quantise(torch.full((1, 32), 1e7), "Q8_0"),
            "a scale is 78740.2; allowed for Q8_0: up to 65504, the largest fp16",
        ),
        (
            lambda: formats.quantise(torch.full((1, 256), -1e8), "Q4_K"),
            "a scale is 1.5873e+06; allowed for Q4_K: up to 65504, the largest fp16",
        ),
        (
            lambda: formats.pack(random_bytes(1, 34, 0)[0], "Q8_0"),
            "blocks is (34,); allowed: [rows, bytes of a row], both at least 1",
        ),
        (
            lambda: formats.pack(random_bytes(2, 48 * 4, 0), "F32"),
            "columns is 48; allowed for F32: a multiple of 32",
        ),
    ],
)
def test_what_a_format_cannot_take_is_named(call, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the whole message is compared)
        call()
    assert str(raised.value) == message


# packed, read as its docstring says


def half(bits):
    return float(np.uint16(bits & 0xFFFF).view(np.float16))


def packed_weight(W, row, column):
    """One weight from the arrays of a `Packed`."""
    name, block, lane, group = W.format.name, row // 8, row % 8, column // 32
    i, j = column % 32 // 4, column % 4
    bits = 4 * W.words.shape[2]  # of a part: four words of every plane are 32 weights
    parts = 32 // bits
    word = int(W.words[block, group, i // parts, lane, j]) & 0xFFFFFFFF
    part = word >> bits * (i % parts) & (1 << bits) - 1
    if name in ("F32", "BF16"):
        return float(np.uint32(part << 32 - bits).view(np.float32))
    scale = int(W.scales.view(torch.int16)[block, group, lane]) & 0xFFFF
    if name == "Q8_0":
        return half(scale) * (part - 128)
    d = int(W.d.view(torch.int16 if name == "Q6_K" else torch.int32)[block, group // 8, lane])
    if name == "Q6_K":
        high = int(W.high[block, group, i // 4, lane]) >> 4 * (i % 4) + 2 * (j % 2) + 16 * (j // 2) & 3
        return half(d) * int(np.uint8(scale >> 8 * (i // 4) & 255).view(np.int8)) * ((part | high << 4) - 32)
    if name == "Q5_K":
        part |= (int(W.high[block, group, lane]) >> 4 * i + j & 1) << 4
    return float(np.float32(half(d) * (scale & 255) * part) - np.float32(half(d >> 16) * (scale >> 8)))


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_weight_is_where_it_should_be(name):
    raw = quantised(name, 11, 768)
    W, exact = formats.pack(raw, name), formats.dequantise(raw, name)
    assert (W.format.name, W.rows, W.columns) == (name, 11, 768)
    for row in (0, 7, 8, 10):
        for column in [*range(64), *range(230, 290), 767]:
            assert packed_weight(W, row, column) == exact[row, column], (row, column)
    assert all(packed_weight(W, row, 5) == 0 for row in range(11, 16))  # rows that fill the last block
    assert W.nbytes == packed_bytes(FORMATS[name], 16 * 768)


def test_packed_weights_move_to_a_device():
    W = formats.pack(quantised("Q5_K"), "Q5_K")
    moved = W.to("meta")
    assert {one.device.type for one in moved.arrays.values()} == {"meta"}
    assert list(moved.arrays) == ["words", "high", "scales", "d"]
    assert (moved.format, moved.rows, moved.columns, moved.nbytes) == (W.format, W.rows, W.columns, W.nbytes)


# files


@pytest.fixture
def file(tmp_path):
    """A GGUF file with a tensor of each format and one of F16."""
    path = tmp_path / "model.gguf"
    write(path)
    return path


def write(path, endianess=gguf.GGUFEndian.LITTLE):
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    for name in FORMATS:
        raw = quantised(name, 5, 512).numpy()
        writer.add_tensor(name, raw.view(np.float32) if name == "F32" else raw, raw_dtype=Type[name])
    writer.add_tensor("half", np.zeros((2, 4), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_is_read_as_it_was_written(file):
    assert files.tensor_names(file) == [*FORMATS, "half"]
    for name, kind in FORMATS.items():
        found, raw = files.read(file, name)
        assert found is kind
        assert torch.equal(raw, quantised(name, 5, 512))
        raw.zero_()  # a copy, which may be written


def damaged(path, content):
    path.write_bytes(content)
    return path


def test_what_cannot_be_read_is_named(file, tmp_path):
    whole, other = file.read_bytes(), tmp_path / "other.gguf"
    with pytest.raises(FileNotFoundError):
        files.tensor_names(other)
    for content in (b"", b"no GGUF file", whole[:200], whole[:-4000], whole[:8] + b"\xff" * 16 + whole[24:]):
        with pytest.raises(ValueError, match=r"other.gguf is not a GGUF file that can be read .*; it may be damaged"):
            files.read(damaged(other, content), "F32")
    with pytest.raises(
        ValueError, match=r"model.gguf has no tensor 'Q4'; it has: F32, BF16, Q8_0, Q4_K, Q5_K, Q6_K, h"
    ):
        files.read(file, "Q4")
    with pytest.raises(ValueError, match=r"model.gguf: half is F16; allowed: F32, BF16"):
        files.read(file, "half")
    write(other, gguf.GGUFEndian.BIG)
    with pytest.raises(ValueError, match=r"other.gguf is big-endian; allowed: little-endian"):
        files.tensor_names(other)


# reference


def test_a_layer_by_hand():
    x = torch.tensor([[1.0, 2.0], [0.0, -1.0]])
    gate, up = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[2.0, 0.0], [5.0, 5.0]])
    down = torch.tensor([[1.0, 7.0], [-3.0, 7.0]])
    assert reference.product(gate, x).tolist() == [[3.0, 0.0], [-1.0, 0.0]]
    silu = 3 / (1 + math.exp(-3))
    assert reference.gated(gate, up, x)[0].tolist() == pytest.approx([2 * silu, 0.0], rel=1e-15)
    found = reference.ffn(gate, up, down, x)
    assert found.dtype == torch.float64
    assert found.tolist() == [pytest.approx([2 * silu, -6 * silu], rel=1e-15), [0.0, 0.0]]


# choices


def test_the_rule_by_tokens():
    def rule(n, columns=5120, format="Q4_K", gated=False, rows=17408):
        return choose.rule(n, rows, columns, format, gated)

    some = (1, 2, 3, 4, 5, 8, 9, 512)
    for format in ("Q4_K", "Q8_0"):
        assert [rule(n, format=format).tokens for n in some] == [1, 2, 4, 4, 8, 8, 8, 8]
    assert [rule(n).blocks for n in (1, 2, 4, 5)] == [4, 4, 4, 4]
    assert [rule(n, gated=True).blocks for n in (1, 2, 4, 5)] == [2, 2, 2, 2]
    assert [rule(n).ahead for n in (1, 2, 4, 8)] == [2, 2, 0, 0]
    assert [rule(n).at_once for n in (1, 2, 4, 5)] == [16, 16, 16, 8]
    for other in ({"format": "Q6_K"}, {"columns": 2560, "rows": 9216}):
        assert [rule(n, **other).blocks for n in (1, 2, 4, 5)] == [2, 2, 2, 4]
        assert [rule(n, **other).ahead for n in (1, 2, 4, 8)] == [3, 2, 2, 0]
    assert [rule(n, format="Q8_0").blocks for n in (1, 2, 4, 5)] == [1, 2, 2, 1]
    assert [rule(n, format="Q8_0", gated=True).blocks for n in (1, 2, 4, 5)] == [1, 1, 1, 1]
    assert [rule(n, format="Q8_0").ahead for n in (1, 2, 3, 8)] == [2, 2, 0, 0]
    for columns, groups, warps in ((5120, 32, 8), (17408, 32, 8), (2560, 16, 4), (512, 16, 4)):
        for n, format, gated in itertools.product((1, 2, 3, 8, 40), FORMATS, (False, True)):
            found = rule(n, columns, format, gated)
            choose.check_choice(found)  # bits depend on these three
            shares = 16 if columns >= 2560 and format != "Q6_K" else 8
            bits = (4, 1, shares) if format in formats.K_FORMATS else (groups, warps, 0)
            assert (found.groups, found.num_warps, found.shares) == bits


def test_the_rule_of_experts_has_the_bits_of_the_default():
    assert [choose.narrow_rule(n).tokens for n in (1, 2, 3, 4, 5, 8, 9, 512)] == [1, 2, 4, 4, 8, 8, 8, 8]
    assert [choose.narrow_rule(n).blocks for n in (1, 2, 4, 5)] == [4, 4, 2, 1]
    assert [choose.narrow_rule(n, gated=True).blocks for n in (1, 2, 4, 5)] == [2, 2, 1, 1]
    for n in range(1, 40):
        found = choose.narrow_rule(n)
        choose.check_choice(found)
        assert (found.groups, found.num_warps) == (Choice().groups, Choice().num_warps)


@pytest.mark.parametrize("stored", [False, True])
def test_the_wide_rule_by_shape_and_tokens(stored):
    """Tall shapes have whole rows for full waves of 132 SMs; flat ones have parts for one wave; few weights do not."""
    split = {
        (17408, 5120): (132 * 128, 4) if stored else (0, 1),
        (5120, 17408): (0, 3),
        (132 * 128, 5120): (0, 1),
        (132 * 128 - 1, 5120): (0, 1),
        (512, 2048): (0, 2),
        (8, 32): (0, 1),
    }
    for shape, expected in split.items():
        found = [choose.wide_rule(n, *shape, "BF16", stored) for n in (1, 2, 16, 17, 64, 65, 512, 4096)]
        assert {(one.whole, one.parts, one.groups) for one in found} == {(*expected, 2)}  # bits depend on them
        for one in found:
            choose.check_wide(one)
            assert WideChoice(**one.as_dict()) == one
    most = 256 if stored else 128
    assert [choose.wide_rule(n, 17408, 5120, "BF16", stored).tokens for n in (1, 16, 17, 64, 65, 512)] == [
        16, 16, 32, 64, 128, most
    ]  # fmt: skip
    assert choose.wide_rule(512, 17408, 5120, "BF16", stored).split_tokens == 64
    assert choose.wide_rule(512, 5120, 17408, "BF16", stored).split_tokens == most


@pytest.mark.parametrize("multiprocessors", [20, 78, 108, 132])
def test_split_rows_are_the_rest_of_whole_waves(multiprocessors):
    for tiles in range(1, 5 * multiprocessors):
        whole, parts = choose.split_rule(tiles, 17408, multiprocessors)
        if parts == 1:
            assert whole == tiles
            continue
        assert 0 <= whole < tiles
        assert whole % multiprocessors == 0
        if whole:
            assert (tiles - whole) * parts <= 1.5 * multiprocessors
        else:  # waves are fuller than unsplit
            waves = -(-tiles * parts // multiprocessors)
            assert tiles * parts / waves > tiles
    assert choose.split_rule(1, 1023, multiprocessors) == (1, 1)  # a part would be over too soon


def test_fewer_tiles_than_a_wave_are_split_so_that_waves_are_full():
    assert choose.split_rule(40, 17408, 132) == (0, 3)  # 120 programs; of 4 parts, 160 would take two waves
    assert choose.split_rule(20, 9216, 132) == (0, 6)
    assert choose.split_rule(72, 2560, 132) == (0, 3)  # 216 in two waves, 1 or 2 parts would fill little over a half
    assert choose.split_rule(131, 2560, 132) == (131, 1)


@pytest.mark.parametrize(
    "change", [lambda one: (one, "Q8_0"), lambda one: (one[0], "BF16"), lambda one: (one.T, "BF16")]
)
def test_only_whole_blocks_of_bf16_are_a_matrix(change):
    blocks = quantised("BF16", 7, 96)
    found = formats.matrix(blocks, "BF16")
    assert found.data_ptr() == blocks.data_ptr()
    assert torch.equal(found.float(), formats.dequantise(blocks, "BF16"))
    with pytest.raises(ValueError, match="allowed"):
        formats.matrix(*change(blocks))


def test_the_matrix_rule_by_shape_and_tokens():
    def order(rows, columns, tokens=1, gated=False, format="Q4_K"):
        found = choose.matrix_rule(tokens, rows, columns, format, gated)
        return found.num_warps, found.shares

    shapes = ((17408, 5120), (5120, 17408), (9216, 2560), (2560, 9216), (512, 2048), (2048, 512), (64, 64))
    assert [order(*shape) for shape in shapes] == [(1, 8)] * 6 + [(2, 0)]
    assert order(2560, 9216 + 32) == (16, 0)  # not of whole tiles of a warp
    for shape in shapes:  # bits depend on them
        every = itertools.product((1, 2, 8, 9, 64, 512), (False, True), FORMATS)
        assert {order(*shape, *one) for one in every} == {order(*shape)}
    found = [choose.matrix_rule(n, 17408, 5120, "Q4_K") for n in (1, 8, 9, 16, 17, 512)]
    assert [(one.blocks, one.tokens) for one in found] == [(2, 8), (2, 8), (4, 16), (4, 16), (4, 32), (4, 32)]
    few, many = ({name: choose.matrix_rule(n, 5120, 17408, name).ahead for name in FORMATS} for n in (8, 32))
    assert few == {"F32": 0, "BF16": 2, "Q8_0": 3, "Q4_K": 3, "Q5_K": 3, "Q6_K": 3}
    assert many == {"F32": 0, "BF16": 0, "Q8_0": 2, "Q4_K": 2, "Q5_K": 2, "Q6_K": 2}
    both = [choose.matrix_rule(n, 17408, 5120, "Q4_K", gated=True) for n in (1, 16, 512)]
    assert [(one.blocks, one.tokens, one.ahead) for one in both] == [(2, 8, 3), (4, 16, 2), (4, 16, 2)]
    assert choose.matrix_rule(8, 17408, 5120, "BF16").blocks == 4
    for one in (*found, *both):
        choose.check_tile(one)
        assert TileChoice(**one.as_dict()) == one


# the expert cache

TRACES = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True), max_size=25)


def hits(policy, keys):
    return [policy.access(key).hit for key in keys]


def test_lru_by_hand():
    found = policies.LRU(2)
    assert hits(found, "abab") == [False, False, True, True]
    assert found.access("c") == policies.Access(False, "a")
    assert found.access("b") == policies.Access(True)
    assert found.access("a") == policies.Access(False, "c")
    assert ("b" in found, "c" in found, len(found)) == (True, False, 2)


def test_slru_by_hand():
    found = policies.SLRU(4)  # 3 protected
    assert hits(found, "abcd") == [False] * 4
    assert found.segments() == (list("dcba"), [])
    assert hits(found, "ab") == [True] * 2
    assert found.segments() == (list("dc"), list("ba"))
    assert found.access("e") == policies.Access(False, "c")  # the tail of the probationary ones, all accessed once
    assert hits(found, "da") == [True] * 2
    assert found.segments() == (list("e"), list("adb"))
    assert hits(found, "e") == [True]  # protected overflows: its tail to the probationary head
    assert found.segments() == (list("b"), list("ead"))
    assert found.access("f") == policies.Access(False, "b")  # never the one just inserted, though b has more accesses
    assert found.access("c") == policies.Access(False, "f")


def test_slru_evicts_the_least_accessed():
    found = policies.SLRU(4)
    hits(found, "aabbccdde")  # a is demoted by d, with two accesses; e has one and is inserted
    assert found.segments() == (list("e"), list("dcb"))
    found = policies.SLRU(8)  # 6 protected
    hits(found, "aabbccddeeffgghh")
    assert found.segments() == (list("ba"), list("hgfedc"))
    assert found.access("i").evicted == "a"
    assert found.access("j").evicted == "i"  # once; b twice


@pytest.mark.parametrize(("remember", "victim"), [(False, "x"), (True, "w")])
def test_a_remembered_count_outlives_an_eviction(remember, victim):
    found = policies.SLRU(8, remember)  # 6 protected: a to f
    hits(found, "aabbccddeeff" + "xyzxw")  # z evicts x, which comes back: its first access, or its second
    assert found.segments() == (list("wx"), list("fedcba"))
    assert found.access("v").evicted == victim


class PlainSLRU:
    """SLRU as the source says it, with lists, head first."""

    def __init__(self, capacity, remember):
        self.capacity, self.remember = capacity, remember
        self.protected_size = max(1, capacity - max(1, capacity // 4))
        self.probationary, self.protected, self.count = [], [], Counter()

    def access(self, key):
        self.count[key] += 1
        if key in self.probationary + self.protected:
            (self.probationary if key in self.probationary else self.protected).remove(key)
            self.protected.insert(0, key)
            if len(self.protected) > self.protected_size:
                self.probationary.insert(0, self.protected.pop())
            return True, None
        self.probationary.insert(0, key)
        if len(self.probationary + self.protected) <= self.capacity:
            return False, None
        victims = [one for one in reversed(self.probationary) if one != key] or self.protected[-1:]
        victim = min(victims, key=lambda one: self.count[one])
        (self.probationary if victim in self.probationary else self.protected).remove(victim)
        if not self.remember:
            del self.count[victim]
        return False, victim


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.booleans(), st.lists(st.integers(0, 12), max_size=80))
def test_slru_is_the_plain_one(capacity, remember, keys):
    found, plain = policies.SLRU(capacity, remember), PlainSLRU(capacity, remember)
    for key in keys:
        assert found.access(key) == policies.Access(*plain.access(key))
        assert found.segments() == (plain.probationary, plain.protected)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 12), max_size=80))
def test_lru_is_the_plain_one(capacity, keys):
    found, kept = policies.LRU(capacity), []
    for key in keys:
        hit = key in kept
        kept = [one for one in kept if one != key] + [key]
        evicted = kept.pop(0) if len(kept) > capacity else None
        assert found.access(key) == policies.Access(hit, evicted)


def test_pinned_by_hand():
    found = policies.Pinned(3, [["a", "b"], ["a", "c"], ["c"], ["a"]])
    assert [found.access(key) for key in "acbbda"] == [
        policies.Access(True), policies.Access(True), policies.Access(False), policies.Access(True),
        policies.Access(False, "b"),
        policies.Access(True),
    ]  # fmt: skip
    assert (len(found), "b" in found, "d" in found) == (3, False, True)


def fewest_misses(keys, capacity, kept=frozenset()):
    """Of every way to evict, as `Belady` may: the key just used stays."""

    @functools.cache
    def least(at, kept):
        if at == len(keys):
            return 0
        key = keys[at]
        if key in kept:
            return least(at + 1, kept)
        if len(kept) < capacity:
            return 1 + least(at + 1, kept | {key})
        return 1 + min(least(at + 1, kept - {victim} | {key}) for victim in kept)

    return least(0, kept)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 5), max_size=14).map(tuple), st.sets(st.integers(0, 5), max_size=4))
def test_the_oracle_has_the_fewest_misses_possible(capacity, keys, start):
    assume(len(start) <= capacity)
    oracle = policies.Belady(capacity, [[key] for key in keys], start)
    assert hits(oracle, keys).count(False) == fewest_misses(keys, capacity, frozenset(start))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), TRACES, TRACES)
def test_no_policy_beats_the_oracle(capacity, trace, first):
    rates = {name: policies.replay(name, capacity, trace, first) for name in policies.POLICIES}
    assert all(one.hits <= rates["belady"].hits for one in rates.values())
    bypassed = sum(len(dispatch) for dispatch in trace if len(dispatch) > capacity)
    assert {(one.accesses, one.bypassed) for one in rates.values()} == {(sum(map(len, trace)), bypassed)}


@pytest.mark.parametrize("policy", policies.POLICIES)
@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 6), trace=TRACES)
def test_a_cache_holds_what_it_says(policy, capacity, trace):
    keys = [key for dispatch in trace for key in dispatch]
    found = policies.make(policy, capacity, trace, trace)
    held = {key for key in range(8) if key in found}
    for key in keys:
        access = found.access(key)
        assert access.hit == (key in held)
        assert access.evicted is None or access.evicted in held - {key}
        held = (held | {key}) - {access.evicted}
        assert held == {key for key in range(8) if key in found}
        assert len(held) == len(found) <= capacity


@pytest.mark.parametrize("policy", policies.POLICIES)
@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 6), trace=TRACES)
def test_hits_of_many_keys_are_those_of_each(policy, capacity, trace):
    keys = [key for dispatch in trace for key in dispatch]
    at_once, one_by_one = (policies.make(policy, capacity, trace, trace) for _ in range(2))
    at = 0
    while at < len(keys):
        until = at_once.hits(keys, at)
        assert all(one_by_one.access(key) == policies.HIT for key in keys[at:until])
        assert all((key in at_once) == (key in one_by_one) for key in range(8))
        if until < len(keys):
            found = at_once.access(keys[until])
            assert not found.hit
            assert one_by_one.access(keys[until]) == found
        at = until + 1


def test_a_dispatch_larger_than_the_cache_goes_past_it():
    trace = [["a", "b"], ["a", "b", "c"], ["b", "a"]]
    assert policies.replay("lru", 2, trace) == policies.Replay(7, 2, 3)
    assert policies.replay("lru", 3, trace) == policies.Replay(7, 4, 0)
    assert policies.replay("lru", 2, trace).hit_rate == 2 / 7
    assert math.isnan(policies.replay("lru", 2, []).hit_rate)
    assert [policies.bypasses(trace[1], capacity) for capacity in (2, 3)] == [True, False]


def test_frequency_by_hand():
    assert policies.most_frequent([["a", "b"], ["c", "b"], ["c"]], 2) == ["b", "c"]


@pytest.mark.parametrize("make", [policies.uniform, policies.zipf, policies.local], ids=["uniform", "zipf", "local"])
def test_a_trace_has_different_experts_and_repeats(make):
    found = make(5, 3, 10, 4, seed=1)
    assert [{layer for layer, _ in dispatch} for dispatch in found] == [{0}, {1}, {2}] * 5
    assert all(len(set(dispatch)) == 4 and all(0 <= e < 10 for _, e in dispatch) for dispatch in found)
    assert found == make(5, 3, 10, 4, seed=1) != make(5, 3, 10, 4, seed=2)
    assert make(0, 3, 10, 4) == []
    assert [sorted(e for _, e in dispatch) for dispatch in make(2, 1, 4, 4)] == [[0, 1, 2, 3]] * 2
    with pytest.raises(ValueError, match="top_k is 5; allowed: 1 to 4, the experts"):
        make(1, 1, 4, 5)


def shares(trace):
    """Of each expert of layer 0, the largest first."""
    counts = Counter(expert for dispatch in trace for layer, expert in dispatch if layer == 0)
    return [count / sum(counts.values()) for _, count in counts.most_common()]


def test_traces_are_as_skewed_as_they_say():
    assert shares(policies.uniform(4000, 1, 20, 1))[0] < 0.07
    found = shares(policies.zipf(8000, 1, 20, 1))
    assert found[:2] == pytest.approx([1 / sum(1 / r for r in range(1, 21)) / r for r in (1, 2)], rel=0.1)
    steep = policies.zipf(50, 2, 16, 4, exponent=1000.0)  # 3^-1000 is no float
    assert [{e for _, e in dispatch} for dispatch in steep] == [{e for _, e in dispatch} for dispatch in steep[:2]] * 50
    assert {e for _, e in steep[0]} != {e for _, e in steep[1]}  # each layer has its own order


def test_local_traces_stay():
    def kept(stay):
        found = [set(dispatch) for dispatch in policies.local(2000, 1, 200, 4, stay, exponent=0.0)]
        return sum(len(a & b) for a, b in pairwise(found)) / (4 * 1999)

    assert kept(1.0) == 1
    assert kept(0.7) == pytest.approx(0.7 + 0.3 * 4 / 200, abs=0.02)
    assert kept(0.0) == pytest.approx(4 / 200, abs=0.01)
    with pytest.raises(ValueError, match=r"stay is 1.5; allowed: 0 to 1"):
        policies.local(1, 1, 4, 2, stay=1.5)


def test_tokens_together_by_hand():
    trace = [["a", "b"], ["A"], ["b", "c"], ["B"], ["a", "d"], ["A"]]  # three tokens, two layers
    assert policies.batched(trace, 2, 2) == [["a", "b", "c"], ["A", "B"], ["a", "d"], ["A"]]
    assert policies.batched(trace, 1, 2) == trace
    assert policies.batched([], 4, 2) == []
    for tokens, layers in ((0, 2), (1, 4), (1, 0)):
        with pytest.raises(ValueError, match=f"trace is 6 dispatches of {layers} layers, {tokens} tokens together; al"):
            policies.batched(trace, tokens, layers)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: policies.make("fifo", 1), "policy is 'fifo'; allowed: lru, slru, slru_freq, pinned, belady"),
        *[
            (lambda name=name: policies.make(name, 0), "capacity is 0; allowed: at least 1 expert")
            for name in policies.POLICIES
        ],
        (lambda: policies.Belady(1, [], "ab"), "start has 2 keys; allowed: at most 1, the capacity"),
        (
            lambda: policies.Belady(1, [["a"]]).access("b"),
            "access 0 is of 'b'; allowed: the trace that the oracle was made with",
        ),
    ],
)
def test_what_a_cache_cannot_do_is_named(call, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the whole message is compared)
        call()
    assert str(raised.value) == message
