"""Files of timelines: when, and on which multiprocessor, each program did what; one file a GPU and study."""

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from labkit import paths
from labkit.bench.records import RecordError, write_atomic
from labkit.bench.sha import kernel_sha
from labkit.bench.spec import Study

FOLDER = "timelines"  # in a GPU's folder of runs/ or data/
VERSION = "1"
TEXT = pa.string()
COLUMNS: list[tuple[str, pa.DataType, str]] = [
    ("study", TEXT, "name of the study"),
    ("what", TEXT, "what was looked at"),
    ("launch", pa.int16(), "number of the launch, in their order"),
    ("program", pa.int32(), "number of the program (CTA) in its launch"),
    ("sm", pa.int16(), "number of the multiprocessor that it ran on"),
    ("stage", TEXT, "what it did"),
    ("begin_ns", pa.int32(), "when it began, ns from the first begin of what was looked at"),
    ("released_ns", pa.int32(), "when it no longer waited for others, ns; the begin if it waited for none"),
    ("end_ns", pa.int32(), "when it had ended, ns"),
    ("sms", pa.int16(), "multiprocessors of the GPU"),
    ("plain_ns", pa.float64(), "time of what was looked at without clocks, ns, median of replayed graphs"),
    ("clocked_ns", pa.float64(), "the same with clocks"),
    ("kernel_sha", TEXT, "hash of the source of what ran, as in the files of measurements"),
    ("gpu", TEXT, "name of the GPU, as the driver gives it"),
    ("driver", TEXT, "version of the driver"),
    ("cuda", TEXT, "CUDA version that torch was built with"),
    ("torch", TEXT, "version of torch"),
    ("triton", TEXT, "version of Triton"),
    ("labkit", TEXT, "version of labkit"),
    ("revision", TEXT, "commit of the lab's tree, as in the files of measurements"),
    ("utc", TEXT, "when it was taken, ISO 8601"),
    ("seed", pa.int64(), "seed of the inputs"),
]
SCHEMA = pa.schema([(name, kind) for name, kind, _ in COLUMNS], metadata={"labkit_timelines": VERSION})


def path_of(base: Path, gpu: str, study: str) -> Path:
    """Where a study's timelines of a GPU are. base: runs/ or data/; gpu: its folder."""
    return base / gpu / FOLDER / f"{study}.parquet"


def write(path: Path, rows: pd.DataFrame) -> None:
    """Write rows, atomically. RecordError naming the file if a column is missing or of another type."""
    try:
        table = pa.Table.from_pandas(rows[SCHEMA.names], schema=SCHEMA, preserve_index=False)
    except (pa.ArrowException, KeyError, TypeError, ValueError) as problem:
        raise RecordError(f"{path}: {problem}") from problem
    sink = pa.BufferOutputStream()
    numbers = [field.name for field in SCHEMA if pa.types.is_integer(field.type)]
    texts = [name for name in SCHEMA.names if name not in numbers]
    encoding = dict.fromkeys(numbers, "DELTA_BINARY_PACKED")
    pq.write_table(
        table.replace_schema_metadata(SCHEMA.metadata), sink, compression="zstd", use_dictionary=texts,
        column_encoding=encoding, write_page_checksum=True,
    )  # fmt: skip
    write_atomic(path, sink.getvalue().to_pybytes())


def read(path: Path) -> pd.DataFrame:
    """Read a file of timelines. RecordError naming the file, and the column, if it is not one."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise RecordError(f"{path}: not a readable Parquet file ({str(problem).splitlines()[0]})") from None
    version = (table.schema.metadata or {}).get(b"labkit_timelines", b"").decode(errors="replace")
    if version != VERSION:
        raise RecordError(f"{path}: timelines of version {version or 'none'}, this lab reads {VERSION}")
    for name, kind, _ in COLUMNS:
        if name not in table.column_names:
            raise RecordError(f"{path}: column {name} is missing")
        if table.schema.field(name).type != kind:
            raise RecordError(f"{path}: column {name} is {table.schema.field(name).type}, expected {kind}")
    return table.to_pandas()


def of(study: Study, gpu: str, here: bool) -> pd.DataFrame:
    """A study's rows of a GPU, by its folder; empty where nothing was taken. here: by this machine, else recorded.

    RecordError if the file cannot be used.
    """
    path = path_of(paths.RUNS if here else paths.DATA, gpu, study.name)
    return read(path) if path.exists() else pd.DataFrame()


def stale(study: Study, rows: pd.DataFrame) -> bool:
    """Whether some rows are of other sources than the present ones."""
    return study.timelines is None or bool((rows["kernel_sha"] != kernel_sha(study.timelines.source)).any())
