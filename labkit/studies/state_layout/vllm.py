"""vLLM's own kernels, from the last release before its pull request 33291 and the first with it.

`decode` calls `fused_recurrent_gated_delta_rule`, tile of 32, which updates the pool: [slots, HV, K, V] in 0.15.1,
[slots, HV, V, K] in 0.16.0. Between the two its file differs in the layout, and in that 0.16.0 looks for slots that
are none. The gates are made ready: their kernel is in the file of the model, which needs all of vLLM.
`extend` calls `chunk_gated_delta_rule`, GDN, whose files differ in the layout alone. It returns new states: its engine
gathers those of the pool before, and scatters them after.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit import sources

if TYPE_CHECKING:
    from labkit.kernels.gated_delta.chunked import ExtendInputs
    from labkit.kernels.gated_delta.recurrent import StepInputs

V_FIRST = {"vllm-0.15.1": False, "vllm-0.16.0": True}
CHUNKS = {"vllm-0.15.1": "vllm-chunk-0.15.1", "vllm-0.16.0": "vllm-chunk-0.16.0"}  # files of extend, of each release
FOLDER = "vllm.model_executor.layers.fla.ops"


def decode(x: "StepInputs", source: str) -> Callable[[], Any]:
    """A step of GDN that updates the pool and returns its output [1, N, HV, V]."""
    module = sources.load(source, "vllm.model_executor.layers.fla.ops.fused_recurrent")
    rate = -x.A_log.exp() * torch.nn.functional.softplus(x.a.float() + x.dt_bias)
    q, k, v, g, beta = (part[None] for part in (x.q, x.k, x.v, rate, x.b.float().sigmoid()))
    options = {
        "initial_state": x.state, "inplace_final_state": True, "ssm_state_indices": x.indices, "scale": x.scale,
        "cu_seqlens": torch.arange(len(x.q) + 1, dtype=torch.int32, device=x.q.device),
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    return lambda: module.fused_recurrent_gated_delta_rule(q, k, v, g, beta, **options)[0]


def extend(x: "ExtendInputs", source: str, bounds: Tensor) -> Callable[[], Any]:
    """Returns the output [1, T, HV, V] and the final states, fp32, [N, ..] in the release's layout, as x.initial is.

    source: a key of CHUNKS. bounds: x.cu_seqlens, one tensor for all sets: it keeps what it waits for only of the last
    few.
    """
    function = sources.load(CHUNKS[source], f"{FOLDER}.chunk").chunk_gated_delta_rule
    q, k, v, g, beta = (part[None] for part in (x.q, x.k, x.v, x.g, x.beta))
    options = {
        "initial_state": x.initial, "output_final_state": True, "scale": x.scale, "cu_seqlens": bounds,
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    return lambda: function(q, k, v, g, beta, **options)
