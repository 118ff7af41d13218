"""The kernels that cases need, to compile before them: what their trials launch on `meta`, tensors without memory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from labkit.bench.spec import Case, Trial
from labkit.evidence.compiled import DISSECT, Source
from labkit.kernels.launch import Launch, launched
from labkit.kernels.offline import offline
from labkit.sources.building import NotBuilt
from labkit.sources.loading import NotFetched
from labkit.studies.batched_ffn import llama_cpp, variants
from labkit.sweep.variants import code_of, once

LONGEST = ("Q5_K", "Q4_K", "Q6_K")  # formats whose kernels take a minute: begun last, they would keep one core busy
LIBRARIES = (variants.CUBLAS, variants.GEMLITE, variants.GROUPED_MM, variants.LLAMA)  # have no kernel of the lab's


def sources(some: Sequence[Case], capability: int, gpu: str) -> list[Source]:
    """What `compiled.prebuild` takes, what compiles longest first; of launches with the same code the first."""
    _build(some, capability)
    found: dict[str, Source] = {}
    with offline(capability):
        for arguments in _wanted(some):
            trial = _prepared(**arguments)
            for place, launch in enumerate(launched(trial.calls[0])):
                wanted = arguments | {"places": [place], DISSECT: trial.dissect}
                once(found, code_of(launch), (f"{__name__}:launches", wanted))
    return sorted(found.values(), key=_rank)


def _rank(source: Source) -> int:
    kind = source[1]["params"].get("format")
    return LONGEST.index(kind) if kind in LONGEST else len(LONGEST)


def _build(some: Sequence[Case], capability: int) -> None:
    """llama.cpp's library, where cases need it: it takes minutes, once. If it cannot be had, its rows say why."""
    if any(one.name == variants.LLAMA for x in some for one in variants.of(x)):
        with suppress(NotFetched, NotBuilt):
            llama_cpp.library(capability)


def _wanted(some: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Arguments of `launches`. A token is also computed alone, to compare its bits.

    A step through the cache launches what experts that are all there do.
    """
    for x in {(x.op, x.key): x for x in some}.values():
        op, params, names = x.op, dict(x.params), [one.name for one in variants.of(x) if one.name not in LIBRARIES]
        if op == "cache":
            op, params, names = "routed", params | {"layers": 1}, [variants.INDEXED_MATRIX]
        for name, N in product(names, sorted({1, x["N"]})):
            yield {"op": op, "params": params | {"N": N}, "variant": name}


def _prepared(op: str, params: Mapping[str, Any], variant: str) -> Trial:
    [one] = [one for one in variants.VARIANTS[op] if one.name == variant]
    return one.prepare(Case(op, params), "meta", 1, 0)


def launches(op: str, params: Mapping[str, Any], variant: str, places: Sequence[int] | None = None) -> list[Launch]:
    """What a call of a variant launches; places: those of its launches alone."""
    found = launched(_prepared(op, params, variant).calls[0])
    return found if places is None else [found[place] for place in places]
