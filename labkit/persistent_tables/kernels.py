"""A decoder step as one persistent Triton kernel that reads what to do from tables: a small virtual machine.

Every program runs its queue of records, one after the other: load the record, wait for its counter, work, signal. All
programs must be resident at once, since a waiting one spins; the caller bounds them by occupancy. A spin is bounded
too: a program that gives up writes the record's number + 1 to `error`, then waits no more, so that a table that can
never finish ends.

Projections load their first tiles of the weight before the wait, and those of the next rows before the sum of the
current ones, since weights depend on nothing. RMSNorm is part of the projection after it: the sum of squares is
gathered in the same pass, and the norm is one factor of the result. Activations are float32, sums too.

Memory order: one thread waits with an acquire or all do, then a barrier; all threads store, then a barrier and one
release. Bits do not depend on how a stage is split, or on which program runs what.
"""

# ruff: noqa: RUF005 (Triton's tuples grow by +; it does not know (*a, b))

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.checks import check_one_of
from labkit.launch import Launch
from labkit.persistent_tables import tables as t
from labkit.persistent_tables.model import Decoder, Weights, decoder, head_of, inverse_frequencies, layer_of
from labkit.persistent_tables.tables import Lowering, Tables, buffer_shapes, check_position, lower

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
POSITION_FROM = ("record", "launch", "device")
INTEGERS = ("token", "tokens", "best_token")
RESULTS = (*INTEGERS, "hidden", "qkv", "attention", "ffn", "logits", "best")

_WORDS: tl.constexpr = tl.constexpr(len(t.WORDS))
_WEIGHT, _INPUT, _OUT, _GAIN = (tl.constexpr(word) for word in (t.WEIGHT, t.INPUT, t.OUT, t.GAIN))
_FIRST, _SECOND, _K, _START = (tl.constexpr(word) for word in (t.FIRST, t.SECOND, t.K, t.START))
_STOP, _SLOT, _POSITION, _WAIT = (tl.constexpr(word) for word in (t.STOP, t.SLOT, t.POSITION, t.WAIT))
_TARGET, _SIGNAL = tl.constexpr(t.TARGET), tl.constexpr(t.SIGNAL)
_OUTPUT, _GATE_UP, _DOWN, _HEAD = (tl.constexpr(op) for op in (t.OUTPUT, t.GATE_UP, t.DOWN, t.HEAD))
_EMBED, _ROTARY, _ATTENTION = (tl.constexpr(op) for op in (t.EMBED, t.ROTARY, t.ATTENTION))


@triton.jit
def _buffer(buffers, record, WORD: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer to the buffer that a word of the record names; to the first buffer if it names none."""
    number = tl.maximum(tl.load(record + WORD), 0)
    return tl.multiple_of(tl.load(buffers + number * 4).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _count(counter, POLL_LOAD: tl.constexpr):
    """A counter's value, with acquire semantics: by a load of every thread, or of one thread that tells the others.

    The latter is written as an atomic that adds nothing, which Triton compiles to a load.
    """
    if POLL_LOAD:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter], dtype=tl.int32, is_pure=False, pack=1
        )
    return tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def _wait(record, number, counters, error, limit, POLL_LOAD: tl.constexpr):
    """Wait until the record's counter has reached its target; returns the spins that are left to later waits."""
    counter = counters + tl.maximum(tl.load(record + _WAIT), 0)
    target = tl.load(record + _TARGET)  # -1 where there is nothing to wait for
    seen = _count(counter, POLL_LOAD)
    spins = 0
    while (seen < target) & (spins < limit):
        seen = _count(counter, POLL_LOAD)
        spins += 1
    if seen < target:  # threads that poll by themselves may differ here: the barrier below joins them again
        tl.store(error, number + 1)
    tl.debug_barrier()
    return tl.where(seen < target, 0, limit)


@triton.jit
def _tile(W, rows, ks, K, live, EVEN_K: tl.constexpr):
    """[ROWS, BLOCK_K] of W; not loaded where live is false."""
    pointers = W + rows.to(tl.int64)[:, None] * K + ks[None, :]
    mask = live & (rows >= 0)[:, None] & (ks >= 0)[None, :]  # the comparisons are true: they give the mask its shape
    if not EVEN_K:
        mask = mask & (ks < K)[None, :]
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _add_products(
    sums, squares, tile, x, gain, normed, ks, K,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The sums of products, and of the squares of x, with one tile's added.

    sums: [ROWS, BLOCK_K / V], squares: [BLOCK_K / V]: V neighbours lie in one thread, which keeps one sum of them.
    """
    inside = (ks < K) | EVEN_K
    x_tile = tl.load(x + ks, mask=inside, other=0.0)
    gain_tile = tl.load(gain + ks, mask=inside & normed, other=1.0).to(tl.float32)
    products = tile.to(tl.float32) * (x_tile * gain_tile)[None, :]
    sums += tl.sum(tl.reshape(products, (ROWS, BLOCK_K // V, V)), 2)
    squares += tl.sum(tl.reshape(x_tile * x_tile, (BLOCK_K // V, V)), 1)
    return sums, squares


@triton.jit
def _project(
    record, number, op, buffers, counters, error, limit,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, EVEN_K: tl.constexpr,
    DIVISOR: tl.constexpr, EPS: tl.constexpr, POLL_LOAD: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Rows of a matrix times x, then what the op does with them."""
    W = _buffer(buffers, record, _WEIGHT, DTYPE)
    x = _buffer(buffers, record, _INPUT, tl.float32)
    y = _buffer(buffers, record, _OUT, tl.float32)
    gain = _buffer(buffers, record, _GAIN, DTYPE)
    normed = tl.load(record + _GAIN) >= 0
    K = tl.load(record + _K) // DIVISOR * DIVISOR  # changes nothing, but tells how rows are aligned
    start, stop = tl.load(record + _START), tl.load(record + _STOP)
    ks, some = tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    read = tl.minimum(start + some, stop - 1)  # beyond the last row: it again, but it is not stored
    ahead = ()
    for i in tl.static_range(AHEAD):
        ahead = ahead + (_tile(W, read, i * BLOCK_K + ks, K, True, EVEN_K),)
    limit = _wait(record, number, counters, error, limit, POLL_LOAD)

    best, best_row = float("-inf"), 0
    for row in range(start, stop, ROWS):
        sums, squares = tl.zeros((ROWS, BLOCK_K // V), tl.float32), tl.zeros((BLOCK_K // V,), tl.float32)
        for i in tl.static_range(AHEAD):
            sums, squares = _add_products(
                sums, squares, ahead[i], x, gain, normed, i * BLOCK_K + ks, K, ROWS, BLOCK_K, EVEN_K, V
            )
        for k in range(AHEAD * BLOCK_K, K, BLOCK_K):
            tile = _tile(W, read, k + ks, K, True, EVEN_K)
            sums, squares = _add_products(sums, squares, tile, x, gain, normed, k + ks, K, ROWS, BLOCK_K, EVEN_K, V)
        rows = row + some
        read = tl.minimum(rows + ROWS, stop - 1)
        ahead = ()
        for i in tl.static_range(AHEAD):
            ahead = ahead + (_tile(W, read, i * BLOCK_K + ks, K, row + ROWS < stop, EVEN_K),)

        total = tl.sum(sums, 1) * tl.where(normed, tl.rsqrt(tl.sum(squares, 0) / K + EPS), 1.0)
        if op == _GATE_UP:
            gate, up = tl.split(tl.reshape(total, (ROWS // 2, 2)))
            pair = row // 2 + tl.arange(0, ROWS // 2)
            tl.store(y + pair, gate / (1 + tl.exp(-gate)) * up, mask=pair < stop // 2)
        else:
            residual = (op == _OUTPUT) | (op == _DOWN)
            total += tl.load(y + rows, mask=(rows < stop) & residual, other=0.0)
            tl.store(y + rows, total, mask=rows < stop)
        if op == _HEAD:
            total = tl.where(rows < stop, total, float("-inf"))
            top = tl.max(total, 0)
            best_row = tl.where(top > best, row + tl.argmax(total, 0), best_row)
            best = tl.maximum(top, best)
    if op == _HEAD:
        slot = tl.load(record + _SLOT)
        tl.store(_buffer(buffers, record, _FIRST, tl.float32) + slot, best)
        tl.store(_buffer(buffers, record, _SECOND, tl.int32) + slot, best_row)
    return limit


@triton.jit
def _embed(record, buffers, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr, VOCAB: tl.constexpr):
    """hidden = the token's row of the embedding."""
    K = tl.load(record + _K)
    token = tl.load(_buffer(buffers, record, _INPUT, tl.int32))
    token = tl.minimum(tl.maximum(token, 0), VOCAB - 1)  # after a failure it may be anything
    W = _buffer(buffers, record, _WEIGHT, DTYPE) + token.to(tl.int64) * K
    y = _buffer(buffers, record, _OUT, tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        tl.store(y + ks, tl.load(W + ks, mask=ks < K).to(tl.float32), mask=ks < K)


@triton.jit
def _rotary(
    record, buffers, position, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Turn the queries of one kv head in place, and its key into the cache; append its value."""
    head = tl.load(record + _START)
    HALF: tl.constexpr = HEAD_DIM // 2
    ds = tl.arange(0, HALF)
    rope = _buffer(buffers, record, _WEIGHT, tl.float32) + position * HEAD_DIM + ds
    cos, sin = tl.load(rope), tl.load(rope + HALF)
    qkv = _buffer(buffers, record, _OUT, tl.float32) + ds
    row = (head.to(tl.int64) * CACHE + position) * HEAD_DIM + ds
    for j in tl.static_range(GROUP):
        q = qkv + (head * GROUP + j) * HEAD_DIM
        a, b = tl.load(q), tl.load(q + HALF)
        tl.store(q, a * cos - b * sin)
        tl.store(q + HALF, b * cos + a * sin)
    k = qkv + (KV_HEADS * GROUP + head) * HEAD_DIM
    a, b = tl.load(k), tl.load(k + HALF)
    keys = _buffer(buffers, record, _FIRST, DTYPE) + row
    tl.store(keys, (a * cos - b * sin).to(DTYPE))
    tl.store(keys + HALF, (b * cos + a * sin).to(DTYPE))
    v = k + KV_HEADS * HEAD_DIM
    values = _buffer(buffers, record, _SECOND, DTYPE) + row
    tl.store(values, tl.load(v).to(DTYPE))
    tl.store(values + HALF, tl.load(v + HALF).to(DTYPE))


@triton.jit
def _attend(top, total, sums, q, keys, values, live):
    """The running maximum, sum of weights and weighted values of one query head, with a block of positions added."""
    scores = tl.where(live, tl.sum(keys * q[None, :], 1), float("-inf"))
    new = tl.maximum(top, tl.max(scores, 0))
    weights, scale = tl.exp(scores - new), tl.exp(top - new)
    return new, total * scale + tl.sum(weights, 0), sums * scale + tl.sum(weights[:, None] * values, 0)


@triton.jit
def _attention(
    record, buffers, position, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, CACHE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """All query heads of one kv head over the cache, 0 to position; each block of it is read once for all of them."""
    head = tl.load(record + _START)
    ds, ts = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_T)
    base = (head.to(tl.int64) * CACHE + ts)[:, None] * HEAD_DIM + ds[None, :]
    keys, values = _buffer(buffers, record, _FIRST, DTYPE) + base, _buffer(buffers, record, _SECOND, DTYPE) + base
    x = _buffer(buffers, record, _INPUT, tl.float32) + head * GROUP * HEAD_DIM + ds
    q, top, total, sums = (), (), (), ()
    for j in tl.static_range(GROUP):
        q = q + (tl.load(x + j * HEAD_DIM) * (HEAD_DIM**-0.5),)
        top, total, sums = top + (float("-inf"),), total + (0.0,), sums + (tl.zeros((HEAD_DIM,), tl.float32),)
    for first in range(0, position + 1, BLOCK_T):
        live = first + ts <= position
        k = tl.load(keys + first * HEAD_DIM, mask=live[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + first * HEAD_DIM, mask=live[:, None], other=0.0).to(tl.float32)
        tops, totals, new = (), (), ()
        for j in tl.static_range(GROUP):
            one = _attend(top[j], total[j], sums[j], q[j], k, v, live)
            tops, totals, new = tops + (one[0],), totals + (one[1],), new + (one[2],)
        top, total, sums = tops, totals, new
    y = _buffer(buffers, record, _OUT, tl.float32) + head * GROUP * HEAD_DIM + ds
    for j in tl.static_range(GROUP):
        tl.store(y + j * HEAD_DIM, sums[j] / total[j])


@triton.jit
def _argmax(record, buffers, counters, count, position, BLOCK_K: tl.constexpr):
    """The token with the largest logit, of equals the first, as the next input; all counters back to zero."""
    parts = tl.load(record + _K)
    best = _buffer(buffers, record, _INPUT, tl.float32)
    best_token = _buffer(buffers, record, _WEIGHT, tl.int32)
    top, token = float("-inf"), 0
    for first in range(0, parts, BLOCK_K):
        ks = first + tl.arange(0, BLOCK_K)
        values = tl.load(best + ks, mask=ks < parts, other=float("-inf"))
        tokens = tl.load(best_token + ks, mask=ks < parts, other=0)
        here = tl.max(values, 0)
        found = tl.min(tl.where(values == here, tokens, 2147483647), 0)
        token = tl.where(here > top, found, token)
        top = tl.maximum(here, top)
    tl.store(_buffer(buffers, record, _OUT, tl.int32), token)
    tl.store(_buffer(buffers, record, _FIRST, tl.int32) + position + 1, token)
    for first in range(0, count, BLOCK_K):  # nobody waits any more: this record has waited for all others
        ks = first + tl.arange(0, BLOCK_K)
        tl.store(counters + ks, tl.zeros((BLOCK_K,), tl.int32), mask=ks < count)


@triton.jit(do_not_specialize=["position", "limit"])
def _step_kernel(
    records, queue, buffers, counters, error, position, position_at, count, limit,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, AHEAD: tl.constexpr,
    EVEN_K: tl.constexpr, DIVISOR: tl.constexpr, EPS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, CACHE: tl.constexpr, VOCAB: tl.constexpr, POSITION_FROM: tl.constexpr,
    POLL_LOAD: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One program: its queue, from the first record to the last."""
    program = tl.program_id(0)
    if POSITION_FROM == "device":
        position = tl.load(position_at)
    for number in range(tl.load(queue + program), tl.load(queue + program + 1)):
        record = records + number * _WORDS
        op = tl.load(record)
        signal = tl.load(record + _SIGNAL)
        at = position
        if POSITION_FROM == "record":
            at = tl.load(record + _POSITION)
        if op <= _HEAD:
            limit = _project(
                record, number, op, buffers, counters, error, limit,
                DTYPE, ROWS, BLOCK_K, AHEAD, EVEN_K, DIVISOR, EPS, POLL_LOAD, V,
            )  # fmt: skip
        else:
            limit = _wait(record, number, counters, error, limit, POLL_LOAD)
            if op == _EMBED:
                _embed(record, buffers, DTYPE, BLOCK_K, VOCAB)
            elif op == _ROTARY:
                _rotary(record, buffers, at, DTYPE, HEAD_DIM, GROUP, KV_HEADS, CACHE)
            elif op == _ATTENTION:
                _attention(record, buffers, at, DTYPE, HEAD_DIM, GROUP, CACHE, BLOCK_T)
            else:
                _argmax(record, buffers, counters, count, at, BLOCK_K)
                if POSITION_FROM == "device":
                    tl.store(position_at, at + 1)
        tl.debug_barrier()  # all warps have stored before one thread says so
        if signal >= 0:
            tl.atomic_add(counters + signal, 1, sem="release")


@dataclass(frozen=True)
class Choice:
    """How the kernel runs. block_k: values of a tile's row; ahead: tiles loaded before the wait; block_t: positions of
    the cache at once; poll_load: every thread waits by itself instead of one for all (not in the interpreter)."""

    block_k: int = 1024
    ahead: int = 1
    block_t: int = 16
    num_warps: int = 4
    poll_load: bool = False


@dataclass
class Memory:
    """All that a decoder step reads and writes, on one device.

    buffers: by the names of `buffer_shapes`, in its order. counters: int32, zeros. error: int32 [1], the number + 1 of
    a record that gave up waiting, or 0. position: int32 [1], for launches that have it from the device.
    """

    how: Lowering
    buffers: dict[str, Tensor]
    counters: Tensor = field(init=False)
    error: Tensor = field(init=False)
    position: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.buffers["token"].device
        layers, kv_heads = self.how.model.layers, self.how.model.kv_heads
        self.counters = torch.zeros(2 + layers * (5 + kv_heads), dtype=torch.int32, device=device)
        self.error, self.position = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))

    def addresses(self) -> np.ndarray:
        """Where each buffer is, in the order of the table; int64."""
        return np.array([tensor.data_ptr() for tensor in self.buffers.values()], np.int64)

    def extents(self) -> list[tuple[int, int]]:
        """(address, bytes) of each buffer, as `validate` takes them."""
        return [(tensor.data_ptr(), tensor.nbytes) for tensor in self.buffers.values()]

    def check(self) -> None:
        """Wait for the device; RuntimeError if a record gave up waiting, and everything is ready for another launch."""
        if number := int(self.error):
            self.error.zero_()
            self.counters.zero_()
            raise RuntimeError(f"record {number - 1} waited too long: its counter did not reach its target")


def allocate(how: Lowering, weights: Weights, device: str | torch.device = "cpu") -> Memory:
    """The buffers of a lowering, weights packed (q, k and v one matrix; gate and up interleaved by rows), caches zero.

    weights: as `model.load_weights` returns them, all of one dtype: bf16, fp16 or fp32, of how.itemsize bytes; stays
    on its device if that is `device`. Results are poisoned with NaN. ValueError for a dtype that does not fit.
    """
    dtypes = {w.dtype for w in weights.values()}
    dtype = dtypes.pop()
    if dtypes or dtype not in DTYPES or dtype.itemsize != how.itemsize:
        raise ValueError(f"weights are {dtype}; allowed: one of {', '.join(map(str, DTYPES))} of {how.itemsize} bytes")
    ready = {"embedding": weights["model.embed_tokens.weight"], "final_gain": weights["model.norm.weight"]}
    ready |= {"head": head_of(how.model, weights), "rope": _rope(how)}
    for i in range(how.model.layers):
        ready |= {f"{name}.{i}": tensor for name, tensor in _packed(how.model, layer_of(how.model, weights, i)).items()}
    found = {}
    for name, (rows, columns, _) in buffer_shapes(how).items():
        if name in ready:
            found[name] = _aligned(ready[name].to(device))
        elif "cache" in name:
            found[name] = torch.zeros((rows, columns), dtype=dtype, device=device)
        else:
            found[name] = _poisoned(name, (rows, columns), device)
    return Memory(how, found)


def fresh(memory: Memory, how: Lowering) -> Memory:
    """Memory of another decode with the same weights: what is written is its own, caches zero, results poisoned.

    how: of the same model, dtype and cache.
    """
    found = {}
    for name, (rows, columns, _) in buffer_shapes(how).items():
        old = memory.buffers[name]
        if "cache" in name:
            found[name] = torch.zeros_like(old)
        else:
            found[name] = _poisoned(name, (rows, columns), old.device) if name in RESULTS else old
    return Memory(how, found)


def _poisoned(name: str, shape: tuple[int, int], device: str | torch.device) -> Tensor:
    kind, value = (torch.int32, -1) if name in INTEGERS else (torch.float32, float("nan"))
    return torch.full(shape, value, dtype=kind, device=device)


def _packed(model: Decoder, layer: Weights) -> Weights:
    gate, up = layer["mlp.gate_proj"], layer["mlp.up_proj"]
    return {
        "gain_1": layer["input_layernorm"],
        "qkv_weight": torch.cat([layer[f"self_attn.{name}_proj"] for name in "qkv"]),
        "output_weight": layer["self_attn.o_proj"],
        "gain_2": layer["post_attention_layernorm"],
        "gate_up_weight": torch.stack([gate, up], 1).view(2 * model.ffn, model.hidden),
        "down_weight": layer["mlp.down_proj"],
    }


def _rope(how: Lowering) -> Tensor:
    angle = torch.arange(how.cache)[:, None] * inverse_frequencies(how.model)
    return torch.cat([angle.cos(), angle.sin()], 1).float()


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, at a multiple of 16 bytes: what comes from a file may lie anywhere."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


@dataclass(frozen=True)
class Uploaded:
    """The tables as tensors on the device of the kernel."""

    buffers: Tensor
    records: Tensor
    queue: Tensor


def upload(tables: Tables, device: str | torch.device = "cpu") -> Uploaded:
    """The three tables, each by a copy of its own from pageable memory."""
    arrays = (tables.buffers, tables.records, tables.queue)
    return Uploaded(*(torch.from_numpy(array.copy()).to(device) for array in arrays))


def step(
    memory: Memory,
    tables: Uploaded,
    position: int | None = None,
    position_from: str = "launch",
    choice: Choice = Choice(),
    limit: int = 1 << 24,
) -> Launch:
    """One decoder step: the token in `token` at a position, its successor to `token` and to `tokens[position + 1]`.

    memory: of the same lowering as the tables, which `validate` should have passed: the kernel checks nothing.
    position: for position_from "launch"; "record" takes the tables', "device" memory.position, which the step advances.
    limit: polls of a wait before it gives up. All programs must be resident. ValueError for a position past the cache,
    an unknown position_from, a head_dim that is no power of two, or a choice that is not allowed.
    """
    how, model = memory.how, memory.how.model
    check_step(how, position, position_from, choice)
    dtype, ks = memory.buffers["embedding"].dtype, [k for _, k in how.projections().values()]
    most = 16 // how.itemsize
    tensors = {"records": tables.records, "queue": tables.queue, "buffers": tables.buffers}
    tensors |= {"counters": memory.counters, "error": memory.error, "position_at": memory.position}
    sizes = {"position": position or 0, "count": len(memory.counters), "limit": limit}
    constants = {
        "DTYPE": DTYPES[dtype],
        "ROWS": how.rows,
        "BLOCK_K": choice.block_k,
        "BLOCK_T": choice.block_t,
        "AHEAD": choice.ahead,
        "EVEN_K": all(k % choice.block_k == 0 and k >= choice.block_k * choice.ahead for k in ks),
        "DIVISOR": next(d for d in (most, most // 2, 2, 1) if d and all(k % d == 0 for k in ks)),
        "EPS": model.eps,
        "HEAD_DIM": model.head_dim,
        "GROUP": model.group,
        "KV_HEADS": model.kv_heads,
        "CACHE": how.cache,
        "VOCAB": model.vocab,
        "POSITION_FROM": position_from,
        "POLL_LOAD": choice.poll_load,
        "V": min(most, choice.block_k),
    }
    return Launch(_step_kernel, (how.programs,), tensors | sizes | constants, {"num_warps": choice.num_warps})


def compilable(
    model: str, programs: int = 132, rows: int = 4, cache: int = 2048, position_from: str = "launch",
    dtype: str = "bfloat16", **choice: int,
) -> Launch:  # fmt: skip
    """A step of one of `model.MODELS` that can be compiled but not run: its buffers hold one value each.

    dtype: of the weights, a name in torch; choice: fields of `Choice`. For `labkit.evidence.compiled`.
    """
    kind = getattr(torch, dtype)
    how = Lowering(decoder(model), programs, cache=cache, rows=rows, itemsize=kind.itemsize)
    buffers = {name: torch.empty(1, dtype=kind) for name in buffer_shapes(how)}
    position = 0 if position_from == "launch" else None
    return step(Memory(how, buffers), upload(lower(how)), position, position_from, Choice(**choice))


def check_step(how: Lowering, position: int | None, position_from: str, choice: Choice) -> None:
    """Raise ValueError for what the kernel cannot take."""
    check_one_of("position_from", position_from, POSITION_FROM)
    if (position is None) == (position_from == "launch"):
        raise ValueError(f"position is {position} with position_from {position_from!r}; allowed: one for 'launch' only")
    if position is not None:
        check_position(position, how.cache)
    powers = {"head_dim": how.model.head_dim, "block_k": choice.block_k, "block_t": choice.block_t}
    for name, value in powers.items():
        if value < 1 or value & (value - 1):
            raise ValueError(f"{name} is {value}; allowed: a power of two")
    if choice.ahead < 0:
        raise ValueError(f"ahead is {choice.ahead}; allowed: at least 0")


def generate(
    memory: Memory, launch_at: Callable[[int], Launch], prompt: Sequence[int], count: int, start: int = 0
) -> list[int]:
    """Greedy generation: the prompt token by token from position `start`, then `count` tokens after it.

    launch_at: the launch for a position; a way that keeps its tables changes or copies them there. RuntimeError if a
    record gave up waiting.
    """
    token, found = memory.buffers["token"], []
    for i in range(len(prompt) + count - 1):
        if i < len(prompt):
            token.fill_(prompt[i])
        launch_at(start + i)()
        if i >= len(prompt) - 1:
            found.append(token.clone())  # stays on the device: nothing waits for it here
    memory.check()
    return [int(one) for one in found]
