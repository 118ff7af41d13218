"""What a run has prepared for a study before it is measured, so that the processes that measure do not do it again.

To find out that kernels are compiled takes a quarter of a minute: each is named, and looked up by a process that starts
for it. So the run marks it, in a folder that its processes know by their environment, the later ones too.

The folder also has locks of what nothing may be timed beside: processes that are to measure start while it goes on, and
wait for its end. A lock goes with the process that holds it.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "LABKIT_PREPARED"  # in the environment: the folder of the marks
CALLS = "calls"  # what libraries and releases offer was called once
_ALONE = ".alone"


def kernels(gpu: str) -> str:
    """What is marked once all kernels are compiled that a study's cases need on the GPU with this name of a folder."""
    return f"kernels.{gpu}"


def tiny(gpu: str) -> str:
    """The same of its tiny cases."""
    return f"tiny.{gpu}"


def mark(study: str, what: str) -> None:
    """Mark that something is prepared for a study. KeyError outside a run, which has no folder."""
    (Path(os.environ[FOLDER]) / f"{study}.{what}").touch()


def is_prepared(study: str, what: str) -> bool:
    """Whether the run that this process belongs to has marked it; False outside a run."""
    return in_run() and (Path(os.environ[FOLDER]) / f"{study}.{what}").exists()


def folder() -> Path | None:
    """The folder of the marks; None outside a run."""
    return Path(os.environ[FOLDER]) if in_run() else None


def in_run() -> bool:
    """Whether this process belongs to a run that marks what it has prepared."""
    return bool(os.environ.get(FOLDER))


@contextmanager
def alone(name: str) -> Iterator[None]:
    """While this is held no process of the run times anything, but those of the study of this name, if it is one."""
    if not in_run():
        yield
        return
    with open(Path(os.environ[FOLDER]) / f"{name}{_ALONE}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def await_others(study: str) -> None:
    """Wait until nothing is held (`alone`) but by this study; returns at once outside a run."""
    for path in sorted(Path(os.environ[FOLDER]).glob(f"*{_ALONE}")) if in_run() else ():
        if path.name != f"{study}{_ALONE}":
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_SH)
