"""What `labkit list` and the index say of each data file, kept on disk until the file or a source of the lab changes.

Reading all rows and hashing all that they ran takes seconds; this module alone needs neither pandas nor torch.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.workflow.store import kept


@dataclass(frozen=True)
class Summary:
    """A study's rows of one GPU. days: the first and the last of measuring; stale: rows of an earlier kernel."""

    gpu: str
    here: bool
    rows: int
    days: tuple[str, ...]
    stale: int


def summaries(study: str) -> list[Summary]:
    """Of every GPU, the recorded ones first. RecordError if a file cannot be used."""
    return [_summary(study, path, here) for path, here in paths.data_files(study)]


def _summary(study: str, path: Path, here: bool) -> Summary:
    def read() -> dict[str, Any]:
        from labkit.workflow import recorded

        rows = recorded.read(path)
        days = sorted(set(rows["utc"].str[:10]))
        first_and_last = tuple(dict.fromkeys(days[:1] + days[-1:]))
        return asdict(Summary(path.parent.name, here, len(rows), first_and_last, int(recorded.stale(rows).sum())))

    found = kept("rows", [path], read)
    return Summary(**{**found, "days": tuple(found["days"])})
