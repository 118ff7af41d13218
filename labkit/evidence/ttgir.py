"""The part of Triton's GPU IR that computes addresses, read from its text and evaluated with numpy for one program.

Values are evaluated when they are asked for, so that only what addresses, masks and branches depend on has to be known
here. Layouts are turned into lanes and registers by Triton itself.
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from labkit.kernels.launch import Launch

Place = tuple[str, int, int]  # file, line, column

_SPACE = 40  # every argument's storage gets 2**40 bytes of addresses of its own
_LONGEST = 64  # trips of a loop whose result an address depends on

_NAME = r"%[\w$.-]+"
_USE = rf"{_NAME}(?:#\d+)?"
_OPERATION = re.compile(rf'(?:({_NAME})(?::\d+)? = )?"?([a-z_]+\.[\w.]+)"?(.*)')
_TYPE = re.compile(r"(?<![\w#.])(?:tensor<((?:\d+x)+))?(!tt\.ptr<)?(bf16|f\d+\w*|i\d+|index)\b")
_DTYPES = {"i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "index": np.int64}


class Unsupported(NotImplementedError):
    """An address depends on something that is not evaluated here; the message names the operation and the kernel."""


@dataclass(eq=False)
class Op:
    """One operation. text: what follows its name, with types, without location; block: label in `region`."""

    name: str
    text: str
    location: str
    kernel: str
    region: "Region"
    block: str
    regions: "list[Region]" = field(default_factory=list)

    @cached_property
    def operands(self) -> list[str]:
        return re.findall(_USE, self.text)

    @property
    def types(self) -> list[tuple[tuple[int, ...], str, str]]:
        """Shape, pointer mark and element of every type named, operands' first."""
        found = _TYPE.findall(self.text.rpartition(" : ")[2])  # dimensions as "128x8x"
        return [(tuple(map(int, dims.split("x")[:-1])), pointer, element) for dims, pointer, element in found]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return self.types[-1][0]

    @property
    def pointer_shape(self) -> tuple[int, ...]:
        """Of the first type: what a load or store names."""
        return self.types[0][0]

    @property
    def dtype(self) -> Any:
        """numpy's type for the result; addresses are int64, every float is float32."""
        _, pointer, element = self.types[-1]
        return np.int64 if pointer else _DTYPES.get(element, np.float32)

    @property
    def element(self) -> str:
        """Element of the first type; of a load, store or pointer sum, what is pointed to."""
        return self.types[0][2]

    @property
    def itemsize(self) -> int:
        """Bytes of `element`."""
        return max(1, int(re.search(r"\d+", self.element)[0]) // 8)

    def integers(self, attribute: str) -> list[int]:
        """Of an attribute such as `axis = 1 : i32` or `order = array<i32: 1, 0>`."""
        match = re.search(rf"\b{attribute} = (?:array<i32: ([^>]*)>|(-?\d+))", self.text)
        return [int(n) for n in (match[1] or match[2]).split(",")]

    def above(self) -> "Iterator[tuple[Op, Region]]":
        """Enclosing operations and the region of theirs that this one is in, outermost first."""
        if parent := self.region.parent:
            yield from parent.above()
            yield parent, self.region

    def unsupported(self, why: str = "cannot be evaluated") -> Unsupported:
        return Unsupported(f"{self.name} in kernel {self.kernel} {why}")


@dataclass(eq=False)
class Region:
    """Operations, what they define by name, and the names of its blocks' arguments by label."""

    parent: Op | None = None
    ops: list[Op] = field(default_factory=list)
    defines: dict[str, Op] = field(default_factory=dict)
    arguments: dict[str, list[str]] = field(default_factory=dict)
    label: str = ""  # of the block being read

    def terminator(self, block: str = "") -> Op:
        return next(op for op in reversed(self.ops) if op.block == block)


@dataclass
class Module:
    """A compiled kernel's TTGIR. parameters: (value, type, kernel parameter); preamble: what types refer to."""

    kernel: str = ""
    header: str = ""
    preamble: list[str] = field(default_factory=list)
    locations: dict[str, str] = field(default_factory=dict)
    parameters: list[tuple[str, str, str]] = field(default_factory=list)
    body: Region = field(default_factory=Region)

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Read TTGIR as Triton prints it. Unsupported for a structure that is unknown here."""
        module, open_regions = cls(), []
        for line in map(str.strip, text.splitlines()):
            if match := re.fullmatch(r"(#loc\d*) = loc\((.*)\)", line):
                module.locations[match[1]] = match[2]
            elif line.startswith("#"):
                module.preamble.append(line)
            elif line.startswith("module"):
                module.header = line
            elif line.startswith("tt.func"):
                open_regions.append(module._function(line))
            elif open_regions:
                module._line(line, open_regions)
        return module

    def _function(self, line: str) -> Region:
        if "tt.func public" not in line:
            raise Unsupported(f"kernel calls a function that is not inlined: {line}")
        self.kernel = re.search(r"@([\w.$]+)\(", line)[1]
        self.parameters = re.findall(rf'({_NAME}): ([^ ,]+)(?:(?! loc\().)* loc\("([\w.]+)"', line)
        return self.body

    def _line(self, line: str, open_regions: list[Region]) -> None:
        region = open_regions[-1]
        if line.startswith("}"):
            open_regions.pop()
            if region.parent:
                region.parent.text += _without_location(line)[0]
            if line.endswith("{"):  # } else {
                open_regions.append(_inner(region.parent))
        elif label := re.match(r"\^(\w+)(.*)", line):
            region.label = label[1]
            region.arguments[label[1]] = re.findall(rf"({_NAME}):", label[2])
        elif match := _OPERATION.match(line):
            text, location = _without_location(match[3])
            op = Op(match[2], text, location, self.kernel, region, region.label)
            region.ops.append(op)
            if match[1]:
                region.defines[match[1]] = op
            if text.endswith("{"):
                open_regions.append(_inner(op))
        elif line.endswith("{"):
            raise Unsupported(f"{line!r} in kernel {self.kernel}")

    @property
    def num_warps(self) -> int:
        return int(re.search(r'"ttg.num-warps" = (\d+)', self.header)[1])

    def ops(self, region: Region | None = None) -> Iterator[Op]:
        """All operations, nested ones included, in the order of the text."""
        for op in (region or self.body).ops:
            yield op
            for inner in op.regions:
                yield from self.ops(inner)

    def places(self, location: str) -> list[Place]:
        """Where an operation comes from: innermost first, then the calls that it was inlined through."""
        if location in self.locations:
            return self.places(self.locations[location])
        if match := re.fullmatch(r'"(.*)":(\d+):(\d+)', location):
            return [(match[1], int(match[2]), int(match[3]))]
        if match := re.fullmatch(r"callsite\((#loc\d*) at (#loc\d*)\)", location):
            return self.places(match[1]) + self.places(match[2])
        if match := re.fullmatch(r'"[^"]*"\((.*)\)|fused.*\[(#loc\d*).*\]', location):
            return self.places(match[1] or match[2])
        return []


def _without_location(text: str) -> tuple[str, str]:
    body, found, location = text.rpartition(" loc(")
    return (body, location.removesuffix(")")) if found else (text, "")


def _inner(op: Op) -> Region:
    op.regions.append(Region(op))
    return op.regions[-1]


@dataclass(eq=False)
class _Frame:
    """Values of a region, as it is run once. bound: arguments, by name, evaluated when first needed."""

    region: Region
    parent: "_Frame | None" = None
    bound: dict[str, Callable[[], Any]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Evaluator:
    """Values of one program of a launch: scalars and whole tensors as numpy arrays, pointers as addresses in bytes."""

    def __init__(self, module: Module, launch: Launch, program: tuple[int, int, int] = (0, 0, 0)):
        self.module, self.launch, self.program = module, launch, program
        self._root = _Frame(module.body)
        for value, kind, name in module.parameters:
            self._root.bound[value] = lambda kind=kind, name=name: self._argument(name, kind)

    def addresses(self, op: Op, frame: "_Frame | None" = None) -> tuple[np.ndarray, np.ndarray]:
        """Address of every element that a load, store or asynchronous copy names, and whether its mask lets it.

        Both have the shape of the tensor, or none for a scalar. frame: one of `frames`; default: of the first rounds.
        """
        frame = frame or self._frame(op)
        address = self._value(op.operands[0], frame)
        explicit = re.search(rf" mask ({_USE})", op.text)
        if op.name.startswith("ttg.async"):
            name = explicit[1] if explicit else None
        else:
            name = next(iter(op.operands[2 if op.name == "tt.store" else 1 :]), None)
        mask = self._value(name, frame) if name else True
        return address, np.broadcast_to(mask, address.shape)

    def owner(self, addresses: np.ndarray) -> str:
        """Name of the kernel parameter in whose memory the addresses are."""
        names = ["", *self.launch.args]
        return " or ".join(names[space] for space in np.unique(addresses >> _SPACE) if 0 < space < len(names))

    def executions(self, op: Op) -> float:
        """How often the program runs an operation; NaN if that cannot be evaluated."""
        try:
            total = int(self._reaches(op))
            for parent, region in op.above():
                total *= self._runs(parent, region, self._frame(parent)) if total else 0
            return total
        except Unsupported:
            return np.nan

    def frames(self, op: Op) -> Iterator[_Frame]:
        """One for each time that the program runs an operation, every round of the loops around it included."""
        found: Iterable[_Frame] = [self._root] if self._reaches(op) else []
        for parent, region in op.above():
            found = self._entered(parent, region, found)
        yield from found

    def _reaches(self, op: Op) -> bool:
        """Whether the program passes the block of the kernel's body that an operation is in."""
        return next((parent for parent, _ in op.above()), op).block in self._path

    def _entered(self, op: Op, region: Region, frames: Iterable[_Frame]) -> Iterator[_Frame]:
        for frame in frames:
            if op.name == "scf.for":
                yield from self._rounds(op, frame)
            elif self._runs(op, region, frame):
                yield _Frame(region, frame)

    def _runs(self, op: Op, region: Region, frame: _Frame) -> int:
        if op.name == "scf.for":
            return len(self._trips(op, frame))
        if op.name == "scf.if":
            return int(self._taken(op, frame) is region)
        raise op.unsupported()

    @cached_property
    def _path(self) -> set[str]:
        """Labels of the blocks of the kernel's body that the program passes."""
        path, block = set(), ""
        while block not in path:
            path.add(block)
            last = self.module.body.terminator(block)
            targets = re.findall(r"\^(\w+)(?:\(([^:)]*))?", last.text)
            if last.name == "cf.cond_br":
                targets = targets[:1] if self._value(last.operands[0], self._root) else targets[1:]
            if targets:
                block, passed = targets[0]
                for name, value in zip(self.module.body.arguments[block], re.findall(_USE, passed), strict=True):
                    self._root.bound[name] = lambda value=value: self._value(value, self._root)
        return path

    def _frame(self, op: Op) -> _Frame:
        """The frame that an operation runs in: first iterations of the loops around it."""
        frame = self._root
        for parent, region in op.above():
            frame = self._first(parent, frame) if parent.name == "scf.for" else _Frame(region, frame)
        return frame

    def _argument(self, name: str, kind: str) -> Any:
        if name not in self.launch.args:
            raise Unsupported(f"parameter {name} of kernel {self.module.kernel} is not among the launch's arguments")
        value = self.launch.args[name]
        if kind.startswith("!tt.ptr"):
            space = list(self.launch.args).index(name) + 1
            return np.int64((space << _SPACE) + value.storage_offset() * value.element_size())
        if kind not in _DTYPES and not kind.startswith(("f", "bf")):
            raise Unsupported(f"parameter {name} of kernel {self.module.kernel} is a {kind}")
        return _DTYPES.get(kind, np.float32)(value)

    def _value(self, name: str, frame: _Frame) -> Any:
        at: _Frame | None = frame
        defined, _, number = name.partition("#")
        while at is not None:
            if name not in at.values and name in at.bound:
                at.values[name] = at.bound[name]()
            elif name not in at.values and defined in at.region.defines:
                at.values[name] = self._result(at.region.defines[defined], int(number or 0), at)
            if name in at.values:
                return at.values[name]
            at = at.parent
        raise Unsupported(f"{name} in kernel {self.module.kernel} is given by a branch that cannot be evaluated")

    def _result(self, op: Op, number: int, frame: _Frame) -> Any:
        if op.name == "scf.for":
            return self._after_loop(op, number, frame)
        if op.name == "scf.if":
            region = self._taken(op, frame)
            return self._value(region.terminator().operands[number], _Frame(region, frame))
        if op.name == "tt.load":
            return self._read(op, *(self._value(name, frame) for name in op.operands))
        if op.name in ("tt.get_program_id", "tt.get_num_programs"):
            of_axes = self.program if op.name == "tt.get_program_id" else (*self.launch.grid, 1, 1)
            return np.int32(of_axes["xyz".index(op.text.split()[0])])
        return _compute(op, [self._value(name, frame) for name in op.operands])

    def _taken(self, op: Op, frame: _Frame) -> Region | None:
        return next(iter(op.regions[:1] if self._value(op.operands[0], frame) else op.regions[1:]), None)

    def _trips(self, op: Op, frame: _Frame) -> range:
        bounds = re.search(rf"= ({_USE}) to ({_USE}) step ({_USE})", op.text).groups()
        return range(*(int(self._value(name, frame)) for name in bounds))

    def _first(self, op: Op, frame: _Frame) -> _Frame:
        """The frame of a loop's first iteration."""
        counter, start = re.search(rf"({_NAME}) = ({_USE}) to", op.text).groups()
        carried = re.findall(rf"({_NAME}) = ({_USE})", op.text.partition("iter_args(")[2])
        bound = {name: lambda value=value: self._value(value, frame) for name, value in [(counter, start), *carried]}
        return _Frame(op.regions[0], frame, bound)

    def _after_loop(self, op: Op, number: int, frame: _Frame) -> Any:
        trips = self._trips(op, frame)
        if len(trips) > _LONGEST:
            raise op.unsupported(f"runs {len(trips)} times and an address depends on its result; at most {_LONGEST} do")
        if not trips:
            _, *carried = self._first(op, frame).bound.values()
            return carried[number]()
        *_, last = self._rounds(op, frame)
        return self._value(op.regions[0].terminator().operands[number], last)

    def _rounds(self, op: Op, frame: _Frame) -> Iterator[_Frame]:
        """The frames of a loop's iterations, each of which takes from the one before what the loop carries."""
        now = self._first(op, frame)
        counter, *carried = now.bound
        given = op.regions[0].terminator().operands if carried else []
        for place, count in enumerate(self._trips(op, frame)):
            if place:
                pairs = zip(carried, given, strict=True)
                bound = {name: lambda v=v, last=now: self._value(v, last) for name, v in pairs}
                now = _Frame(op.regions[0], frame, {counter: lambda count=count: np.int64(count), **bound})
            yield now

    def _read(self, op: Op, address: Any, mask: Any = True, other: Any = 0) -> np.ndarray:
        """What a load returns: values of the launch's tensors."""
        import torch

        address, mask = np.asarray(address), np.broadcast_to(mask, np.shape(address))
        found = np.broadcast_to(np.asarray(other, _DTYPES.get(op.element, np.float32)), address.shape).copy()
        tensors = dict(enumerate(self.launch.args.values(), 1))
        for space in map(int, np.unique(address[mask] >> _SPACE)):
            here = mask & (address >> _SPACE == space)
            tensor = tensors.get(space, torch.empty(0))
            index = (address[here] - (space << _SPACE)) // tensor.element_size()
            items = tensor.untyped_storage().nbytes() // tensor.element_size()
            if index.min() < 0 or index.max() >= items:
                which = f"item {index.min()} to {index.max()} of {items}"
                raise IndexError(f"{op.kernel}: program {self.program} reads {which}")
            values = tensor.as_strided((items,), (1,), 0)[torch.from_numpy(index).to(tensor.device)]
            found[here] = (values.float() if values.is_floating_point() else values).cpu().numpy()
        return found


# Operations on shapes and addresses.
_PLAIN: dict[str, Callable[[Op, list[Any]], Any]] = {
    "arith.constant": lambda op, args: _constant(op),
    "tt.make_range": lambda op, args: np.arange(op.integers("start")[0], op.integers("end")[0], dtype=np.int32),
    **dict.fromkeys(("tt.splat", "tt.broadcast"), lambda op, args: np.broadcast_to(args[0], op.shape)),
    "tt.expand_dims": lambda op, args: np.expand_dims(args[0], op.integers("axis")[0]),
    "tt.reshape": lambda op, args: args[0].reshape(op.shape),
    "tt.trans": lambda op, args: args[0].transpose(op.integers("order")),
    "tt.unsplat": lambda op, args: args[0].reshape(()),
    "tt.addptr": lambda op, args: args[0] + np.asarray(args[1], np.int64) * op.itemsize,
    **dict.fromkeys(("ttg.convert_layout", "tt.ptr_to_int", "tt.int_to_ptr"), lambda op, args: args[0]),
    "tt.reduce": lambda op, args: _reduce(op, args),
}


def _compute(op: Op, args: list[Any]) -> Any:
    """Result of an operation that only depends on its operands."""
    if op.name in _PLAIN:
        return _PLAIN[op.name](op, args)
    if op.name.startswith("arith."):
        with np.errstate(all="ignore"):  # integers wrap, as on the GPU
            return np.asarray(_arithmetic(op, op.name.removeprefix("arith."), args))
    raise op.unsupported()


def _constant(op: Op) -> Any:
    literal = re.match(r" (?:dense<)?([^ >]+)", op.text)[1]
    if literal in ("true", "false"):
        value: Any = np.bool_(literal == "true")
    elif re.fullmatch(r"-?\d+", literal):
        value = op.dtype(int(literal))
    elif re.fullmatch(r"-?\d+\.\d+e[+-]\d+", literal):
        value = op.dtype(float(literal))
    else:
        raise op.unsupported(f"has the value {literal}, which is not read here")
    return np.broadcast_to(value, op.shape) if "dense<" in op.text else value


def _truncating_divide(a: Any, b: Any) -> Any:
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


_BINARY: dict[str, Callable[..., Any]] = {
    "addi": np.add, "subi": np.subtract, "muli": np.multiply, "divsi": _truncating_divide, "remsi": np.fmod,
    "andi": np.bitwise_and, "ori": np.bitwise_or, "xori": np.bitwise_xor, "shli": np.left_shift,
    "shrsi": np.right_shift, "maxsi": np.maximum, "minsi": np.minimum,
    "addf": np.add, "subf": np.subtract, "mulf": np.multiply, "divf": np.divide,
    "maxnumf": np.fmax, "minnumf": np.fmin,
}  # fmt: skip
_UNSIGNED = {
    "divui": np.floor_divide, "remui": np.remainder, "shrui": np.right_shift, "maxui": np.maximum, "minui": np.minimum,
}  # fmt: skip
_COMPARE = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_CASTS = ("extsi", "trunci", "index_cast", "sitofp", "fptosi", "extf", "truncf")


def _arithmetic(op: Op, verb: str, args: list[Any]) -> Any:
    if verb in _BINARY:
        return np.asarray(_BINARY[verb](*args)).astype(op.dtype)
    if verb in _UNSIGNED:
        return np.asarray(_UNSIGNED[verb](*map(_unsigned, args))).astype(op.dtype)
    if verb == "select":
        return np.where(*args)
    if verb in ("cmpi", "cmpf"):
        order = op.text.split(",")[0].strip()  # slt, ult, olt, eq …
        if order[-2:] in _COMPARE:
            return _COMPARE[order[-2:]](*(map(_unsigned, args) if verb == "cmpi" and order[0] == "u" else args))
    if verb in ("extui", "uitofp"):
        return _unsigned(args[0]).astype(op.dtype)
    if verb in _CASTS:
        value = np.asarray(args[0])
        if verb == "extsi" and value.dtype == np.bool_:
            return -value.astype(op.dtype)
        return (value & 1 if op.types[-1][2] == "i1" else value).astype(op.dtype)
    raise op.unsupported()


def _unsigned(value: Any) -> np.ndarray:
    value = np.asarray(value)
    return value.view(f"u{value.dtype.itemsize}")


def _reduce(op: Op, args: list[Any]) -> Any:
    combine = op.regions[0].ops[0].name.removeprefix("arith.")
    if len(args) != 1 or len(op.regions[0].ops) != 2 or combine not in ("addi", "maxsi", "minsi", "andi", "ori"):
        raise op.unsupported()
    return _BINARY[combine].reduce(args[0], axis=op.integers("axis")[0]).astype(op.dtype)


def lane_offsets(module: Module, op: Op) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Which element of the tensor that a load or store names is in which warp, register and lane.

    Returns an index array for every dimension and a boolean array, all [warps, registers, lanes]; the latter is false
    in lanes and warps that hold what another one holds. Registers that repeat an element are left out.
    """
    layout = _linear_layout(module, op)
    kept = [base for base in layout.reg_bases if any(base)]
    dims = len(op.pointer_shape)
    warps, registers, lanes = (_span(bases, dims) for bases in (layout.warp_bases, kept, layout.lane_bases))
    offsets = warps[:, None, None] ^ registers[None, :, None] ^ lanes[None, None]
    first = _first_of(layout.warp_bases)[:, None, None] & _first_of(layout.lane_bases)[None, None]
    return tuple(np.moveaxis(offsets, -1, 0)), np.broadcast_to(first, offsets.shape[:-1])


def _span(bases: list[list[int]], dims: int) -> np.ndarray:
    """Offsets of the 2**n combinations of n bases: [2**n, dims]."""
    offsets = np.zeros((1, dims), dtype=np.int64)
    for base in bases:
        offsets = np.concatenate([offsets, offsets ^ np.array(base)])
    return offsets


def _first_of(bases: list[list[int]]) -> np.ndarray:
    """For every combination of bases, whether it is the first with its offset: no base of zero is in it."""
    first = np.ones(1, dtype=bool)
    for base in bases:
        first = np.concatenate([first, first & any(base)])
    return first


def _linear_layout(module: Module, op: Op) -> Any:
    """Triton's own reading of the layout of the first tensor type named: bases of registers, lanes and warps."""
    from triton._C.libtriton import gluon_ir, ir, nvidia

    tensor = _balanced(op.text[op.text.rindex(" : ") :])
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        function = f"{module.header}\ntt.func public @layout(%x: {tensor}) {{ tt.return }}\n}}\n"
        file.write("\n".join([*module.preamble, function]))
        file.flush()
        parsed = ir.parse_mlir_module(file.name, context)
    builder = gluon_ir.GluonOpBuilder(context)
    layout = builder.get_gluon_layout_from_tensor(parsed.get_function("layout").args(0))
    return builder.to_linear_layout(layout._to_ir(builder), list(op.pointer_shape))


def _balanced(text: str) -> str:
    """The first "tensor<…>" of a text, inner brackets included."""
    start = text.index("tensor<")
    depth = 0
    for end in range(start, len(text)):
        depth += {"<": 1, ">": -1}.get(text[end], 0)
        if text[end] == ">" and text[end - 1] != "-" and depth == 0:
            break
    return text[start : end + 1]
