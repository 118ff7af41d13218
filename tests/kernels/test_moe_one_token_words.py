"""One token's INT4 layer by words against float64; the same bits in every run."""

from dataclasses import asdict

import pytest
import torch
from expert_layers import inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.bench.spec import Case
from labkit.moe_persistent_grid import choose, names, one_token_words, reference, study
from labkit.moe_persistent_grid.choose import Rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def errors(x, rows=None):
    x.out.fill_(float("nan"))
    one_token_words.layer(x, rows)()
    return reference.errors(x.out, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2))


@settings(max_examples=4 if DEVICE == "cpu" else 100, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 3), st.sampled_from((128, 384)), st.sampled_from((128, 256)),
    st.sampled_from(one_token_words.UP[2:]), st.sampled_from(one_token_words.DOWN[2:]), st.sampled_from(choose.ROWS_K),
    st.sampled_from((1, 4)), st.integers(0, 99),
)  # fmt: skip
def test_any_one_token_by_words(experts, top_k, hidden, width, up, down, block_k, num_warps, seed):
    x = inputs(1, experts, min(top_k, experts), hidden, width, DEVICE, True, seed=seed)
    found = errors(x, Rows(up, down, block_k, num_warps))
    assert found.ok
    assert found.rms < 2e-4  # what starting from 2056 times x costs


def test_one_value_a_program(device):
    assert errors(inputs(1, 1, 1, 128, 128, device, True, empty=0), Rows(1, 1, 128, 1)).ok


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
    made = one_token_words.layer(x)
    assert list(made.launches) == ["gemm1", "gemm2"]
    made()
    first = x.out.clone()
    x.out.fill_(float("nan"))
    made()
    assert torch.equal(first.view(torch.int32), x.out.view(torch.int32))


def test_ids_may_be_of_64_bits_and_change_between_calls(device):
    x = inputs(1, 6, 2, 128, 128, device, True)
    x = one_token_words.replace(x, ids=x.ids.long())
    made = one_token_words.layer(x)
    for ids in ([0, 1], [5, 2]):
        x.ids.copy_(torch.tensor([ids]))
        made()
        assert reference.errors(x.out, reference.layer(x.x, x.ids, x.weights, x.w1, x.w2)).ok


def test_what_it_cannot_take_is_named(device):
    with pytest.raises(ValueError, match=r"w1 is torch.float32; allowed: INT4"):
        one_token_words.layer(inputs(1, 3, 2, 128, 128, device))
    with pytest.raises(ValueError, match="x has 2 tokens; allowed: one"):
        one_token_words.layer(inputs(2, 3, 2, 128, 128, device, True))
    x = inputs(1, 3, 2, 128, 128, device, True)
    for changed, message in (({"up": 16}, "rows.up is 16; allowed: 1, 2"), ({"block_k": 64}, "rows.block_k is 64")):
        with pytest.raises(ValueError, match=message):
            one_token_words.layer(x, Rows(**changed))
    x = inputs(1, 3, 2, 128, 128, device, True, dtype=torch.bfloat16)
    moved = torch.zeros(1, 129, dtype=torch.bfloat16, device=device)[:, 1:]
    with pytest.raises(ValueError, match="x begins 2 bytes after a multiple of 8; allowed: a multiple of 8"):
        one_token_words.layer(one_token_words.replace(x, x=moved))


def test_blocks_hold_few_units_that_there_are_not():
    found = {units: one_token_words._most(units, 32) for units in (1, 2, 3, 16, 32, 40, 48, 224)}
    assert found == {1: 1, 2: 2, 3: 1, 16: 16, 32: 32, 40: 16, 48: 16, 224: 32}


def test_the_study_times_it_for_one_token_of_int4():
    shape = {"model": "tiny", "E": 3, "H": 128, "I": 128, "top_k": 2, "T": 1, "routing": "zipf 1"}
    shape["activations"] = "fp32"
    x = Case("layer", shape | {"weights": "INT4"})
    (variant,) = (one for one in study.variants(x) if one.name == names.WORDS)
    found = variant.prepare(x, DEVICE, 2, 0)
    found.poison()
    assert not found.written()
    for call in found.calls:
        call()
    assert found.written()
    assert all(error <= found.tolerance[name] for name, error in found.check().items())
    assert found.facts()["config"]["rows"] == asdict(one_token_words.CHOICE)
    for other in (Case("layer", shape | {"weights": "fp32"}), Case("layer", shape | {"weights": "INT4", "T": 5})):
        assert names.WORDS not in study.roles(other)
