"""SGLang 0.5.23's own kernels of the gated delta rule, called as its engine calls them; states are [V, K].

| function | what it calls                                                                                             |
|----------|-----------------------------------------------------------------------------------------------------------|
| ring     | `fused_recurrent_linear_replayssm_decode`, GDN or KDA: it rebuilds the state in tiles at every token      |
| packed   | `fused_recurrent_gated_delta_rule_packed_decode`, GDN: the decode that writes the state at every token    |
| verify   | `gdn_replayssm_spec_decode`, chains of GDN: a port of vLLM's; it stores drafts in the ring, no states     |
| stored   | `fused_recurrent_gated_delta_rule_update`: the state after every draft is stored; gates are ready       |

Its ring has normalised keys, corrections beside them, and the decay of each token; its first entry is entry 0 in a
decode. vLLM's own, from which the first and third are ported, is in none of its released wheels up to 0.33.0, which
has such a ring for Mamba-2 alone. Without its files each function raises `sources.NotFetched`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from labkit import sources

if TYPE_CHECKING:
    from labkit.kernels.gated_delta.buffered import DraftInputs
    from labkit.kernels.gated_delta.recurrent import StepInputs, VerifyInputs
    from labkit.studies.gated_delta_today.inputs import Entries

Call = Callable[[], Any]
RING, PLAIN = "sglang-ring-0.5.23", "sglang-0.5.23"
LINEAR, FLA = "sglang.kernels.ops.attention.linear", "sglang.kernels.ops.attention.fla"


@dataclass(frozen=True)
class Caches:
    """A pool's rings as SGLang keeps them: d [slots, HV, L, V], k [slots, H, L, K], g [slots, HV, L] or [.., K]."""

    d: Tensor
    k: Tensor
    g: Tensor


def caches(held: "Entries") -> Caches:
    """Of the same entries: keys normalised, corrections times what their keys lost."""
    keys = held.k.float()
    norm = keys.norm(dim=3, keepdim=True)
    heads = held.u.shape[1] // held.k.shape[1]
    d = held.u.float() * norm.repeat_interleave(heads, 1)
    return Caches(d.to(held.u.dtype), (keys / norm).to(held.k.dtype), held.log)


def ring(x: "StepInputs", held: Caches, counts: Tensor, **launch: int) -> Call:
    """A step that writes x.out and an entry, or the state. launch: num_warps, block_v; none: its own choice."""
    function = sources.load(RING, f"{LINEAR}.fused_recurrent_linear_replayssm").fused_recurrent_linear_replayssm_decode
    mixed = torch.cat([part.flatten(1) for part in (x.q, x.k, x.v)], 1)
    options = {
        "mixed_qkv": mixed, "a": x.a, "b": x.b, "A_log": x.A_log, "dt_bias": x.dt_bias, "scale": x.scale,
        "initial_state": x.state, "d_cache": held.d, "k_cache": held.k, "g_cache": held.g, "out": x.out[:, None],
        "ssm_state_indices": x.indices, "write_pos": counts, "use_qk_l2norm_in_kernel": True, "is_kda": x.a.ndim == 3,
    }  # fmt: skip
    return lambda: function(**options, **launch)


def packed(x: "StepInputs") -> Call:
    """A step that updates the pool and writes x.out."""
    function = sources.load(PLAIN, f"{FLA}.fused_recurrent").fused_recurrent_gated_delta_rule_packed_decode
    mixed = torch.cat([part.flatten(1) for part in (x.q, x.k, x.v)], 1)
    options = {
        "mixed_qkv": mixed, "a": x.a, "b": x.b, "A_log": x.A_log, "dt_bias": x.dt_bias, "scale": x.scale,
        "initial_state": x.state, "out": x.out[:, None], "ssm_state_indices": x.indices,
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    return lambda: function(**options)


def verify(x: "DraftInputs", held: Caches, starts: Tensor, counts: Tensor) -> Call:
    """A chain of T drafts a sequence on the ring; writes x.out. Of 16-bit states the ring keeps low parts as well."""
    function = sources.load(RING, f"{LINEAR}.gdn_replayssm_spec_decode").gdn_replayssm_spec_decode
    N, T = x.q.shape[:2]
    low = x.state.element_size() == 2
    parts = {name: getattr(x, name).flatten(0, 1) for name in ("q", "k", "v", "a", "b", "out")}
    # Cursors are those of requests, which are in the order of the batch; so are the rings.
    mine = [part[x.indices.long()] for part in (held.d, held.k, held.g)]
    options = parts | {
        "A_log": x.A_log, "dt_bias": x.dt_bias, "checkpoint_state": x.state, "beta_cache": None, "scale": x.scale,
        "query_start_loc": torch.arange(0, N * T + 1, T, dtype=torch.int32, device=x.q.device),
        "ssm_state_indices": x.indices, "replay_indices": torch.arange(N, dtype=torch.int32, device=x.q.device),
        "write_pos": counts, "cache_base": starts, "is_flush": torch.zeros(N, dtype=torch.int8, device=x.q.device),
        "max_cache_len": held.d.shape[2], "max_spec_len": T, "null_block_id": -1, "launch_mode": "verify",
        "rawv_cache": torch.zeros_like(mine[0]) if low else None,
        "rawk_cache": torch.zeros_like(mine[1]) if low else None,
    }  # fmt: skip
    options |= dict(zip(("d_cache", "k_cache", "g_cache"), mine, strict=True))
    return lambda: function(**options)


def stored(x: "VerifyInputs") -> Call:
    """T drafts a sequence, the state after each one stored; returns the output [1, N T, HV, V]."""
    function = sources.load(PLAIN, f"{FLA}.fused_recurrent").fused_recurrent_gated_delta_rule_update
    N, T = x.q.shape[:2]
    q, k, v = (part.flatten(0, 1)[None] for part in (x.q, x.k, x.v))
    g = -x.A_log.exp() * softplus(x.a.float() + x.dt_bias)
    options = {
        "q": q, "k": k, "v": v, "g": g.flatten(0, 1)[None], "beta": x.b.float().sigmoid().flatten(0, 1)[None],
        "scale": x.scale, "initial_state_source": x.state, "initial_state_indices": x.indices,
        "use_qk_l2norm_in_kernel": True, "disable_state_update": True,
        "cu_seqlens": torch.arange(0, N * T + 1, T, dtype=torch.int32, device=q.device),
        "intermediate_states_buffer": x.intermediate_states, "intermediate_state_indices": x.cache_indices,
        "cache_steps": T, "retrieve_parent_token": x.parents,
    }  # fmt: skip
    return lambda: function(**options)
