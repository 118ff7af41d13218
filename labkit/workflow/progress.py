"""Progress of several notebooks at once: one line that changes on a terminal, plain lines elsewhere."""

import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

_QUIET_S = 15.0  # without a terminal: at most one line about a notebook in this time


@dataclass
class _State:
    label: str
    cell: str = "starting"
    output: str = ""
    told: float = 0.0
    running: bool = False


class Progress:
    """Where each notebook is. Its methods may be called from any thread."""

    def __init__(self, stream: TextIO | None = None, live: bool | None = None):
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty() if live is None else live
        self._states: dict[str, _State] = {}
        self._lock = threading.Lock()

    def start(self, notebooks: Sequence[tuple[str, str]]) -> None:
        """The notebooks to come: name and title of each."""
        count = len(notebooks)
        self._states = {name: _State(f"[{i}/{count}] {title}") for i, (name, title) in enumerate(notebooks, 1)}

    def cell(self, name: str, number: int, cells: int) -> None:
        """A cell begins; `number` counts from 1."""
        with self._lock:
            state = self._states[name]
            state.cell, state.output = f"cell {number}/{cells}", ""
            self._update(state)

    def output(self, name: str, line: str) -> None:
        """A line that the running cell printed."""
        with self._lock:
            state = self._states[name]
            if state.running:
                state.output = line
                self._update(state)

    def note(self, name: str, text: str) -> None:
        """Something to say at once, and to keep."""
        with self._lock:
            self._print(f"{self._states[name].label}: {text}")

    def end(self, name: str, error: str, seconds: float) -> None:
        """A notebook has ended; `error` is empty if all went well."""
        with self._lock:
            state = self._states[name]
            state.running = False
            self._print(f"{state.label}: {'FAILED: ' + error if error else 'done'} ({seconds:.0f} s)")
            self._redraw()

    def close(self) -> None:
        """Leave the terminal's line clean."""
        with self._lock:
            if self._live:
                self._write("\r\033[K")

    def _update(self, state: _State) -> None:
        started, state.running = not state.running, True
        if self._live:
            self._redraw()
        elif started or time.monotonic() - state.told >= _QUIET_S:
            state.told = time.monotonic()
            self._print(self._text(state))

    def _text(self, state: _State) -> str:
        return f"{state.label}: {state.cell}" + (f" · {state.output}" if state.output else "")

    def _redraw(self) -> None:
        if self._live:
            text = "   ".join(self._text(state) for state in self._states.values() if state.running)
            self._write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")

    def _print(self, text: str) -> None:
        self._write(f"\r\033[K{text}\n" if self._live else f"{text}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
