"""What study 05 times: its trials notice what is not right; that all are right on the tiny cases, `check_tiny` says."""

import math

import pytest
import torch

from labkit.bench.spec import Case
from labkit.kernels import ceilings
from labkit.kernels.gguf import formats, products, routed
from labkit.studies.batched_ffn import ablations, cache_trials, study, variants, work

PEERS = (variants.GEMLITE, variants.GROUPED_MM)  # imported where they are installed; a GPU's only
ON_GPU = torch.cuda.is_available()
SMALL = study.STUDY.tiny if ON_GPU else study.STUDY.tiny[:1]  # the interpreter takes a minute for all of them
ALL = [(x, one.name) for x in SMALL for one in variants.of(x) if one.name not in PEERS]


@pytest.fixture(autouse=True)
def short_traces(monkeypatch):
    """Since the interpreter takes a second for a step."""
    monkeypatch.setattr(work, "TRACE_TOKENS", 4)
    monkeypatch.setattr(work, "LEAST_STEPS", 4)


@pytest.fixture
def steps_alone(monkeypatch, device):
    """What steps ask for and count, without their experts' products: these the interpreter would take a second for."""
    if device == "cpu":
        monkeypatch.setattr(routed, "grouped_indexed", lambda *args, **options: [])


def tiny(op):
    return next(x for x in study.STUDY.tiny if x.op == op)


def trial(x, name, device, sets=1, seed=0):
    (variant,) = (one for one in variants.of(x) if one.name == name)
    return variant.prepare(x, device, sets, seed)


def beyond(found):
    """Outputs whose error is not within the tolerance."""
    return {name for name, error in found.check().items() if not error <= found.tolerance[name]}


@pytest.mark.parametrize(("x", "name"), ALL, ids=[f"{x.op} {x['format']} {name}" for x, name in ALL])
def test_every_variant_is_within_its_tolerance_and_writes_every_output(x, name, device):
    found = trial(x, name, device, sets=2 if x.op == "product" else 1)
    if found.poison:
        found.poison()
        assert not found.written()
        found.calls[-1]()
        assert found.written() == (len(found.calls) == 1)  # the other set still is poisoned
    if found.check:
        assert beyond(found) == set()
    if found.poison:
        assert found.written()


def test_wide_products_of_bf16_take_them_as_they_are_stored(device):
    x = Case("product", dict(tiny("product").params) | {"N": 64, "format": "BF16"})
    found = trial(x, variants.WIDE, device)
    assert found.launch.args["FORMAT"] == "stored"
    if device == "cuda" or x["activations"] != "bf16":  # the interpreter's tl.dot is wrong for bf16
        found.calls[-1]()
        assert beyond(found) <= (set() if device == "cuda" else {"alone"})  # its order of sums depends on the tile


@pytest.mark.parametrize("format", ["BF16", "Q8_0"])
def test_wide_layers_have_gate_and_up_apart(format, device):
    x = Case("ffn", dict(tiny("ffn").params) | {"N": 64, "format": format})
    found = trial(x, variants.WIDE, device)
    assert beyond(found) <= (set() if device == "cuda" else {"alone"})


def test_dequantised_weights_are_those_of_the_format(device):
    for format, rows, columns in (
        ("Q6_K", 9, 512),
        ("Q5_K", 8, 256),
        ("BF16", 3, 544),
        ("F32", 9, 32),
        ("Q8_0", 8, 64),
    ):
        raw = formats.quantise(torch.randn(rows, columns), format)
        held = torch.full((rows, columns + 4), math.nan, device=device)
        ablations.dequantise(formats.pack(raw, format).to(device), held[:, :columns])()
        assert torch.equal(held[:, :columns].cpu(), formats.dequantise(raw, format))
        assert held[:, columns:].isnan().all()
    with pytest.raises(ValueError, match=r"y is \(3, 64\); allowed: \(8, 64\)"):
        ablations.dequantise(formats.pack(raw, "Q8_0"), torch.empty(3, 64))


def test_a_read_that_leaves_something_out_is_noticed(monkeypatch, device):
    x, read = (
        Case("product", {"rows": 700, "K": 64, "N": 1, "format": "Q8_0", "activations": "fp32"}),
        ceilings.read_words,
    )
    assert beyond(trial(x, variants.READ, device)) == set()

    def short(words, sums):
        return read(words[:-1], sums)

    monkeypatch.setattr(ceilings, "read_words", short)
    assert beyond(trial(x, variants.READ, device)) == {"sum"}


def damaged(make, damage):
    """Instead of a launcher: its launches, then `damage(y)`."""

    def launcher(W, x, y, *args):
        made = make(W, x, y, *args)
        return [*(made if isinstance(made, list) else [made]), lambda: damage(y)]

    return launcher


FAULTS = {
    "a value of one token": (lambda y: y[-1, 0].add_(1.0), {"y", "alone"}),
    "bits that depend on the batch": (lambda y: y.mul_(1 + 1e-6 * len(y)), {"alone"}),
    "nothing written": (lambda y: y.fill_(math.nan), {"y"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_product_is_noticed(monkeypatch, fault, device):
    damage, expected = FAULTS[fault]
    x = tiny("product")
    monkeypatch.setattr(products, "gemm_n", damaged(products.gemm_n, damage))
    # the damage of the last token is that of a token alone, too
    assert beyond(trial(x, variants.GEMM_N, device)) - {"alone"} == expected - {"alone"}
    if fault == "bits that depend on the batch":
        assert beyond(trial(x, variants.GEMM_N, device)) == {"alone"}


@pytest.mark.parametrize("op", ["routed", "cache"])
def test_a_wrong_weighted_sum_is_noticed(monkeypatch, op, device):
    make = routed.weighted_sum

    def wrong(work):
        launch = make(work)
        return lambda: (launch(), work.y[-1].mul_(1.1))

    x = tiny(op)
    monkeypatch.setattr(routed, "weighted_sum", wrong)
    assert "y" in beyond(trial(x, variants.INDEXED if op == "routed" else study.STUDY.control(x), device))


def test_an_expert_in_the_wrong_slot_is_noticed(device):
    x = tiny("cache")
    step = cache_trials.through(x, device, 0, variants.NEEDED)
    step()
    before = [work.y.clone() for work in step.works]
    step.kept._copies.copy = lambda pairs: [step.kept.slots.store[s].copy_(step.host.store[e ^ 1]) for e, s in pairs]
    step.done = -1
    for key in list(step.kept._held):  # nothing is there any more
        step.kept._free.append(step.kept._held.pop(key))
        step.kept.policy._keys.pop(key)
    step()
    assert any(not torch.equal(a, work.y) for a, work in zip(before, step.works, strict=True))


@pytest.mark.parametrize("name", [variants.PREFETCHED, *([variants.NEEDED, variants.RESIDENT] if ON_GPU else [])])
def test_memory_that_steps_use_is_not_given_away(name, device):
    """On a GPU their launches are in graphs, which do not keep the tensors; what is free is overwritten here."""
    found = trial(tiny("cache"), name, device)
    found.poison()
    assert not found.written()
    taken = [torch.full((2**size,), -1, dtype=torch.int8, device=device) for size in range(9, 20) for _ in range(32)]
    assert beyond(found) == set()
    assert found.written()
    del taken


@pytest.mark.parametrize("name", [variants.NEEDED, variants.PREFETCHED, variants.RESIDENT, variants.COPIES])
@pytest.mark.usefixtures("steps_alone")
def test_steps_go_through_the_trace_and_count(name, device):
    x = tiny("cache")
    step = cache_trials.through(x, device, 0, name)
    copied = step.kept.copied
    for _ in range(3):
        step()
    assert step.done == 2
    needed = sum(len(keys) for one in step.needs[:3] for keys in one)
    seen = step.kept.accesses - (x["layers"] * x["E"] if name == variants.RESIDENT else 0)
    assert seen == needed
    assert (step.kept.copied == copied) == (name == variants.RESIDENT)


def told(step):
    """What a step then does, in order, instead of doing it: of each layer by number, and of all copies."""
    order = []
    step._place = lambda layer, wave: order.append(f"place {layer}")
    for name in ("before", "experts", "after", "whole"):
        setattr(step, name, [lambda n=n, name=name: order.append(f"{name} {n}") for n in range(step.layers)])
    step.kept.prefetch = lambda keys: order.append(f"prefetch {keys[0][0]}")
    step.kept._copies.release = lambda slots: order.append("release")
    step.kept._copies.follow = lambda: order.append("follow")
    step.kept._copies.settle = lambda: order.append("settle")
    return order


def test_a_layers_own_copy_goes_before_those_of_the_next_layer(device):
    """Which are asked for before its slots are released: they need not wait for its kernels."""
    x = Case("cache", dict(tiny("cache").params) | {"capacity": 3})
    step = cache_trials.through(x, device, 0, variants.PREFETCHED)
    order = told(step)
    step()
    layers = [[f"place {n}", f"whole {n}", f"prefetch {1 - n}", "release"] for n in range(2)]
    assert order == ["follow", *layers[0], *layers[1], "settle"]


def test_a_layer_in_waves_asks_for_the_next_layers_experts_after_its_last_wave(device):
    step = cache_trials.through(tiny("cache"), device, 0, variants.PREFETCHED)
    keys = [(0, e) for e in range(3)]
    step.needs, step.layers = [[keys]], 1
    step.kept.waves = lambda needed: iter([{key: n} for n, key in enumerate(needed)])
    order = told(step)
    step()
    wave = ["place 0", "experts 0"]
    again = ["follow", *wave]  # the wave before reads the table, too
    assert order == ["follow", "before 0", *wave, *again, *again, "prefetch 0", "after 0", "settle"]


def test_experts_copied_when_needed_set_out_after_the_layer_before(device):
    x = Case("cache", dict(tiny("cache").params) | {"capacity": 3})
    step = cache_trials.through(x, device, 0, variants.NEEDED)
    step.kept.waves = lambda needed: (order.append(f"ask {needed[0][0]}"), iter([dict.fromkeys(needed, 0)]))[1]
    order = told(step)
    step()
    layers = [["follow", f"ask {n}", f"place {n}", f"whole {n}"] for n in range(2)]
    assert order == ["follow", *layers[0], *layers[1], "settle"]


@pytest.mark.parametrize("name", [variants.NEEDED, variants.PREFETCHED, variants.RESIDENT, variants.COPIES])
@pytest.mark.usefixtures("steps_alone")
def test_timing_begins_at_the_first_step_of_a_trace_that_the_cache_has_seen(monkeypatch, name, device):
    made, make = [], cache_trials.through
    monkeypatch.setattr(cache_trials, "through", lambda *args: made.append(make(*args)) or made[-1])
    found = trial(tiny("cache"), name, device)
    (step,) = made
    before = step.kept.accesses
    found.calls[0]()
    found.begin()
    assert step.done + 1 == len(step.needs)
    assert step.kept.accesses - before == sum(len(keys) for one in step.needs for keys in one)
    found.begin()  # there already
    assert step.done + 1 == len(step.needs)
    found.calls[0]()
    assert step.done == 0


def test_of_experts_that_are_needed_equally_often_as_many_of_each_layer_are_pinned(device):
    x = Case("cache", dict(tiny("cache").params) | {"N": 3, "top_k": 3, "policy": "pinned", "capacity": 2})
    step = cache_trials.through(x, device, 0, variants.NEEDED)
    assert all(len(keys) == x["E"] for one in step.needs for keys in one)
    kept = [sum((layer, e) in step.kept.policy for e in range(x["E"])) for layer in range(2)]
    assert sorted(kept) == [1, 2]  # one slot is for all others


@pytest.mark.usefixtures("steps_alone")
def test_a_step_reads_its_own_routing(device):
    step = cache_trials.through(tiny("cache"), device, 0, variants.NEEDED)
    for expected in step.routing[:3]:
        step()
        assert [work.ids.tolist() for work in step.works] == expected


@pytest.mark.parametrize("name", [variants.NEEDED, variants.PREFETCHED, variants.RESIDENT, variants.COPIES])
@pytest.mark.usefixtures("steps_alone")
def test_a_step_ends_when_its_copies_have_landed(name, device):
    step = cache_trials.through(tiny("cache"), device, 0, name)
    settle, ends = step.kept._copies.settle, []
    step.kept._copies.settle = lambda: (settle(), ends.append((step.done, step.kept.copied)))
    copied = []
    for _ in range(3):
        step()
        copied.append(step.kept.copied)
    assert ends == list(enumerate(copied))  # once a step, and nothing is asked for after it


def test_a_library_is_told_apart_by_its_bits(device):
    """The negative control: cuBLAS's, or a CPU library's, token alone need not have the bits of the batch."""
    x = Case("product", {"rows": 64, "K": 512, "N": 64, "format": "Q8_0", "activations": "fp32"})
    assert trial(x, variants.CUBLAS, device).facts()["alone"] > 0
