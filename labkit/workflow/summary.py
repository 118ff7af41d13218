"""What `labkit list` says of each data file, kept on disk until the file or a source of the lab changes.

Reading all rows and hashing all that they ran takes seconds; this module alone needs neither pandas nor torch.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from labkit import paths

_PACKAGE = Path(__file__).resolve().parents[1]


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
    # Of where the files are, how large, and when they were written.
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in (path, *_sources())]
    kept = paths.CACHE / "summaries" / f"{hashlib.sha256(repr(stats).encode()).hexdigest()[:32]}.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        return Summary(**{**found, "days": tuple(found["days"])})
    from labkit.bench import records
    from labkit.workflow import recorded

    rows = recorded.read(path)
    days = sorted(set(rows["utc"].str[:10]))
    first_and_last = tuple(dict.fromkeys(days[:1] + days[-1:]))
    found = Summary(path.parent.name, here, len(rows), first_and_last, int(recorded.stale(rows).sum()))
    records.write_atomic(kept, json.dumps(asdict(found)).encode())
    return found


@cache
def _sources() -> tuple[Path, ...]:
    """What a hash can depend on: the lab's sources, and the toys of its tests."""
    import labkit.studies

    folders = {_PACKAGE, *map(Path, labkit.studies.__path__)}
    return tuple(sorted(path for folder in folders for path in folder.rglob("*.py")))
