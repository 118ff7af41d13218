"""Two sets of rows: what is slower is found, noise is not; what the sides may be."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import experiment
from toy_lab import GPU, SLUG, Toy

from labkit.bench import records, unpaired, verdict
from labkit.bench.spec import CONTROL
from labkit.workflow import archive, compare

NOISE = 0.003  # of a sample
QUIET, RESTLESS = 0.001, 0.005  # by how much a process may be off: as in most recorded rows, and as in the worst


def rows(seed, processes=3, offset=QUIET, **us):
    """Rows of one made-up case whose variants take so many µs, with noise, and an offset of each process."""
    frame = experiment(us, next(iter(us)), processes=processes, offset=offset, noise=NOISE, seed=seed)
    names = {"study": "layers", "op": "op", "case": '{"n": 1}', "gpu": GPU, "utc": "2026-11-26T00:00:00+00:00"}
    return frame.assign(**names).assign(**{"cache": "cold", "mode": "graph"})


def compared(first, second):
    return compare.compare(compare.Side("A", first), compare.Side("B", second))


def words(found):
    return {one.variant: one.verdict for one in found.lines}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.floats(1.06, 1.5), st.sampled_from([1.0, 20.0, 400.0]))
def test_what_is_slower_fails_and_what_is_faster_does_not(seed, times, us):
    before, after = rows(seed, a=us, b=us, c=us), rows(seed + 1, a=us, b=us * times, c=us / times)
    found = compared(before, after)
    assert words(found)["b"] == "slower"
    assert words(found)["c"] == "faster"
    assert [one.variant for one in found.failing()] == ["b"]
    assert [one.variant for one in found.failing(0.02)] == ["b"]
    assert not found.failing(times)  # more is allowed


def test_nineteen_of_twenty_intervals_hold_the_true_ratio():
    """And are narrow: one that always held it would say little."""
    held, widths, seeds = 0, [], range(100)
    for seed in seeds:
        times = 1.06 + 0.44 * (seed % 10) / 9
        found = compared(rows(2 * seed, a=20.0, b=20.0), rows(2 * seed + 1, a=20.0, b=20.0 * times))
        (line,) = (one for one in found.lines if one.variant == "b")
        held += line.low < 1 / times < line.high
        widths.append(times * (line.high - line.low))
    assert held >= 0.95 * len(seeds)
    assert np.median(widths) < 0.012


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 3]))
def test_noise_never_fails(seed, processes):
    before, after = (rows(seed + n, processes, RESTLESS, a=20.0, b=30.0) for n in (0, 1))
    found = compared(before, after)
    assert not found.failing()
    assert set(words(found).values()) <= {"same", "unclear"}


def test_one_process_alone_must_differ_by_three_times_as_much():
    for times, word in ((1.015, "unclear"), (1.10, "slower")):
        assert words(compared(rows(1, 1, a=20.0, b=20.0), rows(2, 1, a=20.0, b=20.0 * times)))["b"] == word


def test_without_the_control_nothing_is_known_of_the_noise():
    before = rows(1, a=20.0, b=20.0)
    found = compared(before, rows(2, a=20.0, b=40.0).query("variant != @CONTROL", local_dict={"CONTROL": CONTROL}))
    assert words(found)["b"] == "slower"  # of the first side it is known
    found = compared(*(part[part["variant"] != CONTROL] for part in (before, rows(2, a=20.0, b=40.0))))
    assert words(found)["b"] == "unclear"


def test_what_is_wrong_in_the_second_alone_fails():
    before, after = rows(1, a=20.0, b=20.0), rows(2, a=20.0, b=20.0)
    after.loc[after["variant"] == "b", "ok"] = False
    assert words(compared(before, after))["b"] == "failed"
    assert [one.variant for one in compared(before, after).failing(9.0)] == ["b"]
    assert words(compared(after, before))["b"] == "mended"
    assert not compared(after, before).failing()
    assert words(compared(after, after))["b"] == "unclear"


def test_what_is_slower_with_the_same_code_is_shown_and_fails_nothing():
    code = {"kernel_sha": "1", "triton": "3", "torch": "2", "cuda": "13", "driver": "5"}
    before, after = rows(1, a=20.0, b=20.0).assign(**code), rows(2, a=20.0, b=24.0).assign(**code)
    found = compared(before, after)
    assert words(found)["b"] == "slower"
    assert not found.failing()
    told = compare.shown(found, "text")
    assert "slower, same code" in told
    assert "Of the slower ones 1 of 1 have the same code on both sides" in told
    for name in code:
        changed = compared(before, after.assign(**{name: "another"}))
        assert [one.variant for one in changed.failing()] == ["b"]
        assert "same code" not in compare.shown(changed, "text")
    other = compared(before, after.assign(gpu="Other"))  # there the GPU is what is compared
    assert [one.variant for one in other.failing()] == ["b"]


def test_of_rows_of_several_gpus_each_is_compared_with_its_own_and_of_one_each_across():
    one = pd.concat([rows(1, a=20.0), rows(2, a=30.0).assign(gpu="Other")])
    assert {(line.gpu, line.verdict) for line in compared(one, one).lines} == {(GPU, "same"), ("Other", "same")}
    (across,) = compared(rows(1, a=20.0), rows(2, a=30.0).assign(gpu="Other")).lines
    assert (across.gpu, across.verdict) == (f"{GPU} → Other", "slower")
    with pytest.raises(ValueError, match="A and B have no variant of a case in common"):
        compared(rows(1, a=20.0), rows(1, z=20.0))


def test_the_ratio_of_two_runs_pairs_no_blocks():
    """Their blocks were at different times: that both have a block 0 says nothing."""
    run, block = np.repeat([0, 1, 2], 10), np.tile(np.arange(10), 3)
    drift = 1 + 0.1 * block
    one, other = verdict.Samples(run, block, 1000 * drift), verdict.Samples(run, block, 1000 * drift[::-1])
    found = unpaired.ratio(one, other)
    assert found.mid == pytest.approx(1)
    assert found.low < 0.95
    assert found.high > 1.05
    assert (found.runs, found.pairs) == (3, 30)
    assert math.isnan(unpaired.ratio(one, verdict.Samples(run[:0], block[:0], drift[:0])).mid)


def test_processes_that_differ_widen_the_interval():
    run, block = np.repeat([0, 1, 2], 10), np.tile(np.arange(10), 3)
    same = verdict.Samples(run, block, np.full(30, 1000.0))
    apart = verdict.Samples(run, block, np.repeat([900.0, 1000.0, 1100.0], 10))
    assert unpaired.ratio(same, same).half_width == 0
    assert unpaired.ratio(same, apart).half_width > 0.2


@pytest.mark.parametrize(("text", "limit"), [("slower", 0.0), ("slower=3%", 0.03), ("slower = .5 %", 0.005)])
def test_what_is_a_failure_can_be_said(text, limit):
    assert compare.limit_of(text) == pytest.approx(limit)


@pytest.mark.parametrize("text", ["faster", "slower=", "slower=3", "slower=-1%", "3%"])
def test_another_text_is_refused(text):
    with pytest.raises(ValueError, match=r"--fail-on is .*; allowed: slower, or slower=3%"):
        compare.limit_of(text)


# Sides


@pytest.fixture
def toy(tmp_path, monkeypatch):
    found = Toy(tmp_path)
    found.enter(monkeypatch)
    found.measured(found.rows(ns=[1000] * 9, options='{"repeats": "a"}'), "data")
    found.measured(found.rows(ns=[3000] * 9, triton="9.9", options='{"repeats": "a"}'))
    return found


def test_sides_are_folders_archives_gpus_and_versions(toy):
    archive.pack(toy.root / "out.tar.gz")
    (toy.root / "data" / "launches.parquet").write_text("of something else")
    for text, us in (("data/", 1), ("runs", 3), (str(toy.root / "out.tar.gz"), 3), (SLUG, 1), ("triton==9.9", 3)):
        found = compare.side(text).rows
        assert set(found["samples_ns"].map(lambda ns: ns[0] / 1e3)) == {us}, text
    assert compare.side("made-up").text == "made-up"  # the beginning of a GPU, without its maker


def test_two_versions_on_one_gpu_are_compared_though_one_was_measured_later(toy):
    old = records.read(toy.root / "data" / SLUG / "layers.parquet")["triton"].iloc[0]
    done = toy.command("compare", f"triton=={old}", "triton==9.9")
    assert done.returncode == 1, done.stderr
    assert f"triton==9.9 against triton=={old}: 4 slower" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", rf"'nothing' is no folder, archive or commit, no recorded GPU \({SLUG}\), and no NAME==VERSION"),
        ("triton==1.0", r"triton==1.0: no rows of this triton; there are: 3\..*, 9.9"),
        (
            "sglang==0.1",
            "sglang==0.1: no such version; allowed: triton, torch, cuda, driver, or a release: .*sglang==0.5.9",
        ),
    ],
)
def test_a_side_that_names_nothing_says_what_there_is(toy, text, message):
    with pytest.raises(ValueError, match=message):
        compare.side(text)


def test_the_command_prints_in_four_forms_and_ends_with_what_it_found(toy):
    done = toy.command("compare", "data/", "runs/")
    assert done.returncode == 1
    assert "runs/ against data/: 4 slower" in done.stdout
    assert "| slower |" in toy.command("compare", "data/", "runs/", "--format", "markdown").stdout
    assert "<td>slower</td>" in toy.command("compare", "data/", "runs/", "--format", "html").stdout
    told = json.loads(toy.command("compare", "data/", "runs/", "--format", "json").stdout)
    assert [line["verdict"] for line in told["lines"]] == ["slower"] * 4
    assert toy.command("compare", "runs/", "data/").returncode == 0
    assert toy.command("compare", "data/", "runs/", "--fail-on", "slower=300%").returncode == 0
    wrong = toy.command("compare", "data/", "runs/", "--fail-on", "slower=3")
    assert (wrong.returncode, "allowed: slower" in wrong.stderr) == (2, True)
    toy.write(f"data/{SLUG}/layers.parquet", "no rows")
    assert toy.command("compare", "data/", "runs/").returncode == 1


def test_of_two_releases_the_kernels_of_one_name_are_compared_block_by_block():
    one, other = (compare.side(f"sglang=={version}") for version in ("0.5.9", "0.5.23"))
    found = compare.compare(one, other)
    assert {line.variant for line in found.lines} == {"sglang, CuTe DSL"}
    by_hand = records.read(compare.paths.DATA / "nvidia-h200" / "state_layout.parquet")
    line = next(line for line in found.lines if line.gpu == "NVIDIA H200")
    some = by_hand[(by_hand["case"] == line.case) & (by_hand["op"] == "step") & (by_hand["cache"] == line.cache)]
    expected = verdict.compare(some, "sglang 0.5.23 VK, CuTe DSL", "sglang 0.5.9 KV, CuTe DSL")
    assert (line.ratio, line.verdict) == (expected.ratio.mid, expected.verdict)
    with pytest.raises(ValueError, match="a release is compared with another release"):
        compare.compare(one, compare.side("h200"))
