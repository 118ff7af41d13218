"""Libraries' calls beside the study's kernels: functions of the inputs of one buffer set that give a call.

Libraries are imported only in the function that calls them.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from labkit.kernels.gated_delta.chunked import ExtendInputs
    from labkit.kernels.gated_delta.recurrent import StepInputs

Call = Callable[[], Any]


def in_place(x: Tensor, factor: float) -> Call:
    """x *= factor, the ceiling: each byte read and written once, no other work. x: states of any shape."""
    return partial(x.mul_, factor)


def fla_in_place(x: "StepInputs", tile: int) -> Call:
    """fla-core's recurrent GDN kernel, launched so that it updates the states; its own call never does.

    x.indices: slots one after the other, since the kernel takes none; tile: BV.
    """
    from fla.ops.gated_delta_rule import fused_recurrent

    kernel = fused_recurrent.fused_recurrent_gated_delta_rule_fwd_kernel
    (tokens, H, K), (HV, V) = x.q.shape, x.v.shape[1:]
    states = _states(x)
    arguments = {
        "q": x.q, "k": x.k, "v": x.v, "g": x.a, "gk": None, "gv": None, "beta": x.b,
        "A_log": x.A_log, "dt_bias": x.dt_bias, "o": x.out, "h0": states, "ht": states,
        "cu_seqlens": None, "scale": x.scale, "T": 1, "H": H, "HV": HV, "K": K, "V": V, "BK": K, "BV": tile,
        "IS_BETA_HEADWISE": True, "USE_QK_L2NORM_IN_KERNEL": True, "APPLY_BETA_SIGMOID": True,
        "ALLOW_NEG_EIGVAL": False, "STATE_V_FIRST": x.v_first, "num_warps": 1, "num_stages": 3,
    }  # fmt: skip
    grid = (-(-V // tile) * tokens * HV,)
    return lambda: kernel[grid](**arguments)


def fla_step(x: "StepInputs") -> Call:
    """fla-core's public recurrent call, GDN or KDA; x.indices: slots one after the other.

    It returns (out, new fp32 states); tokens stand where the library has sequences: [N, 1, ..].
    """
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    function = fused_recurrent_kda if x.a.ndim == 3 else fused_recurrent_gated_delta_rule
    q, k, v, a, b = (part[:, None] for part in (x.q, x.k, x.v, x.a, x.b))
    options = {
        "scale": x.scale, "initial_state": _states(x), "output_final_state": True, "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True, "A_log": x.A_log, "dt_bias": x.dt_bias.flatten(),
        "use_beta_sigmoid_in_kernel": True, "state_v_first": x.v_first,
    }  # fmt: skip
    return _kept(lambda: function(q, k, v, g=a, beta=b, **options))


def fla_extend(x: "ExtendInputs", v_first: bool, bounds: Tensor) -> Call:
    """fla-core's chunked call, GDN or KDA, which tunes itself; it returns (out [1, T, HV, V], final states).

    bounds: x.cu_seqlens as int64, one tensor for all sets: the library keeps what it waits for only of the last few.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    function = chunk_kda if x.g.ndim == 3 else chunk_gated_delta_rule
    q, k, v, g, beta = (part[None] for part in (x.q, x.k, x.v, x.g, x.beta))
    options = {
        "scale": x.scale, "initial_state": x.initial, "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "state_v_first": v_first, "cu_seqlens": bounds,
    }  # fmt: skip
    return _kept(lambda: function(q, k, v, g, beta, **options))


def attn_gym_step(x: "StepInputs") -> Call:
    """attn-gym's paged decode, GDN or KDA, the pool [slots, HV, V, K] updated in place. x.indices: any slots but 0."""
    from attn_gym.linear import recurrent_gdn_decode, recurrent_kda_decode

    packed = torch.cat([part.flatten(1) for part in (x.q, x.k, x.v)], 1)
    arguments = (packed, x.a[None], x.b[None], x.A_log, x.dt_bias, x.state, x.indices)
    options = {"scale": x.scale, "out": x.out[None]}
    if x.a.ndim == 3:
        return lambda: recurrent_kda_decode(*arguments, **options, gate_transform="softplus")
    return lambda: recurrent_gdn_decode(*arguments, **options)


def _states(x: "StepInputs") -> Tensor:
    """The states of the sequences, [N, ..], where their slots follow each other."""
    return x.state[x.indices[0] : x.indices[0] + len(x.q)]


def _kept(call: Call) -> Call:
    """The call, whose result lives until the next one.

    Dropped at once, the allocator would give every buffer set the same memory for it, which would stay in L2.
    """
    results: list[Any] = [None]

    def keeping() -> Any:
        results[0] = call()
        return results[0]

    return keeping
