"""The whole lab, as a reader uses it: the report of what is recorded, in a browser; without Triton; killed halfway."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from html import unescape
from pathlib import Path

import browser as driver
import pytest
import rows as made
from test_browser import browser  # noqa: F401 (a fixture)
from toy_lab import CODE, MACHINE

from labkit import lab, paths, studies

pytestmark = pytest.mark.timeout(1500)  # a whole report, beside other tests, on two slow cores
GPU = "nvidia-made-up-9"
PAGES = [f"{notebook}.html" for notebook in studies.NOTEBOOKS.values()]


def start(*words, **env):
    """`labkit WORDS` as its own session; of the environment's variables, those given are set and None removes one."""
    merged = {**os.environ, "PYTHONPATH": str(CODE), **env}
    return subprocess.Popen(
        [sys.executable, "-m", "labkit", *words],
        env={name: value for name, value in merged.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def labkit(*words, **env):
    process = start(*words, **env)
    try:
        out, err = process.communicate(timeout=1200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def text_of(page):
    """What a page says, without its drawings, code and styles."""
    html = re.sub(r"<style.*?</style>|<div class=\"highlight\".*?</div>", " ", page.read_text(), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def check_report(done, reports):
    """A run that went well, and a whole report: a page a notebook and the index with every claim."""
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(reports / "index.html")
    for number, notebook in enumerate(studies.NOTEBOOKS.values(), 1):
        label = f"[{number}/{len(PAGES)}] {notebook}: "
        assert re.search(rf"{re.escape(label)}cell \d+/\d+", done.stderr)
        assert re.search(rf"{re.escape(label)}done \(\d+ s\)", done.stderr)
        executed = json.loads((reports / "notebooks" / f"{notebook}.ipynb").read_text())
        outputs = [one for cell in executed["cells"] for one in cell.get("outputs", [])]
        assert {one["output_type"] for one in outputs} <= {"display_data", "execute_result", "stream"}
        assert [one["text"] for one in outputs if one.get("name") == "stderr"] == []  # no warning either
    index = text_of(reports / "index.html")
    for study in map(studies.load, studies.NOTEBOOKS):
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
        for study, page in zip(studies.NOTEBOOKS, PAGES, strict=True)
    }
    assert any(found.values()), f"no recorded GPU in {paths.DATA}"
    return found


@pytest.fixture(scope="module")
def report(recorded, tmp_path_factory):
    """The run and the folder of this tree's report of what is recorded; elsewhere, since `reports/` is the reader's."""
    root = tmp_path_factory.mktemp("recorded")
    paths.CACHE.mkdir(exist_ok=True)
    for folder in (paths.NOTEBOOKS, paths.DATA, paths.CACHE):
        (root / folder.name).symlink_to(folder)
    return labkit("run", "--source", "recorded", LABKIT_ROOT=str(root), CUDA_VISIBLE_DEVICES=""), root / "reports"


def test_the_report_is_made_from_what_is_recorded(report, recorded):
    done, reports = report
    check_report(done, reports)
    for page in PAGES:
        text = text_of(reports / page)
        assert "measured here" not in text
        assert "Measured on this machine" not in text
        assert "Traceback" not in text
        for name in recorded[page]:
            assert f"Recorded measurement, not of this machine: {name}, driver" in text
        assert (lab.UNMEASURED in text) == (not recorded[page])
    index = text_of(reports / "index.html")
    assert all(name in index for names in recorded.values() for name in names)
    # The recorded cases are enough for every claim but one, which is of an operator that the study does not have.
    rows = re.split("<tr\\b", (reports / "index.html").read_text())
    untestable = [row for row in rows if "not testable here" in row]
    assert all("decode calls another operator" in row for row in untestable)


def test_every_figure_has_words_and_a_table(report, recorded):
    _, reports = report
    for page, least in zip(PAGES, (5, 7, 10, 7, 9, 10), strict=True):
        html = (reports / page).read_text()
        assert html.count("<img ") >= least * len(recorded[page])
        figures = re.findall(r'<figure class="lab">.*?</figure>', html, re.DOTALL)
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
    made.store(root / "data" / GPU, layout, machine, gemv, decode, experts, made.batched_ffn())
    (root / "block").mkdir()
    (root / "block" / "sitecustomize.py").write_text(BLOCKED)
    path = os.pathsep.join([str(root / "block"), str(CODE)])
    return {"LABKIT_ROOT": str(root), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def bare_report(bare):
    return labkit("run", "--source", "recorded", **bare), Path(bare["LABKIT_ROOT"]) / "reports"


def python(code, env):
    words = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(words, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


def test_triton_is_really_missing_there(bare):
    done = python("import triton", bare)
    assert "ModuleNotFoundError" in done.stderr
    assert python("from importlib.util import find_spec; print(find_spec('triton'))", bare).stdout == "None\n"


def test_without_triton_everything_but_the_kernels_is_imported(bare):
    code = """
        import importlib, pkgutil, labkit
        for module in pkgutil.walk_packages(labkit.__path__, "labkit."):
            if module.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(module.name)
            except ImportError as problem:
                print(module.name, problem.name)
    """
    done = python(code, bare)
    assert done.returncode == 0, done.stderr
    sources = {path: path.read_text() for path in (CODE / "labkit").rglob("*.py")}
    kernels = {
        f"{'.'.join(path.relative_to(CODE).with_suffix('').parts)} triton"
        for path, text in sources.items()
        if re.search(r"^(import|from) triton\b", text, re.MULTILINE)
    }
    assert len(kernels) >= 4
    kernels.add("labkit.moe_persistent_grid.expert_layer triton")  # no kernel, it chooses between three modules of them
    assert set(done.stdout.splitlines()) == kernels


def test_without_triton_a_study_shows_what_is_recorded(bare):
    code = f"""
        from labkit import lab
        from labkit.state_layout import views
        x = lab.open("state_layout", **{made.LAYOUT!r})
        print(x.provenance())
        print(x.figure("times", views.times))
        print(x.claims())
        print(views.compiled_table(x.compiled(views.wanted(x.study, x.parameters), (80, 90))).to_string())
        print(x.source("labkit.state_layout.kernels", "_decode_kernel").data)
    """
    done = python(code, bare)
    assert done.returncode == 0, done.stderr
    for said in (MACHINE["name"], "recorded", "[NVIDIA Made-Up 9: Lines of time", "reproduced", "registers, sm_90"):
        assert said in done.stdout
    assert "def _decode_kernel(" in done.stdout


def test_without_triton_the_whole_report_is_made(bare_report):
    done, reports = bare_report
    check_report(done, reports)
    machine, layout, *others = (text_of(reports / page) for page in PAGES)
    assert all(f"Recorded measurement, not of this machine: {MACHINE['name']}" in text for text in (machine, *others))
    assert "Triton is not installed here" in layout
    assert "registers, sm_90" in layout  # from the rows, of the kernels that were timed
    assert "not installed" in text_of(reports / "index.html")


def test_without_triton_the_other_commands_answer(bare):
    listed = labkit("list", **bare)
    assert listed.returncode == 0, listed.stderr
    assert f"recorded: {GPU}" in listed.stdout
    doctor = labkit("doctor", **bare)
    assert "Traceback" not in doctor.stderr
    assert "Triton" in doctor.stdout
    measure = labkit("run", "--source", "measure", **bare)
    assert measure.returncode == 2
    assert "nothing can be measured here" in measure.stderr


# killed


def family(pid):
    """Processes that descend from one, itself included (Linux)."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        parents[int(stat.parent.name)] = int(words[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def running(pids):
    alive = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            alive.add(pid)
    return alive


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_that_is_killed_loses_nothing_and_can_be_repeated(bare, bare_report):
    _, reports = bare_report
    before = {path.name: path.read_bytes() for path in reports.glob("*.html")}
    process = start("run", "--source", "recorded", "--jobs", "1", **bare)
    for line in process.stderr:
        if f"[{len(PAGES)}/{len(PAGES)}]" in line and "cell" in line:  # all are done but the last, which is at work
            break
    else:
        pytest.fail(f"ended before it could be killed, with {process.wait()}")
    started = family(process.pid)
    assert len(started) > 2  # the command, the process of the notebook, its kernel
    process.send_signal(signal.SIGKILL)
    process.communicate()
    end = time.monotonic() + 30
    while running(started) and time.monotonic() < end:
        time.sleep(0.2)
    assert running(started) == set()
    assert {path.name: path.read_bytes() for path in reports.glob("*.html")} == before  # the earlier report stands
    again = labkit("run", "--source", "recorded", **bare)
    check_report(again, reports)
