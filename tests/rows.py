"""Rows of the real studies as a sweep leaves them, with made-up times: what views, claims and pages are tried on."""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from toy_lab import MACHINE, row

from labkit import registry
from labkit.bench import records
from labkit.bench.sha import kernel_sha
from labkit.bench.spec import Case, Variant
from labkit.report.figures import Picture
from labkit.sweep import run as sweep

Us = Callable[[Case, Variant], float]

LAYOUT = {"models": ["Qwen3-Next-80B-A3B"], "batches": [1, 64], "states": ["fp32", "bf16"]}
LAYOUT |= {"gates": [], "step_batches": [], "prefills": []}
GEMV = {"models": ["AutoMegaKernel h1024", "Llama-3.2-1B", "Qwen3.5-4B"], "dtypes": ["bf16", "fp32"]}
DECODE = {"models": ["AutoMegaKernel h1024", "Llama-3.2-1B"], "dtypes": ["bf16"], "parts": [20, 88], "starts": [512]}
MOE = {"models": ["Qwen3-30B-A3B"], "tokens": [1, 128], "weights": ["bf16", "INT4"], "routings": ["uniform", "zipf 1"]}
MOE |= {"gemms": ["Qwen3.5-35B-A3B"], "gemm_tokens": [128, 1642], "wave_tokens": [352]}
BATCHED_FFN = {"models": ["Qwen3.5-27B"], "formats": ["Q4_K", "BF16"], "tokens": [1, 4, 8, 64], "capacities": [16]}
BATCHED_FFN |= {"routed_formats": ["Q4_K"], "routed_tokens": [1, 8], "cache_tokens": [1], "traces": ["uniform"]}
TODAY = {"gates": ["GDN", "KDA"], "states": ["fp32", "bf16"], "batches": [1, 8, 64, 128, 256, 512]}
TODAY |= {"verify_batches": [64, 128, 256, 512], "prefills": ["1 x 2048", "1 x 8192", "1 x 65536"]}
MACHINE_PAGE = {
    "kinds": ["launch", "h2d", "read", "in_place", "copy", "bf16", "fp8"],
    "sizes_mib": [1, 256],
    "matrix_sizes": [4096],
}


def make(study: str, parameters: Mapping[str, Any], us: Us, spread: float = 1e-3, **changes: Any) -> pd.DataFrame:
    """Rows of every case, variant and cache of a study, three processes of ten blocks each.

    us: µs of a variant in a case. spread: relative noise of a sample. changes: columns that are the same in all rows.
    """
    declared = registry.load(study)
    found = []
    for case in declared.cases(parameters):
        floor = declared.floor(case)
        small = 2 * (floor.set_bytes or floor.bytes) <= MACHINE["l2_bytes"]
        for variant in sweep.with_control(declared, case):
            for cache in variant.caches:
                if cache == "cold" or small or floor.hot_at_any_size:
                    found.append(_row(study, case, variant, floor, us(case, variant), spread, cache) | changes)
    return pd.DataFrame(found)


def _row(study: str, case: Case, variant: Variant, floor: Any, us: float, spread: float, cache: str) -> dict[str, Any]:
    runs, blocks = 3, 10
    wave = np.sin(np.arange(runs * blocks) + len(variant.name))  # no random numbers, yet no two variants alike
    ns = [round(1e3 * us * (1 + spread * float(w))) for w in wave]
    evidence = access(case, variant) if case.op == "decode" and variant.options else {}
    evidence = decode_facts(case, variant) if study == "persistent_tables" else evidence
    return row(study, case.op, case.key, variant.name, variant.role, kernel_sha(variant.source), ns) | {
        "options": json.dumps(dict(variant.options), sort_keys=True),
        "cache": cache,
        "mode": variant.mode,
        "run": [run for run in range(runs) for _ in range(blocks)],
        "block": [block for _ in range(runs) for block in range(blocks)],
        "floor_bytes": floor.bytes,
        "floor_flops": floor.flops,
        "predicted_us": us * 1.05 if floor.limit else math.nan,
        "error": 1e-4,
        "evidence": json.dumps(evidence),
        "rules": rules(study),
    }


@functools.cache
def rules(study: str) -> str:
    """The present rules of a study's claims, as a row holds them."""
    return json.dumps({claim.id: claim.sha() for claim in registry.load(study).claims}, sort_keys=True)


def layout_us(ratio: Callable[[int, int], float] | float = 1.0) -> Us:
    """Times of the state layout study at 3 TB/s. ratio: KV / VK, in all cases or as a function of batch and tile."""

    def us(case: Case, variant: Variant) -> float:
        least = 2 + registry.load("state_layout").floor(case).bytes / 3e6
        if variant.role == "ceiling":
            return least
        slower = ratio(case["batch"], variant.options["BV"]) if callable(ratio) else ratio
        return 1.05 * least * (slower if variant.options["layout"] == "KV" else 1.0)

    return us


def gemv_us(over: Mapping[str, float] | Callable[[Case, str], float]) -> Us:
    """Times of the GEMV study: 2 µs and the bytes at 3 TB/s, times a factor; 1.5 µs for an empty kernel.

    over: the factor, by variant (1.25 for those it does not name) or as a function of case and variant.
    """

    def us(case: Case, variant: Variant) -> float:
        name = variant.options.get("repeats", variant.name)
        if name.startswith("empty kernel"):
            return 1.5
        factor = over(case, name) if callable(over) else over.get(name, 1.25)
        return factor * (2 + registry.load("gemv_coalescing").floor(case).bytes / 3e6)

    return us


def decode_us(over: Mapping[str, float] | None = None) -> Us:
    """Times of the study of tables. The step: bytes at 3 TB/s and 20 µs, 5 without waits. over: factors, by variant.

    With the host a way takes the step and its host's work: 1 and 2 build for 2 ms and 0.2 ms, pageable copies take
    30 µs and wait for what is queued, everything else of the host 5 µs a part.
    """

    def us(case: Case, variant: Variant) -> float:
        name = variant.options.get("repeats", variant.name)
        factor = (over or {}).get(name, 1.0)
        if case.op == "host":
            way, _, part = name.partition(" · ")
            return factor * _host_us(case, way, part)
        step = registry.load("persistent_tables").floor(case).bytes / 3e6
        if variant.role != "ceiling":
            waits = {"nobody waits": 5, "nothing loaded": 30}
            rest = 20 if variant.mode == "eager" or name.startswith("tables") else 40
            step += next((us for words, us in waits.items() if words in name), rest)
        parts = [_host_us(case, name, part) for part in ("build", "copy", "launch")] if name[0].isdigit() else []
        return factor * (step + sum(parts))

    return us


def _host_us(case: Case, way: str, part: str) -> float:
    pageable = "pageable" in way
    if part == "build":
        return {"1": 2000.0 * (0.7 if "alone" in way else 1.0), "2": 200.0}.get(way[0], 5.0)
    return 30.0 + case.params.get("queued_us", 0) if part == "copy" and pageable else 5.0


@functools.cache
def _counts(model: str, parts: int) -> dict[str, int]:
    from labkit.kernels.decoder import tables
    from labkit.kernels.decoder.model import decoder

    return tables.counts(tables.lower(tables.Lowering(decoder(model), 132, cache=2048, parts=parts or None)))


def decode_facts(case: Case, variant: Variant) -> dict[str, Any]:
    """What is recorded beside a decode: its tables, and 64 right tokens, or 1 where a position is replayed."""
    name = variant.options.get("repeats", variant.name)
    found: dict[str, Any] = {}
    if case.op in ("token", "batch") and variant.role != "ceiling" and "nobody waits" not in name:
        right = 1 if name.startswith("5") else 64
        found = {"checked": 64, "right": right, "margin": 0.01, "errors": [1e-3, 1e-3 if right == 64 else 0.3]}
        found |= {} if right == 64 else {"margin there": 0.2}
    if name[0].isdigit() or name.startswith("tables"):
        counts = _counts(case["model"], case.params.get("parts", 0))
        whole = sum(counts[f"{table}_bytes"] for table in ("buffer", "record", "queue"))
        sent = 4 * counts["changed_words"] if name.startswith("6") else whole if name[0] in "1234" else 0
        found |= counts | {"sent": {"bytes": sent, "copies": int(sent > 0), "kernels": 1}}
    if "moments" in name:
        ops = ("qkv", "attention", "output", "gate_up", "down", "head")
        found["stages"] = [{"op": op, "stages": 4, "wake": 3.0, "work": 5.0, "tail": 1.0} for op in ops]
        found["finer"] = {"measured": 100.0, "all": 96.0, "what it reads": 95.0, "its parts": 84.0, "nothing": 60.0}
    return found


def moe_us(case: Case, variant: Variant) -> float:
    """Times of the study of expert layers at 3 TB/s and 800 TFLOP/s: ours a quarter above, the others a half."""
    floor = registry.load("moe_persistent_grid").floor(case)
    least = max(floor.bytes / 3e6, floor.flops / 8e8)
    return least * {"ceiling": 1.0, "ours": 1.25, "control": 1.25}.get(variant.role, 1.5)


def ffn_us(case: Case, variant: Variant) -> float:
    """Times of the study of batched FFN: 1 µs and the bytes at 3 TB/s, times a factor; the cache's by name."""
    from labkit.studies.batched_ffn import study
    from labkit.studies.batched_ffn import variants as names

    name = variant.options.get("repeats", variant.name)
    if case.op == "cache":
        return {names.RESIDENT: 100.0, names.COPIES: 150.0, names.NEEDED: 260.0}.get(name, 160.0)
    slow = {names.PER_TOKEN: 2.4 * 1.25, names.GEMM_N: 1.75, names.READ: 1.0, names.CUBLAS: 2.0}
    slow |= {names.STATIONARY: 1.2 if case["N"] <= 4 else 2.0, names.MATRIX: 1.3, names.GEMLITE: 2.0}
    slow |= {names.ROWCOPY: 9.0, names.WIDE: 1.9, names.STORED: 3.5}
    return (1 + study.weight_bytes(case) / 3e6) * slow.get(name, 1.5)


def batched_ffn(parameters: Mapping[str, Any] = BATCHED_FFN, **changes: Mapping[str, Any]) -> pd.DataFrame:
    """Rows of that study, with the facts that its variants record. changes: by variant, other facts."""
    from labkit.studies.batched_ffn import tables
    from labkit.studies.batched_ffn import variants as names

    table = make("batched_ffn", parameters, ffn_us)
    own = {name for some in tables.OURS.values() for name in some}
    known = {names.CUBLAS: {"alone": 0.5, "launches": 1, "sms": 132}, names.GROUPED_MM: {"alone": 0.25}}
    known |= {names.SPLIT_K: {"alone": 0.75}} | {name: {"alone": 0.0, "launches": 4, "sms": 132} for name in own}
    hits = {"hit_rate": 0.25}
    for i, line in table.iterrows():
        found = known.get(line["variant"], {}) | (hits if line["op"] == "cache" else {})
        table.at[i, "evidence"] = json.dumps(found | changes.get(line["variant"], {}))
    return table


def today_us(over: Mapping[str, float] | Callable[[Case, str], float]) -> Us:
    """Times of the study of buffered decode and segments: the states' bytes at 3 TB/s, or a prompt's, times a factor.

    over: the factor, by variant (1.25 for those it does not name; 1 for the read) or as a function of case and variant.
    """
    from labkit.studies.gated_delta_today import variants, work

    def us(case: Case, variant: Variant) -> float:
        name = variant.options.get("repeats", variant.name)
        if case.op == "prefill":
            least = registry.load("gated_delta_today").floor(case).bytes / 1e6
        else:
            least = work.state_bytes(case) / 3e6
        if name == variants.READ:
            return least
        factor = over(case, name) if callable(over) else over.get(name, 1.25)
        return factor * least

    return us


def today(over: Any = (), parameters: Mapping[str, Any] = TODAY, **options: Any) -> pd.DataFrame:
    """Rows of that study, with the facts that its variants record."""
    from labkit.studies.gated_delta_today import variants

    table = make("gated_delta_today", parameters, today_us(dict(over) if not callable(over) else over), **options)
    for i, line in table.iterrows():
        name, found = line["variant"], {}
        if line["op"] == "drift" and name.startswith("ours"):
            length = int(name.split()[-1])
            found = {"drift": [[n, 1e-3, 1e-3 * (1 + n / length / 1e4)] for n in (1, 64, 8192)]}
            found |= {"short": 0.3} if length > 1 else {}
        elif line["op"] == "prefill" and line["role"] != "control":
            found = {"error": 3e-3} | ({"segments": 1 if name == variants.ONE_SEGMENT else 4} if "ours" in name else {})
            found |= {"left out": 0.2} if name in (variants.FUSED, variants.SEGMENTS) else {}
        elif "searched" in name or (line["op"] == "length" and name.startswith(("ours", "sglang"))):
            found = {"choice": "BV=32, 2 pieces, 1 warp", "L": int(name.split()[-1]) if "L = " in name else 12}
        table.at[i, "evidence"] = json.dumps(found)
    return table


def machine_us(case: Case, variant: Variant) -> float:
    """Times of the machine study: 3 TB/s, 800 TFLOP/s, launches of 2 µs."""
    floor = registry.load("machine").floor(case)
    return 2.0 + floor.bytes / 3e6 + floor.flops / 800e6


def access(case: Case, variant: Variant) -> dict[str, Any]:
    """Evidence of a decode kernel: a request of 512 bytes over rows of BV (KV) or K (VK) numbers."""
    itemsize = 4 if case["state"] == "fp32" else 2
    tile, layout = variant.options["BV"], variant.options["layout"]
    run = itemsize * (tile if layout == "KV" else case["K"])
    state = {"kind": "load", "tensor": "state", "bytes_used": 1024.0 * itemsize, "bits": 128, "requests": 8}
    state |= {"lines": 512 / min(run, 128), "sectors": 512 / min(run, 32)}
    compiled = {"arch": MACHINE["capability"], "registers": 64, "spill_bytes": 0, "shuffles": 10, "barriers": 0}
    compiled |= {"loads": {"128": 8}, "stores": {"128": 8}, "ctas_per_sm": 28}
    return compiled | {"accesses": [state, state | {"kind": "store"}, {**state, "tensor": "a", "bytes_used": 2.0}]}


def store(folder: Path, *frames: pd.DataFrame, **changes: Any) -> Path:
    """Write rows and machine.json as a sweep leaves them. folder: of one GPU; changes: what differs in machine.json."""
    for frame in frames:
        records.write(folder / f"{frame['study'].iloc[0]}.parquet", frame)
    machine = MACHINE | {"slug": folder.name} | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.json").write_text(json.dumps(machine))
    return folder


def without(frame: pd.DataFrame, **match: Any) -> pd.DataFrame:
    """The rows that do not have all these values."""
    same = np.logical_and.reduce([frame[name] == value for name, value in match.items()])
    return frame[~same].reset_index(drop=True)


def processes(frame: pd.DataFrame, count: int) -> pd.DataFrame:
    """The rows with the samples of the first so many processes only."""
    kept = [[place for place, run in enumerate(runs) if run < count] for runs in frame["run"]]
    lists = ("run", "block", "samples_ns", "throttled", "sm_mhz")
    return frame.assign(
        **{
            name: [[one[place] for place in places] for one, places in zip(frame[name], kept, strict=True)]
            for name in lists
        }
    )


def spilling(frame: pd.DataFrame, *variants: str) -> pd.DataFrame:
    """The rows as they are where the kernels of these variants spill registers."""
    spill = frame["variant"].isin(variants)
    texts = frame["evidence"].where(~spill, frame["evidence"].str.replace('"spill_bytes": 0', '"spill_bytes": 96'))
    return frame.assign(evidence=texts)


def unusable(frame: pd.DataFrame, where: Sequence[bool] | None = None, reason: str = "out of memory") -> pd.DataFrame:
    """The rows, those of `where` (default: all) as they are after a failure: not ok, and without samples."""
    where = [True] * len(frame) if where is None else list(where)
    lists = ("run", "block", "samples_ns", "throttled", "sm_mhz")
    new = frame.to_dict("records")
    for one, failed in zip(new, where, strict=True):
        if failed:
            one |= {name: [] for name in lists} | {"ok": False, "reason": reason, "evidence": "{}", "error": math.nan}
            one |= {"predicted_us": math.nan, "ceiling": math.nan, "calls_per_sample": 0}
    return pd.DataFrame(new)


def caption(drawn: Any) -> str:
    """What a view says: its sentence, or its drawing's caption."""
    return drawn if isinstance(drawn, str) else drawn.caption


def check_views(views: Any, names: Sequence[str], some: pd.DataFrame) -> None:
    """Every view of these rows is a table, a whole drawing or a sentence, and says no NaN."""
    for view in names:
        drawn = getattr(views, view)(some)
        assert isinstance(drawn, Picture | pd.DataFrame | str), view
        said = "" if isinstance(drawn, pd.DataFrame) else caption(drawn)
        assert not re.search(r"\bnan\b", said), view
