"""Where the lab keeps its files; independent of the current folder.

`LABKIT_ROOT` in the environment moves all of them (the tests do that).
"""

import os
from pathlib import Path

ROOT = Path(os.environ.get("LABKIT_ROOT") or Path(__file__).resolve().parents[1])

NOTEBOOKS = ROOT / "notebooks"
DATA = ROOT / "data"  # recorded measurements, committed
FIGURES = ROOT / "figures"  # drawn from data/, committed
RUNS = ROOT / "runs"  # what this machine measured, not committed
REPORTS = ROOT / "reports"  # executed notebooks and HTML, not committed
CACHE = ROOT / ".cache"  # may be deleted at any time
