"""What may be fetched: `sources.toml`, and where its files are kept."""

import hashlib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

MANIFEST = Path(__file__).with_name("sources.toml")


@dataclass(frozen=True)
class Source:
    """Files of one version of a package.

    files: path in its wheel, or below the one folder of its source distribution -> SHA-256.
    archive: SHA-256 of the source distribution; empty: it is taken from a wheel.
    on_request: why it is fetched only where it is named; empty: always.
    called: what it goes by where that is not its package: other files of a release, on which other rows depend.
    """

    package: str
    version: str
    licence: str
    home: str
    files: Mapping[str, str]
    archive: str = ""
    on_request: str = ""
    called: str = ""

    @property
    def name(self) -> str:
        """As variants and commands call it."""
        return f"{self.called or self.package}-{self.version}"

    @property
    def sha(self) -> str:
        """SHA-256 of package, version, and the hashes of its files: what a row's `kernel_sha` is made of.

        The archive around them does not count.
        """
        lines = [self.package, self.version, *(f"{path} {sha}" for path, sha in sorted(self.files.items()))]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@cache
def manifest() -> Mapping[str, Source]:
    """Name -> source, in the order of `sources.toml`: package by package, the earliest version first."""
    found = {}
    for called, entry in tomllib.loads(MANIFEST.read_text()).items():
        package, why = entry.get("package", called), entry.get("on_request", "")
        for version, files in entry["versions"].items():
            archive = entry.get("archives", {}).get(version, "")
            made = Source(package, version, entry["licence"], entry["home"], files, archive, why, called)
            found[made.name] = made
    return found


def source(name: str) -> Source:
    """The source of a name such as "sglang-0.5.9"; KeyError naming those that there are."""
    if name not in manifest():
        raise KeyError(f"unknown source {name!r}; known: {', '.join(manifest())}")
    return manifest()[name]


def named(names: Sequence[str]) -> list[Source]:
    """The sources of names of sources, or of packages, which stand for all of their versions.

    None: all of them but those on request.

    Raises ValueError for a name that is neither.
    """
    if not names:
        return [made for made in manifest().values() if not made.on_request]
    packages = {made.package for made in manifest().values()}
    for name in names:
        if name not in packages and name not in manifest():
            close = get_close_matches(name, [*packages, *manifest()], 1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"unknown source {name!r}{hint} Known: {', '.join([*sorted(packages), *manifest()])}")
    return [made for made in manifest().values() if made.name in names or made.package in names]


def folder(made: Source) -> Path:
    """Where a source's files are, once they are fetched: in `LABKIT_SOURCES`, or in the user's cache."""
    return cached("LABKIT_SOURCES", "sources") / made.name


def cached(variable: str, name: str) -> Path:
    """The folder that an environment variable names, or the one of this name in the user's cache."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(variable) or cache_home / "labkit" / name)


def is_fetched(made: Source) -> bool:
    """Whether all files of a source are there (`load` checks their hashes)."""
    return all((folder(made) / path).is_file() for path in made.files)
