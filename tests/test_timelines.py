"""Programs over time: clocks around compiled kernels, files of them, what they come to, and their picture."""

import dataclasses
import json
import re
import tarfile
import xml.etree.ElementTree as ET
from dataclasses import replace

import pandas as pd
import pytest
from kernels_for_tests import copy
from toy_lab import GPU, MACHINE, SLUG, Toy

from labkit import isolated, lab, paths, registry
from labkit.bench import machine, spec, timelines
from labkit.bench.records import RecordError
from labkit.bench.sha import kernel_sha
from labkit.evidence import compiled, timeline
from labkit.kernels.decoder.step import compilable
from labkit.kernels.experts.inputs import workspace
from labkit.kernels.launch import Launch
from labkit.kernels.offline import offline
from labkit.report import programs
from labkit.report.figures import Html
from labkit.studies.moe_persistent_grid import trials
from labkit.sweep import timelines as sweeping
from labkit.workflow import archive

SAME = {"launch": 0, "program": 0, "study": "moe_persistent_grid", "plain_ns": 100.0, "clocked_ns": 102.0, "seed": 0}
SAME |= dict.fromkeys(("kernel_sha", "gpu", "driver", "cuda", "torch", "triton", "labkit", "revision", "utc"), "")


def rows_of(*bars, sms=2):
    """Rows of bars (what, stage, sm, begin, released, end)."""
    columns = ["what", "stage", "sm", "begin_ns", "released_ns", "end_ns"]
    return pd.DataFrame(bars, columns=columns).assign(**SAME, sms=sms)


# Two multiprocessors, 100 ns each: the first works from 10 to 50 and from 60 to 100, the second from 20 to 40.
ROWS = rows_of(
    ("a", "up", 0, 0, 10, 40), ("a", "up", 0, 5, 30, 50), ("a", "down", 0, 50, 60, 100), ("a", "up", 1, 0, 20, 40),
)  # fmt: skip


# Clocks


def step():
    return compilable("AutoMegaKernel h1024", marks=True, position_from="device", registers=128)


def launches_of_a_layer():
    """The launches with the GPU that is compiled for, small inputs; both products and the sum."""
    case = registry.load("moe_persistent_grid").timelines.case
    case = replace(case, params={**case.params, "E": 8, "T": 512})
    [item] = trials.inputs(case, "cpu", 1, 0)
    return trials._built(case, item, workspace(item), "tiles").launches


def test_the_decoder_step_compiles_with_clocks():
    clocked, _ = timeline.clocked(step())
    ptx = compiled.build(clocked, 90).asm["ptx"]
    assert (ptx.count("%globaltimer"), ptx.count("%smid")) == (5 + 3, 1)  # five are of its own records


def test_every_launch_of_a_layer_compiles_with_clocks_and_nothing_of_it_is_lost():
    with offline(90):
        found = launches_of_a_layer()
        assert list(found) == ["count", "place", "gemm1", "gemm2", "sum"]
        for name, launch in found.items():
            plain, clocked = (compiled.describe(one.compile()) for one in (launch, timeline.clocked(launch)[0]))
            assert plain["loads"] == clocked["loads"], name
            assert plain["matrix"] == clocked["matrix"], name
            assert plain["shared_bytes"] == clocked["shared_bytes"], name
            assert abs(plain["registers"] - clocked["registers"]) <= 16, name
            ptx = timeline.clocked(launch)[0].compile().asm["ptx"]
            assert ptx.count("griddepcontrol.wait") == 2, name  # the clock's, so that it knows when, and the kernel's


def test_a_kernel_that_waits_later_is_not_made_to_wait_at_once():
    launch = copy()
    clocked, _ = timeline.clocked(replace(launch, options={**launch.options, "launch_pdl": True}))
    assert "griddepcontrol.wait" not in compiled.build(clocked, 90).asm["ptx"]


def test_clocks_leave_the_hash_of_a_kernel_as_it_is():
    source = "labkit.kernels.experts.tiled:by_tiles"
    before, launch = kernel_sha(source), copy()
    key = launch.kernel.cache_key
    clocked, clock = timeline.clocked(launch)
    assert launch.kernel.cache_key == key != clocked.kernel.cache_key
    assert kernel_sha(source) == before
    assert set(clocked.args) == {*launch.args, "clock"}
    assert clock.shape == (*launch.grid, len(timeline.MOMENTS))


def test_what_cannot_have_clocks_is_refused():
    launch = copy()
    with pytest.raises(ValueError, match=r"kernel is a function; allowed: a function decorated by triton.jit alone"):
        timeline.clocked(Launch(lambda: None, (1,), {}))
    with pytest.raises(ValueError, match=r"_copy_kernel_clocked has a parameter 'clock'; allowed: any other name"):
        timeline.clocked(timeline.clocked(launch)[0])


# What they come to


def test_idle_time_is_that_in_which_no_program_of_a_multiprocessor_works():
    table = programs.shares(ROWS).set_index("stage")["share"]
    assert table.to_dict() == pytest.approx({"up": 100 * (40 + 20) / 200, "down": 20, programs.IDLE: 50})


def test_a_multiprocessor_that_ran_nothing_is_idle():
    table = programs.shares(ROWS.assign(sms=4)).set_index("stage")["share"]
    assert table[programs.IDLE] == pytest.approx(75)


def test_sentences_name_what_was_idle_and_what_took_the_most():
    assert programs.said(ROWS) == "50 % of the multiprocessors' time nothing was at work; up took the most, 30 %."
    both = programs.said(pd.concat([ROWS, ROWS.assign(what="b", end_ns=ROWS["released_ns"])]))
    assert "A: 50 % of " in both
    assert "B: 100 % of " in both
    assert "at most 1.02 times as long; the clock ticks every 5 ns" in programs.cost(ROWS)


# The picture


def test_bars_of_one_multiprocessor_do_not_cover_each_other():
    found = programs.placed(ROWS)
    first = found[(found["stage"] == "up") & (found["y"] < 1)]
    assert len(first) == 2
    assert abs(first["y"].diff().iloc[-1]) == pytest.approx(first["height"].iloc[0])
    assert first["x"].tolist() == [10, 30]


def drawn(rows):
    """Of each colour, the bars of an SVG: (y, x, width)."""
    root = ET.fromstring(programs.svg(rows, "Made up"))
    found = {}
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        bars, at = [], 0
        for move, x, y, width in re.findall(r"([Mm])(\d+) (\d+(?:\.\d+)?)h(\d+)", path.get("d")):
            x = int(x) + (at if move == "m" else 0)
            y = float(y) if move == "M" else bars[-1][0]
            bars.append((y, x, int(width)))
            at = x + int(width)
        found[path.get("class")] = bars
    return found


def test_the_picture_has_every_bar_where_it_was():
    up, down = (programs.placed(ROWS).query("stage == @stage") for stage in ("up", "down"))
    found = drawn(ROWS)
    for name, wanted in (("s0", up), ("s1", down)):
        pairs = zip(sorted(found[name]), sorted(wanted[["y", "x", "width"]].itertuples(index=False)), strict=True)
        for one, other in pairs:
            assert one == pytest.approx(tuple(other))


def test_a_bar_that_no_tick_measured_is_drawn_all_the_same():
    assert drawn(rows_of(("a", "x", 0, 5, 5, 5), ("a", "x", 1, 0, 0, 100)))["s0"][0][2] == 1


def test_the_picture_is_in_a_figure_with_words_controls_and_a_table(reports):
    html = programs.shown(ROWS, "study-timeline-gpu", "recorded", Html("Bars of <b>this</b>", "Bars"), "Made up").html
    assert html.count("<img ") == 1
    assert len(re.findall('<input type="radio"', html)) == len(programs.ZOOMS)
    assert html.count(" checked") == 1
    assert "<figcaption>Bars of <b>this</b></figcaption>" in html
    assert "<summary>Table</summary>" in html
    assert "<script" not in html
    assert [path.suffix for path in sorted((reports / "figures" / "recorded").iterdir())] == [".png", ".svg"]
    source = re.search(r'src="data:image/svg\+xml,([^"]*)"', html)[1]
    assert "#" not in source
    assert "%23" in source  # of its colours


# Files


def test_rows_are_read_as_they_were_written(tmp_path):
    path = timelines.path_of(tmp_path, "gpu", "moe_persistent_grid")
    timelines.write(path, ROWS)
    found = timelines.read(path)
    assert list(found) == timelines.SCHEMA.names
    pd.testing.assert_frame_equal(found, ROWS[timelines.SCHEMA.names], check_dtype=False)


def test_a_file_that_is_none_is_refused_by_name(tmp_path):
    path = tmp_path / "x.parquet"
    with pytest.raises(RecordError, match=r"x.parquet: .*'sm'"):
        timelines.write(path, ROWS.drop(columns="sm"))
    path.write_bytes(b"nothing")
    with pytest.raises(RecordError, match=r"x.parquet: not a readable Parquet file"):
        timelines.read(path)
    ROWS.to_parquet(path)
    with pytest.raises(RecordError, match=r"x.parquet: timelines of version none, this lab reads 1"):
        timelines.read(path)


# From runs/ to data/, and to pages

SOURCE = "labkit.kernels.launch:Launch"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A lab whose study `layers` shows something over time."""
    found = Toy(tmp_path)
    found.enter(monkeypatch)
    load, case = registry.load, spec.Case("op", {"n": 1})
    shown = spec.Timelines(case, lambda *_: None, SOURCE)
    monkeypatch.setattr(registry, "load", lambda name: dataclasses.replace(load(name), timelines=shown))
    return found


def taken(toy, **changes):
    """The file that a GPU made, in runs/."""
    rows = ROWS.assign(**{"study": "layers", "gpu": GPU, "kernel_sha": kernel_sha(SOURCE), "driver": "1.2"} | changes)
    path = timelines.path_of(toy.root / "runs", SLUG, "layers")
    timelines.write(path, rows)
    toy.write(f"runs/{SLUG}/machine.json", json.dumps(MACHINE))
    return path


@pytest.mark.parametrize("packed", [False, True], ids=["here", "from an archive"])
def test_timelines_are_promoted(toy, packed):
    path = taken(toy)
    if packed:
        with tarfile.open(toy.root / "made.tar", "w") as made:
            for file in (path, path.parents[1] / "machine.json"):
                made.add(file, file.relative_to(toy.root))
        path.unlink()
    report = archive.promote(toy.root / "made.tar" if packed else None)
    assert report.timelines == [f"{SLUG}/timelines/layers"]
    assert report.promoted == {}
    found = timelines.of(registry.load("layers"), SLUG, here=False)
    assert len(found) == len(ROWS)
    assert set(found["revision"]) == {machine.revision()}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"gpu": "another"}, "layers.parquet: column gpu is 'another'; allowed: 'NVIDIA Made-Up 9'"),
        ({"study": "ground"}, "column study is 'ground'; allowed: 'layers'"),
        ({"kernel_sha": "0" * 12}, "column kernel_sha is not that of the present kernel: measure again"),
        ({"released_ns": 10**6}, "column released_ns has a time below 0, or after its end_ns"),
    ],
    ids=["gpu", "study", "source", "times"],
)
def test_timelines_that_cannot_be_are_refused(toy, changes, problem):
    taken(toy, **changes)
    with pytest.raises(RecordError, match=re.escape(problem)):
        archive.promote()
    assert not timelines.path_of(paths.DATA, SLUG, "layers").exists()


def complete(monkeypatch, case):
    """What `labkit run` takes of a case, and says."""
    calls, lines = [], []
    here = dataclasses.replace(machine.Machine(**MACHINE), slug=SLUG)
    same = {"gpu": GPU, "driver": "1.2", "torch": "", "triton": ""}
    monkeypatch.setattr(machine, "this_machine", lambda: here)
    monkeypatch.setattr(machine, "provenance", lambda seed: same)
    monkeypatch.setattr(isolated, "call", lambda *given, env: calls.append(given))
    sweeping.complete(registry.load("layers"), [case], paths.RUNS, {}, lines.append)
    return calls, lines


def test_they_are_taken_once_with_their_case(toy, monkeypatch):
    other, own = spec.Case("op", {"n": 2}), spec.Case("op", {"n": 1})
    assert complete(monkeypatch, other) == ([], [])
    wanted = ("labkit.sweep.timelines:take", "layers", str(paths.RUNS))
    assert complete(monkeypatch, own) == ([wanted], ["layers: timelines"])
    taken(toy)
    assert complete(monkeypatch, own) == ([], [])
    taken(toy, driver="another")
    assert complete(monkeypatch, own) == ([wanted], ["layers: timelines"])


def test_that_they_cannot_be_taken_is_said(toy, monkeypatch):
    def fail(*given, env):
        raise isolated.IsolatedError("python", "RuntimeError", "no clock")

    monkeypatch.setattr(isolated, "call", lambda *given, env: None)
    complete(monkeypatch, spec.Case("op", {"n": 2}))
    monkeypatch.setattr(isolated, "call", fail)
    lines = []
    sweeping.complete(registry.load("layers"), [spec.Case("op", {"n": 1})], paths.RUNS, {}, lines.append)
    assert lines == ["layers: timelines", "layers: timelines: not taken: RuntimeError: no clock"]


def test_a_page_says_of_which_gpu_there_is_none(monkeypatch, reports):
    x = lab.open("moe_persistent_grid", source="recorded", **lab.defaults("moe_persistent_grid"))
    first = next(iter(x._entries.values())).machine.slug
    own = ROWS.assign(gpu="x", driver="1.2", torch="2", triton="3", utc="2025-11-20T00:00:00")
    monkeypatch.setattr(timelines, "of", lambda study, gpu, here: own if gpu == first else pd.DataFrame())
    html = x.timelines("One layer with {T} tokens.")._repr_html_()
    assert html.count("<img ") == 1
    assert "One layer with 128 tokens. " in html
    others = list(x._entries)[1:]
    assert f"No timeline has been taken yet on {' and '.join(others)};" in html
    monkeypatch.setattr(timelines, "of", lambda study, gpu, here: pd.DataFrame())
    assert "<img " not in x.timelines("")._repr_html_()
