"""Products of BF16 matrices by continued sums: what they are compiled to for Hopper; on a GPU, bits and values."""

import compiled_once
import pytest
import torch

from labkit.kernels.gguf import continued
from labkit.kernels.gguf.continued import ContinuedChoice, by_continued_sums
from labkit.kernels.offline import offline

CHOICES = (
    ContinuedChoice(128, 6),
    ContinuedChoice(256, 4),
    ContinuedChoice(128, 8, 64),
    ContinuedChoice(64, 12, 64),
    ContinuedChoice(32, 16, 64),
)


def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_sums_stay_in_registers_and_instructions_are_as_wide_as_a_program(choice):
    with offline(90):
        launch = by_continued_sums(empty(1024, 512), empty(256, 512), empty(256, 1024), choice)
        found = compiled_once.evidence(launch, 90)
    # of each warpgroup four, of 16 columns each
    assert found["matrix"] == {f"HGMMA.64x{choice.rows}x16.F32.BF16": choice.tokens // 16}
    assert found["spill_bytes"] == 0
    assert found["shared_bytes"] <= 227 << 10


def test_what_cannot_be_compiled_is_named():
    def run(choice):
        by_continued_sums(empty(64, 64), empty(2, 64), empty(2, 64), choice)

    with offline(90):
        with pytest.raises(ValueError, match="rows is 16; allowed: 32, 64, 128, 256"):
            run(ContinuedChoice(16))
        with pytest.raises(ValueError, match="tokens is 32; allowed: 64, 128"):
            run(ContinuedChoice(tokens=32))
        with pytest.raises(ValueError, match=r"stages is 6; allowed: 2, 3, 4$"):
            run(ContinuedChoice(256, 6))
    with offline(80), pytest.raises(ValueError, match=r"on compute capability 8.0; allowed: .* 9.0 \(Hopper\)"):
        run(None)


def values(*shape):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).to(torch.bfloat16)


def run(W, x, choice=None, times=1):
    """y, and whether it had the same bits every time."""
    y, found = x.new_empty(len(x), len(W)), []
    launch = by_continued_sums(W, x, y, choice)
    for _ in range(times):
        y.fill_(float("nan"))
        launch()
        found.append(y.clone())
    assert all(torch.equal(found[0], one) for one in found)
    return found[0]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "K"), [(3000, 5120), (17408, 1024), (40, 72)])
def test_a_token_has_the_same_bits_in_every_batch_by_every_choice_on_any_number_of_multiprocessors(
    rows, K, monkeypatch
):
    """Five times each; where halves of K change places, sums are added in another order and have other bits."""
    W, x = values(rows, K), values(512, K)
    run(W, torch.full_like(x, float("nan")))  # what it leaves in shared memory must not matter
    first = run(W, x, CHOICES[0], 5)
    expected = x.double() @ W.double().T
    assert ((first.double() - expected).norm(dim=1) / expected.norm(dim=1)).max() < 6e-3
    for choice in (*CHOICES, ContinuedChoice(256, 2), None):
        for N in (512, 300, 128, 65, 5, 1):
            assert torch.equal(run(W, x[:N], choice, 5), first[:N])
    for processors in (1, 7, 30):
        monkeypatch.setattr(continued, "multiprocessors", lambda device, count=processors: count)
        assert torch.equal(run(W, x), first)
    turned = [torch.cat([one[:, K // 2 :], one[:, : K // 2]], 1).contiguous() for one in (W, x)]
    assert K < 1000 or not torch.equal(run(*turned), first)


@pytest.mark.gpu
def test_products_of_a_large_model_are_right():
    for rows, K in ((5120, 17408), (17408, 5120)):
        W, x = values(rows, K), values(512, K)
        expected = x.double() @ W.double().T
        y = run(W, x, times=3).double()
        assert ((y - expected).norm(dim=1) / expected.norm(dim=1)).max() < 6e-3
