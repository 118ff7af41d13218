"""The study's variants made ready for timing: launchers on random values, checked against the float64 reference."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from labkit.bench.spec import Case, Trial
from labkit.kernels.gated_delta import (
    apart,
    buffered,
    chunked,
    direct,
    drafts,
    fused,
    in_turn,
    on_ring,
    recurrent,
    segmented,
)
from labkit.kernels.gated_delta.buffered import Decode, Ring
from labkit.kernels.gated_delta.recurrent import StepInputs, VerifyInputs
from labkit.studies.gated_delta_today import exact, inputs, peers, search, sglang
from labkit.studies.gated_delta_today.variants import DRIFT_LENGTHS, LENGTH, LENGTHS, NARROW, VERIFY_LENGTH
from labkit.studies.gated_delta_today.work import state_bytes
from labkit.sweep import gated_delta, tuning
from labkit.sweep.trial import DTYPES, Call, Random, chosen, kept, relative_rmse, repeated, trial

CHECKED = 32  # sequences that are compared with the float64 reference: at every place of a ring
# Relative RMSE: a bf16 output rounds to 2^-9, and so does what a ring keeps.
OUT_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}
STATE_TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3, "fp16": 5e-4, "fp8": 4e-2}
DRAFT_TOLERANCE = {"fp32": 1e-5, "bf16": 8e-3}  # of drafts, each of which reads what those before it have rounded
EXTEND_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
REBUILT = {"out": 8e-3, "state": 8e-3}  # SGLang: keys and β in bf16, and the state rebuilt by products of bf16
NORMALISED_FIRST = {"out": 8e-3, "state": 8e-3}  # FlashInfer: q and k are normalised, and rounded, first
DRAWN_TOGETHER = 256  # tokens whose random inputs are made at once


# ceilings


def read(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The states of a batch, read once."""
    return trial([peers.read(part) for part in _plain_states(x, device, sets)], moves=state_bytes(x))


def in_place(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The states of a batch, multiplied in place."""
    return trial([peers.in_place(part, -1.0) for part in _plain_states(x, device, sets)])


def _plain_states(x: Case, device: Any, sets: int) -> Tensor:
    return torch.ones((sets, x["batch"] * x["HV"] * x["K"] * x["V"]), dtype=DTYPES[x["state"]], device=device)


# decode


def ring(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The decode on a ring, with the choice of its rule."""
    held = _Held(x, device, sets, seed, True)
    return held.trial(*held.ours(LENGTH))


def ring_searched(x: Case, device: Any, sets: int, seed: int, v_first: bool = True, length: int | None = None) -> Trial:
    """The same with the fastest kernel and choice for this L; None: for the usual one, and then the fastest L.

    But of `layout`: there L stays, and the kernel too, so that both layouts have the same.
    """
    held, free = _Held(x, device, sets, seed, v_first), length is None and x.op == "ring"
    length, device = length or LENGTH, torch.device(device)
    wide = x["state"] == "fp32"
    known = {str(one): (buffered.decode, one) for one in search.choices(wide, v_first)}
    if x.op != "layout" and x["state"] not in NARROW and not direct.objection(held.items[0]):
        known |= {f"directly, {one}": (direct.decode, one) for one in search.direct(wide)}
    ways = {name: lambda way=way: held.ours(length, way[1], way[0])[1] for name, way in known.items()}
    choice, calls = search.fastest(ways, device)
    if free:
        decode, one = known[choice]
        ways = {str(n): lambda n=n: held.ours(n, one, decode)[1] for n in (length, *search.LENGTHS)}
        found, others = search.fastest(ways, device)
        length, calls = int(found), ([*calls, *others] if device.type == "meta" else others)
    return held.trial(length, _joined(calls, device), facts={"choice": choice, "L": length})


def ring_apart(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The decode on a ring whose states are written by a kernel of their own."""
    held = _Held(x, device, sets, seed, True)
    return held.trial(*held.ours(LENGTH, None, apart.decode))


def ring_apart_searched(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The same with the fastest choice."""
    held, device = _Held(x, device, sets, seed, True), torch.device(device)
    ways = {str(one): lambda one=one: held.ours(LENGTH, one, apart.decode)[1] for one in search.apart()}
    choice, calls = search.fastest(ways, device)
    return held.trial(LENGTH, _joined(calls, device), facts={"choice": choice, "L": LENGTH})


def plain(x: Case, device: Any, sets: int, seed: int, v_first: bool = True) -> Trial:
    """The decode that writes the state at every token."""
    items = inputs.steps(x, device, sets, seed, v_first)
    return _stepped(x, items, [recurrent.decode(item) for item in items])


def sglang_plain(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """SGLang's decode that writes the state at every token; it rounds β to bf16."""
    items = inputs.steps(x, device, sets, seed)
    return _stepped(x, items, [sglang.packed(item) for item in items], REBUILT)


def sglang_ring(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """SGLang's decode on a ring, as it launches it."""
    held = _Held(x, device, sets, seed, True)
    return held.trial(*held.theirs(LENGTH))


def sglang_searched(x: Case, device: Any, sets: int, seed: int, length: int | None = None) -> Trial:
    """The same with the fastest launch for this L; None: for the usual one, and then the fastest L."""
    held, free = _Held(x, device, sets, seed, True), length is None
    length, device = length or LENGTH, torch.device(device)
    ways = {name: lambda how=how: held.theirs(length, **how)[1] for name, how in search.LAUNCHES.items()}
    launch, calls = search.fastest(ways, device)
    if free:
        ways = {str(n): lambda n=n: held.theirs(n, **search.LAUNCHES[launch])[1] for n in (length, *search.LENGTHS)}
        found, calls = search.fastest(ways, device)
        length = int(found)
    return held.trial(length, calls, facts={"choice": launch, "L": length})


class _Held:
    """Tokens of a case, and rings beside their states, one for each L that is asked for."""

    def __init__(self, x: Case, device: Any, sets: int, seed: int, v_first: bool):
        self.x, self.device, self.sets, self.seed = x, device, sets, seed
        self.items = inputs.steps(x, device, sets, seed, v_first)
        self.rings: list[Ring] = []

    def ours(
        self, length: int, choice: Any = None, decode: Callable[..., Decode] = on_ring.decode
    ) -> tuple[int, list[Decode]]:
        """L, and the calls of a set each."""
        # A ring has a power of two entries, of which L - 1 are used: so one kernel serves many L.
        self.rings = self._rings(length, self._entries(max(LENGTH, triton.next_power_of_2(length))))
        pairs = zip(self.items, self.rings, strict=True)
        more = () if choice is None else (None, choice)
        return length, [decode(item, one, length, *more) for item, one in pairs]

    def theirs(self, length: int, **launch: int) -> tuple[int, list[Call]]:
        """The same of SGLang's."""
        caches = sglang.caches(self._entries(length))
        # Its ring as ours is: a key is normalised there, so that what it keeps of a correction is the correction.
        like = inputs.Entries(caches.k, caches.d, caches.g)
        self.rings = self._rings(length, like)
        self.caches = caches
        pairs = zip(self.items, self.rings, strict=True)
        return length, [sglang.ring(item, caches, one.counts, **launch) for item, one in pairs]

    def trial(self, length: int, calls: Sequence[Call], facts: dict[str, Any] | None = None) -> Trial:
        """facts: what was found by a search."""
        caches = getattr(self, "caches", None)
        item, held = self.items[0], self.rings[0]
        some = min(CHECKED, self.x["batch"])

        def now(counts: Tensor) -> Tensor:  # SGLang's decays, one a token, as ours are kept
            kept_now = replace(held, g=caches.g.cumsum(2)) if caches else held
            return exact.states_with(item, kept_now, counts, some)

        def check() -> dict[str, float]:
            o, after = exact.step(item, now(held.counts))
            calls[0]()
            found = now(buffered.moved(held, length))
            return {"out": relative_rmse(item.out[:some], o), "state": relative_rmse(found, after)}

        tolerance = REBUILT if caches else _tolerance(self.x)
        outputs = [one.out for one in self.items]
        more = {"facts": lambda: facts} if facts else {}
        return trial(calls, outputs, check, tolerance, launch=_last(calls[0]), **more)

    def _entries(self, length: int) -> inputs.Entries:
        return inputs.entries(self.x, len(self.items[0].state), length, self.device, self.seed)

    def _rings(self, length: int, held: inputs.Entries) -> list[Ring]:
        counts = inputs.positions(self.x["batch"], self.sets, length, self.device)
        if self.x.params.get("writes") == "never":
            counts = [one.clamp(max=length - 2) for one in counts]
        whole = held.ring(torch.zeros_like(counts[0]), counts[0])
        return [replace(whole, counts=one) for one in counts]


def _joined(calls: Sequence[Call], device: torch.device) -> list[Call]:
    """The calls of a set each; of tensors without memory, one call of all of them."""
    return list(calls) if device.type != "meta" else [lambda: [call() for call in calls]]


def _last(call: Any) -> Any:
    """The launch of a call that reads all states: its last one, but for what writes some; None of a library's."""
    if not isinstance(call, Decode):
        return None
    return [one for one in call.launches if one.kernel is not apart._due_kernel][-1]


def _stepped(
    x: Case, items: Sequence[StepInputs], calls: Sequence[Call], least: dict[str, float] | None = None
) -> Trial:
    """Decode steps that write the state. least: tolerances that are not to be narrower."""

    def check() -> dict[str, float]:
        some = min(CHECKED, x["batch"])
        o, after = exact.step(items[0], exact.in_place_states(items[0], some))
        calls[0]()
        found = exact.in_place_states(items[0], some)
        return {"out": relative_rmse(items[0].out[:some], o), "state": relative_rmse(found, after)}

    tolerance = {"out": OUT_TOLERANCE[x["activations"]], "state": STATE_TOLERANCE[x["state"]]}
    return trial(calls, [item.out for item in items], check, tolerance | (least or {}))


def _tolerance(x: Case) -> dict[str, float]:
    """What a ring keeps in the activations' dtype is as exact as that."""
    state = max(STATE_TOLERANCE[x["state"]], STATE_TOLERANCE[x["activations"]])
    return {"out": OUT_TOLERANCE[x["activations"]], "state": state}


# drift


def drift(x: Case, device: Any, sets: int, seed: int, length: int) -> Trial:
    """A decode on a ring of L entries whose facts are its errors along many tokens, and that of a ring read short."""
    held, device = _Held(x, device, sets, seed, True), torch.device(device)
    _, calls = held.ours(length)
    if device.type == "meta":  # what a call launches is asked for: that of the facts, too
        calls = _joined([*calls, _Along(x, device, seed).launches[length]], device)
    made = held.trial(length, calls)
    made.facts = lambda: errors_along(x.key, str(device), seed)[length]
    return made


class _Along:
    """Decodes of the same tokens with each L, from empty rings. The tokens are to be written into `item`."""

    def __init__(self, x: Case, device: Any, seed: int):
        [self.item] = inputs.steps(x, device, 1, seed)
        self.items = dict(zip(DRIFT_LENGTHS, [inputs.like([self.item])[0] for _ in DRIFT_LENGTHS], strict=True))
        self.rings = {length: buffered.empty_ring(self.item, length) for length in DRIFT_LENGTHS}
        self.launches = {length: on_ring.decode(one, self.rings[length], length) for length, one in self.items.items()}

    def decode(self) -> None:
        """One token with each."""
        for length, launch in self.launches.items():
            launch()
            self.rings[length].counts.copy_(buffered.moved(self.rings[length], length))

    def changed(self) -> list[Tensor]:
        """What a decode changes, but for its output."""
        rings = [part for one in self.rings.values() for part in (one.u, one.k, one.g, one.starts, one.counts)]
        return [*rings, *(one.state for one in self.items.values())]


@lru_cache(maxsize=1)
def errors_along(key: str, device: str, seed: int) -> dict[int, dict[str, Any]]:
    """Of each L: `drift`, at every power of two the tokens so far and the relative RMSE of output and state, float64.

    And `short`: the error of an output for which the ring was read one entry short. All go along together. key: of the
    case.
    """
    x = Case("drift", json.loads(key))
    tokens, made = x["tokens"], Random(device, seed, DTYPES[x["activations"]])
    along = _Along(x, device, seed)
    item, rings = along.item, along.rings
    expected = exact.in_place_states(item, x["batch"]).double().clone()
    o, place = torch.empty_like(item.out, dtype=torch.float64), torch.zeros(1, dtype=torch.int64, device=device)
    parts = {name: getattr(item, name) for name in ("q", "k", "v", "a", "b")}  # which all have in common
    drawn = {name: part.new_empty(min(DRAWN_TOGETHER, tokens), *part.shape) for name, part in parts.items()}

    def step() -> None:
        for name, part in parts.items():
            part.copy_(drawn[name].index_select(0, place)[0])
        new_o, new_expected = exact.step(item, expected)
        o.copy_(new_o)
        expected.copy_(new_expected)
        place.add_(1)

    # As graphs: dozens of small launches take the host longer than the GPU
    step_on = repeated(step, (expected, place), expected.device)
    decode_on = repeated(along.decode, along.changed(), expected.device)
    found: dict[int, dict[str, Any]] = {length: {"drift": []} for length in DRIFT_LENGTHS}
    for first in range(1, tokens + 1, DRAWN_TOGETHER):
        count = min(DRAWN_TOGETHER, tokens + 1 - first)
        for name, part in parts.items():
            drawn[name][:count] = made(count, *part.shape)
        place.zero_()
        for token in range(first, first + count):
            step_on()
            if token == tokens:
                for length in (n for n in DRIFT_LENGTHS if n > 1):
                    found[length]["short"] = _read_short(along.items[length], rings[length], length, o)
            decode_on()
            if token & (token - 1) == 0:
                for length, one in along.items.items():
                    states = exact.states_with(one, rings[length], rings[length].counts, x["batch"])
                    errors = [relative_rmse(one.out, o), relative_rmse(states, expected)]
                    found[length]["drift"].append([token, *errors])
    return found


def _read_short(item: StepInputs, held: Ring, length: int, expected: Tensor) -> float:
    """The control: the error of an output if the newest entry of the ring is not read."""
    alone = replace(item, state=item.state.clone(), out=torch.empty_like(item.out))
    parts = {name: getattr(held, name).clone() for name in ("u", "k", "g", "starts")}
    short = Ring(**parts, counts=(held.counts - 1).clamp(min=0))
    on_ring.decode(alone, short, length)()
    return relative_rmse(alone.out, expected)


# verify


def verify(x: Case, device: Any, sets: int, seed: int, writes: bool = False) -> Trial:
    """Drafts on the ring. writes: with the states written of those that have no more room, all drafts accepted."""
    held = _Drafts(x, device, sets, seed)
    return held.trial(held.written() if writes else held.ours(None), writes=writes)


def verify_searched(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The same by programs that take states in turn, with the fastest choice."""
    return _fastest_drafts(_Drafts(x, device, sets, seed, in_turn.verify), device, search.in_turn(x["HV"]))


def verify_one_by_one(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """One draft of a sequence after the other."""
    held = _Drafts(x, device, sets, seed, buffered.verify)
    return held.trial(held.ours(None))


def verify_at_once(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """All drafts of a sequence at once."""
    held = _Drafts(x, device, sets, seed, drafts.verify)
    return held.trial(held.ours(None))


def verify_at_once_searched(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The same with the fastest choice."""
    return _fastest_drafts(_Drafts(x, device, sets, seed, drafts.verify), device, search.AT_ONCE)


def _fastest_drafts(held: "_Drafts", device: Any, steps: Sequence[Any]) -> Trial:
    ways = {str(step): lambda step=step: held.ours(step) for step in steps}
    choice, calls = search.fastest(ways, torch.device(device))
    return held.trial(_joined(calls, torch.device(device)), {"choice": choice})


def stored(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The verify that stores the state after every draft."""
    items = _stored_inputs(x, device, sets, seed)
    return _stored_trial(x, items, [recurrent.verify(item) for item in items])


def sglang_stored(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """SGLang's."""
    items = _stored_inputs(x, device, sets, seed)
    calls = kept([sglang.stored(item) for item in items])
    return _stored_trial(x, items, calls, returns=True)


def sglang_verify(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """SGLang's drafts on a ring."""
    held = _Drafts(x, device, sets, seed)
    pairs = zip(held.items, held.rings, strict=True)
    caches = sglang.caches(held.entries)
    calls = [sglang.verify(item, caches, one.starts, one.counts) for item, one in pairs]
    like = inputs.Entries(caches.k, caches.d, caches.g)
    held.rings = held.of(like, [one.counts for one in held.rings])
    return held.trial(calls, tolerance={"out": REBUILT["out"]})


class _Drafts:
    """Drafts of a case, and rings in which each sequence has room for them: 0, T, 2 T … entries, equally often."""

    def __init__(self, x: Case, device: Any, sets: int, seed: int, verify: Callable[..., Decode] = on_ring.verify):
        self.x, self.items, self.verify = x, inputs.drafts(x, device, sets, seed), verify
        self.entries = inputs.entries(x, len(self.items[0].state), VERIFY_LENGTH, device, seed)
        T = x["T"]
        places = VERIFY_LENGTH // T
        counts = [one * T for one in inputs.positions(x["batch"], sets, places, device)]
        slots = torch.arange(len(self.items[0].state), dtype=torch.int32, device=device)
        self.first = (7 * slots + VERIFY_LENGTH - T) % VERIFY_LENGTH  # most rings go over their end
        self.rings = self.of(self.entries, counts)

    def of(self, held: inputs.Entries, counts: Sequence[Tensor]) -> list[Ring]:
        """Rings of these entries, one for each set."""
        starts = [self.first[item.indices.long()] for item in self.items]
        whole = held.ring(starts[0], counts[0], self.first)
        return [replace(whole, starts=start, counts=one) for start, one in zip(starts, counts, strict=True)]

    def ours(self, step: Any) -> list[Decode]:
        """The calls of a set each."""
        more = () if step is None else (step,)
        return [self.verify(item, one, *more) for item, one in zip(self.items, self.rings, strict=True)]

    def written(self) -> list[Call]:
        """The same, and before it the states of those whose ring was full, whose places are then empty."""
        found = []
        for item, one in zip(self.items, self.rings, strict=True):
            write = buffered.write(item, self._full(one), (one.counts == 0).int())
            found.append(Decode((write, *self.verify(item, one).launches)))
        return found

    def _full(self, one: Ring) -> Ring:
        """With full rings where they are empty, as they were before the states were written."""
        return replace(one, counts=torch.where(one.counts == 0, VERIFY_LENGTH, one.counts).int())

    def trial(
        self, calls: Sequence[Call], facts: dict[str, Any] | None = None, tolerance: Any = None, writes: bool = False
    ) -> Trial:
        """Checked: outputs, and the states with all drafts of a chain accepted."""
        item, held, some = self.items[0], self.rings[0], min(CHECKED, self.x["batch"])
        counts = self._full(held).counts if writes else held.counts
        slots = item.indices[:some].long()
        parts = (item.state, held.u, held.k, held.g) if writes else ()
        before = [part[slots].clone() for part in parts]

        def check() -> dict[str, float]:
            for part, values in zip(parts, before, strict=True):  # drafts lie where a ring that was written began
                part[slots] = values
            o, after = exact.drafts(item, exact.states_with(item, held, counts, some))
            calls[0]()
            errors = {"out": relative_rmse(item.out[:some], o)}
            if item.parents is None and "state" in allowed:
                states = exact.states_with(item, held, held.counts + self.x["T"], some)
                errors["state"] = relative_rmse(states, after[:, -1])
            return errors

        allowed = tolerance or _of_drafts(self.x)
        more = {"facts": lambda: facts} if facts else {}
        return trial(calls, [one.out for one in self.items], check, allowed, launch=_last(calls[0]), **more)


def _stored_inputs(x: Case, device: Any, sets: int, seed: int) -> list[VerifyInputs]:
    found = []
    for one in inputs.drafts(x, device, sets, seed):
        N, T = one.q.shape[:2]
        space = torch.empty((N, T, *one.state.shape[1:]), dtype=one.state.dtype, device=device)
        slots = torch.arange(N, dtype=torch.int32, device=device)
        found.append(VerifyInputs(**vars(one), intermediate_states=space, cache_indices=slots))
    return found


def _stored_trial(x: Case, items: Sequence[VerifyInputs], calls: Sequence[Call], returns: bool = False) -> Trial:
    """returns: a call gives its output instead of writing x.out."""
    first, some = items[0], min(CHECKED, x["batch"])

    def check() -> dict[str, float]:
        o, after = exact.drafts(first, exact.in_place_states(first, some))
        result = calls[0]()
        out = result.view_as(first.v) if returns else first.out
        errors = {"out": relative_rmse(out[:some], o)}
        return errors | {"state": relative_rmse(first.intermediate_states[:some], after)}

    watched = [] if returns else [item.out for item in items]
    return trial(calls, watched, check, _of_drafts(x) | (REBUILT if returns else {}))


def _of_drafts(x: Case) -> dict[str, float]:
    """By what states and ring are rounded to."""
    largest = max(DRAFT_TOLERANCE[x["state"]], DRAFT_TOLERANCE[x["activations"]])
    return {"out": largest, "state": largest}


# prefill


def extend(x: Case, device: Any, sets: int, seed: int, segments: int | None = None) -> Trial:
    """A prefill with so many segments a sequence; None: the rule's."""
    items = gated_delta.prompts(x, LENGTHS[x["prefill"]], device, sets, seed)
    bounds, device = items[0].cu_seqlens, items[0].v.device
    rule = segments is None
    cut = segmented.choose(bounds, x["HV"], device=device) if rule else segmented.cut(bounds, segments, device=device)
    return _in_segments(x, items, segmented.extend, cut)


def fused_extend(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """A prefill that stores less between its launches, with the rule's segments."""
    items = gated_delta.prompts(x, LENGTHS[x["prefill"]], device, sets, seed)
    cut = fused.choose(items[0].cu_seqlens, x["HV"], items[0].v.device)
    return _in_segments(x, items, fused.extend, cut)


def fused_searched(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The same with the fastest number of segments, one among them."""
    items, device = gated_delta.prompts(x, LENGTHS[x["prefill"]], device, sets, seed), torch.device(device)
    most = math.ceil(max(LENGTHS[x["prefill"]]) / (fused.SHORTEST * fused.CHUNK))
    counts = [count for count in (1, *search.SEGMENTS) if count <= most]
    cuts = {str(count): fused.cut(items[0].cu_seqlens, count, device=device) for count in counts}
    ways = {name: lambda cut=cut: [fused.extend(item, True, cut) for item in items] for name, cut in cuts.items()}
    found, calls = search.fastest(ways, device)
    return _extended(x, items, _joined(calls, device), lambda: {"segments": int(found)})


def fla_extend(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """fla-core's chunked call on the same inputs."""
    items = gated_delta.prompts(x, LENGTHS[x["prefill"]], device, sets, seed)
    bounds = items[0].cu_seqlens.long()
    calls = kept([peers.fla_extend(item, bounds) for item in items])
    tuners = gated_delta.tune_fla_anew(x.key)  # of the library, which is imported by now
    tuning.choose(tuners, f"fla-core {x.key}", calls[0])

    def result() -> tuple[Tensor, Tensor]:
        o, state = calls[0]()
        return o[0], state

    return _extended(x, items, calls, lambda: {"launches": chosen(tuners)}, result)


def flashinfer_extend(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """FlashInfer's chunked call on the same inputs."""
    items = gated_delta.prompts(x, LENGTHS[x["prefill"]], device, sets, seed)
    calls = [peers.flashinfer_extend(item, max(LENGTHS[x["prefill"]])) for item in items]
    made = _extended(x, items, calls)
    made.tolerance = NORMALISED_FIRST
    return made


def _in_segments(
    x: Case, items: Sequence[chunked.ExtendInputs], extend: Callable[..., chunked.Extend], cut: segmented.Segments
) -> Trial:
    """One of the lab's extends with these segments, whose facts have the control."""
    calls = [extend(item, True, cut) for item in items]
    return _extended(x, items, calls, lambda: {"segments": max(cut.counts)} | _control(x, items[0]))


def _extended(
    x: Case,
    items: Sequence[chunked.ExtendInputs],
    calls: Sequence[Call],
    facts: Callable[[], dict[str, Any]] = dict,
    result: Callable[[], tuple[Tensor, Tensor]] | None = None,
) -> Trial:
    """result: makes a call that gives its output and states instead of writing them."""

    def found() -> tuple[Tensor, Tensor]:
        if result:
            return result()
        calls[0]()
        return items[0].out, items[0].final

    def check() -> dict[str, float]:
        out, state = found()
        expected = _expected(x, items[0])
        return {"out": relative_rmse(out, expected["out"]), "state": relative_rmse(state, expected["state"])}

    def all_facts() -> dict[str, Any]:
        out, _ = found()
        return {"error": relative_rmse(out, _expected(x, items[0])["out"])} | facts()

    outputs = [] if result else [tensor for item in items for tensor in (item.out, item.final)]
    tolerance = dict.fromkeys(("out", "state"), EXTEND_TOLERANCE[x["activations"]])
    launches = getattr(calls[0], "launches", {})  # of the lab's: that which goes from chunk to chunk
    launch = launches.get("walk", launches.get("chunk_state"))
    return trial(calls, outputs, check, tolerance, facts=all_facts, launch=launch)


_EXPECTED: dict[str, Any] = {}  # of the last case and seed: its variants have the same inputs


def _expected(x: Case, item: chunked.ExtendInputs) -> Any:
    key = f"{x.key} {item.v.device} {float(item.v.flatten()[0])}"
    if key not in _EXPECTED:
        _EXPECTED.clear()
        _EXPECTED[key] = exact.Prompts(item).expected
    return _EXPECTED[key]


def _control(x: Case, item: chunked.ExtendInputs) -> dict[str, float]:
    """The error of the last piece's outputs if the map of the piece before it were left out."""
    expected = _expected(x, item)
    return {"left out": relative_rmse(expected["without"], expected["with"])} if "without" in expected else {}
