"""Which tiles an expert layer runs with: a rule from the shape, for what has not been tuned."""

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from labkit.checks import check_one_of
from labkit.moe_persistent_grid.waves import BLOCKS_M

BLOCKS_N = (16, 32, 64, 128, 256)
BLOCKS_K = (16, 32, 64, 128, 256)
UNPACK = ("join", "split", "twice")
SOURCE_BLOCKS_M = (16, 64)
FILL = 3  # CTAs an SM, below which each one needs more loads in flight


@dataclass(frozen=True)
class Tile:
    """How one GEMM is run; see the table at the top of kernels.py.

    block_n: rows of w, gate's and up's together where fused. programs: 0: one CTA a tile; else a persistent grid
    of at most so many. counted: leave off at the last block that has a token, which the device counts; if not, the
    source's worst-case grid. unpack, scale_sums: only for INT4.
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


@dataclass(frozen=True)
class Config:
    """How an expert layer is run. fused: SiLU(gate) · up at the end of GEMM1; if not, in the K loop of GEMM2."""

    block_m: int
    gemm1: Tile
    gemm2: Tile
    fused: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The configuration as JSON."""
        return asdict(self)


def check_config(config: Config, int4: bool) -> None:
    """Raise ValueError, naming the argument, its value and what is allowed, for what the kernels cannot take."""
    check_one_of("block_m", config.block_m, BLOCKS_M)
    for name in ("gemm1", "gemm2"):
        tile: Tile = getattr(config, name)
        check_one_of(f"{name}.block_n", tile.block_n, BLOCKS_N)
        check_one_of(f"{name}.block_k", tile.block_k, tuple(k for k in BLOCKS_K if k <= 128) if int4 else BLOCKS_K)
        check_one_of(f"{name}.num_warps", tile.num_warps, (1, 2, 4, 8))
        check_one_of(f"{name}.num_stages", tile.num_stages, (1, 2, 3, 4, 5, 6))
        check_one_of(f"{name}.unpack", tile.unpack, UNPACK)
        if tile.group_m < 1 or tile.programs < 0:
            raise ValueError(
                f"{name}.group_m is {tile.group_m} and programs {tile.programs}; allowed: at least 1, and at least 0"
            )
        if tile.flatten and not tile.programs:
            raise ValueError(f"{name}.flatten is True with one CTA a tile; allowed: only with programs")
        if int4 and tile.unpack == "split" and tile.block_k < 32:
            raise ValueError(f"{name}.block_k is {tile.block_k} with unpack split; allowed: 32 and more")
    if config.fused and config.gemm1.block_n < 32:
        raise ValueError(f"gemm1.block_n is {config.gemm1.block_n}; allowed: at least 32 where SiLU · up is fused")


@cache
def rule(tokens: int, experts: int, top_k: int, hidden: int, width: int, int4: bool = False, sms: int = 132) -> Config:
    """A configuration from the shape alone; from what the kernels compile to, not yet from measurements.

    block_m: the least that holds the rows of an average expert with some to spare, so that its weights are read once.
    One CTA a tile: where a persistent grid is better is for the measurement to say.
    """
    slots = tokens * top_k
    active = min(experts, slots)
    rows = slots / active
    block_m = next((m for m in BLOCKS_M if rows <= 0.75 * m), 128)
    return Config(*(block_m, *(_tile(rows, block_m, active * n, int4, sms) for n in (2 * width, hidden))))


def _tile(rows: float, block_m: int, columns: int, int4: bool, sms: int) -> Tile:
    """A GEMM's tile. columns: rows of w, of all active experts.

    Up to 32 rows the time is that of reading weights: they are the left operand, and the tile of w is small, so that
    several CTAs an SM have loads in flight; where there are too few tiles for that, each has more stages of them. From
    256 rows an expert on it is that of products: the widest wgmma. Between: two or three CTAs an SM.
    """
    if block_m <= 32:
        stages = 3 if columns >= FILL * 64 * sms else 5
        return Tile(64, 128, 4, stages + int4, group_m=1, swap=True, unpack="split")
    if block_m == 64:
        return Tile(128, 64, 4, 3)
    if rows < 256 or int4:
        return Tile(128, 64, 8, 3, scale_sums=False)
    return Tile(256, 64, 8, 4)


def source(block_m: int = 16, sms: int = 132, persistent: bool = True, group_m: int = 8) -> Config:
    """The configuration of ExecuTorch's kernels: SMs programs, worst-case grid, each INT4 byte addressed twice.

    persistent False: the grid that they had before, one CTA a tile. Tiles: the middle of what it tunes over.
    """
    check_one_of("block_m", block_m, SOURCE_BLOCKS_M)
    tile = Tile(128, 64, 4, 3, group_m, sms if persistent else 0, False, False, False, "twice", False)
    return Config(block_m, tile, tile, fused=False)
