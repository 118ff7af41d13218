"""Which `Choice` a GEMV runs with: from this GPU's tuned table, or from a rule for a shape that is not in it.

The table is made by the study `gemv_coalescing` from measurements with cold L2, in which each candidate was first
checked against float64. It is one JSON file a GPU, `gemv.json` (see `tuned`): bytes of a value -> "NxK" -> the choice
that was fastest with cold L2 and, where it was timed, with hot L2.
"""

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from labkit.kernels import tuned
from labkit.kernels.checks import check_one_of
from labkit.kernels.target import multiprocessors

ROWS = (1, 2, 4, 8, 16)
WARPS = (1, 2, 4, 8)
SPLIT = (1, 2, 4, 8, 16)
MOST_LOADS = 64  # tiles of all rows of a program that are unrolled; beyond, tiles are looped over
TABLE = "gemv.json"
THREAD_BYTES = (8, 16, 32)  # of one row that a thread loads at once; 8 only where it makes a tile divide K
SPLITS_BELOW = 256  # rows: a GEMV that is shorter does not fill a GPU with one program a row
SPLITS = (2, 4)
FILL = 4  # programs for each multiprocessor that the rule asks for before it gives a program more rows


@dataclass(frozen=True)
class Choice:
    """How a GEMV is run. rows: of W a program; block_k: values of a row's tile; split: programs that share a row."""

    rows: int = 4
    num_warps: int = 4
    block_k: int = 1024
    split: int = 1
    interleaved: bool = False

    def __str__(self) -> str:
        words = [f"{self.rows} row{'s' * (self.rows > 1)}", f"{self.num_warps} warp{'s' * (self.num_warps > 1)}"]
        words += (
            [f"BK={self.block_k}"] + [f"split {self.split}"] * (self.split > 1) + ["interleaved"] * self.interleaved
        )
        return ", ".join(words)

    def as_dict(self) -> dict[str, int]:
        """The choice as JSON."""
        return asdict(self)


def check_choice(choice: Choice) -> None:
    """Raise ValueError for a choice that the kernel cannot take."""
    check_one_of("rows", choice.rows, ROWS)
    check_one_of("num_warps", choice.num_warps, WARPS)
    check_one_of("split", choice.split, SPLIT)
    size, least = choice.block_k, 32 * choice.num_warps
    if not least <= size <= 8192 or size & (size - 1):
        raise ValueError(f"block_k is {size}; allowed: a power of two from {least} (one value a thread) to 8192")


def choose(N: int, K: int, itemsize: int, device: torch.device) -> Choice:
    """The choice for a shape on a device: tuned if the table has it, else `rule`; after the first call a look-up."""
    return _table(device).get((N, K, itemsize)) or rule(N, K, itemsize, multiprocessors(device))


@cache
def rule(N: int, K: int, itemsize: int, sms: int = 132) -> Choice:
    """A choice from the shape alone; never a split, which was the fastest at no shape that was tuned.

    16 bytes a thread; as many warps as a row has such loads for, up to 4; the tile halved where that makes it divide K,
    doubled while a row has more than `MOST_LOADS`; then as many rows as leave each multiprocessor `FILL` programs and a
    program `MOST_LOADS` tiles, up to 4.
    """
    vector = 16 // itemsize
    warps = max(w for w in WARPS if w == 1 or (w <= 4 and 32 * w * vector <= K))
    block_k = 32 * warps * vector
    if K % block_k and K % (block_k // 2) == 0 and block_k // 2 >= 32 * warps:
        block_k //= 2
    while -(-K // block_k) > MOST_LOADS and block_k < 8192:
        block_k *= 2
    tiles = -(-K // block_k)
    rows = max(r for r in ROWS if r == 1 or (r <= 4 and N >= FILL * r * sms and r * tiles <= MOST_LOADS))  # noqa: SIM300
    return Choice(rows, warps, block_k)


def candidates(N: int, K: int, itemsize: int) -> list[Choice]:
    """What is tried for a shape: rows × warps × tile, and splits of a row where N is short.

    Left out: tiles that are mostly beyond K, programs of more than `MOST_LOADS` tiles, more rows than N has.
    """
    found = []
    for warps in WARPS:
        for size in THREAD_BYTES:
            block_k = 32 * warps * size // itemsize
            tiles = -(-K // block_k)
            if tiles * block_k > 1.5 * K or (size == 8 and (K % block_k or K % (2 * block_k) == 0)):
                continue
            fits = [rows for rows in ROWS if rows * tiles <= MOST_LOADS and rows <= max(1, N // 4)]
            found += [Choice(rows, warps, block_k) for rows in fits]
            if N <= SPLITS_BELOW:
                splits = [split for split in SPLITS if split <= tiles <= split * MOST_LOADS]
                found += [Choice(1, warps, block_k, split) for split in splits]
    return found or [rule(N, K, itemsize)]


def write(folder: Path, table: dict[tuple[int, int, int], dict[str, Choice]]) -> None:
    """Write a GPU's table into its folder, atomically. table: (N, K, itemsize) -> cold and hot."""
    found: dict[str, dict[str, Any]] = {}
    for (N, K, itemsize), choices in sorted(table.items()):
        entry = {name: choice.as_dict() for name, choice in choices.items()}
        found.setdefault(f"{itemsize} bytes", {})[f"{N}x{K}"] = entry
    tuned.write(folder / TABLE, found)
    for cached in (_table, choices_of):
        cached.cache_clear()


def read(folder: Path, kind: str = "cold") -> dict[tuple[int, int, int], Choice]:
    """A GPU's table: (N, K, itemsize) -> the choice that was fastest with `kind` L2; empty if there is none.

    ValueError naming the file if it is not such a table.
    """
    return tuned.read(folder / TABLE, lambda sizes: _parsed(sizes, kind))


def _parsed(sizes: Any, kind: str) -> dict[tuple[int, int, int], Choice]:
    return {
        (*map(int, shape.split("x")), int(size.split()[0])): Choice(**entry[kind])
        for size, shapes in sizes.items()
        for shape, entry in shapes.items()
        if kind in entry
    }


@cache
def choices_of(gpu: str, kind: str = "cold") -> dict[tuple[int, int, int], Choice]:
    """All choices of the tables of the GPU of this name, as `read` gives them."""
    return {shape: choice for folder in tuned.folders(gpu) for shape, choice in read(folder, kind).items()}


@cache
def _table(device: torch.device) -> dict[tuple[int, int, int], Choice]:
    return choices_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else {}
