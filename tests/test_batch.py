"""Sweeps: checked before anything runs, one GPU a job, stopped and continued, and what fails is named."""

import contextlib
import json
import os
import random
import signal
import threading
import time
from types import SimpleNamespace

import light
import pytest
from pandas.testing import assert_frame_equal
from test_workflow import family
from toy_lab import CODE, SLUG, Toy

from labkit import paths
from labkit.bench import records
from labkit.workflow import engine, jobs, sweeps
from labkit.workflow.notebooks import UsageError

STUDY_CASES = 'return [Case("op", {"n": n}) for n in parameters.get("batches", (1, 2))]'


def fleet(root):
    """A toy lab whose study `layers` measures a case for each of its batches."""
    toy = Toy(root)
    study = root / "toys/layers/study.py"
    study.write_text(study.read_text().replace('return [Case("op", {"n": n}) for n in (1, 2)]', STUDY_CASES))
    toy.notebook("layers", "import light", 'light.measure("layers", {"batches": batches})')
    toy.notebook("ground", "print(sizes)")
    return toy


def options(toy, gpus=2):
    return {"gpu": True, "TOY_LIGHT": "1", "TOY_GPUS": str(gpus), light.LOG: str(toy.root / "log")}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    found = fleet(tmp_path)
    found.enter(monkeypatch)
    monkeypatch.setenv("LABKIT_LOCKS", str(found.tmp() / "gpus"))
    return found


def sweep_of(toy, *sets):
    """A sweep file of `layers`, and its path."""
    lines = "".join(f"  - {json.dumps(one)}\n" for one in sets)
    return toy.write("sweep.yaml", f"jobs:\n- notebooks: [layers]\n  sets:\n{lines}")


def batches(*groups):
    return [{"batches": list(group)} for group in groups]


def measured(toy, base="runs"):
    """The rows, without when they were measured."""
    return records.read(toy.root / base / SLUG / "layers.parquet").drop(columns="utc")


# What a file may say


def test_the_example_of_contributing_is_one(tmp_path):
    text = (CODE / "CONTRIBUTING.md").read_text()
    file = tmp_path / "sweep.yaml"
    file.write_text(text.partition("```yaml\n# sweep.yaml\n")[2].partition("```")[0])
    found = sweeps.read(file)
    assert [job.study for job in found] == ["machine", "state_layout", "gemv_coalescing", "gemv_coalescing"]
    assert found[-1].values["processes"] == 5


def test_a_sweep_is_notebooks_times_sets(toy):
    text = """
        minutes: 30
        jobs:
        - notebooks: [ground, 1]
          sets: [{}, {source: recorded, processes: 5, gpu: ""}]
          minutes: 2.5
        - notebooks: [layers]
          sets: [{batches: [7], scale: 2, deep: true}]
    """
    path = toy.write("sweep.yaml", text)
    with pytest.raises(UsageError, match=r"two jobs are 00_ground: \{\} and .*; one of them is enough"):
        sweeps.read(path)
    path.write_text(text.replace(', {source: recorded, processes: 5, gpu: ""}', ""))
    ground, layers, part = sweeps.read(path)
    assert (ground.name, layers.name, part.name) == ("00_ground", "01_layers", part.name)
    assert part.name.startswith("01_layers--batches-7--scale-2.0--deep-True")
    assert [job.minutes for job in (ground, layers, part)] == [2.5, 2.5, 30]
    assert type(part.values["scale"]) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jobs: [", "not YAML"),
        ("- 1", r"the file is \[1\]; allowed: a mapping with jobs, minutes"),
        ("job: []", "the file has 'job'; allowed: jobs, minutes; did you mean jobs?"),
        ("jobs: []", "holds no jobs; for example: jobs:"),
        ("jobs: 3", "the file: jobs is 3; allowed: a list"),
        ("jobs: [3]", r"jobs\[0\] is 3; allowed: a mapping with notebooks, sets, minutes"),
        ("jobs: [{sets: []}]", r"jobs\[0\] names no notebooks; allowed: ground, layers"),
        (
            "jobs: [{notebooks: [layer_s]}]",
            "notebook 'layer_s' is unknown; allowed: ground, layers; did you mean layers?",
        ),
        ("jobs: [{notebooks: [layers], sets: [3]}]", r"jobs\[0\].sets\[0\]: is 3; allowed: a mapping of parameters"),
        ("jobs: [{notebooks: [layers], sets: [{}, {batch: [1]}]}]", r"sets\[1\]: layers has no parameter 'batch'"),
        ("jobs: [{notebooks: [ground, layers], sets: [{batches: [1]}]}]", "ground has no parameter 'batches'"),
        ("jobs: [{notebooks: [layers], sets: [{batches: 1}]}]", r"batches is 1; allowed: list\[int\], for example"),
        ("jobs: [{notebooks: [layers], sets: [{batches: ['1']}]}]", r"batches is .*; allowed: list\[int\]"),
        ("jobs: [{notebooks: [layers], sets: [{batches: [99]}]}]", "an integer from 1 to 64"),
        ("jobs: [{notebooks: [layers], sets: [{label: no}]}]", "label is False; allowed: str"),
        ("jobs: [{notebooks: [layers], sets: [{deep: 1}]}]", "deep is 1; allowed: bool"),
        ("jobs: [{notebooks: [layers], sets: [{processes: true}]}]", "processes is True; allowed: int"),
        ("jobs: [{notebooks: [layers], sets: [{scale: .nan}]}]", "allowed: float"),
        ("jobs: [{notebooks: [layers], minutes: 0}]", "minutes is 0; allowed: a number above 0"),
        ("jobs: [{notebooks: [layers]}, {notebooks: [1]}]", "two jobs are 01_layers"),
    ],
)
def test_what_a_sweep_may_not_say_is_named_with_file_place_and_what_is_allowed(toy, text, message):
    path = toy.write("sweep.yaml", text)
    with pytest.raises(UsageError, match=message) as wrong:
        sweeps.read(path)
    assert str(wrong.value).startswith(f"{path}: ")


def test_nothing_runs_if_one_set_is_wrong_or_it_is_a_dry_run(toy, monkeypatch):
    monkeypatch.setattr(jobs, "perform", None)
    wrong = toy.command("run", "--sweep", str(sweep_of(toy, {}, {"batches": [65]})))
    assert wrong.returncode == 2
    assert "jobs[0].sets[1]: " in wrong.stderr
    dry = toy.command("run", "--sweep", str(sweep_of(toy, {}, {"batches": [8]})), "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.splitlines() == [
        "01_layers: replays; as its notebook has them; at most 240 min",
        "01_layers--batches-8: replays; batches=8; at most 240 min",
    ]
    assert not (toy.root / "runs").exists()
    both = toy.command("run", "layers", "--sweep", "sweep.yaml")
    assert both.returncode == 2
    assert "exclude it" in both.stderr
    assert toy.command("run", "--dry-run").returncode == 2


def test_a_sweep_that_must_measure_says_why_it_cannot(toy, monkeypatch):
    monkeypatch.setattr(jobs.notebooks, "why_not_measure", lambda: "no GPU here")
    done = toy.command("run", "--sweep", str(sweep_of(toy, {"source": "measure"})))
    assert done.returncode == 2
    assert "source=measure, but nothing can be measured here: no GPU here" in done.stderr


# Running


def test_a_sweep_measures_each_job_and_brings_the_rows_together(toy):
    sweep = sweep_of(toy, *batches([1], [2, 3], [4]))
    done = toy.labkit("run", "--sweep", str(sweep), **options(toy) | {"TOY_LIGHT": "pages"})
    assert done.returncode == 0, done.stderr
    assert "measuring takes about" in done.stderr
    assert len(light.spans(toy.root / "log")) == 2  # GPUs
    rows = measured(toy)
    assert [json.loads(case)["n"] for case in rows["case"].unique()] == [1, 2, 3, 4]
    assert {tuple(run) for run in rows["run"]} == {(0, 0, 1, 1)}
    assert {"01_layers--batches-1.html", "01_layers--batches-2,3.html"} <= {p.name for p in paths.REPORTS.iterdir()}
    before = (toy.root / "log").read_text()
    again = toy.labkit("run", "--sweep", str(sweep), **options(toy))
    assert again.returncode == 0, again.stderr
    assert "measuring takes" not in again.stderr
    assert (toy.root / "log").read_text() == before
    assert_frame_equal(measured(toy), rows)
    (toy.root / "runs" / SLUG / "layers.parquet").unlink()
    assert toy.labkit("run", "--sweep", str(sweep), **options(toy)).returncode == 0
    assert (toy.root / "log").read_text() == before
    assert_frame_equal(measured(toy), rows)


def test_one_failing_job_leaves_the_others_finishing_and_says_where_to_look(toy):
    toy.notebook("layers", "import light", 'light.measure("layers", {"batches": batches})', "assert batches != [2]")
    sweep = sweep_of(toy, *batches([1], [2], [3]))
    done = toy.labkit("run", "--sweep", str(sweep), **options(toy, gpus=1))
    assert done.returncode == 1
    where = toy.root / "runs/jobs/01_layers--batches-2/notebook.ipynb"
    assert f"failed: 01_layers--batches-2: In [5]: AssertionError: ; {where}" in done.stderr.splitlines()
    assert "AssertionError" in where.read_text()
    assert "AssertionError" in toy.executed("layers", "--batches-2")
    assert sorted(measured(toy)["case"].unique()) == ['{"n": 1}', '{"n": 3}']
    before = len((toy.root / "log").read_text().splitlines())
    toy.notebook("layers", "import light", 'light.measure("layers", {"batches": batches})')
    again = toy.labkit("run", "--sweep", str(sweep), **options(toy, gpus=1))
    assert again.returncode == 0, again.stderr
    assert len((toy.root / "log").read_text().splitlines()) == before  # what was measured is not measured again
    assert len(measured(toy)["case"].unique()) == 3


def test_a_notebook_that_never_ends_is_stopped_and_named(toy):
    toy.notebook(
        "layers",
        "import time, light",
        "batches != [2] or time.sleep(600)",
        'light.measure("layers", {"batches": batches})',
    )
    groups = [{"notebooks": ["layers"], "sets": batches([2]), "minutes": 0.05}]
    groups += [{"notebooks": ["layers"], "sets": batches([3])}]
    sweep = toy.write("sweep.yaml", json.dumps({"jobs": groups}))
    done = toy.labkit("run", "--sweep", str(sweep), **options(toy, gpus=1))
    assert done.returncode == 1
    assert "failed: 01_layers--batches-2: timeout: no answer within 3 s; " in done.stderr
    assert list(measured(toy)["case"].unique()) == ['{"n": 3}']


def test_two_sweeps_at_once_share_the_gpus(toy):
    """A hundred jobs of two runs, twenty of them in both: no two at once on a GPU."""
    one = toy.write("one.yaml", sweep_of(toy, *batches(*([n] for n in range(1, 51)))).read_text())
    two = toy.write("two.yaml", sweep_of(toy, *batches(*([n] for n in range(15, 65)))).read_text())
    started = [toy.start("run", "--sweep", str(path), **options(toy) | {"TOY_LIGHT": "inline"}) for path in (one, two)]
    for process in started:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    spans = light.spans(toy.root / "log")
    assert len(spans) == 2
    assert sum(map(len, spans.values())) == 100
    assert not any(light.overlaps(times) for times in spans.values())


def test_two_runs_of_one_sweep_share_its_jobs(toy):
    command = ("run", "--sweep", str(sweep_of(toy, *batches([1, 2, 3], [4, 5, 6]))))
    started = [toy.start(*command, **options(toy)) for _ in range(2)]
    for process in started:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert sum(map(len, light.spans(toy.root / "log").values())) == 2 * 6  # no case was measured twice
    assert len(measured(toy)["case"].unique()) == 6


def test_a_job_of_a_sweep_waits_for_a_run_that_measures(toy):
    """And both write rows of one study: none is lost."""
    run = toy.start("run", "layers", "-p", f"batches={','.join(map(str, range(3, 43)))}", **options(toy, gpus=1))
    sweep = toy.start("run", "--sweep", str(sweep_of(toy, *batches([1], [2]))), **options(toy, gpus=1))
    for process in (run, sweep):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    (times,) = light.spans(toy.root / "log").values()
    assert len(times) == 2 * 42
    assert not light.overlaps(times)
    assert len(measured(toy)["case"].unique()) == 42


# Killed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The rows of a sweep that nothing stopped."""
    toy = fleet(tmp_path_factory.mktemp("undisturbed"))
    done = toy.labkit("run", "--sweep", str(sweep_of(toy, *GROUPS)), **options(toy))
    assert done.returncode == 0, done.stderr
    return measured(toy)


GROUPS = batches(range(1, 30), range(30, 59), [59], range(60, 65))


def test_killed_at_ten_moments_it_ends_with_the_same_rows(toy, undisturbed):
    """kill -9 of the run, or of a job's process alone; then the same command again, until it has ended.

    Each at a random number of cases more. The run goes on with other jobs when one of them is killed, so that the last
    kills may come too late.
    """
    chance, log, killed = random.Random(20251126), toy.root / "log", []
    command = ("run", "--sweep", str(sweep_of(toy, *GROUPS)))

    def cases():
        return log.read_text().count("\n") if log.exists() else 0

    for number in range(10):
        wanted = cases() + chance.randint(1, 8)
        process = toy.start(*command, **options(toy))
        while process.poll() is None and cases() < wanted:
            time.sleep(0.002)
        jobs_now = [pid for pid in sorted(family(process.pid)) if pid != process.pid]
        victim = chance.choice(jobs_now) if number >= 5 and jobs_now else process.pid
        if process.poll() is None:
            killed.append(cases())
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(victim, signal.SIGKILL)
        _, err = process.communicate(timeout=120)
        assert "Traceback" not in err
    assert len(killed) >= 7
    assert 0 < killed[0] < killed[5] < 2 * len(undisturbed["case"].unique())  # of two processes each
    done = toy.labkit(*command, **options(toy))
    assert done.returncode == 0, done.stderr
    assert_frame_equal(measured(toy), undisturbed)
    assert not any(light.overlaps(times) for times in light.spans(toy.root / "log").values())


def test_a_job_that_another_engine_left_behind_is_waited_for(tmp_path, monkeypatch):
    """As long as something changes in its folder; a job without a change is given up."""
    job = SimpleNamespace(folder=tmp_path, name="left")
    monkeypatch.setattr(engine, "_QUIET_S", 1.5)
    monkeypatch.setattr(engine.jobs, "is_done", lambda job: (tmp_path / "rows.tar").exists())

    def work():
        for name in ("job.log", "notebook.ipynb", "rows.tar"):
            time.sleep(0.8)
            (tmp_path / name).touch()

    worker = threading.Thread(target=work)
    worker.start()
    engine._settle([job])
    assert (tmp_path / "rows.tar").exists()
    worker.join()
    (tmp_path / "rows.tar").unlink()
    start = time.monotonic()
    engine._settle([job])
    assert 1 < time.monotonic() - start < 10
