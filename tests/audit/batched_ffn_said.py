"""Numbers that only the sentences about products of GGUF weights have: parts of what each says."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import batched_ffn as tables
import pandas as pd
from common import Sentences, counted, faster, geometric_mean, span

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


def _words(lines: Sequence[Line], name: str = "verdict") -> str:
    return counted(line[name] for line in lines)


def _cublas(rows: pd.DataFrame) -> list[Line]:
    return _lines(tables.beside(rows), op="product", library=tables.CUBLAS)


def losses(rows: pd.DataFrame) -> list[str]:
    """In how many cases of each format cuBLAS is faster; from how many tokens on, and the most it gains.

    Nothing is said of a number that depends on a verdict which is a draw of the bootstrap.
    """
    found = []
    for format, some in _by(_cublas(rows), "format").items():
        if _sure(some):
            most = f", at most {1 / min(line['ratio'] for line in some):.2f}×" if _slower(some) else ""
            found.append(f"{format}: {_lost(some)}{most}")
    return found


def _lost(lines: Sequence[Line]) -> str:
    lost = [line["N"] for line in lines if line["verdict"] == "slower"]
    return f"{len(lost)} of {len(lines)}" + (f", from {_tokens(min(lost))} on" if lost else "")


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def failures(rows: pd.DataFrame) -> list[str]:
    """Where one family of bits loses, and what it costs."""
    lines, price = _cublas(rows), tables.price(rows).to_dict("records")
    kinds = {"F32, BF16": [line for line in lines if line["format"] in PLAIN]}
    kinds |= {"quantised": [line for line in lines if line["format"] not in PLAIN]}
    found = [f"faster, {kind}: {_lost(some)};" for kind, some in kinds.items() if _sure(some)]
    found.append(f"each case, mean: {faster(1 / geometric_mean(line['price'] for line in price))}")
    found.append(f"at worst: {faster(1 / max(line['price'] for line in price))}")
    return found + cache_costs(rows)


PLAIN = ("F32", "BF16")  # numbers as they are stored


def _slower(lines: Sequence[Line], name: str = "verdict") -> int:
    return sum(line[name] == "slower" for line in lines)


def _sure(lines: Sequence[Line], name: str = "verdict") -> bool:
    return not any("|" in line[name] and "slower" in line[name] for line in lines)


def _read(variant: str) -> Any:
    """Percent of a plain read that a family reaches at the least tokens, over formats and shapes."""

    def parts(rows: pd.DataFrame) -> list[str]:
        n, some = min(_by(_lines(tables.times_of(rows), op="product", variant=variant), "N").items())
        some = [line for line in some if not math.isnan(line["% of reading"])]
        return [f"At {_tokens(n)} {span((line['% of reading'] for line in some), '.0f')} %"]

    return parts


def time_per_token(rows: pd.DataFrame) -> list[str]:
    """The fastest kernel at the least and the most tokens."""
    lines = [
        line
        for line in _lines(tables.times_of(rows), op="product", rows=17408, K=5120, format="Q4_K")
        if line["variant"] in SHOWN
    ]
    found = []
    for n in (min(line["N"] for line in lines), max(line["N"] for line in lines)):
        best = min((line for line in lines if line["N"] == n), key=lambda line: line["us"])
        found.append(f"{best['variant']} at {_tokens(n)}")
    return found


SHOWN = (tables.LOOP, tables.ONE_LAUNCH, tables.ONCE, tables.MATRIX, "tensor_core, wide tiles", tables.CUBLAS)


def integers(rows: pd.DataFrame) -> list[str]:
    """What integers are worth at eight and at the most tokens."""
    groups = _by(_lines(tables.compared(rows), op="product", variant=tables.INTEGERS), "N")
    return [f"{faster(_geometric(groups[n]))} at {_tokens(n)}" for n in (8, max(groups))]


def _geometric(lines: Iterable[Line], name: str = "ratio") -> float:
    return geometric_mean(line[name] for line in lines)


def bars(rows: pd.DataFrame) -> list[str]:
    """How many cases of few tokens are below what was aimed at, and the worst."""
    found = []
    for family, most in ((tables.ONCE, 2), (tables.MATRIX, 8), (tables.INTEGERS, 8)):
        some = [line for line in _lines(tables.times_of(rows), op="product", variant=family) if line["N"] <= most]
        some = [line for line in some if line["format"] in AIMED]
        below = [line for line in some if line["% of reading"] < AIMED[line["format"]]]
        worst = min(below, key=lambda line: line["% of reading"])
        where = f"{worst['format']}, {worst['rows']:.0f} × {worst['K']:.0f}, N = {worst['N']}"
        found.append(f"{family}, up to {most} tokens: {len(below)} of {len(some)} cases below")
        found.append(f"the least {worst['% of reading']:.0f} % ({where})")
    return found


def _beside(op: str, library: str) -> Any:
    """Counts of a library against one family of bits."""

    def parts(rows: pd.DataFrame) -> list[str]:
        lines = _lines(tables.beside(rows), op=op, library=library)
        return [f"{_words(lines)} of {len(lines)} cases"]

    return parts


def price(rows: pd.DataFrame) -> list[str]:
    """In how many cases one family of bits is the fastest of all, and what it costs."""
    lines = tables.price(rows).to_dict("records")
    best = sum(line["fastest"] == tables.MATRIX for line in lines)
    worst, mixed = max(lines, key=lambda line: line["price"]), max(line["mixed price"] for line in lines)
    where = f"{worst['format']}, {worst['rows']} × {worst['K']}, N = {worst['N']}, against {worst['fastest']}"
    return [
        f"the fastest of all: {best} of {len(lines)}",
        f"the fastest, geometric mean: {faster(1 / _geometric(lines, 'price'))}",
        f"at worst: {faster(1 / worst['price'])} ({where})",
        f"in each case, geometric mean: {faster(1 / _geometric(lines, 'mixed price'))}",
        f"its worst: {faster(1 / mixed)}",
    ]


def bits(rows: pd.DataFrame) -> list[str]:
    """Cases and variants with the bits of a token alone."""
    lines = tables.bits(rows).to_dict("records")
    groups = {"kernels of this lab": [line for line in lines if line["who"] == "ours"]}
    groups["libraries"] = [line for line in lines if line["who"] == "library"]
    groups["control: sums by atomics"] = [line for line in lines if "atomic" in line["variant"]]
    return [
        f"{what}: {sum(line['same'] for line in some)} of {sum(line['cases'] for line in some)}"
        for what, some in groups.items()
    ]


def gemlite(rows: pd.DataFrame) -> list[str]:
    """gemlite over the floor of its own bytes, against ours."""
    lines = tables.gemlite(rows).to_dict("records")
    found = [f"all, geometric mean: {_mean(lines, 'better')}", f"in each case: {_mean(lines, 'mixed better')}"]
    for format, some in _by(lines, "format").items():
        ends = span((line["better"] for line in some), ".2f")
        found.append(f"{format}, geometric mean: {_mean(some, 'better')} ({ends})")
    return found


def _routed(rows: pd.DataFrame) -> list[Line]:
    return _lines(tables.times_of(rows), op="routed")


def routed(rows: pd.DataFrame) -> list[str]:
    """The indexed product that is nearest to reading."""
    ours = (tables.INDEXED, tables.INDEXED_MATRIX, tables.INDEXED_INTEGERS)
    best = max((one for one in _routed(rows) if one["variant"] in ours), key=lambda line: line["% of reading"])
    return [f"{best['% of reading']:.0f} % ({best['variant']}, N = {best['N']})"]


def routed_integers(rows: pd.DataFrame) -> list[str]:
    """What integers gain, and what they reach of the read."""
    read = {(line["format"], line["N"], line["variant"]): line["% of reading"] for line in _routed(rows)}
    found = []
    for line in _lines(tables.compared(rows), op="routed", variant=tables.INDEXED_INTEGERS):
        before, now = (
            read[line["format"], line["N"], name] for name in (tables.INDEXED_MATRIX, tables.INDEXED_INTEGERS)
        )
        said = f"{faster(line['ratio'])}, {before:.0f} → {now:.0f} % of a plain read"
        found.append(f"{line['format']}, {_tokens(line['N'])}: {said}")
    return found


def stall(rows: pd.DataFrame) -> list[str]:
    """The least and the longest wait."""
    waits = [line["stall, when needed"] for line in tables.cached(rows).to_dict("records")]
    return [f"{min(waits):.0f} to {max(waits):.0f} µs"]


def cache_costs(rows: pd.DataFrame) -> list[str]:
    """The slowest step."""
    lines = tables.cached(rows).to_dict("records")
    slower, worst = max(
        ((line["when needed µs"] / line["compute µs"], line) for line in lines), key=lambda pair: pair[0]
    )
    return [f"{slower:.1f}× slower ({worst['trace']}, {_tokens(worst['N'])}, {worst['capacity']} experts a layer)"]


def overlap(rows: pd.DataFrame) -> list[str]:
    """What prefetch leaves of the larger of copies and compute, where these are about as long; cases without a hit."""
    lines = tables.cached(rows).to_dict("records")
    some, idle = _lines(tables.cached(rows), balanced=True), [one for one in lines if one["hit rate"] == 1]
    found = [f"a factor of 2: {len(some)} of {len(lines)}"]
    found += [f"in the cache: {sum(not line['hit rate'] for line in lines)} of {len(lines)}"]
    found += [f"every expert is there: {span((line['copies µs'] for line in idle), '.0f')} µs"]
    for n, part in _by(some, "N").items():
        found.append(f"the two, {_tokens(n)}: {span((line['prefetched / larger'] for line in part), '.2f')}")
    return found


def summary(rows: pd.DataFrame) -> list[str]:
    """Against cuBLAS, by tokens."""
    return [
        f"{_tokens(n)}: {faster(_geometric(some))}; the fastest kernel in each case "
        f"{faster(_geometric(some, 'mixed ratio'))}"
        for n, some in _by(_cublas(rows), "N").items()
    ]


def answer(rows: pd.DataFrame) -> list[str]:
    """The first screen's numbers, of a GPU that is named "GPU"."""
    lines = [line for line in tables.gains(rows).to_dict("records") if line["N"] == 8 and line["format"] not in PLAIN]
    launch, reads = (_geometric(_lines(pd.DataFrame(lines), step=step)) for step in ("one launch", "weights read once"))
    means = {
        n: _geometric(line for line in some if line["format"] not in PLAIN)
        for n, some in sorted(_by(_cublas(rows), "N").items())
    }
    above = min(n for n, mean in means.items() if mean < 1)
    kept = max(n for n in means if n < above)
    once = tables.TABLES["claims.read_once"](rows).to_dict("records")
    both = _geometric((line for line in once if line["case"].split(", ")[0] not in PLAIN), "mid")
    cases = sum(line["cases"] for line in _lines(tables.bits(rows), who="ours") if line["variant"] != "per_token")
    return [
        f"(GPU: {cases} of {cases} cases)",
        f"one launch instead of a loop is {faster(launch)} on average",
        f"makes that {faster(reads)}: {faster(both)} in all.",
        f"Up to {kept} tokens, ",
        f"At {kept} tokens it is {faster(means[kept])} (GPU) than cuBLAS in bf16",
        f"At {above} tokens it is {faster(means[above])} (GPU)",
        *warps(rows, above),
    ]


def hero(rows: pd.DataFrame) -> list[str]:
    """The first figure's table: mean, least and most of each change and format, and of all quantised ones."""
    found = []
    some = [line for line in tables.gains(rows).to_dict("records") if line["N"] == 8]
    for lines in _by(some, "step").values():
        formats = _by(lines, "format") | {"quantised": [line for line in lines if line["format"] not in PLAIN]}
        for name, part in formats.items():
            ratios = [line["ratio"] for line in part]
            ends = [_geometric(part), min(ratios), max(ratios)]
            found.append(f"{name}; {'; '.join(f'{end:.4f}' for end in ends)}; {len(part)}")
    return found


def llama_bars(rows: pd.DataFrame) -> list[str]:
    """How far ahead of llama.cpp's products ours are at few tokens, and over all."""
    lines = _lines(tables.beside_llama(rows), op="product")
    few = [line for line in lines if line["N"] <= 32]
    worst = min(few, key=lambda line: line["ratio"])
    where = f"{worst['format']}, {worst['rows']:.0f} × {worst['K']:.0f}, N = {worst['N']}"
    formats = sorted({str(line["format"]) for line in lines})
    return [
        f"(aim: 1.4×): {faster(_geometric(few))}: ",
        f"{faster(worst['ratio'])} ({where})",
        f"all tokens, geometric mean: {faster(_geometric(lines))}",
        f"in each case, up to 32 tokens: {faster(_geometric(few, 'mixed ratio'))}",
        f"the same, all tokens: {faster(_geometric(lines, 'mixed ratio'))}",
        f"formats timed on this GPU: {', '.join(formats)}",
    ]


def _designs(rows: pd.DataFrame, plain: bool) -> tuple[list[Line], list[Line]]:
    """Of K formats, or of BF16 (plain): lines of the lab's other kernels, and of cuBLAS."""
    lines = [line for line in tables.designs(rows).to_dict("records") if (line["format"] == "BF16") == plain]
    library = [line for line in lines if line["against"] == tables.CUBLAS]
    return [line for line in lines if line not in library], library


def specialised(rows: pd.DataFrame) -> list[str]:
    """How much faster specialised warps are by tokens, what they reach of a plain read, and cuBLAS."""
    own, library = _designs(rows, False)
    if not own:
        return ["were not timed"]
    said = [f"Specialised warps are {_words(own)} of {len(own)} cases."]
    for n, some in _by(own, "N").items():
        reached = span((line["% of reading"] for line in some), ".0f")
        said.append(f"At {_tokens(n)}: {faster(geometric_mean(line['ratio'] for line in some))}, at {reached} % of")
    said.append(f"Than cuBLAS in bf16 they are {_words(library)} of {len(library)} cases.")
    return said + [f"{faster(_geometric(some))} at {_tokens(n)}" for n, some in _by(library, "N").items()]


def continued(rows: pd.DataFrame) -> list[str]:
    """How much faster continued sums are than the lab's other kernels and cuBLAS, by tokens."""
    own, library = _designs(rows, True)
    if not own:
        return ["were not timed"]
    found = []
    for name, lines in (("the fastest other kernel of the lab", own), ("cuBLAS", library)):
        found.append(f"against {name}: ")
        found += [f"{faster(_geometric(some))} at {_tokens(n)}" for n, some in _by(lines, "N").items()]
    return found


def warps(rows: pd.DataFrame, tokens: int) -> list[str]:
    """What the advice says of specialised warps at so many tokens."""
    lines = [line for line in _designs(rows, False)[1] if line["N"] == tokens]
    if not lines or _geometric(lines) < 1:
        return []
    return [f"There specialised warps (K formats) are {faster(_geometric(lines))} (GPU)."]


SENTENCES: Sentences = {
    "answer.said": answer,
    "answer.hero": hero,
    "views.read_percent": _read(tables.MATRIX),
    "views.multiply_add_percent": _read(tables.ONCE),
    "views.integers_percent": _read(tables.INTEGERS),
    "views.losses": losses,
    "views.failures": failures,
    "views.time_per_token": time_per_token,
    "views.integers": integers,
    "views.specialised_said": specialised,
    "views.continued_said": continued,
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
    "views.cache_costs": cache_costs,
    "views.overlap": overlap,
    "views.summary": summary,
    "llama_views.bars": llama_bars,
}
