"""The study's variants made ready for timing: the launchers of `kernels` and `peers` on random values, checked."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.bench.spec import Case, Trial
from labkit.studies.machine import peers
from labkit.sweep.trial import DTYPES, SAME_BITS, Call, Random, differing, relative_rmse, trial

MIB = 2**20
CHECKED = 64  # rows of a product: float64 of all would take seconds
ROUNDED = 1e-2  # tolerance of products with floating-point operands


def _launcher(library: str, name: str) -> Callable[..., Call]:
    if library == "torch":
        return getattr(peers, name)
    from labkit.kernels import ceilings

    return getattr(ceilings, name)


def _values(case: Case, device: Any, sets: int, seed: int) -> Tensor:
    """[sets, n] fp32: sizes are MiB of one buffer."""
    return Random(device, seed)(sets, int(case["mib"] * MIB) // 4)


def read(case: Case, device: Any, sets: int, seed: int, library: str) -> Trial:
    """Every value read, and summed: by the kernel block by block, by the library in all."""
    x, blocks = _values(case, device, sets, seed), 1
    if library == "Triton":
        from labkit.kernels import ceilings

        blocks = -(-x.shape[1] // ceilings.BLOCK)
    out = torch.empty((sets, blocks), device=device)
    calls = list(map(_launcher(library, "read"), x, out))

    def check() -> dict[str, float]:
        calls[0]()
        values = x[0].double()
        return {"sum": float((out[0].double().sum() - values.sum()).abs() / values.abs().sum())}  # it may be near zero

    return trial(calls, [out], check, {"sum": 1e-5})


def in_place(case: Case, device: Any, sets: int, seed: int, library: str) -> Trial:
    """Every value multiplied by -1, which keeps its size however often it is repeated."""
    x = _values(case, device, sets, seed)
    calls = [_launcher(library, "in_place")(part, -1.0) for part in x]

    def check() -> dict[str, float]:
        before = x[0].clone()
        calls[0]()
        return {"x": differing(x[0], -before)}

    return trial(calls, check=check, tolerance={"x": SAME_BITS})


def copy(case: Case, device: Any, sets: int, seed: int, library: str) -> Trial:
    """Every value copied."""
    x = _values(case, device, sets, seed)
    y = torch.empty_like(x)
    calls = list(map(_launcher(library, "copy"), x, y))

    def check() -> dict[str, float]:
        calls[0]()
        return {"y": differing(y[0], x[0])}

    return trial(calls, [y], check, {"y": SAME_BITS})


def do_bench(case: Case, device: Any, sets: int, seed: int) -> Trial:
    """The in-place multiply under `triton.testing.do_bench`, which empties the L2 before every call."""
    import triton

    made = in_place(case, device, sets, seed, "torch")
    made.timer = lambda: [1e6 * ms for ms in triton.testing.do_bench(made.calls[0], return_mode="all")]
    return made


def product(case: Case, device: Any, sets: int, seed: int) -> Trial:
    """A square product of random values."""
    n, what = case["n"], case["what"]
    a, b = (_operand(Random(device, seed + place)(sets, n, n), what) for place in range(2))
    results = {"int8": torch.int32, "fp8": torch.bfloat16}
    out = torch.empty((sets, n, n), device=device, dtype=results.get(what, a.dtype))
    one = torch.ones((), device=device)
    make = {"int8": peers.int8_mm, "fp8": lambda a, b, out: peers.fp8_mm(a, b, one, out)}.get(what, peers.mm)
    calls = list(map(make, a, b, out))

    def check() -> dict[str, float]:
        calls[0]()
        right = b[0].mT if what in results else b[0]
        return {"out": relative_rmse(out[0, :CHECKED], a[0, :CHECKED].double() @ right.double())}

    floating = out.dtype.is_floating_point
    return trial(calls, [out] if floating else [], check, {"out": ROUNDED if floating else 0.0})


def _operand(values: Tensor, what: str) -> Tensor:
    if what == "int8":
        return (16 * values).round().clamp(-127, 127).to(torch.int8)
    return values.to(torch.float8_e4m3fn if what == "fp8" else DTYPES[what])


def launch(case: Case, device: Any, sets: int, seed: int, library: str) -> Trial:
    """One call that does nothing, or next to it."""
    return trial([_launcher(library, "zero" if library == "torch" else "empty")(torch.zeros(1, device=device))])


def host_copy(case: Case, device: Any, sets: int, seed: int, memory: str) -> Trial:
    """Bytes of the host, pageable or pinned, copied to the device."""
    host = torch.randint(0, 255, (case["bytes"],), dtype=torch.uint8)
    host = host.pin_memory() if memory == "pinned" else host
    out = torch.zeros(case["bytes"], dtype=torch.uint8, device=device)
    call = peers.copy_from_host(host, out, memory == "pinned")

    def check() -> dict[str, float]:
        out.zero_()
        call()
        return {"out": differing(out.cpu(), host)}

    return trial([call], check=check, tolerance={"out": SAME_BITS})
