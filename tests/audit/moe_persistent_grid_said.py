"""Numbers that only the sentences about persistent grids have: parts of what each says.

Nothing is said of a number that depends on a verdict which is a draw of the bootstrap.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import moe_persistent_grid as tables
import pandas as pd
from common import Sentences, cases, counted, geometric_mean, median, pick, span

Line = dict[str, Any]
UNIFORM = {"routing": "uniform"}
READ_BOUND = 512  # tokens, up to which reading bounds a layer


def _lines(frame: pd.DataFrame, **wanted: Any) -> list[Line]:
    return [line for line in frame.to_dict("records") if wanted.items() <= line.items()]


def _by(lines: Iterable[Line], name: str) -> dict[Any, list[Line]]:
    """The lines of each value of a column."""
    found: dict[Any, list[Line]] = {}
    for line in lines:
        found.setdefault(line[name], []).append(line)
    return found


def _mean(lines: Iterable[Line], form: str = ".2f") -> str:
    return format(geometric_mean(line["ratio"] for line in lines), form)


def _span(lines: Iterable[Line], name: str = "ratio", form: str = ".2f") -> str:
    return span((line[name] for line in lines), form)


def _words(lines: Sequence[Line]) -> str:
    """Counted verdicts "of 5"; nothing where one is a draw."""
    said = counted(line["verdict"] for line in lines)
    return f"{said} of {len(lines)}" if said else ""


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def _place(line: Line) -> str:
    words = [line["model"], line["weights"], _tokens(line["T"])]
    return ", ".join(words + [line["routing"]] * (line["routing"] != "uniform"))


def _least(lines: Iterable[Line], name: str = "ratio") -> Line:
    return min(lines, key=lambda line: line[name])


def _most(lines: Iterable[Line], name: str = "ratio") -> Line:
    return max(lines, key=lambda line: line[name])


# Layers


def own_code(rows: pd.DataFrame) -> list[str]:
    """ExecuTorch's own layer in both grids; that it was not timed, where it was not."""
    lines = tables.released_grids(rows).to_dict("records")
    return [f"{_words(lines)} cases, ×{_span(lines)}"] if lines else ["ExecuTorch's own kernels, in both grids: "]


def beside_released(rows: pd.DataFrame) -> list[str]:
    """How many times as long as ours its fastest form takes."""
    lines = tables.beside_released(rows).to_dict("records")
    found = [f"{_tokens(line['T'])} ×{line['ratio']:.1f} ({line['by']})" for line in lines]
    return found or ["ExecuTorch's own layer beside ours: "]


def _pair(rows: pd.DataFrame, variant: str, against: str) -> list[Line]:
    return _lines(tables.compared(rows), variant=variant, against=against, **UNIFORM)


def in_short(rows: pd.DataFrame) -> list[str]:
    """Both persistent grids of ours, and the layer beside others and INT4 weights beside bf16."""
    found = []
    for grid, words in ((tables.OWN_PERSISTENT, "one program an SM"), (tables.OWN_FILLED, "as many programs as fit")):
        lines = _lines(tables.persistence(rows), persistent=grid)
        found += [f"of {words} is {_words(lines)}", f"(×{_mean(lines)} in the mean, ×{_span(lines)})"]
    usual, skewed = _usual(rows), _skewed(rows)
    found.append(f"/ ours is ×{_mean(usual)} in the mean of {len(usual)} cases, ×{_span(usual)}")
    found += [f"under skewed routings ×{_span(skewed)}, {_words(skewed)}", *_int4(rows)]
    own = _lines(tables.released_grids(rows), T=tables.SOURCE_T)
    return found + [f"×{line['ratio']:.2f} ({line['activations']})" for line in own]


def _usual(rows: pd.DataFrame) -> list[Line]:
    return _lines(tables.against_best(rows), **UNIFORM)


def _skewed(rows: pd.DataFrame) -> list[Line]:
    return [line for line in tables.against_best(rows).to_dict("records") if line["routing"] != "uniform"]


def _int4(rows: pd.DataFrame) -> list[str]:
    """INT4 over bf16, up to the most tokens at which no model is slower, and beyond."""
    lines = _pair(rows, tables.OURS, tables.BF16)
    found = [_words(lines)]
    if all(one in ("faster", "same") or "|" not in one for one in (line["verdict"] for line in lines)):
        most = 0
        for t, some in sorted(_by(lines, "T").items()):
            if not all(line["verdict"] in ("faster", "same") for line in some):
                break
            most = t
        found.append(f"up to {_tokens(most)} ×{_span(line for line in lines if line['T'] <= most)}")
        found.append(f"beyond ×{_span(line for line in lines if line['T'] > most)}")
    return found


def rivals(rows: pd.DataFrame) -> list[str]:
    """The fastest other layer over ours."""
    lines = _usual(rows)
    least, several = _least(lines), [line for line in lines if line["T"] > 1]
    return [
        f"Ours is {_words(lines)}",
        f"geometric mean {_mean(lines, '.3f')}, least {least['ratio']:.3f} ({_place(least)})",
        f"without one token {_mean(several, '.3f')}",
    ]


def rates(rows: pd.DataFrame) -> list[str]:
    """The most TFLOP/s of a bf16 layer, ours or another's."""
    lines = _lines(tables.times_of(rows), weights="bf16", **UNIFORM)
    best = _most((line for line in lines if line["variant"] in (tables.OURS, *tables.RIVALS)), "TFLOP/s")
    return [f"{best['TFLOP/s']:.0f} TFLOP/s ({best['model']}, {_tokens(best['T'])})"]


def launching(rows: pd.DataFrame) -> list[str]:
    """What a dependent launch is worth, by tokens."""
    found = []
    for t, some in _by(_pair(rows, tables.OURS, tables.WAITING), "T").items():
        found.append(f"{_tokens(t)} ×{_mean(some, '.3f')} (faster in ")
        if not any("|" in line["verdict"] for line in some):
            faster = sum(line["verdict"] == "faster" for line in some)
            found[-1] += f"{faster} of {len(some)} models)"
    return found


def words_said(rows: pd.DataFrame) -> list[str]:
    """Bytes over words."""
    lines = _pair(rows, tables.AS_WORDS, tables.AS_BYTES)
    return [f"words are {_words(lines)}", f"×{_span(lines)}."]


def reading(rows: pd.DataFrame) -> list[str]:
    """The INT4 GEMMs of 16 to 128 tokens beside the read ceiling, and beside reading in the same run."""
    some = [line for line in _lines(tables.int4_reading(rows), **UNIFORM) if 16 <= line["T"] <= 128]
    reach = sum(line["% of reading"] >= 80 for line in some)
    here = [line for line in some if line["% of reading here"] == line["% of reading here"]]
    return [
        f"16 to 128 tokens: {_span(some, '% of reading', '.0f')} %, at least 80 % in {reach} of {len(some)} cases",
        f"in the same run {_span(here, '% of reading here', '.0f')} %",
    ]


def int4_gain(rows: pd.DataFrame) -> list[str]:
    """INT4 over bf16; of one token, and the least."""
    lines = _pair(rows, tables.OURS, tables.BF16)
    least = _least(lines)
    found = [*_int4(rows), f"Least: ×{least['ratio']:.2f} ({least['model']}, {_tokens(least['T'])})"]
    found.append(f"one token ×{_span(line for line in lines if line['T'] == 1)}")
    ours = _lines(tables.times_of(rows), variant=tables.OURS, T=1, **UNIFORM)
    return found + [f"{kind} {_span(some, '% of reading', '.0f')} %" for kind, some in _by(ours, "weights").items()]


def routings(rows: pd.DataFrame) -> list[str]:
    """The most that skew costs, and the layers that ours loses."""
    lines = tables.routings(rows).to_dict("records")
    worst, skewed = _most(lines, "over uniform"), _skewed(rows)
    where = f"{worst['model']}, {worst['weights']}, {_tokens(worst['T'])}, {worst['routing']}"
    found = [f"Most: ×{worst['over uniform']:.2f}, {where}", f"×{_span(skewed)}: ours is {_words(skewed)}"]
    lost = [line for line in lines if line["verdict"] == "slower" and line["routing"] != "uniform"]
    return found + [f"{line['blocks']:.0f} blocks of {line['BM']:.0f} rows at one expert" for line in lost]


def tuning(rows: pd.DataFrame) -> list[str]:
    """How long tuning took, and what the rule, and tokens of another number, cost."""
    starts = sorted(min(pd.Timestamp(row["utc"]) for row in group) for _, group in cases(rows, "tune"))
    took = [(after - before).total_seconds() for before, after in pairwise(starts)]
    most = max(params["T"] for params, _ in cases(rows, "tune"))
    found = [f"{median(took):.1f} s to tune", f"at most {max(took):.1f} s", f"up to {most} tokens were tuned"]
    ruled = [line for line in _pair(rows, tables.OURS, tables.RULE) if line["T"] <= most]
    for lines in (ruled, _pair(rows, tables.OURS, tables.OTHER)):
        found.append(f"×{_mean(lines)} as long in the mean of {len(lines)} cases")
        found += [f"{word} ×{end['ratio']:.2f} [" for word, end in (("least", _least(lines)), ("most", _most(lines)))]
        found += [f"({_place(end)})" for end in (_least(lines), _most(lines))]
    return found


def prediction(rows: pd.DataFrame) -> list[str]:
    """Measured over predicted, and over the sum of both."""
    lines = _lines(tables.predictions(rows), **UNIFORM)
    found = []
    for kind, some in _by(lines, "weights").items():
        found.append(f"{kind} {_span(some, 'off %', '+.0f')} %")
        few = [line for line in some if 1 < line["T"] <= READ_BOUND]
        many = [line for line in some if line["T"] > READ_BOUND]
        spans = [_span(part, "over both %", "+.0f") for part in (few, many)]
        found.append(f"{kind} up to {READ_BOUND} tokens {spans[0]} %, beyond {spans[1]} %")
    int4 = _pair(rows, tables.OURS, tables.BF16)
    slower = [{"ratio": 1 / line["ratio"]} for line in int4 if line["verdict"] == "slower"]
    return [*found, f"In {len(slower)} of {len(int4)} cases INT4 takes ×{_span(slower)} the time"]


# Grids


def grid(rows: pd.DataFrame) -> list[str]:
    """Ours with as many programs as fit, by waves; pairs of which the persistent kernel has room for fewer CTAs."""
    table = tables.persistence(rows)
    full = [line for line in _lines(table, persistent=tables.OWN_FILLED) if line["waves"] == line["waves"]]
    parts = {
        "up to 1 wave": [line for line in full if line["waves"] <= 1],
        "1 to 3 waves": [line for line in full if 1 < line["waves"] <= 3],
        "10 waves and more": [line for line in full if line["waves"] >= 10],
        "at most 90 % of the slots' time is work": [line for line in full if line["efficiency"] <= 0.9],
    }
    found = [f"{words} ×{_mean(some, '.3f')} ({_words(some)}" for words, some in parts.items()]
    seen = {(*pick(line, [*tables.CASE, "GEMM", "kernel"]).values(),): line for line in table[::-1].to_dict("records")}
    pairs = [line for line in seen.values() if all(line[name] == line[name] for name in tables.CODE)]
    fewer = sum(line["persistent CTAs"] < line["CTAs an SM"] for line in pairs)
    return [*found, f"{fewer} of {len(pairs)} pairs"]


def bits(rows: pd.DataFrame) -> list[str]:
    """In how many pairs the bits are the same."""
    same = list(tables.same_bits(rows)["same"])
    return [f"in all {len(same)} pairs"] if all(same) else [f"in {same.count(False)} of {len(same)} pairs"]


def _own(rows: pd.DataFrame, *changes: str) -> list[Line]:
    return [line for line in tables.own_products(rows).to_dict("records") if line["change"] in changes]


def _of_own(lines: Sequence[Line]) -> list[str]:
    return [*(f"{kind} ×{_span(some)}" for kind, some in _by(lines, "activations").items()), _words(lines)]


def _ratios(change: str) -> Any:
    """Ratios of one change of ExecuTorch's own products; that they were not timed, where they were not."""

    def parts(rows: pd.DataFrame) -> list[str]:
        lines = _own(rows, change)
        return [f"×{_span(lines)}, {_words(lines)} cases"] if lines else NOT_TIMED

    return parts


NOT_TIMED = ["ExecuTorch's own products alone: "]


def own_products(rows: pd.DataFrame) -> list[str]:
    """Each change of ExecuTorch's own products."""
    changes = _by(tables.own_products(rows).to_dict("records"), "change")
    return [part for lines in changes.values() for part in _of_own(lines)] or NOT_TIMED


def order(rows: pd.DataFrame) -> list[str]:
    """Groups of tiles, where the code is the same and where it is not; MB of an expert's INT4 weights."""
    lines = _own(rows, "groups of more than 1")
    same, other = ([one for one in lines if one["same code"] == like] for like in (True, False))
    found = [part for some in (same, other) if some for part in _of_own(some)]
    if same:
        _, hidden, width, _ = tables.MODELS[tables.SOURCE]
        size = 3 * hidden * width * (0.5 + 2 / 128) / 1e6
        found.append(f"experts of {size:.1f} MB (at most ×{max(line['ratio'] for line in same):.2f})")
    return found or NOT_TIMED


def pays(rows: pd.DataFrame) -> list[str]:
    """Least and most of each change, by activations."""
    return [
        f"{line['activations']} ×{span((line['least'], line['most']))}, faster in "
        for line in tables.worth(rows).to_dict("records")
    ] or NOT_TIMED


def dead(rows: pd.DataFrame) -> list[str]:
    """What leaving off dead blocks saves."""
    lines = _own(rows, *(f"{tables.LIVE}, {grid}" for grid in (tables.TILES, tables.PERSISTENT)))
    if not lines:
        return NOT_TIMED
    saved = [100 * (1 - 1 / line["ratio"]) for line in lines]
    near = [abs(some - round(line["dead %"], 1)) <= 5 for some, line in zip(saved, lines, strict=True)]
    return [f"{span(saved, '.0f')} % of the time saved", f"in {sum(near)} of {len(lines)} cases"]


def steps(rows: pd.DataFrame) -> list[str]:
    """Measured over predicted by whole waves."""
    lines = [line for line in tables.steps(rows).to_dict("records") if line["predicted"] == line["predicted"]]
    off = [100 * (line["measured"] / line["predicted"] - 1) for line in lines]
    return [f"{statistics.median(off):+.0f} % in the median of {len(off)}, {min(off):+.0f} to {max(off):+.0f} %"]


def fuller(rows: pd.DataFrame) -> list[str]:
    """The mean efficiency on each GPU, and whether it grows with the GPU."""
    gpus = _by(tables.on_other_gpus(rows).to_dict("records"), "GPU")
    means = [statistics.fmean(line["efficiency"] for line in gpus[name]) for name in tables.SMS if name in gpus]
    parts = [f"({sms} SMs) {mean:.3f}" for sms, mean in zip(tables.SMS.values(), means, strict=False)]
    grows = means == sorted(means) and bool(means) and means[-1] - means[0] > 0.01
    return [*parts, "the fewer, the emptier" if grows else "does not follow"] if means else NOT_TIMED


def summary(rows: pd.DataFrame) -> list[str]:
    """Where the persistent grid wins by CTAs an SM; what pays in every case; the layer."""
    lines = _lines(tables.persistence(rows), persistent=tables.OWN_FILLED)
    best, usual = _most(lines), _usual(rows)
    found = [f"{_words(lines)} cases", f"at best ×{best['ratio']:.2f} [", f"({_place(best)}, {best['GEMM']})"]
    alone = [[line for line in lines if (line["CTAs an SM"] == 1) == one] for one in (True, False)]
    if not any("|" in line["verdict"] for line in lines):
        faster = [Counter(line["verdict"] for line in some)["faster"] for some in alone]
        found.append(f"in {faster[0]} of {len(alone[0])}, elsewhere in {faster[1]} of {len(alone[1])}")
    found.append(f"(×{_mean(usual)} in the mean, ×{_span(usual)})")
    for grids in (tables.TILES, tables.PERSISTENT):
        parts = _by(_own(rows, f"{tables.LIVE}, {grids}"), "activations").values()
        if parts and all(line["verdict"] == "faster" for some in parts for line in some):
            mean = geometric_mean(geometric_mean(line["ratio"] for line in some) for some in parts)
            found.append(f"({grids}) (×{mean:.2f} in the mean)")
    return found


SENTENCES: Sentences = {
    "views.own_code": own_code,
    "views.beside_released": beside_released,
    "views.in_short": in_short,
    "views.rivals": rivals,
    "views.rates": rates,
    "views.launching": launching,
    "views.words_said": words_said,
    "views.reading": reading,
    "views.int4_gain": int4_gain,
    "views.routings": routings,
    "views.tuning": tuning,
    "views.prediction": prediction,
    "views.summary": summary,
    "grid_views.grid": grid,
    "grid_views.bits": bits,
    "grid_views.own_products": own_products,
    "grid_views.occupancy": _ratios(tables.FILLED),
    "grid_views.order": order,
    "grid_views.pays": pays,
    "grid_views.dead": dead,
    "grid_views.steps": steps,
    "grid_views.fuller": fuller,
}
