"""The ceiling of layers with few tokens: the weights of the experts that got one, read and nothing else.

| variant | hypothesis                                                                                         |
|---------|----------------------------------------------------------------------------------------------------|
| read    | no expert layer is faster than reading its experts' weights; 32 KB a program, 16 bytes a load      |
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.bench import ledger
from labkit.kernels.experts.int4 import Int4
from labkit.kernels.launch import Launch

BLOCK = 8192  # words of 4 bytes a program


@triton.jit
def _read_kernel(w, scales, active, partial, W_WORDS, S_WORDS, W_BLOCKS, S_BLOCKS, BLOCK: tl.constexpr):
    """One program: one block of one expert's weights, or of its scales."""
    blocks = W_BLOCKS + S_BLOCKS
    expert = tl.load(active + tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    i = tl.arange(0, BLOCK)
    if block < W_BLOCKS:
        i += block * BLOCK
        words = tl.load(w + expert * W_WORDS + i, mask=i < W_WORDS, other=0)
    else:
        i += (block - W_BLOCKS) * BLOCK
        words = tl.load(scales + expert * S_WORDS + i, mask=i < S_WORDS, other=0)
    halves = (words & 0xFFFF) + ((words >> 16) & 0xFFFF)  # a sum of the words themselves would not fit in 32 bits
    tl.store(partial + tl.program_id(0), tl.sum(halves, 0))


def read(w: Tensor | Int4, active: Tensor) -> Launch:
    """The sum of all 16-bit halves of some experts' weights, one a program (argument `partial`), as a Launch.

    w: [E, N, K], bf16, fp16 or fp32, or INT4; active: [n], int32. ValueError for rows that are no whole words.
    """
    parts = [w.packed, w.scales] if isinstance(w, Int4) else [w]
    for part in parts:
        size = part[0].numel() * part.element_size()
        if size % 4:
            raise ValueError(f"w has {size} bytes an expert; allowed: a multiple of 4")
    words = [part.view(len(part), -1).view(torch.int32) for part in parts]
    sizes = [part.shape[1] for part in words] + [0] * (len(words) == 1)
    blocks = [triton.cdiv(size, BLOCK) for size in sizes]
    programs = len(active) * sum(blocks)
    partial = torch.zeros(programs, dtype=torch.int32, device=active.device)
    args = {"w": words[0], "scales": words[-1], "active": active, "partial": partial, "BLOCK": BLOCK}
    args |= {"W_WORDS": sizes[0], "S_WORDS": sizes[1], "W_BLOCKS": blocks[0], "S_BLOCKS": blocks[1]}
    return Launch(_read_kernel, (programs,), args, {"num_warps": 8})


ledger.watch(__name__)
