"""The decoder in plain PyTorch, one token at a time with a KV cache; the kernels are judged by it.

Source: Llama (Touvron et al., 2023), as Hugging Face's checkpoints lay its weights out: rotate-half rotary embedding,
kv head of query head h: h // group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.kernels.decoder.model import Decoder, Weights, head_of, inverse_frequencies, layer_of


@dataclass
class Cache:
    """Keys (rotated) and values of every position so far; k, v: [layers, kv_heads, cache, head_dim]."""

    k: Tensor
    v: Tensor


@dataclass
class Generated:
    """tokens: the generated ones. margins: for each, its logit minus the second largest: how far from another choice.
    logits: [tokens, vocab]."""

    tokens: list[int]
    margins: list[float]
    logits: Tensor


def new_cache(
    model: Decoder, cache: int, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu"
) -> Cache:
    """Room for `cache` positions, zeros."""
    k = torch.zeros((model.layers, model.kv_heads, cache, model.head_dim), dtype=dtype, device=device)
    return Cache(k, torch.zeros_like(k))


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · gain. x: [..., hidden], gain: [hidden]; returns x's shape and dtype."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.to(x.dtype)


def rotate(x: Tensor, position: int, model: Decoder) -> Tensor:
    """Rotary embedding: pair (i, i + head_dim / 2) turned by position · frequency i. x: [..., head_dim]."""
    angle = position * inverse_frequencies(model)
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one token over its cache. q: [heads, D]; k, v: [kv_heads, T, D]; returns [heads, D]."""
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("hd,htd->ht", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("ht,htd->hd", scores.softmax(-1), v)


def step(model: Decoder, weights: Weights, cache: Cache, token: int, position: int) -> Tensor:
    """Logits [vocab] after one token; its keys and values go to the cache at `position`.

    All values in the cache's dtype, float64 or float32. ValueError for a token or position out of range.
    """
    return step_each(model, weights, [cache], [token], position)[0]


def step_each(
    model: Decoder, weights: Weights, caches: Sequence[Cache], tokens: Sequence[int], position: int
) -> Tensor:
    """`step` of a token of each sequence, all at one position: logits [sequences, vocab]; weights are read once."""
    for token in tokens:
        if not 0 <= token < model.vocab:
            raise ValueError(f"token is {token}; allowed: 0 to {model.vocab - 1}")
    room = min(cache.k.shape[2] for cache in caches)
    if not 0 <= position < room:
        raise ValueError(f"position is {position}; allowed: 0 to {room - 1}, the cache's last")
    dtype = caches[0].k.dtype
    x = weights["model.embed_tokens.weight"][list(tokens)].to(dtype)
    for i in range(model.layers):
        w = {name: tensor.to(dtype) for name, tensor in layer_of(model, weights, i).items()}
        each = [(cache.k[i], cache.v[i]) for cache in caches]
        x = x + _attend(model, w, each, rms_norm(x, w["input_layernorm"], model.eps), position)
        x = x + _feed_forward(w, rms_norm(x, w["post_attention_layernorm"], model.eps))
    x = rms_norm(x, weights["model.norm.weight"].to(dtype), model.eps)
    return x @ head_of(model, weights).to(dtype).T


def _attend(model: Decoder, w: Weights, caches: Sequence[tuple[Tensor, Tensor]], x: Tensor, position: int) -> Tensor:
    """x: [sequences, hidden]; caches: keys and values of each sequence in this layer."""
    size, found = model.head_dim, []
    q = rotate((x @ w["self_attn.q_proj"].T).unflatten(1, (model.heads, size)), position, model)
    new_k = rotate((x @ w["self_attn.k_proj"].T).unflatten(1, (model.kv_heads, size)), position, model)
    new_v = (x @ w["self_attn.v_proj"].T).unflatten(1, (model.kv_heads, size))
    for i, (k, v) in enumerate(caches):
        k[:, position], v[:, position] = new_k[i], new_v[i]
        found.append(attention(q[i], k[:, : position + 1], v[:, : position + 1]).flatten())
    return torch.stack(found) @ w["self_attn.o_proj"].T


def _feed_forward(w: Weights, x: Tensor) -> Tensor:
    gate, up = x @ w["mlp.gate_proj"].T, x @ w["mlp.up_proj"].T
    return (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj"].T


def generate(
    model: Decoder, weights: Weights, prompt: Sequence[int], count: int, cache: Cache | None = None, start: int = 0
) -> Generated:
    """Greedy generation of `count` tokens after a prompt; of equal logits, the first token.

    cache: with room for all, its positions before `start` filled; the prompt begins at `start`. None: a new one, of
    float64. ValueError for an empty prompt.
    """
    if not prompt:
        raise ValueError("prompt is empty; allowed: at least one token")
    if cache is None:
        device = weights["model.embed_tokens.weight"].device
        cache = new_cache(model, start + len(prompt) + count, device=device)
    return generate_each(model, weights, [prompt], count, [cache], start)[0]


def generate_each(
    model: Decoder, weights: Weights, prompts: Sequence[Sequence[int]], count: int, caches: Sequence[Cache],
    start: int = 0,
) -> list[Generated]:  # fmt: skip
    """`generate` after each of several prompts of one length, with a cache of its own each."""
    found = [Generated([], [], cache.k.new_empty((count, model.vocab))) for cache in caches]
    length = len(prompts[0])
    for i in range(length + count - 1):
        tokens = [(*prompt, *one.tokens)[i] for prompt, one in zip(prompts, found, strict=True)]
        each = step_each(model, weights, caches, tokens, start + i)
        if (after := i - length + 1) >= 0:
            for one, logits in zip(found, each, strict=True):
                best = logits.topk(min(2, model.vocab)).values
                one.logits[after] = logits
                one.tokens.append(int(logits.argmax()))
                one.margins.append(float(best[0] - best[-1]))
    return found
