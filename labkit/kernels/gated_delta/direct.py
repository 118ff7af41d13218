"""Decode on a ring with little between the arrival of a state and its result.

Of a decode of bf16 states (`buffered.decode`, H200, batch 256) a program waits for its state a fifth of its time. The
rest is a chain: key and query are turned into columns by way of shared memory, with a barrier each time, and what was
made ahead is asked for only when the state has come. So few bytes are under way, whatever the copies are.

| change  | hypothesis                                                                                                 |
|---------|------------------------------------------------------------------------------------------------------------|
| waits   | what is made ahead is waited for before the state is asked for, so that all loads are under way together   |
| parts   | a token that writes the state, one in L, reads it again, a few rows at a time: no other token leaves       |
|         | registers free for it, so that more programs are there at once                                             |
| matrix  | key and query are loaded as two rows of a tile that the matrix instruction takes as it is: one barrier     |

The matrix instructions are those of `drafts.py`, of which this is one draft: products of 16 bits are exact, a state in
fp32 goes as two parts in tf32, weights of the ring as two parts. GDN alone, V-first. Source of the ring: `buffered.py`.

Measured on an H100 and an H200: `on_ring.py` takes it for bf16 states. For fp32 it is faster only at batch 64. What is
left at batch 512 (H200, bf16: 196 µs, where a read of the states takes 122): the kernel before takes 19 µs of which
little is hidden, since its sums are ordinary ones; tokens that write the state cost 19 where the copy would take 8.

Tried on an H200 and slower: programs that take the tiles of several heads in turn, as `in_turn.py` has them for drafts
(1.06 times with bf16 states, 1.4 with fp32). The chain of one tile is what takes long, and fewer programs share it out.
"""

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from labkit.kernels.gated_delta import buffered
from labkit.kernels.gated_delta.buffered import (
    _FACTORS,
    BufferedChoice,
    Decode,
    Ring,
    _logs,
    _products,
    _ring_of,
    _wide,
    _with_ring,
)
from labkit.kernels.gated_delta.drafts import _times, _with_parts
from labkit.kernels.gated_delta.recurrent import StepChoice, StepInputs, _channels, _load_tile, _store_tile

PART = 16  # values of V that are rebuilt at a time


@triton.jit
def _token_columns(q, k, piece, K: tl.constexpr, BK: tl.constexpr):
    """[16, BK]: channels of a key, then of a query, as they are in memory, then rows of 0."""
    rows = tl.arange(0, 16)[:, None]
    ks = piece * BK + tl.arange(0, BK)[None, :]
    pointers = tl.where(rows == 0, k, q) + ks
    return tl.load(pointers, mask=(rows < 2) & (ks < K), other=0.0)


@triton.jit(do_not_specialize=["length"])
def _direct_kernel(
    state, indices, q, k, v, out, ring_u, ring_k, ring_g, starts, counts, flush, factors, weights, length, slot_stride,
    q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    POLICY: tl.constexpr, R: tl.constexpr, BL: tl.constexpr, FORCED: tl.constexpr, DEPENDENT: tl.constexpr,
    MATRIX: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one sequence, all K channels."""
    EVEN_V: tl.constexpr = V % BV == 0
    n = tl.program_id(2).to(tl.int64)
    hv = tl.program_id(1)
    head = n * HV + hv
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    inside = vs < V
    slot = tl.load(indices + n).to(tl.int64)
    start = tl.load(starts + n)
    count = tl.load(counts + n)
    live = slot >= 0
    base = state + slot * slot_stride + hv * (K * V)
    us, ks, gs = _ring_of(ring_u, ring_k, ring_g, slot, hv, GROUP, HV, K, V, R, False)
    js = tl.arange(0, BL)
    entries = (start + js) % R
    held = (live & (js < count))[:, None] & inside[None, :]
    if DEPENDENT:  # before the loads of the state: with one behind it the compiler first waits for what came before
        cuda.gdc_wait()
    S = _load_tile(base, vs, live, K, V, BK, True, EVEN_V, POLICY)
    U = tl.load(us + entries[:, None] * V + vs[None, :], mask=held, other=0.0)
    value = tl.load(v + n * v_token + hv * v_head + vs, mask=inside, other=0.0).to(tl.float32)
    query = q + n * q_token + hv // GROUP * q_head
    key = k + n * k_token + hv // GROUP * k_head
    factors += head * _FACTORS
    weights += head * (2 * BL)
    of_v = tl.load(factors)
    of_u = tl.load(factors + 3)
    of_kept = tl.load(factors + 4)
    if MATRIX:
        at = tl.arange(0, 16)
        of_state = tl.load(factors + 1 + at, mask=at < 2, other=0.0)
        of_past = tl.load(weights + at[None, :] * BL + js[:, None], mask=(at < 2)[None, :], other=0.0)
        sums = tl.zeros((BV, 16), tl.float32)
        for p in tl.static_range(len(S)):
            sums = _times(S[p], _token_columns(query, key, p, K, BK), sums, True)
        sums = _with_parts(tl.trans(U), of_past, sums * of_state[None, :])
        with_key = tl.sum(tl.where((at == 0)[None, :], sums, 0.0), 1)
        with_query = tl.sum(tl.where((at == 1)[None, :], sums, 0.0), 1)
    else:
        Sk, Sq = _products(S, _wide(_channels(key, K, BK)), _wide(_channels(query, K, BK)), True)
        earlier = U.to(tl.float32)
        with_key = tl.load(factors + 1) * Sk + tl.sum(earlier * tl.load(weights + js)[:, None], 0)
        with_query = tl.load(factors + 2) * Sq + tl.sum(earlier * tl.load(weights + BL + js)[:, None], 0)
    u = of_v * value - with_key
    o = tl.fma(of_u, u, with_query)
    tl.store(out + head * V + vs, tl.where(live, o, 0.0).to(out.dtype.element_ty), mask=inside)
    # Of a token that writes the state, too, which reads it from there; nobody will count it.
    tl.store(us + ((start + count) % R) * V + vs, (u * of_kept).to(ring_u.dtype.element_ty), mask=live & inside)
    writes = count + 1 >= length
    if FORCED:
        writes = writes | (tl.load(flush + n) != 0)
    if writes & live:
        tl.debug_barrier()  # what other threads of this program stored is visible after it
        logs = _logs(gs, (start + count) % R, live, K, BK, False)  # with this token's, which is placed already
        for part in tl.range(BV // PART, num_stages=1):
            ws = tl.program_id(0) * BV + part * PART + tl.arange(0, PART)
            known = (js <= count)[:, None] & (ws < V)[None, :]
            again = _load_tile(base, ws, live, K, V, BK, True, V % PART == 0, POLICY)
            past = tl.load(us + entries[:, None] * V + ws[None, :], mask=known, other=0.0)
            whole = _with_ring(again, past, ks, gs, entries, js <= count, logs, K, BK, True, False)
            _store_tile(base, ws, live, whole, K, V, BK, True, V % PART == 0, POLICY)


def decode(
    x: StepInputs, ring: Ring, length: int, flush: Tensor | None = None, choice: BufferedChoice | None = None
) -> Decode:
    """As `buffered.decode`, in two launches. Raises its errors, and ValueError for what `check_direct` refuses.

    Every ring must have room for it: counts below R, which is not checked, since counts are on the device. Drafts
    can fill a ring; then `buffered.write` comes first, or the token goes to `buffered.decode`, which takes a full one.
    """
    choice = choice or choose(x)
    check_direct(x, choice)
    ahead, whole = buffered.decode(x, ring, length, flush, replace(choice, matrix=False)).launches
    args = dict(whole.args) | {"MATRIX": choice.matrix, "PART": PART}
    return Decode((ahead, buffered._launch(_direct_kernel, whole.grid, args, whole.options)))


def choose(x: StepInputs) -> BufferedChoice:
    """The choice from dtypes alone."""
    if x.state.dtype.itemsize == 2:
        return BufferedChoice(buffered._fitting(StepChoice(64, 1, 4), x), ahead=True, matrix=True, registers=96)
    return BufferedChoice(buffered._fitting(StepChoice(16, 2, 1), x), ahead=True)


def check_direct(x: StepInputs, choice: BufferedChoice) -> None:
    """Raise ValueError for inputs or a choice that the kernel cannot take."""
    if x.a.ndim == 3:
        raise ValueError("a has a gate of each channel (KDA); allowed directly: a gate of each head (GDN)")
    if not x.v_first:
        raise ValueError("v_first is False; allowed directly: True")
    if not choice.ahead:
        raise ValueError("choice.ahead is False; allowed directly: True")
    if x.q.dtype != x.k.dtype:
        raise ValueError(f"q is {x.q.dtype} and k is {x.k.dtype}; allowed directly: one dtype")
