"""Shared fixtures, and a loud line for every kind of test that this machine could not run."""

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from missing import NO_BROWSER, NO_CLUSTER, NO_DSL, NO_GPU, NO_NVCC, NO_SOURCES
from running import labkit, linked

from labkit import paths

# Kernels run on the GPU where there is one, else in Triton's interpreter. A process is either interpreted or not, from
# its first import on; so without a GPU tests/kernels is left out of an ordinary run, in which test_kernels.py runs it
# in an interpreted process, and fails if that runs nothing.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
collect_ignore_glob = [] if INTERPRETED or KERNEL_DEVICE == "cuda" else ["kernels/*.py"]

LONGEST = ("test_kernels.py", "test_end_to_end.py", "test_cluster.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU, and puts first what takes longest, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


# What a reader keeps in the tree, and no test may touch.
KEPT = ("data", "figures", "notebooks", "reports", "runs")
ROOT = Path(__file__).resolve().parents[1]


def _kept() -> dict[Path, tuple[int, int]]:
    """Every file of these folders, with its size and the time of its last change."""
    files = (path for name in KEPT for path in (ROOT / name).rglob("*") if path.is_file())
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # of several processes, the one that starts the others
        session.config.kept = _kept()


def pytest_sessionfinish(session: pytest.Session) -> None:
    before = getattr(session.config, "kept", None)
    if before is not None and (touched := {path for path, _ in _kept().items() ^ before.items()}):
        print(f"\nWRITTEN INTO THE TREE: {', '.join(sorted(str(path.relative_to(ROOT)) for path in touched))}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for reason in (NO_BROWSER, NO_CLUSTER, NO_DSL, NO_GPU, NO_NVCC, NO_SOURCES):
        if count := sum(reason in text for text in skipped):
            terminalreporter.write_line(f"NOT RUN ({count}): {reason}", red=True, bold=True)
    told = [dict(report.user_properties) for report in terminalreporter.stats.get("passed", [])]
    if cells := sum(some.get("cells", 0) for some in told):
        terminalreporter.write_line(f"audit: {cells} cells of tables computed twice, by code that shares nothing")
    if numbers := sum(some.get("numbers", 0) for some in told):
        terminalreporter.write_line(f"audit: {numbers} numbers of the pages' sentences are recomputed from samples")


@pytest.fixture
def device() -> str:
    """Where kernels run in this process."""
    return KERNEL_DEVICE


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what goes to REPORTS."""
    monkeypatch.setattr(paths, "REPORTS", tmp_path / "reports")
    (tmp_path / "reports").mkdir()
    return tmp_path / "reports"


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """A folder that is made once for all processes of this run: the first that asks makes it, others wait for it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name: str, make: Callable[[Path], None]) -> Path:
        folder, made = base / name, base / f"{name}.made"
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of one that failed halfway
                folder.mkdir()
                make(folder)
                made.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def report(shared: Callable[[str, Callable[[Path], None]], Path]) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The run and the folder of this tree's report of what is recorded; elsewhere, since `reports/` is the reader's."""

    def make(root: Path) -> None:
        done = labkit("run", "--source", "recorded", **linked(root), CUDA_VISIBLE_DEVICES="")
        (root / "done.json").write_text(json.dumps([done.returncode, done.stdout, done.stderr]))

    root = shared("recorded", make)
    done = subprocess.CompletedProcess("labkit run", *json.loads((root / "done.json").read_text()))
    return done, root / "reports"
