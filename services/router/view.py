"""Follows the registry, load reports and cancellations on the bus, and keeps the fleet up to date by them.

When the bus is away nothing is forgotten: the fleet is marked stale and served from as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from google.protobuf.message import DecodeError

from weir.errors import InvalidArgument
from weir.events.bus import Event, EventBus, Subscription
from weir.events.registry import ChangeKind, Registry, RegistryChange
from weir.events.sequence import GapDetector, Order
from weir.events.subjects import ALL_CANCELS, ALL_LOADS
from weir.ids import WorkerKey
from weir.rpc.convert import fingerprint_from_pb, role_from_pb
from weir.rpc.v1 import common_pb2, events_pb2
from weir.services.router.fleet import Load, WorkerInfo

_log = logging.getLogger(__name__)


class ViewOwner(Protocol):
    """Who is told what the view sees. Called on the event loop; must not block."""

    def worker_listed(self, info: WorkerInfo, record: events_pb2.WorkerRecord) -> None:
        """A worker is there, or something about it changed."""
        ...

    def worker_gone(self, worker: WorkerKey) -> None:
        """A worker left the registry, or its entry expired."""
        ...

    def load_reported(self, worker: WorkerKey, load: Load) -> None:
        """A worker said how loaded it is."""
        ...

    def cancel_seen(self, request_id: str, reason: str) -> None:
        """Somebody wants a request to be stopped everywhere."""
        ...

    def stale_changed(self, stale: bool) -> None:
        """The registry became unreachable, or reachable again."""
        ...


def info_of(record: events_pb2.WorkerRecord) -> WorkerInfo:
    """A registry entry as the fleet wants it. Raises InvalidArgument for an entry without a role."""
    return WorkerInfo(
        key=WorkerKey(record.worker_id, record.incarnation),
        role=role_from_pb(record.role),
        role_epoch=record.role_epoch,
        address=record.address,
        draining=record.draining,
        model=record.model,
        fingerprint=fingerprint_from_pb(record.fingerprint).digest(),
        block_size=record.block_size,
        num_blocks=record.num_blocks,
        context_tokens=record.context_tokens,
        model_path=record.model_path,
        max_running=record.max_running,
    )


def load_of(report: common_pb2.WorkerLoad) -> Load:
    """A load report as the fleet wants it; cached blocks count as free, they can be evicted."""
    blocks = report.blocks
    return Load(
        sequence=report.sequence,
        running=report.running,
        waiting=report.waiting,
        pending_prefill_tokens=report.pending_prefill_tokens,
        free_blocks=blocks.free + blocks.cached,
        total_blocks=blocks.total,
        decode_step_ms=report.decode_step_ms,
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        report=report,
    )


class FleetView:
    """``open`` once; ready when it returns. ``close`` once."""

    def __init__(self, owner: ViewOwner, registry: Registry, bus: EventBus) -> None:
        self._owner = owner
        self._registry = registry
        self._bus = bus
        self._loads = GapDetector()
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        """Subscribe and read the registry. Raises Unavailable when that is not confirmed."""
        self._subscriptions.append(await self._bus.subscribe(ALL_LOADS, self._guarded(self._on_load)))
        self._subscriptions.append(await self._bus.subscribe(ALL_CANCELS, self._guarded(self._on_cancel)))
        await self._registry.watch(self._on_change)
        self._owner.stale_changed(self._registry.stale)

    async def close(self) -> None:
        """Unsubscribe."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()

    def _on_change(self, change: RegistryChange) -> None:
        if change.kind is ChangeKind.PUT:
            assert change.record is not None
            try:
                info = info_of(change.record)
            except InvalidArgument as error:
                _log.warning("registry entry of %s ignored: %s", change.worker_id, error)
                return
            self._owner.worker_listed(info, change.record)
        elif change.kind is ChangeKind.GONE:
            assert change.previous is not None
            self._loads.forget(change.worker_id)
            self._owner.worker_gone(WorkerKey(change.worker_id, change.previous.incarnation))
        else:
            self._owner.stale_changed(change.kind is ChangeKind.STALE)

    def _on_load(self, event: Event) -> None:
        message = events_pb2.LoadEvent.FromString(event.payload)
        origin = message.origin
        order = self._loads.observe(origin.publisher_id, origin.incarnation, origin.sequence)
        if order is not Order.DUPLICATE:
            # A gap needs no repair here: each report is whole, the newest one counts.
            self._owner.load_reported(WorkerKey(origin.publisher_id, origin.incarnation), load_of(message.load))

    def _on_cancel(self, event: Event) -> None:
        message = events_pb2.CancelEvent.FromString(event.payload)
        self._owner.cancel_seen(message.request_id, message.reason)

    @staticmethod
    def _guarded(handler: Callable[[Event], None]) -> Callable[[Event], None]:
        def handle(event: Event) -> None:
            try:
                handler(event)
            except DecodeError:
                _log.warning("event on %s is not what it should be", event.subject)

        return handle
