"""While one study is measured, the next one's kernels are compiled: which, beside which, and away from the GPU."""

import threading
import time

import pytest

from labkit import host, isolated, registry
from labkit.bench import records
from labkit.sweep import prepared
from labkit.sweep import run as sweep
from labkit.workflow import ahead, lease, notebooks, quick, reports

GPU = lease.Gpu(0, "GPU-7", "NVIDIA H100 80GB HBM3")
KERNELS = prepared.kernels("nvidia-h100-80gb-hbm3")
ORDER = ["machine", "state_layout", "gemv_coalescing", "moe_persistent_grid", "persistent_tables"]
TAKE_OVER = ahead.Ahead._take_over
FEW = {"gemv_coalescing": {"models": ["Llama-3.2-1B"], "dtypes": ["bf16"]}}


@pytest.fixture
def calls(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(isolated, "call", lambda *words, **options: found.append((words, options)))
    monkeypatch.setattr(isolated, "call_many", lambda calls, stop: found.append(calls))
    monkeypatch.setattr(lease, "capability", lambda gpu: 90)
    monkeypatch.setattr(host, "cores", lambda: 16)
    monkeypatch.setattr(ahead.Ahead, "_judge", lambda self, halt: None)
    monkeypatch.setattr(ahead.Ahead, "_take_over", lambda self, gpu: None)
    monkeypatch.setenv(prepared.FOLDER, "")
    monkeypatch.setattr(ahead.paths, "RUNS", tmp_path)
    return found


def begun(*names, values=None, order=ORDER):
    company = ahead.Ahead(order, values or {}, threading.Event())
    for name in names:
        if thread := company.begin(name, GPU):
            thread.join()
    return company  # its marks are there as long as it is


def test_the_next_study_is_compiled_without_a_gpu(calls):
    begun("state_layout", values=FEW, order=ORDER[1:3])
    [_, (words, options)] = calls
    assert words[0] == "labkit.sweep.run:compile_apart"
    study = registry.load("gemv_coalescing")
    cases = [*study.cases(notebooks.defaults("gemv_coalescing") | FEW["gemv_coalescing"]), *study.tiny]
    assert words[1:] == ([("gemv_coalescing", [(case.op, case.key) for case in cases])], 90, GPU.name, ahead.SPARED)
    assert options["env"]["CUDA_VISIBLE_DEVICES"] == ""


def test_choices_are_taken_from_what_is_recorded_before_anything_is_compiled(calls, monkeypatch):
    """Once; of studies that choose by their first cases, and not of a quick look, which has none of these."""
    monkeypatch.setattr(ahead.Ahead, "_take_over", TAKE_OVER)
    values = {"gemv_coalescing": {"quick": True}}
    begun("machine", "state_layout", order=ORDER, values=values)
    words, options = calls[0]
    study = registry.load("moe_persistent_grid")
    early = [case.id for case in study.cases(notebooks.defaults("moe_persistent_grid")) if study.early(case)]
    assert words == ("labkit.sweep.run:take_over", [("moe_persistent_grid", early)])
    assert options["env"]["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert [one for one in calls if not isinstance(one, list) and one[0][0] == words[0]] == [calls[0]]
    monkeypatch.setattr(ahead.paths, "DATA", ahead.paths.RUNS)
    calls.clear()
    begun("machine", order=ORDER)  # where nothing is recorded
    assert calls[0][0][0] != words[0]


def test_once_choices_are_known_all_kernels_of_a_study_are_compiled_ahead(calls, monkeypatch):
    study = registry.load("moe_persistent_grid")
    cases = study.cases(notebooks.defaults("moe_persistent_grid"))
    have = {case.id for case in cases if study.early(case)}
    monkeypatch.setattr(ahead.filters, "keys_of", lambda file: have)
    file = ahead.paths.RUNS / "nvidia-h100-80gb-hbm3" / "moe_persistent_grid.parquet"
    file.parent.mkdir()
    file.touch()
    for more, marked in ((set(), True), ({cases[-1].id}, False)):
        have |= more
        company = begun("state_layout", order=["state_layout", "moe_persistent_grid"])
        assert prepared.is_prepared("moe_persistent_grid", KERNELS) == marked
        [_, (words, _)] = calls
        assert not have & set(words[1][0][1])
        calls.clear()
        del company


def test_a_quick_look_compiles_its_own_cases_alone(calls):
    begun("state_layout", order=ORDER[1:3], values={"gemv_coalescing": {"quick": True}})
    [_, (words, _)] = calls
    [(_, keys)] = words[1]
    assert 0 < len(keys) < 20


def test_all_that_follow_are_compiled_once_in_their_order(calls):
    begun("state_layout", "gemv_coalescing", order=ORDER[1:])
    named = [[name for name, _ in words[1]] for words, _ in calls]
    assert named == [["state_layout"], ["gemv_coalescing"], ["moe_persistent_grid"], ["persistent_tables"]]


def test_of_a_study_that_has_begun_the_tiny_cases_alone_are_compiled(calls):
    """It compiles itself what it times, and runs those at its end; what was compiled before is not compiled again."""
    company = begun("state_layout", order=ORDER[1:2])
    [(words, _)] = calls
    assert words[1] == [("state_layout", [(case.op, case.key) for case in registry.load("state_layout").tiny])]
    gpu = "nvidia-h100-80gb-hbm3"
    assert prepared.is_prepared("state_layout", prepared.tiny(gpu))
    assert not prepared.is_prepared("state_layout", prepared.kernels(gpu))
    calls.clear()
    company = begun("machine", "state_layout", order=ORDER[:2])
    assert len([one for one in calls if not isinstance(one, list)]) == 1
    del company


def test_a_quick_look_is_compiled_at_once_before_anything_is_timed(calls, monkeypatch):
    """Also where nothing of others is called; what is to be measured waits until all is compiled."""
    go, waited, named = threading.Event(), threading.Event(), []

    def compiles(target, wanted, *words, **options):
        named.append([name for name, _ in wanted])
        go.wait(60)

    monkeypatch.setattr(isolated, "call", compiles)
    order = ["machine", "persistent_tables", "gemv_coalescing"]
    company = ahead.Ahead(order, {name: {"quick": True} for name in order}, threading.Event())
    thread = company.begin("machine", GPU)
    threading.Thread(target=lambda: prepared.await_others("machine") or waited.set(), daemon=True).start()
    assert not waited.wait(0.5)
    go.set()
    assert waited.wait(30)
    thread.join(30)
    assert named == [order[1:]]
    assert all(prepared.is_prepared(name, KERNELS) for name in order[1:])


def test_calls_of_others_are_made_before_anything_is_timed(calls, monkeypatch):
    company = begun("machine", values={"state_layout": {"quick": True}}, order=ORDER[:2])
    [made] = [one for one in calls if isinstance(one, list)]
    wanted = made[0].args[0]
    assert len(made) == len(wanted) == 10  # a process for each: there are more cores
    names = {one.variant for one in wanted}
    assert {one.study for one in wanted} == {"state_layout"}
    assert any("sglang" in name for name in names)
    assert all(call.env["CUDA_VISIBLE_DEVICES"] == "GPU-7" for call in made)
    study, said = registry.load("state_layout"), []
    sweep.warm_up(study, study.cases(notebooks.defaults("state_layout")), {}, said.append)
    assert said == []  # not again
    company = begun(order=[])  # another run makes its own
    monkeypatch.setattr(isolated, "call_many", lambda calls, stop: None)
    sweep.warm_up(study, study.cases(notebooks.defaults("state_layout")), {}, said.append)
    assert len(said) == 1
    del company


def test_beside_calls_of_others_only_the_next_study_is_compiled(calls, monkeypatch):
    """Calls need the cores; what the others need is compiled beside what is measured then. They take longer here."""
    compiled = threading.Event()
    monkeypatch.setattr(isolated, "call", lambda *words, **options: calls.append((words, options)) or compiled.set())
    monkeypatch.setattr(isolated, "call_many", lambda made, stop: compiled.wait(60) and calls.append(made))
    company = begun("machine")
    named = lambda: [[name for name, _ in one[0][1]] for one in calls if not isinstance(one, list)]  # noqa: E731
    assert named() == [["state_layout"]]
    while company._busy:  # its thread is just ending
        time.sleep(0.01)
    company.begin("state_layout", GPU).join()
    assert named() == [["state_layout"], ["gemv_coalescing"], ["moe_persistent_grid"], ["persistent_tables"]]


def test_calls_are_not_made_for_rows_that_are_there(calls, monkeypatch):
    study, asked = quick.asked("state_layout", {"quick": True})
    keys = {(case.op, case.key) for case in study.cases(asked)}
    monkeypatch.setattr(ahead.filters, "keys_of", lambda file: keys)
    (ahead.paths.RUNS / "nvidia-h100-80gb-hbm3").mkdir()
    (ahead.paths.RUNS / "nvidia-h100-80gb-hbm3" / "state_layout.parquet").touch()
    company = begun("machine", values={"state_layout": {"quick": True}}, order=ORDER[:2])
    assert calls == []
    assert not prepared.is_prepared("state_layout", prepared.CALLS)  # rows of earlier sources are measured again
    del company


def test_a_study_that_times_the_host_ends_what_compiles(calls, monkeypatch):
    started, ended = threading.Event(), []

    def waits(*words, stop, **options):
        started.set()
        while not stop.is_set():
            stop.wait(0.01)
        ended.extend(name for name, _ in words[1])
        raise isolated.IsolatedError("t", "stopped", "the call was stopped")

    monkeypatch.setattr(isolated, "call", waits)
    company = ahead.Ahead(ORDER[1:], {}, threading.Event())
    thread = company.begin("state_layout", GPU)
    assert started.wait(30)
    assert company.begin("persistent_tables", GPU) is None
    thread.join(30)
    assert ended == ["state_layout"]


def test_nothing_is_timed_while_calls_of_others_are_made(calls, monkeypatch):
    """What measures can start meanwhile; compiling goes on until it measures."""
    made, go, waited = [], threading.Event(), threading.Event()
    monkeypatch.setattr(isolated, "call_many", lambda calls, stop: made.append(calls) or go.wait(60))
    company = ahead.Ahead(ORDER[:2], {"state_layout": {"quick": True}}, threading.Event())
    thread = company.begin("machine", GPU)  # returns although no call has ended
    waiting = threading.Thread(target=lambda: prepared.await_others("machine") or waited.set(), daemon=True)
    waiting.start()
    assert not waited.wait(0.5)
    assert not prepared.is_prepared("state_layout", prepared.CALLS)
    go.set()
    assert waited.wait(30)
    assert prepared.is_prepared("state_layout", prepared.CALLS)
    thread.join(30)
    assert len(made) == 1


def test_the_index_is_prepared_while_calls_of_others_are_made(calls, monkeypatch):
    """And what is not ready when something that times the host begins is made at the end."""
    begun_at, halts = threading.Event(), []

    def judge(self, halt):
        halts.append(halt)
        begun_at.set()

    monkeypatch.setattr(isolated, "call_many", lambda calls, stop: begun_at.wait(30))
    monkeypatch.setattr(ahead.Ahead, "_judge", judge)
    company = begun("machine", values={"state_layout": {"quick": True}}, order=ORDER[:2])
    assert [halt.is_set() for halt in halts] == [True]
    monkeypatch.undo()
    asked = []
    monkeypatch.setattr(isolated, "call", lambda *words, **options: asked.append((words, options["env"])))
    company._judge(ahead._Halt(threading.Event()))
    [((target,), env)] = asked
    assert target == "labkit.workflow.reports:judge_recorded"
    assert callable(reports.judge_recorded)
    assert env == {lease.VISIBLE: ""}


def test_a_run_that_is_stopped_stops_the_calls_of_others(calls, monkeypatch):
    stopped, stop = threading.Event(), threading.Event()

    def waits(calls, stop):
        while not stop.is_set():
            stop.wait(0.01)
        stopped.set()
        raise isolated.IsolatedError("t", "stopped", "the call was stopped")

    monkeypatch.setattr(isolated, "call_many", waits)
    company = ahead.Ahead(ORDER[:2], {"state_layout": {"quick": True}}, stop)
    thread = company.begin("machine", GPU)
    stop.set()
    assert stopped.wait(30)
    thread.join(30)
    prepared.await_others("machine")


@pytest.mark.parametrize("name", registry.NOTEBOOKS)
def test_nothing_runs_beside_a_study_that_times_the_host(name):
    assert ahead.times_host(name, {}) == (name not in ("state_layout", "gemv_coalescing", "gated_delta_today"))


def test_after_the_last_study_nothing_is_compiled(calls):
    begun("state_layout", order=["state_layout"], values={"state_layout": {"quick": True}})
    assert calls == []


def test_on_two_cores_or_without_an_answer_of_the_driver_nothing_is_compiled(calls, monkeypatch):
    monkeypatch.setattr(lease, "capability", lambda gpu: 0)
    begun("state_layout", order=ORDER[1:])
    monkeypatch.setattr(lease, "capability", lambda gpu: 90)
    monkeypatch.setattr(host, "cores", lambda: 2)
    begun("state_layout", order=ORDER[1:])
    assert calls == []


def test_a_kernel_that_does_not_compile_ends_no_run(calls, monkeypatch):
    def fails(*words, **options):
        raise isolated.IsolatedError("t", "CompilationError", "no")

    monkeypatch.setattr(isolated, "call", fails)
    begun("state_layout", order=ORDER[1:], values=FEW)


def test_what_is_compiled_apart_leaves_cores_free(monkeypatch):
    study, taken = registry.load("state_layout"), []
    case = next(case for case in study.cases(notebooks.defaults("state_layout")) if case.op == "decode")
    monkeypatch.setattr(sweep.os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(sweep.os, "sched_setaffinity", lambda process, cores: taken.append(cores))
    monkeypatch.setattr(sweep.os, "nice", lambda by: 0)
    monkeypatch.setattr(
        "labkit.evidence.compiled.prebuild", lambda sources, capability, marks: taken.append(len(sources))
    )
    monkeypatch.setattr(isolated, "call_many", lambda calls, count: [sweep.kernels_of(*call.args) for call in calls])
    count = sweep.compile_apart([("state_layout", [[case.op, case.key]]), ("machine", [])], 90, GPU.name, 2)
    assert taken == [[2, 3, 4, 5, 6, 7], count]
    assert count > 1


def test_it_is_told_when_a_study_begins(monkeypatch, tmp_path):
    """Inside the lease, in the order of the run."""
    told = []

    class Company:
        def __init__(self, order, values, stop):
            told.append(order)

        def begin(self, name, gpu):
            told.append((name, gpu.id))

    monkeypatch.setattr(lease, "visible", lambda: [GPU])
    monkeypatch.setattr(notebooks, "_run_one", lambda name, values, held, *rest: _held(name, held))
    values = {"state_layout": {"add": ["kernels.py:mine"]}}  # which does not lease its GPU itself
    notebooks.run(["machine", "state_layout"], values, can_measure=True, beside=Company)
    assert told == [["machine", "state_layout"], ("machine", "GPU-7"), ("state_layout", "GPU-7")]


def test_what_is_compiled_ahead_is_not_looked_up_again(calls, monkeypatch):
    """But of a study whose first rows say which kernels it needs: a quick look measures none of these."""
    order = [*ORDER[1:], "gated_delta_today"]
    company = begun("state_layout", order=order, values={"gemv_coalescing": {"quick": True}})
    assert [name for name in order if prepared.is_prepared(name, KERNELS)] == [
        "gemv_coalescing",
        "persistent_tables",
        "gated_delta_today",
    ]
    asked, file = [], ahead.paths.RUNS / "nvidia-h100-80gb-hbm3" / "none.parquet"
    monkeypatch.setattr(sweep, "compile_ahead", lambda study, cases, say: asked.append(study.name))
    for name in ("gated_delta_today", "state_layout"):
        study = registry.load(name)
        sweep._Sweep(study, {}, 0, {}, print, file, records.Journal(file)).measure([])
    assert asked == ["state_layout"]
    del company


def test_what_did_not_compile_or_was_stopped_is_looked_up_again(calls, monkeypatch):
    def stopped(*words, **options):
        raise isolated.IsolatedError("t", "stopped", "the call was stopped")

    monkeypatch.setattr(isolated, "call", stopped)
    company = begun("state_layout", order=["state_layout", "persistent_tables"])
    assert not prepared.is_prepared("persistent_tables", KERNELS)
    del company


def test_so_are_the_tiny_cases_that_a_full_page_runs(calls):
    """Also of a study whose first rows say which kernels the others need: they say nothing of these."""
    values, tiny = {"persistent_tables": {"quick": True}}, prepared.tiny("nvidia-h100-80gb-hbm3")
    company = begun("state_layout", values=values)
    assert [name for name in ORDER if prepared.is_prepared(name, tiny)] == ORDER[1:4]
    del company


def test_outside_a_run_nothing_is_prepared(monkeypatch):
    monkeypatch.delenv(prepared.FOLDER, raising=False)
    assert not prepared.is_prepared("state_layout", KERNELS)


def _held(name, held):
    with held:
        return notebooks.Result(name, name, 0.0)


@pytest.mark.parametrize(("gpu", "asked"), [("nvidia-h100-80gb-hbm3", 0), ("nvidia-a100-sxm4-80gb", 1)])
def test_what_is_compiled_for_one_gpu_is_not_for_another(calls, monkeypatch, gpu, asked):
    """A host may have GPUs of two generations, whose kernels are not the same."""
    company, found = begun("state_layout", order=["state_layout", "persistent_tables"]), []
    monkeypatch.setattr(sweep, "compile_ahead", lambda study, cases, say: found.append(study.name))
    study, file = registry.load("persistent_tables"), ahead.paths.RUNS / gpu / "none.parquet"
    sweep._Sweep(study, {}, 0, {}, print, file, records.Journal(file)).measure([])
    assert len(found) == asked
    del company
