"""Publishes what happens to requests. A request never waits for it: the queue is bounded, its overflow counted."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from weir.clock import Clock
from weir.errors import WeirError
from weir.events.bus import EventBus
from weir.events.sequence import SequenceCounter
from weir.events.subjects import cancel_subject, message_id, request_subject
from weir.rpc.convert import state_to_pb
from weir.rpc.v1 import events_pb2
from weir.services.router.commands import PublishCancel, PublishState

_log = logging.getLogger(__name__)

MAX_WAITING = 8_192


class LifecyclePublisher:
    """``put`` from anywhere on the loop; one task sends, in order."""

    def __init__(self, bus: EventBus, clock: Clock, router_id: str, incarnation: int) -> None:
        self.dropped = 0
        self._bus = bus
        self._clock = clock
        self._router_id = router_id
        self._incarnation = incarnation
        self._requests = SequenceCounter()
        self._cancels = SequenceCounter()
        self._waiting: deque[PublishState | PublishCancel] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to send."""
        self._task = asyncio.create_task(self._run(), name="lifecycle events")

    def put(self, command: PublishState | PublishCancel) -> None:
        """Send ``command`` soon; dropped and counted when too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append(command)
        self._wake.set()

    async def close(self) -> None:
        """Send what waits, then stop. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._send_waiting()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._send_waiting()

    async def _send_waiting(self) -> None:
        while self._waiting:
            command = self._waiting.popleft()
            try:
                if isinstance(command, PublishCancel):
                    await self._send_cancel(command)
                else:
                    await self._send_state(command)
            except WeirError as error:
                self.dropped += 1
                _log.warning("event of %s not published: %s", command.request_id, error)

    async def _send_state(self, command: PublishState) -> None:
        event = events_pb2.LifecycleEvent(
            origin=self._origin(self._requests),
            request_id=command.request_id,
            attempt=command.attempt,
            state=state_to_pb(command.state),
            worker_id=command.worker_id,
            prompt_tokens=command.prompt_tokens,
            completion_tokens=command.completion_tokens,
            cached_tokens=command.cached_tokens,
            age_ms=command.age_ms,
            error=command.error,
            ttft_ms=command.ttft_ms,
            tpot_ms=command.tpot_ms,
            model=command.model,
            tenant=command.tenant,
        )
        await self._bus.publish(
            request_subject(command.state),
            event.SerializeToString(),
            msg_id=message_id(command.request_id, command.attempt, command.state.value),
            headers=_headers(command),
            durable=True,
        )

    async def _send_cancel(self, command: PublishCancel) -> None:
        event = events_pb2.CancelEvent(
            origin=self._origin(self._cancels),
            request_id=command.request_id,
            attempt=command.attempt,
            reason=command.reason,
        )
        await self._bus.publish(
            cancel_subject(command.request_id),
            event.SerializeToString(),
            msg_id=message_id(command.request_id, command.attempt, "cancel"),
            headers=_headers(command),
        )

    def _origin(self, counter: SequenceCounter) -> events_pb2.EventOrigin:
        return events_pb2.EventOrigin(
            publisher_id=self._router_id,
            incarnation=self._incarnation,
            sequence=counter.next(),
            unix_s=self._clock.unix_s(),
        )


def _headers(command: PublishState | PublishCancel) -> dict[str, str] | None:
    return {"traceparent": command.traceparent} if command.traceparent else None
