"""The study's variants made ready for timing: launchers on random values, checked against the float64 reference."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from labkit import sources
from labkit.bench.spec import Arguments, Case, Trial
from labkit.kernels.gated_delta import chunked as kernels
from labkit.kernels.gated_delta import recurrent, reference
from labkit.kernels.gated_delta.chunked import ExtendInputs
from labkit.kernels.gated_delta.recurrent import StepInputs, VerifyInputs
from labkit.studies.state_layout import flashinfer, layouts, peers, sglang, vllm, ways
from labkit.studies.state_layout.variants import LENGTHS, SIGNATURE
from labkit.sweep import gated_delta, tuning
from labkit.sweep.trial import DTYPES, Call, Random, chosen, given, kept, relative_rmse, repeated, trial, tune_anew

CHECKED = 8  # sequences, or tokens at each end, that are compared with the float64 reference
CHECKED_AGAIN = 2  # sequences, after every block of a reader's function
SETTLED = 40  # calls with the same inputs after which 0.5 ** 40 is left of a state
LONGEST_CHECKED = 1024  # tokens of an extend that are compared token by token; the reference makes one step a token
# Relative RMSE: a bf16 output rounds to 2^-9; an fp32 state differs by the order of its sums alone. Extend multiplies
# values of the inputs' dtype, and keeps what one kernel hands to the next in it.
OUT_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 1e-3}
STATE_TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3}
EXTEND_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 5e-3}
# SGLang rounds β to the dtype of b, bf16, where its gates are a call of their own and where q, k and v are packed: by
# 2^-9 of what a token adds to the state.
BETA_ROUNDED = {"state": 1e-3}
# FlashInfer normalises q and k first, and rounds them to bf16 before the first product.
NORMALISED_FIRST = {"out": 8e-3, "state": 8e-3}
DRAWN_TOGETHER = 256  # tokens whose random inputs, and their gates, are made at once


# decode and verify


def in_place(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The ceiling, on the states of a batch."""
    states = torch.ones((sets, x["batch"] * x["HV"] * x["K"] * x["V"]), dtype=DTYPES[x["state"]], device=device)
    return trial([peers.in_place(part, -1.0) for part in states])


def grid(x: Case, device: Any, sets: int, seed: int, layout: str, BV: int, warps: int, folded: bool) -> Trial:
    """A point of the grid."""
    choice = {"folded": True} if folded else {}
    launch = layouts.decode_v_first if layout == "VK" else layouts.decode_k_first
    inputs = _step_inputs(x, device, sets, seed, layout == "VK")
    return _stepped(x, inputs, lambda item: launch(layouts.DecodeInputs(*_values(item)), BV, warps, **choice))


def added(function: Callable[..., Any], x: Case, device: Any, sets: int, seed: int) -> Trial:
    """A decode step by a function of the reader's own, on a state [slots, HV, V, K]."""
    items = _step_inputs(x, device, sets, seed, v_first=True)
    calls = [partial(function, *_values(item)) for item in items]
    picks = [torch.arange(min(CHECKED, x["batch"]), device=device)] * sets  # the sequences that are checked

    def states(i: int) -> Tensor:
        return items[i].state[items[i].indices[picks[i]].long()]

    def other_step(i: int, random: Random) -> None:
        items[0].A_log.uniform_(1, 16, generator=random.generator).log_()  # it is the same for all sets
        for one in items:
            for part in (one.q, one.k, one.v, one.b):
                random.fill(part)
            one.a.copy_(_fast(one, random))
            one.indices.copy_(one.indices[random.order(x["batch"])])
        picks[i] = random.order(x["batch"])[:CHECKED_AGAIN]
        items[i].state[items[i].indices[picks[i]].long()] = random.fill(states(i))

    def expected(i: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        item, S = items[i], states(i)
        q, k, v, a, b = (part[picks[i]] for part in (item.q, item.k, item.v, item.a, item.b))
        for _ in range(min(count, SETTLED)):
            o, S = reference.decode_step(S, q, k, v, *_gates(item, a, b), item.scale)
        return picks[i], o, S

    def results(i: int) -> dict[str, Tensor]:
        return {"out": items[i].out, "state": states(i)}

    def errors(exact: tuple[Tensor, Tensor, Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
        some, o, S = exact
        return {"out": relative_rmse(found["out"][some], o), "state": relative_rmse(found["state"], S)}

    read = [name for name in SIGNATURE if name not in ("state", "out", "scale")]
    inputs = [{name: getattr(item, name) for name in read} for item in items]
    outputs = [{"out": item.out} for item in items]
    once = _step_tolerance(x)
    often = {name: 2 * value for name, value in once.items()}  # roundings of the state go from call to call
    return given(calls, Arguments(inputs, outputs, (other_step,), expected, errors, results, often), once)


def _fast(item: StepInputs, random: Random) -> Tensor:
    """Values of a with which a state forgets, by a decay of 0.2 to 0.5, so that any number of calls can be followed."""
    alpha = torch.empty(item.a.shape, device=item.a.device).uniform_(0.2, 0.5, generator=random.generator)
    return (-alpha.log() / item.A_log.exp()).expm1().log() - item.dt_bias


def _values(item: StepInputs) -> list[Any]:
    return [getattr(item, name) for name in SIGNATURE]


def step(x: Case, device: Any, sets: int, seed: int, v_first: bool, in_order: bool = False) -> Trial:
    """The production decode, with the choice of its rule; in_order: slots one after the other."""
    return _stepped(x, _step_inputs(x, device, sets, seed, v_first, in_order), recurrent.decode)


def fla_in_place(x: Case, device: Any, sets: int, seed: int, v_first: bool, tile: int) -> Trial:
    """fla-core's kernel on the states in place."""
    inputs = _step_inputs(x, device, sets, seed, v_first, in_order=True)
    return _stepped(x, inputs, lambda item: peers.fla_in_place(item, tile))


def fla_step(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> Trial:
    """fla-core's public call, which leaves the states as they are."""
    inputs = _step_inputs(x, device, sets, seed, v_first, in_order=True)
    calls = [peers.fla_step(item) for item in inputs]

    def check() -> dict[str, float]:
        o, S = calls[0]()
        return _step_errors(inputs[0], _states(inputs[0]), o[:, 0], _v_first(S[:CHECKED], v_first))

    return trial(calls, check=check, tolerance=_step_tolerance(x))


def attn_gym_step(x: Case, device: Any, sets: int, seed: int, in_order: bool = False) -> Trial:
    """attn-gym's paged decode; slot 0 is its padding."""
    return _stepped(x, _step_inputs(x, device, sets, seed, True, in_order, spare=1), peers.attn_gym_step)


def sglang_step(x: Case, device: Any, sets: int, seed: int, source: str, form: str = "") -> Trial:
    """A release's decode; form: "packed", of q, k and v in one tensor, or "CuTe DSL"."""
    inputs = _step_inputs(x, device, sets, seed, sglang.V_FIRST[source])
    if form == "packed":
        made = _stepped(x, inputs, lambda item: sglang.packed(item, source))
        made.tolerance = made.tolerance | _wider(made.tolerance, BETA_ROUNDED)
        return made
    if form == "CuTe DSL":  # which takes the bias in bf16, as the engine loads it
        inputs = [replace(item, dt_bias=item.dt_bias.bfloat16()) for item in inputs]
        return _stepped(x, inputs, lambda item: sglang.cute(item, source), returns=True)
    return _stepped(x, inputs, lambda item: sglang.decode(item, source), returns=True)


def vllm_step(
    x: Case, device: Any, sets: int, seed: int, source: str, checked: bool = True, kda: bool = False
) -> Trial:
    """vLLM's decode kernel of a release, for GDN or KDA; checked: see `vllm.decode`."""
    inputs = _step_inputs(x, device, sets, seed, vllm.V_FIRST[source])
    call = vllm.decode_kda if kda else vllm.decode
    return _stepped(x, inputs, lambda item: call(item, source, checked), returns=True)


def flashinfer_decode(x: Case, device: Any, sets: int, seed: int, v_first: bool, in_order: bool = False) -> Trial:
    """FlashInfer's decode, which updates its states in place."""
    return _stepped(x, _step_inputs(x, device, sets, seed, v_first, in_order), flashinfer.decode)


def _wider(tolerance: Mapping[str, float], least: Mapping[str, float]) -> dict[str, float]:
    return {name: max(tolerance[name], value) for name, value in least.items()}


def _stepped(x: Case, inputs: Sequence[StepInputs], bind: Callable[[StepInputs], Call], returns: bool = False) -> Trial:
    """Decode steps that update the pool in place: ours, a reader's, a library's and a release's alike.

    returns: a call gives its output, [N, HV, V] with or without an axis of one, instead of writing x.out.
    """
    bound = [bind(item) for item in inputs]
    calls = kept(bound) if returns else bound

    def check() -> dict[str, float]:
        before, first = _states(inputs[0]), inputs[0]
        result = calls[0]()
        return _step_errors(first, before, result.view_as(first.v) if returns else first.out, _states(first))

    return trial(calls, () if returns else [item.out for item in inputs], check, _step_tolerance(x))


def _step_tolerance(x: Case) -> dict[str, float]:
    return {"out": OUT_TOLERANCE[x["activations"]], "state": STATE_TOLERANCE[x["state"]]}


def _states(item: StepInputs | VerifyInputs) -> Tensor:
    """A copy of the states of the sequences that are checked, [n, HV, V, K]."""
    return _v_first(item.state[item.indices[:CHECKED].long()], item.v_first)


def _v_first(states: Tensor, v_first: bool) -> Tensor:
    return states if v_first else states.transpose(-1, -2)


def _step_errors(item: StepInputs, before: Tensor, out: Tensor, after: Tensor) -> dict[str, float]:
    """Of the sequences that are checked. before, after: their states, [n, HV, V, K]."""
    q, k, v, a, b = (part[:CHECKED] for part in (item.q, item.k, item.v, item.a, item.b))
    o, S = reference.decode_step(before, q, k, v, *_gates(item, a, b), item.scale)
    return {"out": relative_rmse(out[:CHECKED], o), "state": relative_rmse(after, S)}


def _gates(item: StepInputs | VerifyInputs, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """α and β in float64, by the kind of gate that dt_bias is of."""
    if item.dt_bias.ndim == 1:
        return reference.decay_and_beta(a, b, item.A_log, item.dt_bias)
    return reference.kda_decay(a, item.A_log, item.dt_bias, item.lower_bound), torch.sigmoid(b.double())


def _step_inputs(
    x: Case, device: Any, sets: int, seed: int, v_first: bool, in_order: bool = False, spare: int = 0
) -> list[StepInputs]:
    """`sets` parts of one pool; slots in random order, or one after the other; `spare` unused first."""
    N, H, HV, K, V = (x[name] for name in ("batch", "H", "HV", "K", "V"))
    made = Random(device, seed, DTYPES[x["activations"]])
    pool = gated_delta.states(x, made, spare + sets * N, v_first, DTYPES[x["state"]])
    order = torch.arange(sets * N, device=device) if in_order else made.order(sets * N)
    # Each with an address that 16 divides: for another one Triton compiles the kernel once more
    slots = [some.clone() for some in (order + spare).to(torch.int32).view(sets, N)]
    q, k, v = made(sets, N, H, K), made(sets, N, H, K), made(sets, N, HV, V)
    a, b = made(sets, N, *gated_delta.gate_shape(x)), made(sets, N, HV)
    out = torch.empty((sets, N, HV, V), dtype=made.dtype, device=device)
    rest = {"state": pool, "scale": K**-0.5, "v_first": v_first} | gated_delta.rates(x, device)
    names = ("indices", "q", "k", "v", "a", "b", "out")
    return [
        StepInputs(**dict(zip(names, part, strict=True)), **rest)
        for part in zip(slots, q, k, v, a, b, out, strict=True)
    ]


def verify(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> Trial:
    """The production verify: T draft tokens a sequence, the state after each one stored, the pool only read."""
    return _verified(x, _verify_inputs(x, device, sets, seed, v_first), recurrent.verify)


def token_by_token(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> Trial:
    """The same of what decode offers."""
    return _verified(x, _verify_inputs(x, device, sets, seed, v_first), ways.token_by_token)


def _verified(x: Case, inputs: Sequence[VerifyInputs], bind: Callable[[VerifyInputs], Call]) -> Trial:
    """Verifications that write their output."""
    calls = [bind(item) for item in inputs]

    def out() -> Tensor:
        calls[0]()
        return inputs[0].out

    outputs = [tensor for one in inputs for tensor in (one.out, one.intermediate_states)]
    return trial(calls, outputs, partial(_verify_errors, inputs[0], out), _step_tolerance(x) | {"pool": 0.0})


def sglang_verify(x: Case, device: Any, sets: int, seed: int, source: str) -> Trial:
    """A release's verify, with the gates that it makes in a call of their own."""
    inputs = _verify_inputs(x, device, sets, seed, sglang.V_FIRST[source])
    calls = kept([sglang.verify(item, source) for item in inputs])
    check = partial(_verify_errors, inputs[0], lambda: calls[0]()[0].view_as(inputs[0].v))
    tolerance = _step_tolerance(x) | {"pool": 0.0}
    watched = [item.intermediate_states for item in inputs]
    return trial(calls, watched, check, tolerance | _wider(tolerance, BETA_ROUNDED))


def _verify_errors(item: VerifyInputs, run: Callable[[], Tensor]) -> dict[str, float]:
    """Of the sequences that are checked. run: a call of these inputs, which gives its output [N, T, HV, V]."""
    some = slice(0, CHECKED)
    start, before = _states(item), item.state.clone()
    out = run()
    parents = None if item.parents is None else item.parents[some]
    parts = (part[some] for part in (item.q, item.k, item.v))
    gates = _gates(item, item.a[some], item.b[some])
    o, S = reference.verify(start, *parts, *gates, item.scale, parents)
    after = _v_first(item.intermediate_states[item.cache_indices[some].long()], item.v_first)
    changed = 0.0 if torch.equal(before, item.state) else math.inf  # the pool must be left as it was
    return {"out": relative_rmse(out[some], o), "state": relative_rmse(after, S), "pool": changed}


def _verify_inputs(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> list[VerifyInputs]:
    N, T = x["batch"], x["T"]
    found = []
    for parts in gated_delta.tokens(x, device, sets, seed, v_first, (T,)):
        parts["intermediate_states"] = parts["state"].new_empty((N, T, *parts["state"].shape[1:]))
        parts["cache_indices"] = torch.arange(N, dtype=torch.int32, device=device)
        parts["parents"] = gated_delta.tree(N, T, device) if x["draft"] == "tree" else None
        found.append(VerifyInputs(**parts))
    return found


def drift(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> Trial:
    """A decode whose fact `drift` is its errors along many tokens, in place of accuracy runs, which need a model."""
    made = step(x, device, sets, seed, v_first)
    made.facts = lambda: {"drift": _errors_along(x, device, seed, v_first)}
    return made


def _errors_along(x: Case, device: Any, seed: int, v_first: bool) -> list[list[float]]:
    """At every power of two: tokens so far, relative RMSE of the last output and of the state, against float64."""
    tokens, made = x["tokens"], Random(device, seed, DTYPES[x["activations"]])
    [item] = _step_inputs(x, device, 1, seed, v_first)
    exact = _v_first(item.state[item.indices.long()], v_first).double().clone()
    o, place = torch.empty_like(item.out, dtype=torch.float64), torch.zeros(1, dtype=torch.int64, device=device)
    parts = {name: getattr(item, name) for name in ("q", "k", "v", "a", "b")}
    drawn = {name: part.new_empty(min(DRAWN_TOGETHER, tokens), *part.shape) for name, part in parts.items()}
    launch = recurrent.decode(item)

    def step() -> None:
        for name, part in parts.items():
            part.copy_(drawn[name].index_select(0, place)[0])
        alpha, beta = _gates(item, item.a, item.b)
        new_o, new_exact = reference.decode_step(exact, item.q, item.k, item.v, alpha, beta, item.scale)
        o.copy_(new_o)
        exact.copy_(new_exact)
        launch()
        place.add_(1)

    # As a graph: its dozens of small launches take the host longer than the GPU
    step_on = repeated(step, (exact, item.state, place), exact.device)
    found = []
    for first in range(1, tokens + 1, DRAWN_TOGETHER):
        count = min(DRAWN_TOGETHER, tokens + 1 - first)
        for name, part in parts.items():
            drawn[name][:count] = made(count, *part.shape)
        place.zero_()
        for token in range(first, first + count):
            step_on()
            if token & (token - 1) == 0:
                states = _v_first(item.state[item.indices.long()], v_first)
                found.append([token, relative_rmse(item.out, o), relative_rmse(states, exact)])
    return found


# extend


def extend(
    x: Case, device: Any, sets: int, seed: int, v_first: bool, transposed: bool = False, tile: int | None = None
) -> Trial:
    """The production extend. tile: of chunk_state; None: the rule's."""
    inputs = _extend_inputs(x, device, sets, seed, v_first)
    batch = kernels.plan(inputs[0].cu_seqlens, device=inputs[0].v.device)
    calls = [kernels.extend(item, v_first, batch, tile=tile, transposed=transposed) for item in inputs]
    errors = _extend_errors(inputs[0], v_first)

    def check() -> dict[str, float]:
        calls[0]()
        return errors(inputs[0].out, inputs[0].final)

    outputs = [tensor for item in inputs for tensor in (item.out, item.final)]
    return trial(calls, outputs, check, _extend_tolerance(x), launch=calls[0].launches["chunk_state"])


def chunk_state(x: Case, device: Any, sets: int, seed: int, v_first: bool, transposed: bool, tile: int) -> Trial:
    """The kernel of extend that takes the state from chunk to chunk, alone, on what those before it have left."""
    whole = extend(x, device, sets, seed, v_first, transposed, tile)
    calls = [ways.chunk_state(call) for call in whole.calls]
    return trial(calls, check=whole.check, tolerance=whole.tolerance)


def fla_extend(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> Trial:
    """fla-core's chunked call on the same inputs."""
    inputs = _extend_inputs(x, device, sets, seed, v_first)
    bounds = inputs[0].cu_seqlens.long()  # one for all sets: see `peers.fla_extend`
    calls = [peers.fla_extend(item, v_first, bounds) for item in inputs]
    tuners = gated_delta.tune_fla_anew(x.key)  # of the library, which is imported by now
    errors = _extend_errors(inputs[0], v_first)

    def check() -> dict[str, float]:
        o, S = calls[0]()
        return errors(o[0], S)

    tuning.choose(tuners, f"fla-core {v_first} {x.key}", calls[0])
    return trial(calls, check=check, tolerance=_extend_tolerance(x), facts=lambda: {"launches": chosen(tuners)})


def sglang_extend(x: Case, device: Any, sets: int, seed: int, source: str) -> Trial:
    """A release's chunked call, which updates the states of its pool in place; checked on those that it begins with."""
    v_first = sglang.V_FIRST[source]
    inputs = _extend_inputs(x, device, sets, seed, v_first)
    bounds = inputs[0].cu_seqlens.long()
    indices = torch.arange(len(bounds) - 1, dtype=torch.int32, device=bounds.device)
    tuners = tune_anew(sglang.modules(sglang.fla(source, "kda" if x["gate"] == "KDA" else "chunk")))
    calls = kept([sglang.extend(item, source, bounds, indices) for item in inputs])
    errors, initial = _extend_errors(inputs[0], v_first), inputs[0].initial.clone()

    def check() -> dict[str, float]:
        inputs[0].initial.copy_(initial)
        out = calls[0]()
        return errors(out[0], inputs[0].initial)

    tuning.choose(tuners, f"{source} {x.key}", calls[0])
    return trial(calls, check=check, tolerance=_extend_tolerance(x), facts=lambda: {"launches": chosen(tuners)})


def vllm_extend(x: Case, device: Any, sets: int, seed: int, source: str) -> Trial:
    """vLLM's chunked call of a release, which gives new states."""
    v_first = vllm.V_FIRST[source]
    inputs = _extend_inputs(x, device, sets, seed, v_first)
    bounds = inputs[0].cu_seqlens.long()
    calls = kept([vllm.extend(item, source, bounds) for item in inputs])
    tuners, errors = tune_anew(sglang.modules(sources.load(source, vllm.CHUNK))), _extend_errors(inputs[0], v_first)

    def check() -> dict[str, float]:
        out, final = calls[0]()
        return errors(out[0], final)

    tuning.choose(tuners, f"{source} {x.key}", calls[0])
    return trial(calls, check=check, tolerance=_extend_tolerance(x), facts=lambda: {"launches": chosen(tuners)})


def flashinfer_extend(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """FlashInfer's chunked call on the same inputs."""
    inputs = _extend_inputs(x, device, sets, seed, v_first=True)
    calls = [flashinfer.extend(item, max(LENGTHS[x["prefill"]])) for item in inputs]
    errors = _extend_errors(inputs[0], v_first=True)

    def check() -> dict[str, float]:
        calls[0]()
        return errors(inputs[0].out, inputs[0].final)

    outputs = [tensor for item in inputs for tensor in (item.out, item.final)]
    return trial(calls, outputs, check, NORMALISED_FIRST)


def _extend_tolerance(x: Case) -> dict[str, float]:
    return dict.fromkeys(("out", "state"), EXTEND_TOLERANCE[x["activations"]])


def _extend_errors(item: ExtendInputs, v_first: bool) -> Callable[[Tensor, Tensor], dict[str, float]]:
    """(out, final) -> errors of the longest sequence that is short enough to be followed token by token.

    Where none is, of the first tokens of the first sequence; its final state is then left to the kernels' own tests.
    What is expected is worked out once: it takes the reference a step a token.
    """
    bounds = item.cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    n = max(range(len(lengths)), key=lambda i: lengths[i] if lengths[i] <= LONGEST_CHECKED else 0)
    tokens = slice(bounds[n], bounds[n] + min(lengths[n], LONGEST_CHECKED))
    initial = _v_first(item.initial[n : n + 1], v_first).clone()  # which some update in place

    @cache
    def expected() -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (part[tokens] for part in (item.q, item.k, item.v, item.g, item.beta))
        return _followed(initial, [q, k, v, g.double().exp(), beta], item.scale)

    def errors(out: Tensor, final: Tensor) -> dict[str, float]:
        o, S = expected()
        found = {"out": relative_rmse(out[tokens], o)}
        if lengths[n] <= LONGEST_CHECKED:
            found["state"] = relative_rmse(_v_first(final[n : n + 1], v_first), S)
        return found

    return errors


def _followed(state: Tensor, parts: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """`reference.extend` of one sequence: o [T, HV, V] and the state after it, float64.

    state: [1, HV, V, K], before it; parts: q, k, v, alpha and beta of its tokens, [T, ..].
    """
    out, after = torch.zeros_like(parts[2], dtype=torch.float64), state.double().clone()
    place = torch.zeros(1, dtype=torch.int64, device=state.device)

    def step() -> None:
        o, S = reference.decode_step(after, *(part.index_select(0, place) for part in parts), scale)
        out.index_copy_(0, place, o)
        after.copy_(S)
        place.add_(1)

    # As a graph: its dozens of small launches take the host longer than the GPU
    step_on = repeated(step, (after, place), state.device)
    for _ in range(len(out)):
        step_on()
    return out, after


def _extend_inputs(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> list[ExtendInputs]:
    return gated_delta.prompts(x, LENGTHS[x["prefill"]], device, sets, seed, v_first)
