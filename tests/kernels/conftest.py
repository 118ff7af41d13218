"""What Triton's interpreter is told for these tests: no work twice, and sums in the same order on every processor."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

from labkit.sweep.interpreter import hasten

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    hasten()

    def _in_order_of_k(a, b, dtype):
        """a @ b, each value summed in the order of k: a library's order may depend on the processor and the place."""
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
        for k in range(a.shape[-1]):
            total += a[..., :, k, None] * b[..., None, k, :]
        return total

    interpreter.np = SimpleNamespace(**vars(np) | {"matmul": lambda a, b, dtype: _in_order_of_k(a, b, dtype)})


@pytest.fixture
def interpretable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once the modules are loaded: what Triton's interpreter, or a CPU, cannot do in them is done in its own words."""
    monkeypatch.setattr(torch.cpu, "device", lambda index: nullcontext(), raising=False)

    def now() -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("labkit_sources") and getattr(module, "exp", None) is tl.exp:
                monkeypatch.setattr(module, "exp", lambda x: tl.exp(x))

    return now


@pytest.fixture
def check_right(interpretable) -> Callable[[Any], None]:
    """Of a trial of a released kernel: each of its errors is within its tolerance."""

    def now(trial: Any) -> None:
        interpretable()
        errors = trial.check()
        assert errors.keys() == trial.tolerance.keys()
        assert all(errors[name] <= trial.tolerance[name] for name in errors), errors

    return now
