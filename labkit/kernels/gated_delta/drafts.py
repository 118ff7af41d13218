"""Verify of drafts on a ring, all drafts of a sequence at once, by matrix instructions: the state takes part once.

`buffered.verify` takes T drafts one after the other, and multiplies the state with each one's key and query. Here
these are columns of one matrix. With S0 the state, k and q of the drafts, and U the corrections of the ring,

    [wk | wq] = S0 [k | q] · decays + U [weights]     of all drafts: two products, in which no draft needs another
    u = v - wk - L u,  o = wq + D u                   L: strictly triangular, T × T, of products of the drafts' keys

The second line is a triangular system whose inverse is the same for all values of V: it is made once a value head, by
a kernel before, and applied as a third product. A draft of a tree has in its row the drafts alone that it goes on from.

| kernel           | hypothesis                                                                                        |
|------------------|---------------------------------------------------------------------------------------------------|
| _prepare_kernel  | one program a head of q makes all products of keys and queries by matrix instructions, places the |
|                  | drafts in the ring, and inverts the system of each value head: T rows of 2 T numbers              |
| _drafts_kernel   | what is left to do for a value of the state is a share of one matrix instruction, so that the     |
|                  | time is that of reading the states, whatever T is                                                 |

| choice           | hypothesis                                                                                        |
|------------------|---------------------------------------------------------------------------------------------------|
| tile             | BV, values of V a program: each program reads the columns and the system again                    |
| pieces, num_warps, evict_first | as in `recurrent.py`                                                                |

Products of a state of 16 bits are exact; a state in fp32 goes as two parts in tf32, which keep 22 bits of it. What is
computed in fp32 goes as two parts of the dtype that it is multiplied with. Corrections are rounded once, as the ring
keeps them; here drafts read each other's unrounded. GDN alone: KDA's columns have a decay of each channel in them.

Sources: ReplaySSM in SGLang 0.5.23 has S0 [k | q] as matrix products; the inverse of the triangular system is the WY
form of DeltaNet (Yang et al., 2024), as in `chunked.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from labkit.kernels.checks import check_tensor
from labkit.kernels.gated_delta import buffered, recurrent
from labkit.kernels.gated_delta.buffered import _LEAST, Decode, DraftInputs, Ring, _turn
from labkit.kernels.gated_delta.gates import decay, inverse_norm
from labkit.kernels.gated_delta.recurrent import StepChoice, _load_tile
from labkit.kernels.target import has_dependent_launch

LEAST_COLUMNS = 16  # of a matrix product: eight drafts' keys and queries


@triton.jit
def _columns_of(
    q, k, n, h, T, piece, q_token, q_head, k_token, k_head,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """[C, BK]: channels of the drafts' keys, then of their queries, as they are in memory; 0 where there is none."""
    columns = tl.arange(0, C)
    draft = columns % (C // 2)
    ks = piece * BK + tl.arange(0, BK)
    inside = (draft < T)[:, None] & (ks < K)[None, :]
    is_key = (columns < C // 2)[:, None]
    at = n * T + draft
    keys = tl.load(k + (at * k_token + h * k_head)[:, None] + ks[None, :], mask=inside & is_key, other=0.0)
    queries = tl.load(q + (at * q_token + h * q_head)[:, None] + ks[None, :], mask=inside & ~is_key, other=0.0)
    return tl.where(is_key, keys, queries.to(keys.dtype))


@triton.jit
def _go_on_from(parents, n, T, C: tl.constexpr, TREE: tl.constexpr):
    """[C, C/2]: whether the draft of a column lies before that of a row, which sees what it added."""
    rows = tl.arange(0, C) % (C // 2)
    columns = tl.arange(0, C // 2)[None, :]
    if TREE:
        before = tl.zeros((C, C // 2), tl.int1)
        draft = tl.where(rows < T, rows, -1)
        for _ in range(T - 1):
            draft = tl.load(parents + n * T + draft, mask=draft >= 0, other=-1).to(tl.int32)
            before = before | (draft[:, None] == columns)
        return before
    else:
        return columns < rows[:, None]


@triton.jit
def _inverse(E, T, C: tl.constexpr):
    """The first C/2 columns of (I + E)⁻¹ of E [C, C/2], whose other columns are 0; strictly lower triangular."""
    rows = tl.arange(0, C)[:, None]
    columns = tl.arange(0, C // 2)[None, :]
    found = tl.where(rows == columns, 1.0, 0.0)
    for t in range(T):
        row = tl.sum(tl.where(rows == t, found, 0.0), 0)
        found -= tl.sum(tl.where(columns == t, E, 0.0), 1)[:, None] * row[None, :]
    return found


@triton.jit(do_not_specialize=["T"])
def _prepare_kernel(
    indices, q, k, a, b, A_log, dt_bias, ring_k, ring_g, starts, counts, parents, systems, scale, lower_bound, T,
    q_token, q_head, k_token, k_head, a_token, b_token,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BOUNDED: tl.constexpr,
    R: tl.constexpr, BL: tl.constexpr, C: tl.constexpr, DEPENDENT: tl.constexpr, TREE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the drafts of one sequence and one head of q, placed in the ring, and `systems` of its value heads.

    systems: [N, HV, C/2 + 1 + BL, C] in fp32. Of a value head the first C/2 rows give, from v - wk of a draft, what
    the ring keeps of every draft and, in the other columns, what its output gains; the next row is the factor of S0
    times a key or query; the others are the weights of the ring's entries.
    """
    n = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0)
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    slot, start, count, live = _turn(indices, starts, counts, n)
    HALF: tl.constexpr = C // 2
    rows = tl.arange(0, C)
    draft = rows % HALF
    is_key = rows < HALF
    given = draft < T
    columns = tl.arange(0, HALF)
    ring_k += (slot * (HV // GROUP) + h) * (R * K)
    js = tl.arange(0, BL)
    accepted = live & (js < count)
    entries = (start + js) % R
    places = (start + count + draft) % R
    with_ring = tl.zeros((BL, C), tl.float32)
    with_own = tl.zeros((C, C), tl.float32)
    with_keys = tl.zeros((C, HALF), tl.float32)
    for p in tl.static_range((K + BK - 1) // BK):
        ks = p * BK + tl.arange(0, BK)
        own = _columns_of(q, k, n, h, T, p, q_token, q_head, k_token, k_head, K, BK, C)
        inside = accepted[:, None] & (ks < K)[None, :]
        past = tl.load(ring_k + entries[:, None] * K + ks[None, :], mask=inside, other=0.0)
        inside = (columns < T)[:, None] & (ks < K)[None, :]
        keys = tl.load(k + ((n * T + columns) * k_token + h * k_head)[:, None] + ks[None, :], mask=inside, other=0.0)
        with_ring = tl.dot(past, tl.trans(own), with_ring, input_precision=PRECISION)
        with_own = tl.dot(own, tl.trans(own), with_own, input_precision=PRECISION)
        with_keys = tl.dot(own, tl.trans(keys), with_keys, input_precision=PRECISION)
        target = ring_k + places[:, None] * K + ks[None, :]
        tl.store(target, own, mask=(live & is_key & given)[:, None] & (ks < K)[None, :])
    itself = draft[:, None] == columns[None, :]
    squares = tl.sum(tl.where(rows[:, None] == rows[None, :], with_own, 0.0), 1)
    factor = inverse_norm(squares) * tl.where(is_key, 1.0, scale)
    of_key = inverse_norm(tl.sum(tl.where(itself & is_key[:, None], with_keys, 0.0), 0))
    before = _go_on_from(parents, n, T, C, TREE) & given[:, None]
    seen = before | itself
    for i in tl.static_range(GROUP):
        hv = h * GROUP + i
        log_rate = tl.load(A_log + hv).to(tl.float32)
        bias = tl.load(dt_bias + hv).to(tl.float32)
        gates = tl.load(a + (n * T + columns) * a_token + hv, mask=columns < T, other=0.0).to(tl.float32)
        own_log = tl.log(tl.maximum(decay(gates + bias, log_rate, lower_bound, BOUNDED), _LEAST))
        own_log = tl.where(columns < T, own_log, 0.0)
        beta = tl.sigmoid(tl.load(b + (n * T + draft) * b_token + hv, mask=given, other=0.0).to(tl.float32))
        of_value = tl.sigmoid(tl.load(b + (n * T + columns) * b_token + hv, mask=columns < T, other=0.0).to(tl.float32))
        logs = ring_g + (slot * HV + hv) * R
        last = tl.load(logs + (start + count + R - 1) % R, mask=live & (count > 0), other=0.0)
        since = tl.sum(tl.where(seen, own_log[None, :], 0.0), 1) + last
        of_column = tl.sum(tl.where(itself & is_key[:, None], since[:, None], 0.0), 0)
        tl.store(logs + places, since, mask=live & is_key & given)
        # What a draft's row takes of the corrections of those before it; an output takes its own draft's, too.
        apart = tl.exp(tl.where(before, since[:, None] - of_column[None, :], 0.0))
        takes = before | (itself & ~is_key[:, None])
        taken = tl.where(takes, with_keys * apart, 0.0) * factor[:, None] * of_key[None, :]
        inverse = _inverse(taken * tl.where(is_key, beta, -1.0)[:, None], T, C)
        # Of v - wk first β is to be taken; what the ring keeps is over the key's norm.
        inverse = inverse * of_value[None, :] * tl.where(is_key, factor, 1.0)[:, None]
        system = systems + (n * HV + hv) * ((HALF + 1 + BL) * C)
        tl.store(system + columns[None, :] * C + rows[:, None], inverse)
        tl.store(system + HALF * C + rows, tl.exp(since) * factor)
        past_logs = tl.load(logs + entries, mask=accepted, other=0.0)
        away = tl.exp(tl.where(accepted[:, None], since[None, :] - past_logs[:, None], 0.0))
        weights = tl.where(accepted[:, None], with_ring * away * factor[None, :], 0.0)
        tl.store(system + (HALF + 1 + js)[:, None] * C + rows[None, :], weights)


@triton.jit
def _times(S, columns, sums, V_FIRST: tl.constexpr):
    """sums + S columns, of a piece of the state and columns [C, BK]. Exact, but a state in fp32 keeps 22 bits."""
    tile = S if V_FIRST else tl.trans(S)
    if S.dtype == columns.dtype and S.dtype != tl.float32:
        return tl.dot(tile, tl.trans(columns), sums)
    elif columns.dtype == tl.float32:
        return tl.dot(tile.to(tl.float32), tl.trans(columns), sums, input_precision="tf32x3")
    else:
        wide = tl.trans(columns).to(tl.float32)
        tile = tile.to(tl.float32)
        if S.dtype == tl.float32:
            bits = tile.to(tl.int32, bitcast=True) & -8192  # the 10 bits of tf32
            high = bits.to(tl.float32, bitcast=True)
            sums = tl.dot(high, wide, sums, input_precision="tf32")
            tile = tile - high
        return tl.dot(tile, wide, sums, input_precision="tf32")


@triton.jit
def _with_parts(x, y, sums):
    """sums + x y. y: in fp32, which goes as two of x's dtype."""
    if x.dtype == tl.float32:
        return tl.dot(x, y, sums, input_precision="tf32x3")
    else:
        high = y.to(x.dtype)
        sums = tl.dot(x, high, sums)
        return tl.dot(x, (y - high.to(tl.float32)).to(x.dtype), sums)


@triton.jit
def _solved(sums, U, weights, value, solved, is_key, HALF: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    """What the ring keeps of every draft, and their outputs, [BV, C]; see `_prepare_kernel`."""
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


@triton.jit(do_not_specialize=["T"])
def _drafts_kernel(
    state, indices, q, k, v, out, ring_u, starts, counts, systems, slot_stride, T,
    q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, POLICY: tl.constexpr, R: tl.constexpr, BL: tl.constexpr, C: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of all drafts of one sequence."""
    HALF: tl.constexpr = C // 2
    DTYPE: tl.constexpr = ring_u.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 == DTYPE or out.dtype.element_ty == tl.float32
    n = tl.program_id(2).to(tl.int64)
    hv = tl.program_id(1)
    h = hv // GROUP
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    slot, start, count, live = _turn(indices, starts, counts, n)
    S = _load_tile(state + slot * slot_stride + hv * (K * V), vs, live, K, V, BK, V_FIRST, V % BV == 0, POLICY)
    ring_u += (slot * HV + hv) * (R * V)
    js = tl.arange(0, BL)
    columns = tl.arange(0, C)
    draft = columns % HALF
    is_key = (columns < HALF)[None, :]
    wanted = (draft < T)[None, :] & (vs < V)[:, None]
    inside = (live & (vs < V))[:, None] & (js < count)[None, :]
    U = tl.load(ring_u + ((start + js) % R)[None, :] * V + vs[:, None], mask=inside, other=0.0)
    at = n * T + draft
    values = v + (at * v_token + hv * v_head)[None, :] + vs[:, None]
    value = tl.load(values, mask=wanted & is_key, other=0.0)
    sums = tl.zeros((BV, C), tl.float32)
    for p in tl.static_range(len(S)):
        tile = _columns_of(q, k, n, h, T, p, q_token, q_head, k_token, k_head, K, BK, C)
        sums = _times(S[p], tile, sums, V_FIRST)
    if DEPENDENT:
        cuda.gdc_wait()
    system = systems + (n * HV + hv) * ((HALF + 1 + BL) * C)
    of_state = tl.load(system + HALF * C + columns)
    weights = tl.load(system + (HALF + 1 + js)[:, None] * C + columns[None, :])
    rows = columns[:, None]
    solved = tl.load(system + rows * C + columns[None, :], mask=rows < HALF, other=0.0)
    found = _solved(sums * of_state[None, :], U, weights, value, solved, is_key, HALF, C, WIDE)
    kept = ring_u + ((start + count + draft) % R)[None, :] * V + vs[:, None]
    tl.store(kept, found.to(DTYPE), mask=live & wanted & is_key)
    outputs = out + (at * HV + hv)[None, :] * V + vs[:, None]
    tl.store(outputs, tl.where(live, found, 0.0).to(out.dtype.element_ty), mask=wanted & ~is_key)


def verify(x: DraftInputs, ring: Ring, choice: StepChoice | None = None) -> Decode:
    """As `buffered.verify`, with all drafts at once: two launches. Raises its errors, and ValueError for KDA."""
    N, T, H, K, HV, V = recurrent._check_common(x, "N, T")
    check_drafts(x, ring)
    step = choice or buffered._fitting(StepChoice(64, 1, 4), x)
    buffered.check_choice(buffered.BufferedChoice(step), x, ring)
    columns, entries = max(LEAST_COLUMNS, 2 * triton.next_power_of_2(T)), buffered._entries(ring)
    systems = _systems(x, entries, columns)
    dependent = has_dependent_launch(x.state.device)
    shared = recurrent._arguments(x, step, False) | buffered._ring_arguments(ring) | {
        "parents": x.parents if x.parents is not None else ring.counts, "T": T, "R": ring.entries, "BL": entries,
        "C": columns, "DEPENDENT": dependent, "TREE": x.parents is not None, "systems": systems,
        "PRECISION": "tf32x3" if x.k.dtype == torch.float32 else None,
    }  # fmt: skip
    options = {"num_warps": step.num_warps} | ({"launch_pdl": True} if dependent else {})
    whole = shared | {"BK": triton.next_power_of_2(K)}
    return Decode(
        (
            buffered._launch(_prepare_kernel, (H, N), whole, {"num_warps": 1}),
            buffered._launch(_drafts_kernel, (triton.cdiv(V, step.tile), HV, N), shared, options),
        )
    )


def check_drafts(x: DraftInputs, ring: Ring) -> None:
    """Raise ValueError for drafts that cannot be verified at once."""
    N, T = x.q.shape[:2]
    if x.a.ndim == 4:
        raise ValueError("a has a gate of each channel (KDA); allowed with all drafts at once: one a value head (GDN)")
    if x.q.dtype != x.k.dtype:
        raise ValueError(f"q is {x.q.dtype} and k is {x.k.dtype}; allowed with all drafts at once: one dtype")
    buffered.check_ring(x, ring, N, False)
    if ring.entries < T:
        raise ValueError(f"q has {T} drafts a sequence; allowed: up to the ring's {ring.entries} entries")
    if x.parents is not None:
        check_tensor("parents", x.parents, (N, T), recurrent.INDEX_DTYPES, x.state.device, recurrent.OWNER)


def _systems(x: DraftInputs, entries: int, columns: int) -> Tensor:
    """Memory for what is prepared of each value head."""
    N, HV = len(x.indices), x.v.shape[-2]
    return x.state.new_empty((N, HV, columns // 2 + 1 + entries, columns), dtype=torch.float32)
