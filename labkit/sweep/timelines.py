"""A study's timelines, taken on this GPU and written to a file.

`labkit run` takes them with the measurements; `python -m labkit.sweep.timelines FOLDER` takes those of all studies.
"""

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from labkit import isolated, registry
from labkit.bench import machine, records, timelines
from labkit.bench.sha import kernel_sha
from labkit.bench.spec import Case, Study

if TYPE_CHECKING:
    from labkit.evidence.timeline import Timeline

SEED = 0


def take(name: str, base: str, device: Any = "cuda") -> int:
    """Take a study's timelines on this GPU and write base/<gpu>/timelines/<study>.parquet; returns the bars in it."""
    here, study = machine.this_machine(), registry.load(name)
    taken = study.timelines.take(study.timelines.case, device, SEED)
    rows = rows_of(study, taken, here.sms, machine.provenance(SEED))
    path = timelines.path_of(Path(base), here.slug, name)
    timelines.write(path, rows)
    if not (file := path.parents[1] / "machine.json").exists():
        records.write_atomic(file, here.to_json())
    return len(rows)


def complete(
    study: Study, cases: Sequence[Case], base: Path, env: Mapping[str, str | None], say: Callable[[str], None]
) -> None:
    """Take what a study shows over time, if its case is among these and there is none of the present sources yet.

    base: runs/. Where it cannot be taken one line says why, and the page that there is none.
    """
    shown = study.timelines
    if shown is None or shown.case.id not in {case.id for case in cases}:
        return
    if _is_current(study, timelines.path_of(base, machine.this_machine().slug, study.name)):
        return
    say(f"{study.name}: timelines")
    try:
        isolated.call("labkit.sweep.timelines:take", study.name, str(base), env={**env, "TRITON_INTERPRET": None})
    except isolated.IsolatedError as problem:
        say(f"{study.name}: timelines: not taken: {problem.kind}: {problem.message}")


def _is_current(study: Study, path: Path) -> bool:
    if not path.exists():
        return False
    rows, here = timelines.read(path), machine.provenance(SEED)
    same = all((rows[name] == here[name]).all() for name in ("gpu", "driver", "torch", "triton"))
    return same and not timelines.stale(study, rows)


def rows_of(study: Study, taken: "Sequence[Timeline]", sms: int, provenance: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of a file. sms: multiprocessors of the GPU."""
    found = [one.bars.assign(what=one.what, plain_ns=one.plain_ns, clocked_ns=one.clocked_ns) for one in taken]
    same = {"study": study.name, "sms": sms, "kernel_sha": kernel_sha(study.timelines.source)}
    same["utc"] = datetime.now(UTC).isoformat(timespec="seconds")
    return pd.concat(found, ignore_index=True).assign(**same, **provenance)


def main(folder: str) -> int:
    """Every study's timelines; what fails is printed, and the next one goes on. Returns how many failed."""
    failed = 0
    for name in registry.NOTEBOOKS:
        if registry.load(name).timelines:
            try:
                print(f"{name}: {take(name, folder)} bars", flush=True)
            except Exception:  # whatever it is, it is said, and the others are taken all the same
                traceback.print_exc()
                failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
