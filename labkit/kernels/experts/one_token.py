"""An expert layer of one token: two matrix-vector products in fp32 instead of the tiles of tiles.py.

| launch | programs   | what it does                                                                                 |
|--------|------------|----------------------------------------------------------------------------------------------|
| gemm1  | tile, slot | SiLU(gate) · up: rows of one expert's w1 times x                                             |
| gemm2  | tile       | rows of w2 of all of the token's experts times what gemm1 left, weighted and summed          |

| choice     | hypothesis                                                                                           |
|------------|------------------------------------------------------------------------------------------------------|
| at all     | a tile of matrix instructions has one row of sixteen in use and walks along K step by step; with few |
|            | bytes to read, the steps one after the other are the time. Here a program asks for all of its        |
|            | weights at once, and no rows of slots are written for a launch that sums them                        |
| up, down   | fewer programs against more loads on their way in each                                               |
| block_k    | values along K at once; the next ones are asked for before these are worked on                       |

With dependent launch gemm2's first weights are on their way before gemm1 has ended: its experts are known since gemm1,
which waited for them, has begun. Sums are in fp32 and in an order that depends on the choice alone.

Sources: the GEMV (gemv.py), for lanes that are summed at the end; tiles.py for INT4.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.experts.choose import RowChoice
from labkit.kernels.experts.inputs import LayerInputs
from labkit.kernels.experts.int4 import GROUP, Int4
from labkit.kernels.experts.tiles import _silu_up, options_of
from labkit.kernels.experts.unpack import _from_bytes
from labkit.kernels.launch import Launch

LOAD = 16  # bytes of a row that a thread loads at once; their products are summed before they meet other threads'


@triton.jit
def _weights(w, rows, mask, k, K: tl.constexpr, BLOCK_K: tl.constexpr, INT4: tl.constexpr):
    """w[rows, k : k + BLOCK_K], [J, R, BLOCK_K], or as many nibbles in bytes. rows, mask: [J, R]."""
    PER: tl.constexpr = 2 if INT4 else 1
    at = k // PER + tl.arange(0, BLOCK_K // PER)
    inside = mask[:, :, None] & (at < K // PER)[None, None, :]
    return tl.load(w + (rows * (K // PER))[:, :, None] + at[None, None, :], mask=inside, other=0)


@triton.jit
def _lanes(
    b, scales, rows, mask, x, k, J: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    INT4: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Products of b with x[:, k : k + BLOCK_K], summed over the V words of a load: [J, R, lanes]. x: [J] pointers."""
    at = k + tl.arange(0, BLOCK_K)
    values = tl.load(x[:, None] + at[None, :], mask=(at < K)[None, :], other=0.0)
    if INT4:
        even, odd = tl.split(tl.reshape(values, [J, BLOCK_K // 2, 2]))
        low, high = _from_bytes(b, 0.0, True, x.dtype.element_ty)
        products = low.to(tl.float32) * even.to(tl.float32)[:, None, :]
        products += high.to(tl.float32) * odd.to(tl.float32)[:, None, :]
        lanes = tl.sum(tl.reshape(products, [J, R, BLOCK_K // (2 * V), V]), 3)
        group = (k + tl.arange(0, BLOCK_K // (2 * V)) * 2 * V) // GROUP
        inside = mask[:, :, None] & (group < K // GROUP)[None, None, :]
        scale = tl.load(scales + (rows * (K // GROUP))[:, :, None] + group[None, None, :], mask=inside, other=0.0)
        return lanes * scale.to(tl.float32)
    else:
        products = b.to(tl.float32) * values.to(tl.float32)[:, None, :]
        return tl.sum(tl.reshape(products, [J, R, BLOCK_K // V, V]), 3)


@triton.jit
def _sums(
    b, w, scales, rows, mask, x, J: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    INT4: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """w[rows] x, [J, R]; b: the first weights of each row, asked for before. The next ones are while these are used."""
    lanes = tl.zeros([J, R, BLOCK_K // (2 * V if INT4 else V)], tl.float32)
    for k in range(0, K, BLOCK_K):
        ahead = b
        if K > BLOCK_K:
            ahead = _weights(w, rows, mask & (k + BLOCK_K < K), k + BLOCK_K, K, BLOCK_K, INT4)
        lanes += _lanes(b, scales, rows, mask, x, k, J, R, K, BLOCK_K, INT4, GROUP, V)
        b = ahead
    return tl.sum(lanes, 2)


@triton.jit(do_not_specialize=["E"])
def _up_kernel(
    x, w, scales, ids, hidden, E, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    INT4: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: ROWS values of hidden [slots, N // 2] of one slot. w: [E, N, K], gate before up."""
    OUT: tl.constexpr = N // 2
    wait_for_inputs(DEPENDENT)
    j = tl.program_id(1)
    e = tl.load(ids + j).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, 2 * ROWS) // 2
    mask = ((n < OUT) & (e >= 0) & (e < E))[None, :]
    rows = (e * N + n + tl.arange(0, 2 * ROWS) % 2 * OUT)[None, :]  # gate and up of a value side by side
    start = x + tl.zeros([1], tl.int64)
    b = _weights(w, rows, mask, 0, K, BLOCK_K, INT4)
    sums = _sums(b, w, scales, rows, mask, start, 1, 2 * ROWS, K, BLOCK_K, INT4, GROUP, V)
    gate, up = tl.split(tl.reshape(sums, [ROWS, 2]))
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(hidden + j * OUT + out, _silu_up(gate, up).to(hidden.dtype.element_ty), mask=out < OUT)


@triton.jit(do_not_specialize=["E"])
def _down_kernel(
    hidden, w, scales, ids, weights, out, E, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, INT4: tl.constexpr, GROUP: tl.constexpr,
    V: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: ROWS values of out [N], from hidden [TOP_K, K]. w: [E, N, K]; SLOTS: a power of two."""
    j = tl.arange(0, SLOTS)
    e = tl.load(ids + j, mask=j < TOP_K, other=-1).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = ((e >= 0) & (e < E))[:, None] & (n < N)[None, :]
    rows = e[:, None] * N + n[None, :]
    b = _weights(w, rows, mask, 0, K, BLOCK_K, INT4)
    wait_for_inputs(DEPENDENT)
    start = hidden + tl.minimum(j, TOP_K - 1) * K
    sums = _sums(b, w, scales, rows, mask, start, SLOTS, ROWS, K, BLOCK_K, INT4, GROUP, V)
    share = tl.load(weights + j, mask=j < TOP_K, other=0.0).to(tl.float32)
    total = tl.sum(sums * share[:, None], 0)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


def launches(x: LayerInputs, hidden: Tensor, rows: RowChoice, dependent: bool) -> Mapping[str, Launch]:
    """Both launches for inputs of one token that have been checked. hidden: [top_k · I], of x's dtype."""
    _, E, top_k, H, width = x.shape
    shared = {"ids": x.ids, "E": E, "INT4": x.int4, "GROUP": GROUP, "DEPENDENT": dependent}
    shared |= {"V": LOAD // (1 if x.int4 else x.x.element_size())}
    up = {"x": x.x, "hidden": hidden, "N": 2 * width, "K": H, "ROWS": rows.up, "BLOCK_K": _block(rows, H)}
    down = {"hidden": hidden, "weights": x.weights, "out": x.out, "N": H, "K": width, "TOP_K": top_k}
    down |= {"SLOTS": triton.next_power_of_2(top_k), "ROWS": rows.down, "BLOCK_K": _block(rows, width)}
    grids = {"gemm1": (triton.cdiv(width, rows.up), top_k), "gemm2": (triton.cdiv(H, rows.down),)}
    made: dict[str, tuple[Any, dict[str, Any]]] = {
        "gemm1": (_up_kernel, shared | up | _stored(x.w1)),
        "gemm2": (_down_kernel, shared | down | _stored(x.w2)),
    }
    return {
        name: Launch(kernel, grids[name], args, options_of(args, rows.num_warps))
        for name, (kernel, args) in made.items()
    }


def _stored(w: Tensor | Int4) -> dict[str, Tensor]:
    return {"w": w.packed, "scales": w.scales} if isinstance(w, Int4) else {"w": w, "scales": w}


def _block(rows: RowChoice, K: int) -> int:
    """Values along K at once: as many as asked for, if a row has as many, and no more than divide it if any do."""
    most = min(rows.block_k, triton.next_power_of_2(K))
    return next((k for k in (most >> i for i in range(4)) if K % k == 0 and k >= GROUP), most)
