"""GPUs that nobody measured: which can be asked for, what is predicted of them, and that no claim is judged by it."""

import dataclasses
import math
import shutil

import pandas as pd
import pytest
import rows as made
from running import RECORDED
from toy_lab import KINDS, SLUG, Toy

from labkit import lab, paths, registry
from labkit.bench import records, verdict
from labkit.evidence import predict, sheets
from labkit.workflow import elsewhere, gpus, predicted_words, recorded

H100, H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"
WAYS = ((H100, H200), (H200, H100))
STUDIES = [name for name in RECORDED if name != "machine"]
BOTH_WAYS = [name for name in STUDIES if len(paths.data_files(name, runs=False)) > 1]  # recorded on both GPUs
TESTED = pd.DataFrame([{"ratios: 90 % are within %": 10.0, "distance": 0.36}])
LAYOUT = {**made.LAYOUT, "batches": [64]}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Empty folders of data and runs."""
    lab = Toy(tmp_path)
    for name in ("DATA", "RUNS", "REPORTS"):
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    monkeypatch.setattr(verdict, "RESAMPLES", 100)
    return lab


def opened(study="state_layout", gpu="rtx-4090", **parameters):
    return lab.open(study, source="predicted", gpu=gpu, **(parameters or LAYOUT))


# ---- which


def test_shipped_are_those_that_are_not_recorded():
    assert list(gpus.predictable())[:5] == ["a100-80gb", "l40s", "rtx-4090", "rtx-5090", "b200"]
    for name, sheet in sheets.sheets().items():
        assert ("recorded" in sheet) == (sheets.of_recorded(sheet.get("recorded", "-")) == name)


@pytest.mark.parametrize("base", ["runs", "data"])
def test_a_gpu_of_which_only_its_ceilings_are_known_can_be_asked_for(toy, base):
    toy.ceilings(base=base)
    assert SLUG in gpus.predictable()
    made.store(paths.DATA / SLUG, made.make("state_layout", LAYOUT, made.layout_us()))
    assert SLUG not in gpus.predictable()


@pytest.mark.parametrize("gpu", ["rtx-9999", "", H100])
def test_another_is_named_with_those_that_can_be(gpu):
    with pytest.raises(ValueError, match=f"gpu is '{gpu}'; can be predicted: a100-80gb, l40s, rtx-4090"):
        opened(gpu=gpu)


def test_nothing_to_start_from_is_said(toy):
    made.store(paths.DATA / SLUG, made.make("state_layout", LAYOUT, made.layout_us()))
    with pytest.raises(ValueError, match=f"data/{SLUG}: no rows of 00_machine"):
        opened().predicted()
    toy.ceilings()
    with pytest.raises(ValueError, match=f"no data sheet of '{SLUG}', where .* there are: {H100}, {H200}"):
        opened().predicted()
    with pytest.raises(ValueError, match="nothing to predict 'rtx-4090' from: no recorded GPU"):
        elsewhere.nearest("rtx-4090", [])


def test_a_ceiling_that_is_missing_is_named(toy):
    toy.ceilings(kinds=[kind for kind in KINDS if kind != "bf16"])
    with pytest.raises(ValueError, match="00_machine has no rows of 'bf16'; needed: read, in_place, bf16"):
        elsewhere.recorded_gpu(SLUG)


def test_it_starts_at_the_gpu_whose_memory_is_most_like_its_own():
    assert elsewhere.nearest("rtx-4090", [H100, H200])[0] == H100
    assert elsewhere.nearest("b200", [H100, H200])[0] == H200


def test_gpus_are_as_far_apart_as_their_rates_change_against_each_other():
    old = elsewhere.recorded_gpu(H100)
    assert elsewhere.distance(old, old) == 0
    assert elsewhere.distance(old, dataclasses.replace(old, sm_mhz=2 * old.sm_mhz)) == pytest.approx(math.log(2))
    there, back = (elsewhere.distance(*map(elsewhere.recorded_gpu, way)) for way in WAYS)
    assert there == pytest.approx(back)
    assert elsewhere.distance(old, elsewhere.target("rtx-5090", H100)) > 4 * there


# ---- what


def test_another_gpu_like_the_recorded_one_gives_what_was_measured():
    study = registry.load("state_layout")
    rows = elsewhere.recorded_rows("state_layout")[H100]
    cases = study.cases(made.LAYOUT)
    gpu = elsewhere.recorded_gpu(H100)
    told, truth = elsewhere.predicted(study, cases, rows, gpu, gpu), elsewhere.measured(study, cases, rows)
    assert len(truth) > 1
    pd.testing.assert_frame_equal(told, truth)


def test_a_gpu_by_its_ceilings_alone_is_predicted_by_them(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    twin = tmp_path / "nvidia-twin"
    twin.mkdir()
    for name in ("machine.json", "machine.parquet"):
        shutil.copy(paths.DATA / H100 / name, twin / name)
    study, rows = registry.load("gemv_coalescing"), elsewhere.recorded_rows("gemv_coalescing")
    cases = elsewhere._cases(rows)
    found = elsewhere.table(study, cases, rows, "nvidia-twin", TESTED)
    assert set(found["start"]) == {H100}
    assert found["ratio"].tolist() == pytest.approx(elsewhere.measured(study, cases, rows[H100])["ratio"].tolist())
    assert found["high"].tolist() == pytest.approx((1.1 * found["ratio"]).tolist())


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_every_study_has_pairs_that_are_recorded_and_tested_both_ways(name):
    study, rows = registry.load(name), elsewhere.recorded_rows(name)
    tested = elsewhere.tested(study, rows)
    assert list(zip(tested["from"], tested["to"], strict=True)) == list(WAYS)
    assert (tested["pairs"] >= 10).all()
    # `weight_stationary` over `per_token` is 39 % off with F32 weights (median), with the other formats 16 %.
    most = 1.47 if name == "batched_ffn" else 1.35
    assert 1 < elsewhere.bound(tested, "ratios") < most
    assert 1 < elsewhere.bound(tested, "times") < most


def test_the_bound_is_the_larger_of_both_ways_and_unknown_of_none():
    errors = pd.DataFrame({"ratios: 90 % are within %": [4.0, 7.0], "distance": [0.5, 0.5]})
    assert elsewhere.bound(errors, "ratios") == pytest.approx(1.07)
    assert elsewhere.bound(errors, "ratios", 0.25) == pytest.approx(1.07)
    assert elsewhere.bound(errors, "ratios", 1.5) == pytest.approx(1.07**3)
    assert math.isnan(elsewhere.bound(errors.iloc[:0], "ratios"))


def test_what_the_host_does_is_not_predicted():
    rows = elsewhere.recorded_rows("persistent_tables")[H100]
    assert set(elsewhere._times(rows)["mode"]) == {"graph"}
    assert (rows["mode"] == "eager").any()


def test_transfers_of_all_studies_stay_within_the_bars():
    """Issue 31's: H100 to H200 and back, median at most 5 %, 90th percentile at most 12 %.

    Of the gated delta rule with a ring an H100 has tokens and drafts of an earlier kernel only, which are not compared.
    """
    none = "gated_delta_today"
    assert elsewhere.transfers(elsewhere.recorded_rows(none)).empty
    for name in sorted(set(BOTH_WAYS) - {none}):
        table = elsewhere.transfers(elsewhere.recorded_rows(name))
        assert len(table) == 2
        assert (table["median error %"] <= 5).all()
        assert (table["90 % are within %"] <= 12).all()


def test_only_times_of_one_kernel_are_compared():
    rows = elsewhere.recorded_rows("gemv_coalescing")
    whole = elsewhere.transfers(rows)
    changed = rows[H100]["variant"] == rows[H100].loc[rows[H100]["role"] == "ours", "variant"].iloc[0]
    assert changed.any()
    rows[H100] = rows[H100].assign(kernel_sha=rows[H100]["kernel_sha"].mask(changed, "earlier"))
    assert (elsewhere.transfers(rows)["rows"] < whole["rows"]).all()


def test_products_and_the_rest_change_apart():
    """As products take a larger part of a time, their rate counts more, without a step at any part."""
    old = elsewhere.recorded_gpu(H100)
    new = predict.by_sheet("B200", old, "H100 SXM 80GB")
    row = elsewhere.recorded_rows("moe_persistent_grid")[H100].iloc[[0]]
    row = row.assign(samples_ns=[[1_000_000]], floor_bytes=0)
    parts = [0.0, 0.49, 0.51, 1.0]
    times = [
        predict.transfer(row.assign(floor_flops=old.flops * 1000 * part), old, new)["us_new"].iloc[0] for part in parts
    ]
    assert times[0] == pytest.approx(1000 * old.cycles / new.cycles)
    assert times[3] == pytest.approx(1000 * old.flops / new.flops)
    assert abs(times[1] - times[2]) < 0.03 * times[0]


# ---- it is no measurement


def test_a_prediction_is_no_row_and_judges_nothing():
    study, rows = registry.load("state_layout"), elsewhere.recorded_rows("state_layout")
    table = elsewhere.table(study, elsewhere._cases(rows), rows, "rtx-4090", TESTED)
    assert not {"samples_ns", "run", "block", "predicted_us", "ok"} & set(table)
    with pytest.raises(records.RecordError, match="columns missing or unknown"):
        records.write(paths.REPORTS / "never.parquet", table)
    for claim in study.claims:
        assert recorded.judge(claim, table)[0] is None or claim.observe is None


def test_a_page_for_another_gpu_shows_recorded_rows_and_judges_these_alone():
    asked, plain = opened(), lab.open("state_layout", source="recorded", **LAYOUT)
    assert [one.label for one in asked.shown] == [one.label for one in plain.shown]
    for one, other in zip(asked.shown, plain.shown, strict=True):
        pd.testing.assert_frame_equal(one.rows, other.rows)
    with_it, without = asked.claims(), plain.claims()
    assert "RTX 4090" not in without.html
    lines = [line for line in with_it.plain.splitlines() if "RTX 4090" in line]
    assert len(lines) == len(asked.study.claims)
    assert all("predicted, not measured" in line and "a prediction judges no claim" in line for line in lines)
    assert "RTX 4090 was not measured" in asked.provenance().html


def test_the_section_of_a_gpu_is_labelled_and_says_how_wrong_it_may_be():
    shown = opened().predicted()
    html = shown._repr_html_()
    assert html.count("predicted, not measured</span>") == len(shown.parts[1].plain.splitlines()) - 1
    assert shown.parts[0].plain.startswith("Predicted, not measured: RTX 4090, from the rows of the NVIDIA H100")
    for words in (
        "Tested on the same pairs between the recorded GPUs",
        "Bounds of a ratio: RTX 4090",
        "may be larger than the bounds",
    ):
        assert words in html


def test_without_a_gpu_asked_for_the_shipped_ones_are_folded_and_labelled():
    shown = lab.open("state_layout", source="recorded", **LAYOUT).predicted()
    assert shown.parts[0].html.startswith("<details><summary>GPUs that were not measured")
    assert "open" not in shown.parts[0].html[:12]
    for name in sheets.unmeasured().values():
        assert f"{name}, predicted" in shown.parts[0].html
    assert "NVIDIA H200, recorded" in shown.parts[0].html


def test_a_gpu_that_a_source_names_has_a_sentence():
    study, rows = registry.load("persistent_tables"), elsewhere.recorded_rows("persistent_tables")
    said = [part.plain for part in predicted_words.shipped(study, elsewhere._cases(rows), rows)[1:]]
    assert [one for one in said if one.startswith("Predicted, not measured: RTX 5090,")] == said  # "RTX 5090"
    assert said


def test_errors_of_predictions_are_shown_beside_the_floors():
    model, moved = predicted_words.errors("gemv_coalescing")
    said = (f"model {predict.LATEST}", "floor", "without the row&#39;s own kernel")
    assert all(words in model.html for words in said)
    assert "floor&#39;s shift" in moved.html


def test_a_study_without_predictions_says_so(toy):
    [said] = predicted_words.errors("state_layout")
    assert "labkit record --predict" in said.plain
    made.store(paths.DATA / SLUG, made.make("state_layout", LAYOUT, made.layout_us()))
    [said] = lab.open("state_layout", source="recorded", **LAYOUT).predicted().parts
    assert said.plain.startswith("Nothing is predicted of other GPUs")
