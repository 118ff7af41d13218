"""Words that sentences of several studies share: spans, how much faster something is, numbers of tokens."""

import re
from collections.abc import Iterable, Sequence

import pandas as pd

from labkit.bench.ledger import note

SAME = "as fast"  # of what reads as 1.00


def span(values: pd.Series, form: str = "{:.2f}") -> str:
    """The least and the largest: "0.98 to 1.31"; once where both read the same."""
    note("span", values)
    return " to ".join(dict.fromkeys(form.format(end) for end in (values.min(), values.max())))


def spans(table: pd.DataFrame, by: str | Sequence[str], column: str, form: str = "{:.2f}") -> list[str]:
    """ "GDN 0.98 to 1.31" of each group, in the order of the table. by: the column, or columns, that name it."""
    note("spans", table)
    groups = table.groupby([by] if isinstance(by, str) else list(by), sort=False)[column]
    return [f"{', '.join(names)} {span(values, form)}" for names, values in groups]


def filled(table: pd.DataFrame, form: str) -> list[str]:
    """The form with the values of each line of a table: "{model}: {us:.1f} µs"."""
    note("filled", table)
    return [form.format(**line) for line in table.to_dict("records")]


def faster(ratio: float, than: str = "") -> str:
    """How much faster something is than what takes `ratio` times its time: "1.29× faster", "1.10× slower than cuBLAS".

    Of what reads as 1.00 no side is said, which would mean nothing: "as fast", "as fast as cuBLAS".
    """
    times = f"{max(ratio, 1 / ratio):.2f}"
    said = SAME if times == "1.00" else f"{times}× {'faster' if ratio > 1 else 'slower'}"
    return compared(said, than) if than else said


def gains(ratios: pd.Series, than: str = "") -> str:
    """The least and the most that something is faster: "1.06× to 1.22× slower", "1.02× slower to 1.06× faster"."""
    note("gains", ratios)
    ends = [faster(end) for end in (ratios.min(), ratios.max())]
    sides = {end.partition("× ")[2] for end in ends}
    if sides == {"slower"}:  # from the least, as the others
        ends = ends[::-1]
    if len(sides) == 1 and ends[0] != ends[1]:
        ends[0] = ends[0].split()[0]
    said = " to ".join(dict.fromkeys(ends))
    return compared(said, than) if than else said


def compared(said: str, than: str) -> str:
    """How much faster, as `faster` and `gains` say it, than what: "1.29× faster than cuBLAS", "as fast as cuBLAS"."""
    return f"{said} {'as' if said.endswith(SAME) else 'than'} {than}"


def sentences(said: Iterable[str], otherwise: str) -> str:
    """Those of some sentences that are not empty; `otherwise` if all are."""
    return " ".join(one for one in said if one) or otherwise


def rounded(value: float) -> float:
    """To two digits, as the ticks of an axis show it."""
    return float(f"{value:.2g}")


def tokens(count: int) -> str:
    """ "1 token", "2 tokens"."""
    return f"{count} token{'s' if count != 1 else ''}"


def short_names(names: Sequence[str]) -> list[str]:
    """GPUs by the shortest names that tell them apart: "H100" for "NVIDIA H100 80GB HBM3"."""
    short = [re.sub(r"^NVIDIA (GeForce )?|([- ]\d+GB| HBM).*$", "", name) or name for name in names]
    return [name if short.count(one) > 1 else one for name, one in zip(names, short, strict=True)]
