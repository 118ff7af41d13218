"""`labkit new NAME`: a study that runs and passes from the start, to be filled with another kernel and claim."""

import json
import keyword
import re
from datetime import UTC, datetime
from pathlib import Path

from labkit import paths, registry
from labkit.bench.records import write_atomic

TEMPLATE = Path(__file__).with_name("new_study")
PARAMETERS = """\
source: str = "auto"  # auto: measure if there is a GPU, else replay; measure; recorded; predicted
gpu: str = ""  # the one recorded GPU to show, as in `labkit list`; empty: all of them; or the one to predict
processes: int = 3  # independent measuring processes; a headline needs at least 3
quick: bool = False  # only the headline cases of each claim, in one process
sizes: list[int] = [1048576, 16777216, 134217728]  # values
dtypes: list[str] = ["bf16", "fp32"]  # of x and y"""
OPEN = """\
from labkit import lab
from labkit.studies.{name} import tables, views

x = lab.open("{name}", source=source, gpu=gpu, processes=processes, quick=quick, sizes=sizes, dtypes=dtypes)
x.provenance()"""
INTRODUCTION = """\
# {title}

Say in two sentences what is claimed, of what, and why it may or may not hold. The answer stands beneath this cell, so
that a reader who stops there has it."""
CORRECTNESS = (
    "## Is it right?\n\nEvery variant is checked against a reference in float64, and again after it was timed."
)
CLAIMS = "## Claims\n\nWhat was published, what each GPU measured, and the verdict by the one rule."


def check(name: str) -> None:
    """ValueError for a name that a study cannot have."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ValueError(f"the study's name is {name!r}; allowed: small letters, digits and single _, as in gemv_rows")
    if name in registry.NOTEBOOKS or (_package() / "studies" / name).exists():
        raise ValueError(f"there is a study {name!r}; the studies: {', '.join(registry.NOTEBOOKS)}")


def create(name: str) -> list[Path]:
    """Write folder, notebook, test, the line in the registry and the rule's hash; returns the files.

    ValueError as in `check`, and for a file that is there already.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    check(name)
    number = max(int(one.partition("_")[0]) for one in registry.NOTEBOOKS.values()) + 1
    notebook, title = f"{number:02d}_{name}", name.replace("_", " ").capitalize()
    known = {"name": name, "number": f"{number:02d}", "title": title, "today": datetime.now(UTC).date().isoformat()}
    found = Environment(loader=FileSystemLoader(TEMPLATE), undefined=StrictUndefined, keep_trailing_newline=True)
    files: dict[Path, str] = {}
    for path in sorted(TEMPLATE.glob("*.j2")):
        folder = _package() / "studies" / name
        target = paths.ROOT / "tests" / f"test_{name}.py" if path.name == "test.py.j2" else folder / path.stem
        files[target] = found.get_template(path.name).render(known)
    files[paths.NOTEBOOKS / f"{notebook}.ipynb"] = _notebook(name, title)
    if there := [path for path in files if path.exists()]:
        raise ValueError(f"{there[0].relative_to(paths.ROOT)} is there already; give the study another name")
    files[_registry()] = _with_line(_registry().read_text("utf-8"), name, notebook)
    for path, text in files.items():
        write_atomic(path, text.encode())
    registry.NOTEBOOKS[name] = notebook  # as its file has it now
    return [*files, _lock_rules(name)]


def _lock_rules(name: str) -> Path:
    """Add the hashes of a new study's rules to those that only grow; returns the file."""
    file = paths.ROOT / "tests" / "ruled.json"
    locked = json.loads(file.read_text("utf-8"))
    locked |= {f"{name}/{claim.id}": {claim.ruled: claim.sha()} for claim in registry.load(name).claims}
    write_atomic(file, (json.dumps(locked, indent=1, sort_keys=True) + "\n").encode())
    return file


def _package() -> Path:
    return paths.ROOT / "labkit"


def _registry() -> Path:
    return _package() / "registry.py"


def _with_line(text: str, name: str, notebook: str) -> str:
    """The registry with one study more, the last one."""
    head, brace, rest = text.partition("\n}\n")
    return f'{head}\n    "{name}": "{notebook}",{brace}{rest}'


def _notebook(name: str, title: str) -> str:
    """The notebook: parameters, the answer, whether it is right, one figure, the claims."""
    mock = {"sizes": [1048576], "processes": 1}
    cells = [
        _cell("markdown", INTRODUCTION.format(title=title)),
        _cell("code", PARAMETERS, tags=["parameters"], nbmake={"mock": mock}),
        _cell("code", OPEN.format(name=name), tags=["setup"]),
        _cell("code", "x.answer()", tags=["answer"]),
        _cell("markdown", CORRECTNESS),
        _cell("code", "x.correctness()"),
        _cell("markdown", "## What was measured\n\nThe figure, and the table that it is drawn from."),
        _cell("code", 'x.figure("gains", views.gains)'),
        _cell("code", 'x.table(tables.gain, "Every case.")', tags=["fold"]),
        _cell("markdown", CLAIMS),
        _cell("code", "x.claims()"),
    ]
    for place, cell in enumerate(cells, 1):
        cell["id"] = f"cell-{place:02d}"
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    book = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, text: str, **metadata: object) -> dict[str, object]:
    made: dict[str, object] = {"cell_type": kind, "id": "", "metadata": metadata, "source": text.splitlines(True)}
    return made | ({"execution_count": None, "outputs": []} if kind == "code" else {})
