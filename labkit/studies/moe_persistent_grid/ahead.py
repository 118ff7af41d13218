"""The kernels that cases need, as launches to compile before them: on memory that is never touched."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from labkit import sources
from labkit.bench.spec import Case
from labkit.evidence.compiled import DISSECT, Source
from labkit.kernels import tuned
from labkit.kernels.experts import blocks, choose, expert_layer, inputs
from labkit.kernels.experts.choose import Choice, WordChoice
from labkit.kernels.launch import Launch
from labkit.studies.moe_persistent_grid import executorch, humming, peers, sglang, trials, variants, vllm, w4a8
from labkit.sweep.variants import once

EXECUTORCHS = ("per_pair", "released", "released_gemm", "narrow")
ENGINES = {"sglang_layer": variants.SGLANG_RELEASE, "vllm_layer": variants.VLLM_RELEASE}
PARTS = 12  # sources that the configurations of a layer which tunes itself are spread over, so that cores share them
BEFORE = {"gemm1": "quantise", "gemm2": "activate"}  # what an 8-bit product needs, beside itself


def launches(some: Sequence[Case], capability: int, gpu: str) -> list[Source]:
    """What `compiled.prebuild` takes; launches of the same code once."""
    found: dict[str, Source] = {}
    with tuned.chosen_for(gpu, choose):
        for x in some:
            for key, source in _of(x, capability, gpu):
                once(found, json.dumps(key), source)
    return list(found.values())


def _of(x: Case, capability: int, gpu: str) -> Iterator[tuple[Any, Source]]:
    """What the code depends on, and a source, of everything that a case launches and that is not a library's."""
    lines = variants.lines(x)
    shape = [x[name] for name in ("E", "H", "I", "top_k", "weights", "activations")]
    for line in lines:
        how = line.options
        if line.make == "design":
            yield from _designed(x, shape, how.get("by", ""), capability)
            continue
        if line.make == "limited":
            how = {"base": "rule", "grid": how["grid"], "dependent": False}
        elif line.make not in ("layer", "gemm") or how.get("plain"):
            continue
        config = trials.config_of(x, "cpu", **how)
        int8 = bool(how.get("int8"))
        shared = {"op": x.op, "params": dict(x.params), "choice": config.as_dict(), "int8": int8}
        for key, wanted in _parts(x, shape, _gemms(x, how), config, int8, capability):
            # A layer's own evidence is of its products; what is tuned is not looked at.
            dissect = wanted[0] in variants.GEMMS and x.op != "tune" and not config.rows
            yield key, (f"{__name__}:layer", shared | {"wanted": wanted, DISSECT: dissect})
    yield from _foreign(x, lines, shape, gpu)


def _designed(x: Case, shape: list[Any], by: str, capability: int) -> Iterator[tuple[Any, Source]]:
    """The same of a layer by another design, or by tiles."""
    config = trials.designed_for(x, "cpu", by)
    shared = {"op": x.op, "params": dict(x.params), "choice": config.as_dict(), "by": by}
    for key, wanted in _parts(x, shape, variants.GEMMS, config, False, capability):
        dissect = wanted[0] in variants.GEMMS
        yield (
            [by] * (dissect or by == variants.IN_TURN) + key,
            (f"{__name__}:layer", shared | {"wanted": wanted, DISSECT: dissect}),
        )
    if by == variants.SPECIALISED:
        yield (
            [by, "gather", x["H"], x["top_k"], config.dependent],
            (f"{__name__}:layer", shared | {"wanted": ["gather"], DISSECT: False}),
        )


def _foreign(x: Case, lines: Sequence[variants.Line], shape: list[Any], gpu: str) -> Iterator[tuple[Any, Source]]:
    """The same of what is not the lab's."""
    params = dict(x.params)
    for line in lines:
        if line.make in ("grouped_mm", "liger"):
            yield [line.make, x["T"], *shape], (f"{__name__}:library", {"make": line.make, "params": params})
        if line.make in ENGINES and sources.is_fetched(sources.source(ENGINES[line.make])):
            yield [line.make, x["T"], *shape], (f"{__name__}:{line.make}", {"params": params, "gpu": gpu})
        if line.make == "humming_layer" and torch.cuda.is_available():
            yield from _hummings(x)
        if line.make in EXECUTORCHS and sources.is_fetched(sources.source(variants.RELEASE)):
            how = {name: line.options[name] for name in ("grid", "int8") if name in line.options} or None
            block_m = executorch.NARROW_BLOCK_M if line.make == "narrow" else executorch.BLOCK_M
            for part in range(PARTS):
                key = ["executorch", how, part, *_counts(x, block_m), *shape]
                yield key, (f"{__name__}:executorchs", {"params": params, "how": how, "part": part})


def _hummings(x: Case) -> Iterator[tuple[Any, Source]]:
    """The same of Humming's products; nothing where it cannot be loaded, of which the row will say why."""
    with suppress(Exception):
        gpu = humming.gpu_facts()
        for sizes in ([x["E"], 2 * x["I"], x["H"]], [x["E"], x["H"], x["I"]]):
            arguments = {"shape": sizes, "slots": x["T"] * x["top_k"], "gpu": gpu}
            yield ["humming", sizes, x["T"] * x["top_k"]], (f"{__name__}:hummings", arguments)


def _counts(x: Case, block_m: int) -> list[bool]:
    """What Triton asks of the numbers that ExecuTorch's kernels are given: nothing else of them is about the tokens."""
    slots = x["T"] * x["top_k"]
    numbers = slots, blocks.source_blocks(x["T"], x["top_k"], x["E"], block_m)
    return [answer for number in numbers for answer in (number == 1, number % 16 == 0)]


def _gemms(x: Case, how: Mapping[str, Any]) -> Sequence[str]:
    """The products of a case's variant."""
    if x.op == "tune":  # a second product is timed on what the rule's first one leaves, in blocks it may not have
        return list(dict.fromkeys(("gemm1", how["choice"].gemm)))
    return {"layer": variants.GEMMS, "waves": ("gemm1",)}.get(x.op, (x.op,))


def _parts(
    x: Case, shape: list[Any], gemms: Sequence[str], config: Choice, int8: bool, capability: int
) -> Iterator[tuple[list[Any], list[str]]]:
    """What the code of some of a layer's launches depends on, and their names."""
    for gemm in gemms:
        tile = getattr(config, gemm)
        if config.rows:
            yield [gemm, *shape, config.as_dict()["rows"], config.dependent], [gemm]
        elif not tile.descriptor or capability >= 90:
            how = tile.as_dict() | {"programs": tile.programs > 0}
            joined = isinstance(config, choose.Joined)
            key = [gemm, *shape, config.block_m, config.fused, config.dependent, joined, how, int8]
            yield key, [gemm, BEFORE[gemm]] if int8 else [gemm]
    if not config.rows:
        counted = config.gemm1.counted and config.gemm2.counted
        yield ["routing", x["E"], x["T"], x["top_k"], config.block_m, config.dependent, counted], ["count", "place"]
        if x.op == "layer":
            yield ["sum", *shape, config.dependent], ["sum"]


# In the processes that compile


def layer(
    op: str,
    params: Mapping[str, Any],
    wanted: Sequence[str],
    choice: Mapping[str, Any],
    int8: bool = False,
    by: str = "",
) -> list[Launch]:
    """Those of the wanted launches that the layer of a case and a configuration has, by a design if one is named."""
    x = Case(op, params)
    [item] = trials.inputs(x, "cpu", 1, 0)
    rows, parts, integers = inputs.sizes(item)
    shared = (torch.empty(size, dtype=item.x.dtype) for size in (rows, parts))
    scratch = inputs.Workspace(x["T"], *shared, torch.empty(integers, dtype=torch.int32))
    config = config_from(choice)
    make = w4a8.layer if int8 else partial(trials.designed, by=by) if by else expert_layer.layer
    launches = make(item, config, scratch).launches
    return [launches[name] for name in wanted if name in launches]


def config_from(choice: Mapping[str, Any]) -> Choice:
    """The configuration that `as_dict` has made JSON of, also with words, or joined."""
    choice = dict(choice)
    if choice.pop("joined", False):  # rows of its first measurement on an H200 also say that they are not
        return choose.Joined.of(choice)
    rows = choice["rows"] or {}
    found = Choice.of({**choice, "rows": None} if "down_k" in rows else choice)
    return replace(found, rows=WordChoice(**rows)) if "down_k" in rows else found


def library(make: str, params: Mapping[str, Any]) -> "list[Launch] | Foreign":
    """The kernels around torch's grouped product, or liger-kernel's layer: nothing where it is not installed."""
    [item] = trials.inputs(Case("layer", params), "cpu", 1, 0)
    return Foreign(partial(peers.liger, item)) if make == "liger" else peers.glue(item)


def sglang_layer(params: Mapping[str, Any], gpu: str) -> "Foreign":
    """SGLang's layer of a case, in the configuration that it has for the GPU of this name."""
    return _of_engine(sglang, params, gpu)


def vllm_layer(params: Mapping[str, Any], gpu: str) -> "Foreign":
    """vLLM's layer of a case, in the configuration that it has for the GPU of this name."""
    return _of_engine(vllm, params, gpu)


def _of_engine(engine: Any, params: Mapping[str, Any], gpu: str) -> "Foreign":
    [item] = trials.inputs(Case("layer", params), "cpu", 1, 0)
    engine.choose_for(gpu)
    return Foreign(engine.layer(item))


def hummings(shape: list[int], slots: int, gpu: Mapping[str, Any]) -> "Foreign":
    """One of Humming's products for so many slots: arguments of `humming.compile_for`."""
    return Foreign(partial(humming.compile_for, shape, slots, gpu))


def executorchs(params: Mapping[str, Any], how: Mapping[str, Any] | None, part: int) -> "Foreign":
    """One of `PARTS` of what ExecuTorch's layer of a case tries while it tunes.

    how: arguments of `trials.released`; without a grid: of `trials.narrow`; None: of the layer per pair.
    """
    [item] = trials.inputs(Case("layer", params), "cpu", 1, 0)
    item = replace(item, ids=torch.zeros_like(item.ids))  # which it sorts, whatever it compiles
    if how is None:
        return Foreign(executorch.per_pair(item), part, PARTS)
    return Foreign((executorch.batched if "grid" in how else executorch.narrow)(item, **how), part, PARTS)


@dataclass(frozen=True)
class Foreign:
    """A layer of others as something to compile: all the kernels that it has, and tries while it tunes.

    call: makes its launches, on tensors on the CPU, whose values nothing depends on. Of the configurations of a kernel
    that tunes itself every `parts`-th, beginning with `part`.
    """

    call: Callable[[], Any]
    part: int = 0
    parts: int = 1
    kernel: Any = None

    def compile(self) -> None:
        """Compile what the call would launch."""
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def only_compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return run(kernel, *args, grid=grid, warmup=True, **options)

        def every(tuner: Any, *args: Any, **options: Any) -> None:
            for config in tuner.configs[self.part :: self.parts]:
                tuner.fn.run(*args, **options, **config.all_kwargs())

        with (
            mock.patch.object(JITFunction, "run", only_compiled),
            mock.patch.object(Autotuner, "run", every),
            mock.patch.object(Tensor, "item", return_value=64),
            suppress(Exception),
        ):  # the variant itself will say what is wrong
            self.call()
