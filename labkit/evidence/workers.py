"""Calls answered in fresh processes that compile, whatever this process does, and kept on disk.

A process is either in Triton's interpreter or compiling, and a notebook may be in either: so compiled evidence is asked
of worker processes, several at once. An answer is kept under `paths.CACHE` and asked for anew when any source of the
lab, a module named by the caller, or the version of torch or Triton changes.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from labkit import isolated, paths
from labkit.bench.records import write_atomic

PACKAGE = Path(__file__).resolve().parents[1]
COMPILING = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""}  # away from a GPU that may be timed meanwhile


def ask(
    function: str,
    requests: Sequence[Mapping[str, Any]],
    modules: Sequence[str] = (),
    env: Mapping[str, str | None] = COMPILING,
) -> list[Any]:
    """What "module:function" answers to each request (its keyword arguments), in their order.

    requests and answers are JSON. modules: modules outside the lab whose source the answers depend on. env: changes to
    the environment, always the same for a function. At most as many processes as there are cores, none of which should
    see a GPU. isolated.IsolatedError if a call fails; the answers that were there before stay on disk.
    """
    stamp = _stamp(modules)
    files = [paths.CACHE / "answers" / f"{_hash([stamp, function, request])}.json" for request in requests]
    missing = [(str(f), dict(r)) for f, r in dict(zip(files, requests, strict=True)).items() if not f.exists()]
    count = min(os.cpu_count() or 1, len(missing))
    if count:
        shares = [missing[i::count] for i in range(count)]
        target = f"{__name__}:answer"
        isolated.call_many([isolated.Call(target, [function, share], env=env) for share in shares], count)
    return [json.loads(file.read_text()) for file in files]


def resolve(function: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)


def answer(function: str, share: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """In a worker: call the function for every (file, keyword arguments) and write what it returns, as JSON."""
    for file, request in share:
        write_atomic(Path(file), json.dumps(resolve(function)(**request)).encode())


def _stamp(modules: Sequence[str]) -> str:
    """Hash of the versions and sources that an answer depends on."""
    sources = sorted(PACKAGE.rglob("*.py"))
    for name in modules:
        found = find_spec(name)
        if found is None or not found.origin:
            raise ModuleNotFoundError(f"no module {name!r} with a source file")
        sources.append(Path(found.origin))
    return _hash([_version("torch"), _version("triton"), *(f"{path}\n{path.read_text()}" for path in sources)])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:40]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
