"""While one study is measured, the kernels of the next ones are compiled, away from the GPU and from two of the cores.

Not beside a study that times what the host does: there the cores are part of what is timed.

Before anything is timed, what others' calls compile is compiled for all studies at once: those need the GPU.
"""

import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from labkit import isolated, paths
from labkit.kernels.tuned import slug
from labkit.sweep import prepared, run
from labkit.workflow import filters, lease, notebooks, quick

SPARED = 2  # cores that are left to the process that measures and to its notebook


class _Halt(threading.Event):
    """An event that ends what compiles. stop: another that ends it too, that of the run."""

    def __init__(self, stop: threading.Event):
        super().__init__()
        self._stop = stop

    def is_set(self) -> bool:
        return super().is_set() or self._stop.is_set()


class Ahead:
    """What is compiled ahead in one run. order: the studies to be measured; values: parameters of each."""

    def __init__(self, order: Sequence[str], values: Mapping[str, Mapping[str, Any]], stop: threading.Event):
        self._left, self._values, self._stop = list(order), values, stop
        self._lock = threading.Lock()
        self._busy, self._compiled, self._halt = False, set[str](), _Halt(stop)
        self._marks = tempfile.TemporaryDirectory(prefix="labkit-")  # removed with this
        os.environ[prepared.FOLDER] = self._marks.name  # the processes of the run inherit it

    def begin(self, name: str, gpu: lease.Gpu) -> threading.Thread | None:
        """A study begins to be measured: those that have not begun are compiled beside it, one after the other.

        What still compiles then is stopped if the study times the host. Returns at once. Beside the one that is
        measured first, and alone, others' calls are made; what measures waits for their end (`prepared.alone`).
        """
        host = times_host(name, self._values.get(name, {}))
        with self._lock:
            self._left = [one for one in self._left if one != name]
        calls = {one: self._calls(one, gpu) for one in self._left} if name == notebooks.FIRST else {}
        if any(calls.values()):
            return self._warm_up(calls, gpu, host)
        return self._stop_compiling() if host else self._go_on(gpu)

    def _warm_up(self, calls: Mapping[str, Sequence[isolated.Call]], gpu: lease.Gpu, host: bool) -> threading.Thread:
        """Make once the calls of others that any study of the run will time, and compile kernels beside them."""
        self._go_on(gpu)
        held = threading.Event()
        thread = threading.Thread(target=self._make, args=(calls, host, held), daemon=True)
        thread.start()
        held.wait()
        return thread

    def _make(self, calls: Mapping[str, Sequence[isolated.Call]], host: bool, held: threading.Event) -> None:
        """Make the calls of each study. held: is set once nothing is timed beside them; host: nor beside compiling."""
        every = [call for some in calls.values() for call in some]
        with prepared.alone(prepared.CALLS):
            held.set()
            with suppress(isolated.IsolatedError):
                isolated.call_many(every, min(len(every), len(cores()) or 1), _Halt(self._stop))
            for name in filter(calls.get, calls):  # the others make theirs, should they need any
                prepared.mark(name, prepared.CALLS)
            if host:
                self._stop_compiling()

    def _stop_compiling(self) -> None:
        with self._lock:
            self._halt.set()

    def _calls(self, name: str, gpu: lease.Gpu) -> list[isolated.Call]:
        """Of the cases of which no row is there."""
        study, asked = quick.asked(name, self._values.get(name, {}))
        file = paths.RUNS / slug(gpu.name) / f"{name}.parquet"
        have = filters.keys_of(file) if file.exists() else set()
        wanted = [case for case in study.cases(asked) if (case.op, case.key) not in have]
        return run.calls_of(study, wanted, lease.environment(gpu))

    def _go_on(self, gpu: lease.Gpu) -> threading.Thread | None:
        """Compile what is left, unless that is being done, or there are too few cores."""
        with self._lock:
            if self._busy or len(cores()) <= SPARED:
                return None
            self._busy, self._halt = True, _Halt(self._stop)
        thread = threading.Thread(target=self._compile_all, args=(gpu, self._halt), daemon=True)
        thread.start()
        return thread

    def _compile_all(self, gpu: lease.Gpu, halt: "_Halt") -> None:
        while name := self._next(halt):
            self._compile(name, gpu, halt)
            if halt.is_set():
                self._compiled.discard(name)

    def _next(self, halt: "_Halt") -> str:
        """The first that has neither begun nor been compiled; none once that is to end."""
        with self._lock:
            names = (
                [] if halt.is_set() else [one for one in self._left if one not in {*self._compiled, notebooks.FIRST}]
            )
            self._busy = bool(names)
            self._compiled.update(names[:1])
            return names[0] if names else ""

    def _compile(self, name: str, gpu: lease.Gpu, halt: "_Halt") -> None:
        capability, (study, asked) = lease.capability(gpu), quick.asked(name, self._values.get(name, {}))
        if not capability or study.kernels is None:
            return
        some = study.cases(asked)
        keys = [(case.op, case.key) for case in some]
        env = {lease.VISIBLE: "", "TRITON_INTERPRET": None}
        arguments = ("labkit.sweep.run:compile_apart", name, keys, capability, gpu.name, SPARED)
        with suppress(isolated.IsolatedError):  # what is wrong is said when the study is measured, and compiles it
            isolated.call(*arguments, env=env, stop=halt, on_line=lambda line: None)
            if not (study.settle and any(map(study.early, some))):  # else their rows say which others are needed
                prepared.mark(name, prepared.KERNELS)


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def times_host(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the host's pace is part of what a study times."""
    study, asked = quick.asked(name, values)
    return any(one.mode == "eager" for case in study.cases(asked) for one in study.variants(case))
