"""Sectors and cache lines that a kernel's global loads and stores ask for, from its layouts and strides; without a GPU.

A warp's load or store is one request of up to 32 lanes. The compiler's TTGIR says how every pointer is computed and
which lane and register holds which element: here the pointers of one program are evaluated with the arguments of a
`Launch`, and the lanes' addresses counted.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.evidence import compiled, workers
from labkit.evidence.ttgir import Evaluator, Module, Op, Place, Unsupported, lane_offsets
from labkit.kernels.launch import Launch

SECTOR, LINE = 32, 128  # bytes
_KINDS = {
    "tt.load": "load",
    "ttg.async_copy_global_to_local": "async copy",
    "tt.store": "store",
    "tt.atomic_rmw": "atomic",
    "tt.atomic_cas": "atomic",
}
_DESCRIPTORS = re.compile(r"tt\.descriptor_\w+|ttng\.async_tma_\w+")
_NAN = math.nan
ROUNDS = 1024  # of a loop's accesses, this many are evaluated each for itself


@dataclass(frozen=True)
class Access:
    """One load or store of global memory in a kernel's code, as one program makes it once.

    kind:         "load", "async copy" (global to shared memory) or "store"; "atomic" and "descriptor" (the copy engine)
                  are named only, their figures are NaN.
    tensor:       the kernel parameter whose memory it is; empty if no lane is active.
    file, line, text: the source line; of a helper, the innermost line that is not Triton's own, and in `call` the text
                  of the kernel's own line that calls it.
    dtype:        element, as the compiler calls it (f32, bf16, i32).
    bits:         bits a thread moves with one instruction; bits_from "ptx", or "addresses" if PTX names no width there.
    instructions: a thread's.
    requests:     of all warps of the program, requests in which some lane is active.
    sectors, sectors_max, lines, lines_max: 32-byte sectors and 128-byte lines a request, mean and most.
    sectors_total, sectors_unique: of all requests together, and counting each sector once.
    bytes_used:   distinct bytes of every request, added up; efficiency: bytes_used over the bytes of sectors_total.
    executions:   how often the program comes here (loops counted); NaN if that depends on what could not be evaluated.
    note:         what the figures leave out.
    """

    kind: str
    file: str
    line: int
    text: str
    dtype: str
    call: str = ""
    tensor: str = ""
    bits: float = _NAN
    bits_from: str = ""
    instructions: float = _NAN
    requests: float = _NAN
    sectors: float = _NAN
    sectors_max: float = _NAN
    lines: float = _NAN
    lines_max: float = _NAN
    sectors_total: float = _NAN
    sectors_unique: float = _NAN
    bytes_used: float = _NAN
    efficiency: float = _NAN
    executions: float = _NAN
    note: str = ""


def requests(launch: Launch, capability: int | None = 90, program: tuple[int, int, int] = (0, 0, 0)) -> list[Access]:
    """The global loads and stores of a launch as its program `program` makes them, in the order of the code.

    Compiles for `capability` without a GPU, or for the active GPU if None. Index tensors are read, so they hold what
    the kernel would get; a loop counts as in its first iteration; masked lanes ask for nothing; lanes with one address
    ask once; every tensor's storage is taken to be aligned to a cache line.
    Unsupported, naming operation and kernel, if an address depends on what cannot be evaluated; IndexError if an index
    is read outside its tensor.
    """
    return _each(_access, launch, capability, program)


def lines_a_load(launch: Launch, capability: int | None = 90) -> float:
    """Cache lines that a warp's load, or copy to shared memory, touches, mean over the instructions of the code.

    Of those in loops, where there are such, whether or not program 0 comes there. Accesses whose addresses cannot be
    evaluated are left out; NaN if none can.
    """
    kernel = compiled.build(launch, capability)
    module = Module.parse(kernel.asm["ttgir"])
    widths, evaluator = _ptx_widths(kernel.asm["ptx"]), Evaluator(module, launch)
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for op in module.ops():
        kind = _KINDS.get(op.name)
        if kind not in ("load", "async copy"):
            continue
        try:
            addresses, active = _lanes(module, op, *evaluator.addresses(op), False)
            bits, _ = _width(addresses, active, op, _emitted(module.places(op.location), kind, widths))
        except (NotImplementedError, IndexError):  # Unsupported among them; also an index that has no value here
            continue
        if active.any():
            figures = _count(addresses, active, op.itemsize, bits // 8)
            in_loop = any(above.name.startswith("scf") for above, _ in op.above())
            found[in_loop].append((figures["instructions"], figures["lines"]))
    some = found[True] or found[False]
    count = sum(instructions for instructions, _ in some)
    return sum(instructions * lines for instructions, lines in some) / count if count else _NAN


@dataclass(frozen=True)
class Total:
    """What one program asks for with one access of `Access`, all executions together.

    requests, sectors: NaN where they are not known. note: why not, or what is assumed.
    """

    kind: str
    requests: float
    sectors: float
    note: str = ""


def totals(launch: Launch, capability: int | None = 90, program: tuple[int, int, int] = (0, 0, 0)) -> list[Total]:
    """Like `requests`, but every round of a loop is evaluated: masks and alignment may differ from one to the next.

    An access that is made more than `ROUNDS` times is taken to be the same each time. Raises what `requests` does.
    """
    return _each(_total, launch, capability, program)


def _each(make: Callable[..., Any], launch: Launch, capability: int | None, program: tuple[int, int, int]) -> list[Any]:
    kernel = compiled.build(launch, capability)
    module = Module.parse(kernel.asm["ttgir"])
    widths = _ptx_widths(kernel.asm["ptx"])
    evaluator = Evaluator(module, launch, program)
    kinds = ((op, "descriptor" if _DESCRIPTORS.fullmatch(op.name) else _KINDS.get(op.name)) for op in module.ops())
    return [make(op, kind, evaluator, widths) for op, kind in kinds if kind]


def _total(op: Op, kind: str, evaluator: Evaluator, widths: Mapping[Any, set[int]]) -> Total:
    if kind in ("descriptor", "atomic"):
        return Total(kind, _NAN, _NAN, f"what {kind} accesses move is not derived")
    executions = evaluator.executions(op)
    if math.isnan(executions):
        return Total(kind, _NAN, _NAN, "how often an access is made depends on what cannot be evaluated")
    emitted = _emitted(evaluator.module.places(op.location), kind, widths)
    every = executions <= ROUNDS
    requests = sectors = 0
    for frame in evaluator.frames(op) if every else islice(evaluator.frames(op), 1):
        addresses, active = _lanes(evaluator.module, op, *evaluator.addresses(op, frame), kind == "store")
        if active.any():
            found = _count(addresses, active, op.itemsize, _width(addresses, active, op, emitted)[0] // 8)
            requests, sectors = requests + found["requests"], sectors + found["sectors_total"]
    times, note = (1, "") if every else (executions, "all rounds of a long loop are taken to be like the first")
    return Total(kind, times * requests, times * sectors, note)


def _access(op: Op, kind: str, evaluator: Evaluator, widths: Mapping[Any, set[int]]) -> Access:
    chain = evaluator.module.places(op.location)
    known = {"kind": kind, "dtype": "" if kind == "descriptor" else op.element} | _source(chain)
    if kind in ("descriptor", "atomic"):
        return Access(**known, note="lanes not derived")
    known["executions"] = evaluator.executions(op)
    if known["executions"] == 0:
        return Access(**known, note="this program does not come here")
    in_loop = any(parent.name == "scf.for" for parent, _ in op.above())
    known["note"] = "first iteration of a loop" if in_loop else ""
    addresses, active = _lanes(evaluator.module, op, *evaluator.addresses(op), kind == "store")
    bits, bits_from = _width(addresses, active, op, _emitted(chain, kind, widths))
    known |= {"tensor": evaluator.owner(addresses[active]), "bits": bits, "bits_from": bits_from}
    return Access(**known, **_count(addresses, active, op.itemsize, bits // 8))


def _emitted(chain: Sequence[Place], kind: str, widths: Mapping[Any, set[int]]) -> set[int]:
    """Bits a thread of the instructions that PTX has at a place."""
    return widths.get((kind, tuple((Path(name).name, row, column) for name, row, column in chain)), set())


def _lanes(
    module: Module, op: Op, addresses: np.ndarray, mask: np.ndarray, store: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Addresses and activity of every element a thread moves: [warps, registers, 32]."""
    if not addresses.ndim:  # a scalar: every lane of every warp loads it, one lane of one warp stores it
        address = np.broadcast_to(addresses, (1 if store else module.num_warps, 1, 32))
        active = np.broadcast_to(mask, address.shape).copy()
        active[:, :, 1:] &= not store
        return address, active
    index, first = lane_offsets(module, op)
    active = mask[index] & (first if store else True)  # a load is repeated where a layout repeats an element
    return addresses[index], active


def _width(addresses: np.ndarray, active: np.ndarray, op: Op, emitted: set[int]) -> tuple[int, str]:
    """Bits a thread moves at once: of the widths in PTX (else of all up to 128) the widest that the addresses allow."""
    registers = addresses.shape[1]
    for bits in sorted(emitted or {8, 16, 32, 64, 128}, reverse=True):
        count = bits // 8 // op.itemsize
        if count and registers % count == 0 and _contiguous(addresses, active, op.itemsize, count):
            return bits, "ptx" if emitted else "addresses"
    raise op.unsupported(f"moves {sorted(emitted)} bits a thread in PTX, but its addresses are further apart")


def _contiguous(addresses: np.ndarray, active: np.ndarray, size: int, count: int) -> bool:
    warps, registers, lanes = addresses.shape
    groups = addresses.reshape(warps, registers // count, count, lanes)
    together = active.reshape(groups.shape)
    steps = np.arange(count)[:, None] * size
    fits = (groups == groups[:, :, :1] + steps) & (groups[:, :, :1] % (count * size) == 0)
    return bool((fits | ~together).all() and (together == together[:, :, :1]).all())


def _count(addresses: np.ndarray, active: np.ndarray, size: int, width: int) -> dict[str, float]:
    """The figures of `Access` for a thread's elements of `size` bytes, moved `width` bytes at once."""
    step = width // size
    starts, active = addresses[:, ::step].reshape(-1, 32), active[:, ::step].reshape(-1, 32)
    asked = [np.unique(start[on]) for start, on in zip(starts, active, strict=True) if on.any()]
    sectors = [_units(one, width, SECTOR) for one in asked]
    lines = [len(_units(one, width, LINE)) for one in asked]
    counts = [len(one) for one in sectors]
    used = sum(len(one) for one in asked) * width
    total = sum(counts)
    return {
        "instructions": addresses.shape[1] // step,
        "requests": len(asked),
        "sectors": float(np.mean(counts)) if counts else 0.0,
        "sectors_max": max(counts, default=0),
        "lines": float(np.mean(lines)) if lines else 0.0,
        "lines_max": max(lines, default=0),
        "sectors_total": total,
        "sectors_unique": len(np.unique(np.concatenate(sectors))) if sectors else 0,
        "bytes_used": used,
        "efficiency": used / (total * SECTOR) if total else _NAN,
    }


def _units(starts: np.ndarray, width: int, unit: int) -> np.ndarray:
    """Numbers of the sectors or lines that accesses of `width` bytes touch."""
    return np.unique(np.concatenate([starts // unit, (starts + width - 1) // unit]))


def _source(chain: Sequence[Place]) -> dict[str, Any]:
    """File name, line and text of the innermost place that is not in Triton's own library; text of the outermost."""
    own = [place for place in chain if "/triton/language/" not in place[0]] or [("", 0, 0)]
    file, line, _ = own[0]
    text, call = _line(own[0]), _line(own[-1])
    return {"file": Path(file).name, "line": line, "text": text, "call": call if len(own) > 1 else ""}


def _line(place: Place) -> str:
    path = Path(place[0])
    lines = path.read_text().splitlines() if path.is_file() else []
    return lines[place[1] - 1].strip() if place[1] <= len(lines) else ""


_PLACE = re.compile(r"([^\s@\[\]]+):(\d+):(\d+)")
_PTX = {
    "load": re.compile(r"\bld\.(?:\w+\.)*?global\S*?(?:\.v(\d))?\.[bfsu](\d+) "),
    "store": re.compile(r"\bst\.(?:\w+\.)*?global\S*?(?:\.v(\d))?\.[bfsu](\d+) "),
}
_CP_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)")


def _ptx_widths(ptx: str) -> dict[tuple[str, tuple], set[int]]:
    """(kind, place) -> bits a thread of the instructions there; a place is its inlining chain, innermost first."""
    found: dict[tuple[str, tuple], set[int]] = {}
    place: tuple = ()
    for line in ptx.splitlines():
        if "\t.loc\t" in line:
            chain = _PLACE.findall(line.partition("//")[2])
            place = tuple((name, int(row), int(column)) for name, row, column in chain)
        elif match := _CP_ASYNC.search(line):
            found.setdefault(("async copy", place), set()).add(int(match[1], 0) * 8)
        else:
            for kind, pattern in _PTX.items():
                if match := pattern.search(line):
                    found.setdefault((kind, place), set()).add(int(match[1] or 1) * int(match[2]))
    return found


_KEPT = (
    "kind", "tensor", "line", "text", "call", "bits", "requests", "sectors", "lines", "sectors_total", "sectors_unique",
    "bytes_used", "executions",
)  # fmt: skip


def summary(launch: Launch) -> list[dict[str, Any]]:
    """Accesses with figures of the kernel that runs on the active GPU, as a row's evidence keeps them.

    An access pattern that cannot be derived is one entry with its reason, since it must not stop a measurement.
    """
    try:
        found = requests(launch, None)
    except (Unsupported, IndexError) as problem:
        return [{"kind": "unknown", "text": str(problem)}]
    return [{name: getattr(one, name) for name in _KEPT} for one in found if not math.isnan(one.requests)]


def table(
    sources: Mapping[str, compiled.Source], capability: int = 90, program: tuple[int, int, int] = (0, 0, 0)
) -> pd.DataFrame:
    """`requests` of many kernels, as in `compiled.table`: one row an access, columns source and those of `Access`."""
    asked = [{"source": list(s), "capability": capability, "program": list(program)} for s in sources.values()]
    found = workers.ask("labkit.evidence.coalescing:requests_of", asked, compiled.modules_of(sources))
    rows = [{"source": name} | row for name, rows in zip(sources, found, strict=True) for row in rows]
    return pd.DataFrame(rows)


def requests_of(source: compiled.Source, capability: int, program: Sequence[int]) -> list[dict[str, Any]]:
    """In a worker: `requests` of the Launch that the source returns."""
    return [asdict(one) for one in requests(compiled.launch_of(source, capability), capability, tuple(program))]
