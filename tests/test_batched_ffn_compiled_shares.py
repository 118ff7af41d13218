"""What the compiler makes of GGUF products whose tiles are dealt in shares: all programs run at once, none spills."""

import functools
import itertools
import math
from dataclasses import replace

import compiled_once
import pytest
from compiled_products import activations, blank, order_of_sums, product

from labkit.evidence import roofline
from labkit.kernels import offline
from labkit.kernels.gguf import choose, formats, integers, products
from labkit.kernels.gguf.choose import Choice
from labkit.studies.batched_ffn import variants

MULTIPROCESSORS = 132
SHAPES = ((17408, 5120), (5120, 17408), (9216, 2560), (2560, 9216))
COLUMNS = 256  # of what is compiled: two tiles; the compiler's time grows with their number, registers hardly do
SMALL, LARGE = choose.LARGE // COLUMNS // 2, choose.LARGE // COLUMNS  # rows, on either side of the rule's limit


@functools.cache
def blocks(name, columns):
    """Memory for the first eight rows alone, of a matrix that says it has more."""
    return blank(name, 8, columns)


def launched(variant, rows, columns, name, tokens, gated):
    W = replace(blocks(name, columns), rows=rows)
    with offline.offline(90):
        if variant == variants.INTEGERS:
            W = integers.tiled(W)
            return integers.integers(W, *activations(W, tokens), up=W if gated else None)
        make = {variants.STATIONARY: products.weight_stationary, variants.MATRIX: products.tensor_core}[variant]
        return make(W, *activations(W, tokens), None, W if gated else None)


def programs(launch):
    """Of a multiprocessor."""
    return math.ceil(math.prod(launch.grid) / MULTIPROCESSORS)


@pytest.mark.parametrize("variant", [variants.STATIONARY, variants.MATRIX, variants.INTEGERS])
def test_all_programs_have_registers_or_half_of_them_as_the_rule_says(variant):
    """Of every format, shape and number of tokens: as many as they may have; what they take is compiled below."""
    shapes = itertools.product(SHAPES, formats.K_FORMATS, (1, 2, 4, 8), (False, True))
    for (rows, columns), name, tokens, gated in shapes:
        launch = launched(variant, rows, columns, name, tokens, gated)
        assert launch.args["PARTS"] * launch.args["BLOCKS"] * (1 + gated) == 4  # blocks of a strip
        fit = roofline.occupancy(launch.options["maxnreg"], 0, launch.options["num_warps"], 90)
        half = variant == variants.STATIONARY and tokens == 8 and name != "Q6_K" and rows * columns >= choose.LARGE
        assert programs(launch) == (2 if half else 1) * fit, (rows, columns, name, tokens, gated)


CASES = {
    "Q4_K": [(SMALL, 1, True), (LARGE, 1, True)],
    "Q5_K": [(SMALL, 4, True), (LARGE, 2, True), (LARGE, 4, False)],
    "Q6_K": [(SMALL, 1, False), (SMALL, 4, False), (SMALL, 8, True)],
}  # rows, tokens, gate and up


@pytest.mark.parametrize("name", CASES)
def test_multiply_add_of_shares_is_on_all_multiprocessors_at_once_and_has_one_order_of_sums(name):
    """Which the tokens and rows of a program do not change, nor how many shares there are."""
    launches = [launched(variants.STATIONARY, rows, COLUMNS, name, n, gated) for rows, n, gated in CASES[name]]
    for launch in launches:
        found = compiled_once.evidence(launch, 90)
        assert (found["spill_bytes"], found["matrix"]) == (0, {})
        assert found["ctas_per_sm"] >= programs(launch) >= 8
    if name != "Q5_K":
        launches.append(product(blank(name, columns=COLUMNS), 3, Choice(4, 2, 4, 1, shares=8)))
    orders = [order_of_sums(launch) for launch in launches]
    assert len(orders[0]) == 3  # four values of x of a thread, those of lanes that share them, then the groups of a row
    assert all(order == orders[0] for order in orders)
