"""`labkit new`: what it makes runs, passes its test and the checks of the tree."""

import os
import shutil
import subprocess
import sys

import pytest
from toy_lab import CODE

from labkit import registry
from labkit.workflow import creating


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the tree, without what was recorded, in which a study was made."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("labkit", "tests", "notebooks"):
        shutil.copytree(CODE / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CODE / "pyproject.toml", root)
    done = run(root, "-m", "labkit", "new", "block_sizes")
    assert done.returncode == 0, done.stderr
    return root, done.stdout.splitlines()


def run(root, *words):
    env = {**os.environ, "PYTHONPATH": str(root), "LABKIT_ROOT": str(root), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, timeout=500)


def test_it_says_which_files_it_made(copy):
    root, files = copy
    number = len(registry.NOTEBOOKS)
    assert f"notebooks/{number:02d}_block_sizes.ipynb" in files
    assert {"labkit/registry.py", "tests/test_block_sizes.py", "labkit/studies/block_sizes/claims.py"} <= set(files)
    assert all((root / name).exists() for name in files)
    assert "block_sizes" in run(root, "-m", "labkit", "list").stdout


def test_its_own_test_passes_and_so_do_those_of_its_notebook(copy):
    root, _ = copy
    done = run(root, "-m", "pytest", "-q", "tests/test_block_sizes.py")
    assert done.returncode == 0, done.stdout
    done = run(root, "-m", "pytest", "-q", "tests/test_notebooks.py", "-k", "block_sizes or every_study")
    assert done.returncode == 0, done.stdout
    done = run(root, "-m", "pytest", "-q", "tests/test_ruled.py")
    assert done.returncode == 0, done.stdout


def test_it_has_the_style_of_the_tree(copy):
    root, files = copy
    sources = [name for name in files if not name.endswith(".json")]
    for words in (("check",), ("format", "--check")):
        done = run(root, "-m", "ruff", *words, *sources)
        assert done.returncode == 0, done.stdout


def test_its_notebook_runs_without_a_gpu_and_without_rows(copy):
    root, _ = copy
    done = run(root, "-m", "labkit", "run", "block_sizes")
    assert done.returncode == 0, done.stderr
    assert (root / "reports" / f"{len(registry.NOTEBOOKS):02d}_block_sizes.html").exists()


@pytest.mark.parametrize("name", ["", "Gemv", "1st", "a__b", "a-b", "../a", "class", "état"])
def test_a_name_that_cannot_be_a_folder_is_refused(name):
    with pytest.raises(ValueError, match=r"the study's name is .*; allowed: small letters"):
        creating.check(name)


def test_a_study_that_exists_is_not_written_over():
    with pytest.raises(ValueError, match="there is a study 'machine'; the studies: machine, state_layout"):
        creating.check("machine")


def test_no_file_is_written_over(copy):
    root, _ = copy
    before = (root / "tests" / "test_compare.py").read_bytes()
    done = run(root, "-m", "labkit", "new", "compare")
    assert done.returncode == 2
    assert "tests/test_compare.py is there already; give the study another name" in done.stderr
    assert (root / "tests" / "test_compare.py").read_bytes() == before
    assert not (root / "labkit" / "studies" / "compare").exists()


def test_the_registry_gets_one_line_more():
    text = (CODE / "labkit" / "registry.py").read_text()
    more = creating._with_line(text, "other", "99_other")
    assert more.replace('    "other": "99_other",\n', "") == text
    assert list(eval(more.partition("NOTEBOOKS = ")[2].partition("\n\n")[0]))[-1] == "other"
