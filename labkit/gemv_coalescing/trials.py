"""The study's variants made ready for timing: buffers, launches, checks.

W and x of a case are the same tensors for all its variants, so that no address can favour one; each variant writes
outputs of its own. The A/A control is a second set of outputs.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.bench.spec import Case, Trial
from labkit.gemv import choose
from labkit.gemv.choose import Choice
from labkit.gemv_coalescing import names, reference
from labkit.shapes import LINEAR

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE = {"bf16": 4e-3, "fp16": 5e-4, "fp32": 1e-5}  # relative RMSE: rounding of y (2^-9, 2^-12), order of the sums
SAME_BITS = 0.0

Make = Callable[[Tensor, Tensor, Tensor], Any]  # W [N, K], x [K], y [N] -> a Launch, or a call of a library


# Buffers that the variants of a case share

_shared: dict[Any, Any] = {}  # of one case at a time


def _once(key: Any, make: Callable[[], Any]) -> Any:
    """What `make` gives, kept until a variant of another case asks."""
    if key not in _shared:
        if any(other[:3] != key[:3] for other in _shared):
            _shared.clear()
        _shared[key] = make()
    return _shared[key]


def _inputs(x: Case, device: Any, sets: int, seed: int) -> tuple[Tensor, Tensor]:
    """W [sets, N, K] and x [sets, K], the same x for all, which stays in the L2 as in decode; y has unit variance."""
    N, K, dtype = x["N"], x["K"], TYPES[x["dtype"]]
    return _once((x.op, x.key, str(device), "inputs", sets, seed), lambda: _random(sets, N, K, dtype, device, seed))


def _random(sets: int, N: int, K: int, dtype: torch.dtype, device: Any, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    W = torch.empty((sets, N, K), dtype=dtype, device=device).normal_(0, K**-0.5, generator=generator)
    return W, torch.empty(K, dtype=dtype, device=device).normal_(generator=generator).expand(sets, K)


def _expected(x: Case, device: Any, sets: int, seed: int) -> Tensor:
    """y of set 0 in float64."""
    W, vector = _inputs(x, device, sets, seed)
    return _once((x.op, x.key, str(device), "expected", sets, seed), lambda: reference.gemv(W[0], vector[0]))


def _transposed(x: Case, device: Any, sets: int, seed: int) -> Tensor:
    """W [sets, N, K] stored as [sets, K, N]."""
    W, _ = _inputs(x, device, sets, seed)
    return _once((x.op, x.key, str(device), "transposed", sets, seed), lambda: W.mT.contiguous().mT)


# One GEMV


def _trial(
    x: Case, device: Any, sets: int, seed: int, make: Make, choice: Choice | None = None, library: bool = False,
    dissect: bool = True,
) -> Trial:  # fmt: skip
    """make: a call of one buffer set. dissect: take the kernel's code apart for the row's evidence (half a second)."""
    W, vectors = _inputs(x, device, sets, seed)
    trial = _of(x, W, vectors, _expected(x, device, sets, seed), make, choice, library)
    trial.dissect = dissect
    return trial


def _of(
    x: Case, W: Tensor, vectors: Tensor, expected: Tensor, make: Make, choice: Choice | None, library: bool = False
) -> Trial:
    y = torch.empty(W.shape[:2], dtype=W.dtype, device=W.device)
    calls = [make(*part) for part in zip(W, vectors, y, strict=True)]

    def check() -> dict[str, float]:
        calls[0]()
        first = y[0].clone()
        calls[0]()
        errors = {"y": relative_rmse(first, expected)}
        return errors if library else errors | {"repeat": float((first != y[0]).double().mean())}

    def facts() -> dict[str, Any]:
        found = {"bits": hashlib.sha256(y[0].cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]}
        found |= {"choice": choice.as_dict()} if choice else {}
        return found if library else found | _registers(calls[0]) | {"sms": choose.multiprocessors(W.device)}

    tolerance = {"y": TOLERANCE[x["dtype"]], "repeat": SAME_BITS}
    return Trial(
        calls, lambda: y.fill_(math.nan), lambda: not bool(y.isnan().any()), check, tolerance,
        None if library else calls[0], facts=facts,
    )  # fmt: skip


def _registers(launch: Any) -> dict[str, int]:
    """Registers a thread and spilled ones of the kernel that ran, as the driver loaded it."""
    kernel = launch.compile()
    kernel._init_handles()
    return {"registers": kernel.n_regs, "spills": kernel.n_spills}


def relative_rmse(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖."""
    return float((found.double() - expected).norm() / expected.norm())


def candidate(x: Case, device: Any, sets: int, seed: int, choice: Choice) -> Trial:
    """One candidate of the tuned table, checked like every variant."""
    from labkit.gemv import kernels

    return _trial(x, device, sets, seed, lambda W, v, y: kernels.gemv(W, v, y, choice), choice, dissect=False)


def thread_a_row(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Step 1."""
    from labkit.gemv_coalescing import ladder

    return _trial(x, device, sets, seed, ladder.thread_a_row)


def thread_a_row_transposed(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Step 2: the same kernel on W stored [K, N]."""
    from labkit.gemv_coalescing import ladder

    _, vectors = _inputs(x, device, sets, seed)
    W, expected = _transposed(x, device, sets, seed), _expected(x, device, sets, seed)
    return _of(x, W, vectors, expected, ladder.thread_a_row, None)


def warp_a_row(
    x: Case, device: Any, sets: int, seed: int, wide: bool = False, rows: int = 1, stages: int = 1, hint: str = ""
) -> Trial:
    """Steps 3 to 6, and the cache hint alone."""
    from labkit.gemv_coalescing import ladder

    vector = ladder.vector_of(TYPES[x["dtype"]]) if wide else 1
    return _trial(x, device, sets, seed, lambda W, v, y: ladder.warp_a_row(W, v, y, vector, rows, stages, hint))


def production(
    x: Case, device: Any, sets: int, seed: int, dependent: bool | None = None, split: int = 1, kind: str = "cold"
) -> Trial:
    """The production GEMV with its tuned choice; or without dependent launch, split further, or tuned hot."""
    from labkit.gemv import kernels

    choice = _chosen(x, device, kind)
    if split > 1:
        choice = replace(choice, split=split)
    dissect = (dependent, split, kind) == (None, 1, "cold")
    make: Make = lambda W, v, y: kernels.gemv(W, v, y, choice, None, dependent)  # noqa: E731
    return _trial(x, device, sets, seed, make, choice, dissect=dissect)


def _chosen(x: Case, device: Any, kind: str) -> Choice:
    N, K, size = x["N"], x["K"], TYPES[x["dtype"]].itemsize
    device = torch.device(device)
    if kind == "hot" and device.type == "cuda":
        hot = choose.tuned(torch.cuda.get_device_name(device), "hot")
        if (N, K, size) in hot:
            return hot[N, K, size]
    return choose.choose(N, K, size, device)


def some_rows(
    x: Case, device: Any, sets: int, seed: int, rows: int, interleaved: bool = False, dependent: bool | None = None
) -> Trial:
    """The production kernel at a number of rows, all else as the rule has it."""
    from labkit.gemv import kernels

    choice = replace(_rule(x, device), rows=rows, interleaved=interleaved)
    make: Make = lambda W, v, y: kernels.gemv(W, v, y, choice, None, dependent)  # noqa: E731
    return _trial(x, device, sets, seed, make, choice, dissect=False)


def _rule(x: Case, device: Any) -> Choice:
    """The rule's choice for the shape of a case on a device."""
    sms = choose.multiprocessors(torch.device(device))
    return choose.rule(x["N"], x["K"], TYPES[x["dtype"]].itemsize, sms)


def rows_choices(x: Case) -> list[tuple[Choice, bool, bool]]:
    """The choices of the rows' variants; whether each is of the control of bit identity, and launched dependently."""
    rule = _rule(x, "cpu")
    found = [(replace(rule, rows=rows), False, True) for rows in names.ROWS_CHOICES]
    found.append((replace(rule, rows=4, interleaved=True), False, True))
    found += [(replace(rule, rows=rows), False, False) for rows in names.PLAIN_CHOICES]
    return found + [(replace(rule, rows=rows), True, False) for rows in names.TWO_D_CHOICES]


def two_d_tile(x: Case, device: Any, sets: int, seed: int, rows: int) -> Trial:
    """The control of bit identity at a number of rows."""
    from labkit.gemv_coalescing import ladder

    choice = replace(_rule(x, device), rows=rows)
    return _trial(x, device, sets, seed, lambda W, v, y: ladder.two_d_tile(W, v, y, choice), choice, dissect=False)


def read_only(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The ceiling: W read and summed."""
    if x.op == "chain":
        return _read([_weights(x, device, sets, seed)[i][None] for i in range(sets)])
    return _read(list(_inputs(x, device, sets, seed)[0]))


def _read(weights: Sequence[Tensor]) -> Trial:
    from labkit.gemv_coalescing import ladder

    blocks = -(-weights[0].numel() // ladder.READ_BLOCK)
    partial = torch.empty((len(weights), blocks), dtype=torch.float32, device=weights[0].device)
    calls = [ladder.read_only(W, part) for W, part in zip(weights, partial, strict=True)]

    def check() -> dict[str, float]:
        calls[0]()
        values = weights[0].double()
        return {"sum": float((partial[0].double().sum() - values.sum()).abs() / values.abs().sum())}

    watch = (lambda: partial.fill_(math.nan), lambda: not bool(partial.isnan().any()))
    return Trial(calls, *watch, check, {"sum": 1e-5}, calls[0])


def empty(x: Case, device: Any, sets: int, seed: int, dependent: bool = False) -> Trial:
    """A kernel that does nothing; dependent: started early where the GPU can."""
    from labkit.gemv.kernels import has_dependent_launch
    from labkit.gemv_coalescing import ladder

    y = torch.empty(1, device=device)
    launch = ladder.empty(y, dependent and has_dependent_launch(y.device))
    return Trial([launch], launch=launch, idle=True)


def torch_mv(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """cuBLAS as torch.mv calls it."""
    return _trial(x, device, sets, seed, mv, library=True)


def mv(W: Tensor, x: Tensor, y: Tensor) -> Callable[[], Any]:
    """torch.mv as a call."""
    return lambda: torch.mv(W, x, out=y)


def torch_linear(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """cuBLAS as F.linear calls it for one token."""
    return _trial(x, device, sets, seed, linear, library=True)


def linear(W: Tensor, x: Tensor, y: Tensor) -> Callable[[], Any]:
    """F.linear of one token, [1, K], as a call."""
    row, out = x[None], y[None]
    return lambda: torch.ops.aten.linear.out(row, W, None, out=out)


def added(x: Case, device: Any, sets: int, seed: int, function: Callable[..., Any]) -> Trial:
    """A function of the reader's own, function(W, x, y), on copies that it may spoil."""
    W, vectors = (tensor.clone() for tensor in _inputs(x, device, sets, seed))

    def make(W: Tensor, v: Tensor, y: Tensor) -> Callable[[], Any]:
        return lambda: function(W, v, y)

    return _of(x, W, vectors, _expected(x, device, sets, seed), make, None, library=True)


# Chains of whole layers


def _weights(x: Case, device: Any, sets: int, seed: int) -> Tensor:
    """[sets, values] of all matrices of one period, one after the other: those of a group are adjacent rows of one."""
    groups = LINEAR[x["model"]].chain(merged=True)
    size = sum(k * n for k, ns in groups for n in ns)

    def make() -> Tensor:
        flat = torch.empty((sets, size), dtype=TYPES[x["dtype"]], device=device)
        generator, start = torch.Generator(device).manual_seed(seed), 0
        for k, (n,) in groups:
            flat[:, start : start + n * k].normal_(0, k**-0.5, generator=generator)
            start += n * k
        return flat

    return _once((x.op, x.key, str(device), "weights", sets, seed), make)


class Link(NamedTuple):
    """One GEMV of a chain. source: [K], what a kernel between turns into x just before it; None if nothing does."""

    W: Tensor
    x: Tensor
    y: Tensor
    source: Tensor | None = None


def links(x: Case, weights: Tensor, y: Tensor, start: Tensor, merged: bool, middle: Tensor | None = None) -> list[Link]:
    """Every GEMV of a chain, in order.

    weights: [values]; y: [sum of all N], each GEMV's own part; start: x of the first group. The matrices of a group
    share x; a group's x is the beginning of what the group before wrote, so nothing is overwritten before it is read.
    middle: [sum of all groups' K] or None; with it, each later group's x is a part of it, made by a kernel between.
    """
    found, at, out, x_group = [], 0, 0, start
    source, between = None, 0
    for k, ns in LINEAR[x["model"]].chain(merged):
        if middle is not None and found:
            source, x_group = x_group[:k], middle[between : between + k]
        between += k
        first = out
        for n in ns:
            found.append(Link(weights[at : at + n * k].view(n, k), x_group[:k], y[out : out + n], source))
            at, out, source = at + n * k, out + n, None
        x_group = y[first:out]
    return found


Between = Callable[[Tensor, Tensor], Any]  # source [K], x [K] -> a Launch


def _chain(
    x: Case, device: Any, sets: int, seed: int, make: Make, merged: bool, between: Between | None = None
) -> Trial:
    weights = _weights(x, device, sets, seed)
    groups = LINEAR[x["model"]].chain(merged=True)
    y = torch.empty((sets, sum(n for _, ns in groups for n in ns)), dtype=weights.dtype, device=device)
    middle = torch.empty((sets, sum(k for k, _ in groups)), dtype=weights.dtype, device=device) if between else None
    generator = torch.Generator(device).manual_seed(seed + 1)
    start = torch.empty((sets, groups[0][0]), dtype=weights.dtype, device=device).normal_(generator=generator)
    parts = [links(x, weights[i], y[i], start[i], merged, middle[i] if between else None) for i in range(sets)]
    calls = [_in_order([_launches(link, make, between) for link in part]) for part in parts]
    written = [y] if middle is None else [y, middle]

    def poison() -> None:
        for tensor in written:
            tensor.fill_(math.nan)

    def check() -> dict[str, float]:
        _replay(lambda: (poison(), calls[0]()), y.device)  # a link that does not wait reads NaN
        errors = [relative_rmse(link.y, reference.gemv(link.W, link.x)) for link in parts[0]]
        errors += [
            relative_rmse(link.x, reference.between(link.source)) for link in parts[0] if link.source is not None
        ]
        return {"worst link": max(error if error == error else math.inf for error in errors)}

    def whole() -> bool:
        return not any(bool(link.y.isnan().any()) for part in parts for link in part)

    return Trial(calls, poison, whole, check, {"worst link": TOLERANCE[x["dtype"]]})


def _launches(link: Link, make: Make, between: Between | None) -> list[Any]:
    gemv = make(link.W, link.x, link.y)
    return [gemv] if link.source is None or between is None else [between(link.source, link.x), gemv]


def _in_order(launches: Sequence[Sequence[Any]]) -> Callable[[], Any]:
    flat = [launch for some in launches for launch in some]
    return lambda: [launch() for launch in flat]


def _replay(work: Callable[[], Any], device: torch.device) -> None:
    """Do the work as the timing does, in a CUDA graph, where kernels follow each other closely; eagerly on a CPU."""
    work()
    if device.type != "cuda":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize(device)


def chain_step(
    x: Case, device: Any, sets: int, seed: int, wide: bool = False, rows: int = 1, threads: bool = False
) -> Trial:
    """A chain of one rung of the ladder."""
    from labkit.gemv_coalescing import ladder

    vector = ladder.vector_of(TYPES[x["dtype"]]) if wide else 1

    def make(W: Tensor, v: Tensor, y: Tensor) -> Any:
        return ladder.thread_a_row(W, v, y) if threads else ladder.warp_a_row(W, v, y, vector, rows)

    return _chain(x, device, sets, seed, make, merged=False)


def chain_mv(x: Case, device: Any, sets: int, seed: int, merged: bool, between: bool = False) -> Trial:
    """A chain of torch.mv; between: with a small kernel before each group but the first."""
    return _chain(x, device, sets, seed, mv, merged, _between(False) if between else None)


def _between(dependent: bool) -> Between:
    from labkit.gemv.kernels import has_dependent_launch
    from labkit.gemv_coalescing import ladder

    return lambda y, x: ladder.between(y, x, dependent and has_dependent_launch(x.device))


def chain_linear(x: Case, device: Any, sets: int, seed: int, merged: bool) -> Trial:
    """A chain of F.linear."""
    return _chain(x, device, sets, seed, linear, merged)


def chain_ours(
    x: Case, device: Any, sets: int, seed: int, merged: bool, dependent: bool | None = None, between: str = ""
) -> Trial:
    """A chain of the production GEMV, each with its own choice. between: "", or "plain" or "trigger" kernels."""
    from labkit.gemv import kernels

    def make(W: Tensor, v: Tensor, y: Tensor) -> Any:
        return kernels.linear(W, v, y, dependent=dependent)

    return _chain(x, device, sets, seed, make, merged, _between(between == "trigger") if between else None)


def kernel(N: int, K: int, dtype: str, choice: Mapping[str, Any], dependent: bool, two_d: bool = False) -> Any:
    """The Launch of a shape and a choice, on memory that is never touched: to compile it."""
    from labkit.gemv import kernels
    from labkit.gemv_coalescing import ladder

    W, x, y = (torch.empty(shape, dtype=TYPES[dtype]) for shape in ((N, K), (K,), (N,)))
    if two_d:
        return ladder.two_d_tile(W, x, y, Choice(**choice))
    return kernels.gemv(W, x, y, Choice(**choice), None, dependent)


# Libraries beside cuBLAS; each is imported only where it is timed


def compiled(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """torch.compile of W @ x with coordinate-descent tuning; cuBLAS is not among its candidates for a vector."""
    from torch._inductor import config

    torch._dynamo.reset()  # a function is compiled anew for a few shapes only
    with config.patch(coordinate_descent_tuning=True):
        function = torch.compile(torch.mv, dynamic=False)
        W, vectors = _inputs(x, device, sets, seed)
        function(W[0], vectors[0])
    return _returning(x, device, sets, seed, function)


def flag_gems_mv(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """flag_gems.mv, a Triton GEMV with an autotuner of its own."""
    import flag_gems

    return _returning(x, device, sets, seed, flag_gems.mv)


def _returning(x: Case, device: Any, sets: int, seed: int, function: Callable[[Tensor, Tensor], Tensor]) -> Trial:
    """A library function that allocates its output."""
    W, vectors = _inputs(x, device, sets, seed)

    def check() -> dict[str, float]:
        return {"y": relative_rmse(function(W[0], vectors[0]), _expected(x, device, sets, seed))}

    calls = [lambda part=part: function(*part) for part in zip(W, vectors, strict=True)]
    return Trial(calls, check=check, tolerance={"y": TOLERANCE[x["dtype"]]})


def _makers() -> dict[tuple[str, str], tuple[Callable[..., Trial], Mapping[str, Any]]]:
    """(op, variant) -> its function above, and the arguments that make it this variant."""
    step = dict(zip(names.LADDER, range(1, 9), strict=True))
    gemv: dict[str, tuple[Callable[..., Trial], Mapping[str, Any]]] = {
        names.OURS: (production, {}),
        names.WARM: (production, {"kind": "hot"}),
        names.INTERLEAVED: (some_rows, {"rows": 4, "interleaved": True}),
        names.HINT: (warp_a_row, {"wide": True, "hint": "evict_first"}),
        names.READ: (read_only, {}),
        names.EMPTY: (empty, {}),
        names.EMPTY_DEPENDENT: (empty, {"dependent": True}),
        "torch.mv": (torch_mv, {}),
        "F.linear": (torch_linear, {}),
        "torch.compile": (compiled, {}),
        "flag_gems.mv": (flag_gems_mv, {}),
    }
    ladder = {
        1: (thread_a_row, {}),
        2: (thread_a_row_transposed, {}),
        3: (warp_a_row, {}),
        4: (warp_a_row, {"wide": True}),
        5: (warp_a_row, {"wide": True, "rows": 4}),
        6: (warp_a_row, {"wide": True, "rows": 4, "stages": 4}),
        7: (production, {"dependent": False}),
        8: (production, {"dependent": False, "split": 2}),
    }
    gemv |= {name: ladder[number] for name, number in step.items()}
    gemv |= {names.rows_variant(rows): (some_rows, {"rows": rows}) for rows in names.ROWS_CHOICES}
    gemv |= {
        names.plain_rows_variant(rows): (some_rows, {"rows": rows, "dependent": False}) for rows in names.PLAIN_CHOICES
    }
    gemv |= {names.two_d_variant(rows): (two_d_tile, {"rows": rows}) for rows in names.TWO_D_CHOICES}
    chain: dict[str, tuple[Callable[..., Trial], Mapping[str, Any]]] = {
        names.separate(names.LADDER[0]): (chain_step, {"threads": True}),
        names.separate(names.LADDER[2]): (chain_step, {}),
        names.separate(names.LADDER[3]): (chain_step, {"wide": True}),
        names.separate(names.LADDER[4]): (chain_step, {"wide": True, "rows": 4}),
        names.separate("ours"): (chain_ours, {"merged": False}),
        names.CHAIN_PLAIN: (chain_ours, {"merged": True, "dependent": False}),
        names.CHAIN_OURS: (chain_ours, {"merged": True}),
        names.BETWEEN_MV: (chain_mv, {"merged": True, "between": True}),
        names.BETWEEN_OURS: (chain_ours, {"merged": True, "between": "plain"}),
        names.BETWEEN_TRIGGER: (chain_ours, {"merged": True, "between": "trigger"}),
        names.READ: (read_only, {}),
    }
    for make, together in ((names.separate, False), (names.merged, True)):
        chain[make("torch.mv")] = (chain_mv, {"merged": together})
        chain[make("F.linear")] = (chain_linear, {"merged": together})
    return {("gemv", name): made for name, made in gemv.items()} | {("chain", n): made for n, made in chain.items()}


MAKERS = _makers()
