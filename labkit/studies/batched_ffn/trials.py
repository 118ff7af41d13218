"""Products and dense layers made ready for timing: buffers, calls, checks.

Weights of a shape and format are the same tensors for all variants and numbers of tokens. Libraries are imported only
in the function that times them. Routed experts: `routed_trials`, and through the cache `cache_trials`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache as once
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit import host, isolated, paths
from labkit.bench.spec import Arguments, Case, Trial, lazy
from labkit.kernels.gguf import formats, layers, reference
from labkit.kernels.gguf.formats import Packed
from labkit.kernels.target import multiprocessors
from labkit.kernels.tuned import slug
from labkit.studies.batched_ffn import peers, variants
from labkit.studies.batched_ffn.work import weight_bytes
from labkit.sweep import tuning
from labkit.sweep.trial import (
    DTYPES,
    SAME_BITS,
    Call,
    Random,
    Shared,
    differing,
    given,
    in_order,
    relative_rmse,
    some_of,
    trial,
)

# Relative RMSE against float64 with the dequantised weights. One product: rounding of y, and in matrix instructions of
# the weights, to bf16 (2^-9 each at most); whole layers round once more in between.
TOLERANCE = {"bf16": 6e-3, "fp32": 1e-5}
# llama.cpp rounds x to 8 bits, 32 values with one scale: of normal values some 0.5 %; and, beside weights that have a
# minimum (Q4_K, Q5_K), for many tokens, scale and sum of the 32 values to half: 1.2 % on an H100. Beside F32 and BF16
# weights it does neither: these keep the tolerance of the others, since by some of its ways weights are rounded to
# TF32, or y to bf16.
LLAMA_TOLERANCE = 2e-2
GEMLITE_TOLERANCE = 3e-2  # parts of K are added in bf16, as many as its tuning likes
CHECKED = 8  # tokens that are compared with the reference, and three that are computed again alone
WEIGHTS = ("rows", "K", "E", "hidden", "width", "format")  # parameters: cases that have the same share weights
SHARED = Shared()

Make = Callable[[int, Tensor, Tensor], Call]  # number of a buffer set, x [N, K], y [N, rows] -> y = f(x)


def shared(x: Case, name: Any, make: Callable[[], Any]) -> Any:
    """What `make` gives, kept while the cases have these weights. name: all else that it depends on."""
    return SHARED((x.op, *(x.params.get(one) for one in WEIGHTS)), name, make)


def tokens(x: Case, columns: int, device: Any, seed: int) -> Tensor:
    """[N, columns]; of another N, other tokens."""
    return Random(device, seed + 7, DTYPES[x["activations"]])(x["N"], columns)


def blocks(rows: int, columns: int, format: str, device: Any, seed: int) -> Tensor:
    """Normal weights as blocks as stored, so that a product of normal values has unit variance."""
    if torch.device(device).type == "meta":  # there are no values to quantise
        kind = formats.find(format)
        return torch.empty((rows, columns // kind.block * kind.block_bytes), dtype=torch.uint8, device=device)
    return formats.quantise(Random(device, seed)(rows, columns, std=columns**-0.5), format)


def shapes(x: Case) -> list[tuple[int, int]]:
    """Of a case's matrix; of a layer gate, up and down."""
    if x.op in variants.ONE_MATRIX:
        return [(x["rows"], x["K"])]
    return [(x["width"], x["hidden"]), (x["width"], x["hidden"]), (x["hidden"], x["width"])]


def trial_of_tokens(
    calls: Sequence[Call], x: Tensor, y: Sequence[Tensor], expected: Callable[[list[int]], Tensor], tolerance: float,
    alone: Callable[[Tensor, Tensor], Call], ours: bool, **more: Any,
) -> Trial:  # fmt: skip
    """A trial of y[n] = f(x[n]) for tokens n.

    y: of each buffer set, [N, ·]; expected: of some tokens, float64. alone: the same function on other tokens, of set
    0: a token has the same bits whatever else is in the batch; of libraries that is recorded, not asked for.
    """

    def differs(n: int) -> float:
        one = y[0].new_full((1, y[0].shape[1]), math.nan)
        alone(x[n : n + 1], one)()
        return differing(one, y[0][n : n + 1])

    def same() -> float:
        calls[0]()
        return max(map(differs, {0, len(x) // 2, len(x) - 1}))

    def check() -> dict[str, float]:
        calls[0]()
        picks = _picks(len(x))
        errors = {"y": relative_rmse(y[0][picks], expected(picks))}
        return errors | ({"alone": same()} if ours else {})

    def facts() -> dict[str, Any]:
        return {"alone": same()} | _launched(calls[0], x.device)

    return trial(calls, y, check, {"y": tolerance, "alone": SAME_BITS}, facts=facts, **more)


def _picks(N: int) -> list[int]:
    """The tokens that are checked: the first and the last."""
    return sorted({*range(min(N, CHECKED // 2)), *range(max(0, N - CHECKED // 2), N)})


def _launched(call: Call, device: torch.device) -> dict[str, int]:
    """A row's facts of a call: its operations on the GPU's stream, as the profiler sees them; none without a GPU."""
    if device.type != "cuda":
        return {}
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    count = sum(event.device_type == DeviceType.CUDA for event in seen.events())
    return {"launches": count, "sms": multiprocessors(device)}


# A product, or a whole dense layer


def _weights(x: Case, device: Any, sets: int, seed: int) -> list[list[tuple[Tensor, Packed]]]:
    """Of each buffer set every matrix: blocks as stored, and packed."""

    def make() -> list[list[tuple[Tensor, Packed]]]:
        sizes = shapes(x)
        raw = [blocks(*size, x["format"], device, seed + i) for i, size in enumerate(sizes * sets)]
        both = [(one, formats.pack(one, x["format"])) for one in raw]
        return [both[i : i + len(sizes)] for i in range(0, len(both), len(sizes))]

    return shared(x, (str(device), sets, seed), make)


def _packed(x: Case, device: Any, sets: int, seed: int) -> list[Packed]:
    """The matrix of each buffer set of a product."""
    return [packed for [(_, packed)] in _weights(x, device, sets, seed)]


def _multiplied(
    x: Case, device: Any, sets: int, seed: int, make: Make, ours: bool = False, dtype: torch.dtype | None = None
) -> Trial:
    """A trial of what `make` gives. dtype: of y, that of the activations by default."""
    single = x.op in variants.ONE_MATRIX
    columns, rows = (x["K"], x["rows"]) if single else (x["hidden"], x["hidden"])
    values = tokens(x, columns, device, seed)
    y = [values.new_empty((x["N"], rows), dtype=dtype) for _ in range(sets)]
    raw = [one for one, _ in _weights(x, device, sets, seed)[0]]

    def expected(picks: list[int]) -> Tensor:
        exact = reference.product if single else reference.ffn
        name = ("expected", x["N"], x["activations"], str(device), sets, seed)
        return shared(x, name, lambda: exact(*(formats.dequantise(one, x["format"]) for one in raw), values[picks]))

    calls = [make(i, values, out) for i, out in enumerate(y)]
    tolerance = (1 if single else 2) * TOLERANCE[x["activations"]]
    dissect = not single or variants.DISSECTED.items() <= dict(x.params).items()
    return trial_of_tokens(calls, values, y, expected, tolerance, partial(make, 0), ours, dissect=dissect)


def ours(x: Case, device: Any, sets: int, seed: int, variant: str) -> Trial:
    """One of the lab's products, or a layer of it."""
    launcher, wide = lazy(variants.PRODUCTS[variant]), variant == variants.WIDE
    layer, stored = layers.apart if wide else layers.layer, wide and x["format"] == "BF16"  # which wide tiles take so
    weights = _weights(x, device, sets, seed)
    W = [[formats.matrix(raw, "BF16") if stored else packed for raw, packed in matrices] for matrices in weights]

    def make(i: int, values: Tensor, out: Tensor) -> Call:
        single = x.op in variants.ONE_MATRIX
        return in_order(launcher(*W[i], values, out) if single else layer(launcher, W[i], values, out))

    return _multiplied(x, device, sets, seed, make, ours=True)


def integers(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Products of the integers of a K format, from words in the order that these have."""
    from labkit.kernels.gguf import integers as kernels

    W = shared(x, ("tiled", str(device), sets, seed), lambda: list(map(kernels.tiled, _packed(x, device, sets, seed))))
    return _multiplied(x, device, sets, seed, lambda i, v, out: kernels.integers(W[i], v, out), ours=True)


def specialised(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Products of a K format by specialised warps, one token too by the choice for all."""
    from labkit.kernels.gguf import specialised as kernels

    W, choice = _packed(x, device, sets, seed), kernels.warp_rule(x["N"])

    def make(i: int, values: Tensor, out: Tensor) -> Call:
        return in_order(kernels.by_specialised_warps(W[i], values, out, choice))

    return _multiplied(x, device, sets, seed, make, ours=True)


def continued(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Products of BF16 as it is stored by specialised warps that continue each other's sums."""
    from labkit.kernels.gguf import continued as kernels

    W = [formats.matrix(raw, x["format"]) for [(raw, _)] in _weights(x, device, sets, seed)]
    return _multiplied(x, device, sets, seed, lambda i, v, out: kernels.by_continued_sums(W[i], v, out), ours=True)


def cublas(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """F.linear on weights that were dequantised before; of a layer, gate and up as one matrix."""

    def matrices(stored: Sequence[tuple[Tensor, Packed]]) -> list[Tensor]:
        *first, last = (formats.dequantise(raw, x["format"]).to(DTYPES[x["activations"]]) for raw, _ in stored)
        return [torch.cat(first), last] if first else [last]

    name = ("dense", x["activations"], str(device), sets, seed)
    dense = shared(x, name, lambda: list(map(matrices, _weights(x, device, sets, seed))))
    call = peers.linear if x.op in variants.ONE_MATRIX else peers.linear_layer
    made = _multiplied(x, device, sets, seed, lambda i, v, out: in_order(call(*dense[i], v, out)))
    return replace(made, moves=sum(one.nbytes for one in dense[0]))  # of F32 half of what is stored


def dequantised(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Weights dequantised in every call, then F.linear."""
    W = _packed(x, device, sets, seed)
    space = torch.empty((x["rows"], x["K"]), dtype=DTYPES[x["activations"]], device=device)
    return _multiplied(x, device, sets, seed, lambda i, v, out: in_order(peers.dequantise_linear(W[i], space, v, out)))


def stored(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Q8_0 as it is stored, one token; and in how many values its bits are not those of the packed weights."""
    from labkit.kernels.gguf import products
    from labkit.studies.batched_ffn import ablations

    W = [matrix for [matrix] in _weights(x, device, sets, seed)]
    made = _multiplied(x, device, sets, seed, lambda i, v, out: ablations.stored(W[i][0], v, out))
    values = tokens(x, x["K"], device, seed)
    found, packed = (torch.full((1, x["rows"]), math.nan, device=device) for _ in range(2))

    def check() -> dict[str, float]:
        ablations.stored(W[0][0], values, found)()
        in_order(products.per_token(W[0][1], values, packed))()
        return {**made.check(), "packed": differing(found, packed)}

    return replace(made, check=check, tolerance={**made.tolerance, "packed": SAME_BITS})


def split_k(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The control: sums by atomics, in fp32, whose bits are not asked for, but recorded."""
    from labkit.studies.batched_ffn import ablations

    W, fp32 = _packed(x, device, sets, seed), torch.float32
    return _multiplied(x, device, sets, seed, lambda i, v, out: in_order(ablations.split_k(W[i], v, out)), dtype=fp32)


def llama_cpp(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """llama.cpp's product, from blocks as stored; x and y are fp32, as it takes them."""
    from labkit.studies.batched_ffn import llama_cpp as released

    raw = [one for [(one, _)] in _weights(x, device, sets, seed)]
    whole = tokens(x, x["K"], device, seed).float()

    def make(i: int, values: Tensor, out: Tensor) -> Call:
        return released.product(x["format"], raw[i], whole if len(values) == x["N"] else values.float(), out)

    made = _multiplied(x, device, sets, seed, make, dtype=torch.float32)
    return made if x["format"] in ("F32", "BF16") else replace(made, tolerance={"y": LLAMA_TOLERANCE})


def added(function: Callable[..., Any], x: Case, device: Any, sets: int, seed: int) -> Trial:
    """A function of the reader's own, function(blocks, x, y), on copies of its own."""
    kind, rows, N = formats.find(x["format"]), x["rows"], x["N"]
    raw = [one.clone() for [(one, _)] in _weights(x, device, sets, seed)]
    values = [tokens(x, x["K"], device, seed) for _ in range(sets)]
    y = [one.new_empty((N, rows)) for one in values]
    calls = [partial(function, *part) for part in zip(raw, values, y, strict=True)]

    def other_x(i: int, random: Random) -> None:
        for one in values:
            random.fill(one)

    def other_block(i: int, random: Random) -> None:  # a single one, so large that y shows it
        row, first = random.below(rows), random.below(x["K"] // kind.block) * kind.block_bytes
        large = formats.quantise(random(kind.block, std=(rows / kind.block) ** 0.5 / 4), x["format"])
        for one in raw:
            one[row, first : first + kind.block_bytes] = large

    def expected(i: int, count: int) -> tuple[list[int], Tensor]:
        picks = some_of(N, CHECKED)
        return picks, reference.product(formats.dequantise(raw[i], x["format"]), values[i][picks])

    def errors(exact: tuple[list[int], Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
        return {"y": relative_rmse(found["y"][exact[0]], exact[1])}

    inputs = [{"blocks": one, "x": some} for one, some in zip(raw, values, strict=True)]
    arguments = Arguments(inputs, [{"y": out} for out in y], (other_x, other_block), expected, errors)
    facts = partial(_launched, calls[0], torch.device(device))
    return given(calls, arguments, {"y": TOLERANCE[x["activations"]]}, dissect=False, facts=facts)


def read(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """As many bytes as the weights of a case have, as stored, read and summed."""
    from labkit.kernels import ceilings

    size = weight_bytes(x) // 4
    # so small that no sum of a block overflows
    words = torch.randint(0, 2**17, (sets, size), dtype=torch.int32, device=device)
    sums = torch.zeros((sets, -(-size // ceilings.BLOCK)), dtype=torch.int32, device=device)
    calls = list(map(ceilings.read_words, words, sums))

    def check() -> dict[str, float]:
        calls[0]()
        return {"sum": float(abs(int(sums[0].long().sum()) - int(words[0].long().sum())))}

    return trial(calls, check=check, tolerance={"sum": 0.0}, dissect=False, moves=4 * size)


# gemlite's product


def gemlite(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """gemlite's product of as many bits, in groups of 32, on weights of its own, with its longest tuning."""
    _tune()
    generator = torch.Generator(device).manual_seed(seed)
    made = [_gemlite_layer(x, device, generator) for _ in range(sets)]
    values = tokens(x, x["K"], device, seed)
    calls = [lambda layer=layer: layer(values) for layer, _ in made]  # it returns y: a copy would be held against it
    with _timed_briefly(values.device):
        calls[0]()
    peers.keep_gemlite(_tuned())
    picks = _picks(len(values))
    expected = values[picks].double() @ made[0][1]().T

    def check() -> dict[str, float]:
        return {"y": relative_rmse(calls[0]()[picks], expected)}

    def facts() -> dict[str, Any]:
        (layer, _), whole, N = made[0], calls[0](), len(values)
        alone = max(differing(layer(values[n : n + 1]), whole[n : n + 1]) for n in {0, N // 2, N - 1})
        return {"alone": alone} | _launched(calls[0], values.device)

    return trial(calls, check=check, tolerance={"y": GEMLITE_TOLERANCE}, facts=facts)


def _gemlite_layer(x: Case, device: Any, generator: torch.Generator) -> tuple[Any, Callable[[], Tensor]]:
    """Its layer of random weights, and these in float64."""
    bits, shape, dtype = variants.GEMLITE_BITS[x["format"]], (x["rows"], x["K"]), DTYPES[x["activations"]]
    q = torch.randint(0, 2**bits, shape, generator=generator, device=device, dtype=torch.uint8)
    scale = torch.tensor(x["K"] ** -0.5 * math.sqrt(12) / 2**bits, dtype=dtype, device=device)
    scales = scale.expand(x["rows"], x["K"] // 32).contiguous()
    zeros = torch.full_like(scales, 2 ** (bits - 1))
    layer = peers.gemlite(bits, q, scales, zeros, device)
    return layer, lambda: (q.double() - 2 ** (bits - 1)) * scale.double()


def _tuned() -> Path:
    """Where gemlite's tuning is kept: with the rows of this GPU, by the versions that it is of."""
    folder = slug(torch.cuda.get_device_name()) if torch.cuda.is_available() else "none"
    return paths.RUNS / folder / f"{peers.gemlite_versions()}{tuning.ENDING}"


@once
def _tune() -> None:
    """Its longest tuning, which the first process makes and the others take over; or the one that is recorded.

    What it tries for a number of tokens, some 400 kernels, takes minutes to compile: first, in as many processes as
    there are cores, each a share of them.
    """
    peers.tune_gemlite()
    _tuned().parent.mkdir(parents=True, exist_ok=True)
    if known := next((file for file in (_tuned(), paths.recorded(_tuned())) if file.exists()), None):
        peers.take_gemlite(known)
        return
    wanted = list(product(variants.GEMLITE_BITS, variants.GEMLITE_TOKENS))
    shares = math.ceil(host.cores() / len(wanted))
    isolated.call_many(
        [isolated.Call(f"{__name__}:tune_apart", (*one, share, shares)) for share in range(shares) for one in wanted]
    )


def tune_apart(format: str, N: int, share: int, shares: int) -> None:
    """In a process of its own: have gemlite try a share of what it tunes, for what that leaves in Triton's cache alone.

    Nothing is timed: other processes use the GPU, too.
    """
    peers.tune_gemlite()
    hidden, width = variants.DENSE[variants.MAIN]
    x = Case("product", {"rows": width, "K": hidden, "format": format, "activations": "bf16", "N": N})
    layer, _ = _gemlite_layer(x, "cuda", torch.Generator("cuda").manual_seed(0))
    with peers.timed_by(_Share(share, shares)):
        layer(tokens(x, hidden, "cuda", 0))


class _Share:
    """In the place of Triton's `do_bench`: calls what is of this share, which compiles it, and calls it fastest."""

    def __init__(self, share: int, shares: int):
        self.share, self.shares, self.seen = share, shares, 0

    def __call__(self, call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
        mine = self.seen % self.shares == self.share
        self.seen += 1
        if mine:
            call()
        return [0.0 if mine else math.inf] * len(quantiles)


def _timed_briefly(device: torch.device) -> AbstractContextManager[None]:
    """While this is entered, Triton tunes by some hundred calls of a kernel, and not by five times as many."""
    if device.type != "cuda":
        return nullcontext()
    from triton.testing import do_bench

    return peers.timed_by(partial(do_bench, warmup=5, rep=20))
