"""What an expert layer takes, where it works, and its launches."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from labkit.kernels.checks import check_tensor
from labkit.kernels.experts import blocks, routing
from labkit.kernels.experts.choose import Choice
from labkit.kernels.experts.int4 import GROUP, Int4
from labkit.kernels.launch import Launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class LayerInputs:
    """Everything that one expert layer reads and writes.

    x:       [T, H], bf16, fp16 or fp32.
    ids:     [T, top_k], int32 or int64; a slot whose id is not one of 0 to E - 1 adds nothing.
    weights: [T, top_k], bf16, fp16 or fp32.
    w1, w2:  [E, 2 I, H], gate before up, and [E, H, I], of x's dtype; or both INT4, H and I multiples of 128.
    out:     [T, H], bf16, fp16 or fp32.
    All contiguous, on one device, weights aligned to 16 bytes.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    w1: Tensor | Int4
    w2: Tensor | Int4
    out: Tensor

    @property
    def int4(self) -> bool:
        """Whether the weights are INT4."""
        return isinstance(self.w1, Int4)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """T, E, top_k, H, I."""
        w2 = self.w2.packed if isinstance(self.w2, Int4) else self.w2
        return len(self.x), len(w2), self.ids.shape[1], self.x.shape[1], w2.shape[2] * (2 if self.int4 else 1)


@dataclass(frozen=True)
class Workspace:
    """Scratch for layers of one shape with up to `tokens` tokens, one layer at a time: allocated once.

    hidden: rows between the GEMMs; parts: a row for every slot; integers: routing's tables. All one-dimensional.
    """

    tokens: int
    hidden: Tensor
    parts: Tensor
    integers: Tensor


def workspace(x: LayerInputs, tokens: int | None = None) -> Workspace:
    """Scratch for layers like x, of any configuration, with up to `tokens` tokens (None: x's own).

    Rows in between: tokens · top_k and, at worst, 128 for every expert.
    """
    tokens = len(x.x) if tokens is None else tokens
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}; allowed: at least 1")
    like = {"dtype": x.x.dtype, "device": x.x.device}
    rows, parts, integers = sizes(x, tokens)
    return Workspace(
        tokens,
        torch.zeros(rows, **like),  # GEMM2 reads rows of padding; what it makes of them is not stored
        torch.empty(parts, **like),
        torch.empty(integers, dtype=torch.int32, device=x.x.device),
    )


def sizes(x: LayerInputs, tokens: int | None = None) -> tuple[int, int, int]:
    """Values of hidden and of parts, and integers, that a workspace for layers like x has, for any configuration."""
    T, E, top_k, H, width = x.shape
    tokens = T if tokens is None else tokens
    rows = max(m * blocks.source_blocks(tokens, top_k, E, m) for m in blocks.BLOCKS_M)
    integers = max(
        routing.room(slots, E, m, blocks.source_blocks(slots, 1, E, m))
        for m in blocks.BLOCKS_M
        for slots in routing.steps(tokens * top_k)
    )
    return rows * 2 * width, tokens * top_k * H, integers


@dataclass(frozen=True)
class Layer:
    """The launches of one expert layer by name, in order; calling it makes them all. May be captured in a CUDA graph.

    `launches["gemm1"]()` repeats that kernel alone, on what the launches before it have left.
    """

    config: Choice
    sorted: routing.Routing
    launches: Mapping[str, Launch]

    def __call__(self) -> None:
        for launch in self.launches.values():
            launch()


def _part(name: str, memory: Tensor, size: int, x: LayerInputs) -> Tensor:
    """So much of the scratch, which may have been made for a layer of another shape."""
    if len(memory) < size or memory.dtype != x.x.dtype or memory.device != x.x.device:
        found = f"{len(memory)} values of {memory.dtype} on {memory.device}"
        raise ValueError(f"scratch.{name} is {found}; allowed: at least {size} of {x.x.dtype} on {x.x.device}")
    return memory[:size]


def check_several(x: LayerInputs) -> None:
    """Raise ValueError for one token, whose slots are not sorted."""
    if len(x.x) == 1:
        raise ValueError("x has 1 token; allowed: at least 2 (`expert_layer.layer` takes one)")


def check_int4(x: LayerInputs) -> None:
    """Raise ValueError for weights that are not INT4."""
    if not x.int4:
        raise ValueError("the weights are not INT4; allowed: INT4")


def check_layer(x: LayerInputs) -> None:
    """Raise ValueError for shapes, dtypes, strides, alignment or devices that the kernels cannot take."""
    if x.x.ndim != 2 or 0 in x.x.shape:
        raise ValueError(f"x is {tuple(x.x.shape)}; allowed: [T, H], both at least 1")
    T, H = x.x.shape
    if x.ids.ndim != 2 or x.ids.shape[0] != T or x.ids.shape[1] < 1:
        raise ValueError(f"ids is {tuple(x.ids.shape)}; allowed: [{T}, top_k]")
    if isinstance(x.w1, Int4) != isinstance(x.w2, Int4):
        raise ValueError("w1 and w2 are INT4 and not; allowed: both or none")
    check = partial(check_tensor, device=x.x.device, owner="x's")
    check("x", x.x, (T, H), DTYPES)
    check("ids", x.ids, tuple(x.ids.shape), (torch.int32, torch.int64))
    check("weights", x.weights, tuple(x.ids.shape), DTYPES)
    check("out", x.out, (T, H), DTYPES)
    w2 = x.w2.packed if isinstance(x.w2, Int4) else x.w2
    if w2.ndim != 3 or 0 in w2.shape:
        raise ValueError(f"w2 is {tuple(w2.shape)}; allowed: [E, H, I], or [E, H, I // 2] packed")
    _, E, _, _, width = x.shape
    for name, w, rows, columns in (("w1", x.w1, 2 * width, H), ("w2", x.w2, H, width)):
        if rows * columns >= 2**31:
            raise ValueError(f"{name} has {rows} x {columns} values an expert; allowed: below 2^31")
        values, shape, dtype = w, (E, rows, columns), x.x.dtype
        if isinstance(w, Int4):
            if columns % GROUP:
                raise ValueError(f"{name} has rows of {columns} INT4 values; allowed: a multiple of {GROUP}")
            check(f"{name}.scales", w.scales, (E, rows, columns // GROUP), (torch.bfloat16,))
            name, values, shape, dtype = f"{name}.packed", w.packed, (E, rows, columns // 2), torch.uint8
        check(name, values, shape, (dtype,))
        if over := values.data_ptr() % 16:
            raise ValueError(f"{name} begins {over} bytes after a multiple of 16; allowed: a multiple of 16")
