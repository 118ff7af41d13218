"""Other ways to compute an expert layer with weights that are not quantised: functions of LayerInputs that give a call.

| variant        | what it is                                                                                       |
|----------------|--------------------------------------------------------------------------------------------------|
| grouped_mm     | torch.nn.functional.grouped_mm twice, with the lab's routing and these kernels around it:        |
|                | ends (of each expert's rows), gather (rows of x, and where each slot's row is), activate (SiLU · |
|                | up), total (weighted sum); hypothesis: a library's GEMM loses only what its neighbours must move |
| loop           | a product of torch.mm for each expert that got a token; it waits for the GPU to know which       |
| liger          | liger-kernel's fused layer, its one wait for the GPU answered beforehand                         |
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from labkit.kernels.experts import routing
from labkit.kernels.experts.inputs import LayerInputs
from labkit.kernels.experts.tiles import _silu_up
from labkit.kernels.launch import Launch

PADDED_TO = 16  # rows: each expert's begin at a multiple of so many
CHUNK = 512  # values of a row a program
# Of liger-kernel's configurations, all of 64 rows, those that are tried: of its products 4 of 32; of its weighted sum 4
# of 40, most of which unroll a row so often that one compiles for seconds.
LIGER_TRIES = {
    "products": {"BLOCK_K": (64,), "num_stages": (3, 4), "num_warps": (4,)},
    "sum": {"BLOCK_H": (512,), "BLOCK_K": (2, 8)},
}


@triton.jit
def _ends_kernel(experts, ends, blocks, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr):
    """One program: where the rows of one expert end. experts: [blocks], -1 where there is none."""
    e = tl.program_id(0)
    count = tl.zeros([CHUNK], tl.int32)
    for first in range(0, blocks, CHUNK):
        i = first + tl.arange(0, CHUNK)
        owner = tl.load(experts + i, mask=i < blocks, other=-1)
        count += ((owner >= 0) & (owner <= e)).to(tl.int32)
    tl.store(ends + e, tl.sum(count, 0) * BLOCK_M)


@triton.jit
def _gather_kernel(
    x, slots, padded, rows, positions, slot_count, H, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr
):
    """One program: BLOCK_M sorted rows, CHUNK values of each, from x [T, H]; and the position of each slot's row."""
    first = tl.program_id(0) * BLOCK_M
    if first >= tl.load(padded):
        return
    m = first + tl.arange(0, BLOCK_M)
    h = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    slot = tl.load(slots + m)
    valid = slot < slot_count
    mask = valid[:, None] & (h < H)[None, :]
    values = tl.load(x + (slot // TOP_K).to(tl.int64)[:, None] * H + h[None, :], mask=mask)
    tl.store(rows + m.to(tl.int64)[:, None] * H + h[None, :], values, mask=mask)
    if tl.program_id(1) == 0:
        tl.store(positions + slot, m, mask=valid)


@triton.jit
def _activate_kernel(hidden, out, padded, I, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr):  # noqa: E741
    """One program: SiLU(gate) · up of BLOCK_M rows, CHUNK values of each. hidden: [rows, 2 I]; out: [rows, I]."""
    first = tl.program_id(0) * BLOCK_M
    if first >= tl.load(padded):
        return
    m = (first + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    i = (tl.program_id(1) * CHUNK + tl.arange(0, CHUNK))[None, :]
    at = hidden + m * (2 * I) + i
    value = _silu_up(tl.load(at, mask=i < I, other=0.0), tl.load(at + I, mask=i < I, other=0.0))
    tl.store(out + m * I + i, value.to(out.dtype.element_ty), mask=i < I)


@triton.jit
def _total_kernel(parts, positions, weights, out, H, TILES, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK values of one token: the weighted sum of its slots' rows, in the order of the slots."""
    t = (tl.program_id(0) // TILES).to(tl.int64)
    h = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(positions + t * TOP_K + j).to(tl.int64)
        part = tl.load(parts + row * H + h, mask=h < H, other=0.0)
        total += tl.load(weights + t * TOP_K + j).to(tl.float32) * part.to(tl.float32)
    tl.store(out + t * H + h, total.to(out.dtype.element_ty), mask=h < H)


def grouped_mm(x: LayerInputs) -> Callable[[], Any]:
    """The layer by torch's grouped product; every id must be in range. May be captured in a CUDA graph."""
    found = routing.at_once(routing.route(x.ids, x.shape[1], PADDED_TO), x.ids, x.shape[1])
    inputs, hidden, positions, ends = _memory(x, found)
    glue = around(x, found, inputs, positions, ends)

    def call() -> None:
        found()
        glue["ends"]()
        glue["gather"]()
        up = functional.grouped_mm(inputs, x.w1.transpose(-2, -1), offs=ends)
        activate(up, hidden, found)()
        parts = functional.grouped_mm(hidden, x.w2.transpose(-2, -1), offs=ends)
        total(parts, positions, x)()

    return call


def glue(x: LayerInputs) -> list[Launch]:
    """What `grouped_mm` launches beside torch's products, as something to compile."""
    found = routing.at_once(routing.route(x.ids, x.shape[1], PADDED_TO), x.ids, x.shape[1])
    inputs, hidden, positions, ends = _memory(x, found)
    up, parts = inputs.new_empty((len(inputs), 2 * hidden.shape[1])), torch.empty_like(inputs)
    before = around(x, found, inputs, positions, ends)
    return [*found.launches.values(), *before.values(), activate(up, hidden, found), total(parts, positions, x)]


def _memory(x: LayerInputs, found: routing.Routing) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorted rows of x, those between the products, each slot's row, and where each expert's rows end."""
    T, E, top_k, H, width = x.shape
    like = {"dtype": x.x.dtype, "device": x.x.device}
    rows = found.blocks * PADDED_TO
    positions = torch.zeros(T * top_k, dtype=torch.int32, device=x.x.device)
    ends = torch.zeros(E, dtype=torch.int32, device=x.x.device)
    return torch.zeros((rows, H), **like), torch.zeros((rows, width), **like), positions, ends


def around(x: LayerInputs, found: routing.Routing, rows: Tensor, positions: Tensor, ends: Tensor) -> dict[str, Launch]:
    """The launches before the first product. rows: [rows, H]; positions: [T · top_k]; ends: [E], int32."""
    T, E, top_k, H, _ = x.shape
    shared = {"BLOCK_M": PADDED_TO, "CHUNK": CHUNK}
    last = {"experts": found.experts, "ends": ends, "blocks": found.blocks}
    gather = {"x": x.x, "slots": found.slots, "padded": found.padded, "rows": rows, "positions": positions}
    gather |= {"slot_count": T * top_k, "H": H, "TOP_K": top_k}
    return {
        "ends": Launch(_ends_kernel, (E,), last | shared, {"num_warps": 4}),
        "gather": Launch(_gather_kernel, (found.blocks, triton.cdiv(H, CHUNK)), gather | shared, {"num_warps": 4}),
    }


def activate(up: Tensor, hidden: Tensor, found: routing.Routing) -> Launch:
    """The launch between the products. up: [rows, 2 I]; hidden: [rows, I]."""
    args = {"hidden": up, "out": hidden, "padded": found.padded, "I": hidden.shape[1]}
    grid = (found.blocks, triton.cdiv(hidden.shape[1], CHUNK))
    return Launch(_activate_kernel, grid, args | {"BLOCK_M": PADDED_TO, "CHUNK": CHUNK}, {"num_warps": 4})


def total(parts: Tensor, positions: Tensor, x: LayerInputs) -> Launch:
    """The launch after the second product. parts: [rows, H]."""
    T, _, top_k, H, _ = x.shape
    tiles = triton.cdiv(H, CHUNK)
    args = {"parts": parts, "positions": positions, "weights": x.weights, "out": x.out, "H": H, "TILES": tiles}
    return Launch(_total_kernel, (T * tiles,), args | {"TOP_K": top_k, "BLOCK": CHUNK}, {"num_warps": 4})


def loop(x: LayerInputs) -> Callable[[], Any]:
    """The layer by one product of torch.mm for each expert that got a token; eager, since it reads their counts."""
    T, E, top_k, H, width = x.shape
    weights = x.weights.to(x.x.dtype)

    def call() -> None:
        flat = x.ids.flatten()
        order = flat.sort(stable=True).indices
        ends = flat.long().bincount(minlength=E).cumsum(0).tolist()
        rows = x.x[order // top_k]
        up = torch.empty((T * top_k, 2 * width), dtype=x.x.dtype, device=x.x.device)
        parts = torch.empty((T * top_k, H), dtype=x.x.dtype, device=x.x.device)
        spans = [(e, slice(*span)) for e, span in enumerate(pairwise([0, *ends])) if span[1] > span[0]]
        for e, span in spans:
            torch.mm(rows[span], x.w1[e].t(), out=up[span])
        gate, other = up.chunk(2, -1)
        hidden = functional.silu(gate) * other
        for e, span in spans:
            torch.mm(hidden[span], x.w2[e].t(), out=parts[span])
        slots = torch.empty_like(parts)
        slots[order] = parts
        torch.bmm(weights[:, None], slots.view(T, top_k, H), out=x.out[:, None])

    return call


def liger(x: LayerInputs, tune: bool = True) -> Callable[[], Any]:
    """The layer by liger-kernel, on this routing alone; returns what the call returns.

    Its one host synchronisation, for the number of tiles, is answered with what it is for these ids, so that a CUDA
    graph can capture it. tune: choose anew for these tokens, which its own key leaves out, among some of its
    configurations; else as it chose last for these weights' sizes.
    """
    from liger_kernel.ops import fused_moe

    if tune:
        _tune_anew(fused_moe._fused_up_proj_swiglu_kernel, LIGER_TRIES["products"])
        _tune_anew(fused_moe._fused_down_proj_kernel, LIGER_TRIES["products"])
        _tune_anew(fused_moe._token_gather_weighted_sum_kernel, LIGER_TRIES["sum"])
    weights = x.weights.to(x.x.dtype)
    ids = x.ids.int()
    tiles = len(fused_moe.compute_routing_metadata(ids, len(x.w1))[-1])

    def call() -> Tensor:
        with torch.no_grad(), mock.patch.object(Tensor, "item", return_value=tiles):
            return fused_moe.LigerFusedMoEFunction.apply(x.x, x.w1, x.w2, ids, weights)

    with torch.no_grad():
        fused_moe.LigerFusedMoEFunction.apply(x.x, x.w1, x.w2, ids, weights)  # tunes
    return call


def liger_tuners() -> list[Any]:
    """The kernels of liger-kernel's layer, which tune themselves."""
    from liger_kernel.ops import fused_moe

    names = ("_fused_up_proj_swiglu_kernel", "_fused_down_proj_kernel", "_token_gather_weighted_sum_kernel")
    return [getattr(fused_moe, name) for name in names]


def _tune_anew(kernel: Any, tries: Mapping[str, tuple[int, ...]]) -> None:
    """Let an autotuned kernel choose again, quickly, among its configurations that have these values."""
    from triton import testing

    kernel.cache.clear()
    some = [c for c in kernel.configs if all(c.all_kwargs().get(name) in values for name, values in tries.items())]
    kernel.configs = some or kernel.configs
    kernel.do_bench = partial(testing.do_bench, warmup=2, rep=10)
