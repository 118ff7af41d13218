"""A layer of routed experts, bf16, fp16 or INT4 weights: sorted on the device, two grouped products, weighted sum.

    layer(LayerInputs(x, ids, weights, w1, w2, out))()

One token takes kernels of its own. `quantise` makes INT4 weights. Three other designs are called by name:
`by_wide_tiles` where a router may send many tokens to few experts, `by_few_rows` and, on Hopper, `by_specialised_warps`
for large experts with INT4 weights and few tokens.
"""

from labkit.kernels.lazy import exported

__getattr__, __all__ = exported(
    __name__,
    {
        "expert_layer": "layer",
        "inputs": "LayerInputs Workspace Layer workspace",
        "int4": "Int4 quantise dequantise",
        "choose": "Choice TileChoice choose",
        "wide": "by_wide_tiles WideChoice",
        "few_rows": "by_few_rows FewChoice",
        "specialised": "by_specialised_warps WarpChoice",
    },
)
