"""INT4 products by specialised warps: what they are compiled to for Hopper; on a GPU, the layer against float64."""

import pytest
import torch
from expert_layers import inputs

from labkit.evidence import compiled
from labkit.kernels.experts import few_rows, reference, specialised
from labkit.kernels.experts.inputs import LayerInputs
from labkit.kernels.experts.int4 import GROUP, Int4
from labkit.kernels.offline import offline


def layer(H=1024, width=512):
    """An empty layer of eight experts."""
    shapes = ((8, 2 * width, H), (8, H, width))
    w1, w2 = (
        Int4(torch.zeros(e, n, k // 2, dtype=torch.uint8), torch.ones(e, n, k // GROUP, dtype=torch.bfloat16))
        for e, n, k in shapes
    )
    x = torch.zeros(4, H, dtype=torch.bfloat16)
    return LayerInputs(x, torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2), w1, w2, torch.empty_like(x))


@pytest.mark.parametrize("block_m", specialised.BLOCKS_M)
def test_weights_stay_in_their_lane_and_in_registers(block_m):
    with offline(90):
        made = specialised.by_specialised_warps(layer(), None, block_m)
        found = [compiled.evidence(made.launches[name]) for name in ("gemm1", "gemm2")]
    for one in found:
        assert one["shuffles"] == 0
        assert one["spill_bytes"] <= 8  # two values of 112, by Triton 3.7; none by 3.6
        # eight of 16 columns for each 128, of two groups a stage; of the largest blocks, half of them are as long
        assert set(one["matrix"].values()) == {64 if block_m < 64 else 32}
        assert all(name.startswith("HGMMA") for name in one["matrix"])
        assert one["loads"].get("tma", 0) + one["loads"].get("bulk", 0) > 0


def test_what_cannot_be_compiled_is_named():
    given, choice = layer(), specialised.WarpChoice(rows=96)
    with offline(90):
        with pytest.raises(ValueError, match="rows is 96; allowed: 64, 128, 256"):
            specialised.by_specialised_warps(given, None, 16, choice)
        with pytest.raises(ValueError, match="block_m is 128; allowed: 16, 32, 64"):
            specialised.by_specialised_warps(given, None, 128)
        with pytest.raises(
            ValueError, match=r"weights are \[1024, 384\]; allowed: multiples of 256 \(rows\) and of 256"
        ):
            specialised.by_specialised_warps(layer(1024, 384))
    with offline(80), pytest.raises(ValueError, match=r"on compute capability 8.0; allowed: .* 9.0 \(Hopper\)"):
        specialised.by_specialised_warps(given)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "zipf 1", "one expert"])
@pytest.mark.parametrize("T", [2, 40, 200])
def test_the_layer_is_right_and_its_bits_are_the_same_for_every_choice(T, kind):
    """And those of a token do not depend on the others; other products leave other bits."""
    x = inputs(T, 5, 2, 512, 768, "cuda", True, kind, torch.bfloat16)
    expected = reference.layer(x.x, x.ids, x.weights, x.w1, x.w2, None)
    found = []
    for block_m, rows, together in ((16, 256, 1), (16, 64, 3), (32, 128, 2), (64, 128, 1), (64, 64, 2)):
        choice = specialised.WarpChoice(rows, 2, together)
        x.out.fill_(float("nan"))
        specialised.by_specialised_warps(x, None, block_m, choice, choice)()
        assert reference.errors(x.out, expected).ok
        found.append(x.out.clone())
    assert all(torch.equal(found[0], other) for other in found[1:])
    x.ids[T // 2 :] = -1
    specialised.by_specialised_warps(x)()
    assert torch.equal(x.out[: T // 2], found[0][: T // 2])
    few_rows.by_few_rows(x)()
    assert T == 2 or not torch.equal(x.out[: T // 2], found[0][: T // 2])
