"""Functions of the reader's own as further variants of a study: `labkit run STUDY --add FILE.py:FUNCTION`.

They are checked and timed as the study's variants are. A function is imported only in processes that may end. Before it
joins the others on a GPU, it is tried alone in one: what ends that process, or never comes back, is refused with its
reason, and ends no one else's measurement. What else is refused, with what it did: `labkit/sweep/guard.py`.
"""

import ast
import faulthandler
import hashlib
import importlib.util
import inspect
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pandas as pd

from labkit import isolated, registry
from labkit.bench import machine, records, verdict
from labkit.bench.spec import ADDED, Case, Study, Trial, Variant
from labkit.sweep import case as case_runner
from labkit.sweep import interpreter

PARAMETER = "add"  # of the notebooks whose studies take functions
PATIENCE_S = 300  # for one case: compiling and tuning included
Refused = Mapping[str, Mapping[str, str]]  # variant -> case -> why it is not called in that case
NONE_REFUSED: Refused = MappingProxyType({})


class Crashed(RuntimeError):
    """The function ended the process that called it, or did not come back."""


@dataclass(frozen=True)
class Function:
    """A function in a file that is not the lab's. variant: what it is called in the rows."""

    path: Path
    name: str
    variant: str

    @property
    def text(self) -> str:
        """FILE.py:FUNCTION, with an absolute path."""
        return f"{self.path}:{self.name}"


# What was asked for


def absolute(text: str) -> str:
    """ "FILE.py:FUNCTION" with an absolute path; text of another form as it is."""
    path, _, name = text.rpartition(":")
    well_formed = Path(path).suffix == ".py" and name.isidentifier()
    return f"{os.path.abspath(os.path.expanduser(path))}:{name}" if well_formed else text


def takers() -> list[str]:
    """The studies that take functions."""
    return [name for name in registry.NOTEBOOKS if registry.load(name).added]


def why_none(study: Study) -> str:
    """Why a study takes no functions; empty if it does."""
    if study.added:
        return ""
    return f"{study.name} takes no functions of your own; these studies do: {', '.join(takers()) or 'none'}"


def functions(study: Study, add: Sequence[str]) -> list[Function]:
    """The functions that "FILE.py:FUNCTION" texts name; the files are read, not run.

    ValueError for text of another form, a file that is missing or no Python, a function that is not defined at its top
    level, one that is named twice, or a study that takes none.
    """
    if isinstance(add, str) or not all(isinstance(text, str) for text in add):
        raise ValueError(f"{PARAMETER} is {add!r}; allowed: a list of texts FILE.py:FUNCTION")
    if add and (problem := why_none(study)):
        raise ValueError(problem)
    found = [_named(text) for text in add]
    if twice := [f"{path}:{name}" for path, name in found if found.count((path, name)) > 1]:
        raise ValueError(f"{PARAMETER}: {twice[0]} is given twice")
    alike = [name for _, name in found]
    labels = [ADDED + (name if alike.count(name) == 1 else f"{name} ({path.name})") for path, name in found]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"{PARAMETER}: two functions would be called {twice[0]!r}; rename a file or a function")
    return [Function(path, name, label) for (path, name), label in zip(found, labels, strict=True)]


def _named(text: str) -> tuple[Path, str]:
    file, _, name = absolute(text).rpartition(":")
    path = Path(file)
    if not path.is_absolute():
        raise ValueError(f"{PARAMETER}: {text!r} is not FILE.py:FUNCTION")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{PARAMETER}: {path}: no such file") from None
    except SyntaxError as problem:
        raise ValueError(f"{PARAMETER}: {path}, line {problem.lineno}: {problem.msg}") from None
    except (OSError, ValueError) as problem:
        raise ValueError(f"{PARAMETER}: {path}: cannot be read ({problem})") from None
    known: list[str] = []
    for node in tree.body:  # a definition, or what was wrapped and assigned
        targets = getattr(node, "targets", [])
        known += (
            [node.name] if isinstance(node, ast.FunctionDef) else [t.id for t in targets if isinstance(t, ast.Name)]
        )
    if name not in known:
        has = ", ".join(dict.fromkeys(known)) or "nothing"
        raise ValueError(f"{PARAMETER}: {path} defines no {name!r} at its top level; it defines: {has}")
    return path, name


# As variants


def with_added(study: Study, add: Sequence[str], refused: Refused = NONE_REFUSED) -> Study:
    """The study with one more variant for each function. ValueError as in `functions`."""
    found = functions(study, add)
    if not found:
        return study

    def variants(case: Case) -> list[Variant]:
        takes = study.added.takes(case)
        return [*study.variants(case), *(_variant(study, one, refused) for one in found if takes)]

    return replace(study, variants=variants, add=tuple(one.text for one in found))


def _variant(study: Study, function: Function, refused: Refused) -> Variant:
    def prepare(case: Case, device: Any, sets: int, seed: int) -> Trial:
        if reason := refused.get(function.variant, {}).get(key(case)):
            raise Crashed(reason)
        from labkit.sweep import guard  # here: it needs torch

        signature = study.added.signature
        with guard.names().kept():
            called = guard.held(_load(function, signature), signature)
        trial = study.added.prepare(called, case, device, sets, seed)
        trial.guard = guard.Guard(trial.arguments, trial.tolerance)
        return trial

    options = {"file": function.path.name, "function": function.name}
    return Variant(function.variant, "peer", f"file:{function.text}", prepare, options, study.added.caches)


def key(case: Case) -> str:
    return f"{case.op} {case.key}"


def _load(function: Function, signature: Sequence[str]) -> Callable[..., Any]:
    """Import the file and return the function. TypeError if it cannot be called with the study's arguments."""
    try:
        found = getattr(_module(function.path), function.name)
    except SystemExit as problem:
        raise ImportError(f"{function.path.name} ends Python when it is imported (exit {problem.code})") from None
    if problem := _misfit(found, tuple(signature)):
        raise TypeError(problem)
    return found


@cache
def _module(path: Path) -> ModuleType:
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, and what else looks for the module of a class
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # what stands beside it can be imported, and hides nothing
    spec.loader.exec_module(module)
    return module


def _misfit(function: Any, names: tuple[str, ...]) -> str:
    """Why a function has another signature; empty if it fits, or does not tell."""
    if not callable(function):
        return f"it is no function: {type(function).__name__}"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ""
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    first = tuple(one.name for one in places[: len(names)])
    rest = any(one.kind == one.VAR_POSITIONAL for one in parameters)  # a wrapper, as decorators make
    more = [*places[len(names) :], *(one for one in parameters if one.kind == one.KEYWORD_ONLY)]
    fits = names[: len(first)] == first if rest else names == first
    if fits and all(one.default is not one.empty for one in more):
        return ""
    return f"another signature: it takes ({', '.join(map(str, parameters))}), the study gives ({', '.join(names)})"


# Tried alone


def check_tiny(study: Study, device: str, env: Mapping[str, str | None]) -> pd.DataFrame:
    """Every added function on the study's tiny cases (`tiny`): columns function, case, error, ok, reason. Not timed.

    study: as `with_added` returns it. device: "cpu" or "cuda"; env: of the processes that call the functions.
    """
    rows = [
        {"function": _short(one.variant)} | row
        for one in functions(study, study.add)
        for row in _tried(study, one, tiny(study), device, False, env)
    ]
    return pd.DataFrame(rows, columns=["function", "case", "error", "ok", "reason"])


def tiny(study: Study) -> list[Case]:
    """The study's tiny cases that take functions, in every dtype that these may be given."""
    name, dtypes = study.added.dtypes
    found = [case for case in study.tiny if study.added.takes(case)]
    other = [Case(x.op, {**x.params, name: dtype}) for x in found for dtype in dtypes]
    return list({case.id: case for case in found + other}.values())


def refusals(
    study: Study, cases: Sequence[Case], env: Mapping[str, str | None], say: Callable[[str], None]
) -> dict[str, dict[str, str]]:
    """In which cases which added function ends its process, and how; found out in processes of their own."""
    found: dict[str, dict[str, str]] = {}
    taken = [case for case in cases if study.add and study.added.takes(case)]
    for one in functions(study, study.add) if taken else []:
        say(f"{study.name}: trying {_short(one.variant)} alone")
        for case, row in zip(taken, _tried(study, one, taken, "cuda", True, env), strict=True):
            if row["crashed"]:
                found.setdefault(one.variant, {})[key(case)] = row["reason"]
    return found


def refuse(refused: Refused, study: Study, case: Case, reason: str) -> bool:
    """Refuse the added functions of a case in which a process died; whether any was not refused before."""
    mine = functions(study, study.add) if study.add and study.added.takes(case) else []
    new = [one.variant for one in mine if key(case) not in refused.get(one.variant, {})]
    for name in new:
        refused.setdefault(name, {})[key(case)] = reason
    return bool(new)


def _tried(
    study: Study, function: Function, cases: Sequence[Case], device: str, timed: bool, env: Mapping[str, str | None]
) -> list[dict[str, Any]]:
    """A row for each case: case, error, ok, reason, and whether it crashed; after a crash no case is tried."""
    ended = ""
    with tempfile.TemporaryDirectory() as folder:
        journal = records.Journal(Path(folder) / "tried.jsonl")
        keys = [list(case.id) for case in cases]
        arguments = (study.name, list(study.add), function.variant, keys, device, timed, str(journal.path))
        env = {"TRITON_INTERPRET": None, **env}
        try:
            isolated.call(f"{__name__}:try_here", *arguments, env=env, on_line=lambda line: None)
        except isolated.IsolatedError as failure:
            ended = _how(failure)
        rows = journal.entries()
    for number, case in enumerate(cases[len(rows) :]):
        reason = ended if number == 0 else f"not called: in another case, {ended}"
        rows.append({"case": case.key, "error": math.nan, "ok": False, "reason": reason, "crashed": True})
    return rows


def _how(failure: isolated.IsolatedError) -> str:
    if "Timeout (" in failure.trace:  # of faulthandler
        return f"no end within {PATIENCE_S} s"
    message = (failure.message.strip().splitlines() or [""])[0][:300]
    return message if failure.kind == "crash" else f"the process died: {failure.kind}: {message}"


def try_here(
    study_name: str,
    add: Sequence[str],
    variant: str,
    keys: Sequence[Sequence[str]],
    device: str,
    timed: bool,
    journal_path: str,
) -> None:
    """In the process that may end: call one function in each case, and journal a row; timed: as the timing calls it."""
    study, journal = with_added(registry.load(study_name), add), records.Journal(Path(journal_path))
    gpu = machine.CudaDevice() if device == "cuda" else None
    if gpu is None:
        interpreter.with_bf16()
    for op, key in keys:
        case = Case(op, json.loads(key))
        mine = next(one for one in study.variants(case) if one.name == variant)
        row = {"case": key, "error": math.nan, "ok": False, "reason": "", "crashed": False}
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True, file=sys.__stderr__)
        try:
            trial = mine.prepare(case, gpu.torch_device if gpu else device, 2, 0)
            row |= _checked(trial)
            if timed:
                gpu.time([gpu.prepare(trial.calls, mine.mode)], hot=True)
        except Exception as problem:  # a row
            row |= {"ok": False, "reason": records.first_line(problem)}
            if gpu:
                _recover(gpu, row["reason"])
        finally:
            faulthandler.cancel_dump_traceback_later()
        journal.append(row)


def _recover(gpu: machine.CudaDevice, reason: str) -> None:
    """RuntimeError with what came first, if the GPU cannot be used any more."""
    try:
        gpu.recover()
    except Exception as problem:
        raise RuntimeError(f"{reason}; then {records.first_line(problem)}") from problem


def _checked(trial: Trial) -> dict[str, Any]:
    if trial.poison:
        trial.poison()
    found = case_runner.first_look(trial, evidence=False)
    for call in trial.calls[1:]:
        call()
    if trial.written and not trial.written():
        found |= {"ok": False, "reason": "; ".join(filter(None, [found["reason"], "an output was not written"]))}
    if faults := trial.guard.try_calls(trial.calls):
        found |= {"ok": False, "reason": "; ".join(filter(None, [found["reason"], *faults]))}
    return {name: found[name] for name in ("error", "ok", "reason")}


# Their rows


def is_added(rows: pd.DataFrame) -> pd.Series:
    """Which rows are of functions that are not the lab's."""
    return rows["variant"].str.startswith(ADDED).astype(bool)


def wanted(rows: Sequence[Mapping[str, Any]], study: Study) -> list[Mapping[str, Any]]:
    """The rows without those of added functions that the study was not given."""
    mine = {one.variant for one in functions(study, study.add)}
    return [row for row in rows if not row["variant"].startswith(ADDED) or row["variant"] in mine]


def compared(study: Study, rows: pd.DataFrame, against: Sequence[str] = ()) -> pd.DataFrame:
    """Each added function against other variants, one row a function, case, cache, mode and other variant.

    against: names of these; default: the variant of role "ours", else the one that the A/A control repeats. ratio: its
    time over the function's, with the 95 % interval; a row that is not ok has neither time nor ratio, and its reason in
    `remark`.
    """
    found = []
    for (op, text, heat, mode), part in rows.groupby(["op", "case", "cache", "mode"], sort=False):
        case = Case(op, json.loads(text))
        ours = part["variant"][part["role"] == "ours"]
        us, mine = records.expanded(part).set_index("variant")["us"], part[is_added(part)]
        choice = study.control(case) if ours.empty else ours.iloc[0]
        others = [name for name in against if name in us] or [choice]
        pairs = [(row, other) for row in mine.to_dict("records") for other in others]
        results = verdict.compare_many(part, [(row["variant"], other) for row, other in pairs])
        for (row, other), result in zip(pairs, results, strict=True):
            if heat == "hot" and not row["ok"] and other not in us:
                continue  # failed before it was known that this case is not timed hot
            ok = row["ok"]
            line = {"function": _short(row["variant"])} | dict(case.params) | {"cache": heat, "mode": mode}
            line |= {"µs": us[row["variant"]] if ok else math.nan, "against": other, "its µs": us.get(other)}
            line |= {"ratio": result.ratio.mid, "low": result.ratio.low, "high": result.ratio.high}
            line |= {"verdict": result.verdict if ok else "failed", "error": row["error"], "remark": row["reason"]}
            found.append(line)
    return pd.DataFrame(found)


def _short(variant: str) -> str:
    return variant.removeprefix(ADDED)
