"""Tables of the study: what the notebook shows and the claims are judged by, made from the measured rows."""

import json
from collections.abc import Iterator, Sequence

import pandas as pd

from labkit.bench.records import expanded
from labkit.bench.verdict import compare_many
from labkit.shapes import QWEN3_NEXT, QWEN35_4B, GatedDeltaModel
from labkit.state_layout.share import BF16_BYTES, end_to_end, state_share, time_share

LAYOUTS = {"KV": "[N, HV, K, V]", "VK": "[N, HV, V, K]"}
TILES = (8, 16, 32)
WARPS = (1, 2, 4)
CEILING = "in-place multiply"
SHAPE = ["model", "HV", "K", "state", "batch"]
CHOICE = ["layout", "BV", "warps", "folded"]
STATES = ("fp32", "bf16")  # in the order of the pages


def variant_name(layout: str, tile: int, warps: int = 1, folded: bool = False) -> str:
    """Name of a variant, as the tables show it."""
    return f"{layout} BV={tile}, {warps} warp{'s' if warps > 1 else ''}{', folded' if folded else ''}"


def ordered(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The table sorted, states and variants in the order of the pages rather than of the alphabet."""
    first = [variant_name(layout, tile) for tile in TILES for layout in LAYOUTS]
    places = {"state": STATES, "variant": [CEILING, *first]}

    def key(column: pd.Series) -> pd.Series:
        known = list(places.get(column.name, ()))
        return column.map(lambda value: known.index(value) if value in known else len(known)) if known else column

    return table.sort_values(list(columns), key=key, kind="stable", ignore_index=True)


def _expanded(rows: pd.DataFrame) -> pd.DataFrame:
    """`expanded`, with the columns of cases and options even where no row has them."""
    table = expanded(rows)
    return table.reindex(columns=[*table, *(name for name in [*SHAPE, *CHOICE] if name not in table)])


def times(rows: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """A row a usable measurement: shape, variant, µs, percent of the in-place ceiling of the same case, prediction."""
    rows = rows[rows["op"] == "decode"]
    table = _expanded(rows[(rows["cache"] == cache) & rows["ok"] & (rows["role"] != "control")])
    roof = table[table["variant"] == CEILING].set_index(["op", "case"])["us"]
    table["percent"] = 100 * pd.MultiIndex.from_frame(table[["op", "case"]]).map(roof) / table["us"]
    table["tbs"] = table["floor_bytes"] / table["us"] / 1e6
    table["off"] = 100 * (table["us"] / table["predicted_us"] - 1)
    return ordered(table, [*SHAPE, "us"])


def ratios(rows: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """KV / VK of equal tile and warps, with interval and verdict: above 1, the layout [V, K] is faster.

    Pairs of which one spills registers are left out: their ratio says nothing of the layout.
    """
    found = []
    for case, group in _cases(rows, cache):
        choices = [(tile, warps) for tile in TILES for warps in WARPS]
        results = compare_many(group, [tuple(variant_name(layout, *c) for layout in ("VK", "KV")) for c in choices])
        spilled = spilling(group)
        for (tile, warps), result in zip(choices, results, strict=True):
            if result.ratio.pairs and not {result.variant, result.against} & spilled:
                found.append(case | {"BV": tile, "warps": warps} | result.columns())
    columns = [*SHAPE, "BV", "warps", "ratio", "low", "high", "noise", "verdict", "runs"]
    return ordered(pd.DataFrame(found, columns=columns), columns[:7])


def folding(rows: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """V-first with two passes over the tile / folded into one, with interval and verdict: above 1, folding pays."""
    found = []
    for case, group in _cases(rows, cache):
        results = compare_many(group, [(variant_name("VK", tile, 1, True), variant_name("VK", tile)) for tile in TILES])
        for tile, result in zip(TILES, results, strict=True):
            if result.ratio.pairs:
                found.append(case | {"BV": tile} | result.columns())
    columns = [*SHAPE, "BV", "ratio", "low", "high", "noise", "verdict"]
    return ordered(pd.DataFrame(found, columns=columns), columns[:6])


def spilling(rows: pd.DataFrame) -> set[str]:
    """Variants whose kernel, as it ran, spills registers to memory."""
    evidence = zip(rows["variant"], rows["evidence"], strict=True)
    return {variant for variant, text in evidence if json.loads(text).get("spill_bytes", 0) > 0}


def best(rows: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """The fastest variant of either layout in each case, compared pair by pair: what a free choice of tile leaves.

    Folded forms are left out, since only one layout has them.
    """
    table = times(rows, cache)
    table = table[table["layout"].isin(LAYOUTS) & ~table["folded"].eq(True)]
    found = []
    for case, group in _cases(rows, cache):
        part = table[(table["case"] == group["case"].iloc[0]) & ~table["variant"].isin(spilling(group))]
        fastest = {layout: some.loc[some["us"].idxmin()] for layout, some in part.groupby("layout")}
        if len(fastest) == 2:
            kv, vk = fastest["KV"], fastest["VK"]
            [result] = compare_many(group, [(vk["variant"], kv["variant"])])
            line = {"best KV": kv["variant"], "KV µs": kv["us"], "best VK": vk["variant"], "VK µs": vk["us"]}
            found.append(case | line | result.columns())
    columns = [*SHAPE, "best KV", "KV µs", "best VK", "VK µs", "ratio", "low", "high", "noise", "verdict", "runs"]
    return ordered(pd.DataFrame(found, columns=columns), SHAPE)


def state_access(rows: pd.DataFrame, kind: str = "load") -> pd.DataFrame:
    """Sectors and lines a request of the state's tile, as derived from the code that ran; one row a shape and tile."""
    rows = rows[rows["op"] == "decode"]
    table = _expanded(rows[rows["ok"] & (rows["evidence"] != "{}") & (rows["role"] != "control")])
    table = table[table["layout"].isin(LAYOUTS)].drop_duplicates(["K", "state", "variant"])
    keys = ["K", "state", *CHOICE]
    found = []
    for _, row in table.iterrows():
        access = widest_access(json.loads(row["evidence"]), kind)
        if access:
            found.append({name: row[name] for name in keys} | access)
    return pd.DataFrame(found, columns=None if found else [*keys, "lines", "sectors"])


def widest_access(evidence: dict, kind: str) -> dict | None:
    """The access that moves the most bytes of a program: the state's tile."""
    accesses = [access for access in evidence.get("accesses", []) if access["kind"] == kind]
    return max(accesses, key=lambda access: access["bytes_used"], default=None)


def end_to_end_estimate(
    rows: pd.DataFrame,
    tile: int,
    warps: int = 1,
    model: GatedDeltaModel = QWEN3_NEXT,
    context: int = 2048,
    weight_bytes: float = BF16_BYTES,
    batches: Sequence[int] = (),
    heads_of: str = QWEN3_NEXT.name,
) -> pd.DataFrame:
    """Gain of a whole decode step: the state's share of its time × the kernel's ratio.

    The time is that of the bytes moved at the in-place ceiling, but for the state at the rate of the measured kernel.

    model: whose weights, cache and layers. heads_of: the model with whose heads the kernel was timed; Qwen3.5-4B has
    those of Qwen3-Next, and each of two GPUs that share Qwen3-Next has as many value heads as Qwen3.5-0.8B.
    batches: default those measured; another takes the ratio of the largest measured batch below it (column `ratio of
    batch`), since the ratio levels off once the GPU is full.
    """
    params = {key: json.loads(key) for key in rows["case"].unique()}
    own = [key for key, case in params.items() if (case.get("model"), case.get("state")) == (heads_of, "fp32")]
    rows = rows[rows["case"].isin(own)]  # the intervals of other cases would take seconds, for nothing
    table = ratios(rows)
    table = table[(table["BV"] == tile) & (table["warps"] == warps)].set_index("batch")
    old = times(rows)
    old = old[old["variant"] == variant_name("KV", tile, warps)]
    slowness = dict(zip(old["batch"], 100 / old["percent"].fillna(100), strict=True))
    found = []
    for batch in batches or table.index:
        below = table.index[table.index <= batch]
        if not len(below):
            continue
        row = table.loc[below.max()]
        slow = slowness.get(below.max(), 1.0)
        share = time_share(state_share(model, int(batch), context, weight_bytes), slow)
        gains = {name: 100 * (end_to_end(row[name], share) - 1) for name in ("ratio", "low", "high")}
        line = {"batch": batch, "ratio of batch": below.max(), "share %": 100 * share}
        line |= {"kernel KV / VK": row["ratio"], "verdict": row["verdict"]}
        found.append(line | {"gain %": gains["ratio"], "low %": gains["low"], "high %": gains["high"]})
    columns = ["batch", "ratio of batch", "share %", "kernel KV / VK", "verdict", "gain %", "low %", "high %"]
    return pd.DataFrame(found, columns=columns)


def shares(rows: pd.DataFrame, tile: int, contexts: Sequence[int], batches: Sequence[int]) -> pd.DataFrame:
    """`end_to_end_estimate` of both models whose weights are known, bf16 weights, at several contexts."""
    parts = [
        end_to_end_estimate(rows, tile, model=model, context=context, batches=batches).assign(
            model=model.name, context=context
        )
        for model in (QWEN3_NEXT, QWEN35_4B)
        for context in contexts
    ]
    columns = ["model", "context", "batch", "share %", "kernel KV / VK", "gain %"]
    return pd.concat(parts, ignore_index=True)[columns]


def _cases(rows: pd.DataFrame, cache: str) -> Iterator[tuple[dict, pd.DataFrame]]:
    for key, group in rows[(rows["cache"] == cache) & (rows["op"] == "decode")].groupby("case"):
        yield {name: value for name, value in json.loads(key).items() if name in SHAPE}, group
