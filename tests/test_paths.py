"""Where the lab keeps its files, and where Triton keeps what it compiles."""

import os
import subprocess
import sys

import pytest

CODE = """
import labkit.paths, os
from triton import knobs
told = os.environ["TRITON_CACHE_DIR"]
del os.environ["TRITON_CACHE_DIR"]
print(told == knobs.cache.dir, told)
"""


ASSEMBLER = """
import labkit.paths, os
from triton import knobs
told = os.environ.pop("TRITON_PTXAS_PATH")
print(told == knobs.nvidia.ptxas.path)
"""


@pytest.mark.parametrize("home", ["", "elsewhere"])
def test_triton_keeps_what_it_compiles_where_it_does_by_default(tmp_path, home):
    """Said in the environment, where torch.compile would otherwise write another folder."""
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_CACHE_DIR", "TRITON_HOME")}
    env |= {"TRITON_HOME": str(tmp_path / home)} if home else {}
    found = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True).stdout
    same, told = found.split()
    assert same == "True"
    assert told.startswith(str(tmp_path / home)) == bool(home)


def test_triton_uses_its_own_assembler():
    """Where torch has one of its own, torch.compile would otherwise have Triton use that from then on."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_PTXAS_PATH"}
    found = subprocess.run([sys.executable, "-c", ASSEMBLER], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"])
def test_a_path_that_is_named_stays(name, tmp_path):
    code = f"import labkit.paths, os; print(os.environ['{name}'])"
    env = os.environ | {name: str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(tmp_path)
