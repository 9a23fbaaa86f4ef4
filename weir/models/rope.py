"""Rotary position embedding in Hugging Face's half-split layout (dimension i pairs with i + head_dim/2)."""

import math

import torch

from weir.models.config import RopeConfig


class RotaryTable:
    """Cosine and sine rows by position below ``max_position``, built in float32.

    ``rows(positions)`` gives ([T, head_dim], [T, head_dim]); the sine of the first half is negated, so that
    rotated = x * cos + roll(x, head_dim/2) * sin.
    """

    def __init__(self, config: RopeConfig, head_dim: int, max_position: int, device: torch.device) -> None:
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse_frequencies(config, head_dim)
        cos, sin = angles.cos(), angles.sin()
        self.half_cos = cos.to(device)
        self.half_sin = sin.to(device)
        self._cos = torch.cat((cos, cos), dim=-1).to(device)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` [T, heads, head_dim] by ``cos``/``sin`` [T, 1, head_dim]; computes in their precision."""
    return (x * cos).addcmul_(torch.roll(x, x.shape[-1] // 2, -1), sin)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
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
