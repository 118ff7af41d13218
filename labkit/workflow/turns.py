"""Which studies of a run have a GPU: leased for them, or by their own notebook once it needs one."""

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from labkit.sweep import prepared
from labkit.workflow import lease
from labkit.workflow.progress import Progress

_POLL_S = 0.2


class Turns:
    """The GPUs of a run. company: what is told of each study that begins to be measured, as `ahead.Ahead`.

    first: the study before which no notebook that leases its GPU itself is started; none if empty. order: of studies
    whose notebooks do so; each is started once those before it have asked for one, or the shortest might come first.
    """

    def __init__(
        self,
        gpus: Sequence[lease.Gpu],
        stop: threading.Event,
        progress: Progress,
        company: Any = None,
        first: str = "",
        order: Sequence[str] = (),
    ):
        self._gpus, self._stop, self._progress, self._company = gpus, stop, progress, company
        self._held: set[str] = set()  # studies that have one
        self._alone: dict[str, ExitStack] = {}  # what such a study holds
        self._order, self._asked = list(order), set[str]()
        self._first, self._started = first, threading.Event()
        if not first:
            self._started.set()

    @contextmanager
    def leased(self, study: str) -> Iterator[lease.Gpu]:
        """Hold a GPU for a study, whose notebook is started then, until that has ended."""
        self._asked.add(study)
        with lease.gpu_lease(self._gpus, stop=self._stop, say=functools.partial(self._waits, study)) as gpu:
            self._begin(study, gpu)
            yield gpu

    @contextmanager
    def alone(self, study: str) -> Iterator[lease.Gpu]:
        """The same for one beside which no other is timed, until its notebook says that all is measured."""
        with ExitStack() as held:
            self._alone[study] = held
            held.enter_context(prepared.alone(study))
            gpu = held.enter_context(self.leased(study))
            held.callback(prepared.await_others, study)  # others' calls need the GPU too
            yield gpu

    @contextmanager
    def awaited(self, study: str) -> Iterator[None]:
        """For a study whose notebook leases its GPU itself, and so can start before its turn."""
        before = self._order[: self._order.index(study)] if study in self._order else []
        while not (self._started.is_set() and self._asked.issuperset(before)) and not self._stop.wait(_POLL_S):
            pass
        yield

    def hear(self, study: str, line: str) -> None:
        """What a notebook prints that leases its GPU itself, or is measured alone."""
        if line.startswith((lease.WAITING, lease.TAKEN)):
            self._asked.add(study)
        if line.startswith(lease.WAITING):
            self._waits(study, line)
        elif line.startswith(lease.TAKEN) and study not in self._alone:
            name = line.removeprefix(lease.TAKEN)
            self._begin(study, next((gpu for gpu in self._gpus if gpu.id == name), lease.Gpu(-1, name, name)))
        elif line == lease.FREED:
            if study in self._alone:
                self._alone[study].close()
            self.end(study)

    def end(self, study: str) -> None:
        """A study has no GPU any longer, or will have none: its notebook has ended, however far it came."""
        self._held.discard(study)
        self._asked.add(study)
        self._go_after(study)

    def _begin(self, study: str, gpu: lease.Gpu) -> None:
        self._held.add(study)
        if self._company:
            self._company.begin(study, gpu)
        self._go_after(study)

    def _go_after(self, study: str) -> None:
        if study == self._first:
            self._started.set()

    def _waits(self, study: str, line: str) -> None:
        if len(self._held) < len(self._gpus):  # else it waits for another study of this run
            self._progress.note(study, line)
