"""Import a fetched file in a namespace of its own, so that two versions of a package live side by side.

A source's modules are called `labkit_sources.<name>.<their own name>`. What they import of their own package is looked
up in the same namespace, at any time, since their `__import__` is this one; where the manifest does not name a file,
`stubs` may; everything else is imported as usual. Only files that the manifest names are run, and only if their hash
is the manifest's.
"""

import ast
import builtins
import hashlib
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any

from labkit.sources.catalogue import Source, folder, is_fetched, manifest, source

ROOM = "labkit_sources"


class NotFetched(RuntimeError):
    """A source whose files are not on this machine; says how to get them."""


def load(name: str, module: str) -> ModuleType:
    """A module of a source, by its own name: load("sglang-0.5.9", "sglang.srt.layers.attention.fla.chunk").

    Raises KeyError for an unknown source, NotFetched, ImportError for a module that the manifest does not name, or for
    a file whose hash is not the manifest's.
    """
    made = source(name)
    if not is_fetched(made):
        raise NotFetched(f"not fetched: labkit fetch {made.package}")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    return import_module(f"{_prefix(made)}.{module}")


def changed(name: str, module: str, change: Callable[[ast.Module], ast.Module]) -> ModuleType:
    """A copy of a source's module with its syntax tree changed; everything that it imports stays as it was published.

    change: gets the tree that was parsed, and returns the one to run; there is one copy for each. Raises what `load`
    does, and what `change` raises.
    """
    original = load(name, module)
    label = f"{original.__name__}_{change.__name__}"
    if label in sys.modules:
        return sys.modules[label]
    text = ast.unparse(ast.fix_missing_locations(change(ast.parse(inspect.getsource(original)))))
    filename = f"<{label}>"
    copy = ModuleType(label)
    vars(copy).update({key: vars(original)[key] for key in ("__builtins__", "__package__")}, __file__=filename)
    sys.modules[label] = copy
    try:
        run_text(text, filename, vars(copy))
    except BaseException:
        del sys.modules[label]
        raise
    return copy


def run_text(text: str, filename: str, names: dict[str, Any]) -> None:
    """Run a module's text, which defines functions in `names`; `inspect`, and so Triton, finds it by the filename."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), names)


def _prefix(made: Source) -> str:
    return f"{ROOM}.{_slug(made.name)}"


def _slug(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _modules(made: Source) -> Mapping[str, str]:
    """Name of a module -> its file, of the Python files of a source."""
    paths = [PurePosixPath(path) for path in made.files if path.endswith(".py")]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): str(path) for path in paths}


def _stubs(made: Source) -> Mapping[str, Mapping[str, Any]]:
    """Name of a module -> its names. They need torch, which to know a source's hash does not."""
    from labkit.sources.stubs import STUBS

    return STUBS.get(made.called or made.package, {})


class _Finder(MetaPathFinder):
    """Finds the modules of sources: files of the manifest, stubs, and the packages that these are in."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        room, _, rest = fullname.partition(".")
        if room != ROOM:
            return None
        slug, _, name = rest.partition(".")
        if not rest:
            return spec_from_loader(fullname, _Stub({}), is_package=True)
        made = next((made for made in manifest().values() if _slug(made.name) == slug), None)
        return made and self._find(made, fullname, name)

    def _find(self, made: Source, fullname: str, name: str) -> ModuleSpec | None:
        modules, stubs = _modules(made), _stubs(made)
        is_package = not name or any(other.startswith(f"{name}.") for other in [*modules, *stubs])
        if name in stubs:
            return spec_from_loader(fullname, _Stub(stubs[name]), is_package=is_package)
        if name in modules:
            spec = spec_from_loader(fullname, _File(fullname, made, modules[name]), is_package=is_package)
            spec.submodule_search_locations = [] if is_package else None  # else its folder is looked into, unchecked
            return spec
        return spec_from_loader(fullname, _Stub({}), is_package=True) if is_package else None


class _Stub(Loader):
    """A module with the given names and nothing else."""

    def __init__(self, names: Mapping[str, Any]):
        self.names = names

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.names)


class _File(SourceFileLoader):
    """A file of a source. Leaves no bytecode beside it."""

    def __init__(self, fullname: str, made: Source, path: str):
        super().__init__(fullname, str(folder(made) / path))
        self.made, self.expected = made, made.files[path]

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        if path == self.path and (sha := hashlib.sha256(data).hexdigest()) != self.expected:
            raise ImportError(f"{path} has SHA-256 {sha}; allowed: {self.expected}. Fetch it again.")
        return data

    def set_data(self, path: str, data: bytes, *, _mode: int = 0o666) -> None:
        pass

    def exec_module(self, module: ModuleType) -> None:
        own = {name.partition(".")[0] for name in [*_modules(self.made), *_stubs(self.made)]}
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": partial(_import, _prefix(self.made), own)}
        super().exec_module(module)


def _import(
    prefix: str,
    own: set[str],
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """`__import__` of a source's module: what begins with a name of its own package is found in its namespace."""
    top = name.partition(".")[0]
    if level or top not in own:
        return builtins.__import__(name, globals, locals, fromlist, level)
    found = builtins.__import__(f"{prefix}.{name}", globals, locals, fromlist or ("",), 0)
    return found if fromlist else sys.modules[f"{prefix}.{top}"]
