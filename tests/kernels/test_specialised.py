"""INT4 products by specialised warps: the order in which tokens are gathered, and what cannot run."""

import pytest
import torch
from expert_layers import inputs

from labkit.kernels.experts import specialised
from labkit.kernels.launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_tokens_are_gathered_in_the_order_of_the_words():
    """Column 16 (2 j + i // 2) + 8 (i % 2) + 2 t + h of 128 is 32 t + 8 j + 4 h + i; padding has the last token."""
    x = torch.arange(3 * 256, device=DEVICE).view(3, 256).to(torch.bfloat16)
    slots = torch.tensor([4, 0, 6, 6, 3, 6, 6, 6], dtype=torch.int32, device=DEVICE)  # of three tokens, two each
    out = torch.full((8, 256), -1.0, dtype=torch.bfloat16, device=DEVICE)
    padded = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    args = {"x": x, "slots": slots, "padded": padded, "out": out, "slot_count": 6, "K": 256, "TOP_K": 2}
    args |= {"SIDE": 4, "BLOCK": 128, "DEPENDENT": False}
    Launch(specialised._gather_kernel, (2, 2), args)()
    order = [
        32 * t + 8 * j + 4 * h + 2 * upper + lower
        for j in range(4) for upper in range(2) for lower in range(2) for t in range(4) for h in range(2)
    ]  # fmt: skip
    assert sorted(order) == list(range(128))
    wanted = x[torch.tensor([2, 0, 2, 2, 1])].view(5, 2, 128)[..., order].reshape(5, 256)
    assert torch.equal(out[:5], wanted)
    assert (out[5:] == -1).all()


@pytest.mark.parametrize(
    ("T", "top_k", "experts", "wanted"),
    [(16, 2, 8, 16), (32, 2, 8, 16), (64, 2, 8, 32), (128, 2, 8, 64), (512, 2, 8, 64), (128, 8, 256, 16)],
)
def test_blocks_hold_what_an_expert_has_by_uniform_routing(T, top_k, experts, wanted):
    assert specialised.blocks_of(T, top_k, experts).block_m == wanted


def test_what_cannot_run_is_named():
    x = inputs(3, 3, 2, 256, 256, "cpu", True, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"x is on cpu; allowed: a GPU of compute capability 9.0 \(Hopper\)"):
        specialised.by_specialised_warps(x)
    with pytest.raises(ValueError, match=r"x is torch.float32; allowed: torch.bfloat16"):
        specialised.by_specialised_warps(inputs(3, 3, 2, 256, 256, "cpu", True))
    with pytest.raises(ValueError, match="x has 1 token; allowed: at least 2"):
        specialised.by_specialised_warps(inputs(1, 3, 2, 256, 256, "cpu", True, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="the weights are not INT4; allowed: INT4"):
        specialised.by_specialised_warps(inputs(3, 3, 2, 256, 256, "cpu", dtype=torch.bfloat16))
