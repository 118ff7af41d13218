"""Public names of a package that are imported when they are first asked for, so that none costs what another needs."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exported(package: str, where: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """A package's `__getattr__` and `__all__`. where: module of the package -> its public names, divided by spaces."""
    modules = {name: module for module, names in where.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has: {', '.join(sorted(modules))}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return __getattr__, sorted(modules)
