"""Measurements from runs/ into data/: checked whole, then merged case by case; also from another machine's archive."""

import json
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pandas as pd
import pyarrow as pa

from labkit import paths, registry
from labkit.bench import records, spec, timelines
from labkit.bench.machine import Machine, revision
from labkit.bench.records import RecordError
from labkit.kernels.tuned import slug
from labkit.sweep import added, run, tuning
from labkit.workflow import library, predictions, quick, recorded

MAX_MEMBERS = 10_000
MAX_BYTES = 1 << 30  # unpacked, all members together
_MEMBER = re.compile(
    r"[a-z0-9]+(-[a-z0-9]+)*/"
    rf"(machine\.json|[a-z][a-z0-9_]*(\.parquet|\.journal\.jsonl)|{timelines.FOLDER}/[a-z][a-z0-9_]*\.parquet"
    rf"|[a-z][a-z0-9_.-]*{re.escape(tuning.ENDING)})"
)
_FORMATS = {".tar": "w", ".tar.gz": "w:gz", ".tgz": "w:gz", ".zip": "zip"}
_ONE_RUN = ("driver", "cuda", "torch", "triton", "labkit")  # equal in all rows of a case, since one run made them


@dataclass
class Report:
    """What was promoted: (gpu, study) -> number of cases and of rows; and what was left, and why.

    timelines: "gpu/timelines/study" of those that were promoted.
    """

    promoted: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    timelines: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def pack(out: Path, runs: Path | None = None, study: str = "", beside: Sequence[Path] = ()) -> int:
    """Write what runs/ holds of every GPU as one archive (.tar, .tar.gz, .tgz or .zip); returns the number of files.

    runs: a folder that takes its place. study: of this one alone. beside: other files, put in under their names.
    RecordError if there is nothing to pack; ValueError for another ending.
    """
    runs = runs or paths.RUNS
    mode = next((mode for ending, mode in _FORMATS.items() if out.name.endswith(ending)), None)
    if mode is None:
        raise ValueError(f"{out}: the archive's name must end in {', '.join(_FORMATS)}")
    every = sorted([*runs.glob("*/*"), *runs.glob(f"*/{timelines.FOLDER}/*")])
    names = {f"runs/{path.relative_to(runs).as_posix()}": path for path in every}
    names = {name: path for name, path in names.items() if _member(name) and _is_of(study, path)}
    if not any(path.suffix in (".parquet", ".jsonl") for path in names.values()):
        raise RecordError(f"{runs}: nothing has been measured here")
    names |= {path.name: path for path in beside}
    content = BytesIO()
    if mode == "zip":
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, path in names.items():
                archive.write(path, name)
    else:
        nobody = {"uid": 0, "gid": 0, "uname": "", "gname": ""}
        with tarfile.open(fileobj=content, mode=mode) as archive:
            for name, path in names.items():
                archive.add(path, name, filter=lambda member: member.replace(**nobody, deep=False))
    records.write_atomic(out, content.getvalue())
    return len(names)


def _is_of(study: str, path: Path) -> bool:
    return not study or path.name == "machine.json" or path.name.partition(".")[0] == study


def promote(source: Path | None = None) -> Report:
    """Check measurements and merge them into data/, and write data/README.md.

    source: a folder (default runs/) or an archive that holds runs/<gpu>/… or <gpu>/…. Either everything is promoted, or
    nothing, with a RecordError that names file, column and row. Cases of an unfinished sweep stay where they are.
    """
    with _folders(source) as found:
        if not found:
            raise RecordError(f"{source or paths.RUNS}: holds no measurements (<gpu>/<study>.parquet)")
        report = Report()
        ready: list[tuple[Path, Any]] = []
        for folder in found:
            try:
                ready += _check_folder(folder, report)
            except RecordError as problem:
                name = f"{source or paths.RUNS}: {folder.name}"
                raise RecordError(str(problem).replace(str(folder), name)) from None
    _write(ready)
    for gpu, study in report.promoted:
        if settle := registry.load(study).settle:
            settle(paths.DATA / gpu / f"{study}.parquet", paths.TABLES / gpu)
    write_readme()
    library.write()
    return report


def gather(source: Path) -> None:
    """Merge measurements of this lab's own jobs into runs/, case by case; see `promote` for what `source` may be.

    RecordError if a file, there or in runs/, cannot be used.
    """
    with _folders(source) as found:
        for folder in found:
            here, runs = check_machine(folder), paths.RUNS / folder.name
            for path in sorted(folder.glob("*.parquet")):
                if path.stem not in registry.NOTEBOOKS:
                    raise RecordError(f"{path}: no study {path.stem!r} in this tree")
                _merge_into(runs / path.name, records.read(path))
            for path in sorted(folder.glob(f"*{tuning.ENDING}")):
                records.write_atomic(runs / path.name, _with_choices(runs / path.name, path))
            for path in sorted(folder.glob(f"{timelines.FOLDER}/*.parquet")):
                timelines.write(timelines.path_of(paths.RUNS, folder.name, path.stem), timelines.read(path))
            records.write_atomic(runs / "machine.json", here.to_json())


def _merge_into(target: Path, new: pd.DataFrame) -> None:
    with records.changing(target):
        records.write(target, records.merge(records.read(target) if target.exists() else None, new))
        if settle := registry.load(target.stem).settle:
            settle(target, target.parent)


def _write(ready: Sequence[tuple[Path, Any]]) -> None:
    for target, content in ready:
        if isinstance(content, bytes):
            records.write_atomic(target, content)
        elif target.parent.name == timelines.FOLDER:
            timelines.write(target, content)
        else:
            records.write(target, content)


def rehash() -> dict[Path, tuple[int, int]]:
    """Bring the hashes of data/ to the present rule; file -> rows restamped, rows left stale. See `recorded.rehash`."""
    done: dict[Path, tuple[int, int]] = {}
    for path in sorted(paths.DATA.glob("*/*.parquet")):
        before = records.read(path)
        after = recorded.rehash(before)
        changed = int((before["kernel_sha"] != after["kernel_sha"]).sum())
        if changed:
            records.write(path, after)
        done[path] = (changed, int(after["kernel_sha"].str.contains(":").sum()))
    write_readme()
    return done


# Where the measurements are


def rows_of(source: Path) -> pd.DataFrame:
    """All rows of a folder or an archive, as `promote` takes it; nothing of them is checked but the schema.

    RecordError for what is neither, or holds no rows.
    """
    with _folders(source) as found:
        folders = sorted(source.glob("*/")) if source in found and not (source / "machine.json").exists() else found
        parts = [records.read(path) for folder in folders for path in sorted(folder.glob("*.parquet"))]
    if not parts:
        raise RecordError(f"{source}: holds no measurements (<gpu>/<study>.parquet)")
    return pd.concat(parts, ignore_index=True)


@contextmanager
def _folders(source: Path | None) -> Iterator[list[Path]]:
    """The folders, one a GPU, of a source; those of an archive only for as long as the context lasts."""
    source = source or paths.RUNS
    if source.is_file():
        with tempfile.TemporaryDirectory() as unpacked:
            _unpack(source, Path(unpacked))
            yield _with_measurements(Path(unpacked))
    elif _has_measurements(source):
        yield [source]
    else:
        yield _with_measurements(source / "runs" if (source / "runs").is_dir() else source)


def _with_measurements(base: Path) -> list[Path]:
    return sorted(folder for folder in base.glob("*") if _has_measurements(folder))


def _has_measurements(folder: Path) -> bool:
    return any(any(folder.glob(one)) for one in ("*.parquet", "*.journal.jsonl", f"{timelines.FOLDER}/*.parquet"))


def _member(name: str) -> str:
    """ "GPU/file" of an archive's member; empty if it is something else."""
    parts = [part for part in PurePosixPath(name).parts if part != "."]
    depth = 3 if timelines.FOLDER in parts[-2:-1] else 2
    found = "/".join(parts[-depth:]) if len(parts) == depth or parts[-depth - 1 : -depth] == ["runs"] else ""
    return found if _MEMBER.fullmatch(found) else ""


def _unpack(source: Path, target: Path) -> None:
    """Write the measurements of an archive to target/<gpu>/<file>; nothing else of it, and no path that it chose."""
    total = 0
    try:
        for count, (name, size, file) in enumerate(_members(source), 1):
            total += size
            if count > MAX_MEMBERS or total > MAX_BYTES:
                raise RecordError(f"{source}: more than {MAX_MEMBERS} members or {MAX_BYTES >> 20} MiB; not unpacked")
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise RecordError(f"{source}: {name} leads out of the archive; not unpacked")
            if file is None or not (found := _member(name)):
                continue
            path = target / found
            if path.exists():
                raise RecordError(f"{source}: holds {found} twice")
            path.parent.mkdir(parents=True, exist_ok=True)
            with file, open(path, "xb") as out:
                shutil.copyfileobj(file, out)
            if path.stat().st_size != size:
                raise RecordError(f"{source}: {name} is not as long as the archive says")
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as problem:
        raise RecordError(f"{source}: not a readable archive ({problem})") from None


def _members(source: Path) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    """Name, size and, for a regular file, content of each member."""
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            for info in archive.infolist():
                yield info.filename, info.file_size, None if info.is_dir() else archive.open(info)
        return
    with tarfile.open(source) as archive:
        for member in archive:
            if not (member.isreg() or member.isdir()):
                raise RecordError(f"{source}: {member.name} is no file and no folder; not unpacked")
            yield member.name, member.size, archive.extractfile(member) if member.isreg() else None
        while rest := archive.fileobj.read(1 << 20):  # to the end, where the compressed file's checksum is
            yield "", len(rest), None


# Checks


def _check_folder(folder: Path, report: Report) -> list[tuple[Path, Any]]:
    """What is to be written into data/ for one GPU. RecordError if anything is wrong."""
    here = check_machine(folder)
    ready: list[tuple[Path, Any]] = []
    for path in sorted(folder.glob("*.parquet")):
        new = records.read(path)
        if new.empty:
            report.left.append(f"{folder.name}/{path.name}: no rows")
            continue
        own = added.is_added(new)
        if own.any():
            names = ", ".join(sorted(set(new["variant"][own])))
            report.left.append(f"{folder.name}/{path.name}: {own.sum()} rows of functions not of the lab ({names})")
            new = new[~own].reset_index(drop=True)
        if looked := _of_quick_looks(path.stem, new):
            report.left.append(f"{folder.name}/{path.name}: {len(looked)} cases that a quick look measured in part")
            new = records.without_cases(new, looked)
            if new.empty:
                continue
        _check_rows(path, new, folder.name, here)
        # Measured where there was no checkout: the sources are those of this commit, as their hashes have just shown.
        new["revision"] = new["revision"].where(new["revision"] != "", revision())
        target = paths.recorded(path)
        old = records.read(target) if target.exists() else None
        if old is not None and (fewer := _of_fewer_processes(old, new)):
            report.left.append(f"{folder.name}/{path.name}: {len(fewer)} cases that data/ has of more processes")
            new = records.without_cases(new, fewer)
            if new.empty:
                continue
        ready.append((target, records.merge(old, new)))
        report.promoted[folder.name, path.stem] = (len(new.groupby(["op", "case"])), len(new))
    for path in sorted(folder.glob(f"{timelines.FOLDER}/*.parquet")):
        rows = _check_timelines(path, here)
        ready.append((timelines.path_of(paths.DATA, folder.name, path.stem), rows))
        report.timelines.append(f"{folder.name}/{timelines.FOLDER}/{path.stem}")
    for path in sorted(folder.glob(f"*{tuning.ENDING}")) if ready else ():
        target = paths.recorded(path)
        ready.append((target, _with_choices(target, path)))
    for path in sorted(folder.glob("*.journal.jsonl")):
        if cases := {str(entry.get("case")) for entry in records.Journal(path).entries()}:
            study = path.name.removesuffix(".journal.jsonl")
            left = f"{folder.name}/{study}: {len(cases)} cases of a sweep that has not finished"
            report.left.append(f"{left}; `labkit run {study}` goes on with it")
    if ready:
        ready.append((paths.DATA / folder.name / "machine.json", here.to_json()))
    return ready


def _with_choices(target: Path, path: Path) -> bytes:
    """The choices of others that `target` has, if it is there, with those of a run. RecordError if they are none."""
    old, new = (_choices(file) if file.exists() else {} for file in (target, path))
    both = {name: {**old.get(name, {}), **new.get(name, {})} for name in sorted({*old, *new})}
    return json.dumps(both, indent=1, sort_keys=True).encode() + b"\n"


def _choices(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(path.read_text())
    except ValueError as problem:
        raise RecordError(f"{path}: not JSON: {problem}") from None
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise RecordError(f"{path}: not choices of autotuners; allowed: an object of objects, by case or by kernel")
    return found


def _of_quick_looks(study: str, rows: pd.DataFrame) -> set[tuple[str, str]]:
    """Cases that lack variants, all of which a quick look leaves out."""
    left_out = set(quick.of(registry.load(study)).left_out) if study in registry.NOTEBOOKS else set()
    lacking = {
        (op, case): recorded.variants_of(study, op, case).keys() - set(group["variant"])
        for (op, case), group in (rows.groupby(["op", "case"]) if left_out else ())
    }
    return {key for key, names in lacking.items() if names and names <= left_out}


def _of_fewer_processes(old: pd.DataFrame, new: pd.DataFrame) -> set[tuple[str, str]]:
    """Cases of `new` that `old` has of the same sources in more processes: a quick look replaces no full run."""
    known = {key: _sources_and_processes(rows) for key, rows in old.groupby(["op", "case"])}
    found = {key: _sources_and_processes(rows) for key, rows in new.groupby(["op", "case"])}
    both = found.keys() & known.keys()
    return {key for key in both if found[key][0] == known[key][0] and found[key][1] < known[key][1]}


def _sources_and_processes(rows: pd.DataFrame) -> tuple[set[str], int]:
    return set(rows["kernel_sha"]), records.processes(rows["run"])


def _check_timelines(path: Path, here: Machine) -> pd.DataFrame:
    """A file's rows, with the commit where they have none. RecordError for what is of another GPU or other sources."""
    rows = timelines.read(path)
    for name, wanted in (("study", path.stem), ("gpu", here.name)):
        if (wrong := rows[name] != wanted).any() or rows.empty:
            found = "nothing" if rows.empty else repr(rows[name][wrong].iloc[0])
            raise RecordError(f"{path}: column {name} is {found}; allowed: {wanted!r}")
    if path.stem not in registry.NOTEBOOKS or timelines.stale(registry.load(path.stem), rows):
        raise RecordError(f"{path}: column kernel_sha is not that of the present kernel: measure again")
    for name, last in (("begin_ns", "released_ns"), ("released_ns", "end_ns")):
        if (rows[name] > rows[last]).any() or (rows[name] < 0).any():
            raise RecordError(f"{path}: column {name} has a time below 0, or after its {last}")
    rows["revision"] = rows["revision"].where(rows["revision"] != "", revision())
    return rows


def check_machine(folder: Path) -> Machine:
    """The machine that a folder of rows describes. RecordError if there is none, or it is another folder's."""
    path, here = folder / "machine.json", Machine.load(folder)
    if here is None:
        raise RecordError(f"{path}: missing, or not the description of a machine that labkit writes")
    if not isinstance(here.name, str) or slug(here.name) != here.slug or here.slug != folder.name:
        raise RecordError(f"{path}: describes {here.name!r} ({here.slug!r}), but the folder is {folder.name!r}")
    return here


def _check_rows(path: Path, rows: pd.DataFrame, gpu: str, here: Machine) -> None:
    study = path.stem
    if study not in registry.NOTEBOOKS:
        raise RecordError(f"{path}: no study {study!r} in this tree; it has: {', '.join(registry.NOTEBOOKS)}")
    refuse = partial(_refuse, path, rows)
    refuse("study", rows["study"] != study, f"is not {study!r}")
    refuse("gpu", rows["gpu"] != here.name, f"is not {here.name!r}, the machine of {gpu}")
    for name, allowed in (("role", spec.ROLES), ("cache", spec.CACHES), ("mode", spec.MODES)):
        refuse(name, ~rows[name].isin(allowed), f"is not one of {', '.join(allowed)}")
    for name in ("driver", "cuda", "torch", "triton"):
        refuse(name, rows[name].fillna("") == "", "is empty: not timed on a GPU (the interpreter is never timed)")
    unsampled = rows["ok"] & rows["samples_ns"].map(lambda samples: len(samples) == 0 or min(samples) <= 0)
    refuse("samples_ns", unsampled, "has no time, or one that is not positive, though the row is ok")
    refuse("kernel_sha", recorded.stale(rows), "is not that of the present kernel: measure again")
    twice = rows.duplicated(["op", "case", "variant", "cache", "mode"])
    refuse("variant", twice, "is there twice in its case, cache and mode")
    for (op, case), group in rows.groupby(["op", "case"]):
        _check_case(path, study, op, case, group)


def _check_case(path: Path, study: str, op: str, case: str, group: pd.DataFrame) -> None:
    wanted = {variant.name for variant in run.with_control(registry.load(study), spec.Case(op, json.loads(case)))}
    if missing := sorted(wanted - set(group["variant"])):
        raise RecordError(f"{path}: column variant, {op} {case}: not complete, {missing[0]!r} is missing")
    for name in _ONE_RUN:
        if group[name].nunique() > 1:
            values = ", ".join(sorted(set(group[name])))
            raise RecordError(f"{path}: column {name}, {op} {case}: rows of several runs ({values})")


def _refuse(path: Path, rows: pd.DataFrame, column: str, bad: pd.Series, why: str) -> None:
    if bad.any():
        index = rows.index[bad.to_numpy()][0]
        row = rows.loc[index]
        what = f"{row['op']} {row['case']} {row['variant']}"
        value = row[column].tolist() if hasattr(row[column], "tolist") else row[column]
        raise RecordError(f"{path}: column {column}, row {index} ({what}): {value!r:.80} {why}")


# data/README.md


def readme() -> str:
    """The text of data/README.md, made from the schema."""
    lines = [
        "# Recorded measurements",
        "",
        "`<gpu>/<study>.parquet`: one row per case, variant, cache and mode. `<gpu>/machine.json`: the GPU. Written by",
        "`labkit record`, which also writes this page; read with any Parquet reader, for example",
        '`pandas.read_parquet("data/<gpu>/<study>.parquet")`.',
        "",
        f"`<gpu>/{timelines.FOLDER}/<study>.parquet`: when, and on which multiprocessor, each program did what. Its",
        "columns:",
        "",
        "| column | type | meaning |",
        "|---|---|---|",
        *(f"| `{name}` | {kind} | {text} |" for name, kind, text in timelines.COLUMNS),
        "",
        f"`<gpu>/*{tuning.ENDING}`: what the autotuners of others chose, by case and versions; later runs on a GPU of",
        "this name take it, in place of tuning anew.",
        "",
        "`headlines.json`: the cases of a quick look, by study, and of which rows and rules they were found.",
        "",
        "`offline.json`: what notebooks compile and check without a GPU, by a hash of its sources and of the versions",
        "of torch and Triton. With other ones it is compiled and checked anew.",
        "",
        "`launches.parquet`: what the launches of these rows do. `predictions.parquet`: what each version of the model",
        "makes of that; no measurement, and never changed. Its columns:",
        "",
        "| column | meaning |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in predictions.COLUMNS.items()),
        "",
        f"Schema {records.SCHEMA_VERSION} (`labkit_schema` in each file's metadata):",
        "",
        "| column | type | meaning |",
        "|---|---|---|",
    ]
    for name, kind, text in records.COLUMNS:
        type_name = f"list of {kind.value_type}" if pa.types.is_list(kind) else kind
        lines.append(f"| `{name}` | {type_name} | {text} |")
    return "\n".join(lines) + "\n"


def write_readme() -> None:
    """Write data/README.md if it is not current."""
    path = paths.DATA / "README.md"
    if not path.exists() or path.read_text() != readme():
        records.write_atomic(path, readme().encode())
