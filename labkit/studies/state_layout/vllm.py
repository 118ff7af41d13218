"""vLLM's own decode kernel, from the last release before its pull request 33291 and the first with it.

`decode` calls `fused_recurrent_gated_delta_rule`, tile of 32, which updates the pool: [slots, HV, K, V] in 0.15.1,
[slots, HV, V, K] in 0.16.0. Between the two its file differs in the layout, and in that 0.16.0 looks for slots that
are none. The gates are made ready: their kernel is in the file of the model, which needs all of vLLM.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from labkit import sources

if TYPE_CHECKING:
    from labkit.kernels.gated_delta.recurrent import StepInputs

V_FIRST = {"vllm-0.15.1": False, "vllm-0.16.0": True}


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
