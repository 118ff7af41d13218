"""Products of BF16 matrices by specialised warps, y[n] = W x[n], with the same bits in any batch: `by_continued_sums`.

| what                      | hypothesis                                                                               |
|---------------------------|------------------------------------------------------------------------------------------|
| a warp that copies        | the copy engine (TMA) brings weights and x, stages ahead                                 |
| warpgroups on their own   | each has 64 tokens and 128 or 256 rows: its instructions follow each other without gaps  |
| equal shares of all steps | no multiprocessor is idle while others end: a share is at least all columns of a tile,   |
|                           | so that a tile has two programs at most                                                  |
| sums are continued        | whoever has a tile's last columns begins with the sums of its first: nothing is added at |
|                           | the end, and the bits are those of a sum that was never cut                              |
| shares in falling order   | a program begins with the tile that another ends: its sums are there long before         |
| a warp that passes sums   | waits for stores and for the other program, so that those that multiply do not           |
| the same rows at once     | programs with other tokens of the same rows run side by side: weights come from memory   |
|                           | once                                                                                     |
| y by the copy engine      | lanes' own stores would touch eight rows each, which takes thousands of cycles a tile    |

The choice (`ContinuedChoice`): rows, tokens: of a program; stages: of 64 columns, on their way.

| choice                 | hypothesis                                                                                 |
|------------------------|--------------------------------------------------------------------------------------------|
| 256 rows, 128 tokens   | fewer bytes of shared memory are read an operation; with 128 rows half as many sums are    |
|                        | passed on                                                                                  |
| 64 tokens              | one warpgroup: twice as many programs, where there are fewer tiles than multiprocessors    |
| 64 or 32 rows          | few tokens: each program has a tile of its own, and its stages are many                    |
| boxes of x with tokens | what a box has past the last token takes longer than tokens: 72 of them for [17408, 5120]  |
|                        | took 65 µs in boxes of 64, 53 in boxes of 32                                               |

A matrix instruction adds 16 columns after the others, so a token's bits depend on the number of columns alone: not on
other tokens, the shape, the choice or the number of multiprocessors.

Tried on an H200 (µs of a product in a graph of four, 512 tokens, for [5120, 17408] and [17408, 5120]; in the same runs
cuBLAS took 121 to 124 and 117 to 121):

| form                                                                          | 128 rows | 256 rows |
|-------------------------------------------------------------------------------|----------|----------|
| tiles in turn: programs have the same rows at other times                     | 145, 201 | 146, 147 |
| the same rows at once                                                         | 127, 130 | 130, 132 |
| … and each warpgroup with tiles of its own                                    | 133, 137 |          |
| … and y by the copy engine; parts of sums added at the end, behind a flag     | 122, 124 | 124, 125 |
| … and these parts as their own flags, values other than a NaN                 | 126, 127 | 136, 134 |
| sums continued                                                                | 124, 125 | –, 123   |
| … and begun while the launch before runs: programs no longer side by side     | 127, 140 | –, 122   |
| no sums passed on at all, which is wrong                                      | 119, 120 | 115, 117 |

What bounds it: without copies, a step of 128 tokens, 256 rows and 64 columns takes 1048 cycles, of which matrix
instructions take 1024. But under this load an H200's clock falls from 1980 to between 1500 and 1600 MHz. Without copies
all steps take 108 µs, with zeros as values 103. What is left is sums passed on: of 256 rows 128 KiB a program.

What one family of bits costs (the same way, graphs of 4 or of 14 products, one process, medians of 7; every token has
the bits that it has among 512). Of the two large matrices it takes 0.78 to 1.12 times as long as cuBLAS, of the small
ones, where launches are a part, 0.90 to 1.24, but up to 1.54 between 65 and 127 tokens of the one with 2560 rows:

| tokens        | 1  | 4  | 16 | 32 | 64 | 65 | 96 | 128 | 160 | 192 | 256 | 384 | 512 |
|---------------|----|----|----|----|----|----|----|-----|-----|-----|-----|-----|-----|
| [5120, 17408] | 45 | 45 | 46 | 46 | 48 | 57 | 56 | 57  | 58  | 59  | 73  | 94  | 119 |
| cuBLAS        | 48 | 49 | 51 | 49 | 52 | 52 | 54 | 55  | 57  | 61  | 72  | 93  | 119 |
| [17408, 5120] | 48 | 48 | 48 | 48 | 49 | 52 | 52 | 52  | 62  | 62  | 67  | 94  | 119 |
| cuBLAS        | 47 | 47 | 47 | 47 | 50 | 47 | 47 | 50  | 55  | 79  | 64  | 96  | 115 |
| [2560, 9216]  | 21 | 21 | 21 | 21 | 21 | 28 | 25 | 22  | 26  | 22  | 28  | 30  | 38  |
| cuBLAS        | 17 | 17 | 17 | 17 | 18 | 18 | 19 | 20  | 22  | 25  | 26  | 29  | 34  |
| [9216, 2560]  | 15 | 15 | 15 | 15 | 16 | 18 | 18 | 18  | 21  | 21  | 24  | 30  | 38  |
| cuBLAS        | 14 | 14 | 14 | 15 | 15 | 16 | 16 | 16  | 18  | 19  | 19  | 26  | 33  |

Tried for fewer tokens, [5120, 17408] and [17408, 5120], where cuBLAS takes 51 and 46 at 16 tokens, 55 and 49 at 128 and
73 and 67 at 256: tiles of 128 rows and 128 tokens 99 and 72, 85 and 52, 88 and 72; of 32 rows and 128 tokens 153 and
188, 78 and 89; of 64 and 128 113 and 107, 65 and 60, 90 and 98; of 32 rows and 64 tokens with 8 stages 57 and 58 at 16,
with 16 stages 49 and 50; of 64 and 64 with 8 50 and 49, with 12 46 and 48. Of 72 tokens, boxes of 64, 32, 16 and 8 that
are waited for each by itself: 70 and 65, 64 and 53, 91 and 62, 152 and 100.

Sources: specialised.py; Stream-K (Osama et al., 2023) for shares of K. For Hopper; Gluon has no interpreter.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from labkit.kernels.checks import check_contiguous, check_one_of
from labkit.kernels.gguf.products import check_tokens
from labkit.kernels.gguf.wide import check_matrix
from labkit.kernels.launch import Launch
from labkit.kernels.target import check_hopper, multiprocessors

ROWS, STAGES = (32, 64, 128, 256), tuple(range(2, 17))
TOKENS = (64, 128)  # a program: 64 a warpgroup
STEP = 64  # columns of a stage
MOST_TOKENS = 4096  # in one product: 32 programs of the same rows
ROOM = 194 << 10  # bytes of shared memory for stages, beside y on its way out
THREADS = 384  # two warpgroups, and one of which one warp copies and one passes sums on
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name since Triton 3.7, and before


@dataclass(frozen=True)
class ContinuedChoice:
    """How a product is run. rows, tokens: a program; stages: of 64 columns, on their way."""

    rows: int = 128
    stages: int = 6
    tokens: int = 128


@gluon.jit
def _copy(
    x, W, tokens, room, share,
    KS: gl.constexpr, WAYS: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that copies: x and weights of every step as soon as a stage is free.

    Of x so many boxes of BOX tokens as there are, since boxes past the last token take long; what else lies there is
    multiplied, and not stored.
    """
    x_room, W_room, full, empty = room
    begin, end, token_tile = share
    first_token = token_tile * (WAYS * 64)
    boxes = gl.minimum(gl.cdiv(tokens - first_token, BOX), BOXES)
    i, upto = 0, end
    while upto > begin:
        tile = (upto - 1) // KS
        first = gl.maximum(begin, tile * KS)
        for step in range(first, upto):
            s, k = i % STAGES, (step - tile * KS) * 64
            mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
            for count in gl.static_range(1, BOXES + 1):
                if boxes == count:
                    mbarrier.expect(full.index(s), (count * BOX + ROWS) * 64 * 2)
                    for box in gl.static_range(count):
                        to = x_room.index(s * WAYS + box * BOX // 64).slice(box * BOX % 64, BOX)
                        tma.async_copy_global_to_shared(x, [first_token + box * BOX, k], full.index(s), to)
            tma.async_copy_global_to_shared(W, [tile * ROWS, k], full.index(s), W_room.index(s))
            i += 1
        upto = first


@gluon.jit
def _pass_on(flags, stored, there, share, KS: gl.constexpr, TOKEN_TILES: gl.constexpr):
    """The warp that says that sums are stored, and waits for those of the program before; its flag is zero then."""
    begin, end, _ = share
    if end % KS > 0:
        mbarrier.wait(stored, 0)
        gl.atomic_xchg(flags + gl.program_id(0), 1, sem="release")
    if begin % KS > 0:
        before = flags + gl.program_id(0) - TOKEN_TILES
        seen = 0
        while seen == 0:
            seen = gl.atomic_add(before, 0, sem="acquire")
        gl.store(before, 0)
        mbarrier.arrive(there)


@gluon.jit
def _add_steps(sums, room, i, count, WAY: gl.constexpr, WAYS: gl.constexpr, STAGES: gl.constexpr):
    """Sums [64, rows] with `count` steps from the program's i-th on added."""
    x_room, W_room, full, empty = room
    for j in range(i, i + count):
        s = j % STAGES
        mbarrier.wait(full.index(s), j // STAGES & 1)
        sums = warpgroup_mma(x_room.index(s * WAYS + WAY), W_room.index(s).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=(sums,))  # the instructions of the step before are over
        mbarrier.arrive(empty.index((j + STAGES - 1) % STAGES), pred=j > i)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(empty.index((i + count + STAGES - 1) % STAGES))
    return sums


@gluon.jit
def _beside(a, b):
    """Sums of two times 128 rows as of 256, in the same registers."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    return gl.convert_layout(gl.join(a, b).permute((0, 2, 1)).reshape([64, 256]), LAYOUT, assert_trivial=True)


@gluon.jit
def _apart(sums):
    """Sums of 256 rows as of two times 128."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    a, b = gl.split(sums.reshape([64, 2, 128]).permute((0, 2, 1)))
    return gl.convert_layout(a, LAYOUT, assert_trivial=True), gl.convert_layout(b, LAYOUT, assert_trivial=True)


@gluon.jit
def _write(y, room, sums, token, row):
    """Sums as y, by the copy engine, once it has read what it was given before."""
    tma.store_wait(0)
    barrier()
    room.store(sums.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(y, [token, row], room)


@gluon.jit
def _multiply(
    y, out, parts, stored, there, room, share,
    KS: gl.constexpr, WAY: gl.constexpr, WAYS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    TOKEN_TILES: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: 64 of the tokens of every tile that the program has a share of.

    parts: sums that are passed on, as a warp's lanes have them: of 16 tokens and 8 rows, the values of a row of them.
    """
    PART: gl.constexpr = min(ROWS, 128)  # rows of sums that are stored at once
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    EACH: gl.constexpr = WAYS * 64 * ROWS  # values of a program
    begin, end, token_tile = share
    t = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    r = gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))
    own = parts + gl.program_id(0) * EACH + WAY * (64 * ROWS)
    own = own + (t // 16 * (16 * PART) + t % 16 * 8)[:, None] + (r // 8 * 128 + r % 8)[None, :]
    token = (token_tile * WAYS + WAY) * 64
    i, upto = 0, end
    while upto > begin:
        tile = (upto - 1) // KS
        first = gl.maximum(begin, tile * KS)
        continued = first > tile * KS
        if continued:
            mbarrier.wait(there, 0)
        before, some = own - TOKEN_TILES * EACH, gl.full([64, PART], True, gl.int1, LAYOUT) & continued
        a = gl.load(before, mask=some, other=0.0, cache_modifier=".cg")
        if ROWS == 256:
            b = gl.load(before + 64 * 128, mask=some, other=0.0, cache_modifier=".cg")
            a, b = _apart(_add_steps(_beside(a, b), room, i, upto - first, WAY, WAYS, STAGES))
        else:
            a = _add_steps(a, room, i, upto - first, WAY, WAYS, STAGES)
        i += upto - first
        passed_on, row = upto < (tile + 1) * KS, tile * ROWS
        if passed_on:
            gl.store(own, a)
            if ROWS == 256:
                gl.store(own + 64 * 128, b)
            mbarrier.arrive(stored)
        else:
            _write(y, out.index(WAY), a, token, row)
            if ROWS == 256:
                _write(y, out.index(WAY), b, token, row + 128)
        upto = first
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["steps", "tokens"])
def _continued_kernel(
    W, x, y, parts, flags, steps, tokens,
    KS: gl.constexpr, WAYS: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, TOKEN_TILES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: an equal share of the steps of 64 columns of all tiles of ROWS rows, for 64 WAYS tokens.

    W, x, y: descriptors with boxes [ROWS, 64], [BOX, 64] and [64, ROWS], of 256 rows [64, 128]. parts: room for the
    sums of every program, fp32; flags: a zero for each. TOKEN_TILES programs have the same share.
    """
    x_room = gl.allocate_shared_memory(gl.bfloat16, [STAGES * WAYS, 64, 64], x.layout)
    W_room = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 64], W.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [WAYS, 64, min(ROWS, 128)], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=WAYS)
    mbarrier.init(stored, count=WAYS)
    mbarrier.init(there, count=1)
    groups = gl.num_programs(0) // TOKEN_TILES
    group = (gl.program_id(0) // TOKEN_TILES).to(gl.int64)
    begin, end = (group * steps // groups).to(gl.int32), ((group + 1) * steps // groups).to(gl.int32)
    share = begin, end, gl.program_id(0) % TOKEN_TILES
    room = x_room, W_room, full, empty
    if WAYS == 2:
        gl.warp_specialize([
            (_multiply, (y, out, parts, stored, there, room, share, KS, 0, WAYS, ROWS, STAGES, TOKEN_TILES)),
            (_multiply, (y, out, parts, stored, there, room, share, KS, 1, WAYS, ROWS, STAGES, TOKEN_TILES)),
            (_copy, (x, W, tokens, room, share, KS, WAYS, BOX, BOXES, ROWS, STAGES)),
            (_pass_on, (flags, stored, there, share, KS, TOKEN_TILES)),
        ], [4, 1, 1], [REGISTERS, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (y, out, parts, stored, there, room, share, KS, 0, WAYS, ROWS, STAGES, TOKEN_TILES)),
            (_copy, (x, W, tokens, room, share, KS, WAYS, BOX, BOXES, ROWS, STAGES)),
            (_pass_on, (flags, stored, there, share, KS, TOKEN_TILES)),
        ], [1, 1], [24, 24])  # fmt: skip


def by_continued_sums(W: Tensor, x: Tensor, y: Tensor, choice: ContinuedChoice | None = None) -> Launch:
    """y[n] = W x[n].

    W: contiguous [rows, K], as `formats.matrix` gives it; x: [N, K], N at most 4096; y: [N, rows]; all bf16, x and y
    contiguous, rows and K multiples of 8. choice: `continued_rule`'s by default. Sums are fp32, in the order of K.
    ValueError for anything else, and for what is not a Hopper GPU. A launch must not run twice at once: it has memory
    for one set of sums.
    """
    check_operands(W, x, y)
    check_hopper(x.device)
    rows, K = W.shape
    choice = choice or continued_rule(len(x), rows, multiprocessors(x.device))
    check_continued(choice)
    ways, box = choice.tokens // 64, _box(len(x))
    token_tiles, KS = triton.cdiv(len(x), choice.tokens), triton.cdiv(K, STEP)
    row_tiles = triton.cdiv(rows, choice.rows)
    programs = token_tiles * _groups(token_tiles, row_tiles, multiprocessors(x.device))
    args: dict[str, Any] = {"W": _boxes(W, choice.rows, STEP), "x": _boxes(x, box, STEP)}
    args |= {"y": _boxes(y, 64, min(choice.rows, 128)), "tokens": len(x)}
    args["parts"] = x.new_empty(programs * choice.tokens * choice.rows, dtype=torch.float32)
    args["flags"] = torch.zeros(programs, dtype=torch.int32, device=x.device)
    args |= {"steps": row_tiles * KS, "KS": KS, "WAYS": ways, "BOX": box, "ROWS": choice.rows, "STAGES": choice.stages}
    args |= {"BOXES": triton.cdiv(min(len(x), choice.tokens), box), "TOKEN_TILES": token_tiles, "REGISTERS": 240}
    options = {"num_warps": 4} | ({"maxnreg": 65536 // THREADS // 8 * 8} if ways == 2 else {})
    return Launch(_continued_kernel, (programs,), args, options)


def _box(tokens: int) -> int:
    """Tokens of a copy of x."""
    if tokens <= 64:
        return max(8, triton.next_power_of_2(tokens))
    return 64 if tokens % 64 == 0 else 32


def _groups(token_tiles: int, row_tiles: int, processors: int) -> int:
    """Programs with the same tokens: as many as multiprocessors hold at once, and a tile or more for each."""
    return min(row_tiles, max(1, processors // token_tiles))


def _boxes(values: Tensor, first: int, second: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * second), element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(values, [first, second], layout)


def continued_rule(tokens: int, rows: int, processors: int = 132) -> ContinuedChoice:
    """A choice for so many tokens and rows: tiles so large that about as many programs have one as run at once."""
    wide = triton.cdiv(rows, 128) * triton.cdiv(tokens, 128)  # tiles
    if tokens > 192 and wide >= processors * 3 // 4:
        groups = processors // triton.cdiv(tokens, 128)
        return _deep(256 if triton.cdiv(rows, 256) >= max(1, groups) else 128, 128)
    tiles = triton.cdiv(tokens, 64)
    return _deep(next((n for n in (128, 64) if triton.cdiv(rows, n) * tiles >= processors // 2), 32), 64)


def _deep(rows: int, tokens: int) -> ContinuedChoice:
    """With as many stages as fit."""
    return ContinuedChoice(rows, min(STAGES[-1], _most(rows, tokens)), tokens)


def _most(rows: int, tokens: int) -> int:
    return ROOM // (2 * STEP * (tokens + rows))


def check_continued(choice: ContinuedChoice) -> None:
    """Raise ValueError for a choice that the kernel cannot take."""
    check_one_of("tokens", choice.tokens, TOKENS)
    check_one_of("rows", choice.rows, ROWS)
    most = _most(choice.rows, choice.tokens)
    check_one_of("stages", choice.stages, [n for n in STAGES if n <= most])


def check_operands(W: Tensor, x: Tensor, y: Tensor) -> None:
    """Raise ValueError for what `by_continued_sums` cannot take, but for the GPU."""
    check_matrix(W)
    check_tokens(x, y, *W.shape, W.device)
    for name, values in (("W", W), ("x", x), ("y", y)):
        check_one_of(name, values.dtype, (torch.bfloat16,))
        check_contiguous(name, values)
        if values.shape[1] % 8 or values.data_ptr() % 16:
            raise ValueError(f"{name} is {tuple(values.shape)}; allowed: rows that begin at multiples of 16 bytes")
    if len(x) > MOST_TOKENS:
        raise ValueError(f"x has {len(x)} tokens; allowed: at most {MOST_TOKENS}")
