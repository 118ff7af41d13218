"""Without a GPU: runs each file of tests/kernels in a process of its own, in Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from missing import NO_SOURCES, sources_missing

FOLDER = Path(__file__).parent / "kernels"
# File -> the packages that it calls; none: all that are always fetched.
RELEASED = {"test_released.py": (), "test_released_vllm.py": ("vllm",), "test_released_vllm_experts.py": ("vllm",)}


@pytest.mark.timeout(2400)  # a slow machine interprets the largest file for a quarter of an hour
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/kernels runs on the GPU in this same pytest run")
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_kernels_in_the_interpreter(file):
    if file in RELEASED and sources_missing(*RELEASED[file]):
        pytest.skip(NO_SOURCES)
    without = ["-p", "no:cacheprovider", "-p", "no:nbmake"]  # the latter loads what reads notebooks: a second each time
    command = [sys.executable, "-m", "pytest", "-q", *without, str(FOLDER / file)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d* passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout
