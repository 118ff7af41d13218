"""Combinations of parameters in which every two values of two parameters meet, without their full product."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """One value of each parameter a combination; always the same ones for the same parameters."""
    rows = [tuple(enumerate(row)) for row in product(*(range(len(values)) for values in parameters))]
    left = {pair for row in rows for pair in combinations(row, 2)}
    found = []
    while left:
        best = max(rows, key=lambda row: len(left.intersection(combinations(row, 2))))
        left.difference_update(combinations(best, 2))
        found.append(tuple(parameters[i][at] for i, at in best))
    return found
