"""vLLM's expert layer in Triton: of weights that are not quantised, and of INT4 weights (W4A16).

| part                                                                   | whose                                    |
|------------------------------------------------------------------------|------------------------------------------|
| sequence of launches, memory between them                              | vLLM's (`fused_experts_impl`)            |
| both grouped products, and what they are launched with                 | vLLM's: the configuration that it ships  |
|                                                                        | for this GPU and these experts; or the   |
|                                                                        | default of its own function              |
| sorting the tokens by expert (`moe_align_block_size`), SiLU · up, and  | ours, since vLLM has them compiled, which|
| the sum over a token's experts (`moe_sum`)                             | no source brings; the tables are as long |
|                                                                        | as its own                               |

For few tokens its bf16 layer sorts nothing: each slot is a block of its own. W4A16 loads a weight's byte once for each
nibble, subtracts 8 and multiplies by the scale in fp32, and rounds to bf16 for the product. With up to six slots an
expert vLLM may call a compiled kernel for INT4 weights instead, which no source brings.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit import sources
from labkit.kernels.experts import routing
from labkit.kernels.experts.int4 import GROUP
from labkit.kernels.experts.tiles import _silu_up
from labkit.kernels.launch import Launch
from labkit.studies.moe_persistent_grid.variants import VLLM_RELEASE

if TYPE_CHECKING:
    from labkit.kernels.experts.inputs import LayerInputs

MODULE = "vllm.model_executor.layers.fused_moe.fused_moe"
CHUNK = 1024  # values of a row a program


@triton.jit
def _activate_kernel(hidden, out, TILES, I: tl.constexpr, CHUNK: tl.constexpr):  # noqa: E741
    """One program: SiLU(gate) · up of CHUNK values of a row. hidden: [rows, 2 I]; out: [rows, I]."""
    row = (tl.program_id(0) // TILES).to(tl.int64)
    i = tl.program_id(0) % TILES * CHUNK + tl.arange(0, CHUNK)
    at = hidden + row * (2 * I) + i
    value = _silu_up(tl.load(at, mask=i < I, other=0.0), tl.load(at + I, mask=i < I, other=0.0))
    tl.store(out + row * I + i, value.to(out.dtype.element_ty), mask=i < I)


@triton.jit
def _sum_kernel(parts, out, TILES, H: tl.constexpr, TOP_K: tl.constexpr, CHUNK: tl.constexpr):
    """One program: CHUNK values of a token, summed over its experts. parts: [T, TOP_K, H]; out: [T, H]."""
    t = (tl.program_id(0) // TILES).to(tl.int64)
    h = tl.program_id(0) % TILES * CHUNK + tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(parts + (t * TOP_K + j) * H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out + t * H + h, total.to(out.dtype.element_ty), mask=h < H)


def layer(x: "LayerInputs") -> Callable[[], Tensor]:
    """The layer; a call returns its output [T, H], of x's dtype. May be captured in a CUDA graph.

    x: weights that are INT4 or of x's dtype, ids that are all in range. Without the release's files:
    `sources.NotFetched`.
    """
    layers, weights = _module(), x.weights.float()
    if not x.int4:
        return lambda: layers.fused_experts_impl(x.x, x.w1, x.w2, weights, x.ids)
    scales = {"w1_scale": x.w1.scales, "w2_scale": x.w2.scales, "block_shape": [0, GROUP], "use_int4_w4a16": True}
    return lambda: layers.fused_experts_impl(x.x, x.w1.packed, x.w2.packed, weights, x.ids, **scales)


def configuration(x: "LayerInputs") -> dict[str, Any]:
    """What the products are launched with, by vLLM's own choice, and whether it ships that for this GPU.

    Of INT4 weights the default has no columns and no K: its launcher chooses them by the tokens.
    """
    layers, (T, E, top_k, H, width) = _module(), x.shape
    kind, packed = ("int4_w4a16", 2) if x.int4 else ({torch.float32: "float32"}.get(x.x.dtype), 1)
    block = [0, GROUP] if x.int4 else None
    shapes = (E, 2 * width, H // packed), (E, H, width // packed)
    found = layers.try_get_optimal_moe_config(*shapes, top_k, kind, T, block)
    return {"tile": dict(found), "shipped": layers.get_moe_configs(E, width, kind, *(block or (0, 0))) is not None}


def choose_for(gpu: str) -> None:
    """Choose configurations for the GPU of this name: to compile for it in a process that does not see it."""
    layers = _module()
    layers.get_device_name_as_file_name = lambda: gpu.replace(" ", "_")
    layers.get_moe_configs.cache_clear()


@cache
def _module() -> ModuleType:
    """The release's layer, what it lacks put in."""
    layers = sources.load(VLLM_RELEASE, MODULE)
    layers.moe_align_block_size = aligned
    layers.apply_moe_activation = _activated
    layers.ops = SimpleNamespace(moe_sum=_summed)
    return layers


def aligned(
    ids: Tensor, block_m: int, experts: int, expert_map: None = None, ignore_invalid_experts: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted slots, the expert of each block, and rows up to the last one's end; ids: [T, top_k], all in range.

    The tables have as many blocks as vLLM's, since that is how many programs its products have.
    """
    slots = ids.numel()
    rows = slots + experts * (block_m - 1)
    rows = min(slots * block_m, rows) if slots < experts else rows
    found = routing.route(ids, experts, block_m, blocks=triton.cdiv(rows, block_m))
    found = routing.at_once(found, ids, experts)
    found()
    return found.slots, found.experts, found.padded


def _activated(activation: Any, out: Tensor, hidden: Tensor) -> None:
    """SiLU · up. hidden: [rows, 2 I], gate before up; out: [rows, I]."""
    rows, width = out.shape
    tiles = triton.cdiv(width, CHUNK)
    args = {"hidden": hidden, "out": out, "TILES": tiles, "I": width, "CHUNK": CHUNK}
    Launch(_activate_kernel, (rows * tiles,), args, {"num_warps": 4})()


def _summed(parts: Tensor, out: Tensor) -> None:
    """The sum over a token's experts. parts: [T, top_k, H], already weighted; out: [T, H]."""
    T, top_k, H = parts.shape
    tiles = triton.cdiv(H, CHUNK)
    args = {"parts": parts, "out": out, "TILES": tiles, "H": H, "TOP_K": top_k, "CHUNK": CHUNK}
    Launch(_sum_kernel, (T * tiles,), args, {"num_warps": 4})()
