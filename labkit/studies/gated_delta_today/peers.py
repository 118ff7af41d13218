"""Calls of libraries beside the study's kernels, and the ceilings; libraries are imported where they are called."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from labkit import sources
from labkit.kernels import ceilings
from labkit.kernels.launch import Launch

if TYPE_CHECKING:
    from labkit.kernels.gated_delta.chunked import ExtendInputs

Call = Callable[[], Any]
FLASHINFER = "flashinfer-python-0.7.2.post1"


def read(x: Tensor) -> Launch:
    """Every value of x once, and nothing else. x: states of any shape, contiguous."""
    sums = torch.empty(triton.cdiv(x.numel(), ceilings.BLOCK), dtype=torch.float32, device=x.device)
    return ceilings.sum_values(x, sums)


def in_place(x: Tensor, factor: float) -> Call:
    """x *= factor: each byte read and written once. x: states of any shape."""
    return partial(x.mul_, factor)


def fla_extend(x: "ExtendInputs", bounds: Tensor) -> Call:
    """fla-core's chunked call of GDN, which tunes itself; it returns (out [1, T, HV, V], final states [V, K]).

    bounds: x.cu_seqlens as int64, one tensor for all sets: the library keeps what it waits for only of the last few.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta = (part[None] for part in (x.q, x.k, x.v, x.g, x.beta))
    options = {
        "scale": x.scale, "initial_state": x.initial, "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "state_v_first": True, "cu_seqlens": bounds,
    }  # fmt: skip
    return lambda: chunk_gated_delta_rule(q, k, v, g, beta, **options)


def flashinfer_extend(x: "ExtendInputs", longest: int) -> Call:
    """FlashInfer's chunked call of GDN, which writes x.out and x.final. longest: tokens of the longest sequence.

    It chooses between a kernel that walks a sequence and one that splits it among multiprocessors. The decay is made
    ready, α instead of its logarithm: its kernels take that.
    """
    function = sources.load(FLASHINFER, "flashinfer.gdn_prefill").chunk_gated_delta_rule
    options = {
        "q": x.q, "k": x.k, "v": x.v, "g": torch.exp(x.g), "beta": x.beta, "scale": x.scale,
        "initial_state": x.initial, "output_final_state": True, "cu_seqlens": x.cu_seqlens,
        "use_qk_l2norm_in_kernel": True, "output": x.out, "output_state": x.final, "max_seqlen": longest,
    }  # fmt: skip
    return lambda: function(**options)
