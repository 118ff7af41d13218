"""What the compiler makes of products of a K format's integers."""

import compiled_once
import pytest
from compiled_products import activations, blank, in_the_loop

from labkit.kernels.gguf import integers

COLUMNS = 256  # two tiles: the compiler's time grows with their number


@pytest.mark.parametrize(("name", "tokens", "gated"), [("Q4_K", 8, True), ("Q5_K", 16, False), ("Q6_K", 16, False)])
def test_products_of_integers_need_two_instructions_a_group_beside_those_of_weights(name, tokens, gated):
    """And nothing through shared memory."""
    W = integers.tiled(blank(name, columns=COLUMNS))
    launch = integers.integers(W, *activations(W, tokens), up=W if gated else None)
    found = compiled_once.evidence(launch, 90)
    assert found["spill_bytes"] <= (16 if gated else 0)  # of gate and up, a few: all 128 registers are taken
    assert in_the_loop(launch) == []
    pairs, eights = launch.args["BLOCKS"] * (1 + gated) // 2, tokens // 8
    assert set(found["matrix"]) == {"HMMA.16816.F32.BF16"}
    assert found["matrix"]["HMMA.16816.F32.BF16"] % (4 * 2 * eights * (1 + pairs)) == 0
