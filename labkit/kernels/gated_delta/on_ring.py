"""A token, or drafts, on a ring beside each state, by the kernels that are fastest there.

| what       | where                                                                                                   |
|------------|---------------------------------------------------------------------------------------------------------|
| direct     | a token of GDN, of V-first states: of 16 bits, and from MANY value heads on of fp32                     |
| buffered   | any other token                                                                                         |
| in turn    | drafts of GDN from FEW value heads on, of V-first states on Hopper or newer                             |
| at once    | other drafts of GDN                                                                                     |
| one by one | drafts of KDA                                                                                           |

Value heads: of all sequences of a call. Each is a file beside this one; `buffered.py` says what a ring is.
"""

import torch
from torch import Tensor

from labkit.kernels.gated_delta import buffered, direct, drafts, in_turn
from labkit.kernels.gated_delta.buffered import Decode, DraftInputs, Ring
from labkit.kernels.gated_delta.recurrent import Inputs, StepInputs
from labkit.kernels.target import capability_of, multiprocessors

FEW, MANY = 512, 2048


def decode(x: StepInputs, ring: Ring, length: int, flush: Tensor | None = None) -> Decode:
    """One token a sequence, as launches that the caller makes by calling it; see `buffered.decode`, also for errors."""
    if _goes_direct(x, ring):
        return direct.decode(x, ring, length, flush)
    return buffered.decode(x, ring, length, flush)


def verify(x: DraftInputs, ring: Ring) -> Decode:
    """T drafts a sequence, as launches that the caller makes by calling it; see `buffered.verify`, also for errors."""
    if x.a.ndim == 4 or x.q.dtype != x.k.dtype:
        return buffered.verify(x, ring)
    return in_turn.verify(x, ring) if _in_turn(x) else drafts.verify(x, ring)


def pays(x: StepInputs) -> bool:
    """Whether a token on a ring takes no longer than a plain step, on an H100 and on an H200: from so many value heads.

    With few states to read a step is as long as its longest chain of loads and sums, and the ring's is longer: it pays
    from 1.5 value heads a multiprocessor on with fp32 states, from 3 with those of 16 bits that go directly, else from
    4. Not with states of 16 bits whose tokens have another dtype (0.88 times as fast on an H200), and never with those
    of 8 bits, whose conversion takes longer than writing them: there a ring is worth its error alone, since what is
    seldom written is seldom rounded.
    """
    heads = _value_heads(x) / multiprocessors(x.state.device)
    if x.state.dtype == torch.float32:
        return heads > (4 if x.a.ndim == 3 else 1.5)
    if x.state.dtype != x.q.dtype:
        return False
    return heads > (4 if direct.objection(x) else 3)


def _goes_direct(x: StepInputs, ring: Ring) -> bool:
    if direct.objection(x):
        return False
    if x.state.dtype == torch.float32:
        return _value_heads(x) >= MANY
    return buffered._takes_matrix(x, ring)


def _in_turn(x: DraftInputs) -> bool:
    return capability_of(x.state.device) is not None and _value_heads(x) >= FEW and not in_turn.objection(x)


def _value_heads(x: Inputs) -> int:
    return len(x.indices) * x.v.shape[-2]
