"""Twins of bus and registry in one process: same contracts, no server; for tests and simulation."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from weir.clock import Clock
from weir.errors import Unavailable
from weir.events.bus import BusStats, Event, Handler, StateCallback, Subscription, check_payload
from weir.events.registry import ChangeCallback, ChangeKind, RegistryChange
from weir.events.subjects import check_pattern, check_subject, check_token, matches
from weir.events.view import RegistryView
from weir.rpc.v1.events_pb2 import WorkerRecord

_log = logging.getLogger(__name__)


class MemoryServer:
    """What the members of one "cluster" share: subscriptions, message ids and records."""

    def __init__(self) -> None:
        self.up = True
        self.buses: list[MemoryBus] = []
        self.registries: list[MemoryRegistry] = []
        self.records: dict[str, WorkerRecord] = {}
        self.renewed_s: dict[str, float] = {}
        self.durable_ids: set[str] = set()
        self.durable: list[Event] = []

    def set_up(self, up: bool) -> None:
        """Break or mend every connection."""
        self.up = up
        for bus in self.buses:
            bus.changed(up)
        for registry in self.registries:
            registry.changed(up)


class _MemorySubscription:
    def __init__(self, bus: MemoryBus, entry: tuple[str, Handler]) -> None:
        self._bus = bus
        self._entry = entry

    async def unsubscribe(self) -> None:
        """Stop delivering."""
        if self._entry in self._bus.entries:
            self._bus.entries.remove(self._entry)


class MemoryBus:
    """An EventBus. Messages are delivered before ``publish`` returns; while down they are dropped."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self.entries: list[tuple[str, Handler]] = []
        self._callbacks: list[StateCallback] = []
        self._published = self._dropped = self._received = self._errors = self._reconnects = 0
        server.buses.append(self)

    @property
    def connected(self) -> bool:
        """Whether the server is up."""
        return self._server.up

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        durable: bool = False,
    ) -> None:
        """Deliver to every bus of the server."""
        check_subject(subject)
        check_payload(payload)
        if not self._server.up:
            self._dropped += 1
            return
        self._published += 1
        event = Event(subject, bytes(payload), dict(headers or {}))
        if durable:
            if msg_id is not None and msg_id in self._server.durable_ids:
                return
            self._server.durable_ids.update(() if msg_id is None else (msg_id,))
            self._server.durable.append(event)
        for bus in list(self._server.buses):
            bus.deliver(event)

    def deliver(self, event: Event) -> None:
        """Run the matching handlers."""
        for pattern, handler in list(self.entries):
            if not matches(pattern, event.subject):
                continue
            self._received += 1
            try:
                handler(event)
            except Exception:
                self._errors += 1
                _log.exception("handler of %s failed", pattern)

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Active at once."""
        check_pattern(subject)
        entry = (subject, handler)
        self.entries.append(entry)
        return _MemorySubscription(self, entry)

    def on_state_change(self, callback: StateCallback) -> None:
        """Called by ``MemoryServer.set_up``."""
        self._callbacks.append(callback)

    def changed(self, up: bool) -> None:
        """Tell the callbacks."""
        self._reconnects += up
        for callback in list(self._callbacks):
            callback(up)

    def stats(self) -> BusStats:
        """Counts now."""
        return BusStats(self._published, self._dropped, self._received, self._errors, self._reconnects, 0)

    async def close(self) -> None:
        """Leave the server."""
        self.entries.clear()
        if self in self._server.buses:
            self._server.buses.remove(self)


class MemoryRegistry:
    """A Registry. Records expire when ``expire`` is called, by the given clock."""

    def __init__(self, server: MemoryServer, clock: Clock, *, ttl_s: float = 3.0) -> None:
        self._server = server
        self._clock = clock
        self._ttl_s = ttl_s
        self._view = RegistryView()
        self._watching = False
        server.registries.append(self)

    @property
    def stale(self) -> bool:
        """Whether the server is down, or nothing is watched yet."""
        return not (self._watching and self._server.up)

    async def put(self, record: WorkerRecord) -> None:
        """Write and tell every watcher."""
        self._need_server()
        check_token("worker_id", record.worker_id)
        stored = WorkerRecord()
        stored.CopyFrom(record)
        self._server.records[record.worker_id] = stored
        self._server.renewed_s[record.worker_id] = self._clock.monotonic_s()
        for registry in list(self._server.registries):
            registry.sync()

    async def delete(self, worker_id: str, incarnation: int) -> None:
        """Remove and tell every watcher."""
        self._need_server()
        record = self._server.records.get(worker_id)
        if record is not None and record.incarnation == incarnation:
            del self._server.records[worker_id]
        for registry in list(self._server.registries):
            registry.sync()

    async def watch(self, on_change: ChangeCallback) -> None:
        """Follow the shared records."""
        self._need_server()
        self._watching = True
        self.sync()
        self._view.add(on_change)

    def snapshot(self) -> Mapping[str, WorkerRecord]:
        """The view now."""
        return self._view.snapshot()

    def sync(self) -> None:
        """Bring the view up to the shared records."""
        if self._watching and self._server.up:
            self._view.replace(self._server.records, self._clock.monotonic_s())

    def expire(self) -> None:
        """Drop records older than the time to live, as the server would."""
        now_s = self._clock.monotonic_s()
        for worker_id in list(self._server.records):
            if now_s - self._server.renewed_s[worker_id] >= self._ttl_s:
                del self._server.records[worker_id]
        for registry in list(self._server.registries):
            registry.sync()

    def changed(self, up: bool) -> None:
        """Mark stale, or catch up."""
        self.sync()
        self._view.tell(RegistryChange(ChangeKind.SYNCED if up else ChangeKind.STALE))

    async def close(self) -> None:
        """Leave the server."""
        self._watching = False
        if self in self._server.registries:
            self._server.registries.remove(self)

    def _need_server(self) -> None:
        if not self._server.up:
            raise Unavailable("registry: not connected")
