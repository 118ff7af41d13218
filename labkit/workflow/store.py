"""What takes seconds to find out, kept on disk until a data file or a source of the lab changes.

This module alone needs neither pandas nor torch.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from labkit import paths

_PACKAGE = Path(__file__).resolve().parents[1]


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
