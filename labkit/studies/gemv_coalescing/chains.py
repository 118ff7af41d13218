"""The GEMVs of some layers one after the other, each reading what the one before wrote."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from labkit.bench import ledger

Make = Callable[[Tensor, Tensor, Tensor], Any]  # W [N, K], x [K], y [N] -> a Launch, or a call of a library
Between = Callable[[Tensor, Tensor], Any]  # source [K], x [K] -> a Launch


class Link(NamedTuple):
    """One GEMV of a chain. source: [K], what a kernel between turns into x just before it; None if nothing does."""

    W: Tensor
    x: Tensor
    y: Tensor
    source: Tensor | None = None


def links(
    groups: Sequence[tuple[int, Sequence[int]]], weights: Tensor, y: Tensor, start: Tensor, middle: Tensor | None = None
) -> list[Link]:
    """Every GEMV of a chain, in order.

    groups: K and all N of the matrices that share x, as `shapes.LinearModel.chain` gives them. weights: [values]; y:
    [sum of all N], each GEMV's own part; start: x of the first group. A group's x is the beginning of what the group
    before wrote, so nothing is overwritten before it is read. middle: [sum of all groups' K] or None; with it, each
    later group's x is a part of it, made by a kernel between.
    """
    found, at, out, x_group = [], 0, 0, start
    source, between = None, 0
    for k, ns in groups:
        if middle is not None and found:
            source, x_group = x_group[:k], middle[between : between + k]
        between += k
        first = out
        for n in ns:
            found.append(Link(weights[at : at + n * k].view(n, k), x_group[:k], y[out : out + n], source))
            at, out, source = at + n * k, out + n, None
        x_group = y[first:out]
    return found


def in_order(some: Sequence[Link], make: Make, between: Between | None = None) -> Callable[[], Any]:
    """All GEMVs of a chain as one call, where a link has a source with a kernel between before it."""
    flat = [launch for link in some for launch in _launches(link, make, between)]
    return lambda: [launch() for launch in flat]


def _launches(link: Link, make: Make, between: Between | None) -> list[Any]:
    gemv = make(link.W, link.x, link.y)
    return [gemv] if link.source is None or between is None else [between(link.source, link.x), gemv]


ledger.watch(__name__)
