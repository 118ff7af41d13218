"""Products with so many tokens that a program has a tile of them: y[n] = W x[n] by the widest matrix instructions.

| weights                   | hypothesis                                                                              |
|---------------------------|-----------------------------------------------------------------------------------------|
| `Packed`                  | unpacked in registers, once for up to 256 tokens; one matrix product a tile of K        |
| a matrix of bf16, as it   | nothing to unpack: tiles go from memory to shared memory to the matrix instructions     |
| is stored                 | without registers in between, several on their way; bound by bytes, later by arithmetic |

The choices (`choose.WideChoice`) and theirs:

| choice         | hypothesis                                                                                          |
|----------------|-----------------------------------------------------------------------------------------------------|
| blocks, groups | the tile of weights: 8 rows a block, 32 columns a group; small tiles: several CTAs on an SM hide    |
|                | each other's begin and end, large ones: fewer bytes of shared memory an operation                   |
| tokens         | tokens a program: the weights are read again for every tile of them, from the L2 at best            |
| num_stages     | tiles on their way: bytes in flight for shared memory                                               |
| whole          | so many rows, the first ones, have one sum over all of K: as many tiles as fill whole waves of SMs  |
| parts          | of K, for the other rows: programs share what would keep a few SMs busy for a wave of its own       |
| split_tokens   | tokens a program of those rows: sums of few parts and small tiles are soon added                    |
| dependent      | the launch starts while the one before ends (from Hopper on)                                        |

Bits of a token depend on whole, parts and the tile's columns, not on the other tokens or on their number: tiles of
tokens are padded, and a matrix instruction sums each token's column alike. Parts are sums in fp32 in memory; the last
program of a tile, which a counter tells, adds them in their order and resets the counter.

Tiles of tokens of the same rows follow each other, so that they find the weights in the L2. Split rows come last: they
fill in where whole ones have ended.

With 512 tokens and a matrix, on Hopper, `continued.by_continued_sums` is faster, where what was tried is told.

Matrices come through descriptors (the copy engine, TMA) where the GPU has it and addresses are multiples of 16 bytes,
else by pointers; the bits are the same.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from labkit.kernels.checks import check_contiguous, check_one_of
from labkit.kernels.dependent import wait_for_inputs
from labkit.kernels.gguf.choose import WideChoice, check_wide, wide_rule
from labkit.kernels.gguf.formats import GROUP, ROWS, Packed
from labkit.kernels.gguf.products import _arrays, check_product, check_tokens
from labkit.kernels.gguf.unpack import MAGIC, _block, _load, _read, _rounded, _scales
from labkit.kernels.launch import Launch
from labkit.kernels.target import COPY_ENGINE, capability_of, has_dependent_launch, multiprocessors


@triton.jit
def _whole(tile, magic, BLOCKS: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """All weights of a tile, of `kernels._read`, in DTYPE, [rows, columns]; those of a group stay in their thread."""
    steps = _scales(tile, FORMAT)
    first = tl.join(_rounded(tile, steps, magic, 0, FORMAT, DTYPE), _rounded(tile, steps, magic, 1, FORMAT, DTYPE))
    second = tl.join(_rounded(tile, steps, magic, 2, FORMAT, DTYPE), _rounded(tile, steps, magic, 3, FORMAT, DTYPE))
    third = tl.join(_rounded(tile, steps, magic, 4, FORMAT, DTYPE), _rounded(tile, steps, magic, 5, FORMAT, DTYPE))
    fourth = tl.join(_rounded(tile, steps, magic, 6, FORMAT, DTYPE), _rounded(tile, steps, magic, 7, FORMAT, DTYPE))
    parts = tl.join(tl.join(first, second), tl.join(third, fourth))  # of part i: bit 0, bit 1, bit 2 of i
    parts = tl.reshape(parts, (BLOCKS, TILE, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 2, 1, 6, 5, 4, 3)), (BLOCKS * 8, TILE * 32))


@triton.jit
def _packed_part(
    x, words, high, scales, d, first_row, first_token, begin, end, N, rows, x_stride, magic,
    K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr,
    PLANES: tl.constexpr,
):  # fmt: skip
    """The sums [ROWS, TOKENS] over tiles of K from begin to end, of packed weights."""
    BLOCKS: tl.constexpr = ROWS // 8
    TILE: tl.constexpr = COLUMNS // 32
    GROUPS: tl.constexpr = K // 32
    MASKED: tl.constexpr = GROUPS % TILE != 0
    first_block = first_row // 8
    units = tl.arange(0, BLOCKS * TILE * 8)
    # beyond the last block: it again, but it is not stored
    blocks = tl.minimum(first_block + units // (TILE * 8), (rows - 1) // 8) - first_block
    W = _block(words, high, scales, d, first_block, GROUPS, FORMAT, PLANES)
    tokens = tl.minimum(first_token + tl.arange(0, TOKENS), N - 1)
    x_rows = x + tokens.to(tl.int64)[None, :] * x_stride
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for t in range(begin, end):
        groups = t * TILE + units // 8 % TILE
        above = blocks * (GROUPS // 8) + groups // 8
        tile = _read(W, blocks * GROUPS + groups, above, units % 8, groups < GROUPS, MASKED, FORMAT, PLANES)
        weights = _whole(tile, magic, BLOCKS, TILE, FORMAT, x.dtype.element_ty)
        ks = t * COLUMNS + tl.arange(0, COLUMNS)
        values = _load(x_rows + ks[:, None], (ks < K)[:, None], MASKED, "")
        sums = tl.dot(weights, values, sums, input_precision="ieee")
    return sums


@triton.jit
def _stored_tile(
    pointer, first, last, stride, k, K: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr, BOXES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """A tile [COUNT, COLUMNS] of a matrix; zeros beyond K, and beyond `last` anything."""
    if BOXES:
        return pointer.load([first, k])
    else:
        row = tl.minimum(first + tl.arange(0, COUNT), last).to(tl.int64)
        ks = k + tl.arange(0, COLUMNS)
        return _load(pointer + row[:, None] * stride + ks[None, :], (ks < K)[None, :], MASKED, "")


@triton.jit
def _stored_part(
    x, w, first_row, first_token, begin, end, N, rows, x_stride,
    K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    """The sums [ROWS, TOKENS] over tiles of K from begin to end, of a matrix of weights."""
    MASKED: tl.constexpr = K % COLUMNS != 0
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for t in range(begin, end):
        weights = _stored_tile(w, first_row, rows - 1, K, t * COLUMNS, K, ROWS, COLUMNS, BOXES, MASKED)
        values = _stored_tile(x, first_token, N - 1, x_stride, t * COLUMNS, K, TOKENS, COLUMNS, BOXES, MASKED)
        sums = tl.dot(weights.to(values.dtype), tl.trans(values), sums, input_precision="ieee")
    return sums


@triton.jit
def _part(
    x, W, first_row, first_token, begin, end, N, rows, x_stride, magic,
    K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr,
    PLANES: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    words, high, scales, d = W
    if FORMAT == "stored":
        return _stored_part(
            x, words, first_row, first_token, begin, end, N, rows, x_stride, K, ROWS, TOKENS, COLUMNS, BOXES
        )
    else:
        return _packed_part(
            x, words, high, scales, d, first_row, first_token, begin, end, N, rows, x_stride, magic, K, ROWS, TOKENS,
            COLUMNS, FORMAT, PLANES,
        )  # fmt: skip


@triton.jit
def _store(sums, y, first_row, first_token, N, rows, y_stride, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    row = first_row + tl.arange(0, ROWS)
    token = first_token + tl.arange(0, TOKENS)
    y_at = y + token.to(tl.int64)[None, :] * y_stride + row[:, None]
    tl.store(y_at, sums.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (token < N)[None, :])


@triton.jit
def _store_parts(
    sums, y, partial, arrived, tile, part, first_row, first_token, N, rows, y_stride,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The sums of one part to memory; by the last program of a tile, those of all parts, in order, to y."""
    inside = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    at = partial + tile.to(tl.int64) * (PARTS * ROWS * TOKENS) + inside
    tl.store(at + part * (ROWS * TOKENS), sums)
    tl.debug_barrier()  # all warps have stored their part before one thread says so
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1:
        tl.store(arrived + tile, 0)  # ready for the next call
        total = tl.zeros((ROWS, TOKENS), tl.float32)
        for p in range(PARTS):  # always in this order, whichever program came last
            total += tl.load(at + p * (ROWS * TOKENS), cache_modifier=".cg")
        _store(total, y, first_row, first_token, N, rows, y_stride, ROWS, TOKENS)


@triton.jit
def _wide_kernel(
    x, x_split, y, words, high, scales, d, partial, arrived, N, rows, whole, x_stride, y_stride, magic,
    K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, SPLIT: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr, BOXES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: a tile of ROWS rows and TOKENS tokens; beyond `whole` tiles of rows, a part and SPLIT_TOKENS.

    SPLIT: which rows are split: "none", "some" or "all".
    """
    TILES: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    EACH: tl.constexpr = (TILES + PARTS - 1) // PARTS
    W = (words, high, scales, d)
    program = tl.program_id(0)
    tiles = tl.cdiv(N, TOKENS)
    wait_for_inputs(DEPENDENT)
    if SPLIT == "none" or (SPLIT == "some" and program < whole * tiles):
        row, token = program // tiles * ROWS, program % tiles * TOKENS
        sums = _part(
            x, W, row, token, 0, TILES, N, rows, x_stride, magic, K, ROWS, TOKENS, COLUMNS, FORMAT, PLANES, BOXES
        )
        _store(sums, y, row, token, N, rows, y_stride, ROWS, TOKENS)
    else:
        small = tl.cdiv(N, SPLIT_TOKENS)
        split = (tl.cdiv(rows, ROWS) - whole) * small
        part, tile = (program - whole * tiles) // split, (program - whole * tiles) % split
        row, token = (whole + tile // small) * ROWS, tile % small * SPLIT_TOKENS
        begin = part * EACH
        part_sums = _part(
            x_split, W, row, token, begin, tl.minimum(begin + EACH, TILES), N, rows, x_stride, magic, K, ROWS,
            SPLIT_TOKENS, COLUMNS, FORMAT, PLANES, BOXES,
        )  # fmt: skip
        _store_parts(
            part_sums, y, partial, arrived, tile, part, row, token, N, rows, y_stride, ROWS, SPLIT_TOKENS, PARTS
        )


def wide(W: Packed | Tensor, x: Tensor, y: Tensor, choice: WideChoice | None = None) -> Launch:
    """y[n] = W x[n] by matrix instructions in tiles of many rows and tokens, tokens padded to a whole tile.

    W: `Packed`, or a contiguous matrix of bf16 [rows, K], as `formats.matrix` gives it. x: [N, K] and y: [N, rows],
    bf16, fp16 or fp32 each, values of a token adjacent, on W's device. Weights are rounded to x's dtype, as in
    `kernels.tensor_core`; with x in fp32, products are IEEE fp32 and so not on tensor cores. choice: by default that of
    `choose.wide_rule`. A launch with split rows must not run twice at once. ValueError for anything else.
    """
    stored = isinstance(W, Tensor)
    if stored:
        check_matrix(W)
        rows, K, name = *W.shape, "BF16"
        check_tokens(x, y, rows, K, W.device)
    else:
        check_product(W, x, y)
        rows, K, name = W.rows, W.columns, W.format.name
    choice = choice or _rule(x, rows, K, name, stored)
    check_wide(choice)
    arguments = _sources(W, x, choice) if stored else {"x": x, "x_split": x, "BOXES": False} | _arrays(W)
    arguments |= {"FORMAT": "stored" if stored else name, "PLANES": 0 if stored else W.words.shape[2]}
    arguments |= {"N": len(x), "rows": rows, "x_stride": x.stride(0), "y_stride": y.stride(0), "magic": MAGIC, "K": K}
    arguments |= {"ROWS": ROWS * choice.blocks, "COLUMNS": GROUP * choice.groups}
    arguments |= {"TOKENS": choice.tokens, "SPLIT_TOKENS": choice.split_tokens}
    return _launch(arguments | {"y": y}, choice)


def _rule(x: Tensor, rows: int, K: int, name: str, stored: bool) -> WideChoice:
    """The rule's choice; values of 4 bytes, which do not go to tensor cores, take smaller tiles."""
    choice = wide_rule(len(x), rows, K, name, stored, multiprocessors(x.device))
    if x.dtype != torch.float32:
        return choice
    return replace(
        choice, tokens=min(64, choice.tokens), split_tokens=min(64, choice.split_tokens),
        num_stages=min(3, choice.num_stages),
    )  # fmt: skip


def _launch(arguments: dict[str, Any], choice: WideChoice) -> Launch:
    """The launch, with memory for the parts where rows are split."""
    N, rows, y = arguments["N"], arguments["ROWS"], arguments["y"]
    all_rows = triton.cdiv(arguments["rows"], rows)
    whole = min(all_rows, choice.whole // rows) if choice.parts > 1 else all_rows
    tiles = (all_rows - whole) * triton.cdiv(N, choice.split_tokens)
    grid = (whole * triton.cdiv(N, choice.tokens) + tiles * choice.parts,)
    size = tiles * choice.parts * rows * choice.split_tokens
    arguments["partial"] = torch.empty(size, dtype=torch.float32, device=y.device) if tiles else y
    arguments["arrived"] = torch.zeros(tiles, dtype=torch.int32, device=y.device) if tiles else y
    split = "none" if not tiles else "some" if whole else "all"
    dependent = choice.dependent and has_dependent_launch(y.device)
    arguments |= {"whole": whole, "PARTS": choice.parts, "SPLIT": split, "DEPENDENT": dependent}
    options = {"num_warps": choice.num_warps, "num_stages": choice.num_stages}
    return Launch(_wide_kernel, grid, arguments, options | ({"launch_pdl": True} if dependent else {}))


def _sources(W: Tensor, x: Tensor, choice: WideChoice) -> dict[str, Any]:
    """Where a matrix and x are read from: descriptors with the tiles as boxes, or tensors."""
    others = dict.fromkeys(("high", "scales", "d"), W)
    if not (has_descriptors(W.device) and all(map(_is_aligned, (W, x)))):
        return {"x": x, "x_split": x, "words": W, "BOXES": False} | others
    boxes = {
        "x": _boxes(x, choice.tokens, choice),
        "x_split": _boxes(x, choice.split_tokens, choice),
        "words": _boxes(W, ROWS * choice.blocks, choice),
    }
    return boxes | others | {"BOXES": True}


def _boxes(matrix: Tensor, rows: int, choice: WideChoice) -> TensorDescriptor:
    """A descriptor of a matrix, of which so many rows and a tile's columns are copied at a time."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, GROUP * choice.groups])


def _is_aligned(matrix: Tensor) -> bool:
    """Whether a descriptor can be of it: rows, one after the other, that begin at multiples of 16 bytes."""
    rows = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and rows % 16 == 0 and matrix.stride(0) >= matrix.shape[1]


def has_descriptors(device: torch.device) -> bool:
    """Whether tiles can be copied by descriptors: on this device, or `offline`'s target; in the interpreter, too."""
    found = capability_of(device)
    return found is None or found >= COPY_ENGINE


def check_matrix(W: Tensor) -> None:
    """Raise ValueError for a matrix that `wide` cannot take."""
    check_one_of("W", W.dtype, (torch.bfloat16,))
    if W.ndim != 2 or not W.numel():
        raise ValueError(f"W is {tuple(W.shape)}; allowed: [rows, K], both at least 1")
    check_contiguous("W", W)
