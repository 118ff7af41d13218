"""The kernels that cases need, as launches to compile before them: with memory for one block of rows alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from labkit.batched_ffn import experts, formats, names, trials
from labkit.batched_ffn.formats import ROWS, Packed
from labkit.bench.spec import Case
from labkit.launch import Launch

HERE = "labkit.batched_ffn.ahead"
Source = tuple[str, Mapping[str, Any]]
LAUNCHES = (names.PER_TOKEN, names.GEMM_N, names.STATIONARY, names.MATRIX, names.INTEGERS, names.WIDE)
BESIDE = (names.DEQUANTISED, names.SPLIT_K, names.STORED)


def sources(some: Sequence[Case]) -> list[Source]:
    """What `compiled.prebuild` takes; launches of the same code once."""
    found: dict[str, Source] = {}
    for x in some:
        for function, arguments in _of(x):
            key = {"N": _matters(arguments["N"], arguments["variant"])} if "variant" in arguments else {}
            found.setdefault(f"{function} {sorted((arguments | key).items())}", (f"{HERE}:{function}", arguments))
    return list(found.values())


def _matters(N: int, variant: str) -> tuple[int, ...]:
    """What of N the code depends on: the rule's choice, whether it is 1, and whether 16 divides it."""
    if variant in (names.PER_TOKEN, names.DEQUANTISED):
        return ()
    padded = 1 << (N - 1).bit_length()
    shared = {names.STATIONARY: min(8, padded), names.MATRIX: max(8, min(32, padded)), names.WIDE: padded}
    shared[names.INTEGERS] = max(8, min(32, padded))
    return shared.get(variant, 0), N == 1, N % 16 == 0


def _of(x: Case) -> list[tuple[str, dict[str, Any]]]:
    """Functions of this module and their arguments. A token is also computed alone, to compare its bits."""
    shared = {"format": x["format"], "activations": x["activations"]}
    known = [name for name in names.of(x) if name in LAUNCHES]
    if x.op == "product":
        shape = shared | {"rows": x["rows"], "K": x["K"], "gated": False}
        beside = [("beside", shape | {"N": x["N"], "variant": name}) for name in BESIDE if name in names.of(x)]
        return [("product", shape | {"N": n, "variant": v}) for n in (1, x["N"]) for v in known] + beside
    if x.op == "ffn":
        gate = shared | {"rows": x["width"], "K": x["hidden"], "gated": True}
        down = shared | {"rows": x["hidden"], "K": x["width"], "gated": False}
        apart = gate | {"gated": False}  # as wide tiles have gate and up
        return [
            ("product", one | {"N": n, "variant": v})
            for v in known
            for one in (apart if v == names.WIDE else gate, down)
            for n in (1, x["N"])
        ]
    shape = shared | {name: x[name] for name in ("E", "top_k", "hidden", "width")}
    grouped = [
        ("grouped", shape | {"N": n, "matrix": matrix, "part": part})
        for n in (1, x["N"])
        for matrix in (False, True)
        for part in range(4)
    ]
    if names.INDEXED_INTEGERS in names.of(x):
        grouped += [("grouped_integers", shape | {"N": n, "part": part}) for n in (1, x["N"]) for part in range(2)]
    return grouped + [
        ("one_expert", shape | {"N": n, "part": part}) for n in (1, 2, 4, 8) for part in range(2) if x.op == "routed"
    ]


def _weights(rows: int, K: int, format: str) -> Packed:
    """As many rows as asked for by its word, memory of one block."""
    kind = formats.find(format)
    blocks = torch.zeros((ROWS, K // kind.block * kind.block_bytes), dtype=torch.uint8)
    return replace(formats.pack(blocks, format), rows=rows)


def _vectors(N: int, rows: int, K: int, activations: str) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = trials.DTYPES[activations]
    return torch.zeros((N, K), dtype=dtype), torch.zeros((N, rows), dtype=dtype)


def product(variant: str, rows: int, K: int, format: str, N: int, activations: str, gated: bool) -> Launch:
    """A product, or gate and up in one launch."""
    if variant == names.INTEGERS:
        from labkit.batched_ffn import integers

        tiled = integers.tiled(_weights(rows, K, format))
        return integers.integers(tiled, *_vectors(N, rows, K, activations), up=tiled if gated else None)
    as_stored = trials.as_stored(variant, format)
    W = torch.empty((rows, K), dtype=torch.bfloat16) if as_stored else _weights(rows, K, format)
    made = trials.multiply(variant)(W, *_vectors(N, rows, K, activations), W if gated else None)
    return made[0] if isinstance(made, list) else made


def beside(variant: str, rows: int, K: int, format: str, N: int, activations: str, gated: bool) -> Launch:
    """What is timed beside the products."""
    from labkit.batched_ffn import beside

    W, (x, y) = _weights(rows, K, format), _vectors(N, rows, K, activations)
    if variant == names.STORED:
        return beside.stored(torch.zeros((rows, K // 32 * 34), dtype=torch.uint8), x, y)
    if variant == names.SPLIT_K:
        return beside.split_k(W, x, y.float())[1]
    return beside.dequantise(W, torch.empty((rows, K), dtype=x.dtype))


def grouped(
    E: int, top_k: int, hidden: int, width: int, format: str, N: int, activations: str, matrix: bool, part: int
) -> Launch:
    """Of routed experts: the sort, gate and up, down, or the weighted sum."""
    from labkit.batched_ffn import routed

    work = _work(N, top_k, hidden, width, activations)
    slots = torch.zeros(E, dtype=torch.int32)
    made = routed.grouped_indexed(_expert(hidden, width, format), slots, work, matrix=matrix)
    return [*made, routed.weighted_sum(work)][part]


def grouped_integers(
    E: int, top_k: int, hidden: int, width: int, format: str, N: int, activations: str, part: int
) -> Launch:
    """Of routed experts by their integers: gate and up, or down; the sort is that of the other matrix variant."""
    from labkit.batched_ffn import routed_integers

    held = routed_integers.tiled(_expert(hidden, width, format))
    work = _work(N, top_k, hidden, width, activations)
    return routed_integers.grouped_integers(held, torch.zeros(E, dtype=torch.int32), work)[1 + part]


def one_expert(E: int, top_k: int, hidden: int, width: int, format: str, N: int, activations: str, part: int) -> Launch:
    """Gate and up, or down, of one expert, as they are launched for it alone."""
    from labkit.batched_ffn import routed

    x, mid = _vectors(N, width, hidden, activations)
    return routed.one_expert(_expert(hidden, width, format), 0, x, mid, torch.zeros_like(x), N)[part]


def _work(N: int, top_k: int, hidden: int, width: int, activations: str) -> Any:
    from labkit.batched_ffn.routed import Work

    x = torch.zeros((N, hidden), dtype=trials.DTYPES[activations])
    return Work.of(x, torch.zeros((N, top_k), dtype=torch.int32), torch.zeros((N, top_k)), width)


def _expert(hidden: int, width: int, format: str) -> experts.Experts:
    kind = formats.find(format)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    size = lambda columns: columns // kind.block * kind.block_bytes  # noqa: E731
    blocks = [torch.zeros((1, rows, size(columns)), dtype=torch.uint8) for rows, columns in shapes]
    return experts.pack(*blocks, format)
