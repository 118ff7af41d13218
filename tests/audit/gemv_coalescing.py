"""The tables of the study of coalesced GEMVs, computed once more from the recorded rows."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd
from common import (
    AA,
    COMPARED,
    RATIO,
    Interval,
    Params,
    Sentences,
    Tables,
    blocks,
    by_process,
    cases,
    compare,
    counted,
    facts,
    faster,
    gains,
    geometric_mean,
    half_width,
    interval,
    judged,
    least,
    median,
    noise,
    pick,
    span,
    table,
    times,
    usable,
)  # fmt: skip

STUDY = "gemv_coalescing"
SHAPE = ["dtype", "N", "K"]
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}  # of a value
LADDER = [
    "1 thread a row",
    "2 thread a row, W stored [K, N]",
    "3 warp a row",
    "4 16-byte loads",
    "5 four rows a program",
    "6 pipelined",
    "7 tuned rows, warps and tile",
    "8 split K",
    "9 dependent launch",
]
THREAD, TURNED, WARP, WIDE, FOUR, PIPELINED, TUNED, SPLIT, OURS = LADDER
HINT, WARM = "4 with W evict-first", "tuned in a warm cache"
CHANGES = [  # step, and the one that it changes
    (TURNED, THREAD), (WARP, THREAD), (WIDE, WARP), (HINT, WIDE), (FOUR, WIDE), (PIPELINED, FOUR), (TUNED, PIPELINED),
    (TUNED, WIDE), (SPLIT, TUNED), (OURS, TUNED),
]  # fmt: skip
CUBLAS = ("torch.mv", "F.linear")
READ, EMPTY = "read W", ("empty kernel", "empty kernel, dependent launch")
ROWS = [f"rows={rows}" for rows in (1, 2, 4, 8, 16)]
BITS = {"rows": [*ROWS, "rows=4, interleaved"], "control": [f"2-D tile, rows={rows}" for rows in (1, 4, 16)]}
ROWS_OF_A_CTA = 64  # where each thread has its own row
SMALL, QWEN, LLAMA = "AutoMegaKernel h1024", "Qwen3.5-4B", "Llama-3.2-1B"
TOKENS = (QWEN, LLAMA)  # models whose tokens are added up


# Models: (how many layers, its groups: K and the N of each matrix that multiplies the same x), and the output matrix


def _llama(hidden: int, kv: int, ffn: int) -> list[tuple[int, list[int]]]:
    return [(hidden, [hidden, kv, kv]), (hidden, [hidden]), (hidden, [ffn, ffn]), (ffn, [hidden])]


_FFN = [(2560, [9216, 9216]), (9216, [2560])]
_DELTA, _ATTENTION = (
    [(2560, [12288, 32, 32]), (4096, [2560]), *_FFN],
    [(2560, [8192, 1024, 1024]), (4096, [2560]), *_FFN],
)
LAYERS = {
    SMALL: [(4, _llama(1024, 256, 2816))],
    "AutoMegaKernel h2048": [(4, _llama(2048, 512, 5632))],
    LLAMA: [(16, _llama(2048, 512, 8192))],
    QWEN: [(24, _DELTA), (8, _ATTENTION)],
}
HEADS = {
    SMALL: [(32000, 1024)],
    "AutoMegaKernel h2048": [(32000, 2048)],
    LLAMA: [(128256, 2048)],
    QWEN: [(152960, 2560), (248320, 2560)],  # as the pull request counts it, and the model card
}


def _token(model: str, merged: bool = True) -> list[tuple[int, int]]:
    """[N, K] of every GEMV of a token, one by one; merged: matrices that share x are one."""
    found = [HEADS[model][0]]
    for count, groups in LAYERS[model]:
        for k, ns in groups:
            found += [(n, k) for n in ([sum(ns)] if merged else ns)] * count
    return found


def _chain_length(model: str, merged: bool) -> int:
    """GEMVs of a chain: of four layers, of which Qwen3.5's have one of attention."""
    groups = _DELTA * 3 + _ATTENTION if model == QWEN else LAYERS[model][0][1] * 4
    return sum(1 if merged else len(ns) for _, ns in groups)


def _shapes(model: str) -> set[tuple[int, int]]:
    """Every [N, K] that is timed of a model: matrices alone and merged, and the output matrices."""
    return {*_token(model), *_token(model, merged=False), *HEADS[model]}


# Single GEMVs


def _usable(rows: pd.DataFrame, op: str) -> Iterator[tuple[Params, dict[str, Any], float]]:
    """Parameters, row and µs of every usable cold row of an operation."""
    for params, group in cases(rows, op):
        us = times(group)
        for name, row in usable(group).items():
            yield params, row, us[name]


def _top(rows: pd.DataFrame, op: str) -> float:
    """The read ceiling, TB/s, as the rows of an operation have it."""
    known = [row["ceiling"] for _, row, _ in _usable(rows, op) if row["ceiling"] == row["ceiling"]]
    return max(known, default=math.nan)


def times_of(rows: pd.DataFrame) -> pd.DataFrame:
    """µs, TB/s and percent of the read ceiling."""
    found = []
    for op in ("gemv", "tune", "chain"):
        top = _top(rows, op)
        for params, row, us in _usable(rows, op):
            tbs = row["floor_bytes"] / 1e12 / (us / 1e6)
            line = {"op": op, "variant": row["variant"], "us": us, "tbs": tbs, "percent": 100 * tbs / top}
            line |= {"ceiling": row["ceiling"]}
            found.append(line | {"MB": row["floor_bytes"] / 1e6} | pick(params, [*SHAPE, "model"]))
    return table(found, ["op", *SHAPE, "model", "variant", "us", "tbs", "percent", "ceiling", "MB"])


def _bf16(rows: pd.DataFrame) -> dict[tuple[int, int], dict[str, float]]:
    """(N, K) -> variant -> µs, bf16."""
    return {(params["N"], params["K"]): times(group) for params, group in cases(rows, "gemv", dtype="bf16")}


def by_variant(rows: pd.DataFrame) -> pd.DataFrame:
    """The same as a line a shape and variant."""
    found = [
        {"N": n, "K": k, "variant": name, "us": us} for (n, k), of in _bf16(rows).items() for name, us in of.items()
    ]
    return pd.DataFrame(found)


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """The candidate with the least median time, of every shape and type, cold and hot."""
    found = []
    for cache in ("cold", "hot"):
        for params, group in cases(rows, "tune", cache):
            us = {name: x for name, x in times(group).items() if name != AA}
            best = least(us, us)
            options = pick(usable(group)[best]["chosen"], ["rows", "num_warps", "block_k", "split"])
            found.append(pick(params, ["N", "K"]) | {"bytes": BYTES[params["dtype"]], "cache": cache} | options)
    return pd.DataFrame(found)


def against_cublas(rows: pd.DataFrame) -> pd.DataFrame:
    """cuBLAS by its faster caller over three of our kernels, beside the least that a launch and the bytes take."""
    found = []
    for variant in (WIDE, TUNED, OURS):
        for params, group in cases(rows, "gemv"):
            us, size = times(group), group[0]["floor_bytes"]
            best = least(us, CUBLAS)
            if best is None or variant not in us:
                continue
            ceiling = max((row["ceiling"] for row in group if row["ceiling"] == row["ceiling"]), default=math.nan)
            empty = min((us[name] for name in EMPTY if name in us), default=math.nan)
            allowed = size / (ceiling * 1e12) * 1e6 + empty + 1
            line = {"of": variant, "cuBLAS by": best, "cuBLAS µs": us[best], "ours µs": us[variant]}
            line |= {"MB": size / 1e6, "ours TB/s": size / us[variant] / 1e6, "allowed µs": allowed}
            line |= {"within": str(us[variant] <= allowed), "read µs": us.get(READ, math.nan)}
            found.append(pick(params, SHAPE) | line | compare(group, variant, best))
    shown = ["cuBLAS by", "cuBLAS µs", "ours µs", "ours TB/s", "allowed µs", "within", "read µs"]
    return table(found, ["of", *SHAPE, "MB", *shown, *COMPARED])


def other_choice(rows: pd.DataFrame) -> pd.DataFrame:
    """The choice tuned in a warm cache over the table's, where they are not the same."""
    found = []
    for params, group in cases(rows, "gemv"):
        known = usable(group)
        cold, hot = (facts(known[name]["evidence"]).get("choice") if name in known else None for name in (OURS, WARM))
        if cold != hot:
            found.append(pick(params, SHAPE) | compare(group, OURS, WARM))
    return table(found, [*SHAPE, *COMPARED])


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """What each step of the ladder is worth: means over all shapes and types, and how many verdicts of each."""
    found = []
    for after, before in CHANGES:
        lines = [line for _, group in cases(rows, "gemv") if (line := compare(group, after, before))]
        some = [line["ratio"] for line in lines]
        said = {"step": after, "over": before, "mean ratio": geometric_mean(some), "cases": len(some)}
        said |= {"least": min(some), "most": max(some)}
        for word in ("faster", "same", "slower", "unclear"):
            surely = sum(line["verdict"] == word for line in lines)
            said |= {word: surely, f"{word} from": surely}
            said |= {f"{word} to": sum(word in line["verdict"].split("|") for line in lines)}
        found.append(said)
    return pd.DataFrame(found)


def ladder(rows: pd.DataFrame) -> pd.DataFrame:
    """Steps of all shapes and of one model: speed, and what a request of W costs in the compiled code."""
    found, top = [], _top(rows, "gemv")
    for model in (None, LLAMA):
        for params, row, us in _usable(rows, "gemv"):
            if row["variant"] not in LADDER or (model and (params["N"], params["K"]) not in _shapes(model)):
                continue
            known, tbs = facts(row["evidence"]), row["floor_bytes"] / us / 1e6
            of_w = [one for one in known.get("accesses", ()) if one.get("tensor") == "W"]
            line = {
                "model": model,
                "MB": row["floor_bytes"] / 1e6,
                "step": 1 + LADDER.index(row["variant"]),
                "us": us,
                "tbs": tbs,
            }
            line |= {"percent": 100 * tbs / top, "CTAs an SM, at most": known.get("ctas_per_sm", math.nan)}
            for name, key in (
                ("bits a thread", "bits"),
                ("sectors a request", "sectors"),
                ("lines a request", "lines"),
            ):
                line[name] = of_w[0].get(key, math.nan) if of_w else math.nan
            found.append(pick(params, SHAPE) | line)
    return pd.DataFrame(found)


def same_bits(rows: pd.DataFrame) -> pd.DataFrame:
    """How many different results some variants of a case have."""
    found = []
    for of, names in BITS.items():
        for params, group in cases(rows, "gemv"):
            bits = {facts(row["evidence"]).get("bits") for name, row in usable(group).items() if name in names}
            if bits := bits - {None}:
                found.append(pick(params, SHAPE) | {"of": of, "outcomes": len(bits)})
    return pd.DataFrame(found)


def rows_map(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of each number of rows over that of the best."""
    found = []
    for (n, k), us in _bf16(rows).items():
        known = {name: us[name] for name in ROWS if name in us}
        for name, one in known.items():
            line = {"shape": f"{n} × {k}", "rows": int(name.split("=")[1])}
            found.append(line | {"over best": one / min(known.values())})
    return pd.DataFrame(found)


# A thread a row


def pattern(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of a step along K of a thread a row, W stored both ways, beside the look-ups of its lines."""
    sms = _sms(rows)
    clock = median([mhz for _, row, _ in _usable(rows, "gemv") for mhz in row["sm_mhz"] if mhz]) / 1000
    found = []
    for params, group in cases(rows, "gemv"):
        us, n, k = times(group), params["N"], params["K"]
        if not {THREAD, TURNED, WIDE} <= set(us):
            continue
        ctas = math.ceil(math.ceil(n / ROWS_OF_A_CTA) / sms)
        line = {"CTAs an SM": ctas, "look-ups, ns": ctas * ROWS_OF_A_CTA / clock, "MB": group[0]["floor_bytes"] / 1e6}
        line |= {"ns a step, W [N, K]": us[THREAD] * 1000 / k, "ns a step, W [K, N]": us[TURNED] * 1000 / k}
        line |= {"pattern alone": us[THREAD] / us[TURNED], "with width": us[THREAD] / us[WIDE]}
        found.append(pick(params, SHAPE) | line)
    return pd.DataFrame(found)


def _sms(rows: pd.DataFrame) -> int:
    """Multiprocessors of the GPU."""
    found = {facts(row["evidence"]).get("sms") for _, row, _ in _usable(rows, "gemv")} - {None}
    (sms,) = found
    return sms


def pays_from(rows: pd.DataFrame) -> pd.DataFrame:
    """The least N from which on W stored [K, N] is faster at every shape and type."""
    gains: dict[int, float] = {}
    for line in pattern(rows).to_dict("records"):
        gains[line["N"]] = min(line["pattern alone"], gains.get(line["N"], math.inf))
    start = None
    for n in sorted(gains, reverse=True):
        if gains[n] <= 1:
            break
        start = n
    return pd.DataFrame([{"of": "all shapes", "N": start}])


def pattern_share(rows: pd.DataFrame) -> pd.DataFrame:
    """Which part of the gain of step 4, by its logarithm, step 2 has: block by block, where step 4 is faster."""
    found = []
    for params, group in cases(rows, "gemv", dtype="bf16"):
        whole, known = compare(group, WIDE, THREAD), usable(group)
        if (params["N"], params["K"]) not in _token(SMALL, merged=False) or TURNED not in known:
            continue
        assert whole["verdict"] == "faster" or "faster" not in whole["verdict"], "whether there is a gain is a draw"
        if whole["verdict"] == "faster":
            start, turned, wide = (blocks(known[name]) for name in (THREAD, TURNED, WIDE))
            share = {
                at: math.log(start[at] / turned[at]) / math.log(start[at] / wide[at])
                for at in start.keys() & turned.keys() & wide.keys()
            }
            part = interval(by_process(share))
            off = noise(group).each(lambda x, p=part, w=whole: x * (1 + abs(p.mid)) / math.log(w["ratio"]))
            line = {"ratio": part.mid, "runs": part.runs} | part.low.columns("low") | part.high.columns("high")
            found.append(pick(params, SHAPE) | line | off.columns("noise"))
    return table(found, [*SHAPE, "ratio", "low", "high", "noise", "runs"])


# Candidates of the tuned table


def _tuned(rows: pd.DataFrame) -> Iterator[tuple[Params, list[tuple[dict[str, Any], float]]]]:
    """Parameters of every tuned case, and options and µs of its candidates, cold."""
    for params, group in cases(rows, "tune"):
        us = times(group)
        yield params, [(row["chosen"], us[name]) for name, row in usable(group).items() if name != AA]


def _rule(n: int, k: int, size: int, sms: int) -> tuple[int, int, int]:
    """Rows, warps and tile of a shape that was not tuned."""
    of_warp = 32 * 16 // size  # values that a warp loads at once, 16 bytes a thread
    warps = 4 if k >= 4 * of_warp else 2 if k >= 2 * of_warp else 1
    tile = warps * of_warp
    if k % tile and k % (tile // 2) == 0 and tile // 2 >= 32 * warps:
        tile //= 2
    while math.ceil(k / tile) > 64 and tile < 8192:
        tile *= 2
    rows = next((r for r in (4, 2) if n >= 4 * r * sms and r * math.ceil(k / tile) <= 64), 1)
    return rows, warps, tile


def unseen(rows: pd.DataFrame) -> pd.DataFrame:
    """The rule's choice over the fastest candidate."""
    found, sms = [], _sms(rows)
    for params, known in _tuned(rows):
        wanted = _rule(params["N"], params["K"], BYTES[params["dtype"]], sms)
        for chosen, us in known:
            if (chosen["rows"], chosen["num_warps"], chosen["block_k"], chosen["split"]) == (*wanted, 1):
                found.append(pick(params, SHAPE) | {"rule / fastest": us / min(one for _, one in known)})
    return pd.DataFrame(found)


def splits(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest candidate that splits a row over the fastest that does not."""
    found = []
    for params, known in _tuned(rows):
        split = [us for chosen, us in known if chosen["split"] > 1]
        whole = [us for chosen, us in known if chosen["split"] == 1]
        if split and whole:
            found.append(pick(params, SHAPE) | {"split / whole": min(split) / min(whole)})
    return pd.DataFrame(found)


def choices(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each number of warps and rows the best tile, without a split, over the fastest of all candidates."""
    found = []
    for params, known in _tuned(rows):
        if params["dtype"] == "bf16" and (params["N"], params["K"]) in _shapes(QWEN):
            best: dict[tuple[int, int], tuple[float, int]] = {}
            for chosen, us in known:
                if chosen["split"] == 1:
                    at = chosen["num_warps"], chosen["rows"]
                    best[at] = min((us, chosen["block_k"]), best.get(at, (math.inf, 0)))
            for (warps, some), (us, tile) in best.items():
                line = {"shape": f"{params['N']} × {params['K']}", "warps": warps, "rows": some, "tile": tile}
                found.append(line | {"over best": us / min(one for _, one in known)})
    return pd.DataFrame(found)


# Whole layers and tokens


def chains(rows: pd.DataFrame) -> pd.DataFrame:
    """Every chain: speed, percent of reading the same weights, µs a GEMV beyond it, cuBLAS over it."""
    found = []
    for params, group in cases(rows, "chain"):
        us, size = times(group), group[0]["floor_bytes"]
        ceiling = max((row["ceiling"] for row in group if row["ceiling"] == row["ceiling"]), default=math.nan)
        for name in us.keys() - {AA}:
            tbs = size / us[name] / 1e6
            line = {"model": params["model"], "variant": name, "us": us[name], "tbs": tbs}
            line |= {"% of ceiling": 100 * tbs / ceiling, "% of reading W": 100 * us[READ] / us[name]}
            if name != READ:
                count = _chain_length(params["model"], name.endswith(", merged"))
                best = least(us, _rivals(name))
                line |= {"GEMVs": count, "beyond reading": (us[name] - us[READ]) / count}
                line |= {"at most": us[best] / us[READ]} | compare(group, name, best)
            found.append(line)
    shown = ["us", "tbs", "% of ceiling", "% of reading W", "GEMVs", "beyond reading", "at most"]
    return table(found, ["model", "variant", *shown, *RATIO])


def _rivals(name: str) -> list[str]:
    """cuBLAS's chains of the same grouping, or the one with kernels between."""
    if "between" in name:
        return ["torch.mv, kernels between, merged"]
    return [f"{one}, {name.rpartition(', ')[2]}" for one in CUBLAS]


def merging(rows: pd.DataFrame) -> pd.DataFrame:
    """Matrices that share x one by one over the same as one."""
    found = [
        {"model": params["model"], "kernel": kernel} | compare(group, f"{kernel}, merged", f"{kernel}, separate")
        for kernel in ("torch.mv", "ours")
        for params, group in cases(rows, "chain")
    ]
    return table(found, ["model", "kernel", *RATIO])


def beyond_reading(rows: pd.DataFrame) -> pd.DataFrame:
    """What a GEMV takes beyond reading in the models with the least and the most bytes a GEMV."""
    found: dict[str, list[tuple[float, float]]] = {}
    for params, group in cases(rows, "chain"):
        us = times(group)
        for name in us.keys() - {AA, READ}:
            count = _chain_length(params["model"], name.endswith(", merged"))
            beyond = (us[name] - us[READ]) / count
            found.setdefault(name, []).append((group[0]["floor_bytes"] / 1e6 / count, beyond))
    lines = [(name, *min(some), *max(some)) for name, some in found.items() if len(some) > 1]
    return pd.DataFrame(lines, columns=["variant", "least MB", "least", "most MB", "most"])


def of_ceiling(rows: pd.DataFrame) -> pd.DataFrame:
    """The read ceiling's time of a model's weights over that of its chain."""
    found = []
    for _, group in cases(rows, "chain", model=QWEN):
        ceiling = max(row["ceiling"] for row in group if row["ceiling"] == row["ceiling"])
        at_ceiling = group[0]["floor_bytes"] / (ceiling * 1e12) * 1e9  # ns
        both = {"ours, merged": "GEMVs alone", "ours, kernels between, merged": "with small kernels between"}
        for name, said in both.items():
            own = usable(group)[name]
            shares = by_process({at: math.log(at_ceiling / ns) for at, ns in blocks(own).items()})
            line = {"variant": said, "us": times(group)[name], "against us": at_ceiling / 1000}
            found.append(line | judged(interval(shares).each(math.exp), noise(group)))
    return table(found, ["variant", *COMPARED])


def _rule_names(plain: bool, n: int) -> dict[str, str]:
    """Rule -> its variant at N rows of W."""
    end = ", without dependent launch" if plain else ""
    said = ", no dependent launch" if plain else ""
    few = 1 if n <= 4096 else 4
    wanted = {"1 row up to N = 4096, else 4": few, "always 1 row": 1, "always 4 rows": 4}
    return {rule + said: f"rows={rows}{end}" for rule, rows in wanted.items()}


def _rules(n: int) -> dict[str, Sequence[str]]:
    """Rule -> the variants of which it takes the fastest at N rows of W."""
    single = _rule_names(False, n) | _rule_names(True, n) | {"tuned table": OURS}
    return {rule: [name] for rule, name in single.items()} | {"best rows of each shape": ROWS, "cuBLAS": CUBLAS}


def token_total(rows: pd.DataFrame) -> pd.DataFrame:
    """µs of all GEMVs of a token by rule, of each model."""
    found, us, top = [], _bf16(rows), _top(rows, "gemv")
    for model in TOKENS:
        for rule in _rules(0):
            taken = [_least(us, (n, k), _rules(n)[rule]) for n, k in _token(model)]
            if not any(map(math.isnan, taken)):
                total, size = sum(taken), sum(2 * n * k for n, k in _token(model))
                tbs = size / total / 1e6
                found.append({"model": model, "rule": rule, "us": total, "tbs": tbs, "% of ceiling": 100 * tbs / top})
    return pd.DataFrame(found)


def _least(us: Mapping[tuple[int, int], Mapping[str, float]], shape: tuple[int, int], names: Sequence[str]) -> float:
    return min((us[shape][name] for name in names if name in us.get(shape, ())), default=math.nan)


def _token_blocks(rows: pd.DataFrame, model: str, merged: bool) -> dict[str, dict[tuple[int, int], float]]:
    """Rule -> (process, block) -> ns of all GEMVs of a token, those of a shape in the block of that number."""
    groups = {(params["N"], params["K"]): usable(group) for params, group in cases(rows, "gemv", dtype="bf16")}
    found: dict[str, dict[tuple[int, int], float]] = {}
    for rule in [*_rules(0), AA]:
        wanted = [((n, k), (_rules(n) | {AA: [AA]})[rule]) for n, k in _token(model, merged)]
        if any(len(names) > 1 or names[0] not in groups.get(shape, ()) for shape, names in wanted):
            continue
        parts = {(shape, name): blocks(groups[shape][name]) for shape, (name,) in wanted}
        common = set.intersection(*(set(part) for part in parts.values()))
        found[rule] = {at: sum(parts[shape, name][at] for shape, (name,) in wanted) for at in common}
    return found


def token_blocks(rows: pd.DataFrame) -> pd.DataFrame:
    """The same as a line a rule, process and block, of Qwen3.5-4B merged and separate."""
    found = [
        {"merged": merged, "variant": rule, "run": run, "block": block, "ns": ns}
        for merged in (True, False)
        for rule, known in _token_blocks(rows, QWEN, merged).items()
        for (run, block), ns in known.items()
    ]
    return pd.DataFrame(found)


def from_chain(rows: pd.DataFrame) -> pd.DataFrame:
    """A token's GEMVs as the sum of single ones, and as chains of four layers and the output matrix."""
    found, us = [], _bf16(rows)
    totals = token_total(rows)
    for params, group in cases(rows, "chain"):
        model, chain = params["model"], times(group)
        if model not in TOKENS:
            continue
        layers = sum(count for count, _ in LAYERS[model])
        sums = totals[totals["model"] == model].set_index("rule")["us"]
        ours, cublas = (["ours, merged"], [OURS]), ([f"{name}, merged" for name in CUBLAS], CUBLAS)
        for rule, (in_chain, alone) in (("tuned table", ours), ("cuBLAS", cublas)):
            head = _least(us, HEADS[model][0], alone)
            whole = min(chain[name] for name in in_chain) * layers / 4 + head
            if rule in sums:
                found.append(
                    {"model": model, "of": rule, "sum": sums[rule], "chain": whole, "chain / sum": whole / sums[rule]}
                )
    return pd.DataFrame(found)


# What the claims are judged by


def _observed(lines: Sequence[Mapping[str, Any]], case: Callable[[Mapping[str, Any]], str]) -> pd.DataFrame:
    """Ratios as observations."""
    named = [{"case": case(line), "mid": line["ratio"]} | dict(line) for line in lines]
    return table(named, ["case", "mid", "low", "high", "noise", "runs"])


def step(rows: pd.DataFrame) -> pd.DataFrame:
    """Chains of the small model: a thread a row over 16-byte loads."""
    found = [
        compare(group, f"{WIDE}, separate", f"{THREAD}, separate") for _, group in cases(rows, "chain", model=SMALL)
    ]
    return _observed(found, lambda line: SMALL)


def pattern_claim(rows: pd.DataFrame) -> pd.DataFrame:
    """`pattern_share`, its noise as a part of the 3/4 from which on it is as claimed."""
    found = pattern_share(rows)
    for name in ("noise", "noise from", "noise to"):
        found[name] = found[name] * 4 / 3
    return _observed(found.to_dict("records"), lambda line: f"{line['N']} × {line['K']}")


def rule(rows: pd.DataFrame) -> pd.DataFrame:
    """A token by the rule over one and four rows everywhere, merged or not, with dependent launch or without."""
    found = []
    for merged in (True, False):
        known = _token_blocks(rows, QWEN, merged)
        aa = half_width(_over(known["tuned table"], known[AA]))
        for plain in (False, True):
            new, *old = _rule_names(plain, 0)
            for one in old:
                said = _over(known[new], known[one])
                line = {"case": f"over {one}, {'merged' if merged else 'separate'}", "mid": said.mid, "runs": said.runs}
                found.append(line | said.low.columns("low") | said.high.columns("high") | aa.columns("noise"))
    return pd.DataFrame(found)


def _over(slow: Mapping[tuple[int, int], float], fast: Mapping[tuple[int, int], float]) -> Interval:
    """The ratio of two times, block by block."""
    logs = {at: math.log(slow[at] / fast[at]) for at in slow.keys() & fast.keys()}
    return interval(by_process(logs)).each(math.exp)


def ceiling(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of the read ceiling of the two chains."""
    return _observed(of_ceiling(rows).to_dict("records"), lambda line: line["variant"])


TABLES: Tables = {
    "tables.times": times_of,
    "tables.by_variant": by_variant,
    "tables.fastest": fastest,
    "tables.against_cublas": against_cublas,
    "tables.other_choice": other_choice,
    "tables.steps": steps,
    "tables.ladder": ladder,
    "tables.same_bits": same_bits,
    "tables.rows_map": rows_map,
    "tables.pattern": pattern,
    "tables.pays_from": pays_from,
    "tables.pattern_share": pattern_share,
    "tables.unseen": unseen,
    "tables.splits": splits,
    "tables.choices": choices,
    "tables.chains": chains,
    "tables.beyond_reading": beyond_reading,
    "tables.of_ceiling": of_ceiling,
    "tables.token_total": token_total,
    "tables.token_blocks": token_blocks,
    "tables.from_chain": from_chain,
    "chain_views.merging": merging,
    "claims.step": step,
    "claims.pattern": pattern_claim,
    "claims.rule": rule,
    "claims.ceiling": ceiling,
}


# Numbers that only the views make: parts of their sentences


def _records(frame: pd.DataFrame, **wanted: Any) -> list[dict[str, Any]]:
    """The lines of a table that have these values."""
    return [line for line in frame.to_dict("records") if all(line[name] == value for name, value in wanted.items())]


def _mean(lines: Sequence[Mapping[str, Any]], form: str = ".2f") -> str:
    return format(geometric_mean(line["ratio"] for line in lines), form)


SHOWN = {  # what the page calls variants
    THREAD: "one thread per row", TURNED: "coalescing alone [K, N]", WARP: "one warp per row",
    WIDE: "loads of 16 bytes", HINT: "evict-first hint", FOUR: "four rows per program", PIPELINED: "pipelined copies",
    TUNED: "tuned, ordinary launch", SPLIT: "split K", OURS: "dependent launch",
}  # fmt: skip


def said_beside_cublas(rows: pd.DataFrame) -> list[str]:
    """Geometric means, ends and verdicts over the shapes of 16 MB and more."""
    found = []
    for name in (WIDE, TUNED, OURS):
        lines = [line for line in _records(against_cublas(rows), dtype="bf16", of=name) if line["MB"] >= 16]
        ratios = [line["ratio"] for line in lines]
        words = counted(line["verdict"] for line in lines)
        found.append(f"{SHOWN[name]}: {faster(geometric_mean(ratios))} ({gains(ratios)}), {words}")
    return found


def said_speeds(rows: pd.DataFrame) -> list[str]:
    """The read speed that is 100 %."""
    return [f"Measured read speed: {_top(rows, 'gemv'):.2f} TB/s"]


def _pays_from(walked: Sequence[Mapping[str, Any]]) -> int:
    """From how many rows on coalescing alone is faster at every shape."""
    lost = max(line["N"] for line in walked if line["pattern alone"] <= 1)
    return min(line["N"] for line in walked if line["N"] > lost)


def answer_facts(rows: pd.DataFrame) -> dict[str, Any]:
    """What the first screen is made of."""
    of = {line["step"]: line for line in _records(steps(rows), over=THREAD)}
    plain = [line["ratio"] for line in _records(against_cublas(rows), dtype="bf16", of=WIDE) if line["MB"] >= 16]
    chain = {line["variant"]: line["ratio"] for line in _records(chains(rows), model=QWEN)}
    walked = _records(pattern(rows))
    return {
        "alone": of[TURNED]["mean ratio"], "slower": of[TURNED]["slower"], "cases": of[TURNED]["cases"],
        "least": of[WARP]["least"], "most": of[WARP]["most"], "plain": geometric_mean(plain),
        "paying": of[TURNED]["most"], "rows": _pays_from(walked),
        "stored": all(line["with width"] > line["pattern alone"] for line in walked),
        "merging": min(line["ratio"] for line in _records(merging(rows), kernel="ours")), "model": QWEN,
        "trigger": chain["ours, kernels with the trigger between, merged"],
        "ordinary": chain["ours, kernels between, merged"],
    }  # fmt: skip


OTHERS = (
    "torch.compile", "flag_gems.mv", "sglang 0.5.23 hopper_bf16_gemv", "vllm 0.33.0 ll_bf16_gemm",
    "vllm 0.33.0 skinny_gemm",
)  # fmt: skip


def said_best_peer(rows: pd.DataFrame) -> list[str]:
    """The fastest of all libraries over ours, where the others ran; and which engines have no kernel among them."""
    ran = {name for of in _bf16(rows).values() for name in of}
    lacking = [engine for engine in ("SGLang", "vLLM") if not any(engine.lower() in name.lower() for name in ran)]
    without = f", without {' and '.join(lacking)}" if lacking else ""
    us = [of for of in _bf16(rows).values() if set(OTHERS) & set(of)]
    best = [min(of[name] for name in (*CUBLAS, *OTHERS) if name in of) for of in us]
    means = {name: geometric_mean(x / of[name] for x, of in zip(best, us, strict=True)) for name in (OURS, TUNED)}
    return [
        f"{SHOWN[name]}, against the fastest library: {faster(mean)}; {len(us)} shapes{without}"
        for name, mean in means.items()
    ]


def said_engines(rows: pd.DataFrame) -> list[str]:
    """Each engine's kernel against dependent launch and cuBLAS, where it ran."""
    found = []
    for name in OTHERS[2:]:
        us = [of for of in _bf16(rows).values() if name in of]
        if us:
            mine = geometric_mean(of[OURS] / of[name] for of in us)
            library = geometric_mean(min(of[one] for one in CUBLAS) / of[name] for of in us)
            than = f"{faster(mine, 'dependent launch')}, {faster(library, 'cuBLAS')}; {len(us)} shapes"
            found.append(f"{name.rpartition(' ')[2]}: {than}")
    return found or ["vLLM skinny_gemm: not measured on this GPU"]


def said_gains(rows: pd.DataFrame) -> list[str]:
    """Mean of each step, and how often it loses."""
    return [
        f"{SHOWN[line['over']]} → {SHOWN[line['step']]}: {faster(line['mean ratio'])}; "
        + (f"slower in {line['slower']} of {line['cases']}" if line["slower"] else f"never slower in {line['cases']}")
        for line in _records(steps(rows))
        if line["slower from"] == line["slower to"]
    ]


def said_unseen(rows: pd.DataFrame) -> list[str]:
    """Mean and most of the rule's time over the fastest candidate's."""
    some = list(unseen(rows)["rule / fastest"])
    return [f"{faster(1 / geometric_mean(some))}, at most {max(some):.2f}×"]


def said_splits(rows: pd.DataFrame) -> list[str]:
    """The fastest split over the fastest without, at each short shape."""
    return [f"{x['N']} × {x['K']}: {faster(1 / x['split / whole'])}" for x in _records(splits(rows))]


def said_tuning(rows: pd.DataFrame) -> list[str]:
    """Candidates of a shape; seconds from one shape's start to the next one's."""
    counts = [len(known) for _, known in _tuned(rows)]
    starts = sorted(pd.Timestamp(min(row["utc"] for row in group)) for group in _by_case(rows))
    seconds = [(after - before).total_seconds() for before, after in pairwise(starts)]
    taken = f"{median(seconds):.0f} s, at most {max(seconds):.0f} s"
    return [f"candidates a shape: {span(counts, 'd')}", f"trying those of a shape: {taken}"]


def _by_case(rows: pd.DataFrame) -> list[list[dict[str, Any]]]:
    """The rows of each tuned case, cold and hot together."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cache in ("cold", "hot"):
        for _, group in cases(rows, "tune", cache):
            found.setdefault(group[0]["case"], []).extend(group)
    return list(found.values())


def said_bits(rows: pd.DataFrame) -> list[str]:
    """In how many shapes all results are the same."""
    found = []
    for dtype in ("bf16", "fp32"):
        for of, words in (("rows", "a sum for each row"), ("control", "one tile of several rows (control)")):
            outcomes = [line["outcomes"] for line in _records(same_bits(rows), dtype=dtype, of=of)]
            found.append(f"{words}, {dtype}: same bits at {outcomes.count(1)} of {len(outcomes)} shapes")
    return found


def said_interleaving(rows: pd.DataFrame) -> list[str]:
    """Interleaved rows over adjacent ones."""
    names = "rows=4", "rows=4, interleaved"
    return _spread([line for _, group in cases(rows, "gemv") if (line := compare(group, *names))])


def said_warm(rows: pd.DataFrame) -> list[str]:
    """A choice tuned in a warm cache over the table's."""
    lines, tried = _records(other_choice(rows)), len(list(cases(rows, "tune", "hot")))
    return [f"another choice: in {len(lines)} of {tried} cases", *_spread(lines)]


def _spread(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    turned = {"faster": "slower", "slower": "faster"}
    words = counted("|".join(turned.get(word, word) for word in line["verdict"].split("|")) for line in lines)
    ratios = [line["ratio"] for line in lines]
    return [f"{faster(1 / geometric_mean(ratios))} ({gains(1 / ratio for ratio in ratios)}); {words}"]


def said_questions(rows: pd.DataFrame) -> list[str]:
    """Geometric means of the bf16 shapes' medians; merging of whole layers."""
    us = list(_bf16(rows).values())
    pairs = (THREAD, WARP), (THREAD, TURNED), (WARP, WIDE), (WIDE, FOUR), ("rows=4, interleaved", "rows=4")
    means = [geometric_mean(of[old] / of[new] for of in us if {old, new} <= set(of)) for old, new in pairs]
    lines = [[line["ratio"] for line in _records(merging(rows), kernel=kernel)] for kernel in ("torch.mv", "ours")]
    return [*map(faster, means), *map(gains, lines)]


def said_prediction(rows: pd.DataFrame) -> list[str]:
    """Time over prediction, least and most."""
    found = []
    for name in (OURS, TUNED, "torch.mv"):
        over = [
            us / row["predicted_us"]
            for params, row, us in _usable(rows, "gemv")
            if params["dtype"] == "bf16" and row["variant"] == name and row["predicted_us"] > 0
        ]
        found.append(f"{SHOWN.get(name, name)} {span(over)}")
    return found


def said_why_not_32(rows: pd.DataFrame) -> list[str]:
    """What a step along K takes with one CTA on an SM and with four and more."""
    lines = _records(pattern(rows))
    one = [line for line in lines if line["CTAs an SM"] == 1]
    many = [line["ns a step, W [N, K]"] / line["look-ups, ns"] for line in lines if line["CTAs an SM"] >= 4]
    tallest = max(lines, key=lambda line: line["N"])
    found = [
        f"against one thread per row: {span((line['with width'] for line in lines), '.1f')}× faster",
        f"time over look-ups alone: {span(many)}",
        f"{tallest['pattern alone']:.1f}× of {tallest['with width']:.1f}×",
    ]
    for dtype in ("bf16", "fp32"):
        for how in ("[N, K]", "[K, N]"):
            walked = span((line[f"ns a step, W {how}"] for line in one if line["dtype"] == dtype), ".0f")
            found.append(f"one CTA an SM, {dtype}, W {how}: a step of K: {walked} ns")
    return found


def said_limits(rows: pd.DataFrame) -> list[str]:
    """What dependent launch reaches over cuBLAS, and what reading would."""
    of = {"ours, separate": "separate", "ours, merged": "merged"}
    return [
        f"{line['model']}, {of[line['variant']]}: {faster(line['ratio'])}, at most {line['at most']:.2f}×"
        for line in _records(chains(rows))
        if line["variant"] in of
    ]


def said_grows(rows: pd.DataFrame) -> list[str]:
    """µs beyond reading of the production chain at both ends."""
    (line,) = _records(beyond_reading(rows), variant="ours, merged")
    least, most = (f"{line[end]:.1f} µs at {line[f'{end} MB']:.0f} MB" for end in ("least", "most"))
    return [f"dependent launch, merged: {least}, {most}"]


def _of_chain(rows: pd.DataFrame, variant: str, column: str) -> list[float]:
    return [line[column] for line in _records(chains(rows), variant=variant)]


def said_chain(rows: pd.DataFrame) -> list[str]:
    """Percent of the speed of reading, all models."""
    return [f"Dependent launch, merged: {span(_of_chain(rows, 'ours, merged', '% of reading W'), '.0f')} %"]


def said_overhead(rows: pd.DataFrame) -> list[str]:
    """µs a GEMV beyond reading, all models."""
    return [f"Dependent launch, merged: {span(_of_chain(rows, 'ours, merged', 'beyond reading'), '.1f')} µs"]


def said_between(rows: pd.DataFrame) -> list[str]:
    """Gains over cuBLAS by what stands between, all models."""
    kinds = {"the trigger": "with the trigger between", "ordinary": "between"}
    names = {"the trigger": "kernels with the trigger between", "ordinary": "ordinary kernels between"}
    return [
        f"{names[kind]} {span(_of_chain(rows, f'ours, kernels {words}, merged', 'ratio'))}×"
        for kind, words in kinds.items()
    ]


SENTENCES: Sentences = {
    "views.beside_cublas": said_beside_cublas,
    "views.speeds": said_speeds,
    "views.gains": said_gains,
    "views.best_peer": said_best_peer,
    "views.engines": said_engines,
    "views.unseen": said_unseen,
    "views.splits": said_splits,
    "views.tuning": said_tuning,
    "views.bits": said_bits,
    "views.interleaving": said_interleaving,
    "views.warm": said_warm,
    "views.questions": said_questions,
    "views.prediction": said_prediction,
    "views.why_not_32": said_why_not_32,
    "chain_views.limits": said_limits,
    "chain_views.grows": said_grows,
    "chain_views.chain": said_chain,
    "chain_views.overhead": said_overhead,
    "chain_views.between": said_between,
}
