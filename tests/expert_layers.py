"""Small expert layers with random weights, and a check of one against float64."""

import torch

from labkit.kernels.experts import int4 as experts_int4
from labkit.kernels.experts import reference
from labkit.kernels.experts.choose import Choice, TileChoice
from labkit.kernels.experts.expert_layer import layer
from labkit.kernels.experts.inputs import LayerInputs
from labkit.kernels.experts.int4 import Int4
from labkit.studies.moe_persistent_grid.routings import synthetic


def inputs(T, E, top_k, H, width, device, int4=False, kind="uniform", dtype=torch.float32, seed=0, empty=1):
    """An expert layer with a synthetic routing, one expert empty, and a poisoned output."""
    generator = torch.Generator().manual_seed(seed)
    made = synthetic(kind, T, E, top_k, seed, device, min(empty, E - top_k))
    x = torch.randn((T, H), generator=generator)
    w1 = torch.randn((E, 2 * width, H), generator=generator) * H**-0.5
    w2 = torch.randn((E, H, width), generator=generator) * width**-0.5
    if int4:
        w1, w2 = (Int4(*(part.to(device) for part in experts_int4.quantise(w))) for w in (w1, w2))
    else:
        w1, w2 = w1.to(device, dtype), w2.to(device, dtype)
    if int4 and dtype == torch.bfloat16:  # so that a kernel may round scaled weights to bf16
        w1, w2 = (Int4(w.packed, experts_int4.coarse(w.scales)) for w in (w1, w2))
    x = x.to(device, dtype)
    return LayerInputs(x, made.ids, made.weights, w1, w2, torch.full_like(x, float("nan")))


def run(x, config=None, scratch=None):
    """The output, which is checked to be close to float64's."""
    x.out.fill_(float("nan"))
    layer(x, config, scratch)()
    stored = x.x.dtype if config and not config.fused else None  # gate and up pass through memory, rounded
    expected = reference.layer(x.x, x.ids, x.weights, x.w1, x.w2, stored)
    found = reference.errors(x.out, expected)
    assert found.ok, (found, config)
    return x.out.clone()


def small(block_m=16, fused=True, **changes):
    tile = TileChoice(**{"block_n": 32, "block_k": 32, "num_stages": 2, "group_m": 2} | changes)
    return Choice(block_m, tile, tile, fused)
