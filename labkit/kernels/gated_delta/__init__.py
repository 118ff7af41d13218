"""The gated delta rule, with a decay for each head (GDN) or each channel (KDA): decode, verify and extend of prompts.

    decode(StepInputs(state=pool, indices=slots, q=q, k=k, v=v, a=a, b=b, A_log=A_log, dt_bias=bias, out=out))()

States of a pool are updated in place, in either layout, [V, K] or [K, V].
"""

from labkit.kernels.lazy import exported

__getattr__, __all__ = exported(
    __name__,
    {
        "recurrent": "decode verify packed StepInputs VerifyInputs StepChoice",
        "prefill": "extend segments",
        "chunked": "ExtendInputs Extend",
    },
)
