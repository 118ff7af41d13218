"""Names of the study's variants and what makes them; in the order of its pages."""

from collections.abc import Mapping
from typing import Any

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
READ = "read the experts' weights"
RIVALS = (GROUPED, LIGER, LOOP)
TUNED_FOR = 1642  # tokens that OTHER_TOKENS was tuned for: the source's prefill

# The grids of one GEMM
TILES, PERSISTENT = "one CTA a tile", "persistent"
GROUPS = (1, 8, 16, 32)
EARLY, FILLED, FLAT, BOX, ONCE, ROWS = (
    "early exit", "SMs × occupancy", "flattened", "descriptor", "each byte once", "BM from the tokens",
)  # fmt: skip
OURS_TILES = f"ours, {TILES}"
OURS_PERSISTENT = f"ours, {PERSISTENT}"
OURS_FILLED = f"ours, {PERSISTENT}, {FILLED}"


def source(block_m: int = 16, grid: str = TILES, *changes: str, int8: bool = False) -> str:
    """ExecuTorch's kernel, faithful but for the changes."""
    return ", ".join([f"source{' W4A8' if int8 else ''} BM={block_m}", grid, *changes])


def grouped(group_m: int) -> str:
    """The source's persistent kernel with this GROUP_SIZE_M; 8 is its own."""
    return source(16, PERSISTENT, *([f"groups of {group_m}"] if group_m != 8 else []))


def limited(sms: int, grid: str) -> str:
    """A grid on so many multiprocessors of the GPU; 0: all of them."""
    return f"{sms or 'all'} SMs, {grid}"


SMS = (0, 128, 108, 96, 64)  # 128 and 108: those of an RTX 4090 and an A100
STEPPED = tuple(limited(sms, grid) for sms in SMS for grid in (TILES, PERSISTENT))

# Pairs of the same kernel in the two grids: one CTA a tile, persistent
PAIRS = (
    (source(16, TILES), source(16, PERSISTENT)),
    (source(64, TILES), source(64, PERSISTENT)),
    (source(16, TILES, int8=True), source(16, PERSISTENT, int8=True)),
    (source(64, TILES, int8=True), source(64, PERSISTENT, int8=True)),
    (OURS_TILES, OURS_PERSISTENT),
    (OURS_TILES, OURS_FILLED),
)
# What the source tunes over beside its tile of 128 x 64 (ExecuTorch's fused_moe.py), at its own point alone: BN, BK,
# stages. With 8-bit activations a K tile is the group that shares a scale.
OTHER_TILES = {False: ((64, 64, 3), (64, 128, 3), (128, 128, 2)), True: ((64, 32, 3),)}


def tuned_over(grid: str, int8: bool = False) -> dict[str, dict[str, int]]:
    """The source's variants of a grid that differ in their tile alone, and how; the first one has its usual tile."""
    found: dict[str, dict[str, int]] = {source(16, grid, int8=int8): {}}
    for block_n, block_k, stages in OTHER_TILES[int8]:
        size = {"block_n": block_n, "block_k": block_k, "num_stages": stages}
        found[source(16, grid, f"BN={block_n}", f"BK={block_k}", int8=int8)] = size
    return found


BASE, FILLED_BASE = source(16, PERSISTENT), source(16, PERSISTENT, FILLED)
# Source's persistent kernels -> the same in one CTA a tile
TILES_OF = {persistent: tiles for tiles, persistent in PAIRS if persistent.startswith("source")}
TILES_OF[FILLED_BASE] = source(16, TILES)
for _int8 in (False, True):
    TILES_OF |= dict(zip(tuned_over(PERSISTENT, _int8), tuned_over(TILES, _int8), strict=True))
TILES_OF |= {source(16, PERSISTENT, EARLY, *more): source(16, TILES, EARLY) for more in ((), (FILLED,))}
CHANGES = (  # variant, and the one of which it changes one thing
    (source(16, PERSISTENT, EARLY), BASE),
    (source(16, TILES, EARLY), source(16, TILES)),
    (source(16, PERSISTENT, FILLED), BASE),
    (source(16, PERSISTENT, EARLY, FILLED), source(16, PERSISTENT, EARLY)),
    (source(16, PERSISTENT, FLAT), BASE),
    (source(16, PERSISTENT, ONCE), BASE),
    (source(16, PERSISTENT, ONCE, BOX), source(16, PERSISTENT, ONCE)),
    (source(16, PERSISTENT, BOX), BASE),  # of bf16 weights, which have no bytes to load twice
    (source(16, PERSISTENT, ROWS), BASE),
    (source(64, PERSISTENT), BASE),
    (source(64, TILES), source(16, TILES)),
    (source(16, PERSISTENT, int8=True), BASE),
    *((grouped(size), grouped(1)) for size in GROUPS[1:]),
)


def layer_variants(weights: str, uniform: bool, ablated: bool) -> dict[str, str]:
    """Name -> role of the variants of a whole layer, the first one repeated as A/A. uniform: the routing."""
    found = {OURS: "ours"}
    if weights != "INT4":
        found |= {GROUPED: "peer"}
        return found | ({LIGER: "peer", LOOP: "baseline"} | _CHOICES if uniform else {})
    found |= {OURS_BF16: "baseline", RULE: "step", BY_TILES: "step", BYTES: "step", WORDS: "step"}
    both = (TILES, PERSISTENT) if ablated else ()
    return found | {source(16, grid, int8=int8): "step" for int8 in (False, True) for grid in both}


_CHOICES = {ORDINARY: "step", BY_TILES: "step", RULE: "step", OTHER_TOKENS: "step", READ: "ceiling"}


def gemm_variants(weights: str, ablated: bool, own_point: bool = False) -> dict[str, str]:
    """Name -> role of the variants of one GEMM, the first one repeated as A/A. own_point: the source's prefill."""
    found = [OURS_TILES, OURS_PERSISTENT, OURS_FILLED]
    if ablated:
        wanted = [name for pair in (*PAIRS, *CHANGES) for name in pair]
        found += [name for name in wanted if name in _makers(weights)]
    if own_point:
        found += [name for int8 in (False, True) for grid in (TILES, PERSISTENT) for name in tuned_over(grid, int8)]
    found = dict.fromkeys(found, "step")
    return found | ({source(16, TILES): "baseline"} if ablated else {}) | {READ: "ceiling"}


def _makers(weights: str) -> dict[str, dict[str, Any]]:
    """Variant of one GEMM -> the arguments of `trials.gemm` that make it."""
    found: dict[str, dict[str, Any]] = {
        OURS_TILES: {"base": "ours", "grid": "tiles"},
        OURS_PERSISTENT: {"base": "ours", "grid": "SMs"},
        OURS_FILLED: {"base": "ours", "grid": "filled"},
    }
    for block_m in (16, 64):
        for int8 in (False, True) if weights == "INT4" else (False,):
            for name, grid in ((TILES, "tiles"), (PERSISTENT, "SMs")):
                found[source(block_m, name, int8=int8)] = {"block_m": block_m, "grid": grid, "int8": int8}
    changes: dict[tuple[str, ...], dict[str, Any]] = {
        (EARLY,): {"counted": True},
        (FILLED,): {"grid": "filled"},
        (EARLY, FILLED): {"counted": True, "grid": "filled"},
        (FLAT,): {"flatten": True},
        (ROWS,): {"block_m": 0},
    }
    if weights == "INT4":
        changes |= {(ONCE,): {"unpack": "join"}, (ONCE, BOX): {"unpack": "join", "descriptor": True}}
    else:
        changes[(BOX,)] = {"descriptor": True}
    for words, options in changes.items():
        found[source(16, PERSISTENT, *words)] = {"block_m": 16, "grid": "SMs", "int8": False, **options}
    for size in GROUPS:
        found[grouped(size)] = {"block_m": 16, "grid": "SMs", "int8": False} | ({"group_m": size} if size != 8 else {})
    for int8 in (False, True) if weights == "INT4" else ():
        for name, grid in ((TILES, "tiles"), (PERSISTENT, "SMs")):
            for variant, size in tuned_over(name, int8).items():
                found[variant] = {"block_m": 16, "grid": grid, "int8": int8} | size
    found[source(16, TILES, EARLY)] = {"block_m": 16, "grid": "tiles", "int8": False, "counted": True}
    return found


def makers(op: str, weights: str, tokens: int = 0) -> dict[str, tuple[str, dict[str, Any]]]:
    """Variant -> the name of its function in `trials`, and the arguments that make it this variant."""
    if op == "waves":
        grids = {TILES: "tiles", PERSISTENT: "filled"}
        return {
            limited(sms, grid): ("limited", {"sms": sms, "grid": how}) for sms in SMS for grid, how in grids.items()
        }
    if op in ("gemm1", "gemm2"):
        return {name: ("gemm", options) for name, options in _makers(weights).items()} | {READ: ("read", {})}
    found: dict[str, tuple[str, dict[str, Any]]] = {
        OURS: ("one_token" if weights == "INT4" and tokens == 1 else "layer", {}),
        ORDINARY: ("layer", {"dependent": False}),
        BY_TILES: ("layer", {"rows": False}),
        BYTES: ("one_token", {"words": False}),
        WORDS: ("one_token", {"words": True}),
        RULE: ("layer", {"base": "rule"}),
        OTHER_TOKENS: ("layer", {"tokens": TUNED_FOR}),
        OURS_BF16: ("layer", {"plain": True}),
        GROUPED: ("grouped_mm", {}),
        LIGER: ("liger", {}),
        LOOP: ("loop", {}),
        READ: ("read", {}),
    }
    for int8 in (False, True):
        for name, grid in ((TILES, "tiles"), (PERSISTENT, "SMs")):
            options = {"base": "source", "block_m": 16, "grid": grid, "int8": int8}
            found[source(16, name, int8=int8)] = ("layer", options)
    return found


# What runs, as "module:function": launchers, and before them the rules of their configuration; a table is no code

_EXPERTS = "labkit.kernels.experts"
_HERE = "labkit.studies.moe_persistent_grid"
_RUNS = {  # by the name of the function in `trials`, where that is enough
    "candidate": (f"{_EXPERTS}.expert_layer:products",),
    "limited": (
        f"{_EXPERTS}.choose:rule",
        f"{_EXPERTS}.expert_layer:products",
        f"{_HERE}.green_context:stream_on",
        f"{_HERE}.green_context:timed",
    ),
    "grouped_mm": (f"{_HERE}.peers:grouped_mm",),
    "liger": (f"{_HERE}.peers:liger",),
    "loop": (f"{_HERE}.peers:loop",),
    "read": (f"{_HERE}.ceilings:read",),
}
_RUNS_INT4 = {  # of one token, by what `words` says
    None: (
        f"{_EXPERTS}.choose:rule",
        f"{_EXPERTS}.choose:by_words",
        f"{_EXPERTS}.one_token:launches",
        f"{_EXPERTS}.one_token_words:launches",
    ),
    False: (f"{_EXPERTS}.choose:rule", f"{_EXPERTS}.one_token:launches"),
    True: (f"{_EXPERTS}.choose:by_words", f"{_EXPERTS}.one_token_words:launches"),
}
_CHOOSES = {
    "ours": (f"{_EXPERTS}.choose:rule",),
    "rule": (f"{_EXPERTS}.choose:rule",),
    "source": (f"{_EXPERTS}.choose:source",),
}


def launchers(op: str, tokens: int, make: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """What really runs in a variant of a case; make, options: as `makers` has them."""
    if make == "one_token":
        found = _RUNS_INT4[options.get("words")]
    else:
        found = _RUNS.get(make) or _by_choice(op, tokens, options)
    return found


def _by_choice(op: str, tokens: int, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a layer, or of one of its GEMMs, with a configuration that is chosen."""
    found = _CHOOSES[options.get("base", "ours" if op == "layer" else "source")]
    if options.get("block_m") == 0:  # by the tokens
        found += (f"{_EXPERTS}.choose:rule",)
    if op == "layer" and tokens == 1 and not options.keys() & {"grid", "tokens", "rows"}:  # these are about tiles
        return (*found, f"{_EXPERTS}.one_token:launches")
    found += (f"{_EXPERTS}.expert_layer:by_tiles" if op == "layer" else f"{_EXPERTS}.expert_layer:products",)
    return (*found, f"{_HERE}.w4a8:_quantise", f"{_HERE}.w4a8:_gemm") if options.get("int8") else found
