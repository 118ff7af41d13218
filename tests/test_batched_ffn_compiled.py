"""What the compiler makes of GGUF products for sm_90: loads, matrix instructions, registers, the order of sums."""

import math
from dataclasses import replace

import compiled_once
import pytest
import torch
from compiled_products import activations, beside_wgmma, blank, in_the_loop, order_of_sums, product

from labkit.kernels import offline
from labkit.kernels.gguf import choose, products, wide
from labkit.kernels.gguf.choose import Choice, TileChoice, WideChoice
from labkit.kernels.gguf.formats import FORMATS
from labkit.studies.batched_ffn import ablations

# loads beside those of words, of one tile: bits a thread -> instructions
BESIDE = {
    "F32": {}, "BF16": {}, "Q8_0": {"16": 1}, "Q4_K": {"16": 1, "32": 1}, "Q5_K": {"16": 1, "32": 2},
    "Q6_K": {"16": 2, "32": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_loaded_16_bytes_a_thread_and_once_for_eight_tokens(name):
    W = blank(name)
    found = compiled_once.evidence(product(W, 17, choose.rule_of_rows(17, W.columns)), 90)
    assert (found["spill_bytes"], found["matrix"], found["atomics"]) == (0, {}, 0)
    assert found["ctas_per_sm"] * found["num_warps"] >= 12
    parts = 8 + {"Q4_K": 1, "Q5_K": 1, "Q6_K": 2}.get(name, 0)  # of a group, and for sums that lanes share
    tiles = found["loads"]["64"] // (parts * 8)  # of x, four bf16 a thread: parts, 8 tokens
    expected = {"128": W.words.shape[2], "64": parts * 8} | BESIDE[name]
    assert tiles >= 1
    assert found["loads"] == {bits: tiles * count for bits, count in expected.items()}


@pytest.mark.parametrize(
    ("name", "gated"),
    [("F32", True), ("BF16", False), ("Q8_0", True), ("Q4_K", False), ("Q5_K", True), ("Q6_K", False)],
)
def test_matrix_products_take_their_operands_from_registers(name, gated):
    W = blank(name)
    launch = products.tensor_core(W, *activations(W, 17), TileChoice(2, 8, 4), W if gated else None)
    found = compiled_once.evidence(launch, 90)
    assert found["spill_bytes"] == 0
    assert found["ctas_per_sm"] >= 3
    assert {one.split(".")[0] for one in found["matrix"]} == {"HMMA"}
    assert in_the_loop(launch) == []
    wide = found["loads"]["128"] % (2 * W.words.shape[2] + 4)  # words of two blocks, x of 8 tokens
    assert (wide, set(found["loads"]) - {"128"}) == (0, set(BESIDE[name]))


@pytest.mark.parametrize(
    ("name", "rows", "columns", "tokens"),
    [("F32", 5120, 17408, 32), ("Q6_K", 2560, 9216, 32), ("Q5_K", 5120, 17408, 8)],
)
def test_the_largest_choices_of_the_matrix_rule_hardly_spill(name, rows, columns, tokens):
    """At most an address: all 128 or 255 registers are taken."""
    W, tile = blank(name), choose.matrix_rule(tokens, rows, columns, name)
    assert compiled_once.evidence(products.tensor_core(W, *activations(W, tokens), tile), 90)["spill_bytes"] <= 8


@pytest.mark.parametrize("name", FORMATS)
def test_wide_products_use_wgmma_and_do_not_spill(name):
    """Of many tokens, whose sums take the most registers; of one in the formats with the most and the fewest words."""
    W = blank(name)
    for number in (1, 65) if name in ("F32", "Q4_K", "Q6_K") else (65,):
        found = compiled_once.evidence(wide.wide(W, *activations(W, number)), 90)
        assert found["spill_bytes"] == 0
        assert found["ctas_per_sm"] >= (3 if number == 1 else 2)
        assert_wgmma(found)


def assert_wgmma(found):
    assert found["matrix"]
    assert all(instruction.startswith("HGMMA") for instruction in found["matrix"]), found["matrix"]


def matrix_product(rows, columns, tokens, choice=None):
    """Of bf16 as stored, for sm_90."""
    W = torch.empty((rows, columns), dtype=torch.bfloat16)
    x, y = (torch.empty((tokens, size), dtype=torch.bfloat16) for size in (columns, rows))
    with offline.offline(90):
        return wide.wide(W, x, y, choice)


@pytest.mark.parametrize(("rows", "columns"), [(17408, 5120), (5120, 17408)])
@pytest.mark.parametrize("tokens", [64, 128, 512])
def test_matrices_as_stored_pass_no_registers_on_their_way_to_wgmma(rows, columns, tokens):
    launch = matrix_product(rows, columns, tokens)
    found = compiled_once.evidence(launch, 90)
    loops = 2 if launch.args["SPLIT"] == "some" else 1
    assert (found["spill_bytes"], found["loads"]["tma"]) == (0, 2 * loops * launch.options["num_stages"])
    assert_wgmma(found)
    choice = choose.wide_rule(tokens, rows, columns, "BF16", True)
    for one in (replace(choice, parts=1), replace(choice, whole=0)):  # the loop of whole rows, and of split ones
        assert beside_wgmma(matrix_product(rows, columns, tokens, one)) == []
    if tokens <= 128:  # all programs run at once
        assert found["ctas_per_sm"] >= math.ceil(math.prod(launch.grid) / 132)


def test_matrices_without_the_copy_engine_compile():
    W = torch.empty((64, 1024), dtype=torch.bfloat16)
    x, y = (torch.empty((17, size), dtype=torch.bfloat16) for size in (1024, 64))
    with offline.offline(80):
        launch = wide.wide(W, x, y)
    assert not launch.args["BOXES"]
    found = compiled_once.evidence(launch, 80)
    assert (found["spill_bytes"], set(found["loads"])) == (0, {"128"})


def test_products_of_fp32_are_not_rounded_for_tensor_cores():
    W = blank("Q4_K")
    for make in (products.tensor_core, wide.wide):
        small = WideChoice(groups=8, blocks=2, tokens=16) if make is wide.wide else None
        assert compiled_once.evidence(make(W, *activations(W, 1, torch.float32), small), 90)["matrix"] == {}


def test_one_row_and_one_token_compile():
    """Triton makes arguments that are 1 into constants."""
    found = compiled_once.evidence(product(blank("Q4_K", 1, 256), 1, None, gated=True), 90)
    assert found["spill_bytes"] == 0


def test_tokens_and_rows_of_a_program_do_not_change_the_order_of_sums():
    W = blank("Q8_0")
    cases = [(1, None), (17, None), (3, None), (17, Choice(32, 1, 16, 8))]
    orders = [order_of_sums(product(W, *case)) for case in cases] + [order_of_sums(product(W, 8, None, gated=True))]
    assert len(orders[0]) == 2  # four weights of a thread, then the groups of a row
    assert all(order == orders[0] for order in orders)
    rows = torch.zeros((W.rows, W.columns // 32 * 34), dtype=torch.uint8)
    x, y = activations(W, 1)
    assert order_of_sums(ablations.stored(rows, x, y)) == order_of_sums(products.per_token(W, x, y)[0])
    for other in (Choice(), Choice(32, num_warps=4)):  # the comparison has power
        assert order_of_sums(product(W, 1, other)) != orders[0]
    tiles = [(1, TileChoice()), (17, TileChoice(4, 32)), (64, TileChoice(8, 16))]
    matrix = [order_of_sums(products.tensor_core(W, *activations(W, n), tile)) for n, tile in tiles]
    assert len(matrix[0]) == 1  # the warps' sums
    assert all(order == matrix[0] for order in matrix)
    assert order_of_sums(products.tensor_core(W, *activations(W, 1), TileChoice(num_warps=8))) != matrix[0]
