"""A Llama-style decoder: its shape, seeded random weights, and weights read from safetensors files.

Weights go by the names of Hugging Face's Llama checkpoints. The safetensors format: eight bytes with the length of the
header, a JSON header (name -> dtype, shape, data_offsets), then the values.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labkit.kernels.checks import check_one_of

Weights = dict[str, Tensor]  # by checkpoint name
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies ("rope_type": "llama3" in config.json)."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder: RMSNorm, rotary embedding (rotate-half), grouped-query attention, SwiGLU, no biases.

    tied: the head is the embedding. ValueError for a size below 1, heads that kv_heads does not divide, or an odd
    head_dim.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    theta: float = 10000.0
    eps: float = 1e-6
    tied: bool = False
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}; allowed: a multiple of kv_heads, {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; allowed: an even number (rotary pairs)")

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.heads // self.kv_heads

    @property
    def q_width(self) -> int:
        """Values of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Values of all key (or value) heads."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Rows of the query, key and value matrices together."""
        return self.q_width + 2 * self.kv_width

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name within a layer -> shape, matrices as [out, in]."""
        return {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (self.q_width, self.hidden),
            "self_attn.k_proj": (self.kv_width, self.hidden),
            "self_attn.v_proj": (self.kv_width, self.hidden),
            "self_attn.o_proj": (self.hidden, self.q_width),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.ffn, self.hidden),
            "mlp.up_proj": (self.ffn, self.hidden),
            "mlp.down_proj": (self.hidden, self.ffn),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint name -> shape; without `lm_head.weight` where it is tied."""
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for i in range(self.layers):
            found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in self.layer_shapes().items()}
        found["model.norm.weight"] = (self.hidden,)
        return found if self.tied else found | {"lm_head.weight": (self.vocab, self.hidden)}

    def streamed_weights(self) -> int:
        """Weights that one token reads: all matrices and gains once, of the embedding its row (and the tied head)."""
        total = sum(math.prod(shape) for shape in self.shapes().values())
        return total + self.hidden - (0 if self.tied else self.vocab * self.hidden)


# h1024: layers, widths and vocabulary as in labkit/shapes.py; the split of its widths into heads is published nowhere
# known: 16 query and 4 kv heads of 64 are chosen. h2048: AutoMegaKernel, eval/bench_r2_perf.py. Both have its
# models/toy.py's theta, eps and separate head. Llama-3.2-1B: the model's config.json.
MODELS = {
    model.name: model
    for model in (
        Decoder("AutoMegaKernel h1024", 1024, 4, 16, 4, 64, 2816, 32000),
        Decoder("AutoMegaKernel h2048", 2048, 4, 16, 4, 128, 5632, 32000),
        Decoder("Llama-3.2-1B", 2048, 16, 32, 8, 64, 8192, 128256, 500000.0, 1e-5, True, RopeScaling(32, 1, 4, 8192)),
    )
}

# For the interpreter, of no use otherwise.
TINY = Decoder("tiny", hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=24, vocab=61)


def decoder(name: str) -> Decoder:
    """A model by its name. ValueError for another one."""
    known = MODELS | {TINY.name: TINY}
    check_one_of("model", name, known)
    return known[name]


def inverse_frequencies(model: Decoder) -> Tensor:
    """Radians a position turns each rotary pair by; [head_dim / 2], float64. Llama 3's scaling where the model has it.

    Source of the scaling: Llama 3.1's reference code, `apply_scaling`.
    """
    half = model.head_dim // 2
    frequencies = model.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if (scaling := model.scaling) is None:
        return frequencies
    turns = scaling.original * frequencies / (2 * math.pi)  # in the context that the model was first trained on
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def random_weights(
    model: Decoder, seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Weights:
    """Weights by checkpoint name: matrices normal with variance 1 / in, gains near 1. One device's stream differs from
    another's. Drawn in float32, then rounded to dtype."""
    generator = torch.Generator(device).manual_seed(seed)
    found = {}
    for name, shape in model.shapes().items():
        values = torch.randn(shape, generator=generator, device=device)
        values = values.mul_(0.1).add_(1) if len(shape) == 1 else values.mul_(shape[1] ** -0.5)
        found[name] = values.to(dtype)
    return found


def layer_of(model: Decoder, weights: Weights, layer: int) -> Weights:
    """One layer's weights by their names within a layer."""
    return {name: weights[f"model.layers.{layer}.{name}.weight"] for name in model.layer_shapes()}


def head_of(model: Decoder, weights: Weights) -> Tensor:
    """The matrix that makes logits, [vocab, hidden]: `lm_head`, or the embedding where it is tied."""
    return weights["model.embed_tokens.weight" if model.tied else "lm_head.weight"]


def load_weights(
    model: Decoder, path: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Weights:
    """The model's weights from a safetensors file, or from all of a folder's; cast to dtype, None: as stored.

    Names that the model does not have (rotary tables, a tied head's copy) are left out. FileNotFoundError if there is
    no such file; ValueError for a file that is broken, or that lacks a weight or has it in another shape.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path} has no *.safetensors file")
    stored = {name: tensor for file in files for name, tensor in read_safetensors(file).items()}
    found = {}
    for name, shape in model.shapes().items():
        if name not in stored:
            raise ValueError(f"{path} has no {name}, which {model.name} needs as {shape}")
        if tuple(stored[name].shape) != shape:
            raise ValueError(f"{path}: {name} is {tuple(stored[name].shape)}; allowed: {shape}")
        found[name] = stored[name].to(device, dtype or stored[name].dtype)
    return found


def read_safetensors(path: Path) -> Weights:
    """Every tensor of a safetensors file; values stay on disk until they are used.

    FileNotFoundError if it is not there; ValueError naming the file and what is wrong with it.
    """
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path}: its header would be {length} bytes, but the file has {size}")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, AttributeError) as problem:
            raise ValueError(f"{path}: its header is no JSON object: {problem}") from None
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[8 + length :]
    return {name: _tensor(f"{path}: {name}", data, entry) for name, entry in entries.items()}


def _tensor(label: str, data: Tensor, entry: dict) -> Tensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{label} is {entry!r}; allowed: dtype, shape and two data_offsets") from None
    if dtype not in DTYPES:
        raise ValueError(f"{label} is {dtype}; allowed: {', '.join(DTYPES)}")
    if not 0 <= start <= stop <= len(data) or stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{label} {shape} {dtype} is at bytes {start} to {stop} of {len(data)}")
    values = data[start:stop]
    if values.storage_offset() % DTYPES[dtype].itemsize:
        values = values.clone()  # a view needs its values aligned
    return values.view(DTYPES[dtype]).reshape(shape)
