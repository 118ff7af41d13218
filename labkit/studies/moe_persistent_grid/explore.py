"""Widgets: floor, waves and dead blocks of an expert layer of one's own. Left out of exported pages."""

from typing import Any

from labkit.bench.spec import Case
from labkit.kernels.experts import choose
from labkit.kernels.experts.blocks import BLOCKS_M
from labkit.report import figures, widgets
from labkit.studies.moe_persistent_grid import grid_views
from labkit.studies.moe_persistent_grid.models import MODELS, MoeModel
from labkit.studies.moe_persistent_grid.variants import KINDS


def widget(x: Any) -> Any:
    """Controls for one layer; below them the rule's configuration, the floor on each GPU, and waves by GPU.

    x: the notebook's `lab.Lab`.
    """

    def show(model: str, tokens: int, weights: str, block_m: int, block_n: int, per_sm: int) -> list[figures.Html]:
        shape: MoeModel = MODELS[model]
        case = {"T": tokens, "routing": KINDS[0], "weights": weights, "activations": "bf16"}
        dims = (shape.experts, shape.top_k, shape.hidden, shape.width)
        ruled = choose.rule(tokens, *dims, weights == "INT4")
        said = f"Without a table of its GPU: blocks of {ruled.block_m} rows; GEMM1 {ruled.gemm1}; GEMM2 {ruled.gemm2}."
        table = grid_views.waves_by_gpu(shape, tokens, block_m, block_n, per_sm)
        return [
            figures.note(said),
            x.floors([Case("layer", shape.as_dict() | case)]),
            x.show_table(table, "Waves of one CTA a tile, by arithmetic.", {"waves": "{:.2f}", "efficiency": "{:.3f}"}),
        ]

    return widgets.panel(
        show,
        lambda w: {
            "model": w.Dropdown(options=list(MODELS), description="model"),
            "tokens": w.BoundedIntText(1642, 1, 65536, description="tokens"),
            "weights": w.Dropdown(options=["bf16", "INT4"], description="weights"),
            "block_m": w.Dropdown(options=list(BLOCKS_M), description="rows"),
            "block_n": w.Dropdown(options=[64, 128, 256], value=128, description="columns"),
            "per_sm": w.IntSlider(1, 1, 8, description="CTAs an SM"),
        },
    )
