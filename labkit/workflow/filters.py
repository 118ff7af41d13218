"""Runs that show a part: how their files are called, and whether anything is recorded of it.

A run whose parameters change what is shown writes beside the full page: `01_state_layout--batches-7.html`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.bench.spec import Case, Study
from labkit.sweep.added import PARAMETER as ADD

SIGN = "--"  # begins the part of a file's name that says which part is shown
QUICK = "quick"  # the notebooks' parameter of a quick look
LONGEST = 60  # characters of that part; a longer one is cut, and told apart by a hash
Key = tuple[str, str]  # op and case, as the columns of recorded rows have them


class Unrecorded(ValueError):
    """Nothing is recorded of what was asked for; the message names what is."""


def suffix(changed: Mapping[str, Any]) -> str:
    """What a run with these parameters adds to the names of its files; empty if it changes none.

    Letters, digits, and "-_.,": the text of the values, and a hash where that had to be altered or is too long.
    """
    if not changed:
        return ""
    plain = SIGN + SIGN.join(_words(name, value) for name, value in changed.items())
    safe = re.sub(r"[^\w.,-]+", "_", plain, flags=re.ASCII)
    if safe == plain and len(safe) <= LONGEST:
        return safe
    digest = hashlib.sha256(json.dumps(dict(changed), sort_keys=True).encode()).hexdigest()[:8]
    return f"{safe[: LONGEST - 9].rstrip('-.,')}-{digest}"


def said(changed: Mapping[str, Any]) -> str:
    """The parameters in words: "batches=1,7, gpu=nvidia-h200"."""
    return ", ".join("a quick look" if name == QUICK else f"{name}={_text(value)}" for name, value in changed.items())


def _words(name: str, value: Any) -> str:
    if name == "source":
        return str(value)
    if name == QUICK:
        return name
    if name == ADD:  # without the folders; that the text is altered tells two files of one name apart
        value = [f"{Path(file).name}:{function}" for file, _, function in (text.rpartition(":") for text in value)]
    return f"{name}-{_text(value) or 'none'}"


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


# What is recorded


def check(study: Study, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Unrecorded, if of a value given for a parameter nothing is recorded on the GPUs that would be shown.

    values: what was given; defaults: all parameters of the notebook. A study that was never recorded is not refused.
    """
    files = {path.parent.name: path for path, _ in paths.data_files(study.name, runs=False)}
    gpu = "" if values.get("source") == "predicted" else values.get("gpu", "")
    if not files:
        return
    if gpu and gpu not in files:
        raise Unrecorded(f"{study.name}: gpu is {gpu!r}, of which nothing is recorded; recorded: {', '.join(files)}")
    have = {key for name, path in files.items() if gpu in ("", name) for key in keys_of(path)}
    asked = {name: values.get(name, default) for name, default in defaults.items() if name in study.parameters}
    for name in asked:
        if asked[name] != defaults[name] and (instead := _instead(study, asked, name, defaults[name], have)):
            where = f" on {gpu}" if gpu else ""
            text = f"{study.name}: parameter {name} is {asked[name]!r}, of which nothing is recorded"
            raise Unrecorded(f"{text}{where}{instead}")


def _instead(study: Study, asked: Mapping[str, Any], name: str, default: Any, have: Set[Key]) -> str:
    """What is recorded, if nothing is that this parameter chooses; else empty, as where it chooses no case alone."""
    items = _items(asked[name])
    chosen = [_chosen(study, asked, name, item, default) for item in items]
    if not any(chosen) or any(_keys(cases) & have for cases in chosen):
        return ""
    known = dict.fromkeys([*_items(default), *_seen(chosen, items, have)])
    recorded = [one for one in known if _keys(_chosen(study, asked, name, one, default)) & have]
    if all(isinstance(one, int | float) for one in recorded):
        recorded.sort()
    others = [f"{other}={_text(value)}" for other, value in asked.items() if other != name and value]
    return f"; recorded: {', '.join(map(str, recorded))}" if recorded else f" with {', '.join(others)}"


def _chosen(study: Study, asked: Mapping[str, Any], name: str, item: Any, default: Any) -> list[Case]:
    """The cases that are there because of this value of a parameter: not with the other values that it has by default.

    Empty for a value that is not allowed.
    """
    many = isinstance(default, list)
    value = [item] if many else item
    if study.parameters[name](value):
        return []
    rest = [other for other in default if other != item] if many else default
    with_rest = _keys(study.cases({**asked, name: rest})) if rest != [] else set()
    return [case for case in study.cases({**asked, name: value}) if case.id not in with_rest]


def _seen(chosen: list[list[Case]], items: list[Any], have: Set[Key]) -> Iterator[Any]:
    """What recorded cases have where those chosen have the value asked for: values that are no default."""
    cases = [(case, item) for found, item in zip(chosen, items, strict=True) for case in found]
    ops = {case.op for case, _ in cases}
    names = {name for case, _ in cases for name in case.params}
    same = [name for name in names if all(case.params.get(name) == item for case, item in cases)]
    for op, key in have if same else ():
        if op in ops and (value := json.loads(key).get(same[0])) is not None:
            yield value


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _keys(cases: list[Case]) -> set[Key]:
    return {case.id for case in cases}


def keys_of(path: Path) -> set[Key]:
    """The cases of a data file, of which only two columns are read; none if it is no such file, which others say."""
    import pyarrow
    import pyarrow.parquet

    try:
        columns = pyarrow.parquet.read_table(path, columns=["op", "case"])
    except (pyarrow.ArrowException, OSError):
        return set()
    return set(zip(*(columns[name].to_pylist() for name in ("op", "case")), strict=True))
