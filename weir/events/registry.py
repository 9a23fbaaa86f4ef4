"""The seam to the worker registry. Twins: ``memory`` and ``nats_registry``."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from weir.rpc.v1.events_pb2 import WorkerRecord


class ChangeKind(enum.Enum):
    """What happened to a worker's record."""

    PUT = "put"
    GONE = "gone"
    STALE = "stale"
    SYNCED = "synced"


@dataclass(frozen=True, slots=True)
class RegistryChange:
    """PUT: ``record`` is new or differs from ``previous``. GONE: deleted or expired; ``previous`` was last.

    STALE and SYNCED concern the whole view and carry neither worker nor record. A renewal that changes nothing
    is no change. A worker that restarts gives GONE for the old incarnation, then PUT for the new one.
    """

    kind: ChangeKind
    worker_id: str = ""
    record: WorkerRecord | None = None
    previous: WorkerRecord | None = None


ChangeCallback = Callable[[RegistryChange], None]


class Registry(Protocol):
    """Who is there. Records are protobuf messages that nobody may modify after handing them over."""

    @property
    def stale(self) -> bool:
        """Whether the view is not current: no ``watch`` yet, or the connection is lost (it is kept as it was)."""
        ...

    async def put(self, record: WorkerRecord) -> None:
        """Write or renew the record; it is gone when not renewed within the time to live.

        Raises Unavailable when the server cannot be reached: try again at the next heartbeat.
        """
        ...

    async def delete(self, worker_id: str, incarnation: int) -> None:
        """Remove the record of this incarnation; nothing happens when another one has replaced it.

        Raises Unavailable when the server cannot be reached.
        """
        ...

    async def watch(self, on_change: ChangeCallback) -> None:
        """Keep the view current from now on; returns when it is complete, after a PUT for each worker.

        ``on_change`` is synchronous and must not block. Several watchers may be added.
        """
        ...

    def snapshot(self) -> Mapping[str, WorkerRecord]:
        """The view now, by worker id; a copy of the mapping. Empty before ``watch``."""
        ...

    async def close(self) -> None:
        """Stop watching. Records stay until deleted or expired. Idempotent."""
        ...
