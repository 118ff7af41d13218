"""Tables of the study: what the notebook shows and the claims are judged by, made from the measured rows."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench import verdict
from labkit.bench.records import expanded, read
from labkit.bench.spec import Case
from labkit.bench.verdict import WORDS, compare_many, geometric_mean, median_us
from labkit.kernels.experts import blocks as experts_blocks
from labkit.kernels.experts import choose
from labkit.kernels.experts.choose import Config, Tile
from labkit.studies.moe_persistent_grid import variants as names
from labkit.studies.moe_persistent_grid import waves, work
from labkit.studies.moe_persistent_grid.models import MODELS, QWEN3_30B, QWEN35_35B
from labkit.studies.moe_persistent_grid.routings import KINDS

CASE = ["model", "weights", "T", "routing"]
RATIO = ["ratio", "low", "high", "noise", "verdict"]
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
AT = (1, 16, 128, 512, 1642, 4096, 16384)  # tokens of the figures below
# ms on one GPU of each kind, before this lab's own kernels were: whole layer, bf16, uniform routing, in a CUDA graph;
# not of the same run as the rows. SGLang: the kernel that it shares with vLLM, with its tuned configurations; Liger PR:
# that of Liger-Kernel's pull request 1294, which no release has.
OTHER_RUN = {
    (H100, "Qwen3-30B-A3B"): {
        "SGLang": (0.059, 0.283, 0.441, 0.484, 0.571, 0.839, 2.72),
        "Liger PR": (0.068, 0.298, 0.469, 0.503, 0.563, 0.876, 2.71),
    },
    (H100, "Mixtral-8x7B"): {
        "SGLang": (0.266, 0.952, 0.985, 1.23, 2.47, 5.20, 20.6),
        "Liger PR": (0.299, 1.01, 1.05, 1.18, 2.40, 4.68, 18.4),
    },
    (H200, "Qwen3.5-35B-A3B"): {
        "SGLang": (0.048, 0.184, 0.400, 0.427, 0.485, 0.782, 2.46),
        "Liger PR": (0.053, 0.198, 0.424, 0.463, 0.492, 0.746, 2.09),
    },
}
SOURCE_T = 1642  # tokens of the source's prefill
SECTOR = 32


def fastest(path: Path) -> choose.Table:
    """The tuned table from the rows of a file: for each case the blocks whose two fastest GEMMs take the least."""
    rows = read(path)
    table = expanded(rows[(rows["op"] == "tune") & rows["ok"] & (rows["role"] != "control")])
    found: choose.Table = {}
    shape = ["E", "top_k", "H", "I", "weights", "T"]
    for (*dims, weights, tokens), group in table.groupby(shape) if len(table) else ():
        if config := _best_config(group):
            found.setdefault((*map(int, dims), weights == "INT4"), {})[int(tokens)] = config
    return found


def _best_config(group: pd.DataFrame) -> Config | None:
    """Of the candidates of one case; None if no size of blocks has both GEMMs."""
    found: dict[float, Config] = {}
    for block_m, part in group.groupby("block_m"):
        best = part.loc[part.groupby("gemm")["us"].idxmin()].set_index("gemm")
        if {"gemm1", "gemm2"} <= set(best.index):
            tiles = {name: Tile(**best.loc[name, "tile"]) for name in ("gemm1", "gemm2")}
            found.setdefault(float(best["us"].sum()), Config(int(block_m), **tiles))
    return found[min(found)] if found else None


def cases(rows: pd.DataFrame, op: str) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Parameters and rows of every case of an operation, in the order of the pages: model, weights, tokens, routing."""
    some = rows[rows["op"] == op]
    models, kinds = list(MODELS), list(KINDS)

    def place(item: tuple[dict[str, Any], pd.DataFrame]) -> tuple:
        params, _ = item
        known = params["model"] in models
        return (
            models.index(params["model"]) if known else len(models), params["weights"], params["T"],
            kinds.index(params["routing"]),
        )  # fmt: skip

    yield from sorted(((json.loads(key), group) for key, group in some.groupby("case")), key=place)


def _frame(found: list[dict[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame(found, columns=None if found else list(columns))


def _case(params: dict[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in CASE}


def _evidence(group: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Evidence of each usable variant of a case."""
    usable = group[group["ok"]]
    return {v: json.loads(text) for v, text in zip(usable["variant"], usable["evidence"], strict=True)}


def ceilings(rows: pd.DataFrame) -> tuple[float, float]:
    """TB/s of reading and TFLOP/s of bf16 products, as this GPU's machine page has them; NaN where unknown."""
    bound = rows["floor_flops"] > work.BALANCE * rows["floor_bytes"]
    read_tbs, tflops = rows["ceiling"][~bound].max(), rows["ceiling"][bound].max()
    return float(read_tbs), float(tflops)


TIMES = [
    *CASE,
    "variant",
    "role",
    "mode",
    "us",
    "active",
    "weight MB",
    "TFLOP/s",
    "TB/s",
    "% of products",
    "% of reading",
]


def times(rows: pd.DataFrame, op: str = "layer") -> pd.DataFrame:
    """A row a usable variant: µs, experts that got a token, and both rates beside both ceilings.

    TFLOP/s: of the products; TB/s: of the weights of those experts alone, each counted once.
    """
    read_tbs, tflops = ceilings(rows)
    found = []
    for params, group in cases(rows, op):
        x = Case(op, params)
        moved, products = work.weight_bytes(x), work.flops(x)
        roles = {v: (role, mode) for v, role, mode in zip(group["variant"], group["role"], group["mode"], strict=True)}
        for variant, us in median_us(group).items():
            role, mode = roles[variant]
            if role == "control":
                continue
            line = _case(params) | {"variant": variant, "role": role, "mode": mode, "us": us}
            line |= {"active": work.active(x), "weight MB": moved / 1e6}
            line |= {"TFLOP/s": products / us / 1e6, "TB/s": moved / us / 1e6}
            line |= {"% of products": 100 * line["TFLOP/s"] / tflops, "% of reading": 100 * line["TB/s"] / read_tbs}
            found.append(line)
    return _frame(found, TIMES)


def compared(rows: pd.DataFrame, op: str, variant: str, against: str) -> pd.DataFrame:
    """Time of `against` over that of `variant` in every case of an operation that has both."""
    found = verdict.compared(((_case(params), group) for params, group in cases(rows, op)), variant, against)
    return _frame(found, [*CASE, "us", "against us", *RATIO, "runs"])


def against_best(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of the fastest rival over ours, of layers that are not quantised; above 1: ours is faster.

    `by`: who that is; one that is timed eagerly is named so.
    """
    found = []
    for params, group in cases(rows, "layer"):
        us = median_us(group)
        rivals = [name for name in names.RIVALS if name in us]
        if params["weights"] == "INT4" or names.OURS not in us or not rivals:
            continue
        best = min(rivals, key=us.__getitem__)
        [result] = compare_many(group, [(names.OURS, best)])
        found.append(_case(params) | {"by": best, "by µs": us[best], "ours µs": us[names.OURS]} | result.columns())
    return _frame(found, [*CASE, "by", "by µs", "ours µs", *RATIO])


def beside_other_runs(rows: pd.DataFrame) -> pd.DataFrame:
    """Our bf16 layer beside figures of another run; empty but on the kinds of GPU and for the models they are of."""
    table = times(rows)
    table = table[(table["variant"] == names.OURS) & (table["weights"] == "bf16") & (table["routing"] == KINDS[0])]
    known, found = {model: ms for (gpu, model), ms in OTHER_RUN.items() if gpu in set(rows["gpu"])}, []
    for _, line in table[table["model"].isin(known) & table["T"].isin(AT)].iterrows():
        ms = {who: some[AT.index(line["T"])] for who, some in known[line["model"]].items()}
        one = {"model": line["model"], "T": line["T"], "ours ms": line["us"] / 1e3}
        one |= {f"{who} ms": some for who, some in ms.items()}
        found.append(one | {f"{who} / ours": 1e3 * some / line["us"] for who, some in ms.items()})
    return _frame(found, ["model", "T", "ours ms"])


def int4_reading(rows: pd.DataFrame) -> pd.DataFrame:
    """The two GEMMs of our INT4 layer together: percent of the read ceiling, and of reading in the same run.

    Of each GEMM the faster of its grids; only cases that have both GEMMs.
    """
    parts: dict[tuple, list[tuple[float, float, float]]] = {}
    read_tbs, _ = ceilings(rows)
    ours = (names.OURS_TILES, names.OURS_PERSISTENT, names.OURS_FILLED)
    for op in ("gemm1", "gemm2"):
        for params, group in cases(rows, op):
            us = median_us(group)
            own = [us[name] for name in ours if name in us]
            if params["weights"] == "INT4" and own:
                moved = work.weight_bytes(Case(op, params))
                line = (moved, min(own), us.get(names.READ, math.nan))
                parts.setdefault(tuple(params[name] for name in CASE), []).append(line)
    found = []
    for case, both in parts.items():
        if len(both) == 2:
            moved, us, reading = map(sum, zip(*both, strict=True))
            line = {"MB": moved / 1e6, "us": us, "TB/s": moved / us / 1e6}
            line |= {"% of reading": 100 * line["TB/s"] / read_tbs, "% of reading here": 100 * reading / us}
            found.append(dict(zip(CASE, case, strict=True)) | line)
    return _frame(found, [*CASE, "MB", "us", "TB/s", "% of reading", "% of reading here"])


CODE = ["registers", "persistent registers", "CTAs an SM", "persistent CTAs"]
PERSISTENCE = [*CASE, "GEMM", "kernel", "persistent", "tiles", *CODE, "waves", "efficiency", *RATIO]


def persistence(rows: pd.DataFrame) -> pd.DataFrame:
    """One CTA a tile / persistent of the same kernel, in every case of a GEMM; above 1: the persistent grid pays.

    waves: tiles of the first over CTAs that the GPU holds of it; efficiency: the share of its slots' time that is work.
    registers and CTAs that fit an SM: of the first, and of the persistent one, whose loop makes it other code.
    """
    found = []
    for op in ("gemm1", "gemm2"):
        for params, group in cases(rows, op):
            us, facts = median_us(group), _evidence(group)
            pairs = [pair for pair in names.PAIRS if set(pair) <= set(us)]
            for (per_tile, persistent), result in zip(
                pairs, compare_many(group, [(p, t) for t, p in pairs]), strict=True
            ):
                line = _case(params) | {"GEMM": op, "kernel": per_tile.removesuffix(f", {names.TILES}")}
                line |= {"persistent": persistent} | _waves(facts.get(per_tile, {}))
                line |= _code(facts.get(per_tile, {}), facts.get(persistent, {}))
                found.append(line | result.columns())
    return _frame(found, PERSISTENCE)


def _code(per_tile: dict[str, Any], persistent: dict[str, Any]) -> dict[str, float]:
    """Registers and CTAs an SM of both grids' kernels; NaN where their evidence has them not."""
    kept = [known.get(name, math.nan) for name in ("registers", "ctas_per_sm") for known in (per_tile, persistent)]
    return dict(zip(CODE, kept, strict=True))


def _waves(facts: dict[str, Any]) -> dict[str, float]:
    """Tiles, waves and efficiency of a grid of one CTA a tile; NaN where its evidence has them not."""
    tiles, per_sm, sms = (facts.get(name, math.nan) for name in ("tiles", "ctas_per_sm", "sms"))
    slots = per_sm * sms
    known = slots == slots and slots > 0
    return {
        "tiles": tiles,
        "waves": tiles / slots if known else math.nan,
        "efficiency": waves.efficiency(int(tiles), int(slots)) if known else math.nan,
    }


def same_bits(rows: pd.DataFrame) -> pd.DataFrame:
    """Whether a kernel gives the same bits in both grids, in every case of a GEMM; of the rows that were looked at."""
    found = []
    for op in ("gemm1", "gemm2"):
        for params, group in cases(rows, op):
            bits = {variant: facts.get("bits") for variant, facts in _evidence(group).items()}
            for per_tile, persistent in names.PAIRS:
                if bits.get(per_tile) and bits.get(persistent):
                    line = _case(params) | {"GEMM": op, "kernel": persistent}
                    found.append(line | {"same": bits[per_tile] == bits[persistent]})
    return _frame(found, [*CASE, "GEMM", "kernel", "same"])


CHANGES = [*CASE, "GEMM", "change", "over", "us", "against us", *RATIO]


def changes(rows: pd.DataFrame) -> pd.DataFrame:
    """Time before / after each change of the source's kernel, in every case that has both; above 1: it pays."""
    found = []
    for op in ("gemm1", "gemm2"):
        for params, group in cases(rows, op):
            us = median_us(group)
            pairs = [pair for pair in dict.fromkeys(names.CHANGES) if set(pair) <= set(us)]
            for (after, before), result in zip(pairs, compare_many(group, pairs), strict=True):
                line = _case(params) | {"GEMM": op, "change": after, "over": before}
                found.append(line | {"us": us[after], "against us": us[before]} | result.columns())
    return _frame(found, CHANGES)


def worth(rows: pd.DataFrame) -> pd.DataFrame:
    """`changes`, one line a change and kind of weights: mean, least and most, and in how many cases it pays or not."""
    table, found = changes(rows), []
    for (after, before, weights), part in table.groupby(["change", "over", "weights"], sort=False):
        counts = part["verdict"].value_counts()
        line = {"change": after, "over": before, "weights": weights, "mean ratio": geometric_mean(part["ratio"])}
        line |= {"least": part["ratio"].min(), "most": part["ratio"].max(), "cases": len(part)}
        found.append(line | {word: int(counts.get(word, 0)) for word in WORDS})
    return _frame(found, ["change", "over", "weights", "mean ratio", "least", "most", "cases", *WORDS])


POINT = [
    "variant", "us", "GEMM1 us", "GEMM2 us", "tiles / this", "dead %", "registers", "CTAs an SM", "launched an SM",
    "8-bit loads", "GEMM2 registers", "GEMM2 CTAs",
]  # fmt: skip


def source_point(rows: pd.DataFrame, tokens: int = SOURCE_T) -> pd.DataFrame:
    """The source's own case by variant: µs of each GEMM and of both; what its grid works on, and what its code is.

    `tiles / this`: time of the same kernel with one CTA a tile over this one. dead: of the blocks that are worked on.
    launched an SM: programs of a persistent grid. Where no GEMM is named: GEMM1's.
    """
    parts = {op: (median_us(group), _evidence(group)) for op, group in _own_point(rows, tokens)}
    if len(parts) < 2:
        return _frame([], POINT)
    (us1, facts), (us2, facts2) = parts["gemm1"], parts["gemm2"]
    both = {name: (us1[name], us2[name]) for name in us1 if name in us2 and _at_point(name)}
    found = []
    for variant, (first, second) in both.items():
        line = {"variant": variant, "us": first + second, "GEMM1 us": first, "GEMM2 us": second}
        line |= {"tiles / this": sum(both.get(names.tiles_of(variant), [math.nan])) / (first + second)}
        found.append(line | _grid_of(variant, facts.get(variant, {})) | _second(facts2.get(variant, {})))
    return _frame(found, POINT)


def _own_point(rows: pd.DataFrame, tokens: int) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each GEMM of the source's own case."""
    for op in ("gemm1", "gemm2"):
        for params, group in cases(rows, op):
            if (params["model"], params["weights"], params["T"]) == (QWEN35_35B.name, "INT4", tokens):
                yield op, group


TUNED_POINT = ["kernel", "GEMM", "tile", "us", "persistent tile", "persistent us", "ratio", "low", "high", "noise"]


def tuned_point(rows: pd.DataFrame, tokens: int = SOURCE_T) -> pd.DataFrame:
    """The source's own case, each GEMM and each grid with the fastest of the tiles that the source tunes over.

    ratio: one CTA a tile / persistent. A row a GEMM, where at least two tiles were timed in both grids.
    """
    found = []
    for op, group in _own_point(rows, tokens):
        us = median_us(group)
        for kernel, int8 in (("W4A16", False), ("W4A8", True)):
            timed = [
                {name: us[name] for name in names.tuned_over(grid, int8) if name in us}
                for grid in (names.TILES, names.PERSISTENT)
            ]
            if min(map(len, timed)) < 2:
                continue
            tiles, persistent = (min(some, key=some.__getitem__) for some in timed)
            line = {"kernel": kernel, "GEMM": op, "tile": _tile_of(tiles), "us": us[tiles]}
            line |= {"persistent tile": _tile_of(persistent), "persistent us": us[persistent]}
            found.append(line | compare_many(group, [(persistent, tiles)])[0].columns())
    return _frame(found, [*TUNED_POINT, "verdict"])


def _tile_of(variant: str) -> str:
    """Its size in words; the source's usual one where a name has none."""
    return ", ".join(word for word in variant.split(", ") if word.startswith(("BN=", "BK="))) or "usual"


def code(rows: pd.DataFrame, variants: Sequence[str], tokens: int = SOURCE_T) -> pd.DataFrame:
    """Evidence of some variants of the source's own case, a row a GEMM, with the version of Triton that compiled it."""
    found = []
    for op, group in _own_point(rows, tokens):
        facts = _evidence(group)
        known = [name for name in variants if facts.get(name, {}).get("loads")]
        found += [{"variant": v, "GEMM": op, "triton": group["triton"].iloc[0]} | facts[v] for v in known]
    return pd.DataFrame(found)


def _at_point(variant: str) -> bool:
    """The source's variants, and the lab's kernel."""
    return variant.startswith("source") or variant == names.OURS_TILES


def _grid_of(variant: str, known: dict[str, Any]) -> dict[str, float]:
    """Of GEMM1's kernel and grid."""
    live, blocks = known.get("live", math.nan), known.get("blocks", math.nan)
    launched = known.get("programs", math.nan) / known.get("sms", math.nan)
    return {
        "dead %": 0.0 if names.EARLY in variant or variant == names.OURS_TILES else 100 * (1 - live / blocks),
        "registers": known.get("registers", math.nan),
        "CTAs an SM": known.get("ctas_per_sm", math.nan),
        "launched an SM": launched if names.PERSISTENT in variant else math.nan,
        "8-bit loads": known.get("loads", {}).get("8", 0) if known.get("loads") else math.nan,
    }


def _second(known: dict[str, Any]) -> dict[str, float]:
    return {
        "GEMM2 registers": known.get("registers", math.nan),
        "GEMM2 CTAs": known.get("ctas_per_sm", math.nan),
    }


def filling(rows: pd.DataFrame) -> pd.DataFrame:
    """The source's persistent kernel: time with one program an SM over that with as many as fit, in every case.

    programs: of those, an SM; gain / programs: 1 if a program takes no longer beside others than alone; tiles / filled:
    time of one CTA a tile over that of as many programs as fit.
    """
    found = []
    for op in ("gemm1", "gemm2"):
        for params, group in cases(rows, op):
            us, facts = median_us(group), _evidence(group)
            if not {names.BASE, names.FILLED_BASE} <= set(us):
                continue
            [result] = compare_many(group, [(names.FILLED_BASE, names.BASE)])
            known = facts[names.FILLED_BASE]
            programs = known.get("programs", math.nan) / known.get("sms", math.nan)
            line = _case(params) | {"GEMM": op, "us": us[names.FILLED_BASE], "against us": us[names.BASE]}
            line |= {"programs": programs, "gain / programs": result.ratio.mid / programs}
            line |= {"tiles / filled": us.get(names.source(16, names.TILES), math.nan) / us[names.FILLED_BASE]}
            found.append(line | result.columns())
    columns = [*CASE, "GEMM", "us", "against us", "programs", "gain / programs", "tiles / filled", *RATIO]
    return _frame(found, columns)


ORDER = [*CASE, "GEMM", "groups of", "MB an expert", "us", "registers", "as groups of 1", "L2 hits %", "DRAM / weights"]
ORDER += RATIO


def order(rows: pd.DataFrame) -> pd.DataFrame:
    """GROUP_SIZE_M of the source's persistent kernel: time with groups of 1 over this, and what was counted of the L2.

    L2 hits: of the sectors read, those that did not come from memory. DRAM / weights: bytes read from memory over
    those of the experts that got a token. as groups of 1: whether the code has as many registers, as far as is known;
    if not, the compiler made something else of it, and the ratio is not the order's.
    """
    by_size = {size: names.grouped(size) for size in names.GROUPS}
    found = []
    for op in ("gemm1", "gemm2"):
        for params, group in cases(rows, op):
            us = median_us(group)
            if by_size[1] not in us:
                continue
            counters, facts = dict(zip(group["variant"], group["counters"], strict=True)), _evidence(group)
            x, registers = Case(op, params), {size: facts.get(v, {}).get("registers") for size, v in by_size.items()}
            for size, variant in by_size.items():
                if variant not in us:
                    continue
                [result] = compare_many(group, [(variant, by_size[1])])
                line = _case(params) | {"GEMM": op, "groups of": size, "us": us[variant]}
                line |= {"MB an expert": work.weight_bytes(x) / work.active(x) / 1e6}
                line |= {"registers": registers[size] or math.nan, "as groups of 1": registers[size] == registers[1]}
                found.append(line | _l2(counters[variant], work.weight_bytes(x)) | result.columns())
    return _frame(found, ORDER)


def _l2(text: str, weight_bytes: int) -> dict[str, float]:
    counted = json.loads(text)
    memory, sectors = counted.get("dram_read_bytes"), counted.get("l2_read_sectors")
    if not memory or not sectors:
        return {"L2 hits %": math.nan, "DRAM / weights": math.nan}
    return {"L2 hits %": 100 * (1 - memory / (SECTOR * sectors)), "DRAM / weights": memory / weight_bytes}


def dead(rows: pd.DataFrame) -> pd.DataFrame:
    """Blocks of the worst-case grid that no token is in, and what leaving them off is worth, by grid."""
    found = []
    grids = [(names.TILES,), (names.PERSISTENT,), (names.PERSISTENT, names.FILLED)]
    for op in ("gemm1", "gemm2"):
        for params, group in cases(rows, op):
            us, facts = median_us(group), _evidence(group)
            for grid, *more in grids:
                before, after = names.source(16, grid, *more), names.source(16, grid, names.EARLY, *more)
                if before not in us or after not in us:
                    continue
                known = facts[before]
                live, blocks = known.get("live", math.nan), known.get("blocks", math.nan)
                [result] = compare_many(group, [(after, before)])
                line = _case(params) | {
                    "GEMM": op,
                    "grid": ", ".join([grid, *more]),
                    "dead %": 100 * (1 - live / blocks),
                }
                found.append(line | result.columns())
    return _frame(found, [*CASE, "GEMM", "grid", "dead %", *RATIO])


STEPS = ["T", "SMs", "grid", "tiles", "CTAs an SM", "waves", "whole waves", "us", "us a wave", "predicted", "measured"]


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """The GEMM of few tiles on parts of the GPU: µs against whole waves, and the ratio to the whole GPU's time.

    predicted, measured: time on these multiprocessors over that on all of them; NaN for all of them.
    """
    found = []
    for params, group in cases(rows, "waves"):
        us, facts = median_us(group), _evidence(group)
        for grid in (names.TILES, names.PERSISTENT):
            whole = names.limited(0, grid)
            for sms in names.SMS:
                variant = names.limited(sms, grid)
                known = facts.get(variant, {})
                if variant not in us or not {"seen", "tiles"} <= set(known):
                    continue
                slots, tiles = known["seen"] * known.get("ctas_per_sm", 1), known["tiles"]
                count = math.ceil(tiles / slots)
                line = {"T": params["T"], "SMs": known["seen"], "grid": grid, "tiles": tiles}
                line |= {"CTAs an SM": known.get("ctas_per_sm", 1), "waves": tiles / slots, "whole waves": count}
                line |= {
                    "us": us[variant],
                    "us a wave": us[variant] / count,
                    "predicted": math.nan,
                    "measured": math.nan,
                }
                if sms and whole in us and "seen" in facts[whole]:
                    all_slots = facts[whole]["seen"] * facts[whole].get("ctas_per_sm", 1)
                    line["predicted"] = waves.predicted_ratio(tiles, all_slots, slots)
                    line["measured"] = us[variant] / us[whole]
                found.append(line)
    return _frame(found, STEPS)


def persistent_on_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """One CTA a tile / persistent on each part of the GPU: does the persistent grid pay more where SMs are fewer?"""
    found = []
    for params, group in cases(rows, "waves"):
        us, facts = median_us(group), _evidence(group)
        for sms in names.SMS:
            tiles, persistent = (names.limited(sms, grid) for grid in (names.TILES, names.PERSISTENT))
            if tiles in us and persistent in us and "seen" in facts[tiles]:
                [result] = compare_many(group, [(persistent, tiles)])
                found.append({"T": params["T"], "SMs": facts[tiles]["seen"]} | result.columns())
    return _frame(found, ["T", "SMs", *RATIO])


def on_other_gpus(rows: pd.DataFrame) -> pd.DataFrame:
    """Waves of the source's grid of one CTA a tile on GPUs of other sizes, by arithmetic; tiles as they were here."""
    table = persistence(rows)
    table = table[(table["kernel"] == names.source(16, names.TILES).removesuffix(f", {names.TILES}"))]
    table = table[table["CTAs an SM"].notna()]
    found = []
    for _, line in table.iterrows():
        for gpu, (count, share) in waves.on_gpus(int(line["tiles"]), int(line["CTAs an SM"])).items():
            found.append(
                {name: line[name] for name in (*CASE, "GEMM")} | {"GPU": gpu, "waves": count, "efficiency": share}
            )
    return _frame(found, [*CASE, "GEMM", "GPU", "waves", "efficiency"])


ROUTED = ["us", "active", "most / mean", "BM", "blocks", "TFLOP/s", "TB/s", "over uniform", "by", *RATIO]


def routings(rows: pd.DataFrame) -> pd.DataFrame:
    """Our layer under each synthetic routing, where several were timed: against the uniform one, and the fastest other.

    over uniform: µs over those of the uniform routing, of another case, so without an interval. ratio: time of the
    fastest other layer, `by`, over ours, in this case. blocks: of BM rows, of the expert that got the most.
    """
    table = times(rows)
    table = table[table["variant"] == names.OURS]
    shape = ["model", "weights", "T"]
    base = table[table["routing"] == KINDS[0]].set_index(shape)["us"]
    several = table.groupby(shape)["routing"].transform("nunique") > 1 if len(table) else []
    table = table[several].copy() if len(table) else table
    index = pd.MultiIndex.from_frame(table[shape])
    table["over uniform"] = table["us"].to_numpy() / base.reindex(index).to_numpy() if len(table) else []
    table["most / mean"] = [max(some) * len(some) / sum(some) for some in _counts(table)]
    sizes = _blocks_m(rows)
    table["BM"] = [float(sizes.get(tuple(line), math.nan)) for line in table[CASE].itertuples(index=False)]
    table["blocks"] = np.ceil([max(some) / size for some, size in zip(_counts(table), table["BM"], strict=True)])
    table = table.merge(against_best(rows), how="left", on=CASE)
    return table[[*CASE, *ROUTED]].reset_index(drop=True)


def _counts(table: pd.DataFrame) -> list[tuple[int, ...]]:
    """Slots of each expert, for each line of a table of cases."""
    models = [MODELS[name] for name in table["model"]]
    both = zip(table["routing"], table["T"], models, strict=True)
    return [work.counts(kind, int(tokens), model.experts, model.top_k) for kind, tokens, model in both]


def _blocks_m(rows: pd.DataFrame) -> dict[tuple, int]:
    """Rows of a block of our layer in each case whose evidence has its configuration; 1 where it has no tiles."""
    some = rows[(rows["op"] == "layer") & (rows["variant"] == names.OURS) & rows["ok"]]
    found = {}
    for key, text in zip(some["case"], some["evidence"], strict=True):
        if config := json.loads(text).get("config"):
            found[tuple(_case(json.loads(key)).values())] = 1 if config.get("rows") else config["block_m"]
    return found


PREDICTED = [*CASE, "us", "predicted us", "off %", "BM", "reading us", "products us", "over both %"]


def predictions(rows: pd.DataFrame) -> pd.DataFrame:
    """Our layers: measured over predicted time, and over the sum of what the prediction takes the larger of.

    reading: weights of the active experts at the read ceiling; products: of whole blocks, since every expert's rows are
    padded to BM, at theirs. over both: as if neither hid the other.
    """
    read_tbs, tflops = ceilings(rows)
    sizes, found = _blocks_m(rows), []
    for params, group in cases(rows, "layer"):
        ours = group[(group["variant"] == names.OURS) & group["ok"] & group["predicted_us"].notna()]
        if ours.empty:
            continue
        x, us, predicted = Case("layer", params), median_us(ours)[names.OURS], ours["predicted_us"].iloc[0]
        block_m = sizes.get(tuple(_case(params).values()), math.nan)
        padded = (
            experts_blocks.blocks(work.counts_of(x), block_m) * block_m / sum(work.counts_of(x))
            if block_m > 0
            else math.nan
        )
        line = _case(params) | {"us": us, "predicted us": predicted, "off %": 100 * (us / predicted - 1), "BM": block_m}
        line |= {
            "reading us": work.weight_bytes(x) / read_tbs / 1e6,
            "products us": padded * work.flops(x) / tflops / 1e6,
        }
        both = line["reading us"] + line["products us"]
        found.append(line | {"over both %": 100 * (us / both - 1)})
    return _frame(found, PREDICTED)


def tuned_up_to(rows: pd.DataFrame) -> int:
    """The most tokens for which candidates were timed; 0 if none were."""
    return max((json.loads(key)["T"] for key in set(rows[rows["op"] == "tune"]["case"])), default=0)


def tuning_seconds(rows: pd.DataFrame) -> pd.Series:
    """Seconds from the start of one shape's tuning to that of the next, in the order of measuring; compiling apart."""
    tuned = rows[rows["op"] == "tune"]
    starts = pd.to_datetime(tuned["utc"]).groupby(tuned["case"]).min().sort_values()
    return starts.diff().dt.total_seconds().dropna()


def loop_gain(rows: pd.DataFrame) -> pd.DataFrame:
    """The loop over experts, over ours, in every case."""
    return compared(rows, "layer", names.OURS, names.LOOP)


def best_tflops(rows: pd.DataFrame, variant: str, model: str = QWEN3_30B.name) -> float:
    """The most TFLOP/s of a variant of the layer of a model; NaN if it did not run."""
    table = times(rows)
    table = table[(table["variant"] == variant) & (table["model"] == model)]
    return float(table["TFLOP/s"].max()) if len(table) else math.nan
