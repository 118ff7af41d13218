"""Tables of the study: what the notebook shows and the claims are judged by, made from the measured rows."""

import functools
import json
import math
import re
from collections.abc import Sequence
from itertools import product

import numpy as np
import pandas as pd

from labkit.bench import ledger
from labkit.bench import tables as kit
from labkit.bench.spec import CONTROL, Case
from labkit.bench.tables import Cases, Params, facts, fastest, frame, pairs, picked, timed
from labkit.bench.verdict import median_us
from labkit.kernels.gguf import choose
from labkit.kernels.gguf.formats import FORMATS
from labkit.kernels.offload import policies as cache
from labkit.studies.batched_ffn import variants
from labkit.studies.batched_ffn.work import distinct, routing

SHAPE = ("model", "rows", "K", "format", "N", "trace", "policy", "capacity")
PRODUCTS = (variants.MATRIX, variants.WIDE, variants.STATIONARY, variants.GEMM_N, variants.PER_TOKEN)
OURS = {  # the lab's variants, each of which has the bits of its family in every batch
    "product": (*PRODUCTS, variants.INTEGERS),
    "ffn": PRODUCTS,
    "routed": (
        variants.INDEXED_MATRIX, variants.INDEXED_INTEGERS, variants.INDEXED, variants.ROWCOPY, variants.PER_TOKEN,
    ),
    "cache": (variants.PREFETCHED, variants.NEEDED),
}  # fmt: skip
# The family of bits that stands for the lab at every number of tokens: of the two that take every format and number of
# tokens, the one that reads all weights once for more tokens.
ALONE = {"product": variants.MATRIX, "ffn": variants.MATRIX, "routed": variants.INDEXED_MATRIX}
MIXED = "a token's bits then depend on its batch"  # of what follows the fastest of `OURS` at each number of tokens
OWN, LIBRARY = "ours", "library"
TIMES_COLUMNS = (*SHAPE, "variant", "role", "us", "us a token", "launches", "MB", "passes", "% of reading")
# To make fp32 of a weight, in instructions. Q8_0: taken out, 2^23 subtracted, scaled. K formats: a byte permuted into
# the mantissa of 128; before, for eight weights at once, even and odd ones into bytes, with what is above the four bits
# rotated there (of Q6_K, from two words); scale, minimum and what takes 128 away are once for 16 or 32.
TO_FLOAT = {"F32": 0, "BF16": 1, "Q8_0": 3, "Q4_K": 1 + 3 / 8, "Q5_K": 1 + 5 / 8, "Q6_K": 1 + 7 / 8}
LANES = 128  # of a multiprocessor, an instruction each a clock; since compute capability 8.6, and 9.0
WARP = 32  # lanes, of which a scheduler issues an instruction together


def cases(rows: pd.DataFrame, op: str) -> Cases:
    """Parameters and cold rows of every case of an operation: by format, then shape, then tokens."""

    def place(params: Params, group: pd.DataFrame) -> tuple[int, str, int]:
        return list(FORMATS).index(params["format"]), str([params.get(n) for n in ("model", "rows")]), params["N"]

    return kit.cases(rows, op, place)


def times(rows: pd.DataFrame, op: str) -> pd.DataFrame:
    """µs of every variant of every case; launches as the profiler saw them.

    MB: the least that is moved; passes: how often a variant asks for all weights. `% of reading`: a plain cold read of
    as many bytes as the weights have, in the same run, over the variant's time.
    """
    found = []
    for params, group in cases(rows, op):
        known, reading = facts(group), median_us(group).get(variants.READ, math.nan)
        for variant, line in timed(group).items():
            made = {"variant": variant, "role": line["role"], "us": line["us"], "us a token": line["us"] / params["N"]}
            made |= {"launches": known[variant].get("launches", math.nan), "MB": group["floor_bytes"].iloc[0] / 1e6}
            made["passes"] = passes(variant, params) if op == "product" else math.nan
            found.append(picked(params, SHAPE) | made | {"% of reading": 100 * reading / line["us"]})
    return frame(found, TIMES_COLUMNS)


def passes(variant: str, params: dict) -> float:
    """How often a variant reads all weights of a product, from memory or the L2; NaN of what is not the lab's."""
    N, *shape, format = (params[name] for name in ("N", "rows", "K", "format"))
    tokens = {variants.PER_TOKEN: 1, variants.GEMM_N: 1}
    tokens[variants.STATIONARY] = choose.rule(N, *shape, format).tokens
    tokens[variants.MATRIX] = choose.matrix_rule(N, *shape, format).tokens
    tokens[variants.INTEGERS] = max(8, min(32, 1 << (N - 1).bit_length()))  # as `integers.rule`, which needs Triton
    tokens[variants.WIDE] = choose.wide_rule(N, *shape, format, format == "BF16").tokens
    return -(-N // tokens[variant]) if variant in tokens else math.nan


DESIGNED = ["rows", "K", "format", "N", "against", "us", "against us", *kit.RATIO, "% of reading"]


def designs(rows: pd.DataFrame) -> pd.DataFrame:
    """A format's other design over the fastest other kernel of a case, and over cuBLAS in bf16.

    % of reading: what a plain read of the weights takes of the design's time.
    """
    found = []
    for params, group in cases(rows, "designs"):
        us, (design, _) = median_us(group), variants.DESIGNED[params["format"]]
        others = fastest(us, (variants.INTEGERS, variants.WIDE, variants.MATRIX)), variants.CUBLAS
        for line in pairs(group, [(design, one) for one in others if one in us]):
            found.append(picked(params, SHAPE) | line | {"% of reading": 100 * us[variants.READ] / line["us"]})
    return frame(found, DESIGNED).reindex(columns=DESIGNED)


def arithmetic(rows: pd.DataFrame) -> pd.DataFrame:
    """The multiply-add family's least instructions a weight, and what they allow of the plain read's speed at most.

    Those of x (a conversion a row block and token), of scales, addresses and loops come on top. % of reading: at the
    clock of the run, if every lane had an instruction in every cycle.
    """
    found = []
    for params, group in cases(rows, "product"):
        us, lanes = median_us(group), _lanes(group)
        if not {variants.STATIONARY, variants.READ} <= set(us) or not lanes:
            continue
        least = TO_FLOAT[params["format"]] + params["N"]
        weights = params["rows"] * params["K"]
        bound = least * weights / lanes
        line = {"instructions a weight": least, "least µs": bound, "reading µs": us[variants.READ]}
        line |= {"at most %": min(100.0, 100 * us[variants.READ] / bound), "us": us[variants.STATIONARY]}
        found.append(picked(params, SHAPE) | line | {"% of reading": 100 * us[variants.READ] / us[variants.STATIONARY]})
    return frame(found, [*SHAPE, "instructions a weight", "at most %"])


def issued(rows: pd.DataFrame, launches: pd.DataFrame) -> pd.DataFrame:
    """Instructions that `tensor_core` executes a weight, and of its time the percentage that issuing them takes.

    launches: facts of the launches of these rows (`evidence.predict.FACTS`). issue µs: every scheduler issues one
    instruction of a warp in every cycle, at the clock of the run. Only where the launches are of the timed code.
    """
    executed = launches.groupby(["op", "case", "variant", "kernel_sha"])["instructions"].sum()
    found = []
    for params, group in cases(rows, "product"):
        us, lanes = median_us(group), _lanes(group)
        code = next(iter(group.loc[group["variant"] == variants.MATRIX, "kernel_sha"]), "")
        key = ("product", group["case"].iloc[0], variants.MATRIX, code)
        if not {variants.MATRIX, variants.READ} <= set(us) or not lanes or key not in executed:
            continue
        count, weights = WARP * executed[key], params["rows"] * params["K"]
        issue = count / lanes
        line = {"instructions a weight": count / weights, "issue µs": issue, "us": us[variants.MATRIX]}
        line |= {"% of issue": 100 * issue / us[variants.MATRIX]}
        found.append(picked(params, SHAPE) | line | {"% of reading": 100 * us[variants.READ] / us[variants.MATRIX]})
    return frame(found, [*SHAPE, "instructions a weight", "% of issue", "% of reading"])


def _lanes(group: pd.DataFrame) -> float:
    """Instructions that all lanes of the GPU can execute in a µs, at the clock of a case's run; 0.0: not known."""
    known = facts(group).get(variants.STATIONARY, {})
    clock = [mhz for samples in group["sm_mhz"] for mhz in samples]
    return known["sms"] * LANES * float(np.median(clock)) if known.get("sms") and clock else 0.0


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """What one launch instead of N is worth, and what reading the weights once for all tokens is, by N."""
    loop, launch, once = variants.PER_TOKEN, variants.GEMM_N, variants.STATIONARY
    parts = [
        compared(rows, "product", now, before).assign(step=step, change=f"{before} → {now}")
        for step, now, before in (("one launch", launch, loop), ("weights read once", once, launch))
    ]
    return pd.concat(parts, ignore_index=True)


def compared(rows: pd.DataFrame, op: str, variant: str, against: str) -> pd.DataFrame:
    """Time of `against` over that of `variant` in every case of an operation that has both."""
    return kit.compared(cases(rows, op), variant, against, SHAPE)


def beside(rows: pd.DataFrame, op: str, against: str) -> pd.DataFrame:
    """Time of a library over that of `ALONE`, one family of bits in every case; above 1: ours is faster.

    fastest, mixed ratio, mixed verdict: the same of the fastest of the lab's variants in each case, whose families of
    bits differ from case to case.
    """
    found = []
    for params, group in cases(rows, op):
        best, wanted = fastest(median_us(group), OURS[op]), [(ALONE[op], against)]
        lines = pairs(group, [*wanted, (best, against)]) if best else []
        if len(lines) == 2:
            alone, mixed = ({n: v for n, v in line.items() if n not in ("variant", "against")} for line in lines)
            other = {"fastest": best, "mixed ratio": mixed["ratio"], "mixed verdict": mixed["verdict"]}
            found.append(picked(params, SHAPE) | alone | other)
    return frame(found, [*SHAPE, *kit.COMPARED, "fastest", "mixed ratio", "mixed verdict"])


def crossovers(rows: pd.DataFrame) -> pd.DataFrame:
    """The least N, for every format and shape, from which on matrix instructions are the faster family.

    NaN where they never are. `multiply-add up to`: the largest N at which the first family still reads at 80 % of the
    plain read's speed (NaN: at none).
    """
    table = times(rows, "product")
    found = []
    for (format, n, k), some in table.groupby(["format", "rows", "K"], sort=False) if len(table) else ():
        us = some.pivot_table(index="N", columns="variant", values="us").sort_index()
        if not {variants.MATRIX, variants.STATIONARY} <= set(us):
            continue
        slower = us[us[variants.MATRIX] >= us[variants.STATIONARY]].index
        after = us.index[us.index > slower.max()] if len(slower) else us.index
        near = some[(some["variant"] == variants.STATIONARY) & (some["% of reading"] >= 80)]["N"]
        line = {"matrix instructions from": after.min(), "multiply-add up to": near.max()}
        found.append({"format": format, "rows": n, "K": k} | line)
    return pd.DataFrame(found, columns=["format", "rows", "K", "matrix instructions from", "multiply-add up to"])


def price(rows: pd.DataFrame) -> pd.DataFrame:
    """What bit identity costs: time of `ALONE`, one family of bits, over that of the fastest of all; 1 if it is that.

    mixed price: of the fastest of the lab's variants in each case.
    """
    found, alone = [], ALONE["product"]
    for params, group in cases(rows, "product"):
        us = median_us(group)
        if alone in us:
            best, ours = fastest(us, timed(group)), fastest(us, OURS["product"])
            line = {"fastest": best, "price": us[alone] / us[best], "mixed price": us[ours] / us[best]}
            found.append(picked(params, SHAPE) | line)
    return frame(found, [*SHAPE, "fastest", "price", "mixed price"])


def gemlite(rows: pd.DataFrame) -> pd.DataFrame:
    """`ALONE` against gemlite's, each as time over that of its own bytes at the plain read's speed of the same run.

    `better`: gemlite's such ratio over that of `ALONE`; `mixed better`: over that of `fastest`, of the lab's variants
    in each case. Bytes: a format's as stored; gemlite's bits, and two bf16 in 32 weights.
    """
    found, alone = [], ALONE["product"]
    for params, group in cases(rows, "product"):
        us = median_us(group)
        if {alone, variants.GEMLITE, variants.READ} <= set(us):
            best = fastest(us, OURS["product"])
            own = FORMATS[params["format"]].bytes_per_weight()
            other = variants.GEMLITE_BITS[params["format"]] / 8 + 4 / 32
            line = {"ours / floor": us[alone] / us[variants.READ]}
            line["gemlite / floor"] = us[variants.GEMLITE] / (us[variants.READ] * other / own)
            line |= {"better": line["gemlite / floor"] / line["ours / floor"], "fastest": best}
            line["mixed better"] = line["better"] * us[alone] / us[best]
            found.append(picked(params, SHAPE) | line)
    return frame(found, [*SHAPE, "better", "fastest", "mixed better"])


def beside_llama(rows: pd.DataFrame, op: str) -> pd.DataFrame:
    """llama.cpp's own products beside ours, times and errors, in every case that has both.

    ratio: its time over that of `ALONE`, matrix instructions on weights by one rule; mixed ratio: over that of
    `fastest`, of the lab's variants in each case. Errors: relative RMSE, as they were checked.
    """
    found, alone = [], ALONE[op]
    for params, group in cases(rows, op):
        us, errors = median_us(group), dict(zip(group["variant"], group["error"], strict=True))
        if not {alone, variants.LLAMA} <= set(us):
            continue
        best = fastest(us, OURS[op])
        line = {"llama.cpp µs": us[variants.LLAMA], f"{alone} µs": us[alone], "fastest": best, "fastest µs": us[best]}
        line |= {"ratio": us[variants.LLAMA] / us[alone], "mixed ratio": us[variants.LLAMA] / us[best]}
        line |= {"llama.cpp error": errors[variants.LLAMA], f"{alone} error": errors[alone]}
        found.append(picked(params, SHAPE) | line)
    return frame(found, [*SHAPE, "ratio", "mixed ratio"])


def bits(rows: pd.DataFrame) -> pd.DataFrame:
    """Of every variant: cases in which a token alone was looked at, and in how many it had the bits of its batch.

    who: ours, a library, or by its role what else it is. Cases of one token say nothing, and are left out. A row that
    is refused since the bits differ counts: it has no time, but an answer.
    """
    found = []
    for op in ("product", "ffn", "routed"):
        for params, group in cases(rows, op):
            known, why = facts(group, usable=False), dict(zip(group["variant"], group["reason"], strict=True))
            roles = dict(zip(group["variant"], group["role"], strict=True))
            for name, one in known.items() if params["N"] > 1 else ():
                if "alone" in one and name != CONTROL:
                    who = OWN if name in OURS[op] else {"peer": LIBRARY}.get(roles[name], roles[name])
                    same = one["alone"] == 0 and not differs(why[name], "alone")
                    found.append({"op": op, "variant": name, "who": who, "same": same})
    grouped = frame(found, ["op", "variant", "who", "same"]).groupby(["op", "variant", "who"], sort=False)["same"]
    return grouped.agg(cases="size", same="sum").reset_index()


def differs(reason: str, error: str) -> bool:
    """Whether a row was refused because of this error of its check."""
    return re.search(rf"(error of|,) {error} [\dn]", reason) is not None


def stored_bits(rows: pd.DataFrame) -> pd.DataFrame:
    """Whether Q8_0 as stored gives the bits that it gives with its fields in arrays of their own, by shape."""
    found = []
    for params, group in cases(rows, "product"):
        for _, line in group[group["variant"] == variants.STORED].iterrows():
            if (other := differs(line["reason"], "packed")) or line["ok"]:
                found.append(picked(params, SHAPE) | {"same": not other})
    return frame(found, [*SHAPE, "same"])


def reuse(tokens: Sequence[int]) -> pd.DataFrame:
    """How many tokens share an expert: N · top_k / distinct experts, predicted for uniform routing, and drawn."""
    experts, top_k, _, _ = variants.ROUTED[variants.MAIN_ROUTED]
    found = []
    for n in tokens:
        drawn = variants.TRACES["uniform"](n, 1, experts, top_k, seed=n)
        distinct = len({key for dispatch in drawn for key in dispatch})
        expected = experts * (1 - (1 - top_k / experts) ** n)
        line = {"N": n, "distinct, predicted": expected, "distinct": distinct}
        found.append(line | {"reuse, predicted": n * top_k / expected, "reuse": n * top_k / distinct})
    return pd.DataFrame(found)


def hit_rates(
    traces: Sequence[str], policies: Sequence[str], capacities: Sequence[int], tokens: int = 1, length: int = 256,
) -> pd.DataFrame:  # fmt: skip
    """Hit rates of synthetic traces, by `cache.replay`; no GPU. capacities: experts a layer; tokens: in a dispatch.

    The first half of a trace is what `pinned` counts, the second what is replayed. Column bypassed: share of accesses.
    """
    layers, (experts, top_k, _, _) = variants.LAYERS, variants.ROUTED[variants.MAIN_ROUTED]
    found = []
    for trace in traces:
        whole = variants.TRACES[trace](2 * length, layers, experts, top_k, seed=1)
        first, second = (cache.batched(whole[i : i + length * layers], tokens, layers) for i in (0, length * layers))
        for policy, capacity in product(policies, capacities):
            seen = cache.replay(policy, capacity * layers, second, first)
            line = {"trace": trace, "policy": policy, "capacity": capacity, "hit rate": seen.hit_rate}
            found.append(line | {"bypassed": seen.bypassed / seen.accesses})
    return pd.DataFrame(found)


def oracle(params: Params) -> float:
    """Of a case of the cache: the hit rate over its own steps that no policy with as many slots can exceed."""
    return _oracle(Case("cache", params).key)


@functools.cache  # a replay takes half a second, and each GPU has the same cases
def _oracle(key: str) -> float:
    x = Case("cache", json.loads(key))
    trace = [[(n, e) for e in distinct(ids)] for step in routing(x) for n, ids in enumerate(step)]
    return cache.replay("belady", x["capacity"] * x["layers"], trace, first=trace).hit_rate


def cached(rows: pd.DataFrame) -> pd.DataFrame:
    """Steps through the cache: µs of each variant, and what of the copies is left to see.

    stall: µs that a step takes longer than with every expert there; prefetched / larger: the time with prefetch over
    the larger of copies and compute alone; balanced: whether these two are within 2×, and anything is copied, which is
    so unless all hit. Where nothing is, `copies µs` are what the host takes to find that out.
    """
    found = []
    for params, group in cases(rows, "cache"):
        us, names = median_us(group), (variants.COPIES, variants.RESIDENT, variants.NEEDED, variants.PREFETCHED)
        if not set(names) <= set(us):
            continue
        copies, compute, needed, prefetched = (us[name] for name in names)
        hit_rate = facts(group)[variants.NEEDED].get("hit_rate", math.nan)
        line = {"hit rate": hit_rate, "copies µs": copies, "compute µs": compute}
        line |= {"when needed µs": needed, "prefetched µs": prefetched}
        line |= {"stall, when needed": needed - compute, "stall, prefetched": prefetched - compute}
        line["prefetched / larger"] = prefetched / max(copies, compute)
        line["balanced"] = 0.5 <= copies / compute <= 2 and hit_rate < 1
        found.append(picked(params, SHAPE) | line)
    return frame(found, [*SHAPE, "hit rate", "copies µs", "compute µs", "prefetched / larger", "balanced"])


ledger.watch(__name__)
