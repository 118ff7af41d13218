"""What a faster state kernel is worth in a whole decode step, from the bytes that the step moves.

A decode step of a batch is bound by memory: it reads the weights it touches, the KV cache of the full-attention layers,
and reads and writes the recurrent state. The share of the state in those bytes is the most that its kernel can matter.
"""

from labkit.shapes import GatedDeltaModel

NVFP4_BYTES = 0.5 + 1 / 16  # a 4-bit value and an 8-bit scale for each 16 of them
BF16_BYTES = 2.0


def state_share(
    model: GatedDeltaModel, batch: int, context: int, weight_bytes: float = BF16_BYTES, state_itemsize: int = 4
) -> float:
    """Share of the state's bytes in one decode step.

    batch: sequences; context: tokens of KV cache each; weight_bytes: per weight. Experts are taken to be chosen
    uniformly, so that the distinct ones follow from batch and top_k; tensor parallelism divides all parts alike.
    """
    state = 2 * batch * model.layers * model.state_bytes(state_itemsize)
    cache = batch * context * (model.all_layers - model.layers) * 2 * model.kv_heads * model.head_dim * BF16_BYTES
    return state / (state + cache + _weights(model, batch) * weight_bytes)


def _weights(model: GatedDeltaModel, batch: int) -> float:
    """Weights that a step of `batch` tokens reads."""
    if not model.experts:
        return model.total
    routed = model.all_layers * model.expert_parameters
    distinct = model.experts * (1 - (1 - model.top_k / model.experts) ** batch)
    return model.total - routed * model.experts + routed * distinct


def end_to_end(kernel_ratio: float, share: float) -> float:
    """Amdahl: old time / new time of the step, when a share of the old time becomes `kernel_ratio` times faster."""
    return 1 / (1 - share + share / kernel_ratio)
