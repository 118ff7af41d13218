"""SGLang's tuned expert layer, as its server runs it for weights that are not quantised.

| part                                                                   | whose                                    |
|------------------------------------------------------------------------|------------------------------------------|
| sequence of launches, memory between them                              | SGLang's (`fused_experts_impl`)          |
| both grouped products, and what they are launched with                 | SGLang's: the configuration that it      |
|                                                                        | ships for this GPU and these experts; or |
|                                                                        | the default of its own function          |
| SiLU · up, sum over a token's experts                                  | SGLang's in Triton (`act_and_mul_triton`,|
|                                                                        | `moe_sum_reduce_triton`), in place of its|
|                                                                        | compiled ones, which no source brings    |
| sorting the tokens by expert (`moe_align_block_size`, compiled)        | ours (`kernels/experts/routing.py`),     |
|                                                                        | into tables of the same size             |

Two products, each with a block of sorted rows and of columns a program, in groups that share weights in L2; hypothesis:
tiles that were tuned for the GPU leave little to gain. Where its files ask for it, products read by descriptors, and
rows stay sorted between them. vLLM's layer has the same kernel, from which this one was adapted.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import triton
from torch import Tensor

from labkit import sources
from labkit.kernels.experts import routing
from labkit.kernels.target import has_dependent_launch
from labkit.studies.moe_persistent_grid.variants import SGLANG_RELEASE

if TYPE_CHECKING:
    from labkit.kernels.experts.inputs import LayerInputs

FOLDER = "sglang.srt.layers.moe.moe_runner.triton_utils"
KERNELS = "sglang.kernels.ops.moe.fused_moe_triton_kernels"


def layer(x: "LayerInputs") -> Callable[[], Tensor]:
    """The layer; a call returns its output [T, H], of x's dtype. May be captured in a CUDA graph.

    x: weights that are not INT4, ids that are all in range. Without the release's files: `sources.NotFetched`.
    """
    layers, kernels = _modules()
    kernels.clear_b_tma_desc_cache()  # it would keep the weights of the model before
    for one in (layers, kernels):
        one.is_arch_support_pdl = partial(has_dependent_launch, x.x.device)
    weights = x.weights.float()
    return lambda: layers.fused_experts_impl(x.x, x.w1, x.w2, weights, x.ids, filter_expert=False)


def configuration(x: "LayerInputs") -> dict[str, Any]:
    """What the products are launched with, by SGLang's own choice. gemm2 is as gemm1 where it is None."""
    config = _config()
    E, width, H = len(x.w1), x.w1.shape[1], x.w1.shape[2]
    found, (second, _) = config.try_get_optimal_moe_config(
        (E, width, H), (E, H, width // 2), x.ids.shape[1], config.get_config_dtype_str(x.x.dtype), len(x.x),
        return_down_config=True,
    )  # fmt: skip
    tuned = config.get_moe_configs(E, width // 2, config.get_config_dtype_str(x.x.dtype), 0, 0)
    return {"gemm1": dict(found), "gemm2": second and dict(second), "shipped": tuned is not None}


def choose_for(gpu: str) -> None:
    """Choose configurations for the GPU of this name: to compile for it in a process that does not see it."""
    config = _config()
    config.get_device_name = lambda: gpu
    config.get_moe_configs.cache_clear()


def _config() -> ModuleType:
    found = sources.load(SGLANG_RELEASE, f"{FOLDER}.fused_moe_triton_config")
    found.logger = _Quiet(found.__name__)
    return found


@cache
def _modules() -> tuple[ModuleType, ModuleType]:
    """The release's layer and its kernels, what the layer lacks put in."""
    layers, kernels = sources.load(SGLANG_RELEASE, f"{FOLDER}.fused_moe"), sources.load(SGLANG_RELEASE, KERNELS)
    _config()
    layers.logger = _Quiet(layers.__name__)
    layers.moe_align_block_size = aligned
    layers.silu_and_mul = partial(_activated, kernels.act_and_mul_triton)
    layers.moe_sum_reduce = kernels.moe_sum_reduce_triton
    # For few tokens it takes that kernel on GPUs with dependent launch, and torch.compile's on others.
    layers._use_moe_sum_reduce_torch_compile = lambda tokens: False
    kernels._TMA_ALLOCATOR_SET = True  # its descriptors are made on the host: nothing is allocated
    return layers, kernels


class _Quiet(logging.Logger):
    """A logger that says nothing; theirs has one method more."""

    def __init__(self, name: str):
        super().__init__(name, logging.CRITICAL)

    def warning_once(self, *args: Any) -> None:
        """Say nothing once."""


def aligned(ids: Tensor, block_m: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted slots, the expert of each block, and rows up to the last one's end; ids: [T, top_k], all in range.

    The tables are as long as SGLang makes them, since that is how many programs its products have.
    """
    slots = ids.numel()
    rows = slots * block_m if slots < experts + 1 else slots + (experts + 1) * (block_m - 1)
    found = routing.route(ids, experts, block_m, blocks=triton.cdiv(triton.cdiv(rows, 4) * 4, block_m))
    found = routing.at_once(found, ids, experts)
    found()
    return found.slots, found.experts, found.padded


def _activated(
    function: Callable[..., None], x: Tensor, out: Tensor, expert_ids: Tensor | None = None, expert_step: int = 1,
    **how: Any,
) -> None:  # fmt: skip
    """SiLU · up; expert_ids: of every `expert_step` rows, -1 where nobody reads them."""
    options = {"BLOCK_SIZE_M": expert_step}
    function(x, out, options, expert_ids=expert_ids, down_moe_use_tma=expert_ids is not None)
