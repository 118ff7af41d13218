"""What ncu prints is read, what cannot be taken is said, and the prediction agrees with hand-worked figures."""

import dataclasses
import json
import math
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import kernels_for_tests
import pandas as pd
import pytest
import test_sweep
import torch
from answering import answered_here

from labkit import lab as lab_module
from labkit import registry
from labkit.bench.spec import Case
from labkit.evidence import coalescing, compiled, counters, workers
from labkit.sweep import run as sweep
from labkit.sweep import variants
from labkit.workflow import doctor

LD, ST = "l1tex__t_{}_pipe_lsu_mem_global_op_ld", "l1tex__t_{}_pipe_lsu_mem_global_op_st"
HEAD = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device"'
RAW = f"""==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "_copy_kernel" - 0: 0%....50%....100% - 3 passes
==PROF== Disconnected from process 4711
{HEAD},"CC","dram__bytes_read.sum","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","lts__t_sectors_op_read.sum"
"","","","","","","","","","","","Mbyte","request","sector"
"0","4711","python3.12","127.0.0.1","_copy_kernel","1","7","(32, 1, 1)","(4, 1, 1)","0","9.0","1.50","1,048,576","n/a"
"1","4711","python","127.0.0.1","void copy<float>(float *, int)","1","7","(32, 1, 1)","(4, 1, 1)","0","9.0","0","7","8"
"""

# ---- what ncu prints


def test_raw_csv_with_units_separators_and_missing_values():
    first, second = counters.parse(RAW)
    assert first == (
        "_copy_kernel",
        {"dram__bytes_read": 1.5e6, LD.format("requests"): 2**20, "lts__t_sectors_op_read": None},
    )
    assert second[0] == "void copy<float>"
    assert second[1]["lts__t_sectors_op_read"] == 8


@pytest.mark.parametrize("text", ["", "==PROF== x\n==WARNING== No kernels were profiled.\n", f"{HEAD}\n{HEAD}\n"])
def test_a_log_without_launches_is_an_error(text):
    with pytest.raises(counters.NotTaken, match="ncu profiled no kernel"):
        counters.parse(text)


LISTING = """Device NVIDIA H100 80GB HBM3 (GH100)
----------------------------------------- --------------- ------------ ------------------------------
Metric Name                               Metric Type     Metric Unit  Metric Description
----------------------------------------- --------------- ------------ ------------------------------
dram__bytes_read                          Counter         byte         # of bytes read from DRAM
"""


def listing(without: str = "never") -> str:
    """Of a GPU that knows the first way of every figure, but for the names with `without` in them."""
    names = {name for ways in counters.METRICS.values() for name in ways[0]} - {"dram__bytes_read"}
    return LISTING + "".join(f"{name}   Counter  x  # of\n" for name in sorted(names) if without not in name)


def test_metrics_that_ncu_does_not_know_are_left_out_or_counted_another_way():
    assert counters.known_metrics(LISTING) == {"dram__bytes_read"}
    everything = counters.choose(counters.known_metrics(listing()))
    assert set(everything) == set(counters.METRICS)
    fewer = counters.choose(counters.known_metrics(listing(without="tma")))
    assert set(everything) - set(fewer) == {("descriptor", "requests"), ("descriptor", "sectors")}
    names = {f"sm__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_{how}" for how in counters._CP_ASYNC}
    bypass = counters.choose(counters.known_metrics(listing(without="ldgsts_cache_bypass")) | names)
    assert set(bypass["async copy", "sectors"]) == names  # both or neither: half a sum would be a wrong figure
    assert ("async copy", "requests") not in bypass


# ---- a whole run with an ncu that is none


FAKE = """#!{python}
import csv, json, os, subprocess, sys
words, say = sys.argv[1:], os.environ
if words == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.1.1.0 (build 1) (public-release)")
elif words == ["--query-metrics"]:
    print(open({listing!r}).read())
elif say["FAKE"] == "sleep":
    import time
    child = subprocess.Popen(["sleep", "100"])
    print(child.pid, file=open({pid!r}, "w"), flush=True)
    time.sleep(100)
elif say["FAKE"] == "forbidden":
    print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters")
    sys.exit(1)
elif say["FAKE"] == "broken":
    print("==PROF== Connected\\nImportError: libfoo\\n==ERROR== The application returned an error code (1).")
    sys.exit(1)
else:
    option = dict(zip(words, words[1:]))
    assert option["--profile-from-start"] == "off" and option["--clock-control"] == "none" and "--csv" in words
    assert "TRITON_INTERPRET" not in say
    command = words[words.index("--metrics") + 2:]
    if say["FAKE"] == "script":
        sys.exit(subprocess.run(command).returncode)
    request, answer = command[-2:]
    sources = json.load(open(request))["sources"]
    kernels = [f"_kernel_{{number}}" for number in range(len(sources))]
    json.dump([{{"kernel": name}} for name in kernels], open(answer, "w"))
    metrics = option["--metrics"].split(",")

    def value(metric, number):
        one = 10 if "requests" in metric else 40 + number
        return 2 * (10 if "requests" in metric else 40) + one + (0 if "requests" in metric else 2 * number) \\
            if metric.endswith("_op_ld.sum") else one

    with open(option["--log-file"], "w", newline="") as file:
        out = csv.writer(file, quoting=csv.QUOTE_ALL)
        out.writerow(["ID", "Kernel Name", *metrics])
        out.writerow(["", "", *["" for _ in metrics]])
        for number, name in enumerate(reversed(kernels) if say["FAKE"] == "order" else kernels):
            out.writerow([number, name, *[value(metric, number) for metric in metrics]])
"""
SOURCES = [("kernels_for_tests:copy", {"n": 64}), ("kernels_for_tests:copy", {"n": 128})]


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only ncu that is found: it does what FAKE in the environment says."""
    (tmp_path / "listing").write_text(listing(without="tma"))
    found = tmp_path / "ncu"
    parts = {"listing": str(tmp_path / "listing"), "pid": str(tmp_path / "pid")}
    found.write_text(FAKE.format(python=sys.executable, **parts))
    found.chmod(found.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return found


def test_counters_of_several_launches_in_their_order(ncu, monkeypatch):
    told = {"predicted": {"load": {"requests": 10, "sectors": 40}}, "why": {"store": "so"}}
    steps, profile = [], counters._profile
    monkeypatch.setattr(counters, "_profile", lambda *words: steps.append("ncu") or profile(*words))
    monkeypatch.setattr(counters, "predict_many", lambda sources, env: steps.append("told") or [told] * len(sources))
    first, second = counters.count(SOURCES, {"FAKE": "counts"}, lambda: steps.append("idle"))
    assert steps == ["ncu", "idle", "told"]
    assert first["counted"]["load"] == {"requests": 10, "sectors": 40}
    assert second["counted"]["load"] == {"requests": 10, "sectors": 41}
    assert first["counted"]["async copy"] == {"requests": 20, "sectors": 80}  # cache access and bypass
    assert first["counted"]["descriptor"] == {"requests": None, "sectors": None}
    assert first["absent"] == ["descriptor requests", "descriptor sectors"]
    assert (first["dram_read_bytes"], first["l2_read_sectors"], first["ncu"]) == (40, 40, "2025.1.1.0")
    assert (first["predicted"], first["why"]) == ({"load": {"requests": 10, "sectors": 40}}, {"store": "so"})
    json.dumps(first, allow_nan=False)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("order", r"counted 2 launches \(_kernel_1, _kernel_0\), expected 2 \(_kernel_0, _kernel_1\)"),
        ("forbidden", "ERR_NVGPUCTRPERM"),
        ("broken", "ncu: The application returned an error code .*ImportError: libfoo"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(ncu, how, says):
    with pytest.raises(counters.NotTaken, match=says) as caught:
        counters.count(SOURCES, {"FAKE": how})
    assert "\n" not in str(caught.value)


def test_one_launch_too_few_is_an_error():
    with pytest.raises(counters.NotTaken, match="counted 1 launches"):
        counters._matched([("a", {})], ["a", "b"])


def test_without_ncu_or_with_one_that_does_not_run(ncu, monkeypatch):
    ncu.write_text("no program")
    with pytest.raises(counters.NotTaken, match="cannot be run"):
        counters.count(SOURCES, {"FAKE": "counts"})
    monkeypatch.setattr(counters, "tool", lambda: "")
    with pytest.raises(counters.NotTaken, match="not installed here"):
        counters.count(SOURCES, {"FAKE": "counts"})


def test_what_was_started_is_ended_when_it_takes_too_long(ncu, tmp_path):
    with pytest.raises(counters.NotTaken, match="ncu did not end within 2 s"):
        counters._run([str(ncu), "--profile"], {**os.environ, "FAKE": "sleep"}, 2)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_script_says_of_each_kernel_why_it_could_not_be_launched(ncu):
    """Kernels with tensors of the CPU cannot be launched, with a GPU or without."""
    first, second = counters.count([*SOURCES[:1], ("kernels_for_tests:none", {})], {"FAKE": "script"})
    assert first["problem"]
    assert second["problem"].startswith("AttributeError: module 'kernels_for_tests' has no attribute 'none'")


def test_a_kernel_without_a_prediction_leaves_the_others_their_counters(ncu, monkeypatch):
    told = [{"problem": "ValueError: no tile"}, {"predicted": {}, "why": {}}]
    monkeypatch.setattr(counters, "predict_many", lambda sources, env: told)
    first, second = counters.count(SOURCES, {"FAKE": "counts"})
    assert first == {"problem": "ValueError: no tile"}
    assert second["counted"]["load"] == {"requests": 10, "sectors": 41}  # of the second launch, not of the first


def test_predictions_of_many_are_those_of_each_in_order():
    sources = [(f"kernels_for_tests:{make}", kwargs) for make, kwargs, _ in KERNELS.values()]
    sources.insert(1, ("kernels_for_tests:none", {}))
    found = counters.predict_many(sources, workers.COMPILING, 90)
    assert found.pop(1)["problem"].startswith("AttributeError: module 'kernels_for_tests' has no attribute 'none'")
    figures = [{kind: tuple(one.values()) for kind, one in told["predicted"].items()} for told in found]
    for (name, (_, _, expected)), one in zip(KERNELS.items(), figures, strict=True):
        assert one.keys() == expected.keys(), name
        for kind, (requests, sectors) in expected.items():
            assert one[kind][1] == sectors, name
            assert requests in (None, one[kind][0]), name


def test_a_prediction_that_kills_its_process_is_said_in_one_line():
    with pytest.raises(counters.NotTaken, match="predictions: crash: the process ended") as caught:
        counters.predict_many([("os:_exit", {"status": 3})], workers.COMPILING, 90)
    assert "\n" not in str(caught.value)


def test_doctor_says_what_ncu_there_is_and_what_that_means(ncu, monkeypatch):
    assert doctor._ncu().text.startswith(f"2025.1.1.0 ({ncu}): counts")
    ncu.write_text("no program")
    assert "cannot be used" in doctor._ncu().text
    monkeypatch.setattr(counters, "tool", lambda: "")
    assert doctor._ncu().text.startswith("not found: hardware counters are not taken")
    assert not doctor._ncu().broken


# ---- beside each other


def figures(requests: float | None, sectors: float | None) -> dict[str, dict[str, float | None]]:
    return {"load": {"requests": requests, "sectors": sectors}}


@pytest.mark.parametrize(
    ("requests", "sectors", "agree"),
    [(1000, 4000, True), (1019, 4000, True), (981, 4076, True), (1021, 4000, False), (1000, 3916, False)],
)
def test_figures_agree_within_two_percent(requests, sectors, agree):
    (line,) = counters.compare(figures(requests, sectors), figures(1000, 4000))
    assert line["agree"] is agree
    assert line["requests off %"] == pytest.approx((requests - 1000) / 10)
    assert line["sectors off %"] == pytest.approx((sectors - 4000) / 40)
    assert line["why"] == ("" if agree else "not explained")


def test_why_figures_do_not_agree():
    nothing = {kind: {"requests": 0, "sectors": 0} for kind in counters.KINDS}
    assert counters.compare(nothing, {}) == []
    why = {"load": "not derived: math.exp", "descriptor": "what descriptor accesses move is not derived"}
    lines = counters.compare(nothing | figures(5, 6) | {"store": {"requests": 1, "sectors": 1}}, {}, why)
    assert [(line["kind"], line["why"]) for line in lines] == [
        ("load", "not derived: math.exp"),
        ("store", "the kernel's own code has no such access"),
    ]
    assert math.isnan(lines[0]["requests predicted"])
    (line,) = counters.compare(figures(1000, None), figures(1000, 4000), why)
    assert (line["agree"], line["why"]) == (False, "ncu has no counter of sectors here")
    (line,) = counters.compare(nothing, figures(1000, 4000), why)
    assert (line["requests off %"], line["agree"], line["why"]) == (-100, False, "not derived: math.exp")


# ---- the prediction


def predicted(source: list, every: bool) -> Any:
    """In a worker: the prediction for a whole launch; or the plain sum over all programs."""
    launch = compiled.launch_of(source)
    if not every:
        return counters.predict(launch, 90)
    found = dict.fromkeys(counters.DERIVED, 0.0)
    for i in range(launch.grid[0]):
        for j in range((*launch.grid, 1)[1]):
            for one in coalescing.totals(launch, 90, (i, j, 0)):
                found[one.kind] += one.sectors
    return found


KERNELS = {
    # 128 programs, each one request of 4 sectors
    "even": ("copy", {"n": 4096, "block": 32}, {"load": (128, 512), "store": (128, 512)}),
    # the last of four programs has 4 lanes: 16 of the 32 bytes of one sector
    "edge": ("copy", {"n": 100, "block": 32}, {"load": (4, 13), "store": (4, 13)}),
    # every lane a sector of its own
    "stride": ("copy", {"n": 100, "block": 32, "stride": 8}, {"load": (4, 100), "store": (4, 13)}),
    # 64 values for 4 warps: two warps repeat the loads of the others, but do not store
    "warps": ("copy", {"n": 128, "block": 64, "num_warps": 4}, {"load": (8, 32), "store": (4, 16)}),
    # Of each of 2 programs one index (a sector) and 8 requests of 16 sectors.
    "tile": ("tile", {"rows": 128, "cols": 8, "row_stride": 128}, {"load": (18, 258), "store": (2, 2)}),
    # 8 rounds of 64 × 64 halves of a and b, 16 bytes a lane: two rounds are copied before the loop, whose last two
    # copy nothing
    "pipelined": ("matmul", {}, {"async copy": (256, 4096), "store": (32, 512)}),
    # A program that returns, one that reads once more: flags of one sector each, x of 4 and, not aligned, 5.
    "branches": ("branch", {"flags": [1, 6, -1]}, {"load": (6, 13), "store": (3, 12)}),
    # 5 rows of 64 + 6 values, 4 + 4 + 1 sectors each; two values a lane, and since a row may end between them each has
    # an instruction of its own, which asks for the same sectors again
    "edges": ("patch", {"rows": 5, "cols": 70, "stride": 96}, {"load": (None, 90), "store": (None, 90)}),
}


@pytest.fixture(scope="module")
def predictions() -> dict[str, Any]:
    asked = [{"source": [f"kernels_for_tests:{make}", kwargs], "every": False} for make, kwargs, _ in KERNELS.values()]
    modules = ["kernels_for_tests", "test_counters"]
    with answered_here():
        return dict(zip(KERNELS, workers.ask("test_counters:predicted", asked, modules), strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_predicted_totals_by_hand(predictions, name):
    found, why = predictions[name]
    expected = KERNELS[name][2]
    assert set(found) == set(expected)
    for kind, (requests, sectors) in expected.items():
        assert found[kind]["sectors"] == sectors
        assert requests in (None, found[kind]["requests"])
    assert why == {}


def test_the_edges_of_a_grid_are_weighted_as_if_every_program_were_evaluated(predictions):
    wide = {"rows": 9, "cols": 200, "stride": 256}
    asked = [{"source": ["kernels_for_tests:patch", wide], "every": every} for every in (False, True)]
    with answered_here():
        (found, why), every = workers.ask("test_counters:predicted", asked, ["kernels_for_tests", "test_counters"])
    assert {kind: figures["sectors"] for kind, figures in found.items()} == {k: v for k, v in every.items() if v}
    assert why == {}


def test_what_the_prediction_assumes_or_cannot_derive_is_kept():
    sources = {
        # 1100 rounds are too many to evaluate each
        "long": ["kernels_for_tests:matmul", {"K": 64 * 1100}],
        # rows that are not a whole number of sectors: every program has another alignment, and there are too many
        "misaligned": ["kernels_for_tests:patch", {"rows": 600, "cols": 32, "stride": 35, "tile": [1, 32]}],
        "floats": ["kernels_for_tests:address_from_floats", {}],
    }
    asked = [{"source": source, "every": False} for source in sources.values()]
    with answered_here():
        found = workers.ask("test_counters:predicted", asked, ["kernels_for_tests", "test_counters"])
    long, misaligned, floats = found
    assert long[0]["async copy"]["sectors"] == 1102 * 512
    assert long[1] == {"async copy": "all rounds of a long loop are taken to be like the first"}
    assert misaligned[1]["load"].startswith("programs in the middle of the grid differ")
    assert floats[0] == {}
    assert "math.exp" in floats[1]["store"]


# ---- in a sweep


class Counting:
    """Stands for `counters.count`: remembers what it was asked, and answers with figures or raises."""

    def __init__(self):
        self.asked: list[list[tuple[str, Any]]] = []
        self.problem: BaseException | None = None
        self.refused: set[str] = set()

    def __call__(self, sources, env, idle):
        assert env == {"CUDA_VISIBLE_DEVICES": "GPU-7"}
        self.asked.append(list(sources))
        if self.problem:
            raise self.problem
        idle()
        answer = {"counted": figures(100, 404), "predicted": figures(100, 400), "why": {}, "absent": []}
        return [{"problem": "no"} if s[1]["variant"] in self.refused else answer for s in sources]

    def names(self) -> list[list[tuple[int, str]]]:
        return [[(s[1]["params"]["n"], s[1]["variant"]) for s in sources] for sources in self.asked]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    found = Counting()
    monkeypatch.setattr(variants, "count", found)
    return found


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> test_sweep.Lab:
    found = test_sweep.Lab(tmp_path, monkeypatch)
    plain = found.toy.study

    def counted(parameters):
        return [(Case("double", {"n": n}), name) for n in parameters["sizes"] for name in ("double", "add")]

    monkeypatch.setattr(found.toy, "study", lambda: dataclasses.replace(plain(), counted=counted))
    return found


def taken(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    some = rows[rows["counters"] != "{}"]
    return sorted(zip(some["case"], some["variant"], some["cache"], strict=True))


def of(sizes):
    return sorted((json.dumps({"n": n}), name, "cold") for n in sizes for name in ("double", "add"))


def test_a_sweep_counts_what_it_is_asked_for_once(lab, counting):
    rows = lab.run()
    test_sweep.complete(rows)
    assert taken(rows) == of([1, 2])
    assert [sorted(names) for names in counting.names()] == [[(1, "add"), (1, "double"), (2, "add"), (2, "double")]]
    function, arguments = counting.asked[0][0]
    assert (function, arguments["device"]) == ("labkit.sweep.variants:variant_launch", "cuda")
    assert lab.run().equals(rows)
    lab.run([2, 3])
    assert [sorted(names) for names in counting.names()[1:]] == [[(3, "add"), (3, "double")]]


def test_the_gpu_is_said_to_be_idle_once_all_is_counted(lab, counting):
    """Also where nothing is, by a study that was measured before."""
    said = []
    for _ in range(2):
        idle = lambda: said.append((len(lab.measured), len(counting.asked)))  # noqa: E731
        sweep.run(lab.toy.study(), {"sizes": [1]}, 1, {"CUDA_VISIBLE_DEVICES": "GPU-7"}, lab.lines.append, idle=idle)
    assert {*said[:2]} == {(1, 1)}
    assert said[2:] == [(1, 1)]


def test_without_counters_the_sweep_is_as_good_and_the_next_one_counts_without_measuring(lab, counting):
    counting.problem = counters.NotTaken("ncu (Nsight Compute) is not installed here")
    rows = lab.run()
    test_sweep.complete(rows)
    assert taken(rows) == []
    assert "toy: counters: not taken: ncu (Nsight Compute) is not installed here" in lab.lines
    counting.problem = None
    again = lab.run()
    assert lab.measured == []
    assert taken(again) == of([1, 2])
    pd.testing.assert_frame_equal(again.drop(columns="counters"), rows.drop(columns="counters"))


def test_a_run_that_is_stopped_while_it_counts_loses_nothing(lab, counting):
    counting.problem = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    counting.problem = None
    rows = lab.run()
    assert lab.measured == []
    assert taken(rows) == of([1, 2])


def test_one_kernel_that_cannot_be_counted_does_not_keep_the_others_from_it(lab, counting):
    counting.refused = {"add"}
    rows = lab.run([1], 1)
    assert taken(rows) == [('{"n": 1}', "double", "cold")]
    assert 'toy: counters: not taken of add, {"n": 1}: no' in lab.lines


def test_rows_that_may_not_be_used_are_not_counted(lab, counting):
    def prepare(case, name):
        if name == "add":
            raise RuntimeError("no kernel image")

    lab.toy.prepare = prepare
    lab.run([1], 1)
    assert counting.names() == [[(1, "double")]]


def test_a_study_that_asks_for_none_counts_none(lab, counting, monkeypatch):
    study = lab.toy.study
    monkeypatch.setattr(lab.toy, "study", lambda: dataclasses.replace(study(), counted=lambda parameters: []))
    assert taken(lab.run([1], 1)) == []
    assert counting.asked == []


def test_the_page_shows_them_or_says_that_there_are_none(lab, counting):
    counting.problem = counters.NotTaken("no")
    shown = lab_module.Shown(lab.machine, lab.run(processes=1), here=True)
    page = lab_module.Lab(lab.toy.study(), {"sizes": [1, 2]}, [shown], "")
    assert "Hardware counters are not recorded in these rows" in repr(page.counters())
    counting.problem = None
    page.shown = [lab_module.Shown(lab.machine, lab.run(processes=1), here=True)]
    text = page.counters("Counted.")._repr_html_()
    assert "Counted. Cold, caches flushed by ncu. In 4 of 4 kernels every figure agrees within 2 %." in text
    assert "Measured on this machine" in text
    renamed = page.counters("Counted.", {"double": "twice x"})._repr_html_()
    assert ("twice x" in text, "twice x" in renamed, ">double<" in text, ">double<" in renamed) == (0, 1, 1, 0)
    table = counters.table(page.shown[0].rows)
    assert list(table.columns[:3]) == ["n", "variant", "kind"]
    assert list(table["n"]) == [1, 1, 2, 2]
    assert table["sectors off %"].tolist() == pytest.approx([1] * 4)


@pytest.mark.parametrize(("batches", "batch"), [([1, 8, 64, 256], 64), ([16, 4], 16), ([1, 8], 8)])
def test_state_layout_counts_both_layouts_at_every_tile(batches, batch):
    study = registry.load("state_layout")
    models = ["Qwen3-Next-80B-A3B", next(m for m in _models() if m != "Qwen3-Next-80B-A3B")]
    production = {"gates": ["GDN", "KDA"], "step_batches": [64], "prefills": ["8 x 1024"]}  # none of these is counted
    wanted = study.counted({"models": models, "batches": batches, "states": ["fp32", "bf16"]} | production)
    assert {(case["model"], case["batch"]) for case, _ in wanted} == {(models[0], batch)}
    assert {case["state"] for case, _ in wanted} == {"fp32", "bf16"}
    assert len(wanted) == 12
    for case, name in wanted:
        assert name in [variant.name for variant in study.variants(case)]


def _models() -> list[str]:
    from labkit.shapes import GATED_DELTA

    return list(GATED_DELTA)


# ---- the GPU


def on_gpu(make: str, kwargs: dict[str, Any]) -> Any:
    """A source: a launch of kernels_for_tests with its tensors on the GPU."""
    launch = getattr(kernels_for_tests, make)(**kwargs)
    args = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in launch.args.items()}
    return dataclasses.replace(launch, args=args)


@pytest.mark.gpu
def test_ncu_counts_what_is_predicted():
    """Where the driver lets this user read the counters; elsewhere it fails, saying so."""
    if not counters.tool():
        pytest.skip("ncu is not installed: no counter was taken")
    wanted = {
        "even": ("copy", {"n": 2**16, "block": 128, "num_warps": 4}),
        "edge": ("copy", {"n": 100_001, "block": 256, "stride": 2}),
        "tile": ("tile", {"rows": 128, "cols": 8, "row_stride": 128, "slots": list(range(64))}),
        "pipelined": ("matmul", {}),
    }
    sources = [("test_counters:on_gpu", {"make": make, "kwargs": kwargs}) for make, kwargs in wanted.values()]
    for name, one in zip(wanted, counters.count(sources, {}), strict=True):
        assert "problem" not in one, one
        lines = counters.compare(one["counted"], one["predicted"], one["why"])
        assert lines, name
        assert all(line["agree"] for line in lines), (name, lines, one)
        assert "async copy" in {line["kind"] for line in lines} or name != "pipelined"
