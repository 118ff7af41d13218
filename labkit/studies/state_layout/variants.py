"""What is timed: the variants of every operation, and the prompts of an extend.

Operations: `decode`, the grid of tiles in both layouts; of the production kernels `step`, `verify`, `extend`, an extend
of one long prompt with few or many heads (`long`), the one kernel of an extend that depends on the layout
(`chunk_state`), and a step whose error is followed (`drift`).
"""

from labkit.bench.spec import CACHES, Case, Variant, variant
from labkit.shapes import QWEN3_NEXT

TRIALS, PEERS, WAYS, GRID, SGLANG, VLLM, FLASHINFER = (
    f"labkit.studies.state_layout.{name}"
    for name in ("trials", "peers", "ways", "layouts", "sglang", "vllm", "flashinfer")
)
DECODE, VERIFY, EXTEND = (
    f"labkit.kernels.gated_delta.{name}" for name in ("recurrent:decode", "recurrent:verify", "chunked:extend")
)

V_FIRST = {"KV": False, "VK": True}  # of [N, HV, K, V] and of [N, HV, V, K]
LAYOUTS = tuple(V_FIRST)
STATES = ("fp32", "bf16")  # in the order of the pages
TILES = (8, 16, 32)
WARPS = (1, 2, 4)
GRID_MODEL = QWEN3_NEXT.name  # the one model that is timed with every number of warps
CHUNK_STATE_TILES = (16, 32, 64)
PREFILLS = {  # name -> tokens of every sequence
    "1 x 512": (512,),
    "1 x 2048": (2048,),
    "1 x 8192": (8192,),
    "1 x 32768": (32768,),
    "8 x 1024": (1024,) * 8,
    "64 x 128": (128,) * 64,
    "ragged": (1, 7, 63, 64, 65, 300, 1000, 2500, 3200),
}
TINY = "tiny"
LONG = ("1 x 8192", "1 x 65536")  # prompts of `long`
LENGTHS = PREFILLS | {"1 x 65536": (65536,), TINY: (5, 0, 17)}
SIGNATURE = ("state", "indices", "q", "k", "v", "a", "b", "A_log", "dt_bias", "out", "scale")  # of DecodeInputs

CEILING = "in-place multiply"
OURS, OURS_KV, OURS_TRANSPOSED = "ours VK", "ours KV", "ours VK, transposed"
OURS_IN_ORDER = "ours VK, slots in order"  # the others find their states in slots at random
TOKENS = "decode, token by token"
# The last release before the pull request, and the first with it: between them little else changed.
BEFORE, AFTER = "sglang-0.5.9", "sglang-0.5.10rc0"
RELEASES = {BEFORE: "KV", AFTER: "VK", "sglang-0.5.11": "VK"}  # whose decode is the same function
VLLM_BEFORE, VLLM_AFTER = "vllm-0.15.1", "vllm-0.16.0"  # and the same of vLLM's pull request 33291
UNCHECKED = "layout alone"  # of the release after the change, without the other thing that it brought
PACKED = (AFTER, "sglang-0.5.11", "sglang-0.5.23")
CUTE = (*RELEASES, "sglang-0.5.23")  # whose decode in the CuTe DSL is another choice of its engine, for fp32 states
CUTE_FILE = "sglang/jit_kernel/cutedsl_gdn.py"
CUTE_BATCHES = (1, 64)  # one for each of its two kernels
FLASHINFER_SOURCE = "flashinfer-python-0.7.2.post1"
FLASHINFER_VK, FLASHINFER_IN_ORDER, FLASHINFER_KV = "flashinfer VK", "flashinfer VK, slots in order", "flashinfer KV"
ATTENTION_GYM = "attn-gym VK"
ATTENTION_GYM_IN_ORDER = "attn-gym VK, slots in order"


def variant_name(layout: str, tile: int, warps: int = 1, folded: bool = False) -> str:
    """A point of the grid, as the tables show it."""
    return f"{layout} BV={tile}, {warps} warp{'s' if warps > 1 else ''}{', folded' if folded else ''}"


def fla_in_place(layout: str, tile: int) -> str:
    """fla-core's kernel, launched on the states in place."""
    return f"fla {layout} in place, BV={tile}"


def fla(layout: str) -> str:
    """fla-core's public call."""
    return f"fla {layout}"


def chunk_state(form: str, tile: int) -> str:
    """The chunk-state kernel of extend; form: KV, VK or "VK, transposed"."""
    return f"{form}, BV={tile}"


def released(source: str, form: str = "") -> str:
    """A release's own code. form: of those that it has of an operation."""
    package, _, version = source.partition("-")
    layout = (RELEASES | {VLLM_BEFORE: "KV"}).get(source, "VK")
    return f"{package} {version} {layout}{f', {form}' if form else ''}"


OWN = {  # whose code -> the variants before the change of layout and with it
    "SGLang": (released(BEFORE), released(AFTER)),
    "vLLM": (released(VLLM_BEFORE), released(VLLM_AFTER)),
    "vLLM, layout alone": (released(VLLM_BEFORE), released(VLLM_AFTER, UNCHECKED)),
}


def _released(op: str, source: str, form: str = "", function: str = "") -> Variant:
    """A variant whose source is the release itself, beside what calls it."""
    own, options = (f"source:{source}", f"{SGLANG}:{function or op}"), {"form": form} if form else {}
    return _line(released(source, form), "peer", f"sglang_{op}", own, source=source, **options)


def _vllm(source: str, checked: bool = True, kda: bool = False) -> Variant:
    """kda: its decode of KDA, which has its own tile, under the same name."""
    own = (f"source:{source}", f"{VLLM}:decode{'_kda' * kda}")
    options = ({} if checked else {"checked": False}) | ({"kda": True} if kda else {})
    name = released(source, "" if checked else UNCHECKED)
    return _line(name, "peer", "vllm_step", own, source=source, **options)


def _vllm_extend(source: str) -> Variant:
    own = (f"source:{source}", f"{VLLM}:extend")
    return _line(released(source), "peer", "vllm_extend", own, source=source)


def _flashinfer(name: str, op: str, **options: object) -> Variant:
    return _line(name, "peer", f"flashinfer_{op}", (f"source:{FLASHINFER_SOURCE}", f"{FLASHINFER}:{op}"), **options)


def _line(name: str, role: str, trial: str, ran: str | tuple[str, ...], **options: object) -> Variant:
    return variant(name, role, f"{TRIALS}:{trial}", options, source=ran)


def _ceiling(caches: tuple[str, ...] = ("cold",)) -> Variant:
    return variant(CEILING, "ceiling", f"{TRIALS}:in_place", source=f"{PEERS}:in_place", caches=caches)


def _point(layout: str, tile: int, warps: int, folded: bool = False) -> Variant:
    # The change that the pull request made: K-first before, V-first after, at the narrow tile.
    role = "baseline" if (layout, tile, warps) == ("KV", 8, 1) else "step"
    name, options = variant_name(layout, tile, warps, folded), {"BV": tile, "warps": warps, "folded": folded}
    source = f"{GRID}:{'decode_v_first' if layout == 'VK' else 'decode_k_first'}"
    return variant(name, role, f"{TRIALS}:grid", {"layout": layout} | options, source=source, caches=CACHES)


def _chunk_state(form: str, tile: int) -> Variant:
    options = {"v_first": form != "KV", "transposed": "transposed" in form, "tile": tile}
    return _line(chunk_state(form, tile), "step", "chunk_state", (EXTEND, f"{WAYS}:chunk_state"), **options)


FLA_EXTEND = (f"{PEERS}:fla_extend", "labkit.sweep.gated_delta:tune_fla_anew")
VARIANTS = {  # of every operation
    "decode": [
        _ceiling(CACHES),
        *(_point(layout, tile, warps) for layout in LAYOUTS for tile in TILES for warps in WARPS),
        *(_point("VK", tile, 1, folded=True) for tile in TILES),
    ],
    "step": [
        _ceiling(),
        _line(OURS, "ours", "step", DECODE, v_first=True),
        _line(OURS_IN_ORDER, "step", "step", DECODE, v_first=True, in_order=True),
        _line(OURS_KV, "step", "step", DECODE, v_first=False),
        *(
            _line(fla_in_place(layout, tile), "peer", "fla_in_place", f"{PEERS}:fla_in_place", v_first=new, tile=tile)
            for layout, new in V_FIRST.items()
            for tile in (8, 32)
        ),
        *(_line(fla(layout), "peer", "fla_step", f"{PEERS}:fla_step", v_first=new) for layout, new in V_FIRST.items()),
        _line(ATTENTION_GYM, "peer", "attn_gym_step", f"{PEERS}:attn_gym_step"),
        _line(ATTENTION_GYM_IN_ORDER, "peer", "attn_gym_step", f"{PEERS}:attn_gym_step", in_order=True),
        *(_released("step", source, function="decode") for source in RELEASES),
        *(_released("step", source, "packed", "packed") for source in PACKED),
        *(_released("step", source, "CuTe DSL", "cute") for source in CUTE),
        *(_vllm(source, kda=kda) for kda in (False, True) for source in (VLLM_BEFORE, VLLM_AFTER)),
        *(_vllm(VLLM_AFTER, checked=False, kda=kda) for kda in (False, True)),
        _flashinfer(FLASHINFER_VK, "decode", v_first=True),
        _flashinfer(FLASHINFER_IN_ORDER, "decode", v_first=True, in_order=True),
        _flashinfer(FLASHINFER_KV, "decode", v_first=False, in_order=True),
    ],
    "verify": [
        _line(OURS, "ours", "verify", VERIFY, v_first=True),
        _line(OURS_KV, "step", "verify", VERIFY, v_first=False),
        _line(TOKENS, "baseline", "token_by_token", f"{WAYS}:token_by_token", v_first=True),
        *(_released("verify", source) for source in (BEFORE, AFTER)),
    ],
    "extend": [
        _line(OURS, "ours", "extend", EXTEND, v_first=True),
        _line(OURS_KV, "step", "extend", EXTEND, v_first=False),
        _line(OURS_TRANSPOSED, "step", "extend", EXTEND, v_first=True, transposed=True),
        *(_line(fla(layout), "peer", "fla_extend", FLA_EXTEND, v_first=new) for layout, new in V_FIRST.items()),
        *(_released("extend", source) for source in (BEFORE, AFTER)),
        *(_vllm_extend(source) for source in (VLLM_BEFORE, VLLM_AFTER)),
        _flashinfer(FLASHINFER_VK, "extend"),
    ],
    "long": [
        _line(OURS, "ours", "extend", EXTEND, v_first=True),
        _line(fla("VK"), "peer", "fla_extend", FLA_EXTEND, v_first=True),
        _flashinfer(FLASHINFER_VK, "extend"),
    ],
    "chunk_state": [
        *(_chunk_state(layout, tile) for layout in ("VK", "KV") for tile in CHUNK_STATE_TILES),
        _chunk_state("VK, transposed", 64),
    ],
    "drift": [
        _ceiling(),
        _line(OURS, "ours", "drift", DECODE, v_first=True),
        _line(OURS_KV, "step", "drift", DECODE, v_first=False),
    ],
}


def variants(x: Case) -> list[Variant]:
    """Those of its operation that a case has."""
    left_out = {
        "decode": lambda one: x["model"] != GRID_MODEL and one.options.get("warps", 1) > 1,
        # fla-core's kernel and SGLang's packed call are for GDN alone; vLLM has a call for each gate.
        "step": lambda one: (
            (x["gate"] == "KDA" and ("in place" in one.name or "packed" in one.name))
            or ("vllm" in one.name and one.options.get("kda", False) != (x["gate"] == "KDA"))
            or _no_dsl(x, one)
        ),
        "verify": lambda one: (
            (x["draft"] == "tree" and one.name == TOKENS) or (x["gate"] == "KDA" and one.name.startswith("sglang"))
        ),
        "extend": lambda one: (x["gate"] == "KDA" and "vllm" in one.name) or _no_dsl(x, one),
        "long": lambda one: _no_dsl(x, one),
    }.get(x.op, lambda one: False)
    return [one for one in VARIANTS[x.op] if not left_out(one)]


def in_dsl(one: Variant) -> bool:
    """Whether a variant is written in the CuTe DSL."""
    return "CuTe" in one.name or one.name.startswith("flashinfer")


def _no_dsl(x: Case, one: Variant) -> bool:
    """Whether a variant is written in the CuTe DSL and not for such a case: GDN of bf16 inputs, K = V = 128."""
    if not in_dsl(one):
        return False
    if (x["gate"], x["activations"], x["K"], x["V"]) != ("GDN", "bf16", 128, 128):
        return True
    if "CuTe" in one.name and x["batch"] not in CUTE_BATCHES:
        return True
    return x.params.get("state") == "bf16" and ("CuTe" in one.name or one.name == FLASHINFER_KV)


def control(x: Case) -> str:
    """The variant that the A/A control repeats."""
    return variant_name("VK", 8) if x.op == "decode" else next(v.name for v in variants(x) if v.role != "ceiling")


def rivals(op: str) -> dict[str, tuple[str, list[str]]]:
    """Where the states are -> our variant and the others' that find them there, so that equals are compared.

    attn-gym, SGLang, vLLM and FlashInfer's [V, K] take indices into a pool; fla-core has them in order.
    """
    peers = [one.name for one in VARIANTS[op] if one.role == "peer" and UNCHECKED not in one.name]
    if op != "step":
        return {"": (OURS, peers)}
    pooled = (ATTENTION_GYM, FLASHINFER_VK)
    at_random = [name for name in peers if name in pooled or name.startswith(("sglang", "vllm"))]
    return {
        "in order": (OURS_IN_ORDER, [name for name in peers if name not in at_random]),
        "at random": (OURS, at_random),
    }
