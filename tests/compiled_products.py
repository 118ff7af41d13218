"""Launches of GGUF products to compile for sm_90, whose weights are never read, and what stands in their code."""

import re
from typing import Any

import compiled_once
import torch

from labkit.evidence import compiled
from labkit.kernels.gguf import formats, products
from labkit.kernels.gguf.formats import FORMATS
from labkit.kernels.launch import Launch


def blank(name, rows=64, columns=1024):
    kind = FORMATS[name]
    return formats.pack(torch.zeros((rows, columns // kind.block * kind.block_bytes), dtype=torch.uint8), name)


def activations(W, tokens, dtype=torch.bfloat16):
    return torch.empty((tokens, W.columns), dtype=dtype), torch.empty((tokens, W.rows), dtype=dtype)


def product(W, tokens, choice, gated=False):
    return products.weight_stationary(W, *activations(W, tokens), choice, W if gated else None)


def in_the_loop(launch: Launch) -> list[str]:
    """Shared memory's part in a kernel of matrix instructions, before the sums of the warps are added."""
    return compiled_once.known(launch, 90, _in_the_loop)


def _in_the_loop(launch: Launch, capability: int) -> list[str]:
    code = _listing(launch, capability)
    last = max(match.start() for match in re.finditer(r"\bHMMA", code))
    return re.findall(r"\b(?:LDS|STS|LDSM|SHFL|BAR)\b", code[:last])


def beside_wgmma(launch: Launch) -> list[str]:
    """What moves values through registers between the first wgmma and the last one's wait."""
    return compiled_once.known(launch, 90, _beside_wgmma)


def _beside_wgmma(launch: Launch, capability: int) -> list[str]:
    code = _listing(launch, capability)
    loop = code[code.index("HGMMA") : code.rindex("WARPGROUP.DEPBAR")]
    return re.findall(r"\b(?:LDG|STG|LDS|STS|LDSM|STSM|SHFL)\b", loop)


def order_of_sums(launch: Launch) -> list[Any]:
    """The shapes and layouts of what is summed at the end: which thread adds what, in which order."""
    return compiled_once.known(launch, 90, _order_of_sums)


def _order_of_sums(launch: Launch, capability: int) -> list[Any]:
    text = compiled.build(launch, capability).asm["ttgir"]
    named = dict(re.findall(r"^(#\w+) = (.*)$", text, re.M))
    found = re.findall(r'"tt\.reduce"\(.*?\}\) : \(tensor<(\w+), (#\w+)>\)', text, re.S)
    return sorted({(shape, named[layout]) for shape, layout in found})


def _listing(launch: Launch, capability: int) -> str:
    """The machine's code."""
    return compiled.listing_of(compiled.build(launch, capability).asm["cubin"])
