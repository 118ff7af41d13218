"""Study 04: a persistent grid for expert layers: when it pays, why it did not, and how fast such a layer can be."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.bench.spec import Added, Case, Study, Timelines, Variant, integer, lazy, list_of, one_of
from labkit.studies.moe_persistent_grid import claims
from labkit.studies.moe_persistent_grid import variants as names
from labkit.studies.moe_persistent_grid.models import MIXTRAL, MODELS, QWEN3_30B, QWEN35_35B
from labkit.studies.moe_persistent_grid.variants import KINDS, UNIFORM

WEIGHTS = ("bf16", "INT4")
SKEWED_AT = (128, 4096)  # tokens at which other routings than the uniform one are timed
SKEWED = (QWEN3_30B.name, MIXTRAL.name)  # and models
TUNED_UP_TO = 4096  # tokens, up to which candidates are timed: beyond, all models fill the widest tile, the rule's
INT4_UP_TO = 512  # tokens, up to which INT4 GEMMs of models that are not `ablated` are timed: the weights bound them
# Of models with experts of one size the last, which has the most: designs of INT4 weights are timed for it alone
DESIGNED = {(one.hidden, one.width): one.name for one in MODELS.values()}.values()


def cases(parameters: Mapping[str, Any]) -> list[Case]:
    """What is tuned, then model by model its layers and its single GEMMs, other designs, and the GEMM of few waves.

    That one has all slots at one expert: few tiles, whose number goes up in small steps with the tokens.
    """
    found = [
        _case("tune", model, tokens, weights)
        for model in parameters["models"]
        for weights in parameters["weights"]
        for tokens in parameters["tokens"]
        if tokens <= TUNED_UP_TO
    ]
    for model in dict.fromkeys([*parameters["models"], *parameters["gemms"]]):
        for weights in parameters["weights"]:
            found += _layers(model, weights, parameters) if model in parameters["models"] else []
            found += _gemms(model, weights, parameters) if model in parameters["gemms"] else []
    found += _designs(parameters)
    return found + [_case("waves", QWEN3_30B.name, t, "bf16", "one expert") for t in parameters["wave_tokens"]]


def _layers(model: str, weights: str, parameters: Mapping[str, Any]) -> list[Case]:
    routings = {tokens: [UNIFORM] for tokens in parameters["tokens"]}
    for tokens in set(SKEWED_AT) & set(routings) if model in SKEWED and weights != "INT4" else ():
        routings[tokens] = [UNIFORM, *(kind for kind in parameters["routings"] if kind != UNIFORM)]
    return [_case("layer", model, tokens, weights, kind) for tokens, kinds in routings.items() for kind in kinds]


def _gemms(model: str, weights: str, parameters: Mapping[str, Any]) -> list[Case]:
    return [
        _case(op, model, tokens, weights)
        for op in names.GEMMS
        for tokens in parameters["gemm_tokens"]
        if weights != "INT4" or tokens <= INT4_UP_TO or names.ablated(model, weights, tokens)
    ]


def _designs(parameters: Mapping[str, Any]) -> list[Case]:
    """Blocks of one expert as one tile, by routing; INT4 by designs of its own, at the single GEMMs' tokens."""
    tokens = {kind: [t for t in parameters["gemm_tokens"] if t in some] for kind, some in names.DESIGNED_AT.items()}
    skewed = [model for model in SKEWED if model in parameters["gemms"] and "bf16" in parameters["weights"]]
    found = [
        _case("designs", model, t, "bf16", kind)
        for model in skewed
        for t in tokens["bf16"]
        for kind in parameters["routings"]
    ]
    models = [name for name in parameters["gemms"] if name in DESIGNED] if "INT4" in parameters["weights"] else []
    return found + [_case("designs", model, t, "INT4") for model in models for t in tokens["INT4"]]


def _case(op: str, model: str, tokens: int, weights: str, routing: str = UNIFORM) -> Case:
    shape = {"T": tokens, "routing": routing, "weights": weights, "activations": "bf16"}
    return Case(op, MODELS[model].as_dict() | shape)


def settle(rows: Path, folder: Path) -> None:
    """Write the tuned table of a GPU from the rows that its folder, which has its name, holds."""
    from labkit.kernels.experts import choose
    from labkit.studies.moe_persistent_grid import tables

    choose.write(folder, tables.fastest(rows, choose.choices_of(folder.name)))


def _anew(case: Case, variant: Variant) -> str:
    """Layers of engines, whose modules every process takes seconds to load; else empty."""
    return "any layer" if case.op == "layer" and variant.name in names.ENGINES else ""


def _tiny(op: str, weights: str) -> Case:
    """A case for the interpreter; fp32 activations, since its products of bf16 are wrong."""
    shape = {"model": names.TINY, "E": 3, "H": 128, "I": 128, "top_k": 2, "T": 5, "routing": "zipf 1"}
    return Case(op, shape | {"weights": weights, "activations": "fp32"})


STUDY = Study(
    name="moe_persistent_grid",
    title="Expert layers and the persistent grid",
    summary="When does a persistent grid pay for mixture-of-experts layers, why did it not, and how fast can they be?",
    cases=cases,
    variants=names.of,
    control=lambda x: names.lines(x)[0].name,
    floor=lazy(f"{names.STUDY}.work:floor"),
    claims=claims.CLAIMS,
    pairs=claims.pairs,
    parameters={
        "models": list_of(one_of(*MODELS)),
        "tokens": list_of(integer(1, 65536)),
        "weights": list_of(one_of(*WEIGHTS)),
        "routings": list_of(one_of(*KINDS)),
        "gemms": list_of(one_of(*MODELS), empty=True),  # without: no single GEMM
        "gemm_tokens": list_of(integer(1, 65536), empty=True),
        "wave_tokens": list_of(integer(1, 65536), empty=True),
    },
    tiny=(_tiny("layer", "fp32"), _tiny("layer", "INT4"), _tiny("gemm1", "INT4"), _tiny("designs", "fp32")),
    early=lambda case: case.op == "tune",
    settle=settle,
    anew=_anew,
    imports=("liger_kernel.ops.fused_moe",),
    kernels=lazy(f"{names.STUDY}.ahead:launches"),
    timelines=Timelines(
        _case("layer", QWEN35_35B.name, 128, "bf16"), lazy(f"{names.STUDY}.timelines:take"), names.BY_TILES_SOURCE
    ),
    added=Added(
        ("x", "ids", "weights", "w1", "w2", "out"),
        "One expert layer. x: [T, H]; ids: [T, top_k], int32; weights: [T, top_k], fp32; w1: [E, 2 I, H], gate before "
        "up; w2: [E, H, I]; out: [T, H], to be written: the sum over j of weights[:, j] · w2[e] (SiLU(gate) · up) with "
        "[gate, up] = w1[e] x and e = ids[:, j]. x, w1, w2 and out are bf16 (fp32 in the tiny cases).",
        lazy(f"{names.STUDY}.trials:added"),
        lambda case: case.op == "layer" and case["weights"] != "INT4",
        ("cold",),
        ("activations", ("bf16", "fp32")),
    ),
)
