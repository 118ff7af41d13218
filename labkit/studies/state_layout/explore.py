"""Widgets: the prediction for a shape of one's own. Needs a running kernel; left out of exported pages."""

from typing import Any

from labkit.bench.spec import Case
from labkit.report import figures, widgets
from labkit.studies.state_layout import views
from labkit.studies.state_layout.variants import LAYOUTS, TILES, variant_name


def widget(x: Any) -> Any:
    """Controls for one shape and tile; below them the bytes, the least time on each GPU, and the cost of a request.

    x: the notebook's `lab.Lab`.
    """

    def show(HV: int, K: int, V: int, batch: int, state: str, tile: int) -> list[figures.Html]:
        shape = {"H": HV, "HV": HV, "K": K, "V": V}
        case = Case("decode", {"model": "your shape", "batch": batch, "state": state, "activations": "bf16"} | shape)
        small = Case("decode", dict(case.params) | {"batch": 1})  # the access pattern does not depend on the batch
        wanted = [(small, variant_name(layout, tile)) for layout in LAYOUTS]
        requests = views.access_prediction(x.accesses(wanted))
        return [x.floors([case]), x.show_table(requests, "The state's tile: what one request costs.")]

    return widgets.panel(
        show,
        lambda w: {
            "HV": w.IntSlider(32, 1, 128, description="HV"),
            "K": w.Dropdown(options=[64, 128, 256], value=128, description="K"),
            "V": w.Dropdown(options=[64, 128, 256], value=128, description="V"),
            "batch": w.IntSlider(64, 1, 512, description="batch"),
            "state": w.Dropdown(options=["fp32", "bf16"], description="state"),
            "tile": w.Dropdown(options=list(TILES), description="BV"),
        },
    )
