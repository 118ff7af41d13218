"""Compiled evidence without processes of its own, for tests in which these are not what is tested."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from labkit import isolated


@contextmanager
def answered_here() -> Iterator[None]:
    """What is asked of worker processes is answered in this one, which compiles as they do and has started already."""

    def call_many(calls: Sequence[isolated.Call], _: int) -> list[Any]:
        return [isolated.named(one.target)(*one.args, **one.kwargs) for one in calls]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolated, "call_many", call_many)
        yield
