"""Requests that wait for a worker: fair between tenants, first come first served within one. Pure.

Higher priorities go first. Within a priority tenants share by deficit round robin (Shreedhar and Varghese): each
turn adds QUANTUM to a tenant's deficit, a request is served when the deficit covers its cost, so tenants that
always wait are served the same cost, give or take one quantum and one request, whatever their requests' sizes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

QUANTUM = 1_024
"""Cost (tokens) that one turn is worth."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request. ``order`` grows with arrival and is unique; ``cost`` in tokens, at least 1.

    ``work`` is the part of the cost that delays those behind it: tokens to prefill.
    """

    request_id: str
    tenant: str
    priority: int
    order: int
    cost: int
    work: int = 0


_Item = tuple[int, int, Waiting]


class _Level:
    """The tenants of one priority, in the order of their turns."""

    __slots__ = ("deficits", "tenants", "turns")

    def __init__(self) -> None:
        self.tenants: dict[str, list[_Item]] = {}
        self.deficits: dict[str, int] = {}
        self.turns: deque[str] = deque()


class FairQueue:
    """``put``, then ``head`` and ``serve`` it, or ``remove``. Each request is in it at most once."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        assert quantum > 0, quantum
        self._quantum = quantum
        self._waiting: dict[str, Waiting] = {}
        self._levels: dict[int, _Level] = {}
        self._counts: dict[str, int] = {}
        self._work: dict[str, int] = {}
        self._puts = 0
        self._number: dict[str, int] = {}
        """By request: which of the puts counts."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def of_tenant(self, tenant: str) -> int:
        """How many requests of ``tenant`` wait."""
        return self._counts.get(tenant, 0)

    def work_ahead(self, tenant: str, work: int) -> int:
        """Tokens that will be prefilled before a new request of ``tenant`` with ``work`` of its own, about.

        All that its tenant has waiting, and as much of each other tenant, or what that has.
        """
        own = self._work.get(tenant, 0)
        others = sum(min(each, own + work) for name, each in self._work.items() if name != tenant)
        return own + others

    def put(self, waiting: Waiting) -> None:
        """Add a request; one that comes back with its old ``order`` gets its old place in its tenant's row."""
        assert waiting.request_id not in self._waiting, waiting.request_id
        assert waiting.cost >= 1, waiting.cost
        self._waiting[waiting.request_id] = waiting
        self._counts[waiting.tenant] = self._counts.get(waiting.tenant, 0) + 1
        self._work[waiting.tenant] = self._work.get(waiting.tenant, 0) + waiting.work
        level = self._levels.setdefault(waiting.priority, _Level())
        row = level.tenants.get(waiting.tenant)
        if row is None:
            row = level.tenants[waiting.tenant] = []
            level.deficits[waiting.tenant] = 0
            level.turns.append(waiting.tenant)
        self._puts += 1
        self._number[waiting.request_id] = self._puts
        heapq.heappush(row, (waiting.order, self._puts, waiting))
        if len(row) > 2 * self._counts[waiting.tenant] + 64:
            row[:] = [item for item in row if self._is_waiting(item)]
            heapq.heapify(row)

    def remove(self, request_id: str) -> bool:
        """Take a request out, wherever it is; whether it was there."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return False
        del self._number[request_id]
        left = self._counts[waiting.tenant] - 1
        if left:
            self._counts[waiting.tenant] = left
            self._work[waiting.tenant] -= waiting.work
        else:
            del self._counts[waiting.tenant], self._work[waiting.tenant]
        return True

    def head(self) -> Waiting | None:
        """Whose turn it is; the same until something is put, removed or served."""
        while self._levels:
            priority = max(self._levels)
            found = self._turn(self._levels[priority])
            if found is not None:
                return found
            del self._levels[priority]
        return None

    def charge(self, head: Waiting) -> None:
        """The head is about to be served: its cost is taken from its tenant. Then ``remove`` it."""
        level = self._levels[head.priority]
        assert level.turns[0] == head.tenant, "only the head is served"
        level.deficits[head.tenant] -= head.cost

    def serve(self, head: Waiting) -> None:
        """``charge`` and ``remove``."""
        self.charge(head)
        self.remove(head.request_id)

    def _turn(self, level: _Level) -> Waiting | None:
        """The first request whose tenant can pay for it, giving out turns until one can."""
        while level.turns:
            tenant = level.turns[0]
            first = self._first(level.tenants[tenant])
            if first is None:
                # A tenant that has nothing to do saves nothing up.
                level.turns.popleft()
                del level.tenants[tenant], level.deficits[tenant]
                continue
            if level.deficits[tenant] >= first.cost:
                return first
            level.deficits[tenant] += self._rounds(level, first.cost) * self._quantum
            level.turns.rotate(-1)
        return None

    def _rounds(self, level: _Level, cost: int) -> int:
        """Turns given at once: several when a lone tenant needs them, as they would come one after another."""
        return -(-cost // self._quantum) if len(level.turns) == 1 else 1

    def _first(self, row: list[_Item]) -> Waiting | None:
        while row:
            if self._is_waiting(row[0]):
                return row[0][2]
            heapq.heappop(row)
        return None

    def _is_waiting(self, item: _Item) -> bool:
        """Whether it has not been removed (and perhaps put anew) since."""
        return self._number.get(item[2].request_id) == item[1]

    def check_integrity(self) -> None:
        """Assert that every waiting request is in exactly one row, and that counts agree."""
        found = [
            item[2].request_id
            for level in self._levels.values()
            for row in level.tenants.values()
            for item in row
            if self._is_waiting(item)
        ]
        assert sorted(found) == sorted(self._waiting)
        counts: dict[str, int] = {}
        for waiting in self._waiting.values():
            counts[waiting.tenant] = counts.get(waiting.tenant, 0) + 1
        assert counts == self._counts
