"""The seam to the event bus: publish and subscribe, nothing else. Twins: ``memory`` and ``nats_bus``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from weir.errors import InvalidArgument

MAX_EVENT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Event:
    """A message as it arrived."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BusStats:
    """Counts since start. ``dropped``: never sent, for want of room or of an acknowledgement."""

    published: int = 0
    dropped: int = 0
    received: int = 0
    handler_errors: int = 0
    reconnects: int = 0
    pending: int = 0


Handler = Callable[[Event], None]
StateCallback = Callable[[bool], None]


class Subscription(Protocol):
    """A live subscription."""

    async def unsubscribe(self) -> None:
        """Stop; no handler runs after this returns. Idempotent."""
        ...


class EventBus(Protocol):
    """Delivers at most once unless ``durable``; handlers must be idempotent and must not block."""

    @property
    def connected(self) -> bool:
        """Whether the server is reachable now."""
        ...

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        durable: bool = False,
    ) -> None:
        """Put one message into the bounded outgoing buffer and return at once, connected or not.

        When the buffer is full the message is dropped and counted in ``stats()``. ``durable`` messages are
        kept by the server's stream (``msg_id`` drops repetitions there). Raises InvalidArgument for a subject
        that is no subject and for more than MAX_EVENT_BYTES.
        """
        ...

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Call ``handler`` for each message whose subject matches; active on the server on return.

        Wildcards: ``*`` one token, ``>`` the rest. What a handler raises is logged and counted, never fatal.
        """
        ...

    def on_state_change(self, callback: StateCallback) -> None:
        """Call ``callback(connected)`` on every loss and return of the connection."""
        ...

    def stats(self) -> BusStats:
        """Counts now."""
        ...

    async def close(self) -> None:
        """Send what is buffered (bounded time), then disconnect. Idempotent."""
        ...


def check_payload(payload: bytes) -> None:
    """Raise InvalidArgument when ``payload`` is larger than an event may be."""
    if len(payload) > MAX_EVENT_BYTES:
        raise InvalidArgument("event payload bytes", len(payload), f"at most {MAX_EVENT_BYTES}")
