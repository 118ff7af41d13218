"""Compile fetched CUDA files, and one of the lab's own that calls them, to a library: once, and kept in a cache.

`LABKIT_BUILT` moves the cache. A machine without nvcc takes a library that was built elsewhere and copied there.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from labkit import host
from labkit.sources.catalogue import Source, cached, folder, is_fetched
from labkit.sources.fetching import problems
from labkit.sources.loading import NotFetched

_STUB = 'void stub_{i}(void) __asm__("{name}");\nvoid stub_{i}(void) {{ refuse("{name}"); }}\n'
_STUBS = """#include <stdio.h>
#include <stdlib.h>
static void refuse(const char *name) {{ fprintf(stderr, "not built, but called: %s\\n", name); abort(); }}
{stubs}"""


class NotBuilt(RuntimeError):
    """A library that is not there and cannot be built here; says why."""


@dataclass(frozen=True)
class Recipe:
    """What a library is made of.

    made:    a source whose files are needed. units: paths of those that are compiled, those that take long first.
    own:     a file of the lab's, compiled with them, and its SHA-256: whoever hashes what runs has it at hand.
    includes: folders of the source.
    headers: name -> text, of headers that the source's own build would write.
    flags:   of nvcc when it compiles. link: when it links.
    stubs:   what is left out on purpose, a pattern of symbols; such a symbol is defined as a function that ends the
             process, and says which it is.
    needs:   sources whose headers are included: checked, and part of the key, as `made` is.
    """

    made: Source
    units: Sequence[str]
    own: Path
    own_sha: str
    includes: Sequence[str]
    headers: Mapping[str, str]
    flags: Sequence[str]
    stubs: str
    needs: Sequence[Source] = ()
    link: Sequence[str] = ()

    @property
    def sources(self) -> Sequence[Source]:
        """All that it takes files of."""
        return [self.made, *self.needs]

    def key(self) -> str:
        """12 hexadecimal digits of all this, wherever it lies."""
        parts = [*(one.sha for one in self.sources), *self.units, self.own_sha, *self.includes, *self.flags, self.stubs]
        parts += self.link
        return hashlib.sha256("\n".join([*parts, *map(str, self.headers.items())]).encode()).hexdigest()[:12]


def library(recipe: Recipe, capability: int) -> Path:
    """The library of a recipe for GPUs of a compute capability, 90 for 9.0; built where it is not there.

    Raises `NotFetched`, or `NotBuilt`: without nvcc, if a file was changed, does not compile, or the disk is full.
    Whatever stops it, no part of a library is left behind.
    """
    stem, nvcc = f"{recipe.made.name}-{recipe.key()}-sm_{capability}", _nvcc()
    found = kept() / f"{stem}-cuda{_release(nvcc)}.so" if nvcc else max(kept().glob(f"{stem}-*.so"), default=None)
    if found and found.exists():
        return found
    if missing := [one for one in recipe.sources if not is_fetched(one)]:
        raise NotFetched(f"not fetched: labkit fetch {missing[0].package}")
    if not nvcc:
        raise NotBuilt("not built: needs nvcc")
    if wrong := [line for one in recipe.sources for line in problems(one, folder(one))]:
        raise NotBuilt(f"not built: {wrong[0]}. Fetch it again.")
    if (sha := hashlib.sha256(recipe.own.read_bytes()).hexdigest()) != recipe.own_sha:
        raise NotBuilt(f"not built: {recipe.own.name} has SHA-256 {sha}; allowed: {recipe.own_sha}")
    try:
        kept().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{stem}-", dir=kept()) as scratch:
            _build(recipe, capability, nvcc, Path(scratch)).rename(found)
    except OSError as error:
        raise NotBuilt(f"not built: {kept()}: {error.strerror or error}") from error
    return found


def kept() -> Path:
    """Where libraries are kept."""
    return cached("LABKIT_BUILT", "built")


def compile_unit(recipe: Recipe, capability: int, nvcc: str, unit: Path, scratch: Path) -> Path:
    """One object file. unit: a file of the source's folder, or another. Raises NotBuilt with the first error."""
    out = scratch / f"{unit.name}.o"
    root = folder(recipe.made)
    includes = [f"-I{path}" for path in (scratch, *(root / one for one in recipe.includes))]
    target = f"-gencode=arch=compute_{capability},code=sm_{capability}"
    _run([nvcc, *recipe.flags, target, "-Xcompiler=-fPIC", *includes, "-c", str(unit), "-o", str(out)])
    return out


def prepare(recipe: Recipe, scratch: Path) -> None:
    """Write what compiling needs beside the source: its headers, and cuBLAS's, which may lie in a package of torch's.

    Of that package no other header is seen, since nvcc brings its own, perhaps of another release.
    """
    for name, text in recipe.headers.items():
        (scratch / name).write_text(text)
    packages = (header for place in sys.path for header in Path(place).glob("nvidia/*/include/cublas*.h"))
    for header in packages:
        if not (scratch / header.name).exists():
            (scratch / header.name).symlink_to(header.resolve())


def _build(recipe: Recipe, capability: int, nvcc: str, scratch: Path) -> Path:
    prepare(recipe, scratch)
    units = [folder(recipe.made) / unit for unit in recipe.units]
    objects = [compile_unit(recipe, capability, nvcc, recipe.own, scratch)]  # alone, since it soon says what is missing
    with ThreadPoolExecutor(host.cores()) as pool:
        objects += pool.map(lambda unit: compile_unit(recipe, capability, nvcc, unit, scratch), units)
    out = scratch / "library.so"
    stubs = write_stubs(objects, recipe.stubs, scratch)
    _run([nvcc, "-shared", "-Xcompiler=-fPIC", *recipe.link, *map(str, objects), str(stubs), "-o", str(out)])
    return out


def write_stubs(objects: Sequence[Path], pattern: str, scratch: Path) -> Path:
    """A C file that defines the symbols of a pattern that some object asks for, and none has."""
    missing = sorted(name for name in _missing(objects) if re.search(pattern, name))
    text = _STUBS.format(stubs="".join(_STUB.format(i=i, name=name) for i, name in enumerate(missing)))
    (scratch / "stubs.c").write_text(text)
    return scratch / "stubs.c"


def _missing(objects: Sequence[Path]) -> set[str]:
    """Symbols that some object asks for, and none has."""
    lines = [line.split() for line in _run(["nm", *map(str, objects)]).splitlines()]
    asked = {line[1] for line in lines if len(line) == 2 and line[0] == "U"}
    return asked - {line[2] for line in lines if len(line) == 3}


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")


def _release(nvcc: str) -> str:
    found = re.search(r"release ([\d.]+)", _run([nvcc, "--version"]))
    return found[1] if found else "unknown"


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines() or [f"{command[0]} failed"]
        raise NotBuilt(f"not built: {next((line for line in lines if 'error' in line), lines[-1]).strip()}")
    return done.stdout
