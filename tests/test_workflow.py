"""Notebooks as jobs: parameters, and running them in processes."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import papermill
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from toy_lab import GPU, NOTEBOOKS, SLUG, Toy

from labkit import cli, host, isolated, paths, registry
from labkit.workflow import lease, notebooks, reports
from labkit.workflow.notebooks import Parameter, UsageError, parse
from labkit.workflow.progress import Progress


@pytest.fixture
def toy(tmp_path, monkeypatch):
    found = Toy(tmp_path)
    found.enter(monkeypatch)
    return found


@pytest.fixture
def layers(toy):
    return registry.load("layers")


# Parameters


def test_parameters_have_types_defaults_and_help(toy):
    found = notebooks.parameters(notebooks.source_path("layers"))
    assert found["batches"] == Parameter("batches", "list[int]", "[1, 8]", "sequences in the batch")
    assert found["batches"].value == [1, 8]
    assert {name: p.type for name, p in found.items()} == {
        "source": "str",
        "gpu": "str",
        "processes": "int",
        "batches": "list[int]",
        "states": "list[str]",
        "scale": "float",
        "deep": "bool",
        "label": "str",
    }


def test_a_missing_notebook_and_a_file_that_is_none_are_named(toy):
    with pytest.raises(UsageError, match=r"99_none\.ipynb: no such notebook"):
        notebooks.parameters(toy.root / "99_none.ipynb")
    with pytest.raises(UsageError, match=r"98_text\.ipynb: not a notebook"):
        notebooks.parameters(toy.write("98_text.ipynb", "no JSON"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("batches=1,64", [1, 64]),
        ("batches=[1, 64]", [1, 64]),
        ("batches=7", [7]),
        (" batches = 1 , 2 ", [1, 2]),
        ("states=fp32,bf16", ["fp32", "bf16"]),
        ('states=["bf16"]', ["bf16"]),
        ("scale=2", 2.0),
        ("scale=-1e-3", -0.001),
        ("deep=true", True),
        ("deep=No", False),
        ("label=a=b, c", "a=b, c"),
        ("label=", ""),
        ("source=recorded", "recorded"),
        ("processes=5", 5),
    ],
)
def test_values_get_the_type_of_their_parameter(layers, text, value):
    (found,) = notebooks.coerce(layers, [text]).values()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch=1", "no parameter 'batch'; it has: source, gpu, processes, batches"),
        ("batches", "'batches' is not NAME=VALUE"),
        ("=1", "is not NAME=VALUE"),
        ("batches=one", r"batches is 'one'; allowed: list\[int\], for example 1,8,64"),
        ("batches=1.5", r"allowed: list\[int\]"),
        ("batches=1,,2", r"allowed: list\[int\]"),
        ('batches=["1"]', r"allowed: list\[int\]"),
        ("batches=[true]", r"allowed: list\[int\]"),
        ("batches=[1", r"allowed: list\[int\]"),
        ("batches=", "a list with at least one item"),
        ("batches=65", "an integer from 1 to 64"),
        ("states=[1]", r"allowed: list\[str\]"),
        ("states=fp8", "one of fp32, bf16"),
        ("processes=three", "allowed: int, for example 8"),
        ("processes=0", "an integer from 1 to 100"),
        ("scale=nan", "allowed: float"),
        ("deep=2", "allowed: bool, for example true or false"),
        ("source=web", "one of auto, measure, recorded"),
        ("gpu=nvidia-none", r"a recorded GPU: \(none is recorded\)"),
    ],
)
def test_what_is_not_allowed_is_named_with_what_is(layers, text, message):
    with pytest.raises(UsageError, match=message):
        notebooks.coerce(layers, [text])


def test_a_recorded_gpu_is_allowed(toy, layers):
    toy.measured(toy.rows(), base="data")
    assert notebooks.coerce(layers, ["gpu=nvidia-made-up-9"]) == {"gpu": "nvidia-made-up-9"}
    with pytest.raises(UsageError, match="a recorded GPU: nvidia-made-up-9"):
        notebooks.coerce(layers, ["gpu=NVIDIA"])


def test_a_parameter_goes_to_the_studies_that_have_it(toy):
    both = [registry.load(name) for name in NOTEBOOKS]
    assert notebooks.assign(both, ["processes=2", "batches=4", "sizes=3"]) == {
        "ground": {"processes": 2, "sizes": [3]},
        "layers": {"processes": 2, "batches": [4]},
    }
    assert notebooks.assign(both, ["processes=2", "layers.processes=1"]) == {
        "ground": {"processes": 2},
        "layers": {"processes": 1},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing=1", "no parameter 'nothing' in ground, layers; allowed: source, gpu, processes, sizes, batches"),
        ("other.sizes=1", "study 'other' is not among those to run: ground, layers"),
        ("layers.sizes=1", "layers has no parameter 'sizes'"),
        ("layers.batches=x", "batches is 'x'"),
    ],
)
def test_a_parameter_that_no_chosen_study_has_is_an_error(toy, text, message):
    with pytest.raises(UsageError, match=message):
        notebooks.assign([registry.load(name) for name in NOTEBOOKS], [text])


def test_a_parameter_given_twice_is_an_error(layers):
    with pytest.raises(UsageError, match="given twice"):
        notebooks.coerce(layers, ["scale=1", "scale=2"])


@given(st.lists(st.integers()))
def test_lists_of_integers_in_both_ways_of_writing(values):
    parameter = Parameter("n", "list[int]", "[]", "")
    assert parse(parameter, json.dumps(values)) == values
    assert parse(parameter, ",".join(map(str, values))) == values


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_survive(value):
    assert parse(Parameter("x", "float", "0", ""), repr(value)) == value


@given(st.text(max_size=20), st.sampled_from(["int", "float", "bool", "str", "list[int]", "list[float]", "list[str]"]))
def test_any_text_is_a_value_of_the_type_or_a_usage_error(text, kind):
    parameter = Parameter("x", kind, "0", "")
    try:
        found = parse(parameter, text)
    except UsageError:
        return
    item = {"int": int, "float": float, "bool": bool, "str": str}[kind.removeprefix("list[").removesuffix("]")]
    if not kind.startswith("list"):
        found = [found]
    assert type(found) is list
    assert all(type(x) is item for x in found)


@pytest.mark.parametrize("study", registry.NOTEBOOKS)
def test_the_real_notebooks_declare_the_parameters_of_their_study(study):
    declared = notebooks.parameters(notebooks.source_path(study))
    add = {"add"} if registry.load(study).added else set()
    assert set(declared) == {"source", "gpu", "processes", "quick", *registry.load(study).parameters} | add
    for parameter in declared.values():
        assert parameter.help, f"{parameter.name} has no comment"
        assert parse(parameter, parameter.default.strip("\"'")) == parameter.value
    notebooks.check(registry.load(study), {name: parameter.value for name, parameter in declared.items()})


# Running


def run(names=tuple(NOTEBOOKS), values=None, **options):
    return notebooks.run(names, values or {}, progress=Progress(open(os.devnull, "w")), **options)


def test_notebooks_run_with_their_parameters_in_this_python(toy, monkeypatch):
    """And not in another kernel of the same name; two at once share the cores."""
    kernel = {"argv": ["/bin/false", "{connection_file}"], "display_name": "Python 3", "language": "python"}
    toy.write("jupyter/kernels/python3/kernel.json", json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(toy.root / "jupyter"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(toy.root / "jupyter"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(host, "cores", lambda: 8)
    seen = "sys.executable, os.getcwd(), labkit.__file__, os.environ['OMP_NUM_THREADS']"
    toy.notebook("layers", f"import os, sys, labkit\nprint(batches, {seen})")
    ground, layers = run(values={"layers": {"batches": [4, 5]}})
    assert ground.ok, ground.error
    assert layers.ok, layers.error
    assert toy.printed("ground") == ["[1, 2]"]
    where = f"{paths.NOTEBOOKS} {Path(isolated.__file__).with_name('__init__.py')}"
    assert toy.printed("layers", "--batches-4,5") == [f"[4, 5] {sys.executable} {where} 4"]


def test_a_run_of_a_part_tells_its_figures_apart(toy):
    toy.notebook("layers", "from labkit import paths\nprint([paths.SUFFIX])")
    assert run(["layers"])[0].ok
    (part,) = run(["layers"], {"layers": {"processes": 1, "source": "recorded", "batches": [8], "deep": False}})
    assert part.ok, part.error
    assert (part.notebook, part.executed.name) == ("01_layers--batches-8", "01_layers--batches-8.ipynb")
    assert toy.printed("layers") == ["['']"]
    assert toy.printed("layers", "--batches-8") == ["['--batches-8']"]


def test_a_failing_cell_or_a_dying_kernel_stops_no_other_notebook_and_is_shown(toy):
    toy.notebook("ground", "print('before')", "1 / 0", "print('after')")
    toy.notebook("layers", "print('before')", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    ground, layers = run(jobs=1)
    assert ground.error == "In [3]: ZeroDivisionError: division by zero"
    assert ground.executed == toy.root / "reports/notebooks/00_ground.ipynb"
    assert toy.printed("ground") == ["before"]
    assert "died" in layers.error
    assert toy.printed("layers") == ["before"]


def test_a_notebook_that_never_ends_is_stopped(toy, monkeypatch):
    monkeypatch.setattr(notebooks, "MINUTES", 0.1)
    toy.notebook("ground", "import time; time.sleep(600)")
    ground, layers = run(jobs=1)
    assert ground.error == "timeout: no answer within 6 s"
    assert not layers.error


class Calls:
    """Stands in for the processes that execute notebooks: what each was given, and when it ran."""

    def __init__(self, seconds=0.3, failures=0):
        self.seconds, self.failures = seconds, failures
        self.env, self.span, self.count = {}, {}, 0

    def __call__(self, target, source, partial, values, *, env, stop, on_line, timeout):
        assert target == "labkit.workflow.notebooks:execute"
        self.count += 1
        if self.count <= self.failures:
            raise isolated.IsolatedError(target, "RuntimeError", "Kernel died before replying to kernel_info")
        study = Path(source).stem.partition("_")[2]
        start = time.monotonic()
        time.sleep(self.seconds)
        self.env[study], self.span[study] = env, (start, time.monotonic())

    def overlap(self):
        (a, b), (c, d) = self.span.values()
        return a < d and c < b


@pytest.fixture
def calls(monkeypatch):
    found = Calls()
    monkeypatch.setattr(isolated, "call", found)
    return found


def test_a_kernel_that_does_not_start_is_tried_once_more(toy, calls):
    calls.failures = 1
    assert run(["ground"])[0].ok
    assert calls.count == 2
    calls.failures = 4
    assert "Kernel died" in run(["ground"])[0].error
    assert calls.count == 4


def test_as_many_at_once_as_jobs_allow_and_they_share_the_cores(toy, calls, monkeypatch):
    monkeypatch.setattr(host, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for jobs, threads, overlap in ((1, "8", False), (2, "4", True)):
        assert all(result.ok for result in run(jobs=jobs))
        assert {env["OMP_NUM_THREADS"] for env in calls.env.values()} == {threads}
        assert calls.overlap() is overlap


def test_the_study_with_most_rows_begins_first(toy, calls):
    toy.write(f"data/{SLUG}/ground.parquet", "few")
    toy.write(f"data/{SLUG}/layers.parquet", "many more")
    assert [result.study for result in run(jobs=1)] == ["ground", "layers"]
    assert list(calls.span) == ["layers", "ground"]


def test_the_study_that_will_take_longest_begins_first(toy, calls):
    toy.write(f"data/{SLUG}/ground.parquet", "few")
    toy.write(f"data/{SLUG}/layers.parquet", "many more")
    run(jobs=1, seconds={"ground": 90.0, "layers": 20.0})
    assert list(calls.span) == ["ground", "layers"]


def test_without_a_package_that_notebooks_need_nothing_is_begun(toy, monkeypatch):
    """Measuring would begin, and each page fail when its turn comes."""
    monkeypatch.setattr(notebooks, "NEEDED", ("papermill", "no-such-package"))
    monkeypatch.setattr(notebooks, "run", lambda *words, **options: pytest.fail("it runs"))
    done = CliRunner().invoke(cli.main, ["run"])
    assert done.exit_code == 1
    assert done.output == "Error: not installed: no-such-package; no notebook runs without: `make setup`\n"


def test_studies_that_are_to_come_last_do(toy, calls):
    """Beside them nothing is compiled; what they need is compiled beside the others, however short these are."""
    seconds = {"ground": 20.0, "layers": 90.0}
    run(jobs=1, seconds=seconds, last={"layers"})
    assert list(calls.span) == ["ground", "layers"]
    calls.span.clear()
    run(jobs=1, seconds=seconds, last={"ground", "layers"})
    assert list(calls.span) == ["layers", "ground"]


# Measuring


@pytest.fixture
def gpu(toy, monkeypatch):
    """A made-up GPU, leased in the folder where the toy lab's own processes lease it."""
    found = lease.Gpu(0, "GPU-toy-0", GPU)
    monkeypatch.setattr(lease, "installed", lambda: [found])
    monkeypatch.setenv(lease.LOCKS, str(toy.tmp() / "gpus"))
    monkeypatch.setattr(notebooks, "FIRST", "ground")
    monkeypatch.delenv(lease.VISIBLE, raising=False)
    return found


@pytest.fixture
def leased_for(monkeypatch):
    """Notebooks for which the run leases the GPU, as for those that need it after they have measured."""
    monkeypatch.setattr(notebooks, "frees", lambda values: False)


def test_measuring_notebooks_get_the_gpu_one_at_a_time_and_the_ceilings_come_first(toy, gpu, calls, leased_for):
    assert all(result.ok for result in run(["layers", "ground"], jobs=2, can_measure=True))
    assert list(calls.span) == ["ground", "layers"]
    assert not calls.overlap()
    assert list(calls.env.values()) == [{"CUDA_VISIBLE_DEVICES": gpu.id, "LABKIT_LEASED_GPU": gpu.id}] * 2


def test_two_measuring_runs_wait_for_each_other(toy, gpu, calls, leased_for):
    calls.seconds = 1
    said = {name: io.StringIO() for name in NOTEBOOKS}
    with ThreadPoolExecutor(2) as pool:
        started = [
            pool.submit(notebooks.run, [name], {}, can_measure=True, progress=Progress(said[name]))
            for name in NOTEBOOKS
        ]
        assert all(result.ok for one in started for result in one.result())
    assert sum("waiting for a free GPU" in text.getvalue() for text in said.values()) == 1
    assert not calls.overlap()


def test_nothing_is_leased_for_recorded_measurements(toy, gpu, calls):
    with lease.gpu_lease():
        (result,) = run(["ground"], {"ground": {"source": "recorded"}}, can_measure=True)
    assert result.ok, result.error
    assert "LABKIT_LEASED_GPU" not in calls.env["ground"]


def test_a_measuring_command_waits_for_its_gpu_and_can_be_interrupted(toy, gpu):
    measures = f'from labkit.workflow import lease\nwith lease.gpu_lease([lease.Gpu(0, "{gpu.id}", "{GPU}")]) as gpu:'
    for name in NOTEBOOKS:
        toy.notebook(name, f"{measures}\n    print(gpu.id)")
    with lease.gpu_lease():
        waiting, interrupted = (toy.start("run", name, gpu=True) for name in ("layers", "ground"))
        for process in (waiting, interrupted):
            assert "measuring takes about" in process.stderr.readline()
            line = f"waiting for a free GPU; leased: {GPU} (process {os.getpid()})"
            assert any(line in process.stderr.readline() for _ in range(5))
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.wait(timeout=30) == 130
        interrupted.communicate()
        assert waiting.poll() is None
    _, err = waiting.communicate(timeout=180)
    assert waiting.returncode == 0, err
    assert toy.printed("layers")[-1] == gpu.id


# Stopped

KERNEL = "import os; open('kernel', 'w').write(str(os.getpid())); os.rename('kernel', 'pid')"
LONG = KERNEL + "\nimport time\ntime.sleep(600)"


def test_a_killed_run_leaves_no_process_loses_nothing_and_can_be_repeated(toy):
    assert run(["layers"])[0].ok
    reports.write()
    before = {path.name: path.read_bytes() for path in paths.REPORTS.rglob("*") if path.suffix in (".html", ".ipynb")}
    assert {"index.html", "01_layers.html", "01_layers.ipynb"} <= set(before)
    toy.notebook("layers", LONG)
    process = toy.start("run", "layers")
    assert wait_for(toy.root / "notebooks" / "pid")
    started = family(process.pid) if sys.platform == "linux" else {process.pid}
    assert "is being run by another labkit" in run(["layers"])[0].error
    process.kill()
    process.communicate()
    if sys.platform == "linux":
        assert len(started) > 2  # the command, the process of the notebook, its kernel
        assert int((toy.root / "notebooks" / "pid").read_text()) in started
    assert all(gone(pid) for pid in started)
    assert {path.name: path.read_bytes() for path in paths.REPORTS.rglob("*") if path.name in before} == before
    toy.notebook("layers", "print('again')")
    again = toy.labkit("run", "layers")
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1] == "reports/index.html"
    assert toy.printed("layers") == ["again"]
    assert not list((paths.REPORTS / "notebooks").glob("*partial*"))


def interrupt_as_a_terminal_does(process):
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("stop", "status", "said"),
    [(interrupt_as_a_terminal_does, 130, "interrupted"), (subprocess.Popen.terminate, 143, "")],
)
def test_a_stopped_run_leaves_no_process_and_says_so(toy, stop, status, said):
    toy.notebook("layers", LONG)
    process = toy.start("run", "layers")
    pid = toy.root / "notebooks" / "pid"
    assert wait_for(pid)
    stop(process)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert "Traceback" not in err
    assert said in err
    assert gone(int(pid.read_text()))
    assert not list((paths.REPORTS / "notebooks").glob("*.ipynb"))  # nor half a notebook


# Progress


def test_progress_is_plain_lines_without_a_terminal(tmp_path):
    with open(tmp_path / "log", "w+") as stream:
        progress = Progress(stream)
        progress.start([("a", "00_a"), ("b", "01_b")])
        progress.cell("a", 1, 3)
        progress.cell("a", 2, 3)  # too soon for another line
        progress.note("b", "waiting for a free GPU")
        progress.end("a", "", 2.4)
        progress.end("b", "In [3]: ValueError: no", 0.6)
        progress.close()
        stream.seek(0)
        assert stream.read().splitlines() == [
            "[1/2] 00_a: cell 1/3",
            "[2/2] 01_b: waiting for a free GPU",
            "[1/2] 00_a: done (2 s)",
            "[2/2] 01_b: FAILED: In [3]: ValueError: no (1 s)",
        ]


def test_progress_is_one_line_that_changes_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    with open(tmp_path / "log", "w+", newline="") as stream:
        progress = Progress(stream, live=True)
        progress.start([("a", "00_a"), ("b", "01_b")])
        progress.cell("a", 1, 3)
        progress.output("a", "x" * 100)
        progress.end("a", "", 2.4)
        progress.close()
        stream.seek(0)
        shown = stream.read()
    assert shown.count("\n") == 1
    assert all(len(part) < 40 for part in shown.replace("\n", "").split("\r\033[K"))
    assert "[1/2] 00_a: cell 1/3 · xxx" in shown


def wait_for(path, seconds=60):
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.exists()


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


def gone(pid, seconds=30):
    """Whether a process ends: gone, or dead and not yet waited for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_kept_figures_are_those_that_were_drawn_last(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(paths, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(paths, "DATA", tmp_path / "data")
    (tmp_path / "data" / "gpu").mkdir(parents=True)
    for study in "ab":  # recorded of one GPU alone, after which the folder of its figures is named
        (tmp_path / "data" / "gpu" / f"{study}.parquet").touch()
    drawn, kept = tmp_path / "reports" / "figures" / "gpu", tmp_path / "figures"
    for folder, names in (
        (drawn, ("a-one", "a-one--batches-7", "b-one")),
        (kept, ("a-old", "a-one", "b-old", "c-old")),
    ):
        folder.mkdir(parents=True)
        for name in names:
            (folder / f"{name}.svg").write_text("reports" if folder == drawn else "kept")
    assert reports.keep_figures(["a", "c"]) == [kept / "a-one.svg"]
    assert (kept / "a-one.svg").read_text() == "reports"
    left = {"a-one.svg", "b-old.svg", "c-old.svg"}  # b was not asked for; of c nothing was drawn
    assert {path.name for path in kept.iterdir()} == left
    reports.forget_figures(["a"])
    assert {path.name for path in drawn.iterdir()} == {"a-one--batches-7.svg", "b-one.svg"}
    assert {path.name for path in kept.iterdir()} == left


def test_what_no_page_shows_is_not_run(monkeypatch):
    ran = []
    monkeypatch.setenv("JUPYTER_PATH", "")
    monkeypatch.setattr(papermill, "execute_notebook", lambda book, *_, **__: ran.append(nbformat.read(book, 4)))
    source = notebooks.source_path("state_layout")
    notebooks.execute(str(source), "out.ipynb", {})
    tagged = {"lab-only" in cell.metadata.get("tags", []): cell for cell in nbformat.read(source, 4).cells}
    assert tagged.keys() == {False, True}
    assert all("lab-only" not in cell.metadata.get("tags", []) for cell in ran[0].cells)
    assert "x.answer()" in [cell.source for cell in ran[0].cells]
