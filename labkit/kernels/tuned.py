"""Tables of tuned choices, one a GPU and kind of kernel: JSON files, found by the GPU's name.

Those of the GPUs that were measured are shipped with the package, `tables/<gpu>/<kind>.json`. LABKIT_TABLES in the
environment names further folders of the same form, divided as in PATH: what they have counts more.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

Table = TypeVar("Table")
SHIPPED = Path(__file__).parent / "tables"
VARIABLE = "LABKIT_TABLES"


def slug(name: str) -> str:
    """Folder name of a GPU: "NVIDIA H100 80GB HBM3" -> "nvidia-h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def folders(gpu: str) -> list[Path]:
    """Where there may be tables of the GPU of this name; later folders count more."""
    more = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    return [Path(base) / slug(gpu) for base in (SHIPPED, *more)]


@contextmanager
def chosen_for(gpu: str, chooser: Any) -> Iterator[None]:
    """While this lasts, a module `choose` chooses for tensors on any device what it would on the GPU of this name."""
    own = chooser._table
    chooser._table = lambda device: chooser.choices_of(gpu)
    try:
        yield
    finally:
        chooser._table = own


def read(path: Path, parse: Callable[[Any], Table]) -> Table | dict[Any, Any]:
    """What `parse` makes of a table's JSON; empty if there is no such file.

    ValueError naming the file if it is not such a table.
    """
    if not path.exists():
        return {}
    try:
        return parse(json.loads(path.read_text()))
    except (ValueError, TypeError, AttributeError, KeyError) as problem:
        raise ValueError(f"{path}: not a table of choices ({problem}); `labkit record` writes one") from None


def write(path: Path, table: Any) -> None:
    """Write a table's JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(json.dumps(table, indent=1) + "\n")
    os.chmod(name, 0o644)
    os.replace(name, path)
