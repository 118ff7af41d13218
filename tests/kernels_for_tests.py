"""Small kernels whose compiled code and memory accesses can be worked out by hand. Each function returns a Launch."""

from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from labkit.kernels.launch import Launch


@triton.jit
def _copy_kernel(x, y, n, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i * STRIDE, mask=i < n)
    tl.store(y + i, value, mask=i < n)


def copy(n=4096, block=128, stride=1, dtype="float32", num_warps=1, offset=0):
    """y = x[::stride], x starting `offset` elements after an aligned address."""
    x = torch.zeros(n * stride + offset, dtype=getattr(torch, dtype))[offset:]
    y = torch.zeros(n, dtype=x.dtype)
    args = {"x": x, "y": y, "n": n, "BLOCK": block, "STRIDE": stride}
    return Launch(_copy_kernel, (triton.cdiv(n, block),), args, {"num_warps": num_warps})


def of_a_library():
    """What compiles kernels of its own and gives none of them."""
    return SimpleNamespace(kernel=None, compile=lambda: None)


@triton.jit
def _tile_kernel(state, indices, out, row_stride, ROWS: tl.constexpr, COLS: tl.constexpr, SLOT: tl.constexpr):
    slot = tl.load(indices + tl.program_id(0))
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    tile = tl.load(state + slot * SLOT + rows[:, None] * row_stride + cols[None, :])
    tl.store(out + tl.program_id(0) * COLS + cols, tl.sum(tile.to(tl.float32), 0))


def tile(rows, cols, row_stride, dtype="float32", num_warps=1, slots=(1, 0)):
    """Column sums of a [rows, cols] tile at the head of a slot of a row-major state."""
    slot = rows * row_stride
    tensors = {
        "state": torch.zeros(len(slots) * slot, dtype=getattr(torch, dtype)),
        "indices": torch.tensor(slots, dtype=torch.int32),
        "out": torch.zeros(len(slots), cols),
    }
    constants = {"row_stride": row_stride, "ROWS": rows, "COLS": cols, "SLOT": slot}
    return Launch(_tile_kernel, (len(slots),), tensors | constants, {"num_warps": num_warps})


@triton.jit
def _matmul_kernel(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, BK)
    pa = a + m[:, None] * K + k[None, :]
    pb = b + k[:, None] * N + n[None, :]
    acc = tl.zeros((M, N), tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(pa), tl.load(pb), acc)
        pa += BK
        pb += BK * N
    tl.store(c + m[:, None] * N + n[None, :], acc)


def matmul(M=64, N=64, K=512, BK=64, num_warps=4):
    """c = a b in fp16 with fp32 accumulation, one program."""
    a, b = torch.zeros(M, K, dtype=torch.float16), torch.zeros(K, N, dtype=torch.float16)
    args = {"a": a, "b": b, "c": torch.zeros(M, N), "K": K, "M": M, "N": N, "BK": BK}
    return Launch(_matmul_kernel, (1,), args, {"num_warps": num_warps, "num_stages": 3})


@triton.jit
def _squared_matmul_kernel(a, b, c, squares, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, BK)
    acc = tl.zeros((M, N), tl.float32)
    total = tl.zeros((M,), tl.float32)
    for first in range(0, K, BK):
        left = tl.load(a + m[:, None] * K + first + k[None, :])
        acc += tl.dot(left, tl.load(b + (first + k)[:, None] * N + n[None, :]))
        total += tl.sum(left.to(tl.float32) * left.to(tl.float32), 1)
    tl.store(c + m[:, None] * N + n[None, :], acc)
    tl.store(squares + m, total)


def squared_matmul(M=64, N=64, K=512, BK=64):
    """c = a b and the squares of a's rows summed: Triton loads a's tiles anew while the product still reads them."""
    launch = matmul(M, N, K, BK)
    return Launch(_squared_matmul_kernel, (1,), {**launch.args, "squares": torch.zeros(M)}, launch.options)


@triton.jit
def _patch_kernel(x, y, rows, cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    at = r[:, None] * stride + c[None, :]
    tl.store(y + at, tl.load(x + at, mask=inside), mask=inside)


def patch(rows, cols, stride, tile=(2, 32), num_warps=1):
    """Copies a [rows, cols] part of a row-major fp32 matrix in tiles, on a grid of two axes."""
    args = {"x": torch.zeros(rows, stride), "y": torch.zeros(rows, stride), "rows": rows, "cols": cols}
    grid = (triton.cdiv(rows, tile[0]), triton.cdiv(cols, tile[1]))
    constants = {"stride": stride, "ROWS": tile[0], "COLS": tile[1]}
    return Launch(_patch_kernel, grid, args | constants, {"num_warps": num_warps})


@triton.jit
def _load_twice(pointers):
    return tl.load(pointers) + 1.0


@triton.jit
def _branch_kernel(x, y, flags, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    flag = tl.load(flags + pid)
    if flag < 0:
        tl.store(y + pid * BLOCK + i, tl.zeros((BLOCK,), tl.float32))
        return
    shift = 0
    for step in range(STEPS):
        shift += step + flag
    start = pid * BLOCK
    if flag > 5:  # with a load inside, the compiler keeps it as a branch
        start = shift + tl.load(flags)
    value = _load_twice(x + start + i)
    tl.store(y + pid * BLOCK + i, value)


def branch(flags, block=32, steps=4):
    """A program that returns early, or reads from where a branch and the result of a loop say, in a helper."""
    x, y = torch.zeros(1024), torch.zeros(len(flags), block)
    args = {"x": x, "y": y, "flags": torch.tensor(flags, dtype=torch.int32), "BLOCK": block, "STEPS": steps}
    return Launch(_branch_kernel, (len(flags),), args, {"num_warps": 1})


@triton.jit
def _spill_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    rows = x + i[:, None] * N + i[None, :]
    tile = tl.load(rows)
    tl.debug_barrier()
    other = tl.load(y + i[:, None] + i[None, :] * N)
    tl.store(rows, tile * tl.sum(tile, 0)[None, :] + other * tl.sum(other, 1)[:, None])


def spill(n=128):
    """Two whole tiles in the registers of one warp: more than there are."""
    return Launch(_spill_kernel, (1,), {"x": torch.zeros(n, n), "y": torch.zeros(n, n), "N": n}, {"num_warps": 1})


@triton.jit
def _float_kernel(x, y):
    i = tl.arange(0, 32)
    tl.store(y + tl.exp(tl.load(x + i)).to(tl.int32), i)


def address_from_floats():
    """Stores to where the exponentials of loaded values say: nothing that an address should depend on."""
    return Launch(_float_kernel, (1,), {"x": torch.zeros(32), "y": torch.zeros(32, dtype=torch.int32)})
