"""How many blocks of tokens the experts of a routing have."""

BLOCKS_M = (16, 32, 64, 128)  # tokens a tile; every expert is padded to a multiple of it


def blocks(counts: list[int], block_m: int) -> int:
    """Blocks of rows that have a token: each expert's count padded to a multiple of block_m."""
    return sum(-(-count // block_m) for count in counts)


def most_blocks(tokens: int, top_k: int, experts: int, block_m: int) -> int:
    """The most blocks that any routing needs: one row for as many experts as can have one, the rest to one of them."""
    slots = tokens * top_k
    spread = min(slots, experts)
    return spread + (slots - spread) // block_m


def source_blocks(tokens: int, top_k: int, experts: int, block_m: int) -> int:
    """The blocks that ExecuTorch's grid has, since a grid must not depend on the routing: a whole block an expert more.

    `moe_align_block_size` in backends/cuda/triton/kernels/fused_moe.py.
    """
    return (tokens * top_k + experts * block_m) // block_m


def tiles(live: int, columns: int, block_n: int) -> int:
    """Tiles of a GEMM with so many blocks of rows and `columns` columns."""
    return live * -(-columns // block_n)
