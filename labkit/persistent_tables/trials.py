"""The study's variants made ready for timing: memory, tables, launches, checks, and a clock for the host's work.

All variants of a case share weights; what a decode writes, caches included, each has for itself. A timed sample is a
sequence of tokens from the case's position on, again and again, so that every sample has the same contexts. The keys
and values before it are random. In `graph` mode all launches of a sequence lie in one CUDA graph: what the GPU alone
takes. In `eager` mode the host does what the way does for every token, beginning with an idle GPU.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from labkit.bench.spec import Case, Trial
from labkit.persistent_tables import names, reference, stages, tables
from labkit.persistent_tables.model import TINY, Weights, decoder, random_weights
from labkit.persistent_tables.tables import Lowering

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FIRST_TOKEN = 1
CHECKED, CHECKED_BUILT, CHECKED_TINY = 64, 8, 2  # tokens that are compared; of ways that build for milliseconds
TOLERANCE = {"bf16": 5e-3, "fp32": 1e-4}  # relative RMSE of the first logits: the new keys and values are rounded
# What goes from one separate kernel to the next has the weights' dtype. A decoder that rounds there and nowhere else is
# 1.5e-2 to 2.5e-2 off with Llama-3.2-1B, by position.
TOLERANCE_ROUNDED = {"bf16": 4e-2, "fp32": 1e-4}
TIE = {"bf16": 0.1, "fp32": 1e-4}  # where the reference's two best logits are nearer, either token is right
SHORT, LONG = 8, 32  # tokens of a timed sequence
HOST_TOKENS, HOST_LEAST, HOST_SECONDS = 30, 5, 0.15  # of the host's clock: tokens, but fewer where they take long


@dataclass(frozen=True)
class Plan:
    """How the tables' decode runs. per_sm: programs of a multiprocessor, at most; rows: of a tile; choice: fields of
    `kernels.Choice`."""

    per_sm: int = 4
    rows: int = 4
    choice: Mapping[str, Any] = field(default_factory=dict)


PLANS = {  # found by sweeps on an H100: `block_k` and `ahead` cover a row of the model's width
    names.H1024: Plan(rows=8, choice={"block_k": 1024, "block_t": 32, "registers": 128}),
    "AutoMegaKernel h2048": Plan(choice={"block_k": 1024, "ahead": 2, "block_t": 8, "registers": 128}),
    names.LLAMA: Plan(choice={"block_k": 1024, "ahead": 2, "block_t": 32, "registers": 128}),
    (names.H1024, "fp32"): Plan(choice={"block_k": 1024, "block_t": 32, "registers": 128}),  # values take twice as many
    TINY.name: Plan(rows=64, choice={"block_k": 64, "num_warps": 1}),
}


def plan_of(model: str, dtype: str, changed: Mapping[str, Any] | None = None) -> Plan:
    """The plan of a model's tables. changed: fields of its choice."""
    plan = PLANS.get((model, dtype)) or PLANS[model]
    return replace(plan, choice={**plan.choice, **changed}) if changed else plan


def launches(model: str, dtype: str) -> list[dict[str, Any]]:
    """Arguments of `kernel` for every launch of the step that a case makes."""
    found = [{"model": model, "dtype": dtype, "position_from": position_from} for position_from in names.POSITION_FROM]
    changed = names.ABLATIONS.values() if dtype == "bf16" and model != TINY.name else ()
    return found + [{**found[-1], "changed": change} for change in changed]


def kernel(model: str, dtype: str, position_from: str, changed: Mapping[str, Any] | None = None) -> Any:
    """A launch that a case makes, to be compiled beforehand. changed: fields of its choice."""
    from labkit.persistent_tables import kernels

    plan, full = plan_of(model, dtype, changed), str(DTYPES[dtype]).removeprefix("torch.")
    span = names.SPANS.get(model)
    return kernels.compilable(model, 1, plan.rows, names.CACHE, position_from, full, span, **plan.choice)


def projection(N: int, K: int, choice: Mapping[str, Any], dependent: bool) -> Any:
    """The baseline's GEMV of one matrix in bf16, to be compiled beforehand."""
    from labkit.gemv import choose, kernels

    W, x, y = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((N, K), (K,), (N,)))
    return kernels.gemv(W, x, y, choose.Choice(**choice), dependent=dependent)


# Memory


_shared: dict[Any, Any] = {}  # of one model, dtype, device and seed at a time


def _once(x: Case, device: Any, seed: int, name: Any, make: Callable[[], Any]) -> Any:
    """What `make` gives, kept until a case with other weights asks."""
    group = (x["model"], x["dtype"], str(device), seed)
    if any(other[0] != group for other in _shared):
        _shared.clear()
    if (group, name) not in _shared:
        _shared[group, name] = make()
    return _shared[group, name]


def weights_of(x: Case, device: Any, seed: int) -> Weights:
    """Seeded random weights by checkpoint name."""
    model, dtype = decoder(x["model"]), DTYPES[x["dtype"]]
    return _once(x, device, seed, "weights", lambda: random_weights(model, seed, dtype, device))


def lowering(x: Case, device: Any, schedule: str = "round-robin") -> Lowering:
    """What is lowered for a case on a device: as many programs as are resident at once."""
    size, plan = DTYPES[x["dtype"]].itemsize, plan_of(x["model"], x["dtype"])
    positions = names.CACHE if x["model"] != TINY.name else 32
    parts = x["parts"] or None
    span, found = names.SPANS.get(x["model"]), programs(x, device)
    return Lowering(decoder(x["model"]), found, schedule, positions, 0, plan.rows, parts, size, span)


def programs(x: Case, device: Any) -> int:
    """Programs that are all resident, whichever way runs; one where there is no GPU."""
    return _resident(x["model"], x["dtype"], torch.device(device))


@cache
def _resident(model: str, dtype: str, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    from labkit.evidence.roofline import occupancy

    properties = torch.cuda.get_device_properties(device)
    capability, fitting = 10 * properties.major + properties.minor, [plan_of(model, dtype).per_sm]
    for one in launches(model, dtype):
        compiled = kernel(**one).compile()
        compiled._init_handles()
        shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
        fitting.append(occupancy(compiled.n_regs, shared, warps, capability))
    return properties.multi_processor_count * min(fitting)


def memory_of(x: Case, device: Any, seed: int, how: Lowering) -> Any:
    """Memory of a decode that shares weights with the others of its case; what it writes is its own."""
    from labkit.persistent_tables import kernels

    weights = weights_of(x, device, seed)
    packed = _once(x, device, seed, "packed", lambda: kernels.allocate(how, weights, device))
    own = kernels.fresh(packed, how)
    for i, (k, v) in enumerate(_context(x, device, seed)):
        for name, values in ((f"k_cache.{i}", k), (f"v_cache.{i}", v)):
            own.buffers[name].view(how.model.kv_heads, how.cache, -1)[:, : x["start"]] = values
    return own


def _context(x: Case, device: Any, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values before the first position, a layer each: [kv_heads, start, head_dim]."""
    model, dtype = decoder(x["model"]), DTYPES[x["dtype"]]
    generator = torch.Generator(device).manual_seed(seed + 1)
    shape = (2, model.kv_heads, x["start"], model.head_dim)
    drawn = [torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(model.layers)]
    return [(k, v) for k, v in drawn]


@dataclass
class Expected:
    """What the reference generates. margins: of each token, its logit minus the next best.

    logits: those of the first tokens, [2, vocab].
    """

    tokens: list[int]
    margins: list[float]
    logits: Tensor


def expected(x: Case, device: Any, seed: int) -> Expected:
    """The float64 reference's tokens after the context and the first token."""
    count = CHECKED_TINY if x["model"] == TINY.name else CHECKED
    return _once(x, device, seed, ("expected", x["start"]), lambda: _generated(x, device, seed, count))


def _generated(x: Case, device: Any, seed: int, count: int) -> Expected:
    model, weights, start = decoder(x["model"]), weights_of(x, device, seed), x["start"]
    kept = reference.new_cache(model, start + count, torch.float64, device)
    for i, (k, v) in enumerate(_context(x, device, seed)):
        kept.k[i, :, :start], kept.v[i, :, :start] = k, v
    token, tokens, margins, first = FIRST_TOKEN, [], [], []
    for i in range(count):
        logits = reference.step(model, weights, kept, token, start + i)
        best = logits.topk(2).values
        token = int(logits.argmax())
        tokens.append(token)
        margins.append(float(best[0] - best[1]))
        first += [logits] * (i < 2)
    return Expected(tokens, margins, torch.stack(first))


# Trials


class Checked:
    """Generates tokens and compares them with the reference's. right: how many are equal before the first that is not.

    run: a way or baseline; valid: whether its tokens should be right. A token other than the reference's counts as
    wrong unless the reference's margin is a tie; what follows it is not compared.
    """

    def __init__(self, x: Case, run: Any, logits: Tensor, wanted: Expected, count: int, valid: bool = True):
        self.x, self.run, self.logits, self.wanted, self.valid = x, run, logits, wanted, valid
        self.count = min(count, len(wanted.tokens))
        self.right, self.errors = 0, []

    def __call__(self) -> dict[str, float]:
        start, buffers, found, first = self.x["start"], self.run.memory.buffers, [], []
        self.run.begin(start)
        buffers["token"].fill_(FIRST_TOKEN)
        for i in range(self.count):
            self.run.step(start + i)
            found.append(buffers["token"].clone())
            first += [self.logits.clone()] * (i < 2)
        self.run.memory.check()
        pairs = zip(map(int, found), self.wanted.tokens, strict=False)
        self.right = next((i for i, (a, b) in enumerate(pairs) if a != b), self.count)
        self.errors = [relative_rmse(*pair) for pair in zip(first, self.wanted.logits, strict=True)]
        tie = self.right == self.count or self.wanted.margins[self.right] < TIE[self.x["dtype"]]
        return {"logits": self.errors[0]} | ({"tokens": 0.0 if tie else 1.0} if self.valid else {})

    def facts(self) -> dict[str, Any]:
        """checked, right: tokens; margin: the reference's least, and that where the two part; errors: of logits."""
        there = self.wanted.margins[self.right] if self.right < self.count else math.nan
        least = min(self.wanted.margins[: self.count])
        found = {"checked": self.count, "right": self.right, "margin": least, "errors": self.errors}
        return found if there != there else found | {"margin there": there}


def relative_rmse(found: Tensor, wanted: Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖."""
    return float((found.double() - wanted).norm() / wanted.norm())


def sequence(x: Case, way: str = "") -> int:
    """Tokens of a timed sequence: fewer where one takes long."""
    if x["model"] == TINY.name:
        return 1
    if way in names.BUILT:
        return SHORT // 2
    small = x["model"] == names.H1024 and not x["parts"] and x["start"] == names.START
    return LONG if small else SHORT


def _trial(
    x: Case, checked: Checked, calls: Sequence[Callable[[], Any]], more: Callable[[], Any],
    tolerance: Mapping[str, float] = TOLERANCE,
) -> Trial:  # fmt: skip
    """more: facts beside those of the check. tolerance: of the first logits, by dtype."""
    logits = checked.logits
    return Trial(
        calls,
        partial(logits.fill_, math.nan),
        lambda: not bool(logits.isnan().any()),
        checked,
        {"logits": tolerance[x["dtype"]], "tokens": 0.0},
        facts=lambda: checked.facts() | more(),
    )


def way(x: Case, device: Any, sets: int, seed: int, name: str) -> Trial:
    """A way to keep the tables, the host at work for every token."""
    found = prepared(x, device, seed, name)
    begin = found.begin if hasattr(found, "following") else None  # what a way's beginning uploads is no token's
    count = CHECKED_BUILT if name in names.BUILT else CHECKED
    checked = _checked(x, device, seed, found, count, name != names.ONE_POSITION)
    return _trial(x, checked, _from_idle(x, found.step, begin, sequence(x, name)), lambda: _traffic(found, name))


def prepared(
    x: Case, device: Any, seed: int, name: str, schedule: str = "round-robin", changed: Mapping[str, Any] | None = None
) -> Any:
    """A way on memory of its own. changed: fields of the kernel's choice."""
    from labkit.persistent_tables import kernels, ways

    choice = kernels.Choice(**plan_of(x["model"], x["dtype"], changed).choice)
    return ways.prepare(name, memory_of(x, device, seed, lowering(x, device, schedule)), choice=choice)


def _checked(x: Case, device: Any, seed: int, run: Any, count: int = CHECKED, valid: bool = True) -> Checked:
    logits = run.memory.buffers["logits"][0] if not hasattr(run, "logits") else run.logits
    return Checked(x, run, logits, expected(x, device, seed), count, valid)


def _traffic(found: Any, name: str) -> dict[str, Any]:
    from labkit.persistent_tables import ways

    return tables.counts(found.tables) | {"sent": ways.traffic(name, found.tables)._asdict()}


def _from_idle(
    x: Case, step: Callable[[int], Any], begin: Callable[[int], Any] | None, count: int
) -> list[Callable[[], Any]]:
    """The calls of a sequence. The first one waits until the GPU is idle, or what was timed before would hide work."""
    start = x["start"]

    def first() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if begin:
            begin(start)
        step(start)

    return [first, *(partial(step, start + i) for i in range(1, count))]


def in_graph(x: Case, device: Any, sets: int, seed: int, schedule: str) -> Trial:
    """The tables' decode without the host: the position is on the device, and every token is one launch."""
    found = prepared(x, device, seed, names.GRAPH, schedule)
    trial = _trial(
        x, _checked(x, device, seed, found), _captured(x, found.memory, found.launched),
        lambda: _traffic(found, names.GRAPH),
    )  # fmt: skip
    trial.launch = found.launched
    return trial


def ablated(x: Case, device: Any, sets: int, seed: int, name: str) -> Trial:
    """The same with one choice changed; with moments written down, also where the time of its last token went."""
    found = prepared(x, device, seed, names.GRAPH, changed=names.ABLATIONS[name])

    def more() -> dict[str, Any]:
        marks = found.memory.marks
        return {} if marks is None else {"stages": stages.by_op(found.tables.records, marks.cpu().numpy())}

    return _trial(x, _checked(x, device, seed, found), _captured(x, found.memory, found.launched), more)


def unordered(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The same without any wait: what its results are does not matter, but how fast the same bytes stream."""
    found = prepared(x, device, seed, names.GRAPH)
    records = found.launched.args["records"].clone()
    records[:, tables.TARGET] = -1
    launch = replace(found.launched, args={**found.launched.args, "records": records})
    return Trial(_captured(x, found.memory, launch))


def separate(x: Case, device: Any, sets: int, seed: int, projections: str, dependent: bool) -> Trial:
    """The decoder as separate kernels, without the host; dependent launch where the GPU has it."""
    found = _baseline(x, device, seed, projections, dependent, graph=False)
    return _trial(
        x, _checked(x, device, seed, found), _captured(x, found.memory, found.replay),
        lambda: {"kernels": len(found.calls), "splits": found.splits}, TOLERANCE_ROUNDED,
    )  # fmt: skip


def replayed(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The separate kernels as one CUDA graph that the host replays for every token."""
    found = _baseline(x, device, seed, "gemv", True, graph=True)
    calls = _from_idle(x, found.step, found.begin, sequence(x))
    checked = _checked(x, device, seed, found)
    return _trial(x, checked, calls, lambda: {"kernels": len(found.calls)}, TOLERANCE_ROUNDED)


def _baseline(x: Case, device: Any, seed: int, projections: str, dependent: bool, graph: bool) -> Any:
    from labkit.gemv.kernels import has_dependent_launch
    from labkit.persistent_tables.baseline import Baseline

    memory = memory_of(x, device, seed, lowering(x, device))
    dependent = dependent and has_dependent_launch(torch.device(device))
    return Baseline(memory, projections, dependent, graph=graph)


def _captured(x: Case, memory: Any, step: Callable[[], Any]) -> list[Callable[[], Any]]:
    """The calls of a sequence, for a graph; the first one sets the position, which each token advances."""

    def first() -> None:
        memory.position.fill_(x["start"])
        step()

    return [first, *[step] * (sequence(x) - 1)]


def read(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """As many bytes as a token's weights, read and summed by the library."""
    count = decoder(x["model"]).streamed_weights() * DTYPES[x["dtype"]].itemsize // 4
    values, out = torch.empty(count, device=device).normal_(), torch.empty(1, device=device)
    return Trial([lambda: torch.sum(values, 0, keepdim=True, out=out)])


# The host's work, part by part


class HostClock:
    """Host time of build, copy and launch, token by token.

    run: a way. queued_us: other work that is put on the stream before each token; 0: the GPU is idle then. The clock
    runs once, when samples are first asked for; sample i of every part is of one token.
    """

    def __init__(self, x: Case, run: Any):
        self.x, self.run, self.ns = x, run, {part: [] for part in names.PARTS}
        self.given: set[str] = set()

    def samples(self, part: str) -> list[float]:
        """ns of one part, a token each."""
        if not self.ns[part]:
            self._measure()
        return self.ns[part]

    def _measure(self) -> None:
        start, count = self.x["start"], SHORT
        end = time.perf_counter() + HOST_SECONDS
        for i in range(1 + HOST_TOKENS):
            if i % count == 0:
                self.run.begin(start)
            found = self._token(start + i % count)
            if i:  # the first one warms up
                for part, ns in zip(names.PARTS, found, strict=True):
                    self.ns[part].append(ns)
            if i >= HOST_LEAST and time.perf_counter() > end:
                break

    def _token(self, position: int) -> list[float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if self.x["queued_us"]:
                torch.cuda._sleep(self.x["queued_us"] * _cycles_a_us())
        marks = [time.perf_counter_ns()]
        for do in (self.run.build, self.run.copy, self.run.launch):
            do(position)
            marks.append(time.perf_counter_ns())
        return [float(after - before) for before, after in pairwise(marks)]


def _cycles_a_us() -> int:
    from labkit.bench.machine import this_machine

    return this_machine().sm_mhz


def host(x: Case, device: Any, sets: int, seed: int, name: str, part: str) -> Trial:
    """One part of the host's work for a token; the parts of a way are of the same tokens."""

    def make() -> HostClock:
        return HostClock(x, prepared(x, device, seed, name))

    clock = _once(x, device, seed, ("clock", x.key, name), make)
    if part in clock.given:  # asked for again, by the control
        clock = make()
    clock.given.add(part)
    return Trial(
        [lambda: None], timer=lambda: clock.samples(part), facts=lambda: _traffic(clock.run, name), idle=True,
    )  # fmt: skip
