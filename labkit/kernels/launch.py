"""One kernel launch as a value, so that the same arguments can be run, interpreted, compiled and analysed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.kernels.keys import settle


@dataclass(frozen=True)
class Launch:
    """A Triton kernel with everything a launch needs.

    kernel:  a `triton.jit` function.
    grid:    number of programs, one to three integers.
    args:    every kernel parameter by name, `tl.constexpr` parameters included.
    options: launch options, such as `num_warps` and `num_stages`.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    options: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settle(self.kernel)

    def __call__(self) -> Any:
        """Enqueue the kernel on the current stream (or interpret it, under `TRITON_INTERPRET=1`)."""
        return self.kernel[self.grid](**self.args, **self.options)

    def compile(self) -> Any:
        """Compile for the active driver's target without launching; returns Triton's compiled kernel."""
        return self.kernel.warmup(**self.args, **self.options, grid=self.grid)


def launched(call: Callable[[], Any]) -> list[Launch]:
    """What a call would launch, in its order; nothing runs."""
    from unittest import mock

    found: list[Launch] = []
    with mock.patch.object(Launch, "__call__", lambda launch: found.append(launch)):
        call()
    return found
