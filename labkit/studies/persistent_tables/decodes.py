"""Decodes of some tokens, one after the other, as calls: a call a token."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.bench import ledger
from labkit.kernels.decoder.tables import TARGET
from labkit.kernels.launch import Launch


def on_the_device(position: Tensor, step: Callable[[], Any], start: int, count: int) -> list[Callable[[], Any]]:
    """Calls for a graph; the first one sets the position on the device, [1], which each step advances."""

    def first() -> None:
        position.fill_(start)
        step()

    return [first, *[step] * (count - 1)]


def by_the_host(
    step: Callable[[int], Any], begin: Callable[[int], Any] | None, start: int, count: int
) -> list[Callable[[], Any]]:
    """Calls with the host at work. The first one waits until the GPU is idle, or what was timed before would hide work.

    begin: called with the first position before its step; None: nothing is.
    """

    def first() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if begin:
            begin(start)
        step(start)

    return [first, *(partial(step, start + i) for i in range(1, count))]


def unordered(launch: Launch) -> Launch:
    """The step with records that wait for nobody."""
    records = launch.args["records"].clone()
    records[:, TARGET] = -1
    return replace(launch, args={**launch.args, "records": records})


ledger.watch(__name__)
