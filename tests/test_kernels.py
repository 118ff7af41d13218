"""Without a GPU: runs tests/kernels in a process of its own, in Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "kernels"


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/kernels runs on the GPU in this same pytest run")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 20, done.stdout
    assert "skipped" not in done.stdout, done.stdout
