"""One connection to NATS, shared by bus and registry: it comes back for ever, and says when it is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from dataclasses import dataclass
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from weir.config.sections import NatsConfig
from weir.errors import Unavailable
from weir.events.bus import StateCallback

_log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 2.0
MAX_BACKOFF_DOUBLINGS = 16
MAX_ATTEMPT_S = 2.0

# What talking to the server can raise when it is away, busy or restarting.
NATS_ERRORS = (nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError)


class Backoff:
    """Waits that double from ``min_s`` up to ``max_s``, until reset."""

    def __init__(self, min_s: float, max_s: float) -> None:
        assert 0 < min_s <= max_s, (min_s, max_s)
        self._min_s = min_s
        self._max_s = max_s
        self._tries = 0

    def next_s(self) -> float:
        """The next wait, seconds."""
        wait_s = min(self._max_s, self._min_s * 2.0 ** min(self._tries, MAX_BACKOFF_DOUBLINGS))
        self._tries += 1
        return wait_s

    def reset(self) -> None:
        """Begin again with the shortest wait."""
        self._tries = 0


@dataclass(frozen=True, slots=True, repr=False)
class NatsTrust:
    """How to speak to NATS over TLS. ``credentials_file`` empty shows the certificate alone."""

    context: ssl.SSLContext
    server_name: str
    credentials_file: str = ""


class NatsLink:
    """A connected client. ``connected`` turns true again only when the server has confirmed subscriptions."""

    def __init__(self, config: NatsConfig, name: str, trust: NatsTrust | None = None) -> None:
        self.config = config
        self._trust = trust
        self.client = Client()
        self.reconnects = 0
        self._name = name
        self._up = False
        self._closed = False
        self._callbacks: list[StateCallback] = []
        self._backoff = Backoff(
            config.reconnect_min_ms / 1_000, max(config.reconnect_max_ms, config.reconnect_min_ms) / 1_000
        )
        self._confirming: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, config: NatsConfig, *, name: str, trust: NatsTrust | None = None) -> NatsLink:
        """Connect; ``name`` is shown in the server's monitoring. Raises Unavailable naming the address."""
        link = cls(config, name, trust)
        try:
            async with asyncio.timeout(config.connect_timeout_s):
                await link._open()
        except (TimeoutError, *NATS_ERRORS) as error:
            reason = link.client.last_error or error
            await link.close()
            raise Unavailable(
                f"NATS at {config.url} not reached in {config.connect_timeout_s:g} s: {reason or 'timeout'}"
            ) from None
        link._up = True
        return link

    @property
    def connected(self) -> bool:
        """Whether messages go both ways now."""
        return self._up and self.client.is_connected

    @property
    def jetstream(self) -> Any:
        """The JetStream context; every request has REQUEST_TIMEOUT_S."""
        return self.client.jetstream(timeout=REQUEST_TIMEOUT_S)

    def on_state_change(self, callback: StateCallback) -> None:
        """Call ``callback(connected)`` on every loss and return."""
        self._callbacks.append(callback)

    async def flush(self) -> None:
        """Return when the server has handled what was sent; Unavailable when it does not answer."""
        try:
            await self.client.flush(timeout=REQUEST_TIMEOUT_S)
        except NATS_ERRORS as error:
            raise Unavailable(f"NATS at {self.config.url} does not answer: {error}") from None

    async def close(self) -> None:
        """Send what is buffered, disconnect. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._up = False
        if self._confirming is not None:
            self._confirming.cancel()
        if not self.client.is_closed:
            with contextlib.suppress(*NATS_ERRORS):
                await self.client.close()

    async def _open(self) -> None:
        await self.client.connect(
            servers=[part.strip() for part in self.config.url.split(",")],
            name=self._name,
            connect_timeout=min(self.config.connect_timeout_s, MAX_ATTEMPT_S),  # type: ignore[arg-type, unused-ignore]
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=self.config.reconnect_min_ms / 1_000,  # type: ignore[arg-type, unused-ignore]
            reconnect_to_server_handler=self._next_server,
            ping_interval=self.config.ping_interval_s,  # type: ignore[arg-type, unused-ignore]
            max_outstanding_pings=2,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            **self._secured(),
        )

    def _secured(self) -> dict[str, Any]:
        if self._trust is None:
            return {}
        credentials = {"user_credentials": self._trust.credentials_file} if self._trust.credentials_file else {}
        return {"tls": self._trust.context, "tls_hostname": self._trust.server_name, **credentials}

    def _next_server(self, servers: list[Any], info: dict[str, Any]) -> tuple[Any, float]:
        return min(servers, key=lambda server: server.reconnects), self._backoff.next_s()

    async def _on_error(self, error: Exception) -> None:
        _log.debug("NATS: %s", error or type(error).__name__)

    async def _on_disconnected(self) -> None:
        if self._up:
            self._up = False
            if not self._closed:
                _log.warning("NATS at %s lost; reconnecting", self.config.url)
                self._tell(False)

    async def _on_reconnected(self) -> None:
        self._backoff.reset()
        if self._confirming is not None:
            self._confirming.cancel()
        self._confirming = asyncio.get_running_loop().create_task(self._confirm())

    async def _confirm(self) -> None:
        try:
            await self.flush()
        except Unavailable:
            return  # lost again; the next return of the connection comes here anew
        self.reconnects += 1
        self._up = True
        _log.info("NATS at %s is back", self.config.url)
        self._tell(True)

    def _tell(self, connected: bool) -> None:
        for callback in list(self._callbacks):
            callback(connected)
