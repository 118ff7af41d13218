"""What the compiler made of a kernel: registers, load widths, matrix instructions; with or without a GPU.

Everything is read from the cubin, so that a figure means the same for a kernel compiled here for another GPU and for
the one that ran. It depends on Triton's version: evidence made here explains no timing recorded with another one.
"""

import hashlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import host, isolated, paths
from labkit.bench.records import first_line, write_atomic
from labkit.evidence import roofline, workers
from labkit.kernels.launch import Launch
from labkit.kernels.offline import CAPABILITIES, offline

# Where a worker gets a Launch with CPU tensors from: "module:function" and its keyword arguments, JSON. To compile
# ahead, the function may also return several; with DISSECT among the arguments, which is not handed on, nobody asks for
# their evidence if it is false.
Source = tuple[str, Mapping[str, Any]]
DISSECT = "dissect"


def build(launch: Launch, capability: int | None = None) -> Any:
    """Triton's compiled kernel of a launch: for `capability` without a GPU, for the active GPU if None.

    RuntimeError if the kernel was decorated for Triton's interpreter.
    """
    from triton.runtime.interpreter import InterpretedFunction

    if isinstance(launch.kernel, InterpretedFunction):
        name = launch.kernel.fn.__name__
        raise RuntimeError(f"{name} was made for the interpreter (TRITON_INTERPRET=1): compile it in another process")
    if capability is None:
        return launch.compile()
    with offline(capability):
        return launch.compile()


def prebuild(sources: Sequence[Source], capability: int, marks: Path | None = None) -> list[str]:
    """Compile many kernels on all cores into Triton's cache, where a process that runs them finds them.

    They are disassembled too, which is slow as well: `evidence` then finds the counts on disk. Returns why some could
    not be compiled, a line each: the others are all the same, and what runs them will say of which kernel it is true.
    marks: a folder in which each that is compiled is marked; what is marked there is left out, since to make and look
    up a launch takes seconds too. IsolatedError if a process dies.
    """
    if not (wanted := _unmarked(sources, capability, marks)):
        return []
    count = min(host.cores(), len(wanted))
    parts = workers.share(f"{__name__}:build_free", wanted, capability, count=count, env=workers.COMPILING)
    return [problem for part in parts for problem in part]


def _unmarked(sources: Sequence[Source], capability: int, marks: Path | None) -> list[tuple[list[Any], str]]:
    """The sources that are not marked in a folder, each with the file that marks it; without a folder all, with ""."""
    if marks is None:
        return [(list(source), "") for source in sources]
    texts = [json.dumps([*source, capability], sort_keys=True) for source in sources]
    named = [marks / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.built" for text in texts]
    return [(list(source), str(mark)) for source, mark in zip(sources, named, strict=True) if not mark.exists()]


def build_free(wanted: Sequence[tuple[Source, str]], capability: int, taken: str) -> list[str]:
    """In a worker: compile the Launch, or the list of them, of sources, and disassemble it for its evidence.

    wanted: each source with the file that marks it, or "". taken: as `workers.free` takes it. Returns what went wrong,
    one line for each source of which something did.
    """
    problems = []
    for source, mark in workers.free(wanted, taken):
        try:
            _build_ahead(source, capability)
        except Exception as problem:  # a variant that cannot be made is a row with its reason, once it is measured
            problems.append(first_line(problem))
        else:
            if mark:
                Path(mark).touch()
    return problems


def _build_ahead(source: Source, capability: int) -> None:
    found = launch_of(source, capability)
    for launch in found if isinstance(found, list) else [found]:
        if kernel := build(launch, capability):  # a library's own launch gives none
            if dissected(source):
                describe(kernel)
            _build_launcher(kernel)


def _build_launcher(kernel: Any) -> None:
    """Have Triton compile the C function that launches a kernel, as it did until 3.6 at the first launch of each kind.

    It is kept on disk like the kernel. Nothing where the GPU's driver is not installed.
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        with suppress(Exception):
            driver.CudaLauncher(kernel.src, kernel.metadata)


def evidence(launch: Launch, capability: int | None = None) -> dict[str, Any]:
    """`describe` of a launch, compiled as `build` does, and ctas_per_sm, the CTAs that fit on one SM at once.

    The latter is None for a GPU whose limits roofline.py does not have.
    """
    found = describe(build(launch, capability))
    size = (found["registers"], found["shared_bytes"], found["num_warps"])
    known = found["arch"] in roofline.LIMITS
    return found | {"ctas_per_sm": roofline.occupancy(*size, found["arch"]) if known else None}


def describe(compiled: Any) -> dict[str, Any]:
    """What is in a compiled kernel (Triton's CompiledKernel), as a JSON object.

    arch (90 for sm_90), triton, num_warps, num_stages; registers a thread; spill_bytes of stack a thread, with the
    instructions that move them in spill_stores and spill_loads; shared_bytes a CTA (Triton's are all dynamic); loads
    and stores of global memory: instructions by bits a thread ("tma" and "bulk" where the copy engine does it);
    atomics, shuffles, barriers (of a CTA), matrix (instructions by mnemonic) and instructions: each counted as it
    stands in the code, however often it runs.
    FileNotFoundError if Triton's cuobjdump is missing, RuntimeError if it fails.
    """
    meta, cubin = compiled.metadata, compiled.asm["cubin"]
    head = {"arch": meta.target.arch, "triton": meta.triton_version, "shared_bytes": meta.shared}
    head |= {"num_warps": meta.num_warps, "num_stages": meta.num_stages}
    # Kept on disk: kernels of many cases are the same, and cuobjdump is slow.
    code = hashlib.sha256(cubin + Path(__file__).read_bytes()).hexdigest()[:40]
    file = paths.CACHE / "cubins" / f"{code}.json"
    if not file.exists():
        write_atomic(file, json.dumps(parse(listing_of(cubin))).encode())
    return head | json.loads(file.read_text())


def listing_of(cubin: bytes) -> str:
    """What cuobjdump prints of a cubin. FileNotFoundError if Triton's is missing, RuntimeError if it fails."""
    from triton import knobs

    try:
        tool = knobs.nvidia.cuobjdump.path
    except RuntimeError as problem:
        raise FileNotFoundError(f"Triton's cuobjdump, which disassembles kernels, is missing: {problem}") from None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Asked for both at once it disassembles twice, which takes half as long again
        return "".join(_said(tool, wanted, file.name) for wanted in ("-res-usage", "-sass"))


def _said(tool: str, wanted: str, file: str) -> str:
    done = subprocess.run([tool, wanted, file], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} cannot read the kernel: {done.stderr.strip()}")
    return done.stdout


# A line of SASS: address, predicate if any, mnemonic with its modifiers.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?\w+\s+)?([A-Z][\w.:]*)", re.MULTILINE)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_LOADS = {"LDG", "LD", "LDGSTS", "UBLKCP", "UTMALDG"}
_STORES = {"STG", "ST", "UTMASTG"}
_COPIES = {"UBLKCP": "bulk", "UTMALDG": "tma", "UTMASTG": "tma"}
_ATOMICS = {"ATOM", "ATOMG", "RED", "REDG", "UTMAREDG"}


def parse(listing: str) -> dict[str, Any]:
    """The counts of `describe` from what `cuobjdump -res-usage -sass` prints. ValueError if no kernel is in it."""
    resources = _RESOURCES.findall(listing)
    names = [name for name in _INSTRUCTION.findall(listing) if name != "NOP"]
    if not resources or not names:
        raise ValueError(f"no kernel in cuobjdump's listing: {listing[:200]!r}")
    registers, stack = (max(map(int, column)) for column in zip(*resources, strict=True))
    operations = Counter(name.partition(".")[0] for name in names)
    return {
        "registers": registers,
        "spill_bytes": stack,
        "spill_stores": operations["STL"],
        "spill_loads": operations["LDL"],
        "loads": _widths(names, _LOADS),
        "stores": _widths(names, _STORES),
        "atomics": sum(operations[name] for name in _ATOMICS),
        "shuffles": operations["SHFL"],
        "barriers": operations["BAR"],
        "matrix": dict(sorted(Counter(n for n in names if n.partition(".")[0].endswith("MMA")).items())),
        "instructions": len(names),
    }


def _widths(names: Sequence[str], wanted: set[str]) -> dict[str, int]:
    """How many of some instructions move how many bits a thread: .64, .256 (as .ENL2.256), .U8, .S16 …; else 32."""
    counts: Counter[str] = Counter()
    for name in names:
        operation, _, modifiers = name.partition(".")
        if operation in wanted:
            bits = re.search(r"\b[US]?(8|16|64|128|256)\b", modifiers)
            counts[_COPIES.get(operation) or (bits[1] if bits else "32")] += 1
    return dict(sorted(counts.items()))


def table(sources: Mapping[str, Source], capabilities: Sequence[int] = CAPABILITIES) -> pd.DataFrame:
    """`evidence` of many kernels by name, compiled in worker processes and kept on disk; beside a GPU or without.

    One row a source and capability: columns source, capability and those of `evidence`. IsolatedError if one fails.
    """
    wanted = [(name, capability) for name in sources for capability in capabilities]
    requests = [{"source": list(sources[name]), "capability": capability} for name, capability in wanted]
    found = workers.ask("labkit.evidence.compiled:evidence_of", requests, modules_of(sources))
    rows = [{"source": name, "capability": c} | one for (name, c), one in zip(wanted, found, strict=True)]
    return pd.DataFrame(rows)


def evidence_of(source: Source, capability: int) -> dict[str, Any]:
    """In a worker: `evidence` of the Launch that the source returns."""
    return evidence(launch_of(source, capability), capability)


def launch_of(source: Source, capability: int | None = None) -> Launch:
    """The Launch that a source returns; a kernel's choices that depend on the GPU are those for `capability`."""
    function, arguments = source
    given = {name: value for name, value in arguments.items() if name != DISSECT}
    with offline(capability) if capability else nullcontext():
        return isolated.named(function)(**given)


def dissected(source: Source) -> bool:
    """Whether somebody asks for the evidence of what a source returns."""
    return source[1].get(DISSECT, True)


def modules_of(sources: Mapping[str, Source]) -> list[str]:
    """The modules of the sources' functions that are not part of the lab."""
    modules = {function.partition(":")[0] for function, _ in sources.values()}
    return sorted(name for name in modules if not name.startswith("labkit."))
