"""The GPUs that can be asked for though nobody measured them. Quick to import: a shell completes their names."""

from pathlib import Path

from labkit import paths
from labkit.evidence import sheets


def predictable() -> dict[str, str]:
    """Folder name -> how it is known, of every GPU that can be predicted: by data sheet, or by `00_machine` alone."""
    found = {name: f"{sheet}, by its data sheet" for name, sheet in sheets.unmeasured().items()}
    return found | {name: f"by its run of 00_machine ({folder.parent.name}/)" for name, folder in bare().items()}


def bare() -> dict[str, Path]:
    """The folders, by name, of the GPUs on which `00_machine` has run, and no other study."""
    folders: dict[str, set[Path]] = {}
    for path in (*paths.RUNS.glob("*/*.parquet"), *paths.DATA.glob("*/*.parquet")):
        folders.setdefault(path.parent.name, set()).add(path)
    return {
        name: next(iter(files)).parent
        for name, files in sorted(folders.items())
        if {path.stem for path in files} == {"machine"}
    }
