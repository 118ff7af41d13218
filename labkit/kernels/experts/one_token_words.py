"""An expert layer of one token with INT4 weights loaded as words of 32 bits: fewer instructions a weight.

The same two launches as one_token.py: SiLU(gate) · up of rows of one slot's expert, then rows of w2 of all of the
token's experts, weighted and summed. `expert_layer.layer` takes them where they are faster.

Hypothesis: one_token.py executes so many instructions a weight that these, and not the memory, are its time: its tokens
and its bytes come in other layouts than its products want, and go through shared memory in every step. Here nothing
does but the sums at the end. The page of study 04 judges it, model by model.

| what                    | why                                                                                    |
|-------------------------|----------------------------------------------------------------------------------------|
| words                   | a thread has eight weights of a row in a register, and loads the eight values of x     |
|                         | that belong to them by the word's own index: no layout is converted                    |
| rows unrolled           | at constant distances from one address, so that x and its address serve all of them    |
| no subtraction          | a nibble in the mantissa of 128 or of 2048 is 128 + u4 or 2048 + u4, exactly, by one   |
|                         | mask; what is too much is x's alone: x · (128 + 8) or x · (2048 + 8) summed over a     |
|                         | word, with which the sum of each row begins. Three shifts a word bring all nibbles to  |
|                         | these two places                                                                       |
| units of a whole group  | 128 values that share a scale; w2's of all slots are one line of units, so that        |
|                         | neither a number of slots nor of groups must be a power of two                         |
| w2's units in one block | where they fit: all are then on their way before the launch before has ended, and none |
|                         | is waited for after; a loop over blocks has that wait in every step                    |

Compiled for sm_90 by Triton 3.7.1 (the recorded rows: by 3.6.0), as `choose.by_words` has it, for Qwen3-30B-A3B,
Qwen3.5-35B-A3B, Qwen3-Next-80B-A3B and Mixtral-8x7B: 3.2 to 3.4 instructions a weight in the loop, with what comes
before and after it 3.7 to 4.3, no spills, at most 168 registers. gemm1 is one warp a program and has neither barriers
nor shared memory; gemm2 has four barriers, all after the loop.

Sums are in fp32, in an order that depends on the choice alone. That a sum begins at up to 2056 times x and ends near
eight times that loses up to nine of fp32's 24 bits, of which bf16 has eight.

Sources: one_token.py; the masks are those of unpack.py, to fp32.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.experts.choose import WordChoice
from labkit.kernels.experts.inputs import LayerInputs
from labkit.kernels.experts.int4 import GROUP, Int4
from labkit.kernels.experts.tiles import _silu_up, options_of
from labkit.kernels.launch import Launch

# fp32's sign and exponent of 128 and of 2048. As arguments they are one instruction with a mask, as constants two.
HEADS = {"head_128": 0x43000000, "head_2048": 0x45000000}


@triton.jit
def _rows(w, mask, R: tl.constexpr, PAIR: tl.constexpr, ROW: tl.constexpr, APART: tl.constexpr):
    """What is at w in R rows, as a tuple. PAIR 2: in rows side by side of each half, APART from one another."""
    found = ()
    for r in tl.static_range(R):
        found += (tl.load(w + ((r // PAIR) * ROW + (r % PAIR) * APART), mask=mask, other=0),)
    return found


@triton.jit
def _units(
    w, scales, ids, u, n, E, N: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr, PAIR: tl.constexpr
):
    """Words [U, 4, 4] and scales [U] of units u, of R rows from n on: two tuples."""
    GROUPS: tl.constexpr = K // 128
    mask = u < SLOTS * GROUPS
    e = tl.load(ids + u // GROUPS, mask=mask, other=-1).to(tl.int64)
    mask = mask & (e >= 0) & (e < E)
    row = e * N + n
    group = u % GROUPS
    at = tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    words = (w + row * (K // 8) + group * 16)[:, None, None] + at
    packed = _rows(words, mask[:, None, None], R, PAIR, K // 8, N // 2 * (K // 8))
    return packed, _rows(scales + row * GROUPS + group, mask, R, PAIR, GROUPS, N // 2 * GROUPS)


@triton.jit
def _values(x, u, UNITS: tl.constexpr, FOUR: tl.constexpr):
    """x of the eight weights of each word of units u, a tuple in fp32. FOUR: x is words of four bf16 values."""
    word = u[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    mask = (u < UNITS)[:, None, None]
    found = ()
    if FOUR:
        for i in tl.static_range(2):
            four = tl.load(x + word * 2 + i, mask=mask, other=0)
            for half in tl.static_range(2):
                two = (four >> (32 * half)).to(tl.uint32)
                found += ((two << 16).to(tl.float32, bitcast=True),)
                found += ((two & 0xFFFF0000).to(tl.float32, bitcast=True),)
    else:
        for i in tl.static_range(8):
            found += (tl.load(x + word * 8 + i, mask=mask, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _too_much(x):
    """Of a word's products: minus x times what its weights are more than u4 - 8."""
    even = (x[0] + x[2]) + (x[4] + x[6])
    odd = (x[1] + x[3]) + (x[5] + x[7])
    return even * -136.0 - odd * 2056.0


@triton.jit
def _add(total, word, x, MASK: tl.constexpr, head):
    """total + x (u4 + 128 or 2048): of the nibble of a word under the mask, which ends where the head's ones are."""
    return tl.fma(((word & MASK) | head).to(tl.float32, bitcast=True), x, total)


@triton.jit
def _product(word, x, too_much, head_128, head_2048):
    """Eight weights u4 - 8 times x. Nibbles are brought to bits 16 to 19, of even k, and 12 to 15, of odd k."""
    word = word.to(tl.uint32, bitcast=True)
    left, right, turned = word << 8, word >> 8, (word << 16) | (word >> 16)
    total = _add(too_much, turned, x[0], 0xF0000, head_128)
    total = _add(total, left, x[1], 0xF000, head_2048)
    total = _add(total, left, x[2], 0xF0000, head_128)
    total = _add(total, word, x[3], 0xF000, head_2048)
    total = _add(total, word, x[4], 0xF0000, head_128)
    total = _add(total, right, x[5], 0xF000, head_2048)
    total = _add(total, right, x[6], 0xF0000, head_128)
    return _add(total, turned, x[7], 0xF000, head_2048)


@triton.jit
def _block(sums, packed, scales, share, x, head_128, head_2048, R: tl.constexpr):
    """sums, a tuple of R [U, 4], and the products of a block of units. share: [U], or a number for all."""
    too_much = _too_much(x)
    found = ()
    for r in tl.static_range(R):
        part = tl.sum(_product(packed[r], x, too_much, head_128, head_2048), 2)
        scale = scales[r].to(tl.float32) * share
        found += (sums[r] + part * scale[:, None],)
    return found


@triton.jit
def _stacked(rows, R: tl.constexpr):
    """A tuple of R [U, 4] as one tensor, [U, 4, …] with R values in the order of the tuple."""
    if R == 1:
        return rows[0]
    else:
        return tl.join(_stacked(rows[0::2], R // 2), _stacked(rows[1::2], R // 2))


@triton.jit
def _sums(
    x, w, scales, ids, shares, n, head_128, head_2048, E, N: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    R: tl.constexpr, PAIR: tl.constexpr, BLOCK: tl.constexpr, FOUR: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Σ_j shares[j] · w[ids[j]] x[j] of R rows from n on, [R]; x: [SLOTS, K]; PAIR 2: shares are one.

    Weights are asked for a block ahead of those in use, the first ones before the launch before has ended (WAIT).
    """
    UNITS: tl.constexpr = SLOTS * (K // 128)
    u = tl.arange(0, BLOCK)
    packed, scale = _units(w, scales, ids, u, n, E, N, K, SLOTS, R, PAIR)
    wait_for_inputs(WAIT)
    sums = ()
    for _ in tl.static_range(R):
        sums += (tl.zeros([BLOCK, 4], tl.float32),)
    for first in range(0, UNITS, BLOCK):
        u = first + tl.arange(0, BLOCK)
        ahead, scale_ahead = packed, scale
        if UNITS > BLOCK:
            ahead, scale_ahead = _units(w, scales, ids, u + BLOCK, n, E, N, K, SLOTS, R, PAIR)
        share = 1.0
        if PAIR == 1:
            share = tl.load(shares + u // (K // 128), mask=u < UNITS, other=0.0).to(tl.float32)
        values = _values(x, u, UNITS, FOUR)
        sums = _block(sums, packed, scale, share, values, head_128, head_2048, R)
        packed, scale = ahead, scale_ahead
    return tl.sum(tl.reshape(_stacked(sums, R), [BLOCK * 4, R]), 0)


@triton.jit(do_not_specialize=["E", "head_128", "head_2048"])
def _up_kernel(
    x, w, scales, ids, hidden, head_128, head_2048, E, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, FOUR: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: ROWS values of hidden [slots, N // 2] of one slot. w: [E, N, K // 8] words, gate before up."""
    wait_for_inputs(DEPENDENT)
    j = tl.program_id(1)
    n = tl.program_id(0) * ROWS
    sums = _sums(
        x, w, scales, ids + j, x, n, head_128.to(tl.uint32), head_2048.to(tl.uint32), E, N, K, 1, 2 * ROWS, 2, BLOCK,
        FOUR, False,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(sums, [ROWS, 2]))
    out = hidden + j * (N // 2) + n + tl.arange(0, ROWS)
    tl.store(out, _silu_up(gate, up).to(hidden.dtype.element_ty))


@triton.jit(do_not_specialize=["E", "head_128", "head_2048"])
def _down_kernel(
    hidden, w, scales, ids, weights, out, head_128, head_2048, E, N: tl.constexpr, K: tl.constexpr,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FOUR: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: ROWS values of out [N], from hidden [TOP_K, K]. w: [E, N, K // 8] words."""
    n = tl.program_id(0) * ROWS
    sums = _sums(
        hidden, w, scales, ids, weights, n, head_128.to(tl.uint32), head_2048.to(tl.uint32), E, N, K, TOP_K, ROWS, 1,
        BLOCK, FOUR, DEPENDENT,
    )  # fmt: skip
    tl.store(out + n + tl.arange(0, ROWS), sums.to(out.dtype.element_ty))


def launches(x: LayerInputs, hidden: Tensor, rows: WordChoice, dependent: bool) -> Mapping[str, Launch]:
    """Both launches for inputs of one token with INT4 weights that have been checked. hidden: [top_k · I], as x."""
    _, E, top_k, H, width = x.shape
    shared = {"ids": x.ids, "E": E, "DEPENDENT": dependent, **HEADS}
    up = {**_values_of("x", x.x), "hidden": hidden, "N": 2 * width, "K": H, "ROWS": rows.up}
    down = {**_values_of("hidden", hidden), "weights": x.weights, "out": x.out, "N": H, "K": width}
    down |= {"TOP_K": top_k, "ROWS": rows.down}
    made = {
        "gemm1": (_up_kernel, (width // rows.up, top_k), _blocks(x.w1, H, rows.block_k) | shared | up),
        "gemm2": (_down_kernel, (H // rows.down,), _blocks(x.w2, top_k * width, rows.down_k) | shared | down),
    }
    return {
        name: Launch(kernel, grid, args, options_of(args, max(1, min(rows.num_warps, args["BLOCK"] // 8))))
        for name, (kernel, grid, args) in made.items()
    }


def _values_of(name: str, x: Tensor) -> dict[str, Any]:
    """x as the kernels take it: bf16 as words of four values, if it begins where such words may."""
    four = x.dtype == torch.bfloat16 and x.data_ptr() % 8 == 0
    return {name: x.view(torch.int64) if four else x, "FOUR": four}


def _blocks(w: Int4, values: int, most: int) -> dict[str, Any]:
    """w as words, and the units of a block: of at most so many values, and no more than hold all that there are."""
    block = min(most // GROUP, triton.next_power_of_2(values // GROUP))
    return {"w": w.packed.view(torch.int32), "scales": w.scales, "BLOCK": block}
