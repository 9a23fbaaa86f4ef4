"""Follows the registry, load reports, cancellations and decisions on the bus, and keeps the fleet up to date by them.

When the bus is away nothing is forgotten: the fleet is marked stale and served from as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from weir.balance.profile import Fit, Profile
from weir.errors import InvalidArgument
from weir.events.bus import Event, EventBus, Subscription
from weir.events.registry import ChangeKind, Registry, RegistryChange
from weir.events.sequence import GapDetector, Order
from weir.events.subjects import ALL_CANCELS, ALL_KV, ALL_LOADS, DECISION
from weir.ids import WorkerKey
from weir.rpc.convert import fingerprint_from_pb, role_from_pb
from weir.rpc.v1 import common_pb2, events_pb2, kv_pb2
from weir.services.router.advice import Advice
from weir.services.router.fleet import Load, WorkerInfo

_log = logging.getLogger(__name__)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


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

    def blocks_changed(self, worker: WorkerKey, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Blocks became findable in a worker's cache, or ceased to be."""
        ...

    def blocks_unknown(self, worker: WorkerKey) -> None:
        """Some of a worker's changes were lost: what is known of its cache may be wrong."""
        ...

    def cancel_seen(self, request_id: str, reason: str) -> None:
        """Somebody wants a request to be stopped everywhere."""
        ...

    def advised(self, advice: Advice) -> None:
        """The balance controller decided something."""
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
        heartbeat_s=record.heartbeat_s,
        kv_bytes_per_token=kv_bytes_per_token(record.fingerprint),
        profile=profile_of(record),
        revision=revision_of(record.fingerprint),
    )


def revision_of(fingerprint: kv_pb2.KvFingerprint) -> str:
    """What its answers depend on; how its KV is laid out is not of it."""
    parts = (
        fingerprint.weights,
        fingerprint.architecture,
        fingerprint.dtype,
        fingerprint.kv_dtype,
        fingerprint.tokenizer,
        fingerprint.adapter,
        fingerprint.rope,
    )
    return "/".join(parts) if any(parts) else ""


def profile_of(record: events_pb2.WorkerRecord) -> Profile | None:
    """The profile that a worker publishes; None when there is none, or one that cannot be right."""
    if not record.HasField("profile"):
        return None
    found = record.profile
    fits = []
    for coefficients, count in ((found.prefill_s, 3), (found.step_s, 3), (found.read_s, 2)):
        values = tuple(coefficients)
        if len(values) != count or not all(0.0 <= value < math.inf for value in values) or not any(values):
            _log.warning("profile of %s ignored: %s", record.worker_id, values)
            return None
        fits.append(Fit(values, 0.0, 0.0, 0))
    prefill, step, read = fits
    return Profile(
        fingerprint_from_pb(record.fingerprint).digest().hex(), found.device, found.threads, prefill, step, read
    )


def kv_bytes_per_token(fingerprint: kv_pb2.KvFingerprint) -> float:
    """Bytes of KV that one token takes, of all layers: 2 * layers * kv_heads * head_dim * bytes."""
    width = DTYPE_BYTES.get(fingerprint.kv_dtype, 2)
    return 2.0 * fingerprint.layers * fingerprint.kv_heads * fingerprint.head_dim * width


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
        used_blocks=blocks.used,
        generated_tokens=report.generated_tokens,
        prefilled_tokens=report.prefilled_tokens,
        routers=max(1, report.routers),
        report=report,
    )


def advice_of(event: events_pb2.DecisionEvent) -> Advice:
    """A decision as routers heed it; how long it lasts is told by the clock of who decided, not by this one."""
    origin, lasts_s = event.origin, event.expires_unix_s - event.origin.unix_s
    standing = event.action in (events_pb2.BALANCE_ACTION_LOCAL_PREFILL, events_pb2.BALANCE_ACTION_BACK_PRESSURE)
    return Advice(
        publisher=origin.publisher_id,
        incarnation=origin.incarnation,
        sequence=origin.sequence,
        number=event.number,
        lasts_s=lasts_s if standing and math.isfinite(lasts_s) else 0.0,
        epochs=event.epochs,
        local_share=event.local_share,
        admit_per_s=event.admit_per_s or math.inf,
        dry_run=event.dry_run,
    )


class FleetView:
    """``open`` once; ready when it returns. ``close`` once."""

    def __init__(self, owner: ViewOwner, registry: Registry, bus: EventBus) -> None:
        self._owner = owner
        self._registry = registry
        self._bus = bus
        self._loads = GapDetector()
        self._caches = GapDetector()
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        """Subscribe and read the registry. Raises Unavailable when that is not confirmed."""
        self._subscriptions.append(await self._bus.subscribe(ALL_LOADS, self._guarded(self._on_load)))
        self._subscriptions.append(await self._bus.subscribe(ALL_KV, self._guarded(self._on_blocks)))
        self._subscriptions.append(await self._bus.subscribe(ALL_CANCELS, self._guarded(self._on_cancel)))
        self._subscriptions.append(await self._bus.subscribe(DECISION, self._guarded(self._on_decision)))
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
            self._caches.forget(change.worker_id)
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

    def _on_blocks(self, event: Event) -> None:
        message = events_pb2.KvBlocksEvent.FromString(event.payload)
        origin = message.origin
        worker = WorkerKey(origin.publisher_id, origin.incarnation)
        order = self._caches.observe(origin.publisher_id, origin.incarnation, origin.sequence)
        if order is Order.DUPLICATE:
            return
        if order is Order.GAP:
            self._owner.blocks_unknown(worker)
        self._owner.blocks_changed(worker, message.stored, message.removed)

    def _on_cancel(self, event: Event) -> None:
        message = events_pb2.CancelEvent.FromString(event.payload)
        self._owner.cancel_seen(message.request_id, message.reason)

    def _on_decision(self, event: Event) -> None:
        self._owner.advised(advice_of(events_pb2.DecisionEvent.FromString(event.payload)))

    @staticmethod
    def _guarded(handler: Callable[[Event], None]) -> Callable[[Event], None]:
        def handle(event: Event) -> None:
            try:
                handler(event)
            except DecodeError:
                _log.warning("event on %s is not what it should be", event.subject)

        return handle
