"""Decode and verify of the gated delta rule in Triton, the recurrent form that an engine runs token by token.

`decode` updates a pool of states by one token a sequence; `verify` runs T draft tokens a sequence, leaves the pool as
it is and stores the state after every one of them. Both are one step on tiles of the state, and differ in the loop
around it; GDN and KDA differ in where the decay is applied. The choices, and what each one tests:

| choice      | hypothesis                                                                                           |
|-------------|------------------------------------------------------------------------------------------------------|
| pieces      | a tile of BV rows is loaded as [BV, K / pieces] tensors: a lane holds 16 bytes of every piece, so    |
|             | that products are added up inside a thread first and only as many lanes as a piece has 16 bytes are  |
|             | left to sum over, at the price of more registers for q and k                                         |
| tile        | BV, values of V a tile: more of them are more bytes in flight a warp, until registers run out        |
| num_warps   | warps that share a tile: more of them are fewer registers a thread, and each repeats q, k and gates  |
| evict_first | states are read and written once a step: in L2 they would only drive out what is used again          |

Tried and left out: several tiles a program, so that q, k and the gates are loaded and computed once for all of them, in
turn or with the next ones under way. In no case of an H100 did it beat small programs, which do so for each other.

No second pass over the state is needed. With k and q normalised, α the decay and S' = α S the decayed state:
u = β (v - S' k), the new state is S' + u kᵀ, and o = (S' + u kᵀ) q = S' q + (k·q) u. The scalar α of GDN comes out of
the sums, which so need not wait for the gates; KDA's α, one a channel, is multiplied into S first. The norms of k and q
are factors of the sums as well. Sources: SGLang pull request 20283 (layout, verify); by steps: study 01's layouts.py.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_contiguous, check_device, check_one_of, check_shape, check_tensor
from labkit.kernels.gated_delta.gates import decay, inverse_norm
from labkit.kernels.launch import Launch
from labkit.kernels.target import capability_of, multiprocessors

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
WITH_FP8 = (8, 9)  # compute capability that has it
INDEX_DTYPES = (torch.int32, torch.int64)
OWNER = "the state's"  # whose device all tensors must be on
MOST_SEQUENCES = 65535  # of CUDA's grid along its third axis
FEW_ROWS, SOME_ROWS = 64, 256  # of V for each multiprocessor: see `choose`
KEPT_BYTES = 192 << 20  # of states in a step, from which they are better left to L2's own policy
FAST_MEMORY = 30.0  # GB/s for each multiprocessor: an H100 has 25, an H200 37


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    """The mask is left out where the sizes divide, so that it cannot cost anything."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store(pointers, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty))


@triton.jit
def _channels(pointers, K: tl.constexpr, BK: tl.constexpr):
    """The K values at a pointer as a tuple of pieces [BK]."""
    ks = tl.arange(0, BK)
    found = ()
    for p in tl.static_range((K + BK - 1) // BK):
        found = found + (_load(pointers + p * BK + ks, p * BK + ks < K, p * BK + BK > K),)
    return found


@triton.jit
def _gate_inputs(pointers, hv, K: tl.constexpr, BK: tl.constexpr, KDA: tl.constexpr):
    """a or dt_bias of one value head: a tuple of one scalar (GDN) or of pieces [BK] (KDA)."""
    if KDA:
        return _channels(pointers + hv * K, K, BK)
    else:
        return (tl.load(pointers + hv),)


@triton.jit
def _tile_pointers(base, vs, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, V_FIRST: tl.constexpr):
    """Pointers to the first piece of a tile: [BV, BK], or [BK, BV] of a K-first state."""
    ks = tl.arange(0, BK)
    if V_FIRST:
        return base + vs[:, None] * K + ks[None, :]
    else:
        return base + ks[:, None] * V + vs[None, :]


@triton.jit
def _tile_mask(vs, p: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, V_FIRST: tl.constexpr):
    ks = p * BK + tl.arange(0, BK)
    if V_FIRST:
        return (vs[:, None] < V) & (ks[None, :] < K)
    else:
        return (ks[:, None] < K) & (vs[None, :] < V)


@triton.jit
def _load_tile(
    base, vs, live,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, V_FIRST: tl.constexpr, EVEN_V: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """Values vs of all K channels of the state at `base`, as a tuple of pieces in the state's dtype.

    If not live, nothing is read and the values are undefined. That is a predicate of the whole program and no branch:
    compilers move loads from before a branch to behind it, where they wait for the slot.
    """
    pointers = _tile_pointers(base, vs, K, V, BK, V_FIRST)
    STRIDE: tl.constexpr = BK if V_FIRST else BK * V
    found = ()
    for p in tl.static_range((K + BK - 1) // BK):
        if p * BK + BK > K or not EVEN_V:
            mask = _tile_mask(vs, p, K, V, BK, V_FIRST) & live
            piece = tl.load(pointers + p * STRIDE, mask=mask, other=0.0, eviction_policy=POLICY)
        else:
            piece = tl.load(pointers + p * STRIDE, mask=live, eviction_policy=POLICY)
        found = found + (piece,)
    return found


@triton.jit
def _store_tile(
    base, vs, live, S,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, V_FIRST: tl.constexpr, EVEN_V: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """Store the pieces S where `_load_tile` has them from; nothing if not live."""
    pointers = _tile_pointers(base, vs, K, V, BK, V_FIRST)
    STRIDE: tl.constexpr = BK if V_FIRST else BK * V
    for p in tl.static_range(len(S)):
        mask = live
        if p * BK + BK > K or not EVEN_V:
            mask = _tile_mask(vs, p, K, V, BK, V_FIRST) & live
        tl.store(pointers + p * STRIDE, S[p], mask=mask, eviction_policy=POLICY)


@triton.jit
def _load_token(
    q, k, a, b, token, h, hv, q_token, q_head, k_token, k_head, a_token, b_token,
    K: tl.constexpr, BK: tl.constexpr, KDA: tl.constexpr,
):  # fmt: skip
    """What all values of V of one token share, as it is in memory: queries, keys, gate inputs, b."""
    queries = _channels(q + token * q_token + h * q_head, K, BK)
    keys = _channels(k + token * k_token + h * k_head, K, BK)
    gates = _gate_inputs(a + token * a_token, hv, K, BK, KDA)
    return queries, keys, gates, tl.load(b + token * b_token + hv)


@triton.jit
def _prepare(token, log_rate, bias, scale, lower_bound, BOUNDED: tl.constexpr):
    """Queries, keys, their inverse norms (q's with the scale), k·q, decays and β of a loaded token, in fp32.

    β stays in fp32: rounded to bf16 it would cost an error of 2e-3 in the state.
    """
    raw_queries, raw_keys, gates, b = token
    queries = ()
    keys = ()
    decays = ()
    qq = tl.zeros_like(raw_queries[0]).to(tl.float32)
    kk = qq
    kq = qq
    for p in tl.static_range(len(raw_queries)):
        query = raw_queries[p].to(tl.float32)
        key = raw_keys[p].to(tl.float32)
        qq += query * query
        kk += key * key
        kq += key * query
        queries = queries + (query,)
        keys = keys + (key,)
    for p in tl.static_range(len(gates)):
        decays = decays + (decay(gates[p].to(tl.float32) + bias[p].to(tl.float32), log_rate, lower_bound, BOUNDED),)
    q_factor = inverse_norm(tl.sum(qq, 0)) * scale
    k_factor = inverse_norm(tl.sum(kk, 0))
    kq = tl.sum(kq, 0) * (k_factor * q_factor)
    return queries, keys, decays, q_factor, k_factor, kq, tl.sigmoid(b.to(tl.float32))


@triton.jit
def _step(S, prepared, value, DTYPE: tl.constexpr, V_FIRST: tl.constexpr, KDA: tl.constexpr):
    """o [BV] in fp32 and the new tile, as pieces of DTYPE, from a tile's pieces S and its values of v."""
    queries, keys, decays, q_factor, k_factor, kq, beta = prepared
    K_AXIS: tl.constexpr = 1 if V_FIRST else 0
    V_AXIS: tl.constexpr = 1 - K_AXIS
    decayed = ()
    Sq = tl.zeros_like(S[0]).to(tl.float32)
    Sk = Sq
    for p in tl.static_range(len(S)):
        tile = S[p].to(tl.float32)
        if KDA:
            tile = tile * tl.expand_dims(decays[p], V_AXIS)
        decayed = decayed + (tile,)
        Sk += tile * tl.expand_dims(keys[p], V_AXIS)
        Sq += tile * tl.expand_dims(queries[p], V_AXIS)
    if not KDA:
        q_factor = q_factor * decays[0]
    k_decayed = k_factor if KDA else k_factor * decays[0]
    u = beta * (value.to(tl.float32) - tl.sum(Sk, K_AXIS) * k_decayed)
    # fma where a compiler could contract in two ways: decode and verify then give the same bits.
    o = tl.fma(kq, u, tl.sum(Sq, K_AXIS) * q_factor)
    u = tl.expand_dims(u * k_factor, K_AXIS)
    new = ()
    for p in tl.static_range(len(S)):
        tile = decayed[p] if KDA else decayed[p] * decays[0]
        new = new + (tl.fma(u, tl.expand_dims(keys[p], V_AXIS), tile).to(DTYPE),)
    return o, new


@triton.jit
def _decode_kernel(
    state, indices, q, k, v, a, b, A_log, dt_bias, out, scale, lower_bound, slot_stride,
    q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, KDA: tl.constexpr, BOUNDED: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one sequence, all K channels."""
    EVEN_V: tl.constexpr = V % BV == 0
    n = tl.program_id(2).to(tl.int64)
    hv = tl.program_id(1)
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    slot = tl.load(indices + n).to(tl.int64)
    # All loads that need no slot are under way while the slot is; nothing is computed before the state is asked for.
    token = _load_token(q, k, a, b, n, hv // GROUP, hv, q_token, q_head, k_token, k_head, a_token, b_token, K, BK, KDA)
    bias = _gate_inputs(dt_bias, hv, K, BK, KDA)
    log_rate = tl.load(A_log + hv).to(tl.float32)
    value = _load(v + n * v_token + hv * v_head + vs, vs < V, not EVEN_V)
    live = slot >= 0  # else padding: the pool is untouched, the output is zero

    base = state + slot * slot_stride + hv * (K * V)
    S = _load_tile(base, vs, live, K, V, BK, V_FIRST, EVEN_V, POLICY)
    prepared = _prepare(token, log_rate, bias, scale, lower_bound, BOUNDED)
    o, S = _step(S, prepared, value, state.dtype.element_ty, V_FIRST, KDA)
    _store(out + (n * HV + hv) * V + vs, tl.where(live, o, 0.0), vs < V, not EVEN_V)
    _store_tile(base, vs, live, S, K, V, BK, V_FIRST, EVEN_V, POLICY)


@triton.jit
def _verify_kernel(
    state, indices, q, k, v, a, b, A_log, dt_bias, out, intermediate_states, cache_indices, parents,
    scale, lower_bound, T, slot_stride, cache_stride,
    q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, KDA: tl.constexpr, BOUNDED: tl.constexpr, POLICY: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head, all K channels, through the T draft tokens of one sequence."""
    EVEN_V: tl.constexpr = V % BV == 0
    n = tl.program_id(2).to(tl.int64)
    hv = tl.program_id(1)
    h = hv // GROUP
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    v += hv * v_head + vs
    out += hv * V + vs
    slot = tl.load(indices + n).to(tl.int64)
    cache_slot = tl.load(cache_indices + n).to(tl.int64)
    token = _load_token(q, k, a, b, n * T, h, hv, q_token, q_head, k_token, k_head, a_token, b_token, K, BK, KDA)
    value = _load(v + n * T * v_token, vs < V, not EVEN_V)
    bias = _gate_inputs(dt_bias, hv, K, BK, KDA)
    log_rate = tl.load(A_log + hv).to(tl.float32)
    live = (slot >= 0) & (cache_slot >= 0)  # else padding: nothing is stored, the output is zero

    pool = state + slot * slot_stride + hv * (K * V)
    cache = intermediate_states + cache_slot * cache_stride + hv * (K * V)
    after = cache  # where the state after this token goes
    S = _load_tile(pool, vs, live, K, V, BK, V_FIRST, EVEN_V, POLICY)
    for t in range(T):
        following = n * T + tl.minimum(t + 1, T - 1)  # loaded while this token is worked on
        next_token = _load_token(
            q, k, a, b, following, h, hv, q_token, q_head, k_token, k_head, a_token, b_token, K, BK, KDA
        )
        next_value = _load(v + following * v_token, vs < V, not EVEN_V)
        if TREE:
            parent = tl.load(parents + n * T + t).to(tl.int64)
            if parent != t - 1:
                tl.debug_barrier()  # what other threads of this program stored is visible after it
                if parent < 0:
                    S = _load_tile(pool, vs, live, K, V, BK, V_FIRST, EVEN_V, "")
                else:
                    S = _load_tile(cache + parent * (HV * K * V), vs, live, K, V, BK, V_FIRST, EVEN_V, "")
        prepared = _prepare(token, log_rate, bias, scale, lower_bound, BOUNDED)
        # Rounded to the pool's dtype at every token, as by storing it: so decode, or a reload, gives the same bits.
        o, S = _step(S, prepared, value, state.dtype.element_ty, V_FIRST, KDA)
        _store(out + (n * T + t) * (HV * V), tl.where(live, o, 0.0), vs < V, not EVEN_V)
        _store_tile(after, vs, live, S, K, V, BK, V_FIRST, EVEN_V, POLICY)
        after += HV * K * V
        token = next_token
        value = next_value


@dataclass(frozen=True)
class StepChoice:
    """How a step is run; the table at the top of the file says what each choice is for.

    tile: BV, values of V a program; pieces: parts that the K channels are loaded in; num_warps: of a program; all
    powers of two. evict_first: mark the state as not to be kept in L2.
    """

    tile: int = 8
    pieces: int = 4
    num_warps: int = 1
    evict_first: bool = True

    def __str__(self) -> str:
        words = [f"BV={self.tile}", f"{self.pieces} piece{'s' * (self.pieces > 1)}"]
        words += [f"{self.num_warps} warp{'s' * (self.num_warps > 1)}"]
        return ", ".join(words + ["not marked"] * (not self.evict_first))


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a step and a verify both read and write; [..] is [N] in a step and [N, T] in a verify.

    state: pool of fp32, bf16, fp16 or, from compute capability 8.9 on, fp8 (e4m3fn, without scales: up to 448);
           [slots, HV, V, K] if v_first, else [slots, HV, K, V]; contiguous inside a slot.
    indices: [N] int32 or int64, the slot of each sequence; negative: padding (state untouched, output zero). Every
             index must be below `slots`; see `check_indices`.
    q, k: [.., H, K]; v: [.., HV, V]; HV a multiple of H; values of a head adjacent, heads and tokens at any distance
             (views into one `mixed_qkv`: see `packed`).
    a:       [.., HV] for GDN, [.., HV, K] for KDA; b: [.., HV]; contiguous inside a token. A_log: [HV]; dt_bias: [HV],
             or [HV, K] for KDA; out: [.., HV, V]; contiguous. Any float dtype, all on the state's device.
    scale:   multiplies q (K ** -0.5 in the models).
    lower_bound: KDA's second form of the decay, exp(lower_bound · sigmoid(exp(A_log)(a + dt_bias))); None: the first.
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
    lower_bound: float | None = None
    v_first: bool = True


@dataclass(frozen=True, kw_only=True)
class StepInputs(Inputs):
    """Everything that one decode step reads and writes: the state is updated in place, so no slot may occur twice."""


@dataclass(frozen=True, kw_only=True)
class VerifyInputs(Inputs):
    """Everything that a verify of T draft tokens a sequence reads and writes.

    The state is only read; a slot may recur in `indices`. In q, k, v, a and b all N · T tokens are evenly spaced.
    intermediate_states: [cache slots, T, HV, V, K], or [.., HV, K, V], in the pool's layout and dtype, contiguous
             inside a slot: the state after each draft token.
    cache_indices: [N] int32 or int64, the slot there of each sequence, each once; negative: padding too.
    parents: [N, T] int32 or int64, contiguous: the draft token that each one goes on from, an earlier one of its
             sequence, -1: the pool's state. None: a chain, each goes on from the one before.
    """

    intermediate_states: Tensor
    cache_indices: Tensor
    parents: Tensor | None = None


def packed(mixed_qkv: Tensor, H: int, HV: int, K: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [.., H, K], v [.., HV, V] as views of mixed_qkv [.., 2·H·K + HV·V], which an engine's convolution leaves.

    ValueError if the last dimension has another size.
    """
    width = 2 * H * K + HV * V
    if mixed_qkv.ndim < 1 or mixed_qkv.shape[-1] != width:
        raise ValueError(f"mixed_qkv is {tuple(mixed_qkv.shape)}; allowed: a last dimension of 2·H·K + HV·V = {width}")
    q, k, v = mixed_qkv.split((H * K, H * K, HV * V), dim=-1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))


def decode(x: StepInputs, choice: StepChoice | None = None) -> Launch:
    """One token a sequence, the pool updated in place, as a launch that the caller makes by calling it.

    choice: None for `choose`'s. Two runs on the same inputs give the same bits; another choice another order of sums.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    N, _, K, HV, V = check_step(x)
    kda = x.a.ndim == 3
    choice = choice or _chosen(x, N * HV, V, K)
    check_choice(choice, K)
    arguments = _arguments(x, choice, kda)
    return Launch(_decode_kernel, (triton.cdiv(V, choice.tile), HV, N), arguments, {"num_warps": choice.num_warps})


def verify(x: VerifyInputs, choice: StepChoice | None = None) -> Launch:
    """T draft tokens a sequence, a chain or a tree, as a launch that the caller makes by calling it.

    The pool is only read; the state after every token goes to `intermediate_states`, bit for bit what T calls of
    `decode` with the same choice would have left in the pool. choice: None for `choose`'s. Errors as of `decode`.
    """
    N, T, _, K, HV, V = check_verify(x)
    kda = x.a.ndim == 4
    choice = choice or _chosen(x, N * HV, V, K, drafts="chain" if x.parents is None else "tree")
    check_choice(choice, K)
    arguments = _arguments(x, choice, kda) | {
        "intermediate_states": x.intermediate_states,
        "cache_indices": x.cache_indices,
        "parents": x.parents if x.parents is not None else x.cache_indices,
        "T": T,
        "cache_stride": x.intermediate_states.stride(0),
        "TREE": x.parents is not None,
    }
    return Launch(_verify_kernel, (triton.cdiv(V, choice.tile), HV, N), arguments, {"num_warps": choice.num_warps})


def _arguments(x: Inputs, choice: StepChoice, kda: bool) -> dict[str, Any]:
    """What both kernels take."""
    names = ("state", "indices", "q", "k", "v", "a", "b", "A_log", "dt_bias", "out", "scale")
    H, K = x.q.shape[-2:]
    HV, V = x.v.shape[-2:]
    strides = {"slot_stride": x.state.stride(0)}
    strides |= {f"{name}_token": _token_stride(getattr(x, name), 2) for name in "qkv"}
    strides |= {f"{name}_head": getattr(x, name).stride(-2) for name in "qkv"}
    strides |= {"a_token": _token_stride(x.a, 2 if kda else 1), "b_token": _token_stride(x.b, 1)}
    constants = {
        "GROUP": HV // H,
        "HV": HV,
        "K": K,
        "V": V,
        "BK": _piece(K, choice.pieces),
        "BV": choice.tile,
        "V_FIRST": x.v_first,
        "KDA": kda,
        "BOUNDED": x.lower_bound is not None,
        "POLICY": "evict_first" if choice.evict_first else "",
    }
    bound = {"lower_bound": 0.0 if x.lower_bound is None else float(x.lower_bound)}
    return {name: getattr(x, name) for name in names} | bound | strides | constants


def _piece(K: int, pieces: int) -> int:
    """BK: channels of a piece, a power of two; where K is none, the last piece may be short and pieces fewer."""
    return triton.next_power_of_2(triton.cdiv(K, pieces))


def _token_stride(tensor: Tensor, inner: int) -> int:
    """Values from one token to the next; the last `inner` dimensions are those of a token."""
    outer = tensor.ndim - inner
    return tensor.stride(outer - 1) if tensor.shape[outer - 1] > 1 else tensor.stride(0)


def _chosen(x: Inputs, heads: int, V: int, K: int, drafts: str | None = None) -> StepChoice:
    sms, fast = multiprocessors(x.state.device), fast_memory(x.state.device)
    return choose(heads, V, K, x.state.element_size(), sms, fast=fast, v_first=x.v_first, drafts=drafts)


@cache
def fast_memory(device: torch.device) -> bool:
    """Whether a GPU's memory is faster than FAST_MEMORY by its data sheet; not for a device that is none."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return triton.testing.get_dram_gbps() / multiprocessors(device) > FAST_MEMORY


@cache
def choose(
    heads: int,
    V: int,
    K: int,
    itemsize: int,
    sms: int,
    *,
    fast: bool = False,
    v_first: bool = True,
    drafts: str | None = None,
) -> StepChoice:
    """The choice from the shape and the GPU alone: what was fastest on an H100 and an H200, of some thirty choices.

    heads: N · HV; itemsize: bytes of a value of the state; fast: see `fast_memory`; drafts: "chain" or "tree" for
    `verify`, None for `decode`.
    V-first, by the rows of V that a multiprocessor has:
    - up to FEW_ROWS the time is that of one program's chain of loads and sums: 4 rows a program, as many as there can
      be, in two pieces.
    - up to SOME_ROWS all programs fit at once, and larger ones, of 16 rows, have more bytes under way.
    - beyond, one program computes while others wait. A bf16 state has twice the values a byte, so that instructions
      count: 16 rows, with 16 lanes to sum over instead of 32. Where memory is fast for each multiprocessor they count
      more: one warp a tile, so that nothing is computed twice, in two pieces; 8 rows, beyond KEPT_BYTES 16.
    K-first, a row of a tile is BV values of one channel: a line of 128 bytes, or two where there are many programs.
    States beyond KEPT_BYTES are not marked as first to be evicted: with so many, the mark costs 1 to 2 % (why was not
    found).
    Drafts have more to store than to load, and choices differ little. A tree loads again what it has stored, so that
    its states are left to L2 as well, once there are more than a few.
    Tiles are for 128 channels; for others they have as many bytes.
    """
    rows = heads * V / sms
    few, some = rows <= FEW_ROWS, rows <= SOME_ROWS
    wide = itemsize == 4
    kept = heads * V * K * itemsize > KEPT_BYTES or (drafts == "tree" and not few)
    if drafts and v_first:
        tile, pieces, warps = (8, 4, 1) if few else (4, 2, 1) if wide else (8, 2, 1)
    elif drafts:
        tile, pieces, warps = (16, 4, 2) if few else (64, 4, itemsize)
    elif not v_first:
        tile, pieces, warps = (16, 4, 1) if few else (32, 4, itemsize // 2) if some else (64, 4 if wide else 8, 2)
    elif few or some:
        tile, pieces, warps = (4, 2, 1) if few else (16, 1, 1)
    elif wide:
        tile, pieces, warps = (4, 1, 1) if not kept else (16, 1, 1 if fast else 4)
    else:
        tile, pieces, warps = (16 if kept else 8, 2, 1) if fast else (16, 1, 2 if kept else 1)
    largest = triton.next_power_of_2(V)
    return StepChoice(max(1, min(largest, tile * 128 // triton.next_power_of_2(K))), min(pieces, K), warps, not kept)


def check_choice(choice: StepChoice, K: int) -> None:
    """Raise ValueError for a choice that the kernels cannot take for K channels."""
    powers = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    allowed = {"tile": powers, "pieces": tuple(p for p in powers[:6] if p <= K), "num_warps": (1, 2, 4, 8)}
    for name, values in allowed.items():
        check_one_of(name, getattr(choice, name), values)


def check_step(x: StepInputs) -> tuple[int, ...]:
    """N, H, K, HV and V of a decode step.

    Raises ValueError for shapes, dtypes, strides or devices that the kernel cannot take.
    """
    return _check_common(x, "N")


def check_verify(x: VerifyInputs) -> tuple[int, ...]:
    """N, T, H, K, HV and V of a verify; raises ValueError as `check_step` does."""
    N, T, _, K, HV, V = sizes = _check_common(x, "N, T")
    cache = x.intermediate_states
    inner = (T, HV, V, K) if x.v_first else (T, HV, K, V)
    _check_pool("intermediate_states", cache, inner, x.state.device)
    if cache.dtype != x.state.dtype:
        raise ValueError(f"intermediate_states is {cache.dtype}; allowed: the state's dtype, {x.state.dtype}")
    check_tensor("cache_indices", x.cache_indices, (N,), INDEX_DTYPES, x.state.device, OWNER)
    if x.parents is not None:
        check_tensor("parents", x.parents, (N, T), INDEX_DTYPES, x.state.device, OWNER)
    return sizes


def check_indices(indices: Tensor, slots: int) -> None:
    """Raise ValueError for an index past a pool of `slots` or a slot that occurs twice; synchronises with the GPU.

    `decode` and `verify` do not call it: an engine that made the indices knows, and cannot wait.
    """
    used = indices[indices >= 0]
    if len(used) and int(used.max()) >= slots:
        raise ValueError(f"indices holds {int(used.max())}; allowed: below the pool's {slots} slots, or negative")
    if len(used.unique()) != len(used):
        raise ValueError(f"indices is {indices.tolist()}; allowed: each slot once, padding negative")


def _check_common(x: Inputs, names: str) -> tuple[int, ...]:
    """What both take; names: of what comes before a token's sizes. Returns their sizes, H, K, HV and V."""
    outer = len(names.split())
    if x.q.ndim != outer + 2 or x.v.ndim != outer + 2:
        found = f"q is {tuple(x.q.shape)} and v is {tuple(x.v.shape)}"
        raise ValueError(f"{found}; allowed: [{names}, H, K] and [{names}, HV, V]")
    tokens, (H, K), (HV, V) = tuple(x.q.shape[:outer]), x.q.shape[outer:], x.v.shape[outer:]
    if 0 in tokens[1:]:
        raise ValueError(f"q is {tuple(x.q.shape)}; allowed: [{names}, H, K] with T at least 1")
    if H == 0 or HV == 0 or HV % H:
        raise ValueError(f"v has {HV} heads and q has {H}; allowed: a multiple of q's")
    if K == 0 or V == 0:
        raise ValueError(f"q has K = {K} and v has V = {V}; allowed: at least 1")
    if tokens[0] > MOST_SEQUENCES:
        raise ValueError(f"q has {tokens[0]} sequences; allowed: at most {MOST_SEQUENCES}")
    device = x.state.device
    check_state(x.state)
    _check_pool("state", x.state, (HV, V, K) if x.v_first else (HV, K, V), device)
    check_tensor("indices", x.indices, tokens[:1], INDEX_DTYPES, device, OWNER)
    kda = x.a.ndim == len(tokens) + 2
    gate = (HV, K) if kda else (HV,)
    inner = {"q": (H, K), "k": (H, K), "v": (HV, V), "a": gate, "b": (HV,)}
    for name, shape in inner.items():
        _check_floats(name, getattr(x, name), tokens + shape, device)
        _check_strides(name, getattr(x, name), len(tokens), heads_apart=name in "qkv")
    for name, shape in {"A_log": (HV,), "dt_bias": gate, "out": (*tokens, HV, V)}.items():
        _check_floats(name, getattr(x, name), shape, device)
        check_contiguous(name, getattr(x, name))
    if x.lower_bound is not None and not (kda and x.lower_bound < 0):
        found = f"lower_bound is {x.lower_bound} and a is {tuple(x.a.shape)}"
        raise ValueError(f"{found}; allowed: a negative one, with KDA's a")
    return *tokens, H, K, HV, V


def check_state(state: Tensor) -> None:
    """Raise ValueError for a dtype that a pool of states cannot have on its GPU."""
    check_one_of("state", state.dtype, STATE_DTYPES)
    found = capability_of(state.device)
    if state.dtype == torch.float8_e4m3fn and found is not None and found < WITH_FP8:
        name, least = f"compute capability {found[0]}.{found[1]}", f"{WITH_FP8[0]}.{WITH_FP8[1]}"
        raise ValueError(f"state is {state.dtype} on {name}; allowed: from {least}")


def _check_pool(name: str, pool: Tensor, inner: tuple[int, ...], device: torch.device) -> None:
    if tuple(pool.shape[1:]) != inner:
        raise ValueError(f"{name} is {tuple(pool.shape)}; allowed: slots of {inner}")
    if len(pool) and not pool[0].is_contiguous():
        raise ValueError(f"{name} has strides {pool.stride()}; allowed: contiguous inside a slot")
    check_device(name, pool, device, OWNER)


def _check_floats(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    check_shape(name, tensor, shape)
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"{name} is {tensor.dtype}; allowed: a floating-point dtype")
    check_device(name, tensor, device, OWNER)


def _check_strides(name: str, tensor: Tensor, tokens: int, heads_apart: bool) -> None:
    """The first `tokens` dimensions evenly spaced; the rest contiguous, but for the distance of heads if they may."""
    if not tensor.numel():
        return
    token = tensor[(0,) * tokens]
    if not (token[0] if heads_apart else token).is_contiguous():
        what = "values of a head adjacent" if heads_apart else "contiguous inside a token"
        raise ValueError(f"{name} has strides {tensor.stride()}; allowed: {what}")
    if tokens == 2 and min(tensor.shape[:2]) > 1 and tensor.stride(0) != tensor.shape[1] * tensor.stride(1):
        raise ValueError(f"{name} has strides {tensor.stride()}; allowed: all tokens evenly spaced")
