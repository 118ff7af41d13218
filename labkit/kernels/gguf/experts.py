"""Where the routed experts of a layer lie: each is one piece of bytes, so that one copy brings it to the GPU."""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from labkit.kernels.checks import check_one_of
from labkit.kernels.gguf import formats
from labkit.kernels.gguf.formats import ROWS, Format, Packed

ROLES = ("gate", "up", "down")
ALIGNMENT = 128  # bytes: a line


@dataclass(frozen=True)
class Experts:
    """Feed-forward experts y = down (SiLU(gate x) · (up x)), of one format and size.

    hidden, width: gate and up are [width, hidden], down is [hidden, width]. store: uint8 [count, bytes of an expert];
    in an expert gate, up and down one after the other, of each the arrays of its `Packed`, each from a line on.
    """

    format: Format
    hidden: int
    width: int
    store: Tensor

    def __len__(self) -> int:
        return len(self.store)

    @property
    def expert_bytes(self) -> int:
        """Bytes that are copied to bring one expert, the space between its arrays included."""
        return self.store.shape[1]

    def matrix(self, role: str, expert: int) -> Packed:
        """Views of gate, up or down of one expert. ValueError for another role, IndexError for no such expert."""
        check_one_of("role", role, ROLES)
        like, store, arrays = _layout(self.format, self.hidden, self.width)[role], self.store[expert], {}
        for name, array in like.packed.arrays.items():
            first = like.first[name]
            arrays[name] = store[first : first + array.nbytes].view(array.dtype).view(array.shape)
        return replace(like.packed, **arrays)

    def stride(self, array: Tensor) -> int:
        """From an array of one expert to that of the next, in values of it."""
        return self.expert_bytes // array.element_size()

    def like(self, count: int, device: torch.device | str, pinned: bool = False) -> "Experts":
        """Room for so many experts of this format and size, not filled. pinned: host memory that copies may read."""
        size = (count, self.expert_bytes)
        return replace(self, store=torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned))


def pack(gate: Tensor, up: Tensor, down: Tensor, format: str) -> Experts:
    """Experts of blocks as stored, on their device.

    gate, up: uint8 [count, width, bytes of a row]; down: uint8 [count, hidden, bytes of a row].
    ValueError as `formats.pack`, for shapes that do not fit each other, and for a width or hidden that is no multiple
    of 8, the rows that lie side by side.
    """
    kind, given = formats.find(format), dict(zip(ROLES, (gate, up, down), strict=True))
    for name, blocks in given.items():
        if blocks.ndim != 3 or 0 in blocks.shape:
            raise ValueError(f"{name} is {tuple(blocks.shape)}; allowed: [count, rows, bytes of a row], none of them 0")
    count, width, hidden = len(gate), gate.shape[1], down.shape[1]
    matrices = {name: formats.pack(blocks.flatten(0, 1), format) for name, blocks in given.items()}
    for name, found in matrices.items():
        rows, columns = (hidden, width) if name == "down" else (width, hidden)
        if (found.rows, found.columns) != (count * rows, columns):
            shape = f"{found.rows} rows of {found.columns} weights"
            raise ValueError(f"{name} has {shape}; allowed: {count} × {rows} rows of {columns}")
    for name, size in (("width", width), ("hidden", hidden)):
        if size % ROWS:
            raise ValueError(f"{name} is {size}; allowed: a multiple of {ROWS}")
    size = _layout(kind, hidden, width)["down"].end
    experts = Experts(kind, hidden, width, torch.zeros((count, size), dtype=torch.uint8, device=gate.device))
    for role, whole in matrices.items():
        for name, array in experts.matrix(role, 0).arrays.items():
            parts = whole.arrays[name].unflatten(0, (count, -1))
            torch.as_strided(array, parts.shape, (experts.stride(array), *array.stride())).copy_(parts)
    return experts


class _Place(NamedTuple):
    """A matrix of an expert without memory; of each of its arrays the first byte in an expert; where the last ends."""

    packed: Packed
    first: dict[str, int]
    end: int


@cache
def _layout(kind: Format, hidden: int, width: int) -> dict[str, _Place]:
    """By role."""
    found, end = {}, 0
    for role in ROLES:
        rows, columns = (hidden, width) if role == "down" else (width, hidden)
        blocks = torch.empty((rows, columns // kind.block * kind.block_bytes), dtype=torch.uint8, device="meta")
        packed, first = formats.pack(blocks, kind.name), {}
        for name, array in packed.arrays.items():
            first[name] = end
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        found[role] = _Place(packed, first, end)
    return found
