"""Which studies of a run have a GPU, and that a notebook which leases its own can start before its turn."""

import io
import json
import threading

import pytest
from toy_lab import Toy

from labkit import isolated, paths
from labkit.sweep import prepared
from labkit.workflow import lease, notebooks
from labkit.workflow.progress import Progress
from labkit.workflow.turns import Turns

GPUS = [lease.Gpu(0, "GPU-7", "NVIDIA H100 80GB HBM3"), lease.Gpu(1, "GPU-8", "NVIDIA H100 80GB HBM3")]
WAITS = f"{lease.WAITING}leased: NVIDIA H100 80GB HBM3 (process 7)"


class Company:
    def __init__(self):
        self.told = []

    def begin(self, name, gpu):
        self.told.append((name, gpu.id))


def turns(gpus=GPUS[:1], company=None, order=()):
    said = io.StringIO()
    progress = Progress(said)
    progress.start([(name, name) for name in ("a", "b", "c")])
    return Turns(gpus, threading.Event(), progress, company, order=order), said


def test_a_study_begins_when_its_notebook_says_that_it_has_a_gpu():
    company = Company()
    held, _ = turns(GPUS, company)
    held.hear("a", "b: process 1, 2 of 3 cases to measure")
    assert company.told == []
    held.hear("a", f"{lease.TAKEN}GPU-8")
    held.hear("b", f"{lease.TAKEN}MIG-1")  # which the driver's list does not show
    assert company.told == [("a", "GPU-8"), ("b", "MIG-1")]


@pytest.mark.parametrize("end", [lambda held: held.hear("a", lease.FREED), lambda held: held.end("a")])
def test_waiting_is_said_only_where_another_run_holds_the_gpu(end):
    held, said = turns()
    held.hear("a", f"{lease.TAKEN}GPU-7")
    held.hear("b", WAITS)  # for a study of this run
    assert WAITS not in said.getvalue()
    end(held)
    held.hear("b", WAITS)
    assert WAITS in said.getvalue()


@pytest.mark.parametrize("end", [lambda held: held._begin("a", GPUS[0]), lambda held: held.end("a")])
def test_a_notebook_is_not_started_before_the_first_study_has_a_gpu_or_has_failed(end):
    held, started = Turns(GPUS[:1], threading.Event(), Progress(io.StringIO()), first="a"), threading.Event()

    def starts():
        with held.awaited("b"):
            started.set()

    threading.Thread(target=starts, daemon=True).start()
    assert not started.wait(0.5)
    end(held)
    assert started.wait(30)


@pytest.mark.parametrize(
    "asks",
    [
        lambda held: held.hear("a", f"{lease.TAKEN}GPU-7"),
        lambda held: held.hear("a", WAITS),
        lambda held: held.end("a"),
    ],
)
def test_notebooks_ask_for_a_gpu_in_the_order_of_the_run(asks):
    """They start one after the other: whoever asked first would be measured first, the longest perhaps last."""
    (held, _), started = turns(GPUS, order=["a", "b", "c"]), []

    def starts(study):
        with held.awaited(study):
            started.append(study)

    threads = {study: threading.Thread(target=starts, args=(study,), daemon=True) for study in "cba"}
    for thread in threads.values():
        thread.start()
    threads["a"].join(30)
    threads["b"].join(0.5)
    assert started == ["a"]
    asks(held)
    threads["b"].join(30)
    threads["c"].join(0.5)
    assert started == ["a", "b"]
    held.hear("b", WAITS)
    threads["c"].join(30)
    assert started == ["a", "b", "c"]


def test_waiting_for_the_first_study_ends_with_the_run():
    stop = threading.Event()
    stop.set()
    with Turns(GPUS[:1], stop, Progress(io.StringIO()), first="a").awaited("b"):
        pass


@pytest.mark.parametrize(
    ("values", "itself"), [({}, True), ({"quick": True}, True), ({"add": ["kernels.py:mine"]}, False)]
)
def test_who_leases(monkeypatch, tmp_path, values, itself):
    """A page needs no GPU, so its notebook has one only while it measures; one with added functions checks them."""
    monkeypatch.setenv(lease.LOCKS, str(tmp_path))
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(paths, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(lease, "visible", lambda: GPUS[:1])
    monkeypatch.delenv(lease.LEASED, raising=False)
    found = []

    def runs(*words, env, **options):
        try:
            with lease.gpu_lease(GPUS[:1], timeout=0 if lease.LEASED in env else 10, say=lambda text: None):
                found.append((lease.LEASED in env, True))
        except lease.Busy:
            found.append((lease.LEASED in env, False))

    monkeypatch.setattr(isolated, "call", runs)
    notebooks.run(["machine", "state_layout"], {"machine": values, "state_layout": values}, can_measure=True)
    # The machine is measured before all others, and what is called ahead is called while its GPU is held.
    assert found == [(True, False), (not itself, itself)]


def test_what_is_measured_alone_leaves_its_gpu_once_all_is_measured(monkeypatch, tmp_path):
    """Its page is made while the next one measures; others wait until then."""
    monkeypatch.setenv(lease.LOCKS, str(tmp_path))
    monkeypatch.setenv(prepared.FOLDER, str(tmp_path))
    monkeypatch.delenv(lease.LEASED, raising=False)
    company = Company()
    held, _ = turns(company=company)

    def waits():
        thread = threading.Thread(target=prepared.await_others, args=("b",), daemon=True)
        thread.start()
        thread.join(0.5)
        return thread.is_alive()

    with held.alone("a") as gpu:
        held.hear("a", f"{lease.TAKEN}{gpu.id}")  # which is the run's
        with pytest.raises(lease.Busy), lease.gpu_lease(GPUS[:1], timeout=0, say=lambda text: None):
            pass
        assert waits()
        held.hear("a", lease.FREED)
        with lease.gpu_lease(GPUS[:1], timeout=0):
            assert not waits()
    assert company.told == [("a", "GPU-7")]


def test_it_keeps_its_gpu_until_others_calls_are_made(monkeypatch, tmp_path):
    """Where its own rows are there already, it is done before they are."""
    monkeypatch.setenv(lease.LOCKS, str(tmp_path))
    monkeypatch.setenv(prepared.FOLDER, str(tmp_path))
    monkeypatch.delenv(lease.LEASED, raising=False)
    held, _ = turns()
    with held.alone("a"):
        with prepared.alone(prepared.CALLS):
            thread = threading.Thread(target=held.hear, args=("a", lease.FREED), daemon=True)
            thread.start()
            thread.join(0.5)
            assert thread.is_alive()
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize(("count", "values", "beside"), [(1, {}, True), (2, {}, False), (2, {"quick": True}, True)])
def test_whether_others_start_beside_the_first(monkeypatch, count, values, beside):
    """Of a full run on several GPUs one would get a GPU, and compile, beside what times the host."""
    started, found = threading.Event(), []

    def runs(name, *rest):
        if name == "machine":
            found.append(started.wait(10 if beside else 0.5))
        started.set()
        return notebooks.Result(name, name, 0.0)

    monkeypatch.setattr(lease, "visible", lambda: GPUS[:count])
    monkeypatch.setattr(notebooks, "_run_one", runs)
    notebooks.run(["machine", "state_layout"], {"machine": values, "state_layout": values}, can_measure=True)
    assert found == [beside]


FIRST = """
import json, pathlib, time
from labkit.sweep import prepared
leased = time.monotonic()
prepared.await_others("ground")  # not for what it holds itself
time.sleep(8)
pathlib.Path("ground.json").write_text(json.dumps([leased, leased, time.monotonic()]))
"""
MEASURES = """
import json, pathlib, time
started = time.monotonic()
from labkit.sweep import prepared
from labkit.workflow import lease
with lease.gpu_lease([lease.Gpu(0, "GPU-toy-0", "toy")], say=print) as gpu:
    print(f"{lease.TAKEN}{gpu.id}")
    prepared.await_others("NAME")
    leased = time.monotonic()
    time.sleep(6)
    freed = time.monotonic()
print(lease.FREED)
pathlib.Path("NAME.json").write_text(json.dumps([started, leased, freed]))
"""


def with_gpus(count, tmp_path, monkeypatch):
    """A toy lab on a machine with so many GPUs, whose notebooks lease their GPU themselves."""
    toy, listed = Toy(tmp_path), [lease.Gpu(index, f"GPU-toy-{index}", "toy") for index in range(count)]
    toy.enter(monkeypatch)
    monkeypatch.setattr(lease, "visible", lambda: listed)
    monkeypatch.setenv(lease.LOCKS, str(toy.tmp() / "gpus"))
    monkeypatch.delenv(lease.LEASED, raising=False)
    monkeypatch.setattr(notebooks, "frees", lambda values: True)
    monkeypatch.setattr(notebooks, "is_quick", lambda values: True)
    return toy


def test_a_notebook_starts_before_its_turn_and_measures_in_it(tmp_path, monkeypatch):
    toy = with_gpus(1, tmp_path, monkeypatch)
    names, company, said = ["ground", "layers"], Company(), io.StringIO()
    for name in names:
        toy.notebook(name, MEASURES.replace("NAME", name))
    results = notebooks.run(
        names, {}, can_measure=True, progress=Progress(said), beside=lambda order, values, stop: company
    )
    assert [result.error for result in results] == ["", ""]
    spans = sorted((json.loads((toy.root / "notebooks" / f"{name}.json").read_text()) for name in names), key=max)
    (_, _, freed), (started, leased, _) = spans
    assert started < freed <= leased
    assert sorted(company.told) == [(name, "GPU-toy-0") for name in names]
    assert lease.WAITING not in said.getvalue()  # it waits for the other


def test_where_the_first_study_cannot_run_the_others_do(tmp_path, monkeypatch):
    toy = with_gpus(1, tmp_path, monkeypatch)
    monkeypatch.setattr(notebooks, "FIRST", "ground")
    for name in ("ground", "layers"):
        toy.notebook(name, "print(1)")
    with notebooks._only_run(notebooks.executed_path("ground")):
        results = notebooks.run(["ground", "layers"], {}, can_measure=True, progress=Progress(io.StringIO()))
    assert ["being run by another" in result.error for result in results] == [True, False]
    assert results[1].ok


@pytest.mark.parametrize("gpus", [1, 2])
def test_notebooks_start_beside_what_is_measured_first_and_are_timed_after_it(gpus, tmp_path, monkeypatch):
    toy = with_gpus(gpus, tmp_path, monkeypatch)
    monkeypatch.setattr(notebooks, "FIRST", "ground")
    monkeypatch.setenv(prepared.FOLDER, str(toy.tmp()))
    other = MEASURES.replace("NAME", "layers").replace("GPU-toy-0", f"GPU-toy-{gpus - 1}")
    toy.notebook("ground", FIRST)
    toy.notebook("layers", other)
    results = notebooks.run(["ground", "layers"], {}, can_measure=True, progress=Progress(io.StringIO()))
    assert [result.error for result in results] == ["", ""]
    spans = [json.loads((toy.root / "notebooks" / f"{name}.json").read_text()) for name in ("ground", "layers")]
    (_, _, freed), (started, leased, _) = spans
    assert started < freed <= leased
