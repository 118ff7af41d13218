"""Shapes of the expert layers of published models, from the config.json on each model's public page."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MoeModel:
    """One routed expert layer. hidden: H; width: I, of one expert; no shared expert is counted."""

    name: str
    experts: int
    hidden: int
    width: int
    top_k: int

    def as_dict(self) -> dict[str, str | int]:
        """The parameters of a case."""
        return {"model": self.name, "E": self.experts, "H": self.hidden, "I": self.width, "top_k": self.top_k}


QWEN3_30B = MoeModel("Qwen3-30B-A3B", 128, 2048, 768, 8)
QWEN35_35B = MoeModel("Qwen3.5-35B-A3B", 256, 2048, 512, 8)
QWEN3_NEXT = MoeModel("Qwen3-Next-80B-A3B", 512, 2048, 512, 10)
MIXTRAL = MoeModel("Mixtral-8x7B", 8, 4096, 14336, 2)
DEEPSEEK = MoeModel("DeepSeek-V3", 256, 7168, 2048, 8)
MODELS = {model.name: model for model in (QWEN3_30B, QWEN35_35B, QWEN3_NEXT, MIXTRAL, DEEPSEEK)}
