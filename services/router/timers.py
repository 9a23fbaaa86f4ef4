"""When time alone changes a request. Pure: a heap of (due, request) that may hold items of ended requests."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from weir.services.router.entry import NEVER_S, Entry


class Timers:
    """Wakes requests. Waking early is harmless: whoever is woken looks at its own times."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._heap: list[tuple[float, str]] = []

    def watch(self, entry: Entry, due_s: float) -> None:
        """Wake ``entry`` at ``due_s``, which is one of its own times, or a moment worth another look."""
        if due_s == NEVER_S:
            return
        if len(self._heap) > 64 + 8 * len(self._entries):
            self._forget_ended()
        heapq.heappush(self._heap, (due_s, entry.request_id))

    def pop_due(self, now_s: float) -> Entry | None:
        """The next request to be woken by now, or None."""
        while self._heap and self._heap[0][0] <= now_s:
            _, request_id = heapq.heappop(self._heap)
            entry = self._entries.get(request_id)
            if entry is not None:
                return entry
        return None

    def next_due_s(self) -> float:
        """When to look again; may be early."""
        return self._heap[0][0] if self._heap else NEVER_S

    def _forget_ended(self) -> None:
        due = [(entry.next_due_s, request_id) for request_id, entry in self._entries.items()]
        self._heap = [item for item in due if item[0] != NEVER_S]
        heapq.heapify(self._heap)
