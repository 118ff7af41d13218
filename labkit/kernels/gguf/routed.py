"""Routed experts of many tokens in Triton: router, experts, and one ordered weighted sum.

| variant           | hypothesis                                                                                   |
|-------------------|----------------------------------------------------------------------------------------------|
| `per_token`       | a GEMV an expert and token: an expert's bytes are read again for every token routed to it    |
| `grouped_rowcopy` | an expert is read once for all its tokens, but rows are gathered and scattered, a copy a row |
| `grouped_indexed` | slots are sorted once, rows are found inside the kernel: four launches, whatever the tokens  |
| its `matrix`      | matrix instructions: up to 16 tokens an expert, arithmetic does not grow with them           |

A slot is (token, k), its number token · top_k + k. All variants leave partials that are not weighted, one a slot, and
`weighted_sum` adds them in the order k = 0, 1, …, the shared expert last: so the order of a sum does not depend on
which expert came first, and results have the same bits in every batch, for every order of the experts, and however the
experts were brought to the GPU. Multiply-add and matrix instructions are two families, as in `kernels.py`.

Experts are found by a table: `slots[e]` is where expert e lies in the store, or -1 if it is not there now; then none of
its slots is computed, and another launch with another table does the rest (`slots.py`).

The plan (buckets of tokens an expert, partials, one ordered reduce): SharpInference issue 121. Tiles of one expert, as
of vLLM's `moe_align_block_size`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_device, check_tensor
from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.gguf import products
from labkit.kernels.gguf.choose import Choice, TileChoice, check_choice, check_tile, narrow_rule
from labkit.kernels.gguf.experts import Experts
from labkit.kernels.gguf.formats import GROUP, ROWS, Packed
from labkit.kernels.gguf.products import _add, _add_tiles, _no_products, _of_block, _options, magic_of
from labkit.kernels.gguf.shares import _blocks, _first_tiles, _gated, _no_sums, _rows_of, _units
from labkit.kernels.gguf.unpack import MAGIC, _tiles
from labkit.kernels.launch import Launch
from labkit.kernels.target import has_dependent_launch

CHUNK = 1024  # slots that a program of the sort reads at once
SUM_BLOCK = 512  # values of a token that a program of the weighted sum adds


@triton.jit
def _top_k_kernel(logits, ids, weights, E, stride, TOP_K: tl.constexpr, BINS: tl.constexpr, KS: tl.constexpr):
    """One program a token: its top_k largest logits, the largest first, and the softmax of these."""
    token = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    ks = tl.arange(0, KS)
    z = tl.load(logits + token * stride + bins, mask=bins < E, other=float("-inf")).to(tl.float32)
    largest = tl.max(z, 0)
    chosen = tl.zeros((KS,), tl.int32)
    shares = tl.zeros((KS,), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(z, 0)  # of equal ones the first
        share = tl.exp(tl.max(z, 0) - largest)
        chosen = tl.where(ks == k, best, chosen)
        shares = tl.where(ks == k, share, shares)
        z = tl.where(bins == best, float("-inf"), z)
    at = token * TOP_K + ks
    tl.store(ids + at, chosen, mask=ks < TOP_K)
    tl.store(weights + at, shares / tl.sum(shares, 0), mask=ks < TOP_K)


@triton.jit
def _sort_kernel(
    ids, order, tiles, S, E, most, TOKENS: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program an expert: its slots to their places, its tiles to theirs. Each counts all slots for itself."""
    wait_for_inputs(DEPENDENT)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, S, CHUNK):
        i = first + tl.arange(0, CHUNK)
        e = tl.load(ids + i, mask=i < S, other=-1).to(tl.int32)
        counts += tl.histogram(tl.maximum(e, 0), BINS, mask=(e >= 0) & (e < E))
    own = (counts + TOKENS - 1) // TOKENS
    start = tl.sum(tl.where(bins < expert, counts, 0), 0)
    tile = tl.sum(tl.where(bins < expert, own, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)

    before = 0
    for first in range(0, S, CHUNK):
        i = first + tl.arange(0, CHUNK)
        mine = (tl.load(ids + i, mask=i < S, other=-1).to(tl.int32) == expert).to(tl.int32)
        tl.store(order + start + before + tl.cumsum(mine, 0) - 1, i, mask=mine == 1)
        before += tl.sum(mine, 0)

    for first in range(0, count, TOKENS):
        at = tiles + (tile + first // TOKENS) * 3
        tl.store(at, expert)
        tl.store(at + 1, start + first)
        tl.store(at + 2, tl.minimum(count - first, TOKENS))
    if expert == 0:  # beyond the last tile
        live = tl.sum(own, 0)
        for first in range(0, most, CHUNK):
            i = first + tl.arange(0, CHUNK)
            tl.store(tiles + i * 3, tl.zeros((CHUNK,), tl.int32) - 1, mask=(i >= live) & (i < most))


@triton.jit
def _expert(arrays, strides, slot):
    """The arrays of the matrix of the expert in a slot."""
    words, high, scales, d = arrays
    words_stride, high_stride, scales_stride, d_stride = strides
    return words + slot * words_stride, high + slot * high_stride, scales + slot * scales_stride, d + slot * d_stride


@triton.jit
def _grouped_multiply_add_kernel(
    x, y, order, tiles, slots, words, high, scales, d, up_words, up_high, up_scales, up_d,
    words_stride, high_stride, scales_stride, d_stride, rows, x_stride, y_stride, magic, slots_a_row,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One program: BLOCKS blocks of 8 rows of one expert and a tile of its slots; the sums of `kernels.py`."""
    at = tiles + tl.program_id(1) * 3
    expert = tl.load(at)
    slot = tl.load(slots + tl.maximum(expert, 0)).to(tl.int64)
    if (expert < 0) | (slot < 0):
        return
    first = tl.load(at + 1)
    count = tl.load(at + 2)
    first_block = tl.program_id(0) * BLOCKS
    last_block = (rows - 1) // 8
    strides = (words_stride, high_stride, scales_stride, d_stride)
    W = _expert((words, high, scales, d), strides, slot)
    up = _expert((up_words, up_high, up_scales, up_d), strides, slot)
    MATRICES: tl.constexpr = 2 if GATED else 1
    MASKED: tl.constexpr = GROUPS % TILE != 0
    units = tl.arange(0, TILE * 8)
    lanes = units % 8

    members, x_rows = (), ()
    for n in tl.static_range(TOKENS):
        member = tl.load(order + first + tl.minimum(n, count - 1))
        members = members + (member.to(tl.int64),)
        x_rows = x_rows + (x + (member // slots_a_row).to(tl.int64) * x_stride,)
    sums = _no_products(MATRICES * BLOCKS * TOKENS, TILE, PLANES)
    for t in range(tl.cdiv(GROUPS, TILE)):
        groups = t * TILE + units // 8
        loaded = _tiles(W, up, first_block, last_block, groups, lanes, MATRICES, BLOCKS, GROUPS, MASKED, FORMAT, PLANES)
        sums = _add(sums, loaded, x_rows, groups, magic, GROUPS, MASKED, FORMAT, 0)

    for b in tl.static_range(BLOCKS):
        row = (first_block + b) * 8 + tl.arange(0, 8)
        for n in tl.static_range(TOKENS):
            total = _of_block(sums, b, n, TILE, TOKENS, GATED)
            y_at = y + members[n] * y_stride + row
            tl.store(y_at, total.to(y.dtype.element_ty), mask=(row < rows) & (n < count))


@triton.jit
def _grouped_tensor_core_kernel(
    x, y, order, tiles, slots, words, high, scales, d, up_words, up_high, up_scales, up_d,
    words_stride, high_stride, scales_stride, d_stride, rows, x_stride, y_stride, magic, slots_a_row,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr, WARPS: tl.constexpr, BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr, GATED: tl.constexpr, DEPTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The same by matrix instructions, slots padded to multiples of 8.

    Gate and up must wait for the sort; down, whose launch before is gate and up, then knows its experts at once, and
    asks for weights before it waits.
    """
    if GATED:
        wait_for_inputs(DEPENDENT)
    at = tiles + tl.program_id(1) * 3
    expert = tl.load(at)
    slot = tl.load(slots + tl.maximum(expert, 0)).to(tl.int64)
    if (expert < 0) | (slot < 0):
        return
    first = tl.load(at + 1)
    count = tl.load(at + 2)
    strip = tl.program_id(0)
    strides = (words_stride, high_stride, scales_stride, d_stride)
    W = _expert((words, high, scales, d), strides, slot)
    up = _expert((up_words, up_high, up_scales, up_d), strides, slot)
    group, lane = _units(WARPS)
    TILE: tl.constexpr = WARPS * 4
    TILES: tl.constexpr = (GROUPS + TILE - 1) // TILE
    MATRICES: tl.constexpr = 2 if GATED else 1
    EIGHTS: tl.constexpr = TOKENS // 8
    PAIRS: tl.constexpr = MATRICES * BLOCKS // 2
    x_rows = ()
    for n in tl.static_range(EIGHTS):
        member = tl.load(order + first + tl.minimum(8 * n + lane, count - 1))
        x_rows = x_rows + (x + (member // slots_a_row).to(tl.int64) * x_stride,)
    firsts, arrays = _blocks(
        W, up, tl.num_programs(0), (rows + 7) // 8, 0, MATRICES, BLOCKS, GROUPS, FORMAT, PLANES
    )  # fmt: skip
    start, end = strip * TILES, (strip + 1) * TILES
    asked = _first_tiles(arrays, start, end, strip, group, lane, DEPTH, TILE, GROUPS, FORMAT, PLANES)
    if not GATED:
        wait_for_inputs(DEPENDENT)
    sums = _no_sums(PAIRS * EIGHTS, WARPS)
    sums, asked = _add_tiles(
        sums, asked, arrays, x_rows, start, end, end, strip, group, lane, magic, WARPS, GROUPS, FORMAT, PLANES
    )
    for m in tl.static_range(PAIRS):
        for n in tl.static_range(EIGHTS):
            total = tl.sum(sums[m * EIGHTS + n], 0)
            if GATED:
                row, total = _gated(total, firsts[m] + strip)
            else:
                row = _rows_of(firsts[2 * m] + strip, firsts[2 * m + 1] + strip)
            place = 8 * n + tl.arange(0, 8)
            to = tl.load(order + first + tl.minimum(place, count - 1)).to(tl.int64)
            y_at = y + to[None, :] * y_stride + row[:, None]
            tl.store(y_at, total.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (place < count)[None, :])


@triton.jit
def _weighted_sum_kernel(
    partials, weights, shared, gate, y, hidden, gate_stride, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK values of one token."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        part = tl.load(partials + (token * TOP_K + k) * hidden + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weights + token * TOP_K + k)
        total = tl.fma(part, tl.broadcast_to(weight, total.shape), total)
    if SHARED:
        part = tl.load(shared + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
        weight = 1.0 / (1.0 + tl.exp(-tl.load(gate + token * gate_stride).to(tl.float32)))
        total = tl.fma(part, tl.broadcast_to(weight, total.shape), total)
    tl.store(y + token * hidden + column, total.to(y.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Work:
    """What the variants read and write, for N tokens; allocated once, so that launches can be captured in a graph.

    ids: [N, top_k] int32, the experts of a token, all different, 0 to the number of experts - 1: what is there is not
    checked, since that would wait for the GPU; weights: [N, top_k] fp32. x: [N, hidden], y: [N, hidden]. mid: [N ·
    top_k, width] and partials: [N · top_k, hidden], a row a slot. x, mid, partials and y: bf16, fp16 or fp32 each.
    """

    ids: Tensor
    weights: Tensor
    x: Tensor
    mid: Tensor
    partials: Tensor
    y: Tensor

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]

    @classmethod
    def of(cls, x: Tensor, ids: Tensor, weights: Tensor, width: int) -> "Work":
        """Its buffers in x's dtype, not filled."""
        slots = ids.numel()
        mid, partials = x.new_empty((slots, width)), x.new_empty((slots, x.shape[1]))
        return cls(ids, weights, x, mid, partials, torch.empty_like(x))


def router(
    W: Packed, x: Tensor, logits: Tensor, ids: Tensor, weights: Tensor, shared_gate: bool = False
) -> list[Launch]:
    """The top_k experts of each token, and the softmax of their logits: two launches, the same bits in every batch.

    W: [E, hidden], or with shared_gate [E + 1, hidden], whose last row is the gate of a shared expert. x: [N, hidden].
    logits: [N, rows of W], fp32; ids: [N, top_k] int32; weights: [N, top_k] fp32; these are written. Of equal logits
    the first expert is taken. (Softmax over all, then over the chosen, is the softmax of the chosen, as Qwen's
    `norm_topk_prob` has it.) ValueError for other shapes or dtypes, and for fewer experts than top_k.
    """
    N, top_k, experts = len(x), ids.shape[-1], W.rows - shared_gate
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; allowed: 1 to {experts}, the experts")
    check_tensor("logits", logits, (N, W.rows), (torch.float32,), x.device, "x's")
    check_tensor("ids", ids, (N, top_k), (torch.int32,), x.device, "x's")
    check_tensor("weights", weights, (N, top_k), (torch.float32,), x.device, "x's")
    args = {"logits": logits, "ids": ids, "weights": weights, "E": experts, "stride": W.rows, "TOP_K": top_k}
    args |= {"BINS": triton.next_power_of_2(experts), "KS": triton.next_power_of_2(top_k)}
    return [products.weight_stationary(W, x, logits), Launch(_top_k_kernel, (N,), args, {"num_warps": 4})]


def per_token(experts: Experts, resident: Mapping[int, int], ids: Sequence[Sequence[int]], work: Work) -> list[Launch]:
    """Partials of all slots whose expert is resident, three matrices a slot, two launches each.

    resident: expert -> where it lies in `experts`. ids: `work.ids`, as the host knows them. Errors as `kernels`'.
    """
    check_work(experts, work)
    found = []
    for token, chosen in enumerate(ids):
        for k, expert in enumerate(chosen):
            if expert in resident:
                at = token * work.top_k + k
                x, mid, part = (one[i : i + 1] for one, i in ((work.x, token), (work.mid, at), (work.partials, at)))
                found += one_expert(experts, resident[expert], x, mid, part, 1)
    return found


def one_expert(experts: Experts, slot: int, x: Tensor, mid: Tensor, y: Tensor, tokens: int) -> list[Launch]:
    """The expert in a slot on rows x: gate and up into mid, then down into y, by multiply-add.

    x, y: [n, hidden], mid: [n, width], as `kernels` take them; tokens: rows that share a tile at most.
    """
    gate, up, down = (experts.matrix(role, slot) for role in ("gate", "up", "down"))
    return [
        products.weight_stationary(gate, x, mid, narrow_rule(tokens, gated=True), up),
        products.weight_stationary(down, mid, y, narrow_rule(tokens)),
    ]


def grouped_rowcopy(
    experts: Experts, resident: Mapping[int, int], ids: Sequence[Sequence[int]], work: Work
) -> list[Callable[[], Any]]:
    """The same partials, each resident expert once for all its slots; a copy a row before and a copy a row after.

    Arguments and errors as `per_token`.
    """
    check_work(experts, work)
    members: dict[int, list[int]] = {}
    for slot, expert in enumerate(expert for chosen in ids for expert in chosen):
        if expert in resident:
            members.setdefault(expert, []).append(slot)
    most = max(map(len, members.values()), default=0)
    x, mid, y = (one.new_empty((most, one.shape[1])) for one in (work.x, work.mid, work.partials))
    found: list[Callable[[], Any]] = []
    for expert, slots in members.items():
        n = len(slots)
        found += [_copy(x[i], work.x[slot // work.top_k]) for i, slot in enumerate(slots)]
        found += one_expert(experts, resident[expert], x[:n], mid[:n], y[:n], n)
        found += [_copy(work.partials[slot], y[i]) for i, slot in enumerate(slots)]
    return found


def _copy(to: Tensor, source: Tensor) -> Callable[[], Any]:
    return lambda: to.copy_(source)


@dataclass(frozen=True)
class Sorted:
    """Slots by expert. order: [slots] int32, ascending within an expert; tiles: [most, 3] int32: expert (-1: no tile),
    first place in `order`, places. launch: sorts by what is in `ids` then."""

    order: Tensor
    tiles: Tensor
    launch: Launch


def most_tiles(slots: int, experts: int, tokens: int) -> int:
    """Tiles of at most `tokens` slots of one expert, however the slots are routed."""
    used = min(slots, experts)
    return used + (slots - used) // tokens


def sort(ids: Tensor, experts: int, tokens: int) -> Sorted:
    """Slots sorted by expert, cut in tiles of at most `tokens`; one launch, no host synchronisation.

    ids: [N, top_k] int32, contiguous; an id that is no expert gets no tile. ValueError for another tensor.
    """
    check_tensor("ids", ids, tuple(ids.shape), (torch.int32,), ids.device, "its")
    slots = ids.numel()
    most = most_tiles(slots, experts, tokens)
    order, tiles = ids.new_empty(slots), ids.new_empty((most, 3))
    args = {"ids": ids, "order": order, "tiles": tiles, "S": slots, "E": experts, "most": most}
    args |= {"TOKENS": tokens, "CHUNK": CHUNK, "BINS": triton.next_power_of_2(experts)}
    args |= {"DEPENDENT": has_dependent_launch(ids.device)}
    return Sorted(order, tiles, Launch(_sort_kernel, (experts,), args, _options(Choice(), args["DEPENDENT"])))


def rule_of(tokens: int, experts: int, top_k: int) -> Choice:
    """`choose.narrow_rule` for the slots that an expert has on average under uniform routing."""
    return narrow_rule(each(tokens, experts, top_k), gated=True)


def matrix_rule_of(tokens: int, experts: int, top_k: int) -> TileChoice:
    """Tiles for about as many slots as an expert has; of few, twice as many, so that few experts are read twice.

    Always with one warp, so that its bits are the same for every number of tokens: experts are narrow, and many, and
    there is nothing to wait for other warps for.
    """
    slots = each(tokens, experts, top_k)
    tokens_a_tile = 8 if slots <= 4 else 16 if slots <= 16 else 32
    return TileChoice(2 if tokens_a_tile == 8 else 4, tokens_a_tile, 1, ahead=2, dependent=True)


def each(tokens: int, experts: int, top_k: int) -> int:
    """Slots of an expert, on average and rounded up."""
    return max(1, -(-tokens * top_k // experts))


def grouped_indexed(
    experts: Experts, slots: Tensor, work: Work, choice: Choice | TileChoice | None = None, matrix: bool = False,
    order: Sorted | None = None,
) -> list[Launch]:  # fmt: skip
    """The same partials in three launches: sort, gate and up, down.

    slots: [number of routed experts] int32, where each lies in `experts`, or -1: its slots are left as they are.
    matrix: by matrix instructions. choice: a `Choice`, with matrix a `TileChoice`; by default of `rule_of` and
    `matrix_rule_of`, with the bits of its family. order: of `sort` with `choice.tokens`; the first launch is then left
    out, as for a second table of the same routing. ValueError for anything else.
    """
    choice = choice or (matrix_rule_of if matrix else rule_of)(len(work.x), len(slots), work.top_k)
    if isinstance(choice, TileChoice) != matrix:
        raise ValueError(f"choice is {choice}; allowed: a {'TileChoice' if matrix else 'Choice'}")
    (check_tile if matrix else check_choice)(choice)
    check_work(experts, work)
    check_tensor("slots", slots, (len(slots),), (torch.int32,), work.x.device, "x's")
    check_tiles(most_tiles(work.ids.numel(), len(slots), choice.tokens))
    made = order or sort(work.ids, len(slots), choice.tokens)
    launches = [
        _grouped(experts, roles, slots, made, x, y, per_row, choice)
        for roles, x, y, per_row in (
            (("gate", "up"), work.x, work.mid, work.top_k),
            (("down",), work.mid, work.partials, 1),
        )
    ]
    return launches if order else [made.launch, *launches]


def _grouped(
    experts: Experts, roles: Sequence[str], slots: Tensor, made: Sorted, x: Tensor, y: Tensor, slots_a_row: int,
    choice: Choice | TileChoice,
) -> Launch:  # fmt: skip
    first, last = (experts.matrix(role, 0) for role in (roles[0], roles[-1]))
    arrays = dict.fromkeys(("words", "high", "scales", "d"), first.words) | first.arrays
    args = {"x": x, "y": y, "order": made.order, "tiles": made.tiles, "slots": slots} | arrays
    args |= {f"up_{name}": last.arrays.get(name, last.words) for name in arrays}
    args |= {f"{name}_stride": experts.stride(array) for name, array in arrays.items()}
    args |= {"rows": first.rows, "x_stride": x.stride(0), "y_stride": y.stride(0), "magic": MAGIC}
    args |= {"slots_a_row": slots_a_row, "GROUPS": first.columns // GROUP, "FORMAT": first.format.name}
    blocks = choice.blocks
    if isinstance(choice, TileChoice):
        kernel, blocks = _grouped_tensor_core_kernel, blocks // len(roles)
        args |= {"WARPS": choice.num_warps, "DEPTH": max(0, choice.ahead - 1)}
        args |= {"DEPENDENT": choice.dependent and has_dependent_launch(x.device)}
    else:
        kernel = _grouped_multiply_add_kernel
        args |= {"TILE": choice.groups, "magic": magic_of(first)}
    args |= {"PLANES": first.words.shape[2], "BLOCKS": blocks, "TOKENS": choice.tokens}
    grid = (triton.cdiv(first.rows, ROWS * blocks), len(made.tiles))
    return Launch(kernel, grid, args | {"GATED": len(roles) > 1}, _options(choice, args.get("DEPENDENT", False)))


def weighted_sum(work: Work, shared: Tensor | None = None, gate: Tensor | None = None) -> Launch:
    """y[n] = Σ_k weights[n, k] · partials[n, k], in this order, then + sigmoid(gate[n]) · shared[n].

    shared: [N, hidden] bf16, fp16 or fp32, of the shared expert, and gate: [N] its logit (a column of the router's
    logits, say); both or neither. ValueError otherwise.
    """
    if (shared is None) != (gate is None):
        raise ValueError("only one of shared and gate is given; allowed: both or neither")
    if shared is not None and gate is not None:
        check_tensor("shared", shared, tuple(work.x.shape), products.DTYPES, work.x.device, "x's")
        if gate.shape != (len(work.x),):
            raise ValueError(f"gate is {tuple(gate.shape)}; allowed: ({len(work.x)},)")
        check_device("gate", gate, work.x.device, "x's")
    N, hidden = work.x.shape
    args = {"partials": work.partials, "weights": work.weights, "y": work.y, "hidden": hidden}
    args |= {"shared": work.y if shared is None else shared, "gate": work.weights if gate is None else gate}
    args |= {"gate_stride": 0 if gate is None else gate.stride(0), "TOP_K": work.top_k, "SHARED": shared is not None}
    grid = (N, triton.cdiv(hidden, SUM_BLOCK))
    args |= {"BLOCK": SUM_BLOCK, "DEPENDENT": has_dependent_launch(work.x.device)}
    return Launch(_weighted_sum_kernel, grid, args, _options(Choice(), args["DEPENDENT"]))


def check_work(experts: Experts, work: Work) -> None:
    """Raise ValueError for buffers that do not fit the experts and each other."""
    device, owner = experts.store.device, "the experts'"
    N = len(work.x)
    if work.ids.ndim != 2 or len(work.ids) != N or not work.ids.numel():
        raise ValueError(f"ids is {tuple(work.ids.shape)}; allowed: [{N}, top_k], top_k at least 1")
    shapes = {
        "ids": (work.ids, (N, work.top_k), (torch.int32,)),
        "weights": (work.weights, (N, work.top_k), (torch.float32,)),
        "x": (work.x, (N, experts.hidden), products.DTYPES),
        "mid": (work.mid, (N * work.top_k, experts.width), products.DTYPES),
        "partials": (work.partials, (N * work.top_k, experts.hidden), products.DTYPES),
        "y": (work.y, (N, experts.hidden), products.DTYPES),
    }
    for name, (tensor, shape, dtypes) in shapes.items():
        check_tensor(name, tensor, shape, dtypes, device, owner)


def check_tiles(tiles: int) -> None:
    """Raise ValueError for more tiles than a grid holds."""
    if tiles > products.MOST_PROGRAMS:
        raise ValueError(f"the slots may need {tiles} tiles; allowed: at most {products.MOST_PROGRAMS}, along a grid")
