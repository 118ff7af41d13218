"""Decode of the gated delta rule in Triton, one token a sequence, state updated in place in a pool.

Variants, and what each one tests:

| launcher                     | state          | hypothesis |
|------------------------------|----------------|------------|
| decode_k_first               | [.., HV, K, V] | a tile of BV columns has K rows of BV contiguous values each: narrow |
|                              |                | tiles waste sectors and lines, wide tiles do not; the sums over K |
|                              |                | stay mostly inside one thread |
| decode_v_first               | [.., HV, V, K] | a tile of BV rows is one contiguous run of BV·K values: nothing is |
|                              |                | wasted at any tile, but the sums over K cross the lanes of a warp |
| decode_v_first, folded=True  | [.., HV, V, K] | o = α (S q) + (k·q) u needs only the old state, so both sums run in |
|                              |                | one pass and the updated state is never read again |

Both layouts run the same arithmetic in fp32 and take the same arguments; they differ in nothing but the strides of the
state and the axis of the sums, so that a difference in time is one of layout. The grid's fastest axis is the tile of V:
programs that share cache lines run at the same time. Source of the change: SGLang pull request 20283.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_contiguous, check_device, check_one_of, check_shape
from labkit.kernels.launch import Launch

STATE_DTYPES = (torch.float32, torch.bfloat16)


@triton.jit
def _load(pointers, mask, EVEN: tl.constexpr):
    """A tile in fp32; the mask is left out where the tile divides the dimensions, so that it cannot cost anything."""
    if EVEN:
        return tl.load(pointers).to(tl.float32)
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointers, value, mask, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointers, value.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _decay_and_beta(a, b, A_log, dt_bias, n_hv, hv):
    """α and β of one value head, in fp32 (rounding β to bf16 costs an error of 2e-3 in the state)."""
    x = tl.load(a + n_hv).to(tl.float32) + tl.load(dt_bias + hv).to(tl.float32)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    alpha = tl.exp(-tl.exp(tl.load(A_log + hv).to(tl.float32)) * softplus)
    return alpha, tl.sigmoid(tl.load(b + n_hv).to(tl.float32))


@triton.jit
def _normalised(pointers, mask, EVEN: tl.constexpr):
    x = _load(pointers, mask, EVEN)
    return x / tl.sqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _decode_kernel(
    state, indices, q, k, v, a, b, A_log, dt_bias, out, scale, H, HV, state_slot_stride,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one sequence, all K channels."""
    n_hv = tl.program_id(1)
    n = n_hv // HV
    hv = n_hv % HV
    h = hv // (HV // H)
    EVEN_K: tl.constexpr = BK == K
    EVEN_V: tl.constexpr = V % BV == 0
    EVEN: tl.constexpr = EVEN_K and EVEN_V
    ks = tl.arange(0, BK)
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    out_pointers = out + n_hv * V + vs
    slot = tl.load(indices + n).to(tl.int64)
    if slot < 0:  # padding: the pool is untouched, the output is zero
        _store(out_pointers, tl.zeros((BV,), tl.float32), vs < V, EVEN_V)
        return

    base = state + slot * state_slot_stride + hv * (K * V)
    if V_FIRST:  # tile [BV, BK]
        tile = base + vs[:, None] * K + ks[None, :]
        mask = (vs[:, None] < V) & (ks[None, :] < K)
        K_AXIS: tl.constexpr = 1
    else:  # tile [BK, BV]
        tile = base + ks[:, None] * V + vs[None, :]
        mask = (ks[:, None] < K) & (vs[None, :] < V)
        K_AXIS: tl.constexpr = 0
    V_AXIS: tl.constexpr = 1 - K_AXIS

    S = _load(tile, mask, EVEN)  # first, so that everything below hides its latency
    alpha, beta = _decay_and_beta(a, b, A_log, dt_bias, n_hv, hv)
    query = _normalised(q + (n * H + h) * K + ks, ks < K, EVEN_K) * scale
    key = _normalised(k + (n * H + h) * K + ks, ks < K, EVEN_K)
    value = _load(v + n_hv * V + vs, vs < V, EVEN_V)

    key_tile = tl.expand_dims(key, V_AXIS)
    query_tile = tl.expand_dims(query, V_AXIS)
    if FOLDED:
        u = beta * (value - alpha * tl.sum(S * key_tile, K_AXIS))
        o = alpha * tl.sum(S * query_tile, K_AXIS) + tl.sum(key * query, 0) * u
        S = S * alpha + tl.expand_dims(u, K_AXIS) * key_tile
    else:
        S = S * alpha
        u = beta * (value - tl.sum(S * key_tile, K_AXIS))
        S = S + tl.expand_dims(u, K_AXIS) * key_tile
        o = tl.sum(S * query_tile, K_AXIS)
    _store(out_pointers, o, vs < V, EVEN_V)
    _store(tile, S, mask, EVEN)


@dataclass(frozen=True)
class DecodeInputs:
    """What one decode step reads and writes: as `recurrent.StepInputs` of GDN, but q, k and v contiguous as well.

    state: [slots, HV, K, V] or [slots, HV, V, K]. Every index must be below `slots` and no slot may occur twice;
    checking that would cost a synchronisation, so the caller answers for it.
    """

    state: Tensor
    indices: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    out: Tensor
    scale: float


def decode_k_first(x: DecodeInputs, tile: int, num_warps: int) -> Launch:
    """A decode step with state [slots, HV, K, V]; otherwise as `decode_v_first`."""
    check_decode(x, tile, num_warps, v_first=False)
    return _launch(x, tile, num_warps, v_first=False, folded=False)


def decode_v_first(x: DecodeInputs, tile: int, num_warps: int, folded: bool = False) -> Launch:
    """A decode step with state [slots, HV, V, K], as a launch that the caller makes by calling it.

    tile: BV, values a program, a power of two; num_warps: 1, 2 or 4; folded: see the table at the top of this file.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    check_decode(x, tile, num_warps, v_first=True)
    return _launch(x, tile, num_warps, v_first=True, folded=folded)


def _launch(x: DecodeInputs, tile: int, num_warps: int, v_first: bool, folded: bool) -> Launch:
    N, H, K = x.q.shape
    HV, V = x.v.shape[1:]
    sizes = {"H": H, "HV": HV, "state_slot_stride": x.state.stride(0)}
    constants = {"K": K, "V": V, "BK": triton.next_power_of_2(K), "BV": tile, "V_FIRST": v_first, "FOLDED": folded}
    return Launch(_decode_kernel, (triton.cdiv(V, tile), N * HV), vars(x) | sizes | constants, {"num_warps": num_warps})


def check_decode(x: DecodeInputs, tile: int, num_warps: int, v_first: bool) -> None:
    """Raise ValueError for shapes, dtypes, strides, devices or launch choices that the kernels cannot take."""
    if x.q.ndim != 3 or x.v.ndim != 3:
        raise ValueError(f"q is {tuple(x.q.shape)} and v is {tuple(x.v.shape)}; allowed: [N, H, K] and [N, HV, V]")
    (N, H, K), (HV, V) = x.q.shape, x.v.shape[1:]
    if H == 0 or HV % H:
        raise ValueError(f"v has {HV} heads and q has {H}; allowed: a multiple of q's")
    layout, inner = ("[slots, HV, V, K]", (HV, V, K)) if v_first else ("[slots, HV, K, V]", (HV, K, V))
    if x.state.ndim != 4 or tuple(x.state.shape[1:]) != inner:
        raise ValueError(f"state is {tuple(x.state.shape)}; allowed: {layout} with {inner} inside")
    check_one_of("state", x.state.dtype, STATE_DTYPES)
    if len(x.state) and not x.state[0].is_contiguous():
        raise ValueError(f"state has strides {x.state.stride()}; allowed: contiguous inside a slot")
    shapes = {"indices": (N,), "q": (N, H, K), "k": (N, H, K), "v": (N, HV, V), "a": (N, HV), "b": (N, HV)}
    shapes |= {"A_log": (HV,), "dt_bias": (HV,), "out": (N, HV, V)}
    for name, shape in shapes.items():
        tensor = getattr(x, name)
        check_shape(name, tensor, shape)
        check_contiguous(name, tensor)
        check_device(name, tensor, x.state.device, "the state's")
        if name != "indices" and not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} is {tensor.dtype}; allowed: a floating-point dtype")
    check_one_of("indices", x.indices.dtype, (torch.int32, torch.int64))
    if tile < 1 or tile & (tile - 1):
        raise ValueError(f"tile is {tile}; allowed: a power of two")
    check_one_of("num_warps", num_warps, (1, 2, 4))
