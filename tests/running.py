"""`labkit` as a reader runs it, in a process of its own and a folder beside this tree."""

import os
import signal
import subprocess
import sys

from toy_lab import CODE

from labkit import paths, registry

PAGES = [f"{notebook}.html" for notebook in registry.NOTEBOOKS.values()]
RECORDED = [name for name in registry.NOTEBOOKS if paths.data_files(name, runs=False)]  # studies that have rows


def labkit(*words, **env):
    """`labkit WORDS` to its end; of the environment's variables, those given are set."""
    process = subprocess.Popen(
        [sys.executable, "-m", "labkit", *words],
        env={**os.environ, "PYTHONPATH": str(CODE), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=1200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def linked(root):
    """This tree's notebooks, data and cache in another folder, where reports and measurements then go."""
    paths.CACHE.mkdir(exist_ok=True)
    for folder in (paths.NOTEBOOKS, paths.DATA, paths.CACHE):
        (root / folder.name).symlink_to(folder)
    return {"LABKIT_ROOT": str(root)}
