"""Kernels on fewer multiprocessors of a GPU than it has: how another GPU's number of waves is tried on this one.

| variant | hypothesis                                                                                              |
|---------|---------------------------------------------------------------------------------------------------------|
| sms     | so many tiles take ⌈tiles / slots⌉ waves, whatever GPU the slots are of                                 |

A green context is a share of the GPU's multiprocessors. The driver rounds the share, so what came of it is counted.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from labkit.kernels.launch import Launch

DELAY_CYCLES = 2_000_000  # about a millisecond, in which the host enqueues a sample's launches
CALLS, SAMPLES = 20, 12
PROBES = 64  # programs for each multiprocessor, of the kernel that counts them


@triton.jit
def _where_kernel(seen):
    """One program: marks the multiprocessor that it runs on. seen: [as many as there are, or more], int32."""
    tl.store(seen + cuda.smid(), 1)


def where(seen: torch.Tensor, programs: int) -> Launch:
    """The Launch that marks in `seen` (int32, zeroed) on which multiprocessors its programs ran."""
    return Launch(_where_kernel, (programs,), {"seen": seen}, {"num_warps": 1})


@cache
def stream_on(sms: int, device: torch.device) -> tuple["torch.cuda.Stream", int]:
    """A stream on at least so many multiprocessors of the GPU (0: all), and how many its kernels were seen on.

    RuntimeError where torch has no green contexts or the driver refuses; ValueError for more than the GPU has.
    """
    most = torch.cuda.get_device_properties(device).multi_processor_count
    if sms > most:
        raise ValueError(f"sms is {sms}; allowed: up to {most}, which this GPU has")
    stream = torch.cuda.Stream(device) if sms in (0, most) else _green(sms, device)
    seen = torch.zeros(most, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        where(seen, PROBES * most)()
        stream.synchronize()
    return stream, int(seen.sum())


_contexts: list[object] = []  # a green context must outlive its streams


def _green(sms: int, device: torch.device) -> "torch.cuda.Stream":
    try:
        from torch.cuda.green_contexts import SUPPORTED, GreenContext
    except ImportError:
        SUPPORTED = False
    if not SUPPORTED or not hasattr(GreenContext, "Stream"):
        raise RuntimeError(f"torch {torch.__version__} has no streams of green contexts")
    context = GreenContext.create(num_sms=sms, device_id=device.index or 0)
    _contexts.append(context)
    return context.Stream()


def timed(stream: "torch.cuda.Stream", launch: Launch) -> list[float]:
    """ns per call of so many samples on a stream; the GPU is kept busy while a sample's launches are enqueued."""
    found = []
    with torch.cuda.stream(stream):
        for _ in range(3):
            launch()
        for _ in range(SAMPLES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(DELAY_CYCLES)
            start.record()
            for _ in range(CALLS):
                launch()
            end.record()
            stream.synchronize()
            found.append(1e6 * start.elapsed_time(end) / CALLS)
    return found
