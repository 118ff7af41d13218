"""Products of K formats by specialised warps: how x is made before, which choice is made, and what cannot run."""

import math

import pytest
import torch

from labkit.kernels.gguf import formats, specialised
from labkit.kernels.launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prepared(x, tokens):
    """values, totals and factors of x, made by the kernel."""
    [launch], boxes = specialised._prepared(x, tokens)
    Launch(launch.kernel, launch.grid, {**launch.args, "DEPENDENT": False})()
    return tuple(boxes[name].base for name in ("values", "totals", "factors"))


@pytest.mark.parametrize(("N", "K", "tokens"), [(3, 256, 8), (9, 1280, 8), (5, 512, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_x_is_made_in_the_order_of_the_words_with_sums_of_groups(N, K, tokens, dtype):
    """Column 32 (2 t + c) + 16 b + 8 h + 4 i + j of 256 is at 16 (8 c + 2 j + h) + 8 i + 2 t + b."""
    x = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    x[0] *= 2.0**-20
    x[1, :256] = 0
    values, totals, factors = prepared(x, tokens)
    order = [
        32 * (2 * t + c) + 16 * b + 8 * h + 4 * i + j
        for c in range(2) for j in range(4) for h in range(2) for i in range(2) for t in range(4) for b in range(2)
    ]  # fmt: skip
    assert sorted(order) == list(range(256))
    padded = len(values)
    assert padded == -(-N // tokens) * tokens
    factors = factors.view(padded // tokens, K // 256, tokens).transpose(1, 2).reshape(padded, K // 256)[:N].double()
    wanted = x.view(N, K // 256, 256).double()
    made = values[:N].view(N, K // 256, 256).double() * factors[..., None]
    assert torch.equal(made, wanted[..., order])
    largest = (wanted.abs().amax(-1) / factors)[wanted.abs().amax(-1) > 0]
    assert ((largest >= 512) & (largest < 1024)).all()
    sums = totals[:N].view(N, K // 256, 2, 8).double().sum(2) * factors[..., None]
    exact = wanted.view(N, K // 256, 8, 32).sum(-1)
    assert ((sums - exact).abs() <= 2.0**-20 * wanted.abs().sum(-1, keepdim=True)).all()
    assert (values[N:] == 0).all()
    assert (totals[N:] == 0).all()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2.0**127, 2.0**-120])
def test_values_at_the_ends_of_their_range(value):
    """What is not finite stays so; else the largest is brought to 512, or as near as a power of two goes."""
    x = torch.zeros(1, 256, dtype=torch.bfloat16, device=DEVICE)
    x[0, 7] = value
    values, _, factors = prepared(x, 8)
    back = values[0].double().sum() * factors[0, 0].double()
    assert torch.isfinite(back) == math.isfinite(value)
    assert back == value or not math.isfinite(value)


def test_programs_hold_the_tokens_and_three_warpgroups_while_registers_are_enough():
    chosen = [specialised.warp_rule(n) for n in (1, 8, 9, 16, 17, 64, 512)]
    assert [one.tokens for one in chosen] == [8, 8, 16, 16, 32, 64, 64]
    assert [one.ways for one in chosen] == [3, 3, 2, 2, 2, 2, 2]


def test_what_cannot_run_is_named():
    def run(format="Q4_K", dtype=torch.bfloat16):
        W = formats.pack(formats.quantise(torch.zeros(8, 256), format), format)
        x = torch.zeros(2, 256, dtype=dtype)
        specialised.by_specialised_warps(W, x, x.new_empty(2, 8))

    with pytest.raises(ValueError, match=r"x is on cpu; allowed: a GPU of compute capability 9.0 \(Hopper\)"):
        run()
    with pytest.raises(ValueError, match=r"x is torch.float32; allowed: torch.bfloat16, torch.float16"):
        run(dtype=torch.float32)
    with pytest.raises(ValueError, match="format is 'Q8_0'; allowed: Q4_K, Q5_K, Q6_K"):
        run("Q8_0")
