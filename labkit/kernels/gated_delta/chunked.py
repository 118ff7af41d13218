"""Extend (chunked prefill) of the gated delta rule in Triton: many tokens a sequence, ragged, state in and state out.

Kernels, in the order of their launch, and what each one does:

| launch        | programs                     | what it does                                                         |
|---------------|------------------------------|----------------------------------------------------------------------|
| prepare       | chunk, value head            | T = (I + A)^-1, w = T (β k exp g), u = T (β v): all of a chunk that  |
|               |                              | does not need the state before it; with KDA, whose decay A has in    |
|               |                              | each channel, also q·k of every pair of tokens                       |
| chunk_state   | sequence, value head, tile   | chunk after chunk: v_new = u - w h, h <- exp(g_last) h + kᵀ v_new,   |
|               | of V                         | each one decayed to the end of the chunk; stores v_new and every h   |
| output        | chunk, value head, tile of V | o = (q exp g) h + tril(q kᵀ exp(g_i - g_j)) v_new                    |

Variants of chunk_state, and what each one tests:

| state          | transposed | hypothesis                                                                            |
|----------------|------------|---------------------------------------------------------------------------------------|
| [.., HV, K, V] | no         | w h and kᵀ v_new leave h and v_new in registers, but their next product wants them in |
|                |            | shared memory, as right operands                                                      |
| [.., HV, V, K] | no         | the same products with the state transposed where it is used: only the layout, and    |
|                |            | with it the shared memory, differs (82 -> 74 KB would make 3 CTAs an SM out of 2)     |
| [.., HV, V, K] | yes        | v_newᵀ = uᵀ - h wᵀ and h + v_newᵀ k have h and v_new as left operands, which wgmma    |
|                |            | takes from registers: neither goes through shared memory on the way from chunk to     |
|                |            | chunk. It needs a tile of 64 rows, wgmma's smallest                                   |

All variants run the same arithmetic: sums in fp32, products of the inputs' dtype. g is the decay's logarithm, summed
from the start of the chunk, i and j are tokens of one chunk, h is the state at its start. Without KDA q and k are never
stored normalised: their norms scale rows and columns of products, so that q and k enter the tensor cores unrounded.
With KDA prepare has a kernel of its own. It does all that needs g in one program, which holds all channels of a chunk:
g, the largest of the inputs, is read once, and A never leaves the program.

Sources: Parallelizing Linear Transformers with the Delta Rule (Yang and others, 2024) for the form with w and u, Gated
Delta Networks (Yang, Kautz, Hatamizadeh, 2024) for the scalar decay, Kimi Linear (Kimi Team, 2025) for one a channel;
the change of layout is that of SGLang pull request 20283.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.checks import check_one_of, check_tensor
from labkit.kernels.launch import Launch
from labkit.kernels.target import multiprocessors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNKS = (16, 32, 64)
TILES = (64, 32, 16)  # of chunk_state, that the rule chooses from
STAGES = (2, 3, 4)  # of chunk_state; of 1 ptxas 12.8 makes the code told of at SLICE, which faults on an H100
SUB = 8  # tokens that prepare's solve does one after the other; then tensor cores merge blocks of them
# Channels and values at a time, where a kernel need not hold all of them. Narrower ones would do for smaller K and V,
# but of a product [64, 64] x [64, 16 or 32] with its left operand in registers ptxas 12.8 makes code that takes an
# address from a register that nothing has written (see `compiler_errors.unwritten_registers`).
SLICE = 64
OUTPUTS = 128  # values a program of output: queries, keys and their scores are then read and formed once for V = 128
PRECISIONS = {torch.float32: "ieee", torch.float16: "tf32x3", torch.bfloat16: "fp16"}  # of the solve, by inputs
LARGEST_K = 256  # chunk_state holds all channels of its tile of the state in registers


# Of two elements each: of a tl.exp2 four instructions of five are for results that fp32 has few digits for.
_DECAYED = tl.constexpr("""{
    .reg .f32 a, b;
    .reg .b32 decay;
    ex2.approx.ftz.f32 a, $2;
    ex2.approx.ftz.f32 b, $3;
    cvt.rn.f16x2.f32 decay, b, a;
    mul.rn.f16x2 $0, $4, decay;
    mul.rn.f16x2 $1, $5, decay;
}""")


@triton.jit
def _rows(base, t, inside, stride, columns, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Rows t (64-bit) of a matrix with WIDTH columns; zero where a row is not `inside` the sequence."""
    mask = inside[:, None]
    if not EVEN:
        mask = mask & (columns[None, :] < WIDTH)
    return tl.load(base + t[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(base, t, inside, stride, columns, value, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    mask = inside[:, None]
    if not EVEN:
        mask = mask & (columns[None, :] < WIDTH)
    tl.store(base + t[:, None] * stride + columns[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _state_tile(base, ks, vs, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Pointers and mask of a tile of the state: [vs, ks] if V_FIRST, else [ks, vs], as it lies in memory."""
    if V_FIRST:
        return base + vs[:, None] * K + ks[None, :], (vs[:, None] < V) & (ks[None, :] < K)
    else:
        return base + ks[:, None] * V + vs[None, :], (ks[:, None] < K) & (vs[None, :] < V)


@triton.jit
def _squares(x):
    x = x.to(tl.float32)
    return tl.sum(x * x, 1)


@triton.jit
def _inverse_norm(squares):
    return 1.0 / tl.sqrt(squares + 1e-6)


@triton.jit
def _pair_decay(g, lower):
    """exp(g_i - g_j) where `lower`, else 0; above the diagonal the exponent is positive and could overflow."""
    return tl.exp(tl.where(lower, g[:, None] - g[None, :], float("-inf")))


@triton.jit
def _diagonal_inverses(A, BT: tl.constexpr, SUB: tl.constexpr):
    """(I + A)^-1 of the diagonal blocks [SUB, SUB] of A [BT, BT], strictly lower, in their places; zero elsewhere.

    Forward substitution, one column after the other, in all blocks at once: when column j's turn comes, row j of the
    inverse is done, and goes from every row below it.
    """
    N: tl.constexpr = BT // SUB
    blocks = tl.arange(0, N)
    diagonal = (blocks[:, None] == blocks[None, :])[:, None, :, None]
    D = tl.sum(tl.where(diagonal, tl.reshape(A, [N, SUB, N, SUB]), 0.0), 2)  # [N, SUB, SUB]
    i = tl.arange(0, SUB)
    row, column = i[None, :, None], i[None, None, :]
    X = tl.zeros_like(D) + tl.where(row == column, 1.0, 0.0)
    for j in range(SUB - 1):
        a_j = tl.sum(tl.where(column == j, D, 0.0), 2)
        x_j = tl.sum(tl.where(row == j, X, 0.0), 1)
        X -= a_j[:, :, None] * x_j[:, None, :]
    return tl.reshape(tl.where(diagonal, X[:, :, None, :], 0.0), [BT, BT])


@triton.jit
def _merged(A, X, SIZE: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr):
    """From inverses X of the diagonal blocks [SIZE, SIZE] of I + A those of the blocks of twice the size.

    The inverse of [[P, 0], [L, R]] is [[P^-1, 0], [-R^-1 L P^-1, R^-1]]. PRECISION "fp16" has TF32's digits, but a
    product of fp16 takes the one before it from the registers that it is in, where TF32 needs shuffles. It has the
    range too: elements of A are β times products of unit vectors, those of the inverse products of unit vectors with
    some of I - β k kᵀ between them, which lengthen no vector as long as β is below 2.
    """
    i = tl.arange(0, BT)
    row, column = i[:, None], i[None, :]
    L = tl.where((row // (2 * SIZE) == column // (2 * SIZE)) & (row // SIZE > column // SIZE), A, 0.0)
    if PRECISION == "fp16":
        half = X.to(tl.float16)
        return X - tl.dot(tl.dot(half, L.to(tl.float16)).to(tl.float16), half)
    else:
        return X - tl.dot(tl.dot(X, L, input_precision=PRECISION), X, input_precision=PRECISION)


@triton.jit
def _inverse(A, BT: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower A [BT, BT], by blockwise forward substitution in fp32.

    The series I - A + A² - ... would be shorter, but its powers grow and cancel when keys of a chunk are alike.
    """
    X = _diagonal_inverses(A, BT, SUB)
    for level in tl.static_range(5):
        if SUB << level < BT:
            X = _merged(A, X, SUB << level, BT, PRECISION)
    return X


@triton.jit
def _prepare_kernel(
    k, v, g, beta, spans, w, u, key_scales, carry, total, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, SUB: tl.constexpr,
    DOT: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """One program: w and u of one chunk and value head, and its decay; one decay a value head (GDN).

    key_scales [T, HV]: 1 / |k|; carry [T, HV]: that times the decay to the chunk's end; total: the whole chunk's decay.
    """
    EVEN_K: tl.constexpr = K % BK == 0
    EVEN_V: tl.constexpr = V % BV == 0
    pid = tl.program_id(0)
    hv = pid % HV
    chunk = (pid // HV).to(tl.int64)
    start = tl.load(spans + 2 * chunk)
    end = tl.load(spans + 2 * chunk + 1)
    i = tl.arange(0, BT)
    t = (start + i).to(tl.int64)
    inside = t < end
    lower = i[:, None] > i[None, :]
    dtype: tl.constexpr = k.dtype.element_ty
    k += hv // (HV // H) * K
    b = tl.load(beta + t * HV + hv, mask=inside, other=0.0)

    A = tl.zeros([BT, BT], tl.float32)
    for first in range(0, K, BK):
        ks = first + tl.arange(0, BK)
        key = _rows(k, t, inside, H * K, ks, K, EVEN_K)
        A += tl.dot(key, tl.trans(key), input_precision=DOT)
    # Not of `key`: see `compiler_errors.overwritten_operands`.
    key_scale = _inverse_norm(tl.sum(tl.where(i[:, None] == i[None, :], A, 0.0), 1))
    step = tl.load(g + t * HV + hv, mask=inside, other=0.0)
    since = tl.cumsum(step, 0)
    A *= (b * key_scale)[:, None] * key_scale[None, :] * _pair_decay(since, lower)
    X = _inverse(A, BT, SUB, SOLVE) * b[None, :]
    key_factors = (X * (key_scale * tl.exp(since))[None, :]).to(dtype)
    until = tl.cumsum(step, 0, reverse=True) - step
    tl.store(key_scales + t * HV + hv, key_scale, mask=inside)
    tl.store(carry + t * HV + hv, key_scale * tl.exp(until), mask=inside)
    tl.store(total + chunk * HV + hv, tl.exp(tl.sum(step, 0)))

    value_factors = X.to(dtype)
    for first in range(0, V, BV):
        vs = first + tl.arange(0, BV)
        value = _rows(v + hv * V, t, inside, HV * V, vs, V, EVEN_V)
        value = tl.dot(value_factors, value, input_precision=DOT)
        _store_rows(u + hv * V, t, inside, HV * V, vs, value, V, EVEN_V)
    for first in range(0, K, BK):
        ks = first + tl.arange(0, BK)
        key = _rows(k, t, inside, H * K, ks, K, EVEN_K)
        key = tl.dot(key_factors, key, input_precision=DOT)
        _store_rows(w + hv * K, t, inside, HV * K, ks, key, K, EVEN_K)


@triton.jit
def _normalised(x):
    """Rows of x at a length of 1, fp32. No division, unlike `_inverse_norm`: many threads hold a row's length."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _sums(table, level, step):
    """Sums of step [BT, BK] between each token and a border: those of matrix `level` of `borders`; fp32.

    On the tensor cores: across the lanes they would be many shuffles. Rounding step to fp16 changes 2^x of a sum x by
    x 2^(x - 12) at most, less than 2e-4, and what is below fp16's range decays to zero anyway.
    """
    BT: tl.constexpr = step.shape[0]
    # Of fp32 inputs alone; the parts of TF32 take twice the shared memory, and of 256 channels there is not enough.
    PRODUCTS: tl.constexpr = "tf32x3" if step.shape[1] <= 128 else "ieee"
    i = tl.arange(0, BT)
    ones = tl.load(table + level * (BT * BT) + i[:, None] * BT + i[None, :])
    return tl.dot(ones, step, input_precision=PRODUCTS)


@triton.jit
def _decayed(key, query, x, ASSEMBLY: tl.constexpr):
    """key and query [BT, BK], times 2^x (fp32); ASSEMBLY, which the interpreter has not, is shorter."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _DECAYED, "=r,=r,r,r,r,r", [x, key, query], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        decay = tl.exp2(x)
        return (key * decay).to(key.dtype), (query * decay).to(key.dtype)


@triton.jit
def _scores(key, query, step, table, LEVELS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Σ_c k_ic k_jc exp(g_ic - g_jc) where i > j, Σ_c q_ic k_jc exp(g_ic - g_jc) where i ≥ j; [BT, BT].

    Above the diagonal the first is zero, and the second finite.
    key, query [BT, BK]: at most 1; step [BT, BK]: (g_i - g_(i-1)) log2 e, of the same dtype.
    As a product of k exp(g) and k exp(-g) it would overflow, since -g grows without bound along the chunk. With a
    border r between the two, exp(g_i - r) · exp(r - g_j), both exponents are ≤ 0: so it is done for the borders
    between single tokens, between pairs of them, and so on up to that in the middle of the chunk; of a pair of tokens
    the last one counts that lies between them. The factors, none above 1, fit in fp16, with as many digits as in TF32.
    """
    BT: tl.constexpr = step.shape[0]
    # Of fp32 inputs alone; the parts of TF32 take twice the shared memory, and of 256 channels there is not enough.
    PRODUCTS: tl.constexpr = "tf32x3" if step.shape[1] <= 128 else "ieee"
    i = tl.arange(0, BT)
    row, column = i[:, None], i[None, :]
    keys = tl.zeros([BT, BT], tl.float32)
    queries = tl.dot(query, tl.trans(key), input_precision=PRODUCTS)
    for level in range(LEVELS):
        late_key, late_query = _decayed(key, query, _sums(table, level, step), ASSEMBLY)
        other = tl.trans(late_key)
        apart = column < (row >> level << level)  # in different blocks of 2^level tokens
        keys = tl.where(apart, tl.dot(late_key, other, input_precision=PRODUCTS), keys)
        queries = tl.where(apart, tl.dot(late_query, other, input_precision=PRODUCTS), queries)
    return keys, queries


@triton.jit
def _prepare_channels_kernel(
    q, k, v, g, beta, spans, table, w, u, decayed_q, decayed_k, query_scores, total, scale, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, SUB: tl.constexpr,
    LEVELS: tl.constexpr, DOT: tl.constexpr, SOLVE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """One program: what `_prepare_kernel`'s does, with a decay a channel (KDA).

    It cannot be taken out of the products of k and q: they are stored decayed and normalised, decayed_k to the end of
    the chunk, decayed_q from its start, and so are the scores of q and k. total: the decay over the whole chunk.
    """
    EVEN_K: tl.constexpr = K == BK
    EVEN_V: tl.constexpr = V % BV == 0
    pid = tl.program_id(0)
    hv = pid % HV
    chunk = (pid // HV).to(tl.int64)
    start = tl.load(spans + 2 * chunk).to(tl.int64)
    end = tl.load(spans + 2 * chunk + 1)
    i = tl.arange(0, BT)
    inside = i < end - start
    ks = tl.arange(0, BK)
    dtype: tl.constexpr = k.dtype.element_ty
    narrow: tl.constexpr = table.dtype.element_ty
    # From here on to this chunk's first token, so that all offsets of its others take 32 bits.
    key_rows = (start * H + hv // (HV // H)) * K
    rows = start * HV + hv
    b = tl.load(beta + rows + i * HV, mask=inside, other=0.0)
    step = _rows(g + rows * K, i, inside, HV * K, ks, K, EVEN_K)
    key = _rows(k + key_rows, i, inside, H * K, ks, K, EVEN_K)
    query = _rows(q + key_rows, i, inside, H * K, ks, K, EVEN_K)
    tl.store(total + (chunk * HV + hv) * K + ks, tl.exp(tl.sum(step, 0)), mask=ks < K)
    step = tl.maximum((step * 1.4426950408889634).to(narrow), tl.full([], -60000.0, narrow))
    key = _normalised(key).to(narrow)
    query = _normalised(query).to(narrow)

    A, scores = _scores(key, query, step, table, LEVELS, ASSEMBLY)
    _store_rows(query_scores + rows * BT, i, inside, HV * BT, i, scores * scale, BT, True)
    late_key, late_query = _decayed(key, query, _sums(table, LEVELS, step), ASSEMBLY)
    _store_rows(decayed_k + rows * K, i, inside, HV * K, ks, late_key, K, EVEN_K)
    late_key, late_query = _decayed(key, query, _sums(table, LEVELS + 1, step), ASSEMBLY)
    _store_rows(decayed_q + rows * K, i, inside, HV * K, ks, late_query.to(tl.float32) * scale, K, EVEN_K)

    X = _inverse(A * b[:, None], BT, SUB, SOLVE) * b[None, :]
    factors = X.to(dtype)
    late_key = tl.dot(factors, late_key.to(dtype), input_precision=DOT)
    _store_rows(w + rows * K, i, inside, HV * K, ks, late_key, K, EVEN_K)
    for first in range(0, V, BV):
        vs = first + tl.arange(0, BV)
        value = _rows(v + rows * V, i, inside, HV * V, vs, V, EVEN_V)
        value = tl.dot(factors, value, input_precision=DOT)
        _store_rows(u + rows * V, i, inside, HV * V, vs, value, V, EVEN_V)


@triton.jit
def _chunk_state_kernel(
    initial, final, k, w, u, v_new, states, carry, total, cu_seqlens, first_chunks, HK, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    V_FIRST: tl.constexpr, TRANSPOSED: tl.constexpr, PER_CHANNEL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one sequence, all K channels, one chunk after the other."""
    EVEN_K: tl.constexpr = BK == K
    EVEN_V: tl.constexpr = V % BV == 0
    EVEN: tl.constexpr = EVEN_K and EVEN_V
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    n_hv = (pid // TILES).to(tl.int64)
    n = n_hv // HV
    hv = n_hv % HV
    ks = tl.arange(0, BK)
    vs = pid % TILES * BV + tl.arange(0, BV)
    i = tl.arange(0, BT)
    dtype: tl.constexpr = k.dtype.element_ty
    start = tl.load(cu_seqlens + n)
    end = tl.load(cu_seqlens + n + 1)
    chunk = tl.load(first_chunks + n).to(tl.int64)

    offsets, mask = _state_tile(0, ks, vs, K, V, V_FIRST)
    h = tl.load(initial + n_hv * (K * V) + offsets, mask=mask, other=0.0)
    k += hv // (HV // HK) * K
    w += hv * K
    u += hv * V
    v_new += hv * V
    for first in range(start, end, BT):
        stored = states + (chunk * HV + hv) * (K * V) + offsets
        if EVEN:
            tl.store(stored, h.to(dtype))
        else:
            tl.store(stored, h.to(dtype), mask=mask)
        t = (first + i).to(tl.int64)
        inside = t < end
        # All loads first: none needs the state, and behind the first product they would not be under way with it.
        if PER_CHANNEL:
            decay = tl.load(total + (chunk * HV + hv) * K + ks, mask=ks < K, other=0.0)
        else:
            decay = tl.load(total + chunk * HV + hv)
            scale = tl.load(carry + t * HV + hv, mask=inside, other=0.0)
        key = _rows(k, t, inside, HK * K, ks, K, EVEN_K)
        w_tile = _rows(w, t, inside, HV * K, ks, K, EVEN_K)
        new = _rows(u, t, inside, HV * V, vs, V, EVEN_V).to(tl.float32)
        if TRANSPOSED:
            new = tl.trans(new) - tl.dot(h.to(dtype), tl.trans(w_tile), input_precision=DOT)  # [BV, BT]
            _store_rows(v_new, t, inside, HV * V, vs, tl.trans(new), V, EVEN_V)
        elif V_FIRST:
            new -= tl.dot(w_tile, tl.trans(h.to(dtype)), input_precision=DOT)  # [BT, BV]
            _store_rows(v_new, t, inside, HV * V, vs, new, V, EVEN_V)
        else:
            new -= tl.dot(w_tile, h.to(dtype), input_precision=DOT)  # [BT, BV]
            _store_rows(v_new, t, inside, HV * V, vs, new, V, EVEN_V)

        if PER_CHANNEL:
            h *= decay[None, :] if V_FIRST else decay[:, None]
        else:
            h *= decay
            new *= scale[None, :] if TRANSPOSED else scale[:, None]
            if dtype == tl.float16:  # v_new / |k| beside a key of almost zero: infinity times zero would be NaN
                new = tl.clamp(new, -65504.0, 65504.0)
        new = new.to(dtype)
        if TRANSPOSED:
            h += tl.dot(new, key, input_precision=DOT)
        elif V_FIRST:  # v_newᵀ k would have BV rows, too few for wgmma below 64; kᵀ v_new has K
            h += tl.trans(tl.dot(tl.trans(key), new, input_precision=DOT))
        else:
            h += tl.dot(tl.trans(key), new, input_precision=DOT)
        chunk += 1
    tl.store(final + n_hv * (K * V) + offsets, h, mask=mask)


@triton.jit
def _output_kernel(
    q, k, g, spans, key_scales, query_scores, v_new, states, out, scale, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    V_FIRST: tl.constexpr, PER_CHANNEL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program: BV output values of the tokens of one chunk and value head. With PER_CHANNEL q is decayed_q."""
    EVEN_K: tl.constexpr = K % BK == 0
    EVEN_V: tl.constexpr = V % BV == 0
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    hv = pid // TILES % HV
    chunk = (pid // TILES // HV).to(tl.int64)
    vs = pid % TILES * BV + tl.arange(0, BV)
    start = tl.load(spans + 2 * chunk)
    end = tl.load(spans + 2 * chunk + 1)
    i = tl.arange(0, BT)
    t = (start + i).to(tl.int64)
    inside = t < end
    causal = i[:, None] >= i[None, :]
    dtype: tl.constexpr = q.dtype.element_ty
    k += hv // (HV // H) * K
    q += (hv if PER_CHANNEL else hv // (HV // H)) * K
    query_stride = (HV if PER_CHANNEL else H) * K
    states += (chunk * HV + hv) * (K * V)

    o = tl.zeros([BT, BV], tl.float32)
    scores = tl.zeros([BT, BT], tl.float32)
    for first in range(0, K, BK):
        ks = first + tl.arange(0, BK)
        query = _rows(q, t, inside, query_stride, ks, K, EVEN_K)
        tile, mask = _state_tile(states, ks, vs, K, V, V_FIRST)
        h = tl.load(tile, mask=mask, other=0.0)
        o += tl.dot(query, tl.trans(h) if V_FIRST else h, input_precision=DOT)
        if not PER_CHANNEL:
            key = _rows(k, t, inside, H * K, ks, K, EVEN_K)
            scores += tl.dot(query, tl.trans(key), input_precision=DOT)

    if PER_CHANNEL:
        pairs = query_scores + (t * HV + hv)[:, None] * BT + i[None, :]
        scores = tl.load(pairs, mask=causal & inside[:, None], other=0.0)
    else:
        since = tl.cumsum(tl.load(g + t * HV + hv, mask=inside, other=0.0), 0)
        key_scale = tl.load(key_scales + t * HV + hv, mask=inside, other=0.0)
        query_squares = tl.zeros([BT], tl.float32)
        for first in range(0, K, BK):  # in a loop of its own: see `compiler_errors.overwritten_operands`
            query_squares += _squares(_rows(q, t, inside, query_stride, first + tl.arange(0, BK), K, EVEN_K))
        query_scale = scale * _inverse_norm(query_squares)
        o *= (query_scale * tl.exp(since))[:, None]
        scores *= query_scale[:, None] * key_scale[None, :] * _pair_decay(since, causal)
    new = _rows(v_new + hv * V, t, inside, HV * V, vs, V, EVEN_V)
    o += tl.dot(scores.to(dtype), new, input_precision=DOT)
    _store_rows(out + hv * V, t, inside, HV * V, vs, o, V, EVEN_V)


@dataclass(frozen=True)
class ExtendInputs:
    """Everything that one extend reads and writes; T tokens of N sequences, one sequence after the other.

    q, k: [T, H, K]; v: [T, HV, V]; HV a multiple of H; one dtype, fp32, bf16 or fp16. q and k need not be normalised.
    g: logarithm of the decay, ≤ 0, fp32; [T, HV] (GDN), or [T, HV, K], one a channel (KDA). beta: [T, HV], fp32.
    cu_seqlens: [N + 1], int32 or int64; sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1]; on any device.
    initial, final: state before the first and after the last token, fp32, [N, HV, V, K] or [N, HV, K, V]; they may be
             one tensor. The final state of an empty sequence is its initial one.
    out:     [T, HV, V], fp32, bf16 or fp16.
    scale:   multiplies q (K ** -0.5 in the models).
    fp16 has a limit that the other dtypes do not have: with one decay a value head |v| / |k| must be below 65504.
    All contiguous and on one device, but for cu_seqlens. Values of g are not checked: that would synchronise.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    cu_seqlens: Tensor
    initial: Tensor
    final: Tensor
    out: Tensor
    scale: float


@dataclass(frozen=True)
class Plan:
    """Which tokens each program works on; the same for every layer of a model, so it is made once a batch.

    cu_seqlens: [N + 1]; first_chunks: [N + 1], the first chunk of every sequence, and how many there are; spans:
    [chunks, 2], first token of each chunk and first one after its sequence. All int32.
    """

    chunk: int
    tokens: int
    cu_seqlens: Tensor
    first_chunks: Tensor
    spans: Tensor


def plan(cu_seqlens: Tensor, chunk: int = 64, device: torch.device | str | None = None) -> Plan:
    """The tables for sequences of these boundaries, [N + 1], in chunks of 16, 32 or 64 tokens.

    device: where the tables go; None: where cu_seqlens is. Waits for cu_seqlens if it is on a GPU.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    check_one_of("chunk", chunk, CHUNKS)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        found = f"{tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}"
        raise ValueError(f"cu_seqlens is {found}; allowed: [N + 1], int32 or int64")
    bounds = cu_seqlens.to("cpu", torch.int64)
    lengths = bounds.diff()
    if bounds[0] != 0 or (lengths < 0).any() or bounds[-1] >= 2**31:
        raise ValueError(f"cu_seqlens is {bounds.tolist()}; allowed: from 0, never falling, below 2^31")
    counts = (lengths + chunk - 1) // chunk
    first_chunks = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    sequence = torch.repeat_interleave(counts)
    starts = bounds[sequence] + (torch.arange(len(sequence)) - first_chunks[sequence]) * chunk
    spans = torch.stack([starts, bounds[sequence + 1]], 1)
    tables = [x.to(cu_seqlens.device if device is None else device, torch.int32) for x in (bounds, first_chunks, spans)]
    return Plan(chunk, int(bounds[-1]), *tables)


def borders(chunk: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Matrices of zeros and ones that times the steps of g over a chunk's tokens give sums up to a border.

    [levels + 2, chunk, chunk], chunk = 2^levels. Matrix l: blocks have 2^l tokens, and every other one begins at a
    border. Of a token in an odd block the sum is that of the steps from the border up to it, its own included; in an
    even block, of those after it up to the border. The last two: sums to the end of the chunk and from its start.
    """
    i = torch.arange(chunk)
    row, column = i[:, None], i[None, :]
    levels = chunk.bit_length() - 1
    found = []
    for size in (1 << level for level in range(levels + 1)):
        sums = torch.where(row // size % 2 == 1, column <= row, column > row)
        found.append(sums & (row // size == column // size))
    return torch.stack([*found, column <= row]).to(device, dtype)


@dataclass(frozen=True)
class Extend:
    """The launches of one extend by name, in order (see the table at the top of this file); calling it makes them all.

    `launches["chunk_state"]()` repeats that kernel alone, on what the launches before it have left.
    """

    launches: Mapping[str, Launch]

    def __call__(self) -> None:
        for launch in self.launches.values():
            if launch.grid[0]:  # no tokens, no chunks
                launch()


def extend(
    x: ExtendInputs,
    v_first: bool,
    batch: Plan | None = None,
    tile: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    transposed: bool = False,
) -> Extend:
    """An extend with state [N, HV, V, K] if v_first, else [N, HV, K, V], as launches that the caller makes.

    batch: `plan` of x.cu_seqlens, which also chooses the chunk; None: made here, with chunks of 64.
    tile: values a program of chunk_state (BV), a power of two from 16; num_warps: 1, 2, 4 or 8, num_stages: 2 to 4,
    of the same kernel; None: `choose_launch`'s, or 4 and 2 for a tile of the caller's. transposed: see the table at the
    top of this file, only with v_first.
    Memory for w, u, v_new and the states between the chunks (in v's dtype) is allocated here and kept by the result.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    chosen = choose_launch(x, transposed) if tile is None else (tile, 4, 2)
    wanted = (tile, num_warps, num_stages)
    tile, num_warps, num_stages = (a if a is not None else b for a, b in zip(wanted, chosen, strict=True))
    check_extend(x, v_first, tile, num_warps, num_stages, transposed)
    if batch is None:
        batch = plan(x.cu_seqlens, device=x.v.device)
    if batch.tokens != len(x.v) or len(batch.cu_seqlens) != len(x.cu_seqlens) or batch.spans.device != x.v.device:
        found = f"{batch.tokens} tokens of {len(batch.cu_seqlens) - 1} sequences on {batch.spans.device}"
        allowed = f"{len(x.v)} tokens of {len(x.cu_seqlens) - 1} sequences on {x.v.device}"
        raise ValueError(f"batch (or cu_seqlens) is of {found}; allowed: {allowed}")
    (H, K), (HV, V) = x.q.shape[1:], x.v.shape[1:]
    per_channel = x.g.ndim == 3
    args = vars(x) | vars(batch) | _workspace(x, batch, per_channel)
    # The tensor cores take bf16 and fp16 as they are. What is fp32 in the solve goes through them as fp16 for bf16
    # (see `_merged`), and as TF32 in three products, nearly as good as fp32, for fp16.
    sizes = {"H": H, "HV": HV, "K": K, "V": V, "BT": batch.chunk}
    slices = {"BK": SLICE, "BV": SLICE}
    wide = {"BK": max(16, triton.next_power_of_2(K))}  # all channels at once
    solve = {"SUB": SUB, "SOLVE": PRECISIONS[x.v.dtype]}
    gates = {"PER_CHANNEL": per_channel, "DOT": "ieee"}  # DOT counts for fp32 inputs alone
    layout = {"V_FIRST": v_first}
    heads = len(batch.spans) * HV
    launches = {}
    if per_channel:
        table = borders(batch.chunk, torch.float32 if x.v.dtype == torch.float32 else torch.float16, x.v.device)
        channels = {"table": table, "LEVELS": len(table) - 2, "ASSEMBLY": x.v.dtype == torch.bfloat16}
        channels |= {"BK": max(SLICE, wide["BK"])}  # all of them, at SLICE's least
        prepare = args | sizes | slices | solve | gates | channels
        launches["prepare"] = _launch(_prepare_channels_kernel, heads, prepare, num_stages=3)
    else:
        prepare = args | sizes | slices | solve | gates
        launches["prepare"] = _launch(_prepare_kernel, heads, prepare, num_stages=3)
    state = args | sizes | wide | gates | layout | {"BV": tile, "TRANSPOSED": transposed}
    state |= {"k": args["decayed_k"], "HK": HV} if per_channel else {"HK": H}
    programs = (len(x.cu_seqlens) - 1) * HV * triton.cdiv(V, tile)
    launches["chunk_state"] = _launch(_chunk_state_kernel, programs, state, num_warps, num_stages)
    output = args | sizes | slices | gates | layout | {"BV": OUTPUTS}
    output |= {"q": args["decayed_q"]} if per_channel else {}
    launches["output"] = _launch(_output_kernel, heads * triton.cdiv(V, OUTPUTS), output, num_warps=8, num_stages=3)
    return Extend(launches)


def choose_launch(x: ExtendInputs, transposed: bool) -> tuple[int, int, int]:
    """Values a program of chunk_state, its warps and its stages.

    As many values as leave most multiprocessors a program: each reads all of w and k. Where that makes the tile small,
    a multiprocessor has one program and nothing else to do while that waits: then loads are made further ahead (for
    KDA, which loads more, by more warps), if shared memory has room for them.
    """
    widest = (TILES[0], 4, 2)
    if transposed or x.v.ndim != 3:  # which `check_extend` refuses
        return widest
    (HV, V), K = x.v.shape[1:], x.q.shape[-1]
    heads = (len(x.cu_seqlens) - 1) * HV
    enough = 3 * multiprocessors(x.v.device) / 4
    tile = next((tile for tile in TILES if heads * triton.cdiv(V, tile) >= enough), TILES[-1])
    if tile == TILES[0] or K * x.v.element_size() > 256:
        return tile, *widest[1:]
    return (tile, 8, 3) if x.g.ndim == 3 else (tile, 4, 4)


def _workspace(x: ExtendInputs, batch: Plan, per_channel: bool) -> dict[str, Tensor]:
    """What one kernel writes for the next; KDA's own tensors are empty for GDN and the other way round."""
    (T, HV, V), K, C = x.v.shape, x.q.shape[2], len(batch.spans)
    channels = K if per_channel else 0
    shapes = {
        "w": (T, HV, K), "u": (T, HV, V), "v_new": (T, HV, V), "states": (C, HV, *x.initial.shape[2:]),
        "decayed_q": (T, HV, channels), "decayed_k": (T, HV, channels),
        "query_scores": (T, HV, batch.chunk if per_channel else 0),
    }  # fmt: skip
    fp32 = {
        "key_scales": (0 if per_channel else T, HV), "carry": (0 if per_channel else T, HV),
        "total": (C, HV, K) if per_channel else (C, HV),
    }  # fmt: skip
    made = {name: torch.empty(shape, dtype=x.v.dtype, device=x.v.device) for name, shape in shapes.items()}
    return made | {name: torch.empty(shape, dtype=torch.float32, device=x.v.device) for name, shape in fp32.items()}


def _launch(kernel, programs: int, args: Mapping, num_warps: int = 4, num_stages: int = 2) -> Launch:
    """A launch with those of `args` that the kernel has parameters for."""
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return Launch(kernel, (programs,), {name: args[name] for name in kernel.arg_names}, options)


def check_extend(x: ExtendInputs, v_first: bool, tile: int, num_warps: int, num_stages: int, transposed: bool) -> None:
    """Raise ValueError for shapes, dtypes, strides, devices or launch choices that the kernels cannot take."""
    if x.q.ndim != 3 or x.v.ndim != 3:
        raise ValueError(f"q is {tuple(x.q.shape)} and v is {tuple(x.v.shape)}; allowed: [T, H, K] and [T, HV, V]")
    (T, H, K), (HV, V) = x.q.shape, x.v.shape[1:]
    if H == 0 or HV == 0 or HV % H:
        raise ValueError(f"v has {HV} heads and q has {H}; allowed: a multiple of q's")
    if not 1 <= K <= LARGEST_K or V < 1:
        raise ValueError(f"K is {K} and V is {V}; allowed: K from 1 to {LARGEST_K}, V from 1")
    check_one_of("v", x.v.dtype, DTYPES)
    if x.cu_seqlens.ndim != 1 or len(x.cu_seqlens) == 0:
        raise ValueError(f"cu_seqlens is {tuple(x.cu_seqlens.shape)}; allowed: [N + 1]")
    state = (len(x.cu_seqlens) - 1, HV, *((V, K) if v_first else (K, V)))
    gate = (T, HV, K) if x.g.ndim == 3 else (T, HV)
    shapes = {"q": (T, H, K), "k": (T, H, K), "v": (T, HV, V), "g": gate, "beta": (T, HV)}
    for name, shape in (shapes | {"initial": state, "final": state, "out": (T, HV, V)}).items():
        dtypes = (x.v.dtype,) if name in "qkv" else DTYPES if name == "out" else (torch.float32,)
        check_tensor(name, getattr(x, name), shape, dtypes, x.v.device, "v's")
    if tile < 16 or tile & (tile - 1):
        raise ValueError(f"tile is {tile}; allowed: a power of two from 16")
    check_one_of("num_warps", num_warps, (1, 2, 4, 8))
    check_one_of("num_stages", num_stages, STAGES)
    if transposed and not v_first:
        raise ValueError("transposed is True with a K-first state; allowed: only with v_first")
