"""The plain kernels of the machine study on odd sizes, and every variant of every study on its tiny cases."""

import pytest
import torch

from labkit import registry
from labkit.kernels import ceilings
from labkit.sweep.correctness import check_here


@pytest.mark.parametrize("n", [1, 31, 8191, 8192, 8193, 40_000])
def test_read_in_place_and_copy(n, device):
    x = torch.randn(n, device=device, generator=torch.Generator(device).manual_seed(n))
    partial = torch.full((-(-n // ceilings.BLOCK),), float("nan"), device=device)
    ceilings.read(x, partial)()
    assert torch.allclose(partial.double().sum(), x.double().sum(), rtol=1e-4, atol=1e-3)
    y = torch.full((n + 8,), float("nan"), device=device)
    ceilings.copy(x, y[:n])()
    assert torch.equal(y[:n], x)
    assert y[n:].isnan().all()  # nothing past the end
    before = x.clone()
    ceilings.in_place(x, -1.0)()
    assert torch.equal(x, -before)
    ceilings.empty(x)()
    assert torch.equal(x, -before)


def test_an_empty_tensor_is_refused(device):
    with pytest.raises(ValueError, match="0 values; allowed: at least 1"):
        ceilings.in_place(torch.empty(0, device=device), 1.0)


@pytest.mark.parametrize("name", list(registry.NOTEBOOKS))
def test_every_variant_on_tiny_cases(name, device):
    rows = check_here(name, interpreted=device == "cpu")
    assert set(rows["case"]) == {case.key for case in registry.load(name).tiny}
    assert rows["ok"].all(), rows[~rows["ok"]]
