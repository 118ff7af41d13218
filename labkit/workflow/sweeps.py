"""A sweep: notebooks × parameter sets, as a YAML file says them; every set is checked before anything runs."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from labkit import registry
from labkit.sweep import added
from labkit.workflow import jobs, nearest, notebooks
from labkit.workflow.nearest import meant

EXAMPLE = "jobs: [{notebooks: [state_layout], sets: [{batches: [1, 64]}]}]"


def read(path: Path) -> list[jobs.Job]:
    """The jobs of a sweep file, in its order.

    The file holds `jobs`, a list of groups. Of each group `notebooks` (names, notebooks or numbers) × `sets` (parameter
    names and values; by default one empty set) are jobs; `minutes`, of a group or of the file, is the most that one may
    take. UsageError naming the file, the place, the value and what is allowed.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as problem:
        raise notebooks.UsageError(f"{path}: {problem.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise notebooks.UsageError(f"{path}: not YAML ({' '.join(str(problem).split())})") from None
    try:
        _check_keys("the file", content, {"jobs": list, "minutes": (int, float)})
        made = [job for place, group in _numbered("jobs", content) for job in _group(place, group, content)]
        if not made:
            raise notebooks.UsageError(f"holds no jobs; for example: {EXAMPLE}")
        _check_names(made)
    except notebooks.UsageError as wrong:
        raise notebooks.UsageError(f"{path}: {wrong}") from None
    return made


def _numbered(name: str, within: Mapping[str, Any], default: Sequence[Any] = ()) -> Iterator[tuple[str, Any]]:
    for index, item in enumerate(within.get(name, default)):
        yield f"{name}[{index}]", item


def _check_keys(where: str, found: Any, allowed: Mapping[str, Any]) -> None:
    if not isinstance(found, dict):
        raise notebooks.UsageError(f"{where} is {found!r}; allowed: a mapping with {', '.join(allowed)}")
    for name, value in found.items():
        if name not in allowed:
            near = meant(str(name), allowed)
            raise notebooks.UsageError(f"{where} has {name!r}; allowed: {', '.join(allowed)}{near}")
        if not isinstance(value, allowed[name]) or isinstance(value, bool):
            kinds = "a list" if allowed[name] is list else "a number"
            raise notebooks.UsageError(f"{where}: {name} is {value!r}; allowed: {kinds}")


def _group(place: str, group: Any, file: Mapping[str, Any]) -> Iterator[jobs.Job]:
    _check_keys(place, group, {"notebooks": list, "sets": list, "minutes": (int, float)})
    minutes = group.get("minutes", file.get("minutes", notebooks.MINUTES))
    if not (minutes > 0 and math.isfinite(minutes)):
        raise notebooks.UsageError(f"{place}: minutes is {minutes!r}; allowed: a number above 0")
    if not group.get("notebooks"):
        raise notebooks.UsageError(f"{place} names no notebooks; allowed: {', '.join(registry.NOTEBOOKS)}")
    for text in group["notebooks"]:
        name = nearest.study(str(text))
        if name is None:
            near = meant(str(text), registry.NOTEBOOKS)
            raise notebooks.UsageError(
                f"{place}: notebook {text!r} is unknown; allowed: {', '.join(registry.NOTEBOOKS)}{near}"
            )
        for where, values in _numbered("sets", group, [{}]):
            try:
                yield jobs.Job(name, _typed(name, values), float(minutes))
            except notebooks.UsageError as wrong:
                raise notebooks.UsageError(f"{place}.{where}: {wrong}") from None


def _typed(name: str, values: Any) -> dict[str, Any]:
    """The parameters of a set, each of its notebook's type and allowed by its study."""
    if not isinstance(values, dict):
        raise notebooks.UsageError(f"is {values!r}; allowed: a mapping of parameters")
    known = notebooks.parameters(notebooks.source_path(name))
    for parameter in values:
        if parameter not in known:
            near = meant(str(parameter), known)
            raise notebooks.UsageError(f"{name} has no parameter {parameter!r}; it has: {', '.join(known)}{near}")
    found = {parameter: _value(known[parameter], value) for parameter, value in values.items()}
    if added.PARAMETER in found:  # the notebook runs in a folder of its own
        found[added.PARAMETER] = [added.absolute(text) for text in found[added.PARAMETER]]
    notebooks.check(registry.load(name), found)
    return found


def _value(parameter: notebooks.Parameter, value: Any) -> Any:
    """A value as YAML has it, if it is of the parameter's type: no text for a number, no number for a list."""
    many = parameter.type.startswith("list")
    kinds = {"str": str, "bool": bool}
    fits = isinstance(value, list) if many else isinstance(value, kinds.get(parameter.type, (int, float)))
    if not fits or (isinstance(value, bool) and parameter.type != "bool"):
        raise notebooks.wrong_type(parameter, value)
    return value if parameter.type == "str" else notebooks.parse(parameter, json.dumps(value))


def _check_names(made: Sequence[jobs.Job]) -> None:
    """UsageError if two jobs would write the same page: parameters that change nothing shown do not tell them apart."""
    seen: dict[str, jobs.Job] = {}
    for job in made:
        if other := seen.get(job.name):
            sets = f"{dict(other.values)} and {dict(job.values)}"
            raise notebooks.UsageError(f"two jobs are {job.name}: {sets}; one of them is enough")
        seen[job.name] = job
