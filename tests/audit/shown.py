"""The numbers of a page's sentences, against their own origins and against the audits' tables.

A page is taken as it was written: its marks `<data class="origin">`, and the list of them beside it,
PAGE.numbers.json. Of a sentence nothing is read but that both have the same.

A number is recomputed if an audit has the table that its origin names, or, of what a view made or took from a table, if
any table of the study's audit, or its rows, have the column and lines with the keys. One of these lines must then have
the value; of a mean, one group of them, by values of up to three columns, or by size. An end of an interval is looked
for in those lines that have the middle shown before it. A count is recomputed of whole tables alone: of a part, its
origin does not say which.
"""

import ast
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from html.parser import HTMLParser
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from common import facts, us

Entry = dict[str, Any]  # a number as PAGE.numbers.json has it
Lines = Sequence[tuple[str, int]]  # table, and which line of it
FIELDS = ("text", "value", "decimals", "kind", "study", "gpu", "table", "keys", "column", "transform")
# What origins call a transform. Of numbers that are no such thing, NaN.
SCALES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "": lambda x: x,
    "−x": lambda x: -x,
    "100·x": lambda x: 100 * x,
    "1/x": lambda x: 1 / x,
    "100·(x−1)": lambda x: 100 * (x - 1),
    "100·(1−x)": lambda x: 100 * (1 - x),
    "100·(1/x−1)": lambda x: 100 * (1 / x - 1),
    "100·(1−1/x)": lambda x: 100 * (1 - 1 / x),
    "100−x": lambda x: 100 - x,
    "x/1000": lambda x: x / 1e3,
    "1000·x": lambda x: 1e3 * x,
    "x/10⁶": lambda x: x / 1e6,
    "x/10⁹": lambda x: x / 1e9,
    "x/2¹⁰": lambda x: x / 2**10,
    "x/2²⁰": lambda x: x / 2**20,
}
MEANS = ("median", "mean", "geometric mean", "sum")
COUNTS = ("count", "share, 100·x")
SUMS = ("same", "together")  # of all lines of a table, noted under these names
PLACES = ("line", "block")  # the index of a series: where a value stands, and no value
FEW = 4  # lines that an end without a middle may be of: the tolerances of more would let anything pass
GROUPED = 24  # values that a column may have to make groups


# A page


class _Marks(HTMLParser):
    """The numbers of a page's sentences, as its marks have them, and all text of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Entry] = []
        self.text: list[str] = []
        self._mark: Entry | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "data" and given.get("class") == "origin":
            said = {name: given.get(f"data-{name}", "") for name in FIELDS}
            said["value"] = float(given["value"]) if given.get("value") else None
            self._mark = said | {"keys": json.loads(said["keys"] or "{}")}
            self.found.append(self._mark)

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._mark is not None:
            self._mark["text"] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "data":
            self._mark = None


def _read(html: str) -> tuple[list[Entry], str]:
    reader = _Marks()
    reader.feed(html)
    return [entry | {"decimals": decimals(entry["text"])} for entry in reader.found], "".join(reader.text)


def marks(html: str) -> list[Entry]:
    """The numbers of a page, in its order."""
    return _read(html)[0]


def decimals(text: str) -> int | None:
    """Digits after the point, of "1.2e-07" those of 0.00000012; None of what is no number."""
    digits, _, power = text.partition("e")
    return None if math.isnan(number(text)) else len(digits.partition(".")[2]) - int(power or 0)


def number(text: str) -> float:
    """What a text shows: "−1,234.5"; NaN of what is no number."""
    try:
        return float(text.replace("−", "-").replace(",", ""))
    except ValueError:
        return math.nan


def described(entry: Mapping[str, Any]) -> str:
    """A number, where it is from and, where that is known, the sentence around it."""
    origin = " · ".join(
        str(entry[name]) for name in ("study", "gpu", "table", "keys", "column", "transform") if entry[name]
    )
    return f"{entry['text']!r} ({origin})" + (f" in: {entry['sentence'][:200]}" if entry.get("sentence") else "")


def parted(html: str, listed: Sequence[Entry]) -> list[str]:
    """Where a page is not what is listed beside it: numbers, both ways, and sentences, of which others are a part."""
    page, text = _read(html)
    texts = [
        [json.dumps([entry[name] for name in FIELDS], sort_keys=True) for entry in some] for some in (page, listed)
    ]
    wrong = []
    for same, start, end, other, last in SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        if same != "equal":
            wrong += [f"on the page alone: {described(one)}" for one in page[start:end]]
            wrong += [f"in the list alone: {described(one)}" for one in listed[other:last]]
    sentences = dict.fromkeys(entry["sentence"] for entry in listed)
    return wrong + [f"not on the page: {one}" for one in sentences if one not in text]


def misread(entries: Sequence[Entry]) -> list[str]:
    """Numbers that do not show the value of their origin, rounded."""
    wrong = [entry for entry in entries if entry["kind"] != "none" and not _reads(entry)]
    return [f"not its value, {entry['value']}: {described(entry)}" for entry in wrong]


def _reads(entry: Mapping[str, Any]) -> bool:
    if entry["value"] is None or entry["decimals"] is None or entry["decimals"] != decimals(entry["text"]):
        return False
    return abs(number(entry["text"]) - entry["value"]) <= 0.5 * 10.0 ** -entry["decimals"] * (1 + 1e-6)


# Where a number is from


@dataclass(frozen=True)
class Source:
    """What an origin calls its table. name: "tables.ratios", or another text, which names none.

    given, named: arguments; wanted: of `where`. whole: all lines that the function returns. mean: "geometric mean", and
    of: its column, where this is noted and not the table.
    """

    name: str
    given: Sequence[Any] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    wanted: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = True
    mean: str = ""
    of: str = ""


def source(text: str) -> Source:
    """ "tables.ratios('hot'), where(BV=8)" in its parts."""
    if text.startswith("geometric mean of "):
        return Source("", mean="geometric mean", of=text.removeprefix("geometric mean of "))
    if text in SUMS:
        return Source("", mean="sum")
    try:
        first, *others = ast.parse(f"({text},)", mode="eval").body.elts
    except SyntaxError:
        return Source(text)
    if not isinstance(first, ast.Call | ast.Name | ast.Attribute):  # claims.sglang-20283
        return Source(text)
    given, named = _arguments(first)
    wanted = {key: value for one in others if _name(one) == "where" for key, value in _arguments(one)[1].items()}
    return Source(_name(first), given, named, wanted, not others)


def _name(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def _arguments(node: ast.expr) -> tuple[list[Any], dict[str, Any]]:
    if not isinstance(node, ast.Call):
        return [], {}
    return [_value(one) for one in node.args], {one.arg or "": _value(one.value) for one in node.keywords}


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:  # np.float64(3.0)
        return ast.unparse(node)


# Its recomputation


@dataclass(frozen=True)
class Found:
    """What the audits say of a number. found: whether it is theirs, None if they have no such; lines: whose it is."""

    found: bool | None
    lines: Lines = ()


NOT_THERE = Found(None)


class Audited:
    """A table of an audit, to be searched."""

    def __init__(self, name: str, frame: pd.DataFrame):
        self.name, self.frame = name, frame.reset_index(drop=True)
        self._fitting: dict[tuple[str, str, bool], np.ndarray] = {}
        self._cells: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._means: dict[tuple[str, str, str], np.ndarray] = {}

    def lines(self, wanted: Mapping[str, Any], sure: bool = False) -> np.ndarray:
        """Which lines have these values, of the columns that there are; of a list, tuple or set: one of its values.

        sure: no lines whose verdict may be another.
        """
        chosen = np.ones(len(self.frame), bool)
        for name in wanted.keys() & set(self.frame):
            chosen &= self._fits(name, wanted[name], sure)
        return chosen

    def _fits(self, name: str, value: Any, sure: bool) -> np.ndarray:
        key = name, repr(value), sure
        if key not in self._fitting:
            several = value if isinstance(value, list | tuple | set) else [value]
            self._fitting[key] = np.array(
                [any(_is(cell, one, sure) for one in several) for cell in self.frame[name]], bool
            )
        return self._fitting[key]

    def cells(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Of each line, between what its value may be; NaN without one."""
        if column not in self._cells:
            ends = (f"{column} from", f"{column} to")
            names = ends if ends[0] in self.frame else (column, column)
            numbers = [pd.to_numeric(self.frame[name], errors="coerce") for name in names]
            self._cells[column] = tuple(some.to_numpy(float, na_value=np.nan) for some in numbers)
        return self._cells[column]

    def values(self, column: str, wanted: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Places of the lines that have these values, and [line, end] of the column there."""
        ends = np.column_stack(self.cells(column))
        places = np.flatnonzero(self.lines(wanted) & ~np.isnan(ends[:, 0]))
        return places, ends[places]

    def count(self, entry: Entry, wanted: Mapping[str, Any]) -> Found:
        """Whether a number is how many lines have these values, if the table has all these columns."""
        if entry["transform"] != "count" or not wanted.keys() <= set(self.frame):
            return NOT_THERE
        least, most = (int(self.lines(wanted, sure).sum()) for sure in (True, False))
        return Found(least <= entry["value"] <= most)

    def means(self, how: str, column: str, wanted: Mapping[str, Any]) -> np.ndarray:
        """[group, end]: between what a mean of the lines that have these values may be, or of a group of them."""
        key = how, column, repr(wanted)
        if key not in self._means:
            low, high = self.cells(column)
            places = np.flatnonzero(self.lines(wanted) & ~np.isnan(low))
            ends = low[places], high[places]
            parts = [np.column_stack([_mean(how, some, at) for some in ends]) for at in self._groups(places)]
            self._means[key] = np.concatenate(parts) if len(places) else np.empty((0, 2))
        return self._means[key]

    def _groups(self, places: np.ndarray) -> Iterator[np.ndarray]:
        """Of each way to group some lines, the number of each line's group: by values, or by size and a value."""
        codes = [pd.factorize(values)[0] for _, values in self._words.iloc[places].items()]
        codes = [some for some in codes if 0 < some.max(initial=0) < GROUPED]
        yield np.zeros(len(places), int)
        for count in (1, 2, 3):
            for some in combinations(codes, count):
                yield _together(some)
        for size in self._sizes(places):
            for count in (0, 1):
                for some in combinations(codes, count):
                    yield _together((size, *some))

    def _sizes(self, places: np.ndarray) -> Iterator[np.ndarray]:
        """The lines up to each size of each column of whole numbers, against those beyond."""
        for _, values in self.frame.iloc[places].select_dtypes("integer").items():
            sizes = np.unique(values)
            for size in sizes[:-1] if len(sizes) < GROUPED else ():
                yield (values.to_numpy() > size).astype(int)

    @cached_property
    def _words(self) -> pd.DataFrame:
        """The columns that are no measured numbers, as text."""
        names = [name for name, values in self.frame.items() if not pd.api.types.is_float_dtype(values)]
        return self.frame[names].astype(str)


def _together(codes: Sequence[np.ndarray]) -> np.ndarray:
    """The number of each line's group, of those that have the same codes."""
    found = np.zeros(len(codes[0]), int)
    for some in codes:
        found = pd.factorize(found * (some.max() + 1) + some)[0]
    return found


def _mean(how: str, values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Of each group."""
    some = pd.Series(np.log(values) if how == "geometric mean" else values).groupby(groups)
    found = getattr(some, how.removeprefix("geometric "))().to_numpy()
    return np.exp(found) if how == "geometric mean" else found


def _is(cell: Any, value: Any, sure: bool) -> bool:
    """Whether a cell is what a key says; not `sure`: of a verdict that turns, whether it may be."""
    if isinstance(cell, str):
        return str(value) == cell or (not sure and str(value) in cell.split("|"))
    return bool(cell == value)


def _within(value: float, ends: np.ndarray) -> np.ndarray:
    """Which of [line, end] have a value between them, to 1e-9."""
    least, most = ends.min(axis=1), ends.max(axis=1)
    slack = 1e-9 * np.maximum(np.abs(ends).max(axis=1), 1e-9)
    return (least - slack <= value) & (value <= most + slack)


def recorded(rows: pd.DataFrame) -> pd.DataFrame:
    """The usable rows with case, options and evidence; us: of a call; tbs: TB/s of the bytes that it must move."""
    found = []
    for row in rows[rows["ok"]].to_dict("records"):
        if len(row["samples_ns"]):
            line = {name: value for name, value in row.items() if isinstance(value, str | int | float)}
            line |= facts(row["evidence"]) | row["params"] | row["chosen"] | {"us": us(row)}
            found.append(line | {"tbs": row["floor_bytes"] / line["us"] / 1e6})
    return pd.DataFrame(found)


class Audit:
    """What the audit of a study has of a GPU.

    tables: name -> table, as origins call it. functions: name -> the lab's function, whose parameters' names are read.
    """

    def __init__(self, tables: Mapping[str, pd.DataFrame], functions: Mapping[str, Callable[..., Any]]):
        self._tables = {name: Audited(name, frame) for name, frame in tables.items()}
        self._signatures = {name: inspect.signature(function) for name, function in functions.items()}

    def look_up(self, entry: Entry, before: Lines = ()) -> Found:
        """A measured number in the tables. before: lines of the last one that had the same table and keys."""
        origin = source(entry["table"])
        given = self._given(origin)
        table = self._tables.get(origin.name)
        if table and not given.keys() <= set(table.frame):  # then it may be of other lines than the audit has
            table = None
        wanted = given | origin.wanted | entry["keys"]
        if entry["transform"] in COUNTS:
            return table.count(entry, wanted) if table and origin.whole else NOT_THERE
        column = origin.of or entry["column"]
        if column in PLACES or (origin.of and entry["column"] != "ratio"):
            return NOT_THERE
        some = [one for one in ([table] if table else self._tables.values()) if column in one.frame]
        how, scale = _transform(entry["transform"])
        with np.errstate(all="ignore"):
            if how or origin.mean:
                return _of_means([one.means(how or origin.mean, column, wanted) for one in some], scale, entry["value"])
            return _of_lines(
                [(one, *one.values(column, wanted)) for one in some], column, scale, entry["value"], before
            )

    def _given(self, origin: Source) -> dict[str, Any]:
        """Parameter -> value, of the arguments beside rows and the defaults."""
        if origin.name not in self._signatures:
            return {}
        bound = self._signatures[origin.name].bind(None, *origin.given, **origin.named)
        bound.apply_defaults()
        _, *found = bound.arguments.items()
        said = dict(found)
        for name, one in bound.signature.parameters.items():
            if one.kind is inspect.Parameter.VAR_KEYWORD:
                said |= said.pop(name)
        return said


def _transform(text: str) -> tuple[str, str]:
    """ "median, 100·x": the mean, and the scale."""
    how, _, scale = text.rpartition(", ")
    return (scale, "") if scale in MEANS else (how, scale)


def _of_means(ends: Sequence[np.ndarray], scale: str, value: float) -> Found:
    found = [_within(value, SCALES[scale](one)).any() for one in ends if len(one)]
    return Found(any(found)) if found else NOT_THERE


def _of_lines(
    some: Sequence[tuple[Audited, np.ndarray, np.ndarray]], column: str, scale: str, value: float, before: Lines
) -> Found:
    """some: tables, places of the lines that it may be of, and their ends."""
    end = is_end(column)
    if end and before:
        kept = [(one, np.isin(places, [at for name, at in before if name == one.name])) for one, places, _ in some]
        some = [(one, places[keep], ends[keep]) for (one, keep), (_, places, ends) in zip(kept, some, strict=True)]
    count = sum(len(places) for _, places, _ in some)
    if not count or (end and not before and count > FEW):
        return NOT_THERE
    hits = [(one.name, int(at)) for one, places, ends in some for at in places[_within(value, SCALES[scale](ends))]]
    return Found(bool(hits), hits)


def is_end(column: str) -> bool:
    """Whether a column has the ends of intervals: "low", "gain high"."""
    return bool(set(column.split()) & {"low", "high"})


def looked_up(entries: Iterable[Entry], audits: Mapping[tuple[str, str], Audit]) -> Iterator[tuple[Entry, Found]]:
    """Each measured number of a page, and what the audits say of it. audits: (notebook, GPU) -> that of its study.

    A number that is of none of these GPUs, but of several, may be any one's.
    """
    known = {gpu for _, gpu in audits}
    middle: dict[tuple[str, str], tuple[Any, Lines]] = {}
    for entry in entries:
        if entry["kind"] == "measured":
            key, results = (entry["table"], entry["keys"]), []
            gpus = {entry["gpu"]} if entry["gpu"] in known else known
            for place in [at for at in audits if at[0] == entry["study"] and at[1] in gpus]:
                last, lines = middle.get(place, (None, ()))
                results.append(audits[place].look_up(entry, lines if last == key else ()))
                if results[-1].lines and not is_end(entry["column"]):
                    middle[place] = key, results[-1].lines
            yield entry, max(results, key=lambda one: (one.found is not None, bool(one.found)), default=NOT_THERE)
