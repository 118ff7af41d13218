"""The same decoder as a chain of separate kernels under one CUDA graph: what a user would pick instead of tables.

| call        | what it does                           | hypothesis                                                    |
|-------------|----------------------------------------|---------------------------------------------------------------|
| norm        | residual added, RMSNorm; or embedding  | one program: a microsecond of latency, no bandwidth           |
| projection  | cuBLAS by F.linear, or our GEMV        | all the bytes are here: the better one is the baseline        |
| rotary      | rotary embedding, keys and values kept | small: its launch is its cost                                 |
| attention   | a part of the context a program        | kv heads alone would not fill the GPU; the last program sums  |
| silu        | SiLU(gate) up                          | small: its launch is its cost                                 |
| argmax      | a part of the vocabulary a program     | the last program decides; the position advances on the device |

With dependent launch each kernel starts while the one before it still runs, and waits before it touches what others
write; the projections have then loaded their first weights. Every program of every kernel waits, so that a kernel which
has ended says that all before it have.

Weights, caches and their layout are those of the tables' decode (`kernels.Memory`). The residual is float32, what goes
from kernel to kernel has the weights' dtype, as engines do; the tables' decode keeps all activations in float32, so
that in 16 bits their logits differ by rounding. Logits are rounded too: of equal ones, the first token.

Source of the split over the context: flash decoding (Dao et al., 2023).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from labkit.kernels import target
from labkit.kernels.checks import check_one_of
from labkit.kernels.decoder.model import decoder
from labkit.kernels.decoder.step import INTEGERS, Memory
from labkit.kernels.decoder.tables import Lowering, buffer_shapes, check_position
from labkit.kernels.gemv import gemv
from labkit.kernels.gemv.choose import Choice, rule
from labkit.kernels.launch import Launch
from labkit.kernels.target import multiprocessors
from labkit.studies.persistent_tables import variants
from labkit.studies.persistent_tables.ways import captured, check_following

KERNELS = ("norm", "rotary", "attention", "silu", "argmax")  # names in `Baseline.calls` beside "projection"
BLOCK = 4096  # keys, and values, of the cache at once: two loads of 16 bytes a thread of each; more takes registers
SILU_BLOCK = 512
ARGMAX_BLOCK = 2048
_NONE: tl.constexpr = tl.constexpr(2147483647)  # above every token


@triton.jit
def _norm_kernel(
    source, token, hidden, gain, x, K, VOCAB,
    EPS: tl.constexpr, BLOCK: tl.constexpr, EMBED: tl.constexpr, BATCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a sequence."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    if BATCH > 1:
        sequence = tl.program_id(0)
        token, hidden, x = token + sequence, hidden + sequence * K, x + sequence * K
        if not EMBED:
            source += sequence * K
    ks = tl.arange(0, BLOCK)
    inside = ks < K
    gains = tl.load(gain + ks, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        cuda.gdc_wait()
    if EMBED:
        row = tl.minimum(tl.maximum(tl.load(token), 0), VOCAB - 1).to(tl.int64)
        value = tl.load(source + row * K + ks, mask=inside, other=0.0).to(tl.float32)
    else:
        value = tl.load(source + ks, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(hidden + ks, mask=inside, other=0.0)
    tl.store(hidden + ks, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / K + EPS)
    tl.store(x + ks, (value * scale * gains).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _rotary_kernel(
    qkv, rope, q, keys, values, position_at,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, CACHE: tl.constexpr, BATCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a head and sequence: of the queries, then of the keys, then of the values."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if BATCH > 1:
        sequence = tl.program_id(1)
        cache = sequence.to(tl.int64) * (KV_HEADS * CACHE * D)
        qkv, q = qkv + sequence * ((HEADS + 2 * KV_HEADS) * D), q + sequence * (HEADS * D)
        keys, values = keys + cache, values + cache
    head, ds = tl.program_id(0), tl.arange(0, D // 2)
    position = tl.load(position_at)
    a = tl.load(qkv + head * D + ds).to(tl.float32)
    b = tl.load(qkv + head * D + D // 2 + ds).to(tl.float32)
    if head < HEADS + KV_HEADS:
        cos, sin = tl.load(rope + position * D + ds), tl.load(rope + position * D + D // 2 + ds)
        turned = b * cos + a * sin
        a = a * cos - b * sin
        b = turned
    if head < HEADS:
        tl.store(q + head * D + ds, a)
        tl.store(q + head * D + D // 2 + ds, b)
    else:
        row = (((head - HEADS) % KV_HEADS).to(tl.int64) * CACHE + position) * D + ds
        to = keys if head < HEADS + KV_HEADS else values
        tl.store(to + row, a.to(keys.dtype.element_ty))
        tl.store(to + row + D // 2, b.to(keys.dtype.element_ty))


@triton.jit
def _attend(top, total, weighted, query, k, v, live):
    """A head's largest score, sum of weights and weighted values, with a block of positions added."""
    scores = tl.where(live, tl.sum(query[None, :] * k.to(tl.float32), 1), float("-inf"))
    new = tl.maximum(top, tl.max(scores, 0))
    weights, scale = tl.exp(scores - new), tl.exp(top - new)
    return new, total * scale + tl.sum(weights, 0), weighted * scale + tl.sum(weights[:, None] * v.to(tl.float32), 0)


@triton.jit
def _attention_kernel(
    q, keys, values, out, tops, totals, sums, arrived, position_at,
    GROUP: tl.constexpr, D: tl.constexpr, CACHE: tl.constexpr, BLOCK_T: tl.constexpr, SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a kv head and part of the context; each block of it is read once for all of the head's queries.

    Heads are numbered through all sequences, one sequence's after the other's.
    """
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    kv_head, split = tl.program_id(0), tl.program_id(1)
    ds, ts = tl.arange(0, D), tl.arange(0, BLOCK_T)
    count = tl.load(position_at) + 1
    part = tl.cdiv(tl.cdiv(count, SPLITS), BLOCK_T) * BLOCK_T
    queries, states = (), ()
    for j in tl.static_range(GROUP):
        queries = queries + (tl.load(q + (kv_head * GROUP + j) * D + ds) * (D**-0.5),)
        states = states + ((float("-inf"), 0.0, tl.zeros((D,), tl.float32)),)
    rows = (kv_head.to(tl.int64) * CACHE + ts)[:, None] * D + ds[None, :]
    last = tl.minimum(split * part + part, count)
    for first in range(split * part, last, BLOCK_T):
        live = first + ts < last
        k = tl.load(keys + rows + first * D, mask=live[:, None], other=0.0)
        v = tl.load(values + rows + first * D, mask=live[:, None], other=0.0)
        new = ()
        for j in tl.static_range(GROUP):
            new = new + (_attend(states[j][0], states[j][1], states[j][2], queries[j], k, v, live),)
        states = new
    for j in tl.static_range(GROUP):
        at = (kv_head * GROUP + j) * SPLITS + split
        tl.store(tops + at, states[j][0])
        tl.store(totals + at, states[j][1])
        tl.store(sums + at * D + ds, states[j][2])
    tl.debug_barrier()  # all warps have stored their part before one thread says so
    if tl.atomic_add(arrived + kv_head, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(arrived + kv_head, 0)  # ready for the next call
        for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
            parts = head * SPLITS + tl.arange(0, SPLITS)
            best = tl.load(tops + parts)
            scale = tl.exp(best - tl.max(best, 0))  # 0 where a part had no position
            whole = tl.sum(tl.load(totals + parts) * scale, 0)
            found = tl.sum(tl.load(sums + parts[:, None] * D + ds[None, :]) * scale[:, None], 0) / whole
            tl.store(out + head * D + ds, found.to(out.dtype.element_ty))


@triton.jit
def _silu_kernel(gate_up, x, N, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    pairs = tl.program_id(0) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    both = tl.load(gate_up + pairs, mask=pairs < 2 * N, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + rows, (gate / (1 + tl.exp(-gate)) * up).to(x.dtype.element_ty), mask=rows < N)


@triton.jit
def _argmax_kernel(
    logits, best, best_token, arrived, token, tokens, position_at, N,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, P: tl.constexpr, CACHE: tl.constexpr, BATCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a part of the vocabulary and sequence; the last of all decides for each sequence."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    part, first_part, first_token = tl.program_id(0), best, best_token
    if BATCH > 1:
        sequence = tl.program_id(1)
        logits, best, best_token = logits + sequence * N, best + sequence * PARTS, best_token + sequence * PARTS
    rows = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + rows, mask=rows < N, other=float("-inf")).to(tl.float32)
    top = tl.max(value, 0)
    tl.store(best + part, top)
    tl.store(best_token + part, tl.min(tl.where(value == top, rows, _NONE), 0))
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == PARTS * BATCH - 1:
        tl.store(arrived, 0)
        for i in tl.static_range(BATCH):
            parts = tl.arange(0, P)
            tops = tl.load(first_part + i * PARTS + parts, mask=parts < PARTS, other=float("-inf"))
            found = tl.load(first_token + i * PARTS + parts, mask=parts < PARTS, other=_NONE)
            found = tl.min(tl.where(tops == tl.max(tops, 0), found, _NONE), 0)
            position = tl.load(position_at)
            tl.store(token + i, found)
            tl.store(tokens + i * (CACHE + 1) + position + 1, found)
        tl.store(position_at, position + 1)


Project = Callable[[Tensor, Tensor, Tensor], Callable[[], Any]]  # W, x, y -> a Launch, or a call of a library


class Baseline:
    """The chain of kernels for one memory, with the interface of a `ways.Way`: memory, begin, step.

    memory: of `kernels.allocate`; its tables are of no use here. project: W, x, y -> a call of y = W x.
    dependent: programmatic dependent launch of all other kernels, where the GPU has it (compute capability 9.0).
    splits: parts of the context, block_t: positions at once, powers of two; None: `default_splits` and
    `default_block_t`. graph: replay one CUDA graph instead of launching kernel by kernel. ValueError for what is not
    allowed. `calls`: name and call of every kernel of a token, in order. `logits`: [vocab], of a batch [batch, vocab];
    x and y of a projection likewise.
    """

    def __init__(
        self, memory: Memory, project: Project, dependent: bool = False, splits: int | None = None,
        block_t: int | None = None, graph: bool = True,
    ):  # fmt: skip
        device = memory.counters.device
        block_t = default_block_t(memory.how) if block_t is None else block_t
        splits = default_splits(memory.how, device) if splits is None else splits
        check_baseline(memory, dependent, splits, block_t)
        self.memory, self.project, self.dependent = memory, project, dependent
        self.splits, self.block_t = splits, block_t
        self.sequences = (memory.how.batch,) if memory.how.batch > 1 else ()  # an axis of its own, where there are more
        self._scratch()
        self.calls = self._calls()
        every = [call for _, call in self.calls]
        self.replay = captured(every, device) if graph else lambda: [call() for call in every]
        self.following = 0

    def begin(self, position: int) -> None:
        """Set the position on the device. ValueError for one past the cache."""
        check_position(position, self.memory.how.cache)
        self.memory.position.fill_(position)
        self.following = position

    def step(self, position: int) -> None:
        """Enqueue one token. ValueError, before anything is enqueued, for a position that does not follow."""
        check_following(position, self.following, self.memory.how.cache)
        self.replay()
        self.following = position + 1

    def _scratch(self) -> None:
        """What goes from kernel to kernel; counters of programs that have arrived are zero between launches."""
        how, m, b = self.memory.how, self.memory.how.model, self.memory.buffers
        device, dtype = b["embedding"].device, b["embedding"].dtype
        widths = (m.hidden, m.hidden, m.qkv_width, m.q_width, 2 * m.ffn, m.ffn, m.vocab)
        self.x, self.y, self.qkv, self.attended, self.gate_up, self.ffn, self.logits = (
            torch.full((*self.sequences, width), float("nan"), dtype=dtype, device=device) for width in widths
        )
        sizes = (how.batch * n for n in (m.hidden, m.q_width, self._parts()))
        self.hidden, self.q, self.best = (torch.empty(n, device=device) for n in sizes)
        self.tops, self.totals = (torch.empty((how.heads, self.splits), device=device) for _ in range(2))
        self.sums = torch.empty((how.heads, self.splits, m.head_dim), device=device)
        self.best_token = torch.empty(len(self.best), dtype=torch.int32, device=device)
        kv_heads = how.batch * m.kv_heads
        self.arrived = torch.zeros(kv_heads + 1, dtype=torch.int32, device=device)  # the last one is argmax's

    def _parts(self) -> int:
        """Programs of argmax for a sequence."""
        return triton.cdiv(self.memory.how.model.vocab, ARGMAX_BLOCK)

    def _calls(self) -> list[tuple[str, Callable[[], Any]]]:
        m, b = self.memory.how.model, self.memory.buffers
        found: list[tuple[str, Callable[[], Any]]] = []
        for i in range(m.layers):
            w = {name: b[f"{name}.{i}"] for name in ("qkv_weight", "output_weight", "gate_up_weight", "down_weight")}
            found += [
                ("norm", self._norm(b[f"gain_1.{i}"], None if i else b["embedding"])),
                ("projection", self.project(w["qkv_weight"], self.x, self.qkv)),
                ("rotary", self._rotary(b[f"k_cache.{i}"], b[f"v_cache.{i}"])),
                ("attention", self._attention(b[f"k_cache.{i}"], b[f"v_cache.{i}"])),
                ("projection", self.project(w["output_weight"], self.attended, self.y)),
                ("norm", self._norm(b[f"gain_2.{i}"])),
                ("projection", self.project(w["gate_up_weight"], self.x, self.gate_up)),
                ("silu", self._silu()),
                ("projection", self.project(w["down_weight"], self.ffn, self.y)),
            ]
        head = self.project(b["head"], self.x, self.logits)
        return [*found, ("norm", self._norm(b["final_gain"])), ("projection", head), ("argmax", self._argmax())]

    def _launch(self, kernel: Any, grid: tuple[int, ...], warps: int, **args: Any) -> Launch:
        options = {"num_warps": warps} | ({"launch_pdl": True} if self.dependent else {})
        return Launch(kernel, grid, args | {"DEPENDENT": self.dependent}, options)

    def _norm(self, gain: Tensor, embedding: Tensor | None = None) -> Launch:
        """The sum of the residual and y, or the token's embedding, to the residual; normed, to x."""
        m, batch = self.memory.how.model, self.memory.how.batch
        source = self.y if embedding is None else embedding
        tensors = {"token": self.memory.buffers["token"], "hidden": self.hidden, "gain": gain, "x": self.x}
        sizes = {"K": m.hidden, "VOCAB": m.vocab, "EPS": m.eps, "BLOCK": triton.next_power_of_2(m.hidden)}
        sizes |= {"EMBED": embedding is not None, "BATCH": batch}
        return self._launch(_norm_kernel, (batch,), 8, source=source, **tensors, **sizes)

    def _rotary(self, keys: Tensor, values: Tensor) -> Launch:
        m, memory = self.memory.how.model, self.memory
        tensors = {"qkv": self.qkv, "rope": memory.buffers["rope"], "q": self.q, "keys": keys, "values": values}
        sizes = {"HEADS": m.heads, "KV_HEADS": m.kv_heads, "D": m.head_dim, "CACHE": memory.how.cache}
        sizes["BATCH"] = memory.how.batch
        grid = (m.heads + 2 * m.kv_heads, *self.sequences)
        return self._launch(_rotary_kernel, grid, 1, position_at=memory.position, **tensors, **sizes)

    def _attention(self, keys: Tensor, values: Tensor) -> Launch:
        m, memory = self.memory.how.model, self.memory
        tensors = {"q": self.q, "keys": keys, "values": values, "out": self.attended, "position_at": memory.position}
        tensors |= {"tops": self.tops, "totals": self.totals, "sums": self.sums, "arrived": self.arrived}
        sizes = {"GROUP": m.group, "D": m.head_dim, "CACHE": memory.how.cache}
        sizes |= {"BLOCK_T": self.block_t, "SPLITS": self.splits}
        grid = (memory.how.batch * m.kv_heads, self.splits)
        return self._launch(_attention_kernel, grid, 8, **tensors, **sizes)

    def _silu(self) -> Launch:
        n = self.memory.how.batch * self.memory.how.model.ffn
        grid = (triton.cdiv(n, SILU_BLOCK),)
        return self._launch(_silu_kernel, grid, 4, gate_up=self.gate_up, x=self.ffn, N=n, BLOCK=SILU_BLOCK)

    def _argmax(self) -> Launch:
        b, parts, how = self.memory.buffers, self._parts(), self.memory.how
        tensors = {"logits": self.logits, "best": self.best, "best_token": self.best_token, "token": b["token"]}
        tensors |= {"tokens": b["tokens"], "position_at": self.memory.position, "arrived": self.arrived[-1:]}
        sizes = {"N": how.model.vocab, "BLOCK": ARGMAX_BLOCK, "PARTS": parts, "P": triton.next_power_of_2(parts)}
        sizes |= {"CACHE": how.cache, "BATCH": how.batch}
        return self._launch(_argmax_kernel, (parts, *self.sequences), 4, **tensors, **sizes)


def default_block_t(how: Lowering) -> int:
    """Positions at once: `BLOCK` keys, no more than the cache has; a power of two."""
    return 1 << (min(BLOCK // how.model.head_dim, how.cache).bit_length() - 1)


def default_splits(how: Lowering, device: torch.device) -> int:
    """Parts of the context: a power of two, a program for each multiprocessor, no more than the cache has blocks."""
    each = multiprocessors(device) // (how.batch * how.model.kv_heads)
    most = min(each, -(-how.cache // default_block_t(how)))
    return 1 << max(0, most.bit_length() - 1)


def check_baseline(memory: Memory, dependent: bool, splits: int, block_t: int) -> None:
    """Raise ValueError for what the kernels cannot take."""
    powers = {"head_dim": memory.how.model.head_dim, "splits": splits, "block_t": block_t}
    for name, value in powers.items():
        if value < 1 or value & (value - 1):
            raise ValueError(f"{name} is {value}; allowed: a power of two")
    if dependent and not target.has_dependent_launch(memory.counters.device):
        raise ValueError("dependent is True; allowed: False, or a GPU of compute capability 9.0 or later")


def launches(
    model: str, dependent: bool = False, choices: Mapping[str, Mapping[str, int]] = {}, batch: int = 1
) -> list[Launch]:
    """Every kernel of a token in bf16, on memory that is never touched. For `labkit.evidence.compiled`.

    model: of `model.MODELS`. choices: the GEMV's, by "N x K"; of others its rule's. batch: sequences; of more than one
    without the projections, which are the library's. Dependent inside `compiled.offline` only.
    """
    how = Lowering(decoder(model), 1, cache=variants.CACHE, batch=batch)
    dtypes = {2: torch.bfloat16, 4: torch.float32}
    buffers = {
        name: torch.empty((rows, columns), dtype=torch.int32 if name in INTEGERS else dtypes[size])
        for name, (rows, columns, size) in buffer_shapes(how).items()
    }

    def project(W: Tensor, x: Tensor, y: Tensor) -> Any:
        if batch > 1:
            return None
        choice = choices.get("{} x {}".format(*W.shape))
        return gemv.gemv(W, x, y, Choice(**choice) if choice else rule(*W.shape, W.itemsize), dependent=dependent)

    found = Baseline(Memory(how, buffers), project, dependent, graph=False).calls
    return [call for _, call in found if call is not None]


def compilable(model: str, kernel: str, dependent: bool = False) -> Launch:
    """The first of `launches` of a kernel. kernel: one of `KERNELS`, else ValueError."""
    check_one_of("kernel", kernel, KERNELS)
    return next(one for one in launches(model, dependent) if one.kernel.__name__ == f"_{kernel}_kernel")
