"""`labkit check`: a function's errors in every dtype, in seconds; what a GPU adds is compared as `--add` does it."""

import json

import pytest
from click.testing import CliRunner
from simulated import experiment

from labkit import cli, registry
from labkit.bench.spec import Case
from labkit.sweep import added
from labkit.sweep import check as checks
from labkit.workflow import checking, notebooks

GEMV = """
import triton
import triton.language as tl

@triton.jit
def rows(W, x, y, K, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    w = tl.load(W + tl.program_id(0) * K + k, mask=k < K, other=0.0)
    total = tl.sum(w.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32), 0)
    tl.store(y + tl.program_id(0), total.to(y.dtype.element_ty))

def right(W, x, y):
    rows[(W.shape[0],)](W, x, y, W.shape[1], BLOCK=1024)

def wrong(W, x, y):
    rows[(W.shape[0],)](W, x, y, W.shape[1] - 1, BLOCK=1024)

def other(a, b):
    pass
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(GEMV)
    return path


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(notebooks, "why_not_measure", lambda: "there is none")


def command(*words):
    return CliRunner().invoke(cli.main, ["check", *map(str, words)], prog_name="labkit")


def test_a_right_function_is_right_in_all_dtypes(file, no_gpu):
    done = command(f"{file}:right", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["study"], found["not timed"], found["times"]) == ("gemv_coalescing", "there is none", [])
    errors = {json.loads(line["case"])["dtype"]: line["error"] for line in found["errors"] if line["ok"]}
    assert set(errors) == {"bf16", "fp16", "fp32"}
    assert errors["fp32"] < errors["fp16"] < errors["bf16"] < 2.5e-3  # bf16 is rounded, not cut off


def test_a_wrong_function_is_wrong_and_says_so(file, no_gpu):
    done = command(f"{file}:wrong")
    assert done.exit_code == 1
    assert done.stdout.count("WRONG") == 6
    assert "not timed: there is none" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{}:none"], "defines no 'none' at its top level"),
        (["{}:other"], r"takes (a, b); name the study (--study); they give: state_layout (state, indices"),
        (["{}:right", "--study", "machine"], "machine takes no functions of your own; these studies do"),
        (["{}:right", "--case", "N"], "--case is 'N'; allowed: NAME=VALUE"),
        (["{}:right", "--case", "dtype=fp8"], "no case has dtype=fp8; allowed: bf16, fp32"),
        (["{}:right", "--case", "M=1"], "no case has M=1; allowed: none; parameters are N, K, dtype"),
        (["nothing.py:right"], "nothing.py: no such file"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_runs(file, words, message):
    done = command(*(word.format(file) for word in words))
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert "Error: add" not in done.stderr  # the notebooks' parameter


def test_every_study_that_takes_functions_has_tiny_cases_in_bf16():
    for name in added.takers():
        study = registry.load(name)
        parameter, dtypes = study.added.dtypes
        assert "bf16" in {case[parameter] for case in added.tiny(study)}, name
        assert set(dtypes) <= {case[parameter] for case in added.tiny(study)}


def test_the_case_that_is_timed_can_be_named():
    study = registry.load("gemv_coalescing")
    cases = study.cases(notebooks.defaults(study.name))
    found = checks.case_of(study, cases, {"N": "4096", "K": "2560", "dtype": "bf16"} | {"N": "9216"})
    assert (found.op, found["N"], found["K"]) == ("gemv", 9216, 2560)
    assert checks.case_of(study, cases, {}).op == "gemv"


def test_it_is_held_against_ours_and_every_release(file):
    study = added.with_added(registry.load("gemv_coalescing"), [f"{file}:right"])
    case = Case("gemv", {"N": 4096, "K": 4096, "dtype": "bf16"})
    known = checks.few(study)(case)
    names = [one.name for one in known]
    assert "added: right" in names
    assert any("SGLang" in name or "sglang" in name for name in names)
    assert any("vllm" in name for name in names)
    us = {name: 10.0 + place for place, name in enumerate(names)}
    rows = experiment(us, study.control(case)).assign(op="gemv", case=case.key, cache="cold", mode="graph", error=0.0)
    rows["role"] = rows["variant"].map({one.name: one.role for one in known}).fillna("control")
    found = checks.against_each(study, case, rows.assign(reason="", options=rows["options"]))
    assert {line["against"] for line in found} == set(names) - {"added: right"}
    for line in found:
        expected = us[line["against"]] / us["added: right"]
        assert line["ratio"] == pytest.approx(expected, rel=0.01)
    told = {"function": "f", "study": "s", "case": {}, "not timed": "", "errors": [], "times": found}
    assert checking.fine(told)
    assert f"of {names[0]}" in checking.text(told)
    assert not checking.fine(told | {"times": [found[0] | {"verdict": "failed", "remark": "it crashed"}]})
