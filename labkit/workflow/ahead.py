"""While one study is measured, the kernels of the next one are compiled, away from the GPU and from two of the cores.

Not beside a study that times what the host does: there the cores are part of what is timed.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from labkit import isolated, registry
from labkit.workflow import lease, notebooks, quick
from labkit.workflow.filters import Key

SPARED = 2  # cores that are left to the process that measures and to its notebook


class Ahead:
    """What is compiled ahead in one run. order: the studies to be measured; values: parameters of each."""

    def __init__(self, order: Sequence[str], values: Mapping[str, Mapping[str, Any]], stop: threading.Event):
        self._left, self._values, self._stop = list(order), values, stop
        self._lock = threading.Lock()

    def begin(self, name: str, gpu: lease.Gpu) -> threading.Thread | None:
        """A study begins to be measured: the first of those that have not begun is compiled beside it."""
        with self._lock:
            self._left = [one for one in self._left if one != name]
            following = self._left[:1]
        if not following or len(cores()) <= SPARED or times_host(name, self._values.get(name, {})):
            return None
        thread = threading.Thread(target=self._compile, args=(following[0], gpu), daemon=True)
        thread.start()
        return thread

    def _compile(self, name: str, gpu: lease.Gpu) -> None:
        capability = lease.capability(gpu)
        if not capability or registry.load(name).kernels is None:
            return
        keys = cases(name, self._values.get(name, {}))
        env = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": None}
        arguments = ("labkit.sweep.run:compile_apart", name, keys, capability, SPARED)
        with suppress(isolated.IsolatedError):  # what is wrong is said when the study is measured, and compiles it
            isolated.call(*arguments, env=env, stop=self._stop, on_line=lambda line: None)


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def cases(name: str, values: Mapping[str, Any]) -> list[Key]:
    """What a notebook with these parameters measures."""
    study, asked = quick.asked(name, values)
    return [(case.op, case.key) for case in study.cases(asked)]


def times_host(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the host's pace is part of what a study times."""
    study = registry.load(name)
    asked = study.cases(notebooks.defaults(name) | dict(values))
    return any(one.mode == "eager" for case in asked for one in study.variants(case))
