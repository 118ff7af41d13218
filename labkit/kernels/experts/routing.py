"""Which rows go to which expert: sorted on the device without a host synchronisation.

The result has the form of vLLM's `moe_align_block_size`: slots (token · top_k + j) sorted by expert, each expert's
padded to a multiple of BLOCK_M, so that a GEMM's block of rows belongs to one expert.

Two kernels, or one where all slots fit one chunk, or none for one token (`one_token`):

| launch | programs | what it does                                                                                     |
|--------|----------|--------------------------------------------------------------------------------------------------|
| count  | chunk    | slots of each expert in a chunk of the slots; left out if there is only one chunk                |
| place  | chunk    | every program sums the counts again, which costs less than a launch between them; then it places |
|        |          | its chunk's slots, in their order, and fills its share of the blocks' experts and paddings       |

`at_once` makes the same tables of few slots, and is what the layer and its rivals are sorted by. Hypothesis: a single
program that compares all slots, a part after the other, and then finds the blocks' experts, a part after the other,
takes as long as a product of few tokens; many programs that each look at all slots, but place few of them, do each in
one step, and need no counts before them. On an H200 an INT4 layer of 16 tokens is 1.00 to 1.27 times faster by it.

Nothing depends on the order in which programs run: the sort is stable, and two runs give the same bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_contiguous, check_device, check_one_of
from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.experts.blocks import BLOCKS_M, most_blocks
from labkit.kernels.launch import Launch

ONE_CHUNK = 256  # slots, up to which one program does everything
AT_ONCE = 2048  # slots, up to which every program may look at all of them
MANY = 2**14  # slots, above which chunks are larger
TILE_VALUES = 4096  # of a two-dimensional tile: 32 a thread


@triton.jit
def _experts_of(ids, i, slots, E):
    """Experts of slots i; E, which is none, beyond the last slot and for an id out of range."""
    e = tl.load(ids + i, mask=i < slots, other=-1)
    return tl.where((e >= 0) & (e < E), e, E).to(tl.int32)


@triton.jit(do_not_specialize=["slots"])
def _count_kernel(ids, counts, slots, E, CHUNK: tl.constexpr, BINS: tl.constexpr, DEPENDENT: tl.constexpr):
    """One program: counts [chunks, E] of one chunk."""
    wait_for_inputs(DEPENDENT)
    chunk = tl.program_id(0)
    e = _experts_of(ids, chunk * CHUNK + tl.arange(0, CHUNK), slots, E)
    bins = tl.arange(0, BINS)
    tl.store(counts + chunk * E + bins, tl.histogram(e, BINS, mask=e < E), mask=bins < E)


@triton.jit(do_not_specialize=["slots", "chunks", "blocks"])
def _place_kernel(
    ids, counts, sorted_slots, experts, padded, slots, E, chunks, blocks,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, SUB: tl.constexpr,
    TILE: tl.constexpr, COUNTED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: the slots of one chunk to their places, and every `chunks`-th tile of the blocks."""
    wait_for_inputs(DEPENDENT)
    chunk = tl.program_id(0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    e = _experts_of(ids, i, slots, E)
    bins = tl.arange(0, BINS)
    if COUNTED:
        total = tl.zeros([BINS], tl.int32)
        before = tl.zeros([BINS], tl.int32)  # in earlier chunks
        for first in range(0, chunks, ROWS):
            c = first + tl.arange(0, ROWS)
            n = tl.load(
                counts + c[:, None] * E + bins[None, :], mask=(c < chunks)[:, None] & (bins < E)[None, :], other=0
            )
            total += tl.sum(n, 0)
            before += tl.sum(tl.where((c < chunk)[:, None], n, 0), 0)
    else:
        total = tl.histogram(e, BINS, mask=e < E)
        before = tl.zeros([BINS], tl.int32)
    own = (total + BLOCK_M - 1) // BLOCK_M
    end = tl.cumsum(own, 0)
    start = (end - own) * BLOCK_M
    live = tl.sum(own, 0)
    if chunk == 0:
        tl.store(padded, live * BLOCK_M)

    rank = tl.zeros([CHUNK], tl.int32)  # slots of the same expert before this one, in this chunk
    for first in range(0, CHUNK, SUB):
        j = chunk * CHUNK + first + tl.arange(0, SUB)
        same = e[:, None] == _experts_of(ids, j, slots, E)[None, :]
        rank += tl.sum((same & (j[None, :] < i[:, None])).to(tl.int32), 1)
    position = tl.gather(start + before, tl.minimum(e, BINS - 1), 0) + rank
    tl.store(sorted_slots + position, i, mask=e < E)

    for first in range(chunk * TILE, blocks, chunks * TILE):
        b = first + tl.arange(0, TILE)
        owner = tl.sum((end[None, :] <= b[:, None]).to(tl.int32), 1)
        is_live = b < live
        tl.store(experts + b, tl.where(is_live, owner, -1), mask=b < blocks)
        last = tl.where(is_live, tl.gather(start + total, tl.minimum(owner, BINS - 1), 0), 0)
        row = b[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        padding = (row >= last[:, None]) & (b < blocks)[:, None]
        tl.store(sorted_slots + row, tl.zeros([TILE, BLOCK_M], tl.int32) + slots, mask=padding)


@triton.jit(do_not_specialize=["slots", "blocks"])
def _at_once_kernel(
    ids, sorted_slots, experts, padded, slots, E, blocks,
    BLOCK_M: tl.constexpr, ALL: tl.constexpr, PART: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: PART slots to their places, and TILE blocks; each program looks at all slots."""
    wait_for_inputs(DEPENDENT)
    j = tl.arange(0, ALL)
    of_all = _experts_of(ids, j, slots, E)
    i = tl.program_id(0) * PART + tl.arange(0, PART)
    e = _experts_of(ids, i, slots, E)
    total = tl.histogram(of_all, BINS, mask=of_all < E)
    own = (total + BLOCK_M - 1) // BLOCK_M
    end = tl.cumsum(own, 0)
    start = (end - own) * BLOCK_M
    live = tl.sum(own, 0)
    if tl.program_id(0) == 0:
        tl.store(padded, live * BLOCK_M)
    before = (e[:, None] == of_all[None, :]) & (j[None, :] < i[:, None])
    position = tl.gather(start, tl.minimum(e, BINS - 1), 0) + tl.sum(before.to(tl.int32), 1)
    tl.store(sorted_slots + position, i, mask=e < E)
    b = tl.program_id(0) * TILE + tl.arange(0, TILE)
    owner = tl.sum((end[None, :] <= b[:, None]).to(tl.int32), 1)
    last = tl.where(b < live, tl.gather(start + total, tl.minimum(owner, BINS - 1), 0), 0)
    tl.store(experts + b, tl.where(b < live, owner, -1), mask=b < blocks)
    row = b[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    padding = (row >= last[:, None]) & (b < blocks)[:, None]
    tl.store(sorted_slots + row, tl.zeros([TILE, BLOCK_M], tl.int32) + slots, mask=padding)


@dataclass(frozen=True)
class Routing:
    """Slots sorted by expert; calling it sorts again, by what is in `ids` then. May be captured in a CUDA graph.

    slots:   [blocks · BLOCK_M], int32: token · top_k + j, ascending within an expert; T · top_k where there is padding.
    experts: [blocks], int32: the expert of each block of BLOCK_M rows; -1 beyond the last block that has a slot.
    padded:  [1], int32: rows up to there (vLLM's num_tokens_post_padded).
    blocks:  as many as there can be, whatever the routing; or as asked for.
    """

    block_m: int
    blocks: int
    slots: Tensor
    experts: Tensor
    padded: Tensor
    launches: Mapping[str, Launch]

    def __call__(self) -> None:
        for launch in self.launches.values():
            launch()


def room(slots: int, experts: int, block_m: int, blocks: int) -> int:
    """Integers that `route` needs for its tables."""
    return sum(_parts(slots, experts, block_m, blocks))


def _parts(slots: int, experts: int, block_m: int, blocks: int) -> list[int]:
    """Integers of each table, in the order of memory: padded, slots, experts, counts; each begins at 16 bytes.

    Where tables begin is part of what kernels are compiled for, and would else differ with the number of tokens.
    """
    chunks = triton.cdiv(slots, _chunk(slots))
    return [4, blocks * block_m, triton.cdiv(blocks, 4) * 4, chunks * experts]


def steps(slots: int) -> list[int]:
    """Numbers of slots up to `slots` that need the most room: more slots may be taken in larger, fewer chunks."""
    return [slots, MANY] if slots > MANY else [slots]


def route(
    ids: Tensor,
    experts: int,
    block_m: int,
    blocks: int | None = None,
    check: bool = False,
    memory: Tensor | None = None,
    dependent: bool = False,
) -> Routing:
    """The routing of ids [T, top_k], int32 or int64, contiguous, into blocks of 16, 32, 64 or 128 rows.

    An id that is not one of 0 to `experts` - 1 drops its slot: it gets no row. So a graph that was captured for many
    tokens serves fewer, with -1 for the others. check: raise ValueError for such an id instead, now, for what is in
    `ids` now; this waits for the GPU. blocks: how many there is room for, at least `most_blocks`; None: so many.
    memory: int32, one-dimensional, of at least `room` values, in which the tables are made; None: allocated here.
    dependent: programmatic dependent launch, which needs compute capability 9.0: the launch after may then start early.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    _check_route(ids, experts, block_m, check)
    T, top_k = ids.shape
    slots, least = T * top_k, most_blocks(T, top_k, experts, block_m)
    blocks = least if blocks is None else blocks
    if blocks < least:
        raise ValueError(f"blocks is {blocks}; allowed: at least {least}, for {slots} slots of {experts} experts")
    needed = room(slots, experts, block_m, blocks)
    if memory is None:
        memory = torch.empty(needed, dtype=torch.int32, device=ids.device)
    _check_memory(memory, needed, ids.device)
    chunk = _chunk(slots)
    chunks = triton.cdiv(slots, chunk)
    counted = chunks > 1
    bins = max(32, triton.next_power_of_2(experts))
    padded, sorted_slots, owners, counts = memory[:needed].split(_parts(slots, experts, block_m, blocks))
    made = (sorted_slots, owners[:blocks], padded[:1])
    sizes = {"ids": ids, "counts": counts, "slots": slots, "E": experts, "CHUNK": chunk, "BINS": bins}
    sizes["DEPENDENT"] = dependent
    options = {"num_warps": 4} | ({"launch_pdl": True} if dependent else {})
    place = {"sorted_slots": made[0], "experts": made[1], "padded": made[2], "chunks": chunks, "blocks": blocks}
    place |= {"BLOCK_M": block_m, "COUNTED": counted}
    place |= {
        "ROWS": max(1, TILE_VALUES // bins),
        "SUB": min(chunk, TILE_VALUES // chunk),
        "TILE": max(1, TILE_VALUES // bins),
    }
    launches = {"count": Launch(_count_kernel, (chunks,), sizes, options)} if counted else {}
    launches["place"] = Launch(_place_kernel, (chunks,), sizes | place, options)
    return Routing(block_m, blocks, *made, launches)


def at_once(made: Routing, ids: Tensor, experts: int, dependent: bool = False) -> Routing:
    """A routing of these ids whose tables, if of no more than AT_ONCE slots, many programs fill in one launch."""
    slots = ids.numel()
    if not made.launches or slots > AT_ONCE:
        return made
    whole, bins = max(16, triton.next_power_of_2(slots)), max(32, triton.next_power_of_2(experts))
    part, tile = max(4, min(whole, TILE_VALUES // whole)), max(1, TILE_VALUES // bins)
    args = {"ids": ids, "sorted_slots": made.slots, "experts": made.experts, "padded": made.padded, "slots": slots}
    args |= {"E": experts, "blocks": made.blocks, "BLOCK_M": made.block_m, "ALL": whole, "PART": part, "BINS": bins}
    args |= {"TILE": tile, "DEPENDENT": dependent}
    programs = max(triton.cdiv(slots, part), triton.cdiv(made.blocks, tile))
    options = {"num_warps": 4} | ({"launch_pdl": True} if dependent else {})
    return replace(made, launches={"place": Launch(_at_once_kernel, (programs,), args, options)})


def one_token(ids: Tensor, experts: int, block_m: int, check: bool = False) -> Routing:
    """The routing of one token's ids [1, top_k]: each slot has a block of its own, so that nothing need be sorted.

    No launches: the experts are the ids themselves, -1 and what is out of range included. Errors as `route`.
    """
    _check_route(ids, experts, block_m, check)
    if len(ids) != 1:
        raise ValueError(f"ids is {tuple(ids.shape)}; allowed: [1, top_k]")
    slots = ids.numel()
    table = torch.full((slots, block_m), slots, dtype=torch.int32, device=ids.device)
    table[:, 0] = torch.arange(slots, device=ids.device)
    padded = torch.tensor([slots * block_m], dtype=torch.int32, device=ids.device)
    return Routing(block_m, slots, table.view(-1), ids.view(-1), padded, {})


def _chunk(slots: int) -> int:
    """Slots of a program: few, since each is compared with all of them; more, where every program sums many chunks."""
    if slots <= ONE_CHUNK:
        return max(16, triton.next_power_of_2(slots))
    return 128 if slots <= MANY else 512


def _check_route(ids: Tensor, experts: int, block_m: int, check: bool) -> None:
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(f"ids is {tuple(ids.shape)}; allowed: [T, top_k], both at least 1")
    if ids.numel() >= 2**31 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids is {ids.numel()} values of {ids.dtype}; allowed: below 2^31, torch.int32 or torch.int64")
    check_contiguous("ids", ids)
    if not 1 <= experts <= 4096:
        raise ValueError(f"experts is {experts}; allowed: 1 to 4096")
    check_one_of("block_m", block_m, BLOCKS_M)
    if check and (wrong := ids[(ids < 0) | (ids >= experts)]).numel():
        raise ValueError(f"ids has {int(wrong[0])} ({wrong.numel()} values out of range); allowed: 0 to {experts - 1}")


def _check_memory(memory: Tensor, needed: int, device: torch.device) -> None:
    if memory.ndim != 1 or len(memory) < needed or memory.dtype != torch.int32 or not memory.is_contiguous():
        raise ValueError(f"memory is {tuple(memory.shape)}, {memory.dtype}; allowed: at least [{needed}], torch.int32")
    check_device("memory", memory, device, "ids'")
