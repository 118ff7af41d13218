"""Decode and verify on a ring by programs that take several states in turn, of which the next ones are under way.

In `buffered.decode` and `drafts.verify` a program has one tile of a state: it waits for its slot, for the tile and for
what is made ahead, and no other tile of its own is under way while it does. An H200 reads the states 1.4 times as fast
as an H100, with the same multiprocessors: as many bytes more must be under way.

| kernel               | hypothesis                                                                                    |
|----------------------|-----------------------------------------------------------------------------------------------|
| _turns_kernel        | a sequence's slot is read once, and the copy engine brings tiles to shared memory while those |
|                      | before them are used: bytes under way depend on neither registers nor the programs that fit   |
| _drafts_turns_kernel | the same, of the verify of all drafts at once                                                 |

| choice   | hypothesis                                                                                                |
|----------|-----------------------------------------------------------------------------------------------------------|
| heads    | value heads a program: many hide the first tile's wait, few leave no multiprocessor idle at the end       |
| stages   | tiles under way or in use: more bytes, until fewer programs fit                                           |

The sums of the ring are made ahead, as with `buffered.BufferedChoice.ahead`; what is rounded is the same but for the
last correction before a state is written, which the state has as the ring keeps it. Source of the ring: `buffered.py`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from labkit.kernels.gated_delta import buffered, drafts
from labkit.kernels.gated_delta.buffered import (
    _FACTORS,
    BufferedChoice,
    Decode,
    DraftInputs,
    Inputs,
    Ring,
    _ahead_of,
    _columns,
    _logs,
    _products,
    _ring_of,
    _with_ring,
)
from labkit.kernels.gated_delta.drafts import _columns_of, _times, _with_parts
from labkit.kernels.gated_delta.recurrent import StepChoice, StepInputs, _channels, _load_tile, _store_tile
from labkit.kernels.target import COPY_ENGINE, capability_of

LEAST_PROGRAMS = 512  # about four a multiprocessor


@dataclass(frozen=True)
class TurnsChoice:
    """How such a step is run.

    step: tile, warps and instructions; its sums are made ahead. heads: value heads a program, which divide all. stages:
    tiles that are under way or in use, of 1 to 8.
    """

    step: BufferedChoice
    heads: int = 8
    stages: int = 3

    def __str__(self) -> str:
        return f"{self.step}, {self.heads} heads in turn, {self.stages} stages"


@triton.jit
def _pick(values, at: tl.constexpr):
    """One of a vector's values, as a scalar."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == at, values, 0.0), 0)


@triton.jit
def _token_columns(q, k, K: tl.constexpr, BK: tl.constexpr):
    """Pieces [16, BK]: a key, then a query, as they are in memory, then rows of 0."""
    rows = tl.arange(0, 16)[:, None]
    ks = tl.arange(0, BK)[None, :]
    found = ()
    for p in tl.static_range((K + BK - 1) // BK):
        pointers = tl.where(rows == 0, k, q) + p * BK + ks
        found = found + (tl.load(pointers, mask=(rows < 2) & (p * BK + ks < K), other=0.0),)
    return found


@triton.jit
def _matrix_products(S, columns, past, weights_of_key, weights_of_query, of_Sk, of_Sq):
    """of_Sk S0 k + Σ_j weights_of_key[j] past[j], and the same of q, [BV] each; `_token_columns`, past: [rows, BV]."""
    sums = tl.zeros((S[0].shape[0], 16), tl.float32)
    for p in tl.static_range(len(S)):
        sums = tl.dot(S[p], tl.trans(columns[p]), sums)
    empty = tl.zeros_like(weights_of_key)
    at = tl.arange(0, 16)[None, :]
    of_past = _columns(empty, empty, weights_of_key, weights_of_query, past.dtype)
    sums = tl.dot(tl.trans(past), of_past, sums)
    of_k = tl.where(at == 0, of_Sk, tl.where((at == 2) | (at == 3), 1.0, 0.0))
    of_q = tl.where(at == 1, of_Sq, tl.where((at == 4) | (at == 5), 1.0, 0.0))
    return tl.sum(sums * of_k, 1), tl.sum(sums * of_q, 1)


@triton.jit(do_not_specialize=["length"])
def _turns_kernel(
    tiles, state, indices, q, k, v, out, ring_u, ring_k, ring_g, starts, counts, flush, factors, vectors, weights,
    length, slot_stride, q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, KDA: tl.constexpr, POLICY: tl.constexpr, R: tl.constexpr, BL: tl.constexpr,
    FORCED: tl.constexpr, MATRIX: tl.constexpr, DEPENDENT: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: HEADS value heads of one sequence, a tile of BV values after the other."""
    EVEN_V: tl.constexpr = V % BV == 0
    TILES: tl.constexpr = (V + BV - 1) // BV
    n = tl.program_id(1).to(tl.int64)
    slot = tl.load(indices + n).to(tl.int64)
    start = tl.load(starts + n)
    count = tl.load(counts + n)
    live = slot >= 0
    writes = count + 1 >= length
    if FORCED:
        writes = writes | (tl.load(flush + n) != 0)
    writes = writes & live
    js = tl.arange(0, BL)
    valid = (js < count) & live
    entries = (start + js) % R
    entry = (start + count) % R
    places = tl.arange(0, 8)
    rows = tl.arange(0, 2 * BL)  # the ring's corrections, and the token's value
    row_entries = (start + rows) % R
    if DEPENDENT:  # before the loop: what is made ahead is copied ahead, too
        cuda.gdc_wait()
    for i in tl.range(HEADS * TILES, num_stages=STAGES):
        hv = tl.program_id(0) * HEADS + i // TILES
        vs = (i % TILES) * BV + tl.arange(0, BV)
        inside = vs < V
        head = n * HV + hv
        base = state + slot * slot_stride + hv * (K * V)
        us, ks, gs = _ring_of(ring_u, ring_k, ring_g, slot, hv, GROUP, HV, K, V, R, KDA)
        query = q + n * q_token + hv // GROUP * q_head
        key = k + n * k_token + hv // GROUP * k_head
        own_value = v + n * v_token + hv * v_head
        row = tl.where(live, slot * (slot_stride // K) + hv * V + (i % TILES) * BV, -BV).to(tl.int32)
        S = (tiles.load([row, 0]),)
        shared = tl.load(factors + head * _FACTORS + places, mask=places < _FACTORS, other=0.0)
        of_v = _pick(shared, 0)
        of_Sk = _pick(shared, 1)
        of_Sq = _pick(shared, 2)
        if MATRIX:
            columns = _token_columns(query, key, K, BK)
            pointers = tl.where((rows < BL)[:, None], us + (row_entries * V)[:, None], own_value) + vs[None, :]
            known = ((rows < count) & live) | (rows == BL)
            past = tl.load(pointers, mask=known[:, None] & inside[None, :], other=0.0)
            of_key = tl.load(weights + head * (2 * BL) + rows, mask=rows < BL, other=0.0)
            of_query = tl.load(weights + head * (2 * BL) + BL + rows, mask=rows < BL, other=0.0)
            of_key = tl.where(rows == BL, -of_v, of_key)
            with_key, with_query = _matrix_products(S, columns, past, of_key, of_query, of_Sk, of_Sq)
            u = -with_key
        else:
            U = tl.load(us + entries[:, None] * V + vs[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
            # Of what was made ahead the factors are loaded above, as a vector: those are copied ahead, too.
            token = (_channels(query, K, BK), _channels(key, K, BK))
            _, keys, queries, of_key, of_query = _ahead_of(factors, vectors, weights, token, head, K, BK, BL, KDA)
            Sk, Sq = _products(S, keys, queries, V_FIRST)
            past = U.to(tl.float32)
            value = tl.load(own_value + vs, mask=inside, other=0.0).to(tl.float32)
            u = of_v * value - of_Sk * Sk - tl.sum(past * of_key[:, None], 0)
            with_query = of_Sq * Sq + tl.sum(past * of_query[:, None], 0)
        o = tl.fma(_pick(shared, 3), u, with_query)
        tl.store(out + head * V + vs, tl.where(live, o, 0.0).to(out.dtype.element_ty), mask=inside)
        kept = (u * _pick(shared, 4)).to(ring_u.dtype.element_ty)
        if writes:
            # The tile is read again: kept for this, it would take registers of every token.
            again = _load_tile(base, vs, live, K, V, BK, V_FIRST, EVEN_V, POLICY)
            logs = _logs(gs, entry, live, K, BK, KDA)  # with this token's, which is placed already
            held = valid[:, None] & inside[None, :]
            corrected = tl.load(us + entries[:, None] * V + vs[None, :], mask=held, other=0.0)
            corrected = tl.where((js == count)[:, None], kept[None, :], corrected)
            whole = _with_ring(again, corrected, ks, gs, entries, js <= count, logs, K, BK, V_FIRST, KDA)
            _store_tile(base, vs, live, whole, K, V, BK, V_FIRST, EVEN_V, POLICY)
        else:
            tl.store(us + entry * V + vs, kept, mask=live & inside)


@triton.jit(do_not_specialize=["T"])
def _drafts_turns_kernel(
    tiles, indices, q, k, v, out, ring_u, starts, counts, systems, slot_stride, T,
    q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    R: tl.constexpr, BL: tl.constexpr, C: tl.constexpr, DEPENDENT: tl.constexpr, HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program: all drafts of HEADS value heads of one sequence, a tile of BV values after the other."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    HALF: tl.constexpr = C // 2
    WIDE: tl.constexpr = ring_u.dtype.element_ty == tl.float32 or out.dtype.element_ty == tl.float32
    n = tl.program_id(1).to(tl.int64)
    slot = tl.load(indices + n).to(tl.int64)
    start = tl.load(starts + n)
    count = tl.load(counts + n)
    live = slot >= 0
    js = tl.arange(0, BL)
    entries = (start + js) % R
    columns = tl.arange(0, C)
    draft = columns % HALF
    is_key = (columns < HALF)[None, :]
    at = n * T + draft
    places = (start + count + draft) % R
    if DEPENDENT:  # before the loop: what is prepared is copied ahead, too
        cuda.gdc_wait()
    for i in tl.range(HEADS * TILES, num_stages=STAGES):
        hv = tl.program_id(0) * HEADS + i // TILES
        vs = (i % TILES) * BV + tl.arange(0, BV)
        row = tl.where(live, slot * (slot_stride // K) + hv * V + (i % TILES) * BV, -BV).to(tl.int32)
        S = tiles.load([row, 0])
        tile = _columns_of(q, k, n, hv // GROUP, T, 0, q_token, q_head, k_token, k_head, K, BK, C)
        us = ring_u + (slot * HV + hv) * (R * V)
        wanted = (draft < T)[None, :] & (vs < V)[:, None]
        inside = (live & (vs < V))[:, None] & (js < count)[None, :]
        U = tl.load(us + (entries * V)[None, :] + vs[:, None], mask=inside, other=0.0)
        values = v + (at * v_token + hv * v_head)[None, :] + vs[:, None]
        value = tl.load(values, mask=wanted & is_key, other=0.0)
        system = systems + (n * HV + hv) * ((HALF + 1 + BL) * C)
        of_state = tl.load(system + HALF * C + columns)
        weights = tl.load(system + (HALF + 1 + js)[:, None] * C + columns[None, :])
        rows = columns[:, None]
        solved = tl.load(system + rows * C + columns[None, :], mask=rows < HALF, other=0.0)
        sums = _times(S, tile, tl.zeros((BV, C), tl.float32), True)
        found = _solved(sums * of_state[None, :], U, weights, value, solved, is_key, HALF, C, WIDE)
        kept = us + (places * V)[None, :] + vs[:, None]
        tl.store(kept, found.to(ring_u.dtype.element_ty), mask=live & wanted & is_key)
        outputs = out + (at * HV + hv)[None, :] * V + vs[:, None]
        tl.store(outputs, tl.where(live, found, 0.0).to(out.dtype.element_ty), mask=wanted & ~is_key)


@triton.jit
def _solved(sums, U, weights, value, solved, is_key, HALF: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    """What the ring keeps of every draft, and their outputs, [BV, C]; see `drafts._prepare_kernel`."""
    rows = tl.arange(0, C)[:, None]
    columns = tl.arange(0, C)[None, :]
    sums = _with_parts(U, weights, sums)
    left = tl.where(is_key, value.to(tl.float32) - sums, sums)
    solved = tl.where((rows >= HALF) & (rows == columns), 1.0, solved)
    if WIDE:
        return tl.dot(left, solved, input_precision="tf32x3")
    else:
        high = left.to(U.dtype)
        found = _with_parts(high, solved, tl.zeros_like(left))
        return tl.dot((left - high.to(tl.float32)).to(U.dtype), solved.to(U.dtype), found)


def decode(
    x: StepInputs, ring: Ring, length: int, flush: Tensor | None = None, choice: TurnsChoice | None = None
) -> Decode:
    """As `buffered.decode`, in two launches. Raises its errors, and ValueError for what `check_turns` refuses."""
    choice = choice or choose(x, ring)
    check_turns(x, choice, ring)
    ahead, whole = buffered.decode(x, ring, length, flush, choice.step).launches
    N, HV = len(x.indices), x.v.shape[-2]
    more = {"HEADS": choice.heads, "STAGES": choice.stages, "tiles": _rows_of(x, choice.step.step.tile)}
    grid = (HV // choice.heads, N)
    return Decode((ahead, buffered._launch(_turns_kernel, grid, dict(whole.args) | more, whole.options)))


def verify(x: DraftInputs, ring: Ring, choice: TurnsChoice | None = None) -> Decode:
    """As `drafts.verify`, in two launches. Raises its errors, and ValueError for what `check_turns` refuses."""
    choice = choice or choose_drafts(x)
    check_turns(x, choice, ring)
    prepare, whole = drafts.verify(x, ring, choice.step.step).launches
    N, HV = len(x.indices), x.v.shape[-2]
    more = {"HEADS": choice.heads, "STAGES": choice.stages, "tiles": _rows_of(x, choice.step.step.tile)}
    grid = (HV // choice.heads, N)
    return Decode((prepare, buffered._launch(_drafts_turns_kernel, grid, dict(whole.args) | more, whole.options)))


def _rows_of(x: Inputs, tile: int) -> TensorDescriptor:
    """The pool's values of V, one row of K channels after the other, of which so many are copied at a time."""
    pool, K = x.state, x.q.shape[-1]
    _, HV, V, _ = pool.shape
    rows = pool.as_strided((pool.stride(0) // K * (len(pool) - 1) + HV * V, K), (K, 1))
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [tile, K])


def choose(x: StepInputs, ring: Ring) -> TurnsChoice:
    """The choice from shapes and dtypes alone: by counts of registers and bytes under way, not by times."""
    if buffered._takes_matrix(x, ring) and x.v.dtype == ring.u.dtype and x.a.ndim != 3:
        return TurnsChoice(BufferedChoice(buffered._fitting(StepChoice(64, 1, 4), x), True, True, 168), _heads(x), 4)
    return TurnsChoice(BufferedChoice(buffered._fitting(StepChoice(32, 1, 4), x), True, False, 128), _heads(x), 3)


def choose_drafts(x: DraftInputs) -> TurnsChoice:
    """The same of a verify."""
    return TurnsChoice(BufferedChoice(buffered._fitting(StepChoice(64, 1, 4), x), True), _heads(x), 3)


def _heads(x: Inputs) -> int:
    """Value heads a program: up to 8, while there are enough programs."""
    N, HV = len(x.indices), x.v.shape[-2]
    return max(n for n in (1, 2, 4, 8) if n == 1 or (HV % n == 0 and n * LEAST_PROGRAMS <= N * HV))


def check_turns(x: Inputs, choice: TurnsChoice, ring: Ring) -> None:
    """Raise ValueError for a pool or a choice that the kernel cannot take."""
    HV, K, step = x.v.shape[-2], x.q.shape[-1], choice.step
    found = capability_of(x.state.device)
    if found is not None and found < COPY_ENGINE:
        raise ValueError(f"compute capability is {found[0]}.{found[1]}; allowed with states in turn: from 9.0 (Hopper)")
    if not x.v_first:
        raise ValueError("v_first is False; allowed with states in turn: True")
    if not step.ahead:
        raise ValueError("choice.step.ahead is False; allowed with states in turn: True")
    if step.matrix and x.a.ndim == 3:
        raise ValueError("choice.step.matrix is True with a gate of each channel (KDA); allowed in turn: False")
    if step.matrix and x.v.dtype != ring.u.dtype:
        raise ValueError(f"v is {x.v.dtype} and ring.u is {ring.u.dtype}; allowed by matrix instructions: one dtype")
    if step.step.pieces != 1 or K & (K - 1):
        found = f"choice.step.step.pieces is {step.step.pieces}, of {K} channels"
        raise ValueError(f"{found}; allowed with states in turn: 1, of a power of two channels")
    if K * x.state.element_size() % 16 or x.state.stride(0) % K or x.state.data_ptr() % 16:
        found = f"state has {K} channels of {x.state.dtype}, and a slot every {x.state.stride(0)}"
        raise ValueError(f"{found}; allowed with states in turn: rows that begin at multiples of 16 bytes")
    if choice.heads < 1 or HV % choice.heads:
        raise ValueError(f"choice.heads is {choice.heads}; allowed: a divisor of the {HV} value heads")
    if not 1 <= choice.stages <= 8:
        raise ValueError(f"choice.stages is {choice.stages}; allowed: 1 to 8")
