"""Products of K formats by specialised warps: what they are compiled to for Hopper; on a GPU, against float64."""

import pytest
import torch

from labkit.evidence import compiled
from labkit.kernels.gguf import formats, integers, specialised
from labkit.kernels.gguf.specialised import WarpChoice, by_specialised_warps
from labkit.kernels.offline import offline


def weights(rows, columns, format, device="cpu"):
    generator = torch.Generator().manual_seed(5)
    return formats.quantise(torch.randn(rows, columns, generator=generator), format).to(device)


def product(N, format="Q4_K", rows=512, columns=512, **choice):
    x = torch.zeros(N, columns, dtype=torch.bfloat16)
    W = formats.pack(weights(rows, columns, format), format)
    return by_specialised_warps(W, x, x.new_empty(N, rows), WarpChoice(**choice) if choice else None)


@pytest.mark.parametrize("format", formats.K_FORMATS)
@pytest.mark.parametrize("N", specialised.TOKENS)
def test_weights_stay_in_their_lane_and_in_registers(N, format):
    with offline(90):
        launches = product(N, format)
        found = compiled.evidence(launches[-1])
    assert len(launches) == (1 if N <= specialised.MAKES else 2)
    # sixteen of 16 columns a stage, and one for its minima
    ways = launches[-1].args["WAYS"]
    assert sum(found["matrix"].values()) == ways * (16 if format == "Q6_K" else 17)
    assert all(name.startswith("HGMMA") for name in found["matrix"])
    assert found["spill_bytes"] <= 160


def test_what_cannot_be_compiled_is_named():
    with offline(90):
        with pytest.raises(ValueError, match="ways is 3; allowed: 2"):
            product(32, tokens=32, ways=3)
        with pytest.raises(ValueError, match="tokens is 24; allowed: 8, 16, 32, 64"):
            product(24, tokens=24)
        with pytest.raises(ValueError, match="stages is 9; allowed: 2, 3, 4, 5"):
            product(8, stages=9)
    with offline(80), pytest.raises(ValueError, match=r"on compute capability 8.0; allowed: .* 9.0 \(Hopper\)"):
        product(8)


@pytest.mark.gpu
@pytest.mark.parametrize("format", formats.K_FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(40, 256), (1000, 2560), (5120, 17408)])
def test_products_are_right_and_those_of_a_token_do_not_depend_on_others(rows, columns, format):
    """Twenty times the same; and other products leave other bits."""
    raw = weights(rows, columns, format, "cuda")
    W, dense = formats.pack(raw, format), formats.dequantise(raw, format).double()
    x = torch.randn(150, columns, device="cuda").to(torch.bfloat16)
    x[3] *= 2.0**100
    x[4] *= 2.0**-100
    expected = x.double() @ dense.T
    for tokens in specialised.TOKENS:
        choice = specialised.warp_rule(tokens, format)
        found = []
        for N in (tokens, max(1, tokens - 3), 1):
            y = x.new_empty(N, rows)
            launches = by_specialised_warps(W, x[:N], y, choice)
            for _ in range(20):
                y.fill_(float("nan"))
                for launch in launches:
                    launch()
                found.append(y.clone())
            error = (y.double() - expected[:N]).norm(dim=1) / expected[:N].norm(dim=1)
            assert error.max() < 6e-3
        assert all(torch.equal(found[0][: len(one)], one) for one in found[1:])
        y = x.new_empty(tokens, rows)
        integers.integers(integers.tiled(W), x[:tokens], y)()
        assert rows * tokens < 1000 or not torch.equal(y, found[0])
    y = x.new_empty(len(x), rows)
    for launch in by_specialised_warps(W, x, y):
        launch()
    error = (y.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("ways", [2, 3])
def test_x_made_by_its_warps_has_the_bits_of_x_made_before(ways, monkeypatch):
    raw = weights(1000, 2560, "Q4_K", "cuda")
    W = formats.pack(raw, "Q4_K")
    x = torch.randn(16, 2560, device="cuda").to(torch.float16)
    made = x.new_empty(16, 1000, dtype=torch.float32)
    [launch] = by_specialised_warps(W, x, made, WarpChoice(16, 2, 3))
    launch()
    monkeypatch.setattr(specialised, "MAKES", 8)
    before = torch.empty_like(made)
    for launch in by_specialised_warps(W, x, before, WarpChoice(16, 2, 3)):
        launch()
    assert torch.equal(made, before)
    if ways == 3:  # other rows to a program, and so other cuts
        other = by_specialised_warps(W, x[:8], before[:8], WarpChoice(8, 3, 3))
        other[0]()
        assert not torch.equal(made[:8], before[:8])
