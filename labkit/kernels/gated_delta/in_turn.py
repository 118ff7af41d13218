"""Verify of drafts on a ring by programs that take several states in turn, of which the next ones are under way.

In `drafts.verify` a program has one tile of a state: it waits for its slot, for the tile and for what is prepared, and
no other tile of its own is under way while it does. An H200 reads states 1.4 times as fast as an H100, with the same
multiprocessors: as many bytes more must be under way.

| kernel               | hypothesis                                                                                    |
|----------------------|-----------------------------------------------------------------------------------------------|
| _drafts_turns_kernel | a sequence's slot is read once, and the copy engine brings tiles to shared memory while those |
|                      | before them are used: bytes under way depend on neither registers nor the programs that fit   |

| choice   | hypothesis                                                                                                |
|----------|-----------------------------------------------------------------------------------------------------------|
| step     | as in `drafts.py`                                                                                         |
| heads    | value heads a program: many hide the first tile's wait, few leave no multiprocessor idle at the end       |
| stages   | tiles under way or in use: more bytes, until fewer programs fit                                           |

Bits are those of `drafts.verify`. Source of the ring: `buffered.py`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from labkit.kernels.gated_delta import buffered, drafts
from labkit.kernels.gated_delta.buffered import Decode, DraftInputs, Ring, _turn
from labkit.kernels.gated_delta.drafts import _columns_of, _solved, _times
from labkit.kernels.gated_delta.recurrent import Inputs, StepChoice
from labkit.kernels.target import COPY_ENGINE, capability_of

LEAST_PROGRAMS = 512  # about four a multiprocessor


@dataclass(frozen=True)
class TurnsChoice:
    """How such a verify is run: `heads` must divide all value heads, `stages` are 1 to 8."""

    step: StepChoice
    heads: int = 8
    stages: int = 3

    def __str__(self) -> str:
        return f"{self.step}, {self.heads} heads in turn, {self.stages} stages"


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
    slot, start, count, live = _turn(indices, starts, counts, n)
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


def verify(x: DraftInputs, ring: Ring, choice: TurnsChoice | None = None) -> Decode:
    """As `drafts.verify`, in two launches. Raises its errors, and ValueError for what `check_turns` refuses."""
    choice = choice or choose(x)
    check_turns(x, choice)
    prepare, whole = drafts.verify(x, ring, choice.step).launches
    N, HV = len(x.indices), x.v.shape[-2]
    more = {"HEADS": choice.heads, "STAGES": choice.stages, "tiles": _rows_of(x, choice.step.tile)}
    grid = (HV // choice.heads, N)
    return Decode((prepare, buffered._launch(_drafts_turns_kernel, grid, dict(whole.args) | more, whole.options)))


def _rows_of(x: Inputs, tile: int) -> TensorDescriptor:
    """The pool's values of V, one row of K channels after the other, of which so many are copied at a time."""
    pool, K = x.state, x.q.shape[-1]
    _, HV, V, _ = pool.shape
    rows = pool.as_strided((pool.stride(0) // K * (len(pool) - 1) + HV * V, K), (K, 1))
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [tile, K])


def choose(x: DraftInputs) -> TurnsChoice:
    """The choice from shapes alone: of some thirty, what was fastest on an H200."""
    return TurnsChoice(buffered._fitting(StepChoice(64, 1, 4), x), _heads(x), 3)


def _heads(x: Inputs) -> int:
    """Value heads a program: up to 8, while there are enough programs."""
    N, HV = len(x.indices), x.v.shape[-2]
    return max(n for n in (1, 2, 4, 8) if n == 1 or (HV % n == 0 and n * LEAST_PROGRAMS <= N * HV))


def objection(x: Inputs) -> str:
    """Which GPU and pool the kernel cannot take, and which it can; empty if it takes these."""
    K, found = x.q.shape[-1], capability_of(x.state.device)
    if found is not None and found < COPY_ENGINE:
        return f"compute capability is {found[0]}.{found[1]}; allowed with states in turn: from 9.0 (Hopper)"
    if not x.v_first:
        return "v_first is False; allowed with states in turn: True"
    if K & (K - 1):
        return f"q has {K} channels; allowed with states in turn: a power of two"
    if K * x.state.element_size() % 16 or x.state.stride(0) % K or x.state.data_ptr() % 16:
        found = f"state has {K} channels of {x.state.dtype}, and a slot every {x.state.stride(0)}"
        return f"{found}; allowed with states in turn: rows that begin at multiples of 16 bytes"
    return ""


def check_turns(x: Inputs, choice: TurnsChoice) -> None:
    """Raise ValueError for a pool or a choice that the kernel cannot take."""
    HV = x.v.shape[-2]
    if refused := objection(x):
        raise ValueError(refused)
    if choice.step.pieces != 1:
        raise ValueError(f"choice.step.pieces is {choice.step.pieces}; allowed with states in turn: 1")
    if choice.heads < 1 or HV % choice.heads:
        raise ValueError(f"choice.heads is {choice.heads}; allowed: a divisor of the {HV} value heads")
    if not 1 <= choice.stages <= 8:
        raise ValueError(f"choice.stages is {choice.stages}; allowed: 1 to 8")
