"""What the files of a source import of its package beside files of the manifest: as little of it as they use.

Name in the manifest, without the version -> module -> its names. Nothing here computes anything that is measured.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# Of its release number alone: which of torch's interfaces to use.
_TORCH_RELEASE = tuple(int(part) for part in torch.__version__.partition("+")[0].split(".")[:3])

_SGLANG_UTILS = {
    "cdiv": triton.cdiv,
    "next_power_of_2": triton.next_power_of_2,
    "is_cpu": lambda: False,
    "is_npu": lambda: False,
    "cpu_has_amx_support": lambda: False,
    "is_cuda": lambda: True,
    **dict.fromkeys(("is_hip", "is_musa", "is_sm90_supported", "is_xpu"), lambda: False),
    "get_bool_env_var": lambda name: False,
    "get_device_name": lambda: _device_name(),
}


def _device_name() -> str:
    """Of the GPU at hand; empty where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _silent(*args: Any, **options: Any) -> None:
    """Of a logger's call, or of what registers something: nothing happens."""


def _not_called(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("a stub: no path that is measured calls it")


def _undecorated(function: Callable | None = None, **options: Any) -> Callable:
    """FlashInfer's decorator of public functions, which logs calls; SGLang's of operators, which registers them."""
    return function or (lambda decorated: decorated)


def _compiled(module: str, name: str, compile_: Callable[[], Any], extra_key_files: Any = ()) -> Any:
    """FlashInfer's, without its files on disk: what `compile_` makes."""
    return compile_()


@cache
def _buffer(name: str, size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


_FLASHINFER_UTILS = {
    "get_compute_capability": cache(torch.cuda.get_device_capability),
    "get_device_name": cache(torch.cuda.get_device_name),
    "get_device_sm_count": cache(lambda device: torch.cuda.get_device_properties(device).multi_processor_count),
    "_get_cache_buf": _buffer,
}
_FLASHINFER_TRACES = (
    "gated_delta_rule_decode_trace",
    "gdn_mtp_trace",
    "gdn_replayssm_commit_trace",
    "gdn_prefill_trace",
)

# SGLang's expert layer, of weights that are not quantised, on one GPU, as its server has it by default.
_SGLANG_EXEC = SimpleNamespace(
    deterministic=SimpleNamespace(enable_deterministic_inference=False),
    moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False),
)
_SGLANG_LAYER = "sglang.srt.layers.moe.moe_runner"
_SGLANG_EXPERTS = {
    "sgl_kernel": {"moe_sum_reduce": _not_called},  # this, and what aligns and activates, is set by who calls
    "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: False},  # set by who calls, too
    "sglang.kernels.ops.activation.activation": dict.fromkeys(
        ("gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul", "silu_and_mul_with_activation_rounding"), _not_called
    ),
    "sglang.kernels.ops.quantization.fp8_kernel": dict.fromkeys(
        ("per_token_group_quant_fp8", "scaled_fp8_quant", "sglang_per_token_group_quant_fp8"), _not_called
    ),
    "sglang.kernels.ops.quantization.int8_kernel": dict.fromkeys(
        ("per_token_group_quant_int8", "per_token_quant_int8", "sglang_per_token_group_quant_int8"), _not_called
    ),
    "sglang.kernels.ops.quantization.per_token_group_quant": {"per_token_group_quant": _not_called},
    "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: False},
    "sglang.srt.distributed.device_communicators.pynccl_allocator": {
        "use_symmetric_memory": lambda group, disabled: nullcontext()
    },
    "sglang.srt.layers.dp_attention": {"is_allocation_symmetric": lambda: False},
    _SGLANG_LAYER: {"MoeRunnerConfig": SimpleNamespace},
    f"{_SGLANG_LAYER}.triton_utils": {"get_config": lambda: None},  # of its tuner, which overrides the files
    f"{_SGLANG_LAYER}.triton_utils.moe_align_block_size": {"moe_align_block_size": _not_called},
    "sglang.srt.layers.moe.utils": {"get_moe_padding_size": lambda aiter: 0, "get_moe_runner_backend": _not_called},
    "sglang.srt.runtime_context": {
        "get_exec": lambda: _SGLANG_EXEC,
        "get_parallel": lambda: SimpleNamespace(tp_group=None),
    },
    "sglang.srt.utils.custom_op": {"register_custom_op": _undecorated},
}


def _capability() -> int:
    """Of the GPU at hand, 90 for compute capability 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


# SGLang's compiler of CUDA files: says what it would compile, and leaves that to who asks.
_SGLANG_JIT = {
    "cache_once": lambda function: function,
    "get_jit_cuda_arch": lambda: SimpleNamespace(major=_capability() // 10),
    "is_arch_support_pdl": lambda: _capability() >= 90,
    "make_cpp_args": lambda *values: ", ".join(str(value).lower() for value in values),
    "load_jit": lambda *args, cuda_wrappers, **options: cuda_wrappers[0][1],
}


def _fake_tensor(dtype: Any, shape: tuple[Any, ...], divisibility: int) -> Any:
    """A matrix to compile for: rows side by side, everything else only known to be a multiple of so many values."""
    cute = import_module("cutlass.cute")  # the lab itself does not need it
    strides = tuple(cute.sym_int64(divisibility=divisibility) for _ in shape[1:])
    align = max(divisibility * dtype.width // 8, 1)
    return cute.runtime.make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=align)


_VLLM_PLATFORM = SimpleNamespace(
    is_arch_support_pdl=lambda: _capability() >= 90,
    is_cuda_alike=torch.cuda.is_available,
    is_device_capability=lambda capability: _capability() == capability,
    is_device_capability_family=lambda capability: _capability() // 10 == capability // 10,
)

# vLLM's expert layer on one GPU, with nothing set that its server has unset by default; what is compiled in its package
# is said not to be there, so that it takes its Triton kernels.
_VLLM_LAYER = "vllm.model_executor.layers.fused_moe"
_VLLM_EXPERTS = {
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_TUNED_CONFIG_FOLDER": None},
    "vllm.logger": {"init_logger": lambda name: SimpleNamespace(info_once=_silent, warning_once=_silent)},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cuda=lambda: False, is_rocm=lambda: False)},
    "vllm.triton_utils": {"triton": triton, "tl": tl},
    "vllm.triton_utils.allocation": {"set_triton_allocator": _not_called},
    "vllm.utils.math_utils": {"next_power_of_2": triton.next_power_of_2},
    "vllm.utils.platform_utils": {"get_device_name_as_file_name": lambda: _device_name().replace(" ", "_")},
    "vllm.utils.torch_utils": {"direct_register_custom_op": _silent},
    "vllm._custom_ops": {"moe_sum": _not_called, "moe_wna16_gemm": _not_called},  # the first is set by who calls
    _VLLM_LAYER: {"get_config": lambda: None},  # of its tuner, which overrides the files
    f"{_VLLM_LAYER}.config": {
        "FUSED_MOE_UNQUANTIZED_CONFIG": None,
        "FusedMoEQuantConfig": SimpleNamespace,
        "_get_config_dtype_str": lambda dtype, use_int4_w4a16=False, **others: (
            "int4_w4a16" if use_int4_w4a16 else {torch.float32: "float32"}.get(dtype)
        ),
    },
    f"{_VLLM_LAYER}.modular_kernel": {
        "FusedMoEExpertsModular": SimpleNamespace(adjust_N_for_activation=lambda width, activation: width // 2)
    },
    f"{_VLLM_LAYER}.moe_align_block_size": {"moe_align_block_size": _not_called},  # set by who calls, too
    f"{_VLLM_LAYER}.utils": {
        "enable_swap_ab": _not_called,
        "moe_kernel_quantize_input": lambda A, A_scale, **how: (A, A_scale),  # of activations that stay as they are
        "resolve_moe_use_td": lambda: False,
        "warn_if_moe_use_td_ineffective": _silent,
    },
}

STUBS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "sglang": {
        "sglang.srt.utils": _SGLANG_UTILS,
        "sglang.srt.utils.common": {"torch_release": _TORCH_RELEASE},
        "einops": {"rearrange": _not_called},  # of tensors with their heads first, which it refuses itself
        **_SGLANG_EXPERTS,
    },
    "sglang-gemv": {"sglang.kernels.jit.utils": _SGLANG_JIT},
    "sglang-ring": {
        "sglang.kernels.ops.attention.fla.utils": {"is_tf32_supported": True},
        "sglang.srt.utils": {"is_gfx95_supported": lambda: False},
    },
    "vllm": {
        "vllm.platforms": {"current_platform": _VLLM_PLATFORM},
        "vllm.utils.torch_utils": {"current_stream": torch.cuda.current_stream},
        "quack.compile_utils": {"make_fake_tensor": _fake_tensor},
        "vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": libdevice},
        "einops": {"rearrange": _not_called},  # of tensors with their heads first, which it refuses itself
    },
    "vllm-fused-moe": _VLLM_EXPERTS,
    "flashinfer-python": {
        "flashinfer.utils": _FLASHINFER_UTILS,
        "flashinfer.api_logging": {"flashinfer_api": _undecorated},
        "flashinfer.trace.templates.gdn": dict.fromkeys(_FLASHINFER_TRACES),  # descriptions for its tuners
        "flashinfer.jit.core": {"logger": logging.getLogger("flashinfer")},
        "flashinfer.jit.cute_dsl_core": {"build_and_load_cute_dsl_kernel": _compiled},
    },
}
