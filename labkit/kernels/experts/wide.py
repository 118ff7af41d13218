"""An expert layer whose blocks are small and whose router may send many tokens to few experts: `by_wide_tiles`.

| what             | hypothesis                                                                                        |
|------------------|---------------------------------------------------------------------------------------------------|
| wide tiles       | blocks of 16 rows are right where each expert has few; where one has many, each of its weights is |
|                  | loaded and multiplied once for every block. Blocks side by side that belong to one expert become  |
|                  | one tile, in the same launch: a program sees it by the experts of the blocks around its own       |
| the others leave | programs of the blocks that such a tile has taken over end at once                                |
| split K          | if all tokens at one choice of experts leave most multiprocessors without a wide tile, several    |
|                  | programs share its sums over K; the last adds the parts, always in the same order. The launch has |
|                  | a program for every block that any routing needs: those that this one does not need take a part,  |
|                  | where there are enough of them; so routings that need no split K have no more programs            |

So the host knows nothing of the routing, and a captured graph is right for every one.

Sources: tiles.py. bf16, fp16 or fp32 weights, SiLU · up fused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_one_of
from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.experts import blocks as experts_blocks
from labkit.kernels.experts.choose import BLOCKS, WIDE_ROWS, Choice, TileChoice, check_choice, choose
from labkit.kernels.experts.inputs import Layer, LayerInputs, Workspace, check_layer, check_several, workspace
from labkit.kernels.experts.tiled import by_tiles
from labkit.kernels.experts.tiles import _load, _place_of, _product, _silu_up, _tile, options_of
from labkit.kernels.launch import Launch
from labkit.kernels.target import multiprocessors

WIDE = (2, 4, 8)
SPLITS = (1, 2, 4, 8)
LONG = 2048  # values of K, below which a part is sooner done than stored and added


@dataclass(frozen=True)
class WideChoice:
    """wide: blocks of a wide tile; least: so many of one expert are one; block_k: its values along K at once.

    splits: programs that share a wide tile's sums over K, where enough of them have no block. stages: of its loop.
    """

    wide: int = 8
    least: int = 2
    block_k: int = 64
    splits: int = 1
    stages: int = 3


@triton.jit
def _wide_tile(
    first, count, column, expert, part, shared, a, w, c, partial, arrived, slots, slot_count,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr, SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LEAST: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile: `count` blocks of one expert from `first` on, of ROWS rows together at most, BLOCK_N rows of its w.

    shared: its sums over K are of SPLITS programs, of which this one has `part`.
    """
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    SHARE: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    m = first * BLOCK_M + tl.arange(0, ROWS)
    slot = tl.load(slots + m, mask=m < (first + count) * BLOCK_M, other=slot_count)
    valid = slot < slot_count
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATHER:
        n = n // 2 + n % 2 * (N // 2)  # gate and up of an output side by side
    if N % BLOCK_N != 0:
        n = tl.minimum(n, N - 1)
    w += expert.to(tl.int64) * (N * K)
    ks = tl.arange(0, BLOCK_K)
    rows = a + (slot // TOP_K if GATHER else m).to(tl.int64) * K
    sums = tl.zeros([BLOCK_N, ROWS] if SWAP else [ROWS, BLOCK_N], tl.float32)
    start, end = 0, K
    if SPLITS > 1:
        start = part * SHARE
        end = tl.where(shared, tl.minimum(start + SHARE, K), K)
    for k in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        inside = k + ks < K
        x = _load(rows[:, None] + (k + ks)[None, :], valid[:, None] & inside[None, :], True)
        b = _load(w + k + ((n * K)[:, None] + ks[None, :]), inside[None, :], not EVEN_K)
        sums = _product(x, b, sums, SWAP)
    if SPLITS == 1:  # noqa: SIM114, since the compiler knows this one and leaves out the rest
        _store_wide(sums, c, m, slot, valid, column, N, GATHER, SWAP, ROWS, BLOCK_N)
    elif shared == 0:
        _store_wide(sums, c, m, slot, valid, column, N, GATHER, SWAP, ROWS, BLOCK_N)
    else:
        tile = first // LEAST * ((N + BLOCK_N - 1) // BLOCK_N) + column  # a wide tile has LEAST blocks: no two the same
        inside = tl.arange(0, sums.shape[0])[:, None] * sums.shape[1] + tl.arange(0, sums.shape[1])[None, :]
        parts = partial + tile.to(tl.int64) * (SPLITS * ROWS * BLOCK_N) + inside
        tl.store(parts + part * (ROWS * BLOCK_N), sums)
        tl.debug_barrier()  # all warps have stored their part before one thread says so
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived + tile, 0)  # ready for the next call
            total = tl.zeros_like(sums)
            for p in range(SPLITS):  # always in this order, whichever program came last
                total += tl.load(parts + p * (ROWS * BLOCK_N), cache_modifier=".cg")
            _store_wide(total, c, m, slot, valid, column, N, GATHER, SWAP, ROWS, BLOCK_N)


@triton.jit
def _store_wide(
    sums, c, m, slot, valid, column,
    N: tl.constexpr, GATHER: tl.constexpr, SWAP: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of a wide tile to their rows of c."""
    OUT: tl.constexpr = N // 2 if GATHER else N
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATHER else BLOCK_N
    if SWAP:
        sums = tl.trans(sums)
    if GATHER:
        gate, up = tl.split(tl.reshape(sums, [ROWS, WIDTH, 2]))
        sums = _silu_up(gate, up)
    out = column * WIDTH + tl.arange(0, WIDTH)
    to = (m if GATHER else slot).to(tl.int64)
    mask = (out < OUT)[None, :] & valid[:, None]
    tl.store(c + to[:, None] * OUT + out[None, :], sums.to(c.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slot_count"])
def _wide_kernel(
    a, w, c, partial, arrived, slots, experts, padded, slot_count,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr, ACT: tl.constexpr,
    SWAP: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr, LEAST: tl.constexpr, WIDE_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: one tile of one block, or of up to WIDE blocks of one expert, or a part of its sums; or nothing.

    GATHER: a is x [T, K], c is sorted, SiLU(gate) · up; if not, a is sorted, and c is [T · TOP_K, N], by slots.
    """
    wait_for_inputs(DEPENDENT)
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    blocks = tl.load(padded) // BLOCK_M
    program, part, shared = tl.program_id(0), 0, 0
    spare = program - blocks * COLUMNS  # from 0 on: this program has no block of its own
    places = (blocks + LEAST - 1) // LEAST  # where a wide tile may begin: each has its own
    idle = spare >= 0
    if SPLITS > 1:
        parts = (SPLITS - 1) * places * COLUMNS
        shared = tl.num_programs(0) - blocks * COLUMNS >= parts
        idle = idle & ((shared == 0) | (spare >= parts))
    if idle:
        return
    block, column = _place_of(tl.minimum(program, blocks * COLUMNS - 1), blocks, COLUMNS, GROUP_M)
    place = block // LEAST
    if SPLITS > 1:  # noqa: SIM102, as above
        if spare >= 0:
            part = 1 + spare // (places * COLUMNS)
            place, column = spare // COLUMNS % places, spare % COLUMNS
            block = place * LEAST + LEAST - 1  # which is the tile's that begins there, if one does
    around = block // WIDE * WIDE + tl.arange(0, WIDE)
    owners = tl.load(experts + around, mask=around < blocks, other=-1)
    expert = tl.load(experts + block, mask=block < blocks, other=-2)
    count = tl.sum((owners == expert).to(tl.int32), 0)
    if count < LEAST:
        if part == 0:
            _tile(
                program, blocks, a, w, w, c, slots, experts, slot_count, N, K, E, TOP_K, GATHER, ACT, False, "", False,
                SWAP, True, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, 128,
            )  # fmt: skip
    else:
        first = tl.min(tl.where(owners == expert, around, blocks), 0)
        if (block == first) | ((part > 0) & (first // LEAST == place)):
            _wide_tile(
                first, count, column, expert, part, shared, a, w, c, partial, arrived, slots, slot_count, N, K, TOP_K,
                GATHER, SWAP, BLOCK_M, WIDE * BLOCK_M, BLOCK_N, WIDE_K, LEAST, SPLITS, STAGES,
            )  # fmt: skip


def by_wide_tiles(
    x: LayerInputs,
    config: Choice | None = None,
    scratch: Workspace | None = None,
    up: WideChoice | None = None,
    down: WideChoice | None = None,
) -> Layer:
    """`expert_layer.layer` by tiles, in which blocks of one expert that lie side by side are one tile.

    config: None: `for_wide_tiles` of `choose.choose`. scratch: as there. up, down: of the first and second product;
    None: `of_shape`. With blocks of 128 rows there is nothing to join: the layer is then the one by tiles. Where sums
    are split, a layer has memory of its own for the parts.
    ValueError for INT4 weights, for one token, whose slots are not sorted, for a configuration that is not fused, and
    for a product with wide tiles that is persistent, has descriptors or works on every block.
    """
    check_layer(x)
    if x.int4:
        raise ValueError("the weights are INT4; allowed: bf16, fp16 or fp32")
    check_several(x)
    config = for_wide_tiles(choose(*x.shape, False, x.x.device)) if config is None else replace(config, rows=None)
    check_choice(config, x.int4)
    check_one_of("fused", config.fused, (True,))
    return joined(x, config, workspace(x) if scratch is None else scratch, False, up, down)


def joined(
    x: LayerInputs,
    config: Choice,
    scratch: Workspace,
    check_ids: bool = False,
    up: WideChoice | None = None,
    down: WideChoice | None = None,
) -> Layer:
    """The launches of `by_wide_tiles`, for inputs and a configuration that have been checked."""
    made = by_tiles(x, config, scratch, check_ids)
    sms = multiprocessors(x.x.device)
    parts = {"gemm1": (x.w1, config.gemm1, up), "gemm2": (x.w2, config.gemm2, down)}
    launches = dict(made.launches)
    for name, (w, tile, choice) in parts.items():
        if found := choice or of_shape(len(x.x), x.shape[2], *w.shape[1:], config.block_m, tile, sms):
            launches[name] = gemm(launches[name].args, w, tile, found)
    return Layer(made.config, made.sorted, launches)


def for_wide_tiles(config: Choice) -> Choice:
    """A configuration as wide tiles can take it: fused, not persistent, without descriptors, blocks counted."""
    plain = {"programs": 0, "flatten": False, "counted": True, "descriptor": False}
    gemm1, gemm2 = replace(config.gemm1, **plain), replace(config.gemm2, **plain)
    return replace(config, gemm1=gemm1, gemm2=gemm2, fused=True, rows=None)


def of_shape(T: int, top_k: int, N: int, K: int, block_m: int, tile: TileChoice, sms: int) -> WideChoice | None:
    """A product's wide tiles; None where blocks are as large as they are.

    Half of the blocks that fit into one make it: of fewer rows, more are computed in vain than weights are read less.
    Their sums are split where they are fewer than sms if all tokens take the same top_k experts: for as many programs
    as two a multiprocessor, if each has LONG values of K. N, K: of an expert's weights [N, K].
    """
    if block_m >= WIDE_ROWS:
        return None
    fewest = experts_blocks.tiles(top_k * triton.cdiv(T, WIDE_ROWS), N, tile.block_n)
    allowed = [s for s in SPLITS if s == 1 or (s * fewest <= 2 * sms and s * LONG <= K)]
    wide = WIDE_ROWS // block_m
    return WideChoice(wide, least=max(2, wide // 2), splits=max(allowed))


def check_wide(choice: WideChoice, block_m: int) -> None:
    """Raise ValueError for wide tiles that the kernel cannot make of blocks with so many rows."""
    check_one_of("wide", choice.wide, [wide for wide in WIDE if wide * block_m <= WIDE_ROWS])
    check_one_of("block_k", choice.block_k, BLOCKS)
    check_one_of("splits", choice.splits, SPLITS)
    if choice.least < 1:
        raise ValueError(f"least is {choice.least}; allowed: at least 1")


def gemm(args: Mapping[str, Any], w: Tensor, tile: TileChoice, choice: WideChoice) -> Launch:
    """One of the two products, with the arguments of that of tiles.py. ValueError for what the kernel cannot take."""
    for name, allowed in (("programs", 0), ("counted", True), ("descriptor", False)):
        check_one_of(name, getattr(tile, name), (allowed,))
    check_wide(choice, args["BLOCK_M"])
    kept = ("a", "c", "slots", "experts", "padded", "slot_count", "N", "K", "E", "TOP_K", "GATHER", "ACT", "BLOCK_M")
    given = {name: args[name] for name in (*kept, "DEPENDENT")}
    given |= {"w": w, "SWAP": tile.swap, "GROUP_M": tile.group_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    given |= {"WIDE": choice.wide, "LEAST": choice.least, "WIDE_K": choice.block_k, "SPLITS": choice.splits}
    given["STAGES"] = choice.stages
    columns = experts_blocks.tiles(1, args["N"], tile.block_n)
    tiles = _shared(args["blocks"], choice) * columns
    size = choice.splits * choice.wide * args["BLOCK_M"] * tile.block_n
    parts = torch.empty(tiles * size, dtype=torch.float32, device=w.device) if tiles else args["c"]
    arrived = torch.zeros(tiles, dtype=torch.int32, device=w.device) if tiles else args["padded"]
    given |= {"partial": parts, "arrived": arrived}
    options = options_of(args, tile.num_warps) | {"num_stages": tile.num_stages}
    return Launch(_wide_kernel, (args["blocks"] * columns,), given, options)


def _shared(most: int, choice: WideChoice) -> int:
    """The most wide tiles whose sums are shared by programs without a block, with a program for `most` blocks.

    Their blocks and the other parts are no more than that; the last tile's place may have one block alone.
    """
    others = choice.splits - 1
    return (most + choice.least - 1) // (choice.least + others) if others else 0
