"""What a faster state kernel is worth in a whole decode step or prefill, from the bytes or products that it takes.

A decode step of a batch is bound by memory: it reads the weights it touches, the KV cache of the full-attention layers,
and reads and writes the recurrent state. The state's share of the time is what its kernel can be worth. A prefill is
bound by arithmetic: what is not extend takes at least as long as its matrix products take at the GPU's peak.
"""

from labkit.bench import ledger
from labkit.shapes import QWEN3_NEXT, QWEN35_4B, GatedDeltaModel

NVFP4_BYTES = 0.5 + 1 / 16  # a 4-bit value and an 8-bit scale for each 16 of them
BF16_BYTES = 2.0
PEAK_BF16 = {"H100 80GB HBM3": 989e12, "H200": 989e12}  # FLOP/s, dense; by data sheet of the SXM boards


def state_share(
    model: GatedDeltaModel, batch: int, context: int, weight_bytes: float = BF16_BYTES, state_itemsize: int = 4
) -> float:
    """Share of the state's bytes in one decode step; ValueError for a model whose number of weights is not known here.

    batch: sequences; context: tokens of KV cache each; weight_bytes: per weight. Experts are taken to be chosen
    uniformly, so that the distinct ones follow from batch and top_k; tensor parallelism divides all parts alike.
    """
    if not model.total:
        known = f"{QWEN3_NEXT.name}, {QWEN35_4B.name}"
        raise ValueError(f"the weights of {model.name} are not known here; allowed: {known}")
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


def prefill_share(model: GatedDeltaModel, tokens: int, extend_us: float, gpu: str) -> float:
    """Share of the extends in a prefill of `tokens`, at most: attention, weights' bytes and launches are not counted.

    extend_us: of one layer; 1.0 on a GPU whose peak is not known here. ValueError for a model whose number of active
    weights is not known here.
    """
    if not model.active:
        raise ValueError(f"the active weights of {model.name} are not known here; allowed: {QWEN3_NEXT.name}")
    peak = next((rate for name, rate in PEAK_BF16.items() if gpu.endswith(name)), float("inf"))
    extends, products = model.layers * extend_us * 1e-6, 2 * model.active * tokens / peak
    return extends / (extends + products)


def time_share(byte_share: float, slowness: float) -> float:
    """Share of time, where the state's bytes move `slowness` times slower than at the ceiling and all others at it."""
    return byte_share * slowness / (byte_share * slowness + 1 - byte_share)


def end_to_end(kernel_ratio: float, share: float) -> float:
    """Amdahl: old time / new time of the step, when a share of the old time becomes `kernel_ratio` times faster."""
    return 1 / (1 - share + share / kernel_ratio)


ledger.watch(__name__)
