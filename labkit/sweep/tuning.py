"""What the autotuners of others chose, kept with the run: later processes, and a run that goes on, take the same.

Each trial of a library that tunes itself calls `choose` in place of its first call. Only a measuring process keeps or
takes choices: where several call side by side, to compile, what they time is no measure.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit.bench import records

_file: Path | None = None  # of this measuring process


def keep_in(file: Path | None) -> None:
    """Keep choices in this file, and take those that it has, from now on in this process; None: no longer."""
    global _file
    _file = file


def choose(tuners: Sequence[Any], case: str, call: Callable[[], Any]) -> None:
    """Call once, by which Triton's autotuners choose: what was chosen before in this case, if that is still on offer.

    case: what tells this choice from others: the case, and who is called. Of the same one, kernels that were called
    before keep their choice.
    """
    known = _read()
    before = known.get(_name(case), {})
    with _only(tuners, before):
        call()
    if _file is not None:
        chosen = {_kernel(one): str(next(iter(one.cache.values()))) for one in tuners if len(one.cache) == 1}
        known[_name(case)] = before | chosen
        records.write_atomic(_file, json.dumps(known, indent=1, sort_keys=True).encode())


def _read() -> dict[str, dict[str, str]]:
    """Case -> kernel -> configuration; nothing where the file is none of ours."""
    try:
        found = json.loads(_file.read_text()) if _file else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _name(case: str) -> str:
    """With the version of what compiles: of another one the best may be another."""
    triton = sys.modules.get("triton")
    return f"Triton {getattr(triton, '__version__', '?')}: {case}"


def _kernel(tuner: Any) -> str:
    return f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__}"


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
