"""What the request book is told that has several parts, and its bounds. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weir.lifecycle import FinishReason


@dataclass(frozen=True, slots=True)
class BookLimits:
    """Bounds. ``orphan_read_s``: how long a read may have taken by the time its P is gone.

    ``tenant_*`` are of each tenant, 0 is no bound of its own.
    """

    max_active: int = 1024
    max_queued: int = 1024
    queue_timeout_s: float = 60.0
    max_attempts: int = 3
    backoff_first_s: float = 0.02
    lease_s: float = 30.0
    orphan_read_s: float = 2.0
    tenant_max_active: int = 0
    tenant_max_queued: int = 0


@dataclass(slots=True)
class FirstTokenNews:
    """P's first token of an attempt. ``message`` is what D is to get of it, passed on as it came."""

    index: int
    token: int
    logprobs: Sequence[Any]
    finish: FinishReason | None
    cached_tokens: int
    prefill_ms: float
    message: Any


@dataclass(slots=True)
class EndedNews:
    """Nothing of an attempt is left on a worker; ``code`` is OK when it ended as it should."""

    code: str
    message: str = ""
    retry_after_ms: float = 0.0
