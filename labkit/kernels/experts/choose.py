"""Which tiles an expert layer runs with: from this GPU's tuned table, or from a rule for a shape that is not in it.

The table is made by the study `moe_persistent_grid`, with cold L2 and uniform routing, of candidates that were first
checked against float64. It is one JSON file a GPU, `experts.json`: weights -> shape -> tokens -> configuration.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from labkit.kernels import tuned
from labkit.kernels.checks import check_one_of
from labkit.kernels.experts.blocks import BLOCKS_M
from labkit.kernels.experts.int4 import GROUP
from labkit.kernels.target import multiprocessors

BLOCKS = (16, 32, 64, 128, 256)  # of N and of K; INT4's of K end at a group
WARPS = (1, 2, 4, 8)
UNPACK = ("join", "split", "twice")
ROWS = (1, 2, 4, 8, 16, 32)
ROWS_K = (128, 256, 512, 1024, 2048, 4096)
SOURCE_BLOCKS_M = (16, 64)
WORDS_UP, WORDS_DOWN = (1, 2, 4, 8), (1, 2, 4, 8, 16)  # of INT4 as words: a word of each row is a register
WORDS_K = (*ROWS_K, 8192)
WORDS_FROM = 28 << 20  # weights of one token's experts, from which INT4 is loaded as words: see `by_words`
FILL = 3  # CTAs an SM, below which each one needs more loads in flight
TABLE = "experts.json"
WIDE_ROWS = 128  # of a wide tile
JOINED = range(64, 257)  # numbers of tokens for which blocks of one expert are joined
NEAR = 2.0  # a number of tokens this factor off those that were tuned, or less, runs as they do
INT8_GROUP = 32  # values of a row, along K, that share one scale where the source has 8-bit activations


@dataclass(frozen=True)
class TileChoice:
    """How one GEMM is run; see the table at the top of tiles.py.

    block_n: rows of w, gate's and up's together where fused. programs: 0: one CTA a tile; else a persistent grid
    of at most so many. counted: leave off at the last block that has a token, which the device counts; if not, the
    source's worst-case grid. unpack, scale_sums: only for INT4. descriptor: w by the copy engine, from Hopper on.
    """

    block_n: int = 128
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 8
    programs: int = 0
    flatten: bool = False
    counted: bool = True
    swap: bool = False
    unpack: str = "join"
    scale_sums: bool = True
    descriptor: bool = False

    def __str__(self) -> str:
        words = [f"BN={self.block_n}", f"BK={self.block_k}", f"{self.num_warps} warps", f"{self.num_stages} stages"]
        words += [f"groups of {self.group_m}"] * (self.group_m > 1) + ["swapped"] * self.swap
        words += [f"{self.programs} programs"] * (self.programs > 0) + ["flattened"] * self.flatten
        words += ["every block"] * (not self.counted) + ["descriptor"] * self.descriptor
        return ", ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """The tile as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class RowChoice:
    """How the layer of one token is run; see the table at the top of one_token.py.

    up, down: values of the result a program, powers of two; block_k: values along K at once.
    """

    up: int = 4
    down: int = 4
    block_k: int = 1024
    num_warps: int = 4


@dataclass(frozen=True)
class WordChoice(RowChoice):
    """The same with INT4 weights as words of 32 bits; see the table at the top of one_token_words.py.

    block_k: most values of gemm1's rows at once; down_k: of gemm2's, of all slots. A warp for 1024, at most num_warps.
    """

    down: int = 8
    num_warps: int = 8
    down_k: int = 2048


@dataclass(frozen=True)
class Choice:
    """How an expert layer is run. fused: SiLU(gate) · up at the end of GEMM1; if not, in the K loop of GEMM2.

    dependent: each launch may start before the one before has ended, on GPUs that have that (from Hopper on).
    rows: only for one token, by matrix-vector products; the tiles are not used then. None: by tiles.
    """

    block_m: int
    gemm1: TileChoice
    gemm2: TileChoice
    fused: bool = True
    dependent: bool = True
    rows: RowChoice | None = None

    def as_dict(self) -> dict[str, Any]:
        """The configuration as JSON."""
        return asdict(self)

    @classmethod
    def of(cls, made: Mapping[str, Any]) -> "Choice":
        """The configuration that `as_dict` has made JSON of. TypeError or KeyError for anything else."""
        rows = made.get("rows")
        parts = {
            "gemm1": TileChoice(**made["gemm1"]),
            "gemm2": TileChoice(**made["gemm2"]),
            "rows": rows and RowChoice(**rows),
        }
        return cls(**{**made, **parts})


@dataclass(frozen=True)
class Joined(Choice):
    """A configuration of the plainest tiles, by which blocks of one expert side by side are one tile (wide.py).

    A class of its own: layers by tiles do not depend on it, so their recorded rows stay those of today's kernel.
    """

    def as_dict(self) -> dict[str, Any]:
        """The configuration as JSON; with `joined`, which no table has."""
        return super().as_dict() | {"joined": True}


def check_choice(config: Choice, int4: bool) -> None:
    """Raise ValueError, naming the argument, its value and what is allowed, for what the kernels cannot take."""
    check_one_of("block_m", config.block_m, BLOCKS_M)
    for name in ("gemm1", "gemm2"):
        tile: TileChoice = getattr(config, name)
        sizes = {"block_n": BLOCKS, "block_k": BLOCKS[:-1] if int4 else BLOCKS}
        for field, values in (sizes | {"num_warps": WARPS, "num_stages": range(1, 7), "unpack": UNPACK}).items():
            check_one_of(f"{name}.{field}", getattr(tile, field), values)
        if tile.group_m < 1 or tile.programs < 0:
            found = f"{tile.group_m} and programs {tile.programs}"
            raise ValueError(f"{name}.group_m is {found}; allowed: at least 1, and at least 0")
        if tile.flatten and not tile.programs:
            raise ValueError(f"{name}.flatten is True with one CTA a tile; allowed: only with programs")
        if tile.descriptor and int4 and tile.unpack == "twice":
            raise ValueError(f"{name}.unpack is 'twice' with descriptor; allowed: join, split")
        if int4 and tile.unpack == "split" and tile.block_k < 64:
            raise ValueError(f"{name}.block_k is {tile.block_k} with unpack split; allowed: 64 and more")
    if config.fused and config.gemm1.block_n < 32:
        raise ValueError(f"gemm1.block_n is {config.gemm1.block_n}; allowed: at least 32 where SiLU · up is fused")
    if isinstance(config, Joined) and (why := _not_joined(config, int4)):
        raise ValueError(f"config is Joined with {why}; allowed: bf16, fp16 or fp32 weights by plain, fused tiles")
    if isinstance(config.rows, WordChoice) and not int4:
        raise ValueError(f"config.rows is {config.rows}; allowed: WordChoice only with INT4 weights")
    allowed = {"up": ROWS, "down": ROWS, "block_k": ROWS_K, "num_warps": WARPS} if config.rows else {}
    if isinstance(config.rows, WordChoice):
        allowed |= {"up": WORDS_UP, "down": WORDS_DOWN, "block_k": WORDS_K, "down_k": WORDS_K}
    for name, values in allowed.items():
        check_one_of(f"rows.{name}", getattr(config.rows, name), values)


@cache
def rule(tokens: int, experts: int, top_k: int, hidden: int, width: int, int4: bool = False, sms: int = 132) -> Choice:
    """A configuration from the shape alone; from what the kernels compile to, not yet from measurements.

    block_m: the least that holds the rows of an average expert with some to spare, so that its weights are read once.
    One CTA a tile: where a persistent grid is better is for the measurement to say.
    """
    slots = tokens * top_k
    active = min(experts, slots)
    rows = slots / active
    block_m = next((m for m in BLOCKS_M if rows <= 0.75 * m), 128)
    tiles = (_tile(rows, block_m, active * n, int4, sms) for n in (2 * width, hidden))
    return Choice(block_m, *tiles, rows=_rows(tokens, top_k, int4))


def _rows(tokens: int, top_k: int, int4: bool) -> RowChoice | None:
    """A thread has as many bytes on their way with both kinds of weights; gemm2 reads rows of all experts at once."""
    if tokens > 1:
        return None
    down = 4 if top_k <= 8 else 2
    return RowChoice(4, down, 2048) if int4 else RowChoice(2, down, 2048, 8)


def _tile(rows: float, block_m: int, columns: int, int4: bool, sms: int) -> TileChoice:
    """A GEMM's tile. columns: rows of w, of all active experts.

    Up to 32 rows the time is that of reading weights: they are the left operand, and the tile of w is small, so that
    several CTAs an SM have loads in flight; where there are too few tiles for that, bf16 has more stages of them. From
    256 rows an expert on it is that of products: the widest wgmma. Between: two or three CTAs an SM.
    """
    if block_m <= 32:
        stages = 4 if int4 else 3 if columns >= FILL * 64 * sms else 5
        return TileChoice(64, 128, 4, stages, group_m=1, swap=True, unpack="split")
    if block_m == 64:
        return TileChoice(128, 64, 4, 3, scale_sums=not int4)
    if rows < 256 or int4:
        return TileChoice(128, 64, 8, 3, scale_sums=False)
    return TileChoice(256, 64, 8, 4)


def source(block_m: int = 16, sms: int = 132, persistent: bool = True, group_m: int = 8, int8: bool = False) -> Choice:
    """The configuration of ExecuTorch's kernels: SMs programs, worst-case grid, each INT4 byte addressed twice.

    persistent False: the grid that they had before, one CTA a tile. Tiles: the middle of what it tunes over; with 8-bit
    activations (int8) its K tile is the group that shares a scale.
    """
    check_one_of("block_m", block_m, SOURCE_BLOCKS_M)
    block_k = INT8_GROUP if int8 else 64
    tile = TileChoice(128, block_k, 4, 3, group_m, sms if persistent else 0, False, False, False, "twice", False)
    return Choice(block_m, tile, tile, fused=False, dependent=False)


# The tuned table


class Candidate(NamedTuple):
    """One way to run one of the two GEMMs, "gemm1" or "gemm2"; they share block_m."""

    gemm: str
    block_m: int
    tile: TileChoice

    def __str__(self) -> str:
        words = [self.gemm, f"BM={self.block_m}", str(self.tile)] + [self.tile.unpack] * (self.tile.unpack != "join")
        return ", ".join(words + ["weights scaled"] * (not self.tile.scale_sums))


# BN, BK, warps, stages and what differs from a tile's defaults; by the rows that a block is for.
FEW = (
    (64, 128, 4, 3, {}), (64, 128, 4, 4, {}), (64, 128, 4, 5, {}), (128, 64, 4, 5, {}), (128, 128, 4, 3, {}),
    (64, 128, 4, 4, {"descriptor": True}), (128, 64, 4, 4, {"descriptor": True}),
    (128, 128, 4, 3, {"descriptor": True}), (256, 128, 8, 3, {"descriptor": True}),
    (64, 128, 4, 4, {"programs": 2, "flatten": True}),
)  # fmt: skip
SOME = (
    (64, 128, 4, 3, {}), (128, 64, 4, 3, {}), (128, 64, 4, 4, {}), (128, 128, 8, 2, {}), (128, 128, 8, 3, {}),
    (256, 64, 8, 3, {}), (64, 128, 4, 4, {"swap": True}), (128, 128, 8, 3, {"swap": True}),
    (128, 64, 4, 4, {"descriptor": True}),
)  # fmt: skip
MANY = (
    (128, 64, 4, 3, {}), (128, 64, 8, 3, {}), (128, 64, 8, 3, {"group_m": 32}), (256, 64, 8, 3, {}),
    (256, 64, 8, 4, {}), (256, 64, 8, 4, {"group_m": 1}), (256, 64, 8, 4, {"group_m": 32}),
    (256, 64, 8, 4, {"descriptor": True}), (256, 64, 8, 3, {"programs": 1, "flatten": True}),
)  # fmt: skip
LARGE_GROUPS = 256  # rows an expert, from which groups of more than 8 blocks are tried: else they span experts


def candidates(
    tokens: int, experts: int, top_k: int, hidden: int, width: int, int4: bool = False, sms: int = 132
) -> list[Candidate]:
    """What is tried for a shape: for each GEMM, tiles for blocks as the rule has them, and for half as many rows.

    The rule's own tiles are among them. programs in the tables above: CTAs an SM.
    """
    ruled = rule(tokens, experts, top_k, hidden, width, int4, sms)
    rows = tokens * top_k / min(experts, tokens * top_k)
    blocks = [ruled.block_m] + [ruled.block_m // 2] * (ruled.block_m > 16 and rows > 8)
    plain = {} if int4 else {"unpack": "join", "scale_sums": True}  # what only INT4 has, as it is by default
    found = [Candidate(gemm, ruled.block_m, replace(getattr(ruled, gemm), **plain)) for gemm in ("gemm1", "gemm2")]
    for block_m in blocks:
        table = FEW if block_m <= 32 else SOME if block_m == 64 else MANY
        for gemm in ("gemm1", "gemm2"):
            tiles = _tiles(table, block_m, int4, sms)
            tiles = [t for t in tiles if t.group_m <= 8 or rows >= LARGE_GROUPS]
            # A box of gate and one of up have half of the tile's rows each: fewer than wgmma takes.
            tiles = [t for t in tiles if gemm == "gemm2" or not (t.swap and t.descriptor and t.block_n < 128)]
            found += [Candidate(gemm, block_m, tile) for tile in tiles]
    return list(dict.fromkeys(found))


def _tiles(table: tuple, block_m: int, int4: bool, sms: int) -> list[TileChoice]:
    shared: dict[str, Any] = {"group_m": 1, "swap": True} if block_m <= 32 else {}
    found = [TileChoice(*size, **{**shared, **more}) for *size, more in table]
    if int4:
        # A K tile has one scale; flattened, INT4 weights are not copied ahead. Weights on the left stay in the
        # registers in which they are unpacked; on the right they go through memory.
        found = [tile for tile in found if tile.block_k <= GROUP and not tile.flatten]
        found = [replace(t, unpack="split") if t.swap else replace(t, scale_sums=False) for t in found]
    return [replace(tile, programs=tile.programs * sms) for tile in found]


def join(config: Choice, tokens: int, int4: bool) -> Choice:
    """The configuration, `Joined` where that gains: of few blocks an expert, all of which are less than a wide tile."""
    gains = tokens in JOINED and not _not_joined(config, int4)
    return (Joined if gains else Choice)(**vars(config))


def apart(config: Choice) -> Choice:
    """The configuration by which each block is a tile."""
    return Choice(**vars(config))


def _not_joined(config: Choice, int4: bool) -> str:
    """What of a configuration wide tiles do not have; empty if nothing."""
    tiles = config.gemm1, config.gemm2
    found = {
        "INT4 weights": int4,
        "rows": config.rows is not None,
        f"blocks of {config.block_m}": config.block_m >= WIDE_ROWS,
        "SiLU in the second product": not config.fused,
        "a persistent grid": any(tile.programs for tile in tiles),
        "every block": not all(tile.counted for tile in tiles),
        "a descriptor": any(tile.descriptor for tile in tiles),
    }
    return next((name for name, has in found.items() if has), "")


Shape = tuple[int, int, int, int, bool]  # experts, top_k, hidden, width, whether the weights are INT4
Table = dict[Shape, dict[int, Choice]]  # -> tokens -> configuration


def choose(tokens: int, experts: int, top_k: int, hidden: int, width: int, int4: bool, device: torch.device) -> Choice:
    """The configuration for a shape on a device: that of the tuned number of tokens that is nearest, or `rule`."""
    known = _table(device).get((experts, top_k, hidden, width, int4), {})
    tuned_tokens = nearest(tokens, tuple(known))
    if tuned_tokens is not None:
        return join(replace(known[tuned_tokens], rows=_rows(tokens, top_k, int4)), tokens, int4)
    return join(rule(tokens, experts, top_k, hidden, width, int4, multiprocessors(device)), tokens, int4)


def choose_any(
    tokens: int, experts: int, top_k: int, hidden: int, width: int, int4: bool, device: torch.device
) -> Choice:
    """As `choose`, and one token's INT4 weights as words where that is faster: where its experts have many."""
    found = choose(tokens, experts, top_k, hidden, width, int4, device)
    if int4 and tokens == 1 and 3 * top_k * hidden * width >= WORDS_FROM:
        return replace(found, rows=by_words(top_k, width))
    return found


def by_words(top_k: int, width: int) -> WordChoice:
    """How one token's INT4 weights are loaded as words.

    The fastest of 80 pairs of launches, 54 of them words, on an H100 and an H200, for Qwen3-30B-A3B (36 Mi weights a
    token), Qwen3-Next-80B-A3B (30 Mi), Mixtral-8x7B and eight experts of 4096 by 1536; for Qwen3.5-35B-A3B (24 Mi)
    bytes are. Where gemm2's rows of all slots fit one block, all are asked for before gemm1 has ended; of more, a
    block is two warps' work.
    """
    return WordChoice(down_k=8192 if 4096 < top_k * width <= 8192 else 2048)


def nearest(tokens: int, known: tuple[int, ...]) -> int | None:
    """The nearest number of tokens by their ratio; None if none is within a factor of `NEAR`."""
    found = min(known, key=lambda other: abs(math.log(other / tokens)), default=None)
    return found if found is not None and 1 / NEAR <= found / tokens <= NEAR else None


def write(folder: Path, table: Table) -> None:
    """Write a GPU's table into its folder, atomically."""
    found: dict[str, dict[str, Any]] = {}
    for (experts, top_k, hidden, width, int4), configs in sorted(table.items()):
        shape = f"{experts}x{top_k}x{hidden}x{width}"
        entry = {str(tokens): configs[tokens].as_dict() for tokens in sorted(configs)}
        found.setdefault("INT4" if int4 else "bf16", {})[shape] = entry
    tuned.write(folder / TABLE, found)
    for cached in (_table, choices_of):
        cached.cache_clear()


def read(folder: Path) -> Table:
    """A GPU's table; empty if there is none. ValueError naming the file if it is not such a table."""
    return tuned.read(folder / TABLE, _parsed)


def _parsed(kinds: Any) -> Table:
    found: Table = {}
    for weights, shapes in kinds.items():
        check_one_of("weights", weights, ("bf16", "INT4"))
        for shape, entry in shapes.items():
            experts, top_k, hidden, width = map(int, shape.split("x"))
            configs = {int(tokens): Choice.of(made) for tokens, made in entry.items()}
            for config in configs.values():
                check_choice(config, weights == "INT4")
            found[experts, top_k, hidden, width, weights == "INT4"] = configs
    return found


@cache
def choices_of(gpu: str) -> Table:
    """All configurations of the tables of the GPU of this name."""
    found: Table = {}
    for folder in tuned.folders(gpu):
        for shape, configs in read(folder).items():
            found[shape] = found.get(shape, {}) | configs
    return found


@cache
def _table(device: torch.device) -> Table:
    return choices_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else {}
