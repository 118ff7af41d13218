"""The fastest extend that the lab has: which kernels, and how many segments, by rule."""

import torch
from torch import Tensor

from labkit.kernels.gated_delta import fused, segmented
from labkit.kernels.gated_delta.chunked import Extend, ExtendInputs
from labkit.kernels.gated_delta.segmented import Segments


def segments(
    cu_seqlens: Tensor, HV: int, per_channel: bool = False, device: torch.device | str | None = None
) -> Segments:
    """Where `extend` cuts sequences of these boundaries, [N + 1]: the same for every layer, so made once a batch.

    per_channel: whether a decay is one a channel (KDA), not one a head (GDN). device: as in `chunked.plan`.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    return segmented.choose(cu_seqlens, HV, device=device) if per_channel else fused.choose(cu_seqlens, HV, device)


def extend(x: ExtendInputs, v_first: bool, segments: Segments | int | None = None) -> Extend:
    """An extend with state [N, HV, V, K] if v_first, else [N, HV, K, V], as launches that the caller makes.

    `fused` for a decay a head (GDN), `segmented` for one a channel (KDA). segments: those of a batch, or how many of
    each sequence at most, or None: by rule. Raises ValueError naming the argument, its value and what is allowed.
    """
    return fused.extend(x, v_first, segments) if x.g.ndim == 2 else segmented.extend(x, v_first, segments)
