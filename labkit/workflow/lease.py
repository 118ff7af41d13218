"""One timing at a time on a GPU: a lease, held through a locked file for each device.

The lock goes with the process that holds it, however that ends. A notebook that was started under a lease finds it in
its environment and does not wait for itself; a kernel opened by hand in JupyterLab takes the same lease.
"""

import fcntl
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

LEASED = "LABKIT_LEASED_GPU"  # in the environment of a process that was started under a lease
VISIBLE = "CUDA_VISIBLE_DEVICES"
_POLL_S = 0.2


class NoGpu(RuntimeError):
    """There is no GPU to lease; the message says why."""


class Busy(RuntimeError):
    """Every GPU is leased, and the caller did not want to wait (any longer)."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver lists it. id: its UUID, as CUDA_VISIBLE_DEVICES takes it."""

    index: int
    id: str
    name: str


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, started; None where the library or the driver is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # its own error types exist only if it could be imported
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def installed() -> list[Gpu]:
    """Every NVIDIA GPU of this machine, in the driver's order; empty without one or without its library (NVML)."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [
            Gpu(i, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)) for i, handle in enumerate(handles)
        ]


def driver() -> str:
    """Version of the NVIDIA driver; empty without one."""
    with _nvml() as nvml:
        return nvml.nvmlSystemGetDriverVersion() if nvml else ""


def capability(gpu: Gpu) -> int:
    """Compute capability of a GPU, as 90 for 9.0; 0 if the driver cannot be asked. Starts no CUDA context."""
    with _nvml() as nvml:
        try:
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(nvml.nvmlDeviceGetHandleByUUID(gpu.id))
        except Exception:  # NVML's own errors, and a part of a GPU, which it does not list
            return 0
    return 10 * major + minor


def visible(every: Sequence[Gpu] | None = None) -> list[Gpu]:
    """The GPUs that this process may use: those that CUDA_VISIBLE_DEVICES names, or all.

    As in CUDA, an entry is an index, or a UUID or its beginning, and the first one that names no GPU ends the list.
    """
    every = installed() if every is None else list(every)
    wanted = os.environ.get(VISIBLE)
    if wanted is None:
        return every
    found: list[Gpu] = []
    for entry in wanted.split(","):
        gpu = _named(entry.strip(), every)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return found


def _named(entry: str, every: Sequence[Gpu]) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in every if gpu.index == int(entry)), None)
    if entry.startswith("MIG-"):  # a part of a GPU, which the driver's list of GPUs does not show
        return Gpu(-1, entry, entry)
    matches = [gpu for gpu in every if entry and gpu.id.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def environment(gpu: Gpu) -> dict[str, str]:
    """What a process started under the lease of `gpu` needs in its environment."""
    return {VISIBLE: gpu.id, LEASED: gpu.id}


@contextmanager
def gpu_lease(
    devices: Sequence[Gpu] | None = None,
    *,
    timeout: float | None = None,
    stop: threading.Event | None = None,
    say: Callable[[str], None] = print,
    folder: Path | None = None,
) -> Iterator[Gpu]:
    """Hold a GPU that nobody else times on; yields it.

    devices: the GPUs to choose from (default: `visible()`). timeout: seconds to wait for a free one; None waits on.
    stop: an event that ends the waiting. say: gets one message if there is none free.
    folder: of the lock files (default: one per user, for temporary files).
    In a process that was started under a lease, that GPU is yielded at once.
    NoGpu if there is none; Busy if none becomes free in time, or before the waiting is stopped.
    """
    folder = _own_folder(folder)
    if leased := os.environ.get(LEASED):
        # Held by the process that started this one, but marked as in use here: if that one is killed, the next holder
        # waits until this one has ended too.
        with _lock(folder, leased, "use", fcntl.LOCK_SH):
            yield Gpu(-1, leased, leased)
        return
    devices = visible() if devices is None else list(devices)
    if not devices:
        raise NoGpu(why_none())
    deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
    told = False
    while True:
        for gpu in devices:
            with ExitStack() as stack:
                if _take(stack, folder, gpu):
                    yield gpu
                    return
        busy = ", ".join(f"{gpu.name} (process {_holder(folder, gpu)})" for gpu in devices)
        if time.monotonic() > deadline or (stop is not None and stop.is_set()):
            raise Busy(f"no free GPU; leased: {busy}")
        if not told:
            say(f"waiting for a free GPU; leased: {busy}")
            told = True
        time.sleep(_POLL_S)


def _take(stack: ExitStack, folder: Path, gpu: Gpu) -> bool:
    try:
        file = stack.enter_context(_lock(folder, gpu.id, "lease", fcntl.LOCK_EX | fcntl.LOCK_NB))
        with _lock(folder, gpu.id, "use", fcntl.LOCK_EX | fcntl.LOCK_NB):
            pass  # nobody that a former holder started is left
    except BlockingIOError:
        return False
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return True


@contextmanager
def _lock(folder: Path, device: str, kind: str, operation: int) -> Iterator[IO[str]]:
    with open(_file(folder, device, kind), "a") as file:
        fcntl.flock(file, operation)
        yield file


def _file(folder: Path, device: str, kind: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', device)}.{kind}"


def _holder(folder: Path, gpu: Gpu) -> str:
    try:
        return _file(folder, gpu.id, "lease").read_text() or "?"
    except OSError:
        return "?"


def _own_folder(folder: Path | None) -> Path:
    folder = folder or Path(tempfile.gettempdir()) / f"labkit-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
        raise PermissionError(f"{folder}: not a folder of this user's; remove it, or set TMPDIR to another place")
    return folder


def why_none() -> str:
    """Why `visible()` is empty."""
    if (wanted := os.environ.get(VISIBLE)) is not None and installed():
        return f"{VISIBLE}={wanted!r} leaves none of this machine's GPUs"
    return "the driver lists no NVIDIA GPU on this machine"
