"""What the audits of all studies share: rows, pairs, intervals and verdicts once more, from the recorded samples alone.

Nothing here or in the audits imports labkit; a test holds that. Where there is another road it is taken: loops over
samples for frames, and for the bootstrap its exact distribution instead of 2000 draws. What 2000 draws may be off by is
the tolerance of an interval's end: columns `NAME from` and `NAME to` beside NAME. A verdict that turns inside of it is
written "same|unclear".
"""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

DATA = Path(__file__).resolve().parents[2] / "data"
GPUS = sorted(path.parent.name for path in DATA.glob("*/machine.json"))
Table = Callable[[pd.DataFrame], pd.DataFrame]
Tables = dict[str, Table]
Sentences = dict[str, Callable[[pd.DataFrame], list[str]]]  # view -> parts of what it says, each with its numbers
Params = dict[str, Any]

RATIO = ["ratio", "low", "high", "noise", "verdict"]
COMPARED = ["us", "against us", *RATIO, "no slower", "runs"]
AA = "A/A control"
DRAWS = 2000  # of the lab's bootstrap
SIGMAS = 5  # that the share of draws below an end may be off by; another level, 90 or 99 %, is further off than that
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # as printed, to three decimals
GRID = 4096  # points of the exact distribution


# Rows


@cache
def read(gpu: str, study: str) -> pd.DataFrame:
    """Recorded rows of a study on a GPU (a folder of data/), with `params` and `chosen`: case and options, parsed."""
    rows = pd.read_parquet(DATA / gpu / f"{study}.parquet")
    return rows.assign(params=rows["case"].map(json.loads), chosen=rows["options"].map(json.loads))


def cases(
    rows: pd.DataFrame, op: str, cache: str = "cold", **wanted: Any
) -> Iterator[tuple[Params, list[dict[str, Any]]]]:
    """Parameters and rows, as dicts, of each case of an operation that has these parameters, in no promised order."""
    for group in _groups(rows, op, cache):
        params = group[0]["params"]
        if all(params.get(name) == value for name, value in wanted.items()):
            yield params, group


_KEPT: dict[tuple[int, str, str], tuple[pd.DataFrame, list[list[dict[str, Any]]]]] = {}


def faster(ratio: float, than: str = "") -> str:
    """A ratio of times as pages say it: of what reads as 1, no side."""
    times = f"{max(ratio, 1 / ratio):.2f}"
    if times == "1.00":
        return f"as fast as {than}" if than else "as fast"
    return f"{times}× {'faster' if ratio > 1 else 'slower'}{f' than {than}' if than else ''}"


def gains(ratios: Iterable[float]) -> str:
    """The least and the most of ratios of times, as pages say them: of one side, the smaller number first."""
    ordered = sorted(ratios)
    least, most = faster(ordered[0]), faster(ordered[-1])
    if least == most:
        return least
    if ordered[-1] < 1:
        least, most = most, least
    sides = least.split()[1:], most.split()[1:]
    same = "×" in least and "×" in most and sides[0] == sides[1]
    return f"{least.split()[0]} to {most}" if same else f"{least} to {most}"


def _groups(rows: pd.DataFrame, op: str, cache: str) -> list[list[dict[str, Any]]]:
    """The rows of each case of an operation. Kept, with the frame, since every table asks for them again."""
    key = id(rows), op, cache
    if key not in _KEPT:
        found: dict[str, list[dict[str, Any]]] = {}
        for row in rows[(rows["op"] == op) & (rows["cache"] == cache)].to_dict("records"):
            found.setdefault(row["case"], []).append(row)
        _KEPT[key] = rows, list(found.values())
    return _KEPT[key][1]


@cache
def facts(text: str) -> dict[str, Any]:
    """What a row's evidence says."""
    return json.loads(text)


def usable(group: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Variant -> its row, of those that may be used."""
    return {row["variant"]: row for row in group if row["ok"] and len(row["samples_ns"])}


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def us(row: Mapping[str, Any]) -> float:
    """Median time of a row, µs a call."""
    return median(row["samples_ns"]) / 1000


def times(group: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Variant -> µs, of the usable rows of a case."""
    return {name: us(row) for name, row in usable(group).items()}


def pick(params: Mapping[str, Any], names: Iterable[str]) -> Params:
    """Those of some parameters that a case has."""
    return {name: params[name] for name in names if name in params}


def least(known: Mapping[str, float], names: Iterable[str]) -> str | None:
    """Which of some variants took the least time; None if none was timed."""
    return min((name for name in names if name in known), key=lambda name: known[name], default=None)


def geometric_mean(values: Iterable[float]) -> float:
    """The n-th root of the product; NaN without values."""
    some = list(values)
    return math.prod(some) ** (1 / len(some)) if some else math.nan


# Intervals


@dataclass(frozen=True)
class End:
    """An end of an interval: its exact value, and between what a bootstrap of `DRAWS` draws may find it."""

    value: float
    least: float
    most: float

    def each(self, change: Callable[[float], float]) -> "End":
        """The end of another quantity."""
        value, *bounds = map(change, (self.value, self.least, self.most))
        return End(value, min(bounds), max(bounds))

    def columns(self, name: str) -> dict[str, float]:
        """As columns of a table."""
        return {name: self.value, f"{name} from": self.least, f"{name} to": self.most}


@dataclass(frozen=True)
class Interval:
    """A ratio, or its logarithm, with both ends of its 95 % interval. runs: processes that it rests on."""

    mid: float
    low: End
    high: End
    runs: int

    def each(self, change: Callable[[float], float]) -> "Interval":
        """The interval of a quantity that grows with this one."""
        return Interval(change(self.mid), self.low.each(change), self.high.each(change), self.runs)


NO_END = End(math.nan, math.nan, math.nan)
NOTHING = Interval(math.nan, NO_END, NO_END, 0)


def blocks(row: Mapping[str, Any]) -> dict[tuple[int, int], float]:
    """(process, block) -> ns."""
    found = dict(zip(zip(row["run"], row["block"], strict=True), map(float, row["samples_ns"]), strict=True))
    assert len(found) == len(row["samples_ns"]), f"{row['variant']}: a block has two samples"
    return found


def paired(slow: Mapping[str, Any], fast: Mapping[str, Any]) -> list[list[float]]:
    """Of each process the logarithms of time(slow) / time(fast), one for each block that both have."""
    one, other = blocks(slow), blocks(fast)
    return by_process({key: math.log(one[key] / other[key]) for key in one.keys() & other.keys()})


def by_process(values: Mapping[tuple[int, int], float]) -> list[list[float]]:
    """(process, block) -> value, as the values of each process in the order of the blocks."""
    found: dict[int, list[float]] = {}
    for (run, _), value in sorted(values.items()):
        found.setdefault(run, []).append(value)
    return list(found.values())


def interval(values: Sequence[Sequence[float]]) -> Interval:
    """Mean over processes of the median of their values, with a 95 % interval.

    Processes are resampled, and the values in each; never narrower than Student's interval of the processes' medians.
    """
    return _interval(tuple(map(tuple, values)))


@cache
def _interval(values: tuple[tuple[float, ...], ...]) -> Interval:
    if not values:
        return NOTHING
    centres, runs = [median(some) for some in values], len(values)
    mid = sum(centres) / runs
    half = 0.0
    if runs > 1:
        variance = sum((centre - mid) ** 2 for centre in centres) / (runs - 1)
        half = T_975[min(runs - 1, len(T_975)) - 1] * math.sqrt(variance / runs)
    low, high = (_quantile(values, share) for share in (0.025, 0.975))
    return Interval(mid, low.each(lambda x: min(x, mid - half)), high.each(lambda x: max(x, mid + half)), runs)


def _quantile(values: tuple[tuple[float, ...], ...], share: float) -> End:
    """A quantile of the mean of as many resampled medians as there are processes, each of a process at random."""
    points, cumulated, step = _means(values)
    off = SIGMAS * math.sqrt(share * (1 - share) / DRAWS)
    value, below, above = (
        float(points[min(np.searchsorted(cumulated, at), len(points) - 1)]) for at in (share, share - off, share + off)
    )
    return End(value, below - step, above + step)


@lru_cache(8)
def _means(values: tuple[tuple[float, ...], ...]) -> tuple[np.ndarray, np.ndarray, float]:
    """The distribution of that mean: points, the share of the mean at or below each, the distance of the points."""
    parts, runs = [_medians(some) for some in values], len(values)
    atoms = np.concatenate([some for some, _ in parts])
    weights = np.concatenate([some for _, some in parts]) / runs
    first, step = atoms.min(), max(np.ptp(atoms), 1e-12) / (GRID - 1)
    density = np.bincount(np.rint((atoms - first) / step).astype(int), weights, GRID)
    size = runs * GRID
    of_sum = np.fft.irfft(np.fft.rfft(density, size) ** runs, size)  # of a sum of independent values: a convolution
    return first + np.arange(size) * step / runs, np.cumsum(of_sum), step


def _medians(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """All medians of a resample of n values with replacement, and how likely each is: exactly, by order statistics."""
    ordered, places = np.sort(np.asarray(values, float)), _places(len(values))
    lower, upper = np.nonzero(places)
    return (ordered[lower] + ordered[upper]) / 2, places[lower, upper]


@cache
def _places(n: int) -> np.ndarray:
    """[i, j]: how likely the two middle values of a resample are the i-th and j-th of n; of an odd n, one on i = j."""
    if n % 2:
        return np.diag(np.diff([_at_most(i, n, n // 2 + 1) for i in range(n + 1)]))
    half = n // 2
    # apart[i, j]: half of the resample is among the first i, the other half beyond the first j.
    apart = np.array([[(i * (n - j) / n**2) ** half if i <= j else 0 for j in range(n + 1)] for i in range(n + 1)])
    apart *= math.comb(n, half)
    found = np.zeros((n, n))
    for i, j in product(range(n), range(n)):
        if i < j:
            found[i, j] = apart[i + 1, j] - apart[i, j] - apart[i + 1, j + 1] + apart[i, j + 1]
    alone = np.diff([_at_most(i, n, half) for i in range(n + 1)])
    return found + np.diag(alone - found.sum(axis=1))


def _at_most(i: int, n: int, rank: int) -> float:
    """How likely the value of this rank, from 1, in a resample of n is among the first i of n."""
    return sum(math.comb(n, k) * (i / n) ** k * (1 - i / n) ** (n - k) for k in range(rank, n + 1))


# Verdicts


def noise(group: Iterable[Mapping[str, Any]]) -> End:
    """Half width of the A/A interval of a case: the larger distance of its ends from 1; NaN without a control."""
    known = usable(group)
    twin = known[AA]["chosen"]["repeats"] if AA in known else None
    if twin not in known:
        return NO_END
    return half_width(interval(paired(known[twin], known[AA])).each(math.exp))


def half_width(found: Interval) -> End:
    """The larger distance of an interval's ends from 1."""
    ends = [(abs(low - 1), abs(high - 1)) for low, high in product(_bounds(found.low), _bounds(found.high))]
    exact = max(abs(found.low.value - 1), abs(found.high.value - 1))
    return End(exact, min(map(max, ends)), max(map(max, ends)))


def _bounds(end: End) -> tuple[float, float]:
    return end.least, end.most


def verdict(low: float, high: float, noise: float) -> str:
    """faster, slower, same or unclear, as the README has it."""
    if math.isnan(low) or math.isnan(noise):
        return "unclear"
    quiet = noise <= 0.01
    if quiet and max(abs(low - 1), abs(high - 1)) <= 0.01:
        return "same"
    beyond = noise if quiet else 3 * noise
    return "faster" if low > 1 + beyond else "slower" if high < 1 - beyond else "unclear"


def judged(found: Interval, aa: End) -> dict[str, Any]:
    """The columns of a comparison: `RATIO`, no slower and runs."""
    ends = [_bounds(one) if one.least < one.most else (one.value,) for one in (found.low, found.high, aa)]
    words = [(verdict(low, high, noise), low >= 0.99) for low, high, noise in product(*ends)]
    slower = [str(near and word != "unclear") for word, near in words]
    line = {"ratio": found.mid} | found.low.columns("low") | found.high.columns("high") | aa.columns("noise")
    return line | {"verdict": either(word for word, _ in words), "no slower": either(slower), "runs": found.runs}


def either(words: Iterable[str]) -> str:
    """Which words are possible: "same|unclear"."""
    return "|".join(sorted(set(words)))


def compare(group: Sequence[Mapping[str, Any]], variant: str, against: str) -> dict[str, Any]:
    """Who, µs of both, and time(against) / time(variant) with its verdict; empty if the case lacks one of them."""
    known = usable(group)
    if variant not in known or against not in known:
        return {}
    assert known[variant]["mode"] == known[against]["mode"], f"{variant} and {against} were not timed together"
    line = {"variant": variant, "against": against, "us": us(known[variant]), "against us": us(known[against])}
    return line | judged(interval(paired(known[against], known[variant])).each(math.exp), noise(group))


# Sentences: numbers that the views make of tables


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Least and largest: "0.98 to 1.31"; one number where both read the same."""
    some = list(values)
    ends = [format(end, form) for end in (min(some), max(some))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def counted(verdicts: Iterable[str]) -> str:
    """How often each word occurs: "faster in 3, unclear in 1"; nothing where a verdict is a draw of the bootstrap."""
    some = list(verdicts)
    if any("|" in word for word in some):
        return ""
    words = ("faster", "same", "slower", "unclear")
    return ", ".join(f"{word} in {some.count(word)}" for word in words if word in some)


def said(view: Any) -> str:
    """All that a view says in words: itself, the texts of a figure, the lines of a table, or answers to questions."""
    if isinstance(view, pd.DataFrame):
        lines = ("; ".join(map(str, line)) for line in view.itertuples(index=False, name=None))
        return "\n".join([view.to_string(max_colwidth=None), *lines])
    if isinstance(view, Mapping):
        told = "; ".join(f"{question}: {answer}" for question, answer in view.items())
        return "\n".join([told, *(f"{question}; {answer}" for question, answer in view.items())])
    return view if isinstance(view, str) else f"{view.alt} {view.caption}"


# Comparing with the lab


def unsaid(sentences: Sentences, views: Mapping[str, Any], rows: pd.DataFrame) -> list[str]:
    """Parts of sentences that the views do not say. views: module -> it; each sentence must have a part."""
    wrong = []
    for name, parts_of in sentences.items():
        module, _, view = name.partition(".")
        text, parts = said(getattr(views[module], view)(rows)), parts_of(rows)
        assert any(parts), name
        wrong += [f"{name}: no {part!r} in {text!r}" for part in parts if part not in text]
    return wrong


def observed(claim: Callable[[pd.DataFrame], Any]) -> Table:
    """A table of what a claim is judged by."""

    def of(rows: pd.DataFrame) -> pd.DataFrame:
        lines = [vars(one) for one in claim(rows).observations]
        for line in lines:
            line["least"], line["most"] = line.pop("size") or (None, None)
        return pd.DataFrame(lines)

    return of


def check_changes_are_found(
    function: Table, keys: Sequence[str], audit: Table, rows: pd.DataFrame, changed: pd.DataFrame
) -> None:
    """That a table of changed rows differs from its audit, and one with a changed cell in just that one."""
    mine, theirs = audit(rows), function(rows)
    assert differences(function(changed), mine, keys)[1]
    columns = [column for column in mine if column in theirs and column not in keys]
    assert columns
    for column in columns:
        assert len(differences(with_a_cell_changed(theirs, column), mine, keys)[1]) == 1, column


def table(lines: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> pd.DataFrame:
    """The lines as a frame of these columns, each with its tolerance if it has one; what a line lacks is NaN."""
    frame = pd.DataFrame(list(lines))
    wanted = [(name, f"{name} from", f"{name} to") for name in columns]
    return frame.reindex(columns=[one for name, *ends in wanted for one in (name, *(e for e in ends if e in frame))])


def differences(lab: pd.DataFrame, audit: pd.DataFrame, keys: Sequence[str]) -> tuple[int, list[str]]:
    """How many cells were compared, and those that differ. keys: columns that say which line it is."""
    mine, theirs = (_lines(frame, keys) for frame in (audit, lab))
    wrong = [f"{key}: only in the audit" for key in mine.keys() - theirs.keys()]
    wrong += [f"{key}: only in the lab's table" for key in theirs.keys() - mine.keys()]
    columns = [name for name in audit if name not in keys and not name.endswith((" from", " to"))]
    wrong += [f"{name}: no such column in the lab's table" for name in columns if name not in lab]
    cells = [(key, name) for key in mine.keys() & theirs.keys() for name in columns if name in lab]
    for key, name in cells:
        if not same(theirs[key][name], mine[key], name):
            wrong.append(f"{key}, {name}: {theirs[key][name]!r} in the lab's table, {mine[key][name]!r} in the audit")
    return len(cells), wrong


def compared(audits: Tables, rows: pd.DataFrame, lab: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Of each table how many cells were compared, and of all what differs, or is a number that no audit has.

    lab: table -> the lab's function of rows, and the columns that say which line it is.
    """
    counts, wrong = {}, []
    for name, audit in audits.items():
        function, keys = lab[name]
        theirs, mine = function(rows), audit(rows)
        counts[name], found = differences(theirs, mine, keys)
        found += [f"{column}: in no audit" for column in numbers(theirs, rows) - set(mine) - set(keys)]
        wrong += [f"{name}: {one}" for one in found]
    return counts, wrong


def numbers(frame: pd.DataFrame, rows: pd.DataFrame) -> set[str]:
    """Columns of numbers that are not the rows' own: neither recorded nor of their cases and options."""
    given = {name for column in ("params", "chosen") for some in rows[column] for name in some}
    return set(frame.select_dtypes("number")) - set(rows) - given


def _lines(frame: pd.DataFrame, keys: Sequence[str]) -> dict[tuple, dict[str, Any]]:
    found = {tuple(_key(line.get(name)) for name in keys): line for line in frame.to_dict("records")}
    assert len(found) == len(frame), f"{keys} do not tell the lines apart"
    return found


def _key(value: Any) -> Any:
    """A value that says which line it is; None if the line has none."""
    return None if value is None or pd.isna(value) else value


def same(lab: Any, line: Mapping[str, Any], name: str) -> bool:
    """Whether a cell of the lab's is that of the audit: to 1e-9, or inside its tolerance; words as they are."""
    mine = line[name]
    if isinstance(mine, str):
        return str(lab) in mine.split("|")
    if mine is None or mine != mine:
        return lab is None or lab != lab
    least, most = (line.get(f"{name} {end}", mine) for end in ("from", "to"))
    slack = 1e-9 * max(abs(mine), 1e-9)
    return bool(least - slack <= lab <= most + slack)


def over(function: Callable[..., pd.DataFrame], *args: Any, **choices: Sequence[Any]) -> pd.DataFrame:
    """A table of the lab's for each combination of some arguments, one below the other, with a column for each."""
    parts = [dict(zip(choices, one, strict=True)) for one in product(*choices.values())]
    return pd.concat([function(*args, **some).assign(**some) for some in parts], ignore_index=True)


def public(*modules: Any) -> set[str]:
    """All public functions that these modules define, as "module.function"."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in modules
        for name, one in vars(module).items()
        if inspect.isfunction(one) and one.__module__ == module.__name__ and not name.startswith("_")
    }


def with_a_sample_changed(rows: pd.DataFrame, size: Params, **row: Any) -> pd.DataFrame:
    """A copy of the rows with one sample of one row at a tenth: the largest of its first process.

    size, row: parameters of its case, and its columns.
    """
    of_case = rows["params"].map(lambda params: size.items() <= params.items())
    (at,) = rows.index[np.logical_and.reduce([of_case, *(rows[name] == value for name, value in row.items())])]
    ns = np.array(rows.at[at, "samples_ns"])
    first = np.flatnonzero(np.asarray(rows.at[at, "run"]) == 0)
    ns[first[ns[first].argmax()]] //= 10
    return rows.assign(samples_ns=[ns if place == at else old for place, old in rows["samples_ns"].items()])


def with_a_cell_changed(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """A copy of a table with one cell of a column changed: a number by a millionth, an end by half its distance."""
    found = frame.reset_index(drop=True).astype({name: object})
    at = found.index[found[name].notna()][0]
    value = found.at[at, name]
    if name in ("low", "high", "noise"):
        found.at[at, name] = (
            value * 1.5 if name == "noise" else (value + found.at[at, "ratio" if "ratio" in found else "mid"]) / 2
        )
    else:
        found.at[at, name] = (
            "slower" if value == "faster" else "faster" if isinstance(value, str) else value * (1 + 1e-6)
        )
    return found
