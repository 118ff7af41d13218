"""What a study declares: cases, variants, floors, claims. Plain data; imports neither torch nor Triton."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import isolated

if TYPE_CHECKING:
    from labkit.bench.claim import Claim

ROLES = ("ours", "step", "baseline", "peer", "ceiling", "control")
CACHES = ("cold", "hot")
MODES = ("graph", "eager")
SOURCES = ("auto", "measure", "recorded", "predicted")
MEASURING = ("auto", "measure")  # those by which a GPU that is here is measured

CONTROL = "A/A control"  # the variant that is timed a second time, with its own buffers, in every case
ADDED = "added: "  # begins the names of the variants that are functions of the reader's own


@dataclass(frozen=True)
class Case:
    """One point of a study: an operation at given dimensions, whatever kernel computes it.

    params: JSON scalars only (model, dimensions, batch, dtype); no layout, tile or variant.
    """

    op: str
    params: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The `case` column: the parameters as a JSON object with sorted keys."""
        return json.dumps(dict(self.params), sort_keys=True)

    @property
    def id(self) -> tuple[str, str]:
        """The columns `op` and `case`, by which rows are of this case."""
        return self.op, self.key

    def __getitem__(self, name: str) -> Any:
        return self.params[name]


@dataclass(frozen=True)
class Arguments:
    """The tensors that a reader's function is given, by which its timed calls are checked (`labkit.sweep.guard`).

    inputs:    of each buffer set, name -> tensor that calls leave as it is.
    outputs:   of each buffer set, name -> tensor that a call writes and does not read.
    changes:   each gives inputs other values in place, as (number of the set that is checked next, random values).
    expected:  (number of a set, calls) -> what so many calls of it, from now on, should leave, in float64.
    errors:    (what was expected, name -> copy of what calls left) -> errors, as of a `check`.
    results:   (number of a set) -> name -> tensor, of what calls leave; None: the outputs.
    tolerance: of these errors after several calls, where it is not the trial's.
    """

    inputs: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]
    changes: Sequence[Callable[[int, Any], None]]
    expected: Callable[[int, int], Any]
    errors: Callable[[Any, Mapping[str, Any]], Mapping[str, float]]
    results: Callable[[int], Mapping[str, Any]] | None = None
    tolerance: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Trial:
    """One variant made ready for one case.

    calls:     one callable per buffer set; each enqueues one call on its own buffers.
    poison:    overwrites every output with NaN.
    written:   whether no output holds NaN any more.
    check:     runs set 0 once on a snapshot of its inputs; relative RMSE of each output against the float64 reference.
    tolerance: the largest error of each output that counts as correct.
    launch:    the kernel launch of set 0, for evidence; None for library calls.
    dissect:    whether the launch's code is taken apart for the row's evidence (half a second for each new kernel).
    timer:     takes the samples itself (a foreign timer, shown beside ours): () -> ns per call, one a sample.
    idle:       does none of the case's work (an empty kernel): not held against the memory's rates.
    moves:      bytes that it moves where they are fewer than the floor's (a ceiling that reads the weights alone).
    begin:      brings what calls leave behind to where their timing is to begin (a cache that has filled).
    arguments:  of a reader's function, what it is given; guard: what checks its timed calls by them.
    poison, written and check are None where there is nothing to check (a ceiling that only reads).
    """

    calls: Sequence[Callable[[], Any]]
    poison: Callable[[], None] | None = None
    written: Callable[[], bool] | None = None
    check: Callable[[], Mapping[str, float]] | None = None
    tolerance: Mapping[str, float] = field(default_factory=dict)
    launch: Any | None = None
    timer: Callable[[], list[float]] | None = None
    facts: Callable[[], Mapping[str, Any]] | None = None
    dissect: bool = True
    idle: bool = False
    moves: int | None = None
    begin: Callable[[], None] | None = None
    arguments: Arguments | None = None
    guard: Any | None = None


@dataclass(frozen=True)
class Variant:
    """One way to compute a case.

    name:    unique in its case, in the study's own terms ("V-first BV=8, 1 warp").
    role:    one of `ROLES`.
    source:  "module:function" of the launcher, or of several, whose source, helpers included, is hashed into
             `kernel_sha`: what really runs, not what makes inputs ready or checks results.
    prepare: (case, device, sets, seed) -> Trial; allocates `sets` independent buffer sets on `device`.
    options: what distinguishes the variant (layout, tile, warps), for tables.
    caches, mode: what is timed.
    """

    name: str
    role: str
    source: str | tuple[str, ...]
    prepare: Callable[["Case", Any, int, int], Trial]
    options: Mapping[str, Any] = field(default_factory=dict)
    caches: tuple[str, ...] = ("cold", "hot")
    mode: str = "graph"


def lazy(target: str) -> Callable[..., Any]:
    """The function "module:function", imported when it is called: a study is listed without what its trials need."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"target is {target!r}; allowed: module:function")

    def call(*args: Any, **options: Any) -> Any:
        return isolated.named(target)(*args, **options)

    return call


def variant(
    name: str,
    role: str,
    trial: str,
    options: Mapping[str, Any] | None = None,
    *,
    source: str | tuple[str, ...] = "",
    shown: Mapping[str, Any] | None = None,
    caches: tuple[str, ...] = ("cold",),
    mode: str = "graph",
) -> Variant:
    """A line of a study's table of variants.

    trial:   "module:function", called as function(case, device, sets, seed, **options) -> Trial (`lazy`).
    source:  what really runs, as in `Variant`; default: the function itself.
    shown:   the row's options, where those of the function are not what tables should show.
    """
    made = dict(options or {})
    row = made if shown is None else dict(shown)
    return Variant(name, role, source or trial, partial(lazy(trial), **made), row, caches, mode)


@dataclass(frozen=True)
class Floor:
    """The least work of a case: bytes through device memory, and floating-point operations.

    set_bytes: bytes of one buffer set, which decides how many sets make the L2 cold (defaults to `bytes`).
    hot_at_any_size: time hot rows even where a set is larger than half the L2 (elsewhere they would repeat the cold).
    limit:     which ceiling bounds it: "read", "in_place", "copy", "bf16", "fp16", "fp8" or "int8"; empty where the
               case is itself the measurement of a ceiling, and nothing is predicted.
    """

    bytes: int
    flops: int = 0
    limit: str = "in_place"
    set_bytes: int | None = None
    hot_at_any_size: bool = False


@dataclass(frozen=True)
class Added:
    """How a study takes a function of the reader's own, to be checked and timed as its variants are (`added.py`).

    signature: names of the function's positional parameters, in order.
    help:      what they are: shapes, dtypes, and which of them the function writes; shown in the page.
    prepare:   (function, case, device, sets, seed) -> Trial with `arguments`, as a `Variant` does; may raise.
    takes:     whether a case takes such functions.
    caches:    what is timed.
    dtypes:    a parameter of its cases and the dtypes that it may name: functions are checked in all of them.
    """

    signature: tuple[str, ...]
    help: str
    prepare: Callable[[Callable[..., Any], Case, Any, int, int], Trial]
    takes: Callable[[Case], bool] = lambda case: True
    caches: tuple[str, ...] = ("cold", "hot")
    dtypes: tuple[str, tuple[str, ...]] = ("dtype", ())


@dataclass(frozen=True)
class Timelines:
    """What of a study is shown over time.

    case:   of which case.
    take:   (case, device, seed) -> list of `evidence.timeline.Timeline`s, which are taken there.
    source: what runs in them, as in `Variant`.
    """

    case: Case
    take: Callable[[Case, Any, int], Any]
    source: str | tuple[str, ...]


Rule = Callable[[Any], str | None]  # checks one notebook parameter: None, or what is allowed if the value is not


def one_of(*allowed: Any) -> Rule:
    """The value is one of `allowed`."""
    return lambda value: None if value in allowed else "one of " + ", ".join(map(str, allowed))


def integer(low: int, high: int) -> Rule:
    """The value is an integer from `low` to `high`."""
    text = f"an integer from {low} to {high}"
    return lambda value: None if type(value) is int and low <= value <= high else text


def list_of(rule: Rule, empty: bool = False) -> Rule:
    """The value is a list with no item twice, each of which obeys `rule`. empty: it may have none."""

    def check(value: Any) -> str | None:
        if empty and value == []:
            return None
        if not isinstance(value, list) or not value or any(value.count(item) > 1 for item in value):
            return "a list with at least one item and none twice"
        return next((f"a list, each item {problem}" for item in value if (problem := rule(item))), None)

    return check


@dataclass(frozen=True)
class Study:
    """One study: a name shared by its notebook, folder, data and test.

    cases:      the notebook's parameters -> the cases to time.
    variants:   case -> its variants, the A/A control not included (the sweep adds it).
    control:    case -> name of the variant that the A/A control repeats.
    floor:      case -> least work.
    pairs:      case -> the pairs of variants that the claims are about, (variant, against): what is predicted of GPUs
                that nobody measured.
    parameters: rules for the notebook's parameters beside `source`, `gpu` and `processes`.
    tiny:       cases small enough for Triton's interpreter; every variant is checked on each.
    early:      whether a case is measured by one process only, since none can differ from another; or, in a study with
                `settle`, before the others, since its rows decide what those run.
    kernels:    (cases, compute capability, name of the GPU) -> sources of Launches, as in evidence/compiled.py, which
                are compiled on all cores before the cases are measured, in processes that may see no GPU; None: each
                kernel is compiled when it is first run.
    warmed:     whether a library's or release's variant of a case is called once in processes side by side, before any
                is timed: their own compilers then run on all cores, and leave what they make on disk. Empty if not;
                else what its code depends on: of the cases with the same, one is called well before others.
    anew:       the same of a variant that takes every process seconds, whose compiler leaves nothing on disk or whose
                modules load slowly: of those that depend on the same, every process calls the first before anything
                is timed, at the same time as the others.
    imports:    modules of libraries that every process imports then, if they are there: those that take seconds.
    settle:     called with the study's Parquet file of a GPU and a folder, once the early cases are in the file and
                whenever they change there: writes into the folder what the other cases read (a tuned table).
    counted:    the notebook's parameters -> cases and names of variants, kernels of the lab, whose hardware counters
                are taken where `ncu` is.
    timelines:  what of it is shown over time, program by program; None: nothing.
    added:      how it takes functions of the reader's own; None: it takes none.
    add:        the functions that it was given, "FILE.py:FUNCTION" with absolute paths (`added.with_added`).
    left_out:   names of variants that are not timed (`leaving_out`).
    """

    name: str
    title: str
    summary: str
    cases: Callable[[Mapping[str, Any]], list[Case]]
    variants: Callable[[Case], list[Variant]]
    control: Callable[[Case], str]
    floor: Callable[[Case], Floor]
    claims: tuple["Claim", ...] = ()
    pairs: Callable[[Case], list[tuple[str, str]]] = lambda case: []
    parameters: Mapping[str, Rule] = field(default_factory=dict)
    tiny: tuple[Case, ...] = ()
    early: Callable[[Case], bool] = lambda case: False
    warmed: Callable[[Case, Variant], str] = lambda case, variant: ""
    anew: Callable[[Case, Variant], str] = lambda case, variant: ""
    imports: tuple[str, ...] = ()
    settle: Callable[[Path, Path], None] | None = None
    kernels: Callable[[Sequence["Case"], int, str], list[tuple[str, Mapping[str, Any]]]] | None = None
    counted: Callable[[Mapping[str, Any]], list[tuple[Case, str]]] = lambda parameters: []
    timelines: Timelines | None = None
    added: Added | None = None
    add: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def in_processes(self, case: Case, asked: int) -> int:
        """How many processes measure a case, of so many."""
        return 1 if self.early(case) else asked

    def check(self, parameters: Mapping[str, Any]) -> None:
        """Raise ValueError for a parameter that this study does not have or a value that it does not allow."""
        for name, value in parameters.items():
            if name not in self.parameters:
                known = ", ".join(self.parameters)
                raise ValueError(f"{self.name}: unknown parameter {name!r}; allowed: {known}")
            if problem := self.parameters[name](value):
                raise ValueError(f"{self.name}: parameter {name} is {value!r}; allowed: {problem}")


def leaving_out(study: Study, names: Sequence[str]) -> Study:
    """The study without the variants of these names."""
    if not names:
        return study
    return replace(
        study,
        variants=lambda case: [one for one in study.variants(case) if one.name not in names],
        left_out=tuple(names),
    )
