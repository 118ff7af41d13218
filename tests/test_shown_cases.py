"""No case is measured that no page shows: without its rows, something that a cell of the notebook makes is another."""

import json
import time
from unittest import mock

import pandas as pd
import pytest

from labkit import lab, paths, registry
from labkit.bench.spec import Case
from labkit.report.figures import Picture
from labkit.workflow import notebooks, recorded

MAKES = ("say", "compare", "table", "side_by_side", "figure")  # methods of a Lab that take a function of rows
JUDGED = [name for name in registry.NOTEBOOKS if paths.data_files(name, runs=False)]


MOST = 60  # cases of a study that are tried: of more, each is as likely as another, and always the same ones
# Of what the host takes for a token the largest of all models is shown: which one that is, depends on the run.
UNSHOWN = {("persistent_tables", "host", model, 0) for model in ("AutoMegaKernel h2048", "Llama-3.2-1B")}


def makers(name):
    """Every function of rows that the notebook's cells, its answer and its claims are made by."""
    study, found = registry.load(name), []
    x = mock.MagicMock()
    x.study, x.parameters = study, notebooks.defaults(name)
    x.cases = study.cases(x.parameters)
    for method in MAKES:
        taken = 1 if method == "figure" else 0
        getattr(x, method).side_effect = lambda *given, taken=taken, **more: (
            found.append(given[taken]) or mock.MagicMock()
        )
    space = dict(notebooks.defaults(name))
    with mock.patch.object(lab, "open", return_value=x):
        for cell in json.loads(notebooks.source_path(name).read_text())["cells"]:
            text = "".join(cell["source"])
            if (
                cell["cell_type"] == "code"
                and "compiled(" not in text
                and "accesses(" not in text
                and "widget" not in text
            ):
                exec(compile(text, name, "exec"), space)
    answer = registry.answer(name)
    found += [answer.facts, answer.hero] if answer else []
    return found + [claim.observe for claim in study.claims if claim.observe]


def told(made):
    """What is made, as text: of a picture, what is drawn, said and written beneath."""
    if isinstance(made, Picture):
        return "\n".join(
            [made.said, *(part.to_csv() for part in (made.data, made.table) if isinstance(part, pd.DataFrame))]
        )
    return made.to_csv() if isinstance(made, pd.DataFrame) else repr(made)


def shows(make, rows):
    """What is made of rows; the error where that fails, which without a case is another result too."""
    try:
        return told(make(rows))
    except Exception as problem:  # a maker that cannot do without a case shows it
        return f"{type(problem).__name__}: {problem}"


def unshown(name, rows):
    """The cases whose rows can be taken away without a change of anything."""
    left, known = dict.fromkeys(zip(rows["op"], rows["case"], strict=True)), []
    for make in makers(name):
        start = time.perf_counter()
        known.append((make, shows(make, rows), time.perf_counter() - start))
    known.sort(key=lambda one: one[2])  # those that take least first
    found = []
    for op, case in list(left)[:: -(-len(left) // MOST)]:
        less = rows[(rows["op"] != op) | (rows["case"] != case)]
        changed = next((one for one in known if shows(one[0], less) != one[1]), None)
        if changed is None:
            found.append((op, case))
        else:  # what shows one case of an operation shows the next one too
            known.remove(changed)
            known.insert(0, changed)
    return found


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize("name", JUDGED)
def test_every_case_is_shown(name):
    path, _ = paths.data_files(name, runs=False)[0]
    rows, study = recorded.read(path), registry.load(name)
    asked = {(case.op, case.key) for case in study.cases(notebooks.defaults(name)) if not study.early(case)}
    rows = rows[[key in asked for key in zip(rows["op"], rows["case"], strict=True)]].reset_index(drop=True)
    found = [(op, json.loads(case)) for op, case in unshown(name, rows)]
    assert [one for one in found if (name, one[0], one[1].get("model"), one[1].get("queued_us")) not in UNSHOWN] == []


def test_a_case_that_nothing_shows_is_found(monkeypatch):
    rows = pd.DataFrame([{"op": "a", "case": Case("a", {"n": n}).key, "v": n} for n in (1, 2, 3)])
    monkeypatch.setattr("test_shown_cases.makers", lambda name: [lambda rows: rows[rows["v"] < 3], lambda rows: "same"])
    assert unshown("made", rows) == [("a", '{"n": 3}')]
