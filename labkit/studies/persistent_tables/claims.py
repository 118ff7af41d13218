"""The published claims of the study, with the rules by which `bench/claim.py` judges them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.bench.claim import OURS, Claim, Observation, Observed, of_interval, of_table
from labkit.studies.persistent_tables import variants

if TYPE_CHECKING:
    import pandas as pd

    from labkit.bench.spec import Case
    from labkit.bench.verdict import Interval

STEP = 0.05  # µs: the last digit of the source's times, either way
PERSISTENT = (5352.1, 1942.8)  # µs a token, off and on
SCHEDULE = (2389.4, 1994.8)  # µs a token, longest first and round-robin
RECORDS, BUFFERS, QUEUES = 2222, 444, 16  # µs of building, of the source's Python
RECORDS_SIZE = (RECORDS - 0.5) / (BUFFERS + QUEUES + 1), (RECORDS + 0.5) / (BUFFERS + QUEUES - 1)  # by their rounding
WAITS = 0.8  # of the queued work that a copy must wait for to count as waiting for it


def _between(above: float, below: float, error: float) -> tuple[float, float]:
    """The least and the largest ratio of two values that may each be off by `error`."""
    return (above - error) / (below + error), (above + error) / (below - error)


def _ways(rows: pd.DataFrame, above: str, below: str) -> Observed:
    """Time of a token of one way over that of another, at the published size, of the same blocks."""
    from labkit.studies.persistent_tables import tables

    found, names = tables.ratio(rows, above, below, **variants.PUBLISHED), ("ratio", "low", "high", "noise", "runs")
    several = [Observation(below, *(found[name] for name in names))] if found else []
    return Observed(OURS, several, f"ways {above.split()[0]} and {below.split()[0]} at the published size")


def persistent(rows: pd.DataFrame) -> Observed:
    """A token whose tables are rebuilt over one whose tables stay: ways 1 and 5, as was published."""
    return _ways(rows, variants.REBUILT, variants.ONE_POSITION)


def packed(rows: pd.DataFrame) -> Observed:
    """All tables in blocking copies over the changed words alone, packed: ways 3 and 6."""
    return _ways(rows, variants.PREBUILT, variants.PACKED)


def fewer_bytes(rows: pd.DataFrame) -> Observed:
    """All tables in one asynchronous copy over the changed words alone: ways 4 and 6, of which neither blocks."""
    return _ways(rows, variants.PINNED, variants.PACKED)


def pinned(rows: pd.DataFrame) -> Observed:
    """All tables in one pinned copy over the same in pageable ones: ways 4 and 3."""
    return _ways(rows, variants.PINNED, variants.PREBUILT)


def schedule(rows: pd.DataFrame) -> Observed:
    """A step with the longest record first over one in turn, on the source's model, of the same blocks."""
    from labkit.studies.persistent_tables import tables

    table = tables.where(tables.graphs(rows), model=variants.H1024, variant=variants.LONGEST)
    noise = tables.noise(rows, "token", **variants.MAIN, model=variants.H1024)
    return Observed(OURS, of_table(table.assign(noise=noise), lambda line: line["model"]), "both schedules")


def building(rows: pd.DataFrame) -> Observed:
    """Building all tables over copying them, of the same tokens; noise: of the case."""
    from labkit.studies.persistent_tables import tables

    return Observed(OURS, [_host(rows, tables.building(rows))], "way 1 at the published size, part by part")


def records(rows: pd.DataFrame) -> Observed:
    """Building the records alone over building the other tables alone, each process by itself; noise: of the case."""
    from labkit.studies.persistent_tables import tables

    return Observed(OURS, [_host(rows, tables.records_over_rest(rows))], "way 1 at the published size, table by table")


def _host(rows: pd.DataFrame, found: Interval) -> Observation:
    """A ratio of the host's times of one case."""
    from labkit.studies.persistent_tables import tables

    return of_interval(variants.REBUILT, found, tables.noise(rows, "host", **variants.PUBLISHED, queued_us=0))


def waiting(rows: pd.DataFrame) -> Observed:
    """µs that pageable copies take beyond those with an idle GPU, over those of the work that is queued before them.

    Each process by itself; of way 3, whose building takes next to nothing: all tables, and each alone. noise: of both
    cases, each of its own copies' µs.
    """
    from labkit.studies.persistent_tables import tables

    table = tables.queued(rows, (variants.PREBUILT, *(variants.alone(variants.PREBUILT, x) for x in variants.TABLES)))
    us, found = variants.QUEUED_US, []
    busy, idle = (tables.noise(rows, "host", **variants.PUBLISHED, queued_us=queued) for queued in (us, 0))
    for line in table.to_dict("records"):
        mid, low, high = (line[name] / us for name in ("waited", "low", "high"))
        noise = (busy * line["queued"] + idle * line["idle"]) / us / WAITS
        found.append(Observation(line["way"], mid, low, high, noise, line["runs"]))
    return Observed(OURS, found, f"way 3 with {us} µs of other work queued and without")


def pairs(x: Case) -> list[tuple[str, str]]:
    """A step from tables against separate kernels, another schedule, and a plain read of its bytes.

    Of what the host does for a token, which most claims are about, nothing is predicted.
    """
    others = (variants.GEMV_DEPENDENT, variants.CUBLAS_DEPENDENT, variants.LONGEST, variants.READ)
    return [(variants.OURS, other) for other in others] if x.op == "token" else []


AUTOMEGAKERNEL = ("AutoMegaKernel, issue 1", "https://github.com/RightNow-AI/AutoMegaKernel/issues/1")
MEGAKERNELS = ("Stanford MegaKernels", "https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles")
SGLANG = ("SGLang pull request 29415", "https://github.com/sgl-project/sglang/pull/29415")
ASCEND = ("vllm-ascend pull request 17066", "https://github.com/vllm-project/vllm-ascend/pull/17066")
LAPTOP = "RTX 5090 Laptop, h1024, 402 records"
GPUS = ("RTX 5090",)
OTHER = "another kernel, and another host and its Python"
UPLOAD = (  # of its claims, the conditions and what was published
    "Ascend, block tables; of the upload alone, of an earlier version", "2.72 → 0.14 ms per step, of the upload alone",
)  # fmt: skip
HERE = {"gpus": ("Ascend",), "differs": "tables of a decode; the whole token is timed, not the upload"}
TOKEN = "time per token"
RULED = "2026-11-26"
CLAIMS = (
    Claim(
        "persistent", *AUTOMEGAKERNEL, "Tables that stay on the GPU make a token faster than rebuilt tables do",
        f"{LAPTOP}; one position replayed", f"{PERSISTENT[0]} → {PERSISTENT[1]} µs, 2.75× faster",
        ruled=RULED, faster=True,
        quantity=f"{TOKEN} with tables rebuilt in Python ÷ with one position replayed, as published, whose output is "
        "wrong (correct: see the headline)",
        observe=persistent, size=_between(*PERSISTENT, STEP), gpus=GPUS, differs=OTHER,
        note="the replay of one position is no decode",
    ),
    Claim(
        "construction", *AUTOMEGAKERNEL, "The bottleneck is Python that builds the tables, not copying them",
        "its packing, run on a CPU", f"{RECORDS + BUFFERS + QUEUES} µs of building for about 104 KB",
        ruled=RULED, quantity="time to build all tables ÷ time to copy them", observe=building,
        differs=OTHER, refutes="copies that take as long as building, of the same tokens",
    ),
    Claim(
        "records", *AUTOMEGAKERNEL, "Most of building the tables is building the records",
        "its packing, run on a CPU", f"{RECORDS} µs records, {BUFFERS} µs buffers, {QUEUES} µs queues",
        ruled=RULED, quantity="time to build the records ÷ time to build the other tables", observe=records,
        size=RECORDS_SIZE, differs=OTHER,
    ),
    Claim(
        "schedule", *AUTOMEGAKERNEL, "Assigning the longest record first is slower", LAPTOP,
        f"{SCHEDULE[1]} → {SCHEDULE[0]} µs",
        ruled=RULED, quantity=f"{TOKEN} with the longest record first ÷ with records in turn",
        observe=schedule, size=_between(*SCHEDULE, STEP), gpus=GPUS,
        differs="another kernel, with another number of records",
    ),
    Claim(
        "bandwidth", *MEGAKERNELS, "A whole decoder step in one kernel streams weights near the limit",
        "H100, Llama-3.2-1B, batch 1, CUDA by hand; positions 32 to 160", "78 % of the data sheet's bandwidth",
        ruled=RULED,
        untested="it is of their kernel, which was not run; how fast another one is, in Triton, says nothing of it",
    ),
    Claim(
        "waiting", *SGLANG, "A pageable copy to the GPU waits for the work that is queued there",
        "GB200", "~8.5 ms per step",
        ruled=RULED, quantity="of the queued work is waited for", observe=waiting, neutral=WAITS, percent=True,
        gpus=("GB200",), differs="copies of tables behind a kernel that only waits, outside of an engine",
        refutes=f"copies that return before {100 * WAITS:.0f} % of the queued work has ended",
    ),
    Claim(
        "packed", *ASCEND, "Sending only the changed words, packed, is faster than sending all tables", *UPLOAD,
        ruled="2026-11-25", observe=packed, faster=True,
        quantity="time per whole token with all tables copied, each copy blocking (pageable) ÷ with the changed words "
        "packed",
        note="the gain is over copies that block; the next claim is of a copy that does not", **HERE,
    ),
    Claim(
        "packed-bytes", *ASCEND, "Sending only the changed words is faster because fewer bytes are sent", *UPLOAD,
        ruled="2026-11-25", observe=fewer_bytes, faster=True,
        quantity="time per whole token with one pinned copy of all tables, which does not block ÷ with the changed "
        "words packed",
        **HERE,
        refutes="a token with all bytes in one copy that does not block, and that takes no longer",
    ),
    Claim(
        "pinned", "imp 2023", "", "One pinned copy is slower than five pageable ones",
        "three runs; GPU not stated, and no address is known", "three of three",
        ruled="2026-11-25", quantity=f"{TOKEN} with one pinned copy ÷ with three pageable ones", observe=pinned,
        differs="three pageable copies, and two pieces of pinned memory in turn on a stream of its own",
    ),
)  # fmt: skip
