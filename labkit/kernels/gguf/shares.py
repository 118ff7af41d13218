"""Shares of a product: how rows are dealt to multiprocessors, and the sums of those that share a row."""

from typing import Any

import torch
import triton
import triton.language as tl

from labkit.kernels.gguf.choose import Choice, TileChoice
from labkit.kernels.gguf.formats import GROUP, ROWS, Packed
from labkit.kernels.gguf.unpack import _block, _read, _silu_up, _tiles
from labkit.kernels.target import multiprocessors

REGISTERS = 65536  # of a multiprocessor, of every generation since Kepler
STRIP = 4  # blocks of 8 rows that are dealt in shares together; of gate and up, two of each


@triton.jit
def _units(WARPS: tl.constexpr):
    """Of the lanes of all warps: the group within the tile, and the row of 8 (of x: the token of 8)."""
    units = tl.arange(0, WARPS * 32)
    return units // 32 * 4 + units % 4, units // 4 % 8


@triton.jit
def _fragment(values, WARPS: tl.constexpr):
    """[warps, 8, 16] of [units, 4]: 4 columns of each lane, which stay where they are."""
    return tl.reshape(values, (WARPS, 8, 16))


@triton.jit
def _no_sums(COUNT: tl.constexpr, WARPS: tl.constexpr):
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros((WARPS, 16, 8), tl.float32),)
    return sums


@triton.jit
def _gated(total, block):
    """The rows of a block, and SiLU(gate) · up of sums [16, 8], 8 rows of each."""
    gate, up = tl.split(tl.permute(tl.reshape(total, (2, 8, 8)), (1, 2, 0)))
    return block * 8 + tl.arange(0, 8), _silu_up(gate, up)


@triton.jit
def _rows_of(upper, lower):
    """The rows of two blocks."""
    sixteen = tl.arange(0, 16)
    return tl.where(sixteen < 8, upper, lower - 1) * 8 + sixteen


@triton.jit
def _start(share, each, more):
    """The first tile of a share; the first `more` shares have one more than `each`."""
    return share * each + tl.minimum(share, more)


@triton.jit
def _share_of(tile, each, more):
    """The share that a tile is in."""
    longer = more * (each + 1)
    return tl.where(tile < longer, tile // (each + 1), more + (tile - longer) // each)


@triton.jit
def _of_all_sharers(sums, partials, counters, at, sharer, sharers, MOST: tl.constexpr):
    """The sums of all programs that share rows, added in the order of their shares; and whether all have come.

    Whichever comes last has them all, and sets its counter to 0 again for the next launch. sums: [8], rows of a token,
    or [16, 8]. partials: fp32 [tiles of y, MOST, sums, SIZE]; counters: int32 [tiles of y]; at: of these, the rows'.
    """
    COUNT: tl.constexpr = len(sums)
    SIZE: tl.constexpr = sums[0].numel
    ours = partials + at.to(tl.int64) * (MOST * COUNT * SIZE) + tl.reshape(tl.arange(0, SIZE), sums[0].shape)
    for s in tl.static_range(COUNT):
        tl.store(ours + (sharer * COUNT + s) * SIZE, sums[s])
    tl.debug_barrier()  # all threads have stored before one of them counts
    # What the others left is read past the L1 (.cg), which so keeps its x: an acquire would invalidate it
    last = tl.atomic_add(counters + at, 1, sem="release") == sharers - 1
    totals = ()
    for s in tl.static_range(COUNT):
        total = tl.load(ours + s * SIZE, mask=last, cache_modifier=".cg")
        for other in tl.static_range(1, MOST):
            here = last & (other < sharers)
            total += tl.load(ours + (other * COUNT + s) * SIZE, mask=here, other=0.0, cache_modifier=".cg")
        totals = totals + (total,)
    tl.store(counters + at, 0, mask=last)
    return totals, last


@triton.jit
def _ask(
    W, up, first_block, last_block, group, lanes, t, TILE: tl.constexpr, MATRICES: tl.constexpr, BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Tile t of BLOCKS blocks of rows; nothing beyond the last one. group: of each unit, that in the first tile."""
    MASKED: tl.constexpr = 1 if GROUPS % TILE != 0 else 2
    groups = tl.where(t < (GROUPS + TILE - 1) // TILE, t * TILE + group, GROUPS)
    return _tiles(W, up, first_block, last_block, groups, lanes, MATRICES, BLOCKS, GROUPS, MASKED, FORMAT, PLANES)


@triton.jit
def _without_first(asked):
    rest = ()
    for s in tl.static_range(1, len(asked)):
        rest = rest + (asked[s],)
    return rest


@triton.jit
def _blocks(
    W, up, strips, all_blocks, part, MATRICES: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
    FORMAT: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Blocks of 8 rows of a part of the first strip, and the arrays from there on; of two MATRICES, those of up too.

    A strip's blocks are `strips` apart, so that what follows a strip's last tile is the next one's first. Where they do
    not come out even, the last ones are read twice.
    """
    firsts, arrays = (), ()
    for b in tl.static_range(BLOCKS):
        first = tl.minimum((part * BLOCKS + b) * strips, all_blocks - strips)
        firsts = firsts + (first,)
        for s in tl.static_range(MATRICES):
            if s == 0:
                words, high, scales, d = W
            else:
                words, high, scales, d = up
            arrays = arrays + (_block(words, high, scales, d, first, GROUPS, FORMAT, PLANES),)
    return firsts, arrays


@triton.jit
def _tile_of(
    arrays, t, strip, group, lane, TILE: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """What `_read` has of tile t of all strips, from each of the arrays. strip: of tile t, where the last is a part."""
    TILES: tl.constexpr = (GROUPS + TILE - 1) // TILE
    MASKED: tl.constexpr = GROUPS % TILE != 0
    HIGH: tl.constexpr = 16 if FORMAT == "Q6_K" else 8
    inside, first = group < GROUPS, t.to(tl.int64) * TILE
    if MASKED:
        inside, first = (t - strip * TILES) * TILE + group < GROUPS, first - strip * (TILES * TILE - GROUPS)
    above = group // 8
    if TILE % 8 != 0:
        above = ((first % 8).to(tl.int32) + group) // 8
    tiles = ()
    for a in tl.static_range(len(arrays)):
        words, high, scales, d = arrays[a]
        W = words + first * (PLANES * 32), high + first * HIGH, scales + first * 8, d + first // 8 * 8
        tiles = tiles + (_read(W, group, above, lane, inside, 1 if MASKED else 0, FORMAT, PLANES),)
    return tiles


@triton.jit
def _first_tiles(
    arrays, start, end, strip, group, lane, DEPTH: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
    FORMAT: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """What `_add_tiles` has asked for when it begins: DEPTH tiles from `start` on."""
    asked = ()
    for i in tl.static_range(DEPTH):
        some = _tile_of(arrays, tl.minimum(start + i, end - 1), strip, group, lane, TILE, GROUPS, FORMAT, PLANES)
        asked = asked + (some,)
    return asked


def _parts(tile: Choice | TileChoice) -> int:
    """Programs that each have a part of a strip's rows: with shares, strips have STRIP blocks, whatever a tile has.

    So rows are cut at the same columns for tiles of few blocks and of many, and have the same bits. ValueError for more
    blocks than a strip has.
    """
    if not tile.shares:
        return 1
    if tile.blocks > STRIP:
        raise ValueError(f"blocks is {tile.blocks}, with shares; allowed: at most {STRIP}")
    return STRIP // tile.blocks


def strips_overlap(blocks: int, strip: int) -> bool:
    """Whether so many blocks of 8 rows make no whole strips of `strip` each: the last ones begin within others."""
    return blocks % triton.cdiv(blocks, strip) != 0


def check_strips(W: Packed, tile: Choice | TileChoice, groups: int, strip: int) -> None:
    """Raise ValueError where two strips cut a block at different columns: its bits would be those stored last.

    groups: of a tile of one program; strip: blocks of a strip, of one matrix.
    """
    blocks = triton.cdiv(W.rows, ROWS)
    if not tile.shares or not strips_overlap(blocks, strip):
        return
    tiles_a_strip = triton.cdiv(W.columns // GROUP, groups)
    tiles = tiles_a_strip * triton.cdiv(blocks, strip)
    each, more = divmod(tiles, min(tiles, tile.shares * multiprocessors(W.words.device)))
    if more or (each % tiles_a_strip and tiles_a_strip % each):
        rows = f"rows in whole strips, such as multiples of {ROWS * strip}"
        raise ValueError(f"shares is {tile.shares}, of {W.rows} rows; allowed: 0, or {rows}")


def _registers(warps: int) -> dict[str, int]:
    """So many for a thread that so many warps are on a multiprocessor at once."""
    return {"maxnreg": min(255, REGISTERS // (32 * warps) // 8 * 8)}


def _dealt(
    W: Packed, tile: Choice | TileChoice, groups: int, token_tiles: int, strips: int, parts: int
) -> dict[str, Any]:  # fmt: skip
    """How many shares there are, what they are dealt, and where programs that share rows leave their sums.

    groups: of a tile. `words` stand in where none are shared.
    """
    tiles_a_strip = triton.cdiv(W.columns // GROUP, groups)
    if tile.shares and W.columns // GROUP % groups:
        whole = f"rows of whole tiles, of {GROUP * groups} columns"
        raise ValueError(f"shares is {tile.shares}, of rows of {W.columns} columns; allowed: 0, or {whole}")
    tiles = strips * tiles_a_strip
    shares = min(tiles, tile.shares * multiprocessors(W.words.device)) if tile.shares else strips
    each, more = divmod(tiles, shares)
    dealt: dict[str, Any] = {"shares": shares, "strips": strips, "each": each, "more": more, "PARTS": parts}
    if each == tiles_a_strip and not more:
        return dealt | {"SHARERS": 1, "partials": W.words, "counters": W.words}
    sharers = (tiles_a_strip - 2) // each + 2  # of which the first and the last have at least a tile of these rows
    places = token_tiles * strips * parts
    partials = W.words.new_empty(places * sharers * tile.blocks * ROWS * tile.tokens, dtype=torch.float32)
    return dealt | {"SHARERS": sharers, "partials": partials, "counters": W.words.new_zeros(places)}
