"""Widgets: the prediction for a matrix of one's own. Needs a running kernel; left out of exported pages."""

from typing import Any

from labkit.bench.spec import Case
from labkit.kernels.gemv import choose
from labkit.report import figures, widgets
from labkit.studies.gemv_coalescing import variants, views


def widget(x: Any) -> Any:
    """Controls for one matrix; below them the rule's choice, the least time on each GPU, and the cost of a request.

    x: the notebook's `lab.Lab`.
    """

    def show(N: int, K: int, dtype: str) -> list[figures.Html]:
        small = Case("gemv", {"N": 64, "K": K, "dtype": dtype})  # a request does not depend on the number of rows
        steps = (variants.THREAD_A_ROW, variants.THREAD_A_ROW_TURNED, variants.WARP_A_ROW, variants.WIDE_LOADS)
        accesses = x.accesses([(small, step) for step in steps])
        return [
            figures.note(
                f"Without a table of its GPU, this GEMV runs with {choose.rule(N, K, variants.SIZES[dtype])}."
            ),
            x.floors([Case("gemv", {"N": N, "K": K, "dtype": dtype})]),
            x.show_table(views.predicted_accesses(accesses), "What one request of W costs, in the first steps."),
        ]

    return widgets.panel(
        show,
        lambda w: {
            "N": w.BoundedIntText(4096, 1, 300000, description="N"),
            "K": w.BoundedIntText(4096, 1, 32768, description="K"),
            "dtype": w.Dropdown(options=list(variants.SIZES), description="dtype"),
        },
    )
