"""What the page calls the variants: recorded rows keep their names, a reader sees these."""

import pandas as pd

from labkit.studies.persistent_tables import variants

_KERNELS = {variants.CUBLAS: "separate kernels, cuBLAS", variants.GEMV: "separate kernels, GEMV"}
SHOWN = {
    variants.REBUILT: "rebuilt in Python",
    variants.VECTORISED: "rebuilt vectorised",
    variants.PREBUILT: "tables kept, pageable",
    variants.PINNED: "tables kept, pinned",
    variants.ONE_POSITION: "one position (wrong)",
    variants.ONE_BY_ONE: "4-byte writes, singly",
    variants.PACKED: "4-byte writes, packed",
    variants.BY_KERNEL: "4-byte writes, kernel",
    variants.IN_LAUNCH: "position in the launch",
    variants.GRAPH: "position on the GPU",
    variants.LONGEST: "tables, longest record first",
    variants.UNORDERED: "tables without waits (wrong results)",
    variants.SPANNED: "tables, attention in spans",
    variants.STREAMED: "tables, a warp copies weights",
    variants.NOT_AHEAD: "tables, nothing loaded before a wait",
    variants.FETCHED: "tables, more loaded into L2 before a wait",
    variants.MARKED: "tables, time stamps written",
    **_KERNELS,
    variants.CUBLAS_DEPENDENT: f"{_KERNELS[variants.CUBLAS]}, dependent launch",
    variants.GEMV_DEPENDENT: f"{_KERNELS[variants.GEMV]}, dependent launch",
    variants.READ: "plain read of as many bytes",
    variants.REPLAYED: "separate kernels, one graph a token",
}  # variant -> name on the page; names that are not here stand for themselves
SHOWN |= {
    variants.alone(way, table): f"{SHOWN[way]}: {table} alone"
    for way in (variants.REBUILT, variants.PREBUILT)
    for table in variants.TABLES
}
MEANT = {
    variants.REBUILT: "word by word",
    variants.VECTORISED: "by array operations",
    variants.PREBUILT: "all copied, the host waits",
    variants.PINNED: "all copied, the host does not wait",
    variants.ONE_POSITION: "nothing is sent, the position stays",
    variants.ONE_BY_ONE: "one copy for each word that changes",
    variants.PACKED: "one copy of all words that change",
    variants.BY_KERNEL: "a small kernel writes the words that change",
    variants.IN_LAUNCH: "an argument of the kernel",
    variants.GRAPH: "the kernel advances it, in a CUDA graph",
}  # way -> what is done for each token, in as few words as a figure has room for
EACH_TOKEN = {
    variants.REBUILT: "built in Python, word by word (published: off)",
    variants.VECTORISED: "built by array operations",
    variants.PREBUILT: "position set, all tables copied, blocking",
    variants.PINNED: "position set, all tables copied, asynchronous",
    variants.ONE_POSITION: "nothing (published: on): the position stays",
    variants.ONE_BY_ONE: "a copy for each 4-byte word that changes",
    variants.PACKED: "one copy of the changed words; a kernel scatters them",
    variants.BY_KERNEL: "a small kernel writes the changed words",
    variants.IN_LAUNCH: "the position is an argument of the launch",
    variants.GRAPH: "a CUDA graph; the kernel advances the position",
}  # way -> what is done for each token


def named(table: pd.DataFrame, column: str = "way") -> pd.DataFrame:
    """The table with the page's names in a column of variants."""
    return table.assign(**{column: table[column].map(lambda name: SHOWN.get(name, name))})


def explained(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its ways named and explained: "tables kept, pinned: all copied, the host does not wait"."""
    return table.assign(way=[f"{SHOWN[way]}: {MEANT[way]}" for way in table["way"]])
