"""What is timed: the names of the variants, one table of them for each operation, and which of them a case has.

Operations: `layer`, a whole layer; `gemm1` and `gemm2`, one of its products; `waves`, GEMM1 on parts of the GPU;
`tune`, candidates for the tuned table, of either product; `designs`, a whole layer by another design of its products.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.bench.spec import Case, Variant, variant
from labkit.studies.moe_persistent_grid.models import MIXTRAL, QWEN35_35B

if TYPE_CHECKING:
    from labkit.kernels.experts.choose import Candidate

STUDY, EXPERTS = "labkit.studies.moe_persistent_grid", "labkit.kernels.experts"
GEMMS = ("gemm1", "gemm2")
UNIFORM = "uniform"
KINDS = (UNIFORM, "zipf 0.5", "zipf 1", "zipf 1.5", "hot set", "one expert")  # of routings, all made up
TINY = "tiny"  # the model of the cases for the interpreter, which have every variant
SOURCE_T = 1642  # tokens of the source's prefill
# Models of which a product with a change at a time is timed, the first one the source's, and tokens. The source's
# weights are INT4.
ABLATED = (QWEN35_35B.name, MIXTRAL.name)
ABLATED_AT = {"INT4": (16, 128, 512, SOURCE_T), "bf16": (128, SOURCE_T)}
READ_UP_TO = 1642  # tokens, up to which reading the weights bounds a layer, and what a launch costs is seen

# Whole layers
OURS = "ours"
RULE = "ours, by the rule"
OTHER_TOKENS = "ours, tuned for other tokens"
ORDINARY = "ours, launches that wait"
BY_TILES = "ours, by tiles"  # one token as any other number of them
BYTES, WORDS = "ours, INT4 as bytes", "ours, INT4 as words"  # of one token
OURS_BF16 = "ours, bf16 weights"
GROUPED = "F.grouped_mm with Triton around"
LIGER = "liger-kernel, its host sync left out"
LOOP = "loop of torch.mm, eager"
SGLANG = "SGLang 0.5.22, tokens sorted by ours"
HUMMING = "Humming 0.1.19 W4A16, the rest ours"
VLLM = "vLLM 0.33.0 in Triton, tokens sorted by ours"  # of bf16 and of INT4 weights
READ = "read the experts' weights"
RIVALS = (GROUPED, LIGER, LOOP, SGLANG, VLLM)
ENGINES = {SGLANG: "SGLang", VLLM: "vLLM", HUMMING: "Humming"}  # layers, or what they are made of, of engines
ENGINES_OF = {"bf16": (SGLANG, VLLM), "INT4": (VLLM, HUMMING)}  # kind of weights -> those that have it
TUNED_FOR = SOURCE_T  # tokens that OTHER_TOKENS was tuned for
APART = "ours, each block a tile"
SIDE = "ours, blocks of one expert as one tile"  # in rows of when layers were not made so
FRAGMENTS, SPECIALISED = "ours, INT4 as fragments", "ours, INT4, specialised warps"
IN_TURN = "ours, tables made in turn"
DESIGNED_AT = {"bf16": (128,), "INT4": (16, 128)}  # tokens

# Others' own code. ExecuTorch's: as released, and with the pull request's grid applied to it
RELEASE = "executorch-1.5.1"
SGLANG_RELEASE = "sglang-0.5.22"
VLLM_RELEASE = "vllm-fused-moe-0.33.0"
HUMMING_RELEASE = "humming-kernels-0.1.19"
PER_PAIR = "ExecuTorch 1.5.1, per pair"
PER_PAIR_UP_TO = 16  # tokens; it is the release's decode, and reads an expert's weights once a token

# The grids of one GEMM
TILES, PERSISTENT = "one CTA a tile", "persistent"
GRIDS = {TILES: "tiles", PERSISTENT: "SMs"}  # as `trials.config_of` has them
EARLY, FILLED, FLAT, BOX, ONCE, ROWS = (
    "early exit", "SMs × occupancy", "flattened", "descriptor", "each byte once", "BM from the tokens",
)  # fmt: skip
OURS_TILES, OURS_PERSISTENT = (f"ours, {grid}" for grid in GRIDS)
OURS_FILLED = f"{OURS_PERSISTENT}, {FILLED}"


def source(block_m: int = 16, grid: str = TILES, *changes: str, int8: bool = False) -> str:
    """A kernel of the lab's own in the manner of ExecuTorch's, in which one thing at a time can be changed.

    Its blocks are not ExecuTorch's, so no page rests on it; it is timed in the cases that were recorded with it.
    """
    return ", ".join([f"source{' W4A8' if int8 else ''} BM={block_m}", grid, *changes])


def released(grid: str, int8: bool = False) -> str:
    """ExecuTorch's batched layer, activations in 8 bits or bf16."""
    return f"ExecuTorch 1.5.1 {'W4A8' if int8 else 'W4A16'}, {grid}"


RELEASED = {  # name -> the arguments of `trials.released`
    released(grid, int8): {"grid": how, "int8": int8}
    for int8 in (False, True)
    for grid, how in {TILES: "tiles", PERSISTENT: "persistent"}.items()
}
NARROW = {released(f"{TILES}, blocks of 16 rows", int8): {"int8": int8} for int8 in (False, True)}  # at SOURCE_T
LIVE = "live blocks alone"  # as if the host knew how many there are
ONE_GROUP = "groups of 1"
RELEASED_AT = (128, SOURCE_T)  # tokens at which its products are timed alone
RELEASED_GEMMS = {  # name -> the arguments of `trials.released_gemm`: what a launch of the same code decides
    released(", ".join([grid, *words]), int8): {"grid": how, "int8": int8} | changes
    for int8 in (False, True)
    for grid, how, words, changes in (
        (TILES, "tiles", (), {}),
        (PERSISTENT, "persistent", (), {}),
        (PERSISTENT, "persistent", (FILLED,), {"filled": True}),
        (PERSISTENT, "persistent", (ONE_GROUP,), {"group_m": 1}),
        (TILES, "tiles", (LIVE,), {"live": True}),
        (PERSISTENT, "persistent", (LIVE,), {"live": True}),
    )
}
GROUPS = (1, 8, 16, 32)
MEANS: dict[str, dict[str, Any]] = {  # a change -> the arguments of `trials.config_of` that it stands for
    EARLY: {"counted": True}, FILLED: {"grid": "filled"}, FLAT: {"flatten": True}, BOX: {"descriptor": True},
    ONCE: {"unpack": "join"}, ROWS: {"block_m": 0},
}  # fmt: skip
MEANS |= {f"groups of {size}": {"group_m": size} for size in GROUPS}


def tiles_of(persistent: str) -> str:
    """One of ExecuTorch's products in a persistent grid -> the same in one CTA a tile; empty for one that is none."""
    if PERSISTENT not in persistent:
        return ""
    tiles = persistent.replace(PERSISTENT, TILES)
    return tiles.removesuffix(f", {FILLED}").removesuffix(f", {ONE_GROUP}")


def limited(sms: int, grid: str) -> str:
    """A grid on so many multiprocessors of the GPU; 0: all of them."""
    return f"{sms or 'all'} SMs, {grid}"


SMS = (0, 128, 108, 96, 64)  # 128 and 108: those of an RTX 4090 and an A100
PAIRS = ((OURS_TILES, OURS_PERSISTENT), (OURS_TILES, OURS_FILLED))  # of the lab's kernel: one CTA a tile, persistent
OWN_PAIRS = tuple((released(TILES, int8), released(PERSISTENT, int8)) for int8 in (False, True))  # each tunes itself
OWN_CHANGES = {  # of ExecuTorch's own products: in words -> the variant's grid, and that of which it changes one thing
    "persistent": ([PERSISTENT], [TILES]),
    FILLED: ([PERSISTENT, FILLED], [PERSISTENT]),
    "groups of more than 1": ([PERSISTENT], [PERSISTENT, ONE_GROUP]),
    f"{LIVE}, {TILES}": ([TILES, LIVE], [TILES]),
    f"{LIVE}, {PERSISTENT}": ([PERSISTENT, LIVE], [PERSISTENT]),
}
CHANGED = (  # of `source`, with blocks of 16 rows: its grid, and what is changed in it, the last thing last
    (PERSISTENT, EARLY), (TILES, EARLY), (PERSISTENT, FILLED), (PERSISTENT, EARLY, FILLED), (PERSISTENT, FLAT),
    (PERSISTENT, ONCE), (PERSISTENT, ONCE, BOX), (PERSISTENT, BOX), (PERSISTENT, ROWS),
)  # fmt: skip


class Line(NamedTuple):
    """A variant: name, role, its function of `trials`, and the arguments of that."""

    name: str
    role: str
    make: str
    options: dict[str, Any]


def _of_source(block_m: int, grid: str, *words: str, int8: bool = False) -> Line:
    options = {"block_m": block_m, "grid": GRIDS[grid], "int8": int8}
    for word in words:
        options |= MEANS[word]
    name = source(block_m, grid, *words, int8=int8)
    return Line(name, "baseline" if name == source(16, TILES) else "step", "gemm", options)


_SOURCE = [_of_source(m, grid, int8=int8) for int8 in (False, True) for m in (16, 64) for grid in GRIDS]
LINES = {  # operation, of layers with the kind of weights -> its variants; the first one is repeated as A/A
    "layer": [
        Line(OURS, "ours", "layer", {}),
        Line(GROUPED, "peer", "grouped_mm", {}),
        Line(LIGER, "peer", "liger", {}),
        Line(LOOP, "baseline", "loop", {}),
        Line(SGLANG, "peer", "sglang_layer", {}),
        Line(VLLM, "peer", "vllm_layer", {}),
        Line(ORDINARY, "step", "layer", {"dependent": False}),
        Line(BY_TILES, "step", "layer", {"rows": False}),
        Line(RULE, "step", "layer", {"base": "rule"}),
        Line(OTHER_TOKENS, "step", "layer", {"tokens": TUNED_FOR}),
        Line(READ, "ceiling", "read", {}),
    ],
    "layer, INT4": [
        Line(OURS, "ours", "layer", {}),
        Line(OURS_BF16, "baseline", "layer", {"plain": True}),
        Line(RULE, "step", "layer", {"base": "rule"}),
        Line(BY_TILES, "step", "layer", {"rows": False}),
        Line(BYTES, "step", "layer", {"words": False}),
        Line(WORDS, "step", "layer", {"words": True}),
        *(Line(one.name, "step", "layer", {"base": "source"} | one.options) for one in _SOURCE if "=16" in one.name),
        Line(PER_PAIR, "peer", "per_pair", {}),
        *(Line(name, "peer", "released", options) for name, options in RELEASED.items()),
        *(Line(name, "peer", "narrow", options) for name, options in NARROW.items()),
        Line(VLLM, "peer", "vllm_layer", {}),
        Line(HUMMING, "peer", "humming_layer", {}),
    ],
    "gemm": [
        Line(OURS_TILES, "step", "gemm", {"base": "ours", "grid": "tiles"}),
        Line(OURS_PERSISTENT, "step", "gemm", {"base": "ours", "grid": "SMs"}),
        Line(OURS_FILLED, "step", "gemm", {"base": "ours", "grid": "filled"}),
        *(Line(name, "peer", "released_gemm", options) for name, options in RELEASED_GEMMS.items()),
        *_SOURCE,
        *(_of_source(16, *words) for words in CHANGED),
        *(_of_source(16, PERSISTENT, f"groups of {size}") for size in GROUPS if size != 8),
        Line(READ, "ceiling", "read", {}),
    ],
    "designs": [
        Line(OURS, "baseline", "design", {}),
        Line(APART, "step", "design", {"by": APART}),
        Line(GROUPED, "peer", "grouped_mm", {}),
        Line(READ, "ceiling", "read", {}),
    ],
    "designs, INT4": [
        Line(OURS, "baseline", "design", {}),
        Line(FRAGMENTS, "step", "design", {"by": FRAGMENTS}),
        Line(SPECIALISED, "step", "design", {"by": SPECIALISED}),
        Line(IN_TURN, "step", "design", {"by": IN_TURN}),
        Line(READ, "ceiling", "read", {}),
    ],
    "waves": [
        Line(limited(sms, grid), "step", "limited", {"sms": sms, "grid": how})
        for sms in SMS
        for grid, how in {TILES: "tiles", PERSISTENT: "filled"}.items()
    ],
}


def candidates(x: Case) -> "list[Candidate]":
    """What is tried for a case's table."""
    from labkit.kernels.experts import choose

    return choose.candidates(x["T"], x["E"], x["top_k"], x["H"], x["I"], x["weights"] == "INT4")


def lines(x: Case) -> list[Line]:
    """The variants of a case."""
    if x.op == "tune":
        return [Line(str(one), "step", "gemm", {"choice": one}) for one in candidates(x)]
    key = "gemm" if x.op in GEMMS else x.op
    key = f"{key}, INT4" if x["weights"] == "INT4" and f"{key}, INT4" in LINES else key
    return [line for line in LINES[key] if _takes(x, line.name)]


def _takes(x: Case, name: str) -> bool:
    """Whether a variant is timed in a case."""
    T, int4 = x["T"], x["weights"] == "INT4"
    if name in (READ, ORDINARY):
        return T <= READ_UP_TO and (x.op != "layer" or _is_plain(x))
    if name in (BY_TILES, BYTES, WORDS):
        return T == 1 and (int4 or _is_plain(x))
    if name == RULE and int4:
        return T > 1  # nothing about one token is tuned
    if x.op in GEMMS and name in RELEASED_GEMMS:
        return int4 and x["model"] == ABLATED[0] and T in RELEASED_AT
    if name in NARROW:
        return x["model"] == ABLATED[0] and T == SOURCE_T
    if name in RELEASED or name == PER_PAIR:  # takes bf16 activations alone; the source's own model
        return x["model"] == ABLATED[0] and (name != PER_PAIR or T <= PER_PAIR_UP_TO)
    if name == VLLM and int4:  # beside the other outside layers of such weights
        return x["model"] in (ABLATED[0], TINY)
    if name == HUMMING:  # takes bf16 activations alone
        return x["model"] == ABLATED[0]
    if name in (LIGER, LOOP, RULE, OTHER_TOKENS):
        return _is_plain(x) and (name != OTHER_TOKENS or T != TUNED_FOR)
    if not name.startswith("source"):
        return True
    if (x["model"], T) == (ABLATED[0], SOURCE_T) and int4:
        return False  # its own point, at which ExecuTorch's own code is timed
    weights = "W4A8" not in name and ONCE not in name if not int4 else name != source(16, PERSISTENT, BOX)
    return weights and ablated(x["model"], x["weights"], T)


def _is_plain(x: Case) -> bool:
    """Whether all that is no matter of routing is timed."""
    return x["routing"] == UNIFORM or x["model"] == TINY


def ablated(model: str, weights: str, tokens: int) -> bool:
    """Whether products with a change at a time are timed in a case; weights: of a tiny case, fp32 or INT4."""
    return model == TINY or (model in ABLATED and tokens in ABLATED_AT.get(weights, ()))


def of(x: Case) -> list[Variant]:
    """Candidates of the table (tune), whole layers and their rivals (layer), the grids (gemm1, gemm2, waves)."""
    return [_variant(x, line) for line in lines(x)]


def _variant(x: Case, line: Line) -> Variant:
    shown, choice = line.options, line.options.get("choice")
    if choice:
        shown = {"gemm": choice.gemm, "block_m": choice.block_m, "tile": choice.tile.as_dict()}
    return variant(
        line.name, line.role, f"{STUDY}.trials:{line.make}", line.options, source=_runs(x, line), shown=shown,
        mode="eager" if line.name == LOOP else "graph",
    )  # fmt: skip


# What runs, as "module:function": launchers, and before them the rules of their configuration; a table is no code

_RULE, _BY_WORDS = f"{EXPERTS}.choose:rule", f"{EXPERTS}.choose:by_words"
_PRODUCTS, _TILES = f"{EXPERTS}.tiled:products", f"{EXPERTS}.tiled:by_tiles"
_JOINED = f"{EXPERTS}.wide:joined"
BY_TILES_SOURCE = _RULE, _TILES  # of our layer of more than one token
_BY_DESIGN = {
    FRAGMENTS: (f"{EXPERTS}.few_rows:by_few_rows",),
    SPECIALISED: (f"{EXPERTS}.specialised:by_specialised_warps",),
}
_IN_BYTES, _IN_WORDS = f"{EXPERTS}.one_token:launches", f"{EXPERTS}.one_token_words:launches"
_RUNS = {  # by the name of the function in `trials`, where that is enough
    "limited": (_RULE, _PRODUCTS, f"{STUDY}.green_context:stream_on", f"{STUDY}.green_context:timed"),
    "grouped_mm": f"{STUDY}.peers:grouped_mm",
    "liger": f"{STUDY}.peers:liger",
    "loop": f"{STUDY}.peers:loop",
    "read": f"{STUDY}.ceilings:read",
    "sglang_layer": (f"source:{SGLANG_RELEASE}", f"{STUDY}.sglang:layer"),
    "vllm_layer": (f"source:{VLLM_RELEASE}", f"{STUDY}.vllm:layer"),
    "humming_layer": (f"source:{HUMMING_RELEASE}", f"{STUDY}.humming:prepared", f"{STUDY}.humming:layer"),
    "per_pair": (f"source:{RELEASE}", f"{STUDY}.executorch:per_pair"),
    "released": (f"source:{RELEASE}", f"{STUDY}.executorch:batched"),
    "narrow": (f"source:{RELEASE}", f"{STUDY}.executorch:narrow"),
    "released_gemm": (f"source:{RELEASE}", f"{STUDY}.executorch:product", f"{STUDY}.executorch:launcher"),
}


def _runs(x: Case, line: Line) -> str | tuple[str, ...]:
    """What really runs in a variant of a case."""
    options = line.options
    if "choice" in options:
        return _PRODUCTS
    if line.make in _RUNS:
        return _RUNS[line.make]
    if line.make == "design" and "by" in options:
        return _BY_DESIGN.get(options["by"], BY_TILES_SOURCE)
    if line.make in ("layer", "design") and _joins(x, options):
        return _RULE, _JOINED
    if line.make == "design":
        return BY_TILES_SOURCE
    if x.op == "layer" and x["T"] == 1 and not options.keys() & {"grid", "tokens", "rows"}:  # these are about tiles
        if x["weights"] != "INT4" or "plain" in options:
            return _RULE, _IN_BYTES
        by_words = {None: (_RULE, _BY_WORDS, _IN_BYTES, _IN_WORDS), False: (_RULE, _IN_BYTES)}
        return by_words.get(options.get("words"), (_BY_WORDS, _IN_WORDS))
    is_source = options.get("base", "ours" if x.op == "layer" else "source") == "source"
    found = (f"{EXPERTS}.choose:source" if is_source else _RULE,)
    found += (_RULE,) if options.get("block_m") == 0 else ()  # by the tokens
    found += (_TILES if x.op == "layer" else _PRODUCTS,)
    return (*found, f"{STUDY}.w4a8:_quantise", f"{STUDY}.w4a8:_gemm") if options.get("int8") else found


def _joins(x: Case, options: Mapping[str, Any]) -> bool:
    """Whether a layer of ours may have blocks of one expert as one tile, if the configuration for its GPU can."""
    from labkit.kernels.experts import choose

    int4 = x["weights"] == "INT4" and "plain" not in options
    ours = options.get("base", "ours") in ("ours", "rule") and not options.keys() & {"grid", "int8"}
    return ours and not int4 and options.get("tokens", x["T"]) in choose.JOINED
