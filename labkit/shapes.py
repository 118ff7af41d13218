"""Shapes of published models, each with its source (the model's config.json on its public page)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatedDeltaModel:
    """A model with gated delta rule layers.

    heads, value_heads: H and HV. k, v: head dimensions K and V. layers: gated delta layers of all_layers.
    hidden: model width. state: dtype of the recurrent state as engines keep it.
    total, active: parameters, and those of one token (model card); experts, top_k: routed ones (0: dense).
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
    active: float = 0.0
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
    "Qwen3-Next-80B-A3B", 16, 32, 36, 48, total=80e9, active=3e9, experts=512, top_k=10, hidden=2048, expert_width=512
)
# Kimi Linear's heads, with a decay for every channel of K; from its model card, not from a config file that was read.
KIMI_LINEAR = GatedDeltaModel("Kimi-Linear-48B-A3B", 32, 32, 20, 27)
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


Group = tuple[int, tuple[int, ...]]  # K, and the N of each matrix [N, K] that multiplies the same x


@dataclass(frozen=True)
class LinearModel:
    """The weight matrices that one token passes in decode.

    layers: kind of layer -> (how many of them, its groups in the order of execution). period: the kinds of the layers
    that a chain is made of. heads: [N, K] of the output matrix, in each vocabulary that a source gives.
    """

    name: str
    layers: dict[str, tuple[int, tuple[Group, ...]]]
    period: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]

    def chain(self, merged: bool) -> list[Group]:
        """The groups of one period; merged: the matrices of a group as one."""
        groups = [group for kind in self.period for group in self.layers[kind][1]]
        return [(k, (sum(ns),) if merged else ns) for k, ns in groups]

    def shapes(self) -> list[tuple[int, int]]:
        """Every [N, K] of the model, each matrix alone and those of a group as one, and the output matrices."""
        groups = [group for _, some in self.layers.values() for group in some]
        found = [(n, k) for k, ns in groups for n in (*ns, sum(ns))]
        return list(dict.fromkeys([*found, *self.heads]))

    def token(self, merged: bool = True) -> dict[tuple[int, int], int]:
        """How often each [N, K] occurs in one token, all layers and the first of `heads`."""
        counts: dict[tuple[int, int], int] = {self.heads[0]: 1}
        for count, groups in self.layers.values():
            for k, ns in groups:
                for n in (sum(ns),) if merged else ns:
                    counts[n, k] = counts.get((n, k), 0) + count
        return counts


def _llama(name: str, layers: int, hidden: int, kv: int, ffn: int, vocabulary: int) -> LinearModel:
    """Layers of q, k and v; output; gate and up; down."""
    groups = (hidden, (hidden, kv, kv)), (hidden, (hidden,)), (hidden, (ffn, ffn)), (ffn, (hidden,))
    return LinearModel(name, {"layer": (layers, groups)}, ("layer",) * 4, ((vocabulary, hidden),))


_QWEN_FFN = ((2560, (9216, 9216)), (9216, (2560,)))
LINEAR = {
    model.name: model
    for model in (
        # AutoMegaKernel's benchmark models: 155.7 MB streamed a token at bf16 leave four layers for h1024.
        _llama("AutoMegaKernel h1024", 4, 1024, 256, 2816, 32000),
        _llama("AutoMegaKernel h2048", 4, 2048, 512, 5632, 32000),
        _llama("Llama-3.2-1B", 16, 2048, 512, 8192, 128256),
        LinearModel(
            "Qwen3.5-4B",
            {
                # q, k, v and z in one matrix, then a and b of 32 rows each; output; FFN
                "gated delta": (24, ((2560, (12288, 32, 32)), (4096, (2560,)), *_QWEN_FFN)),
                # q with its gate, k, v; output; FFN
                "attention": (8, ((2560, (8192, 1024, 1024)), (4096, (2560,)), *_QWEN_FFN)),
            },
            ("gated delta", "gated delta", "gated delta", "attention"),
            ((152960, 2560), (248320, 2560)),  # as the pull request counts it, and as the model card does
        ),
    )
}  # fmt: skip
_QWEN35 = LINEAR["Qwen3.5-4B"]
_QWEN35_WEIGHTS = _QWEN35.token() | dict(zip(_QWEN35.heads, (0, 1), strict=True))
# Its weights are those of LINEAR, with the model card's vocabulary; k and v of 1024 rows are four heads of 256.
QWEN35_4B = GatedDeltaModel(
    "Qwen3.5-4B", 16, 32, 24, 32, hidden=2560, kv_heads=4,
    total=float(sum(count * n * k for (n, k), count in _QWEN35_WEIGHTS.items())),
)  # fmt: skip
# [N, K] of other models that published GEMV figures are for (Llama-3-8B and Qwen3 projections and output matrices).
OTHER_LINEAR = (
    (64, 2560), (4096, 2560), (4096, 4096), (14336, 4096), (4096, 14336), (28672, 4096), (152064, 2560), (128256, 4096),
)  # fmt: skip
