"""Tables of the study: what the notebook shows and the claims are judged by, made from the measured rows."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd

from labkit.bench import ledger
from labkit.bench.records import expanded, read
from labkit.bench.spec import CONTROL
from labkit.bench.tables import (
    COMPARED,
    RATIO,
    Params,
    best_pair,
    cases,
    chosen,
    compared,
    facts,
    frame,
    pairs,
    picked,
    timed,
)
from labkit.bench.tables import fastest as fastest_of
from labkit.bench.verdict import WORDS, Samples, geometric_mean, median_us, ratio
from labkit.kernels.gemv import choose
from labkit.kernels.gemv.choose import Choice
from labkit.shapes import LINEAR
from labkit.studies.gemv_coalescing import variants as names

SHAPE = ["dtype", "N", "K"]
ALLOWED_US = 1.0  # beyond the bytes at the ceiling and an empty kernel
LARGE_MB = 16
STEPS = ("ns a step, W [N, K]", "ns a step, W [K, N]")
CHAIN_COLUMNS = (
    "model", "variant", "us", "tbs", "% of ceiling", "% of reading W", "GEMVs", "beyond reading", "at most",
    *RATIO,
)  # fmt: skip
PATTERN_COLUMNS = ("dtype", "N", "K", "MB", "CTAs an SM", *STEPS, "look-ups, ns", "pattern alone", "with width")
RESIDENT = "CTAs an SM, at most"
UNITS = {"us": "µs", "tbs": "TB/s", "percent": "% of ceiling"}  # headings of columns
CEILING = "all bytes at the read ceiling"
STREAMS = {names.CHAIN_OURS: "GEMVs alone", names.BETWEEN_OURS: "with small kernels between"}  # in `of_ceiling`
RULE_ROWS = 4096  # the pull request's rule: one row a group up to so many rows of W, else four


def fastest(
    path: Path, before: Mapping[str, Mapping[tuple[int, int, int], Choice]] = MappingProxyType({})
) -> dict[tuple[int, int, int], dict[str, Choice]]:
    """(N, K, bytes of a value) -> the candidate that was fastest with cold and, where it was timed, with hot L2.

    before: those of earlier, cold and hot, which stay if they are about as fast (`tables.chosen`).
    """
    rows = read(path)
    table = expanded(rows[(rows["op"] == "tune") & rows["ok"] & (rows["role"] != "control")])
    found: dict[tuple[int, int, int], dict[str, Choice]] = {}
    for (n, k, dtype, cache), group in table.groupby(["N", "K", "dtype", "cache"]) if len(table) else ():
        us = {Choice(**json.loads(made)): taken for made, taken in zip(group["options"], group["us"], strict=True)}
        key = (int(n), int(k), names.SIZES[dtype])
        found.setdefault(key, {})[cache] = chosen(us, before.get(cache, {}).get(key))
    return found


def times(rows: pd.DataFrame, op: str = "gemv") -> pd.DataFrame:
    """A row a usable cold measurement: shape or model, variant, µs, TB/s of streamed bytes, percent of the ceiling."""
    table = expanded(rows[(rows["op"] == op) & (rows["cache"] == "cold") & rows["ok"]])
    table = table.reindex(columns=[*table, *(name for name in [*SHAPE, "model"] if name not in table)])
    table["tbs"] = table["floor_bytes"] / table["us"] / 1e6
    table["percent"] = 100 * table["tbs"] / table["ceiling"].max()
    table["MB"] = table["floor_bytes"] / 1e6
    return table.sort_values(["floor_bytes", "K"], kind="stable", ignore_index=True)


def by_variant(rows: pd.DataFrame) -> pd.DataFrame:
    """µs in bf16, one row a shape and one column a variant; index MB, N, K."""
    table = times(rows)
    return table[table["dtype"] == "bf16"].pivot_table(index=["MB", "N", "K"], columns="variant", values="us")


def _by_shape(rows: pd.DataFrame) -> pd.DataFrame:
    """The same, index N, K."""
    us = by_variant(rows)
    return us.droplevel("MB") if len(us) else us


def shapes(table: pd.DataFrame) -> list[str]:
    """Of every row, as the figures name them: "4096 × 2048"."""
    return [f"{n} × {k}" for n, k in zip(table["N"], table["K"], strict=True)]


def against_cublas(rows: pd.DataFrame, variant: str = names.OURS) -> pd.DataFrame:
    """Time of the better of torch.mv and F.linear over that of `variant`, with interval and verdict, for every shape.

    Columns `allowed µs` (bytes at the ceiling + the cheaper empty kernel of the same run + 1 µs) and `within` it too;
    `read µs`: reading W and no more, in the same run.
    """
    found = []
    for params, group in cases(rows, "gemv"):
        if not (pair := best_pair(group, [variant], names.LIBRARY)):
            continue
        us, size = median_us(group), group["floor_bytes"].iloc[0]
        empty = min((us[name] for name in (names.EMPTY, names.EMPTY_DEPENDENT) if name in us), default=math.nan)
        allowed = size / group["ceiling"].max() / 1e6 + empty + ALLOWED_US
        line = {"MB": size / 1e6, "cuBLAS by": pair["against"], "cuBLAS µs": pair["against us"], "ours µs": pair["us"]}
        line |= {"ours TB/s": size / pair["us"] / 1e6, "allowed µs": allowed, "within": pair["us"] <= allowed}
        line |= {"read µs": us.get(names.READ, math.nan)}
        found.append(picked(params, SHAPE) | line | pair)
    return frame(found, [*SHAPE, "MB", "allowed µs", "read µs", "within", *COMPARED])


def other_choice(rows: pd.DataFrame) -> pd.DataFrame:
    """`compared` of the table's choice and that of a warm cache, where the two are not the same."""

    found = []
    for params, group in cases(rows, "gemv"):
        known = facts(group)
        cold, hot = (known.get(name, {}).get("choice") for name in (names.OURS, names.WARM))
        if cold != hot:
            found.append((params, group))
    return compared(found, names.OURS, names.WARM, SHAPE)


def chains(rows: pd.DataFrame) -> pd.DataFrame:
    """Every variant of every chain: µs, TB/s, percent of reading the same weights, and cuBLAS's time over it.

    `cuBLAS` is the faster caller of the same grouping (separate or merged), with kernels between if the variant has
    them; `at most` is its time over that of reading the weights, which no kernel can exceed. `beyond reading`: µs a
    GEMV that a chain takes longer than reading.
    """
    found = [line for params, group in cases(rows, "chain") for line in _chains(params["model"], group)]
    return pd.DataFrame(found, columns=list(CHAIN_COLUMNS))


def _chains(model: str, group: pd.DataFrame) -> list[dict]:
    us, size = median_us(group), group["floor_bytes"].iloc[0]
    reading = us.get(names.READ, math.nan)
    known = [one.name for one in names.CHAINS if one.name in us]
    both = [(name, fastest_of(us, _libraries(name))) for name in known if name != names.READ]
    ratios = {pair["variant"]: pair for pair in pairs(group, both)}
    found = []
    for name in known:
        tbs = size / us[name] / 1e6
        line = {"model": model, "variant": name, "us": us[name], "tbs": tbs}
        line |= {"% of ceiling": 100 * tbs / group["ceiling"].max(), "% of reading W": 100 * reading / us[name]}
        if name != names.READ:
            count = sum(len(ns) for _, ns in LINEAR[model].chain(_is_merged(name)))
            line |= {"GEMVs": count, "beyond reading": (us[name] - reading) / count}
        if name in ratios:
            line |= {"at most": ratios[name]["against us"] / reading} | picked(ratios[name], RATIO)
        found.append(line)
    return found


def of_ceiling(rows: pd.DataFrame, model: str, variants: Sequence[str]) -> pd.DataFrame:
    """A model's chain at the read ceiling over its time as measured, by variant: `ratio`, with its interval.

    `variant` is named by what stands between the GEMVs (`STREAMS`).
    """
    found = []
    for _, group in cases(rows, "chain", model=model):
        least = group["floor_bytes"].iloc[0] / group["ceiling"].max() / 1e3
        for variant in variants if least == least else ():
            own = group[group["variant"] == variant]
            at_ceiling = own.assign(variant=CEILING, samples_ns=[[least] * len(run) for run in own["run"]])
            lines = pairs(pd.concat([group, at_ceiling]), [(variant, CEILING)])
            found += [line | {"variant": STREAMS.get(variant, variant)} for line in lines]
    return frame(found, ["variant", *COMPARED])


def _is_merged(name: str) -> bool:
    return name.endswith(names.merged(""))


def _libraries(name: str) -> list[str]:
    """What a chain is compared with: the fastest of these."""
    how = names.merged if _is_merged(name) else names.separate
    return [names.BETWEEN_MV] if name in names.BETWEEN else list(map(how, names.LIBRARY))


def token_total(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """µs of all weights of one token under each rule for the rows of a program, by real layer counts.

    Rules: the pull request's (1 up to 4096 rows of W, else 4), one row and four rows, each with dependent launch and
    without; the best rows of each shape; the tuned table; cuBLAS. Matrices that share x are one. A rule is left out
    if a shape was not measured with it.
    """
    us, counts = _by_shape(rows), LINEAR[model].token()
    size = sum(count * n * k * names.SIZES["bf16"] for (n, k), count in counts.items())
    top = times(rows)["ceiling"].max()
    found = []
    for rule, variants in _rules().items():
        total = sum(count * _least(us, shape, variants(shape[0])) for shape, count in counts.items())
        if total == total:
            tbs = size / total / 1e6
            found.append({"rule": rule, "us": total, "tbs": tbs, "% of ceiling": 100 * tbs / top})
    return pd.DataFrame(found, columns=["rule", "us", "tbs", "% of ceiling"])


RULE, RULE_PLAIN = f"1 row up to N = {RULE_ROWS}, else 4", f"1 row up to N = {RULE_ROWS}, else 4, no dependent launch"
ONE, FOUR = "always 1 row", "always 4 rows"
ONE_PLAIN, FOUR_PLAIN = f"{ONE}, no dependent launch", f"{FOUR}, no dependent launch"
BEST, TUNED, CUBLAS = "best rows of each shape", "tuned table", "cuBLAS"


def _rules() -> dict[str, Callable[[int], Sequence[str]]]:
    """Rule -> N -> the variants of which it takes the fastest."""
    some, plain = names.rows_variant, names.plain_rows_variant
    return {
        RULE: lambda n: [some(1 if n <= RULE_ROWS else 4)],
        ONE: lambda n: [some(1)],
        FOUR: lambda n: [some(4)],
        BEST: lambda n: list(map(some, names.ROWS_CHOICES)),
        RULE_PLAIN: lambda n: [plain(1 if n <= RULE_ROWS else 4)],
        ONE_PLAIN: lambda n: [plain(1)],
        FOUR_PLAIN: lambda n: [plain(4)],
        TUNED: lambda n: [names.OURS],
        CUBLAS: lambda n: list(names.LIBRARY),
    }


def _least(us: pd.DataFrame, shape: tuple[int, int], variants: Sequence[str]) -> float:
    """The least time of the variants at a shape; NaN if none was measured."""
    known = [name for name in variants if name in us]
    return float(us.loc[shape, known].min()) if known and shape in us.index else math.nan


def token_blocks(rows: pd.DataFrame, model: str, merged: bool) -> pd.DataFrame:
    """All weights of one token as rows of one case, for `pairs`: a row a rule, the time of a block that of all weights.

    A block's time is the sum over the shapes, by real layer counts, of what each took in the block of that number and
    process; blocks that a shape lacks are left out. So the times that two rules take at a shape are of one block. The
    A/A control is the sum of the shapes' controls. Rules that choose among several variants are left out.
    """
    counts, found = LINEAR[model].token(merged), []
    groups = {(params["N"], params["K"]): group for params, group in cases(rows, "gemv", dtype="bf16")}
    for rule, variants in (_rules() | {CONTROL: lambda n: [CONTROL]}).items():
        wanted = [(count, shape, variants(shape[0])) for shape, count in counts.items()]
        if any(shape not in groups or len(some) > 1 for _, shape, some in wanted):
            continue
        total = sum(count * _blocks(groups[shape], one) for count, shape, (one,) in wanted).dropna()
        if len(total):
            run, block = (total.index.get_level_values(name).to_numpy() for name in ("run", "block"))
            line = {"variant": rule, "ok": True, "run": run, "block": block, "samples_ns": total.to_numpy()}
            mode = next(iter(groups.values()))["mode"].iloc[0]  # of all single GEMVs
            found.append(line | {"mode": mode, "options": json.dumps({"repeats": TUNED})})
    return frame(found, ["variant", "ok", "run", "block", "samples_ns", "mode", "options"])


def _blocks(group: pd.DataFrame, variant: str) -> pd.Series:
    """ns of a variant in each block of a case; index run, block. Empty if it was not measured."""
    own = group[(group["variant"] == variant) & group["ok"]].iloc[:1]
    run, block, ns = (own[name].iloc[0] if len(own) else [] for name in ("run", "block", "samples_ns"))
    return pd.Series(np.asarray(ns, float), index=pd.MultiIndex.from_arrays([run, block], names=["run", "block"]))


def from_chain(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """µs of all weights of one token twice: the sum of single GEMVs, and whole layers in a chain + output matrix.

    The two were measured in different cases, so that each checks the other. Columns of, sum, chain, chain / sum.
    """
    token = token_total(rows, model).set_index("rule")["us"]
    us, head, table = _by_shape(rows), LINEAR[model].heads[0], chains(rows)
    chain = table[table["model"] == model].set_index("variant")["us"]
    periods = sum(count for count, _ in LINEAR[model].layers.values()) / len(LINEAR[model].period)
    libraries = [name for name in map(names.merged, names.LIBRARY) if name in chain]
    parts = {TUNED: ([names.CHAIN_OURS], [names.OURS]), CUBLAS: (libraries, list(names.LIBRARY))}
    found = []
    for rule, (in_chain, alone) in parts.items():
        whole = chain.reindex(in_chain).min() * periods + _least(us, head, alone)
        if rule in token and whole == whole:
            found.append({"of": rule, "sum": token[rule], "chain": whole, "chain / sum": whole / token[rule]})
    return pd.DataFrame(found, columns=["of", "sum", "chain", "chain / sum"])


def beyond_reading(rows: pd.DataFrame) -> pd.DataFrame:
    """Of the models with the smallest and the largest matrices: µs a GEMV of reading, and of each chain beyond it.

    One row a variant that both models have; columns variant, least MB, most MB, least and most (µs of those models).
    """
    table, found = chains(rows), []
    for variant, some in table[table["beyond reading"].notna()].groupby("variant", sort=False):
        some = some.assign(MB=some["us"] * some["tbs"] / some["GEMVs"]).sort_values("MB")  # µs times TB/s are MB
        if len(some) > 1:
            ends = some[["MB", "beyond reading"]].iloc[[0, -1]].to_numpy().T.ravel()
            found.append((variant, *ends))
    return pd.DataFrame(found, columns=["variant", "least MB", "most MB", "least", "most"])


def unseen(rows: pd.DataFrame) -> pd.DataFrame:
    """What a shape gets that is not in the table: time of the rule's choice over the fastest candidate's, cold."""
    found = []
    for params, group, us in _tuned(rows):
        size, sms = names.SIZES[params["dtype"]], int(_multiprocessors(group, 132))
        rule = str(choose.rule(params["N"], params["K"], size, sms))
        if rule in us:
            found.append(picked(params, SHAPE) | {"rule": rule, "rule / fastest": us[rule] / min(us.values())})
    return frame(found, [*SHAPE, "rule", "rule / fastest"])


def splits(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest candidate that splits a row over the fastest that does not, where both were tried, cold."""
    found = []
    for params, group, us in _tuned(rows):
        options = facts(group, column="options")
        split, whole = ([us[name] for name in us if (options[name]["split"] > 1) == yes] for yes in (True, False))
        if split and whole:
            found.append(picked(params, SHAPE) | {"split / whole": min(split) / min(whole)})
    return frame(found, [*SHAPE, "split / whole"])


def _tuned(rows: pd.DataFrame) -> list[tuple[Params, pd.DataFrame, dict[str, float]]]:
    """Parameters, rows and µs of the candidates, cold, of every shape that was tuned."""
    tried = cases(rows, "tune", lambda params, group: [params[name] for name in SHAPE])
    found = [(params, group, {name: line["us"] for name, line in timed(group).items()}) for params, group in tried]
    return [one for one in found if one[-1]]


def rows_map(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of each number of rows over the best number's, bf16; columns shape, rows, over best."""
    us = by_variant(rows)
    columns = [name for name in map(names.rows_variant, names.ROWS_CHOICES) if name in us]
    found = [
        {"shape": f"{n} × {k}", "rows": int(name.removeprefix("rows=")), "over best": line[name] / line[columns].min()}
        for (_, n, k), line in us.iterrows()
        for name in columns
        if line[name] == line[name]
    ]
    return pd.DataFrame(found, columns=["shape", "rows", "over best"])


def choices(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """Candidates of the tuned table at a model's shapes, each with its best tile: time over the fastest, bf16, cold.

    Columns shape, warps, rows, tile (values of a row) and over best; the smallest shape first.
    """
    table = times(rows, "tune")
    table = table[(table["dtype"] == "bf16") & (table["role"] != "control") & _of_model(table, model)]
    options = pd.DataFrame([json.loads(text) for text in table["options"]], index=table.index)
    if table.empty:
        return pd.DataFrame(columns=["shape", "warps", "rows", "tile", "over best"])
    found = options.rename(columns={"num_warps": "warps", "block_k": "tile"})[["warps", "rows", "tile"]]
    found.insert(0, "shape", shapes(table))
    found["over best"] = table["us"] / table.groupby(["N", "K"])["us"].transform("min")
    found = found[options["split"] == 1].sort_values("over best").drop_duplicates(["shape", "warps", "rows"])
    order = found["shape"].map({name: place for place, name in enumerate(dict.fromkeys(found.sort_index()["shape"]))})
    return found.assign(order=order).sort_values(["order", "warps", "rows"], ignore_index=True).drop(columns="order")


def pattern(rows: pd.DataFrame) -> pd.DataFrame:
    """What the access pattern alone is worth to a thread a row, and what warps a row and 16-byte loads are.

    A row a shape and type, the fewest rows of W first. `ns a step`: time over K, the loads that a thread makes, some
    of them at once (the compiler unrolls), W stored [N, K] (step 1) and [K, N] (step 2). `CTAs an SM`: those of the
    busiest one. `look-ups, ns`: how long its threads' lines take, one look-up a clock, at the median of the clocks that
    were read beside all single GEMVs. Ratios of step 1's time over that of step 2 and step 4.
    """
    first, turned, wide = names.THREAD_A_ROW, names.THREAD_A_ROW_TURNED, names.WIDE_LOADS
    table = times(rows)
    us = table.pivot_table(index=["dtype", "N", "K", "MB"], columns="variant", values="us")
    if not {first, turned, wide} <= set(us):
        return pd.DataFrame(columns=PATTERN_COLUMNS)
    found = us[[first, turned, wide]].dropna().reset_index()
    clock = [mhz for some in table["sm_mhz"] for mhz in some if mhz]
    ghz = float(np.median(clock)) / 1e3 if clock else math.nan
    found["CTAs an SM"] = np.ceil(np.ceil(found["N"] / names.THREADS) / _multiprocessors(table))
    for column, variant in zip(STEPS, (first, turned), strict=True):
        found[column] = 1e3 * found[variant] / found["K"]
    found["look-ups, ns"] = found["CTAs an SM"] * names.THREADS / ghz
    found["pattern alone"], found["with width"] = found[first] / found[turned], found[first] / found[wide]
    return found[list(PATTERN_COLUMNS)].sort_values(["dtype", "N", "K"], ignore_index=True)


def pattern_share(rows: pd.DataFrame, shapes: Sequence[tuple[int, int]]) -> pd.DataFrame:
    """Share of the gain of steps 3 and 4 together that the pattern alone has, in bf16: `ratio`, with its interval.

    Of the logarithms of both gains over step 1, block by block. noise: by how much the share changes if each gain
    changes by the case's A/A noise, which is that noise × (1 + |share|) / log(gain of step 4). Shapes where steps 3 and
    4 together are not faster have no gain to explain.
    """
    first, alone, whole = names.THREAD_A_ROW, names.THREAD_A_ROW_TURNED, names.WIDE_LOADS
    found = []
    for params, group in cases(rows, "gemv", dtype="bf16"):
        gains = {line["variant"]: line for line in pairs(group, [(alone, first), (whole, first)])}
        if (params["N"], params["K"]) not in shapes or len(gains) < 2 or gains[whole]["verdict"] != "faster":
            continue
        start, turned, wide = (np.log(_blocks(group, name)) for name in (first, alone, whole))
        share = ((start - turned) / (start - wide)).dropna()
        run, block = (share.index.get_level_values(name).to_numpy() for name in ("run", "block"))
        # `ratio` averages logarithms: what it is given is the exponential of the share, over 1.
        interval = ratio(Samples(run, block, np.exp(share.to_numpy())), Samples(run, block, np.ones(len(share))))
        mid, low, high = np.log([interval.mid, interval.low, interval.high])
        noise = gains[whole]["noise"] * (1 + abs(mid)) / math.log(gains[whole]["ratio"])
        line = {"ratio": mid, "low": low, "high": high, "noise": noise, "runs": interval.runs}
        found.append(picked(params, SHAPE) | line)
    return frame(found, [*SHAPE, "ratio", "low", "high", "noise", "runs"])


def _multiprocessors(table: pd.DataFrame, otherwise: float = math.nan) -> float:
    """Of the GPU that the rows are from, as their evidence has it; `otherwise` if it does not."""
    found = (json.loads(text).get("sms") for text in table["evidence"])
    return float(next((sms for sms in found if sms), otherwise))


def pays_from(table: pd.DataFrame) -> int | None:
    """The least N from which on the pattern alone always makes a thread a row faster; None if it never does."""
    by_n = table.groupby("N")["pattern alone"].min().sort_index()
    slower = by_n[by_n <= 1]
    paying = by_n[by_n.index > slower.index.max()] if len(slower) else by_n
    return int(paying.index[0]) if len(paying) else None


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """What each step of the ladder is worth over the one that it changes: one line a step, over all shapes and types.

    Geometric mean, least and most of the time before over the time after, and in how many cases it is faster or slower.
    """
    measured, found = cases(rows, "gemv"), []
    for after, before in names.CHANGES:
        table = compared(measured, after, before, SHAPE)
        if len(table):
            ratio, verdicts = table["ratio"], table["verdict"].value_counts()
            line = {"step": after, "over": before, "mean ratio": geometric_mean(ratio)}
            line |= {"least": ratio.min(), "most": ratio.max(), "cases": len(table)}
            found.append(line | {word: int(verdicts.get(word, 0)) for word in WORDS})
    return frame(found, ["step", "over", "mean ratio", "least", "most", "cases", *WORDS])


def same_bits(rows: pd.DataFrame, variants: Sequence[str]) -> pd.DataFrame:
    """In how many ways the bits of y came out over some variants of a case; columns of the shape and `outcomes`."""
    table = times(rows)
    table = table[table["variant"].isin(variants)]
    table = table.assign(bits=[json.loads(text).get("bits") for text in table["evidence"]])
    table = table[table["bits"].notna()]
    return table.groupby(SHAPE, as_index=False)["bits"].nunique().rename(columns={"bits": "outcomes"})


def ladder(rows: pd.DataFrame, model: str | None = None) -> pd.DataFrame:
    """The steps at all shapes or a model's: µs, TB/s, percent of the ceiling, and what a request of the code costs.

    Ordered by dtype, bytes and step.
    """
    steps = [*names.LADDER, names.OURS]
    table = times(rows)
    table = table[table["variant"].isin(steps)]
    if model:
        table = table[_of_model(table, model)]
    extra = [_request(json.loads(text)) for text in table["evidence"]]
    table = pd.concat([table, pd.DataFrame(extra, index=table.index, columns=list(_request({})))], axis=1)
    table = table.assign(step=[steps.index(name) + 1 for name in table["variant"]], shape=shapes(table))
    return table.sort_values(["dtype", "floor_bytes", "step"], kind="stable", ignore_index=True)


def _of_model(table: pd.DataFrame, model: str) -> np.ndarray:
    """Which rows are of a shape of the model; an empty selection stays one of rows, not of columns."""
    shapes = LINEAR[model].shapes()
    return np.array([shape in shapes for shape in zip(table["N"], table["K"], strict=True)], bool)


def _request(evidence: dict) -> dict:
    """Bits a thread, sectors and lines a request of the load of W, and how many CTAs find room on an SM."""
    first = next((access for access in evidence.get("accesses", []) if access.get("tensor") == "W"), {})
    found = {f"{what} a request": first.get(what, math.nan) for what in ("sectors", "lines")}
    return {"bits a thread": first.get("bits", math.nan)} | found | {RESIDENT: evidence.get("ctas_per_sm", math.nan)}


ledger.watch(__name__)
