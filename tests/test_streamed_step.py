"""The streamed decoder step: what it is compiled to for Hopper and what it refuses; on a GPU, tokens and bits."""

import dataclasses
import re

import compiled_once
import pytest
import torch

from labkit.kernels.decoder import reference, streamed
from labkit.kernels.decoder.decode import prepare
from labkit.kernels.decoder.model import Decoder, decoder, random_weights
from labkit.kernels.decoder.step import allocate, fresh, upload
from labkit.kernels.decoder.streamed import (
    StreamChoice,
    check_streamed,
    compilable,
    lowering,
    sizes_of,
    step,
    together,
    usual,
)
from labkit.kernels.decoder.tables import POSITION_FROM, lower
from labkit.kernels.decoder.validate import validate
from labkit.kernels.offline import offline

USUAL = StreamChoice()
LLAMA = decoder("Llama-3.2-1B")
SMALL = Decoder("small", hidden=256, layers=2, heads=8, kv_heads=2, head_dim=32, ffn=1024, vocab=4096)
WIDE = Decoder("wide", hidden=1024, layers=3, heads=16, kv_heads=4, head_dim=64, ffn=4096, vocab=8000)


@pytest.mark.parametrize(
    ("batch", "position_from"), [*((1, one) for one in POSITION_FROM), (2, "device"), (4, "device")]
)
def test_hardly_anything_is_spilled_and_a_program_has_a_multiprocessor(batch, position_from):
    with offline(90):
        found = compiled_once.evidence(compilable("Llama-3.2-1B", position_from=position_from, batch=batch), 90)
    assert found["spill_bytes"] <= 16
    assert usual(batch).stages * 32 << 10 <= found["shared_bytes"] <= 227 << 10


def test_more_sequences_have_fewer_spans_and_more_heads_a_record():
    found = [lowering(LLAMA, 132, batch=batch) for batch in (1, 2, 4)]
    assert [(how.group, how.spans, how.groups * how.spans) for how in found] == [(2, 8, 128), (2, 4, 128), (4, 4, 128)]
    assert lowering(LLAMA, 132, cache=4096, batch=4).spans == 8  # none is longer than what it can take
    assert lowering(SMALL, 32, cache=64, batch=4).spans == 2  # of whole blocks


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": dataclasses.replace(LLAMA, ffn=4096)}, "ffn is 4096; allowed: 8192"),
        ({"model": dataclasses.replace(LLAMA, heads=16)}, "values of all query heads is 1024; allowed: 2048"),
        ({"model": decoder("AutoMegaKernel h1024")}, "ffn is 2816; allowed: 4096"),
        ({"programs": 257}, "programs is 257; allowed: at most 256, the records of the projection with 2048 rows"),
        ({"batch": 3}, "batch is 3; allowed: 1, 2, 4"),
        ({"batch": 4}, "warps is 4; allowed: 8"),
        ({"rows": 4}, "rows is 4; allowed: 8"),
        ({"schedule": "longest-first"}, "schedule is 'longest-first'; allowed: 'round-robin'"),
        ({"span": 24}, "span is 24; allowed: a multiple of 32 up to 512"),
        ({"span": 480}, "spans are 5, of 480 positions; allowed: a power of two"),
        ({"span": 544}, "span is 544; allowed: a multiple of 32 up to 512"),
        ({"group": 1}, "group is 1; allowed: 2, 4"),
    ],
)
def test_tables_that_it_cannot_take_are_named(changed, message):
    how = dataclasses.replace(lowering(LLAMA, 132), **changed)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_streamed(how, torch.bfloat16, StreamChoice())


def test_choices_and_devices_that_it_cannot_take_are_named():
    how = lowering(LLAMA, 132)
    check_streamed(how, torch.float16, StreamChoice())
    for choice, message in (
        (StreamChoice(stages=8), "stages is 8; allowed: 2 to 7"),
        (StreamChoice(flight=7), "flight is 7; allowed: 1 to 6"),
        (StreamChoice(stages=7, warps=8), "stages is 7; allowed: 2 to 6"),
        (StreamChoice(warps=2), "warps is 2; allowed: 4, 8"),
        (StreamChoice(block_t=64), "block_t is 64; allowed: 16, 32"),
        (StreamChoice(block_t=0), "block_t is 0; allowed: 16, 32"),
    ):
        with pytest.raises(ValueError, match=message):
            check_streamed(how, torch.bfloat16, choice)
    with pytest.raises(ValueError, match="head_dim is 32; allowed: 64, 128"):
        check_streamed(lowering(SMALL, 32), torch.bfloat16, usual(4))
    with pytest.raises(ValueError, match=r"dtype is torch\.float32; allowed"):
        check_streamed(how, torch.float32, StreamChoice())
    with offline(80), pytest.raises(ValueError, match=r"memory is on compute capability 8\.0; allowed"):
        compilable("Llama-3.2-1B")
    weights = random_weights(SMALL, 0, torch.bfloat16)
    with pytest.raises(ValueError, match="device is on cpu; allowed"):
        prepare(SMALL, weights, "cpu", choice=StreamChoice())
    for given in ({"rows": 8}, {"span": 64}, {"group": 2}):
        [(name, value)] = given.items()
        with pytest.raises(ValueError, match=f"{name} is {value}; allowed with a StreamChoice: "):
            prepare(SMALL, weights, "cpu", choice=StreamChoice(), **given)


def test_matrices_lie_together_once_and_every_place_is_blank():
    how = lowering(SMALL, 32, cache=64)
    memory = allocate(how, random_weights(SMALL, 0, torch.bfloat16))
    one = together(memory)
    for name, tensor in memory.buffers.items():
        assert torch.equal(one.buffers[name].nan_to_num(7), tensor.nan_to_num(7))
    matrix = one.matrix()
    at = 0
    for name in streamed._matrices(how):
        rows = one.buffers[name].view(-1, SMALL.hidden)
        assert torch.equal(matrix[at : at + len(rows)], rows)
        at += len(rows)
    assert at == len(matrix)
    again = together(fresh(one, how))
    assert again.matrix().data_ptr() == matrix.data_ptr()  # not copied again
    assert one.results.shape == (2, sum(sizes_of(how)))
    assert (one.results.view(torch.int32) == -1).all()
    one.results.fill_(1.0)
    one.error.fill_(5)
    with pytest.raises(RuntimeError, match="record 4 waited too long"):
        one.check()
    assert (one.results.view(torch.int32) == -1).all()


def machine(model, programs=32, cache=64, dtype=torch.bfloat16, seed=0, batch=1, **changed):
    """Weights, memory, tables on the GPU."""
    weights = random_weights(model, seed, dtype, "cuda")
    how = dataclasses.replace(lowering(model, programs, cache, dtype.itemsize, batch), **changed)
    memory = together(allocate(how, weights, "cuda"))
    tables = lower(how, memory.addresses())
    validate(tables, memory.extents(), position=0)
    return weights, memory, tables


def stepping(memory, tables, choice=USUAL, **more):
    """The launch of a position, which it says itself."""
    on = upload(tables, "cuda")
    return lambda at: step(memory, on, at, choice=choice, **more)


def random_caches(memory):
    """The same keys and values in every memory."""
    for name, tensor in memory.buffers.items():
        if "cache" in name:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))


def decoded(memory, launch_at, prompt, count, start=0):
    """Tokens of the first sequence, and the logits of every step."""
    token, tokens, logits = memory.buffers["token"], [], []
    for i in range(len(prompt) + count - 1):
        if i < len(prompt):
            token.fill_(prompt[i])
        launch_at(start + i)()
        tokens.append(int(token[0]))
        logits.append(memory.buffers["logits"].clone())
    memory.check()
    return tokens[len(prompt) - 1 :], torch.cat(logits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", [SMALL, WIDE])
def test_tokens_are_the_references_with_the_position_from_anywhere(model, dtype):
    weights, memory, tables = machine(model, dtype=dtype)
    on, prompt, count = upload(tables, "cuda"), [5, 9, 61], 40
    wanted = reference.generate(model, weights, prompt, count)
    found, logits = decoded(memory, lambda at: step(memory, on, at), prompt, count)
    equal = next((i for i in range(count) if found[i] != wanted.tokens[i]), count)
    assert equal == count or wanted.margins[equal] < 0.05  # a tie
    error = (logits[len(prompt) - 1].double() - wanted.logits[0]).norm() / wanted.logits[0].norm()
    assert error < 5e-3
    memory.position.zero_()
    launch = step(memory, on, None, "device")
    same, bits = decoded(memory, lambda at: launch, prompt, count)
    assert same == found
    assert torch.equal(bits, logits)
    assert int(memory.position) == len(prompt) + count - 1

    def patched(at):
        records = lower(dataclasses.replace(memory.how, position=at), memory.addresses())
        return step(memory, upload(records, "cuda"), None, "record")

    same, bits = decoded(memory, patched, prompt, count)
    assert same == found
    assert torch.equal(bits, logits)


@pytest.mark.gpu
def test_bits_do_not_depend_on_programs_ring_or_what_was_before_but_on_spans():
    """Twenty times; contexts that become shorter leave spans without a result, whose places must be blank again."""
    found = []
    for programs, choice in (
        (32, StreamChoice()),
        (7, StreamChoice()),
        (32, StreamChoice(3, 2)),
        (32, StreamChoice(4)),
    ):
        _, memory, tables = machine(SMALL, programs)
        launch_at = stepping(memory, tables, choice)
        for _ in range(20):
            random_caches(memory)
            found.append(torch.cat([decoded(memory, launch_at, [9], 1, at)[1] for at in (60, 3, 61, 40)]))
    assert all(torch.equal(found[0], one) for one in found)
    _, memory, tables = machine(SMALL, span=64)
    random_caches(memory)
    other = decoded(memory, stepping(memory, tables), [9], 1, 60)[1]
    assert not torch.equal(other, found[0][:1])
    torch.testing.assert_close(other, found[0][:1], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_step_that_gives_up_says_so_and_the_next_one_is_right():
    _, memory, tables = machine(WIDE)
    expected = decoded(memory, stepping(memory, tables), [5], 4)
    with pytest.raises(RuntimeError, match="waited too long"):
        decoded(memory, stepping(memory, tables, limit=0), [5], 4)
    again = decoded(memory, stepping(memory, tables), [5], 4)
    assert again[0] == expected[0]
    assert torch.equal(again[1], expected[1])


@pytest.mark.gpu
def test_a_decode_of_llamas_shape_streams_by_itself():
    model = dataclasses.replace(LLAMA, layers=2, vocab=32000)
    weights = random_weights(model, 0, torch.bfloat16, "cuda")
    made = prepare(model, weights, "cuda")
    assert made.choice == USUAL
    wanted = reference.generate(model, weights, [3, 8], 16)
    found = made.generate([3, 8], 16)
    equal = next((i for i in range(16) if found[i] != wanted.tokens[i]), 16)
    assert equal == 16 or wanted.margins[equal] < 0.1
    assert not isinstance(prepare(model, weights, "cuda", batch=3).choice, StreamChoice)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [2, 4])
def test_every_sequence_has_the_references_tokens(batch):
    model = dataclasses.replace(LLAMA, layers=2, vocab=32000)
    weights = random_weights(model, 0, torch.bfloat16, "cuda")
    made = prepare(model, weights, "cuda", batch=batch)
    assert made.choice == usual(batch)
    prompts = [[3 + 7 * i, 8] for i in range(batch)]
    caches = [reference.new_cache(model, 64, device="cuda") for _ in prompts]
    wanted = reference.generate_each(model, weights, prompts, 16, caches)
    for found, one in zip(made.generate_each(prompts, 16), wanted, strict=True):
        equal = next((i for i in range(16) if found[i] != one.tokens[i]), 16)
        assert equal == 16 or one.margins[equal] < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "batch", "choice"), [(WIDE, 4, StreamChoice(6, warps=8)), (SMALL, 2, USUAL)])
def test_bits_of_a_sequence_do_not_depend_on_the_others(model, batch, choice):
    """Nor on programs and ring, ten times each; the first sequence's do depend on its own token."""

    def logits(tokens, programs=32, choice=choice):
        _, memory, tables = machine(model, programs, batch=batch)
        random_caches(memory)
        launch_at, found = stepping(memory, tables, choice), []
        for at in (60, 3, 61, 40):
            memory.buffers["token"].copy_(torch.tensor(tokens[:batch]).view(-1, 1))
            launch_at(at)()
            found.append(memory.buffers["logits"].clone())
        memory.check()
        return torch.stack(found)

    first = logits([9, 2, 3, 4])
    for _ in range(10):
        assert torch.equal(logits([9, 2, 3, 4]), first)
        assert torch.equal(logits([9, 2, 3, 4], 7), first)
        assert torch.equal(logits([9, 2, 3, 4], choice=dataclasses.replace(choice, stages=3)), first)
    others = logits([9, 7, 8, 5])
    assert torch.equal(others[:, 0], first[:, 0])
    assert not torch.equal(others[:, 1], first[:, 1])
