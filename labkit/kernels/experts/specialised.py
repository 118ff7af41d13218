"""An expert layer with INT4 weights and few tokens an expert, bf16, in Gluon: `by_specialised_warps`.

| what                     | hypothesis                                                                                |
|--------------------------|-------------------------------------------------------------------------------------------|
| a warp that copies       | the copy engine (TMA) brings weights and tokens, several stages ahead, for one warp: what |
|                          | is on its way takes neither registers nor instructions of those that multiply             |
| warpgroups on their own  | each multiplies 64 rows of its own and frees a stage by itself: while one waits for its   |
|                          | matrix instructions, others unpack. In one group of all warps, each waits for the slowest |
| words in fragment order  | 16 bytes of a row are what a lane holds of 32 columns as the left side of eight           |
|                          | instructions: from shared memory to them, weights stay in the lane                        |
| tokens reordered         | columns of a product may have any order, if both sides have it: tokens are gathered, and  |
|                          | gemm1's results stored, in that of the words                                              |
| sums scaled, not weights | u4 - 8 is exact in bf16: a scale multiplies the sum of its 128 columns                    |
| half of a block          | where no more than half of a block's rows have a token, instructions are half as wide     |
| 256 columns a stage      | a row is read 128 bytes at a time, and a stage waited for once for two scales             |

The choices (`WarpChoice`): rows: of w a program, 64 for each warpgroup: tokens are read once for all of them; stages:
on their way; together: programs a multiprocessor, of which one begins a tile while another ends one.

What a lane has of 128 columns: of k = 32 t + 8 j + 4 h + i, t is the lane's number in its quad, j the word, h the half
of the word, i the nibble of the half. As the left side of instruction 2 j + i // 2 its columns are 8 (i % 2) + 2 t + h.

The sums of a group are exact products summed by tensor cores in fp32, and groups are added one after the other: a
token's bits depend neither on the choice, nor on how many tokens there are.

Tried on an H200 and slower (µs of Mixtral's layer, 16 and 64 tokens; this one takes 219 and 259): all warps of a
program in one group (245, 286); in it, the next stage's weights unpacked while this one's are multiplied (262, 311,
and for some blocks wrong: results that instructions still write were passed from one turn of the loop to the next);
warpgroups on their own with the instructions of the generation before (`mma.sync`: 243, 344). Blocks of 64 tokens by
four warpgroups instead of two: sums leave the registers (128 tokens: 484 instead of 323).

Bounds, measured there: the copy engine brings such boxes at 98 to 104 % of the rate of a plain read. An instruction
with 64 rows of 16 weights in registers takes 13 cycles for 16 tokens, 16 for 32 and 32 for 64; that many weights are
read in 30. So it is the unpacking that takes the rest, and of 64 tokens the instructions.

Sources: few_rows.py, tiles.py. For Hopper, whose matrix instructions they are; Gluon has no interpreter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from labkit.kernels.checks import check_one_of
from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.experts.choose import Choice, TileChoice
from labkit.kernels.experts.descriptors import check_descriptor
from labkit.kernels.experts.inputs import (
    Layer,
    LayerInputs,
    Workspace,
    check_int4,
    check_layer,
    check_several,
    workspace,
)
from labkit.kernels.experts.int4 import Int4
from labkit.kernels.experts.tiled import by_tiles
from labkit.kernels.experts.tiles import options_of
from labkit.kernels.experts.unpack import _FROM_HALVES
from labkit.kernels.launch import Launch
from labkit.kernels.target import check_hopper, multiprocessors

BLOCKS_M = (16, 32, 64)
ROWS, STAGES, TOGETHER = (64, 128, 256), (2, 3, 4), (1, 2, 3, 4)
STAGE = 256  # columns
SIDE, GATHERED = 4, 1024  # rows and columns a program of the gathering
REGISTERS, COPYING = 65536, 24  # of a multiprocessor, and of a thread that copies
_TILE = TileChoice(64, 128, 4, 4)  # of the products that are replaced


@dataclass(frozen=True)
class WarpChoice:
    """How one product is run. together: programs a multiprocessor."""

    rows: int = 256
    stages: int = 3
    together: int = 1


@triton.jit(do_not_specialize=["slot_count"])
def _gather_kernel(
    x, slots, padded, out, slot_count, K: tl.constexpr, TOP_K: tl.constexpr, SIDE: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of the tokens of SIDE sorted rows, in the order of the words (see above)."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    last = tl.load(padded)
    if tl.program_id(0) * SIDE >= last:
        return
    slot = tl.load(slots + row, mask=row < last, other=0)
    token = tl.minimum(slot, slot_count - 1) // TOP_K  # of padding the last one's; it is not stored
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < last)[:, None] & (k < K)[None, :]
    values = tl.load(x + token.to(tl.int64)[:, None] * K + k[None, :], mask=mask)
    values = tl.reshape(values, (SIDE, BLOCK // 128, 4, 4, 2, 2, 2))  # t, j, h, i // 2, i % 2
    values = tl.reshape(tl.permute(values, (0, 1, 3, 5, 6, 2, 4)), (SIDE, BLOCK))
    tl.store(out + row.to(tl.int64)[:, None] * K + k[None, :], values, mask=mask)


@gluon.jit
def _tile_of(tile, blocks, COLUMNS: gl.constexpr):
    """Block of tokens and columns of a tile: eight blocks side by side, which may be of one expert."""
    first = tile // (8 * COLUMNS) * 8
    within = tile % (8 * COLUMNS)
    size = gl.minimum(blocks - first, 8)
    return first + within % size, within // size


@gluon.jit
def _copy(
    w, x, experts, padded, room,
    N: gl.constexpr, K: gl.constexpr, GATHER: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that copies: every stage of every tile of the program, as soon as it is free.

    room: words, of each warpgroup 32 rows and 32 others, [2 · ROWS // 64 · STAGES, 32, 64]; values of tokens,
    [2 · STAGES, TOKENS, 128]; barriers of full and of empty stages.
    """
    words, values, full, empty = room
    WAYS: gl.constexpr = ROWS // 64
    OTHER: gl.constexpr = N // 2 if GATHER else ROWS // 2
    blocks = gl.load(padded) // TOKENS
    i = 0
    for tile in range(gl.program_id(0), blocks * (N // ROWS), gl.num_programs(0)):
        block, column = _tile_of(tile, blocks, N // ROWS)
        row = gl.load(experts + block) * N + column * (ROWS // 2 if GATHER else ROWS)
        for g in range(K // 256):
            s = i % STAGES
            mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(s), ROWS * 128 + TOKENS * 512)
            for way in gl.static_range(WAYS):
                to = (WAYS * s + way) * 2
                tma.async_copy_global_to_shared(w, [row + 32 * way, g * 64], full.index(s), words.index(to))
                tma.async_copy_global_to_shared(w, [row + OTHER + 32 * way, g * 64], full.index(s), words.index(to + 1))
            for part in gl.static_range(2):
                at = [block * TOKENS, g * 256 + part * 128]
                tma.async_copy_global_to_shared(x, at, full.index(s), values.index(2 * s + part))
            i += 1


@gluon.jit
def _halves_of(words):
    """A stage's words of 32 rows, of its first and of its second 128 columns: [32, 32] each, two bytes.

    Of a row, each of four lanes has eight in either half; a warp has eight rows.
    """
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 64]
    )
    return gl.split(words.load(LAYOUT).reshape([32, 2, 32]).permute((0, 2, 1)))


@gluon.jit
def _unpacked(halves):
    """u4 - 8 of every part of [32, 32] halves of words: [32, 32, 2, 2], part i at [.., i // 2, i % 2]."""
    a, b, c, d = gl.inline_asm_elementwise(
        _FROM_HALVES, "=r,=r,=r,=r,r", [halves],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def _left(first, second, LAYOUT: gl.constexpr):
    """Weights [64, 128] as the left side of matrix instructions; fragments have 8 rows of first, 8 of second."""
    both = gl.join(_unpacked(first), _unpacked(second))
    both = both.reshape([4, 8, 4, 4, 2, 2, 2, 2])  # warp, row, t, j, h, i // 2, i % 2, first or second
    both = both.permute((0, 7, 1, 3, 5, 6, 2, 4))
    return gl.convert_layout(both.reshape([64, 128]), LAYOUT, assert_trivial=True)


@gluon.jit
def _sums(
    words, values, full, empty, i, at, scale, other,
    K: gl.constexpr, WAYS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, WAY: gl.constexpr,
):  # fmt: skip
    """The products of 64 rows with the first TOKENS tokens of a block, over all of K: [64, TOKENS].

    at: where the scales of the rows begin; scale, other: of the first two groups.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    zero = gl.zeros([64, TOKENS], gl.float32, LAYOUT)
    sums = zero
    for g in range(K // 256):
        s = i % STAGES
        after = gl.minimum(2 * g + 2, K // 128 - 2)
        next_scale, next_other = gl.load(at + after), gl.load(at + after + 1)
        mbarrier.wait(full.index(s), i // STAGES & 1)
        first, first_other = _halves_of(words.index((WAYS * s + WAY) * 2))
        second, second_other = _halves_of(words.index((WAYS * s + WAY) * 2 + 1))
        w = _left(first, second, LEFT)
        x = values.index(2 * s).slice(0, TOKENS).permute((1, 0))
        found = warpgroup_mma(w, x, zero, use_acc=False, is_async=True)
        w_other = _left(first_other, second_other, LEFT)
        x_other = values.index(2 * s + 1).slice(0, TOKENS).permute((1, 0))
        found_other = warpgroup_mma(w_other, x_other, zero, use_acc=False, is_async=True)
        found, w = warpgroup_mma_wait(1, deps=(found, w))
        sums += found * gl.convert_layout(scale, gl.SliceLayout(1, LAYOUT)).to(gl.float32)[:, None]
        found_other, w_other = warpgroup_mma_wait(0, deps=(found_other, w_other))
        mbarrier.arrive(empty.index(s))
        sums += found_other * gl.convert_layout(other, gl.SliceLayout(1, LAYOUT)).to(gl.float32)[:, None]
        scale, other = next_scale, next_other
        i += 1
    return sums


@gluon.jit
def _store(
    sums, c, slots, m, row, slot_count,
    OUT: gl.constexpr, OTHER: gl.constexpr, GATHER: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Sums [64, TOKENS] to rows of c: of gate and up SiLU(gate) · up (GATHER), else of both, back to their slots.

    m: the block's first sorted row. row: of w, the first of `first`'s 32.
    """
    parts = gl.split(sums.reshape([4, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    first, second = parts[0].reshape([32, TOKENS]), parts[1].reshape([32, TOKENS])
    LAYOUT: gl.constexpr = first.type.layout
    n = row + gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    m += gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    slot = gl.load(slots + m)
    mask = (slot < slot_count)[None, :]
    if GATHER:
        to = n // 128 * 128 + n // 8 % 4 * 32 + n // 2 % 2 * 16 + n % 2 * 8 + n // 32 % 4 * 2 + n // 4 % 2
        values = first / (1.0 + gl.exp(-first)) * second
        gl.store(c + m.to(gl.int64)[None, :] * OUT + to[:, None], values.to(gl.bfloat16), mask=mask)
    else:
        at = c + slot.to(gl.int64)[None, :] * OUT + n[:, None]
        gl.store(at, first.to(gl.bfloat16), mask=mask)
        gl.store(at + OTHER, second.to(gl.bfloat16), mask=mask)


@gluon.jit
def _multiply(
    data, room,
    N: gl.constexpr, K: gl.constexpr, GATHER: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, WAY: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: 64 rows of every tile of the program, 32 from `row` on and 32 others."""
    scales, c, slots, experts, padded, slot_count = data
    words, values, full, empty = room
    OTHER: gl.constexpr = N // 2 if GATHER else ROWS // 2
    OUT: gl.constexpr = N // 2 if GATHER else N
    WAYS: gl.constexpr = ROWS // 64
    blocks = gl.load(padded) // TOKENS
    tiles = blocks * (N // ROWS)
    r = gl.arange(0, 64, gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])))
    inside = r // 16 * 8 + r % 8 + r // 8 % 2 * OTHER
    i = 0
    tile = gl.program_id(0)
    block, row, at, is_half = _begin(
        tile, tiles, blocks, scales, slots, experts, slot_count, inside, N, K, GATHER, ROWS, TOKENS, WAY
    )
    scale, other = gl.load(at), gl.load(at + 1)
    while tile < tiles:
        tile += gl.num_programs(0)
        # asked for here, what the next tile begins with is there when it begins
        next_block, next_row, next_at, next_half = _begin(
            tile, tiles, blocks, scales, slots, experts, slot_count, inside, N, K, GATHER, ROWS, TOKENS, WAY
        )
        m = block * TOKENS
        if TOKENS == 64 and is_half:
            half = _sums(words, values, full, empty, i, at, scale, other, K, WAYS, TOKENS // 2, STAGES, WAY)
            scale, other = gl.load(next_at), gl.load(next_at + 1)
            _store(half, c, slots, m, row, slot_count, OUT, OTHER, GATHER, TOKENS // 2)
        else:
            sums = _sums(words, values, full, empty, i, at, scale, other, K, WAYS, TOKENS, STAGES, WAY)
            scale, other = gl.load(next_at), gl.load(next_at + 1)
            _store(sums, c, slots, m, row, slot_count, OUT, OTHER, GATHER, TOKENS)
        i += K // 256
        block, row, at, is_half = next_block, next_row, next_at, next_half


@gluon.jit
def _begin(
    tile, tiles, blocks, scales, slots, experts, slot_count, inside,
    N: gl.constexpr, K: gl.constexpr, GATHER: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    WAY: gl.constexpr,
):  # fmt: skip
    """A tile's block of tokens, first row of w, scales, and whether no more than half of its rows have a token.

    Of a tile that there is not, another's, which does no harm.
    """
    block, column = _tile_of(gl.minimum(tile, gl.maximum(tiles, 1) - 1), gl.maximum(blocks, 1), N // ROWS)
    expert = gl.maximum(gl.load(experts + block), 0)
    row = column * (ROWS // 2 if GATHER else ROWS) + 32 * WAY
    at = scales + expert.to(gl.int64) * (N * (K // 128)) + (row + inside) * (K // 128)
    return block, row, at, gl.load(slots + block * TOKENS + TOKENS // 2) >= slot_count


@gluon.jit(do_not_specialize=["slot_count"])
def _specialised_kernel(
    w, x, scales, c, slots, experts, padded, slot_count,
    N: gl.constexpr, K: gl.constexpr, GATHER: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """One program: every num_programs-th tile of TOKENS sorted tokens of one expert and ROWS rows of its w [N, K].

    w: a descriptor of words of two bytes, [E · N, K // 4]. x: one of sorted tokens in the words' order. GATHER: c is
    sorted, SiLU(gate) · up, in that order too; if not, c is [T · TOP_K, N] in the order of the slots.
    """
    if DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    words = gl.allocate_shared_memory(gl.int16, [ROWS // 32 * STAGES, 32, 64], w.layout)
    values = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, TOKENS, 128], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=ROWS // 64)
    data, room = (scales, c, slots, experts, padded, slot_count), (words, values, full, empty)
    if ROWS == 64:  # constants cannot be part of a tuple that has a name
        gl.warp_specialize([
            (_multiply, (data, room, N, K, GATHER, ROWS, TOKENS, STAGES, 0)),
            (_copy, (w, x, experts, padded, room, N, K, GATHER, ROWS, TOKENS, STAGES)),
        ], [1], [24])  # fmt: skip
    elif ROWS == 128:
        gl.warp_specialize([
            (_multiply, (data, room, N, K, GATHER, ROWS, TOKENS, STAGES, 0)),
            (_multiply, (data, room, N, K, GATHER, ROWS, TOKENS, STAGES, 1)),
            (_copy, (w, x, experts, padded, room, N, K, GATHER, ROWS, TOKENS, STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (data, room, N, K, GATHER, ROWS, TOKENS, STAGES, 0)),
            (_multiply, (data, room, N, K, GATHER, ROWS, TOKENS, STAGES, 1)),
            (_multiply, (data, room, N, K, GATHER, ROWS, TOKENS, STAGES, 2)),
            (_multiply, (data, room, N, K, GATHER, ROWS, TOKENS, STAGES, 3)),
            (_copy, (w, x, experts, padded, room, N, K, GATHER, ROWS, TOKENS, STAGES)),
        ], [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24])  # fmt: skip


def by_specialised_warps(
    x: LayerInputs,
    scratch: Workspace | None = None,
    block_m: int = 0,
    up: WarpChoice | None = None,
    down: WarpChoice | None = None,
) -> Layer:
    """`expert_layer.layer` by these products: SiLU · up fused.

    scratch: as there. block_m: tokens a block; 0: `blocks_of`. up, down: of the first and second product;
    None: `for_block`.
    ValueError for weights that are not INT4, for one token, for an x that is not bf16, for widths that are not whole
    tiles and for what is not a Hopper GPU.
    """
    check_layer(x)
    check_int4(x)
    check_several(x)
    T, E, top_k, H, width = x.shape
    check_one_of("x", x.x.dtype, (torch.bfloat16,))
    check_hopper(x.x.device)
    config = Choice(block_m, _TILE, _TILE) if block_m else blocks_of(T, top_k, E)
    block_m = config.block_m
    check_one_of("block_m", block_m, BLOCKS_M)
    made = by_tiles(x, config, workspace(x) if scratch is None else scratch)
    args = made.launches["gemm1"].args
    rows = torch.empty(args["blocks"] * block_m, H, dtype=torch.bfloat16, device=x.x.device)
    gathered = {name: args[name] for name in ("slots", "padded", "slot_count", "TOP_K", "DEPENDENT")}
    gathered |= {"x": x.x, "out": rows, "K": H, "SIDE": SIDE, "BLOCK": GATHERED}
    options = options_of(args, 4)
    new = {
        "gather": Launch(_gather_kernel, (len(rows) // SIDE, triton.cdiv(H, GATHERED)), gathered, options),
        "gemm1": gemm(args, rows, x.w1, up or for_block(block_m)),
        "gemm2": gemm(made.launches["gemm2"].args, args["c"].view(-1, width), x.w2, down or for_block(block_m)),
    }
    before = {name: made.launches[name] for name in made.sorted.launches}
    return Layer(made.config, made.sorted, {**before, **new, "sum": made.launches["sum"]})


def blocks_of(T: int, top_k: int, experts: int) -> Choice:
    """Tokens a block: as many as an expert has by uniform routing, and a fourth of that more, or the largest."""
    block_m = next((m for m in BLOCKS_M if 4 * m * experts >= 5 * T * top_k), BLOCKS_M[-1])
    return Choice(block_m, _TILE, _TILE)


def for_block(block_m: int) -> WarpChoice:
    """Four warpgroups; of the largest blocks two, whose sums would else not find room in the registers of a lane."""
    return WarpChoice(rows=128 if block_m == BLOCKS_M[-1] else 256)


def gemm(args: Mapping[str, Any], x: Tensor, w: Int4, choice: WarpChoice) -> Launch:
    """One of the two products, with the arguments of that of tiles.py; x: [rows, K], in the words' order.

    ValueError for what the kernel cannot take.
    """
    for name, allowed in (("rows", ROWS), ("stages", STAGES), ("together", TOGETHER)):
        check_one_of(name, getattr(choice, name), allowed)
    N, K, tokens = args["N"], args["K"], args["BLOCK_M"]
    if N % choice.rows or K % STAGE:
        raise ValueError(
            f"an expert's weights are [{N}, {K}]; allowed: multiples of {choice.rows} (rows) and of {STAGE} (a stage)"
        )
    packed = w.packed.view(torch.int16)
    check_descriptor(packed, _TILE)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    kept = ("c", "slots", "experts", "padded", "slot_count", "N", "K", "GATHER", "DEPENDENT")
    given = {name: args[name] for name in kept}
    given |= {"w": TensorDescriptor.from_tensor(packed.view(-1, K // 4), [32, 64], layout), "scales": w.scales}
    given |= {"x": TensorDescriptor.from_tensor(x, [tokens, 128], layout), "TOKENS": tokens, "ROWS": choice.rows}
    given |= {"STAGES": choice.stages, "REGISTERS": _registers(choice)}
    programs = multiprocessors(x.device) * choice.together
    options = options_of(args, 4) | {"maxnreg": _most(choice)}
    return Launch(_specialised_kernel, (programs,), given, options)


def _most(choice: WarpChoice) -> int:
    """Registers of a thread when a program begins, so that so many are on a multiprocessor; in steps of eight."""
    return min(255, REGISTERS // (_threads(choice) * choice.together) // 8 * 8)


def _registers(choice: WarpChoice) -> int:
    """Registers of a thread that multiplies, once the warps that copy have given up theirs; in steps of eight."""
    left = _most(choice) * _threads(choice) - 128 * COPYING
    return min(240, left // (2 * choice.rows) // 8 * 8)


def _threads(choice: WarpChoice) -> int:
    """A warpgroup for every 64 rows, and one, of which one warp copies."""
    return 2 * choice.rows + 128
