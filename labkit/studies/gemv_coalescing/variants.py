"""The study's variants: their names, in the order of its pages, and what each of them launches."""

from collections.abc import Mapping
from typing import Any

from labkit.bench.spec import CACHES, Variant, variant

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of a value of W, x and y
THREADS = 64  # rows a CTA where each thread has its own

# The ladder. The names of its steps begin with their place, as in every row that was recorded.
THREAD_A_ROW = "1 thread a row"
THREAD_A_ROW_TURNED = "2 thread a row, W stored [K, N]"
WARP_A_ROW = "3 warp a row"
WIDE_LOADS = "4 16-byte loads"
FOUR_ROWS = "5 four rows a program"
PIPELINED = "6 pipelined"
TUNED = "7 tuned rows, warps and tile"
SPLIT_K = "8 split K"
LADDER = (THREAD_A_ROW, THREAD_A_ROW_TURNED, WARP_A_ROW, WIDE_LOADS, FOUR_ROWS, PIPELINED, TUNED, SPLIT_K)
OURS = "9 dependent launch"  # the production GEMV
HINT = "4 with W evict-first"
CHANGES = (  # step, and the one that it changes
    (THREAD_A_ROW_TURNED, THREAD_A_ROW),
    (WARP_A_ROW, THREAD_A_ROW),
    (WIDE_LOADS, WARP_A_ROW),
    (HINT, WIDE_LOADS),
    (FOUR_ROWS, WIDE_LOADS),
    (PIPELINED, FOUR_ROWS),
    (TUNED, PIPELINED),
    (TUNED, WIDE_LOADS),  # past the steps between, which lose
    (SPLIT_K, TUNED),
    (OURS, TUNED),
)
READ = "read W"
EMPTY = "empty kernel"
EMPTY_DEPENDENT = "empty kernel, dependent launch"
LIBRARY = {"torch.mv": "mv", "F.linear": "linear"}  # cuBLAS's callers, and the functions of `peers` that call them
PEERS = {"torch.compile": "compiled", "flag_gems.mv": "flag_gems_mv"}  # beside cuBLAS
# Engines' own kernels for one token, as they were released; of vLLM's, the functions of `vllm` that call them.
SGLANG, SGLANG_RELEASES = "sglang 0.5.23 hopper_bf16_gemv", ("sglang-gemv-0.5.23", "apache-tvm-ffi-0.1.15.post2")
VLLM, VLLM_RELEASES = {"vllm 0.33.0 ll_bf16_gemm": "low_latency", "vllm 0.33.0 skinny_gemm": "skinny"}, ("vllm-0.33.0",)
ENGINES = {"SGLang": (SGLANG,), "vLLM": tuple(VLLM)}
OTHERS = (*PEERS, SGLANG, *VLLM)
SGLANG_ROWS = 65536  # SGLang has cuBLAS multiply a W of more rows
ROWS_CHOICES = (1, 2, 4, 8, 16)
TWO_D_CHOICES = (1, 4, 16)
PLAIN_CHOICES = (1, 4)  # what the rule under test chooses between
WARM = "tuned in a warm cache"
INTERLEAVED = "rows=4, interleaved"


def rows_variant(rows: int) -> str:
    """The production kernel with the rule's warps and tile, and `rows` rows a program."""
    return f"rows={rows}"


def plain_rows_variant(rows: int) -> str:
    """The same without dependent launch, which hides the end of a kernel behind the next one's start."""
    return f"rows={rows}, without dependent launch"


def two_d_variant(rows: int) -> str:
    """The same choice in the kernel of one 2-D tile."""
    return f"2-D tile, rows={rows}"


ROWS_VARIANTS = (*map(rows_variant, ROWS_CHOICES), INTERLEAVED)
PLAIN_ROWS = tuple(map(plain_rows_variant, PLAIN_CHOICES))
TWO_D = tuple(map(two_d_variant, TWO_D_CHOICES))


def separate(name: str) -> str:
    """A chain with the matrices of a group multiplied one by one."""
    return f"{name}, separate"


def merged(name: str) -> str:
    """A chain with the matrices that share x multiplied as one."""
    return f"{name}, merged"


CHAIN_OURS = merged("ours")
CHAIN_PLAIN = merged("ours without dependent launch")
BETWEEN_MV = merged("torch.mv, kernels between")
BETWEEN_OURS = merged("ours, kernels between")
BETWEEN_TRIGGER = merged("ours, kernels with the trigger between")
BETWEEN = (BETWEEN_MV, BETWEEN_OURS, BETWEEN_TRIGGER)

_STUDY = "labkit.studies.gemv_coalescing"
_TRIALS, _STEPS, _LIBRARIES, _CHAINS = (f"{_STUDY}.{name}" for name in ("trials", "ladder", "peers", "chains"))
_THREAD = f"{_STEPS}:thread_a_row"
_WARP = (f"{_STEPS}:warp_a_row", f"{_STEPS}:vector_of")
_OURS = ("labkit.kernels.gemv.gemv:gemv", "labkit.kernels.gemv.choose:rule")
_TWO_D = (f"{_STEPS}:two_d_tile", "labkit.kernels.gemv.choose:rule")
_READ, _EMPTY = (f"labkit.kernels.ceilings:{name}" for name in ("sum_values", "empty_dependent"))
_BETWEEN = f"{_STEPS}:between"


def _gemv(name: str, role: str, trial: str, options: Mapping[str, Any], *source: str, call: str = "") -> Variant:
    """call: the function of `peers` that the trial is of; no option of the row, whose name says it."""
    made = {**options, "call": call} if call else options
    return variant(name, role, f"{_TRIALS}:{trial}", made, source=source, shown=options)


def _chain(name: str, role: str, trial: str, options: Mapping[str, Any], *source: str, call: str = "") -> Variant:
    return _gemv(name, role, trial, options, f"{_CHAINS}:links", f"{_CHAINS}:in_order", *source, call=call)


def candidate(choice: Any) -> Variant:
    """A candidate of the tuned table, a `Choice`: timed with hot L2 too, to see what it would choose there."""
    options = choice.as_dict()
    return variant(str(choice), "step", f"{_TRIALS}:candidate", options, source=_OURS[:1], caches=CACHES)


GEMVS = (
    _gemv(THREAD_A_ROW, "step", "thread_a_row", {}, _THREAD),
    _gemv(THREAD_A_ROW_TURNED, "step", "thread_a_row_turned", {}, _THREAD, f"{_STEPS}:stored_k_n"),
    _gemv(WARP_A_ROW, "step", "warp_a_row", {}, *_WARP),
    _gemv(WIDE_LOADS, "step", "warp_a_row", {"wide": True}, *_WARP),
    _gemv(FOUR_ROWS, "step", "warp_a_row", {"wide": True, "rows": 4}, *_WARP),
    _gemv(PIPELINED, "step", "warp_a_row", {"wide": True, "rows": 4, "stages": 4}, *_WARP),
    _gemv(TUNED, "step", "production", {"dependent": False}, *_OURS),
    _gemv(SPLIT_K, "step", "production", {"dependent": False, "split": 2}, *_OURS),
    _gemv(OURS, "ours", "production", {}, *_OURS),
    _gemv(READ, "control", "read_only", {}, _READ),
    _gemv(EMPTY, "control", "empty", {}, _EMPTY),
    _gemv(EMPTY_DEPENDENT, "control", "empty", {"dependent": True}, _EMPTY),
    *(_gemv(name, "baseline", "library", {}, f"{_LIBRARIES}:{call}", call=call) for name, call in LIBRARY.items()),
    _gemv(HINT, "step", "warp_a_row", {"wide": True, "hint": "evict_first"}, *_WARP),
    *(_gemv(rows_variant(rows), "step", "some_rows", {"rows": rows}, *_OURS) for rows in ROWS_CHOICES),
    _gemv(INTERLEAVED, "step", "some_rows", {"rows": 4, "interleaved": True}, *_OURS),
    *(
        _gemv(plain_rows_variant(rows), "step", "some_rows", {"rows": rows, "dependent": False}, *_OURS)
        for rows in PLAIN_CHOICES
    ),
    *(_gemv(two_d_variant(rows), "step", "two_d_tile", {"rows": rows}, *_TWO_D) for rows in TWO_D_CHOICES),
    _gemv(WARM, "step", "production", {"kind": "hot"}, *_OURS),
)


def _released(name: str, trial: str, releases: tuple[str, ...], function: str, call: str = "") -> Variant:
    return _gemv(name, "peer", trial, {}, *(f"source:{one}" for one in releases), f"{_STUDY}.{function}", call=call)


PEER_GEMVS = (
    *(_gemv(name, "peer", call, {}, f"{_LIBRARIES}:{call}") for name, call in PEERS.items()),
    _released(SGLANG, "sglang_gemv", SGLANG_RELEASES, "sglang:gemv"),
    *(_released(name, "vllm_gemv", VLLM_RELEASES, f"vllm:{call}", call) for name, call in VLLM.items()),
)
CHAINS = (
    _chain(separate(THREAD_A_ROW), "step", "chain_step", {"threads": True}, _THREAD),
    _chain(separate(WARP_A_ROW), "step", "chain_step", {}, *_WARP),
    _chain(separate(WIDE_LOADS), "step", "chain_step", {"wide": True}, *_WARP),
    _chain(separate(FOUR_ROWS), "step", "chain_step", {"wide": True, "rows": 4}, *_WARP),
    *(
        _chain(how(name), "baseline", "chain_library", {"merged": how is merged}, f"{_LIBRARIES}:{call}", call=call)
        for how in (separate, merged)
        for name, call in LIBRARY.items()
    ),
    _chain(separate("ours"), "step", "chain_ours", {"merged": False}, *_OURS),
    _chain(CHAIN_PLAIN, "step", "chain_ours", {"merged": True, "dependent": False}, *_OURS),
    _chain(CHAIN_OURS, "ours", "chain_ours", {"merged": True}, *_OURS),
    _chain(
        BETWEEN_MV, "baseline", "chain_library", {"merged": True, "between": True}, f"{_LIBRARIES}:mv", _BETWEEN,
        call="mv",
    ),
    _chain(BETWEEN_OURS, "step", "chain_ours", {"merged": True, "between": "plain"}, *_OURS, _BETWEEN),
    _chain(BETWEEN_TRIGGER, "step", "chain_ours", {"merged": True, "between": "trigger"}, *_OURS, _BETWEEN),
    _gemv(READ, "ceiling", "read_only", {}, _READ),
)  # fmt: skip
