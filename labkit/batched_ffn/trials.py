"""The study's variants made ready for timing: buffers, launches, checks.

Weights of a shape and format are the same tensors for all variants and numbers of tokens. Libraries are imported only
in the function that times them.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache as once
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from labkit import isolated, paths
from labkit.batched_ffn import cache, experts, formats, names, reference, slots
from labkit.batched_ffn.experts import Experts
from labkit.batched_ffn.formats import Packed
from labkit.bench.spec import Case, Trial

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # of activations
# Relative RMSE against float64 with the dequantised weights. One product: rounding of y, and in matrix instructions of
# the weights, to bf16 (2^-9 each at most); whole layers round once more in between.
TOLERANCE = {"bf16": 6e-3, "fp32": 1e-5}
GEMLITE_TOLERANCE = 3e-2  # parts of K are added in bf16, as many as its tuning likes
SAME_BITS = 0.0
CHECKED = 8  # tokens that are compared with the reference, and three that are computed again alone
TRACE_TOKENS = 256  # of a trace at least, which then begins again: so many that a cache cannot know it by heart
LEAST_STEPS = 32
TUNED = "gemlite.json"

Call = Callable[[], Any]

# Buffers that the variants of a case share

_shared: dict[Any, Any] = {}  # of one group of cases at a time


def _once(group: Any, name: Any, make: Callable[[], Any]) -> Any:
    """What `make` gives, kept until another group asks."""
    if any(other[0] != group for other in _shared):
        _shared.clear()
    if (group, name) not in _shared:
        _shared[group, name] = make()
    return _shared[group, name]


def _normal(shape: Sequence[int], scale: float, device: Any, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, device=device).normal_(0, scale, generator=generator)


def _tokens(N: int, columns: int, x: Case, device: Any, seed: int) -> Tensor:
    """[N, columns]; of another N, other tokens."""
    return _normal((N, columns), 1.0, device, seed + 7).to(DTYPES[x["activations"]])


def _blocks(rows: int, columns: int, format: str, device: Any, seed: int) -> Tensor:
    """Normal weights as blocks as stored, so that a product of normal values has unit variance."""
    return formats.quantise(_normal((rows, columns), columns**-0.5, device, seed), format)


def _picks(N: int) -> list[int]:
    """The tokens that are checked: the first and the last."""
    return sorted({*range(min(N, CHECKED // 2)), *range(max(0, N - CHECKED // 2), N)})


def relative_rmse(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖, float64."""
    return float((found.double() - expected).norm() / expected.norm())


def differing(found: Tensor, expected: Tensor) -> float:
    """Share of values whose bits are not the same."""
    kind = torch.int32 if found.element_size() == 4 else torch.int16
    return float((found.view(kind) != expected.view(kind)).double().mean())


def launches(call: Call, device: torch.device) -> int | None:
    """Operations of a call on the GPU's stream, as the profiler sees them; None without a GPU."""
    if device.type != "cuda":
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in seen.events())


def multiprocessors(device: torch.device) -> int:
    """How many a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launched(call: Call, device: torch.device) -> dict[str, int]:
    """A row's facts of a call's launches; none without a GPU."""
    count = launches(call, device)
    return {} if count is None else {"launches": count, "sms": multiprocessors(device)}


def _in_order(calls: Any) -> Call:
    """One call of several, in order; of one, itself, so that a `Launch` stays one."""
    if not isinstance(calls, list):
        return calls
    return lambda: [call() for call in calls] and None


def _trial(
    calls: Sequence[Call], x: Tensor, y: Sequence[Tensor], expected: Callable[[list[int]], Tensor], tolerance: float,
    alone: Callable[[Tensor, Tensor], Call] | None, ours: bool,
) -> Trial:  # fmt: skip
    """A trial of y[n] = f(x[n]) for tokens n.

    y: of each buffer set, [N, ·]; expected: of some tokens, float64. alone: the same function on other tokens, of set
    0: a token has the same bits whatever else is in the batch; of libraries that is recorded, not asked for.
    """

    def same() -> float:
        calls[0]()
        worst = 0.0
        for n in sorted({0, len(x) // 2, len(x) - 1}):
            one = y[0].new_full((1, y[0].shape[1]), math.nan)
            assert alone
            alone(x[n : n + 1], one)()
            worst = max(worst, differing(one, y[0][n : n + 1]))
        return worst

    def check() -> dict[str, float]:
        calls[0]()
        picks = _picks(len(x))
        errors = {"y": relative_rmse(y[0][picks], expected(picks))}
        return errors | ({"alone": same()} if ours and alone else {})

    def facts() -> dict[str, Any]:
        found = {} if alone is None else {"alone": same()}
        return found | _launched(calls[0], x.device)

    def poison() -> None:
        for one in y:
            one.fill_(math.nan)

    launch = calls[0] if hasattr(calls[0], "kernel") else None
    return Trial(
        calls, poison, lambda: not any(bool(one.isnan().any()) for one in y), check,
        {"y": tolerance, "alone": SAME_BITS}, launch, facts=facts,
    )  # fmt: skip


# One product


def _matrices(x: Case, device: Any, sets: int, seed: int) -> list[tuple[Tensor, Packed]]:
    """Blocks as stored and packed, of each buffer set."""

    def make() -> list[tuple[Tensor, Packed]]:
        raw = [_blocks(x["rows"], x["K"], x["format"], device, seed + i) for i in range(sets)]
        return [(one, formats.pack(one, x["format"])) for one in raw]

    return _once((x.op, x["rows"], x["K"], x["format"]), (str(device), sets, seed), make)


def _dense(x: Case, device: Any, sets: int, seed: int) -> list[Tensor]:
    """The same weights dequantised, in the dtype of the activations."""
    matrices = _matrices(x, device, sets, seed)
    make = lambda: [formats.dequantise(raw, x["format"]).to(DTYPES[x["activations"]]) for raw, _ in matrices]  # noqa: E731
    group = (x.op, x["rows"], x["K"], x["format"])
    return _once(group, ("dense", x["activations"], str(device), sets, seed), make)


Multiply = Callable[..., Any]  # W, x [N, K], y [N, rows], perhaps up -> a Launch or several


def multiply(variant: str) -> Multiply:
    """A variant of `kernels`, each with its rule's choice: (W, x, y, up)."""
    from labkit.batched_ffn import kernels, wide

    if variant == names.WIDE:
        return lambda W, x, y, up=None: wide.wide(W, x, y)
    made = {
        names.PER_TOKEN: kernels.per_token,
        names.GEMM_N: kernels.gemm_n,
        names.STATIONARY: kernels.weight_stationary,
        names.MATRIX: kernels.tensor_core,
    }[variant]
    return lambda W, x, y, up=None: made(W, x, y, None, up)


def as_stored(variant: str, format: str) -> bool:
    """Whether a variant reads weights of a format as they are stored: a matrix of bf16, not packed."""
    return variant == names.WIDE and format == "BF16"


def _taken(variant: str, raw: Tensor, packed: Packed) -> Packed | Tensor:
    """What a variant reads, of a matrix as stored and packed."""
    return formats.matrix(raw, "BF16") if as_stored(variant, packed.format.name) else packed


def product(x: Case, device: Any, sets: int, seed: int, variant: str) -> Trial:
    """One of the lab's products."""
    call, matrices = multiply(variant), _matrices(x, device, sets, seed)
    W = [_taken(variant, raw, packed) for raw, packed in matrices]
    make = lambda i, values, out: _in_order(call(W[i], values, out))  # noqa: E731
    return _product(x, device, sets, seed, make, ours=True)


def integers(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Products of the integers of a K format, from words in the order that these have."""
    from labkit.batched_ffn import integers as kernels

    matrices = _matrices(x, device, sets, seed)
    group = (x.op, x["rows"], x["K"], x["format"])
    make = lambda: [kernels.tiled(packed) for _, packed in matrices]  # noqa: E731
    W = _once(group, ("tiled", str(device), sets, seed), make)
    return _product(x, device, sets, seed, lambda i, v, out: kernels.integers(W[i], v, out), ours=True)


def _product(
    x: Case, device: Any, sets: int, seed: int, make: Callable[[int, Tensor, Tensor], Call], ours: bool = False,
    dtype: torch.dtype | None = None,
) -> Trial:  # fmt: skip
    """make: a call of a buffer set, by its number. dtype: of y, that of the activations by default."""
    values = _tokens(x["N"], x["K"], x, device, seed)
    y = [values.new_empty((x["N"], x["rows"]), dtype=dtype) for _ in range(sets)]
    raw = _matrices(x, device, sets, seed)[0][0]
    group = (x.op, x["rows"], x["K"], x["format"])

    def expected(picks: list[int]) -> Tensor:
        make = lambda: reference.product(formats.dequantise(raw, x["format"]), values[picks])  # noqa: E731
        return _once(group, ("expected", x["N"], x["activations"], str(device), sets, seed), make)

    calls = [make(i, values, out) for i, out in enumerate(y)]
    trial = _trial(calls, values, y, expected, TOLERANCE[x["activations"]], lambda v, out: make(0, v, out), ours)
    trial.dissect = names.DISSECTED.items() <= dict(x.params).items()
    return trial


def cublas(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """F.linear on weights that were dequantised before."""
    dense = _dense(x, device, sets, seed)
    return _product(x, device, sets, seed, lambda i, values, out: _linear(dense[i], values, out))


def _linear(W: Tensor, x: Tensor, y: Tensor) -> Call:
    return lambda: torch.ops.aten.linear.out(x, W, None, out=y)


def dequantised(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Weights dequantised in every call, then F.linear."""
    from labkit.batched_ffn import beside

    packed = [W for _, W in _matrices(x, device, sets, seed)]
    space = torch.empty((x["rows"], x["K"]), dtype=DTYPES[x["activations"]], device=device)
    make = lambda i, values, out: _in_order([beside.dequantise(packed[i], space), _linear(space, values, out)])  # noqa: E731
    return _product(x, device, sets, seed, make)


def stored(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Q8_0 as it is stored, one token; and in how many values its bits are not those of the packed weights."""
    from labkit.batched_ffn import beside

    matrices = _matrices(x, device, sets, seed)
    trial = _product(x, device, sets, seed, lambda i, v, out: beside.stored(matrices[i][0], v, out))
    values = _tokens(1, x["K"], x, device, seed)
    found, packed = (torch.full((1, x["rows"]), math.nan, device=device) for _ in range(2))

    def check() -> dict[str, float]:
        beside.stored(matrices[0][0], values, found)()
        for launch in multiply(names.PER_TOKEN)(matrices[0][1], values, packed):
            launch()
        return dict(trial.check() if trial.check else {}) | {"packed": differing(found, packed)}

    return replace(trial, check=check, tolerance=dict(trial.tolerance) | {"packed": SAME_BITS})


def split_k(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The control: sums by atomics, in fp32, whose bits are not asked for, but recorded."""
    from labkit.batched_ffn import beside

    packed = [W for _, W in _matrices(x, device, sets, seed)]
    make = lambda i, values, out: _in_order(beside.split_k(packed[i], values, out))  # noqa: E731
    return _product(x, device, sets, seed, make, dtype=torch.float32)


def gemlite(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """gemlite's product of as many bits, in groups of 32, on weights of its own, with its longest tuning."""
    import gemlite as library

    _tune(library)
    N, generator = x["N"], torch.Generator(device).manual_seed(seed)
    made = [_gemlite_layer(x, device, generator) for _ in range(sets)]
    values = _tokens(N, x["K"], x, device, seed)
    calls = [lambda layer=layer: layer(values) for layer, _ in made]  # it returns y: a copy would be held against it
    calls[0]()
    library.cache_config(str(paths.RUNS / TUNED))
    picks = _picks(N)
    expected = values[picks].double() @ made[0][1]().T

    def check() -> dict[str, float]:
        return {"y": relative_rmse(calls[0]()[picks], expected)}

    def facts() -> dict[str, Any]:
        whole, layer = calls[0](), made[0][0]
        alone = max(differing(layer(values[n : n + 1]), whole[n : n + 1]) for n in sorted({0, N // 2, N - 1}))
        return {"alone": alone} | _launched(calls[0], values.device)

    return Trial(calls, check=check, tolerance={"y": GEMLITE_TOLERANCE}, facts=facts)


def _gemlite_layer(x: Case, device: Any, generator: torch.Generator) -> tuple[Any, Callable[[], Tensor]]:
    """Its layer of random weights, and these in float64."""
    from gemlite.helper import A16W4_HQQ_INT, A16W8_HQQ_INT

    bits, shape, dtype = names.GEMLITE_BITS[x["format"]], (x["rows"], x["K"]), DTYPES[x["activations"]]
    q = torch.randint(0, 2**bits, shape, generator=generator, device=device, dtype=torch.uint8)
    scale = torch.tensor(x["K"] ** -0.5 * math.sqrt(12) / 2**bits, dtype=dtype, device=device)
    scales = scale.expand(x["rows"], x["K"] // 32).contiguous()
    zeros = torch.full_like(scales, 2 ** (bits - 1))
    helper = A16W4_HQQ_INT if bits == 4 else A16W8_HQQ_INT
    layer = helper(device=str(device), dtype=dtype).from_weights(q, scales, zeros)
    return layer, lambda: (q.double() - 2 ** (bits - 1)) * scale.double()


@once
def _tune(library: Any) -> None:
    """Its longest tuning, which the first process makes and the others take over.

    What it tries takes a minute to compile for a number of tokens: first, all of them at once in other processes.
    """
    library.set_autotune("max")
    paths.RUNS.mkdir(parents=True, exist_ok=True)
    if (paths.RUNS / TUNED).exists():
        library.load_config(str(paths.RUNS / TUNED))
        return
    wanted = [(format, N) for format in names.GEMLITE_BITS for N in names.GEMLITE_TOKENS]
    calls = [isolated.Call(f"{__name__}:tune_apart", [format, N]) for format, N in wanted]
    isolated.call_many(calls, min(len(calls), os.cpu_count() or 1))


def tune_apart(format: str, N: int) -> None:
    """In a process of its own: have gemlite tune for N tokens, for what that leaves in Triton's cache alone."""
    import gemlite as library

    library.set_autotune("max")
    hidden, width = names.DENSE[names.MAIN]
    x = Case("product", {"rows": width, "K": hidden, "format": format, "activations": "bf16", "N": N})
    layer, _ = _gemlite_layer(x, "cuda", torch.Generator("cuda").manual_seed(0))
    layer(_tokens(N, hidden, x, "cuda", 0))


def added(x: Case, device: Any, sets: int, seed: int, function: Callable[..., Any]) -> Trial:
    """A function of the reader's own, function(blocks, x, y), on copies that it may spoil."""
    raw = [one.clone() for one, _ in _matrices(x, device, sets, seed)]

    def make(i: int, values: Tensor, out: Tensor) -> Call:
        own = values.clone()
        return lambda: function(raw[i], own, out)

    return _product(x, device, sets, seed, make)


def read(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """As many bytes as the weights of a case have, as stored, read and summed."""
    from labkit.batched_ffn import beside
    from labkit.batched_ffn.study import weight_bytes

    size = weight_bytes(x) // 4
    # so small that no sum of a block overflows
    words = torch.randint(0, 2**17, (sets, size), dtype=torch.int32, device=device)
    sums = torch.zeros((sets, -(-size // beside.READ_BLOCK)), dtype=torch.int32, device=device)
    calls = [beside.read(part, out) for part, out in zip(words, sums, strict=True)]

    def check() -> dict[str, float]:
        calls[0]()
        return {"sum": float(abs(int(sums[0].long().sum()) - int(words[0].long().sum())))}

    return Trial(calls, check=check, tolerance={"sum": 0.0}, launch=calls[0], dissect=False, moves=4 * size)


# A whole dense layer


def _layers(x: Case, device: Any, sets: int, seed: int) -> list[list[tuple[Tensor, Packed]]]:
    """gate, up and down of each buffer set."""
    hidden, width = x["hidden"], x["width"]

    def make() -> list[list[tuple[Tensor, Packed]]]:
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        raw = [
            [_blocks(*shape, x["format"], device, seed + 3 * i + j) for j, shape in enumerate(shapes)]
            for i in range(sets)
        ]
        return [[(one, formats.pack(one, x["format"])) for one in layer] for layer in raw]

    return _once((x.op, x["hidden"], x["width"], x["format"]), (str(device), sets, seed), make)


def ffn(x: Case, device: Any, sets: int, seed: int, variant: str) -> Trial:
    """A layer of the lab's products."""
    layers = [[_taken(variant, *matrix) for matrix in layer] for layer in _layers(x, device, sets, seed)]
    layer = _wide_layer if variant == names.WIDE else _layer
    return _ffn(x, device, sets, seed, lambda i, v, out: _in_order(layer(layers[i], v, out, variant)), ours=True)


def _layer(layer: Sequence[Packed], x: Tensor, y: Tensor, variant: str) -> list[Call]:
    """Two launches; per token, two a token."""
    gate, up, down = layer
    middle = x.new_empty((len(x), gate.rows))
    made = [multiply(variant)(gate, x, middle, up), multiply(variant)(down, middle, y)]
    return [one for some in made for one in (some if isinstance(some, list) else [some])]


def _wide_layer(layer: Sequence[Packed | Tensor], x: Tensor, y: Tensor, variant: str) -> list[Call]:
    """Gate and up apart, since the sums of one take all registers."""
    gate, up, down = layer
    width = gate.rows if isinstance(gate, Packed) else len(gate)
    first, other, middle = (x.new_empty((len(x), width)) for _ in range(3))
    call = multiply(variant)
    return [call(gate, x, first), call(up, x, other), lambda: _silu_up(first, other, middle), call(down, middle, y)]


def _silu_up(gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
    return torch.mul(torch.nn.functional.silu(gate), up, out=out)


def cublas_ffn(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """A layer of F.linear on weights that were dequantised before, gate and up as one matrix."""
    dtype = DTYPES[x["activations"]]

    def make() -> list[tuple[Tensor, Tensor]]:
        found = []
        for layer in _layers(x, device, sets, seed):
            gate, up, down = (formats.dequantise(raw, x["format"]).to(dtype) for raw, _ in layer)
            found.append((torch.cat([gate, up]), down))
        return found

    group = (x.op, x["hidden"], x["width"], x["format"])
    dense = _once(group, ("dense", x["activations"], str(device), sets, seed), make)

    def call(i: int, v: Tensor, out: Tensor) -> Call:
        both = v.new_empty((len(v), 2 * x["width"]))
        gate, up = both.chunk(2, 1)
        middle = v.new_empty((len(v), x["width"]))
        return _in_order(
            [_linear(dense[i][0], v, both), lambda: _silu_up(gate, up, middle), _linear(dense[i][1], middle, out)]
        )

    return _ffn(x, device, sets, seed, call)


def _ffn(
    x: Case, device: Any, sets: int, seed: int, make: Callable[[int, Tensor, Tensor], Call], ours: bool = False
) -> Trial:
    values = _tokens(x["N"], x["hidden"], x, device, seed)
    y = [torch.empty_like(values) for _ in range(sets)]
    raw = [one for one, _ in _layers(x, device, sets, seed)[0]]

    group = (x.op, x["hidden"], x["width"], x["format"])

    def expected(picks: list[int]) -> Tensor:
        make = lambda: reference.ffn(*(formats.dequantise(one, x["format"]) for one in raw), values[picks])  # noqa: E731
        return _once(group, ("expected", x["N"], x["activations"], str(device), sets, seed), make)

    calls = [make(i, values, out) for i, out in enumerate(y)]
    return _trial(calls, values, y, expected, 2 * TOLERANCE[x["activations"]], lambda v, out: make(0, v, out), ours)


# Routed experts, all there


def routing(x: Case, layers: int = 1) -> list[list[list[list[int]]]]:
    """Experts of every token, [steps][layers][N][top_k]; of a case alone, so that every process has the same."""
    return _drawn(x["trace"], x["N"], steps(x["N"]) if x.op == "cache" else 1, layers, x["E"], x["top_k"])


def steps(N: int) -> int:
    """Of a trace, N tokens each."""
    return max(LEAST_STEPS, -(-TRACE_TOKENS // N))


@once
def _drawn(trace: str, N: int, steps: int, layers: int, E: int, top_k: int) -> list[list[list[list[int]]]]:
    drawn = names.TRACES[trace](N * steps, layers, E, top_k, seed=N)  # a dispatch a token and layer
    chosen = [[expert for _, expert in dispatch] for dispatch in drawn]
    of_step = [chosen[first : first + N * layers] for first in range(0, len(chosen), N * layers)]
    return [[step[layer::layers] for layer in range(layers)] for step in of_step]


def distinct(ids: Sequence[Sequence[int]]) -> list[int]:
    """The experts that any token needs, ascending."""
    return sorted({expert for chosen in ids for expert in chosen})


def _experts(x: Case, device: Any, count: int, seed: int) -> tuple[list[Tensor], Experts]:
    """Blocks of gate, up and down, [count, rows, bytes of a row], and the experts packed."""
    shapes = ((x["width"], x["hidden"]), (x["width"], x["hidden"]), (x["hidden"], x["width"]))

    def make() -> tuple[list[Tensor], Experts]:
        raw = []
        for i, (rows, columns) in enumerate(shapes):  # a layer at a time, since quantising takes several times the room
            parts = [
                _blocks(x["E"] * rows, columns, x["format"], device, seed + 3 * layer + i)
                for layer in range(count // x["E"])
            ]
            raw.append(torch.cat(parts).unflatten(0, (count, rows)))
        return raw, experts.pack(*raw, x["format"])

    return _once(_group(x), (str(device), count, seed), make)


def _group(x: Case) -> Any:
    return x.op, x["E"], x["hidden"], x["width"], x["format"]


def _expected(x: Case, raw: Sequence[Tensor], first: int, v: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Of some tokens, float64; first: number of a layer's first expert in raw."""
    needed = ids.unique().tolist()
    exact = {e: [formats.dequantise(one[first + e], x["format"]) for one in raw] for e in needed}
    return reference.routed([exact.get(e, []) for e in range(x["E"])], v, ids, weights)


def _work(x: Case, device: Any, seed: int, ids: Sequence[Sequence[int]]) -> Any:
    from labkit.batched_ffn.routed import Work

    chosen = torch.tensor(ids, dtype=torch.int32, device=device)
    weights = _normal(chosen.shape, 1.0, device, seed + 5).softmax(1)
    return Work.of(_tokens(len(ids), x["hidden"], x, device, seed), chosen, weights, x["width"])


def routed(x: Case, device: Any, sets: int, seed: int, variant: str) -> Trial:
    """One of the lab's ways through the experts, from the chosen experts to y; all experts are there.

    Per token and with a copy a row, the host knows the routing before: what it takes to ask for it is left out.
    """
    return _routed(x, device, sets, seed, lambda held, work: _ways(x, held, work, variant), ours=True)


def _ways(x: Case, held: Experts, work: Any, variant: str) -> Call:
    from labkit.batched_ffn import routed as kernels

    if variant in (names.INDEXED, names.INDEXED_MATRIX):
        table = torch.arange(x["E"], dtype=torch.int32, device=work.x.device)
        made = kernels.grouped_indexed(held, table, work, matrix=variant == names.INDEXED_MATRIX)
    else:
        way = kernels.per_token if variant == names.PER_TOKEN else kernels.grouped_rowcopy
        made = way(held, {e: e for e in range(x["E"])}, work.ids.tolist(), work)
    return _in_order([*made, kernels.weighted_sum(work)])


def routed_integers(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The experts by the integers of a K format, from words in the order that these have."""
    from labkit.batched_ffn import routed, routed_integers

    def make() -> tuple[Experts, Tensor]:
        held = routed_integers.tiled(_experts(x, device, x["E"], seed)[1])
        return held, torch.arange(x["E"], dtype=torch.int32, device=device)

    held, table = _once(_group(x), ("tiled", str(device), seed), make)

    def call(_: Experts, work: Any) -> Call:
        made = routed_integers.grouped_integers(held, table, work)
        return _in_order([*made, routed.weighted_sum(work)])

    return _routed(x, device, sets, seed, call, ours=True)


def _routed(
    x: Case, device: Any, sets: int, seed: int, make: Callable[[Experts, Any], Call], ours: bool = False
) -> Trial:
    [[ids]] = routing(x)
    raw, held = _experts(x, device, x["E"], seed)
    # every buffer set has experts of its own, as far as there are so many: together they are larger than the L2
    moved = [[[(e + i * x["E"] // sets) % x["E"] for e in chosen] for chosen in ids] for i in range(sets)]
    works = [_work(x, device, seed, one) for one in moved]
    calls = [make(held, work) for work in works]
    first = works[0]

    def expected(picks: list[int]) -> Tensor:
        return _expected(x, raw, 0, first.x[picks], first.ids[picks], first.weights[picks])

    def alone(values: Tensor, out: Tensor) -> Call:
        at = (values.data_ptr() - first.x.data_ptr()) // (first.x.stride(0) * values.element_size())
        work = type(first).of(values, first.ids[at : at + 1], first.weights[at : at + 1], x["width"])
        return _in_order([make(held, work), lambda: out.copy_(work.y)])

    y = [work.y for work in works]
    return _trial(calls, first.x, y, expected, 2 * TOLERANCE[x["activations"]], alone, ours)


def grouped_mm(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """F.grouped_mm on weights that were dequantised to bf16 before; rows are sorted and gathered in every call."""
    dtype = DTYPES[x["activations"]]

    def make() -> tuple[Tensor, Tensor]:
        raw, _ = _experts(x, device, x["E"], seed)
        gate, up, down = (formats.dequantise(one, x["format"]).to(dtype) for one in raw)
        return torch.cat([gate, up], 1).mT, down.mT

    dense = _once(_group(x), ("dense", x["activations"], str(device), seed), make)
    return _routed(x, device, sets, seed, lambda held, work: _grouped_mm(*dense, work))


def _grouped_mm(gate_up: Tensor, down: Tensor, work: Any) -> Call:
    """gate_up: [E, hidden, 2 width], down: [E, width, hidden]."""
    experts = torch.arange(len(down), device=work.x.device)

    def call() -> None:
        ids, order = work.ids.flatten().sort(stable=True)
        ends = torch.searchsorted(ids, experts, right=True).int()
        token = order // work.top_k
        gate, up = torch.nn.functional.grouped_mm(work.x[token], gate_up, offs=ends).chunk(2, 1)
        parts = torch.nn.functional.grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends)
        parts = parts * work.weights.flatten()[order, None].to(parts.dtype)
        torch.sum(torch.empty_like(parts).index_copy_(0, order, parts).unflatten(0, (-1, work.top_k)), 1, out=work.y)

    return call


# Routed experts through the cache


class Steps:
    """The steps of a trace, one a call: N tokens through every layer, experts brought as the variant says.

    No copy of a step begins before it, and it ends when all have landed, those for the next step's first layer
    included: so that each is in the time of one step, its own. Copied when needed, no expert sets out before the layer
    before its own has been computed, since until then no router could have chosen it. done: number of the step that
    was computed last.
    """

    def __init__(self, x: Case, device: Any, seed: int, variant: str):
        from labkit.batched_ffn import routed as kernels

        self.variant, self.layers, self.done = variant, x["layers"], -1
        self.host = _host(x, device, seed)
        self.routing = routing(x, self.layers)
        self.needs = [[[(n, e) for e in distinct(ids)] for n, ids in enumerate(step)] for step in self.routing]
        ids = torch.tensor(self.routing, dtype=torch.int32, device=device)
        self.ids, self.now = ids.unbind(), ids[0].clone()  # of all steps, and what the layers read: of this one
        works = [_work(x, device, seed + layer, chosen) for layer, chosen in enumerate(self.routing[0])]
        self.works = [replace(work, ids=now) for work, now in zip(works, self.now, strict=True)]
        self.tables = [torch.full((x["E"],), -1, dtype=torch.int32, device=device) for _ in range(self.layers)]
        capacity = x["E"] if variant == names.RESIDENT else x["capacity"]
        keys = [(layer, e) for layer in range(self.layers) for e in range(x["E"])]
        policy = self._policy("lru" if variant == names.RESIDENT else x["policy"], capacity * self.layers)
        self.kept = slots.ExpertSlots(self.host, policy, self._room(), device, keys)
        if variant == names.RESIDENT:
            list(self.kept.waves(keys))  # brought once, and all hit from now on
        choice = kernels.matrix_rule_of(x["N"], x["E"], x["top_k"])
        self.before, self.experts, self.after, self.whole = [], [], [], []  # of each layer one call
        if variant == names.COPIES:
            return
        for table, work in zip(self.tables, self.works, strict=True):
            order, last = kernels.sort(work.ids, x["E"], choice.tokens), kernels.weighted_sum(work)
            launches = kernels.grouped_indexed(self.kept.slots, table, work, choice, matrix=True, order=order)
            self.before.append(_captured([order.launch], table.device))
            self.experts.append(_captured(launches, table.device))
            self.after.append(_captured([last], table.device))
            self.whole.append(_captured([order.launch, *launches, last], table.device))

    def _policy(self, name: str, capacity: int) -> cache.Policy:
        """Every call goes on in the trace, so `belady` foresees many rounds of it.

        In what `pinned` counts the layers take turns: of experts that all are needed equally often it keeps those that
        come first, and so as many of each layer. (Else one layer would miss them all, and no other would have copies
        to hide.)
        """
        first = [[key for turn in zip_longest(*step) for key in turn if key] for step in self.needs]
        trace = [keys for step in self.needs for keys in step]
        return cache.make(name, capacity, first, [keys for keys in trace * 100 if not cache.bypasses(keys, capacity)])

    def _room(self) -> int:
        """As many slots as the largest dispatch needs: the next layer's experts may all be on their way."""
        return max(len(keys) for step in self.needs for keys in step)

    def __call__(self) -> None:
        self.done = (self.done + 1) % len(self.needs)
        self.kept.follow()
        if self.variant != names.COPIES:
            self.now.copy_(self.ids[self.done])
        for layer, needed in enumerate(self.needs[self.done]):
            self._layer(layer, needed)
        self.kept.settle()

    def finish_the_trace(self) -> None:
        """Go on to its end: the next step is its first, and the cache has seen all of it: so for every variant."""
        while self.done + 1 < len(self.needs):
            self()
        if self.now.is_cuda:
            torch.cuda.synchronize(self.now.device)  # the next step may be on another stream

    def _layer(self, layer: int, needed: list[Any]) -> None:
        """One layer; the next one's experts set out while it is computed.

        They are asked for after this layer's table, which would wait for them. If its own experts are all there at
        once, also before their slots are released: the free ones are then those of earlier layers, and no copy waits
        for this layer's kernels.
        """
        if self.variant == names.NEEDED:
            self.kept.follow()
        waves = self.kept.waves(needed)
        if self.variant == names.COPIES:
            deque(waves, maxlen=0)
            return
        at_once = False
        for count, wave in enumerate(waves):
            at_once = len(wave) == len(needed)
            if not at_once and not count:
                self.before[layer]()
            if count:
                self.kept.follow()  # the wave before reads the table, too
            self._place(layer, wave)
            (self.whole if at_once else self.experts)[layer]()
            if at_once:
                self._prefetch(layer)
        if not at_once:
            self._prefetch(layer)
            self.after[layer]()

    def _prefetch(self, layer: int) -> None:
        if self.variant == names.PREFETCHED:
            self.kept.prefetch(self._next(layer))

    def _place(self, layer: int, wave: dict[Any, int]) -> None:
        """The layer's table: where the experts of a wave lie."""
        table = self.tables[layer]
        where = torch.full((len(table),), -1, dtype=torch.int32, pin_memory=table.is_cuda)  # so that the host goes on
        where.numpy()[[expert for _, expert in wave]] = list(wave.values())
        self.kept.send(where, table)

    def _next(self, layer: int) -> list[Any]:
        """The experts of the layer after this one; of the next step's first after the last."""
        step = self.done if layer + 1 < self.layers else (self.done + 1) % len(self.needs)
        return self.needs[step][(layer + 1) % self.layers]


def _captured(calls: Sequence[Call], device: torch.device) -> Call:
    """One call of several: on a GPU a graph, which takes the host as long as one launch. They run once here."""
    if device.type != "cuda":
        return _in_order(list(calls))
    for call in calls:
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return partial(_replay, graph, list(calls))


def _replay(graph: Any, calls: Sequence[Call]) -> None:
    """calls: those of the graph, which does not itself keep their tensors."""
    graph.replay()


def _host(x: Case, device: Any, seed: int) -> Experts:
    """All layers' experts on the host, pinned where there is a GPU."""

    def make() -> Experts:
        found = _experts(x, device, x["layers"] * x["E"], seed)[1]
        host = found.like(len(found), "cpu", pinned=torch.device(device).type == "cuda")
        host.store.copy_(found.store)
        return host

    return _once(_group(x), ("host", str(device), x["layers"], seed), make)


def cached(x: Case, device: Any, sets: int, seed: int, variant: str) -> Trial:
    """Steps of a trace; one buffer set, since a step goes on where the last one ended."""
    step = Steps(x, device, seed, variant)
    raw, everything = _experts(x, device, x["layers"] * x["E"], seed)

    def check() -> dict[str, float]:
        for work in step.works:
            work.partials.fill_(math.nan)
        step()
        picks, errors = sorted({0, x["N"] - 1}), []  # all the others are compared by their bits
        for layer, work in enumerate(step.works):
            v = (work.x[picks], work.ids[picks], work.weights[picks])
            errors.append(relative_rmse(work.y[picks], _expected(x, raw, layer * x["E"], *v)))
        bits = max(differing(work.y, _at_once(x, everything, layer, work)) for layer, work in enumerate(step.works))
        return {"y": max(error if error == error else math.inf for error in errors), "bits": bits}

    def facts() -> dict[str, Any]:
        """Of one round of the trace, after one in which the cache has filled."""
        if variant != names.NEEDED:
            return {}
        for _ in step.needs:
            step()
        before, copied = step.kept.replayed, step.kept.copied
        for _ in step.needs:
            step()
        seen = step.kept.replayed.since(before)
        found = {"hit_rate": seen.hit_rate, "accesses": seen.accesses, "bypassed": seen.bypassed}
        found |= {"copied": step.kept.copied - copied, "steps": len(step.needs)}
        return found | {"expert_bytes": step.host.expert_bytes, "slots": len(step.kept.slots)}

    tolerance = {"y": 2 * TOLERANCE[x["activations"]], "bits": SAME_BITS}
    if variant == names.COPIES:
        return Trial([step], facts=facts, idle=True, begin=step.finish_the_trace)
    y = [work.y for work in step.works]
    return Trial(
        [step], lambda: [one.fill_(math.nan) for one in y] and None, lambda: not any(map(_has_nan, y)), check,
        tolerance, facts=facts, begin=step.finish_the_trace,
    )  # fmt: skip


def _has_nan(tensor: Tensor) -> bool:
    return bool(tensor.isnan().any())


def _at_once(x: Case, everything: Experts, layer: int, work: Any) -> Tensor:
    """y of a layer with all experts in one table."""
    from labkit.batched_ffn import routed as kernels

    other = type(work).of(work.x, work.ids, work.weights, x["width"])
    first = layer * x["E"]
    table = torch.arange(first, first + x["E"], dtype=torch.int32, device=work.x.device)
    for launch in (*kernels.grouped_indexed(everything, table, other, matrix=True), kernels.weighted_sum(other)):
        launch()
    return other.y
