"""Two sets of rows, variant by variant: what is faster in the second, what slower, beyond its noise.

A side is data/, runs/, another folder or an archive; a recorded GPU; a commit (its data/); or NAME==VERSION
of triton, torch, cuda, driver, or of a release of somebody's package (`labkit fetch`). Two releases are compared in the
cases in which both were timed, block by block. Rows of other sides were timed at different times, so that no blocks
pair: each side's processes and blocks are resampled by themselves, and no difference within 1 % counts. Hosts of one
model of GPU differ by more, some kernels by 4 %: what is slower though its sources, driver, torch and Triton are the
same on both sides is shown, but fails nothing.
"""

import json
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import paths, registry, sources
from labkit.bench import records, unpaired, verdict
from labkit.bench.spec import CONTROL
from labkit.workflow import archive, nearest, recorded

VERSIONS = ("triton", "torch", "cuda", "driver")  # columns that a side can name
KEY = ["study", "op", "case", "variant", "cache", "mode"]
GROUP = ["study", "op", "case", "cache", "mode"]
ORDER = ("failed", "slower", "faster", "mended", "unclear", "same")
CODE = ["kernel_sha", *VERSIONS]  # of which all are the same where nothing but the machine can have changed
LAYOUT = re.compile(r"\b(KV|VK)\b")  # what a release changed, in a variant's name


@dataclass(frozen=True)
class Side:
    """One side. text: as it was asked for; release: the source that it is, empty for other sides."""

    text: str
    rows: pd.DataFrame
    release: str = ""


@dataclass(frozen=True)
class Line:
    """One variant of one case. ratio: the first side's time over the second's, with its interval; us: of each side.

    same_code: on both sides, of one model of GPU; then only the machine can differ.
    """

    gpu: str
    study: str
    op: str
    case: str
    variant: str
    cache: str
    mode: str
    us: tuple[float, float]
    ratio: float
    low: float
    high: float
    noise: float
    verdict: str
    same_code: bool = False


@dataclass(frozen=True)
class Found:
    """All that both sides have; alone: how many rows the first and the second have that the other has not."""

    sides: tuple[str, str]
    lines: Sequence[Line]
    alone: tuple[int, int]

    def failing(self, limit: float = 0.0) -> list[Line]:
        """The lines of what is wrong in the second side alone, or slower by more than a part beyond its noise.

        Not what is slower though its code is the same.
        """
        slower = [one for one in self.lines if one.verdict == "slower" and one.high < 1 / (1 + limit)]
        return [one for one in self.lines if one.verdict == "failed"] + [one for one in slower if not one.same_code]

    def counts(self) -> str:
        """ "2 slower, 40 same"."""
        words = [one.verdict for one in self.lines]
        return ", ".join(f"{words.count(word)} {word}" for word in ORDER if word in words)


def limit_of(text: str) -> float:
    """The part that "slower=3%" allows; 0 of "slower". ValueError for other text."""
    match = re.fullmatch(r"slower(=(\d+(\.\d*)?|\.\d+)%)?", text.replace(" ", ""))
    if not match:
        raise ValueError(f"--fail-on is {text!r}; allowed: slower, or slower=3%")
    return float(match[2] or 0) / 100


# Sides


def side(text: str) -> Side:
    """What a text names. ValueError saying what is allowed if it names nothing, RecordError for a file that is none."""
    name, equals, version = text.partition("==")
    if equals:
        return _version(text, name.strip().lower(), version.strip())
    if path := _path(text):
        return Side(text, _latest([archive.rows_of(path)]))
    if gpu := nearest.begun(text, paths.recorded_gpus()) or nearest.begun(f"nvidia-{text}", paths.recorded_gpus()):
        return Side(text, archive.rows_of(paths.DATA / gpu))
    if found := _commit(text):
        return Side(text, found[0])
    gpus = ", ".join(paths.recorded_gpus()) or "none"
    raise ValueError(
        f"{text!r} is no folder, archive or commit, no recorded GPU ({gpus}), and no NAME==VERSION of "
        f"{', '.join(VERSIONS)} or a release (labkit fetch)"
    )


def _path(text: str) -> Path | None:
    """A file or folder from here, or data/ and runs/ of this tree."""
    known = {"data": paths.DATA, "runs": paths.RUNS}
    path = known.get(text.rstrip("/"), Path(text))
    return path if path.exists() else None


def _version(text: str, name: str, version: str) -> Side:
    parts = [archive.rows_of(base) for base in (paths.DATA, paths.RUNS) if base.is_dir()]
    if name in VERSIONS:  # before the latest rows are taken: those of an older version would not be among them
        rows = _latest([part[part[name].str.split("+").str[0] == version] for part in parts])
        if rows.empty:
            known = sorted({one for part in parts for one in part[name]})
            raise ValueError(f"{text}: no rows of this {name}; there are: {', '.join(known)}")
        return Side(text, rows)
    releases = {(made.package, made.version) for made in sources.manifest().values()}
    if (name, version) not in releases:
        known = ", ".join(f"{one}=={other}" for one, other in sorted(releases))
        raise ValueError(f"{text}: no such version; allowed: {', '.join(VERSIONS)}, or a release: {known}")
    return Side(text, _latest(parts), f"{name}-{version}")


def _commit(text: str) -> list[pd.DataFrame]:
    """The rows of data/ as a commit has it; empty if there is no such commit, or nothing recorded in it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.tar"
        command = paths.git("archive", "--format=tar", "-o", str(file), f"{text}:data")
        try:
            done = subprocess.run(command, capture_output=True)
        except OSError:
            return []
        return [archive.rows_of(file)] if done.returncode == 0 and not text.startswith("-") else []


def _latest(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Rows of several places; of one that is in several, the one that was measured last."""
    parts = [part for part in parts if len(part)]
    rows = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=records.SCHEMA.names)
    return rows.sort_values("utc", kind="stable").drop_duplicates(["gpu", *KEY], keep="last")


# Comparing


def compare(first: Side, second: Side) -> Found:
    """Every variant that both sides have. ValueError if they have none in common."""
    if bool(first.release) != bool(second.release):
        raise ValueError(f"{first.text} and {second.text}: a release is compared with another release")
    if first.release:
        one, other = _of_release(first), _of_release(second)
        key = ["gpu", *KEY]
    else:
        one, other = (_by_gpu(part.rows) for part in (first, second))
        across = len(one["gpu"].unique()) == len(other["gpu"].unique()) == 1
        key = KEY if across else ["gpu", *KEY]
    both = one.merge(other, on=key, suffixes=("", "_2"))
    both = both[both["variant"] != CONTROL]
    if both.empty:
        raise ValueError(f"{first.text} and {second.text} have no variant of a case in common")
    noise = {id(part): _noises(part.rows) for part in (first, second)}
    lines = [_line(row, noise[id(first)], noise[id(second)], bool(first.release)) for row in both.to_dict("records")]
    alone = tuple(int((part["variant"] != CONTROL).sum()) - len(both) for part in (one, other))
    return Found((first.text, second.text), sorted(lines, key=lambda one: (ORDER.index(one.verdict), one.ratio)), alone)


def _by_gpu(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.reindex(columns=["gpu", *KEY, *CODE, "ok", "run", "block", "samples_ns"])


def _of_release(part: Side) -> pd.DataFrame:
    """The rows of a release's own kernels, under names that do not say which release it is."""
    release = part.release.rpartition("-")
    rows = part.rows[[part.release in _sources(*key) for key in part.rows[KEY[:4]].itertuples(index=False)]]
    plain = [LAYOUT.sub("", name.replace(release[2], "")) for name in rows["variant"]]
    return _by_gpu(rows.assign(variant=[re.sub(r"\s+(,|$)", r"\1", re.sub(r"\s+", " ", name)) for name in plain]))


def _sources(study: str, op: str, case: str, variant: str) -> set[str]:
    """The releases, as package-version, that a variant calls."""
    known = recorded.variants_of(study, op, case).get(variant) if study in registry.NOTEBOOKS else None
    texts = known.source if known and not isinstance(known.source, str) else [known.source] if known else []
    names = [text.removeprefix("source:") for text in texts if text.startswith("source:")]
    made = [sources.manifest()[name] for name in names if name in sources.manifest()]
    return {f"{one.package}-{one.version}" for one in made}


def _noises(rows: pd.DataFrame) -> Mapping[tuple, float]:
    """Half width of the A/A interval of every GPU, case, cache and mode that has one."""
    with_control = rows.groupby(["gpu", *GROUP])["variant"].transform(lambda names: CONTROL in set(names))
    groups = rows[with_control.astype(bool)].groupby(["gpu", *GROUP])
    return {key: verdict.aa(group).half_width for key, group in groups}


def _line(row: Mapping[str, Any], noise: Mapping, noise_2: Mapping, paired: bool) -> Line:
    place = tuple(row[name] for name in GROUP)
    gpus = (row["gpu"], row.get("gpu_2", row["gpu"]))
    one, other = (_samples(row, ending) for ending in ("", "_2"))
    usable = [bool(row["ok"]) and len(one.ns) > 0, bool(row["ok_2"]) and len(other.ns) > 0]
    pick = verdict.ratio if paired else unpaired.ratio
    interval = pick(one, other) if all(usable) else verdict.NAN
    half = max(noise.get((gpus[0], *place), math.nan), noise_2.get((gpus[1], *place), math.nan))
    us = tuple(
        float(pd.Series(x.ns).median()) / 1e3 if ok else math.nan for x, ok in zip((one, other), usable, strict=True)
    )
    word = word_of(interval, half, usable, paired)
    gpu = gpus[0] if gpus[0] == gpus[1] else " → ".join(gpus)
    ends = (interval.mid, interval.low, interval.high)
    return Line(
        gpu, *(row[name] for name in ("study", "op", "case", "variant", "cache", "mode")), us, *ends, half, word,
        gpus[0] == gpus[1] and all(row[name] == row[f"{name}_2"] for name in CODE),
    )  # fmt: skip


def _samples(row: Mapping[str, Any], ending: str) -> verdict.Samples:
    import numpy as np

    return verdict.Samples(
        *(
            np.asarray(row[name + ending], float if name == "samples_ns" else int)
            for name in ("run", "block", "samples_ns")
        )
    )


def word_of(interval: verdict.Interval, noise: float, usable: Sequence[bool], paired: bool) -> str:
    """faster, slower, same or unclear, of the second side; failed or mended where only one of them is usable."""
    if not all(usable):
        return "failed" if usable[0] else "mended" if usable[1] else "unclear"
    if paired:
        twins = verdict.Interval(1.0, 1 - noise, 1 + noise, interval.runs, interval.pairs)
        return verdict.verdict(interval, twins)
    return unpaired.verdict(interval, noise)


# Shown


def shown(found: Found, form: str, every: bool = False) -> str:
    """The comparison as "text", "markdown", "html" or "json"; every: also what is the same or unclear."""
    if form == "json":
        lines = [asdict(one) | {"us": list(one.us)} for one in found.lines]
        lines = [{n: None if v != v else v for n, v in one.items()} for one in lines]
        told = {"sides": found.sides, "counts": found.counts(), "alone": found.alone, "lines": lines}
        return json.dumps(told, indent=1, default=_plain)
    picked = [one for one in found.lines if every or one.verdict not in ("same", "unclear")]
    table = pd.DataFrame([_cells(one) for one in picked], columns=_COLUMNS)
    return {"text": _text, "markdown": _markdown, "html": _html}[form](found, table)


_COLUMNS = ["verdict", "ratio", "first, µs", "second, µs", "variant", "case", "GPU"]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def _cells(one: Line) -> list[str]:
    case = ", ".join(f"{name} {value}" for name, value in json.loads(one.case).items())
    how = "" if (one.cache, one.mode) == ("cold", "graph") else f", {one.cache}, {one.mode}"
    ratio = f"{one.ratio:.3f} [{one.low:.3f}, {one.high:.3f}]" if one.ratio == one.ratio else "–"
    us = [f"{value:.2f}" if value == value else "–" for value in one.us]
    word = f"{one.verdict}, same code" if one.same_code and one.verdict == "slower" else one.verdict
    return [word, ratio, *us, one.variant + how, f"{one.study}, {one.op}: {case}", one.gpu]


def _said(found: Found) -> Iterator[str]:
    first, second = found.sides
    yield f"{second} against {first}: {found.counts()}."
    yield "Ratio: the first side's time over the second's, with its 95 % interval; above one, the second is faster."
    slower = [one for one in found.lines if one.verdict == "slower"]
    if same := sum(one.same_code for one in slower):
        yield f"Of the slower ones {same} of {len(slower)} have the same code on both sides: there the machine differs."
    if any(found.alone):
        yield f"Only in {first}: {found.alone[0]} rows; only in {second}: {found.alone[1]}."


def _text(found: Found, table: pd.DataFrame) -> str:
    wide = [max([len(name), *(len(text) for text in table[name])]) for name in table]
    lines = [table.columns, *table.itertuples(index=False)] if len(table) else []
    rows = ["  ".join(text.ljust(width) for text, width in zip(line, wide, strict=True)).rstrip() for line in lines]
    return "\n".join([*rows, *([""] if rows else []), *_said(found)])


def _markdown(found: Found, table: pd.DataFrame) -> str:
    rows = [table.columns, ["---"] * len(table.columns), *table.itertuples(index=False)] if len(table) else []
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join([" ".join(_said(found)), "", *lines])


def _html(found: Found, table: pd.DataFrame) -> str:
    from markupsafe import escape

    said = " ".join(_said(found))
    style = "body{font-family:sans-serif}table{border-collapse:collapse}td,th{padding:.2rem .6rem;text-align:left}"
    body = table.to_html(index=False, border=0) if len(table) else ""
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(" and ".join(found.sides))}</title>'
    return f"{head}<style>{style}</style><p>{escape(said)}</p>{body}</html>"
