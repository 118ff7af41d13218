"""What is recorded, whether it is of the present kernels, and what it says of the claims."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pandas as pd

from labkit import paths, registry
from labkit.bench import ledger, records, sha, spec
from labkit.bench.claim import PROCESSES, Claim, Judgement
from labkit.sweep import added, run
from labkit.workflow import store

LAUNCHES = "launches.parquet"  # in data/


@dataclass(frozen=True)
class Rows:
    """The rows of one study on one GPU. here: measured by this machine (runs/), not recorded (data/)."""

    study: str
    gpu: str
    here: bool
    path: Path
    rows: pd.DataFrame

    @cached_property
    def kept(self) -> ledger.Kept:
        """What was made of the rows."""
        return ledger.Kept(self.rows)


def all_rows(study: str, *, runs: bool = True) -> Iterator[Rows]:
    """Every GPU's rows of a study, the recorded ones first, without functions of the reader's own.

    RecordError if a file cannot be used.
    """
    for path, here in paths.data_files(study, runs=runs):
        yield Rows(study, path.parent.name, here, path, read(path))


def read(path: Path) -> pd.DataFrame:
    """The rows of a data file without functions of the reader's own. RecordError if it cannot be used."""
    rows = records.read(path)
    return rows[~added.is_added(rows)].reset_index(drop=True)


def taken(study: spec.Study, gpu: str, rows: pd.DataFrame) -> int:
    """Of how many cases that choose the rows measured here are those of data/, as `sweep.run.take_over` takes them."""
    file, named = paths.DATA / gpu / f"{study.name}.parquet", ["op", "case", "utc"]
    if not study.settle or not file.exists():
        return 0
    both = rows[named].drop_duplicates().merge(records.read(file)[named].drop_duplicates())
    return sum(
        study.early(spec.Case(op, json.loads(case))) for op, case in {*zip(both["op"], both["case"], strict=True)}
    )


def launches() -> pd.DataFrame:
    """What the launches of recorded rows do (`evidence.predict.FACTS`), by the columns that name a row, and its GPU.

    Empty where nothing is recorded of any.
    """
    path = paths.DATA / LAUNCHES
    return pd.read_parquet(path) if path.exists() else pd.DataFrame()


# The rules of earlier schemas, by which hashes that begin with their number were made, for as long as the lab has them:
# that of schema 1 hashed sources which are gone, so its rows are read and all stale.
EARLIER: dict[str, Callable[[spec.Variant], str]] = {}


@cache
def variants_of(study: str, op: str, case: str) -> dict[str, spec.Variant]:
    """Every variant that the study now has for a case, by name; empty if it does not know such a case."""
    try:
        found = run.with_control(registry.load(study), spec.Case(op, json.loads(case)))
    except (KeyError, ValueError, TypeError, StopIteration):
        return {}
    return {variant.name: variant for variant in found}


def present(study: str, op: str, case: str, variant: str, schema: str = "") -> str:
    """The hash of a variant's present sources, by the rule of an earlier schema if one is named.

    Empty if the study has no such variant, or the lab no longer has that rule.
    """
    found = variants_of(study, op, case).get(variant)
    if found is None or (schema and schema not in EARLIER):
        return ""
    return f"{schema}:{EARLIER[schema](found)}" if schema else _sha(found.source)


@cache
def _sha(source: sha.Source) -> str:
    """`kernel_sha` of one of the lab's, which several processes of a run ask for: kept until a source changes."""
    return store.kept(f"hash of {source}", [], lambda: {"sha": sha.kernel_sha(source)})["sha"]


def forget() -> None:
    """Have changed sources read anew in this process."""
    sha.forget()
    variants_of.cache_clear()
    _sha.cache_clear()


def stale(rows: pd.DataFrame) -> pd.Series:
    """Which rows were recorded with an earlier kernel: their kernel_sha is not that of the present sources.

    Of functions of the reader's own the sources are not known here; they are not called stale.
    """
    keys = zip(rows["study"], rows["op"], rows["case"], rows["variant"], rows["kernel_sha"], strict=True)
    old = [present(*key, schema=told.rpartition(":")[0]) != told for *key, told in keys]
    return pd.Series(old, rows.index, bool) & ~added.is_added(rows)


def rehash(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with present hashes in the place of those of an earlier schema that are of the present sources.

    A row that is stale keeps its hash, and stays stale.
    """
    earlier = rows["kernel_sha"].str.contains(":") & ~stale(rows)
    keys = zip(*(rows.loc[earlier, name] for name in ("study", "op", "case", "variant")), strict=True)
    rows = rows.copy()
    rows.loc[earlier, "kernel_sha"] = [present(*key) for key in keys]
    return rows


def judgement_of(claim: Claim, rows: pd.DataFrame) -> Judgement:
    """A claim's judgement from one GPU's rows; a quick look where they are of fewer processes than a verdict wants."""
    return claim.judge(rows, min(records.processes(rows["run"]) or PROCESSES, PROCESSES))


def judge(claim: Claim, rows: pd.DataFrame) -> tuple[Judgement | None, str]:
    """A claim's judgement from one GPU's rows; None and the error if its function raises."""
    try:
        return judgement_of(claim, rows), ""
    except Exception as problem:  # one claim's mistake must not take the table away
        return None, f"{type(problem).__name__}: {problem}"


def rests_on(claim: Claim, rows: pd.DataFrame, some: pd.Series, judgement: Judgement | None) -> bool:
    """Whether a judgement rests on some of its rows: without them it is another."""
    return judgement is not None and bool(some.any()) and judge(claim, rows[~some])[0] != judgement


def rule_changed(claim: Claim, rows: pd.DataFrame, judgement: Judgement | None) -> bool:
    """Whether a judgement rests on rows that were measured before its present rule."""
    known = {text: json.loads(text).get(claim.id) == claim.sha() for text in rows["rules"].unique()}
    later = rows["rules"].map(known).astype(bool)
    return rests_on(claim, rows, ~later, judgement)
