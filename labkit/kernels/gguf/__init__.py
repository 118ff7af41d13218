"""Products of GGUF weights (BF16, Q8_0, Q4_K, Q5_K, Q6_K, …) with many tokens, each with the bits that it has alone.

    multiply(pack(blocks, "Q4_K"), x, y)()

`read` takes a tensor's blocks out of a .gguf file. Routed experts: `grouped_indexed`. Other families of bits, faster
for some numbers of tokens, are in the modules `products`, `integers` and `wide`, and on Hopper `by_specialised_warps`
and `by_continued_sums`.
"""

from labkit.kernels.lazy import exported

__getattr__, __all__ = exported(
    __name__,
    {
        "products": "multiply weight_stationary tensor_core",
        "formats": "FORMATS Packed pack quantise dequantise",
        "files": "read tensor_names",
        "routed": "Work grouped_indexed weighted_sum",
        "experts": "Experts",
        "specialised": "by_specialised_warps WarpChoice",
        "continued": "by_continued_sums ContinuedChoice",
    },
)
