"""Drafts on a ring beside each state, by the kernels that are fastest there; see `buffered.py` for the ring.

| what       | where                                                                                                   |
|------------|---------------------------------------------------------------------------------------------------------|
| in turn    | drafts of GDN from MANY value heads a call on, of V-first states on Hopper or newer                     |
| at once    | other drafts of GDN                                                                                     |
| one by one | drafts of KDA                                                                                           |
"""

from labkit.kernels.gated_delta import buffered, drafts, in_turn
from labkit.kernels.gated_delta.buffered import Decode, DraftInputs, Ring
from labkit.kernels.target import COPY_ENGINE, capability_of

MANY = 512  # value heads of all sequences


def verify(x: DraftInputs, ring: Ring) -> Decode:
    """T drafts a sequence, as launches that the caller makes by calling it; see `buffered.verify`, also for errors."""
    if x.a.ndim == 4 or x.q.dtype != x.k.dtype:
        return buffered.verify(x, ring)
    return in_turn.verify(x, ring) if _in_turn(x) else drafts.verify(x, ring)


def _in_turn(x: DraftInputs) -> bool:
    capability = capability_of(x.state.device)
    if capability is None or capability < COPY_ENGINE or len(x.indices) * x.v.shape[-2] < MANY:
        return False
    try:
        in_turn.check_turns(x, in_turn.choose(x))
    except ValueError:
        return False
    return True
