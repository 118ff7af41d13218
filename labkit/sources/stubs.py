"""What the files of a source import of its package beside files of the manifest: as little of it as they use.

package -> module -> its names. Nothing here computes anything that is measured.
"""

import logging
from collections.abc import Callable, Mapping
from functools import cache
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
}


def _not_called(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("a stub: no path that is measured calls it")


def _undecorated(function: Callable | None = None, **options: Any) -> Callable:
    """FlashInfer's decorator of public functions, which logs calls."""
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

STUBS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "sglang": {
        "sglang.srt.utils": _SGLANG_UTILS,
        "sglang.srt.utils.common": {"torch_release": _TORCH_RELEASE},
        "einops": {"rearrange": _not_called},  # of tensors with their heads first, which it refuses itself
    },
    "vllm": {
        "vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": libdevice},
        "vllm.model_executor.layers.fla.ops.utils": {"is_gather_supported": True},
    },
    "flashinfer-python": {
        "flashinfer.utils": _FLASHINFER_UTILS,
        "flashinfer.api_logging": {"flashinfer_api": _undecorated},
        "flashinfer.trace.templates.gdn": dict.fromkeys(_FLASHINFER_TRACES),  # descriptions for its tuners
        "flashinfer.jit.core": {"logger": logging.getLogger("flashinfer")},
        "flashinfer.jit.cute_dsl_core": {"build_and_load_cute_dsl_kernel": _compiled},
    },
}
