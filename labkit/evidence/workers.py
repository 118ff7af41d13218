"""Calls answered in fresh processes that compile, whatever this process does, and kept on disk.

A process is either in Triton's interpreter or compiling, and a notebook may be in either. An answer is kept under
`paths.CACHE` and asked for anew when the version of torch or Triton changes, or a source that it can depend on: of the
function, of the functions and studies that the request names, and of all that they import from the lab, but for what
only shows or judges. Those that the notebooks ask for are recorded beside the data, by the same hash, so that only who
has other sources or versions waits for a compiler.
"""

import ast
import functools
import hashlib
import json
import math
import os
import pkgutil
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from labkit import host, isolated, paths, registry
from labkit.bench.records import write_atomic

T = TypeVar("T")
PACKAGE = Path(__file__).resolve().parents[1]
SHOWS = re.compile(r"labkit\.(cli|lab|report|workflow)(\..+)?|labkit\..+[._](views|claims|answer|shown|explore)")
_NAME = re.compile(r"([A-Za-z_][\w.]*)(:\w+)?")
RECORDED = "offline.json"  # in data/
_AT_LEAST = 3  # requests for a process of their own: to compile that many takes about as long as to start it
COMPILING = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""}  # away from a GPU that may be timed meanwhile


def ask(
    function: str,
    requests: Sequence[Mapping[str, Any]],
    modules: Sequence[str] = (),
    env: Mapping[str, str | None] = COMPILING,
) -> list[Any]:
    """What "module:function" answers to each request (its keyword arguments), in their order.

    requests and answers are JSON. modules: modules outside the lab whose source the answers depend on. env: changes to
    the environment, always the same for a function. As many processes as are worth starting, and at most as this one
    has cores; none of them should see a GPU.
    isolated.IsolatedError if a call fails; the answers that were there before stay on disk.
    """
    files = files_of(function, requests, modules)
    for file in files:
        if not file.exists() and file.stem in recorded():
            write_atomic(file, json.dumps(recorded()[file.stem]).encode())
    missing = [(str(f), dict(r)) for f, r in dict(zip(files, requests, strict=True)).items() if not f.exists()]
    count = min(_cores(), math.ceil(len(missing) / _AT_LEAST))
    if count:
        share(f"{__name__}:answer", function, missing, count=count, env=env)
    return [json.loads(file.read_text()) for file in files]


@functools.cache
def recorded() -> Mapping[str, Any]:
    """Hash -> answer, of data/; nothing if there is no such file, or it cannot be read."""
    try:
        return json.loads((paths.DATA / RECORDED).read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def record(folder: Path, more: bool) -> None:
    """Make data/ hold the answers in a folder. more: beside those that it holds."""
    answers = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")} | (recorded() if more else {})
    lines = [f"{json.dumps(name)}: {json.dumps(answers[name])}" for name in sorted(answers)]
    write_atomic(paths.DATA / RECORDED, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    recorded.cache_clear()


def kept_in() -> Path:
    """The folder of the answers, which LABKIT_ANSWERS in the environment names."""
    return Path(os.environ.get("LABKIT_ANSWERS") or paths.CACHE / "answers")


def _cores() -> int:
    """How many cores there are for this process: of notebooks that run at once each has its share."""
    share = os.environ.get("OMP_NUM_THREADS", "")
    return int(share) if share.isdecimal() and int(share) else host.cores()


def files_of(function: str, requests: Sequence[Mapping[str, Any]], modules: Sequence[str] = ()) -> list[Path]:
    """Where the answers are kept; the arguments are those of `ask`."""
    stamped = functools.cache(stamp)  # many requests reach the same sources
    always = {_module(function), *modules}
    stamps = [stamped(frozenset(always | named(request))) for request in requests]
    hashes = [_hash([one, function, request]) for one, request in zip(stamps, requests, strict=True)]
    return [kept_in() / f"{code}.json" for code in hashes]


def answer(function: str, wanted: Sequence[tuple[str, Mapping[str, Any]]], taken: str) -> None:
    """In a worker: call the function for (file, keyword arguments) and write what it returns, as JSON.

    taken: as `free` takes it.
    """
    isolated.collect_seldom()
    for file, request in free(wanted, taken):
        write_atomic(Path(file), json.dumps(isolated.named(function)(**request)).encode())


def share(target: str, *arguments: Any, count: int, env: Mapping[str, str | None]) -> list[Any]:
    """What each of so many processes returns that share some work: they call "module:function" with the arguments.

    The function's last argument is a folder, as `free` takes it. env: of the processes. IsolatedError if one fails.
    """
    with tempfile.TemporaryDirectory() as taken:
        return isolated.call_many([isolated.Call(target, (*arguments, taken), env=env)] * count, count)


def free(items: Sequence[T], taken: str) -> Iterator[T]:
    """In a worker: those of the items that no other worker has taken when it asks for the next.

    taken: a folder in which each worker marks what it takes: some items take a hundred times as long as others, so that
    no division beforehand would be even.
    """
    for place, item in enumerate(items):
        try:
            (Path(taken) / str(place)).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield item


def _module(function: str) -> str:
    return function.partition(":")[0]


def named(request: Any) -> set[str]:
    """The modules of the functions ("module:function") and studies that a request, or a part of one, names."""
    if isinstance(request, Mapping | list | tuple):
        return set().union(*map(named, request.values() if isinstance(request, Mapping) else request))
    if request in registry.NOTEBOOKS:
        return _of_study(request)
    match = _NAME.fullmatch(request) if isinstance(request, str) else None
    return {match[1]} if match and match[2] and _source(match[1]) else set()


def _of_study(name: str) -> set[str]:
    """The modules that a study's variants may call: all of its folder, since its table names them as text."""
    study = registry.load(name).variants.__module__
    folder = study.rpartition(".")[0]
    beside = {one.name for one in pkgutil.iter_modules(import_module(folder).__path__, f"{folder}.")}
    return {study} | {one for one in beside if not SHOWS.fullmatch(one)}


def stamp(modules: Iterable[str]) -> str:
    """Hash of the versions, the lab's tables (JSON), and the sources that are reached from these modules."""
    tables = [path.read_text() for path in sorted(PACKAGE.rglob("*.json"))]
    return _hash([_version("torch"), _version("triton"), tables, reached(modules)])


def reached(modules: Iterable[str]) -> dict[str, str]:
    """The sources of modules and of all that they import from the lab, by name; ModuleNotFoundError if one has none."""
    found: dict[str, str] = {}
    ahead = list(modules)
    while ahead:
        name = ahead.pop()
        if (path := _source(name)) is None:
            raise ModuleNotFoundError(f"no module {name!r} with a source file")
        found[name] = path.read_text()
        wanted = {one for one in _imports(found[name]) if not SHOWS.fullmatch(one) and _source(one)}
        ahead += wanted - found.keys() - set(ahead)
    return found


@functools.lru_cache(1000)  # a notebook asks many times, and sources seldom change meanwhile
def _imports(text: str) -> frozenset[str]:
    """What a source may import from the lab, or have called by its name, anywhere; some are no modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := _NAME.fullmatch(node.value)):
            found.add(match[1])
    return frozenset(name for name in found if name.startswith("labkit."))


def _source(module: str) -> Path | None:
    """The file of a module, if there is such a module and it has one."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # what should be its package is a module
        return None
    return Path(found.origin) if found and found.has_location else None


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:40]


def _version(name: str) -> str:
    try:
        return metadata.version(name).partition("+")[0]  # whatever it was built for
    except metadata.PackageNotFoundError:
        return ""
