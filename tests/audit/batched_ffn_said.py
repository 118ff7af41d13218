"""Numbers that only the sentences about products of GGUF weights have: parts of what each says."""

from collections.abc import Iterable, Sequence
from typing import Any

import batched_ffn as tables
import pandas as pd
from common import Sentences, counted, geometric_mean, span

Line = dict[str, Any]
AIMED = {"BF16": 80, "Q8_0": 80, "Q4_K": 80, "Q5_K": 70, "Q6_K": 70}  # percent of a plain read


def _lines(frame: pd.DataFrame, **wanted: Any) -> list[Line]:
    return [line for line in frame.to_dict("records") if wanted.items() <= line.items()]


def _mean(lines: Iterable[Line], name: str = "ratio") -> str:
    return format(geometric_mean(line[name] for line in lines), ".2f")


def _by(lines: Iterable[Line], name: str) -> dict[Any, list[Line]]:
    """The lines of each value of a column."""
    found: dict[Any, list[Line]] = {}
    for line in lines:
        found.setdefault(line[name], []).append(line)
    return found


def _faster(ratio: float) -> str:
    return f"{ratio:.2f}× faster" if ratio >= 1 else f"{1 / ratio:.2f}× slower"


def _words(lines: Sequence[Line], name: str = "verdict") -> str:
    return counted(line[name] for line in lines)


def _cublas(rows: pd.DataFrame) -> list[Line]:
    return _lines(tables.beside(rows), op="product", library=tables.CUBLAS)


def losses(rows: pd.DataFrame) -> list[str]:
    """In how many cases cuBLAS is faster; of each format the least tokens and the most it gains.

    Nothing is said of a number that depends on a verdict which is a draw of the bootstrap.
    """
    lines = _cublas(rows)
    found = [f"in {_slower(lines)} of {len(lines)} cases"] if _sure(lines) else []
    found += [f"in {_slower(lines, 'mixed verdict')} ("] if _sure(lines, "mixed verdict") else []
    for format, some in _by(lines, "format").items():
        lost = [line for line in some if line["verdict"] == "slower"]
        if lost and _sure(some):
            where = f"the least N = {min(line['N'] for line in lost)}"
            most = 1 / min(line["ratio"] for line in lost)
            found.append(f"{format} in {len(lost)}, {where} (at most {most:.2f}× faster)")
    return found


def _slower(lines: Sequence[Line], name: str = "verdict") -> int:
    return sum(line[name] == "slower" for line in lines)


def _sure(lines: Sequence[Line], name: str = "verdict") -> bool:
    return not any("|" in line[name] and "slower" in line[name] for line in lines)


def gains(rows: pd.DataFrame) -> list[str]:
    """The gain of each change at the most tokens: the mean of the formats' means."""
    found = []
    for step, lines in _by(tables.gains(rows).to_dict("records"), "step").items():
        most = max(line["N"] for line in lines)
        formats = _by([line for line in lines if line["N"] == most], "format").values()
        mean = geometric_mean(geometric_mean(line["ratio"] for line in some) for some in formats)
        found.append(f"{step} ×{mean:.2f} at N = {most}")
    return found


def _read(variant: str) -> Any:
    """Percent of a plain read that a family reaches at the least tokens, over the shapes."""

    def parts(rows: pd.DataFrame) -> list[str]:
        found = []
        for format, lines in _by(_lines(tables.times_of(rows), op="product", variant=variant), "format").items():
            n, some = min(_by(lines, "N").items())
            found.append(f"{format} {span((line['% of reading'] for line in some), '.0f')} % at N = {n}")
        return found

    return parts


def integers(rows: pd.DataFrame) -> list[str]:
    """What integers are worth, by tokens."""
    lines = _lines(tables.compared(rows), variant=tables.INTEGERS)
    return [f"×{_mean(some)} at N = {n}" for n, some in _by(lines, "N").items()]


def bars(rows: pd.DataFrame) -> list[str]:
    """How many cases of few tokens are below what was aimed at, and the worst."""
    found = []
    for family, most in ((tables.ONCE, 2), (tables.MATRIX, 8), (tables.INTEGERS, 8)):
        some = [line for line in _lines(tables.times_of(rows), op="product", variant=family) if line["N"] <= most]
        some = [line for line in some if line["format"] in AIMED]
        below = [line for line in some if line["% of reading"] < AIMED[line["format"]]]
        worst = min(below, key=lambda line: line["% of reading"])
        where = f"{worst['format']}, {worst['rows']:.0f} × {worst['K']:.0f}, N = {worst['N']}"
        found.append(f"{len(below)} of {len(some)} cases of {family} up to {most} tokens")
        found.append(f"the least {worst['% of reading']:.0f} % ({where})")
    return found


def _beside(op: str, library: str) -> Any:
    """Counts and means of a library against one family of bits, and against the fastest of the lab's."""

    def parts(rows: pd.DataFrame) -> list[str]:
        lines = _lines(tables.beside(rows), op=op, library=library)
        return [
            f"{_words(lines, f'{mixed}verdict')} of {len(lines)} cases, geometric mean {_mean(lines, f'{mixed}ratio')}"
            for mixed in ("", "mixed ")
        ]

    return parts


def price(rows: pd.DataFrame) -> list[str]:
    """In how many cases one family of bits is the fastest of all, and what it costs."""
    lines = tables.price(rows).to_dict("records")
    best = sum(line["fastest"] == tables.MATRIX for line in lines)
    worst, mixed = max(lines, key=lambda line: line["price"]), max(line["mixed price"] for line in lines)
    where = f"{worst['format']}, {worst['rows']} × {worst['K']}, N = {worst['N']}, against {worst['fastest']}"
    return [
        f"fastest of all in {best} of {len(lines)} cases",
        f"×{_mean(lines, 'price')} of the fastest's time, at most ×{worst['price']:.2f} ({where})",
        f"takes ×{_mean(lines, 'mixed price')}, at most ×{mixed:.2f}",
    ]


def bits(rows: pd.DataFrame) -> list[str]:
    """Cases and variants with the bits of a token alone."""
    lines = tables.bits(rows).to_dict("records")
    groups = {"cases and variants of ours": [line for line in lines if line["who"] == "ours"]}
    groups["cases and variants of libraries"] = [line for line in lines if line["who"] == "library"]
    groups["of the control that sums by atomics"] = [line for line in lines if "atomic" in line["variant"]]
    return [
        f"{sum(line['same'] for line in some)} of {sum(line['cases'] for line in some)} {what}"
        for what, some in groups.items()
    ]


def gemlite(rows: pd.DataFrame) -> list[str]:
    """gemlite over the floor of its own bytes, against ours."""
    lines = tables.gemlite(rows).to_dict("records")
    found = [f"geometric mean of {len(lines)} cases ×{_mean(lines, 'better')}", f"×{_mean(lines, 'mixed better')}, but"]
    for format, some in _by(lines, "format").items():
        ends = span((line["better"] for line in some), ".2f").replace(" to ", " to ×")
        found.append(f"{format} ×{_mean(some, 'better')} (from ×{ends})")
    return found


def _routed(rows: pd.DataFrame) -> list[Line]:
    return _lines(tables.times_of(rows), op="routed")


def routed(rows: pd.DataFrame) -> list[str]:
    """The indexed product that is nearest to reading."""
    ours = (tables.INDEXED, tables.INDEXED_MATRIX, tables.INDEXED_INTEGERS)
    best = max((one for one in _routed(rows) if one["variant"] in ours), key=lambda line: line["% of reading"])
    return [f"{best['% of reading']:.0f} % ({best['variant']}, {best['format']}, N = {best['N']})"]


def routed_integers(rows: pd.DataFrame) -> list[str]:
    """What integers reach of the read, and the largest noise; the ends of intervals are in the table."""
    read = {(line["format"], line["N"], line["variant"]): line["% of reading"] for line in _routed(rows)}
    found = []
    for line in _lines(tables.compared(rows), variant=tables.INDEXED_INTEGERS):
        before, now = (
            read[line["format"], line["N"], name] for name in (tables.INDEXED_MATRIX, tables.INDEXED_INTEGERS)
        )
        found.append(f"{line['format']}, N = {line['N']}: ×{line['ratio']:.2f} [")
        found.append(f"], {before:.0f} → {now:.0f} % of the read")
    return found


def stall(rows: pd.DataFrame) -> list[str]:
    """The least and the longest wait."""
    lines = sorted(tables.cached(rows).to_dict("records"), key=lambda line: line["stall, when needed"])
    return [
        f"{line['stall, when needed']:.0f} µs ({line['trace']}, N = {line['N']}, {line['capacity']} experts)"
        for line in (lines[0], lines[-1])
    ]


def thrash(rows: pd.DataFrame) -> list[str]:
    """Cases without a hit, and the slowest step."""
    lines = tables.cached(rows).to_dict("records")
    slower, worst = max(
        ((line["when needed µs"] / line["compute µs"], line) for line in lines), key=lambda pair: pair[0]
    )
    where = f"N = {worst['N']}, {worst['trace']}, {worst['policy']}, {worst['capacity']} experts a layer"
    return [f"{sum(not line['hit rate'] for line in lines)} of {len(lines)} cases", f"×{slower:.1f} of one", where]


def overlap(rows: pd.DataFrame) -> list[str]:
    """What prefetch leaves of the larger of copies and compute, where these are about as long."""
    lines = tables.cached(rows).to_dict("records")
    some, idle = _lines(tables.cached(rows), balanced=True), [one for one in lines if one["hit rate"] == 1]
    found = [f"in {len(some)} cases", f"takes {span((line['copies µs'] for line in idle), '.0f')} µs a step"]
    for n, part in _by(some, "N").items():
        ratios = span((line["prefetched / larger"] for line in part), ".2f").replace(" to ", " to ×")
        found.append(f"×{ratios} (N = {n}, {min(line['compute µs'] for line in part):.0f} µs of compute and more)")
    return found


def summary(rows: pd.DataFrame) -> list[str]:
    """Against cuBLAS, by tokens."""
    lines = _cublas(rows)
    found = [f"{_words(lines)} of {len(lines)} cases", f"would be {_words(lines, 'mixed verdict')}"]
    for n, some in _by(lines, "N").items():
        if n in (1, 8, 32, 64, 512):
            found += [f"N = {n} ×{_mean(some)}", f"N = {n} ×{_mean(some, 'mixed ratio')}"]
    return found


SENTENCES: Sentences = {
    "views.read_percent": _read(tables.MATRIX),
    "views.multiply_add_percent": _read(tables.ONCE),
    "views.integers_percent": _read(tables.INTEGERS),
    "views.losses": losses,
    "views.gains": gains,
    "views.integers": integers,
    "views.bars": bars,
    "views.against_cublas": _beside("product", tables.CUBLAS),
    "views.dequantised": _beside("product", tables.DEQUANTISED),
    "views.layers": _beside("ffn", tables.CUBLAS),
    "views.grouped_mm": _beside("routed", tables.GROUPED_MM),
    "views.price": price,
    "views.bits": bits,
    "views.gemlite": gemlite,
    "views.routed": routed,
    "views.routed_integers": routed_integers,
    "views.stall": stall,
    "views.thrash": thrash,
    "views.overlap": overlap,
    "views.summary": summary,
}


def llama_bars(rows: pd.DataFrame) -> list[str]:
    """How far ahead of llama.cpp's products ours are at few tokens, and over all."""
    lines = _lines(tables.beside_llama(rows), op="product")
    few = [line for line in lines if line["N"] <= 32]
    worst = min(few, key=lambda line: line["ratio"])
    where = f"{worst['format']}, {worst['rows']:.0f} × {worst['K']:.0f}, N = {worst['N']}"
    parts = [f"{_faster(worst['ratio'])} ({where}", f"of {len(few)} cases of", f"all {len(lines)} cases"]
    for some in (few, lines):
        parts += [_faster(geometric_mean(line[name] for line in some)) for name in ("ratio", "mixed ratio")]
    return parts


def llama_errors(rows: pd.DataFrame) -> list[str]:
    """The largest error of llama.cpp's products, and of ours."""
    lines = _lines(tables.beside_llama(rows), op="product")
    return [
        f"{format} {' against '.join(f'{max(line[name] for line in some):.1e}' for name in ('llama.cpp error', OURS))}"
        for format, some in _by(lines, "format").items()
    ]


OURS = f"{tables.MATRIX} error"
OF_STAND_INS: Sentences = {"llama_views.bars": llama_bars, "llama_views.errors": llama_errors}
