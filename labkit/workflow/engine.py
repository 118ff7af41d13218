"""Jobs beyond one machine: Snakemake submits them, one `labkit run --job` each, as a profile says for a cluster.

Snakemake only submits and watches. What a job is, that it runs once, where it goes on and whether it is done are said
by its folder (workflow/jobs.py), which must be on a file system that all nodes share, or travels through a storage.
"""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import yaml

from labkit import isolated, paths
from labkit.bench import records
from labkit.workflow import jobs, notebooks
from labkit.workflow.nearest import meant

PROFILES = Path(__file__).with_name("profiles")
_RULES = PROFILES / "jobs.smk"
_CANCEL_S = 60.0  # that Snakemake has to cancel what it submitted, on Ctrl-C
_QUIET_S = 20.0  # without a change, after which nobody is at work on a job
_WITHOUT = "on a cluster jobs are run by Snakemake 9, and {} is not installed: pip install 'labkit[cluster]'"


def profile(name: str) -> Path:
    """The folder of a profile, by the name of one that the lab has or by its path.

    UsageError naming what is allowed, or what is not installed.
    """
    known = {path.parent.name: path.parent for path in sorted(PROFILES.glob("*/config.yaml"))}
    folder = known.get(name) or Path(name)
    if not (folder / "config.yaml").is_file():
        raise notebooks.UsageError(
            f"--on {name!r}: no such profile; allowed: {', '.join(known)}, "
            f"or a folder with Snakemake's config.yaml{meant(name, known)}"
        )
    if find_spec("snakemake") is None:
        raise notebooks.UsageError(_WITHOUT.format("snakemake"))
    executor = _settings(folder).get("executor", "local")
    plugin = f"snakemake_executor_plugin_{executor.replace('-', '_')}"
    if executor not in ("local", "dryrun", "touch") and find_spec(plugin) is None:
        raise notebooks.UsageError(_WITHOUT.format(f"{folder}: executor {executor!r}"))
    return folder.resolve()


def check(wanted: Sequence[jobs.Job]) -> None:
    """UsageError naming a job that would measure nothing: the engine waits for rows."""
    for job in wanted:
        if not jobs.measures(job):
            source = notebooks.source_of(job.study, job.values)
            raise notebooks.UsageError(f"{job.name}: source is {source!r}; allowed on a cluster: auto, measure")


def _settings(folder: Path) -> dict:
    try:
        found = yaml.safe_load((folder / "config.yaml").read_text())
    except yaml.YAMLError as problem:
        raise notebooks.UsageError(f"{folder / 'config.yaml'}: not YAML ({' '.join(str(problem).split())})") from None
    if not isinstance(found, dict):
        raise notebooks.UsageError(f"{folder / 'config.yaml'}: is no mapping of Snakemake's options")
    return found


def run(wanted: Sequence[jobs.Job], profile: Path, at_once: int | None = None) -> list[notebooks.Result]:
    """Have a cluster run jobs; returns how each ended, in their order, with its rows and notebook brought here.

    at_once: how many are submitted at once (default: as the profile says). A job that is done is not run again. On an
    exception (Ctrl-C) what was submitted is cancelled first. OSError if another process does the same.
    """
    place = paths.RUNS / jobs.FOLDER
    place.mkdir(parents=True, exist_ok=True)
    with _only_engine(place) as lock:
        for job in wanted:
            jobs.prepare(job)
        missing = [job for job in wanted if not jobs.is_done(job)]
        for job in missing:
            for path in (job.rows, job.folder / "job.log", place / f"{job.folder.name}.tar"):
                path.unlink(missing_ok=True)
        if missing:
            storage = "default-storage-provider" in _settings(profile)
            _write_configuration(place, missing, storage)
            _submit(place, profile, at_once, lock)
            if storage:
                _receive(missing, place)
            else:
                _settle(missing)
    return [_result(job) for job in wanted]


def _write_configuration(place: Path, wanted: Sequence[jobs.Job], storage: bool) -> None:
    content = {
        "here": shlex.join([sys.executable, "-m", "labkit"]),
        "minutes": {job.folder.name: job.minutes for job in wanted},
        "first": [job.folder.name for job in wanted if job.study == notebooks.FIRST],
        "storage": storage,
    }
    records.write_atomic(place / "engine.json", json.dumps(content, indent=1).encode())


def _submit(place: Path, profile: Path, at_once: int | None, lock: IO[str]) -> None:
    """Run Snakemake until every job has ended, or was given up."""
    words = ["--snakefile", str(_RULES), "--directory", str(place), "--configfile", str(place / "engine.json")]
    words += ["--profile", str(profile), "--workflow-profile", "none", "--keep-going", "--rerun-incomplete"]
    # Of locks there is ours, which a dead process leaves.
    words += ["--nolock", "--rerun-triggers", "mtime", "--", "all"]
    if at_once:
        words = ["--jobs", str(at_once), *words]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "labkit.workflow.engine", str(os.getpid()), *words],
        env=isolated.environment({}),
        stdout=sys.stderr.fileno(),
        pass_fds=[lock.fileno()],
        start_new_session=True,  # Ctrl-C reaches this process only, which then ends the child
    )
    try:
        child.wait()  # which jobs failed is known from their folders
    except BaseException:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(_CANCEL_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        raise


@contextmanager
def _only_engine(place: Path) -> Iterator[IO[str]]:
    """Hold the folder of jobs; the lock is Snakemake's too. OSError if another process holds it."""
    with open(place / ".engine.lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"{place}: another labkit has jobs of this folder on a cluster just now") from None
        yield file


def _receive(some: Sequence[jobs.Job], place: Path) -> None:
    """Take the rows that a storage brought."""
    for job in some:
        if (brought := place / f"{job.folder.name}.tar").exists():
            jobs.receive(job, brought)


def _settle(some: Sequence[jobs.Job]) -> None:
    """Wait for jobs that have not said how they ended, as long as something changes in the folder of one.

    An engine that was killed leaves what it submitted, perhaps a job twice. The second, when it begins, takes away the
    rows of the first, on which Snakemake here has relied, and makes them anew.
    """
    seen, since = None, time.monotonic()
    while time.monotonic() - since < _QUIET_S:
        some = [job for job in some if not _said(job) and not jobs.is_done(job)]
        if not some:
            return
        files = sorted((str(path), path.stat().st_mtime_ns) for job in some for path in job.folder.glob("*"))
        if files != seen:
            seen, since = files, time.monotonic()
        time.sleep(0.5)


def _said(job: jobs.Job) -> str:
    """The line in which a job says how it failed, if it did."""
    return next((line for line in reversed(_last_words(job)) if line.startswith(jobs.FAILED)), "")


def _last_words(job: jobs.Job) -> list[str]:
    """What a job has printed; nothing of one that has only begun."""
    log = job.folder / "job.log"
    return log.read_text(errors="replace").splitlines() if log.exists() else []


def _result(job: jobs.Job) -> notebooks.Result:
    """How a job ended, by what is in its folder."""
    log = job.folder / "job.log"
    if jobs.is_done(job):
        return notebooks.Result(job.study, job.name, 0.0, job.executed, jobs.collect(job))
    jobs.collect(job)
    lines, said = _last_words(job), _said(job)
    error = said.removeprefix(f"{jobs.FAILED}{job.name}: ").rpartition("; ")[0]
    if not error:
        last = f"; its last line: {lines[-1]}" if lines else ""
        error = f"it did not end by itself (killed, cancelled, or never started){last}"
    return notebooks.Result(job.study, job.name, 0.0, (job.executed if said else None) or log, error)


def _main() -> None:
    isolated.die_with_parent(int(sys.argv[1]))
    from snakemake.cli import main

    main(sys.argv[2:])


if __name__ == "__main__":
    _main()
