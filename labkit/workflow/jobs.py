"""Jobs: a study with one set of parameters each, measured in a folder of its own.

So jobs may run side by side, on the GPUs of one host or of many: they write no file in common, and a job that was
stopped goes on where it was. What a job has measured is in its file of rows; `collect` brings that into runs/.
"""

import fcntl
import hashlib
import json
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit import paths, registry
from labkit.bench import records
from labkit.kernels.tuned import slug
from labkit.sweep import added
from labkit.workflow import archive, filters, lease, notebooks, recorded
from labkit.workflow.progress import Progress

FOLDER = "jobs"  # in runs/
FAILED = "failed: "  # begins the line that says what a job failed of
_POLL_S = 1.0


class Taken(RuntimeError):
    """Another process runs this job just now."""


@dataclass(frozen=True)
class Job:
    """A study with its parameters.

    minutes: after which it is stopped, if it has not ended. place: the folder of its folder, if not in runs/.
    """

    study: str
    values: Mapping[str, Any]
    minutes: float = notebooks.MINUTES
    place: Path | None = None

    @property
    def name(self) -> str:
        """As its page is called: "01_state_layout--batches-7"."""
        return notebooks.executed_path(self.study, self.values).stem

    @property
    def folder(self) -> Path:
        """What the job measures, one folder a GPU; its definition, notebook and file of rows."""
        # An engine takes a comma for the end of a name.
        return (self.place or paths.RUNS / FOLDER) / self.name.replace(",", "+")

    @property
    def definition(self) -> Path:
        """What the job is, as JSON."""
        return self.folder / "job.json"

    @property
    def notebook(self) -> Path:
        """The executed notebook, of a job that failed too."""
        return self.folder / "notebook.ipynb"

    @property
    def executed(self) -> Path | None:
        """The notebook, if there is one; an engine may make an empty file of what a job calls its log."""
        return self.notebook if self.notebook.exists() and self.notebook.stat().st_size else None

    @property
    def rows(self) -> Path:
        """What was measured, as `labkit record` takes it, with the notebook; there once the job has ended well."""
        return self.folder / "rows.tar"

    def text(self) -> bytes:
        """Content of `definition`, with the notebook's hash: a changed notebook is to be run again."""
        notebook = hashlib.sha256(notebooks.source_path(self.study).read_bytes()).hexdigest()
        fields = {"study": self.study, "values": dict(self.values), "minutes": self.minutes, "notebook": notebook}
        return json.dumps(fields, indent=1).encode() + b"\n"


def load(definition: Path) -> Job:
    """The job of a definition.

    UsageError if it is none, of parameters that the notebook does not allow, or of another version of the notebook.
    """
    try:
        fields = json.loads(definition.read_text())
        job = Job(fields["study"], fields["values"], fields["minutes"], definition.resolve().parents[1])
        study = registry.load(job.study)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise notebooks.UsageError(f"{definition}: not the definition of a job ({problem})") from None
    notebooks.check(study, job.values)
    if definition.resolve() != job.definition:
        raise notebooks.UsageError(f"{definition}: is of the job {job.name}; allowed: {job.definition}")
    if definition.read_bytes() != job.text():
        raise notebooks.UsageError(f"{definition}: of another version of {job.study}'s notebook than this lab has")
    return job


def prepare(job: Job) -> None:
    """Write the job's definition if it is another, and then forget that the job was done."""
    if not job.definition.exists() or job.definition.read_bytes() != job.text():
        job.rows.unlink(missing_ok=True)
        records.write_atomic(job.definition, job.text())


def is_done(job: Job) -> bool:
    """Whether the job, as it is defined now, has ended well, with rows of the present kernels.

    One with functions of the reader's own never is: they may have changed.
    """
    if not (job.executed and job.rows.exists() and job.definition.exists()) or job.values.get(added.PARAMETER):
        return False
    if job.definition.read_bytes() != job.text():
        return False
    try:
        return not any(recorded.stale(records.read(path)).any() for path in _measured(job))
    except records.RecordError:
        return False


def measures(job: Job) -> bool:
    """Whether the job asks for a GPU, if there is one."""
    return notebooks.measures(job.study, job.values)


def plan(jobs: Sequence[Job], can_measure: bool) -> list[str]:
    """What would be run, a line a job: its parameters, and whether it measures, goes on or is done."""
    lines = []
    for job in jobs:
        how = "measures" if can_measure and measures(job) else "replays"
        begun = f", {len(_measured(job))} GPUs begun" if _measured(job) else ""
        text = filters.said(job.values) or "as its notebook has them"
        lines.append(f"{job.name}: {'done' if is_done(job) else f'{how}{begun}'}; {text}; at most {job.minutes:g} min")
    return lines


def failures(results: Sequence[notebooks.Result]) -> list[str]:
    """A line for each job that failed: which, why, and where to look."""
    return [
        f"{FAILED}{result.notebook}: {result.error}; {result.executed or 'no notebook was executed'}"
        for result in results
        if not result.ok
    ]


# Running one


def perform_when_free(
    job: Job, held: AbstractContextManager[lease.Gpu | None] | None, say: Callable[[str], None]
) -> notebooks.Result:
    """Run a job as `perform` does, after whoever runs it now: the engine's former try may not have ended yet."""
    told = False
    progress = Progress()
    progress.start([(job.name, job.name)])
    while True:
        try:
            return perform(job, held, progress=progress)
        except Taken as elsewhere:
            if not told:
                say(f"{elsewhere}; waiting for it")
            told = True
            time.sleep(_POLL_S)


def perform(
    job: Job,
    held: AbstractContextManager[lease.Gpu | None] | None = None,
    env: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
    progress: Progress | None = None,
) -> notebooks.Result:
    """Run a job to its end, unless it is done.

    held: the lease of the GPU that it measures on, taken once it is known that it must run. env: what else its process
    finds in the environment. stop: an event that ends it. Taken if another process runs it.
    """
    start = time.monotonic()
    stop, progress = stop or threading.Event(), progress or Progress()
    error = ""
    with _alone(job.folder):
        if not is_done(job):
            try:
                with held or nullcontext() as gpu:
                    error = _execute(job, gpu, dict(env or {}), stop, progress)
                    if not error and _measured(job):
                        archive.pack(job.rows, job.folder, job.study, [job.notebook])
            except (OSError, ValueError, RuntimeError) as problem:
                error = f"{type(problem).__name__}: {problem}"
    return notebooks.Result(job.study, job.name, time.monotonic() - start, job.executed, error)


def _execute(job: Job, gpu: lease.Gpu | None, env: dict[str, str], stop: threading.Event, progress: Progress) -> str:
    """The notebook, executed beside the job's rows; returns its error, or nothing."""
    if gpu:
        _take_ceilings(job, slug(gpu.name))
        env |= lease.environment(gpu) | {"LABKIT_RUNS": str(job.folder), "LABKIT_TABLES": str(job.folder)}
    if suffix := job.name.removeprefix(registry.NOTEBOOKS[job.study]):
        env["LABKIT_SUFFIX"] = suffix
    partial = job.folder / ".notebook.partial.ipynb"  # an earlier result stays until this one has ended
    timeout = 60 * job.minutes
    error = notebooks.attempt(job.study, job.values, partial, env, stop, progress, label=job.name, timeout=timeout)
    if stop.is_set():
        partial.unlink(missing_ok=True)
    elif partial.exists():
        os.replace(partial, job.notebook)
    return error


def _take_ceilings(job: Job, gpu: str) -> None:
    """Copy what this model of GPU can reach from where it was measured, as predictions and pages want it."""
    own = job.folder / gpu / f"{notebooks.FIRST}.parquet"
    places = (paths.RUNS / gpu, paths.RUNS / FOLDER / registry.NOTEBOOKS.get(notebooks.FIRST, "") / gpu)
    found = next((place / own.name for place in places if (place / own.name).exists()), None)
    if job.study != notebooks.FIRST and found and not own.exists():
        records.write_atomic(own, found.read_bytes())


def _measured(job: Job) -> list[Path]:
    return sorted(job.folder.glob(f"*/{job.study}.parquet"))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a job's folder. Taken if another process does; the lock goes with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Taken(f"{folder.name} is being run by another labkit") from None
        yield


# Bringing results together


def receive(job: Job, rows: Path) -> None:
    """Take a file of rows that a job wrote where no files are shared with this machine, and the notebook in it."""
    with tarfile.open(rows) as file:
        records.write_atomic(job.notebook, file.extractfile(job.notebook.name).read())
    os.replace(rows, job.rows)


def collect(job: Job) -> str:
    """Merge a job's rows into runs/, and put its notebook where pages are made; returns what went wrong, or nothing.

    Rows that were merged before are not merged again, unless they are gone: others may have measured the cases since.
    """
    try:
        if job.rows.exists():
            merged, digest = job.folder / ".merged", hashlib.sha256(job.rows.read_bytes()).hexdigest()
            there = all(
                filters.keys_of(path) <= filters.keys_of(paths.RUNS / path.parent.name / path.name)
                for path in _measured(job)
            )
            if not (there and merged.exists() and merged.read_text() == digest):
                archive.gather(job.rows)
                records.write_atomic(merged, digest.encode())
        if job.executed:
            page = notebooks.executed_path(job.study, job.values)
            if not page.exists() or page.read_bytes() != job.executed.read_bytes():
                records.write_atomic(page, job.executed.read_bytes())
    except (OSError, ValueError) as problem:  # a RecordError among them
        return f"{type(problem).__name__}: {problem}"
    return ""
