"""Rows of an older tree that launch what today's does: a kernel that is only written otherwise keeps its measurements.

The hash of a row (`bench.sha`) changes with what its sources say, even where they are compiled to the same
instructions. Here both trees are asked what they launch (`digests`), and rows of which that is the same get the present
hash. Kernels are compiled by the Triton that is installed, so only rows that were measured with its version are looked
at: two sources may be the same instructions by one version and not by another. What tensors hold is not compared, nor
what a call does on the host: of a change to either, measure again.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from labkit import host, paths
from labkit.bench import records
from labkit.bench.machine import Machine
from labkit.workflow import archive, digests, recorded

KEY = ["study", "op", "case", "variant", "kernel_sha"]
Asked = tuple[str, ...]  # the values of KEY


def restamp(revision: str) -> dict[Path, tuple[int, int]]:
    """Give rows of a git revision's sources the present hash where both launch the same; file -> restamped, left stale.

    ValueError for a revision that git does not have or that cannot say what it launches, or if all stale rows are of
    other versions of Triton than the one that is installed; RecordError for a file of data/ that cannot be used.
    """
    files = {path: records.read(path) for path in sorted(paths.DATA.glob("*/*.parquet"))}
    old = {path: recorded.stale(rows) for path, rows in files.items()}
    known = {name for path, rows in files.items() for name in rows.loc[old[path], "triton"]}
    if known and version("triton") not in known:
        allowed = f"that of rows of an earlier kernel, {', '.join(sorted(known))}"
        raise ValueError(f"Triton is {version('triton')}; allowed: {allowed}")
    done = {}
    with tempfile.TemporaryDirectory() as folder:
        _check_out(revision, Path(folder))
        for path, rows in files.items():
            mine = old[path] & (rows["triton"] == version("triton"))
            present = _same(Path(folder), rows[mine], path.parent) if mine.any() else {}
            found = [present.get(key, key[-1]) for key in _keys(rows[mine])]
            changed = int((rows.loc[mine, "kernel_sha"] != found).sum())
            if changed:
                rows.loc[mine, "kernel_sha"] = found
                records.write(path, rows)
            done[path] = changed, int(old[path].sum()) - changed
    archive.write_readme()
    return done


def _keys(rows: pd.DataFrame) -> list[Asked]:
    return list(rows[KEY].itertuples(index=False, name=None))


def _same(tree: Path, rows: pd.DataFrame, machine: Path) -> dict[Asked, str]:
    """The present hash of those rows that the tree has with their hash, and launches as the present one does.

    machine: the folder of their machine's description.
    """
    wanted, gpu = sorted(set(_keys(rows))), archive.check_machine(machine)
    then = dict(zip(wanted, _answers(tree, wanted, gpu), strict=True))
    both = [key for key in wanted if then[key][1]]
    now = _answers(paths.ROOT, [(*key[:-1], "") for key in both], gpu)
    return {key: sha for key, (sha, digest) in zip(both, now, strict=True) if digest == then[key][1]}


def _check_out(revision: str, folder: Path) -> None:
    """The package as a revision has it."""
    file = folder / "labkit.tar"
    command = paths.git("archive", "--format=tar", "-o", str(file), f"{revision}^{{commit}}", "labkit")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"revision is {revision!r}; allowed: a commit that git has ({done.stderr.strip()})")
    with tarfile.open(file) as archived:
        archived.extractall(folder, filter="data")


def _answers(tree: Path, wanted: Sequence[Asked], gpu: Machine) -> list[tuple[str, str]]:
    """`digests.answer` of a tree, by as many processes as there are cores."""
    count = host.cores()
    parts = [wanted[first::count] for first in range(count)]
    found: dict[Asked, tuple[str, str]] = {}
    with ThreadPoolExecutor(count) as pool:
        for part, answers in zip(parts, pool.map(lambda part: _asked(tree, part, gpu), parts), strict=True):
            found |= zip(part, answers, strict=True)
    return [found[key] for key in wanted]


def _asked(tree: Path, wanted: Sequence[Asked], gpu: Machine) -> list[tuple[str, str]]:
    command = [sys.executable, "-P", digests.__file__, str(gpu.capability), gpu.name]
    places = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": places}
    done = subprocess.run(command, input=json.dumps(wanted), env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f"the tree in {tree} cannot say what it launches: its process ended with {done.returncode}")
    return [(sha, digest) for sha, digest in json.loads(done.stdout)]
