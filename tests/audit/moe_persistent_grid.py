"""The tables of the study of persistent grids, computed once more from the recorded rows.

What a case's experts weigh is taken from the recorded least bytes, less what comes in and goes out. Only the drawn
routings are given: column `slots`, of each case how many tokens each expert gets. They must fit those bytes.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import common
import numpy as np
import pandas as pd
from common import (
    COMPARED,
    DRAWS,
    GRID,
    NOTHING,
    RATIO,
    SIGMAS,
    T_975,
    End,
    Interval,
    Params,
    Tables,
    cases,
    facts,
    geometric_mean,
    judged,
    least,
    median,
    noise,
    pick,
    table,
    times,
    us,
    usable,
)

STUDY = "moe_persistent_grid"
CASE = ["model", "weights", "T", "routing"]
GEMMS = ("gemm1", "gemm2")
SOURCE, SOURCE_T = "Qwen3.5-35B-A3B", 1642  # the pull request's own model and tokens
OURS, RULE, OTHER = "ours", "ours, by the rule", "ours, tuned for other tokens"
BF16, WAITING, BY_TILES = "ours, bf16 weights", "ours, launches that wait", "ours, by tiles"
AS_BYTES, AS_WORDS = "ours, INT4 as bytes", "ours, INT4 as words"
DESIGNS = (  # a design, and what it is timed against
    (OURS, "ours, each block a tile"),
    ("ours, blocks of one expert as one tile", OURS),  # what it was in earlier rows
    ("ours, INT4 as fragments", OURS),
    ("ours, INT4, specialised warps", OURS),
    (OURS, "ours, tables made in turn"),
)
GROUPED, LIGER = "F.grouped_mm with Triton around", "liger-kernel, its host sync left out"
LOOP = "loop of torch.mm, eager"
ENGINES = {
    "SGLang 0.5.22, tokens sorted by ours": "SGLang",
    "vLLM 0.33.0 in Triton, tokens sorted by ours": "vLLM",
    "Humming 0.1.19 W4A16, the rest ours": "Humming",
}
SGLANG, VLLM, HUMMING = ENGINES
RIVALS = (GROUPED, LIGER, LOOP, SGLANG, VLLM)
READ = "read the experts' weights"
TILES, PERSISTENT = "one CTA a tile", "persistent"
FILLED, ONE_GROUP, LIVE = "SMs × occupancy", "groups of 1", "live blocks alone"
OWN_TILES, OWN_PERSISTENT, OWN_FILLED = "ours, one CTA a tile", "ours, persistent", f"ours, persistent, {FILLED}"
KINDS = {"W4A16": "ExecuTorch 1.5.1 W4A16", "W4A8": "ExecuTorch 1.5.1 W4A8"}  # activations -> its own kernels
PER_PAIR = "ExecuTorch 1.5.1, per pair"
CHANGES = {  # what a launch decides -> the grid without it, and with it
    "persistent": (TILES, PERSISTENT),
    FILLED: (PERSISTENT, f"{PERSISTENT}, {FILLED}"),
    "groups of more than 1": (f"{PERSISTENT}, {ONE_GROUP}", PERSISTENT),
    f"{LIVE}, {TILES}": (TILES, f"{TILES}, {LIVE}"),
    f"{LIVE}, {PERSISTENT}": (PERSISTENT, f"{PERSISTENT}, {LIVE}"),
}
PARTS = ("all", "128", "108", "96", "64")  # multiprocessors of the GPU, as they are asked for
SMS = {"A100": 108, "RTX 4090": 128, "H100 SXM, H200": 132, "B200": 148}  # by data sheet
MODELS = {  # experts, hidden, width, top_k; from their config files
    "Qwen3-30B-A3B": (128, 2048, 768, 8), "Qwen3.5-35B-A3B": (256, 2048, 512, 8),
    "Qwen3-Next-80B-A3B": (512, 2048, 512, 10), "Mixtral-8x7B": (8, 4096, 14336, 2),
    "DeepSeek-V3": (256, 7168, 2048, 8),
}  # fmt: skip


def _kernel(kind: str, *words: str) -> str:
    return ", ".join([KINDS[kind], *words])


# Pairs


def compare(group: Sequence[Mapping[str, Any]], variant: str, against: str) -> dict[str, Any]:
    """As `common.compare`; of two that were not timed in the same blocks, of the medians of each process."""
    known = usable(group)
    if not {variant, against} <= set(known) or known[variant]["mode"] == known[against]["mode"]:
        return common.compare(group, variant, against)
    line = {"variant": variant, "against": against, "us": us(known[variant]), "against us": us(known[against])}
    found = _apart(_processes(known[against]), _processes(known[variant]))
    return line | judged(found.each(math.exp), noise(group))


def _processes(row: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The samples of each process, ns."""
    found: dict[int, list[int]] = {}
    for run, ns in zip(row["run"], row["samples_ns"], strict=True):
        found.setdefault(int(run), []).append(int(ns))
    return tuple(tuple(found[run]) for run in sorted(found))


@cache
def _apart(slow: tuple[tuple[int, ...], ...], fast: tuple[tuple[int, ...], ...]) -> Interval:
    """Mean over processes of the logarithm of the ratio of two medians, each of samples that are resampled alone."""
    runs = len(slow)
    if runs != len(fast) or not runs:
        return NOTHING
    centres = [math.log(median(one) / median(other)) for one, other in zip(slow, fast, strict=True)]
    mid = sum(centres) / runs
    spread = 0.0  # Student's: of one process there is none
    if runs > 1:
        variance = sum((one - mid) ** 2 for one in centres) / (runs - 1)
        spread = math.sqrt(variance / runs) * T_975[min(runs - 1, len(T_975)) - 1]
    points, cumulated, step = _of_means([_log_ratios(*both) for both in zip(slow, fast, strict=True)])
    low, high = (_end(points, cumulated, step, share) for share in (0.025, 0.975))
    return Interval(mid, low.each(lambda x: min(x, mid - spread)), high.each(lambda x: max(x, mid + spread)), runs)


def _log_ratios(slow: Sequence[int], fast: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """All ratios of two resampled medians, as logarithms, and how likely each is."""
    (slows, how), (fasts, likely) = common._medians(slow), common._medians(fast)
    return np.subtract.outer(np.log(slows), np.log(fasts)).ravel(), np.outer(how, likely).ravel()


def _of_means(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, float]:
    """The distribution of the mean of one value for each process, of a process at random."""
    values = np.concatenate([some for some, _ in parts])
    first, step = values.min(), np.ptp(values) / (GRID - 1)
    places = np.rint((values - first) / step).astype(int)
    density = np.bincount(places, np.concatenate([some for _, some in parts]) / len(parts), GRID)
    found = density
    for _ in parts[1:]:
        found = np.convolve(found, density)
    return first + np.arange(len(found)) * step / len(parts), np.cumsum(found), step


def _end(points: np.ndarray, cumulated: np.ndarray, step: float, share: float) -> End:
    off = SIGMAS * math.sqrt(share * (1 - share) / DRAWS)
    value, below, above = (float(points[np.searchsorted(cumulated, at)]) for at in (share, share - off, share + off))
    return End(value, below - step, above + step)


# What a case is


def _all(rows: pd.DataFrame, *ops: str) -> Iterator[tuple[str, Params, list[dict[str, Any]]]]:
    for op in ops:
        for params, group in cases(rows, op):
            yield op, params, group


def _told(op: str, params: Params) -> Params:
    return {"GEMM": op} | pick(params, CASE)


def _weight_bytes(op: str, params: Params, group: Sequence[Mapping[str, Any]]) -> int:
    """Of the experts that got a token: the recorded least bytes without activations, of 2 bytes each."""
    slots = params["T"] * params["top_k"]
    moved = {"layer": 2 * params["T"] * params["H"], "gemm1": params["T"] * params["H"] + slots * params["I"]}
    moved["gemm2"] = slots * (params["I"] + params["H"])
    found = int(group[0]["floor_bytes"]) - 2 * moved[op]
    each = {"layer": 3, "gemm1": 2, "gemm2": 1}[op] * params["H"] * params["I"]
    active = sum(1 for some in group[0]["slots"] if some)
    per_weight = 0.5 + 2 / 128 if params["weights"] == "INT4" else 2  # two bytes of scale for 128 weights
    assert found == active * each * per_weight, f"{params}: {found} bytes of weights for {active} experts"
    return found


def _flops(params: Params) -> int:
    """Two for each weight of a layer and slot."""
    return 6 * params["H"] * params["I"] * params["T"] * params["top_k"]


def _limits(rows: pd.DataFrame) -> tuple[float, float]:
    """TB/s and TFLOP/s that the predictions rest on: no GPU reads 100 TB/s, and products are faster."""
    known = set(rows["ceiling"].dropna())
    return max((one for one in known if one < 100), default=math.nan), max(known, default=math.nan)


def ceilings(rows: pd.DataFrame) -> pd.DataFrame:
    """The two ceilings."""
    read_tbs, tflops = _limits(rows)
    return pd.DataFrame([{"of": "all", "TB/s": read_tbs, "TFLOP/s": tflops}])


# Layers


def times_of(rows: pd.DataFrame) -> pd.DataFrame:
    """µs of every layer that is no control, and both rates beside both ceilings."""
    found, (read_tbs, tflops) = [], _limits(rows)
    for op, params, group in _all(rows, "layer"):
        moved, known = _weight_bytes(op, params, group), usable(group)
        for name, took in times(group).items():
            if known[name]["role"] != "control":
                rates = {"TFLOP/s": _flops(params) / (took * 1e6), "TB/s": moved / (took * 1e6)}
                rates |= {
                    "% of products": rates["TFLOP/s"] / tflops * 100,
                    "% of reading": rates["TB/s"] / read_tbs * 100,
                }
                active = len([some for some in group[0]["slots"] if some])
                found.append(pick(params, CASE) | rates | {"variant": name, "us": took, "active": active})
    rates = ["TFLOP/s", "TB/s", "% of products", "% of reading"]
    return table(found, [*CASE, "variant", "us", "active", *rates])


PAIRS = [  # variant, against: those that pages and claims set side by side
    (OURS, LOOP), (OURS, BF16), (OURS, WAITING), (OURS, BY_TILES), (AS_WORDS, AS_BYTES), (OURS, RULE), (OURS, OTHER),
]  # fmt: skip


def _layers(rows: pd.DataFrame, variant: str, against: str, **said: Any) -> list[dict[str, Any]]:
    return [
        pick(params, CASE) | said | line
        for params, group in cases(rows, "layer")
        if (line := compare(group, variant, against))
    ]


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Every pair of `PAIRS`, in every layer that has both."""
    found = [line for pair in PAIRS for line in _layers(rows, *pair)]
    return table(found, [*CASE, "variant", "against", *COMPARED])


RELEASED = ["T", "activations", "against us", "us", *RATIO, "runs"]


def released_grids(rows: pd.DataFrame) -> pd.DataFrame:
    """ExecuTorch's own layer: one CTA a tile over persistent."""
    found = [
        line
        for kind in KINDS
        for line in _layers(rows, _kernel(kind, PERSISTENT), _kernel(kind, TILES), activations=kind)
    ]
    return table(found, RELEASED)


def narrow_blocks(rows: pd.DataFrame) -> pd.DataFrame:
    """ExecuTorch's own layer: blocks of 16 rows over blocks of 64."""
    found = [line for kind in KINDS for line in _layers(rows, _kernel(kind, TILES), _narrow(kind), activations=kind)]
    return table(found, RELEASED)


def _narrow(kind: str) -> str:
    return _kernel(kind, TILES, "blocks of 16 rows")


def _against(rows: pd.DataFrame, others: Sequence[str], quantised: Sequence[bool]) -> list[dict[str, Any]]:
    """The fastest of others over ours in each layer."""
    found = []
    for params, group in cases(rows, "layer"):
        best = least(times(group), others)
        line = compare(group, OURS, best) if best and (params["weights"] == "INT4") in quantised else {}
        if line:
            found.append(pick(params, CASE) | line | {"by": best, "by µs": line["against us"], "ours µs": line["us"]})
    return found


def beside_released(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest form of ExecuTorch's own layer over ours."""
    own = [PER_PAIR, *(_kernel(kind, grid) for kind in KINDS for grid in (TILES, PERSISTENT))]
    return table(_against(rows, own, (False, True)), ["T", "by", "by µs", "ours µs", *RATIO])


def against_best(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest other bf16 layer over ours."""
    return table(_against(rows, RIVALS, (False,)), [*CASE, "by", "by µs", "ours µs", *RATIO])


def beside_engines(rows: pd.DataFrame) -> pd.DataFrame:
    """Each engine's layer over ours, and whose configuration its products have."""
    found = []
    for params, group in cases(rows, "layer"):
        known = usable(group)
        for variant, engine in ENGINES.items():
            if line := compare(group, OURS, variant):
                shipped = facts(known[variant]["evidence"]).get("config", {}).get("shipped")
                line |= {"engine": engine, "configuration": "shipped" if shipped else "default"}
                found.append(pick(params, CASE) | line | {"engine µs": line["against us"], "ours µs": line["us"]})
    return table(found, [*CASE, "engine", "configuration", "engine µs", "ours µs", *RATIO])


def int4_reading(rows: pd.DataFrame) -> pd.DataFrame:
    """Both INT4 GEMMs together, each in the faster of its grids, beside reading."""
    parts: dict[tuple, dict[str, list[float]]] = defaultdict(dict)
    for op, params, group in _all(rows, *GEMMS):
        known = times(group)
        own = [known[name] for name in (OWN_TILES, OWN_PERSISTENT, OWN_FILLED) if name in known]
        if params["weights"] == "INT4" and own:
            line = [_weight_bytes(op, params, group), min(own), known.get(READ, math.nan)]
            parts[tuple(pick(params, CASE).values())][op] = line
    found, (read_tbs, _) = [], _limits(rows)
    for case, both in parts.items():
        if len(both) == 2:
            moved, took, reading = (one + other for one, other in zip(*both.values(), strict=True))
            line = {
                "MB": moved / 1e6,
                "us": took,
                "TB/s": moved / took / 1e6,
                "% of reading here": reading / took * 100,
            }
            line["% of reading"] = moved / (read_tbs * 1e6) / took * 100
            found.append(dict(zip(CASE, case, strict=True)) | line)
    return table(found, [*CASE, "MB", "us", "TB/s", "% of reading", "% of reading here"])


# Grids


CODE = ["registers", "persistent registers", "CTAs an SM", "persistent CTAs"]
OWN_PAIRS = {_kernel(kind, PERSISTENT): (_kernel(kind, TILES), KINDS[kind]) for kind in KINDS}
GRIDS = {OWN_PERSISTENT: (OWN_TILES, OURS), OWN_FILLED: (OWN_TILES, OURS)} | OWN_PAIRS


def persistence(rows: pd.DataFrame) -> pd.DataFrame:
    """One CTA a tile over persistent of each kernel, its waves, and what both have of an SM."""
    found = []
    for op, params, group in _all(rows, *GEMMS):
        known = {name: facts(row["evidence"]) for name, row in usable(group).items()}
        for persistent, (tiles, kernel) in GRIDS.items():
            if line := compare(group, persistent, tiles):
                one, other = known[tiles], known[persistent]
                line |= {"kernel": kernel, "persistent": persistent, "tiles": one.get("tiles", math.nan)}
                line |= _fill(one.get("tiles"), one.get("ctas_per_sm"), one.get("sms"))
                for name, of in (("registers", "registers"), ("CTAs an SM", "ctas_per_sm")):
                    line[name], line[CODE[CODE.index(name) + 1]] = one.get(of, math.nan), other.get(of, math.nan)
                found.append(_told(op, params) | line)
    shown = ["tiles", "waves", "efficiency", *CODE]
    return table(found, [*CASE, "GEMM", "kernel", "persistent", *shown, *RATIO, "runs"])


def _fill(tiles: int | None, per_sm: int | None, sms: int | None) -> dict[str, float]:
    """How often tiles fill the GPU, and the part of those waves, each whole, that is work."""
    if not tiles or not per_sm or not sms:
        return {}
    waves = Fraction(tiles, per_sm * sms)
    return {"waves": float(waves), "efficiency": float(waves / math.ceil(waves))}


def same_bits(rows: pd.DataFrame) -> pd.DataFrame:
    """Whether each of the lab's persistent grids has the bits of one CTA a tile."""
    found = []
    for op, params, group in _all(rows, *GEMMS):
        bits = {name: facts(row["evidence"]).get("bits") for name, row in usable(group).items()}
        for kernel in (OWN_PERSISTENT, OWN_FILLED):
            if bits.get(kernel) and bits.get(OWN_TILES):
                found.append(_told(op, params) | {"kernel": kernel, "same": bits[kernel] == bits[OWN_TILES]})
    return table(found, [*CASE, "GEMM", "kernel", "same"])


def own_products(rows: pd.DataFrame) -> pd.DataFrame:
    """Before over after each thing that a launch of ExecuTorch's own products decides."""
    found = []
    for op, params, group in _all(rows, *GEMMS):
        known = {name: facts(row["evidence"]) for name, row in usable(group).items()}
        for kind, (change, grids) in product(KINDS, CHANGES.items()):
            before, after = (_kernel(kind, grid) for grid in grids)
            if line := compare(group, after, before):
                code = known[before]
                dead = code["blocks"] - code["live"]
                line |= {"T": params["T"], "GEMM": op, "activations": kind, "change": change}
                line |= {"dead %": 100 * dead / code["blocks"], "CTAs an SM": code["ctas_per_sm"]}
                found.append(line | {"same code": code["registers"] == known[after]["registers"]})
    columns = ["us", "against us", "dead %", "CTAs an SM", "same code"]
    return table(found, ["T", "GEMM", "activations", "change", *columns, *RATIO])


def worth(rows: pd.DataFrame) -> pd.DataFrame:
    """Each change over all its cases, counted by verdict."""
    parts: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for line in own_products(rows).to_dict("records"):
        parts[line["change"], line["activations"]].append(line)
    found = []
    for (change, kind), lines in parts.items():
        ratios, words = sorted(line["ratio"] for line in lines), Counter(line["verdict"] for line in lines)
        line = {"change": change, "activations": kind, "mean ratio": geometric_mean(ratios), "cases": len(lines)}
        line |= {"least": ratios[0], "most": ratios[-1]}
        for word in ("faster", "same", "slower", "unclear"):  # of a verdict that is a draw, one more or less
            draws = sum(count for one, count in words.items() if "|" in one and word in one)
            line |= {word: words[word], f"{word} from": words[word], f"{word} to": words[word] + draws}
        found.append(line)
    counts = ["cases", "faster", "same", "slower", "unclear"]
    return table(found, ["change", "activations", "mean ratio", "least", "most", *counts])


def source_point(rows: pd.DataFrame) -> pd.DataFrame:
    """Both products at the source's own point: of ours by tiles, and of ExecuTorch's own in each form."""
    took: dict[str, dict[str, float]] = {}
    code: dict[str, dict[str, Any]] = {}
    for op, params, group in _all(rows, *GEMMS):
        if params["model"] == SOURCE and params["weights"] == "INT4" and params["T"] == SOURCE_T:
            took[op] = times(group)
            code[op] = {name: facts(row["evidence"]) for name, row in usable(group).items()}
    forms = {grid for both in CHANGES.values() for grid in both}
    names = [OWN_TILES, *(_kernel(kind, grid) for kind in KINDS for grid in forms)]
    sums = {
        name: took["gemm1"][name] + took["gemm2"][name] for name in names if all(name in one for one in took.values())
    }
    return table([_form(name, sums, took, code) for name in sums], ["variant", *POINT])


def point_ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """Both products at the source's own point: the time of one form over that of another, of the same activations."""
    us = dict(source_point(rows)[["variant", "µs, both"]].itertuples(index=False))
    full, live = f"{PERSISTENT}, {FILLED}", f"{TILES}, {LIVE}"
    forms = {
        "as many CTAs as fit, not one an SM": (full, PERSISTENT),
        "as many CTAs as fit, not one CTA a tile": (full, TILES),
        "no empty blocks, not all": (live, TILES),
    }
    asked = []
    for kind, (change, both) in product(KINDS, forms.items()):
        asked.append((kind, change, *(_kernel(kind, form) for form in both)))
    theirs = {name: time for name, time in us.items() if name != OWN_TILES}
    if theirs:
        best = min(theirs, key=theirs.__getitem__)
        asked.append(("", "Lab's products against ExecuTorch's fastest", OWN_TILES, best))
    columns = ["activations", "change", "variant", "against"]
    found = [
        dict(zip(columns, one, strict=True)) | {"us": us[one[2]], "against us": us[one[3]]}
        for one in asked
        if {*one[2:]} <= set(us)
    ]
    ratios = [line | {"ratio": line["against us"] / line["us"]} for line in found]
    return table(ratios, [*columns, "us", "against us", "ratio"])


POINT = [
    "µs, both", "GEMM1 µs", "GEMM2 µs", "tiles / this", "dead %", "registers", "CTAs an SM", "launched an SM",
    "8-bit loads", "GEMM2 registers", "GEMM2 CTAs",
]  # fmt: skip


def _form(name: str, sums: Mapping[str, float], took: Mapping[str, Any], code: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the source's own point. A persistent grid is set against one CTA a tile of as many blocks."""
    one, two = code["gemm1"][name], code["gemm2"][name]
    line = {"variant": name, "µs, both": sums[name]} | {f"{op.upper()} µs": some[name] for op, some in took.items()}
    line |= {"dead %": 0.0, "8-bit loads": one["loads"].get("8", 0)}
    if name != OWN_TILES and LIVE not in name:  # the lab's leaves off at the last block with a token
        line["dead %"] = 100 - 100 * one["live"] / one["blocks"]
    if PERSISTENT in name:
        live = LIVE if LIVE in name else ""
        tiles = ", ".join(filter(None, [name.partition(", ")[0], TILES, live]))
        line |= {"launched an SM": one["programs"] / one["sms"], "tiles / this": sums[tiles] / sums[name]}
    line |= {"registers": one["registers"], "CTAs an SM": one["ctas_per_sm"]}
    return line | {"GEMM2 registers": two["registers"], "GEMM2 CTAs": two["ctas_per_sm"]}


# Parts of the GPU, and other GPUs


def _part(sms: str, grid: str) -> str:
    return f"{sms} SMs, {grid}"


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """A GEMM of few tiles on parts of the GPU: µs by whole waves, and over that on all of it."""
    found = []
    for params, group in cases(rows, "waves"):
        took, known = times(group), {name: facts(row["evidence"]) for name, row in usable(group).items()}
        for grid, sms in product((TILES, PERSISTENT), PARTS):
            name, whole = _part(sms, grid), _part("all", grid)
            if name in took:
                waves = [
                    known[one]["tiles"] / (known[one]["seen"] * known[one]["ctas_per_sm"]) for one in (name, whole)
                ]
                count, of_all = map(math.ceil, waves)
                line = {"T": params["T"], "SMs": known[name]["seen"], "grid": grid, "tiles": known[name]["tiles"]}
                line |= {"CTAs an SM": known[name]["ctas_per_sm"], "waves": waves[0], "whole waves": count}
                line |= {"us": took[name], "us a wave": took[name] / count}
                if sms != "all":
                    line |= {"predicted": count / of_all, "measured": took[name] / took[whole]}
                found.append(line)
    columns = ["tiles", "CTAs an SM", "waves", "whole waves", "us", "us a wave", "predicted", "measured"]
    return table(found, ["T", "SMs", "grid", *columns])


def persistent_on_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """One CTA a tile over persistent on each part of the GPU."""
    found = []
    for params, group in cases(rows, "waves"):
        for sms in PARTS:
            if line := compare(group, _part(sms, PERSISTENT), _part(sms, TILES)):
                seen = facts(usable(group)[_part(sms, TILES)]["evidence"])["seen"]
                found.append({"T": params["T"], "SMs": seen} | line)
    return table(found, ["T", "SMs", *RATIO, "runs"])


def on_other_gpus(rows: pd.DataFrame) -> pd.DataFrame:
    """Waves of ExecuTorch's own products, one CTA a tile, on GPUs of other sizes."""
    found = []
    for line in persistence(rows).to_dict("records"):
        if line["persistent"] in OWN_PAIRS and line["CTAs an SM"] == line["CTAs an SM"]:
            for gpu, sms in SMS.items():
                there = _fill(int(line["tiles"]), int(line["CTAs an SM"]), sms)
                found.append(pick(line, [*CASE, "GEMM", "kernel"]) | there | {"GPU": gpu})
    return table(found, [*CASE, "GEMM", "kernel", "GPU", "waves", "efficiency"])


AT = (1, 16, 128, 512)  # tokens


def dead_shares(rows: pd.DataFrame) -> pd.DataFrame:
    """The part of the source's grid in which no token is, under uniform routing; of no rows."""
    found = []
    for (model, (experts, _, _, top_k)), t in product(MODELS.items(), AT):
        line = {"model": model, "T": t}
        for size in (16, 64):
            grid = (t * top_k + experts * size) // size  # as `moe_align_block_size` has it
            line[f"empty %, BM={size}"] = float(100 * (1 - _live(t, top_k, experts, size) / grid))
        found.append(line)
    return pd.DataFrame(found)


@cache
def _live(tokens: int, top_k: int, experts: int, size: int) -> Fraction:
    """Blocks with a token on average, exactly: a block more at each count that begins one. One power for all terms."""
    hit, miss = top_k, experts - top_k
    terms = [math.comb(tokens, n) * hit**n * miss ** (tokens - n) for n in range(tokens + 1)]
    return Fraction(experts * sum(sum(terms[n:]) for n in range(1, tokens + 1, size)), experts**tokens)


SHOWN = ("Qwen3.5-35B-A3B", 128, 64, 128, 2)  # model, tokens, rows and columns of a block, CTAs an SM


def waves_by_gpu(rows: pd.DataFrame) -> pd.DataFrame:
    """Waves of both GEMMs of a shape on GPUs of several sizes; of no rows."""
    model, tokens, block_m, block_n, per_sm = SHOWN
    experts, hidden, width, top_k = MODELS[model]
    live = round(_live(tokens, top_k, experts, block_m))
    found = []
    for (gemm, columns), (gpu, sms) in product((("gemm1", 2 * width), ("gemm2", hidden)), SMS.items()):
        tiles = live * math.ceil(columns / block_n)
        found.append({"GEMM": gemm, "GPU": gpu, "tiles": tiles} | _fill(tiles, per_sm, sms))
    return pd.DataFrame(found)


# Routings and predictions


def active_experts(rows: pd.DataFrame) -> pd.DataFrame:
    """Experts that got a token, the bytes of their weights and operations a byte, under uniform routing."""
    found: dict[tuple, dict[str, Any]] = {}
    for op, params, group in _all(rows, "layer"):
        if params["routing"] == "uniform":
            moved, kind = _weight_bytes(op, params, group), params["weights"]
            line = found.setdefault((params["model"], params["T"]), pick(params, ["model", "T"]))
            line |= {"active": np.count_nonzero(group[0]["slots"]), "of": params["E"], f"MB, {kind}": moved / 1e6}
            line[f"FLOP a byte, {kind}"] = _flops(params) / moved
    return pd.DataFrame(found.values())


def _block_m(group: Sequence[Mapping[str, Any]]) -> int:
    """Rows of a block of our layer; of one token without tiles, one."""
    config = facts(usable(group)[OURS]["evidence"])["config"]
    return 1 if config.get("rows") else config["block_m"]


def routings(rows: pd.DataFrame) -> pd.DataFrame:
    """Our layer under each routing over the uniform one, where several were timed, and the fastest other over it."""
    lines = [line for line in times_of(rows).to_dict("records") if line["variant"] == OURS]
    us_of = {tuple(line[name] for name in CASE): line["us"] for line in lines}
    rivals = {tuple(line[name] for name in CASE): line for line in against_best(rows).to_dict("records")}
    groups = {tuple(pick(params, CASE).values()): group for params, group in cases(rows, "layer")}
    found = []
    for line in lines:
        case = tuple(line[name] for name in CASE)
        if sum(other[:3] == case[:3] for other in us_of) > 1:
            slots, size = list(groups[case][0]["slots"]), _block_m(groups[case])
            said = {"over uniform": line["us"] / us_of[(*case[:3], "uniform")], "BM": size}
            said |= {"blocks": -(-max(slots) // size), "most / mean": max(slots) * len(slots) / sum(slots)}
            found.append(line | said | {name: x for name, x in rivals.get(case, {}).items() if name not in CASE})
    of_ours = ["us", "active", "most / mean", "BM", "blocks", "TFLOP/s", "TB/s", "over uniform"]
    return table(found, [*CASE, *of_ours, "by", *RATIO])


def designs(rows: pd.DataFrame) -> pd.DataFrame:
    """A layer over that by another design; reading, and torch's product, over the design; their bits."""
    found = []
    for params, group in cases(rows, "designs"):
        known = usable(group)
        for design, other in DESIGNS:
            if line := compare(group, design, other):
                outputs = [facts(known[name]["evidence"])["bits"] for name in (design, other)]
                line |= {"same bits": outputs[0] == outputs[1], "reading %": 100 * us(known[READ]) / us(known[design])}
                line |= {"beside": us(known[GROUPED]) / us(known[design])} if GROUPED in known else {}
                found.append(pick(params, CASE) | line)
    return table(found, [*CASE, "variant", "us", "against us", "beside", "reading %", "same bits", *RATIO])


def predictions(rows: pd.DataFrame) -> pd.DataFrame:
    """Our layers over what was predicted, and over reading and the products of whole blocks together."""
    found, (read_tbs, tflops) = [], _limits(rows)
    for op, params, group in _all(rows, "layer"):
        row = usable(group).get(OURS)
        if row and row["predicted_us"] == row["predicted_us"]:
            size, took, slots = _block_m(group), us(row), group[0]["slots"]
            computed = sum(math.ceil(some / size) * size for some in slots) / (params["T"] * params["top_k"])
            reading = _weight_bytes(op, params, group) / (read_tbs * 1e6)
            products = computed * _flops(params) / (tflops * 1e6)
            line = {"us": took, "predicted us": row["predicted_us"], "BM": size, "reading us": reading}
            line |= {"off %": 100 * took / row["predicted_us"] - 100, "products us": products}
            found.append(pick(params, CASE) | line | {"over both %": 100 * took / (reading + products) - 100})
    columns = ["us", "predicted us", "off %", "BM", "reading us", "products us", "over both %"]
    return table(found, [*CASE, *columns])


# Tuning


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each tuned case the blocks, and the tiles of both GEMMs, that take the least together."""
    found = []
    for params, group in cases(rows, "tune"):
        best: dict[tuple[int, str], tuple[float, str]] = {}
        for row in group:
            if row["ok"] and row["role"] != "control":
                key, line = (row["chosen"]["block_m"], row["chosen"]["gemm"]), (us(row), _text(row["chosen"]["tile"]))
                best[key] = min(best.get(key, line), line, key=lambda one: one[0])
        sizes = sorted({size for size, gemm in best if {(size, one) for one in GEMMS} <= set(best)})
        size = min(sizes, key=lambda one: sum(best[one, gemm][0] for gemm in GEMMS))
        line = pick(params, ["E", "top_k", "H", "I", "T"]) | {"int4": params["weights"] == "INT4", "blocks of": size}
        found.append(line | {gemm: best[size, gemm][1] for gemm in GEMMS})
    return pd.DataFrame(found)


def _text(tile: Mapping[str, Any]) -> str:
    return json.dumps(tile, sort_keys=True)


def tuned_up_to(rows: pd.DataFrame) -> pd.DataFrame:
    """The most tokens of a tuned case."""
    most = max((params["T"] for op, params in zip(rows["op"], rows["params"], strict=True) if op == "tune"), default=0)
    return pd.DataFrame([{"of": "all", "tokens": most}])


# What the claims are judged by


def _observed(lines: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Ratios as observations; each line has its case in words."""
    return table([dict(line) | {"mid": line["ratio"]} for line in lines], ["case", "mid", *RATIO[1:4], "runs"])


def _released(found: pd.DataFrame, kinds: Sequence[str], tokens: Iterable[int]) -> pd.DataFrame:
    lines = [line for line in found.to_dict("records") if line["activations"] in kinds and line["T"] in tokens]
    return _observed(line | {"case": f"{line['activations']}, {line['T']} tokens"} for line in lines)


def prefill(rows: pd.DataFrame) -> pd.DataFrame:
    """ExecuTorch's own layer in both grids, 8-bit activations, at the prefill's tokens."""
    return _released(released_grids(rows), ["W4A8"], [SOURCE_T])


def few_tokens(rows: pd.DataFrame) -> pd.DataFrame:
    """The same of up to 512 tokens."""
    return _released(released_grids(rows), list(KINDS), range(513))


def blocks(rows: pd.DataFrame) -> pd.DataFrame:
    """Blocks of 16 rows over blocks of 64 at the prefill's tokens, bf16 activations."""
    return _released(narrow_blocks(rows), ["W4A16"], [SOURCE_T])


def fewer_sms(rows: pd.DataFrame) -> pd.DataFrame:
    """The gain of the persistent grid on a part of the GPU over that on all of it; both intervals' ends."""
    lines = persistent_on_parts(rows).to_dict("records")
    found = []
    for whole in lines:
        for part in lines:
            if part["T"] == whole["T"] and part["SMs"] < whole["SMs"] == max(line["SMs"] for line in lines):
                line = {"case": f"{part['SMs']} of {whole['SMs']} SMs, {part['T']} tokens"}
                line |= {"ratio": part["ratio"] / whole["ratio"], "runs": min(part["runs"], whole["runs"])}
                for name, other in (("low", "high"), ("high", "low")):
                    line |= _quotient(part, whole, name, other)
                line |= {f"noise{end}": part[f"noise{end}"] + whole[f"noise{end}"] for end in ("", " from", " to")}
                found.append(line)
    return _observed(found)


def _quotient(part: Mapping[str, Any], whole: Mapping[str, Any], name: str, other: str) -> dict[str, float]:
    """An end of the ratio of two ratios, with its tolerance."""
    ends = {"": "", " from": " to", " to": " from"}
    return {name + end: part[name + end] / whole[other + opposite] for end, opposite in ends.items()}


def _where(line: Mapping[str, Any]) -> str:
    return f"{line['model']}, {line['weights']}, {line['T']} tokens, {line['routing']}"


def own_grid(rows: pd.DataFrame) -> pd.DataFrame:
    """One CTA a tile over persistent, of our bf16 GEMMs; of each case, one program an SM before as many as fit."""
    found = [line for line in persistence(rows).to_dict("records") if line["kernel"] == OURS]
    lines = [line | {"case": f"{_where(line)}, {line['GEMM']}"} for line in found if line["weights"] == "bf16"]
    return _observed(lines).assign(place=[(OWN_PERSISTENT, OWN_FILLED).index(line["persistent"]) for line in lines])


TABLES: Tables = {
    "tables.ceilings": ceilings,
    "tables.times": times_of,
    "tables.compared": compared,
    "tables.released_grids": released_grids,
    "tables.narrow_blocks": narrow_blocks,
    "tables.beside_released": beside_released,
    "tables.against_best": against_best,
    "tables.beside_engines": beside_engines,
    "tables.int4_reading": int4_reading,
    "tables.persistence": persistence,
    "tables.same_bits": same_bits,
    "tables.own_products": own_products,
    "tables.worth": worth,
    "tables.source_point": source_point,
    "tables.point_ratios": point_ratios,
    "tables.steps": steps,
    "tables.persistent_on_parts": persistent_on_parts,
    "tables.on_other_gpus": on_other_gpus,
    "tables.routings": routings,
    "tables.designs": designs,
    "tables.predictions": predictions,
    "tables.fastest": fastest,
    "tables.tuned_up_to": tuned_up_to,
    "grid_views.dead_shares": dead_shares,
    "grid_views.waves_by_gpu": waves_by_gpu,
    "views.active_experts": active_experts,
    "claims.prefill": prefill,
    "claims.few_tokens": few_tokens,
    "claims.blocks": blocks,
    "claims.fewer_sms": fewer_sms,
    "claims.own_grid": own_grid,
}
