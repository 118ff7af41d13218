"""The machine study: sizes, variants and floors by hand, launches of its kernels, and the figures of its page."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import rows as made
import torch

from labkit import registry
from labkit.bench.sha import kernel_sha
from labkit.bench.spec import CONTROL, Case
from labkit.kernels import ceilings
from labkit.studies.machine import study, views
from labkit.sweep import run

MIB = 2**20
ALL = {
    "kinds": ["launch", "h2d", *study.MEMORY, *study.MATRIX],
    "sizes_mib": [1, 16, study.SANITY_MIB],
    "matrix_sizes": [4096],
}


def ceiling(what, **size):
    return Case("ceiling", {"what": what} | size)


# cases, floors, variants


def test_cases_are_every_kind_at_its_own_sizes():
    found = study.cases(ALL)
    assert len(found) == len({(case.op, case.key) for case in found}) == 1 + 2 + 3 * 3 + 4
    assert [dict(case.params) for case in study.cases(ALL | {"kinds": ["copy"], "sizes_mib": [2]})] == [
        {"what": "copy", "mib": 2}
    ]
    assert [case["bytes"] for case in study.cases(ALL | {"kinds": ["h2d"]})] == [4096, 64 * MIB]
    assert study.cases(ALL | {"kinds": ["fp8"]}) == [ceiling("fp8", n=4096)]


@pytest.mark.parametrize(
    ("case", "size", "flops", "set_bytes"),
    [
        (ceiling("read", mib=16), 16 * MIB, 0, None),
        (ceiling("in_place", mib=16), 2 * 16 * MIB, 0, 16 * MIB),  # read and written, in one buffer
        (ceiling("copy", mib=16), 2 * 16 * MIB, 0, 2 * 16 * MIB),  # read and written, in two
        (ceiling("bf16", n=1024), 3 * 1024**2 * 2, 2 * 1024**3, None),
        (ceiling("fp16", n=1024), 3 * 1024**2 * 2, 2 * 1024**3, None),
        (ceiling("fp8", n=1024), 1024**2 * (1 + 1 + 2), 2 * 1024**3, None),  # the result in bf16
        (ceiling("int8", n=1024), 1024**2 * (1 + 1 + 4), 2 * 1024**3, None),  # the result in int32
        (Case("copy", {"what": "h2d", "bytes": 4096}), 4096, 0, study.ONE_SET),
        (Case("launch", {"what": "empty"}), 0, 0, study.ONE_SET),
    ],
)
def test_floor_by_hand(case, size, flops, set_bytes):
    found = study.floor(case)
    assert (found.bytes, found.flops, found.set_bytes) == (size, flops, set_bytes)
    assert found.limit == ""  # nothing is predicted from the ceilings of the ceilings
    assert found.hot_at_any_size == (case["what"] in study.MEMORY)


def test_variants_have_a_name_a_source_and_a_control():
    for case in study.cases(ALL):
        found = study.variants(case)
        names = [one.name for one in found]
        assert len(set(names)) == len(names)
        assert study.control(case) in names
        assert run.with_control(study.STUDY, case)[-1].name == CONTROL
        assert all(len(kernel_sha(one.source)) == 12 for one in found)
        # Figures and predictions count ceilings only.
        assert {one.role for one in found} == (
            {"ceiling", "control"} if "torch, timed by do_bench" in names else {"ceiling"}
        )


def test_do_bench_stands_beside_one_size_only():
    def names(case):
        return [one.name for one in study.variants(case)]

    assert names(ceiling("in_place", mib=study.SANITY_MIB)) == ["torch", "Triton", "torch, timed by do_bench"]
    assert names(ceiling("in_place", mib=16)) == ["torch", "Triton"]
    assert names(ceiling("copy", mib=study.SANITY_MIB)) == ["torch", "Triton"]
    assert names(ceiling("bf16", n=4096)) == ["torch"]
    launches = study.variants(Case("launch", {"what": "empty"}))
    assert [(one.options["library"], one.mode) for one in launches] == [
        ("Triton", "graph"),
        ("Triton", "eager"),
        ("torch", "graph"),
        ("torch", "eager"),
    ]
    copies = study.variants(Case("copy", {"what": "h2d", "bytes": 4096}))
    assert [(one.name, one.mode) for one in copies] == [("pageable", "eager"), ("pinned", "eager")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ["write"]}, "parameter kinds is ['write']; allowed: a list, each item one of launch, h2d, read"),
        ({"kinds": []}, "a list with at least one item"),
        ({"sizes_mib": [0]}, "an integer from 1 to 8192"),
        ({"sizes_mib": [8193]}, "an integer from 1 to 8192"),
        ({"matrix_sizes": [255]}, "an integer from 256 to 16384"),
        ({"matrix_sizes": [4096.0]}, "an integer from 256 to 16384"),
    ],
)
def test_what_is_not_allowed_is_named(changes, message):
    study.STUDY.check(ALL)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the message is compared)
        study.STUDY.check(ALL | changes)
    assert message in str(raised.value)


# what is prepared, on the CPU


@pytest.mark.parametrize("what", study.MEMORY)
@pytest.mark.parametrize("library", ["torch", "Triton"])
def test_each_buffer_set_has_memory_of_its_own(what, library):
    case = ceiling(what, mib=1)
    prepare = next(one.prepare for one in study.variants(case) if one.name == library)
    trial = prepare(case, "cpu", 3, 0)
    assert len(trial.calls) == 3
    assert (trial.launch is not None) == (library == "Triton")
    if library == "Triton":
        starts = [call.args["x"].data_ptr() for call in trial.calls]
        assert [b - a for a, b in zip(starts, starts[1:], strict=False)] == [MIB, MIB]  # noqa: RUF007
        assert {call.args["n"] for call in trial.calls} == {MIB // 4}
        assert {call.grid for call in trial.calls} == {(MIB // 4 // ceilings.BLOCK,)}


@pytest.mark.parametrize("what", study.MEMORY)
def test_the_check_of_the_library_call_passes_and_notices_a_fault(what, monkeypatch):
    case = ceiling(what, mib=1)
    trial = study.variants(case)[0].prepare(case, "cpu", 2, 0)
    (error,) = trial.check().values()
    assert error <= next(iter(trial.tolerance.values()))
    idle = study.variants(case)[0].prepare(case, "cpu", 2, 0)
    idle.calls[0] = lambda: None
    if idle.poison:
        idle.poison()
        assert not idle.written()
    (error,) = idle.check().values()
    assert not error <= next(iter(idle.tolerance.values()))


@pytest.mark.parametrize("what", ["bf16", "fp16"])
def test_matrix_products_are_checked(what):
    case = ceiling(what, n=256)
    trial = study.variants(case)[0].prepare(case, "cpu", 1, 0)
    assert trial.check()["out"] <= trial.tolerance["out"]
    assert trial.written()
    trial.poison()
    assert not trial.written()
    trial.calls[0] = lambda: None
    assert math.isnan(trial.check()["out"])


def test_data_is_not_zero():
    for what in study.MATRIX[:2]:
        case = ceiling(what, n=256)
        function = study.variants(case)[0].prepare(case, "cpu", 1, 0).calls[0]
        a = function.args[0]
        assert 0.9 < float(a.float().std()) < 1.1


# kernels' arguments


def test_launches_cover_every_value():
    for n in (1, ceilings.BLOCK, ceilings.BLOCK + 1):
        x = torch.zeros(n)
        for launch in (ceilings.read(x, x), ceilings.in_place(x, 2.0), ceilings.copy(x, x)):
            assert launch.grid == (-(-n // ceilings.BLOCK),)
            assert launch.args["n"] == n
            assert launch.options == {"num_warps": ceilings.NUM_WARPS}
    assert ceilings.empty(x).grid == (1,)


def test_an_empty_tensor_is_refused():
    x = torch.zeros(0)
    for make in (lambda: ceilings.read(x, x), lambda: ceilings.in_place(x, 1.0), lambda: ceilings.copy(x, x)):
        with pytest.raises(ValueError, match="the tensor has 0 values; allowed: at least 1"):
            make()


# views


@pytest.fixture(scope="module")
def page():
    return made.make("machine", ALL, made.machine_us)


def faster(frame, factor, **match):
    """The rows, those that match running `factor` times as fast."""
    same = np.logical_and.reduce([frame[name] == value for name, value in match.items()])
    ns = [
        [int(one / factor) for one in row] if hit else row for row, hit in zip(frame["samples_ns"], same, strict=True)
    ]
    return frame.assign(samples_ns=ns)


def test_memory_rates_take_the_faster_of_the_two(page):
    rates = views.memory_rates(faster(page, 2, variant="Triton", cache="cold"))
    assert len(rates) == 3 * 3 * 2  # kinds, sizes, caches
    assert set(rates.loc[rates["cache"] == "cold", "by"]) == {"Triton"}
    one = rates[(rates["kind"] == "in place") & (rates["mib"] == 256) & (rates["cache"] == "hot")].iloc[0]
    assert one["us"] == pytest.approx(2 + 2 * 256 * MIB / 3e6, rel=2e-3)
    assert one["tbs"] == pytest.approx(2 * 256 * MIB / one["us"] / 1e6)


def test_the_timer_of_triton_is_no_ceiling(page):
    quick = faster(page, 10, variant="torch, timed by do_bench")
    assert views.memory_rates(quick).equals(views.memory_rates(page))
    assert views.ceilings(quick).equals(views.ceilings(page))


def test_the_control_is_shown_as_noise_only(page):
    quick = faster(page, 10, variant=CONTROL)
    for view in (views.memory_curve, views.matrix_rates, views.launch_cost, views.host_copies):
        assert view(quick).table.equals(view(page).table)
    assert views.ceilings(quick).equals(views.ceilings(page))
    assert not views.noise(quick).equals(views.noise(page))


def test_ceilings_are_the_best_cold_rates(page):
    table = views.ceilings(faster(page, 5, cache="hot")).set_index("ceiling")
    assert list(table.index) == ["read only", "in place", "copy", *(f"matrix, {what}" for what in study.MATRIX)]
    best = 2 * 256 * MIB / (2 + 2 * 256 * MIB / 3e6) / 1e6
    assert f"{best:.2f} TB/s" in " ".join(table.loc["in place"].astype(str))
    assert "256 MiB" in " ".join(table.loc["in place"].astype(str))
    assert "n = 4096" in " ".join(table.loc["matrix, fp8"].astype(str))


@pytest.mark.parametrize(
    ("view", "said"),
    [
        (views.memory_curve, "in place 2.97 TB/s"),
        (views.matrix_rates, "bf16 663"),
        (views.launch_cost, "Triton graph 2.00 µs"),
        (views.host_copies, "4 KiB pageable 2.0 µs"),
        (views.clocks, "No throttle reason was seen."),
    ],
)
def test_a_figure_says_what_it_shows(page, view, said):
    drawn = view(page)
    assert said in drawn.alt
    assert said in drawn.caption
    assert len(drawn.table) > 1
    assert drawn.fig.axes


def test_throttle_reasons_are_named(page):
    throttled = page.assign(throttled=[["power cap"] * len(one) for one in page["samples_ns"]])
    assert "Throttle reasons seen: power cap." in views.clocks(throttled).caption


def test_noise_is_half_the_width_of_the_control(page):
    table = views.noise(page)
    cold = table[(table["op"] == "ceiling") & (table["cache"] == "cold") & (table["mode"] == "graph")].iloc[0]
    assert cold["cases"] == cold["within ±1 %"] == 13
    assert 0 < cold["median ± %"] <= cold["widest ± %"] < 0.5
    noisy = page["case"].str.contains('"mib": 16') & (page["variant"] == CONTROL)
    wide = [[2 * ns for ns in one] if odd else one for one, odd in zip(page["samples_ns"], noisy, strict=True)]
    worse = views.noise(page.assign(samples_ns=wide))
    cold = worse[(worse["op"] == "ceiling") & (worse["cache"] == "cold") & (worse["mode"] == "graph")].iloc[0]
    assert (cold["cases"], cold["within ±1 %"]) == (13, 10)  # three kinds at 16 MiB
    assert cold["widest ± %"] == pytest.approx(50, abs=1)
    assert "in 10 of 13 cold ceiling cases" in views.resolution(page.assign(samples_ns=wide))


def test_the_two_timers_stand_beside_each_other(page):
    table = views.sanity(page).set_index("timed by")
    assert list(table.index) == ["torch", "torch, timed by do_bench"]
    assert table["median µs"].tolist() == pytest.approx([2 + 2 * 256 * MIB / 3e6] * 2, rel=2e-3)
    assert (table["5th percentile µs"] <= table["median µs"]).all()
    assert (table["median µs"] <= table["95th percentile µs"]).all()


def test_unusable_rows_are_not_shown(page):
    failed = page["case"].map(lambda text: json.loads(text)["what"]) == "fp8"
    poor = made.unusable(page, failed)
    assert "fp8" not in set(views.matrix_rates(poor).table["what"])
    assert "matrix, fp8" not in set(views.ceilings(poor)["ceiling"])
    assert isinstance(views.matrix_rates(made.unusable(page)), str)
    assert views.ceilings(made.unusable(page)).empty


def test_predictions_are_made_from_this_study(page):
    from labkit.evidence.roofline import Ceilings

    found = Ceilings.from_rows(page)
    for what in study.MEMORY:
        assert found.best(what) == pytest.approx(3e12, rel=0.1)
    assert found.best("fp8") == pytest.approx(800e12, rel=0.2)
    assert set(found.launches) == {"graph", "eager"}
    assert registry.load("machine").claims == ()
    assert isinstance(page, pd.DataFrame)
