"""One judge for all claims: what was published, as data, against what was measured.

A claim says of a quantity that it is above or below a value, or within a band. `Claim.judge` answers with two words and
a verdict. Every rule is here, and the same for all claims:

- **An observation** is as claimed, otherwise, or unclear, by its 95 % interval and its A/A noise (`verdict.verdict`).
- **Direction** *holds* or *fails* if at least `MOST` of the clear observations say so and at least half are clear; else
  it is *unclear*.
- **Size** of an observation is *as published*, *more* or *less* if all of its interval is, with the noise at both ends:
  within `TOLERANCE` times the logarithm of the published value, or beyond; else *unclear*, so that a wide interval
  makes nothing as published. Of several it is what direction is: what `MOST` of the clear ones are. Without a published
  figure of the same quantity it is *not comparable*.
- **Verdict**: the lines of `VERDICTS`.

A claim of a cause (`refutes`) is judged by the observation that would refute it, and by nothing else. A bound from
above (`at_most`) can refute, and leaves everything else unclear.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from labkit.bench import ledger, ratios
from labkit.bench.sha import sha_within

if TYPE_CHECKING:
    import pandas as pd

    from labkit.bench.verdict import Interval

VERDICTS = {
    "reproduced": "the source's own code, under the conditions that it states: direction and size are as published",
    "not reproduced": "the source's own code, under the conditions that it states: direction or size is not",
    "consistent": "our version of the code, an estimate, or other conditions: the direction is as published",
    "disagrees": "our version of the code, an estimate, or other conditions: the direction is not",
    "unclear": "the cases do not agree, or interval and noise leave it open",
    "not testable here": "what it needs was not, or cannot be, measured on this GPU",
}
DIRECTIONS = ("holds", "fails", "unclear")
SIZES = ("as published", "more", "less", "unclear", "not comparable")

OWN, OURS, ESTIMATE = "the source's own code", "our version of the code", "an estimate from parts that were measured"
CODES = (OWN, OURS, ESTIMATE)

ABOVE, BELOW, WITHIN = "above", "below", "within"
PROCESSES = 3  # that an observation must rest on
MOST = 0.75  # of the clear observations
HALF = 0.5  # of all observations, which must be clear
# Of the ratios of two variants that were recorded on an H100 and on an H200, three of four differ by less in their
# logarithm: what two GPUs of one generation do not agree on, no figure of another GPU can be asked for.
TOLERANCE = 4 / 3
SAME = (0.99, 1.01)
SIZED_BY = "the whole interval"  # with `TOLERANCE` the rule of sizes, in the hash of every claim that has one

Range = tuple[float, float]


@dataclass(frozen=True)
class Observation:
    """What was measured of a claim's quantity in one case.

    case:   which, in words. mid, low, high: the quantity and its 95 % interval.
    noise:  half width of the case's A/A interval; 0 of what is counted and not timed.
    runs:   processes that it rests on.
    direction, size: what is claimed of this case, where that is not what is claimed of all.
    """

    case: str
    mid: float
    low: float
    high: float
    noise: float
    runs: int
    direction: str = ""
    size: Range | None = None


@dataclass(frozen=True)
class Observed:
    """All observations of a claim on one GPU. code: whose ran, of `CODES`; needs: what is missing if there are none."""

    code: str
    observations: Sequence[Observation]
    needs: str


@dataclass(frozen=True)
class Judgement:
    """What the data of one GPU say of a claim. verdict: of `VERDICTS`; measured, why: one line each, from the data.

    direction, size, code: of `DIRECTIONS`, `SIZES` and `CODES`; empty where nothing was observed.
    quick: whether it rests on fewer processes than a verdict wants.
    """

    verdict: str
    measured: str
    why: str
    direction: str = ""
    size: str = ""
    code: str = ""
    quick: bool = False


def untestable(why: str) -> Judgement:
    """Of data that do not say anything of a claim."""
    return Judgement("not testable here", "–", why)


@dataclass(frozen=True)
class Claim:
    """A published claim, and the rule by which it is judged.

    source, url, statement, condition, published: who says what, where, of what, with which figure; in words.
    ruled:     the date of the rule, which is everything below.
    quantity:  what is observed, in words that follow a number: "the time of [K, V] over that of [V, K]".
    direction: `ABOVE` or `BELOW` the neutral value, or `WITHIN` a band.
    observe:   the rows of one GPU -> what was observed; None where nothing that can be run here would say anything.
    untested:  why not, then.
    neutral:   of ratios 1, of shares what is claimed. band: with `WITHIN`.
    size:      the published value of the same quantity, with its uncertainty: its rounding, or noise that is stated.
    sized:     whether cases have published values of their own, which `observe` gives.
    at_most:   whether what is observed is a bound from above, which can refute a claim but not bear it out.
    percent:   whether the quantity is a share, shown in percent.
    faster:    whether it is a time without what is claimed of ÷ a time with it, shown as "1.10× slower".
    gpus:      parts of names of the GPUs that it was published of; empty: not stated.
    differs:   what else differs here from the conditions of the source; empty: nothing.
    refutes:   of a cause, the observation that would refute it, in words.
    note:      what must be known to read the verdict.
    """

    id: str
    source: str
    url: str
    statement: str
    condition: str
    published: str
    ruled: str
    quantity: str = ""
    direction: str = ABOVE
    observe: Callable[["pd.DataFrame"], Observed] | None = None
    untested: str = ""
    neutral: float = 1.0
    band: Range = SAME
    size: Range | None = None
    sized: bool = False
    at_most: bool = False
    percent: bool = False
    faster: bool = False
    gpus: tuple[str, ...] = ()
    differs: str = ""
    refutes: str = ""
    note: str = ""

    def judge(self, rows: "pd.DataFrame", processes: int = PROCESSES) -> Judgement:
        """The verdict from the rows of one GPU. processes: that an observation must rest on; of fewer, a quick look."""
        if self.observe is None:
            return untestable(self.untested)
        observed = self.observe(rows)
        claimed = map(self._of, observed.observations)
        enough = [one for one in claimed if one.runs >= processes and math.isfinite(one.mid)]
        if not enough:
            ledger.note(f"claims.{self.id}", [{"processes": processes}])
            return untestable(f"needs {observed.needs} in {processes} processes")
        words = [word(one, self) for one in enough]
        lines = [vars(one) | {"word": found} for one, found in zip(enough, words, strict=True)]
        ledger.note(f"claims.{self.id}", lines)
        direction, size = self._bounded(direction_of(words), "fails"), self._bounded(size_of(enough), "less")
        elsewhere = self._elsewhere(rows)
        verdict = _verdict(direction, size, observed.code == OWN and not elsewhere)
        said = [_cases(words), f"size: {size}" if size != "not comparable" else "", observed.code, elsewhere, self.note]
        why = "; ".join(filter(None, said))
        return Judgement(verdict, self.shown(enough), why, direction, size, observed.code, processes < PROCESSES)

    def shown(self, observations: Sequence[Observation]) -> str:
        """The observed quantity in one line: of up to three cases each with its interval, else the least and most."""
        if len(observations) > 3:
            least, most = (pick(observations, key=lambda one: one.mid) for pick in (min, max))
            text = f"{self.between(least.mid, most.mid)} in {len(observations)} cases"
        else:
            text = "; ".join(
                " ".join(filter(None, [one.case if len(observations) > 1 else "", self.interval(one)]))
                for one in observations
            )
        return f"{text}: {self.quantity}"

    def interval(self, one: Observation) -> str:
        """The quantity of one case with its interval, if it has one; of something slower, of how much."""
        said = ratios.faster(one.mid) if self.faster else f"{self.number(one.mid)}{self._times}"
        if one.low == one.high:  # counted
            return said
        turned = self.faster and said.endswith("slower")
        low, high = (1 / one.high, 1 / one.low) if turned else (one.low, one.high)
        return f"{said} [{self.number(low)}, {self.number(high)}]"

    def between(self, least: float, most: float) -> str:
        """The least and the most of several cases."""
        if self.faster:
            return ratios.between(least, most)
        return f"{self.number(least)} to {self.number(most)}{self._times}"

    @property
    def _times(self) -> str:
        """What follows a ratio of two times, so that nobody takes it for one of them."""
        return "×" if " ÷ " in self.quantity and not self.percent else ""

    def number(self, value: float) -> str:
        """A value as it is shown: "1.08", "26.6", "84 %"."""
        ledger.say(value)
        if self.percent:
            return f"{value:.0%}".replace("%", " %")
        return f"{value:.{2 if value < 10 or self.faster else 1}f}"

    def sha(self) -> str:
        """Hash of the rule: of all that decides a verdict, not of what is only shown, 12 hexadecimal digits.

        Of the code, what stands in the study's claims: the tables that it reads can be mended or moved. What they say
        is recomputed by other code (`tests/audit`); if they come to mean something else, the rule needs another date.
        """
        rule = {one.name: getattr(self, one.name) for one in fields(self) if one.name in _RULE}
        rule["observe"] = sha_within(self.observe.__module__, self.observe.__qualname__) if self.observe else None
        common = (TOLERANCE, MOST, HALF, PROCESSES, *([SIZED_BY] if self.size or self.sized else []))
        common += ("at most",) if self.at_most else ()
        return hashlib.sha256(repr((sorted(rule.items()), common)).encode()).hexdigest()[:12]

    def _of(self, one: Observation) -> Observation:
        """The observation with what is claimed of it."""
        return replace(one, direction=one.direction or self.direction, size=one.size or self.size)

    def _bounded(self, found: str, refuted: str) -> str:
        """Direction or size; of a bound from above, unclear unless it refutes."""
        return "unclear" if self.at_most and found not in (refuted, "not comparable") else found

    def _elsewhere(self, rows: "pd.DataFrame") -> str:
        """What differs from the conditions of the source; empty: nothing."""
        other = self.gpus and not any(gpu in rows["gpu"].iloc[0] for gpu in self.gpus)
        return "; ".join(filter(None, [f"another GPU than its {self.gpus[0]}" if other else "", self.differs]))


_RULE = ("id", "ruled", "direction", "neutral", "band", "size", "gpus", "differs")


def word(one: Observation, claim: Claim) -> str:
    """*holds*, *fails* or *unclear*, of one observation."""
    from labkit.bench.verdict import Interval, verdict

    if one.direction == WITHIN:
        low, high = claim.band
        if low <= one.low and one.high <= high:
            return "holds"
        outside = one.high * (1 + one.noise) < low or one.low > high * (1 + one.noise)
        return "fails" if outside else "unclear"
    relative = Interval(*(value / claim.neutral for value in (one.mid, one.low, one.high)), one.runs, one.runs)
    noise = Interval(1.0, 1 - one.noise, 1 + one.noise, one.runs, one.runs)
    found = verdict(relative, noise)
    as_claimed = {ABOVE: "faster", BELOW: "slower"}[one.direction]
    return {"unclear": "unclear", as_claimed: "holds"}.get(found, "fails")


def direction_of(words: Sequence[str]) -> str:
    """The direction of several observations."""
    return _agreed(words, ("holds", "fails"))


def size_of(observations: Sequence[Observation]) -> str:
    """The size of several observations, of those that have a published figure."""
    words = [_size(one, one.size) for one in observations if one.size]
    return _agreed(words, ("as published", "more", "less")) if words else "not comparable"


def _agreed(words: Sequence[str], clear: Sequence[str]) -> str:
    """What at least `MOST` of the clear words are, if at least half are clear."""
    counts = Counter(words)
    known = sum(counts[one] for one in clear)
    if known and known >= HALF * len(words):
        for found in clear:
            if counts[found] >= MOST * known:
                return found
    return "unclear"


def _size(one: Observation, size: Range) -> str:
    """*as published*, *more*, *less* or *unclear*: how far from 1 all of it is, on the side that was published."""
    from labkit.bench.verdict import beyond

    if not math.isfinite(one.noise):
        return "unclear"
    noise = 1 + beyond(one.noise)
    sign = 1 if math.sqrt(size[0] * size[1]) >= 1 else -1
    least, most = sorted(sign * math.log(value) for value in size)
    low, high = sorted(sign * math.log(value) for value in (one.low / noise, one.high * noise))
    if low > most * TOLERANCE:
        return "more"
    if high < least / TOLERANCE:
        return "less"
    return "as published" if least / TOLERANCE <= low and high <= most * TOLERANCE else "unclear"


def _verdict(direction: str, size: str, as_stated: bool) -> str:
    if direction == "unclear":
        return "unclear"
    if not as_stated:
        return "consistent" if direction == "holds" else "disagrees"
    if direction == "fails" or size in ("more", "less"):
        return "not reproduced"
    return "unclear" if size == "unclear" else "reproduced"


def _cases(words: Sequence[str]) -> str:
    """In how many cases it is as claimed."""
    counts = Counter(words)
    if len(words) == 1:
        return {"holds": "as claimed", "fails": "not as claimed", "unclear": "unclear"}[words[0]]
    said = f"as claimed in {counts['holds']} of {len(words)} cases"
    return f"{said}, unclear in {counts['unclear']}" if counts["unclear"] else said


def of_table(table: "pd.DataFrame", case: Callable[[Mapping[str, Any]], str]) -> list[Observation]:
    """The lines of a table of comparisons (`Comparison.columns`) as observations. case: a line -> which it is."""
    return [
        Observation(case(line), line["ratio"], line["low"], line["high"], line["noise"], line["runs"])
        for line in table.to_dict("records")
    ]


def of_interval(case: str, interval: "Interval", noise: float) -> Observation:
    """A ratio with its interval as an observation."""
    return Observation(case, interval.mid, interval.low, interval.high, noise, interval.runs)
