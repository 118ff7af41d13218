"""GPUs by their data sheets (`gpus.toml`, which names the source of each). Quick to import: a shell completes names."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from labkit.kernels.tuned import slug


@cache
def sheets() -> dict[str, dict[str, Any]]:
    """Name -> figures of a data sheet; `recorded`: folder name of one that data/ may hold measurements of."""
    return tomllib.loads((Path(__file__).parent / "gpus.toml").read_text())


def unmeasured() -> dict[str, str]:
    """Folder name -> name of the GPUs that are known by their data sheet alone: "rtx-4090" -> "RTX 4090"."""
    return {slug(name): name for name, sheet in sheets().items() if "recorded" not in sheet}


def of_recorded(folder: str) -> str:
    """The name of the data sheet of a recorded GPU; empty if there is none."""
    return next((name for name, sheet in sheets().items() if sheet.get("recorded") == folder), "")
