"""Study 05: a feed-forward layer of many tokens from GGUF weights, dense and routed, and experts from a cache."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from labkit.bench.spec import Added, Case, Floor, Study, integer, lazy, list_of, one_of
from labkit.studies.batched_ffn import claims
from labkit.studies.batched_ffn import variants as names
from labkit.studies.batched_ffn.work import weight_bytes


def cases(parameters: Mapping[str, Any]) -> list[Case]:
    """Products, then whole layers, routed experts and the cache; cases that share weights follow each other."""
    found = []
    few = [n for n in parameters["tokens"] if n in names.FEW_TOKENS]
    for format, model in product(parameters["formats"], parameters["models"]):
        (hidden, width), main, of = names.DENSE[model], model == names.MAIN, {"format": format, "activations": "bf16"}
        _, designed_at = names.DESIGNED.get(format, ("", ()))
        for rows, K in ((width, hidden), (hidden, width)):
            shape, tokens = {"rows": rows, "K": K} | of, parameters["tokens"] if main else few
            found += [Case("product", shape | {"N": n}) for n in tokens]
            if main:
                found += [Case("designs", shape | {"N": n}) for n in tokens if n in designed_at]
        shape = {"model": model, "hidden": hidden, "width": width} | of
        found += [Case("ffn", shape | {"N": n}) for n in few if main]
    return found + _routed_cases(parameters)


def _routed_cases(parameters: Mapping[str, Any]) -> list[Case]:
    found = []
    for format, (model, sizes) in product(parameters["routed_formats"], names.ROUTED.items()):
        shape = dict(zip(("model", "E", "top_k", "hidden", "width"), (model, *sizes), strict=True))
        shape |= {"format": format, "activations": "bf16"}
        found += [Case("routed", shape | {"N": n, "trace": "uniform"}) for n in parameters["routed_tokens"]]
        found += [
            Case("cache", shape | {"N": n, "layers": names.LAYERS, "trace": t, "policy": policy, "capacity": c})
            for n in parameters["cache_tokens"]
            for c in parameters["capacities"]
            if _worth_a_cache(n, c, shape["E"])
            for t, policy in _cached(n, c, shape["E"], parameters["traces"])
        ]
    return found


def _cached(tokens: int, capacity: int, experts: int, traces: Sequence[str]) -> list[tuple[str, str]]:
    """Traces and policies; where a step needs every expert, or all of them stay, one trace is like any other."""
    every = tokens >= names.EVERY_EXPERT
    policy = names.PINNED if every else names.POLICY
    return [(trace, policy) for trace in (traces[:1] if every or capacity >= experts else traces)]


def _worth_a_cache(tokens: int, capacity: int, experts: int) -> bool:
    """Of many tokens and few experts a layer, a step does nothing but copy; of few tokens, nearly all are like all."""
    if tokens <= names.FEW_CACHED:
        return not names.MANY_CACHED <= capacity < experts
    return capacity >= names.MANY_CACHED and (tokens < names.EVERY_EXPERT or capacity < experts)


def floor(x: Case) -> Floor:
    """The weights that any token needs, once; x read and y written. Nothing is predicted of the cache's copies."""
    size = {"bf16": 2, "fp32": 4}[x["activations"]]
    layers, weights = x.params.get("layers", 1), weight_bytes(x)
    single = x.op in names.ONE_MATRIX
    values = x["rows"] + x["K"] if single else 2 * x["hidden"] * layers
    matrix = x["rows"] * x["K"] if single else 3 * x["hidden"] * x["width"]
    flops = 2 * x["N"] * x.params.get("top_k", 1) * layers * matrix
    if x.op == "cache":  # the experts of all layers are one buffer set, far larger than the L2
        return Floor(weights + x["N"] * values * size, flops, "", set_bytes=weight_bytes(x, whole=True))
    return Floor(weights + x["N"] * values * size, flops, "read", set_bytes=weights)


def _tiny(op: str, N: int, format: str = "Q8_0", **shape: Any) -> Case:
    """A case for the interpreter; fp32 activations, since it cannot multiply matrices in bf16."""
    return Case(op, {"N": N, "format": format, "activations": "fp32"} | shape)


_LAYER = {"model": "tiny", "hidden": 32, "width": 32}
_ROUTED = _LAYER | {"E": 3, "top_k": 2, "trace": "uniform"}
STUDY = Study(
    name="batched_ffn",
    title="Batched feed-forward layers, dense and routed",
    summary="What does batching a feed-forward layer save, launches or bytes, without changing a bit of its results?",
    cases=cases,
    variants=names.of,
    control=lambda x: names.of(x)[0].name,  # ours
    floor=floor,
    claims=claims.CLAIMS,
    pairs=claims.pairs,
    added=Added(
        ("blocks", "x", "y"),
        "blocks: uint8 [rows, bytes of a row], of the case's GGUF format as stored; x: [N, K], y: [N, rows], bf16; the "
        "function writes y[n] = W x[n].",
        lazy(f"{names.TRIALS}:added"),
        lambda case: case.op == "product",
        ("cold",),
        ("activations", ("bf16", "fp32")),
    ),
    kernels=lazy(f"{names.STUDY}.ahead:sources"),
    imports=("gemlite",),
    parameters={
        "models": list_of(one_of(*names.DENSE)),
        "formats": list_of(one_of(*names.FORMATS), empty=True),  # without: no product, no dense layer
        "tokens": list_of(integer(1, 4096)),
        "routed_formats": list_of(one_of(*names.FORMATS), empty=True),
        "routed_tokens": list_of(integer(1, 4096), empty=True),
        "cache_tokens": list_of(integer(1, 4096), empty=True),
        "traces": list_of(one_of(*names.TRACES)),
        "capacities": list_of(integer(1, 256)),
    },
    tiny=(
        _tiny("product", 3, rows=9, K=64),
        _tiny("product", 1, rows=33, K=544),
        _tiny("product", 2, "Q4_K", rows=8, K=256),
        _tiny("ffn", 2, **_LAYER),
        _tiny("routed", 2, **_ROUTED),
        _tiny("cache", 2, **_ROUTED, layers=2, policy="lru", capacity=1),
    ),
)
