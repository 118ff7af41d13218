"""Widgets of the pages' last part, where a reader tries a shape. They need a running kernel and ipywidgets."""

from collections.abc import Callable, Mapping
from typing import Any

from labkit.report import figures


def panel(show: Callable[..., None], make: Callable[[Any], Mapping[str, Any]], a_row: int = 3) -> Any:
    """Controls in rows of `a_row`, below them what `show` displays for their values; a note where ipywidgets lacks.

    show: takes the values by the names of the controls. make: gets the module ipywidgets, returns name -> control.
    """
    try:
        import ipywidgets
    except ImportError:
        return figures.note("The controls need ipywidgets, which is not installed here.")
    controls = dict(make(ipywidgets))
    for control in controls.values():
        control.continuous_update = False  # each change compiles kernels
    all_of_them = list(controls.values())
    rows = [ipywidgets.HBox(all_of_them[at : at + a_row]) for at in range(0, len(all_of_them), a_row)]
    return ipywidgets.VBox([*rows, ipywidgets.interactive_output(show, controls)])
