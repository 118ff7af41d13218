"""The expert layer as one calls it: whichever of the lab's kernels are the fastest for its tokens and weights.

| tokens | weights            | kernels                                                       |
|--------|--------------------|---------------------------------------------------------------|
| many   | bf16, INT4         | tiles.py: sorted by expert, two grouped GEMMs                 |
| one    | bf16, INT4         | one_token.py: two matrix-vector products                      |
| one    | INT4, many of them | one_token_words.py: the same with fewer instructions a weight |

`choose.choose_any` chooses; page 04 shows what each choice is worth. Not chosen, but called by name:

| tokens | weights          | kernels                                                                           |
|--------|------------------|-----------------------------------------------------------------------------------|
| many   | bf16, fp16, fp32 | wide.py: blocks of one expert as one tile, where a router sends many tokens there |
| few    | INT4 (bf16 x)    | few_rows.py: words as fragments of matrix instructions, where an expert is large  |
"""

from collections.abc import Mapping

import triton
from torch import Tensor

from labkit.kernels.experts import blocks as experts_blocks
from labkit.kernels.experts import one_token, one_token_words, routing
from labkit.kernels.experts.choose import Choice, TileChoice, WordChoice, check_choice, choose_any
from labkit.kernels.experts.inputs import Layer, LayerInputs, Workspace, _part, check_layer, workspace
from labkit.kernels.experts.int4 import Int4
from labkit.kernels.experts.tiles import SUM_TILE, _gemm_kernel, _sum_kernel, constants, options_of, words
from labkit.kernels.launch import Launch
from labkit.kernels.target import has_dependent_launch

PRODUCTS = ("gemm1", "gemm2")  # launches of a layer by tiles


def layer(
    x: LayerInputs, config: Choice | None = None, scratch: Workspace | None = None, check_ids: bool = False
) -> Layer:
    """out = Σ_j weights[:, j] · w2[e] (SiLU(gate) · up) with [gate, up] = w1[e] x and e = ids[:, j], as launches.

    config: None: `choose.choose_any`, from this GPU's tuned table or by a rule. scratch: shared by layers that run one
    after the other; None: x's own. What is in x's tensors may change between calls, their sizes may not: a captured
    graph serves fewer tokens with ids of -1.
    check_ids: raise ValueError now for ids out of range, which waits for the GPU; else such slots add nothing.
    Raises ValueError naming the argument, its value and what is allowed.
    """
    check_layer(x)
    T, E, top_k, _, width = x.shape
    config = choose_any(*x.shape, x.int4, x.x.device) if config is None else config
    check_choice(config, x.int4)
    scratch = workspace(x) if scratch is None else scratch
    if scratch.tokens < T:
        raise ValueError(f"x has {T} tokens; allowed: up to {scratch.tokens}, for which the scratch was made")
    if not config.rows:
        return by_tiles(x, config, scratch, check_ids)
    if T > 1:
        raise ValueError(f"config.rows is {config.rows} with {T} tokens; allowed: only for one token, else None")
    hidden = _part("hidden", scratch.hidden, top_k * width, x)
    dependent = config.dependent and has_dependent_launch(x.x.device)
    made = (one_token_words if isinstance(config.rows, WordChoice) else one_token).launches(
        x, hidden, config.rows, dependent
    )
    return Layer(config, routing.one_token(x.ids, E, config.block_m, check_ids), made)


def by_tiles(
    x: LayerInputs, config: Choice, scratch: Workspace, check_ids: bool = False, at_once: bool = True
) -> Layer:
    """The launches of `layer` with tiles, whatever config.rows says, for inputs that have been checked.

    at_once: whether tables of few slots are made by `routing.at_once`.
    """
    T, E, top_k, H, _ = x.shape
    made = products(x, config, scratch, check_ids)
    gemms = {name: made.launches[name] for name in PRODUCTS}
    before = gemms["gemm2"].args
    found = routing.at_once(made.sorted, x.ids, E, before["DEPENDENT"]) if at_once else made.sorted
    tiles = triton.cdiv(H, SUM_TILE)
    total = {"parts": before["c"], "ids": x.ids, "weights": x.weights, "out": x.out, "H": H, "TILES": tiles, "E": E}
    total |= {"TOP_K": top_k, "BLOCK": SUM_TILE, "DEPENDENT": before["DEPENDENT"]}
    last = Launch(_sum_kernel, (T * tiles,), total, options_of(total, 4))
    return Layer(config, found, {**found.launches, **gemms, "sum": last})


def products(x: LayerInputs, config: Choice, scratch: Workspace, check_ids: bool = False) -> Layer:
    """The launches of `by_tiles` but for the sum: the second product leaves a row for every slot."""
    T, E, top_k, H, width = x.shape
    counted = config.gemm1.counted and config.gemm2.counted
    blocks = (experts_blocks.most_blocks if counted else experts_blocks.source_blocks)(T, top_k, E, config.block_m)
    dependent = config.dependent and has_dependent_launch(x.x.device)
    if counted and T == 1:
        found = routing.one_token(x.ids, E, config.block_m, check_ids)
    else:
        found = routing.route(x.ids, E, config.block_m, blocks, check_ids, scratch.integers, dependent)
    hidden = _part("hidden", scratch.hidden, blocks * config.block_m * (width if config.fused else 2 * width), x)
    parts = _part("parts", scratch.parts, T * top_k * H, x)
    shared = {"slots": found.slots, "experts": found.experts, "padded": found.padded, "slot_count": T * top_k}
    shared |= {"E": E, "TOP_K": top_k, "BLOCK_M": config.block_m, "blocks": found.blocks}
    shared |= {"DEPENDENT": dependent}
    up = {"a": x.x, "c": hidden, "N": 2 * width, "K": H, "GATHER": True, "ACT": "end" if config.fused else ""}
    down = {"a": hidden, "c": parts, "N": H, "K": width, "GATHER": False, "ACT": "" if config.fused else "loop"}
    gemms = {"gemm1": _gemm(shared | up, x.w1, config.gemm1), "gemm2": _gemm(shared | down, x.w2, config.gemm2)}
    return Layer(config, found, {**found.launches, **gemms})


def _gemm(args: Mapping, w: Tensor | Int4, tile: TileChoice) -> Launch:
    if tile.descriptor:
        from labkit.kernels.experts import descriptors

        return descriptors.gemm(args, w, tile)
    int4 = isinstance(w, Int4)
    tiles = experts_blocks.tiles(args["blocks"], args["N"], tile.block_n)
    weights = {"w": words(w, tile), "scales": w.scales if int4 else w}
    programs = min(tile.programs, tiles) if tile.programs else tiles
    options = options_of(args, tile.num_warps) | {"num_stages": tile.num_stages}
    return Launch(_gemm_kernel, (programs,), {**args, **weights, **constants(tile, int4)}, options)
