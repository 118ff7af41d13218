"""What the files of a source import of its package beside files of the manifest: as little of it as they use.

package -> module -> its names. Nothing here computes anything that is measured.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton

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


STUBS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "sglang": {
        "sglang.srt.utils": _SGLANG_UTILS,
        "sglang.srt.utils.common": {"torch_release": _TORCH_RELEASE},
        "einops": {"rearrange": _not_called},  # of tensors with their heads first, which it refuses itself
    },
}
