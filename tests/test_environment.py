"""pyproject.toml, requirements.lock, environment.yml and the tools around them name the same environment."""

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())

LOCK_LINES = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
LOCK = {canonicalize_name(Requirement(line).name): Requirement(line) for line in LOCK_LINES}
CORE = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
EXTRA = [Requirement(line) for line in PROJECT["project"]["optional-dependencies"]["test"]]
CLUSTER = [Requirement(line) for line in PROJECT["project"]["optional-dependencies"]["cluster"]]
DIRECT = {canonicalize_name(requirement.name): requirement for requirement in CORE + EXTRA + CLUSTER}

# What a CUDA build of torch needs beside Triton: it names the versions itself, so the lock leaves them out.
LEFT_OUT = re.compile(r"(nvidia|cuda)-(?!ml-py$)")

TORCH_TRITON = {"2.11.0": "3.6.0", "2.13.0": "3.7.1"}  # the pairs that are tried
SPELLED_OUT = {"jupyterlab", "torch", "triton", "matplotlib", "pandas", "nbmake", "papermill"}


def pinned(name: str) -> str:
    """The version of a package in the lock."""
    (specifier,) = LOCK[name].specifier
    return specifier.version


def test_lock_has_one_exact_public_version_a_package():
    assert len(LOCK) == len(LOCK_LINES)
    loose = [line for line in LOCK_LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*( ; .+)?", line)]
    assert not loose, "no ranges, local versions, hashes, options or addresses"


@pytest.mark.parametrize("name", DIRECT)
def test_direct_dependency_is_pinned_within_its_range(name):
    assert name in LOCK, f"{name} is missing in requirements.lock: make lock"
    assert DIRECT[name].specifier.contains(pinned(name))


@pytest.mark.parametrize("system", ["linux", "darwin"])
@pytest.mark.parametrize("name", DIRECT)
def test_pin_applies_where_the_dependency_does(name, system):
    where = {"sys_platform": system, "os_name": "posix", "python_full_version": "3.12.0", "python_version": "3.12"}
    applies = [r.marker is None or r.marker.evaluate(where) for r in (DIRECT[name], LOCK[name])]
    assert applies == [name != "triton" or system == "linux"] * 2


def test_lock_is_complete():
    """Everything that a direct dependency brings along here is pinned too."""
    seen, queue = set(), list(DIRECT.values())
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        extras = {"", *requirement.extras}
        wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        if not wanted or (name, *sorted(extras)) in seen or LEFT_OUT.match(name):
            continue
        seen.add((name, *sorted(extras)))
        assert name in LOCK, f"{name} is missing in requirements.lock: make lock"
        queue += dependencies(name, extras)
    assert len({name for name, *_ in seen}) > 2 * len(DIRECT)


def dependencies(name: str, extras: set[str]) -> list[Requirement]:
    """What an installed package needs with these extras; nothing if it is not installed."""
    try:
        found = [Requirement(line) for line in requires(name) or []]
    except PackageNotFoundError:
        return []
    kept = [r for r in found if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)]
    for requirement in kept:
        requirement.marker = None  # holds, and may speak of the parent's extras
    return kept


def test_torch_and_triton_are_a_tried_pair():
    assert TORCH_TRITON[pinned("torch")] == pinned("triton")
    for torch, triton in TORCH_TRITON.items():
        assert DIRECT["torch"].specifier.contains(torch)
        assert DIRECT["triton"].specifier.contains(triton)


def test_lock_is_made_for_this_pair():
    wanted = PROJECT["tool"]["uv"]["constraint-dependencies"]
    assert wanted == [f"{name}=={pinned(name)}" for name in ("torch", "triton")]


def pip_section() -> list[str]:
    (section,) = [entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict)]
    return section


def test_conda_environment_installs_the_project_with_the_lock():
    assert ENVIRONMENT["name"] == PROJECT["project"]["name"]
    options = [line for line in pip_section() if line.startswith("-")]
    assert options == ["--constraint requirements.lock", "--editable .[test]"]


def test_conda_environment_spells_out_the_locked_versions():
    named = [Requirement(line) for line in pip_section() if not line.startswith("-")]
    assert {requirement.name: str(requirement.specifier) for requirement in named} == {
        name: f"=={pinned(name)}" for name in SPELLED_OUT
    }
    assert all(
        requirement.url is None and str(requirement.marker) == str(LOCK[requirement.name].marker)
        for requirement in named
    )


def test_conda_python_is_one_that_is_allowed_and_tested():
    (python,) = [entry for entry in ENVIRONMENT["dependencies"] if str(entry).startswith("python")]
    name, version = python.split("=")
    assert name == "python"
    assert Requirement(f"python{PROJECT['project']['requires-python']}").specifier.contains(version)
    assert version in WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"]


def test_ci_calls_the_same_checks():
    steps = [step.get("run") for step in WORKFLOW["jobs"]["test"]["steps"]]
    assert ".ci/run" in steps
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("\nmake test")


def test_ci_installs_what_runs_on_a_cluster():
    assert "-m pip install --quiet -c requirements.lock -e '.[cluster]'" in (ROOT / "Makefile").read_text()


def test_the_container_is_built_of_what_is_here_and_its_report_is_run():
    """No container can be built by these tests; the workflow does."""
    lines = (ROOT / "Containerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    assert lines[-1] == 'CMD ["make", "report"]'
    assert (ROOT / ".containerignore").read_bytes() == (ROOT / ".dockerignore").read_bytes()
    workflow = yaml.safe_load((ROOT / ".github/workflows/container.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["build"]["steps"]]
    assert "docker build -f Containerfile -t labkit ." in steps
    assert "docker run --rm labkit" in steps


@pytest.mark.parametrize(("repository", "name"), [("ruff-pre-commit", "ruff"), ("nbstripout", "nbstripout")])
def test_pre_commit_has_the_locked_version(repository, name):
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (hook,) = [entry for entry in config["repos"] if entry["repo"].endswith(f"/{repository}")]
    assert Version(hook["rev"]) == Version(pinned(name))


# timed where they are installed; a study imports each in the one function that calls it
PEERS = {"flag_gems", "fla", "attn_gym", "gemlite", "liger_kernel"}


def imported(folder: str) -> dict[str, Path]:
    """Top-level modules that the Python files of a folder import, each with a file that does; not the standard ones."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            found |= {name.split(".")[0]: path for name in names}
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names | {"labkit", "tests"}}


@pytest.mark.parametrize(
    ("folder", "allowed"), [("labkit", CORE + CLUSTER), ("tests", CORE + EXTRA + CLUSTER)], ids=["labkit", "tests"]
)
def test_every_import_is_a_direct_dependency(folder, allowed):
    allowed = {canonicalize_name(requirement.name) for requirement in allowed}
    distributions = packages_distributions()
    local = {path.stem for path in (ROOT / folder).rglob("*.py")}
    modules = imported(folder)
    assert modules
    for name, path in modules.items():
        if name in PEERS and path.name == "peers.py":
            continue
        owners = {canonicalize_name(owner) for owner in distributions.get(name, [name])}
        assert name in local or owners & allowed, f"{path.name} imports {name}, of no direct dependency"


def test_package_carries_every_file_it_needs():
    """Code outside a package, and files of an unlisted kind, would be left out of an installed labkit."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["labkit"]
    for path in (ROOT / "labkit").rglob("*.*"):
        if path.suffix == ".py":
            assert (path.parent / "__init__.py").exists(), path
        elif path.is_file() and path.suffix != ".pyc":
            assert any(path.match(pattern) for pattern in patterns), path
