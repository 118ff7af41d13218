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


@pytest.mark.parametrize("home", ["", "elsewhere"])
def test_triton_keeps_what_it_compiles_where_it_does_by_default(tmp_path, home):
    """Said in the environment, where torch.compile would otherwise write another folder."""
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_CACHE_DIR", "TRITON_HOME")}
    env |= {"TRITON_HOME": str(tmp_path / home)} if home else {}
    found = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True).stdout
    same, told = found.split()
    assert same == "True"
    assert told.startswith(str(tmp_path / home)) == bool(home)


def test_a_folder_that_is_named_stays(tmp_path):
    code = "import labkit.paths, os; print(os.environ['TRITON_CACHE_DIR'])"
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(tmp_path)
