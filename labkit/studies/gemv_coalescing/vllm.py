"""vLLM's own kernels for few tokens, in the CuTe DSL, called as its models call them.

| function    | what it calls                                                                                          |
|-------------|--------------------------------------------------------------------------------------------------------|
| low_latency | `ll_bf16_gemm`: at one token a program a row of W, whose first parts are loaded before x is waited for |
| skinny      | `shape_dynamic_skinny_gemm`, with the rule that it has for shapes that were not tuned                  |

`pip install labkit[cutlass]` brings what they are written in; without it the rows say so. y is a new tensor.

Not run: `dsv3_fused_a_gemm`, which is in vLLM's compiled library alone. That asks for another torch, and has instances
for a few shapes of other models; at none of them are libraries timed here.
"""

import torch
from torch import Tensor

from labkit import sources

SOURCE = "vllm-0.33.0"
FOLDER = "vllm.model_executor.kernels.linear.cute_dsl"


def low_latency(W: Tensor, x: Tensor) -> Tensor:
    """y = W x. W: [N, K], x: [K], y: [N], bf16, contiguous; K a multiple of 8."""
    return sources.load(SOURCE, f"{FOLDER}.ll_bf16").ll_bf16_gemm(x[None], W, torch.bfloat16)[0]


def skinny(W: Tensor, x: Tensor) -> Tensor:
    """y = W x. W: [N, K], x: [K], y: [N], bf16 or fp16, contiguous; K a multiple of what a tile of its rule takes."""
    return sources.load(SOURCE, f"{FOLDER}.skinny_gemm").shape_dynamic_skinny_gemm(x[None], W)[0]
