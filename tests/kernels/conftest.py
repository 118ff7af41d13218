"""Tests that run kernels: on the GPU where there is one, else in Triton's interpreter.

A process is either interpreted or not, from its first import on. Without a GPU these files are therefore left out of an
ordinary run, in which tests/test_kernels.py runs them all in an interpreted process and fails if that runs none.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
collect_ignore_glob = [] if INTERPRETED or ON_GPU else ["*.py"]


@pytest.fixture
def device() -> str:
    """Where kernels run in this process."""
    return "cuda" if ON_GPU else "cpu"
