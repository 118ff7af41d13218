"""Study 01: does the state layout [V, K] make decode of the gated delta rule faster than [K, V]?"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.bench.spec import Added, Case, Floor, Study, Trial, Variant, integer, list_of, one_of
from labkit.launch import Launch
from labkit.shapes import GATED_DELTA, QWEN3_NEXT
from labkit.state_layout import claims, reference
from labkit.state_layout.tables import CEILING, LAYOUTS, TILES, WARPS, variant_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECKED = 8  # sequences compared with the float64 reference in each case
# Relative RMSE: a bf16 output rounds to 2^-9, an fp32 state differs by the order of its sums alone.
OUT_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}
STATE_TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3}  # Triton's interpreter truncates where the GPU rounds
SIGNATURE = ("state", "indices", "q", "k", "v", "a", "b", "A_log", "dt_bias", "out", "scale")  # of DecodeInputs
EACH = ("indices", "q", "k", "v", "a", "b", "out")  # what differs from one buffer set to the next
COUNTED = 16  # smallest batch whose hardware counters are taken, if a larger one is asked for at all
GRID_MODEL = QWEN3_NEXT.name  # the one model that is timed with every number of warps


def cases(parameters: Mapping[str, Any]) -> list[Case]:
    """Every model × state dtype × batch of the notebook's parameters."""
    return [
        case(GATED_DELTA[model], batch, state)
        for model in parameters["models"]
        for state in parameters["states"]
        for batch in parameters["batches"]
    ]


def case(model: Any, batch: int, state: str) -> Case:
    """One decode step of a batch in one layer of a model."""
    shape = {"H": model.heads, "HV": model.value_heads, "K": model.k, "V": model.v}
    return Case("decode", {"model": model.name, "batch": batch, "state": state, "activations": "bf16"} | shape)


def floor(x: Case) -> Floor:
    """State read and written once; q, k, v, the gates and the index read, the output written."""
    N, H, HV, K, V = (x[name] for name in ("batch", "H", "HV", "K", "V"))
    state = N * HV * K * V * DTYPES[x["state"]].itemsize
    small = N * ((2 * H * K + 2 * HV * V + 2 * HV) * DTYPES[x["activations"]].itemsize + 4)  # and int32 indices
    return Floor(2 * state + small, 7 * N * HV * K * V, "in_place", set_bytes=state)


def variants(x: Case) -> list[Variant]:
    """Both layouts at every tile (every number of warps too for Qwen3-Next's shape), folded forms, and the ceiling."""
    warps = WARPS if x["model"] == GRID_MODEL else (1,)
    grid = [(layout, tile, w, False) for layout in LAYOUTS for tile in TILES for w in warps]
    grid += [("VK", tile, 1, True) for tile in TILES]
    return [_ceiling(), *(_kernel(*point) for point in grid)]


def counted(parameters: Mapping[str, Any]) -> list[tuple[Case, str]]:
    """Both layouts at every tile, one warp, at the first model and a batch that is small and yet fills the GPU."""
    batch = min((size for size in parameters["batches"] if size >= COUNTED), default=max(parameters["batches"]))
    some = cases(dict(parameters) | {"models": parameters["models"][:1], "batches": [batch]})
    return [(x, variant_name(layout, tile)) for x in some for layout in LAYOUTS for tile in TILES]


def control(x: Case) -> str:
    """The variant that the A/A control repeats."""
    return variant_name("VK", 8)


def _kernel(layout: str, tile: int, warps: int, folded: bool) -> Variant:
    def prepare(x: Case, device: Any, sets: int, seed: int) -> Trial:
        from labkit.state_layout import kernels

        launch = getattr(kernels, launcher)
        return _decode_trial(x, device, sets, seed, layout, lambda item: launch(item, tile, warps, **extra))

    extra = {"folded": True} if folded else {}
    launcher = "decode_v_first" if layout == "VK" else "decode_k_first"
    # The change that the pull request made: K-first before, V-first after, at the narrow tile.
    role = "baseline" if (layout, tile, warps) == ("KV", 8, 1) else "step"
    options = {"layout": layout, "BV": tile, "warps": warps, "folded": folded}
    source = f"labkit.state_layout.kernels:{launcher}"
    return Variant(variant_name(layout, tile, warps, folded), role, source, prepare, options)


def _ceiling() -> Variant:
    return Variant(CEILING, "ceiling", "labkit.state_layout.study:multiply_state", multiply_state)


def multiply_state(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The ceiling: the same states multiplied in place by PyTorch; each byte read and written once, no other work."""
    states = torch.ones((sets, x["batch"] * x["HV"] * x["K"] * x["V"]), dtype=DTYPES[x["state"]], device=device)
    return Trial([lambda row=row: row.mul_(-1.0) for row in states])


def prepare_added(function: Callable[..., Any], x: Case, device: Any, sets: int, seed: int) -> Trial:
    """A decode step by a function of the reader's own, on a state [slots, HV, V, K]."""

    def bind(item: Any) -> Callable[[], Any]:
        values = [getattr(item, name) for name in SIGNATURE]
        return lambda: function(*values)

    return _decode_trial(x, device, sets, seed, "VK", bind)


def _decode_trial(
    x: Case, device: Any, sets: int, seed: int, layout: str, bind: Callable[[Any], Callable[[], Any]]
) -> Trial:
    """Decode steps on `sets` disjoint parts of one pool, each sequence in a slot of its own in random order.

    bind: DecodeInputs -> a call on them; a `Launch` where it is one of the lab's.
    """
    out = torch.empty((sets, x["batch"], x["HV"], x["V"]), dtype=DTYPES[x["activations"]], device=device)
    inputs = _inputs(x, out, seed, layout)
    calls = [bind(item) for item in inputs]

    def check() -> dict[str, float]:
        return _errors(inputs[0], calls[0], layout, x["state"])

    def poison() -> None:
        out.fill_(math.nan)

    def written() -> bool:
        return not bool(out.isnan().any())

    tolerance = {"out": OUT_TOLERANCE[x["activations"]], "state": STATE_TOLERANCE[x["state"]]}
    return Trial(calls, poison, written, check, tolerance, calls[0] if isinstance(calls[0], Launch) else None)


def _inputs(x: Case, out: Tensor, seed: int, layout: str) -> list[Any]:
    """One DecodeInputs for each set of `out` [sets, N, HV, V]."""
    from labkit.state_layout import kernels

    N, H, HV, K, V = (x[name] for name in ("batch", "H", "HV", "K", "V"))
    sets, device = len(out), out.device
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(out.dtype)

    inner = (HV, V, K) if layout == "VK" else (HV, K, V)
    pool = torch.empty((sets * N, *inner), dtype=DTYPES[x["state"]], device=device)
    for part in pool.split(64):  # in parts: a copy of the whole pool in fp32 need not fit beside it
        part.normal_(generator=generator)
    slots = torch.randperm(sets * N, device=device, generator=generator, dtype=torch.int32).view(sets, N)
    q, k, v = random(sets, N, H, K), random(sets, N, H, K), random(sets, N, HV, V)
    a, b = random(sets, N, HV), random(sets, N, HV)
    # A_log and dt_bias as the models initialise them: decay rates from 1 to 16, softplus(dt_bias) from 1e-3 to 1e-1.
    A_log = torch.linspace(1, 16, HV, device=device).log()
    dt_bias = torch.logspace(-3, -1, HV, device=device).expm1().log()
    rest = {"state": pool, "A_log": A_log, "dt_bias": dt_bias, "scale": K**-0.5}
    parts = zip(slots, q, k, v, a, b, out, strict=True)
    return [kernels.DecodeInputs(**dict(zip(EACH, part, strict=True)), **rest) for part in parts]


def _errors(inputs: Any, call: Any, layout: str, state: str) -> dict[str, float]:
    """Relative RMSE of the output and of the new state of some sequences, against the float64 reference."""
    some = slice(0, CHECKED)
    slots = inputs.indices[some].long()

    def v_first() -> Tensor:
        return inputs.state[slots] if layout == "VK" else inputs.state[slots].transpose(-1, -2)

    before = v_first().clone()
    call()
    alpha, beta = reference.decay_and_beta(inputs.a[some], inputs.b[some], inputs.A_log, inputs.dt_bias)
    o, S = reference.decode_step(before, inputs.q[some], inputs.k[some], inputs.v[some], alpha, beta, inputs.scale)
    return {"out": _relative_rmse(inputs.out[some], o), "state": _relative_rmse(v_first(), S)}


def _relative_rmse(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def _tiny(state: str, K: int, V: int) -> Case:
    """A case for the interpreter; fp32 activations, since it cannot round to bf16."""
    shape = {"H": 2, "HV": 4, "K": K, "V": V}
    return Case("decode", {"model": "tiny", "batch": 3, "state": state, "activations": "fp32"} | shape)


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
    },
    counted=counted,
    added=Added(
        SIGNATURE,
        "One decode step of N sequences. state: pool [slots, HV, V, K], fp32 or bf16, updated in place in the slots "
        "that indices ([N], int32, each once) names; q, k: [N, H, K], not normalised; v: [N, HV, V]; a, b: [N, HV]; "
        "A_log, dt_bias: [HV], fp32; out: [N, HV, V], to be written; scale: a float, K ** -0.5. q, k, v, a, b and out "
        "are bf16 (fp32 in the tiny cases); value head i reads q and k of head i // (HV // H).",
        prepare_added,
    ),
    tiny=tuple(_tiny(state, K, V) for state in DTYPES for K, V in ((32, 16), (16, 40))),
)
