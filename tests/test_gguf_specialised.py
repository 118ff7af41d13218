"""Products of K formats by specialised warps: what they are compiled to for Hopper; on a GPU, against float64."""

import compiled_once
import pytest
import torch

from labkit.kernels.gguf import formats, specialised
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
        found = compiled_once.evidence(launches[-1], 90)
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
        with pytest.raises(ValueError, match=r"stages is 5, of 54016 bytes each; allowed for Q4_K .*: at most 4"):
            product(64, tokens=64, ways=2, stages=5)
        [largest] = product(8, "Q6_K", tokens=8, ways=3, stages=5)
        assert 226 << 10 >= compiled_once.evidence(largest, 90)["shared_bytes"] > 215 << 10
        with pytest.raises(ValueError, match="columns is 256; allowed: at least 512"):
            product(8, columns=256)
    with offline(80), pytest.raises(ValueError, match=r"on compute capability 8.0; allowed: .* 9.0 \(Hopper\)"):
        product(8)


def run(W, x, y, choice=None):
    y.fill_(float("nan"))
    for launch in by_specialised_warps(W, x, y, choice):
        launch()
    return y


def errors(y, expected):
    return ((y.double() - expected).norm(dim=1) / expected.norm(dim=1)).max()


@pytest.mark.gpu
@pytest.mark.parametrize("format", formats.K_FORMATS)
def test_a_token_has_the_same_bits_in_every_batch_of_as_many_rows_a_program(format):
    """Twenty times each; with other rows to a program, sums are cut elsewhere and have other bits."""
    rows, columns, bound = 3000, 5120, 2e-4 if format == "Q6_K" else 1e-5
    raw = weights(rows, columns, format, "cuda")
    W, dense = formats.pack(raw, format), formats.dequantise(raw, format).double()
    x = torch.randn(150, columns, device="cuda").to(torch.bfloat16)
    x[3] *= 2.0**100
    x[4] *= 2.0**-100
    expected = x.double() @ dense.T
    for tokens in specialised.TOKENS:
        choice, found = WarpChoice(tokens, 2, 3), []
        for N in (tokens, tokens - 3, 1):
            y = x.new_empty(N, rows, dtype=torch.float32)
            launches = by_specialised_warps(W, x[:N], y, choice)
            for _ in range(20):
                y.fill_(float("nan"))
                for launch in launches:
                    launch()
                found.append(y.clone())
            assert errors(y, expected[:N]) < bound
        assert all(torch.equal(found[0][: len(one)], one) for one in found)
        if tokens <= specialised.MAKES:
            other = run(W, x[:tokens], torch.empty_like(found[0]), WarpChoice(tokens, 3, 2))
            assert errors(other, expected[:tokens]) < bound
            assert not torch.equal(other, found[0])
    assert errors(run(W, x, x.new_empty(len(x), rows)), expected) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(40, 512), (5120, 17408)])
def test_products_of_few_rows_and_of_many_are_right(rows, columns):
    raw = weights(rows, columns, "Q4_K", "cuda")
    W, dense = formats.pack(raw, "Q4_K"), formats.dequantise(raw, "Q4_K").double()
    x = torch.randn(8, columns, device="cuda").to(torch.bfloat16)
    assert errors(run(W, x, x.new_empty(8, rows)), x.double() @ dense.T) < 6e-3


@pytest.mark.gpu
def test_x_made_by_its_warps_has_the_bits_of_x_made_before(monkeypatch):
    W = formats.pack(weights(1000, 2560, "Q4_K", "cuda"), "Q4_K")
    x = torch.randn(16, 2560, device="cuda").to(torch.float16)
    made, before = (x.new_empty(16, 1000, dtype=torch.float32) for _ in range(2))
    run(W, x, made, WarpChoice(16, 2, 3))
    monkeypatch.setattr(specialised, "MAKES", 8)
    run(W, x, before, WarpChoice(16, 2, 3))
    assert torch.equal(made, before)
