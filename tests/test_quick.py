"""A quick look: which cases it takes, and that it says of the recorded GPUs what all rows say."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from labkit import paths, registry
from labkit.bench import records
from labkit.bench.claim import OURS, OWN, Claim, Observation, Observed
from labkit.workflow import filters, notebooks, quick, recorded


def claim(observe):
    return Claim("made", "s", "u", "st", "co", "p", "2026-11-26", "times", observe=observe)


def groups(**cases):
    """The rows of made-up cases: of each a ratio, and whose code ran."""
    return {
        ("op", name): pd.DataFrame([{"case": name, "mid": mid, "code": code, "gpu": "G", "run": [0]}])
        for name, (mid, code) in cases.items()
    }


def headline(observe, cases, kept=()):
    made = claim(observe)
    return quick.headline(made, cases, quick.said(made, cases, list(cases)), kept)


def each_case(rows):
    """One observation a case, clear but for those that are near 1; of the source's own code where there is any."""
    code = OWN if (rows["code"] == OWN).any() else OURS
    some = rows[rows["code"] == code]
    seen = [
        Observation(case, mid, mid - 0.1, mid + 0.1, 0.0, 1)
        for case, mid in zip(some["case"], some["mid"], strict=True)
    ]
    return Observed(code, seen, "rows")


def test_the_first_case_that_suffices_is_taken():
    found = headline(each_case, groups(a=(2.0, OURS), b=(3.0, OURS), c=(2.0, OURS)))
    assert found == [("op", "a")]


def test_it_stays_with_the_code_that_all_rows_are_of():
    found = headline(each_case, groups(a=(2.0, OURS), b=(2.0, OWN), c=(2.0, OURS)))
    assert found == [("op", "b")]


def test_cases_that_do_not_agree_stay_unclear():
    cases = groups(a=(2.0, OURS), b=(0.5, OURS), c=(0.4, OURS), d=(3.0, OURS))
    found = headline(each_case, cases)
    assert len(found) == 2
    assert recorded.judge(claim(each_case), pd.concat([cases[key] for key in found]))[0].direction == "unclear"


def test_a_case_that_says_nothing_is_passed_over_where_the_whole_is_clear():
    found = headline(each_case, groups(a=(1.0, OURS), b=(2.0, OURS), c=(2.0, OURS)))
    assert found == [("op", "b")]


def pair(rows):
    """What takes two cases."""
    both = {"a", "c"} <= set(rows["case"])
    return Observed(OURS, [Observation("both", 2.0, 1.9, 2.1, 0.0, 1)] if both else [], "a and c")


def test_all_that_a_rule_needs_together_is_taken():
    assert headline(pair, groups(a=(1, OURS), b=(1, OURS), c=(1, OURS))) == [("op", "a"), ("op", "c")]


def test_what_is_kept_anyway_is_used_first():
    cases = groups(a=(2.0, OURS), b=(2.0, OURS))
    assert headline(each_case, cases, [("op", "b")]) == [("op", "b")]


def test_a_claim_of_which_rows_say_nothing_has_no_case():
    assert headline(pair, groups(b=(2.0, OURS))) == []


def test_of_the_samples_those_of_the_first_process_are_left():
    lists = {
        "run": [0, 0, 1],
        "block": [0, 1, 0],
        "samples_ns": [5, 6, 7],
        "throttled": ["", "", "x"],
        "sm_mhz": [1, 2, 3],
    }
    found = quick.first_process(pd.DataFrame({name: [values] for name, values in lists.items()} | {"ok": [True]}))
    assert found["samples_ns"].tolist() == [[5, 6]]
    assert found["run"].tolist() == [[0, 0]]
    assert found["throttled"].tolist() == [["", ""]]
    assert found["ok"].tolist() == [True]


# Claims whose direction three processes leave open where one does not: they differ by more than each within itself.
LEFT_OPEN = {
    ("moe_persistent_grid", "nvidia-h200", "fewer-sms"): "fails",
}
JUDGED = [name for name in registry.NOTEBOOKS if registry.load(name).claims and paths.data_files(name, runs=False)]


@pytest.mark.parametrize("name", JUDGED)
def test_a_quick_look_says_of_each_recorded_gpu_what_all_rows_say(name):
    """One process of the headline cases comes to the same direction, and to the verdict but where a size is unclear.

    How far processes differ is not known of one of them: intervals of three can be wider, and leave a size open.
    """
    study, values = registry.load(name), notebooks.defaults(name)
    look_of = quick.of(study)
    few = look_of.cases(values)
    assert 0 < len(few) < len(study.cases(values)) / 3
    for path, _ in paths.data_files(name, runs=False):
        rows = recorded.read(path)
        part = quick.rows_of(look_of, records.of_cases(rows, {case.id for case in few}))
        for one in study.claims:
            whole, look = recorded.judge(one, rows)[0], recorded.judge(one, part)[0]
            left_open = LEFT_OPEN.get((name, path.parent.name, one.id), "")
            assert whole.direction == "unclear" or not left_open, "no longer left open"
            expected = (left_open or whole.direction, whole.code)
            assert (look.direction, look.code) == expected, f"{path.parent.name}: {one.id}"
            open_size = "unclear" in (look.size, whole.size)
            assert look.verdict == whole.verdict or open_size or left_open, f"{path.parent.name}: {one.id}"
            assert look.quick or not look.code


def of_record(name):
    return json.loads((paths.DATA / quick.FILE).read_text("utf-8"))[name]


@pytest.mark.parametrize("name", JUDGED)
def test_headlines_are_recorded_beside_the_rows(name):
    """Of these rows and rules; `labkit record --figures` writes them."""
    files = [path for path, _ in paths.data_files(name, runs=False)]
    assert of_record(name)["of"] == quick._stamp(name, files)


@pytest.mark.parametrize("name", ["gated_delta_today", "moe_persistent_grid", "persistent_tables"])
def test_headlines_that_are_recorded_are_what_is_found_anew(name):
    """Of the studies of which that takes seconds, not a minute."""
    files = [path for path, _ in paths.data_files(name, runs=False)]
    known = of_record(name)
    assert {key: known[key] for key in ("keys", "without")} == json.loads(json.dumps(quick.of_files(name, files)))


def test_headlines_of_other_rows_are_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "DATA", tmp_path)
    monkeypatch.setattr(quick, "of_files", lambda name, files: {"keys": [("op", "{}")], "without": []})
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "state_layout.parquet").write_bytes(b"rows")
    quick.keep(["state_layout"])
    keys = [("op", "{}"), ("op", "[]")]
    monkeypatch.setattr(quick, "of_files", lambda name, files: {"keys": keys, "without": []})
    assert quick.headlines("state_layout") == [("op", "{}")]
    (tmp_path / "gpu" / "state_layout.parquet").write_bytes(b"other rows")
    assert len(quick.headlines("state_layout")) == 2


def test_it_leaves_out_what_others_offer_and_no_claim_needs():
    study = registry.load("gated_delta_today")
    look_of = quick.of(study)
    assert "sglang 0.5.23, L = 32" in look_of.left_out
    for case in look_of.cases(notebooks.defaults("gated_delta_today")):
        whole, some = study.variants(case), look_of.variants(case)
        left = [one for one in whole if one.name not in {one.name for one in some}]
        assert {one.name for one in left} <= set(look_of.left_out)
        assert {one.role for one in left} <= {"peer"}
        assert any(one.role == "peer" for one in some) or not any("sglang" in one.name for one in whole)


def peers_decide(rows):
    """Of one peer's row; without it of nothing."""
    some = rows[rows["variant"] == "needed"]
    seen = [Observation("case", mid, mid - 0.1, mid + 0.1, 0.0, 1) for mid in some["mid"]]
    return Observed(OWN if len(seen) else OURS, seen, "rows")


@pytest.mark.parametrize(("observe", "without"), [(peers_decide, ["a", "b"]), (None, ["a", "b", "needed"])])
def test_of_others_only_what_a_claim_needs_is_kept(monkeypatch, observe, without):
    def observed(rows):
        return Observed(OURS, [Observation("case", 2.0, 1.9, 2.1, 0.0, 1)], "rows")

    study = registry.load("gemv_coalescing")
    claims = (claim(observe or observed),)
    monkeypatch.setattr(registry, "load", lambda name: replace(study, claims=claims))
    roles = {"ours": "ours", "a": "peer", "needed": "peer", "b": "peer"}
    rows = pd.DataFrame([{"op": "op", "case": "a", "variant": v, "role": r, "mid": 2.0} for v, r in roles.items()])
    lists = {name: [[0]] * len(rows) for name in quick.LISTS}
    monkeypatch.setattr(recorded, "read", lambda path: rows.assign(gpu="G", **lists))
    assert quick.unneeded("made", ["file"], [("op", "a")]) == without


def test_a_study_without_claims_has_all_its_cases():
    assert quick.of(registry.load("machine")) is registry.load("machine")


def test_its_page_stands_beside_the_full_one_and_says_what_it_is():
    assert notebooks.executed_path("machine", {"quick": True}).stem == "00_machine--quick"
    assert filters.said({"quick": True, "batches": [1]}) == "a quick look, batches=1"


def test_a_quick_look_at_another_part_shows_the_cases_of_both():
    study = registry.load("gemv_coalescing")
    values = notebooks.defaults("gemv_coalescing") | {"models": ["Qwen3.5-4B"]}
    few = {(case.op, case.key) for case in quick.of(study).cases(values)}
    assert few == set(quick.headlines("gemv_coalescing")) & {(case.op, case.key) for case in study.cases(values)}
    assert json.loads(next(key for op, key in few if op == "chain"))["model"] == "Qwen3.5-4B"
