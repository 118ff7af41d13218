"""Decode on a ring, several sequences a program: states of the next ones come while this one's is multiplied.

The step of `buffered.py`, whose programs end with their sequence: each waits for its slot, then for its state, and only
then has something to do. Where states are small that may be why so few bytes are under way in the mean.

| choice      | hypothesis                                                                                             |
|-------------|--------------------------------------------------------------------------------------------------------|
| each        | sequences that a program does one after the other: more of them wait less often, fewer leave the last  |
|             | round of programs fuller                                                                               |
| stages      | states come ahead into shared memory, where they take no registers: stages - 1 of them; with matrix,   |
|             | where the slot must come before its state, (stages - 1) / 2                                            |
| tile, warps | as in `buffered.py`                                                                                    |
| registers   | as there                                                                                               |
| matrix      | as there; of tiles from 64 on the products read the state from shared memory                           |

A state that is written is loaded once more: kept for that it would take registers in all tokens that do not write.
What all values of a token share is always made by a kernel ahead, `buffered`'s own.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from labkit.kernels.checks import check_one_of
from labkit.kernels.gated_delta import buffered
from labkit.kernels.gated_delta.buffered import (
    BufferedChoice,
    Decode,
    Ring,
    _after,
    _corrected,
    _logs,
    _plus_outer,
    _ring_of,
    _with_ring,
)
from labkit.kernels.gated_delta.gates import decay
from labkit.kernels.gated_delta.recurrent import (
    StepChoice,
    StepInputs,
    _gate_inputs,
    _load_tile,
    _load_token,
    _store_tile,
)
from labkit.kernels.launch import Launch


@triton.jit(do_not_specialize=["length", "N"])
def _streamed_kernel(
    state, indices, q, k, v, a, b, A_log, dt_bias, out, ring_u, ring_k, ring_g, starts, counts, flush,
    factors, vectors, weights, lower_bound, length, slot_stride, N,
    q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token,
    GROUP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, KDA: tl.constexpr, BOUNDED: tl.constexpr, POLICY: tl.constexpr,
    R: tl.constexpr, BL: tl.constexpr, FORCED: tl.constexpr, MATRIX: tl.constexpr, DEPENDENT: tl.constexpr,
    EACH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BV values of one value head of EACH sequences, all K channels."""
    EVEN_V: tl.constexpr = V % BV == 0
    hv = tl.program_id(1)
    h = hv // GROUP
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    js = tl.arange(0, BL)
    log_rate = tl.load(A_log + hv).to(tl.float32)
    biases = _gate_inputs(dt_bias, hv, K, BK, KDA)
    first = tl.program_id(2) * EACH
    if DEPENDENT:
        cuda.gdc_wait()
    for at in tl.range(first, tl.minimum(first + EACH, N), num_stages=STAGES):
        n = tl.cast(at, tl.int64)
        head = n * HV + hv
        slot = tl.load(indices + n).to(tl.int64)
        start = tl.load(starts + n)
        count = tl.load(counts + n)
        live = slot >= 0
        token = _load_token(q, k, a, b, n, h, hv, q_token, q_head, k_token, k_head, a_token, b_token, K, BK, KDA)
        base = state + slot * slot_stride + hv * (K * V)
        of_u, of_k, of_g = _ring_of(ring_u, ring_k, ring_g, slot, hv, GROUP, HV, K, V, R, KDA)
        valid = (js < count) & live
        entries = (start + js) % R
        u, _S, U = _corrected(
            base, vs, live, v + n * v_token + hv * v_head, out + head * V, of_u, entries, valid, token, (0.0, 0.0),
            factors, vectors, weights, head, K, V, BK, BL, V_FIRST, KDA, EVEN_V, POLICY, True, MATRIX, False,
        )  # fmt: skip
        writes = count + 1 >= length
        if FORCED:
            writes = writes | (tl.load(flush + n) != 0)
        if writes & live:
            decays = ()
            for p in tl.static_range(len(biases)):
                x = token[2][p].to(tl.float32) + biases[p].to(tl.float32)
                decays = decays + (decay(x, log_rate, lower_bound, BOUNDED),)
            logs = _after(_logs(of_g, (start + count + R - 1) % R, live & (count > 0), K, BK, KDA), decays)
            S = _load_tile(base, vs, live, K, V, BK, V_FIRST, EVEN_V, POLICY)
            whole = _with_ring(S, U, of_k, of_g, entries, valid, logs, K, BK, V_FIRST, KDA)
            whole = _plus_outer(whole, u, token[1], V_FIRST)
            _store_tile(base, vs, live, whole, K, V, BK, V_FIRST, EVEN_V, POLICY)
        else:
            entry = (start + count) % R
            tl.store(of_u + entry * V + vs, u.to(ring_u.dtype.element_ty), mask=live & (vs < V))


@dataclass(frozen=True)
class StreamedChoice:
    """How it is run; the table at the top of the file says what each choice is for. stages: 1 to 7."""

    step: StepChoice
    each: int = 8
    stages: int = 3
    matrix: bool = False
    registers: int = 0

    def __str__(self) -> str:
        words = [str(self.step), f"{self.each} sequences a program", f"{self.stages} stages"]
        words += ["matrix instructions"] * self.matrix
        return ", ".join(words + [f"{self.registers} registers"] * (self.registers > 0))


USUAL = StreamedChoice(StepChoice(64, 1, 4))


def decode(
    x: StepInputs, ring: Ring, length: int, flush: Tensor | None = None, choice: StreamedChoice = USUAL
) -> Decode:
    """One token a sequence; arguments and errors as of `buffered.decode`."""
    if type(choice.each) is not int or choice.each < 1:
        raise ValueError(f"each is {choice.each!r}; allowed: an integer from 1")
    check_one_of("stages", choice.stages, (1, 2, 3, 4, 5, 6, 7))
    plain = BufferedChoice(choice.step, ahead=True, matrix=choice.matrix, registers=choice.registers)
    ahead, step = buffered.decode(x, ring, length, flush, plain).launches
    N, HV, V = x.v.shape
    given = step.args | {"N": N, "EACH": choice.each, "STAGES": choice.stages}
    args = {name: given[name] for name in _streamed_kernel.arg_names}
    grid = (triton.cdiv(V, choice.step.tile), HV, triton.cdiv(N, choice.each))
    return Decode((ahead, Launch(_streamed_kernel, grid, args, step.options)))
