"""The study's variants and its models, in the order of its pages; needs neither torch nor Triton."""

from typing import Any

from labkit.bench.spec import Variant, variant

TABLES = ("buffers", "records", "queue")  # of a step

# The ways to keep the tables (ways.py)
REBUILT = "1 rebuilt in Python, pageable"
VECTORISED = "2 rebuilt vectorised, pageable"
PREBUILT = "3 prebuilt, pageable"
PINNED = "4 pinned, double-buffered"
ONE_POSITION = "5 one position replayed"
ONE_BY_ONE = "6 words from the host, one by one"
PACKED = "6 words from the host, packed"
BY_KERNEL = "7 words by a kernel"
IN_LAUNCH = "8 position in the launch"
GRAPH = "9 CUDA graph, position on the GPU"


def alone(way: str, table: str) -> str:
    """A way with one table alone, while the others stay on the device."""
    return f"{way}: {table} alone"


WAYS = (REBUILT, VECTORISED, PREBUILT, PINNED, ONE_POSITION, ONE_BY_ONE, PACKED, BY_KERNEL, IN_LAUNCH, GRAPH)
ALONE = tuple(alone(way, table) for way in (REBUILT, PREBUILT) for table in TABLES)
BUILT = (REBUILT, *(alone(REBUILT, table) for table in TABLES), VECTORISED)  # by the host, for every token
SWEPT = (VECTORISED, PREBUILT, PINNED, PACKED, BY_KERNEL, IN_LAUNCH, GRAPH)  # over records and kernel time
PARTS = ("build", "copy", "launch")  # of the host's work for a token


def part(way: str, which: str) -> str:
    """The host's time for one part of a token."""
    return f"{way} · {which}"


# The same decoder without the host: all launches of some tokens in one CUDA graph
OURS = "tables"
LONGEST = "tables, longest first"
UNORDERED = "tables, nobody waits"  # wrong results: the same work and bytes without barriers
NOT_AHEAD = "tables, nothing loaded before a wait"
FETCHED = "tables, more asked for in the L2 before a wait"
MARKED = "tables, moments written down"
SPANNED = "tables, attention in spans"
STREAMED = "tables, weights by a warp of their own"  # of Llama, on Hopper
SPANS = {"span": 128, "group": 4}  # of a model whose attention walks through all positions, as was published
ABLATIONS = {NOT_AHEAD: {"ahead": 0}, FETCHED: {"prefetch": 16384}, MARKED: {"marks": True}}  # changes of the choice
CUBLAS, GEMV = "kernels, cuBLAS", "kernels, our GEMV"
CUBLAS_DEPENDENT, GEMV_DEPENDENT = f"{CUBLAS}, dependent launch", f"{GEMV}, dependent launch"
SEPARATE = (CUBLAS, GEMV)
DEPENDENT = (CUBLAS_DEPENDENT, GEMV_DEPENDENT)
READ = "read as many bytes"
REPLAYED = "graph of kernels, a replay a token"  # beside the ways: our GEMV, dependent launch

# Models and cases
H1024, LLAMA = "AutoMegaKernel h1024", "Llama-3.2-1B"
MODELS = (H1024, "AutoMegaKernel h2048", LLAMA)
TINY, TINY_CACHE = "tiny", 32  # for the interpreter; positions
START = 16  # position of the first token, as in the published comparison
CACHE = 2048  # positions
BATCH = 4  # sequences that share a step
PUBLISHED_PARTS = 20  # records a projection at most: as many records of h1024 as were published, within 2 %
PUBLISHED_RECORDS = 402
QUEUED_US = 1000  # of other work on the stream
CHECKED = 64  # tokens that are compared
BYTES = {"bf16": 2, "fp32": 4}  # of a weight
MAIN = {"start": START, "parts": 0, "dtype": "bf16"}  # the case of a model that all variants are timed in
PUBLISHED = {"model": H1024, "start": START, "parts": PUBLISHED_PARTS, "dtype": "bf16"}

# The table: variant -> role, what makes it ready, what it launches
PACKAGE = "labkit.studies.persistent_tables"
TRIALS = f"{PACKAGE}.trials"
_PLAN, _STEP = f"{PACKAGE}.plans:lowering", "labkit.kernels.decoder.step:step"
_CAPTURED, _BY_HOST = (f"{PACKAGE}.decodes:{name}" for name in ("on_the_device", "by_the_host"))
_STEPS = (_PLAN, "labkit.kernels.decoder.tables:lower", _STEP, _CAPTURED)
_SEPARATE, _CHAIN = f"{TRIALS}:separate", f"{PACKAGE}.baseline:Baseline"
_OURS = (_CHAIN, "labkit.kernels.gemv.gemv:gemv", "labkit.kernels.gemv.choose:rule")
_CUBLAS, _GEMV = (_CHAIN, f"{PACKAGE}.peers:linear", _CAPTURED), (*_OURS, _CAPTURED)


def _by_name(*found: Variant) -> dict[str, Variant]:
    return {one.name: one for one in found}


IN_STREAM = variant(
    STREAMED, "ours", f"{TRIALS}:streamed",
    source=(
        "labkit.kernels.decoder.streamed:lowering", "labkit.kernels.decoder.tables:lower",
        "labkit.kernels.decoder.streamed:step", _CAPTURED,
    ),
)  # fmt: skip
IN_SPANS = variant(SPANNED, "step", f"{TRIALS}:spanned", source=_STEPS)
CAPTURED = _by_name(
    variant(OURS, "ours", f"{TRIALS}:in_graph", {"schedule": "round-robin"}, source=_STEPS),
    variant(LONGEST, "step", f"{TRIALS}:in_graph", {"schedule": "longest-first"}, source=_STEPS),
    variant(UNORDERED, "control", f"{TRIALS}:unordered", source=(*_STEPS, f"{PACKAGE}.decodes:unordered")),
    *(variant(name, "step", f"{TRIALS}:ablated", {"name": name}, source=_STEPS) for name in ABLATIONS),
    variant(CUBLAS, "baseline", _SEPARATE, {"projections": "F.linear", "dependent": False}, source=_CUBLAS),
    variant(GEMV, "baseline", _SEPARATE, {"projections": "gemv", "dependent": False}, source=_GEMV),
    variant(CUBLAS_DEPENDENT, "baseline", _SEPARATE, {"projections": "F.linear", "dependent": True}, source=_CUBLAS),
    variant(GEMV_DEPENDENT, "baseline", _SEPARATE, {"projections": "gemv", "dependent": True}, source=_GEMV),
    variant(READ, "ceiling", f"{TRIALS}:read", source=f"{PACKAGE}.peers:read"),
)

KEPT: dict[str, tuple[str, dict[str, Any]]] = {  # way -> its class in `ways`, and with what
    REBUILT: ("RebuiltSlowly", {}),
    **{alone(REBUILT, one): ("RebuiltSlowly", {"which": (one,)}) for one in TABLES},
    VECTORISED: ("Rebuilt", {}),
    PREBUILT: ("Prebuilt", {}),
    **{alone(PREBUILT, one): ("Prebuilt", {"which": (one,)}) for one in TABLES},
    PINNED: ("Pinned", {}),
    ONE_POSITION: ("OnePosition", {}),
    ONE_BY_ONE: ("WordsFromHost", {}),
    PACKED: ("WordsFromHost", {"packed": True}),
    BY_KERNEL: ("WordsByKernel", {}),
    IN_LAUNCH: ("InTheLaunch", {}),
    GRAPH: ("Graph", {}),
}
_WAY = {name: (_PLAN, f"{PACKAGE}.ways:{kind}", _STEP) for name, (kind, _) in KEPT.items()}
_ROLES = {GRAPH: "ours", REBUILT: "baseline"}
EAGER = _by_name(
    *(
        variant(name, _ROLES.get(name, "step"), f"{TRIALS}:way", {"name": name}, source=(*way, _BY_HOST), mode="eager")
        for name, way in _WAY.items()
    ),
    variant(REPLAYED, "baseline", f"{TRIALS}:replayed", source=(*_OURS, _BY_HOST), mode="eager"),
)
HOST = _by_name(
    *(
        variant(part(name, one), "step", f"{TRIALS}:host", {"name": name, "part": one}, source=way, mode="eager")
        for name, way in _WAY.items()
        for one in PARTS
    )
)
