"""INT4 products of few rows by fragments, against float64; their bits, which depend on no choice of how they run."""

import pytest
import torch
from expert_layers import inputs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from labkit.kernels.experts import few_rows, reference

SMALL = few_rows.FewChoice(1, 1, 1)


def run(x, up=SMALL, down=SMALL):
    x.out.fill_(float("nan"))
    few_rows.by_few_rows(x, None, up, down)()
    return x.out.clone()


@example(18, (3, 2), 384, "one expert", 1)  # more than eight tokens of a block
@settings(max_examples=2, deadline=None)
@given(
    st.integers(2, 18), st.sampled_from([(3, 2), (4, 1)]), st.just(128),
    st.sampled_from(["uniform", "zipf 1", "one expert"]), st.integers(0, 99),
)  # fmt: skip
def test_the_layer_is_right(T, experts, H, kind, seed):
    x = inputs(T, *experts, H, 128, "cpu", True, kind, torch.bfloat16, seed)
    found = reference.errors(run(x), reference.layer(x.x, x.ids, x.weights, x.w1, x.w2, None))
    assert found.rms < 8e-3  # the interpreter rounds bf16 towards zero
    assert found.largest < 3e-2


def test_bits_are_the_same_for_every_choice():
    x = inputs(3, 2, 1, 256, 128, "cpu", True, "uniform", torch.bfloat16)
    sizes = (1, 1, 1), (2, 2, 2), (4, 8, 3)  # of the last more rows than there are
    choices = [few_rows.FewChoice(*size) for size in sizes]
    first, *others = [run(x, one, one) for one in choices]
    assert all(torch.equal(first, other) for other in others)


def test_bits_of_a_token_do_not_depend_on_how_many_the_expert_has():
    """Up to eight tokens of a block take one column of instructions, more of them two."""
    x = inputs(14, 2, 1, 128, 128, "cpu", True, "one expert", torch.bfloat16)
    whole = run(x)
    few = inputs(14, 2, 1, 128, 128, "cpu", True, "one expert", torch.bfloat16)
    few.ids[5:] = -1
    part = run(few)
    assert torch.equal(part[:5], whole[:5])
    assert whole[5:].any(dim=1).all()
    assert not part[5:].any()


def test_what_cannot_run_is_named():
    x = inputs(3, 3, 2, 128, 128, "cpu", True, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"fragments is 3; allowed: 1, 2, 4"):
        few_rows.by_few_rows(x, up=few_rows.FewChoice(3))
    with pytest.raises(ValueError, match=r"x is torch.float32; allowed: torch.bfloat16"):
        few_rows.by_few_rows(inputs(3, 3, 2, 128, 128, "cpu", True))
    with pytest.raises(ValueError, match="x has 1 token; allowed: at least 2"):
        few_rows.by_few_rows(inputs(1, 3, 2, 128, 128, "cpu", True, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="the weights are not INT4; allowed: INT4"):
        few_rows.by_few_rows(inputs(3, 3, 2, 128, 128, "cpu", dtype=torch.bfloat16))
