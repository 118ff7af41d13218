"""y = W x in float64, plainly."""

from torch import Tensor


def gemv(W: Tensor, x: Tensor) -> Tensor:
    """W: [N, K], x: [K], any float dtype; returns y: [N], float64."""
    return W.double() @ x.double()
