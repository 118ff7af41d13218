"""Names of the study's variants, in the order of its pages."""

LADDER = (
    "1 thread a row",
    "2 thread a row, W stored [K, N]",
    "3 warp a row",
    "4 16-byte loads",
    "5 four rows a program",
    "6 pipelined",
    "7 tuned rows, warps and tile",
    "8 split K",
)
OURS = "9 dependent launch"  # the production GEMV
HINT = "4 with W evict-first"
CHANGES = (  # step, and the one that it changes
    *zip(LADDER[1:4], (LADDER[0], LADDER[0], LADDER[2]), strict=True),
    (HINT, LADDER[3]),
    *zip(LADDER[4:7], LADDER[3:6], strict=True),
    (LADDER[6], LADDER[3]),  # past the steps between, which lose
    (LADDER[7], LADDER[6]),
    (OURS, LADDER[6]),
)
THREADS = 64  # rows a CTA where each thread has its own, steps 1 and 2
READ = "read W"
EMPTY = "empty kernel"
EMPTY_DEPENDENT = "empty kernel, dependent launch"
LIBRARY = ("torch.mv", "F.linear")
PEERS = ("torch.compile", "flag_gems.mv")
ROWS_CHOICES = (1, 2, 4, 8, 16)
TWO_D_CHOICES = (1, 4, 16)
PLAIN_CHOICES = (1, 4)  # what the rule under test chooses between
WARM = "tuned in a warm cache"
INTERLEAVED = "rows=4, interleaved"


def rows_variant(rows: int) -> str:
    """The production kernel with the rule's warps and tile, and `rows` rows a program."""
    return f"rows={rows}"


def plain_rows_variant(rows: int) -> str:
    """The same without dependent launch, which hides the end of a kernel behind the next one's start."""
    return f"rows={rows}, without dependent launch"


def two_d_variant(rows: int) -> str:
    """The same choice in the kernel of one 2-D tile."""
    return f"2-D tile, rows={rows}"


ROWS_VARIANTS = (*map(rows_variant, ROWS_CHOICES), INTERLEAVED)
PLAIN_ROWS = tuple(map(plain_rows_variant, PLAIN_CHOICES))
TWO_D = tuple(map(two_d_variant, TWO_D_CHOICES))


def separate(name: str) -> str:
    """A chain with the matrices of a group multiplied one by one."""
    return f"{name}, separate"


def merged(name: str) -> str:
    """A chain with the matrices that share x multiplied as one."""
    return f"{name}, merged"


CHAIN_OURS = merged("ours")
CHAIN_PLAIN = merged("ours without dependent launch")
BETWEEN_MV = merged("torch.mv, kernels between")
BETWEEN_OURS = merged("ours, kernels between")
BETWEEN_TRIGGER = merged("ours, kernels with the trigger between")
BETWEEN = (BETWEEN_MV, BETWEEN_OURS, BETWEEN_TRIGGER)
CHAIN_LADDER = tuple(map(separate, (LADDER[0], LADDER[2], LADDER[3], LADDER[4])))
CHAINS = {
    **dict.fromkeys(CHAIN_LADDER, "step"),
    **{make(name): "baseline" for make in (separate, merged) for name in LIBRARY},
    separate("ours"): "step",
    CHAIN_PLAIN: "step",
    CHAIN_OURS: "ours",
    BETWEEN_MV: "baseline",
    BETWEEN_OURS: "step",
    BETWEEN_TRIGGER: "step",
    READ: "ceiling",
}
