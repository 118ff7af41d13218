"""Rows of an older tree that launch what today's does: a kernel that is only written otherwise keeps its measurements.

The hash of a row (`bench.sha`) changes with what its sources say, even where they are compiled to the same
instructions. Here both trees are asked what they launch (`digests`), compiled by the Triton that is installed, and rows
of which that is the same get the present hash. What tensors hold is not compared, nor what a call does on the host: of
a change to either, measure again.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

from labkit import paths
from labkit.bench import records
from labkit.workflow import archive, digests, recorded

KEY = ["study", "op", "case", "variant", "kernel_sha"]
Asked = tuple[str, ...]  # the values of KEY


def restamp(revision: str) -> dict[Path, tuple[int, int]]:
    """Give rows of a git revision's sources the present hash where both launch the same; file -> restamped, left stale.

    ValueError for a revision that git does not have; RecordError for a file of data/ that cannot be used.
    """
    files = {path: records.read(path) for path in sorted(paths.DATA.glob("*/*.parquet"))}
    files = {path: rows for path, rows in files.items() if "kernel_sha" in rows}
    old = {path: recorded.stale(rows) for path, rows in files.items()}
    wanted = {key for path, rows in files.items() for key in _keys(rows[old[path]])}
    present = _same(revision, sorted(wanted)) if wanted else {}
    done = {}
    for path, rows in files.items():
        found = [present.get(key, key[-1]) for key in _keys(rows)]
        changed = int((rows["kernel_sha"] != found).sum())
        if changed:
            records.write(path, rows.assign(kernel_sha=found))
        done[path] = changed, int(old[path].sum()) - changed
    archive.write_readme()
    return done


def _keys(rows: pd.DataFrame) -> list[Asked]:
    return list(rows[KEY].itertuples(index=False, name=None))


def _same(revision: str, wanted: Sequence[Asked]) -> dict[Asked, str]:
    """The present hash of those that the revision's tree has with their hash, and launches as the present one does."""
    with tempfile.TemporaryDirectory() as folder:
        _check_out(revision, Path(folder))
        then = dict(zip(wanted, _answers(Path(folder), wanted), strict=True))
    both = [key for key in wanted if then[key][1]]
    now = _answers(paths.ROOT, [(*key[:-1], "") for key in both])
    return {key: sha for key, (sha, digest) in zip(both, now, strict=True) if digest == then[key][1]}


def _check_out(revision: str, folder: Path) -> None:
    """The package as a revision has it."""
    file = folder / "labkit.tar"
    command = ["git", "-C", str(paths.ROOT), "archive", "--format=tar", "-o", str(file), f"{revision}^{{commit}}"]
    done = subprocess.run([*command, "labkit"], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"revision is {revision!r}; allowed: a commit that git has ({done.stderr.strip()})")
    with tarfile.open(file) as archived:
        archived.extractall(folder, filter="data")


def _answers(tree: Path, wanted: Sequence[Asked]) -> list[tuple[str, str]]:
    """`digests.answer` of a tree, by as many processes as there are cores."""
    count = os.cpu_count() or 1
    parts = [wanted[first::count] for first in range(count)]
    found: dict[Asked, tuple[str, str]] = {}
    with ThreadPoolExecutor(count) as pool:
        for part, answers in zip(parts, pool.map(lambda part: _asked(tree, part), parts), strict=True):
            found |= zip(part, answers, strict=True)
    return [found[key] for key in wanted]


def _asked(tree: Path, wanted: Sequence[Asked]) -> list[tuple[str, str]]:
    command = [sys.executable, "-P", digests.__file__]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        command, input=json.dumps(wanted), env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [(sha, digest) for sha, digest in json.loads(done.stdout)]
