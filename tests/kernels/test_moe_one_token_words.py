"""One token's INT4 layer by words against float64; the same bits in every run."""

from dataclasses import replace

import pytest
import torch
from expert_layers import inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.bench.spec import Case
from labkit.moe_persistent_grid import choose, expert_layer, kernels, names, reference, study
from labkit.moe_persistent_grid.choose import Rows, Words

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def layer(x, rows=None):
    _, E, top_k, H, width = x.shape
    rows = choose.by_words(top_k, width) if rows is None else rows
    return expert_layer.layer(x, replace(choose.rule(1, E, top_k, H, width, True), rows=rows))


def errors(x, rows=None):
    x.out.fill_(float("nan"))
    layer(x, rows)()
    return reference.errors(x.out, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2))


@settings(max_examples=4 if DEVICE == "cpu" else 100, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 3), st.sampled_from((128, 384)), st.sampled_from((128, 256)),
    st.sampled_from(choose.WORDS_UP[2:]), st.sampled_from(choose.WORDS_DOWN[2:]), st.sampled_from(choose.WORDS_K),
    st.sampled_from(choose.WORDS_K), st.sampled_from((1, 4)), st.integers(0, 99),
)  # fmt: skip
def test_any_one_token_by_words(experts, top_k, hidden, width, up, down, block_k, down_k, num_warps, seed):
    x = inputs(1, experts, min(top_k, experts), hidden, width, DEVICE, True, seed=seed)
    found = errors(x, Words(up, down, block_k, num_warps, down_k))
    assert found.ok
    assert found.rms < 2e-4  # what starting from 2056 times x costs


def test_one_value_a_program(device):
    assert errors(inputs(1, 1, 1, 128, 128, device, True, empty=0), Words(1, 1, 128, 1, 128)).ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_activations(dtype, device):
    found = errors(inputs(1, 3, 2, 256, 128, device, True, dtype=dtype))
    # The interpreter cuts bf16 values off instead of rounding them.
    assert found.rms < reference.RMS_TOLERANCE * (2 if dtype == torch.bfloat16 and device == "cpu" else 1)
    assert found.largest < reference.MAX_TOLERANCE


@pytest.mark.parametrize("nibble", [0, 7, 8, 15])
def test_every_nibble_and_a_mean_that_is_not_zero(nibble, device):
    x = inputs(1, 1, 1, 128, 128, device, True, empty=0)
    x.x.abs_().add_(1.0)
    for w in (x.w1, x.w2):
        w.packed[0].fill_(nibble * 17)
    found = errors(x)
    if nibble == 8:  # weights of zero: what is left of sums that begin at 2056 times x
        assert x.out.abs().max() < 1e-5
    else:
        assert found.rms < reference.RMS_TOLERANCE / 10


def test_slots_without_an_expert_add_nothing(device):
    x = inputs(1, 6, 4, 128, 128, device, True)
    x.ids[0, 1] = -1
    x.ids[0, 3] = 6
    assert errors(x).ok
    x.ids.fill_(-1)
    errors(x)
    assert not x.out.any()


def test_two_runs_have_the_same_bits(device):
    x = inputs(1, 6, 2, 128, 256, device, True)
    made = layer(x)
    assert list(made.launches) == ["gemm1", "gemm2"]
    made()
    first = x.out.clone()
    x.out.fill_(float("nan"))
    made()
    assert torch.equal(first.view(torch.int32), x.out.view(torch.int32))


def test_ids_may_be_of_64_bits_and_change_between_calls(device):
    x = inputs(1, 6, 2, 128, 128, device, True)
    x = replace(x, ids=x.ids.long())
    made = layer(x)
    for ids in ([0, 1], [5, 2]):
        x.ids.copy_(torch.tensor([ids]))
        made()
        assert reference.errors(x.out, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2)).ok


def test_activations_may_begin_anywhere(device):
    x = inputs(1, 3, 2, 128, 128, device, True, dtype=torch.bfloat16)
    moved = replace(x, x=torch.zeros(1, 129, dtype=torch.bfloat16, device=device)[:, 1:].copy_(x.x))
    assert [layer(one).launches["gemm1"].args["FOUR"] for one in (x, moved)] == [True, False]
    assert layer(moved).launches["gemm2"].args["FOUR"]
    errors(x)
    errors(moved)
    assert torch.equal(x.out, moved.out)  # one tensor for both


def test_what_it_cannot_take_is_named(device):
    with pytest.raises(ValueError, match=r"config.rows is Words\(.*\), INT4 weights: False; allowed: Words, with INT4"):
        layer(inputs(1, 3, 2, 128, 128, device), Words())
    with pytest.raises(ValueError, match=r"config.rows is Words\(.*\) with 2 tokens; allowed: only for one token"):
        layer(inputs(2, 3, 2, 128, 128, device, True), Words())
    x = inputs(1, 3, 2, 128, 128, device, True)
    for changed, message in (({"up": 16}, "rows.up is 16; allowed: 1, 2"), ({"down_k": 64}, "rows.down_k is 64")):
        with pytest.raises(ValueError, match=message):
            layer(x, Words(**changed))
    with pytest.raises(ValueError, match=r"config.rows is Words\(.*\); allowed here: Rows"):
        kernels.layer(x, replace(choose.rule(1, 3, 2, 128, 128, True), rows=Words()))
    short = replace(kernels.workspace(x), hidden=x.x.new_empty(8))
    with pytest.raises(ValueError, match=r"scratch.hidden is 8 values"):
        expert_layer.layer(x, replace(choose.rule(1, 3, 2, 128, 128, True), rows=Words()), short)


def test_other_layers_are_those_of_their_own_kernels(device):
    for tokens, rows in ((1, Rows), (2, type(None))):
        x = inputs(tokens, 3, 2, 128, 128, device, True)
        made = expert_layer.layer(x)
        assert type(made.config.rows) is rows
        made()
        first = x.out.clone()
        kernels.layer(x)()
        assert torch.equal(first, x.out)


@pytest.mark.parametrize("name", [names.WORDS, names.BYTES])
def test_the_study_times_both_for_one_token_of_int4(name):
    shape = {"model": "tiny", "E": 3, "H": 128, "I": 128, "top_k": 2, "T": 1, "routing": "zipf 1"}
    shape["activations"] = "fp32"
    x = Case("layer", shape | {"weights": "INT4"})
    (variant,) = (one for one in study.variants(x) if one.name == name)
    found = variant.prepare(x, DEVICE, 2, 0)
    found.poison()
    assert not found.written()
    for call in found.calls:
        call()
    assert found.written()
    assert all(error <= found.tolerance[name] for name, error in found.check().items())
    assert ("down_k" in found.facts()["config"]["rows"]) == (name == names.WORDS)
    for other in (Case("layer", shape | {"weights": "fp32"}), Case("layer", shape | {"weights": "INT4", "T": 5})):
        assert name not in study.roles(other)
