"""The production kernels used otherwise than an engine would: what the study compares them with, or times alone."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from labkit.kernels.launch import Launch

if TYPE_CHECKING:
    from labkit.kernels.gated_delta.chunked import Extend
    from labkit.kernels.gated_delta.recurrent import VerifyInputs


def token_by_token(x: "VerifyInputs") -> Callable[[], Any]:
    """A verify of what decode offers: the sequences' states copied, then for each draft token a decode and a copy."""
    from labkit.kernels.gated_delta import recurrent

    scratch = torch.empty_like(x.state[: len(x.indices)])
    slots = torch.arange(len(scratch), dtype=torch.int32, device=scratch.device)
    shared = {name: getattr(x, name) for name in ("A_log", "dt_bias", "scale", "lower_bound", "v_first")}
    after = x.intermediate_states[x.cache_indices.long()[0] :]
    outs = torch.empty_like(x.out.transpose(0, 1), memory_format=torch.contiguous_format)
    steps = [
        recurrent.decode(
            recurrent.StepInputs(
                state=scratch, indices=slots, out=outs[t],
                **{name: getattr(x, name)[:, t] for name in ("q", "k", "v", "a", "b")}, **shared,
            )
        )
        for t in range(x.q.shape[1])
    ]  # fmt: skip

    def call() -> None:
        torch.index_select(x.state, 0, x.indices, out=scratch)
        for t, launch in enumerate(steps):
            launch()
            after[: len(scratch), t].copy_(scratch)
        x.out.copy_(outs.transpose(0, 1))

    return call


def chunk_state(whole: "Extend") -> Launch:
    """The one kernel of extend whose products depend on the layout: it takes the state from chunk to chunk.

    The extend is run once, so that it has what it reads.
    """
    whole()
    return whole.launches["chunk_state"]
