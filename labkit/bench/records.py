"""Measurements on disk: one Parquet file a study and GPU, with a fixed schema, checked on read."""

import fcntl
import json
import math
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA_VERSION = "3"
MAX_ROWS, MAX_VALUES, MAX_BYTES = 200_000, 20_000_000, 1 << 30  # of a file: a hundred times what a study has
# Schemas that are read too. 1: hashes of another rule, which begin with "1:" once they are read. 2: without rules.
EARLIER = ("1", "2")
LATER = {"rules": "{}"}  # columns that earlier schemas do not have, and what they then hold

TEXT, REAL, INTEGERS = pa.string(), pa.float64(), pa.list_(pa.int32())
# Name, type, unit or meaning. data/README.md is made from this table (`labkit record` writes it).
COLUMNS: tuple[tuple[str, pa.DataType, str], ...] = (
    ("study", TEXT, "study, as in `labkit list`"),
    ("op", TEXT, "operation of the study"),
    ("case", TEXT, "JSON object with sorted keys: model, dimensions, batch or tokens, dtype"),
    ("variant", TEXT, "name of the variant, unique in its case"),
    ("options", TEXT, "JSON object: what distinguishes the variant (layout, tile, warps)"),
    ("role", TEXT, "`ours`, `step`, `baseline`, `peer`, `ceiling` or `control`"),
    ("cache", TEXT, "`cold`: inputs rotate over 4 × L2, or it is emptied before; `hot`: the same buffers every call"),
    ("mode", TEXT, "`graph`: replay of a CUDA graph; `eager`: launches from Python"),
    ("run", INTEGERS, "process that took each sample, from 0"),
    ("block", INTEGERS, "block of that process that each sample is from, from 0; ratios pair by (run, block)"),
    ("samples_ns", INTEGERS, "time per call of each sample, ns"),
    ("calls_per_sample", pa.int32(), "calls between the two events of a sample"),
    ("throttled", pa.list_(TEXT), "throttle reasons read around each sample's block; empty where none"),
    ("sm_mhz", INTEGERS, "SM clock read after each sample's block, MHz"),
    ("floor_bytes", pa.int64(), "least bytes through device memory"),
    ("floor_flops", pa.int64(), "least floating-point operations"),
    ("ceiling", REAL, "ceiling that the prediction used, TB/s (or TFLOP/s for matrix products); NaN if unknown"),
    (
        "predicted_us",
        REAL,
        "time of the floor with a launch, fixed before the timing, µs; NaN if the ceiling was unknown",
    ),
    (
        "error",
        REAL,
        "relative RMSE against the float64 reference, the larger of before and after timing; NaN if not checked",
    ),
    ("ok", pa.bool_(), "whether the row may be used"),
    ("reason", TEXT, "why not, or a remark"),
    ("evidence", TEXT, "JSON object: registers, spills, widths … of the kernel that ran; `{}` for library calls"),
    ("counters", TEXT, "JSON object: hardware counters; `{}` if not taken"),
    (
        "kernel_sha",
        TEXT,
        "hash of the launchers that ran, helpers included, wherever they live; `1:` before one by the rule of schema 1",
    ),
    (
        "rules",
        TEXT,
        "JSON object: claim of the study -> hash of its rule when the case was measured; `{}` before schema 3",
    ),
    ("gpu", TEXT, "name of the GPU, as the driver gives it"),
    ("driver", TEXT, "version of the driver"),
    ("cuda", TEXT, "CUDA version that torch was built with"),
    ("torch", TEXT, "version of torch"),
    ("triton", TEXT, "version of Triton"),
    ("labkit", TEXT, "version of labkit"),
    (
        "revision",
        TEXT,
        "commit of the lab's tree, `+`: with changes; measured outside a checkout: the commit that recorded it",
    ),
    ("utc", TEXT, "when the case was finished, ISO 8601"),
    ("seed", pa.int64(), "seed of the inputs and of the order"),
)
SCHEMA = pa.schema([(name, kind) for name, kind, _ in COLUMNS], metadata={"labkit_schema": SCHEMA_VERSION})
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # of a message for a terminal


class RecordError(ValueError):
    """A data file that cannot be used; the message names the file and the column."""


def first_line(problem: BaseException) -> str:
    """Type and first line of the message of an exception that says something, without its colours: a row's reason."""
    lines = (line.strip() for line in _COLOUR.sub("", str(problem)).splitlines())
    return f"{type(problem).__name__}: {next(filter(None, lines), '')[:300]}"


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees either the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Hold a data file while it is read, changed and written: two at once would each lose what the other wrote."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.stem}.lock"), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(path: Path, rows: pd.DataFrame | list[Mapping[str, Any]]) -> None:
    """Write rows to a Parquet file, atomically. RecordError if a column is missing, unknown or of another type."""
    frame = pd.DataFrame(rows, columns=SCHEMA.names if isinstance(rows, list) and not rows else None)
    if odd := sorted(set(frame.columns) ^ set(SCHEMA.names)):
        raise RecordError(f"{path}: columns missing or unknown: {', '.join(odd)}")
    try:
        table = pa.Table.from_pandas(frame[SCHEMA.names], schema=SCHEMA, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as problem:
        raise RecordError(f"{path}: {problem}") from problem
    table = table.replace_schema_metadata(SCHEMA.metadata)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    write_atomic(path, sink.getvalue().to_pybytes())


def _check_size(path: Path, metadata: pq.FileMetaData) -> None:
    """RecordError for a file that would take more memory than any measurements: a few bytes can stand for billions."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    values = max((group.column(i).num_values for group in groups for i in range(group.num_columns)), default=0)
    sizes = {
        "rows": (metadata.num_rows, MAX_ROWS),
        "values of a column": (values, MAX_VALUES),
        "bytes": (sum(group.total_byte_size for group in groups), MAX_BYTES),
    }
    for what, (found, most) in sizes.items():
        if found > most:
            raise RecordError(f"{path}: {found} {what}; at most {most}")


def read(path: Path) -> pd.DataFrame:
    """Read a Parquet file of measurements. RecordError naming file and column if it is not one, or an older one."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_size(path, file.metadata)
            table = file.read()
        table.validate(full=True)  # that text is UTF-8, which nothing else checks before it is used
        names = table.column_names
    except FileNotFoundError:
        raise RecordError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise RecordError(f"{path}: not a readable Parquet file ({str(problem).splitlines()[0]})") from None
    version = (table.schema.metadata or {}).get(b"labkit_schema", b"").decode(errors="replace")
    if not version:
        raise RecordError(f"{path}: not a file of this lab (no labkit_schema in its metadata)")
    for name in LATER if version in EARLIER else ():
        if name not in names:
            table = table.append_column(name, pa.array([LATER[name]] * len(table), TEXT))
    names = table.column_names
    for name, kind, _ in COLUMNS:
        if name not in names:
            raise RecordError(f"{path}: column {name} is missing (file schema {version}, this lab {SCHEMA_VERSION})")
        found = table.schema.field(name).type
        if found != kind:
            raise RecordError(f"{path}: column {name} is {found}, expected {kind}")
    if unknown := sorted(set(names) - set(SCHEMA.names)):
        raise RecordError(f"{path}: unknown column {unknown[0]} (file schema {version}, this lab {SCHEMA_VERSION})")
    if version not in (SCHEMA_VERSION, *EARLIER):
        raise RecordError(f"{path}: schema {version}, this lab reads {', '.join((*EARLIER, SCHEMA_VERSION))}")
    for name, kind, _ in COLUMNS:
        if table[name].null_count and kind != pa.float64():  # there NaN is stored as null
            raise RecordError(f"{path}: column {name} has no value in some rows")
    frame = table.to_pandas()
    _check_lists(path, frame)
    if version == "1":
        frame["kernel_sha"] = f"{version}:" + frame["kernel_sha"]
    return frame


def _check_lists(path: Path, frame: pd.DataFrame) -> None:
    for name in ("run", "block", "throttled", "sm_mhz"):
        if (frame[name].map(len) != frame["samples_ns"].map(len)).any():
            raise RecordError(f"{path}: column {name} has another length than samples_ns")
    for name in ("case", "options", "evidence", "counters", "rules"):
        for text in frame[name].unique():
            if _parse(text) is None:
                raise RecordError(f"{path}: column {name} holds text that is not a JSON object: {text!r:.60}")


def merge(old: pd.DataFrame | None, new: pd.DataFrame) -> pd.DataFrame:
    """`old` with every case that `new` has replaced whole (all its variants), in a stable order."""
    if old is not None and len(old):
        new = pd.concat([without_cases(old, set(zip(new["op"], new["case"], strict=True))), new], ignore_index=True)
    return new.sort_values(["op", "case", "cache", "mode", "variant"], kind="stable", ignore_index=True)


def of_cases(rows: pd.DataFrame, ids: Collection[tuple[str, str]]) -> pd.DataFrame:
    """The rows of these cases (`Case.id`)."""
    return rows[_are_of(rows, ids)].reset_index(drop=True)


def without_cases(rows: pd.DataFrame, ids: Collection[tuple[str, str]]) -> pd.DataFrame:
    """The rows of all other cases (`Case.id`)."""
    return rows[~_are_of(rows, ids)].reset_index(drop=True)


def _are_of(rows: pd.DataFrame, ids: Collection[tuple[str, str]]) -> np.ndarray:
    return np.array([one in ids for one in zip(rows["op"], rows["case"], strict=True)], bool)


def processes(runs: Iterable[Sequence[int]]) -> int:
    """In how many processes rows with these `run`s were measured, the most of all; 0 if none has a sample."""
    return max((int(max(run)) + 1 for run in runs if len(run)), default=0)


def expanded(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column for each key of `case` and of `options`, and the median time `us` (µs per call)."""
    parts = [pd.DataFrame([json.loads(text) for text in rows[name]], index=rows.index) for name in ("case", "options")]
    extra = pd.concat(parts, axis=1)
    return pd.concat([rows, extra[[name for name in extra if name not in rows]]], axis=1).assign(us=times_us(rows))


def times_us(rows: pd.DataFrame) -> pd.Series:
    """The median time of each row, µs per call; NaN without samples."""
    us = rows["samples_ns"].map(lambda samples: float(np.median(samples)) / 1e3 if len(samples) else math.nan)
    return us.astype(float)


class Journal:
    """Finished parts of a sweep, one JSON line each; a last line that was cut off by a crash is dropped on read."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add one entry, atomically as far as a reader is concerned; it is on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read(1) == b"\n" else b"\n")  # closes a line that a crash cut off
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def entries(self) -> list[dict[str, Any]]:
        """Every complete entry, in the order of writing."""
        if not self.path.exists():
            return []
        return [entry for line in self.path.read_bytes().split(b"\n") if (entry := _parse(line)) is not None]

    def rewrite(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Replace the journal's content, atomically."""
        write_atomic(self.path, b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))


def _parse(line: str | bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
