"""Where the lab keeps its files; independent of the current folder.

`LABKIT_ROOT` in the environment moves all of them, `LABKIT_REPORTS` the reports alone (the tests do that),
`LABKIT_RUNS` what is measured here (a job measures into a folder of its own: workflow/jobs.py).
"""

import os
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(os.environ.get("LABKIT_ROOT") or Path(__file__).resolve().parents[1])

NOTEBOOKS = ROOT / "notebooks"
DATA = ROOT / "data"  # recorded measurements, committed
FIGURES = ROOT / "figures"  # drawn from data/, committed
RUNS = Path(os.environ.get("LABKIT_RUNS") or ROOT / "runs")  # what this machine measured, not committed
REPORTS = Path(os.environ.get("LABKIT_REPORTS") or ROOT / "reports")  # executed notebooks and HTML, not committed
TABLES = ROOT / "labkit" / "kernels" / "tables"  # choices tuned on recorded GPUs, committed and shipped
SUFFIX = os.environ.get("LABKIT_SUFFIX", "")  # of the figures' names, where a run shows a part (workflow/filters.py)
CACHE = ROOT / ".cache"  # may be deleted at any time

# What was tuned on this machine counts more than what is shipped: here, and in the processes that this one starts.
os.environ.setdefault("LABKIT_TABLES", str(RUNS))

# Where Triton keeps what it compiles, and which assembler it uses, as they are by default. Said, because torch.compile
# otherwise changes both for the rest of a process that uses it, which then compiles anew what had been compiled ahead,
# and by another version's assembler than the kernels that it is timed against.
_HOME = os.environ.get("TRITON_HOME") or Path.home()
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(_HOME, ".triton", "cache")))
if (_TRITON := find_spec("triton")) and _TRITON.origin:
    _PTXAS = Path(_TRITON.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if _PTXAS.exists():
        os.environ.setdefault("TRITON_PTXAS_PATH", str(_PTXAS))


def recorded(file: Path) -> Path:
    """Where data/ has what runs/<gpu>/<name>, or such a folder of another run, has in this file."""
    return DATA / file.parent.name / file.name


def recorded_gpus() -> list[str]:
    """The GPUs, as folder names, that data/ holds measurements of."""
    return sorted({path.parent.name for path in DATA.glob("*/*.parquet")})


def git(*words: str) -> list[str]:
    """A command of git on the lab's tree, whoever owns the files: one that was copied here has commits, too."""
    return ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *words]


def data_files(study: str, *, runs: bool = True) -> list[tuple[Path, bool]]:
    """Data file of a study, and whether it was measured here, for every GPU; the recorded ones first."""
    bases = ((DATA, False), (RUNS, True))[: 2 if runs else 1]
    return [(path, here) for base, here in bases for path in sorted(base.glob(f"*/{study}.parquet"))]
