"""NATS as its clients know it: a bus that loses, doubles and reorders, and a bucket of worker records.

The server is a host of the network: it can be down, or cut off from some. Clients notice late, keep what they
know, and catch up when they are back, as ``nats_bus`` and ``nats_registry`` do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from random import Random

from tests.simulation.network import Network
from tests.simulation.virtual_time import Process
from weir.clock import Clock
from weir.errors import Unavailable
from weir.events.bus import BusStats, Event, Handler, StateCallback, Subscription, check_payload
from weir.events.registry import ChangeCallback, ChangeKind, RegistryChange
from weir.events.subjects import check_pattern, check_subject, check_token, matches
from weir.events.view import RegistryView
from weir.rpc.v1.events_pb2 import WorkerRecord

HOST = "nats"
TTL_S = 3.0
MAX_PENDING = 256
MAX_DURABLE = 2_000
ANSWER_S = 2.0


class Broker:
    """The server. ``loss``, ``repeat``: shares of messages; ``disorder_s``: longest extra delay of one."""

    def __init__(self, network: Network, random: Random, *, loss: float, repeat: float, disorder_s: float) -> None:
        self.network = network
        self.random = random
        self.up = True
        self.links: dict[SimLink, None] = {}
        self.records: dict[str, tuple[bytes, int, float]] = {}
        self.durable: OrderedDict[str, None] = OrderedDict()
        self._loss = loss
        self._repeat = repeat
        self._disorder_s = disorder_s
        self._revision = 0

    def set_up(self, up: bool) -> None:
        """Stop or start the server; records survive."""
        self.up = up
        self.changed()

    def changed(self) -> None:
        """Who can reach the server has changed."""
        for link in list(self.links):
            link.look_soon()

    def reaches(self, host: str) -> bool:
        """Whether messages pass between the server and ``host``."""
        return self.up and not self.network.is_cut(HOST, host)

    def receive(self, host: str, event: Event, msg_id: str | None, durable: bool) -> None:
        """A published message arrives."""
        if not self.reaches(host):
            return
        if durable and msg_id is not None:
            if msg_id in self.durable:
                return
            self.durable[msg_id] = None
            if len(self.durable) > MAX_DURABLE:
                self.durable.popitem(last=False)
        for link in list(self.links):
            if link.wants(event.subject):
                self._send(link, event)

    def _send(self, link: SimLink, event: Event) -> None:
        copies = 0 if self.random.random() < self._loss else 1 + (self.random.random() < self._repeat)
        for _ in range(copies):
            late_s = self.random.uniform(0.0, self._disorder_s) if self.random.random() < 0.3 else 0.0
            self.network.later(self.network.delay_s() + late_s, self._arrive, link, event)

    def _arrive(self, link: SimLink, event: Event) -> None:
        if link in self.links and self.reaches(link.process.host):
            link.process.call(link.deliver, event)

    def put(self, record: WorkerRecord) -> None:
        """Write a record and tell who watches."""
        self._revision += 1
        value = record.SerializeToString()
        self.records[record.worker_id] = (value, self._revision, self.network.loop.time())
        for link in list(self.links):
            self.network.later(self.network.delay_s(), self._tell, link, record.worker_id, value, self._revision)

    def delete(self, worker_id: str, incarnation: int) -> None:
        """Remove the record of that incarnation."""
        found = self.fetch(worker_id)
        if found is not None and WorkerRecord.FromString(found[0]).incarnation == incarnation:
            del self.records[worker_id]
            self._revision += 1
            for link in list(self.links):
                self.network.later(self.network.delay_s(), self._tell, link, worker_id, None, self._revision)

    def fetch(self, worker_id: str) -> tuple[bytes, int] | None:
        """A record that has not expired, and its revision."""
        found = self.records.get(worker_id)
        if found is None or self.network.loop.time() - found[2] >= TTL_S:
            return None
        return found[0], found[1]

    def _tell(self, link: SimLink, worker_id: str, value: bytes | None, revision: int) -> None:
        if link in self.links and self.reaches(link.process.host) and link.registry is not None:
            link.process.call(link.registry.apply, worker_id, value, revision)


class SimLink:
    """One client's connection. ``connected`` is what the client believes."""

    def __init__(self, broker: Broker, process: Process) -> None:
        self.broker = broker
        self.process = process
        self.connected = broker.reaches(process.host)
        self.registry: SimRegistry | None = None
        self.bus: SimBus | None = None
        self.callbacks: list[StateCallback] = []
        broker.links[self] = None

    def wants(self, subject: str) -> bool:
        """Whether the server has a subscription of this client for ``subject``."""
        return self.connected and self.bus is not None and any(matches(p, subject) for p, _ in self.bus.entries)

    def deliver(self, event: Event) -> None:
        """Run the handlers."""
        if self.bus is not None and self.connected:
            self.bus.deliver(event)

    def look_soon(self) -> None:
        """A loss is noticed at once when the server closes, by pings when it is cut off; a return after a while."""
        random, up = self.broker.random, self.broker.up
        reached = self.broker.reaches(self.process.host)
        wait_s = random.uniform(0.1, 1.0) if reached else random.uniform(1.0, 3.0) if up else random.uniform(0.0, 0.01)
        self.broker.network.later(wait_s, self.process.call, self._look)

    def _look(self) -> None:
        reached = self.broker.reaches(self.process.host)
        if reached != self.connected:
            self.connected = reached
            for callback in list(self.callbacks):
                callback(reached)

    def close(self) -> None:
        """The client is gone."""
        self.broker.links.pop(self, None)


class _Subscription:
    def __init__(self, bus: SimBus, entry: tuple[str, Handler]) -> None:
        self._bus = bus
        self._entry = entry

    async def unsubscribe(self) -> None:
        if self._entry in self._bus.entries:
            self._bus.entries.remove(self._entry)


class SimBus:
    """An EventBus over a link."""

    def __init__(self, link: SimLink) -> None:
        self._link = link
        self.entries: list[tuple[str, Handler]] = []
        self._pending: deque[tuple[Event, str | None, bool]] = deque()
        self.dropped = self._published = self._received = 0
        link.bus = self
        link.callbacks.append(self._changed)

    @property
    def connected(self) -> bool:
        return self._link.connected

    @property
    def pending(self) -> int:
        """Messages that wait for the server."""
        return len(self._pending)

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        durable: bool = False,
    ) -> None:
        check_subject(subject)
        check_payload(payload)
        self._published += 1
        message = (Event(subject, bytes(payload), dict(headers or {})), msg_id, durable)
        if self._link.connected:
            self._send(message)
        elif len(self._pending) >= MAX_PENDING:
            self.dropped += 1
        else:
            self._pending.append(message)

    def _send(self, message: tuple[Event, str | None, bool]) -> None:
        link = self._link
        network = link.broker.network
        network.later(network.delay_s(), link.broker.receive, link.process.host, *message)

    def _changed(self, connected: bool) -> None:
        while connected and self._pending:
            self._send(self._pending.popleft())

    def deliver(self, event: Event) -> None:
        """Run the matching handlers."""
        for pattern, handler in list(self.entries):
            if matches(pattern, event.subject):
                self._received += 1
                handler(event)

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        check_pattern(subject)
        await asyncio.sleep(self._link.broker.network.delay_s())
        self.entries.append((subject, handler))
        return _Subscription(self, self.entries[-1])

    def on_state_change(self, callback: StateCallback) -> None:
        self._link.callbacks.append(callback)

    def stats(self) -> BusStats:
        return BusStats(self._published, self.dropped, self._received, 0, 0, len(self._pending))

    async def close(self) -> None:
        self.entries.clear()


class SimRegistry:
    """A Registry over a link, on the production view."""

    def __init__(self, link: SimLink, clock: Clock) -> None:
        self._link = link
        self._broker = link.broker
        self._clock = clock
        self._view = RegistryView()
        self._revisions: dict[str, int] = {}
        self._follower: asyncio.Task[None] | None = None
        self._watching = False
        self._stale = True
        link.registry = self
        link.callbacks.append(self._changed)

    @property
    def stale(self) -> bool:
        return self._stale

    async def put(self, record: WorkerRecord) -> None:
        check_token("worker_id", record.worker_id)
        copy = WorkerRecord.FromString(record.SerializeToString())
        await self._ask(lambda: self._broker.put(copy))

    async def delete(self, worker_id: str, incarnation: int) -> None:
        await self._ask(lambda: self._broker.delete(worker_id, incarnation))

    async def _ask(self, action: Callable[[], object]) -> None:
        """A round trip to the server; Unavailable when it does not answer."""
        delay_s = self._broker.network.delay_s()
        if not self._link.connected:
            raise Unavailable("registry: not connected")
        await asyncio.sleep(delay_s)
        if not self._broker.reaches(self._link.process.host):
            await asyncio.sleep(ANSWER_S)
            raise Unavailable("registry: no answer")
        action()
        await asyncio.sleep(delay_s)

    async def watch(self, on_change: ChangeCallback) -> None:
        if self._follower is None:
            await self._ask(self._catch_up)
            self._follower = asyncio.create_task(self._expire_silent())
        self._view.add(on_change)

    def snapshot(self) -> Mapping[str, WorkerRecord]:
        return self._view.snapshot()

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower

    def apply(self, worker_id: str, value: bytes | None, revision: int) -> None:
        """A change on the server."""
        if not self._watching or not self._link.connected or revision <= self._revisions.get(worker_id, 0):
            return
        self._revisions[worker_id] = revision
        if value is None:
            self._view.remove(worker_id)
        else:
            self._view.put(WorkerRecord.FromString(value), self._clock.monotonic_s())

    def _catch_up(self) -> None:
        self._watching = True  # from this moment on the server tells of changes
        now_s = self._clock.monotonic_s()
        self._view.touch_all(now_s)
        for worker_id in sorted(self._broker.records):
            found = self._broker.fetch(worker_id)
            if found is not None:
                self._revisions[worker_id] = found[1]
                self._view.put(WorkerRecord.FromString(found[0]), now_s)
        self._stale = False
        self._view.tell(RegistryChange(ChangeKind.SYNCED))

    def _changed(self, connected: bool) -> None:
        if self._follower is None:
            return
        if connected:
            self._catch_up()
        elif not self._stale:
            self._stale = True
            self._view.tell(RegistryChange(ChangeKind.STALE))

    async def _expire_silent(self) -> None:
        while True:
            await asyncio.sleep(TTL_S / 8)
            if not self._link.connected or not self._broker.reaches(self._link.process.host):
                continue
            for worker_id in self._view.silent(self._clock.monotonic_s(), TTL_S):
                found = self._broker.fetch(worker_id)
                if found is not None and found[1] != self._revisions.get(worker_id):
                    self.apply(worker_id, *found)
                elif found is None:
                    self._view.remove(worker_id)
