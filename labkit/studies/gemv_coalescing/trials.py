"""The study's variants made ready for timing: launchers and calls of libraries on random values, checked.

W and x of a case are the same tensors for all its variants, so that no address can favour one; each variant writes
outputs of its own. The A/A control is a second set of outputs.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.bench.spec import Arguments, Case, Trial
from labkit.kernels import ceilings, target, tuned
from labkit.kernels.gemv import choose, reference
from labkit.kernels.gemv.choose import Choice
from labkit.kernels.gemv.gemv import gemv, linear
from labkit.kernels.launch import Launch
from labkit.shapes import LINEAR
from labkit.studies.gemv_coalescing import chains, ladder, peers, sglang, vllm
from labkit.studies.gemv_coalescing.chains import Between, Make
from labkit.sweep import tuning
from labkit.sweep.trial import (
    DTYPES,
    SAME_BITS,
    Random,
    Shared,
    captured,
    differing,
    given,
    hash_of,
    relative_rmse,
    trial,
    tune_anew,
    watched,
    worst,
)

FLAG_GEMS = "flag_gems.ops.mv"  # where its kernel is

# relative RMSE: rounding of y (2^-9, 2^-12), order of the sums
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5}

shared = Shared()  # between the variants of a case


def chosen_launch(gpu: str, **asked: Any) -> Launch:
    """`launch_of_call` with the table's choices of the GPU of this name."""
    from labkit.sweep.variants import launch_of_call

    with tuned.chosen_for(gpu, choose):
        return launch_of_call(**asked)


# One GEMV


class Inputs(NamedTuple):
    """W: [sets, N, K]; x: [sets, K], the same for all, which stays in the L2 as in decode; y: [N] of set 0, float64."""

    W: Tensor
    x: Tensor
    y: Tensor


def _inputs(x: Case, device: Any, sets: int, seed: int) -> Inputs:
    """Random ones; y has unit variance."""

    def make() -> Inputs:
        N, K, dtype = x["N"], x["K"], DTYPES[x["dtype"]]
        random = Random(device, seed)
        W = random.fill(torch.empty((sets, N, K), dtype=dtype, device=device), K**-0.5)
        vector = random.fill(torch.empty(K, dtype=dtype, device=device))
        return Inputs(W, vector.expand(sets, K), reference.gemv(W[0], vector))

    return shared((x, device, sets, seed), "inputs", make)


def _trial(inputs: Inputs, make: Make, choice: Choice | None = None, dissect: bool = True) -> Trial:
    """make: a call of one buffer set. dissect: take the kernel's code apart for the row's evidence (half a second)."""
    W, vectors, expected = inputs
    y = torch.empty(W.shape[:2], dtype=W.dtype, device=W.device)
    calls = list(map(make, W, vectors, y))
    own = isinstance(calls[0], Launch)

    def check() -> dict[str, float]:
        calls[0]()
        first = y[0].clone()
        calls[0]()
        return {"y": relative_rmse(first, expected)} | ({"repeat": differing(y[0], first)} if own else {})

    def facts() -> dict[str, Any]:
        found = {"bits": hash_of(y[0])} | ({"choice": choice.as_dict()} if choice else {})
        if own:
            kernel = calls[0].compile()  # as the driver loaded it; spills: registers of a thread
            kernel._init_handles()
            found |= {"registers": kernel.n_regs, "spills": kernel.n_spills}
            found |= {"sms": target.multiprocessors(W.device)}
        return found

    tolerance = {"y": TOLERANCE[W.dtype], "repeat": SAME_BITS}
    return trial(calls, [y], check, tolerance, facts=facts, dissect=dissect)


def thread_a_row(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Step 1."""
    return _trial(_inputs(x, device, sets, seed), ladder.thread_a_row)


def thread_a_row_turned(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """Step 2: the same kernel on W stored [K, N]."""
    inputs = _inputs(x, device, sets, seed)
    return _trial(inputs._replace(W=ladder.stored_k_n(inputs.W)), ladder.thread_a_row)


def warp_a_row(x: Case, device: Any, sets: int, seed: int, **options: Any) -> Trial:
    """Steps 3 to 6, and the cache hint alone."""
    return _trial(_inputs(x, device, sets, seed), _warp_a_row(x, **options))


def _warp_a_row(x: Case, wide: bool = False, **options: Any) -> Make:
    return partial(ladder.warp_a_row, vector=ladder.vector_of(DTYPES[x["dtype"]]) if wide else 1, **options)


def candidate(x: Case, device: Any, sets: int, seed: int, **choice: Any) -> Trial:
    """One candidate of the tuned table, checked like every variant."""
    return _ours(_inputs(x, device, sets, seed), Choice(**choice))


def _ours(inputs: Inputs, choice: Choice, dependent: bool | None = None, dissect: bool = False) -> Trial:
    return _trial(inputs, partial(gemv, choice=choice, dependent=dependent), choice, dissect)


def production(
    x: Case, device: Any, sets: int, seed: int, dependent: bool | None = None, split: int = 1, kind: str = "cold"
) -> Trial:
    """The production GEMV with its tuned choice; or without dependent launch, split further, or tuned hot."""
    choice = _chosen(x, torch.device(device), kind)
    choice = replace(choice, split=split) if split > 1 else choice
    dissect = (dependent, split, kind) == (None, 1, "cold")
    return _ours(_inputs(x, device, sets, seed), choice, dependent, dissect)


def _chosen(x: Case, device: torch.device, kind: str) -> Choice:
    shape, hot = (x["N"], x["K"], DTYPES[x["dtype"]].itemsize), {}
    if kind == "hot" and device.type == "cuda":
        hot = choose.choices_of(torch.cuda.get_device_name(device), "hot")
    return hot.get(shape) or choose.choose(*shape, device)


def some_rows(
    x: Case, device: Any, sets: int, seed: int, rows: int, interleaved: bool = False, dependent: bool | None = None
) -> Trial:
    """The production kernel at a number of rows, all else as the rule has it."""
    choice = replace(_rule(x, device), rows=rows, interleaved=interleaved)
    return _ours(_inputs(x, device, sets, seed), choice, dependent)


def _rule(x: Case, device: Any) -> Choice:
    """The rule's choice for the shape of a case on a device."""
    return choose.rule(x["N"], x["K"], DTYPES[x["dtype"]].itemsize, target.multiprocessors(torch.device(device)))


def two_d_tile(x: Case, device: Any, sets: int, seed: int, rows: int) -> Trial:
    """The control of bit identity at a number of rows."""
    choice = replace(_rule(x, device), rows=rows)
    return _trial(_inputs(x, device, sets, seed), partial(ladder.two_d_tile, choice=choice), choice, dissect=False)


def read_only(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """The ceiling: W read and summed."""
    W = _weights(x, device, sets, seed)[:, None] if x.op == "chain" else _inputs(x, device, sets, seed).W
    sums = torch.empty((sets, -(-W[0].numel() // ceilings.BLOCK)), dtype=torch.float32, device=W.device)
    calls = list(map(ceilings.sum_values, W, sums))

    def check() -> dict[str, float]:
        calls[0]()
        values = W[0].double()
        return {"sum": float((sums[0].double().sum() - values.sum()).abs() / values.abs().sum())}

    return trial(calls, [sums], check, {"sum": 1e-5})


def empty(x: Case, device: Any, sets: int, seed: int, dependent: bool = False) -> Trial:
    """A kernel that does nothing; dependent: started early where the GPU can."""
    y = torch.empty(1, device=device)
    return trial([ceilings.empty_dependent(y, dependent and target.has_dependent_launch(y.device))], idle=True)


def library(x: Case, device: Any, sets: int, seed: int, call: str) -> Trial:
    """cuBLAS. call: its caller in `peers`."""
    return _trial(_inputs(x, device, sets, seed), getattr(peers, call))


def compiled(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """torch.compile."""
    inputs = _inputs(x, device, sets, seed)
    return _returning(inputs, peers.compiled(inputs.W[0], inputs.x[0]))


def flag_gems_mv(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """FlagGems, by what its tuner chooses of this case."""
    found = _returning(_inputs(x, device, sets, seed), peers.flag_gems_mv())
    tuning.choose(tune_anew([sys.modules[FLAG_GEMS]]), f"FlagGems {x.key}", found.calls[0])
    return found


def sglang_gemv(x: Case, device: Any, sets: int, seed: int) -> Trial:
    """SGLang's own; it sums in fp32 and rounds y once, as ours does, and has its tolerance."""
    return _trial(_inputs(x, device, sets, seed), sglang.gemv)


def vllm_gemv(x: Case, device: Any, sets: int, seed: int, call: str) -> Trial:
    """vLLM's own, which sum and round in the same way. call: a function of `vllm`."""
    return _returning(_inputs(x, device, sets, seed), getattr(vllm, call))


def _returning(inputs: Inputs, function: peers.Product) -> Trial:
    """A library function that allocates its output."""
    calls = [partial(function, *part) for part in zip(inputs.W, inputs.x, strict=True)]

    def check() -> dict[str, float]:
        return {"y": relative_rmse(calls[0](), inputs.y)}

    return trial(calls, check=check, tolerance={"y": TOLERANCE[inputs.W.dtype]})


def added(function: Callable[..., Any], x: Case, device: Any, sets: int, seed: int) -> Trial:
    """A function of the reader's own, function(W, x, y), on copies of its own."""
    made = _inputs(x, device, sets, seed)
    W, vectors = made.W.clone(), made.x.clone()
    y = torch.empty(W.shape[:2], dtype=W.dtype, device=W.device)
    calls = [partial(function, *part) for part in zip(W, vectors, y, strict=True)]

    def other_x(i: int, random: Random) -> None:
        vectors.copy_(random.fill(vectors[0].clone()).expand_as(vectors))

    def other_weight(i: int, random: Random) -> None:  # a single one, so large that y shows it
        N, K = W.shape[1:]
        W[:, random.below(N), random.below(K)] = N**0.5 / 4

    def expected(i: int, count: int) -> Tensor:
        return reference.gemv(W[i], vectors[i])

    def errors(exact: Tensor, found: Mapping[str, Tensor]) -> dict[str, float]:
        return {"y": relative_rmse(found["y"], exact)}

    inputs = [{"W": one, "x": vector} for one, vector in zip(W, vectors, strict=True)]
    arguments = Arguments(inputs, [{"y": out} for out in y], (other_x, other_weight), expected, errors)
    return given(calls, arguments, {"y": TOLERANCE[W.dtype]}, facts=lambda: {"bits": hash_of(y[0])})


# Chains of whole layers


def _weights(x: Case, device: Any, sets: int, seed: int) -> Tensor:
    """[sets, values] of all matrices of one period, one after the other: those of a group are adjacent rows of one."""

    def make() -> Tensor:
        groups = LINEAR[x["model"]].chain(merged=True)
        sizes = [k * n for k, (n,) in groups]
        flat, random = torch.empty((sets, sum(sizes)), dtype=DTYPES[x["dtype"]], device=device), Random(device, seed)
        for part, (k, _) in zip(flat.split(sizes, 1), groups, strict=True):
            random.fill(part, k**-0.5)
        return flat

    return shared((x, device, sets, seed), "weights", make)


def _chain(
    x: Case, device: Any, sets: int, seed: int, make: Make, merged: bool, between: Between | None = None
) -> Trial:
    weights, model = _weights(x, device, sets, seed), LINEAR[x["model"]]
    groups = model.chain(merged=True)
    first = groups[0][0]
    empty = partial(torch.empty, dtype=weights.dtype, device=device)
    y = empty((sets, sum(n for _, (n,) in groups)))
    middle = empty((sets, sum(k for k, _ in groups))) if between else None
    start = Random(device, seed + 1).fill(empty((sets, first)))
    middles = [None] * sets if middle is None else middle
    parts = list(map(partial(chains.links, model.chain(merged)), weights, y, start, middles))
    calls = [chains.in_order(part, make, between) for part in parts]
    outputs = [y] if middle is None else [y, middle[:, first:]]  # before it would be x of the first group
    poison, _ = watched(outputs)

    def check() -> dict[str, float]:
        captured([poison, calls[0]], y.device)()  # closely, as in the timing: a link that does not wait reads NaN
        errors = [relative_rmse(link.y, reference.gemv(link.W, link.x)) for link in parts[0]]
        made = [link for link in parts[0] if link.source is not None]
        return {"worst link": worst([*errors, *(relative_rmse(one.x, reference.between(one.source)) for one in made)])}

    return trial(calls, outputs, check, {"worst link": TOLERANCE[y.dtype]})


def chain_step(x: Case, device: Any, sets: int, seed: int, threads: bool = False, **options: Any) -> Trial:
    """A chain of one step of the ladder; threads: a thread a row."""
    make = ladder.thread_a_row if threads else _warp_a_row(x, **options)
    return _chain(x, device, sets, seed, make, merged=False)


def chain_library(x: Case, device: Any, sets: int, seed: int, call: str, merged: bool, between: bool = False) -> Trial:
    """A chain of cuBLAS. between: with a small kernel before each group but the first."""
    return _chain(x, device, sets, seed, getattr(peers, call), merged, _between(False) if between else None)


def chain_ours(
    x: Case, device: Any, sets: int, seed: int, merged: bool, dependent: bool | None = None, between: str = ""
) -> Trial:
    """A chain of the production GEMV, each with its own choice. between: "", or "plain" or "trigger" kernels."""
    make = partial(linear, dependent=dependent)
    return _chain(x, device, sets, seed, make, merged, _between(between == "trigger") if between else None)


def _between(dependent: bool) -> Between:
    return lambda y, x: ladder.between(y, x, dependent and target.has_dependent_launch(x.device))
