"""The persistent-tables study: model, reference, tables both ways, validator; what the kernel compiles to."""

import dataclasses
import functools
import json
import math
import re
import struct

import compiled_once
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.evidence import compiled
from labkit.kernels.decoder import model as models
from labkit.kernels.decoder import reference, step, tables
from labkit.kernels.decoder import validate as validation
from labkit.kernels.decoder.model import MODELS, Decoder, load_weights, random_weights, read_safetensors
from labkit.kernels.decoder.tables import Lowering, buffer_shapes, lower, lower_slowly
from labkit.kernels.decoder.validate import TableError, validate
from labkit.shapes import LINEAR
from labkit.studies.persistent_tables import bound, stages

TINY = Decoder("tiny", hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61)


# model


@pytest.mark.parametrize("name", list(MODELS))
def test_widths_are_those_of_the_other_study(name):
    model, linear = MODELS[name], LINEAR[name]
    layers, groups = linear.layers["layer"]
    assert model.layers == layers
    assert groups == (
        (model.hidden, (model.q_width, model.kv_width, model.kv_width)),
        (model.q_width, (model.hidden,)),
        (model.hidden, (model.ffn, model.ffn)),
        (model.ffn, (model.hidden,)),
    )
    assert linear.heads == ((model.vocab, model.hidden),)


def test_streamed_weights_by_hand():
    model = Decoder("m", hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, ffn=3, vocab=5)
    layer = 4 * 4 + 2 * 4 + 2 * 4 + 4 * 4 + 3 * (3 * 4) + 2 * 4
    assert model.streamed_weights() == 2 * layer + 4 + 5 * 4 + 4  # layers, final gain, head, one embedding row
    assert round(2 * MODELS["AutoMegaKernel h1024"].streamed_weights() / 1e6, 1) == 155.7  # as published
    assert sum(math.prod(s) for s in MODELS["Llama-3.2-1B"].shapes().values()) == 1_235_814_400  # the model card's


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0; allowed: at least 1"),
        ({"kv_heads": 3}, "heads is 4; allowed: a multiple of kv_heads, 3"),
        ({"head_dim": 7}, "head_dim is 7; allowed: an even number"),
    ],
)
def test_an_impossible_shape_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        Decoder(**vars(TINY) | change)


def test_random_weights_repeat_and_have_the_shapes():
    first, again, other = (random_weights(TINY, seed, torch.bfloat16) for seed in (1, 1, 2))
    assert {name: tuple(w.shape) for name, w in first.items()} == TINY.shapes()
    assert all(w.dtype == torch.bfloat16 and torch.equal(w, again[name]) for name, w in first.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_llama_3_scaling_by_its_branches():
    model = MODELS["Llama-3.2-1B"]
    plain = models.inverse_frequencies(Decoder(**vars(model) | {"scaling": None}))
    scaled = models.inverse_frequencies(model)
    wavelength = 2 * math.pi / plain
    for f, s, w in zip(plain.tolist(), scaled.tolist(), wavelength.tolist(), strict=True):
        smooth = (8192 / w - 1) / (4 - 1)
        expected = f if w < 8192 / 4 else f / 32 if w > 8192 else (1 - smooth) * f / 32 + smooth * f
        assert s == pytest.approx(expected, rel=1e-12)


def safetensors(tensors, extra=None, pad=b""):
    """The bytes of a safetensors file."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    header, data = dict(extra or {}), b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape)}
        header[name]["data_offsets"] = [len(data), len(data) + len(raw)]
        data += raw
    text = json.dumps(header).encode() + pad
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("pad", [b"", b" ", b"   "])  # odd lengths put values at odd addresses
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_a_file(tmp_path, dtype, pad):
    weights = random_weights(TINY, 0, dtype)
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors(weights, {"__metadata__": {"format": "pt"}}, pad))
    found = load_weights(TINY, file)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    wide = load_weights(TINY, tmp_path, torch.float64)
    assert torch.equal(wide["model.norm.weight"], weights["model.norm.weight"].double())


def test_weights_of_a_folder_and_a_tied_head(tmp_path):
    model = Decoder(**vars(TINY) | {"tied": True})
    weights = random_weights(model)
    names = sorted(weights)
    (tmp_path / "a.safetensors").write_bytes(safetensors({n: weights[n] for n in names[:9]}))
    rest = {n: weights[n] for n in names[9:]} | {"lm_head.weight": torch.zeros(1)}  # of no use where the head is tied
    (tmp_path / "b.safetensors").write_bytes(safetensors(rest))
    found = load_weights(model, tmp_path)
    assert set(found) == set(names)
    assert models.head_of(model, found) is found["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"short", "its header would be"),
        (struct.pack("<Q", 100) + b"{}", "its header would be 100 bytes, but the file has 10"),
        (struct.pack("<Q", 2) + b"{]", "its header is no JSON object"),
        (struct.pack("<Q", 2) + b"[]", "its header is no JSON object"),
        (safetensors({}, {"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}), "a is I8; allowed: F64"),
        (safetensors({}, {"a": {"dtype": "F32", "shape": [1]}}), "a is .*; allowed: dtype, shape and two data_offsets"),
        (safetensors({}, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), "at bytes 0 to 4 of 0"),
        (safetensors({}, {"b": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}) + bytes(8), "b .* 0 to 8 of 8"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named(tmp_path, content, message):
    file = tmp_path / "broken.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"broken.safetensors.*{message}"):
        read_safetensors(file)


def test_a_file_of_another_model_is_named(tmp_path):
    weights = random_weights(TINY)
    file = tmp_path / "other.safetensors"
    file.write_bytes(safetensors(weights | {"model.norm.weight": torch.ones(5)}))
    with pytest.raises(ValueError, match=r"model.norm.weight is \(5,\); allowed: \(32,\)"):
        load_weights(TINY, file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    file.write_bytes(safetensors(weights))
    with pytest.raises(ValueError, match=r"has no model.layers.1.mlp.up_proj.weight, which tiny needs as \(48, 32\)"):
        load_weights(TINY, file)
    with pytest.raises(FileNotFoundError, match=r"has no \*.safetensors file"):
        load_weights(TINY, tmp_path / "..")


# reference


def test_rms_norm_by_hand_and_as_the_library():
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert reference.rms_norm(x, torch.tensor([1.0, 2.0]), 0.0).tolist() == pytest.approx(
        [3 / 12.5**0.5, 8 / 12.5**0.5]
    )
    x, gain = torch.randn(7, 33, dtype=torch.float64), torch.randn(33, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(x, (33,), gain, 1e-5)
    torch.testing.assert_close(reference.rms_norm(x, gain, 1e-5), expected)


def test_rotation_by_hand():
    model = Decoder("m", 4, 1, 1, 1, 4, 4, 4, theta=100.0)  # frequencies 1 and 1/10
    x = torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    expected = [math.cos(3), 2 * math.cos(0.3), math.sin(3), 2 * math.sin(0.3)]
    assert reference.rotate(x, 3, model).tolist() == pytest.approx(expected)
    assert torch.equal(reference.rotate(x, 0, model), x)


def test_rotated_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, TINY.head_dim, dtype=torch.float64)
    products = [float(reference.rotate(q, p + 5, TINY) @ reference.rotate(k, p, TINY)) for p in (0, 7, 1000)]
    assert products == pytest.approx([products[0]] * 3)


@pytest.mark.parametrize(("heads", "kv_heads", "T", "D"), [(1, 1, 1, 2), (4, 4, 5, 8), (8, 2, 33, 16), (6, 1, 7, 4)])
def test_attention_as_the_library(heads, kv_heads, T, D):
    q = torch.randn(heads, D, dtype=torch.float64)
    k, v = torch.randn(2, kv_heads, T, D, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(q[None, :, None], k[None], v[None], enable_gqa=True)
    torch.testing.assert_close(reference.attention(q, k, v), expected[0, :, 0])


def test_a_step_by_hand():
    """One layer, widths of one pair, attention over one position: every value can be written down."""
    model = Decoder("m", hidden=2, layers=1, heads=1, kv_heads=1, head_dim=2, ffn=1, vocab=2, eps=0.0)
    eye = torch.eye(2)
    weights = {name: torch.ones(shape) for name, shape in model.shapes().items()}
    weights |= {"model.embed_tokens.weight": torch.tensor([[1.0, -1.0], [3.0, 4.0]]), "lm_head.weight": eye}
    weights |= {f"model.layers.0.self_attn.{x}_proj.weight": eye for x in "qkvo"}
    weights["model.layers.0.mlp.gate_proj.weight"] = torch.tensor([[1.0, 0.0]])
    weights["model.layers.0.mlp.down_proj.weight"] = torch.tensor([[2.0], [0.0]])
    cache = reference.new_cache(model, 1)
    found = reference.step(model, weights, cache, 1, 0)
    r = 12.5**0.5
    x = [3 + 3 / r, 4 + 4 / r]  # attention over one position is its value, the normed embedding
    n = [value / math.sqrt((x[0] ** 2 + x[1] ** 2) / 2) for value in x]
    x[0] += 2 * n[0] / (1 + math.exp(-n[0])) * (n[0] + n[1])
    scale = math.sqrt((x[0] ** 2 + x[1] ** 2) / 2)
    assert found.tolist() == pytest.approx([x[0] / scale, x[1] / scale])
    assert cache.v[0, 0, 0].tolist() == pytest.approx([3 / r, 4 / r])


def full_pass(model, w, tokens):
    """Logits of every position at once, with the library's norm and causal attention: another way to the same."""
    F = torch.nn.functional
    x = w["model.embed_tokens.weight"][tokens]

    def heads(y, count):
        return y.view(len(tokens), count, model.head_dim).transpose(0, 1)

    def turned(y):
        return torch.stack([reference.rotate(y[:, p], p, model) for p in range(len(tokens))], 1)

    for i in range(model.layers):
        layer = models.layer_of(model, w, i)
        y = F.rms_norm(x, (model.hidden,), layer["input_layernorm"], model.eps)
        q, k, v = (y @ layer[f"self_attn.{name}_proj"].T for name in "qkv")
        q, k, v = turned(heads(q, model.heads)), turned(heads(k, model.kv_heads)), heads(v, model.kv_heads)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = x + y.transpose(0, 1).reshape(len(tokens), -1) @ layer["self_attn.o_proj"].T
        y = F.rms_norm(x, (model.hidden,), layer["post_attention_layernorm"], model.eps)
        y = F.silu(y @ layer["mlp.gate_proj"].T) * (y @ layer["mlp.up_proj"].T)
        x = x + y @ layer["mlp.down_proj"].T
    x = F.rms_norm(x, (model.hidden,), w["model.norm.weight"], model.eps)
    return x @ models.head_of(model, w).T


@pytest.mark.parametrize("tied", [False, True])
def test_token_by_token_is_the_whole_sequence_at_once(tied):
    model = Decoder(**vars(TINY) | {"tied": tied})
    weights = random_weights(model, 3, torch.float64)
    found = reference.generate(model, weights, [5, 1, 60], 6)
    expected = full_pass(model, weights, torch.tensor([5, 1, 60, *found.tokens[:-1]]))[2:]
    torch.testing.assert_close(found.logits, expected)
    assert found.tokens == expected.argmax(-1).tolist()
    best = expected.topk(2).values
    assert found.margins == pytest.approx((best[:, 0] - best[:, 1]).tolist())
    single = reference.generate(model, weights, [5, 1, 60], 6, reference.new_cache(model, 9, torch.float32))
    assert single.tokens == found.tokens
    torch.testing.assert_close(single.logits.double(), expected, rtol=1e-4, atol=1e-5)


def test_sequences_at_once_are_each_by_itself():
    weights, prompts = random_weights(TINY, 3, torch.float64), [[5, 1], [60, 2], [7, 7]]
    caches = [reference.new_cache(TINY, 8) for _ in prompts]
    together = reference.generate_each(TINY, weights, prompts, 4, caches)
    alone = [reference.generate(TINY, weights, prompt, 4) for prompt in prompts]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a.logits, b.logits)
        assert a.margins == pytest.approx(b.margins)
    assert together[0].tokens != together[1].tokens


def test_what_the_reference_cannot_take_is_named():
    weights, cache = random_weights(TINY), reference.new_cache(TINY, 4)
    with pytest.raises(ValueError, match="token is 61; allowed: 0 to 60"):
        reference.step(TINY, weights, cache, 61, 0)
    with pytest.raises(ValueError, match="position is 4; allowed: 0 to 3"):
        reference.step(TINY, weights, cache, 0, 4)
    with pytest.raises(ValueError, match="prompt is empty"):
        reference.generate(TINY, weights, [], 1)


# tables

LOWERINGS = st.builds(
    Lowering,
    st.builds(
        lambda kv, group, layers, hidden, ffn, vocab: Decoder(
            "m", hidden, layers, kv * group, kv, 32, ffn, vocab
        ),
        *(st.integers(1, 4) for _ in range(3)), *(st.integers(1, 40) for _ in range(3)),
    ),
    programs=st.integers(1, 9),
    schedule=st.sampled_from(tables.SCHEDULES),
    cache=st.integers(5, 9),
    position=st.none() | st.integers(0, 4),
    rows=st.sampled_from((2, 4, 8)),
    parts=st.none() | st.integers(1, 12),
    itemsize=st.sampled_from((2, 4)),
    batch=st.integers(1, 3),
).flatmap(
    lambda how: st.sampled_from(tables.groups(how.model, how.itemsize)).map(
        lambda n: dataclasses.replace(how, group=n)
    )
)  # fmt: skip


def same(a, b):
    arrays = all(np.array_equal(getattr(a, x), getattr(b, x)) for x in ("buffers", "records", "queue"))
    types = all(getattr(a, x).dtype == getattr(b, x).dtype for x in ("buffers", "records", "queue"))
    return arrays and types and a.counters == b.counters


@settings(max_examples=150, deadline=None)
@given(LOWERINGS)
def test_both_ways_build_the_same_tables(how):
    addresses = np.arange(len(buffer_shapes(how))) * 4096
    assert same(lower(how, addresses), lower_slowly(how, addresses))


@pytest.mark.parametrize("schedule", tables.SCHEDULES)
def test_both_ways_build_the_same_tables_of_a_real_model(schedule):
    how = Lowering(MODELS["Llama-3.2-1B"], 132, schedule)
    assert same(lower(how), lower_slowly(how))


def test_tables_by_hand():
    how = Lowering(Decoder("m", 8, 1, 2, 1, 4, 6, 10), 2, cache=4, position=3, rows=4)
    found = lower(how)
    assert found.counters == 1 + 7 + 1
    assert found.queue.tolist() == [0, 7, 14]
    words = [tables.OP, tables.START, tables.STOP, tables.WAIT, tables.TARGET, tables.SIGNAL, tables.POSITION]
    assert found.records[:7, words].tolist() == [  # program 0 has every other record
        [tables.EMBED, 0, 1, -1, -1, 0, -1],
        [tables.QKV, 8, 16, 0, 1, 1, -1],
        [tables.ATTENTION, 1, 2, 1, 2, 4, 3],
        [tables.OUTPUT, 4, 8, 4, 2, 5, -1],
        [tables.GATE_UP, 4, 12, 5, 2, 6, -1],
        [tables.DOWN, 4, 8, 6, 2, 7, -1],
        [tables.HEAD, 4, 10, 7, 2, 8, -1],
    ]
    assert found.records[7:, words].tolist() == [
        [tables.QKV, 0, 8, 0, 1, 1, -1],
        [tables.ATTENTION, 0, 1, 1, 2, 4, 3],
        [tables.OUTPUT, 0, 4, 4, 2, 5, -1],
        [tables.GATE_UP, 0, 4, 5, 2, 6, -1],
        [tables.DOWN, 0, 4, 6, 2, 7, -1],
        [tables.HEAD, 0, 4, 7, 2, 8, -1],
        [tables.ARGMAX, 0, 1, 8, 2, -1, 3],
    ]
    attention = found.records[found.records[:, tables.OP] == tables.ATTENTION]
    assert attention[:, [tables.START, tables.SLOT, tables.ARRIVALS]].tolist() == [[1, 0, 3], [0, 0, 2]]


def test_spans_of_the_cache_are_records_of_their_own():
    model = Decoder("m", 8, 2, 2, 1, 4, 6, 10)
    found = lower(Lowering(model, 1, cache=10, span=4))
    attention = found.records[found.records[:, tables.OP] == tables.ATTENTION]
    shared = [[head, span, 2 + head] for head in (0, 1) for span in (0, 1, 2)]
    later = [[head, span, counter + 7] for head, span, counter in shared]
    assert attention[:, [tables.START, tables.SLOT, tables.ARRIVALS]].tolist() == shared + later
    output = found.records[:, tables.OP] == tables.OUTPUT
    assert (found.records[output, tables.TARGET] == 6).all()
    assert found.spans == 3
    assert lower(Lowering(model, 1, cache=10, span=64)).spans == 1


def test_heads_of_a_group_are_one_record():
    model = Decoder("m", 8, 1, 4, 2, 32, 6, 10)
    found = lower(Lowering(model, 1, cache=10, span=5, batch=2, group=2))
    attention = found.records[found.records[:, tables.OP] == tables.ATTENTION]
    words = [tables.START, tables.STOP, tables.SLOT, tables.ARRIVALS]
    assert attention[:, words].tolist() == [[2 * i, 2 * i + 2, span, 2 + i] for i in range(4) for span in (0, 1)]
    assert (tables.values_read(Lowering(model, 1, cache=10, span=5, batch=2, group=2), attention) == 2 * 5 * 32).all()


def test_a_group_that_begins_with_another_head_is_refused():
    found = lower(Lowering(Decoder("m", 8, 1, 4, 2, 32, 6, 10), 1, cache=10, span=5, group=2))
    validate(found)
    for word, message in ((tables.START, "start|stop|computed"), (tables.STOP, "stop of attention is 3; allowed: 2")):
        records = found.records.copy()
        records[first(found, tables.ATTENTION), word] += 1
        with pytest.raises(TableError, match=message):
            validate(dataclasses.replace(found, records=records))


@pytest.mark.parametrize(
    ("model", "itemsize", "allowed"),
    [
        (Decoder("m", 8, 1, 8, 2, 32, 6, 10), 2, "1, 2, 4"), (Decoder("m", 8, 1, 6, 1, 32, 6, 10), 2, "1, 2"),
        (Decoder("m", 8, 1, 8, 2, 32, 6, 10), 4, "1"), (Decoder("m", 8, 1, 8, 2, 16, 6, 10), 2, "1"),
    ],
)  # fmt: skip
def test_what_groups_can_be(model, itemsize, allowed):
    with pytest.raises(ValueError, match=f"group is 3; allowed: one of {allowed}$|group is 3; allowed: {allowed}$"):
        Lowering(model, 1, itemsize=itemsize, group=3)


def test_a_group_needs_positions_for_a_matrix_instruction():
    how = Lowering(MODELS["Llama-3.2-1B"], 1, position=None, group=4)
    with pytest.raises(ValueError, match="block_t is 8; allowed: at least 16 with a group of 4 heads"):
        step.check_step(how, 0, "launch", step.Choice(block_t=8))
    step.check_step(dataclasses.replace(how, group=1), 0, "launch", step.Choice(block_t=8))


def test_a_batch_is_more_attention_and_rows_of_its_own():
    """What reads weights has one record for all sequences; attention one a head of each."""
    model = Decoder("m", 8, 2, 2, 1, 4, 6, 10)
    one, three = (Lowering(model, 1, cache=10, span=4, batch=batch) for batch in (1, 3))
    ops, those = (lower(how).records[:, tables.OP].tolist() for how in (one, three))
    assert {op: those.count(op) - ops.count(op) for op in set(ops)} == {
        op: 2 * 2 * 2 * 3 if op == tables.ATTENTION else 0 for op in set(ops)
    }  # layers, heads, sequences more, spans
    more = {name for name, shape in buffer_shapes(three).items() if shape != buffer_shapes(one)[name]}
    assert more == {*step.RESULTS, *(f"{kind}_cache.{layer}" for kind in "kv" for layer in (0, 1))}
    assert all(buffer_shapes(three)[name][0] == 3 * buffer_shapes(one)[name][0] for name in more)
    found = lower(three)
    assert (found.batch, found.spans, found.counters) == (3, 3, 2 + 2 * (5 + 6))


def in_order(found):
    """Records by the programs that run them."""
    return [found.records[a:b] for a, b in zip(found.queue, found.queue[1:], strict=False)]


@settings(max_examples=80, deadline=None)
@given(LOWERINGS)
def test_every_row_has_one_record_and_every_wait_is_met(how):
    found = lower(how)
    records = found.records
    for op, (rows, _) in how.projections().items():
        for weight in np.unique(records[records[:, tables.OP] == op, tables.WEIGHT]):
            mine = records[(records[:, tables.OP] == op) & (records[:, tables.WEIGHT] == weight)]
            covered = np.concatenate([np.arange(a, b) for a, b in mine[:, [tables.START, tables.STOP]]])
            assert sorted(covered) == list(range(rows))
    waits, signals = records[records[:, tables.WAIT] >= 0], records[records[:, tables.SIGNAL] >= 0, tables.SIGNAL]
    assert (np.bincount(signals, minlength=found.counters)[waits[:, tables.WAIT]] == waits[:, tables.TARGET]).all()


def test_longest_first_is_the_greedy_rule():
    generator = np.random.default_rng(0)
    for programs in (1, 2, 7, 64):
        costs = generator.choice([1, 3, 10, 1000], 200)
        load, expected = np.zeros(programs, int), np.empty(200, int)
        for i in sorted(range(200), key=lambda i: -costs[i]):
            expected[i] = load.argmin()
            load[expected[i]] += costs[i]
        assert tables._longest_first(costs, programs).tolist() == expected.tolist()


def test_longest_first_evens_the_load():
    how = Lowering(MODELS["AutoMegaKernel h1024"], 132)

    def heaviest(schedule):
        found = lower(Lowering(**vars(how) | {"schedule": schedule}))
        return max(tables.values_read(how, queue).sum() for queue in in_order(found))

    assert heaviest("longest-first") < heaviest("round-robin")


@settings(max_examples=40, deadline=None)
@given(LOWERINGS.filter(lambda how: how.position is not None), st.integers(0, 4))
def test_other_words_of_the_position_are_another_position(how, position):
    found, other = lower(how), lower(Lowering(**vars(how) | {"position": position}))
    words = tables.position_words(found)
    found.records.reshape(-1)[words] = position
    assert same(found, other)
    expected = how.groups * how.spans * how.model.layers + 1
    assert len(words) == expected
    assert tables.counts(found)["changed_words"] == expected


def test_with_the_position_in_the_launch_no_word_changes():
    found = lower(Lowering(TINY, 3, position=None))
    assert tables.counts(found)["changed_words"] == 0


def test_what_is_counted():
    found = lower(Lowering(TINY, 3, cache=16))
    counted = tables.counts(found)
    assert counted == {
        "records": 1 + 2 * (3 + 4 + 3 + 3 + 3) + 3 + 1, "buffers": 14 + 16, "programs": 3, "counters": 2 + 2 * 9,
        "buffer_bytes": 30 * 32, "record_bytes": 37 * 64, "queue_bytes": 16, "changed_words": 2 * 4 + 1,
    }  # fmt: skip
    assert found.nbytes == 30 * 32 + 37 * 64 + 16
    assert found.parts == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"programs": 0}, "programs is 0; allowed: at least 1"),
        ({"parts": 0}, "parts is 0; allowed: at least 1"),
        ({"span": 0}, "span is 0; allowed: at least 1"),
        ({"batch": 0}, "batch is 0; allowed: at least 1"),
        ({"schedule": "random"}, "schedule is 'random'; allowed: round-robin, longest-first"),
        ({"rows": 3}, "rows is 3; allowed: a power of two"),
        ({"itemsize": 8}, "itemsize is 8; allowed: 2, 4"),
        ({"position": 16}, "position is 16; allowed: 0 to 15, the cache's last"),
    ],
)
def test_what_cannot_be_lowered_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        Lowering(**{"model": TINY, "programs": 2, "cache": 16} | change)


def test_addresses_are_one_a_buffer():
    for build in (lower, lower_slowly):
        with pytest.raises(ValueError, match="addresses has 3 entries; allowed: 30"):
            build(Lowering(TINY, 2), np.zeros(3, np.int64))


# validator


def refused(found, memory=None):
    """The record's number and the message, or (None, None) for a table that passes."""
    try:
        validate(found, memory)
    except TableError as problem:
        return problem.record, str(problem)
    return None, None


@settings(max_examples=80, deadline=None)
@given(LOWERINGS)
def test_what_is_lowered_is_valid(how):
    validate(lower(how))


@pytest.mark.parametrize("schedule", tables.SCHEDULES)
def test_real_models_are_valid(schedule):
    for model in MODELS.values():
        validate(lower(Lowering(model, 132, schedule)))


# A record's words are all checked, but the spare one, and those that its op does not read.
READ = {"slot": (tables.HEAD,), "target": tuple(op for op in range(1, 10) if op != tables.EMBED)}


@settings(max_examples=200, deadline=None)
@given(LOWERINGS, st.data())
def test_a_changed_word_is_refused(how, data):
    found = lower(how)
    number = data.draw(st.integers(0, len(found.records) - 1))
    op = int(found.records[number, tables.OP])
    word = data.draw(st.sampled_from([i for i, n in enumerate(tables.WORDS[:-1]) if op in READ.get(n, range(10))]))
    before = int(found.records[number, word])
    near = st.integers(-2, max(len(found.buffers), found.counters, 50))
    value = data.draw((near | st.integers(-(2**31), 2**31 - 1)).filter(lambda value: value != before))
    found.records[number, word] = value
    with pytest.raises(TableError, match=r"\d"):
        validate(found)


@settings(max_examples=100, deadline=None)
@given(LOWERINGS, st.data())
def test_records_in_another_order_pass_or_are_refused_as_a_cycle(how, data):
    found = lower(how)
    a, b = (data.draw(st.integers(0, len(found.records) - 1)) for _ in range(2))
    found.records[[a, b]] = found.records[[b, a]]
    _, message = refused(found)
    assert message is None or "can never run" in message


@settings(max_examples=60, deadline=None)
@given(LOWERINGS, st.data(), st.sampled_from(range(tables.WEIGHT, tables.SECOND + 1)))
def test_a_buffer_out_of_range_is_refused(how, data, word):
    found = lower(how)
    number = data.draw(st.integers(0, len(found.records) - 1))
    found.records[number, word] = data.draw(st.integers(len(found.buffers), 2**31 - 1) | st.integers(-(2**31), -2))
    record, message = refused(found)
    assert record == number
    assert re.search(r"is buffer .*; allowed", message)


def tiny(programs=3, **more):
    return lower(Lowering(TINY, programs, **{"cache": 16, "position": 5} | more))


def first(found, op):
    return int(np.flatnonzero(found.records[:, tables.OP] == op)[0])


@pytest.mark.parametrize(
    ("op", "word", "value", "message"),
    [
        (tables.QKV, tables.OP, 0, "op is 0; allowed: 1 to 8"),
        (tables.QKV, tables.OP, 10, "op is 10; allowed: 1 to 8"),
        (tables.DOWN, tables.STOP, 33, "stop of down is 33; allowed: .* to 32"),
        (tables.DOWN, tables.K, 49, "K of down is 49; allowed: 48 to 48"),
        (tables.DOWN, tables.INPUT, 2, "input of down is buffer 2; allowed: 6"),
        (tables.GATE_UP, tables.START, 1, "start modulo 2 of gate_up is 1; allowed: 0 to 0"),
        (tables.HEAD, tables.SLOT, 3, "slot of head is 3; allowed: 0 to 2"),
        (tables.HEAD, tables.SLOT, 1, "slot is 1; allowed: each slot once"),
        (tables.ATTENTION, tables.STOP, 9, "stop of attention is 9; allowed: ."),
        (tables.ATTENTION, tables.POSITION, 16, "position is 16; allowed: up to 15"),
        (tables.ATTENTION, tables.POSITION, 6, "position is 5, but others have 6|position is 6, but others have 5"),
        (tables.ATTENTION, tables.SLOT, 1, "slot of attention is 1; allowed: 0 to 0"),
        (tables.ATTENTION, tables.ARRIVALS, 1, "arrivals is counter 1; allowed: one for each head and layer alone"),
        (tables.ATTENTION, tables.ARRIVALS, -1, "arrivals is counter -1; allowed: 0 to 19"),
        (tables.QKV, tables.ARRIVALS, 2, "arrivals is counter 2; allowed: -1, its op has none"),
        (tables.QKV, tables.POSITION, 5, "position is 5; allowed: -1, its op has none"),
        (tables.DOWN, tables.WAIT, 99, "wait is counter 99; allowed: 0 to 19"),
        (tables.DOWN, tables.WAIT, -1, "wait is counter -1; allowed: 0 to 19"),
        (tables.DOWN, tables.TARGET, 4, "waits until counter .* is 4, but 3 records signal it"),
        (tables.DOWN, tables.SIGNAL, 0, "records signal it|for which no record waits"),
    ],
)
def test_a_malformed_record_is_named(op, word, value, message):
    found = tiny()
    number = first(found, op)
    found.records[number, word] = value
    record, text = refused(found)
    assert record is not None
    assert re.search(message, text), text


def test_rows_left_out_or_computed_twice_are_named():
    found = tiny()
    number = first(found, tables.GATE_UP)
    found.records[number, tables.STOP] -= 4
    assert re.search("rows .* of gate_up, stage 4, are computed by no record", refused(found)[1])
    found.records[number, tables.STOP] += 8
    assert re.search("rows .* of gate_up, stage 4, are computed (twice|by no record)", refused(found)[1])


def test_a_wait_for_an_earlier_stage_is_named():
    found = tiny()
    number, qkv = first(found, tables.DOWN), first(found, tables.QKV)
    found.records[number, tables.WAIT] = found.records[qkv, tables.SIGNAL]  # as many signals: a race, not a deadlock
    assert refused(found) == (number, f"record {number}: waits for counter 1, which is not all of the stage before")


def test_a_wait_that_nobody_signals_is_named():
    found = tiny()
    records = found.records
    lone = int(records[first(found, tables.ATTENTION), tables.WAIT])
    signaller = int(np.flatnonzero(records[:, tables.SIGNAL] == lone)[0])
    records[signaller, tables.SIGNAL] = 0
    record, message = refused(found)
    assert re.search("waits until counter . is 1, but [02] records signal it", message)
    assert records[record, tables.WAIT] in (0, lone)


def test_a_cycle_of_waits_is_named(monkeypatch):
    found = tiny()
    records = found.records
    rows = np.flatnonzero(records[:, tables.SIGNAL] == 1)  # first layer's qkv: let it wait for its own output
    done = int(records[np.flatnonzero(records[:, tables.OP] == tables.OUTPUT)[0], tables.SIGNAL])
    others = records[:, tables.WAIT] == done
    records[rows, tables.WAIT] = done
    records[rows, tables.TARGET] = records[others, tables.TARGET][0]
    embed = first(found, tables.EMBED)
    records[embed, tables.SIGNAL] = done  # so that its own counter is not left alone
    records[records[:, tables.WAIT] == done, tables.TARGET] += 1
    monkeypatch.setattr(validation, "_check_stages", lambda tables: None)  # which would have seen it first
    record, message = refused(found)
    assert re.search(r"can never run: in program . it waits for counter", message)
    assert record in rows


def test_a_cycle_through_the_order_of_a_queue_is_named():
    found = tiny(programs=1)
    a, b = first(found, tables.ATTENTION), first(found, tables.OUTPUT)
    swapped = found.records.copy()
    swapped[[a, b]] = found.records[[b, a]]  # the output now stands before the attention that it waits for
    record, message = refused(dataclasses.replace(found, records=swapped))
    assert record == a
    assert "can never run: in program 0" in message
    assert refused(tiny(programs=1)) == (None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"records": np.zeros((3, 16))}, r"records is float64 \(3, 16\); allowed: int32 \[n, 16\]"),
        ({"records": np.zeros((3, 8), np.int32)}, r"records is int32 \(3, 8\)"),
        ({"buffers": np.zeros((3, 4), np.int32)}, r"buffers is int32 \(3, 4\); allowed: int64 \[n, 4\]"),
        ({"queue": np.zeros(1, np.int32)}, r"queue is int32 \(1,\); allowed: int32 \[programs \+ 1\]"),
        ({"queue": np.array([0, 9, 5, 37], np.int32)}, "allowed: rising from 0 to 37"),
        ({"queue": np.array([0, 9, 36], np.int32)}, "allowed: rising from 0 to 37"),
    ],
)
def test_malformed_arrays_are_named(change, message):
    assert re.search(message, refused(dataclasses.replace(tiny(), **change))[1])


def test_records_that_are_left_out_are_named():
    found = tiny(programs=1)
    n = len(found.records) - 1
    short = dataclasses.replace(found, records=found.records[:n], queue=np.array([0, n], np.int32))
    assert "no record is of stage 12" in refused(short)[1]


def test_addresses_outside_the_memory_are_refused():
    how = Lowering(TINY, 2, cache=16)
    sizes = [r * c * size for r, c, size in buffer_shapes(how).values()]
    addresses = 4096 + np.cumsum([0, *(-(-size // 16) * 16 for size in sizes[:-1])])
    end = int(addresses[-1]) + sizes[-1]
    found = lower(how, addresses)
    validate(found, [(4096, end - 4096)])
    assert refused(found, [(4096, end - 4096 - 1)])[1].startswith("buffer 29: bytes")
    assert refused(found, [(4097, end)])[1].startswith("buffer 0: bytes 4096 to 4100 are not in the memory")
    found.buffers[3, 0] += 2
    assert "allowed: a multiple of 16" in refused(found, [(0, end + 4096)])[1]


def test_the_position_of_a_launch_is_checked():
    found = tiny(position=None)
    validate(found, position=15)
    with pytest.raises(ValueError, match="position is 16; allowed: 0 to 15"):
        validate(found, position=16)


# where the time of a step goes


def recorded(ops, signals):
    records = np.full((len(ops), len(tables.WORDS)), -1, np.int32)
    records[:, tables.OP], records[:, tables.SIGNAL] = ops, signals
    return records


def test_stages_by_hand():
    """An embedding, then a projection by three programs: half are released at 130, half done at 170, all at 200."""
    records = recorded([tables.EMBED, tables.QKV, tables.QKV, tables.QKV, tables.ARGMAX], [0, 1, 1, 1, -1])
    marks = np.array([[10, 20, 100], [15, 120, 160], [15, 130, 170], [15, 140, 200], [0, 0, 0]])
    assert stages.stages(records, marks) == [{"op": "qkv", "wake": 30, "work": 40, "tail": 30}]
    [line] = stages.by_op(records, marks)
    assert line == {"op": "qkv", "stages": 1, "wake": 0.03, "work": 0.04, "tail": 0.03}
    with pytest.raises(ValueError, match="marks has 4 entries; allowed: 5, one a record"):
        stages.stages(records, marks[:4])


def test_a_record_that_waits_for_nobody_does_not_count_as_released():
    records = recorded([tables.EMBED, tables.ATTENTION, tables.ATTENTION, tables.ATTENTION], [0, 1, 1, 1])
    marks = np.array([[10, 20, 100], [15, 0, 16], [15, 0, 17], [15, 130, 150]])  # two spans without a position
    assert stages.stages(records, marks) == [{"op": "attention", "wake": 30, "work": 20, "tail": 0}]


def moments_of(programs):
    """Tables of a small step, and moments at which records that wait for all before them could have worked."""
    found = lower(Lowering(TINY, programs, "round-robin", 80, None, itemsize=4))
    records, marks = found.records, np.zeros((len(found.records), 3), np.int64)
    program, done = np.repeat(np.arange(programs), np.diff(found.queue)), {-1: 0}
    free = np.zeros(programs, np.int64)
    for wait in np.unique(records[:, tables.WAIT]):
        mine = np.flatnonzero(records[:, tables.WAIT] == wait)
        for i in mine:
            begun = free[program[i]] + 1
            released = max(begun, done[wait]) + 10 * (wait >= 0)
            free[program[i]] = released + 100 + 7 * (i % 5)
            marks[i] = begun, released, free[program[i]]
        for signal in np.unique(records[mine, tables.SIGNAL]):
            done[signal] = max(done.get(signal, 0), free[program[mine]].max())
    return found, marks


@pytest.mark.parametrize("programs", [1, 3, 16])
def test_waiting_as_it_does_gives_what_was_measured(programs):
    found = bound.finer(*moments_of(programs))
    assert found["all"] == pytest.approx(found["measured"])
    assert found["measured"] >= found["what it reads"] >= found["its parts"] >= found["nothing"] > 0


def test_of_one_slow_part_the_others_are_multiplied_meanwhile():
    """Its first half is there at 0, the last at 100: of work of 40, half is left when the last part comes."""
    assert bound._by_parts(np.array([100.0, 0.0]), np.array([1.0, 1.0]), 40.0) == 120.0
    assert bound._by_parts(np.array([0.0, 1.0]), np.array([3.0, 1.0]), 40.0) == 40.0  # that is, without any wait


def test_a_clock_of_today_loses_nothing():
    """Its moments are some 2^60 ns, of which a float has one in 256."""
    found, marks = moments_of(3)
    assert bound.finer(found, marks + 1_790_000_000_000_000_001) == bound.finer(found, marks)
    assert stages.by_op(found.records, marks + 1_790_000_000_000_000_001) == stages.by_op(found.records, marks + 1)


def test_a_part_of_attention_is_a_head_whose_last_span_is_done():
    """Two heads of two spans, of which one has no position and is done at once: it makes nothing."""
    records = recorded([tables.ATTENTION] * 4, [1] * 4)
    records[:, tables.START] = 0, 0, 1, 1
    ready, sizes = bound._parts(records, np.array([5.0, 50.0, 70.0, 6.0]))
    assert ready.tolist() == [50, 70]
    assert sizes.tolist() == [1, 1]


def test_attention_waits_for_its_own_head_alone():
    """The rows of a head's query, and of the key and value that it shares, are all that it reads."""
    found, _ = moments_of(16)
    qkv = found.records[found.records[:, tables.OP] == tables.QKV]
    qkv = qkv[qkv[:, tables.WAIT] == qkv[0, tables.WAIT]]  # of one layer
    size, group = TINY.head_dim, TINY.heads // TINY.kv_heads
    for head in range(TINY.heads):
        firsts = [head, TINY.heads + head // group, TINY.heads + TINY.kv_heads + head // group]
        wanted = {row for first in firsts for row in range(first * size, (first + 1) * size)}
        rows = [set(range(start, stop)) for start, stop in qkv[:, [tables.START, tables.STOP]]]
        assert bound._reads(found, qkv, head).tolist() == [bool(mine & wanted) for mine in rows]
    assert not bound._reads(found, qkv, 0).all()


def test_bounds_need_a_mark_a_record():
    found, marks = moments_of(3)
    with pytest.raises(ValueError, match=rf"marks has 4 entries; allowed: {len(marks)}, one a record"):
        bound.finer(found, marks[:4])


# what the kernel compiles to, and the kernel with many programs


@functools.cache
def step_of(**choice):
    """The step of Llama-3.2-1B, whose position is an argument: other models and ways are those of the study's tests."""
    return step.compilable("Llama-3.2-1B", **choice)


FOUR_ROWS = {"rows": 4, "registers": 128}


@pytest.mark.parametrize(
    "choice",
    [FOUR_ROWS, FOUR_ROWS | {"ahead": 2}, {"rows": 8, "block_k": 512, "block_t": 8, "registers": 128}],
    ids=str,
)
def test_compiled_for_hopper(choice):
    """Four programs fit on a multiprocessor, nothing is spilled, weights are loaded 16 bytes a thread."""
    found = compiled_once.evidence(step_of(**choice), 90)
    assert found["spill_bytes"] == 0
    assert found["ctas_per_sm"] >= 4, found["registers"]
    if choice["rows"] == 4:
        assert found["loads"]["128"] >= 3 * 4  # tiles before the wait, in the loop, and of the next rows
    assert found["atomics"] == 1  # the signal; waiting is loads


def test_four_sequences_compiled_for_hopper():
    """Three programs fit on a multiprocessor; each tile of weights is loaded once for all sequences."""
    choice = {"rows": 2, "registers": 168}
    one, four = (compiled_once.evidence(step_of(batch=batch, **choice), 90) for batch in (1, 4))
    assert four["spill_bytes"] == 0
    assert four["ctas_per_sm"] >= 3, four["registers"]
    x = 2 * 2  # of a sequence: two loads of eight values a thread, of the tile ahead and in the loop
    assert four["loads"]["128"] == one["loads"]["128"] + 3 * x


@pytest.mark.parametrize(
    ("choice", "prefetches", "clocks"), [({}, 0, 0), ({"prefetch": 16384}, 1, 0), ({"marks": True}, 0, 5)], ids=str
)
def test_what_is_asked_for_in_the_l2_and_when_the_clock_is_read(choice, prefetches, clocks):
    ptx = compiled.build(step_of(**FOUR_ROWS, **choice), 90).asm["ptx"]
    assert (ptx.count("prefetch.global.L2"), ptx.count("%globaltimer")) == (prefetches, clocks)


def test_a_lost_alignment_shows_in_the_loads():
    """The control: rows of which nobody says that they are aligned are loaded in narrow pieces."""
    launch = step_of(**FOUR_ROWS)
    narrow = dataclasses.replace(launch, args={**launch.args, "DIVISOR": 1})
    loads = [compiled_once.evidence(each, 90)["loads"]["128"] for each in (launch, narrow)]
    assert loads[1] <= loads[0] - 3 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", tables.SCHEDULES)
@pytest.mark.parametrize("programs", [2, 7, 64])
@pytest.mark.parametrize(
    "changed", [{}, {"ahead": 0}, {"prefetch": 256}, {"marks": True}, {"registers": 64}, {"batch": 4}], ids=str
)
def test_many_programs(programs, schedule, changed):
    changed = dict(changed)
    how = Lowering(TINY, programs, schedule, 80, None, itemsize=4, batch=changed.pop("batch", 1))
    weights = random_weights(TINY, 0)
    memory = step.allocate(how, weights, "cuda")
    found = lower(how, memory.addresses())
    validate(found, memory.extents())
    choice, on = step.Choice(**{"block_k": 64, "num_warps": 1} | changed), step.upload(found, "cuda")
    prompts = [[5 + i, 2] for i in range(how.batch)]
    tokens = step.generate_each(memory, lambda p: step.step(memory, on, p, choice=choice), prompts, 64)
    assert tokens == [reference.generate(TINY, weights, prompt, 64).tokens for prompt in prompts]
    if choice.marks:
        marks = memory.marks.cpu().numpy()
        assert (np.diff(marks[marks[:, 1] > 0]) >= 0).all()  # begun, released, done
        lines = stages.by_op(found.records, marks)
        assert {line["op"] for line in lines} >= {"qkv", "attention", "output", "gate_up", "down", "head"}
