"""The figures in labkit/kernels/README.md: the library's kernels against the fastest other in the same run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from labkit import paths
from labkit.bench import records, tables
from labkit.studies.persistent_tables import variants as decodes

README = "labkit/kernels/README.md"
BEGIN, END = "<!-- figures: written by `labkit record` -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Shown:
    """A table of the page. others: roles of what ours is set against; by: the parameter that names its lines; runs:
    the variant that the library's function runs where it was measured, else the first of ours."""

    title: str
    study: str
    op: str
    by: tuple[str, ...]
    wanted: Mapping[str, Any]
    others: tuple[str, ...] = ("baseline", "peer")
    runs: str = ""


_GDN = {"gate": "GDN", "state": "fp32"}
_QWEN = {"model": "Qwen3-30B-A3B", "routing": "uniform"}
SHOWN = (
    Shown("gemv.linear, bf16", "gemv_coalescing", "gemv", ("N", "K"), {"dtype": "bf16"}),
    Shown("gated_delta.decode, Qwen3-Next, GDN, fp32 state", "state_layout", "step", ("batch",), _GDN, ("peer",)),
    Shown("gated_delta.extend, GDN", "gated_delta_today", "prefill", ("H", "HV", "prefill"), {}, ("peer",)),
    Shown("experts.layer, Qwen3-30B-A3B, bf16", "moe_persistent_grid", "layer", ("T",), _QWEN | {"weights": "bf16"}),
    Shown("experts.layer, Qwen3-30B-A3B, INT4", "moe_persistent_grid", "layer", ("T",), _QWEN | {"weights": "INT4"}),
    Shown(
        "gguf.multiply, Q4_K, 17408 × 5120", "batched_ffn", "product", ("N",),
        {"format": "Q4_K", "rows": 17408, "K": 5120}, ("peer",),
    ),
    Shown(
        "decoder, a token, bf16", "persistent_tables", "token", ("model", "start"), {"parts": 0, "dtype": "bf16"},
        runs=decodes.STREAMED,
    ),
)  # fmt: skip
SHAPES = {(4096, 4096), (14336, 4096), (4096, 14336), (28672, 4096), (128256, 4096)}  # of the GEMV


def figures() -> str:
    """The tables, in Markdown, from data/."""
    return "\n\n".join(_table(one) for one in SHOWN)


def _table(shown: Shown) -> str:
    """Lines of all recorded GPUs: µs of ours and of the fastest other, and how many times faster ours is."""
    files = [path for path, _ in paths.data_files(shown.study, runs=False)]
    columns = [_times(records.read(path), shown) for path in files]
    names = " | ".join(f"{path.parent.name}: µs | fastest other, µs | times faster" for path in files)
    lines = [f"**{shown.title}**", "", f"| {', '.join(shown.by)} | {names} |", "|" + "---|" * (1 + 3 * len(files))]
    for key in dict.fromkeys(key for found in columns for key in found):
        cells = " | ".join(found.get(key, "| |") for found in columns)
        lines.append(f"| {', '.join(map(str, key))} | {cells} |")
    return "\n".join(lines)


def _times(rows: pd.DataFrame, shown: Shown) -> dict[tuple[Any, ...], str]:
    found = {}
    for params, group in tables.cases(rows, shown.op):
        key = tuple(params[name] for name in shown.by)
        if shown.wanted.items() <= params.items() and (shown.op != "gemv" or key in SHAPES):
            group = group[group["mode"] == "graph"]
            known = tables.timed(group)
            first = next((name for name, one in known.items() if one["role"] == "ours"), None)
            ours = shown.runs if shown.runs in known else first
            us = {name: one["us"] for name, one in known.items()}
            other = tables.fastest(us, [name for name, one in known.items() if one["role"] in shown.others])
            if ours and other:
                [line] = tables.pairs(group, [(ours, other)])
                mine, theirs = (f"{us[one]:,.0f}" if us[one] >= 100 else f"{us[one]:.3g}" for one in (ours, other))
                ratio, low, high = (f"{line[name]:.2f}" for name in ("ratio", "low", "high"))
                found[key] = f"{mine} | {theirs} ({other}) | {ratio} ({low} to {high})"
    return found


def written(text: str) -> str:
    """The page with the present figures in the place of those that it has."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{figures()}\n\n{END}{rest.split(END)[1]}"


def write() -> None:
    """Write the page if its figures are not current."""
    page = paths.ROOT / README
    if page.exists() and (text := written(page.read_text())) != page.read_text():
        records.write_atomic(page, text.encode())
