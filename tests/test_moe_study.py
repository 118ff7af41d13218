"""The study of expert layers: cases, floors and choices by hand; tables, claims and views on made-up times."""

import dataclasses
import inspect
import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import compiled_once
import numpy as np
import pandas as pd
import pytest
import rows as made
import torch
from missing import NO_NVCC, NO_SOURCES, sources_missing

from labkit import paths, sources
from labkit.bench import records, verdict
from labkit.bench.claim import OURS, OWN
from labkit.bench.spec import CONTROL, ROLES, Case
from labkit.evidence import compiled
from labkit.kernels import offline
from labkit.kernels.experts import blocks as experts_blocks
from labkit.kernels.experts import choose
from labkit.kernels.experts.choose import Choice, TileChoice
from labkit.kernels.launch import Launch
from labkit.report.words import faster
from labkit.sources import building
from labkit.studies.moe_persistent_grid import (
    ahead,
    answer,
    claims,
    explore,
    green_context,
    grid_views,
    humming,
    study,
    tables,
    trials,
    variants,
    views,
    vllm,
    waves,
    work,
)
from labkit.studies.moe_persistent_grid.models import DEEPSEEK, MIXTRAL, MODELS, QWEN3_30B, QWEN35_35B
from labkit.studies.moe_persistent_grid.variants import KINDS
from labkit.sweep import run

NAME = "moe_persistent_grid"
ALL = {
    "models": [QWEN3_30B.name, QWEN35_35B.name, MIXTRAL.name], "tokens": [1, 16, 128, 1642, 4096],
    "weights": ["bf16", "INT4"], "routings": ["uniform", "zipf 1", "one expert"],
    "gemms": [QWEN35_35B.name, MIXTRAL.name], "gemm_tokens": [16, 128, 1642], "wave_tokens": [352, 720],
}  # fmt: skip
FEW = ALL | {  # around the source's point
    "models": [QWEN3_30B.name], "tokens": [16, 4096], "routings": ["uniform"], "gemms": [QWEN35_35B.name],
    "gemm_tokens": [128, 1642], "wave_tokens": [352],
}  # fmt: skip
SOURCE = FEW | {"models": [QWEN35_35B.name], "tokens": [16, 1642], "weights": ["INT4"]}  # its own layer
CTAS = 7  # of a product, on an SM of the made-up GPU
SMS = 132


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Few resamples, for speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdict, "RESAMPLES", 100)
        yield


def case(op="layer", model=QWEN3_30B, T=128, weights="bf16", routing="uniform"):
    shape = {"T": T, "routing": routing, "weights": weights, "activations": "bf16"}
    return Case(op, model.as_dict() | shape)


# cases


def test_cases_are_distinct_and_survive_json():
    found = study.cases(ALL)
    study.STUDY.check(ALL)
    assert {x.op for x in found} == {"tune", "layer", "gemm1", "gemm2", "designs", "waves"}
    assert len({(x.op, x.key) for x in found}) == len(found)
    for x in found:
        again = Case(x.op, json.loads(x.key))
        assert again.key == x.key
        assert work.floor(again) == work.floor(x)
        assert set(x.params) == {"model", "E", "H", "I", "top_k", "T", "routing", "weights", "activations"}
    assert [study.STUDY.early(x) for x in found] == [x.op == "tune" for x in found]
    tuned = {x.key for x in found if x.op == "tune"}
    assert tuned == {x.key for x in found if x.op == "layer" and x["routing"] == "uniform"}


def test_skewed_routings_are_timed_where_they_are_asked_for():
    found = [x for x in study.cases(ALL) if x.op == "layer"]
    skewed = {(x["model"], x["T"]) for x in found if x["routing"] != "uniform"}
    assert skewed == {(model, t) for model in study.SKEWED for t in study.SKEWED_AT}
    assert {x["routing"] for x in found} == set(ALL["routings"])
    uniform = {(x["model"], x["T"], x["weights"]) for x in found if x["routing"] == "uniform"}
    assert len(uniform) == 3 * 5 * 2


def test_empty_lists_leave_the_grids_out():
    none = ALL | {"gemms": [], "wave_tokens": []}
    study.STUDY.check(none)
    assert {x.op for x in study.cases(none)} == {"tune", "layer"}
    only = study.cases(ALL | {"models": [QWEN3_30B.name], "gemms": [DEEPSEEK.name]})
    assert {x["model"] for x in only if x.op == "layer"} == {QWEN3_30B.name}
    assert {x["model"] for x in only if x.op == "gemm1"} == {DEEPSEEK.name}
    for bad in ({"models": ["GPT-2"]}, {"tokens": [0]}, {"weights": ["fp8"]}, {"routings": []}, {"models": []}):
        with pytest.raises(ValueError, match="allowed"):
            study.STUDY.check(ALL | bad)


def test_shapes_are_those_of_the_published_models():
    found = {m.name: (m.experts, m.hidden, m.width, m.top_k) for m in MODELS.values()}
    assert found["Qwen3-30B-A3B"] == (128, 2048, 768, 8)
    assert found["Mixtral-8x7B"] == (8, 4096, 14336, 2)
    assert found["DeepSeek-V3"] == (256, 7168, 2048, 8)
    # The routed experts are most of a model's parameters; layers from the model cards.
    for model, layers, parameters in ((QWEN3_30B, 48, 30.5e9), (MIXTRAL, 32, 46.7e9)):
        routed = layers * 3 * model.experts * model.hidden * model.width
        assert routed == pytest.approx(parameters, rel=0.06)


# floors


def test_floor_of_one_token_by_hand():
    x = case(T=1)
    weights = 8 * 3 * 2048 * 768 * 2
    assert work.active(x) == 8
    assert work.floor(x).bytes == weights + 2 * 2048 * 2
    assert (work.floor(x).set_bytes, work.floor(x).limit) == (weights, "read")
    assert work.floor(x).flops == 2 * 8 * 3 * 2048 * 768
    int4 = case(T=1, weights="INT4")
    assert work.weight_bytes(int4) == weights // 4 + 8 * 3 * 2048 * 768 // 128 * 2  # a nibble, and a scale for 128
    gemm1, gemm2 = case("gemm1", T=1), case("gemm2", T=1)
    assert work.weight_bytes(gemm1) == 2 * work.weight_bytes(gemm2) == 2 * weights // 3
    assert work.floor(gemm1).bytes == work.weight_bytes(gemm1) + 2 * (2048 + 8 * 768)
    assert work.floor(gemm2).bytes == work.weight_bytes(gemm2) + 2 * 8 * (768 + 2048)
    assert work.floor(gemm1).flops + work.floor(gemm2).flops == work.floor(x).flops


@pytest.mark.parametrize("weights", study.WEIGHTS)
@pytest.mark.parametrize("tokens", [1, 128, 16384])
def test_no_candidate_does_less_than_the_floor_it_is_refused_by(tokens, weights):
    gemms = [work.floor(case(op, T=tokens, weights=weights)) for op in ("gemm1", "gemm2")]
    tune = work.floor(case("tune", T=tokens, weights=weights))
    assert tune.bytes <= min(one.bytes for one in gemms)
    assert tune.flops == min(one.flops for one in gemms)
    assert tune.set_bytes == min(one.set_bytes for one in gemms)


def test_only_experts_that_got_a_token_are_counted():
    assert work.active(case(T=4096)) == 128
    assert work.active(case(T=4096, routing="one expert")) == 1
    for model in MODELS.values():  # few tokens: the draw is a typical one
        for tokens in (16, 128):
            expected = model.experts * (1 - (1 - model.top_k / model.experts) ** tokens)
            assert work.active(case(model=model, T=tokens)) == pytest.approx(expected, rel=0.02)
    assert sum(work.counts_of(case(T=16, routing="zipf 1"))) == 16 * 8
    assert work.active(case(T=128, routing="zipf 1.5")) < work.active(case(T=128))


def test_many_tokens_are_bound_by_products():
    """A Qwen3-30B layer has enough of them for an H100 from about 4260 tokens on, Mixtral's from about 1060."""
    for model, least in ((QWEN3_30B, 4260), (MIXTRAL, 1060)):
        limits = {t: work.floor(case(model=model, T=t)).limit for t in (least // 2, 2 * least)}
        assert list(limits.values()) == ["read", "bf16"]
    assert work.floor(case("waves", routing="one expert", T=720)) == work.floor(
        case("gemm1", routing="one expert", T=720)
    )


def test_floors_are_the_bytes_of_the_tensors():
    x = Case("layer", study.STUDY.tiny[0].params)
    [item] = trials.inputs(x, "cpu", 1, 0)
    experts = item.ids.unique().long()
    moved = sum(w[experts].numel() * w.element_size() for w in (item.w1, item.w2))
    assert work.weight_bytes(x) == moved
    assert work.floor(x).bytes == moved + 2 * item.x.numel() * item.x.element_size()
    x = Case("layer", dict(x.params) | {"weights": "INT4"})
    [item] = trials.inputs(x, "cpu", 1, 0)
    parts = [part[experts] for w in (item.w1, item.w2) for part in w]
    assert work.weight_bytes(x) == sum(part.numel() * part.element_size() for part in parts)


def test_buffer_sets_send_tokens_to_other_experts_and_as_many():
    x = Case("layer", dict(case(T=1).params) | {"H": 128, "I": 128, "activations": "fp32", "weights": "fp32"})
    items = trials.inputs(x, "cpu", 4, 0)
    experts = [set(item.ids.flatten().tolist()) for item in items]
    assert {len(some) for some in experts} == {8}
    assert len(set.union(*experts)) > 24
    assert len({item.w1.data_ptr() for item in items}) == 1
    assert experts[0] == set(np.flatnonzero(work.counts_of(x)))
    assert torch.equal(items[0].weights, items[0].weights.bfloat16().float())  # so that every layer gets the same


# variants


def test_every_variant_of_every_case_has_a_function_that_takes_its_options():
    for x in (*study.cases(ALL), *study.STUDY.tiny):
        found = study.STUDY.variants(x)
        listed = [one.name for one in found]
        assert len(set(listed)) == len(listed)
        assert study.STUDY.control(x) in listed
        assert {one.role for one in found} <= set(ROLES)
        assert [one.name for one in found if one.role == "ours"] == ([variants.OURS] if x.op == "layer" else [])
        assert {one.mode for one in found if one.name != variants.LOOP} <= {"graph"}
        twin = run.with_control(study.STUDY, x)[-1]
        assert (twin.name, twin.options["repeats"]) == (CONTROL, study.STUDY.control(x))
        for one in found:
            json.dumps(dict(one.options))
        for line in variants.lines(x):
            inspect.signature(getattr(trials, line.make)).bind(x, "cpu", 1, 0, **line.options)


def test_a_row_s_hash_covers_what_chooses_its_configuration(monkeypatch):
    called = []

    def noted(name, choose_by):
        return lambda *arguments, **options: called.append(name) or choose_by(*arguments, **options)

    for name in ("choose", "source"):
        monkeypatch.setattr(choose, name, noted(name, getattr(choose, name)))
    seen = set()
    for x in study.cases(ALL):
        for line, one in zip(variants.lines(x), study.STUDY.variants(x), strict=True):
            if line.make in ("layer", "gemm") and x.op != "tune" and "words" not in line.options:
                called.clear()
                trials.config_of(x, "cpu", **line.options)
                chosen = {"source"} if "source" in called else {"rule"}  # what `choose` finds in a table is no code
                covered = {n for n in ("source", "rule") if f"labkit.kernels.experts.choose:{n}" in one.source}
                assert covered == chosen | ({"rule"} if line.options.get("block_m") == 0 else set())
                seen |= covered | set(called)
    assert seen == {"choose", "source", "rule"}


def test_no_two_variants_of_a_case_are_the_same():
    for x in study.cases(ALL):
        found = [(line.make, json.dumps(line.options, sort_keys=True, default=str)) for line in variants.lines(x)]
        assert len(set(found)) == len(found)


def gemm_names(weights, tokens=128):
    return {line.name for line in variants.lines(case("gemm1", QWEN35_35B, tokens, weights))}


def test_every_change_of_executorch_s_products_is_timed_where_they_are():
    alone = {variants.OURS_TILES, variants.OURS_PERSISTENT, variants.OURS_FILLED, variants.READ}
    for tokens in variants.RELEASED_AT:
        timed = gemm_names("INT4", tokens)
        assert set(variants.RELEASED_GEMMS) < timed
        both = [variants.released(", ".join(words), int8)
                for change in variants.OWN_CHANGES.values() for words in change for int8 in (False, True)]  # fmt: skip
        assert set(both) <= timed
    assert {name for pair in variants.PAIRS for name in pair} < alone
    assert gemm_names("INT4", variants.SOURCE_T) == alone | set(variants.RELEASED_GEMMS)
    assert gemm_names("INT4", 1) == alone


def test_the_lab_s_own_version_is_not_timed_at_the_sources_own_point():
    """It is in the other cases that were recorded with it, so that they need not be measured anew."""
    with_own = {
        (x.op, x["model"], x["weights"], x["T"])
        for x in study.cases(ALL)
        if any(line.name.startswith("source") for line in variants.lines(x))
    }
    layers = {("layer", MIXTRAL.name, "INT4", t) for t in (16, 128, 1642)}
    layers |= {("layer", QWEN35_35B.name, "INT4", t) for t in (16, 128)}
    assert {case for case in with_own if case[0] == "layer"} == layers
    of_qwen = {case[2:] for case in with_own if case[:2] == ("gemm1", QWEN35_35B.name)}
    assert of_qwen == {("bf16", 128), ("bf16", 1642), ("INT4", 16), ("INT4", 128)}


def test_humming_s_products_are_timed_beside_executorch_s_layer():
    timed = {(x["model"], x["weights"], x["T"]) for x in study.cases(ALL) if x.op == "layer"
             for line in variants.lines(x) if line.name == variants.HUMMING}  # fmt: skip
    assert timed == {(QWEN35_35B.name, "INT4", t) for t in ALL["tokens"]}


def test_humming_s_row_says_how_it_is_fetched_where_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_SOURCES", str(tmp_path))
    humming._modules.cache_clear()
    x = case("layer", QWEN35_35B, 1, "INT4")
    small = Case("layer", dict(x.params) | {"E": 8, "H": 128, "I": 128})
    with pytest.raises(sources.NotFetched, match="not fetched: labkit fetch humming-kernels"):
        trials.humming_layer(small, "cpu", 1, 0)


def test_executorch_s_layer_in_narrow_blocks_is_timed_at_its_own_point():
    timed = {
        (x["model"], x["T"]) for x in study.cases(ALL) for line in variants.lines(x) if line.name in variants.NARROW
    }
    assert timed == {(QWEN35_35B.name, variants.SOURCE_T)}


def test_one_cta_a_tile_of_a_persistent_product_is_its_twin():
    persistent = {name for name in variants.RELEASED_GEMMS if variants.PERSISTENT in name}
    assert len(persistent) == 8
    twins = {variants.tiles_of(name) for name in persistent}
    assert twins == set(variants.RELEASED_GEMMS) - persistent
    filled = variants.released(f"{variants.PERSISTENT}, {variants.FILLED}", int8=True)
    assert variants.tiles_of(filled) == variants.released(variants.TILES, int8=True)
    assert variants.tiles_of(variants.released(variants.TILES)) == variants.tiles_of(variants.OURS_TILES) == ""


def test_the_loop_alone_is_eager_and_libraries_are_peers():
    roles = {one.name: (one.role, one.mode) for one in study.STUDY.variants(case())}
    assert roles[variants.LOOP] == ("baseline", "eager")
    assert roles[variants.GROUPED] == roles[variants.LIGER] == ("peer", "graph")
    assert variants.READ in roles
    assert variants.READ not in {one.name for one in study.STUDY.variants(case(T=4096))}
    assert variants.OTHER_TOKENS not in {one.name for one in study.STUDY.variants(case(T=variants.TUNED_FOR))}


def test_vllm_s_layer_is_timed_in_every_bf16_case_and_beside_executorch_s():
    def timed(x):
        return variants.VLLM in {line.name for line in variants.lines(x)}

    layers = [x for x in study.cases(ALL) if x.op == "layer"]
    assert all(timed(x) == (x["weights"] == "bf16" or x["model"] == QWEN35_35B.name) for x in layers)


def test_vllm_s_layer_says_how_it_is_fetched_where_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_SOURCES", str(tmp_path))
    vllm._module.cache_clear()
    [line] = [line for line in variants.lines(case()) if line.name == variants.VLLM]
    with pytest.raises(sources.NotFetched, match="not fetched: labkit fetch vllm"):
        getattr(trials, line.make)(study.STUDY.tiny[0], "cpu", 1, 0)
    assert not [one for one in study.STUDY.kernels([case()], 90, "") if one[0].endswith(":vllm_layer")]


# configurations


def options_of(x, name):
    """Arguments of a variant's trial."""
    [line] = [line for line in variants.lines(x) if line.name == name]
    return line.options


def test_configurations_differ_as_they_say():
    x = case("gemm1", MIXTRAL, 1642, "INT4")

    def of(name):
        return trials.config_of(x, "cpu", **options_of(x, name))

    tiles, base = of(variants.source(16, variants.TILES)), of(variants.source(16, variants.PERSISTENT))
    assert tiles == choose.source(16, 132, persistent=False)
    assert base == choose.source(16, 132)
    for name, field, value in (
        (variants.EARLY, "counted", True), (variants.FLAT, "flatten", True), (variants.ONCE, "unpack", "join"),
    ):  # fmt: skip
        changed = of(variants.source(16, variants.PERSISTENT, name))
        assert getattr(changed.gemm1, field) == getattr(changed.gemm2, field) == value
        assert changed.gemm1.as_dict() | {field: getattr(base.gemm1, field)} == base.gemm1.as_dict()
    assert of(variants.source(16, variants.PERSISTENT, "groups of 32")).gemm2.group_m == 32
    assert choose.rule(1642, 8, 2, 4096, 14336).block_m == 128
    assert of(variants.source(16, variants.PERSISTENT, variants.ROWS)).block_m == 64  # the source's widest
    int8 = of(variants.source(64, variants.PERSISTENT, int8=True))
    assert (int8.block_m, int8.gemm1.block_k, int8.fused) == (64, 32, False)
    ours = of(variants.OURS_PERSISTENT)
    assert ours.fused
    assert (ours.gemm1.programs, of(variants.OURS_TILES).gemm1.programs) == (132, 0)
    few = trials.config_of(case(T=1), "cpu", "ours", tokens=variants.TUNED_FOR)
    assert few == choose.rule(1642, 128, 8, 2048, 768)
    assert trials.config_of(case(T=1, weights="INT4"), "cpu", "rule", plain=True) == choose.rule(1, 128, 8, 2048, 768)


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 128, 512, 1642, 16384])
def test_candidates_are_ones_that_the_kernels_take(tokens, int4):
    found = choose.candidates(tokens, 128, 8, 2048, 768, int4)
    assert len(found) == len(set(found)) == len(set(map(str, found)))
    assert 10 <= len(found) <= 50
    ruled = choose.rule(tokens, 128, 8, 2048, 768, int4)
    for gemm in ("gemm1", "gemm2"):
        same = {"unpack", "scale_sums"} if not int4 else set()  # which only INT4 has
        own = {n: v for n, v in getattr(ruled, gemm).as_dict().items() if n not in same}
        assert any(
            (one.gemm, one.block_m) == (gemm, ruled.block_m) and own.items() <= one.tile.as_dict().items()
            for one in found
        )
    assert {one.block_m for one in found} <= {ruled.block_m, ruled.block_m // 2}
    for one in found:
        x = case("tune", T=tokens, weights="INT4" if int4 else "bf16")
        choose.check_choice(trials.config_of(x, "cpu", choice=one), int4)


def test_a_table_is_written_read_and_the_nearest_tokens_chosen(tmp_path, monkeypatch):
    few, many = choose.rule(16, 128, 8, 2048, 768), choose.rule(4096, 128, 8, 2048, 768)
    shape = (128, 8, 2048, 768, False)
    choose.write(tmp_path, {shape: {4096: many, 16: few}})
    assert choose.read(tmp_path) == {shape: {16: few, 4096: many}}
    monkeypatch.setattr(choose, "_table", lambda device: choose.read(tmp_path))
    cpu = torch.device("cpu")
    assert choose.choose(16, *shape, cpu) == choose.choose(31, *shape, cpu) == few
    assert choose.choose(3000, *shape, cpu) == many
    assert choose.choose(200, *shape, cpu) == choose.Joined(**vars(choose.rule(200, *shape, 132)))
    assert choose.choose(16, *shape[:4], True, cpu) == choose.rule(16, *shape[:4], True, 132)
    assert choose.nearest(24, (16, 32)) == 32
    assert choose.nearest(33, (16,)) is None
    assert choose.nearest(5, ()) is None
    assert choose.read(tmp_path / "none") == {}


@pytest.mark.parametrize("text", [
    "[]", '{"fp8": {}}', '{"bf16": {"1x2": {}}}', '{"bf16": {"1x2x3x4": {"5": {"block_m": 16}}}}',
    '{"bf16": {"1x2x3x4": {"5": {"block_m": 48, "gemm1": {}, "gemm2": {}}}}}', "no JSON",
])  # fmt: skip
def test_a_table_that_is_none_is_named(tmp_path, text):
    (tmp_path / choose.TABLE).write_text(text)
    with pytest.raises(ValueError, match=r"experts.json: not a table of choices .*; `labkit record` writes"):
        choose.read(tmp_path)


def test_blocks_of_one_expert_are_joined_where_wide_tiles_can_be_made_and_gain():
    """Of the numbers of tokens for which they were timed; every part that they do not have is named."""
    shape, cpu = (128, 8, 2048, 768), torch.device("cpu")
    made = {T: choose.choose(T, *shape, False, cpu) for T in (1, 16, 63, 64, 128, 256, 257, 4096)}
    assert [T for T, one in made.items() if isinstance(one, choose.Joined)] == [64, 128, 256]
    assert not isinstance(choose.choose(128, *shape, True, cpu), choose.Joined)
    plain = choose.Joined(**vars(choose.rule(128, *shape)))
    assert choose.apart(plain) == choose.rule(128, *shape)
    choose.check_choice(plain, False)
    for words, changes in {
        "rows": {"rows": choose.RowChoice()},
        "blocks of 128": {"block_m": 128},
        "SiLU in the second product": {"fused": False},
        "a persistent grid": {"gemm2": dataclasses.replace(plain.gemm2, programs=132)},
        "every block": {"gemm1": dataclasses.replace(plain.gemm1, counted=False)},
        "a descriptor": {"gemm1": dataclasses.replace(plain.gemm1, descriptor=True)},
    }.items():
        changed = dataclasses.replace(plain, **changes)
        assert not isinstance(choose.join(choose.apart(changed), 128, False), choose.Joined)
        with pytest.raises(ValueError, match=f"config is Joined with {words}; allowed: bf16, fp16 or fp32 wei"):
            choose.check_choice(changed, False)
    with pytest.raises(ValueError, match="config is Joined with INT4 weights"):
        choose.check_choice(plain, True)


def test_configurations_survive_json():
    for config in (choose.source(64, int8=True), choose.rule(1642, 8, 2, 4096, 14336)):
        assert Choice.of(json.loads(json.dumps(config.as_dict()))) == config


# compiled


def test_each_kernel_is_compiled_ahead_once():
    some = [x for x in study.cases(ALL) if x["model"] == QWEN3_30B.name]
    found = study.STUDY.kernels(some, 90, "")
    assert len({json.dumps(one, sort_keys=True) for one in found}) == len(found)
    every = sum(len(study.STUDY.variants(x)) for x in some)
    assert 50 < len(found) < every
    older = study.STUDY.kernels(some, 80, "")
    assert len(older) < len(found)
    gemms = [
        (one["wanted"][0], ahead.config_from(one["choice"])) for _, one in older if one.get("wanted", "")[:1] in GEMMS
    ]
    assert gemms
    assert not any(not config.rows and getattr(config, gemm).descriptor for gemm, config in gemms)


GEMMS = (["gemm1"], ["gemm2"])


@pytest.mark.parametrize(
    ("op", "weights", "tokens"), [("layer", "bf16", 128), ("layer", "INT4", 1), ("gemm2", "INT4", 128)]
)
def test_everything_that_a_case_launches_is_compiled_ahead(op, weights, tokens, monkeypatch):
    x = Case(op, dict(case("layer", QWEN35_35B, tokens, weights).params))
    some = [x, Case("layer", dict(x.params) | {"weights": "bf16"})] + [Case("gemm1", x.params)] * (op == "gemm2")
    monkeypatch.setattr(compiled, "evidence", lambda launch, capability=None: {})  # taken apart elsewhere
    ahead = {
        code_of(one) for source in study.STUDY.kernels(some, 90, "") for one in several(compiled.launch_of(source, 90))
    }
    made = []
    monkeypatch.setattr(trials, "resident", lambda launch: 4)
    with offline.offline(90):
        for variant in study.STUDY.variants(x):
            if variant.name not in (
                variants.LIGER,
                variants.LOOP,
                variants.SGLANG,
                variants.VLLM,
                variants.HUMMING,
                variants.READ,
                variants.PER_PAIR,
                *variants.RELEASED_GEMMS,
            ):
                made += launches_of(variant.prepare(x, "cpu", 1, 0).calls[0], op)
        codes = {code_of(one) for one in made}
    assert len(codes) > 3
    assert codes <= ahead


def several(found):
    return found if isinstance(found, list) else [found] if isinstance(found, Launch) else []


def launches_of(call, op):
    """The launches of a layer, or of a GEMM."""
    return list(call.launches.values()) if hasattr(call, "launches") else [call] * isinstance(call, Launch)


def code_of(launch):
    """What Triton compiles a launch for."""
    constants = {k: v for k, v in launch.args.items() if not isinstance(v, torch.Tensor)}
    return launch.kernel.fn.__name__, str(sorted(constants.items())), str(sorted(launch.options.items()))


@pytest.mark.skipif(sources_missing(), reason=NO_SOURCES)
@pytest.mark.parametrize("weights", ["bf16", "INT4"])
def test_designs_can_be_made_of_any_tuned_tile(weights, monkeypatch):
    """As of a table that a run has just tuned: on an H200 that named the copy engine, which wide tiles refuse."""
    config_of = trials.config_of

    def by_the_copy_engine(*arguments, **how):
        found = config_of(*arguments, **how)
        tiles = {
            name: dataclasses.replace(getattr(found, name), descriptor=True, unpack="join") for name in variants.GEMMS
        }
        return choose.join(dataclasses.replace(found, **tiles), 128, weights == "INT4")

    monkeypatch.setattr(trials, "config_of", by_the_copy_engine)
    x = next(x for x in study.cases(ALL) if x.op == "designs" and (x["weights"], x["T"]) == (weights, 128))
    found = [one for _, one in study.STUDY.kernels([x], 90, "") if "by" in one]
    with offline.offline(90):
        for one in found:
            assert ahead.layer(**{name: value for name, value in one.items() if name != compiled.DISSECT}), one["by"]
    named = {line.options["by"] for line in variants.lines(x) if "by" in line.options}
    assert {one["by"] for one in found if one["by"]} == named
    assert (variants.APART in named) is (weights == "bf16")


def test_what_others_try_while_they_tune_is_compiled_ahead_in_parts(monkeypatch):
    """Each configuration once for all numbers of tokens of a kind; no source that compiles nothing."""
    some = [case(model=QWEN35_35B, T=tokens, weights="INT4") for tokens in (1, 16, 32, 1642)]
    found = [one for one in study.STUDY.kernels(some, 90, "") if one[0].endswith(":executorchs")]
    forms = {json.dumps(arguments["how"]) for _, arguments in found}
    assert len(forms) == 7
    assert {arguments["part"] for _, arguments in found} == set(range(ahead.PARTS))
    assert len(found) < 3 * len(forms) * ahead.PARTS
    monkeypatch.setattr(ahead, "suppress", lambda kind: nullcontext())  # whatever goes wrong is seen
    for how, kernels in ((None, 2), ({"grid": "persistent", "int8": True}, 6), ({"int8": False}, 2)):
        source = next(one for one in found if one[1]["how"] == how and one[1]["part"] == 0)
        assert len(built(source, monkeypatch)) == kernels


@pytest.mark.skipif(sources_missing(), reason=NO_SOURCES)
def test_sglang_s_layer_is_compiled_ahead_as_this_gpu_will_run_it(monkeypatch):
    [source] = [one for one in study.STUDY.kernels([case(T=4096)], 90, "") if one[0].endswith(":sglang_layer")]
    monkeypatch.setattr(ahead, "suppress", lambda kind: nullcontext())
    tried = {}
    for gpu in ("", "NVIDIA H200"):
        kernels = built((source[0], source[1] | {"gpu": gpu}), monkeypatch)
        assert [kernel.metadata.name for kernel in kernels].count("fused_moe_kernel") == 2
        assert all(kernel.metadata.launch_pdl for kernel in kernels if kernel.metadata.name == "fused_moe_kernel")
        tried[gpu] = {(kernel.metadata.num_warps, kernel.metadata.num_stages) for kernel in kernels}
    assert tried[""] != tried["NVIDIA H200"]


@pytest.mark.skipif(not sources.is_fetched(sources.source(variants.VLLM_RELEASE)), reason=NO_SOURCES)
@pytest.mark.parametrize("weights", study.WEIGHTS)
def test_vllm_s_layer_is_compiled_ahead_as_this_gpu_will_run_it(weights, monkeypatch):
    x = case(model=QWEN35_35B, T=4096, weights=weights)
    [source] = [one for one in study.STUDY.kernels([x], 90, "") if one[0].endswith(":vllm_layer")]
    monkeypatch.setattr(ahead, "suppress", lambda kind: nullcontext())
    tried = {}
    for gpu in ("", "NVIDIA H100 80GB HBM3"):
        kernels = built((source[0], source[1] | {"gpu": gpu}), monkeypatch)
        names = [kernel.metadata.name for kernel in kernels]
        assert names.count("fused_moe_kernel" if weights == "bf16" else "fused_moe_kernel_gptq_awq") == 2
        assert {"_activate_kernel", "_sum_kernel", "_place_kernel"} < set(names)
        tried[gpu] = {(kernel.metadata.num_warps, kernel.metadata.num_stages) for kernel in kernels}
    assert (tried[""] != tried["NVIDIA H100 80GB HBM3"]) is (weights == "bf16")  # which it ships


def built(source, monkeypatch):
    """What a source of others' kernels compiles."""
    from triton.runtime.jit import JITFunction

    kernels, run = [], JITFunction.run
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda *args, **options: kernels.append(run(*args, **options)))
        compiled.build(compiled.launch_of(source, 90), 90)
    return kernels


def test_the_product_before_a_candidate_is_compiled_ahead_too():
    x = Case("tune", case("layer", weights="INT4", T=1642).params)
    found = [(one["wanted"], ahead.config_from(one["choice"])) for _, one in study.STUDY.kernels([x], 90, "")]
    built = {(config.block_m, config.gemm1) for wanted, config in found if wanted == ["gemm1"]}
    for one in variants.candidates(x):
        config = trials.config_of(x, "cpu", choice=one)
        assert (config.block_m, config.gemm1) in built


def compiled_of(x, name, gemm="gemm1"):
    """Evidence of a variant's kernel for sm_90; few experts, whose number changes no code."""
    options = options_of(x, name)
    config = trials.config_of(x, "cpu", **options)
    params = dict(x.params) | {"E": 8}
    source = (f"{ahead.__name__}:layer", {
        "op": x.op, "params": params, "wanted": [gemm], "choice": config.as_dict(), "int8": bool(options.get("int8")),
    })  # fmt: skip
    return compiled_once.evidence(compiled.launch_of(source, 90)[0], 90)


def test_eight_bit_activations_use_integer_products_and_do_not_spill():
    x = case("gemm1", QWEN35_35B, 128, "INT4")
    for block_m, instruction in ((16, "IMMA"), (64, "IGMMA")):
        for gemm in ("gemm1", "gemm2"):
            found = compiled_of(x, variants.source(block_m, variants.PERSISTENT, int8=True), gemm)
            assert found["spill_bytes"] == 0
            assert all(name.startswith(instruction) for name in found["matrix"])


def test_weights_come_by_the_copy_engine_where_they_are_asked_to():
    for weights, words in (("bf16", (variants.BOX,)), ("INT4", (variants.ONCE, variants.BOX))):
        x = case("gemm1", QWEN35_35B, 128, weights)
        found = compiled_of(x, variants.source(16, variants.PERSISTENT, *words))
        assert found["loads"].get("tma", 0) > 0
        assert found["spill_bytes"] == 0
        before = variants.source(16, variants.PERSISTENT, *words[:-1])
        assert "tma" not in compiled_of(x, before)["loads"]


def test_a_gpu_without_the_copy_engine_is_told_so():
    x = case("gemm1", QWEN35_35B, 1642)
    config = trials.config_of(x, "cpu", **options_of(x, variants.source(16, variants.PERSISTENT, variants.BOX)))
    arguments = {"op": "gemm1", "params": dict(x.params) | {"E": 8}, "wanted": ["gemm1"], "choice": config.as_dict()}
    with pytest.raises(ValueError, match=r"descriptor is True on compute capability 8.0; allowed: from 9.0"):
        compiled.launch_of((f"{ahead.__name__}:layer", arguments), 80)


def test_the_kernel_that_counts_multiprocessors_compiles():
    assert compiled_once.evidence(green_context.where(torch.zeros(132, dtype=torch.int32), 64), 90)["spill_bytes"] == 0


# rows with made-up times

OVER = {  # times over that of the floor; 1.5 for the others
    variants.READ: 1.0, variants.OURS: 1.05, variants.ORDINARY: 1.155,
    variants.RULE: 1.155, variants.OTHER_TOKENS: 1.26,
    variants.OURS_BF16: 3.15, variants.GROUPED: 1.26, variants.LIGER: 1.365, variants.LOOP: 2.1,
    variants.OURS_TILES: 1.10, variants.OURS_PERSISTENT: 1.21, variants.OURS_FILLED: 1.10,
}  # fmt: skip
OVER |= {  # of ExecuTorch's own code, by what its name ends with: the whole layer and its products
    variants.released(words, int8): factor
    for int8 in (False, True)
    for words, factor in {
        variants.TILES: 1.32, variants.PERSISTENT: 1.65,
        f"{variants.PERSISTENT}, {variants.FILLED}": 1.32, f"{variants.PERSISTENT}, {variants.ONE_GROUP}": 1.815,
        f"{variants.TILES}, {variants.LIVE}": 1.2, f"{variants.PERSISTENT}, {variants.LIVE}": 1.5,
    }.items()
}  # fmt: skip
OVER |= dict.fromkeys(variants.NARROW, 1.32 * 1.32)
OTHER_CODE = variants.released(f"{variants.PERSISTENT}, {variants.ONE_GROUP}")  # made of groups of 1 by the compiler
SEEN = {0: 132, 128: 128, 108: 112, 96: 96, 64: 64}  # green contexts are rounded


def least_us(x):
    floor = work.floor(x)
    return max(floor.bytes / 3e6, floor.flops / 800e6)


def us_of(over=None):
    times = OVER | (over or {})

    def us(x, variant):
        name = variant.options.get("repeats", variant.name)
        if x.op == "waves":
            sms = 0 if name.startswith("all") else int(name.split()[0])
            return 20.0 * math.ceil(wave_tiles(x) / SEEN[sms])
        if x.op == "tune":
            return least_us(x) * (1.2 if variant.name == study.STUDY.control(x) else 1.3)
        return least_us(x) * times.get(name, 1.5)

    return us


def wave_tiles(x):
    return -(-x["T"] * x["top_k"] // 128) * 6


def frame(over=None, parameters=ALL, own=False, **changes):
    """own: with the layers of ExecuTorch, SGLang, vLLM and Humming, as it is where they were fetched."""
    rows = made.make(NAME, parameters, us_of(over), **changes)
    others = rows["variant"].str.startswith(("ExecuTorch", "SGLang", "vLLM", "Humming"))
    rows = rows if own else rows[~others].reset_index(drop=True)
    bound = rows["floor_flops"] > work.BALANCE * rows["floor_bytes"]
    texts = [
        evident(Case(op, json.loads(key)), name)
        for op, key, name in zip(*map(rows.get, ("op", "case", "variant")), strict=True)
    ]
    return rows.assign(ceiling=np.where(bound, 800.0, 3.0), evidence=texts)


def evident(x, name):
    """What the kernels' evidence says: the layer's blocks; tiles of the routing, CTAs an SM, and the code."""
    if x.op == "layer" and name == variants.OURS:
        return json.dumps({"config": {"block_m": 16, "rows": {"up": 4} if x["T"] == 1 else None}})
    if name in variants.ENGINES:
        return json.dumps({"config": {"shipped": x["model"] != MIXTRAL.name and x["weights"] != "INT4"}})
    if x.op == "waves" and " SMs, " in name:
        sms = 0 if name.startswith("all") else int(name.split()[0])
        return json.dumps({"tiles": wave_tiles(x), "ctas_per_sm": 1, "sms": SMS, "seen": SEEN[sms]})
    if x.op not in ("gemm1", "gemm2") or name in (variants.READ, CONTROL):
        return "{}"
    block_m = 64 if name in variants.RELEASED_GEMMS else 16
    columns = (2 * x["I"] if x.op == "gemm1" else x["H"]) // 128
    live, blocks = (
        experts_blocks.blocks(work.counts_of(x), block_m),
        experts_blocks.source_blocks(x["T"], x["top_k"], x["E"], block_m),
    )
    tiles = columns * (live if variants.LIVE in name or name.startswith("ours") else blocks)
    found = {"live": live, "blocks": blocks, "tiles": tiles, "ctas_per_sm": CTAS, "sms": SMS, "bits": "abc"}
    programs = tiles if variants.TILES in name else SMS * (CTAS if variants.FILLED in name else 1)
    registers = 80 if variants.TILES in name else 104 if name == OTHER_CODE else 96
    found |= {"programs": programs, "registers": registers, "loads": {"128": 3, "8": 64}, "spill_bytes": 0}
    return json.dumps(found | {"matrix": {"HMMA": 16}})


@pytest.fixture(scope="module")
def rows():
    return frame()


@pytest.fixture(scope="module")
def own_rows():
    """With the code of others."""
    return frame(own=True)


def test_the_table_is_the_fastest_candidates(tmp_path, rows):
    file = tmp_path / f"{NAME}.parquet"
    records.write(file, rows)
    found = tables.fastest(file)
    assert {shape[:4] for shape in found} == {(128, 8, 2048, 768), (256, 8, 2048, 512), (8, 2, 4096, 14336)}
    for (experts, top_k, hidden, width, int4), configs in found.items():
        assert list(configs) == ALL["tokens"]
        for tokens, config in configs.items():
            assert config.gemm1 == choose.candidates(tokens, experts, top_k, hidden, width, int4)[0].tile
            assert config.fused
    study.settle(file, tmp_path)
    assert choose.read(tmp_path) == found
    records.write(file, made.unusable(rows))
    assert tables.fastest(file) == {}


def test_blocks_are_chosen_by_both_gemms_together():
    def line(gemm, block_m, us):
        return {"gemm": gemm, "block_m": block_m, "us": us, "tile": TileChoice(group_m=int(us)).as_dict()}

    group = pd.DataFrame([
        line("gemm1", 64, 5.0), line("gemm1", 128, 4.0), line("gemm2", 64, 3.0), line("gemm2", 128, 9.0),
        line("gemm2", 64, 7.0), line("gemm1", 32, 1.0),
    ])  # fmt: skip
    found = tables._best_config(group)
    assert (found.block_m, found.gemm1.group_m, found.gemm2.group_m) == (64, 5, 3)
    assert tables._best_config(group[group["gemm"] == "gemm1"]) is None


def test_blocks_that_were_chosen_before_stay_while_they_are_about_as_fast():
    def line(gemm, block_m, us, number):
        return {"gemm": gemm, "block_m": block_m, "us": us, "tile": TileChoice(group_m=number).as_dict()}

    def before(block_m, up, down):
        return choose.Choice(block_m, gemm1=TileChoice(group_m=up), gemm2=TileChoice(group_m=down))

    group = pd.DataFrame([
        line("gemm1", 64, 50.0, 1), line("gemm1", 64, 50.3, 2), line("gemm1", 64, 52.0, 3), line("gemm2", 64, 30.0, 1),
        line("gemm2", 64, 30.3, 2), line("gemm1", 128, 50.0, 1), line("gemm2", 128, 30.4, 1),
    ])  # fmt: skip
    fastest = before(64, 1, 1)
    assert tables._best_config(group) == fastest
    for one in (before(64, 2, 2), before(128, 1, 1)):
        assert tables._best_config(group, one) == one
    for one in (before(64, 3, 1), before(32, 1, 1), before(64, 9, 1)):  # slower, and no longer among them
        assert tables._best_config(group, one) == fastest


def test_rates_stand_beside_both_ceilings(rows):
    table = tables.times(rows)
    assert tables.ceilings(rows) == (3.0, 800.0)
    assert CONTROL not in set(table["variant"])
    one = table[(table["model"] == QWEN3_30B.name) & (table["T"] == 1) & (table["weights"] == "bf16")]
    reading = one.set_index("variant").loc[variants.READ]
    assert reading["active"] == 8
    assert reading["% of reading"] == pytest.approx(100, rel=3e-3)
    many = table[(table["model"] == MIXTRAL.name) & (table["T"] == 4096) & (table["weights"] == "bf16")]
    ours = many[(many["variant"] == variants.OURS) & (many["routing"] == "uniform")].iloc[0]
    assert ours["% of products"] == pytest.approx(100 / 1.05, rel=3e-3)
    assert set(table[table["variant"] == variants.LOOP]["mode"]) == {"eager"}
    assert tables.times(rows.iloc[:0]).empty


def test_the_fastest_rival_is_found_in_every_case(rows):
    table = tables.against_best(rows)
    assert set(table["by"]) == {variants.GROUPED}
    assert set(table["weights"]) == {"bf16"}
    assert table["ratio"].tolist() == pytest.approx([1.2] * len(table), rel=3e-3)
    assert set(table["verdict"]) == {"faster"}
    slow = tables.against_best(frame({variants.GROUPED: 3.0, variants.LIGER: 4.0}))
    assert set(slow[slow["routing"] == KINDS[0]]["by"]) == {variants.LOOP}
    assert set(slow[slow["routing"] != KINDS[0]]["by"]) == {variants.GROUPED}  # the others are timed uniformly alone
    assert tables.against_best(rows[rows["role"].isin(["ours", "control"])]).empty


def test_engines_layers_are_rivals_and_are_missed_where_they_were_not_timed(rows):
    assert tables.beside_engines(rows).empty
    engines = ("SGLang, bf16", "vLLM, bf16", "vLLM, INT4", "Humming, INT4")
    assert views.beside_engines(rows) == dict.fromkeys(engines, "not measured on this GPU")
    assert "; vLLM's layer is not among them: not measured on this GPU" in made.caption(views.rivals(rows))
    some = frame({variants.SGLANG: 0.84, variants.VLLM: 1.05, variants.HUMMING: 2.1}, own=True)
    table = tables.beside_engines(some)
    assert set(table["model"]) == {QWEN3_30B.name, QWEN35_35B.name, MIXTRAL.name}
    assert set(table["routing"]) == set(ALL["routings"])
    ratios = table.groupby("engine")["ratio"].agg(["min", "max"])
    assert ratios.loc["SGLang"].tolist() == pytest.approx([0.8, 0.8], rel=3e-3)
    assert ratios.loc["vLLM"].tolist() == pytest.approx([1.0, 1.0], rel=3e-3)
    plain = table[table["weights"] == "bf16"]
    assert dict(zip(plain["model"], plain["configuration"], strict=True)) == {
        QWEN3_30B.name: "shipped", QWEN35_35B.name: "shipped", MIXTRAL.name: "default",
    }  # fmt: skip
    assert set(tables.against_best(some)["by"]) == {variants.SGLANG}
    assert "not among them" not in made.caption(views.rivals(some))
    assert views.beside_engines(some) == {
        "SGLang, bf16": "1.25× slower on average, 1.25× slower",
        "vLLM, bf16": "as fast on average, as fast",
        "vLLM, INT4": "as fast on average, as fast",
        "Humming, INT4": "2.00× faster on average, 2.00× faster",
    }
    only = frame({variants.SGLANG: 0.84}, own=True)
    missing = only[~only["variant"].str.startswith("vLLM")]
    assert views.beside_engines(missing)["vLLM, bf16"] == "not measured on this GPU"
    caption = made.caption(views.rivals(missing))
    assert "vLLM's layer is not among them" in caption
    assert "SGLang's layer is not" not in caption


def test_int4_gemms_are_taken_together(rows):
    table = tables.int4_reading(rows)
    assert set(table["model"]) == set(ALL["gemms"])
    few = table[table["T"] == 16]
    assert few["% of reading"].tolist() == pytest.approx([100 / 1.1] * len(few), rel=0.02)  # tokens are moved as well
    assert few["% of reading here"].tolist() == pytest.approx([100 / 1.1] * len(few), rel=3e-3)
    gain = tables.compared(rows, variants.OURS, variants.OURS_BF16)
    assert gain["ratio"].tolist() == pytest.approx([3.0] * len(gain), rel=3e-3)


def test_both_grids_beside_their_waves(own_rows):
    table = tables.persistence(own_rows)
    point = table[(table["model"] == QWEN35_35B.name) & (table["T"] == 1642) & (table["GEMM"] == "gemm1")]
    point = point[point["weights"] == "INT4"].set_index("kernel")
    blocks = experts_blocks.source_blocks(1642, 8, 256, 64)
    source = point.loc["ExecuTorch 1.5.1 W4A8"]
    assert source["tiles"] == blocks * 8
    assert source["waves"] == pytest.approx(blocks * 8 / (CTAS * SMS))
    assert source["efficiency"] == pytest.approx(waves.efficiency(blocks * 8, CTAS * SMS))
    assert source["ratio"] == pytest.approx(1.32 / 1.65, rel=3e-3)
    assert source["verdict"] == "slower"
    ours = point.loc[["ours"]].set_index("persistent")["ratio"]
    assert ours[variants.OURS_PERSISTENT] == pytest.approx(1.1 / 1.21, rel=3e-3)
    assert ours[variants.OURS_FILLED] == pytest.approx(1.0, rel=3e-3)
    assert (source["registers"], source["persistent registers"]) == (80, 96)
    assert (source["CTAs an SM"], source["persistent CTAs"]) == (CTAS, CTAS)
    assert set(table[table["weights"] == "bf16"]["kernel"]) == {"ours"}
    assert tables.persistence(own_rows.assign(evidence="{}"))["waves"].isna().all()


def test_changes_are_over_the_product_that_they_change(rows, own_rows):
    table = tables.worth(own_rows).set_index(["change", "activations"])
    assert table["mean ratio"][variants.FILLED, "W4A16"] == pytest.approx(1.25, rel=3e-3)
    assert table["mean ratio"]["groups of more than 1", "W4A8"] == pytest.approx(1.1, rel=3e-3)
    assert table["mean ratio"]["persistent", "W4A8"] == pytest.approx(0.8, rel=3e-3)
    assert set(table["cases"]) == {4}  # two products at two numbers of tokens
    assert (table[list(verdict.WORDS)].sum(axis=1) == table["cases"]).all()
    assert tables.worth(rows).empty


def test_the_sources_own_point(rows, own_rows):
    table = tables.source_point(own_rows).set_index("variant")
    assert set(table.index) == {variants.OURS_TILES, *variants.RELEASED_GEMMS}
    persistent, tiles = variants.released(variants.PERSISTENT), variants.released(variants.TILES)
    assert table["tiles / this"][persistent] == pytest.approx(0.8, rel=3e-3)
    assert table["launched an SM"][persistent] == 1
    assert table["CTAs an SM"][persistent] == CTAS
    assert table["dead %"][tiles] == pytest.approx(42.7, abs=1.2)
    assert table["dead %"][variants.released(f"{variants.TILES}, {variants.LIVE}")] == 0  # they are not launched
    assert math.isnan(table["tiles / this"][tiles])
    assert math.isnan(table["launched an SM"][tiles])
    filled = variants.released(f"{variants.PERSISTENT}, {variants.FILLED}")
    assert table["tiles / this"][filled] == pytest.approx(1.0, rel=3e-3)
    assert table["µs, both"].to_numpy() == pytest.approx((table["GEMM1 µs"] + table["GEMM2 µs"]).to_numpy())
    assert (table["registers"][persistent], table["GEMM2 CTAs"][persistent]) == (96, CTAS)
    assert table["8-bit loads"][persistent] == 64
    assert tables.source_point(own_rows[own_rows["op"] != "gemm2"]).empty
    assert tables.source_point(rows)["variant"].tolist() == [variants.OURS_TILES]


def test_an_order_that_is_other_code_is_told_apart(own_rows):
    assert grid_views.order(own_rows).caption.endswith("Refuted, it pays with experts of 1.6 MB: 1.10× faster.")
    none = dict.fromkeys((name for name in variants.RELEASED_GEMMS if variants.ONE_GROUP in name), 1.65)
    assert "Confirmed, it gains little" in grid_views.order(frame(none, FEW, own=True)).caption
    worse = dict.fromkeys(none, 1.5)
    assert "Confirmed, it gains nothing" in grid_views.order(frame(worse, FEW, own=True)).caption
    other = {OTHER_CODE, variants.released(f"{variants.PERSISTENT}, {variants.ONE_GROUP}", int8=True)}
    texts = own_rows["evidence"].where(~own_rows["variant"].isin(other), '{"registers": 1}')
    assert grid_views.order(own_rows.assign(evidence=texts)).caption.endswith("Not judged: other code for each order.")


def test_dead_blocks_and_what_they_cost(own_rows):
    said = grid_views.dead(own_rows).caption
    assert "9 % of the time saved, within 5 points of the empty share in " in said
    assert said.endswith(" of 16 cases.")
    shares = grid_views.dead_shares([1642]).set_index("model")
    assert shares["empty %, BM=16"][QWEN35_35B.name] == pytest.approx(12.7, abs=1.2)
    assert shares["empty %, BM=64"][QWEN3_30B.name] == pytest.approx(22, abs=1.2)


def test_steps_follow_whole_waves(rows):
    table = tables.steps(rows)
    few = table[(table["T"] == 352) & (table["grid"] == variants.TILES)].set_index("SMs")
    assert few["tiles"].tolist() == [132] * 5
    assert few["whole waves"].to_dict() == {132: 1, 128: 2, 112: 2, 96: 2, 64: 3}
    assert few["predicted"][128] == 2
    assert few["measured"][64] == pytest.approx(3, rel=3e-3)
    assert math.isnan(few["predicted"][132])
    parts = tables.persistent_on_parts(rows)
    assert parts["ratio"].tolist() == pytest.approx([1.0] * len(parts), rel=3e-3)
    assert parts.groupby("T")["SMs"].apply(list).tolist() == [[132, 128, 112, 96, 64]] * 2
    assert set(parts["verdict"]) == {"same"}
    assert tables.steps(rows.assign(evidence="{}")).empty


def test_other_gpus_have_other_waves(rows, own_rows):
    table = tables.on_other_gpus(own_rows)
    point = table[(table["T"] == 1642) & (table["GEMM"] == "gemm1") & (table["kernel"] == "ExecuTorch 1.5.1 W4A8")]
    point = point.set_index("GPU")
    tiles = experts_blocks.source_blocks(1642, 8, 256, 64) * 8
    assert point["waves"]["A100"] == pytest.approx(tiles / (108 * CTAS))
    assert point["efficiency"]["B200"] == pytest.approx(waves.efficiency(tiles, 148 * CTAS))
    assert len(grid_views.other_gpus(own_rows)) == 2 * 2 * 2  # activations, products, tokens
    assert tables.on_other_gpus(rows).empty


def test_routings_are_beside_the_uniform_one(rows):
    table = tables.routings(rows)
    assert set(table["routing"]) == set(ALL["routings"])
    uniform = table[table["routing"] == "uniform"]
    assert uniform["over uniform"].tolist() == [1.0] * len(uniform)
    one = table[(table["routing"] == "one expert") & (table["model"] == MIXTRAL.name)]
    assert set(one["active"]) == {1}
    assert set(one["most / mean"]) == {8.0}
    assert set(one["blocks"]) == {128 * 2 / 16, 4096 * 2 / 16}  # all slots at one expert, in blocks of 16
    assert table["ratio"].tolist() == pytest.approx([1.2] * len(table), rel=3e-3)
    assert set(table["by"]) == {variants.GROUPED}
    assert tables.routings(rows[rows["case"].str.contains('"uniform"')]).empty


OURS_AND_TWIN = (variants.OURS, CONTROL)


def slower(rows, some, factor):
    """Rows with other times of some of them."""
    samples = [
        [round(factor * ns) for ns in one] if at else one for one, at in zip(rows["samples_ns"], some, strict=True)
    ]
    return rows.assign(samples_ns=samples)


def test_a_routing_under_which_ours_loses_is_said(rows):
    title = "The lab's layer loses where many tokens meet at one expert"
    assert views.routings(rows).options["title"] != title
    one = rows["variant"].isin(OURS_AND_TWIN) & rows["case"].str.contains('"one expert"') & (rows["op"] == "layer")
    lost = slower(rows, one & rows["case"].str.contains(MIXTRAL.name) & rows["case"].str.contains('"T": 128,'), 3)
    made_of = views.routings(lost)
    assert made_of.options["title"] == title
    assert made_of.said == "Least: 2.50× slower (Mixtral-8x7B, bf16, 128 tokens, one expert)"
    skewed = views.in_short(lost)["Lab's bf16 layer against the fastest other, skewed routing"]
    assert skewed.endswith("2.50× slower to 1.20× faster")


def test_predictions_are_held_against_the_sum_of_both_limits(rows):
    table = tables.predictions(rows)
    uniform = table[(table["routing"] == "uniform") & (table["model"] == MIXTRAL.name)]
    line = uniform[(uniform["T"] == 4096) & (uniform["weights"] == "bf16")].iloc[0]
    x = case(model=MIXTRAL, T=4096)
    assert line["reading us"] == pytest.approx(work.weight_bytes(x) / 3e6)
    blocks = sum(-(-count // 16) for count in work.counts_of(x))
    assert line["products us"] == pytest.approx(work.flops(x) / 800e6 * blocks * 16 / (4096 * 2))
    assert line["over both %"] == pytest.approx(100 * (line["us"] / (line["reading us"] + line["products us"]) - 1))
    assert line["us"] == pytest.approx(least_us(x) * 1.05, rel=3e-3)
    one = table[table["T"] == 1]
    assert set(one["BM"]) == {1}  # no tiles: nothing is padded
    assert tables.predictions(rows.assign(evidence="{}"))["over both %"].isna().all()


def test_int4_that_takes_longer_is_said_to_unpack(rows):
    asked = "INT4 slower than bf16, by unpacking"
    assert asked not in views.unexplained(rows)
    many = (
        rows["variant"].isin(OURS_AND_TWIN) & (rows["op"] == "layer") & rows["case"].str.contains('"weights": "INT4"')
    )
    late = slower(rows, many & rows["case"].str.contains('"T": 4096,'), 6)
    assert views.unexplained(late)[asked] == "in 3 of 15 cases, 2.00× slower"
    drawn = views.int4_gain(late)
    assert drawn.said == "Up to 1642 tokens 3.00× faster, beyond 2.00× slower"
    assert drawn.options["title"] == "INT4 weights pay with few tokens, not with many"
    assert views.int4_gain(rows).options["title"] == "What INT4 weights are worth"
    assert views.in_short(late)["INT4 weights, not bf16, up to 1642 tokens"] == "3.00× faster"


def test_what_was_not_tuned_says_nothing_of_tuning():
    lists = {
        "models": [QWEN3_30B.name],
        "tokens": [4096, 16384],
        "gemms": [],
        "wave_tokens": [],
        "routings": ["uniform"],
    }
    some = frame(parameters=ALL | lists)
    assert tables.tuned_up_to(some) == 4096
    assert views.tuning(some)["By the rule instead"].startswith("1.10× slower on average")


def kinds(**columns):
    """A table of grids or changes with made-up columns."""
    length = max(len(values) for values in columns.values())
    shared = dict.fromkeys([*tables.CASE, "GEMM", "kernel"], "a") | {
        "persistent": variants.OURS_FILLED,
        "verdict": "same",
    }
    shared |= {"efficiency": 1.0} | dict.fromkeys(tables.CODE, 1.0)
    return pd.DataFrame(shared | columns, index=range(length))


def test_the_first_cause_is_judged_by_few_waves_against_many():
    for ratio, word in (([1.0, 1.0], "refuted"), ([1.1, 1.1], "refuted"), ([1.1, 1.0], "confirmed")):
        assert grid_views._by_waves(kinds(waves=[2.0, 20.0], ratio=ratio)).startswith(f"{word}: ")
    assert grid_views._by_waves(kinds(waves=[0.5, 20.0], ratio=[1.1, 1.0])).startswith("not judged")


def test_pairs_of_which_the_persistent_kernel_leaves_less_room_are_counted(monkeypatch):
    fewer = kinds(waves=[2.0], ratio=[1.0]).assign(**{"CTAs an SM": 4.0, "persistent CTAs": 3.0})
    monkeypatch.setattr(tables, "persistence", lambda rows: fewer)
    assert grid_views.fewer_ctas(None) == "fewer CTAs of the persistent kernel fit an SM in 1 of 1 pairs."


def test_a_gain_and_its_interval_are_of_one_side():
    assert views.gain({"ratio": 0.5, "low": 0.4, "high": 0.8}) == "2.00× slower [1.25, 2.50]"
    assert views.gain({"ratio": 1.2, "low": 1.1, "high": 1.3}) == "1.20× faster [1.10, 1.30]"
    assert views.gain({"ratio": 0.999, "low": 0.98, "high": 1.01}) == "as fast [0.98, 1.01]"


def test_no_table_is_shown_with_a_recorded_name(own_rows):
    for table in (grid_views.own_products(own_rows), grid_views.worth(own_rows), views.beside_released(own_rows)):
        shown = {value for name in table if table[name].dtype == object for value in table[name]}
        assert not shown & set(views.DISPLAY) - set(views.DISPLAY.values())
    assert not any(text[0].isdigit() for text in views.DISPLAY.values())


def test_compiled_code_is_shown_of_recorded_rows_too():
    code = {
        "variant": "a",
        "registers": 80,
        "spill_bytes": 0,
        "ctas_per_sm": 6,
        "matrix": {"HMMA": 16},
        "loads": {"8": 64},
    }
    table = grid_views.compiled_table(pd.DataFrame([code | {"arch": 90}]))
    assert table["target"].tolist() == ["sm_90"]
    assert table["loads, by bits"].tolist() == ["8 (×64)"]
    assert table["Triton"][0][0].isdigit()
    recorded = grid_views.compiled_table(pd.DataFrame([code]))  # where Triton is missing: no target in their evidence
    assert recorded["target"].tolist() == recorded["Triton"].tolist() == ["as recorded"]


def test_code_is_shown_as_it_was_timed(rows, own_rows):
    table = grid_views.as_timed(own_rows.assign(triton="3.6.0"))
    assert table["variant"].tolist() == [views.DISPLAY[name] for name in grid_views.LOOKED_AT] * 2
    assert set(table["Triton"]) == {"3.6.0"}
    persistent = variants.released(variants.PERSISTENT)
    base = table[(table["variant"] == persistent) & (table["GEMM"] == "GEMM2")].iloc[0]
    assert (base["registers"], base["CTAs an SM"], base["loads, by bits"]) == (96, CTAS, "128 (×3), 8 (×64)")
    assert grid_views.as_timed(rows)["variant"].tolist() == ["lab, one CTA a tile"] * 2


def test_bits_are_compared_in_pairs(rows):
    table = tables.same_bits(rows)
    assert table["same"].all()
    assert "in all" in grid_views.bits(rows)
    odd = rows.assign(
        evidence=rows["evidence"].where(
            rows["variant"] != variants.OURS_FILLED, rows["evidence"].str.replace("abc", "abd")
        )
    )
    assert "the bits differ" in grid_views.bits(odd)


# claims


def judged(rows):
    return {claim.id: claim.judge(rows) for claim in claims.CLAIMS}


@pytest.mark.parametrize(("persistent", "prefill", "few"), [
    (0.5, "consistent", "disagrees"), (0.7, "disagrees", "disagrees"), (0.4, "disagrees", "consistent"),
])  # fmt: skip
def test_the_pull_request_is_judged_by_the_sources_own_code(persistent, prefill, few):
    """Both activations; one CTA a tile takes 0.5 of what others do."""
    times = {variants.released(grid, int8): 0.5 if grid == variants.TILES else persistent
             for grid in (variants.TILES, variants.PERSISTENT) for int8 in (False, True)}  # fmt: skip
    some = frame(times, SOURCE, own=True)
    found = judged(some)
    assert (found["prefill"].verdict, found["few-tokens"].verdict) == (prefill, few)
    assert found["prefill"].measured.startswith(f"{faster(0.5 / persistent)} [")
    assert {found[name].code for name in ("prefill", "few-tokens")} == {OWN}
    on_its_gpu = judged(some.assign(gpu="NVIDIA A100-SXM4-80GB"))
    assert on_its_gpu["prefill"].verdict == prefill  # which was of a whole prefill
    assert on_its_gpu["few-tokens"].verdict == {"consistent": "reproduced", "disagrees": "not reproduced"}[few]
    said = views.in_short(some)["ExecuTorch's layer, W4A16, 1642 tokens: persistent grid"]
    assert said.startswith(faster(0.5 / persistent))
    drawn = views.own_code(some)
    assert drawn.said == views.first_upper(faster(0.5 / persistent))
    slow = "The persistent grid is slower at every number of tokens"
    assert (drawn.options["title"] == slow) == (persistent > 0.5)
    assert set(views.beside_released(some)["fastest other"].str[:20]) <= {
        "ExecuTorch 1.5.1 W4A",
        "ExecuTorch 1.5.1, pe",
    }


def test_the_causes_are_asked_of_the_sources_own_products(rows):
    assert tables.own_products(rows).empty
    factors = {variants.FILLED: 0.5, variants.ONE_GROUP: 1.1, variants.LIVE: 0.8}
    times = {name: next((us for word, us in factors.items() if word in name), 1.0) for name in variants.RELEASED_GEMMS}
    some = frame(times, ALL, own=True)
    table = tables.own_products(some)
    assert len(table) == 2 * 2 * 2 * len(variants.OWN_CHANGES)  # tokens, products, activations
    assert set(table["T"]) == set(variants.RELEASED_AT)
    means = table.groupby("change", sort=False)["ratio"].mean().round(2).tolist()
    assert means == [1.0, 2.0, 1.1, 1.25, 1.25]
    assert table["dead %"].between(5, 50).all()
    for view, said in {
        "occupancy": "Confirmed: with as many as fit 2.00× faster",
        "order": "Refuted, it pays with experts of 1.6 MB: 1.10× faster",
        "dead": "20 % of the time saved",
        "point": "Persistent grid: as fast. Empty blocks skipped: 1.25× faster. Our own bf16 GEMMs: a ",
    }.items():
        assert said in made.caption(getattr(grid_views, view)(some)), view
    causes = grid_views.causes(some)
    assert list(causes) == [getattr(grid_views, name) for name in ("WAVES", "CTAS", "ORDER", "EMPTY", "FULL")]
    assert causes[grid_views.CTAS] == "confirmed: with as many as fit 2.00× faster"
    assert causes[grid_views.EMPTY].endswith(" % of the grid; without them 1.25× faster")
    assert causes[grid_views.FULL] == "W4A16 2.00× faster, W4A8 2.00× faster"
    slow = {name: 3.0 if variants.FILLED in name else 1.0 for name in variants.RELEASED_GEMMS}
    assert "Refuted: " in made.caption(grid_views.occupancy(frame(slow, ALL, own=True)))
    alone = some["evidence"].map(lambda text: json.dumps(json.loads(text) | {"ctas_per_sm": 1}))
    assert "Not judged: no two CTAs fit an SM" in made.caption(grid_views.occupancy(some.assign(evidence=alone)))


CAUSES = ("point", "occupancy", "order", "dead", "fuller")


@pytest.mark.parametrize("view", CAUSES)
def test_where_the_sources_products_were_not_timed_nothing_is_said_of_them(rows, view):
    said = getattr(grid_views, view)(rows)
    assert said.startswith("ExecuTorch's own products alone: not measured on this GPU.")
    timed = "ExecuTorch's own products alone: not measured on this GPU."
    assert grid_views.why(rows) == {"ExecuTorch's products": timed}
    causes = grid_views.causes(rows)
    assert {causes[name] for name in (grid_views.CTAS, grid_views.ORDER, grid_views.EMPTY)} == {timed}
    own = frame(parameters=FEW, own=True)
    failed = own["variant"].str.startswith("ExecuTorch")
    reason = failed.map({True: "NotFetched: not fetched: labkit fetch executorch", False: ""})
    missing = own.assign(ok=own["ok"] & ~failed, reason=reason)
    assert "products alone: not fetched: labkit fetch executorch." in getattr(grid_views, view)(missing)


def test_without_the_release_the_page_says_how_to_get_it(rows):
    assert views.own_code(rows) == "ExecuTorch's own kernels, in both grids: not measured on this GPU."
    some = frame(parameters=SOURCE, own=True)
    own = some["variant"].str.startswith("ExecuTorch")
    reason = own.map({True: "NotFetched: not fetched: labkit fetch executorch", False: ""})
    missing = some.assign(ok=some["ok"] & ~own, reason=reason)
    assert views.own_code(missing).endswith("not fetched: labkit fetch executorch.")
    assert views.in_short(missing)["ExecuTorch's layer"] == "not fetched: labkit fetch executorch"
    for name in ("prefill", "few-tokens", "blocks"):
        found = judged(missing)[name]
        assert (found.verdict, found.measured) == ("not testable here", "–")
        assert found.why.startswith("needs ExecuTorch's own layer of Qwen3.5-35B-A3B with INT4 weights, at ")


def test_claims_are_judged_from_the_rows(rows, own_rows):
    found = {name: one.verdict for name, one in judged(own_rows).items()}
    assert found == {
        "prefill": "disagrees", "few-tokens": "disagrees", "fewer-sms": "disagrees", "decode": "not testable here",
        "blocks": "consistent", "loop": "not testable here", "loop-grid": "disagrees", "liger": "not testable here",
    }  # fmt: skip
    of_ours = judged(rows)
    assert [name for name in found if of_ours[name].verdict == "not testable here"] == [
        "prefill", "few-tokens", "decode", "blocks", "loop", "liger",
    ]  # fmt: skip


@pytest.mark.parametrize(("narrow", "verdict", "size"), [
    (1.32, "consistent", "as published"), (1.6, "consistent", "more"), (1.05, "consistent", "less"),
    (0.9, "disagrees", "less"), (1.0, "disagrees", "less"),
])  # fmt: skip
def test_blocks_are_judged_by_the_sources_whole_layer_of_bf16_activations(narrow, verdict, size):
    """Not by 8-bit ones."""
    times = dict(zip(variants.NARROW, (1.32 * narrow, 9.0), strict=True))
    found = judged(frame(times, SOURCE, own=True))["blocks"]
    assert (found.verdict, found.size, found.code) == (verdict, size, OWN)
    assert found.measured.startswith(f"{faster(narrow)} [")


def test_the_loop_is_timed_eagerly_and_no_pair_of_a_graph():
    """Its blocks are not those of the graphs: shifted by one, the ratio of the medians is the same."""
    some = frame({variants.LOOP: 2.1}, FEW)
    assert set(some[some["variant"] == variants.LOOP]["mode"]) == {"eager"}
    shifted = [
        ns[1:] + ns[:1] if name == variants.LOOP else ns
        for name, ns in zip(some["variant"], some["samples_ns"], strict=True)
    ]
    one, other = (tables.compared(x, variants.OURS, variants.LOOP) for x in (some, some.assign(samples_ns=shifted)))
    assert one["ratio"].tolist() == pytest.approx(other["ratio"].tolist(), rel=1e-3)


@pytest.mark.parametrize(("persistent", "verdict"), [(0.9, "consistent"), (1.21, "disagrees"), (1.1, "disagrees")])
def test_the_loop_s_cause_is_refuted_by_a_plain_grid_that_is_as_fast(persistent, verdict):
    found = judged(frame({variants.OURS_PERSISTENT: persistent, variants.OURS_FILLED: persistent}, FEW))["loop-grid"]
    assert (found.verdict, found.code) == (verdict, OURS)


@pytest.mark.parametrize(("gain", "verdict"), [(1.2, "consistent"), (0.9, "disagrees"), (1.0, "disagrees")])
def test_fewer_multiprocessors_must_gain_more(rows, gain, verdict):
    """One CTA a tile takes `gain` times as long on each part, and as long as before on all."""
    parts = {variants.limited(sms, variants.TILES) for sms in variants.SMS if sms}
    times = [
        [round(ns * gain) for ns in of] if name in parts else of
        for name, of in zip(rows["variant"], rows["samples_ns"], strict=True)
    ]
    assert judged(rows.assign(samples_ns=times))["fewer-sms"].verdict == verdict


def test_a_gain_that_is_not_clear_is_unclear():
    some = frame(dict.fromkeys((variants.OURS_PERSISTENT, variants.OURS_FILLED), 1.04), FEW, spread=0.2)
    assert judged(some)["loop-grid"].verdict == "unclear"


def test_nothing_is_judged_of_one_process_or_of_no_rows(rows):
    for some in (made.processes(rows, 1), rows.iloc[:0], made.unusable(rows)):
        for name, found in judged(some).items():
            assert found.verdict == "not testable here", name


# views


@pytest.mark.parametrize(("view", "said"), [
    ("rivals", "1.20× faster on average, least 1.20× faster"),
    ("reading", "At 16 to 128 tokens 8"),
    ("int4_gain", "Up to 4096 tokens 3.00× faster"),
    ("grid", "Refuted: as fast at 1 to 3 waves"),
    ("occupancy", "Confirmed: with as many as fit 1.25× faster"),
    ("order", "Refuted, it pays"),
    ("dead", "% of the time saved, within 5 points of the empty share in "),
    ("steps", "Off what whole waves predict: +0 % in the median of 16 cases"),
    ("own_code", "1.25× slower"),
])  # fmt: skip
def test_what_a_view_says_follows_from_the_rows(own_rows, view, said):
    module = grid_views if view in GRID_VIEWS else views
    assert said in made.caption(getattr(module, view)(own_rows))


PRODUCTS, OF_LAYER = "Lab's products: persistent grid of", "ExecuTorch's layer, W4A8, 1642 tokens:"


@pytest.mark.parametrize(("view", "question", "said"), [
    ("in_short", f"{PRODUCTS} one CTA an SM", "1.10× slower on average; faster in 0 of 24"),
    ("in_short", f"{OF_LAYER} persistent grid", "1.25× slower [1.2"),
    ("in_short", f"{OF_LAYER} blocks of 64 rows, not 16", "1.32× faster [1.3"),
    ("in_short", "Lab's bf16 layer against the fastest other, uniform routing", "1.20× faster on average"),
    ("why", "W4A16, GEMM1: persistent grid", "1.25× slower ["),
    ("why", "W4A16, both products: as many CTAs as fit, not one an SM", "1.25× faster"),
    ("why", "W4A8, both products: as many CTAs as fit, not one CTA a tile", "as fast"),
    ("why", "W4A8, both products: no empty blocks, not all", "1.10× faster"),
    ("why", "Lab's products against ExecuTorch's fastest", "1.09× faster (ExecuTorch 1.5.1 W4A"),
    ("launching", "1 token", "1.10× faster on average; faster in 3 of 3 models"),
    ("tuning", "By the rule instead", "1.10× slower on average"),
    ("tuning", "With the tiles of 1642 tokens for any number", "1.20× slower on average"),
    ("unexplained", "INT4, 2 to 512 tokens: over reading and products", " %"),
])  # fmt: skip
def test_the_answer_to_a_question_follows_from_the_rows(own_rows, view, question, said):
    module = grid_views if view in GRID_TABLES else views
    assert said in getattr(module, view)(own_rows)[question]


def test_that_our_layer_has_no_persistent_grid_is_so():
    (why,) = (one.untested for one in claims.CLAIMS if one.id == "loop")
    files = list(paths.DATA.glob("*/moe_persistent_grid.parquet"))
    tuned = [one for file in files for by_tokens in tables.fastest(file).values() for one in by_tokens.values()]
    assert tuned
    assert all(one.gemm1.programs == one.gemm2.programs == 0 for one in tuned) == ("one CTA per tile" in why)


def test_ratios_of_both_products_at_the_sources_own_point(rows, own_rows):
    table = tables.point_ratios(own_rows)
    us = tables.source_point(own_rows).set_index("variant")["µs, both"]
    ratios = (us[table["against"]].to_numpy() / us[table["variant"]].to_numpy()).tolist()
    assert table["ratio"].tolist() == pytest.approx(ratios)
    assert table.groupby("activations")["ratio"].size().to_dict() == {"W4A16": 3, "W4A8": 3, "": 1}
    filled = table.set_index(["activations", "change"])["ratio"]["W4A16", "as many CTAs as fit, not one an SM"]
    assert filled == pytest.approx(1.25, rel=3e-3)
    one_grid = own_rows[own_rows["variant"] != variants.released(variants.PERSISTENT)]
    assert set(tables.point_ratios(one_grid)["activations"]) == {"W4A8", ""}
    assert tables.point_ratios(rows).empty  # nothing to set the lab's against


@pytest.mark.parametrize(("shares", "said"), [
    ((0.90, 0.92, 0.93, 0.95), "the fewer multiprocessors, the emptier the waves."),
    ((0.90, 0.97, 0.93, 0.95), "how full the waves are does not follow from how many multiprocessors there are."),
    ((0.95, 0.95, 0.95, 0.955), "how full the waves are does not follow from how many multiprocessors there are."),
])  # fmt: skip
def test_fewer_multiprocessors_are_emptier_only_if_each_gpu_says_so(shares, said, monkeypatch):
    found = pd.DataFrame({"GPU": ["A100", "RTX 4090", "H100 SXM, H200", "B200"], "efficiency": shares})
    monkeypatch.setattr(tables, "on_other_gpus", lambda rows: found)
    assert grid_views.fuller(None).endswith(said)


VIEWS = (
    "own_code", "rivals", "rates", "one_token", "by_words", "words_said", "reading", "int4_gain", "routings",
    "skew_costs", "prediction", "narrow_blocks", "beside_released", "side_by_side", "fragments", "at_once",
    "designs_said",
)  # fmt: skip
GRID_VIEWS = (
    "own_products", "worth", "source_point", "as_timed", "point", "grid", "fewer_ctas", "bits", "occupancy", "order",
    "dead", "steps", "other_gpus", "fuller", "persistent_on_parts",
)  # fmt: skip
COMPARED = ("in_short", "launching", "beside_engines", "tuning", "unexplained")
GRID_TABLES = ("causes", "why")  # questions and answers
TABLES = ("source_point", "worth", "narrow_blocks", "persistent_on_parts", "beside_engines", "own_products")
PARTIAL = {
    "all": lambda rows: rows,
    "none": lambda rows: rows.iloc[:0],
    "all failed": made.unusable,
    "layers only": lambda rows: rows[rows["op"] == "layer"],
    "no layers": lambda rows: rows[rows["op"] != "layer"],
    "bf16 only": lambda rows: rows[rows["case"].str.contains('"weights": "bf16"')],
    "INT4 only": lambda rows: rows[rows["case"].str.contains('"weights": "INT4"')],
    "one token only": lambda rows: rows[rows["case"].str.contains('"T": 1,')],
    "no libraries": lambda rows: rows[rows["role"] != "peer"],
    "no ExecuTorch": lambda rows: rows[~rows["variant"].str.startswith("ExecuTorch")],
    "no ours": lambda rows: rows[~rows["variant"].str.startswith("ours")],
    "no control": lambda rows: rows[rows["role"] != "control"],
    "no evidence": lambda rows: rows.assign(evidence="{}"),
    "no ceilings": lambda rows: rows.assign(ceiling=math.nan, predicted_us=math.nan),
}


@pytest.fixture(scope="module")
def few():
    """Rows of few cases, of which every view still finds some; nothing was counted."""
    lists = {"models": [QWEN3_30B.name], "tokens": [1, 128], "gemm_tokens": [128, 1642], "wave_tokens": [352]}
    some = ALL | lists | {"gemms": [QWEN35_35B.name], "routings": ["uniform", "zipf 1"]}
    return frame(parameters=some, own=True)


@pytest.mark.parametrize("which", PARTIAL)
def test_every_view_of_partial_rows_is_a_sentence_or_a_drawing(few, which):
    some = PARTIAL[which](few).reset_index(drop=True)
    made.check_views(views, VIEWS, some)
    made.check_views(grid_views, GRID_VIEWS, some)
    made.check_views(tables, TABLES, some)
    for module, views_of in ((views, COMPARED), (grid_views, GRID_TABLES)):
        for view in views_of:
            for question, said in getattr(module, view)(some).items():
                assert "nan" not in said, question


# the answer


def facts_of(**changes):
    """Facts of a GPU as `answer.facts` gives them."""
    own = {"own": "1.10× to 1.25× slower", "own least": 1.1, "own most": 1.25, "grid": "one CTA per tile"}
    own |= {"fewest": 1, "many": 4096, "kinds": "W4A16 and W4A8"}
    gained = {"empty": "1.60× to 1.89× faster", "tokens": "1642 tokens", "empty pays": True, "fill": True}
    return own | gained | changes


def test_the_answer_follows_from_the_rows(own_rows):
    slow = {"H100": answer.facts(own_rows)}
    assert answer.conclusion(slow).startswith(
        "No: a persistent grid makes ExecuTorch's whole layer 1.25× slower than one CTA per tile on the H100"
    )
    assert answer.advice(slow) == (
        "Launch one CTA per tile. Skip empty blocks (CTAs that find no rows): at 1642 tokens, if the host knows how "
        "many, single products become 1.10× faster on the H100. If the grid must be persistent, launch as many CTAs as "
        "fit."
    )
    times = {variants.released(variants.PERSISTENT, int8): 1.1 for int8 in (False, True)}
    times |= {name: 1.32 for name in variants.RELEASED_GEMMS if variants.TILES in name}
    fast = {"H100": answer.facts(frame(times, FEW | {"models": [QWEN35_35B.name]}, own=True))}
    assert answer.conclusion(fast).startswith(
        "Yes: a persistent grid makes ExecuTorch's whole layer 1.20× faster than one CTA per tile on the H100"
    )
    assert answer.advice(fast) == "Launch a persistent grid."


def test_both_ends_are_said_in_their_direction():
    said = {(0.5, 0.8): "1.25× to 2.00× slower", (0.8, 1.1): "1.25× slower to 1.10× faster", (1.1, 1.1): "1.10× faster"}
    for ratios, text in said.items():
        found = answer._ends("own", pd.Series(ratios))
        assert found["own"] == text
        assert all(f"{found[end]:.2f}×" in text for end in ("own least", "own most"))


def test_a_layer_that_is_as_fast_in_some_case_is_not_slower_at_every_number_of_tokens():
    said = answer.conclusion({"H100": facts_of(**answer._ends("own", pd.Series([0.9, 0.999])))})
    assert said.endswith(
        "layer as fast to 1.11× slower than one CTA per tile on the H100, by number of tokens timed (1 to 4096; W4A16 "
        "and W4A8)."
    )
    said = answer.conclusion({"H100": facts_of(**answer._ends("own", pd.Series([0.999, 1.001])))})
    assert "whole layer as fast as one CTA per tile on the H100" in said


def test_gpus_that_disagree_are_not_made_to_agree():
    both = {"H100": facts_of(), "H200": facts_of(own="1.10× faster", grid="a persistent grid")}
    assert answer.conclusion(both) == (
        "It differs: a persistent grid makes ExecuTorch's whole layer 1.10× to 1.25× slower than one CTA per tile on "
        "the H100, 1.10× faster on the H200, at every number of tokens timed (1 to 4096; W4A16 and W4A8)."
    )
    assert answer.advice(both).startswith("Launch either grid. Skip ")
    same = {"H100": facts_of(grid="either grid")}
    assert answer.conclusion(same).startswith("No difference: ")
    mixed = {"H100": facts_of(own="1.10× slower to 1.25× faster")}
    assert answer.conclusion(mixed).endswith(" on the H100, by number of tokens timed (1 to 4096; W4A16 and W4A8).")
    assert "Skip" not in answer.advice({"H100": facts_of() | {"empty pays": False}})
    assert "as fit" not in answer.advice({"H100": facts_of(fill=False)})


def test_what_gpus_share_is_said_once():
    both = {"H100": facts_of(), "H200": facts_of()}
    assert "1.25× slower than one CTA per tile on the H100 and H200, at every" in answer.conclusion(both)
    assert (
        "at 1642 tokens, if the host knows how many, single products become 1.60× to 1.89× faster on the H100 and H200."
        in answer.advice(both)
    )
    other = both | {"H200": facts_of(empty="1.70× faster")}
    assert "1.60× to 1.89× faster on the H100, 1.70× faster on the H200." in answer.advice(other)


def test_without_executorch_the_lab_s_products_answer(rows):
    known = {"H100": answer.facts(rows)}
    assert set(known["H100"]) == {"grid"}
    assert answer.conclusion(known).startswith("ExecuTorch's own layer was not timed; ")
    assert answer.advice(known) == "Launch either grid."


def test_no_rows_give_no_answer(own_rows):
    assert answer.facts(own_rows.iloc[:0]) == {}
    assert answer.facts(made.unusable(own_rows)) == {}
    assert answer.conclusion({}) == answer.advice({}) == ""
    assert isinstance(answer.hero(own_rows.iloc[:0]), str)


def test_the_answer_is_short_and_its_claims_are_the_study_s(own_rows):
    for known in ({"H100": answer.facts(own_rows)}, dict.fromkeys(("H100", "H200"), facts_of())):
        assert 0 < len(answer.conclusion(known).split()) <= 35
        assert 0 < len(answer.advice(known).split()) <= 46
    assert set(answer.HEADLINE) <= {claim.id for claim in claims.CLAIMS}


def test_what_needs_no_measurement():
    cases = study.cases(ALL)
    table = views.active_experts(cases)
    one = table[(table["model"] == QWEN3_30B.name) & (table["T"] == 1)].iloc[0]
    assert (one["active"], one["of"]) == (8, 128)
    assert one["FLOP a byte, bf16"] == 1.0
    assert one["MB, bf16"] / one["MB, INT4"] == pytest.approx(16 / (4 + 16 / 128))
    assert len(table) == len(ALL["models"]) * len(ALL["tokens"])
    assert {x["routing"] for x in views.floor_cases(cases)} == {KINDS[0]}
    assert {x["weights"] for x in views.floor_cases(cases)} == {"bf16"}


# on a GPU


def small(op, weights="bf16", **changes):
    shape = {"model": variants.TINY, "E": 8, "H": 256, "I": 256, "top_k": 2, "T": 33, "routing": "zipf 1"}
    return Case(op, shape | {"weights": weights, "activations": "bf16"} | changes)


def captured(call):
    """Capture a call in a CUDA graph, as the timing does, and replay it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["layer", "gemm1", "gemm2"])
@pytest.mark.parametrize("weights", ["bf16", "INT4"])
def test_every_variant_is_right_and_can_be_captured(op, weights):
    x = small(op, weights)
    for one in study.STUDY.variants(x):
        if one.name == variants.LIGER or (one.name == variants.SGLANG and sources_missing()):
            continue
        if one.name == variants.VLLM and sources_missing(variants.VLLM_RELEASE):
            continue
        found = one.prepare(x, torch.device("cuda"), 2, 0)
        errors = found.check()
        assert all(error <= found.tolerance[key] for key, error in errors.items()), (one.name, errors)
        if one.mode == "graph":
            captured(found.calls[1])
        json.dumps(found.facts() if found.facts else {})


@pytest.mark.gpu
def test_liger_kernel_is_right_and_can_be_captured():
    pytest.importorskip("liger_kernel")
    found = trials.liger(small("layer"), torch.device("cuda"), 2, 0)
    assert all(error <= found.tolerance[key] for key, error in found.check().items())
    captured(found.calls[1])


@pytest.mark.gpu
@pytest.mark.skipif(sources_missing(variants.HUMMING_RELEASE), reason=NO_SOURCES)
@pytest.mark.parametrize("tokens", [1, 33])
def test_humming_s_products_are_right_and_can_be_captured(tokens):
    if not building._nvcc():
        pytest.skip(NO_NVCC)
    x = Case("layer", dict(case(model=QWEN35_35B, T=tokens, weights="INT4").params) | {"E": 16})
    found = trials.humming_layer(x, torch.device("cuda"), 2, 0)
    assert all(error <= found.tolerance[key] for key, error in found.check().items())
    captured(found.calls[1])


@pytest.mark.gpu
def test_candidates_are_right():
    for weights in ("bf16", "INT4"):
        x = small("tune", weights)
        for one in study.STUDY.variants(x):
            found = one.prepare(x, torch.device("cuda"), 1, 0)
            errors = found.check()
            assert all(error <= found.tolerance[key] for key, error in errors.items()), (one.name, errors)


@pytest.mark.gpu
def test_a_part_of_the_gpu_is_as_large_as_it_is_seen():
    most = torch.cuda.get_device_properties(0).multi_processor_count
    _, seen = green_context.stream_on(0, torch.device("cuda"))
    assert seen == most
    with pytest.raises(ValueError, match=f"sms is {most + 1}; allowed: up to {most}"):
        green_context.stream_on(most + 1, torch.device("cuda"))
    try:
        _, seen = green_context.stream_on(64, torch.device("cuda"))
    except RuntimeError as problem:
        pytest.skip(str(problem))
    assert 64 <= seen < most
    x = small("waves", routing="one expert", T=640)
    for name in (variants.limited(0, variants.TILES), variants.limited(64, variants.PERSISTENT)):
        one = next(one for one in study.STUDY.variants(x) if one.name == name)
        found = one.prepare(x, torch.device("cuda"), 1, 0)
        assert all(error <= found.tolerance[key] for key, error in found.check().items())
        assert all(ns > 0 for ns in found.timer())


def test_the_widget_answers_every_control():
    shown = []
    lab = SimpleNamespace(
        floors=lambda cases: SimpleNamespace(html=f"floors of {cases[0]['T']} tokens"),
        show_table=lambda table, caption, formats: shown.append(table) or SimpleNamespace(html=caption),
    )
    *lines, answer = explore.widget(lab).children
    controls = {control.description: control for line in lines for control in line.children}
    assert set(controls) == {"model", "tokens", "weights", "rows", "columns", "CTAs an SM"}
    for name, value in {"model": MIXTRAL.name, "tokens": 7, "weights": "INT4", "rows": 32, "CTAs an SM": 3}.items():
        answer.value = ""
        controls[name].value = value
        assert "Waves of one CTA a tile" in answer.value, name
    assert "floors of 7 tokens" in answer.value
    assert len(shown[-1]) > 2
