"""What `labkit list` and the index say of each data file, kept on disk until the file or a source of the lab changes.

Reading all rows and hashing all that they ran takes seconds; this module alone needs neither pandas nor torch.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

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
    def read() -> dict[str, Any]:
        from labkit.workflow import recorded

        rows = recorded.read(path)
        days = sorted(set(rows["utc"].str[:10]))
        first_and_last = tuple(dict.fromkeys(days[:1] + days[-1:]))
        return asdict(Summary(path.parent.name, here, len(rows), first_and_last, int(recorded.stale(rows).sum())))

    found = kept("rows", [path], read)
    return Summary(**{**found, "days": tuple(found["days"])})


def kept(what: str, files: Sequence[Path], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` says of data files, as JSON has it: made once, until a file or a source of the lab changes.

    what: a word for it, which with the files is its name.
    """
    # Of where the files are, how large, and when they were written.
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in (*files, *_sources())]
    name = hashlib.sha256(repr((what, stats)).encode()).hexdigest()[:32]
    place = paths.CACHE / "summaries" / f"{name}.json"
    if not place.exists():
        from labkit.bench import records

        records.write_atomic(place, json.dumps(make()).encode())
    return json.loads(place.read_text())


@cache
def _sources() -> tuple[Path, ...]:
    """What a hash can depend on: the lab's sources, releases of others by their hashes, and the toys of its tests."""
    import labkit.studies

    folders = {_PACKAGE, *map(Path, labkit.studies.__path__)}
    kinds = ("*.py", "*.cu", "*.toml")
    return tuple(sorted({path for folder in folders for kind in kinds for path in folder.rglob(kind)}))
