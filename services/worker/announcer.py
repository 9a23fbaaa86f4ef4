"""What a worker says on the event bus, and what it hears there.

Says: its registry record (renewed), its load (after changes, at most once per interval, and regularly when
idle), each lease whose KV it has proven. Hears: cancellations, completed reads of its own leases, workers that
left. Nothing here is needed to finish a request that is already admitted.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError

from weir.clock import Clock
from weir.errors import Unavailable, WeirError
from weir.events import subjects
from weir.events.bus import Event, EventBus
from weir.events.registry import ChangeKind, Registry, RegistryChange
from weir.events.sequence import SequenceCounter
from weir.ids import RequestKey, WorkerKey
from weir.kvcache.blocks import KvChanges
from weir.rpc.v1 import common_pb2, events_pb2

_log = logging.getLogger(__name__)

MAX_HASHES_PER_EVENT = 2_000


class Announcer:
    """``record()`` and ``load()`` give what to publish now; ``on_report`` is called before each load report.

    ``on_end`` hears of each of its tasks that ends.
    """

    def __init__(
        self,
        worker: WorkerKey,
        bus: EventBus,
        registry: Registry,
        clock: Clock,
        *,
        record: Callable[[], events_pb2.WorkerRecord],
        load: Callable[[], common_pb2.WorkerLoad],
        heartbeat_s: float,
        load_report_s: float,
        on_report: Callable[[], None] = lambda: None,
        on_end: Callable[[asyncio.Task[None]], None] = lambda task: None,
    ) -> None:
        self._worker = worker
        self._bus = bus
        self._registry = registry
        self._clock = clock
        self._record = record
        self._load = load
        self._heartbeat_s = heartbeat_s
        self._load_report_s = load_report_s
        self._on_report = on_report
        self._on_end = on_end
        self._load_changed = asyncio.Event()
        self._record_changed = asyncio.Event()
        self._numbers: dict[str, SequenceCounter] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def subscribe(
        self,
        *,
        on_cancel: Callable[[str, int, str], None],
        on_completed: Callable[[RequestKey, int], None],
        on_peer_gone: Callable[[WorkerKey], None],
    ) -> None:
        """Hear cancellations, completions of own leases, and of workers that left; active on return."""

        def cancelled(event: Event) -> None:
            message = events_pb2.CancelEvent.FromString(event.payload)
            on_cancel(message.request_id, message.attempt, message.reason or "cancelled by event")

        def completed(event: Event) -> None:
            message = events_pb2.TransferCompletedEvent.FromString(event.payload)
            if message.source_incarnation == self._worker.incarnation:
                on_completed(RequestKey(message.request_id, message.attempt), message.lease_id)

        def changed(change: RegistryChange) -> None:
            if change.kind is ChangeKind.GONE and change.previous is not None:
                on_peer_gone(WorkerKey(change.worker_id, change.previous.incarnation))

        await self._bus.subscribe(subjects.ALL_CANCELS, _tolerant(cancelled))
        await self._bus.subscribe(subjects.transfer_subject(self._worker.worker_id), _tolerant(completed))
        await self._registry.watch(changed)

    async def start(self) -> None:
        """Put the record into the registry and keep it there; begin to report load."""
        await self._registry.put(self._record())
        self._tasks = [
            asyncio.create_task(self._keep_registered(), name="registry-heartbeat"),
            asyncio.create_task(self._report_loads(), name="load-reports"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_end)

    async def stop(self) -> None:
        """Leave the registry and say no more. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        with contextlib.suppress(Unavailable):
            await self._registry.delete(self._worker.worker_id, self._worker.incarnation)
        if self._sending:
            await asyncio.gather(*self._sending, return_exceptions=True)

    async def publish_record(self) -> None:
        """Tell of a change (role, drain) at once; a lost one is made good by the next heartbeat."""
        try:
            await self._registry.put(self._record())
        except Unavailable as error:
            _log.warning("registry: %s", error)

    def record_changed(self) -> None:
        """Publish the record now and not with the next heartbeat, unless the worker has left already."""
        self._record_changed.set()

    def load_changed(self) -> None:
        """A step was made: report within the interval."""
        self._load_changed.set()

    def transfer_completed(self, key: RequestKey, lease_id: int, source: WorkerKey) -> None:
        """Tell the owner of a lease that its KV was read and proven."""
        message = events_pb2.TransferCompletedEvent(
            origin=self._origin("transfer"),
            request_id=key.request_id,
            attempt=key.attempt,
            lease_id=lease_id,
            source_worker_id=source.worker_id,
            source_incarnation=source.incarnation,
        )
        subject = subjects.transfer_subject(source.worker_id)
        name = subjects.message_id(key.request_id, key.attempt, f"transfer-{lease_id}")
        self._send(subject, message.SerializeToString(), name)

    def kv_changed(self, changes: KvChanges) -> None:
        """Tell which blocks became findable or ceased to be."""
        if changes.overflowed:
            # Some were dropped: use up a number, so that listeners notice the gap and ask.
            self._origin("kv")
        stored, removed = list(changes.stored), list(changes.removed)
        while stored or removed:
            room = MAX_HASHES_PER_EVENT
            message = events_pb2.KvBlocksEvent(origin=self._origin("kv"), removed=removed[:room])
            room -= len(message.removed)
            message.stored.extend(stored[:room])
            removed, stored = removed[len(message.removed) :], stored[room:]
            self._send(subjects.kv_subject(self._worker.worker_id), message.SerializeToString(), None)

    # -- inside -----------------------------------------------------------------------------------------

    async def _keep_registered(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._record_changed.wait()
            self._record_changed.clear()
            await self.publish_record()

    async def _report_loads(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._load_changed.wait()
            self._load_changed.clear()
            self._on_report()
            record = self._record()
            message = events_pb2.LoadEvent(
                origin=self._origin("load"), role=record.role, draining=record.draining, load=self._load()
            )
            await self._bus.publish(subjects.load_subject(self._worker.worker_id), message.SerializeToString())
            await asyncio.sleep(self._load_report_s)

    def _send(self, subject: str, payload: bytes, msg_id: str | None) -> None:
        task = asyncio.ensure_future(self._bus.publish(subject, payload, msg_id=msg_id))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _origin(self, family: str) -> events_pb2.EventOrigin:
        number = self._numbers.setdefault(family, SequenceCounter()).next()
        return events_pb2.EventOrigin(
            publisher_id=self._worker.worker_id,
            incarnation=self._worker.incarnation,
            sequence=number,
            unix_s=self._clock.unix_s(),
        )


def _tolerant(handler: Callable[[Event], None]) -> Callable[[Event], None]:
    """Events come from outside: what cannot be read is logged and dropped."""

    def guarded(event: Event) -> None:
        try:
            handler(event)
        except (DecodeError, WeirError) as error:
            _log.warning("event on %s dropped: %s", event.subject, error)

    return guarded
