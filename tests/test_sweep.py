"""Whole sweeps of a toy study without a GPU: every row there, stopped and continued anywhere, failures kept apart."""

import contextlib
import dataclasses
import io
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import simulated
import torch

from labkit import isolated, paths, registry
from labkit.bench import machine, records, timing
from labkit.bench.spec import CONTROL, Case, Floor, Study, Trial, Variant, leaving_out
from labkit.sweep import case as case_runner
from labkit.sweep import run as sweep
from labkit.workflow import recorded

SIZES = [1, 2]
PROCESSES = 3
L2 = 64  # bytes
NS = {"copy": 9_000, "double": 10_000, "add": 20_000, "eager": 50_000}
NAMES = ["copy", "double", "add", CONTROL]
GRAPH_ROWS = [(name, cache) for name in NAMES for cache in ("cold", "hot")]
ROWS = sorted([*GRAPH_ROWS, ("eager", "cold")])


@dataclass
class Call:
    """y = 2x on one buffer set. ns: the time that the device reports for it; nothing: y is left as it is."""

    x: torch.Tensor
    y: torch.Tensor
    ns: int
    factor: float = 2.0
    nothing: bool = False

    def __call__(self) -> None:
        if not self.nothing:
            torch.mul(self.x, self.factor, out=self.y)


@dataclass
class Toy:
    """A study y = 2x, [n, 4] fp32, and what is wrong with it. ns: by variant; prepare: called before it, may raise."""

    ns: dict[str, int] = field(default_factory=NS.copy)
    prepare: Callable[[Case, str], None] = lambda case, name: None
    calls: Callable[[Case, str, list[Call]], None] = lambda case, name, calls: None
    sets: list[int] = field(default_factory=list)
    floor: Floor = field(default_factory=lambda: Floor(32, 4, limit=""))
    moves: dict[str, int] = field(default_factory=dict)  # by variant
    early: int = 0  # the size that is measured before the others
    settled: list[list[int]] = field(default_factory=list)  # the sizes in the file, at each call of `settle`

    def study(self) -> Study:
        return Study(
            "toy",
            "Toy",
            "A toy.",
            lambda parameters: [Case("double", {"n": n}) for n in parameters["sizes"]],
            self.variants,
            lambda case: "double",
            lambda case: self.floor,
            early=lambda case: case["n"] == self.early,
            settle=self.settle,
        )

    def settle(self, file: Path, folder: Path) -> None:
        rows = records.expanded(records.read(file))
        self.settled.append(sorted(set(rows["n"])))

    def variants(self, case: Case) -> list[Variant]:
        def variant(name: str, role: str, caches: tuple[str, ...] = ("cold", "hot"), mode: str = "graph") -> Variant:
            def prepare(case: Case, device: Any, sets: int, seed: int) -> Trial:
                return self.trial(case, name, device, sets, seed)

            return Variant(name, role, "test_sweep:source", prepare, {"name": name}, caches, mode)

        found = [variant("copy", "ceiling"), variant("double", "ours"), variant("add", "peer")]
        return [*found, variant("eager", "peer", ("cold",), "eager")]

    def trial(self, case: Case, name: str, device: Any, sets: int, seed: int) -> Trial:
        self.prepare(case, name)
        self.sets.append(sets)
        x = torch.randn((sets, case["n"], 4), generator=torch.Generator(device).manual_seed(seed))
        y = torch.empty_like(x)
        calls = [Call(a, b, self.ns[name]) for a, b in zip(x, y, strict=True)]

        def check() -> dict[str, float]:
            calls[0]()
            return {"y": float((y[0] - 2 * x[0]).norm() / x[0].norm())}

        self.calls(case, name, calls)
        written = lambda: not bool(y.isnan().any())  # noqa: E731
        return Trial(calls, lambda: y.fill_(math.nan), written, check, {"y": 1e-6}, moves=self.moves.get(name))


def source() -> None:
    """What `kernel_sha` hashes for every variant of the toy."""


class Lab:
    """The toy in a lab of its own, whose measuring processes are plain calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.toy = Toy()
        self.measured: list[tuple[int, int]] = []  # (n, process), in the order of measuring
        self.lines: list[str] = []
        self.patch = monkeypatch
        self.machine = dataclasses.replace(simulated.MACHINE, l2_bytes=L2)
        self.path = folder / "runs" / self.machine.slug / "toy.parquet"
        self.journal = records.Journal(self.path.with_suffix(".journal.jsonl"))
        monkeypatch.setattr(paths, "RUNS", folder / "runs")
        monkeypatch.setattr(paths, "DATA", folder / "data")
        monkeypatch.setattr(registry, "load", lambda name: self.toy.study())
        monkeypatch.setattr(machine, "this_machine", lambda: self.machine)
        monkeypatch.setattr(machine, "CudaDevice", self.device)
        monkeypatch.setattr(isolated, "call", self.call)
        monkeypatch.setattr(isolated, "Started", self.started)
        self.began: list[tuple[str, ...]] = []  # what was started before its turn, awaited, called and closed
        self.dead: set[int] = set()  # those that do not get ready
        self.anew: list[Any] = []  # the calls that each is given to get ready
        monkeypatch.setattr(case_runner, "measure", self.measure)
        self.real_measure: Callable[..., Any] = _MEASURE

    def device(self) -> simulated.HostDevice:
        device = simulated.HostDevice()
        device.machine = self.machine
        return device

    def started(self, target: str, *args: Any, env: Mapping[str, str | None]) -> Any:
        if target == "labkit.sweep.run:import_all":
            assert args == ("toy",)
        else:
            assert (target, args) == ("labkit.sweep.run:get_ready", ("toy", self.anew))
        assert env == {"CUDA_VISIBLE_DEVICES": "GPU-7", "TRITON_INTERPRET": None}
        number = len(self.began)
        self.began.append(("started", str(number)))

        def noted(what: str, answer: Any = None) -> Any:
            self.began.append((what, str(number)))
            return answer

        def also(then: str, *args: Any) -> None:
            assert (then, args) == ("labkit.sweep.run:get_ready", ("toy", self.anew))
            noted("told")

        alive = number not in self.dead
        ready, close = (lambda: noted("awaited", alive)), (lambda: noted("closed"))
        return SimpleNamespace(number=number, ready=ready, close=close, also=also)

    def call(
        self,
        target: str,
        *args: Any,
        env: Mapping[str, str | None],
        on_line: Callable[[str], None],
        started: Any = None,
    ) -> Any:
        assert target == "labkit.sweep.run:measure_process"
        if started:
            self.began.append(("called", str(started.number)))
        assert env == {"CUDA_VISIBLE_DEVICES": "GPU-7", "TRITON_INTERPRET": None}
        args = json.loads(json.dumps(args))  # as they would travel
        with contextlib.redirect_stdout(_Lines(on_line)):
            return sweep.measure_process(*args)

    def measure(self, study: Study, case: Case, index: int, *rest: Any) -> list[dict[str, Any]]:
        self.measured.append((case["n"], index))
        return self.real_measure(study, case, index, *rest)

    def run(self, sizes: list[int] = SIZES, processes: int = PROCESSES, **more: Any) -> pd.DataFrame:
        """Run the sweep; `measured` then holds what this run measured."""
        self.measured.clear()
        env = {"CUDA_VISIBLE_DEVICES": "GPU-7"}
        return sweep.run(self.toy.study(), {"sizes": sizes}, processes, env, self.lines.append, **more)

    def run_without(self, *names: str) -> pd.DataFrame:
        """Run one process of the sweep without some variants."""
        study = leaving_out(self.toy.study(), names)
        return sweep.run(study, {"sizes": SIZES}, 1, {"CUDA_VISIBLE_DEVICES": "GPU-7"}, self.lines.append)

    def row(self, n: int, variant: str, cache: str = "cold") -> pd.Series:
        rows = records.expanded(records.read(self.path))
        return rows[(rows["n"] == n) & (rows["variant"] == variant) & (rows["cache"] == cache)].iloc[0]


_MEASURE = case_runner.measure


class _Lines(io.TextIOBase):
    """Hands each line that is printed to a function."""

    def __init__(self, on_line: Callable[[str], None]):
        self.on_line = on_line

    def write(self, text: str) -> int:
        if text.strip():
            self.on_line(text)
        return len(text)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


def every(sizes: list[int] = SIZES, processes: int = PROCESSES) -> list[tuple[int, int]]:
    return [(n, index) for index in range(processes) for n in sizes]


def complete(rows: pd.DataFrame, sizes: list[int] = SIZES, processes: int = PROCESSES) -> None:
    """Every case, variant and cache once, ok, with the samples of every process."""
    for n in sizes:
        found = rows[rows["case"] == json.dumps({"n": n})]
        assert sorted(zip(found["variant"], found["cache"], strict=True)) == ROWS
        assert found["ok"].all(), found["reason"].tolist()
        for row in found.to_dict("records"):
            blocks = [list(row["block"][row["run"] == index]) for index in range(processes)]
            assert all(block and block == list(range(len(block))) for block in blocks), row["variant"]
            assert max(row["run"]) == processes - 1
            assert (row["error"] < 1e-6) & (row["reason"] == "")
    assert len(rows) == len(sizes) * len(ROWS)


def test_what_is_left_out_is_not_measured_until_it_is_asked_for(lab: Lab):
    rows = lab.run_without("add", "eager")
    assert set(rows["variant"]) == {"copy", "double", CONTROL}
    assert rows["ok"].all()
    lab.measured.clear()
    lab.run_without("add", "eager")
    assert lab.measured == []
    complete(lab.run())
    assert lab.measured == every()


def test_outputs_are_checked_before_the_timing_in_the_first_process_and_after_it_in_all(lab: Lab, monkeypatch):
    checked: list[int] = []

    class Counted(Toy):
        def trial(self, case: Case, name: str, device: Any, sets: int, seed: int) -> Trial:
            made = super().trial(case, name, device, sets, seed)
            assert made.check
            return dataclasses.replace(made, check=lambda check=made.check: (checked.append(seed), check())[1])

    lab.toy = Counted()
    rows = lab.run(SIZES[:1], 2)
    assert rows["ok"].all()
    variants = rows["variant"].nunique()
    first, second = (checked.count(seed) for seed in sorted(set(checked)))
    assert (first, second) == (len(rows) + variants, len(rows))


def test_what_is_wrong_in_a_later_process_is_said(lab: Lab):
    class Wrong(Toy):
        def trial(self, case: Case, name: str, device: Any, sets: int, seed: int) -> Trial:
            made = super().trial(case, name, device, sets, seed)
            return dataclasses.replace(made, check=lambda: {"y": 1.0}) if seed > 1000 and name == "add" else made

    lab.toy = Wrong()
    rows = lab.run(SIZES[:1], 2)
    assert set(rows.loc[~rows["ok"], "variant"]) == {"add"}
    assert lab.row(SIZES[0], "add")["reason"] == "wrong: error of y 1.0e+00 (allowed 1e-06)"


def test_a_whole_run(lab: Lab):
    rows = lab.run()
    complete(rows)
    assert lab.measured == every()
    assert machine.Machine.load(lab.path.parent) == lab.machine
    assert not lab.journal.path.exists()
    files = {path.name for path in lab.path.parent.iterdir()}
    assert files == {".toy.lock", "machine.json", "toy.parquet"}
    control = lab.row(1, CONTROL)
    assert json.loads(control["options"]) == {"name": "double", "repeats": "double"}
    assert (control["role"], lab.row(1, "double")["role"]) == ("control", "ours")
    assert lab.row(1, "eager")["mode"] == "eager"
    assert lab.row(1, "add")["us"] == pytest.approx(20, rel=0.01)
    assert set(rows["study"]) == {"toy"}
    assert set(rows["floor_bytes"]) == {32}
    assert (rows["calls_per_sample"] == rows["cache"].map({"cold": 8, "hot": 1})).all()
    assert any("case 2 of 2" in line for line in lab.lines)


def test_buffers_rotate_over_four_l2_and_hot_rows_need_half_of_it(lab: Lab):
    lab.run([1], 1)
    assert set(lab.toy.sets) == {4 * L2 // 32}
    lab.toy.floor = Floor(32, limit="", set_bytes=L2)
    lab.toy.sets.clear()
    assert set(lab.run([2], 1)["cache"]) == {"cold"}
    assert set(lab.toy.sets) == {4}
    lab.toy.floor = Floor(32, limit="", set_bytes=L2, hot_at_any_size=True)
    assert set(lab.run([3], 1)["cache"]) == {"cold", "hot"}


def test_what_is_recorded_is_not_measured_again(lab: Lab):
    first = lab.run()
    again = lab.run()
    assert lab.measured == []
    pd.testing.assert_frame_equal(first, again)
    more = lab.run([2, 3])
    assert lab.measured == every([3])
    complete(more, [2, 3])
    complete(records.read(lab.path), [1, 2, 3])


def test_fewer_processes_than_asked_for_are_measured_again(lab: Lab):
    complete(lab.run([1], 1), [1], 1)
    complete(lab.run([1], 3), [1], 3)
    assert lab.measured == every([1], 3)
    complete(lab.run([1], 2), [1], 3)  # more than asked for are welcome
    assert lab.measured == []


class Killed(BaseException):
    """The end of the whole run, at any point; no code handles it."""


@contextlib.contextmanager
def killed_at(lab: Lab, moment: int) -> Iterator[None]:
    """Points of a run at which it could end: before and after each write, in the middle of one, and at each line."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        if count == moment:
            raise Killed

    append, rewrite = records.Journal.append, records.Journal.rewrite
    write, unlink = records.write_atomic, Path.unlink

    def torn_append(self: records.Journal, entry: Mapping[str, Any]) -> None:
        step()
        append(self, entry)
        whole = self.path.read_bytes()
        with open(self.path, "ab") as file:
            file.truncate(len(whole) - len(json.dumps(entry)) // 2)
        step()
        self.path.write_bytes(whole)
        step()

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            step()
            result = function(*args, **options)
            step()
            return result

        return wrapped

    class Lines(list):
        def append(self, line: str) -> None:
            super().append(line)
            step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records.Journal, "append", torn_append)
        patch.setattr(records.Journal, "rewrite", around(rewrite))
        patch.setattr(records, "write_atomic", around(write))
        patch.setattr(Path, "unlink", around(unlink))
        patch.setattr(lab, "lines", Lines())
        yield


def test_killed_at_any_point_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kills = 0
    while True:
        lab = Lab(tmp_path / str(kills), monkeypatch)
        try:
            with killed_at(lab, kills + 1):
                lab.run([1, 2], 2)
            break  # it ended before the moment came
        except Killed:
            kills += 1
        started = list(lab.measured)
        rows = lab.run([1, 2], 2)
        complete(rows, [1, 2], 2)
        # What was journalled is kept: at most the last case that was started is measured again.
        assert lab.measured in (every([1, 2], 2)[len(started) :], every([1, 2], 2)[max(0, len(started) - 1) :])
        assert not lab.journal.path.exists()
        assert lab.run([1, 2], 2).equals(rows)
        assert lab.measured == []
    assert kills > 30


def test_stopped_after_each_case_only_the_missing_are_measured(lab: Lab):
    for done in range(len(every())):
        lab.measured.clear()

        def stop(line: str) -> None:
            if ", case " in line:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sweep.run(lab.toy.study(), {"sizes": SIZES}, PROCESSES, {"CUDA_VISIBLE_DEVICES": "GPU-7"}, stop)
        assert lab.measured == [every()[done]]
    complete(lab.run())
    assert lab.measured == []


def test_early_cases_are_measured_once_and_settled_before_the_others_begin(lab: Lab):
    lab.toy.early = 2
    seen: list[int] = []
    lab.toy.prepare = lambda case, name: seen.append(len(lab.toy.settled)) if case["n"] != 2 else None
    rows = lab.run([1, 2, 3], 2)
    assert lab.measured == [(2, 0), *every([1, 3], 2)]
    assert lab.toy.settled == [[2]]
    assert set(seen) == {1}
    complete(rows[rows["case"] == json.dumps({"n": 2})], [2], 1)
    complete(rows[rows["case"] != json.dumps({"n": 2})], [1, 3], 2)
    assert lab.run([1, 2, 3], 2).equals(rows)
    assert lab.measured == []


def test_early_cases_that_are_recorded_are_taken_with_their_date_and_settled(lab: Lab):
    lab.toy.early = 2
    recorded_at = lab.run([1, 2, 3], 2)
    data = paths.DATA / lab.machine.slug / lab.path.name
    records.write(data, recorded_at.assign(utc="2026-01-02T03:04:05+00:00"))
    shutil.rmtree(paths.RUNS)
    lab.toy.settled.clear()
    rows = lab.run([1, 2, 3], 2)
    assert lab.measured == every([1, 3], 2)
    assert lab.toy.settled[0] == [2]
    assert "toy: 1 cases by which it chooses are taken from data/" in lab.lines
    assert set(rows[rows["case"] == json.dumps({"n": 2})]["utc"]) == {"2026-01-02T03:04:05+00:00"}
    assert recorded.taken(lab.toy.study(), lab.machine.slug, rows) == 1
    assert recorded.taken(lab.toy.study(), lab.machine.slug, rows.assign(utc="2026-01-02T03:04:06+00:00")) == 0
    assert sweep.take_over([("toy", [("double", '{"n": 2}')])]) == 0  # they are there


@pytest.mark.parametrize("column", ["gpu", "driver", "torch", "triton", "kernel_sha"])
def test_early_cases_of_another_machine_or_source_are_measured(lab: Lab, column):
    lab.toy.early = 2
    rows = lab.run([1, 2, 3], 2)
    records.write(paths.DATA / lab.machine.slug / lab.path.name, rows.assign(**{column: "another"}))
    shutil.rmtree(paths.RUNS)
    lab.run([1, 2, 3], 2)
    assert lab.measured == [(2, 0), *every([1, 3], 2)]


def test_only_cases_that_a_study_chooses_by_are_taken(lab: Lab):
    """Early ones that settle nothing are measured, by the first process of all."""
    lab.toy.early, study = 2, lab.toy.study
    lab.patch.setattr(lab.toy, "study", lambda: dataclasses.replace(study(), settle=None))
    records.write(paths.DATA / lab.machine.slug / lab.path.name, lab.run([1, 2, 3], 2))
    shutil.rmtree(paths.RUNS)
    lab.run([1, 2, 3], 2)
    assert lab.measured == [*every([1, 2, 3], 1), (1, 1), (3, 1)]


def test_facts_are_kept_in_the_evidence_of_the_first_process(lab: Lab):
    found = []

    def facts() -> dict[str, Any]:
        found.append(1)
        return {"choice": {"rows": 4}}

    trial = lab.toy.trial
    lab.patch.setattr(lab.toy, "trial", lambda *args: dataclasses.replace(trial(*args), facts=facts))
    rows = lab.run([1], 3)
    assert {text for text in rows["evidence"]} == {'{"choice": {"rows": 4}}'}
    assert len(found) == len({*NAMES, "eager"})


def test_the_journal_of_other_cases_survives(lab: Lab):
    def stop(line: str) -> None:
        if ", case 1" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run(lab.toy.study(), {"sizes": [7, 8]}, 1, {"CUDA_VISIBLE_DEVICES": "GPU-7"}, stop)
    before = lab.journal.entries()
    assert [entry["case"] for entry in before] == [["double", '{"n": 7}']] * 2  # the marker and the rows
    complete(lab.run())
    assert lab.journal.entries() == before
    complete(lab.run([7, 8], 1), [7, 8], 1)
    assert lab.measured == [(8, 0)]


def test_a_variant_that_cannot_be_prepared_is_a_row_and_the_others_go_on(lab: Lab):
    def prepare(case: Case, name: str) -> None:
        if name == "add" and case["n"] == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore lines")

    lab.toy.prepare = prepare
    recovered = []
    lab.patch.setattr(simulated.HostDevice, "recover", lambda self: recovered.append(1))
    rows = lab.run()
    failed = rows[~rows["ok"]]
    assert sorted(zip(failed["variant"], failed["cache"], failed["case"], strict=True)) == [
        ("add", "cold", '{"n": 2}'),
        ("add", "hot", '{"n": 2}'),
    ]
    assert set(failed["reason"]) == {"OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB."}
    assert failed["samples_ns"].map(len).eq(0).all()
    assert len(recovered) == PROCESSES
    complete(rows[rows["case"] == '{"n": 1}'], [1])
    assert len(lab.row(2, "double")["samples_ns"]) == timing.BLOCKS * PROCESSES
    lab.run()
    assert lab.measured == []  # it is recorded that it cannot run


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("out of memory\nmore", "RuntimeError: out of memory"),
        ("", "RuntimeError: "),
        (
            "\n\x1b[91m\x1b[1merror[MISSING]:\x1b[0m it is not installed\n  at line 3",
            "RuntimeError: error[MISSING]: it is not installed",
        ),
    ],
)
def test_a_reason_is_the_first_line_that_says_something(message: str, reason: str):
    assert records.first_line(RuntimeError(message)) == reason


def test_a_variant_that_cannot_be_captured_is_a_row_and_the_others_go_on(lab: Lab):
    prepare = simulated.HostDevice.prepare

    def fails(self: simulated.HostDevice, calls: Any, mode: str, whole: bool) -> Any:
        if calls[0].ns == lab.toy.ns["add"]:
            raise RuntimeError("operation not permitted when stream is capturing")
        return prepare(self, calls, mode, whole)

    lab.patch.setattr(simulated.HostDevice, "prepare", fails)
    rows = lab.run([1])
    failed = rows[~rows["ok"]]
    assert sorted(zip(failed["variant"], failed["cache"], strict=True)) == [("add", "cold"), ("add", "hot")]
    assert failed["reason"].str.startswith("RuntimeError: operation not permitted").all()
    assert sorted(zip(rows["variant"], rows["cache"], strict=True)) == ROWS


def test_a_case_of_which_nothing_can_run_is_recorded(lab: Lab):
    def prepare(case: Case, name: str) -> None:
        raise RuntimeError("no kernel image")

    lab.toy.prepare = prepare
    rows = lab.run([1])
    assert not rows["ok"].any()
    assert sorted(zip(rows["variant"], rows["cache"], strict=True)) == ROWS
    lab.run([1])
    assert lab.measured == []


def dies(lab: Lab, when: Callable[[int, int], bool]) -> None:
    """Have the measuring process die in the case n of process `index` when `when(n, index)`."""

    def measure(study: Study, case: Case, index: int, *rest: Any) -> Any:
        if when(case["n"], index):
            raise isolated.IsolatedError("t", "crash", "killed by signal 11")
        return _MEASURE(study, case, index, *rest)

    lab.real_measure = measure


def test_a_process_that_dies_in_a_case_costs_that_case(lab: Lab):
    dies(lab, lambda n, index: n == 2 and index == 1)
    rows = lab.run([1, 2, 3])
    assert lab.measured == every([1, 2, 3])  # the case is not tried again, the next one goes on
    bad = rows[rows["case"] == '{"n": 2}']
    assert not bad["ok"].any()
    assert set(bad["reason"]) == {"the process died: crash: killed by signal 11"}
    assert sorted(zip(bad["variant"], bad["cache"], strict=True)) == ROWS
    assert all(set(run) == {0, 2} for run in bad["run"])  # the samples of the others are kept
    complete(rows[rows["case"] != '{"n": 2}'], [1, 3])
    lab.run([1, 2, 3])
    assert lab.measured == []


def too_old(*_: Any, **__: Any) -> None:
    """A measuring process that dies outside any case."""
    raise isolated.IsolatedError("t", "RuntimeError", "CUDA driver is too old")


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_processes_get_ready_before_anything_is_timed_and_are_called_in_their_turn(lab: Lab, processes: int):
    """As many as may; where nothing is left to measure none does."""
    begun: list[int] = []
    real = lab.real_measure

    def measure(*words: Any) -> Any:
        begun.append(sum(what == "awaited" for what, _ in lab.began))
        return real(*words)

    lab.real_measure = measure
    lab.run(processes=processes)
    waiting = [str(number) for number in range(min(processes, sweep.WAITING))]
    assert set(begun) == {len(waiting)}
    assert [one for one in lab.began if one[0] != "called"] == [
        *((what, number) for what in ("started", "awaited") for number in waiting),
        *(("closed", number) for number in waiting[::-1]),
    ]
    assert [number for what, number in lab.began if what == "called"] == waiting
    lab.began.clear()
    lab.run(processes=processes)
    assert lab.began == []


def test_processes_that_have_imported_before_there_is_a_gpu_are_told_to_get_ready(lab: Lab):
    """One that is left over is closed; where more measure than have begun, the others are started."""
    env = {"CUDA_VISIBLE_DEVICES": "GPU-7"}
    with sweep.imported("toy", 2, env) as early:
        assert lab.began == [("started", "0"), ("started", "1")]
        lab.run(processes=3, early=early)
    first, second, third = (number for what, number in lab.began if what == "started")
    assert [number for what, number in lab.began if what == "told"] == [first, second]
    assert [number for what, number in lab.began if what == "called"] == [first, second, third]
    assert {number for what, number in lab.began if what == "closed"} == {first, second, third}
    lab.began.clear()
    with sweep.imported("toy", 9, env) as early:
        assert len(lab.began) == sweep.WAITING
        lab.run(sizes=[77], processes=1, early=early)
    assert [what for what, _ in lab.began].count("called") == 1
    assert {number for what, number in lab.began if what == "closed"} == {*map(str, range(sweep.WAITING))}


def test_nothing_is_timed_before_what_is_done_beside_has_ended(lab: Lab):
    """It begins once processes get ready; where nothing is left to measure it is not asked for."""
    steps: list[str] = []
    real = lab.real_measure

    def measure(*words: Any) -> Any:
        steps.append("timed")
        return real(*words)

    def other() -> None:
        time.sleep(0.3)
        steps.append("ended")

    lab.real_measure = measure
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:

            def beside() -> Any:
                steps.append("begun")
                assert [what for what, _ in lab.began] == ["started"]
                return pool.submit(other)

            sweep.run(
                lab.toy.study(), {"sizes": [1, 2]}, 1, {"CUDA_VISIBLE_DEVICES": "GPU-7"}, lab.lines.append, beside
            )
        assert steps == ["begun", "ended", "timed", "timed"]


def test_a_process_that_was_started_is_ended_when_the_one_before_fails(lab: Lab):
    lab.patch.setattr(isolated, "call", too_old)
    with pytest.raises(isolated.IsolatedError, match="too old"):
        lab.run()
    told = [(what, number) for what in ("started", "awaited") for number in "012"]
    assert lab.began == [*told, ("closed", "2"), ("closed", "1"), ("closed", "0")]


def test_one_that_does_not_get_ready_is_replaced(lab: Lab):
    lab.dead = {1}
    complete(lab.run())
    assert [number for what, number in lab.began if what == "called"] == ["0", "2"]


def test_only_processes_that_have_something_left_get_ready(lab: Lab):
    real = lab.real_measure

    def measure(study: Study, case: Case, index: int, *rest: Any) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return real(study, case, index, *rest)

    lab.real_measure = measure
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    lab.began.clear()
    lab.real_measure = real
    complete(lab.run())
    assert [number for what, number in lab.began if what == "started"] == ["0", "1"]


def test_each_is_given_the_calls_whose_compilers_keep_nothing(lab: Lab):
    study = lab.toy.study()
    first, *_ = study.cases({"sizes": SIZES})
    peers = [one.name for one in study.variants(first) if one.role == "peer"]
    lab.anew = [("toy", first.op, first.key, name, "any size") for name in peers]  # of those that are alike, the first
    assert lab.anew
    with_calls = dataclasses.replace(study, anew=lambda case, variant: "any size")
    lab.patch.setattr(registry, "load", lambda name: with_calls)
    sweep.run(with_calls, {"sizes": SIZES}, 2, {"CUDA_VISIBLE_DEVICES": "GPU-7"}, lab.lines.append)
    assert [what for what, _ in lab.began].count("started") == 2


def test_getting_ready_passes_over_what_is_not_there_and_makes_the_calls(lab: Lab):
    made: list[str] = []
    study = dataclasses.replace(lab.toy.study(), imports=("no_such_module", "json"))
    lab.patch.setattr(registry, "load", lambda name: study)
    lab.patch.setattr(registry, "trials", lambda name: None)
    lab.patch.setattr(sweep, "call_once", lambda *words: made.append(words[3]))
    sweep.get_ready("toy", [["toy", "double", "{}", "theirs", ""], ["toy", "double", "{}", "another", ""]], "cpu")
    assert made == ["theirs", "another"]


def test_a_process_that_dies_in_every_case_ends(lab: Lab):
    dies(lab, lambda n, index: True)
    rows = lab.run()
    assert lab.measured == every()
    assert not rows["ok"].any()


def test_death_outside_any_case_is_raised(lab: Lab):
    lab.patch.setattr(isolated, "call", too_old)
    with pytest.raises(isolated.IsolatedError, match="too old"):
        lab.run()
    assert lab.journal.entries() == []


def test_death_before_the_first_case_is_not_blamed_on_the_case_at_which_the_last_run_was_stopped(lab: Lab):
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    lab.real_measure = stop
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    assert [entry.get("rows") for entry in lab.journal.entries()] == [None]  # a case was started, and is not done

    lab.patch.setattr(isolated, "call", too_old)
    with pytest.raises(isolated.IsolatedError, match="too old"):
        lab.run()
    lab.patch.setattr(isolated, "call", lab.call)
    lab.real_measure = _MEASURE
    complete(lab.run())


def test_rows_of_another_source_than_this_process_sees_do_not_repeat_for_ever(lab: Lab):
    """A notebook's kernel that outlives an edit hashes the old source, its measuring processes the new one."""
    lab.patch.setattr(case_runner, "kernel_sha", lambda source: "edited")
    with pytest.raises(RuntimeError, match="toy: the source changed while it was measured"):
        lab.run()
    assert lab.measured == every(processes=1)


@pytest.mark.parametrize("change", ["kernel", "driver", "gpu"])
@pytest.mark.parametrize("finished", [True, False])
def test_rows_of_another_kernel_or_machine_are_measured_again(lab: Lab, change: str, finished: bool):
    if finished:
        lab.run()
    else:
        dies(lab, lambda n, index: (n, index) == (2, 2))
        real = lab.call

        def call(*args: Any, **options: Any) -> Any:
            try:
                return real(*args, **options)
            except isolated.IsolatedError:
                raise KeyboardInterrupt from None

        lab.patch.setattr(isolated, "call", call)
        with pytest.raises(KeyboardInterrupt):
            lab.run()
        assert len([entry for entry in lab.journal.entries() if "rows" in entry]) == len(every()) - 1
        lab.patch.setattr(isolated, "call", lab.call)
        lab.real_measure = _MEASURE
    if change == "kernel":
        for module in (sweep, case_runner):
            lab.patch.setattr(module, "kernel_sha", lambda source: "changed")
    elif change == "driver":
        lab.machine = dataclasses.replace(lab.machine, driver="2.0")
    else:
        lab.machine = dataclasses.replace(lab.machine, name="Simulated GPU, rev. 2")  # of the same slug
    rows = lab.run()
    assert lab.measured == every()
    complete(rows)
    values = {"kernel": ("kernel_sha", "changed"), "driver": ("driver", "2.0"), "gpu": ("gpu", lab.machine.name)}
    column, value = values[change]
    assert set(rows[column]) == {value}
    lab.run()
    assert lab.measured == []


def test_a_study_with_another_variant_is_measured_again(lab: Lab):
    lab.run([1], 1)
    variants = lab.toy.variants
    lab.toy.variants = lambda case: [v for v in variants(case) if v.name != "add"]
    rows = lab.run([1], 1)
    assert lab.measured == [(1, 0)]
    assert "add" not in set(rows["variant"])


def test_wrong_results_are_not_ok(lab: Lab):
    def calls(case: Case, name: str, calls: list[Call]) -> None:
        if name == "add":
            calls[0].factor = 2.1

    lab.toy.calls = calls
    rows = lab.run([1])
    bad = rows[~rows["ok"]]
    assert set(bad["variant"]) == {"add"}
    assert bad["error"].between(0.09, 0.11).all()
    assert set(bad["reason"]) == {"wrong: error of y 1.0e-01 (allowed 1e-06)"}
    assert bad["samples_ns"].map(len).eq(timing.BLOCKS * PROCESSES).all()  # it is timed all the same, for the eye


def test_results_that_turn_wrong_while_it_is_timed_are_not_ok(lab: Lab):
    def calls(case: Case, name: str, calls: list[Call]) -> None:
        if name == "add":
            calls[0] = Worsening(calls[0])

    class Worsening:
        def __init__(self, call: Call):
            self.call, self.ns, self.count = call, call.ns, 0

        def __call__(self) -> None:
            self.count += 1
            self.call.factor = 2.0 if self.count < 4 else 2.5
            self.call()

    lab.toy.calls = calls
    rows = lab.run([1])
    bad = rows[~rows["ok"]]
    assert set(bad["variant"]) == {"add"}
    assert bad["reason"].eq("wrong: error of y 5.0e-01 (allowed 1e-06)").all()


def test_outputs_that_are_not_written_while_it_is_timed_are_not_ok(lab: Lab):
    def calls(case: Case, name: str, calls: list[Call]) -> None:
        if name == "add":
            calls[3].nothing = True  # the check looks at set 0 only

    lab.toy.calls = calls
    lab.run([1])
    row = lab.row(1, "add")
    assert not row["ok"]
    assert row["reason"] == "an output was not written while it was timed"
    assert lab.row(1, "double")["ok"]


def test_a_rate_above_the_datasheet_is_refused(lab: Lab):
    lab.toy.floor = Floor(32, limit="")
    lab.machine = dataclasses.replace(lab.machine, datasheet_tbs=32 / 15_000 / 1e3)  # between double and add
    rows = lab.run([1])
    assert set(rows[~rows["ok"]]["variant"]) == {"copy", "double", CONTROL}
    assert set(rows[~rows["ok"]]["cache"]) == {"cold"}  # a hot rate is of the L2
    assert lab.row(1, "double")["reason"].startswith("refused: 0.00 TB/s is above the datasheet's")
    assert lab.row(1, "add")["ok"]
    lab.toy.moves["double"] = 16  # half of what the others move
    lab.toy.moves["copy"] = 64
    lab.run([2])
    assert lab.row(2, "double")["ok"]
    assert not lab.row(2, "copy")["ok"]


def count_timings(lab: Lab) -> list[tuple[int, bool, tuple[str, ...]]]:
    real, found = timing.measure, []

    def measure(device: Any, timed: Mapping[str, Any], **options: Any) -> timing.Timing:
        found.append((options["seed"], options["hot"], tuple(timed)))
        return real(device, timed, **options)

    lab.patch.setattr(timing, "measure", measure)
    return found


def test_above_the_ceiling_it_is_timed_again_once_and_remarked(lab: Lab):
    lab.toy.ns["add"] = 8_000  # the ceiling: 9000
    timings = count_timings(lab)
    lab.run([1], 1)
    cold = [seed for seed, hot, names in timings if not hot and "add" in names]
    assert cold == [1000, 1001]  # again, in another order
    assert len([1 for _, hot, _ in timings if hot]) == 1
    row = lab.row(1, "add")
    assert row["ok"]
    assert row["reason"] == "above the ceiling timed in the same run, twice"
    assert {lab.row(1, name)["reason"] for name in ("copy", "double")} == {""}
    assert lab.row(1, "add", "hot")["reason"] == ""
    assert len(row["samples_ns"]) == timing.BLOCKS


def test_above_the_ceiling_once_is_no_remark(lab: Lab):
    timings = count_timings(lab)
    lab.toy.ns["add"] = 8_000
    real = simulated.HostDevice.time

    def time(self: simulated.HostDevice, timed: Any, hot: bool) -> list[int]:
        again = timings[-1][0] > 1000
        return [ns + 4_000 * (again and 7_500 < ns < 8_500) for ns in real(self, timed, hot)]

    lab.patch.setattr(simulated.HostDevice, "time", time)
    lab.run([1], 1)
    assert [seed for seed, hot, names in timings if not hot and "add" in names] == [1000, 1001]
    assert lab.row(1, "add")["reason"] == ""
    assert lab.row(1, "add")["us"] == pytest.approx(12, rel=0.01)  # the second timing is the one that is kept


def test_a_little_above_the_ceiling_is_let_be(lab: Lab):
    lab.toy.ns["add"] = 8_900
    timings = count_timings(lab)
    lab.run([1], 1)
    assert [seed for seed, hot, names in timings if not hot and "add" in names] == [1000]


def test_predictions_come_from_the_ceilings_of_this_machine_and_are_kept_with_the_rows(lab: Lab):
    lab.toy.floor = Floor(4 * 2**20, limit="copy", set_bytes=16)
    assert lab.run([1], 1)["predicted_us"].isna().all()  # no ceiling known
    for folder, us in ((paths.DATA, 30.0), (paths.RUNS, 40.0)):  # recorded ones, and then its own
        row = records.read(lab.path).iloc[0].to_dict()
        row |= {"study": "machine", "op": "ceiling", "case": '{"mib": 2, "what": "copy"}', "variant": "torch"}
        row |= {"role": "ceiling", "cache": "cold", "mode": "graph", "floor_bytes": 4 * 2**20, "ok": True}
        row |= {"run": [0], "block": [0], "samples_ns": [round(1e3 * us)], "throttled": [""], "sm_mhz": [1]}
        records.write(folder / lab.machine.slug / "machine.parquet", [row])
        rows = lab.run([round(us)], 1)
        cold = rows[(rows["cache"] == "cold") & (rows["mode"] == "graph")]
        assert cold["predicted_us"].tolist() == pytest.approx([us] * 4)
        assert cold["ceiling"].tolist() == pytest.approx([4 * 2**20 / us / 1e6] * 4)


def test_without_a_gpu_it_says_so_and_writes_nothing(lab: Lab):
    def none() -> None:
        raise RuntimeError("no GPU to measure: torch sees no NVIDIA GPU here")

    lab.patch.setattr(machine, "this_machine", none)
    with pytest.raises(RuntimeError, match="no GPU to measure"):
        lab.run()
    assert not lab.path.parent.exists()


def test_a_damaged_file_is_an_error_before_anything_is_measured(lab: Lab):
    lab.run([1], 1)
    lab.path.write_bytes(lab.path.read_bytes()[:-10])
    with pytest.raises(records.RecordError, match=r"toy\.parquet"):
        lab.run([2], 1)
    assert lab.measured == []


def test_a_timer_of_its_own_is_shown_beside_and_not_compared(lab: Lab):
    trial = Toy.trial

    def foreign(self: Toy, case: Case, name: str, *rest: Any) -> Trial:
        found = trial(self, case, name, *rest)
        if name == "eager":
            found.timer = lambda: [1500.4, 1500.6]
            for call in found.calls:
                call()
        return found

    lab.patch.setattr(Toy, "trial", foreign)
    timings = count_timings(lab)
    lab.run([1], 2)
    assert not any("eager" in names for _, _, names in timings)
    row = lab.row(1, "eager")
    assert list(row["samples_ns"]) == [1500, 1501] * 2
    assert list(row["run"]) == [0, 0, 1, 1]
    assert row["calls_per_sample"] == 1


# Others' compilers, before anything is timed


@pytest.fixture
def warmed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls that are made side by side; cases of size 2 have them."""
    made: list[tuple[Any, ...]] = []

    def call_many(calls: list[isolated.Call], stop: Any) -> None:
        assert not lab.measured
        assert {call.env["CUDA_VISIBLE_DEVICES"] for call in calls} == {"GPU-7"}
        for call in calls:
            wanted, taken = json.loads(json.dumps(call.args))
            sweep.call_free(wanted, taken, device="cpu")
        made.extend(wanted)  # of each process the same

    study = lab.toy.study
    monkeypatch.setattr(
        lab.toy, "study", lambda: dataclasses.replace(study(), warmed=lambda case, variant: "two" * (case["n"] == 2))
    )
    monkeypatch.setattr(isolated, "call_many", call_many)
    return made


def test_others_calls_are_made_once_before_anything_is_timed(lab, warmed):
    lab.run()
    assert [args[3] for args in warmed] == ["add", "eager"]
    assert {args[2] for args in warmed} == {Case("double", {"n": 2}).key}
    assert lab.toy.sets[:2] == [1, 1]
    warmed.clear()
    lab.run()  # all is there
    assert warmed == []


def test_what_cannot_be_called_before_is_a_row_as_ever(lab, warmed):
    def prepare(case: Case, name: str) -> None:
        if name == "add":
            raise ImportError("no library")

    lab.toy.prepare = prepare
    rows = lab.run()
    assert "no library" in lab.row(2, "add")["reason"]
    assert rows[rows["variant"] == "double"]["ok"].all()


def test_a_process_that_dies_before_anything_is_timed_stops_nothing(lab, warmed, monkeypatch):
    def dies(calls: list[isolated.Call], stop: Any) -> None:
        raise isolated.IsolatedError("labkit.sweep.run:call_once", "crash", "signal 11")

    monkeypatch.setattr(isolated, "call_many", dies)
    assert lab.run()["ok"].all()
    assert any("signal 11" in line for line in lab.lines)


def test_calls_of_one_kind_are_made_far_apart():
    """Side by side they would compile the same."""
    cases = [("0", "small"), ("1", "small"), ("2", "large")]
    names = ("fla KV", "fla VK", "vllm 1")  # two of one project
    wanted = [sweep.Call("study", "op", case, variant, alike) for case, alike in cases for variant in names]
    assert [(one.case, one.variant) for one in sweep.apart(wanted)] == [
        *(("0", "fla KV"), ("0", "vllm 1"), ("2", "fla KV"), ("2", "vllm 1")),
        *(("0", "fla VK"), ("1", "vllm 1"), ("2", "fla VK")),
        *(("1", "fla KV"), ("1", "fla VK")),
    ]


def test_a_process_whose_gpu_a_call_has_broken_makes_no_more_of_them(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(sweep, "call_once", lambda *words: made.append(words[3]))
    monkeypatch.setattr(sweep, "_is_usable", lambda: made[-1] != "breaks")
    monkeypatch.setattr(machine, "this_machine", lambda: simulated.MACHINE)
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    taken = []
    monkeypatch.setattr(sweep.tuning, "take_from", taken.append)
    wanted = [("study", "op", "{}", name, "alike") for name in ("works", "breaks", "left")]
    sweep.call_free(wanted, str(tmp_path))
    assert made == ["works", "breaks"]
    sweep.call_free(wanted, str(tmp_path))  # another process
    assert made == ["works", "breaks", "left"]
    assert set(taken) == {tmp_path / "runs" / simulated.MACHINE.slug / "study.tuning.json"}  # and none is kept
