"""One token's INT4 layer by words against float64; the same bits in every run."""

from dataclasses import replace

import pytest
import torch
from expert_layers import inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.bench.spec import Case
from labkit.kernels.experts import choose, expert_layer, reference
from labkit.kernels.experts import inputs as experts_inputs
from labkit.kernels.experts.choose import RowChoice, WordChoice
from labkit.studies.moe_persistent_grid import study, variants

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def layer(x, rows=None):
    _, E, top_k, H, width = x.shape
    rows = choose.by_words(top_k, width) if rows is None else rows
    return expert_layer.layer(x, replace(choose.rule(1, E, top_k, H, width, True), rows=rows))


def errors(x, rows=None):
    x.out.fill_(float("nan"))
    layer(x, rows)()
    return reference.errors(x.out, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((2, 1, 384, 128), WordChoice(4, 8, 256, 4, 8192)),  # of the first launch three units, in blocks of two
        ((5, 1, 128, 256), WordChoice(2, 4, 128, 1, 2048)),
        ((1, 1, 128, 128), WordChoice(1, 1, 128, 1, 128)),  # a value a program
    ],
)
def test_one_token_by_words(sizes, words, device):
    E, top_k, hidden, width = sizes
    found = errors(inputs(1, E, top_k, hidden, width, device, True, empty=min(1, E - top_k)), words)
    assert found.ok
    assert found.rms < 2e-4  # what starting from 2056 times x costs


@settings(max_examples=1 if DEVICE == "cpu" else 100, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 3), st.sampled_from((128, 384)), st.sampled_from((128, 256)),
    st.sampled_from(choose.WORDS_UP[2:]), st.sampled_from(choose.WORDS_DOWN[2:]), st.sampled_from(choose.WORDS_K),
    st.sampled_from(choose.WORDS_K), st.sampled_from((1, 4)), st.integers(0, 99),
)  # fmt: skip
def test_any_one_token_by_words(experts, top_k, hidden, width, up, down, block_k, down_k, num_warps, seed):
    x = inputs(1, experts, min(top_k, experts), hidden, width, DEVICE, True, seed=seed)
    found = errors(x, WordChoice(up, down, block_k, num_warps, down_k))
    assert found.ok
    assert found.rms < 2e-4


def test_activations_of_16_bits_that_begin_anywhere(device):
    """fp16; bf16, loaded as words of four where they can be."""
    half, x = (inputs(1, 2, 1, 128, 128, device, True, dtype=dtype) for dtype in (torch.float16, torch.bfloat16))
    moved = replace(x, x=torch.zeros(1, 129, dtype=torch.bfloat16, device=device)[:, 1:].copy_(x.x))
    assert [layer(one).launches["gemm1"].args["FOUR"] for one in (half, x, moved)] == [False, True, False]
    assert layer(moved).launches["gemm2"].args["FOUR"]
    outs = []
    for one in (half, x, moved):
        found = errors(one)
        # The interpreter cuts bf16 values off instead of rounding them.
        cut = one is not half and device == "cpu"
        assert found.rms < reference.RMS_TOLERANCE * (2 if cut else 1)
        assert found.largest < reference.MAX_TOLERANCE
        outs.append(one.out.clone())
    assert torch.equal(*outs[1:])  # so two runs have the same bits, however x is loaded


@pytest.mark.parametrize(("up", "down"), [(0, 15), (15, 7), (7, 8)])
def test_every_nibble_and_a_mean_that_is_not_zero(up, down, device):
    x = inputs(1, 1, 1, 128, 128, device, True, empty=0)
    x.x.abs_().add_(1.0)
    for w, nibble in ((x.w1, up), (x.w2, down)):
        w.packed[0].fill_(nibble * 17)
    found = errors(x)
    if down == 8:  # weights of zero: what is left of sums that begin at 2056 times x
        assert x.out.abs().max() < 1e-5
    else:
        assert found.rms < reference.RMS_TOLERANCE / 10


def test_slots_without_an_expert_add_nothing(device):
    """Of the second launch three units, in blocks of two; one without an expert. Then none at all."""
    x = inputs(1, 4, 3, 128, 128, device, True)
    x.ids[0, 1] = -1
    found = errors(x, WordChoice(8, 16, 8192, 8, 256))
    assert found.ok
    assert found.rms < 2e-4
    alone = inputs(1, 6, 1, 128, 128, device, True)
    alone.ids.fill_(6)
    errors(alone)
    assert not alone.out.any()


def test_ids_may_be_of_64_bits_and_change_between_calls(device):
    x = inputs(1, 6, 1, 128, 128, device, True)
    x = replace(x, ids=x.ids.long())
    made = layer(x)
    assert list(made.launches) == ["gemm1", "gemm2"]
    for expert in (0, 5):
        x.ids.fill_(expert)
        x.out.fill_(float("nan"))
        made()
        assert reference.errors(x.out, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2)).ok


def test_what_it_cannot_take_is_named(device):
    with pytest.raises(
        ValueError, match=r"config.rows is WordChoice\(.*\); allowed: WordChoice only with INT4 weights"
    ):
        layer(inputs(1, 3, 2, 128, 128, device), WordChoice())
    with pytest.raises(ValueError, match=r"config.rows is WordChoice\(.*\) with 2 tokens; allowed: only for one token"):
        layer(inputs(2, 3, 2, 128, 128, device, True), WordChoice())
    x = inputs(1, 3, 2, 128, 128, device, True)
    for changed, message in (({"up": 16}, "rows.up is 16; allowed: 1, 2"), ({"down_k": 64}, "rows.down_k is 64")):
        with pytest.raises(ValueError, match=message):
            layer(x, WordChoice(**changed))
    short = replace(experts_inputs.workspace(x), hidden=x.x.new_empty(8))
    with pytest.raises(ValueError, match=r"scratch.hidden is 8 values"):
        expert_layer.layer(x, replace(choose.rule(1, 3, 2, 128, 128, True), rows=WordChoice()), short)


def test_other_layers_are_those_of_their_own_kernels(device):
    for tokens, rows in ((1, RowChoice), (2, type(None))):
        x = inputs(tokens, 2, 1, 128, 128, device, True)
        made = expert_layer.layer(x)
        assert type(made.config.rows) is rows
        made()
        first = x.out.clone()
        expert_layer.layer(x, choose.choose(*x.shape, True, x.x.device))()
        assert torch.equal(first, x.out)


@pytest.mark.parametrize("name", [variants.WORDS, variants.BYTES])
def test_the_study_times_both_for_one_token_of_int4(name):
    shape = {"model": "tiny", "E": 3, "H": 128, "I": 128, "top_k": 1, "T": 1, "routing": "zipf 1"}
    shape["activations"] = "fp32"
    x = Case("layer", shape | {"weights": "INT4"})
    (variant,) = (one for one in study.STUDY.variants(x) if one.name == name)
    found = variant.prepare(x, DEVICE, 1, 0)
    found.poison()
    assert not found.written()
    assert all(error <= found.tolerance[name] for name, error in found.check().items())
    assert found.written()
    assert ("down_k" in found.facts()["config"]["rows"]) == (name == variants.WORDS)
    for other in (Case("layer", shape | {"weights": "fp32"}), Case("layer", shape | {"weights": "INT4", "T": 5})):
        assert name not in [line.name for line in variants.lines(other)]
