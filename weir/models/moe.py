"""Feed-forward layers: dense, and mixtures of experts."""

from typing import Protocol

import torch
from torch import Tensor

from weir.models.linear import GatedLinear, Linear


class FeedForward(Protocol):
    """Adds its output to ``residual``: x [T, hidden] (normalised), residual [T, hidden] -> new [T, hidden]."""

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor: ...


class DenseMlp:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gated: GatedLinear, down: Linear) -> None:
        self._gated = gated
        self._down = down

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._down.plus(self._gated(x), residual)

    def alone(self, x: Tensor) -> Tensor:
        """Without a residual."""
        return self._down(self._gated(x))


class SharedExpert:
    """An expert for every token, weighted by a sigmoid gate (Qwen2-MoE)."""

    def __init__(self, mlp: DenseMlp, gate: Tensor) -> None:
        self._mlp = mlp
        self._gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x @ self._gate.t()) * self._mlp.alone(x)


class MixtureOfExperts:
    """Each token's ``top_k`` best experts, weighted by the softmax of the router's scores.

    The softmax is over all experts in float32; ``renormalise`` divides the chosen weights by their sum.
    """

    def __init__(
        self, router: Tensor, experts: list[DenseMlp], top_k: int, renormalise: bool, shared: SharedExpert | None
    ) -> None:
        assert 1 <= top_k <= len(experts) == router.shape[0]
        self._router = router
        self._experts = experts
        self._top_k = top_k
        self._renormalise = renormalise
        self._shared = shared

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        out = residual.clone()
        weights, chosen = self._route(x)
        order = torch.argsort(chosen.view(-1), stable=True)
        tokens = order // self._top_k
        scales = weights.view(-1)[order][:, None]
        counts = torch.bincount(chosen.view(-1), minlength=len(self._experts)).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                span = slice(start, start + count)
                start += count
                y = self._experts[expert].alone(x.index_select(0, tokens[span]))
                out.index_add_(0, tokens[span], y.mul_(scales[span]))
        return out if self._shared is None else out.add_(self._shared(x))

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.softmax((x @ self._router.t()).float(), dim=-1)
        weights, chosen = torch.topk(scores, self._top_k, dim=-1)
        if self._renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen
