"""vLLM's own kernels, from the last release before its pull request 33291 and the first with it.

`decode` calls `fused_recurrent_gated_delta_rule`, tile of 32, which updates the pool: [slots, HV, K, V] in 0.15.1,
[slots, HV, V, K] in 0.16.0. `decode_kda` launches the same kernel as `fused_recurrent_kda` of both releases does, with
a tile of 8: that of SGLang's explanation, in a decode.

Between the two releases the file differs in the layout, and in that 0.16.0 looks for slots that are none (below zero)
before it loads or stores a state. `unchecked` takes that out of the syntax tree of 0.16.0, so that the layout alone is
left; hypothesis: the look costs a small batch more than the layout gives.

The gates are made ready: their kernel is in the file of the model, which needs all of vLLM.

`extend` calls `chunk_gated_delta_rule`, GDN, whose files differ in the layout alone. It returns new states: its engine
gathers those of the pool before, and scatters them after.
"""

import ast
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import softplus

from labkit import sources

if TYPE_CHECKING:
    from labkit.kernels.gated_delta.chunked import ExtendInputs
    from labkit.kernels.gated_delta.recurrent import StepInputs

MODULE, CHUNK = (f"vllm.model_executor.layers.fla.ops.{name}" for name in ("fused_recurrent", "chunk"))
V_FIRST = {"vllm-0.15.1": False, "vllm-0.16.0": True}


def decode(x: "StepInputs", source: str, checked: bool = True) -> Callable[[], Any]:
    """A step of GDN that updates the pool and returns its output [1, N, HV, V]. checked: False: without the look."""
    module = _module(source, checked)
    rate = -x.A_log.exp() * softplus(x.a.float() + x.dt_bias)
    q, k, v, g, beta = (part[None] for part in (x.q, x.k, x.v, rate, x.b.float().sigmoid()))
    options = {
        "initial_state": x.state, "inplace_final_state": True, "ssm_state_indices": x.indices, "scale": x.scale,
        "cu_seqlens": torch.arange(len(x.q) + 1, dtype=torch.int32, device=x.q.device),
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    return lambda: module.fused_recurrent_gated_delta_rule(q, k, v, g, beta, **options)[0]


def decode_kda(x: "StepInputs", source: str, checked: bool = True) -> Callable[[], Any]:
    """A step of KDA that updates the pool and returns its output [N, HV, V]. checked: False: without the look.

    The launch is in the lab's words, since the file of theirs needs all of an extend: tile, warps and stages are its.
    """
    module = _module(source, checked)
    (N, H, K), (HV, V) = x.q.shape, x.v.shape[1:]
    blocks = {"BK": triton.next_power_of_2(K), "BV": min(triton.next_power_of_2(V), 8), "num_warps": 1, "num_stages": 3}
    options = blocks | {
        "q": x.q, "k": x.k, "v": x.v, "g": -x.A_log.exp()[:, None] * softplus(x.a.float() + x.dt_bias),
        "beta": x.b.float().sigmoid(), "h0": x.state, "ht": x.state, "scale": x.scale,
        "cu_seqlens": torch.arange(N + 1, dtype=torch.int32, device=x.q.device),
        "ssm_state_indices": x.indices, "num_accepted_tokens": None,
        "N": N, "T": N, "B": 1, "H": H, "HV": HV, "K": K, "V": V,
        "stride_init_state_token": x.state.stride(0), "stride_final_state_token": x.state.stride(0),
        "stride_indices_seq": 1, "stride_indices_tok": 1, "INPLACE_FINAL_STATE": True,
        "IS_BETA_HEADWISE": False, "USE_QK_L2NORM_IN_KERNEL": True, "IS_KDA": True,
    }  # fmt: skip
    launch = module.fused_recurrent_gated_delta_rule_fwd_kernel[1, triton.cdiv(V, blocks["BV"]), N * HV]

    def call() -> Tensor:
        out = torch.empty_like(x.v)
        launch(o=out, **options)
        return out

    return call


def _module(source: str, checked: bool) -> ModuleType:
    return sources.load(source, MODULE) if checked else sources.changed(source, MODULE, unchecked)


def extend(x: "ExtendInputs", source: str, bounds: Tensor) -> Callable[[], Any]:
    """Returns the output [1, T, HV, V] and the final states, fp32, [N, ..] in the release's layout, as x.initial is.

    bounds: x.cu_seqlens, one tensor for all sets: it keeps what it waits for only of the last few.
    As its engine does, it has Triton take from torch the memory of the descriptors that some kernels make.
    """
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=bounds.device))
    function = sources.load(source, CHUNK).chunk_gated_delta_rule
    q, k, v, g, beta = (part[None] for part in (x.q, x.k, x.v, x.g, x.beta))
    options = {
        "initial_state": x.initial, "output_final_state": True, "scale": x.scale, "cu_seqlens": bounds,
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    return lambda: function(q, k, v, g, beta, **options)


def unchecked(tree: ast.Module) -> ast.Module:
    """The kernel without its two looks at the slot. ValueError if the release is not written as expected."""
    change = _Unchecked()
    changed = change.visit(tree)
    if change.looks != 2:
        raise ValueError(f"{change.looks} looks at the slot were taken out; expected: 2")
    return changed


class _Unchecked(ast.NodeTransformer):
    """`if state_idx < 0: return` goes; of `if final_state_idx >= 0:` the body stays."""

    looks = 0

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        test = ast.unparse(node.test)
        if test not in ("state_idx < 0", "final_state_idx >= 0"):
            return node
        self.looks += 1
        return node.body if test.startswith("final") else None
