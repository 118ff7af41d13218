"""An archive in parts, for a channel with a size limit: `cat NAME.part*` is the whole, NAME.sha256 its checksum."""

import hashlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PART = re.compile(r"(?P<whole>.+)\.part(?P<number>\d+)of(?P<count>\d+)")
_CHUNK = 1 << 20


def checksum(archive: Path) -> Path:
    """Write ARCHIVE.sha256, as `sha256sum -c` reads it; returns that file."""
    with open(archive, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    out = archive.with_name(f"{archive.name}.sha256")
    out.write_text(f"{digest}  {archive.name}\n")
    return out


def split(archive: Path, limit: int) -> list[Path]:
    """Put parts of at most `limit` bytes, and the checksum, in the archive's place; the archive, if it is small enough.

    Returns the files that there are then.
    """
    size = archive.stat().st_size
    if size <= limit:
        return [archive]
    count = -(-size // limit)
    width = len(str(count))
    made = []
    with open(archive, "rb") as file:
        for number in range(1, count + 1):
            part = archive.with_name(f"{archive.name}.part{number:0{width}}of{count}")
            with open(part, "wb") as out:
                left = limit
                while left and (data := file.read(min(left, _CHUNK))):
                    out.write(data)
                    left -= len(data)
            made.append(part)
    made.append(checksum(archive))
    archive.unlink()
    return made


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """The archive of which `path` is a part, put together while the context lasts; `path` itself if it is no part.

    ValueError naming the part that is missing, or if the whole is not what its checksum says.
    """
    if not (found := _PART.fullmatch(path.name)):
        yield path
        return
    name, count, width = found["whole"], int(found["count"]), len(found["count"])
    parts = [path.with_name(f"{name}.part{number:0{width}}of{count}") for number in range(1, count + 1)]
    sums = path.with_name(f"{name}.sha256")
    for needed in (*parts, sums):
        if not needed.is_file():
            raise ValueError(f"{needed}: missing; the archive came in {count} parts with {sums.name}")
    with tempfile.TemporaryDirectory() as folder:
        joined, digest = Path(folder) / name, hashlib.sha256()
        with open(joined, "wb") as out:
            for part in parts:
                with open(part, "rb") as file:
                    while data := file.read(_CHUNK):
                        digest.update(data)
                        out.write(data)
        if sums.read_text().split()[:1] != [digest.hexdigest()]:
            raise ValueError(f"{path.with_name(name)}: the parts are not the whole that {sums.name} is of")
        yield joined
