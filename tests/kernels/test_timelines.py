"""Clocks around kernels: the same results, and a bar for each piece of work. In the interpreter clocks are counted."""

import itertools

import pytest
import torch
from kernels_for_tests import copy

from labkit import registry
from labkit.bench.sha import kernel_sha
from labkit.evidence import timeline
from labkit.kernels.decoder import step
from labkit.kernels.decoder.tables import OPS
from labkit.studies.moe_persistent_grid.variants import APART
from labkit.sweep.timelines import rows_of
from labkit.workflow.notebooks import defaults


@pytest.fixture(autouse=True)
def clocks(device, monkeypatch):
    """A clock that counts by ten, and one multiprocessor, where there are none."""
    if device == "cpu":
        ticks = itertools.count(1000, 10)
        names = {"now": lambda: next(ticks), "smid": lambda: 3, "wait": lambda: None}
        monkeypatch.setattr(timeline, "_NAMES", timeline._NAMES | names)
        monkeypatch.setattr(step, "globaltimer", names["now"])
        timeline._clocked.cache_clear()
        yield
        timeline._clocked.cache_clear()
    else:
        yield


def moved(launch, device):
    args = {name: one.to(device) if torch.is_tensor(one) else one for name, one in launch.args.items()}
    return type(launch)(launch.kernel, launch.grid, args, launch.options)


def test_a_kernel_with_clocks_leaves_the_same_and_writes_its_moments(device):
    launch = moved(copy(n=1024), device)
    launch.args["x"].normal_()
    clocked, clock = timeline.clocked(launch)
    clocked()
    assert torch.equal(launch.args["y"], launch.args["x"])
    assert clock.shape == (8, len(timeline.MOMENTS))
    sm, begin, released, end = clock.cpu().T
    assert (begin > 0).all()
    assert ((begin <= released) & (released <= end)).all()
    if device == "cpu":
        assert (sm == 3).all()
        assert clock[1].tolist() == [3, 1030, 1040, 1050]


def taken(name, device, **options):
    study = registry.load(name)
    tiny = next(case for case in study.tiny if case.op == study.timelines.case.op)
    return study.timelines.take(tiny, device, 0, **options)


def test_a_layer_in_both_grids(device):
    found = taken("moe_persistent_grid", device)
    assert [one.what for one in found] == ["one CTA a tile", "persistent"]
    for one in found:
        assert one.bars["begin_ns"].min() == 0
        assert list(dict.fromkeys(one.bars["stage"])) == ["place", "gemm1", "gemm2", "sum"]
        assert (one.bars.groupby("launch")["stage"].nunique() == 1).all()


def test_a_token_of_the_tables(device):
    [one] = taken("persistent_tables", device, count=1)
    assert set(one.bars["stage"]) == set(OPS)
    assert (one.bars["released_ns"] <= one.bars["end_ns"]).all()
    assert one.bars["program"].max() < len(one.bars)


def test_rows_say_of_which_sources_they_are(device):
    study = registry.load("moe_persistent_grid")
    same = dict.fromkeys(("gpu", "driver", "cuda", "torch", "triton", "labkit", "revision"), "") | {"seed": 0}
    rows = rows_of(study, taken("moe_persistent_grid", device), 132, same)
    assert set(rows["kernel_sha"]) == {kernel_sha(study.timelines.source)}
    assert set(rows["what"]) == {"one CTA a tile", "persistent"}
    every = (one for case in study.cases(defaults(study.name)) for one in study.variants(case))
    by_tiles = next(one for one in every if one.name == APART)
    assert study.timelines.source == by_tiles.source
