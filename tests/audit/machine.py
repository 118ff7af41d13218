"""The tables of the study of the machine, computed once more from the recorded rows.

Samples are gone through one by one: no frame of the lab's is made again.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pandas as pd
from common import AA, End, Sentences, Tables, median, noise, table, us

STUDY = "machine"
MEMORY = {"read": "read only", "in_place": "in place", "copy": "copy"}  # as recorded, and as shown
MATRIX = ("bf16", "fp16", "fp8", "int8")
BENCHED = "torch, timed by do_bench"
KERNELS = {"Triton": "Triton, empty kernel", "torch": "PyTorch, zero_ of one value"}
MIB = 2**20


def _rows(rows: pd.DataFrame, op: str, *kinds: str) -> Iterator[dict[str, Any]]:
    """Usable rows of an operation, of some kinds of it or all, but no control; each with its µs and parameters."""
    for row in rows.to_dict("records"):
        if row["op"] == op and row["ok"] and row["variant"] != AA and row["params"]["what"] in (kinds or _KINDS):
            yield row | row["params"] | row["chosen"] | {"us": us(row)}


_KINDS = (*MEMORY, *MATRIX, "empty", "h2d")


def _rate(row: dict[str, Any]) -> float:
    """TB/s of all bytes that are moved, each way, or TFLOP/s of a square product: so many a µs, in millions."""
    if row["what"] in MATRIX:
        return 2 * row["n"] ** 3 / row["us"] / 1e6
    return (1 if row["what"] == "read" else 2) * row["mib"] * MIB / row["us"] / 1e6


def memory_rates(rows: pd.DataFrame) -> pd.DataFrame:
    """The faster of the two ways to move a memory's bytes, by kind, size and cache; `do_bench` is no way."""
    best: dict[tuple, dict[str, Any]] = {}
    for row in _rows(rows, "ceiling", *MEMORY):
        key = MEMORY[row["what"]], row["mib"], row["cache"]
        if row["role"] == "ceiling" and (key not in best or row["us"] < best[key]["us"]):
            best[key] = row
    found = [(*key, _rate(row), row["us"], row["variant"]) for key, row in best.items()]
    return pd.DataFrame(found, columns=["kind", "mib", "cache", "tbs", "us", "by"])


def matrix_rates(rows: pd.DataFrame) -> pd.DataFrame:
    """Square products, by type and size."""
    return pd.DataFrame(
        [
            {"what": row["what"], "size": "{0} × {0}".format(row["n"]), "us": row["us"], "tflops": _rate(row)}
            for row in _rows(rows, "ceiling", *MATRIX)
        ]
    )


def launch_cost(rows: pd.DataFrame) -> pd.DataFrame:
    """A launch, by library and mode."""
    found = [(KERNELS[row["library"]], row["mode"], row["us"]) for row in _rows(rows, "launch")]
    return pd.DataFrame(found, columns=["kernel", "mode", "us"])


def host_copies(rows: pd.DataFrame) -> pd.DataFrame:
    """Copies from the host, by size and kind of memory: GB/s are bytes a ns."""
    found = [
        (_size(row["bytes"]), row["memory"], row["us"], row["bytes"] / (1000 * row["us"]))
        for row in _rows(rows, "copy")
    ]
    return pd.DataFrame(found, columns=["size", "memory", "us", "gbs"])


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // 1024} KiB"


def clocks(rows: pd.DataFrame) -> pd.DataFrame:
    """The SM clock of all blocks of a kind of work."""
    found: dict[str, list[float]] = {}
    for row in _rows(rows, "ceiling"):
        found.setdefault(row["what"], []).extend(row["sm_mhz"])
    lines = [(what, min(mhz), median(mhz), max(mhz)) for what, mhz in found.items()]
    return pd.DataFrame(lines, columns=["what", "min", "median", "max"])


def ceilings(rows: pd.DataFrame) -> pd.DataFrame:
    """The best cold rate of each kind, in words."""
    best: dict[str, tuple[float, str]] = {}
    for row in _rows(rows, "ceiling"):
        what = row["what"]
        if row["cache"] == "cold" and row["role"] == "ceiling":
            rate, form = _rate(row), "{rate:.2f} TB/s ({mib} MiB, {variant})"
            if what in MATRIX:
                form = "{rate:.0f} TFLOP/s (n = {n}, {variant})"
            best[what] = max(best.get(what, (0.0, "")), (rate, form.format(rate=rate, **row)))
    found = [(MEMORY.get(what, f"matrix, {what}"), words) for what, (_, words) in best.items()]
    return pd.DataFrame(found, columns=["ceiling", "best cold rate"])


def sanity(rows: pd.DataFrame) -> pd.DataFrame:
    """256 MiB updated in place by PyTorch, as the lab and as `do_bench` times it."""
    found = []
    for row in _rows(rows, "ceiling", "in_place"):
        if row["mib"] == 256 and row["cache"] == "cold" and row["variant"] in ("torch", BENCHED):
            line = {"timed by": row["variant"], "mode": row["mode"], "median µs": row["us"]}
            found.append(line | {f"{q}th percentile µs": _percentile(row["samples_ns"], q) / 1000 for q in (5, 95)})
    return pd.DataFrame(found)


def _percentile(values: Any, q: int) -> float:
    """The value that q percent of the others lie below: between two of them, in proportion."""
    ordered = sorted(map(float, values))
    place, rest = divmod((len(ordered) - 1) * q, 100)
    return ordered[place] + (ordered[min(place + 1, len(ordered) - 1)] - ordered[place]) * rest / 100


def noises(rows: pd.DataFrame) -> pd.DataFrame:
    """Half widths of the A/A intervals of an operation, cache and mode: how many are within 1 %, median, most."""
    found = []
    for key, ends in _widths(rows).items():
        line = dict(zip(("op", "cache", "mode"), key, strict=True)) | {"cases": len(ends)}
        for name, of in (("median ± %", median), ("widest ± %", max)):
            values = [100 * of([getattr(end, bound) for end in ends]) for bound in ("value", "least", "most")]
            line |= End(*values).columns(name)
        counts = [sum(getattr(end, bound) <= 0.01 for end in ends) for bound in ("value", "most", "least")]
        found.append(line | End(*counts).columns("within ±1 %"))
    return table(found, ["op", "cache", "mode", "cases", "within ±1 %", "median ± %", "widest ± %"])


def _widths(rows: pd.DataFrame) -> dict[tuple[str, str, str], list[End]]:
    """(op, cache, mode) -> the half width of each case that has a control."""
    names = ["op", "cache", "mode"]
    found: dict[tuple[str, str, str], list[End]] = {}
    ordered = sorted(rows.to_dict("records"), key=_case)
    for (*key, _), group in groupby(ordered, key=_case):
        width = noise(list(group))
        if width.value == width.value:
            found.setdefault(tuple(key), []).append(width)
    assert all(len(key) == len(names) for key in found)
    return found


def _case(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return row["op"], row["cache"], row["mode"], row["case"]


TABLES: Tables = {
    "views.memory_rates": memory_rates,
    "views.matrix_rates": matrix_rates,
    "views.launch_cost": launch_cost,
    "views.host_copies": host_copies,
    "views.clocks": clocks,
    "views.ceilings": ceilings,
    "views.sanity": sanity,
    "views.noise": noises,
}


# Numbers that only the views make: parts of their sentences


def said_memory(rows: pd.DataFrame) -> list[str]:
    """The best cold rate of each kind."""
    found = memory_rates(rows)
    cold = found[found["cache"] == "cold"].to_dict("records")
    best = {kind: max(line["tbs"] for line in cold if line["kind"] == kind) for kind in MEMORY.values()}
    return [f"{kind} {rate:.2f} TB/s" for kind, rate in best.items()]


def said_matrix(rows: pd.DataFrame) -> list[str]:
    """The best rate of each type."""
    found = matrix_rates(rows).to_dict("records")
    best = [(what, max(line["tflops"] for line in found if line["what"] == what)) for what in MATRIX]
    return ["Best TFLOP/s: " + ", ".join(f"{what} {rate:.0f}" for what, rate in best)]


def said_launch(rows: pd.DataFrame) -> list[str]:
    """Every launch."""
    return [f"{row['library']} {row['mode']} {row['us']:.2f} µs" for row in _rows(rows, "launch")]


def said_copies(rows: pd.DataFrame) -> list[str]:
    """Every copy."""
    return [f"{line['size']} {line['memory']} {line['us']:.1f} µs" for line in host_copies(rows).to_dict("records")]


def said_clocks(rows: pd.DataFrame) -> list[str]:
    """What throttled."""
    seen = sorted({reason for reasons in rows["throttled"] for reason in reasons} - {""})
    return [f"seen: {', '.join(seen)}" if seen else "No throttle reason was seen"]


def said_resolution(rows: pd.DataFrame) -> list[str]:
    """How many of the cold ceilings' A/A intervals are within 1 %, if that is no draw of the bootstrap."""
    ((_, line),) = [(line["op"], line) for line in _cold_ceilings(rows)]
    counts = {line[f"within ±1 %{end}"] for end in ("", " from", " to")}
    inside = f" {counts.pop():.0f}" if len(counts) == 1 else ""
    return [f"{inside} of {line['cases']} cold ceiling cases"]


def _cold_ceilings(rows: pd.DataFrame) -> list[dict[str, Any]]:
    return [one for one in noises(rows).to_dict("records") if (one["op"], one["cache"]) == ("ceiling", "cold")]


SENTENCES: Sentences = {
    "views.memory_curve": said_memory,
    "views.matrix_rates": said_matrix,
    "views.launch_cost": said_launch,
    "views.host_copies": said_copies,
    "views.clocks": said_clocks,
    "views.resolution": said_resolution,
}
