"""One timing at a time on a GPU: a lease, held through a locked file for each device.

The lock goes with the process that holds it, however that ends. A notebook that was started under a lease finds it in
its environment and does not wait for itself; a kernel opened by hand in JupyterLab takes the same lease.

The files are the host's, of all its accounts: nobody can write or remove another's, and a lock needs no more than
reading. A lease takes the lock in every folder of `folders()`: two containers exclude each other if they share one of
them (`--ipc=host` shares /dev/shm). Where they share none, LABKIT_LOCKS names a folder that is mounted into both.
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
from typing import Any

LEASED = "LABKIT_LEASED_GPU"  # in the environment of a process that was started under a lease
VISIBLE = "CUDA_VISIBLE_DEVICES"
LOCKS = "LABKIT_LOCKS"  # a folder that takes the place of those of the host
# What a process that leases its GPU itself prints: while none is free, before a GPU's id, and when it needs it no more.
WAITING, TAKEN, FREED = "waiting for a free GPU; ", "a GPU to measure on: ", "all is measured"
_POLL_S = 0.2


class NoGpu(RuntimeError):
    """There is no GPU to lease; the message says why."""


class Orphaned(threading.Event):
    """An event that is set once the process which started this one has ended: nobody waits for what it would do."""

    def __init__(self) -> None:
        super().__init__()
        self._parent = os.getppid()

    def is_set(self) -> bool:
        return super().is_set() or os.getppid() != self._parent


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
    folder: of the lock files (default: `folders()`).
    In a process that was started under a lease, that GPU is yielded at once.
    NoGpu if there is none; Busy if none becomes free in time, or before the waiting is stopped; PermissionError for a
    folder in which others could remove the files.
    """
    places = [folder] if folder else folders()
    for place in places:
        _prepare(place)
    if leased := os.environ.get(LEASED):
        # Held by the process that started this one, but marked as in use here: if that one is killed, the next holder
        # waits until this one has ended too.
        with ExitStack() as stack:
            _lock(stack, places, leased, "use", fcntl.LOCK_SH)
            yield Gpu(-1, leased, leased)
        return
    devices = visible() if devices is None else list(devices)
    if not devices:
        raise NoGpu(why_none())
    deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
    told = False
    while True:
        stopped = stop is not None and stop.is_set()
        for gpu in () if stopped else devices:
            with ExitStack() as stack:
                if _take(stack, places, gpu):
                    yield gpu
                    return
        busy = ", ".join(f"{gpu.name} (process {_holder(places, gpu)})" for gpu in devices)
        if stopped or time.monotonic() > deadline:
            raise Busy(f"no free GPU; leased: {busy}")
        if not told:
            say(f"{WAITING}leased: {busy}")
            told = True
        time.sleep(_POLL_S)


def folders() -> list[Path]:
    """Where the lock files are: LABKIT_LOCKS, or folders that all accounts of the host have."""
    if named := os.environ.get(LOCKS):
        return [Path(named)]
    hosts = [Path(name) for name in ("/dev/shm", "/tmp") if os.access(name, os.W_OK)]
    return [base / "labkit-gpus" for base in hosts or [Path(tempfile.gettempdir())]]


def _prepare(folder: Path) -> None:
    """Make a folder in which every account can put files and none can remove another's. PermissionError otherwise."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-")
        os.chmod(made, 0o1777)
        try:
            os.rename(made, folder)  # nobody sees it with other permissions
        except OSError:  # another process was first
            os.rmdir(made)
    state = folder.lstat()
    others_write = stat.S_IMODE(state.st_mode) & 0o022
    if not stat.S_ISDIR(state.st_mode) or (others_write and not state.st_mode & stat.S_ISVTX):
        raise PermissionError(
            f"{folder}: a link, or others can remove its files; remove it, or name another folder in {LOCKS}"
        )


def _take(stack: ExitStack, places: Sequence[Path], gpu: Gpu) -> bool:
    try:
        _lock(stack, places, gpu.id, "lease", fcntl.LOCK_EX | fcntl.LOCK_NB)
        with ExitStack() as left:
            _lock(left, places, gpu.id, "use", fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody whom a former holder started
    except BlockingIOError:
        return False
    return True


def _lock(stack: ExitStack, places: Sequence[Path], device: str, kind: str, operation: int) -> None:
    """Lock a device's file in every folder, until the stack is closed."""
    for folder in places:
        file = _opened(_file(folder, device, kind))
        stack.callback(os.close, file)
        fcntl.flock(file, operation)


def _opened(path: Path) -> int:
    """A lock file, opened to read it, which all accounts may; made where it is missing."""
    while True:
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
            try:
                os.fchmod(handle, 0o444)
                os.link(name, path)  # nobody sees it with other permissions
            except FileExistsError:
                pass
            finally:
                os.close(handle)
                os.unlink(name)


def _file(folder: Path, device: str, kind: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', device)}.{kind}"


def _holder(places: Sequence[Path], gpu: Gpu) -> str:
    """The process that holds a lease, as the kernel lists it (Linux); one of another container has no number here."""
    try:
        held = Path("/proc/locks").read_text().splitlines()
        inodes = {str(_file(folder, gpu.id, "lease").stat().st_ino) for folder in places}
    except OSError:
        return "?"
    for fields in map(str.split, held):  # 1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE 0 EOF
        if len(fields) == 8 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] in inodes:
            return fields[4]
    return "?"


def why_none() -> str:
    """Why `visible()` is empty."""
    if (wanted := os.environ.get(VISIBLE)) is not None and installed():
        return f"{VISIBLE}={wanted!r} leaves none of this machine's GPUs"
    return "the driver lists no NVIDIA GPU on this machine"
