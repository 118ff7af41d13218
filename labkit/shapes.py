"""Shapes of published models, each with its source (the model's config.json on its public page)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatedDeltaModel:
    """A model with gated delta rule layers.

    heads, value_heads: H and HV. k, v: head dimensions K and V. layers: gated delta layers of all_layers.
    hidden: model width. state: dtype of the recurrent state as engines keep it.
    total, active: parameters, and those of one token, in billions (model card); experts, top_k: routed ones (0: dense).
    expert_share: share of all parameters that are routed experts, from hidden, expert width and expert count.
    kv_heads, head_dim: of the full-attention layers, for the bytes of their KV cache.
    """

    name: str
    heads: int
    value_heads: int
    layers: int
    all_layers: int
    k: int = 128
    v: int = 128
    total: float = 0.0
    experts: int = 0
    top_k: int = 0
    hidden: int = 0
    expert_width: int = 0
    kv_heads: int = 2
    head_dim: int = 256

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of one sequence's state in one layer."""
        return self.value_heads * self.k * self.v * itemsize

    @property
    def expert_parameters(self) -> float:
        """Parameters of one routed expert in one layer: gate, up and down."""
        return 3.0 * self.hidden * self.expert_width


QWEN3_NEXT = GatedDeltaModel(
    "Qwen3-Next-80B-A3B", 16, 32, 36, 48, total=80e9, experts=512, top_k=10, hidden=2048, expert_width=512
)
GATED_DELTA = {
    model.name: model
    for model in (
        QWEN3_NEXT,
        GatedDeltaModel("Qwen3.5-0.8B", 16, 16, 18, 24),
        GatedDeltaModel("Qwen3.5-27B", 16, 48, 48, 64),
        GatedDeltaModel("Qwen3.5-122B-A10B", 16, 64, 36, 48),
        # No published model: the pull request's example tile [256, 8] needs K = 256.
        GatedDeltaModel("K-256 example", 16, 32, 36, 48, k=256, v=256),
    )
}
