"""Programmatic dependent launch (compute capability 9.0): a kernel may start before the one before it has ended."""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Until the launches before have ended, if this one was allowed to start before; and let the next one start."""
    if DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
