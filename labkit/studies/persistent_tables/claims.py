"""The sources' claims, and the functions that judge them from one GPU's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.bench.spec import Claim, Judgement, lazy, untestable
from labkit.studies.persistent_tables import variants

if TYPE_CHECKING:
    import pandas as pd

PROCESSES = 3
PERSISTENT = (5352.1, 1942.8)  # µs a token, off and on
SCHEDULE = (1994.8, 2389.4)  # µs a token, round-robin and longest first
STANFORD_ON = "H100"
STANFORD = 84  # percent of what can be read: 78 % of the datasheet's bandwidth
WAITS = 0.8  # of the queued work that a copy must wait for to count as waiting for it

graphs, hosts, queued, ratio, rebuilding, where = (
    lazy(f"{variants.PACKAGE}.tables:{name}") for name in ("graphs", "hosts", "queued", "ratio", "rebuilding", "where")
)
interval = lazy("labkit.report.words:interval")


def _published(rows: pd.DataFrame, slow: str, fast: str) -> dict[str, Any]:
    """The ratio of two ways at the published size, if enough processes have both."""
    found = ratio(rows, slow, fast, **variants.PUBLISHED)
    return found if found.get("runs", 0) >= PROCESSES else {}


def _in_processes(what: str) -> Judgement:
    return untestable(f"needs {what} in {PROCESSES} processes")


def _judged(holds: bool, measured: str, why: str, otherwise: str) -> Judgement:
    verdict, because = ("consistent", why) if holds else ("not reproduced", otherwise)
    return Judgement(verdict, measured, because)


def judge_persistent(rows: pd.DataFrame) -> Judgement:
    """Is a token faster by about 2.75 if the tables of one position stay, instead of being rebuilt in Python?"""
    if not (found := _published(rows, variants.REBUILT, variants.ONE_POSITION)):
        return _in_processes("ways 1 and 5 at the published size")
    measured = f"{interval(found, 1)}, paired; medians {found['against us']:.0f} → {found['us']:.0f} µs"
    valid = ratio(rows, variants.REBUILT, variants.GRAPH, **variants.PUBLISHED)
    also = f"; way 9, whose tokens are right, {interval(valid, 1)}" if valid else ""
    why = f"rebuilding costs time here too{also}; the replay itself is no decode"
    return _judged(found["low"] > 1, measured, why, "rebuilding costs nothing here")


def judge_construction(rows: pd.DataFrame) -> Judgement:
    """Is most of what rebuilding costs the Python that builds records, and not the copies?"""
    table = rebuilding(rows).set_index("table")
    runs = where(hosts(rows), parts=variants.PUBLISHED_PARTS, queued_us=0)["runs"]
    if not {"records", "all"} <= set(table.index) or runs.min() < PROCESSES:
        return _in_processes("way 1 part by part")
    (build, copy), share = table.loc["all", ["build", "copy"]], table.loc["records", "share"]
    return _judged(
        build > copy and share > 0.5,
        f"building {build:.0f} µs, of it records {share:.0%}; copies {copy:.0f} µs",
        "the copies are the small part, and the records are most of the building",
        "the building of records is not most of it here",
    )


def judge_schedule(rows: pd.DataFrame) -> Judgement:
    """Does assigning the longest record first make a token slower?"""
    table = where(graphs(rows), variant=variants.LONGEST)
    table = table[table["runs"] >= PROCESSES]
    if table.empty:
        return _in_processes("both schedules")
    parts = [f"{line['model']} {interval(line, 3)}" for _, line in table.iterrows()]
    slower = (where(table, model=variants.H1024)["low"] > 1).any()
    measured = f"time longest first / round-robin: {'; '.join(parts)}"
    return _judged(slower, measured, "slower on its model here too", "not slower on its model here")


def judge_bandwidth(rows: pd.DataFrame) -> Judgement:
    """Does one persistent kernel reach 84 % of what can be read, with Llama-3.2-1B at batch 1?"""
    table = where(graphs(rows), model=variants.LLAMA, variant=variants.OURS).dropna(subset="% of ceiling")
    if table.empty:
        return untestable(f"needs {variants.LLAMA} and this GPU's read ceiling")
    percent, us = table[["% of ceiling", "us"]].iloc[0]
    measured = f"{percent:.0f} % of the read ceiling, beside {STANFORD} % ({us:.0f} µs a token)"
    elsewhere = "" if STANFORD_ON in rows["gpu"].iloc[0] else f", on another GPU than the {STANFORD_ON} of the source,"
    who = f"another kernel, in Triton{elsewhere}"
    return _judged(percent >= STANFORD, measured, f"{who} reaches as much", f"{who} does not reach as much")


def judge_waiting(rows: pd.DataFrame) -> Judgement:
    """Does a pageable copy wait for all that is queued on the stream before it?"""
    waited = queued(rows).set_index("way")["waited"]
    if not {variants.PREBUILT, variants.PINNED} <= set(waited.index):
        return untestable("needs ways 3 and 4 with other work queued and without")
    pageable, pinned = waited[variants.PREBUILT], waited[variants.PINNED]
    return _judged(
        pageable >= WAITS * variants.QUEUED_US and pinned < (1 - WAITS) * variants.QUEUED_US,
        f"{pageable:.0f} µs more with {variants.QUEUED_US} µs of other work queued; pinned {pinned:.0f} µs more",
        "a blocking copy from pageable memory waits for the stream, an asynchronous one from pinned memory does not",
        "no such difference here",
    )


def judge_packed(rows: pd.DataFrame) -> Judgement:
    """Is it faster to send the changed words, packed, and scatter them on the device than to send the tables?"""
    if not (found := _published(rows, variants.PREBUILT, variants.PACKED)):
        return _in_processes("ways 3 and 6 at the published size")
    also = ""
    if pinned := _published(rows, variants.PINNED, variants.PACKED):
        also = f"; against all in one pinned copy (way 4) ×{pinned['ratio']:.3f}: what pays is not to block"
    measured = f"{interval(found)} a token, against blocking copies of all"
    return _judged(found["low"] > 1, measured, f"faster here too{also}", f"not faster here{also}")


def judge_pinned(rows: pd.DataFrame) -> Judgement:
    """Is one pinned copy slower than several pageable ones?"""
    if not (found := _published(rows, variants.PREBUILT, variants.PINNED)):
        return _in_processes("ways 3 and 4 at the published size")
    otherwise = "not slower here: double-buffered, on a stream of its own"
    return _judged(found["high"] < 1, f"pageable / pinned {interval(found)}", "slower here too", otherwise)


AUTOMEGAKERNEL = ("AutoMegaKernel, issue 1", "https://github.com/RightNow-AI/AutoMegaKernel/issues/1")
LAPTOP = "RTX 5090 Laptop, h1024, 402 records"
CLAIMS = (
    Claim(
        "persistent", *AUTOMEGAKERNEL, "Persistent device tables make a token faster than tables rebuilt for each",
        f"{LAPTOP}; one position replayed", f"{PERSISTENT[0]} → {PERSISTENT[1]} µs (×2.75)", judge_persistent,
    ),
    Claim(
        "construction", *AUTOMEGAKERNEL, "Loading the tables is the bottleneck: Python that builds records, not bytes",
        "its packing, run on a CPU", "444 µs buffers, 2222 µs records, 16 µs queues", judge_construction,
    ),
    Claim(
        "schedule", *AUTOMEGAKERNEL, "Assigning the longest record first is slower", LAPTOP,
        f"{SCHEDULE[0]} → {SCHEDULE[1]} µs", judge_schedule,
    ),
    Claim(
        "bandwidth", "Stanford MegaKernels", "", "A whole decoder step in one kernel streams weights near the limit",
        "H100, Llama-3.2-1B, batch 1, CUDA by hand", "78 % of the datasheet's bandwidth, 84 % of what can be read",
        judge_bandwidth,
    ),
    Claim(
        "waiting", "sglang 29415", "", "A pageable copy to the GPU waits for the work that is queued there",
        "GB200", "~8.5 ms a step", judge_waiting,
    ),
    Claim(
        "packed", "vllm-ascend 17066", "", "Changed ranges packed, with a scatter on the device, instead of the table",
        "Ascend, block tables", "2.72 → 0.14 ms a step", judge_packed,
    ),
    Claim(
        "pinned", "imp 2023", "", "One pinned copy is slower than five pageable ones", "three runs", "three of three",
        judge_pinned,
    ),
)  # fmt: skip
