"""Known errors of the compilers, looked for in what they made of a kernel; nothing is run and no GPU is needed.

| error                | of         | what happens                                                                     |
|----------------------|------------|----------------------------------------------------------------------------------|
| unwritten registers  | ptxas 12.8 | the address of an operand is taken from a register that nothing has written:     |
|                      |            | wrong results, or an illegal address, depending on what ran before               |
| overwritten operands | Triton 3.6 | a pipelined loop loads a later tile into shared memory that a matrix product may |
|                      | and 3.7    | still be reading: wrong results now and then                                     |

Both were met on an H100 with kernels of the lab: a test may pass many times before one of them shows. So every kernel
of the lab is searched for them by a test.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import compiled_once

from labkit.evidence import compiled
from labkit.kernels.launch import Launch


def errors_of(source: compiled.Source, capability: int) -> dict[str, str]:
    """What is found in the Launch that the source returns, or in any of several, of either kind."""
    launches = compiled.launch_of(source, capability)
    found: dict[str, str] = {}
    for launch in launches if isinstance(launches, list) else [launches]:
        found |= compiled_once.known(launch, capability, _errors_of)
    return found


def _errors_of(launch: Launch, capability: int) -> dict[str, str]:
    asm = compiled.build(launch, capability).asm
    return unwritten(compiled.listing_of(asm["cubin"])) | overwritten(asm["ttgir"])


def unwritten_registers(launch: Launch, capability: int | None = None) -> dict[str, str]:
    """Uniform registers that a launch's kernel reads while they hold whatever was left in them: a compiler's error.

    capability: as in `compiled.build`. Returns name -> the first instruction in the listing that reads it so; empty for
    a kernel without that error. ptxas 12.8 makes such code of some wgmma products of fewer than 64 columns. What is
    found is wrong, but the address may as well be taken from a register that holds something else, which is not found.
    Raises what `compiled.listing_of` does.
    """
    return unwritten(compiled.listing_of(compiled.build(launch, capability).asm["cubin"]))


class _Instruction(NamedTuple):
    """One instruction, and what it does with uniform registers as far as its text says so."""

    address: int
    predicate: str
    name: str
    operands: str
    reads: frozenset[int]
    writes: frozenset[int]

    def __str__(self) -> str:
        return " ".join(filter(None, (self.predicate, self.name, self.operands)))


_WHOLE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(@!?\w+)?\s*([A-Z][\w.:]*) *([^;\n]*?)\s*;", re.MULTILINE)
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_PREDICATE = re.compile(r"!?U?P[T\d]")
_MOVES = re.compile(r"U?MOV(\.64)? |IMAD\.(MOV\.)?U32 R\d+, RZ, RZ, UR")
_JUMPS_ANYWHERE = {"BRX", "BRXU", "CALL", "JCAL", "JMP", "JMX", "JMXU", "RET"}


def unwritten(listing: str) -> dict[str, str]:
    """What `unwritten_registers` returns, from what `cuobjdump -sass` prints of one kernel.

    A register counts if nothing writes it at all, or nothing can before an instruction runs for the first time.
    """
    code = [_instruction(*match.groups()) for match in _WHOLE.finditer(listing)]
    follow = _followers(code)
    first_write = {register: i for i, one in reversed(list(enumerate(code))) for register in one.writes}
    found: dict[int, str] = {}
    for i, one in enumerate(code):
        for register in one.reads - found.keys():
            if _holds_nothing(register, i, first_write.get(register), code, follow):
                found[register] = str(one)
    return {f"UR{register}": text for register, text in sorted(found.items())}


def _instruction(address: str, predicate: str | None, name: str, operands: str) -> _Instruction:
    """Registers that an operand names by its first one only (gdesc, pairs) are not in `reads`."""
    given = [text.strip() for text in operands.split(",")]
    rest = list(itertools.dropwhile(_PREDICATE.fullmatch, given))
    writes: frozenset[int] = frozenset()
    # The destination comes first, after those that are predicates; comparisons (…SETP) have no other ones. What is not
    # known here is taken for one that writes, so that no correct code is accused.
    if rest and (match := _UNIFORM.fullmatch(rest[0])) and not name.partition(".")[0].endswith("SETP"):
        first = int(match[1])
        writes = frozenset(range(first, first + _registers(name)))
        rest = rest[1:]
    reads = frozenset(int(number) for text in rest if "gdesc" not in text for number in _UNIFORM.findall(text))
    return _Instruction(int(address, 16), predicate or "", name, operands, reads, writes)


def _registers(name: str) -> int:
    """How many registers an instruction writes, at most."""
    operation, *modifiers = name.split(".")
    wide = {"64": 2, "128": 4, "256": 8, "WIDE": 2}
    sizes = [count for text in modifiers for end, count in wide.items() if text.endswith(end)]
    return max([2 if operation == "CS2UR" else 1, *sizes])


def _followers(code: Sequence[_Instruction]) -> list[list[int]] | None:
    """Numbers of the instructions that may run after each one; None if the listing does not say where it goes."""
    number = {one.address: i for i, one in enumerate(code)}
    if len(number) < len(code):  # several functions, each counted from 0
        return None
    follow = []
    for i, one in enumerate(code):
        operation = one.name.partition(".")[0]
        if operation in _JUMPS_ANYWHERE:
            return None
        after = [i + 1] if i + 1 < len(code) else []
        if not one.predicate and (operation == "EXIT" or (operation == "BRA" and "," not in one.operands)):
            after = []
        if operation in ("BRA", "BSSY"):  # BSSY says where BSYNC goes on
            target = re.search(r"\b0x([0-9a-f]+)$", one.operands)
            if not target or int(target[1], 16) not in number:
                return None
            after = [*after, number[int(target[1], 16)]]
        follow.append(after)
    return follow


def _holds_nothing(
    register: int, read: int, write: int | None, code: Sequence[_Instruction], follow: Sequence[Sequence[int]] | None
) -> bool:
    """Whether nothing has written the register when instruction `read` runs for the first time.

    write: the first instruction in the listing that writes it.
    """
    if write is None:
        return True
    # Registers are saved by moves and put back, also before they hold anything.
    if write < read or follow is None or _MOVES.match(f"{code[read].name} {code[read].operands}"):
        return False
    before = _reachable(0, read, follow) - {read}
    return not any(register in code[i].writes and read in _reachable(i, read, follow) for i in before)


def _reachable(start: int, stop: int, follow: Sequence[Sequence[int]]) -> set[int]:
    """Numbers of the instructions that may run from `start` on until `stop` does, both included."""
    seen, ahead = {start}, [start]
    while ahead:
        if (i := ahead.pop()) != stop:
            ahead += set(follow[i]) - seen
            seen.update(follow[i])
    return seen


def overwritten_operands(launch: Launch, capability: int | None = None) -> dict[str, str]:
    """Tiles in shared memory that a loop loads anew while a matrix product may still read them: Triton's error.

    capability: as in `compiled.build`. Returns name in Triton's IR -> for how many tiles there is room and how many are
    loaded ahead; empty for a kernel without that error.
    wgmma is asynchronous: it may be reading when the loop loads tiles for a later iteration, so there must be room for
    one tile more than are loaded ahead. Triton adds that room for operands that only products use, not for those that
    go to registers as well, for instance to be squared and summed. See issue 6691 of Triton.
    """
    return overwritten(compiled.build(launch, capability).asm["ttgir"])


_ROOM = re.compile(r"(%[\w$]+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")
_DEFINED = re.compile(r"(%[\w$]+)(?::\d+)? = ")
_VIEW = re.compile(r"(%[\w$]+) = ttg\.memdesc_\w+ (%[\w$]+)")
_PRODUCT = re.compile(r"ttng\.warp_group_dot (%[\w$]+), (%[\w$]+), .*isAsync = true")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")


def overwritten(ir: str) -> dict[str, str]:
    """What `overwritten_operands` returns, from Triton's IR of one kernel."""
    room: dict[str, int] = {}
    views: dict[str, str] = {}  # a tile, or a transposed one -> the memory that it lies in
    ahead: Counter[str] = Counter()  # tiles loaded before the loop
    pending: list[set[str]] = []  # what the products of the loop read that have not been waited for
    blocks: list[bool] = []  # whether each one that is open is a loop
    found = {}
    for line in map(str.strip, re.sub(r" loc\(.*", "", ir).splitlines()):
        if line.startswith("}") and blocks:
            blocks.pop()
        if line.endswith("{"):
            blocks.append("scf.for " in line)
            pending = [] if blocks[-1] else pending
        if (match := _DEFINED.match(line)) and match[1] in room | views:  # the other branch has names of its own
            room.pop(match[1], None)
            ahead.pop(match[1], None)
            views = {view: memory for view, memory in views.items() if match[1] not in (view, memory)}
        if match := _ROOM.search(line):
            room[match[1]] = int(match[2])
        elif match := _VIEW.search(line):
            views[match[1]] = views.get(match[2], match[2])
        elif match := _PRODUCT.search(line):
            pending.append({views.get(match[1], ""), views.get(match[2], "")})
        elif match := _WAIT.search(line):
            pending = pending[len(pending) - min(int(match[1]), len(pending)) :]
        elif "copy_global_to_local" in line:
            tiles = {views[name] for name in re.findall(r"%[\w$]+", line) if name in views}
            for name in tiles & room.keys():
                if not any(blocks):
                    ahead[name] += 1
                elif room[name] <= ahead[name] and any(name in one for one in pending):
                    found[name] = f"room for {room[name]}, {ahead[name]} ahead"
    return found
