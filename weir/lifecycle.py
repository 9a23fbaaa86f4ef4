"""A request's life: one enum, one drawing. Logs, spans, metrics and events use these names.

    RECEIVED ─► ADMITTED ─► PREFILLING ─► PREFILLED ─► TRANSFERRING ─► DECODING ─► FINISHED
       │            │            │  ▲          │             │             │
       │            │            │  └──────────┴─────────────┴─────────────┘   next attempt
       └────────────┴────────────┴──► REJECTED | CANCELLED | FAILED (from any state that is not terminal)

A mixed worker goes PREFILLING ─► DECODING (there is nothing to transfer), and a request whose first token
ends it goes PREFILLING | PREFILLED ─► FINISHED. ``attempt`` counts how often the request entered PREFILLING.
"""

from __future__ import annotations

import enum

from weir.errors import InternalError


class RequestState(enum.Enum):
    """Where a request is. Values are the words used in logs, metrics and events."""

    RECEIVED = "received"
    ADMITTED = "admitted"
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    FAILED = "failed"


TERMINAL = frozenset({RequestState.FINISHED, RequestState.CANCELLED, RequestState.REJECTED, RequestState.FAILED})

_FORWARD: dict[RequestState, frozenset[RequestState]] = {
    RequestState.RECEIVED: frozenset({RequestState.ADMITTED}),
    RequestState.ADMITTED: frozenset({RequestState.PREFILLING}),
    RequestState.PREFILLING: frozenset(
        {RequestState.PREFILLING, RequestState.PREFILLED, RequestState.DECODING, RequestState.FINISHED}
    ),
    RequestState.PREFILLED: frozenset({RequestState.TRANSFERRING, RequestState.PREFILLING, RequestState.FINISHED}),
    RequestState.TRANSFERRING: frozenset(
        {RequestState.TRANSFERRING, RequestState.DECODING, RequestState.PREFILLING, RequestState.FINISHED}
    ),
    RequestState.DECODING: frozenset({RequestState.FINISHED, RequestState.PREFILLING}),
}


def can_follow(now: RequestState, then: RequestState) -> bool:
    """Whether ``then`` may follow ``now``."""
    if now in TERMINAL:
        return False
    return then in _FORWARD[now] or then in (TERMINAL - {RequestState.FINISHED})


def check_transition(now: RequestState, then: RequestState) -> None:
    """Raise InternalError when the step is not in the drawing."""
    if not can_follow(now, then):
        raise InternalError(f"request state cannot go from {now.value} to {then.value}")


class FinishReason(enum.Enum):
    """Why generation ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Role(enum.Enum):
    """What a worker does; every role runs the same engine."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        """Whether prompts may be sent here for prefill under a lease."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether sequences may be decoded here."""
        return self is not Role.PREFILL
