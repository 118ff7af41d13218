"""The ways of keeping the tables, and the baseline, against the reference decoder: tokens from several positions."""

import functools

import pytest
import torch

from labkit.persistent_tables import baseline, kernels, names, reference, ways
from labkit.persistent_tables.baseline import Baseline
from labkit.persistent_tables.kernels import Choice, allocate
from labkit.persistent_tables.model import Decoder, random_weights
from labkit.persistent_tables.tables import Lowering

SMALL = Decoder("small", hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=24, vocab=61)
TINY = Decoder("tiny", hidden=32, layers=2, heads=6, kv_heads=2, head_dim=8, ffn=48, vocab=61)
CHOICE = Choice(block_k=64, block_t=16, num_warps=1)
MARGIN = 1e-4  # of the float64 reference: below it, float32 may choose otherwise
STARTS = (0, 9)  # the second one's tokens cross a block of the cache
COUNT = 8


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


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ways.VALID)
def test_tokens_of_every_valid_way(name, start, device):
    memory, token, expected = memory_of(SMALL, start, device)
    way = ways.prepare(name, memory, choice=CHOICE)
    assert ways.generate(way, token, COUNT, start) == expected.tokens
    assert memory.buffers["tokens"][0, start + 1 : start + 1 + COUNT].tolist() == expected.tokens
    logits = memory.buffers["logits"][0].double().cpu()
    torch.testing.assert_close(logits, expected.logits[-1], rtol=1e-5, atol=1e-5)


def test_a_way_begins_again_elsewhere(device):
    """One way, prepared once: the same sequence twice, then another one."""
    for name in ("4 pinned, double-buffered", "9 CUDA graph, position on the GPU"):
        memory, token, expected = memory_of(SMALL, 9, device)
        way = ways.prepare(name, memory, choice=CHOICE)
        for _ in range(2):
            assert ways.generate(way, token, 3, 9) == expected.tokens[:3]
        _, _, token, expected = sequence(SMALL, 0)
        assert ways.generate(way, token, 3) == expected.tokens[:3]


@pytest.mark.parametrize("start", STARTS)
def test_one_position_replayed_is_wrong_from_the_second_on(start, device):
    """The control: the published way. Its first token is right; then keys and values go where the first ones went."""
    memory, token, expected = memory_of(SMALL, start, device)
    way = ways.prepare(names.ONE_POSITION, memory, choice=CHOICE)
    for count, right in ((1, True), (2, False)):
        tokens = ways.generate(way, token, count, start)
        error = (memory.buffers["logits"][0].double().cpu() - expected.logits[count - 1]).abs().max()
        assert error < 1e-5 if right else error > 1e-2
    assert tokens[0] == expected.tokens[0]
    assert not memory.buffers["k_cache.0"][start + 1 :].any()
    assert ways.generate(way, token, COUNT, start) != expected.tokens


def test_tables_left_as_they_were_are_seen(device, monkeypatch):
    """The control of the ways that patch: without the patch they are the fifth."""
    monkeypatch.setattr(ways.WordsByKernel, "copy", lambda self, position: None)
    memory, token, expected = memory_of(SMALL, 9, device)
    way = ways.prepare("7 words by a kernel", memory, choice=CHOICE)
    assert ways.generate(way, token, 2, 9) != expected.tokens[:2]


def test_a_kernel_patches_the_words_that_it_is_given(device):
    records = torch.full((7, 100), -3, dtype=torch.int32, device=device)
    words = torch.arange(1, 700, 2, dtype=torch.int32, device=device)  # two programs, the second one in part
    ways.patch(records, words, 12)()
    expected = torch.full((700,), -3, dtype=torch.int32)
    expected[1::2] = 12
    assert torch.equal(records.view(-1).cpu(), expected)


# The baseline


@pytest.mark.parametrize(
    ("projections", "model", "start", "splits", "count"),
    [
        ("F.linear", SMALL, 0, 1, COUNT), ("F.linear", SMALL, 9, 4, COUNT), ("F.linear", TINY, 0, 2, COUNT),
        ("F.linear", TINY, 9, 8, COUNT), ("gemv", SMALL, 9, 2, COUNT), ("gemv", TINY, 0, 4, 1),  # slow interpreted
    ],
)  # fmt: skip
def test_tokens_of_the_baseline(projections, model, start, splits, count, device):
    memory, token, expected = memory_of(model, start, device)
    found = Baseline(memory, projections, splits=splits, block_t=4)
    assert ways.generate(found, token, count, start) == expected.tokens[:count]
    assert memory.buffers["tokens"][0, start + 1 : start + 1 + count].tolist() == expected.tokens[:count]
    torch.testing.assert_close(found.logits.double().cpu(), expected.logits[count - 1], rtol=1e-5, atol=1e-5)
    assert not found.arrived.any()


def test_the_baseline_and_the_tables_fill_the_same_cache(device):
    caches = []
    for make in (lambda m: Baseline(m, "F.linear"), lambda m: ways.prepare(ways.VALID[-1], m, choice=CHOICE)):
        memory, token, expected = memory_of(TINY, 9, device)
        assert ways.generate(make(memory), token, 3, 9) == expected.tokens[:3]
        caches.append([memory.buffers[f"{x}_cache.{i}"] for x in "kv" for i in range(TINY.layers)])
    for one, other in zip(*caches, strict=True):
        assert one[9].any()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("projections", baseline.PROJECTIONS)
def test_the_baseline_in_16_bits(projections, device):
    memory, token, expected = memory_of(TINY, 9, device, torch.bfloat16)
    found = Baseline(memory, projections)
    tokens = ways.generate(found, token, 1, 9)
    error = (found.logits.double().cpu() - expected.logits[0]).abs().max()
    assert error < 6e-2  # activations are rounded from kernel to kernel; the interpreter truncates bf16
    assert tokens == expected.tokens[:1] or expected.margins[0] < 2 * error


def test_every_position_of_the_context_matters(device):
    """The control: what any part of the context lacks is seen in the logits."""
    memory, token, expected = memory_of(TINY, 9, device)
    found = Baseline(memory, "F.linear", splits=4, block_t=4, graph=False)
    for position in range(9):  # in each part that has positions
        kept = memory.buffers["v_cache.0"].view(2, 32, -1)[:, position].clone()
        memory.buffers["v_cache.0"].view(2, 32, -1)[:, position] = 0
        ways.generate(found, token, 1, 9)
        assert (found.logits.double().cpu() - expected.logits[0]).abs().max() > 1e-3
        memory.buffers["v_cache.0"].view(2, 32, -1)[:, position] = kept


def test_scores_whose_exponential_is_no_number(device):
    weights = dict(random_weights(SMALL))
    weights["model.layers.0.self_attn.q_proj.weight"] = 300 * weights["model.layers.0.self_attn.q_proj.weight"]
    expected = reference.generate(SMALL, weights, [5, 1, 60], 4)
    memory = allocate(Lowering(SMALL, 1, cache=32, rows=64, itemsize=4), weights, device)
    found = Baseline(memory, "F.linear", splits=2, block_t=4)
    ways.generate(found, [5, 1, 60], 4)
    torch.testing.assert_close(found.logits.double().cpu(), expected.logits[-1], rtol=1e-3, atol=1e-3)


def test_of_equal_logits_the_baseline_takes_the_first(device, monkeypatch):
    monkeypatch.setattr(baseline, "ARGMAX_BLOCK", 16)  # parts of the vocabulary that must be compared
    memory, token, expected = memory_of(SMALL, 0, device)
    best = expected.tokens[0]
    for other in (best - 1, 60):
        memory.buffers["head"][other] = memory.buffers["head"][best]
    assert ways.generate(Baseline(memory, "F.linear"), token, 1) == [best - 1]


def test_a_launch_by_launch_baseline_is_the_graphs(device):
    tokens = []
    for graph in (False, True):
        memory, token, _ = memory_of(SMALL, 9, device)
        tokens.append(ways.generate(Baseline(memory, "F.linear", graph=graph), token, 3, 9))
    assert tokens[0] == tokens[1]


def test_generation_by_a_way_is_that_by_launches(device):
    """`ways.generate` adds nothing but the beginning."""
    memory, token, expected = memory_of(SMALL, 9, device)
    way = ways.prepare("8 position in the launch", memory, choice=CHOICE)
    tokens = kernels.generate(memory, lambda p: functools.partial(way.step, p), token, 2, 9)
    assert tokens == expected.tokens[:2]
