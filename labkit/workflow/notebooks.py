"""Notebooks as jobs: their typed parameters, and running them with papermill, each in a process of its own."""

import ast
import fcntl
import functools
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from labkit import host, isolated, paths, registry
from labkit.bench import records, spec
from labkit.sweep import added
from labkit.workflow import filters, gpus, lease, store
from labkit.workflow.nearest import meant
from labkit.workflow.progress import Progress
from labkit.workflow.turns import Turns

MINUTES = 240.0  # that a notebook may take where nothing else is said
FIRST = "machine"  # the study whose ceilings the others use: it measures first, and alone
BESIDE = 2  # notebooks a GPU: one is measured while another starts
BESIDE_QUICK = 3  # of a quick look one more makes its page
MAX_PROCESSES = 100
NEEDED = ("ipykernel", "jinja2", "matplotlib", "nbconvert", "numpy", "pandas", "papermill", "pyarrow", "torch")
_RETRY = re.compile("Address already in use|Kernel died before replying|Kernel didn't respond")
_CELL = re.compile(r"Executing Cell (\d+)-")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]")
_MEASURING = re.compile(r"\w+: process \d+, ")  # progress of a sweep; other outputs belong to the page alone


@dataclass(frozen=True)
class Parameter:
    """A notebook's parameter, as papermill infers it. type: "int", "list[int]" …; default: its source text."""

    name: str
    type: str
    default: str
    help: str

    @property
    def value(self) -> Any:
        """The default as a value; its source text if that is no literal."""
        try:
            return ast.literal_eval(self.default)
        except (ValueError, SyntaxError):
            return self.default


@dataclass(frozen=True)
class Result:
    """How one notebook ended. executed: the executed notebook, if there is one; error: empty if all went well."""

    study: str
    notebook: str
    seconds: float
    executed: Path | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


class UsageError(ValueError):
    """Something asked for does not exist or is not allowed; the message names what is."""


def source_path(study: str) -> Path:
    """The notebook of a study."""
    return paths.NOTEBOOKS / f"{registry.NOTEBOOKS[study]}.ipynb"


def executed_path(study: str, values: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Where the executed notebook of a study goes: beside the full one where these parameters show something else."""
    suffix = filters.suffix(changed(study, values)) if values else ""
    return paths.REPORTS / "notebooks" / f"{registry.NOTEBOOKS[study]}{suffix}.ipynb"


def changed(study: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the given parameters by which the page shows something else than it does by default."""
    known = parameters(source_path(study))
    # Measured here or replayed, in so many processes, it is the same page; a prediction is another.
    same = {"processes"} if values.get("source") == "predicted" else {"processes", "source"}
    return {n: values[n] for n in known if n in values and n not in same and values[n] != known[n].value}


def defaults(study: str) -> dict[str, Any]:
    """What the parameters of a study's notebook are where none are given."""
    return {name: one.value for name, one in parameters(source_path(study)).items()}


def copy_into(folder: Path) -> None:
    """Copy the notebooks, for `make lab`: running the copies leaves the checkout clean.

    A copy stays as it is until its notebook changes; then one that was run or edited is kept as NAME.old-N.ipynb.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for notebook in sorted(paths.NOTEBOOKS.glob("*.ipynb")):
        copy, taken = folder / notebook.name, folder / f".{notebook.name}.taken"  # what the copy was made from
        if copy.exists() and taken.exists() and taken.read_bytes() == notebook.read_bytes():
            continue
        if copy.exists() and not (taken.exists() and taken.read_bytes() == copy.read_bytes()):
            count = len(list(folder.glob(f"{notebook.stem}.old-*.ipynb"))) + 1
            copy.rename(folder / f"{notebook.stem}.old-{count}.ipynb")
        for file in (copy, taken):
            records.write_atomic(file, notebook.read_bytes())


# Parameters


@functools.cache
def parameters(notebook: Path) -> dict[str, Parameter]:
    """The parameters of a notebook by name. UsageError if the file does not exist or is not a notebook."""
    try:
        found = store.kept("parameters", [notebook], lambda: _inspected(notebook))
    except FileNotFoundError:
        raise UsageError(f"{notebook}: no such notebook") from None
    return {name: Parameter(**fields) for name, fields in found.items()}


def _inspected(notebook: Path) -> dict[str, dict[str, str]]:
    """The fields of each parameter. Papermill takes a second to load, so what it says is kept."""
    import papermill

    try:
        inspected = papermill.inspect_notebook(str(notebook))
    except Exception as problem:  # nbformat and papermill raise many kinds
        raise UsageError(f"{notebook}: not a notebook ({str(problem).splitlines()[0]})") from problem
    found = {}
    for name, p in inspected.items():
        one = Parameter(name, p["inferred_type_name"].replace(" ", "").lower(), p["default"], p["help"])
        # "None": there is no annotation. `value` is then a text too where the default is no literal.
        found[name] = asdict(replace(one, type=type(one.value).__name__) if one.type in ("none", "nonetype") else one)
    return found


def coerce(study: spec.Study, given: Sequence[str]) -> dict[str, Any]:
    """ "NAME=VALUE" texts as typed values for a study's notebook.

    UsageError for text of another form, a parameter that the notebook does not have, or a value that is not allowed.
    """
    values = _typed(study, given)
    check(study, values)
    return values


def _typed(study: spec.Study, given: Sequence[str]) -> dict[str, Any]:
    known = parameters(source_path(study.name))
    values: dict[str, Any] = {}
    for text in given:
        name, value = _split(text)
        if name not in known:
            raise UsageError(f"{study.name} has no parameter {name!r}; it has: {', '.join(known)}{meant(name, known)}")
        if name in values:
            raise UsageError(f"parameter {name} is given twice")
        values[name] = parse(known[name], value)
    if added.PARAMETER in values:  # the notebook runs in a folder of its own
        values[added.PARAMETER] = [added.absolute(text) for text in values[added.PARAMETER]]
    return values


def assign(chosen: Sequence[spec.Study], given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Distribute "NAME=VALUE" over the studies that have NAME, and "STUDY.NAME=VALUE" to that study alone.

    The more specific one wins. UsageError as in `coerce`, or if no chosen study has the parameter.
    """
    common: dict[str, list[str]] = {study.name: [] for study in chosen}
    special: dict[str, list[str]] = {study.name: [] for study in chosen}
    for text in given:
        name, value = _split(text)
        target, _, rest = name.rpartition(".")
        if target:
            if target not in special:
                raise UsageError(f"-p {text}: study {target!r} is not among those to run: {', '.join(special)}")
            special[target].append(f"{rest}={value}")
            continue
        owners = [study.name for study in chosen if name in parameters(source_path(study.name))]
        if not owners:
            known = dict.fromkeys(known for study in chosen for known in parameters(source_path(study.name)))
            raise UsageError(
                f"no parameter {name!r} in {', '.join(common)}; allowed: {', '.join(known)}{meant(name, known)}"
            )
        for owner in owners:
            common[owner].append(text)
    found = {study.name: _typed(study, common[study.name]) | _typed(study, special[study.name]) for study in chosen}
    for study in chosen:
        check(study, found[study.name])
    return found


def check(study: spec.Study, values: Mapping[str, Any]) -> None:
    """UsageError for a value that the notebook of this study does not allow."""
    rules: dict[str, spec.Rule] = {
        "source": spec.one_of(*spec.SOURCES),
        "gpu": _gpu_rule(values.get("source", "")),
        "processes": spec.integer(1, MAX_PROCESSES),
        filters.QUICK: spec.one_of(True, False),
    }
    asked = {"gpu": ""} | dict(values) if values.get("source") == "predicted" else values
    for name in rules:
        if name in asked and (problem := rules[name](asked[name])):
            raise UsageError(f"{study.name}: parameter {name} is {asked[name]!r}; allowed: {problem}")
    try:
        added.functions(study, values.get(added.PARAMETER, ()))
        study.check({name: value for name, value in values.items() if name not in (*rules, added.PARAMETER)})
    except ValueError as problem:
        raise UsageError(str(problem)) from problem


def _gpu_rule(source: str) -> spec.Rule:
    """Of the parameter `gpu`: a recorded GPU or none; with source "predicted" one that can be predicted."""
    if source == "predicted":
        return spec.one_of(*gpus.predictable())
    known = paths.recorded_gpus()
    allowed = "empty for all, or a recorded GPU: " + (", ".join(known) or "(none is recorded)")
    return lambda value: None if value in ("", *known) else allowed


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"{text!r} is not NAME=VALUE")
    return name.strip(), value.strip()


_EXAMPLES = {
    "int": "8",
    "float": "0.5",
    "bool": "true or false",
    "str": "text",
    "list[int]": "1,8,64 or [1, 8, 64]",
    "list[float]": "0.5,1,2 or [0.5, 1, 2]",
    "list[str]": 'bf16,fp32 or ["bf16", "fp32"]',
}


def parse(parameter: Parameter, text: str) -> Any:
    """The value of a parameter from its text. UsageError naming the type and an example if it is of another type."""
    try:
        if parameter.type.startswith("list"):
            return _parse_list(parameter.type.removeprefix("list").strip("[]") or "str", text)
        return _parse_scalar(parameter.type, text)
    except ValueError:
        raise wrong_type(parameter, text) from None


def wrong_type(parameter: Parameter, value: Any) -> UsageError:
    """The error that names a parameter, its value and its type, with an example."""
    example = _EXAMPLES.get(parameter.type, "JSON")
    return UsageError(f"parameter {parameter.name} is {value!r}; allowed: {parameter.type}, for example {example}")


_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {  # type -> what its text looks like, and its value
    "str": (r"(?s).*", str),
    "bool": (r"(?i)true|yes|1|false|no|0", lambda text: text.lower() in ("true", "yes", "1")),
    "int": (r"[+-]?[0-9]+", int),
    "float": (r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", float),
}


def _parse_scalar(kind: str, text: str) -> Any:
    form, value = _SCALARS.get(kind, (r"(?s).*", json.loads))
    if not re.fullmatch(form, text):
        raise ValueError
    return value(text)


def _parse_list(kind: str, text: str) -> list[Any]:
    if not text.startswith("["):
        return [_parse_scalar(kind, item.strip()) for item in text.split(",")] if text else []
    items = json.loads(text)
    if any(isinstance(item, str) != (kind == "str") for item in items):
        raise ValueError
    return items if kind == "str" else [_parse_scalar(kind, json.dumps(item)) for item in items]


# Running


def measures(study: str, values: Mapping[str, Any]) -> bool:
    """Whether a notebook with these parameters asks for a GPU, if there is one."""
    return source_of(study, values) in spec.MEASURING


def can_measure(asked: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Whether what notebooks, each with its parameters, ask to measure can be measured here.

    UsageError if one must measure and cannot, or would replay what is not recorded.
    """
    wanted = [one for one in asked if measures(*one)]
    problem = why_not_measure() if wanted else ""
    if problem and any(source_of(*one) == "measure" for one in wanted):
        raise UsageError(f"source=measure, but nothing can be measured here: {problem}")
    can = bool(wanted) and not problem
    for study, values in asked:
        if can and measures(study, values):
            continue
        try:
            filters.check(registry.load(study), values, defaults(study))
        except filters.Unrecorded as empty:
            why = f". Nothing can be measured here: {problem}" if problem else ""
            raise UsageError(f"{empty}{why}") from None
    return can


def why_not_measure() -> str:
    """Why the notebooks cannot measure on this machine; empty if they can. Starts no CUDA context here."""
    if not lease.visible():
        return lease.why_none()
    try:
        return isolated.call("labkit.bench.machine:why_no_gpu", timeout=120)
    except isolated.IsolatedError as problem:
        return f"torch cannot be asked ({problem.kind}: {problem.message.strip().splitlines()[-1:]})"


def source_of(study: str, values: Mapping[str, Any]) -> str:
    """Where a notebook takes its timings from: its parameter `source`, given or by default."""
    known = parameters(source_path(study))
    return values.get("source", known["source"].value if "source" in known else "recorded")


def run(
    chosen: Sequence[str],
    values: Mapping[str, Mapping[str, Any]],
    jobs: int | None = None,
    *,
    can_measure: bool = False,
    progress: Progress | None = None,
    beside: Callable[..., Any] | None = None,
    seconds: Mapping[str, float] = MappingProxyType({}),
    last: Set[str] = frozenset(),
) -> list[Result]:
    """Run the notebooks of `chosen` studies and return how each ended, in the same order; one failure stops no other.

    values: parameters of each study. jobs: how many at once, at most (default: two per GPU if anything is measured, one
    of which waits for it, or makes its page, and a third in a quick look; else one per core). On an exception
    (Ctrl-C) every process is ended first. beside: makes what is told of each study that begins to be measured
    (`ahead.Ahead`). seconds: what each study will take, where that is known. last: those beside which nothing may be
    compiled; they are measured after the others, beside which what they need is.
    """
    progress = progress or Progress()
    measuring = {name for name in chosen if can_measure and source_of(name, values.get(name, {})) in spec.MEASURING}
    leased = lease.visible() if measuring else []
    itself = {name for name in measuring if name != FIRST and frees(values.get(name, {}))}
    quick = all(is_quick(values.get(name, {})) for name in measuring - {FIRST})
    limit = max(1, len(leased) * (BESIDE_QUICK if quick else BESIDE)) if measuring else host.cores()
    limit = max(1, min(limit, jobs or limit, len(chosen)))
    threads = {} if measuring else share(limit)
    stop = threading.Event()
    results: dict[str, Result] = {}
    alone = [name for name in chosen if name == FIRST and name in measuring]
    others = sorted(_longest_first([name for name in chosen if name not in alone], seconds), key=last.__contains__)
    # They can start beside the first, and wait for its end; with a GPU of their own they would compile beside it
    early = bool(alone) and itself == set(others) and (quick or len(leased) == 1)
    groups = [[*alone, *others]] if early else [alone, others]
    order = [name for group in groups for name in group if name in measuring]
    company = beside(order, values, stop) if beside and order else None
    # A quick look's are few and short, and all of them wait for what is compiled before
    turns = Turns(leased, stop, progress, company, FIRST if early else "", [] if quick else order)

    def one(name: str) -> Result:
        given, held, heard = values.get(name, {}), nullcontext(), None
        if name in itself or name in alone:
            held = turns.alone(name) if name in alone else turns.awaited(name)
            heard = functools.partial(turns.hear, name)
        elif name in measuring:
            held = turns.leased(name)
        try:
            return _run_one(name, given, held, threads, stop, progress, heard)
        finally:
            turns.end(name)

    progress.start([(name, registry.NOTEBOOKS[name]) for name in chosen])
    pool = ThreadPoolExecutor(limit)
    try:
        for group in groups:
            futures = [pool.submit(one, name) for name in group]
            for future in as_completed(futures):
                result = future.result()
                results[result.study] = result
                progress.end(result.study, result.error, result.seconds)
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        progress.close()
    return [results[name] for name in chosen]


def not_installed() -> list[str]:
    """Packages without which no notebook runs and that are missing."""

    def is_there(name: str) -> bool:
        try:
            return bool(metadata.version(name))
        except metadata.PackageNotFoundError:
            return False

    return [name for name in NEEDED if not is_there(name)]


def share(limit: int) -> dict[str, str]:
    """Environment by which so many notebooks at once share the cores, unless the reader has said otherwise."""
    threads = str(max(1, host.cores() // limit))
    return {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name not in os.environ}


def frees(values: Mapping[str, Any]) -> bool:
    """Whether a notebook needs its GPU only while it measures: it then leases it itself, and starts before its turn.

    A page with functions of the reader's own checks them on it afterwards.
    """
    return not values.get(added.PARAMETER)


def is_quick(values: Mapping[str, Any]) -> bool:
    """Whether a notebook with these parameters takes a quick look."""
    return bool(values.get(filters.QUICK))


def _longest_first(names: Sequence[str], seconds: Mapping[str, float]) -> list[str]:
    """So that none of them is left alone at the end; where nothing is known, those with most rows take longest."""
    sizes = {name: sum(path.stat().st_size for path, _ in paths.data_files(name)) for name in names}
    return sorted(names, key=lambda name: (-seconds.get(name, 0.0), -sizes[name]))


def _run_one(
    name: str,
    values: Mapping[str, Any],
    held: AbstractContextManager[lease.Gpu | None],
    env: Mapping[str, str],
    stop: threading.Event,
    progress: Progress,
    heard: Callable[[str], None] | None = None,
) -> Result:
    out = executed_path(name, values)
    partial = out.with_name(f".{out.stem}.partial.ipynb")  # an earlier result stays until this one is complete
    start = time.monotonic()
    try:
        with _only_run(executed_path(name)), held as gpu:
            leased = lease.environment(gpu) if gpu else {}
            suffix = out.stem.removeprefix(registry.NOTEBOOKS[name])
            drawn = {"LABKIT_SUFFIX": suffix} if suffix else {}
            every = {**env, **leased, **drawn}
            error = attempt(name, values, partial, every, stop, progress, timeout=60 * MINUTES, heard=heard)
            if stop.is_set():
                partial.unlink(missing_ok=True)
            elif partial.exists():
                os.replace(partial, out)
    except (OSError, ValueError, RuntimeError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    return Result(name, out.stem, time.monotonic() - start, out if out.exists() else None, error)


def attempt(
    name: str,
    values: Mapping[str, Any],
    partial: Path,
    env: Mapping[str, str],
    stop: threading.Event,
    progress: Progress,
    *,
    label: str = "",
    timeout: float | None = None,
    heard: Callable[[str], None] | None = None,
) -> str:
    """Execute; once more if the kernel did not start, as when two took one port. Returns the error, or nothing.

    label: its name in `progress`, if that is not the study's. timeout: seconds. heard: gets what its cells print.
    """
    label = label or name
    source = source_path(name)
    cells = sum(map(_runs, json.loads(source.read_text())["cells"])) + bool(values)  # papermill adds one for the values
    for last in (False, True):
        try:
            arguments = ("labkit.workflow.notebooks:execute", str(source), str(partial), dict(values))
            show = functools.partial(_show, progress, label, cells, heard)
            isolated.call(*arguments, env=env, timeout=timeout, stop=stop, on_line=show)
            return ""
        except isolated.IsolatedError as problem:
            if last or stop.is_set() or not _RETRY.search(f"{problem.message}\n{problem.trace}"):
                last_line = problem.message.strip().rpartition("\n")[2]
                return cell_error(partial) or f"{problem.kind}: {last_line}"
            progress.note(label, "the kernel did not start; once more")
    raise AssertionError("unreachable")


def execute(notebook: str, out: str, values: Mapping[str, Any]) -> None:
    """Execute a notebook with papermill, in its own folder, but for what no page shows; called in its own process."""
    import logging

    import nbformat
    import papermill

    _use_this_python()
    book = nbformat.read(notebook, as_version=4)
    book.cells = [cell for cell in book.cells if _runs(cell)]
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    options = {"kernel_name": "python3", "cwd": str(Path(notebook).parent), "progress_bar": False, "log_output": True}
    # In a file: given as an object, a notebook is copied into its own metadata.
    with tempfile.NamedTemporaryFile("w", suffix=".ipynb") as file:
        nbformat.write(book, file)
        file.flush()
        papermill.execute_notebook(file.name, out, parameters=dict(values), **options)


def _runs(cell: Mapping[str, Any]) -> bool:
    """Whether a cell is run where nobody sits before the notebook: a widget then computes for seconds, for no one."""
    return "lab-only" not in cell["metadata"].get("tags", [])


def _use_this_python() -> None:
    """Make `python3` a kernel that is this very Python, whatever else of that name is installed."""
    from ipykernel.kernelspec import get_kernel_dict

    folder = paths.CACHE / "jupyter"
    path, content = folder / "kernels" / "python3" / "kernel.json", json.dumps(get_kernel_dict()).encode()
    if not path.exists() or path.read_bytes() != content:
        records.write_atomic(path, content)
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("JUPYTER_PATH")]))
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # keeps a warning about the debugger out of the log


@contextmanager
def _only_run(out: Path) -> Iterator[None]:
    """Two runs of one notebook in one tree would write the same files, its measurements among them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_name(f".{out.stem}.lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"{out.stem} is being run by another labkit just now") from None
        yield


def _show(progress: Progress, name: str, cells: int, heard: Callable[[str], None] | None, line: str) -> None:
    if found := _CELL.match(line):
        progress.cell(name, int(found[1]), cells)
    elif _MEASURING.match(text := _CONTROL.sub("", line).strip()):
        progress.output(name, text)
    elif heard:
        heard(text)


def cell_error(executed: Path) -> str:
    """The error that an executed notebook ends with: which cell, type and message; empty if there is none."""
    try:
        cells = json.loads(executed.read_text())["cells"]
    except (OSError, ValueError, KeyError):
        return ""
    for cell in cells:
        for output in cell.get("outputs", []):
            if output.get("output_type") == "error":
                message = str(output.get("evalue", "")).strip().partition("\n")[0]
                return f"In [{cell.get('execution_count')}]: {output.get('ename')}: {message}"
    return ""
