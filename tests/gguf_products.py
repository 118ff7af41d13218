"""Random weights in the formats of GGUF, tokens, and products of both as the tests of kernels run them."""

import functools

import torch

from labkit.kernels.gguf import formats, products, wide
from labkit.kernels.gguf.choose import Choice, TileChoice, WideChoice

MOST = 17  # tokens: more than a tile of 16
COLUMNS = 768  # 24 groups: a full tile of 16 and a half one
SMALL = Choice(blocks=1)
TILE = TileChoice(2, 8, 4)
WIDE = WideChoice(groups=8, blocks=2, tokens=16)
PRODUCTS = [(products.weight_stationary, Choice(blocks=1, tokens=8)), (products.tensor_core, TILE), (wide.wide, WIDE)]


@functools.cache
def weights(name, rows=7, columns=COLUMNS, seed=0):
    """Packed weights, and what they stand for in fp32."""
    generator = torch.Generator().manual_seed(seed)
    blocks = formats.quantise(torch.randn((rows, columns), generator=generator) * columns**-0.5, name)
    return formats.pack(blocks, name), formats.dequantise(blocks, name)


def on(device, name, **of):
    return weights(name, **of)[0].to(device)


def tokens(number=MOST, columns=COLUMNS, dtype=torch.float32, device="cpu"):
    return torch.randn((number, columns), generator=torch.Generator().manual_seed(7)).to(device, dtype)


def run(variant, W, x, choice, up=None, dtype=torch.float32):
    """y of a variant, poisoned before."""
    y = torch.full((len(x), W.rows), float("nan"), device=x.device, dtype=dtype)
    made = variant(W, x, y, choice) if variant is wide.wide else variant(W, x, y, choice, up)
    for launch in made if isinstance(made, list) else [made]:
        launch()
    return y


def error(y, expected):
    return float((y.cpu().double() - expected).norm() / expected.norm())


def same(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
