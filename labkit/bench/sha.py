"""A hash of the source that runs, so that a figure and the code behind it cannot drift apart unseen.

The hash covers a launcher, its kernels and every helper of the lab that they name, as syntax trees. Definitions are
numbered in the order in which they are first named, so that neither where they live nor what they are called counts: a
move, a rename of a function or a file split in two change nothing. Nor do comments, formatting, docstrings, annotations
and checks of arguments. It needs neither torch nor Triton, and does not depend on the Python version.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from labkit.sources import catalogue

# Machinery that hands a kernel its arguments or times it, but does not change what the kernel does.
NOT_HASHED = (
    "labkit.kernels.launch",
    "labkit.kernels.tuned",
    "labkit.bench",
    "labkit.sweep",
    "labkit.sources",
    "labkit.paths",
)
_FILE, _RELEASED = "file:", "source:"
_CHECKS = ("check_", "_check_")  # how the names of functions begin that only refuse arguments
Source = str | tuple[str, ...]


class Definition(NamedTuple):
    """Where a name of the lab is defined; without a name, the module itself."""

    module: str
    name: str = ""


def kernel_sha(source: Source) -> str:
    """Hash of "module:function", or of several, and of all they name in the lab, 12 hexadecimal digits.

    Left out are functions called `check_…`, statements that only check (`if …: raise`), and annotations but for
    `tl.constexpr`. Of "file:PATH.py:function", a function that is not the lab's: the whole file, and the files beside
    it that it imports; OSError if it cannot be read. Of "source:NAME", a release of `labkit.sources`: its version and
    the hashes of its files, whether they are on this machine or not.
    ValueError if there is no such function, or what runs cannot be followed: a module named other than by an attribute
    of it (or `getattr` with a text), a name imported from where it is not defined.
    """
    if isinstance(source, str) and source.startswith(_FILE):
        return _file_sha(Path(source.removeprefix(_FILE).rpartition(":")[0]))
    return _lab_sha(source)


@cache  # a sweep asks for the same few functions once a variant and case, thousands of times
def _lab_sha(source: Source) -> str:
    texts, own = _texts_of_releases(source)
    return _digest("\n".join(texts + _walked(own).texts))


def _texts_of_releases(source: Source) -> tuple[list[str], tuple[str, ...]]:
    """A text for each release among several sources, and what of them is the lab's."""
    parts = (source,) if isinstance(source, str) else source
    released = [one.removeprefix(_RELEASED) for one in parts if one.startswith(_RELEASED)]
    return [catalogue.source(name).sha for name in released], tuple(o for o in parts if not o.startswith(_RELEASED))


@cache
def sha_within(module: str, name: str) -> str:
    """`kernel_sha` of a function, but of what other modules define only the names count."""
    return _digest("\n".join(_walked(f"{module}:{name}", within=module).texts))


def covered(source: Source) -> list[str]:
    """ "module:name" of every definition that the hash of a source covers, in the order in which they are named."""
    return [f"{one.module}:{one.name}" for one in _walked(_texts_of_releases(source)[1]).numbers]


def _walked(source: Source, within: str = "") -> "_Walk":
    walk = _Walk(within)
    for one in (source,) if isinstance(source, str) else source:
        module, _, name = one.partition(":")
        where = _resolve(module, name) if name else None
        if where is None or not where.name:
            raise ValueError(f"no function {name!r} in {module!r} to hash (given: {one!r})")
        walk.number(where)
    return walk


class _Walk:
    """The definitions that a source reaches: numbered, each written down once. within: those of this module alone."""

    def __init__(self, within: str = "") -> None:
        self.within = within
        self.numbers: dict[Definition, int] = {}
        self.texts: list[str] = []

    def number(self, where: Definition) -> str:
        """The definition's number as text; on the first time it is written down, and so is all that it names."""
        if where not in self.numbers:
            self.numbers[where] = len(self.texts)
            self.texts.append("")
            node = _definitions(where.module)[where.name]
            scope = _Scope(self, where.module, _imports(ast.walk(node)))
            self.texts[self.numbers[where]] = scope.node(node, leave=("name",))  # what it is called does not count
        return f"#{self.numbers[where]}"


class _Scope:
    """Writes syntax trees as text, every name of the lab in them as a number.

    local: what the definition imports itself; bound: its parameters and variables, which hide the module's names.
    fields: inside a class, where what is assigned is the class's own.
    """

    def __init__(
        self,
        walk: _Walk,
        module: str,
        local: dict[str, ast.ImportFrom],
        bound: frozenset[str] = frozenset(),
        fields: bool = False,
    ):
        self.walk, self.module, self.local, self.bound, self.fields = walk, module, local, bound, fields

    def text(self, value: object) -> str:
        """The canonical text of a node, of a list of them, or of a constant."""
        if isinstance(value, list):
            return "[" + ",".join(self.text(item) for item in value if not self._is_idle(item)) + "]"
        if not isinstance(value, ast.AST):
            return repr(value)
        where = self._named(value)
        return self.node(value) if where is None else where

    def node(self, node: ast.AST, leave: Iterable[str] = ()) -> str:
        """Empty fields are left out, since which exist differs between Python versions."""
        fields = {name: value for name, value in ast.iter_fields(node) if name not in (*_UNSEEN, *leave)}
        if isinstance(node, ast.arg | ast.AnnAssign) and not _is_constexpr(node.annotation):
            fields.pop("annotation", None)
        if isinstance(fields.get("body"), list):
            fields["body"] = _without_docstring(fields["body"])
        scopes = {"body": self._inside(node)}  # defaults and decorators are outside
        inner = (f"{n}={scopes.get(n, self).text(v)}" for n, v in sorted(fields.items()) if v not in (None, []))
        return f"{type(node).__name__}({','.join(inner)})"

    def _inside(self, node: ast.AST) -> "_Scope":
        """The scope of a function's or a class's body, or of any other node's."""
        if isinstance(node, ast.ClassDef):
            return _Scope(self.walk, self.module, self.local, self.bound, fields=True)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return self
        return _Scope(self.walk, self.module, self.local, self.bound | _bound(node) - set(self.local))

    def _is_idle(self, node: object) -> bool:
        """Whether a statement does nothing to what runs: an import of the lab's, or a check."""
        if isinstance(node, ast.ImportFrom):
            return (node.module or "").startswith("labkit")
        if isinstance(node, ast.If):
            return not node.orelse and all(isinstance(inner, ast.Raise) for inner in node.body)
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
                return name.startswith(_CHECKS)
        return False

    def _named(self, node: ast.AST) -> str | None:
        """What stands for a name of the lab, or for an attribute of a module of it; None for all other nodes."""
        match node:
            case ast.Name(ctx=ast.Store()) if self.fields:
                return None
            case ast.Name(id=name):
                return self._reference(self._find(name), name)
            case (
                ast.Attribute(value=ast.Name(id=name), attr=attribute)
                | ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=name), ast.Constant(value=str(attribute))])
            ):
                where = self._find(name)
                if where is not None and not where.name:
                    return self._reference(_resolve(where.module, attribute), attribute)
        return None

    def _find(self, name: str) -> Definition | None:
        if name in self.local:
            return _imported(self.local[name], name)
        return None if name in self.bound else _resolve(self.module, name)

    def _is_outside(self, where: Definition) -> bool:
        """Whether only the name of a definition counts."""
        elsewhere = bool(self.walk.within) and where.module != self.walk.within
        return elsewhere or where.module.startswith(NOT_HASHED)

    def _reference(self, where: Definition | None, name: str) -> str | None:
        if where is None:
            return None
        if self._is_outside(where) or name.rpartition(".")[2].startswith(_CHECKS):
            return f"Out({where.name})"
        if not where.name:
            raise ValueError(f"{self.module} hands the module {where.module} on as {name!r}: what runs is not known")
        return self.walk.number(where)


_UNSEEN = ("ctx", "kind", "type_comment", "returns")


def _is_constexpr(annotation: ast.AST | None) -> bool:
    """Whether Triton compiles a kernel anew for each value of a parameter that is annotated so."""
    return annotation is not None and "constexpr" in ast.unparse(annotation)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    is_docstring = body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1:] if is_docstring else body


def _bound(function: ast.AST) -> frozenset[str]:
    """Names that a function's parameters and statements bind."""
    names = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    stored = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return frozenset(names | {node.id for node in stored})


@cache
def _resolve(module: str, name: str) -> Definition | None:
    """Where a name that a module of the lab has is defined, through imports; None if that is not in the lab."""
    node = _definitions(module).get(name)
    if isinstance(node, ast.ImportFrom):
        return _imported(node, name)
    if node is not None:
        return Definition(module, name)
    is_package = (_origin(module) or "").endswith("__init__.py")
    return Definition(f"{module}.{name}") if is_package and _origin(f"{module}.{name}") else None


def _imported(node: ast.ImportFrom, name: str) -> Definition | None:
    """What a statement imports as `name`: a definition or a module of the lab, or None."""
    module = node.module or ""
    original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    if module.partition(".")[0] != "labkit":
        return None
    if (found := _resolve(module, original)) is None:
        raise ValueError(f"{original!r} of {module} cannot be followed: import it from where it is defined")
    return found


def _imports(nodes: Iterable[ast.AST]) -> dict[str, ast.ImportFrom]:
    found = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node for node in found for alias in node.names}


@cache
def _origin(module: str) -> str | None:
    """The file of a module; None if there is none."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # what should be its package is a module
        return None
    return spec.origin if spec else None


@cache
def _definitions(module: str) -> dict[str, ast.AST]:
    if (origin := _origin(module)) is None:
        raise ValueError(f"no module {module!r} to hash")
    found: dict[str, ast.AST] = {}
    for node in _top(ast.parse(Path(origin).read_text(encoding="utf-8")).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({n.id: node for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)})
        elif isinstance(node, ast.ImportFrom):
            found.update(_imports([node]))
    return found


def _top(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under an `if` or a `try` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top(node.body)


def forget() -> None:
    """Read the sources anew: for tests that change them."""
    for kept in (_lab_sha, sha_within, _resolve, _definitions, _origin):
        kept.cache_clear()


# Files of a reader's own


def _file_sha(path: Path) -> str:
    parts: dict[str, str] = {}
    todo = [path]
    while todo:
        file = todo.pop()
        text = file.read_text(encoding="utf-8")
        try:
            tree = ast.parse(text)
        except SyntaxError:  # it cannot run, but may be mended
            parts[file.name] = text
            continue
        for node in ast.walk(tree):
            if isinstance(getattr(node, "body", None), list):
                node.body = _without_docstring(node.body)
        parts[file.name] = ast.dump(tree)
        names = {name.partition(".")[0] for node in ast.walk(tree) for name in _modules(node)}
        beside = {path.parent / f"{name}.py" for name in names}
        todo += [file for file in beside if file.name not in parts and file not in todo and file.is_file()]
    return _digest("\n".join(f"{name}={parts[name]}" for name in sorted(parts)))


def _modules(node: ast.AST) -> list[str]:
    """The modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
