"""Which tiles a product of many tokens runs with: rules from the number of tokens and the shape, with their reasons."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace

from labkit.kernels.checks import check_one_of
from labkit.kernels.gguf.formats import GROUP, K_FORMATS

WARPS = (1, 2, 4, 8, 16)
SHARES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
AHEAD = (0, 1, 2, 3, 4, 5)  # 1: a program's first tile, before the launch waits; from 2 on, so many less 1 at any time
RUNS = {"num_warps": WARPS, "num_stages": (1, 2, 3, 4, 5, 6)}
COMMON = RUNS | {"shares": SHARES, "ahead": AHEAD}
CHOICES = {"tokens": (1, 2, 4, 8, 16), "blocks": (1, 2, 4, 8), "at_once": WARPS, "groups": (4, 8, 16, 32, 64)} | COMMON
TILES = {"tokens": (8, 16, 32, 64), "blocks": (2, 4, 8)} | COMMON  # a matrix instruction's least: 16 rows, 8 tokens
WIDE_TOKENS = (16, 32, 64, 128, 256)
WIDES = {"tokens": WIDE_TOKENS, "blocks": (2, 4, 8, 16, 32), "groups": (1, 2, 4, 8), "split_tokens": WIDE_TOKENS}
WIDES |= {"parts": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)} | RUNS
# Of multiply-add in K formats: shares a multiprocessor, and of so many tokens blocks of 8 rows (of both matrices
# together), tiles ahead and programs at once. Four blocks share what is done to x, and are sixteen programs of 128
# registers; eight tokens' sums take twice as many, so that half of the programs wait for the others.
FOUR_BLOCKS = 16, {1: (4, 2, 16), 2: (4, 2, 16), 4: (4, 0, 16), 8: (4, 0, 8)}
# Half the shares, two programs for each: where two scales a group leave no registers for more blocks (Q6_K), and of
# smaller matrices, a row of which would be shared by many programs of few tiles
TWO_BLOCKS = 8, {1: (2, 3, 16), 2: (2, 2, 16), 4: (2, 2, 16), 8: (4, 0, 8)}
LARGE = 1 << 25  # weights
WIDE_ROWS = 128  # of a tile of `wide`, in which its waves are counted
LEAST_COLUMNS = 768  # of a part of `wide`: fewer are over before tiles are on their way
SUM_OF_PARTS = 128  # columns of a tile that take about as long as a part's sum does through memory
MOST_PARTS = 8
MOST_PARTS_BESIDE = 4  # beside whole waves, where tiles of few tokens are more programs already
ENOUGH_WARPS = 2048  # that a product is spread over: about 16 on each of an H100's 132 multiprocessors


class _Json:
    def as_dict(self) -> dict[str, int]:
        """The choice as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Choice(_Json):
    """How a product is run. groups: of 32 weights of a row, in a tile; blocks: of 8 rows, a program.

    tokens: those of a program, that share a tile of weights. Of the default's 16 groups of 8 rows, each of the 128
    threads has one; with more groups or fewer threads, scales move between threads. shares: as of tiles, with programs
    of one warp and four groups; 0: a program has whole rows. at_once: of those programs, so many are on a
    multiprocessor at once at most: the fewer, the more registers for each. Bits depend on groups, num_warps and shares.
    """

    groups: int = 16
    blocks: int = 2
    tokens: int = 1
    num_warps: int = 4
    num_stages: int = 2
    ahead: int = 0
    dependent: bool = False
    shares: int = 0
    at_once: int = 16


@dataclass(frozen=True)
class TileChoice(_Json):
    """How `tensor_core` is run. blocks: of 8 rows, a program, two an instruction; tokens: a program, 8 an instruction.

    Of gate and up, half of the blocks are of each: an instruction has 8 rows of gate and the same 8 of up.

    num_warps: warps that share the rows of a program, each with groups of its own: the order of a sum depends on it.
    shares: equal shares a multiprocessor, in which all tiles are dealt, of strips of four blocks; one has a program, or
    with tiles of two blocks, two. 0: a program has whole rows. Bits depend on it too.
    """

    blocks: int = 2
    tokens: int = 8
    num_warps: int = 4
    num_stages: int = 1
    ahead: int = 0
    dependent: bool = False
    shares: int = 0


@dataclass(frozen=True)
class WideChoice(_Json):
    """How `wide.wide` is run. groups: of 32 columns, and blocks: of 8 rows, in a tile of weights; tokens: a program.

    whole: of the first rows, so many are not split; of the others, K is in so many parts, each with a sum and a program
    of its own, of split_tokens. Bits depend on whole, parts and groups. parts 1: no row is split.
    """

    groups: int = 2
    blocks: int = 8
    tokens: int = 64
    num_warps: int = 4
    num_stages: int = 4
    parts: int = 1
    whole: int = 0
    split_tokens: int = 64
    dependent: bool = False


def rule(tokens: int, rows: int, columns: int, format: str, gated: bool = False) -> Choice:
    """A choice for `weight_stationary`, so many tokens and rows of so many weights, without spills on sm_90.

    Its bits depend on format and shape alone. K formats take a GPU long to unpack, so that multiprocessors without work
    count, and warps that wait for others of their program: all tiles are dealt in equal shares. What has no arithmetic
    to speak of has whole rows: `rule_of_rows`. gated: gate and up in one launch.
    """
    if format not in K_FORMATS:
        return rule_of_rows(tokens, columns, gated)
    shares, choices = FOUR_BLOCKS if rows * columns >= LARGE and format != "Q6_K" else TWO_BLOCKS
    shared = _shared(tokens)
    blocks, ahead, at_once = choices[shared]
    if gated:
        blocks //= 2
    return Choice(4, blocks, shared, 1, ahead=ahead, dependent=True, shares=shares, at_once=at_once)


def rule_of_rows(tokens: int, columns: int, gated: bool = False) -> Choice:
    """The same with whole rows a program, in any format; its bits depend on the columns alone.

    Where rows are whole tiles of 32 groups, eight warps share them, since few rows would otherwise be too few programs.
    Up to two tokens each tile is asked for ahead, and two share what is done to x between two blocks of rows (of each
    matrix, one). More tokens' sums take the registers.
    """
    shared = _shared(tokens)
    if shared > 2:
        choice = narrow_rule(tokens, gated)
    else:
        choice = Choice(blocks=2 if shared == 2 and not gated else 1, tokens=shared, ahead=2)
    groups = 32 if columns % (32 * GROUP) == 0 else choice.groups
    return replace(choice, groups=groups, num_warps=groups // 4, dependent=True)


def narrow_rule(tokens: int, gated: bool = False) -> Choice:
    """The same for experts, which are narrow and many; its bits are those of `Choice()`.

    Four blocks of rows (two of each matrix) share the conversion of x, which counts where arithmetic does; from 4
    tokens on, the sums take their registers. With 16 tokens a program, only two or three CTAs fit on an SM.
    """
    shared = _shared(tokens)
    blocks = 4 if shared <= 2 else 2 if shared <= 4 else 1
    return Choice(blocks=max(1, blocks // 2) if gated else blocks, tokens=shared)


def _shared(tokens: int) -> int:
    return min(8, 1 << (tokens - 1).bit_length())


def matrix_rule(tokens: int, rows: int, columns: int, format: str, gated: bool = False) -> TileChoice:
    """A choice for `tensor_core`; a shape has one number of warps and of shares, and so one set of bits.

    Where rows are whole tiles of a warp, all tiles are dealt in eight shares a multiprocessor, to programs of one warp,
    which waits for no other: up to 8 tokens sixteen with 128 registers a thread, with more tokens eight, whose sums
    take twice as many, and in BF16 eight too, since its tiles are as large again. Else few rows are split among more
    warps, as far as each has groups, until `ENOUGH_WARPS` are under way. More blocks of rows share the values of x,
    which a warp reads from many lines; with few tokens, smaller tiles leave registers for the next one or two, which
    are asked for ahead. gated: gate and up in one launch.
    """
    padded = max(8, 1 << (tokens - 1).bit_length())
    whole = columns % (4 * GROUP) == 0
    warps = 1 if whole else 2
    while not whole and warps < 16 and -(-rows // 16) * warps < ENOUGH_WARPS and columns >= 32 * 8 * warps:
        warps *= 2
    few = padded <= 8
    blocks = 2 if warps > 8 or (few and not (whole and format == "BF16")) else 4
    room = format != "F32" and (format != "BF16" or padded <= 16)  # registers for tiles asked for ahead
    ahead = 0 if not room or not (whole or few) else 3 if whole and blocks == 2 else 2
    most = 16 if gated else 32
    return TileChoice(blocks, min(padded, most), warps, 1, ahead, whole or few, shares=8 if whole else 0)


def wide_rule(
    tokens: int, rows: int, columns: int, format: str, stored: bool = False, multiprocessors: int = 132
) -> WideChoice:
    """A choice for `wide.wide`; for a shape, a format and a GPU one set of bits, whatever the number of tokens.

    stored: a matrix, not `Packed`. Up to 128 tokens it is bound by bytes: programs of 64 rows, several on an SM, or
    where all rows are split, 128 rows and half as many tokens. Beyond, tiles of 256 tokens, whose sums take all
    registers, for the fewest bytes of shared memory an operation. Split rows beside whole ones have tiles of 64 tokens:
    one wave of small programs, whose sums are soon added. Where all rows are split there are programs enough, and
    beyond 128 tokens large tiles are worth more.

    Packed weights take registers while they are unpacked, 64 rows of them leave room for the sums of 64 tokens, and of
    128. Four groups a tile halve the barriers an operation, of formats with up to 8 bits. All their programs are on the
    SMs at once: beside whole waves nothing is split.
    """
    whole, parts = split_rule(-(-rows // WIDE_ROWS), columns, multiprocessors)
    if not stored and whole:
        parts = 1
    split = {"parts": parts, "whole": whole * WIDE_ROWS if parts > 1 else 0}
    mixed = parts == 1 or whole > 0  # rows that are not split
    padded = max(16, 1 << (tokens - 1).bit_length())
    small = min(64, padded)
    if not stored:
        padded = min(128, padded)
        groups = 4 if format in (*K_FORMATS, "Q8_0") else 2
        stages = 2 if format == "F32" or padded > 64 else 3
        return WideChoice(groups, 8, padded, 4, stages, **split, split_tokens=small if mixed else padded)
    if padded <= 64:
        return WideChoice(2, 8, padded, 4, 4 if mixed else 5, **split, split_tokens=padded)
    if padded <= 128:
        return WideChoice(2, 8, 128, 4, 3, **split, split_tokens=64) if mixed else WideChoice(2, 16, 64, 8, 4, **split)
    return WideChoice(2, 16, 256, 8, 4, **split, split_tokens=64 if mixed else 256)


def split_rule(tiles: int, columns: int, multiprocessors: int) -> tuple[int, int]:
    """Of so many tiles of rows, how many are not split, and in how many parts K is for the others.

    Tiles that fill whole waves are not split. The others would take a wave of their own with most SMs idle: beside
    whole waves, their parts are programs for all SMs, or nearly; where more than two thirds of a wave are left, nothing
    is split. Fewer tiles than one wave are in so many parts that waves of them are full, as far as sums of parts, which
    go through memory, do not cost more than that gains.
    """
    left = tiles % multiprocessors
    if not left:
        return tiles, 1
    if left < tiles:
        parts = min(MOST_PARTS_BESIDE, round(multiprocessors / left), max(1, columns // LEAST_COLUMNS))
        return (tiles - left, parts) if parts > 1 else (tiles, 1)

    def time(parts: int) -> float:
        """In that of a tile over all columns."""
        waves = -(-tiles * parts // multiprocessors)
        return waves * (1 / parts + (SUM_OF_PARTS / columns if parts > 1 else 0))

    parts = min(range(1, max(1, min(MOST_PARTS, columns // LEAST_COLUMNS)) + 1), key=time)
    return (0, parts) if parts > 1 else (tiles, 1)


def check_choice(choice: Choice) -> None:
    """Raise ValueError for a choice that the multiply-add kernel cannot take."""
    _check_each(choice, CHOICES)
    if choice.shares and (choice.groups, choice.num_warps) != (4, 1):
        found = f"groups is {choice.groups} and num_warps {choice.num_warps}"
        raise ValueError(f"shares is {choice.shares}, where {found}; allowed: 0, or groups 4 and num_warps 1")


def check_tile(tile: TileChoice) -> None:
    """Raise ValueError for a choice that `tensor_core` cannot take."""
    _check_each(tile, TILES)


def check_wide(choice: WideChoice) -> None:
    """Raise ValueError for a choice that `wide.wide` cannot take."""
    _check_each(choice, WIDES)
    if choice.whole < 0 or choice.whole % (8 * choice.blocks):
        raise ValueError(f"whole is {choice.whole}; allowed: multiples of {8 * choice.blocks}, a tile's rows")


def _check_each(choice: Choice | TileChoice | WideChoice, allowed: Mapping[str, Collection[int]]) -> None:
    for name, values in allowed.items():
        check_one_of(name, getattr(choice, name), values)
