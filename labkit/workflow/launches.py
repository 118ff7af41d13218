"""What the launches of recorded rows do: the facts that predictions are made from, kept in `data/launches.parquet`.

A row's evidence names no grid and no loop, and where a call is of several launches often nothing. Here the launches are
made again on tensors without values, for the recorded GPU's capability and in the configuration that the row names,
compiled (`evidence.executed`), and set beside what the case asks for. Only kernels that are as they were are taken; but
Triton's version may be another than the one that ran. What a future recording should keep with the row is this.

    labkit record --predict    # rows that it does not have yet; delete it to make all anew, in minutes
"""

import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch

from labkit import paths, registry
from labkit.bench.machine import Machine
from labkit.bench.records import write_atomic
from labkit.bench.spec import Case
from labkit.evidence import coalescing, compiled, executed, roofline
from labkit.evidence.executed import Code
from labkit.kernels.launch import Launch, launched
from labkit.kernels.offline import offline
from labkit.sweep.variants import code_of
from labkit.workflow import recorded

KEY = ("gpu", "study", "op", "case", "variant", "kernel_sha")
# (study, operation) -> roles; of the others the launches take too long to compile, or are not the lab's
WANTED = {
    ("state_layout", "step"): ("ours", "step"),
    ("state_layout", "decode"): ("baseline", "step"),
    ("state_layout", "verify"): ("ours", "step"),
    ("state_layout", "drift"): ("ours", "step"),
    ("state_layout", "extend"): ("ours", "step"),
    ("state_layout", "long"): ("ours",),
    ("gemv_coalescing", "gemv"): ("ours", "step"),
    ("gemv_coalescing", "chain"): ("ours",),
    ("moe_persistent_grid", "layer"): ("ours", "step"),
    ("batched_ffn", "product"): ("ours",),
    ("batched_ffn", "ffn"): ("ours",),
    ("batched_ffn", "routed"): ("ours",),
    ("persistent_tables", "token"): ("ours",),
    ("persistent_tables", "batch"): ("ours",),
    ("gated_delta_today", "ring"): ("ours", "baseline"),
    ("gated_delta_today", "ring_verify"): ("ours", "baseline"),
}
LINES = 4.0  # of a warp's load where its addresses cannot be evaluated: 16 bytes a lane, one after the other


@dataclass(frozen=True)
class Work:
    """What one launch must do.

    programs: that have work. bytes: through device memory at least; l2_bytes: from the L2 to multiprocessors. flops: of
    matrix instructions, padding included. load_bytes: by loads. passes: through loops, where neither of these tells it;
    outer: a program's, through the loops around those. stages: rounds of a loop whose loads are under way at once.
    rounds: that wait for each other, of the program that has most; None: its passes over the stages.
    """

    programs: float
    bytes: float
    l2_bytes: float
    flops: float = 0.0
    load_bytes: float = 0.0
    passes: float = 1.0
    outer: float = 1.0
    stages: float = 1.0
    rounds: float | None = None


@dataclass(frozen=True)
class Kernel:
    """What is known of a compiled kernel. key: the same for the same code; lines: of a warp's load, mean."""

    name: str
    warps: int
    per_sm: int
    code: Code
    key: str
    lines: float


_KERNELS: dict[str, Kernel] = {}


def kernel_of(launch: Launch, capability: int) -> Kernel:
    """Compiled for a GPU that need not be here, and taken apart; the same code once."""
    key = f"{capability} {code_of(launch)}"
    if key not in _KERNELS:
        made = compiled.build(launch, capability)
        listing = compiled.listing_of(made.asm["cubin"])
        known, meta = compiled.parse(listing), made.metadata
        fits = roofline.occupancy(known["registers"], meta.shared, meta.num_warps, capability)
        lines = coalescing.lines_a_load(launch, capability)
        lines = LINES if math.isnan(lines) else lines
        name = hashlib.sha256(key.encode()).hexdigest()[:12]
        _KERNELS[key] = Kernel(meta.name, meta.num_warps, max(fits, 1), executed.parse(listing), name, lines)
    return _KERNELS[key]


# ---- the launches of a row


def launches_of(row: Mapping[str, Any]) -> list[Launch]:
    """Of a row, in its order, on tensors without values; inside `offline`."""
    x, evidence = Case(row["op"], json.loads(row["case"])), json.loads(row["evidence"])
    special = _LAUNCHES.get(row["op"])
    if special:
        return special(x, row, evidence)
    return _prepared(x, row, "cpu" if row["op"] in ("extend", "long") else "meta")  # its plan reads lengths


def _prepared(x: Case, row: Mapping[str, Any], device: str) -> list[Launch]:
    variant = next(one for one in registry.load(row["study"]).variants(x) if one.name == row["variant"])
    return launched(variant.prepare(x, device, 1, 0).calls[0])


def _ffn(x: Case, row: Mapping[str, Any], _: Mapping[str, Any]) -> list[Launch]:
    from labkit.studies.batched_ffn import ahead

    return ahead.launches(x.op, dict(x.params), row["variant"])


def _layer(x: Case, _: Mapping[str, Any], evidence: Mapping[str, Any]) -> list[Launch]:
    from labkit.kernels.experts import expert_layer, inputs
    from labkit.studies.moe_persistent_grid import ahead, trials

    [item] = trials.inputs(x, "cpu", 1, 0)
    item = replace(item, ids=torch.zeros_like(item.ids))
    rows, parts, integers = inputs.sizes(item)
    values = (torch.empty(size, dtype=item.x.dtype) for size in (rows, parts))
    order = torch.arange(integers, dtype=torch.int32) % (x["T"] * x["top_k"])  # rows one after the other, as routed
    scratch = inputs.Workspace(x["T"], *values, order)
    return list(expert_layer.layer(item, ahead.config_from(evidence["config"]), scratch).launches.values())


def _gemv(x: Case, row: Mapping[str, Any], evidence: Mapping[str, Any]) -> list[Launch]:
    """With the choice that ran, which may be tuned; steps of the ladder have none."""
    from labkit.studies.gemv_coalescing import trials

    if "choice" not in evidence:
        return _prepared(x, row, "meta")
    return launched(trials.candidate(x, "meta", 1, 0, **evidence["choice"]).calls[0])


def _token(x: Case, row: Mapping[str, Any], _: Mapping[str, Any]) -> list[Launch]:
    from labkit.kernels.decoder.tables import POSITION_FROM
    from labkit.studies.persistent_tables import study, trials, variants

    if row["variant"] == variants.STREAMED:  # warps that wait for each other are not modelled
        return []
    return [trials.compilable(x["model"], x["dtype"], POSITION_FROM[-1], batch=study.batch_of(x))]


_LAUNCHES = {
    **dict.fromkeys(("product", "ffn", "routed"), _ffn), **dict.fromkeys(("token", "batch"), _token),
    "layer": _layer, "gemv": _gemv,
}  # fmt: skip


# ---- the work of a row's launches


def work_of(row: Mapping[str, Any], launches: Sequence[Launch], names: Sequence[str], l2: int) -> list[Work] | None:
    """Of each launch; None where there is no rule for one of them. names: of the kernels; l2: bytes of the L2."""
    x = Case(row["op"], json.loads(row["case"]))
    return _WORK[row["op"]](x, row, launches, names, l2)


def _bytes(launch: Launch, *names: str) -> float:
    """Of a launch's tensors; no name: of all."""
    some = [value for name, value in launch.args.items() if not names or name in names]
    return float(sum(value.numel() * value.element_size() for value in some if isinstance(value, torch.Tensor)))


def _programs(launch: Launch) -> int:
    return math.prod(launch.grid)


def _beyond(size: float, l2: int) -> float:
    """Of bytes that one launch leaves for the next, those that do not stay in the L2."""
    return max(0.0, size - l2)


def _straight(x: Case, row: Mapping[str, Any], launches: Sequence[Launch], *_: Any) -> list[Work]:
    """One launch for all of the case, a loop over its tokens if it has several."""
    size = row["floor_bytes"]
    return [Work(_programs(one), size, size, passes=x.params.get("T", 1)) for one in launches]


def _rings(x: Case, row: Mapping[str, Any], launches: Sequence[Launch], *_: Any) -> list[Work]:
    """The last launch moves the states; those before it the keys of the ring and the tokens, from the L2 or little.

    Where the state is written at every token, or after every draft, there is one launch, of more bytes than the floor.
    """
    from labkit.studies.gated_delta_today import variants, work

    drafts = x.params.get("T", 1)
    size = float(row["floor_bytes"])
    if row["variant"] in (variants.PLAIN, variants.OURS_STORED):
        written = work.state_bytes(x) * (drafts if x.op == "ring_verify" else 1)
        size = float(work.state_bytes(x) + written + x["batch"] * drafts * work.token_bytes(x))
    elif x.op == "ring":
        size = work.ring_bytes(x, variants.LENGTH)
    least = [0.0] * (len(launches) - 1) + [size]
    ring = float(work.ring_memory(x, variants.LENGTH))
    return [
        Work(_programs(one), share, share or ring, passes=drafts) for one, share in zip(launches, least, strict=True)
    ]


def _extend(x: Case, row: Mapping[str, Any], launches: Sequence[Launch], names: Sequence[str], l2: int) -> list[Work]:
    """Chunks of 64 tokens: in order within a sequence only in the kernel that carries the state on."""
    found = []
    for launch, name in zip(launches, names, strict=True):
        size, stages = _bytes(launch), max(1, launch.options.get("num_stages", 1) - 1)
        chunks = launch.args["states"].shape[0] / launch.args["initial"].shape[0] if "chunk_state" in name else 2
        least = size if size > l2 else row["floor_bytes"] / len(launches)
        found.append(Work(_programs(launch), least, size, passes=chunks, stages=stages))
    return found


def _gemvs(_: Case, row: Mapping[str, Any], launches: Sequence[Launch], *__: Any) -> list[Work]:
    """W once, and with each tile of it x, once for the rows that share it."""
    sizes = [_bytes(launch, "W") for launch in launches]
    shares = [row["floor_bytes"] * size / sum(sizes) for size in sizes]
    found = []
    for launch, size, share in zip(launches, sizes, shares, strict=True):
        loads = size * (1 + 1 / launch.args.get("ROWS", 1))
        stages = launch.args.get("STAGES", 1)
        found.append(Work(_programs(launch), share, share, load_bytes=loads, stages=stages))
    return found


_WEIGHTS = ("words", "high", "scales", "d")


def _products(
    x: Case, row: Mapping[str, Any], launches: Sequence[Launch], names: Sequence[str], _: int
) -> list[Work] | None:
    """Tiles of tokens each read all weights, the first from memory; matrix instructions for whole tiles of tokens."""
    if set(names) != {"_tensor_core_kernel"}:
        return None
    sizes = [(1 + bool(one.args["GATED"])) * _bytes(one, *_WEIGHTS) for one in launches]
    found = []
    for launch, size in zip(launches, sizes, strict=True):
        args, share = launch.args, row["floor_bytes"] * size / sum(sizes)
        tiles = -(-x["N"] // args["TOKENS"])
        flops = 2.0 * args["rows"] * args["GROUPS"] * 32 * args["TOKENS"] * tiles * (1 + bool(args["GATED"]))
        outer = 1 + args["strips"] * args["PARTS"] / launch.grid[-1]
        stages = 1 + args["DEPTH"]
        found.append(Work(_programs(launch), share, share * tiles, flops, outer=outer, stages=stages))
    return found


def _routed(x: Case, row: Mapping[str, Any], launches: Sequence[Launch], names: Sequence[str], _: int) -> list[Work]:
    """Of each expert that is needed, whole tiles of its tokens."""
    from labkit.studies.batched_ffn import work

    [[ids]] = work.routing(x)
    slots = Counter(expert for chosen in ids for expert in chosen)
    found = []
    for launch, name in zip(launches, names, strict=True):
        args = launch.args
        if name != "_grouped_tensor_core_kernel":
            found.append(Work(_programs(launch), 0, len(ids) * x["top_k"] * x["hidden"] * 2))
            continue
        tiles = sum(-(-count // args["TOKENS"]) for count in slots.values())
        matrices = 1 + bool(args["GATED"])
        share = row["floor_bytes"] * matrices / 3
        flops = 2.0 * tiles * args["TOKENS"] * args["rows"] * args["GROUPS"] * 32 * matrices
        programs, again = launch.grid[0] * tiles, share * tiles / len(slots)
        found.append(Work(programs, share, again, flops, stages=1 + args["DEPTH"]))
    return found


def _layers(x: Case, row: Mapping[str, Any], launches: Sequence[Launch], names: Sequence[str], l2: int) -> list[Work]:
    """Weights of the experts that got a token, and the rows that pass from launch to launch."""
    evidence, slots, size = json.loads(row["evidence"]), x["T"] * x["top_k"], 2
    value = {"INT4": 0.5 + 2 / 32}.get(x["weights"], 2)
    tokens, narrow, wide = x["T"] * x["H"] * size, slots * x["I"] * size, slots * x["H"] * size
    weights = row["floor_bytes"] - 2 * tokens
    found = []
    for launch, name in zip(launches, names, strict=True):
        args, programs = launch.args, _programs(launch)
        share = weights * (2 if name == "_up_kernel" or args.get("GATHER") else 1) / 3
        if name in ("_up_kernel", "_down_kernel"):
            found.append(Work(programs, share, share, load_bytes=share))
        elif name in ("_gemm_kernel", "_gemm_descriptor_kernel"):
            first = share > weights / 2
            tiles, passed = evidence["gemm1" if first else "gemm2"]["tiles"], narrow + (tokens if first else wide)
            block_m, block_n, K = (args[key] for key in ("BLOCK_M", "BLOCK_N", "K"))
            asked = tiles * K * (block_m * size + block_n * value) + passed
            stages = max(1, launch.options.get("num_stages", 1) - 1)
            flops = 2.0 * tiles * block_m * block_n * K
            found.append(Work(tiles, share + _beyond(passed, l2), asked, flops, stages=stages))
        elif name == "_sum_kernel":
            found.append(Work(programs, _beyond(wide + tokens, l2), wide + tokens))
        else:
            found.append(Work(programs, 0, slots * 8))
    return found


_STAGE_ROUNDS = 3  # that wait for each other in every stage of a token: its record, its counter, its input


def _tokens(x: Case, row: Mapping[str, Any], launches: Sequence[Launch], *_: Any) -> list[Work]:
    """Stages of a token, of which each program has some tiles, one after the other, and attention over the context."""
    from labkit.kernels.decoder.model import decoder
    from labkit.studies.persistent_tables import plans, study, variants

    batch = study.batch_of(x)
    model, plan = decoder(x["model"]), plans.plan_of(x["model"], x["dtype"], batch=batch)
    programs = json.loads(row["evidence"])["programs"]
    block_k, block_t, ahead = (plan.choice.get(name, other) for name, other in _TOKEN_CHOICE.items())
    tiles = row["floor_bytes"] / (plan.rows * block_k * {"bf16": 2, "fp32": 4}[x["dtype"]])
    most = tiles / min(x.params.get("parts") or programs, programs)
    stages = 5 * model.layers + 2  # of a layer: qkv, attention, output, gate and up, down; then the head and the choice
    spans = math.ceil(variants.CACHE / plan.span) if plan.span else 1
    blocks = math.ceil(math.ceil(x["start"] / block_t) / spans)  # of the cache, that a record of attention reads
    rounds = _STAGE_ROUNDS * stages + most / ahead + model.layers * blocks
    size = row["floor_bytes"]
    inputs = tiles * block_k * 4 * batch if batch > 1 else 0  # float32, again for each tile
    return [Work(programs, size, size, load_bytes=size + inputs, rounds=rounds) for _ in launches]


_TOKEN_CHOICE = {"block_k": 1024, "block_t": 16, "ahead": 1}

_WORK: dict[str, Callable[..., list[Work] | None]] = {
    **dict.fromkeys(("step", "decode", "drift", "verify"), _straight),
    **dict.fromkeys(("ring", "ring_verify"), _rings),
    **dict.fromkeys(("gemv", "chain"), _gemvs),
    **dict.fromkeys(("product", "ffn"), _products),
    **dict.fromkeys(("extend", "long"), _extend),
    "routed": _routed,
    "layer": _layers,
    **dict.fromkeys(("token", "batch"), _tokens),
}


# ---- the table


def facts(row: Mapping[str, Any], capability: int, l2: int) -> list[dict[str, Any]] | None:
    """What each launch of a row does, as `evidence.predict` takes it; None where it is not known.

    See `evidence.predict.FACTS` for the columns.
    """
    with offline(capability):
        launches = launches_of(row)
    if not launches:
        return None
    kernels = [kernel_of(launch, capability) for launch in launches]
    work = work_of(row, launches, [kernel.name for kernel in kernels], l2)
    return work and [_fact(*each) for each in zip(launches, kernels, work, strict=True)]


def _fact(launch: Launch, kernel: Kernel, work: Work) -> dict[str, Any]:
    warps = work.programs * kernel.warps
    done = executed.executed(kernel.code, warps, work.flops, work.load_bytes, work.passes, work.outer)
    rounds = max(1.0, done.passes / work.stages) if work.rounds is None else work.rounds
    return {
        "kernel": kernel.name,
        "code": kernel.key,
        "programs": float(work.programs),
        "warps": float(kernel.warps),
        "per_sm": float(kernel.per_sm),
        "bytes": float(work.bytes),
        "l2_bytes": float(work.l2_bytes),
        "instructions": done.counts.instructions,
        "lines": done.counts.loads * kernel.lines,
        "mma_flops": done.counts.mma,
        "wgmma_flops": done.counts.wgmma_shared,
        "rounds": rounds,
        "dependent": bool(launch.options.get("launch_pdl")),
    }


def rows_wanted(study: str, gpu: str) -> pd.DataFrame:
    """The recorded rows, cold, whose launches are to be known."""
    rows = recorded.read(paths.DATA / gpu / f"{study}.parquet")
    roles = [WANTED.get(key, ()) for key in zip(rows["study"], rows["op"], strict=True)]
    wanted = pd.Series([role in some for role, some in zip(rows["role"], roles, strict=True)], rows.index, bool)
    other = rows["options"].str.contains('"int8": true')  # other launches than `_layer` makes
    # Of the steps to the GEMV, those that are kernels of their own: the rest is ours again, with other choices.
    other |= (rows["op"] == "gemv") & (rows["role"] == "step") & ~rows["variant"].str.match("[1-6] ")
    return rows[wanted & rows["ok"] & (rows["cache"] == "cold") & ~other]


def limit_of(row: Mapping[str, Any]) -> str:
    """The rate of memory that bounds a row's bytes: that of the case's floor; of products, that of reading."""
    limit = registry.load(row["study"]).floor(Case(row["op"], json.loads(row["case"]))).limit
    return limit if limit in roofline.MEMORY else "read"


def table(known: pd.DataFrame | None = None) -> pd.DataFrame:
    """The facts of all recorded rows, a line for each launch: KEY, limit, place in the call, and what `facts` gives.

    known: of rows that are taken over as they are; those that are not wanted any more are left out. Of an earlier
    kernel nothing else is known: it cannot be made again.
    """
    kept = {} if known is None else {key: some for key, some in known.groupby(list(KEY), sort=False)}
    found: list[pd.DataFrame] = []
    for gpu in paths.recorded_gpus():
        machine = Machine.load(paths.DATA / gpu)
        for study in dict.fromkeys(study for study, _ in WANTED):
            if not (paths.DATA / gpu / f"{study}.parquet").exists():
                continue
            rows = rows_wanted(study, gpu)
            for row, stale in zip(rows.to_dict("records"), recorded.stale(rows), strict=True):
                key = tuple({**row, "gpu": gpu}[name] for name in KEY)
                if key not in kept:
                    if stale:
                        continue
                    some = pd.DataFrame(facts(row, machine.capability, machine.l2_bytes) or [])
                    kept[key] = some.assign(
                        **dict(zip(KEY, key, strict=True)), limit=limit_of(row), place=range(len(some))
                    )
                found.append(kept[key])
            print(f"{gpu}/{study}: {len(found)} rows so far", flush=True)
    return pd.concat([some for some in found if len(some)], ignore_index=True).drop_duplicates([*KEY, "place"])


def update() -> None:
    """Add the rows that the kept table does not have: compiled here, which takes minutes where there are many."""
    known, content = recorded.launches(), io.BytesIO()
    table(known if len(known) else None).to_parquet(content, index=False, compression="zstd")
    write_atomic(paths.DATA / recorded.LAUNCHES, content.getvalue())
