"""A registry's view: records by worker, when each was last heard of, and who wants to know. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from weir.events.registry import ChangeCallback, ChangeKind, RegistryChange
from weir.rpc.v1.events_pb2 import WorkerRecord

_log = logging.getLogger(__name__)


class RegistryView:
    """Turns puts, deletes and the passing of time into changes; renewals without news are no change."""

    def __init__(self) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._heard_s: dict[str, float] = {}
        self._callbacks: list[ChangeCallback] = []

    def add(self, on_change: ChangeCallback) -> None:
        """Tell ``on_change`` of every record now and of every change from now on."""
        for worker_id, record in list(self._records.items()):
            on_change(RegistryChange(ChangeKind.PUT, worker_id, record))
        self._callbacks.append(on_change)

    def snapshot(self) -> dict[str, WorkerRecord]:
        """Records by worker id, as a copy."""
        return dict(self._records)

    def put(self, record: WorkerRecord, now_s: float) -> None:
        """Note that ``record`` was written now."""
        worker_id = record.worker_id
        previous = self._records.get(worker_id)
        self._heard_s[worker_id] = now_s
        if previous == record:
            return
        if previous is not None and previous.incarnation != record.incarnation:
            self._gone(worker_id)
            self._heard_s[worker_id] = now_s
            previous = None
        self._records[worker_id] = record
        self.tell(RegistryChange(ChangeKind.PUT, worker_id, record, previous))

    def remove(self, worker_id: str) -> None:
        """Note that the record was deleted."""
        if worker_id in self._records:
            self._gone(worker_id)

    def replace(self, records: Mapping[str, WorkerRecord], now_s: float) -> None:
        """Make the view equal to ``records``, all heard of now."""
        for worker_id in self._records.keys() - records.keys():
            self._gone(worker_id)
        for record in records.values():
            self.put(record, now_s)

    def touch_all(self, now_s: float) -> None:
        """Count every worker as heard of now: silence of the server is not theirs."""
        self._heard_s = dict.fromkeys(self._records, now_s)

    def silent(self, now_s: float, ttl_s: float) -> list[str]:
        """Workers not heard of for ``ttl_s``."""
        return [worker_id for worker_id, heard_s in self._heard_s.items() if now_s - heard_s >= ttl_s]

    def next_expiry_s(self, ttl_s: float) -> float | None:
        """When the next record expires unless renewed; None when there is none."""
        return min(self._heard_s.values()) + ttl_s if self._heard_s else None

    def tell(self, change: RegistryChange) -> None:
        """Pass ``change`` to every watcher; what one raises is logged and harms nobody else."""
        for callback in list(self._callbacks):
            try:
                callback(change)
            except Exception:
                _log.exception("registry watcher failed on %s of %s", change.kind.value, change.worker_id)

    def _gone(self, worker_id: str) -> None:
        self._heard_s.pop(worker_id, None)
        previous = self._records.pop(worker_id)
        self.tell(RegistryChange(ChangeKind.GONE, worker_id, None, previous))
