"""Role changes: who may begin one, and what became of it. Pure.

One change per worker at a time; an epoch older than the registry's is refused before the worker is asked. The
worker has the last word: its own epoch may be newer than what the registry shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from weir.errors import FailedPrecondition, NotFound
from weir.lifecycle import Role
from weir.rpc.v1.events_pb2 import WorkerRecord

MAX_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A change asked for. ``epoch`` is the one the worker is expected to have before it."""

    worker_id: str
    incarnation: int
    address: str
    role: Role
    epoch: int


@dataclass(frozen=True, slots=True)
class RoleChangeDone:
    """A change that was made; ``epoch`` is the one after it."""

    change: RoleChange
    epoch: int
    took_ms: float
    unix_s: float


class RoleLedger:
    """The changes under way, and the last ``most_kept`` that were made."""

    def __init__(self, most_kept: int) -> None:
        assert most_kept > 0, most_kept
        self._under_way: dict[str, RoleChange] = {}
        self.done: deque[RoleChangeDone] = deque(maxlen=most_kept)
        self.made = 0

    @property
    def under_way(self) -> int:
        """Number of changes begun and not ended."""
        return len(self._under_way)

    def begin(
        self, members: Mapping[str, WorkerRecord], worker_id: str, role: Role, *, expected_epoch: int
    ) -> RoleChange:
        """Open a change; ``expected_epoch`` 0 takes the registry's. Must be ended with ``end``.

        Raises NotFound for an unknown worker, FailedPrecondition for a stale epoch or a change under way.
        """
        record = members.get(worker_id)
        if record is None:
            raise NotFound("worker", worker_id, ", ".join(sorted(members)[:MAX_NAMES_SHOWN]) or "none")
        pending = self._under_way.get(worker_id)
        if pending is not None:
            raise FailedPrecondition(f"{worker_id} is being changed to {pending.role.value}")
        if expected_epoch and expected_epoch < record.role_epoch:
            raise FailedPrecondition(
                f"stale epoch: {worker_id} is at role epoch {record.role_epoch}, {expected_epoch} was expected"
            )
        epoch = expected_epoch or record.role_epoch
        change = RoleChange(worker_id, record.incarnation, record.address, role, epoch)
        self._under_way[worker_id] = change
        return change

    def end(self, change: RoleChange, done: RoleChangeDone | None) -> None:
        """Close a change; ``done`` None when it was not made."""
        closed = self._under_way.pop(change.worker_id)
        assert closed is change, (closed, change)
        if done is not None:
            self.done.append(done)
            self.made += 1
