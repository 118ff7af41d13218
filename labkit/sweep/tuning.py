"""What the autotuners of others chose, kept with the run: later processes, and a run that goes on, take the same.

`labkit record` keeps it beside the rows, so that a run on another GPU of that name need not tune again: to tune takes
minutes, and near choices change places from run to run. Without the file in data/ it is tuned anew.

Each trial of a library that tunes itself calls `choose` in place of its first call. Only a measuring process keeps
choices: where several call side by side, to compile, what they time is no measure.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.bench import records

ENDING = ".tuning.json"  # of the files, runs/<gpu>/<name> and data/<gpu>/<name>: objects of objects
_file: Path | None = None  # of this process
_keeps = False


def keep_in(file: Path | None) -> None:
    """Keep choices in this file, and take those that it has, from now on in this process; None: no longer."""
    global _file, _keeps
    _file, _keeps = file, file is not None


def take_from(file: Path) -> None:
    """Take the choices that this file has, and keep none, from now on in this process."""
    global _file, _keeps
    _file, _keeps = file, False


def choose(tuners: Sequence[Any], case: str, call: Callable[[], Any]) -> None:
    """Call once, by which Triton's autotuners choose: what was chosen before in this case, if that is still on offer.

    case: what tells this choice from others: the case, and who is called. Of the same one, kernels that were called
    before keep their choice; what this run chose counts more than what is recorded.
    """
    name, kept = _name(case), _read(_file)
    before = kept.get(name, {})
    known = _read(paths.recorded(_file)).get(name, {}) if _file else {}
    with _only(tuners, known | before):
        call()
    if _file is not None and _keeps:
        chosen = {_kernel(one): str(next(iter(one.cache.values()))) for one in tuners if len(one.cache) == 1}
        kept[name] = before | chosen
        records.write_atomic(_file, json.dumps(kept, indent=1, sort_keys=True).encode())


def _read(file: Path | None) -> dict[str, dict[str, str]]:
    """Case -> kernel -> configuration; nothing where the file is none of ours."""
    try:
        found = json.loads(file.read_text()) if file else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _name(case: str) -> str:
    """With the version of what compiles: of another one the best may be another."""
    triton = sys.modules.get("triton")
    return f"Triton {getattr(triton, '__version__', '?')}: {case}"


def _kernel(tuner: Any) -> str:
    """With the version of the package that it is from; the name of a fetched one's module has it."""
    module = tuner.base_fn.__module__
    return " ".join(filter(None, [f"{module}.{tuner.base_fn.__qualname__}", _version(module.partition(".")[0])]))


@cache
def _version(package: str) -> str:
    """Of a package that is installed; else nothing."""
    return ", ".join(sorted({metadata.version(name) for name in metadata.packages_distributions().get(package, ())}))


@contextmanager
def _only(tuners: Sequence[Any], known: Mapping[str, str]) -> Iterator[None]:
    """Have the tuners try only the configuration that is known of them, where it is still on offer."""
    fixed = []
    for one in tuners:
        kept = [config for config in one.configs if str(config) == known.get(_kernel(one))]
        if kept:
            one.prune_configs = lambda kwargs, kept=kept: kept
            fixed.append(one)
    try:
        yield
    finally:
        for one in fixed:
            del one.prune_configs
