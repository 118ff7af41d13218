"""Compiling for a GPU that is not here: Triton's driver, as far as compiling asks for one. Needs no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CAPABILITIES = (80, 90, 100, 120)


class _Offline:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_device(self) -> str:
        return f"sm_{self.capability}"  # keys Triton's cache of compiled kernels, so it differs for every target

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def offline(capability: int) -> Iterator[None]:
    """Inside, Triton compiles for sm_80, sm_90, sm_100 or sm_120 (`capability` 80 …) and needs no GPU to do so.

    Kernels can be compiled (`Launch.compile`), not run. ValueError for another capability.
    """
    if capability not in CAPABILITIES:
        raise ValueError(f"capability is {capability!r}; allowed: {', '.join(map(str, CAPABILITIES))}")
    from triton.runtime import driver

    previous = driver._active  # the property `active` would start a driver, which fails without a GPU
    driver.set_active(_Offline(capability))
    try:
        yield
    finally:
        driver.set_active(previous)


def offline_capability() -> int | None:
    """The capability that is compiled for inside `offline`; None outside of it."""
    try:
        from triton.runtime import driver
    except ImportError:
        return None
    return driver._active.capability if isinstance(driver._active, _Offline) else None
