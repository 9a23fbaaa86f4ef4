"""The queue of events: virtual time moves from one to the next."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

Action = Callable[[Any], None]


class EventQueue:
    """Events in order of time, those of one moment in the order in which they were added."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.handled = 0
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._added = 0

    def at(self, when_s: float, action: Action, subject: Any) -> None:
        """Call ``action(subject)`` at ``when_s``, which is not in the past."""
        assert when_s >= self.now_s, (when_s, self.now_s)
        self._added += 1
        heapq.heappush(self._heap, (when_s, self._added, action, subject))

    def run(self, until_s: float = math.inf) -> None:
        """Handle all events up to ``until_s``; time then stands at the last one, or at a finite ``until_s``."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action, subject = pop(heap)
            self.handled += 1
            action(subject)
        if until_s != math.inf:
            self.now_s = max(self.now_s, until_s)

    @property
    def next_s(self) -> float:
        """When the next event is; inf when there is none."""
        return self._heap[0][0] if self._heap else math.inf
