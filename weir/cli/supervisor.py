"""Starts and stops this machine's workers when the controller asks: the local end of scaling.

    controller ──ScaleEvent (weir.v1.scale)──► Supervisor ──► Cluster.start_worker | stop_worker ──► registry
                                                                          the controller sees the result there ◄──┘

One request at a time; what is repeated, late or over the budget is refused with a word of why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from google.protobuf.message import DecodeError

from weir.clock import Clock
from weir.errors import InvalidArgument, WeirError
from weir.events.bus import Event, EventBus, Subscription
from weir.events.subjects import SCALE
from weir.lifecycle import Role
from weir.rpc.convert import role_from_pb
from weir.rpc.v1 import events_pb2

_log = logging.getLogger(__name__)

MAX_WAITING = 4
MAX_NUMBERS_KEPT = 1_000


class Workers(Protocol):
    """What a supervisor can do; ``Cluster`` is one."""

    def worker_count(self) -> int:
        """Worker processes now, starting ones too."""
        ...

    async def add_worker(self, role: Role) -> str:
        """Start one and wait until it is ready; its id. Raises Unavailable."""
        ...

    async def stop_worker(self, worker_id: str) -> None:
        """Let it drain and end. Raises NotFound."""
        ...


class Supervisor:
    """``open`` once, ``close`` once. ``say`` gets a line for people."""

    def __init__(
        self,
        workers: Workers,
        bus: EventBus,
        clock: Clock,
        *,
        max_workers: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.refused = 0
        self._workers = workers
        self._bus = bus
        self._clock = clock
        self._max_workers = max_workers
        self._closing = False
        self._say = say
        self._queue: asyncio.Queue[events_pb2.ScaleEvent] = asyncio.Queue(MAX_WAITING)
        self._seen: dict[tuple[str, int, int], None] = {}
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen. Raises Unavailable when the subscription is not confirmed."""
        self._subscription = await self._bus.subscribe(SCALE, self._on_event)
        self._task = asyncio.create_task(self._run(), name="supervisor")

    async def close(self) -> None:
        """Begin nothing more; what is under way is ended. Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()
        task, self._task = self._task, None
        self._closing = True
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _on_event(self, event: Event) -> None:
        try:
            request = events_pb2.ScaleEvent.FromString(event.payload)
        except DecodeError as error:
            self._refuse(f"not readable: {error}")
            return
        key = (request.origin.publisher_id, request.origin.incarnation, request.number)
        if key in self._seen:
            return
        self._seen[key] = None
        if len(self._seen) > MAX_NUMBERS_KEPT:
            del self._seen[next(iter(self._seen))]
        try:
            self._queue.put_nowait(request)
        except asyncio.QueueFull:
            self._refuse(f"{MAX_WAITING} requests wait")

    async def _run(self) -> None:
        # A worker that is being stopped when this is cancelled is ended first, and takes the cancellation for itself.
        while not self._closing:
            request = await self._queue.get()
            try:
                await self._do(request)
            except WeirError as error:
                self._refuse(str(error))
            except Exception:
                _log.exception("scaling failed")

    async def _do(self, request: events_pb2.ScaleEvent) -> None:
        if self._clock.unix_s() > request.deadline_unix_s:
            self._refuse(f"decision {request.number} came too late")
        elif request.stop_worker_id:
            self._say(f"decision {request.number}: stopping {request.stop_worker_id}")
            await self._workers.stop_worker(request.stop_worker_id)
        else:
            role = role_from_pb(request.start_role, "start_role")
            count = self._workers.worker_count()
            if count >= self._max_workers:
                raise InvalidArgument("workers", count + 1, f"at most {self._max_workers} on this machine")
            self._say(f"decision {request.number}: starting a {role.value} worker")
            await self._workers.add_worker(role)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        _log.warning("scaling refused: %s", why)
        self._say(f"scaling refused: {why}")
