"""Ways of keeping the tables: what they build and copy, by hand; what changes; what the kernels compile to."""

import dataclasses
import functools

import compiled_once
import numpy as np
import pytest
import torch
from decoding import VALID, generate

from labkit.evidence import compiled
from labkit.kernels.decoder import reference, step, tables
from labkit.kernels.decoder.model import MODELS, Decoder, random_weights
from labkit.kernels.decoder.tables import Change, Lowering, changes, changes_of_a_token, lower, lower_slowly
from labkit.kernels.decoder.validate import TableError
from labkit.kernels.gemv import gemv
from labkit.studies.persistent_tables import baseline, variants, ways
from labkit.studies.persistent_tables.baseline import Baseline
from labkit.studies.persistent_tables.peers import linear as cublas
from labkit.studies.persistent_tables.ways import Traffic, traffic

TINY = Decoder("tiny", hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61)
LLAMA = "Llama-3.2-1B"
HOW = Lowering(TINY, 3, cache=16, itemsize=4)
WORDS = 2 * 4 + 1  # attention of every layer and head, argmax
BUFFERS, RECORDS, QUEUE = 30 * 4 * 8, 37 * 16 * 4, 4 * 4  # bytes of the tables of HOW, counted in test_what_is_counted


def memory_of(how=HOW, device="cpu"):
    return step.allocate(how, random_weights(how.model), device)


# What changes from one token to the next


def test_the_words_that_change_by_field():
    assert changes_of_a_token(HOW) == [
        Change("records", "position", "attention", 8, 32),
        Change("records", "position", "argmax", 1, 4),
    ]
    assert sum(change.words for change in changes_of_a_token(HOW, 9)) == WORDS


def test_no_word_changes_where_the_launch_says_the_position():
    assert changes_of_a_token(dataclasses.replace(HOW, position=None)) == []


@pytest.mark.parametrize(("name", "words"), [("AutoMegaKernel h1024", 65), (LLAMA, 513)])
def test_the_words_that_change_of_real_models(name, words):
    how = Lowering(MODELS[name], 132)
    assert sum(change.words for change in changes_of_a_token(how)) == words
    assert tables.counts(lower(how))["changed_words"] == words


def test_changes_of_every_table_are_found():
    before, after = lower(HOW), lower(HOW)
    after.buffers[3, tables.ADDRESS] += 16
    after.queue[1] += 1
    assert changes(before, after) == [Change("buffers", "address", "", 1, 8), Change("queue", "first", "", 1, 4)]
    with pytest.raises(ValueError, match=r"records is \(37, 16\) before and \(.*, 16\) after; allowed: one shape"):
        changes(before, lower(dataclasses.replace(HOW, programs=5)))
    with pytest.raises(ValueError, match="position is 16; allowed: 0 to 15"):
        changes_of_a_token(HOW, 15)


# Bytes and copies of a token, by hand

ALL = BUFFERS + RECORDS + QUEUE
PIECES = 15 * 64 + RECORDS + 64  # each table up to a multiple of 64 bytes: the buffers' 960, the queue's 16
BY_HAND = {
    "1 rebuilt in Python, pageable": Traffic(ALL, 3),
    "1 rebuilt in Python, pageable: buffers alone": Traffic(BUFFERS, 1),
    "1 rebuilt in Python, pageable: records alone": Traffic(RECORDS, 1),
    "1 rebuilt in Python, pageable: queue alone": Traffic(QUEUE, 1),
    "2 rebuilt vectorised, pageable": Traffic(ALL, 3),
    "3 prebuilt, pageable": Traffic(ALL, 3),
    "3 prebuilt, pageable: buffers alone": Traffic(BUFFERS, 1),
    "3 prebuilt, pageable: records alone": Traffic(RECORDS, 1),
    "3 prebuilt, pageable: queue alone": Traffic(QUEUE, 1),
    "4 pinned, double-buffered": Traffic(PIECES, 1),
    "5 one position replayed": Traffic(0, 0),
    "6 words from the host, one by one": Traffic(4 * WORDS, WORDS),
    "6 words from the host, packed": Traffic(4 * WORDS, 1, kernels=2),
    "7 words by a kernel": Traffic(0, 0, kernels=2),
    "8 position in the launch": Traffic(0, 0),
    "9 CUDA graph, position on the GPU": Traffic(0, 0),
}


def test_bytes_and_copies_by_hand():
    assert {name: traffic(name, lower(HOW)) for name in ways.WAYS} == BY_HAND
    assert lower(HOW).nbytes == ALL


@pytest.fixture
def copied(monkeypatch):
    """Bytes of every copy to the device."""
    found = []
    pageable, send = ways._pageable, ways._send

    def counted_pageable(array, device):
        found.append(array.nbytes)
        return pageable(array, device)

    def counted_send(to, source):
        found.append(to.nbytes)
        send(to, source)

    monkeypatch.setattr(ways, "_pageable", counted_pageable)
    monkeypatch.setattr(ways, "_send", counted_send)
    return found


@pytest.mark.parametrize("name", [name for name in ways.WAYS if not name.startswith("7")])  # whose copy is a kernel
def test_a_token_copies_what_was_counted_and_makes_the_tables_of_its_position(name, copied):
    memory = memory_of()
    way = ways.prepare(name, memory)
    way.begin(2)
    for position in (2, 3, 4, 5):
        copied.clear()
        way.build(position)
        way.copy(position)
        assert (sum(copied), len(copied)) == BY_HAND[name][:2]
        launched = way.launches[way.turn] if name.startswith("4") else way.launched
        expected = lower(dataclasses.replace(way.how, position=position), memory.addresses())
        for table in ("buffers", "queue"):
            assert np.array_equal(launched.args[table], getattr(expected, table)), table
        if way.position_from == "record":
            right = position == 2 or name != variants.ONE_POSITION
            assert np.array_equal(launched.args["records"], expected.records) == right


@pytest.mark.parametrize("schedule", tables.SCHEDULES)
@pytest.mark.parametrize("table", ways.TABLES)
def test_one_table_alone_is_built_as_all_of_them(table, schedule):
    how = dataclasses.replace(HOW, schedule=schedule)
    memory = memory_of(how)
    way = ways.prepare(f"1 rebuilt in Python, pageable: {table} alone", memory)
    way.build(7)
    position = 7 if table == "records" else None
    expected = lower_slowly(dataclasses.replace(how, position=position), memory.addresses())
    assert list(way.host) == [table]
    assert np.array_equal(way.host[table], getattr(expected, table))
    assert way.host[table].dtype == getattr(expected, table).dtype


def test_the_two_pieces_of_pinned_memory_take_turns():
    way = ways.prepare("4 pinned, double-buffered", memory_of())
    used = []
    for position in range(4):
        way.build(position)
        way.copy(position)
        used.append(way.slots[way.turn].device.data_ptr())
    assert used == [used[0], used[1]] * 2
    assert used[0] != used[1]
    held = [launch.args["records"][:, tables.POSITION].max() for launch in way.launches]
    assert sorted(map(int, held)) == [2, 3]  # the piece of the token before is left alone


# What is refused


@pytest.mark.parametrize("name", ways.WAYS)
def test_a_position_past_the_cache_is_refused_before_anything_is_done(name, copied):
    way = ways.prepare(name, memory_of())
    way.build = way.copy = way.launch = None
    for call in (way.step, way.begin):
        with pytest.raises(ValueError, match="position is 16; allowed: 0 to 15"):
            call(16)
    assert not copied


def test_a_position_that_does_not_follow_is_refused():
    memory = memory_of()
    for one in (ways.prepare("9 CUDA graph, position on the GPU", memory), Baseline(memory, cublas)):
        one.begin(4)
        assert int(memory.position) == 4
        with pytest.raises(ValueError, match="position is 6; allowed: 4, the device's, or `begin` at another"):
            one.step(6)


def test_an_unknown_way_or_table_is_named():
    with pytest.raises(ValueError, match="way is 'quick'; allowed: 1 rebuilt in Python, pageable, "):
        ways.prepare("quick", memory_of())
    with pytest.raises(ValueError, match="way is 'quick'"):
        traffic("quick", lower(HOW))
    with pytest.raises(ValueError, match=r"which is \('weights',\); allowed: \('buffers', 'records', 'queue'\)"):
        ways.Prebuilt(memory_of(), step.step, ("weights",))


def test_malformed_tables_are_refused_when_a_way_is_prepared(monkeypatch):
    memory = memory_of()
    broken = lower(HOW, memory.addresses())
    broken.records[3, tables.OP] = 12
    monkeypatch.setattr(ways, "lower", lambda how, addresses: broken)
    with pytest.raises(TableError, match="record 3: op is 12"):
        ways.prepare("8 position in the launch", memory)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"splits": 3}, "splits is 3; allowed: a power of two"),
        ({"block_t": 0, "splits": 1}, "block_t is 0; allowed: a power of two"),
        ({"dependent": True}, "dependent is True; allowed: False, or a GPU of compute capability 9.0"),
    ],
)
def test_what_the_baseline_cannot_take_is_named(more, message):
    with pytest.raises(ValueError, match=message):
        Baseline(memory_of(), cublas, **more)


def test_an_unknown_kernel_is_named():
    with pytest.raises(ValueError, match="kernel is 'softmax'; allowed: norm, rotary, attention, silu, argmax"):
        baseline.compilable(LLAMA, "softmax")


def test_parts_of_the_context():
    cpu = torch.device("cpu")  # counted as an H100's 132 multiprocessors
    llama = Lowering(MODELS[LLAMA], 1, cache=2048)
    assert (baseline.default_block_t(llama), baseline.default_splits(llama, cpu)) == (64, 16)
    assert baseline.default_splits(dataclasses.replace(llama, cache=300), cpu) == 4
    assert (baseline.default_block_t(HOW), baseline.default_splits(HOW, cpu)) == (16, 1)


def test_kernels_of_a_token_of_the_baseline():
    variants = [name for name, _ in Baseline(memory_of(), cublas).calls]
    layer = ["norm", "projection", "rotary", "attention", "projection", "norm", "projection", "silu", "projection"]
    assert variants == 2 * layer + ["norm", "projection", "argmax"]


# What the kernels compile to, and the ways on a GPU


@functools.cache
def launch_of(kernel, dependent):
    """Of another model with dependent launch than without."""
    model = "AutoMegaKernel h2048" if dependent else LLAMA
    of = "labkit.studies.persistent_tables.baseline:compilable"
    return compiled.launch_of((of, {"model": model, "kernel": kernel, "dependent": dependent}), 90)


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("kernel", baseline.KERNELS)
def test_compiled_for_hopper(kernel, dependent):
    """Nothing is spilled; caches are read 16 bytes a thread; a dependent kernel starts the next and waits."""
    launch = launch_of(kernel, dependent)
    found = compiled_once.evidence(launch, 90)
    assert found["spill_bytes"] == 0
    assert found["ctas_per_sm"] >= 1
    if kernel == "attention":
        assert found["loads"]["128"] >= 4  # a block's keys and values, two loads a thread of each
    ptx = compiled.build(launch, 90).asm["ptx"]
    assert ("griddepcontrol.wait" in ptx, "griddepcontrol.launch_dependents" in ptx) == (dependent, dependent)


def test_the_patching_kernel_spills_nothing():
    assert compiled_once.evidence(ways.compilable(), 90)["spill_bytes"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [7, 64])
@pytest.mark.parametrize("name", VALID)
def test_many_programs(name, programs):
    how = Lowering(TINY, programs, cache=80, itemsize=4)
    memory = memory_of(how, "cuda")
    way = ways.prepare(name, memory, choice=step.Choice(64, 1, 16, 1))
    expected = reference.generate(TINY, random_weights(TINY), [5, 2], 64)
    assert generate(way, [5, 2], 64) == expected.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("project", [cublas, gemv.linear])
@pytest.mark.parametrize("dependent", [False, True])
def test_the_baseline_on_a_gpu(project, dependent):
    if dependent and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU launches no kernel before the one before has ended")
    memory = memory_of(Lowering(TINY, 1, cache=80, itemsize=4), "cuda")
    if project is gemv.linear:
        project = functools.partial(project, dependent=dependent)
    found = Baseline(memory, project, dependent, block_t=16)
    assert generate(found, [5, 2], 64) == reference.generate(TINY, random_weights(TINY), [5, 2], 64).tokens
