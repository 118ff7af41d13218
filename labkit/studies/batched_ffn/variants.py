"""What is timed: shapes and traces, which variants a case has, and one table of them for each operation.

Operations: `product`, one matrix; `designs`, one by another design; `ffn`, a whole dense layer; `routed`, a layer of
routed experts, all on the GPU; `cache`, steps through several such layers, whose experts come from the host.
"""

from labkit.bench.spec import Case, Variant, lazy, variant

STUDY, GGUF = "labkit.studies.batched_ffn", "labkit.kernels.gguf"
TRIALS, ROUTED_TRIALS, CACHED = (f"{STUDY}.{name}" for name in ("trials", "routed_trials", "cache_trials:cached"))
ABLATIONS, PEERS, STEPS = (f"{STUDY}.{name}" for name in ("ablations", "peers", "steps:Steps"))

FORMATS = ("F32", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # in the order of the pages
K_FORMATS = ("Q4_K", "Q5_K", "Q6_K")
# hidden, width of the dense feed-forward layer; each model's config.json on its public page
DENSE = {"Qwen3.5-27B": (5120, 17408), "Qwen3.5-4B": (2560, 9216)}
# experts, top_k, hidden, width of one routed expert
ROUTED = {"Qwen3.5-35B-A3B": (256, 8, 2048, 512)}
MAIN, MAIN_ROUTED = "Qwen3.5-27B", "Qwen3.5-35B-A3B"
TRACES = {name: lazy(f"labkit.kernels.offload.policies:{name}") for name in ("uniform", "zipf", "local")}  # synthetic
POLICY = "slru"  # of the cache, in the cases that are timed: the source's
LAYERS = 4  # of the routed model, in the cases of the expert cache
FEW_CACHED, MANY_CACHED = 8, 192  # tokens at most, experts a layer at least
EVERY_EXPERT = 512  # tokens from which on a step needs all experts: an order of last use hits nothing, `PINNED` does
PINNED = "pinned"

PER_TOKEN, GEMM_N, STATIONARY, MATRIX = "per_token", "gemm_n", "weight_stationary", "tensor_core"
WIDE = "tensor_core, wide tiles"
INTEGERS = "tensor_core, integers"
SPECIALISED, CONTINUED = "tensor_core, specialised warps", "tensor_core, sums continued"
# format -> what it has another design for, and the tokens, of those asked for, at which that is timed
DESIGNED = dict.fromkeys(K_FORMATS, (SPECIALISED, (8, 16, 64))) | {"BF16": (CONTINUED, (1, 8, 64, 512))}
ONE_MATRIX = ("product", "designs")  # operations
STORED = "per_token, blocks as stored"
SPLIT_K = "split-K, atomic sum"  # the negative control of bits
READ = "read the stored bytes"
CUBLAS, DEQUANTISED = "cuBLAS, bf16 weights", "dequantise + cuBLAS"
GEMLITE = "gemlite, tuned"
GEMLITE_BITS = {"Q4_K": 4, "Q8_0": 8}  # what it is paired with, in groups of 32
GEMLITE_TOKENS = (1, 4, 16, 64)
LLAMA = "llama.cpp"
LLAMA_ROW = 512  # what its rows are multiples of
GEMLITE_ROWS = 17408  # one shape: it tunes for a minute at every number of tokens
ROWCOPY, INDEXED, INDEXED_MATRIX = "grouped_rowcopy", "grouped_indexed", "grouped_indexed, matrix instructions"
INDEXED_INTEGERS = "grouped_indexed, integers"
GROUPED_MM = "F.grouped_mm, bf16 weights"
NEEDED, PREFETCHED = "copied when needed", "the next layer's prefetched"
RESIDENT, COPIES = "every expert there", "copies only"

# Most tokens that a variant is timed with: beyond, its launches or its weight bytes, one lot a token or 16 tokens, take
# too long.
MOST = {PER_TOKEN: 8, GEMM_N: 16, SPLIT_K: 8, INTEGERS: 32}
MOST_ROUTED = {PER_TOKEN: 64}
LEAST = {WIDE: 64}  # below, its tile is mostly padding
DISSECTED = {"rows": 17408, "format": "Q4_K", "N": 8}  # whose code is taken apart: seconds for every kernel
FEW_TOKENS = (1, 8, 64)  # of those asked for, other models, and whole layers, are timed with these

PRODUCTS = {  # the lab's: name -> what launches it
    MATRIX: f"{GGUF}.products:tensor_core", STATIONARY: f"{GGUF}.products:weight_stationary",
    GEMM_N: f"{GGUF}.products:gemm_n", PER_TOKEN: f"{GGUF}.products:per_token", WIDE: f"{GGUF}.wide:wide",
}  # fmt: skip
ROLES = {MATRIX: "ours", STATIONARY: "step", GEMM_N: "step", PER_TOKEN: "baseline", WIDE: "step"}
READING = variant(READ, "control", f"{TRIALS}:read", source="labkit.kernels.ceilings:read_words")


def _ours(name: str, *before: str) -> Variant:
    """before: what launches more than the product."""
    return variant(name, ROLES[name], f"{TRIALS}:ours", {"variant": name}, source=(*before, PRODUCTS[name]))


def _product(name: str, role: str, trial: str, *source: str) -> Variant:
    return variant(name, role, f"{TRIALS}:{trial}", source=source)


def _routed(name: str, role: str, launcher: str) -> Variant:
    source = f"{GGUF}.routed:{launcher}", f"{GGUF}.routed:weighted_sum"
    return variant(name, role, f"{ROUTED_TRIALS}:routed", {"variant": name}, source=source)


def _llama_cpp(trials: str, launcher: str) -> Variant:
    source = "source:llama-cpp-python-0.3.36", f"{STUDY}.llama_cpp:{launcher}"
    return variant(LLAMA, "peer", f"{trials}:llama_cpp", source=source)


def _cached(name: str, role: str) -> Variant:
    """Launched one by one, since the host decides."""
    return variant(name, role, CACHED, {"variant": name}, source=STEPS, mode="eager")


VARIANTS = {  # operation -> its variants; the first one is repeated by the A/A control
    "product": (
        *(_ours(name) for name in PRODUCTS),
        _product(CUBLAS, "peer", "cublas", f"{PEERS}:linear"),
        _product(DEQUANTISED, "peer", "dequantised", f"{PEERS}:dequantise_linear"),
        READING,
        _product(SPLIT_K, "control", "split_k", f"{ABLATIONS}:split_k"),
        _product(INTEGERS, "step", "integers", f"{GGUF}.integers:integers"),
        _product(STORED, "step", "stored", f"{ABLATIONS}:stored"),
        _product(GEMLITE, "peer", "gemlite", f"{PEERS}:tune_gemlite", f"{PEERS}:gemlite"),
        _llama_cpp(TRIALS, "product"),
    ),
    "designs": (
        _product(SPECIALISED, "ours", "specialised", f"{GGUF}.specialised:by_specialised_warps"),
        _product(CONTINUED, "ours", "continued", f"{GGUF}.continued:by_continued_sums"),
        _product(INTEGERS, "step", "integers", f"{GGUF}.integers:integers"),
        _ours(WIDE),
        variant(MATRIX, "step", f"{TRIALS}:ours", {"variant": MATRIX}, source=(PRODUCTS[MATRIX],)),
        _product(CUBLAS, "peer", "cublas", f"{PEERS}:linear"),
        READING,
    ),
    "ffn": (
        *(_ours(name, f"{GGUF}.layers:{'apart' if name == WIDE else 'layer'}") for name in PRODUCTS),
        _product(CUBLAS, "peer", "cublas", f"{PEERS}:linear_layer"),
    ),
    "routed": (
        _routed(INDEXED_MATRIX, "ours", "grouped_indexed"),
        _routed(INDEXED, "step", "grouped_indexed"),
        _routed(ROWCOPY, "baseline", "grouped_rowcopy"),
        _routed(PER_TOKEN, "baseline", "per_token"),
        variant(GROUPED_MM, "peer", f"{ROUTED_TRIALS}:grouped_mm", source=f"{PEERS}:grouped_mm"),
        READING,
        variant(
            INDEXED_INTEGERS, "step", f"{ROUTED_TRIALS}:integers",
            source=(f"{GGUF}.routed_integers:grouped_integers", f"{GGUF}.routed:weighted_sum"),
        ),
        _llama_cpp(ROUTED_TRIALS, "routed"),
    ),
    "cache": (
        _cached(PREFETCHED, "ours"), _cached(NEEDED, "baseline"), _cached(RESIDENT, "step"), _cached(COPIES, "control"),
    ),
}  # fmt: skip


def of(x: Case) -> list[Variant]:
    """The variants of a case."""
    return [one for one in VARIANTS[x.op] if _takes(x, one.name)]


def _takes(x: Case, name: str) -> bool:
    """Whether a variant is timed in a case: libraries take some formats (BF16 as it is), what is slow few tokens."""
    N, format = x["N"], x["format"]
    if name in (SPECIALISED, CONTINUED):
        return name == DESIGNED[format][0]
    if x.op == "designs" and name == MATRIX and (format in K_FORMATS or LEAST[WIDE] < N):  # others are ahead there
        return False
    if name in (INTEGERS, INDEXED_INTEGERS) and (format not in K_FORMATS or x["activations"] != "bf16"):
        return False
    if name == GEMLITE and (x["rows"] != GEMLITE_ROWS or format not in GEMLITE_BITS or N not in GEMLITE_TOKENS):
        return False
    if name == LLAMA:
        return x["activations"] == "bf16" and _takes_rows(x)
    if (name, format) == (DEQUANTISED, "BF16") or (name == STORED and (format, N) != ("Q8_0", 1)):
        return False
    return LEAST.get(name, 0) <= N <= (MOST_ROUTED if x.op == "routed" else MOST).get(name, N)


def _takes_rows(x: Case) -> bool:
    """Whether llama.cpp takes the rows of a case's matrices; of routed experts, in blocks of integers alone."""
    columns = (x["K"],) if x.op == "product" else (x["hidden"], x["width"])
    return not any(one % LLAMA_ROW for one in columns) and (x.op == "product" or x["format"] not in ("F32", "BF16"))
