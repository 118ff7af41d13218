"""What is timed: the variants of every operation.

Operations: `ring`, decode on a ring against decode that writes its state at every token, over the batch; `length`, the
former with every L, beside each other; `layout`, both in both layouts, where some tokens write and where none does;
`ring_verify`, drafts on the ring against drafts whose states are stored; `prefill`, long prompts in segments; and a
decode on a ring whose error is followed (`drift`).
"""

from labkit.bench.spec import Case, Variant, variant

STUDY = "labkit.studies.gated_delta_today"
TRIALS, PEERS, CALLS = (f"{STUDY}.{name}" for name in ("trials", "peers", "sglang"))
LIBRARY, SHARED = "labkit.kernels.gated_delta", "labkit.sweep.gated_delta"
DECODE, STORED = f"{LIBRARY}.recurrent:decode", f"{LIBRARY}.recurrent:verify"
RING, ONE_BY_ONE, RING_WRITE = (f"{LIBRARY}.buffered:{name}" for name in ("decode", "verify", "write"))
RING_STEP, RING_VERIFY = (f"{LIBRARY}.on_ring:{name}" for name in ("decode", "verify"))
RING_AT_ONCE, RING_APART = f"{LIBRARY}.drafts:verify", f"{LIBRARY}.apart:decode"
RING_DIRECT, DRAFTS_IN_TURN = f"{LIBRARY}.direct:decode", f"{LIBRARY}.in_turn:verify"
EXTEND, FUSED_EXTEND = f"{LIBRARY}.segmented:extend", f"{LIBRARY}.fused:extend"
PLAIN_RELEASE, RING_RELEASE = "sglang-0.5.23", "sglang-ring-0.5.23"
FLASHINFER_RELEASE = "flashinfer-python-0.7.2.post1"

STATES = ("fp32", "bf16")  # in the order of the pages
NARROW = ("fp16", "fp8")  # timed at one batch, ours alone, and followed along many tokens
PREFILLS = {  # name -> tokens of every sequence
    "1 x 2048": (2048,),
    "1 x 8192": (8192,),
    "1 x 65536": (65536,),
    "8 x 1024": (1024,) * 8,
    "64 x 128": (128,) * 64,
}
TINY = "tiny"
LENGTHS = PREFILLS | {TINY: (192,)}
LENGTH = 16  # L: tokens between two writes of a state, as SGLang and vLLM have it by default
RING_LENGTHS = (1, 2, 4, 8, 12, 16, 24, 32)
DRIFT_LENGTHS = (1, 8, 16, 32)
MANY = 64  # sequences from which on a kernel more can pay
VERIFY_LENGTH = 16  # entries of the ring that drafts are placed in

READ, MULTIPLY = "read of the states", "in-place multiply"
PLAIN, PLAIN_KV = "ours, state written", "ours KV, state written"
OURS, SEARCHED, OURS_KV = "ours, ring", "ours, ring, searched", "ours KV, ring"
APART, APART_SEARCHED = "ours, ring, written apart", "ours, ring, written apart, searched"
SGLANG = "sglang 0.5.23"
SGLANG_PLAIN, SGLANG_RING = "sglang 0.5.23, state written", "sglang 0.5.23, ring"
SGLANG_SEARCHED = "sglang 0.5.23, ring, searched"
OURS_STORED, SGLANG_STORED = "ours, states stored", "sglang 0.5.23, states stored"
WITH_WRITES = "ours, ring, with its writes"
AT_ONCE, AT_ONCE_SEARCHED = "ours, ring, drafts at once", "ours, ring, drafts at once, searched"
ONE_DRAFT = "ours, ring, one draft at a time"
FUSED, FUSED_SEARCHED = "ours, fused", "ours, fused, searched"
SEGMENTS, ONE_SEGMENT = "ours, segments", "ours, one segment"
FLA, FLASHINFER = "fla", "flashinfer"


def with_length(length: int, whose: str = "ours") -> str:
    """The decode that writes a state once in so many tokens."""
    return f"{whose}, L = {length}"


def _line(name: str, role: str, trial: str, ran: str | tuple[str, ...], **options: object) -> Variant:
    return variant(name, role, f"{TRIALS}:{trial}", options, source=ran)


def _released(name: str, trial: str, source: str, function: str, **options: object) -> Variant:
    """A variant whose source is the release itself, beside what calls it."""
    return _line(name, "peer", trial, (f"source:{source}", f"{CALLS}:{function}"), **options)


CEILINGS = [
    _line(READ, "ceiling", "read", f"{PEERS}:read"),
    _line(MULTIPLY, "ceiling", "in_place", f"{PEERS}:in_place"),
]
RINGS = [
    _line(OURS, "ours", "ring", RING_STEP),
    _line(SEARCHED, "step", "ring_searched", (RING, RING_DIRECT)),
    _line(APART, "step", "ring_apart", RING_APART),
    _line(APART_SEARCHED, "step", "ring_apart_searched", RING_APART),
    _line(PLAIN, "baseline", "plain", DECODE),
    _released(SGLANG_RING, "sglang_ring", RING_RELEASE, "ring"),
    _released(SGLANG_SEARCHED, "sglang_searched", RING_RELEASE, "ring"),
    _released(SGLANG_PLAIN, "sglang_plain", PLAIN_RELEASE, "packed"),
]
VARIANTS = {  # of every operation
    "ring": [*CEILINGS, *RINGS],
    "length": [
        *CEILINGS,
        _line(PLAIN, "baseline", "plain", DECODE),
        *(
            _line(with_length(n), "ours" if n == LENGTH else "step", "ring_searched", (RING, RING_DIRECT), length=n)
            for n in RING_LENGTHS
        ),
        *(_released(with_length(n, SGLANG), "sglang_searched", RING_RELEASE, "ring", length=n) for n in RING_LENGTHS),
    ],
    "layout": [
        *CEILINGS,
        _line(SEARCHED, "ours", "ring_searched", RING),
        _line(OURS_KV, "step", "ring_searched", RING, v_first=False),
        _line(PLAIN, "baseline", "plain", DECODE),
        _line(PLAIN_KV, "step", "plain", DECODE, v_first=False),
    ],
    "ring_verify": [
        CEILINGS[0],
        _line(OURS, "ours", "verify", RING_VERIFY),
        _line(SEARCHED, "step", "verify_searched", DRAFTS_IN_TURN),
        _line(WITH_WRITES, "step", "verify", (RING_VERIFY, RING_WRITE), writes=True),
        _line(AT_ONCE, "step", "verify_at_once", RING_AT_ONCE),
        _line(AT_ONCE_SEARCHED, "step", "verify_at_once_searched", RING_AT_ONCE),
        _line(ONE_DRAFT, "step", "verify_one_by_one", ONE_BY_ONE),
        _line(OURS_STORED, "baseline", "stored", STORED),
        _released(SGLANG_RING, "sglang_verify", RING_RELEASE, "verify"),
        _released(SGLANG_STORED, "sglang_stored", PLAIN_RELEASE, "stored"),
    ],
    "prefill": [
        _line(FUSED, "ours", "fused_extend", FUSED_EXTEND),
        _line(FUSED_SEARCHED, "step", "fused_searched", FUSED_EXTEND),
        _line(SEGMENTS, "step", "extend", EXTEND),
        _line(ONE_SEGMENT, "baseline", "extend", EXTEND, segments=1),
        _line(FLA, "peer", "fla_extend", (f"{PEERS}:fla_extend", f"{SHARED}:tune_fla_anew")),
        _line(FLASHINFER, "peer", "flashinfer_extend", (f"source:{FLASHINFER_RELEASE}", f"{PEERS}:flashinfer_extend")),
    ],
    "drift": [
        CEILINGS[0],
        *(
            _line(with_length(length), "ours" if length == LENGTH else "step", "drift", RING_STEP, length=length)
            for length in DRIFT_LENGTHS
        ),
    ],
}


def variants(x: Case) -> list[Variant]:
    """Those of its operation that a case has."""
    left_out = {
        "ring": lambda one: one.name in _no_ring(x),
        "ring_verify": lambda one: one.name in _no_drafts(x),
        "prefill": lambda one: one.name == FLASHINFER and (x["activations"], x["K"], x["V"]) != ("bf16", 128, 128),
    }.get(x.op, lambda one: False)
    return [one for one in VARIANTS[x.op] if not left_out(one)]


def _no_ring(x: Case) -> set[str]:
    """The variants of `ring` that a case does not have."""
    # SGLang's packed decode of KDA compiles CUDA of its own; its ring is timed. It has no narrow states.
    left_out = {SGLANG_PLAIN} if x["gate"] == "KDA" else set()
    left_out |= {SGLANG_PLAIN, SGLANG_RING, SGLANG_SEARCHED} if x["state"] in NARROW else set()
    # Where states can go through matrix instructions, what is written apart is refused: see `apart.decode`.
    few = x["batch"] < MANY and x["model"] != "tiny"
    left_out |= {APART, APART_SEARCHED} if few or x["state"] == x["activations"] == "bf16" else set()
    return left_out | ({MULTIPLY} if x["state"] == "fp8" else set())  # torch multiplies no fp8


def _no_drafts(x: Case) -> set[str]:
    """The variants of `ring_verify` that a case does not have: SGLang's is for chains."""
    return {SGLANG_RING} if x["draft"] == "tree" else set()


def control(x: Case) -> str:
    """The variant that the A/A control repeats: none that is searched, since two searches may differ."""
    if x.op in ("length", "layout"):
        return PLAIN
    return next(one.name for one in VARIANTS[x.op] if one.role == "ours")
