"""On what: the GPU of this process, its identity, and how calls are timed on it."""

import json
import math
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from labkit import __version__, paths
from labkit.bench.timing import State
from labkit.kernels.tuned import slug

SAMPLE_US = 600.0  # a sample lasts at least this long, so that the events' resolution does not matter
DELAY_CYCLES = 400_000  # keeps the GPU busy (about 0.2 ms) while the first replays of a block are enqueued
LONG_US = 5_000.0  # of a round over all buffer sets that lasts longer, a part is timed
COLD_L2 = 4  # inputs rotate over at least this many L2 sizes; so many are read before such a part
MAX_CALLS = 4096
BROKEN_OFF = "due to a previous error during capture"  # in the message of a capture that something else broke off

# nvmlClocksThrottleReason… bits that say why a clock is lower than asked for; idle and user settings do not count.
_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "hardware power brake",
}


@dataclass(frozen=True)
class Machine:
    """A GPU. l2_bytes, memory_bytes: bytes; datasheet_tbs: memory clock × bus width, TB/s; sm_mhz: highest SM clock."""

    slug: str
    name: str
    driver: str
    capability: int
    sms: int
    l2_bytes: int
    memory_bytes: int
    datasheet_tbs: float
    sm_mhz: int
    power_w: int

    @classmethod
    def load(cls, folder: Path) -> "Machine | None":
        """The machine of a data or runs folder; None if it has no readable machine.json."""
        try:
            return cls(**json.loads((folder / "machine.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def to_json(self) -> bytes:
        """The content of machine.json."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


@cache
def why_no_gpu() -> str:
    """Why this process cannot measure; empty if it has an NVIDIA GPU, torch that sees it, and Triton that compiles."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU here"
    if torch.version.hip:
        return "the lab measures NVIDIA GPUs only"
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    if triton.knobs.runtime.interpret:
        return "Triton is in its interpreter (TRITON_INTERPRET), which is never timed"
    return ""


def load_libraries() -> None:
    """Import what measuring needs and takes seconds to import, as far as it is here. Starts no CUDA context."""
    with suppress(ImportError):  # `why_no_gpu` says what is missing
        import torch  # noqa: F401
        import triton  # noqa: F401


@cache
def this_machine() -> Machine:
    """The GPU that this process uses. RuntimeError saying why if there is none."""
    if problem := why_no_gpu():
        raise RuntimeError(f"no GPU to measure: {problem}")
    import torch

    properties = torch.cuda.get_device_properties(0)
    nvml, handle = _nvml()
    mhz = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
    bus = nvml.nvmlDeviceGetMemoryBusWidth(handle)
    return Machine(
        slug=slug(properties.name),
        name=properties.name,
        driver=nvml.nvmlSystemGetDriverVersion(),
        capability=10 * properties.major + properties.minor,
        sms=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
        datasheet_tbs=2 * mhz * 1e6 * bus / 8 / 1e12,  # two transfers a clock
        sm_mhz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        power_w=nvml.nvmlDeviceGetPowerManagementLimit(handle) // 1000,
    )


@cache
def _nvml() -> tuple[Any, Any]:
    import pynvml
    import torch

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(0).uuid)  # NVML also numbers devices that CUDA_VISIBLE_DEVICES hides
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def provenance(seed: int) -> dict[str, Any]:
    """The provenance columns of a row, without `utc`."""
    import torch
    import triton

    return {
        "gpu": this_machine().name,
        "driver": this_machine().driver,
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "labkit": __version__,
        "revision": revision(),
        "seed": seed,
    }


@cache
def revision() -> str:
    """Commit of the lab's tree, with "+" where its code differs; outside a checkout, LABKIT_REVISION.

    Data, tuned tables and the modes of files, which a copy may change, are not code.
    """

    def git(*words: str) -> str:
        return subprocess.run(paths.git(*words), capture_output=True, text=True, check=True).stdout

    try:
        changed = git("-c", "core.fileMode=false", "diff", "--name-only", "HEAD", "--", "labkit/*.py")
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("LABKIT_REVISION", "")


@dataclass
class Timed:
    """Calls made ready for timing: `replay` enqueues `calls` of them. eager: the host's pace is what is timed.

    sets: how many buffer sets they go through, the first ones. before, after: enqueued right before and after what is
    timed, and not timed themselves.
    """

    replay: Callable[[], Any]
    calls: int
    sets: int
    eager: bool = False
    before: Callable[[], Any] | None = None
    after: Callable[[], Any] | None = None


class CudaDevice:
    """The GPU as the timing sees it: CUDA events around graph replays (or eager launches), a whole block at a time."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.machine = this_machine()
        self.torch_device = torch.device("cuda")
        self.stream = torch.cuda.Stream()

    def prepare(self, calls: Sequence[Callable[[], Any]], mode: str, whole: bool = False) -> Timed:
        """Warm up and make one sample's worth of calls: all buffer sets in turn, as often as a sample needs.

        Of calls in a graph that take longer than LONG_US for one round, fewer sets, and L2 is emptied before each
        sample: a slow kernel on small inputs has a thousand of them. whole: even then all.
        """

        def make(sets: int, rounds: int) -> Timed:
            count = sets * rounds
            if mode == "eager":
                return Timed(lambda: _loop(calls, count), count, sets, eager=True)
            return Timed(self._capture(calls, count), count, sets)

        self.torch.cuda.synchronize()  # the buffers are filled on another stream
        with self.torch.cuda.stream(self.stream):
            for call in calls[:2]:
                call()
            self.stream.synchronize()
            return self._enough(make, len(calls), whole or mode == "eager")

    def _enough(self, make: Callable[[int, int], Timed], sets: int, whole: bool) -> Timed:
        """Grow the sample, in whole rounds over the buffer sets, until it lasts SAMPLE_US; or cut a long round."""
        rounds = 1
        while True:
            timed = make(sets, rounds)
            self.time([timed], hot=False)  # loads the graph
            us = self.time([timed], hot=False)[0] * timed.calls / 1e3
            if us > LONG_US and rounds == 1 < sets and not whole:
                return replace(make(max(1, int(sets * LONG_US / us)), 1), before=self._empty_l2())
            # A short graph overstates its calls by its own start, so the grown one is looked at again.
            if us >= SAMPLE_US or sets * rounds * 2 > MAX_CALLS:
                return timed
            rounds = min(max(rounds + 1, math.ceil(1.05 * rounds * SAMPLE_US / us)), MAX_CALLS // sets)

    def _empty_l2(self) -> Callable[[], Any]:
        """A read of more than L2 holds."""
        return self.torch.zeros(COLD_L2 * self.machine.l2_bytes // 4, device=self.torch_device).sum

    def _capture(self, calls: Sequence[Callable[[], Any]], count: int, again: bool = True) -> Callable[[], Any]:
        """Replay of a graph of so many calls. again: once more if something else broke the capture off."""
        graph = self.torch.cuda.CUDAGraph()
        try:
            with self.torch.cuda.graph(graph, stream=self.stream):
                _loop(calls, count)
        except RuntimeError as problem:
            if not again or BROKEN_OFF not in str(problem):
                raise
            self.recover()
            return self._capture(calls, count, again=False)
        return graph.replay

    def time(self, timed: Sequence[Timed], hot: bool) -> list[int]:
        """ns per call of each; graphs are all enqueued before the GPU begins, so that the host's pace does not show."""
        event = self.torch.cuda.Event
        marks = [(event(enable_timing=True), event(enable_timing=True)) for _ in timed]
        with self.torch.cuda.stream(self.stream):
            if not any(item.eager for item in timed):
                self.torch.cuda._sleep(DELAY_CYCLES)
            for item, (start, end) in zip(timed, marks, strict=True):
                if hot:
                    item.replay()
                if item.before:
                    item.before()
                start.record()
                item.replay()
                end.record()
                if item.after:
                    item.after()
            self.stream.synchronize()
        pairs = zip(timed, marks, strict=True)
        return [round(1e6 * start.elapsed_time(end) / item.calls) for item, (start, end) in pairs]

    def recover(self) -> None:
        """Free what a failed variant held; raises, and so ends the process, if it broke the GPU's context."""
        self.torch.cuda.empty_cache()
        self.torch.cuda.synchronize()

    def state(self) -> State:
        """Clock and throttle reasons, from NVML."""
        nvml, handle = _nvml()
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        reasons = frozenset(name for bit, name in _REASONS.items() if bits & bit)
        return State(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM), reasons)


def _loop(calls: Sequence[Callable[[], Any]], count: int) -> None:
    for i in range(count):
        calls[i % len(calls)]()
