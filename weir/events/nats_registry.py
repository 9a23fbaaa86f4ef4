"""The worker registry in a NATS key-value bucket with a time to live.

The server deletes silent workers' records without telling anyone, so each view keeps its own times: a worker
that was not heard of for the time to live is looked up once, and is gone when nothing newer is there. While the
connection is away nothing expires: the silence is the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import nats.errors
import nats.js.errors
from google.protobuf.message import DecodeError

from weir.clock import Clock
from weir.errors import InvalidArgument, Unavailable
from weir.events.nats_link import NATS_ERRORS, Backoff, NatsLink
from weir.events.registry import ChangeCallback, ChangeKind, RegistryChange
from weir.events.streams import MAX_RECORD_BYTES, ensure_stream, registry_stream
from weir.events.subjects import REGISTRY_BUCKET, check_token
from weir.events.view import RegistryView
from weir.rpc.v1.events_pb2 import WorkerRecord

_log = logging.getLogger(__name__)

_DELETIONS = frozenset({"DEL", "PURGE"})
MIN_WAIT_S = 0.01
CONSUMER_IDLE_S = 10.0
"""The server forgets the consumer of a watch that nobody listens to after this (5 minutes by default)."""


class _WatchBroken(Exception):
    """The server has something newer than the watch delivered."""


class NatsRegistry:
    """A Registry on a link. ``open`` creates the bucket; ``watch`` starts the view."""

    def __init__(self, link: NatsLink, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._ttl_s = link.config.registry_ttl_s
        self._view = RegistryView()
        self._revisions: dict[str, int] = {}
        self._stale = True
        self._synced = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._watching = False
        self._bucket: Any = None
        link.on_state_change(self._on_link)

    @classmethod
    async def open(cls, link: NatsLink, clock: Clock) -> NatsRegistry:
        """Make sure the bucket exists. Raises Unavailable when JetStream does not answer."""
        registry = cls(link, clock)
        try:
            await registry._ensure_bucket()
        except NATS_ERRORS as error:
            raise Unavailable(f"NATS at {link.config.url}: cannot create the registry: {error}") from None
        return registry

    @property
    def stale(self) -> bool:
        """See Registry; also true before the first ``watch`` is complete."""
        return self._stale

    async def put(self, record: WorkerRecord) -> None:
        """See Registry."""
        key = check_token("worker_id", record.worker_id)
        value = record.SerializeToString()
        if len(value) > MAX_RECORD_BYTES // 2:
            raise InvalidArgument("worker record bytes", len(value), f"at most {MAX_RECORD_BYTES // 2}")
        self._need_link()
        try:
            try:
                await self._bucket.put(key, value)
            except nats.js.errors.NoStreamResponseError:
                # The server came back without its storage.
                await self._ensure_bucket()
                await self._bucket.put(key, value)
        except NATS_ERRORS as error:
            raise Unavailable(f"registry: {key} not written: {error or 'no answer'}") from None

    async def delete(self, worker_id: str, incarnation: int) -> None:
        """See Registry."""
        key = check_token("worker_id", worker_id)
        self._need_link()
        try:
            entry = await self._bucket.get(key)
            if WorkerRecord.FromString(entry.value).incarnation == incarnation:
                await self._bucket.delete(key, last=entry.revision)
        except (nats.js.errors.KeyNotFoundError, nats.js.errors.NoStreamResponseError, DecodeError):
            return
        except nats.js.errors.BadRequestError:
            return  # written again since it was read: another incarnation's
        except NATS_ERRORS as error:
            raise Unavailable(f"registry: {key} not deleted: {error or 'no answer'}") from None

    async def watch(self, on_change: ChangeCallback) -> None:
        """See Registry. Raises Unavailable when the view is not complete in the connection's timeout."""
        self._watching = True
        if self._follower is None:
            self._start()
        try:
            await asyncio.wait_for(self._synced.wait(), self._link.config.connect_timeout_s)
        except TimeoutError:
            raise Unavailable(f"registry at {self._link.config.url}: no complete view") from None
        self._view.add(on_change)

    def snapshot(self) -> Mapping[str, WorkerRecord]:
        """See Registry."""
        return self._view.snapshot()

    async def close(self) -> None:
        """See Registry; the link stays with its owner."""
        self._watching = False
        await self._stop()

    def _need_link(self) -> None:
        if not self._link.connected:
            raise Unavailable(f"registry: NATS at {self._link.config.url} is not connected")

    async def _ensure_bucket(self) -> None:
        jetstream = self._link.jetstream
        await ensure_stream(jetstream, registry_stream(self._link.config))
        self._bucket = await jetstream.key_value(REGISTRY_BUCKET)

    def _on_link(self, connected: bool) -> None:
        if not self._watching:
            return
        if self._follower is not None:
            self._follower.cancel()
            self._follower = None
        if connected:
            self._start()
        elif not self._stale:
            self._stale = True
            self._view.tell(RegistryChange(ChangeKind.STALE))

    def _start(self) -> None:
        self._follower = asyncio.get_running_loop().create_task(self._follow())

    async def _stop(self) -> None:
        if self._follower is not None:
            follower, self._follower = self._follower, None
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    async def _follow(self) -> None:
        backoff = Backoff(0.05, 2.0)
        self._view.touch_all(self._clock.monotonic_s())
        while not _given_up():
            try:
                await self._ensure_bucket()
                await self._follow_watch()
            except _WatchBroken as broken:
                _log.warning("registry watch missed %s; starting again", broken)
            except NATS_ERRORS as error:
                _log.debug("registry watch ended: %s", error or type(error).__name__)
            await asyncio.sleep(backoff.next_s())

    async def _follow_watch(self) -> None:
        """Apply what the watch delivers, and expire the silent, until something breaks."""
        watcher = await self._open_watch()
        complete = False
        try:
            while not _given_up():
                try:
                    entry = await watcher.updates(timeout=self._wait_s() if complete else self._ttl_s)
                except nats.errors.TimeoutError:
                    if not complete:
                        raise _WatchBroken("all that was there when it began") from None
                    await self._expire()
                    continue
                if entry is None:
                    complete = True
                    self._on_synced()
                else:
                    self._apply(entry)
                # Before the watch is complete, silence says nothing: the news may be on their way.
                if complete:
                    await self._expire()
        finally:
            with contextlib.suppress(*NATS_ERRORS):
                await watcher.stop()

    async def _open_watch(self) -> Any:
        """A new watch. One that is cancelled on its way is let through and then ended: nats-py would forget it, and its
        consumer would live as long as this process.
        """
        opening = asyncio.ensure_future(self._bucket.watchall(inactive_threshold=CONSUMER_IDLE_S))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            with contextlib.suppress(*NATS_ERRORS):
                await (await opening).stop()
            raise

    def _wait_s(self) -> float:
        expiry_s = self._view.next_expiry_s(self._ttl_s)
        if expiry_s is None:
            return self._ttl_s
        return max(MIN_WAIT_S, min(self._ttl_s, expiry_s - self._clock.monotonic_s()))

    def _on_synced(self) -> None:
        self._synced.set()
        if self._stale:
            self._stale = False
            self._view.tell(RegistryChange(ChangeKind.SYNCED))

    def _apply(self, entry: Any) -> None:
        self._revisions[entry.key] = entry.revision
        if entry.operation in _DELETIONS:
            self._revisions.pop(entry.key, None)
            self._view.remove(entry.key)
            return
        try:
            record = WorkerRecord.FromString(entry.value or b"")
        except DecodeError:
            _log.warning("registry entry %r is no worker record", entry.key)
            return
        if record.worker_id != entry.key:
            _log.warning("registry entry %r names worker %r", entry.key, record.worker_id)
            return
        self._view.put(record, self._clock.monotonic_s())

    async def _expire(self) -> None:
        """Remove workers that are silent here and have nothing newer on the server."""
        for worker_id in self._view.silent(self._clock.monotonic_s(), self._ttl_s):
            try:
                entry = await self._bucket.get(worker_id)
            except nats.js.errors.KeyNotFoundError:
                pass
            else:
                if entry.revision != self._revisions.get(worker_id):
                    raise _WatchBroken(worker_id)
            _log.info("worker %s was not renewed for %g s", worker_id, self._ttl_s)
            self._revisions.pop(worker_id, None)
            self._view.remove(worker_id)


def _given_up() -> bool:
    """Whether the running task was cancelled. To be asked: nats-py swallows a cancellation that meets it in a flush."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
