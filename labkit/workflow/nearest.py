"""What a reader meant who mistyped a name, or wrote the beginning of one. Quick to import."""

import difflib
from collections.abc import Iterable

from labkit import registry


def begun(text: str, known: Iterable[str]) -> str | None:
    """The one known name that is `text`, or begins with it; None if there is none or more than one."""
    names = list(known)
    found = [name for name in names if name == text] or [name for name in names if text and name.startswith(text)]
    return found[0] if len(found) == 1 else None


def meant(text: str, known: Iterable[str]) -> str:
    """ "; did you mean batches?", to end an error with; empty where no known name is near."""
    found = difflib.get_close_matches(text, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def study(text: str) -> str | None:
    """A study's name from its name or a beginning of it, its notebook ("01_state_layout") or its number ("01", "1")."""
    for name, notebook in registry.NOTEBOOKS.items():
        number = notebook.partition("_")[0]
        if text in (name, notebook, f"{notebook}.ipynb", number) or (text.isdecimal() and int(text) == int(number)):
            return name
    return begun(text, registry.NOTEBOOKS)
