"""What goes wrong on real machines: each is said in a line, and nothing that was measured is lost."""

import os
import random
import shlex
import shutil
import stat
import subprocess
import sys

import light
import pytest
from test_batch import batches, fleet, measured, options, sweep_of
from toy_lab import SLUG

from labkit import paths
from labkit.workflow import archive

CASES = range(1, 41)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    found = fleet(tmp_path)
    found.enter(monkeypatch)
    return found


def mounted(toy, script, env):
    """Run a shell script where file systems can be mounted, which are gone with it. labkit: the toy's command."""
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this system does not let the tests mount file systems")
    command = shlex.join([sys.executable, str(toy.root / "driver.py")])
    process = toy.started([*unshare, "sh", "-c", f'labkit() {{ {command} "$@"; }}\n{script}'], **env)
    out, err = process.communicate(timeout=180)
    return subprocess.CompletedProcess(script, process.returncode, out, err)


def test_a_full_disk_is_named_and_with_room_the_sweep_goes_on(toy):
    sweep_of(toy, *batches(CASES))
    (toy.root / "runs").mkdir()
    script = """
        mount -t tmpfs -o size=96k none runs
        labkit run --sweep sweep.yaml; echo "status $?"
        wc -l <log
        mount -o remount,size=64m runs
        labkit run --sweep sweep.yaml >&2; echo "status $?"
        cp -r runs kept
    """
    done = mounted(toy, script, options(toy, gpus=1))
    assert "No space left on device" in done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("status")] == ["status 1", "status 0"], done.stderr
    before = next(int(line) for line in lines if line.strip().isdecimal())
    assert 0 < before < 2 * len(CASES)
    assert len((toy.root / "log").read_text().splitlines()) <= 2 * len(CASES) + 1  # only the last case is repeated
    assert len(measured(toy, "kept")["case"].unique()) == len(CASES)


@pytest.mark.parametrize("folder", ["runs", "data"])
def test_a_folder_that_cannot_be_written_is_named(toy, folder):
    toy.measured(toy.rows(), base="made/runs")
    archive.pack(toy.root / "made.tar", toy.root / "made/runs")
    sweep_of(toy, *batches([1]))
    (toy.root / folder).mkdir()
    command = "run --sweep sweep.yaml" if folder == "runs" else "record made.tar"
    done = mounted(toy, f"mount -t tmpfs -o ro none {folder}\nlabkit {command}", options(toy))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: [Errno 30] Read-only file system: ")
    assert str(toy.root / folder) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("where", ["runs", "runs/jobs/01_layers--batches-1"])
def test_a_damaged_file_of_rows_is_named_and_nothing_is_lost(toy, where):
    """Of the lab's, or of a job's own."""
    sweep = str(sweep_of(toy, *batches([1], [2])))
    damaged = toy.write(f"{where}/{SLUG}/layers.parquet", "no rows")
    done = toy.labkit("run", "--sweep", sweep, **options(toy))
    assert done.returncode == 1
    assert "failed: 01_layers--batches-1: " in done.stderr
    assert f"{damaged}: not a readable Parquet file" in done.stderr
    count = len((toy.root / "log").read_text().splitlines())
    assert count == (4 if where == "runs" else 2)
    damaged.unlink()
    again = toy.labkit("run", "--sweep", sweep, **options(toy))
    assert again.returncode == 0, again.stderr
    assert len(measured(toy)["case"].unique()) == 2
    assert len((toy.root / "log").read_text().splitlines()) == 4


def test_a_clock_that_jumps_changes_nothing(toy):
    """Files of any age are done; what a clock that is behind says of later rows does not make them the earlier ones."""
    sweep = str(sweep_of(toy, *batches([1], [2])))
    assert toy.labkit("run", "--sweep", sweep, **options(toy)).returncode == 0
    chance = random.Random(3)
    for path in (toy.root / "runs").rglob("*"):
        seconds = chance.choice([0, 4e9])
        os.utime(path, (seconds, seconds))
    again = toy.labkit("run", "--sweep", sweep, **options(toy))
    assert again.returncode == 0, again.stderr
    assert len((toy.root / "log").read_text().splitlines()) == 4
    for utc, ns in (("2025-11-21T10:00:00+00:00", [1000]), ("1970-01-01T00:00:00+00:00", [2000])):
        toy.measured(toy.rows(ns=ns, utc=utc))
        archive.promote()
    assert {tuple(samples) for samples in measured(toy, "data")["samples_ns"]} == {(2000,)}
    assert paths.DATA.exists()


def test_locks_of_dead_processes_hold_nobody_up(toy):
    sweep = str(sweep_of(toy, *batches(CASES)))
    process = toy.start("run", "--sweep", sweep, **options(toy, gpus=1))
    while not (toy.root / "log").exists():
        assert process.poll() is None
    process.kill()
    process.communicate()
    left = {path.name for path in [*(toy.root / "runs").rglob(".*lock"), *(toy.tmp() / "gpus").iterdir()]}
    assert {".lock", "GPU-toy-0.lease", "GPU-toy-0.use"} <= left
    done = toy.labkit("run", "--sweep", sweep, **options(toy, gpus=1))
    assert done.returncode == 0, done.stderr
    assert not any(light.overlaps(times) for times in light.spans(toy.root / "log").values())


def test_no_other_account_can_write_what_a_run_writes(toy):
    """With a umask that forbids nothing. In the folder of locks all may make files, and none remove another's."""
    sweep = str(sweep_of(toy, *batches([1])))
    toy.tmp()
    before, mask = set(toy.root.rglob("*")), os.umask(0)
    try:
        done = toy.labkit("run", "--sweep", sweep, **options(toy))
    finally:
        os.umask(mask)
    assert done.returncode == 0, done.stderr
    made = set(toy.root.rglob("*")) - before - {toy.root / "log"}  # which the toy itself writes
    assert len(made) > 20
    modes = {path: path.lstat().st_mode for path in made if not path.is_symlink()}
    open_ = [path for path, mode in modes.items() if mode & 0o022]
    assert open_ in ([], [toy.tmp() / "gpus"])
    assert all(modes[path] & stat.S_ISVTX for path in open_)
