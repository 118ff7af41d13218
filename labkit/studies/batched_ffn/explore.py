"""Widgets: choices and floor for a matrix of one's own. Needs a running kernel; left out of exported pages."""

from typing import Any

from labkit.bench.spec import Case
from labkit.kernels.gguf.choose import matrix_rule, rule
from labkit.kernels.gguf.formats import FORMATS
from labkit.report import figures, widgets
from labkit.studies.batched_ffn import tables, variants


def widget(x: Any) -> Any:
    """Controls for one matrix; below them what the rules choose, and the least time on each GPU.

    x: the notebook's `lab.Lab`.
    """

    def show(rows: int, K: int, N: int, format: str) -> list[figures.Html]:
        params = {"rows": rows, "K": K - K % 256, "N": N, "format": format, "activations": "bf16"}
        few, many = rule(N, rows, K, format), matrix_rule(N, rows, K, format)
        once, again = (tables.passes(name, params) for name in (variants.STATIONARY, variants.MATRIX))
        text = f"weight_stationary: {few.tokens} tokens and {few.blocks} blocks of 8 rows a program; tensor_core: "
        text += f"{many.tokens} tokens, {many.blocks} blocks, {many.num_warps} warps. They ask for all weights "
        text += f"{once:.0f} and {again:.0f} times."
        return [figures.note(text), x.floors([Case("product", params)])]

    return widgets.panel(
        show,
        lambda w: {
            "rows": w.BoundedIntText(4096, 8, 300000, description="rows"),
            "K": w.BoundedIntText(4096, 256, 65536, step=256, description="K"),
            "N": w.BoundedIntText(8, 1, 4096, description="tokens"),
            "format": w.Dropdown(options=list(FORMATS), value="Q4_K", description="format"),
        },
    )
