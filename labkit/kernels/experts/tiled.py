"""The launches of an expert layer by tiles, for inputs that have been checked: `by_tiles`; see tiles.py."""

from collections.abc import Mapping

import triton
from torch import Tensor

from labkit.kernels.experts import blocks as experts_blocks
from labkit.kernels.experts import routing
from labkit.kernels.experts.choose import Choice, TileChoice
from labkit.kernels.experts.inputs import Layer, LayerInputs, Workspace, _part
from labkit.kernels.experts.int4 import Int4
from labkit.kernels.experts.tiles import SUM_TILE, _gemm_kernel, _sum_kernel, constants, options_of, words
from labkit.kernels.launch import Launch
from labkit.kernels.target import has_dependent_launch

PRODUCTS = ("gemm1", "gemm2")  # launches of a layer by tiles


def by_tiles(
    x: LayerInputs, config: Choice, scratch: Workspace, check_ids: bool = False, at_once: bool = True
) -> Layer:
    """The launches of `expert_layer.layer` with tiles, whatever config.rows says, for inputs that have been checked.

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
