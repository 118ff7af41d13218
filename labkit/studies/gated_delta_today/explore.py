"""Widgets: a decode of the reader's own, its bytes, its best L and its memory. Left out of exported pages."""

from typing import Any

import pandas as pd

from labkit.report import figures, widgets
from labkit.studies.gated_delta_today import work
from labkit.studies.gated_delta_today.variants import NARROW, RING_LENGTHS, STATES


def bytes_by_length(params: dict[str, Any]) -> pd.DataFrame:
    """MB a token, and those of the rings in memory, for every L, of one layer."""
    found = [
        {"L": n, "MB a token": work.ring_bytes(params, n) / 1e6, "MB of rings": work.ring_memory(params, n) / 1e6}
        for n in RING_LENGTHS
    ]
    return pd.DataFrame(found)


def widget(x: Any) -> Any:
    """Controls for one decode; below them what each L moves and takes. x: the notebook's `lab.Lab`."""

    def show(gate: str, state: str, batch: int, heads: int, group: int, size: int) -> list[figures.Html]:
        shape = {"H": heads, "HV": heads * group, "K": size, "V": size, "activations": "bf16"}
        params = shape | {"gate": gate, "state": state, "batch": batch}
        best = work.best_length(params)
        return [
            figures.note(f"Least bytes with L = {best}: {work.ring_bytes(params, best) / 1e6:.1f} MB a token."),
            x.show_table(bytes_by_length(params), "Of one layer."),
        ]

    return widgets.panel(
        show,
        lambda w: {
            "gate": w.Dropdown(options=["GDN", "KDA"], description="gate"),
            "state": w.Dropdown(options=[*STATES, *NARROW], description="state"),
            "batch": w.BoundedIntText(256, 1, 4096, description="batch"),
            "heads": w.BoundedIntText(16, 1, 128, description="heads of q"),
            "group": w.Dropdown(options=[2, 1, 3, 4], description="value heads each"),
            "size": w.Dropdown(options=[128, 64, 256], description="K = V"),
        },
    )
