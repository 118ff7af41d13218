"""The report's index: the tally, the findings, the studies, every claim with its verdicts, the machines."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from labkit.bench.claim import CODES, ESTIMATE, OURS, OWN, VERDICTS, Claim, Judgement
from labkit.report import pages, verdicts, words
from labkit.report.figures import Html, badge
from labkit.report.pages import StudyEntry

TITLE = "Kernel claims, measured"
NOT_JUDGED, NOT_MEASURED, NOTHING = "could not be judged", "not measured", "nothing"
RUN = {OWN: "the source's own code", OURS: "our version of it", ESTIMATE: "an estimate"}  # in the index, in short


@dataclass(frozen=True)
class Result:
    """A claim on one GPU: its judgement, or the error for which there is none.

    earlier_kernel: it rests on rows of an earlier version of the kernels. rule_changed: it rests on rows that were
    measured before its rule. figure: what was measured, without the claim's quantity; why: the judgement's; both with
    the origins of their numbers.
    """

    judgement: Judgement | None
    earlier_kernel: bool = False
    rule_changed: bool = False
    error: str = ""
    figure: Html | str = ""
    why: Html | str = ""

    @property
    def verdict(self) -> str:
        """Of `claim.VERDICTS`, or why there is none."""
        return self.judgement.verdict if self.judgement else NOT_JUDGED if self.error else NOT_MEASURED

    @property
    def run(self) -> str:
        """What was run, in the words of `RUN`."""
        return RUN[self.judgement.code] if self.judgement and self.judgement.code else NOTHING

    @property
    def words(self) -> str:
        """Direction and size; empty where nothing was observed."""
        return verdicts.in_words(self.judgement)

    @property
    def quick(self) -> bool:
        """Whether it rests on fewer processes than a verdict wants."""
        return self.judgement is not None and self.judgement.quick

    @property
    def remarks(self) -> list[str]:
        """What must be known of its rows."""
        earlier = ["a quick look"] if self.quick else []
        earlier += ["recorded with an earlier kernel"] if self.earlier_kernel else []
        return earlier + (["rule changed after the data"] if self.rule_changed else [])


@dataclass(frozen=True)
class ClaimRow:
    """A claim in the index. name, study, page: name, title and HTML file of its study; results: by `Machine.slug`."""

    claim: Claim
    name: str
    study: str
    page: str
    results: Mapping[str, Result]

    @property
    def id(self) -> str:
        """The row's id: two studies may have claims of one name."""
        return f"claim-{self.name}.{self.claim.id}"


@dataclass(frozen=True)
class Finding:
    """What a study comes to, in a sentence, and what to do. study, page: its title and HTML file, or empty."""

    study: str
    page: str
    conclusion: Html | str
    advice: Html | str = ""


@dataclass(frozen=True)
class Machine:
    """A GPU in the index. slug: its folder's name, which ends in "-here" if it is this machine's; status: "measured
    here, 2025-11-21" or "recorded 2025-11-21"; facts: what to tell of it, such as driver and ceilings, with units."""

    slug: str
    name: str
    status: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What the GPUs with one verdict, of the same code, say of a claim. results: by `Machine.slug`."""

    verdict: str
    run: str
    results: Mapping[str, Result]

    @property
    def words(self) -> str:
        """Direction and size, if they are the same on all its GPUs."""
        found = {result.words for result in self.results.values()}
        return found.pop() if len(found) == 1 else ""

    @property
    def remarks(self) -> list[str]:
        """What must be known of the rows, if it is the same of all its GPUs."""
        first, *others = (result.remarks for result in self.results.values())
        return first if all(other == first for other in others) else []

    @property
    def reasons(self) -> list[tuple[list[str], Html | str]]:
        """Why the verdict is what it is, with the slugs of the GPUs of which the same is said."""
        found: dict[str, list[str]] = {}
        for slug, result in self.results.items():
            if result.judgement:
                found.setdefault(result.judgement.why, []).append(slug)
        return [(slugs, self.results[slugs[0]].why) for slugs in found.values()]


@dataclass(frozen=True)
class Filter:
    """A choice of what is shown: radio buttons, and `data-NAME` of the results. values: as shown."""

    name: str
    title: str
    values: Mapping[str, str]  # word in the attribute -> text of the button


def write(
    studies: Sequence[StudyEntry],
    findings: Sequence[Finding],
    claims: Sequence[ClaimRow],
    machines: Sequence[Machine],
    out: Path,
    built: Mapping[str, Any],
) -> None:
    """Write the index; built: what the report was made with (name -> text)."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(pages.TEMPLATES), autoescape=True)
    environment.filters["word"] = word
    short = short_names(machines)
    told = {row.id: outcomes(row, machines) for row in claims}
    filters = _filters([outcome for row in claims for outcome in told[row.id]], short)
    style = pages.css() + pages.css("index.css") + rules(filters)
    shown = {
        "title": TITLE,
        "css": Markup(style),
        "policy": Markup(pages.POLICY),
        "script": Markup(pages.SCRIPT),
        "badge": badge,
        "verdicts": VERDICTS,
        "studies": studies,
        "findings": findings,
        "claims": claims,
        "groups": [list(rows) for _, rows in groupby(claims, key=lambda row: row.name)],
        "outcomes": told,
        "tally": tally(claims, machines),
        "machines": machines,
        "short": short,
        "filters": filters,
        "facts": dict.fromkeys(fact for machine in machines for fact in machine.facts),
        "built": built,
    }
    pages.write(out, environment.get_template("index.html.j2").render(shown))


def word(text: str) -> str:
    """A text as one word of an attribute: "not reproduced" as "not-reproduced"."""
    return re.sub(r"\W+", "-", text.lower())


def short_names(machines: Sequence[Machine]) -> dict[str, str]:
    """Slug -> "H100" for "NVIDIA H100 80GB HBM3", with "here" if it is this machine's."""
    known = list(dict.fromkeys(machine.name for machine in machines))
    short = dict(zip(known, words.short_names(known), strict=True))
    return {one.slug: short[one.name] + (" here" if one.slug.endswith("-here") else "") for one in machines}


def tally(claims: Iterable[ClaimRow], machines: Sequence[Machine]) -> dict[str, int]:
    """Verdict -> how many of the claims have it, each once on every GPU; in the order of `claim.VERDICTS`.

    Quick looks do not count.
    """
    found = [row.results.get(one.slug, Result(None)) for row in claims for one in machines]
    counts = Counter(result.verdict for result in found if not result.quick)
    return {verdict: counts[verdict] for verdict in (*VERDICTS, NOT_JUDGED, NOT_MEASURED) if counts[verdict]}


def outcomes(row: ClaimRow, machines: Sequence[Machine]) -> list[Outcome]:
    """A claim's results, those of one verdict of the same code together, in the order of the machines."""
    found: dict[tuple[str, str], dict[str, Result]] = {}
    for machine in machines:
        result = row.results.get(machine.slug, Result(None))
        found.setdefault((result.verdict, result.run), {})[machine.slug] = result
    return [Outcome(*key, results) for key, results in found.items()]


def _filters(shown: Iterable[Outcome], short: Mapping[str, str]) -> list[Filter]:
    """What the claims can be filtered by: what there are at least two of."""
    shown = list(shown)
    verdicts, runs = {outcome.verdict for outcome in shown}, {outcome.run for outcome in shown}
    found = [
        Filter("verdict", "Verdict", _words(verdicts, (*VERDICTS, NOT_JUDGED, NOT_MEASURED))),
        Filter("gpu", "GPU", short),
        Filter("run", "What was run", _words(runs, (*(RUN[code] for code in CODES), NOTHING))),
    ]
    return [one for one in found if len(one.values) > 1]


def _words(found: set[str], order: Iterable[str]) -> dict[str, str]:
    return {word(text): text for text in order if text in found}


def rules(filters: Sequence[Filter]) -> str:
    """The filters, as CSS: hides the results that a chosen button does not name, and claims and studies without any.

    Pairs of buttons are enough: a claim has one result a GPU, so that the one that fits GPU and verdict is also the
    one that fits GPU and code.
    """
    buttons = [(one.name, value) for one in filters for value in one.values]
    pairs = [pair for pair in combinations(buttons, 2) if pair[0][0] != pair[1][0]]
    lines = [
        f"main:has(#filter-{name}-{value}:checked) :is(.outcome, .gpu)[data-{name}]:not([data-{name}~={value!r}])"
        for name, value in buttons
    ]
    for chosen in [*((button,) for button in buttons), *pairs]:
        checked = "".join(f":has(#filter-{name}-{value}:checked)" for name, value in chosen)
        fits = "".join(f"[data-{name}~={value!r}]" for name, value in chosen)
        lines.append(f"main{checked} :is(.claim, .group):not(:has(.outcome{fits}))")
    return "".join(f"{line} {{ display: none; }}\n" for line in lines)
