"""The whole lab, as a reader uses it: the report of what is recorded, made once, in a browser; and without Triton."""

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import axe
import browser as driver
import keyboard
import pytest
import rows as made
from running import PAGES, RECORDED, labkit, linked
from test_browser import browser  # noqa: F401 (a fixture)
from test_lab import quick, rows_of
from toy_lab import CODE

from labkit import lab, paths, registry
from labkit.workflow import notebooks

pytestmark = pytest.mark.timeout(1500)  # a whole report, beside other tests, on two slow cores
GPU = "nvidia-made-up-9"
CHECKED = "Relative error against the float64 reference, by the study"


def text_of(page):
    """What a page says, without its drawings, code and styles."""
    html = re.sub(r"<style.*?</style>|<div class=\"highlight\".*?</div>", " ", page.read_text(), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def check_report(done, reports):
    """A run that went well, and a whole report: a page a notebook and the index with every claim."""
    assert done.returncode == 0, done.stderr
    *studies, index = done.stdout.splitlines()
    assert index == str(reports / "index.html")
    assert [line.partition(":")[0] for line in studies] == list(registry.NOTEBOOKS.values())
    for number, notebook in enumerate(registry.NOTEBOOKS.values(), 1):
        label = f"[{number}/{len(PAGES)}] {notebook}: "
        assert re.search(rf"{re.escape(label)}cell \d+/\d+", done.stderr)
        assert re.search(rf"{re.escape(label)}done \(\d+ s\)", done.stderr)
        executed = json.loads((reports / "notebooks" / f"{notebook}.ipynb").read_text())
        outputs = [one for cell in executed["cells"] for one in cell.get("outputs", [])]
        assert {one["output_type"] for one in outputs} <= {"display_data", "execute_result", "stream"}
        assert [one["text"] for one in outputs if one.get("name") == "stderr"] == []  # no warning either
    index = text_of(reports / "index.html")
    for study in map(registry.load, registry.NOTEBOOKS):
        assert study.title in index
        for claim in study.claims:
            assert claim.statement in index
            assert claim.published in index
    assert re.search("reproduced|consistent|not testable here", index)
    assert all(f'href="{page}"' in (reports / "index.html").read_text() for page in PAGES)
    assert sorted(path.name for path in reports.glob("*.html")) == sorted(["index.html", *PAGES])
    assert not list((reports / "notebooks").glob("*partial*"))


# the real report


@pytest.fixture(scope="module")
def recorded():
    """Page -> names of the GPUs that its study is recorded of. Without any there is nothing to test: that fails."""
    found = {
        page: [
            json.loads((path.parent / "machine.json").read_text())["name"]
            for path in paths.DATA.glob(f"*/{study}.parquet")
        ]
        for study, page in zip(registry.NOTEBOOKS, PAGES, strict=True)
    }
    assert any(found.values()), f"no recorded GPU in {paths.DATA}"
    return found


def test_the_report_is_made_from_what_is_recorded(report, recorded):
    done, reports = report
    check_report(done, reports)
    for page in PAGES:
        text = text_of(reports / page)
        assert "measured here" not in text
        assert "Measured on this machine" not in text
        assert "Traceback" not in text
        for name in recorded[page]:
            assert name in text
        assert not recorded[page] or "Recorded measurements: H100, " in text
        assert (lab.UNMEASURED in text) == (not recorded[page])
    index = text_of(reports / "index.html")
    assert all(name in index for names in recorded.values() for name in names)
    # The recorded cases are enough for every claim that can be tested at all.
    rows = (reports / "index.html").read_text().split('<li class="claim"')[1:]
    untestable = [row for row in rows if "lab-not-testable-here" in row]
    assert 0 < len(untestable) < len(rows)
    claims = [claim for name in registry.NOTEBOOKS for claim in registry.load(name).claims]
    texts = [unescape(re.sub("<[^>]*>", "", row)) for row in untestable]
    assert [text for text in texts if not any(c.untested in text for c in claims if c.observe is None)] == []


def test_a_quick_look_is_made_from_what_is_recorded(tmp_path):
    """Of two studies; what it says of every one is looked at in test_lab."""
    studies = ["machine", "gated_delta_today"]
    done = labkit("run", *studies, "--source", "recorded", "--quick", **linked(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    made_of = [f"{registry.NOTEBOOKS[study]}--quick.html" for study in studies]
    assert sorted(path.name for path in (tmp_path / "reports").glob("*.html")) == sorted(["index.html", *made_of])


def test_every_figure_has_words_and_a_table(report, recorded):
    _, reports = report
    for page in filter(recorded.get, PAGES):  # each with the figures of all GPUs together
        html = (reports / page).read_text()
        assert html.count("<img ") >= 5
        figures = re.findall(r'<figure class="lab"[^>]*>.*?</figure>', html, re.DOTALL)
        assert len(figures) == html.count("<img ")
        for figure in figures:
            assert re.search(r'alt="[^"]{20,}"', figure)
            assert len(re.sub("<[^>]*>", "", re.search("<figcaption>.*?</figcaption>", figure, re.DOTALL)[0])) > 40
            assert re.search(r"<details><summary>Table</summary>.*<td", figure, re.DOTALL)


@pytest.mark.browser
@pytest.mark.parametrize("page", ["index.html", *PAGES])
def test_the_pages_have_no_fault_in_a_browser(report, recorded, browser, page):  # noqa: F811
    _, reports = report
    assert driver.check(browser, reports / page) == []
    seen = browser.open(reports / page, 1280, "light")
    assert not recorded.get(page) or seen["images"] >= 5


@pytest.mark.browser
@pytest.mark.parametrize(
    ("page", "folds_open"),
    [*((page, True) for page in ["index.html", *PAGES]), ("index.html", False), (PAGES[-1], False)],  # what folds hide
)
def test_axe_has_nothing_against_the_pages(report, browser, page, folds_open):  # noqa: F811
    browser.open(report[1] / page, 1280, "light")
    assert axe.findings(browser, folds_open) == []
    if folds_open:  # all that is there; colours are what differs
        browser.open(report[1] / page, 1280, "dark")
        assert axe.findings(browser, folds_open, colours_alone=True) == []


@pytest.mark.browser
@pytest.mark.parametrize("folds_open", [False, True], ids=["folded", "open"])
@pytest.mark.parametrize("page", ["index.html", *PAGES])
def test_the_pages_are_used_by_keyboard_alone(report, browser, page, folds_open):  # noqa: F811
    browser.open(report[1] / page, 1280, "light")
    driver.fold(browser, folds_open)
    driver.shorten_tables(browser)
    assert keyboard.faults(browser) == []


@pytest.mark.browser
@pytest.mark.parametrize(("width", "studies", "all_of_it"), [(1280, 2500, 7600), (400, 4000, 15_500)])
def test_the_index_is_no_wall(report, browser, width, studies, all_of_it):  # noqa: F811
    """In pixels, with everything folded."""
    browser.open(report[1] / "index.html", width, "light")  # which opens the folds
    places = """for (const fold of document.querySelectorAll('details')) fold.open = false;
        [document.getElementById('studies').getBoundingClientRect().top, document.documentElement.scrollHeight]"""
    top, height = browser.call("Runtime.evaluate", expression=places, returnByValue=True)["result"]["value"]
    assert top <= studies
    assert height <= all_of_it


FOLDED = """(() => {
  for (const fold of document.querySelectorAll('details')) fold.open = false;
  const top = selector => (document.querySelector(selector)?.getBoundingClientRect().top ?? 1e9) + scrollY;
  const words = document.querySelector('main').innerText.split(/\\s+/).length;
  const [verdict, figure] = ['.lab-answer .lab-badge', '.lab-answer figure'].map(top);
  return JSON.stringify({verdict, figure, words, height: document.documentElement.scrollHeight});
})()"""


@pytest.mark.parametrize("page", [f"{registry.NOTEBOOKS[name]}.html" for name in RECORDED if name != "machine"])
def test_a_page_answers_on_its_first_screen(report, browser, page):  # noqa: F811
    """Verdict and figure within 900 px; with all folded at most 6,000 px high, 13,000 on a phone; 1.5 MB."""
    path = report[1] / page
    assert path.stat().st_size <= 1.5e6
    for width, height in ((1280, 6000), (400, 13_000)):
        browser.open(path, width, "light")
        told = browser.call("Runtime.evaluate", expression=FOLDED, returnByValue=True)["result"]["value"]
        seen = json.loads(told)
        assert seen["height"] <= height, (width, seen)
        assert seen["words"] <= 2500, seen
        if width == 1280:
            assert max(seen["verdict"], seen["figure"]) <= 900, seen


@pytest.mark.parametrize("study", [name for name in registry.NOTEBOOKS if name != "machine"])  # which has none
def test_every_variant_was_right_on_tiny_cases_in_the_interpreter(report, study):
    _, reports = report
    page = (reports / f"{registry.NOTEBOOKS[study]}.html").read_text()
    tables = re.findall(r'<figure class="lab-table".*?</figure>', page, re.DOTALL)
    tables = [table for table in tables if CHECKED in table]
    assert len(tables) == 1
    here = rows_of(tables[0])[0]
    assert here["where"] == "tiny inputs, Triton's interpreter"
    assert here["wrong"] == "0"
    assert 0 <= float(here["largest error"]) < 0.1
    loaded = registry.load(study)
    assert 0 < int(here["cases"]) <= len(loaded.tiny)
    if study == "state_layout":  # where every case and all but these has something to check
        own = {v.name for case in loaded.tiny for v in loaded.variants(case) if v.role not in ("ceiling", "peer")}
        assert (int(here["cases"]), int(here["variants"])) == (len(loaded.tiny), len(own))
        assert 0 < float(here["largest error"]) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("study", registry.NOTEBOOKS)
def test_the_quick_values_of_a_notebook_are_measured(study, tmp_path):
    words = [word for name, value in quick(study).items() for word in ("-p", f"{name}={json.dumps(value)}")]
    done = labkit("run", study, "--source", "measure", *words, **linked(tmp_path))
    assert done.returncode == 0, done.stderr
    part = notebooks.executed_path(study, quick(study)).stem
    text = text_of(tmp_path / "reports" / f"{part}.html")
    assert "Measured on this machine" in text
    assert "Nothing was measured" not in text


# a small lab of the real notebooks with made-up rows, where Triton cannot be imported

BLOCKED = """
import sys
from importlib import metadata
sys.modules["triton"] = None  # importing it fails, and find_spec finds nothing
found = metadata.version
def version(name):
    if name == "triton":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Environment of the small lab."""
    root = tmp_path_factory.mktemp("bare")
    shutil.copytree(paths.NOTEBOOKS, root / "notebooks", ignore=shutil.ignore_patterns(".*"))
    layout = made.make("state_layout", made.LAYOUT, made.layout_us(lambda batch, tile: 1.2 if tile == 8 else 1.0))
    gemv = made.make("gemv_coalescing", made.GEMV, made.gemv_us({}))
    decode = made.make("persistent_tables", made.DECODE, made.decode_us())
    experts = made.make("moe_persistent_grid", made.MOE, made.moe_us)
    machine = made.make("machine", made.MACHINE_PAGE, made.machine_us)
    made.store(root / "data" / GPU, layout, machine, gemv, decode, experts, made.batched_ffn(), made.today())
    (root / "block").mkdir()
    (root / "block" / "sitecustomize.py").write_text(BLOCKED)
    path = os.pathsep.join([str(root / "block"), str(CODE)])
    return {"LABKIT_ROOT": str(root), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def without(bare):
    """What `without_triton` finds there, and what it writes to its standard error."""
    script = [sys.executable, str(Path(__file__).with_name("without_triton.py"))]
    done = subprocess.run(script, env={**os.environ, **bare}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_triton_is_really_missing_there(bare, without):
    code = [sys.executable, "-c", "import triton"]
    done = subprocess.run(code, env={**os.environ, **bare}, capture_output=True, text=True, timeout=120)
    assert "ModuleNotFoundError" in done.stderr
    assert without[0]["triton"] is None


def test_without_triton_everything_but_the_kernels_is_imported(without):
    sources = {path: path.read_text() for path in (CODE / "labkit").rglob("*.py")}
    kernels = {
        ".".join(path.relative_to(CODE).with_suffix("").parts)
        for path, text in sources.items()
        if re.search(r"^(import|from) triton\b", text, re.MULTILINE)
    }
    assert len(kernels) >= 4
    kernels |= {
        f"labkit.kernels.{name}"
        for name in (
            "experts.expert_layer",
            "experts.inputs",
            "decoder.decode",
            "gated_delta.prefill",
            "gated_delta.on_ring",
        )
    }
    # And what makes ready all that studies launch.
    kernels.add("labkit.sweep.gated_delta")
    kernels |= {f"labkit.studies.{name}.trials" for name in ("state_layout", "gemv_coalescing", "moe_persistent_grid")}
    kernels.add("labkit.studies.moe_persistent_grid.ahead")
    kernels |= {f"labkit.studies.gated_delta_today.{name}" for name in ("exact", "inputs", "search")}
    kernels |= {f"labkit.studies.{name}.timelines" for name in ("persistent_tables", "moe_persistent_grid")}
    assert without[0]["not imported"] == dict.fromkeys(kernels, "triton")


def test_without_triton_every_cell_shows_what_is_recorded(without):
    found, stderr = without
    assert stderr == ""  # no warning either
    texts = {study: unescape(re.sub(r"<[^>]*>", "", " ".join(shown))) for study, shown in found["shown"].items()}
    assert list(texts) == list(registry.NOTEBOOKS)
    for study, text in texts.items():
        assert "Recorded measurements: Made-Up 9" in text, study
        assert not re.search(r"\bnan\b|\bNone\b|<NA>", text), study
    assert "Triton is not installed here" in texts["state_layout"]
    assert "registers, sm_90" in texts["state_layout"]  # from the rows, of the kernels that were timed
    assert "consistent" in texts["state_layout"]


def test_without_triton_a_page_is_made(bare):
    """Of the shortest notebook; that all of them run is above."""
    done = labkit("run", "machine", "--source", "recorded", **bare)
    assert done.returncode == 0, done.stderr
    reports = Path(bare["LABKIT_ROOT"]) / "reports"
    assert "Recorded measurements: Made-Up 9" in text_of(reports / PAGES[0])
    assert "not installed" in text_of(reports / "index.html")


def test_without_triton_the_other_commands_answer(without):
    listed, doctor, measure = without[0]["commands"].values()
    assert listed["status"] == 0, listed
    assert f"recorded: {GPU}" in listed["stdout"]
    assert "Traceback" not in doctor["stderr"]
    assert "Triton" in doctor["stdout"]
    assert measure["status"] == 2
    assert "nothing can be measured here" in measure["stderr"]
