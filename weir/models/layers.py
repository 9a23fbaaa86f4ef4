"""The small layers every model of the family is made of."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Norm(Protocol):
    """x / rms(x) * weight over the last dimension, in ``x``'s dtype; ``x`` stays as it is."""

    def __call__(self, x: Tensor) -> Tensor: ...


class TorchNorm:
    """torch's own; computes in float32 inside."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)
