"""What a run has prepared for a study before it is measured, so that the processes that measure do not do it again.

To find out that kernels are compiled takes a quarter of a minute: each is named, and looked up by a process that starts
for it. So the run marks it, in a folder that its processes know by their environment, the later ones too.
"""

import os
from pathlib import Path

FOLDER = "LABKIT_PREPARED"  # in the environment: the folder of the marks
KERNELS = "kernels"  # all that the study's cases need are compiled
CALLS = "calls"  # what libraries and releases offer was called once


def mark(study: str, what: str) -> None:
    """Mark that something is prepared for a study. KeyError outside a run, which has no folder."""
    (Path(os.environ[FOLDER]) / f"{study}.{what}").touch()


def is_prepared(study: str, what: str) -> bool:
    """Whether the run that this process belongs to has marked it; False outside a run."""
    folder = os.environ.get(FOLDER)
    return bool(folder) and (Path(folder) / f"{study}.{what}").exists()
