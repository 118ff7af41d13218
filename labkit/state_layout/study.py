"""Study 01: does the state layout [V, K] make decode of the gated delta rule faster than [K, V]?"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from labkit.bench.spec import Added, Case, Floor, Rule, Study, Trial, Variant, integer, list_of, one_of
from labkit.shapes import GATED_DELTA, KIMI_LINEAR, QWEN3_NEXT
from labkit.state_layout import claims, names, trials
from labkit.state_layout.tables import CEILING, LAYOUTS, TILES, WARPS, variant_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of the state
GATES = {"GDN": QWEN3_NEXT, "KDA": KIMI_LINEAR}  # kind of gate -> the model whose heads it is timed with
KDA_BATCHES = (1, 64, 256)  # of those asked for
VERIFY_BATCHES = (1, 16, 64)
DRAFTS = (("chain", 4), ("tree", 8))  # kind of draft, and its tokens
STATE_KERNEL_AT = ("1 x 8192", "8 x 1024", "64 x 128")  # where the chunk-state kernel is timed alone
CHUNK = 64  # tokens, of extend
COUNTED = 16  # smallest batch whose hardware counters are taken, if a larger one is asked for at all
GRID_MODEL = QWEN3_NEXT.name  # the one model that is timed with every number of warps
HERE = "labkit.state_layout.trials"


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
    shape = {"gate": gate, "activations": "bf16"} | _heads(GATES[gate])
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
    drifting = {"batch": 1, "tokens": trials.DRIFT_TOKENS}
    return found + [Case("drift", shape | drifting | {"state": state}) for state in parameters["states"]]


def _heads(model: Any) -> dict[str, Any]:
    return {"model": model.name, "H": model.heads, "HV": model.value_heads, "K": model.k, "V": model.v}


def case(model: Any, batch: int, state: str) -> Case:
    """One decode step of a batch in one layer of a model."""
    return Case("decode", {"batch": batch, "state": state, "activations": "bf16"} | _heads(model))


def floor(x: Case) -> Floor:
    """What must move: the states, and all that a token brings and takes; see the function of each operation."""
    return {"verify": _verify_floor, "extend": _extend_floor, "chunk_state": _chunk_state_floor}.get(x.op, _step_floor)(
        x
    )


def _step_floor(x: Case) -> Floor:
    """State read and written once; q, k, v, the gates and the index read, the output written."""
    state = x["batch"] * _state_bytes(x)
    small = x["batch"] * (_token_bytes(x) + 4)  # and int32 indices
    return Floor(2 * state + small, 7 * x["batch"] * x["HV"] * x["K"] * x["V"], "in_place", set_bytes=state)


def _verify_floor(x: Case) -> Floor:
    """State read once, written once a draft token; the tokens."""
    state, tokens = x["batch"] * _state_bytes(x), x["batch"] * x["T"]
    moved = (1 + x["T"]) * state + tokens * _token_bytes(x)
    return Floor(moved, 7 * tokens * x["HV"] * x["K"] * x["V"], "copy", set_bytes=moved)


def _extend_floor(x: Case) -> Floor:
    """The tokens, with their gates in fp32 as extend takes them, and the first and last state of every sequence.

    The arithmetic is that of the chunked form, which moves more: what one kernel leaves for the next is not counted.
    """
    lengths = trials.LENGTHS[x["prefill"]]
    gates = sum(lengths) * x["HV"] * 4 * (1 + (x["K"] if x["gate"] == "KDA" else 1))
    values = sum(lengths) * (2 * x["H"] * x["K"] + 2 * x["HV"] * x["V"]) * _itemsize(x["activations"])
    states = 2 * len(lengths) * x["HV"] * x["K"] * x["V"] * 4
    flops = sum(lengths) * x["HV"] * (6 * x["K"] * x["V"] + 2 * CHUNK * (2 * x["K"] + 2 * x["V"]))
    return Floor(values + gates + states, flops, "copy")


def _chunk_state_floor(x: Case) -> Floor:
    """w, u and k read, v_new and the state before each chunk written, in the inputs' dtype; first and last state."""
    lengths = trials.LENGTHS[x["prefill"]]
    chunks = sum(-(-length // CHUNK) for length in lengths)
    values = sum(lengths) * (x["HV"] * (x["K"] + 2 * x["V"]) + x["H"] * x["K"]) + chunks * x["HV"] * x["K"] * x["V"]
    states = 2 * len(lengths) * x["HV"] * x["K"] * x["V"] * 4
    flops = 4 * sum(lengths) * x["HV"] * x["K"] * x["V"]
    return Floor(values * _itemsize(x["activations"]) + states, flops, "copy")


def _state_bytes(x: Case) -> int:
    """Of one sequence in one layer."""
    return x["HV"] * x["K"] * x["V"] * _itemsize(x["state"])


def _token_bytes(x: Case) -> int:
    """q, k, v, a and b of one token read, its output written."""
    gate = x["K"] if x.params.get("gate") == "KDA" else 1
    values = 2 * x["H"] * x["K"] + 2 * x["HV"] * x["V"] + x["HV"] * (1 + gate)
    return values * _itemsize(x["activations"])


def _itemsize(dtype: str) -> int:
    return trials.DTYPES[dtype].itemsize


def variants(x: Case) -> list[Variant]:
    """The grid: both layouts at every tile, Qwen3-Next's with every number of warps, folded forms, the ceiling.

    Of the other operations, the lab's kernels in both layouts and the libraries'.
    """
    if x.op == "decode":
        return _grid(x)
    found = [_ceiling(("cold",))] if x.op in ("step", "drift") else []
    return found + [_variant(x.op, name, role) for name, role in names.of(x).items()]


def _grid(x: Case) -> list[Variant]:
    warps = WARPS if x["model"] == GRID_MODEL else (1,)
    grid = [(layout, tile, w, False) for layout in LAYOUTS for tile in TILES for w in warps]
    grid += [("VK", tile, 1, True) for tile in TILES]
    return [_ceiling(), *(_kernel(*point) for point in grid)]


def _variant(op: str, name: str, role: str) -> Variant:
    make, options = names.MAKERS[op, name]
    prepare = getattr(trials, make)
    source = f"{HERE}:{make}"
    return Variant(
        name, role, source, lambda x, device, sets, seed: prepare(x, device, sets, seed, **options), options, ("cold",)
    )


def counted(parameters: Mapping[str, Any]) -> list[tuple[Case, str]]:
    """Both layouts at every tile, one warp, at the first model and a batch that is small and yet fills the GPU."""
    batch = min((size for size in parameters["batches"] if size >= COUNTED), default=max(parameters["batches"]))
    some = cases(dict(parameters) | {"models": parameters["models"][:1], "batches": [batch], "gates": []})
    return [(x, variant_name(layout, tile)) for x in some for layout in LAYOUTS for tile in TILES]


def control(x: Case) -> str:
    """The variant that the A/A control repeats."""
    return variant_name("VK", 8) if x.op == "decode" else next(iter(names.of(x)))


def _kernel(layout: str, tile: int, warps: int, folded: bool) -> Variant:
    def prepare(x: Case, device: Any, sets: int, seed: int) -> Trial:
        return trials.grid(x, device, sets, seed, layout, launcher, {"tile": tile, "num_warps": warps} | extra)

    extra = {"folded": True} if folded else {}
    launcher = "decode_v_first" if layout == "VK" else "decode_k_first"
    # The change that the pull request made: K-first before, V-first after, at the narrow tile.
    role = "baseline" if (layout, tile, warps) == ("KV", 8, 1) else "step"
    options = {"layout": layout, "BV": tile, "warps": warps, "folded": folded}
    source = f"labkit.state_layout.kernels:{launcher}"
    return Variant(variant_name(layout, tile, warps, folded), role, source, prepare, options)


def _ceiling(caches: tuple[str, ...] = ("cold", "hot")) -> Variant:
    return Variant(CEILING, "ceiling", "labkit.state_layout.study:multiply_state", multiply_state, {}, caches)


def multiply_state(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The ceiling: the same states multiplied in place by PyTorch; each byte read and written once, no other work."""
    states = torch.ones((sets, x["batch"] * x["HV"] * x["K"] * x["V"]), dtype=DTYPES[x["state"]], device=device)
    return Trial([lambda row=row: row.mul_(-1.0) for row in states])


def _added(function: Callable[..., Any], x: Case, device: Any, sets: int, seed: int) -> Trial:
    return trials.added(function, x, device, sets, seed)


def _or_none(rule: Rule) -> Rule:
    """Of a list that may also be empty: the operations that it is about are then left out."""
    return lambda value: None if value == [] else rule(value)


def _tiny(state: str, K: int, V: int) -> Case:
    """A case for the interpreter; fp32 activations, since it cannot round to bf16."""
    shape = {"H": 2, "HV": 4, "K": K, "V": V}
    return Case("decode", {"model": "tiny", "batch": 3, "state": state, "activations": "fp32"} | shape)


def _tiny_production(gate: str) -> list[Case]:
    """Cases of the other operations for the interpreter."""
    shape = {"gate": gate, "model": "tiny", "H": 2, "HV": 4, "K": 16, "V": 24, "activations": "fp32"}
    found = [Case("step", shape | {"state": state, "batch": 3}) for state in DTYPES]
    found += [Case("verify", shape | {"state": "fp32", "batch": 2, "draft": draft, "T": 3}) for draft, _ in DRAFTS]
    return [*found, Case("extend", shape | {"prefill": trials.TINY})]


STUDY = Study(
    name="state_layout",
    title="State layout of the gated delta rule",
    summary="Does keeping the recurrent state as [V, K] instead of [K, V] make decode faster, where, and why?",
    cases=cases,
    variants=variants,
    control=control,
    floor=floor,
    claims=claims.CLAIMS,
    parameters={
        "models": list_of(one_of(*GATED_DELTA)),
        "batches": list_of(integer(1, 4096)),
        "states": list_of(one_of(*DTYPES)),
        "gates": _or_none(list_of(one_of(*GATES))),
        "step_batches": _or_none(list_of(integer(1, 4096))),
        "prefills": _or_none(list_of(one_of(*trials.PREFILLS))),
    },
    counted=counted,
    added=Added(
        trials.SIGNATURE,
        "One decode step of N sequences. state: pool [slots, HV, V, K], fp32 or bf16, updated in place in the slots "
        "that indices ([N], int32, each once) names; q, k: [N, H, K], not normalised; v: [N, HV, V]; a, b: [N, HV]; "
        "A_log, dt_bias: [HV], fp32; out: [N, HV, V], to be written; scale: a float, K ** -0.5. q, k, v, a, b and out "
        "are bf16 (fp32 in the tiny cases); value head i reads q and k of head i // (HV // H).",
        _added,
        lambda case: case.op == "decode",
    ),
    early=lambda case: case.op == "drift",  # the same in every process
    tiny=(
        *(_tiny(state, K, V) for state in DTYPES for K, V in ((32, 16), (16, 40))),
        *(case for gate in GATES for case in _tiny_production(gate)),
    ),
)
