"""Tables of the study: what the notebook shows and the claims are judged by, made from the measured rows."""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench import ledger
from labkit.bench.records import expanded, read
from labkit.bench.spec import Case
from labkit.bench.tables import RATIO, chosen, facts, frame, pairs, picked, timed, where
from labkit.bench.tables import against_best as best_against_best
from labkit.bench.tables import cases as cases_by
from labkit.bench.tables import compared as compared_in
from labkit.bench.tables import fastest as fastest_of
from labkit.bench.verdict import WORDS, geometric_mean, median_us
from labkit.kernels.experts import blocks as experts_blocks
from labkit.kernels.experts import choose
from labkit.kernels.experts.choose import Choice, TileChoice
from labkit.studies.moe_persistent_grid import variants as names
from labkit.studies.moe_persistent_grid import waves, work
from labkit.studies.moe_persistent_grid.models import MODELS, QWEN35_35B
from labkit.studies.moe_persistent_grid.variants import GEMMS, KINDS, SOURCE_T, UNIFORM

CASE = ["model", "weights", "T", "routing"]


def fastest(path: Path, before: choose.Table = MappingProxyType({})) -> choose.Table:
    """The tuned table from the rows of a file: for each case the blocks whose two fastest GEMMs take the least.

    before: an earlier table, whose choices stay if they are about as fast (`tables.chosen`).
    """
    rows = read(path)
    table = expanded(rows[(rows["op"] == "tune") & rows["ok"] & (rows["role"] != "control")])
    found: choose.Table = {}
    shape = ["E", "top_k", "H", "I", "weights", "T"]
    for (*dims, weights, tokens), group in table.groupby(shape) if len(table) else ():
        key = (*map(int, dims), weights == "INT4")
        if config := _best_config(group, before.get(key, {}).get(int(tokens))):
            found.setdefault(key, {})[int(tokens)] = config
    return found


def _best_config(group: pd.DataFrame, before: Choice | None = None) -> Choice | None:
    """Of the candidates of one case; None if no size of blocks has both GEMMs."""
    us: dict[Choice, float] = {}
    for block_m, part in group.groupby("block_m"):
        one, two = (_taken(part[part["gemm"] == gemm]) for gemm in ("gemm1", "gemm2"))
        if not one or not two:
            continue
        wanted = {(min(one, key=one.__getitem__), min(two, key=two.__getitem__))}
        if before and before.block_m == block_m and before.gemm1 in one and before.gemm2 in two:
            wanted.add((before.gemm1, before.gemm2))
        us |= {Choice(int(block_m), gemm1=up, gemm2=down): one[up] + two[down] for up, down in wanted}
    return chosen(us, before)


def _taken(part: pd.DataFrame) -> dict[TileChoice, float]:
    """The tiles that were tried -> µs."""
    return {TileChoice(**tile): float(us) for tile, us in zip(part["tile"], part["us"], strict=True)}


def cases(rows: pd.DataFrame, op: str) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """Parameters and rows of every case of an operation, in the order of the pages: model, weights, tokens, routing."""
    models = [*MODELS]

    def place(params: dict[str, Any], group: pd.DataFrame) -> tuple:
        model = models.index(params["model"]) if params["model"] in models else len(models)
        return model, params["weights"], params["T"], KINDS.index(params["routing"])

    return cases_by(rows, op, place)


def _gemms(rows: pd.DataFrame) -> Iterator[tuple[Case, dict[str, Any], pd.DataFrame]]:
    """Every case of either GEMM, the columns that say which it is, and its rows."""
    for op in GEMMS:
        for params, group in cases(rows, op):
            yield Case(op, params), picked(params, CASE) | {"GEMM": op}, group


def _number(known: dict[str, Any], name: str) -> float:
    """Of a row's evidence; NaN where that has it not."""
    return known.get(name, math.nan)


def _dead(known: dict[str, Any]) -> float:
    """Percent of a grid's blocks that no token is in."""
    return 100 * (1 - _number(known, "live") / _number(known, "blocks"))


def ceilings(rows: pd.DataFrame) -> tuple[float, float]:
    """TB/s of reading and TFLOP/s of bf16 products, as this GPU's machine page has them; NaN where unknown."""
    bound = rows["floor_flops"] > work.BALANCE * rows["floor_bytes"]
    read_tbs, tflops = rows["ceiling"][~bound].max(), rows["ceiling"][bound].max()
    return float(read_tbs), float(tflops)


TIMES = [
    *CASE, "variant", "role", "mode", "us", "active", "TFLOP/s", "TB/s", "% of products", "% of reading",
]  # fmt: skip


def times(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a usable variant of a layer: µs, experts that got a token, and both rates beside both ceilings.

    TFLOP/s: of the products; TB/s: of the weights of those experts alone, each counted once.
    """
    read_tbs, tflops = ceilings(rows)
    found = []
    for params, group in cases(rows, "layer"):
        x = Case("layer", params)
        for line in timed(group).values():
            rates = {"TFLOP/s": work.flops(x) / line["us"] / 1e6, "TB/s": work.weight_bytes(x) / line["us"] / 1e6}
            rates |= {"% of products": 100 * rates["TFLOP/s"] / tflops, "% of reading": 100 * rates["TB/s"] / read_tbs}
            found.append(picked(params, CASE) | line | {"active": work.active(x)} | rates)
    return frame(found, TIMES)


def compared(rows: pd.DataFrame, variant: str, against: str) -> pd.DataFrame:
    """Time of `against` over that of `variant` in every layer that has both."""
    return compared_in(cases(rows, "layer"), variant, against, CASE)


def released_grids(rows: pd.DataFrame) -> pd.DataFrame:
    """ExecuTorch's own layer: time of one CTA a tile over that of the persistent grid, above 1 where that is faster."""
    found = []
    for int8, activations in ((False, "W4A16"), (True, "W4A8")):
        tiles, persistent = (names.released(grid, int8) for grid in (names.TILES, names.PERSISTENT))
        found.append(compared(rows, persistent, tiles).assign(activations=activations))
    table = pd.concat([part for part in found if len(part)] or found[:1], ignore_index=True)
    return table.reindex(columns=["T", "activations", "against us", "us", *RATIO, "runs"])


def narrow_blocks(rows: pd.DataFrame) -> pd.DataFrame:
    """ExecuTorch's own layer: time in blocks of 16 rows over that in its own of 64, above 1 where these are faster."""
    found = [
        compared(rows, names.released(names.TILES, int8), narrow).assign(activations="W4A8" if int8 else "W4A16")
        for int8, narrow in zip((False, True), names.NARROW, strict=True)
    ]
    table = pd.concat([part for part in found if len(part)] or found[:1], ignore_index=True)
    return table.reindex(columns=["T", "activations", "against us", "us", *RATIO, "runs"])


def beside_released(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of the fastest form of ExecuTorch's own INT4 layer, persistent or not, over ours; `by`: which."""
    table = best_against_best(cases(rows, "layer"), [names.OURS], [names.PER_PAIR, *names.RELEASED], CASE)
    table = table.rename(columns={"against": "by", "against us": "by µs", "us": "ours µs"})
    return table[["T", "by", "by µs", "ours µs", *RATIO]]


def against_best(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of the fastest rival over ours, of layers that are not quantised; above 1: ours is faster.

    `by`: who that is; one that is timed eagerly is named so.
    """
    plain = [(params, group) for params, group in cases(rows, "layer") if params["weights"] != "INT4"]
    table = best_against_best(plain, [names.OURS], names.RIVALS, CASE)
    table = table.rename(columns={"against": "by", "against us": "by µs", "us": "ours µs"})
    return table[[*CASE, "by", "by µs", "ours µs", *RATIO]]


BESIDE = [*CASE, "engine", "configuration", "engine µs", "ours µs", *RATIO]


def beside_engines(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of each engine's own layer over that of ours, all weights and routings; above 1: ours is faster.

    configuration: of its products: "shipped" for this GPU and these experts, or the "default" of its own rule.
    """
    found = []
    for params, group in cases(rows, "layer"):
        known = facts(group)
        for line in pairs(group, [(names.OURS, engine) for engine in names.ENGINES]):
            shipped = known[line["against"]].get("config", {}).get("shipped")
            line |= {"engine": names.ENGINES[line["against"]], "configuration": "shipped" if shipped else "default"}
            found.append(picked(params, CASE) | line | {"engine µs": line["against us"], "ours µs": line["us"]})
    return frame(found, BESIDE)[BESIDE]


def int4_reading(rows: pd.DataFrame) -> pd.DataFrame:
    """The two GEMMs of our INT4 layer together: percent of the read ceiling, and of reading in the same run.

    Of each GEMM the faster of its grids; only cases that have both GEMMs.
    """
    parts: dict[tuple, list[tuple[float, float, float]]] = {}
    read_tbs, _ = ceilings(rows)
    for x, _, group in _gemms(rows):
        us = median_us(group)
        own = fastest_of(us, (names.OURS_TILES, names.OURS_PERSISTENT, names.OURS_FILLED))
        if x["weights"] == "INT4" and own:
            line = (work.weight_bytes(x), us[own], us.get(names.READ, math.nan))
            parts.setdefault(tuple(x[name] for name in CASE), []).append(line)
    found = []
    for case, both in parts.items():
        if len(both) == 2:
            moved, us, reading = map(sum, zip(*both, strict=True))
            line = {"MB": moved / 1e6, "us": us, "TB/s": moved / us / 1e6}
            line |= {"% of reading": 100 * line["TB/s"] / read_tbs, "% of reading here": 100 * reading / us}
            found.append(dict(zip(CASE, case, strict=True)) | line)
    return frame(found, [*CASE, "MB", "us", "TB/s", "% of reading", "% of reading here"])


CODE = ["registers", "persistent registers", "CTAs an SM", "persistent CTAs"]
PERSISTENCE = [*CASE, "GEMM", "kernel", "persistent", "tiles", "waves", "efficiency", *CODE, *RATIO, "runs"]


def persistence(rows: pd.DataFrame) -> pd.DataFrame:
    """One CTA a tile / persistent of the same kernel, in every case of a GEMM; above 1: the persistent grid pays.

    waves: tiles of the first over CTAs that the GPU holds of it; efficiency: the share of its slots' time that is work.
    registers and CTAs that fit an SM: of the first, and of the persistent one, whose loop makes it other code.
    """
    found = []
    for _, said, group in _gemms(rows):
        known = facts(group)
        for line in pairs(group, [both[::-1] for both in (*names.PAIRS, *names.OWN_PAIRS)]):
            tiles, persistent = (known.get(line[name], {}) for name in ("against", "variant"))
            code = [_number(one, name) for name in ("registers", "ctas_per_sm") for one in (tiles, persistent)]
            count, slots = _number(tiles, "tiles"), _number(tiles, "ctas_per_sm") * _number(tiles, "sms") or math.nan
            line |= {"kernel": line["against"].removesuffix(f", {names.TILES}"), "persistent": line["variant"]}
            line |= {"tiles": count, "waves": count / slots, **dict(zip(CODE, code, strict=True))}
            line["efficiency"] = waves.efficiency(int(count), int(slots)) if slots == slots else math.nan
            found.append(said | line)
    return pd.DataFrame(found, columns=PERSISTENCE)


def same_bits(rows: pd.DataFrame) -> pd.DataFrame:
    """Whether a kernel gives the same bits in both grids, in every case of a GEMM; of the rows that were looked at."""
    found = []
    for _, said, group in _gemms(rows):
        bits = {variant: known.get("bits") for variant, known in facts(group).items()}
        for per_tile, persistent in names.PAIRS:
            if bits.get(per_tile) and bits.get(persistent):
                found.append(said | {"kernel": persistent, "same": bits[per_tile] == bits[persistent]})
    return frame(found, [*CASE, "GEMM", "kernel", "same"])


WORTH = ["change", "activations", "mean ratio", "least", "most", "cases", *WORDS]


def worth(rows: pd.DataFrame) -> pd.DataFrame:
    """Time before / after each change of ExecuTorch's own products, over all cases that have both; above 1: it pays.

    A line a change and kind of activations: mean, least and most, and in how many cases it pays or not.
    """
    found = []
    for (change, activations), part in own_products(rows).groupby(["change", "activations"], sort=False):
        counts, ratio = part["verdict"].value_counts(), part["ratio"]
        line = {"change": change, "activations": activations, "mean ratio": geometric_mean(ratio)}
        line |= {"least": ratio.min(), "most": ratio.max(), "cases": len(part)}
        found.append(line | {word: int(counts.get(word, 0)) for word in WORDS})
    return frame(found, WORTH)


POINT = [
    "variant", "µs, both", "GEMM1 µs", "GEMM2 µs", "tiles / this", "dead %", "registers", "CTAs an SM",
    "launched an SM", "8-bit loads", "GEMM2 registers", "GEMM2 CTAs",
]  # fmt: skip


def source_point(rows: pd.DataFrame) -> pd.DataFrame:
    """The source's own case by variant: µs of each GEMM and of both; what its grid works on, and what its code is.

    Of ExecuTorch's own products, and of ours. `tiles / this`: time of the same kernel with one CTA a tile over this
    one, each of which has tuned itself. dead: of the blocks that are worked on.
    launched an SM: programs of a persistent grid. Where no GEMM is named: GEMM1's.
    """
    parts = {op: (median_us(group), facts(group)) for op, group in _own_point(rows)}
    if len(parts) < 2:
        return frame([], POINT)
    (us1, facts1), (us2, facts2) = parts["gemm1"], parts["gemm2"]
    both = {
        name: (us1[name], us2[name])
        for name in us1
        if name in us2 and name in (names.OURS_TILES, *names.RELEASED_GEMMS)
    }
    found = []
    for variant, (first, second) in both.items():
        line = {"variant": variant, "µs, both": first + second, "GEMM1 µs": first, "GEMM2 µs": second}
        line |= {"tiles / this": sum(both.get(names.tiles_of(variant), [math.nan])) / (first + second)}
        known, known2 = facts1.get(variant, {}), facts2.get(variant, {})
        early = names.LIVE in variant or variant == names.OURS_TILES
        line |= {"dead %": 0.0 if early else _dead(known), "launched an SM": math.nan, "8-bit loads": math.nan}
        line |= {"registers": _number(known, "registers"), "CTAs an SM": _number(known, "ctas_per_sm")}
        if names.PERSISTENT in variant:
            line["launched an SM"] = _number(known, "programs") / _number(known, "sms")
        if known.get("loads"):
            line["8-bit loads"] = known["loads"].get("8", 0)
        line |= {"GEMM2 registers": _number(known2, "registers"), "GEMM2 CTAs": _number(known2, "ctas_per_sm")}
        found.append(line)
    return pd.DataFrame(found, columns=POINT)


POINT_CHANGES = {  # of both products together -> the form of a launch after it, and before
    "as many CTAs as fit, not one an SM": (f"{names.PERSISTENT}, {names.FILLED}", names.PERSISTENT),
    "as many CTAs as fit, not one CTA a tile": (f"{names.PERSISTENT}, {names.FILLED}", names.TILES),
    "no empty blocks, not all": (f"{names.TILES}, {names.LIVE}", names.TILES),
}
LAB_THERE = "Lab's products against ExecuTorch's fastest"
POINT_RATIOS = ["activations", "change", "variant", "against", "us", "against us", "ratio"]


def point_ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """Both products of the source's own case: µs of `against` over those of `variant`; above 1: `variant` is faster.

    ExecuTorch's own with each of `POINT_CHANGES`, where its activations ran in both grids, and ours against the fastest
    of these. No intervals: the two products are timed one after the other.
    """
    us = source_point(rows).set_index("variant")["µs, both"]
    pairs = []
    for activations, int8 in (("W4A16", False), ("W4A8", True)):
        if {names.released(names.TILES, int8), names.released(names.PERSISTENT, int8)} <= set(us.index):
            pairs += [
                (activations, change, *(names.released(form, int8) for form in forms))
                for change, forms in POINT_CHANGES.items()
            ]
    if len(others := us.drop(names.OURS_TILES, errors="ignore")):
        pairs.append(("", LAB_THERE, names.OURS_TILES, others.idxmin()))
    found = [
        (*pair, us[pair[2]], us[pair[3]], us[pair[3]] / us[pair[2]]) for pair in pairs if set(pair[2:]) <= set(us.index)
    ]
    return pd.DataFrame(found, columns=POINT_RATIOS)


def _own_point(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each GEMM of the source's own case."""
    for x, _, group in _gemms(rows):
        if (x["model"], x["weights"], x["T"]) == (QWEN35_35B.name, "INT4", SOURCE_T):
            yield x.op, group


OWN = ["T", "GEMM", "activations", "change", "us", "against us", "dead %", "CTAs an SM", "same code", *RATIO]


def own_products(rows: pd.DataFrame) -> pd.DataFrame:
    """ExecuTorch's own products alone: time before / after each thing that a launch of them decides; above 1: it pays.

    dead: of the grid's blocks; CTAs an SM: that fit, of the code before. same code: whether both have as many
    registers, as far as is known: each grid is tuned, and for groups of 1 the compiler may make something else.
    """
    changes = {}  # (after, before) -> activations and change
    for int8, (change, both) in product((False, True), names.OWN_CHANGES.items()):
        after, before = (names.released(", ".join(words), int8) for words in both)
        changes[after, before] = {"activations": "W4A8" if int8 else "W4A16", "change": change}
    found = []
    for x, said, group in _gemms(rows):
        known = facts(group)
        for line in pairs(group, changes):
            after, before = line["variant"], line["against"]
            line |= {"T": x["T"], "GEMM": said["GEMM"], "dead %": _dead(known[before])} | changes[after, before]
            line["same code"] = known[after].get("registers") == known[before].get("registers")
            found.append(line | {"CTAs an SM": _number(known[before], "ctas_per_sm") or math.nan})
    return frame(found, OWN)[OWN]


def code(rows: pd.DataFrame, variants: Sequence[str]) -> pd.DataFrame:
    """Evidence of some variants of the source's own case, a row a GEMM, with the version of Triton that compiled it."""
    found = []
    for op, group in _own_point(rows):
        known = facts(group)
        shown = {"GEMM": op, "triton": group["triton"].iloc[0]}
        found += [{"variant": v} | shown | known[v] for v in variants if known.get(v, {}).get("loads")]
    return pd.DataFrame(found)


STEPS = ["T", "SMs", "grid", "tiles", "CTAs an SM", "waves", "whole waves", "us", "us a wave", "predicted", "measured"]


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """The GEMM of few tiles on parts of the GPU: µs against whole waves, and the ratio to the whole GPU's time.

    predicted, measured: time on these multiprocessors over that on all of them; NaN for all of them.
    """
    found = []
    for params, group in cases(rows, "waves"):
        us, known = median_us(group), facts(group)
        for grid in names.GRIDS:
            whole = known.get(names.limited(0, grid), {})
            for sms in names.SMS:
                variant = names.limited(sms, grid)
                one = known.get(variant, {})
                if variant not in us or not {"seen", "tiles"} <= set(one):
                    continue
                per_sm, tiles = one.get("ctas_per_sm", 1), one["tiles"]
                slots = one["seen"] * per_sm
                count = math.ceil(tiles / slots)
                line = {"T": params["T"], "SMs": one["seen"], "grid": grid, "tiles": tiles, "CTAs an SM": per_sm}
                line |= {
                    "waves": tiles / slots,
                    "whole waves": count,
                    "us": us[variant],
                    "us a wave": us[variant] / count,
                }
                if sms and "seen" in whole:
                    all_slots = whole["seen"] * whole.get("ctas_per_sm", 1)
                    line["predicted"] = waves.predicted_ratio(tiles, all_slots, slots)
                    line["measured"] = us[variant] / us[names.limited(0, grid)]
                found.append(line)
    return pd.DataFrame(found, columns=STEPS)


def persistent_on_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """One CTA a tile / persistent on each part of the GPU: does the persistent grid pay more where SMs are fewer?"""
    both = {names.limited(sms, names.PERSISTENT): names.limited(sms, names.TILES) for sms in names.SMS}
    found = []
    for params, group in cases(rows, "waves"):
        known = facts(group)
        for line in pairs(group, both.items()):
            if "seen" in known[line["against"]]:
                found.append({"T": params["T"], "SMs": known[line["against"]]["seen"]} | line)
    return pd.DataFrame(found, columns=["T", "SMs", *RATIO, "runs"])


def on_other_gpus(rows: pd.DataFrame) -> pd.DataFrame:
    """Waves of ExecuTorch's own products, one CTA a tile, on GPUs of other sizes, by arithmetic; tiles as here."""
    table = where(persistence(rows), persistent=[persistent for _, persistent in names.OWN_PAIRS])
    table = table[table["CTAs an SM"].notna()]
    found = []
    for _, line in table.iterrows():
        for gpu, (count, share) in waves.on_gpus(int(line["tiles"]), int(line["CTAs an SM"])).items():
            found.append({**line[[*CASE, "GEMM", "kernel"]], "GPU": gpu, "waves": count, "efficiency": share})
    return frame(found, [*CASE, "GEMM", "kernel", "GPU", "waves", "efficiency"])


ROUTED = ["us", "active", "most / mean", "BM", "blocks", "TFLOP/s", "TB/s", "over uniform", "by", *RATIO]


def routings(rows: pd.DataFrame) -> pd.DataFrame:
    """Our layer under each synthetic routing, where several were timed: against the uniform one, and the fastest other.

    over uniform: µs over those of the uniform routing, of another case, so without an interval. ratio: time of the
    fastest other layer, `by`, over ours, in this case. blocks: of BM rows, of the expert that got the most.
    """
    shape, table = ["model", "weights", "T"], where(times(rows), variant=names.OURS)
    base = where(table, routing=UNIFORM).set_index(shape)["us"]
    table = table[table.groupby(shape)["routing"].transform("nunique") > 1] if len(table) else table
    if table.empty:
        return frame([], [*CASE, *ROUTED])
    known = {
        tuple(picked(params, CASE).values()): (work.counts_of(Case("layer", params)), _block_m(group))
        for params, group in cases(rows, "layer")
    }
    counts, sizes = zip(*(known[line] for line in table[CASE].itertuples(index=False, name=None)), strict=True)
    uniform = base.reindex(pd.MultiIndex.from_frame(table[shape])).to_numpy()
    most = np.array([max(some) for some in counts])
    table = table.assign(
        **{"over uniform": table["us"].to_numpy() / uniform, "BM": sizes, "blocks": np.ceil(most / np.array(sizes))},
        **{"most / mean": most * [len(some) / sum(some) for some in counts]},
    )
    return table.merge(against_best(rows), how="left", on=CASE)[[*CASE, *ROUTED]]


DESIGNED = [*CASE, "us", "against us", *RATIO, "beside", "reading %", "same bits"]


def designs(rows: pd.DataFrame, by: str, instead_of: str = names.OURS) -> pd.DataFrame:
    """Time of a layer over that by another design, in every case that has both. by, instead_of: variants.

    beside: time of torch's grouped product, with Triton around, over the design's; reading %: what reading the weights
    takes of its time; same bits: whether both leave the same output.
    """
    found = []
    for params, group in cases(rows, "designs"):
        us, known = median_us(group), facts(group)
        for line in pairs(group, [(by, instead_of)]):
            times = {name: us.get(name, math.nan) / us[by] for name in (names.GROUPED, names.READ)}
            line |= {"beside": times[names.GROUPED], "reading %": 100 * times[names.READ]}
            bits = [known[name].get("bits") for name in (by, instead_of)]
            found.append(picked(params, CASE) | line | {"same bits": None not in bits and len(set(bits)) == 1})
    return frame(found, DESIGNED).reindex(columns=DESIGNED)


def _block_m(group: pd.DataFrame) -> float:
    """Rows of a block of our layer in a case; 1 where it has no tiles, NaN where its evidence has no configuration."""
    config = facts(group).get(names.OURS, {}).get("config")
    return float(1 if config.get("rows") else config["block_m"]) if config else math.nan


PREDICTED = [*CASE, "us", "predicted us", "off %", "BM", "reading us", "products us", "over both %"]


def predictions(rows: pd.DataFrame) -> pd.DataFrame:
    """Our layers: measured over predicted time, and over the sum of what the prediction takes the larger of.

    reading: weights of the active experts at the read ceiling; products: of whole blocks, since every expert's rows are
    padded to BM, at theirs. over both: as if neither hid the other.
    """
    read_tbs, tflops = ceilings(rows)
    found = []
    for params, group in cases(rows, "layer"):
        ours = group[(group["variant"] == names.OURS) & group["ok"] & group["predicted_us"].notna()]
        if ours.empty:
            continue
        x, us, predicted = Case("layer", params), median_us(ours)[names.OURS], ours["predicted_us"].iloc[0]
        block_m, counts = _block_m(group), work.counts_of(x)
        padded = experts_blocks.blocks(counts, int(block_m)) * block_m if block_m == block_m else math.nan
        reading = work.weight_bytes(x) / read_tbs / 1e6
        products = padded / sum(counts) * work.flops(x) / tflops / 1e6
        line = {"us": us, "predicted us": predicted, "off %": 100 * (us / predicted - 1), "BM": block_m}
        line |= {"reading us": reading, "products us": products, "over both %": 100 * (us / (reading + products) - 1)}
        found.append(picked(params, CASE) | line)
    return frame(found, PREDICTED)


def tuned_up_to(rows: pd.DataFrame) -> int:
    """The most tokens for which candidates were timed; 0 if none were."""
    return max((json.loads(key)["T"] for key in set(rows[rows["op"] == "tune"]["case"])), default=0)


ledger.watch(__name__)
