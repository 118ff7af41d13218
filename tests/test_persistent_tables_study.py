"""Study 03: cases, variants and floors by hand; the host's clock; tables, claims and views from made-up rows."""

import itertools
import json
import math
import re
from itertools import pairwise
from types import SimpleNamespace

import compiled_once
import numpy as np
import pandas as pd
import pytest
import rows as made
import torch

from labkit.bench import verdict
from labkit.bench.sha import covered, kernel_sha
from labkit.bench.spec import CONTROL, Case
from labkit.kernels.decoder import model, reference, step, tables
from labkit.kernels.gemv import choose
from labkit.studies.persistent_tables import (
    answer,
    baseline,
    claims,
    explore,
    host_views,
    plans,
    shown,
    study,
    trials,
    variants,
    views,
    ways,
)
from labkit.studies.persistent_tables import tables as derived
from labkit.sweep import run as sweep
from labkit.sweep.trial import Shared

ALL = {"models": list(variants.MODELS), "dtypes": ["bf16", "fp32"], "parts": [4, 20, 88], "starts": [512, 1984]}
PUBLISHED = Case("token", variants.PUBLISHED)
WHOLE = Case("token", variants.PUBLISHED | {"parts": 0})


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(verdict, "RESAMPLES", 100)
    monkeypatch.setattr(trials, "shared", Shared())


@pytest.fixture(scope="module")
def rows():
    return made.make("persistent_tables", made.DECODE, made.decode_us())


def of(op, parameters=ALL):
    return [x for x in study.cases(parameters) if x.op == op]


def without_samples(rows):
    return made.unusable(rows)


# cases, variants


def test_cases_are_distinct_and_survive_json():
    found = study.cases(ALL)
    assert len({(x.op, x.key) for x in found}) == len(found)
    for x in found:
        assert Case(x.op, json.loads(x.key)).key == x.key
    assert len(of("token")) == 3 + 3 + 2 * 2 + 1  # models, parts, starts, fp32
    assert len(of("host")) == 3 + 3 + 1  # models, parts, behind other work
    assert [x["start"] for x in of("batch")] == [variants.START, 1984]
    assert not of("batch", ALL | {"models": [variants.H1024]})
    assert [x["model"] for x in found] == sorted((x["model"] for x in found), key=variants.MODELS.index)
    assert not [x for x in study.cases(ALL | {"models": [variants.LLAMA]}) if x.params.get("parts")]


def test_the_published_number_of_records_is_met():
    how = tables.Lowering(model.MODELS[variants.H1024], 528, cache=variants.CACHE, parts=variants.PUBLISHED_PARTS)
    assert abs(len(tables.lower(how).records) / variants.PUBLISHED_RECORDS - 1) < 0.02


def test_every_variant_is_made_hashed_and_once():
    for x in study.cases(ALL):
        found = study.variants(x)
        assert len({v.name for v in found}) == len(found)
        assert study.control(x) in {v.name for v in found}
        assert sweep.with_control(study.STUDY, x)[-1].options["repeats"] == study.control(x)
        for v in found:
            assert v.caches == ("cold",)  # a decode reads all weights before it reads one again


def test_the_hash_differs_where_the_kernels_or_the_work_of_the_host_do():
    kinds = {name: kind for name, (kind, _) in variants.KEPT.items()}
    shas = {v.name: kernel_sha(v.source) for v in study.variants(PUBLISHED)}
    assert len(set(shas.values())) == len(set(kinds.values())) + 1  # and without the host
    for a in kinds:
        assert [shas[a] == shas[b] for b in kinds] == [kinds[a] == kinds[b] for b in kinds]
    shas = {v.name: kernel_sha(v.source) for v in study.variants(WHOLE)}
    assert len({shas[name] for name in (variants.OURS, variants.LONGEST, *variants.ABLATIONS)}) == 1  # other arguments
    assert shas[variants.CUBLAS] == shas[variants.CUBLAS_DEPENDENT]
    assert shas[variants.GEMV] == shas[variants.GEMV_DEPENDENT]
    different = (variants.OURS, variants.UNORDERED, variants.CUBLAS, variants.GEMV, variants.REPLAYED, variants.READ)
    assert len({shas[name] for name in different}) == len(different)
    host = Case("host", variants.PUBLISHED | {"queued_us": 0})
    shas = {v.options["name"]: kernel_sha(v.source) for v in study.variants(host)}
    assert len(set(shas.values())) == len(set(kinds.values()))


def test_no_hash_covers_the_reference_or_the_validator():
    for x in study.cases(ALL):
        for source in {v.source for v in study.variants(x)}:
            modules = {one.partition(":")[0].rpartition(".")[2] for one in covered(source)}
            assert not modules & {"reference", "validate", "trials"}


def test_all_ways_are_timed_where_the_published_ones_are():
    named = {v.name for v in study.variants(PUBLISHED)}
    assert set(ways.WAYS) < named
    assert set(ways.WAYS) == set(variants.WAYS + variants.ALONE)
    host = {v.name for v in study.variants(Case("host", variants.PUBLISHED | {"queued_us": 0}))}
    assert host == {variants.part(way, part) for way in ways.WAYS for part in variants.PARTS}
    whole = {v.name: v.mode for v in study.variants(WHOLE)}
    assert {name for name, mode in whole.items() if mode == "graph"} == set(variants.CAPTURED)


def test_the_floor_by_hand():
    x = Case("token", variants.PUBLISHED | {"model": variants.H1024})
    m, tokens = model.MODELS[variants.H1024], study.sequence(x)
    context = sum(16 + i + 1 for i in range(tokens)) / tokens  # positions that attention reads, its own included
    values = m.streamed_weights() + 2 * m.layers * m.kv_width * (context + 1)
    assert study.floor(x).bytes == pytest.approx(2 * values, abs=2 * m.layers * m.kv_width)
    assert study.floor(Case("token", x.params | {"start": 512})).bytes > study.floor(x).bytes
    assert study.floor(Case("token", x.params | {"dtype": "fp32"})).bytes == 2 * study.floor(x).bytes
    assert study.floor(Case("host", x.params | {"queued_us": 0})).bytes == 0


def test_what_is_timed_and_checked_fits_the_cache():
    last = variants.CACHE - variants.CHECKED
    for x in of("token", ALL | {"starts": [last]}):
        assert x["start"] + max(variants.CHECKED, study.sequence(x)) <= variants.CACHE
    with pytest.raises(ValueError, match="parameter starts is"):
        study.STUDY.check(ALL | {"starts": [last + 1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": [0]}, "parameter starts is"),
        ({"parts": [0]}, "parameter parts is"),
        ({"models": ["tiny"]}, "parameter models is"),
        ({"dtypes": ["fp16"]}, "parameter dtypes is"),
    ],
)
def test_parameters_that_are_not_allowed_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        study.STUDY.check(ALL | change)
    study.STUDY.check(ALL | {"parts": [], "starts": []})


# the host's clock, and tokens that are compared


class Stub:
    """A way whose parts are noted instead of done."""

    def __init__(self):
        self.done = []

    def begin(self, position):
        self.done.append(("begin", position))

    def __getattr__(self, name):
        return lambda position: self.done.append((name, position))


def test_the_clock_has_a_sample_of_every_part_of_every_token(monkeypatch):
    monkeypatch.setattr(trials, "HOST_SECONDS", math.inf)
    run = Stub()
    clock = trials.HostClock(Case("host", variants.PUBLISHED | {"queued_us": 0}), run)
    assert {len(clock.samples(part)) for part in variants.PARTS} == {trials.HOST_TOKENS}
    steps = [one for one in run.done if one[0] != "begin"]
    assert [name for name, _ in steps[:3]] == list(variants.PARTS)
    positions = [position for name, position in steps if name == "launch"]
    assert positions[: study.SHORT + 1] == [*range(16, 16 + study.SHORT), 16]
    assert run.done.count(("begin", 16)) == -(-(1 + trials.HOST_TOKENS) // study.SHORT)


def test_the_clock_ends_early_where_a_token_takes_long(monkeypatch):
    monkeypatch.setattr(trials, "HOST_SECONDS", -1.0)
    clock = trials.HostClock(Case("host", variants.PUBLISHED | {"queued_us": 0}), Stub())
    assert len(clock.samples("copy")) == trials.HOST_LEAST


def test_parts_of_a_way_share_a_clock_and_the_control_has_its_own(monkeypatch):
    monkeypatch.setattr(trials, "prepared", lambda x, device, seed, name: Stub())
    x = Case("host", variants.PUBLISHED | {"queued_us": 0})
    found = {part: trials.host(x, "cpu", 1, 0, variants.GRAPH, part).timer() for part in variants.PARTS}
    again = trials.host(x, "cpu", 1, 0, variants.GRAPH, "launch").timer()
    [clock] = trials.shared.parts.values()
    assert found == clock.ns
    assert again is not found["launch"]


def decode(tokens, wanted, margins, dtype="fp32", valid=True):
    """`Checked` of a decode that generates given tokens, with the reference's logits."""
    logits = torch.ones(4)
    buffers = {"token": torch.zeros(1, dtype=torch.int32)}
    memory = SimpleNamespace(buffers=buffers, check=lambda: None)
    following = iter(tokens)
    run = SimpleNamespace(
        memory=memory, begin=lambda position: None, step=lambda p: buffers["token"].fill_(next(following))
    )
    expected = reference.Generated(wanted, margins, torch.ones((2, 4), dtype=torch.float64))
    return trials.Checked(Case("token", {"start": 3, "dtype": dtype}), run, logits, [expected], len(tokens), valid)


def test_tokens_are_compared_up_to_a_tie():
    right, wrong = [5, 6, 7, 8], [5, 6, 9, 8]
    same = decode(right, right, [1.0] * 4)
    assert same() == {"logits": 0.0, "tokens": 0.0}
    assert same.facts() == {"checked": 4, "right": 4, "margin": 1.0, "errors": [0.0, 0.0]}
    clear = decode(wrong, right, [1.0, 1.0, 0.5, 1.0])
    assert clear()["tokens"] == 1.0
    assert (clear.facts()["right"], clear.facts()["margin there"]) == (2, 0.5)
    tie = decode(wrong, right, [1.0, 1.0, 0.01, 1.0], "bf16")
    assert tie()["tokens"] == 0.0
    assert tie.right == [2]
    assert "tokens" not in decode(wrong, right, [1.0] * 4, valid=False)()  # way 5: shown, not judged


def test_every_sequence_is_compared_with_its_own_tokens():
    wanted = [[5, 6, 7], [8, 9, 4]]
    logits = torch.ones((2, 4), dtype=torch.float64)
    expected = [reference.Generated(tokens, [1.0] * 3, logits) for tokens in wanted]
    x = Case("batch", {"start": 3, "dtype": "fp32", "batch": 2})

    def checked(second):
        buffers, begun = {"token": torch.zeros((2, 1), dtype=torch.int32)}, []
        following = iter(zip(wanted[0], second, strict=True))
        memory = SimpleNamespace(buffers=buffers, check=lambda: None)
        run = SimpleNamespace(
            memory=memory, begin=lambda position: begun.append(buffers["token"].clone()),
            step=lambda position: buffers["token"].copy_(torch.tensor(next(following))[:, None]),
        )  # fmt: skip
        return trials.Checked(x, run, torch.ones((2, 4)), expected, 3)

    same = checked(wanted[1])
    assert same() == {"logits": 0.0, "tokens": 0.0}
    assert (same.facts()["checked"], same.facts()["right"]) == (6, 6)
    crossed = checked([8, 6, 7])  # the other sequence's
    assert crossed()["tokens"] == 1.0
    assert (crossed.right, crossed.facts()["margin there"]) == ([3, 1], 1.0)


# tables


def test_graphs_by_hand(rows):
    table = derived.graphs(rows).set_index(["model", "variant"])
    for name in (variants.H1024, variants.LLAMA):
        floor = study.floor(Case("token", variants.MAIN | {"model": name})).bytes / 3e6
        assert table.loc[(name, variants.OURS), "us"] == pytest.approx(floor + 20, rel=2e-3)
        assert table.loc[(name, variants.GEMV), "ratio"] == pytest.approx((floor + 40) / (floor + 20), rel=2e-3)
        assert table.loc[(name, variants.OURS), "% of reading"] == pytest.approx(100 * floor / (floor + 20), rel=2e-3)
        assert table.loc[(name, variants.GEMV), "verdict"] == "faster"
    assert math.isnan(table.loc[(variants.LLAMA, variants.OURS), "ratio"])


def test_ablations_and_stages_by_hand(rows):
    table = derived.ablations(rows).set_index(["model", "variant"])
    floor = study.floor(Case("token", variants.MAIN | {"model": variants.H1024})).bytes / 3e6
    assert table.loc[(variants.H1024, variants.NOT_AHEAD), "ratio"] == pytest.approx(
        (floor + 30) / (floor + 20), rel=2e-3
    )
    assert table.loc[(variants.H1024, variants.FETCHED), "verdict"] == "same"
    shown = derived.stages(rows).set_index(["model", "op"])
    assert shown.loc[(variants.LLAMA, "down"), "all"] == 9.0
    ceiling = rows["ceiling"].max()
    assert shown.loc[(variants.LLAMA, "down"), "floor"] == pytest.approx(16 * 2048 * 8192 * 2 / ceiling / 1e6)
    assert shown.loc[(variants.LLAMA, "head"), "floor"] == pytest.approx(128256 * 2048 * 2 / ceiling / 1e6)
    assert shown.loc[(variants.LLAMA, "attention"), "floor"] == 0


def test_what_finer_waits_save_by_hand(rows):
    table = derived.finer(rows).set_index(["model", "waits for"])
    assert table.loc[(variants.LLAMA, "its parts"), "saved %"] == pytest.approx(12.5)
    assert math.isnan(table.loc[(variants.LLAMA, "measured"), "saved %"])
    said = views.finer(rows).said
    assert f"{variants.LLAMA} 84 µs (12 % less)" in said
    assert "not simulated" in views.finer(rows[rows["variant"] != variants.MARKED])


def test_a_warp_that_copies_weights_by_hand():
    """At both positions 1.25 times as fast as the tables, which take as long as they read and 20 µs; said so."""
    rows = made.make("persistent_tables", made.DECODE, made.decode_us({variants.STREAMED: 0.8}))
    table = derived.streamed(rows).set_index(["start", "variant"])
    assert {start for start, _ in table.index} == {variants.START, 512}
    for start in (variants.START, 512):
        assert table.loc[(start, variants.OURS), "ratio"] == pytest.approx(1.25, rel=2e-3)
        assert math.isnan(table.loc[(start, variants.STREAMED), "ratio"])
    share = table["% of ceiling"]
    assert share[variants.START, variants.STREAMED] == pytest.approx(
        1.25 * share[variants.START, variants.OURS], rel=2e-3
    )
    assert (answer.facts(rows)["warp"], answer.facts(rows)["warp verdict"]) == (pytest.approx(1.25, rel=2e-3), "faster")
    found = answer.advice({"H200": answer.facts(rows)})
    assert ". Let one warp of each program copy weights ahead of all waits (Llama-3.2-1B: H200 1.25× faster)." in found
    as_fast = made.make("persistent_tables", made.DECODE, made.decode_us({variants.STREAMED: 1.0}))
    assert "warp" not in answer.advice({"H200": answer.facts(as_fast)})
    less = made.without(rows, variant=variants.STREAMED)
    assert derived.streamed(less).empty
    assert "warp" not in answer.facts(less)


def test_contexts_need_more_than_one_start(rows):
    table = derived.contexts(rows)
    assert set(zip(table["model"], table["start"], strict=True)) == {
        (name, start) for name in (variants.H1024, variants.LLAMA) for start in (variants.START, 512)
    }
    rival = table[table["variant"] == variants.GEMV_DEPENDENT]
    assert len(rival)
    assert set(rival["verdict"]) <= {"faster", "slower", "same"}  # the A/A control's noise is known
    assert derived.contexts(rows[~rows["case"].str.contains('"start": 512')]).empty


def test_walls_and_idle_by_hand(rows):
    table = derived.walls(rows)
    mine = table[(table["parts"] == 20) & (table["start"] == 16)].set_index("way")
    assert set(mine.index) == set(variants.WAYS + variants.ALONE)
    assert mine.loc[variants.REBUILT, "idle us"] == pytest.approx(2000 + 30 + 5, rel=5e-3)
    assert mine.loc[variants.GRAPH, "idle us"] == pytest.approx(15, rel=0.05)
    assert mine.loc[variants.GRAPH, "% idle"] == pytest.approx(100 * 15 / mine.loc[variants.GRAPH, "us"], rel=0.05)
    assert mine.loc[variants.PACKED, "bytes"] == 260
    assert variants.REBUILT not in set(table[table["model"] == variants.LLAMA]["way"])


def test_hosts_are_sums_of_one_token(rows):
    table = derived.hosts(rows).set_index(["model", "parts", "queued_us", "way"])
    line = table.loc[(variants.H1024, 20, variants.QUEUED_US, variants.PREBUILT)]
    assert line[["build", "copy", "launch"]].tolist() == pytest.approx([5, 1030, 5], rel=2e-3)
    assert line["host"] == pytest.approx(1040, rel=2e-3)
    assert line["runs"] == 3
    assert line["low"] <= line["host"] <= line["high"]
    assert line["sure"]


HOST = {"models": [variants.H1024], "dtypes": ["bf16"], "parts": [4, 20, 88], "starts": []}


@pytest.fixture(scope="module")
def one_slow():
    """Rows of a host that takes twice as long in the third of the processes."""
    rows = made.make("persistent_tables", HOST, made.decode_us())
    pace = np.array([1.0, 1.0, 2.0])
    ns = zip(rows["op"], rows["run"], rows["samples_ns"], strict=True)
    return rows.assign(samples_ns=[np.asarray(one) * pace[run] if op == "host" else one for op, run, one in ns])


def test_a_process_at_half_the_pace_makes_times_unclear_but_no_share(one_slow):
    host = derived.hosts(one_slow).set_index(["parts", "queued_us", "way"]).loc[(20, 0, variants.REBUILT)]
    assert not host["sure"]
    assert host["low"] < 2035 < 4070 < host["high"]
    shares = derived.rebuilding(one_slow).set_index("table")
    assert shares.loc["records", ["share", "share low", "share high"]].tolist() == pytest.approx([0.7] * 3, rel=5e-3)
    assert derived.building(one_slow).mid == pytest.approx(2000 / 30, rel=5e-3)
    assert derived.building(one_slow).half_width < 2000 / 30 * 1.01
    assert host_views.rebuilding(one_slow)["build µs"].str.endswith("(unclear)").all()
    assert host_views.where(one_slow)["all together, a token"]
    assert "unclear whether below" in str(host_views.bar_host(one_slow))
    assert "(unclear)" in host_views.host(one_slow).said
    ns = zip(one_slow["variant"], one_slow["run"], one_slow["samples_ns"], strict=True)
    uneven = one_slow.assign(samples_ns=[one * (0.3 + np.array(run)) if v in COPIES else one for v, run, one in ns])
    words = host_views.waits(uneven)
    for way in (variants.VECTORISED, variants.PREBUILT):
        assert words[shown.SHOWN[way]] == "unclear: processes differ"


def test_shares_are_of_one_process_and_show_its_interval(one_slow):
    """The records' clock ran while the third process was slow, that of all tables while it was not."""
    mine = one_slow["variant"] == BUILD
    pace = np.array([1.0, 1.0, 0.5])
    ns = zip(mine, one_slow["run"], one_slow["samples_ns"], strict=True)
    rows = one_slow.assign(samples_ns=[one * pace[run] if here else one for here, run, one in ns])
    line = derived.rebuilding(rows).set_index("table").loc["records"]
    assert line["share"] == pytest.approx(0.7 * 2 ** (1 / 3), rel=5e-3)
    assert line["share low"] < 0.7 < 1.4 < line["share high"]


def test_a_saving_by_hand(rows):
    table = derived.saving(rows)
    assert table["us"].tolist() == pytest.approx([1800, 195, 25, 2020], rel=0.02)
    assert table["share"].sum() == pytest.approx(2, rel=1e-3)
    assert (table["share low"] <= table["share"]).all()
    assert derived.saving(made.without(rows, variant=variants.VECTORISED)).empty


@pytest.mark.parametrize(("factor", "word"), [(1.5, "yes"), (0.7, "no"), (1.0, "no")])
def test_how_the_host_grows_with_records_is_what_the_rows_say(factor, word):
    rows = made.make("persistent_tables", HOST, made.decode_us())
    most = rows["case"].str.contains('"parts": 88') & (rows["op"] == "host")
    rows["samples_ns"] = [
        np.asarray(ns) * (factor if here else 1) for ns, here in zip(rows["samples_ns"], most, strict=True)
    ]
    table = derived.growth(rows)
    assert table["ratio"].tolist() == pytest.approx([factor] * len(table), rel=5e-3)
    assert set(host_views.growth(rows)["longer"]) == {word}
    assert f"rebuilt in Python: {factor:.1f}× the time" in host_views.host_over_records(rows).said


def test_growth_is_unclear_where_processes_differ(rows):
    some = made.make("persistent_tables", HOST, made.decode_us())
    here = some["case"].str.contains('"parts": 88') & (some["op"] == "host")
    pace = np.array([0.5, 1.0, 2.0])
    ns = zip(here, some["run"], some["samples_ns"], strict=True)
    some = some.assign(samples_ns=[np.asarray(one) * pace[run] if yes else one for yes, run, one in ns])
    assert set(derived.growth(some)["verdict"]) == {"unclear"}
    assert derived.growth(some[~some["case"].str.contains('"parts": (?:20|88)')]).empty


def test_idle_shares_have_an_interval(rows):
    mine = derived.walls(rows).query("parts == 20 and start == 16").set_index("way").loc[variants.GRAPH]
    assert mine["low"] <= mine["% idle"] <= mine["high"]


def test_the_weights_are_set_against_the_l2(rows):
    assert views.cold(rows.assign(gpu=H100))[variants.H1024] == "156 MB, 3.0 times the L2"
    assert "the L2" not in str(views.cold(rows.assign(gpu="NVIDIA A100")))


def test_a_way_without_all_its_parts_is_left_out(rows):
    some = made.without(rows, op="host", variant=variants.part(variants.GRAPH, "copy"))
    assert variants.GRAPH not in set(derived.hosts(some)["way"])
    assert variants.IN_LAUNCH in set(derived.hosts(some)["way"])


def test_what_waits_by_hand(rows):
    table = derived.queued(rows).set_index("way")["waited"]
    assert table[variants.VECTORISED] == pytest.approx(1000, rel=1e-2)
    assert abs(table[variants.PINNED]) < 1
    assert derived.queued(rows[~rows["case"].str.contains("1000")]).empty


def test_what_hides_by_hand(rows):
    table = derived.hidden(rows.assign(calls_per_sample=32)).set_index(["sweep", "way"])
    assert set(table.index.get_level_values(0)) == {"records", "contexts", "whole"}
    assert table.loc[("contexts", variants.PREBUILT), "hides"] == "no"
    assert table.loc[("contexts", variants.PINNED), "hides"] == "yes"
    assert table.loc[("whole", variants.PREBUILT), "beyond"] == pytest.approx(25, rel=0.05)


@pytest.mark.parametrize(("tokens", "kind"), [(1, "but its start"), (3, "no")])
def test_the_start_of_a_sample_is_told_from_not_hiding(rows, tokens, kind):
    """All the tokens of a sample together take longer by what the host works for one of them, or for three."""
    host = derived.hosts(rows).set_index(["model", "way"]).loc[(variants.H1024, variants.BY_KERNEL), "host"].median()
    mine = rows["variant"] == variants.BY_KERNEL
    count = max(1, int(tokens * host // 5))  # 5 µs a token beyond way 8: more than 1 % of it
    slower = [np.asarray(ns) + 5000 * here for ns, here in zip(rows["samples_ns"], mine, strict=True)]
    table = derived.hidden(rows.assign(samples_ns=slower, calls_per_sample=count)).set_index(["sweep", "way"])
    assert table.loc[("whole", variants.BY_KERNEL), "hides"] == kind


def test_way_5_is_shown_to_be_wrong(rows):
    table = derived.tokens(rows)
    assert CONTROL not in set(table["way"])
    assert set(table[table["way"] == variants.ONE_POSITION]["right"]) == {1}
    assert (table[table["way"] != variants.ONE_POSITION]["right"] == 64).all()
    right = views.tokens(rows).set_index("way")["right, bf16"]
    assert right[shown.SHOWN[variants.ONE_POSITION]].startswith(f"{(table['way'] == variants.ONE_POSITION).sum()} of ")


def test_sizes_and_changes_are_counted():
    table = views.sizes().set_index(["design", "model", "programs"])
    assert (
        table.loc[("this page", variants.LLAMA, "132"), "words"] == 16 * 8 * 16 + 1
    )  # layers, kv heads, spans, argmax
    assert table.loc[("Stanford MegaKernels, published", variants.LLAMA, "132"), "bytes"] == 1115136
    changed = views.changes()
    assert set(changed["field"]) == {"position"}
    assert changed[changed["model"] == variants.LLAMA]["words"].sum() == 16 * 8 * 16 + 1


# claims

H100, LAPTOP = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 5090 Laptop GPU"
OFF = variants.REBUILT
BUILD, COPY = variants.part(OFF, "build"), variants.part(OFF, "copy")
RECORDS = variants.part(variants.alone(OFF, "records"), "build")
COPIES = [variants.part(way, "copy") for way in variants.KEPT if way.startswith(variants.PREBUILT)]
FASTER = {RECORDS: 8.0}  # than the building of the other tables, four times


def judged(rows):
    return {claim.id: claim.judge(rows) for claim in claims.CLAIMS}


def rows_of(over=(), uneven=(), by=(0.3, 1.0, 3.0), gpu=H100):
    """Made-up rows of the cases that the claims are about. over: factors by variant; uneven: variants that take `by`
    times as long in the three processes."""
    parameters = {"models": [variants.H1024], "dtypes": ["bf16"], "parts": [20], "starts": []}
    found = made.make("persistent_tables", parameters, made.decode_us(dict(over))).assign(gpu=gpu)
    ns = zip(found["variant"], found["run"], found["samples_ns"], strict=True)
    factors = np.array(by)
    return found.assign(samples_ns=[np.asarray(one) * factors[run] if v in uneven else one for v, run, one in ns])


@pytest.mark.parametrize(
    ("claim", "over", "uneven", "direction", "size"),
    [
        ("persistent", {OFF: 0.114}, (), "holds", "as published"),
        ("persistent", {}, (), "holds", "more"),
        ("persistent", {OFF: 0.07}, (), "holds", "less"),
        ("persistent", {OFF: 0.03}, (), "fails", "less"),
        ("persistent", {OFF: 0.05}, [OFF], "unclear", "unclear"),
        ("construction", {}, (), "holds", "not comparable"),
        ("construction", {BUILD: 0.01}, (), "fails", "not comparable"),
        ("construction", {BUILD: 0.015}, [BUILD], "unclear", "not comparable"),
        ("records", FASTER, (), "holds", "as published"),
        ("records", {RECORDS: 30.0}, (), "holds", "more"),
        ("records", {RECORDS: 2.6}, (), "holds", "less"),
        ("records", {}, (), "fails", "less"),
        ("records", {RECORDS: 2.0}, [RECORDS], "unclear", "unclear"),
        ("schedule", {variants.LONGEST: 1.2}, (), "holds", "as published"),
        ("schedule", {variants.LONGEST: 1.5}, (), "holds", "more"),
        ("schedule", {variants.LONGEST: 1.1}, (), "holds", "less"),
        ("schedule", {variants.LONGEST: 0.9}, (), "fails", "less"),
        ("schedule", {}, [variants.LONGEST], "unclear", "unclear"),
        ("waiting", {}, (), "holds", "not comparable"),
        ("waiting", dict.fromkeys(COPIES, 0.1), (), "fails", "not comparable"),
        ("waiting", {}, COPIES, "unclear", "not comparable"),
        ("packed", {}, (), "holds", "not comparable"),
        ("packed", {variants.PACKED: 1.5}, (), "fails", "not comparable"),
        ("packed", {}, [variants.PACKED], "unclear", "not comparable"),
        ("packed-bytes", {variants.PINNED: 1.5}, (), "holds", "not comparable"),
        ("packed-bytes", {}, (), "fails", "not comparable"),
        ("packed-bytes", {}, [variants.PINNED], "unclear", "not comparable"),
        ("pinned", {variants.PINNED: 1.5}, (), "holds", "not comparable"),
        ("pinned", {}, (), "fails", "not comparable"),
        ("pinned", {}, [variants.PINNED], "unclear", "not comparable"),
    ],
)
def test_each_claim_comes_out_as_its_own_rows_say(claim, over, uneven, direction, size):
    found = judged(rows_of(over, uneven))[claim]
    assert (found.direction, found.size) == (direction, size)
    assert found.verdict == {"holds": "consistent", "fails": "disagrees"}.get(
        direction, direction
    )  # no code is its own
    assert "nan" not in found.measured + found.why


@pytest.mark.parametrize(
    ("claim", "missing"),
    [
        ("persistent", variants.ONE_POSITION), ("construction", COPY), ("records", RECORDS),
        ("schedule", variants.LONGEST), ("waiting", COPIES), ("packed", variants.PACKED),
        ("packed-bytes", variants.PINNED), ("pinned", variants.PREBUILT),
    ],
)  # fmt: skip
def test_a_claim_is_not_testable_without_what_it_is_about(claim, missing):
    whole = rows_of()
    failed = whole["variant"].isin([missing] if isinstance(missing, str) else missing)
    for some in (whole[~failed], made.unusable(whole, failed), whole.iloc[:0], made.processes(whole, 2)):
        found = judged(some)[claim]
        assert (found.verdict, found.measured) == ("not testable here", "–")
        assert found.why.startswith("needs ")


def test_every_claim_that_is_stated_is_tried_above():
    tried = {claim for claim, *_ in test_each_claim_comes_out_as_its_own_rows_say.pytestmark[0].args[1]}
    assert tried == {claim.id for claim in claims.CLAIMS if claim.observe}


def test_of_another_s_kernel_nothing_here_says_anything():
    found = judged(rows_of())["bandwidth"]
    assert (found.verdict, found.measured) == ("not testable here", "–")
    assert "which was not run" in found.why


@pytest.mark.parametrize(
    ("claim", "over", "uneven", "wide"),
    [
        ("construction", {}, [BUILD], ("holds", "not comparable")),
        ("records", FASTER, [RECORDS], ("holds", "unclear")),
        ("waiting", {}, COPIES, ("unclear", "not comparable")),
    ],
)
def test_a_wide_interval_of_the_host_leaves_open_what_lies_in_it_and_nothing_else(claim, over, uneven, wide):
    """As of any other claim: a ratio far from 1 has its direction, but not the published size."""
    found = [judged(rows_of(over, uneven, (1 - spread, 1, 1 + spread)))[claim] for spread in (0.01, 0.2)]
    assert [one.direction for one in found] == ["holds", wide[0]]
    assert found[1].size == wide[1]


def test_noise_of_the_host_hides_what_a_copy_waits_for():
    rows = rows_of(uneven=[CONTROL])
    assert judged(rows)["waiting"].direction == "unclear"
    assert judged(rows)["construction"].direction == "holds"


def test_where_nobody_knows_the_noise_nothing_is_clear():
    rows = rows_of(FASTER)
    found = judged(rows[rows["variant"] != CONTROL])
    for claim in ("persistent", "construction", "records", "waiting", "packed", "packed-bytes", "pinned"):
        assert found[claim].verdict == "unclear", claim


def test_that_it_is_another_gpu_is_said():
    found = {gpu: judged(rows_of({variants.LONGEST: 1.2}, gpu=gpu))["schedule"] for gpu in (H100, LAPTOP)}
    assert "another GPU than its RTX 5090" in found[H100].why
    assert "another GPU" not in found[LAPTOP].why
    assert {one.verdict for one in found.values()} == {"consistent"}  # which another kernel never reproduces


def test_published_sizes_by_hand():
    sizes = {claim.id: claim.size for claim in claims.CLAIMS if claim.size}
    for name, ratio in {"persistent": 2.7548, "schedule": 1.1978, "records": 4.8304}.items():
        assert sizes[name] == pytest.approx((ratio, ratio), rel=0.01)
        assert sizes[name][0] < ratio < sizes[name][1]


# views

DRAWINGS = (
    answer.hero, views.step, views.against, views.stages, views.finer, views.streamed, views.contexts, host_views.host,
    host_views.walls, host_views.idle, host_views.over_records, host_views.host_over_records, host_views.hiding,
)  # fmt: skip
SENTENCES = (views.one_position,)
ANSWERS = (views.measured, views.cold, host_views.bar_host, host_views.where, host_views.waits)
TABLES = (
    views.tokens, views.ablations, views.stops, host_views.rebuilding, host_views.queued, host_views.growth,
    views.questions,
)  # fmt: skip


def test_every_view_says_what_the_rows_say(rows):
    for draw in DRAWINGS:
        found = draw(rows)
        assert found.fig.axes, draw.__name__
        assert len(found.table)
        assert "nan" not in found.alt + found.caption, draw.__name__
    for tell in SENTENCES:
        text = tell(rows)
        assert text.endswith("."), tell.__name__
        assert "nan" not in text, tell.__name__
        assert len(text.split()) <= 40
    for make in TABLES:
        assert len(make(rows)), make.__name__
    for tell in ANSWERS:
        found = tell(rows)
        assert found, tell.__name__
        assert "nan" not in str(found), tell.__name__
    assert "not measured" not in str(views.questions(rows))
    waits = host_views.waits(rows)
    assert [waits[shown.SHOWN[way]] for way in (variants.REBUILT, variants.VECTORISED, variants.PINNED)] == [
        "not known: building takes longer",
        "waits",
        "does not wait",
    ]
    assert list(host_views.where(rows))[1] == "build with array operations, not Python objects"
    stops = derived.stops(rows).set_index("model").loc[variants.H1024]
    assert stops["barriers"] == 22
    assert stops[["waiting", "barrier", "slower"]].tolist() == pytest.approx([15, 15 / 22, 5], rel=0.02)


def test_every_view_is_a_sentence_without_rows(rows):
    for some in (rows.iloc[:0], without_samples(rows)):
        for draw in (*DRAWINGS, *SENTENCES):
            assert isinstance(draw(some), str), draw.__name__
        for make in TABLES:
            found = make(some)
            assert isinstance(found, pd.DataFrame)
            assert make in (views.questions, views.tokens) or found.empty, make.__name__
        for tell in ANSWERS:
            assert tell is views.cold or tell(some) == {}, tell.__name__
    assert views.cold(rows.iloc[:0]) == {}
    assert (views.questions(rows.iloc[:0])["figure"] == "not measured").all()


def test_the_bars_say_whether_they_are_reached(rows):
    assert "reaches 98 %, not below the 85 % aimed at" in views.step(rows).said
    assert "15.0 µs [15.0, 15.0], below 20 µs" in str(host_views.bar_host(rows))
    llama = {"models": [variants.LLAMA], "dtypes": ["bf16"], "parts": [], "starts": []}
    over = {variants.OURS: 1.5} | {variants.part(way, "launch"): 9.0 for way in (variants.GRAPH, variants.IN_LAUNCH)}
    slow = made.make("persistent_tables", llama, made.decode_us(over))
    assert ", below the 85 % aimed at" in views.step(slow).said
    assert "µs [55.0, 55.0], not below" in str(host_views.bar_host(slow))


def test_traffic_needs_no_measurement():
    table = views.traffic(variants.LLAMA).set_index("way")
    assert table.loc[shown.SHOWN[variants.PACKED], "bytes"] == 4 * (16 * 8 * 16 + 1)
    assert table.loc[shown.SHOWN[variants.IN_LAUNCH], "copies"] == 0
    assert len(views.traffic(variants.H1024, variants.ALONE)) == len(variants.ALONE)


# names, and the first screen


def test_every_variant_has_a_name_of_its_own():
    names = [*variants.CAPTURED, *variants.EAGER, variants.STREAMED]
    assert set(names) - set(shown.SHOWN) == {variants.OURS}
    assert len(set(shown.SHOWN.values())) == len(shown.SHOWN)
    assert not [name for name in shown.SHOWN.values() if re.match(r"\d ", name)]  # as recorded: "6 words …"
    assert all(len(shown.SHOWN[way]) <= 22 for way in variants.WAYS)  # stands beneath a bar without touching the next
    assert set(shown.EACH_TOKEN) == set(shown.MEANT) == set(variants.WAYS)
    assert set(answer.DO) == set(variants.WAYS) - {variants.ONE_POSITION}


def told(over=(), **changes):
    """Conclusion and advice on made-up rows of one GPU. over: factors by variant."""
    found = answer.facts(made.make("persistent_tables", made.DECODE, made.decode_us(dict(over)), **changes))
    return [tell({"H100": found}) for tell in (answer.conclusion, answer.advice)]


def test_the_first_screen_says_what_the_rows_say():
    conclusion, advice = told()
    step = study.floor(PUBLISHED).bytes / 3e6 + 20
    said = r"Each token takes less time when the GPU advances the position itself than when Python rebuilds the tables "
    said += (
        r"\(H100 (\S+)× faster\) or when array operations do \(H100 (\S+)× faster\)\. The published way repeats one "
    )
    said += r"position(.*) its output is wrong from the second token on\."
    python, arrays, replayed = re.fullmatch(said, conclusion).groups()
    assert float(python) == pytest.approx((step + 2000 + 30 + 5) / (step + 15), rel=5e-3)
    assert 1 < float(arrays) < float(python)
    assert re.fullmatch(r" \(H100 .*\):", replayed)
    faster, _ = told({variants.ONE_POSITION: 0.8})
    assert re.search(r"repeats one position: H100 1\.\d\d× faster still, but its output is wrong", faster)
    assert "take separate kernels" not in advice
    slower, _ = told({variants.REBUILT: 0.01})
    assert re.match(r"Each token takes more time .* rebuilds the tables \(H100 \S+× slower\)\. The published", slower)


def test_the_advice_follows_the_fastest_way_and_the_contexts():
    _, advice = told({variants.PINNED: 0.5, variants.ONE_POSITION: 0.1})
    assert advice == "Copy the tables from pinned memory."
    _, advice = told({variants.GRAPH: 0.5, variants.GEMV_DEPENDENT: 0.5})
    said = (
        r"Keep the position on the GPU and replay one CUDA graph\. Not at later positions: there separate kernels with "
    )
    said += r"dependent launch are faster, Llama-3\.2-1B from position 16 on \(H100 1\.\d\d× faster\), "
    said += r"AutoMegaKernel h1024 from position 16 on \(H100 \d\.\d\d× faster\)\."
    assert re.fullmatch(said, advice)


def test_where_separate_kernels_are_as_fast_they_are_not_advised():
    """At the first position of three both take the same; the second is where the tables fall behind."""

    def contexts(*ratios):
        words = ["faster" if ratio > 1.01 else "slower" if ratio < 0.99 else "same" for ratio in ratios]
        return pd.DataFrame({"start": [16, 512, 1984][: len(ratios)], "ratio": ratios, "verdict": words})

    assert answer._from(contexts(1.0, 0.8, 0.5)) == {"later": 512, "separate": 1 / 0.8}
    assert answer._from(contexts(1.05, 0.8, 1.0)) == {"later": 512, "separate": 1 / 0.8}
    assert answer._from(contexts(0.8, 0.8, 1.05)) == answer._from(contexts(1.0, 1.0, 1.0)) == {}


def test_gpus_that_differ_are_named():
    base = {"python": 2.0, "python verdict": "faster", "replay": 1.03, "replay verdict": "faster"}
    base |= {"right": 1, "checked": 64}
    one = base | {"best": variants.GRAPH, "later Llama-3.2-1B": 512, "separate Llama-3.2-1B": 1.06}
    other = base | {"python": 0.5, "python verdict": "unclear", "best": variants.PACKED}
    said = answer.conclusion({"H100": one, "H200": other})
    assert "that advances the position itself is H100 2.00× faster, H200 2.00× slower (unclear). The published" in said
    assert "repeats one position: H100 1.03×, H200 1.03× faster still, but" in said
    assert answer.advice({"H100": one, "H200": other}) == (
        "Keep the position on the GPU and replay one CUDA graph (H100) and send the 4-byte words that change in one "
        "copy (H200). Not at later positions: there separate kernels with dependent launch are faster, "
        "Llama-3.2-1B from position 512 (H100) on (H100 1.06× faster)."
    )
    arrays = {"vectorised": 1.4, "vectorised verdict": "faster"}
    same = answer.conclusion({"H100": one | arrays, "H200": one | arrays | {"python verdict": "unclear"}})
    assert "rebuilds the tables (H100 2.00× faster, H200 2.00× faster (unclear)) or when array operations do" in same
    assert "operations do (H100 1.40×, H200 1.40× faster). The published" in same
    for text in (said, same):
        assert max(len(one.split()) for one in text.split(". ")) <= 37  # a sentence


def test_the_figure_shows_what_conclusion_and_advice_rest_on(rows):
    found = answer.hero(rows)
    assert "our kernel, not of the published one" in found.caption
    assert found.data["way"].tolist()[0] == "rebuilt vectorised: by array operations"
    best = shown.SHOWN[answer.facts(rows)["best"]]
    shares = r"Vectorised rebuilding removes \d+ % of the time, the position on the GPU \d+ % more\. "
    shares += r"\d of 8 correct ways are within two percent of the fastest(, one pinned copy of all tables among them)?"
    published = answer.hero(rows[~rows["case"].str.contains('"parts": 0')])  # where only the published size was
    assert re.fullmatch(shares, published.said)
    took = rf"\. Cut into \d+ records, a token takes \d+ µs with {best}: no correct way is clearly faster"
    assert re.fullmatch(shares + took, found.said)


def test_the_replay_is_called_wrong_only_where_it_is():
    bare = {"python": 2.0, "python verdict": "faster", "checked": 64}
    one = bare | {"replay": 1.03, "replay verdict": "faster"}
    right = "Each token takes less time when the GPU advances the position itself than when Python rebuilds the tables "
    right += "(H100 2.00× faster)."
    assert answer.conclusion({"H100": one | {"right": 64}}) == right
    assert answer.conclusion({"H100": one | {"right": 3}}).endswith("is wrong after 3 tokens at the latest.")
    assert answer.conclusion({"H100": bare | {"right": 1}}).endswith(
        ". The published way repeats one position: its output is wrong from the second token on."
    )


@pytest.mark.parametrize(
    ("vectorised", "graph", "title"),
    [
        (2.4, 3.4, "Vectorised rebuilding removes most of the time, kept tables remove more"),
        (1.2, 3.4, "Kept tables remove most of the time, vectorised rebuilding removes less"),
        (1.2, 0.9, "What each way to keep the tables is worth"),
    ],
)
def test_the_title_says_what_saves_most(vectorised, graph, title):
    table = pd.DataFrame({"way": [variants.VECTORISED, variants.GRAPH], "ratio": [vectorised, graph]})
    assert answer._title(table) == title
    assert answer._title(table.iloc[1:]) == "What each way to keep the tables is worth"


def test_the_first_screen_is_empty_without_rows(rows):
    for some in (rows.iloc[:0], without_samples(rows)):
        found = {name: value for name, value in answer.facts(some).items() if name not in ("right", "checked")}
        assert found == {}
    assert answer.conclusion({}) == answer.advice({}) == ""
    assert answer.facts(rows.iloc[:0]) == {}
    assert set(answer.HEADLINE) <= {claim.id for claim in claims.CLAIMS}


# what is compiled beforehand is what runs


def test_kernels_are_compiled_for_each_model_and_target():
    for capability, kinds in ((90, [False, True]), (80, [False])):
        found = study.STUDY.kernels(study.cases(ALL), capability, "")
        assert len({str(one) for one in found}) == len(found)
        steps = [arguments for source, arguments in found if source.endswith(":compilable")]
        ablated = 3 * len(variants.MODELS)
        streamed = 2 * int(capability == 90)  # of one sequence, of a batch
        assert len(steps) == 3 * (len(variants.MODELS) + 1) + ablated + 2 + streamed  # and fp32; in spans, of a batch
        chains = [arguments for source, arguments in found if source.endswith(":launches")]
        alone = [one for one in chains if "batch" not in one]
        assert [(one["model"], one["dependent"]) for one in alone] == list(itertools.product(variants.MODELS, kinds))
        assert [one["model"] for one in chains if one not in alone] == [variants.LLAMA] * len(kinds)
        for one in alone:
            shapes = tables.Lowering(model.MODELS[one["model"]], 1).projections().values()
            assert set(one["choices"]) == {f"{N} x {K}" for N, K in shapes}
        assert len(steps) + len(chains) == len(found)


def test_the_chain_is_compiled_with_the_choices_that_it_is_given():
    choice = {"rows": 2, "num_warps": 2, "block_k": 512}
    found = baseline.launches(variants.H1024, choices={"5632 x 1024": choice})
    shapes = {(one.args["N"], one.args["K"]): one for one in found if "AHEAD" in one.args}
    assert set(shapes) == set(tables.Lowering(model.MODELS[variants.H1024], 1).projections().values())
    for (N, K), one in shapes.items():
        expected = choose.Choice(**choice) if (N, K) == (5632, 1024) else choose.rule(N, K, 2)
        assert (one.args["ROWS"], one.args["BLOCK_K"]) == (expected.rows, expected.block_k)


@pytest.mark.parametrize(
    ("name", "position_from"),
    [(variants.H1024, how) for how in tables.POSITION_FROM]
    + [(name, "device") for name in variants.MODELS if name != variants.H1024],
)
def test_the_step_of_every_model_fits_four_times_and_spills_next_to_nothing(name, position_from):
    found = compiled_once.evidence(trials.compilable(name, "bf16", position_from), 90)
    assert found["spill_bytes"] <= 24  # six registers, for more positions of the cache at once
    assert found["ctas_per_sm"] == 4  # how many run is found on the GPU
    assert found["loads"]["128"] >= 12  # weights, before the wait and after it
    assert found["atomics"] == 1 + bool(plans.plan_of(name, "bf16").span)  # the signal; spans that have arrived


def test_what_is_loaded_before_a_wait_covers_the_model_width():
    for name in variants.MODELS:
        choice = step.Choice(**plans.plan_of(name, "bf16").choice)
        assert choice.block_k * choice.ahead == model.MODELS[name].hidden, name


def test_a_plan_of_a_dtype_goes_before_that_of_the_model():
    assert plans.plan_of(variants.H1024, "fp32") is not plans.plan_of(variants.H1024, "bf16")
    assert plans.plan_of(variants.LLAMA, "fp32") is plans.plan_of(variants.LLAMA, "bf16")


def test_a_queue_is_shown_with_what_it_works_on():
    """Program 3 of 132 begins with its share of the first projection, then has one head of the first attention."""
    how = tables.Lowering(derived.MODELS[variants.H1024], 132, position=7)
    found = tables.lower(how)
    shown = derived.queue(how, found, 3, most=2)
    assert shown["op"].tolist() == ["qkv", "attention"]
    assert shown["weight"].tolist() == ["qkv_weight.0", "rope"]
    assert shown["position"].tolist() == [-1, 7]
    assert len(derived.queue(how, found, 0, most=10_000)) == found.queue[1]


@pytest.mark.parametrize("schedule", tables.SCHEDULES)
def test_the_fullest_queue_is_counted(schedule):
    """More programs than records: most queues are empty, and the fullest one has a whole record."""
    how = tables.Lowering(derived.MODELS[variants.H1024], 3000, schedule, parts=4)
    found = tables.lower(how)
    loads = [tables.values_read(how, found.records[a:b]).sum() for a, b in pairwise(found.queue)]
    ratio = max(loads) / (sum(loads) / len(loads))
    assert f"reads {ratio:.2f} times" in derived.lowered(how, found)


def test_widget_answers_every_control():
    said = []
    lab = SimpleNamespace(show_table=lambda table, caption: said.append(caption) or SimpleNamespace(html=""))
    *rows, answer = explore.widget(lab).children
    controls = {control.description: control for row in rows for control in row.children}
    assert set(controls) == {"model", "programs", "schedule", "rows a tile", "position", "program"}
    for name, value in {"model": variants.LLAMA, "programs": 7, "rows a tile": 8, "position": 3, "program": 40}.items():
        answer.value = ""
        controls[name].value = value
        assert "records in" in answer.value, name
    assert said[-1].startswith("The first records of program 6,")
