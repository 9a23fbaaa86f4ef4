"""The seam for matrix products with weights. One back end per kind of machine; a model asks for what it needs."""

import functools
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """y = x W^T + b for ``x`` [T, in] of the weight's dtype; gives a new [T, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product plus ``residual`` [T, out]."""
        ...


class GatedLinear(Protocol):
    """silu(x G^T + g) * (x U^T + u) for ``x`` [T, in]; gives a new [T, width]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class LinearBackend(Protocol):
    """Makes layers out of weights [out, in] and biases [out] or None. May copy and re-lay the weights."""

    name: str

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear: ...

    def gated(self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> GatedLinear: ...


class TorchLinear:
    """F.linear on the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias).add_(residual)


class TorchGated:
    """Gate and up as one product, so that ``x`` is read once and one kernel is started."""

    def __init__(self, both: TorchLinear) -> None:
        self._both = both

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._both(x).chunk(2, dim=-1)
        return F.silu(gate) * up


class TorchBackend:
    """Works everywhere and in every dtype."""

    name = "torch"

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return TorchLinear(weight, bias)

    def gated(self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> GatedLinear:
        return TorchGated(TorchLinear(torch.cat((gate, up)), joined_bias(gate_bias, up_bias)))


class PackedLinear:
    """A weight in oneDNN's blocked layout: F.linear lays it out anew in every call, which at 1 to 16 tokens
    costs more than the product itself (measured 2 to 3 times slower, and 2.4 times at 1,024 tokens)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y

    def silu(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "swish", [], "")
        return y

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._packed, self._bias, "mul")
        return y

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")
        return y


def product(x: Tensor, y: Tensor) -> Tensor:
    """x y^T by oneDNN for float32 ``x`` [m, k] and ``y`` [n, k], neither of them packed.

    ``x`` is contiguous, and so is ``y`` or its transpose: other strides are thousands of times slower.
    """
    z: Tensor = torch.ops.mkldnn._linear_pointwise(x, y, None, "none", [], "")
    return z


class PackedGated:
    """Two products whose element-wise tails run inside them, while their results are in registers."""

    def __init__(self, gate: PackedLinear, up: PackedLinear) -> None:
        self._gate = gate
        self._up = up

    def __call__(self, x: Tensor) -> Tensor:
        return self._up.times(x, self._gate.silu(x))


class PackedBackend:
    """oneDNN with packed float32 weights; CPU only."""

    name = "packed"

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return PackedLinear(weight, bias)

    def gated(self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> GatedLinear:
        return PackedGated(PackedLinear(gate, gate_bias), PackedLinear(up, up_bias))


def choose_backend(dtype: torch.dtype, device: torch.device) -> LinearBackend:
    """The fastest back end that works here: packed for float32 on a CPU with oneDNN, else plain torch."""
    if device.type == "cpu" and dtype == torch.float32 and packing_works():
        return PackedBackend()
    return TorchBackend()


def joined_bias(*biases: Tensor | None) -> Tensor | None:
    """Biases of joined projections; all or none are given."""
    given = [bias for bias in biases if bias is not None]
    assert len(given) in (0, len(biases))
    return torch.cat(given) if given else None


@functools.cache
def packing_works() -> bool:
    """The packed operators are not public API: use them only if they are there and agree with F.linear."""
    x, weight = torch.arange(96.0).sin().view(3, 32), torch.arange(1536.0).cos().view(48, 32)
    try:
        y = PackedLinear(weight, None)(x)
        inner = product(x, weight.t().contiguous().t())
        gated = PackedGated(PackedLinear(weight, None), PackedLinear(weight, None))(x)
    except (AttributeError, RuntimeError):
        return False
    plain = F.linear(x, weight)
    same = torch.allclose(y, plain, atol=1e-4) and torch.allclose(inner, plain, atol=1e-4)
    return same and torch.allclose(gated, F.silu(plain) * plain, atol=1e-3)
