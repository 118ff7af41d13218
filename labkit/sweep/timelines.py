"""A study's timelines taken on this GPU and written to a file; `python -m labkit.sweep.timelines FOLDER` takes all."""

import sys
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from labkit import registry
from labkit.bench import machine, records, timelines
from labkit.bench.sha import kernel_sha
from labkit.bench.spec import Study

if TYPE_CHECKING:
    from labkit.evidence.timeline import Timeline

SEED = 0


def take(study: str, base: str, device: Any = "cuda") -> int:
    """Take a study's timelines on this GPU and write base/<gpu>/timelines/<study>.parquet; returns the bars in it."""
    here, provenance = machine.this_machine(), machine.provenance(SEED)
    rows = rows_of(registry.load(study), registry.load(study).timelines.take(device, seed=SEED), here.sms, provenance)
    path = timelines.path_of(Path(base), here.slug, study)
    timelines.write(path, rows)
    machine_file = path.parents[1] / "machine.json"
    if not machine_file.exists():
        records.write_atomic(machine_file, here.to_json())
    return len(rows)


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
