"""Launches of GGUF products to compile for sm_90, whose weights are never read, and what stands in their code."""

import re

import torch

from labkit.evidence import compiled
from labkit.kernels.gguf import formats, products
from labkit.kernels.gguf.formats import FORMATS


def blank(name, rows=64, columns=1024):
    kind = FORMATS[name]
    return formats.pack(torch.zeros((rows, columns // kind.block * kind.block_bytes), dtype=torch.uint8), name)


def activations(W, tokens, dtype=torch.bfloat16):
    return torch.empty((tokens, W.columns), dtype=dtype), torch.empty((tokens, W.rows), dtype=dtype)


def product(W, tokens, choice, gated=False):
    return products.weight_stationary(W, *activations(W, tokens), choice, W if gated else None)


def listing(launch):
    """The machine's code."""
    return compiled.listing_of(compiled.build(launch, 90).asm["cubin"])


def in_the_loop(launch):
    """Shared memory's part in a kernel of matrix instructions, before the sums of the warps are added."""
    code = listing(launch)
    last = max(match.start() for match in re.finditer(r"\bHMMA", code))
    return re.findall(r"\b(?:LDS|STS|LDSM|SHFL|BAR)\b", code[:last])


def order_of_sums(launch):
    """The shapes and layouts of what is summed at the end: which thread adds what, in which order."""
    text = compiled.build(launch, 90).asm["ttgir"]
    named = dict(re.findall(r"^(#\w+) = (.*)$", text, re.M))
    found = re.findall(r'"tt\.reduce"\(.*?\}\) : \(tensor<(\w+), (#\w+)>\)', text, re.S)
    return {(shape, named[layout]) for shape, layout in found}
