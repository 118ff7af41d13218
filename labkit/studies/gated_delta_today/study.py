"""Study 06: decode of the gated delta rule that seldom writes its state, and prefill in segments."""

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.bench.spec import Case, Floor, Study, Variant, integer, list_of, one_of
from labkit.shapes import KIMI_LINEAR, QWEN35_4B
from labkit.studies.gated_delta_today import claims
from labkit.studies.gated_delta_today.variants import (
    FLASHINFER,
    LENGTHS,
    NARROW,
    PREFILLS,
    STATES,
    TINY,
    VERIFY_LENGTH,
    control,
    variants,
)
from labkit.studies.gated_delta_today.work import prefill_floor, ring_floor, verify_floor

GATES = {"GDN": QWEN35_4B, "KDA": KIMI_LINEAR}  # kind of gate -> the model whose heads it is timed with
KDA_BATCHES = (1, 8, 64, 256)  # of those asked for
FULL = 256  # sequences of the cases over L and over the layout, if it is one of those asked for
DRAFTS = (("chain", 4), ("chain", 8), ("tree", 8))  # kind of draft, and its tokens
HEADS = ((2, 8), (4, 12), (16, 32))  # H and HV of prefill: of one GPU of many, up to all heads of a model
DRIFT_TOKENS = 8192
WARMED = ("length", "ring_verify", "prefill")  # in which others compile many kernels
COUNTED = 256  # sequences, or tokens, of the cases whose hardware counters are taken


def kernels(some: Sequence[Case], capability: int, gpu: str) -> list[tuple[str, Mapping[str, Any]]]:
    """All kernels of the lab."""
    from labkit.sweep.variants import ahead

    return ahead("gated_delta_today", [(x, one) for x in some for one in variants(x)], capability)


def _warmed(case: Case, variant: Variant) -> str:
    """What others' kernels of a case depend on, where they compile many that are kept; else empty."""
    if case.op not in WARMED or variant.name == FLASHINFER:
        return ""
    return ", ".join([case.op, *(str(case.params.get(name)) for name in ("gate", "HV", "state", "draft", "T"))])


def _anew(case: Case, variant: Variant) -> str:
    """What FlashInfer's kernels depend on, whose compiler keeps nothing on disk; else empty."""
    return f"{case['HV']}, {len(LENGTHS[case['prefill']])}" if variant.name == FLASHINFER else ""


def cases(parameters: Mapping[str, Any]) -> list[Case]:
    """Decode over batch, over L and over the layout; verify; prefill; drift."""
    found = [one for gate in parameters["gates"] for one in _decodes(gate, parameters)]
    if "GDN" in parameters["gates"]:
        found += [
            Case("ring_verify", shape("GDN") | {"state": state, "batch": n, "draft": draft, "T": tokens})
            for state in _wide(parameters)
            for n in parameters["verify_batches"]
            for draft, tokens in DRAFTS
        ]
        found += [
            Case("prefill", shape("GDN") | {"H": H, "HV": HV, "prefill": name})
            for H, HV in HEADS
            for name in parameters["prefills"]
        ]
    return found


def _decodes(gate: str, parameters: Mapping[str, Any]) -> list[Case]:
    """The cases of decode with one kind of gate."""
    common, states = shape(gate), _wide(parameters)
    batches = [n for n in parameters["batches"] if gate == "GDN" or n in KDA_BATCHES]
    found = [Case("ring", common | {"state": state, "batch": n}) for state in states for n in batches]
    full = [common | {"state": state, "batch": FULL} for state in states] if FULL in batches else []
    found += [Case("length", one) for one in full]
    if gate == "GDN":
        narrow = [state for state in parameters["states"] if state in NARROW]
        found += [Case("ring", common | {"state": state, "batch": FULL}) for state in narrow if FULL in batches]
        found += [Case("layout", one | {"writes": writes}) for one in full for writes in ("1 in L", "never")]
        states = [*states, *narrow]
    return found + [Case("drift", common | {"state": state, "batch": 1, "tokens": DRIFT_TOKENS}) for state in states]


def _wide(parameters: Mapping[str, Any]) -> list[str]:
    """The types of the state of those asked for that all operations have."""
    return [state for state in parameters["states"] if state in STATES]


def shape(gate: str) -> dict[str, Any]:
    """What all cases with a kind of gate have in common."""
    model = GATES[gate]
    heads = {"H": model.heads, "HV": model.value_heads, "K": model.k, "V": model.v}
    return {"activations": "bf16", "model": model.name, "gate": gate} | heads


def floor(x: Case) -> Floor:
    """The least bytes of a case: see `work`. Of a decode with its best L, where L is not the case's."""
    if x.op == "prefill":
        return prefill_floor(x, LENGTHS[x["prefill"]])
    return verify_floor(x, VERIFY_LENGTH) if x.op == "ring_verify" else ring_floor(x)


def counted(parameters: Mapping[str, Any]) -> list[tuple[Case, str]]:
    """The decode and the verify that write and those that do not, at one batch; the lab's prefills of one prompt."""
    few = dict(parameters) | {"gates": ["GDN"], "prefills": ["1 x 8192"]}
    few |= {name: [COUNTED] for name in ("batches", "verify_batches")}
    wanted = {"ring": ("ours, ring", "ours, state written"), "ring_verify": ("ours, ring", "ours, states stored")}
    wanted |= {"prefill": ("ours, fused", "ours, segments", "ours, one segment")}
    return [(x, name) for x in cases(few) for name in wanted.get(x.op, ()) if x.params.get("T", 4) == 4]


def _tiny() -> list[Case]:
    """Cases for the interpreter; fp32 activations, since it cannot round to bf16."""
    found = []
    for gate in GATES:
        shape = {"model": "tiny", "activations": "fp32", "gate": gate, "H": 2, "HV": 4, "K": 32, "V": 24}
        found += [Case("ring", shape | {"state": state, "batch": 2}) for state in STATES]
        if gate == "GDN":
            found += [Case("layout", shape | {"state": "fp32", "batch": 2, "writes": "never"})]
            found += [
                Case("ring_verify", shape | {"state": "fp32", "batch": 2, "draft": draft, "T": 3})
                for draft in ("chain", "tree")
            ]
            found += [Case("prefill", shape | {"prefill": TINY})]
    return found


STUDY = Study(
    name="gated_delta_today",
    title="Gated delta rule today: write the state seldom, cut long prompts",
    summary="Does decode gain from writing its state once in L tokens, and prefill from cutting long prompts?",
    cases=cases,
    variants=variants,
    control=control,
    floor=floor,
    claims=claims.CLAIMS,
    pairs=claims.pairs,
    parameters={
        "gates": list_of(one_of(*GATES)),
        "states": list_of(one_of(*STATES, *NARROW)),
        "batches": list_of(integer(1, 4096), empty=True),
        "verify_batches": list_of(integer(1, 4096), empty=True),
        "prefills": list_of(one_of(*PREFILLS), empty=True),
    },
    counted=counted,
    early=lambda case: case.op == "drift",  # the same in every process
    warmed=_warmed,
    anew=_anew,
    imports=("fla.ops.gated_delta_rule",),
    kernels=kernels,
    tiny=tuple(_tiny()),
)
