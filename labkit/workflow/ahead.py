"""While one study is measured, the kernels of the next ones are compiled, away from the GPU and from two of the cores.

Not beside a study that times what the host does: there the cores are part of what is timed.

First of all, choices that data/ has of such a GPU are taken, so that the kernels which these name are compiled alone.
Before anything is timed, what others' calls compile is compiled for all studies at once: those need the GPU, and all
cores. So is all that a quick look needs, else what the first study does; what the index says of the recorded rows is
made then, too.
"""

import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from labkit import host, isolated, paths, registry
from labkit.bench.spec import Case, Study
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
        self._busy, self._compiled, self._halt, self._begun = False, set[str](), _Halt(stop), ""
        self._quick = all(map(notebooks.is_quick, (values.get(name, {}) for name in order if name != notebooks.FIRST)))
        self._marks = tempfile.TemporaryDirectory(prefix="labkit-")  # removed with this
        os.environ[prepared.FOLDER] = self._marks.name  # the processes of the run inherit it

    def begin(self, name: str, gpu: lease.Gpu) -> threading.Thread | None:
        """A study begins to be measured: those that have not begun are compiled beside it, one after the other.

        What still compiles then is stopped if the study times the host. Returns at once. Beside the one that is
        measured first, and alone, others' calls are made; what measures waits for their end (`prepared.alone`).
        """
        host = times_host(name, self._values.get(name, {}))
        if not self._begun:
            self._take_over(gpu)
        with self._lock:
            self._left, self._begun = [one for one in self._left if one != name], name
        calls = {one: self._calls(one, gpu) for one in self._left} if name == notebooks.FIRST else {}
        if any(calls.values()) or (calls and self._quick):
            return self._warm_up(calls, gpu, host)
        return self._stop_compiling() if host else self._go_on(gpu)

    def _take_over(self, gpu: lease.Gpu) -> None:
        """What studies would choose by is in data/: the kernels of what they choose are compiled then, no others."""
        early = {}
        for name in self._left:
            recorded = (paths.DATA / slug(gpu.name) / f"{name}.parquet").exists()
            if name != notebooks.FIRST and recorded and registry.load(name).settle:
                study, cases = self._cases(name)
                early[name] = [case.id for case in cases if study.early(case)]
        if wanted := [(name, keys) for name, keys in early.items() if keys]:
            with suppress(isolated.IsolatedError):  # each study tries again
                arguments = ("labkit.sweep.run:take_over", wanted)
                isolated.call(*arguments, env=lease.environment(gpu), stop=self._stop, on_line=lambda line: None)

    def _warm_up(self, calls: Mapping[str, Sequence[run.Call]], gpu: lease.Gpu, host: bool) -> threading.Thread:
        """Make once the calls of others that any study of the run will time, and compile kernels beside them."""
        compiling, held = self._go_on(gpu, one=True), threading.Event()
        thread = threading.Thread(target=self._make, args=(calls, gpu, compiling, host, held), daemon=True)
        thread.start()
        held.wait()
        return thread

    def _make(
        self,
        calls: Mapping[str, Sequence[run.Call]],
        gpu: lease.Gpu,
        compiling: threading.Thread | None,
        host: bool,
        held: threading.Event,
    ) -> None:
        """Make the calls of each study; of a quick look, wait for what compiles too, which is little.

        held: is set once nothing is timed beside them. host: whether nothing is to be compiled beside what comes then.
        """
        every, judging = [call for some in calls.values() for call in some], _Halt(self._stop)
        with prepared.alone(prepared.CALLS):
            held.set()
            threading.Thread(target=self._judge, args=(judging,), daemon=True).start()
            with suppress(isolated.IsolatedError):
                if every:
                    run.call_all(every, lease.environment(gpu), _Halt(self._stop))
            for name in filter(calls.get, calls):  # the others make theirs, should they need any
                prepared.mark(name, prepared.CALLS)
            if compiling and self._quick:
                compiling.join()
            if host:
                judging.set()
                self._stop_compiling()

    def _judge(self, halt: "_Halt") -> None:
        """Make what the index will say of the recorded rows, so that it need not be waited for at the end."""
        with suppress(isolated.IsolatedError):
            isolated.call(
                "labkit.workflow.reports:judge_recorded",
                env={lease.VISIBLE: ""},
                stop=halt,
                on_line=lambda line: None,
            )

    def _stop_compiling(self) -> None:
        with self._lock:
            self._halt.set()

    def _calls(self, name: str, gpu: lease.Gpu) -> list[run.Call]:
        study, cases, _ = self._left_of(name, gpu)
        return run.calls_of(study, cases)

    def _cases(self, name: str) -> tuple[Study, list[Case]]:
        study, asked = quick.asked(name, self._values.get(name, {}))
        return study, study.cases(asked)

    def _left_of(self, name: str, gpu: lease.Gpu) -> tuple[Study, list[Case], bool]:
        """A study, those of its cases of which no row is there, and whether these are all but early ones."""
        study, cases = self._cases(name)
        file = paths.RUNS / slug(gpu.name) / f"{name}.parquet"
        have = filters.keys_of(file) if file.exists() else set()
        left = [case for case in cases if case.id not in have]
        return study, left, all(map(study.early, (case for case in cases if case.id in have)))

    def _go_on(self, gpu: lease.Gpu, one: bool = False) -> threading.Thread | None:
        """Compile what is left, or only what is next, unless that is being done, or there are too few cores."""
        with self._lock:
            if self._busy or host.cores() <= SPARED:
                return None
            self._busy, self._halt = True, _Halt(self._stop)
        thread = threading.Thread(target=self._compile_all, args=(gpu, self._halt, one), daemon=True)
        thread.start()
        return thread

    def _compile_all(self, gpu: lease.Gpu, halt: "_Halt", one: bool) -> None:
        while names := self._next(halt):
            if not self._compile(names, gpu, halt) and halt.is_set():
                self._compiled.difference_update(names)  # stopped, not ended: they come again
            if one:
                halt.set()

    def _next(self, halt: "_Halt") -> list[str]:
        """The first that has neither been measured nor compiled, of a quick look all; none once that is to end."""
        with self._lock:
            some = [] if halt.is_set() or not self._begun else [self._begun, *self._left]
            left = [one for one in some if one not in {*self._compiled, notebooks.FIRST}]
            names = left if self._quick else left[:1]
            self._busy = bool(names)
            self._compiled.update(names)
            return names

    def _compile(self, names: Sequence[str], gpu: lease.Gpu, halt: "_Halt") -> bool:
        """Compile what these studies need; whether that has come to its end."""
        if not (capability := lease.capability(gpu)):
            return True
        left = {name: self._left_of(name, gpu) for name in names}
        left = {name: found for name, found in left.items() if found[0].kernels and found[1]}
        tiny = {name: self._tiny(name) for name in left}
        # A study that has begun compiles what it times itself, and runs its tiny cases after that.
        some = {name: [] if name == self._begun else cases for name, (_, cases, _) in left.items()}
        wanted = [(name, [one.id for one in (*cases, *tiny[name])]) for name, cases in some.items()]
        wanted = [(name, keys) for name, keys in wanted if keys]
        if not wanted:
            return True
        env = {lease.VISIBLE: "", "TRITON_INTERPRET": None}
        arguments = ("labkit.sweep.run:compile_apart", wanted, capability, gpu.name, SPARED)
        with suppress(isolated.IsolatedError):  # what is wrong is said when the study is measured, and compiles it
            isolated.call(*arguments, env=env, stop=halt, on_line=lambda line: None)
            for name, (study, cases, whole) in left.items():
                if tiny[name]:
                    prepared.mark(name, prepared.tiny(slug(gpu.name)))
                # Rows of earlier sources are measured again; and early cases say which kernels the others need.
                if some[name] and whole and not (study.settle and any(map(study.early, cases))):
                    prepared.mark(name, prepared.kernels(slug(gpu.name)))
            return True
        return False

    def _tiny(self, name: str) -> Sequence[Case]:
        """The tiny cases that a study runs before it is measured; a quick look runs none."""
        return () if notebooks.is_quick(self._values.get(name, {})) else registry.load(name).tiny


def times_host(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the host's pace is part of what a study times."""
    study, asked = quick.asked(name, values)
    return any(one.mode == "eager" for case in study.cases(asked) for one in study.variants(case))
