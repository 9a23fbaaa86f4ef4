"""The event bus over NATS: core subjects, and JetStream for what must be kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import nats.js.errors

from weir.errors import Unavailable
from weir.events.bus import BusStats, Event, Handler, StateCallback, Subscription, check_payload
from weir.events.nats_link import NATS_ERRORS, Backoff, NatsLink
from weir.events.outbox import Outbox, Outgoing
from weir.events.streams import ensure_stream, request_stream
from weir.events.subjects import check_pattern, check_subject

_log = logging.getLogger(__name__)

MESSAGE_ID_HEADER = "Nats-Msg-Id"
MAX_UNACKED = 256
LINGER_S = 0.005
"""How long an event that is only to be kept waits for others to be sent with it."""
MAX_BACKLOG_BYTES = 16 << 20
CLOSE_TIMEOUT_S = 1.0


class NatsBus:
    """An EventBus on a link; several may share one. ``open`` creates the stream of durable events."""

    def __init__(self, link: NatsLink) -> None:
        self._link = link
        self._outbox = Outbox(link.config.max_pending_events)
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._published = self._received = self._handler_errors = 0
        self._backoff = Backoff(0.05, 2.0)
        self._sender: asyncio.Task[None] | None = None
        link.on_state_change(self._on_link)

    @classmethod
    async def open(cls, link: NatsLink) -> NatsBus:
        """Make sure the stream exists, and begin to send. Raises Unavailable when JetStream does not answer."""
        bus = cls(link)
        try:
            await ensure_stream(link.jetstream, request_stream(link.config))
        except NATS_ERRORS as error:
            raise Unavailable(f"NATS at {link.config.url}: cannot create the event stream: {error}") from None
        bus._sender = asyncio.get_running_loop().create_task(bus._send_loop())
        return bus

    @property
    def connected(self) -> bool:
        """Whether the link is up."""
        return self._link.connected

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        durable: bool = False,
    ) -> None:
        """See EventBus: appends to the outgoing buffer and returns."""
        check_subject(subject)
        check_payload(payload)
        all_headers = dict(headers or {})
        if msg_id is not None:
            all_headers[MESSAGE_ID_HEADER] = msg_id
        self._outbox.add(Outgoing(subject, payload, all_headers, durable))
        self._idle.clear()
        self._wake.set()
        if not durable:
            self._urgent.set()

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """See EventBus. Raises Unavailable when the server does not confirm."""
        check_pattern(subject)
        if not self._link.connected:
            raise Unavailable(f"NATS at {self._link.config.url}: not connected")

        async def deliver(message: Any) -> None:
            self._received += 1
            try:
                handler(Event(message.subject, message.data, dict(message.headers or {})))
            except Exception:
                self._handler_errors += 1
                _log.exception("handler of %s failed", subject)

        inner = await self._link.client.subscribe(
            subject,
            cb=deliver,
            pending_msgs_limit=self._link.config.max_pending_events,
            pending_bytes_limit=MAX_BACKLOG_BYTES,
        )
        subscription = _NatsSubscription(inner)
        try:
            await self._link.flush()
        except Unavailable:
            await subscription.unsubscribe()
            raise
        return subscription

    def on_state_change(self, callback: StateCallback) -> None:
        """See EventBus."""
        self._link.on_state_change(callback)

    def stats(self) -> BusStats:
        """See EventBus."""
        return BusStats(
            published=self._published,
            dropped=self._outbox.dropped,
            received=self._received,
            handler_errors=self._handler_errors,
            reconnects=self._link.reconnects,
            pending=len(self._outbox),
        )

    async def wait_sent(self) -> None:
        """Return when all that was published is with the server; ``pending`` does not count what is on its way."""
        await self._idle.wait()

    async def close(self) -> None:
        """Send what is buffered for at most CLOSE_TIMEOUT_S; the link stays with its owner."""
        if self._sender is None:
            return
        self._urgent.set()
        if self._link.connected:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), CLOSE_TIMEOUT_S)
        sender, self._sender = self._sender, None
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        if self._link.connected:
            with contextlib.suppress(Unavailable):
                await self._link.flush()

    def _on_link(self, connected: bool) -> None:
        if connected:
            self._backoff.reset()
            self._wake.set()

    async def _send_loop(self) -> None:
        while True:
            await self._wake.wait()
            await self._linger()
            self._wake.clear()
            while len(self._outbox) and self._link.connected:
                batch = self._outbox.take(MAX_UNACKED)
                try:
                    unsent = await self._send(batch)
                except Exception:
                    # One message must not end the sending of all others.
                    _log.exception("publish to %s failed", batch[0].subject)
                    self._outbox.dropped += len(batch)
                    continue
                self._published += len(batch) - len(unsent)
                if unsent:
                    self._outbox.give_back(unsent)
                    await asyncio.sleep(self._backoff.next_s())
                else:
                    self._backoff.reset()
            if not len(self._outbox):
                self._idle.set()

    async def _linger(self) -> None:
        if not self._urgent.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._urgent.wait()
        self._urgent.clear()

    async def _send(self, batch: list[Outgoing]) -> list[Outgoing]:
        """Send a batch of one kind; returns what the server did not take."""
        if not batch[0].durable:
            return await self._send_core(batch)
        if all(MESSAGE_ID_HEADER in message.headers for message in batch):
            return await self._send_in_order(batch)
        jetstream = self._link.jetstream
        results = await asyncio.gather(
            *(jetstream.publish(m.subject, m.payload, headers=dict(m.headers) or None) for m in batch),
            return_exceptions=True,
        )
        unsent = [m for m, result in zip(batch, results, strict=True) if isinstance(result, BaseException)]
        if unsent:
            await self._after_refusal(unsent, next(r for r in results if isinstance(r, BaseException)))
        return unsent

    async def _send_in_order(self, batch: list[Outgoing]) -> list[Outgoing]:
        """Ask for one acknowledgement, of the last: the server takes one connection's messages in order.

        Whatever goes wrong, all of them are sent again; those that arrived are known by their ids.
        """
        client, last = self._link.client, batch[-1]
        connections = client.stats["reconnects"]
        try:
            for message in batch[:-1]:
                await client.publish(message.subject, message.payload, headers=dict(message.headers))
            await self._link.jetstream.publish(last.subject, last.payload, headers=dict(last.headers))
        except NATS_ERRORS as error:
            await self._after_refusal(batch, error)
            return batch
        # Another connection may have acknowledged the last without having seen the first.
        return batch if client.stats["reconnects"] != connections else []

    async def _send_core(self, batch: list[Outgoing]) -> list[Outgoing]:
        for index, message in enumerate(batch):
            try:
                await self._link.client.publish(message.subject, message.payload, headers=dict(message.headers) or None)
            except NATS_ERRORS as error:
                message.tries += self._link.connected
                _log.debug("publish to %s failed: %s", message.subject, error)
                return batch[index:]
        return []

    async def _after_refusal(self, unsent: list[Outgoing], error: BaseException) -> None:
        if not isinstance(error, NATS_ERRORS):
            _log.error("publish to %s failed", unsent[0].subject, exc_info=error)
        if not self._link.connected:
            return  # they keep their tries: the server was away
        for message in unsent:
            message.tries += 1
        if isinstance(error, nats.js.errors.NoStreamResponseError):
            with contextlib.suppress(*NATS_ERRORS):
                await ensure_stream(self._link.jetstream, request_stream(self._link.config))


class _NatsSubscription:
    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._live = True

    async def unsubscribe(self) -> None:
        """Stop; see Subscription."""
        if self._live:
            self._live = False
            with contextlib.suppress(*NATS_ERRORS):
                await self._inner.unsubscribe()
