"""Where a token's time goes: stages of a step from the moments that its records wrote down.

A stage is all records that signal one counter: every program waits for the last of them. What a stage takes, from the
end of the stage before to its own, is split into three parts that add up:

| part | from the moment that         | to the moment that           | what it is                                   |
|------|------------------------------|------------------------------|----------------------------------------------|
| wake | the stage before is done     | half of its records may work | signal, poll, what the memory does meanwhile |
| work | half of its records may work | half of its records are done | weights that are left to stream, sums        |
| tail | half of its records are done | the last record is done      | the slowest program, for which all wait      |
"""

from typing import Any

import numpy as np

from labkit.bench import ledger
from labkit.kernels.decoder.tables import MOMENTS, OP, OPS, SIGNAL

PARTS = ("wake", "work", "tail")
_RELEASED, _DONE = (MOMENTS.index(name) for name in ("released", "done"))


def stages(records: np.ndarray, marks: np.ndarray) -> list[dict[str, Any]]:
    """Every stage in the order of time: op, and its PARTS in ns. The first, which follows none, is left out.

    records: int32 [records, words]; marks: int64 [records, moments], ns, 0 where a record never came to that moment (a
    span of attention that has no position is not released). ValueError for another number of marks than records.
    """
    if len(records) != len(marks):
        raise ValueError(f"marks has {len(marks)} entries; allowed: {len(records)}, one a record")
    # From the first moment on: a float of ns since 1970 would have steps of 256. Zeros, of what never came, stay first.
    marks = np.where(marks > 0, marks - marks[marks > 0].min() + 1, 0)
    signalling = {s: records[:, SIGNAL] == s for s in np.unique(records[:, SIGNAL]) if s >= 0}
    ends = {s: int(marks[mine, _DONE].max()) for s, mine in signalling.items()}
    found, before = [], 0
    for signal, end in sorted(ends.items(), key=lambda item: item[1]):
        mine = signalling[signal]
        waited = mine & (marks[:, _RELEASED] >= before)
        if before and waited.any():
            wake, half = (float(np.median(marks[waited, moment])) for moment in (_RELEASED, _DONE))
            line = {"op": OPS[int(records[mine, OP][0]) - 1]}
            found.append(line | {"wake": wake - before, "work": half - wake, "tail": end - half})
        before = end
    return found


def by_op(records: np.ndarray, marks: np.ndarray) -> list[dict[str, Any]]:
    """`stages` by op, in the order of time: op, how many there are, and the sums of their PARTS in µs."""
    found: dict[str, dict[str, Any]] = {}
    for one in stages(records, marks):
        line = found.setdefault(one["op"], {"op": one["op"], "stages": 0} | dict.fromkeys(PARTS, 0.0))
        line["stages"] += 1
        for part in PARTS:
            line[part] += one[part] / 1e3
    return list(found.values())


ledger.watch(__name__)
