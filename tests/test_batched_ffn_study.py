"""Study 05: cases, variants and floors by hand; libraries by stand-ins; tables, claims and views from made-up rows."""

import dataclasses
import inspect
import json
import math
import re
import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace

import compiled_once
import pandas as pd
import pytest
import rows as made
import torch

from labkit import isolated, paths
from labkit.bench import spec, verdict
from labkit.bench.claim import OURS
from labkit.bench.records import read
from labkit.bench.sha import covered, kernel_sha
from labkit.bench.spec import Case
from labkit.evidence import compiled
from labkit.kernels import offline
from labkit.kernels.gguf import experts, formats, integers, products, reference, routed
from labkit.kernels.launch import Launch
from labkit.kernels.offload import policies
from labkit.studies.batched_ffn import (
    ahead,
    answer,
    claims,
    peers,
    routed_trials,
    study,
    tables,
    trials,
    variants,
    views,
    work,
)
from labkit.sweep import run

ALL = {"models": list(variants.DENSE), "formats": list(formats.FORMATS), "tokens": [1, 2, 4, 8, 16, 64, 512]}
ALL |= {"routed_formats": ["Q4_K"], "routed_tokens": [1, 8, 64, 512], "cache_tokens": [1, 64]}
ALL |= {"traces": list(variants.TRACES), "capacities": [16, 256]}
FEW = made.BATCHED_FFN
EVERY = [(op, one) for op, some in variants.VARIANTS.items() for one in some]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Few resamples, for speed; nothing is left of another test's buffers."""
    monkeypatch.setattr(verdict, "RESAMPLES", 100)
    trials.SHARED.parts.clear()


def product(N=3, rows=16, K=64, format="Q8_0", **more):
    return Case("product", {"rows": rows, "K": K, "format": format, "N": N, "activations": "fp32"} | more)


def of(op, parameters=ALL):
    return [x for x in study.cases(parameters) if x.op == op]


# cases, variants


def test_cases_are_distinct_and_survive_json():
    found = study.cases(ALL)
    assert {x.op for x in found} == {"product", "designs", "ffn", "routed", "cache"}
    assert len({(x.op, x.key) for x in found}) == len(found)
    for x in found:
        assert Case(x.op, json.loads(x.key)).key == x.key
    assert {(x["rows"], x["K"]) for x in of("product")} == {(17408, 5120), (5120, 17408), (9216, 2560), (2560, 9216)}
    assert {(x["model"], x["N"]) for x in of("ffn")} == {("Qwen3.5-27B", n) for n in (1, 8, 64)}
    assert {x["N"] for x in of("product") if x["rows"] == 9216} == {1, 8, 64}
    assert {(x["E"], x["top_k"], x["hidden"], x["width"]) for x in of("routed")} == {(256, 8, 2048, 512)}
    assert {(x["N"], x["capacity"]) for x in of("cache")} == {(1, 16), (1, 256), (64, 256)}
    assert len(of("cache")) == 3 + 1 + 1  # where all experts are kept, one trace is like any other
    assert {(x["rows"], x["format"], x["N"]) for x in of("designs")} == {
        (rows, format, n)
        for rows in (5120, 17408)
        for format, designed_at in {**dict.fromkeys(variants.K_FORMATS, (8, 16, 64)), "BF16": (1, 8, 64, 512)}.items()
        for n in designed_at
    }
    assert {x["policy"] for x in of("cache")} == {"slru"}
    many = of("cache", ALL | {"cache_tokens": [512], "capacities": [16, 240, 256]})  # every expert in every step
    assert [(x["trace"], x["policy"], x["capacity"]) for x in many] == [("uniform", "pinned", 240)]


def test_cases_that_share_weights_follow_each_other():
    groups = [(x["rows"], x["K"], x["format"]) for x in of("product")]
    runs = [group for group, before in zip(groups, [None, *groups], strict=False) if group != before]
    assert len(runs) == len(set(runs)) == 24


def test_an_empty_list_leaves_operations_out():
    for name, gone in (
        ("formats", {"product", "designs", "ffn"}), ("routed_formats", {"routed", "cache"}),
        ("routed_tokens", {"routed"}), ("cache_tokens", {"cache"}),
    ):  # fmt: skip
        study.STUDY.check(ALL | {name: []})
        assert {x.op for x in study.cases(ALL)} - {x.op for x in study.cases(ALL | {name: []})} == gone
    for bad in ({"formats": ["Q4_0"]}, {"tokens": [0]}, {"traces": ["real"]}, {"capacities": [300]}):
        with pytest.raises(ValueError, match="allowed: a list"):
            study.STUDY.check(ALL | bad)


def test_every_variant_of_every_case_has_a_function_that_takes_its_options():
    used = set()
    for x in (*study.cases(ALL), *study.STUDY.tiny):
        found = variants.of(x)
        assert study.STUDY.control(x) == found[0].name
        assert [one.role for one in found].count("ours") == 1
        for one in found:
            used.add((x.op, one.name))
            function = isolated.named(inspect.getclosurevars(one.prepare.func).nonlocals["target"])
            inspect.signature(function).bind(x, "cpu", 1, 0, **one.options)
            assert one.role in spec.ROLES
            assert one.mode == ("eager" if x.op == "cache" else "graph")
    assert used == {(op, one.name) for op, one in EVERY}


def names_of(x):
    return {one.name for one in variants.of(x)}


def test_slow_variants_are_left_out_where_many_tokens_are():
    assert variants.PER_TOKEN in names_of(product(8))
    assert variants.PER_TOKEN not in names_of(product(9))
    assert variants.GEMM_N in names_of(product(16))
    assert variants.GEMM_N not in names_of(product(17))
    assert variants.WIDE not in names_of(product(63))
    assert variants.WIDE in names_of(product(64))
    assert variants.GEMLITE in names_of(product(16, 17408, format="Q4_K"))
    assert variants.GEMLITE not in names_of(product(16, 5120, format="Q4_K"))
    assert variants.GEMLITE not in names_of(product(8, 17408, format="Q4_K"))
    assert variants.GEMLITE not in names_of(product(16, 17408, format="Q6_K"))
    assert variants.DEQUANTISED not in names_of(product(16, format="BF16"))
    assert variants.PER_TOKEN not in names_of(next(x for x in of("routed") if x["N"] == 512))


def test_variants_have_the_same_hash_where_the_same_functions_launch():
    hashes = {(op, one.name): kernel_sha(one.source) for op, one in EVERY}
    reads = {(op, variants.READ) for op in ("product", "designs", "routed")}
    again = (variants.INTEGERS, variants.WIDE, variants.MATRIX, variants.CUBLAS)
    twice = [{(op, name) for op in ("product", "designs")} for name in again]
    indexed = {("routed", variants.INDEXED), ("routed", variants.INDEXED_MATRIX)}  # one argument apart
    cached = {key for key in hashes if key[0] == "cache"}
    alike = (reads, indexed, cached, *twice)
    for same in alike:
        assert len({hashes[key] for key in same}) == 1
    assert len(set(hashes.values())) == len(hashes) - sum(len(same) - 1 for same in alike)


def test_a_hash_covers_what_runs_and_nothing_that_prepares_or_checks_it():
    kernels_of = {
        ("product", variants.MATRIX): "products:_tensor_core_kernel", ("product", variants.CUBLAS): "peers:linear",
        ("product", variants.DEQUANTISED): "ablations:_dequantise_kernel", ("ffn", variants.WIDE): "wide:_wide_kernel",
        ("routed", variants.INDEXED): "routed:_weighted_sum_kernel", ("cache", variants.NEEDED): "slots:Stream",
    }  # fmt: skip
    for op, one in EVERY:
        found = {re.sub(r"labkit\.(studies|kernels)\.\w+\.", "", name) for name in covered(one.source)}
        assert kernels_of.get((op, one.name), "") in {"", *found}
        assert not {one for one in found if re.match(r"(\w*trials|reference|study|formats:[a-z_])", one)}


# floors


def test_floor_of_a_product_by_hand():
    found = study.floor(product(3, 16, 64))
    assert found.set_bytes == 16 * 64 // 32 * 34  # as stored
    assert found.bytes == found.set_bytes + 3 * (16 + 64) * 4
    assert (found.flops, found.limit) == (2 * 3 * 16 * 64, "read")
    assert study.floor(product(1, 8, 256, "Q4_K")).set_bytes == 8 * 144  # not as packed


def test_floors_of_layers_by_hand():
    x = next(x for x in of("ffn") if (x["model"], x["format"], x["N"]) == ("Qwen3.5-27B", "BF16", 8))
    assert study.floor(x).set_bytes == 3 * 5120 * 17408 * 2
    assert study.floor(x).bytes == 3 * 5120 * 17408 * 2 + 8 * 2 * 5120 * 2
    one, many = (next(x for x in of("routed") if x["N"] == n) for n in (1, 512))
    expert = 3 * 2048 * 512 * 144 // 256
    assert study.floor(one).set_bytes == 8 * expert
    assert study.floor(many).set_bytes == 256 * expert
    assert study.floor(one).flops == 2 * 8 * 3 * 2048 * 512
    through = of("cache")[0]
    assert study.floor(through).set_bytes == 4 * 256 * expert
    assert study.floor(through).limit == ""


def test_buffer_sets_of_routed_experts_read_others():
    x = Case("routed", {"model": "t", "hidden": 32, "width": 32, "E": 8, "top_k": 2, "trace": "uniform", "N": 1,
                        "format": "Q8_0", "activations": "fp32"})  # fmt: skip
    seen = []

    def make(work, ids):
        assert work.ids.tolist() == ids
        seen.append(set(work.ids.flatten().tolist()))
        return lambda: None

    routed_trials._routed(x, "cpu", 2, 0, make)
    assert {(e + 4) % 8 for e in seen[0]} == seen[1]


def test_routing_is_of_the_case_alone_and_of_its_trace():
    x = of("routed")[1]
    ((ids,),) = work.routing(x)
    assert work.routing(x) == [[ids]]
    assert (len(ids), {len(set(chosen)) for chosen in ids}) == (8, {8})
    through = next(x for x in of("cache") if x["N"] == 64)
    steps = work.routing(through)
    trace = policies.uniform(64 * 32, 4, 256, 8, seed=64)
    assert (len(steps), work.steps(1), work.steps(8), work.steps(100)) == (32, 256, 32, 32)
    for step, layer, token in ((0, 0, 0), (0, 3, 63), (5, 2, 7)):
        assert steps[step][layer][token] == [expert for _, expert in trace[((step * 64) + token) * 4 + layer]]


def test_routed_experts_by_hand():
    one = torch.eye(2)
    silu = 1 / (1 + math.exp(-1))
    ffns = [(one, one, 2 * one), (one, one, 3 * one)]  # of [1, 0]: 2 or 3 times silu, and 0
    found = reference.routed(
        ffns, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0.5, 0.5], [1, 0]])
    )
    assert found.dtype == torch.float64
    assert found.tolist() == [pytest.approx([2.5 * silu, 0]), pytest.approx([0, 3 * silu])]


# trials on the CPU: libraries


def trial(x, name, sets=1):
    (variant,) = (one for one in variants.of(x) if one.name == name)
    return variant.prepare(x, "cpu", sets, 0)


@pytest.mark.parametrize(("form", "bytes_a_weight"), [("F32", 4), ("Q8_0", 34 / 32)])
def test_what_cublas_reads_is_not_what_is_stored(form, bytes_a_weight):
    """A rate above the memory's is refused: it is that of the bytes that move."""
    x = Case("product", dict(product().params) | {"format": form})
    moved = trial(x, variants.CUBLAS).moves
    size = trials.DTYPES[x["activations"]].itemsize
    assert moved == x["rows"] * x["K"] * size
    assert study.floor(x).bytes >= x["rows"] * x["K"] * bytes_a_weight


def test_cublas_is_right_and_its_weights_are_shared():
    first, second = (trial(product(n), variants.CUBLAS, sets=2) for n in (3, 5))
    for found in (first, second):
        found.poison()
        assert not found.written()
        for call in found.calls:
            call()
        assert found.written()
        assert found.check()["y"] <= found.tolerance["y"]
    assert len(trials.SHARED.parts) == 4  # packed and dense, once; what is expected, for each number of tokens
    trial(product(3, rows=24), variants.CUBLAS)
    assert trials.SHARED.owner == ("product", 24, 64, None, None, None, "Q8_0")


def test_the_code_of_one_case_is_taken_apart(monkeypatch):
    for x in of("product", FEW):
        small = Case("product", dict(x.params) | {"rows": 16, "K": 256})
        monkeypatch.setattr(variants, "DISSECTED", {"rows": 16, "format": "Q4_K", "N": 8})
        assert trial(small, variants.CUBLAS).dissect == ((x["format"], x["N"]) == ("Q4_K", 8))
    assert sum(x["rows"] == 17408 and (x["format"], x["N"]) == ("Q4_K", 8) for x in study.cases(ALL)
               if x.op == "product") == 1  # fmt: skip


def test_a_library_that_is_wrong_is_noticed(monkeypatch):
    monkeypatch.setattr(peers, "linear", lambda W, x, y: lambda: y.copy_(1.01 * x @ W.T))
    found = trial(product(), variants.CUBLAS)
    assert found.check()["y"] > found.tolerance["y"]


def test_a_whole_layer_of_a_library():
    x = next(x for x in study.STUDY.tiny if x.op == "ffn")
    found = trial(x, variants.CUBLAS)
    assert found.check()["y"] <= found.tolerance["y"]


class Gemlite:
    """Stands for gemlite: helper(device, dtype).from_weights(W_q, scales, zeros) is a layer of (W_q - zeros) scales."""

    def __init__(self, monkeypatch):
        self.tuned, self.seen, self.kept, self.taken = [], [], [], []
        helpers = ModuleType("gemlite.helper")
        helpers.A16W4_HQQ_INT = helpers.A16W8_HQQ_INT = self.helper
        library = ModuleType("gemlite")
        library.set_autotune = self.tuned.append
        library.cache_config, library.load_config = self.kept.append, self.taken.append
        monkeypatch.setitem(sys.modules, "gemlite", library)
        monkeypatch.setitem(sys.modules, "gemlite.helper", helpers)

    def helper(self, device, dtype):
        return SimpleNamespace(from_weights=self.layer)

    def layer(self, q, scales, zeros):
        self.seen.append((q.max().item(), scales.shape))
        W = (q.float().unflatten(1, (-1, 32)) - zeros[..., None]) * scales[..., None]
        return lambda x: x @ W.flatten(1).T


@pytest.mark.parametrize(("format", "most", "K"), [("Q4_K", 15, 256), ("Q8_0", 255, 64)])
def test_gemlite_is_called_as_it_asks_and_judged_by_its_own_weights(monkeypatch, tmp_path, format, most, K):
    library = Gemlite(monkeypatch)
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(paths, "DATA", tmp_path / "data")
    monkeypatch.setattr(peers.metadata, "version", {"gemlite": "9", "triton": "8"}.__getitem__)
    apart = []
    monkeypatch.setattr(trials.isolated, "call_many", apart.extend)
    monkeypatch.setattr(trials.host, "cores", lambda: 9)
    trials._tune.cache_clear()
    x = product(4, 16, K, format)
    found = trials.gemlite(x, "cpu", 2, 0)
    wanted = [
        (format, N, share, 2)  # more cores than numbers of tokens: each in two shares
        for share in range(2)
        for format in variants.GEMLITE_BITS
        for N in variants.GEMLITE_TOKENS
    ]
    assert [one.args for one in apart] == wanted  # compiled before it is tuned
    assert {one.target for one in apart} == {f"{trials.__name__}:{trials.tune_apart.__name__}"}
    assert found.check()["y"] <= 1e-5
    assert library.tuned == ["max"]
    file = tmp_path / "runs" / "none" / "gemlite-9-triton-8.tuning.json"
    assert (library.kept, library.taken) == ([str(file)], [])
    recorded = tmp_path / "data" / "none" / file.name
    for known in (recorded, file):  # another run takes over what is recorded, the next process what this one tuned
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text("{}")
        trials._tune.cache_clear()
        trials.gemlite(x, "cpu", 1, 0)
    assert library.taken == [str(recorded), str(file)]
    assert len(apart) == len(wanted)  # then nothing is left to compile
    assert library.seen == [(most, (16, K // 32))] * 4


def test_what_is_tuned_is_compiled_in_shares_of_which_none_is_forgotten():
    called = []
    for share in range(3):
        bench = trials._Share(share, 3)
        times = [bench(lambda config=config: called.append(config), quantiles=(0.5, 0.2)) for config in range(10)]
        assert {time for both in times for time in both} == {0.0, math.inf}
        assert [n for n, both in enumerate(times) if both == [0.0, 0.0]] == list(range(share, 10, 3))
    assert sorted(called) == list(range(10))


def test_triton_tunes_by_another_bench_while_it_is_asked_to(monkeypatch):
    driver = pytest.importorskip("triton.runtime").driver
    active = SimpleNamespace(get_benchmarker=lambda: "its own")
    monkeypatch.setattr(driver, "_active", active)
    with suppress(RuntimeError), peers.timed_by("another"):
        assert driver.active.get_benchmarker() == "another"
        raise RuntimeError
    assert driver.active.get_benchmarker() == "its own"


def test_grouped_mm_is_right():
    x = next(x for x in study.STUDY.tiny if x.op == "routed")
    bf16 = Case("routed", dict(x.params) | {"activations": "bf16", "N": 5})
    found = trial(bf16, variants.GROUPED_MM)
    assert found.check()["y"] <= 2 * found.tolerance["y"]  # it rounds each part once more
    assert found.facts()["alone"] >= 0


# tables, claims, views


def recorded(**changes):
    return made.batched_ffn(FEW, **changes)


@pytest.fixture(scope="module")
def rows():
    return recorded()


def test_times_are_beside_a_plain_read(rows):
    table = tables.times(rows, "product")
    line = table[(table["variant"] == variants.MATRIX) & (table["N"] == 8) & (table["rows"] == 17408)].iloc[0]
    assert line["% of reading"] == pytest.approx(100 / 1.3, rel=0.01)
    assert line["us a token"] == pytest.approx(line["us"] / 8)
    assert line["launches"] == 4
    assert {variants.READ, variants.SPLIT_K} & set(table["variant"]) == set()
    assert table[(table["variant"] == variants.STATIONARY) & (table["N"] == 64)]["passes"].unique().tolist() == [8]
    assert table[(table["variant"] == variants.MATRIX) & (table["N"] == 64)]["passes"].unique().tolist() == [2]
    assert table[table["variant"] == variants.CUBLAS]["passes"].isna().all()
    assert len(tables.times(rows.iloc[:0], "product")) == 0


def test_crossovers_by_hand(rows):
    table = tables.crossovers(rows)
    assert len(table) == 4
    assert set(table["matrix instructions from"]) == {8}
    assert set(table["multiply-add up to"]) == {4}


def test_the_price_of_bits_is_that_of_one_family(rows):
    table = tables.price(rows).set_index(["format", "rows", "N"])
    first = table.sort_index().loc[("BF16", 17408)]
    assert set(first["fastest"]) == {variants.STATIONARY, variants.MATRIX}  # made up: few tokens, and more
    assert first["price"].round(2).tolist() == [1.08, 1.08, 1, 1]
    assert (table["mixed price"] == 1).all()
    table = tables.price(scaled(rows, 0.25, variants.CUBLAS))
    assert (table["fastest"] == variants.CUBLAS).all()
    assert table[table["N"] == 4]["price"].max() == pytest.approx(1.3 / 0.5, rel=0.02)
    assert table[table["N"] == 4]["mixed price"].max() == pytest.approx(1.2 / 0.5, rel=0.02)


@pytest.mark.parametrize(("op", "against"), [("product", variants.CUBLAS), ("ffn", variants.CUBLAS)])
def test_a_library_stands_beside_one_family_of_bits(rows, op, against):
    """The fastest variant changes with N, what is compared does not; what the fastest would give stands beside it."""
    table = tables.beside(rows, op, against)
    assert set(table["fastest"]) > {variants.MATRIX}
    assert table["ratio"].tolist() == pytest.approx([2 / 1.3] * len(table), rel=0.01)
    few, many = table[table["N"] <= 4], table[table["N"] > 4]
    assert few["mixed ratio"].tolist() == pytest.approx([2 / 1.2] * len(few), rel=0.01)
    assert many["mixed ratio"].tolist() == many["ratio"].tolist()
    lost = tables.beside(scaled(rows, 0.62, against), op, against)  # between the two
    assert set(lost["verdict"]) == {"slower"}
    assert set(lost[lost["N"] <= 4]["mixed verdict"]) == {"faster"}
    without = rows[rows["variant"] != variants.MATRIX]
    assert tables.beside(without, op, against).empty


def test_the_headline_is_of_one_family_and_says_what_the_mixture_would_give(rows):
    lost = scaled(rows, 0.62, variants.CUBLAS)
    cases = len(tables.beside(rows, "product", variants.CUBLAS))
    assert views.summary(lost)["1 token"] == "1.05× slower; the fastest kernel in each case 1.03× faster"
    assert views.summary(lost)["64 tokens"] == "1.05× slower; the fastest kernel in each case 1.05× slower"
    assert f"tensor_core is slower in {cases} of {cases} cases" in views.against_cublas(lost).alt
    for draw in (views.against_cublas, views.layers):
        found = draw(lost)
        assert "tensor_core is slower in" in found.alt
        assert f"({tables.MIXED})" in found.caption
        assert {"mixed ratio", "mixed verdict"} <= set(found.table)


def test_gains_by_hand(rows):
    table = tables.gains(rows).groupby(["step", "N"])["ratio"].mean()
    assert table["one launch", 8] == pytest.approx(3.0 / 1.75, rel=0.01)
    assert table["weights read once", 4] == pytest.approx(1.75 / 1.2, rel=0.01)
    assert ("one launch", 64) not in table.index


def test_arithmetic_bounds_by_hand(rows):
    quiet = rows.assign(sm_mhz=[[1000] * len(one) for one in rows["samples_ns"]])
    table = tables.arithmetic(quiet)
    line = table[(table["format"] == "Q4_K") & (table["N"] == 8) & (table["rows"] == 17408)].iloc[0]
    assert line["instructions a weight"] == 1 + 3 / 8 + 8
    assert line["least µs"] == pytest.approx(9.375 * 17408 * 5120 / (132 * 128 * 1000))
    read = 1 + 17408 * 5120 * 144 / 256 / 3e6
    assert line["at most %"] == pytest.approx(100 * read / line["least µs"], rel=0.01)
    few = tables.arithmetic(quiet)
    assert few[(few["format"] == "BF16") & (few["N"] == 1)]["at most %"].unique().tolist() == [100.0]


def test_issue_slots_by_hand(rows):
    """Of the code that was timed, at the clock of the run; by hand for one case."""
    quiet = rows.assign(sm_mhz=[[1000] * len(one) for one in rows["samples_ns"]])
    cold = quiet[(quiet["op"] == "product") & (quiet["cache"] == "cold") & (quiet["variant"] == variants.MATRIX)]
    launches = cold[["op", "case", "variant", "kernel_sha"]].assign(instructions=1e6)
    launches = pd.concat([launches, launches])  # two launches a call
    table = tables.issued(quiet, launches)
    assert len(table) == len(cold)
    line = table[(table["format"] == "Q4_K") & (table["N"] == 8) & (table["rows"] == 17408)].iloc[0]
    assert line["instructions a weight"] == pytest.approx(32 * 2e6 / (17408 * 5120))
    assert line["issue µs"] == pytest.approx(2e6 / (132 * 4 * 1000))
    assert line["% of issue"] == pytest.approx(100 * line["issue µs"] / line["us"])
    assert tables.issued(quiet, launches.assign(kernel_sha="another")).empty
    assert set(views.issued(quiet, launches)["N"]) == {1, 8}


def test_gemlite_is_held_against_its_own_bytes(rows):
    table = tables.gemlite(rows)
    assert set(zip(table["format"], table["N"], strict=True)) == {("Q4_K", 1), ("Q4_K", 4), ("Q4_K", 64)}
    first = table[table["N"] == 1].iloc[0]
    assert first["fastest"] == variants.STATIONARY
    assert first["better"] == pytest.approx(2.0 / (0.625 / 0.5625) / 1.3, rel=0.01)
    assert first["mixed better"] == pytest.approx(2.0 / (0.625 / 0.5625) / 1.2, rel=0.01)


def test_bits_are_told_of_libraries_too(rows):
    table = tables.bits(rows).set_index(["op", "variant"])
    assert table.loc[("product", variants.MATRIX)].tolist() == ["ours", 12, 12]  # not those of one token
    assert table.loc[("product", variants.CUBLAS)].tolist() == ["library", 12, 0]
    assert table.loc[("product", variants.SPLIT_K)].tolist() == ["control", 8, 0]
    assert table.loc[("routed", variants.GROUPED_MM)].tolist() == ["library", 1, 0]
    libraries = table[table["who"] == "library"]["cases"].sum()
    ours = table[table["who"] == "ours"]["cases"].sum()
    wanted = {"kernels of this lab": f"{ours} of {ours}", "libraries": f"0 of {libraries}"}
    assert views.bits(rows) == wanted | {"control: sums by atomics": "0 of 8"}
    assert set(views.bits_by_variant(rows)["of"]) == {"this lab", "library", "control"}


def refused(rows, variant, reason, few=1):
    """The rows, the first few of a variant as they are after a check that failed: with what was found before it."""
    at = rows.index[(rows["variant"] == variant) & ~rows["case"].str.contains('"N": 1,')][:few]
    new = rows.copy()
    new.loc[at, "ok"], new.loc[at, "reason"] = False, reason
    return new


def test_a_variant_that_is_refused_since_its_bits_differ_counts(rows):
    wrong = "wrong: error of y 2.0e-02 (allowed 6e-03), alone 1.0e-02 (allowed 0e+00)"
    table = tables.bits(refused(rows, variants.MATRIX, wrong, few=2)).set_index(["op", "variant"])
    assert table.loc[("product", variants.MATRIX)].tolist() == ["ours", 12, 10]
    table = tables.bits(refused(rows, variants.MATRIX, "wrong: error of y 2.0e-02 (allowed 6e-03)"))
    assert table.set_index(["op", "variant"]).loc[("product", variants.MATRIX), "same"] == 12
    assert tables.differs("wrong: error of packed nan (allowed 0e+00)", "packed")


def test_reuse_is_that_of_the_facts():
    table = tables.reuse([8, 64, 512]).set_index("N")
    assert table["reuse, predicted"].round(1).tolist() == [1.1, 2.3, 16.0]
    assert table["reuse"].tolist() == pytest.approx(table["reuse, predicted"].tolist(), rel=0.1)


def test_hit_rates_are_those_of_the_policies():
    table = tables.hit_rates(["uniform", "local"], ["lru", "belady"], [16, 256], length=24)
    assert len(table) == 8
    whole = table.set_index(["trace", "policy", "capacity"])["hit rate"]
    assert whole["uniform", "belady", 16] > whole["uniform", "lru", 16]
    assert whole["local", "lru", 16] > whole["uniform", "lru", 16]
    together = tables.hit_rates(["uniform"], ["lru"], [16], tokens=24, length=24)
    assert (together["hit rate"].item(), together["bypassed"].item()) == (0.0, 1.0)  # no dispatch fits


def test_stalls_by_hand(rows):
    line = tables.cached(rows).iloc[0]
    assert line["stall, when needed"] == pytest.approx(160, rel=0.01)
    assert line["stall, prefetched"] == pytest.approx(60, rel=0.02)
    assert line["prefetched / larger"] == pytest.approx(160 / 150, rel=0.01)
    assert line["balanced"]
    assert line["hit rate"] == 0.25
    there = rows["evidence"].str.replace('"hit_rate": 0.25', '"hit_rate": 1.0')
    assert not tables.cached(rows.assign(evidence=there)).iloc[0]["balanced"]  # nothing is copied


def scaled(rows, factor, variant, op=None, noisy=False):
    """The rows with other times of a variant; noisy: of every other block the inverse."""
    new = rows.copy()
    at = (new["variant"] == variant) & ((new["op"] == op) if op else True)
    powers = [1, -1] if noisy else [1, 1]
    new.loc[at, "samples_ns"] = new.loc[at, "samples_ns"].map(
        lambda ns: [one * factor ** powers[i % 2] for i, one in enumerate(ns)]
    )
    return new


STORED = FEW | {"formats": ["Q8_0"], "tokens": [1, 8], "routed_formats": []}
LIBRARIES = (variants.CUBLAS, variants.DEQUANTISED, variants.GEMLITE, variants.GROUPED_MM, variants.LLAMA)


def judged(rows):
    return {claim.id: claim.judge(rows) for claim in claims.CLAIMS}


def words(rows, name):
    found = judged(rows)[name]
    return found.verdict, found.direction


CONSISTENT, DISAGREES, UNCLEAR = ("consistent", "holds"), ("disagrees", "fails"), ("unclear", "unclear")


def test_claims_are_judged_by_the_rows(rows):
    found = judged(rows)
    assert {name: one.verdict for name, one in found.items()} == {
        "bits": "consistent", "launches": "consistent", "reuse": "consistent", "reuse-mechanism": "disagrees",
        "packed": "not testable here", "packed-bits": "not testable here", "operations": "not testable here",
        "copies": "consistent", "fused-sum": "not testable here", "slots": "not testable here",
    }  # fmt: skip
    assert found["launches"].measured.startswith("1.71× faster in 4 cases")
    assert found["reuse"].measured.startswith("1.50× faster in 4 cases")
    for one in found.values():  # none of the source's own code ran, and its figures are of whole decodes and prefills
        assert one.code in ("", OURS)
        assert one.size in ("", "not comparable")


@pytest.mark.parametrize(
    ("name", "op", "variant", "against"),
    [
        ("launches", "product", variants.GEMM_N, variants.PER_TOKEN),
        ("reuse", "product", variants.STATIONARY, variants.PER_TOKEN),
        ("reuse-mechanism", "product", variants.STATIONARY, variants.GEMM_N),
        ("packed", "product", variants.PER_TOKEN, variants.STORED),
        ("copies", "routed", variants.INDEXED, variants.ROWCOPY),
    ],
)
def test_a_claim_of_times_comes_out_as_the_times_do(rows, name, op, variant, against):
    some = recorded_stored() if name == "packed" else rows
    table = tables.compared(some, op, variant, against)
    now = table[table["N"] == (1 if name == "packed" else 8)]["ratio"].mean()
    assert words(scaled(some, 1.3 / now, against, op), name) == CONSISTENT
    assert words(scaled(some, 0.7 / now, against, op), name) == DISAGREES
    assert words(scaled(some, 1 / now, against, op), name) == DISAGREES  # no gain is none
    assert words(scaled(scaled(some, 1.03 / now, against, op), 1.2, against, op, noisy=True), name) == UNCLEAR
    assert judged(some[some["variant"] != against])[name].verdict == "not testable here"


def recorded_stored(**changes):
    return made.batched_ffn(STORED, **changes)


def test_the_mechanism_is_judged_where_nothing_but_reading_is_saved(rows):
    packed = rows["case"].str.contains("Q4_K")
    slow = rows.copy()
    at = packed & (rows["variant"] == variants.GEMM_N)
    slow.loc[at, "samples_ns"] = slow.loc[at, "samples_ns"].map(lambda ns: [9 * one for one in ns])
    assert words(slow, "reuse-mechanism") == DISAGREES  # as before: Q4_K does not count
    assert words(rows[~packed], "reuse-mechanism") == DISAGREES
    assert judged(rows[packed])["reuse-mechanism"].verdict == "not testable here"
    bare = made.batched_ffn(FEW | {"formats": ["F32"], "tokens": [8], "routed_formats": []})
    assert words(scaled(bare, 2, variants.GEMM_N), "reuse-mechanism") == CONSISTENT


def test_one_differing_bit_disagrees_and_libraries_that_never_differ_show_nothing(rows):
    assert words(rows, "bits") == CONSISTENT
    assert words(recorded(**{variants.GEMM_N: {"alone": 1e-9}}), "bits") == DISAGREES
    assert words(refused(rows, variants.MATRIX, "wrong: error of alone 1.0e-02 (allowed 0e+00)"), "bits") == DISAGREES
    same = {name: {"alone": 0.0} for name in LIBRARIES}
    assert words(recorded(**same), "bits") == UNCLEAR  # though the lab's own control of atomics differs
    assert words(recorded(**same, **{variants.GEMM_N: {"alone": 1e-9}}), "bits") == DISAGREES
    assert words(recorded(**{variants.PER_TOKEN: {"alone": 1e-9}}), "bits") == CONSISTENT  # the loop is not batched
    alone = rows[rows["variant"] == variants.PER_TOKEN]
    assert judged(alone)["bits"].verdict == "not testable here"


def test_bits_of_q8_0_both_ways():
    some = recorded_stored()
    assert words(some, "packed-bits") == CONSISTENT
    assert words(recorded_stored(**{name: {"alone": 0.0} for name in LIBRARIES}), "packed-bits") == UNCLEAR
    for reason, found in (("packed 1.0e-02 (allowed 0e+00)", DISAGREES), ("y 2.0e-02 (allowed 6e-03)", CONSISTENT)):
        one = some.copy()
        at = one.index[one["variant"] == variants.STORED][:1]
        one.loc[at, "ok"], one.loc[at, "reason"] = False, f"wrong: error of {reason}"
        assert words(one, "packed-bits") == found
    gone = made.unusable(some, some["variant"] == variants.STORED)
    assert judged(gone)["packed-bits"].verdict == "not testable here"


def cached(hits, traces=("zipf", "local"), capacity=16):
    """Rows of steps through the cache, with these hit rates."""
    few = FEW | {"formats": [], "routed_tokens": [], "traces": list(traces), "capacities": [capacity]}
    table = made.batched_ffn(few)
    for trace, rate in zip(traces, hits, strict=True):
        at = table["case"].str.contains(f'"trace": "{trace}"')
        table.loc[at, "evidence"] = json.dumps({"hit_rate": rate})
    return table


def test_slots_are_judged_where_any_policy_can_hit():
    assert words(cached([0.6, 0.7]), "slots") == CONSISTENT
    assert words(cached([0.3, 0.4]), "slots") == DISAGREES
    assert words(cached([0.3, 0.7]), "slots") == UNCLEAR
    assert words(cached([0.06, 0.6, 0.7], ("uniform", "zipf", "local")), "slots") == CONSISTENT
    assert "60 %: hit rate" in judged(cached([0.6], ("zipf",)))["slots"].measured
    for none in (cached([0.9], ("uniform",)), cached([0.9, 0.9], capacity=64), cached([math.nan, math.nan])):
        assert judged(none)["slots"].verdict == "not testable here"
    x = next(x for x in of("cache", ALL | {"cache_tokens": [1]}) if x["trace"] == "uniform" and x["capacity"] == 16)
    assert tables.oracle(dict(x.params)) < claims.MOST_HIT


def test_what_slots_hit_is_arithmetic_as_the_page_says():
    """No GPU has a part in it: a replay of the same traces hits as often as every recorded step did."""
    (claim,) = (one for one in claims.CLAIMS if one.id == "slots")
    files = sorted(paths.DATA.glob("*/batched_ffn.parquet"))
    recorded_rows = [read(file) for file in files]
    assert len({claim.judge(some).measured for some in recorded_rows}) == 1
    assert "arithmetic" in claim.note
    found = {}
    for params, group in tables.cases(recorded_rows[0], "cache"):
        if (params["N"], params["policy"], params["capacity"]) == (1, variants.POLICY, 16):
            x = Case("cache", params)
            trace = [[(n, e) for e in tables.distinct(ids)] for step in tables.routing(x) for n, ids in enumerate(step)]
            once, twice = (policies.replay(x["policy"], 16 * x["layers"], some) for some in (trace, 2 * trace))
            line = group[group["variant"] == variants.NEEDED].iloc[0]
            found[params["trace"]] = (twice.since(once).hit_rate, json.loads(line["evidence"])["hit_rate"])
    assert set(found) == {"uniform", "zipf", "local"}
    assert all(replayed == seen for replayed, seen in found.values())


def test_what_cannot_be_tested_says_why_and_every_claim_is_of_the_source(rows):
    untested = {claim.id for claim in claims.CLAIMS if claim.observe is None}
    assert untested == {"operations", "fused-sum"}
    for claim in claims.CLAIMS:
        assert claim.ruled
        assert claim.url.startswith("https://github.com/pekkah/SharpInference")
        file = claim.url.rpartition("/")[2]
        assert claim.source == ("SharpInference, issue 121" if "issues/121" in claim.url else f"SharpInference, {file}")
        assert claim.judge(rows).why
        assert claim.observe is None or claim.differs


def test_a_readers_function_is_judged_by_what_it_was_given():
    def right(blocks, x, y):
        y.copy_(x @ formats.dequantise(blocks, "Q8_0").T)

    def spoils(blocks, x, y):
        for one in (blocks, x, y):
            one.zero_()

    x = product(3)
    for function, ok in ((right, True), (spoils, False)):
        found = study.STUDY.added.prepare(function, x, "cpu", 2, 0)
        assert (found.check()["y"] <= found.tolerance["y"]) == ok
    assert trial(x, variants.CUBLAS).check()["y"] <= 1e-5  # nothing that others share was spoilt


def test_claims_are_not_testable_without_rows(rows):
    for some in (rows, recorded_stored(), cached([0.6, 0.7])):
        for bad in (some.iloc[:0], made.unusable(some), made.processes(some, 2)):
            assert {one.verdict for one in judged(bad).values()} == {"not testable here"}


def test_f32_may_be_recorded_or_not(rows):
    with_f32 = made.batched_ffn(FEW | {"formats": ["F32", "Q4_K"]})
    for tell in ANSWERS:
        assert "nan" not in "".join(tell(with_f32).values())
    assert set(tables.beside(with_f32, "product", variants.CUBLAS)["format"]) == {"F32", "Q4_K"}
    assert {one.verdict for one in judged(with_f32).values()} <= {"consistent", "disagrees", "not testable here"}
    assert "F32" in views.choices(["F32", "Q4_K"], [1, 8])["format"].str.cat()  # from rules, whatever is recorded
    assert "F32" not in "".join(views.price(rows).values())


DRAWINGS = (views.time_per_token, views.other_formats, views.read_percent, views.multiply_add_percent, views.gains)
DRAWINGS += (views.dequantised, views.layers, views.routed, views.grouped_mm, views.stall, views.against_cublas)
DRAWINGS += (views.integers, views.integers_percent, answer.hero)
TABLES = (views.launches, views.arithmetic, views.specialised, tables.crossovers, tables.bits, views.bits_by_variant)
ANSWERS = (views.bars, views.bits, views.price, views.gemlite, views.failures, views.losses, views.overlap)
ANSWERS += (views.summary, views.routed_integers, views.cache_costs)


def test_every_view_says_what_the_rows_say(rows):
    for draw in DRAWINGS:
        found = draw(rows)
        assert found.fig.axes, draw
        assert len(found.table)
        assert "nan" not in found.alt + found.caption
    for tell in ANSWERS:
        found = tell(rows)
        assert found, tell
        assert "nan" not in "".join(found.values())
        assert max(len(text.split()) for text in found.values()) <= 20
    there = "There, time with prefetch over the longer of the two, 1 token"
    assert views.overlap(rows)[there] == "1.07"
    assert list(views.cache_costs(rows).values()) == ["2.6× slower (uniform, 1 token, 16 experts a layer)"]
    clocked = rows.assign(sm_mhz=[[1000] * len(one) for one in rows["samples_ns"]])
    for tell in TABLES:
        assert len(tell(clocked)), tell
    shown = views.launches(rows).set_index("N")
    assert shown.loc[64, variants.STATIONARY] == "4, 8"  # launches as recorded, eight tokens at a time
    assert shown.loc[64, variants.PER_TOKEN] == ""


def test_specialised_warps_are_set_against_the_fastest_other_kernel_and_cublas(rows):
    table = views.specialised(rows)
    assert set(table["against"]) == {variants.INTEGERS, variants.WIDE, variants.CUBLAS}
    assert set(table["tokens"]) == {8, 64}
    assert set(table["format"]) <= set(variants.K_FORMATS)
    own, library = table[table["against"] != variants.CUBLAS], table[table["against"] == variants.CUBLAS]
    said = views.specialised_said(rows)
    assert said.startswith(f"Specialised warps are {verdict.counted(own['verdict'])} of {len(own)} cases.")
    assert f"Than cuBLAS in bf16 they are {verdict.counted(library['verdict'])} of {len(library)} cases." in said
    assert views.specialised_said(rows.iloc[:0]) == "Specialised warps were not timed on this GPU."


def test_continued_sums_are_set_against_wide_tiles_and_cublas():
    rows = made.batched_ffn(FEW | {"formats": ["BF16"], "tokens": [1, 512], "routed_formats": []})
    table = views.continued(rows)
    assert set(table["tokens"]) == {1, 512}
    many = table[table["tokens"] == 512]
    assert list(many["against"]) == [variants.WIDE, variants.CUBLAS] * 2
    assert set(table["format"]) == {"BF16"}
    said = views.continued_said(rows)
    assert said.startswith("Continued sums against the fastest other kernel of the lab: ")
    assert said.count(" at 1 token") == said.count(" at 512 tokens") == 2
    assert views.continued_said(rows.iloc[:0]) == "Continued sums were not timed on this GPU."


def test_every_view_is_a_sentence_or_nothing_without_rows(rows):
    for some in (rows.iloc[:0], made.unusable(rows)):
        for draw in DRAWINGS:
            assert isinstance(draw(some), str), draw
        for tell in ANSWERS:
            if tell is not views.bits or some.empty:  # bits that were looked at count, whatever became of the times
                assert tell(some) == {}, tell
    for tell in TABLES:
        assert len(tell(rows.iloc[:0])) == 0, tell


# the first screen


def told(**rows):
    facts = {gpu: found for gpu, some in rows.items() if (found := answer.facts(some))}
    return answer.conclusion(facts), answer.advice(facts)


def test_the_answer_says_what_batching_saves_and_up_to_where(rows):
    conclusion, advice = told(H100=rows, H200=rows)
    cases = answer.facts(rows)["cases"]
    all_of = f"{cases} of {cases} cases"
    assert conclusion == (
        f"Outputs are bit-identical to each token alone (H100: {all_of}, H200: {all_of}). On the H100, with 8 "
        "tokens and quantised weights, one launch instead of a loop is 1.71× faster on average. Reading each weight "
        "once makes that 1.14× slower: 1.50× faster in all. On the H200: 1.71× faster, then 1.14× slower, in all "
        "1.50× faster."
    )
    assert advice == (
        "Up to 64 tokens, unpack weights in a tensor-core kernel (tensor_core, bit-identical). At 64 "
        "tokens it is 1.54× (H100) and 1.54× faster (H200) than cuBLAS in bf16."
    )
    assert {claim.id for claim in claims.CLAIMS} > set(answer.HEADLINE)


def test_the_answer_changes_with_the_rows(rows):
    bytes_save = scaled(rows, 3, variants.GEMM_N)
    assert (
        "loop is 1.75× slower on average. Reading each weight once makes that 2.63× faster: "
        in told(H100=bytes_save)[0]
    )
    assert told(H100=rows, H200=scaled(rows, 3, variants.PER_TOKEN))[0].endswith(" in all 4.50× faster.")
    differ = told(H100=rows, H200=recorded(**{variants.GEMM_N: {"alone": 1e-9}}))[0]
    assert differ.startswith("Outputs may not be bit-identical to each token alone (H100: ")
    found = answer.facts(recorded(**{variants.GEMM_N: {"alone": 1e-9}}))
    assert f"H200: {found['same']} of {found['cases']} cases)" in differ
    assert 0 < found["same"] < found["cases"] == answer.facts(rows)["cases"]
    many = at_tokens(rows, 0.5, variants.CUBLAS, 64)
    assert told(H100=many)[1].startswith("Up to 8 tokens, ")
    assert told(H100=many)[1].endswith(
        " At 64 tokens it is 1.30× slower (H100): then dequantise and use cuBLAS, if bf16 fits; bits may change."
    )
    ahead = at_tokens(many, 0.1, variants.SPECIALISED, 64)
    assert " bits may change. There specialised warps (K formats) are 6.67× faster (H100)." in (told(H100=ahead)[1])
    kept = at_tokens(recorded(**{variants.CUBLAS: {"alone": 0.0}}), 0.5, variants.CUBLAS, 64)
    assert told(H100=kept)[1].endswith("use cuBLAS, if bf16 fits.")
    assert (
        "tensor-core kernel (tensor_core). At 64 tokens it is 1.54× faster (H100) than cuBLAS in bf16."
        in told(H100=recorded(**{variants.MATRIX: {"alone": 1e-9}}))[1]
    )
    more = at_tokens(many, 0.5, variants.CUBLAS, 8)
    assert "Up to 8 tokens (H100) or 4 tokens (H200), " in told(H100=many, H200=more)[1]
    assert "At 64 tokens (H100) or 8 tokens (H200) it is " in told(H100=many, H200=more)[1]
    slow = told(H100=scaled(rows, 0.1, variants.CUBLAS))[1]
    assert slow.startswith("At 1 token tensor_core is ")
    assert "slower (H100) than cuBLAS in bf16: then dequantise and use cuBLAS" in slow
    assert told(H100=rows[rows["variant"] != variants.CUBLAS])[1] == ""


def at_tokens(rows, factor, variant, N):
    """The rows with other times of a variant at one number of tokens."""
    some = rows["case"].str.contains(f'"N": {N}[,}}]')
    return scaled(rows[some], factor, variant).combine_first(rows)[rows.columns]


def test_no_sentence_of_the_answer_is_long(rows):
    many = at_tokens(rows, 0.5, variants.CUBLAS, 64)
    for some in ({"H100": rows, "H200": many}, {"H100": scaled(rows, 3, variants.GEMM_N), "H200": rows}):
        conclusion, advice = told(**some)
        for said, words in ((conclusion, 65), (advice, 65)):
            assert 0 < len(said.split()) <= words
            assert max(len(sentence.split()) for sentence in said.split(". ")) <= 30


def test_without_rows_there_is_no_answer(rows):
    for some in (rows.iloc[:0], made.unusable(rows), rows[rows["variant"] != variants.GEMM_N]):
        assert answer.facts(some) == {}
    assert (answer.conclusion({}), answer.advice({})) == ("", "")


def test_the_first_figure_says_which_change_pays_more(rows):
    found = answer.hero(rows)
    assert found.options["title"] == "One launch saves more time than reading weights once (8 tokens)"
    found = answer.hero(scaled(rows, 3, variants.GEMM_N))
    assert found.options["title"] == "Reading weights once saves more time than one launch (8 tokens)"
    means = found.data.set_index(["change", "format"])["ratio"].unstack()
    facts = answer.facts(scaled(rows, 3, variants.GEMM_N))
    assert list(means[answer.ALL].reindex(answer.STEPS.values())) == [facts["launch"], facts["reads"]]
    assert (found.data["least"] <= found.data["ratio"]).all()
    assert (found.data["ratio"] <= found.data["most"]).all()


def test_views_that_need_no_gpu():
    assert {x["N"] for x in views.floor_cases(study.cases(FEW))} == set(FEW["tokens"])
    assert views.floor_cases([]) == []
    chosen = views.choices(["Q8_0", "Q4_K", "Q5_K"], [1, 2, 8, 64])
    matrix = chosen[(chosen["variant"] == variants.MATRIX) & (chosen["rows"] == 17408)]
    wanted = [[1, 1, "Q8_0, Q4_K, Q5_K"], [64, 2, "Q8_0, Q4_K, Q5_K"]]
    assert matrix[["N from", "passes", "format"]].values.tolist() == wanted
    assert "predicted 1.1" in views.reuse([1, 8]).caption
    found = views.hit_rates(["local"], ["lru", "slru", "belady"], [16, 64], length=16)
    assert "16 experts a layer" in found.caption
    assert "belady)" not in found.caption


def test_losses_are_told(rows):
    cases = len(tables.beside(rows, "product", variants.CUBLAS)) // 2
    assert views.losses(rows) == {"BF16": f"0 of {cases}", "Q4_K": f"0 of {cases}"}
    faster = at_tokens(rows, 0.25, variants.CUBLAS, 64)
    assert views.losses(faster)["Q4_K"] == f"2 of {cases}, from 64 tokens on, at most 2.60×"
    assert (
        views.failures(faster)["Cases in which bf16 cuBLAS is faster, quantised"] == f"2 of {cases}, from 64 tokens on"
    )


@pytest.mark.parametrize("N", [1, 8, 9, 16, 17, 32, 33, 100])
def test_integers_ask_for_all_weights_once_a_tile_of_their_rule(N):
    params = {"rows": 17408, "K": 5120, "format": "Q4_K", "N": N}
    assert tables.passes(variants.INTEGERS, params) == -(-N // integers.rule(N).tokens)


def test_bars_name_the_worst_of_each_family(rows):
    found = views.bars(rows)
    assert found["weight_stationary, up to 2 tokens"] == "0 of 4 cases below"
    # matrix instructions are made up at 77 % of a plain read, integers at 67 %
    assert "12 of 12 cases below, the least 77 % (" in found["tensor_core, up to 8 tokens"]
    assert "6 of 6 cases below, the least 67 % (Q4_K" in found["tensor_core, integers, up to 8 tokens"]
    assert len(views.bars(rows[rows["variant"] != variants.INTEGERS])) == 2


def test_the_control_repeats_ours():
    assert run.with_control(study.STUDY, of("product", FEW)[0])[-1].options["repeats"] == variants.MATRIX


# what is compiled


def launches_of(matrix):
    """Routed experts of the real size, in Q4_K: sort, gate and up, down, and the weighted sum."""
    blocks = [
        torch.zeros((2, n, k // 256 * 144), dtype=torch.uint8) for n, k in ((512, 2048), (512, 2048), (2048, 512))
    ]
    ids, x = torch.zeros((64, 8), dtype=torch.int32), torch.zeros((64, 2048), dtype=torch.bfloat16)
    work = routed.Work.of(x, ids, torch.zeros((64, 8)), 512)
    slots = torch.zeros(256, dtype=torch.int32)
    made = routed.grouped_indexed(experts.pack(*blocks, "Q4_K"), slots, work, matrix=matrix)
    return [*made, routed.weighted_sum(work)]


@pytest.mark.parametrize("matrix", [False, True])
def test_routed_kernels_spill_nothing_and_load_16_bytes(matrix):
    for launch in launches_of(matrix):
        found = compiled_once.evidence(launch, 90)
        assert found["spill_bytes"] == 0
        if "grouped" in launch.kernel.fn.__name__:
            assert "128" in found["loads"]
            assert bool(found["matrix"]) == matrix


@pytest.mark.parametrize("N", [64, 512])
def test_routed_kernels_of_integers_spill_nothing(N):
    [x] = [x for x in of("routed") if x["N"] == N]
    with offline.offline(90):
        _, *both, _ = ahead.launches(x.op, x.params, variants.INDEXED_INTEGERS)  # between the sort and the sum
    assert len(both) == 2
    for launch in both:
        found = compiled_once.evidence(launch, 90)
        assert found["spill_bytes"] == 0
        assert "128" in found["loads"]
        assert all("HMMA" in instruction for instruction in found["matrix"])
        assert found["matrix"]


def code(launch):
    plain = {name: value for name, value in launch.args.items() if not isinstance(value, torch.Tensor)}
    return launch.kernel.fn.__name__, launch.grid, launch.options, plain


def test_what_is_compiled_ahead_is_what_is_launched():
    """Of every operation and variant, at the real sizes: the same kernel with the same constants and options."""
    few = FEW | {"formats": ["Q4_K"], "tokens": [1, 8, 64]}
    found = ahead.sources(study.cases(few), 90, "")
    made_ = [one for source in found for one in compiled.launch_of(source, 90)]
    assert len({launch.kernel.fn.__name__ for launch in made_}) == 15
    assert len(found) == len(made_) == len({json.dumps(source) for source in found})
    W = formats.pack(torch.zeros((8, 5120 // 256 * 144), dtype=torch.uint8), "Q4_K")
    x, y = (torch.zeros((8, size), dtype=torch.bfloat16) for size in (5120, 17408))
    with offline.offline(90):
        wanted = products.tensor_core(dataclasses.replace(W, rows=17408), x, y)
    assert code(wanted) in [code(launch) for launch in made_]
    assert len(found) < 70


def test_what_compiles_longest_is_begun_first():
    few = FEW | {"formats": ["F32", "Q6_K", "Q5_K"], "tokens": [1, 8], "models": FEW["models"][:1]}
    found = [
        source[1]["params"]["format"]
        for source in ahead.sources(study.cases(few), 90, "")
        if source[1]["op"] != "routed"
    ]
    assert found == sorted(found, key=["Q5_K", "Q4_K", "Q6_K", "F32"].index)
    assert list(dict.fromkeys(found)) == ["Q5_K", "Q6_K", "F32"]


def test_what_is_compiled_ahead_is_launched_by_trials_with_memory(monkeypatch):
    """On tensors without memory a trial launches what it launches on others, in the same order."""
    for x in study.STUDY.tiny:
        for one in variants.of(x) if x.op != "cache" else ():
            if one.name in ahead.LIBRARIES:
                continue
            found, call = [], one.prepare(x, "cpu", 1, 0).calls[0]
            with monkeypatch.context() as patched:
                patched.setattr(Launch, "__call__", lambda launch, found=found: found.append(launch))
                call()
            assert list(map(code, ahead.launches(x.op, x.params, one.name))) == list(map(code, found))


@pytest.mark.gpu
def test_sums_by_atomics_have_other_bits():
    """The control of the comparison; in the interpreter programs run one after the other, and add in one order."""
    x = product(4, rows=2048, K=8192, format="Q8_0")  # few sums, of few programs, come in one order
    found = trials.split_k(x, "cuda", 1, 0)
    assert found.check()["y"] < found.tolerance["y"]
    assert found.facts()["alone"] > 0.01
