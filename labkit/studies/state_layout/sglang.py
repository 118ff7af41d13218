"""SGLang's own kernels, of any release in `sources.toml`: called as its engine calls them.

| function | what it calls                                                                                         |
|----------|-------------------------------------------------------------------------------------------------------|
| decode   | `fused_sigmoid_gating_delta_rule_update`, GDN or KDA: gates and step in one kernel, tile of 32        |
| packed   | `fused_recurrent_gated_delta_rule_packed_decode`, GDN, of releases that have it                       |
| cute     | `cutedsl_fused_sigmoid_gating_delta_rule_update`, GDN, fp32 states: the engine's other choice for decode |
| verify   | 0.5.9: `fused_gdn_gating`, then `fused_recurrent_gated_delta_rule_update`, whose tile is 8, as the     |
|          | pull request's description has it; both releases have this kernel, and with it the layout alone differs |
| extend   | `chunk_gated_delta_rule`, or `chunk_kda`; the states of the pool are updated in place                 |

The pool's layout is the release's: [slots, HV, K, V] in 0.5.9, [slots, HV, V, K] since 0.5.10rc0 (`V_FIRST`).
Nothing is imported before a function is called; without its files each raises `sources.NotFetched`.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit import sources

if TYPE_CHECKING:
    from labkit.kernels.gated_delta.chunked import ExtendInputs
    from labkit.kernels.gated_delta.recurrent import StepInputs, VerifyInputs

Call = Callable[[], Any]
V_FIRST = {"sglang-0.5.9": False, "sglang-0.5.10rc0": True, "sglang-0.5.11": True, "sglang-0.5.23": True}
SOFTPLUS = {"softplus_beta": 1.0, "softplus_threshold": 20.0}


def decode(x: "StepInputs", source: str) -> Call:
    """A step that updates the pool and returns its output [1, N, HV, V]. Every slot may be any but a negative one."""
    function = fla(source, "fused_sigmoid_gating_recurrent").fused_sigmoid_gating_delta_rule_update
    q, k, v, b = (part[None] for part in (x.q, x.k, x.v, x.b))
    options = SOFTPLUS | {
        "A_log": x.A_log, "dt_bias": x.dt_bias.flatten(), "q": q, "k": k, "v": v, "a": x.a.flatten(1), "b": b,
        "initial_state_source": x.state, "initial_state_indices": x.indices, "scale": x.scale,
        "cu_seqlens": torch.arange(len(x.q) + 1, dtype=torch.int32, device=x.q.device),
        "use_qk_l2norm_in_kernel": True, "is_kda": x.a.ndim == 3,
    }  # fmt: skip
    return lambda: function(**options)


def packed(x: "StepInputs", source: str) -> Call:
    """A step of q, k and v in one tensor, as the layer before leaves them; writes x.out."""
    function = fla(source, "fused_recurrent").fused_recurrent_gated_delta_rule_packed_decode
    mixed = torch.cat([part.flatten(1) for part in (x.q, x.k, x.v)], 1)
    options = {
        "mixed_qkv": mixed, "a": x.a, "b": x.b, "A_log": x.A_log, "dt_bias": x.dt_bias, "scale": x.scale,
        "initial_state": x.state, "out": x.out[:, None], "ssm_state_indices": x.indices,
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    return lambda: function(**options)


def cute(x: "StepInputs", source: str) -> Call:
    """A step in the CuTe DSL that updates the pool, handed over as it is, and returns its output.

    `labkit[cutlass]` brings what it is written in.
    """
    folder = "sglang.kernels.ops.attention" if source == "sglang-0.5.23" else "sglang.jit_kernel"
    function = sources.load(source, f"{folder}.cutedsl_gdn").cutedsl_fused_sigmoid_gating_delta_rule_update
    q, k, v = (part[None] for part in (x.q, x.k, x.v))
    options = SOFTPLUS | {
        "A_log": x.A_log, "dt_bias": x.dt_bias, "q": q, "k": k, "v": v, "a": x.a, "b": x.b, "scale": x.scale,
        "initial_state_source": x.state, "use_qk_l2norm_in_kernel": True,
        "initial_state_indices": x.indices.clone(),  # of which it reads 16 bytes at a time
        "cu_seqlens": torch.arange(len(x.q) + 1, dtype=torch.int32, device=x.q.device),
    }  # fmt: skip
    return lambda: function(**options)


def verify(x: "VerifyInputs", source: str) -> Call:
    """GDN alone. Leaves the pool as it is, stores the state after every token, returns the output [1, N T, HV, V]."""
    gating = fla(source, "fused_gdn_gating").fused_gdn_gating
    function = fla(source, "fused_recurrent").fused_recurrent_gated_delta_rule_update
    N, T = x.q.shape[:2]
    q, k, v = (part.flatten(0, 1)[None] for part in (x.q, x.k, x.v))
    a, b = x.a.flatten(0, 1), x.b.flatten(0, 1)
    options = {
        "q": q, "k": k, "v": v, "scale": x.scale, "initial_state_source": x.state,
        "initial_state_indices": x.indices, "use_qk_l2norm_in_kernel": True, "disable_state_update": True,
        "cu_seqlens": torch.arange(0, N * T + 1, T, dtype=torch.int32, device=q.device),
        "intermediate_states_buffer": x.intermediate_states, "intermediate_state_indices": x.cache_indices,
        "cache_steps": T, "retrieve_parent_token": x.parents,
    }  # fmt: skip

    def call() -> Tensor:
        g, beta = gating(x.A_log, a, b, x.dt_bias)
        return function(g=g, beta=beta, **options)

    return call


def extend(x: "ExtendInputs", source: str, bounds: Tensor, indices: Tensor) -> Call:
    """Returns the output [1, T, HV, V]; x.initial is the pool, and is updated in place.

    bounds, indices: x.cu_seqlens and the numbers of the states, one tensor for all sets: the library keeps what it
    waits for only of the last few.
    """
    q, k, v, g, beta = (part[None] for part in (x.q, x.k, x.v, x.g, x.beta))
    options = {
        "q": q, "k": k, "g": g, "beta": beta, "scale": x.scale, "initial_state": x.initial,
        "initial_state_indices": indices, "cu_seqlens": bounds, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    if x.g.ndim == 3:
        function = fla(source, "kda").chunk_kda
        # It writes its output over v. In the engine v is a part of a wider tensor, of which the call makes a copy.
        return lambda: function(v=v.clone(), **options)
    function = fla(source, "chunk").chunk_gated_delta_rule
    return lambda: function(v=v, **options)[0]


def modules(module: ModuleType) -> list[ModuleType]:
    """Those of a module's release that are imported, itself among them."""
    own = ".".join(module.__name__.split(".")[:2])
    return [other for name, other in sys.modules.items() if name.startswith(f"{own}.")]


def fla(source: str, name: str) -> ModuleType:
    """A module of the release's copy of fla, by the folder that the release has it in."""
    folder = "sglang.kernels.ops.attention.fla" if source == "sglang-0.5.23" else "sglang.srt.layers.attention.fla"
    return sources.load(source, f"{folder}.{name}")
