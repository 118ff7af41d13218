"""FlashInfer's own kernels of the gated delta rule, as its public functions call them; GDN alone.

| function | what it calls                                                                                            |
|----------|----------------------------------------------------------------------------------------------------------|
| decode   | [V, K]: `gated_delta_rule_decode_pretranspose` on a pool, fp32 or bf16 states; [K, V]:                   |
|          | `gated_delta_rule_decode`, fp32 states, which takes them one after the other                             |
| extend   | `chunk_gated_delta_rule`, [V, K]: on Hopper one kernel a chunk, or, where there are few heads, one that  |
|          | splits a sequence among multiprocessors (it chooses)                                                     |

They are written in the CuTe DSL, which `pip install labkit[cutlass]` brings; without it the rows say so.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from labkit import sources

if TYPE_CHECKING:
    from labkit.kernels.gated_delta.chunked import ExtendInputs
    from labkit.kernels.gated_delta.recurrent import StepInputs

Call = Callable[[], Any]
SOURCE = "flashinfer-python-0.7.2.post1"


def decode(x: "StepInputs") -> Call:
    """A step that updates the pool and writes x.out; a [K, V] state has its slots one after the other."""
    module = sources.load(SOURCE, "flashinfer.gdn_decode")
    q, k, v, a, b, out = (part[:, None] for part in (x.q, x.k, x.v, x.a, x.b, x.out))
    options = {
        "q": q, "k": k, "v": v, "a": a, "b": b, "A_log": x.A_log, "dt_bias": x.dt_bias, "scale": x.scale,
        "output": out, "use_qk_l2norm": True,
    }  # fmt: skip
    if not x.v_first:
        states = x.state[x.indices[0] : x.indices[0] + len(x.q)]
        return lambda: module.gated_delta_rule_decode(state=states, **options)
    options |= {"state": None, "initial_state": x.state}
    options["initial_state_indices"] = x.indices.clone()  # it reads 16 bytes at a time
    return lambda: module.gated_delta_rule_decode_pretranspose(**options)


def extend(x: "ExtendInputs", longest: int) -> Call:
    """Writes x.out and x.final, [V, K]. longest: tokens of the longest sequence.

    The decay is made ready, α instead of its logarithm: its kernels take that.
    """
    function = sources.load(SOURCE, "flashinfer.gdn_prefill").chunk_gated_delta_rule
    options = {
        "q": x.q, "k": x.k, "v": x.v, "g": torch.exp(x.g), "beta": x.beta, "scale": x.scale,
        "initial_state": x.initial, "output_final_state": True, "cu_seqlens": x.cu_seqlens,
        "use_qk_l2norm_in_kernel": True, "output": x.out, "output_state": x.final, "max_seqlen": longest,
    }  # fmt: skip
    return lambda: function(**options)
