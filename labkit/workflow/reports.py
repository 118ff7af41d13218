"""The pages and the index, from the notebooks that were run and the measurements that there are."""

import json
import math
import platform
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from labkit import __version__, paths, registry
from labkit.bench import ledger, machine, records, spec
from labkit.bench.claim import Claim
from labkit.evidence import roofline
from labkit.report import index, origins, pages
from labkit.report.figures import Html
from labkit.workflow import notebooks, predicted_words, recorded

_UNITS = {"read": "TB/s", "in_place": "TB/s", "copy": "TB/s", "bf16": "TFLOP/s", "fp8": "TFLOP/s"}  # shown in the index


def write(failed: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Write a page for every notebook that was run, and reports/index.html; returns what went wrong with that.

    failed: study -> error, of notebooks that did not run to their end just now.
    """
    found, broken = _readable()
    problems = list(broken.values())
    executed = {name: notebooks.executed_path(name) for name in registry.NOTEBOOKS}
    entries = {name: _entry(name, path, found[name], failed.get(name, "")) for name, path in executed.items()}
    shown = [name for name, path in executed.items() if path.exists()]
    for before, name, after in zip([None, *shown], shown, [*shown[1:], None], strict=False):
        try:
            pages.page(
                executed[name],
                paths.REPORTS / f"{executed[name].stem}.html",
                previous=entries[before] if before else None,
                following=entries[after] if after else None,
                status=entries[name].status,
            )
        except (ValueError, OSError, KeyError) as problem:  # an executed notebook that something else wrote
            problems.append(f"{executed[name]}: no page: {type(problem).__name__}: {problem}")
    findings, wrong = _findings(found, entries)
    claims = _claims(found, broken, entries)
    out = paths.REPORTS / "index.html"
    index.write(list(entries.values()), findings, claims, _machines(found), out, _built())
    problems += wrong
    return problems


def forget_figures(chosen: Collection[str]) -> None:
    """Delete what these studies' notebooks drew of recorded GPUs before, so that no figure outlives its name."""
    for path in _figures(paths.REPORTS / "figures", chosen):
        path.unlink()


def keep_figures(chosen: Collection[str]) -> list[Path]:
    """Make figures/ hold just what these studies' notebooks drew of recorded GPUs; returns the copies.

    Of a study and GPU of which nothing was drawn, as where its notebook failed, the old ones stay.
    """
    made = paths.REPORTS / "figures"
    drawn = {paths.FIGURES / path.relative_to(made): path for path in _figures(made, chosen)}
    for copy, path in drawn.items():
        records.write_atomic(copy, path.read_bytes())
    fresh = {(copy.parent, _study(copy)) for copy in drawn}
    for old in set(_figures(paths.FIGURES, chosen)) - drawn.keys():
        if (old.parent, _study(old)) in fresh:
            old.unlink()
    return list(drawn)


def _figures(folder: Path, chosen: Collection[str]) -> list[Path]:
    """The figures of these studies and all recorded GPUs in a folder."""
    found = [path for gpu in paths.recorded_gpus() for path in sorted((folder / gpu).glob("*.svg"))]
    return [path for path in found if _study(path) in chosen]


def _study(figure: Path) -> str:
    return figure.name.partition("-")[0]


def _readable() -> tuple[dict[str, list[recorded.Rows]], dict[tuple[str, str, bool], str]]:
    """Study -> rows, those measured here first; and (study, GPU, here) -> why its file cannot be used."""
    found: dict[str, list[recorded.Rows]] = {}
    broken: dict[tuple[str, str, bool], str] = {}
    for name in registry.NOTEBOOKS:
        found[name] = []
        for path, here in reversed(paths.data_files(name)):
            gpu = path.parent.name
            try:
                found[name].append(recorded.Rows(name, gpu, here, path, records.read(path)))
            except records.RecordError as problem:
                broken[name, gpu, here] = str(problem)
    return found, broken


def _entry(name: str, executed: Path, found: list[recorded.Rows], error: str) -> pages.StudyEntry:
    study = registry.load(name)
    page, status, failed = "", "not run yet: `labkit run`", bool(error)
    if executed.exists():
        page, used = f"{executed.stem}.html", _used(executed)
        parts = [f"{_how(one)} on {_gpu_name(one)}, {_date(one.rows)}" for one in _shown_with(used, found)]
        parts += [f"predicted for {predicted_words.name_of(used['gpu'])}"] if used.get("source") == "predicted" else []
        status = "; ".join(parts)
        failed = failed or bool(notebooks.cell_error(executed))
    return pages.StudyEntry(study.title, study.summary, page, error or status or "no measurements", failed)


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
            said = [_told(tell, name, rows) for tell in (answer.conclusion, answer.advice)]
        except Exception as problem:  # one study's mistake must not take the index away
            problems.append(f"{name}: no finding in the index: {type(problem).__name__}: {problem}")
        else:
            findings.append(index.Finding(entry.title, entry.page, *said))
    return findings, problems


def _settled(found: list[recorded.Rows]) -> dict[str, pd.DataFrame]:
    """GPU name -> rows that a finding rests on: all that are recorded, those measured here only where none are.

    What was measured here may be of few cases.
    """
    found = [one for one in found if len(one.rows)]
    return {_gpu_name(one): one.rows for one in [one for one in found if not one.here] or found}


def _told(tell: Callable[[Mapping[str, pd.DataFrame]], str], name: str, rows: Mapping[str, pd.DataFrame]) -> Html:
    """A sentence on all GPUs, with the origins of its numbers."""
    place = origins.Place(registry.NOTEBOOKS[name], "", ", ".join(rows), registry.load(name).claims)
    return origins.told(lambda: tell(rows), pd.concat(rows.values(), ignore_index=True), place)


def _claims(
    found: Mapping[str, list[recorded.Rows]],
    broken: Mapping[tuple[str, str, bool], str],
    entries: Mapping[str, pages.StudyEntry],
) -> list[index.ClaimRow]:
    rows = []
    for name, entry in entries.items():
        old = {_key(one.gpu, one.here): bool(recorded.stale(one.rows).any()) for one in found[name]}
        unusable = {_key(gpu, here): why for (study, gpu, here), why in broken.items() if study == name}
        for claim in registry.load(name).claims:
            results = {key: index.Result(None, error=why) for key, why in unusable.items()}
            for one in found[name]:
                results[_key(one.gpu, one.here)] = _result(claim, one, old[_key(one.gpu, one.here)])
            rows.append(index.ClaimRow(claim, name, entry.title, entry.page, results))
    return rows


def _result(claim: Claim, one: recorded.Rows, earlier_kernel: bool) -> index.Result:
    """A claim on one GPU, with the origins of the numbers that its judgement says."""
    with ledger.recording() as book:
        judgement, error = recorded.judge(claim, one.rows)
    later = recorded.rule_changed(claim, one.rows, judgement)
    if judgement is None:
        return index.Result(None, earlier_kernel, later, error)
    place = origins.Place(registry.NOTEBOOKS[one.study], _key(one.gpu, one.here), _gpu_name(one), [claim])
    pool = origins.Pool(one.rows, book, place)
    length = len(judgement.measured.removesuffix(f": {claim.quantity}"))  # which the index says once for all GPUs
    figure = origins.marked(judgement.measured, pool, length) if judgement.code else ""
    return index.Result(judgement, earlier_kernel, later, error, figure, origins.marked(judgement.why, pool))


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
