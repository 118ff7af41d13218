"""Widgets of the pages' last part, where a reader tries a shape. They need a running kernel and ipywidgets."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.report import figures


def panel(show: Callable[..., Sequence[figures.Html]], make: Callable[[Any], Mapping[str, Any]], a_row: int = 3) -> Any:
    """Controls in rows of `a_row`, below them what `show` returns for their values; a note where ipywidgets lacks.

    show: takes the values by the names of the controls. make: gets the module ipywidgets, returns name -> control.
    """
    try:
        import ipywidgets
    except ImportError:
        return figures.note("The controls need ipywidgets, which is not installed here.")
    controls = dict(make(ipywidgets))
    # Not ipywidgets.Output: a run without a reader answers it on the channel that the cell's end comes by, and can
    # then wait for that end forever.
    answer = ipywidgets.HTML()

    def fill(change: Any = None) -> None:
        pieces = show(**{name: control.value for name, control in controls.items()})
        answer.value = "".join(piece.html for piece in pieces)

    for control in controls.values():
        control.continuous_update = False  # each change compiles kernels
        control.observe(fill, "value")
    fill()
    all_of_them = list(controls.values())
    rows = [ipywidgets.HBox(all_of_them[at : at + a_row]) for at in range(0, len(all_of_them), a_row)]
    return ipywidgets.VBox([*rows, answer])
