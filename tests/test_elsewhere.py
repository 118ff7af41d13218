"""GPUs that nobody measured: what can be asked for, what it starts from, how wrong it is, and that it stays apart."""

import math
import shutil
from itertools import permutations

import numpy as np
import pytest
import rows as made
from click.testing import CliRunner

from labkit import cli, lab, paths, registry
from labkit.bench import claim, records, spec
from labkit.evidence import predict
from labkit.workflow import elsewhere, notebooks

H100, H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"
STUDIES = [name for name in registry.NOTEBOOKS if name != "machine"]
WANTED = {"models": ["Qwen3-Next-80B-A3B"], "batches": [1, 64], "states": ["fp32"], "gates": ["GDN"]}
WANTED |= {"step_batches": [1, 64], "prefills": ["1 x 512"]}


def test_what_can_be_asked_for():
    assert list(elsewhere.known()) == ["a100-80gb", "l40s", "rtx-4090", "rtx-5090", "b200"]
    assert set(elsewhere.SHIPPED) == set(elsewhere.known().values())
    with pytest.raises(ValueError, match=r"gpu is 'h100'; predicted can be: a100-80gb, l40s"):
        elsewhere.gpu("h100", H100)


@pytest.mark.parametrize("study", STUDIES)
def test_pairs_are_of_variants_that_some_case_has(study):
    one = registry.load(study)
    every = {parameter: value for parameter, value in notebook_values(study).items() if parameter in one.parameters}
    names = {}
    for case in one.cases(every):
        names.setdefault(case.op, []).append({variant.name for variant in one.variants(case)})
    assert one.pairs
    for pair in one.pairs:
        assert any({pair.variant, pair.against} <= some for some in names[pair.op]), str(pair)


def notebook_values(study):
    return {name: one.value for name, one in notebooks.parameters(notebooks.source_path(study)).items()}


@pytest.mark.parametrize("study", STUDIES)
def test_of_the_gpu_itself_it_is_what_was_measured(study):
    same = elsewhere.times(study, H100, elsewhere.recorded_gpu(paths.DATA / H100))
    assert len(same)
    np.testing.assert_allclose(same["predicted"], same["recorded"])
    found = elsewhere.by_case(same, registry.load(study).pairs)
    np.testing.assert_allclose(found["predicted"].astype(float), found["recorded"].astype(float))


def test_errors_are_those_of_the_recorded_gpus_from_one_another():
    off = []
    for base, other in permutations((H100, H200)):
        old, new = (elsewhere.rows_of("gemv_coalescing", one) for one in (base, other))
        gpus = [elsewhere.recorded_gpu(paths.DATA / one) for one in (base, other)]
        told = predict.transfer(old, *gpus)["us_new"].to_numpy()
        us = {True: dict(zip(zip(old["case"], old["variant"]), told, strict=True))}  # noqa: B905
        us[False] = {
            (row.case, row.variant): float(np.median(row.samples_ns)) / 1e3 for row in new.itertuples() if row.ok
        }
        for pair in registry.load("gemv_coalescing").pairs:
            for case in dict.fromkeys(old[old["op"] == pair.op]["case"]):
                keys = (case, pair.against), (case, pair.variant)
                if all(key in us[kind] for key in keys for kind in us):
                    predicted, measured = (us[kind][keys[0]] / us[kind][keys[1]] for kind in (True, False))
                    off.append(abs(predicted / measured - 1))
    median, most = elsewhere.errors("gemv_coalescing")
    assert median == pytest.approx(np.quantile(off, 0.5), rel=1e-3)
    assert most == pytest.approx(np.quantile(off, 0.9), rel=1e-3)


def test_a_gpu_of_which_only_the_machine_page_ran(tmp_path, monkeypatch):
    """Its own ceilings count, and not a data sheet; once a study ran on it, it is no longer predicted."""
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    folder = tmp_path / "my-gpu"
    folder.mkdir()
    for name in ("machine.parquet", "machine.json"):
        shutil.copy(paths.DATA / H200 / name, folder)
    assert "my-gpu" in elsewhere.known()
    mine = elsewhere.gpu("my-gpu", H100)
    assert mine.measured
    assert mine.memory("read") == elsewhere.recorded_gpu(paths.DATA / H200).memory("read")
    records.write_atomic(folder / "state_layout.parquet", b"")
    assert "my-gpu" not in elsewhere.known()


def test_without_a_recorded_gpu_nothing_is_predicted(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "DATA", tmp_path)
    elsewhere.errors.cache_clear()
    assert elsewhere.bases("state_layout") == []
    assert all(map(math.isnan, elsewhere.errors("state_layout")))
    elsewhere.errors.cache_clear()


# on a page


def test_a_page_says_predicted_and_judges_by_what_was_recorded(monkeypatch):
    x = lab.open("state_layout", source="predicted", gpu="rtx-4090", **WANTED)
    assert [entry.label.rpartition(" ")[2] for entry in x.shown] == ["(recorded)", "(recorded)"]
    page = "\n".join(part.html for part in x.predicted().parts)
    assert page.count("redicted, not measured") >= 3
    assert "µs, RTX 4090, predicted" in page
    assert "half of the ratios are within" in page
    assert "No claim is judged by this" in page
    judged = []
    monkeypatch.setattr(claim.Claim, "judge", lambda self, rows: judged.append(rows) or claim.untestable("x"))
    x.claims()
    assert {gpu for rows in judged for gpu in rows["gpu"]} == {entry.machine.name for entry in x.shown}


def test_otherwise_it_shows_all_that_are_known_by_their_data_sheets():
    x = lab.open("state_layout", source="recorded", gpu=H200, **WANTED)
    ratios, errors = x.predicted().parts[1:]
    assert "µs" not in ratios.html + errors.html
    for name in elsewhere.SHIPPED:
        assert f"predicted, {name}" in ratios.html


def test_a_case_is_named_by_what_not_all_have():
    keys = ['{"batch": 1, "state": "fp32", "K": 128}', '{"batch": 8, "state": "fp32", "K": 128}']
    assert elsewhere.case_in_words(keys[1], keys) == "batch 8"


@pytest.mark.parametrize(
    ("source", "gpu", "message"),
    [
        ("predicted", "rtx-9090", "no GPU 'rtx-9090'; recorded: nvidia-h100-80gb-hbm3, nvidia-h200; for --source pred"),
        ("predicted", H200, "a GPU that can be predicted: a100-80gb"),
        ("recorded", "rtx-4090", "a recorded GPU: nvidia-h100-80gb-hbm3"),
    ],
)
def test_a_wrong_gpu_is_refused_before_anything_runs(monkeypatch, source, gpu, message):
    monkeypatch.setattr(notebooks, "run", lambda *a, **k: pytest.fail("it ran"))
    found = CliRunner().invoke(cli.main, ["run", "01", "--source", source, "--gpu", gpu])
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())


def test_open_refuses_it_too():
    with pytest.raises(ValueError, match="gpu is 'x'; predicted can be: a100-80gb"):
        lab.open("state_layout", source="predicted", gpu="x", **made.LAYOUT)


def test_list_names_them(monkeypatch):
    monkeypatch.setattr(registry, "NOTEBOOKS", {})
    assert "rtx-4090 (RTX 4090)" in CliRunner().invoke(cli.main, ["list"]).output


def test_sources_that_measure_nothing():
    assert set(spec.TOLD) < set(spec.SOURCES)
