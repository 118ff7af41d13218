"""Study 00: ceilings of memory and matrix units against size, the cost of launches and of host-to-device copies."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.bench.spec import Case, Floor, Study, Trial, Variant, integer, list_of, one_of

MEMORY = ("read", "in_place", "copy")
MATRIX = ("bf16", "fp16", "fp8", "int8")
MIB = 2**20
SANITY_MIB = 256  # the one size at which Triton's own do_bench is shown beside our timing
HOST_BYTES = (4 * 2**10, 64 * MIB)
EXACT = 0.0
ONE_SET = 2**40  # bytes: one buffer set, where there is nothing to keep cold


def cases(parameters: Mapping[str, Any]) -> list[Case]:
    """The cases of the notebook's parameters: sizes_mib, matrix_sizes and kinds."""
    kinds = parameters["kinds"]
    found = [Case("launch", {"what": "empty"})] if "launch" in kinds else []
    found += [Case("copy", {"what": "h2d", "bytes": size}) for size in HOST_BYTES if "h2d" in kinds]
    found += [Case("ceiling", {"what": w, "mib": m}) for w in MEMORY if w in kinds for m in parameters["sizes_mib"]]
    found += [Case("ceiling", {"what": w, "n": n}) for w in MATRIX if w in kinds for n in parameters["matrix_sizes"]]
    return found


def floor(case: Case) -> Floor:
    """Least work of a case; nothing is predicted, since these measurements are what predictions are made from."""
    if case.op == "launch":
        return Floor(0, limit="", set_bytes=ONE_SET)
    if case.op == "copy":
        return Floor(case["bytes"], limit="", set_bytes=ONE_SET)
    if case["what"] in MATRIX:
        n, itemsize = case["n"], 1 if case["what"] in ("fp8", "int8") else 2
        return Floor(n * n * (2 * itemsize + (4 if case["what"] == "int8" else 2)), 2 * n**3, limit="")
    size = case["mib"] * MIB
    if case["what"] == "read":
        return Floor(size, limit="", hot_at_any_size=True)
    footprint = size * (2 if case["what"] == "copy" else 1)
    return Floor(2 * size, limit="", set_bytes=footprint, hot_at_any_size=True)  # the curve shows the L2's knee


def variants(case: Case) -> list[Variant]:
    """The ways to reach a ceiling: a library's call and a plain Triton kernel."""
    if case.op == "launch":
        return [_launch_variant(name, mode) for name in ("Triton", "torch") for mode in ("graph", "eager")]
    if case.op == "copy":
        return [_host_copy_variant(kind) for kind in ("pageable", "pinned")]
    if case["what"] in MATRIX:
        return [Variant("torch", "ceiling", "labkit.machine.study:_prepare_matmul", _prepare_matmul, {}, ("cold",))]
    found = [_memory_variant(case["what"], library) for library in ("torch", "Triton")]
    if case["what"] == "in_place" and case["mib"] == SANITY_MIB:
        source = "labkit.machine.study:_prepare_do_bench"
        found.append(Variant("torch, timed by do_bench", "control", source, _prepare_do_bench, {}, ("cold",), "eager"))
    return found


def control(case: Case) -> str:
    """The variant that the A/A control repeats."""
    if case.op == "launch":
        return "Triton, graph"
    return "pinned" if case.op == "copy" else "torch"


def _memory_variant(what: str, library: str) -> Variant:
    def prepare(case: Case, device: Any, sets: int, seed: int) -> Trial:
        return _PREPARE[what](case, device, sets, seed, library)

    source = f"labkit.machine.study:_prepare_{what}"
    return Variant(library, "ceiling", source, prepare, {"library": library})


def _random(shape: tuple[int, ...], device: Any, seed: int) -> Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed))


def _values(case: Case, device: Any, sets: int, seed: int) -> Tensor:
    """[sets, n] fp32: sizes are MiB of one buffer."""
    return _random((sets, int(case["mib"] * MIB) // 4), device, seed)


def _prepare_read(case: Case, device: Any, sets: int, seed: int, library: str) -> Trial:
    from labkit.machine import kernels

    x = _values(case, device, sets, seed)
    blocks = -(-x.shape[1] // kernels.BLOCK) if library == "Triton" else 1
    out = torch.empty((sets, blocks), device=device)
    if library == "Triton":
        calls: list[Callable[[], Any]] = [kernels.read(x[i], out[i]) for i in range(sets)]
    else:
        calls = [_bind(torch.sum, x[i], 0, keepdim=True, out=out[i]) for i in range(sets)]

    def check() -> dict[str, float]:
        calls[0]()
        scale = x[0].double().abs().sum()  # a sum of signed values may be near zero
        return {"sum": float((out[0].double().sum() - x[0].double().sum()).abs() / scale)}

    launch = calls[0] if library == "Triton" else None
    return Trial(calls, *_watch(out), check, {"sum": 1e-5}, launch)


def _prepare_in_place(case: Case, device: Any, sets: int, seed: int, library: str) -> Trial:
    from labkit.machine import kernels

    x = _values(case, device, sets, seed)
    # Multiplying by -1 keeps the values as they are in size, however often it is repeated.
    triton_kernel = library == "Triton"
    calls = [kernels.in_place(x[i], -1.0) if triton_kernel else _bind(x[i].mul_, -1.0) for i in range(sets)]

    def check() -> dict[str, float]:
        before = x[0].clone()
        calls[0]()
        return {"x": _different(x[0], -before)}

    return Trial(calls, None, None, check, {"x": EXACT}, calls[0] if triton_kernel else None)


def _prepare_copy(case: Case, device: Any, sets: int, seed: int, library: str) -> Trial:
    from labkit.machine import kernels

    x = _values(case, device, sets, seed)
    y = torch.empty_like(x)
    triton_kernel = library == "Triton"
    calls = [kernels.copy(x[i], y[i]) if triton_kernel else _bind(y[i].copy_, x[i]) for i in range(sets)]

    def check() -> dict[str, float]:
        calls[0]()
        return {"y": _different(y[0], x[0])}

    return Trial(calls, *_watch(y), check, {"y": EXACT}, calls[0] if triton_kernel else None)


_PREPARE = {"read": _prepare_read, "in_place": _prepare_in_place, "copy": _prepare_copy}


def _prepare_do_bench(case: Case, device: Any, sets: int, seed: int) -> Trial:
    """The in-place multiply under `triton.testing.do_bench`, which empties the L2 before every call."""
    import triton

    trial = _prepare_in_place(case, device, sets, seed, "torch")
    trial.timer = lambda: [1e6 * ms for ms in triton.testing.do_bench(trial.calls[0], return_mode="all")]
    return trial


def _prepare_matmul(case: Case, device: Any, sets: int, seed: int) -> Trial:
    n, what = case["n"], case["what"]
    a = _random((sets, n, n), device, seed)
    b = _random((sets, n, n), device, seed + 1)
    if what == "int8":
        a, b = (16 * a).round().clamp(-127, 127).to(torch.int8), (16 * b).round().clamp(-127, 127).to(torch.int8)
        out = torch.empty((sets, n, n), device=device, dtype=torch.int32)
        calls = [_bind(torch._int_mm, a[i], b[i].t(), out=out[i]) for i in range(sets)]
        return _matmul_trial(calls, a, b.mT, out, 0.0)
    if what == "fp8":
        one = torch.ones((), device=device)
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        out = torch.empty((sets, n, n), device=device, dtype=torch.bfloat16)
        calls = [
            _bind(torch._scaled_mm, a[i], b[i].t(), one, one, out_dtype=out.dtype, out=out[i]) for i in range(sets)
        ]
        return _matmul_trial(calls, a, b.mT, out, 1e-2)
    dtype = torch.bfloat16 if what == "bf16" else torch.float16
    a, b = a.to(dtype), b.to(dtype)
    out = torch.empty((sets, n, n), device=device, dtype=dtype)
    return _matmul_trial([_bind(torch.mm, a[i], b[i], out=out[i]) for i in range(sets)], a, b, out, 1e-2)


def _matmul_trial(calls: list[Callable[[], Any]], a: Tensor, b: Tensor, out: Tensor, tolerance: float) -> Trial:
    def check() -> dict[str, float]:
        calls[0]()
        expected = a[0, :64].double() @ b[0].double()  # 64 rows: a float64 product of all would take seconds
        return {"out": float((out[0, :64].double() - expected).norm() / expected.norm())}

    watch = _watch(out) if out.dtype.is_floating_point else (None, None)
    return Trial(calls, *watch, check, {"out": tolerance})


def _launch_variant(library: str, mode: str) -> Variant:
    def prepare(case: Case, device: Any, sets: int, seed: int) -> Trial:
        from labkit.machine import kernels

        x = torch.zeros(1, device=device)
        launch = kernels.empty(x) if library == "Triton" else None
        return Trial([launch or x.zero_], launch=launch)

    options = {"library": library}
    return Variant(
        f"{library}, {mode}", "ceiling", "labkit.machine.study:_launch_variant", prepare, options, ("cold",), mode
    )


def _host_copy_variant(kind: str) -> Variant:
    def prepare(case: Case, device: Any, sets: int, seed: int) -> Trial:
        host = torch.randint(0, 255, (case["bytes"],), dtype=torch.uint8)
        host = host.pin_memory() if kind == "pinned" else host
        out = torch.zeros(case["bytes"], dtype=torch.uint8, device=device)
        call = _bind(out.copy_, host, non_blocking=kind == "pinned")

        def check() -> dict[str, float]:
            out.zero_()
            call()
            return {"out": _different(out.cpu(), host)}

        return Trial([call], None, None, check, {"out": EXACT})

    source = "labkit.machine.study:_host_copy_variant"
    return Variant(kind, "ceiling", source, prepare, {"memory": kind}, ("cold",), "eager")


def _bind(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: function(*args, **options)


def _watch(out: Tensor) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Poison an output with NaN, and tell whether it has been written since."""
    return lambda: out.fill_(float("nan")), lambda: not bool(out.isnan().any())


def _different(found: Tensor, expected: Tensor) -> float:
    """Share of values that differ at all."""
    return float((found != expected).double().mean())


STUDY = Study(
    name="machine",
    title="What a GPU can do",
    summary="Ceilings of memory and matrix units against size, the cost of a launch, host-to-device copies, clocks.",
    cases=cases,
    variants=variants,
    control=control,
    floor=floor,
    parameters={
        "kinds": list_of(one_of("launch", "h2d", *MEMORY, *MATRIX)),
        "sizes_mib": list_of(integer(1, 8192)),
        "matrix_sizes": list_of(integer(256, 16384)),
    },
    tiny=tuple(Case("ceiling", {"what": what, "mib": 1}) for what in MEMORY),
)
