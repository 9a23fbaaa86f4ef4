"""Prompts of random token ids: the ``random`` dataset of ``vllm bench serve``. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weir.bench.plan import Prompt
from weir.errors import InvalidArgument

FIRST_PLAIN_ID = 200
"""Below it lie special tokens in most models."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids that may be drawn: ``first`` to ``end`` (excluded)."""

    first: int = FIRST_PLAIN_ID
    end: int = 32_000

    def draw(self, tokens: int, random: np.random.Generator) -> tuple[int, ...]:
        """``tokens`` ids, uniformly."""
        return tuple(random.integers(self.first, self.end, size=tokens).tolist())


def random_prompts(
    count: int,
    *,
    input_tokens: int,
    output_tokens: int,
    range_ratio: float,
    prefix_tokens: int,
    vocabulary: Vocabulary,
    random: np.random.Generator,
) -> list[Prompt]:
    """``count`` prompts: one shared prefix, then ids of their own.

    Lengths are uniform over the whole numbers in ``[n(1 - range_ratio), n(1 + range_ratio)]``, at least one; the
    prefix comes on top of ``input_tokens``.
    """
    if not 0 <= range_ratio < 1:
        raise InvalidArgument("--random-range-ratio", range_ratio, "must lie in [0, 1)")
    prefix = vocabulary.draw(prefix_tokens, random)
    inputs = _lengths(count, input_tokens, range_ratio, random)
    outputs = _lengths(count, output_tokens, range_ratio, random)
    return [Prompt(n_out, prefix + vocabulary.draw(n_in, random)) for n_in, n_out in zip(inputs, outputs, strict=True)]


def _lengths(count: int, tokens: int, ratio: float, random: np.random.Generator) -> list[int]:
    low, high = int(np.floor(tokens * (1 - ratio))), int(np.ceil(tokens * (1 + ratio)))
    lengths: list[int] = random.integers(max(1, low), max(1, high) + 1, size=count).tolist()
    return lengths
