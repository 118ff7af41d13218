"""How long a run will take: by made-up rows, and by the recorded ones as far as they tell."""

import json
import math
from datetime import UTC, datetime, timedelta

import pandas as pd
import pytest
from toy_lab import SLUG, Toy

from labkit import paths, registry
from labkit.bench import records, spec
from labkit.bench.spec import Case, Floor, Study
from labkit.sweep import run
from labkit.workflow import estimate, jobs, notebooks, recorded

START = datetime(2026, 11, 26, tzinfo=UTC)
RIGHT = 0.30  # how far an estimate may be off


def made(seconds, op="op", evidence="{}"):
    """Rows of cases, two variants each, which take so long one after the other; and a last one."""
    lines, at = [], START
    for n, length in enumerate([*seconds, 1]):
        for variant in ("a", "b"):
            utc = at + timedelta(seconds=length // 2 if variant == "b" else 0)
            row = {"op": op, "case": Case(op, {"n": n}).key, "variant": variant, "utc": utc.isoformat()}
            lines.append(row | {"evidence": evidence, "run": [0, 1, 2]})
        at += timedelta(seconds=length)
    return pd.DataFrame(lines)


def study(count, early=lambda case: False, kernels=None, roles=(), warmed=lambda case, variant: "", settle=None):
    def cases(parameters):
        return [Case("op", {"n": n}) for n in range(count)]

    options = {"early": early, "kernels": kernels, "warmed": warmed, "settle": settle}
    variants = [
        spec.variant(f"{role} {n}", role, "json:dumps", {}, source="json:dumps") for n, role in enumerate(roles)
    ]
    return Study("made", "t", "s", cases, lambda x: variants, lambda x: "", lambda x: Floor(1), **options)


def seconds(of, rows, processes=1, cores=16):
    return estimate.of_cases(of, of.cases({}), processes, estimate.known(rows), cores)


def test_a_case_takes_the_first_process_as_long_as_until_the_next_one_began():
    assert estimate.known(made([4, 8, 2])).first == {
        ("op", '{"n": 0}'): 4.0,
        ("op", '{"n": 1}'): 8.0,
        ("op", '{"n": 2}'): 2.0,
    }
    assert seconds(study(3), made([4, 8, 2])) == estimate.START_S + 14


def test_a_pause_between_two_runs_is_no_case():
    assert list(estimate.known(made([4, 10_000, 2])).first.values()) == [4.0, 2.0]


def test_a_case_takes_what_it_took_the_quickest_of_the_recorded_gpus():
    found = estimate.known(made([40, 8, 2]), made([3, 9]))
    assert list(found.first.values()) == [3.0, 8.0, 2.0]


def test_what_others_do_when_first_called_is_counted_once_for_all_processes():
    with_others = study(2, roles=["ours", "peer", "peer"])
    for processes in (1, 3):
        more = seconds(with_others, made([2, 2]), processes) - seconds(
            study(2, roles=["ours"]), made([2, 2]), processes
        )
        assert more == pytest.approx(estimate.OTHERS_S)


def test_what_was_never_recorded_takes_what_is_usual():
    assert seconds(study(4), made([4, 4])) == estimate.START_S + 16
    assert seconds(study(2), pd.DataFrame(columns=records.SCHEMA.names)) == estimate.START_S + 2 * estimate.UNKNOWN_S
    assert seconds(study(0), made([4])) == 0


def test_later_processes_do_not_compile_what_the_first_one_did():
    """Of eight cases one compiles for a minute."""
    rows = made([60, *[2] * 7])
    one, three = seconds(study(8), rows), seconds(study(8), rows, 3)
    assert three - one == 2 * (7 * 2 + 2 + estimate.SPREAD_S)


@pytest.mark.parametrize(("settle", "starts"), [(None, 1), (lambda rows, folder: None, 2)])
def test_cases_that_are_measured_early_are_measured_once(settle, starts):
    """By the first process, or one of their own where a study chooses by them."""
    once = seconds(study(3, early=lambda case: case["n"] == 0, settle=settle), made([9, 2, 2]), 3)
    usual = (2 + estimate.SPREAD_S + 2 + 2) / 3  # of nine seconds those that count
    assert once == pytest.approx(starts * estimate.START_S + 9 + 2 + 2 + 2 * (2 * usual))


def test_what_is_compiled_ahead_is_shared_by_the_cores():
    rows = made([2, 2], evidence='{"registers": 1}')
    with_list = study(2, kernels=lambda cases, capability, gpu: [])
    one, four = (seconds(with_list, rows, cores=cores) for cores in (1, 4))
    assert one - seconds(study(2), rows) == pytest.approx(estimate.AHEAD_S + estimate.KERNEL_S)
    assert four - seconds(study(2), rows) == pytest.approx(estimate.AHEAD_S + estimate.KERNEL_S / 4)


@pytest.mark.parametrize(("cores", "expected"), [(1, 60 * estimate.CALL_S), (64, estimate.LONGEST_CALL_S)])
def test_calls_of_others_that_compile_before_are_shared_by_the_cores(cores, expected):
    assert estimate.of_calls(60, cores) == pytest.approx(expected)
    assert estimate.of_calls(0, cores) == 0


def told(monkeypatch, *, first, calls=(6, 5), beside=False):
    """Of two studies with so many calls of others, and of the machine, on 16 cores; nothing is recorded."""
    monkeypatch.setattr(paths, "recorded_gpus", list)
    names = ["state_layout", "gemv_coalescing"]
    wanted = {
        name: estimate.Wanted(
            study(1, roles=["peer"] * count, warmed=lambda case, variant: "all"), study(1).cases({}), 1, [], beside
        )
        for name, count in zip(names, calls, strict=True)
    }
    machine = {notebooks.FIRST: estimate.Wanted(study(1), study(1).cases({}), 1, [])} if first else {}
    return estimate._told(machine | wanted, "", 1, 16)


def test_a_run_that_begins_with_the_machine_makes_the_calls_of_all_once(monkeypatch):
    alone = estimate.START_S + estimate.UNKNOWN_S + estimate.PAGE_S
    one = alone + estimate.OTHERS_S
    assert told(monkeypatch, first=True).seconds == {
        notebooks.FIRST: alone + estimate.LONGEST_CALL_S,
        "state_layout": one,
        "gemv_coalescing": one,
    }
    assert set(told(monkeypatch, first=False).seconds.values()) == {one + estimate.LONGEST_CALL_S}
    assert set(told(monkeypatch, first=True, calls=(0, 0)).seconds.values()) == {alone}


def test_pages_are_made_beside_the_next_study_but_the_last(monkeypatch):
    full, quick = (told(monkeypatch, first=True, beside=beside).whole for beside in (False, True))
    assert full - quick == pytest.approx(estimate.PAGE_S)  # of two


@pytest.mark.parametrize(
    ("name", "values", "beside"),
    [
        ("state_layout", {"quick": True}, True),
        ("state_layout", {"quick": True, "add": ["f.py:f"]}, False),  # checks these on the GPU
        ("state_layout", {}, True),
        ("machine", {}, True),
    ],
)
def test_whose_page_is_made_beside_another_study(name, values, beside):
    assert estimate._asked(name, values).beside == beside


def test_several_gpus_share_all_but_what_runs_first():
    times = {notebooks.FIRST: 10.0, "state_layout": 30.0, "gemv_coalescing": 20.0, "batched_ffn": 10.0}
    assert estimate.Estimate(times).whole == 70
    assert estimate.Estimate(times, 2).whole == 40
    assert estimate.Estimate(times, 9).whole == 40


def test_what_this_machine_has_measured_is_not_counted_again(tmp_path, monkeypatch):
    toy = Toy(tmp_path)
    toy.enter(monkeypatch)
    toy.measured(toy.rows(), "data")
    whole = estimate.of_run({"layers": {}}, ["NVIDIA Made-Up 9"]).seconds["layers"]
    assert whole > 0
    toy.measured(
        [
            one
            | {"run": [0, 1, 2], "block": [0] * 3, "samples_ns": [5] * 3, "throttled": [""] * 3}
            | {"sm_mhz": [1] * 3}
            for one in toy.rows()
        ]
    )
    assert estimate.of_run({"layers": {}}, ["NVIDIA Made-Up 9"]).seconds["layers"] == 0
    assert estimate.of_run({"layers": {}}, ["Another"]).seconds["layers"] == whole
    assert estimate.of_run({"layers": {}}, ["Another"]).like == SLUG


@pytest.mark.parametrize("base", ["runs", "data"])
def test_a_damaged_file_does_not_stop_an_estimate(tmp_path, monkeypatch, base):
    """What measures, or shows it, names the file."""
    toy = Toy(tmp_path)
    toy.enter(monkeypatch)
    toy.measured(toy.rows(), "data")
    whole = estimate.of_run({"layers": {}}, ["NVIDIA Made-Up 9"]).seconds["layers"]
    toy.write(f"{base}/{SLUG}/layers.parquet", "no rows")
    found = estimate.of_run({"layers": {}}, ["NVIDIA Made-Up 9"]).seconds["layers"]
    assert found == whole if base == "runs" else found > estimate.PAGE_S


@pytest.mark.parametrize(("settle", "left"), [(None, [0, 1, 2]), (lambda rows, folder: None, [1, 2])])
def test_cases_that_are_taken_from_data_take_no_time(settle, left, tmp_path, monkeypatch):
    """Those by which a study chooses (`run.take_over`), of such a GPU."""
    monkeypatch.setattr(paths, "DATA", tmp_path / "data")
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    file = tmp_path / "data" / SLUG / "made.parquet"
    file.parent.mkdir(parents=True)
    made([2, 2])[["op", "case"]].to_parquet(file)
    of = study(3, early=lambda case: case["n"] == 0, settle=settle)
    wanted = estimate.Wanted(of, of.cases({}), 3, ())
    assert [x["n"] for x in estimate._left(wanted, SLUG)] == left
    assert [x["n"] for x in estimate._left(wanted, "another")] == [0, 1, 2]


def test_it_is_said_in_minutes():
    found = estimate.Estimate({"machine": 50.0, "state_layout": 600.0}, 1, "nvidia-h200")
    assert str(found) == (
        "measuring takes about 11 min, by the rows of nvidia-h200 (00_machine 50 s, 01_state_layout 10 min)"
    )


# The recorded rows


@pytest.mark.parametrize("gpu", paths.recorded_gpus())
def test_operations_tell_what_cases_took_that_are_left_out(gpu):
    """Every other case from its operation alone, over all studies."""
    told = took = 0.0
    for path in sorted((paths.DATA / gpu).glob("*.parquet")):
        whole = estimate.known(recorded.read(path))
        for half in (0, 1):
            left = dict(list(whole.first.items())[half::2])
            rest = estimate.Known({key: s for key, s in whole.first.items() if key not in left})
            told += sum(rest.of_first(Case(op, {"case": case})) for op, case in left)
            took += sum(left.values())
    assert abs(math.log(told / took)) < math.log(1 + RIGHT)


def test_studies_of_a_whole_run_take_as_long_as_those_that_were_timed():
    """On an H200, with 16 cores and nothing compiled before: from one's beginning to the next one's.

    All in one run but 04, which was timed alone, since its first case.
    """
    took = {"machine": 165, "state_layout": 309, "gated_delta_today": 288, "gemv_coalescing": 228}
    took |= {"moe_persistent_grid": 470, "batched_ffn": 318, "persistent_tables": 169}
    told = estimate.of_run({name: {} for name in registry.NOTEBOOKS}, ["NVIDIA H200"], 16).seconds
    assert abs(math.log(sum(told[name] for name in took) / sum(took.values()))) < math.log(1.1)
    assert all(abs(math.log(told[name] / s)) < math.log(1.4) for name, s in took.items())


@pytest.mark.parametrize(("quick", "minutes"), [(True, 8), (False, 35)])
@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_everything_takes_as_long_as_is_aimed_at_at_most(gpu, quick, minutes):
    """Most of a quick look is compiling, others' kernels above all, where nothing was compiled yet."""
    values = {name: {"quick": quick} for name in registry.NOTEBOOKS}
    assert estimate.of_run(values, [gpu], 16).whole <= minutes * 60


def test_a_quick_look_at_everything_takes_as_long_as_the_one_that_was_timed():
    """On an H100, with 16 cores and nothing compiled before: from the estimate to the index."""
    values, took = {name: {"quick": True} for name in registry.NOTEBOOKS}, 446
    told = estimate.of_run(values, ["NVIDIA H100 80GB HBM3"], 16).whole
    assert abs(math.log(told / took)) < math.log(1 + RIGHT)


@pytest.mark.parametrize(
    ("name", "ops", "formats", "took"),
    [
        ("moe_persistent_grid", ("tune", "layer", "gemm1", "gemm2", "waves", "designs"), (), 780),
        ("batched_ffn", ("product", "ffn", "routed", "cache"), (), 792),
        ("batched_ffn", ("product", "ffn"), ("F32",), 151),
        ("persistent_tables", ("token", "host"), (), 170),
        ("gated_delta_today", ("drift", "layout", "length", "prefill", "ring", "ring_verify"), (), 431),
    ],
)
def test_cases_of_a_study_alone_take_as_long_as_those_that_were_timed(name, ops, formats, took):
    """On an H200, with 16 cores and nothing compiled before: from the first import to the last row.

    All of 06 was without FlashInfer's prefill.
    """
    study, told = registry.load(name), estimate._known(name, "nvidia-h200")
    cases = [Case(op, json.loads(case)) for op, case in told.first if op in ops]
    cases = [x for x in cases if not formats or x.params.get("format", x.params.get("weights")) in formats]
    found = estimate.of_cases(study, cases, 3, told, 16, alone=True)
    found += estimate.of_calls(len(run.calls_of(study, cases)), 16)
    assert abs(math.log(found / took)) < math.log(1 + RIGHT)


def test_kernels_of_a_study_alone_are_waited_for():
    """An H200 with 16 cores had not compiled those of all of 05 after 457 seconds, and llama.cpp's after 80 more."""
    study, told = registry.load("batched_ffn"), estimate._known("batched_ffn", "nvidia-h200")
    cases = [Case(op, json.loads(case)) for op, case in told.first]
    alone, beside = (estimate._compiling(study, cases, told, 16, one) for one in (True, False))
    assert alone > 457 + estimate.BUILT_S["batched_ffn"] > beside
    assert estimate._compiling(study, cases, estimate.Known(), 16, True) == 0


def test_of_one_notebook_at_a_time_each_page_is_made_before_the_next_study():
    """Two at once: all pages but the last are made beside what is measured."""
    studies, gpus = ["state_layout", "persistent_tables", "gemv_coalescing"], ["NVIDIA H100 80GB HBM3"] * 2
    values = {name: {} for name in studies}
    alone, beside = (estimate.of_run(values, gpus[:1], 16, at_once) for at_once in (1, 2))
    assert alone.whole == pytest.approx(beside.whole + (len(studies) - 1) * estimate.PAGE_S)
    assert alone.whole == pytest.approx(estimate.of_run(values, gpus, 16, 1).whole)
    assert estimate.of_run(values, gpus, 16, 2).whole < beside.whole


def test_jobs_that_measure_share_the_gpus(monkeypatch):
    values = [{"quick": True}, {"quick": True, "source": "recorded"}, {}]
    wanted = [jobs.Job("state_layout", one) for one in values] + [jobs.Job("machine", {})]
    found = {count: estimate.of_jobs(wanted, ["NVIDIA H100 80GB HBM3"] * count, cores=16) for count in (1, 2)}
    assert set(found[1].seconds) == {wanted[0].name, "01_state_layout", "00_machine"}
    assert found[1].whole == pytest.approx(sum(found[1].seconds.values()))
    assert found[2].whole == pytest.approx(max(sum(found[1].seconds.values()) / 2, *found[1].seconds.values()))
    assert estimate.of_jobs(wanted, ["NVIDIA H100 80GB HBM3"] * 2, 1, 16).whole == found[1].whole
    monkeypatch.setattr(jobs, "is_done", lambda one: one is wanted[0])
    assert wanted[0].name not in estimate.of_jobs(wanted, ["NVIDIA H100 80GB HBM3"], cores=16).seconds


def test_of_many_jobs_only_their_number_is_said():
    assert "on 4 GPUs" in str(estimate.Estimate({f"job {n}": 60.0 for n in range(20)}, 4))
    assert "(20 jobs)" in str(estimate.Estimate({f"job {n}": 60.0 for n in range(20)}, 4))
