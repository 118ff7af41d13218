"""Decode of the gated delta rule that seldom writes its state: the last tokens wait in a ring beside it.

A state S0 is read at every token and written once in L of them. What the tokens since then have added is kept as it
was computed: for each its key k, its correction u and the decay since S0. With a ring of m entries,

    S = A S0 + Σ_j u_j (W_j ∘ k_j)ᵀ     A: decay since S0, W_j: decay since entry j (KDA: one a channel)

A token needs S only in two products, with k and with q, so that S need not be rebuilt: S0 (A ∘ k), m dot products of
keys, and a sum of m corrections. Only a token that writes the state rebuilds it: every L-th, or when `flush` says so.

| choice    | hypothesis                                                                                               |
|-----------|----------------------------------------------------------------------------------------------------------|
| length    | L: a longer ring writes the state more seldom and reads more entries: least bytes at √(state / entry)    |
| tile      | BV, values of V a program: each program multiplies all keys of the ring, so that a narrow tile reads     |
|           | them again and again; a wide one has fewer programs to hide its latency                                  |
| ahead     | a kernel before it multiplies the ring's keys, once for all values of V and all value heads of a key:    |
|           | programs of the step have fewer instructions and registers, so that more bytes are under way; it starts  |
|           | while the other runs                                                                                     |
| matrix    | S0 times k and q by matrix instructions: a state of 16 bits need not be converted value by value, which  |
|           | is what a step on bf16 states is bound by where memory is fast; the state is rebuilt by them, too        |
| registers | a token that writes the state, one in L, needs most; it may spill some, so that all others leave room    |
|           | for more programs                                                                                        |
| pieces, num_warps, evict_first | as in `recurrent.py`                                                                |

Tried on an H100 and slower: states written by a kernel of their own, whose programs are dealt the few sequences that
need it; one program for all values of a head, its tiles loaded ahead; the state rebuilt from a second read.

`verify` runs T drafts a sequence on the ring and stores no state: each draft is an entry behind those that are
accepted, and accepting drafts is moving a position. In a tree a draft sees the entries of its ancestors alone, and
`accept` moves those of the accepted path together. A ring without room for the next drafts is emptied by `write`.

What is rounded: k is kept as it came, u in the ring's dtype, the decay since S0 as a logarithm in fp32. Sources:
ReplaySSM in SGLang 0.5.23 and vLLM pull requests 48792 and 49887, which rebuild the state at every token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from labkit.kernels.checks import check_tensor
from labkit.kernels.gated_delta import recurrent
from labkit.kernels.gated_delta.gates import decay
from labkit.kernels.gated_delta.recurrent import (
    Inputs,
    StepChoice,
    StepInputs,
    _channels,
    _gate_inputs,
    _load,
    _load_tile,
    _load_token,
    _prepare,
    _store,
    _store_tile,
)
from labkit.kernels.launch import Launch
from labkit.kernels.target import has_dependent_launch, multiprocessors

RING_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ENTRIES = 64
NARROW = {1: (32, 4, 1), 2: (64, 4, 2)}  # tile, pieces and warps by the bytes of a state's value, which is converted
HARDLY_ANY_HEADS, FEW_HEADS, SOME_HEADS = 0.5, 3, 16  # value heads a multiprocessor has
LEAST_OF_A_PRODUCT = 16  # rows, columns and summands of a matrix product in Triton
_FACTORS = tl.constexpr(5)
_LEAST = tl.constexpr(1e-37)  # of a decay whose logarithm is kept: below, nothing of the state is left


@triton.jit
def _ring_of(
    ring_u, ring_k, ring_g, slot, hv,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, KDA: tl.constexpr,
):  # fmt: skip
    """Where the entries of one value head of a slot begin."""
    ring_u += (slot * HV + hv) * (R * V)
    ring_k += (slot * (HV // GROUP) + hv // GROUP) * (R * K)
    ring_g += (slot * HV + hv) * (R * K if KDA else R)
    return ring_u, ring_k, ring_g


@triton.jit
def _rows(pointers, entries, valid, K: tl.constexpr, BK: tl.constexpr):
    """Pieces [BL, BK] of the entries' rows of K values: their keys, or KDA's logarithms of decay."""
    ks = tl.arange(0, BK)
    found = ()
    for p in tl.static_range((K + BK - 1) // BK):
        mask = valid[:, None] & (p * BK + ks < K)[None, :]
        found = found + (tl.load(pointers + entries[:, None] * K + (p * BK + ks)[None, :], mask=mask, other=0.0),)
    return found


@triton.jit
def _logs(ring_g, entry, live, K: tl.constexpr, BK: tl.constexpr, KDA: tl.constexpr):
    """Logarithm of the decay from S0 to an entry, 0 if not live: a tuple of a scalar (GDN) or of pieces [BK] (KDA)."""
    if KDA:
        ks = tl.arange(0, BK)
        found = ()
        for p in tl.static_range((K + BK - 1) // BK):
            found = found + (tl.load(ring_g + entry * K + p * BK + ks, mask=live & (p * BK + ks < K), other=0.0),)
        return found
    else:
        return (tl.load(ring_g + entry, mask=live, other=0.0),)


@triton.jit
def _exp(values):
    found = ()
    for p in tl.static_range(len(values)):
        found = found + (tl.exp(values[p]),)
    return found


@triton.jit
def _times(values, factors):
    found = ()
    for p in tl.static_range(len(values)):
        found = found + (values[p] * factors[p],)
    return found


@triton.jit
def _after(before, decays):
    """Logarithms of the decay since S0 after one more token."""
    found = ()
    for p in tl.static_range(len(decays)):
        found = found + (before[p] + tl.log(tl.maximum(decays[p], _LEAST)),)
    return found


@triton.jit
def _key_sums(token, ring_k, entries, valid, K: tl.constexpr, BK: tl.constexpr):
    """The ring's keys times a token's key and query, as they are in memory, [BL] each."""
    ring_keys = _rows(ring_k, entries, valid, K, BK)
    with_key = tl.zeros_like(ring_keys[0]).to(tl.float32)
    with_query = with_key
    for p in tl.static_range(len(ring_keys)):
        past = ring_keys[p].to(tl.float32)
        with_key += past * token[1][p].to(tl.float32)[None, :]
        with_query += past * token[0][p].to(tl.float32)[None, :]
    return tl.sum(with_key, 1), tl.sum(with_query, 1)


@triton.jit
def _prepared(
    token, sums, bias, log_rate, scale, lower_bound, ring_k, ring_g, entries, valid, totals,
    K: tl.constexpr, BK: tl.constexpr, KDA: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """What all values of V of one token share: (factors, keys, queries, of_key, of_query, decays).

    With S0 k = Σ keys ∘ S0 and U the corrections of the ring, u = factors[0] v - factors[1] S0 k - Σ_j of_key[j] U[j],
    o = factors[2] S0 q + Σ_j of_query[j] U[j] + factors[3] u; factors[4] u is what the ring keeps. of_key, of_query:
    [BL]. keys, queries: pieces [BK]; for KDA the decay since S0 is in them, for GDN in the factors. sums: `_key_sums`
    for GDN, whose value heads share them; KDA's decays are of one value head.
    """
    queries, keys, decays, q_factor, k_factor, kq, beta = _prepare(token, log_rate, bias, scale, lower_bound, BOUNDED)
    if KDA:
        ring_keys = _rows(ring_k, entries, valid, K, BK)
        logs = _rows(ring_g, entries, valid, K, BK)
        own_keys = _times(keys, decays)
        own_queries = _times(queries, decays)
        with_key = tl.zeros_like(ring_keys[0]).to(tl.float32)
        with_query = with_key
        for p in tl.static_range(len(ring_keys)):
            past = ring_keys[p].to(tl.float32) * tl.exp(totals[p][None, :] - logs[p])
            with_key += past * own_keys[p][None, :]
            with_query += past * own_queries[p][None, :]
        since = _exp(totals)
        keys = _times(own_keys, since)
        queries = _times(own_queries, since)
        weight = tl.where(valid, 1.0, 0.0)
        whole = 1.0
        of_key = tl.sum(with_key, 1)
        of_query = tl.sum(with_query, 1)
    else:
        logs = tl.load(ring_g + entries, mask=valid, other=0.0)
        weight = tl.where(valid, tl.exp(totals[0] - logs) * decays[0], 0.0)
        whole = tl.exp(totals[0]) * decays[0]
        of_key, of_query = sums
    taken = beta * k_factor
    factors = (beta, taken * whole, q_factor * whole, kq, k_factor)
    return factors, keys, queries, of_key * weight * taken, of_query * weight * q_factor, decays


@triton.jit
def _keep(ring_k, ring_g, entry, raw_keys, logs, live, of_key, K: tl.constexpr, BK: tl.constexpr, KDA: tl.constexpr):
    """A token's key and decay as an entry. of_key: whether this program writes the key, which value heads share."""
    ks = tl.arange(0, BK)
    for p in tl.static_range(len(raw_keys)):
        inside = live & (p * BK + ks < K)
        tl.store(ring_k + entry * K + p * BK + ks, raw_keys[p].to(ring_k.dtype.element_ty), mask=inside & of_key)
        if KDA:
            tl.store(ring_g + entry * K + p * BK + ks, logs[p], mask=inside)
    if not KDA:
        tl.store(ring_g + entry, logs[0], mask=live)


@triton.jit
def _products(S, keys, queries, V_FIRST: tl.constexpr):
    """S0 times key and query, [BV] each, in fp32."""
    K_AXIS: tl.constexpr = 1 if V_FIRST else 0
    V_AXIS: tl.constexpr = 1 - K_AXIS
    Sk = tl.zeros_like(S[0]).to(tl.float32)
    Sq = Sk
    for p in tl.static_range(len(S)):
        tile = S[p].to(tl.float32)
        Sk += tile * tl.expand_dims(keys[p], V_AXIS)
        Sq += tile * tl.expand_dims(queries[p], V_AXIS)
    return tl.sum(Sk, K_AXIS), tl.sum(Sq, K_AXIS)


@triton.jit
def _columns(first, second, third, fourth, DTYPE: tl.constexpr):
    """[.., 16] of DTYPE: four vectors [..] as its first columns, each of the last two as a high and a low part."""
    columns = tl.arange(0, 16)[None, :]
    found = tl.where(columns == 0, first.to(tl.float32)[:, None], 0.0)
    found = tl.where(columns == 1, second.to(tl.float32)[:, None], found)
    third_high = third.to(DTYPE).to(tl.float32)
    fourth_high = fourth.to(DTYPE).to(tl.float32)
    found = tl.where(columns == 2, third_high[:, None], found)
    found = tl.where(columns == 3, (third - third_high)[:, None], found)
    found = tl.where(columns == 4, fourth_high[:, None], found)
    return tl.where(columns == 5, (fourth - fourth_high)[:, None], found).to(DTYPE)


@triton.jit
def _matrix_sums(S, U, keys, queries, of_Sk, of_Sq, of_key, of_query, KDA: tl.constexpr):
    """of_Sk S0 k + Σ_j of_key[j] U[j], and the same of q, [BV] each, by matrix instructions. S: pieces [BV, BK].

    S0, U, k and q are of one dtype of 16 bits, products of which are exact. What is fp32 (the ring's weights, KDA's k
    and q with their decays) goes as two of that dtype, which keep at least 16 bits of it.
    """
    none = tl.zeros_like(keys[0]).to(tl.float32)
    sums = tl.zeros((S[0].shape[0], 16), tl.float32)
    for p in tl.static_range(len(S)):
        if KDA:
            sums = tl.dot(S[p], _columns(none, none, keys[p], queries[p], S[0].dtype), sums)
        else:
            sums = tl.dot(S[p], _columns(keys[p], queries[p], none, none, S[0].dtype), sums)
    empty = tl.zeros_like(of_key)
    columns = tl.arange(0, 16)[None, :]
    with_key = (columns == 2) | (columns == 3)
    with_query = (columns == 4) | (columns == 5)
    if KDA:
        sums = sums * tl.where(with_key, of_Sk, of_Sq)
    sums = tl.dot(tl.trans(U), _columns(empty, empty, of_key, of_query, S[0].dtype), sums)
    of_k = tl.where(columns == 0, of_Sk, tl.where(with_key, 1.0, 0.0))
    of_q = tl.where(columns == 1, of_Sq, tl.where(with_query, 1.0, 0.0))
    return tl.sum(sums * of_k, 1), tl.sum(sums * of_q, 1)


@triton.jit
def _plus_outer(S, u, keys, V_FIRST: tl.constexpr):
    """S + u kᵀ. u: [BV], keys: pieces [BK]."""
    V_AXIS: tl.constexpr = 0 if V_FIRST else 1
    found = ()
    for p in tl.static_range(len(S)):
        found = found + (tl.fma(tl.expand_dims(u, 1 - V_AXIS), tl.expand_dims(keys[p].to(tl.float32), V_AXIS), S[p]),)
    return found


@triton.jit
def _parts(x, DTYPE: tl.constexpr):
    """x in fp32 as the sum of two of DTYPE, of 16 bits, which keep at least 16 bits of it."""
    high = x.to(DTYPE)
    return high, (x - high.to(tl.float32)).to(DTYPE)


@triton.jit
def _outer(U, past, V_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """Σ_j U[j] past[j]ᵀ of U [BL, BV] and past [BL, BK]: [BV, BK], or turned."""
    if V_FIRST:
        return tl.dot(tl.trans(U), past, input_precision=PRECISION)
    else:
        return tl.dot(tl.trans(past), U, input_precision=PRECISION)


@triton.jit
def _with_ring(
    S, U, ring_k, ring_g, entries, valid, logs,
    K: tl.constexpr, BK: tl.constexpr, V_FIRST: tl.constexpr, KDA: tl.constexpr,
):  # fmt: skip
    """The state with its decay and all entries of the ring, as pieces in fp32.

    By matrix instructions, whose products of 16 bits are exact: what has a decay in it goes as two parts.
    """
    V_AXIS: tl.constexpr = 0 if V_FIRST else 1
    WIDE: tl.constexpr = U.dtype == tl.float32 or ring_k.dtype.element_ty == tl.float32
    DTYPE: tl.constexpr = tl.float32 if WIDE else ring_k.dtype.element_ty
    pasts = _rows(ring_k, entries, valid, K, BK)
    found = ()
    if KDA:
        before = _rows(ring_g, entries, valid, K, BK)
        corrections = U.to(DTYPE)
        for p in tl.static_range(len(S)):
            past = pasts[p].to(tl.float32) * tl.exp(tl.where(valid[:, None], logs[p][None, :] - before[p], 0.0))
            if WIDE:
                added = _outer(corrections, past, V_FIRST, "tf32x3")
            else:
                high, low = _parts(past, DTYPE)
                added = _outer(corrections, high, V_FIRST, None) + _outer(corrections, low, V_FIRST, None)
            found = found + (tl.fma(S[p].to(tl.float32), tl.expand_dims(tl.exp(logs[p]), V_AXIS), added),)
    else:
        before = tl.load(ring_g + entries, mask=valid, other=0.0)
        corrections = U.to(tl.float32) * tl.exp(tl.where(valid, logs[0] - before, 0.0))[:, None]
        high, low = _parts(corrections, DTYPE)
        for p in tl.static_range(len(S)):
            if WIDE:
                added = _outer(corrections, pasts[p].to(tl.float32), V_FIRST, "tf32x3")
            else:
                added = _outer(high, pasts[p], V_FIRST, None) + _outer(low, pasts[p], V_FIRST, None)
            found = found + (tl.fma(S[p].to(tl.float32), tl.exp(logs[0]), added),)
    return found


@triton.jit
def _plus_entry(
    S, entry, vs, live, ring_u, ring_k, ring_g, logs,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, V_FIRST: tl.constexpr, KDA: tl.constexpr,
):  # fmt: skip
    """S and what one entry of the ring adds to it. logs: of the decay since S0 that S is to have."""
    ks = tl.arange(0, BK)
    u = tl.load(ring_u + entry * V + vs, mask=live & (vs < V), other=0.0).to(tl.float32)
    keys = ()
    for p in tl.static_range(len(S)):
        inside = p * BK + ks < K
        key = tl.load(ring_k + entry * K + p * BK + ks, mask=inside, other=0.0).to(tl.float32)
        if KDA:
            log = tl.load(ring_g + entry * K + p * BK + ks, mask=inside, other=0.0)
            key = key * tl.exp(logs[p] - tl.where(inside, log, logs[p]))
        keys = keys + (key,)
    if not KDA:
        log = tl.load(ring_g + entry)
        u = u * tl.exp(logs[0] - log)
    return _plus_outer(S, u, keys, V_FIRST)


@triton.jit
def _with_entries(
    S, start, count, vs, live, ring_u, ring_k, ring_g, logs,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, V_FIRST: tl.constexpr, KDA: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """As `_with_ring`, one entry after the other, which takes hardly more registers than S itself."""
    V_AXIS: tl.constexpr = 0 if V_FIRST else 1
    found = ()
    for p in tl.static_range(len(S)):
        if KDA:
            found = found + (S[p].to(tl.float32) * tl.expand_dims(tl.exp(logs[p]), V_AXIS),)
        else:
            found = found + (S[p].to(tl.float32) * tl.exp(logs[0]),)
    for j in range(0, count):
        found = _plus_entry(found, (start + j) % R, vs, live, ring_u, ring_k, ring_g, logs, K, V, BK, V_FIRST, KDA)
    return found


@triton.jit
def _turn(indices, starts, counts, n):
    """Slot (64-bit) of a sequence, first entry of its ring, how many there are, and False if it is padding.

    Of padding neither pool nor ring is touched, and the output is zero.
    """
    slot = tl.load(indices + n).to(tl.int64)
    return slot, tl.load(starts + n), tl.load(counts + n), slot >= 0


@triton.jit(do_not_specialize=["length"])
def _ahead_kernel(
    indices, q, k, a, b, A_log, dt_bias, ring_k, ring_g, starts, counts, parents, factors, vectors, weights,
    scale, lower_bound, length, T, q_token, q_head, k_token, k_head, a_token, b_token,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    KDA: tl.constexpr, BOUNDED: tl.constexpr, R: tl.constexpr, BL: tl.constexpr, DEPENDENT: tl.constexpr,
    DRAFTS: tl.constexpr, TREE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One program: `_prepared` of TOGETHER value heads of one token, and, but for DRAFTS, its key and decays.

    Those go into the ring. TOGETHER: 1, or all value heads of a head of q, whose products of keys are then made once.

    Drafts are in the ring already, behind its `counts` entries. They see those, and the drafts that they go on from.
    """
    at = tl.program_id(1).to(tl.int64)
    n = at // T
    first = tl.program_id(0) * TOGETHER
    h = first // GROUP
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    slot, start, count, live = _turn(indices, starts, counts, n)
    ring_k += (slot * (HV // GROUP) + h) * (R * K)
    js = tl.arange(0, BL)
    valid = js < count
    before = count - 1  # the entry that this token goes on from
    if DRAFTS:
        if TREE:
            draft = tl.load(parents + at).to(tl.int32)
            before = tl.where(draft < 0, before, count + draft)
            while draft >= 0:
                valid = valid | (js == count + draft)
                draft = tl.load(parents + n * T + draft).to(tl.int32)
        else:
            before += (at % T).to(tl.int32)
            valid = js <= before
    valid = valid & live
    entries = (start + js) % R
    queries = _channels(q + at * q_token + h * q_head, K, BK)
    raw_keys = _channels(k + at * k_token + h * k_head, K, BK)
    sums = (0.0, 0.0)
    if not KDA:
        sums = _key_sums((queries, raw_keys), ring_k, entries, valid, K, BK)
    for i in tl.static_range(TOGETHER):
        hv = first + i
        token = (queries, raw_keys, _gate_inputs(a + at * a_token, hv, K, BK, KDA), tl.load(b + at * b_token + hv))
        bias = _gate_inputs(dt_bias, hv, K, BK, KDA)
        log_rate = tl.load(A_log + hv).to(tl.float32)
        logs_of = ring_g + (slot * HV + hv) * (R * K if KDA else R)
        totals = _logs(logs_of, (start + before + R) % R, live & (before >= 0), K, BK, KDA)
        shared, keys, asked, of_key, of_query, decays = _prepared(
            token, sums, bias, log_rate, scale, lower_bound, ring_k, logs_of, entries, valid, totals,
            K, BK, KDA, BOUNDED,
        )  # fmt: skip
        head = at * HV + hv
        for f in tl.static_range(len(shared)):
            tl.store(factors + head * _FACTORS + f, shared[f])
        tl.store(weights + head * (2 * BL) + js, of_key)
        tl.store(weights + head * (2 * BL) + BL + js, of_query)
        if KDA:
            ks = tl.arange(0, BK)
            for p in tl.static_range(len(keys)):
                vector = vectors + head * (2 * K) + p * BK + ks
                tl.store(vector, keys[p], mask=p * BK + ks < K)
                tl.store(vector + K, asked[p], mask=p * BK + ks < K)
        if not DRAFTS:  # an entry behind the last: a token that writes the state has none, and nobody will count it
            room = live & (count < R)
            entry = (start + count) % R
            _keep(ring_k, logs_of, entry, raw_keys, _after(totals, decays), room, hv % GROUP == 0, K, BK, KDA)


@triton.jit
def _ahead_of(
    factors, vectors, weights, token, head, K: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, KDA: tl.constexpr
):
    """What `_ahead_kernel` has of a value head of a token: factors, keys, queries, of_key, of_query."""
    js = tl.arange(0, BL)
    of_key = tl.load(weights + head * (2 * BL) + js)
    of_query = tl.load(weights + head * (2 * BL) + BL + js)
    if KDA:
        keys = _channels(vectors + head * (2 * K), K, BK)
        queries = _channels(vectors + head * (2 * K) + K, K, BK)
    else:
        keys = _wide(token[1])
        queries = _wide(token[0])
    return _factors(factors + head * _FACTORS), keys, queries, of_key, of_query


@triton.jit
def _corrected(
    base, vs, live, values, out, ring_u, entries, valid, token, prepared, factors, vectors, weights, head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, V_FIRST: tl.constexpr, KDA: tl.constexpr,
    EVEN_V: tl.constexpr, POLICY: tl.constexpr, AHEAD: tl.constexpr, MATRIX: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Stores a token's output at values vs; returns its correction over the key's norm, the state, the ring's u."""
    S = _load_tile(base, vs, live, K, V, BK, V_FIRST, EVEN_V, POLICY)
    U = tl.load(ring_u + entries[:, None] * V + vs[None, :], mask=valid[:, None] & (vs < V)[None, :], other=0.0)
    value = _load(values + vs, vs < V, not EVEN_V).to(tl.float32)
    if AHEAD:
        if DEPENDENT:
            cuda.gdc_wait()
        prepared = _ahead_of(factors, vectors, weights, token, head, K, BK, BL, KDA)
    shared, keys, queries, of_key, of_query = prepared
    of_v, of_Sk, of_Sq, of_u, kept = shared
    if MATRIX:
        with_key, with_query = _matrix_sums(S, U, keys, queries, of_Sk, of_Sq, of_key, of_query, KDA)
    else:
        Sk, Sq = _products(S, keys, queries, V_FIRST)
        past = U.to(tl.float32)
        with_key = of_Sk * Sk + tl.sum(past * of_key[:, None], 0)
        with_query = of_Sq * Sq + tl.sum(past * of_query[:, None], 0)
    u = of_v * value - with_key
    o = tl.fma(of_u, u, with_query)
    _store(out + vs, tl.where(live, o, 0.0), vs < V, not EVEN_V)
    return u * kept, S, U


@triton.jit(do_not_specialize=["length"])
def _decode_kernel(
    state, indices, q, k, v, a, b, A_log, dt_bias, out, ring_u, ring_k, ring_g, starts, counts, flush,
    factors, vectors, weights, scale, lower_bound, length, slot_stride,
    q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, KDA: tl.constexpr, BOUNDED: tl.constexpr, POLICY: tl.constexpr,
    R: tl.constexpr, BL: tl.constexpr, FORCED: tl.constexpr, AHEAD: tl.constexpr, MATRIX: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one sequence, all K channels.

    The state is loaded in both branches, so that the registers of a token that writes it, one in L, are not kept free
    in all others.
    """
    EVEN_V: tl.constexpr = V % BV == 0
    n = tl.program_id(2).to(tl.int64)
    hv = tl.program_id(1)
    h = hv // GROUP
    head = n * HV + hv
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    slot, start, count, live = _turn(indices, starts, counts, n)
    token = _load_token(q, k, a, b, n, h, hv, q_token, q_head, k_token, k_head, a_token, b_token, K, BK, KDA)
    log_rate = tl.load(A_log + hv).to(tl.float32)
    base = state + slot * slot_stride + hv * (K * V)
    ring_u, ring_k, ring_g = _ring_of(ring_u, ring_k, ring_g, slot, hv, GROUP, HV, K, V, R, KDA)
    values = v + n * v_token + hv * v_head
    out += head * V
    js = tl.arange(0, BL)
    valid = (js < count) & live
    entries = (start + js) % R
    entry = (start + count) % R
    last = (start + count + R - 1) % R
    writes = count + 1 >= length
    if FORCED:
        writes = writes | (tl.load(flush + n) != 0)
    writes = writes & live
    prepared = (0.0, 0.0)
    if not AHEAD:
        bias = _gate_inputs(dt_bias, hv, K, BK, KDA)
        totals = _logs(ring_g, last, live & (count > 0), K, BK, KDA)
        sums = (0.0, 0.0)
        if not KDA:
            sums = _key_sums(token, ring_k, entries, valid, K, BK)
        shared, keys, queries, of_key, of_query, decays = _prepared(
            token, sums, bias, log_rate, scale, lower_bound, ring_k, ring_g, entries, valid, totals, K, BK, KDA, BOUNDED
        )
        prepared = (shared, keys, queries, of_key, of_query)
        logs = _after(totals, decays)
    if MATRIX:
        u, S, U = _corrected(
            base, vs, live, values, out, ring_u, entries, valid, token, prepared, factors, vectors, weights, head,
            K, V, BK, BL, V_FIRST, KDA, EVEN_V, POLICY, AHEAD, MATRIX, DEPENDENT,
        )  # fmt: skip
        if writes:
            if AHEAD:
                biases = _gate_inputs(dt_bias, hv, K, BK, KDA)
                decays = ()
                for p in tl.static_range(len(biases)):
                    x = token[2][p].to(tl.float32) + biases[p].to(tl.float32)
                    decays = decays + (decay(x, log_rate, lower_bound, BOUNDED),)
                logs = _after(_logs(ring_g, last, live & (count > 0), K, BK, KDA), decays)
            whole = _with_ring(S, U, ring_k, ring_g, entries, valid, logs, K, BK, V_FIRST, KDA)
            whole = _plus_outer(whole, u, token[1], V_FIRST)
            _store_tile(base, vs, live, whole, K, V, BK, V_FIRST, EVEN_V, POLICY)
    elif writes:
        u, S, U = _corrected(
            base, vs, live, values, out, ring_u, entries, valid, token, prepared, factors, vectors, weights, head,
            K, V, BK, BL, V_FIRST, KDA, EVEN_V, POLICY, AHEAD, MATRIX, DEPENDENT,
        )  # fmt: skip
        if AHEAD:
            biases = _gate_inputs(dt_bias, hv, K, BK, KDA)
            decays = ()
            for p in tl.static_range(len(biases)):
                x = token[2][p].to(tl.float32) + biases[p].to(tl.float32)
                decays = decays + (decay(x, log_rate, lower_bound, BOUNDED),)
            logs = _after(_logs(ring_g, last, live & (count > 0), K, BK, KDA), decays)
        whole = _with_entries(S, start, count, vs, live, ring_u, ring_k, ring_g, logs, K, V, BK, V_FIRST, KDA, R)
        whole = _plus_outer(whole, u, token[1], V_FIRST)
        _store_tile(base, vs, live, whole, K, V, BK, V_FIRST, EVEN_V, POLICY)
    else:
        u, S, U = _corrected(
            base, vs, live, values, out, ring_u, entries, valid, token, prepared, factors, vectors, weights, head,
            K, V, BK, BL, V_FIRST, KDA, EVEN_V, POLICY, AHEAD, MATRIX, DEPENDENT,
        )  # fmt: skip
    if not writes:
        tl.store(ring_u + entry * V + vs, u.to(ring_u.dtype.element_ty), mask=live & (vs < V))
        if not AHEAD:
            first = tl.program_id(0) == 0
            _keep(ring_k, ring_g, entry, token[1], logs, live & first, hv % GROUP == 0, K, BK, KDA)


@triton.jit
def _place_kernel(
    indices, k, a, A_log, dt_bias, ring_k, ring_g, starts, counts, parents, lower_bound, T,
    k_token, k_head, a_token,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    KDA: tl.constexpr, BOUNDED: tl.constexpr, R: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """One program: keys and decays of the T drafts of one value head of one sequence into the ring."""
    n = tl.program_id(1).to(tl.int64)
    hv = tl.program_id(0)
    slot, start, count, live = _turn(indices, starts, counts, n)
    bias = _gate_inputs(dt_bias, hv, K, BK, KDA)
    log_rate = tl.load(A_log + hv).to(tl.float32)
    ring_k += (slot * (HV // GROUP) + hv // GROUP) * (R * K)
    ring_g += (slot * HV + hv) * (R * K if KDA else R)
    logs = _logs(ring_g, (start + count + R - 1) % R, live & (count > 0), K, BK, KDA)
    for t in range(T):
        if TREE:
            parent = tl.load(parents + n * T + t).to(tl.int32)
            tl.debug_barrier()  # what other threads of this program stored is visible after it
            before = tl.where(parent < 0, count - 1, count + parent)
            logs = _logs(ring_g, (start + before + R) % R, live & (before >= 0), K, BK, KDA)
        keys = _channels(k + (n * T + t) * k_token + (hv // GROUP) * k_head, K, BK)
        gates = _gate_inputs(a + (n * T + t) * a_token, hv, K, BK, KDA)
        decays = ()
        for p in tl.static_range(len(gates)):
            x = gates[p].to(tl.float32) + bias[p].to(tl.float32)
            decays = decays + (decay(x, log_rate, lower_bound, BOUNDED),)
        logs = _after(logs, decays)
        _keep(ring_k, ring_g, (start + count + t) % R, keys, logs, live, hv % GROUP == 0, K, BK, KDA)


@triton.jit
def _drafts_kernel(
    state, indices, q, k, v, out, ring_u, starts, counts, factors, vectors, weights, slot_stride, T,
    q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, KDA: tl.constexpr, POLICY: tl.constexpr, R: tl.constexpr, BL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head through the T drafts of one sequence; the state is read once."""
    EVEN_V: tl.constexpr = V % BV == 0
    n = tl.program_id(2).to(tl.int64)
    hv = tl.program_id(1)
    h = hv // GROUP
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    slot, start, count, live = _turn(indices, starts, counts, n)
    S = _load_tile(state + slot * slot_stride + hv * (K * V), vs, live, K, V, BK, V_FIRST, EVEN_V, POLICY)
    ring_u += (slot * HV + hv) * (R * V)
    js = tl.arange(0, BL)
    inside = (js < count)[:, None] & (live & (vs < V))[None, :]
    U = tl.load(ring_u + ((start + js) % R)[:, None] * V + vs[None, :], mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        cuda.gdc_wait()
    for t in range(T):
        at = n * T + t
        head = at * HV + hv
        value = _load(v + at * v_token + hv * v_head + vs, vs < V, not EVEN_V).to(tl.float32)
        of_v, of_Sk, of_Sq, of_u, kept = _factors(factors + head * _FACTORS)
        of_key = tl.load(weights + head * (2 * BL) + js)
        of_query = tl.load(weights + head * (2 * BL) + BL + js)
        if KDA:
            keys = _channels(vectors + head * (2 * K), K, BK)
            queries = _channels(vectors + head * (2 * K) + K, K, BK)
        else:
            keys = _wide(_channels(k + at * k_token + h * k_head, K, BK))
            queries = _wide(_channels(q + at * q_token + h * q_head, K, BK))
        Sk, Sq = _products(S, keys, queries, V_FIRST)
        u = of_v * value - (of_Sk * Sk + tl.sum(U * of_key[:, None], 0))
        o = tl.fma(of_u, u, of_Sq * Sq + tl.sum(U * of_query[:, None], 0))
        _store(out + head * V + vs, tl.where(live, o, 0.0), vs < V, not EVEN_V)
        # What later tokens will read from the ring: rounded as there.
        u = (u * kept).to(ring_u.dtype.element_ty)
        tl.store(ring_u + ((start + count + t) % R) * V + vs, u, mask=live & (vs < V))
        U = tl.where((js == count + t)[:, None], u.to(tl.float32)[None, :], U)


@triton.jit
def _write_kernel(
    state, indices, ring_u, ring_k, ring_g, starts, counts, which, slot_stride,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, KDA: tl.constexpr, POLICY: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one sequence, if it is to be written."""
    EVEN_V: tl.constexpr = V % BV == 0
    n = tl.program_id(2).to(tl.int64)
    hv = tl.program_id(1)
    slot = tl.load(indices + n).to(tl.int64)
    count = tl.load(counts + n)
    if (slot >= 0) & (count > 0) & (tl.load(which + n) != 0):
        live = slot >= 0
        start = tl.load(starts + n)
        vs = tl.program_id(0) * BV + tl.arange(0, BV)
        ring_u, ring_k, ring_g = _ring_of(ring_u, ring_k, ring_g, slot, hv, GROUP, HV, K, V, R, KDA)
        base = state + slot * slot_stride + hv * (K * V)
        S = _load_tile(base, vs, live, K, V, BK, V_FIRST, EVEN_V, POLICY)
        logs = _logs(ring_g, (start + count + R - 1) % R, live, K, BK, KDA)
        whole = _with_entries(S, start, count, vs, live, ring_u, ring_k, ring_g, logs, K, V, BK, V_FIRST, KDA, R)
        _store_tile(base, vs, live, whole, K, V, BK, V_FIRST, EVEN_V, POLICY)


@triton.jit
def _accept_kernel(
    indices, ring_u, ring_k, ring_g, starts, counts, path, accepted, A,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KDA: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One program: the entries of one value head of one sequence that are on its path, moved together."""
    n = tl.program_id(1).to(tl.int64)
    hv = tl.program_id(0)
    slot = tl.load(indices + n).to(tl.int64)
    if slot >= 0:
        first = tl.load(starts + n) + tl.load(counts + n)
        ring_u, ring_k, ring_g = _ring_of(ring_u, ring_k, ring_g, slot, hv, GROUP, HV, K, V, R, KDA)
        vs, ks = tl.arange(0, BV), tl.arange(0, BK)
        for i in range(tl.load(accepted + n)):
            source = (first + tl.load(path + n * A + i).to(tl.int32)) % R
            target = (first + i) % R
            u = tl.load(ring_u + source * V + vs, mask=vs < V)
            key = tl.load(ring_k + source * K + ks, mask=ks < K)
            log = tl.load(ring_g + source * K + ks, mask=ks < K) if KDA else tl.load(ring_g + source)
            tl.debug_barrier()  # all has been read before anything is overwritten
            tl.store(ring_u + target * V + vs, u, mask=vs < V)
            tl.store(ring_k + target * K + ks, key, mask=(ks < K) & (hv % GROUP == 0))
            if KDA:
                tl.store(ring_g + target * K + ks, log, mask=ks < K)
            else:
                tl.store(ring_g + target, log)
            tl.debug_barrier()


@triton.jit
def _factors(pointers):
    return (
        tl.load(pointers), tl.load(pointers + 1), tl.load(pointers + 2), tl.load(pointers + 3), tl.load(pointers + 4)
    )  # fmt: skip


@triton.jit
def _wide(values):
    found = ()
    for p in tl.static_range(len(values)):
        found = found + (values[p].to(tl.float32),)
    return found


@dataclass(frozen=True, kw_only=True)
class Ring:
    """What tokens since the last write of each state have added, and where each sequence stands in it.

    u: [slots, HV, R, V], fp32, bf16 or fp16: corrections, over the norm of their key. k: [slots, H, R, K], q's and k's
    dtype: keys as they came. g: [slots, HV, R], or [slots, HV, R, K] for KDA, fp32: logarithm of the decay since the
    state was written. Contiguous; R at most MOST_ENTRIES.
    starts, counts: [N] int32, of each sequence of a call: the entry of its first token, and how many there are; entry j
    is (start + j) % R. The caller moves them (`moved`).
    """

    u: Tensor
    k: Tensor
    g: Tensor
    starts: Tensor
    counts: Tensor

    @property
    def entries(self) -> int:
        """R."""
        return self.u.shape[2]


def empty_ring(x: Inputs, entries: int, dtype: torch.dtype | None = None) -> Ring:
    """A ring without entries for every slot of the pool. dtype: of u; None: that of q."""
    slots, HV, *_ = x.state.shape
    H, K = x.q.shape[-2:]
    V, N, kda = x.v.shape[-1], len(x.indices), _is_kda(x)
    new = x.state.new_zeros
    return Ring(
        u=new((slots, HV, entries, V), dtype=dtype or x.q.dtype),
        k=new((slots, H, entries, K), dtype=x.k.dtype),
        g=new((slots, HV, entries, K) if kda else (slots, HV, entries), dtype=torch.float32),
        starts=new(N, dtype=torch.int32),
        counts=new(N, dtype=torch.int32),
    )


def moved(ring: Ring, length: int, flush: Tensor | None = None) -> Tensor:
    """Counts after a `decode` with this length: [N] int32, on the device."""
    counts = ring.counts + 1
    written = counts >= length
    return torch.where(written if flush is None else written | (flush != 0), 0, counts)


@dataclass(frozen=True)
class BufferedChoice:
    """How a step on the ring is run; the table at the top of the file says what each choice is for.

    registers: at most so many a thread, 0: as the compiler likes.
    """

    step: StepChoice
    ahead: bool = False
    matrix: bool = False
    registers: int = 0

    def __str__(self) -> str:
        words = [str(self.step)] + ["sums ahead"] * self.ahead + ["matrix instructions"] * self.matrix
        return ", ".join(words + [f"{self.registers} registers"] * (self.registers > 0))


@dataclass(frozen=True)
class Decode:
    """The launches of one token, in order; calling it makes them all."""

    launches: tuple[Launch, ...]

    def __call__(self) -> None:
        for launch in self.launches:
            launch()


def decode(
    x: StepInputs, ring: Ring, length: int, flush: Tensor | None = None, choice: BufferedChoice | None = None
) -> Decode:
    """One token a sequence, as launches that the caller makes by calling it; then counts are to be `moved`.

    length: L, of 1 to R: a sequence whose ring has L - 1 entries has its state written. flush: [N] int32, not 0: write
    it now, whatever the ring holds. Padding, and errors, as in `recurrent.decode`. Memory for what is computed ahead is
    allocated here and kept by the result: not on two streams at once.
    """
    N, _, K, HV, V = recurrent.check_step(x)
    kda = x.a.ndim == 3
    check_ring(x, ring, N, kda)
    if type(length) is not int or not 1 <= length <= ring.entries:
        raise ValueError(f"length is {length!r}; allowed: an integer of 1 to the ring's {ring.entries} entries")
    if flush is not None:
        check_tensor("flush", flush, (N,), (torch.int32,), x.state.device, recurrent.OWNER)
    choice = choice or choose(x, ring)
    check_choice(choice, x, ring)
    entries = _entries(ring)
    dependent = choice.ahead and has_dependent_launch(x.state.device)
    space = _workspace(x, entries, kda) if choice.ahead else dict.fromkeys(("factors", "vectors", "weights"), ring.g)
    shared = recurrent._arguments(x, choice.step, kda) | space | _ring_arguments(ring) | {
        "flush": flush if flush is not None else ring.counts, "length": length,
        "R": ring.entries, "BL": entries, "FORCED": flush is not None, "AHEAD": choice.ahead,
        "MATRIX": choice.matrix, "DEPENDENT": dependent,
    }  # fmt: skip
    options = {"num_warps": choice.step.num_warps} | ({"launch_pdl": True} if dependent else {})
    options |= {"maxnreg": choice.registers} if choice.registers else {}
    grid = (triton.cdiv(V, choice.step.tile), HV, N)
    launches = (Launch(_decode_kernel, grid, shared, options),)
    if choice.ahead:
        together = _together(x, kda)
        whole = shared | {
            "BK": triton.next_power_of_2(K),
            "T": 1,
            "parents": ring.counts,
            "DRAFTS": False,
            "TREE": False,
            "TOGETHER": together,
        }
        launches = (_launch(_ahead_kernel, (HV // together, N), whole, {"num_warps": 1}), *launches)
    return Decode(launches)


@dataclass(frozen=True, kw_only=True)
class DraftInputs(Inputs):
    """What a verify of T drafts a sequence on the ring reads and writes; q, k, v, a, b, out: [N, T, ..].

    parents: [N, T] int32 or int64, contiguous: the draft that each one goes on from, an earlier one of its sequence;
    -1: what the ring holds. None: a chain, each goes on from the one before.
    """

    parents: Tensor | None = None


def verify(x: DraftInputs, ring: Ring, choice: StepChoice | None = None) -> Decode:
    """T drafts a sequence, as launches that the caller makes by calling it; neither pool nor counts are changed.

    Each sequence must have room for T entries: counts + T is at most R (`write` makes room). Of a chain the first n
    drafts are accepted by adding n to `counts`; of a tree by `accept`. Errors as of `decode`.
    """
    N, T, _, K, HV, V = recurrent._check_common(x, "N, T")
    kda = x.a.ndim == 4
    check_ring(x, ring, N, kda)
    if ring.entries < T:
        raise ValueError(f"q has {T} drafts a sequence; allowed: up to the ring's {ring.entries} entries")
    if x.parents is not None:
        check_tensor("parents", x.parents, (N, T), recurrent.INDEX_DTYPES, x.state.device, recurrent.OWNER)
    step = choice or _fitting(StepChoice(32, 4, 1), x)
    check_choice(BufferedChoice(step), x, ring)
    entries, dependent = _entries(ring), has_dependent_launch(x.state.device)
    shared = recurrent._arguments(x, step, kda) | _workspace(x, entries, kda) | _ring_arguments(ring) | {
        "parents": x.parents if x.parents is not None else ring.counts, "length": 1, "T": T, "R": ring.entries,
        "BL": entries, "DEPENDENT": dependent, "DRAFTS": True, "TREE": x.parents is not None,
    }  # fmt: skip
    together = _together(x, kda)
    whole = shared | {"BK": triton.next_power_of_2(K), "TOGETHER": together}
    options = {"num_warps": step.num_warps} | ({"launch_pdl": True} if dependent else {})
    return Decode(
        (
            _launch(_place_kernel, (HV, N), whole, {"num_warps": 1}),
            _launch(_ahead_kernel, (HV // together, N * T), whole, {"num_warps": 1}),
            _launch(_drafts_kernel, (triton.cdiv(V, step.tile), HV, N), shared, options),
        )
    )


def write(x: Inputs, ring: Ring, which: Tensor) -> Launch:
    """Write the states of sequences whose `which` ([N] int32) is not 0, as a launch; their counts are then 0.

    For a server that must see a state, and before a `verify` that would not have room. x: as of `decode` or `verify`.
    """
    N, (HV, V), kda = len(x.indices), x.v.shape[-2:], _is_kda(x)
    check_ring(x, ring, N, kda)
    check_tensor("which", which, (N,), (torch.int32,), x.state.device, recurrent.OWNER)
    step = _fitting(StepChoice(32, 4, 2), x)
    arguments = recurrent._arguments(x, step, kda) | _ring_arguments(ring) | {"which": which, "R": ring.entries}
    return _launch(_write_kernel, (triton.cdiv(V, step.tile), HV, N), arguments, {"num_warps": step.num_warps})


def accept(x: DraftInputs, ring: Ring, path: Tensor, accepted: Tensor) -> Launch:
    """Move the entries of a tree's accepted drafts together, as a launch; then `accepted` is to be added to counts.

    path: [N, A] int32, of each sequence its accepted drafts, from the first on; accepted: [N] int32, how many.
    """
    (N, A), (HV, V), K, kda = path.shape, x.v.shape[-2:], x.q.shape[-1], _is_kda(x)
    check_ring(x, ring, len(x.indices), kda)
    check_tensor("path", path, (len(x.indices), A), (torch.int32,), x.state.device, recurrent.OWNER)
    check_tensor("accepted", accepted, (N,), (torch.int32,), x.state.device, recurrent.OWNER)
    arguments = recurrent._arguments(x, StepChoice(), kda) | _ring_arguments(ring)
    arguments |= {"path": path, "accepted": accepted, "A": A, "R": ring.entries}
    arguments |= {"BK": triton.next_power_of_2(K), "BV": triton.next_power_of_2(V)}
    return _launch(_accept_kernel, (HV, N), arguments, {"num_warps": 4})


def _launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], options: Mapping[str, int]) -> Launch:
    """A launch that takes of the arguments those that the kernel has."""
    return Launch(kernel, grid, {name: arguments[name] for name in kernel.arg_names}, options)


def _together(x: Inputs, kda: bool) -> int:
    """How many value heads one program prepares: KDA's share no product of keys."""
    return 1 if kda else x.v.shape[-2] // x.q.shape[-2]


def _entries(ring: Ring) -> int:
    return max(LEAST_OF_A_PRODUCT, triton.next_power_of_2(ring.entries))


def _ring_arguments(ring: Ring) -> dict[str, Tensor]:
    named = {"ring_u": ring.u, "ring_k": ring.k, "ring_g": ring.g}
    return named | {"starts": ring.starts, "counts": ring.counts}


def _workspace(x: Inputs, entries: int, kda: bool) -> dict[str, Tensor]:
    """What is computed ahead, of each value head: factors, weights of the entries, and KDA's k and q with decays."""
    (*tokens, HV, _), K = x.v.shape, x.q.shape[-1]
    new = {"dtype": torch.float32}
    factors = x.state.new_empty((*tokens, HV, _FACTORS.value), **new)
    vectors = x.state.new_empty((*tokens, HV, 2, K), **new) if kda else factors
    return {"factors": factors, "vectors": vectors, "weights": x.state.new_empty((*tokens, HV, 2, entries), **new)}


def choose(x: Inputs, ring: Ring) -> BufferedChoice:
    """The choice from shapes, dtypes and the GPU alone: of some hundred, what was fastest on an H100.

    By the value heads that a multiprocessor has:
    - with HARDLY_ANY_HEADS the time is that of one chain of loads and sums: narrow tiles of one warp, and one kernel.
    - up to SOME_HEADS states are still read fastest by one kernel; beyond, sums are made ahead, and fewer registers
      let more programs be there at once.
    States of 16 bits have twice the values a byte, so that instructions count: matrix instructions from FEW_HEADS on.
    KDA's decays of each channel take the registers that more warps would need. K-first, a row of a tile is BV values
    of one channel, and wide ones are read faster. States of few bits that are no tokens' are converted, which takes
    more registers than a limit leaves: with 128 a thread and sums ahead 256 sequences took 1.85 times as long with fp8
    and 1.09 times with fp16 on an H200 (2.07 and 1.08 on an H100) as with what is chosen here.
    """
    heads = _heads(x)
    if heads <= HARDLY_ANY_HEADS:
        return BufferedChoice(_fitting(StepChoice(16, 4, 1), x))
    if heads > FEW_HEADS and _takes_matrix(x, ring):
        return BufferedChoice(_fitting(StepChoice(64, 1, 4), x), ahead=True, matrix=True, registers=128)
    if _is_kda(x):
        return BufferedChoice(_fitting(StepChoice(32, 4, 1), x))
    if heads > FEW_HEADS and x.v_first and x.state.dtype not in (torch.float32, x.q.dtype):
        return BufferedChoice(_fitting(StepChoice(*NARROW[x.state.dtype.itemsize]), x))
    if heads > FEW_HEADS and not x.v_first and x.state.dtype.itemsize == 4:
        return BufferedChoice(_fitting(StepChoice(64, 4, 2), x))
    step = _fitting(StepChoice(32, 4, 2), x)
    few = heads <= SOME_HEADS
    return BufferedChoice(step, ahead=not few, registers=168 if few else 128)


def _is_kda(x: Inputs) -> bool:
    """Whether each channel has a decay of its own."""
    return x.a.ndim > x.b.ndim


def _heads(x: Inputs) -> float:
    """Value heads a multiprocessor."""
    return len(x.indices) * x.v.shape[-2] / multiprocessors(x.state.device)


def _fitting(step: StepChoice, x: Inputs) -> StepChoice:
    """A choice for K = V = 128, with no larger tile and no more pieces than there are values and channels for."""
    K, V = x.q.shape[-1], x.v.shape[-1]
    tile = max(LEAST_OF_A_PRODUCT, min(step.tile, triton.next_power_of_2(V)))
    return replace(step, tile=tile, pieces=max(1, min(step.pieces, triton.next_power_of_2(K) // LEAST_OF_A_PRODUCT)))


def _takes_matrix(x: Inputs, ring: Ring) -> bool:
    dtypes = {x.state.dtype, ring.u.dtype, x.q.dtype, x.k.dtype}
    return len(dtypes) == 1 and x.state.dtype.itemsize == 2 and x.v_first


def check_choice(choice: BufferedChoice, x: Inputs, ring: Ring) -> None:
    """Raise ValueError for a choice that the kernels cannot take."""
    K = x.q.shape[-1]
    recurrent.check_choice(choice.step, K)
    if choice.matrix:
        dtypes = {"state": x.state.dtype, "ring.u": ring.u.dtype, "q": x.q.dtype, "k": x.k.dtype}
        if len(set(dtypes.values())) > 1 or x.state.dtype.itemsize != 2:
            found = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
            raise ValueError(f"{found}; allowed with matrix instructions: one dtype of 16 bits")
        if not x.v_first:
            raise ValueError("v_first is False; allowed with matrix instructions: True")
        if choice.step.tile < LEAST_OF_A_PRODUCT or K // choice.step.pieces < LEAST_OF_A_PRODUCT:
            found = f"tile is {choice.step.tile} and pieces is {choice.step.pieces}, of {K} channels"
            least = f"at least {LEAST_OF_A_PRODUCT} values and {LEAST_OF_A_PRODUCT} channels"
            raise ValueError(f"{found}; allowed with matrix instructions: {least}")


def check_ring(x: Inputs, ring: Ring, N: int, kda: bool) -> None:
    """Raise ValueError for shapes, dtypes, strides or devices of a ring that the kernels cannot take."""
    (slots, HV), (H, K), V = x.state.shape[:2], x.q.shape[-2:], x.v.shape[-1]
    R, device, owner = ring.entries, x.state.device, recurrent.OWNER
    if not 1 <= R <= MOST_ENTRIES:
        raise ValueError(f"the ring has {R} entries; allowed: 1 to {MOST_ENTRIES}")
    check_tensor("ring.u", ring.u, (slots, HV, R, V), RING_DTYPES, device, owner)
    check_tensor("ring.k", ring.k, (slots, H, R, K), (x.k.dtype,), device, owner)
    check_tensor("ring.g", ring.g, (slots, HV, R, K) if kda else (slots, HV, R), (torch.float32,), device, owner)
    for name in ("starts", "counts"):
        check_tensor(f"ring.{name}", getattr(ring, name), (N,), (torch.int32,), device, owner)
