"""What a reader meant who mistyped a name, or wrote the beginning of one. Quick to import."""

import difflib
from collections.abc import Iterable


def begun(text: str, known: Iterable[str]) -> str | None:
    """The one known name that is `text`, or begins with it; None if there is none or more than one."""
    names = list(known)
    found = [name for name in names if name == text] or [name for name in names if text and name.startswith(text)]
    return found[0] if len(found) == 1 else None


def meant(text: str, known: Iterable[str]) -> str:
    """ "; did you mean batches?", to end an error with; empty where no known name is near."""
    found = difflib.get_close_matches(text, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
