"""What a kind of machine brings to a model: products, norms, rotation, attention."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weir.models.attention import AttentionBackend, CpuAttention
from weir.models.config import ModelConfig
from weir.models.layers import Norm, TorchNorm
from weir.models.linear import LinearBackend, choose_backend, packing_works
from weir.models.rope import Rotary, TorchRotary


@dataclass(frozen=True, slots=True)
class Backend:
    """``norm`` makes a norm from its weight and epsilon."""

    linears: LinearBackend
    norm: Callable[[Tensor, float], Norm]
    rotary: Rotary
    attention: AttentionBackend


def cpu_backend(config: ModelConfig, dtype: torch.dtype) -> Backend:
    """torch and oneDNN."""
    return Backend(
        linears=choose_backend(dtype, torch.device("cpu")),
        norm=TorchNorm,
        rotary=TorchRotary(config.rope, config.head_dim, config.max_position, dtype),
        attention=CpuAttention(config, tiles=packing_works()),
    )
