"""What the trials of all studies share: random inputs, buffers of a case, outputs that are watched, errors, calls."""

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from labkit.bench.spec import Arguments, Trial
from labkit.kernels.launch import Launch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
SAME_BITS = 0.0  # the tolerance of `differing`

Call = Callable[[], Any]
Check = Callable[[], Mapping[str, float]]


def trial(
    calls: Sequence[Call],
    outputs: Iterable[Tensor] = (),
    check: Check | None = None,
    tolerance: Mapping[str, float] | None = None,
    **more: Any,
) -> Trial:
    """A trial whose outputs are watched; its launch is the first call, if that is one. more: other fields of `Trial`.

    outputs: of all buffer sets, such as can hold NaN; none: what is written is not asked after.
    """
    launch = calls[0] if isinstance(calls[0], Launch) else None
    poison, written = watched(outputs)
    return Trial(calls, poison, written, check, tolerance or {}, **({"launch": launch} | more))


def given(calls: Sequence[Call], arguments: Arguments, tolerance: Mapping[str, float], **more: Any) -> Trial:
    """A trial of a reader's function, judged by what it was given, even if it changes that."""

    def check() -> Mapping[str, float]:
        expected = arguments.expected(0, 1)
        calls[0]()
        return arguments.errors(expected, left(arguments, 0))

    outputs = [out for one in arguments.outputs for out in one.values()]
    return trial(calls, outputs, check, tolerance, arguments=arguments, **more)


def some_of(count: int, most: int) -> list[int]:
    """So many of the numbers below `count`, or all: such as a function that is checked cannot know before."""
    return sorted(random.SystemRandom().sample(range(count), min(count, most)))


def left(arguments: Arguments, i: int) -> dict[str, Tensor]:
    """Copies of what calls of a buffer set left."""
    found = arguments.results(i) if arguments.results else arguments.outputs[i]
    return {name: one.clone() for name, one in found.items()}


def watched(outputs: Iterable[Tensor]) -> tuple[Call | None, Callable[[], bool] | None]:
    """poison, which fills the outputs with NaN, and written, whether none of them holds any; None without outputs."""
    outputs = list(outputs)
    if not outputs:
        return None, None

    def poison() -> None:
        for out in outputs:
            out.fill_(math.nan)

    def written() -> bool:
        return not any(bool(out.isnan().any()) for out in outputs)

    return poison, written


# Inputs


class Shared:
    """What the trials of one owner have in common, such as the weights of a model: another owner's is let go first."""

    def __init__(self) -> None:
        self.owner: Any = None
        self.parts: dict[Any, Any] = {}

    def __call__(self, owner: Any, name: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, kept under its name until another owner asks for anything."""
        if owner != self.owner:
            self.owner, self.parts = owner, {}
        if name not in self.parts:
            self.parts[name] = make()
        return self.parts[name]


class Random:
    """Normal values of one seed, in the order in which they are asked for. dtype: of what a call returns."""

    def __init__(self, device: Any, seed: int, dtype: torch.dtype = torch.float32):
        self.device, self.dtype = device, dtype
        meta = torch.device(device).type == "meta"  # there are no values to draw
        self.generator = None if meta else torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, std: float = 1.0) -> Tensor:
        """A tensor of this shape: drawn in fp32, then rounded."""
        return self.fill(torch.empty(shape, device=self.device), std).to(self.dtype)

    def fill(self, tensor: Tensor, std: float = 1.0) -> Tensor:
        """The tensor, filled with values that are drawn in its own dtype; of fp8, which torch cannot, rounded."""
        if self.generator is None:  # without memory: torch would first import its compiler, seconds in each process
            return tensor
        if tensor.dtype.itemsize == 1:
            return tensor.copy_(self(*tensor.shape, std=std))
        return tensor.normal_(0, std, generator=self.generator)

    def below(self, count: int) -> int:
        """One of the numbers below `count`."""
        return int(torch.randint(count, (), device=self.device, generator=self.generator))

    def order(self, count: int) -> Tensor:
        """The numbers below `count`, shuffled."""
        return torch.randperm(count, device=self.device, generator=self.generator)


# Errors


def relative_rmse(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖, float64."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


def differing(found: Tensor, expected: Tensor) -> float:
    """Share of values whose bits are not the same; NaN is never the same."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    unlike = (found.view(kind) != expected.view(kind)) | found.isnan()
    return float(unlike.double().mean())


def worst(errors: Iterable[float]) -> float:
    """The largest error; infinite if one is NaN, which `max` may pass over."""
    return max(error if error == error else math.inf for error in errors)


def hash_of(values: Tensor) -> str:
    """Of the bits of some values, 12 hexadecimal digits: a row's fact that can be compared between variants."""
    return hashlib.sha256(values.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


# Calls of others, which tune themselves

TUNING_MS = (2, 10)  # of warming up and of timing, for each choice: there are dozens, and Triton's own are 25 and 100


def tune_anew(modules: Iterable[ModuleType]) -> list[Any]:
    """Triton's autotuners in these modules, which forget what they have chosen; called before a new case.

    Their keys do not say how many tokens there are: what suits the first case would be kept for all others. What an
    earlier process wrote to disk is not taken either.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    found = {id(one): one for module in modules for value in vars(module).values() for one in _chain(value, Autotuner)}
    for one in found.values():
        one.cache = {}  # FlagGems' own is a file, which would be read
        vars(one).pop("best_config", None)
        one.cache_results = False
        one.do_bench = partial(do_bench, warmup=TUNING_MS[0], rep=TUNING_MS[1])
    return list(found.values())


def _chain(kernel: Any, kind: type) -> Iterator[Any]:
    """Those of a kind among the decorators around a kernel."""
    while hasattr(kernel, "fn"):
        if isinstance(kernel, kind):
            yield kernel
        kernel = kernel.fn


def chosen(tuners: Iterable[Any]) -> dict[str, str]:
    """Name of a kernel -> the configuration that its autotuner has chosen, of those that have."""
    return {one.base_fn.__name__: str(one.best_config) for one in tuners if hasattr(one, "best_config")}


# Calls


def in_order(calls: Any) -> Call:
    """One call of a list of them, in order; what is no list is returned itself, so that a `Launch` stays one."""
    if not isinstance(calls, list):
        return calls
    return lambda: [call() for call in calls] and None


def kept(calls: Sequence[Call]) -> list[Call]:
    """The calls, whose results live until the next call of the same set.

    Dropped at once, the allocator would give every set the same memory for them, which would stay in L2.
    """
    results: list[Any] = [None] * len(calls)

    def call(i: int) -> Any:
        results[i] = calls[i]()
        return results[i]

    return [partial(call, i) for i in range(len(calls))]


def captured(calls: Sequence[Call], device: torch.device) -> Call:
    """One call of several: on a GPU their CUDA graph, which takes the host as long as one launch. They run once here.

    On a CPU: one after the other, and nothing runs here.
    """
    if device.type != "cuda":
        return in_order(list(calls))
    run = in_order(list(calls))
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return partial(_replay, graph, run)


def repeated(step: Call, changed: Iterable[Tensor], device: torch.device) -> Call:
    """`captured` of a step that is repeated. changed: tensors that it changes; they are as before when this returns."""
    kept_aside = [(tensor, tensor.clone()) for tensor in changed]
    call = captured([step], device)
    for tensor, before in kept_aside:
        tensor.copy_(before)
    return call


def _replay(graph: Any, run: Call) -> None:
    """run: what was captured; the graph does not itself keep its tensors."""
    graph.replay()
