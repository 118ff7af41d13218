"""The commit that a row names: with "+" only where code that is measured differs from it."""

import subprocess
from pathlib import Path

import pytest

from labkit import paths
from labkit.bench import machine


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with code, a table and data, all of them committed."""
    for name in ("labkit/kernels/kernel.py", "labkit/kernels/tables/gpu/gemv.json", "data/gpu/study.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    return tmp_path


def test_it_is_the_commit(tree: Path):
    found = machine.revision.__wrapped__()
    assert len(found) == 12
    assert int(found, 16) >= 0


@pytest.mark.parametrize("name", ["labkit/kernels/tables/gpu/gemv.json", "data/gpu/study.parquet", "labkit/new.txt"])
def test_data_tables_and_other_files_are_no_change(tree: Path, name: str):
    (tree / name).write_text("2\n")
    assert not machine.revision.__wrapped__().endswith("+")


def test_nor_is_a_copy_whose_files_may_be_executed(tree: Path):
    (tree / "labkit/kernels/kernel.py").chmod(0o755)
    assert not machine.revision.__wrapped__().endswith("+")


def test_changed_code_is_said(tree: Path):
    (tree / "labkit/kernels/kernel.py").write_text("2\n")
    assert machine.revision.__wrapped__().endswith("+")


def test_outside_a_checkout_the_environment_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setenv("LABKIT_REVISION", "abc")
    assert machine.revision.__wrapped__() == "abc"
