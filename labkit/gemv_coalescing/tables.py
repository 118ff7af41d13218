"""Tables of the study: what the notebook shows and the claims are judged by, made from the measured rows."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.bench.records import expanded, read
from labkit.bench.verdict import Comparison, compare_many
from labkit.gemv.choose import Choice
from labkit.gemv_coalescing import names
from labkit.shapes import LINEAR

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
SHAPE = ["dtype", "N", "K"]
ALLOWED_US = 1.0  # beyond the bytes at the ceiling and an empty kernel
LARGE_MB = 16
STEPS = ("ns a step, W [N, K]", "ns a step, W [K, N]")
CHAIN_COLUMNS = (
    "model", "variant", "us", "tbs", "% of ceiling", "% of reading W", "GEMVs", "beyond reading", "at most",
    "ratio", "low", "high", "noise", "verdict",
)  # fmt: skip
RULE_ROWS = 4096  # the pull request's rule: one row a group up to so many rows of W, else four


def fastest(path: Path) -> dict[tuple[int, int, int], dict[str, Choice]]:
    """(N, K, bytes of a value) -> the candidate that was fastest with cold and, where it was timed, with hot L2."""
    rows = read(path)
    table = expanded(rows[(rows["op"] == "tune") & rows["ok"] & (rows["role"] != "control")])
    found: dict[tuple[int, int, int], dict[str, Choice]] = {}
    for (n, k, dtype, cache), group in table.groupby(["N", "K", "dtype", "cache"]) if len(table) else ():
        best = json.loads(group.loc[group["us"].idxmin(), "options"])
        found.setdefault((int(n), int(k), SIZES[dtype]), {})[cache] = Choice(**best)
    return found


def times(rows: pd.DataFrame, op: str = "gemv") -> pd.DataFrame:
    """A row a usable cold measurement: shape or model, variant, µs, TB/s of streamed bytes, percent of the ceiling."""
    table = expanded(rows[(rows["op"] == op) & (rows["cache"] == "cold") & rows["ok"]])
    table = table.reindex(columns=[*table, *(name for name in [*SHAPE, "model"] if name not in table)])
    table["tbs"] = table["floor_bytes"] / table["us"] / 1e6
    table["percent"] = 100 * table["tbs"] / best_ceiling(table)
    table["MB"] = table["floor_bytes"] / 1e6
    return table.sort_values(["floor_bytes", "K"], kind="stable", ignore_index=True)


def best_ceiling(table: pd.DataFrame) -> float:
    """TB/s that reading reached on this GPU; NaN if it was not known."""
    return float(table["ceiling"].max()) if len(table) else math.nan


def by_variant(rows: pd.DataFrame, dtype: str = "bf16") -> pd.DataFrame:
    """µs, one row a shape and one column a variant; index MB, N, K."""
    table = times(rows)
    table = table[table["dtype"] == dtype]
    return table.pivot_table(index=["MB", "N", "K"], columns="variant", values="us")


def cases(rows: pd.DataFrame, op: str) -> Iterator[tuple[dict, pd.DataFrame]]:
    """The parameters and the cold rows of every case of an operation, the smallest first."""
    some = rows[(rows["op"] == op) & (rows["cache"] == "cold")]
    for key, group in sorted(some.groupby("case"), key=lambda item: item[1]["floor_bytes"].iloc[0]):
        yield json.loads(key), group


def _median(group: pd.DataFrame) -> dict[str, float]:
    usable = group[group["ok"]]
    return {v: float(np.median(s)) / 1e3 for v, s in zip(usable["variant"], usable["samples_ns"], strict=True)}


def faster_library(us: dict[str, float], label: Callable[[str], str] = str) -> str | None:
    """The faster of cuBLAS's two callers; None if neither ran."""
    return min((label(name) for name in names.LIBRARY if label(name) in us), key=us.__getitem__, default=None)


def against_library(rows: pd.DataFrame, variant: str = names.OURS) -> pd.DataFrame:
    """Time of the better of torch.mv and F.linear over that of `variant`, with interval and verdict, for every shape.

    Columns `allowed µs` (bytes at the ceiling + an empty kernel of the same run + 1 µs) and `within` it too.
    """
    found = []
    for params, group in cases(rows, "gemv"):
        us = _median(group)
        library = faster_library(us)
        if library is None or variant not in us:
            continue
        [result] = compare_many(group, [(variant, library)])
        size = group["floor_bytes"].iloc[0]
        allowed = size / group["ceiling"].max() / 1e6 + us.get(names.EMPTY, math.nan) + ALLOWED_US
        line = {"MB": size / 1e6, "library": library, "library µs": us[library], "ours µs": us[variant]}
        line |= {"ours TB/s": size / us[variant] / 1e6, "allowed µs": allowed, "within": us[variant] <= allowed}
        found.append({name: params[name] for name in SHAPE} | line | _columns(result))
    return pd.DataFrame(found, columns=None if found else [*SHAPE, "MB", "ratio", "low", "high", "verdict", "within"])


def geometric_mean(values: pd.Series) -> float:
    """NaN without values."""
    return float(np.exp(np.log(values).mean())) if len(values) else math.nan


def chains(rows: pd.DataFrame) -> pd.DataFrame:
    """Every variant of every chain: µs, TB/s, percent of reading the same weights, and cuBLAS's time over it.

    `cuBLAS` is the faster caller of the same grouping (separate or merged); `at most` is its time over that of reading
    the weights, which no kernel can exceed. `beyond reading`: µs a GEMV that a chain takes longer than reading.
    """
    found = []
    for params, group in cases(rows, "chain"):
        us = _median(group)
        size, reading = group["floor_bytes"].iloc[0], us.get(names.READ, math.nan)
        for variant in names.CHAINS:
            if variant not in us:
                continue
            together = variant.endswith(names.merged(""))
            count = sum(len(ns) for _, ns in LINEAR[params["model"]].chain(together))
            library = faster_library(us, names.merged if together else names.separate)
            line = {"model": params["model"], "variant": variant, "us": us[variant], "tbs": size / us[variant] / 1e6}
            line["% of ceiling"] = 100 * line["tbs"] / group["ceiling"].max()
            line["% of reading W"] = 100 * reading / us[variant]
            if variant != names.READ:
                line |= {"GEMVs": count, "beyond reading": (us[variant] - reading) / count}
            if library and variant != names.READ:
                line |= {"at most": us[library] / reading, **_columns(compare_many(group, [(variant, library)])[0])}
            found.append(line)
    return pd.DataFrame(found, columns=None if found and "ratio" in found[0] else CHAIN_COLUMNS)


def compared(rows: pd.DataFrame, op: str, variant: str, against: str) -> pd.DataFrame:
    """Time of `against` over that of `variant` in every case of an operation that has both."""
    found = []
    for params, group in cases(rows, op):
        us = _median(group)
        if variant in us and against in us:
            [result] = compare_many(group, [(variant, against)])
            found.append(params | {f"{against} µs": us[against], f"{variant} µs": us[variant]} | _columns(result))
    return pd.DataFrame(found, columns=None if found else [*SHAPE, "model", "ratio", "low", "high", "noise", "verdict"])


def token_total(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """µs of all weights of one token under each rule for the rows of a program, by real layer counts.

    Rules: the pull request's (1 up to 4096 rows of W, else 4), one row, four rows, the best rows of each shape, the
    tuned table, and cuBLAS. Empty if a shape of the model was not measured.
    """
    us = by_variant(rows)
    us = us.reset_index(level="MB", drop=True) if len(us) else us
    counts = LINEAR[model].token()
    if any(shape not in us.index for shape in counts):
        return pd.DataFrame(columns=["rule", "us", "tbs", "% of ceiling"])
    columns = [names.rows_variant(rows) for rows in names.ROWS_CHOICES]
    rules: dict[str, Callable[[tuple[int, int]], float]] = {
        f"1 row up to N = {RULE_ROWS}, else 4": lambda s: us.loc[s, names.rows_variant(1 if s[0] <= RULE_ROWS else 4)],
        "always 1 row": lambda s: us.loc[s, names.rows_variant(1)],
        "always 4 rows": lambda s: us.loc[s, names.rows_variant(4)],
        "best rows of each shape": lambda s: us.loc[s, columns].min(),
        "tuned table": lambda s: us.loc[s, names.OURS],
        "cuBLAS": lambda s: us.loc[s, list(names.LIBRARY)].min(),
    }
    size = sum(count * n * k * SIZES["bf16"] for (n, k), count in counts.items())
    top = best_ceiling(times(rows))
    found = []
    for rule, time in rules.items():
        total = sum(count * float(time(shape)) for shape, count in counts.items())
        tbs = size / total / 1e6
        found.append({"rule": rule, "us": total, "tbs": tbs, "% of ceiling": 100 * tbs / top})
    return pd.DataFrame(found)


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
    table = table[(table["dtype"] == "bf16") & (table["role"] != "control")]
    table = table[[shape in LINEAR[model].shapes() for shape in zip(table["N"], table["K"], strict=True)]]
    options = pd.DataFrame([json.loads(text) for text in table["options"]], index=table.index)
    if options.empty:
        return pd.DataFrame(columns=["shape", "warps", "rows", "tile", "over best"])
    found = options.rename(columns={"num_warps": "warps", "block_k": "tile"})[["warps", "rows", "tile"]]
    found.insert(0, "shape", [f"{n} × {k}" for n, k in zip(table["N"], table["K"], strict=True)])
    found["over best"] = table["us"] / table.groupby(["N", "K"])["us"].transform("min")
    found = found[options["split"] == 1].sort_values("over best").drop_duplicates(["shape", "warps", "rows"])
    order = found["shape"].map({name: place for place, name in enumerate(dict.fromkeys(found.sort_index()["shape"]))})
    return found.assign(order=order).sort_values(["order", "warps", "rows"], ignore_index=True).drop(columns="order")


def pattern(rows: pd.DataFrame) -> pd.DataFrame:
    """What the access pattern alone is worth to a thread a row, and what warps a row and 16-byte loads are: bf16.

    A row a shape, the fewest rows of W first. `ns a step`: time over K, the loads that a thread makes one after the
    other, W stored [N, K] (step 1) and [K, N] (step 2). Ratios of step 1's time over that of step 2 and of step 4.
    """
    us = by_variant(rows)
    first, turned, wide = names.LADDER[0], names.LADDER[1], names.LADDER[3]
    if not {first, turned, wide} <= set(us):
        return pd.DataFrame(columns=["N", "K", "MB", *STEPS, "pattern alone", "with width"])
    us = us[[first, turned, wide]].dropna().reset_index()
    found = us[["N", "K", "MB"]].assign(**{"pattern alone": us[first] / us[turned], "with width": us[first] / us[wide]})
    for column, variant in zip(STEPS, (first, turned), strict=True):
        found[column] = 1e3 * us[variant] / us["K"]
    found["TB/s"], found["TB/s of step 4"] = us["MB"] / us[first], us["MB"] / us[wide]
    return found.sort_values(["N", "K"], ignore_index=True)


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
    found = []
    for after, before in names.CHANGES.items():
        table = compared(rows, "gemv", after, before)
        if len(table):
            ratio, verdicts = table["ratio"], table["verdict"].value_counts()
            line = {"step": after, "over": before, "mean ratio": geometric_mean(ratio)}
            line |= {"least": ratio.min(), "most": ratio.max(), "cases": len(table)}
            found.append(line | {word: int(verdicts.get(word, 0)) for word in ("faster", "same", "slower")})
    columns = ["step", "over", "mean ratio", "least", "most", "cases", "faster", "same", "slower"]
    return pd.DataFrame(found, columns=columns)


def same_bits(rows: pd.DataFrame, variants: Sequence[str]) -> pd.DataFrame:
    """In how many ways the bits of y came out over some variants of a case; columns of the shape and `outcomes`."""
    table = times(rows)
    table = table[table["variant"].isin(variants) & (table["evidence"] != "{}")]
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
        table = table[[shape in LINEAR[model].shapes() for shape in zip(table["N"], table["K"], strict=True)]]
    extra = [_request(json.loads(text)) for text in table["evidence"]]
    table = pd.concat([table, pd.DataFrame(extra, index=table.index, columns=list(_request({})))], axis=1)
    order = table["variant"].map(steps.index)
    table = table.assign(step=order + 1, shape=[f"{n} × {k}" for n, k in zip(table["N"], table["K"], strict=True)])
    return table.sort_values(["dtype", "floor_bytes", "step"], kind="stable", ignore_index=True)


def _request(evidence: dict) -> dict:
    """Bits a thread, sectors and lines a request of the load of W, and CTAs an SM."""
    loads = [a for a in evidence.get("accesses", []) if a.get("tensor") == "W"]
    first = loads[0] if loads else {}
    found = {f"{what} a request": first.get(what, math.nan) for what in ("sectors", "lines")}
    return (
        {"bits a thread": first.get("bits", math.nan)} | found | {"CTAs an SM": evidence.get("ctas_per_sm", math.nan)}
    )


def _columns(result: Comparison) -> dict:
    noise = result.noise.half_width if result.noise.pairs else math.nan
    ratio = result.ratio
    ends = {"ratio": ratio.mid, "low": ratio.low, "high": ratio.high, "noise": noise}
    return ends | {"verdict": result.verdict, "no slower": result.no_slower, "runs": ratio.runs}
