"""The kernels that cases need, as launches to compile before them: on memory that is never touched."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from labkit.bench.spec import Case
from labkit.evidence import compiled
from labkit.evidence.compiled import Source
from labkit.kernels import offline
from labkit.kernels.experts import expert_layer, inputs
from labkit.kernels.experts.choose import Choice, WordChoice
from labkit.kernels.launch import Launch
from labkit.studies.moe_persistent_grid import peers, trials, variants, w4a8

BEFORE = {"gemm1": "quantise", "gemm2": "activate"}  # what an 8-bit product needs, beside itself


def sources(some: Sequence[Case], capability: int) -> list[Source]:
    """What `compiled.prebuild` takes; launches of the same code once."""
    found: dict[str, Source] = {}
    for x in some:
        for key, source in _of(x, capability):
            found.setdefault(json.dumps(key), source)
    return list(found.values())


def _of(x: Case, capability: int) -> Iterator[tuple[Any, Source]]:
    """What the code depends on, and a source, of everything that a case launches and that is not a library's."""
    lines = variants.lines(x)
    shape = [x[name] for name in ("E", "H", "I", "top_k", "weights", "activations")]
    for line in lines:
        how = line.options
        if line.make == "limited":
            how = {"base": "rule", "grid": how["grid"], "dependent": False}
        elif line.make not in ("layer", "gemm") or how.get("plain"):
            continue
        # The device whose tuned table counts is this machine's GPU, where there is one.
        config = trials.config_of(x, "cuda" if torch.cuda.is_available() else "cpu", **how)
        int8 = bool(how.get("int8"))
        shared = {"op": x.op, "params": dict(x.params), "choice": config.as_dict(), "int8": int8}
        for key, wanted in _parts(x, shape, _gemms(x, how), config, int8, capability):
            # A layer's own evidence is of its products; what is tuned is not looked at.
            dissect = wanted[0] in variants.GEMMS and x.op != "tune" and not config.rows
            yield [*key, dissect], (f"{__name__}:layer", shared | {"wanted": wanted, "dissect": dissect})
    for make in ("grouped_mm", "liger"):
        if any(line.make == make for line in lines):
            yield [make, x["T"], *shape], (f"{__name__}:library", {"make": make, "params": dict(x.params)})


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
            key = [gemm, *shape, config.block_m, config.fused, config.dependent, how, int8]
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
    dissect: bool = False,
) -> list[Launch]:
    """Those of the wanted launches that the layer of a case and a configuration has.

    dissect: also take their code apart now, for the evidence of the rows; what is found is kept on disk.
    """
    x = Case(op, params)
    [item] = trials.inputs(x, "cpu", 1, 0)
    rows, parts, integers = inputs.sizes(item)
    shared = (torch.empty(size, dtype=item.x.dtype) for size in (rows, parts))
    scratch = inputs.Workspace(x["T"], *shared, torch.empty(integers, dtype=torch.int32))
    launches = (w4a8.layer if int8 else expert_layer.layer)(item, config_from(choice), scratch).launches
    found = [launches[name] for name in wanted if name in launches]
    if dissect:
        compiled.evidence(found[0], offline.offline_capability())
    return found


def config_from(choice: Mapping[str, Any]) -> Choice:
    """The configuration that `as_dict` has made JSON of, also with words."""
    rows = choice["rows"] or {}
    found = Choice.of({**choice, "rows": None} if "down_k" in rows else choice)
    return replace(found, rows=WordChoice(**rows)) if "down_k" in rows else found


def library(make: str, params: Mapping[str, Any]) -> "list[Launch] | LigerLayer":
    """The kernels around torch's grouped product, or liger-kernel's layer: nothing where it is not installed."""
    [item] = trials.inputs(Case("layer", params), "cpu", 1, 0)
    return LigerLayer(item) if make == "liger" else peers.glue(item)


@dataclass(frozen=True)
class LigerLayer:
    """liger-kernel's layer of LayerInputs x: all the kernels that it has and tries while it tunes."""

    x: Any
    kernel: Any = None

    def compile(self) -> None:
        """Compile what a call would launch; tensors are on the CPU and never touched."""
        from triton import testing
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def only_compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return run(kernel, *args, grid=grid, warmup=True, **options)

        def not_timed(call: Any, **how: Any) -> list[float]:
            call()
            return [1.0, 1.0, 1.0]

        with (
            mock.patch.object(JITFunction, "run", only_compiled),
            mock.patch.object(testing, "do_bench", not_timed),
            mock.patch.object(Tensor, "item", return_value=64),
            suppress(Exception),
        ):  # the variant itself will say what is wrong
            peers.liger(self.x)
