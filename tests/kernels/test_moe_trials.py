"""What the study of expert layers times, on tiny shapes, beyond what `check_tiny` runs: what is wrong is noticed."""

import json

import pytest
import torch

from labkit.bench import sha
from labkit.bench.spec import Case
from labkit.kernels.experts import expert_layer, int4, reference
from labkit.kernels.experts.choose import Candidate, TileChoice
from labkit.kernels.launch import Launch
from labkit.studies.moe_persistent_grid import study, trials, variants

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {"model": "tiny", "E": 3, "H": 128, "I": 128, "top_k": 2, "T": 5, "routing": "zipf 1", "activations": "fp32"}


def case(op="layer", weights="fp32", **changes):
    return Case(op, SHAPE | {"weights": weights} | changes)


def variant(x, name):
    (found,) = (one for one in study.STUDY.variants(x) if one.name == name)
    return found


def trial(x, name, sets=1, seed=0):
    return variant(x, name).prepare(x, DEVICE, sets, seed)


def beyond(found):
    """Errors that are not within the tolerance."""
    return {name for name, error in found.check().items() if not error <= found.tolerance[name]}


SOME = [  # a layer of two buffer sets; of the second GEMM, which is in no tiny case, a variant of each kind
    (case(), variants.OURS), (case("gemm1", "INT4"), variants.OURS_TILES), (case("gemm2"), variants.OURS_PERSISTENT),
    (case("gemm2", "INT4"), variants.OURS_TILES), (case("gemm2", "INT4"), variants.source(16, variants.PERSISTENT)),
    (case("gemm2", "INT4"), variants.source(16, variants.TILES, int8=True)), (case("gemm2", "INT4"), variants.READ),
]  # fmt: skip


@pytest.mark.parametrize(("x", "name"), SOME, ids=[f"{x.op} {x['weights']} {name}" for x, name in SOME])
def test_a_variant_is_within_its_tolerance_and_writes_every_output(x, name):
    found = trial(x, name, sets=2 if x.op == "layer" else 1)
    if found.poison:
        found.poison()
        assert not found.written()
        found.calls[0]()
        assert found.written() == (len(found.calls) == 1)
        found.calls[-1]()
        assert found.written()
    assert beyond(found) == set()
    if found.facts:
        json.dumps(found.facts())


def test_peers_are_timed_where_they_take_the_case():
    if DEVICE == "cuda":
        pytest.skip("F.grouped_mm takes bf16 alone on a GPU")
    assert beyond(trial(case(), variants.GROUPED)) == set()


def test_candidates_are_checked_like_every_variant():
    for weights, name in (("fp32", "gemm1"), ("INT4", "gemm2")):
        choice = Candidate(name, 16, TileChoice(128, 64, num_stages=2))
        found = trials.gemm(case("tune", weights), DEVICE, 1, 0, choice=choice)
        assert beyond(found) == set()
        assert found.facts is None
        found.poison()
        assert not found.written()


def test_a_function_of_ones_own_is_checked_and_may_be_wrong():
    def exact(x, ids, weights, w1, w2, out):
        out.copy_(reference.layer(x, ids, weights, w1, w2))

    def close(*arguments):
        exact(*arguments)
        arguments[-1].mul_(1.01)

    assert beyond(trials.added(exact, case(), DEVICE, 2, 0)) == set()
    assert beyond(trials.added(close, case(), DEVICE, 1, 0)) == {"rms"}
    assert not study.STUDY.added.takes(case("layer", "INT4"))
    assert study.STUDY.added.takes(case())


# what a row's hash covers


def kernels_of(source):
    """Kernels that the hash of a source covers, "module:name" without the packages."""
    return {one.partition(":")[0].rpartition(".")[2] + ":" + one.partition(":")[2] for one in sha.covered(source)
            if one.endswith("_kernel")}  # fmt: skip


def launched(call):
    """Kernels of a launch, or of a layer's launches."""
    found = [call] if isinstance(call, Launch) else call.launches.values()
    return {f"{one.kernel.fn.__module__}:{one.kernel.fn.__name__}".rpartition(".")[2] for one in found}


TILES = {"routing:_at_once_kernel", "tiles:_gemm_kernel", "tiles:_sum_kernel"}
BYTES = {"one_token:_up_kernel", "one_token:_down_kernel"}
WORDS = {"one_token_words:_up_kernel", "one_token_words:_down_kernel"}
INT8 = {"w4a8:_quantise_kernel", "w4a8:_gemm_int8_kernel"}
RUN = [  # case, variant, kernels that run, and some that do not, of which its row's hash must know nothing
    (case(), variants.OURS, TILES, BYTES | WORDS | INT8),
    (case("layer", "INT4"), variants.source(16, int8=True), (TILES | INT8) - {"tiles:_gemm_kernel"}, BYTES | WORDS),
    (case(T=1), variants.OURS, BYTES, TILES | WORDS),
    (case(T=1), variants.RULE, BYTES, TILES | WORDS),
    (case(T=1), variants.ORDINARY, BYTES, TILES | WORDS),
    (case(T=1), variants.BY_TILES, TILES - {"routing:_at_once_kernel"}, BYTES | WORDS),
    (case(T=1), variants.OTHER_TOKENS, TILES - {"routing:_at_once_kernel"}, BYTES | WORDS),
    (case("layer", "INT4", T=1), variants.OURS, BYTES, TILES),
    (case("layer", "INT4", T=1), variants.OURS_BF16, BYTES, TILES | WORDS),
    (case("layer", "INT4", T=1), variants.BYTES, BYTES, TILES | WORDS),
    (case("layer", "INT4", T=1), variants.WORDS, WORDS, TILES | BYTES),
    (case("layer", "INT4", T=1), variants.source(16), TILES, BYTES | WORDS | INT8),
    (case("gemm2"), variants.OURS_TILES, {"tiles:_gemm_kernel"}, {"tiles:_sum_kernel"} | BYTES | INT8),
    (
        case("gemm1"),
        variants.source(16, variants.PERSISTENT, variants.BOX),
        {"descriptors:_gemm_descriptor_kernel"},
        BYTES,
    ),
    (
        case("gemm1", "INT4"),
        variants.source(16, int8=True),
        {"w4a8:_gemm_int8_kernel"},
        {"tiles:_sum_kernel"} | BYTES,
    ),
]


@pytest.mark.parametrize(
    ("x", "name", "run", "others"), RUN, ids=[f"{x.op} {x['weights']} T={x['T']} {name}" for x, name, *_ in RUN]
)
def test_a_row_s_hash_covers_the_kernels_that_run_and_not_those_of_other_ways(x, name, run, others):
    found = kernels_of(variant(x, name).source)
    assert launched(trial(x, name).calls[0]) == run
    assert run <= found
    assert not found & others


# what is wrong is noticed


def damaged(launch, damage):
    def call():
        launch()
        damage(launch.args["c"])

    call.args = launch.args
    return call


@pytest.mark.parametrize(
    ("op", "factor", "wrong"),
    [("gemm1", 1.01, {"rms"}), ("gemm2", 1.01, {"rms"}), ("gemm2", float("nan"), {"max", "rms"})],
)
def test_a_wrong_product_is_noticed(monkeypatch, op, factor, wrong):
    layer = expert_layer.layer

    def spoilt(*arguments, **options):
        made = layer(*arguments, **options)
        made.launches[op] = damaged(made.launches[op], lambda c: c.mul_(factor))
        return made

    monkeypatch.setattr(expert_layer, "layer", spoilt)
    assert beyond(trial(case(op), variants.OURS_TILES)) == wrong


def test_a_product_of_other_weights_is_noticed():
    x = case("gemm1", "INT4")
    found = trial(x, variants.OURS_TILES)
    assert beyond(found) == set()
    item = trials.inputs(x, DEVICE, 1, 0)[0]
    for e in item.ids.unique().tolist():
        item.w1.packed[e] ^= 0x88  # eight more or less of every weight
    assert beyond(found) == {"max", "rms"}
    for e in item.ids.unique().tolist():
        item.w1.packed[e] ^= 0x88
    assert beyond(found) == set()


# what is shared


def test_the_variants_of_a_case_share_tokens_and_weights_but_no_output():
    x = case()
    first, second = (trials.inputs(x, DEVICE, 2, 0) for _ in range(2))
    assert first[0].w1.data_ptr() == second[1].w1.data_ptr()
    assert first[0].x.data_ptr() == second[1].x.data_ptr()
    assert first[0].ids.data_ptr() != first[1].ids.data_ptr()
    own = [trials._with_outputs(first) for _ in range(2)]
    assert len({item.out.data_ptr() for some in own for item in some}) == 4
    kept = first[0].w1
    other = trials.inputs(case(T=7), DEVICE, 1, 0)[0]
    assert other.w1 is kept  # the same model's
    assert trials.inputs(case(E=4), DEVICE, 1, 0)[0].w1 is not kept
    assert trials.inputs(x, DEVICE, 1, 1)[0].w1.shape == kept.shape


def test_what_a_variant_writes_is_its_own():
    x = case("gemm1")
    first, second = (
        trial(x, name).calls[0] for name in (variants.source(16, variants.TILES), variants.source(64, variants.TILES))
    )
    assert first.args["slots"].data_ptr() != second.args["slots"].data_ptr()
    assert first.args["c"].data_ptr() != second.args["c"].data_ptr()  # what one writes is no proof that the other has


def test_evidence_of_a_grid_by_hand():
    x = case("gemm1", routing="one expert", top_k=3, E=4, T=5)
    facts = trial(x, variants.source(16, variants.TILES)).facts()
    assert facts["live"] == 1  # 15 slots of one expert
    assert facts["blocks"] == (15 + 4 * 16) // 16
    assert facts["tiles"] == facts["programs"] == facts["blocks"] * 2
    early = trial(x, variants.source(16, variants.TILES, variants.EARLY)).facts()
    assert (early["tiles"], early["programs"]) == (2, early["blocks"] * 2)
    persistent = trial(x, variants.source(16, variants.PERSISTENT)).facts()
    assert persistent["programs"] == min(132, persistent["tiles"])
    assert facts["bits"] == persistent["bits"]


def test_random_int4_weights_have_the_variance_of_random_ones():
    generator = torch.Generator(DEVICE).manual_seed(0)
    w = int4.dequantise(trials._random((2, 64, 512), "INT4", DEVICE, generator))
    assert float(w.std()) * 512**0.5 == pytest.approx(1.04, abs=0.03)  # scales from 0.5 to 1.5
