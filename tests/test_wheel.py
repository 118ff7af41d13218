"""A wheel of the project: the library with its tables, which need torch, Triton and NumPy alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("labkit", "pyproject.toml", "README.md", "LICENSE")
# What torch and Triton need themselves; whatever else this environment has is hidden from the process below.
ALLOWED = {
    "torch", "triton", "numpy", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec",
    "filelock", "functorch", "torchgen", "nvidia", "setuptools", "_distutils_hack", "pkg_resources", "cuda", "labkit",
}  # fmt: skip
SCRIPT = """
import sys
from importlib import machinery

class Hidden(machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = super().find_spec(name, path, target)
        origin = getattr(found, "origin", None) or ""
        if "site-packages" in origin and name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"no module named {name!r} here", name=name)
        return None

sys.meta_path.insert(0, Hidden)
sys.path.insert(0, FOLDER)
import torch
import labkit
from labkit.kernels import decoder, experts, gated_delta, gemv, gguf, tuned
from labkit.kernels.experts import choose as experts_choose
from labkit.kernels.gemv import choose as gemv_choose

assert labkit.__file__.startswith(FOLDER), labkit.__file__
for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
    assert gemv_choose.choices_of(gpu) and experts_choose.choices_of(gpu), gpu
for package in (decoder, experts, gated_delta, gemv, gguf):
    for name in set(package.__all__) - {"read", "tensor_names"}:  # of .gguf files, which take the package gguf
        getattr(package, name)
W, x, y = torch.randn(33, 96), torch.randn(96), torch.empty(33)
gemv.linear(W, x, y)()
torch.testing.assert_close(y, W @ x)
print("ran")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The project's wheel, built from a copy, so that nothing is written into the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(
            ROOT / part,
            source / part,
            **({"ignore": shutil.ignore_patterns("__pycache__")} if copy != shutil.copy else {}),
        )
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [file] = out.glob("labkit-*.whl")
    return zipfile.ZipFile(file)


def test_it_has_the_kernels_with_their_tables_and_page(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "labkit").rglob("*.py")}
    assert modules <= names
    assert {f"labkit/kernels/tables/{gpu}/{kind}.json" for gpu in ("nvidia-h100-80gb-hbm3", "nvidia-h200")
            for kind in ("gemv", "experts")} <= names  # fmt: skip
    assert "labkit/kernels/README.md" in names


def test_it_runs_where_there_is_nothing_but_torch_and_triton(wheel: zipfile.ZipFile, tmp_path: Path):
    wheel.extractall(tmp_path)
    script = f"FOLDER, ALLOWED = {str(tmp_path)!r}, {ALLOWED!r}\n{SCRIPT}"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-P", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "ran\n", done.stderr
