"""What is recorded, whether it is of the present kernels, and what it says of the claims."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from labkit import paths, studies
from labkit.bench import added, records, spec, sweep
from labkit.bench.sha import kernel_sha


@dataclass(frozen=True)
class Rows:
    """The rows of one study on one GPU. here: measured by this machine (runs/), not recorded (data/)."""

    study: str
    gpu: str
    here: bool
    path: Path
    rows: pd.DataFrame


def files(study: str, *, runs: bool = True) -> list[tuple[str, bool, Path]]:
    """GPU, whether measured here, and data file of a study, the recorded ones first."""
    bases = ((paths.DATA, False), (paths.RUNS, True))[: 2 if runs else 1]
    return [(path.parent.name, here, path) for base, here in bases for path in sorted(base.glob(f"*/{study}.parquet"))]


def all_rows(study: str, *, runs: bool = True) -> Iterator[Rows]:
    """Every GPU's rows of a study, the recorded ones first, without functions of the reader's own.

    RecordError if a file cannot be used.
    """
    for gpu, here, path in files(study, runs=runs):
        rows = records.read(path)
        yield Rows(study, gpu, here, path, rows[~added.is_added(rows)].reset_index(drop=True))


@cache
def _present(study: str, op: str, case: str) -> dict[str, str]:
    """kernel_sha of every variant that the study now has for a case; empty if it does not know such a case."""
    declared = studies.load(study)
    try:
        return {v.name: kernel_sha(v.source) for v in sweep.with_control(declared, spec.Case(op, json.loads(case)))}
    except (KeyError, ValueError, TypeError, StopIteration):
        return {}


def stale(rows: pd.DataFrame) -> pd.Series:
    """Which rows were recorded with an earlier kernel: their kernel_sha is not that of the present sources.

    Of functions of the reader's own the sources are not known here; they are not called stale.
    """
    keys = zip(rows["study"], rows["op"], rows["case"], rows["variant"], rows["kernel_sha"], strict=True)
    old = [_present(study, op, case).get(variant) != sha for study, op, case, variant, sha in keys]
    return pd.Series(old, rows.index, bool) & ~added.is_added(rows)


def judge(claim: spec.Claim, rows: pd.DataFrame) -> tuple[spec.Judgement | None, str]:
    """A claim's judgement from one GPU's rows; None and the error if its function raises."""
    try:
        return claim.judge(rows.copy()), ""
    except Exception as problem:  # one claim's mistake must not take the table away
        return None, f"{type(problem).__name__}: {problem}"
