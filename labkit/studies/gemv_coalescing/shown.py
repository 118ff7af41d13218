"""What the page calls variants and rules, whose names in rows and claims cannot change."""

import pandas as pd

from labkit.studies.gemv_coalescing import tables, variants

LAB = "the lab's GEMV"
ORDINARY, TRIGGER = "ordinary kernels between", "kernels with the trigger between"
NAMES = {
    variants.THREAD_A_ROW: "one thread per row",
    variants.THREAD_A_ROW_TURNED: "coalescing alone [K, N]",
    variants.WARP_A_ROW: "one warp per row",
    variants.WIDE_LOADS: "loads of 16 bytes",
    variants.HINT: "evict-first hint",
    variants.FOUR_ROWS: "four rows per program",
    variants.PIPELINED: "pipelined copies",
    variants.TUNED: "tuned, ordinary launch",
    variants.SPLIT_K: "split K",
    variants.OURS: "dependent launch",
    variants.separate("torch.mv"): "cuBLAS, separate",
    variants.merged("torch.mv"): "cuBLAS, merged",
    variants.separate("ours"): "dependent launch, separate",
    variants.CHAIN_PLAIN: "ordinary launch, merged",
    variants.CHAIN_OURS: "dependent launch, merged",
    variants.BETWEEN_MV: "cuBLAS, ordinary kernels between",
    variants.BETWEEN_OURS: ORDINARY,
    variants.BETWEEN_TRIGGER: TRIGGER,
    variants.SGLANG: "SGLang hopper_bf16_gemv",
    tables.RULE: f"one row up to N = {tables.RULE_ROWS}, else four",
    tables.RULE_PLAIN: f"one row up to N = {tables.RULE_ROWS}, else four, ordinary launch",
    tables.ONE: "always one row",
    tables.ONE_PLAIN: "always one row, ordinary launch",
    tables.FOUR: "always four rows",
    tables.FOUR_PLAIN: "always four rows, ordinary launch",
    **{name: f"vLLM {name.rpartition(' ')[2]}" for name in variants.VLLM},
}


def name(variant: str) -> str:
    """Of one variant; its recorded name if it has no other."""
    return NAMES.get(variant, variant)


def named(table: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The table with these columns' variants as the page calls them."""
    return table.assign(**{column: table[column].map(name) for column in columns})
