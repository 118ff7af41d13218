"""The pages and the index, from the notebooks that were run and the measurements that there are."""

import hashlib
import json
import math
import platform
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from markupsafe import Markup

from labkit import __version__, isolated, paths, registry
from labkit.bench import ledger, machine, records, spec
from labkit.bench.claim import VERDICTS, Claim, Judgement
from labkit.evidence import roofline
from labkit.kernels.tuned import slug
from labkit.report import index, markdown, origins, pages, words
from labkit.report.figures import Html
from labkit.workflow import filters, judged, notebooks, predicted_words, quick, recorded, store

_UNITS = {"read": "TB/s", "in_place": "TB/s", "copy": "TB/s", "bf16": "TFLOP/s", "fp8": "TFLOP/s"}  # shown in the index


def write(
    failed: Mapping[str, str] = MappingProxyType({}), say: Callable[[str], None] = lambda text: None
) -> list[str]:
    """Write a page for every notebook that was run, and reports/index.html; returns what went wrong with that.

    A page stays as it is where nothing has changed that it is made of. failed: study -> error, of notebooks that did
    not run to their end just now. say: takes a line of progress a page.
    """
    isolated.collect_seldom()
    found, broken = _readable()
    problems = list(broken.values())
    executed = {name: notebooks.executed_path(name) for name in registry.NOTEBOOKS}
    entries = {name: _entry(name, path, found[name], failed.get(name, "")) for name, path in executed.items()}
    pages_of = [*_full(executed, entries), *_parts(executed, found)]
    old = [one for one in pages_of if one.old]
    for number, one in enumerate(old, 1):
        say(f"[{number}/{len(old)}] {one.out.name}")
        try:
            one.write()
        except (ValueError, OSError, KeyError) as problem:  # an executed notebook that something else wrote
            problems.append(f"{one.executed}: no page: {type(problem).__name__}: {problem}")
    if same := len(pages_of) - len(old):
        say(f"{same} page{'s' * (same > 1)} unchanged")
    findings, wrong = _findings(found, entries)
    problems += wrong
    claims, out = _claims(found, broken, entries, say), paths.REPORTS / "index.html"
    index.write(list(entries.values()), findings, claims, _machines(found), out, _built())
    return problems


def write_markdown(say: Callable[[str], None] = lambda text: None) -> list[str]:
    """Write the pages that there are as reports/markdown/NAME.md; returns which of them want a PNG."""
    names = [path.stem for name in registry.NOTEBOOKS for path in _executed(name)]
    written = [paths.REPORTS / f"{name}.html" for name in ("index", *names)]
    written = [path for path in written if path.exists()]
    return markdown.write(written, paths.REPORTS / "markdown", paths.REPORTS / "figures", say)


@dataclass(frozen=True)
class _Page:
    """A page that can be written: what of, and which pages are before and after it."""

    executed: Path
    status: str
    before: pages.StudyEntry | None = None
    after: pages.StudyEntry | None = None

    @property
    def out(self) -> Path:
        return paths.REPORTS / f"{self.executed.stem}.html"

    @cached_property
    def stamp(self) -> bytes:
        """What the page ends with: a hash of all that it is made of."""
        beside = [(one.title, one.page) if one else None for one in (self.before, self.after)]
        made_of = [self.executed.read_bytes(), repr((beside, self.status)).encode(), _makers()]
        return b"<!-- made of " + hashlib.sha256(b"\0".join(made_of)).hexdigest().encode() + b" -->\n"

    @property
    def old(self) -> bool:
        """Whether there is no such page, or what it is made of has changed."""
        if not (self.out.exists() and self.out.with_suffix(".numbers.json").exists()):
            return True
        return not self.out.read_bytes().endswith(self.stamp)

    def write(self) -> None:
        pages.page(self.executed, self.out, previous=self.before, following=self.after, status=self.status)
        records.write_atomic(self.out, self.out.read_bytes() + self.stamp)


@cache
def _makers() -> bytes:
    """A hash of what makes pages: the sources and templates of labkit.report, and nbconvert."""
    folder = Path(pages.__file__).parent
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    parts = [part for path in files for part in (str(path.relative_to(folder)).encode(), path.read_bytes())]
    return hashlib.sha256(b"\0".join([metadata.version("nbconvert").encode(), *parts])).digest()


def _full(executed: Mapping[str, Path], entries: Mapping[str, pages.StudyEntry]) -> list[_Page]:
    """The pages of the studies, each with its neighbours."""
    shown = [name for name, path in executed.items() if path.exists()]
    beside = zip([None, *shown], shown, [*shown[1:], None], strict=False)
    return [
        _Page(
            executed[name], entries[name].status, entries[before] if before else None, entries[after] if after else None
        )
        for before, name, after in beside
    ]


def _parts(executed: Mapping[str, Path], found: Mapping[str, list[recorded.Rows]]) -> list[_Page]:
    """The pages of runs that show a part of a study."""
    return [
        _Page(path, _part_status(name, path, found[name]))
        for name, full in executed.items()
        for path in _executed(name)
        if path != full
    ]


def _executed(name: str) -> list[Path]:
    """The executed notebooks of a study: the full one, if there is one, and those that show a part."""
    full = notebooks.executed_path(name)
    return [*([full] if full.exists() else []), *sorted(full.parent.glob(f"{full.stem}{filters.SIGN}*.ipynb"))]


def _part_status(name: str, executed: Path, found: list[recorded.Rows]) -> str:
    said = filters.said(notebooks.changed(name, _used(executed)))
    page = f"{registry.NOTEBOOKS[name]}.html"
    whole = Markup('; <a href="{0}">{0}</a> shows all').format(page) if (paths.REPORTS / page).exists() else ""
    return Markup("Only a part: {}. {}").format(said, _where_from(executed, found)) + whole


def outcomes(results: Sequence[notebooks.Result]) -> list[str]:
    """A line for each notebook that was run just now: verdicts by GPU, of the rows that it shows, and the page."""
    return [
        f"{registry.NOTEBOOKS[result.study]}: {_outcome(result)}; "
        f"{shown_path(paths.REPORTS / f'{result.notebook}.html')}"
        for result in results
    ]


def shown_path(path: Path) -> str:
    """A path as short as it can be written from here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _outcome(result: notebooks.Result) -> str:
    if not result.ok or result.executed is None:
        return "failed"
    study, used = registry.load(result.study), _used(result.executed)
    if not study.claims:
        return "states no claim"
    part = notebooks.changed(result.study, used)
    found = _shown_with(used, _readable([result.study])[0][result.study])
    said = [f"{_tally(one, used, bool(part))} on {_gpu_name(one)} ({_how(one)})" for one in found]
    return f"{'; '.join(said) or 'nothing is recorded'}{f'; only {filters.said(part)}' if part else ''}"


def _tally(one: recorded.Rows, used: Mapping[str, Any], part: bool) -> str:
    """ "3 reproduced, 1 unclear": of all rows as they are kept, of a part judged anew."""
    if part:
        rows = _shown_rows(one, used)
        judged = [recorded.judge(claim, rows)[0] for claim in registry.load(one.study).claims]
        verdicts = [judgement.verdict if judgement else "" for judgement in judged]
    else:
        results = kept_claims(one)["results"].values()
        verdicts = [result["judgement"]["verdict"] if result["judgement"] else "" for result in results]
    counts = Counter(verdict or "not judged" for verdict in verdicts)
    return ", ".join(f"{counts[word]} {word}" for word in (*VERDICTS, "not judged") if counts[word])


def _shown_rows(one: recorded.Rows, used: Mapping[str, Any]) -> pd.DataFrame:
    """Those of the rows that a notebook with these parameters shows."""
    study, values = quick.asked(one.study, used)
    rows = records.of_cases(one.rows, {case.id for case in study.cases(values)})
    return quick.first_process(rows) if values.get(filters.QUICK) and not one.here else rows


def forget_figures(chosen: Collection[str]) -> None:
    """Delete what these studies' notebooks drew of recorded GPUs before, so that no figure outlives its name."""
    for path in _drawn_of(chosen):
        path.unlink()


def keep_figures(chosen: Collection[str]) -> list[Path]:
    """Make figures/ hold just what these studies' notebooks drew of the recorded GPUs; returns the copies.

    Of a study of which nothing was drawn, as where its notebook failed, the old ones stay.
    """
    drawn = {paths.FIGURES / path.name: path for path in _drawn_of(chosen)}
    for copy, path in drawn.items():
        records.write_atomic(copy, path.read_bytes())
    fresh = {_study(copy) for copy in drawn}
    for old in set(_figures(paths.FIGURES, chosen)) - drawn.keys():
        if _study(old) in fresh:
            old.unlink()
    return list(drawn)


BEGIN, END = "<!-- findings: `labkit record` writes these lines -->\n", "<!-- end of findings -->"


def with_findings(readme: str) -> str:
    """The text of README.md with what each study comes to, between its two marks. ValueError if it has none."""
    if BEGIN not in readme or END not in readme:
        raise ValueError(f"README.md: no marks {BEGIN.strip()!r} and {END!r}, between which findings stand")
    found, _ = _readable()
    entries = {name: pages.StudyEntry(registry.load(name).title, "", "", "") for name in registry.NOTEBOOKS}
    findings, problems = _findings({name: [one for one in found[name] if not one.here] for name in found}, entries)
    if problems:
        raise ValueError("; ".join(problems))
    lines = [f"- **{one.study}.** {one.conclusion.plain.partition(' [numbers: ')[0]}\n" for one in findings]
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}{''.join(lines)}{END}{rest.partition(END)[2]}"


def keep_findings() -> None:
    """Write what each study comes to into README.md."""
    file = paths.FIGURES.parent / "README.md"
    if file.exists():
        records.write_atomic(file, with_findings(file.read_text("utf-8")).encode())


def _drawn_of(chosen: Collection[str]) -> list[Path]:
    """The figures of these studies that show the recorded GPUs: drawn from all of a study's, or from its only one."""
    found: list[Path] = []
    for study in chosen:
        known = [path.parent.name for path in sorted(paths.DATA.glob(f"*/{study}.parquet"))]
        found += _figures(paths.REPORTS / "figures" / ("recorded" if len(known) != 1 else known[0]), [study])
    return found


def _figures(folder: Path, chosen: Collection[str]) -> list[Path]:
    """The figures of these studies in a folder; not those of runs that show a part."""
    return [path for path in sorted(folder.glob("*.svg")) if _study(path) in chosen and filters.SIGN not in path.stem]


def _study(figure: Path) -> str:
    return figure.name.partition("-")[0]


def _readable(chosen: Sequence[str] = ()) -> tuple[dict[str, list[recorded.Rows]], dict[tuple[str, str, bool], str]]:
    """Study -> rows, those measured here first; and (study, GPU, here) -> why its file cannot be used.

    chosen: of which studies; default: all.
    """
    found: dict[str, list[recorded.Rows]] = {}
    broken: dict[tuple[str, str, bool], str] = {}
    for name in chosen or registry.NOTEBOOKS:
        found[name] = []
        for path, here in sorted(paths.data_files(name), key=lambda one: not one[1]):
            try:
                found[name].append(rows_of(name, path, here))
            except records.RecordError as problem:
                broken[name, path.parent.name, here] = str(problem)
    return found, broken


def rows_of(study: str, path: Path, here: bool) -> recorded.Rows:
    """The rows of a data file, which must not change. RecordError if it cannot be used."""
    stat = path.stat()
    return _rows_of(study, path, here, stat.st_size, stat.st_mtime_ns)


@lru_cache(64)  # with what is made of them: judging and saying what a study comes to want the same tables
def _rows_of(study: str, path: Path, here: bool, size: int, changed: int) -> recorded.Rows:
    return recorded.Rows(study, path.parent.name, here, path, records.read(path))


def _entry(name: str, executed: Path, found: list[recorded.Rows], error: str) -> pages.StudyEntry:
    study = registry.load(name)
    page, status, failed = "", "not run yet: `labkit run`", bool(error)
    if executed.exists():
        page, status = f"{executed.stem}.html", _where_from(executed, found)
        failed = failed or bool(notebooks.cell_error(executed))
    return pages.StudyEntry(study.title, study.summary, page, error or status or "no measurements", failed)


def _where_from(executed: Path, found: list[recorded.Rows]) -> str:
    """Of which GPUs the numbers of an executed notebook are, and when they were measured."""
    used = _used(executed)
    parts = [f"{_how(one)} on {_gpu_name(one)}, {_date(one.rows)}" for one in _shown_with(used, found)]
    parts += [f"predicted for {predicted_words.name_of(used['gpu'])}"] if used.get("source") == "predicted" else []
    return "; ".join(parts)


def _used(executed: Path) -> Mapping[str, Any]:
    """The parameters with which an executed notebook was run; none if it does not say."""
    try:
        return json.loads(executed.read_text())["metadata"]["papermill"]["parameters"]
    except (ValueError, KeyError, TypeError):
        return {}


def _shown_with(used: Mapping[str, Any], found: list[recorded.Rows]) -> list[recorded.Rows]:
    """The rows that a notebook with these parameters could show."""
    source, gpu = used.get("source", "auto"), used.get("gpu", "")
    found = [one for one in found if len(one.rows) and not (one.here and source not in spec.MEASURING)]
    return [one for one in found if one.here or source == "predicted" or gpu in ("", one.gpu)]


def _findings(
    found: Mapping[str, list[recorded.Rows]], entries: Mapping[str, pages.StudyEntry]
) -> tuple[list[index.Finding], list[str]]:
    """What each study with an answer comes to; and the errors of those that could not say."""
    findings, problems = [], []
    for name, entry in entries.items():
        rows, answer = _settled(found[name]), registry.answer(name)
        if answer is None or not rows:
            continue
        try:
            said = judged.told(answer, _entries(name, rows), [one.path for one in rows.values()])
        except Exception as problem:  # one study's mistake must not take the index away
            problems.append(f"{name}: no finding in the index: {type(problem).__name__}: {problem}")
        else:
            if said["conclusion"].plain:
                findings.append(index.Finding(entry.title, entry.page, said["conclusion"], said["advice"]))
    return findings, problems


def _settled(found: list[recorded.Rows]) -> dict[str, recorded.Rows]:
    """GPU name -> rows that a finding rests on: all that are recorded, those measured here only where none are.

    What was measured here may be of few cases.
    """
    found = [one for one in found if len(one.rows)]
    return {_gpu_name(one): one for one in [one for one in found if not one.here] or found}


def _entries(name: str, rows: Mapping[str, recorded.Rows]) -> dict[str, tuple[ledger.Kept, origins.Place]]:
    """GPU, by its short name -> its rows and where its sentences stand."""
    claims, notebook = registry.load(name).claims, registry.NOTEBOOKS[name]
    return {
        short: (one.kept, origins.Place(notebook, slug(full), full, claims))
        for short, (full, one) in zip(words.short_names(list(rows)), rows.items(), strict=True)
    }


def _claims(
    found: Mapping[str, list[recorded.Rows]],
    broken: Mapping[tuple[str, str, bool], str],
    entries: Mapping[str, pages.StudyEntry],
    say: Callable[[str], None],
) -> list[index.ClaimRow]:
    rows = []
    for name, entry in entries.items():
        results_of = {_key(one.gpu, one.here): kept_claims(one, say)["results"] for one in found[name]}
        unusable = {_key(gpu, here): why for (study, gpu, here), why in broken.items() if study == name}
        for claim in registry.load(name).claims:
            results = {key: index.Result(None, error=why) for key, why in unusable.items()}
            results |= {key: _as_result(kept[claim.id]) for key, kept in results_of.items() if claim.id in kept}
            rows.append(index.ClaimRow(claim, name, entry.title, entry.page, results))
    return rows


def kept_claims(one: recorded.Rows, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """What `claims_of` says of rows, kept until they or a source of the lab change: judging all takes seconds."""

    def make() -> dict[str, Any]:
        say(f"judging the claims of {registry.NOTEBOOKS[one.study]} on {one.gpu}")
        return claims_of(one)

    return store.kept("claims", [one.path], make)


def judge_recorded() -> int:
    """Make what the index says of all recorded rows, and keep it; returns of how many files."""
    found = {name: [one for one in rows if not one.here] for name, rows in _readable()[0].items()}
    entries = {name: _entry(name, notebooks.executed_path(name), rows, "") for name, rows in found.items()}
    _findings(found, entries)
    _claims(found, {}, entries, lambda text: None)
    return sum(map(len, found.values()))


def claims_of(one: recorded.Rows) -> dict[str, Any]:
    """The GPU's name, and claim -> the fields of its `index.Result` on these rows, as JSON has them."""
    old, claims = recorded.stale(one.rows), registry.load(one.study).claims
    results = {claim.id: asdict(_result(claim, one, old)) for claim in claims} if len(one.rows) else {}
    return {"gpu": _gpu_name(one) if len(one.rows) else one.gpu, "results": results}


def _as_result(fields: Mapping[str, Any]) -> index.Result:
    judgement = fields["judgement"] and Judgement(**fields["judgement"])
    texts = {name: Html(**fields[name]) for name in ("figure", "why") if isinstance(fields[name], dict)}
    return index.Result(**{**fields, **texts, "judgement": judgement})


def _result(claim: Claim, one: recorded.Rows, old: pd.Series) -> index.Result:
    """A claim on one GPU, with the origins of the numbers that its judgement says. old: which rows are stale."""
    place = origins.Place(registry.NOTEBOOKS[one.study], _key(one.gpu, one.here), _gpu_name(one), [claim])
    found = judged.claim(claim, one.kept, place, one.path)
    figure = found.figure if found.judgement and found.judgement.code else ""
    earlier_kernel = recorded.rests_on(claim, one.rows, old, found.judgement)
    return index.Result(found.judgement, earlier_kernel, found.changed, found.error, figure, found.why)


def _machines(found: Mapping[str, list[recorded.Rows]]) -> list[index.Machine]:
    """One column a GPU; one that is both recorded and measured here has two."""
    groups: dict[tuple[bool, str], list[recorded.Rows]] = {}
    for one in (one for rows in found.values() for one in rows if len(one.rows)):
        groups.setdefault((not one.here, _key(one.gpu, one.here)), []).append(one)
    return [_machine(key, group) for (_, key), group in sorted(groups.items(), key=lambda item: item[0])]


def _machine(key: str, group: list[recorded.Rows]) -> index.Machine:
    rows = pd.concat([one.rows[["utc", "driver"]] for one in group])
    facts = {"driver": ", ".join(sorted(set(rows["driver"])))}
    ceilings = [roofline.Ceilings.from_rows(one.rows) for one in group if one.study == notebooks.FIRST]
    for limit, unit in _UNITS.items() if ceilings else ():
        if not math.isnan(best := ceilings[0].best(limit)):
            digits = 2 if unit == "TB/s" else 0
            facts[limit.replace("_", " ")] = f"{best / 1e12:.{digits}f} {unit}"
    status = f"{_how(group[0])}{',' if group[0].here else ''} {_date(rows)}"
    return index.Machine(key, _gpu_name(group[0]), status, facts)


def _key(gpu: str, here: bool) -> str:
    return f"{gpu}-here" if here else gpu


def _how(one: recorded.Rows) -> str:
    return "measured here" if one.here else "recorded"


def _gpu_name(one: recorded.Rows) -> str:
    return str(one.rows["gpu"].iloc[0])


def _date(rows: pd.DataFrame) -> str:
    return str(rows["utc"].max())[:10]


def _built() -> dict[str, str]:
    found = {"labkit": f"{__version__} {machine.revision()}".strip(), "Python": platform.python_version()}
    for name in ("torch", "Triton"):
        try:
            found[name] = metadata.version(name.lower())
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {"made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
