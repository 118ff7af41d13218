"""The lab as one archive for a machine without network: its files, wheels, fetched sources, and one command to run."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from labkit import paths, sources
from labkit.bench import machine
from labkit.workflow import sweeps
from labkit.workflow.nearest import meant

PLATFORMS = {"linux_x86_64": "x86_64", "linux_aarch64": "aarch64"}
_GLIBC = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17")  # of manylinux wheels
_NAME = "labkit-bundle"
_FILES = ("labkit", "notebooks", "data", "pyproject.toml", "requirements.lock", "README.md", "LICENSE")


class BundleError(RuntimeError):
    """A bundle that could not be made; nothing of it is kept."""


def write(
    out: Path,
    python: str = "3.12",
    platform: str = "linux_x86_64",
    extras: Sequence[str] = (),
    sweep: Path | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Write the archive `out`, a .tar, for a Python and a platform.

    extras: of pyproject.toml, to be installed too. sweep: a sweep file, which is then what is run by default.
    ValueError (a UsageError for the sweep) for what is not allowed, before anything is fetched; BundleError naming the
    wheel or the source that could not be had.
    """
    needs = _needs(extras)
    if out.suffix != ".tar":
        raise ValueError(f"{out}: the archive's name must end in .tar (wheels are compressed as they are)")
    if sweep:
        sweeps.read(sweep)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        root = Path(scratch) / _NAME
        say("copying the lab")
        _copy_project(root / "project")
        (root / "needs.txt").write_text("".join(f"{line}\n" for line in needs))
        if sweep:
            shutil.copyfile(sweep, root / "sweep.yaml")
        script = root / "run"
        script.write_text(_SCRIPT.replace("@PYTHON@", python).replace("@REVISION@", machine.revision()))
        script.chmod(0o755)
        say(f"fetching wheels for Python {python} on {platform}")
        _download(root, python, platform)
        if blind := [wheel.name for wheel in (root / "wheels").glob("torch-*+cpu-*.whl")]:
            say(f"warning: {blind[0]}, which pip's index gave, cannot use a GPU: with it the lab measures nothing")
        say("fetching sources")
        _copy_sources(root / "sources")
        whole = Path(scratch) / out.name
        with tarfile.open(whole, "w") as archive:
            archive.add(root, _NAME, filter=_of_nobody)
        os.replace(whole, out)


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    return member.replace(uid=0, gid=0, uname="", gname="", deep=False)


def _needs(extras: Sequence[str]) -> list[str]:
    """What is to be installed, as pyproject.toml says it."""
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
    known = project.get("optional-dependencies", {})
    for name in extras:
        if name not in known:
            raise ValueError(f"no extra {name!r}; allowed: {', '.join(known)}{meant(name, known)}")
    return [*project["dependencies"], *(line for name in extras for line in known[name])]


def _copy_project(target: Path) -> None:
    """The tracked files as they are now; outside a checkout all that a run needs."""
    try:
        listed = subprocess.run(paths.git("ls-files", "-z"), capture_output=True, text=True, check=True)
        names = listed.stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        names = [str(path.relative_to(paths.ROOT)) for name in _FILES for path in _files(paths.ROOT / name)]
    for name in filter(None, names):
        if (paths.ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(paths.ROOT / name, target / name)


def _files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    return [one for one in found if "__pycache__" not in one.parts]


def _download(root: Path, python: str, platform: str) -> None:
    tags = [f"manylinux_{version}_{PLATFORMS[platform]}" for version in _GLIBC]
    abi = f"cp{python.replace('.', '')}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", f"--dest={root / 'wheels'}"]
    command += [f"--python-version={python}", "--implementation=cp", f"--abi={abi}", "--abi=abi3", "--abi=none"]
    command += [f"--platform={tag}" for tag in [*tags, platform]]
    command += [f"--constraint={paths.ROOT / 'requirements.lock'}", f"--requirement={root / 'needs.txt'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise BundleError(f"wheels for Python {python} on {platform}: pip: {' '.join(errors[:2]) or 'failed'}")


def _copy_sources(target: Path) -> None:
    """Those that are always fetched, and those on request that this machine has."""
    target.mkdir()
    for made in sources.manifest().values():
        if sources.is_fetched(made):
            shutil.copytree(sources.folder(made), target / made.name)
        elif not made.on_request:
            try:
                sources.fetch(made, target)
            except sources.SourceError as problem:
                raise BundleError(str(problem)) from None


_SCRIPT = """\
#!/bin/sh
# Measures on this machine, which needs no network, and writes results.tar.gz, which `labkit record` takes elsewhere.
#
# usage: ./run [what `labkit run` takes]     by default: --sweep sweep.yaml if there is one, else --source measure
#
# PYTHON names the interpreter, which must be Python @PYTHON@. A run that was stopped goes on where it was.
set -eu
cd "$(dirname "$0")"
here=$(pwd -P)
python=${PYTHON:-python@PYTHON@}
if ! "$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "@PYTHON@")' 2>/dev/null; then
    echo "Python @PYTHON@ is needed, and $python is not: PYTHON=/path/to/python@PYTHON@ ./run" >&2
    exit 2
fi
if [ ! -e venv/ready ]; then
    rm -rf venv
    "$python" -m venv venv
    venv/bin/python -m pip install --quiet --no-index --find-links wheels --requirement needs.txt
    touch venv/ready
fi
export PYTHONPATH="$here/project" LABKIT_SOURCES="$here/sources" LABKIT_REVISION='@REVISION@'
if [ "$#" -eq 0 ] && [ -e sweep.yaml ]; then set -- --sweep sweep.yaml; fi
if [ "$#" -eq 0 ]; then set -- --source measure; fi
status=0
venv/bin/python -m labkit run "$@" || status=$?
[ "$status" -ne 2 ] || exit 2 # wrong usage: nothing was run
venv/bin/python -m labkit record --pack results.tar.gz
exit "$status"
"""
