"""What a request's consumer receives: Accepted first, Delta as tokens come, Final last; errors are raised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weir.lifecycle import FinishReason
from weir.services.router.timings import Timings


@dataclass(slots=True)
class Accepted:
    """The request is admitted. ``request_id`` is minted here; ``created_unix_s`` is when it was received."""

    request_id: str
    prompt_tokens: int
    model: str
    created_unix_s: float


@dataclass(slots=True)
class Delta:
    """New tokens; all that came since the last Delta. Not modified after it is handed out.

    ``text`` is to be appended; it is empty while a character or a possible stop string is incomplete.
    ``first_index`` is the index of ``token_ids[0]`` among the generated tokens. ``logprobs``: one
    ``PositionLogprobs`` message per id when asked for (``chosen`` and ``top`` with ``token_id``, ``logprob``).
    """

    text: str
    token_ids: list[int]
    first_index: int
    logprobs: Sequence[Any]


@dataclass(slots=True)
class Usage:
    """Token counts; local_compute + local_cache_hit + external_kv = prompt_tokens (see common.proto)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    local_compute_tokens: int
    local_cache_hit_tokens: int
    external_kv_tokens: int


@dataclass(slots=True)
class Final:
    """The end. ``finish_reason`` is STOP or LENGTH; ``stop_string`` is the one that matched, or empty."""

    finish_reason: FinishReason
    stop_string: str
    usage: Usage
    timings: Timings


Event = Accepted | Delta | Final


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is served. ``context_tokens`` bounds prompt plus output."""

    name: str
    context_tokens: int
    architecture: str
    created_unix_s: int


@dataclass(frozen=True, slots=True)
class ActiveRequest:
    """A request under way, for operators and tests."""

    request_id: str
    state: str
    attempt: int
    prefill_worker: str
    decode_worker: str
    tokens_sent: int
    age_ms: float


@dataclass(frozen=True, slots=True)
class RouterState:
    """The router at one moment. ``ended`` counts requests since start by the name of their last state."""

    active_requests: int
    queued_requests: int
    open_sessions: int
    tasks: int
    ended: dict[str, int]
    requests: tuple[ActiveRequest, ...]
