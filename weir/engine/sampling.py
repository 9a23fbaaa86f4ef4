"""What a caller may ask of sampling, and the check of it, before any work is done.

Semantics follow OpenAI's API and vLLM's extensions of it. The random stream of a request depends only on
(seed, position): a request that moves to another worker continues with the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from weir.errors import InvalidArgument

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_TOP_LOGPROBS = 20
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. ``temperature`` 0 is greedy. ``top_k`` 0 and ``min_p`` 0 are off.

    ``seed`` None means: the router mints one, so that a moved request stays the same request.
    ``logprobs`` None is off, 0 the chosen token's only, n that of the n most likely too.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _between(name: str, value: float, low: float, high: float) -> None:
    if math.isnan(value) or not low <= value <= high:
        raise InvalidArgument(name, value, f"must lie in [{low:g}, {high:g}]")


def check_sampling(params: SamplingParams, *, vocab_size: int) -> None:
    """Raise InvalidArgument naming the first field that is out of its limits."""
    if params.max_tokens < 1:
        raise InvalidArgument("max_tokens", params.max_tokens, "must be at least 1")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise InvalidArgument("min_tokens", params.min_tokens, f"must lie in [0, max_tokens={params.max_tokens}]")
    _between("temperature", params.temperature, 0.0, 100.0)
    if math.isnan(params.top_p) or not 0.0 < params.top_p <= 1.0:
        raise InvalidArgument("top_p", params.top_p, "must lie in (0, 1]")
    if params.top_k < -1:
        raise InvalidArgument("top_k", params.top_k, "must be -1 or 0 (off) or at least 1")
    _between("min_p", params.min_p, 0.0, 1.0)
    _between("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _between("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    if math.isnan(params.repetition_penalty) or not 0.0 < params.repetition_penalty <= 10.0:
        raise InvalidArgument("repetition_penalty", params.repetition_penalty, "must lie in (0, 10]")
    if params.seed is not None and not 0 <= params.seed <= MAX_SEED:
        raise InvalidArgument("seed", params.seed, f"must lie in [0, {MAX_SEED}]")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidArgument("logprobs", params.logprobs, f"must lie in [0, {MAX_TOP_LOGPROBS}]")
    _check_stops(params, vocab_size)
    _check_logit_bias(params, vocab_size)


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidArgument("stop", len(params.stop), f"at most {MAX_STOP_STRINGS} stop strings")
    for text in params.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidArgument("stop", text, f"a stop string has 1 to {MAX_STOP_CHARS} characters")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument("stop_token_ids", len(params.stop_token_ids), f"at most {MAX_STOP_TOKEN_IDS} ids")
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidArgument("stop_token_ids", token, f"token ids lie in [0, {vocab_size})")


def _check_logit_bias(params: SamplingParams, vocab_size: int) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidArgument("logit_bias", len(params.logit_bias), f"at most {MAX_LOGIT_BIAS} entries")
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise InvalidArgument("logit_bias", token, f"token ids lie in [0, {vocab_size})")
        _between(f"logit_bias[{token}]", bias, -100.0, 100.0)


LENGTH = "prompt + max_tokens"
"""The field that is named when a request is too long: for a model, or for the memory of one worker."""


def check_prompt(token_ids: list[int] | tuple[int, ...], *, max_tokens: int, vocab_size: int, context: int) -> None:
    """Raise InvalidArgument when the prompt is empty, holds foreign ids, or cannot fit the context."""
    if not token_ids:
        raise InvalidArgument("prompt", [], "must hold at least 1 token")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise InvalidArgument("prompt", low if low < 0 else high, f"token ids lie in [0, {vocab_size})")
    total = len(token_ids) + max_tokens
    if total > context:
        raise InvalidArgument(
            LENGTH,
            total,
            f"{len(token_ids)} prompt tokens + {max_tokens} max_tokens exceed the context of {context}",
        )
