"""The ways of keeping the tables, the baseline, and what study 03 times of both, against the reference decoder."""

import functools

import pytest
import torch
from decoding import VALID, generate

from labkit.kernels.decoder import reference, step, tables
from labkit.kernels.decoder.model import Decoder, random_weights
from labkit.kernels.decoder.step import Choice, allocate
from labkit.kernels.decoder.tables import Lowering
from labkit.kernels.gemv.gemv import linear
from labkit.studies.persistent_tables import baseline, study, trials, variants, ways
from labkit.studies.persistent_tables.baseline import Baseline
from labkit.studies.persistent_tables.peers import linear as cublas
from labkit.sweep.trial import Shared

SMALL = Decoder("small", hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=24, vocab=61)
TINY = Decoder("tiny", hidden=32, layers=2, heads=6, kv_heads=2, head_dim=8, ffn=48, vocab=61)
GEMV = functools.partial(linear, dependent=False)
CHOICE = Choice(block_k=64, block_t=16, num_warps=1)
MARGIN = 1e-4  # of the float64 reference: below it, float32 may choose otherwise
START, COUNT = 14, 3  # the last token is the first of another block of the cache, and of longer parts of the context


@functools.cache
def sequence(model, start, count=COUNT, dtype=torch.float32):
    """Weights; a cache of the positions before `start`; the token at `start`; what follows it by the reference."""
    weights = random_weights(model, 0, dtype)
    prompt = torch.randint(model.vocab, (start + 1,), generator=torch.Generator().manual_seed(start)).tolist()
    cache = reference.new_cache(model, 32)
    for position, token in enumerate(prompt[:-1]):
        reference.step(model, weights, cache, token, position)
    expected = reference.generate(model, weights, prompt, count)
    assert dtype != torch.float32 or min(expected.margins) > MARGIN  # else the test's model is a bad one
    return weights, cache, prompt[-1:], expected


def memory_of(model, start, device, dtype=torch.float32):
    """Memory whose caches hold the positions before `start`."""
    weights, cache, token, expected = sequence(model, start, dtype=dtype)
    memory = allocate(Lowering(model, 1, cache=32, rows=64, itemsize=dtype.itemsize), weights, device)
    for i in range(model.layers):
        memory.buffers[f"k_cache.{i}"].copy_(cache.k[i].flatten(0, 1))
        memory.buffers[f"v_cache.{i}"].copy_(cache.v[i].flatten(0, 1))
    return memory, token, expected


@pytest.mark.parametrize("name", VALID)
def test_tokens_of_every_valid_way(name, device):
    memory, token, expected = memory_of(SMALL, START, device)
    way = ways.prepare(name, memory, choice=CHOICE)
    assert generate(way, token, COUNT, START) == expected.tokens
    assert memory.buffers["tokens"][0, START + 1 : START + 1 + COUNT].tolist() == expected.tokens
    logits = memory.buffers["logits"][0].double().cpu()
    torch.testing.assert_close(logits, expected.logits[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [variants.PINNED, variants.IN_LAUNCH, variants.GRAPH])
def test_a_way_begins_again_elsewhere(name, device):
    """One way, prepared once: the same sequence twice, then another one, from the cache's beginning."""
    memory, token, expected = memory_of(SMALL, START, device)
    way = ways.prepare(name, memory, choice=CHOICE)
    for _ in range(2):
        assert generate(way, token, 2, START) == expected.tokens[:2]
    _, _, token, expected = sequence(SMALL, 0)
    assert generate(way, token, 2) == expected.tokens[:2]


def test_one_position_replayed_is_wrong_from_the_second_on(device):
    """The control: the published way. Its first token is right; then keys and values go where the first ones went."""
    memory, token, expected = memory_of(SMALL, START, device)
    way = ways.prepare(variants.ONE_POSITION, memory, choice=CHOICE)
    for count, right in ((1, True), (2, False)):
        tokens = generate(way, token, count, START)
        error = (memory.buffers["logits"][0].double().cpu() - expected.logits[count - 1]).abs().max()
        assert error < 1e-5 if right else error > 1e-2
    assert tokens[0] == expected.tokens[0]
    assert not memory.buffers["k_cache.0"][START + 1 :].any()
    assert generate(way, token, COUNT, START) != expected.tokens


def test_tables_left_as_they_were_are_seen(device, monkeypatch):
    """The control of the ways that patch: without the patch they are the fifth."""
    monkeypatch.setattr(ways.WordsByKernel, "copy", lambda self, position: None)
    memory, token, expected = memory_of(SMALL, START, device)
    way = ways.prepare("7 words by a kernel", memory, choice=CHOICE)
    assert generate(way, token, COUNT, START) != expected.tokens


def test_a_kernel_patches_the_words_that_it_is_given(device):
    records = torch.full((7, 100), -3, dtype=torch.int32, device=device)
    words = torch.arange(1, 700, 2, dtype=torch.int32, device=device)  # two programs, the second one in part
    ways.patch(records, words, 12)()
    expected = torch.full((700,), -3, dtype=torch.int32)
    expected[1::2] = 12
    assert torch.equal(records.view(-1).cpu(), expected)


# The baseline


@pytest.mark.parametrize(
    ("project", "model", "start", "splits", "count"),
    [
        (cublas, SMALL, 0, 1, COUNT), (cublas, SMALL, START, 4, COUNT), (cublas, TINY, 0, 2, COUNT),
        (cublas, TINY, START, 8, 1), (GEMV, SMALL, START, 2, 2),
    ],
)  # fmt: skip
def test_tokens_of_the_baseline(project, model, start, splits, count, device):
    memory, token, expected = memory_of(model, start, device)
    found = Baseline(memory, project, splits=splits, block_t=4)
    assert generate(found, token, count, start) == expected.tokens[:count]
    assert memory.buffers["tokens"][0, start + 1 : start + 1 + count].tolist() == expected.tokens[:count]
    torch.testing.assert_close(found.logits.double().cpu(), expected.logits[count - 1], rtol=1e-5, atol=1e-5)
    assert not found.arrived.any()


@pytest.mark.parametrize(("model", "batch", "splits"), [(SMALL, 4, 2), (TINY, 2, 4)])
def test_a_batch_of_the_baseline(model, batch, splits, device):
    """Each sequence is that of the reference; the tables' batch fills the same cache."""
    weights, prompts = random_weights(model, 0), [[7 + i, 50 - i] for i in range(batch)]
    expected = [reference.generate(model, weights, prompt, COUNT) for prompt in prompts]
    assert min(margin for one in expected for margin in one.margins) > MARGIN
    caches = []
    for make in (
        lambda m: Baseline(m, cublas, splits=splits, block_t=4),
        lambda m: ways.prepare(VALID[-1], m, choice=CHOICE),
    ):
        how = Lowering(model, 1, cache=32, rows=64, itemsize=4, batch=batch)
        way = make(allocate(how, weights, device))
        way.begin(0)
        tokens = step.generate_each(way.memory, lambda p, way=way: functools.partial(way.step, p), prompts, COUNT)
        assert tokens == [one.tokens for one in expected]
        assert way.memory.buffers["tokens"][:, 2 : 2 + COUNT].tolist() == tokens
        caches.append([way.memory.buffers[f"{x}_cache.{i}"] for x in "kv" for i in range(model.layers)])
        if isinstance(way, Baseline):
            logits = torch.stack([one.logits[-1] for one in expected])
            torch.testing.assert_close(way.logits.double().cpu(), logits, rtol=1e-5, atol=1e-5)
            assert not way.arrived.any()
    assert tokens[0] != tokens[1]
    for one, other in zip(*caches, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=4e-6)


def test_the_baseline_and_the_tables_fill_the_same_cache(device):
    caches = []
    for make in (lambda m: Baseline(m, cublas), lambda m: ways.prepare(VALID[-1], m, choice=CHOICE)):
        memory, token, expected = memory_of(TINY, START, device)
        assert generate(make(memory), token, 2, START) == expected.tokens[:2]
        caches.append([memory.buffers[f"{x}_cache.{i}"] for x in "kv" for i in range(TINY.layers)])
    for one, other in zip(*caches, strict=True):
        assert one[START].any()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize(("project", "model"), [(cublas, TINY), (GEMV, SMALL)])
def test_the_baseline_in_16_bits(project, model, device):
    memory, token, expected = memory_of(model, 9, device, torch.bfloat16)
    found = Baseline(memory, project)
    tokens = generate(found, token, 1, 9)
    error = (found.logits.double().cpu() - expected.logits[0]).abs().max()
    assert error < 6e-2  # activations are rounded from kernel to kernel; the interpreter truncates bf16
    assert tokens == expected.tokens[:1] or expected.margins[0] < 2 * error


def test_every_position_of_the_context_matters(device):
    """The control: what any part of the context lacks is seen in the logits."""
    memory, token, expected = memory_of(SMALL, 9, device)
    found = Baseline(memory, cublas, splits=4, block_t=4, graph=False)
    for position in range(9):  # in each part that has positions
        kept = memory.buffers["v_cache.0"].view(1, 32, -1)[:, position].clone()
        memory.buffers["v_cache.0"].view(1, 32, -1)[:, position] = 0
        generate(found, token, 1, 9)
        assert (found.logits.double().cpu() - expected.logits[0]).abs().max() > 1e-3
        memory.buffers["v_cache.0"].view(1, 32, -1)[:, position] = kept


def test_scores_whose_exponential_is_no_number(device):
    weights = dict(random_weights(SMALL))
    weights["model.layers.0.self_attn.q_proj.weight"] = 300 * weights["model.layers.0.self_attn.q_proj.weight"]
    expected = reference.generate(SMALL, weights, [5, 1, 60], 2)
    memory = allocate(Lowering(SMALL, 1, cache=32, rows=64, itemsize=4), weights, device)
    found = Baseline(memory, cublas, splits=2, block_t=4)
    generate(found, [5, 1, 60], 2)
    torch.testing.assert_close(found.logits.double().cpu(), expected.logits[-1], rtol=1e-3, atol=1e-3)


def in_order_of_k(W, x, y):
    """The product, of equal rows the same value: a library's order may depend on a row's place."""
    return lambda: y.copy_(sum(W[:, k] * x[k] for k in range(len(x))))


def test_of_equal_logits_the_baseline_takes_the_first(device, monkeypatch):
    monkeypatch.setattr(baseline, "ARGMAX_BLOCK", 16)  # parts of the vocabulary that must be compared
    memory, token, expected = memory_of(SMALL, 0, device)
    best = expected.tokens[0]
    for other in (best - 1, 60):
        memory.buffers["head"][other] = memory.buffers["head"][best]
    assert generate(Baseline(memory, in_order_of_k), token, 1) == [best - 1]


def test_a_launch_by_launch_baseline_is_the_graphs(device):
    tokens = []
    for graph in (False, True):
        memory, token, _ = memory_of(SMALL, START, device)
        tokens.append(generate(Baseline(memory, cublas, graph=graph), token, COUNT, START))
    assert tokens[0] == tokens[1]


def test_generation_by_a_way_is_that_by_launches(device):
    """`generate` adds nothing but the beginning."""
    memory, token, expected = memory_of(SMALL, START, device)
    way = ways.prepare("8 position in the launch", memory, choice=CHOICE)
    tokens = step.generate(memory, lambda p: functools.partial(way.step, p), token, 2, START)
    assert tokens == expected.tokens[:2]


# What study 03 times, beyond what `check_tiny` runs: a sequence ends and begins anew, what is not right is noticed

CASE, BATCH = study.STUDY.tiny


@pytest.fixture
def sequences(monkeypatch):
    """Sequences of two tokens, of memory of their own."""
    monkeypatch.setattr(trials, "shared", Shared())
    monkeypatch.setattr(trials, "sequence", lambda x, way="": 2)


def trial(name, device, x=CASE):
    (variant,) = (variant for variant in study.variants(x) if variant.name == name)
    return variant.prepare(x, device, 1, 0)


def check_trial(found):
    """Two rounds of the timed calls on poisoned outputs; the errors are within the tolerance."""
    found.poison()
    assert not found.written()
    for call in list(found.calls) * 2:
        call()
    assert found.written()
    errors = found.check()
    assert set(errors) == {"logits", "tokens"}
    assert all(errors[name] <= found.tolerance[name] for name in errors), errors


@pytest.mark.parametrize("name", [variants.OURS, variants.PINNED])
def test_a_sequence_can_be_repeated_and_is_right(name, sequences, device):
    found = trial(name, device)
    assert len(found.calls) == 2
    check_trial(found)
    facts = found.facts()
    assert facts["right"] == facts["checked"] == trials.CHECKED_TINY
    assert facts["records"] > 0
    assert facts["sent"]["kernels"] >= 1


def test_sequences_of_separate_kernels_are_right(sequences, device):
    found = trials.separate(CASE, device, 1, 0, projections="F.linear", dependent=True)
    check_trial(found)
    assert found.facts()["kernels"] == 9 + 3  # of a layer; norm, head and argmax


@pytest.mark.parametrize("name", [variants.OURS, variants.CUBLAS])
def test_several_sequences_are_timed_and_right(name, sequences, device):
    found = trial(name, device, BATCH)
    assert len(found.calls) == 2
    check_trial(found)
    facts = found.facts()
    assert facts["right"] == facts["checked"] == BATCH["batch"] * trials.CHECKED_TINY


def test_replayed_kernels_are_right(device):
    check_trial(trials.replayed(CASE, device, 1, 0))


def test_without_waits_the_same_records_run(sequences, device):
    found = trials.unordered(CASE, device, 1, 0)
    assert found.check is None
    (record,) = {call.args["records"] for call in found.calls[1:]}
    ordered = trials.prepared(CASE, device, 0, variants.GRAPH).launched.args["records"]
    changed = (record != ordered).any(0).nonzero().flatten().tolist()
    assert changed == [tables.TARGET]
    for call in found.calls:
        call()


def test_one_position_is_shown_but_not_judged(sequences, device):
    found = trial(variants.ONE_POSITION, device)
    for call in found.calls:  # as all processes but the first: timed before it is checked, of the same position
        call()
    assert set(found.check()) == {"logits"}
    first, second = found.facts()["errors"]
    assert first < 1e-5
    assert second > 1e-2


def test_tables_that_stay_as_they_were_are_noticed(monkeypatch, device):
    monkeypatch.setattr(ways.WordsByKernel, "copy", lambda self, position: None)
    found = trial(variants.BY_KERNEL, device)
    assert found.check()["logits"] > found.tolerance["logits"]
