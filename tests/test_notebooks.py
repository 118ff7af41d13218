"""The notebooks as documents: parameters that fit their study; no result in prose, no kernel or timing in a cell."""

import ast
import json
import re
from itertools import pairwise

import nbformat
import papermill.cli
import pytest
from click.testing import CliRunner

from labkit import paths, registry
from labkit.workflow import notebooks

COMMON = ["source", "gpu", "processes", "quick"]
COMMON_VALUES = {"source": "auto", "gpu": "", "processes": 3, "quick": False}
MAX_LINES = 13
each = pytest.mark.parametrize("study", registry.NOTEBOOKS)


def book(study):
    return json.loads(notebooks.source_path(study).read_text())


def texts(study, kind):
    return ["".join(cell["source"]) for cell in book(study)["cells"] if cell["cell_type"] == kind]


def parameters_cell(study):
    return next(cell for cell in book(study)["cells"] if cell["cell_type"] == "code")


# results are generated, never typed: a number with a unit of time, rate or ratio does not stand in the text

UNITS = r"(?:[nµμum]?s|%|×|x|fold|GHz|MHz|[KMGT]i?B/s|[MGTP]?FLOPS?|[GTP]?FLOP/s|per\s*cent|times|faster|slower)"
NUMBER = r"(?:\d[\d.,]*(?:\s*[-–−]\s*\d[\d.,]*)?|one|two|three|four|five|ten|half|twice)"
RESULT = re.compile(
    rf"(?:\d[\d.,]*(?:\s*[-–−to]+\s*\d[\d.,]*)?\s*-?\s*{UNITS}(?![\w/])"
    rf"|\b{NUMBER}\s+(?:times\s+)?(?:as|more|less|faster|slower)\s*(?:fast|slow|time|bandwidth|throughput)?\b"
    r"|\b(?:faster|slower|better|worse)\s+by\s+(?:a\s+factor\s+of\s+)?\d)",
    re.IGNORECASE,
)
ALLOWED = ("±1 %", "95 % interval")  # the lab's own conventions; sizes in bytes and MiB are no results either
QUOTED = re.compile(r"\"[^\"\n]*\"|“[^”\n]*”|`[^`\n]*`|\]\([^)]*\)|\$[^$\n]*\$")


def results_in(text):
    """What looks like a result in Markdown; what is quoted, code, the target of a link or allowed does not count."""
    text = QUOTED.sub(" ", " ".join(text.split()))
    for phrase in ALLOWED:
        text = text.replace(phrase, " ")
    return [match[0] for match in RESULT.finditer(text)]


@each
def test_no_result_is_typed_into_the_text(study):
    assert {text[:60]: found for text in texts(study, "markdown") if (found := results_in(text))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "it is 1.3× faster",
        "it reaches 93 % of peak",
        "reaches 93% of the ceiling",
        "a gain of 7–8 % end to end",
        "it took 12 µs",
        "it took 12.5us",
        "within 3 ms of",
        "at 3.2 TB/s",
        "at 950 GB/s",
        "1,200 TFLOP/s were reached",
        "a 2.5x speed-up",
        "a 2-fold gain",
        "5 per\ncent more tokens",
        "it is 3 times that",
        "twice as fast as before",
        "three times faster",
        "faster by a factor of 2",
        "slower by 4",
        "at 1980 MHz",
    ],
)
def test_a_typed_result_would_be_found(text):
    assert results_in(f"On this GPU {text}, as measured.")


@pytest.mark.parametrize(
    "text",
    [
        'Everyone says "80 % of peak" of something.',
        "An interval wider than ±1 % is measured again.",
        "The bars are the 95 % interval.",
        "Sectors of 32 bytes, lines of 128 bytes, a buffer of 256 MiB, K = 256.",
        "Qwen3-Next and Qwen3.5 have 32 lanes; float64, fp32, sm_90 and the L2.",
        "Run `labkit run -p share=50 %` or see [the page](https://example.org/7 %).",
        "Above one, the second is faster; each block is repeated.",
    ],
)
def test_what_is_no_result_is_allowed(text):
    assert results_in(text) == []


# cells only show: the kernels, loops and clocks are in the package

FORBIDDEN = {"time", "timeit", "torch", "triton", "tl", "perf_counter", "do_bench", "subprocess", "os"}
STATEMENTS = (ast.For, ast.While, ast.AsyncFor, ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.Try, ast.With)


def not_for_a_cell(code):
    """What of a cell's code belongs into the package: imports from elsewhere, loops, functions, timing, magics."""
    try:
        tree = ast.parse(code)
    except SyntaxError as problem:
        return [f"no plain Python: {problem.msg}"]
    found = [f"{MAX_LINES} lines at most"] if len(code.splitlines()) > MAX_LINES else []
    for node in ast.walk(tree):
        if isinstance(node, STATEMENTS):
            found.append(type(node).__name__)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            found += [f"import {name}" for name in modules if name.partition(".")[0] != "labkit"]
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            found += [name] if name in FORBIDDEN else []
    return found


@each
def test_cells_only_show(study):
    assert {code[:60]: found for code in texts(study, "code") if (found := not_for_a_cell(code))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import triton\n\n@triton.jit\ndef kernel(x):\n    pass",
        "for batch in batches:\n    launch(batch)",
        "[launch() for _ in range(9)]\nstart = time.perf_counter()",
        "from torch import cuda",
        "torch.cuda.synchronize()",
        "x.study.torch.cuda.Event()",
        "%timeit launch()",
        "!nvidia-smi",
        "while True: launch()",
        "run = lambda: launch()",
        "a = 1\n" * 14,
    ],
)
def test_a_kernel_or_a_timing_loop_in_a_cell_would_be_found(code):
    assert not_for_a_cell(code)


# files


def test_every_study_has_its_notebook_and_every_notebook_its_study():
    assert {path.stem for path in paths.NOTEBOOKS.glob("*.ipynb")} == {*registry.NOTEBOOKS.values(), "start"}
    assert list(registry.NOTEBOOKS.values()) == sorted(
        registry.NOTEBOOKS.values()
    )  # read in the order of their numbers
    for name, notebook in registry.NOTEBOOKS.items():
        assert re.fullmatch(rf"\d\d_{name}", notebook)


@each
def test_a_notebook_is_valid_and_holds_no_output(study):
    found = book(study)
    nbformat.validate(found)
    ids = [cell["id"] for cell in found["cells"]]
    assert len(set(ids)) == len(ids)
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert "widgets" not in found["metadata"]
    assert found["metadata"]["kernelspec"]["name"] == "python3"


@each
def test_a_notebook_begins_with_its_title_and_says_what_is_asked(study):
    first = book(study)["cells"][0]
    assert first["cell_type"] == "markdown"
    title, text = "".join(first["source"]).split("\n", 1)
    assert title.startswith("# ")
    assert len(text.split()) > 10  # a line: the answer stands beneath it
    assert all(code.strip() for code in texts(study, "code"))


@each
def test_links_to_other_notebooks_lead_somewhere(study):
    for text in texts(study, "markdown"):
        for target in re.findall(r"\]\(([^):#]+\.ipynb)", text):
            assert (paths.NOTEBOOKS / target).exists()
        for name in re.findall(r"`(\d\d_\w+)`", text):
            assert name in registry.NOTEBOOKS.values()


@each
def test_what_needs_a_running_kernel_is_kept_out_of_the_pages(study):
    cells = book(study)["cells"]
    for before, cell in pairwise(cells):
        if "widget" in "".join(cell["source"]) and cell["cell_type"] == "code":
            assert "lab-only" in cell["metadata"]["tags"]
            assert "lab-only" in before["metadata"].get("tags", []), "the widget's heading"


# parameters


@each
def test_the_first_code_cell_declares_typed_parameters_with_a_comment_each(study):
    cell = parameters_cell(study)
    assert cell["metadata"]["tags"] == ["parameters"]
    tree = ast.parse("".join(cell["source"]))
    assert all(isinstance(node, ast.AnnAssign) for node in tree.body)
    names = [node.target.id for node in tree.body]
    declared = notebooks.parameters(notebooks.source_path(study))
    assert list(declared) == names
    for node in tree.body:
        found = declared[node.target.id]
        assert found.type == ast.unparse(node.annotation)
        assert found.help.strip()
        assert found.value == ast.literal_eval(node.value)
    tagged = [cell for cell in book(study)["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1


@each
def test_the_parameters_are_those_of_the_study_and_their_defaults_allowed(study):
    declared = notebooks.parameters(notebooks.source_path(study))
    known = registry.load(study)
    assert list(declared)[:4] == COMMON
    add = ["add"] if known.added else []
    assert set(declared) == {*COMMON, *known.parameters, *add}
    assert [declared[name].value for name in add] == [[] for _ in add]
    assert ("x.added()" in texts(study, "code")) == bool(add)
    assert {name: declared[name].value for name in COMMON} == COMMON_VALUES
    values = {name: one.value for name, one in declared.items()}
    notebooks.check(known, values)
    known.check({name: value for name, value in values.items() if name not in (*COMMON, *add)})
    assert known.cases(values)


@each
def test_the_quick_values_are_parameters_and_allowed(study):
    mock = parameters_cell(study)["metadata"]["nbmake"]["mock"]
    declared = notebooks.parameters(notebooks.source_path(study))
    assert mock
    assert set(mock) <= set(declared)
    assert mock["processes"] == 1
    for name, value in mock.items():
        assert notebooks.parse(declared[name], json.dumps(value)) == value  # of the declared type
    notebooks.check(registry.load(study), mock)
    whole = {name: one.value for name, one in declared.items()}
    quick, full = (registry.load(study).cases(values) for values in (whole | mock, whole))
    assert 0 < len(quick) < len(full)
    assert {(case.op, case.key) for case in quick} <= {(case.op, case.key) for case in full}  # so they are recorded


@each
def test_papermill_shows_a_type_and_a_comment_for_each_parameter(study):
    path = notebooks.source_path(study)
    done = CliRunner().invoke(papermill.cli.papermill, ["--help-notebook", str(path)])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.stdout.split())
    for one in notebooks.parameters(path).values():
        assert re.search(rf"{one.name}: {re.escape(one.type)} \(default .*?\) {re.escape(one.help)}", shown)
    assert "Unknown" not in shown
