"""A quick look: the headline cases of the claims, those that they cannot do without, in one process.

Which these are is asked of each claim's own rule. Of the recorded rows, cases are left out, those first that took
longest, for as long as what remains still gives the rule something to observe, and leaves its verdict what it was. So
are other people's kernels that no claim of the study rests on: what compiles and tunes those takes most of the time.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from labkit import paths, registry
from labkit.bench import spec
from labkit.bench.claim import Claim
from labkit.bench.records import write_atomic
from labkit.bench.spec import Case, Study
from labkit.workflow import filters, notebooks, recorded, store
from labkit.workflow.filters import Key

T = TypeVar("T")
FILE = "headlines.json"
GAP_S = 90.0  # between two cases; more: another run
ROUNDS = 2  # cases that one claim adds can change what another one reads
LISTS = ("run", "block", "samples_ns", "throttled", "sm_mhz")  # columns that hold one value a sample


def of(study: Study) -> Study:
    """The study with its headline cases alone; all of them if it has no claim, or was never recorded.

    Without what others offer and no claim needs.
    """
    found = _found(study.name)
    wanted = set(map(tuple, found["keys"]))
    if not wanted:
        return study

    def cases(parameters: Mapping[str, Any]) -> list[Case]:
        return [case for case in study.cases(parameters) if case.id in wanted]

    return replace(spec.leaving_out(study, found["without"]), cases=cases, counted=lambda parameters: [])


def asked(name: str, given: Mapping[str, Any]) -> tuple[Study, dict[str, Any]]:
    """A study with the cases that a notebook with these parameters measures, and all of its parameters."""
    values, study = notebooks.defaults(name) | dict(given), registry.load(name)
    return (of(study) if values.get(filters.QUICK) else study), values


def headlines(name: str) -> list[Key]:
    """The headline cases (op, case) of a study, by the rows of all recorded GPUs; none if nothing is recorded."""
    return list(map(tuple, _found(name)["keys"]))


def _found(name: str) -> Mapping[str, Any]:
    """keys: the headline cases of a study; without: the names of others' variants that no claim needs in them.

    To find them takes a minute for all studies, so that they are recorded beside the rows (`keep`). Where those are of
    other rows or rules, what is found is kept until a data file or a source of the lab changes.
    """
    files = [path for path, _ in paths.data_files(name, runs=False)]
    if not files or not registry.load(name).claims:
        return {"keys": [], "without": []}
    known = _recorded().get(name)
    if known is None or known["of"] != _stamp(name, files) or "without" not in known:
        known = store.kept("quick", files, lambda: of_files(name, files))
    return known


def keep(names: Iterable[str]) -> None:
    """Record the headline cases of studies beside their rows, in data/headlines.json."""
    found = _recorded()
    for name in names:
        files = [path for path, _ in paths.data_files(name, runs=False)]
        if files and registry.load(name).claims:
            found[name] = {"of": _stamp(name, files), **_found(name)}
    write_atomic(paths.DATA / FILE, json.dumps(found, indent=1, sort_keys=True).encode() + b"\n")


def _recorded() -> dict[str, Any]:
    """What was recorded of each study; nothing if there is no such file, or it cannot be read."""
    try:
        return json.loads((paths.DATA / FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _stamp(name: str, files: Sequence[Path]) -> str:
    """Of the rows and the rules by which headline cases are found, 12 hexadecimal digits."""
    parts = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    rules = [claim.sha() for claim in registry.load(name).claims]
    return hashlib.sha256(repr((parts, rules)).encode()).hexdigest()[:12]


def of_files(name: str, files: Sequence[Path]) -> dict[str, Any]:
    """The same as recorded, made anew."""
    keys = cases_of(name, files)
    return {"keys": keys, "without": unneeded(name, files, keys)}


def cases_of(name: str, files: Sequence[Path]) -> list[Key]:
    """The headline cases. Claims share them where they can."""
    study = registry.load(name)
    order = [case.id for case in study.cases(notebooks.defaults(name))]
    kept: list[Key] = []
    for path in files:
        rows = recorded.read(path)
        groups, seconds = dict(list(first_process(rows).groupby(["op", "case"]))), first_seconds(rows)
        known = {key: groups[key] for key in sorted(order, key=lambda key: seconds.get(key, 0.0)) if key in groups}
        wholes = [(claim, said(claim, known, list(known))) for claim in study.claims if claim.observe]
        for claim, whole in wholes * ROUNDS:
            kept = headline(claim, known, whole, kept)
    return [key for key in order if key in kept]


def unneeded(name: str, files: Sequence[Path], keys: Sequence[Key]) -> list[str]:
    """Others' variants of these cases without which each claim says the same on each GPU."""
    claims = [claim for claim in registry.load(name).claims if claim.observe]
    peers: set[str] = set()
    needed: set[str] = set()
    for path in files:
        groups = dict(list(first_process(recorded.read(path)).groupby(["op", "case"])))
        if some := [groups[key] for key in keys if key in groups]:
            rows = pd.concat(some, ignore_index=True)
            peers |= set(rows["variant"][rows["role"] == "peer"])
            needed |= _needed(claims, rows)
    return sorted(peers - needed)


def _needed(claims: Sequence[Claim], rows: pd.DataFrame) -> set[str]:
    """Others' variants without which some claim would say something else of these rows."""
    is_peer = rows["role"] == "peer"

    def told_with(names: Sequence[str]) -> list[Told]:
        some = rows[~is_peer | rows["variant"].isin(names)]
        return [told(claim, some) for claim in claims]

    peers = list(dict.fromkeys(rows["variant"][is_peer]))
    whole = told_with(peers)
    return set() if told_with([]) == whole else set(_without(peers, lambda names: told_with(names) == whole))


def first_seconds(rows: pd.DataFrame) -> dict[Key, float]:
    """How long the first process was at a case, by the times at which recorded ones were begun; not of a run's last."""
    begun = pd.to_datetime(rows["utc"]).groupby([rows["op"], rows["case"]]).min().sort_values(kind="stable")
    seconds = begun.diff().dt.total_seconds().shift(-1)
    return {key: s for key, s in seconds.items() if s <= GAP_S}  # not NaN, the last one


Told = tuple[str, str]  # whose code ran, and the verdict; of nothing observed ("", "")


def said(claim: Claim, groups: Mapping[Key, pd.DataFrame], keys: Sequence[Key]) -> Told:
    """What the rule says of some cases. groups: the rows of each case."""
    some = [groups[key] for key in keys if key in groups]
    return told(claim, pd.concat(some, ignore_index=True)) if some else ("", "")


def told(claim: Claim, rows: pd.DataFrame) -> Told:
    """What the rule says of rows of one GPU."""
    found = recorded.judge(claim, rows)[0]
    return (found.code, found.verdict) if found else ("", "")


def headline(claim: Claim, groups: Mapping[Key, pd.DataFrame], whole: Told, kept: Sequence[Key] = ()) -> list[Key]:
    """`kept`, and the first few cases with which the rule says something of the same code as of all, with its verdict.

    groups: the rows of each case, those first that take least time; whole: what is said of all.
    """
    if not whole[0] or said(claim, groups, kept) == whole:
        return list(kept)
    others = [key for key in groups if key not in kept]
    return [*kept, *_without(others, lambda some: said(claim, groups, [*kept, *some]) == whole)]


def _without(keys: list[T], enough: Callable[[list[T]], bool]) -> list[T]:
    """The keys without those that can go, tried in halves, quarters … down to single ones, the last first."""
    size = len(keys)
    while size:
        size //= 2
        for start in reversed(range(0, len(keys), size)) if size else ():
            less = keys[:start] + keys[start + size :]
            if less and enough(less):
                keys = less
    return keys


def rows_of(study: Study, rows: pd.DataFrame) -> pd.DataFrame:
    """Recorded rows as a quick look on that GPU would have made them. study: as `of` makes it."""
    return first_process(rows[~rows["variant"].isin(study.left_out)].reset_index(drop=True))


def first_process(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows as they were after one process: what a quick look on that GPU had to go by."""
    rows = rows.copy()
    first = [[run == 0 for run in runs] for runs in rows["run"]]
    for name in LISTS:
        rows[name] = [
            [v for v, keep in zip(values, some, strict=True) if keep]
            for values, some in zip(rows[name], first, strict=True)
        ]
    return rows
