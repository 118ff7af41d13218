"""What is timed beside the grid of `study.py`: the production kernels of decode, verify and extend, and libraries'.

Each function is `prepare` of a variant. Libraries are imported only in the function that times them.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from labkit.bench.spec import Case, Trial
from labkit.launch import Launch
from labkit.state_layout import reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECKED = 8  # sequences, or tokens at each end, that are compared with the float64 reference
LONGEST_CHECKED = 1024  # tokens of an extend that are compared token by token; the reference makes one step a token
# Relative RMSE: a bf16 output rounds to 2^-9; an fp32 state differs by the order of its sums alone. Extend multiplies
# values of the inputs' dtype, and keeps what one kernel hands to the next in it.
OUT_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 1e-3}
STATE_TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3}
EXTEND_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 5e-3}
TUNING_MS = (2, 10)  # of warming up and of timing, for each choice of a library that tunes itself
DRIFT_TOKENS = 8192
DRAWN_TOGETHER = 256  # tokens whose random inputs, and their gates, are made at once
PREFILLS = {  # name -> tokens of every sequence
    "1 x 512": (512,),
    "1 x 2048": (2048,),
    "1 x 8192": (8192,),
    "1 x 32768": (32768,),
    "8 x 1024": (1024,) * 8,
    "64 x 128": (128,) * 64,
    "ragged": (1, 7, 63, 64, 65, 300, 1000, 2500, 3200),
}
TINY = "tiny"
LENGTHS = PREFILLS | {TINY: (5, 0, 17)}
SIGNATURE = ("state", "indices", "q", "k", "v", "a", "b", "A_log", "dt_bias", "out", "scale")  # of DecodeInputs
Bind = Callable[[Any], Callable[[], Any]]  # inputs of one buffer set -> a call on them


# decode and verify


def grid(x: Case, device: Any, sets: int, seed: int, layout: str, launcher: str, choice: Mapping[str, Any]) -> Trial:
    """A point of the grid: `kernels.decode_k_first` or `decode_v_first` with this tile and so many warps."""
    from labkit.state_layout import kernels

    launch = getattr(kernels, launcher)

    def bind(item: Any) -> Launch:
        return launch(kernels.DecodeInputs(**{name: getattr(item, name) for name in SIGNATURE}), **choice)

    return _steps(x, device, sets, seed, layout == "VK", bind)


def added(function: Callable[..., Any], x: Case, device: Any, sets: int, seed: int) -> Trial:
    """A decode step by a function of the reader's own, on a state [slots, HV, V, K]."""

    def bind(item: Any) -> Callable[[], Any]:
        values = [getattr(item, name) for name in SIGNATURE]
        return lambda: function(*values)

    return _steps(x, device, sets, seed, True, bind)


def step(x: Case, device: Any, sets: int, seed: int, v_first: bool, in_order: bool = False) -> Trial:
    """The production decode, `recurrent.decode`, with the choice of its rule; in_order: slots one after the other."""
    from labkit.state_layout import recurrent

    return _steps(x, device, sets, seed, v_first, recurrent.decode, in_order)


def fla_step(x: Case, device: Any, sets: int, seed: int, v_first: bool, tile: int) -> Trial:
    """fla-core's recurrent GDN kernel, launched so that it updates the states in place; its own call never does."""
    from fla.ops.gated_delta_rule import fused_recurrent

    kernel = fused_recurrent.fused_recurrent_gated_delta_rule_fwd_kernel
    tokens, H, HV, K, V = (x[name] for name in ("batch", "H", "HV", "K", "V"))

    def bind(item: Any) -> Callable[[], Any]:
        states = item.state[item.indices[0] : item.indices[0] + tokens]  # the kernel takes no indices
        arguments = {
            "q": item.q, "k": item.k, "v": item.v, "g": item.a, "gk": None, "gv": None, "beta": item.b,
            "A_log": item.A_log, "dt_bias": item.dt_bias, "o": item.out, "h0": states, "ht": states,
            "cu_seqlens": None, "scale": item.scale, "T": 1, "H": H, "HV": HV, "K": K, "V": V, "BK": K, "BV": tile,
            "IS_BETA_HEADWISE": True, "USE_QK_L2NORM_IN_KERNEL": True, "APPLY_BETA_SIGMOID": True,
            "ALLOW_NEG_EIGVAL": False, "STATE_V_FIRST": v_first, "num_warps": 1, "num_stages": 3,
        }  # fmt: skip
        grid = (-(-V // tile) * tokens * HV,)
        return lambda: kernel[grid](**arguments)

    return _steps(x, device, sets, seed, v_first, bind, in_order=True)


def fla_public_step(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> Trial:
    """fla-core's public recurrent call, GDN or KDA: it writes a new fp32 state beside the old one."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    function = fused_recurrent_kda if x["gate"] == "KDA" else fused_recurrent_gated_delta_rule
    inputs = _step_inputs(x, device, sets, seed, v_first, in_order=True)
    calls = _kept([_fla_call(function, item, v_first) for item in inputs])

    def check() -> dict[str, float]:
        some = slice(0, CHECKED)
        o, S = calls[0]()
        expected = _expected_step(inputs[0], _v_first(inputs[0].state[inputs[0].indices[some].long()], v_first), some)
        found = o[some, 0], _v_first(S[some], v_first)
        return {
            name: relative_rmse(*pair)
            for name, pair in zip(("out", "state"), zip(found, expected, strict=True), strict=True)
        }

    return Trial(calls, check=check, tolerance=_step_tolerance(x))


def _fla_call(function: Callable[..., Any], item: Any, v_first: bool) -> Callable[[], Any]:
    """One token a sequence: tokens stand where the library has sequences, [N, 1, ..]."""
    count = len(item.q)
    states = item.state[item.indices[0] : item.indices[0] + count]
    q, k, v, a, b = (part[:, None] for part in (item.q, item.k, item.v, item.a, item.b))
    options = {
        "scale": item.scale, "initial_state": states, "output_final_state": True, "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True, "A_log": item.A_log, "dt_bias": item.dt_bias.flatten(),
        "use_beta_sigmoid_in_kernel": True, "state_v_first": v_first,
    }  # fmt: skip
    return lambda: function(q, k, v, g=a, beta=b, **options)


def _kept(calls: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """The calls, whose results live until the next call of the same set.

    Dropped at once, the allocator would give every set the same memory for them, which would stay in L2.
    """
    results: list[Any] = [None] * len(calls)

    def bind(i: int) -> Callable[[], Any]:
        def call() -> Any:
            results[i] = calls[i]()
            return results[i]

        return call

    return [bind(i) for i in range(len(calls))]


def attention_gym_step(x: Case, device: Any, sets: int, seed: int, in_order: bool = False) -> Trial:
    """attn-gym's paged decode, GDN or KDA: state [slots, HV, V, K], in place; slot 0 is its padding."""
    from attn_gym.linear import recurrent_gdn_decode, recurrent_kda_decode

    def bind(item: Any) -> Callable[[], Any]:
        packed = torch.cat([part.flatten(1) for part in (item.q, item.k, item.v)], 1)
        arguments = (packed, item.a[None], item.b[None], item.A_log, item.dt_bias, item.state, item.indices)
        if x["gate"] == "KDA":
            options = {"scale": item.scale, "out": item.out[None], "gate_transform": "softplus"}
            return lambda: recurrent_kda_decode(*arguments, **options)
        return lambda: recurrent_gdn_decode(*arguments, scale=item.scale, out=item.out[None])

    return _steps(x, device, sets, seed, True, bind, in_order, spare=1)


def _steps(
    x: Case, device: Any, sets: int, seed: int, v_first: bool, bind: Bind, in_order: bool = False, spare: int = 0
) -> Trial:
    """Decode steps on `sets` disjoint parts of one pool; bind: StepInputs -> a call that updates it in place."""
    inputs = _step_inputs(x, device, sets, seed, v_first, in_order, spare)
    calls = [bind(item) for item in inputs]
    some = slice(0, CHECKED)

    def states() -> Tensor:
        return _v_first(inputs[0].state[inputs[0].indices[some].long()], v_first)

    def check() -> dict[str, float]:
        before = states().clone()
        calls[0]()
        o, S = _expected_step(inputs[0], before, some)
        return {"out": relative_rmse(inputs[0].out[some], o), "state": relative_rmse(states(), S)}

    return _with_outputs([item.out for item in inputs], calls, check, _step_tolerance(x))


def _with_outputs(
    outputs: Sequence[Tensor],
    calls: Sequence[Any],
    check: Callable[[], dict[str, float]],
    tolerance: Mapping[str, float],
) -> Trial:
    """A trial whose outputs are poisoned, and asked after."""

    def poison() -> None:
        for out in outputs:
            out.fill_(math.nan)

    def written() -> bool:
        return not any(bool(out.isnan().any()) for out in outputs)

    return Trial(calls, poison, written, check, tolerance, calls[0] if isinstance(calls[0], Launch) else None)


def _step_tolerance(x: Case) -> dict[str, float]:
    return {"out": OUT_TOLERANCE[x["activations"]], "state": STATE_TOLERANCE[x["state"]]}


def _v_first(states: Tensor, v_first: bool) -> Tensor:
    return states if v_first else states.transpose(-1, -2)


def _expected_step(item: Any, before: Tensor, some: slice) -> tuple[Tensor, Tensor]:
    alpha, beta = _gates(item, item.a[some], item.b[some])
    return reference.decode_step(before, item.q[some], item.k[some], item.v[some], alpha, beta, item.scale)


def _gates(item: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """α and β in float64, by the kind of gate that dt_bias is of."""
    if item.dt_bias.ndim == 1:
        return reference.decay_and_beta(a, b, item.A_log, item.dt_bias)
    return reference.kda_decay(a, item.A_log, item.dt_bias, item.lower_bound), torch.sigmoid(b.double())


def _step_inputs(
    x: Case, device: Any, sets: int, seed: int, v_first: bool, in_order: bool = False, spare: int = 0
) -> list[Any]:
    """StepInputs of `sets` parts of one pool; slots in random order, or one after the other; `spare` unused first."""
    from labkit.state_layout.recurrent import StepInputs

    N, H, HV, K, V = (x[name] for name in ("batch", "H", "HV", "K", "V"))
    made = _Random(device, DTYPES[x["activations"]], seed)
    pool = made.states(spare + sets * N, (HV, V, K) if v_first else (HV, K, V), DTYPES[x["state"]])
    order = torch.arange(sets * N, device=device) if in_order else made.order(sets * N)
    slots = (order + spare).to(torch.int32).view(sets, N)
    q, k, v = made(sets, N, H, K), made(sets, N, H, K), made(sets, N, HV, V)
    a, b = made(sets, N, *_gate_shape(x)), made(sets, N, HV)
    out = torch.empty((sets, N, HV, V), dtype=made.dtype, device=device)
    rest = {"state": pool, "scale": K**-0.5, "v_first": v_first} | made.rates(x)
    names = ("indices", "q", "k", "v", "a", "b", "out")
    return [
        StepInputs(**dict(zip(names, part, strict=True)), **rest)
        for part in zip(slots, q, k, v, a, b, out, strict=True)
    ]


def _gate_shape(x: Case) -> tuple[int, ...]:
    return (x["HV"], x["K"]) if x.params.get("gate") == "KDA" else (x["HV"],)


class _Random:
    """Values of one seed, in the order in which they are asked for."""

    def __init__(self, device: Any, dtype: torch.dtype, seed: int):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator).to(self.dtype)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, device=self.device, generator=self.generator)

    def states(self, count: int, inner: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        pool = torch.empty((count, *inner), dtype=dtype, device=self.device)
        for part in pool.split(64):  # in parts: a copy of the whole pool in fp32 need not fit beside it
            part.normal_(generator=self.generator)
        return pool

    def rates(self, x: Case) -> dict[str, Tensor]:
        """A_log and dt_bias as models initialise them: decay rates of 1 to 16, softplus(dt_bias) of 1e-3 to 1e-1."""
        shape = _gate_shape(x)
        bias = torch.logspace(-3, -1, math.prod(shape), device=self.device).expm1().log().view(shape)
        return {"A_log": torch.linspace(1, 16, x["HV"], device=self.device).log(), "dt_bias": bias}


def verify(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> Trial:
    """The production verify: T draft tokens a sequence, the state after each one stored, the pool only read."""
    from labkit.state_layout import recurrent

    inputs = _verify_inputs(x, device, sets, seed, v_first)
    return _verified(x, inputs, [recurrent.verify(item) for item in inputs], v_first)


def token_by_token(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> Trial:
    """The same of what decode offers: the states copied, then for each token a decode and a copy of its states."""
    from labkit.state_layout import recurrent

    inputs = _verify_inputs(x, device, sets, seed, v_first)
    return _verified(x, inputs, [_tokens(recurrent, item) for item in inputs], v_first)


def _tokens(recurrent: Any, item: Any) -> Callable[[], Any]:
    """A chain of draft tokens through `decode`, on a copy of the sequences' states."""
    scratch = torch.empty_like(item.state[: len(item.indices)])
    slots = torch.arange(len(scratch), dtype=torch.int32, device=scratch.device)
    shared = {name: getattr(item, name) for name in ("A_log", "dt_bias", "scale", "lower_bound", "v_first")}
    after = item.intermediate_states[item.cache_indices.long()[0] :]
    outs = torch.empty_like(item.out.transpose(0, 1), memory_format=torch.contiguous_format)
    steps = [
        recurrent.decode(
            recurrent.StepInputs(
                state=scratch, indices=slots, out=outs[t],
                **{name: getattr(item, name)[:, t] for name in ("q", "k", "v", "a", "b")}, **shared,
            )
        )
        for t in range(item.q.shape[1])
    ]  # fmt: skip

    def call() -> None:
        torch.index_select(item.state, 0, item.indices, out=scratch)
        for t, launch in enumerate(steps):
            launch()
            after[: len(scratch), t].copy_(scratch)
        item.out.copy_(outs.transpose(0, 1))

    return call


def _verified(x: Case, inputs: Sequence[Any], calls: Sequence[Any], v_first: bool) -> Trial:
    item, some = inputs[0], slice(0, CHECKED)

    def check() -> dict[str, float]:
        before = item.state.clone()
        calls[0]()
        alpha, beta = _gates(item, item.a[some], item.b[some])
        start = _v_first(before[item.indices[some].long()], v_first)
        parents = None if item.parents is None else item.parents[some]
        parts = (part[some] for part in (item.q, item.k, item.v))
        o, S = reference.verify(start, *parts, alpha, beta, item.scale, parents)
        after = _v_first(item.intermediate_states[item.cache_indices[some].long()], v_first)
        changed = 0.0 if torch.equal(before, item.state) else math.inf  # the pool must be left as it was
        return {"out": relative_rmse(item.out[some], o), "state": relative_rmse(after, S), "pool": changed}

    outputs = [tensor for one in inputs for tensor in (one.out, one.intermediate_states)]
    return _with_outputs(outputs, calls, check, _step_tolerance(x) | {"pool": 0.0})


def _verify_inputs(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> list[Any]:
    from labkit.state_layout.recurrent import VerifyInputs

    N, T, H, HV, K, V = (x[name] for name in ("batch", "T", "H", "HV", "K", "V"))
    made = _Random(device, DTYPES[x["activations"]], seed)
    inner = (HV, V, K) if v_first else (HV, K, V)
    pool = made.states(sets * N, inner, DTYPES[x["state"]])
    slots = made.order(sets * N).to(torch.int32).view(sets, N)
    found = []
    for i in range(sets):
        parts = {"q": made(N, T, H, K), "k": made(N, T, H, K), "v": made(N, T, HV, V)}
        parts |= {"a": made(N, T, *_gate_shape(x)), "b": made(N, T, HV)}
        parts["out"] = torch.empty((N, T, HV, V), dtype=made.dtype, device=device)
        parts["intermediate_states"] = torch.empty((N, T, *inner), dtype=pool.dtype, device=device)
        parts["cache_indices"] = torch.arange(N, dtype=torch.int32, device=device)
        parts["parents"] = tree(N, T, device) if x["draft"] == "tree" else None
        rest = {"state": pool, "indices": slots[i], "scale": K**-0.5, "v_first": v_first} | made.rates(x)
        found.append(VerifyInputs(**parts, **rest))
    return found


def tree(N: int, T: int, device: Any) -> Tensor:
    """[N, T] parents of a binary draft tree in breadth-first order: the children of token i are 2 i + 1 and 2 i + 2."""
    parents = (torch.arange(T, device=device, dtype=torch.int32) - 1) // 2
    parents[0] = -1
    return parents.expand(N, T).contiguous()


# drift: an error that grows from token to token stands in for accuracy runs, which need a model


def drift(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> Trial:
    """A decode whose facts are its errors along many tokens, against float64 on the same inputs.

    `drift`: [tokens, error of the output, error of the state] at every power of two.
    """
    trial = step(x, device, sets, seed, v_first)
    trial.facts = lambda: {"drift": errors_along(x, device, seed, v_first, x["tokens"])}
    return trial


def errors_along(x: Case, device: Any, seed: int, v_first: bool, tokens: int) -> list[list[float]]:
    """[tokens so far, relative RMSE of the output of the last, of the state], at every power of two up to `tokens`."""
    from labkit.state_layout import recurrent

    made = _Random(device, DTYPES[x["activations"]], seed)
    [item] = _step_inputs(x, device, 1, seed, v_first)
    exact = _v_first(item.state[item.indices.long()], v_first).double()
    launch = recurrent.decode(item)
    found = []
    for first in range(1, tokens + 1, DRAWN_TOGETHER):
        count = min(DRAWN_TOGETHER, tokens + 1 - first)
        drawn = {name: made(count, *getattr(item, name).shape) for name in ("q", "k", "v", "a", "b")}
        alpha, beta = _gates(item, drawn["a"], drawn["b"])
        for i in range(count):
            for name, values in drawn.items():
                getattr(item, name).copy_(values[i])
            o, exact = reference.decode_step(exact, item.q, item.k, item.v, alpha[i], beta[i], item.scale)
            launch()
            token = first + i
            if token & (token - 1) == 0:
                states = _v_first(item.state[item.indices.long()], v_first)
                found.append([token, relative_rmse(item.out, o), relative_rmse(states, exact)])
    return found


# extend


def extend(
    x: Case, device: Any, sets: int, seed: int, v_first: bool, transposed: bool = False, tile: int | None = None
) -> Trial:
    """The production extend. tile: of chunk_state; None: the rule's."""
    from labkit.state_layout import extend as kernels

    inputs = _extend_inputs(x, device, sets, seed, v_first)
    choice = {"tile": tile, "transposed": transposed}
    batch = kernels.plan(inputs[0].cu_seqlens, device=inputs[0].v.device)
    calls = [kernels.extend(item, v_first, batch, **choice) for item in inputs]
    trial = _extended(x, inputs, calls, v_first)
    trial.launch = calls[0].launches["chunk_state"]
    return trial


def chunk_state(x: Case, device: Any, sets: int, seed: int, v_first: bool, transposed: bool, tile: int) -> Trial:
    """The kernel of extend that takes the state from chunk to chunk, alone, on what those before it have left."""
    whole = extend(x, device, sets, seed, v_first, transposed, tile)
    for call in whole.calls:
        call()
    calls = [call.launches["chunk_state"] for call in whole.calls]
    return Trial(calls, None, None, whole.check, whole.tolerance, calls[0])


def fla_extend(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> Trial:
    """fla-core's chunked call, GDN or KDA, on the same inputs; it normalises q and k itself."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    function = chunk_kda if x["gate"] == "KDA" else chunk_gated_delta_rule
    inputs = _extend_inputs(x, device, sets, seed, v_first)
    bounds = inputs[0].cu_seqlens.long()  # one for all sets: the library keeps what it waits for only of the last few

    def bind(item: Any) -> Callable[[], Any]:
        q, k, v, g, beta = (part[None] for part in (item.q, item.k, item.v, item.g, item.beta))
        options = {
            "scale": item.scale, "initial_state": item.initial, "output_final_state": True,
            "use_qk_l2norm_in_kernel": True, "state_v_first": v_first, "cu_seqlens": bounds,
        }  # fmt: skip
        return lambda: function(q, k, v, g, beta, **options)

    tuners = _tune_anew(x.key)
    calls = _kept([bind(item) for item in inputs])
    errors = _extend_errors(inputs[0], v_first)

    def check() -> dict[str, float]:
        o, S = calls[0]()
        return errors(o[0], S)

    calls[0]()  # which chooses the launches
    chosen = {one.base_fn.__name__: str(one.best_config) for one in tuners if hasattr(one, "best_config")}
    facts = {"launches": chosen}
    return Trial(calls, check=check, tolerance=_extend_tolerance(x), facts=lambda: facts)


@lru_cache(maxsize=1)
def _tune_anew(case: str) -> list[Any]:
    """fla-core's autotuners, which forget what they have chosen when another case comes.

    Their keys are heads and dimensions: what is chosen for the first prompt would be kept for prompts of other lengths
    and numbers. They take a few milliseconds a choice instead of a hundred, since there are hundreds of them.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    modules = [module for name, module in sys.modules.items() if name.startswith("fla.") and module]
    found = {id(one): one for module in modules for value in vars(module).values() for one in _chain(value, Autotuner)}
    for one in found.values():
        one.cache.clear()
        vars(one).pop("best_config", None)
        one.cache_results = False
        one.do_bench = partial(do_bench, warmup=TUNING_MS[0], rep=TUNING_MS[1])
    return list(found.values())


def _chain(kernel: Any, kind: type) -> Iterator[Any]:
    """Those of a kind among the decorators around a kernel."""
    while hasattr(kernel, "fn"):
        if isinstance(kernel, kind):
            yield kernel
        kernel = kernel.fn


def _extended(x: Case, inputs: Sequence[Any], calls: Sequence[Any], v_first: bool) -> Trial:
    errors = _extend_errors(inputs[0], v_first)

    def check() -> dict[str, float]:
        calls[0]()
        return errors(inputs[0].out, inputs[0].final)

    outputs = [tensor for item in inputs for tensor in (item.out, item.final)]
    return _with_outputs(outputs, calls, check, _extend_tolerance(x))


def _extend_tolerance(x: Case) -> dict[str, float]:
    return dict.fromkeys(("out", "state"), EXTEND_TOLERANCE[x["activations"]])


def _extend_errors(item: Any, v_first: bool) -> Callable[[Tensor, Tensor], dict[str, float]]:
    """(out, final) -> errors of the longest sequence that is short enough to be followed token by token.

    Where none is, of the first tokens of the first sequence; its final state is then left to the kernels' own tests.
    What is expected is worked out once: it takes the reference a step a token.
    """
    bounds = item.cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    n = max(range(len(lengths)), key=lambda i: lengths[i] if lengths[i] <= LONGEST_CHECKED else 0)
    tokens = slice(bounds[n], bounds[n] + min(lengths[n], LONGEST_CHECKED))
    initial = _v_first(item.initial[n : n + 1], v_first)

    @cache
    def expected() -> tuple[Tensor, Tensor]:
        parts = [part[tokens] for part in (item.q, item.k, item.v)]
        decay, ends = item.g[tokens].double().exp(), torch.tensor([0, tokens.stop - tokens.start])
        return reference.extend(initial, *parts, decay, item.beta[tokens], item.scale, ends)

    def errors(out: Tensor, final: Tensor) -> dict[str, float]:
        o, S = expected()
        found = {"out": relative_rmse(out[tokens], o)}
        if lengths[n] <= LONGEST_CHECKED:
            found["state"] = relative_rmse(_v_first(final[n : n + 1], v_first), S)
        return found

    return errors


def _extend_inputs(x: Case, device: Any, sets: int, seed: int, v_first: bool) -> list[Any]:
    from labkit.state_layout.extend import ExtendInputs

    H, HV, K, V = (x[name] for name in ("H", "HV", "K", "V"))
    count, T = len(LENGTHS[x["prefill"]]), sum(LENGTHS[x["prefill"]])
    made = _Random(device, DTYPES[x["activations"]], seed)
    bounds = torch.tensor([0, *accumulate(LENGTHS[x["prefill"]])], dtype=torch.int32, device=device)
    rates = made.rates(x)
    found = []
    for _ in range(sets):
        a, b = made(T, *_gate_shape(x)), made(T, HV)
        initial = made.states(count, (HV, V, K) if v_first else (HV, K, V), torch.float32)
        item = ExtendInputs(
            q=made(T, H, K), k=made(T, H, K), v=made(T, HV, V), g=a.float(), beta=torch.sigmoid(b.float()),
            cu_seqlens=bounds, initial=initial, final=torch.empty_like(initial),
            out=torch.empty((T, HV, V), dtype=made.dtype, device=device), scale=K**-0.5,
        )  # fmt: skip
        found.append(replace(item, g=_log_decay(a, rates)))
    return found


def _log_decay(a: Tensor, rates: Mapping[str, Tensor]) -> Tensor:
    """The decay's logarithm as extend takes it, fp32: a kernel of the layer before makes it in an engine."""
    softplus = torch.nn.functional.softplus(a.float() + rates["dt_bias"])
    rate = rates["A_log"].exp()
    return -(rate if a.ndim == 2 else rate[:, None]) * softplus


def relative_rmse(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖, float64."""
    return float((found.double() - expected).norm() / expected.norm())
