"""The table-driven decoder against the reference, one program: tokens, logits, every way of the position, failures."""

import dataclasses
import os
import re

import pytest
import torch

from labkit.kernels.decoder import reference, tables
from labkit.kernels.decoder.decode import prepare
from labkit.kernels.decoder.model import Decoder, random_weights
from labkit.kernels.decoder.step import Choice, allocate, generate, generate_each, step, upload
from labkit.kernels.decoder.tables import Lowering, lower, lower_slowly, position_words
from labkit.kernels.decoder.validate import validate

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TINY = Decoder("tiny", hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61)
SMALL = Decoder("small", hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=24, vocab=61)
CHOICE = Choice(block_k=64, block_t=16, num_warps=1)
MARGIN = 1e-4  # of the float64 reference: below it, float32 may choose otherwise


def machine(model=TINY, programs=1, seed=0, dtype=torch.float32, device="cpu", **more):
    """Weights, memory and validated tables."""
    how = Lowering(model, programs, **{"cache": 80, "position": 0, "rows": 64, "itemsize": dtype.itemsize} | more)
    weights = random_weights(model, seed, dtype)
    memory = allocate(how, weights, device)
    found = lower(how, memory.addresses())
    validate(found, memory.extents())
    return weights, memory, found


def launched(memory, found, choice=CHOICE):
    """Position as a launch argument: the tables are those of any position."""
    on = upload(found, memory.counters.device)
    return lambda position: step(memory, on, position, choice=choice)


def patched(memory, found):
    """Position in the records: patched on the host, uploaded."""

    def launch_at(position):
        found.records.reshape(-1)[position_words(found)] = position
        return step(memory, upload(found, memory.counters.device), position_from="record", choice=CHOICE)

    return launch_at


def rebuilt(memory, found):
    """Position in the records: everything built anew."""

    def launch_at(position):
        how = dataclasses.replace(memory.how, position=position)
        anew = lower_slowly(how, memory.addresses())
        return step(memory, upload(anew, memory.counters.device), position_from="record", choice=CHOICE)

    return launch_at


def advancing(memory, found):
    """Position on the device, advanced by the kernel: one launch, made again and again."""
    launch = step(memory, upload(found, memory.counters.device), position_from="device", choice=CHOICE)
    return lambda position: launch


def replayed(memory, found):
    """What was published: the tables of one position, whatever the position is."""
    launch = step(memory, upload(found, memory.counters.device), position_from="record", choice=CHOICE)
    return lambda position: launch


def prompt_of(length, vocab=61):
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def expected_of(model, weights, prompt, count, margin=MARGIN):
    expected = reference.generate(model, weights, prompt, count)
    assert min(expected.margins) > margin  # else the test's model is a bad one
    return expected


# In the interpreter a token takes a third of a second: those of a block of the cache and the next one's first once, of
# a smaller model, fewer for the rest.
@pytest.mark.parametrize(
    ("way", "model", "length", "count"),
    [
        (launched, SMALL, 3, 15), (launched, TINY, 4, 2), (patched, TINY, 2, 2), (rebuilt, TINY, 2, 2),
        (advancing, TINY, 2, 2),
    ],
)  # fmt: skip
def test_tokens_are_those_of_the_reference(way, model, length, count, device):
    weights, memory, found = machine(model, device=device)
    prompt, count = prompt_of(length), 64 if device == "cuda" else count
    expected = expected_of(model, weights, prompt, count)
    assert generate(memory, way(memory, found), prompt, count) == expected.tokens
    logits = memory.buffers["logits"][0].double().cpu()
    torch.testing.assert_close(logits, expected.logits[-1], rtol=1e-5, atol=1e-5)
    assert memory.buffers["tokens"][0, length : length + count].tolist() == expected.tokens
    assert not memory.counters.any()


def test_one_position_replayed_is_wrong_from_the_second_token_on(device):
    weights, memory, found = machine(device=device)
    expected = expected_of(TINY, weights, [5], 2)
    tokens = generate(memory, replayed(memory, found), [5], 2)
    assert tokens[0] == expected.tokens[0]
    assert tokens[1] != expected.tokens[1]


def test_a_start_in_a_cache_that_is_already_filled(device):
    """Not from position 0: keys and values of the prompt come from the reference."""
    weights, memory, found = machine(device=device)
    prompt = prompt_of(12)
    cache = reference.new_cache(TINY, 80)
    for position, token in enumerate(prompt[:-1]):
        reference.step(TINY, weights, cache, token, position)
    for i in range(TINY.layers):
        memory.buffers[f"k_cache.{i}"].copy_(cache.k[i].flatten(0, 1))
        memory.buffers[f"v_cache.{i}"].copy_(cache.v[i].flatten(0, 1))
    found = generate(memory, launched(memory, found), prompt[-1:], 2, start=11)
    assert found == expected_of(TINY, weights, prompt, 2).tokens


MODELS = {
    "tied": Decoder("m", 32, 1, 4, 2, 8, 48, 61, tied=True),
    "one head": Decoder("m", 16, 1, 1, 1, 16, 20, 33),
    "no groups": Decoder("m", 24, 1, 3, 3, 8, 30, 50, theta=500.0, eps=1e-5),
    "groups of 4": Decoder("m", 40, 1, 8, 2, 4, 33, 47),
    "odd": Decoder("m", 33, 1, 2, 1, 2, 31, 7),
}


SEVERAL, ONE = Choice(32, 2, 16, 1), Choice(64, 1, 1, 1)  # tiles of K before the wait, positions at once


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("tied", SEVERAL), ("no groups", SEVERAL), ("odd", SEVERAL), ("one head", ONE), ("groups of 4", ONE),
        ("odd", ONE),
    ],
)  # fmt: skip
def test_other_models_and_choices(name, choice, device):
    model = MODELS[name]
    weights, memory, found = machine(model, rows=16, parts=2, device=device)
    prompt = prompt_of(1, model.vocab)
    expected = expected_of(model, weights, prompt, 2)
    assert generate(memory, launched(memory, found, choice), prompt, 2) == expected.tokens
    logits = memory.buffers["logits"][0].double().cpu()
    torch.testing.assert_close(logits, expected.logits[-1], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def whole():
    """A prompt, what follows it by the reference, and the caches that a step without spans leaves."""
    weights, memory, found = machine(SMALL, cache=6, device=DEVICE)
    prompt = prompt_of(2)
    expected = expected_of(SMALL, weights, prompt, 4)
    generate(memory, launched(memory, found), prompt, 4)
    return prompt, expected, memory.buffers


@pytest.mark.parametrize(("span", "block_t"), [(2, 2), (2, 8), (4, 2), (8, 2)])
def test_attention_over_spans_of_the_cache(span, block_t, whole):
    """Positions within the first span, at the edges of spans, and in the last; each span's keys appended by itself."""
    prompt, expected, buffers = whole
    choice = dataclasses.replace(CHOICE, block_t=block_t)
    _, memory, found = machine(SMALL, cache=6, span=span, device=DEVICE)
    assert found.spans == -(-6 // span)
    made, tokens = launched(memory, found, choice), prompt
    for i, start in enumerate((0, 2, 3, 4)):  # each token by itself: a wrong one may be followed by a right one
        tokens = generate(memory, made, tokens, 1, start)
        logits = memory.buffers["logits"][0].double().cpu()
        torch.testing.assert_close(logits, expected.logits[i], rtol=1e-5, atol=1e-5)
        assert tokens == expected.tokens[i : i + 1]
    for name in ("k_cache.0", "v_cache.0"):
        torch.testing.assert_close(memory.buffers[name], buffers[name], rtol=1e-5, atol=1e-6)
    assert not memory.counters.any()


GROUPED = Decoder("grouped", hidden=16, layers=1, heads=4, kv_heads=1, head_dim=32, ffn=24, vocab=61)


def attended(group, device, batch=1, dtype=torch.float16, span=4, cache=6):
    """Attention's results of the last of five tokens of each sequence, and the caches that it leaves."""
    _, memory, found = machine(GROUPED, dtype=dtype, batch=batch, group=group, span=span, cache=cache, device=device)
    assert (found.records[:, tables.OP] == tables.ATTENTION).sum() == batch * found.spans * 4 // group
    generate_each(memory, launched(memory, found), [[7 + i, 50, 3, 9] for i in range(batch)], 1)
    assert not memory.counters.any()
    return memory.buffers["attention"].clone(), memory.buffers["k_cache.0"].clone()


@pytest.mark.parametrize("batch", [1, 2])
def test_heads_that_share_a_record_are_those_that_have_one_each(batch, device):
    """Three 16-bit values are a whole float32 value: results differ by its rounding alone, over one span and two."""
    for span in (4, 8):
        (alone, keys), (together, same_keys), (pairs, _) = (attended(n, device, batch, span=span) for n in (1, 4, 2))
        assert torch.equal(keys, same_keys)
        for found in (together, pairs):
            torch.testing.assert_close(found, alone, rtol=2e-5, atol=2e-6)
    heads = together.view(batch, 4, 32)
    assert not torch.allclose(heads[:, :1], heads[:, 1:], rtol=1e-2)  # other heads, other results


@pytest.mark.parametrize(("block_t", "group"), [(16, 4), (8, 1)])
def test_a_decode_takes_several_heads_a_record_where_its_blocks_are_long_enough(block_t, group, device):
    weights = random_weights(GROUPED, 0, torch.float16)
    choice = dataclasses.replace(CHOICE, block_t=block_t)
    made = prepare(GROUPED, weights, device, cache=8, rows=64, span=4, choice=choice)
    assert made.memory.how.group == group
    assert made.generate([5], 1) == reference.generate(GROUPED, weights, [5], 1).tokens


@pytest.mark.parametrize(("model", "batch", "span", "choice"), [(SMALL, 4, 2, CHOICE), (TINY, 2, None, SEVERAL)])
def test_each_sequence_of_a_batch_is_that_of_the_reference(model, batch, span, choice, device):
    weights, memory, found = machine(model, batch=batch, span=span, parts=2, rows=16, cache=80, device=device)
    prompts, count = [[7 + i, 50 - i] for i in range(batch)], 64 if device == "cuda" else 3
    expected = [expected_of(model, weights, prompt, count) for prompt in prompts]
    tokens = generate_each(memory, launched(memory, found, choice), prompts, count)
    assert tokens == [one.tokens for one in expected]
    assert tokens[0] != tokens[1]
    logits = torch.stack([one.logits[-1] for one in expected])
    torch.testing.assert_close(memory.buffers["logits"].double().cpu(), logits, rtol=1e-5, atol=1e-5)
    assert memory.buffers["tokens"][:, 2 : 2 + count].tolist() == tokens
    assert not memory.counters.any()


def test_the_bits_of_a_sequence_do_not_depend_on_the_others(device):
    found = []
    for prompts in ([[3], [9]], [[3], [5]], [[4], [9]]):
        _, memory, found_tables = machine(SMALL, batch=2, rows=16, device=device)
        generate_each(memory, launched(memory, found_tables), prompts, 2)
        found.append(memory.buffers["logits"].clone())
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[2][1])
    assert not torch.equal(found[0][0], found[2][0])  # of another token they do


@pytest.mark.parametrize("prompts", [[[1]], [[1], [2], [3]], [[1], [2, 3]]])
def test_prompts_of_another_batch_are_named(prompts, device):
    _, memory, found = machine(SMALL, batch=2, device=device)
    with pytest.raises(ValueError, match=rf"prompts are {len(prompts)} of \[.*\] tokens; allowed: 2 of one length"):
        generate_each(memory, launched(memory, found), prompts, 1)


def test_the_bits_do_not_depend_on_how_stages_are_split(device):
    found = []
    for parts, schedule in ((1, "round-robin"), (2, "longest-first"), (5, "round-robin")):
        _, memory, found_tables = machine(SMALL, parts=parts, schedule=schedule, rows=8, device=device)
        generate(memory, launched(memory, found_tables), [3], 1)
        found.append(memory.buffers["logits"].clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights_and_caches(dtype, device):
    weights, memory, found = machine(dtype=dtype, device=device)
    prompt = prompt_of(2)
    expected = reference.generate(TINY, weights, prompt, 1)
    tokens = generate(memory, launched(memory, found), prompt, 1)
    error = (memory.buffers["logits"][0].double().cpu() - expected.logits[0]).abs().max()
    assert error < (3e-2 if dtype == torch.bfloat16 else 4e-3)  # rounding of the cache; the interpreter truncates bf16
    assert tokens == expected.tokens or expected.margins[0] < 2 * error


def test_of_equal_logits_the_first_token(device):
    weights, memory, found = machine(parts=4, device=device)
    best = reference.generate(TINY, weights, [9], 1).tokens[0]
    for other in (best - 1, 60):
        memory.buffers["head"][other] = memory.buffers["head"][best]
    assert generate(memory, launched(memory, found), [9], 1) == [best - 1]


def test_a_table_that_never_finishes_ends_with_the_records_number(device):
    weights, memory, found = machine(device=device)
    number = int((found.records[:, tables.OP] == tables.DOWN).argmax())
    found.records[number, tables.TARGET] += 1
    on = upload(found, device)
    step(memory, on, 0, choice=CHOICE, limit=100)()
    with pytest.raises(RuntimeError, match=f"record {number} waited too long"):
        memory.check()
    found.records[number, tables.TARGET] -= 1  # and all is ready for another launch
    expected = expected_of(TINY, weights, [5], 2)
    assert generate(memory, launched(memory, found), [5], 2) == expected.tokens


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"position": 80}, "position is 80; allowed: 0 to 79"),
        ({"position": None}, "position is None with position_from 'launch'"),
        ({"position_from": "record"}, "position is 1 with position_from 'record'"),
        ({"position_from": "host"}, "position_from is 'host'; allowed: record, launch, device"),
        ({"choice": Choice(block_k=48)}, "block_k is 48; allowed: a power of two"),
        ({"choice": Choice(ahead=-1)}, "ahead is -1; allowed: at least 0"),
        ({"choice": Choice(prefetch=192)}, "prefetch is 192; allowed: 0 or a power of two from 128 on"),
    ],
)
def test_what_a_step_cannot_take_is_named(more, message, device):
    _, memory, found = machine(device=device)
    with pytest.raises(ValueError, match=re.escape(message)):
        step(memory, upload(found, device), **{"position": 1} | more)


def test_what_cannot_be_allocated_is_named(device):
    with pytest.raises(ValueError, match=r"weights are torch.float32; allowed: .* of 2 bytes"):
        allocate(Lowering(TINY, 1), random_weights(TINY), device)
    odd = Decoder("m", 8, 1, 1, 1, 6, 4, 4)
    _, memory, found = machine(odd, device=device)
    with pytest.raises(ValueError, match="head_dim is 6; allowed: a power of two"):
        step(memory, upload(found, device), 0)
