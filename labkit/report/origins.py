"""Where each number in a sentence is from: matched to the tables that were read while the sentence was made.

`marked` finds a sentence's numbers and their origins; the page shows them as `<data class="origin">`, and `numbers`
reads them back, for REPORTS/<page>.numbers.json. That file is a list, in the order of the page, of objects with

    text       the number as shown, "1.29" or "−3"; decimals: digits after its point
    value      what was rounded to it, after `transform`; null without an origin
    kind       measured; case (a parameter of a case, or part of a name); published (a figure of a claim's source);
               rule (a constant of the lab's own: of `RULES`, or of a module of the study, its name in `column`);
               none (no origin)
    study, gpu name of the notebook, slug of the GPU
    table      of the study's modules, with the arguments beside rows: "tables.ratios(cache='hot')"
    keys       column -> value, of what is true of all lines that the number is of
    column     whose values these are; empty: the lines themselves are counted
    transform  what was done to them: an aggregate of several lines (`AGGREGATES`, "count"; empty: one line's value),
               then `SCALES`, as in "median, 100·x"
    sentence   all that stands around it

Of several matches one is taken that has the very value that was said (`ledger.say`), not one that only reads alike; of
these the one whose keys the clause names, then a line before an aggregate, then the plainest.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from html.parser import HTMLParser
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup, escape

from labkit.bench.claim import Claim
from labkit.bench.ledger import Entry, Noted, Said
from labkit.report.figures import Html

KINDS = ("measured", "case", "published", "rule", "none")
# A number by itself; digits of a name (fp32, Q4_K, Qwen3.5-27B), a version or a date are none.
NUMBER = re.compile(
    r"(?<![\w.])(?<![\w.][-/])(?:(?<![\w)])[+−-])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?(?!\w|\.\d|[-/]\w)"
)
PRECISE = 3  # digits behind the point, from which on a claim's figure is hardly another one's
_RANGE = re.compile(f" (?:to|→) {NUMBER.pattern}")
# Constants of the lab's own, by the words that they stand in.
RULES = re.compile(
    r"(?<=\()0\.8(?=: 1\.25× slower\))|(?<=\(0\.8: )1\.25(?=× slower\))|"  # an example
    r"\b(?:95|5)(?=th percentile| % interval)|(?<=±)1(?= %)|\b\d+(?= bytes? (?:wide|long)\b)|(?<=lines of )128\b"
)
AGGREGATES: dict[str, Callable[[np.ndarray], float]] = {
    "median": np.median,
    "mean": np.mean,
    "geometric mean": lambda values: float(np.exp(np.log(values).mean())) if (values > 0).all() else np.nan,
    "sum": np.sum,
}
Scale = Callable[[np.ndarray], np.ndarray]
SCALES: dict[str, tuple[Scale, str]] = {  # transform -> what it does, and where the number must stand
    "": (lambda x: x, ""),
    "−x": (lambda x: -x, ""),
    "100·x": (lambda x: 100 * x, "%"),
    "1/x": (lambda x: 1 / x, ""),
    "100·(x−1)": (lambda x: 100 * (x - 1), "%"),
    "100·(1−x)": (lambda x: 100 * (1 - x), "%"),
    "100·(1/x−1)": (lambda x: 100 * (1 / x - 1), "%"),
    "100·(1−1/x)": (lambda x: 100 * (1 - 1 / x), "%"),
    "100−x": (lambda x: 100 - x, "%"),
    "x/1000": (lambda x: x / 1e3, "unit"),
    "1000·x": (lambda x: 1e3 * x, "unit"),
    "x/10⁶": (lambda x: x / 1e6, "unit"),
    "x/10⁹": (lambda x: x / 1e9, "unit"),
    "x/2¹⁰": (lambda x: x / 2**10, "unit"),
    "x/2²⁰": (lambda x: x / 2**20, "unit"),
}
_UNIT = re.compile(r"\s?(?:(%|percent)|(µs|ms|ns|s|[kKMGT]i?B(?:/s)?|TFLOP/s|Top/s|bytes|W|MHz)\b|(times\b|×))")
_FACTOR = re.compile(r"× (?:faster|slower)")  # a size with its direction
_INTERVAL = re.compile(r"(?: ?(?:%|µs|ms|s))? \[|, ")  # from a number to what stands in its brackets
_UNIT_AHEAD = re.compile(
    r"(?:(%)|(µs|TFLOP/s|TB/s|GB/s))(?: \([^)]*\))?: ?[^.;:%]*(?:\.\d[^.;:%]*)*$"
)  # "Best TFLOP/s: bf16 767"


@dataclass(frozen=True)
class Place:
    """Where a sentence stands. study: name of the notebook; gpu: slug, gpu_name: as shown; claims: of the study."""

    study: str
    gpu: str
    gpu_name: str
    claims: Sequence[Claim] = ()


@dataclass(frozen=True)
class Origin:
    """Where one number is from; the module says what each field holds."""

    kind: str
    value: float | None = None
    table: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    column: str = ""
    transform: str = ""

    def words(self, place: Place) -> str:
        """For the tooltip: "01_state_layout · H100 · tables.ratios · batch 64, state fp32 · ratio"."""
        if self.kind == "none":
            return "no origin"
        keys = ", ".join(f"{name} {value}" for name, value in self.keys.items())
        kind = (
            ""
            if self.kind == "measured"
            else {"case": "parameter", "rule": "rule of the lab"}.get(self.kind, self.kind)
        )
        return " · ".join(
            filter(None, [place.study, place.gpu_name, kind, self.table, keys, self.column, self.transform])
        )


@dataclass(frozen=True)
class Number:
    """A number as it stands in a text. unit: "%", "×" (or "times"), "unit" (another) or empty."""

    text: str
    start: int
    end: int
    unit: str

    @cached_property
    def value(self) -> float:
        """Its value."""
        return float(self.text.replace("−", "-").replace(",", ""))

    @cached_property
    def decimals(self) -> int:
        """Digits after the point; of "1.2e-07", those of 0.00000012."""
        digits, _, exponent = self.text.partition("e")
        return len(digits.partition(".")[2]) - int(exponent or 0)

    def shows(self, values: Any) -> Any:
        """Which values read like this at its precision."""
        if not self.unit and self.decimals == 0:  # a count is a whole number
            return values == self.value
        return np.abs(values - self.value) <= 0.5 * 10.0**-self.decimals * (1 + 1e-6)


def found_in(text: str) -> list[Number]:
    """The numbers of a text."""
    found: list[Number] = []
    for match in NUMBER.finditer(text):
        unit = _unit(text, *match.span())
        inside = text.rfind("[", 0, match.start()) > text.rfind("]", 0, match.start())
        if not unit and found and inside and _INTERVAL.fullmatch(text, found[-1].end, match.start()):
            unit = found[-1].unit
        found.append(Number(match[0], *match.span(), unit))
    return found


def _unit(text: str, start: int, end: int) -> str:
    """The unit of a number: behind it, behind the other end of its range, or before the colon of a list."""
    if other := _RANGE.match(text, end):
        end = other.end()
    unit = _UNIT.match(text, end)
    unit = unit or _UNIT_AHEAD.search(text, max(0, start - 200), start)
    if not unit and text[start - 1 : start] == "×":
        return "×"
    return ("", "%", "unit", "×")[unit.lastindex] if unit else ""


class Pool:
    """What a sentence was made from, ready to be searched. rows: of its GPU and study; book: the tables read."""

    def __init__(self, rows: pd.DataFrame, book: Iterable[Entry], place: Place):
        self.rows, self.place = rows, place
        book = list(book)
        self.said = [one.value for one in book if isinstance(one, Said)]
        self.next = 0  # place of the first that no number was found to be yet
        self.names = _names(rows)
        tables: dict[tuple, _Table] = {}
        for one in {id(one): one for one in book if isinstance(one, Noted)}.values():  # what is kept is noted again
            if _READ not in one.kept:
                one.kept[_READ] = _Table(one, self.names)
            made = one.kept[_READ]
            tables.setdefault(made.mark, made)  # the first is where it was made, not where it was handed on
        self.tables = list(tables.values())[::-1]  # the last is what the sentence is made from

    @cached_property
    def words(self) -> list[str]:
        """Names with digits in them: variants, models, states; the longest first."""
        found = {text for table in self.tables for values in table.keys.values() for text in set(values)}
        found |= set(self.rows["variant"].unique()) if "variant" in self.rows else set()
        found |= {value for values in self.names.values() for value in values}
        return sorted(
            (text for text in found if isinstance(text, str) and len(text) > 2 and re.search(r"\d", text)),
            key=len,
            reverse=True,
        )

    @cached_property
    def published(self) -> set[float]:
        """The figures that the claims' sources state."""
        texts = [
            text
            for one in self.place.claims
            for text in (
                one.statement,
                one.condition,
                one.published,
                one.note,
                one.differs,
                one.source,
                one.quantity,
                *one.gpus,
            )
        ]
        sizes = {end for one in self.place.claims for end in one.size or ()}
        return {number.value for text in texts for number in found_in(text)} | sizes

    def origins(self, text: str) -> list[tuple[Number, Origin]]:
        """Every number of a text with its origin."""
        named = [match.span() for name in self.words if name in text for match in re.finditer(re.escape(name), text)]
        ruled = {match.start() for match in RULES.finditer(text)}
        said: list[tuple[Number, Origin]] = []
        before: tuple[_Table, int] | None = None
        for number in found_in(text):
            if number.start in ruled:
                origin = Origin("rule", number.value)
            elif any(start <= number.start and number.end <= end for start, end in named):
                origin = Origin("case", number.value)
            else:
                origin, before = self._origin(text, number, before)
            said.append((number, origin))
        return said

    def _origin(self, text: str, number: Number, before: Any) -> tuple[Origin, Any]:
        parameter = self._parameter(text, number)
        if parameter and self._beside(text, number, parameter):
            return Origin("case", number.value, column=parameter), before
        clause = Clause.around(text, number)
        match = self._match(number, clause, before)
        constant = next((name for name, value in _constants(self.place.study).items() if number.shows(value)), "")
        if match and not (match.is_weak and constant and not number.unit):
            return match.origin, match.line
        if parameter:
            return Origin("case", number.value, column=parameter), before
        if number.value in self.published:
            return Origin("published", number.value), before
        if constant:
            return Origin("rule", _constants(self.place.study)[constant], column=constant), before
        return Origin("none"), before

    def _parameter(self, text: str, number: Number) -> str:
        """The parameter that has this value, the one named beside it first."""
        having = [name for name, values in self.names.items() if number.value in values]
        return next((name for name in having if self._beside(text, number, name)), next(iter(having), ""))

    @staticmethod
    def _beside(text: str, number: Number, name: str) -> bool:
        word = re.escape(name.rstrip("s").replace("_", " "))
        near = rf"\b{word}e?s?\b[ =≥≤>]*(?:(?:of|from|to|at|and|[\d,. ]+) ?)*$"
        after = rf" ?(?:(?:to|and|or|from|[\d,. ]+) ?)*{word}e?s?\b"
        return bool(re.search(near, text[: number.start], re.I) or re.match(after, text[number.end :], re.I))

    def _match(self, number: Number, clause: "Clause", before: Any) -> "Match | None":
        """The best of all tables."""
        exact = self._exact(number)
        if exact is None and number.decimals >= PRECISE and number.value in self.published:
            return None  # a limit of a claim, as its text has it: what is measured reads so by chance
        found: list[Match] = []
        for table in self.tables:
            found += table.lines(number, clause, before)
            found += table.counts(number, clause)
            found += table.aggregates(number, clause)

        def cost(match: Match) -> tuple:
            return exact is not None and not _is(match.origin.value, exact), match.cost

        return min(found or self._shares(number, clause), key=cost, default=None)

    def _exact(self, number: Number) -> float | None:
        """What was rounded to a number, if that was noted: sentences say their numbers in the order of the text."""
        for place in (*range(self.next, len(self.said)), *reversed(range(self.next))):
            if number.shows(self.said[place]) or (number.unit == "%" and number.shows(100 * self.said[place])):
                self.next = place + 1
                return self.said[place]
        return None

    def _shares(self, number: Number, clause: "Clause") -> "list[Match]":
        return [match for table in self.tables for match in table.shares(number, clause)]


def _is(value: float | None, exact: float) -> bool:
    """Whether a value is the one that was said, in percent or not, but for what arithmetic rounds."""
    return value is not None and any(math.isclose(value, by * exact, rel_tol=1e-9) for by in (1, 100))


def _names(rows: pd.DataFrame) -> dict[str, set[Any]]:
    """Parameter of a case or option of a variant -> its values."""
    found: dict[str, set[Any]] = {}
    for column in ("case", "options"):
        for text in rows[column].unique() if column in rows else ():
            for name, value in json.loads(text).items():
                if isinstance(value, str | int | float):
                    found.setdefault(name, set()).add(value)
                if isinstance(value, str) and (numbered := re.match(r"\d+(?= \w)", value)):  # "9 graph"
                    found[name].add(int(numbered[0]))
    return found


@lru_cache
def _constants(notebook: str) -> dict[str, float]:
    """ "claims.CONTEXT" -> its value, of the constants of a study's modules."""
    package = f"labkit.studies.{notebook.partition('_')[2]}."
    return {
        f"{name.removeprefix(package)}.{key}": value
        for name, module in sorted(sys.modules.items())
        if name.startswith(package)
        for key, value in vars(module).items()
        if key.isupper() and isinstance(value, int | float) and not isinstance(value, bool)
    }


@dataclass(frozen=True)
class Clause:
    """What stands around a number. near: between the commas; text: between semicolons and full stops.

    aggregate: of `AGGREGATES`, the one that the words just before the number name, or empty; end: "low" or "high" of an
    interval, or empty.
    """

    near: str
    text: str
    aggregate: str
    end: str

    @classmethod
    def around(cls, text: str, number: Number) -> "Clause":
        """Of a number in a text."""
        before, after = text[: number.start], text[number.end :]
        wide = _SENTENCE.split(before)[-1], _SENTENCE.split(after)[0]
        near = _COMMA.split(wide[0])[-1], _COMMA.split(wide[1])[0]
        said = [name for name in AGGREGATES if re.search(rf"\b{name}\b", f"{before[-30:]}#{after[:30]}")]
        inside = before.rpartition("[")[2] if "]" in after[:20] and before.rfind("[") > before.rfind("]") else None
        end = "" if inside is None else "high" if NUMBER.search(inside) else "low"
        return cls(" # ".join(near), " # ".join(wide), said[-1] if said else "", end)


def _names_value(text: str, numbers: frozenset[float], value: Any) -> bool:
    """Whether a value of a key stands in a text that has these numbers."""
    if isinstance(value, str):
        return len(value) > 1 and value in text and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None
    return not isinstance(value, bool | np.bool_) and value in numbers


@dataclass(frozen=True)
class Match:
    """A possible origin; the least cost is the best. line: the table and which line of it."""

    cost: tuple
    origin: Origin
    line: Any = None

    @property
    def is_weak(self) -> bool:
        """Whether the clause names other keys than these, or none of these."""
        return bool(self.cost[0])


_READ = "table"  # what is kept with a table that was noted, so that it is read once
Part = tuple[dict[str, Any], np.ndarray]  # what is true of some lines, and which these are


class _Table:
    """A noted table: its measured columns as one array, and its keys."""

    def __init__(self, noted: Noted, names: Mapping[str, Any]):
        frame = noted.table.loc[:, ~noted.table.columns.duplicated()]
        kinds = {column: _kind(frame[column], str(column), names) for column in frame}
        self.name = f"{noted.name}({noted.arguments})" if noted.arguments else noted.name
        self.columns = [column for column, kind in kinds.items() if kind == "value"]
        self.units = np.array([_unit_of(str(column)) for column in self.columns], str)
        self.keys = {column: frame[column].tolist() for column, kind in kinds.items() if kind == "key"}
        self.values = np.column_stack([frame[c].to_numpy(float) for c in self.columns] or [np.zeros((len(frame), 0))])
        self.length = len(frame)
        self.mark = (self.values.tobytes(), repr(self.keys), tuple(self.columns))
        self._named: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._aggregated: dict[str, np.ndarray] = {}

    @cached_property
    def scaled(self) -> dict[str, np.ndarray]:
        """The values after each of `SCALES`."""
        with np.errstate(all="ignore"):
            return {scale: change(self.values) for scale, (change, _) in SCALES.items()}

    @cached_property
    def coded(self) -> dict[str, tuple[np.ndarray, list[Any]]]:
        """Of each key the number of each line's value, and the values."""
        found = {}
        for key, values in self.keys.items():
            known = {value: code for code, value in enumerate(dict.fromkeys(map(_hashed, values)))}
            found[key] = np.array([known[_hashed(value)] for value in values], int), list(known)
        return found

    @cached_property
    def parts(self) -> list[Part]:
        """All lines, and those that have the same value of one or of two keys."""
        few = [key for key, (_, values) in self.coded.items() if 1 < len(values) <= 12]
        found: list[Part] = [({}, np.ones(self.length, bool))]
        for names in (*((one,) for one in few), *(combinations(few, 2) if self.length <= _SMALL else ())):
            marks = np.column_stack([self.coded[name][0] for name in names])
            for mark in np.unique(marks, axis=0):
                keys = {name: self.coded[name][1][code] for name, code in zip(names, mark, strict=True)}
                found.append((keys, (marks == mark).all(axis=1)))
        return found

    @cached_property
    def counted(self) -> dict[int, list[tuple[dict[str, Any], int]]]:
        """Number of lines -> the parts that have so many."""
        found: dict[int, list[tuple[dict[str, Any], int]]] = {}
        for keys, chosen in self.parts:
            found.setdefault(int(chosen.sum()), []).append((keys, int(chosen.sum())))
        return found

    def lines(self, number: Number, clause: Clause, before: Any) -> Iterator[Match]:
        """Single lines that show the number."""
        clash, agree = self._lines_named(clause)
        for rank, (scale, (_, where)) in enumerate(SCALES.items()):
            if where and where != number.unit:
                continue
            fits = number.shows(self.scaled[scale]) & _right_unit(self.units, number.unit, scale)
            for line, column in np.argwhere(fits).tolist():
                name = str(self.columns[column])
                beside = clause.end and before is not None and before[0] is self and before[1] == line
                end = self._end_of(name, scale) != clause.end
                cost = (clash[line] > 0, bool(clause.aggregate), not beside, end, 2 * (rank > 0) - agree[line], rank)
                value = float(self.scaled[scale][line, column])
                keys = {key: values[line] for key, values in self.keys.items() if _says(key, values[line])}
                yield Match((*cost, clash[line]), Origin("measured", value, self.name, keys, name, scale), (self, line))

    @staticmethod
    def _end_of(column: str, scale: str) -> str:
        """Which end of an interval a column has, after what turns it round."""
        if column not in ("low", "high"):
            return ""
        turned = scale in ("1/x", "−x", "100·(1−x)", "100·(1/x−1)", "100−x")
        return {"low": "high", "high": "low"}[column] if turned else column

    def counts(self, number: Number, clause: Clause) -> Iterator[Match]:
        """How many lines there are, or have the same keys."""
        if number.unit or number.decimals or number.value < 0:
            return
        for keys, count in self.counted.get(int(number.value), ()):
            named, unnamed = self._part_named(clause, keys)
            cost = (unnamed > 0, False, True, False, -named, 0, unnamed)
            yield Match(cost, Origin("measured", count, self.name, keys, "", "count"))

    def shares(self, number: Number, clause: Clause) -> Iterator[Match]:
        """What share of all lines has a value of a key."""
        for count, parts in self.counted.items() if number.unit == "%" and self.length > 1 else ():
            if number.shows(share := 100 * count / self.length):
                for keys, _ in parts:
                    named, unnamed = self._part_named(clause, keys)
                    if keys and not unnamed:
                        yield Match(
                            (False, False, True, False, 1 - named, 9, 0),
                            Origin("measured", share, self.name, keys, "", "share, 100·x"),
                        )

    def aggregates(self, number: Number, clause: Clause) -> Iterator[Match]:
        """The aggregate that the clause names, of the lines that have the same keys."""
        for how in {"": (), "mean": ("geometric mean", "mean")}.get(clause.aggregate, (clause.aggregate,)):
            for scale in _OF_AGGREGATES:
                change, where = SCALES[scale]
                if where and where != number.unit:
                    continue
                with np.errstate(all="ignore"):
                    made = change(self.aggregated(how))
                fits = number.shows(made) & _right_unit(self.units, number.unit, scale)
                for part, column in np.argwhere(fits).tolist():
                    keys, name = self.parts[part][0], str(self.columns[column])
                    if "verdict" in keys:  # "1.71× faster" is no mean of what is faster
                        continue
                    named, unnamed = self._part_named(clause, keys)
                    cost = (unnamed > 0, False, True, name in ("low", "high"), -named, 0, unnamed)
                    transform, value = ", ".join(filter(None, [how, scale])), float(made[part, column])
                    yield Match(cost, Origin("measured", value, self.name, keys, name, transform))

    def aggregated(self, how: str) -> np.ndarray:
        """An aggregate of every part (lines) and column; NaN where there is no value."""
        if how not in self._aggregated:
            found = np.full((len(self.parts), len(self.columns)), np.nan)
            for line, (_, chosen) in enumerate(self.parts):
                for column in range(len(self.columns)):
                    values = self.values[chosen, column]
                    values = values[np.isfinite(values)]
                    if len(values):
                        found[line, column] = AGGREGATES[how](values)
            self._aggregated[how] = found
        return self._aggregated[how]

    def _part_named(self, clause: Clause, keys: Mapping[str, Any]) -> tuple[int, int]:
        """How many of these keys the clause names, and how many not."""
        text = _FACTOR.sub("×", clause.text) if "verdict" in keys else clause.text  # "1.71× faster" is no verdict
        numbers = _numbers_in(text)
        named = sum(_names_value(text, numbers, value) for value in keys.values())
        return named, len(keys) - named

    def _lines_named(self, clause: Clause) -> tuple[np.ndarray, np.ndarray]:
        """Of each line: of how many keys the clause names another value, and of how many this one, near ones twice."""
        (far_clash, far), (near_clash, near) = self._lines_in(clause.text), self._lines_in(clause.near)
        return far_clash + near_clash, far + near

    def _lines_in(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        if text not in self._named:
            clash, agree = np.zeros(self.length, int), np.zeros(self.length, int)
            numbers = _numbers_in(text)
            for codes, values in self.coded.values():
                known = np.array([_names_value(text, numbers, value) for value in values], bool)
                if known.any():
                    hit = known[codes]
                    agree += hit
                    clash += ~hit
            self._named[text] = clash, agree
        return self._named[text]


_SENTENCE = re.compile(r"[;\n]|\.\s")
_COMMA = re.compile(r",\s| and |: ")
_SMALL = 100  # lines of a table of which parts by two keys are looked at
_OF_AGGREGATES = ("", "100·x", "1/x", "100·(x−1)", "100·(1−x)")
_NO_KEYS = ("study", "reason", "evidence", "counters", "case", "options", "verdict", "kernel_sha", "revision", "utc")
_NO_VALUES = ("calls_per_sample", "schema", "sets", "floor_flops", "run", "runs")
_TIME = re.compile(r"\bus\b|µs|\bms\b|\bseconds\b|\bns\b|_us\b", re.I)


@lru_cache(4096)
def _numbers_in(text: str) -> frozenset[float]:
    return frozenset(one.value for one in found_in(text))


def _hashed(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | np.bool_) else None


def _says(key: str, value: Any) -> bool:
    """Whether a key tells which line it is."""
    return key not in _NO_KEYS and isinstance(value, str | int | float | np.bool_) and value == value and value != ""


def _kind(column: pd.Series, name: str, names: Mapping[str, Any]) -> str:
    """ "key" (says which line it is), "value" (measured or counted) or neither."""
    if pd.api.types.is_bool_dtype(column):
        return "key"
    if pd.api.types.is_numeric_dtype(column):
        return "key" if name in names else "" if name in _NO_VALUES else "value"
    first = next((value for value in column if value is not None), None)
    return "key" if isinstance(first, str) and len(first) < 80 and not first.startswith(("{", "[")) else ""


def _unit_of(column: str) -> str:
    """ "%" or "time" of a column that says so."""
    return "%" if "%" in column or "percent" in column else "time" if _TIME.search(column) else ""


def _right_unit(units: np.ndarray, unit: str, scale: str) -> np.ndarray:
    """Which columns, by their units, a number with this unit can be of."""
    if unit == "%":
        return units != "time" if "100" not in scale or scale == "100−x" else units == ""
    return units != "%" if unit == "unit" else units == ""


# On the page


def marked(text: str, pool: Pool, shown: int | None = None) -> Html:
    """The text with a `<data>` element for each number; `plain` ends in the name of the file that lists them.

    shown: how many characters are shown; the rest is read for what their numbers are of. None: all.
    """
    parts, end = [], 0
    for number, origin in pool.origins(text):
        if shown is None or number.end <= shown:
            parts += [escape(text[end : number.start]), _element(number, origin, pool.place)]
            end = number.end
    parts.append(escape(text[end:shown]))
    file = f" [numbers: {pool.place.study}.numbers.json]" if len(parts) > 1 else ""
    return Html(str(Markup().join(parts)), text[:shown] + file)


def marked_answer(question: str, text: str, pool: Pool) -> Html:
    """`marked`, of what answers a question, whose names say which line it is of: "W4A16" in "W4A16, both products".

    Names are what has letters and digits. Words and numbers, "decode" or "tile 32", are keys of lines by chance too.
    """
    return marked(f"{text} ({' '.join(_NAME.findall(question))})", pool, len(text))


_NAME = re.compile(r"(?<![\w.-])(?=[\w.-]*\d)(?=[\w.-]*[A-Za-z])[\w.-]*\w")


def marked_among(text: str, pools: Mapping[str, Pool]) -> Html:
    """`marked`, of a text on several GPUs. pools: GPU as the text names it -> what it was said from.

    A number is of the GPU in brackets behind it, "1.29× (fp32, H100)", else of the one that was named last before it,
    if that measured it; else of the first that did.
    """
    found = [pool.origins(text) for pool in pools.values()]
    parts, end = [], 0
    for place, (number, _) in enumerate(found[0] if found else ()):
        behind = _BEHIND.match(text, number.end)
        its = behind[1].split(", ") if behind else []
        named = [len(text) if gpu in its else text.rfind(gpu, 0, number.start) for gpu in pools]
        ways = sorted(range(len(named)), key=lambda which: -named[which])
        kinds = [found[which][place][1].kind for which in ways]
        best = ways[min(range(len(ways)), key=lambda which: (_RANKS.index(kinds[which]), which))]
        pool = list(pools.values())[best]
        parts += [escape(text[end : number.start]), _element(number, found[best][place][1], pool.place)]
        end = number.end
    parts.append(escape(text[end:]))
    study = next((pool.place.study for pool in pools.values()), "")
    return Html(str(Markup().join(parts)), text + (f" [numbers: {study}.numbers.json]" if len(parts) > 1 else ""))


_BEHIND = re.compile(r"[^.;()\d]{0,12}\(([^()]+)\)")
_RANKS = ("measured", "case", "published", "rule", "none")


def _element(number: Number, origin: Origin, place: Place) -> Markup:
    value = "" if origin.value is None else f"{origin.value:.12g}"
    facts = {"kind": origin.kind, "study": place.study, "gpu": place.gpu, "table": origin.table}
    facts |= {"keys": json.dumps(dict(origin.keys), default=_plain) if origin.keys else ""}
    facts |= {"column": origin.column, "transform": origin.transform}
    said = Markup("").join(Markup(' data-{}="{}"').format(name, text) for name, text in facts.items() if text)
    form = Markup('<data class="origin" value="{}" title="{}"{}>{}</data>')
    return form.format(value, origin.words(place), said, number.text)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


class _Reader(HTMLParser):
    """The numbers of a page, each with the text of the element that it stands in."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []
        self._blocks: list[tuple[str, list[str], list[dict[str, Any]]]] = []
        self._open: dict[str, Any] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: text or "" for name, text in attrs}
        if tag == "data" and known.get("class") == "origin":
            self._open = _entry(known)
            self.found.append(self._open)
            if self._blocks:
                self._blocks[-1][2].append(self._open)
        elif tag in ("p", "figcaption", "td", "th", "span"):
            self._blocks.append((tag, [], []))

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self._open["text"] += data
        for _, texts, _ in self._blocks:
            texts.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "data":
            self._open = None
        elif self._blocks and self._blocks[-1][0] == tag:
            _, texts, inside = self._blocks.pop()
            for entry in inside:
                entry["sentence"] = "".join(texts)


def _entry(known: Mapping[str, str]) -> dict[str, Any]:
    entry: dict[str, Any] = {"text": "", "value": float(known["value"]) if known.get("value") else None, "decimals": 0}
    entry |= {name: known.get(f"data-{name}", "") for name in ("kind", "study", "gpu", "table")}
    entry |= {"keys": json.loads(known.get("data-keys") or "{}")}
    return entry | {name: known.get(f"data-{name}", "") for name in ("column", "transform")} | {"sentence": ""}


def numbers(html: str) -> list[dict[str, Any]]:
    """Every number of a page's sentences with its origin, as the module says."""
    reader = _Reader()
    reader.feed(html)
    for entry in reader.found:
        entry["decimals"] = Number(entry["text"], 0, 0, "").decimals if NUMBER.fullmatch(entry["text"]) else None
    return reader.found


def check(html: str) -> list[dict[str, Any]]:
    """The numbers of a page that are not, at their precision, what their origin says; those without origin too."""
    return [entry for entry in numbers(html) if not _holds(entry)]


def _holds(entry: Mapping[str, Any]) -> bool:
    if entry["value"] is None or entry["decimals"] is None:
        return False
    return bool(Number(entry["text"], 0, 0, "unit").shows(entry["value"]))
