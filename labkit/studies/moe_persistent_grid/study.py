"""Study 04: a persistent grid for expert layers: when it pays, why it did not, and how fast such a layer can be."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.bench.spec import Added, Case, Floor, Rule, Study, Variant, integer, list_of, one_of
from labkit.kernels.experts import choose
from labkit.studies.moe_persistent_grid import ahead, claims, tables, trials, work
from labkit.studies.moe_persistent_grid import variants as names
from labkit.studies.moe_persistent_grid.models import MIXTRAL, MODELS, QWEN3_30B, QWEN35_35B
from labkit.studies.moe_persistent_grid.routings import KINDS

WEIGHTS = ("bf16", "INT4")
UNIFORM = KINDS[0]
SKEWED_AT = (128, 4096)  # tokens at which other routings than the uniform one are timed
SKEWED = (QWEN3_30B.name, MIXTRAL.name)  # and models
ABLATED = (QWEN35_35B.name, MIXTRAL.name)  # models for which every change is timed, the first one the source's
ABLATED_AT = {"INT4": (16, 128, 512, 1642), "bf16": (128, 1642)}  # and tokens; the source's weights are INT4
TUNED_UP_TO = 4096  # tokens, up to which candidates are timed: beyond, all models fill the widest tile, the rule's
INT4_UP_TO = 512  # tokens, up to which INT4 GEMMs of the models that are not ablated are timed: the weights bound them
READ_UP_TO = 1642  # tokens, up to which reading the weights bounds a layer, and what a launch costs is seen
COUNTED_AT = 1642  # tokens at which hardware counters are taken
HERE = "labkit.studies.moe_persistent_grid.trials"


def cases(parameters: Mapping[str, Any]) -> list[Case]:
    """What is tuned, then model by model its layers and its single GEMMs, then the GEMM of few waves."""
    tuned = [
        Case("tune", _params(model, tokens, weights))
        for model in parameters["models"]
        for weights in parameters["weights"]
        for tokens in parameters["tokens"]
        if tokens <= TUNED_UP_TO
    ]
    every = dict.fromkeys([*parameters["models"], *parameters["gemms"]])
    found = [x for model in every for weights in parameters["weights"] for x in _of_model(model, weights, parameters)]
    return tuned + found + [_waves(tokens) for tokens in parameters["wave_tokens"]]


def _of_model(model: str, weights: str, parameters: Mapping[str, Any]) -> list[Case]:
    """Layers and GEMMs of a model with one kind of weights."""
    found = []
    if model in parameters["models"]:
        routings = {tokens: [UNIFORM] for tokens in parameters["tokens"]}
        for tokens in set(SKEWED_AT) & set(routings) if model in SKEWED and weights != "INT4" else ():
            routings[tokens] = [UNIFORM, *(kind for kind in parameters["routings"] if kind != UNIFORM)]
        found = [Case("layer", _params(model, t, weights, kind)) for t, kinds in routings.items() for kind in kinds]
    if model in parameters["gemms"]:
        found += [
            Case(op, _params(model, tokens, weights))
            for op in ("gemm1", "gemm2")
            for tokens in parameters["gemm_tokens"]
            if weights != "INT4" or tokens <= INT4_UP_TO or _ablated(model, weights, tokens)
        ]
    return found


def _ablated(model: str, weights: str, tokens: int) -> bool:
    """Whether every change of the source's kernel is timed in a case; weights: of a tiny case, fp32 or INT4."""
    return model == TINY or (model in ABLATED and tokens in ABLATED_AT.get(weights, ()))


def _params(model: str, tokens: int, weights: str, routing: str = UNIFORM) -> dict[str, Any]:
    shape = {"T": tokens, "routing": routing, "weights": weights, "activations": "bf16"}
    return MODELS[model].as_dict() | shape


def _waves(tokens: int) -> Case:
    """All slots at one expert: a GEMM of few tiles, whose number goes up in small steps with the tokens."""
    return Case("waves", _params(QWEN3_30B.name, tokens, "bf16", "one expert"))


def floor(x: Case) -> Floor:
    """What must move and be computed; see work.py. The waves are those of GEMM1."""
    return work.floor(Case("gemm1", x.params) if x.op == "waves" else x)


def variants(x: Case) -> list[Variant]:
    """Candidates of the table (tune), whole layers and their rivals (layer), the grids (gemm1, gemm2, waves)."""
    if x.op == "tune":
        return [_candidate(one) for one in trials.candidates(x)]
    return [_variant(x, name, role) for name, role in roles(x).items()]


def roles(x: Case) -> dict[str, str]:
    """Name -> role of a case's variants, the first one repeated as A/A."""
    if x.op == "waves":
        return dict.fromkeys(names.STEPPED, "step")
    ablated = _ablated(x["model"], x["weights"], x["T"])
    if x.op == "layer":
        found = names.layer_variants(x["weights"], x["routing"] == UNIFORM or x["model"] == TINY, ablated)
    else:
        own_point = (x["model"], x["weights"], x["T"]) in (
            (QWEN35_35B.name, "INT4", tables.SOURCE_T),
            (TINY, "INT4", 5),
        )
        found = names.gemm_variants(x["weights"], ablated, own_point)
    if x["T"] == names.TUNED_FOR:
        found.pop(names.OTHER_TOKENS, None)
    if x["T"] > 1:
        for name in (names.BY_TILES, names.BYTES, names.WORDS):
            found.pop(name, None)
    elif x["weights"] == "INT4":  # nothing about one token is tuned
        found.pop(names.RULE, None)
    if x["T"] > READ_UP_TO:
        for name in (names.READ, names.ORDINARY):
            found.pop(name, None)
    return found


def control(x: Case) -> str:
    """The variant that the A/A control repeats."""
    return str(trials.candidates(x)[0]) if x.op == "tune" else next(iter(roles(x)))


def _candidate(choice: choose.Candidate) -> Variant:
    def prepare(x: Case, device: Any, sets: int, seed: int) -> Any:
        return trials.candidate(x, device, sets, seed, choice)

    options = {"gemm": choice.gemm, "block_m": choice.block_m, "tile": choice.tile.as_dict()}
    source = names.launchers("tune", 0, "candidate", options)
    return Variant(str(choice), "step", source, prepare, options, ("cold",))


def _variant(x: Case, name: str, role: str) -> Variant:
    make, options = names.makers(x.op, x["weights"], x["T"])[name]
    prepare = getattr(trials, make)
    source = names.launchers(x.op, x["T"], make, options)
    return Variant(
        name, role, source, lambda x, device, sets, seed: prepare(x, device, sets, seed, **options), options,
        ("cold",), "eager" if name == names.LOOP else "graph",
    )  # fmt: skip


def kernels(some: Sequence[Case], capability: int) -> list[tuple[str, Mapping[str, Any]]]:
    """What the cases launch, each kernel once for all cases that it is the same in."""
    return ahead.sources(some, lambda x: [] if x.op == "tune" else list(roles(x)), capability)


def counted(parameters: Mapping[str, Any]) -> list[tuple[Case, str]]:
    """Tile orders of the source's GEMM1, of the two models that are ablated: what the L2 holds of the weights."""
    wanted = [names.grouped(size) for size in names.GROUPS]
    return [
        (x, name)
        for x in cases(parameters)
        if x.op == "gemm1" and x["model"] in ABLATED and x["T"] == COUNTED_AT
        for name in (*wanted, names.OURS_TILES)
    ]


def settle(rows: Path, folder: Path) -> None:
    """Write the tuned table of a GPU from the rows that its folder holds."""
    choose.write(folder, tables.fastest(rows))


def _added(function: Callable[..., Any], x: Case, device: Any, sets: int, seed: int) -> Any:
    return trials.added(function, x, device, sets, seed)


def _or_none(rule: Rule) -> Rule:
    """Of a list that may also be empty: what it is about is then left out."""
    return lambda value: None if value == [] else rule(value)


TINY = "tiny"


def _tiny(op: str, weights: str) -> Case:
    """A case for the interpreter; fp32 activations, since its products of bf16 are wrong."""
    shape = {"model": TINY, "E": 3, "H": 128, "I": 128, "top_k": 2, "T": 5, "routing": "zipf 1"}
    return Case(op, shape | {"weights": weights, "activations": "fp32"})


TOKENS = list_of(integer(1, 65536))
STUDY = Study(
    name="moe_persistent_grid",
    title="Expert layers and the persistent grid",
    summary="When does a persistent grid pay for mixture-of-experts layers, why did it not, and how fast can they be?",
    cases=cases,
    variants=variants,
    control=control,
    floor=floor,
    claims=claims.CLAIMS,
    parameters={
        "models": list_of(one_of(*MODELS)),
        "tokens": TOKENS,
        "weights": list_of(one_of(*WEIGHTS)),
        "routings": list_of(one_of(*KINDS)),
        "gemms": _or_none(list_of(one_of(*MODELS))),
        "gemm_tokens": _or_none(TOKENS),
        "wave_tokens": _or_none(TOKENS),
    },
    tiny=tuple(_tiny(*one) for one in (("layer", "fp32"), ("layer", "INT4"), ("gemm1", "INT4"))),
    early=lambda case: case.op == "tune",
    settle=settle,
    kernels=kernels,
    counted=counted,
    added=Added(
        trials.SIGNATURE,
        "One expert layer. x: [T, H]; ids: [T, top_k], int32; weights: [T, top_k], fp32; w1: [E, 2 I, H], gate before "
        "up; w2: [E, H, I]; out: [T, H], to be written: the sum over j of weights[:, j] · w2[e] (SiLU(gate) · up) with "
        "[gate, up] = w1[e] x and e = ids[:, j]. x, w1, w2 and out are bf16 (fp32 in the tiny cases).",
        _added,
        lambda case: case.op == "layer" and case["weights"] != "INT4",
        ("cold",),
    ),
)
