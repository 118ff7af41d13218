"""Gates and normalisation of the gated delta rule inside Triton kernels, all in fp32.

Sources: Gated Delta Networks (Yang, Kautz, Hatamizadeh, 2024) for the scalar decay; Kimi Linear (Kimi Team, 2025) for
the decay of every channel. `reference.py` has the same formulas in float64.
"""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)), and x itself above 20, where they are equal in fp32 and exp would overflow further on."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def decay(x, A_log, lower_bound, BOUNDED: tl.constexpr):
    """Decay α of x = a + dt_bias, a scalar (GDN) or a tensor of channels (KDA).

    exp(-exp(A_log) · softplus(x)); BOUNDED: exp(lower_bound · sigmoid(exp(A_log) · x)).
    """
    rate = tl.exp(A_log)
    if BOUNDED:
        return tl.exp(lower_bound * tl.sigmoid(rate * x))
    return tl.exp(-rate * softplus(x))


@triton.jit
def inverse_norm(sum_of_squares):
    """1 / the L2 norm, as the models compute it: the epsilon is added to the sum."""
    return tl.rsqrt(sum_of_squares + 1e-6)
