"""Routed experts made ready for timing, all on the GPU: from the chosen experts to y."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.bench.spec import Case, Trial
from labkit.kernels.gguf import experts, formats, reference
from labkit.kernels.gguf.experts import Experts
from labkit.studies.batched_ffn import peers, variants
from labkit.studies.batched_ffn.trials import TOLERANCE, blocks, shapes, shared, tokens, trial_of_tokens
from labkit.studies.batched_ffn.work import routing
from labkit.sweep.trial import DTYPES, Call, Random, in_order

Ids = Sequence[Sequence[int]]  # experts of every token, as the host knows them
Make = Callable[[Any, Ids], Call]  # `Work`, its ids -> y
# It rounds x, and what is between the matrices, to 8 bits, 32 values with one scale: each some 0.5 % of normal values,
# more of the second, whose largest are farther out.
LLAMA_TOLERANCE = 3e-2


def held_experts(x: Case, device: Any, count: int, seed: int) -> tuple[list[Tensor], Experts]:
    """Blocks of gate, up and down, [count, rows, bytes of a row], and the experts packed."""

    def make() -> tuple[list[Tensor], Experts]:
        raw = []
        for i, (rows, columns) in enumerate(shapes(x)):  # a layer at a time: quantising takes several times the room
            seeds = [seed + 3 * layer + i for layer in range(count // x["E"])]
            parts = [blocks(x["E"] * rows, columns, x["format"], device, one) for one in seeds]
            raw.append(torch.cat(parts).unflatten(0, (count, rows)))
        return raw, experts.pack(*raw, x["format"])

    return shared(x, (str(device), count, seed), make)


def expected_of(x: Case, raw: Sequence[Tensor], first: int, v: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Of some tokens, float64; first: number of a layer's first expert in raw."""
    needed = ids.unique().tolist()
    exact = {e: [formats.dequantise(one[first + e], x["format"]) for one in raw] for e in needed}
    return reference.routed([exact.get(e, []) for e in range(x["E"])], v, ids, weights)


def work_of(x: Case, device: Any, seed: int, ids: Ids) -> Any:
    """The tokens of a case, with these experts each, of random weights."""
    from labkit.kernels.gguf.routed import Work

    chosen = torch.tensor(ids, dtype=torch.int32, device=device)
    weights = Random(device, seed + 5)(*chosen.shape).softmax(1)
    return Work.of(tokens(x, x["hidden"], device, seed), chosen, weights, x["width"])


def _routed(
    x: Case, device: Any, sets: int, seed: int, make: Make, ours: bool = False, dtype: torch.dtype | None = None
) -> Trial:
    """A trial of what `make` gives. dtype: of y, that of the activations by default."""
    [[ids]] = routing(x)
    raw, _ = held_experts(x, device, x["E"], seed)
    # every buffer set has experts of its own, as far as there are so many: together they are larger than the L2
    moved = [[[(e + i * x["E"] // sets) % x["E"] for e in chosen] for chosen in ids] for i in range(sets)]
    works = [_giving(work_of(x, device, seed, one), dtype) for one in moved]
    first = works[0]

    def expected(picks: list[int]) -> Tensor:
        return expected_of(x, raw, 0, first.x[picks], first.ids[picks], first.weights[picks])

    def alone(values: Tensor, out: Tensor) -> Call:
        at = (values.data_ptr() - first.x.data_ptr()) // (first.x.stride(0) * values.element_size())
        work = _giving(type(first).of(values, first.ids[at : at + 1], first.weights[at : at + 1], x["width"]), dtype)
        return in_order([make(work, moved[0][at : at + 1]), lambda: out.copy_(work.y)])

    calls, y, tolerance = list(map(make, works, moved)), [work.y for work in works], 2 * TOLERANCE[x["activations"]]
    return trial_of_tokens(calls, first.x, y, expected, tolerance, alone, ours)


def _giving(work: Any, dtype: torch.dtype | None) -> Any:
    """The work with a y of this dtype."""
    return replace(work, y=work.y.to(dtype or work.y.dtype))


def routed(x: Case, device: Any, sets: int, seed: int, variant: str) -> Trial:
    """One of the lab's ways through the experts.

    Per token and with a copy a row, the host knows the routing before: what it takes to ask for it is left out.
    """
    from labkit.kernels.gguf import routed as kernels
    from labkit.kernels.gguf import routed_integers

    _, held = held_experts(x, device, x["E"], seed)
    by_integers = variant == variants.INDEXED_INTEGERS
    if by_integers:
        packed = held
        held = shared(x, ("tiled", str(device), seed), lambda: routed_integers.tiled(packed))
    table = torch.arange(x["E"], dtype=torch.int32, device=device)  # each lies at its number

    def make(work: Any, ids: Ids) -> Call:
        if by_integers:
            made = routed_integers.grouped_integers(held, table, work)
        elif variant in (variants.INDEXED, variants.INDEXED_MATRIX):
            made = kernels.grouped_indexed(held, table, work, matrix=variant == variants.INDEXED_MATRIX)
        else:
            way = kernels.per_token if variant == variants.PER_TOKEN else kernels.grouped_rowcopy
            made = way(held, {e: e for e in range(x["E"])}, ids, work)
        return in_order([*made, kernels.weighted_sum(work)])

    return _routed(x, device, sets, seed, make, ours=True)


integers = partial(routed, variant=variants.INDEXED_INTEGERS)


def grouped_mm(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """F.grouped_mm on weights that were dequantised to bf16 before; rows are sorted and gathered in every call."""

    def dense() -> tuple[Tensor, Tensor]:
        raw, _ = held_experts(x, device, x["E"], seed)
        gate, up, down = (formats.dequantise(one, x["format"]).to(DTYPES[x["activations"]]) for one in raw)
        return torch.cat([gate, up], 1).mT, down.mT

    matrices = shared(x, ("dense", x["activations"], str(device), seed), dense)
    return _routed(x, device, sets, seed, lambda work, ids: peers.grouped_mm(*matrices, work))


def llama_cpp(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """llama.cpp's routed products, from blocks as stored; x and y are fp32, as it takes them."""
    from labkit.studies.batched_ffn import llama_cpp as released

    raw, _ = held_experts(x, device, x["E"], seed)

    def make(work: Any, ids: Ids) -> Call:
        return released.routed(x["format"], raw, work.x.float(), work.ids, work.weights.contiguous(), work.y)

    made = _routed(x, device, sets, seed, make, dtype=torch.float32)
    return replace(made, tolerance={"y": LLAMA_TOLERANCE})
