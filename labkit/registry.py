"""The studies, in the order in which they are read. A new study adds one line."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.bench.spec import Study

NOTEBOOKS = {
    "machine": "00_machine",
    "state_layout": "01_state_layout",
    "gemv_coalescing": "02_gemv_coalescing",
    "persistent_tables": "03_persistent_tables",
    "moe_persistent_grid": "04_moe_persistent_grid",
    "batched_ffn": "05_batched_ffn",
    "gated_delta_today": "06_gated_delta_today",
}


def load(name: str) -> "Study":
    """The study called `name`; KeyError naming the known ones if there is none."""
    if name not in NOTEBOOKS:
        raise KeyError(f"unknown study {name!r}; known: {', '.join(NOTEBOOKS)}")
    return import_module(f"labkit.studies.{name}.study").STUDY


def trials(name: str) -> ModuleType | None:
    """The module `trials` of a study: its variants made ready for timing; None where a study has none."""
    module = f"labkit.studies.{name}.trials"
    return import_module(module) if find_spec(module) else None


def answer(name: str) -> ModuleType | None:
    """The module `answer` of a study: what its claims come to in sentences; None where a study has none."""
    module = f"labkit.studies.{name}.answer"
    return import_module(module) if find_spec(module) else None
