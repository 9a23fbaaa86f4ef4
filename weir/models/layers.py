"""The small layers every model of the family is made of."""

import torch.nn.functional as F
from torch import Tensor


class RmsNorm:
    """x / rms(x) * weight over the last dimension; computed in float32, returned in ``x``'s dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)
