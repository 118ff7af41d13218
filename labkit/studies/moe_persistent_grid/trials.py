"""The study's variants made ready for timing: buffers, launches, checks.

Weights and tokens of a case are the same tensors for all its variants, and the weights for all cases of a model; the
buffer sets differ by which experts the tokens go to, so that with few tokens each set reads other weights. What a
variant writes is its own: a layer's output, a GEMM's rows. Rows inside a layer are scratch that layers share.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from labkit import sources
from labkit.bench.spec import Arguments, Case, Trial
from labkit.evidence import compiled, roofline
from labkit.kernels import offline
from labkit.kernels.experts import choose, expert_layer, few_rows, reference, specialised, tiled
from labkit.kernels.experts import int4 as experts_int4
from labkit.kernels.experts.choose import Candidate, Choice
from labkit.kernels.experts.inputs import Layer, LayerInputs, Workspace, workspace
from labkit.kernels.experts.int4 import GROUP, Int4
from labkit.kernels.launch import Launch
from labkit.kernels.target import multiprocessors
from labkit.studies.moe_persistent_grid import (
    ceilings,
    executorch,
    green_context,
    humming,
    peers,
    sglang,
    variants,
    vllm,
    w4a8,
    work,
)
from labkit.studies.moe_persistent_grid.routings import synthetic
from labkit.sweep import tuning
from labkit.sweep.trial import (
    DTYPES,
    Call,
    Random,
    Shared,
    chosen,
    given,
    hash_of,
    in_order,
    kept,
    some_of,
    trial,
    tune_anew,
)

KEPT = ("registers", "spill_bytes", "shared_bytes", "ctas_per_sm", "num_warps", "matrix", "loads")  # of what code is
CHECKED, CHECKED_SLOTS = 32, 16  # tokens of a layer, slots of a GEMM, that are compared with the float64 reference
INT4_RMS = math.sqrt((16**2 - 1) / 12 + 0.25)  # of u4 - 8 where all sixteen are as likely
EXACT = {"max": reference.MAX_TOLERANCE, "rms": reference.RMS_TOLERANCE}
# The loop rounds more often than `reference.layer` does with what is stored: SiLU by itself, and each weighted part;
# SGLang's layer the latter, and fp32 to fp16; vLLM's the latter, too.
# One token in a few hundred is then off by more than the metric allows a single kernel.
LOOPED = {"max": 2 * reference.MAX_TOLERANCE, "rms": reference.RMS_TOLERANCE}
# A reader's function is looked at after every block, of other tokens each time, and may hand on bf16 as well.
OFTEN = {"max": 5 * reference.MAX_TOLERANCE, "rms": 2 * reference.RMS_TOLERANCE}
READ_AT_ONCE = 16  # experts whose weights are summed together: each time the host waits
LARGE = 16.0  # a weight, beside others of about 1 / √K
# A value of 8 bits is off by up to 1/254 of its group's largest; ExecuTorch's tests allow 0.15 of the largest value.
INT8 = {"max": 0.15, "rms": 2e-2}
# ExecuTorch's own tests allow 0.05; it rounds to bf16 what `reference.layer` does, and each weighted part as well.
# Humming, where several programs share a tile's sum over K, adds their parts in bf16.
ROUNDED = {"max": 0.05, "rms": 1.5 * reference.RMS_TOLERANCE}


# What the variants of a case, or of a model, share


_of_model, _of_case = Shared(), Shared()


def _shared(x: Case, device: Any, name: Any, make: Callable[[], Any]) -> Any:
    """What `make` gives, kept while this case's variants are made."""
    return _of_case((x.op, x.key, torch.device(device).type), name, make)  # "cuda" and a tensor's "cuda:0" are one


def _only_compiled() -> bool:
    """Whether kernels are compiled for a GPU that is not here: nothing runs, so that no value matters."""
    return offline.offline_capability() is not None


def _weights(x: Case, device: Any, seed: int, kind: str) -> tuple[Any, Any]:
    """w1 [E, 2 I, H] and w2 [E, H, I]; kind: a dtype, or "INT4". Products of unit tokens have about unit variance."""
    E, H, width = x["E"], x["H"], x["I"]

    def make() -> tuple[Any, Any]:
        generator = torch.Generator(device).manual_seed(seed)
        return tuple(_random(shape, kind, device, generator) for shape in ((E, 2 * width, H), (E, H, width)))

    return _of_model((E, H, width, str(device), seed), kind, make)


def _random(shape: tuple[int, int, int], kind: str, device: Any, generator: torch.Generator) -> Tensor | Int4:
    E, N, K = shape
    if kind != "INT4":
        found = torch.empty(shape, dtype=DTYPES[kind], device=device)
        return found if _only_compiled() else found.normal_(0, K**-0.5, generator=generator)
    packed = torch.empty((E, N, K // 2), dtype=torch.uint8, device=device)
    scales = torch.empty((E, N, K // GROUP), dtype=torch.bfloat16, device=device)
    if not _only_compiled():
        packed.random_(0, 256, generator=generator)
        scales.uniform_(0.5, 1.5, generator=generator).mul_(K**-0.5 / INT4_RMS)
        scales = experts_int4.coarse(scales)  # rounded or not, the same weights
    return Int4(packed, scales)


def inputs(x: Case, device: Any, sets: int, seed: int, kind: str = "") -> list[LayerInputs]:
    """LayerInputs of every set, with an output for all of them that no layer's check looks at.

    The first set has the case's routing, the others the same with other experts: as many that get a token. The
    weights of a token's experts are exact in bf16. kind: of the expert weights; empty: the case's.
    """
    dtype = DTYPES[x["activations"]]

    def make() -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
        if _only_compiled():
            tokens = torch.empty((x["T"], x["H"]), dtype=dtype)
            ids = torch.empty((x["T"], x["top_k"]), dtype=torch.int32)
            return tokens, [ids] * sets, torch.empty(ids.shape), tokens
        made = synthetic(x["routing"], x["T"], x["E"], x["top_k"], work.ROUTING_SEED, device)
        step = max(1, x["E"] // sets)
        ids = [((made.ids + i * step) % x["E"]).int().contiguous() for i in range(sets)]
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.randn((x["T"], x["H"]), device=device, generator=generator).to(dtype)
        return tokens, ids, made.weights.bfloat16().float(), torch.empty_like(tokens)

    tokens, ids, weights, out = _shared(x, device, ("inputs", sets, seed), make)
    w1, w2 = _weights(x, device, seed, kind or x["weights"])
    return [LayerInputs(tokens, one, weights, w1, w2, out) for one in ids]


def _with_outputs(items: Sequence[LayerInputs]) -> list[LayerInputs]:
    """The same inputs with outputs that are this variant's own."""
    return [replace(item, out=torch.empty_like(item.out)) for item in items]


# Configurations


def config_of(
    x: Case,
    device: Any,
    base: str = "",
    block_m: int = 0,
    grid: str = "",
    int8: bool = False,
    tokens: int = 0,
    plain: bool = False,
    dependent: bool = True,
    rows: bool = True,
    words: bool | None = None,
    choice: Candidate | None = None,
    **changes: Any,
) -> Choice:
    """A configuration for a case. base: "ours" (tuned, of layers the default), "rule" or "source" (of single GEMMs).

    block_m: the source's; 0: by tokens, to 64. grid: "tiles", "SMs", "filled" (SMs × occupancy, which the caller finds)
    or empty: as it is. tokens: those that it is chosen for; 0: the case's. plain: for weights that are not quantised.
    dependent: False: launches that wait for the one before. rows: False: one token by tiles too. words: whether one
    token's INT4 weights are loaded as such; None: as is chosen. choice: of the rule's, with this candidate, the other
    GEMM for the same blocks. changes: of both tiles.
    """
    int4 = x["weights"] == "INT4" and not plain
    shape = (tokens or x["T"], x["E"], x["top_k"], x["H"], x["I"], int4)
    if choice:
        return replace(choose.rule(*shape), block_m=choice.block_m, rows=None, **{choice.gemm: choice.tile})
    device = torch.device(device)
    sms, base = multiprocessors(device), base or ("ours" if x.op == "layer" else "source")
    ruled = choose.rule(*shape, sms)
    if base == "source":
        found = choose.source(block_m or 16, sms, True, int8=int8)
        largest = choose.SOURCE_BLOCKS_M[-1]  # with 128 rows its tile does not fit the registers
        found = found if block_m else replace(found, block_m=min(ruled.block_m, largest))
    elif base == "rule":
        found = choose.join(ruled, shape[0], int4)
    else:
        found = (choose.choose_any if words is None else choose.choose)(*shape, device)
    if words:
        found = replace(found, rows=choose.by_words(x["top_k"], x["I"]))
    if grid == "tiles":
        changes |= {"programs": 0, "flatten": False}
    elif grid:
        changes |= {"programs": sms}
    found = found if dependent else replace(found, dependent=False)
    if tokens and x["activations"] == "fp32":  # of which the tiles for many tokens of 16 bits would not fit
        changes |= {"num_stages": 2}
    if x.op != "layer" or x["T"] > 1 or grid or changes or not rows:  # what is about tiles
        found = replace(found, rows=None)
    if x.op not in ("layer", "designs") or grid or changes:
        found = choose.apart(found)
    return replace(found, gemm1=replace(found.gemm1, **changes), gemm2=replace(found.gemm2, **changes))


def resident(launch: Launch) -> int:
    """CTAs of a kernel that fit on a multiprocessor at once; 1 where it is only compiled or interpreted."""
    if launch.args["slots"].device.type != "cuda":
        return 1
    return compiled.evidence(launch)["ctas_per_sm"] or 1


def _own_tables(scratch: Workspace) -> Workspace:
    """Scratch with the same rows, and tables of the routing that are a variant's own."""
    return replace(scratch, integers=torch.empty_like(scratch.integers))


def _built(x: Case, item: LayerInputs, scratch: Workspace, grid: str = "", int8: bool = False, **how: Any) -> Layer:
    """The layer of a configuration, its persistent grids as large as they are asked for."""
    make, scratch = w4a8.layer if int8 else expert_layer.layer, _own_tables(scratch)
    config = config_of(x, item.x.device, grid=grid, int8=int8, **how)
    made = make(item, config, scratch)
    if grid == "filled":
        tiles = {name: getattr(config, name) for name in ("gemm1", "gemm2")}
        tiles = {n: replace(t, programs=t.programs * resident(made.launches[n])) for n, t in tiles.items()}
        made = make(item, replace(config, **tiles), scratch)
    return made


# Whole layers


def layer(x: Case, device: Any, sets: int, seed: int, **how: Any) -> Trial:
    """The lab's layer, or ExecuTorch's; how: arguments of `config_of`."""
    kind = x["activations"] if how.get("plain") else x["weights"]
    items = _with_outputs(inputs(x, device, sets, seed, kind))
    scratch = _shared(x, device, "scratch", lambda: workspace(items[0]))
    made = [_built(x, item, scratch, **how) for item in items]
    config, int8 = made[0].config, bool(how.get("int8"))

    def facts() -> dict[str, Any]:
        parts = {} if config.rows else {name: evidence(made[0], name) for name in ("gemm1", "gemm2")}
        return {"config": config.as_dict()} | parts

    stored = not config.fused and not int8
    return _layer(x, items, made, INT8 if int8 else EXACT, kind, stored, facts=facts)


def design(x: Case, device: Any, sets: int, seed: int, by: str = "") -> Trial:
    """The lab's layer, or by another design; by: the variant whose design it is."""
    items = _with_outputs(inputs(x, device, sets, seed))
    scratch = _shared(x, device, "scratch", lambda: workspace(items[0]))
    config = designed_for(x, device, by)
    made = [designed(item, config, _own_tables(scratch), by) for item in items]

    def facts() -> dict[str, Any]:  # looked at after a check, which has called the first of them
        code = {name: _code(made[0].launches[name]) for name in variants.GEMMS}
        return {"config": config.as_dict(), "bits": hash_of(items[0].out)} | code

    return _layer(x, items, made, facts=facts)


def designed_for(x: Case, device: Any, by: str) -> Choice:
    """The configuration of a case by a design."""
    if by == variants.FRAGMENTS:
        return few_rows.BLOCKS
    if by == variants.SPECIALISED:
        return specialised.blocks_of(x["T"], x["top_k"], x["E"])
    config = config_of(x, device, base="ours")
    return choose.apart(config) if by == variants.APART else config


def designed(item: LayerInputs, config: Choice, scratch: Workspace, by: str) -> Layer:
    """The launches of a design on one set of inputs."""
    if by == variants.FRAGMENTS:
        return few_rows.by_few_rows(item, scratch)
    if by == variants.SPECIALISED:
        return specialised.by_specialised_warps(item, scratch, config.block_m)
    if by == variants.IN_TURN:
        return tiled.by_tiles(item, config, scratch, at_once=False)
    return expert_layer.layer(item, config, scratch)


def _code(launch: Launch) -> dict[str, Any]:
    """What is kept of a kernel's evidence; nothing where it is not compiled."""
    if launch.args["slots"].device.type != "cuda":
        return {}
    found = compiled.evidence(launch)
    return {name: found[name] for name in KEPT}


def _layer(
    x: Case,
    items: Sequence[LayerInputs],
    calls: Sequence[Call],
    tolerance: Mapping[str, float] = EXACT,
    kind: str = "",
    stored: bool = False,
    **more: Any,
) -> Trial:
    """A trial of calls that write their item's `out`. kind: of the weights; stored: gate and up pass through memory."""

    def check() -> dict[str, float]:
        calls[0]()
        return _errors(items[0].out[_some(x)], _expected(x, items[0], kind, stored))

    return trial(calls, [item.out for item in items], check, tolerance, **more)


def _some(x: Case) -> Tensor:
    """The tokens that are checked: the first, the last, and some between."""
    return torch.linspace(0, x["T"] - 1, min(CHECKED, x["T"])).long()


def _expected(x: Case, item: LayerInputs, kind: str = "", stored: bool = False) -> Tensor:
    """Those tokens' outputs in float64; stored: rounded where they pass from kernel to kernel (`reference.layer`)."""
    some = _some(x).to(item.x.device)

    def make() -> Tensor:
        dtype = item.x.dtype if stored else None
        return reference.layer(item.x[some], item.ids[some], item.weights[some], item.w1, item.w2, dtype)

    return _shared(x, item.x.device, ("expected", kind or x["weights"], stored, item.x.data_ptr()), make)


def _errors(found: Tensor, expected: Tensor) -> dict[str, float]:
    return dict(zip(("max", "rms"), reference.errors(found, expected), strict=True))


def grouped_mm(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """torch's grouped product with the lab's kernels around it."""
    items = _with_outputs(inputs(x, device, sets, seed))
    return _layer(x, items, [peers.grouped_mm(item) for item in items], stored=True)


def loop(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """A loop over experts of torch.mm."""
    items = _with_outputs(inputs(x, device, sets, seed))
    return _layer(x, items, [peers.loop(item) for item in items], LOOPED, stored=True)


def liger(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """liger-kernel's fused layer, which returns its output."""
    items, calls = inputs(x, device, sets, seed), []
    tuning.choose(peers.liger_tuners(), f"liger-kernel {x.key}", lambda: calls.append(peers.liger(items[0])))
    calls += [peers.liger(item, tune=False) for item in items[1:]]
    return trial(calls, (), lambda: _errors(calls[0]()[_some(x)], _expected(x, items[0])), EXACT)


def sglang_layer(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """SGLang's layer."""
    return _of_engine(sglang, x, device, sets, seed)


def vllm_layer(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """vLLM's layer."""
    return _of_engine(vllm, x, device, sets, seed)


def _of_engine(engine: Any, x: Case, device: Any, sets: int, seed: int) -> Trial:
    """A layer that returns its output. engine: the module that calls it."""
    items = inputs(x, device, sets, seed)
    calls = kept([engine.layer(item) for item in items])

    def check() -> dict[str, float]:
        return _errors(calls[0]()[_some(x)], _expected(x, items[0], stored=True))

    return trial(calls, (), check, LOOPED, facts=lambda: {"config": engine.configuration(items[0])})


def humming_layer(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Humming's products in a layer of ours."""
    items = _with_outputs(inputs(x, device, sets, seed))
    E, H, width = x["E"], x["H"], x["I"]
    weights = (items[0].w1, items[0].w2)
    ready = _of_model((E, H, width, str(device), seed), "Humming", lambda: [humming.prepared(w) for w in weights])
    tiles = [humming.tile_for(one.config, x["T"] * x["top_k"]) for one in ready]
    found = _layer(x, items, [humming.layer(item, *ready) for item in items], ROUNDED, stored=True)
    return replace(found, facts=lambda: {"config": {"gemm1": str(tiles[0]), "gemm2": str(tiles[1])}})


def per_pair(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """ExecuTorch's decode layer."""
    return _released(x, device, sets, seed, executorch.module("tiles"), executorch.per_pair, int8=False)


def released(x: Case, device: Any, sets: int, seed: int, grid: str, int8: bool) -> Trial:
    """ExecuTorch's batched layer, in either grid."""
    bind = partial(executorch.batched, int8=int8, grid=grid)
    return _released(x, device, sets, seed, executorch.module(grid), bind, int8)


def narrow(x: Case, device: Any, sets: int, seed: int, int8: bool) -> Trial:
    """ExecuTorch's batched layer in blocks of 16 rows."""
    module = sources.changed(executorch.RELEASE, executorch.MODULE, executorch.blocks_of_16)
    return _released(x, device, sets, seed, module, partial(executorch.narrow, int8=int8), int8)


def _released(
    x: Case, device: Any, sets: int, seed: int, module: ModuleType, bind: Callable[[LayerInputs], Call], int8: bool
) -> Trial:
    """A layer that returns its output, and tunes itself at the first call."""
    items, tuners = inputs(x, device, sets, seed), tune_anew([module])
    calls = kept([bind(item) for item in items])

    def check() -> dict[str, float]:
        return _errors(calls[0]()[_some(x)], _expected(x, items[0], stored=not int8))

    if torch.device(device).type == "cuda":  # the interpreter would only make the call twice
        tuning.choose(tuners, f"{module.__name__} {x.key}", calls[0])
    return trial(calls, (), check, INT8 if int8 else ROUNDED, facts=lambda: {"launches": chosen(tuners)})


def added(function: Callable[..., Any], x: Case, device: Any, sets: int, seed: int) -> Trial:
    """A function of the reader's own, function(x, ids, weights, w1, w2, out), on copies of its own."""
    made = inputs(x, device, sets, seed)
    tokens, weights, w1, w2 = (getattr(made[0], name).clone() for name in ("x", "weights", "w1", "w2"))
    ids, out = [one.ids.clone() for one in made], [torch.empty_like(tokens) for _ in made]
    calls = [partial(function, tokens, some, weights, w1, w2, y) for some, y in zip(ids, out, strict=True)]

    def other_tokens(i: int, random: Random) -> None:
        random.fill(tokens)
        weights.copy_(weights.flip(1))
        for some in ids:
            some.add_(1).remainder_(x["E"])

    large: list[tuple[Tensor, Tensor]] = []  # weights that are, and what they were

    def other_weight(i: int, random: Random) -> None:  # a single one of each matrix, so large that `out` shows it
        for weight, before in large:
            weight.copy_(before)
        large.clear()
        for w in (w1, w2):
            expert = int(ids[i][random.below(x["T"]), random.below(x["top_k"])])
            weight = w[expert, random.below(w.shape[1]), random.below(w.shape[2])]
            large.append((weight, weight.clone()))
            weight.fill_(LARGE)

    def expected(i: int, count: int) -> tuple[list[int], Tensor]:
        some = some_of(x["T"], CHECKED)
        return some, reference.layer(tokens[some], ids[i][some], weights[some], w1, w2)

    def errors(exact: tuple[list[int], Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
        return _errors(found["out"][exact[0]], exact[1])

    given_to = [{"x": tokens, "ids": some, "weights": weights, "w1": w1, "w2": w2} for some in ids]
    changes = (other_tokens, other_weight)
    arguments = Arguments(given_to, [{"out": y} for y in out], changes, expected, errors, tolerance=OFTEN)
    return given(calls, arguments, LOOPED)


def read(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The ceiling: the weights of the experts that got a token."""
    items = inputs(x, device, sets, seed)
    wanted = {"gemm1": ("w1",), "gemm2": ("w2",)}.get(x.op, ("w1", "w2"))
    experts = [item.ids.unique() for item in items]
    launches = [
        [ceilings.read(getattr(item, name), some.int()) for name in wanted]
        for item, some in zip(items, experts, strict=True)
    ]
    calls = [in_order(some) for some in launches]

    def check() -> dict[str, float]:
        calls[0]()
        off = 0
        for name, launch in zip(wanted, launches[0], strict=True):
            w = getattr(items[0], name)
            parts = [w.packed, w.scales] if isinstance(w, Int4) else [w]
            expected = sum(_halves(part, some) for part in parts for some in experts[0].long().split(READ_AT_ONCE))
            off += abs(expected - int(launch.args["partial"].sum()))
        return {"sum": float(off)}

    return trial(calls, (), check, {"sum": 0.0}, moves=work.weight_bytes(x))


def _halves(part: Tensor, some: Tensor) -> int:
    """The sum of the 16-bit halves of the words of some experts, without a sign. some: their numbers, int64."""
    # Summed as they lie: in 64 bits they would take four times the memory
    halves = part[some].reshape(-1).view(torch.int16)
    return int(halves.sum(dtype=torch.int64)) + 2**16 * int((halves < 0).sum())


# One GEMM


def gemm(x: Case, device: Any, sets: int, seed: int, **how: Any) -> Trial:
    """One of the two products, on what the launches before it leave; how: arguments of `config_of`.

    Which one is said by the case's operation, or by the candidate of the tuned table.
    """
    items, choice = inputs(x, device, sets, seed), how.get("choice")
    scratch = workspace(items[0])
    made = [_built(x, item, scratch, **how) for item in items]
    found = _gemm(x, items[0], made, choice.gemm if choice else x.op, bool(how.get("int8")))
    return replace(found, facts=None) if choice else found  # what is tuned is not looked at


def _gemm(x: Case, item: LayerInputs, made: Sequence[Layer], op: str, int8: bool = False) -> Trial:
    calls = [one.launches[op] for one in made]
    if not _only_compiled():
        for one in made:
            _until(one, op)

    def poison() -> None:
        calls[0].args["c"].fill_(math.nan)

    def check() -> dict[str, float]:
        poison()
        _until(made[0], op)
        return _errors(_found_rows(item, made[0], op), _expected_rows(x, item, made[0], op, int8))

    def written() -> bool:
        return not bool(_found_rows(item, made[0], op).isnan().any())

    def facts() -> dict[str, Any]:
        return evidence(made[0], op) | {"bits": hash_of(_found_rows(item, made[0], op))}

    return Trial(calls, poison, written, check, EXACT, calls[0], facts=facts, dissect=False)


def _until(made: Layer, op: str) -> None:
    """Launch everything up to one of the products."""
    for name, launch in made.launches.items():
        launch()
        if name == op:
            return


def _slots(item: LayerInputs, made: Layer) -> list[tuple[int, int, int]]:
    """Some slots: each one's number, the row that it is sorted to, and its expert."""
    ids = item.ids.flatten()
    slots = torch.linspace(0, len(ids) - 1, min(CHECKED_SLOTS, len(ids))).long().to(ids.device)
    rows = (made.sorted.slots[None, :] == slots[:, None]).int().argmax(1)
    return list(zip(slots.tolist(), rows.tolist(), ids[slots].tolist(), strict=True))


def _row(made: Layer, op: str, place: int) -> Tensor:
    """A row that a product wrote."""
    args = made.launches[op].args
    width = args["N"] // 2 if op == "gemm1" and made.config.fused else args["N"]
    return args["c"].view(-1)[place * width :][:width]


def _found_rows(item: LayerInputs, made: Layer, op: str) -> Tensor:
    """The rows of those slots that a product wrote: the first one sorted, the second one in the order of the slots."""
    return torch.stack([_row(made, op, row if op == "gemm1" else slot) for slot, row, _ in _slots(item, made)])


def _expected_rows(x: Case, item: LayerInputs, made: Layer, op: str, int8: bool) -> Tensor:
    """The same in float64 from what the product read; of the first one, for all variants of a case."""
    fused = made.config.fused

    def make() -> Tensor:
        found = []
        for slot, row, e in _slots(item, made):
            if op == "gemm1":
                a = item.x[slot // x["top_k"]].double()
            else:
                a = _row(made, "gemm1", row).double()
                a = a if fused else _silu_up(a)
            y = _expert(x, item, op, e) @ (_eight_bit(a) if int8 else a)
            found.append(_silu_up(y) if op == "gemm1" and fused else y)
        return torch.stack(found)

    if op == "gemm2":
        return make()
    return _shared(x, item.x.device, ("rows", fused, int8, item.x.data_ptr()), make)


def _expert(x: Case, item: LayerInputs, op: str, e: int) -> Tensor:
    """An expert's weights in float64, made once for all variants of a case."""
    w = item.w1 if op == "gemm1" else item.w2

    def make() -> Tensor:
        return experts_int4.dequantise(Int4(w.packed[e], w.scales[e])) if isinstance(w, Int4) else w[e].double()

    place = (w.packed if isinstance(w, Int4) else w).data_ptr()
    return _shared(x, item.x.device, ("expert", place, e), make)


def _silu_up(values: Tensor) -> Tensor:
    gate, up = values.chunk(2)
    return gate * torch.sigmoid(gate) * up


def _eight_bit(values: Tensor) -> Tensor:
    """The values as they are once they are quantised to 8 bits."""
    whole, scales = experts_int4.quantise_rows(values, choose.INT8_GROUP)
    return (whole.unflatten(-1, (-1, choose.INT8_GROUP)) * scales[..., None]).flatten(-2)


def evidence(made: Layer, op: str) -> dict[str, Any]:
    """What is known of one GEMM of a layer whose routing has run: its grid, and what its kernel was compiled to.

    live: blocks that have a token, of the `blocks` of the grid; tiles: those that are worked on; programs: launched.
    """
    launch, tile = made.launches[op], getattr(made.config, op)
    columns = -(-launch.args["N"] // tile.block_n)
    live = int(made.sorted.padded) // made.config.block_m
    found = {"block_m": made.config.block_m, "tile": str(tile), "live": live, "blocks": made.sorted.blocks}
    found |= {"tiles": (live if tile.counted else made.sorted.blocks) * columns, "programs": launch.grid[0]}
    code = _code(launch)
    return found | ({"sms": multiprocessors(launch.args["slots"].device)} | code if code else {})


def released_gemm(
    x: Case, device: Any, sets: int, seed: int, grid: str, int8: bool, live: bool = False, filled: bool = False,
    group_m: int = 0,
) -> Trial:  # fmt: skip
    """One of the products of ExecuTorch's batched layer, on what that gives it; arguments as of `executorch.launcher`.

    filled: as many programs as fit a multiprocessor, of the code that was chosen with one.
    """
    items = inputs(x, device, sets, seed)
    _shared(x, device, ("tuned", grid, int8), lambda: _tuned(x, items[0], int8, grid))  # once for them all
    made = [executorch.product(item, x.op, int8, grid) for item in items]
    how = {"live": live, "sms": multiprocessors(torch.device(device)) if torch.device(device).type == "cuda" else 3}
    code = _described(executorch.launcher(made[0], grid, **how)())
    how["per_sm"] = code.get("ctas_per_sm") or 1 if filled else 1
    calls = [executorch.launcher(one, grid, group_m=group_m, **how) for one in made]
    rows = _rows_of(items[0], x)

    def poison() -> None:
        made[0].args["C"].fill_(math.nan)

    def found() -> Tensor:
        return made[0].args["C"][[row if x.op == "gemm1" else slot for slot, row, _ in rows]]

    def check() -> dict[str, float]:
        poison()
        calls[0]()
        return _errors(found(), torch.stack([_released_row(x, items[0], made[0].args, int8, *one) for one in rows]))

    def facts() -> dict[str, Any]:
        tiles, programs = executorch.programs(made[0], grid, **how)
        known = {"block_m": executorch.BLOCK_M, "tile": str(made[0].config), "live": made[0].live}
        known |= {"blocks": made[0].blocks, "tiles": tiles, "programs": programs, "sms": how["sms"]}
        return known | _described(calls[0]()) | {"bits": hash_of(found())}

    def written() -> bool:
        return not bool(found().isnan().any())

    return Trial(calls, poison, written, check, ROUNDED, facts=facts)


def _tuned(x: Case, item: LayerInputs, int8: bool, grid: str) -> None:
    """Have the kernel of such a product choose for a case; in the interpreter its first call does."""
    tuners = tune_anew([SimpleNamespace(kernel=executorch.tuner(x.op, int8, grid))])
    if item.x.device.type == "cuda":
        tuning.choose(tuners, f"{x.op} {x.key}", executorch.batched(item, int8, grid))


def _described(kernel: Any) -> dict[str, Any]:
    """What is in a kernel that was launched; nothing of one that was interpreted."""
    if kernel is None or not hasattr(kernel, "asm"):
        return {}
    known = compiled.describe(kernel)
    size = (known["registers"], known["shared_bytes"], known["num_warps"])
    fit = roofline.occupancy(*size, known["arch"]) if known["arch"] in roofline.LIMITS else None
    return {name: known[name] for name in KEPT if name in known} | {"ctas_per_sm": fit}


def _rows_of(item: LayerInputs, x: Case) -> list[tuple[int, int, int]]:
    """As `_slots`, of rows in blocks of ExecuTorch's size."""
    ids = item.ids.flatten().long()
    counts = ids.bincount(minlength=x["E"])
    padded = -(-counts // executorch.BLOCK_M) * executorch.BLOCK_M
    start = padded.cumsum(0) - padded
    slots = torch.linspace(0, len(ids) - 1, min(CHECKED_SLOTS, len(ids))).long().tolist()
    return [(slot, int(start[ids[slot]] + (ids[:slot] == ids[slot]).sum()), int(ids[slot])) for slot in slots]


def _released_row(
    x: Case, item: LayerInputs, args: Mapping[str, Any], int8: bool, slot: int, row: int, e: int
) -> Tensor:
    """A row that such a product should write, in float64 from what it read."""
    if int8:
        whole, scales = args["A_int8"][row].double(), args["A_scale"][row].double()
        a = (whole.unflatten(0, (len(scales), -1)) * scales[:, None]).flatten()
    else:
        a = item.x[slot // x["top_k"]].double() if x.op == "gemm1" else _silu_up(args["A"][row].double())
    y = _expert(x, item, x.op, e) @ a
    return y if x.op == "gemm1" else y * item.weights.flatten()[slot].double()


# A part of the GPU


def limited(x: Case, device: Any, sets: int, seed: int, sms: int, grid: str) -> Trial:
    """GEMM1 of the production layer on so many multiprocessors (0: all), timed by itself.

    grid: "tiles", or "filled": persistent, as many programs as those multiprocessors hold.
    """
    [item] = inputs(x, device, 1, seed)
    scratch = _own_tables(_shared(x, device, "scratch", lambda: workspace(item)))
    config = config_of(x, device, "rule", grid="tiles", dependent=False)  # the next launch would hide this one's end
    made = expert_layer.layer(item, config, scratch)
    stream, seen = green_context.stream_on(sms, torch.device(device))
    if grid == "filled":
        programs = seen * resident(made.launches["gemm1"])
        made = expert_layer.layer(item, replace(config, gemm1=replace(config.gemm1, programs=programs)), scratch)
    found = _gemm(x, item, [made], "gemm1")
    torch.cuda.synchronize(device)
    launch = made.launches["gemm1"]
    return replace(
        found, poison=None, written=None, launch=None, timer=lambda: green_context.timed(stream, launch),
        facts=lambda: evidence(made, "gemm1") | {"seen": seen},
    )  # fmt: skip
