"""Study 06: cases, variants, floors, tables and views; what is expected of rings and prompts in float64."""

import inspect
import json
import math
from dataclasses import replace

import pytest
import rows as made
import torch

from labkit.bench import verdict
from labkit.bench.spec import ROLES, Case
from labkit.evidence import compiled
from labkit.kernels.gated_delta import reference
from labkit.kernels.launch import launched
from labkit.kernels.offline import offline
from labkit.studies.gated_delta_today import answer, exact, inputs, study, tables, trials, variants, views, work
from labkit.sweep import gated_delta
from labkit.sweep.variants import code_of

GPU = "NVIDIA H100 80GB HBM3"
SMALL = {"model": "test", "activations": "fp32", "H": 1, "HV": 2, "K": 8, "V": 6, "state": "fp32"}
FIGURES = ("length_time", "batch_time", "rings", "verifies", "prompt_time", "prompts", "drift")
TABLES = ("layouts", "libraries", "errors", "searched")
ANSWERS = ("lengths_answered", "floors", "verified", "whole")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(verdict, "RESAMPLES", 50)


# cases


def test_cases_are_distinct_and_survive_json():
    found = study.cases(made.TODAY)
    assert {x.op for x in found} == {"ring", "length", "layout", "ring_verify", "prefill", "drift"}
    assert len({(x.op, x.key) for x in found}) == len(found)
    for x in found:
        again = Case(x.op, json.loads(x.key))
        assert (again.key, study.floor(again)) == (x.key, study.floor(x))


def test_an_empty_list_leaves_operations_out():
    for name, gone in (
        ("batches", {"ring", "length", "layout"}),
        ("verify_batches", {"ring_verify"}),
        ("prefills", {"prefill"}),
    ):
        study.STUDY.check(made.TODAY | {name: []})
        assert {x.op for x in study.cases(made.TODAY)} - {x.op for x in study.cases(made.TODAY | {name: []})} == gone
    few = study.cases(made.TODAY | {"batches": [64]})
    assert {x.op for x in few}.isdisjoint({"length", "layout"})


def test_every_variant_of_every_case_has_a_function_that_takes_its_options(monkeypatch):
    for name, function in inspect.getmembers(trials, inspect.isfunction):
        monkeypatch.setattr(trials, name, inspect.signature(function).bind)
    used = set()
    for x in (*study.cases(made.TODAY), *study.STUDY.tiny):
        found = study.variants(x)
        listed = [one.name for one in found]
        assert len(set(listed)) == len(listed)
        assert study.control(x) in listed
        assert {one.role for one in found} <= set(ROLES)
        for one in found:
            used.add((x.op, one.name))
            assert set(one.prepare(x, "cpu", 1, 0).arguments) == {"x", "device", "sets", "seed", *one.options}
            assert (one.role == "peer") == one.name.startswith(("fla", "sglang"))
    assert used == {(op, one.name) for op, some in variants.VARIANTS.items() for one in some}


def test_counted_are_kernels_of_the_lab_in_cases_that_are_measured():
    found = study.counted(made.TODAY)
    cases = {(x.op, x.key) for x in study.cases(made.TODAY)}
    assert {(x.op, x.key) for x, _ in found} <= cases
    assert all(name in [one.name for one in study.variants(x) if one.role != "peer"] for x, name in found)
    assert {x.op for x, _ in found} == {"ring", "ring_verify", "prefill"}


def test_what_follows_errors_along_tokens_is_compiled_ahead():
    """Its rings have as many entries as each L needs, those that are timed have one size."""
    x = Case("drift", study.shape("KDA") | {"state": "bf16", "batch": 1, "tokens": 2})
    found = [code_of(compiled.launch_of(source, 90)) for source in study.kernels([x], 90, GPU)]
    with offline(90):
        along = [code_of(one) for call in trials._Along(x, "cpu", 0).launches.values() for one in launched(call)]
        timed = [code_of(one) for one in launched(trials.drift(x, "cpu", 1, 0, variants.LENGTH).calls[0])]
    assert set(along) | set(timed) <= set(found)
    assert not set(along) <= set(timed)


# floors


def moved(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("gate", study.GATES)
def test_bytes_of_a_step_are_those_of_the_tensors(gate):
    """With L = 1 no entry is ever read; each further one costs half an entry more, and saves a part of a write."""
    x = Case("ring", SMALL | {"gate": gate, "batch": 3})
    (one,) = inputs.steps(x, "cpu", 1, 0)
    held = inputs.entries(x, 3, 5, "cpu", 0)
    small = moved(one.q, one.k, one.v, one.a, one.b, one.out, one.indices) + 2 * 3 * 4  # of the ring: start and count
    assert work.ring_bytes(x, 1) == 2 * moved(one.state) + small
    assert work.entry_bytes(x) * 3 * 5 == moved(held.u, held.k, held.log)
    assert work.ring_bytes(x, 5) == pytest.approx(
        moved(one.state) * 6 / 5 + 3 * work.entry_bytes(x) * (2 + 4 / 5) + small
    )
    assert work.ring_memory(x, 5) == moved(held.u, held.k, held.log)


def test_the_best_length_is_that_of_the_least_bytes_and_shorter_for_smaller_states_and_more_gates():
    lines = tables.predicted_lengths([x.params for x in study.cases(made.TODAY) if x.op == "length"])
    best = {(line["gate"], line["state"]): line["best L"] for line in lines.to_dict("records")}
    assert best["GDN", "fp32"] > best["GDN", "bf16"] > best["KDA", "bf16"]
    assert best["GDN", "fp32"] > best["KDA", "fp32"] > best["KDA", "bf16"]
    for x in study.cases(made.TODAY):
        if x.op == "ring":
            n = work.best_length(x)
            assert work.ring_bytes(x, n) <= min(work.ring_bytes(x, n - 1), work.ring_bytes(x, n + 1))
            assert work.state_bytes(x) < study.floor(x).bytes < 2 * work.state_bytes(x)


def test_a_step_of_which_none_writes_has_the_bytes_of_one_read():
    never, some = (Case("layout", SMALL | {"gate": "GDN", "batch": 3, "writes": w}) for w in ("never", "1 in L"))
    less = work.state_bytes(never) / work.best_length(never)
    assert study.floor(some).bytes - study.floor(never).bytes == pytest.approx(less, abs=1)


# where sequences stand


def test_sequences_stand_at_every_place_equally_often_the_first_about_to_write():
    counts = inputs.positions(8, 4, 16, "cpu")
    every = torch.cat(counts)
    assert int(counts[0][0]) == 15
    assert torch.bincount(every.long(), minlength=16).tolist() == [2] * 16


def test_no_sequence_writes_where_none_is_to():
    x = Case("layout", SMALL | {"gate": "GDN", "batch": 32, "writes": "never"})
    held = trials._Held(x, "cpu", 1, 0, True)
    (ring,) = held._rings(16, held._entries(16))
    assert int(ring.counts.max()) == 14


# what is expected


@pytest.mark.parametrize("gate", study.GATES)
def test_states_with_their_rings_are_those_of_the_recurrence(gate):
    """From a state, tokens one by one; and the same tokens' corrections in rings that wrap, at other counts each."""
    x = Case("ring", SMALL | {"gate": gate, "batch": 3})
    items = [replace(one, state=inputs.steps(x, "cpu", 1, 0)[0].state) for one in (
        inputs.steps(x, "cpu", 1, seed)[0] for seed in range(4)
    )]  # fmt: skip
    items = [replace(one, indices=items[0].indices) for one in items]
    state = exact.in_place_states(items[0], 3).double()
    held = inputs.entries(x, 3, 5, "cpu", 0)
    ring = held.ring(torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([4, 2, 0], dtype=torch.int32))
    logs = torch.zeros_like(ring.g.double())
    expected = state.clone()
    for j, one in enumerate(items):
        alpha, beta = exact.gates(one, one.a, one.b)
        _, after = reference.decode_step(state, one.q, one.k, one.v, alpha, beta, one.scale)
        k = one.k.double()
        norm = (k * k).sum(-1, keepdim=True).add(reference.L2_EPS).sqrt().repeat_interleave(2, 1)
        keys = k.repeat_interleave(2, 1) / norm
        decayed = state * (alpha[..., None, :] if alpha.ndim == 3 else alpha[..., None, None])
        u = beta[..., None] * (one.v.double() - torch.einsum("nhvk,nhk->nhv", decayed, keys))
        for n, slot in enumerate(one.indices.tolist()):
            place = int(ring.starts[n] + j) % 5
            before = int(ring.starts[n] + j - 1) % 5
            logs[slot, :, place] = (logs[slot, :, before] if j else 0) + alpha[n].log()
            ring.u[slot, :, place], ring.k[slot, :, place] = (u / norm)[n].float(), one.k[n]
            if j + 1 == int(ring.counts[n]):
                expected[n] = after[n]
        state = after
    found = exact.states_with(items[0], replace(ring, g=logs.float()), ring.counts, 3)
    assert trials.relative_rmse(found, expected) < 1e-6
    short = exact.states_with(items[0], replace(ring, g=logs.float()), (ring.counts - 1).clamp(min=0), 3)
    assert trials.relative_rmse(short, expected) > 1e-2


@pytest.mark.parametrize("gate", study.GATES)
def test_pieces_of_a_prompt_are_those_of_the_recurrence(gate, monkeypatch):
    monkeypatch.setitem(variants.LENGTHS, "two", (24, 24))
    monkeypatch.setattr(exact, "PIECE", 8)
    x = Case("prefill", SMALL | {"gate": gate, "prefill": "two"})
    (item,) = gated_delta.prompts(x, variants.LENGTHS["two"], "cpu", 1, 0)
    found = exact.Prompts(item)
    assert found.pieces == 3
    decay = item.g.double().exp()
    o, final = reference.extend(item.initial, item.q, item.k, item.v, decay, item.beta, item.scale, item.cu_seqlens)
    assert trials.relative_rmse(found.expected["out"], o) < 1e-12
    assert trials.relative_rmse(found.expected["state"], final) < 1e-12
    assert trials._control(x, item)["left out"] > 1e-2


def test_a_prompt_that_cannot_be_cut_evenly_is_followed_token_by_token(monkeypatch):
    monkeypatch.setitem(variants.LENGTHS, "odd", (13,))
    monkeypatch.setattr(exact, "PIECE", 8)
    (item,) = gated_delta.prompts(
        Case("prefill", SMALL | {"gate": "GDN", "prefill": "odd"}), variants.LENGTHS["odd"], "cpu", 1, 0
    )
    found = exact.Prompts(item)
    assert found.pieces == 1
    assert "without" not in found.expected


# tables and views


@pytest.fixture(scope="module")
def measured():
    over = {variants.PLAIN: 2.4, variants.SGLANG_PLAIN: 2.5, variants.SGLANG_RING: 1.5, variants.OURS: 1.3}
    over |= {variants.SEARCHED: 1.28, variants.SGLANG_SEARCHED: 1.45, variants.FLA: 2.0, variants.FLASHINFER: 1.3}
    over |= {
        variants.FUSED: 1.1,
        variants.SEGMENTS: 1.2,
        variants.ONE_SEGMENT: 1.8,
        variants.OURS_STORED: 4.0,
        variants.SGLANG_STORED: 4.5,
    }

    def factor(case, name):
        if case.op == "length" and "L = " in name:
            n = int(name.split()[-1])
            best = 12 if case["state"] == "bf16" else 16
            return 1.3 + 0.1 * abs(math.log2(n / best)) + (0.1 if name.startswith("sglang") else 0)
        slow = case.op == "ring" and case["batch"] == 1 and name == variants.OURS
        return 3.0 if slow else over.get(name, 1.25)

    return made.today(factor, gpu=GPU)


def test_every_view_is_drawn(measured):
    made.check_views(views, [*FIGURES, *TABLES], measured)
    made.check_views(answer, ["hero"], measured)
    for name in ANSWERS:
        said = getattr(views, name)(measured)
        assert said
        assert not [text for text in said.values() if "nan" in text]


@pytest.mark.parametrize("ops", [(), ("drift",), ("ring",), ("length",), ("prefill",), ("ring_verify",), ("layout",)])
def test_what_was_not_measured_is_left_out_or_said(measured, ops):
    some = measured[measured["op"].isin(ops)].reset_index(drop=True) if ops else measured.iloc[:0]
    made.check_views(views, [*FIGURES, *TABLES], some)
    made.check_views(answer, ["hero"], some)
    for name in ANSWERS:
        assert not [text for text in getattr(views, name)(some).values() if "nan" in text]
    answer.facts(some)


def test_what_failed_is_left_out(measured):
    made.check_views(views, [*FIGURES, *TABLES], made.unusable(measured))
    failed = made.unusable(measured, measured["variant"].str.startswith("sglang"))
    made.check_views(views, [*FIGURES, *TABLES], failed)
    assert answer.facts(failed).keys().isdisjoint({"ring fp32", "ring bf16"})


def test_the_fastest_length_stands_beside_the_predicted_one(measured):
    table = tables.best_lengths(measured)
    assert set(table["fastest L"][table["state"] == "fp32"]) == {16}
    assert set(table["fastest L"][table["state"] == "bf16"]) == {12}
    assert set(table["predicted L"][(table["state"] == "fp32") & (table["gate"] == "GDN")]) == {16.0}
    some = table[table["state"] == "bf16"]
    assert (some["ratio"] > 1).all()


def test_a_ring_pays_from_a_batch_on(measured):
    table = tables.crossover(measured).set_index(["state", "whose"])["batch"]
    assert table["fp32", "ours"] == 8
    assert table["fp32", "SGLang's"] == 1


def test_the_answer_says_what_was_found(measured):
    found = answer.facts(measured)
    assert found["ring fp32"] == pytest.approx(2.5 / 1.5, rel=1e-2)
    assert (found["from fp32"], found["from bf16"]) == (8, 8)
    assert found["prefill"] == pytest.approx(1.3 / 1.1, rel=1e-2)
    rings, prompts, fused = (
        "makes SGLang's decode of 256 sequences 1.67× faster with fp32 states, 1.67× with bf16",
        "With 2 key and 8 value heads, FlashInfer's prefill of 8192 tokens is 1.54× faster than fla's",
        "Averaged over 9 prompts and head counts, this lab's is 1.18× faster than the faster of the two",
    )
    assert answer.conclusion({"H100": found}) == (
        f"On the H100, writing the state once in 16 tokens {rings}. {prompts}. {fused}."
    )
    mixed = answer.conclusion({"H100": {"ring fp32": 1.5, "ring bf16": 0.8}})
    assert "1.50× faster with fp32 states, 1.25× slower with bf16 states." in mixed
    both = answer.conclusion({"H100": found, "H200": found})
    assert f"{prompts} (H100); 1.54× faster than fla's (H200). " in both
    assert answer.advice({"H100": found}) == (
        "Keep a ring of 16 tokens from batch 8 (fp32 states) or 8 (bf16 states) on; "
        f"other lengths are at most {found['length']:.2f}× faster. "
        "At batch 1 this lab's ring is 1.25× slower (fp32), 1.25× slower (bf16). "
        "Take this lab's fused prefill, at worst 1.18× faster than the faster of the two."
    )
    assert found["length"] > 1
    assert "Write fp32 states at every token" in answer.advice({"H100": {"from fp32": None}})
    even = {"from fp32": 1, "length": 1.001, "alone fp32": 1.2}
    assert answer.advice({"H100": even}) == (
        "Keep a ring of 16 tokens from batch 1 (fp32 states) on; no other length is faster."
    )
    assert answer.advice({"H100": {"prefill": 1.2}, "H200": {"prefill": 0.9}}) == "Take FlashInfer's prefill."
    assert (answer.conclusion({}), answer.advice({})) == ("", "")


def test_a_whole_step_gains_no_more_than_its_kernel_and_less_where_more_else_is_read(measured):
    short, long = (
        tables.whole_steps(measured, "ring", variants.SGLANG_RING, variants.SGLANG_PLAIN, context)
        for context in (256, 8192)
    )
    assert ((long["ratio"] > 1) & (long["ratio"] < short["ratio"]) & (short["ratio"] < short["kernel"])).all()
    assert short["ratio"].is_monotonic_increasing


def test_memory_of_rings_is_a_part_of_the_states_and_stored_drafts_many_times_them():
    table = tables.memory(["fp32"], [512]).set_index("what")["GB"]
    assert table["states"] == pytest.approx(512 * 24 * 32 * 128 * 128 * 4 / 1e9)
    assert 1.05 < table.iloc[1] / table.iloc[0] < 1.15
    assert table.iloc[2] == 5 * table.iloc[0]
    most = tables.most_sequences(["fp32", "bf16"], [80])
    assert (most["states"] > most.iloc[:, 3]).all()
    assert (most.iloc[:, 3] > most.iloc[:, 4]).all()


@pytest.mark.parametrize("name", [variants.OURS, variants.PLAIN])
def test_what_is_predicted_of_a_step_are_its_bytes_once(measured, name):
    """Of the launches of a call one moves the states; a step that writes moves them twice."""
    from labkit.workflow import launches

    some = measured[(measured["op"] == "ring") & (measured["variant"] == name)]
    row = next(row for row in some.to_dict("records") if json.loads(row["case"])["batch"] == 64)
    made_again = launches.launches_of(row)
    found = launches.work_of(row, made_again, [""] * len(made_again), 50 << 20)
    state = work.state_bytes(Case("ring", json.loads(row["case"])))
    times = 2 if name == variants.PLAIN else 1 + 1 / variants.LENGTH
    assert [one.bytes for one in found[:-1]] == [0.0] * (len(found) - 1)
    assert state * times < found[-1].bytes < state * (times + 0.15)
