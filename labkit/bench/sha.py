"""A hash of the source that runs, so that a figure and the code behind it cannot drift apart unseen.

The hash covers a launcher, its kernels and every helper of the lab that they name, as syntax trees: comments,
formatting and docstrings do not count. It needs neither torch nor Triton, and does not depend on the Python version.
"""

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# Machinery that hands a kernel its arguments or times it, but does not change what the kernel does.
_NOT_HASHED = ("labkit.launch", "labkit.bench", "labkit.paths")
_FILE = "file:"


def kernel_sha(source: str) -> str:
    """Hash of "module:function" and of all it names in the lab, 12 hexadecimal digits.

    Argument checks (functions called `check_…`) are left out. ValueError if there is no such function.
    Of "file:PATH.py:function", a function that is not the lab's: the whole file, and the files beside it that it
    imports; OSError if it cannot be read.
    """
    if source.startswith(_FILE):
        return _file_sha(Path(source.removeprefix(_FILE).rpartition(":")[0]))
    return _lab_sha(source)


@cache  # a sweep asks for the same few functions once a variant and case, thousands of times
def _lab_sha(source: str) -> str:
    module, _, name = source.partition(":")
    if not name or name not in _definitions(module):
        raise ValueError(f"no function {name!r} in {module!r} to hash (given: {source!r})")
    parts: dict[tuple[str, str], str] = {}
    _collect(module, name, parts)
    text = "\n".join(f"{key}={parts[key]}" for key in sorted(parts))
    return _digest(text)


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
        parts[file.name] = _canonical(tree)
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


def _collect(module: str, name: str, parts: dict[tuple[str, str], str]) -> None:
    if (module, name) in parts or name.startswith("check_"):
        return
    node = _definitions(module).get(name)
    if isinstance(node, ast.ImportFrom):
        _follow(node, name, "", parts)
    if node is None or isinstance(node, ast.ImportFrom):
        return
    parts[module, name] = _canonical(node)
    local = _imports(ast.walk(node))  # a study imports its kernels where it needs them
    known = _definitions(module) | local
    for used in ast.walk(node):
        if isinstance(used, ast.Name) and used.id in local:
            _follow(local[used.id], used.id, "", parts)
        elif isinstance(used, ast.Name):
            _collect(module, used.id, parts)
        elif isinstance(used, ast.Attribute) and isinstance(used.value, ast.Name):
            source = known.get(used.value.id)
            if isinstance(source, ast.ImportFrom):
                _follow(source, used.value.id, used.attr, parts)


def _follow(node: ast.ImportFrom, name: str, attribute: str, parts: dict[tuple[str, str], str]) -> None:
    """Collect what is imported as `name`; with an attribute, that of the module which `name` stands for, if it does."""
    original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    module, wanted = (f"{node.module}.{original}", attribute) if attribute else (node.module or "", original)
    if module.startswith("labkit") and not module.startswith(_NOT_HASHED) and _exists(module):
        _collect(module, wanted, parts)


def _imports(nodes: Iterable[ast.AST]) -> dict[str, ast.ImportFrom]:
    found = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node for node in found for alias in node.names}


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # what should be its package is a module
        return False


@cache
def _definitions(module: str) -> dict[str, ast.AST]:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.origin:
        raise ValueError(f"no module {module!r} to hash")
    found: dict[str, ast.AST] = {}
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({n.id: node for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)})
        elif isinstance(node, ast.ImportFrom):
            found.update(_imports([node]))
    return found


def _canonical(node: object) -> str:
    """The syntax tree as text; empty fields are left out, since which exist differs between Python versions."""
    if isinstance(node, list):
        return "[" + ",".join(map(_canonical, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment")}
    body = fields.get("body")
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        fields["body"] = body[1:]  # the docstring
    inner = ",".join(f"{name}={_canonical(value)}" for name, value in sorted(fields.items()) if value not in (None, []))
    return f"{type(node).__name__}({inner})"
