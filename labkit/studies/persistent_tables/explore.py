"""Widgets: the tables of a decoder step, cut and dealt out otherwise. Left out of exported pages."""

from typing import Any

from labkit.kernels.decoder import tables
from labkit.report import figures, widgets
from labkit.studies.persistent_tables import tables as derived
from labkit.studies.persistent_tables import variants


def widget(x: Any) -> Any:
    """Controls for one lowering; below them its size, its balance, what a token changes, and one program's queue.

    x: the notebook's `lab.Lab`.
    """

    def show(model: str, programs: int, schedule: str, rows: int, position: int, program: int) -> list[figures.Html]:
        how = derived.lowering(model, programs, schedule=schedule, position=position, rows=rows)
        found = tables.lower(how)
        chosen = min(program, programs - 1)
        shown = derived.queue(how, found, chosen)
        return [
            figures.note(derived.lowered(how, found)),
            x.show_table(shown, f"The first records of program {chosen}, in the order of work."),
        ]

    return widgets.panel(
        show,
        lambda w: {
            "model": w.Dropdown(options=list(variants.MODELS), description="model"),
            "programs": w.BoundedIntText(132, 1, 2048, description="programs"),
            "schedule": w.Dropdown(options=list(tables.SCHEDULES), description="schedule"),
            "rows": w.Dropdown(options=[4, 8, 16], description="rows a tile"),
            "position": w.BoundedIntText(variants.START, 0, variants.CACHE - 2, description="position"),
            "program": w.BoundedIntText(0, 0, 2047, description="program"),
        },
    )
