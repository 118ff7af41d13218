"""Numbers that only the sentences about persistent grids have: parts of what each says.

Nothing is said of a number that depends on a verdict which is a draw of the bootstrap.
"""

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import moe_persistent_grid as tables
import pandas as pd
from common import Sentences, cases, counted, faster, gains, geometric_mean, median, pick, span

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


def _gains(lines: Iterable[Line]) -> str:
    return gains(line["ratio"] for line in lines)


def _average(lines: Sequence[Line]) -> str:
    return f"{faster(geometric_mean(line['ratio'] for line in lines))} on average"


def _answer(question: str, said: str) -> str:
    """As `answers` has a line of a table of questions."""
    return f"{question}: {said}"


def own_code(rows: pd.DataFrame) -> list[str]:
    """ExecuTorch's own layer in both grids; that it was not timed, where it was not."""
    lines = tables.released_grids(rows).to_dict("records")
    return [_gains(lines)] if lines else ["ExecuTorch's own kernels, in both grids: "]


def _pair(rows: pd.DataFrame, variant: str, against: str) -> list[Line]:
    return _lines(tables.compared(rows), variant=variant, against=against, **UNIFORM)


def in_short(rows: pd.DataFrame) -> list[str]:
    """Both persistent grids of ours, the source's own point, the layer beside others and INT4 weights beside bf16."""
    found = []
    for grid, words in ((tables.OWN_PERSISTENT, "one CTA an SM"), (tables.OWN_FILLED, "as many CTAs as fit")):
        lines = _lines(tables.persistence(rows), persistent=grid)
        said = _average(lines)
        if not any("|" in line["verdict"] for line in lines):
            said += f"; faster in {sum(line['verdict'] == 'faster' for line in lines)} of {len(lines)}"
        found.append(_answer(f"Lab's products: persistent grid of {words}", said))
    for words, lines in (("uniform", _usual(rows)), ("skewed", _skewed(rows))):
        question = f"Lab's bf16 layer against the fastest other, {words} routing"
        found.append(_answer(question, f"{_average(lines)}, {_gains(lines)}"))
    asked = {"persistent grid": tables.released_grids, "blocks of 64 rows, not 16": tables.narrow_blocks}
    for words, table in asked.items():
        for line in _lines(table(rows), T=tables.SOURCE_T):
            question = f"ExecuTorch's layer, {line['activations']}, {tables.SOURCE_T} tokens: {words}"
            found.append(_answer(question, faster(line["ratio"])))
    return found + _int4(rows)


def _usual(rows: pd.DataFrame) -> list[Line]:
    return _lines(tables.against_best(rows), **UNIFORM)


def _skewed(rows: pd.DataFrame) -> list[Line]:
    return [line for line in tables.against_best(rows).to_dict("records") if line["routing"] != "uniform"]


def _int4(rows: pd.DataFrame) -> list[str]:
    """INT4 over bf16, up to the most tokens at which no model is slower, and beyond."""
    lines = _pair(rows, tables.OURS, tables.BF16)
    if any("|" in line["verdict"] for line in lines):
        return []
    most = 0
    for t, some in sorted(_by(lines, "T").items()):
        if not all(line["verdict"] in ("faster", "same") for line in some):
            break
        most = t
    parts = ([line for line in lines if few == (line["T"] <= most)] for few in (True, False))
    return [f"p to {_tokens(most)}", *map(_gains, parts)]


def rivals(rows: pd.DataFrame) -> list[str]:
    """The fastest other layer over ours."""
    lines = _usual(rows)
    least = _least(lines)
    return [f"{_average(lines)}, least {faster(least['ratio'])} ({_place(least)})"]


def rates(rows: pd.DataFrame) -> list[str]:
    """The most TFLOP/s of a bf16 layer, ours or another's."""
    lines = _lines(tables.times_of(rows), weights="bf16", **UNIFORM)
    best = _most((line for line in lines if line["variant"] in (tables.OURS, *tables.RIVALS)), "TFLOP/s")
    return [f"{best['TFLOP/s']:.0f} TFLOP/s ({best['model']}, {_tokens(best['T'])})"]


def launching(rows: pd.DataFrame) -> list[str]:
    """What a dependent launch is worth, by tokens."""
    found = []
    for t, some in _by(_pair(rows, tables.OURS, tables.WAITING), "T").items():
        said = f"{_average(some)}; faster in "
        if not any("|" in line["verdict"] for line in some):
            said += f"{sum(line['verdict'] == 'faster' for line in some)} of {len(some)} models"
        found.append(_answer(_tokens(t), said))
    return found


def words_said(rows: pd.DataFrame) -> list[str]:
    """Bytes over words."""
    lines = _pair(rows, tables.AS_WORDS, tables.AS_BYTES)
    return [f"Words are {_words(lines)}"]


def beside_engines(rows: pd.DataFrame) -> list[str]:
    """Each engine's layer over ours."""
    lines = _lines(tables.beside_engines(rows), **UNIFORM)
    return [
        _answer(f"{engine}, {weights}", f"{_average(some)}, {_gains(some)}")
        for weights, of in _by(lines, "weights").items()
        for engine, some in _by(of, "engine").items()
    ]


def reading(rows: pd.DataFrame) -> list[str]:
    """The INT4 GEMMs of 16 to 128 tokens beside the read ceiling, and beside reading in the same run."""
    some = [line for line in _lines(tables.int4_reading(rows), **UNIFORM) if 16 <= line["T"] <= 128]
    here = [line for line in some if line["% of reading here"] == line["% of reading here"]]
    return [
        f"At 16 to 128 tokens {_span(some, '% of reading', '.0f')} %",
        f"in the same run {_span(here, '% of reading here', '.0f')} %",
    ]


def int4_gain(rows: pd.DataFrame) -> list[str]:
    """INT4 over bf16."""
    return _int4(rows) or [_gains(_pair(rows, tables.OURS, tables.BF16)).partition(" ")[0]]


def routings(rows: pd.DataFrame) -> list[str]:
    """The case in which ours stands worst beside the fastest other."""
    lines = [line for line in tables.routings(rows).to_dict("records") if line["ratio"] == line["ratio"]]
    least = _least(lines)
    return [f"Least: {faster(least['ratio'])} ({_place(least)})"]


def tuning(rows: pd.DataFrame) -> list[str]:
    """How long tuning took, and what the rule, and tokens of another number, cost."""
    starts = sorted(min(pd.Timestamp(row["utc"]) for row in group) for _, group in cases(rows, "tune"))
    took = [(after - before).total_seconds() for before, after in pairwise(starts)]
    most = max(params["T"] for params, _ in cases(rows, "tune"))
    found = [f"{median(took):.1f} s in the median, at most {max(took):.1f} s", f"tuned for: {most}"]
    ruled = [line for line in _pair(rows, tables.OURS, tables.RULE) if line["T"] <= most]
    asked = {"By the rule instead": ruled}
    asked["With the tiles of 1642 tokens for any number"] = _pair(rows, tables.OURS, tables.OTHER)
    for question, lines in asked.items():
        turned = [{"ratio": 1 / line["ratio"]} for line in lines]
        found.append(_answer(question, f"{_average(turned)}, {_gains(turned)}"))
    return found


def prediction(rows: pd.DataFrame) -> list[str]:
    """Measured over predicted."""
    lines = _lines(tables.predictions(rows), **UNIFORM)
    return [f"{kind} {_span(some, 'off %', '+.0f')} %" for kind, some in _by(lines, "weights").items()]


def unexplained(rows: pd.DataFrame) -> list[str]:
    """Measured over the sum of both, and how much slower INT4 is where it is."""
    found = []
    for kind, some in _by(_lines(tables.predictions(rows), **UNIFORM), "weights").items():
        parts = {
            f"2 to {READ_BOUND} tokens": [line for line in some if 1 < line["T"] <= READ_BOUND],
            "more tokens": [line for line in some if line["T"] > READ_BOUND],
        }
        for words, part in parts.items():
            question = f"{kind}, {words}: over reading and products"
            found.append(_answer(question, f"{_span(part, 'over both %', '+.0f')} %"))
    int4 = _pair(rows, tables.OURS, tables.BF16)
    slower = [line for line in int4 if line["verdict"] == "slower"]
    return [*found, f"in {len(slower)} of {len(int4)} cases, {_gains(slower)}"]


# Grids


def grid(rows: pd.DataFrame) -> list[str]:
    """Ours with as many CTAs as fit, at few waves and at many."""
    full = [line for line in _lines(tables.persistence(rows), persistent=tables.OWN_FILLED)]
    few, many = ([x["ratio"] for x in full if 1 < x["waves"] <= 3], [x["ratio"] for x in full if x["waves"] >= 10])
    means = [geometric_mean(some) for some in (few, many)]
    return [f"{faster(means[0])} at 1 to 3 waves, {faster(means[1])} at 10 or more"]


def fewer_ctas(rows: pd.DataFrame) -> list[str]:
    """Pairs of which the persistent kernel has room for fewer CTAs."""
    table = tables.persistence(rows)
    seen = {(*pick(line, [*tables.CASE, "GEMM", "kernel"]).values(),): line for line in table[::-1].to_dict("records")}
    pairs = [line for line in seen.values() if all(line[name] == line[name] for name in tables.CODE)]
    return [f"{sum(line['persistent CTAs'] < line['CTAs an SM'] for line in pairs)} of {len(pairs)} pairs"]


def bits(rows: pd.DataFrame) -> list[str]:
    """In how many pairs the bits are the same."""
    same = list(tables.same_bits(rows)["same"])
    return [f"in all {len(same)} pairs"] if all(same) else [f"in {same.count(False)} of {len(same)} pairs"]


def _own(rows: pd.DataFrame, *changes: str) -> list[Line]:
    return [line for line in tables.own_products(rows).to_dict("records") if line["change"] in changes]


NOT_TIMED = ["ExecuTorch's own products alone: "]
LIVE = [f"{tables.LIVE}, {grid}" for grid in (tables.TILES, tables.PERSISTENT)]


def occupancy(rows: pd.DataFrame) -> list[str]:
    """As many CTAs as fit over one an SM, where more than one fits."""
    lines = [line for line in _own(rows, tables.FILLED) if line["CTAs an SM"] > 1]
    return [f"with as many as fit {_gains(lines)}"] if lines else NOT_TIMED


def order(rows: pd.DataFrame) -> list[str]:
    """Groups of tiles, where the code is the same; MB of an expert's INT4 weights."""
    same = [line for line in _own(rows, "groups of more than 1") if line["same code"]]
    _, hidden, width, _ = tables.MODELS[tables.SOURCE]
    size = 3 * hidden * width * (0.5 + 2 / 128) / 1e6
    worth = "" if any(line["ratio"] > 1 for line in same) else "onfirmed, it gains nothing with "
    return [f"{worth}experts of {size:.1f} MB: {_gains(same)}"] if same else NOT_TIMED


def point(rows: pd.DataFrame) -> list[str]:
    """What skipping empty blocks gains at the source's own point, and where the lab's products gain by the grid."""
    lines = [line for line in _own(rows, LIVE[0]) if line["T"] == tables.SOURCE_T]
    if not lines:
        return NOT_TIMED
    lab = _lines(tables.persistence(rows), kernel=tables.OURS, weights="bf16")
    wins = f"{sum(line['verdict'] == 'faster' for line in lab)} of {len(lab)} cases"
    sure = not any("|" in line["verdict"] for line in lab)
    grid = [line for line in _own(rows, "persistent") if line["T"] == tables.SOURCE_T]
    said = [f"Empty blocks skipped: {_gains(lines)}", *([wins] if sure else [])]
    if not any("|" in line["verdict"] for line in grid):
        won = [line for line in grid if line["verdict"] == "faster"]
        rest = [line for line in grid if line["verdict"] != "faster"]
        said += [f"{faster(line['ratio'])} in {line['activations']}, {line['GEMM'].upper()}" for line in won]
        said.append(f"{_gains(rest)} in the others" if won and rest else _gains(grid))
    return said


def causes(rows: pd.DataFrame) -> list[str]:
    """What each cause is judged by."""
    found, live = [*grid(rows), *occupancy(rows), *order(rows)], _own(rows, *LIVE)
    if live:
        found.append(f"{_span(live, 'dead %', '.0f')} % of the grid; without them {_gains(live)}")
    table = {line["variant"]: line for line in tables.source_point(rows).to_dict("records")}
    for kind in ("W4A16", "W4A8"):
        full = next((x for name, x in table.items() if f" {kind}," in name and tables.FILLED in name), None)
        found += [f"{kind} {faster(full['tiles / this'])}"] if full else []
    return found


def why(rows: pd.DataFrame) -> list[str]:
    """The source's own point: each product in both grids, and sums of both."""
    found = [
        _answer(f"{line['activations']}, {line['GEMM'].upper()}: persistent grid", faster(line["ratio"]))
        for line in _own(rows, "persistent")
        if line["T"] == tables.SOURCE_T
    ]
    for line in tables.point_ratios(rows).to_dict("records"):
        kind = f"{line['activations']}, both products: " if line["activations"] else ""
        found.append(_answer(f"{kind}{line['change']}", faster(line["ratio"])))
    return found or NOT_TIMED


def dead(rows: pd.DataFrame) -> list[str]:
    """What leaving off empty blocks saves."""
    lines = _own(rows, *LIVE)
    if not lines:
        return NOT_TIMED
    saved = [100 * (1 - 1 / line["ratio"]) for line in lines]
    near = [abs(some - round(line["dead %"], 1)) <= 5 for some, line in zip(saved, lines, strict=True)]
    said = f"{span(saved, '.0f')} % of the time saved, within 5 points of the empty share in "
    return [f"{said}{sum(near)} of {len(lines)} cases"]


def steps(rows: pd.DataFrame) -> list[str]:
    """Measured over predicted by whole waves."""
    lines = [line for line in tables.steps(rows).to_dict("records") if line["predicted"] == line["predicted"]]
    off = [100 * (line["measured"] / line["predicted"] - 1) for line in lines]
    return [f"{statistics.median(off):+.0f} % in the median of {len(off)} cases"]


def fuller(rows: pd.DataFrame) -> list[str]:
    """Whether the mean efficiency grows with the GPU."""
    gpus = _by(tables.on_other_gpus(rows).to_dict("records"), "GPU")
    means = [statistics.fmean(line["efficiency"] for line in gpus[name]) for name in tables.SMS if name in gpus]
    grows = means == sorted(means) and bool(means) and means[-1] - means[0] > 0.01
    return ["the fewer multiprocessors, the emptier" if grows else "does not follow"] if means else NOT_TIMED


def answer(rows: pd.DataFrame) -> list[str]:
    """Of one GPU: the persistent grid in the source's own layer, and what skipping empty blocks gains."""
    own = tables.released_grids(rows).to_dict("records")
    live = [line for line in _own(rows, LIVE[0]) if line["T"] == tables.SOURCE_T]
    return [
        f"whole layer {_gains(own)} ",
        f"timed ({min(line['T'] for line in own)} to {max(line['T'] for line in own)}; W4A16 and W4A8)",
        f"single products become {_gains(live)} on",
    ]


SENTENCES: Sentences = {
    "views.own_code": own_code,
    "views.in_short": in_short,
    "views.rivals": rivals,
    "views.rates": rates,
    "views.launching": launching,
    "views.words_said": words_said,
    "views.beside_engines": beside_engines,
    "views.reading": reading,
    "views.int4_gain": int4_gain,
    "views.routings": routings,
    "views.tuning": tuning,
    "views.prediction": prediction,
    "views.unexplained": unexplained,
    "grid_views.grid": grid,
    "grid_views.fewer_ctas": fewer_ctas,
    "grid_views.bits": bits,
    "grid_views.occupancy": occupancy,
    "grid_views.order": order,
    "grid_views.point": point,
    "grid_views.causes": causes,
    "grid_views.why": why,
    "grid_views.dead": dead,
    "grid_views.steps": steps,
    "grid_views.fuller": fuller,
    "answer.said": answer,
}
