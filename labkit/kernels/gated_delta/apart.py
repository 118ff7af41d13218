"""Decode on a ring whose states are written by a kernel of their own: the one that all tokens run has no way to write.

In `buffered.decode` one token in L rebuilds and writes its state, in the same kernel: its registers are those of all
programs, so that few of them are there at once. That is hidden where memory is slow; an H200 reads the states 1.4 times
as fast as an H100, with the same multiprocessors.

| kernel       | hypothesis                                                                                            |
|--------------|-------------------------------------------------------------------------------------------------------|
| _step_kernel | no state is written: half the registers, so that more bytes are under way                             |
| _due_kernel  | each program looks through SHARE sequences for those whose state is due, about one in L: they are     |
|              | read a second time, which costs 1 / L of the reads, and few programs are started for nothing          |

On an H200 that was wrong for states in fp32: 1.12 to 1.19 times slower than one kernel (GDN, 64 to 512 sequences). With
fp16 it is as fast as the fastest choice of one kernel.

The sums of the ring are made ahead, as with `buffered.BufferedChoice.ahead`; what is rounded is the same but for the
last correction, which the state has as the ring keeps it. Source of the ring: see `buffered.py`.
"""

import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.gated_delta import buffered
from labkit.kernels.gated_delta.buffered import (
    BufferedChoice,
    Decode,
    Ring,
    _corrected,
    _logs,
    _ring_of,
    _turn,
    _with_entries,
)
from labkit.kernels.gated_delta.recurrent import StepChoice, StepInputs, _load_tile, _load_token, _store_tile

SHARE = 16  # sequences that a program of `_due_kernel` looks through


@triton.jit
def _step_kernel(
    state, indices, q, k, v, a, b, out, ring_u, starts, counts, factors, vectors, weights, slot_stride,
    q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, KDA: tl.constexpr, POLICY: tl.constexpr, R: tl.constexpr, BL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of one sequence, all K channels; the token is an entry of the ring."""
    n = tl.program_id(2).to(tl.int64)
    hv = tl.program_id(1)
    head = n * HV + hv
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    slot, start, count, live = _turn(indices, starts, counts, n)
    token = _load_token(q, k, a, b, n, hv // GROUP, hv, q_token, q_head, k_token, k_head, a_token, b_token, K, BK, KDA)
    ring_u += (slot * HV + hv) * (R * V)
    js = tl.arange(0, BL)
    u, _, _ = _corrected(
        state + slot * slot_stride + hv * (K * V), vs, live, v + n * v_token + hv * v_head, out + head * V,
        ring_u, (start + js) % R, (js < count) & live, token, (0.0, 0.0), factors, vectors, weights, head,
        K, V, BK, BL, V_FIRST, KDA, V % BV == 0, POLICY, True, False, DEPENDENT,
    )  # fmt: skip
    tl.store(ring_u + ((start + count) % R) * V + vs, u.to(ring_u.dtype.element_ty), mask=live & (vs < V))


@triton.jit(do_not_specialize=["length", "N"])
def _due_kernel(
    state, indices, ring_u, ring_k, ring_g, starts, counts, flush, length, N, slot_stride,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, KDA: tl.constexpr, POLICY: tl.constexpr, R: tl.constexpr,
    FORCED: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of those of SHARE sequences whose state is due, one after the other."""
    EVEN_V: tl.constexpr = V % BV == 0
    hv = tl.program_id(1)
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    first = tl.program_id(2) * SHARE
    for n in range(first, tl.minimum(first + SHARE, N)):
        slot = tl.load(indices + n).to(tl.int64)
        count = tl.load(counts + n) + 1  # with this token
        due = count >= length
        if FORCED:
            due = due | (tl.load(flush + n) != 0)
        live = slot >= 0
        if due & live:
            start = tl.load(starts + n)
            base = state + slot * slot_stride + hv * (K * V)
            S = _load_tile(base, vs, live, K, V, BK, V_FIRST, EVEN_V, POLICY)
            us, ks, gs = _ring_of(ring_u, ring_k, ring_g, slot, hv, GROUP, HV, K, V, R, KDA)
            logs = _logs(gs, (start + count + R - 1) % R, live, K, BK, KDA)
            whole = _with_entries(S, start, count, vs, live, us, ks, gs, logs, K, V, BK, V_FIRST, KDA, R)
            _store_tile(base, vs, live, whole, K, V, BK, V_FIRST, EVEN_V, POLICY)


def decode(
    x: StepInputs, ring: Ring, length: int, flush: Tensor | None = None, choice: BufferedChoice | None = None
) -> Decode:
    """As `buffered.decode`, in three launches. ValueError for a choice without sums made ahead, or with matrices.

    Those by matrix instructions: one of the choices that a search tries made an H200 read memory that is not there.
    Every ring must have room for it, counts below R: drafts can fill one, and then `buffered.write` comes first.
    """
    choice = choice or choose(x)
    if not choice.ahead:
        raise ValueError("choice.ahead is False; allowed with states written apart: True")
    if choice.matrix:
        raise ValueError("choice.matrix is True; allowed with states written apart: False")
    ahead, whole = buffered.decode(x, ring, length, flush, choice).launches
    arguments = dict(whole.args) | {"N": len(x.indices), "SHARE": SHARE}
    tiles, heads, N = whole.grid
    step = buffered._launch(_step_kernel, whole.grid, arguments, whole.options)
    options = {"num_warps": choice.step.num_warps}
    due = buffered._launch(_due_kernel, (tiles, heads, triton.cdiv(N, SHARE)), arguments, options)
    return Decode((ahead, step, due))


def choose(x: StepInputs) -> BufferedChoice:
    """The choice, whatever the dtypes: by counts of registers, not by times."""
    return BufferedChoice(buffered._fitting(StepChoice(32, 4, 2), x), ahead=True)
