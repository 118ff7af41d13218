"""Decode on a ring with few instructions between the arrival of a state and its result, by matrix instructions.

Of a decode of bf16 states (`buffered.decode`, H200, batch 256) a program waits for its state a fifth of its time. The
rest is a chain: key and query are turned into columns by way of shared memory, with a barrier each time, and what was
made ahead is asked for only when the state has come. So few bytes are under way, whatever the copies are.

| kernel         | hypothesis                                                                                          |
|----------------|-----------------------------------------------------------------------------------------------------|
| _sums_kernel   | a kernel before makes what all values of V share: one matrix instruction multiplies the ring's keys |
|                | of four heads. It takes little shared memory: what it has of it, the loads of the kernel that       |
|                | follows lack in the first level cache (see below)                                                   |
| _direct_kernel | what is made ahead is waited for before the state is asked for: all loads are under way together    |
| _alone_kernel  | few states: a kernel before is waited for longer than its sums take. The columns that the matrix    |
|                | instruction takes for the state it takes for the ring's keys and for the norms, too                 |

| change | hypothesis                                                                                                  |
|--------|-------------------------------------------------------------------------------------------------------------|
| matrix | key and query are loaded as rows of a tile that the matrix instruction takes as it is                       |
| twice  | weights in fp32 go as two parts of 16 bits, which are columns of one product: both rows are there twice     |
| parts  | a token that writes the state, one in L, reads it again, a few channels at a time, all asked for at once:   |
|        | no other token leaves registers free for it, so that more programs are there at once                        |

Products of 16 bits are exact; a state in fp32 goes as two parts in tf32 (`drafts.py`). GDN alone, V-first. The token
that writes the state needs no entry, so that a ring that drafts have filled is taken, too. Source: see `buffered.py`.

Measured on an H200, bf16 states: alone is 1.30 times faster than `buffered.decode` with 8 sequences and 1.17 times with
32, and 1.08 times slower than in two launches with 512. Of those 512 sequences' 185 µs (a read of the states takes 122)
the sums take 16, of which little is hidden. With 20 KB of shared memory a program instead of 10 they took as long, and
both kernels together 223: loads under way wait in the first level cache, which has what shared memory leaves of it,
and as long as the two kernels overlap, it leaves as much as the first one asked for.

Tried on an H200 and slower: programs that take the tiles of several heads in turn, as `in_turn.py` has them for drafts
(1.06 times with bf16 states, 1.4 with fp32); states that programs to come will read, fetched to the second level cache
by those before them (1.0 to 1.06 times, more the further ahead); sums in the launch of the states, as programs of their
own that set flags, 8 to 512 sequences ahead (1.03 to 1.07 times at 64 ahead, bf16 and fp32, 64 and 512 sequences; more
with fewer, no less with all ahead): they cost the same wherever they stand, so it is not a wait that states would fill.
What takes long besides is the chain of one tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from labkit.kernels.gated_delta import buffered
from labkit.kernels.gated_delta.buffered import (
    _LEAST,
    LEAST_OF_A_PRODUCT,
    BufferedChoice,
    Decode,
    Ring,
    _after,
    _keep,
    _logs,
    _outer,
    _parts,
    _products,
    _ring_of,
    _rows,
    _turn,
    _wide,
)
from labkit.kernels.gated_delta.drafts import _times
from labkit.kernels.gated_delta.gates import decay, inverse_norm
from labkit.kernels.gated_delta.recurrent import StepChoice, StepInputs, _channels, _load_tile
from labkit.kernels.target import has_dependent_launch

ALONE = 2048  # value heads up to which states of 16 bits go alone
_ROWS, _FACTORS = tl.constexpr(8), tl.constexpr(8)  # rows of columns, as the matrix instruction takes them; their use
ROWS_OF_KEYS = 64  # keys of the ring that a program of `_sums_kernel` has: one instruction of four warps
SUMS_REGISTERS = 64  # at most, of a thread of `_sums_kernel`: its programs leave room for those that follow
PART = 32  # channels that are rebuilt at a time


@triton.jit
def _columns(q, k, q_head, k_head, piece, HEADS: tl.constexpr, TWICE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """[8, BK]: channels of the key and query of each of HEADS heads, as they are in memory, then rows of 0.

    TWICE: of one head, whose two rows are there two times.
    """
    rows = tl.arange(0, _ROWS)[:, None]
    head = 0 if TWICE else rows // 2
    ks = piece * BK + tl.arange(0, BK)[None, :]
    pointers = tl.where(rows % 2 == 0, k + head * k_head, q + head * q_head) + ks
    return tl.load(pointers, mask=(rows < (4 if TWICE else 2 * HEADS)) & (ks < K), other=0.0)


@triton.jit
def _pieces(q, k, K: tl.constexpr, BK: tl.constexpr):
    """`_columns` of one head, twice, and of all K channels, BK at a time."""
    columns = ()
    for p in tl.static_range((K + BK - 1) // BK):
        columns = columns + (_columns(q, k, 0, 0, p, 1, True, K, BK),)
    return columns


@triton.jit
def _exact(x, y, sums):
    """sums + x y of one dtype: products of 16 bits are exact, those of fp32 go as three of tf32."""
    return tl.dot(x, y, sums, input_precision="tf32x3" if x.dtype == tl.float32 else None)


@triton.jit
def _where(sums, is_column):
    """Of each row what is in its column."""
    return tl.sum(tl.where(is_column, sums, 0.0), 1)


@triton.jit
def _result(S, columns, U, weights, of_state):
    """of_state S [k | q] + Uᵀ weights, [BV] each. weights: [BL, 8], in columns 0 and 1, and again in 2 and 3."""
    at = tl.arange(0, _ROWS)[None, :]
    sums = tl.zeros((U.shape[1], _ROWS), tl.float32)
    for p in tl.static_range(len(S)):
        sums = _times(S[p], columns[p], sums, True)
    sums = sums * tl.where(at < 2, of_state[None, :], 0.0)
    if U.dtype == tl.float32:
        sums = _exact(tl.trans(U), tl.where(at < 2, weights, 0.0), sums)
    else:
        high = weights.to(U.dtype)
        sums = tl.dot(tl.trans(U), tl.where(at < 2, high, (weights - high.to(tl.float32)).to(U.dtype)), sums)
    return _where(sums, at % 2 == 0), _where(sums, at % 2 == 1)


@triton.jit
def _correction(out, beta, value, with_key, with_query, of_u, k_factor, live, inside):
    """The correction of the token as the ring keeps it; its output is stored."""
    u = beta * value - with_key
    o = tl.fma(of_u, u, with_query)
    tl.store(out, tl.where(live, o, 0.0).to(out.dtype.element_ty), mask=inside)
    return u * k_factor


@triton.jit
def _is_written(flush, n, count, length, live, FORCED: tl.constexpr):
    """Whether the token writes the state instead of an entry."""
    writes = count + 1 >= length
    if FORCED:
        writes = writes | (tl.load(flush + n) != 0)
    return writes & live


@triton.jit
def _rebuilt(
    base, vs, U, u, key, ring_k, ring_g, entries, valid, after,
    K: tl.constexpr, V: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write the state with its decay, the ring's entries and the token's own. after: logarithm of that decay."""
    WIDE: tl.constexpr = U.dtype == tl.float32 or ring_k.dtype.element_ty == tl.float32
    DTYPE: tl.constexpr = tl.float32 if WIDE else ring_k.dtype.element_ty
    ks = tl.arange(0, PART)
    rows = base + vs[:, None] * K
    tiles = ()
    pasts = ()
    for p in tl.static_range((K + PART - 1) // PART):  # all are asked for before the first is used
        here = (p * PART + ks)[None, :]
        tiles = tiles + (tl.load(rows + here, mask=(vs < V)[:, None] & (here < K), other=0.0),)
        pasts = pasts + (tl.load(ring_k + entries[:, None] * K + here, mask=valid[:, None] & (here < K), other=0.0),)
    logs = tl.load(ring_g + entries, mask=valid, other=0.0)
    corrections = U.to(tl.float32) * tl.where(valid, tl.exp(after - logs), 0.0)[:, None]
    high, low = _parts(corrections, DTYPE)
    for p in tl.static_range(len(tiles)):
        here = (p * PART + ks)[None, :]
        if WIDE:
            whole = _outer(corrections, pasts[p].to(tl.float32), True, "tf32x3")
        else:
            whole = tl.dot(tl.trans(low), pasts[p], tl.dot(tl.trans(high), pasts[p]))
        whole = tl.fma(tiles[p].to(tl.float32), tl.exp(after), whole)
        own = tl.load(key + here, mask=here < K, other=0.0).to(tl.float32)
        whole = tl.fma(u[:, None], own, whole).to(base.dtype.element_ty)
        tl.store(rows + here, whole, mask=(vs < V)[:, None] & (here < K))


@triton.jit
def _sums_kernel(
    indices, q, k, a, b, A_log, dt_bias, ring_k, ring_g, starts, counts, factors, weights, scale, lower_bound,
    q_token, q_head, k_token, k_head, a_token, b_token,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BOUNDED: tl.constexpr,
    R: tl.constexpr, BL: tl.constexpr, DEPENDENT: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program: HEADS heads of q of one token: factors and weights of their value heads; key and decays to the ring.

    factors: [N, HV, 8] in fp32, β, those of S0 k and S0 q, that of u in the output, 1 / |k|, and the logarithm of the
    decay since S0 after this token. weights: [N, HV, 2, BL], of the ring's entries in S k and in S q.
    """
    n = tl.program_id(1).to(tl.int64)
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    slot, start, count, live = _turn(indices, starts, counts, n)
    room = live & (count < R)
    first = tl.program_id(0) * HEADS
    rows = tl.arange(0, HEADS * BL)
    j = rows % BL
    h = first + rows // BL
    valid = live & (j < count)
    entries = (start + j) % R
    place = (start + count) % R
    ring_k += slot * (HV // GROUP) * (R * K)
    pasts = ring_k + (h * R + entries)[:, None] * K
    lines = tl.arange(0, _ROWS)[:, None]
    at = tl.arange(0, _ROWS)[None, :]
    places = ring_k + ((first + lines // 2) * R + place) * K
    query = q + n * q_token + first * q_head
    key = k + n * k_token + first * k_head
    own = tl.zeros((_ROWS, _ROWS), tl.float32)
    sums = tl.zeros((HEADS * BL, _ROWS), tl.float32)
    for p in tl.static_range((K + BK - 1) // BK):
        ks = p * BK + tl.arange(0, BK)[None, :]
        past = tl.load(pasts + ks, mask=valid[:, None] & (ks < K), other=0.0)
        columns = _columns(query, key, q_head, k_head, p, HEADS, False, K, BK)
        own = _exact(columns, tl.trans(columns), own)
        sums = _exact(past, tl.trans(columns), sums)
        is_key = (lines % 2 == 0) & (lines < 2 * HEADS) & (ks < K)
        tl.store(places + ks, columns, mask=room & is_key)
    is_key = at == 2 * (rows // BL)[:, None]
    is_query = at == 2 * (rows // BL)[:, None] + 1
    squares = tl.sum(tl.where(lines == at, own, 0.0), 0)[None, :]
    crossed = tl.sum(tl.where(lines + 1 == at, own, 0.0), 0)[None, :]
    k_factor = inverse_norm(_where(squares, is_key))
    q_factor = inverse_norm(_where(squares, is_query)) * scale
    of_u = _where(crossed, is_query) * k_factor * q_factor
    with_key = _where(sums, is_key) * k_factor
    with_query = _where(sums, is_query) * q_factor
    for g in tl.static_range(GROUP):
        hv = h * GROUP + g
        head = n * HV + hv
        logs_of = ring_g + (slot * HV + hv) * R
        gate = tl.load(a + n * a_token + hv).to(tl.float32) + tl.load(dt_bias + hv).to(tl.float32)
        beta = tl.sigmoid(tl.load(b + n * b_token + hv).to(tl.float32))
        log_rate = tl.load(A_log + hv).to(tl.float32)
        before = tl.load(logs_of + (start + count + R - 1) % R, mask=live & (count > 0), other=0.0)
        logs = tl.load(logs_of + entries, mask=valid, other=0.0)
        decays = decay(gate, log_rate, lower_bound, BOUNDED)
        whole = tl.exp(before) * decays
        after = before + tl.log(tl.maximum(decays, _LEAST))
        since = tl.where(valid, tl.exp(before - logs) * decays, 0.0)
        tl.store(weights + head * (2 * BL) + j, with_key * since * beta)
        tl.store(weights + head * (2 * BL) + BL + j, with_query * since)
        made = tl.where(j == 0, beta, tl.where(j == 1, beta * k_factor * whole, q_factor * whole))
        made = tl.where(j == 3, of_u, tl.where(j == 4, k_factor, tl.where(j == 5, after, made)))
        tl.store(factors + head * _FACTORS + j, made, mask=j < 6)
        tl.store(logs_of + place, after, mask=room & (j == 0))


@triton.jit(do_not_specialize=["length"])
def _direct_kernel(
    state, indices, q, k, v, out, ring_u, ring_k, ring_g, starts, counts, flush, factors, weights, length, slot_stride,
    q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    POLICY: tl.constexpr, R: tl.constexpr, BL: tl.constexpr, FORCED: tl.constexpr, DEPENDENT: tl.constexpr,
    MATRIX: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one sequence, all K channels, after `_sums_kernel`."""
    n = tl.program_id(2).to(tl.int64)
    hv = tl.program_id(1)
    head = n * HV + hv
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    inside = vs < V
    slot, start, count, live = _turn(indices, starts, counts, n)
    base = state + slot * slot_stride + hv * (K * V)
    us, ks, gs = _ring_of(ring_u, ring_k, ring_g, slot, hv, GROUP, HV, K, V, R, False)
    js = tl.arange(0, BL)
    entries = (start + js) % R
    valid = live & (js < count)
    query = q + n * q_token + hv // GROUP * q_head
    key = k + n * k_token + hv // GROUP * k_head
    factors += head * _FACTORS
    weights += head * (2 * BL)
    if DEPENDENT:  # before the loads of the state: with one behind it the compiler first waits for what came before
        cuda.gdc_wait()
    S = _load_tile(base, vs, live, K, V, BK, True, V % BV == 0, POLICY)
    U = tl.load(us + entries[:, None] * V + vs[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
    value = tl.load(v + n * v_token + hv * v_head + vs, mask=inside, other=0.0).to(tl.float32)
    beta = tl.load(factors)
    of_u = tl.load(factors + 3)
    k_factor = tl.load(factors + 4)
    if MATRIX:
        columns = _pieces(query, key, K, BK)
        at = tl.arange(0, _ROWS)
        of_state = tl.load(factors + 1 + at, mask=at < 2, other=0.0)
        of_past = tl.load(weights + (at % 2)[None, :] * BL + js[:, None], mask=(at < 4)[None, :], other=0.0)
        with_key, with_query = _result(S, columns, U, of_past, of_state)
    else:
        Sk, Sq = _products(S, _wide(_channels(key, K, BK)), _wide(_channels(query, K, BK)), True)
        past = U.to(tl.float32)
        with_key = tl.load(factors + 1) * Sk + tl.sum(past * tl.load(weights + js)[:, None], 0)
        with_query = tl.load(factors + 2) * Sq + tl.sum(past * tl.load(weights + BL + js)[:, None], 0)
    u = _correction(out + head * V + vs, beta, value, with_key, with_query, of_u, k_factor, live, inside)
    if _is_written(flush, n, count, length, live, FORCED):
        _rebuilt(base, vs, U, u, key, ks, gs, entries, valid, tl.load(factors + 5), K, V, PART)
    else:
        tl.store(us + (start + count) % R * V + vs, u.to(ring_u.dtype.element_ty), mask=live & inside)


@triton.jit(do_not_specialize=["length"])
def _alone_kernel(
    state, indices, q, k, v, a, b, A_log, dt_bias, out, ring_u, ring_k, ring_g, starts, counts, flush,
    scale, lower_bound, length, slot_stride,
    q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BOUNDED: tl.constexpr, POLICY: tl.constexpr, R: tl.constexpr, BL: tl.constexpr, FORCED: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one sequence, all K channels."""
    n = tl.program_id(2).to(tl.int64)
    hv = tl.program_id(1)
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    inside = vs < V
    slot, start, count, live = _turn(indices, starts, counts, n)
    query = q + n * q_token + hv // GROUP * q_head
    key = k + n * k_token + hv // GROUP * k_head
    columns = _pieces(query, key, K, BK)  # asked for while the slot is
    gate = tl.load(a + n * a_token + hv).to(tl.float32) + tl.load(dt_bias + hv).to(tl.float32)
    beta = tl.sigmoid(tl.load(b + n * b_token + hv).to(tl.float32))
    log_rate = tl.load(A_log + hv).to(tl.float32)
    value = tl.load(v + n * v_token + hv * v_head + vs, mask=inside, other=0.0).to(tl.float32)
    base = state + slot * slot_stride + hv * (K * V)
    us, ks, gs = _ring_of(ring_u, ring_k, ring_g, slot, hv, GROUP, HV, K, V, R, False)
    js = tl.arange(0, BL)
    entries = (start + js) % R
    valid = live & (js < count)
    S = _load_tile(base, vs, live, K, V, BK, True, V % BV == 0, POLICY)
    pasts = _rows(ks, entries, valid, K, BK)
    U = tl.load(us + entries[:, None] * V + vs[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
    logs = tl.load(gs + entries, mask=valid, other=0.0)
    before = _logs(gs, (start + count + R - 1) % R, live & (count > 0), K, BK, False)
    own = tl.zeros((_ROWS, _ROWS), tl.float32)
    sums = tl.zeros((BL, _ROWS), tl.float32)
    for p in tl.static_range(len(columns)):
        own = _exact(columns[p], tl.trans(columns[p]), own)
        sums = _exact(pasts[p], tl.trans(columns[p]), sums)
    lines = tl.arange(0, _ROWS)[:, None]
    at = tl.arange(0, _ROWS)
    norms = inverse_norm(tl.sum(tl.where(lines == at[None, :], own, 0.0), 0))
    norms = tl.where(at % 2 == 0, norms, norms * scale)
    k_factor = tl.sum(tl.where(at == 0, norms, 0.0), 0)
    q_factor = tl.sum(tl.where(at == 1, norms, 0.0), 0)
    of_u = tl.sum(tl.sum(tl.where((lines == 0) & (at == 1)[None, :], own, 0.0), 0), 0) * k_factor * q_factor
    decays = (decay(gate, log_rate, lower_bound, BOUNDED),)
    after = _after(before, decays)
    factors = tl.where(at % 2 == 0, norms * beta, norms)
    since = tl.where(valid, tl.exp(before[0] - logs) * decays[0], 0.0)
    weights = sums * since[:, None] * factors[None, :]
    with_key, with_query = _result(S, columns, U, weights, factors * (tl.exp(before[0]) * decays[0]))
    u = _correction(out + (n * HV + hv) * V + vs, beta, value, with_key, with_query, of_u, k_factor, live, inside)
    if _is_written(flush, n, count, length, live, FORCED):
        _rebuilt(base, vs, U, u, key, ks, gs, entries, valid, after[0], K, V, PART)
    else:
        entry = (start + count) % R
        tl.store(us + entry * V + vs, u.to(ring_u.dtype.element_ty), mask=live & inside)
        of_all = live & (tl.program_id(0) == 0)
        _keep(ks, gs, entry, _channels(key, K, BK), after, of_all, hv % GROUP == 0, K, BK, False)


def decode(
    x: StepInputs, ring: Ring, length: int, flush: Tensor | None = None, choice: BufferedChoice | None = None
) -> Decode:
    """As `buffered.decode`, with choice.ahead in two launches, else in one.

    Raises its errors, and ValueError for what `check_direct` refuses.
    """
    choice = choice or choose(x)
    check_direct(x, choice)
    step = BufferedChoice(choice.step, registers=choice.registers)
    (launch,) = buffered.decode(x, ring, length, flush, step).launches
    args = dict(launch.args) | {"MATRIX": choice.matrix, "PART": PART}
    if not choice.ahead:
        return Decode((buffered._launch(_alone_kernel, launch.grid, args, launch.options),))
    N, H, K = x.q.shape
    heads = max(n for n in (1, 2, 4) if n == 1 or (H % n == 0 and n * args["BL"] <= ROWS_OF_KEYS))
    dependent = has_dependent_launch(x.state.device)
    args |= {"HEADS": heads, "DEPENDENT": dependent, **_space(x, args["BL"])}
    halves = {"BK": max(LEAST_OF_A_PRODUCT, triton.next_power_of_2(K) // 2)}
    warps = {"num_warps": max(1, heads * args["BL"] // LEAST_OF_A_PRODUCT), "maxnreg": SUMS_REGISTERS}
    options = dict(launch.options) | ({"launch_pdl": True} if dependent else {})
    return Decode(
        (
            buffered._launch(_sums_kernel, (H // heads, N), args | halves, warps),
            buffered._launch(_direct_kernel, launch.grid, args, options),
        )
    )


def _space(x: StepInputs, entries: int) -> dict[str, Tensor]:
    """Memory for what `_sums_kernel` makes."""
    new = {"dtype": torch.float32}
    factors = x.state.new_empty((*x.b.shape, _FACTORS.value), **new)
    return {"factors": factors, "weights": x.state.new_empty((*x.b.shape, 2, entries), **new)}


def choose(x: StepInputs) -> BufferedChoice:
    """The choice from dtypes and the number of value heads."""
    if x.state.dtype.itemsize == 2:
        ahead = x.b.numel() > ALONE
        step = buffered._fitting(StepChoice(64, 1, 4), x)
        return BufferedChoice(step, ahead=ahead, matrix=True, registers=80 if ahead else 96)
    return BufferedChoice(buffered._fitting(StepChoice(16, 4, 1), x), ahead=True, registers=128)


def objection(x: StepInputs) -> str:
    """Which inputs the kernels cannot take, and which they can; empty if they take these."""
    if x.a.ndim == 3:
        return "a has a gate of each channel (KDA); allowed directly: a gate of each head (GDN)"
    if not x.v_first:
        return "v_first is False; allowed directly: True"
    if x.q.dtype != x.k.dtype:
        return f"q is {x.q.dtype} and k is {x.k.dtype}; allowed directly: one dtype"
    return ""


def check_direct(x: StepInputs, choice: BufferedChoice) -> None:
    """Raise ValueError for inputs or a choice that the kernels cannot take."""
    if found := objection(x):
        raise ValueError(found)
    if not (choice.ahead or choice.matrix):
        raise ValueError("choice.ahead and choice.matrix are False; allowed in one launch: choice.matrix")
