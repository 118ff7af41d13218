"""An expert layer in Triton: two grouped GEMMs over tokens sorted by expert, with bf16 or INT4 weights.

Launches, in order; the first one or two are routing's (see routing.py), and one token needs none of those (it has two
launches of its own, see one_token.py, unless its configuration asks for tiles). expert_layer.py chooses between these
kernels and those of one_token_words.py.

| launch       | programs       | what it does                                                                         |
|--------------|----------------|--------------------------------------------------------------------------------------|
| count, place | chunk          | slots sorted by expert, padded to BLOCK_M                                            |
| gemm1        | tile, or fewer | w1[e] x of every slot; x is gathered inside; SiLU(gate) · up at its end if fused     |
| gemm2        | tile, or fewer | w2[e] of that; its rows of A lie one after the other; each row goes back to its slot |
| sum          | token, tile    | Σ_j weights[j] · row of slot j, in fp32, in the order of j                           |

Choices (see `choose.Tile`), and the hypothesis that each one tests:

| choice       | hypothesis                                                                                            |
|--------------|-------------------------------------------------------------------------------------------------------|
| programs     | a persistent grid saves launching CTAs and its tail; it loses where it holds fewer CTAs an SM than    |
|              | fit, and wins nothing over many waves. min(programs, tiles of the grid) loop over the tiles           |
| counted      | blocks beyond the last token are not worked on: the device's count ends the loop, or the CTA. If not: |
|              | the worst-case grid, whose dead blocks run whole K loops on zeros and the last expert's weights       |
| group_m      | tiles in columns of group_m blocks of rows: blocks of one expert meet its weights in the L2           |
| flatten      | tile loop and K loop as one: the next tile's loads are issued before this tile's store                |
| block_m      | padding and dead rows against reuse of weights; below 64 rows wgmma takes only the weights as its     |
|              | left operand (swap)                                                                                   |
| swap         | w [BN, BK] · xᵀ [BK, BM] instead of x · wᵀ: wgmma needs 64 rows on the left and 8 columns on the      |
|              | right, so few tokens go right; and INT4 weights, unpacked in registers, can enter from there          |
| unpack       | INT4. twice: each byte is addressed for its even and for its odd k, as in the source; join: loaded    |
|              | once, its halves interleaved again; split: two bytes at once, k reordered by k mod 4, x alike, so     |
|              | that no weight need be moved to another register                                                      |
| scale_sums   | INT4. u4 - 8 is exact in bf16, so the scale can multiply each group's sum instead of each weight:     |
|              | fewer products where BM < BK, and no rounding of weights                                              |
| descriptor   | w comes by the copy engine (TMA, from Hopper on): no registers for its addresses; see descriptors.py  |
| dependent    | each launch may start when the one before has begun its last programs, and waits for its end: what a  |
|              | launch costs is hidden (programmatic dependent launch, from Hopper on)                                |
| fused        | SiLU(gate) · up at the end of GEMM1 (rows of gate and up alternate in its tile, so both of a pair are |
|              | in one thread): half the traffic between the GEMMs, and nothing computed again for every column tile  |

The order of sums depends on block_k, unpack, scale_sums and the matrix instruction, never on the grid: for one tile
persistent and per-tile results are bit-identical, with any group_m, counted and flatten.

Sources: ExecuTorch pull request 19219 for the persistent grid, the tile order and SiLU · up in the K loop; vLLM's
fused_moe for the sorted, padded slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.checks import check_tensor
from labkit.dependent import wait_for_inputs
from labkit.gemv.kernels import has_dependent_launch
from labkit.launch import Launch
from labkit.moe_persistent_grid import routing, waves
from labkit.moe_persistent_grid.choose import Config, Tile, check_config, choose
from labkit.moe_persistent_grid.reference import GROUP, Int4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SUM_TILE = 512  # values of a row a program of `sum`

# Nibbles to bf16 by their bits: those of 128 with a nibble in the mantissa are 128 + nibble, so that a mask and a
# subtraction of 136 make two values a register. Converting them as integers has a quarter of that rate.
_HEAD = """{
.reg .b32 a, b, c, d, one, bias;
mov.b32 one, 0x3F803F80;
mov.b32 bias, 0xC308C308;
"""
_TAIL = """
lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, a, one, bias;
fma.rn.bf16x2 $1, b, one, bias;
fma.rn.bf16x2 $2, c, one, bias;
fma.rn.bf16x2 $3, d, one, bias;
}"""
_FROM_BYTES = tl.constexpr(  # four bytes: their low nibbles, then their high ones
    _HEAD + "prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342; shr.u32 c, a, 4; shr.u32 d, b, 4;" + _TAIL
)
_FROM_HALVES = tl.constexpr(  # two halves of a word: their lowest nibbles, the next, …
    _HEAD + "mov.b32 a, $4; shr.u32 b, a, 4; shr.u32 c, a, 8; shr.u32 d, a, 12;" + _TAIL
)


@triton.jit
def _place_of(tile, blocks, COLUMNS: tl.constexpr, GROUP_M: tl.constexpr):
    """Block of rows and block of columns of a tile: columns of GROUP_M blocks of rows, one column after the other."""
    first = tile // (GROUP_M * COLUMNS) * GROUP_M
    within = tile % (GROUP_M * COLUMNS)
    size = tl.minimum(blocks - first, GROUP_M)
    return first + within % size, within // size


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    return tl.load(pointers)


@triton.jit
def _silu_up(gate, up):
    gate = gate.to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)


@triton.jit
def _product(a, b, sums, SWAP: tl.constexpr):
    """sums + a bᵀ, or its transpose if SWAP. a: [BM, BK], b: [BN, BK]."""
    if SWAP:
        return tl.dot(b, tl.trans(a), sums, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(b), sums, input_precision="ieee")


@triton.jit
def _whole(u4, scale, SCALE_SUMS: tl.constexpr, dtype: tl.constexpr):
    """Weights from nibbles; times their scale, unless that multiplies the sums."""
    if SCALE_SUMS:
        return u4.to(tl.int8).to(dtype) - tl.full([], 8.0, dtype)
    else:
        return ((u4.to(tl.float32) - 8.0) * scale).to(dtype)


@triton.jit
def _from_bytes(packed, scale, SCALE_SUMS: tl.constexpr, dtype: tl.constexpr):
    """Weights of even and of odd k, from bytes; as `_whole` makes them, the same bits."""
    if dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _FROM_BYTES, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        if not SCALE_SUMS:  # u4 - 8 and the scale are exact in bf16: their product is rounded once, as in fp32
            low *= scale.to(tl.bfloat16)
            high *= scale.to(tl.bfloat16)
        return low, high
    else:
        return _whole(packed & 15, scale, SCALE_SUMS, dtype), _whole(packed >> 4, scale, SCALE_SUMS, dtype)


@triton.jit
def _from_halves(packed, scale, SCALE_SUMS: tl.constexpr, dtype: tl.constexpr):
    """Weights of every fourth k, from 0, 1, 2 and 3 on, of words of 16 bits; as `_whole` makes them, the same bits."""
    if dtype == tl.bfloat16:
        zero, one, two, three = tl.inline_asm_elementwise(
            _FROM_HALVES, "=r,=r,=r,=r,r", [packed],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        if not SCALE_SUMS:
            scale = scale.to(tl.bfloat16)
            return zero * scale, one * scale, two * scale, three * scale
        return zero, one, two, three
    else:
        zero, one = _whole(packed & 15, scale, SCALE_SUMS, dtype), _whole(packed >> 4 & 15, scale, SCALE_SUMS, dtype)
        two, three = (
            _whole(packed >> 8 & 15, scale, SCALE_SUMS, dtype),
            _whole(packed >> 12 & 15, scale, SCALE_SUMS, dtype),
        )
        return zero, one, two, three


@triton.jit
def _add_int4(
    sums, a, w, rows, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, UNPACK: tl.constexpr, SCALE_SUMS: tl.constexpr,
):  # fmt: skip
    """sums + the product of a [BM, BK] with INT4 weights; rows [BN]: where they begin, in words of w."""
    if UNPACK == "twice":
        dtype: tl.constexpr = a.dtype
        ks = tl.arange(0, BLOCK_K)
        packed = tl.load(w + (rows[None, :] + (ks // 2)[:, None]))  # [BK, BN], as the source has it
        b = _whole((packed >> (ks % 2 * 4)[:, None]) & 15, scale[None, :], SCALE_SUMS, dtype)
        part = _product(a, tl.trans(b), tl.zeros_like(sums) if SCALE_SUMS else sums, SWAP)
        return _scaled(sums, part, scale, SWAP, SCALE_SUMS)
    else:
        WORDS: tl.constexpr = BLOCK_K // (4 if UNPACK == "split" else 2)
        packed = tl.load(w + (rows[:, None] + tl.arange(0, WORDS)[None, :]))
        return _add_packed(sums, a, packed, scale, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, UNPACK, SCALE_SUMS)


@triton.jit
def _add_packed(
    sums, a, packed, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, UNPACK: tl.constexpr, SCALE_SUMS: tl.constexpr,
):  # fmt: skip
    """sums + the product of a [BM, BK] with INT4 weights of which each byte is loaded once.

    packed: [BN, BK // 2], bytes; for split [BN, BK // 4], words of 16 bits.
    """
    part = tl.zeros_like(sums) if SCALE_SUMS else sums
    if UNPACK == "split":
        zero, one, two, three = _from_halves(packed, scale[:, None], SCALE_SUMS, a.dtype)
        # In the order of k mod 4, weights that a thread unpacks together lie apart as the product takes them.
        x = tl.reshape(tl.permute(tl.reshape(a, [BLOCK_M, BLOCK_K // 4, 4]), (0, 2, 1)), [BLOCK_M, BLOCK_K])
        both = tl.join(tl.join(zero, two), tl.join(one, three))
        w = tl.reshape(tl.permute(tl.reshape(both, [BLOCK_N, BLOCK_K // 4, 4]), (0, 2, 1)), [BLOCK_N, BLOCK_K])
        part = _product(x, w, part, SWAP)
    else:
        low, high = _from_bytes(packed, scale[:, None], SCALE_SUMS, a.dtype)
        part = _product(a, tl.reshape(tl.join(low, high), [BLOCK_N, BLOCK_K]), part, SWAP)
    return _scaled(sums, part, scale, SWAP, SCALE_SUMS)


@triton.jit
def _scaled(sums, part, scale, SWAP: tl.constexpr, SCALE_SUMS: tl.constexpr):
    if SCALE_SUMS:
        return sums + part * (scale[:, None] if SWAP else scale[None, :])
    else:
        return part


@triton.jit
def _tile(
    tile, blocks, a, w, scales, c, slots, experts, slot_count,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr, ACT: tl.constexpr,
    INT4: tl.constexpr, UNPACK: tl.constexpr, SCALE_SUMS: tl.constexpr, SWAP: tl.constexpr, COUNTED: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile: BLOCK_M rows of one expert, BLOCK_N rows of its w [N, K]."""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    PAIRED: tl.constexpr = ACT == "end"
    OUT: tl.constexpr = N // 2 if PAIRED else N
    WIDTH: tl.constexpr = BLOCK_N // 2 if PAIRED else BLOCK_N
    dtype: tl.constexpr = a.dtype.element_ty
    block, column = _place_of(tile, blocks, (N + BLOCK_N - 1) // BLOCK_N, GROUP_M)
    expert = tl.load(experts + block).to(tl.int64)
    expert = tl.where((expert >= 0) & (expert < E), expert, E - 1)  # a dead block has none; it does no harm
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(slots + m)
    valid = slot < slot_count
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    if PAIRED:
        n = n // 2 + n % 2 * OUT  # gate and up of an output side by side
    if N % BLOCK_N != 0:
        n = tl.minimum(n, N - 1)  # beyond the last row: it again, but it is not stored
    PER: tl.constexpr = (4 if UNPACK == "split" else 2) if INT4 else 1  # weights in a word of w
    w += expert * (N * K // PER)
    scales += expert * (N * (K // GROUP))
    ks = tl.arange(0, BLOCK_K)
    rows = a + (slot // TOP_K).to(tl.int64) * K if GATHER else a + m.to(tl.int64) * (2 * K if ACT == "loop" else K)

    sums = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = k + ks < K
        x_mask = (valid[:, None] & inside[None, :]) if GATHER else inside[None, :]
        x = _load(rows[:, None] + (k + ks)[None, :], x_mask, GATHER or not EVEN_K)
        if ACT == "loop":
            up = _load(rows[:, None] + (K + k + ks)[None, :], x_mask, not EVEN_K)
            x = _silu_up(x, up).to(dtype)
        if INT4:
            scale = tl.load(scales + k // GROUP + n * (K // GROUP)).to(tl.float32)
            packed = w + tl.multiple_of(k // PER, BLOCK_K // PER)
            sums = _add_int4(
                sums, x, packed, n * (K // PER), scale, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, UNPACK, SCALE_SUMS
            )
        else:
            b = _load(w + k + ((n * K)[:, None] + ks[None, :]), inside[None, :], not EVEN_K)
            sums = _product(x, b, sums, SWAP)

    if SWAP:
        sums = tl.trans(sums)
    if PAIRED:
        gate, up = tl.split(tl.reshape(sums, [BLOCK_M, WIDTH, 2]))
        sums = _silu_up(gate, up)
    out = column * WIDTH + tl.arange(0, WIDTH)
    to = (m if GATHER else slot).to(tl.int64)  # sorted, for the next GEMM; or back to the slot
    mask = (out < OUT)[None, :]
    if COUNTED or not GATHER:  # the source stores what it computes of padding
        mask = mask & valid[:, None]
    tl.store(c + to[:, None] * OUT + out[None, :], sums.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["slot_count", "blocks"])
def _gemm_kernel(
    a, w, scales, c, slots, experts, padded, slot_count, blocks,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr, ACT: tl.constexpr,
    INT4: tl.constexpr, UNPACK: tl.constexpr, SCALE_SUMS: tl.constexpr, SWAP: tl.constexpr, COUNTED: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: one tile, or every `num_programs`-th one if PERSISTENT.

    GATHER: a is x [T, K], and c is sorted; if not, a is sorted, and c is [T · TOP_K, N] in the order of the slots.
    ACT: "" for none; "end": gate and up of w's rows to one output; "loop": a is [rows, 2 K], gate and up of it.
    """
    wait_for_inputs(DEPENDENT)
    if COUNTED:
        blocks = tl.load(padded) // BLOCK_M
    tiles = blocks * ((N + BLOCK_N - 1) // BLOCK_N)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
            _tile(
                tile, blocks, a, w, scales, c, slots, experts, slot_count, N, K, E, TOP_K, GATHER, ACT, INT4, UNPACK,
                SCALE_SUMS, SWAP, COUNTED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, GROUP,
            )  # fmt: skip
    else:
        if tl.program_id(0) >= tiles:
            return
        _tile(
            tl.program_id(0), blocks, a, w, scales, c, slots, experts, slot_count, N, K, E, TOP_K, GATHER, ACT, INT4,
            UNPACK, SCALE_SUMS, SWAP, COUNTED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, GROUP,
        )  # fmt: skip


@triton.jit
def _sum_kernel(
    parts, ids, weights, out, H, TILES, E: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK values of one token: the weighted sum of its slots' rows, of those that have an expert."""
    wait_for_inputs(DEPENDENT)
    t = (tl.program_id(0) // TILES).to(tl.int64)
    h = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = t * TOP_K + j
        e = tl.load(ids + slot)
        part = tl.load(parts + slot * H + h, mask=(h < H) & (e >= 0) & (e < E), other=0.0)
        total += tl.load(weights + slot).to(tl.float32) * part.to(tl.float32)
    tl.store(out + t * H + h, total.to(out.dtype.element_ty), mask=h < H)


@dataclass(frozen=True)
class LayerInputs:
    """Everything that one expert layer reads and writes.

    x:       [T, H], bf16, fp16 or fp32.
    ids:     [T, top_k], int32 or int64; a slot whose id is not one of 0 to E - 1 adds nothing.
    weights: [T, top_k], bf16, fp16 or fp32.
    w1, w2:  [E, 2 I, H], gate before up, and [E, H, I], of x's dtype; or both INT4, H and I multiples of 128.
    out:     [T, H], bf16, fp16 or fp32.
    All contiguous, on one device, weights aligned to 16 bytes.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    w1: Tensor | Int4
    w2: Tensor | Int4
    out: Tensor

    @property
    def int4(self) -> bool:
        """Whether the weights are INT4."""
        return isinstance(self.w1, Int4)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """T, E, top_k, H, I."""
        w2 = self.w2.packed if isinstance(self.w2, Int4) else self.w2
        return len(self.x), len(w2), self.ids.shape[1], self.x.shape[1], w2.shape[2] * (2 if self.int4 else 1)


@dataclass(frozen=True)
class Workspace:
    """Scratch for layers of one shape with up to `tokens` tokens, one layer at a time: allocated once.

    hidden: rows between the GEMMs; parts: a row for every slot; integers: routing's tables. All one-dimensional.
    """

    tokens: int
    hidden: Tensor
    parts: Tensor
    integers: Tensor


def workspace(x: LayerInputs, tokens: int | None = None) -> Workspace:
    """Scratch for layers like x, of any configuration, with up to `tokens` tokens (None: x's own).

    Rows in between: tokens · top_k and, at worst, 128 for every expert.
    """
    tokens = len(x.x) if tokens is None else tokens
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}; allowed: at least 1")
    like = {"dtype": x.x.dtype, "device": x.x.device}
    rows, parts, integers = sizes(x, tokens)
    return Workspace(
        tokens,
        torch.zeros(rows, **like),  # GEMM2 reads rows of padding; what it makes of them is not stored
        torch.empty(parts, **like),
        torch.empty(integers, dtype=torch.int32, device=x.x.device),
    )


def sizes(x: LayerInputs, tokens: int | None = None) -> tuple[int, int, int]:
    """Values of hidden and of parts, and integers, that a workspace for layers like x has, for any configuration."""
    T, E, top_k, H, width = x.shape
    tokens = T if tokens is None else tokens
    rows = max(m * waves.source_blocks(tokens, top_k, E, m) for m in waves.BLOCKS_M)
    integers = max(
        routing.room(slots, E, m, waves.source_blocks(slots, 1, E, m))
        for m in waves.BLOCKS_M
        for slots in routing.steps(tokens * top_k)
    )
    return rows * 2 * width, tokens * top_k * H, integers


@dataclass(frozen=True)
class Layer:
    """The launches of one expert layer by name, in order; calling it makes them all. May be captured in a CUDA graph.

    `launches["gemm1"]()` repeats that kernel alone, on what the launches before it have left.
    """

    config: Config
    sorted: routing.Routing
    launches: Mapping[str, Launch]

    def __call__(self) -> None:
        for launch in self.launches.values():
            launch()


def layer(
    x: LayerInputs, config: Config | None = None, scratch: Workspace | None = None, check_ids: bool = False
) -> Layer:
    """out = Σ_j weights[:, j] · w2[e] (SiLU(gate) · up) with [gate, up] = w1[e] x and e = ids[:, j], as launches.

    config: None: `choose.choose`, from this GPU's tuned table or by a rule. scratch: shared by layers that run one
    after the other; None: x's own. What is in x's tensors may change between calls, their sizes may not: a captured
    graph serves fewer tokens with ids of -1.
    check_ids: raise ValueError now for ids out of range, which waits for the GPU; else such slots add nothing.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    check_layer(x)
    T, E, top_k, H, width = x.shape
    config = choose(*x.shape, x.int4, x.x.device) if config is None else config
    check_config(config, x.int4)
    scratch = workspace(x) if scratch is None else scratch
    if scratch.tokens < T:
        raise ValueError(f"x has {T} tokens; allowed: up to {scratch.tokens}, for which the scratch was made")
    if config.rows and T > 1:
        raise ValueError(f"config.rows is {config.rows} with {T} tokens; allowed: only for one token, else None")
    counted = config.gemm1.counted and config.gemm2.counted
    blocks = (waves.most_blocks if counted else waves.source_blocks)(T, top_k, E, config.block_m)
    dependent = config.dependent and has_dependent_launch(x.x.device)
    if config.rows or (counted and T == 1):
        found = routing.one_token(x.ids, E, config.block_m, check_ids)
    else:
        found = routing.route(x.ids, E, config.block_m, blocks, check_ids, scratch.integers, dependent)
    hidden = _part("hidden", scratch.hidden, blocks * config.block_m * (width if config.fused else 2 * width), x)
    if config.rows:
        from labkit.moe_persistent_grid import one_token

        return Layer(config, found, one_token.launches(x, hidden, config.rows, dependent))
    parts = _part("parts", scratch.parts, T * top_k * H, x)
    shared = {"slots": found.slots, "experts": found.experts, "padded": found.padded, "slot_count": T * top_k}
    shared |= {"E": E, "TOP_K": top_k, "BLOCK_M": config.block_m, "blocks": found.blocks}
    shared |= {"DEPENDENT": dependent}
    up = {"a": x.x, "c": hidden, "N": 2 * width, "K": H, "GATHER": True, "ACT": "end" if config.fused else ""}
    down = {"a": hidden, "c": parts, "N": H, "K": width, "GATHER": False, "ACT": "" if config.fused else "loop"}
    tiles = triton.cdiv(H, SUM_TILE)
    total = {"parts": parts, "ids": x.ids, "weights": x.weights, "out": x.out, "H": H, "TILES": tiles, "E": E}
    total |= {"TOP_K": top_k, "BLOCK": SUM_TILE, "DEPENDENT": dependent}
    launches = dict(found.launches)
    launches["gemm1"] = _gemm(shared | up, x.w1, config.gemm1)
    launches["gemm2"] = _gemm(shared | down, x.w2, config.gemm2)
    launches["sum"] = Launch(_sum_kernel, (T * tiles,), total, options_of(total, 4))
    return Layer(config, found, launches)


def _part(name: str, memory: Tensor, size: int, x: LayerInputs) -> Tensor:
    """So much of the scratch, which may have been made for a layer of another shape."""
    if len(memory) < size or memory.dtype != x.x.dtype or memory.device != x.x.device:
        found = f"{len(memory)} values of {memory.dtype} on {memory.device}"
        raise ValueError(f"scratch.{name} is {found}; allowed: at least {size} of {x.x.dtype} on {x.x.device}")
    return memory[:size]


def _gemm(args: Mapping, w: Tensor | Int4, tile: Tile) -> Launch:
    if tile.descriptor:
        from labkit.moe_persistent_grid import descriptors

        return descriptors.gemm(args, w, tile)
    int4 = isinstance(w, Int4)
    tiles = waves.tiles(args["blocks"], args["N"], tile.block_n)
    weights = {"w": words(w, tile), "scales": w.scales if int4 else w}
    programs = min(tile.programs, tiles) if tile.programs else tiles
    options = options_of(args, tile.num_warps) | {"num_stages": tile.num_stages}
    return Launch(_gemm_kernel, (programs,), {**args, **weights, **constants(tile, int4)}, options)


def options_of(args: Mapping[str, Any], num_warps: int) -> dict[str, Any]:
    """Options of a launch with these arguments."""
    return {"num_warps": num_warps} | ({"launch_pdl": True} if args["DEPENDENT"] else {})


def words(w: Tensor | Int4, tile: Tile) -> Tensor:
    """The weights in words as a tile loads them: [E, N, K], or packed: bytes, or two bytes each."""
    if not isinstance(w, Int4):
        return w
    return w.packed.view(torch.int16) if tile.unpack == "split" else w.packed


def constants(tile: Tile, int4: bool) -> dict[str, Any]:
    """What a GEMM's kernel is compiled for, beside the shapes."""
    return {
        "INT4": int4,
        "UNPACK": tile.unpack if int4 else "",
        "SCALE_SUMS": tile.scale_sums and int4,
        "SWAP": tile.swap,
        "COUNTED": tile.counted,
        "GROUP_M": tile.group_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": GROUP,
        "PERSISTENT": tile.programs > 0,
        "FLATTEN": tile.flatten,
    }


def check_layer(x: LayerInputs) -> None:
    """Raise ValueError for shapes, dtypes, strides, alignment or devices that the kernels cannot take."""
    if x.x.ndim != 2 or 0 in x.x.shape:
        raise ValueError(f"x is {tuple(x.x.shape)}; allowed: [T, H], both at least 1")
    T, H = x.x.shape
    if x.ids.ndim != 2 or x.ids.shape[0] != T or x.ids.shape[1] < 1:
        raise ValueError(f"ids is {tuple(x.ids.shape)}; allowed: [{T}, top_k]")
    if isinstance(x.w1, Int4) != isinstance(x.w2, Int4):
        raise ValueError("w1 and w2 are INT4 and not; allowed: both or none")
    check = partial(check_tensor, device=x.x.device, owner="x's")
    check("x", x.x, (T, H), DTYPES)
    check("ids", x.ids, tuple(x.ids.shape), (torch.int32, torch.int64))
    check("weights", x.weights, tuple(x.ids.shape), DTYPES)
    check("out", x.out, (T, H), DTYPES)
    w2 = x.w2.packed if isinstance(x.w2, Int4) else x.w2
    if w2.ndim != 3 or 0 in w2.shape:
        raise ValueError(f"w2 is {tuple(w2.shape)}; allowed: [E, H, I], or [E, H, I // 2] packed")
    _, E, _, _, width = x.shape
    for name, w, rows, columns in (("w1", x.w1, 2 * width, H), ("w2", x.w2, H, width)):
        if rows * columns >= 2**31:
            raise ValueError(f"{name} has {rows} x {columns} values an expert; allowed: below 2^31")
        if not isinstance(w, Int4):
            check(name, w, (E, rows, columns), (x.x.dtype,))
            _check_aligned(name, w)
            continue
        if columns % GROUP:
            raise ValueError(f"{name} has rows of {columns} INT4 values; allowed: a multiple of {GROUP}")
        check(f"{name}.packed", w.packed, (E, rows, columns // 2), (torch.uint8,))
        check(f"{name}.scales", w.scales, (E, rows, columns // GROUP), (torch.bfloat16,))
        _check_aligned(f"{name}.packed", w.packed)


def _check_aligned(name: str, x: Tensor) -> None:
    if x.data_ptr() % 16:
        raise ValueError(f"{name} begins {x.data_ptr() % 16} bytes after a multiple of 16; allowed: a multiple of 16")
