"""Study 01: does the state layout [V, K] make decode of the gated delta rule faster than [K, V]?"""

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.bench.spec import Added, Case, Floor, Study, Variant, integer, lazy, list_of, one_of
from labkit.shapes import GATED_DELTA, KIMI_LINEAR, QWEN3_NEXT
from labkit.studies.state_layout import claims
from labkit.studies.state_layout.variants import (
    LAYOUTS,
    LENGTHS,
    LONG,
    PREFILLS,
    SIGNATURE,
    STATES,
    TILES,
    TINY,
    TOKENS,
    TRIALS,
    control,
    in_dsl,
    variant_name,
    variants,
)

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
GATES = {"GDN": QWEN3_NEXT, "KDA": KIMI_LINEAR}  # kind of gate -> the model whose heads it is timed with
KDA_BATCHES = (1, 64, 256)  # of those asked for
VERIFY_BATCHES = (1, 16, 64)
DRAFTS = (("chain", 4), ("tree", 8))  # kind of draft, and its tokens
DRIFT_TOKENS = 8192
LONG_HEADS = {"Qwen3.5-122B-A10B, one of 8 GPUs": (2, 8), QWEN3_NEXT.name: (16, 32)}  # whose -> H and HV
STATE_KERNEL_AT = ("1 x 8192", "8 x 1024", "64 x 128")  # where the chunk-state kernel is timed alone
CHUNK = 64  # tokens, of extend
AHEAD = ("decode", "step", "drift", "verify", "extend", "long")  # whose kernels are compiled before they are timed
WARMED = ("step", "verify", "extend", "long")  # in which others compile many kernels
WARMED_BATCHES = (1, 256)  # of a step: others compile the same for every batch, but for SGLang; a quick look has both
LARGE = 32  # sequences from which others' kernels in the CuTe DSL are the same
COUNTED = 16  # smallest batch whose hardware counters are taken, if a larger one is asked for at all


def cases(parameters: Mapping[str, Any]) -> list[Case]:
    """The grid (every model × state dtype × batch), then the production kernels: step, verify, extend, drift."""
    grid = [
        case(GATED_DELTA[model], batch, state)
        for model in parameters["models"]
        for state in parameters["states"]
        for batch in parameters["batches"]
    ]
    return grid + [found for gate in parameters["gates"] for found in _production(gate, parameters)]


def _production(gate: str, parameters: Mapping[str, Any]) -> list[Case]:
    """The cases of one kind of gate."""
    shape = {"gate": gate} | _shape(GATES[gate])
    batches = [n for n in parameters["step_batches"] if gate == "GDN" or n in KDA_BATCHES]
    found = [Case("step", shape | {"state": state, "batch": n}) for state in parameters["states"] for n in batches]
    found += [
        Case("verify", shape | {"state": "fp32", "batch": n, "draft": draft, "T": tokens})
        for n in (VERIFY_BATCHES if gate == "GDN" else VERIFY_BATCHES[1:2])
        for draft, tokens in DRAFTS
    ]
    prefills = [name for name in parameters["prefills"] if gate == "GDN" or name in STATE_KERNEL_AT]
    found += [Case("extend", shape | {"prefill": name}) for name in prefills]
    if gate == "GDN":
        found += [Case("chunk_state", shape | {"prefill": name}) for name in prefills if name in STATE_KERNEL_AT]
        heads = [{"model": name, "H": H, "HV": HV} for name, (H, HV) in LONG_HEADS.items()]
        found += [
            Case("long", shape | few | {"prefill": name}) for few in heads for name in LONG if LONG[0] in prefills
        ]
    drifting = {"batch": 1, "tokens": DRIFT_TOKENS}
    return found + [Case("drift", shape | drifting | {"state": state}) for state in parameters["states"]]


def case(model: Any, batch: int, state: str) -> Case:
    """One decode step of a batch in one layer of a model."""
    return Case("decode", {"batch": batch, "state": state} | _shape(model))


def _shape(model: Any) -> dict[str, Any]:
    heads = {"H": model.heads, "HV": model.value_heads, "K": model.k, "V": model.v}
    return {"activations": "bf16", "model": model.name} | heads


def floor(x: Case) -> Floor:
    """What must move. A step: the states in place, and all that a token brings and takes, its int32 index included.

    A verify: the states read once, written once a draft token; the tokens. The others: see `_prefill_floor`.
    """
    if x.op in ("extend", "long", "chunk_state"):
        return _prefill_floor(x)
    tokens = x["batch"] * (x["T"] if x.op == "verify" else 1)
    state = x["batch"] * x["HV"] * x["K"] * x["V"] * ITEMSIZE[x["state"]]
    gate = x["K"] if x.params.get("gate") == "KDA" else 1
    values = 2 * x["H"] * x["K"] + 2 * x["HV"] * x["V"] + x["HV"] * (1 + gate)  # of q, k, v, a, b and the output
    small, flops = tokens * values * ITEMSIZE[x["activations"]], 7 * tokens * x["HV"] * x["K"] * x["V"]
    if x.op == "verify":
        moved = (1 + x["T"]) * state + small
        return Floor(moved, flops, "copy", set_bytes=moved)
    return Floor(2 * state + small + 4 * tokens, flops, "in_place", set_bytes=state)


def _prefill_floor(x: Case) -> Floor:
    """The first and last state of every sequence, fp32. Of an extend, the tokens, with their gates in fp32 as it takes
    them; the arithmetic is that of the chunked form, which moves more: what one kernel leaves for the next is not
    counted. Of chunk_state, w, u and k read, v_new and the state before each chunk written, in the inputs' dtype.
    """
    H, HV, K, V, lengths = x["H"], x["HV"], x["K"], x["V"], LENGTHS[x["prefill"]]
    tokens, fp32_bytes = sum(lengths), 2 * len(lengths) * HV * K * V * 4
    if x.op != "chunk_state":
        fp32_bytes += tokens * HV * 4 * (1 + (K if x["gate"] == "KDA" else 1))  # the gates
        values = tokens * (2 * H * K + 2 * HV * V)
        flops = tokens * HV * (6 * K * V + 2 * CHUNK * (2 * K + 2 * V))
    else:
        chunks = sum(-(-length // CHUNK) for length in lengths)
        values = tokens * (HV * (K + 2 * V) + H * K) + chunks * HV * K * V
        flops = 4 * tokens * HV * K * V
    return Floor(values * ITEMSIZE[x["activations"]] + fp32_bytes, flops, "copy")


def counted(parameters: Mapping[str, Any]) -> list[tuple[Case, str]]:
    """Both layouts at every tile, one warp, at the first model and a batch that is small and yet fills the GPU."""
    batch = min((size for size in parameters["batches"] if size >= COUNTED), default=max(parameters["batches"]))
    some = cases(dict(parameters) | {"models": parameters["models"][:1], "batches": [batch], "gates": []})
    return [(x, variant_name(layout, tile)) for x in some for layout in LAYOUTS for tile in TILES]


def kernels(some: Sequence[Case], capability: int, gpu: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The lab's own kernels, where their launches can be known without values."""
    from labkit.sweep.variants import ahead

    wanted = [(x, one) for x in some if x.op in AHEAD for one in variants(x) if one.name != TOKENS]
    return ahead("state_layout", wanted, capability)


def _warmed(case: Case, variant: Variant) -> str:
    """What others' kernels of a case depend on, where they compile many that are kept; else empty."""
    if case.op not in WARMED or in_dsl(variant):
        return ""
    if case.op == "step" and case["batch"] not in WARMED_BATCHES and not variant.name.startswith("sglang"):
        return ""
    return ", ".join([case.op, *(str(case.params.get(name)) for name in ("gate", "HV", "state"))])


def _anew(case: Case, variant: Variant) -> str:
    """What a kernel in the CuTe DSL depends on, which keeps nothing on disk; else empty."""
    if not in_dsl(variant):
        return ""
    size = min(case["batch"], LARGE) if "batch" in case.params else len(LENGTHS[case["prefill"]])
    return ", ".join([str(size), *(str(case.params.get(name)) for name in ("HV", "state", "draft", "T"))])


def _tiny() -> list[Case]:
    """Cases for the interpreter; fp32 activations, since it cannot round to bf16."""
    shape = {"model": "tiny", "activations": "fp32", "H": 2, "HV": 4}
    sizes = [(state, {"K": K, "V": V}) for state in STATES for K, V in ((32, 16), (16, 40))]
    found = [Case("decode", shape | {"state": state, "batch": 3} | size) for state, size in sizes]
    for gate in GATES:
        gated = shape | {"gate": gate, "K": 16, "V": 24}
        found += [Case("step", gated | {"state": state, "batch": 3}) for state in STATES]
        found += [Case("verify", gated | {"state": "fp32", "batch": 2, "draft": draft, "T": 3}) for draft, _ in DRAFTS]
        found += [Case("extend", gated | {"prefill": TINY})]
    return found


STUDY = Study(
    name="state_layout",
    title="State layout of the gated delta rule",
    summary="Does keeping the recurrent state as [V, K] instead of [K, V] make decode faster, where, and why?",
    cases=cases,
    variants=variants,
    control=control,
    floor=floor,
    claims=claims.CLAIMS,
    pairs=claims.pairs,
    parameters={
        "models": list_of(one_of(*GATED_DELTA)),
        "batches": list_of(integer(1, 4096)),
        "states": list_of(one_of(*STATES)),
        "gates": list_of(one_of(*GATES), empty=True),
        "step_batches": list_of(integer(1, 4096), empty=True),
        "prefills": list_of(one_of(*PREFILLS), empty=True),
    },
    kernels=kernels,
    counted=counted,
    added=Added(
        SIGNATURE,
        "One decode step of N sequences. state: pool [slots, HV, V, K], fp32 or bf16, updated in place in the slots "
        "that indices ([N], int32, each once) names; q, k: [N, H, K], not normalised; v: [N, HV, V]; a, b: [N, HV]; "
        "A_log, dt_bias: [HV], fp32; out: [N, HV, V], to be written; scale: a float, K ** -0.5. q, k, v, a, b and out "
        "are bf16 (fp32 in the tiny cases); value head i reads q and k of head i // (HV // H).",
        lazy(f"{TRIALS}:added"),
        lambda case: case.op == "decode",
        dtypes=("activations", ("bf16", "fp32")),
    ),
    early=lambda case: case.op == "drift",  # the same in every process
    warmed=_warmed,
    anew=_anew,
    imports=("fla.ops.gated_delta_rule", "fla.ops.kda"),
    tiny=tuple(_tiny()),
)
