"""y = W x in float64, plainly."""

from torch import Tensor


def gemv(W: Tensor, x: Tensor) -> Tensor:
    """W: [N, K], x: [K], any float dtype; returns y: [N], float64."""
    return W.double() @ x.double()


def between(y: Tensor) -> Tensor:
    """What stands between two GEMVs of a chain, y / (1 + |y|). y: [K], any float dtype; returns [K], float64."""
    return y.double() / (1 + y.double().abs())
