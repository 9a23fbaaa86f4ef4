"""Rotary position embedding in Hugging Face's half-split layout (dimension i pairs with i + head_dim/2)."""

import math
from typing import Protocol

import torch
from torch import Tensor

from weir.models.config import RopeConfig


class Rotation(Protocol):
    """The rotation of one step's tokens; the same in every layer. May work in place."""

    def joined(self, qk: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """q and k out of ``qk`` [T, heads + kv_heads, head_dim], rotated."""
        ...

    def pair(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """``q`` [T, heads, head_dim] and ``k`` [T, kv_heads, head_dim], rotated."""
        ...


class Rotary(Protocol):
    """Makes the rotation of a step from its tokens' positions [T]."""

    def step(self, positions: Tensor) -> Rotation: ...


class TorchRotary:
    """Tables of cosines and sines by position below ``max_position``, built in float32."""

    def __init__(self, config: RopeConfig, head_dim: int, max_position: int, dtype: torch.dtype) -> None:
        cos, sin = rotary_tables(config, head_dim, max_position)
        self._cos = torch.cat((cos, cos), dim=-1)
        # rotated = x * cos + roll(x, head_dim/2) * sin, with the sine of the first half negated.
        self._sin = torch.cat((-sin, sin), dim=-1)
        self._dtype = dtype

    def step(self, positions: Tensor) -> Rotation:
        cos, sin = (table.index_select(0, positions)[:, None, :] for table in (self._cos, self._sin))
        return _TorchRotation(cos.to(self._dtype), sin.to(self._dtype))


class _TorchRotation:
    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos = cos
        self._sin = sin

    def joined(self, qk: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        turned = self._turn(qk)
        return turned[:, :heads], turned[:, heads:]

    def pair(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._turn(q), self._turn(k)

    def _turn(self, x: Tensor) -> Tensor:
        return (x * self._cos).addcmul_(torch.roll(x, x.shape[-1] // 2, -1), self._sin)


def rotary_tables(config: RopeConfig, head_dim: int, max_position: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each float32 [max_position, head_dim/2]."""
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse_frequencies(config, head_dim)
    return angles.cos(), angles.sin()


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim/2] radians per position, float32.

    ``llama3`` (Meta, Llama 3.1) keeps short wavelengths, divides long ones by ``factor`` and blends between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return inverse
    if config.kind == "linear":
        return inverse / config.factor
    assert config.kind == "llama3", config.kind
    wavelength = 2 * math.pi / inverse
    turns = config.original_max_position / wavelength
    smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - smooth) * inverse / config.factor + smooth * inverse
    scaled = torch.where(turns < config.low_freq_factor, inverse / config.factor, inverse)
    middle = (turns >= config.low_freq_factor) & (turns <= config.high_freq_factor)
    return torch.where(middle, blended, scaled)
