"""Routed experts of K formats by matrix instructions on the integers themselves.

| variant            | hypothesis                                                                                      |
|--------------------|-------------------------------------------------------------------------------------------------|
| `grouped_integers` | few tokens an expert: what bounds `routed.grouped_indexed` is not the bytes of the experts but  |
|                    | what is done to each weight, and the integers need a third less of it (`integers.py`)           |

Slots are sorted, and partials left and added, as in `routed.py`; a program's sums are those of `integers.py`. A program
has all tiles of one strip of rows, or of several, one after the other: its next tiles are asked for before a strip
ends, also of the next one. One warp, whole rows: a slot's bits depend on nothing but its token and its expert.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_one_of, check_tensor
from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.gguf import integers
from labkit.kernels.gguf.choose import TileChoice, check_tile
from labkit.kernels.gguf.experts import ROLES, Experts
from labkit.kernels.gguf.formats import K_FORMATS, ROWS
from labkit.kernels.gguf.integers import TILE, _add_tile, _arrays_of, _flat, _no_sums, _tile_of
from labkit.kernels.gguf.routed import Sorted, Work, _expert, check_tiles, check_work, each, most_tiles, sort
from labkit.kernels.gguf.shares import _without_first
from labkit.kernels.gguf.unpack import _silu_up
from labkit.kernels.launch import Launch
from labkit.kernels.target import has_dependent_launch

BASE = 0x43004300  # bits of two bf16 128


def tiled(experts: Experts) -> Experts:
    """The same experts, each matrix in the order of `integers.tiled`, of as many bytes; ValueError for another format.

    Only `grouped_integers` reads them: the shapes and dtypes of `Experts.matrix` are those of the other order.
    """
    check_one_of("format", experts.format.name, K_FORMATS)
    found = replace(experts, store=torch.zeros_like(experts.store))
    for expert in range(len(experts)):
        for role in ROLES:
            arrays = integers.tiled(experts.matrix(role, expert)).arrays
            for name, array in found.matrix(role, expert).arrays.items():
                array.copy_(arrays[name].view(array.dtype).view(array.shape))
    return found


@triton.jit
def _store(totals, y, members, y_stride, firsts, strip, rows, count, lanes, TOKENS: tl.constexpr, GATED: tl.constexpr):
    """Store the sums of a strip to the rows of their slots; of gate and up, SiLU(gate) · up. members: two of each 8."""
    PAIRS: tl.constexpr = len(totals) // (TOKENS // 2)
    for n in tl.static_range(TOKENS // 8):
        for i in tl.static_range(2):
            y_row = y + members[2 * n + i] * y_stride
            inside = 8 * n + lanes % 4 * 2 + i < count
            for m in tl.static_range(PAIRS):
                upper, lower = totals[4 * (n * PAIRS + m) + i], totals[4 * (n * PAIRS + m) + i + 2]
                if GATED:
                    row = (firsts[m] + strip) * 8 + lanes // 4
                    tl.store(y_row + row, _silu_up(upper, lower).to(y.dtype.element_ty), mask=inside & (row < rows))
                else:
                    row = (firsts[2 * m] + strip) * 8 + lanes // 4
                    tl.store(y_row + row, upper.to(y.dtype.element_ty), mask=inside & (row < rows))
                    row = (firsts[2 * m + 1] + strip) * 8 + lanes // 4
                    tl.store(y_row + row, lower.to(y.dtype.element_ty), mask=inside & (row < rows))


@triton.jit
def _grouped_integers_kernel(
    x, y, order, tiles, slots, words, high, scales, d, up_words, up_high, up_scales, up_d,
    words_stride, high_stride, scales_stride, d_stride, rows, strips, x_stride, y_stride, base, slots_a_row,
    TILES: tl.constexpr, FORMAT: tl.constexpr, STRIPS: tl.constexpr, BLOCKS: tl.constexpr, TOKENS: tl.constexpr,
    GATED: tl.constexpr, DEPTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: STRIPS strips of BLOCKS blocks of 8 rows of one expert, and up to TOKENS of its slots.

    x: pairs of bf16, as int32, x_stride too. It waits where `routed`'s kernel by matrix instructions does.
    """
    if GATED:
        wait_for_inputs(DEPENDENT)
    at = tiles + tl.program_id(1) * 3
    expert = tl.load(at)
    slot = tl.load(slots + tl.maximum(expert, 0)).to(tl.int64)
    if (expert < 0) | (slot < 0):
        return
    first_slot = tl.load(at + 1)
    count = tl.load(at + 2)
    strides = (words_stride, high_stride, scales_stride, d_stride)
    W = _expert((words, high, scales, d), strides, slot)
    up = _expert((up_words, up_high, up_scales, up_d), strides, slot)
    lanes = tl.arange(0, 32)
    firsts, arrays = (), ()
    for b in tl.static_range(BLOCKS):
        first = tl.minimum(b * strips, (rows + 7) // 8 - strips)
        firsts = firsts + (first,)
        arrays = arrays + (_arrays_of(W, first, TILES, FORMAT),)
        if GATED:
            arrays = arrays + (_arrays_of(up, first, TILES, FORMAT),)
    start = tl.program_id(0) * STRIPS * TILES
    end = tl.minimum(start + STRIPS * TILES, strips * TILES)
    asked = ()
    for i in tl.static_range(DEPTH):
        asked = asked + (_tile_of(arrays, tl.minimum(start + i, end - 1).to(tl.int64), lanes, FORMAT),)
    x_rows, members = (), ()
    for n in tl.static_range(TOKENS // 8):
        member = tl.load(order + first_slot + tl.minimum(8 * n + lanes // 4, count - 1))
        x_rows = x_rows + (x + (member // slots_a_row).to(tl.int64) * x_stride,)
        for i in tl.static_range(2):
            place = tl.minimum(8 * n + lanes % 4 * 2 + i, count - 1)
            members = members + (tl.load(order + first_slot + place).to(tl.int64),)
    if not GATED:
        wait_for_inputs(DEPENDENT)
    for strip in range(start // TILES, end // TILES):
        sums = _no_sums(len(arrays) // 2 * (TOKENS // 8))
        for t in tl.range(0, TILES):
            ahead = tl.minimum(strip * TILES + t + DEPTH, end - 1).to(tl.int64)
            asked = asked + (_tile_of(arrays, ahead, lanes, FORMAT),)
            sums = _add_tile(sums, asked[0], x_rows, t, lanes % 4, base, FORMAT)
            asked = _without_first(asked)
        _store(_flat(sums), y, members, y_stride, firsts, strip, rows, count, lanes, TOKENS, GATED)


def rule(tokens: int, experts: int, top_k: int) -> TileChoice:
    """Tiles for about as many slots as an expert has; of few, twice as many, so that few experts are read twice.

    With 8 tokens a program no tile is asked for ahead: more programs on a multiprocessor are worth more.
    """
    slots = each(tokens, experts, top_k)
    padded = 8 if slots <= 4 else 16 if slots <= 16 else 32
    return TileChoice(4, padded, 1, 1, 2 if padded == 16 else 1, True)


def tiles_a_program(tile: TileChoice) -> int:
    """How many tiles of weights a program has in turn, or those of one strip if these are more."""
    return 8 if tile.tokens == 8 else 16


def grouped_integers(
    experts: Experts, slots: Tensor, work: Work, tile: TileChoice | None = None, order: Sorted | None = None
) -> list[Launch]:
    """As `routed.grouped_indexed`: its partials, in three launches.

    experts: of `tiled`. work: x and mid bf16. tile: `rule`'s by default, one warp, no shares.
    """
    tile = tile or rule(len(work.x), len(slots), work.top_k)
    check_one_of("format", experts.format.name, K_FORMATS)
    check_one_of("x", work.x.dtype, (torch.bfloat16,))
    check_one_of("mid", work.mid.dtype, (torch.bfloat16,))
    check_tile(tile)
    check_one_of("num_warps", tile.num_warps, (1,))
    check_one_of("shares", tile.shares, (0,))
    check_work(experts, work)
    check_tensor("slots", slots, (len(slots),), (torch.int32,), work.x.device, "x's")
    check_tiles(most_tiles(work.ids.numel(), len(slots), tile.tokens))
    made = order or sort(work.ids, len(slots), tile.tokens)
    launches = [
        _grouped(experts, ("gate", "up"), slots, made, work.x, work.mid, work.top_k, tile),
        _grouped(experts, ("down",), slots, made, work.mid, work.partials, 1, tile),
    ]
    return launches if order else [made.launch, *launches]


def _grouped(
    experts: Experts, roles: Sequence[str], slots: Tensor, made: Sorted, x: Tensor, y: Tensor, slots_a_row: int,
    tile: TileChoice,
) -> Launch:  # fmt: skip
    first, arrays = experts.matrix(roles[0], 0), _arrays(experts, roles[0])
    pairs = x.view(torch.int32)
    args: dict[str, Any] = {"x": pairs, "y": y, "order": made.order, "tiles": made.tiles, "slots": slots} | arrays
    args |= {f"up_{name}": array for name, array in _arrays(experts, roles[-1]).items()}
    args |= {f"{name}_stride": experts.stride(array) for name, array in arrays.items()}
    args |= {"rows": first.rows, "x_stride": pairs.stride(0), "y_stride": y.stride(0), "base": BASE}
    blocks, tiles = tile.blocks // len(roles), first.columns // TILE
    strips = triton.cdiv(first.rows, ROWS * blocks)
    own = max(1, tiles_a_program(tile) // tiles)
    args |= {"strips": strips, "slots_a_row": slots_a_row, "TILES": tiles, "FORMAT": first.format.name}
    args |= {"STRIPS": own, "BLOCKS": blocks, "TOKENS": tile.tokens, "GATED": len(roles) > 1}
    args |= {"DEPTH": max(0, tile.ahead - 1), "DEPENDENT": tile.dependent and has_dependent_launch(x.device)}
    options = {"num_warps": 1, "num_stages": 1} | ({"launch_pdl": True} if args["DEPENDENT"] else {})
    return Launch(_grouped_integers_kernel, (triton.cdiv(strips, own), len(made.tiles)), args, options)


def _arrays(experts: Experts, role: str) -> dict[str, Tensor]:
    """The arrays of a matrix of the first expert, in the dtypes of `integers.tiled`; words for those it has not."""
    first = experts.matrix(role, 0)
    arrays = dict.fromkeys(("words", "high", "scales", "d"), first.words) | first.arrays
    return arrays | {"scales": arrays["scales"].view(torch.int32)}
