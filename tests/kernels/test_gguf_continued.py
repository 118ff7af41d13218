"""Products of BF16 matrices by continued sums: shares of programs, which choice is made, and what cannot run."""

from itertools import pairwise

import pytest
import torch

from labkit.kernels.gguf import continued
from labkit.kernels.gguf.continued import STEP, ContinuedChoice, by_continued_sums, continued_rule


@pytest.mark.parametrize(
    ("tokens", "rows", "rows_a_program"), [(512, 5120, 128), (512, 17408, 256), (128, 17408, 128), (4096, 5120, 256)]
)
def test_programs_have_as_many_rows_as_leave_none_without_a_tile(tokens, rows, rows_a_program):
    assert continued_rule(tokens, rows).rows == rows_a_program


@pytest.mark.parametrize(
    ("rows", "tokens", "expected"),
    [
        (5120, 1, (64, 12, 64)),
        (17408, 1, (128, 8, 64)),
        (2560, 64, (32, 16, 64)),  # else there were programs for a third of the multiprocessors
        (5120, 128, (128, 8, 64)),
        (5120, 256, (128, 8, 64)),  # of 128 tokens a program there were too few
        (5120, 512, (128, 6, 128)),
        (17408, 192, (128, 8, 64)),  # of 128 tokens a program the last ones had half as many
        (17408, 512, (256, 4, 128)),
    ],
)
def test_the_rule_gives_most_multiprocessors_a_tile(rows, tokens, expected):
    assert continued_rule(tokens, rows) == ContinuedChoice(*expected)


@pytest.mark.parametrize("processors", [1, 7, 132])
@pytest.mark.parametrize(
    ("tokens", "rows", "K"), [(512, 5120, 17408), (512, 17408, 5120), (1, 40, 72), (4096, 264, 64)]
)
def test_a_share_is_a_tile_or_more_so_that_a_tile_has_two_programs_at_most(tokens, rows, K, processors):
    choice = continued_rule(tokens, rows, processors)
    tiles, steps = -(-rows // choice.rows), -(-K // STEP)
    token_tiles = -(-tokens // choice.tokens)
    groups = continued._groups(token_tiles, tiles, processors)
    assert groups * token_tiles <= max(processors, token_tiles)
    bounds = [group * tiles * steps // groups for group in range(groups + 1)]
    assert min(b - a for a, b in pairwise(bounds)) >= steps


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("W", "x", "y", "message"),
    [
        (empty(8, 64), empty(2, 64), empty(2, 8), r"x is on cpu; allowed: a GPU of compute capability 9.0 \(Hopper\)"),
        (empty(8, 64, dtype=torch.float16), empty(2, 64), empty(2, 8), "W is torch.float16; allowed: torch.bfloat16"),
        (empty(8, 64), empty(2, 64, dtype=torch.float32), empty(2, 8), "x is torch.float32; allowed: torch.bfloat16"),
        (empty(8, 64), empty(2, 64), empty(2, 8, dtype=torch.float32), "y is torch.float32; allowed: torch.bfloat16"),
        (empty(8, 64), empty(2, 128)[:, ::2], empty(2, 8), r"x has strides \(128, 2\); allowed: values of a token"),
        (empty(8, 128)[:, :64], empty(2, 64), empty(2, 8), r"W has strides \(128, 1\); allowed: contiguous"),
        (empty(64), empty(2, 64), empty(2, 8), r"W is \(64,\); allowed: \[rows, K\], both at least 1"),
        (empty(8, 64), empty(2, 32), empty(2, 8), r"x is \(2, 32\); allowed: \[N, 64\], N at least 1"),
        (empty(9, 64), empty(2, 64), empty(2, 9), r"y is \(2, 9\); allowed: rows that begin at multiples of 16 bytes"),
        (empty(8, 60), empty(2, 60), empty(2, 8), r"W is \(8, 60\); allowed: rows that begin at multiples of 16 bytes"),
        (empty(8, 64), empty(4097, 64), empty(4097, 8), "x has 4097 tokens; allowed: at most 4096"),
    ],
)
def test_what_cannot_run_is_named(W, x, y, message):
    with pytest.raises(ValueError, match=message):
        by_continued_sums(W, x, y)


def test_a_choice_is_checked_before_anything_runs():
    with pytest.raises(ValueError, match="stages is 7; allowed: 2, 3, 4, 5, 6"):
        continued.check_continued(ContinuedChoice(128, 7))
