"""Study 00: ceilings of memory and matrix units against size, the cost of launches and of host-to-device copies."""

from collections.abc import Mapping
from typing import Any

from labkit.bench.spec import CACHES, Case, Floor, Study, Variant, integer, list_of, one_of, variant

MEMORY = ("read", "in_place", "copy")
MATRIX = ("bf16", "fp16", "fp8", "int8")
MIB = 2**20
SANITY_MIB = 256  # the one size at which Triton's own do_bench is shown beside our timing
HOST_BYTES = (4 * 2**10, 64 * MIB)
ONE_SET = 2**40  # bytes: one buffer set, where there is nothing to keep cold
TRIALS, PEERS = (f"labkit.studies.machine.{name}" for name in ("trials", "peers"))
KERNELS = "labkit.kernels.ceilings"
PRODUCTS = {"bf16": "mm", "fp16": "mm", "fp8": "fp8_mm", "int8": "int8_mm"}  # kind -> PyTorch's, of `peers`


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
        return [
            _ceiling(f"{library}, {mode}", "launch", source, {"library": library}, mode=mode)
            for library, source in (("Triton", f"{KERNELS}:empty"), ("torch", f"{PEERS}:zero"))
            for mode in ("graph", "eager")
        ]
    if case.op == "copy":
        source = f"{PEERS}:copy_from_host"
        return [_ceiling(of, "host_copy", source, {"memory": of}, mode="eager") for of in ("pageable", "pinned")]
    what = case["what"]
    if what in MATRIX:
        return [_ceiling("torch", "product", f"{PEERS}:{PRODUCTS[what]}")]
    found = [
        _ceiling(library, what, f"{module}:{what}", {"library": library}, caches=CACHES)
        for library, module in (("torch", PEERS), ("Triton", KERNELS))
    ]
    if what == "in_place" and case["mib"] == SANITY_MIB:
        source = f"{PEERS}:in_place"
        found.append(variant("torch, timed by do_bench", "control", f"{TRIALS}:do_bench", source=source, mode="eager"))
    return found


def _ceiling(name: str, trial: str, source: str, options: Mapping[str, Any] | None = None, **how: Any) -> Variant:
    return variant(name, "ceiling", f"{TRIALS}:{trial}", options, source=source, **how)


def control(case: Case) -> str:
    """The variant that the A/A control repeats."""
    if case.op == "launch":
        return "Triton, graph"
    return "pinned" if case.op == "copy" else "torch"


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
