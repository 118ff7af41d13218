"""Humming's products of INT4 weights (W4A16), as vLLM's layer calls them: CUDA, compiled by nvcc when first used.

| launch                | whose                                                                                      |
|-----------------------|--------------------------------------------------------------------------------------------|
| slots, counts, blocks | ours: tokens sorted by expert, into blocks of as many rows as its tile has, such as 24     |
| gemm1, gemm2          | Humming's, "indexed": the tile that its own rule gives for this GPU and number of slots    |
| activate              | ours: SiLU(gate) · up                                                                      |
| sum                   | ours: the weighted sum over a token's experts                                              |

One token needs no sorting: each slot is a block of its own. Hypothesis: weights that are stored in the order in which
the matrix instruction takes them, loaded ahead by warps of their own, are read as fast as the memory gives them.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit import sources
from labkit.kernels.experts import routing
from labkit.kernels.experts.int4 import GROUP, Int4
from labkit.kernels.experts.tiles import SUM_TILE, _sum_kernel, options_of
from labkit.kernels.launch import Launch
from labkit.sources.catalogue import cached
from labkit.sources.fetching import problems
from labkit.studies.moe_persistent_grid.variants import HUMMING_RELEASE
from labkit.studies.moe_persistent_grid.vllm import _activated

if TYPE_CHECKING:
    from labkit.kernels.experts.inputs import LayerInputs

SORTED_BY = 16  # rows of a block of the lab's sort, from which those of another size are made
CHUNK = 1024
COMPUTE = json.dumps({"gemm_type": "indexed"})
ASKED = (  # of the GPU, while a tile is chosen and compiled
    "index", "name", "is_ppu", "sm_count", "sm_major", "sm_minor", "sm_version", "max_threads_per_block",
    "max_threads_per_sm", "max_registers_per_sm", "l2_cache_size", "l2_cache_size_mb", "l1_cache_size",
    "l1_cache_size_kb", "default_smem_size", "max_smem_size",
)  # fmt: skip
LOCKS = 2048  # integers, in which programs that share a tile wait for one another


@triton.jit
def _counts_kernel(slots, experts, firsts, counts, blocks, slot_count, SORTED_BY: tl.constexpr, CHUNK: tl.constexpr):
    """One program: where an expert's sorted rows begin, and how many slots it has. experts: [blocks] of SORTED_BY."""
    e = tl.program_id(0)
    before = tl.zeros([CHUNK], tl.int32)
    own = tl.zeros([CHUNK], tl.int32)
    for first in range(0, blocks, CHUNK):
        b = first + tl.arange(0, CHUNK)
        owner = tl.load(experts + b, mask=b < blocks, other=-1)
        before += ((owner >= 0) & (owner < e)).to(tl.int32)
        own += (owner == e).to(tl.int32)
    start, size = tl.sum(before, 0), tl.sum(own, 0)
    last = tl.load(slots + (start + size - 1) * SORTED_BY + tl.arange(0, SORTED_BY), mask=size > 0, other=slot_count)
    tl.store(firsts + e, start * SORTED_BY)
    tl.store(counts + e, tl.maximum(size - 1, 0) * SORTED_BY + tl.sum((last < slot_count).to(tl.int32), 0))


@triton.jit
def _blocks_kernel(
    slots, firsts, counts, out, owners, padded, slot_count, E, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """One program: the rows of a block of BLOCK_M, and its expert; -1 beyond the last block that has a slot."""
    b = tl.program_id(0)
    bins = tl.arange(0, BINS)
    own = (tl.load(counts + bins, mask=bins < E, other=0) + BLOCK_M - 1) // BLOCK_M
    end = tl.cumsum(own, 0)
    live = tl.sum(own, 0)
    if b == 0:
        tl.store(padded, live * BLOCK_M)
    owner = tl.sum((end <= b).to(tl.int32), 0)
    is_live = b < live
    place = tl.minimum(owner, E - 1)
    before = tl.sum(tl.where(bins < owner, own, 0), 0)
    row = tl.arange(0, ROWS)
    i = (b - before) * BLOCK_M + row
    mask = is_live & (i < tl.load(counts + place)) & (row < BLOCK_M)
    slot = tl.load(slots + tl.load(firsts + place) + i, mask=mask, other=slot_count)
    tl.store(out + b * BLOCK_M + row, slot, mask=row < BLOCK_M)
    tl.store(owners + b, tl.where(is_live, owner, -1))


@dataclass(frozen=True)
class Prepared:
    """Weights of a product [E, N, K] in the order in which Humming reads them. config: its description of them."""

    config: Any
    weight: Tensor
    scales: Tensor


def prepared(w: Int4) -> Prepared:
    """The weights as Humming stores them: on the GPU, once for all numbers of tokens.

    Raises `sources.NotFetched`, or what Humming raises without a GPU, its compiler, or a package that it needs.
    """
    E, N, half = w.packed.shape
    schema = _modules().schema.HummingWeightSchema(b_dtype="uint4", weight_scale_group_size=GROUP)
    given = {"weight": w.packed.view(torch.int32), "weight_scale": w.scales}
    config, made = _modules().transform.prepare_and_transform_humming_tensors(
        given, N, 2 * half, schema, num_experts=E, torch_dtype=torch.bfloat16, device=w.packed.device
    )
    return Prepared(config, made["weight"], made["weight_scale"])


def layer(x: "LayerInputs", first: Prepared, second: Prepared) -> Callable[[], Any]:
    """The layer; a call writes x.out [T, H]. May be captured in a CUDA graph. x: INT4 weights, bf16 activations.

    first, second: its weights. Compiles what it launches, seconds a product, if that is not in the cache.
    """
    T, E, top_k, H, width = x.shape
    slots, forward = T * top_k, _modules().forward.humming_forward
    tiles = [tile_for(one.config, slots) for one in (first, second)]
    sizes = [tile["block_shape"][0] for tile in tiles]
    like = {"dtype": x.x.dtype, "device": x.x.device}
    up, hidden, parts = (torch.empty((slots, n), **like) for n in (2 * width, width, H))
    locks = torch.zeros(LOCKS, dtype=torch.int32, device=x.x.device)
    sort = {size: tables(x.ids, size, E) for size in dict.fromkeys(sizes)}

    def product(number: int, a: Tensor, out: Tensor, shared: int) -> None:
        one, (_, table) = (first, second)[number], sort[sizes[number]]
        forward(
            one.config, a, one.weight, one.scales, outputs=out, locks=locks, top_k=shared, valid_shape_m=slots,
            compute_config=COMPUTE, tuning_config=json.dumps(tiles[number]), **table,
        )  # fmt: skip

    def call() -> None:
        for launches, _ in sort.values():
            for launch in launches:
                launch()
        product(0, x.x, up, top_k)
        _activated(None, hidden, up)
        product(1, hidden, parts, 1)
        total(parts, x)()

    return call


def total(parts: Tensor, x: "LayerInputs") -> Launch:
    """The weighted sum. parts: [T · top_k, H], in the order of the slots."""
    T, E, top_k, H, _ = x.shape
    tiles = triton.cdiv(H, SUM_TILE)
    args = {"parts": parts, "ids": x.ids, "weights": x.weights, "out": x.out, "H": H, "TILES": tiles, "E": E}
    args |= {"TOP_K": top_k, "BLOCK": SUM_TILE, "DEPENDENT": False}
    return Launch(_sum_kernel, (T * tiles,), args, options_of(args, 4))


def tables(ids: Tensor, block_m: int, experts: int) -> tuple[list[Callable[[], Any]], Mapping[str, Tensor]]:
    """What sorts the slots into blocks of any number of rows, and where it leaves them, by Humming's names.

    ids: [T, top_k], all in range.
    """
    T, top_k = ids.shape
    slots = T * top_k
    if T == 1:
        table = torch.full((slots, block_m), slots, dtype=torch.int32, device=ids.device)
        table[:, 0] = torch.arange(slots, device=ids.device)
        padded = torch.tensor([slots * block_m], dtype=torch.int32, device=ids.device)
        return [], {"sorted_ids": table.view(-1), "expert_ids": ids.view(-1), "num_tokens_padded": padded}
    found = routing.at_once(routing.route(ids, experts, SORTED_BY), ids, experts)
    blocks = min(slots, (slots + experts * (block_m - 1)) // block_m)
    new = {"dtype": torch.int32, "device": ids.device}
    firsts, counts, padded = (torch.empty(size, **new) for size in (experts, experts, 1))
    out, owners = torch.empty(blocks * block_m, **new), torch.empty(blocks, **new)
    shared = {"slots": found.slots, "firsts": firsts, "counts": counts, "slot_count": slots}
    counted = shared | {"experts": found.experts, "blocks": found.blocks, "SORTED_BY": SORTED_BY, "CHUNK": CHUNK}
    placed = shared | {"out": out, "owners": owners, "padded": padded, "E": experts, "BLOCK_M": block_m}
    placed |= {"ROWS": triton.next_power_of_2(block_m), "BINS": triton.next_power_of_2(experts)}
    launches = [
        *found.launches.values(),
        Launch(_counts_kernel, (experts,), counted, {"num_warps": 4}),
        Launch(_blocks_kernel, (blocks,), placed, {"num_warps": 1}),
    ]
    return launches, {"sorted_ids": out, "expert_ids": owners, "num_tokens_padded": padded}


def tile_for(config: Any, slots: int) -> dict[str, Any]:
    """What a product is launched with for so many slots, by Humming's own rule for the GPU at hand."""
    ruled = _modules().tune.get_heuristics_config(config, gemm_type="indexed")
    return next(tile for above, most, tile in ruled if above < slots <= most)


def gpu_facts() -> dict[str, Any]:
    """What Humming asks the GPU at hand, so that a process that does not see it can compile for it."""
    _modules()
    here = sources.load(HUMMING_RELEASE, "humming.device").DeviceInfo(0)
    return {name: getattr(here, name) for name in ASKED}


def compile_for(shape: Sequence[int], slots: int, gpu: Mapping[str, Any]) -> None:
    """Compile a product into Humming's cache, for a GPU that need not be here; nothing is run.

    shape: E, N, K. gpu: `gpu_facts` of it. Raises what Humming raises without nvcc.
    """
    E, N, K = shape
    schema = _modules().schema.HummingWeightSchema(b_dtype="uint4", weight_scale_group_size=GROUP)
    ops = sources.load(HUMMING_RELEASE, "humming.ops")
    with (
        mock.patch.object(_device(), "_extension", SimpleNamespace(_DeviceInfo=lambda index: SimpleNamespace(**gpu))),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
        mock.patch.object(ops, "register_kernel", lambda path: (0, path)),
    ):
        config = _modules().transform.prepare_layer_config(N, K, schema, num_experts=E, torch_dtype=torch.bfloat16)
        options = json.loads(config.to_str()) | json.loads(COMPUTE) | tile_for(config, slots)
        _modules().kernel.HummingKernel(**{name: value for name, value in options.items() if name != "num_sms"})


def _device() -> ModuleType:
    _modules()
    return sources.load(HUMMING_RELEASE, "humming.utils.device")


@cache
def _modules() -> SimpleNamespace:
    """Humming's modules; its compiled parts are checked, too. It compiles by nvcc, into the lab's cache."""
    made = sources.source(HUMMING_RELEASE)
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"  # else it starts a process when it is imported
    os.environ.setdefault("HUMMING_COMPILER", "nvcc")
    os.environ.setdefault("HUMMING_CACHE_DIR", str(cached("LABKIT_BUILT", "built") / made.name))
    if sources.is_fetched(made) and (wrong := problems(made, sources.folder(made))):
        raise ImportError(f"{wrong[0]}. Fetch it again.")
    names = {"schema": "schema", "transform": "transform", "forward": "forward", "tune": "tune"}
    names |= {"kernel": "kernel.humming"}
    return SimpleNamespace(**{name: sources.load(HUMMING_RELEASE, f"humming.{one}") for name, one in names.items()})
