"""Tables of the production operations (step, verify, extend, chunk_state, drift), made from the measured rows."""

import json
import math
from collections.abc import Iterator

import pandas as pd

from labkit.bench import verdict
from labkit.bench.verdict import compare_many, median_us
from labkit.shapes import QWEN3_NEXT
from labkit.state_layout import names
from labkit.state_layout.share import prefill_share
from labkit.state_layout.tables import CEILING, STATES
from labkit.state_layout.trials import LENGTHS

RATIO = ["ratio", "low", "high", "noise", "verdict"]


def cases(rows: pd.DataFrame, op: str) -> Iterator[tuple[dict, pd.DataFrame]]:
    """Parameters and cold rows of every case of an operation, GDN first, fp32 before bf16, small before large."""
    some = rows[(rows["op"] == op) & (rows["cache"] == "cold")]
    groups = [(json.loads(key), group) for key, group in some.groupby("case")]

    def place(item: tuple[dict, pd.DataFrame]) -> tuple:
        params, group = item
        return params["gate"], STATES.index(params.get("state", "fp32")), group["floor_bytes"].iloc[0]

    yield from sorted(groups, key=place)


def times(rows: pd.DataFrame, op: str) -> pd.DataFrame:
    """µs of every variant of every case of an operation, and percent of the in-place multiply of the same states."""
    found = []
    for params, group in cases(rows, op):
        us = median_us(group)
        roles = dict(zip(group["variant"], group["role"], strict=True))
        for variant, value in us.items():
            if roles[variant] != "control":
                line = {"variant": variant, "us": value, "percent": 100 * us.get(CEILING, math.nan) / value}
                found.append(_shape(params) | line | {"role": roles[variant]})
    columns = ["gate", "variant", "us", "percent", "role"]
    return pd.DataFrame(found, columns=None if found else columns)


def _shape(params: dict) -> dict:
    return {name: params[name] for name in ("gate", "state", "batch", "draft", "T", "prefill") if name in params}


def against_best(rows: pd.DataFrame, op: str) -> pd.DataFrame:
    """Time of the fastest library, in either layout, over ours in every case; above 1: ours is faster.

    Of decode steps by where the states are, column `slots`: "in order" or "at random" (see `names.rivals`).
    """
    found = []
    for params, group in cases(rows, op):
        us = median_us(group)
        for slots, (ours, libraries) in names.rivals(op).items():
            peers = [name for name in libraries if name in us]
            if ours not in us or not peers:
                continue
            best = min(peers, key=us.__getitem__)
            [result] = compare_many(group, [(ours, best)])
            line = ({"slots": slots} if slots else {}) | {"best library": best, "library µs": us[best]}
            line |= {"ours µs": us[ours], "ours, % of in-place": 100 * us.get(CEILING, math.nan) / us[ours]}
            found.append(_shape(params) | line | result.columns())
    return pd.DataFrame(found, columns=None if found else ["gate", "slots", "best library", *RATIO])


def compared(rows: pd.DataFrame, op: str, variant: str, against: str) -> pd.DataFrame:
    """Time of `against` over that of `variant` in every case of an operation that has both."""
    found = verdict.compared(((_shape(params), group) for params, group in cases(rows, op)), variant, against)
    return pd.DataFrame(found, columns=None if found else ["gate", "us", "against us", *RATIO])


def extend_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors of extend against float64 on the same inputs, ours and fla-core's: the larger of output and state."""
    found = []
    for params, group in cases(rows, "extend"):
        errors = dict(zip(group["variant"], group["error"], strict=True))
        ours, library = (errors.get(name, math.nan) for name in (names.OURS, names.fla("VK")))
        found.append(_shape(params) | {"error, ours": ours, "error, fla": library, "ours / fla": ours / library})
    table = pd.DataFrame(
        found, columns=None if found else ["gate", "prefill", "error, ours", "error, fla", "ours / fla"]
    )
    return table.dropna(ignore_index=True)


def layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """KV / VK of the lab's kernels in every operation, and of fla-core's extend: above 1, [V, K] is faster."""
    pairs = [(op, names.OURS, names.OURS_KV, "ours") for op in ("step", "verify", "extend")]
    pairs.append(("extend", names.fla("VK"), names.fla("KV"), "fla"))
    parts = [compared(rows, op, vk, kv).assign(op=op, kernels=kernels) for op, vk, kv, kernels in pairs]
    table = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    return table.reindex(columns=["op", "kernels", "gate", "state", "batch", "draft", "prefill", *RATIO])


def gdn_layouts(rows: pd.DataFrame, op: str) -> pd.DataFrame:
    """KV / VK of the lab's kernel of an operation, GDN alone."""
    table = compared(rows, op, names.OURS, names.OURS_KV)
    return table[table["gate"] == "GDN"].reset_index(drop=True)


def first_token(rows: pd.DataFrame) -> pd.DataFrame:
    """How much earlier [V, K] brings Qwen3-Next's first token, at most, in percent; by our extends in both layouts.

    share %: of the extends, K-first, in the prefill (see `share.prefill_share`).
    """
    table = gdn_layouts(rows, "extend")
    if table.empty:
        return table
    times = zip(table["prefill"], table["against us"], strict=True)
    gpu = rows["gpu"].iloc[0]
    share = pd.Series([prefill_share(QWEN3_NEXT, sum(LENGTHS[prefill]), us, gpu) for prefill, us in times])
    earlier = {
        name: 100 * share * (1 - 1 / table[ratio]) for name, ratio in (("earlier %", "ratio"), ("high %", "high"))
    }
    return table.assign(**{"share %": 100 * share}, **earlier)


def chunk_states(rows: pd.DataFrame) -> pd.DataFrame:
    """The chunk-state kernel by form and tile: µs, and what the compiled kernel takes of a multiprocessor."""
    found = []
    for params, group in cases(rows, "chunk_state"):
        us = median_us(group)
        evidence = dict(zip(group["variant"], group["evidence"], strict=True))
        for variant, value in us.items():
            form, _, tile = variant.rpartition(", BV=")
            if not form:
                continue
            taken = json.loads(evidence[variant])
            line = {"prefill": params["prefill"], "sequences": len(LENGTHS[params["prefill"]])}
            line |= {"form": form, "BV": int(tile), "us": value}
            line |= {name: taken.get(name, math.nan) for name in ("registers", "shared_bytes", "ctas_per_sm")}
            found.append(line)
    columns = ["prefill", "sequences", "form", "BV", "us", "registers", "shared_bytes", "ctas_per_sm"]
    table = pd.DataFrame(found, columns=columns)
    return table.sort_values(["prefill", "BV", "form"], kind="stable", ignore_index=True)


def chunk_state_layouts(rows: pd.DataFrame) -> pd.DataFrame:
    """KV / VK of the chunk-state kernel at equal tiles, beside the CTAs of a multiprocessor in both layouts."""
    kernels = chunk_states(rows).set_index(["prefill", "form", "BV"])
    found = []
    for tile in names.TILES:
        table = compared(rows, "chunk_state", names.chunk_state("VK", tile), names.chunk_state("KV", tile))
        for _, line in table.iterrows():
            ctas = {f"CTAs an SM, {f}": kernels.loc[(line["prefill"], f, tile), "ctas_per_sm"] for f in ("KV", "VK")}
            shared = {f"shared, {f}": kernels.loc[(line["prefill"], f, tile), "shared_bytes"] for f in ("KV", "VK")}
            found.append({"prefill": line["prefill"], "BV": tile} | shared | ctas | {n: line[n] for n in RATIO})
    return pd.DataFrame(found, columns=None if found else ["prefill", "BV", *RATIO])


def drift(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors along the tokens: columns gate, state, variant, tokens, output, state error."""
    found = []
    for params, group in cases(rows, "drift"):
        for variant, text, ok in zip(group["variant"], group["evidence"], group["ok"], strict=True):
            for tokens, out, state in json.loads(text).get("drift", []) if ok else []:
                line = {"gate": params["gate"], "state": params["state"], "variant": variant, "tokens": tokens}
                found.append(line | {"output error": out, "state error": state})
    columns = ["gate", "state", "variant", "tokens", "output error", "state error"]
    table = pd.DataFrame(found, columns=columns)
    return table[table["variant"].isin([names.OURS, names.OURS_KV])].reset_index(drop=True)
