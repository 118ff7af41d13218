"""Which tiles a product of many tokens runs with: a rule from the number of tokens, for what has not been tuned."""

from dataclasses import asdict, dataclass

from labkit.checks import check_one_of

GROUPS = (4, 8, 16, 32, 64)
BLOCKS = (1, 2, 4, 8)
TOKENS = (1, 2, 4, 8, 16)
WARPS = (1, 2, 4, 8)
STAGES = (1, 2, 3, 4, 5, 6)
# a matrix instruction's least: 16 rows, 8 tokens
MATRIX_BLOCKS = (2, 4, 8, 16)
MATRIX_TOKENS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Choice:
    """How a product is run. groups: of 32 weights of a row, in a tile; blocks: of 8 rows, a program.

    tokens: those of a program: that share a tile of weights (multiply-add), or the tile that they are padded to (matrix
    instructions). Of the default's 16 groups of 8 rows, each of the 128 threads has one; with more groups or fewer
    threads, scales move between threads.
    """

    groups: int = 16
    blocks: int = 2
    tokens: int = 1
    num_warps: int = 4
    num_stages: int = 2

    def as_dict(self) -> dict[str, int]:
        """The choice as JSON."""
        return asdict(self)


MATRIX = Choice(groups=8, blocks=8, tokens=16)  # 64 rows, as wgmma wants; with x in 16 bits, no spills on sm_90


def rule(tokens: int, gated: bool = False) -> Choice:
    """A choice for `weight_stationary` and so many tokens, without spills on sm_90; its bits are those of `Choice()`.

    gated: gate and up in one launch. Two blocks of rows, or these two matrices, share the values of x; from 8 tokens
    on, the sums take their registers. With 16 tokens a program, only two or three CTAs fit on an SM.
    """
    shared = min(8, 1 << (tokens - 1).bit_length())
    return Choice(blocks=2 if shared <= 4 and not gated else 1, tokens=shared)


def check_choice(choice: Choice) -> None:
    """Raise ValueError for a choice that the multiply-add kernel cannot take."""
    check_one_of("tokens", choice.tokens, TOKENS)
    check_one_of("blocks", choice.blocks, BLOCKS)
    check_tile(choice)


def check_matrix_choice(choice: Choice) -> None:
    """Raise ValueError for a choice that the kernel of matrix instructions cannot take."""
    check_one_of("tokens", choice.tokens, MATRIX_TOKENS)
    check_one_of("blocks", choice.blocks, MATRIX_BLOCKS)
    check_tile(choice)


def check_tile(choice: Choice) -> None:
    """Raise ValueError for what no kernel can take."""
    check_one_of("groups", choice.groups, GROUPS)
    check_one_of("num_warps", choice.num_warps, WARPS)
    check_one_of("num_stages", choice.num_stages, STAGES)
