"""A real SLURM on this machine, for the tests: its daemons run as this user, with one node that has two devices.

Only the GPUs are pretended: SLURM hands out two character devices under that name, and sets CUDA_VISIBLE_DEVICES.
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONF = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=6
KillWait=2
MinJobAge=300
JobRequeue=1
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
# Where SLURM's commands look: a job's steps do not see SLURM_CONF, which the engine takes out of their environment.
# It is a link to the second, which leads to the SLURM that runs; root makes it, here or in .ci/run.
PLACE, LINK = Path("/etc/slurm/slurm.conf"), Path("/tmp/labkit-slurm.conf")
GRES = """
NodeName={host} Name=gpu File=/dev/zero
NodeName={host} Name=gpu File=/dev/full
"""


def missing() -> str:
    """What this machine lacks to run it; empty if nothing."""
    if os.geteuid() == 0 and not os.path.lexists(PLACE):
        PLACE.parent.mkdir(exist_ok=True)
        PLACE.symlink_to(LINK)
    if not (PLACE.is_symlink() and PLACE.readlink() == LINK):
        return f"{PLACE} is no link to {LINK}"
    lacking = [name for name in PROGRAMS if not shutil.which(name, path=_path())]
    return f"no {', '.join(lacking)}" if lacking else ""


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Slurm:
    """The daemons, in a folder of their own. env: what a process needs to find them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a socket's path must be short
        self.folder.chmod(0o755)
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}
        self.running: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        """Start everything and wait until the node can take jobs."""
        host, user, ports = socket.gethostname().partition(".")[0], getpass.getuser(), _free_ports(2)
        for name, text in (("slurm.conf", CONF), ("gres.conf", GRES)):
            (self.folder / name).write_text(text.format(user=user, host=host, folder=self.folder, ports=ports))
        LINK.unlink(missing_ok=True)  # of tests that were killed
        LINK.symlink_to(self.folder / "slurm.conf")
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"key": key, "socket": self.folder / "munge.socket", "log": self.folder / "munge.log"}
        files |= {"pid": self.folder / "munge.pid", "seed": self.folder / "munge.seed"}
        words = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in files.items()]
        self._start("munged", "--force", "--foreground", *words)
        _until(lambda: (self.folder / "munge.socket").exists())
        self._start("slurmctld", "-D")
        self.start_node()

    def start_node(self) -> None:
        """Start the node's daemon, and wait until it can take jobs."""
        self._start("slurmd", "-D")
        _until(lambda: self("sinfo", "--noheader", "--format=%T").strip() in ("idle", "mixed", "allocated"))

    def lose_node(self) -> None:
        """End the node as if its power had failed, with all that ran on it."""
        lost = self.running.pop("slurmd")
        for pid in [*_jobs_processes(self.folder), lost.pid]:
            _kill(pid)
        lost.wait()

    def _start(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self.running[name] = subprocess.Popen(
                [shutil.which(name, path=_path()), *words], env={**os.environ, **self.env}, stdout=out, stderr=out
            )

    def __call__(self, *words: str) -> str:
        """What a command of SLURM prints."""
        return subprocess.run(words, env={**os.environ, **self.env}, capture_output=True, text=True).stdout

    def ids(self, state: str = "RUNNING") -> list[str]:
        """The jobs in a state."""
        return self("squeue", "--noheader", f"--states={state}", "--format=%i").split()

    def stop(self) -> None:
        """End the daemons and the jobs, and remove the folder."""
        self("scancel", f"--user={getpass.getuser()}", "--full")
        for pid in _jobs_processes(self.folder):
            _kill(pid)
        for process in reversed(self.running.values()):
            process.kill()
            process.wait()
        LINK.unlink(missing_ok=True)
        shutil.rmtree(self.folder)


def _jobs_processes(folder: Path) -> list[int]:
    """The processes of jobs, which have this SLURM's configuration in their environment (Linux), and their keepers."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
            name = (environ.parent / "comm").read_text().strip()
        except OSError:
            continue  # it has ended, or is another's
        ours = f"SLURM_CONF={folder}/slurm.conf".encode() in variables
        if ours and (name == "slurmstepd" or any(one.startswith(b"SLURM_JOB_ID=") for one in variables)):
            found.append(int(environ.parent.name))
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _until(met: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        if time.monotonic() > deadline:
            raise TimeoutError("SLURM did not start")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
