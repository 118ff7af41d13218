"""Without a GPU: runs the files of tests/kernels in processes of their own, in Triton's interpreter."""

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


TOGETHER = 6  # files a process: to start one takes as long as many a file
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
GROUPS = [FILES[i : i + TOGETHER] for i in range(0, len(FILES), TOGETHER)]


@pytest.mark.timeout(2400)  # a slow machine interprets for minutes
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/kernels runs on the GPU in this same pytest run")
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group[0]} to {group[-1]}")
def test_kernels_in_the_interpreter(group):
    absent = [file for file in group if file in RELEASED and sources_missing(*RELEASED[file])]
    files = [file for file in group if file not in absent]
    without = ["-p", "no:cacheprovider", "-p", "no:nbmake"]  # the latter loads what reads notebooks: a second each time
    command = [sys.executable, "-m", "pytest", *without, *(str(FOLDER / file) for file in files)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for file in files:  # each has run something
        assert re.search(rf"\b{re.escape(file)} \.", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout
    if absent:
        pytest.skip(f"{NO_SOURCES}: {', '.join(absent)}")
