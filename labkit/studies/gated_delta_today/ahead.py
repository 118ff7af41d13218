"""The kernels that cases need, to compile before them: what their trials launch on `meta`, tensors without memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.bench.spec import Case
from labkit.evidence.compiled import Source
from labkit.kernels.launch import Launch, launched
from labkit.kernels.offline import offline
from labkit.studies.gated_delta_today import variants
from labkit.sweep.variants import code_of


def sources(some: Sequence[Case], capability: int, gpu: str) -> list[Source]:
    """What `compiled.prebuild` takes; of launches with the same code the first."""
    found: dict[str, Source] = {}
    with offline(capability):
        for x in some:
            for one in variants.variants(x):
                if one.role == "peer":
                    continue
                arguments = {"op": x.op, "params": dict(x.params), "variant": one.name}
                for place, launch in enumerate(launches(**arguments)):
                    found.setdefault(code_of(launch), (f"{__name__}:launches", arguments | {"places": [place]}))
    return list(found.values())


def launches(op: str, params: Mapping[str, Any], variant: str, places: Sequence[int] | None = None) -> list[Launch]:
    """What a call of a variant launches; a variant that is searched, all that it tries. places: those alone."""
    x = Case(op, params)
    [one] = [one for one in variants.variants(x) if one.name == variant]
    found = launched(one.prepare(x, "meta", 1, 0).calls[0])
    return found if places is None else [found[place] for place in places]
