"""Leases: which blocks of this worker are promised to a reader, and until when.

A lease is opened when a prompt is admitted for prefill and grows with each sealed chunk. It ends exactly once
for the reason that comes first; whoever ends it gets its blocks to unlease, everybody later gets nothing:

    open ─► extend* ─► READ_PROVEN | CANCELLED | SESSION_LOST | DEADLINE | SHUTDOWN | ROLE_CHANGE

The table owns no block: the caller leases in the block manager what ``extend`` accepted, and unleases what an
ending returned.
"""

import enum
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weir.errors import FailedPrecondition, ResourceExhausted
from weir.ids import RequestKey

MAX_LEASES = 1 << 14
MAX_REMEMBERED = 1 << 14

Ended = list[tuple[int, list[int]]]
"""(lease id, its blocks to unlease) of each lease that a call ended."""


class LeaseEnd(enum.Enum):
    """Why a lease ended; the label of ``weir_leases_ended_total``."""

    READ_PROVEN = "read_proven"
    CANCELLED = "cancelled"
    SESSION_LOST = "session_lost"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    ROLE_CHANGE = "role_change"


@dataclass(slots=True)
class _Lease:
    key: RequestKey
    session: str
    deadline_unix_s: float
    blocks: list[int] = field(default_factory=list)


class LeaseTable:
    """All leases of one worker process. Single-threaded; lease ids are never used twice in an incarnation."""

    def __init__(self, max_leases: int = MAX_LEASES, max_remembered: int = MAX_REMEMBERED) -> None:
        assert max_leases >= 1, max_leases
        self._max_leases = max_leases
        self._max_remembered = max_remembered
        self._open: dict[int, _Lease] = {}
        self._by_session: dict[str, dict[int, None]] = {}
        self._by_request: dict[str, dict[int, None]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._ended: OrderedDict[int, LeaseEnd] = OrderedDict()
        self._next_id = 1
        self._blocks_held = 0
        self.ended_total = dict.fromkeys(LeaseEnd, 0)

    @property
    def open_count(self) -> int:
        """Leases that have not ended."""
        return len(self._open)

    def blocks_held(self) -> int:
        """Blocks under open leases, counted once per lease."""
        return self._blocks_held

    def open(self, key: RequestKey, session: str, deadline_unix_s: float, blocks: Sequence[int] = ()) -> int:
        """A new lease on ``blocks`` for ``key``, bound to ``session``; returns its id.

        Raises ResourceExhausted at the bound, FailedPrecondition if ``key`` holds an open lease already.
        """
        if len(self._open) >= self._max_leases:
            raise ResourceExhausted(f"{len(self._open)} leases are open, the limit is {self._max_leases}")
        mine = self._by_request.setdefault(key.request_id, {})
        if any(self._open[other].key == key for other in mine):
            raise FailedPrecondition(f"request {key} holds a lease already")
        lease_id = self._next_id
        self._next_id += 1
        self._open[lease_id] = _Lease(key, session, deadline_unix_s)
        mine[lease_id] = None
        self._by_session.setdefault(session, {})[lease_id] = None
        heapq.heappush(self._deadlines, (deadline_unix_s, lease_id))
        if blocks:
            self.extend(lease_id, blocks)
        return lease_id

    def extend(self, lease_id: int, blocks: Iterable[int]) -> bool:
        """Add ``blocks``; False, and nothing added, if the lease has ended: do not lease them then."""
        assert 0 < lease_id < self._next_id, f"lease {lease_id} was never opened"
        lease = self._open.get(lease_id)
        if lease is None:
            return False
        added = list(blocks)
        lease.blocks += added
        self._blocks_held += len(added)
        return True

    def renew(self, lease_id: int, deadline_unix_s: float) -> bool:
        """Let the lease end no earlier than ``deadline_unix_s``; False if it has ended. Never shortens it."""
        lease = self._open.get(lease_id)
        if lease is None:
            return False
        if deadline_unix_s > lease.deadline_unix_s:
            lease.deadline_unix_s = deadline_unix_s
            heapq.heappush(self._deadlines, (deadline_unix_s, lease_id))
            self._compact_deadlines()
        return True

    def blocks_of(self, lease_id: int) -> tuple[int, ...]:
        """Blocks under ``lease_id``; empty when it has ended."""
        lease = self._open.get(lease_id)
        return () if lease is None else tuple(lease.blocks)

    def is_open(self, lease_id: int) -> bool:
        """Whether the lease is alive."""
        return lease_id in self._open

    def was_ended(self, lease_id: int) -> bool:
        """Whether ``lease_id`` was opened here and has ended, however long ago."""
        return 0 < lease_id < self._next_id and lease_id not in self._open

    def end_reason(self, lease_id: int) -> LeaseEnd | None:
        """Why ``lease_id`` ended; None if it is open, unknown, or ended too long ago to be remembered."""
        return self._ended.get(lease_id)

    def end(self, lease_id: int, reason: LeaseEnd, key: RequestKey | None = None) -> list[int]:
        """End the lease; returns its blocks to unlease, or [] if it has ended or is unknown.

        ``key``: who says so, where that comes from a peer; the lease of another request is left alone.
        """
        lease = self._open.get(lease_id)
        if lease is None or (key is not None and lease.key != key):
            return []
        del self._open[lease_id]
        _discard(self._by_session, lease.session, lease_id)
        _discard(self._by_request, lease.key.request_id, lease_id)
        self._blocks_held -= len(lease.blocks)
        self.ended_total[reason] += 1
        self._remember(lease_id, reason)
        self._compact_deadlines()
        return lease.blocks

    def end_session(self, session: str, reason: LeaseEnd = LeaseEnd.SESSION_LOST) -> Ended:
        """End all leases bound to ``session``."""
        return self._end_all(self._by_session.get(session, {}), reason)

    def end_request(self, key: RequestKey, reason: LeaseEnd = LeaseEnd.CANCELLED) -> Ended:
        """End the lease of ``key`` and those of older attempts of its request."""
        ids = self._by_request.get(key.request_id, {})
        return self._end_all([one for one in ids if self._open[one].key.attempt <= key.attempt], reason)

    def end_everything(self, reason: LeaseEnd) -> Ended:
        """End all leases (shutdown, role change)."""
        return self._end_all(self._open, reason)

    def expire(self, now_unix_s: float) -> Ended:
        """End the leases whose deadline is before ``now_unix_s``."""
        due: list[int] = []
        while self._deadlines and self._deadlines[0][0] < now_unix_s:
            due.append(heapq.heappop(self._deadlines)[1])
        # A renewed lease has a later entry too; this one is of before.
        unique = dict.fromkeys(due)
        lapsed = [one for one in unique if one in self._open and self._open[one].deadline_unix_s < now_unix_s]
        return self._end_all(lapsed, LeaseEnd.DEADLINE)

    def next_deadline(self) -> float | None:
        """When ``expire`` is next worth calling (never too late), or None."""
        return self._deadlines[0][0] if self._deadlines else None

    def check_integrity(self) -> None:
        """Raises AssertionError when the indices and the leases disagree."""
        assert self._blocks_held == sum(len(lease.blocks) for lease in self._open.values())
        for index in (self._by_session, self._by_request):
            assert sorted(one for ids in index.values() for one in ids) == sorted(self._open), index
            assert all(index.values()), "an empty entry is kept"
        assert set(self._open) <= {lease_id for _, lease_id in self._deadlines}, "a lease has no deadline"
        assert len(self._ended) <= self._max_remembered

    def _end_all(self, lease_ids: Iterable[int], reason: LeaseEnd) -> Ended:
        alive = [lease_id for lease_id in lease_ids if lease_id in self._open]
        return [(lease_id, self.end(lease_id, reason)) for lease_id in alive]

    def _remember(self, lease_id: int, reason: LeaseEnd) -> None:
        self._ended[lease_id] = reason
        if len(self._ended) > self._max_remembered:
            self._ended.popitem(last=False)

    def _compact_deadlines(self) -> None:
        # Entries of ended and renewed leases stay until they come up; rebuild when they are the greater part.
        if len(self._deadlines) > 64 + 2 * len(self._open):
            self._deadlines = [(lease.deadline_unix_s, lease_id) for lease_id, lease in self._open.items()]
            heapq.heapify(self._deadlines)


def _discard(index: dict[str, dict[int, None]], name: str, lease_id: int) -> None:
    ids = index[name]
    del ids[lease_id]
    if not ids:
        del index[name]
