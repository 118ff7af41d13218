"""Predictions: what the formula must do, the stored parameters, and errors on kernels left out of the fit."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import paths
from labkit.evidence import executed, predict
from labkit.evidence.predict import FACTS, Gpu, Measured
from labkit.evidence.roofline import Ceilings
from labkit.studies.persistent_tables import variants
from labkit.workflow import launches, predictions, recorded

H100, H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"
RING = "gated_delta_today"
STUDIES = ("state_layout", "gemv_coalescing", "persistent_tables", "moe_persistent_grid", "batched_ffn", RING)


def made_up(memory: float = 3.0, l2: float = 6.0, tflops: float = 700.0, sms: int = 100, mhz: float = 2000.0) -> Gpu:
    """Rates in TB/s and TFLOP/s."""
    sizes = np.array([1e6, 1e9])
    curves = {(limit, "cold"): (sizes, sizes / memory / 1e6) for limit in ("read", "in_place")}
    curves["read", "hot"] = sizes, sizes / l2 / 1e6
    return Gpu("made up", Ceilings(curves, {"bf16": tflops * 1e12}, {"graph": 0.8}), sms, mhz, 50 << 20)


def launch(**changes: float) -> pd.DataFrame:
    fact = {
        "kernel": "k", "code": "0", "limit": "read", "programs": 1000.0, "warps": 4.0, "per_sm": 4.0, "bytes": 1e8,
        "l2_bytes": 1e8, "instructions": 1e7, "lines": 1e6, "mma_flops": 1e9, "wgmma_flops": 1e9, "rounds": 3.0,
        "dependent": False,
    }  # fmt: skip
    assert set(fact) == set(FACTS)
    return pd.DataFrame([fact | changes])


# ---- the formula

AMOUNTS = ("bytes", "l2_bytes", "instructions", "lines", "mma_flops", "wgmma_flops", "rounds")
positive = st.floats(0.0, 1e12)


@given(st.sampled_from(AMOUNTS), st.floats(1.0, 1e4), positive, positive, st.integers(1, 16), st.integers(1, 32))
def test_more_of_anything_never_takes_less(amount, times, size, flops, warps, per_sm):
    less = launch(bytes=size, wgmma_flops=flops, warps=warps, per_sm=per_sm)
    more = less.assign(**{amount: less[amount] * times})
    assert predict.predict(more, made_up()) >= predict.predict(less, made_up()) * (1 - 1e-12)


@given(positive, positive, positive, st.integers(1, 10**6), st.integers(1, 16))
def test_never_below_the_time_of_the_bytes(size, flops, instructions, programs, warps):
    facts = launch(bytes=size, mma_flops=flops, instructions=instructions, programs=programs, warps=warps)
    assert predict.predict(facts, made_up()) >= size / made_up().memory("read")


@given(st.floats(1.1, 10.0))
def test_what_only_moves_bytes_goes_with_the_memory(times):
    facts = launch(bytes=1e11, **dict.fromkeys(AMOUNTS[1:], 0.0))
    slow, fast = (predict.predict(facts, made_up(memory=rate)) for rate in (1.0, times))
    start = predict.parameters()["start"]
    assert (slow - start) / (fast - start) == pytest.approx(times, rel=1e-6)


@given(st.floats(1.1, 10.0))
def test_what_only_computes_goes_with_the_clock(times):
    facts = launch(instructions=1e11, **{name: 0.0 for name in AMOUNTS if name != "instructions"})
    slow, fast = (predict.predict(facts, made_up(mhz=1000 * rate)) for rate in (1.0, times))
    start = predict.parameters()["start"]
    assert (slow - start) / (fast - start) == pytest.approx(times, rel=1e-6)


def test_launches_follow_each_other_and_a_dependent_one_starts_early():
    one, early = launch(), launch(dependent=True)
    both = predict.predict(pd.concat([one, early], ignore_index=True), made_up())
    assert both == pytest.approx(predict.predict(one, made_up()) + predict.predict(early, made_up()))
    assert predict.predict(early, made_up()) < predict.predict(one, made_up())


def test_more_warps_hide_more():
    few, many = (predict.predict(launch(warps=warps, rounds=0.0), made_up()) for warps in (1, 8))
    assert many < few


def test_a_last_wave_that_is_nearly_empty_costs():
    full, one_more = (launch(programs=programs, instructions=1e9) for programs in (100, 101))
    assert predict.predict(one_more, made_up()) > 1.5 * predict.predict(full, made_up())


def test_unknown_versions_are_named():
    with pytest.raises(KeyError, match="no model 'none'; known: 1, 2"):
        predict.predict(launch(), made_up(), "none")


def test_a_new_fit_is_a_new_version():
    with pytest.raises(ValueError, match="there is a model '1' already"):
        predict.entry("1", {}, 2.5, {})
    both = predict.entry("3", {"start": 1.23456}, 3.0, {"date": "today"})
    assert {name: both[name] for name in ("1", "2")} == predict.models()
    assert both["3"]["parameters"] == {"start": 1.235}


# ---- counting what a launch executes

LISTING = """
 Function : k
  REG:32 STACK:0
        /*0000*/                   LDG.E.128 R4, [R2] ;      /* 0x0 */
        /*0010*/                   IMAD R1, R2, R3, R4 ;      /* 0x0 */
        /*0020*/                   LDGSTS.E.128 [R1], [R2] ; /* 0x0 */
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ; /* 0x0 */
        /*0040*/              @!P0 BRA 0x20 ;                /* 0x0 */
        /*0050*/                   FADD R1, R1, R2 ;         /* 0x0 */
        /*0060*/               @P1 BRA 0x50 ;                /* 0x0 */
        /*0070*/                   EXIT ;                    /* 0x0 */
        /*0080*/                   BRA 0x80;                 /* 0x0 */
        /*0090*/                   NOP;                      /* 0x0 */
"""


def test_loops_are_found():
    code = executed.parse(LISTING)
    assert code.straight.instructions == 4  # LDG, IMAD, EXIT and the branch to itself behind it
    assert [loop.instructions for loop in code.loops] == [3, 2]
    assert code.loops[0].mma == 4096
    assert code.loops[0].load_bytes == 16


def test_loops_go_as_often_as_the_flops_take():
    done = executed.executed(executed.parse(LISTING), warps=8, flops=8 * 5 * 4096, outer=2)
    assert done.passes == 5
    assert done.counts.instructions == 8 * (4 + 5 * 3 + 2 * 2)


def test_or_as_the_bytes_take():
    code = replace(executed.parse(LISTING))
    done = executed.executed(code, warps=8, load_bytes=8 * 32 * (16 + 3 * 16))
    assert done.passes == 3
    assert done.counts.load_bytes * 32 == 8 * 32 * 4 * 16


def test_or_as_often_as_is_said():
    done = executed.executed(executed.parse(LISTING), warps=2, passes=7)
    assert done.counts.instructions == 2 * (4 + 7 * 5)


@pytest.mark.parametrize(
    ("name", "flops", "shared"),
    [("HGMMA.64x128x16.F32.BF16", 65536, 65536), ("HGMMA.64x16x16.F32.BF16", 8192, 8192 * 20 / 8)],
)
def test_small_products_of_four_warps_wait_for_shared_memory(name, flops, shared):
    code = executed.parse(f"        /*0000*/  {name} gdesc[UR4] ; /* 0x0 */")
    assert (code.straight.wgmma, code.straight.wgmma_shared) == (flops, shared)


def test_an_fma_of_halves_is_no_matrix_instruction():
    assert executed.parse("        /*0000*/  HFMA2.MMA R1, R2, R3, R4 ; /* 0x0 */").straight.flops == 0


# ---- recorded rows


@cache
def gpu(name: str) -> Gpu:
    return predictions.gpu_in(paths.DATA / name)


@cache
def ours(name: str) -> pd.DataFrame:
    """The rows of role ours, cold, of all studies."""
    rows = pd.concat([recorded.read(paths.DATA / name / f"{study}.parquet") for study in STUDIES], ignore_index=True)
    return rows[(rows["role"] == "ours") & (rows["cache"] == "cold") & rows["ok"]].reset_index(drop=True)


@cache
def data(name: str) -> Measured:
    return predict.measured(ours(name), recorded.launches(), gpu(name))


@cache
def left_out(by: str) -> tuple[np.ndarray, ...]:
    return tuple(predict.left_out([data(H100), data(H200)], by))


def errors(one: Measured, predicted: np.ndarray) -> tuple[float, float]:
    """Median and 90th percentile, percent."""
    median, most = np.quantile(one.errors(predicted), [0.5, 0.9])
    return 100 * median, 100 * most


def test_nearly_every_row_of_ours_is_predicted():
    for name in (H100, H200):
        found = predict.predictions(ours(name), recorded.launches(), gpu(name))
        missing = ours(name)[found.isna()]
        missing = missing[missing["study"] != RING]  # of which launches of tokens, drafts and prompts are known alone
        # experts that come from the host, and warps that wait for each other: neither copies nor waits are modelled
        missing = missing[missing["variant"] != variants.STREAMED]
        assert set(missing["op"]) <= {"cache", "designs"}
        assert (found.dropna() > 0).all()


def test_hot_rows_are_not_predicted():
    rows = ours(H100).assign(cache="hot")
    assert predict.predictions(rows, recorded.launches(), gpu(H100)).isna().all()


def test_a_library_is_not_predicted():
    rows = recorded.read(paths.DATA / H100 / "gemv_coalescing.parquet")
    peers = rows[(rows["role"] == "peer") & (rows["cache"] == "cold")]
    assert predict.predictions(peers, recorded.launches(), gpu(H100)).isna().all()


def test_predictions_are_those_of_the_fit():
    one = data(H100)
    found = predict.predictions(one.rows, recorded.launches(), gpu(H100))
    np.testing.assert_allclose(found, one.times(predict.parameters()), rtol=1e-12)


def test_stored_parameters_are_near_what_a_fit_of_today_s_rows_gives():
    """They were fitted on the rows of their day, and stay; rows may be measured anew later."""
    found = predict.fit([data(H100), data(H200)])
    assert found == pytest.approx(predict.parameters(), rel=0.15)
    for one in (data(H100), data(H200)):
        now, stored = (errors(one, one.times(k)) for k in (found, predict.parameters()))
        assert all(then < new + 1 for then, new in zip(stored, now, strict=True))  # percentage points


def test_kernels_left_out_of_the_fit():
    """Issue 31's bar: median at most 10 %, 90th percentile at most 25 %. Reached: 7 and 19, 9 and 23."""
    reached = {H100: (7, 19), H200: (9, 24)}
    for (name, most), predicted in zip(reached.items(), left_out("code"), strict=True):
        found = errors(data(name), predicted)
        assert found[0] < most[0]
        assert found[1] < most[1]


@pytest.mark.parametrize("folds", [4, 10])
def test_and_however_they_are_divided(folds):
    """Many at once: of the 90th percentile the bar is missed by three points at most."""
    for name, predicted in zip((H100, H200), predict.left_out([data(H100), data(H200)], "code", folds), strict=True):
        median, most = errors(data(name), predicted)
        assert median < 10
        assert most < 28


def test_a_fit_on_one_gpu_holds_on_the_other():
    for name, other in ((H100, H200), (H200, H100)):
        k = predict.fit([data(name)])
        median, most = errors(data(other), data(other).times(k))
        assert median < 10
        assert most < 25


def test_a_whole_operation_left_out_is_predicted_worse():
    """No bar is met: what no other operation tells, such as the rate of wgmma, stays as it was expected."""
    for one, some in zip((data(H100), data(H200)), left_out("op"), strict=True):
        median, most = errors(one, some)
        assert median < 25
        assert most < 75


def test_better_than_a_roofline():
    for name in (H100, H200):
        one = data(name)
        roofline = one.rows["predicted_us"].to_numpy(float)
        assert errors(one, one.times(predict.parameters()))[1] < 0.5 * errors(one, roofline)[1]


# ---- from one GPU to another


def pairs(name: str, other: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of ours of both GPUs, the same cases, variants and kernels in the same order."""
    key = ["study", "op", "case", "variant", "mode", "kernel_sha"]
    one, two = ours(name).set_index(key, drop=False), ours(other).set_index(key, drop=False)
    both = one.index.intersection(two.index)
    return one.loc[both].reset_index(drop=True), two.loc[both].reset_index(drop=True)


def us_of(rows: pd.DataFrame) -> np.ndarray:
    return rows["samples_ns"].map(lambda samples: float(np.median(samples)) / 1e3).to_numpy(float)


@pytest.mark.parametrize(("name", "other"), [(H100, H200), (H200, H100)])
def test_transfer(name, other):
    """Issue 31's bar: median at most 5 %, 90th percentile at most 12 %, of each study too."""
    one, two = pairs(name, other)
    truth, known = us_of(two), one["op"] != "cache"
    found = predict.transfer(one, gpu(name), gpu(other))["us_new"].to_numpy()
    error = np.abs(found / truth - 1)
    assert np.median(error[known]) < 0.05
    for some in [known, *(known & (one["study"] == study) for study in STUDIES)]:
        assert np.median(error[some]) < 0.05
        assert np.quantile(error[some], 0.9) < 0.12
    shifted = us_of(one) + two["predicted_us"] - one["predicted_us"]  # issue 31's baseline
    assert np.quantile(error[known], 0.9) < 0.7 * np.quantile(np.abs(shifted / truth - 1)[known], 0.9)


def test_transfer_to_the_same_gpu_changes_nothing():
    found = predict.transfer(ours(H100), gpu(H100), gpu(H100))
    np.testing.assert_allclose(found["us_new"], found["us_old"])


def test_transfer_goes_with_the_memory_where_that_is_all():
    rows = ours(H100)[ours(H100)["op"] == "gemv"]
    slower = by_rate(0.5)
    found = predict.transfer(rows, gpu(H100), slower)
    large = rows["floor_bytes"].to_numpy() > 1e9
    assert (found["us_new"] / found["us_old"])[large].between(1.8, 2.0).all()
    assert (found["us_new"] >= found["us_old"]).all()


def by_rate(factor: float) -> Gpu:
    """An H100 with another memory."""
    one = gpu(H100)
    curves = {
        key: (sizes, us / (factor if key[1] == "cold" else 1)) for key, (sizes, us) in one.ceilings.curves.items()
    }
    return replace(one, ceilings=replace(one.ceilings, curves=curves))


# ---- data sheets


def test_sheets_name_their_sources():
    assert {"A100 80GB", "L40S", "RTX 4090", "RTX 5090", "B200"} <= set(predict.sheets())
    for sheet in predict.sheets().values():
        assert "NVIDIA" in sheet["source"]
        assert all(sheet[name] > 0 for name in ("capability", "sms", "sm_mhz", "memory_tbs", "l2_mib", "bf16_tflops"))


def test_a_gpu_by_its_own_sheet_is_itself():
    same, one = predict.by_sheet("H100 SXM 80GB", gpu(H100), "H100 SXM 80GB"), gpu(H100)
    for rate in ("l2", "flops", "cycles"):
        assert getattr(same, rate) == pytest.approx(getattr(one, rate))
    assert same.memory("read") == pytest.approx(one.memory("read"))
    assert not same.measured


def test_transfer_by_data_sheets_alone():
    one, two = pairs(H100, H200)
    known = one["op"] != "cache"
    found = predict.transfer(one, gpu(H100), predict.by_sheet("H200 SXM", gpu(H100), "H100 SXM 80GB"))
    error = np.abs(found["us_new"].to_numpy() / us_of(two) - 1)[known]
    assert np.median(error) < 0.05
    assert np.quantile(error, 0.9) < 0.12


def test_a_slower_gpu_takes_longer():
    l40s = predict.by_sheet("L40S", gpu(H100), "H100 SXM 80GB")
    found = predict.transfer(ours(H100)[ours(H100)["op"] == "step"], gpu(H100), l40s)
    assert (found["us_new"] > 2 * found["us_old"]).mean() > 0.7


# ---- the facts


def test_facts_hold_what_launches_do():
    table = recorded.launches()
    assert not table[list(AMOUNTS)].isna().any().any()
    assert set(FACTS) <= set(table)
    assert (table["wgmma_flops"] >= 0).all()
    assert (table["programs"] > 0).all()
    assert math.isclose(table["rounds"].min(), 1.0)


def test_facts_of_rows_of_an_earlier_kernel_are_kept_and_never_made(monkeypatch):
    key = list(launches.KEY)
    known = recorded.launches()
    some = known[known["op"] == "layer"]
    monkeypatch.setattr(launches.recorded, "stale", lambda rows: pd.Series(True, rows.index))
    monkeypatch.setattr(launches, "facts", lambda *row: pytest.fail("a row of an earlier kernel was compiled"))
    found = launches.table(some)
    assert len(found) == len(some) < len(known)
    assert set(map(tuple, found[key].to_numpy())) == set(map(tuple, some[key].to_numpy()))


@pytest.mark.parametrize(("op", "variant"), [("step", "ours VK"), ("gemv", "9 dependent launch"), ("layer", "ours")])
def test_stored_facts_are_what_is_found_now(op, variant):
    """Of one row of an operation; another Triton than that of the table may compile to a few instructions more."""
    pytest.importorskip("triton")
    rows = pd.concat([ours(name).assign(gpu=name) for name in (H100, H200)])
    rows = rows[(rows["op"] == op) & (rows["variant"] == variant)].sort_values("floor_bytes", kind="stable")
    row = rows[~recorded.stale(rows)].iloc[0].to_dict()
    found = pd.DataFrame(launches.facts(row, 90, gpu(row["gpu"]).l2_bytes))
    table = recorded.launches()
    same = (table["gpu"] == row["gpu"]) & (table["op"] == op) & (table["case"] == row["case"])
    stored = table[same & (table["variant"] == variant)].sort_values("place")
    assert found["kernel"].tolist() == stored["kernel"].tolist()
    exact = ["programs", "warps", "bytes", "l2_bytes", "dependent"]
    np.testing.assert_allclose(found[exact].astype(float), stored[exact].astype(float))
    np.testing.assert_allclose(found["instructions"], stored["instructions"], rtol=0.2)
