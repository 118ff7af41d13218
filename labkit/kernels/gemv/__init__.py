"""y = W x for one token: a matrix of bf16, fp16 or fp32 times a vector, at the speed of reading the matrix.

    linear(W, x, y)()

`linear` takes the choice that was tuned for this GPU and shape, or else the rule's; `gemv` takes one of yours.
"""

from labkit.kernels.lazy import exported

__getattr__, __all__ = exported(__name__, {"gemv": "linear", "choose": "Choice choose rule"})
