"""Study 02: what coalescing is worth in a GEMV, how many rows a program should take, what a chain of them reaches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.bench.spec import Added, Case, Floor, Study, Variant, lazy, list_of, one_of
from labkit.shapes import LINEAR, OTHER_LINEAR
from labkit.studies.gemv_coalescing import claims
from labkit.studies.gemv_coalescing import variants as names

OTHER = "other shapes"
# A compiler's tuning takes seconds a shape, so the peers are timed at the shapes that sources give figures for.
PEER_SHAPES = ((64, 2560), (1024, 2560), (2560, 4096), (9216, 2560), (2560, 9216), (4096, 4096), (152064, 2560))
ALL_DTYPES = "Llama-3.2-1B"  # the model whose shapes are timed in other dtypes than bf16 too


def cases(parameters: Mapping[str, Any]) -> list[Case]:
    """What is tuned, then every shape of the models in every dtype, then the models' chains."""
    models, dtypes = parameters["models"], parameters["dtypes"]
    shapes = [shape for name in models for shape in (LINEAR[name].shapes() if name in LINEAR else OTHER_LINEAR)]
    wanted = [
        {"N": shape[0], "K": shape[1], "dtype": dtype}
        for dtype in dtypes
        for shape in dict.fromkeys(shapes)
        if dtype == "bf16" or shape in LINEAR[ALL_DTYPES].shapes()
    ]
    found = [Case(op, params) for op in ("tune", "gemv") for params in wanted]
    chains = [name for name in models if name in LINEAR and "bf16" in dtypes]
    return found + [Case("chain", {"model": name, "dtype": "bf16"}) for name in chains]


def floor(x: Case) -> Floor:
    """The weights and x read once, y written."""
    size = names.SIZES[x["dtype"]]
    chain = [(n, k) for k, (n,) in LINEAR[x["model"]].chain(merged=True)] if x.op == "chain" else [(x["N"], x["K"])]
    weights, vectors = sum(n * k for n, k in chain), sum(n + k for n, k in chain)
    return Floor((weights + vectors) * size, 2 * weights, "read", set_bytes=weights * size)


def variants(x: Case) -> list[Variant]:
    """Candidates of the table (tune); the ladder, the rows, the libraries (gemv); whole layers (chain)."""
    if x.op == "tune":
        return [names.candidate(choice) for choice in _candidates(x)]
    if x.op == "chain":
        return list(names.CHAINS)
    if x["dtype"] != "bf16" or (x["N"], x["K"]) not in PEER_SHAPES:
        return list(names.GEMVS)
    left_out = names.SGLANG if x["N"] > names.SGLANG_ROWS else ""
    return [*names.GEMVS, *(one for one in names.PEER_GEMVS if one.name != left_out)]


def control(x: Case) -> str:
    """The variant that the A/A control repeats."""
    if x.op == "tune":
        return str(_candidates(x)[0])
    return names.CHAIN_OURS if x.op == "chain" else names.OURS


def _candidates(x: Case) -> list[Any]:
    from labkit.kernels.gemv import choose

    return choose.candidates(x["N"], x["K"], names.SIZES[x["dtype"]])


def kernels(some: Sequence[Case], capability: int, gpu: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The lab's own kernels, which are compiled for each shape, by the table of the GPU; not those of a chain."""
    from labkit.kernels import tuned
    from labkit.kernels.gemv import choose
    from labkit.sweep.variants import ahead

    wanted = [(x, one) for x in some if x.op != "chain" for one in variants(x)]
    with tuned.chosen_for(gpu, choose):
        found = ahead("gemv_coalescing", wanted, capability)
    return [("labkit.studies.gemv_coalescing.trials:chosen_launch", {**asked, "gpu": gpu}) for _, asked in found]


def _warmed(case: Case, variant: Variant) -> str:
    """The shape of SGLang's GEMV, which is built for each, and takes seconds; else empty.

    What torch.compile and FlagGems choose by timing they keep on disk: they do it when nothing runs beside them.
    """
    return case.key if variant.name == names.SGLANG else ""


def _anew(case: Case, variant: Variant) -> str:
    """vLLM's kernels, of which one is written in the CuTe DSL, which keeps nothing on disk; else empty."""
    return "any shape" if variant.name in names.VLLM else ""


def counted(parameters: Mapping[str, Any]) -> list[tuple[Case, str]]:
    """The ladder at the bf16 shape that is nearest to 16 MB of weights."""
    some = [case for case in cases(parameters) if case.op == "gemv" and case["dtype"] == "bf16"]
    if not some:
        return []
    case = min(some, key=lambda case: abs(case["N"] * case["K"] - 2**23))
    return [(case, name) for name in (*names.LADDER, names.OURS) if name != names.SPLIT_K]


def settle(rows: Path, folder: Path) -> None:
    """Write the tuned table of a GPU from the rows that its folder, which has its name, holds, for cold and hot L2."""
    from labkit.kernels.gemv import choose
    from labkit.studies.gemv_coalescing import tables

    before = {cache: choose.choices_of(folder.name, cache) for cache in ("cold", "hot")}
    choose.write(folder, tables.fastest(rows, before))


STUDY = Study(
    name="gemv_coalescing",
    title="GEMV: coalescing, rows a program, and a chain of them",
    summary="What is coalescing worth in a GEMV, step by step; how many rows should a program take; who beats cuBLAS?",
    cases=cases,
    variants=variants,
    control=control,
    floor=floor,
    claims=claims.CLAIMS,
    pairs=claims.pairs,
    parameters={
        "models": list_of(one_of(*LINEAR, OTHER)),
        "dtypes": list_of(one_of(*names.SIZES)),
    },
    tiny=tuple(
        Case("gemv", {"N": n, "K": k, "dtype": dtype}) for n, k, dtype in ((70, 96, "fp32"), (33, 1000, "fp16"))
    ),
    early=lambda case: case.op == "tune",
    settle=settle,
    warmed=_warmed,
    anew=_anew,
    imports=("torch._inductor.compile_fx", "flag_gems"),
    counted=counted,
    added=Added(
        ("W", "x", "y"),
        "W: [N, K], x: [K], y: [N], all of the case's dtype, contiguous; the function writes y = W x.",
        lazy("labkit.studies.gemv_coalescing.trials:added"),
        lambda case: case.op == "gemv",
        ("cold",),
        ("dtype", tuple(names.SIZES)),
    ),
    kernels=kernels,
)
