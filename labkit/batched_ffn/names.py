"""Names of the study's variants, shapes and traces, and the functions of `trials` that make the variants."""

from typing import Any

from labkit.batched_ffn import cache
from labkit.batched_ffn.formats import K_FORMATS

# hidden, width of the dense feed-forward layer; each model's config.json on its public page
DENSE = {"Qwen3.5-27B": (5120, 17408), "Qwen3.5-4B": (2560, 9216)}
# experts, top_k, hidden, width of one routed expert
ROUTED = {"Qwen3.5-35B-A3B": (256, 8, 2048, 512)}
TRACES = {"uniform": cache.uniform, "zipf": cache.zipf, "local": cache.local}  # synthetic: the generators of `cache`
POLICY = "slru"  # of the cache, in the cases that are timed: the source's
LAYERS = 4  # of the routed model, in the cases of the expert cache
FEW_CACHED, MANY_CACHED = 8, 192  # tokens at most, experts a layer at least
EVERY_EXPERT = 512  # tokens from which on a step needs all experts: an order of last use hits nothing, `PINNED` does
PINNED = "pinned"

PER_TOKEN, GEMM_N, STATIONARY, MATRIX = "per_token", "gemm_n", "weight_stationary", "tensor_core"
WIDE = "tensor_core, wide tiles"
INTEGERS = "tensor_core, integers"
STORED = "per_token, blocks as stored"
SPLIT_K = "split-K, atomic sum"  # the negative control of bits
READ = "read the stored bytes"
CUBLAS, DEQUANTISED = "cuBLAS, bf16 weights", "dequantise + cuBLAS"
GEMLITE = "gemlite, tuned"
GEMLITE_BITS = {"Q4_K": 4, "Q8_0": 8}  # what it is paired with, in groups of 32
GEMLITE_TOKENS = (1, 4, 16, 64)
GEMLITE_ROWS = 17408  # one shape: it tunes for a minute at every number of tokens
ROWCOPY, INDEXED, INDEXED_MATRIX = "grouped_rowcopy", "grouped_indexed", "grouped_indexed, matrix instructions"
INDEXED_INTEGERS = "grouped_indexed, integers"
GROUPED_MM = "F.grouped_mm, bf16 weights"
NEEDED, PREFETCHED = "copied when needed", "the next layer's prefetched"
RESIDENT, COPIES = "every expert there", "copies only"

MULTIPLY_ADD = (PER_TOKEN, GEMM_N, STATIONARY)  # one family of bits
# Most tokens that a variant is timed with: beyond, its launches or its weight bytes, one lot a token or 16 tokens, take
# too long.
MOST = {PER_TOKEN: 8, GEMM_N: 16, SPLIT_K: 8, INTEGERS: 32}
MOST_ROUTED = {PER_TOKEN: 64}
LEAST = {WIDE: 64}  # below, its tile is mostly padding
MAIN = "Qwen3.5-27B"
DISSECTED = {"rows": 17408, "format": "Q4_K", "N": 8}  # whose code is taken apart: seconds for every kernel
FEW_TOKENS = (1, 8, 64)  # of those asked for, other models, and whole layers, are timed with these


def of(x: Any) -> dict[str, str]:
    """Name -> role of the variants of a case."""
    if x.op == "cache":
        return {PREFETCHED: "ours", NEEDED: "baseline", RESIDENT: "step", COPIES: "control"}
    if x.op == "routed":
        found = {INDEXED_MATRIX: "ours", INDEXED: "step", ROWCOPY: "baseline", PER_TOKEN: "baseline"}
        found |= {GROUPED_MM: "peer", READ: "control"}
        if x["format"] in K_FORMATS and x["activations"] == "bf16":
            found[INDEXED_INTEGERS] = "step"
        return {name: role for name, role in found.items() if x["N"] <= MOST_ROUTED.get(name, x["N"])}
    found = {MATRIX: "ours", STATIONARY: "step", GEMM_N: "step", PER_TOKEN: "baseline", WIDE: "step", CUBLAS: "peer"}
    if x.op == "product":
        found |= {DEQUANTISED: "peer", READ: "control", SPLIT_K: "control"}
        if x["format"] == "BF16":  # they are what the library takes
            del found[DEQUANTISED]
        if x["format"] in K_FORMATS and x["activations"] == "bf16":
            found[INTEGERS] = "step"
        if x["format"] == "Q8_0" and x["N"] == 1:
            found[STORED] = "step"
        if x["rows"] == GEMLITE_ROWS and x["format"] in GEMLITE_BITS and x["N"] in GEMLITE_TOKENS:
            found[GEMLITE] = "peer"
    return {n: role for n, role in found.items() if LEAST.get(n, 0) <= x["N"] <= MOST.get(n, x["N"])}


MAKERS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {  # (operation, variant) -> function of `trials`, arguments
    **{(op, name): (op, {"variant": name}) for op in ("product", "ffn") for name in (*MULTIPLY_ADD, MATRIX, WIDE)},
    ("product", INTEGERS): ("integers", {}),
    ("product", SPLIT_K): ("split_k", {}),
    ("product", STORED): ("stored", {}),
    ("product", CUBLAS): ("cublas", {}),
    ("product", DEQUANTISED): ("dequantised", {}),
    ("product", GEMLITE): ("gemlite", {}),
    ("product", READ): ("read", {}),
    ("ffn", CUBLAS): ("cublas_ffn", {}),
    **{("routed", name): ("routed", {"variant": name}) for name in (PER_TOKEN, ROWCOPY, INDEXED, INDEXED_MATRIX)},
    ("routed", INDEXED_INTEGERS): ("routed_integers", {}),
    ("routed", GROUPED_MM): ("grouped_mm", {}),
    ("routed", READ): ("read", {}),
    **{("cache", name): ("cached", {"variant": name}) for name in (NEEDED, PREFETCHED, RESIDENT, COPIES)},
}
