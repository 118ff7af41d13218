"""The libraries' ways, as calls of tensors that are there before.

| variant           | what it is                                                                                      |
|-------------------|-------------------------------------------------------------------------------------------------|
| linear            | F.linear on weights that were dequantised before                                                |
| linear_layer      | a layer of it, gate and up as one matrix                                                        |
| dequantise_linear | weights dequantised in every call, then `linear`                                                |
| gemlite           | its product of 4 or 8 bits a weight, with its longest tuning                                    |
| grouped_mm        | F.grouped_mm on weights that were dequantised before; rows are sorted and gathered in each call |

gemlite, and what needs Triton, are imported in the function that calls them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.kernels.gguf.formats import Packed
from labkit.kernels.gguf.layers import silu_up

Call = Callable[[], Any]


def linear(W: Tensor, x: Tensor, y: Tensor) -> Call:
    """y = x Wᵀ."""
    return lambda: torch.ops.aten.linear.out(x, W, None, out=y)


def linear_layer(gate_up: Tensor, down: Tensor, x: Tensor, y: Tensor) -> list[Call]:
    """gate_up: [2 width, hidden], gate's rows first; down: [hidden, width]."""
    width = down.shape[1]
    both = x.new_empty((len(x), 2 * width))
    gate, up = both.chunk(2, 1)
    middle = x.new_empty((len(x), width))
    return [linear(gate_up, x, both), lambda: silu_up(gate, up, middle), linear(down, middle, y)]


def dequantise_linear(W: Packed, space: Tensor, x: Tensor, y: Tensor) -> list[Call]:
    """space: for the weights, [rows, columns]."""
    from labkit.studies.batched_ffn import ablations

    return [ablations.dequantise(W, space), linear(space, x, y)]


def tune_gemlite() -> None:
    """Have gemlite try all that it knows from now on; once a process, since it then loads its kernels anew."""
    import gemlite as library

    library.set_autotune("max")


@contextmanager
def timed_by(bench: Callable[..., Sequence[float]]) -> Iterator[None]:
    """While this is entered, whatever Triton tunes is timed by `bench`, which takes what `do_bench` does."""
    from triton.runtime import driver

    before = driver.active.get_benchmarker
    driver.active.get_benchmarker = lambda: bench
    try:
        yield
    finally:
        driver.active.get_benchmarker = before


def gemlite_versions() -> str:
    """What its tuning depends on, as the name of a file: "gemlite-0.5.1-triton-3.6.0"."""
    return "-".join(part for name in ("gemlite", "triton") for part in (name, metadata.version(name)))


def keep_gemlite(file: Path) -> None:
    """Write down what gemlite has tuned."""
    import gemlite as library

    library.cache_config(str(file))


def take_gemlite(file: Path) -> None:
    """Have gemlite run as was written down."""
    import gemlite as library

    library.load_config(str(file))


def gemlite(bits: int, q: Tensor, scales: Tensor, zeros: Tensor, device: Any) -> Callable[[Tensor], Tensor]:
    """The function of x [N, K] that gives y, in a tensor of its own, as gemlite does it.

    q: uint8 [rows, K], of so many bits, 4 or 8; scales, zeros: [rows, K / 32] in x's dtype: a weight is (q - zero) ·
    scale.
    """
    from gemlite.helper import A16W4_HQQ_INT, A16W8_HQQ_INT

    helper = A16W4_HQQ_INT if bits == 4 else A16W8_HQQ_INT
    return helper(device=str(device), dtype=scales.dtype).from_weights(q, scales, zeros)


def grouped_mm(gate_up: Tensor, down: Tensor, work: Any) -> Call:
    """gate_up: [E, hidden, 2 width], down: [E, width, hidden]; work: of `routed`."""
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
