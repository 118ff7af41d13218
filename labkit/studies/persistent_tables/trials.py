"""The study's variants made ready for timing: memory, tables, launches, checks, and a clock for the host's work.

All variants of a case share weights; what a decode writes, caches included, each has for itself. A timed sample is a
sequence of tokens from the case's position on, again and again, so that every sample has the same contexts. The keys
and values before it are random. In `graph` mode all launches of a sequence lie in one CUDA graph: what the GPU alone
takes. In `eager` mode the host does what the way does for every token, beginning with an idle GPU.

What needs Triton is imported when it is first called: the module itself can be without it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from labkit.bench.machine import this_machine
from labkit.bench.spec import Case, Trial, lazy
from labkit.evidence.roofline import occupancy
from labkit.kernels import tuned
from labkit.kernels.decoder import reference, tables
from labkit.kernels.decoder.model import TINY, Weights, decoder, random_weights
from labkit.kernels.decoder.tables import Lowering
from labkit.kernels.gemv import choose
from labkit.kernels.launch import Launch
from labkit.kernels.target import has_dependent_launch, multiprocessors
from labkit.studies.persistent_tables import bound, decodes, peers, plans, stages, variants
from labkit.studies.persistent_tables.study import SHORT, batch_of, sequence
from labkit.sweep.trial import DTYPES, Random, Shared, relative_rmse, trial

FIRST_TOKEN = 1
CHECKED_BUILT, CHECKED_TINY = 8, 2  # tokens that are compared, of ways that build for milliseconds, and of the tiny one
TOLERANCE = {"bf16": 5e-3, "fp32": 1e-4}  # relative RMSE of the first logits: the new keys and values are rounded
# What goes from one separate kernel to the next has the weights' dtype. A decoder that rounds there and nowhere else is
# 1.5e-2 to 2.5e-2 off with Llama-3.2-1B, by position.
TOLERANCE_ROUNDED = {"bf16": 4e-2, "fp32": 1e-4}
TIE = {"bf16": 0.1, "fp32": 1e-4}  # where the reference's two best logits are nearer, either token is right
HOST_TOKENS, HOST_LEAST, HOST_SECONDS = 30, 5, 0.15  # of the host's clock: tokens, but fewer where they take long

compilable_step, allocate, fresh, Choice = (
    lazy(f"labkit.kernels.decoder.step:{name}") for name in ("compilable", "allocate", "fresh", "Choice")
)
prepare, traffic, Graph = (lazy(f"{variants.PACKAGE}.ways:{name}") for name in ("prepare", "traffic", "Graph"))
streamed_lowering, streamed_step, together = (
    lazy(f"labkit.kernels.decoder.streamed:{name}") for name in ("lowering", "step", "together")
)
Baseline, linear = lazy(f"{variants.PACKAGE}.baseline:Baseline"), lazy("labkit.kernels.gemv.gemv:linear")

# What is compiled before the cases are timed


def compiled_ahead(some: Sequence[Case], capability: int, gpu: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Sources of the step of every model and dtype, and of the separate kernels of every model."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for model, dtype, batch in dict.fromkeys((x["model"], x["dtype"], batch_of(x)) for x in some):
        found += [(f"{__name__}:compilable", one) for one in steps(model, dtype, batch)]
        if model == variants.LLAMA and capability == 90:
            found.append(("labkit.kernels.decoder.streamed:compilable", {"model": model, "batch": batch}))
        if dtype == "bf16":
            chain = {"batch": batch} if batch > 1 else {"choices": _choices(model, gpu)}
            for kind in (False, True) if capability >= 90 else (False,):
                found.append((f"{variants.PACKAGE}.baseline:launches", {"model": model, "dependent": kind} | chain))
    return found


def steps(model: str, dtype: str, batch: int = 1) -> list[dict[str, Any]]:
    """Arguments of `compilable` for every launch of the step that a case makes."""
    if batch > 1:
        return [{"model": model, "dtype": dtype, "position_from": "device", "batch": batch}]
    found = [{"model": model, "dtype": dtype, "position_from": position_from} for position_from in tables.POSITION_FROM]
    changed = [*variants.ABLATIONS.values()] if dtype == "bf16" and model != TINY.name else []
    changed += [variants.SPANS] if dtype == "bf16" and model == variants.H1024 else []
    return found + [{**found[-1], "changed": change} for change in changed]


def compilable(
    model: str, dtype: str, position_from: str, changed: Mapping[str, Any] | None = None, batch: int = 1
) -> Launch:
    """A launch of the step that can be compiled but not run. changed, batch: as of `plans.plan_of`."""
    plan, full = plans.plan_of(model, dtype, changed, batch), str(DTYPES[dtype]).removeprefix("torch.")
    return compilable_step(
        model, 1, plan.rows, variants.CACHE, position_from, full, plan.span, batch, plan.group, **plan.choice
    )


def _choices(model: str, gpu: str) -> dict[str, dict[str, int]]:
    """The GEMV's choice on the GPU of this name for every projection of a model, by "N x K"."""
    shapes = Lowering(decoder(model), 1).projections().values()
    with tuned.chosen_for(gpu, choose):
        return {f"{N} x {K}": choose.choose(N, K, 2, torch.device("cpu")).as_dict() for N, K in shapes}


# Memory

shared = Shared()  # of one model, dtype, device and seed at a time


def _once(x: Case, device: Any, seed: int, name: Any, make: Callable[[], Any]) -> Any:
    """What `make` gives, kept until a case with other weights asks."""
    return shared((x["model"], x["dtype"], str(device), seed), name, make)


def _weights(x: Case, device: Any, seed: int) -> Weights:
    model, dtype = decoder(x["model"]), DTYPES[x["dtype"]]
    return _once(x, device, seed, "weights", lambda: random_weights(model, seed, dtype, device))


def lowering(x: Case, device: Any, schedule: str = "round-robin", changed: Mapping[str, Any] | None = None) -> Lowering:
    """What is lowered for a case on a device: as many programs as are resident at once."""
    model, dtype, batch = x["model"], x["dtype"], batch_of(x)
    found, parts = programs(model, dtype, torch.device(device), batch), x.params.get("parts") or None
    return plans.lowering(decoder(model), dtype, DTYPES[dtype].itemsize, found, schedule, parts, batch, changed)


@cache
def programs(model: str, dtype: str, device: torch.device, batch: int = 1) -> int:
    """Programs that are all resident, whichever way runs; one where there is no GPU."""
    if device.type != "cuda":
        return 1
    properties = torch.cuda.get_device_properties(device)
    capability, fitting = 10 * properties.major + properties.minor, [plans.plan_of(model, dtype, batch=batch).per_sm]
    for one in steps(model, dtype, batch):
        compiled = compilable(**one).compile()
        compiled._init_handles()
        shared_bytes, warps = compiled.metadata.shared, compiled.metadata.num_warps
        fitting.append(occupancy(compiled.n_regs, shared_bytes, warps, capability))
    return properties.multi_processor_count * min(fitting)


def memory_of(x: Case, device: Any, seed: int, how: Lowering, one: bool = False) -> Any:
    """Memory of a decode that shares weights with the others of its case; what it writes is its own.

    one: with all matrices in one allocation, for the streamed step.
    """
    weights = _weights(x, device, seed)
    packed = _once(x, device, seed, "packed", lambda: allocate(how, weights, device))
    own = fresh(_once(x, device, seed, "together", lambda: together(packed)) if one else packed, how)
    own = together(own) if one else own
    for number in range(how.batch):
        for i, (k, v) in enumerate(_context(x, device, seed, number)):
            for name, values in ((f"k_cache.{i}", k), (f"v_cache.{i}", v)):
                of_each = own.buffers[name].view(how.batch, how.model.kv_heads, how.cache, -1)
                of_each[number, :, : x["start"]] = values
    return own


def _context(x: Case, device: Any, seed: int, number: int) -> list[Tensor]:
    """Keys and values before the first position of one sequence, a layer each: [2, kv_heads, start, head_dim]."""
    model, random = decoder(x["model"]), Random(device, seed + 1 + number, DTYPES[x["dtype"]])
    return [random(2, model.kv_heads, x["start"], model.head_dim) for _ in range(model.layers)]


def expected(x: Case, device: Any, seed: int) -> list[reference.Generated]:
    """The float64 reference's tokens after the context and the first token, of each sequence."""
    model, start = decoder(x["model"]), x["start"]
    count = CHECKED_TINY if model is TINY else variants.CHECKED

    def make() -> list[reference.Generated]:
        caches = [reference.new_cache(model, start + count, device=device) for _ in range(batch_of(x))]
        for number, own in enumerate(caches):
            for i, (k, v) in enumerate(_context(x, device, seed, number)):
                own.k[i, :, :start], own.v[i, :, :start] = k, v
        prompts = [[FIRST_TOKEN + number] for number in range(len(caches))]
        return reference.generate_each(model, _weights(x, device, seed), prompts, count, caches, start)

    return _once(x, device, seed, ("expected", start, batch_of(x)), make)


# Trials


class Checked:
    """Generates tokens and compares them with the reference's.

    right: of each sequence, how many are equal before the first that is not. run: a way or baseline; wanted: of each
    sequence; valid: whether its tokens should be right. A token other than the reference's counts as wrong unless the
    reference's margin is a tie; what follows it is not compared.
    """

    def __init__(
        self, x: Case, run: Any, logits: Tensor, wanted: list[reference.Generated], count: int, valid: bool = True
    ):
        self.x, self.run, self.logits, self.wanted, self.valid = x, run, logits, wanted, valid
        self.count = min(count, len(wanted[0].tokens))
        self.right, self.errors = [0] * len(wanted), []

    def __call__(self) -> dict[str, float]:
        start, token, found, first = self.x["start"], self.run.memory.buffers["token"], [], []
        self.run.begin(start)
        token.copy_(FIRST_TOKEN + torch.arange(len(self.wanted)).view_as(token))
        for i in range(self.count):
            self.run.step(start + i)
            found.append(token.flatten().clone())
            first += [self.logits.clone().view(len(self.wanted), -1)] * (i < 2)
        self.run.memory.check()
        each = zip(torch.stack(found, 1).tolist(), self.wanted, strict=True)
        self.right = [_equal(tokens, wanted.tokens) for tokens, wanted in each]
        self.errors = [
            max(relative_rmse(mine, wanted.logits[i]) for mine, wanted in zip(logits, self.wanted, strict=True))
            for i, logits in enumerate(first)
        ]
        tie = all(margin < TIE[self.x["dtype"]] for margin in self._margins_there())
        return {"logits": self.errors[0]} | ({"tokens": 0.0 if tie else 1.0} if self.valid else {})

    def _margins_there(self) -> list[float]:
        """The reference's margins where the two part, of the sequences that do."""
        each = zip(self.right, self.wanted, strict=True)
        return [wanted.margins[right] for right, wanted in each if right < self.count]

    def facts(self) -> dict[str, Any]:
        """checked, right: tokens of all sequences; margin: the reference's least, and the largest where the two part;
        errors: of the first logits."""
        margin = min(min(wanted.margins[: self.count]) for wanted in self.wanted)
        checked, there = self.count * len(self.wanted), self._margins_there()
        found = {"checked": checked, "right": sum(self.right), "margin": margin, "errors": self.errors}
        return found | ({"margin there": max(there)} if there else {})


def _equal(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    """How many tokens are those wanted before the first that is not."""
    return next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), len(tokens))


def _trial(
    x: Case, device: Any, seed: int, calls: Sequence[Callable[[], Any]], run: Any, more: Callable[[], Any],
    count: int = variants.CHECKED, valid: bool = True, tolerance: Mapping[str, float] = TOLERANCE, **fields: Any,
) -> Trial:  # fmt: skip
    """Of a way or baseline. more: facts beside those of the check. tolerance: of the first logits, by dtype."""
    logits = run.logits if hasattr(run, "logits") else run.memory.buffers["logits"]
    checked = Checked(x, run, logits, expected(x, device, seed), count, valid)
    allowed = {"logits": tolerance[x["dtype"]], "tokens": 0.0}
    return trial(calls, [logits], checked, allowed, facts=lambda: checked.facts() | more(), **fields)


def way(x: Case, device: Any, sets: int, seed: int, name: str) -> Trial:
    """A way to keep the tables, the host at work for every token."""
    run = prepared(x, device, seed, name)
    run.begin(x["start"])  # nothing writes another position of the cache, also where it is timed before it is checked
    begin = run.begin if name == variants.GRAPH else None  # what a way's beginning uploads is no token's
    calls = decodes.by_the_host(run.step, begin, x["start"], sequence(x, name))
    count, valid = CHECKED_BUILT if name in variants.BUILT else variants.CHECKED, name != variants.ONE_POSITION
    return _trial(x, device, seed, calls, run, lambda: _traffic(run, name), count, valid)


def prepared(
    x: Case, device: Any, seed: int, name: str, schedule: str = "round-robin", changed: Mapping[str, Any] | None = None
) -> Any:
    """A way on memory of its own. changed: fields of the kernel's choice."""
    choice = Choice(**plans.plan_of(x["model"], x["dtype"], changed, batch_of(x)).choice)
    return prepare(name, memory_of(x, device, seed, lowering(x, device, schedule, changed)), choice=choice)


def _traffic(run: Any, name: str) -> dict[str, Any]:
    return tables.counts(run.tables) | {"sent": traffic(name, run.tables)._asdict()}


def _captured(x: Case, run: Any, step: Callable[[], Any]) -> list[Callable[[], Any]]:
    """The calls of a sequence, for a graph."""
    return decodes.on_the_device(run.memory.position, step, x["start"], sequence(x))


def in_graph(x: Case, device: Any, sets: int, seed: int, schedule: str) -> Trial:
    """The tables' decode without the host: the position is on the device, and every token is one launch."""
    run = prepared(x, device, seed, variants.GRAPH, schedule)
    calls = _captured(x, run, run.launched)
    return _trial(x, device, seed, calls, run, lambda: _traffic(run, variants.GRAPH), launch=run.launched)


def ablated(x: Case, device: Any, sets: int, seed: int, name: str) -> Trial:
    """The same with one choice changed; with moments written down, also where the time of its last token went."""
    run = prepared(x, device, seed, variants.GRAPH, changed=variants.ABLATIONS[name])

    def more() -> dict[str, Any]:
        marks = run.memory.marks
        if marks is None:
            return {}
        moments = marks.cpu().numpy()
        return {"stages": stages.by_op(run.tables.records, moments), "finer": bound.finer(run.tables, moments)}

    return _trial(x, device, seed, _captured(x, run, run.launched), run, more)


def spanned(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The same with attention in spans of the cache, several heads a record."""
    run = prepared(x, device, seed, variants.GRAPH, changed=variants.SPANS)
    return _trial(x, device, seed, _captured(x, run, run.launched), run, lambda: _traffic(run, variants.GRAPH))


def streamed(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The same with weights that one warp of each program copies ahead of every wait, and results without counters."""
    dtype = DTYPES[x["dtype"]]
    model, programs = decoder(x["model"]), multiprocessors(torch.device(device))
    how = streamed_lowering(model, programs, variants.CACHE, dtype.itemsize, batch_of(x))
    run = Graph(memory_of(x, device, seed, how, one=True), streamed_step)
    calls = _captured(x, run, run.launched)
    return _trial(x, device, seed, calls, run, lambda: _traffic(run, variants.GRAPH), launch=run.launched)


def unordered(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The same without any wait: what its results are does not matter, but how fast the same bytes stream."""
    run = prepared(x, device, seed, variants.GRAPH)
    calls = _captured(x, run, decodes.unordered(run.launched))
    return trial(calls, begin=partial(run.begin, x["start"]))  # keeps the buffers, of which a launch has the addresses


def separate(x: Case, device: Any, sets: int, seed: int, projections: str, dependent: bool) -> Trial:
    """The decoder as separate kernels, without the host; dependent launch where the GPU has it."""
    run = _baseline(x, device, seed, projections, dependent, graph=False)
    return _trial(
        x, device, seed, _captured(x, run, run.replay), run,
        lambda: {"kernels": len(run.calls), "splits": run.splits}, tolerance=TOLERANCE_ROUNDED,
    )  # fmt: skip


def replayed(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The separate kernels as one CUDA graph that the host replays for every token."""
    run = _baseline(x, device, seed, "gemv", True, graph=True)
    calls = decodes.by_the_host(run.step, run.begin, x["start"], sequence(x))
    return _trial(x, device, seed, calls, run, lambda: {"kernels": len(run.calls)}, tolerance=TOLERANCE_ROUNDED)


def _baseline(x: Case, device: Any, seed: int, projections: str, dependent: bool, graph: bool) -> Any:
    dependent = dependent and has_dependent_launch(torch.device(device))
    project = peers.linear if projections == "F.linear" else partial(linear, dependent=dependent)
    return Baseline(memory_of(x, device, seed, lowering(x, device)), project, dependent, graph=graph)


def read(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """As many bytes as a token's weights, read and summed by the library."""
    count = decoder(x["model"]).streamed_weights() * DTYPES[x["dtype"]].itemsize // 4
    values, out = torch.empty(count, device=device).normal_(), torch.empty(1, device=device)
    return trial([peers.read(values, out)])


# The host's work, part by part


class HostClock:
    """Host time of build, copy and launch, token by token.

    run: a way. queued_us: other work that is put on the stream before each token; 0: the GPU is idle then. The clock
    runs once, when samples are first asked for; sample i of every part is of one token.
    """

    def __init__(self, x: Case, run: Any):
        self.x, self.run, self.ns = x, run, {part: [] for part in variants.PARTS}
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
                for part, ns in zip(variants.PARTS, found, strict=True):
                    self.ns[part].append(ns)
            if i >= HOST_LEAST and time.perf_counter() > end:
                break

    def _token(self, position: int) -> list[float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if self.x["queued_us"]:
                torch.cuda._sleep(self.x["queued_us"] * this_machine().sm_mhz)
        marks = [time.perf_counter_ns()]
        for do in (self.run.build, self.run.copy, self.run.launch):
            do(position)
            marks.append(time.perf_counter_ns())
        return [float(after - before) for before, after in pairwise(marks)]


def host(x: Case, device: Any, sets: int, seed: int, name: str, part: str) -> Trial:
    """One part of the host's work for a token; the parts of a way are of the same tokens."""

    def make() -> HostClock:
        return HostClock(x, prepared(x, device, seed, name))

    clock = _once(x, device, seed, ("clock", x.key, name), make)
    if part in clock.given:  # asked for again, by the control
        clock = make()
    clock.given.add(part)
    facts = partial(_traffic, clock.run, name)
    return trial([lambda: None], timer=partial(clock.samples, part), facts=facts, idle=True)
