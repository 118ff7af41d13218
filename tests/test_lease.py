"""The lease of a GPU, with real processes and made-up devices."""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from labkit.workflow import lease
from labkit.workflow.lease import Busy, Gpu, NoGpu, gpu_lease

ROOT = Path(__file__).resolve().parents[1]
GPUS = [Gpu(0, "GPU-aaaa-1", "first"), Gpu(1, "GPU-aabb-2", "second")]


@pytest.fixture(autouse=True)
def no_lease_of_our_own(monkeypatch):
    monkeypatch.delenv(lease.LEASED, raising=False)
    monkeypatch.delenv(lease.VISIBLE, raising=False)


@pytest.fixture
def open_folder():
    """A folder that every account reaches and can put files into, as /tmp is; what pytest makes is its account's."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        place.chmod(0o1777)
        yield place


def silent(text):
    pass


def python(code, **env):
    """A process that runs code with the lab importable."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        text=True,
    )


HOLD = """
    import time
    from pathlib import Path
    from labkit.workflow.lease import Gpu, gpu_lease
    with gpu_lease([Gpu(0, "GPU-aaaa-1", "first")], folder=Path({folder!r})) as gpu:
        print("held", gpu.id)
        time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    process = python(HOLD.format(folder=str(tmp_path)))
    assert process.stdout.readline().startswith("held")
    yield process
    process.kill()
    process.communicate()


def test_a_leased_gpu_is_not_given_twice_and_the_other_one_is(tmp_path, holder):
    with pytest.raises(Busy, match=str(holder.pid)):
        gpu_lease(GPUS[:1], timeout=0, say=silent, folder=tmp_path).__enter__()
    with gpu_lease(GPUS, timeout=0, say=silent, folder=tmp_path) as gpu:
        assert gpu == GPUS[1]


def test_one_process_cannot_take_a_gpu_twice_either(tmp_path):
    with (
        gpu_lease(GPUS[:1], folder=tmp_path),
        pytest.raises(Busy),
        gpu_lease(GPUS[:1], timeout=0, say=silent, folder=tmp_path),
    ):
        pass


def test_a_killed_holder_frees_its_gpu_and_who_waits_gets_it(tmp_path, holder):
    said = []
    threading.Timer(0.5, holder.send_signal, [signal.SIGKILL]).start()
    start = time.monotonic()
    with gpu_lease(GPUS[:1], timeout=20, say=said.append, folder=tmp_path):
        assert time.monotonic() - start >= 0.4
    assert len(said) == 1
    assert str(holder.pid) in said[0]


def test_waiting_can_be_stopped(tmp_path, holder):
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(Busy):
        gpu_lease(GPUS[:1], stop=stop, say=silent, folder=tmp_path).__enter__()


def test_who_is_stopped_takes_no_gpu_that_is_free(tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Busy):
        gpu_lease(GPUS[:1], stop=stop, say=silent, folder=tmp_path).__enter__()


ORPHAN = """
import subprocess, sys
code = sys.argv[1]
subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE).stdout.readline()
"""
WAITS = """
from pathlib import Path
from labkit.workflow.lease import Busy, Gpu, Orphaned, gpu_lease
folder, gpus = Path({folder!r}), [Gpu(0, {gpu!r}, "first")]
try:
    with gpu_lease(gpus, stop=Orphaned(), say=lambda line: print(line, flush=True), folder=folder):
        (folder / "ended").write_text("leased")
except Busy:
    (folder / "ended").write_text("not waited for")
"""


def test_a_notebook_whose_run_has_ended_takes_no_gpu(tmp_path):
    """Its kernel may live on, waiting."""
    with gpu_lease(GPUS[:1], folder=tmp_path):
        waits = WAITS.format(folder=str(tmp_path), gpu=GPUS[0].id)
        subprocess.run([sys.executable, "-c", ORPHAN, waits], check=True, timeout=60)  # until it says that it waits
        deadline = time.monotonic() + 30
        while not (tmp_path / "ended").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (tmp_path / "ended").read_text() == "not waited for"


def test_no_two_timings_on_one_gpu(tmp_path):
    """Eight processes and two devices: each writes when it begins and ends, and intervals on a device never overlap."""
    code = f"""
        import time
        from pathlib import Path
        from labkit.workflow.lease import Gpu, gpu_lease
        gpus = [Gpu(0, "GPU-a", "first"), Gpu(1, "GPU-b", "second")]
        for _ in range(3):
            with gpu_lease(gpus, say=lambda text: None, folder=Path({str(tmp_path)!r})) as gpu:
                start = time.monotonic_ns()
                time.sleep(0.05)
                print(gpu.id, start, time.monotonic_ns())
    """
    processes = [python(code) for _ in range(8)]
    found: dict[str, list[tuple[int, int]]] = {}
    for process in processes:
        for line in process.communicate(timeout=120)[0].splitlines():
            name, start, end = line.split()
            found.setdefault(name, []).append((int(start), int(end)))
    assert set(found) == {"GPU-a", "GPU-b"}
    assert sum(map(len, found.values())) == 24
    for spans in found.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_process_started_under_a_lease_does_not_wait_for_it(tmp_path):
    code = f"""
        from pathlib import Path
        from labkit.workflow.lease import gpu_lease
        with gpu_lease(folder=Path({str(tmp_path)!r}), timeout=0) as gpu:
            print(gpu.id)
    """
    with gpu_lease(GPUS[:1], folder=tmp_path) as gpu:
        assert python(code, **lease.environment(gpu)).communicate(timeout=60)[0].strip() == gpu.id


def test_what_a_killed_holder_started_keeps_its_gpu_until_it_ends(tmp_path):
    child = python(HOLD.format(folder=str(tmp_path)), **lease.environment(GPUS[0]))
    assert child.stdout.readline().strip() == "held GPU-aaaa-1"
    try:  # nobody holds the lease itself: its holder was killed
        with pytest.raises(Busy):
            gpu_lease(GPUS[:1], timeout=0.5, say=silent, folder=tmp_path).__enter__()
    finally:
        child.kill()
        child.communicate()
    with gpu_lease(GPUS[:1], timeout=10, say=silent, folder=tmp_path):
        pass


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, [0, 1]),
        ("0,1", [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("GPU-aabb-2", [1]),
        ("GPU-aab", [1]),
        ("GPU-a", []),
        ("", []),
        ("-1", []),
        ("1,-1,0", [1]),
        ("7", []),
        ("0,0", [0]),
        (" 1 , 0 ", [1, 0]),
    ],
)
def test_visible_devices_as_in_cuda(monkeypatch, wanted, expected):
    if wanted is not None:
        monkeypatch.setenv(lease.VISIBLE, wanted)
    assert [gpu.index for gpu in lease.visible(GPUS)] == expected


def test_a_part_of_a_gpu_is_leased_under_its_own_name(monkeypatch):
    monkeypatch.setenv(lease.VISIBLE, "MIG-1234")
    assert [gpu.id for gpu in lease.visible(GPUS)] == ["MIG-1234"]


def test_no_gpu_says_why(tmp_path, monkeypatch):
    with pytest.raises(NoGpu, match="lists no NVIDIA GPU"):
        gpu_lease([], folder=tmp_path).__enter__()
    monkeypatch.setattr(lease, "installed", lambda: GPUS)
    monkeypatch.setenv(lease.VISIBLE, "5")
    with pytest.raises(NoGpu, match="'5' leaves none"):
        gpu_lease([], folder=tmp_path).__enter__()


def test_lock_files_are_not_put_where_a_link_leads(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(PermissionError, match="a link, or others can remove its files"):
        gpu_lease(GPUS, folder=tmp_path / "link").__enter__()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_in_which_others_could_remove_the_files_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(
        PermissionError, match=r"others can remove its files; remove it, or name another .* LABKIT_LOCKS"
    ):
        gpu_lease(GPUS, folder=tmp_path / "open").__enter__()


def test_leases_are_the_hosts_whatever_folder_temporary_files_go_to(tmp_path, monkeypatch):
    monkeypatch.delenv(lease.LOCKS, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert {folder.parent for folder in lease.folders()} <= {
        Path("/dev/shm"),
        Path("/tmp"),
        Path(tempfile.gettempdir()),
    }
    monkeypatch.setenv(lease.LOCKS, str(tmp_path / "locks"))
    assert lease.folders() == [tmp_path / "locks"]


def test_two_that_share_one_folder_of_locks_exclude_each_other(tmp_path, monkeypatch):
    """As two containers do that have /dev/shm in common and each its own /tmp."""
    shared, own, others = (tmp_path / name for name in ("shared", "own", "others"))
    monkeypatch.setattr(lease, "folders", lambda: [own, shared])
    with gpu_lease(GPUS[:1], say=silent):
        monkeypatch.setattr(lease, "folders", lambda: [others, shared])
        with pytest.raises(Busy):
            gpu_lease(GPUS[:1], timeout=0, say=silent).__enter__()
    with gpu_lease(GPUS[:1], timeout=0, say=silent):
        pass


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can act for two accounts")
def test_two_accounts_share_leases_and_can_write_nothing_of_each_other(open_folder):
    """Each with a careless umask; the first one makes the folder and the files."""
    code = """
        import os, sys, time
        from pathlib import Path
        from labkit.workflow.lease import Busy, Gpu, gpu_lease
        os.umask(0), os.setgroups([]), os.setgid(ACCOUNT), os.setuid(ACCOUNT)
        try:
            with gpu_lease([Gpu(0, "GPU-a", "first")], timeout=0, say=lambda text: None, folder=Path(PLACE)):
                print("held", flush=True)
                sys.stdin.readline()
        except Busy as problem:
            print("busy", problem)
        for file in Path(PLACE).iterdir():
            if file.stat().st_uid != ACCOUNT and (os.access(file, os.W_OK) or removed(file)):
                print("WRITABLE", file)
    """
    code = (
        "def removed(file):\n    try: file.unlink()\n    except OSError: return False\n    return True\n"
        + textwrap.dedent(code)
    )

    def of_account(number):
        text = code.replace("ACCOUNT", str(number)).replace("PLACE", repr(str(open_folder / "gpus")))
        return subprocess.Popen(
            [sys.executable, "-u", "-c", text],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    first = of_account(40001)
    assert first.stdout.readline() == "held\n"
    second, _ = of_account(40002).communicate(timeout=60)
    assert second == f"busy no free GPU; leased: first (process {first.pid})\n"
    first.communicate("\n", timeout=60)
    assert of_account(40002).communicate("\n", timeout=60)[0] == "held\n"
    assert of_account(40001).communicate("\n", timeout=60)[0] == "held\n"


def test_devices_come_from_the_driver_library(tmp_path):
    (tmp_path / "pynvml.py").write_text(
        textwrap.dedent("""
            def nvmlInit(): pass
            def nvmlShutdown(): pass
            def nvmlDeviceGetCount(): return 2
            def nvmlDeviceGetHandleByIndex(i): return i
            def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
            def nvmlDeviceGetName(handle): return "NVIDIA Made-Up"
            def nvmlSystemGetDriverVersion(): return "1.2"
        """)
    )
    code = "from labkit.workflow import lease; print([g.id for g in lease.installed()], lease.driver())"
    answer = python(code, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}").communicate(timeout=60)[0]
    assert answer.strip() == "['GPU-0', 'GPU-1'] 1.2"
